"""Asks agents questions, without running a job: what checks are made of."""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from distlaunch.agent import messages
from distlaunch.agent.wire import CONTROL, PROTOCOL, Frame, ProtocolError
from distlaunch.job.spec import JobSpec
from distlaunch.transports.failure import LinkFailure
from distlaunch.transports.link import Links
from distlaunch.transports.opening import open_links

HEARTBEAT_S = 5.0


class Agents:
    """Agents on all nodes of `spec` while it is entered; each is asked one question at a time.

    `failures` maps the index of a node that can't be asked to the reason.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._links = Links(self._take, self._fail)
        self._answers: dict[int, Any] = {}
        self._expected: tuple[type, ...] = ()
        self._next_heartbeat = time.monotonic() + HEARTBEAT_S
        self.failures: dict[int, LinkFailure] = {}

    def __enter__(self) -> "Agents":
        links = open_links(self._spec)
        for node, link in links.items():
            self._links.add(node, link)
        self._await(set(links), (messages.Hello,), self._spec.timeouts.connect_s)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in self._links.present:
            self._links.hang_up(node)
        self._links.close()

    @property
    def present(self) -> list[int]:
        """The nodes that can be asked."""
        return self._links.present

    def ask(
        self, questions: Mapping[int, tuple[Any, ...]], expected: tuple[type, ...], within_s: float
    ) -> dict[int, Any]:
        """Send each node its question; the answers, of the `expected` kinds, that came in time."""
        asked = set(questions) & set(self.present)
        for node in asked:
            self._links.send(node, questions[node])
        return self._await(asked, expected, within_s)

    def _await(self, asked: set[int], expected: tuple[type, ...], within_s: float) -> dict[int, Any]:
        self._answers, self._expected = {}, expected
        deadline = time.monotonic() + within_s
        while (waiting := asked - set(self._answers) - set(self.failures)) and time.monotonic() < deadline:
            self._links.turn(max(0.0, min(self._next_heartbeat, deadline) - time.monotonic()))
            self._beat()
        for node in waiting:
            self._links.give_up(node, f"no answer within {within_s:g} s")
        return {node: answer for node, answer in self._answers.items() if node in asked}

    def _beat(self) -> None:
        """Keep the agents of fast nodes there while a slow one boots."""
        # Not whenever something comes: each ping has an answer, and who is busy would drown in them.
        if time.monotonic() < self._next_heartbeat:
            return
        self._next_heartbeat = time.monotonic() + HEARTBEAT_S
        self._links.nudge()
        for node in self._links.answering:
            self._links.send(node, messages.Ping())

    def _take(self, frame: Frame) -> None:
        if frame.kind != CONTROL:
            raise ProtocolError("unexpected frame")
        report = messages.read(messages.REPORTS, frame.message())
        if isinstance(report, messages.Hello) and report.protocol != PROTOCOL:
            raise ProtocolError(f"the agent speaks protocol {report.protocol}, not {PROTOCOL}")
        if isinstance(report, self._expected):
            self._answers[frame.node] = report

    def _fail(self, node: int, failure: LinkFailure) -> None:
        self.failures[node] = failure
