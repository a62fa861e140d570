"""Observers of a run that fail."""

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


class Odd:
    """No observer, but for what a type checker sees."""

    wake_at = None
    wants_use = False


def test_removes_failing_observers_once() -> None:
    remarks = Remarks()
    observers = Observers([Failing(), FailingTwice(), remarks])
    observers.tell(Observer.drained, None)  # type: ignore[arg-type]  # nobody looks at it
    observers.tell(Observer.drained, None)  # type: ignore[arg-type]
    assert sorted(remarks.seen) == [
        "observer Failing failed and was removed: ValueError: first",
        "observer FailingTwice failed and was removed: OSError: second",
    ]


def test_removes_and_names_an_observer_that_lacks_a_method() -> None:
    remarks = Remarks()
    odd: Any = Odd()
    observers = Observers([odd, remarks])
    observers.tell(Observer.remarked, "said")
    lacks = "AttributeError: 'Odd' object has no attribute 'remarked'"
    assert sorted(remarks.seen) == [f"observer Odd failed and was removed: {lacks}", "said"]
