"""Is the rendezvous port free, who holds it if not, and who can connect to it: tested for real.

A listener is held on the first node for as long as the test takes. Every node, and this machine,
connects to it over every address that the name has; only our own listener's token counts as success,
and nothing is ever sent, so a stranger's service sees a connect and no more.
"""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from distlaunch.agent.wire import Message
from distlaunch.job.spec import Address, JobSpec, NodeSpec
from distlaunch.launch.checks.questions import Agents
from distlaunch.plan.layout import is_loopback
from distlaunch.transport.failure import LinkFailure

HERE = "here"
DIAL_S = 5.0
ANSWER_S = 30.0


class Dial(NamedTuple):
    """One connection that was tried: from a node's name (or "here"), to one address."""

    source: str
    address: str
    family: str
    ok: bool
    error: str | None


class PortReport(NamedTuple):
    """What was found out about one port. `free` None = the node that should have it can't be asked."""

    node: str
    host: str
    port: int | None
    free: bool | None
    owners: tuple[Message, ...] = ()
    error: str | None = None
    dials: tuple[Dial, ...] = ()
    failures: tuple[tuple[str, LinkFailure], ...] = ()

    @property
    def ok(self) -> bool:
        """Whether a rendezvous there would work."""
        return bool(self.free) and not self.failures and all(dial.ok for dial in self.dials)

    def document(self) -> dict[str, Any]:
        """For machines."""
        shown = {
            "ok": self.ok,
            "owners": list(self.owners),
            "dials": [dial._asdict() for dial in self.dials],
            "failures": [
                {"node": node, "kind": failure.kind.value, "words": failure.words}
                for node, failure in self.failures
            ],
        }
        return {**self._asdict(), **shown}


def check_port(spec: JobSpec, host: str, port: int | None) -> PortReport:
    """Check `port` (None = one that is free) on the first node of `spec`, which the others call `host`."""
    here = NodeSpec(HERE)
    asked = spec._replace(nodes=(*spec.nodes, *([] if spec.nodes[0].local else [here])))
    token = os.urandom(16).hex()
    with Agents(asked) as agents:
        first = asked.nodes[0].label
        answer = agents.ask({0: {"op": "listen", "port": port, "token": token}}, ANSWER_S).get(0)
        report = _first_answer(first, host, port, answer)
        if report.free:
            dial = {"op": "dial", "host": host, "port": report.port, "timeout_s": DIAL_S, "token": token}
            answers = agents.ask(dict.fromkeys(agents.present, dial), ANSWER_S)
            report = report._replace(dials=_dials(asked.nodes, answers))
        labels = [(asked.nodes[index].label, failure) for index, failure in sorted(agents.failures.items())]
        return report._replace(failures=tuple(labels))


def _first_answer(node: str, host: str, port: int | None, answer: Message | None) -> PortReport:
    if answer is None:
        return PortReport(node, host, port, None)
    if answer["op"] == "listening":
        return PortReport(node, host, int(answer["port"]), True)
    return PortReport(node, host, port, False, tuple(answer["owners"]), str(answer["error"]))


def _dials(nodes: Sequence[NodeSpec], answers: dict[int, Message]) -> tuple[Dial, ...]:
    return tuple(
        Dial(nodes[index].label, str(one["address"]), str(one["family"]), bool(one["ok"]), one["error"])
        for index, answer in sorted(answers.items())
        for one in answer["results"]
    )


def node_for(host: str, own_names: Sequence[str]) -> NodeSpec:
    """The node that a host:port on the command line means: this machine by any of its names, or ssh."""
    local = is_loopback(host) or host in own_names
    return NodeSpec(host) if local else NodeSpec(host, Address(host))
