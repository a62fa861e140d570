"""Lists of runs, one JSON object per line: all runs of this user, and the starts of each queued job.

The lists are only hints: the run directories are authoritative. Runs continue even if a write fails.
"""

import contextlib
import errno
import fcntl
import json
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from distlaunch.agent.frozen import Frozen
from distlaunch.agent.locks import LOCK_S, lock
from distlaunch.errors import Exit, UsageError


class Ticket(Frozen):
    """A job in a scheduler's queue, with its ID."""

    scheduler: str
    id: str


class Listed(Frozen):
    """A listed run: its directory and host. `over` is set if its end was recorded.

    `queued` is the scheduler job that contains the run, if any, and `cwd` the directory it was started from.
    """

    run: str
    directory: str
    host: str
    over: bool = False
    queued: Ticket | None = None
    cwd: str = ""


def index_path() -> str:
    """Return the path of the list, below XDG_STATE_HOME."""
    state = os.environ.get("XDG_STATE_HOME", "")
    place = state if os.path.isabs(state) else os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(place, "distlaunch", "runs.jsonl")


def note_begin(run: str, directory: str, host: str, queued: Ticket | None = None) -> None:
    """List a run."""
    ticket = {"queued": queued.id, "scheduler": queued.scheduler} if queued else {}
    append(index_path(), {"run": run, "directory": directory, "host": host, "cwd": os.getcwd(), **ticket})


def note_way(run: str, job: str, file: str, way: Sequence[Any], logs: str = "") -> None:
    """Record how to reach the host that controls a run of a job: the arguments of `cli.remote.ssh_to`.

    `logs` is the directory that contains the run's directory, perhaps only on that host.
    """
    append(index_path(), {"run": run, "job": job, "file": file, "way": way, "at": time.time(), "logs": logs})


def ways(file: str = "") -> dict[str, Mapping[str, Any]]:
    """Return the records of `note_way`, keyed by run ID, with its arguments and the start time `at`.

    With `file`, include only runs of that job file.
    """
    lines = [line for line in index_lines() if isinstance(line.get("way"), list)]
    return {line["run"]: line for line in lines if not file or line.get("file") == file}


def note_end(run: str, status: Mapping[str, Any] | None = None) -> None:
    """Record that a run has ended, so that other commands don't have to read its directory.

    `status` is its last status.json, if known: the directory may be removed, as with torchrun.
    """
    append(index_path(), {"run": run, "over": True, "status": status})


def noted_status(run: str) -> Mapping[str, Any] | None:
    """Return the last status.json of a run, from the record of its end."""
    found = [line.get("status") for line in index_lines() if line.get("run") == run]
    return next((status for status in found if isinstance(status, dict)), None)


def note_end_seen(command: str, run: str, status: int) -> int:
    """Record the end of a run controlled by another host, if a remote command's exit status shows it.

    Return the exit status.
    """
    failed = (Exit.UNREACHABLE, Exit.USAGE, 128 + signal.SIGHUP)  # SIGHUP: the connection broke
    if status not in failed if command in ("attach", "wait") else (command, status) == ("stop", Exit.OK):
        note_end(run)
    return status


def noted_ends() -> set[str]:
    """Return the IDs of the runs whose end was recorded."""
    return {str(line.get("run")) for line in index_lines() if line.get("over") is True}


def listed() -> Mapping[str, Listed]:
    """Return the listed runs, keyed by ID, latest last. Malformed lines are skipped."""
    return _read(*_version())[1]


def is_listed(run: str) -> bool:
    """Return whether a run is in the list. False if the list can't be used."""
    try:
        return run in listed()
    except UsageError:
        return False


def index_lines() -> Sequence[Mapping[str, Any]]:
    """Return the lines of the list of all runs."""
    return _read(*_version())[0]


def _version() -> tuple[str, tuple[int, ...]]:
    """Return the path of the list, and numbers that change with its content."""
    path = index_path()
    try:
        status = os.stat(path)
    except OSError:
        return path, ()
    return path, (status.st_ino, status.st_size, status.st_mtime_ns)


@lru_cache(1)  # `ps` looks at the list for each lost run
def _read(path: str, version: tuple[int, ...]) -> tuple[Sequence[Mapping[str, Any]], Mapping[str, Listed]]:
    lines, found = tuple(lines_of(path)), dict[str, Listed]()
    over = {line.get("run") for line in lines if line.get("over") is True}
    for line in lines:
        run, directory, host, cwd = (line.get(key) for key in ("run", "directory", "host", "cwd"))
        if isinstance(run, str) and isinstance(directory, str) and isinstance(host, str):
            found[run] = Listed(run, directory, host, run in over, ticket_of(line), str(cwd or ""))
    return lines, MappingProxyType(found)


def ticket_of(line: Mapping[str, Any]) -> Ticket | None:
    """Return the queued job in a line. Lines without a scheduler belong to Slurm."""
    queued, scheduler = line.get("queued"), line.get("scheduler", "slurm")
    return Ticket(scheduler, queued) if isinstance(queued, str) and isinstance(scheduler, str) else None


def forget(known: Iterable[str | Ticket]) -> None:
    """Remove runs and submissions from the list. Raises OSError, also if the list stays locked."""
    gone, path = set(known), index_path()
    with _opened_to_change(path, 0) as fd:
        if lock(fd, fcntl.LOCK_EX, LOCK_S) is False:
            raise BlockingIOError(errno.EAGAIN, "another process has locked it", path)
        text = os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")
        kept = [line for line in _objects(text) if line.get("run", ticket_of(line)) not in gone]
        data = b"".join(map(_encoded, kept))
        # In this order, a run that is kept is never missing, even if this process is killed.
        if os.pwrite(fd, data, 0) == len(data):
            os.ftruncate(fd, len(data))


def lines_of(path: str) -> Iterator[dict[str, Any]]:
    """Read the objects in a file of JSON lines; other lines are skipped."""
    try:
        with open(path, encoding="utf-8", errors="replace", opener=_opened) as file:
            text = file.read()
    except OSError as error:
        if isinstance(error, PermissionError) and path == index_path():
            advice = "correct its permissions, or set XDG_STATE_HOME to a directory of yours"
            raise UsageError(f"{path}: this list of runs can't be read; {advice}") from None
        return
    yield from _objects(text)


def _objects(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            document = json.loads(line)
            if isinstance(document, dict):
                yield document


def _opened(path: str, flags: int) -> int:
    """Open a list that only this user can write to, because it contains arguments for ssh.

    Raises OSError, or `UsageError` for the list of all runs: other users may share the directory of a list of
    starts.
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    status = os.fstat(fd)
    if status.st_uid == os.geteuid() and not status.st_mode & 0o022:
        return fd
    os.close(fd)
    if path != index_path():
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    if status.st_uid != os.geteuid():
        foreign = "set HOME or XDG_STATE_HOME to a directory of yours"
        raise UsageError(f"{path}: this list of runs belongs to another user; {foreign}")
    shared = "use chmod go-w, or set XDG_STATE_HOME to another directory"
    raise UsageError(f"{path}: this list of runs is writable by other users; {shared}")


def append(path: str, line: Mapping[str, Any]) -> None:
    """Add a line to a file of JSON lines, if possible."""
    with contextlib.suppress(OSError), _opened_to_change(path, os.O_APPEND) as fd:
        lock(fd, fcntl.LOCK_EX, LOCK_S)  # otherwise without it: `forget` may lose the line, but jobs go on
        size = os.fstat(fd).st_size
        is_torn = size and os.pread(fd, 1, size - 1) != b"\n"  # by a full disk; on NFS, no write shows it
        os.write(fd, b"\n" * is_torn + _encoded(line))


def _encoded(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line).encode() + b"\n"


@contextlib.contextmanager
def _opened_to_change(path: str, flags: int) -> Iterator[int]:
    """Open a file, which is created if necessary with its directories. Raises OSError."""
    os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


# The starts of a queued job


class Begun(Frozen):
    """A run of a queued job: its ID, the job's name, the number of earlier starts, and the arguments."""

    run: str
    job: str
    starts: int
    args: str = ""

    def continued(self, earlier: Sequence["Begun"]) -> list["Begun"]:
        """Return the runs of earlier starts that this run continues, one of each start, oldest first.

        A script may start several runs of one name. The same arguments and, among these, the order tell which
        is which. The arguments may also have changed, for example to resume.
        """
        same = [each for each in earlier if each.job == self.job]
        if any(each.args == self.args for each in same if each.starts < self.starts):
            same = [each for each in same if each.args == self.args]
        by_start: dict[int, list[Begun]] = {}
        for each in same:
            by_start.setdefault(each.starts, []).append(each)
        place = len(by_start.get(self.starts, []))
        return [
            runs[place] for starts, runs in by_start.items() if starts < self.starts and len(runs) > place
        ]


def starts_path(directory: str, queued: str, scheduler: str) -> str:
    """Return the path of the list of starts of a queued job, beside its run directories in `directory`."""
    return os.path.join(directory, f"{scheduler}-{queued}.jsonl")


def starts_in(path: str) -> list[Begun]:
    """Read a list of starts, oldest first."""
    kinds = Begun.__annotations__
    lines: list[list[Any]] = [[({"args": ""} | line).get(name) for name in kinds] for line in lines_of(path)]
    return [Begun(*line) for line in lines if all(map(isinstance, line, kinds.values()))]


def note_stop(directory: str, queued: str, scheduler: str, ended: str = "") -> None:
    """Record that a queued job is being canceled, for its run to read. Some schedulers don't expose this.

    `ended` is the job's last run if that has already ended.
    """
    append(starts_path(directory, queued, scheduler), {"stop": True, "ended": ended})


def note_no_stop(directory: str, queued: str, scheduler: str) -> None:
    """Record that a queued job could not be canceled."""
    append(starts_path(directory, queued, scheduler), {"stop": False})


def end_tries(directory: str, queued: str, scheduler: str, run: str) -> bool | None:
    """Keep an ended run from having its job requeued, if it still tries because the scheduler doesn't answer.

    Return None if it doesn't try, or False if the scheduler may have received its request already.
    """
    path = starts_path(directory, queued, scheduler)
    lines = [*lines_of(path)]
    if {"trying": run} not in lines or {"decided": run} in lines:
        return None
    note_stop(directory, queued, scheduler, run)
    return not any(line.get("requeue") and line.get("by") == run for line in lines_of(path))


def is_stopped(path: str, run: str = "") -> bool:
    """Return whether the job with this list of starts was canceled, before `run` had ended if it is given.

    A later start ends earlier stops: someone has requeued the job.
    """
    stops, begun, starts = list[Mapping[str, Any]](), False, 0
    for line in lines_of(path):
        if isinstance(later := line.get("starts"), int) and later > starts:
            stops, starts = [], later
        begun = begun or bool(run and line.get("run") == run)
        if begun and not stops and line.get("requeue"):
            return False  # by the script, after the run's controller was killed
        if line.get("stop"):
            stops.append(line)
        elif "stop" in line:  # the last one failed
            stops = stops[:-1]
    return bool(stops) and not (run and stops[0].get("ended") == run)
