"""A run as lines of JSON: how it began and every event, with all that `step` needs to live it again.

`distlaunch.runs.replay` reads them.
"""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from distlaunch.contract import INTERFACE_VARIABLES
from distlaunch.job.spec import EnvValue, JobSpec
from distlaunch.job.text import is_secret, redacted
from distlaunch.supervisor.events import Event

VERSION = 5
"""Of events.jsonl: another one as soon as a line can't be read as before."""
_SCALARS = frozenset({int, float, str, bool, type(None)})
BEGAN, NOTICE = "Began", "Notice"
"""The first line, and what was told; the others are events, named after their types."""


def beginning(spec: JobSpec, chance: float) -> dict[str, Any]:
    """The fields of the first line."""
    return {"version": VERSION, "chance": chance, "spec": _brief(without_secrets(spec))}


def fields_of(event: Event) -> dict[str, Any]:
    """The fields of an event's line."""
    fields: dict[str, Any] = event._asdict()  # type: ignore[attr-defined]  # each event has its own fields
    return {name: value if type(value) in _SCALARS else _plain(value) for name, value in fields.items()}


def without_secrets(spec: JobSpec) -> JobSpec:
    """`spec` without values that may be secrets, or were taken from the caller's environment."""
    nodes, spares = (
        tuple(node._replace(env=_open(node.env)) for node in nodes) for nodes in (spec.nodes, spec.spares)
    )
    args, words = tuple(redacted(spec.args)), tuple(redacted(spec.program.words))
    program = spec.program._replace(words=words)
    places = {path: place._replace(typed="") for path, place in spec.places.items()}  # of a --set
    shown = spec._replace(args=args, program=program, places=places)
    return shown._replace(env=_open(spec.env), nodes=nodes, spares=spares)


def _open(env: Mapping[str, EnvValue]) -> dict[str, EnvValue]:
    return {
        name: EnvValue("", inherited=True) if _is_hidden(name, value) else value
        for name, value in env.items()
    }


def _is_hidden(name: str, value: EnvValue) -> bool:
    return is_secret(name) or (value.inherited and name not in INTERFACE_VARIABLES)


def _brief(value: Any) -> Any:
    """`value` for JSON, without the fields that have their defaults."""
    if not hasattr(value, "_asdict"):
        return _plain(value, _brief)
    known, fields = value._field_defaults, value._asdict().items()
    # A name, which tells one kind of transport from another, is kept.
    return {
        name: _brief(inner)
        for name, inner in fields
        if name not in known or known[name] != inner or name == "name"
    }


def _plain(value: Any, inside: Callable[[Any], Any] | None = None) -> Any:
    """`value` for JSON; what it holds by `inside`, which is this function, too, where it is not given."""
    each = inside or _plain
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(name): each(inner) for name, inner in value.items()}
    if isinstance(value, tuple | list | frozenset):
        return [each(inner) for inner in value]
    return value.value if isinstance(value, Enum) else value
