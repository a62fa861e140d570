"""Manual synchronous SGD: each rank trains on its part of the data, and all_reduce averages the gradients."""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils import parameters_to_vector


def dataset() -> tuple[Tensor, Tensor]:
    """Return points on a noisy sine curve, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1000, 1, generator=generator) * 6 - 3
    return x, torch.sin(x) + 0.05 * torch.randn(x.shape, generator=generator)


def average_gradients(model: nn.Module) -> None:
    """Replace each gradient with its mean over all ranks, which keeps their models identical."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def update(model: nn.Module, velocities: list[Tensor]) -> None:
    """Take a step with momentum, like torch.optim.SGD, whose first use would take a second."""
    for parameter, velocity in zip(model.parameters(), velocities, strict=True):
        if parameter.grad is not None:
            velocity.mul_(0.9).add_(parameter.grad)
            parameter.data -= 0.1 * velocity


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    """Train. All ranks take the same number of steps, even if their parts of the data differ in size."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    velocities = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for step in range(1, steps + 1):
        batch = torch.randint(len(x), (32,), generator=generator)
        loss = mse_loss(model(x[batch]), y[batch])
        model.zero_grad()
        loss.backward()
        average_gradients(model)
        update(model, velocities)
        if dist.get_rank() == 0 and step % 100 == 0:
            print(f"step {step:>4}  loss {loss.item():.4f}", flush=True)


def same_on_all_ranks(model: nn.Module) -> bool:
    """Return whether all ranks have exactly the same weights."""
    mine = parameters_to_vector(model.parameters()).detach()
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    return all(torch.equal(mine, theirs) for theirs in gathered)


def main() -> None:
    """Train, and check that the ranks agree and have learned."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()

    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)  # all ranks start with the weights of rank 0
    x, y = dataset()

    before = mse_loss(model(x), y).item()
    train(model, x[rank::world_size], y[rank::world_size], args.steps)
    after = mse_loss(model(x), y).item()

    if not same_on_all_ranks(model):
        raise SystemExit("sync_sgd: the ranks ended with different weights")
    if after > before / 10:
        raise SystemExit(f"sync_sgd: the loss went from {before:.4f} only to {after:.4f}")
    if rank == 0:
        print(f"sync_sgd: ok, {world_size} ranks, loss {before:.4f} -> {after:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
