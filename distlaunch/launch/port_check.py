"""Checks a rendezvous port: whether it is free, which process holds it, and which nodes can connect to it.

During the test, the first node listens on the port. Every node and this machine connect to it at every
address of the host name. Only a reply with that listener's token counts as success. The connecting side never
sends anything, so any other service sees only a connection. Then the nodes of a job connect to each other, as
collectives do. Spares are left out: they may be down until they are needed.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from distlaunch.agent import messages
from distlaunch.here import runs_ranks
from distlaunch.job.spec import JobSpec, NodeSpec
from distlaunch.job.text import is_loopback
from distlaunch.launch.agents import Agents
from distlaunch.launch.start import check_allocation
from distlaunch.wording import listed

HERE = "here"
EVERY = 16
"""Maximum number of nodes for which every pair is tried. With more, each dials EVERY - 1 others."""
DIAL_S = 5.0


class Dial(NamedTuple):
    """One connection attempt, from a node (by name) or this machine ("here") to one address."""

    source: str
    address: str
    family: str
    ok: bool
    error: str | None


class Unasked(NamedTuple):
    """A node without an agent: the kind of failure, its last output, and advice."""

    node: str
    kind: str
    words: str
    advice: str


class Unreached(NamedTuple):
    """A node that could not connect to another one, and the address that it tried."""

    source: str
    target: str
    address: str
    error: str


class Pairs(NamedTuple):
    """The number of node pairs tried, the total number of pairs, and the failures."""

    tried: int
    of: int
    failed: tuple[Unreached, ...] = ()


class PortReport(NamedTuple):
    """The result for one port. `free` is None if the node for the port has no agent.

    `pairs` is None if there is only one machine or the port can't be used. `failures` lists the nodes without
    an agent. `here_counts` is set if failures on this machine matter. `spares` were not tested.
    `own_address` is one of the node's addresses if `host` turned out to be none, else "".
    """

    node: str
    host: str
    port: int | None
    free: bool | None
    owners: tuple[Any, ...] = ()
    error: str | None = None
    dials: tuple[Dial, ...] = ()
    failures: tuple[Unasked, ...] = ()
    here_counts: bool = False
    pairs: Pairs | None = None
    spares: tuple[str, ...] = ()
    own_address: str = ""

    @property
    def ok(self) -> bool:
        """Return whether a rendezvous would work on this port. This machine counts only if `here_counts`."""
        dials = [dial for dial in self.dials if self.here_counts or dial.source != HERE]
        failures = [one for one in self.failures if self.here_counts or one.node != HERE]
        connected = self.pairs is None or not self.pairs.failed
        return bool(self.free) and connected and not failures and all(dial.ok for dial in dials)

    def document(self) -> dict[str, Any]:
        """Return the report as a JSON document."""
        return {**messages.plain(self), "ok": self.ok}


def check_port(spec: JobSpec, host: str, port: int | None) -> PortReport:
    """Check `port` (None = any free port) on the first node of `spec`, which the others call `host`."""
    check_allocation(spec)
    tested = _with_here(spec._replace(membership=spec.membership._replace(spares=())), host)
    with Agents(tested) as agents:
        report = try_port(agents, spec, tested.nodes, host, port)
    unasked = []
    for index, failure in sorted(agents.failures.items()):
        node = tested.nodes[index]
        advice = node.reach.advice(failure, tested.program_of(node).python)
        unasked.append(Unasked(node.label, failure.kind.value, failure.words, advice))
    spares = tuple(node.label for node in spec.membership.spares)
    return report._replace(failures=tuple(unasked), here_counts=len(spec.nodes) == 1, spares=spares)


def try_port(
    agents: Agents, spec: JobSpec, nodes: Sequence[NodeSpec], host: str, port: int | None
) -> PortReport:
    """Check a port as `check_port` does, with `agents` on `nodes`, the first of which are those of `spec`.

    `distlaunch check` calls this with its own agents.
    """
    token = os.urandom(16).hex()
    report = _listening(agents, nodes[0].label, host, port, token)
    if report.free and report.port is not None:
        question = messages.DialAll(((host, report.port),), DIAL_S, token)
        answers = agents.ask(dict.fromkeys(agents.present, question), (messages.Dialed,))
        report = report._replace(dials=tuple(_dials(nodes, answers)))
        if not spec.one_machine and len(spec.nodes) > 1:
            labels = [node.label for node in spec.nodes]
            routes = agents.routes([node for node in agents.present if node < len(labels)], host)
            answered = any(dial.ok and dial.source == nodes[0].label for dial in report.dials)
            own = "" if answered else _own_address(routes.get(0))
            report = report._replace(pairs=_try_pairs(agents, labels, routes, own, token), own_address=own)
    return report


def _own_address(route: messages.RouteFound | None) -> str:
    """Return the source address of the first node's route to its own host name, if that leads elsewhere."""
    found = route.source if route and route.source != route.address else None
    return "" if not found or is_loopback(found) else found


def _with_here(spec: JobSpec, host: str) -> JobSpec:
    """Return `spec` with this machine as one more node.

    This machine is not added if it is already a node, if no agent can run on it, or if `host` is a loopback
    name, which would refer to this machine itself.
    """
    if any(node.local for node in spec.nodes) or is_loopback(host) or not runs_ranks():
        return spec
    # The job's interpreter is for its own nodes.
    nodes = [node._replace(python=spec.program_of(node).python) for node in spec.nodes]
    return spec._replace(nodes=(*nodes, NodeSpec(HERE)), program=spec.program._replace(python=None))


def _listening(agents: Agents, node: str, host: str, port: int | None, token: str) -> PortReport:
    """Make the first node listen on the port. Return a report on whether it does."""
    match agents.ask({0: messages.Listen(port, token)}, (messages.Listening, messages.PortRefused)).get(0):
        case messages.Listening() as answer:
            return PortReport(node, host, answer.port, True)
        case messages.PortRefused() as answer:
            return PortReport(node, host, port, False, tuple(answer.owners), answer.error)
    return PortReport(node, host, port, None)


def _dials(nodes: Sequence[NodeSpec], answers: Mapping[int, messages.Dialed]) -> Iterator[Dial]:
    """Yield the results of nodes that dialed one target, one result for each of the target's addresses."""
    for index, answer in sorted(answers.items()):
        for each in chain(*answer.results):
            yield Dial(nodes[index].label, each.address, each.family, each.error is None, each.error)


# Pairs: like gloo and NCCL, a node dials another at the address that the other uses on its route to the first
# node, and at a port from the same range.


def partners(count: int) -> dict[int, list[int]]:
    """Return the nodes that each of `count` nodes dials: all others, or some at even distances."""
    each = min(count, EVERY) - 1
    steps = [1 + k * (count - 1) // each for k in range(each)]
    return {node: [(node + step) % count for step in steps] for node in range(count)}


def _try_pairs(
    agents: Agents, labels: Sequence[str], routes: Mapping[int, messages.RouteFound], own: str, token: str
) -> Pairs:
    """Test pairs of the first nodes of `agents`, which have these `labels` and routes to the first of them.

    `own` is `PortReport.own_address`.
    """
    count = len(labels)
    ends = _ends(agents, routes, own, token)
    wanted = {
        source: [target for target in targets if target in ends]
        for source, targets in partners(count).items()
        if source in agents.present
    }
    questions = {
        source: messages.DialAll(tuple(ends[target] for target in targets), DIAL_S, token)
        for source, targets in wanted.items()
    }
    answers = agents.ask(questions, (messages.Dialed,))
    failed = [
        Unreached(labels[source], labels[target], ends[target][0], error)
        for source, answer in sorted(answers.items())
        for target, dials in zip(wanted[source], answer.results, strict=False)
        if (error := _error(dials))
    ]
    return Pairs(sum(len(wanted[source]) for source in answers), count * (count - 1), tuple(failed))


def _ends(
    agents: Agents, routes: Mapping[int, messages.RouteFound], own: str, token: str
) -> dict[int, tuple[str, int]]:
    """Make nodes listen for each other. Return the address and port of each node that can.

    A node's address is the source address of its route to the first node. The first node's address is the one
    to which these routes lead, or else its `own`.
    """
    addresses = {node: route.source for node, route in routes.items() if node and route.source}
    if dialed := [route.address for node, route in routes.items() if node]:
        addresses[0] = own or dialed[0]
    # Port 0: the system chooses, as for collectives; a firewall may allow only that range.
    listen = dict.fromkeys(addresses, messages.Listen(0, token))
    answers = agents.ask(listen, (messages.Listening, messages.PortRefused))
    ports = {node: answer.port for node, answer in answers.items() if isinstance(answer, messages.Listening)}
    return {node: (addresses[node], port) for node, port in ports.items()}


def _error(dials: Sequence[messages.Dial]) -> str:
    """Return the first error of the connection attempts to a target, or "" if all succeeded."""
    failed = [each.error for each in dials if each.error is not None]
    return (failed or ["" if dials else "no answer"])[0]


def folded(failed: Sequence[Unreached]) -> list[str]:
    """Return the failures, grouped by target or source into as few lines as possible."""
    left, lines = list(failed), []
    while left:
        groups: dict[tuple[bool, str, str], list[Unreached]] = {}
        for each in left:
            groups.setdefault((True, each.target, each.error), []).append(each)
            groups.setdefault((False, each.source, each.error), []).append(each)
        by_target, name, error = max(groups, key=lambda key: len(groups[key]))
        group = groups[by_target, name, error]
        if by_target:
            sources = listed([each.source for each in group])
            lines.append(f"{name} ({group[0].address}) can't be reached from {sources}: {error}")
        else:
            lines.append(f"{name} can't reach {listed([each.target for each in group])}: {error}")
        left = [each for each in left if each not in group]
    return lines
