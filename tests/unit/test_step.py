"""Completeness of the policy's tables: a handler for every event, finding, timer and phase."""

import typing

from distlaunch.agent import messages
from distlaunch.supervisor import codec, events, step
from distlaunch.supervisor.findings import Finding
from distlaunch.supervisor.state import Phase, Timer


def test_every_report_and_every_event_has_its_handler() -> None:
    reports = {*messages.REPORT_TYPES.values()} - codec._ANSWERS - {messages.Hello, messages.Pong}
    own = {each for each in vars(events).values() if getattr(each, "__module__", "") == events.__name__}
    assert set(step.HANDLERS) == reports | own
    assert set(step._PHASES) <= set(step.HANDLERS)


def test_every_finding_timer_and_phase_has_its_rules() -> None:
    assert set(step._DECIDERS) == set(typing.get_args(Finding))
    assert set(step._DUE) | set(step._DUE_ON_A_NODE) == set(Timer)
    assert set(step._RULES) == set(Phase) - {Phase.DONE}
