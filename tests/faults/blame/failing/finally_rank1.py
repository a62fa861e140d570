# Rank 1 of 2, exit status 1: a ValueError in the loop; its finally destroys the process group, as is advised.
# It says: label 2041 is out of range

import torch
import torch.distributed as dist


def train() -> None:
    weights = torch.zeros(8)
    for step in range(10):
        label = 2041 if dist.get_rank() == 1 and step == 3 else step
        if label > 1000:
            raise ValueError(f"label {label} is out of range")
        gradient = weights - label
        dist.all_reduce(gradient)
        weights -= 0.1 * gradient / dist.get_world_size()


dist.init_process_group("gloo")
try:
    train()
finally:
    dist.destroy_process_group()
