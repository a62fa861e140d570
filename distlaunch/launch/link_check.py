"""Measures the links between a job's nodes, and finds slow and hanging nodes and pairs.

The link probe runs instead of the ranks, on separate agents.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from typing import Any

from distlaunch.agent import messages
from distlaunch.agent.frozen import Frozen
from distlaunch.check.findings import Finding, Report
from distlaunch.check.link_probe import BUDGET_S, JOIN_S, OWN_FAULT, TOTAL_S, pairings, slow_pairs, usual
from distlaunch.job.spec import JobSpec
from distlaunch.launch.addresses import answers, ask_addresses
from distlaunch.launch.agents import Agents, Ended, Place, start_of
from distlaunch.launch.node_check import hurried
from distlaunch.plan.placement import LaunchPlan, make_plan
from distlaunch.plan.workers import binding_of, meeting_of, worker_specs, workers
from distlaunch.wording import counted, exit_words

_HELD = (messages.PortHeld, messages.PortRefused)
Errors = Mapping[tuple[int, int], str]
"""The error of a measurement that failed, for each pair."""
Best = Mapping[tuple[int, int], float]
"""The best bandwidth of each pair. A single peer counts as a pair with itself."""
WHOLE = ("all-reduce", "send/recv")
_ABOUT = {
    "node": ("with every other {noun}", "check its cable, switch port, MTU and firewall, or leave it out"),
    "pair": ("between them", "check the path between them: switches, MTU and firewall"),
    "alone": ("among its own ranks", "check the GPUs, NVLink and PCIe or, without GPUs, the CPU load"),
}
HANG = "collectives will hang or fail"
SKIPPED = "links: all-reduce and send/recv of all, because not all links and ranks work"


class Row(Frozen):
    """One measurement among `peers` (indices). `busbw` is the bus bandwidth in GB/s, or 0 after an `error`.

    `test` is join, alone, pair, all-reduce or send/recv. `silent` are the ranks that did not answer.
    """

    test: str
    peers: tuple[int, ...]
    busbw: float
    error: str
    silent: tuple[int, ...]


class Peers(Frozen):
    """The peers of a test: their labels, the ranks of each, and the noun for a peer (node or rank)."""

    labels: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]
    noun: str

    def of(self, rank: int) -> str:
        """Return the label of the peer that `rank` belongs to."""
        return next((self.labels[i] for i, ranks in enumerate(self.ranks) if rank in ranks), "?")

    def named(self, members: Sequence[int]) -> tuple[str, ...]:
        """Return the labels of peers."""
        return tuple(self.labels[member] for member in members)


def check_links(spec: JobSpec, watch: Callable[[str], None]) -> Report:
    """Measure the links between a job's nodes. Report progress to `watch`. Raises `DistlaunchError`."""
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
    """Return the nodes' routes to MASTER_ADDR. The first node's leads to the address that the others use."""
    if plan.one_machine:
        return {}
    first, *others = plan.members
    found = agents.routes(others, plan.master_addr)
    dialed = next((route.address for route in found.values()), plan.master_addr)
    return found | agents.routes([first], dialed)


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
    """Report progress. Return whether rank 0 has exited, or another rank failed before all had joined."""
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


# The verdict


def rows_in(printed: bytes, peers: int) -> list[Row]:
    """Return the measurements in the output of rank 0. Skip other lines: libraries print, too."""
    rows = []
    for line in printed.split(b"\n")[:-1]:
        with suppress(TypeError, ValueError, RecursionError):
            row = Row(**json.loads(line))
            sound = {*map(type, [*row.peers, *row.silent])} == {int} and {*row.peers} <= {*range(peers)}
            if sound and row.peers and 0 <= row.busbw < math.inf:
                rows.append(row)
    return rows


def verdict(peers: Peers, rows: Sequence[Row], failures: Mapping[int, str]) -> Report:
    """Return the findings about links. `failures` contains the reasons why programs failed, by rank."""
    best, alone, whole = _best(rows, "pair"), _best(rows, "alone"), [row for row in rows if row.test in WHOLE]
    slow, median = slow_pairs(best), usual(best)
    errors = {(row.peers[0], row.peers[-1]): f": {row.error}" for row in rows if row.error}
    nodes = sorted({peer for pair in slow for peer in pair if _is_culprit(peer, best, slow)})
    findings = [
        *_silent(peers, rows, failures),
        *(_finding(peers, "node", [peer], best, errors) for peer in nodes),
        *(_finding(peers, "pair", pair, best, errors) for pair in slow if not {*nodes} & {*pair}),
        *(_finding(peers, "alone", pair[:1], alone, errors) for pair in slow_pairs(alone)),
    ]
    for row in whole:
        if not row.busbw and not _failed(findings):
            what = f"{row.test} across all {peers.noun}s fails, although all measured pairs work: {row.error}"
            option = "-H or, in an allocation, --set nodes=N" if peers.noun == "node" else "-n"
            do = f"to find the cause, repeat the check with fewer {peers.noun}s ({option})"
            if len(peers.labels) == 2:
                do = "run the job with NCCL_DEBUG=INFO to see which connection fails"
            findings.append(Finding("error", "links", what, HANG, do))
    table = tuple((" - ".join(peers.named(pair)), _speed(best[pair]), _speed(median)) for pair in slow)
    words = f"{counted(len(peers.labels), peers.noun)}, {counted(len(best), 'pair')}, median {_speed(median)}"
    words += "".join(f", {row.test} {_speed(row.busbw)}" for row in whole)
    fine = () if findings else (f"links ({words})",)
    measurements = [{**row._asdict(), "peers": peers.named(row.peers)} for row in rows]
    document = {"median": median, "measurements": measurements}
    planned = sum(map(len, pairings(range(len(peers.labels)))))
    skipped = [] if whole else [SKIPPED]
    if planned > len(best):
        why = "some ranks hang or don't answer" if _failed(findings) else f"time ran out after {BUDGET_S:g} s"
        skipped.append(f"links: {planned - len(best)} of {counted(planned, 'pair')}, because {why}")
    return Report(tuple(findings), {}, fine, tuple(skipped), table, document)


def _failed(findings: Sequence[Finding]) -> bool:
    return any(finding.level == "error" for finding in findings)


def _best(rows: Sequence[Row], test: str) -> dict[tuple[int, int], float]:
    """Return the best bandwidth of each pair (or peer alone) whose ranks all answered."""
    best: dict[tuple[int, int], float] = {}
    for row in rows:
        if row.test == test and not row.silent:
            ends = row.peers[0], row.peers[-1]
            best[ends] = max(best.get(ends, 0.0), row.busbw)
    return best


def _is_culprit(peer: int, best: Best, slow: Sequence[tuple[int, int]]) -> bool:
    """Return whether a peer has two or more links, all of them slow, while a link between others is good."""
    own = {pair for pair in best if peer in pair}
    return len(own) > 1 and own <= {*slow} and len(slow) < len(best)


def _finding(peers: Peers, about: str, ends: Sequence[int], best: Best, errors: Errors) -> Finding:
    """Return the finding that collectives among `ends` are slow or hang. `about` is a key of `_ABOUT`."""
    pairs = [pair for pair in best if {*ends} <= {*pair}]
    (where, do), value = _ABOUT[about], max(best[pair] for pair in pairs)
    do = do if peers.noun == "node" else _ABOUT["alone"][1]
    subject = f"an all-reduce {where.format(noun=peers.noun)}"
    if not value:
        error = next((errors[pair] for pair in pairs if pair in errors), "")
        if re.search(OWN_FAULT, error):  # not about the link
            what, why = f"{subject} fails{error}", "the link was not measured"
            return Finding("error", "links", what, why, "correct this, and check again", peers.named(ends))
        return Finding("error", "links", f"{subject} doesn't complete{error}", HANG, do, peers.named(ends))
    what = f"{subject} is slow: {_speed(value)}; the median is {_speed(usual(best))}"
    do = f"unless other jobs are using it now, {do}"
    return Finding("warning", "links", what, "every collective waits for it", do, peers.named(ends))


def _silent(peers: Peers, rows: Sequence[Row], failures: Mapping[int, str]) -> Iterator[Finding]:
    """Yield a finding for each reason why ranks did not join or later stopped answering."""
    late = f"did not join the link test within {JOIN_S:g} s"
    # Rank 0 prints the results. If there are none, any failure may be the reason.
    silent = {rank: late for rank in failures or ([] if rows else [0]) if not rank or not rows}
    for row in rows:
        for rank in row.silent:
            silent.setdefault(rank, late if row.test == "join" else "stopped answering in the link test")
    reasons = {rank: failures.get(rank, why) for rank, why in sorted(silent.items())}
    for what in dict.fromkeys(reasons.values()):
        labels = dict.fromkeys(peers.of(rank) for rank, why in reasons.items() if why == what)
        why, do = HANG, "check its load, GPUs and network"
        if what in failures.values():
            why, do = "the links were not measured", "correct this, and check again"
        yield Finding("error", "links", what, why, do, (*labels,))


def _speed(busbw: Any) -> str:
    return f"{busbw:.3g} GB/s" if busbw else "none"
