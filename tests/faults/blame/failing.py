"""A training script in which a rank fails: ``failing.py AROUND BODY FAIL RANK WORDS``, by functions here."""

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
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

AROUND, BODY, FAIL, RANK, WORDS = sys.argv[1:]
FAILS = os.environ["RANK"] == RANK
"""Whether this is the rank that fails."""


# How it fails


def aborts() -> None:
    """As a failed check in a C++ extension does."""
    os.abort()


def segfaults() -> None:
    ctypes.string_at(0)


def killed() -> None:
    """As by the kernel when memory runs out."""
    signal.raise_signal(signal.SIGKILL)


def raises() -> None:
    raise ValueError(WORDS)


def exits_3() -> None:
    print(WORDS, file=sys.stderr)
    sys.exit(3)


def imports() -> None:
    importlib.import_module("fused_attention")


def exits_in_a_thread() -> None:
    """A thread that watches something fails, and ends the process while the others train."""

    def watch() -> None:
        try:
            raise TimeoutError(WORDS)
        except TimeoutError:
            traceback.print_exc()
            os._exit(5)  # sys.exit() would end this thread only

    threading.Thread(target=watch).start()
    time.sleep(60)  # computes


# What it does


def trains() -> None:
    """Steps with a collective in each; the rank that fails does so in the fourth."""
    weights = torch.ones(8)
    for step in range(10):
        if FAILS and step == 3:
            FUNCTIONS[FAIL]()
        gradient = weights.sign()
        dist.all_reduce(gradient)
        weights -= 0.1 * gradient / dist.get_world_size()


def alone() -> None:
    """The rank that fails does something alone, while the others go on to a barrier."""
    if FAILS:
        FUNCTIONS[FAIL]()
    if dist.is_initialized():
        dist.barrier()


def looks_up() -> None:
    """A KeyError between two barriers."""
    dist.barrier()
    shards = {f"shard-{number}": torch.ones(8) for number in range(2)}
    shard = shards[f"shard-{dist.get_rank()}"]
    dist.barrier()
    dist.all_reduce(shard)


def returns_early() -> None:
    """A rank has fewer batches and returns; the others go on with collectives, and fail."""
    for _ in range(3 if FAILS else 6):
        dist.all_reduce(torch.ones(8))


class Checked(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        assert gradients[0].isfinite().all(), WORDS
        return gradients[0]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(Checked.apply(self.first(x)))


def asserts_in_backward() -> None:
    """An assertion in a custom autograd function, in the middle of DDP's backward."""
    model = DistributedDataParallel(Scaled())
    for step in range(10):
        scale = torch.inf if FAILS and step == 3 else 1.0
        (model(torch.randn(4, 8)).mean() * scale).backward()


class Images(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if FAILS and index == 24:
            FUNCTIONS[FAIL]()
        return torch.randn(8)


def loads() -> None:
    """A worker process of a DataLoader fails, and then the training."""
    for batch in DataLoader(Images(), batch_size=4, num_workers=1):
        dist.all_reduce(batch)


class Unwritable:
    def __reduce__(self) -> Any:
        raise OSError(WORDS)


def saves() -> None:
    """A rank can't write its part of a checkpoint; torch raises an exception on all ranks."""
    from torch.distributed import checkpoint

    part = {f"part{dist.get_rank()}": Unwritable() if FAILS else 1}
    try:
        checkpoint.save(part, checkpoint_id="checkpoint")
    finally:
        time.sleep(0.5 * FAILS)  # the others end first


# What is around that


def plain(does: Callable[[], object]) -> None:
    dist.init_process_group("gloo")
    does()
    dist.destroy_process_group()


def before_init(does: Callable[[], object]) -> None:
    """The others wait in init_process_group() for the rank, or for its store."""
    does()
    plain(dist.barrier)


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


with_slow_finally = partial(with_finally, saves_s=1.0)
FUNCTIONS: dict[str, Any] = dict(globals())

if __name__ == "__main__":
    FUNCTIONS[AROUND](FUNCTIONS[BODY])
