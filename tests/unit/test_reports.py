"""An agent's reports: what each becomes, and what of a hostile one is refused or cut."""

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.agent import messages
from distlaunch.agent.wire import PROTOCOL, ProtocolError
from distlaunch.job.spec import MAX_GPUS
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
    messages.PortRefused(NODE, "in use", ()),
    messages.PortUsurped(NODE, (OWNER,)),
    messages.Reaped(NODE, 4),
    messages.OrphansKilled(NODE, 4),
    messages.GuardianResumed(NODE, 4711),
    messages.RouteFound(NODE, "a", "10.0.0.1", "ib0", "10.0.0.4", (("ib0", True),), (("IFNAME", "ib0"),)),
    messages.RouteFound(NODE, "a", "10.0.0.1", None, seen={"place": {"exists": True, "errno": 2}}),
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
    messages.TreeLacks(NODE, (0, 7)),
    messages.TreeLacks(NODE, ()),
    messages.TreeProgress(NODE, 1 << 20),
    messages.TreePlaced(NODE, "5891"),
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
    kind = value if isinstance(value, type) else type(value)
    return kind.__name__ if hasattr(kind, "_fields") else None


# What each becomes


@pytest.mark.parametrize("report", EVENTS, ids=kind_of)
def test_a_report_is_an_event(report: Any) -> None:
    assert told(report) == report


def test_the_time_of_an_exit_becomes_the_controllers() -> None:
    assert told(EXITED) == EXITED._replace(at=5.0 + AHEAD_S)


def test_a_hello_becomes_the_facts_of_a_node() -> None:
    assert told(HELLO) == events.AgentUp(NODE, Facts("/venv/bin/python", 8, 2, "/logs/run"), "gpu-3")
    for gpus in (0, MAX_GPUS):
        assert told(HELLO._replace(gpus=gpus)).facts.gpus == gpus
    alone = HELLO._replace(procs=None, logs=None)
    assert told(alone) == events.AgentUp(NODE, Facts("/venv/bin/python", 8), "gpu-3")


def test_a_pong_is_only_a_sign_of_life() -> None:
    assert told(messages.Pong(NODE, 5.0)) is None


def test_every_kind_of_report_is_in_these_tables() -> None:
    shown = {messages.Usage, messages.Evidence, messages.FileBegins, messages.FilesEnd}
    assert {*SAMPLES, *map(type, UNASKED), *shown} == set(messages.REPORT_TYPES.values())


def test_reads_usage_by_local_rank() -> None:
    rows = [[0, 99.5, 1 << 30, 87, 2 << 30], [1, 3, 0, None, None]]
    assert uses_of(messages.Usage(NODE, tuple(rows))) == {0: Use(99.5, 1 << 30, 87, 2 << 30), 1: Use(3.0, 0)}


# What is refused

REFUSED = {
    "a port that nobody requested": (UNASKED[0], "unexpected message: Listening"),
    "dials that nobody requested": (UNASKED[1], "unexpected message: Dialed"),
    "less than no GPUs": (changed(messages.Hello, gpus=-1), "gpus is out of range: -1"),
    "too many GPUs": (
        changed(messages.Hello, gpus=MAX_GPUS + 1),
        f"gpus is out of range: {MAX_GPUS + 1}",
    ),
    "no workers": (changed(messages.Hello, procs=0), "procs is out of range: 0"),
    "status over 255": (changed(messages.WorkerExited, status=256), "status is out of range: 256"),
    "status of no signal": (changed(messages.WorkerExited, status=-128), "status is out of range: -128"),
    "signal 0": (messages.Interrupted(0, NODE), "signum is out of range: 0"),
    "a signal without a name": (messages.Interrupted(127, NODE), "signum is out of range: 127"),
    "a stopped rank": (
        messages.RanksStalled(NODE, (), ((MAX_NUMBER + 1, 7),)),
        f"stopped is out of range: {MAX_NUMBER + 1}",
    ),
    "files that were requested already": (messages.TreeLacks(NODE, (3, 3)), "contents is out of range: 3"),
    "a file before the first": (messages.TreeLacks(NODE, (-1,)), "contents is out of range: -1"),
    "pid 0": (messages.RanksStalled(NODE, (), ((0, 0),)), "stopped is out of range: 0"),
    "pid of a group": (messages.RanksStalled(NODE, (), ((0, 7), (1, -7))), "stopped is out of range: -7"),
}


@pytest.mark.parametrize(("report", "words"), REFUSED.values(), ids=REFUSED)
def test_refuses_what_no_agent_of_ours_reports(report: Any, words: str) -> None:
    assert refused(report) == words


@pytest.mark.parametrize("protocol", [PROTOCOL - 1, PROTOCOL + 1, -1])
def test_refuses_an_agent_of_another_protocol(protocol: int) -> None:
    words = f"the agent speaks protocol {protocol}, not {PROTOCOL}"
    assert refused(changed(messages.Hello, protocol=protocol)) == words


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
def test_refuses_impossible_usage(row: list[Any], words: str) -> None:
    with pytest.raises(ProtocolError, match=re.escape(words)):
        uses_of(messages.Usage(NODE, (row,)))


NARROWER = {
    (messages.WorkerExited, "status"),
    (messages.Interrupted, "signum"),
    (messages.TreeLacks, "contents"),
}
NUMBERS = [
    (kind, field, form)
    for kind, field, form in FIELDS
    if form in ("int", "Tuple[int, ...]") and field != "node" and (kind, field) not in NARROWER
    if kind is not messages.Hello
]


@pytest.mark.parametrize(("kind", "field", "form"), NUMBERS, ids=kind_of)
def test_refuses_numbers_that_no_computer_has(kind: type, field: str, form: str) -> None:
    def with_value(value: int) -> Any:
        return changed(kind, **{field: value if form == "int" else (0, value)})

    for value in (MAX_NUMBER + 1, -1, 10**400):
        assert refused(with_value(value)) == f"{field} is out of range: {value}"
    for value in (MAX_NUMBER, 0):
        assert getattr(told(with_value(value)), field) == getattr(with_value(value), field)


@pytest.mark.parametrize("status", [0, 255, -1, -codec.MAX_SIGNAL])
def test_a_status_is_what_wait_can_return(status: int) -> None:
    assert told(changed(messages.WorkerExited, status=status)).status == status


IMPOSSIBLE_TIMES = [-1e-9, codec.MAX_SECONDS * 1.01, math.inf, -math.inf, math.nan, 10**400]


@pytest.mark.parametrize("t", IMPOSSIBLE_TIMES, ids=lambda t: f"{str(t)[:9]}")
def test_refuses_a_time_that_no_clock_shows(t: float) -> None:
    assert refused(changed(messages.WorkerExited, at=t)) == "at is out of range"


@pytest.mark.parametrize("t", [0, 0.0, 7, codec.MAX_SECONDS])
def test_converts_times_to_the_controllers_clock(t: float) -> None:
    at = told(changed(messages.WorkerExited, at=t)).at
    assert at == t + AHEAD_S and isinstance(at, float)


# What is cut

LONGER: dict[tuple[type, str], int] = {(messages.WorkerExited, "words"): codec.MAX_LAST_OUTPUT}
TEXTS = [(kind, field) for kind, field, form in FIELDS if form in ("str", "Optional[str]")]


@pytest.mark.parametrize(("kind", "field"), TEXTS, ids=kind_of)
def test_cuts_a_text_at_its_maximum(kind: type, field: str) -> None:
    text = "é" * (LONGER.get((kind, field), MAX_TEXT) - 1) + "xy"
    for given_text in (text, text[:-1]):
        event = told(changed(kind, **{field: given_text}))
        assert getattr(event if hasattr(event, field) else event.facts, field) == text[:-1]


def test_cuts_a_stack_and_its_lines() -> None:
    lines = ["é" * (MAX_TEXT + 1)] * 20
    kept = told(changed(messages.StackDumped, text="\n".join(lines))).text
    assert {len(line) for line in kept.split("\n")[:-1]} == {MAX_TEXT}
    assert len(kept) <= codec.MAX_STACK


def test_cuts_texts_in_lists_but_keeps_every_item() -> None:
    long, cut, busy = "n" * (MAX_TEXT + 1), "n" * MAX_TEXT, "w" * (MAX_WORDS + 1)
    found = told(
        changed(messages.RouteFound, interfaces=((long, True), ("lo", False)), named=((long, long),))
    )
    assert (found.interfaces, found.named) == (((cut, True), ("lo", False)), ((cut, cut),))
    assert told(changed(messages.RanksLag, seen=((0, True, busy),))).seen == ((0, True, busy[:-1]),)


def test_cuts_facts_about_a_node_and_drops_what_is_deeper_than_they_are() -> None:
    deep: Any = {"a": {"b": {"c": {"d": {"e": 1}}}}, "text": "n" * (MAX_TEXT + 1), "list": [1]}
    seen = told(changed(messages.RouteFound, seen=deep)).seen
    assert seen == {"a": {"b": {"c": {"d": None}}}, "text": "n" * MAX_TEXT, "list": None}
    assert told(changed(messages.RouteFound, seen=[1])).seen is None


PROCESSES: list[tuple[type, str]] = [
    *((messages.PortRefused, "owners"), (messages.PortUsurped, "owners"), (messages.Stuck, "processes"))
]


@pytest.mark.parametrize("value", [None, 7, "redis", [], ["pid", 7]], ids=repr)
@pytest.mark.parametrize(("kind", "field"), PROCESSES, ids=kind_of)
def test_refuses_a_process_that_is_not_an_object(kind: type, field: str, value: Any) -> None:
    assert refused(changed(kind, **{field: (OWNER, value)})) == f"{field} is not a list of objects"


KEPT_OF_PROCESSES: dict[str, tuple[Any, Any]] = {
    "long value": ({"command": "c" * (MAX_WORDS + 1)}, {"command": "c" * MAX_WORDS}),
    "long name": ({"k" * (MAX_WORDS + 1): 1}, {"k" * MAX_WORDS: 1}),
    "numbers": ({"uid": 0, "pid": -1}, {"uid": 0, "pid": -1}),
    "float": ({"pid": 1.5}, {"pid": None}),
    "list": ({"command": ["a", "b"]}, {"command": None}),
    "nested": ({"command": {"a": {"b": "c"}}}, {"command": None}),
    "null": ({"command": None}, {"command": None}),
    "empty": ({}, {}),
}


@pytest.mark.parametrize(("given", "kept"), KEPT_OF_PROCESSES.values(), ids=KEPT_OF_PROCESSES)
def test_keeps_words_and_whole_numbers_of_a_process(given: Any, kept: Any) -> None:
    for kind, field in PROCESSES:
        assert getattr(told(changed(kind, **{field: (given,)})), field) == (kept,)


LONG_LINE, CUT_LINE = "m" * (MAX_TEXT + 1), "m" * MAX_TEXT
KEPT_OF_RECORDS: dict[str, tuple[Any, Any]] = {
    "none": (None, None),
    "number": (7, None),
    "text": ("ValueError", None),
    "list": ([RECORD], None),
    "empty": ({}, {}),
    "both": (RECORD, RECORD),
    "message alone": ({"message": "m"}, {"message": "m"}),
    "callstack alone": ({"callstack": "c"}, {"callstack": "c"}),
    "nested message": ({"message": {"message": "m"}, "callstack": "c"}, {"callstack": "c"}),
    "no texts": ({"message": None, "callstack": 7}, {}),
    "more than asked": ({"message": "m", "timestamp": 5, "extra": {}}, {"message": "m"}),
    "long message": ({"message": LONG_LINE}, {"message": CUT_LINE}),
    "long lines": (
        {"callstack": f"{LONG_LINE}\nb\n{LONG_LINE}more"},
        {"callstack": f"{CUT_LINE}\nb\n{CUT_LINE}"},
    ),
    "ends of lines": ({"message": "one\r\ntwo\n"}, {"message": "one\ntwo"}),
}


@pytest.mark.parametrize(("given", "kept"), KEPT_OF_RECORDS.values(), ids=KEPT_OF_RECORDS)
def test_keeps_two_texts_of_an_error_record_by_lines(given: Any, kept: Any) -> None:
    assert told(changed(messages.WorkerExited, error_record=given)).error_record == kept


# Whatever comes

_FORMS: dict[str, st.SearchStrategy[Any]] = {
    "Any": anything,
    "bool": st.booleans(),
    "int": st.integers() | st.integers(-2, 300),
    "float": st.floats() | st.integers(),
    "str": st.text(max_size=5) | st.just("x" * (codec.MAX_STACK + 1)),
    "Optional[int]": st.none() | st.integers(),
    "Optional[str]": st.none() | st.text(max_size=5),
    "Dict[str, str]": st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
    "Dial": st.builds(
        messages.Dial, st.text(max_size=5), st.text(max_size=5), st.none() | st.text(max_size=5)
    ),
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
