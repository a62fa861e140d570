"""A link to a node's agent, or to those of several nodes: a child process (sh or ssh) and its three pipes."""

import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from distlaunch.agent import wire
from distlaunch.agent.messages import as_object
from distlaunch.agent.poller import written
from distlaunch.links.process import Child
from distlaunch.transport.failure import LinkFailure
from distlaunch.transport.kinds import Transport
from distlaunch.transport.streams import NodeGone, Streams, end_of

if TYPE_CHECKING:
    from distlaunch.links.peer import Peer
    from distlaunch.transport.slurm.group import SlurmGroup

READ = 1 << 18
EXIT_S = 3.0
"""Seconds that a transport's process may take to follow the end of its pipes."""


class Link:
    """The `process` that reaches one node, or several. Its descriptors never block; the owner waits on them.

    The opening that `streams` have is sent when the node's shell answers; `boot` is made, and sent, while an
    interpreter starts there. Where the transport is direct, both wait for a `flush`, and may go together with
    the first commands.
    """

    def __init__(
        self,
        transport: "Transport | SlurmGroup",
        process: "Child | Peer",
        streams: Streams,
        boot: Callable[[], bytes],
    ) -> None:
        self._transport = transport
        self._process = process
        self.stdin, self.stdout, self.stderr = process.stdin, process.stdout, process.stderr
        for fd in (self.stdin, self.stdout, self.stderr):
            os.set_blocking(fd, False)
        self._streams = streams
        self._boot: Callable[[], bytes] | None = boot
        self._unsent = bytearray()
        self._behind_boot = b""
        self._protocol_error = ""
        self.at_end = False
        self._idle = True
        self._pidfd: int | None = None
        if transport.direct:
            self._unsent += streams.without_marker()
            self._add_boot()

    @property
    def booted(self) -> bool:
        """Whether the agent has said hello."""
        return self._streams.booted

    @property
    def pulling(self) -> bool:
        """Whether an image is being fetched for the agent's container."""
        return self._streams.pulling

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` has something left to write."""
        return bool(self._unsent)

    def send(self, node: int, command: tuple[Any, ...]) -> None:
        """Send a node one of `distlaunch.agent.messages`: at once, or right behind what it boots from.

        Where several nodes share the link, each gets the frames of all.
        """
        self._idle = False
        data = wire.encode_command(node, as_object(command))
        if self._boot:
            self._behind_boot += data
            return
        self._unsent += data
        self.flush()

    def flush(self) -> None:
        """Write what the pipe takes now."""
        try:
            written(self.stdin, self._unsent)
        except OSError:
            self._unsent.clear()  # the end will be seen on stdout

    def nudge(self) -> None:
        """Give a line to each shell that has not answered: its rc file may wait for one."""
        if not self._unsent and (nudges := self._streams.nudges()):
            self._unsent += nudges
            self.flush()

    def receive(self) -> Sequence[wire.Frame | NodeGone]:
        """The frames that have come, and which nodes have ended; sets `at_end` when no more will."""
        try:
            data = os.read(self.stdout, READ)
            to_send, frames = self._streams.receive(data)
        except BlockingIOError:
            return []
        except wire.ProtocolError as error:
            self.distrust(str(error))
            return []
        self.at_end = not data
        if to_send:
            self._unsent += to_send
            self.flush()  # so that an interpreter starts there meanwhile
            self._add_boot()
            self.flush()
        return frames

    def _add_boot(self) -> None:
        if self._boot and self._streams.opened:
            self._unsent += self._boot() + self._behind_boot
            self._boot, self._behind_boot = None, b""

    def distrust(self, why: str) -> None:
        """End a link whose peer broke the protocol."""
        self._protocol_error = why
        self.at_end = True
        self.end()

    def listen(self) -> tuple[bool, list[NodeGone]]:
        """Keep what came on the transport's stderr: False at its end, and which nodes have ended, by that."""
        try:
            data = os.read(self.stderr, READ)
        except BlockingIOError:
            return True, []
        return bool(data), self._streams.listen(data)

    def exit_descriptor(self) -> int:
        """A descriptor that becomes readable when the process has ended."""
        if self._pidfd is None:
            self._pidfd = self._process.exit_descriptor()
        return self._pidfd

    @property
    def descriptors(self) -> list[int]:
        """All that an owner may wait on."""
        known = (self._process.stdin, self.stdout, self.stderr, self._pidfd)
        return [fd for fd in known if fd is not None and fd >= 0]

    def failure(self, overdue: str = "") -> LinkFailure:
        """What the transport's last words mean, all of them once its process has ended.

        `overdue` says why we gave a node up.
        """
        self.listen()
        end = end_of(self._streams, self._process.poll(), bool(overdue), self._protocol_error)
        return self._transport.failure(end).saying(overdue)

    def leave(self) -> None:
        """Close the pipe to the agent, which then stops its workers and leaves; its last words still come."""
        self._process.close_stdin()

    def hang_up(self) -> None:
        """Close the pipe to the agent, which then leaves, and wait; ends a process that does not follow."""
        self._process.close_stdin()
        if not self._ends_within(EXIT_S):
            self.end()

    def _ends_within(self, seconds: float) -> bool:
        waiting = select.poll()
        waiting.register(self.exit_descriptor(), select.POLLIN)
        return bool(waiting.poll(seconds * 1000))

    def discard(self) -> None:
        """End an agent at once and without a trace, if it was given nothing to do and is still there."""
        if not self._idle:
            return
        self._process.signal(signal.SIGKILL)
        self._process.wait()
        self.close()

    @property
    def has_ended(self) -> bool:
        """Whether the transport's process has."""
        return self._process.poll() is not None

    @property
    def patience_s(self) -> float:
        """Seconds that the transport's process has between being told to end and being killed."""
        return self._transport.patience_s

    def end(self) -> None:
        """Tell the transport's process to end, or kill it; an agent notices the end of the pipe."""
        if self.has_ended:
            return
        if not self.patience_s:
            self.kill()
        elif self.booted:
            self._process.signal(signal.SIGTERM)
        else:
            self._process.signal_group(signal.SIGTERM)  # a shell may be waiting for what fetches an image

    def kill(self) -> None:
        """Kill the transport's process with all that it started: a ProxyCommand may hear of nothing."""
        if not self.has_ended:
            self._process.kill()

    def close(self) -> None:
        """Close the pipes and reap the process, if it has been killed or has ended."""
        self._idle = False
        self._process.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        if self.patience_s:
            self._process.poll()  # a guardian that still sweeps is reaped by init after us
        else:
            self._process.wait()

    def kill_at(self, deadline: float) -> None:
        """Wait for a process that was told to end until then (monotonic seconds); kill it if it stays."""
        if not self._ends_within(max(0.0, deadline - time.monotonic())):
            self.kill()
        self._process.wait()
