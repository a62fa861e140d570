"""Deadlines of an agent's event loop, by a clock that the test sets."""

import os
from types import SimpleNamespace

import pytest

from distlaunch.agent import poller
from distlaunch.agent.poller import STEP_S, Poller


@pytest.mark.parametrize("place", ["while it waits", "in a handler"])
def test_a_suspension_moves_the_deadlines_that_leave_it_out(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, waits, called = [100.0], [8.0] if place == "while it waits" else [], list[str]()
    monkeypatch.setattr(poller, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def wait(ms: float | None) -> list[tuple[int, int]]:
        assert ms is not None
        clock[0] += waits.pop() if waits else ms / 1000
        return []

    loop = Poller()
    monkeypatch.setattr(loop, "_poll", SimpleNamespace(poll=wait))
    for name, awake in (("grace", True), ("lease", False), ("lost", True)):
        loop.after(3.0, name, lambda name=name: called.append(f"{name} {clock[0] - 100:.0f}"), awake)  # type: ignore[misc]
    loop.within(5.0, "grace", lambda: called.append("later"), awake=True)
    loop.count_suspensions("lost")
    if place == "in a handler":
        clock[0] += 8.0
    loop.turn()
    assert called == ["lease 8", "lost 8"]
    while len(called) < 3:
        loop.turn()
    assert called[2] == ("grace 11" if place == "in a handler" else f"grace {11 - STEP_S:.0f}")


def test_an_event_of_a_closed_descriptor_is_not_taken_for_one_of_the_next_with_its_number() -> None:
    loop, called = Poller(), list[str]()
    (first, first_in), (second, second_in) = os.pipe(), os.pipe()

    def replace() -> None:
        loop.forget(first)
        loop.forget(second)
        os.dup2(quiet, second)
        loop.watch(second, lambda: called.append("the next"))

    quiet, quiet_in = os.pipe()
    loop.watch(first, replace)
    loop.watch(second, lambda: called.append("the closed one"))
    for end in (first_in, second_in):
        os.write(end, b"x")
    loop.turn()
    assert called == []
    for fd in (first, first_in, second, second_in, quiet, quiet_in):
        os.close(fd)
