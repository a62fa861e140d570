"""Commands for existing runs: ps, attach, view, wait and stop, and functions that `logs` also uses."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from shlex import quote
from typing import Annotated, Any, NoReturn

import typer
from typer import Argument, Option
from typer.core import TyperCommand, TyperOption

from distlaunch.cli.options import SSH_CONFIG, Fold, Json
from distlaunch.cli.output import print_json, print_text, say
from distlaunch.errors import Exit, UsageError
from distlaunch.job.types import UNITS_S, seconds_in
from distlaunch.observers.console import escape
from distlaunch.observers.run_list import end_tries, note_end_seen, noted_ends, ways
from distlaunch.observers.terminal import Terminal
from distlaunch.runs.following import attend, follow, interrupt, outlast, over
from distlaunch.runs.run import (
    Run,
    directories,
    elsewhere,
    find,
    is_foreign,
    run_directories,
    uncollected,
    when,
)
from distlaunch.runs.submissions import (
    Submission,
    cancel,
    listing,
    runs_of,
    submission,
    submission_of,
    waiting_again,
)
from distlaunch.signals import Interrupts, Signals
from distlaunch.supervisor.status import RunState, document_of
from distlaunch.wording import age_words, aligned, cut, listed

HEADINGS = ("RUN", "STATE", "RANKS", "RESTARTS", "AGE", "LAST", "WHERE")
LEAST_ID, LEAST_WHERE = 20, 10
"""Minimum characters of an ID and of WHERE in shortened lines, if they fit into the terminal."""
_WHICH = (
    "A run's ID, or a prefix of it with the job name and the date; the name or file of a job, for its "
    "latest run; a run directory; or a scheduler's job ID. HOST:RUN is a run on another host. Default: the "
    "latest run that was started from the current directory or is stored below it."
)


_NAME = "DISTLAUNCH_NAME"
"""The variable that contains a run's name on the machine where the user typed the command."""
_RUN = "DISTLAUNCH_RUN"
"""The variable with the run that a command from another host is for, instead of the word in its arguments."""
_OF_ENDED = ("bundle", "checkout", "logs", "report", "why")
"""Commands used mostly for runs that have ended."""


def offered(context: typer.Context, incomplete: str) -> list[str]:
    """Return the known runs for completion, the latest first; ended runs only for commands in `_OF_ENDED`."""
    known = {*directories(), *ways()} - (set() if context.command.name in _OF_ENDED else noted_ends())
    return [run for run in sorted(known, key=when, reverse=True) if run.startswith(incomplete)]


Which = Annotated[str | None, Argument(metavar="[RUN]", help=_WHICH, autocompletion=offered)]
_PLACES = (
    "List only these runs, or the runs in these directories and their `runs` subdirectories; `HOST:` lists "
    "the runs on another host."
)
Places = Annotated[list[str] | None, Argument(metavar="[DIRECTORY|RUN]…", help=_PLACES)]
Ended = Annotated[bool, Option("--all", "-a", help="Include runs that have ended.")]
Most = Annotated[
    int | None, Option("--number", "-n", metavar="N", min=0, help="Show only the N latest runs.")
]


class OnRuns(TyperCommand):
    """A command for runs. For a run on another host, the command runs there, over SSH."""

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self.params.append(TyperOption(param_decls=["--ssh-config"], metavar="FILE", help=SSH_CONFIG))

    def invoke(self, ctx: Any) -> Any:
        """Call the command, unless it runs elsewhere. Called by Click."""
        ctx.meta["ssh_config"] = ctx.params.pop("ssh_config")
        if (run := os.environ.pop(_RUN, None)) is not None:
            ctx.params |= {"places": [run] * bool(run)} if "places" in ctx.params else {"which": run or None}
        for word in ctx.params.get("places", [ctx.params.get("which")]) or ():
            run_elsewhere(ctx, word)
        return super().invoke(ctx)


def ps(places: Places = None, ended: Ended = False, most: Most = None, as_json: Json = False) -> None:
    """List active runs, with their state, ranks, restarts, age and nodes."""
    ended = ended or most is not None
    found = listing(places or (), ended, most)
    if as_json:
        print_json([_document(run) for run in found])
    elif found:
        print_text(_table(found))
    else:
        say("no runs" if ended else "no active runs; add -a to list ended runs, too")
        if directory := next(filter(is_foreign, run_directories(places or ())), None):
            say(f"{directory} belongs to another user: you can read and stop only your own runs")


def _table(found: Sequence[Run]) -> str:
    """Return a table of runs, with lines cut to the width of the terminal."""
    now = time.time()
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    lines = aligned(_fitted([HEADINGS, *(_row(run, now) for run in found)], width), 2)
    return "".join(line[:width].rstrip() + "\n" for line in lines)


def _fitted(rows: Sequence[tuple[str, ...]], width: int) -> list[tuple[str, ...]]:
    """Shorten WHERE and, if that isn't enough, cut the middle of IDs."""
    ids, *others, where = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = width - sum(others) - 2 * len(rows[0][:-1])
    id_room = max(LEAST_ID, min(ids, room - min(where, LEAST_WHERE)))
    end = (id_room - 1) // 2
    return [(cut(row[0], id_room, end), *row[1:-1], cut(row[-1], room - id_room)) for row in rows]


def _document(run: Run) -> dict[str, Any]:
    """Return a run as JSON. Times are in seconds."""
    known, now, silent_s = document_of(run.status), time.time(), _silent_s(run, time.time())
    del known["version"], known["controller"]["boot"], known["controller"]["namespace"]
    return {
        **known,
        "why": run.status.why or None,
        "age": round(max(0.0, now - run.status.began), 1),
        "silent": None if silent_s is None else round(silent_s, 1),
        "directory": run.directory,
    }


def _row(run: Run, now: float) -> tuple[str, ...]:
    """Return the cells of a run, under HEADINGS."""
    status, silent = run.status, _silent_s(run, now)
    ended = f" ({status.exit_status})" if status.exit_status else ""
    return (
        escape(run.id),
        status.state.value + ended,
        str(status.ranks or "-"),
        str(status.restarts),
        age_words(now - status.began),
        "-" if silent is None else age_words(silent),
        escape(f"{status.trouble}; {status.where}" if status.trouble else status.where),
    )


def _silent_s(run: Run, now: float) -> float | None:
    """Return the seconds since a rank last printed, if ranks are running and their output is recorded."""
    if run.status.state is not RunState.RUNNING or run.heard is None:
        return None
    return max(0.0, now - max(run.heard, run.status.since))


Everything = Annotated[bool, Option("--all", "-a", help="Show the run's output from the beginning.")]


def attach(which: Which = None, everything: Everything = False, fold: Fold = False) -> None:
    """Follow a run's console output; Ctrl-C detaches without stopping the run."""

    def shown(run: Run, interrupts: Interrupts, whole: bool) -> tuple[Run, bool]:
        with closing(Terminal(interrupts, fold=fold, waits=True)) as terminal:  # even without a summary
            return attend(run, terminal, interrupts, whole)

    _show_each(which, shown, everything)


def view(which: Which = None) -> None:
    """Watch a run full-screen: its ranks, outliers and output; q quits without stopping the run."""
    from distlaunch.observers.screen import Screen

    if not sys.stdout.isatty():
        raise UsageError("view works only if stdout is a terminal; use `distlaunch attach` instead")

    def shown(run: Run, interrupts: Interrupts, _: bool) -> tuple[Run, bool]:
        with closing(Screen(Terminal(interrupts), interrupts, run.directory, run.status.began)) as screen:
            return attend(run, screen, interrupts, everything=True)

    _show_each(which, shown)


def wait(which: Which = None, as_json: Json = False) -> None:
    """Wait until a run ends, and exit with its exit status."""
    run = follow_each(which, lambda run, interrupts, _: follow(run, interrupts))
    if as_json:
        print_json(_document(run))
    elif run.status.state is not RunState.SUCCEEDED or run.status.why:
        say(ended_words(run))
    for line in () if as_json else uncollected(run.directory):
        say(line)
    _leave_with(run)


Now = Annotated[
    bool, Option("--now", help="Kill the ranks now instead of waiting up to timeouts.stop for them to exit.")
]


def stop(context: typer.Context, which: Which = None, now: Now = False, as_json: Json = False) -> None:
    """Stop a run, or cancel a queued job, and wait until it has ended.

    Like a second Ctrl-C, a second `stop` kills the ranks at once.
    """
    queued = submission(which, alone=True)
    run = None if queued else find(which, alone=True)  # among several active runs, don't choose one to stop
    # Only a job that `submit` has submitted is the run; another may be an interactive allocation.
    known = submission_of(run) if run else None
    if run and known and known.at and (run.alive or waiting_again([known])):
        queued = known
    if run and not queued:
        # Only its directory is shared, which doesn't show for certain that it is lost. A queue would know.
        if run.host and (not run.status.state.over or (run.status.state is RunState.LOST and not known)):
            say(f"the controller of {run.id} is on {run.host}; stopping it over SSH")
            way = ways().get(run.id, {"way": (run.host, context.meta["ssh_config"])})["way"]
            status = note_end_seen("stop", run.id, _run_there(context, which or "", run.directory, way))
            if status == Exit.UNREACHABLE:
                job = f", or `distlaunch stop {known.id}` to cancel {known.name}" if known else ""
                say(f"if {run.id} is still active, use `distlaunch stop {run.id}` on {run.host}{job}")
            raise typer.Exit(status)
        if which is None and run.alive:
            say(f"stopping {run.id} ({run.directory})")
    run, stopped = _stopped(queued, run, now)
    if as_json:
        how = (RunState.CANCELLED, "cancelled") if stopped else (RunState.UNKNOWN, "had already ended")
        ended = run or (queued and queued.as_run(*how))
        print_json(ended and _document(ended))
    elif run:
        say(ended_words(run, ":" if stopped else " had already ended:"))
    elif queued:
        say(f"{queued.name}: {'cancelled' if stopped else 'had already ended'}")
    if run and known and not (queued or stopped):
        _keep_from_requeue(known, run)


def _keep_from_requeue(known: Submission, run: Run) -> None:
    """End the tries of a run that has ended to have its job requeued; say if the job is still active."""
    in_time = end_tries(known.directory, known.id, known.scheduler, run.id)
    if in_time:
        say(f"{known.name}, in which it ran, won't be requeued")
    elif in_time is False or waiting_again([known]):
        say(f"{known.name}, in which it ran, is still active; `distlaunch stop {known.id}` cancels it")


def _stopped(queued: Submission | None, run: Run | None, now: bool) -> tuple[Run | None, bool]:
    """Stop the queued job, or else the run. Return the last run, and whether anything could be stopped."""
    with Signals() as signals:
        if queued:
            run, stopped = cancel(queued, now, signals, say)
            name, word, goes_on = queued.name, queued.id, bool(signals.received_last)
        else:
            assert run is not None
            stopped = interrupt(run, now)
            run = follow(run, signals) if stopped else over(run)
            if run.status.state is RunState.LOST:
                what = f"{run.id} has lost its controller; waiting until its ranks"
                outlast(run, signals, lambda pid: say(f"{what} (such as process {pid}) have exited"))
            name, word, goes_on = run.id, run.id, run.alive
    if goes_on:
        say(f"{name} is still stopping; `distlaunch wait {word}` waits until it has ended")
        raise typer.Exit(128 + signals.received_last)
    return run, stopped


_WITH_RUNS_STATUS = ("attach", "view", "wait")
"""Commands that exit with the status of the run."""


def run_elsewhere(context: typer.Context, word: str | None) -> None:
    """Run this command on the host in `word`, or on the host that controls the run; exit with its status.

    Return if the run is on this host. Raises `UsageError`, also for `stop` if a queued job matches, too.
    """
    word = word or ""
    host, colon, rest = word.partition(":")
    if host and colon and os.sep not in host and not os.path.exists(word):
        status = _run_there(context, word, rest, (host, context.meta["ssh_config"]))
        if status == Exit.USAGE and context.command.name not in _WITH_RUNS_STATUS:
            what = "" if rest else f"`{word}` means the latest run in your home directory on {host}; "
            config = context.meta["ssh_config"]
            option = f"--ssh-config {quote(config)} " if config else ""
            say(f"{what}`distlaunch ps -a {option}{host}:` lists all runs on {host}")
        raise typer.Exit(status)
    if known := elsewhere(word, alone=context.command.name == "stop"):
        run, way = known
        if context.command.name == "stop" and (waiting := submission(word, alone=True)):
            if run in noted_ends():
                return
            ids = listed([waiting.id, run])
            raise UsageError(f"several runs of {word} wait or are active: {ids}; specify one by its ID")
        status = _run_there(context, word, run, way)
        raise typer.Exit(note_end_seen(str(context.command.name), run, status))


def _run_there(context: typer.Context, typed: str, run: str, way: Sequence[Any]) -> int:
    """Run this command for `run` instead of the `typed` word, and return its exit status.

    `way` are the arguments of `ssh_to`. Raises `UsageError` if there are other words, too, or if the command
    would write files there.
    """
    from distlaunch.cli.remote import Request, run_there, show_there, ssh_to

    if len(context.params.get("places") or ()) > 1:
        raise UsageError(f"{typed} is on another host, so it must be the only one; use a command for each")
    ssh, words, command = ssh_to(*way), context.obj, context.command.name
    files = {context.params.get("output"), context.params.get("trace")} - {None}
    unnamed = set() if context.params.get("as_json") else {None}
    if command == "checkout" or (command in ("report", "bundle") and (files or unnamed) - {"-"}):
        option = "--trace -" if context.params.get("trace") else "-o -"
        do = "use it there" if command == "checkout" else f"use {option} and redirect stdout"
        raise UsageError(f"{command} would write its files on {ssh.host}; {do}")
    if command == "view":
        return show_there(ssh, words, {_NAME: typed, _RUN: run})
    return run_there(ssh, Request(words, env={_RUN: run}), name=(typed or run) if command == "attach" else "")


def follow_each(
    which: str | None, show: Callable[[Run, Interrupts, bool], Run], detaches: bool = False
) -> Run:
    """Call `show` for each run that matches `which`, with whether it has begun since this call.

    Return the last run, which has ended. Exit with the status of a signal that arrives while a run is active
    or the job is queued. If `detaches`, print that the run continues. Raises `DistlaunchError`.
    """
    last: Run | None = None
    with Signals() as signals:
        for run, is_new in runs_of(which, signals, say):
            last = show(run, signals, is_new)
            if last.alive:
                break
    if last and not last.alive and not signals.received_last:  # or the job waits for its next start
        return over(last)  # the scheduler may meanwhile report that the job was cancelled
    if last and detaches and last.alive:
        name = os.environ.get(_NAME) or last.id
        say(f"detached from {name} without stopping it; `distlaunch stop {name}` stops it")
    raise typer.Exit(128 + signals.received_last if signals.received_last else Exit.OK)


def _show_each(
    which: str | None, show: Callable[[Run, Interrupts, bool], tuple[Run, bool]], everything: bool = False
) -> None:
    """Call `show` for each run that matches `which`, with whether to show it from the beginning.

    Without `everything`, that is a run that begins later. Of earlier runs, only active ones are shown. Exit
    with the last status.
    """

    def seen(run: Run, interrupts: Interrupts, is_new: bool) -> Run:
        whole = everything or (is_new and os.path.isdir(run.directory))
        run, told = show(run, interrupts, whole) if run.alive or whole else (run, False)
        if not (run.alive or told):
            say(ended_words(run))
        return run

    _leave_with(follow_each(which, seen, detaches=True))


def _leave_with(run: Run) -> NoReturn:
    raise typer.Exit(Exit.NODE_LOST if run.status.state is RunState.LOST else run.status.exit_status or 0)


def ended_words(run: Run, lead: str = ":") -> str:
    """Describe how a run ended."""
    status = run.status
    text = f"{run.id}{lead} {status.state.value}"
    if status.exit_status:
        text += f", exit status {status.exit_status}"
    logs = f"; logs: {run.directory}" if os.path.isdir(run.directory) else ""
    return f"{text}{f': {status.why}' if status.why else ''}{logs}"


def ago_s(option: str, text: str, example: str) -> float:
    """Return the seconds in the value of an option. Raises `UsageError`."""
    seconds = seconds_in(text)
    if seconds is None:
        units = ", ".join(UNITS_S)
        raise UsageError(f'{option}: expected a duration such as "{example}" (units: {units}), got {text!r}')
    return seconds
