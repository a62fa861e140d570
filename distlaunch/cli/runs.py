"""Commands for runs that were started before: ps, logs, attach, wait, stop, prune."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from distlaunch.cli.output import print_json, print_text
from distlaunch.cli.stderr import say
from distlaunch.errors import UsageError

if TYPE_CHECKING:
    from distlaunch.runs.folder import Run
    from distlaunch.runs.submissions import Submission
    from distlaunch.system.signals import Interrupts

runs = typer.Typer()

Which = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help="A run's id or a unique prefix of it, a job's name (its latest run), a run folder, or a Slurm "
        "job's id; HOST:RUN for a run on another host. Default: the latest run below the current folder.",
        show_default=False,
    ),
]
Fold = Annotated[
    bool, typer.Option("--fold", help="Show a line that several ranks print at the same time only once.")
]
SshConfig = Annotated[
    str | None,
    typer.Option(
        "--ssh-config", metavar="FILE", help="The ssh_config file to reach HOST with, as with ssh -F."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@runs.command("ps")
def ps(
    context: typer.Context,
    places: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FOLDER|RUN]…",
            help="List only these runs, or those in these folders and in their `runs` subfolders; HOST: "
            "lists another host's.",
        ),
    ] = None,
    ended: Annotated[bool, typer.Option("--all", "-a", help="Include runs that have ended.")] = False,
    most: Annotated[
        int | None,
        typer.Option("--number", "-n", metavar="N", min=0, help="Show only the N latest runs."),
    ] = None,
    as_json: Json = False,
    ssh_config: SshConfig = None,
) -> None:
    """List active runs: state, ranks, restarts, age, nodes."""
    for place in places or ():
        _elsewhere(context, place, ssh_config)
    from distlaunch.runs.listing import document, table
    from distlaunch.runs.listing import runs as runs_in

    ended = ended or most is not None
    found = runs_in(places or (), ended, most)
    if as_json:
        print_json([document(run) for run in found])
    elif found:
        import shutil

        print_text(table(found, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    else:
        say("no runs" if ended else "no active runs; `distlaunch ps -a` also lists those that have ended")


@runs.command("logs")
def logs(
    context: typer.Context,
    which: Which = None,
    ranks: Annotated[
        str | None,
        typer.Option("--rank", "-r", metavar="0,3-5", help="Only these ranks."),
    ] = None,
    goes_on: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Keep printing new output until the run ends."),
    ] = False,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="DURATION",
            help="Only output of the last DURATION, e.g. 30s, 10m, 1h30m.",
            show_default=False,
        ),
    ] = None,
    most: Annotated[
        int | None,
        typer.Option("--lines", "-n", metavar="N", min=0, max=10**9, help="Print only the last N lines."),
    ] = None,
    stderr: Annotated[bool, typer.Option("--stderr", help="Only stderr.")] = False,
    grep: Annotated[
        str | None,
        typer.Option("--grep", metavar="REGEX", help="Only lines that match REGEX (Python syntax)."),
    ] = None,
    fold: Fold = False,
    ssh_config: SshConfig = None,
) -> None:
    """Print the output of a run's ranks, across restarts, in the order it arrived."""
    _elsewhere(context, which, ssh_config)
    from distlaunch.cli.log_lines import choice_of, print_logs
    from distlaunch.runs.queued_following import run_of

    choice = choice_of(ranks, stderr, since, grep)
    if not goes_on:
        print_logs(run_of(which), choice, most, fold)
        return
    from distlaunch.cli.following import ended_words, follow_each

    run, signum = follow_each(which, lambda run, told: print_logs(run, choice, most, fold, told))
    if run.alive:
        raise typer.Exit(128 + signum)
    if run.status.exit_status or run.status.why:
        say(ended_words(run))


@runs.command("attach")
def attach(
    context: typer.Context,
    which: Which = None,
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="Start from the beginning of the run.")
    ] = False,
    fold: Fold = False,
    ssh_config: SshConfig = None,
) -> None:
    """Show what `run` would show of a run, from now on; Ctrl-C detaches without stopping it."""
    _elsewhere(context, which, ssh_config)
    from distlaunch.cli.following import follow_each, leave_alone, leave_with, say_over
    from distlaunch.observers.terminal import Terminal
    from distlaunch.runs.attending import attend

    def shown(run: "Run", interrupts: "Interrupts") -> "Run":
        if run.alive or everything:
            return attend(run, Terminal(interrupts, fold=fold, waits=True), interrupts, everything)
        say_over(run)
        return run

    run, signum = follow_each(which, shown)
    leave_alone(run, signum)
    leave_with(run)


@runs.command("view")
def view(context: typer.Context, which: Which = None, ssh_config: SshConfig = None) -> None:
    """Watch a run full-screen: its ranks, which stand out, and their output; q quits without stopping it."""
    _elsewhere(context, which, ssh_config, terminal=True)
    from distlaunch.cli.following import follow_each, leave_alone, leave_with, say_over
    from distlaunch.view.watching import watch

    def shown(run: "Run", interrupts: "Interrupts") -> "Run":
        if not sys.stdout.isatty():
            raise UsageError("view needs a terminal as stdout; use `distlaunch attach` instead")
        if run.alive:
            return watch(run, interrupts)
        say_over(run)
        return run

    run, signum = follow_each(which, shown)
    leave_alone(run, signum)
    leave_with(run)


@runs.command("wait")
def wait(
    context: typer.Context, which: Which = None, as_json: Json = False, ssh_config: SshConfig = None
) -> None:
    """Wait until a run ends, and exit with its exit status."""
    _elsewhere(context, which, ssh_config)
    from distlaunch.cli.following import ended_words, follow_each, leave_with
    from distlaunch.runs.attending import wait as wait_for

    run, signum = follow_each(which, wait_for)
    if run.alive:
        raise typer.Exit(128 + signum)
    if as_json:
        _print_document(run)
    elif run.status.exit_status:  # of one that is lost it is said anyway
        say(ended_words(run))
    leave_with(run)


@runs.command("stop")
def stop(
    context: typer.Context,
    which: Which = None,
    now: Annotated[
        bool,
        typer.Option("--now", help="Kill the ranks now instead of giving them timeouts.stop to exit."),
    ] = False,
    as_json: Json = False,
    ssh_config: SshConfig = None,
) -> None:
    """Stop a run, or cancel a queued job, and wait for its end. As with Ctrl-C, a second stop kills."""
    _elsewhere(context, which, ssh_config)
    from distlaunch.cli.following import ended_words
    from distlaunch.runs.attending import over
    from distlaunch.runs.attending import wait as wait_for
    from distlaunch.runs.find import find
    from distlaunch.runs.stopping import interrupt
    from distlaunch.runs.submissions import submission, submission_of
    from distlaunch.system.signals import Signals

    queued = submission(which)
    run = None if queued else find(which, alone=True)
    if run and run.alive and (known := submission_of(run)) and known.warned:
        queued = known
    if queued:
        _stop_queued(queued, now, as_json)
        return
    assert run is not None
    if run.host and not run.status.state.over:  # its folder is shared, its controller is there
        say(f"the controller of {run.id} is on {run.host}: stopping it there over ssh")
        _elsewhere(context, f"{run.host}:{run.folder}", ssh_config, which)
    if which is None and run.alive:
        say(f"stopping {run.id} ({run.folder})")
    with Signals() as signals:
        stopped = interrupt(run, now)
        run = wait_for(run, signals) if stopped else over(run)
        if run.alive:
            say(f"{run.id} is still stopping; `distlaunch wait {run.id}` waits until it has ended")
            raise typer.Exit(128 + signals.received_last)
    if as_json:
        _print_document(run)
    else:
        say(ended_words(run, ":" if stopped else " had already ended:"))


def _stop_queued(queued: "Submission", now: bool, as_json: bool) -> None:
    from distlaunch.cli.following import ended_words
    from distlaunch.runs.queued_following import stop_queued
    from distlaunch.system.signals import Signals

    with Signals() as signals:
        run, stopped = stop_queued(queued, now, signals)
    if signals.received_last:
        say(f"{queued.name} is still stopping; `distlaunch wait {queued.id}` waits until it has ended")
        raise typer.Exit(128 + signals.received_last)
    if as_json:
        from distlaunch.runs.submissions import as_run
        from distlaunch.state.status import RunState

        _print_document(run or as_run(queued, RunState.CANCELLED, "cancelled"))
    elif run is None:
        say(f"{queued.name}: {'cancelled before it started' if stopped else 'had already ended'}")
    else:
        say(ended_words(run, ":" if stopped else " had already ended:"))


@runs.command("prune")
def prune(
    places: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FOLDER]…", help="Look only in these folders and their `runs`."),
    ] = None,
    older: Annotated[
        str | None,
        typer.Option(
            "--older", metavar="DURATION", help="Delete runs that ended longer ago than this, e.g. 30d."
        ),
    ] = None,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="List what would be deleted; delete nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Delete the folders of your old runs."""
    from distlaunch.cli.pruning import prune_runs

    raise typer.Exit(prune_runs(places or (), older, dry, as_json))


def _elsewhere(
    context: typer.Context,
    word: str | None,
    ssh_config: str | None,
    typed: str | None = None,
    terminal: bool = False,
) -> None:
    """Run this command on the host that `word` names, if it names one, and leave with its status.

    The command line has `typed` in its place, if that is given.
    """
    if word is None or ":" not in word:
        return
    from distlaunch.cli.elsewhere import Request, run_there, show_there, split, ssh_to, with_rest

    if there := split(word):
        host, rest = there
        words = with_rest(context.obj.words, typed or word, rest)
        ssh = ssh_to(host, ssh_config)
        raise typer.Exit(show_there(ssh, words) if terminal else run_there(ssh, Request(words)))


def _print_document(run: "Run") -> None:
    from distlaunch.runs.listing import document

    print_json(document(run))
