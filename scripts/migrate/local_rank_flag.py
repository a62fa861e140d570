"""A script for the old torch.distributed.launch: --local_rank is a flag, all else is in the environment."""

import argparse
from itertools import pairwise

import torch
import torch.distributed as dist


def gather_local_ranks(local_rank: int) -> list[int]:
    """Return the local ranks of all ranks, in rank order."""
    local_ranks = [torch.tensor(-1) for _ in range(dist.get_world_size())]
    dist.all_gather(local_ranks, torch.tensor(local_rank))
    return [int(local_rank) for local_rank in local_ranks]


def counts_up_per_node(local_ranks: list[int]) -> bool:
    """Return whether local ranks count up from 0 on each node."""
    return local_ranks[0] == 0 and all(after in (before + 1, 0) for before, after in pairwise(local_ranks))


def main() -> None:
    """Join the other ranks, and compare the local ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--local_rank", "--local-rank", type=int, required=True)
    args = parser.parse_args()

    dist.init_process_group("gloo")  # with GPUs, call torch.cuda.set_device(args.local_rank) first
    local_ranks = gather_local_ranks(args.local_rank)

    if not counts_up_per_node(local_ranks):
        raise SystemExit(f"local_rank_flag: the local ranks are {local_ranks}")
    if dist.get_rank() == 0:
        print(f"local_rank_flag: ok, the local ranks are {local_ranks}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
