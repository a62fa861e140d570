"""The first cause in what a torch elastic agent prints when it fails, without its own traceback."""

import re

_OWN = re.compile(r'Traceback \(most recent call last\):\n  File "<frozen runpy>"')
"""Torch's own traceback begins so: it was started with python -m."""
_ROOT = re.compile(
    r"Root Cause \(first observed failure\):\n(?:.*\n)*?"
    r"  rank +: (\d+) \(local_rank: (\d+)\)\n  exitcode +: (-?\d+) \(pid: (\d+)\)"
)


def root_cause_lines(words: str) -> list[str]:
    """What the workers said last, and which failed first; all of `words` if torch says nothing."""
    own = list(_OWN.finditer(words))
    if not own:
        return words.splitlines()
    before, report = words[: own[-1].start()].splitlines(), words[own[-1].start() :]
    # Without a table torch itself has failed: its last line says how.
    return [*before, root_cause_line(report) or report.strip().splitlines()[-1]]


def root_cause_line(words: str) -> str:
    """Which rank failed first and how, from the table that torch prints; "" without one."""
    found = _ROOT.search(words)
    if not found:
        return ""
    rank, local_rank, exitcode, pid = found.groups()
    how = f"killed by signal {exitcode[1:]}" if exitcode.startswith("-") else f"exit status {exitcode}"
    return f"root cause: rank {rank} (local rank {local_rank}, pid {pid}): {how}"
