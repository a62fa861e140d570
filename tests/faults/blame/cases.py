"""The scripts that fail: what each does is told by the comment at its head, which is read here."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "failing"
_HEAD = re.compile(r"# Rank (\d+) of (\d+), exit status (\d+): (.+)\n((?:# It says: .+\n)*)\n")


class Case(NamedTuple):
    """A script: the rank that fails first, of how many, its exit status as a shell has it.

    `words` are of its own error; where there are several, it may say any of these.
    """

    path: Path
    rank: int
    ranks: int
    status: int
    about: str
    words: Sequence[str]

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def leaves_early(self) -> bool:
        """Whether the rank fails nowhere, but is done before the others: those miss it, and fail."""
        return self.status == 0

    @property
    def torch_may_abort(self) -> bool:
        """Whether torch may abort the rank at its end: it uses gloo, and its interpreter ends in order."""
        return bool(self.words) and not re.search(r"init_process_group\(\)|os\._exit", self.about)


def _case(path: Path) -> Case:
    found = _HEAD.match(path.read_text())
    assert found, f"{path}: its head does not tell which rank fails"
    rank, ranks, status, about, words = found.groups()
    return Case(path, int(rank), int(ranks), int(status), about, re.findall("# It says: (.+)\n", words))


CASES = {case.name: case for case in map(_case, sorted(FOLDER.glob("*.py")))}
"""By name."""
