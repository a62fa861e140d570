"""Pipeline parallelism: each rank holds one stage of the model, and micro-batches flow through all stages."""

from copy import deepcopy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import mse_loss

WIDTH, BATCH, MICRO_BATCHES, STEPS, RATE = 16, 32, 4, 20, 2.0


def build_model(stages: int) -> nn.Sequential:
    """Return a model with one block per stage."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages)))


def train_whole(model: nn.Module, x: Tensor, y: Tensor) -> list[float]:
    """Train the whole model, and return the loss of every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for _ in range(STEPS):
        loss = mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_stage(block: nn.Module, x: Tensor, y: Tensor) -> list[float]:
    """Train this rank's stage, and return the loss of every step on the rank with the last stage."""
    micro_batch = torch.empty(BATCH // MICRO_BATCHES, WIDTH, requires_grad=True)  # only its shape is used
    stage = PipelineStage(
        block, dist.get_rank(), dist.get_world_size(), torch.device("cpu"), micro_batch, micro_batch
    )
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=mse_loss)
    optimizer = torch.optim.SGD(block.parameters(), lr=RATE)
    losses = []
    for _ in range(STEPS):
        parts: list[Tensor] = []  # losses of the micro-batches
        optimizer.zero_grad()
        if stage.is_first:
            schedule.step(x)
        elif stage.is_last:
            schedule.step(target=y, losses=parts)
            losses.append(torch.stack(parts).mean().item())
        else:
            schedule.step()
        optimizer.step()
    return losses


def main() -> None:
    """Train the stages and the whole model, and compare them."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size < 2:
        raise SystemExit("pipeline_parallel: a pipeline needs at least 2 ranks")
    torch.manual_seed(0)  # the same model and data on every rank
    model, x = build_model(world_size), torch.randn(BATCH, WIDTH)
    y = torch.tanh(x.roll(1, dims=1))

    block = deepcopy(model[rank])
    stage_losses, losses = train_stage(block, x, y), train_whole(model, x, y)

    if rank == world_size - 1:
        torch.testing.assert_close(stage_losses, losses)
    torch.testing.assert_close(block.state_dict(), model[rank].state_dict())
    dist.barrier()
    if rank == 0:
        print(f"pipeline_parallel: ok, {world_size} stages, loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
