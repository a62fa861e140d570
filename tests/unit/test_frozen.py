"""What stands in for typing.NamedTuple does what that does."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from distlaunch.agent.frozen import Frozen


class Ours(Frozen):
    """Words."""

    one: int
    two: str = "b"
    three: tuple[int, ...] = ()

    @property
    def doubled(self) -> int:
        return 2 * self.one


class Theirs(NamedTuple):
    """Words."""

    one: int
    two: str = "b"
    three: tuple[int, ...] = ()

    @property
    def doubled(self) -> int:
        return 2 * self.one


@pytest.mark.parametrize(
    "use",
    [
        lambda kind: tuple(kind(1)),
        lambda kind: tuple(kind(1, "c", (3,))),
        lambda kind: tuple(kind(one=1, three=(2,))),
        lambda kind: tuple(kind(1, three=(2,))),
        lambda kind: (kind(1).one, kind(1).two, kind(1).three, kind(1).doubled),
        lambda kind: kind(1)._asdict(),
        lambda kind: tuple(kind(1)._replace(two="x")),
        lambda kind: repr(kind(1, "it's")).partition("(")[2],
        lambda kind: (kind._fields, kind._field_defaults, kind.__doc__),
        lambda kind: kind(1) == (1, "b", ()),
        lambda kind: hash(kind(1)) == hash((1, "b", ())),
        lambda kind: len({kind(1), kind(1), kind(2)}),
    ],
)
def test_behaves_like_a_named_tuple(use: Callable[[Any], Any]) -> None:
    assert use(Ours) == use(Theirs)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda kind: kind(),
        lambda kind: kind(1, "b", (), 4),
        lambda kind: kind(1, one=1),
        lambda kind: kind(1, four=4),
    ],
)
def test_refuses_what_a_named_tuple_refuses(misuse: Callable[[Any], Any]) -> None:
    for kind in (Ours, Theirs):
        with pytest.raises(TypeError):
            misuse(kind)


def test_a_field_can_not_be_set() -> None:
    for value in (Ours(1), Theirs(1)):
        with pytest.raises(AttributeError):
            setattr(value, "one", 2)  # noqa: B010 — mypy would not have it otherwise


def test_a_pattern_finds_fields_by_name() -> None:
    match Ours(1, "x"):
        case Ours(one=1, two=str(word)):
            assert word == "x"
        case _:
            raise AssertionError
