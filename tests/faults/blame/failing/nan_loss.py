# Rank 2 of 3, exit status 1: a check of the loss raises FloatingPointError; its finally destroys the group.
# It says: the loss is nan at step 4

import torch
import torch.distributed as dist
from torch import nn


def train() -> None:
    model = nn.Linear(8, 2)
    for step in range(10):
        x = torch.randn(4, 8)
        if dist.get_rank() == 2 and step == 4:
            x[0, 0] = torch.nan
        loss = model(x).square().mean()
        if loss.isnan():
            raise FloatingPointError(f"the loss is {loss.item()} at step {step}")
        gradients = torch.autograd.grad(loss, model.parameters())
        for gradient in gradients:
            dist.all_reduce(gradient)


dist.init_process_group("gloo")
try:
    train()
finally:
    dist.destroy_process_group()
