"""Drives the real command line from tests: starts runs, reads their output as it comes, finds what is left.

Output is awaited on pipes, ends of processes on pidfds; what nobody announces is looked at until it is there.
"""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from distlaunch.agent import procfs

ROOT = Path(__file__).resolve().parent.parent
PRESS_S = 0.15
"""Between two presses of Ctrl-C: what comes within a tenth of a second is one wish."""
PATIENCE_S = 150.0
"""No test waits longer than this for anything; only a hang gets there."""
STOPS_S = 2.0
"""Until a process that was sent SIGSTOP has surely been scheduled, and stopped."""
LOOK_S = 0.05

TORCHS_ABORT = "terminate called without an active exception"
"""A worker that has used gloo, under torch 2.13, aborts now and then at its end, whoever started it."""


class LateError(AssertionError):
    """What had to happen did happen, but after its limit; what never happens is no `LateError`.

    The machine may have stood still, so such a test is tried again, twice at most (tests/tries.py).
    """


class TorchsAbortError(AssertionError):
    """torch has aborted a worker that had used gloo and done its work; such a test is tried again, too."""


TRIED_AGAIN = (LateError, TorchsAbortError)
"""What is not for us to mend, and is only now and then."""


def ended_well(status: int, out: str, err: str, last: str, times: int = 1) -> None:
    """A job whose script uses gloo has ended with 0; it prints `last` so often, when it is done with gloo.

    `TorchsAbortError` if torch aborted it at its end. An abort anywhere else is a failure like any other.
    """
    done = out.count(last) >= times
    if status and done and TORCHS_ABORT in err and "SIGABRT" in err:
        raise TorchsAbortError(err)
    assert status == 0, err
    assert done, f"{last!r} was not printed: {out}"


def all_ended_well(runs: "Iterable[Going]", last: str, times: int = 1) -> None:
    """As `ended_well`, of several that take part in one job: the others' status follows that of an abort."""
    runs = list(runs)
    statuses = [run.wait() for run in runs]
    out, err = "".join(run.stdout for run in runs), "".join(run.stderr for run in runs)
    ended_well(next(filter(None, statuses), 0), out, err, last, times * len(runs))


def on_time(what: str, took_s: float, at_most_s: float) -> None:
    """`LateError` if something took longer than its limit, which is for a machine with nothing else to do."""
    share = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    within(what, took_s, at_most_s * share, "s")


def within(what: str, value: float, limit: float, unit: str) -> None:
    """`LateError` if a value is over its limit."""
    if value > limit:
        raise LateError(f"{what}: {value:g} {unit}, over the limit of {limit:g}")


def nothing_was_dropped(stderr: str) -> None:
    """`LateError` if the disk of the logs was, so that a run had to drop output, as it told."""
    if told := re.search(r"\d+ bytes could not be written to", stderr):
        raise LateError(told[0])


def wait_until(holds: Callable[[], bool], else_told: Callable[[], str]) -> None:
    """Wait for what nobody announces; `else_told` says what there is instead."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, else_told()
        time.sleep(LOOK_S)


@contextlib.contextmanager
def line_pipe(path: Path) -> Iterator[Callable[[], str]]:
    """Make a named pipe; what is yielded waits for the next line that somebody writes there."""
    os.mkfifo(path)
    with path.open("r+b", buffering=0) as pipe:

        def line() -> str:
            assert select.select([pipe], [], [], PATIENCE_S)[0], f"nobody has written to {path}"
            return pipe.readline().decode().removesuffix("\n")

        yield line


def distlaunch_argv(*arguments: str) -> list[str]:
    """The command line under test, of this checkout and interpreter."""
    return [sys.executable, "-m", "distlaunch", *arguments]


Done = subprocess.CompletedProcess[str]


def completed(
    argv: Sequence[str | Path], status: int | None = None, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a command to its end, which has that exit status, if one is given; what it prints is text."""
    streams = {} if "stdout" in options else {"capture_output": True}
    stdin = {} if "input" in options else {"stdin": subprocess.DEVNULL}
    options = {"text": True, "timeout": PATIENCE_S, **streams, **stdin, **options}
    done = subprocess.run(argv, check=False, **options)
    assert status in (None, done.returncode), f"exit status {done.returncode}: {done.stderr}"
    return done


def distlaunch(*arguments: str, status: int | None = None, **options: Any) -> Done:
    """Run one of our commands so."""
    return completed(distlaunch_argv(*arguments), status, **{"cwd": ROOT, **options})


def program(path: Path, text: str) -> str:
    """Write a program, which is a shell script unless its first line says otherwise; its path."""
    path.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def open_gate(gate: Path) -> None:
    """Let the one process go on that reads the fifo `gate`, as soon as it does."""
    os.close(os.open(gate, os.O_WRONLY))


def on_a_terminal(
    *arguments: str,
    argv: Sequence[str] = (),
    gate: tuple[bytes, Path] | None = None,
    press: tuple[bytes, bytes] | None = None,
    **environment: Any,
) -> tuple[int, bytes]:
    """Run one of our commands, or `argv`, on a terminal of its own: its exit status, and all that was shown.

    Lines that tell how far a slow start is, as on a busy machine, are left out: they are taken away again.
    Once the words of `gate` are shown there, its named pipe, which somebody reads, is opened and closed.
    Whenever the words of `press` are shown, its keys are pressed.
    """
    controller, terminal = os.openpty()
    env = {**os.environ, "TERM": "xterm", **environment}
    argv = argv or distlaunch_argv(*arguments)
    with subprocess.Popen(argv, stdin=terminal, stdout=terminal, stderr=terminal, env=env) as process:
        os.close(terminal)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: the last writer has closed the terminal
            while data := os.read(controller, 4096):
                shown += data
                if press and press[0] in data:
                    os.write(controller, press[1])
                if gate and gate[0] in shown:
                    open_gate(gate[1])
                    gate = None
        status = process.wait(PATIENCE_S)
    os.close(controller)
    return status, re.sub(rb"\r\x1b\[K(distlaunch: [^\r\n]*\r\x1b\[K)+", b"", shown)


def write_job(directory: Path, worker: str, job: str = "") -> Path:
    """A job file in `directory` whose script is the Python text `worker`; `job` is more YAML."""
    (directory / "worker.py").write_text(textwrap.dedent(worker))
    path = directory / "job.yaml"
    path.write_text(f"script: worker.py\n{textwrap.dedent(job)}")
    return path


class Going:
    """A command that goes on while the test does something to it; its run is in `directory`/runs."""

    def __init__(self, directory: Path, argv: Sequence[str], **options: Any) -> None:
        self.directory = directory
        self.began = time.monotonic()
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(argv, bufsize=0, **{**streams, **options})
        self.out, self.err = bytearray(), bytearray()

    def _read(self, deadline: float) -> bool:
        """Read what comes next; False when both streams are at their end."""
        streams = ((self.process.stdout, self.out), (self.process.stderr, self.err))
        sinks = {pipe: sink for pipe, sink in streams if pipe and not pipe.closed}
        if not sinks:
            return False
        ready, _, _ = select.select([*sinks], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"nothing came in time; stdout {self.out!r}, stderr {self.err!r}"
        for pipe in ready:
            data = os.read(pipe.fileno(), 1 << 16)
            sinks[pipe] += data
            if not data:
                pipe.close()
        return True

    def wait_for(self, text: str, times: int = 1, within_s: float = PATIENCE_S) -> None:
        """Wait until `text` has been printed so many times, on either stream."""
        self.wait_until(lambda: (self.out + self.err).count(text.encode()) >= times, repr(text), within_s)

    def wait_until(self, holds: Callable[[], bool], what: str, within_s: float = PATIENCE_S) -> None:
        """Wait until something holds of what has been printed."""
        deadline = time.monotonic() + within_s
        while not holds():
            assert self._read(deadline), f"ended without {what}: {self.err.decode()}{self.out.decode()}"

    def wait_ready(self, count: int, within_s: float = PATIENCE_S) -> dict[int, int]:
        """rank → pid, once so many workers have printed a whole line ``ready RANK PID``."""
        self.wait_until(lambda: len(self.worker_pids()) >= count, f"{count} ready workers", within_s)
        return self.worker_pids()

    def wait(self, within_s: float = PATIENCE_S) -> int:
        """Wait for the end; the exit status."""
        deadline = time.monotonic() + within_s
        while self._read(deadline):
            pass
        return self.process.wait(max(0.1, deadline - time.monotonic()))

    @property
    def stdout(self) -> str:
        return self.out.decode(errors="replace")

    @property
    def stderr(self) -> str:
        return self.err.decode(errors="replace")

    def run_directory(self) -> Path:
        """The run's directory; there is one per job directory in these tests."""
        (found,) = (self.directory / "runs").iterdir()
        return found

    def events(self, name: str) -> list[dict[str, Any]]:
        """The recorded events of one kind."""
        lines = (self.run_directory() / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def worker_pids(self) -> dict[int, int]:
        """rank → pid, from the whole lines ``ready RANK PID`` that workers have printed."""
        return {int(rank): int(pid) for rank, pid in re.findall(rb"ready (\d+) (\d+).*\n", self.out)}

    def holders(self) -> list[int]:
        """Processes that carry the run's cookie in their environment."""
        return cookie_holders(self.run_directory().name)

    def kill(self) -> None:
        """End the run whatever it does, as tear-down."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe:
                pipe.close()
        with contextlib.suppress(ValueError, OSError):
            for pid in self.holders():
                wait_gone([pid], 15.0)


class Run(Going):
    """A `distlaunch run` that goes on while the test does something to it."""

    def __init__(self, job: Path, *arguments: str, **options: Any) -> None:
        super().__init__(job.parent, distlaunch_argv("run", str(job), *arguments), **options)


@contextlib.contextmanager
def running(job: Path, *arguments: str, **options: Any) -> Iterator[Run]:
    """A run that is ended when the test is."""
    run = Run(job, *arguments, **options)
    try:
        yield run
    finally:
        run.kill()


def cookie_holders(run_id: str) -> list[int]:
    """PIDs whose environment has the run's cookie."""
    return holders_of(f"DISTLAUNCH_RUN_ID={run_id}")


def holders_of(setting: str) -> list[int]:
    """PIDs whose environment has this ``NAME=value``."""
    cookie, found = f"{setting}\0".encode(), []
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            with contextlib.suppress(OSError):
                if cookie in (directory / "environ").read_bytes():
                    found.append(int(directory.name))
    return found


def agents_of(pid: int) -> list[int]:
    """The agents that `pid`'s local links run: below sh's exec comes the guardian, below it the agent."""
    return [agent for guardian in children_of(pid) for agent in children_of(guardian)]


def children_of(pid: int) -> list[int]:
    """PIDs of the live children of a process."""
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has just ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # or one thread of it
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def command_line(pid: int) -> list[str]:
    """The words of a process's command line; none once it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except (FileNotFoundError, ProcessLookupError):
        return []


def descendants_of(pid: int) -> list[int]:
    """PIDs of all live processes below one."""
    return [below for child in children_of(pid) for below in (child, *descendants_of(child))]


def wait_gone(pids: Sequence[int], within_s: float) -> float:
    """Wait until all these processes have ended; the seconds it took. `LateError` after `within_s`."""
    began = time.monotonic()
    with held(pids) as processes:
        processes.wait_ends(processes.pids, began + within_s)
    return time.monotonic() - began


class Held:
    """Processes held by pidfd, so that no other process can be taken for one of them."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pidfds: dict[int, int] = {}
        for pid in set(pids):
            with contextlib.suppress(ProcessLookupError):
                self._pidfds[pid] = os.pidfd_open(pid)

    @property
    def pids(self) -> list[int]:
        """Whom we hold."""
        return list(self._pidfds)

    def wait_ends(self, pids: Iterable[int], until: float) -> None:
        """Wait for the ends of those of `pids` that are held, at most `until` (monotonic seconds)."""
        self._wait(self.has_ended, [pid for pid in pids if pid in self._pidfds], until, "there")

    def wait_reaped(self, until: float) -> None:
        """A zombie is no clean end."""
        self._wait(self._is_reaped, self.pids, until, "a zombie")

    def has_ended(self, pid: int, until: float) -> bool:
        """Whether a process that we hold ends `until` then (monotonic seconds)."""
        return self._poll(pid, select.POLLIN, until)

    def _is_reaped(self, pid: int, until: float) -> bool:
        # The kernel announces the reaping since 6.9; before, a look must do.
        there = Path(f"/proc/{pid}")
        return not there.exists() or self._poll(pid, 0, until) or not there.exists()

    def _wait(self, over: Callable[[int, float], bool], pids: Sequence[int], until: float, what: str) -> None:
        late = [pid for pid in pids if not over(pid, until)]
        left = [pid for pid in late if not over(pid, until + PATIENCE_S)]
        assert not left, f"processes {left} are still {what}"
        if late:
            after_s = time.monotonic() - until
            raise LateError(f"processes {late} were still {what}, for at most {after_s:.3f} s more")

    def _poll(self, pid: int, events: int, until: float) -> bool:
        poll = select.poll()
        poll.register(self._pidfds[pid], events)
        return bool(poll.poll(max(0.0, until - time.monotonic()) * 1000))

    def close(self) -> None:
        """Let go of them."""
        for pidfd in self._pidfds.values():
            os.close(pidfd)


def held(pids: Iterable[int]) -> "contextlib.closing[Held]":
    """`pids`, held until the end of the block."""
    return contextlib.closing(Held(pids))


def kill(pid: int, signum: int = signal.SIGKILL) -> None:
    """Signal a process that the test started. A stopped one is waited for: it stops when it is scheduled.

    Another process, such as a guardian's agent, may resume it before this is seen.
    """
    os.kill(pid, signum)
    deadline = time.monotonic() + STOPS_S
    while signum == signal.SIGSTOP and procfs.state(pid) not in "TZ" and time.monotonic() < deadline:
        time.sleep(0.001)
