"""Whether a run can be lived again from what it has written down."""

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

from distlaunch.observers.run_directory import index_entries
from distlaunch.runs.replay import Moment, lines_in, replay, retold
from distlaunch.runs.timeline import ALL_KINDS, Timeline, ledger
from distlaunch.supervisor.summary import Summary

OF_OUTPUT = {"hint", "lagging", "seconds", "directory", "collected", "collecting"}
"""What a summary has from the ranks' output and files, and from the clock."""


def check_replays(directory: Path) -> None:
    """Live every run again whose directory is somewhere below `directory`."""
    # Not rglob, which fails if a directory vanishes meanwhile, as that of an agent which cleans up.
    found = [Path(place) for place, _, names in os.walk(directory) if "events.jsonl" in names]
    for place in found:
        if (events := place / "events.jsonl").is_file() and events.stat().st_size:
            check_replay(place)
            check_index(place)


def check_replay(directory: Path) -> None:
    """Live a run again: it tells the same, and ends as its summary says."""
    lines = lines_in(directory)
    moments = list(replay(lines))
    difference, summary = retold(lines, moments), directory / "summary.json"
    # A controller that was killed may have written an event, and not what it said of that.
    cut = difference.startswith("recorded: nothing more") and not summary.is_file()
    assert cut or not difference, f"{directory} is told otherwise when it is lived again:\n{difference}"
    if summary.is_file() and not summary.is_symlink() and summary.stat().st_nlink == 1:  # else it was planted
        document = json.loads(summary.read_text())
        end = json.loads(json.dumps(Summary(moments[-1].state, "", {}, 0.0).document()))
        assert _of_state(end) == _of_state(document)
        check_ledger(moments, document["seconds"])


def check_ledger(moments: list[Moment], seconds: float) -> None:
    """Every moment of a run is of one class, and no lane of its timeline has two at once."""
    timeline = Timeline(moments[0].state)
    for moment in moments[1:]:
        timeline.take(moment.event, moment.state, moment.at)
    spans = timeline.spans(seconds)
    assert {span.kind for span in spans} <= set(ALL_KINDS)
    for before, after in pairwise(spans):
        assert before.lane != after.lane or before.ended <= after.began, (before, after)
    total = sum(ledger(spans).values())
    assert abs(total - seconds) <= max(0.01 * seconds, 0.002), (total, seconds)


def check_index(directory: Path) -> None:
    """The index of the output has each file's pieces, once and without a gap."""
    path = directory / "output.index"
    entries = index_entries(path.read_bytes()) if path.is_file() else []
    ends: dict[tuple[int, int, int], int] = {}
    for _, offset, size, rank, attempt, stream in entries:
        key = (attempt, rank, stream)
        end = ends.get(key, 0)
        assert offset == end, f"{directory}: {key} goes on at {offset}, not at {end}"
        ends[key] = offset + size


def _of_state(document: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in document.items() if name not in OF_OUTPUT}
    if kept["cause"]:
        del kept["cause"]["last_output"]
    return kept
