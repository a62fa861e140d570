"""A training script in which a rank fails: ``failing.py NAME RANK``, by the names of `SCRIPTS`."""

import ctypes
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

FAILS = os.environ["RANK"] == sys.argv[2]
"""Whether this is the rank that fails."""


def raises(error: Exception) -> NoReturn:
    raise error


def exits_3(words: str) -> NoReturn:
    print(words, file=sys.stderr)
    sys.exit(3)


def trained(fail: Callable[[], object]) -> None:
    """Steps with a collective in each; the rank that fails does so in the fourth."""
    weights = torch.ones(8)
    for step in range(10):
        if FAILS and step == 3:
            fail()
        gradient = weights.sign()
        dist.all_reduce(gradient)
        weights -= 0.1 * gradient / dist.get_world_size()


# Around what a script does


def plain(does: Callable[[], object]) -> None:
    dist.init_process_group("gloo")
    does()
    dist.destroy_process_group()


def with_finally(does: Callable[[], object], saves_s: float = 0.0) -> None:
    """The group is destroyed after an error, too, as is advised: the others lose it before its traceback."""
    dist.init_process_group("gloo")
    try:
        does()
    finally:
        time.sleep(saves_s)  # stands for a checkpoint to a slow disk
        dist.destroy_process_group()


def recorded(does: Callable[[], object]) -> None:
    """torch's @record, around a main() that destroys the group in a finally."""
    from torch.distributed.elastic.multiprocessing.errors import record

    record(partial(with_finally, does))()


def before_init(does: Callable[[], object]) -> None:
    """What fails comes first; the others wait in init_process_group() for the rank, or for its store."""
    does()
    plain(dist.barrier)


# What fails, other than in the middle of a loop


def alone(fail: Callable[[], object]) -> None:
    """A rank alone does something that fails, while the others are in a barrier or before it."""
    if FAILS:
        fail()


def import_after_init() -> None:
    alone(partial(importlib.import_module, "experiment_tracker"))
    dist.barrier()


def last_shard() -> None:
    """A KeyError between two barriers."""
    dist.barrier()
    shards = {f"shard-{number}": torch.ones(8) for number in range(2)}
    shard = shards[f"shard-{dist.get_rank()}"]
    dist.barrier()
    dist.all_reduce(shard)


def early_return() -> None:
    """A rank has fewer batches and returns; the others go on with collectives, and fail."""
    for _ in range(3 if FAILS else 6):
        dist.all_reduce(torch.ones(8))


class Checked(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        assert gradients[0].isfinite().all(), "the gradient of the scale is not finite"
        return gradients[0]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(Checked.apply(self.first(x)))


def backward_assert() -> None:
    """An assertion in a custom autograd function, in the middle of DDP's backward."""
    model = DistributedDataParallel(Scaled())
    for step in range(10):
        scale = torch.inf if FAILS and step == 3 else 1.0
        (model(torch.randn(4, 8)).mean() * scale).backward()


class Images(Dataset[torch.Tensor]):
    def __init__(self, fail: Callable[[], object]) -> None:
        self.fail = fail

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if FAILS and index == 24:
            self.fail()
        return torch.randn(8)


def loaded(fail: Callable[[], object]) -> None:
    """A worker process of a DataLoader fails, and then the training, which is DDP's."""
    model = DistributedDataParallel(nn.Linear(8, 2))
    for batch in DataLoader(Images(fail), batch_size=4, num_workers=1):
        model(batch).square().mean().backward()


def watch_lease() -> None:
    try:
        time.sleep(0.2)
        raise TimeoutError("the lease of the data set has expired")
    except TimeoutError:
        traceback.print_exc()
        os._exit(5)  # sys.exit() would end this thread only


def thread_exits() -> None:
    """A thread that watches something fails, and ends the process with os._exit(5)."""
    if FAILS:
        threading.Thread(target=watch_lease, daemon=True).start()
    for _ in range(100):
        time.sleep(0.05)  # computes
        dist.all_reduce(torch.ones(1))


SCRIPTS: dict[str, tuple[Callable[[Callable[[], object]], None], Callable[[], object]]] = {
    "abort": (plain, partial(trained, os.abort)),  # as a failed check in a C++ extension does
    "backward_assert": (plain, backward_assert),
    "before_init": (before_init, partial(alone, partial(raises, RuntimeError("vocabulary.json: 0 tokens")))),
    "early_return": (plain, early_return),
    "exit_3": (plain, partial(trained, partial(exits_3, "the volume of the checkpoints is full"))),
    "exit_3_finally": (with_finally, partial(trained, partial(exits_3, "the checkpoint has 16 heads"))),
    "finally_rank0": (with_finally, partial(trained, partial(raises, ValueError("got 3 targets")))),
    "finally_rank1": (with_finally, partial(trained, partial(raises, ValueError("label 2041 is too large")))),
    "finally_slow": (
        partial(with_finally, saves_s=1.0),
        partial(trained, partial(raises, ValueError("the learning rate is negative"))),
    ),
    "import_after_init": (plain, import_after_init),
    "import_before_init": (before_init, partial(alone, partial(importlib.import_module, "fused_attention"))),
    "last_rank": (plain, last_shard),
    # As the kernel does when an image is too large for the memory that is left.
    "loader_killed": (plain, partial(loaded, partial(signal.raise_signal, signal.SIGKILL))),
    "loader_raises": (with_finally, partial(loaded, partial(raises, OSError("image 24 is truncated")))),
    "nan_loss": (with_finally, partial(trained, partial(raises, FloatingPointError("the loss is nan")))),
    "record_finally": (recorded, partial(trained, partial(raises, RuntimeError("shard 1 is empty")))),
    "segfault": (plain, partial(trained, partial(ctypes.string_at, 0))),
    "sigkill": (plain, partial(trained, partial(signal.raise_signal, signal.SIGKILL))),
    "thread_exits": (plain, thread_exits),
    "value_error": (plain, partial(trained, partial(raises, ValueError("label 1007 is out of range")))),
    # Its own error, of another server, reads like that of a rank whose peer has gone.
    "words_of_a_peer": (
        plain,
        partial(trained, partial(raises, RuntimeError("feature server: Connection reset by peer"))),
    ),
}
"""By name: what is around it, and what fails."""


if __name__ == "__main__":
    around, does = SCRIPTS[sys.argv[1]]
    around(does)
