"""Words for messages (numbers, times, exits, signals, ports, lists), and the expansion of host ranges."""

import itertools
import re
import signal
from collections.abc import Mapping, Sequence
from typing import Any

NO_SUSPENDING = "a run can't be suspended; to free the terminal, start it with `distlaunch run --detach`"
NO_SUSPENDING_TORCHRUN = "a run can't be suspended; to free the terminal, start it with nohup or in tmux"
MAX_NAMED = 8
"""Maximum ranks or nodes listed in one line."""
MAX_HOSTS = 65_535
"""Maximum hosts in one range. A larger range must be a typo."""
INDENTED = 1 << 18
"""Characters beyond which JSON is not indented."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 rank`, `3 ranks`, `2 processes`."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{number} {noun}" + (plural if number != 1 else "")


def listed(names: Sequence[str], most: int = MAX_NAMED) -> str:
    """List the first `most` names, and count the others."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def spans(numbers: Sequence[int]) -> str:
    """Return ascending numbers as compact ranges: `0-2,5`."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ",".join("-".join(map(str, span)) for span in found)


def rank_list(ranks: Sequence[int], unit: str = "rank") -> str:
    """Return ascending ranks in words: `rank 3`, `ranks 0-2, 5`."""
    return f"{unit}{'s' if len(ranks) > 1 else ''} {spans(ranks).replace(',', ', ')}"


def stopped_words(pid: int) -> str:
    """Return what to say of a process that a signal has suspended."""
    return f"stopped by a signal; `kill -CONT {pid}` resumes it"


def span_words(seconds: float) -> str:
    """Format a length of time: `90 s`, `5 min`, `1 h`."""
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds >= unit and seconds % unit == 0:
            return f"{seconds / unit:g} {name}"
    return f"{seconds:g} s"


def size_words(size: int) -> str:
    """Format a number of bytes: `512 KiB`, `1.5 GiB`."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB")):
        if size >= unit:
            return f"{size / unit:{'.3g' if size < 100 * unit else '.0f'}} {name}"
    return f"{size >> 10} KiB"


def status_words(status: int) -> str:
    """Describe a worker's status, which is an exit code or the negative number of a signal."""
    return f"exit status {status}" if status >= 0 else f"killed by {signal_words(-status)}"


def exit_words(status: int) -> str:
    """Describe a status with a verb: `exited with status 7`, `killed by signal 9 (SIGKILL)`."""
    return f"exited with status {status}" if status >= 0 else status_words(status)


def lost_peer_words(peer_gone: bool, timed_out: bool) -> str:
    """Describe how a peer that is gone or didn't respond affected a failed rank; "" = not at all."""
    if timed_out:
        return "after timing out while waiting for another rank"
    return "after losing the connection to another rank" if peer_gone else ""


def signal_words(signum: int) -> str:
    """Return a signal's number, with its name if it has one."""
    try:
        return f"signal {signum} ({signal.Signals(signum).name})"
    except ValueError:
        return f"signal {signum}"


def refused_port_words(error: str, owners: Sequence[Mapping[str, Any]]) -> str:
    """Describe why the port of a `PortRefused` can't be used: `in use by python (pid 42)`."""
    reason = error.lower()
    return f"in use by {holders_words(owners)}" if owners or "in use" in reason else reason


def holders_words(owners: Sequence[Mapping[str, Any]]) -> str:
    """List the processes that hold a port: the `owners` of a `PortRefused`."""
    return ", ".join(map(_owner_words, owners)) or "a process that is not listening on it"


def _owner_words(owner: Mapping[str, Any]) -> str:
    if owner.get("pid") is None:
        return f"a process of uid {owner.get('uid')}"
    return f"{owner.get('command')} (pid {owner['pid']})"


def json_text(document: object, indent: int) -> str:
    """Return a document as JSON with a final newline, indented unless it is very long."""
    import json  # few functions here need it

    text = json.dumps(document)
    # For thousands of ranks, indenting takes half a second, because json does it in Python.
    return (json.dumps(document, indent=indent) if len(text) < INDENTED else text) + "\n"


def expand_ranges(text: str) -> list[str]:
    """Expand a range of host names: `gpu[03-05,9]` → gpu03 gpu04 gpu05 gpu9.

    Several brackets yield all combinations. Raises ValueError.
    """
    parts = re.split(r"\[([^\[\]]*)\]", text)
    if any(mark in part for part in parts[::2] for mark in "[]"):
        raise ValueError(f'unbalanced brackets in "{text}"')
    choices: list[list[str]] = []
    total = 1
    for i, part in enumerate(parts):
        choices.append(_bracket(part) if i % 2 else [part])
        total *= len(choices[-1])
        if total > MAX_HOSTS:
            raise ValueError(f'"{text[:60]}" names more than {MAX_HOSTS} hosts')
    return ["".join(names) for names in itertools.product(*choices)]


def expand_nodelist(text: str) -> list[str]:
    """Expand a list such as `a[1-2,07]-b[3],c` to a1-b3 a2-b3 a07-b3 c. Raises ValueError."""
    parts = re.findall(r"(?:\[[^\[\]]*\]|[^,\[\]])+", text)
    return [host for part in parts for host in expand_ranges(part)]


def _bracket(text: str) -> list[str]:
    """Expand the text inside brackets: `03-05,9` → 03 04 05 9. Raises ValueError."""
    names: list[str] = []
    for item in text.split(","):
        found = re.fullmatch(r"\s*([0-9]{1,18})(?:-([0-9]{1,18}))?\s*", item)
        if not found:
            address = "; write an IPv6 address without brackets" if ":" in text else ""
            raise ValueError(f'"[{text}]" is not a range; write [1-4] or [1,3,7]{address}')
        first, last = found[1], found[2] or found[1]
        if int(last) < int(first):
            raise ValueError(f'"[{text}]" counts down; write the smaller number first')
        if int(last) - int(first) >= MAX_HOSTS:
            raise ValueError(f'"[{text}]" names more than {MAX_HOSTS} hosts')
        names += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return names


CUT = "…"
"""The mark that replaces the part of a text that was cut."""


def cut(text: str, room: int, end: int = 0) -> str:
    """Cut a text to at most `room` characters, keeping its last `end` characters."""
    return text if len(text) <= room else text[: max(0, room - 1 - end)] + CUT + text[len(text) - end :]


def aligned(rows: Sequence[Sequence[str]], gap: int) -> list[str]:
    """Return rows as lines, with aligned columns that are `gap` blanks apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [(" " * gap).join(map(str.ljust, row, widths)).rstrip() for row in rows]


def age_words(seconds: float) -> str:
    """Return a duration, or 0 if it is negative, in at most five characters: `41s`, `12m`, `3h07`, `5d`."""
    whole = max(0, int(seconds))
    if whole < 120:
        return f"{whole}s"
    if whole < 7200:
        return f"{whole // 60}m"
    if whole < 172800:
        return f"{whole // 3600}h{whole // 60 % 60:02}"
    return f"{whole // 86400}d"
