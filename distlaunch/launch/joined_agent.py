"""This node's part of a run that another launcher controls. This process starts the node's agent.

The controller sends ranks, addresses, ports, and start and stop commands over the link that
`distlaunch.launch.join` has opened. This launcher determines the program, its arguments, its environment and
the destinations of its output. This process is the agent's guardian, which kills leftover processes if the
agent dies.
"""

import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from distlaunch.agent import guardian, messages, scratch, sweep, wire, worker
from distlaunch.agent.outbox import Outbox
from distlaunch.agent.serve import Agent, exit_after
from distlaunch.contract import ranks_alone
from distlaunch.errors import DistlaunchError, Exit
from distlaunch.launch.join import Seat
from distlaunch.observers.outlet import Outlet
from distlaunch.wording import NO_SUSPENDING_TORCHRUN

PATIENCE_S = 5.0
LOOK_S = 0.2
"""Seconds between two looks for a signal while waiting for the controller to exit."""
END_S = 600.0
"""Maximum seconds of that wait."""
OBEYED = (
    *(messages.Ping, messages.HoldPort, messages.FindRoute, messages.StartWorkers, messages.StopWorkers),
    *(messages.Capture, messages.ReadStacks, messages.WatchUse, messages.WarnWorkers, messages.Reap),
    *(messages.Close, messages.Dismiss),
)
"""The allowed commands. Only `StartWorkers` has fields for a program, arguments and paths."""
_FIRST, _LAST = 40, 64
"""Real-time signals (macOS has none): this process forwards signal N to the agent as _FIRST + N."""
STOP_QUIETLY = _FIRST + signal.SIGPIPE
"""The signal that the agent sends itself when the reader of its output is gone."""


class Part:
    """The part of the job that this launcher runs on its node, and the destinations of its output.

    This class is for a scheduler's task: one rank, whose output is the task's output, unchanged.
    `joined_ranks` overrides it for several ranks. Only the `first` of several tasks on a host looks for
    leftover processes of dead agents and shows messages, since mpirun and srun merge the output of all tasks.
    """

    procs = 1
    role = ""

    def __init__(self, argv: Sequence[str], first: bool = True) -> None:
        self._argv, self.first = tuple(argv), first
        self._errors: Outlet | None = None

    def logs(self, run_id: str, node: int) -> str:
        """Create and return the directory for this node's logs; "" = this node keeps none."""
        return ""

    def workers(self, ranks: messages.StartWorkers) -> tuple[messages.WorkerSpec, ...]:
        """Return the workers that run this launcher's own program as the given ranks.

        For a task, only stderr is captured, for the last output in failure reports.
        """
        (rank,) = ranks.workers
        return (rank._replace(argv=self._argv, cwd=os.getcwd(), shares=(0, 1)),)

    def needs(self) -> messages.Needs | None:
        """Return the workers' requirements on this node; None = unknown."""
        return None

    def binding(self) -> messages.Binding | None:
        """Return the workers' CPU binding; None = they use the launcher's CPUs."""
        return None

    def show(self, attempt: int, local_rank: int, stream: int, data: bytes) -> None:
        """Handle the output of a worker."""
        self._errors = self._errors or Outlet(2, lambda error: None)
        self._errors.write(data)

    def say(self, text: str) -> None:
        """Print messages from distlaunch to stderr, which for a task is a pipe to the scheduler."""
        if self.first:
            data = "".join(f"distlaunch: {line}\n" for line in text.splitlines()).encode()
            self.show(0, 0, 1, data)

    def close(self) -> None:
        """Write the rest of the output."""
        if self._errors:
            self._errors.close(lambda silent_s: silent_s < PATIENCE_S)


def serve(seat: Seat, part: Part, signums: Iterable[int], own_first: bool = False) -> int:
    """Serve as a node's agent until the run ends. Return the job's exit status.

    With `own_first`, return the status of a rank that failed here, if any. The `signums` are already blocked.

    Raises `DistlaunchError` if the directory for logs can't be created, or /proc isn't usable.
    """
    with suppress(OSError):  # the agent notices that the controller is gone
        seat.connection.sendall(wire.HELLO_PREFIX + seat.nonce.encode() + b"\n")
    try:
        if mistake := sweep.foreign_proc():
            raise DistlaunchError(mistake)
        part.logs(seat.run_id, seat.node)
    except DistlaunchError as error:
        _report_end(seat, wire.LEFT_EARLY, str(error))
        raise
    sweep.become_subreaper()
    link, above, directory = seat.connection.fileno(), os.getpid(), scratch.Directory()
    sys.stdout.flush()
    # Signals that are pending already must not kill the agent while it boots.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD, *range(_FIRST, _LAST + 1)])
    agent = os.fork()
    if agent == 0:
        exit_after(lambda: _be_agent(seat, part, directory, above, own_first))
    status = guardian.watch(agent, directory, link, {signum: _FIRST + signum for signum in signums})
    directory.remove_left()
    ended = wire.NOT_CLEAN if status.unswept else wire.AGENT_DIED if status.killed else wire.LEFT_EARLY
    _report_end(seat, ended, status.killed)
    if own_first:
        _await_exit(seat.connection, signums)
    seat.connection.close()
    if status.killed:
        part.say(
            "this node's agent was killed, perhaps for lack of memory (see dmesg), and so were its ranks, "
            "whose last output may be missing"
        )
        part.close()
        return Exit.NODE_LOST
    return status.exited


def _await_exit(connection: socket.socket, signums: Iterable[int]) -> None:
    """Wait until the controller has exited, or a signal arrives.

    mpirun kills all tasks once one has failed, so rank 0's task, the controller, must exit first. That is
    after the grace period of all ranks.
    """
    deadline = time.monotonic() + END_S
    with suppress(OSError):
        while time.monotonic() < deadline and signal.sigpending().isdisjoint(signums):
            if select.select([connection], [], [], LOOK_S)[0] and not connection.recv(wire.MAX_OUTPUT):
                break


def _report_end(seat: Seat, status: int, words: str) -> None:
    """Send the last frame: this node's status, as a guardian's exit status, and the reason, if any."""
    seat.connection.settimeout(5.0)
    with suppress(OSError):  # the controller may be gone
        end = {"op": "end", "status": status, "words": words}
        seat.connection.sendall(wire.encode_message(seat.node, end, wire.END))
        seat.connection.shutdown(socket.SHUT_WR)


def _be_agent(seat: Seat, part: Part, directory: scratch.Directory, above: int, own_first: bool) -> int:
    """Run the agent in the child process. Return its exit status."""
    sweep.become_subreaper()
    sweep.die_with_parent(signal.SIGTERM, above)
    worker.share(0, 1)
    worker.close_inherited()
    agent = _JoinedAgent(seat, part, directory)
    agent.run(seat.unread)
    directory.limit_agent(math.inf)  # a reader of the ranks' output may be slow
    part.close()
    own = agent.ranks.own_status if own_first else 0  # negative = by a signal
    return own if own > 0 else 128 - own if own else agent.outcome


class _Outbox(Outbox):
    """An outbox that keeps the output of ranks on this node."""

    def __init__(self, part: Part, seat: Seat, directory: scratch.Directory) -> None:
        super().__init__(seat.node, directory)
        self._part = part
        self.own_status = 0
        self.stopping = False

    def report(self, report: tuple[Any, ...]) -> None:
        """Queue a report. Keep the status of the first rank that failed here on its own."""
        if isinstance(report, messages.WorkerExited) and not (self.own_status or self.stopping):
            self.own_status = report.status
        super().report(report)

    def output(self, attempt: int, channel: int, data: bytes | memoryview) -> None:
        """Show output here instead of sending it."""
        self._part.show(attempt, channel // 2, channel % 2, bytes(data))


class _JoinedAgent(Agent):
    """An agent that starts its launcher's command line. The controller sends no program."""

    def __init__(self, seat: Seat, part: Part, directory: scratch.Directory) -> None:
        self.ranks = _Outbox(part, seat, directory)
        link = seat.connection.fileno()
        os.set_blocking(link, False)
        super().__init__(link, os.dup(link), directory, self.ranks)
        self._commands = {kind: self._commands[kind] for kind in OBEYED}
        self._signums = (signal.SIGCHLD, signal.SIGTERM, *range(_FIRST, _LAST + 1))
        self._seat, self._part = seat, part
        self._stops = self.outcome = 0  # stop signals received; the exit status of the job, once known
        self._informed = False  # whether the controller has sent `Close`
        for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, *wire.WARNINGS):
            signal.signal(signum, signal.SIG_IGN)  # the guardian forwards them

    def _hello(self) -> messages.Hello:
        """Return the first report, including the number and role of this launcher's ranks, and its logs."""
        logs = self._part.logs(self._seat.run_id, self._seat.node)
        return super()._hello()._replace(procs=self._part.procs, logs=logs, role=self._part.role)

    def _report_orphans(self) -> None:
        """Clean up after dead agents of earlier runs, in only one of the tasks on a host."""
        if self._part.first:
            super()._report_orphans()

    def _on_signals(self, received: bytes) -> None:
        """Handle the received signals, one number per byte.

        A scheduler may send SIGTERM to all processes, so SIGTERM itself counts only if the guardian is dead,
        in which case the kernel sent it. The guardian forwards signal N, SIGTERM included, as _FIRST + N.
        """
        orphaned = os.getppid() != self._guardian
        if signal.SIGCHLD in received or orphaned:
            super()._on_signals(bytes([signal.SIGCHLD, *([signal.SIGTERM] if orphaned else [])]))
        for number in received:
            if number >= _FIRST:
                self._interrupted(number - _FIRST)

    def _interrupted(self, signum: int) -> None:
        """Report a signal to the controller, which decides. At the third stop signal, exit anyway."""
        if signum == signal.SIGTSTP:
            self._part.say(NO_SUSPENDING_TORCHRUN)
            return
        self._stops += signum in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
        self._outbox.report(messages.Interrupted(signum, self._seat.node))
        self._flush()
        if self._stops > 2:
            self.outcome = self.outcome or 128 + signum
            self._leave_early(self._grace_s)

    def _hear_end(self, damage: str = "") -> None:
        """Show that the controller is gone or can't be trusted, and exit."""
        self._lose(f"it sent an invalid command: {damage}" if damage else "the connection ended")
        super()._hear_end(damage)

    def _lose_link(self) -> None:
        """Show that the controller is gone, and exit. Also called when the lease expires."""
        self._lose(f"no heartbeat for {self._lease_s:g} s")  # unless there is a better reason
        super()._lose_link()

    def _lose(self, why: str) -> None:
        """Note and show that the controller is lost, unless the outcome is already known."""
        if not (self._informed or self.outcome):
            self.outcome = Exit.NODE_LOST
            lost = f"lost the controller on {self._seat.controller}: {why}"
            self._part.say(f"{lost}; stopping this node's ranks; the controller's output may show why")

    def _on_route(self, command: messages.FindRoute) -> None:
        """Find the route, and look for this launcher's own program, not the controller's."""
        super()._on_route(command._replace(needs=command.needs and self._part.needs()))

    def _on_reap(self, command: messages.Reap, killed: int = 0, until: float = 0.0) -> None:
        """Kill only leftover processes of the run that this launcher has joined."""
        if command.run_id != self._seat.run_id:
            raise wire.ProtocolError("a controller may stop only processes of its own run")
        super()._on_reap(command, killed, until)

    def _on_stop(self, command: messages.StopWorkers) -> None:
        """Show why the attempt is ending, and stop it. Ranks that fail from now on count as stopped."""
        self.ranks.stopping = True
        self._part.say(f"{command.why}; restarting")
        super()._on_stop(command)

    def _on_close(self, command: messages.Close) -> None:
        """Show the root cause, keep the job's exit status, and exit without collecting files."""
        if command.why and not self._informed:
            self._part.say(command.why)
        self._informed = self.ranks.stopping = True
        self.outcome = command.outcome
        super()._on_close(command._replace(collects=False))  # `Collect`, which contains paths, is not allowed

    def _on_start(self, command: messages.StartWorkers) -> None:
        """Start this launcher's own program as these ranks."""
        if command.run_id != self._seat.run_id:
            raise wire.ProtocolError("a controller may start only ranks of its own run")
        if command != ranks_alone(command):
            raise wire.ProtocolError("a controller may send only ranks and their variables")
        if [each.local_rank for each in command.workers] != list(range(self._part.procs)):
            raise wire.ProtocolError("the ranks don't belong to this node")
        if not all({**command.env, **each.env}.get("RANK", "").isdecimal() for each in command.workers):
            raise wire.ProtocolError("RANK is missing or not a number")
        self.ranks.stopping, self.ranks.own_status = False, 0
        command = command._replace(workers=self._part.workers(command))
        super()._on_start(command._replace(binding=self._part.binding()))
