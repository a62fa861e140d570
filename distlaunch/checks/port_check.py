"""Is the rendezvous port free, who holds it if not, and who can connect to it: tested for real.

A listener is held on the first node for as long as the test takes. Every node, and this machine,
connects to it over every address that the name has; only our own listener's token counts as success,
and nothing is ever sent, so a stranger's service sees a connect and no more. Then the nodes of a job
connect to each other. Spares are left out: they may be down until they are needed.
"""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from distlaunch.agent.messages import Dialled, Listen, Listening, PortRefused
from distlaunch.checks.pairs import Pairs, dial, try_pairs
from distlaunch.checks.questions import Agents
from distlaunch.job.spec import JobSpec, NodeSpec
from distlaunch.plan.layout import is_loopback
from distlaunch.system.here import runs_ranks
from distlaunch.transports.failure import LinkFailure
from distlaunch.transports.ssh import Ssh

HERE = "here"
ANSWER_S = 30.0


class Dial(NamedTuple):
    """One connection that was tried: from a node's name (or "here"), to one address."""

    source: str
    address: str
    family: str
    ok: bool
    error: str | None


class Unasked(NamedTuple):
    """A node that can't be asked, why, and what to do about it."""

    node: str
    failure: LinkFailure
    advice: str


class PortReport(NamedTuple):
    """What was found out about one port. `free` None = the node that should have it can't be asked.

    `pairs` None = there is one machine, or the port is of no use; `spares` were not asked.
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

    @property
    def ok(self) -> bool:
        """Whether a rendezvous there would work; this machine counts only for a lone port."""
        dials = [dial for dial in self.dials if self.here_counts or dial.source != HERE]
        failures = [one for one in self.failures if self.here_counts or one.node != HERE]
        connected = self.pairs is None or not self.pairs.failed
        return bool(self.free) and connected and not failures and all(dial.ok for dial in dials)

    def document(self) -> dict[str, Any]:
        """For machines."""
        shown = {
            "ok": self.ok,
            "owners": list(self.owners),
            "dials": [dial._asdict() for dial in self.dials],
            "failures": [
                {"node": node, "kind": failure.kind.value, "words": failure.words, "advice": advice}
                for node, failure, advice in self.failures
            ],
            "pairs": self.pairs and self.pairs.document(),
        }
        return {**self._asdict(), **shown}


def check_port(spec: JobSpec, host: str, port: int | None) -> PortReport:
    """Check `port` (None = one that is free) on the first node of `spec`, which the others call `host`."""
    asked = _with_here(spec._replace(spares=()), host)
    token = os.urandom(16).hex()
    with Agents(asked) as agents:
        first = asked.nodes[0].label
        answer = agents.ask({0: Listen(port, token)}, (Listening, PortRefused), ANSWER_S).get(0)
        report = _first_answer(first, host, port, answer)
        if report.free and report.port is not None:
            question = dial([(host, report.port)], token)
            answers = agents.ask(dict.fromkeys(agents.present, question), (Dialled,), ANSWER_S)
            report = report._replace(dials=_dials(asked.nodes, answers))
            if not spec.one_machine and len(spec.nodes) > 1:
                labels = [node.label for node in spec.nodes]
                report = report._replace(pairs=try_pairs(agents, labels, host, token))
        unasked = [_unasked(asked, index, failure) for index, failure in sorted(agents.failures.items())]
        spares = tuple(node.label for node in spec.spares)
        return report._replace(failures=tuple(unasked), here_counts=len(spec.nodes) == 1, spares=spares)


def _unasked(asked: JobSpec, index: int, failure: LinkFailure) -> Unasked:
    node = asked.nodes[index]
    advice = node.reach.advice(failure, node.python or asked.python)
    return Unasked(node.label, failure, advice)


def _with_here(spec: JobSpec, host: str) -> JobSpec:
    """`spec` with this machine as one more node, unless it is one already or `host` means another there.

    On a system where no agent runs it is left out.
    """
    if any(node.local for node in spec.nodes) or is_loopback(host) or not runs_ranks():
        return spec
    # The job's interpreter is for its own nodes.
    nodes = [node._replace(python=node.python or spec.python) for node in spec.nodes]
    return spec._replace(nodes=(*nodes, NodeSpec(HERE)), python=None)


def _first_answer(
    node: str, host: str, port: int | None, answer: Listening | PortRefused | None
) -> PortReport:
    match answer:
        case Listening():
            return PortReport(node, host, answer.port, True)
        case PortRefused():
            return PortReport(node, host, port, False, tuple(answer.owners), answer.error)
    return PortReport(node, host, port, None)


def _dials(nodes: Sequence[NodeSpec], answers: dict[int, Dialled]) -> tuple[Dial, ...]:
    found = [
        _dial(nodes[index].label, one) for index, answer in sorted(answers.items()) for one in _rows(answer)
    ]
    return tuple(filter(None, found))


def _rows(answer: Dialled) -> list[Any]:
    """What a node that was given one target says of it."""
    match answer.results:
        case [list(rows)]:
            return rows
    return []


def _dial(source: str, result: Any) -> Dial | None:
    match result:
        case {"address": str(to), "family": str(family), "ok": bool(ok), "error": str() | None as error}:
            return Dial(source, to, family, ok, error)
    return None


def node_for(host: str, own_names: Sequence[str]) -> NodeSpec:
    """The node that a host:port on the command line means: this machine by any of its names, or ssh."""
    local = is_loopback(host) or host in own_names
    return NodeSpec(host) if local else NodeSpec(host, Ssh(host))
