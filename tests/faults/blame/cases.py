"""The ways of `failing.py` to fail: which rank does, and what is to be told of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SCRIPT = Path(__file__).with_name("failing.py")


class Case(NamedTuple):
    """A script: the rank that fails first, of how many, its exit status as a shell has it.

    `words` are of its own error; where there are several, it may say any of these. `around`, `body` and
    `fail` are functions of the script.
    """

    name: str
    rank: int
    ranks: int
    status: int
    words: Sequence[str] = ("",)
    around: str = "plain"
    body: str = "trains"
    fail: str = "raises"

    @property
    def argv(self) -> list[str]:
        """The script and its arguments."""
        return [str(SCRIPT), self.around, self.body, self.fail, str(self.rank), self.words[0]]

    @property
    def leaves_early(self) -> bool:
        """Whether the rank fails nowhere, but is done before the others: those miss it, and fail."""
        return self.status == 0

    @property
    def torch_may_abort(self) -> bool:
        """Whether torch may abort the rank at its end: it uses gloo, and its interpreter ends in order."""
        return any(self.words) and self.around != "before_init" and self.fail != "exits_in_a_thread"


LOADER_KILLED = ("DataLoader worker (pid", "ConnectionResetError")
MISSING = "No module named 'fused_attention'"
_CASES = [
    Case("abort", 1, 2, 134, fail="aborts"),
    Case("backward_assert", 1, 2, 1, ["the gradient is not finite"], body="asserts_in_backward"),
    Case("before_init", 0, 2, 1, ["vocabulary.json: 0 tokens"], "before_init", "alone"),
    Case("checkpoint", 2, 3, 1, ["the disk of part 2 is full"], body="saves"),
    Case("early_return", 1, 4, 0, body="returns_early"),
    Case("exit_3", 0, 2, 3, ["the volume of the checkpoints is full"], fail="exits_3"),
    Case("exit_3_finally", 1, 2, 3, ["the checkpoint has 16 heads"], "with_finally", fail="exits_3"),
    Case("finally_rank0", 0, 2, 1, ["expected 4 targets, got 3"], "with_finally"),
    Case("finally_rank1", 1, 2, 1, ["label 2041 is out of range"], "with_finally"),
    Case("finally_slow", 1, 2, 1, ["the learning rate is negative"], "with_slow_finally"),
    Case("import_after_init", 0, 2, 1, [MISSING], body="alone", fail="imports"),
    Case("import_before_init", 1, 2, 1, [MISSING], "before_init", "alone", "imports"),
    Case("last_rank", 2, 3, 1, ["KeyError: 'shard-2'"], body="looks_up"),
    Case("loader_killed", 1, 2, 1, LOADER_KILLED, body="loads", fail="killed"),
    Case("loader_raises", 0, 2, 1, ["image 17 is truncated"], "with_finally", "loads"),
    Case("nan_loss", 2, 3, 1, ["the loss is nan at step 4"], "with_finally"),
    Case("record_finally", 1, 3, 1, ["shard 1 has 0 samples"], "recorded"),
    Case("segfault", 0, 2, 139, fail="segfaults"),
    Case("sigkill", 1, 3, 137, fail="killed"),
    Case("thread_exits", 1, 2, 5, ["the lease of the data set has expired"], fail="exits_in_a_thread"),
    Case("value_error", 1, 2, 1, ["label 1007 is out of range"]),
    # Its own error, of another server, reads like that of a rank whose peer has gone.
    Case("words_of_a_peer", 2, 4, 1, ["feature server: Connection reset by peer"]),
]
CASES = {case.name: case for case in _CASES}
