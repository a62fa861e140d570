"""Reads one shard of a checkpoint from fsdp_checkpoint.py, without a process group or a model.

`python fsdp_load_shard.py --dir DIR --shard 1` reads the shard of rank 1.
"""

import argparse
import warnings
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan


class OneShard(dcp.DefaultLoadPlanner):
    """Reads the shard of one rank, and leaves the rest of every tensor unchanged."""

    def __init__(self, shard: int) -> None:
        super().__init__()
        self.file = f"__{shard}_0.distcp"

    def create_local_plan(self) -> LoadPlan:
        """Return the usual plan, without reads from other files."""
        plan = super().create_local_plan()
        stored = self.metadata.storage_data
        mine = [item for item in plan.items if stored[item.storage_index].relative_path == self.file]
        return replace(plan, items=mine)


def unread_tensors(directory: Path) -> dict[str, Tensor]:
    """Return a tensor of NaN for each parameter, with the names and shapes in the checkpoint's metadata."""
    entries = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    return {
        name: torch.full(entry.size, torch.nan, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }


def load(directory: Path, planner: dcp.DefaultLoadPlanner) -> dict[str, Tensor]:
    """Return the parameters, with NaN for all values that the planner doesn't read."""
    tensors = unread_tensors(directory)
    dcp.load(tensors, checkpoint_id=directory, planner=planner, no_dist=True)
    return tensors


def main() -> None:
    """Read the shard, and compare it with the whole model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--shard", type=int, default=0, help="the rank that wrote it")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

    shard, whole = load(args.dir, OneShard(args.shard)), load(args.dir, dcp.DefaultLoadPlanner())
    count, total = 0, 0
    for name, tensor in shard.items():
        read = ~tensor.isnan()
        if not torch.equal(tensor[read], whole[name][read]):
            raise SystemExit(f"fsdp_load_shard: {name} differs from the whole")
        print(f"{name}: {read.sum()} of {read.numel()} numbers")
        count, total = count + int(read.sum()), total + read.numel()
    if count == 0:
        raise SystemExit(f"fsdp_load_shard: there is no shard {args.shard}")
    print(f"fsdp_load_shard: ok, shard {args.shard} holds {count} of {total} numbers")


if __name__ == "__main__":
    main()
