"""Tells somebody what has become of a run: facts as JSON on the stdin of the job's `notify.command`."""

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

from distlaunch.errors import reason
from distlaunch.job.spec import JobSpec, Notify
from distlaunch.observers.last_words import LastWords, summary_so_far
from distlaunch.observers.observer import Observer
from distlaunch.supervisor.events import Event, RanksStalled
from distlaunch.supervisor.state import Phase, State
from distlaunch.supervisor.status import RunState, run_state
from distlaunch.supervisor.summary import Summary
from distlaunch.wording import exit_words

LIMIT_S = 30.0
"""A command that takes longer is killed."""
LAST_S = 10.0
"""At the end of a run its commands are waited for so long."""
SETTLE_S = 0.5
"""The last output of a rank may come so long after its end."""
MOST = 100
"""Commands that may wait for their turn; what is more is left out."""
_NO_MORE = "later failures are not reported"


def start_error(program: str) -> str | None:
    """Why a program, by its path or from PATH, can't be started here, or None."""
    if "/" not in program:
        return None if shutil.which(program) else f"{program}: not found in PATH"
    if not os.path.exists(program):
        return f"{program}: {os.strerror(errno.ENOENT)}"
    if os.path.isdir(program) or not os.access(program, os.X_OK):
        return f"{program}: {'a folder' if os.path.isdir(program) else 'not executable'}"
    return None


class Notifier(Observer):
    """Starts the command for each wanted occasion, one after another, in a thread: none holds the run up."""

    def __init__(self, wish: Notify, run_id: str, folder: str, words: LastWords) -> None:
        self._wish, self._run_id, self._folder, self._words = wish, run_id, folder, words
        self._spec: JobSpec | None = None
        self._restarts = 0
        self._restarted: State | None = None
        self._waiting: queue.Queue[bytes | None] = queue.Queue(MOST)
        self._thread = threading.Thread(target=self._run, daemon=True, name="notifier")
        self._process: subprocess.Popen[bytes] | None = None
        self._failed = ""
        self._said = False

    def began(self, spec: JobSpec, chance: float, at: float) -> None:
        """Remember the job."""
        self._spec = spec

    def happened(self, event: Event, state: State, at: float) -> None:
        """Notice restarts and stalls."""
        if len(state.restarts) > self._restarts:
            self._restarts = len(state.restarts)
            self._tell_restart()
            self._restarted, self.wake_at = state, time.monotonic() + SETTLE_S
        if self._restarted and state.phase is not Phase.RESTARTING:
            self._tell_restart()
        if isinstance(event, RanksStalled) and event.local_ranks:
            ranks = [state.rank_of(event.node, local) for local in event.local_ranks]
            node = state.label(event.node)
            self._tell("stalled", state, {"ranks_stalled": ranks, "node": node})
        self._say_failure()

    def woken(self) -> None:
        """What failed has said its last words."""
        self._tell_restart()

    def _tell_restart(self) -> None:
        """Tell of a restart that has waited: last words may come after the end of who said them."""
        state, self._restarted, self.wake_at = self._restarted, None, None
        if state:
            last = state.restarts[-1]
            known = summary_so_far(state, self._folder, self._words, last.at)
            self._tell("restarted", state, {"why": last.why.value, "cause": known.cause_document(last.cause)})

    def ended(self, summary: Summary) -> None:
        """The end; the last commands are waited for, a little."""
        self._tell_restart()
        state = summary.state
        document = summary.document()
        facts = {name: document[name] for name in ("exit_status", "cause", "hint", "seconds")}
        self._tell("failed" if state.cause else "finished", state, facts)
        if self._thread.ident:
            with contextlib.suppress(queue.Full):
                self._waiting.put_nowait(None)
            self._thread.join(LAST_S)
            self._end()
        self._say_failure()

    def _tell(self, occasion: str, state: State, facts: dict[str, Any]) -> None:
        if occasion not in self._wish.on:
            return
        shown = RunState.RUNNING if occasion == "stalled" else run_state(state)
        about = {
            "event": occasion,
            "run": self._run_id,
            "job": self._spec.name if self._spec else "",
            "state": shown.value,
            "ranks": len(state.workers),
            "restarts": len(state.restarts),
            "host": os.uname().nodename,
            "folder": self._folder,
        }
        if not self._thread.ident:
            self._thread.start()
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(json.dumps({**about, **facts}).encode() + b"\n")

    def _say_failure(self) -> None:
        """In the thread that runs the job, once for all."""
        if self._failed and not self._said:
            self._said = True
            self.remark(self._failed)

    # In the thread of its own

    def _run(self) -> None:
        while (facts := self._waiting.get()) is not None:
            self._failed = self._failed or self._call(facts)

    def _call(self, facts: bytes) -> str:
        """What went wrong, if anything did."""
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
            self._process.communicate(facts, LIMIT_S)
        except subprocess.TimeoutExpired:
            self._end()
            return f"notify.command: {name} took longer than {LIMIT_S:g} s and was killed; {_NO_MORE}"
        status = self._process.returncode
        was = "was " if status < 0 else ""
        return f"notify.command: {name} {was}{exit_words(status)}; {_NO_MORE}" if status else ""

    def _end(self) -> None:
        """Kill the command, with what it has started."""
        process = self._process
        if process and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
