"""Ranges of host names, as ssh's users and schedulers write them."""

import itertools
import re

MAX_HOSTS = 65_535
"""More than this from one range is a typing error."""


def expand_ranges(text: str) -> list[str]:
    """`gpu[03-05,9]` → gpu03 gpu04 gpu05 gpu9; several brackets multiply. Raises ValueError."""
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
    """`a[1-2,07]-b[3],c` → a1-b3 a2-b3 a07-b3 c. Raises ValueError."""
    parts = re.findall(r"(?:\[[^\[\]]*\]|[^,\[\]])+", text)
    return [host for part in parts for host in expand_ranges(part)]


def _bracket(text: str) -> list[str]:
    names: list[str] = []
    for item in text.split(","):
        found = re.fullmatch(r"\s*([0-9]{1,18})(?:-([0-9]{1,18}))?\s*", item)
        if not found:
            raise ValueError(f'"[{text}]" is not a range; write [1-4] or [1,3,7]')
        first, last = found[1], found[2] or found[1]
        if not 0 <= int(last) - int(first) < MAX_HOSTS:
            raise ValueError(f'"[{text}]" counts down, or names more than {MAX_HOSTS} hosts')
        names += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return names
