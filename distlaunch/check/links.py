"""The verdict on links: slow and hanging nodes and pairs, from the measurements of the link probe."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from distlaunch.agent.frozen import Frozen
from distlaunch.check.findings import Finding, Report
from distlaunch.check.link_probe import JOIN_S, slow_pairs, usual
from distlaunch.wording import counted

Best = Mapping[tuple[int, int], float]
"""The best bandwidth of each pair. A single peer counts as a pair with itself."""
WHOLE = ("all-reduce", "send/recv")
_ABOUT = {
    "node": ("with any other {noun}", "check its cable, switch port, MTU and firewall, or leave it out"),
    "pair": ("between them", "check the path between them: switches, MTU and firewall"),
    "alone": ("among its own ranks", "check its GPUs, NVLink and PCIe"),
}
HANG = "collectives will hang"
SKIPPED = "links: all-reduce and send/recv of all, because not all links and ranks work"


class Row(Frozen):
    """One measurement among peers, by index: its bus bandwidth in GB/s, which is 0 after an `error`.

    `test` is join, alone, pair, all-reduce or send/recv. `silent` are ranks that gave no answer.
    """

    test: str
    peers: tuple[int, ...]
    busbw: float
    error: str
    silent: tuple[int, ...]


class Peers(Frozen):
    """The peers of a test: their labels, the ranks of each, and the noun for one: node or rank."""

    labels: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]
    noun: str

    def of(self, rank: int) -> str:
        """Return the label of the peer of `rank`."""
        return next((self.labels[i] for i, ranks in enumerate(self.ranks) if rank in ranks), "?")

    def named(self, members: Sequence[int]) -> tuple[str, ...]:
        """Return the labels of peers."""
        return tuple(self.labels[member] for member in members)


def rows_in(printed: bytes, peers: int) -> list[Row]:
    """Return the measurements in the output of rank 0. Skip other lines: libraries print, too."""
    rows = []
    for line in printed.split(b"\n")[:-1]:
        with suppress(TypeError, ValueError, RecursionError):
            row = Row(**json.loads(line))
            sound = {*map(type, [*row.peers, *row.silent])} == {int} and {*row.peers} <= {*range(peers)}
            if sound and row.peers and 0 <= row.busbw < math.inf:
                rows.append(row)
    return rows


def verdict(peers: Peers, rows: Sequence[Row], failures: Mapping[int, str]) -> Report:
    """Return the findings about links. `failures` contains the reasons why programs failed, by rank."""
    best, alone, whole = _best(rows, "pair"), _best(rows, "alone"), [row for row in rows if row.test in WHOLE]
    slow, median = slow_pairs(best), usual(best)
    nodes = sorted({peer for pair in slow for peer in pair if _is_culprit(peer, best, slow)})
    findings = [
        *_silent(peers, rows, failures),
        *(_finding(peers, "node", [peer], best) for peer in nodes),
        *(_finding(peers, "pair", pair, best) for pair in slow if not {*nodes} & {*pair}),
        *(_finding(peers, "alone", pair[:1], alone) for pair in slow_pairs(alone)),
    ]
    for row in whole:
        if not findings and not row.busbw:
            what = f"{row.test} across all {peers.noun}s fails, although all measured pairs work: {row.error}"
            findings = [Finding("error", "links", what, HANG, "try half of the nodes to find the cause")]
    table = tuple((" - ".join(peers.named(pair)), _speed(best[pair]), _speed(median)) for pair in slow)
    words = f"{counted(len(peers.labels), peers.noun)}, {counted(len(best), 'pair')}, median {_speed(median)}"
    words += "".join(f", {row.test} {_speed(row.busbw)}" for row in whole)
    fine = () if findings else (f"links ({words})",)
    measurements = [{**row._asdict(), "peers": peers.named(row.peers)} for row in rows]
    document = {"median": median, "measurements": measurements}
    return Report(tuple(findings), {}, fine, () if whole else (SKIPPED,), table, document)


def _best(rows: Sequence[Row], test: str) -> dict[tuple[int, int], float]:
    """Return the best bandwidth of each pair, or of each peer alone, whose ranks all answered."""
    best: dict[tuple[int, int], float] = {}
    for row in rows:
        if row.test == test and not row.silent:
            ends = row.peers[0], row.peers[-1]
            best[ends] = max(best.get(ends, 0.0), row.busbw)
    return best


def _is_culprit(peer: int, best: Best, slow: Sequence[tuple[int, int]]) -> bool:
    """Return whether all links of a peer, at least two, are slow while a link between others is good."""
    own = {pair for pair in best if peer in pair}
    return len(own) > 1 and own <= {*slow} and len(slow) < len(best)


def _finding(peers: Peers, about: str, ends: Sequence[int], best: Best) -> Finding:
    """Return the finding that collectives among `ends` are slow or hang. `about` is a key of `_ABOUT`."""
    (where, do), value = _ABOUT[about], max(best[pair] for pair in best if {*ends} <= {*pair})
    subject = f"an all-reduce {where.format(noun=peers.noun)}"
    if not value:
        return Finding("error", "links", f"{subject} doesn't complete", HANG, do, peers.named(ends))
    what = f"{subject} is slow: {_speed(value)}, where the median is {_speed(usual(best))}"
    return Finding("warning", "links", what, "every collective waits for it", do, peers.named(ends))


def _silent(peers: Peers, rows: Sequence[Row], failures: Mapping[int, str]) -> Iterator[Finding]:
    """Yield the ranks that did not join, or that stopped answering later, by reason."""
    late = f"did not join the link test within {JOIN_S:g} s"
    # Rank 0 prints the results. If there are none, any failure may be the reason.
    silent = {rank: late for rank in failures or ([] if rows else [0]) if not rank or not rows}
    for row in rows:
        for rank in row.silent:
            silent.setdefault(rank, late if row.test == "join" else "stopped answering in the link test")
    reasons = {rank: failures.get(rank, why) for rank, why in sorted(silent.items())}
    for what in dict.fromkeys(reasons.values()):
        labels = dict.fromkeys(peers.of(rank) for rank, why in reasons.items() if why == what)
        yield Finding("error", "links", what, HANG, "check its processes and network", (*labels,))


def _speed(busbw: Any) -> str:
    return f"{busbw:.3g} GB/s" if busbw else "none"
