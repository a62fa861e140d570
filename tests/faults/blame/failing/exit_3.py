# Rank 0 of 2, exit status 3: sys.exit(3) in the middle.
# It says: the volume of the checkpoints is full

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
loss = torch.ones(1)
for step in range(10):
    dist.all_reduce(loss)
    if dist.get_rank() == 0 and step == 3:
        print("the volume of the checkpoints is full", file=sys.stderr)
        sys.exit(3)
dist.destroy_process_group()
