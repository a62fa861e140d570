"""A run as lines of JSON: the beginning and every event, with all data that `step` needs for a replay.

`distlaunch.runs.replay` reads these lines.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Any

from distlaunch.contract import INTERFACE_VARIABLES
from distlaunch.job.spec import EnvValue, JobSpec, NodeSpec
from distlaunch.job.text import REDACTED, is_hidden, is_secret, masked, redacted
from distlaunch.supervisor.events import Event

VERSION = 7
"""Version of events.jsonl. It changes whenever the format of a line changes incompatibly."""
BEGAN, MESSAGE = "Began", "Message"
"""Names of the first line, and of messages. Other lines are events, named after their types."""


def beginning(spec: JobSpec, chance: float) -> dict[str, Any]:
    """Return the fields of the first line."""
    return {"version": VERSION, "chance": chance, "spec": _plain(without_secrets(spec), of_spec=True)}


def fields_of(event: Event) -> dict[str, Any]:
    """Return the fields of the line for an event."""
    fields: dict[str, Any] = _plain(event)
    return fields


def without_secrets(spec: JobSpec) -> JobSpec:
    """Return `spec` without values that may be secrets or come from the environment of the caller."""
    nodes, spares = (tuple(map(_shown_node, nodes)) for nodes in (spec.nodes, spec.membership.spares))
    program = spec.program._replace(env=_shown_env(spec.program.env))
    places = {path: place._replace(typed="") for path, place in spec.places.items()}  # of a --set
    membership = spec.membership._replace(spares=spares)
    return spec._replace(nodes=nodes, program=program, membership=membership, places=places)


def _shown_node(node: NodeSpec) -> NodeSpec:
    return node._replace(env=_shown_env(node.env))


def _shown_env(env: Mapping[str, EnvValue]) -> dict[str, EnvValue]:
    """Return `env`, with each hidden value replaced by "" and marked as inherited."""
    return {
        name: EnvValue("", inherited=True) if _is_hidden(name, value) else value
        for name, value in env.items()
    }


def _is_hidden(name: str, value: EnvValue) -> bool:
    inherited = value.inherited and name not in INTERFACE_VARIABLES
    return inherited or is_hidden(name, value.text)


def _plain(value: Any, of_spec: bool = False) -> Any:
    """Convert `value` to JSON types. If `of_spec`, leave out fields with default values, and hide secrets."""
    if hasattr(value, "_asdict"):
        defaults = value._field_defaults if of_spec else {}
        fields = value._asdict().items()
        # The name is kept because it distinguishes the kinds of transports.
        value = {k: each for k, each in fields if k not in defaults or defaults[k] != each or k == "name"}
    if isinstance(value, Mapping):
        plain = {str(name): _plain(inner, of_spec) for name, inner in value.items()}
        hidden = {name for name in plain if of_spec and isinstance(plain[name], str) and is_secret(name)}
        return {**plain, **dict.fromkeys(hidden, REDACTED)}
    if isinstance(value, tuple | list | frozenset):
        words = list(value)
        if of_spec and all(type(inner) is str for inner in words):
            words = redacted(words)
        return [_plain(inner, of_spec) for inner in words]
    if isinstance(value, Enum):
        return value.value
    return masked(value) if of_spec and isinstance(value, str) else value
