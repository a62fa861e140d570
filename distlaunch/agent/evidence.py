"""Evidence of a failure on one node, collected before anything is stopped.

`snapshot` reads the kernel's view of the workers within milliseconds. Slower evidence, such as Python stacks
from py-spy and the answer of NCCL's RAS service, is collected by forked children with a time limit. Flight
recorders write their dumps when something is written to their pipes.
"""

from __future__ import annotations

import os
import signal
import time
import zlib
from collections.abc import Callable

from distlaunch.agent import messages, procfs, sweep
from distlaunch.agent.outbox import Outbox
from distlaunch.agent.poller import Poller
from distlaunch.agent.scratch import PREFIX, Directory
from distlaunch.agent.wire import Message
from distlaunch.agent.worker import Worker, start_child

MAX_WORKERS, MAX_SOCKETS, MAX_LINES = 64, 32, 20
"""Maximum numbers of workers, sockets per worker, and kernel log lines in a snapshot."""
KERNEL_READ_S = 0.1
"""Maximum seconds to spend reading the kernel log."""
STACKS_S, RAS_S = 20.0, 3.0
TRIES = 5
"""Maximum number of times to run py-spy for one worker."""
MAX_TEXT = 1 << 16
"""Maximum bytes of one worker's stacks, or of the RAS answer."""
_RAS_PORTS = range(28100, 32100)
"""Ports below the ephemeral range, except NCCL's default, 28028, which all jobs on a node would share."""


class Site:
    """The workers of an attempt on one node, as a source of evidence. Reports go to `outbox`."""

    def __init__(self, poller: Poller, outbox: Outbox, directory: Directory, attempt: int) -> None:
        self._poller, self._outbox, self._directory, self._attempt = poller, outbox, directory, attempt

    def collect(
        self, command: messages.Capture, workers: list[Worker], use: Callable[[str], object], began: float
    ) -> None:
        """Answer `Capture`: report the state of all workers, and the requested stacks.

        Without py-spy, `abort` sends SIGABRT, which kills the worker. If PYTHONFAULTHANDLER is set, Python
        first prints the stacks to the worker's stderr. `use` returns the utilization of a GPU. `began` is the
        time at which the attempt began.
        """
        self._report(snapshot(workers, use, began))
        for worker in workers:
            if worker.local_rank in command.local_ranks:
                self._dump(worker, command.abort, self._report_dump)

    def read_stacks(self, workers: list[Worker], use: Callable[[str], object]) -> None:
        """Report the Python stacks of workers, and their state, at a user's request.

        The supervisor doesn't receive them. `use` is as in `collect`.
        """

        def report(worker: Worker, text: str) -> None:
            self._report({"stacks": [[worker.local_rank, text]], "workers": [_worker(worker, {}, use)]})

        for worker in workers:
            self._dump(worker, False, report)

    def ask_nccl(self, envs: list[dict[str, str]]) -> None:
        """Request flight recorder dumps, and query NCCL's RAS service. `envs` are the workers' variables."""
        for env in envs:
            _request_flight(_pipe_prefix(self._directory, self._attempt) + env.get("RANK", "") + ".pipe")
        address = envs[0].get("NCCL_RAS_ADDR", "")
        _collect(self._poller, lambda: os.write(1, _ask_ras(address)), RAS_S, self._report_ras)

    def _report(self, taken: Message) -> None:
        self._outbox.report(messages.Evidence(self._outbox.node, self._attempt, taken))

    def _report_ras(self, text: bytes) -> None:
        if text:
            self._report({"ras": text.decode(errors="replace")})

    def _dump(self, worker: Worker, abort: bool, report: Callable[[Worker, str], None]) -> None:
        """Report a worker's Python stacks, using py-spy. Without it, `abort` makes Python print them."""
        program = _py_spy(worker.spec.argv[0])
        if program:
            self._read(program, worker, TRIES, report)
        elif abort:
            sweep.send(worker.pid, signal.SIGABRT)  # not reaped yet, so its PID can't have been reused
        else:
            report(worker, "py-spy is not installed on its node (pip install py-spy)")

    def _read(self, program: str, worker: Worker, tries: int, report: Callable[[Worker, str], None]) -> None:
        """Run py-spy, and report the stacks that it prints.

        py-spy doesn't suspend the worker, so a busy thread can make it fail. It is then run again. A blocked
        worker may have such a thread: torch imports modules while it writes a flight recorder dump.
        """
        argv = [program, "dump", "--nonblocking", "--pid", str(worker.pid)]

        def receive(text: bytes) -> None:
            if b"Failed to get stack traces" in text and tries > 1 and worker.running:
                self._read(program, worker, tries - 1, report)
            else:
                report(worker, text.decode(errors="replace"))

        _collect(self._poller, lambda: os.execv(argv[0], argv), STACKS_S, receive)

    def _report_dump(self, worker: Worker, text: str) -> None:
        pid = procfs.suspended([worker.pid])
        self._outbox.report(messages.StackDumped(self._outbox.node, worker.local_rank, text, pid))


def _py_spy(python: str) -> str | None:
    """Find py-spy next to the worker's interpreter or in PATH. Return its path; None = not installed."""
    directories = [os.path.dirname(python), *os.environ.get("PATH", os.defpath).split(os.pathsep)]
    paths = (os.path.join(directory, "py-spy") for directory in directories if directory)
    return next((path for path in paths if os.access(path, os.X_OK)), None)


def _collect(
    poller: Poller, run: Callable[[], object], limit_s: float, on_end: Callable[[bytes], object]
) -> None:
    """Fork a process that prints evidence, and pass its output to `on_end` within `limit_s` seconds."""
    text = bytearray()

    def receive(data: bytes) -> None:
        text.extend(data[: MAX_TEXT - len(text)])

    try:
        start_child(poller, run, limit_s, receive, lambda late: on_end(bytes(text)))
    except OSError as error:  # a limit on processes or descriptors
        on_end(b"not recorded: %s" % str(error).encode())


# The kernel's view


def snapshot(workers: list[Worker], use: Callable[[str], object], began: float) -> Message:
    """Return the state of `workers`, memory event counters, and kernel messages since `began`.

    The controller adds the snapshot to the run directory, for `distlaunch why`.
    """
    sockets = {found.inode: found for found in procfs.sockets()}
    return {
        "workers": [_worker(worker, sockets, use) for worker in workers[:MAX_WORKERS]],
        "memory": procfs.memory_events(),
        "kernel": _kernel_log(began),
    }


def _worker(worker: Worker, sockets: dict[int, procfs.Socket], use: Callable[[str], object]) -> Message:
    """Return the kernel's view of a worker and its descendants, with "" for text that isn't readable."""
    family = procfs.family(worker.pid)
    held = sorted(procfs.socket_inodes(family).intersection(sockets))[:MAX_SOCKETS]
    return {
        "local_rank": worker.local_rank,
        "pid": worker.pid,
        "state": procfs.state(worker.pid),
        **{name: _of_process(worker.pid, name) for name in ("wchan", "syscall", "stack")},
        "processes": len(family),
        "cpu_s": procfs.cpu_ticks(family) / procfs.TICKS_A_SECOND,
        "memory": procfs.resident_bytes(family),
        "gpu": use(worker.device),
        "sockets": [sockets[inode].words for inode in held],
    }


def _of_process(pid: int, name: str) -> str:
    return procfs.contents("/proc/%d/%s" % (pid, name)).decode(errors="replace").strip()[:2000]


def _kernel_log(oldest: float) -> list[str]:
    """Return the last lines of the kernel log since `oldest` (monotonic seconds); [] if it isn't readable."""
    lines, until = [], time.monotonic() + KERNEL_READ_S
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return []
    try:
        while time.monotonic() < until:
            head, _, text = os.read(log, 8192).decode(errors="replace").partition(";")
            if float(head.split(",")[2]) / 1e6 >= oldest:
                lines.append(text.partition("\n")[0][:300])
    except (OSError, ValueError, IndexError):  # the end of the log, or lines overwritten meanwhile
        pass
    os.close(log)
    return lines[-MAX_LINES:]


# NCCL's view: flight recorders and the RAS service


def variables(directory: Directory, attempt: int, run_id: str) -> dict[str, str]:
    """Return default variables, private to an attempt, that make torch and NCCL provide evidence.

    Remove those of another run, one of whose ranks has started this run or submitted this job.
    """
    own = {
        "TORCH_FR_DUMP_TEMP_FILE": directory.flight_prefix(attempt),
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": _pipe_prefix(directory, attempt),
        "NCCL_RAS_ADDR": "localhost:%d" % _RAS_PORTS[zlib.crc32(run_id.encode()) % len(_RAS_PORTS)],
    }
    if "/" + PREFIX in os.environ.get("TORCH_FR_DUMP_TEMP_FILE", ""):
        for name in own:
            os.environ.pop(name, None)
    return own


def _pipe_prefix(directory: Directory, attempt: int) -> str:
    return os.path.join(directory.path, "pipe-%d-" % attempt)


def _request_flight(path: str) -> None:
    """Make a flight recorder dump its records within a second or two. torch reads the named pipe `path`."""
    try:
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        os.write(pipe, b"1\n")
        os.close(pipe)
    except OSError:
        return  # no NCCL communicator yet, or the user has set the variable


def _ask_ras(address: str) -> bytes:
    """Return the answer of NCCL's RAS service (ras/client_support.cc), or b"" if there is none."""
    import socket  # needed only in a child

    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), 1.0) as server:
            server.settimeout(RAS_S - 1.0)
            server.sendall(b"timeout 1\nverbose status\n")
            return b"".join(iter(lambda: server.recv(MAX_TEXT), b""))
    except (OSError, ValueError):
        return b""
