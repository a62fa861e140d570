"""An agent's reports: what each becomes, and what of a hostile one is refused or cut."""

import contextlib
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.agent import messages
from distlaunch.agent.wire import MAX_OUTPUT, PROTOCOL, ProtocolError
from distlaunch.job.spec import MAX_GPUS
from distlaunch.launch.controller import _ClockOffset
from distlaunch.plan.placement import Facts
from distlaunch.supervisor import codec, events
from distlaunch.supervisor.codec import MAX_NUMBER, MAX_TEXT, MAX_WORDS, event_of, uses_of
from distlaunch.supervisor.nodes import Use
from tests.unit.samples import anything, bounded

NODE = 3
AHEAD_S = 1000.0
"""Our clock is that much ahead of the node's."""
OWNER = {"uid": 1000, "pid": 7, "command": "redis-server"}
RECORD = {"message": "ValueError: bad", "callstack": "File t.py\n  f()"}

HELLO = messages.Hello(NODE, PROTOCOL, "/venv/bin/python", 8, "gpu-3", 5.0, 2, "/logs/run")
EVENTS: list[Any] = [
    messages.AgentLeaving(NODE, 15, True),
    messages.WarningReceived(NODE, 10),
    messages.Interrupted(15, NODE),
    messages.PortHeld(NODE, 29500),
    messages.PortRefused(NODE, "in use", (OWNER,)),
    messages.PortUsurped(NODE, (OWNER,)),
    messages.Reaped(NODE, 4),
    messages.OrphansKilled(NODE, 4),
    messages.GuardianResumed(NODE, 4711),
    messages.RouteFound(NODE, "a", "10.0.0.1", "ib0", "10.0.0.4", (("ib0", True),), (("IFNAME", "ib0"),)),
    messages.RouteFound(NODE, "a", "10.0.0.1", None, seen={"place": {"exists": True, "errno": 2}}),
    messages.RouteFailed(NODE, "a", "no route to host"),
    messages.WorkerStarted(NODE, 1, 77, "0-3,8"),
    messages.WorkerUnstarted(NODE, 1, "exec", 2, "/x"),
    messages.RanksJoined(NODE, (0, 2)),
    messages.RanksLag(NODE, ((0, True, "connects"), (1, False, "sleeps"))),
    messages.RanksStalled(NODE, (0, 1), ((1, 77),)),
    messages.StackDumped(NODE, 1, "Thread 7"),
    messages.OutputLost(NODE, 1, 0, 512),
    messages.Swept(NODE, 2, 5),
    messages.AllSent(NODE),
    messages.Stuck(NODE, ({"pid": 7, "command": "x"},)),
    messages.TreeLacks(NODE, (0, 7)),
    messages.TreeProgress(NODE, 1 << 20),
    messages.TreePlaced(NODE, "5891", "/home/me/envs/1", (("torch", "2.13.0"),)),
    messages.SetupPrinted(NODE, "Installed 12 packages"),
    messages.TreeRefused(NODE, "/home: No space left on device"),
    messages.TreeKept(NODE, "/home/me/runs/x"),
]
"""Reports that become events as they are."""
EXITED = messages.WorkerExited(NODE, 1, -9, 5.0, RECORD, 2, (64, 32), "Killed")
SAMPLES = {type(report): report for report in (*EVENTS, HELLO, EXITED, messages.Pong(NODE, 5.0))}
UNASKED: list[Any] = [messages.Listening(NODE, 29500), messages.Dialed(NODE, ())]
FIELDS = [(kind, field, form) for kind in SAMPLES for field, form in kind.__annotations__.items()]
"""Every field of every report, and the form of its values."""


def told(report: Any) -> Any:
    if isinstance(report, messages.Usage):
        return uses_of(report)
    return event_of(report, lambda at: at + AHEAD_S)


def changed(kind: type, **changes: Any) -> Any:
    """The sample of that kind, but for these fields."""
    return SAMPLES[kind]._replace(**changes)


def refused(report: Any) -> str:
    """The words with which a report is refused."""
    with pytest.raises(ProtocolError) as caught:
        told(report)
    return str(caught.value)


# What each becomes


@pytest.mark.parametrize("report", EVENTS, ids=lambda report: type(report).__name__)
def test_a_report_is_an_event(report: Any) -> None:
    assert told(report) == report


def test_a_hello_becomes_the_facts_of_a_node() -> None:
    assert told(HELLO) == events.AgentUp(NODE, Facts("/venv/bin/python", 8, 2, "/logs/run"), "gpu-3")
    for gpus in (0, MAX_GPUS):
        assert told(HELLO._replace(gpus=gpus)).facts.gpus == gpus
    alone = HELLO._replace(procs=None, logs=None)
    assert told(alone) == events.AgentUp(NODE, Facts("/venv/bin/python", 8), "gpu-3")


def test_every_kind_of_report_is_in_these_tables_and_a_pong_is_only_a_sign_of_life() -> None:
    assert told(messages.Pong(NODE, 5.0)) is None
    shown = {messages.Usage, messages.Evidence, messages.FileBegins, messages.FilesEnd}
    assert {*SAMPLES, *map(type, UNASKED), *shown} == set(messages.REPORT_TYPES.values())


def test_reads_usage_by_local_rank() -> None:
    rows = [[0, 99.5, 1 << 30, 87, 2 << 30], [1, 3, 0, None, None]]
    assert told(messages.Usage(NODE, tuple(rows))) == {0: Use(99.5, 1 << 30, 87, 2 << 30), 1: Use(3.0, 0)}


def test_follows_the_clock_of_a_node_that_drifts() -> None:
    """By a second in a day, with a network that is fast once a minute."""
    clock = _ClockOffset(0.0)
    for now in range(0, 86_400, 5):
        clock.add(now, now - AHEAD_S - 1e-5 * now - (0.4 if now % 60 else 0.001))
    assert clock.seconds == pytest.approx(AHEAD_S + 1e-5 * 86_400, abs=0.005)


def test_the_clock_of_a_far_node_is_known_by_its_quickest_answer() -> None:
    """200 ms away, and sometimes slow to answer; two heartbeats are under way at the same time."""
    clock, away_s = _ClockOffset(0.0), 0.2
    clock.add(1.0 + away_s, 1.0 - AHEAD_S)
    assert clock.seconds == pytest.approx(AHEAD_S + away_s)
    for now in range(10, 100, 10):
        sent, slow_s = [now, now + 0.1], (0.0 if now == 50 else 0.3)
        for each in sent:
            clock.ping(each)
        for each in sent:
            clock.add(each + 2 * away_s + slow_s, each + away_s + slow_s - AHEAD_S, pong=True)
        clock.add(now + 5 + away_s, now + 5 - AHEAD_S)
    assert clock.seconds == pytest.approx(AHEAD_S)
    clock.add(200.0, 199.8 - AHEAD_S, pong=True)  # to no heartbeat
    assert clock.seconds == pytest.approx(AHEAD_S)


def test_a_far_clock_is_known_although_each_heartbeat_is_delayed_on_the_way_there_or_back() -> None:
    clock, away_s = _ClockOffset(0.0), 0.2
    for now, there_s, back_s in [(1.0, 0.1, 0.0), (1.1, 0.0, 0.3), (1.3, 0.2, 0.2)]:
        clock.ping(now)
        answered = now + away_s + there_s
        clock.add(answered + away_s + back_s, answered - AHEAD_S, pong=True)
    assert clock.seconds == pytest.approx(AHEAD_S)


def test_a_suspended_controller_or_a_busy_node_confuses_no_clock() -> None:
    clock = _ClockOffset(0.0)
    clock.add(0.001, -AHEAD_S)
    clock.ping(-math.inf)  # while the workers start
    clock.add(0.2, 0.2 - AHEAD_S, pong=True)
    clock.ping(1.0)
    clock.add(11.0, 1.001 - AHEAD_S, pong=True)
    assert clock.seconds == pytest.approx(AHEAD_S, abs=0.001)


# What is refused

PROCESSES = [
    (messages.PortRefused, "owners"),
    (messages.PortUsurped, "owners"),
    (messages.Stuck, "processes"),
]
USAGE: list[tuple[list[Any], str]] = [
    ([0, 1.0], "usage: ranks is not a list of ranks and what they use"),
    (["0", 1.0, 2, None, None], "usage: ranks is not a list of ranks and what they use"),
    ([0, -1.0, 2, None, None], "cpu is out of range"),
    ([0, 1.0, -2, None, None], "memory is out of range: -2"),
    ([0, 1.0, 2, -3, None], "gpu is out of range: -3"),
    ([MAX_NUMBER + 1, 1.0, 2, None, None], f"ranks is out of range: {MAX_NUMBER + 1}"),
]
REFUSED: list[tuple[Any, str]] = [
    *((messages.Usage(NODE, (row,)), words) for row, words in USAGE),
    *((each, f"unexpected message: {type(each).__name__}") for each in UNASKED),
    *(
        (changed(messages.Hello, protocol=other), f"the agent speaks protocol {other}, not {PROTOCOL}")
        for other in (PROTOCOL - 1, PROTOCOL + 1, -1)
    ),
    (changed(messages.Hello, gpus=-1), "gpus is out of range: -1"),
    (changed(messages.Hello, gpus=MAX_GPUS + 1), f"gpus is out of range: {MAX_GPUS + 1}"),
    (changed(messages.Hello, procs=0), "procs is out of range: 0"),
    (changed(messages.WorkerExited, status=256), "status is out of range: 256"),
    (changed(messages.WorkerExited, status=-128), "status is out of range: -128"),
    (messages.Interrupted(0, NODE), "signum is out of range: 0"),
    (messages.Interrupted(127, NODE), "signum is out of range: 127"),
    (messages.RanksStalled(NODE, (), ((MAX_NUMBER + 1, 7),)), f"stopped is out of range: {MAX_NUMBER + 1}"),
    (messages.RanksStalled(NODE, (), ((0, 0),)), "stopped is out of range: 0"),
    (messages.RanksStalled(NODE, (), ((0, 7), (1, -7))), "stopped is out of range: -7"),
    (messages.TreeLacks(NODE, (3, 3)), "contents is out of range: 3"),
    (messages.TreeLacks(NODE, (-1,)), "contents is out of range: -1"),
    *(
        (changed(messages.WorkerExited, at=time), "at is out of range")
        for time in (-1e-9, codec.MAX_SECONDS * 1.01, math.inf, -math.inf, math.nan, 10**400)
    ),
    *(
        (changed(kind, **{field: (OWNER, value)}), f"{field} is not a list of objects")
        for kind, field in PROCESSES
        for value in (None, 7, "redis", [], ["pid", 7])
    ),
]


@pytest.mark.parametrize(("report", "words"), REFUSED)
def test_refuses_what_no_agent_of_ours_reports(report: Any, words: str) -> None:
    assert refused(report) == words


NUMBERS = [
    (kind, field, form)
    for kind, field, form in FIELDS
    if form in ("int", "Tuple[int, ...]") and kind is not messages.Hello
    if field not in ("node", "status", "signum", "contents")
]


@pytest.mark.parametrize(("kind", "field", "form"), NUMBERS)
def test_refuses_numbers_that_no_computer_has(kind: type, field: str, form: str) -> None:
    def with_value(value: int) -> Any:
        return changed(kind, **{field: value if form == "int" else (0, value)})

    for value in (MAX_NUMBER + 1, -1, 10**400):
        assert refused(with_value(value)) == f"{field} is out of range: {value}"
    for value in (MAX_NUMBER, 0):
        assert getattr(told(with_value(value)), field) == getattr(with_value(value), field)


# What is cut

TEXTS = [(kind, field) for kind, field, form in FIELDS if form in ("str", "Optional[str]")]


@pytest.mark.parametrize(("kind", "field"), TEXTS)
def test_cuts_a_text_at_its_maximum(kind: type, field: str) -> None:
    most = {"words": codec.MAX_LAST_OUTPUT}.get(
        field, MAX_OUTPUT if kind is messages.SetupPrinted else MAX_TEXT
    )
    text = "é" * (most - 1) + "xy"
    for given_text in (text, text[:-1]):
        event = told(changed(kind, **{field: given_text}))
        assert getattr(event if hasattr(event, field) else event.facts, field) == text[:-1]


LONG, CUT, WORDS = "m" * (MAX_TEXT + 1), "m" * MAX_TEXT, "w" * (MAX_WORDS + 1)
DEEP = {"a": {"b": {"c": {"d": {"e": 1}}}}, "text": LONG, "list": [1]}
OF_PROCESSES: list[tuple[Any, Any]] = [
    ({"command": WORDS}, {"command": WORDS[:-1]}),
    ({WORDS: 1}, {WORDS[:-1]: 1}),
    ({"uid": 0, "pid": -1}, {"uid": 0, "pid": -1}),
    *(({"pid": value}, {"pid": None}) for value in (1.5, ["a", "b"], {"a": {"b": "c"}}, None)),
    ({}, {}),
]
OF_RECORDS: list[tuple[Any, Any]] = [
    *((record, None) for record in (None, 7, "ValueError", [RECORD])),
    *((record, record) for record in ({}, RECORD, {"message": "m"}, {"callstack": "c"})),
    ({"message": {"message": "m"}, "callstack": "c"}, {"callstack": "c"}),
    ({"message": "m", "timestamp": 5, "extra": {}}, {"message": "m"}),
    ({"message": "m", "timestamp": "5"}, {"message": "m", "timestamp": "5"}),
    ({"message": LONG}, {"message": CUT}),
    ({"callstack": f"{LONG}\nb\n{LONG}more"}, {"callstack": f"{CUT}\nb\n{CUT}"}),
    ({"message": "one\r\ntwo\n"}, {"message": "one\ntwo"}),
]
KEPT: list[tuple[type, str, Any, Any]] = [
    *((kind, field, (given,), (kept,)) for kind, field in PROCESSES for given, kept in OF_PROCESSES),
    *((messages.WorkerExited, "error_record", given, kept) for given, kept in OF_RECORDS),
    *((messages.WorkerExited, "status", status, status) for status in (0, 255, -1, -codec.MAX_SIGNAL)),
    *((messages.WorkerExited, "at", at, at + AHEAD_S) for at in (0, 0.0, 7, codec.MAX_SECONDS)),
    (messages.StackDumped, "text", "\n".join([LONG] * 20), "\n".join([CUT] * 15 + ["m" * 4066])),
    (messages.RouteFound, "interfaces", ((LONG, True), ("lo", False)), ((CUT, True), ("lo", False))),
    (messages.RouteFound, "named", ((LONG, LONG),), ((CUT, CUT),)),
    (messages.RouteFound, "seen", DEEP, {"a": {"b": {"c": {"d": None}}}, "text": CUT, "list": None}),
    (messages.RouteFound, "seen", [1], None),
    (messages.RanksLag, "seen", ((0, True, WORDS),), ((0, True, WORDS[:-1]),)),
]


@pytest.mark.parametrize(("kind", "field", "given", "kept"), KEPT)
def test_keeps_what_has_the_right_form_and_length(kind: type, field: str, given: Any, kept: Any) -> None:
    assert getattr(told(changed(kind, **{field: given})), field) == kept


# Whatever comes


def longest(value: Any) -> int:
    """The length of the longest text in it."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return max(map(longest, (*value, *value.values())), default=0)
    return max(map(longest, value), default=0) if isinstance(value, tuple | list) else 0


_texts = st.text(max_size=5) | st.just("x" * (codec.MAX_STACK + 1))
_rows = st.lists(st.lists(st.integers() | st.booleans() | _texts, max_size=3), max_size=3)


@given(st.sampled_from(FIELDS), anything | _texts | _rows)
@bounded(300)
def test_any_report_is_a_bounded_event_or_a_protocol_error(field: Any, value: Any) -> None:
    kind, name, _ = field
    with contextlib.suppress(ProtocolError):
        report = {**messages.as_object(SAMPLES[kind]), name: value}
        assert longest(told(messages.read(messages.REPORT_TYPES, report))) <= codec.MAX_STACK
