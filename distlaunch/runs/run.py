"""A run, known by its directory: its state, whether its controller is alive, and how users refer to it."""

import contextlib
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from glob import iglob
from itertools import groupby
from typing import Any, TypeVar

from distlaunch.agent.frozen import Frozen
from distlaunch.agent.locks import lock
from distlaunch.agent.procfs import boot_id, pid_namespace, state
from distlaunch.errors import DistlaunchError, UsageError, reason
from distlaunch.observers.run_directory import (
    COLLECTING,
    CONTROLLER_LOG,
    EVENTS,
    FRESH_S,
    OUTPUT_INDEX,
    STATUS,
    SUMMARY,
    fd_of,
    job_part,
    json_of,
    size_of,
)
from distlaunch.observers.run_list import (
    is_stopped,
    listed,
    note_end,
    noted_ends,
    noted_status,
    starts_in,
    starts_path,
    ways,
)
from distlaunch.schedulers import title_of
from distlaunch.supervisor.allocation_end import STATUS as CANCELLED_STATUS
from distlaunch.supervisor.status import ControllerProcess, RunState, Status, status_of
from distlaunch.wording import CUT
from distlaunch.wording import listed as listed_words

MAX_DOCUMENT = 1 << 28
"""Maximum bytes to read of a summary.json or plan.json."""
LOGS = "runs"
"""The default directory for run directories."""
JOB_FILES = (".yaml", ".yml")
MAX_NAMED = 8
"""Maximum runs listed in the message about an ambiguous name."""
_T = TypeVar("_T")
_ID = re.compile(r"(?P<job>.+)-(?P<when>\d{8}-\d{6})-(?P<chance>[0-9a-f]{8})")
_LIST = "`distlaunch ps -a` lists all known runs"


class Run(Frozen):
    """A run according to its directory. `alive` = its controller seems to be alive.

    `heard` is the time of the last output, in seconds since the epoch; None once the run has ended.
    """

    directory: str
    status: Status
    alive: bool
    heard: float | None

    @property
    def id(self) -> str:
        """Return the run's unique ID."""
        return self.status.run

    @property
    def host(self) -> str:
        """Return the controller's host; "" if that is this host."""
        return "" if _is_here(self.status.controller) else self.status.controller.host


def run_in(directory: str) -> Run | None:
    """Return the run in that directory; None if there is none."""
    try:
        document, locked, saved = _claimed(fd_of(directory, STATUS))
    except OSError:
        return None
    run = _run_of(directory, document, locked, saved)
    return living(os.path.basename(directory)) if locked and run is None else run


def trouble_with(directory: str) -> str:
    """Return why the status in a run directory can't be read; "" if it can, or if there is none."""
    try:
        with open(fd_of(directory, STATUS), "rb", buffering=0) as file:
            file.read(1)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return reason(error)
    return ""


def living(run: str, pid: int | None = None) -> Run | None:
    """Find a run among `all_living`. `pid` is the controller's PID, if known."""
    return next((found for found in all_living(pid) if found.id == run), None)


def all_living(pid: int | None = None) -> Iterator[Run]:
    """Yield this user's active runs on this machine, found among the files that controllers have open.

    They include runs whose directory was removed or renamed, or whose status can't be read. With `pid`, look
    at that process only.
    """
    for link in iglob(f"/proc/{pid or '[0-9]*'}/fd/*"):
        with contextlib.suppress(OSError):
            directory, name = os.path.split(os.readlink(link).removesuffix(" (deleted)"))
            if name != STATUS or (it := os.lstat(link)).st_uid != os.geteuid():
                continue
            if not it.st_mode & stat.S_IWUSR:  # open only for reading
                continue
            try:
                document, locked, at = _claimed(os.open(link, os.O_RDONLY | os.O_CLOEXEC))
            except OSError:  # as on a broken disk
                os.lstat(link)  # but not if the process has ended meanwhile
                document, locked, at = {}, None, it.st_mtime
            name, holder = os.path.basename(directory), ControllerProcess("", int(link.split("/")[2]))
            status = Status(name, name.rsplit("-", 3)[0], RunState.RUNNING, at, at, holder)
            unread = Run(directory, status._replace(where="unreadable"), alive=True, heard=None)
            run = _run_of(directory, document, True, at) or (unread if _ID.fullmatch(name) else None)
            if run and locked is not False:  # otherwise it's another program that has the file open
                yield run


def remembered(run: str) -> Run | None:
    """Return a run by the record of its end, if its status is gone, as with torchrun, or can't be read."""
    entry, document = listed().get(run), noted_status(run)
    if entry and document and run_in(entry.directory) is None:
        with contextlib.suppress(KeyError, TypeError, ValueError):
            return Run(entry.directory, status_of(document), alive=False, heard=None)
    return None


def _run_of(directory: str, document: Mapping[str, Any], locked: bool | None, saved: float) -> Run | None:
    """Return the run with this status, corrected by the state of its controller; None = damaged.

    `locked` and `saved` are as returned by `_claimed`.
    """
    try:
        status = status_of(document)
    except (KeyError, TypeError, ValueError):
        return None
    hidden = locked is None or not _is_here(status.controller)
    alive = locked or (hidden and not status.state.over and time.time() - saved < FRESH_S)
    if locked is None and not (alive or status.state.over):  # its disk may be stuck
        alive = living(status.run, status.controller.pid) is not None
    if not alive and not status.state.over:
        last = max(status.since, saved, heard(directory) or 0.0)  # its end, as far as is known
        status = _ended_unseen(directory, status._replace(since=last))
    elif alive and has_pid_here(status.controller) and state(status.controller.pid) == "T":
        resume, entry = f"`kill -CONT {status.controller.pid}` resumes it", listed().get(status.run)
        if entry and (job := entry.queued):
            title = title_of(job.scheduler)
            resume = f"if {title} suspended job {job.id}, it must resume the job; otherwise, {resume}"
        status = status._replace(state=RunState.SUSPENDED, why=f"a signal stopped its controller; {resume}")
    return Run(directory, status, alive, None if status.state.over else heard(directory))


def _is_here(controller: ControllerProcess) -> bool:
    return controller.host in ("", os.uname().nodename)


def has_pid_here(controller: ControllerProcess) -> bool:
    """Return whether a controller has the same PID for this process, as it doesn't across containers."""
    return _is_here(controller) and controller.namespace in ("", pid_namespace())


def document_in(directory: str, name: str = SUMMARY) -> dict[str, Any]:
    """Read a JSON object in a run directory, by default the summary; {} if there is none yet."""
    with contextlib.suppress(OSError), open(fd_of(directory, name), "rb") as file:
        return _parsed(file.read(MAX_DOCUMENT))
    return {}


def uncollected(directory: str) -> tuple[str, ...]:
    """Return the lines of the summary about files that could not be collected."""
    lines = document_in(directory).get("collecting")
    texts = (line for line in (lines if isinstance(lines, list) else ()) if isinstance(line, str))
    return tuple(text for text in texts if text.startswith("not collected"))


def _claimed(fd: int) -> tuple[dict[str, Any], bool | None, float]:
    """Read and close a status.json.

    Return its content, whether a live controller holds its lock, and the time of the last save, in seconds
    since the epoch.
    """
    with open(fd, "rb", buffering=0) as file:
        free = lock(fd, fcntl.LOCK_SH)  # first, so that everything written before the end is read
        document = _parsed(file.read(1 << 16).partition(b"\n")[0])  # an earlier, longer document may follow
        return document, None if free is None else not free, os.fstat(fd).st_mtime


def _parsed(data: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        document = json_of(data)
        return document if isinstance(document, dict) else {}
    return {}


def _ended_unseen(directory: str, status: Status) -> Status:
    """Return the status of a run whose controller is gone: LOST, unless its scheduler ended the job.

    The record of its end is in the list of runs if the disk of its directory was stuck.
    """
    with contextlib.suppress(KeyError, TypeError, ValueError):
        if (document := noted_status(status.run)) and (noted := status_of(document)).state.over:
            return noted
    if status.ends_as:
        killed = f"its controller was killed before the run had ended; {_unsaved(directory)}"
        why = f"{status.why}; {killed}" if status.why else killed
        return status._replace(state=status.ends_as, exit_status=status.ends_with, why=why)
    entry = listed().get(status.run)
    if entry and (job := entry.queued):
        path = starts_path(os.path.dirname(directory), job.id, job.scheduler)
        if is_stopped(path, status.run) and [each.run for each in starts_in(path)[-1:]] == [status.run]:
            name = f"{title_of(job.scheduler)} job {job.id}"
            why = f"{name} was cancelled, which killed its controller; {_unsaved(directory)}"
            return status._replace(state=RunState.CANCELLED, exit_status=CANCELLED_STATUS, why=why)
    return status._replace(state=RunState.LOST, why=_why_lost(directory, status.controller))


def _why_lost(directory: str, controller: ControllerProcess) -> str:
    """Describe how a controller that left no final status may have ended."""
    who = f"its controller, process {controller.pid} on {controller.host},"
    known = bool(controller.boot) and controller.host == os.uname().nodename
    if known and controller.boot != boot_id():
        return f"{who} ended when the machine restarted"
    down = "" if known else ", or its machine went down"
    log = f"; see {CONTROLLER_LOG} in the run directory" if size_of(directory, CONTROLLER_LOG) else ""
    return (
        f"{who} ended without reporting a result (it crashed or was killed{down}); {_unsaved(directory)}{log}"
    )


def _unsaved(directory: str) -> str:
    """Describe what may be missing after the end of a controller that left no final status."""
    collects = os.path.isdir(os.path.join(directory, COLLECTING))
    files = f"; files to collect are missing or incomplete (see {COLLECTING}/ in the run directory)"
    return f"the end of the ranks' output may be missing{files if collects else ''}"


def heard(directory: str) -> float | None:
    """Return the time of the last output, in seconds since the epoch; None = unknown."""
    with contextlib.suppress(OSError):
        return os.stat(os.path.join(directory, OUTPUT_INDEX)).st_mtime
    return None


# The words that find runs


def find(word: str | None, alone: bool = False) -> Run:
    """Find the run that a word refers to; None = a run below this directory or started from it.

    If several match, prefer the latest active run, or else the latest run. With `alone`, refuse several
    active matches. Raises `UsageError`.
    """
    known, unique = directories(), False
    if word is None:
        runs, which = _of_this_directory(known), "of this directory"
        nothing = f"no runs below the current directory or started from it; specify one ({_LIST})"
    elif _is_place(word, known):
        _check_own(word)
        if found := run_in(path := os.path.abspath(word)) or living(os.path.basename(path)):
            return found
        runs, which = dict(scanned([word])), f"in {word}"
        nothing = f"{word}: not a run directory, and it contains no runs"
    else:
        runs, which, nothing = _of_name(word, known), f"of {word}", _unmatched(word)
        unique = not runs
        runs = runs or _starting_with(word, known)
    going = _going(runs)
    if unique and len(runs) > 1 and len(going) != 1:
        raise UsageError(_ambiguous(word, runs))
    if alone and len(going) > 1:
        ids = listed_words([run.id for run in going])
        raise UsageError(f"{len(going)} runs {which} are running: {ids}; specify one by its ID")
    if alone and word is None and not going and (others := _going(known)):
        ids = listed_words([run.id for run in others])
        raise UsageError(f"no active runs of this directory; active elsewhere: {ids}; specify one by its ID")
    run = going[0] if going else _latest(runs) or living(word or "")
    if alone and run and run.status.job == word:
        _check_is_no_id(word, run.id)
    if run:
        return run
    _check_readable(runs)
    raise UsageError(nothing)


def active_runs(word: str | None) -> list[Run]:
    """Return the active runs of a job's name or file, or with None those of this directory, latest first."""
    known = directories()
    return _going(_of_this_directory(known) if word is None else _of_name(word, known))


def _of_this_directory(known: Mapping[str, str]) -> dict[str, str]:
    """Return the runs below the current directory, and those started from it."""
    here = os.path.join(os.getcwd(), "")
    started = {run for run, entry in listed().items() if os.path.join(entry.cwd, "") == here}
    below = {run for run, path in known.items() if os.path.abspath(path).startswith(here)}
    return {run: path for run, path in known.items() if run in started | below}


def _check_is_no_id(word: str, run: str) -> None:
    """Raise `UsageError` if the name of a run looks like a scheduler's job ID."""
    if re.fullmatch("[0-9]+", word):
        what = f"{word} is the name of {run}, but may also be the ID of a scheduler's job"
        raise UsageError(f"{what}; specify the run by its ID, or cancel the job with its scheduler")


def _is_place(word: str, known: Mapping[str, str]) -> bool:
    """Return whether a word is a directory's path. If it is also the name of a job, ./NAME is the path."""
    no_name = os.sep in word or word in (os.curdir, os.pardir)
    if os.path.isdir(word) and (no_name or run_in(os.path.abspath(word))):
        return True
    is_path = os.path.isdir(word) or (os.sep in word and not word.endswith(JOB_FILES))
    return is_path and not _of_name(word, known)


def _check_own(directory: str) -> None:
    if is_foreign(directory):
        is_run = _ID.fullmatch(os.path.basename(os.path.abspath(directory)))
        hint = "" if is_run else "; specify one by its ID or directory"
        raise UsageError(
            f"{directory} belongs to another user: you can read and stop only your own runs{hint}"
        )


def is_foreign(path: str) -> bool:
    """Return whether a path is a directory of another user."""
    with contextlib.suppress(OSError):
        return os.path.isdir(path) and os.stat(path).st_uid != os.geteuid()
    return False


def _check_readable(runs: Mapping[str, str]) -> None:
    """Raise `UsageError` if one of the runs has a directory; its status can't be read."""
    for directory in runs.values():
        trouble = trouble_with(directory)
        if trouble or os.path.exists(os.path.join(directory, EVENTS)):
            _check_own(directory)
            if trouble:
                raise UsageError(f"can't read {directory}/{STATUS}: {trouble}")
            text = f"{directory}/{STATUS} is missing or damaged"
            raise UsageError(f"{text}; what the run printed is in the other files there")


def _unmatched(word: str) -> str:
    return f"no run matches {word!r}; {_LIST}"


def named(word: str, queued: bool) -> dict[str, str]:
    """Return the directories of all runs that a word matches, keyed by ID; {} for a directory.

    Unless the word also refers to a `queued` job, raise `UsageError` if there is no such run or directory.
    """
    known = directories() if word else {}
    known = {} if _is_place(word, known) else known
    found = _of_name(word, known) or _starting_with(word, known)
    if not (found or queued):
        if word.endswith(JOB_FILES) and not os.path.isdir(word):
            raise UsageError(f"no known run matches {word}; {_LIST}")
        if os.path.isfile(word) or (word and os.sep not in word and not os.path.isdir(word)):
            raise UsageError(_unmatched(word))
        check_directory(word)
    return found


def _starting_with(word: str, known: Mapping[str, _T]) -> dict[str, _T]:
    """Return runs whose ID matches a word with a CUT mark, or begins with a word that includes its date.

    With less than the date, `job-2` could mean another job of that name.
    """
    begin, cut, end = word.partition(CUT)
    found = {run: it for run, it in known.items() if run.startswith(begin) and run.endswith(end)}
    date = len("-20260101")
    return {run: it for run, it in found.items() if (cut and begin) or len(begin) >= len(_job_of(run)) + date}


def _of_name(word: str, known: Mapping[str, str]) -> dict[str, str]:
    """Return the run with that ID, the runs of a job given by name or file, or those of a scheduler's job."""
    if word in known:
        return {word: known[word]}
    if word.endswith(JOB_FILES):  # most job files have the same name, so compare paths
        file = os.path.realpath(word)
        sent = ways(file)  # to another host, which may share the list of runs
        same = {run for run, path in known.items() if (it := run_in(path)) and it.status.file == file}
        return {run: path for run, path in known.items() if run in sent or run in same}
    part = job_part(word) or "job"
    found = {run: path for run, path in known.items() if _job_of(run) == part}
    if part != word:  # IDs contain only a part of it
        found = {
            run: path for run, path in found.items() if (seen := run_in(path)) and seen.status.job == word
        }
    inside = {run for run, entry in listed().items() if entry.queued and entry.queued.id == word}
    return found or {run: path for run, path in known.items() if run in inside}


def elsewhere(word: str, alone: bool = False) -> tuple[str, Sequence[Any]] | None:
    """Find a run on another host that matches a word; return its ID and arguments of `cli.remote.ssh_to`.

    `alone` is as in `find`. Unless its end was noted, this machine can't determine whether the run is active.
    Raises `UsageError`.
    """
    file = os.path.realpath(word) if word.endswith(JOB_FILES) else ""
    there, known = ways(file), directories()
    of_job = {run: way for run, way in there.items() if file or word in (_job_of(run), way.get("job"))}
    if os.path.isdir(word) and not of_job:
        return None
    here = _of_name(word, known) or ({} if of_job else _starting_with(word, known))
    found = {run: way for run, way in (of_job or _starting_with(word, there)).items() if run not in known}
    if not found or word in here:
        return None
    going, runs = [run.id for run in _going(here)], [*found, *here]
    if going and not alone:
        return None
    active = [*(found.keys() - noted_ends()), *going]
    if (len(active) > 1 and alone) or (len(active) != 1 < len(runs) and not of_job):
        raise UsageError(_ambiguous(word, active or runs))
    latest = max(active if alone and active else runs, key=when)
    if latest not in found:
        return None
    if alone and latest in of_job:
        _check_is_no_id(word, latest)
    return latest, found[latest]["way"]


def afar(known: Collection[str]) -> Iterator[Run]:
    """Yield runs that other hosts control and that may be active. Note the end of those that aren't."""
    over = {*known, *noted_ends()}
    for run, each in ways().items():
        seen = run_in(os.path.join(str(each.get("logs", "")), run)) if run not in over else None
        if seen and seen.status.state.over and seen.status.state is not RunState.LOST:  # the disk is shared
            note_end(run)
        elif run not in over:
            host, at = each["way"][0], each["at"]
            controller, where = ControllerProcess(host, 0), f"{host}: `distlaunch ps {run}` queries it"
            job = str(each.get("job") or _job_of(run))
            status = Status(run, job, RunState.UNKNOWN, at, at, controller, where=where)
            yield Run("", status, alive=False, heard=None)


def _going(runs: Mapping[str, str]) -> list[Run]:
    """Return the active runs, the latest first."""
    over = {run for run, entry in listed().items() if entry.over}
    seen = {name: run_in(path) for name, path in runs.items() if name not in over}
    found = [*filter(None, seen.values()), *living_unread(name for name, run in seen.items() if not run)]
    going = [run for run in found if not run.status.state.over]
    return sorted(going, key=lambda run: run.status.began, reverse=True)


def living_unread(runs: Iterable[str]) -> list[Run]:
    """Return the active runs of this host among these runs, whose directories can't be read."""
    here, entries = os.uname().nodename, listed()
    may = {run for run in runs if not (it := entries.get(run)) or (it.host == here and not it.over)}
    return [*{run.id: run for run in all_living() if run.id in may}.values()] if may else []


def _latest(runs: Mapping[str, str]) -> Run | None:
    """Return the latest run by the second in its ID or, for runs of the same second, by their status."""
    for _, names in groupby(sorted(runs, key=when, reverse=True), when):
        if found := [run for run in (run_in(runs[name]) for name in names) if run]:
            return max(found, key=lambda run: run.status.began)
    return None


def _ambiguous(word: str | None, runs: Collection[str]) -> str:
    latest = [f"  {run}" for run in sorted(runs, key=when, reverse=True)]
    more = [f"  and {len(runs) - MAX_NAMED} more"] if len(runs) > MAX_NAMED else []
    return "\n".join([f"{word!r} is ambiguous: it matches {len(runs)} runs:", *latest[:MAX_NAMED], *more])


def directories() -> dict[str, str]:
    """Return the directory of each known run by ID: the listed runs, and those in this directory."""
    found = {run: entry.directory for run, entry in listed().items()}
    return {**found, **dict(scanned([os.curdir]))}


def _job_of(run: str) -> str:
    """Return the job's name in the ID of a run."""
    match = _ID.fullmatch(run)
    return match["job"] if match else run


def when(run: str) -> str:
    """Return the part of an ID to sort by start time."""
    match = _ID.fullmatch(run)
    return match["when"] if match else ""


def check_directory(place: str) -> None:
    """Raise `UsageError` if the directory can't be read."""
    try:
        os.scandir(place).close()
    except OSError as error:
        raise UsageError(f"{place}: {reason(error)}") from None


def scanned(places: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (ID, directory) of each run in the `run_directories`."""
    for directory in run_directories(places):
        if os.path.exists(os.path.join(directory, EVENTS)):
            yield os.path.basename(directory), directory


def run_directories(places: Iterable[str]) -> Iterator[str]:
    """Yield what may be run directories: of `places`, those in them, and those in their `runs`."""
    for place in map(os.path.abspath, places):
        for directory in (place, *_inside(place), *_inside(os.path.join(place, LOGS))):
            if _ID.fullmatch(os.path.basename(directory)):
                yield directory


def _inside(directory: str) -> list[str]:
    try:
        return [os.path.join(directory, name) for name in os.listdir(directory)]
    except OSError:
        return []


def replace_older(path: str, data: bytes, is_older: Callable[[bytes], bool]) -> None:
    """Write a file that only the user can read. Replace an older version of it, but no other file.

    `is_older` decides from the first bytes of an existing file whether it is an older version. Raises
    `DistlaunchError`.
    """
    fresh = f"{path}.{os.getpid()}.new"
    try:
        if os.path.isfile(path):
            with open(path, "rb") as file:
                if not is_older(file.read(1 << 12)):
                    raise UsageError(f"{path} already exists and is not from this run; specify another file")
        elif os.path.lexists(path):  # a pipe or a device
            with open(os.open(path, os.O_WRONLY), "wb") as file:
                file.write(data)
            return
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        os.replace(fresh, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        raise DistlaunchError(f"can't write {path}: {reason(error)}") from None
