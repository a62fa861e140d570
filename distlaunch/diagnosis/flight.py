"""Dumps from torch's flight recorder: the ranks waiting in a collective, and those that never called it.

torch's NCCL watchdog writes a dump per rank when a collective times out, or on request
(torch/csrc/distributed/c10d/FlightRecorderDetail.hpp). The format is a pickle of plain containers, version 2.
A call is recorded once its communicator exists, so a rank that waits for others to create one has no record.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from math import prod
from typing import Any, TypeGuard

from distlaunch.agent.frozen import Frozen
from distlaunch.wording import counted, listed, rank_list

MAX_NAMED = 16
"""Maximum ranks whose last collective is shown."""
MAX_NUMBER, MAX_TEXT, MAX_DIMENSIONS = 1 << 63, 200, 16
"""Limits of numbers, texts and tensors: a dump may contain anything."""
MAX_ENTRIES, MAX_GROUPS = 1 << 14, 1 << 10
"""Limits for one dump: the recorder keeps 2000 calls by default, and nodes may send anything."""
KEPT = 64
"""Calls to keep for each rank and group. Other ranks may still wait in one that has ended for this rank."""
UNNAMED = "undefined"
"""torch's description of a group that the script has not described."""
OF_EQUAL_TENSORS = ("all_reduce", "broadcast", "reduce", "_all_gather_base", "_reduce_scatter_base")
"""torch's names for collectives to which all ranks pass tensors of the same size and type."""


class Call(Frozen):
    """A rank's call of a collective in a process group: its number, name and place, and whether it has ended.

    `tensor` describes what it passed, if all ranks have to pass the same; otherwise, it is "".
    """

    number: int
    name: str
    tensor: str
    place: str
    ended: bool

    @property
    def words(self) -> str:
        """Return the collective and its place: `all_reduce at train.py:12`."""
        return f"{self.name} at {self.place}"


class Hang(Frozen):
    """A collective that hangs in a process group: the calls of the ranks that reached it.

    `late` maps the ranks that didn't to their last calls; `unknown` are those without a record of the group.
    If both are empty, the ranks called different collectives, or passed different tensors.
    """

    group: str
    number: int
    calls: Mapping[int, Call]
    late: Mapping[int, Call] = {}
    unknown: Sequence[int] = ()

    @property
    def waiting(self) -> list[int]:
        """Return the ranks for which the collective has not ended."""
        return [rank for rank, call in self.calls.items() if not call.ended]

    def line(self, finished: Collection[int]) -> str:
        """Return one line that explains why ranks are waiting. `finished` ranks have exited with 0."""
        if not (self.late or self.unknown):
            return f"collective #{self.number} of {self.group} differs: {listed(self._callers())}"
        first, verb = self.calls[self.waiting[0]], "was" if len(self.waiting) == 1 else "were"
        where = f"{first.name} #{self.number} of {self.group}, called at {first.place}"
        text = f"{rank_list(self.waiting)} {verb} waiting in {where}"
        if self.late:
            names = [f"rank {rank} (last in {call.words})" for rank, call in self.late.items()]
            text += f", never reached by {listed(names, MAX_NAMED)}"
        ended = [rank for rank in self.unknown if rank in finished]
        lost = [rank for rank in self.unknown if rank not in finished]
        text += f"; {rank_list(ended)} had finished" if ended else ""
        return f"{text}; no record of {rank_list(lost)}" if lost else text

    def _callers(self) -> list[str]:
        by_name = len({call.name for call in self.calls.values()}) > 1
        callers: dict[str, list[int]] = {}
        for rank, call in self.calls.items():
            what = call.name if by_name or not call.tensor else f"{call.name} with {call.tensor}"
            callers.setdefault(what, []).append(rank)
        places = {what: self.calls[ranks[0]].place for what, ranks in callers.items()}
        return [f"{rank_list(ranks)} called {what} at {places[what]}" for what, ranks in callers.items()]


def waiting_lines(
    dumps: Iterable[tuple[int, Any]], world_size: int, finished: Collection[int] = ()
) -> list[str]:
    """Return a line for each process group whose members are waiting for each other, the likely origin first.

    `dumps` contains ranks with their unpickled dumps, in order. Malformed dumps are ignored. `finished` ranks
    have exited with 0, and may have no dump.
    """
    hangs = [hang for group in _groups(dumps, world_size) if (hang := group.hang())]
    waiting = {rank for hang in hangs for rank in hang.waiting}
    # A missing rank that waits in another group only passes on the other group's problem.
    hangs.sort(key=lambda hang: (sum(rank in waiting for rank in (*hang.late, *hang.unknown)), hang.group))
    return [hang.line(finished) for hang in hangs]


class Group(Frozen):
    """A process group: its name in messages, its known members, and the latest calls of each, by number."""

    name: str
    members: Sequence[int]
    calls: Mapping[int, Mapping[int, Call]]

    def hang(self) -> Hang | None:
        """Return the collective in which members wait for others, or that they called differently.

        GPUs run collectives later than they are called. The first one that hasn't ended is the one that
        hangs, unless it has ended for others who called it alike: they wait in a later one.
        """
        unknown = [rank for rank in self.members if rank not in self.calls]
        last = {rank: max(calls) for rank, calls in self.calls.items()}
        unended = {call.number for calls in self.calls.values() for call in calls.values() if not call.ended}
        for number in sorted(unended):
            calls = {rank: each[number] for rank, each in self.calls.items() if number in each}
            names = {call.name for call in calls.values()}
            tensors = {call.tensor for call in calls.values() if call.tensor}
            if len(names) > 1 or len(tensors) > 1:
                return Hang(self.name, number, calls)
            late = {rank: self.calls[rank][latest] for rank, latest in last.items() if latest < number}
            if late or unknown:
                return Hang(self.name, number, calls, late, unknown)
            if not any(call.ended for call in calls.values()):
                return None  # they all wait in it
        return None


def _groups(dumps: Iterable[tuple[int, Any]], world_size: int) -> list[Group]:
    """Return the process groups in the dumps, with the latest calls of each member."""
    found: dict[tuple[str, str], dict[int, Mapping[int, Call]]] = {}
    members: dict[str, Sequence[int]] = {}
    for rank, dump in ((rank, _mapping(dump)) for rank, dump in dumps):
        for name, config in islice(_mapping(dump.get("pg_config")).items(), MAX_GROUPS):
            members.setdefault(_text(name), _ranks(_mapping(config).get("ranks"), world_size))
        for group, calls in _latest_calls(dump).items():
            found.setdefault(group, {})[rank] = calls
    groups = []
    for (name, description), by_rank in found.items():
        guess = range(world_size) if description in ("default_pg", "") else sorted(by_rank)
        known = members.get(name) or guess
        unnamed = f"group {name}" if name else "the default group"
        title = description if description not in ("", UNNAMED) else unnamed
        groups.append(Group(title, known, {rank: by_rank[rank] for rank in known if rank in by_rank}))
    return groups


def _latest_calls(dump: Mapping[str, Any]) -> dict[tuple[str, str], Mapping[int, Call]]:
    """Return the calls in each process group, keyed by the group's name and description, and by number.

    Only the last KEPT are returned, and the first KEPT that have not ended.
    """
    found: dict[tuple[str, str], dict[int, Call]] = {}
    entries = dump.get("entries")
    for entry in map(_mapping, entries[-MAX_ENTRIES:] if isinstance(entries, list) else ()):
        group, number = entry.get("process_group"), entry.get("collective_seq_id")
        if entry.get("is_p2p") or not _is_number(number) or not isinstance(group, tuple | list):
            continue
        key = (_text(group[0]), _text(group[-1])) if group else ("", "")
        name = _text(entry.get("profiling_name"), "a collective").rpartition(":")[2]
        ended = bool(entry.get("retired")) or entry.get("state") == "completed"
        tensor = _tensor(entry) if name in OF_EQUAL_TENSORS else ""
        if key in found or len(found) < MAX_GROUPS:
            found.setdefault(key, {})[number] = Call(number, name, tensor, _place(entry), ended)
    return {key: _kept(calls) for key, calls in found.items()}


def _kept(calls: Mapping[int, Call]) -> Mapping[int, Call]:
    numbers = sorted(calls)
    unended = [number for number in numbers if not calls[number].ended]
    return {number: calls[number] for number in {*unended[:KEPT], *numbers[-KEPT:]}}


def _tensor(entry: Mapping[str, Any]) -> str:
    """Return the size and type of a call's tensor: `65536 float values`; "" if it isn't one tensor."""
    sizes, types = entry.get("input_sizes"), entry.get("input_dtypes")
    if not (isinstance(sizes, list) and isinstance(types, list) and len(sizes) == len(types) == 1):
        return ""
    (size,) = sizes
    if not isinstance(size, list) or len(size) > MAX_DIMENSIONS or not all(map(_is_number, size)):
        return ""
    return counted(prod(size), f"{_text(types[0]).lower()} value")


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
