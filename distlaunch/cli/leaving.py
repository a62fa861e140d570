"""`run --detach`: the controller in a session of its own, which outlives the terminal and this command."""

import contextlib
import os
import signal
import sys

from distlaunch.cli.stderr import say
from distlaunch.errors import DistlaunchError, Exit
from distlaunch.job.spec import JobSpec
from distlaunch.launch.start import Start, start_run
from distlaunch.state.job import State
from distlaunch.system.signals import Signals


def run_detached(spec: JobSpec, quiet: bool = False) -> int:
    """Run `spec` without us; once all ranks have started, print the run's id alone on stdout.

    The exit status is 0 then, and the run's own where it ended before that. Signals are passed on meanwhile.
    """
    read, write = os.pipe()
    controller = os.fork()
    if controller == 0:
        os.close(read)
        os._exit(_control(spec, quiet, write))
    os.close(write)
    _pass_signals_on(controller)
    with os.fdopen(read) as pipe:
        run = pipe.read()
    if not run:
        return _status_of(controller)
    print(run, flush=True)
    if sys.stderr.isatty() and not quiet:
        say(f"running in the background; follow it with `distlaunch attach {run}`")
    return Exit.OK


def _pass_signals_on(controller: int) -> None:
    def pass_on(signum: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(controller, signum)

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(signum, pass_on)


def _status_of(controller: int) -> int:
    status = os.waitstatus_to_exitcode(os.waitpid(controller, 0)[1])
    return status if status >= 0 else 128 - status


def _control(spec: JobSpec, quiet: bool, ready: int) -> int:
    """Be the controller; the run's exit status. It must not return into what the command was doing."""
    try:
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup, so that it stays ignored
        with Signals(spec.invocation.signals) as signals:
            return _supervised(start_run(spec), signals, quiet, ready)
    except DistlaunchError as error:
        say(str(error))
        return error.exit_status
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return Exit.INTERNAL
    finally:
        sys.stderr.flush()


def _supervised(start: Start, signals: Signals, quiet: bool, ready: int) -> int:
    from distlaunch.launch.supervise import supervise  # while agents boot
    from distlaunch.observers.run_folder import CONTROLLER_LOG
    from distlaunch.observers.terminal import Departure, Terminal, silence

    def leave(state: State) -> None:
        silence(os.path.join(start.folder.path, CONTROLLER_LOG))
        with os.fdopen(ready, "w") as pipe:
            pipe.write(start.run_id)

    departure = Departure(Terminal(signals, 2, quiet), leave)
    return supervise(start, signals, [departure]).state.outcome
