"""What observers see of a run: its events, and each rank's output with its destination."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, ParamSpec

from distlaunch.agent.frozen import Frozen
from distlaunch.agent.wire import GENERATIONS
from distlaunch.job.spec import JobSpec
from distlaunch.plan.layout import LaunchPlan
from distlaunch.plan.output import Destination, destinations
from distlaunch.supervisor.actions import Notice
from distlaunch.supervisor.events import Event
from distlaunch.supervisor.nodes import Use
from distlaunch.supervisor.state import State
from distlaunch.supervisor.summary import Summary

P = ParamSpec("P")


class Printed(Frozen):
    """A piece of a rank's stdout (0) or stderr (1), and its destination."""

    rank: int
    stream: int
    data: bytes
    generation: int
    goes_to: Destination


class Observer:
    """A spectator of a run: each method is called after the fact, in order, in the thread that runs the job.

    Times are seconds since the run began. An observer that raises is removed, and the job goes on.
    To add one: a program passes it to `launch.run.run_job`, the commands have theirs in `cli/run.py`.
    """

    remark: Callable[[str], None] = staticmethod(lambda text: None)
    """Sends a remark to all observers; set by `Observers`."""

    moment: Callable[[], float] = staticmethod(time.time)
    """When the output that is being told came, in seconds since the epoch; set by a `Retelling`."""

    wake_at: float | None = None
    """When to call `woken`, in monotonic seconds; None = never."""

    wants_use: bool = False
    """Whether to call `used`: agents measure what ranks use only while an observer wants it."""

    def woken(self) -> None:
        """It is `wake_at`, or a little later."""

    def used(self, uses: Mapping[int, Use], at: float) -> None:
        """A node has reported what its ranks use, by rank; every few seconds."""

    def began(self, spec: JobSpec, chance: float, at: float) -> None:
        """The run has begun; its supervisor's random choices follow from `chance`."""

    def happened(self, event: Event, state: State, at: float) -> None:
        """An event has led to `state`."""

    def started(self, state: State, at: float) -> None:
        """The workers of another generation are being started."""

    def told(self, notice: Notice, at: float) -> None:
        """The supervisor has a message for the user."""

    def printed(self, output: Printed) -> None:
        """A rank has printed something."""

    def dumped(self, rank: int, data: bytes, generation: int) -> None:
        """A piece of the dump of a rank's flight recorder has arrived."""

    def drained(self, state: State) -> None:
        """The last output has arrived; `state` is the last one, too."""

    def ended(self, summary: Summary) -> None:
        """The run is over."""

    def remarked(self, text: str) -> None:
        """An observer has a message for the user."""


class Observers:
    """All observers of a run."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = list(observers)
        for each in self._observers:
            each.remark = lambda text: self.tell(Observer.remarked, text)

    @property
    def wake_at(self) -> float | None:
        """When the first of them wants to be woken, in monotonic seconds."""
        return min((each.wake_at for each in self._observers if each.wake_at is not None), default=None)

    @property
    def want_use(self) -> bool:
        """Whether one of them wants to know what ranks use."""
        return any(each.wants_use for each in self._observers)

    def wake(self) -> None:
        """Wake those whose time has come."""
        now = time.monotonic()
        for each in tuple(self._observers):
            if each.wake_at is not None and each.wake_at <= now:
                self._call(each, "woken")

    def tell(self, what: Callable[Concatenate[Any, P], None], *seen: P.args, **named: P.kwargs) -> None:
        """Call the method `what` of each; one that fails is left out from then on."""
        for each in tuple(self._observers):
            self._call(each, what.__name__, *seen, **named)

    def _call(self, each: Observer, name: str, *seen: Any, **named: Any) -> None:
        try:
            getattr(each, name)(*seen, **named)
        except Exception as error:  # whatever it is, a week of training must not end with it
            if each not in self._observers:
                return  # it failed while others were told that another had
            self._observers.remove(each)
            failed = f"{type(error).__name__}: {error}"
            text = f"observer {type(each).__name__} failed and was removed: {failed}"
            self.tell(Observer.remarked, text)


class Begun(Frozen):
    """A generation that has started, and where each worker's output goes."""

    number: int
    plan: LaunchPlan
    destinations: Mapping[tuple[int, int], Destination]


class Generations:
    """The generations of a run that have started; frames have only the last digits of their numbers."""

    def __init__(self) -> None:
        self._begun: dict[int, Begun] = {}

    def note(self, state: State) -> bool:
        """Note the current one, if it has started; whether it is another one than before."""
        number, plan = state.generation, state.plan
        if plan is None or state.started_at is None:
            return False
        known = self.of(number)
        if known and known.number == number:
            return False
        self._begun[number % GENERATIONS] = Begun(number, plan, destinations(plan, number))
        return True

    def of(self, called: int) -> Begun | None:
        """The generation with these last digits, whose output may come late."""
        return self._begun.get(called % GENERATIONS)
