"""Dumps from torch's flight recorder: the ranks waiting in a collective, and those that never called it.

torch's NCCL watchdog writes a dump per rank when a collective times out, or on request
(torch/csrc/distributed/c10d/FlightRecorderDetail.hpp). The format is a pickle of plain containers, version 2.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

from distlaunch.agent.frozen import Frozen
from distlaunch.wording import listed, rank_list

MAX_NAMED = 16
"""Maximum ranks whose last collective is shown."""
MAX_NUMBER, MAX_TEXT = 1 << 63, 200
"""Limits of numbers and texts: a dump may contain anything."""


class Call(Frozen):
    """A rank's last collective in a process group: its number, name and place, and whether it has ended."""

    number: int
    name: str
    place: str
    ended: bool

    @property
    def words(self) -> str:
        """Return the collective and its place: `all_reduce at train.py:12`."""
        return f"{self.name} at {self.place}"


class Group(Frozen):
    """A process group: its name in messages, its known members, and the last collective of each."""

    name: str
    members: tuple[int, ...]
    last: Mapping[int, Call]

    @property
    def newest(self) -> int:
        """Return the number of the last collective that any member has called."""
        return max(call.number for call in self.last.values())

    @property
    def missing(self) -> list[int]:
        """Return the members that never called the last collective."""
        newest, numbers = self.newest, {rank: call.number for rank, call in self.last.items()}
        return [rank for rank in self.members if numbers.get(rank, -1) < newest]

    @property
    def waiting(self) -> list[int]:
        """Return the members that called the last collective, which has not ended for them."""
        return [rank for rank, call in self.last.items() if call.number == self.newest and not call.ended]

    def line(self) -> str:
        """Return one line that explains why this group is waiting, or "" if it isn't."""
        there = [self.last[rank] for rank in self.waiting]
        if not there:
            return ""
        if missing := self.missing:
            where = f"{there[0].name} #{self.newest} of {self.name}, called at {there[0].place}"
            names = [f"rank {rank} ({self._last_output(rank)})" for rank in missing]
            verb = "was" if len(there) == 1 else "were"
            missed = f"never reached by {listed(names, MAX_NAMED)}"
            return f"{rank_list(self.waiting)} {verb} waiting in {where}, {missed}"
        callers: dict[str, list[int]] = {}
        for rank in self.waiting:
            callers.setdefault(self.last[rank].name, []).append(rank)
        if len(callers) == 1:
            return ""
        calls = [f"{rank_list(ranks)} called {self.last[ranks[0]].words}" for ranks in callers.values()]
        return f"collective #{self.newest} of {self.name} differs: {listed(calls)}"

    def _last_output(self, rank: int) -> str:
        return f"last in {self.last[rank].words}" if rank in self.last else "no record"


def waiting_lines(dumps: Iterable[tuple[int, Any]], world_size: int) -> list[str]:
    """Return a line for each process group whose members are waiting for each other, the likely origin first.

    `dumps` contains ranks with their unpickled dumps, in order. Malformed dumps are ignored.
    """
    groups = [group for group in _groups(dumps, world_size) if group.last]
    waiting = {rank for group in groups if group.missing for rank in group.waiting}
    # A missing rank that waits in another group only passes on the other group's problem.
    groups.sort(key=lambda group: (sum(rank in waiting for rank in group.missing), group.name))
    return [line for group in groups if (line := group.line())]


def _groups(dumps: Iterable[tuple[int, Any]], world_size: int) -> list[Group]:
    """Return the process groups in the dumps, with the last collective of each member."""
    found: dict[tuple[str, str], dict[int, Call]] = {}
    members: dict[str, tuple[int, ...]] = {}
    for rank, dump in ((rank, _mapping(dump)) for rank, dump in dumps):
        for name, config in _mapping(dump.get("pg_config")).items():
            members.setdefault(_text(name), _ranks(_mapping(config).get("ranks"), world_size))
        for group, call in _last_calls(dump).items():
            found.setdefault(group, {})[rank] = call
    groups = []
    for (name, description), last in found.items():
        guess = range(world_size) if description in ("default_pg", "") else sorted(last)
        title = description or name or "the default group"
        groups.append(Group(title, members.get(name) or tuple(guess), last))
    return groups


def _last_calls(dump: Mapping[str, Any]) -> dict[tuple[str, str], Call]:
    """Return the last collective of each process group, keyed by the group's name and description."""
    found: dict[tuple[str, str], Call] = {}
    entries = dump.get("entries")
    for entry in map(_mapping, entries if isinstance(entries, list) else ()):
        group, number = entry.get("process_group"), entry.get("collective_seq_id")
        if entry.get("is_p2p") or not _is_number(number) or not isinstance(group, tuple | list):
            continue
        key = (_text(group[0]), _text(group[-1])) if group else ("", "")
        if key not in found or number >= found[key].number:
            called = _text(entry.get("profiling_name"), "a collective").rpartition(":")[2]
            ended = bool(entry.get("retired")) or entry.get("state") == "completed"
            found[key] = Call(number, called, _place(entry), ended)
    return found


def _place(entry: Mapping[str, Any]) -> str:
    """Return the innermost frame outside torch."""
    frames = entry.get("frames")
    for frame in map(_mapping, frames if isinstance(frames, list) else ()):
        file, line = _text(frame.get("filename")), frame.get("line")
        if file and "/torch/" not in file:
            return f"{file.rpartition('/')[2]}:{line if _is_number(line) else '?'}"
    return "?"


def _ranks(value: Any, world_size: int) -> tuple[int, ...]:
    """Return the ranks of a group, which torch writes as JSON text."""
    try:
        ranks = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return ()
    known = {rank for rank in ranks if _is_number(rank)} if isinstance(ranks, list | tuple) else set()
    return tuple(rank for rank in range(world_size) if rank in known)


def _text(value: Any, default: str = "") -> str:
    """Return the end of a text. Converting anything else to text could take any memory, or never end."""
    return value[-MAX_TEXT:] if isinstance(value, str) else default


def _is_number(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and 0 <= value < MAX_NUMBER  # longer ones can't be converted to text


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
