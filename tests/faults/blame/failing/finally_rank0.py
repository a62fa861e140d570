# Rank 0 of 2, exit status 1: a ValueError in the loop; its finally destroys the process group, as is advised.
# It says: expected 4 targets, got 3

import torch
import torch.distributed as dist


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    short = dist.get_rank() == 0 and step == 3
    return torch.randn(4, 8), torch.randn(3 if short else 4)


def train() -> None:
    weights = torch.zeros(8)
    for step in range(10):
        x, target = batch(step)
        if len(x) != len(target):
            raise ValueError(f"expected {len(x)} targets, got {len(target)}")
        gradient = x.T @ (x @ weights - target)
        dist.all_reduce(gradient)
        weights -= 0.1 * gradient / dist.get_world_size()


dist.init_process_group("gloo")
try:
    train()
finally:
    dist.destroy_process_group()
