"""Lists, follows and cancels jobs in a scheduler's queue, which become runs."""

import os
import re
import time
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from itertools import chain, product
from typing import Any

from distlaunch.agent.frozen import Frozen
from distlaunch.agent.sweep import job_id
from distlaunch.errors import DistlaunchError, UsageError
from distlaunch.observers import run_list
from distlaunch.observers.run_list import Listed, Ticket
from distlaunch.runs.following import follow, interrupt, over, pause
from distlaunch.runs.run import (
    JOB_FILES,
    LOGS,
    Run,
    active_runs,
    afar,
    directories,
    find,
    living_unread,
    named,
    remembered,
    run_in,
    scanned,
    when,
)
from distlaunch.schedulers import DEFAULT, TABLE, load, title_of
from distlaunch.schedulers.queue import CANCELLED, GONE, Queued, ToolMissingError, output_path
from distlaunch.signals import Interrupts
from distlaunch.supervisor.status import ControllerProcess, RunState, Status
from distlaunch.wording import listed

CLOCKS_S = 3600.0
"""Maximum difference between two hosts' clocks, in seconds. A run that began longer than that before the
submission belongs to another job with the same ID."""
LOOK_S = 0.25
"""Seconds between two checks of the directory. These checks put no load on the scheduler."""
FIRST_GAP_S, LAST_GAP_S, GROWTH = 0.5, 60.0, 1.5
"""Seconds between two queries of a scheduler, at first and at most, and the factor by which they grow."""
TELL_S, LEAVE_S = 5.0, 300.0
"""Seconds for which a queue may keep a job whose run has ended, before that is told, and at most."""
UNSEEN = "its run directory was removed, or is on another host's disk"

_FAILED = "FAIL|CANCEL|TIMEOUT|NODE_FAIL|BOOT_FAIL|OUT_OF_MEMORY|DEADLINE|PREEMPTED|EXIT"
"""States of jobs that have failed or were ended, in the words of any scheduler."""
_SUCCEEDED = ("COMPLETED", "DONE")
"""States of jobs whose scripts have exited with status 0. A run that is missing may be on another disk."""
_ID = re.compile(r"[0-9]+(\.[A-Za-z0-9_.-]+)?")


class Submission(Frozen):
    """A job in a scheduler's queue: its ID, its name, and the directory of its runs.

    `at` is the time of submission in seconds since the epoch, or 0 if distlaunch didn't submit the job. `end`
    is how the job ended, in the scheduler's words; "" = not known to have ended. `file` is the resolved path
    of the job file.
    """

    id: str
    job: str
    directory: str
    at: float
    end: str = ""
    scheduler: str = DEFAULT
    file: str = ""

    @property
    def name(self) -> str:
        """Return the job's display name."""
        return f"{title_of(self.scheduler)} job {self.id}"

    @property
    def starts(self) -> str:
        """Return the path of its list of starts."""
        return run_list.starts_path(self.directory, self.id, self.scheduler)

    def as_run(self, state: RunState, why: str) -> Run:
        """Return this submission, which has no run, as an entry for lists of runs."""
        at = self.at or time.time()
        reason = f"{title_of(self.scheduler)}: {why}"
        where, ending = ("", reason + _see(self)) if state.over else (reason, "")
        status = Status(self.id, self.job, state, at, at, ControllerProcess("", 0), where=where, why=ending)
        return Run("", status, alive=False, heard=None)


def note(submission: Submission) -> None:
    """Add a submission to the list. `submit` calls this; the job's own process adds its runs."""
    _note(submission, **submission._replace(end="")._asdict())


def note_end(submission: Submission, end: str) -> None:
    """Record how a submission ended, so that the scheduler, which will forget it, isn't queried again.

    "" = it hasn't ended after all. That a job without a run is GONE counts only on this host: the list may be
    shared with hosts of another cluster, which has the job.
    """
    here = {"on": os.uname().nodename} if end == GONE.state and not _has_run(submission) else {}
    _note(submission, end=end, **here)
    if end == CANCELLED:
        run_list.note_stop(submission.directory, submission.id, submission.scheduler)


def _note(submission: Submission, **more: Any) -> None:
    ticket = {"queued": submission.id, "scheduler": submission.scheduler}
    run_list.append(run_list.index_path(), {**ticket, **more})


def submissions() -> dict[Ticket, Submission]:
    """Return all known submissions: from `submit`, and from listed runs."""
    found = {}
    for run in run_list.listed().values():
        if run.queued:
            scheduler, job = run.queued
            found[run.queued] = Submission(job, "", os.path.dirname(run.directory), 0.0, scheduler=scheduler)
    fields = Submission._fields
    for line in run_list.index_lines():
        if "run" in line or not (queued := run_list.ticket_of(line)):
            continue
        # IDs may repeat after the scheduler has been set up again.
        if line.keys() >= {"id", "job", "directory", "at"}:
            found[queued] = Submission(**{name: line[name] for name in fields if name in line})
        elif queued in found and line.get("on") in (None, os.uname().nodename):
            found[queued] = found[queued]._replace(end=str(line.get("end", "")))
    return found


def submission(word: str | None, alone: bool = False) -> Submission | None:
    """Find a submission by its ID, or a waiting job by its name or file; None = one below this directory.

    A matching run comes first if it is active or began after the job was submitted. With `alone`, refuse
    several matches that wait or are active. Raises `UsageError`, also for an ambiguous number.
    """
    found, run = _matching(word, alone), None
    if not found or not _matches(found[0], word):  # its ID does
        return next(iter(found), None)
    with suppress(UsageError):
        run = find(word)
    going = [each.id for each in active_runs(word)]
    if alone and len(found) + len(going) > 1:
        waiting = [each for each in found if not _is_over(each)]
        if len(ids := [*(each.id for each in waiting), *going]) > 1:
            which = f"of {word}" if word else "of this directory"
            raise UsageError(f"several runs {which} wait or are active: {listed(ids)}; specify one by its ID")
        found = waiting or found
    later = run and run.status.began > found[0].at and not alone
    return None if going or later else found[0]


def _matching(word: str | None, alone: bool = False) -> list[Submission]:
    """Return the submission with that ID, or else the waiting jobs that the word matches, latest first.

    With `alone`, include jobs that wait for their next start, and refuse an ID that active jobs of several
    schedulers have.
    """
    known, word = submissions().values(), word and _job_id(word, alone)
    named = _of_id(word, known, alone) or _beside_its_runs(word) if word and _ID.fullmatch(word) else None
    if named:
        return [_with_its_id_now(named)]
    waiting = [each for each in known if not each.end and each.at and _matches(each, word)]
    again = waiting_again(waiting) if alone else []
    waiting = [each for each in waiting if each in again or not latest_run(each)]
    return sorted(waiting, key=lambda each: -each.at)


def _job_id(word: str, alone: bool = False) -> str:
    """Return the job ID of an array's task, such as 12_3, which has its own; other words as they are.

    With `alone`, refuse an array of which other tasks are in the queue than the one with the array's ID.
    """
    tasks: dict[str, str] = {}
    if re.fullmatch("[0-9]+(_[0-9]+)?" if alone else "[0-9]+_[0-9]+", word):
        with suppress(DistlaunchError):
            tasks = load(DEFAULT).array_tasks(word)
    if "_" not in word and {*tasks.values()} - {word}:
        active = listed(sorted(task for task in tasks if "[" not in task))
        which = f"{word} is a job array{active and f', with {active} in the queue'}"
        raise UsageError(f"{which}; specify a task, or cancel all of them with `scancel {word}`")
    return tasks.get(word, word)


def waiting_again(jobs: Sequence[Submission]) -> list[Submission]:
    """Return the jobs that go on after their latest run: they are in the queue, or in their setup.

    Each scheduler is queried once. If it doesn't answer, it counts as having none.
    """
    found = []
    ended = [each for each in jobs if (run := latest_run(each)) and not run.alive]
    for scheduler in sorted({each.scheduler for each in ended}):
        own = [each for each in ended if each.scheduler == scheduler]
        with suppress(DistlaunchError):
            states = load(scheduler).look([each.id for each in own])
            found += [each for each in own if not states.get(each.id, GONE).over]
    return found


def _is_over(each: Submission) -> bool:
    """Return whether the scheduler reports that the job has ended."""
    with suppress(DistlaunchError):
        return state_of(each).over
    return False


def ended_before(at: float) -> Iterator[Ticket]:
    """Yield the jobs submitted before a time that have ended, and whose runs have no directories."""
    for each in submissions().values():
        if each.end and 0 < each.at < at and not any(map(os.path.isdir, _directories(each))):
            yield Ticket(each.scheduler, each.id)


def submission_of(run: Run) -> Submission | None:
    """Return the submission whose latest run is this one."""
    entry = run_list.listed().get(run.id)
    found = submissions().get(entry.queued) if entry and entry.queued else None
    latest = latest_run(found) if found else None
    return found if latest and latest.id == run.id else None


def _sent(run: Run) -> Submission | None:
    """Return the submission whose runs go on from this one.

    Only a job that `submit` has submitted is the run. A user's own script may do something else after it.
    """
    found = submission_of(run)
    return found if found and found.at else None


def _of_id(word: str, known: Collection[Submission], alone: bool) -> Submission | None:
    """Return the latest job with that ID, or the only job with that number (IDs may end in a server name)."""
    if found := [each for each in known if each.id == word]:
        open_ = [each for each in found if not each.end]
        if alone and len(open_) > 1 and len(active := [each for each in open_ if not _is_over(each)]) > 1:
            names = listed([each.name for each in active])
            raise UsageError(f"{word} is ambiguous: it matches {names}; specify the job's name, or a run")
        return max(found, key=lambda each: (not each.end, each.at))
    numbered = [each for each in known if each.id.partition(".")[0] == word]
    if len(numbered) > 1:
        ids = listed([each.id for each in numbered])
        raise UsageError(f"{word} is ambiguous: it matches {ids}")
    return numbered[0] if numbered else None


def _matches(each: Submission, word: str | None) -> bool:
    if word is None:
        return each.directory.startswith(os.path.join(os.getcwd(), ""))
    return each.file == os.path.realpath(word) if word.endswith(JOB_FILES) else each.job == word


def _with_its_id_now(each: Submission) -> Submission:
    """Return the job that has this ID now: a scheduler that was set up again gives out the same ones."""
    if not each.end:
        return each
    ticket = Ticket(each.scheduler, each.id)
    same = [run.directory for run in run_list.listed().values() if run.queued == ticket]
    for directory in reversed(same):
        if (run := run_in(directory)) and run.alive:
            return Submission(each.id, "", os.path.dirname(directory), 0.0, scheduler=each.scheduler)
    return each


def _beside_its_runs(job: str) -> Submission | None:
    """Return an unlisted submission from its list of starts, for hosts that don't share home directories."""
    for directory, scheduler in product((os.path.abspath(LOGS), os.getcwd()), TABLE):
        if any(True for _ in run_list.lines_of(run_list.starts_path(directory, job, scheduler))):
            return Submission(job, "", directory, 0.0, scheduler=scheduler)
    return None


def latest_run(each: Submission) -> Run | None:
    """Return the latest run, if the job has been started, or an earlier one if only that is active.

    A user's own script may start several runs at once.
    """
    found = _directories(each)
    last = next(_read(each, found[-1:]), None)
    if last and last.alive:
        return last
    return next((run for run in _read(each, found[-2::-1]) if run.alive), last)


def _is_active(each: Submission) -> bool:
    return (run := latest_run(each)) is not None and run.alive


def _has_run(each: Submission) -> bool:
    """Return whether the job has been started, even if the directory of its run was removed."""
    return latest_run(each) is not None or not all(map(os.path.isdir, _directories(each)[-1:]))


def _directories(each: Submission) -> list[str]:
    """Return the directories of a job's runs, the latest last.

    A user's own script may start several runs, also of job files in different directories. Each of these has
    its own list of starts.
    """
    ticket = Ticket(each.scheduler, each.id)
    known = {name: run.directory for name, run in run_list.listed().items() if run.queued == ticket}
    known |= {start.run: os.path.join(each.directory, start.run) for start in run_list.starts_in(each.starts)}
    return [known[name] for name in sorted(known, key=when)]


def _read(each: Submission, directories: Sequence[str]) -> Iterator[Run]:
    found = filter(None, map(run_in, directories))
    return (run for run in found if run.status.began > each.at - CLOCKS_S)


def listing(places: Sequence[str], ended: bool, most: int | None) -> list[Run]:
    """Return the runs in `places`, or all known runs, the latest first. With `ended`, include ended runs.

    A place that isn't a directory refers to runs. The latest of them is listed even if it has ended. Raises
    `UsageError`.
    """
    places = [*map(_job_id, places)]
    jobs = [_matching(place) for place in places]
    matched = [named(place, bool(found)) for place, found in zip(places, jobs, strict=True)]
    named_here = list(filter(None, chain(matched, map(_unlisted, jobs))))
    scan = [place for place, runs in zip(places, matched, strict=True) if not runs]  # NAME is not ./NAME
    if places:
        known = dict(ChainMap(*named_here, dict(scanned(scan))))
    else:
        known = {**directories(), **_unlisted(submissions().values())}
    latest = {max(found, key=when) for found in named_here}
    over = set() if ended else {run for run, entry in run_list.listed().items() if entry.over} - latest
    found, unread = list[Run](), set[str]()
    for name in sorted(known.keys() - over, key=lambda name: (when(name), name), reverse=True):
        second = when(found[-1].id) if found else ""
        if most is not None and len(found) >= most and when(name) != second:
            break  # IDs of the same second don't tell which run is later
        run = run_in(known[name])
        if run and (ended or name in latest or not run.status.state.over):
            found.append(run)
        unread |= set() if run else {name}
    found += living_unread(unread)
    if most != 0:
        found += _queued(places, [*chain(*jobs)], found, ended)  # which may be later than the runs
    found += [] if places else afar(known)
    return sorted(found, key=lambda run: run.status.began, reverse=True)[:most]


def _unlisted(jobs: Collection[Submission]) -> dict[str, str]:
    """Return the directories of these jobs' runs, by run, if the jobs' hosts keep another list of runs."""
    listed_here = {run.queued for run in run_list.listed().values()}
    found = [each for each in jobs if each.at and Ticket(each.scheduler, each.id) not in listed_here]
    return {os.path.basename(path): path for each in found for path in _directories(each)}


def _queued(
    places: Sequence[str], jobs: Sequence[Submission], shown: Sequence[Run], ended: bool
) -> list[Run]:
    """Return those of `jobs`, and of the jobs for `places`, that are in a queue or left it without a run."""
    if not os.path.exists(run_list.index_path()):
        return []
    inside = {os.path.abspath(each) for place in places for each in (place, os.path.join(place, LOGS))}
    return [
        run
        for each, run in _waiting(shown, ended or bool(jobs), jobs)
        if each in jobs or ((ended or not run.status.state.over) and (not places or each.directory in inside))
    ]


def _waiting(
    shown: Sequence[Run], ended: bool, named: Sequence[Submission]
) -> Iterator[tuple[Submission, Run]]:
    """Yield queued jobs without an active run, each with its entry. With `ended`, include ended jobs.

    `shown` are the runs already listed, and `named` the jobs that the user named. A scheduler is queried only
    if it may have such a job.
    """
    known = [each for each in submissions().values() if each.at or (not each.end and _is_hidden(each))]
    for each in known if ended else ():
        if each.end:
            yield from ((each, run) for run in _past(each, each.end, each in named))
    alive = {run.id for run in shown if run.alive}
    queued = [each for each in known if not each.end]
    open_ = [each for each in queued if alive.isdisjoint(map(os.path.basename, _directories(each)))]
    for scheduler in sorted({each.scheduler for each in open_}):
        yield from _queried(scheduler, [each for each in open_ if each.scheduler == scheduler], ended, named)


def _past(each: Submission, end: str, named: bool) -> Iterator[Run]:
    """Yield the entry of a job that has ended without a run, or whose run can't be seen and isn't over.

    If the user `named` the job, its run may be over.
    """
    if not _has_run(each):
        yield _ended(each, end)
    elif _is_hidden(each) or (named and not latest_run(each)):
        yield _last_remembered(each) or each.as_run(RunState.UNKNOWN, f"{end}; {UNSEEN}")


def _queried(
    scheduler: str, open_: Sequence[Submission], ended: bool, named: Sequence[Submission]
) -> Iterator[tuple[Submission, Run]]:
    """Yield the open jobs of one scheduler for `_waiting`, and note the end of those that are over."""
    try:
        states = load(scheduler).look([each.id for each in open_])
    except DistlaunchError as error:
        done = (RunState.SUCCEEDED, RunState.CANCELLED)
        runs = [(each, latest_run(each)) for each in open_ if each.at]
        waits = [each for each, run in runs if not (run and run.status.state in done)]
        yield from ((each, each.as_run(RunState.PENDING, f"unknown, {error}")) for each in waits)
        return
    for each in open_:
        state = _judged(each, states.get(each.id, GONE))
        if not state.over:
            yield from ((each, run) for run in _entry(each, state))
        elif each.at:  # others may belong to another cluster
            note_end(each, state.state)
            if ended:
                yield from ((each, run) for run in _past(each, state.state, each in named))


def _entry(each: Submission, state: Queued) -> Iterator[Run]:
    """Yield the entry of a job in the queue, unless its run has ended and the queue only lags behind."""
    requeues = load(each.scheduler).answers and state.stage != "ends"
    if state.waits:
        yield each.as_run(RunState.PENDING, state.words)
    elif _is_hidden(each):
        yield each.as_run(RunState.UNKNOWN, f"{state.words}; {UNSEEN}")
    elif requeues or not latest_run(each):  # it is being set up, perhaps again
        yield each.as_run(RunState.CONNECTING, state.words)


def _judged(each: Submission, state: Queued) -> Queued:
    """Return the state of a job. One that left the queue after `stop` was canceled."""
    return Queued(CANCELLED) if state == GONE and run_list.is_stopped(each.starts) else state


def _is_hidden(each: Submission) -> bool:
    """Return whether the directory of the job's latest run can't be seen, although the run may be active."""
    latest = [run_list.listed().get(os.path.basename(path)) for path in _directories(each)[-1:]]
    return any(entry and _is_unseen(entry) for entry in latest)


def _is_unseen(entry: Listed) -> bool:
    """Return whether a listed run that isn't known to have ended has no directory that this host can see."""
    return not (entry.over or os.path.isdir(entry.directory))


def _ended(each: Submission, end: str) -> Run:
    state = {CANCELLED: RunState.CANCELLED, **dict.fromkeys(_SUCCEEDED, RunState.UNKNOWN)}
    why = Queued(end).ending if end == GONE.state else end
    return each.as_run(state.get(end, RunState.FAILED), why)


def _queries() -> Iterator[bool]:
    """Yield at each step whether another query is due; the intervals grow."""
    gap_s, due = FIRST_GAP_S, 0.0
    while True:
        now = time.monotonic()
        yield (is_due := now >= due)
        if is_due:
            due, gap_s = now + gap_s, min(gap_s * GROWTH, LAST_GAP_S)


class _Lag:
    """The time for which a queue keeps a job, if possible after its run has ended."""

    def __init__(self, queued: Submission, tell: Callable[[str], None]) -> None:
        self._name, self._tell, self._told = queued.name, tell, ""
        self._state, self._since = "", 0.0

    def is_too_long(self, state: Queued | None, ends: bool) -> bool:
        """Return whether to wait no longer, and tell what is waited for. None = there is nothing to tell yet.

        `ends` is whether the job should leave the queue soon, because its run has ended.
        """
        now, name = time.monotonic(), state.state if state else ""
        if name != self._state:
            self._state, self._since = name, now
        if state is None or now - self._since < TELL_S:
            return False
        is_late = ends and now - self._since >= LEAVE_S
        most = f"at most {LEAVE_S / 60:g} min for it to leave" if ends else "until it has left"
        text = f"{self._name} is still {state.words}{', although its run has ended' * ends}"
        text += "; not waiting any longer" if is_late else f"; waiting {most} the queue"
        if text != self._told:
            self._tell(text)
        self._told = text
        return is_late


def runs_of(
    word: str | None, interrupts: Interrupts, tell: Callable[[str], None]
) -> Iterator[tuple[Run, bool]]:
    """Yield the runs that a word refers to, one after another, and whether each has begun since this call.

    For a queued job, yield its latest run and all later ones. Call `tell` with messages about waiting. Stop
    early if a signal arrives, and after a run if this host can't query the queue. Raises `DistlaunchError`.
    """
    queued = submission(word)
    if queued and queued.id == job_id(os.environ.get):  # the job ends only after this command
        yield _last_remembered(queued) or run_of(word), False
        return
    run = latest_run(queued) if queued else _found(word)
    if run:
        yield run, False
        queued = queued or _sent(run)
    before = run
    if queued is None or interrupts.any():
        return
    last = before
    try:
        while before := _next(queued, before, interrupts, tell):
            yield (last := before), True
        if last and not interrupts.any():
            _check_end(queued, over(last).status, tell)
    except ToolMissingError as error:
        if last is None:
            raise
        tell(f"can't determine whether {queued.name} will start again: {error}")


def _check_end(queued: Submission, last: Status, tell: Callable[[str], None]) -> None:
    """Tell how a job has ended if its `last` run doesn't show it, because of what came after that run.

    Raises `DistlaunchError` if a script has failed after a run that succeeded.
    """
    if text := _end_without_run(queued, last):
        tell(text)
    if not queued.at and last.state is RunState.SUCCEEDED:
        state = state_of(queued)
        if re.match(_FAILED, state.state):  # its script did more than the run
            raise DistlaunchError(f"{queued.name} {state.ending}, although its last run succeeded")
        if state.state == GONE.state:
            tell(f"{queued.name} left the queue; whether its script failed after the run is unknown")


def _end_without_run(queued: Submission, last: Status) -> str:
    """Return how a job ended after its `last` run and a requeue, before it started another run, or ""."""
    if queued.at and last.state is RunState.FAILED and _was_requeued(queued, last):
        if run_list.is_stopped(queued.starts):
            return f"{queued.name} was cancelled before its next start"
        if re.match(_FAILED, (state := state_of(queued)).state):
            return f"{queued.name} {state.ending} without starting another run{_see(queued)}"
    return ""


def end_after(word: str | None, run: Run) -> str:
    """Return how the queued job that a word refers to ended, if its last `run` doesn't show it, or ""."""
    with suppress(DistlaunchError):  # the scheduler doesn't answer
        if queued := submission(word):
            return _end_without_run(queued, run.status)
    return ""


def _was_requeued(queued: Submission, last: Status) -> bool:
    """Return whether a job was requeued after its `last` run."""
    lines = [line for line in run_list.lines_of(queued.starts) if {"requeue", "run"} & line.keys()]
    return "was requeued" in last.why or bool(lines and "requeue" in lines[-1])


def all_runs(word: str | None) -> list[Run]:
    """Return the runs that a word refers to, the latest last. A queued job has one run per start.

    Raises `DistlaunchError`.
    """
    latest = run_of(word)
    queued = submission(word) or _sent(latest)
    return list(_read(queued, _directories(queued))) if queued else [latest]


def run_of(word: str | None) -> Run:
    """Return the run that a word refers to; for a queued job, the latest. Raises `DistlaunchError`."""
    queued = submission(word)
    if queued is None:
        return find(word)
    if run := latest_run(queued):
        return run
    state = state_of(queued)
    if state.over:
        raise DistlaunchError(_without_run(queued, state))
    if run := latest_run(queued):  # it has begun meanwhile
        return run
    if _has_run(queued):
        raise DistlaunchError(f"{queued.name} is {state.words}, but {UNSEEN}")
    what = "has not started" if state.waits else "hasn't started a run yet"
    raise DistlaunchError(f"{queued.name} {what}: {state.words}")


def state_of(queued: Submission) -> Queued:
    """Query the scheduler for the job's state, and note its end. Raises `DistlaunchError`.

    A job that has ended may have been requeued. If the scheduler has forgotten it, its end is the known one.
    While its run is active, it hasn't ended: another cluster has it, or the scheduler was set up again.
    """
    known = Queued(queued.end) if queued.end not in ("", GONE.state) else None
    try:
        state = _judged(queued, load(queued.scheduler).look([queued.id]).get(queued.id, GONE))
    except DistlaunchError:
        if known:
            return known
        raise
    if known and state == GONE:
        return known
    if (end := state.state if state.over else "") != queued.end and not (
        state == GONE and _is_active(queued)
    ):
        note_end(queued, end)
    return state


def _polled(queued: Submission) -> Queued:
    """Query the state as `state_of` does. If the query fails, return a state in which to wait."""
    try:
        return state_of(queued)
    except ToolMissingError:
        raise
    except DistlaunchError as error:
        return Queued(f"in an unknown state: {error}", stage="waits", known=False)


def _next(
    queued: Submission, before: Run | None, interrupts: Interrupts, tell: Callable[[str], None]
) -> Run | None:
    """Wait for the run after `before`; return None if there will be none.

    Raises `DistlaunchError` if there never was a run.
    """
    queries, announced, lag, ends = _queries(), "", _Lag(queued, tell), False
    state: Queued | None = None
    while not interrupts.any():
        if run := _newer(queued, before):
            return run
        if next(queries):
            state = _polled(queued)
            run = _newer(queued, before)  # which may have begun meanwhile
            if state.over and not (run or before or (run := _last_remembered(queued))):
                raise DistlaunchError(_without_run(queued, state))
            if run or state.over:
                return run
            unseen = not state.waits and before is None and _has_run(queued)
            if (state.waits or unseen) and state.words != announced:
                announced = state.words
                tell(f"{queued.name} is {announced}{f', but {UNSEEN}' if unseen else ''}")
            # Otherwise, its setup, or the rest of a user's own script, may take any time.
            goes_on = state.known and state.stage != "ends"
            ends = bool(before and not goes_on and not _was_requeued(queued, over(before).status))
        if before and lag.is_too_long(None if state and state.surely_waits else state, ends):
            return None
        pause(interrupts, LOOK_S)
    return None


def _newer(queued: Submission, before: Run | None) -> Run | None:
    run = latest_run(queued)
    return run if run and (before is None or run.id != before.id) else None


def _found(word: str | None) -> Run:
    try:
        return find(word)
    except UsageError:
        if run := remembered(word or ""):
            return run
        raise


def _last_remembered(queued: Submission) -> Run | None:
    last = _directories(queued)[-1:]
    return remembered(os.path.basename(last[0])) if last else None


def _without_run(queued: Submission, state: Queued) -> str:
    if _has_run(queued):
        return f"{queued.name} {state.ending}; {UNSEEN}"
    what = " without starting a run"
    if state.state in _SUCCEEDED:
        what = f", but its run is not in {queued.directory}"
    return f"{queued.name} {state.ending}{what}{_see(queued)}"


def _see(each: Submission) -> str:
    """Describe where the output of a job's script is; "" = none, as for a job that never started."""
    path = output_path(each.directory, each.id, each.scheduler)
    return f"; see {path}" if os.path.exists(path) else ""


def cancel(
    queued: Submission, at_once: bool, interrupts: Interrupts, tell: Callable[[str], None]
) -> tuple[Run | None, bool]:
    """Cancel a job and wait until it is gone. Return the run that this ended, and whether there was a job.

    For a job that had already ended, return its last run if that is known to be over, too. Return early if a
    signal arrives, or if the queue keeps the job for LEAVE_S after the end of its run. Call `tell` with
    messages about waiting. Raises `DistlaunchError`.
    """
    earlier = latest_run(queued)
    before = state_of(queued)
    if before == GONE and earlier and earlier.alive:
        if earlier.host:
            use = f"use `distlaunch stop {earlier.id}` on a login node of its cluster"
            what = f"{queued.name} isn't in this host's queue, but its run {earlier.id}"
            raise DistlaunchError(f"{what} is active on {earlier.host}; {use}")
        return (follow(earlier, interrupts), True) if interrupt(earlier, at_once) else (over(earlier), False)
    if before.over:
        return earlier if earlier and earlier.status.state.over else None, False
    ended = earlier.id if earlier and not earlier.alive else ""
    noted = (queued.directory, queued.id, queued.scheduler, ended)
    run_list.note_stop(*noted)
    try:
        load(queued.scheduler).cancel(queued.id, at_once)
    except DistlaunchError:
        run_list.note_no_stop(queued.directory, queued.id, queued.scheduler)
        raise
    queries, known, lag = _queries(), earlier, _Lag(queued, tell)
    last: Queued | None = None
    while not interrupts.any():
        run = latest_run(queued)
        state = _polled(queued) if not (run and run.alive) and next(queries) else None
        if state and state.over:
            last = state
            break
        begun = run and run.alive and run.id != (known.id if known else "")
        if begun or (state and state.surely_waits):  # a requeue and the cancellation have crossed
            known = run or known
            run_list.note_stop(*noted)  # a start has ended the earlier stop
            with suppress(DistlaunchError):
                load(queued.scheduler).cancel(queued.id, at_once)
        last = None if run and run.alive else state or last
        if lag.is_too_long(last, bool(run and last and not last.surely_waits)):
            break
        pause(interrupts, LOOK_S)
    run = earlier if earlier and earlier.alive else latest_run(queued)
    if run and earlier and run.id == earlier.id and not earlier.alive:
        # The scheduler received the request too late, or the job was waiting for its next start.
        return (over(run), False) if last and last.state in _SUCCEEDED else (None, True)
    return (over(run) if run else None), True
