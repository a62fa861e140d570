# Rank 1 of 3, exit status 137: killed by SIGKILL, as by the kernel when memory runs out.

import os
import signal

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
weights = torch.randn(8)
for step in range(10):
    gradient = weights.sign()
    if dist.get_rank() == 1 and step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(gradient)
dist.destroy_process_group()
