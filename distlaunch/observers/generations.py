"""The generations that were started: what a frame, or a piece of output, calls one, leads to its plan."""

from collections.abc import Mapping

from distlaunch.agent.frozen import Frozen
from distlaunch.agent.wire import GENERATIONS
from distlaunch.plan.layout import LaunchPlan
from distlaunch.plan.output import Destination, destinations
from distlaunch.supervisor.state import State


class Begun(Frozen):
    """A generation that was started, and where each worker's output goes."""

    number: int
    plan: LaunchPlan
    destinations: Mapping[tuple[int, int], Destination]


class Generations:
    """Those of one run, by their numbers, of which frames have the last digits."""

    def __init__(self) -> None:
        self._begun: dict[int, Begun] = {}

    def note(self, state: State) -> bool:
        """Note the current one, if it has started; whether it is another one than before."""
        this = state.current
        if this is None or this.started_at is None:
            return False
        called = this.number % GENERATIONS
        known = self._begun.get(called)
        if known and known.number == this.number:
            return False
        self._begun[called] = Begun(this.number, this.plan, destinations(this.plan, this.number))
        return True

    def of(self, called: int) -> Begun | None:
        """That one, whose output may come late."""
        return self._begun.get(called % GENERATIONS)
