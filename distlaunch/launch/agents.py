"""Agents without a job, which report facts about their nodes and run programs."""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from distlaunch.agent import messages
from distlaunch.agent.wire import CONTROL, OUTPUT, Frame, ProtocolError
from distlaunch.job.spec import JobSpec
from distlaunch.launch.link import Links
from distlaunch.launch.opening import open_links
from distlaunch.plan.placement import Facts
from distlaunch.supervisor.codec import up_of
from distlaunch.transports.failure import LinkFailure

ANSWER_S = 30.0
MAX_OUTPUT = 1 << 20
"""Maximum bytes of output to keep from each node."""
Place = tuple[int, int]
"""A node and a local rank."""
Ended = tuple[messages.WorkerExited | messages.WorkerUnstarted | None, bytes]
"""The exit of a worker (None = it has not exited), and its output."""
_ENDS = (messages.WorkerExited, messages.WorkerUnstarted)


def start_of(spec: JobSpec, env: dict[str, str], *workers: messages.WorkerSpec) -> messages.StartWorkers:
    """Return the command that starts a check's programs, which aren't ranks of a run, on one node."""
    return messages.StartWorkers(
        attempt=0,
        run_id=f"check-{os.getpid()}-{os.urandom(4).hex()}",
        grace_s=1.0,
        lease_s=spec.limits.lease_s,
        env=env,
        workers=workers,
    )


class Agents:
    """A context manager that runs agents without a job on all nodes of `spec`.

    `distlaunch check` (`node_check`, `link_check`), `check-port` (`port_check`) and `init` use it. Entering
    it opens the links, and waits for the first reports. Each agent answers one question at a time. Two maps
    are keyed by node index: `failures` contains the reason why a node has no agent, and `took_s` the seconds
    until an agent's first report.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._links = Links(self._take, self._fail)
        self._answers: dict[int, Any] = {}
        self._expected: tuple[type, ...] = ()
        self._printed: dict[Place, bytearray] = {}
        self._ends: dict[Place, Any] = {}
        self._heartbeat_s = spec.limits.heartbeat_s
        self._next_heartbeat = time.monotonic() + self._heartbeat_s
        self.failures: dict[int, LinkFailure] = {}
        self._facts: dict[int, Facts] = {}
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

    @property
    def facts(self) -> dict[int, Facts]:
        """Return the facts about the nodes with an agent, in order."""
        return {node: self._facts[node] for node in self.present if node in self._facts}

    def ask(self, questions: Mapping[int, tuple[Any, ...]], expected: tuple[type, ...]) -> dict[int, Any]:
        """Send each node its question. Return the answers of `expected` kinds that arrive in time."""
        asked = set(questions) & set(self.present)
        for node in asked:
            self._links.send(node, questions[node])
        return self._await(asked, expected, ANSWER_S)

    def routes(self, nodes: Iterable[int], host: str) -> dict[int, messages.RouteFound]:
        """Return the routes to a host from those of `nodes` that have one."""
        questions = dict.fromkeys(nodes, messages.FindRoute(host))
        found = self.ask(questions, (messages.RouteFound, messages.RouteFailed))
        return {node: route for node, route in found.items() if isinstance(route, messages.RouteFound)}

    def run(
        self,
        starts: Mapping[int, messages.StartWorkers],
        within_s: float,
        is_over: Callable[[Mapping[Place, Ended]], bool] = lambda ends: False,
    ) -> dict[Place, Ended]:
        """Run workers until all have exited, `is_over` is true, or time is up. Return exits and output."""
        places = [(node, each.local_rank) for node, start in starts.items() for each in start.workers]
        self._ends, self._printed = {}, {place: bytearray() for place in places}
        for node in starts:
            self._links.send(node, starts[node])
        self._await(set(starts) & set(self.present), _ENDS, within_s, lambda: is_over(self._ended()))
        return self._ended()

    def _ended(self) -> dict[Place, Ended]:
        return {place: (self._ends.get(place), bytes(printed)) for place, printed in self._printed.items()}

    def _await(
        self, asked: set[int], expected: tuple[type, ...], within_s: float, is_over: Callable[[], bool] = bool
    ) -> dict[int, Any]:
        """Wait for the agents in `asked`, and return their answers of `expected` kinds.

        Agents that don't answer in time are dropped. Once `is_over` returns True, return {} instead.
        """
        self._answers, self._expected = {}, expected
        deadline = time.monotonic() + within_s
        while (waiting := asked - set(self._answers) - set(self.failures)) and time.monotonic() < deadline:
            if is_over():
                return {}
            self._links.turn(max(0.0, min(self._next_heartbeat, deadline) - time.monotonic()))
            # Not after every turn: every ping is answered, and the answers would overload a busy controller.
            if time.monotonic() >= self._next_heartbeat:  # a slow node may keep the others waiting
                self._next_heartbeat = time.monotonic() + self._heartbeat_s
                self._links.beat()
        for node in waiting:
            self._links.give_up(node, f"no answer within {within_s:g} s")
        return {node: answer for node, answer in self._answers.items() if node in asked}

    def _take(self, frame: Frame) -> None:
        """Handle a frame: keep stdout of workers, the facts in first reports, and exits.

        A report of an expected kind is the node's answer. Of several workers' exits, the last one counts.
        """
        if frame.kind == OUTPUT:
            local_rank, is_stderr = divmod(frame.channel, 2)
            printed = self._printed.get((frame.node, local_rank), bytearray())
            printed += frame.payload if not is_stderr and len(printed) < MAX_OUTPUT else b""
            return
        if frame.kind != CONTROL:
            raise ProtocolError("unexpected frame")
        report = messages.report_in(frame)
        if isinstance(report, messages.Hello):
            self._facts[frame.node] = up_of(report).facts
            self.took_s[frame.node] = time.monotonic() - self._began
        if isinstance(report, _ENDS):
            self._ends[frame.node, report.local_rank] = report
            if any(node == frame.node and (node, each) not in self._ends for node, each in self._printed):
                return
        if isinstance(report, self._expected):
            self._answers[frame.node] = report

    def _fail(self, node: int, failure: LinkFailure) -> None:
        self.failures[node] = failure
