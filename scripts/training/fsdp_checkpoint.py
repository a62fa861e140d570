"""FSDP with a sharded checkpoint: each rank writes its own shard, and a single process reads them all.

Run it with a launcher to train and write. Run `python fsdp_checkpoint.py --dir DIR --load` to read, without a
launcher or a process group. All nodes must share the directory --dir. Saving needs NumPy.
"""

import argparse
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss


def build_model() -> nn.Sequential:
    """Return the whole model, not sharded."""
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))


def shard(model: nn.Sequential) -> None:
    """Split every parameter into one shard per rank.

    From then on, a layer is whole only while it computes.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def dataset() -> tuple[Tensor, Tensor]:
    """Return vectors, and the same vectors shifted by one place."""
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    return x, x.roll(1, dims=1)


def evaluate(model: nn.Module) -> Tensor:
    """Return the loss on the whole dataset."""
    x, y = dataset()
    with torch.no_grad():
        return mse_loss(model(x), y)


def train(model: nn.Module, steps: int) -> None:
    """Train each rank on its part of the data.

    FSDP averages the gradients, and each rank updates its shard.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x, y = (part[rank::world_size] for part in dataset())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(1, steps + 1):
        loss = mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            print(f"step {step:>4}  loss {loss.item():.4f}", flush=True)


def load(directory: Path) -> Tensor:
    """Load all shards into the whole model in this process, and return its loss."""
    model, saved_loss = build_model(), torch.zeros(())
    dcp.load({"model": model.state_dict(), "loss": saved_loss}, checkpoint_id=directory, no_dist=True)
    loss = evaluate(model)
    torch.testing.assert_close(loss, saved_loss)
    return loss


def save(directory: Path, steps: int) -> None:
    """On every rank, train, write the checkpoint, and check that the whole model can be loaded from it."""
    dist.init_process_group("gloo")
    model = build_model()
    shard(model)
    before = evaluate(model)
    train(model, steps)
    dcp.save({"model": model.state_dict(), "loss": evaluate(model)}, checkpoint_id=directory)

    after = load(directory)
    if after > before / 10:
        raise SystemExit(f"fsdp_checkpoint: the loss went from {before:.4f} only to {after:.4f}")
    if dist.get_rank() == 0:
        print(f"fsdp_checkpoint: ok, {dist.get_world_size()} shards, loss {before:.4f} -> {after:.4f}")
    dist.destroy_process_group()


def main() -> None:
    """Write the checkpoint, or just read it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--load", action="store_true", help="only read the checkpoint, in this one process")
    args = parser.parse_args()
    # Both are intended: a second run overwrites the first checkpoint, and a single process loads it.
    warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

    if args.load:
        print(f"fsdp_checkpoint: ok, read by one process, loss {load(args.dir):.4f}")
    else:
        save(args.dir, args.steps)


if __name__ == "__main__":
    main()
