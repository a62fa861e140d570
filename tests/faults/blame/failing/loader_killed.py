# Rank 1 of 2, exit status 1: a worker process of its DataLoader is killed.
# It says: DataLoader worker (pid
# It says: ConnectionResetError

import os
import signal

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Images(Dataset[torch.Tensor]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.rank == 1 and index == 24:  # an image too large for the memory left
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.randn(8)


def train() -> None:
    for batch in DataLoader(Images(dist.get_rank()), batch_size=4, num_workers=1):
        mean = batch.mean()
        dist.all_reduce(mean)


dist.init_process_group("gloo")
train()
dist.destroy_process_group()
