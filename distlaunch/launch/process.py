"""The process behind a link to a node, such as sh, ssh or srun, or the connection that replaces it."""

import contextlib
import errno
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from functools import partial

from distlaunch.agent import wire
from distlaunch.agent.poller import widen
from distlaunch.here import exit_descriptor

_DEFAULTS = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python ignores, but that its children must not ignore."""
SILENT_S = 15
"""Seconds without an answer after which a connection counts as dead, as with ssh."""


class Child:
    """A process, and the near ends of the pipes to its three streams.

    It replaces `subprocess.Popen`, whose import takes longer than starting a shell.
    """

    def __init__(self, pid: int, pipes: Sequence[int]) -> None:
        self.pid = pid
        self.stdin, self.stdout, self.stderr = pipes
        self.status: int | None = None

    def poll(self) -> int | None:
        """Return the exit code or negative signal; None until the process has exited and been reaped."""
        return self._reap(os.WNOHANG)

    def wait(self) -> None:
        """Wait until the process exits."""
        self._reap(0)

    def terminate(self, group: bool) -> None:
        """Stop the process or its whole `group`, which may outlive it."""
        if group:
            self._signal_group(signal.SIGTERM)
        elif self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process and everything that it has started. The caller must still wait for it."""
        self._signal_group(signal.SIGKILL)

    def exit_descriptor(self) -> int:
        """Return a descriptor that becomes readable when the process has exited. The caller closes it."""
        return exit_descriptor(self.pid)

    def close_stdin(self) -> None:
        """Close the pipe to the process's stdin, if it is open."""
        if self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1

    def close(self) -> None:
        """Close all pipes, once."""
        for fd in (self.stdin, self.stdout, self.stderr):
            if fd >= 0:
                os.close(fd)

    def _signal_group(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signum)

    def _reap(self, options: int) -> int | None:
        """Return the status once the process has exited. `options` are those of `os.waitpid`."""
        if self.status is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:
                pid, status = self.pid, 0  # SIGCHLD is ignored, so the kernel has reaped it
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status


class Peer(Child):
    """A connection that replaces a link's process. `sock` is None if the connection was never made.

    `inbound.JoinedLink` sets the `status`, which it receives from the other side.
    """

    def __init__(self, sock: socket.socket | None) -> None:
        # Nothing is written to this pipe: stderr is at EOF.
        stderr, write = os.pipe()
        os.close(write)
        if sock:
            watch_for_silence(sock)
            stdout = sock.detach()
            stdin = os.dup(stdout)  # each is watched separately
        else:
            stdout, stdin = os.dup(stderr), os.open(os.devnull, os.O_WRONLY)
        super().__init__(0, (stdin, stdout, stderr))

    def exit_descriptor(self) -> int:
        """Return a descriptor that is already readable, because a closed connection doesn't need any wait."""
        return os.dup(self.stderr)

    def kill(self) -> None:
        """Close the connection in both directions, so that the other side stops its ranks and exits."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.stdout)) as sock:
            sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection, which then counts as ended."""
        super().close()
        self.status = self.status or 0

    def _reap(self, options: int) -> int | None:
        return self.status


def start(
    argv: Sequence[str], environ: Mapping[str, str], sharing: Sequence[int] = (), blocked: Sequence[int] = ()
) -> Child:
    """Start a process with a pipe to each of its three streams, in its own session. Raises OSError.

    The process gets copies of the descriptors in `sharing` and blocks only the `blocked` signals. Ctrl-C in
    the terminal does not reach the process, because the controller, not ssh, must handle it.
    """
    copies = [os.dup(fd) for fd in sharing]
    environ = {**environ, wire.SHARED: ",".join(map(str, copies))}
    environ.pop("", None)  # can be inherited, but posix_spawn refuses it
    if sharing and environ.get(wire.SHARED_PMI, "") in map(str, _inheritable()):  # else it is a leftover
        copies.append(os.dup(int(environ[wire.SHARED_PMI])))
        environ[wire.SHARED_PMI] = str(copies[-1])
    theirs, ours = [], []
    try:
        for to_child in (True, False, False):
            read, write = os.pipe()
            theirs.append(read if to_child else write)
            ours.append(write if to_child else read)
        # The agent's code should fit into one pipe, and output may arrive faster than it is read.
        for fd in ours[:2]:
            widen(fd)
        streams = ((os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(theirs))
        actions = [*streams, *((os.POSIX_SPAWN_CLOSE, fd) for fd in _inheritable())]
        for fd in copies:
            os.set_inheritable(fd, True)
        program, words = _program(argv[0], environ), list(argv)
        spawn = partial(os.posix_spawn, file_actions=actions, setsid=True, setsigdef=_DEFAULTS)
        pid = spawn(program, words, environ, setsigmask=blocked)
        return Child(pid, ours)
    except BaseException:
        for fd in ours:
            os.close(fd)
        raise
    finally:
        for fd in (*copies, *theirs):
            os.close(fd)


def _program(name: str, environ: Mapping[str, str]) -> str:
    """Return the path of the named program, according to PATH in `environ`."""
    if "/" in name:
        return name
    for directory in os.get_exec_path(environ):
        path = os.path.join(directory, name)
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


def _inheritable() -> list[int]:
    """Return the caller's inheritable descriptors other than the three streams.

    ssh may outlive this process and would keep these descriptors open. Descriptors opened under a higher
    limit stay open, because posix_spawn refuses to close them.
    """
    found, limit = [], os.sysconf("SC_OPEN_MAX")
    for name in os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"):
        with contextlib.suppress(OSError):  # the descriptor that `listdir` used
            if 2 < int(name) < limit and os.get_inheritable(int(name)):
                found.append(int(name))
    return found


def watch_for_silence(sock: socket.socket) -> None:
    """Make the kernel close a connection whose other side is gone, and send data without delay."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_USER_TIMEOUT", SILENT_S * 1000),
        ("TCP_KEEPIDLE", SILENT_S // 3),
        ("TCP_KEEPINTVL", SILENT_S // 3),
        ("TCP_KEEPCNT", 2),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
