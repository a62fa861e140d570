"""What a launcher said of a job that failed, and whether that is right. Pure: only texts and documents."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tests.faults.blame.cases import Case
from tests.harness import TORCHS_ABORT

_FIRST = re.compile(r"^distlaunch: rank (\d+) .*\b(?:first|never|was in|stalled)\b", re.MULTILINE)
_SHOWN = re.compile(r"^distlaunch:   \| (.*)$", re.MULTILINE)
_ROOT_CAUSE = re.compile(
    r"^Root Cause \(first observed failure\):\n\[\d+\]:\n  time +: (\S+)\n  host +: .*\n  rank +: (\d+) ",
    re.MULTILINE,
)


class Opinion(NamedTuple):
    """What was said and what is wrong with it: `right` is 1, 0, or ½ if it leaves the culprit and others."""

    right: float
    said: str
    wrong: Sequence[str] = ()


def of_distlaunch(case: Case, document: Mapping[str, Any], stderr: str) -> Opinion:
    """The result for machines, the summary and the words shown must all be of the culprit."""
    named = sorted({int(rank) for rank in _FIRST.findall(stderr)})
    shown = "\n".join(_SHOWN.findall(stderr))
    cause = document["cause"] or {}
    said = f"--json: rank {cause.get('rank')}, exit status {document['exit_status']}; people: ranks {named}"
    if case.leaves_early:
        wrong = _early_faults(case, document, stderr)
    else:
        wrong = [
            *_unless(cause.get("rank") == case.rank, f"--json names rank {cause.get('rank')}"),
            *_unless(
                document["exit_status"] in _statuses(case, shown), f"exit status {document['exit_status']}"
            ),
            *_unless(named == [case.rank], f"the summary names ranks {named}"),
            *_unless(not case.words or any(each in shown for each in case.words), f"not shown: {case.words}"),
        ]
    return Opinion(float(not wrong), said, wrong)


def _statuses(case: Case, shown: str) -> set[int]:
    """How the culprit may end: also by torch at its end, which is after its own words."""
    own, _, _ = shown.partition(TORCHS_ABORT)
    at_its_end = own != shown and case.torch_may_abort and any(each in own for each in case.words)
    return {case.status, 134} if at_its_end else {case.status}


def _early_faults(case: Case, document: Mapping[str, Any], stderr: str) -> list[str]:
    worker = next((each for each in document["workers"] if each["rank"] == case.rank), {"status": None})
    own = [line for line in stderr.splitlines() if line.startswith("distlaunch: ")]
    return [
        *_unless(document["exit_status"] not in (0, None), f"exit status {document['exit_status']}"),
        *_unless(worker["status"] == 0, f"--json: rank {case.rank} ended with {worker['status']}"),
        *_unless(_tells_of_early_end("\n".join(own), case.rank), f"rank {case.rank}'s end is not told"),
    ]


def _tells_of_early_end(text: str, rank: int) -> bool:
    """Whether a line says that this rank has ended, and well."""
    return bool(re.search(rf"\brank {rank}\b.*(finished|exit status 0|exitcode +: 0)", text))


def _unless(holds: bool, fault: str) -> list[str]:
    return [] if holds else [fault]


def of_torchrun(case: Case, outputs: Sequence[str]) -> Opinion:
    """The root cause in the table of each node's torchrun; of several, the one with the earliest time.

    The times have whole seconds. Where nodes name different ranks at the same one, nobody can tell which was
    first: such a tie counts half if the culprit takes part in it.
    """
    causes = [(time, int(rank)) for text in outputs for time, rank in _ROOT_CAUSE.findall(text)]
    if case.leaves_early:
        told = any(_tells_of_early_end(text, case.rank) for text in outputs)
        fault = f"rank {case.rank}'s end is not told"
        return Opinion(float(told), f"root causes {causes}", _unless(told, fault))
    if not causes:
        return Opinion(0.0, "no root cause", ["no root cause"])
    first = {rank for time, rank in causes if time == min(causes)[0]}
    right = (case.rank in first) / min(len(first), 2)
    return Opinion(right, f"root causes {causes}", _unless(right == 1.0, f"names ranks {sorted(first)}"))
