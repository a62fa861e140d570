"""Links to agents. Each link is a process with three pipes, and one selector serves all links."""

import math
import os
import select
import selectors
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from distlaunch.agent import wire
from distlaunch.agent.messages import Ping, as_object
from distlaunch.agent.poller import written
from distlaunch.launch.process import Child
from distlaunch.transports.failure import LinkFailure
from distlaunch.transports.handshake import NodeGone, Streams
from distlaunch.transports.transport import Transport

READ_IN_TURN, MOST_READ, LEAST_READ = 1 << 20, 1 << 18, 1 << 12
"""Bytes to read in one turn from all links together, and limits for each. A slow disk of the logs delays each
turn by the time it needs for these bytes. Every link is read in every turn, so that no node counts as silent.
"""
Boot = Callable[[], bytes]
"""Returns the modules of the agent, as `handshake.boot_text` does."""
EXIT_S = 3.0
"""Seconds that a process may take to exit once its pipes are closed."""


class Link:
    """The link to one or more nodes over a `process`. The owner waits on its non-blocking descriptors.

    The opening in `streams` is sent when the node's shell answers, or immediately if the transport is direct.
    `boot` is called while an interpreter starts on the node. With a direct transport, its result waits for a
    `flush`, and can be sent together with the first commands. `pulling` is set while an image is being
    pulled. `former` contains the nodes that were dropped while the link went on serving others.
    """

    def __init__(self, transport: Transport, process: Child, streams: Streams, boot: Boot) -> None:
        self._transport, self._process, self.streams = transport, process, streams
        self.stdin, self.stdout, self.stderr = process.stdin, process.stdout, process.stderr
        for fd in (self.stdin, self.stdout, self.stderr):
            os.set_blocking(fd, False)
        self._boot: Boot | None = boot
        self.unsent = bytearray()
        """Bytes that `flush` has not yet written."""
        self._streams: list[Iterator[bytes]] = []
        self._behind_boot = b""  # commands sent before the modules
        self._protocol_error = ""
        self.at_end = self.pulling = False
        self.former: set[int] = set()
        self._pidfd = -1
        if transport.direct:
            self._open(streams.without_marker())

    def send(self, node: int, command: tuple[Any, ...]) -> None:
        """Send a node one of `distlaunch.agent.messages`, now or right after the agent's modules.

        If several nodes share the link, each receives every node's frames.
        """
        data = wire.encode_command(node, as_object(command))
        if self._boot:
            self._behind_boot += data
            return
        self.unsent += data
        self.flush()

    def stream(self, frames: Iterator[bytes]) -> None:
        """Send these frames whenever there is nothing else to send."""
        self._streams.append(frames)

    @property
    def sends(self) -> bool:
        """Return whether anything is left to send."""
        return bool(self.unsent or self._streams)

    def flush(self) -> None:
        """Write as much as the pipe accepts now."""
        try:
            written(self.stdin, self.unsent)
        except OSError:
            self.unsent.clear()  # the end of the link is noticed on stdout
            self._streams.clear()

    def flush_stream(self) -> None:
        """Send during one turn. Take at most one frame from a stream, because other links are waiting."""
        self.flush()
        if self._streams and not self.unsent:
            stream = self._streams[0]
            self.unsent += next(stream, b"")
            if not self.unsent and self._streams:
                del self._streams[0]

    def nudge(self) -> None:
        """Send a line to each shell that has not answered, in case its rc file is waiting for one."""
        if not self.unsent and (nudges := self.streams.nudges()):
            self.unsent += nudges
            self.flush()

    def receive(self, size: int) -> Sequence[wire.Frame | NodeGone]:
        """Return the frames and ended nodes in the next `size` bytes. Set `at_end` if nothing can follow."""
        try:
            data = os.read(self.stdout, size)
            to_send, frames = self.streams.receive(data)
        except BlockingIOError:
            return []
        except wire.ProtocolError as error:
            self.distrust(str(error))
            return []
        self.at_end = not data
        if to_send:
            self._open(to_send)
            self.flush()
        return frames

    def _open(self, opening: bytes) -> None:
        self.unsent += opening
        self.flush()  # so that an interpreter starts on the node in the meantime
        if self._boot and self.streams.opened:
            self.unsent += self._boot() + self._behind_boot
            self._boot, self._behind_boot = None, b""

    def distrust(self, why: str) -> None:
        """Stop the process of a link whose other side violated the protocol."""
        self._protocol_error = why
        self.at_end = True
        self.end()

    def listen(self) -> tuple[bool, list[NodeGone]]:
        """Store data from stderr. Return whether stderr is still open, and the nodes it reports as ended."""
        try:
            data = os.read(self.stderr, MOST_READ)
        except BlockingIOError:
            return True, []
        return bool(data), self.streams.listen(data)

    def exit_descriptor(self) -> int:
        """Return a descriptor that becomes readable when the process has exited."""
        if self._pidfd < 0:
            self._pidfd = self._process.exit_descriptor()
        return self._pidfd

    @property
    def descriptors(self) -> list[int]:
        """Return all descriptors that an owner may wait on."""
        return [fd for fd in (self._process.stdin, self.stdout, self.stderr, self._pidfd) if fd >= 0]

    def failure(self, overdue: str = "") -> LinkFailure:
        """Return the failure that the transport's last output shows.

        The failure is complete once the process has exited. `overdue` is the reason for dropping a node;
        "" = its link has ended.
        """
        self.listen()
        end = self.streams.end(self._process.poll(), bool(overdue), self._protocol_error)
        return self._transport.failure(end).saying(overdue)

    def hang_up(self) -> None:
        """Close the pipe to the agent so that it exits, and wait. Stop the process if it doesn't exit."""
        self._process.close_stdin()
        if not self._ends_within(EXIT_S):
            self.end()

    def _ends_within(self, seconds: float) -> bool:
        waiting = select.poll()
        waiting.register(self.exit_descriptor(), select.POLLIN)
        return bool(waiting.poll(seconds * 1000))

    @property
    def patience_s(self) -> float:
        """Return the seconds that the process has to exit before it is killed.

        A guardian has none until its agent has started: there is nothing to sweep, and it may be suspended.
        """
        limit_s = self._transport.patience_s
        return limit_s if limit_s < math.inf or self.streams.booted else 0.0

    @property
    def has_ended(self) -> bool:
        """Return whether the process has exited."""
        return self._process.poll() is not None

    def end(self) -> None:
        """Stop the process, or kill it if `patience_s` is 0. An agent exits once its pipe is closed."""
        if not self.patience_s:
            self.kill()
        elif not self.has_ended:
            # Before there is an agent, a shell may be waiting for a program that fetches an image.
            self._process.terminate(group=not self.streams.booted)

    def kill(self) -> None:
        """Kill the process and everything it started: a ProxyCommand may not notice the closed pipe."""
        if not self.has_ended:
            self._process.kill()

    def close(self) -> None:
        """Close the pipes. Reap the process if it has exited."""
        self._process.close()
        self._close_pidfd()
        self._process.poll()  # init later reaps a guardian that is still sweeping

    def _close_pidfd(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def kill_at(self, deadline: float) -> None:
        """Wait until `deadline` (monotonic seconds) for a stopped process to exit, then kill it."""
        if not self._ends_within(max(0.0, deadline - time.monotonic())):
            self.kill()

    def reap(self, until: float) -> None:
        """Wait until `until` (monotonic seconds) for a killed process to exit.

        A process blocked on an unresponsive file system may survive SIGKILL.
        """
        self._ends_within(max(0.0, until - time.monotonic()))
        self._process.poll()
        self._close_pidfd()


class Links:
    """The links of all nodes. Several nodes may share one link. `on_frame` is called with each frame.

    `on_end` is called with the node and the reason when a link ends on its own or is overdue. `on_pull` is
    called with the node and False when an image is being pulled, and with True once it has been pulled. If
    `on_frame` raises `ProtocolError`, the link ends.
    """

    def __init__(
        self,
        on_frame: Callable[[wire.Frame], None],
        on_end: Callable[[int, LinkFailure], None],
        on_pull: Callable[[int, bool], None] = lambda node, over: None,
    ) -> None:
        self._on_frame, self._on_end, self._on_pull = on_frame, on_end, on_pull
        self._selector = selectors.DefaultSelector()
        self._links: dict[int, Link] = {}
        self._nodes: dict[Link, set[int]] = {}
        self._answered: set[int] = set()
        self._gone: dict[int, LinkFailure] = {}
        """Failures of ended nodes whose output may still arrive, since each is the last one on its link."""
        self._stopping: dict[Link, float] = {}
        """Links whose process was stopped, and the time (monotonic seconds) at which to kill the process."""

    @property
    def present(self) -> list[int]:
        """Return the nodes whose links have not ended."""
        return sorted(self._links)

    @property
    def answering(self) -> list[int]:
        """Return the present nodes whose agents have sent anything."""
        return sorted(self._links.keys() & self._answered)

    def watch(self, fd: int, handler: Callable[[], None], mask: int = selectors.EVENT_READ) -> None:
        """Make `turn` call `handler` when `fd` is ready."""
        self._selector.register(fd, mask, handler)

    def add(self, node: int, link: Link) -> None:
        """Use `link` for a node from now on."""
        self._links[node] = link
        if link in self._nodes:
            self._nodes[link].add(node)
            return
        self._nodes[link] = {node}
        self.watch(link.stdout, lambda: self._receive(link))
        self.watch(link.stderr, lambda: self._listen(link))
        self._watch_writing(link)

    def beat(self) -> list[int]:
        """Nudge shells that haven't answered, and send agents a heartbeat. Return the agents' nodes."""
        for link in self._nodes:
            link.nudge()
        for node in self.answering:
            self.send(node, Ping())
        return self.answering

    def send(self, node: int, command: tuple[Any, ...]) -> None:
        """Send one of `distlaunch.agent.messages`, if the node has a link, even before its agent runs."""
        if link := self._links.get(node):
            link.send(node, command)
            self._watch_writing(link)

    def stream(self, node: int, pieces: Iterator[bytes]) -> None:
        """Send a node the pieces of its tree, and an end marker, one at a time as the link accepts them."""
        if link := self._links.get(node):
            link.stream(wire.encode(node, 0, 0, piece, wire.TREE) for piece in chain(pieces, [b""]))
            self._watch_writing(link)

    def turn(self, wait_s: float) -> None:
        """Wait at most `wait_s` seconds for events, and handle all of them."""
        # After a suspension for longer than `wait_s`, CPython reports a timeout without looking again.
        for key, _ in self._selector.select(wait_s) or self._selector.select(0.0):
            # An earlier handler of this round may have closed the descriptor.
            if self._selector.get_map().get(key.fd) == key:
                key.data()
        # Reap processes that have exited, and kill those that haven't in time: a run may last for days.
        for link, deadline in list(self._stopping.items()):
            if link.has_ended:
                del self._stopping[link]
            elif time.monotonic() >= deadline:
                link.kill()

    def drop(self, node: int) -> None:
        """Forget a node, and stop its link's process unless the link serves others. Don't call `on_end`.

        If the node shares its link, its agent exits when the lease expires.
        """
        self._leave(node, Link.end)

    def give_up(self, node: int, why: str) -> None:
        """Drop an overdue node. Call `on_end` with its transport's output so far and `why`."""
        if link := self._links.get(node):
            failure = link.failure(why)
            self.drop(node)
            self._on_end(node, failure)

    def hang_up(self, node: int) -> None:
        """Close a link so that its agent exits, and wait for the link's process to exit."""
        self._leave(node, Link.hang_up)

    def close(self, wait: bool = True) -> None:
        """Drop the remaining nodes. Wait for stopped processes to exit, and kill those that take too long."""
        for node in self.present:
            self.drop(node)
        for link, deadline in self._stopping.items() if wait else ():
            link.kill_at(deadline)
        until = time.monotonic() + EXIT_S
        for link in self._stopping if wait else ():
            link.reap(until)
        self._selector.close()

    def _leave(self, node: int, way: Callable[[Link], None]) -> None:
        """Forget a node. End its link by calling `way`, unless the link serves another node."""
        link = self._links.pop(node, None)
        self._answered.discard(node)
        self._gone.pop(node, None)
        if link is None:
            return
        self._nodes[link].discard(node)
        if self._nodes[link]:
            link.former.add(node)
            return
        del self._nodes[link]
        for fd in link.descriptors:
            self.unwatch(fd)
        way(link)
        link.close()
        if link.patience_s < math.inf and not link.has_ended:  # `turn` kills it if it doesn't exit
            self._stopping[link] = time.monotonic() + link.patience_s

    def unwatch(self, fd: int) -> None:
        """Stop waiting for `fd`."""
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def _watch_writing(self, link: Link) -> None:
        watched = link.stdin in self._selector.get_map()
        if link.sends and not watched:
            self.watch(link.stdin, lambda: self._write(link), selectors.EVENT_WRITE)
        elif watched and not link.sends:
            self.unwatch(link.stdin)

    def _write(self, link: Link) -> None:
        link.flush_stream()
        if link in self._nodes:  # not dropped because its stream has failed
            self._watch_writing(link)

    def _listen(self, link: Link) -> None:
        more, gone = link.listen()
        if not more:
            self.unwatch(link.stderr)
        self._part_with(link, gone)

    def _receive(self, link: Link) -> None:
        """Handle the output of a link. At the end of the output, wait for the process to exit."""
        size = max(LEAST_READ, min(MOST_READ, READ_IN_TURN // len(self._nodes)))
        try:
            for each in link.receive(size):
                if isinstance(each, NodeGone):
                    self._part_with(link, [each])
                else:
                    self._take(link, each)
        except wire.ProtocolError as error:
            link.distrust(str(error))
        if link not in self._nodes:
            return  # dropped because of a frame
        self._watch_writing(link)
        self._note_pull(link)
        if link.at_end:
            # Stderr may still have data. It is complete once the process has exited.
            self.unwatch(link.stdout)
            self.watch(link.exit_descriptor(), lambda: self._end(link))

    def _note_pull(self, link: Link) -> None:
        """Report once that an image is being pulled, and once that it has been pulled."""
        pulling = link.streams.pulling
        if pulling is not link.pulling:
            link.pulling = pulling
            for node in sorted(self._nodes[link]):
                self._on_pull(node, not pulling)

    def _take(self, link: Link, frame: wire.Frame) -> None:
        """Pass on a frame. Raises `ProtocolError` if it is for a node with another link.

        `on_frame` may raise it, too.
        """
        if self._links.get(frame.node) is not link:
            if frame.node in link.former:
                return  # its agent isn't needed any more, or another one has its place
            raise wire.ProtocolError(f"a frame for node {frame.node} came on another node's link")
        self._answered.add(frame.node)
        self._on_frame(frame)

    def _part_with(self, link: Link, gone: Sequence[NodeGone]) -> None:
        """Drop ended nodes unless already dropped. The last node on a link is kept until the link ends."""
        for each in gone:
            if self._links.get(each.node) is not link:
                continue
            if len(self._nodes[link]) == 1:
                self._gone[each.node] = each.failure
            else:
                self.drop(each.node)
                self._on_end(each.node, each.failure)

    def _end(self, link: Link) -> None:
        """Drop the nodes of a link whose process has exited, and report the end of each."""
        failure = link.failure()
        failures = {node: self._gone.get(node, failure) for node in sorted(self._nodes[link])}
        for node in failures:
            self.drop(node)
        for node, failure in failures.items():
            self._on_end(node, failure)
