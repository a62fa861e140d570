"""An agent's reports: what each becomes, and what of a hostile one is refused or cut."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.agent import messages
from distlaunch.agent.wire import PROTOCOL, ProtocolError
from distlaunch.plan.layout import Facts
from distlaunch.supervisor import codec, events
from distlaunch.supervisor.codec import (
    MAX_GPUS,
    MAX_LAST_WORDS,
    MAX_NUMBER,
    MAX_SECONDS,
    MAX_SIGNAL,
    MAX_STACK,
    MAX_TEXT,
    MAX_WORDS,
    event_of,
    uses_of,
)
from distlaunch.supervisor.nodes import Use
from tests.unit.samples import bounded

NODE = 3
AHEAD_S = 1000.0
"""Our clock is that much ahead of the node's."""
OWNER = {"uid": 1000, "pid": 7, "command": "redis-server"}
RECORD = {"message": "ValueError: bad", "callstack": "File t.py\n  f()"}

HELLO = messages.Hello(NODE, PROTOCOL, "/venv/bin/python", (3, 11), 8, "gpu-3", 99, 5.0, 2, "/logs/run")
EVENTS: list[Any] = [
    messages.AgentLeaving(NODE, 15, True),
    messages.WarningReceived(NODE, 10),
    messages.Interrupted(15, NODE),
    messages.PortHeld(NODE, 29500),
    messages.PortRefused(NODE, "in use", (OWNER,)),
    messages.PortRefused(NODE, "in use", ()),
    messages.PortUsurped(NODE, (OWNER,)),
    messages.Reaped(NODE, 4),
    messages.OrphansKilled(NODE, 4),
    messages.RouteFound(NODE, "a", "10.0.0.1", "ib0", "10.0.0.4", (("ib0", True),), (("IFNAME", "ib0"),)),
    messages.RouteFound(NODE, "a", "10.0.0.1", None),
    messages.RouteFailed(NODE, "a", "no route to host"),
    messages.WorkerStarted(NODE, 1, 77, "0-3,8"),
    messages.WorkerStarted(NODE, 1, 77),
    messages.WorkerUnstarted(NODE, 1, "exec", 2, "/x"),
    messages.RanksJoined(NODE, (0, 2)),
    messages.RanksLag(NODE, ((0, True, "connects"), (1, False, "sleeps"))),
    messages.RanksStalled(NODE, ()),
    messages.RanksStalled(NODE, (0, 1), ((1, 77),)),
    messages.StackDumped(NODE, 1, "Thread 7"),
    messages.OutputLost(NODE, 1, 0, 512),
    messages.Swept(NODE, 2, 5),
    messages.Stuck(NODE, ({"pid": 7, "command": "x"},)),
]
"""Reports that become events as they are."""
EXITED = messages.WorkerExited(NODE, 1, -9, 5.0, RECORD, 2, (64, 32), "Killed")
SAMPLES = {type(report): report for report in (*EVENTS, HELLO, EXITED, messages.Pong(NODE, 5.0))}
UNASKED: list[Any] = [messages.Listening(NODE, 29500), messages.Dialed(NODE, ())]


def told(report: Any) -> Any:
    return event_of(report, lambda at: at + AHEAD_S)


def changed(kind: type, **changes: Any) -> Any:
    """The sample of that kind, but for these fields."""
    return SAMPLES[kind]._replace(**changes)


def refused(report: Any) -> str:
    """The words with which a report is refused."""
    with pytest.raises(ProtocolError) as caught:
        told(report)
    return str(caught.value)


def kind_of(value: Any) -> str | None:
    """A test's id: the kind of a report."""
    if isinstance(value, type):
        return value.__name__
    return type(value).__name__ if hasattr(value, "_fields") else None


# What each becomes


@pytest.mark.parametrize("report", EVENTS, ids=kind_of)
def test_a_report_is_an_event(report: Any) -> None:
    assert told(report) == report


def test_the_time_of_an_exit_becomes_the_controllers() -> None:
    assert told(EXITED) == EXITED._replace(at=5.0 + AHEAD_S)


def test_a_hello_becomes_the_facts_of_a_node() -> None:
    assert told(HELLO) == events.AgentUp(NODE, Facts("/venv/bin/python", 8, 2, "/logs/run"), "gpu-3")
    alone = HELLO._replace(procs=None, logs=None)
    assert told(alone) == events.AgentUp(NODE, Facts("/venv/bin/python", 8), "gpu-3")


def test_a_pong_is_only_a_sign_of_life() -> None:
    assert told(messages.Pong(NODE, 5.0)) is None


def test_every_kind_of_report_is_in_these_tables() -> None:
    assert {*SAMPLES, *map(type, UNASKED), messages.Usage} == set(messages.REPORT_TYPES.values())


def test_what_workers_use_is_known_by_local_rank() -> None:
    rows = [[0, 99.5, 1 << 30, 87, 2 << 30], [1, 3, 0, None, None]]
    assert uses_of(messages.Usage(NODE, tuple(rows))) == {0: Use(99.5, 1 << 30, 87, 2 << 30), 1: Use(3.0, 0)}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([0, 1.0], "usage: ranks is not a list of ranks and what they use"),
        (["0", 1.0, 2, None, None], "usage: ranks is not a list of ranks and what they use"),
        ([0, -1.0, 2, None, None], "cpu is out of range"),
        ([0, 1.0, -2, None, None], "memory is out of range: -2"),
        ([0, 1.0, 2, -3, None], "gpu is out of range: -3"),
        ([MAX_NUMBER + 1, 1.0, 2, None, None], f"ranks is out of range: {MAX_NUMBER + 1}"),
    ],
)
def test_a_use_that_can_not_be_is_refused(row: list[Any], words: str) -> None:
    with pytest.raises(ProtocolError, match=re.escape(words)):
        uses_of(messages.Usage(NODE, (row,)))


@pytest.mark.parametrize("report", UNASKED, ids=kind_of)
def test_an_answer_to_what_run_never_asks_is_refused(report: Any) -> None:
    assert refused(report) == f"unexpected message: {type(report).__name__}"


@pytest.mark.parametrize("protocol", [PROTOCOL - 1, PROTOCOL + 1, -1])
def test_a_hello_of_another_protocol_is_refused(protocol: int) -> None:
    words = f"the agent speaks protocol {protocol}, not {PROTOCOL}"
    assert refused(changed(messages.Hello, protocol=protocol)) == words


# Numbers

NUMBERS: list[tuple[type, str]] = [
    (messages.AgentLeaving, "signum"),
    (messages.PortHeld, "port"),
    (messages.Reaped, "processes"),
    (messages.OrphansKilled, "processes"),
    (messages.WorkerStarted, "local_rank"),
    (messages.WorkerStarted, "pid"),
    (messages.WorkerUnstarted, "local_rank"),
    (messages.WorkerUnstarted, "errno"),
    (messages.WorkerExited, "local_rank"),
    (messages.WorkerExited, "oom_kills"),
    (messages.StackDumped, "local_rank"),
    (messages.OutputLost, "local_rank"),
    (messages.OutputLost, "stream"),
    (messages.OutputLost, "size"),
    (messages.Swept, "attempt"),
    (messages.Swept, "leftovers"),
]
LISTS: list[tuple[type, str]] = [
    (messages.WorkerExited, "shm"),
    (messages.RanksJoined, "local_ranks"),
    (messages.RanksStalled, "local_ranks"),
]


@pytest.mark.parametrize("value", [MAX_NUMBER + 1, -MAX_NUMBER - 1, 10**400], ids=["over", "under", "huge"])
@pytest.mark.parametrize(("kind", "field"), NUMBERS, ids=kind_of)
def test_a_number_that_no_computer_has_is_refused(kind: type, field: str, value: int) -> None:
    assert refused(changed(kind, **{field: value})) == f"{field} is out of range: {value}"


@pytest.mark.parametrize("value", [MAX_NUMBER, -MAX_NUMBER])
@pytest.mark.parametrize(("kind", "field"), NUMBERS, ids=kind_of)
def test_the_largest_numbers_are_taken(kind: type, field: str, value: int) -> None:
    assert value in told(changed(kind, **{field: value}))


@pytest.mark.parametrize("value", [MAX_NUMBER + 1, -MAX_NUMBER - 1])
@pytest.mark.parametrize(("kind", "field"), LISTS, ids=kind_of)
def test_each_number_of_a_list_is_looked_at(kind: type, field: str, value: int) -> None:
    assert refused(changed(kind, **{field: (0, value)})) == f"{field} is out of range: {value}"


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (changed(messages.Hello, gpus=-1), "gpus is out of range: -1"),
        (changed(messages.Hello, gpus=MAX_GPUS + 1), f"gpus is out of range: {MAX_GPUS + 1}"),
        (changed(messages.Hello, procs=0), "procs is out of range: 0"),
        (changed(messages.WorkerExited, status=256), "status is out of range: 256"),
        (messages.Interrupted(0, NODE), "signum is out of range: 0"),
        (messages.Interrupted(MAX_SIGNAL, NODE), f"signum is out of range: {MAX_SIGNAL}"),
        (
            changed(messages.WorkerExited, status=-MAX_SIGNAL - 1),
            f"status is out of range: {-MAX_SIGNAL - 1}",
        ),
        (
            messages.RanksStalled(NODE, (), ((MAX_NUMBER + 1, 7),)),
            f"stopped is out of range: {MAX_NUMBER + 1}",
        ),
        (messages.RanksStalled(NODE, (), ((0, 0),)), "stopped is out of range: 0"),
        (messages.RanksStalled(NODE, (), ((0, 7), (1, -7))), "stopped is out of range: -7"),
    ],
    ids=[
        "fewer than no GPUs",
        "more GPUs than a node has",
        "no workers",
        "status over 255",
        "no signal",
        "a signal without a name",
        "signal over 127",
        "rank",
        "pid 0",
        "pid of a group",
    ],
)
def test_a_number_has_the_bounds_of_what_it_counts(report: Any, words: str) -> None:
    assert refused(report) == words


@pytest.mark.parametrize("gpus", [0, MAX_GPUS])
def test_a_node_has_none_or_many_gpus(gpus: int) -> None:
    assert told(changed(messages.Hello, gpus=gpus)).facts.gpus == gpus


@pytest.mark.parametrize("status", [0, 255, -1, -MAX_SIGNAL])
def test_a_status_is_what_wait_can_return(status: int) -> None:
    assert told(changed(messages.WorkerExited, status=status)).status == status


@pytest.mark.parametrize(
    "t", [-1e-9, MAX_SECONDS * 1.01, math.inf, -math.inf, math.nan, 10**400], ids=lambda t: f"{str(t)[:9]}"
)
def test_a_time_that_no_clock_shows_is_refused(t: float) -> None:
    assert refused(changed(messages.WorkerExited, at=t)) == "at is out of range"


@pytest.mark.parametrize("t", [0, 0.0, 7, MAX_SECONDS])
def test_a_time_is_turned_into_ours(t: float) -> None:
    assert told(changed(messages.WorkerExited, at=t)).at == t + AHEAD_S


def test_a_whole_number_of_seconds_is_a_time_too() -> None:
    at = event_of(changed(messages.WorkerExited, at=7), lambda t: t).at  # type: ignore[union-attr]
    assert at == 7 and isinstance(at, float)


def test_the_clock_never_sees_a_time_that_is_out_of_range() -> None:
    asked: list[float] = []
    with pytest.raises(ProtocolError):
        event_of(changed(messages.WorkerExited, at=math.nan), lambda t: asked.append(t) or t)  # type: ignore[func-returns-value]
    assert asked == []


# Texts

TEXTS: list[tuple[type, str, int, Callable[[Any], Any]]] = [
    (messages.Hello, "python", MAX_TEXT, lambda event: event.facts.python),
    (messages.Hello, "hostname", MAX_TEXT, lambda event: event.hostname),
    (messages.Hello, "logs", MAX_TEXT, lambda event: event.facts.logs),
    (messages.PortRefused, "error", MAX_TEXT, lambda event: event.error),
    (messages.RouteFound, "asked", MAX_TEXT, lambda event: event.asked),
    (messages.RouteFound, "address", MAX_TEXT, lambda event: event.address),
    (messages.RouteFound, "source", MAX_TEXT, lambda event: event.source),
    (messages.RouteFound, "interface", MAX_TEXT, lambda event: event.interface),
    (messages.RouteFailed, "asked", MAX_TEXT, lambda event: event.asked),
    (messages.RouteFailed, "error", MAX_TEXT, lambda event: event.error),
    (messages.WorkerStarted, "cpus", MAX_TEXT, lambda event: event.cpus),
    (messages.WorkerUnstarted, "stage", MAX_TEXT, lambda event: event.stage),
    (messages.WorkerUnstarted, "text", MAX_TEXT, lambda event: event.text),
    (messages.WorkerExited, "words", MAX_LAST_WORDS, lambda event: event.words),
    (messages.StackDumped, "text", MAX_STACK, lambda event: event.text),
    (messages.AgentLeaving, "damage", MAX_TEXT, lambda event: event.damage),
]


@pytest.mark.parametrize(("kind", "field", "most", "shown"), TEXTS, ids=kind_of)
def test_a_text_is_cut_at_its_maximum(kind: type, field: str, most: int, shown: Callable[[Any], Any]) -> None:
    text = "é" * (most - 1) + "xy"
    assert shown(told(changed(kind, **{field: text}))) == text[:-1]
    assert shown(told(changed(kind, **{field: text[:-1]}))) == text[:-1]


def test_names_of_interfaces_and_variables_are_cut_but_none_is_left_out() -> None:
    name = "n" * MAX_TEXT
    given = changed(
        messages.RouteFound, interfaces=((name + "x", True), ("lo", False)), named=((name + "x",) * 2,)
    )
    event = told(given)
    assert event.interfaces == ((name, True), ("lo", False))
    assert event.named == ((name, name),)


def test_what_a_rank_does_is_cut() -> None:
    event = told(messages.RanksLag(NODE, ((0, True, "w" * MAX_WORDS + "x"),)))
    assert event.seen == ((0, True, "w" * MAX_WORDS),)


# Owners and processes


@pytest.mark.parametrize("value", [None, 7, "redis", [], ["pid", 7]], ids=repr)
@pytest.mark.parametrize(
    ("kind", "field"),
    [(messages.PortRefused, "owners"), (messages.PortUsurped, "owners"), (messages.Stuck, "processes")],
    ids=kind_of,
)
def test_a_process_that_is_no_object_is_refused(kind: type, field: str, value: Any) -> None:
    assert refused(changed(kind, **{field: (OWNER, value)})) == f"{field} is not a list of objects"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"command": "c" * (MAX_WORDS + 1)}, {"command": "c" * MAX_WORDS}),
        ({"k" * (MAX_WORDS + 1): 1}, {"k" * MAX_WORDS: 1}),
        ({"uid": 0, "pid": -1}, {"uid": 0, "pid": -1}),
        ({"pid": 1.5}, {"pid": None}),
        ({"command": ["a", "b"]}, {"command": None}),
        ({"command": {"a": {"b": "c"}}}, {"command": None}),
        ({"command": None}, {"command": None}),
        ({}, {}),
    ],
    ids=["long value", "long name", "numbers", "float", "list", "nested", "null", "empty"],
)
def test_of_a_process_words_and_whole_numbers_are_kept(given: Any, kept: Any) -> None:
    assert told(messages.Stuck(NODE, (given,))).processes == (kept,)
    assert told(messages.PortUsurped(NODE, (given,))).owners == (kept,)
    assert told(messages.PortRefused(NODE, "in use", (given,))).owners == (kept,)


# Error records


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (None, None),
        (7, None),
        ("ValueError", None),
        ([RECORD], None),
        ({}, {}),
        (RECORD, RECORD),
        ({"message": "m"}, {"message": "m"}),
        ({"callstack": "c"}, {"callstack": "c"}),
        ({"message": {"message": "m"}, "callstack": "c"}, {"callstack": "c"}),
        ({"message": None, "callstack": 7}, {}),
        ({"message": "m", "timestamp": 5, "extra": {}}, {"message": "m"}),
        ({"message": "m" * (MAX_TEXT + 1)}, {"message": "m" * MAX_TEXT}),
        (
            {"callstack": "\n".join(["a" * (MAX_TEXT + 1), "b", "c" * (MAX_TEXT + 9)])},
            {"callstack": "\n".join(["a" * MAX_TEXT, "b", "c" * MAX_TEXT])},
        ),
        ({"message": "one\r\ntwo\n"}, {"message": "one\ntwo"}),
    ],
    ids=[
        "none",
        "number",
        "text",
        "list",
        "empty",
        "both",
        "message alone",
        "callstack alone",
        "nested message",
        "no texts",
        "more than asked",
        "long message",
        "long lines",
        "ends of lines",
    ],
)
def test_of_an_error_record_two_texts_are_kept_by_lines(given: Any, kept: Any) -> None:
    assert told(changed(messages.WorkerExited, error_record=given)).error_record == kept


# Whatever comes

_any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
_FORMS: dict[str, st.SearchStrategy[Any]] = {
    "Any": _any,
    "bool": st.booleans(),
    "int": st.integers() | st.integers(-2, 300),
    "float": st.floats() | st.integers(),
    "str": st.text(max_size=5) | st.just("x" * (MAX_STACK + 1)),
    "Optional[int]": st.none() | st.integers(),
    "Optional[str]": st.none() | st.text(max_size=5),
    "Dict[str, str]": st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
}


def _form(form: str) -> st.SearchStrategy[Any]:
    """Values of a form that a field of a report may have."""
    if not form.startswith("Tuple["):
        return _FORMS[form]
    if form.endswith(", ...]"):
        return st.lists(_form(form[6:-6]), max_size=3).map(tuple)
    return st.tuples(*map(_form, form[6:-1].split(", ")))


def _of_kind(kind: Any) -> st.SearchStrategy[Any]:
    return st.builds(kind, *map(_form, kind.__annotations__.values()))


def longest(value: Any) -> int:
    """The length of the longest text in it."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return max(map(longest, (*value, *value.values())), default=0)
    return max(map(longest, value), default=0) if isinstance(value, tuple | list) else 0


@given(st.sampled_from(sorted(messages.REPORT_TYPES)).flatmap(lambda op: _of_kind(messages.REPORT_TYPES[op])))
@bounded(500)
def test_any_report_is_a_bounded_event_or_a_protocol_error(report: Any) -> None:
    try:
        event = told(report)
    except ProtocolError:
        return
    assert longest(event) <= codec.MAX_STACK
