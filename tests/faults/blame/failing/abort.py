# Rank 1 of 2, exit status 134: os.abort(), as a failed check in a C++ extension does.

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
weights = torch.randn(8)
for step in range(10):
    gradient = weights.sign()
    if dist.get_rank() == 1 and step == 3:
        os.abort()
    dist.all_reduce(gradient)
dist.destroy_process_group()
