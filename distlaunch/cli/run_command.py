"""`run`: what its command line asks for, and doing that.

The usual command lines are read here: Typer, which reads all others, and refuses what makes no sense, takes
a third of a short job's time to import.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distlaunch.agent.frozen import Frozen
from distlaunch.cli.stderr import say
from distlaunch.errors import DistlaunchError, UsageError

if TYPE_CHECKING:
    from distlaunch.transports.link import Link


class RunOptions(Frozen):
    """What is asked for: the job file, the script's arguments, `key=value` overrides, and how."""

    job: str
    args: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    quiet: bool = False
    as_json: bool = False
    detach: bool = False
    fold: bool = False
    view: bool = False
    on: str | None = None


FLAGS = {
    **dict.fromkeys(("--quiet", "-q"), "quiet"),
    **dict.fromkeys(("--detach", "-d"), "detach"),
    "--json": "as_json",
    "--fold": "fold",
    "--view": "view",
}
"""The options without a value, and the field of each."""
SET = "--set"


def plain_options(words: Sequence[str]) -> RunOptions | None:
    """The options in the words after `run`; None where Typer is to understand them, or to refuse them."""
    dashes = words.index("--") if "--" in words else len(words)
    jobs: list[str] = []
    overrides: list[str] = []
    asked: dict[str, Any] = {}
    rest = iter(words[:dashes])
    for word in rest:
        if word in FLAGS:
            asked[FLAGS[word]] = True
        elif word == SET:
            overrides.append(next(rest, ""))
        elif word.startswith("-") and word != "-":
            return None
        else:
            jobs.append(word)
    if len(jobs) != 1 or not all("=" in text for text in overrides):
        return None
    return RunOptions(jobs[0], tuple(words[dashes + 1 :]), tuple(overrides), **asked)


def run_plain(words: Sequence[str], early: "Link | None") -> int | None:
    """Run a usual command line; the exit status, or None for one that is Typer's."""
    options = plain_options(words)
    if options is None:
        return None
    try:
        return run_with(options, early)
    except DistlaunchError as error:
        say(str(error))
        return error.exit_status


def run_with(options: RunOptions, early: "Link | None") -> int:
    """Run the job; the exit status. `early` is an agent opened ahead. Raises `DistlaunchError`."""
    from distlaunch.system.job_file import load_job

    _check(options)
    settings = [*options.overrides, *(["logs.fold=true"] if options.fold else [])]
    spec = load_job(options.job, settings, options.args)
    if options.on is not None:
        from distlaunch.cli.on_host import run_on

        return run_on(options.on, options.job, spec, settings, options.args, options.detach)
    if options.detach:
        from distlaunch.cli.leaving import run_detached

        return run_detached(spec, options.quiet)
    from distlaunch.cli.output import print_json  # now: a run ends with the code that it began with
    from distlaunch.cli.running import run_shown

    fd = 2 if options.as_json else 1
    summary = run_shown(spec, early, output_fd=fd, quiet=options.quiet, view=options.view)
    if options.as_json:
        print_json(summary.document())
    return summary.state.outcome


def _check(options: RunOptions) -> None:
    """Whether they go together. Raises `UsageError`."""
    leaves = options.detach or options.on is not None
    if options.view and leaves:
        raise UsageError("--view can't be combined with --detach or --on; use `distlaunch view` once it runs")
    if options.view and options.as_json:
        raise UsageError("--view can't be combined with --json")
    if options.view and not sys.stdout.isatty():
        raise UsageError("--view needs a terminal as stdout")
    if leaves and options.as_json:
        raise UsageError(
            "--json can't be combined with --detach or --on; `distlaunch wait --json RUN` prints the outcome"
        )
