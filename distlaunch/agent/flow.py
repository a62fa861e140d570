"""Holds workers' output back for moments, so that what a fast link takes need not go through a file."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Dict

    from distlaunch.agent.outbox import Outbox
    from distlaunch.agent.poller import Poller

HOLD_S = 0.1
"""A link that takes less than half of the outbox's memory in that time is slow: it must not slow a worker."""


class Flow:
    """Decides whether a worker's pipe is read now, or when the outbox has room again.

    Nothing is held for longer than HOLD_S, and nothing again before the link has caught up.
    """

    def __init__(self, poller: "Poller", outbox: "Outbox") -> None:
        self._poller, self._outbox = poller, outbox
        self._held: "Dict[int, Callable[[], object]]" = {}
        self._is_slow = False

    def holds(self, pipe: int, read: "Callable[[], object]") -> bool:
        """Whether a pipe that is ready is not to be read now; `read` is then called later."""
        if self._is_slow or not self._outbox.is_full:
            return False
        if not self._held:
            self._poller.after(HOLD_S, "flow", self._give_up)
        self._held[pipe] = read
        self._poller.forget(pipe)
        return True

    def forget(self, pipe: int) -> None:
        """A pipe was closed."""
        self._held.pop(pipe, None)

    def sent(self) -> None:
        """The link has taken something."""
        if not self._outbox.has_output:
            self._is_slow = False
        if self._held and self._outbox.has_room:
            self._release()

    def _give_up(self) -> None:
        self._is_slow = True
        self._release()

    def _release(self) -> None:
        self._poller.cancel("flow")
        held, self._held = self._held, {}
        for pipe, read in held.items():
            self._poller.watch(pipe, read)
