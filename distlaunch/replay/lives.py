"""Lives a run again: reads its history, and takes it through `step`, event by event."""

import functools
import json
import typing
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from types import UnionType
from typing import Any, NamedTuple

from distlaunch.errors import DistlaunchError
from distlaunch.job.spec import JobSpec
from distlaunch.replay.history import BEGAN, NOTICE, VERSION
from distlaunch.state.actions import Action
from distlaunch.state.events import Event
from distlaunch.state.job import State
from distlaunch.supervisor.step import begin, step
from distlaunch.transports.slurm import Slurm
from distlaunch.transports.ssh import Ssh
from distlaunch.transports.transport import Command, Joined, Local, Transport


class HistoryError(DistlaunchError):
    """What was read is not the history of a run, or of a version that is not known here."""


class Happened(NamedTuple):
    """An event, `at` seconds after the run began."""

    at: float
    event: Event


class History(NamedTuple):
    """A run: what was wanted of it, the chance it was given, what happened, what it told its user."""

    spec: JobSpec
    chance: float
    began_at: float
    happened: tuple[Happened, ...]
    told: tuple[str, ...] = ()


class Moment(NamedTuple):
    """One step of a run: `event` is None at its beginning."""

    at: float
    event: Event | None
    state: State
    actions: tuple[Action, ...]


def replay(history: History) -> Iterator[Moment]:
    """The run again, step by step."""
    state, actions = begin(history.spec, history.began_at, history.chance)
    yield Moment(history.began_at, None, state, actions)
    for at, event in history.happened:
        state, actions = step(state, event, at)
        yield Moment(at, event, state, actions)


def loaded(text: str) -> Iterator[dict[str, Any]]:
    """The lines of an events.jsonl; the last may lack its end. Raises `HistoryError`."""
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        try:
            if line:
                yield json.loads(line)
        except ValueError:
            if number < len(lines):
                raise HistoryError(f"line {number}: not JSON") from None


def read(lines: Iterable[Mapping[str, Any]]) -> History:
    """The history that these lines tell. Raises `HistoryError`, which names the line."""
    numbered = enumerate(lines, 1)
    _, first = next(numbered, (0, {}))
    spec = beginning_in(first)
    told: list[str] = []
    happened: list[Happened] = []
    for number, line in numbered:
        if line.get("event") == NOTICE:
            told += [] if line.get("remark") else [line["text"]]
        else:
            happened.append(happened_in(number, line))
    return History(spec, first["chance"], first["t"], tuple(happened), tuple(told))


def beginning_in(first: Mapping[str, Any]) -> JobSpec:
    """What was wanted of a run, by its first line. Raises `HistoryError`."""
    if first.get("event") != BEGAN or first.get("version") != VERSION:
        raise HistoryError(f"line 1: not the start of a version {VERSION} history")
    spec: JobSpec = typed(JobSpec, first["spec"])
    return spec


def happened_in(number: int, line: Mapping[str, Any]) -> Happened:
    """The event that line `number` tells. Raises `HistoryError`."""
    fields = {name: value for name, value in line.items() if name not in ("event", "t", "time")}
    kind = _EVENTS.get(line.get("event"))
    if kind is None:
        raise HistoryError(f"line {number}: unknown event: {line.get('event')!r}")
    try:
        return Happened(typed(float, line["t"]), typed(kind, fields))
    except (KeyError, TypeError, ValueError) as error:
        raise HistoryError(f"line {number}: {kind.__name__}: {error}") from None


_EVENTS: Mapping[Any, type] = {kind.__name__: kind for kind in typing.get_args(Event)}


_TRANSPORTS = Command | Joined | Local | Slurm | Ssh


def typed(kind: Any, value: Any) -> Any:
    """`value`, as JSON has it, as an object of type `kind`. Raises TypeError or ValueError."""
    kind = _TRANSPORTS if kind is Transport else kind
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, UnionType):
        return _one_of(inner, value)
    if kind is Any:
        return value
    if origin is typing.Literal:
        return inner[inner.index(value)]
    if origin in (tuple, frozenset):
        return _sequence(origin, inner, value)
    if origin is not None:  # a mapping; JSON has made texts of its keys
        return {typed(inner[0], inner[0](key)): typed(inner[1], each) for key, each in value.items()}
    return _plain_typed(kind, value)


def _plain_typed(kind: Any, value: Any) -> Any:
    if issubclass(kind, Enum):
        return kind(value)
    if hasattr(kind, "_fields"):
        hints = _hints(kind)
        return kind(**{name: typed(hints[name], inner) for name, inner in value.items()})
    if kind is float and isinstance(value, int):
        return float(value)
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value


@functools.cache
def _hints(kind: type) -> Mapping[str, Any]:
    return typing.get_type_hints(kind)


def _sequence(origin: Any, inner: tuple[Any, ...], value: Any) -> Any:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is not a list")
    if origin is frozenset or inner[-1] is Ellipsis:
        return origin(typed(inner[0], each) for each in value)
    return tuple(typed(each, part) for each, part in zip(inner, value, strict=True))


def _one_of(kinds: Iterable[Any], value: Any) -> Any:
    for kind in kinds:
        try:
            return typed(kind, value)
        except (TypeError, ValueError, AttributeError, KeyError):
            continue
    raise TypeError(f"{value!r} is not allowed here")
