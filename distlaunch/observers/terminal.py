"""Shows a run on the terminal: the progress of its start, the output of ranks, messages, and the end."""

import contextlib
import os
import signal
import time

from distlaunch.agent.wire import STOPS
from distlaunch.diagnosis.exits import TRACEBACK
from distlaunch.job.spec import Allocation, JobSpec
from distlaunch.observers.console import Console, Folding
from distlaunch.observers.observer import Observed, Observer, Printed
from distlaunch.observers.outlet import Outlet
from distlaunch.observers.run_directory import CONTROLLER_LOG
from distlaunch.signals import Interrupts
from distlaunch.supervisor.actions import ShowMessage
from distlaunch.supervisor.events import Event
from distlaunch.supervisor.nodes import Reaping, Up, WorkerPhase
from distlaunch.supervisor.state import Phase, State
from distlaunch.supervisor.summary import Above, Summary
from distlaunch.wording import counted, listed, spans

PATIENCE_S = 5.0
"""Seconds to wait at the end for a stuck reader. The log files contain everything."""
PROGRESS_S = 0.5
"""Seconds between two updates of the progress of a slow start."""
HOLD_S = 0.3
"""Seconds to hold back an error, or the incomplete line of a rank that reads the terminal."""
MOST_NAMED = 4
"""Maximum missing nodes listed during a start."""


class Terminal(Observer):
    """The display of a run on the console. With `quiet`, it shows only warnings and errors.

    If the reader of the output exits, the job ends through `interrupts`, as a pipeline does. With `waits`,
    for a run in another process, a slow reader gets all of the output. `Observer` describes when each method
    is called.
    """

    def __init__(
        self,
        interrupts: Interrupts,
        output_fd: int = 1,
        quiet: bool = False,
        fold: bool = False,
        waits: bool = False,
    ) -> None:
        self._interrupts, self._quiet, self._hurries = interrupts, quiet, False
        self._starting = self._asks = False
        self._held: list[ShowMessage] = []
        self._due: dict[str, float] = {}
        self._state: State | None = None
        self._console = Console(
            lambda: interrupts.send(signal.SIGPIPE), output_fd, lambda: waits and not interrupts.any()
        )
        self._fold = Folding(self._console.output) if fold else None

    @classmethod
    def of(cls, run: Observed) -> "Terminal":
        """Make the terminal of a run."""
        return cls(run.shown.interrupts, run.shown.output_fd, run.shown.quiet)

    def message(self, message: ShowMessage, at: float) -> None:
        """Show the message. Hold back an error, and any later messages, for a moment: the summary has more
        details, and an earlier failure may be reported later."""
        if message.level == "info" and self._quiet:
            return
        if self._held or message.level == "error":
            self._held.append(message)
            self._due.setdefault("messages", time.monotonic() + HOLD_S)
        else:
            self._console.say(message.text, message.level)

    def _release(self, errors: bool = True) -> None:
        """Show the messages held back, with or without errors."""
        held, self._held = self._held, []
        self._due.pop("messages", None)
        for message in held:
            if errors or message.level != "error":
                self._console.say(message.text, message.level)

    def remarked(self, text: str) -> None:
        """Show the message."""
        self.message(ShowMessage("warning", text), 0.0)

    def printed(self, output: Printed) -> None:
        """Show the output if the job requests that."""
        prefix = output.goes_to.prefix
        self._starting = False
        if not output.goes_to.shown:
            return
        asks = self._asks and output.rank == 0
        if self._fold is None or prefix is None or asks:
            self._console.output(output.rank, output.stream, output.data, prefix)
            if asks:
                self._due.pop("prompt", None)
                if self._console.is_within_line(0):  # which may not go on before somebody answers
                    self._due["prompt"] = time.monotonic() + HOLD_S
            return
        self._fold.add(output.rank, output.stream, output.data, prefix, time.monotonic())

    def began(self, spec: JobSpec, chance: float, at: float) -> None:
        """Show the hosts of an allocation, set up folding, and prepare to show the progress of the start."""
        if spec.allocation and not self._quiet:
            self._console.say(_origin(spec, spec.allocation))
        self._asks = spec.stdin == "rank 0" and os.isatty(0)
        if spec.logs.fold and self._fold is None:
            self._fold = Folding(self._console.output)
        if self._console.has_terminal and not self._quiet:
            self._starting = True
            self._due["progress"] = time.monotonic() + PROGRESS_S

    def happened(self, event: Event, state: State, at: float) -> None:
        """Remember the progress of the start."""
        self._state = state

    def started(self, state: State, at: float) -> None:
        """Show the incomplete lines of the previous attempt."""
        self._release()
        self.drained(state)

    @property
    def wake_at(self) -> float | None:  # type: ignore[override]
        """Return the time at which to show something held back, or the progress of the start."""
        fold = self._fold.due if self._fold else None
        return min([*self._due.values(), *([fold] if fold is not None else [])], default=None)

    def woken(self) -> None:
        """Show what is due: messages held back, a prompt, folded lines, and the progress of the start."""
        now = time.monotonic()
        due = {name for name, at in self._due.items() if at <= now}
        for name in due:
            del self._due[name]
        if "messages" in due:
            self._release()
        if "prompt" in due:
            self._console.finish_lines(0)
        if self._fold and self._fold.due is not None and self._fold.due <= now:
            self._fold.flush()
        if "progress" in due and self._starting:
            words = progress_words(self._state) if self._state else ""
            self._console.live(f"distlaunch: {words}" if words else "")
            self._due["progress"] = now + PROGRESS_S

    def drained(self, state: State) -> None:
        """Show incomplete lines, and the cause if held back, since a stalled disk would delay the summary."""
        if self._fold:
            self._fold.finish()
        self._console.finish_lines()
        if state.phase is Phase.DONE and state.cause and any(held.level == "error" for held in self._held):
            self._release(errors=False)
            self._console.say(state.cause.text, "error")

    def ended(self, summary: Summary) -> None:
        """Show how the run ended, and write output that is waiting for a slow reader."""
        brief = self._quiet and summary.state.cause is None
        lines = summary.warnings() if brief else summary.lines(self._above(summary))
        self._release(errors=summary.state.cause is None)  # otherwise, the summary includes them
        above = frozenset(self._console.said)  # the cause may have been shown just now
        for line in lines:
            if line not in above:
                self._console.say(line)
        # Without log files, as with torchrun, wait for a stuck reader, too. A signal ends any wait.
        needed = summary.state.spec.logs.torchrun is not None and not self._interrupts.received_last
        self._console.close(lambda silent_s: not self._stopped() and (needed or silent_s < PATIENCE_S))

    def _stopped(self) -> bool:
        """Return whether the command has been told to stop since the run ended."""
        self._hurries = self._hurries or not {*STOPS}.isdisjoint(self._interrupts.received())
        return self._hurries

    def close(self) -> None:
        """Stop showing a run, but let it continue."""
        self._release()
        self._console.close(lambda silent_s: silent_s < PATIENCE_S)

    def _above(self, summary: Summary) -> dict[int, Above]:
        """Return the position of the root cause's last output on the terminal, keyed by stream."""
        rank = summary.state.cause.rank if summary.state.cause else None
        if rank is None:
            return {}
        outputs = (summary.last_lines.get(rank, ""), summary.last_output.get(rank, ""))
        found = (self._console.above(rank, stream, _length(words)) for stream, words in enumerate(outputs))
        return {stream: Above(*above) for stream, above in enumerate(found) if above}


def _origin(spec: JobSpec, allocation: Allocation) -> str:
    """Describe the hosts of an allocation, and how to use others."""
    ours = os.uname().nodename  # mpirun calls this machine localhost
    hosts = [ours if host == "localhost" else host for host, _ in spec.mpirun.hosts]
    hosts = hosts or [node.label for node in spec.pool]
    text = f"{counted(len(hosts), 'node')} from {allocation.name}: {listed(hosts)}"
    other = " (launcher: auto; `--set launcher=local` uses only this machine)"
    return text if "launcher" in spec.places else text + other


def _length(words: str) -> int:
    """Return the number of lines from the start of the last traceback; 1 without a traceback."""
    _, found, last = words.rpartition(TRACEBACK)
    return 1 + last.rstrip("\n").count("\n") if found else 1


def progress_words(state: State) -> str:
    """Describe the progress of a start: `connecting: 12 of 16 nodes; waiting for gpu-3`; "" once complete."""
    if state.phase in (Phase.CONNECTING, Phase.PREPARING):
        return _connecting(state)
    return _joining(state) if state.phase is Phase.RUNNING else ""


def _connecting(state: State) -> str:
    missing = [index for index, node in enumerate(state.nodes) if not isinstance(node, Up | Reaping)]
    nodes = counted(len(state.nodes), "node")
    if not missing:
        return f"{nodes} connected"
    names = listed([state.label(node) for node in missing], MOST_NAMED)
    return f"connecting: {len(state.nodes) - len(missing)} of {nodes}; waiting for {names}"


def _joining(state: State) -> str:
    size, ranks = len(state.workers), counted(len(state.workers), state.unit)
    if planned := sum(worker.phase is WorkerPhase.PLANNED for worker in state.workers):
        return f"starting: {size - planned} of {ranks}"
    missing = [worker.rank for worker in state.workers if worker.running and not worker.joined]
    # Ranks without torch never join: don't mention joining until a rank tries to.
    if len(missing) == size and not any(worker.trying for worker in state.workers):
        return f"{ranks} started"
    names = f"{'rank' if len(missing) == 1 else 'ranks'} {spans(missing)}"
    return f"joining: {size - len(missing)} of {ranks}; waiting for {names}" if missing else ""


class DetachedTerminal(Observer):
    """The display of a detached run's start, without output of ranks, until the controller detaches."""

    def __init__(self, run: Observed) -> None:
        self._run = run
        self._terminal: Terminal | None = Terminal.of(run)
        self._log = self._new_log()

    @staticmethod
    def _new_log() -> Outlet:
        return Outlet(2, lambda error: None)  # the disk of the run directory may be full or stalled

    @property
    def wake_at(self) -> float | None:  # type: ignore[override]
        """Return the time at which the terminal has progress, or a message held back, to show."""
        return self._terminal.wake_at if self._terminal else None

    def woken(self) -> None:
        """Show the progress of the start, and messages held back."""
        if self._terminal:
            self._terminal.woken()

    def began(self, spec: JobSpec, chance: float, at: float) -> None:
        """Prepare to show the progress of the start."""
        if self._terminal:
            self._terminal.began(spec, chance, at)

    def happened(self, event: Event, state: State, at: float) -> None:
        """Detach once the start can no longer fail."""
        if self._terminal:
            self._terminal.happened(event, state, at)
        waits = any(worker.phase is WorkerPhase.PLANNED for worker in state.workers)
        if self._terminal and state.phase is Phase.RUNNING and not waits:
            self._terminal.close()
            self._terminal = None
            self._leave()

    def _leave(self) -> None:
        """Redirect the standard streams away from the terminal, and report that the run has started."""
        _silence(os.path.join(self._run.directory.path, CONTROLLER_LOG))
        with os.fdopen(self._run.shown.ready_fd, "w") as pipe:
            pipe.write(self._run.run_id)

    def message(self, message: ShowMessage, at: float) -> None:
        """Show the message, unless the controller is detached."""
        if self._terminal:
            self._terminal.message(message, at)

    def remarked(self, text: str) -> None:
        """Show the message or, once the controller is detached, write it to the controller log."""
        if self._terminal:
            self._terminal.remarked(text)
        else:
            self._log = self._new_log() if self._log.broken else self._log  # there may be room again
            self._log.write(f"distlaunch: {text}\n".encode(errors="backslashreplace"), ours=True)

    def ended(self, summary: Summary) -> None:
        """Show how the run ended if not all ranks had started by then; else, finish the controller log."""
        if self._terminal:
            self._terminal.ended(summary)
        else:
            self._log.settle()


def _silence(log: str) -> None:
    """Redirect the standard streams away from the terminal. Stderr goes to the file `log`."""
    null = errors = os.open(os.devnull, os.O_RDWR)
    with contextlib.suppress(OSError):
        errors = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    for fd, target in enumerate((null, null, errors)):
        os.dup2(target, fd)
    for fd in {null, errors}:
        os.close(fd)
