# Rank 1 of 3, exit status 137: killed by SIGKILL, as by the kernel when memory runs out.

import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(8, 2))
for step in range(10):
    loss = model(torch.randn(4, 8)).square().mean()
    if dist.get_rank() == 1 and step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
dist.destroy_process_group()
