# Rank 1 of 2, exit status 3: sys.exit(3) inside a try whose finally destroys the process group.
# It says: the config asks for 12 heads, the checkpoint has 16

import sys

import torch
import torch.distributed as dist


def train() -> None:
    weights = torch.zeros(8)
    for step in range(10):
        if dist.get_rank() == 1 and step == 2:
            print("the config asks for 12 heads, the checkpoint has 16", file=sys.stderr)
            sys.exit(3)
        dist.all_reduce(weights)


dist.init_process_group("gloo")
try:
    train()
finally:
    dist.destroy_process_group()
