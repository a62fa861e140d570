# Rank 1 of 2, exit status 1: a ValueError in the loop; its finally destroys the process group, as is advised.
# It says: label 2041 is out of range

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train() -> None:
    model = DistributedDataParallel(nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(10):
        label = 2041 if dist.get_rank() == 1 and step == 3 else step
        if label > 1000:
            raise ValueError(f"label {label} is out of range")
        loss = (model(torch.randn(4, 8)) - label).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


dist.init_process_group("gloo")
try:
    train()
finally:
    dist.destroy_process_group()
