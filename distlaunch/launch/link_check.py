"""Measures the links between a job's nodes: runs the link probe instead of the ranks, on separate agents."""

import json
import os
from collections.abc import Callable, Mapping
from importlib.resources import files

from distlaunch.agent import messages
from distlaunch.check.findings import Report
from distlaunch.check.link_probe import TOTAL_S
from distlaunch.check.links import Peers, rows_in, verdict
from distlaunch.job.spec import JobSpec
from distlaunch.launch.addresses import answers, ask_addresses
from distlaunch.launch.agents import Agents, Ended, Place, start_of
from distlaunch.launch.node_check import hurried
from distlaunch.plan.placement import LaunchPlan, make_plan
from distlaunch.plan.workers import binding_of, meeting_of, worker_specs, workers
from distlaunch.wording import exit_words

_HELD = (messages.PortHeld, messages.PortRefused)
_ROUTES = (messages.RouteFound, messages.RouteFailed)


def check_links(spec: JobSpec, watch: Callable[[str], None]) -> Report:
    """Measure the links between the nodes of a job. `watch` gets the progress. Raises `DistlaunchError`."""
    if spec.mpirun.argv or spec.backend == "mpi":
        return _unchecked("mpirun starts the ranks")
    spec = hurried(spec)
    lookups = ask_addresses(spec)
    with Agents(spec) as agents:
        address = answers(lookups).get(0)
        if len(agents.present) < len(spec.nodes):
            return _unchecked("not all nodes can be reached")
        plan = _plan(spec, agents, address)
        peers = _peers(plan)
        if len(peers.labels) < 2:
            return _unchecked("one rank on one node has none")
        port = agents.ask({0: messages.HoldPort(spec.rendezvous.port, len(spec.port_names))}, _HELD).get(0)
        if not isinstance(port, messages.PortHeld):
            return _unchecked("the rendezvous port can't be used")
        starts = _starts(plan, peers, (port.port, *port.further), _routes(agents, plan))
        ends = agents.run(starts, TOTAL_S, lambda ends: _is_over(ends, peers, watch))
    ranks = {(part.node, rank - part.first_rank): rank for part in plan.nodes for rank in part.ranks}
    failed = {ranks[place]: why for place, end in ends.items() if (why := _failure(end))}
    if failure := agents.failures.get(0):
        failed[0] = f"the link test did not end: {failure.kind.value}"
    return verdict(peers, rows_in(ends[0, 0][1], len(peers.labels)), failed)


def _unchecked(why: str) -> Report:
    """Return the report of a check that isn't possible."""
    return Report((), {}, (), (f"links: {why}",))


def _plan(spec: JobSpec, agents: Agents, address: str | None) -> LaunchPlan:
    """Return the job's plan, with the link probe as its program and, without GPUs, one rank per node."""
    facts = agents.facts
    own = make_plan(spec, facts, address)
    several = own.backend == "nccl" or len(own.nodes) == 1
    procs = [part.torch_ranks or part.procs if several else 1 for part in own.nodes]
    plain = [node._replace(args=None, script=None, workdir=None) for node in spec.nodes]
    nodes = tuple(node._replace(procs=count) for node, count in zip(plain, procs, strict=True))
    program = spec.program._replace(kind="script", words=("-c",), args=(), placed=False, workdir="/")
    spec = spec._replace(rendezvous=spec.rendezvous._replace(etcd=None), stdin="none")
    return make_plan(spec._replace(nodes=nodes, program=program, backend=own.backend), facts, address)


def _peers(plan: LaunchPlan) -> Peers:
    """Return the nodes or, if there is only one, its ranks."""
    ranks = [tuple(part.ranks) for part in plan.nodes]
    if len(ranks) > 1:
        return Peers(tuple(part.label for part in plan.nodes), tuple(ranks), "node")
    return Peers(tuple(f"rank {rank}" for rank in ranks[0]), tuple((rank,) for rank in ranks[0]), "rank")


def _routes(agents: Agents, plan: LaunchPlan) -> Mapping[int, messages.RouteFound]:
    """Return the routes of nodes to MASTER_ADDR. The first node's leads to the address that others use."""
    if plan.one_machine:
        return {}
    first, *others = plan.members
    found = agents.ask(dict.fromkeys(others, messages.FindRoute(plan.master_addr)), _ROUTES)
    dialed = [route.address for route in found.values() if isinstance(route, messages.RouteFound)]
    found |= agents.ask({first: messages.FindRoute((dialed or [plan.master_addr])[0])}, _ROUTES)
    return {node: route for node, route in found.items() if isinstance(route, messages.RouteFound)}


def _starts(
    plan: LaunchPlan, peers: Peers, ports: tuple[int, ...], routes: Mapping[int, messages.RouteFound]
) -> dict[int, messages.StartWorkers]:
    """Return the commands that start the link probe as the ranks of `plan`, keyed by node."""
    source = files("distlaunch.check").joinpath("link_probe.py").read_text()
    order = sorted(range(len(peers.labels)), key=lambda peer: os.urandom(8))
    request = json.dumps({"backend": plan.backend, "peers": peers.ranks, "order": order})
    sources = [routes[node].source if node in routes else "127.0.0.1" for node in plan.members]
    meeting = meeting_of(plan, plan.spec.name, ports, sources=sources)
    starts = {}
    for part in plan.nodes:
        route = routes.get(part.node)
        planned = [
            each._replace(argv=(*each.argv, source, request))
            for each in workers(plan, part, meeting, route.interface if route else None)
        ]
        shared, specs = worker_specs(plan, part, planned, 0)
        start = start_of(plan.spec, shared, *specs)
        starts[part.node] = start._replace(binding=binding_of(plan.spec, part))
    return starts


def _is_over(ends: Mapping[Place, Ended], peers: Peers, watch: Callable[[str], None]) -> bool:
    """Report the progress, and return whether rank 0 has exited or a rank failed before all had joined."""
    end, printed = ends[0, 0]
    rows = rows_in(printed, len(peers.labels))
    watch(" ".join([rows[-1].test, *peers.named(rows[-1].peers)]) if rows else "starting")
    return end is not None or (not rows and any(map(_failure, ends.values())))


def _failure(ended: Ended) -> str:
    """Describe why a program failed; "" if it did not fail."""
    end, _ = ended
    if isinstance(end, messages.WorkerUnstarted):
        return f"the link test can't start: {end.text}"
    if end is None or not end.status:
        return ""
    words = end.words.strip().splitlines() or ["no output"]
    return f"the link test {exit_words(end.status)}: {words[-1][:200]}"
