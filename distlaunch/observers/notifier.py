"""Notifies `notify.command` of restarts, stalls and the end of a run, by sending JSON to its stdin."""

import contextlib
import errno
import json
import os
import queue
import shutil
import signal
import subprocess
import threading
import time
from typing import Any

from distlaunch.agent.messages import RanksStalled
from distlaunch.errors import reason
from distlaunch.observers.observer import Observed, Observer
from distlaunch.supervisor.events import Event
from distlaunch.supervisor.state import Phase, State
from distlaunch.supervisor.status import RunState, run_state
from distlaunch.supervisor.summary import Summary
from distlaunch.wording import exit_words, listed

LIMIT_S = 30.0
"""Seconds after which a command is killed."""
LAST_S = 10.0
"""Seconds to wait for the last commands at the end of a run."""
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
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="notifier")
        self._process: subprocess.Popen[bytes] | None = None
        self._pending: list[str] = []
        """The events whose command is waiting or running, oldest first."""
        self._failed, self._over = "", False
        self._failure_shown = False

    def happened(self, event: Event, state: State, at: float) -> None:
        """Report restarts and stalls."""
        if len(state.restarts) > self._restarts:
            self._restarts = len(state.restarts)
            self.woken()
            self._restarted, self.wake_at = state, time.monotonic() + SETTLE_S
        if self._restarted and state.phase is not Phase.RESTARTING:
            self.woken()
        if isinstance(event, RanksStalled) and event.local_ranks:
            ranks = [state.rank_of(event.node, local) for local in event.local_ranks]
            node = state.label(event.node)
            self._tell("stalled", state, {"ranks_stalled": ranks, "node": node})
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
        self._tell("failed" if state.cause and not state.cause.cancelled else "finished", state, facts)
        if self._thread.ident:
            self._waiting.put(None)
            self._thread.join(LAST_S)
            self._over = True
            if self._pending:
                what = f"{self._wish.command[0]} was killed {LAST_S:g} s after the end of the run"
                self._failed = f"notify.command: {what}; not delivered: {listed(self._pending)}"
                self._failure_shown = False
            self._end()
        self._say_failure()

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
        if not self._thread.ident:
            self._thread.start()
        self._pending.append(occasion)
        self._waiting.put(json.dumps({**about, **facts}).encode() + b"\n")

    def _say_failure(self) -> None:
        """Report the first failure of the command, in the thread that runs the job."""
        if self._failed and not self._failure_shown:
            self._failure_shown = True
            self.remark(self._failed)

    # In the thread

    def _run(self) -> None:
        while (facts := self._waiting.get()) is not None and not self._over:
            error = self._call(facts)
            self._failed = self._failed or error
            del self._pending[0]

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
            self._process.communicate(facts, 0 if self._over else LIMIT_S)  # it may just have been started
        except subprocess.TimeoutExpired:
            self._end()
            return f"notify.command: {name} took longer than {LIMIT_S:g} s and was killed; {_NO_MORE}"
        status = self._process.returncode
        was = "was " if status < 0 else ""
        return f"notify.command: {name} {was}{exit_words(status)}; {_NO_MORE}" if status else ""

    def _end(self) -> None:
        """Kill the command and the processes it has started."""
        process = self._process
        if process and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
