"""The relay: starts the transports to the nodes below its own one, where `ssh.tree` makes a tree of them.

It is the parent of its node's guardian and of those transports' processes. It hands on their three streams,
and tells their ends; what they say it does not understand, so that a node below may have a relay, too. When
its own link ends, it closes theirs: their agents leave, and it follows.
"""

import gc
import os
import select
import sys
import time

from distlaunch.agent import wire
from distlaunch.agent.lean import decode, signal
from distlaunch.agent.pipes import keep_memory, read_ahead, widen, written
from distlaunch.agent.poller import Poller
from distlaunch.agent.sweep import exit_status, reap

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, List, Optional, Sequence, Tuple

DATA, ERRORS, OPEN, BOOT, SHUT, ENDED = range(6)
"""What a RELAY frame has about the process that reaches the node it names, as its channel. DATA: bytes for
its stdin, or of its stdout; ERRORS: of its stderr; OPEN: its command line, as JSON; BOOT: as DATA, then what
the relay's own agent was booted from; SHUT: it is not wanted any more; ENDED: its exit status, or the number
of a signal, negative. OPEN, BOOT and SHUT go to the relay; ERRORS and ENDED come from it."""

_STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
_READ = wire.MAX_OUTPUT
_MOST = 1 << 20
"""Bytes that may wait for our link before the others are not read any more."""
_FLUSH_S = 15.0
"""Seconds for the last words, once all have ended."""


def main(nonce: str, node: int, boot: bytes) -> None:
    """Start the node's own guardian, and hand on what is said. Called by the boot; never returns.

    `boot` is what agents of other nodes are booted from, but for its first block.
    """
    received = read_ahead()  # before the fork: it is not the guardian's
    theirs, ours = _pipes()
    relay_pid = os.getpid()
    guardian = os.fork()
    if guardian == 0:
        _become(theirs, ours)
        from distlaunch.agent.guardian import main as guard

        guard(nonce, node, relay_pid)
    _close(theirs)
    os.write(1, wire.HELLO_PREFIX + nonce.encode() + b"\n")
    relay = Relay(0, 1, boot)
    relay.add(_Process(node, guardian, ours, is_guardian=True))
    relay.take(received)
    relay.run()
    sys.stderr.flush()
    os._exit(0)


class Relay:
    """The processes of one node's relay; `link_in` and `link_out` are those of its own link."""

    def __init__(self, link_in: int, link_out: int, boot: bytes) -> None:
        self._link_in, self._link_out, self._boot = link_in, link_out, boot
        self._decoder = wire.FrameDecoder(wire.RELAYED)
        self._poller = Poller()
        self._processes: "Dict[int, _Process]" = {}
        self._unsent = bytearray()
        self._lost = False
        self._held = False
        os.set_blocking(link_in, False)
        os.set_blocking(link_out, False)
        widen(link_out)
        keep_memory()
        # The guardian gets notices, too.
        self._poller.watch_signals((signal.SIGCHLD, *_STOPS, *wire.NOTICES), self._on_signals)
        self._poller.watch(link_in, self._receive)

    def add(self, process: "_Process") -> None:
        """Serve a process from now on."""
        self._processes[process.node] = process
        for fd in process.outputs:
            self._read_from(process, fd)

    def run(self) -> None:
        """Serve until all processes have ended, and that is told, or nobody listens."""
        gc.enable()
        while self._processes:
            self._poller.turn()
        deadline = time.monotonic() + _FLUSH_S
        while self._unsent and time.monotonic() < deadline:
            self._poller.after(deadline - time.monotonic(), "flush", lambda: None)
            self._poller.turn()

    def _on_signals(self, received: bytes) -> None:
        if any(signum in received for signum in _STOPS):
            self._stop_own()
        for pid, status in reap():
            for process in list(self._processes.values()):
                if process.pid == pid:
                    process.status = exit_status(status)
                    self._settle(process)

    def _stop_own(self) -> None:
        """Our node is to be left, as its agent says; the others are served for as long as they are there."""
        for process in self._processes.values():
            if process.is_guardian and process.status is None:
                os.kill(process.pid, signal.SIGTERM)

    # Our link

    def _receive(self) -> None:
        try:
            data = os.read(self._link_in, 1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self.take(data)
        else:
            self._hang_up()

    def take(self, data: bytes) -> None:
        """Do what the controller says."""
        try:
            for frame in self._decoder.feed(data):
                self._execute(frame)
        except wire.ProtocolError:
            self._hang_up()

    def _execute(self, frame: "wire.Frame") -> None:
        if frame.channel == OPEN:
            self.add(_started(frame.node, decode(frame.payload.decode())))
            return
        process = self._processes.get(frame.node)
        if process is None:
            return  # it has ended meanwhile
        if frame.channel == SHUT:
            self._shut(process)
        elif frame.channel in (DATA, BOOT):
            process.unsent += frame.payload
            process.unsent += self._boot if frame.channel == BOOT else b""
            self._write_to(process)

    def _hang_up(self) -> None:
        """Nobody listens any more, or nobody shall: the agents leave when their links are closed."""
        self._lost = True
        self._unsent.clear()
        for fd in (self._link_in, self._link_out):
            self._poller.forget(fd)
        self._let_on()
        for process in self._processes.values():
            self._close_input(process)

    def _post(self, node: int, what: int, payload: bytes) -> None:
        if self._lost:
            return
        self._unsent += wire.encode_relay(node, what, payload)
        self._flush()

    def _flush(self) -> None:
        try:
            if written(self._link_out, self._unsent):
                self._poller.forget(self._link_out)
            else:
                self._poller.watch(self._link_out, self._flush, select.POLLOUT)
        except OSError:
            self._hang_up()
            return
        if len(self._unsent) > _MOST:
            self._hold()
        elif len(self._unsent) < _MOST // 2:
            self._let_on()

    # The processes

    def _hold(self) -> None:
        """Read no more: what waits in the pipes slows no rank, since their agents keep it."""
        if not self._held:
            self._held = True
            for process in self._processes.values():
                for fd in process.outputs:
                    self._poller.forget(fd)

    def _let_on(self) -> None:
        if self._held:
            self._held = False
            for process in self._processes.values():
                for fd in process.outputs:
                    self._read_from(process, fd)

    def _read_from(self, process: "_Process", fd: int) -> None:
        if not self._held:
            self._poller.watch(fd, lambda: self._hand_on(process, fd))

    def _hand_on(self, process: "_Process", fd: int) -> None:
        try:
            data = os.read(fd, _READ)
        except BlockingIOError:
            return
        if data:
            self._post(process.node, ERRORS if fd == process.errors else DATA, data)
            return
        self._poller.forget(fd)
        process.outputs.remove(fd)
        os.close(fd)
        self._settle(process)

    def _settle(self, process: "_Process") -> None:
        """Tell of a process that has ended, once its last words are told."""
        if process.status is None or process.outputs:
            return
        self._close_input(process)
        del self._processes[process.node]
        self._post(process.node, ENDED, b"%d" % process.status)

    def _write_to(self, process: "_Process") -> None:
        pipe = process.input
        if pipe is None:
            return
        try:
            all_taken = written(pipe, process.unsent)
        except OSError:
            process.unsent.clear()  # it has ended, or will
            all_taken = True
        if all_taken:
            self._poller.forget(pipe)
        else:
            self._poller.watch(pipe, lambda: self._write_to(process), select.POLLOUT)

    def _close_input(self, process: "_Process") -> None:
        if process.input is not None:
            self._poller.forget(process.input)
            os.close(process.input)
            process.input = None

    def _shut(self, process: "_Process") -> None:
        """A node's agent notices the end of its link; ssh has to be killed, with what it has started."""
        self._close_input(process)
        if not process.is_guardian and process.status is None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has not yet become the leader of its group: without input it ends by itself


class _Process:
    """One that is served: the node that it reaches, its descriptors, and its exit status once it has one."""

    def __init__(self, node: int, pid: int, pipes: "Sequence[int]", is_guardian: bool = False) -> None:
        self.node, self.pid, self.is_guardian = node, pid, is_guardian
        self.input: "Optional[int]" = pipes[0]
        self.errors = pipes[2]
        self.outputs: "List[int]" = [*pipes[1:]]
        """Those of its stdout and stderr that are open."""
        self.unsent = bytearray()
        self.status: "Optional[int]" = None
        for fd in pipes:
            os.set_blocking(fd, False)
        widen(pipes[0])
        widen(pipes[1])


def _pipes() -> "Tuple[List[int], List[int]]":
    """(a process's three streams, our ends of them)."""
    (stdin, to_stdin), (from_stdout, stdout), (from_stderr, stderr) = os.pipe(), os.pipe(), os.pipe()
    return [stdin, stdout, stderr], [to_stdin, from_stdout, from_stderr]


def _started(node: int, argv: "List[str]") -> _Process:
    theirs, ours = _pipes()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            _become(theirs, ours)
            for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
                signal.signal(signum, signal.SIG_DFL)
            os.execvp(argv[0], argv)
        except OSError as error:
            os.write(2, b"can't start %b: %b\n" % (os.fsencode(argv[0]), (error.strerror or "").encode()))
        finally:
            os._exit(127)
    _close(theirs)
    return _Process(node, pid, ours)


def _become(streams: "Sequence[int]", others: "Sequence[int]") -> None:
    """Make these our three streams."""
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
    _close([*streams, *others])


def _close(fds: "Sequence[int]") -> None:
    for fd in fds:
        os.close(fd)
