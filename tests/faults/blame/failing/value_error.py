# Rank 1 of 2, exit status 1: a ValueError in the loop, which nothing catches.
# It says: label 1007 is out of range

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
model = nn.Linear(8, 2)
for step in range(10):
    label = 1007 if dist.get_rank() == 1 and step == 3 else step
    if label > 1000:
        raise ValueError(f"label {label} is out of range")
    loss = (model(torch.randn(4, 8)) - label).square().mean()
    model.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.data -= 0.1 * parameter.grad / dist.get_world_size()
dist.destroy_process_group()
