"""Agents without a job, which answer questions about their nodes and run one program each."""

import time
from collections.abc import Mapping
from typing import Any

from distlaunch.agent import messages
from distlaunch.agent.wire import CONTROL, OUTPUT, PROTOCOL, Frame, ProtocolError
from distlaunch.job.spec import JobSpec
from distlaunch.launch.link import Links
from distlaunch.launch.opening import open_links
from distlaunch.transports.failure import LinkFailure

ANSWER_S = 30.0
HEARTBEAT_S = 5.0
MAX_OUTPUT = 1 << 20
"""Maximum bytes of output to keep from each node."""
Ended = tuple[messages.WorkerExited | messages.WorkerUnstarted, bytes]
_ENDS = (messages.WorkerExited, messages.WorkerUnstarted)


class Agents:
    """A context manager that runs agents without a job on all nodes of `spec`.

    Each agent answers one question at a time. Three maps are keyed by node index: `failures` has the reason
    why a node has no agent, `hellos` its agent's first report, and `took_s` the seconds until that report.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._links = Links(self._take, self._fail)
        self._answers: dict[int, Any] = {}
        self._expected: tuple[type, ...] = ()
        self._printed: dict[int, bytearray] = {}
        self._next_heartbeat = time.monotonic() + HEARTBEAT_S
        self.failures: dict[int, LinkFailure] = {}
        self.hellos: dict[int, messages.Hello] = {}
        self.took_s: dict[int, float] = {}

    def __enter__(self) -> "Agents":
        self._began = time.monotonic()
        links = open_links(self._spec)
        try:
            for node, link in links.items():
                self._links.add(node, link)
            self._await(set(links), (messages.Hello,), self._spec.limits.connect_s)
        except BaseException:  # Ctrl-C: no transport may outlive this process
            self._links.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for node in self._links.present:
            self._links.hang_up(node)
        self._links.close()

    @property
    def present(self) -> list[int]:
        """Return the nodes that have an agent."""
        return self._links.present

    def ask(self, questions: Mapping[int, tuple[Any, ...]], expected: tuple[type, ...]) -> dict[int, Any]:
        """Send each node its question. Return the answers of the `expected` kinds that arrive in time."""
        asked = set(questions) & set(self.present)
        for node in asked:
            self._links.send(node, questions[node])
        return self._await(asked, expected, ANSWER_S)

    def run(self, starts: Mapping[int, messages.StartWorkers], within_s: float) -> dict[int, Ended]:
        """Run one worker per node. Return the exit and the output of each worker that ends in time."""
        self._printed.clear()
        for node in starts:
            self._links.send(node, starts[node])
        ends = self._await(set(starts) & set(self.present), _ENDS, within_s)
        return {node: (end, bytes(self._printed.get(node, b""))) for node, end in ends.items()}

    def _await(self, asked: set[int], expected: tuple[type, ...], within_s: float) -> dict[int, Any]:
        self._answers, self._expected = {}, expected
        deadline = time.monotonic() + within_s
        while (waiting := asked - set(self._answers) - set(self.failures)) and time.monotonic() < deadline:
            self._links.turn(max(0.0, min(self._next_heartbeat, deadline) - time.monotonic()))
            # Not after every turn: every ping is answered, and the answers would overload a busy controller.
            if time.monotonic() >= self._next_heartbeat:
                self._beat()
        for node in waiting:
            self._links.give_up(node, f"no answer within {within_s:g} s")
        return {node: answer for node, answer in self._answers.items() if node in asked}

    def _beat(self) -> None:
        """Send heartbeats to keep the agents of fast nodes alive while a slow node boots."""
        self._next_heartbeat = time.monotonic() + HEARTBEAT_S
        self._links.nudge()
        for node in self._links.answering:
            self._links.send(node, messages.Ping())

    def _take(self, frame: Frame) -> None:
        if frame.kind == OUTPUT and frame.channel < 2:
            printed = self._printed.setdefault(frame.node, bytearray())
            printed += frame.payload if not frame.channel and len(printed) < MAX_OUTPUT else b""
            return
        if frame.kind != CONTROL:
            raise ProtocolError("unexpected frame")
        report = messages.report_in(frame)
        if isinstance(report, messages.Hello):
            if report.protocol != PROTOCOL:
                raise ProtocolError(f"the agent speaks protocol {report.protocol}, not {PROTOCOL}")
            self.hellos[frame.node], self.took_s[frame.node] = report, time.monotonic() - self._began
        if isinstance(report, self._expected):
            self._answers[frame.node] = report

    def _fail(self, node: int, failure: LinkFailure) -> None:
        self.failures[node] = failure
