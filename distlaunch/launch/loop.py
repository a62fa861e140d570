"""The loop: waits for links, signals and deadlines, feeds the supervisor, executes its actions."""

import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from distlaunch.agent import wire
from distlaunch.job.spec import JobSpec, NodeSpec
from distlaunch.launch import commands
from distlaunch.launch.record import Record
from distlaunch.launch.reports import event_of
from distlaunch.rim.bundle import agent_modules
from distlaunch.rim.link import Link
from distlaunch.supervisor import actions, events
from distlaunch.supervisor.state import State
from distlaunch.supervisor.step import begin, step
from distlaunch.transport.argv import argv_of
from distlaunch.transport.boot import boot_text, candidates_text

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """Turns signals into bytes on a pipe while it is entered; SIGHUP stays ignored under nohup."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write, False)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for signum in (*_STOP_SIGNALS, signal.SIGCHLD):
            if signum == signal.SIGHUP and signal.getsignal(signum) is signal.SIG_IGN:
                continue
            self._before[signum] = signal.signal(signum, lambda *_: None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(-1)
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        os.close(self.fd)
        os.close(self._write)

    def raise_from_thread(self, signum: int) -> None:
        """Have the loop see `signum`; safe from any thread."""
        os.write(self._write, bytes([signum]))

    def received(self) -> bytes:
        """The numbers of the signals that came."""
        return os.read(self.fd, 4096)


class Loop:
    """Runs one job to its end."""

    def __init__(self, spec: JobSpec, run_id: str, record: Record, signals: Signals) -> None:
        self._spec, self._run_id, self._record, self._signals = spec, run_id, record, signals
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals.fd, selectors.EVENT_READ, self._on_signals)
        self._links: dict[int, Link] = {}
        self._clock_offsets: dict[int, float] = {}
        self._next_heartbeat = time.monotonic() + commands.HEARTBEAT_S
        self._finished = False
        self.state: State

    def run(self, master_address: str | None) -> State:
        """Run the job; the last state tells how it ended."""
        self.state, first = begin(self._spec, master_address, time.monotonic())
        self._execute(first)
        while not self._finished:
            for key, _ in self._selector.select(self._wait_s()):
                # An earlier handler of this round may have closed the descriptor.
                if self._selector.get_map().get(key.fd) == key:
                    key.data()
            self._look_at_clock()
        for node in list(self._links):
            self._forget(node)
        self._selector.close()
        return self.state

    def _wait_s(self) -> float:
        deadline = self.state.next_deadline
        due = self._next_heartbeat if deadline is None else min(deadline, self._next_heartbeat)
        return max(0.0, due - time.monotonic())

    def _look_at_clock(self) -> None:
        now = time.monotonic()
        deadline = self.state.next_deadline
        if deadline is not None and now >= deadline:
            self._feed(events.Ticked())
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + commands.HEARTBEAT_S
            for node in range(len(self.state.nodes)):
                self._send(node, {"op": "ping"})

    def _feed(self, event: events.Event) -> None:
        self.state, todo = step(self.state, event, time.monotonic())
        self._record.event(event, self.state)
        self._execute(todo)

    def _execute(self, todo: tuple[actions.Action, ...]) -> None:
        for action in todo:
            match action:
                case actions.Connect():
                    self._connect(action.node)
                case actions.Drop():
                    self._forget(action.node)
                case actions.Notice():
                    self._record.notice(action)
                case actions.Finish():
                    self._finished = True
                case _:
                    self._send(action.node, commands.message_for(action, self.state, self._run_id))

    def _connect(self, index: int) -> None:
        node = self._spec.nodes[index]
        nonce = os.urandom(16).hex()
        boot = boot_text(agent_modules(), nonce, index, self._run_id)
        opening = candidates_text(self._interpreters(node)) + boot
        link = Link(argv_of(node.reach, self._spec.ssh), opening, nonce)
        self._links[index] = link
        self._watch(link.stdout, lambda: self._receive(index, link))
        self._watch(link.stderr, lambda: self._listen(link))

    def _interpreters(self, node: NodeSpec) -> list[str]:
        named = node.python or self._spec.python
        return [named] if named else [sys.executable, "python3"]

    # Links

    def _send(self, node: int, message: wire.Message) -> None:
        link = self._links.get(node)
        if link and link.booted:
            link.send(message)
            self._watch_writing(node, link)

    def _watch(self, fd: int, handler: Callable[[], None], mask: int = selectors.EVENT_READ) -> None:
        self._selector.register(fd, mask, handler)

    def _unwatch(self, fd: int) -> None:
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def _watch_writing(self, node: int, link: Link) -> None:
        watched = link.stdin in self._selector.get_map()
        if link.has_unsent and not watched:
            self._watch(link.stdin, lambda: self._flush(node, link), selectors.EVENT_WRITE)
        elif watched and not link.has_unsent:
            self._unwatch(link.stdin)

    def _flush(self, node: int, link: Link) -> None:
        link.flush()
        self._watch_writing(node, link)

    def _receive(self, node: int, link: Link) -> None:
        try:
            for frame in link.receive():
                self._take(node, frame)
        except wire.ProtocolError as error:
            link.distrust(str(error))
        if self._links.get(node) is not link:
            return  # dropped by what it said
        self._watch_writing(node, link)
        if link.at_end:
            self._unwatch(link.stdout)
            self._check_ended(node, link)

    def _take(self, node: int, frame: wire.Frame) -> None:
        if frame.node != node:
            raise wire.ProtocolError(f"a frame of node {frame.node} came on the link of node {node}")
        if frame.kind == wire.OUTPUT:
            local_rank, stream = divmod(frame.channel, 2)
            rank = self.state.rank_of(node, local_rank)
            if rank is None:
                raise wire.ProtocolError(f"output of a local rank {local_rank} that does not exist")
            self._record.output(rank, stream, frame.payload)
            return
        message = frame.message()
        if isinstance(message.get("t"), (int, float)):
            self._learn_clock(node, message["t"])
        event = event_of(node, message, lambda t: t + self._clock_offsets.get(node, 0.0))
        if event is not None:
            self._feed(event)

    def _learn_clock(self, node: int, node_time: float) -> None:
        """The smallest difference seen is the one with the least delay on the way."""
        offset = time.monotonic() - node_time
        self._clock_offsets[node] = min(offset, self._clock_offsets.get(node, offset))

    def _listen(self, link: Link) -> None:
        if not link.listen():
            self._unwatch(link.stderr)

    def _check_ended(self, node: int, link: Link) -> None:
        if link.ended():
            failure = link.failure()
            self._forget(node)
            self._feed(events.LinkEnded(node, failure))

    def _forget(self, node: int) -> None:
        link = self._links.pop(node, None)
        if link is None:
            return
        for fd in (link.stdin, link.stdout, link.stderr):
            self._unwatch(fd)
        link.kill()
        link.close()

    def _on_signals(self) -> None:
        received = self._signals.received()
        if signal.SIGCHLD in received:
            for node, link in list(self._links.items()):
                self._check_ended(node, link)
        for signum in received:
            if signum in (*_STOP_SIGNALS, signal.SIGPIPE):
                self._feed(events.Interrupted(signum))
