"""Notifies `notify.command` of restarts, stalls and the end of a run, by sending JSON to its stdin."""

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import time
from typing import Any

from distlaunch.errors import reason
from distlaunch.observers.observer import Observed, Observer
from distlaunch.observers.outlet import LOOK_S, Backlog
from distlaunch.supervisor.events import Event, TimerDue
from distlaunch.supervisor.state import Phase, State, Timer
from distlaunch.supervisor.status import RunState, run_state
from distlaunch.supervisor.summary import Summary
from distlaunch.wording import exit_words, listed

LIMIT_S = 30.0
"""Seconds after which a command is killed."""
LAST_S = 10.0
"""Seconds to wait for the last commands at the end of a run, half of them for the final event's command."""
KILL_S = 1.0
"""Seconds to wait for the end of a command that has been killed."""
SETTLE_S = 0.5
"""Seconds after a rank has ended during which its last output may arrive."""
_NO_MORE = "later failures are not reported"


def start_error(program: str) -> str | None:
    """Return why this machine can't start a program, given by path or by its name in PATH; None if it can.

    Called before a run begins.
    """
    if "/" not in program:
        return None if shutil.which(program) else f"{program}: not found in PATH"
    if os.path.isdir(program):
        return f"{program}: is a directory"
    if os.path.exists(program):
        return None if os.access(program, os.X_OK) else f"{program}: not executable"
    return f"{program}: {os.strerror(errno.ENOENT)}"


class Notifier(Observer):
    """The observer that runs the command for each requested event, in a thread, without delaying the run.

    `Observer` describes when each method is called.
    """

    def __init__(self, run: Observed) -> None:
        self._job, self._wish, self._summary = run.spec.name, run.spec.notify, run.summary
        self._run_id, self._directory = run.run_id, run.directory.path
        self._restarts = 0
        self._restarted: State | None = None
        self._backlog = Backlog[tuple[str, bytes]]("notifier", self._send)
        self._process: subprocess.Popen[bytes] | None = None
        self._sending: list[str] = []
        """The event whose command is running."""
        self._limit_s = LIMIT_S
        self._failed = ""
        self._failure_shown = False

    def happened(self, event: Event, state: State, at: float) -> None:
        """Report restarts and stalls."""
        if len(state.restarts) > self._restarts:
            self._restarts = len(state.restarts)
            self.woken()
            self._restarted, self.wake_at = state, time.monotonic() + SETTLE_S
        if self._restarted and state.phase is not Phase.RESTARTING:
            self.woken()
        # Each node reports its own stalled ranks. The timer expires once a stall has spread to all of them.
        if isinstance(event, TimerDue) and event.timer is Timer.STALL_MESSAGE and state.plan:
            ranks = [worker.rank for worker in state.workers if worker.stalled and worker.going]
            nodes = [*dict.fromkeys(state.plan.node_of(rank).label for rank in ranks)]
            if ranks:  # else they have finished
                self._tell("stalled", state, {"ranks_stalled": ranks, "nodes": nodes})
        self._say_failure()

    def woken(self) -> None:
        """Report a delayed restart. The delay lets a rank's last output arrive after the rank has ended."""
        state, self._restarted, self.wake_at = self._restarted, None, None
        if state:
            last = state.restarts[-1]
            known = self._summary(state, self._directory, last.at)
            self._tell("restarted", state, {"why": last.why.value, "cause": known.cause_document(last.cause)})

    def ended(self, summary: Summary) -> None:
        """Report the end, and wait briefly for the last commands."""
        self.woken()
        state, document = summary.state, summary.document()
        facts = {name: document[name] for name in ("exit_status", "cause", "hint", "seconds")}
        occasion = "failed" if state.cause and not state.cause.cancelled else "finished"
        over_at = time.monotonic() + LAST_S
        left = self._finish(over_at - LAST_S / 2) if occasion in self._wish.on else []
        self._limit_s = LIMIT_S
        self._tell(occasion, state, facts)
        left += self._finish(over_at)
        self._backlog.end()
        if left:
            self._failed = f"notify.command: {self._wish.command[0]} took too long at the end of the run"
            self._failed += f" and was killed; not delivered: {listed(left)}"
            self._failure_shown = False
        self._say_failure()

    def _finish(self, until: float) -> list[str]:
        """Wait for the commands until a monotonic time. Then kill the running one; return the lost events."""
        if self._backlog.drain(LOOK_S, lambda quiet_s: time.monotonic() < until):
            return []
        with self._backlog.changed:
            left = [*self._sending, *(occasion for occasion, _ in self._backlog.queue)]
            self._sending = []
            self._backlog.written(len(self._backlog.queue))
            self._backlog.queue.clear()
        self._limit_s = 0.0  # it may just have been started
        self._kill()
        self._backlog.drain(LOOK_S, lambda quiet_s: quiet_s < KILL_S)
        return left

    def _tell(self, occasion: str, state: State, facts: dict[str, Any]) -> None:
        """Queue the facts for the command, if the job requests notifications of such events."""
        if occasion not in self._wish.on:
            return
        about = {
            "event": occasion,
            "run": self._run_id,
            "job": self._job,
            "state": (RunState.RUNNING if occasion == "stalled" else run_state(state)).value,
            "ranks": len(state.workers),
            "restarts": len(state.restarts),
            "host": os.uname().nodename,
            "directory": self._directory,
        }
        with self._backlog.changed:
            self._backlog.add((occasion, json.dumps({**about, **facts}).encode() + b"\n"), 1)

    def _say_failure(self) -> None:
        """Report the first failure of the command, in the thread that runs the job."""
        if self._failed and not self._failure_shown:
            self._failure_shown = True
            self.remark(self._failed)

    # In the thread

    def _send(self) -> None:
        with self._backlog.changed:
            occasion, facts = self._backlog.queue.popleft()
            self._sending = [occasion]
        error = self._call(facts)
        self._failed = self._failed or error
        with self._backlog.changed:
            self._sending = []
            self._backlog.written(1)

    def _call(self, facts: bytes) -> str:
        """Run the command; return what went wrong, or ""."""
        name = self._wish.command[0]
        try:
            self._process = subprocess.Popen(
                self._wish.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            return f"notify.command: can't start {name}: {reason(error)}; {_NO_MORE}"
        try:
            self._process.communicate(facts, self._limit_s)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()
            return f"notify.command: {name} took longer than {LIMIT_S:g} s and was killed; {_NO_MORE}"
        status = self._process.returncode
        was = "was " if status < 0 else ""
        return f"notify.command: {name} {was}{exit_words(status)}; {_NO_MORE}" if status else ""

    def _kill(self) -> None:
        """Kill the command and the processes it has started."""
        process = self._process
        if process and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
