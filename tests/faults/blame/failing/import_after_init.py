# Rank 0 of 2, exit status 1: it alone imports a package, which is missing, while the others are in a barrier.
# It says: No module named 'experiment_tracker'

import importlib

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    tracker = importlib.import_module("experiment_tracker")
dist.barrier()
loss = torch.ones(1)
for _ in range(10):
    dist.all_reduce(loss)
dist.destroy_process_group()
