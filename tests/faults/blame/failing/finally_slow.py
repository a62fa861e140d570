# Rank 1 of 2, exit status 1: a ValueError; a second of work in the finally before it destroys the group.
# It says: the learning rate is negative

import time

import torch
import torch.distributed as dist


def train(weights: torch.Tensor) -> None:
    rate = 0.1
    for _ in range(10):
        gradient = weights.sign()
        dist.all_reduce(gradient)
        weights -= rate * gradient
        if dist.get_rank() == 1:
            rate -= 0.04
        if rate < 0:
            raise ValueError("the learning rate is negative")


def save(weights: torch.Tensor) -> None:
    """Stands for a checkpoint to a slow disk."""
    time.sleep(1)


dist.init_process_group("gloo")
weights = torch.ones(8)
try:
    train(weights)
finally:
    save(weights)
    dist.destroy_process_group()
