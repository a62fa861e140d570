"""The messages between controller and agent: encoding, decoding, and the names of wrong fields."""

import json
from typing import Any

import pytest

from distlaunch.agent import messages
from distlaunch.agent.messages import (
    COMMAND_TYPES,
    REPORT_TYPES,
    Binding,
    Collect,
    Dial,
    Needs,
    Setup,
    StartWorkers,
    WorkerExited,
    WorkerSpec,
)
from distlaunch.agent.wire import ProtocolError

WORKER = WorkerSpec(0, ("python", "t.py"), "/w", (0, 1), {"A": "b"}, {}, False, ())
START = StartWorkers(
    1, "id", 10.0, 30.0, {}, (WORKER,), None, 29500, True, 15, False, (), Binding("listed", 0, ("0-3",))
)
EXITED = WorkerExited(0, 0, -9, 12.5, {"message": "m", "callstack": ""}, 0, (1, 2), "words")
SAMPLES: dict[str, Any] = {
    "Any": 1,
    "bool": True,
    "int": 7,
    "float": 0.5,
    "str": "text",
    "Dict[str, str]": {"a": "b"},
    "Binding": START.binding,
    "Dial": Dial("10.0.0.1", "IPv4", None),
    "Collect": Collect(("*.pt",), "~/w", 1 << 30, "/w/runs"),
    "Needs": Needs("~/w", "/w/t.py", ""),
    "Setup": Setup("5891", "uv", "", ("uv.lock",), "~/w", "", {}, 60.0),
    "WorkerSpec": WORKER,
}


def sample(form: str) -> Any:
    """A value of that form."""
    if form.startswith("Tuple["):
        forms = [form[6:-6]] if form.endswith(", ...]") else form[6:-1].split(", ")
        return tuple(map(sample, forms))
    return sample(form[9:-1]) if form.startswith("Optional[") else SAMPLES[form]


def through_json(message: tuple[Any, ...]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json.dumps(messages.as_object(message)))
    return document


@pytest.mark.parametrize("table", [COMMAND_TYPES, REPORT_TYPES], ids=["commands", "reports"])
def test_messages_survive_json(table: dict[str, Any]) -> None:
    for kind in table.values():
        message = kind(*map(sample, kind.__annotations__.values()))
        assert messages.read(table, through_json(message)) == message


def test_nested_records_are_records_again() -> None:
    read = messages.read(COMMAND_TYPES, through_json(START))
    assert (read.binding.how, read.workers[0].argv) == ("listed", ("python", "t.py"))
    assert messages.read(COMMAND_TYPES, through_json(START._replace(binding=None))).binding is None


def test_names_a_missing_field() -> None:
    for op, kind in {**COMMAND_TYPES, **REPORT_TYPES}.items():
        for name in kind.__annotations__:
            fields = through_json(kind(*map(sample, kind.__annotations__.values())))
            del fields[name]
            with pytest.raises(ProtocolError, match=f"^{op} lacks {name}$"):
                messages.read(COMMAND_TYPES if kind in COMMAND_TYPES.values() else REPORT_TYPES, fields)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"status": "7"}, "WorkerExited: status is not of type int"),
        ({"status": True}, "WorkerExited: status is not of type int"),
        ({"at": None}, "WorkerExited: at is not of type float"),
        ({"words": 1}, "WorkerExited: words is not of type str"),
        ({"shm": 1}, "WorkerExited: shm is not a list"),
        ({"shm": [1, "2"]}, "WorkerExited: shm is not of type int"),
        ({"op": "x" * 100}, "unknown message: x{40}$"),
        ({"op": "StartWorkers"}, "unknown message: StartWorkers"),
    ],
)
def test_names_a_field_of_a_wrong_type(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        messages.read(REPORT_TYPES, {**through_json(EXITED), **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workers": [{}]}, "StartWorkers: workers lacks local_rank"),
        ({"workers": [1]}, "StartWorkers: workers is not an object"),
        ({"binding": {"how": "cores", "gpus": 0}}, "StartWorkers: binding lacks cpus"),
        ({"env": {"A": 1}}, r"StartWorkers: env is not of type Dict\[str, str\]"),
    ],
)
def test_names_a_wrong_field_of_a_nested_record(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        messages.read(COMMAND_TYPES, {**through_json(START), **changes})


def test_a_record_has_exactly_its_fields() -> None:
    made = messages.WatchUse(for_s=1.0)
    assert made == messages.WatchUse(1.0) and repr(made) == "WatchUse(for_s=1.0)"
    for values, named in (((), {}), ((1.0, 2.0), {}), ((1.0,), {"for_s": 1.0}), ((), {"x": 1})):
        with pytest.raises(TypeError, match="WatchUse has the fields for_s"):
            messages.WatchUse(*values, **named)
