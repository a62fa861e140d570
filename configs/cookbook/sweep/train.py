"""Synchronous SGD on a parabola: the loss after 20 steps depends on --lr."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    lr = parser.parse_args().lr

    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(20):
        x = torch.randn(64, 8)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"lr {lr:g}  loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
