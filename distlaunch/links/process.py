"""Starts the process that reaches a node: sh, ssh, srun, or whatever a transport says."""

import contextlib
import errno
import os
import signal
from collections.abc import Mapping, Sequence

from distlaunch.agent import wire
from distlaunch.agent.poller import widen
from distlaunch.system.here import exit_descriptor

_DEFAULTS = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python ignores; what it starts must not."""


class Child:
    """A process, and our ends of the pipes to its three streams.

    What a link needs of `subprocess.Popen`, whose import takes longer than a shell's start.
    """

    def __init__(self, pid: int, pipes: Sequence[int]) -> None:
        self.pid = pid
        self.stdin, self.stdout, self.stderr = pipes
        self._status: int | None = None

    def poll(self) -> int | None:
        """Its exit code, or the negative signal, once it has ended: then it is reaped."""
        return self._reap(os.WNOHANG)

    def wait(self) -> None:
        """Wait for its end."""
        self._reap(0)

    def signal(self, signum: int) -> None:
        """Send it a signal, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def signal_group(self, signum: int) -> None:
        """Send a signal to it and what it has started, if anything of that is left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signum)

    def kill(self) -> None:
        """Kill it and what it has started; it is still to be waited for."""
        self.signal_group(signal.SIGKILL)

    def exit_descriptor(self) -> int:
        """A descriptor, to be closed, that becomes readable when it has ended."""
        return exit_descriptor(self.pid)

    def close_stdin(self) -> None:
        """Close the pipe to it, if that is open."""
        if self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1

    def close(self) -> None:
        """Close all pipes; once."""
        self.close_stdin()
        for fd in (self.stdout, self.stderr):
            os.close(fd)

    def _reap(self, options: int) -> int | None:
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:
                pid, status = self.pid, 0  # the kernel reaps, as where SIGCHLD is ignored: nobody knows
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status


def start(argv: Sequence[str], environ: Mapping[str, str], sharing: Sequence[int] = ()) -> Child:
    """A process with a pipe to each of its three streams, in a session of its own. Raises OSError.

    It gets copies of the descriptors in `sharing`. The terminal's Ctrl-C does not reach it: that is for us to
    interpret, not for ssh.
    """
    copies = [os.dup(fd) for fd in sharing]
    environ = {**environ, wire.SHARED: ",".join(map(str, copies))}
    if sharing and environ.get(wire.SHARED_PMI, "").isdecimal():
        copies.append(os.dup(int(environ[wire.SHARED_PMI])))
        environ[wire.SHARED_PMI] = str(copies[-1])
    theirs, ours = [], []
    try:
        for to_child in (True, False, False):
            read, write = os.pipe()
            theirs.append(read if to_child else write)
            ours.append(write if to_child else read)
        # An agent boots from what fits into the one, and prints into the other faster than we read.
        for fd in ours[:2]:
            widen(fd)
        others = _inheritable()
        for fd in copies:
            os.set_inheritable(fd, True)
        pid = os.posix_spawn(
            _program(argv[0], environ),
            list(argv),
            environ,
            file_actions=[
                *((os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(theirs)),
                *((os.POSIX_SPAWN_CLOSE, fd) for fd in others),
            ],
            setsid=True,
            setsigdef=_DEFAULTS,
        )
        return Child(pid, ours)
    except BaseException:
        for fd in ours:
            os.close(fd)
        raise
    finally:
        for fd in (*copies, *theirs):
            os.close(fd)


def _program(name: str, environ: Mapping[str, str]) -> str:
    """The file that a name means with that PATH."""
    if "/" in name:
        return name
    for folder in os.get_exec_path(environ):
        path = os.path.join(folder, name)
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


def _inheritable() -> list[int]:
    """What our caller has left open for us, beyond the three streams: ssh may outlive us, and keep it so.

    What was opened under a higher limit stays: posix_spawn refuses to close it.
    """
    found, limit = [], os.sysconf("SC_OPEN_MAX")
    for name in os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"):
        with contextlib.suppress(OSError):  # what listed them
            if 2 < int(name) < limit and os.get_inheritable(int(name)):
                found.append(int(name))
    return found
