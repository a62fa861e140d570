# Rank 2 of 3, exit status 1: a check of the loss raises FloatingPointError; its finally destroys the group.
# It says: the loss is nan at step 4

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train() -> None:
    model = DistributedDataParallel(nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(10):
        x = torch.randn(4, 8)
        if dist.get_rank() == 2 and step == 4:
            x[0, 0] = torch.nan
        loss = model(x).square().mean()
        if loss.isnan():
            raise FloatingPointError(f"the loss is {loss.item()} at step {step}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


dist.init_process_group("gloo")
try:
    train()
finally:
    dist.destroy_process_group()
