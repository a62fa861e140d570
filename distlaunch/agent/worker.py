"""Spawns workers, and describes how they started and exited.

A worker is started by fork and exec in its own session. It has default signal handling, stdin from /dev/null,
and pipes for stdout and stderr, except for descriptors that it shares with the controller or with a
launcher that joined. A pipe that exec closes shows whether exec succeeded. This distinguishes "no such file"
from a program that exits with 127.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import time
from collections.abc import Callable

from distlaunch.agent import gpus, procfs, scratch, sweep, wire
from distlaunch.agent.messages import LATER_S, WorkerSpec, WorkerUnstarted
from distlaunch.agent.poller import Poller, widen

DESCRIPTORS = 6
"""Maximum number of descriptors open per worker while it is being started."""
MAX_WORDS = 1 << 14
"""Maximum bytes of a worker's last output in the report of its exit."""
MAX_LATER = 1 << 11
"""Maximum bytes of output on the other stream, after a traceback, in that report."""
NEVER = -1.0
"""A time before any output."""
_TRACEBACK = b"Traceback (most recent call last):"
_AT_EXIT = b"terminate called without an active exception"
"""What C++ prints if a thread outlives the interpreter. It doesn't show why that exits."""


class Worker:
    """A spawned worker: its spec, environment, PID, pipe descriptors and error record path.

    `streams` are the open pipes, keyed by 0 for stdout and 1 for stderr. `printed` counts the bytes of the
    worker's output. `device` is its GPU, as returned by `gpus.device_of`. `exec_pipe` is the pipe that
    confirms exec, or -1 once it has been read. `started` is set after exec, and `stopping` once the worker
    has been signaled to stop.
    """

    def __init__(
        self, spec: WorkerSpec, env: dict[str, str], pid: int, streams: dict[int, int], exec_pipe: int
    ) -> None:
        self.spec, self.local_rank, self.env = spec, spec.local_rank, env
        self.pid, self.streams, self.exec_pipe = pid, streams, exec_pipe
        self.error_file = env["TORCHELASTIC_ERROR_FILE"]
        among = 0 if spec.one_device else spec.local_rank
        self.device = gpus.device_of(among, env.get("CUDA_VISIBLE_DEVICES"))
        self.printed, self._last = 0, [b"", b""]
        self._printed_at, self._traced_at, self._later = [NEVER, NEVER], [NEVER, NEVER], [b"", b""]
        self.running, self.started, self.stopping = True, False, False

    def record_output(self, stream: int, data: bytes | memoryview) -> None:
        """Record output that the worker has printed."""
        self.printed += len(data)
        if not self.stopping:  # output after the signal to stop is not the cause
            self._last[stream] = (self._last[stream] + data[-MAX_WORDS:])[-MAX_WORDS:]
            self._printed_at[stream] = time.monotonic()
            if _TRACEBACK in self._last[stream][-len(data) - len(_TRACEBACK) :]:
                self._traced_at[stream] = self._printed_at[stream]
                self._later[1 - stream] = b""
            elif self._traced_at[1 - stream] != NEVER:
                self._later[stream] = (self._later[stream] + data[-MAX_LATER:])[-MAX_LATER:]

    def words(self, status: int) -> tuple[bytes, tuple[float, float]]:
        """Return its last output before it was signaled to stop, and `went_on` (see `WorkerExited`).

        That is stderr, or stdout if stderr is empty, as after `2>&1`, or if stdout has the latest traceback,
        as after logging. After LATER_S, what it prints to the other stream follows. A crash is explained on
        stderr.
        """
        exited, (stdout, stderr) = status > 0 or self.stopping, self._traced_at
        empty = not self._last[1].replace(_AT_EXIT, b"").strip()
        stream = 0 if (exited and stdout > stderr) or empty else 1
        traced, other = self._traced_at[stream], 1 - stream
        if traced == NEVER:
            return self._last[stream], (0.0, 0.0)
        went_on = [max(0.0, self._printed_at[each] - traced) for each in (stream, other)]
        later = self._later[other] if exited and went_on[1] >= LATER_S else b""
        return self._last[stream] + later, (went_on[0], went_on[1])

    def signal(self, signum: int) -> None:
        """Send a signal to the worker's process group.

        A reaped worker gets none, since its PID may have been reused.
        """
        if self.running:
            try:
                os.killpg(self.pid, signum)
            except ProcessLookupError:
                os.kill(self.pid, signum)  # its process group doesn't exist yet
            except PermissionError:
                pass  # now belongs to another user; the sweep after the grace period reports it

    def warn(self, signum: int) -> None:
        """Send a signal to the processes of the worker's group that handle it. It would kill the others."""
        for pid in procfs.family(self.pid) if self.running else ():
            try:
                if os.getpgid(pid) == self.pid and procfs.handles(pid, signum):
                    os.kill(pid, signum)
            except OSError:
                pass  # it has exited, or now belongs to another user

    def error_record(self) -> wire.Message | None:
        """Read the {message, callstack, timestamp} that torch's @record wrote to TORCHELASTIC_ERROR_FILE.

        Return None if there is no such record.
        """
        try:
            record = json.loads(b"".join(scratch.read_left(self.error_file, scratch.MAX_ERROR_RECORD)))
        except (ValueError, RecursionError):
            return None
        return _texts(record.get("message") if isinstance(record, dict) else None)


def _texts(message: object) -> wire.Message | None:
    """Convert torch's `message`, a string or an object, to an `error_record`; None if it is neither."""
    if isinstance(message, str):
        message = {"message": message}
    if not isinstance(message, dict):
        return None
    extra = message.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    texts = message.get("message"), extra.get("py_callstack"), extra.get("timestamp")
    return {name: str(text or "") for name, text in zip(("message", "callstack", "timestamp"), texts)}


def environment(spec: WorkerSpec) -> dict[str, str]:
    """Return a worker's environment. `env` overrides the node's variables, which override `defaults`."""
    merged = {**spec.defaults, **os.environ, **spec.env}
    if spec.one_device and "CUDA_VISIBLE_DEVICES" in os.environ:  # "" hides all GPUs
        devices = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        merged["CUDA_VISIBLE_DEVICES"] = "".join(devices[spec.local_rank :][:1])
    return merged


def spawn(spec: WorkerSpec, error_file: str) -> Worker:
    """Start a worker whose paths `at_home` has expanded. Raises OSError if a pipe or fork is refused.

    Returns immediately: the outcome of chdir and exec arrives on ``exec_pipe`` (see `exec_failure`).
    """
    env = environment(spec)
    env["TORCHELASTIC_ERROR_FILE"] = error_file
    shared = {fd: _shared[fd] for fd in spec.shares if fd in _shared}
    pipes = {fd: _wide_pipe() for fd in (1, 2) if fd not in shared}
    confirm = os.pipe()
    agent = os.getpid()

    def become() -> None:
        for fd in _kept if _shared else ():
            os.set_inheritable(fd, True)
        ends = {fd: write for fd, (_, write) in pipes.items()}
        _become_worker(spec, env, {**shared, **ends}, confirm[1], agent)

    pid = forked(become, *pipes.values(), confirm)
    for read, _ in (*pipes.values(), confirm):
        os.set_blocking(read, False)
    streams = {fd - 1: read for fd, (read, _) in pipes.items()}
    return Worker(spec, env, pid, streams, confirm[0])


def _wide_pipe() -> tuple[int, int]:
    """Create a pipe that can hold one OUTPUT payload, so that reader and writer wake up less often."""
    ends = os.pipe()
    widen(ends[1], wire.MAX_OUTPUT)
    return ends


def forked(become: Callable[[], None], *pipes: tuple[int, int]) -> int:
    """Fork a child that runs `become`, which should exec. Return the child's PID. Raises OSError.

    The child writes to `pipes`. Their read ends stay open in this process, unless fork fails.
    """
    # Until the child has reset its handlers, the agent's handlers would swallow signals to the child.
    before = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            try:
                become()
            finally:
                os._exit(127)
        return pid
    except OSError:
        for read, _ in pipes:
            os.close(read)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for _, write in pipes:
            os.close(write)


def start_child(
    poller: Poller,
    run: Callable[[], object],
    limit_s: float,
    on_output: Callable[[bytes], bool | None],
    on_end: Callable[[bool], object],
) -> int:
    """Fork a process that calls `run`, capture its output, and return its PID. Raises OSError.

    `on_output` is called with the output; it returns True if no more is needed. Then `on_end` is called once,
    with True if `limit_s` seconds passed before the output ended. The process is reaped like any other child
    of the agent. The sweep kills it if it hangs.
    """
    agent, (pipe, write) = os.getpid(), os.pipe()
    os.set_blocking(pipe, False)

    def become() -> None:
        begin(agent)
        os.dup2(write, 1)
        os.dup2(write, 2)
        run()

    def receive() -> None:
        data = os.read(pipe, 1 << 16)
        if not data or on_output(data):
            end()

    def end(late: bool = False) -> None:
        poller.forget(pipe)
        poller.cancel(deadline)
        os.close(pipe)
        on_end(late)

    pid = forked(become, (pipe, write))
    deadline = "child %d" % pid
    poller.watch(pipe, receive)
    poller.after(limit_s, deadline, lambda: end(late=True), awake=True)
    return pid


def at_home(spec: WorkerSpec) -> WorkerSpec:
    """Replace ~ at the beginning of the paths in `spec` with the user's home directory on this node."""
    argv = tuple([_expanded(word) if i in spec.paths else word for i, word in enumerate(spec.argv)])
    return spec._replace(argv=argv, cwd=_expanded(spec.cwd))


def _script(spec: WorkerSpec) -> str:
    """Return the script that the program runs, or "" if there is none."""
    last = max(spec.paths, default=0)
    return spec.argv[last] if last else ""


def _check_readable(script: str) -> None:
    """Raise OSError if a script isn't readable. Python would report this only through its exit status."""
    os.stat(script)
    if not os.access(script, os.R_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _expanded(path: str) -> str:
    return os.path.expanduser(path) if path == "~" or path.startswith("~/") else path


def _become_worker(
    spec: WorkerSpec, env: dict[str, str], stdio: dict[int, int], confirm: int, agent: int
) -> None:
    """In the forked child, exec the worker. If that fails, write `STAGE ERRNO` to the pipe `confirm`.

    `stdio` maps the worker's descriptors to the ones in this process. `agent` is the PID of the agent.
    """
    stage = "setup"
    try:
        begin(agent)
        sweep.allow_tracing(agent)
        _bind(spec)
        for fd, end in stdio.items():
            os.dup2(end, fd)
        stage = "workdir"
        os.chdir(spec.cwd)
        env["PWD"] = spec.cwd
        resource.setrlimit(resource.RLIMIT_NOFILE, _own_limit)  # only after the last open
        stage = "script"
        if _script(spec):
            _check_readable(_script(spec))
        stage = "exec"
        os.execvpe(spec.argv[0], spec.argv, env)
    except OSError as error:
        os.write(confirm, ("%s %d" % (stage, error.errno or 0)).encode())
    except ValueError:  # a NUL inside an argument or a variable
        os.write(confirm, ("%s %d" % (stage, errno.EINVAL)).encode())


def _bind(spec: WorkerSpec) -> None:
    if spec.cpus:
        from distlaunch.agent import cpus  # already imported to choose them

        os.sched_setaffinity(0, cpus.cpu_set(spec.cpus))


def begin(agent: int) -> None:
    """Give a forked child a new session, default signal handling and no input. Make it die with the agent."""
    os.setsid()
    sweep.die_with_parent(signal.SIGKILL, agent)
    _reset_signals()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def _reset_signals() -> None:
    # Ignored and blocked signals survive exec, and Python itself ignores SIGPIPE and SIGXFSZ.
    signal.set_wakeup_fd(-1)
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(signum, signal.SIG_IGN if signum in _ignored else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def exec_failure(node: int, data: bytes, spec: WorkerSpec) -> WorkerUnstarted:
    """Return the report for `data` from ``exec_pipe``, which is `STAGE ERRNO` as written by the child."""
    stage, _, number = data.decode().partition(" ")
    return unstarted(node, spec, stage, int(number))


def unstarted(node: int, spec: WorkerSpec, stage: str, code: int, why: str = "") -> WorkerUnstarted:
    """Return the report for a worker whose fork, chdir or exec failed with errno `code`.

    `why` replaces the text derived from `stage` and `code`.
    """
    subject = _subject(spec, stage)
    if stage == "exec" and code == errno.EACCES and "/" not in subject:
        # The search of PATH reports a directory that can't be searched, although the program is nowhere.
        places = environment(spec).get("PATH", os.defpath).split(":")
        if not any(os.path.isfile(os.path.join(place, subject)) for place in places):
            code = errno.ENOENT
    if stage == "exec" and code == errno.ENOENT:
        here = os.path.exists(os.path.join(spec.cwd, subject))
        if "/" not in subject:
            stage = "beside" if here else "search"
        elif here:
            stage = "interpreter"
    elif stage == "exec" and code == errno.EACCES:
        is_directory = "/" in subject and os.path.isdir(os.path.join(spec.cwd, subject))
        stage = "directory" if is_directory else "mode"
    words = _longest(spec) if code == errno.E2BIG else _BY_STAGE.get(stage) or _BY_CODE.get(code)
    why = why or "%s: %s" % (subject, words or os.strerror(code))
    return WorkerUnstarted(node, spec.local_rank, stage, code, why)


def _subject(spec: WorkerSpec, stage: str) -> str:
    """Return the path, program or CPUs that caused a failure."""
    subjects = {"workdir": spec.cwd, "script": _script(spec)}
    if spec.cpus:
        subjects["setup"] = "binding to CPU %s" % spec.cpus  # the other setup steps rarely fail
    return str(subjects.get(stage, spec.argv[0]))


def _longest(spec: WorkerSpec) -> str:
    name = max([*spec.argv, *map("=".join, environment(spec).items())], key=len).partition("=")[0]
    return "its arguments and environment are too long (E2BIG); the longest is " + name[:40]


_BY_STAGE = {
    "interpreter": "the interpreter in its #! line (or, for a binary, its loader) does not exist; "
    "check for Windows line endings",
    "directory": "is a directory; write the path of a program",
    "mode": "Permission denied; make it executable (chmod +x), on a file system mounted without noexec",
    "beside": "not found in PATH; to run the file with that name in the workdir, write ./ before it",
    "search": "not found in PATH on its node; use its full path, or set PATH (env.PATH in a job file)",
}
_BY_CODE = {
    errno.ENOEXEC: "not executable: no #! line and no known binary format",
    errno.EMFILE: "Too many open files: raise the limit on its node (ulimit -n, limits.conf)",
    errno.EAGAIN: "Too many processes: raise the limit on its node (ulimit -u, limits.conf, pids.max)",
}
_ignored = [signum for signum in wire.WARNINGS if signal.getsignal(signum) is signal.SIG_IGN]
"""Termination warnings that were already ignored when this agent started.

Workers ignore them, too, unless they set their own handlers.
"""
_own_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
"""The limit on descriptors for workers. The agent raises its own limit (`poller.make_room`)."""
_shared = dict(enumerate(map(int, filter(None, os.environ.pop(wire.SHARED, "").split(",")))))
"""Copies of the controller's stdin and stdout, keyed by 0 and 1; empty if there are none (`wire.SHARED`)."""


def share(*fds: int) -> None:
    """Let workers share these descriptors of this process. A launcher that joined calls this."""
    _shared.update({fd: os.dup(fd) for fd in fds})


_kept: list[int] = []
"""The MPI descriptors that a worker inherits if it shares stdin or stdout."""


def close_inherited() -> None:
    """Mark every descriptor above stderr close-on-exec, because sshd and shells leak some."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            try:
                if name == os.environ.get(wire.SHARED_PMI) and os.get_inheritable(int(name)):
                    _kept.append(int(name))
                os.set_inheritable(int(name), False)
            except OSError:
                continue
