"""FSDP2 with a checkpoint every two steps. Rank 1 fails in the first attempt; the second one resumes."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


def newest(directory: Path) -> Path | None:
    """Return the last complete checkpoint: torch writes `.metadata` after everything else."""
    steps = [path.parent for path in directory.glob("*/.metadata")]
    return max(steps, key=lambda path: int(path.name), default=None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    directory = parser.parse_args().dir
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    first = 0
    if checkpoint := newest(directory):
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=checkpoint)  # fills both in place
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        first = int(checkpoint.name)

    for step in range(first, 8):
        x = torch.randn(16, 8)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done = step + 1
        if done % 2 == 0:
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=directory / str(done))
        if attempt == 1 and done == 5 and dist.get_rank() == 1:
            raise SystemExit("rank 1 fails on purpose")

    if dist.get_rank() == 0:
        print(f"checkpoint_restart: ok, attempt {attempt} resumed from step {first}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
