"""Reads the flight recorders' dumps: which ranks never reached the last collective.

torch's NCCL watchdog dumps them when a collective times out (torch/csrc/distributed/c10d/FlightRecorder);
the form is a pickle of plain containers, of version 2.
"""

import io
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

MAX_DUMP = 64 << 20
"""Bytes of a dump that is read."""
MAX_NAMED = 16


class Collective(NamedTuple):
    """A rank's last collective in a process group: its number, its name, and where the script called it."""

    number: int
    name: str
    place: str


class _PlainData(pickle.Unpickler):
    """Containers, strings and numbers only: a dump comes from a node, and pickle can run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a dump may not load {module}.{name}")


def lagging_words(folder: Path, world_size: int) -> list[str]:
    """One line for each process group with ranks that never reached its last collective."""
    last: dict[str, dict[int, Collective]] = {}
    for path in sorted(folder.glob("rank*.flight")):
        rank = int(path.stem.removeprefix("rank"))
        for group, collective in last_collectives(_entries(path)).items():
            last.setdefault(group, {})[rank] = collective
    return [line for group, ranks in sorted(last.items()) if (line := _line(group, ranks, world_size))]


def last_collectives(entries: Sequence[Mapping[str, Any]]) -> dict[str, Collective]:
    """Process group → the last collective that was called in it, of one rank's dump."""
    found: dict[str, Collective] = {}
    for entry in entries:
        group, number = entry.get("process_group"), entry.get("collective_seq_id")
        if entry.get("is_p2p") or not isinstance(number, int) or not isinstance(group, (tuple, list)):
            continue
        name = str(group[-1] if group else "")
        if name not in found or number >= found[name].number:
            found[name] = Collective(number, _name(entry), _place(entry))
    return found


def _entries(path: Path) -> Sequence[Mapping[str, Any]]:
    if path.stat().st_size > MAX_DUMP:
        return ()
    try:
        dump = _PlainData(io.BytesIO(path.read_bytes())).load()
    except Exception:  # what pickle raises for bytes that are no pickle is not bounded (its documentation)
        return ()
    entries = dump.get("entries") if isinstance(dump, dict) else None
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else ()


def _name(entry: Mapping[str, Any]) -> str:
    return str(entry.get("profiling_name", "a collective")).rpartition(":")[2]


def _place(entry: Mapping[str, Any]) -> str:
    """The innermost frame that is not torch's own."""
    frames = entry.get("frames")
    for frame in frames if isinstance(frames, list) else ():
        file = str(frame.get("filename", "")) if isinstance(frame, dict) else ""
        if file and "/torch/" not in file:
            return f"{file.rpartition('/')[2]}:{frame.get('line')}"
    return "?"


def _line(group: str, ranks: Mapping[int, Collective], world_size: int) -> str:
    newest = max(ranks.values(), key=lambda collective: collective.number)
    behind = {rank: last for rank, last in ranks.items() if last.number < newest.number}
    silent = sorted(set(range(world_size)) - set(ranks)) if group in ("default_pg", "") else []
    if not behind and not silent:
        return ""
    names = [f"rank {rank} (last in {last.name} at {last.place})" for rank, last in sorted(behind.items())]
    names += [f"rank {rank} (no record)" for rank in silent]
    shown = ", ".join(names[:MAX_NAMED]) + (
        f" and {len(names) - MAX_NAMED} more" if names[MAX_NAMED:] else ""
    )
    what = f"{newest.name} #{newest.number} of {group}, called at {newest.place}"
    return f"never reached {what}: {shown}"
