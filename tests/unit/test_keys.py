"""A key is declared once: value, default and what is printed of them come from one line and one field."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from distlaunch.errors import Problem
from distlaunch.job.fields import JOB, reference
from distlaunch.job.types import (
    BUILT,
    Choice,
    Duration,
    Either,
    Field,
    Integer,
    ListOf,
    OrNone,
    Record,
    Switch,
    Text,
    Type,
    built,
    duration_text,
)
from distlaunch.job.yaml_document import parse


class Oven(NamedTuple):
    """What a record may make."""

    preheat_s: float = 600.0
    fan: bool = False
    degrees: int = 180
    mode: str = "top"
    timer_s: float | None = None
    rack: int | None = None
    dishes: tuple[str, ...] = ()
    bell: str = "ding"


BELL = Record({"sound": Field(Text(), "What it says.", field="bell")}, makes=Oven)
OVEN = Record(
    {
        "preheat": Field(Duration(), "Before.", field="preheat_s"),
        "fan": Field(Switch(), "Whether it blows."),
        "degrees": Field(Integer(), "How hot.", ", or so"),
        "mode": Field(Choice(("top", "bottom")), "Where from."),
        "timer": Field(OrNone(Duration()), "How long.", field="timer_s"),
        "rack": Field(Integer(), "Which.", "the middle one"),
        "dishes": Field(ListOf(Text()), "What is in it."),
        "end": Field(BELL, "How it ends."),
        "cook": built(Text(), "Who.", default="me"),
    },
    makes=Oven,
)


def checked(text: str) -> dict[str, object]:
    problems: list[Problem] = []
    given: dict[str, object] | None = OVEN.check(parse(text, "oven"), "", problems)
    assert given is not None
    assert not problems
    return given


def test_the_defaults_are_those_of_what_is_made() -> None:
    assert {key: default for key, _, _, default in reference(OVEN)} == {
        "preheat": "10m",
        "fan": "false",
        "degrees": "180, or so",
        "mode": "top",
        "timer": "none",
        "rack": "the middle one",
        "dishes": "",
        "end": "",
        "end.sound": "ding",
        "cook": "me",
    }
    assert OVEN.made({}) == Oven()
    assert [OVEN.value({}, key) for key in ("preheat", "timer", "cook")] == [600.0, None, "me"]


def test_what_is_given_goes_to_its_field() -> None:
    given = checked("{preheat: 5m, timer: none, dishes: [cake], end: {sound: dong}, cook: you}")
    assert OVEN.made(given) == Oven(preheat_s=300.0, dishes=("cake",), bell="dong")
    assert OVEN.value(given, "cook") == "you"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.5, "0.5s"),
        (1.0, "1s"),
        (90.0, "90s"),
        (600.0, "10m"),
        (5400.0, "90m"),
        (7200.0, "2h"),
        (86400.0, "1d"),
    ],
)
def test_durations_read_as_people_write_them(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
    assert Duration().check(parse(text, "x"), "", []) == seconds


def declared(record: Record) -> Iterator[tuple[Record, str, Field]]:
    for key, entry in record.fields.items():
        yield record, key, entry
        for inner in inside(entry.kind):
            yield from declared(inner)


def inside(kind: Type | None) -> Iterator[Record]:
    match kind:
        case Record():
            yield kind
        case ListOf():
            yield from inside(kind.item)
        case Either():
            yield from (record for part in (kind.items, kind.entries) for record in inside(part))


def test_every_key_of_a_job_has_a_field_with_a_default_or_is_built() -> None:
    for record, key, entry in declared(JOB):
        part = isinstance(entry.kind, Record) and entry.kind.makes is record.makes
        if record.makes and entry.field != BUILT and not part and key not in record.required:
            assert record.field_of(key) in record.makes._field_defaults, key
