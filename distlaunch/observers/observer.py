"""The interface of observers of a run: its events, and the output of each rank with its destination."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, Literal, ParamSpec

from distlaunch.agent.frozen import Frozen
from distlaunch.agent.wire import ATTEMPTS
from distlaunch.job.spec import JobSpec
from distlaunch.observers.run_directory import RunDirectory
from distlaunch.plan.placement import LaunchPlan, NodePlan
from distlaunch.plan.workers import Destination, destinations
from distlaunch.signals import Interrupts
from distlaunch.supervisor.actions import ShowMessage
from distlaunch.supervisor.events import Event
from distlaunch.supervisor.nodes import Use
from distlaunch.supervisor.state import State
from distlaunch.supervisor.status import Status
from distlaunch.supervisor.summary import Summary

P = ParamSpec("P")


class Printed(Frozen):
    """A piece of a rank's stdout (0) or stderr (1), and its destination."""

    rank: int
    stream: int
    data: bytes
    attempt: int
    goes_to: Destination


class Shown(Frozen):
    """The way in which this process shows a run. `interrupts` end the run early.

    A detached run is shown until all ranks have started. Then the run's ID is written to `ready_fd`.
    """

    interrupts: Interrupts
    how: Literal["not", "terminal", "detached", "view"] = "not"
    output_fd: int = 1
    quiet: bool = False
    ready_fd: int = -1


class Observed(Frozen):
    """A run for which observers are made; `summary` is the method of `LastOutput`."""

    spec: JobSpec
    run_id: str
    directory: RunDirectory
    status: Status
    summary: Callable[[State, str, float], Summary]
    shown: Shown


class Observer:
    """A base class for observers. The thread that runs the job calls each method after the fact, in order.

    Times are seconds since the run began. An observer that raises is removed, and the job continues. Programs
    pass their own observers to `launch.controller.supervise`. `distlaunch.observers.TABLE` lists the built-in
    ones.
    """

    remark: Callable[[str], None] = staticmethod(lambda text: None)
    """Sends a message to all observers; set by `Observers`."""

    moment: Callable[[], float] = staticmethod(time.time)
    """Returns the arrival time of the current output, in seconds since the epoch; replaced by `Playback`."""

    wake_at: float | None = None
    """When to call `woken`, in monotonic seconds; None = never."""

    wants_use: bool = False
    """Whether to call `used`. Agents measure the ranks' resource use only while an observer needs it."""

    wants_stacks: bool = False
    """Whether to request the stacks of all ranks, for `captured`. Reset once they have been requested."""

    def __init__(self, run: Observed | None = None) -> None:
        """Create an observer. Those in `distlaunch.observers.TABLE` get their settings from `run`."""

    @classmethod
    def of(cls, run: Observed) -> "Observer":
        """Create the observer of a run, for `distlaunch.observers.TABLE`."""
        return cls(run)

    def woken(self) -> None:
        """Act on `wake_at`. Called once that time has come."""

    def used(self, uses: Mapping[int, Use], at: float) -> None:
        """Handle the resource use of a node's ranks, keyed by rank. Called every few seconds."""

    def began(self, spec: JobSpec, chance: float, at: float) -> None:
        """Note that the run has begun. The supervisor's random choices follow from `chance`."""

    def happened(self, event: Event, state: State, at: float) -> None:
        """Note that an event has led to `state`."""

    def started(self, state: State, at: float) -> None:
        """Note that the workers of another attempt are being started."""

    def message(self, message: ShowMessage, at: float) -> None:
        """Handle a message from the supervisor for the user."""

    def printed(self, output: Printed) -> None:
        """Handle output from a rank."""

    def dumped(self, rank: int, data: bytes, attempt: int) -> None:
        """Handle a piece of a rank's flight recorder dump."""

    def captured(self, part: NodePlan, taken: Mapping[str, Any], attempt: int) -> None:
        """Handle evidence from a node, recorded at a failure before workers are stopped, or on request.

        `taken` is as in `Evidence`.
        """

    def drained(self, state: State) -> None:
        """Note that the last output has arrived; `state` is the final state."""

    def ended(self, summary: Summary) -> None:
        """Note that the run is over."""

    def remarked(self, text: str) -> None:
        """Handle another observer's message for the user."""


class Observers:
    """All observers of a run."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = list(observers)
        for each in self._observers:
            each.remark = lambda text: self.tell(Observer.remarked, text)

    @property
    def wake_at(self) -> float | None:
        """Return the earliest time to wake an observer, in monotonic seconds."""
        return min((each.wake_at for each in self._observers if each.wake_at is not None), default=None)

    @property
    def want_use(self) -> bool:
        """Return whether an observer needs the ranks' resource use."""
        return any(each.wants_use for each in self._observers)

    def stacks_requested(self) -> bool:
        """Return whether an observer has requested the stacks of all ranks since the last call."""
        requested = [each for each in self._observers if each.wants_stacks]
        for each in requested:
            each.wants_stacks = False
        return bool(requested)

    def wake(self) -> None:
        """Wake the observers that are due."""
        now = time.monotonic()
        for each in tuple(self._observers):
            if each.wake_at is not None and each.wake_at <= now:
                self._call(each, "woken")

    def tell(self, what: Callable[Concatenate[Any, P], None], *seen: P.args, **named: P.kwargs) -> None:
        """Call the method `what` of each observer. An observer that raises is removed."""
        for each in tuple(self._observers):
            self._call(each, what.__name__, *seen, **named)

    def _call(self, each: Observer, name: str, *seen: Any, **named: Any) -> None:
        """Call a method of an observer. Remove the observer if it raises."""
        try:
            getattr(each, name)(*seen, **named)
        except Exception as error:  # of any kind, since it must not end a week of training
            if each not in self._observers:
                return  # already removed: it also raised when notified of another failure
            self._observers.remove(each)
            failed = f"{type(error).__name__}: {error}"
            text = f"observer {type(each).__name__} failed and was removed: {failed}"
            self.tell(Observer.remarked, text)


class Begun(Frozen):
    """An attempt that has started, and the destination of each worker's output."""

    number: int
    plan: LaunchPlan
    destinations: Mapping[tuple[int, int], Destination]


class Attempts:
    """The attempts of a run that have started. Frames contain only the last digits of their numbers."""

    def __init__(self) -> None:
        self._attempts: dict[int, Begun] = {}

    def note(self, state: State) -> bool:
        """Note the current attempt if it has started; return whether it is new."""
        number, plan = state.attempt, state.plan
        if plan is None or state.started_at is None:
            return False
        known = self.of(number)
        if known and known.number == number:
            return False
        self._attempts[number % ATTEMPTS] = Begun(number, plan, destinations(plan, number))
        return True

    def of(self, digits: int) -> Begun | None:
        """Return the attempt whose number ends in these digits. Its output may arrive late."""
        return self._attempts.get(digits % ATTEMPTS)
