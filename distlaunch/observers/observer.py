"""What an observer sees of a run, and how all of them are told."""

import time
from collections.abc import Callable, Iterable, Mapping
from itertools import compress
from typing import Any, Concatenate, ParamSpec

from distlaunch.agent.frozen import Frozen
from distlaunch.job.spec import JobSpec
from distlaunch.plan.output import Destination
from distlaunch.supervisor.actions import Notice
from distlaunch.supervisor.events import Event
from distlaunch.supervisor.nodes import Use
from distlaunch.supervisor.state import State
from distlaunch.supervisor.summary import Summary

P = ParamSpec("P")


class Printed(Frozen):
    """What a rank has printed on its stdout (0) or stderr (1), and where that goes."""

    rank: int
    stream: int
    data: bytes
    generation: int
    goes_to: Destination


class Observer:
    """Sees a run: each method is called once that has happened, in order, in the thread that runs the job.

    Times are seconds since the run began. One that raises sees no more of it, and the job goes on.
    To add one: a program gives it to `launch.run.run_job`, the command has its own in `cli/run.py`.
    """

    remark: Callable[[str], None] = staticmethod(lambda text: None)
    """Tells all observers something; set by `Observers`."""

    wake_at: float | None = None
    """When it wants to be `woken`, in monotonic seconds; None = not at all."""

    wants_use: bool = False
    """Whether it wants to be told what ranks use: agents look only while somebody does."""

    def woken(self) -> None:
        """It is time, or a little later."""

    def used(self, uses: Mapping[int, Use], at: float) -> None:
        """What a node's ranks use, by rank, every two seconds."""

    def began(self, spec: JobSpec, chance: float, at: float) -> None:
        """The run has begun; `chance` is what its supervisor was given."""

    def happened(self, event: Event, state: State, at: float) -> None:
        """An event has led to `state`."""

    def started(self, state: State, at: float) -> None:
        """The workers of another generation are on their way."""

    def told(self, notice: Notice, at: float) -> None:
        """There is something to tell the user."""

    def printed(self, output: Printed) -> None:
        """A rank has printed something."""

    def dumped(self, rank: int, data: bytes, generation: int) -> None:
        """A piece of what a rank's flight recorder has dumped has come."""

    def drained(self, state: State) -> None:
        """The last output has come; `state` is the last one, too."""

    def ended(self, summary: Summary) -> None:
        """All is over."""

    def remarked(self, text: str) -> None:
        """An observer has a remark for the user."""


class Observers:
    """All that see a run."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = list(observers)
        self._who_sees: dict[str, list[Observer]] = {}
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
        """Wake those for whom it is time."""
        now = time.monotonic()
        for each in tuple(self._observers):
            if each.wake_at is not None and each.wake_at <= now:
                self._call(each, "woken")

    def tell(self, what: Callable[Concatenate[Any, P], None], *seen: P.args, **named: P.kwargs) -> None:
        """Call the method `what` of each; who fails is left out from then on."""
        name = what.__name__
        for each in self._seeing(name):
            self._call(each, name, *seen, **named)

    def _seeing(self, name: str) -> list[Observer]:
        """Those that have a method of their own of that name."""
        found = self._who_sees.get(name)
        if found is None:
            inherited = getattr(Observer, name)
            methods = [getattr(each, name, None) for each in self._observers]
            own = [getattr(method, "__func__", None) is not inherited for method in methods]
            found = self._who_sees[name] = list(compress(self._observers, own))
        return found

    def _call(self, each: Observer, name: str, *seen: Any, **named: Any) -> None:
        try:
            getattr(each, name)(*seen, **named)
        except Exception as error:  # whatever it is, a week of training must not end with it
            if each not in self._observers:
                return  # it failed while others were told that another had
            self._observers.remove(each)
            self._who_sees = {}
            failed = f"{type(error).__name__}: {error}"
            text = f"observer {type(each).__name__} failed and was removed: {failed}"
            self.tell(Observer.remarked, text)
