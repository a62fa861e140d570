"""A script that spawns its own processes, so the launcher starts it only once per node."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(local_rank: int, nproc: int, world_size: int) -> None:
    """Run one process. Its rank is determined by the node's rank and its local rank."""
    rank = int(os.environ["NODE_RANK"]) * nproc + local_rank
    dist.init_process_group("gloo", rank=rank, world_size=world_size)  # at MASTER_ADDR:MASTER_PORT
    value = torch.tensor(rank)
    dist.all_reduce(value)

    expected = sum(range(world_size))
    if value != expected:
        raise SystemExit(f"own_spawn: rank {rank} got {value}, not {expected}")
    if rank == 0:
        print(f"own_spawn: ok, {world_size // nproc} nodes with {nproc} processes each")
    dist.destroy_process_group()


def main() -> None:
    """Spawn the processes of this node, and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nnodes", type=int, required=True)
    parser.add_argument("--nproc", type=int, required=True, help="processes to spawn on each node")
    args = parser.parse_args()

    mp.spawn(work, args=(args.nproc, args.nnodes * args.nproc), nprocs=args.nproc)


if __name__ == "__main__":
    main()
