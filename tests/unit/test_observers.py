"""Observers of a run that fail."""

from types import SimpleNamespace
from typing import Any

from distlaunch.observers.observer import Observer, Observers


class Remarks(Observer):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def remarked(self, text: str) -> None:
        self.seen.append(text)


class Failing(Observer):
    def drained(self, state: Any) -> None:
        raise ValueError("first")


class FailingTwice(Failing):
    """Also when it is told that another one has failed."""

    def remarked(self, text: str) -> None:
        raise OSError("second")


def test_removes_observers_that_fail_or_lack_a_method_once() -> None:
    remarks = Remarks()
    odd: Any = SimpleNamespace(wake_at=None, wants_use=False)
    observers = Observers([Failing(), FailingTwice(), odd, remarks])
    for _ in range(2):
        observers.tell(Observer.drained, None)  # type: ignore[arg-type]  # nobody looks at it
    first, second, third = sorted(remarks.seen)
    assert first == "observer Failing failed and was removed: ValueError: first"
    assert second == "observer FailingTwice failed and was removed: OSError: second"
    assert third.startswith("observer SimpleNamespace failed and was removed: AttributeError: ")
