"""Thousands of workers and nodes in a frozen state: to replace one, or to count, takes no look at all."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

S = TypeVar("S", bound="Many[Any]")
T = TypeVar("T")
CHUNK = 64
"""A replacement copies as many items, and as many chunks as there are."""


class Many(Sequence[T], Generic[T]):
    """A frozen sequence. Subclasses say in `_weigh` what is counted of an item; `counts` are the sums."""

    __slots__ = ("_chunks", "_size", "counts")

    def __init__(self, items: Iterable[T] = ()) -> None:
        found = tuple(items)
        self._size = len(found)
        self._chunks = tuple(found[i : i + CHUNK] for i in range(0, self._size, CHUNK))
        self.counts = tuple(map(sum, zip(*map(self._weigh, found), strict=True)))

    @staticmethod
    def _weigh(item: T) -> tuple[int, ...]:
        return ()

    def replaced(self: S, index: int, item: Any) -> S:  # noqa: PYI019  # Self comes with Python 3.11
        """This with another item there."""
        number, place = divmod(index, CHUNK)
        chunk = self._chunks[number]
        new = object.__new__(type(self))
        new._size = self._size
        changed = (*chunk[:place], item, *chunk[place + 1 :])
        new._chunks = (*self._chunks[:number], changed, *self._chunks[number + 1 :])
        before, after = self._weigh(chunk[place]), self._weigh(item)
        if before == after:
            new.counts = self.counts
        else:
            sums = zip(self.counts, before, after, strict=True)
            new.counts = tuple(count - less + more for count, less, more in sums)
        return new

    def _count(self, number: int) -> int:
        return self.counts[number] if self.counts else 0

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        """One item, or a tuple of some."""
        if isinstance(index, slice):
            return tuple(self)[index]
        if not -self._size <= index < self._size:
            raise IndexError(index)
        number, place = divmod(index % self._size, CHUNK)
        return self._chunks[number][place]

    def __len__(self) -> int:
        """How many there are."""
        return self._size

    def __iter__(self) -> Iterator[T]:
        """All of them, in order."""
        for chunk in self._chunks:
            yield from chunk

    def __eq__(self, other: object) -> bool:
        """Whether all items are equal; a plain tuple of them will do."""
        if isinstance(other, Many):
            return self._chunks == other._chunks
        return tuple(self) == other

    def __hash__(self) -> int:
        """As equal ones have."""
        return hash(self._chunks)

    def __repr__(self) -> str:
        """As a list of the items."""
        return f"{type(self).__name__}({list(self)!r})"
