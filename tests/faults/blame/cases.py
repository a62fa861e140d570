"""The ways of `failing.py` to fail: which rank does, and what is to be told of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SCRIPT = Path(__file__).with_name("failing.py")
NOT_AT_ITS_END = ("before_init", "import_before_init", "thread_exits")
"""These have no group yet, or end by os._exit(): torch can't abort them at their end."""


class Case(NamedTuple):
    """A script: the rank that fails first, of how many, its exit status as a shell has it.

    `words` are of its own error; where there are several, it may say any of these.
    """

    name: str
    rank: int
    ranks: int
    status: int
    words: Sequence[str] = ()

    @property
    def arguments(self) -> list[str]:
        """Of the script."""
        return [self.name, str(self.rank)]

    @property
    def leaves_early(self) -> bool:
        """Whether the rank fails nowhere, but is done before the others: those miss it, and fail."""
        return self.status == 0

    @property
    def torch_may_abort(self) -> bool:
        """Whether torch may abort the rank at its end: it uses gloo, and its interpreter ends in order."""
        return bool(self.words) and self.name not in NOT_AT_ITS_END


_CASES = [
    Case("abort", 1, 2, 134),
    Case("backward_assert", 1, 2, 1, ["the gradient of the scale is not finite"]),
    Case("before_init", 0, 2, 1, ["vocabulary.json: 0 tokens"]),
    Case("early_return", 1, 4, 0),
    Case("exit_3", 0, 2, 3, ["the volume of the checkpoints is full"]),
    Case("exit_3_finally", 1, 2, 3, ["the checkpoint has 16 heads"]),
    Case("finally_rank0", 0, 2, 1, ["got 3 targets"]),
    Case("finally_rank1", 1, 2, 1, ["label 2041 is too large"]),
    Case("finally_slow", 1, 2, 1, ["the learning rate is negative"]),
    Case("import_after_init", 0, 2, 1, ["No module named 'experiment_tracker'"]),
    Case("import_before_init", 1, 2, 1, ["No module named 'fused_attention'"]),
    Case("last_rank", 2, 3, 1, ["KeyError: 'shard-2'"]),
    Case("loader_killed", 1, 2, 1, ["DataLoader worker (pid", "ConnectionResetError"]),
    Case("loader_raises", 0, 2, 1, ["image 24 is truncated"]),
    Case("nan_loss", 2, 3, 1, ["the loss is nan"]),
    Case("record_finally", 1, 3, 1, ["shard 1 is empty"]),
    Case("segfault", 0, 2, 139),
    Case("sigkill", 1, 3, 137),
    Case("thread_exits", 1, 2, 5, ["the lease of the data set has expired"]),
    Case("value_error", 1, 2, 1, ["label 1007 is out of range"]),
    Case("words_of_a_peer", 2, 4, 1, ["feature server: Connection reset by peer"]),
]
CASES = {case.name: case for case in _CASES}
