# Rank 0 of 2, exit status 139: a segmentation fault, as of a broken extension.

import ctypes

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.zeros(1)
for step in range(10):
    if dist.get_rank() == 0 and step == 3:
        ctypes.string_at(0)
    total += step
    dist.all_reduce(total)
dist.destroy_process_group()
