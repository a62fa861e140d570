"""The controller of a job run by a Python program, as the program's child process: see `distlaunch.api`.

The first line on stdin is a JSON request with the arguments of `load_job`. The answers, on stdout, are a line
with the run and its directory, and another once all ranks are running; or a line with the error. When stdin
is closed, the program is gone, and the job is stopped, unless the line DETACH came first. A separate process
keeps the heartbeats going whatever the program does, and doesn't affect the program's signals, descriptors
and threads.
"""

import contextlib
import gc
import json
import os
import select
import signal
import sys
import threading
from importlib.resources import files
from typing import Any

from distlaunch.cli.job_file import Typed, check_not_simulated, load_job, with_code
from distlaunch.cli.output import fill_standard_descriptors, say
from distlaunch.cli.run import refuse_copy
from distlaunch.errors import DistlaunchError, Exit
from distlaunch.job.spec import JobSpec
from distlaunch.launch.controller import ask_for_another, supervise
from distlaunch.launch.start import start_run
from distlaunch.observers.observer import Observer, Shown
from distlaunch.observers.run_directory import CONTROLLER_LOG
from distlaunch.signals import Signals
from distlaunch.supervisor.events import Event
from distlaunch.supervisor.nodes import WorkerPhase
from distlaunch.supervisor.state import Phase, State

DETACH = b"detach\n"
LOOK_S = 1.0
"""Seconds between two looks for the program."""


class Announcer(Observer):
    """The observer that notifies the program once all ranks are running."""

    announced = False

    def happened(self, event: Event, state: State, at: float) -> None:
        """Announce that the start can no longer fail."""
        waits = any(worker.phase is WorkerPhase.PLANNED for worker in state.workers)
        if not self.announced and state.phase is Phase.RUNNING and not waits:
            self.announced = True
            answer(running=True)


def answer(**fields: Any) -> None:
    """Print an answer."""
    with contextlib.suppress(OSError):  # the program is gone, or no longer waits for an answer
        os.write(1, json.dumps(fields).encode() + b"\n")


def main() -> int:
    """Run the requested job. Return its exit status."""
    request = json.loads(sys.stdin.buffer.readline())
    with Signals() as signals:
        try:
            typed = Typed(request["module"])
            refuse_copy(os.environ)
            spec = load_job(request["path"], request["overrides"], request["args"], typed)
            check_not_simulated(spec)
            if spec.stdin != "none":
                raise spec.error("stdin", "a job started with the Python API has no stdin; remove the key")
            spec = with_code(spec)
            start = start_run(_calling(spec, request["call"]) if "call" in request else spec)
        except DistlaunchError as error:
            answer(error=str(error))
            return error.exit_status
        answer(run=start.run_id, directory=start.directory.path)
        # Stderr may be a pipe that is closed before the run ends.
        log = os.path.join(start.directory.path, CONTROLLER_LOG)
        with contextlib.suppress(OSError), open(log, "ab", buffering=0) as errors:
            os.dup2(errors.fileno(), 2)
        threading.Thread(target=_watch_program, args=(signals, request["program"]), daemon=True).start()
        gc.freeze()  # imported objects are never garbage
        summary = supervise(start, Shown(signals), [Announcer()])
        ask_for_another(summary.state, say, signals)
    return int(summary.state.outcome)


def _calling(spec: JobSpec, packed: list[str]) -> JobSpec:
    """Return a job whose ranks call a function.

    `packed` are the arguments of cli/function.py, from `api.call`.
    """
    source = files("distlaunch.cli").joinpath("function.py").read_text()
    program = spec.program._replace(kind="script", words=("-c", source, *packed), placed=False, args=())
    return spec._replace(program=program, invocation=spec.invocation._replace(placeholders=False))


def _watch_program(signals: Signals, program: int) -> None:
    """Stop the job when the program is gone, even if a process that it forked keeps stdin open."""
    alive, readable = True, list[int]()
    while alive and not readable:
        alive = os.getppid() == program  # before the look at stdin, on which its last words may be
        readable = select.select([0], [], [], LOOK_S)[0]
    words = b""
    with contextlib.suppress(OSError):
        words = sys.stdin.buffer.readline() if readable else b""
    if words != DETACH:
        signals.send(signal.SIGTERM)


def enter() -> None:
    """Run the requested job, and exit."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the program may ignore it
    try:
        fill_standard_descriptors()  # the program may have closed stderr
        status = main()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = Exit.INTERNAL
    os._exit(status)
