# Rank 0 of 2, exit status 1: a worker process of its DataLoader raises; its finally destroys the group.
# It says: image 17 is truncated

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


class Images(Dataset[torch.Tensor]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.rank == 0 and index == 17:
            raise OSError(f"image {index} is truncated")
        return torch.randn(8)


def train() -> None:
    model = DistributedDataParallel(nn.Linear(8, 2))
    for batch in DataLoader(Images(dist.get_rank()), batch_size=4, num_workers=1):
        model(batch).square().mean().backward()


dist.init_process_group("gloo")
try:
    train()
finally:
    dist.destroy_process_group()
