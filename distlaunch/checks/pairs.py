"""Can every node connect to every other, as collectives need? Tried for real, from all at once.

A node is dialled at the address that its route to the master gives it, as gloo and NCCL have it, and on a
port from the range that they take theirs from.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from distlaunch.agent.messages import (
    DialAll,
    Dialled,
    FindRoute,
    Listen,
    Listening,
    PortRefused,
    RouteFailed,
    RouteFound,
)
from distlaunch.checks.questions import Agents
from distlaunch.wording import listed

EVERY = 16
"""With up to this many nodes every pair is tried; with more, each node dials one fewer than this."""
DIAL_S = 5.0
ANSWER_S = 30.0


class Unreached(NamedTuple):
    """One node that could not connect to another, at that address."""

    source: str
    target: str
    address: str
    error: str


class Pairs(NamedTuple):
    """How many pairs of nodes were tried, of how many, and which failed."""

    tried: int
    of: int
    failed: tuple[Unreached, ...] = ()

    def document(self) -> dict[str, object]:
        """For machines."""
        return {**self._asdict(), "failed": [each._asdict() for each in self.failed]}


def partners(count: int) -> dict[int, list[int]]:
    """Whom each of `count` nodes dials: all others, or some at even distances, the next one among them."""
    each = min(count, EVERY) - 1
    steps = [1 + k * (count - 1) // each for k in range(each)]
    return {node: [(node + step) % count for step in steps] for node in range(count)}


def dial(targets: Sequence[tuple[str, int]], token: str) -> DialAll:
    """The command that has an agent connect to these hosts and ports."""
    return DialAll([*targets], DIAL_S, token)


def try_pairs(agents: Agents, labels: Sequence[str], host: str, token: str) -> Pairs:
    """Try the nodes with these labels, the first of `agents`; they call the first one `host`."""
    count = len(labels)
    ends = _ends(agents, count, host, token)
    wanted = {
        source: [target for target in targets if target in ends]
        for source, targets in partners(count).items()
        if source in agents.present
    }
    questions = {
        source: dial([ends[target] for target in targets], token) for source, targets in wanted.items()
    }
    answers = agents.ask(questions, (Dialled,), ANSWER_S)
    failed = [
        Unreached(labels[source], labels[target], ends[target][0], error)
        for source, answer in sorted(answers.items())
        for target, error in zip(wanted[source], _errors(answer), strict=False)
        if error
    ]
    return Pairs(sum(len(wanted[source]) for source in answers), count * (count - 1), tuple(failed))


def _ends(agents: Agents, count: int, host: str, token: str) -> dict[int, tuple[str, int]]:
    """Node → the address and port at which it listens for the others, of those that can."""
    here = [node for node in agents.present if node < count]
    addresses = _addresses(
        agents.ask(dict.fromkeys(here, FindRoute(host)), (RouteFound, RouteFailed), ANSWER_S)
    )
    # Port 0: the system's choice, as theirs; a firewall may be open for that range alone.
    answers = agents.ask(dict.fromkeys(addresses, Listen(0, token)), (Listening, PortRefused), ANSWER_S)
    ports = {node: answer.port for node, answer in answers.items() if isinstance(answer, Listening)}
    return {node: (addresses[node], port) for node, port in ports.items()}


def _addresses(routes: Mapping[int, RouteFound | RouteFailed]) -> dict[int, str]:
    """Each node's own address on its way to the first; the first's is the one that the others dial."""
    found = {node: route for node, route in routes.items() if isinstance(route, RouteFound)}
    sources = {node: route.source for node, route in found.items() if node and route.source}
    dialled = [route.address for node, route in found.items() if node]
    return {**sources, 0: dialled[0]} if 0 in routes and dialled else sources


def _errors(answer: Dialled) -> Iterator[str | None]:
    """What a node says of each target: None if one of its addresses accepted the connection."""
    for tried in answer.results:
        rows = [row for row in tried if isinstance(row, dict)] if isinstance(tried, list) else []
        failed = [str(row.get("error")) for row in rows if row.get("ok") is not True]
        yield None if rows and not failed else (failed or ["no answer"])[0]


def folded(failed: Sequence[Unreached]) -> list[str]:
    """The failures in as few lines as telling them by target, or by source, takes."""
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
