"""`run`, and everything else that runs a job: in the foreground, detached, or with other launchers.

Common command lines are parsed here, because importing Typer takes a third of the time of a short job. Typer
parses the rest and rejects mistakes.
"""

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from distlaunch.agent.frozen import Frozen
from distlaunch.cli.output import UnwritableError, print_json, print_run, say  # early: kept to the end
from distlaunch.errors import DistlaunchError, Exit, UsageError
from distlaunch.job.spec import JobSpec
from distlaunch.launch.start import Start, in_rank, start_run
from distlaunch.observers.run_list import index_path, is_listed
from distlaunch.schedulers import MPI_SIZES, step_size, step_title, task_number
from distlaunch.signals import Interrupts, Signals

if TYPE_CHECKING:
    from distlaunch.cli.job_file import Typed
    from distlaunch.supervisor.summary import Summary
    from distlaunch.transports.gathering import Gathering


class RunOptions(Frozen):
    """The options of `run`: the job file, arguments, `key=value` overrides, the mode, and a `typed` job."""

    job: str | None
    args: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    quiet: bool = False
    as_json: bool = False
    detach: bool = False
    view: bool = False
    on: str | None = None
    typed: "Typed | None" = None


FLAGS = {
    **dict.fromkeys(("--quiet", "-q"), "quiet"),
    **dict.fromkeys(("--detach", "-d"), "detach"),
    "--json": "as_json",
    "--fold": "fold",
    "--view": "view",
    "--no-check": "unchecked",
    "--no-sync": "unsynced",
}
"""Options without a value, each with its field or shorthand."""
SHORTHANDS = {"fold": "logs.fold=true", "unchecked": "checks.skip=all", "unsynced": "sync=false"}
"""Options that stand for a setting of the job file."""
SET = "--set"


def settings_of(overrides: Sequence[str] | None, **chosen: bool) -> tuple[str, ...]:
    """Return the --set values, followed by the settings of the `chosen` shorthands."""
    return (*(overrides or ()), *(SHORTHANDS[name] for name, wanted in chosen.items() if wanted))


def plain_options(words: Sequence[str]) -> RunOptions | None:
    """Parse the words after `run`; return None if Typer must parse or reject them."""
    dashes = words.index("--") if "--" in words else len(words)
    jobs: list[str] = []
    overrides: list[str] = []
    flags: dict[str, Any] = {}
    rest = iter(words[:dashes])
    for word in rest:
        if word in FLAGS:
            flags[FLAGS[word]] = True
        elif word == SET:
            overrides.append(next(rest, ""))
        elif word.startswith("-") and word != "-":
            return None
        else:
            jobs.append(word)
    if len(jobs) != 1 or not all("=" in text for text in overrides):
        return None
    chosen = {name: flags.pop(name) for name in SHORTHANDS if name in flags}
    return RunOptions(jobs[0], tuple(words[dashes + 1 :]), settings_of(overrides, **chosen), **flags)


def run_with(options: RunOptions) -> int:
    """Run the job; return its exit status. Raises `DistlaunchError`."""
    _check(options)
    try:
        return _run(options)
    except DistlaunchError as error:
        if options.as_json:
            from distlaunch.supervisor.summary import unstarted

            print_json(unstarted(str(error), error.exit_status))
        raise


def _run(options: RunOptions) -> int:
    """Run the job in the foreground, in the background, or with its controller on another host."""
    # torchrun doesn't need YAML, which this imports
    from distlaunch.cli.job_file import check_not_simulated, load_job, with_code

    refuse_copy(os.environ)
    spec = load_job(options.job, options.overrides, options.args, options.typed)
    if spec.stdin != "none" and (options.view or options.on or (options.detach and os.isatty(0))):
        what = "`stdin: rank 0` can't be combined with --view or --on, or on a terminal with --detach"
        raise UsageError(f"{what}; if the job needs no input, add --set stdin=none")
    if options.on is not None:
        if spec.sync.tree:
            keys = ["setup"] * bool(spec.setup) + ["files"] * bool(spec.sync.files)
            without = " ".join(["--no-sync", *(f"--set {key}=null" for key in keys)])
            there = f"otherwise, log in to {options.on} and use `distlaunch run -d` there"
            hint = f"if the nodes have the code, use {without}; {there}"
            raise spec.error("sync", f"can't be combined with --on; {hint}")
        check_not_simulated(spec, options.on)
        from distlaunch.cli.remote import run_on

        typed = (("-H", options.typed.hosts), ("-n", options.typed.ranks)) if options.typed else ()
        words = [word for name, value in typed if value is not None for word in (name, str(value))]
        job, overrides, args = options.job or "", options.overrides, options.args
        return run_on(options.on, job, spec, words, overrides, args, options.detach)
    check_not_simulated(spec)
    spec = with_code(spec)
    if options.detach:
        return run_detached(spec, options.quiet)
    fd = 2 if options.as_json else 1
    summary = run_shown(spec, output_fd=fd, quiet=options.quiet, view=options.view)
    outcome = summary.state.outcome
    if options.as_json:
        try:
            print_json(summary.document())
        except UnwritableError as error:
            status = f"the job ended with status {int(outcome)}"
            say(f"{error}; {status}; its result is in {summary.directory}/summary.json")
            return outcome or Exit.FAILED
    return outcome


def refuse_copy(environ: Mapping[str, str]) -> None:
    """Raise `UsageError` in all tasks of a step, or of mpirun, except the first, which runs the job."""
    scheduler, _, tasks = step_size(environ)
    copies = next((int(size) for name in MPI_SIZES if (size := environ.get(name, "")).isdecimal()), 1)
    if max(tasks, copies) > 1 and task_number(environ):
        has = f"this {step_title(scheduler)} has {tasks}" if tasks > 1 else f"mpirun started {copies}"
        advice = "start `distlaunch run` once; for one rank per task, use `distlaunch exec`"
        advice += "; for independent jobs, start each in its own step" if tasks > 1 else ""
        raise UsageError(f"{has} tasks, of which only the first runs the job: {advice}")


def _check(options: RunOptions) -> None:
    """Raise `UsageError` for options that can't be combined."""
    in_background = options.detach or options.on is not None
    if options.view and in_background:
        raise UsageError(
            "--view can't be combined with --detach or --on; use `distlaunch view RUN` once it runs"
        )
    if options.view and (options.as_json or options.quiet):
        raise UsageError("--view can't be combined with --json or --quiet")
    if options.view and not sys.stdout.isatty():
        raise UsageError("--view works only if stdout is a terminal")
    if options.quiet and options.on is not None:
        raise UsageError("--quiet can't be combined with --on")
    if in_background and options.as_json:
        raise UsageError("--json can't be combined with --detach or --on; use `distlaunch wait --json RUN`")


def run_shown(spec: JobSpec, *, output_fd: int = 1, quiet: bool = False, view: bool = False) -> "Summary":
    """Run `spec` and show the run; with `view`, full-screen. The ranks' output goes to `output_fd`.

    Raises `DistlaunchError`.
    """
    with Signals(spec.invocation.signals) as signals:  # from here on, Ctrl-C reaches a supervisor
        start = start_run(spec)
        return _supervised(start, signals, "view" if view else "terminal", output_fd, quiet)


def run_gathered(spec: JobSpec, gathering: "Gathering") -> int:
    """Run this node's part of a job with several launchers; return the exit status of the whole job.

    Raises `DistlaunchError`.
    """
    from distlaunch.launch.gather import Gathered, gather
    from distlaunch.launch.join import blocked

    with Signals(spec.invocation.signals) as signals:
        gathered = gather(spec, gathering, signals, say)
        if isinstance(gathered, Gathered):
            try:
                start = start_run(gathered.spec, listener=gathered.listener)
            except DistlaunchError as error:
                why = f"the controller can't start the run: {error}"
                gathered.listener.dismiss(why, error.exit_status)
                raise
            return _supervised(start, signals, quiet=True).state.outcome
        blocked(signals.watched)
    from distlaunch.launch.joined_agent import serve
    from distlaunch.launch.joined_ranks import OwnRanks

    return serve(gathered, OwnRanks(spec), signals.watched)


def _supervised(
    start: Start,
    interrupts: Interrupts,
    how: Literal["terminal", "detached", "view"] = "terminal",
    output_fd: int = 1,
    quiet: bool = False,
    ready_fd: int = -1,
) -> "Summary":
    """Run a job that has been started; the other parameters are the fields of `Shown`."""
    from distlaunch.launch.controller import ask_for_another, supervise  # takes 10 ms, in which agents boot
    from distlaunch.observers.observer import Shown

    gc.freeze()  # GC was off so far: imported objects stay, but a long run's may not
    gc.enable()
    summary = supervise(start, Shown(interrupts, how, output_fd, quiet, ready_fd))
    ask_for_another(summary.state, say, interrupts)  # last, as it may end this process
    return summary


def run_detached(spec: JobSpec, quiet: bool = False) -> int:
    """Run `spec` with a controller, in its own session, that outlives the terminal and this process.

    Once all ranks have started, print only the ID of the run on stdout and return 0. If the run ends earlier,
    return its exit status. Meanwhile, signals are forwarded to the controller.
    """
    os.getcwd()  # if it no longer exists, `main` reports that; the fork can't
    read, write = os.pipe()
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
    signal.pthread_sigmask(signal.SIG_BLOCK, stops)  # until they can be forwarded
    controller = os.fork()
    if controller == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stops)
        os.close(read)
        os._exit(_control(spec, quiet, write))
    os.close(write)

    def pass_on(signum: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(controller, signum)

    for signum in stops:
        signal.signal(signum, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stops)
    with os.fdopen(read) as pipe:
        run = pipe.read()
    if not run:
        status = os.waitstatus_to_exitcode(os.waitpid(controller, 0)[1])
        return status if status >= 0 else 128 - status
    print_run(run)
    if not is_listed(run):
        where = f"find it by its run directory, in {os.path.abspath(spec.logs.directory)}"
        say(f"can't add {run} to the list of runs, {index_path()}; {where}")
    if in_rank():
        wait = f"`distlaunch wait {run}` in the rank waits until it has ended"
        say(f"a rank started {run}, which will be killed when that rank exits; {wait}")
    elif sys.stderr.isatty() and not quiet:
        say(f"running in the background; follow it with `distlaunch attach {run}`")
    return Exit.OK


def _control(spec: JobSpec, quiet: bool, ready_fd: int) -> int:
    """Act as the controller. Return the run's exit status. Never raise: that would unwind the fork.

    Once all ranks have started, write the ID of the run to `ready_fd`.
    """
    try:
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as with nohup
        with Signals(spec.invocation.signals) as signals:
            return _supervised(start_run(spec), signals, "detached", 2, quiet, ready_fd).state.outcome
    except DistlaunchError as error:
        say(str(error))
        return error.exit_status
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return Exit.INTERNAL
