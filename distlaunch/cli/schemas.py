"""JSON Schemas of the output of `--json`, and of the files in a run directory that programs read.

A shape is a type, None, a dict from fields to shapes, a list with the shape of its items, or a tuple of
alternatives. A field that may be missing ends in "?". If the code has a type for a document, the shape is
derived from that type's annotations.
"""

import typing
from collections.abc import Callable, Mapping
from enum import Enum
from types import UnionType
from typing import Any, Literal

from distlaunch.agent.frozen import Frozen
from distlaunch.check.findings import Finding
from distlaunch.errors import UsageError
from distlaunch.launch.port_check import PortReport
from distlaunch.observers.model import Row
from distlaunch.runs.replay import fields_of
from distlaunch.runs.report import VERSION as REPORT_VERSION
from distlaunch.runs.report import Attempt, End
from distlaunch.runs.timeline import Span
from distlaunch.runs.why import INNER, Explanation
from distlaunch.supervisor.codec import BEGAN, MESSAGE
from distlaunch.supervisor.codec import VERSION as EVENTS_VERSION
from distlaunch.supervisor.status import RunState, Status
from distlaunch.supervisor.step import HANDLERS

Shape = Any
Schema = dict[str, Any]


class Document(Frozen):
    """A kind of document: its source, its shape, and its version.

    The version changes if a field is removed or changes its meaning, but not if a field is added.
    """

    source: str
    shape: Callable[[], Shape]
    version: int = 1


_CODE = {"tree": str, "root": str, "files": int, "size": int, "commit": str, "dirty": bool}
_CERTAINTY = Literal["fact", "likely", "unknown"]


def _result() -> Shape:
    place = {"rank": int | None, "node": str | None}
    cause = {"text": str, "kind": str | None, "certainty": _CERTAINTY, **place, "last_output": [str]}
    worker = {"rank": int, "node": str, "phase": str, "status": int | None, "stopped": bool}
    failure = {"kind": str, "words": str}
    return {
        "exit_status": int,
        "cause": (cause, None),
        "hint": str | None,
        "lagging": [str],
        "restarts": [{"why": str, "cause": str, "rank": int | None, "kind": str | None}],
        "seconds": float,
        "world_size": int,
        "code": (_CODE, None),
        "collected": [{"node": str, "path": str, "size": int}],
        "collecting": [str],
        "workers": [{**worker, "pid": int | None, "cpus": str | None}],
        "nodes": [{"name": str, "phase": str, "failure": (failure, None)}],
        "directory": str | None,
        "remote_directories": Mapping[str, str],
    }


def _plan() -> Shape:
    worker = {"rank": int, "local_rank": int, "device": str, "argv": [str]}
    node = {"node_rank": int, "name": str, "transport": str, "gpus": int | None, "python": str | None}
    variables = {"env": Mapping[str, str | None], "defaults": Mapping[str, str]}
    interface = ({"name": str, "why": str}, None)
    return {
        "name": str,
        "world_size": int,
        "backend": str,
        "master_addr": str | None,
        "master_port": int | None,
        "numa_binding": str | None,
        "cpu_binding": str | list[str] | None,
        "code": (_CODE, None),
        "nodes": [{**node, "workdir": str, "workers": [{**worker, **variables}], "interface": interface}],
    }


def _findings() -> Shape:
    lists = {"fine": [str], "unchecked": [str], "ranks": Mapping[str, Any], "links?": Mapping[str, Any]}
    differs = Mapping[str, Mapping[str, str]]
    return {"ok": bool, "findings": [fields_of(Finding)], "differs": differs, **lists}


def _why() -> Shape:
    known = {name: kind for name, kind in fields_of(Explanation).items() if name not in INNER}
    return {"run": str, "state": RunState, "exit_status": int | None, **known}


def _report() -> Shape:
    return {
        "version": int,
        "why": _why(),
        "seconds": float,
        "ledger": Mapping[str, float],
        "spans": [{**fields_of(Span), "lane": str | None}],
        "attempts": [fields_of(Attempt)],
        "ripple": [fields_of(End)],
        "ranks": [{**fields_of(Row), "printed": int}],
        "last_output": Mapping[str, Mapping[str, list[str]]],
        "messages": [{"at": float, "level": str, "text": str}],
    }


def _run() -> Shape:
    controller = {"host": str, "pid": int}
    times = {"age": float, "silent": float | None}
    return {**fields_of(Status), "controller": controller, "why": str | None, **times, "directory": str}


def _events() -> Shape:
    line = {"t": float, "time": float}
    recorded = {"version": int, "distlaunch": str, "chance": float, "spec": Mapping[str, Any]}
    began = {"event": Literal[BEGAN], **recorded}
    message = {"event": Literal[MESSAGE], "level": str, "text": str, "remark?": bool}
    others = [{"event": Literal[kind.__name__], **fields_of(kind)} for kind in HANDLERS]
    return tuple({**line, **each} for each in (began, message, *others))


DOCUMENTS = {
    "plan": Document("dry-run --json, and plan.json", _plan),
    "result": Document("run --json, and summary.json", _result),
    "findings": Document("check --json", _findings),
    "ports": Document("check-port --json", lambda: [{**fields_of(PortReport), "ok": bool}]),
    "why": Document("why --json", _why),
    "report": Document("report --json", _report, REPORT_VERSION),
    "run": Document("wait --json and stop --json", _run),
    "runs": Document("ps --json", lambda: [_run()]),
    "events": Document("a line of events.jsonl", _events, EVENTS_VERSION),
}
"""The documents by name. The schema of job files comes from `distlaunch.job.keys` instead."""


def schema_of(name: str) -> Schema:
    """Return the JSON Schema (draft 2020-12) of a document. Raises `UsageError` if the name is unknown."""
    if name not in DOCUMENTS:
        raise UsageError(f"no schema {name!r}; schemas are available for {', '.join(('job', *DOCUMENTS))}")
    source, shape, version = DOCUMENTS[name]
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"distlaunch {name}"}
    return {**head, "$comment": f"{source}; version {version}", "version": version, **_schema(shape())}


_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", None: "null"}


def _schema(shape: Shape) -> Schema:
    """Return the JSON Schema of a shape."""
    match shape:
        case dict():
            fields = {name.rstrip("?"): _schema(inner) for name, inner in shape.items()}
            needed = [name for name in shape if not name.endswith("?")]
            return {"type": "object", "properties": fields, "required": needed}
        case list():
            return {"type": "array", "items": _schema(shape[0])}
        case tuple():
            return {"anyOf": [_schema(each) for each in shape]}
    return {"type": _PLAIN[shape]} if shape in _PLAIN else _of_type(shape)


def _of_type(kind: Any) -> Schema:
    """Return the JSON Schema of a type in annotations."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, UnionType):
        schema = _schema(inner)
    elif origin is Literal:
        schema = {"enum": list(inner)}
    elif origin is tuple and inner[-1] is not Ellipsis:
        schema = {"type": "array", "prefixItems": [_schema(each) for each in inner], "items": False}
    elif origin in (tuple, list):
        schema = _schema([inner[0]])
    elif origin is not None:  # a mapping
        schema = {"type": "object", "additionalProperties": _schema(inner[1])}
    elif kind is Any:
        schema = {}
    elif issubclass(kind, Enum):
        schema = {"enum": [each.value for each in kind]}
    else:
        schema = _schema(fields_of(kind))
    return schema
