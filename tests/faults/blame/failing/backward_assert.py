# Rank 1 of 2, exit status 1: an assertion in a custom autograd function, in the middle of DDP's backward.
# It says: the gradient of the scale is not finite

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Checked(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        assert gradients[0].isfinite().all(), "the gradient of the scale is not finite"
        return gradients[0]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(Checked.apply(self.first(x)))


dist.init_process_group("gloo")
model = DistributedDataParallel(Scaled())
for step in range(10):
    scale = torch.inf if dist.get_rank() == 1 and step == 3 else 1.0
    (model(torch.randn(4, 8)).mean() * scale).backward()
dist.destroy_process_group()
