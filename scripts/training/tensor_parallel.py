"""Tensor parallelism: each rank holds a slice of every matrix, and the results match the whole model's."""

from collections import OrderedDict
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss


def build_model(width: int = 16, hidden: int = 64) -> nn.Sequential:
    """Return the feed-forward block of a transformer: one matrix up, and one down."""
    up, down = nn.Linear(width, hidden), nn.Linear(hidden, width)
    return nn.Sequential(OrderedDict(up=up, gelu=nn.GELU(), down=down))


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int = 50) -> list[float]:
    """Train on one batch, which is the same on all ranks, and return the loss of every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(steps):
        loss = mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole(parameter: Tensor) -> Tensor:
    """Return the whole parameter, assembled from the slices of all ranks."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def main() -> None:
    """Train the sliced model and the whole model, and compare them."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same model and data on every rank
    model, x = build_model(), torch.randn(32, 16)
    y = torch.tanh(x.roll(1, dims=1))

    # Columns, then rows: `down` uses its own rank's slice of `up`, and the block ends with one all_reduce.
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    sliced = parallelize_module(deepcopy(model), mesh, plan)
    sliced_losses = train(sliced, x, y)
    weights = [whole(parameter) for parameter in sliced.parameters()]

    losses = train(model, x, y)
    torch.testing.assert_close(sliced_losses, losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights, list(model.parameters()), rtol=1e-4, atol=1e-5)
    if dist.get_rank() == 0:
        print(f"tensor_parallel: ok, {dist.get_world_size()} ranks, loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
