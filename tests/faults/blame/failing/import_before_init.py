# Rank 1 of 2, exit status 1: a package is missing where it runs; the others wait in init_process_group().
# It says: No module named 'fused_attention'

import importlib
import os

import torch
import torch.distributed as dist

KERNELS = ["math", "fused_attention" if os.environ["RANK"] == "1" else "operator"]

for kernel in KERNELS:
    importlib.import_module(kernel)
dist.init_process_group("gloo")
loss = torch.ones(1)
for _ in range(10):
    dist.all_reduce(loss)
dist.destroy_process_group()
