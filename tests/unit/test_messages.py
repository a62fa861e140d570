"""The messages between controller and agent: encoding, decoding, and the names of wrong fields."""

import json
from typing import Any

import pytest

from distlaunch.agent import messages
from distlaunch.agent.messages import COMMAND_TYPES, REPORT_TYPES, Binding, StartWorkers, WorkerSpec
from distlaunch.agent.wire import ProtocolError

WORKER = WorkerSpec(0, ("python", "t.py"), "/w", (0, 1), {"A": "b"}, {}, False, ())
BINDING = Binding("listed", 0, ("0-3",))
START = StartWorkers(1, "id", 10.0, 30.0, {}, (WORKER,), watch_port=29500, hosts_store=True, binding=BINDING)
EXITED = messages.WorkerExited(0, 0, -9, 12.5, {"message": "m", "callstack": ""}, 0, (1, 2), "words")
SAMPLES: dict[str, Any] = {
    "Any": 1,
    "bool": True,
    "int": 7,
    "float": 0.5,
    "str": "text",
    "Dict[str, str]": {"a": "b"},
    "Binding": BINDING,
    "Dial": messages.Dial("10.0.0.1", "IPv4", None),
    "Collect": messages.Collect(("*.pt",), "~/w", 1 << 30, "/w/runs"),
    "Needs": messages.Needs("~/w", "/w/t.py", ""),
    "Setup": messages.Setup("uv", "", ("uv.lock",), "~/w", "", {}, 60.0),
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
def test_messages_survive_json_unless_a_field_is_missing(table: dict[str, Any]) -> None:
    for op, kind in table.items():
        message = kind(*map(sample, kind.__annotations__.values()))
        assert messages.read(table, through_json(message)) == message
        for name in kind.__annotations__:
            fields = through_json(message)
            del fields[name]
            with pytest.raises(ProtocolError, match=f"^{op} lacks {name}$"):
                messages.read(table, fields)


def test_a_nested_record_is_a_record_again_or_none() -> None:
    assert messages.read(COMMAND_TYPES, through_json(START)).binding.how == "listed"
    assert messages.read(COMMAND_TYPES, through_json(START._replace(binding=None))).binding is None


@pytest.mark.parametrize(
    ("table", "message", "changes", "words"),
    [
        (REPORT_TYPES, EXITED, {"status": "7"}, "WorkerExited: status is not of type int"),
        (REPORT_TYPES, EXITED, {"status": True}, "WorkerExited: status is not of type int"),
        (REPORT_TYPES, EXITED, {"at": None}, "WorkerExited: at is not of type float"),
        (REPORT_TYPES, EXITED, {"words": 1}, "WorkerExited: words is not of type str"),
        (REPORT_TYPES, EXITED, {"shm": 1}, "WorkerExited: shm is not a list"),
        (REPORT_TYPES, EXITED, {"shm": [1, "2"]}, "WorkerExited: shm is not of type int"),
        (REPORT_TYPES, EXITED, {"op": "x" * 100}, "unknown message: x{40}$"),
        (REPORT_TYPES, EXITED, {"op": "StartWorkers"}, "unknown message: StartWorkers"),
        (COMMAND_TYPES, START, {"workers": [{}]}, "StartWorkers: workers lacks local_rank"),
        (COMMAND_TYPES, START, {"workers": [1]}, "StartWorkers: workers is not an object"),
        (COMMAND_TYPES, START, {"binding": {"how": "a", "gpus": 0}}, "StartWorkers: binding lacks cpus"),
        (COMMAND_TYPES, START, {"env": {"A": 1}}, r"StartWorkers: env is not of type Dict\[str, str\]"),
    ],
)
def test_names_a_field_of_a_wrong_type(table: Any, message: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        messages.read(table, {**through_json(message), **changes})


def test_a_record_has_exactly_its_fields() -> None:
    made = messages.WatchUse(for_s=1.0)
    assert made == messages.WatchUse(1.0) and repr(made) == "WatchUse(for_s=1.0)"
    for values, named in (((), {}), ((1.0, 2.0), {}), ((1.0,), {"for_s": 1.0}), ((), {"x": 1})):
        with pytest.raises(TypeError, match="WatchUse has the fields for_s"):
            messages.WatchUse(*values, **named)
