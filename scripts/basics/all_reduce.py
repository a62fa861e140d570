"""Collectives: sum over all ranks with all_reduce, then over a subset of ranks with a new group."""

import socket

import torch
import torch.distributed as dist


def all_ranks_sum(rank: int) -> int:
    """Every rank contributes its number plus one, and every rank gets the sum."""
    value = torch.tensor(rank + 1)
    dist.all_reduce(value, op=dist.ReduceOp.SUM)
    return int(value)


def even_ranks_sum(rank: int, world_size: int) -> int:
    """The even ranks sum their numbers. The odd ranks keep theirs."""
    evens = dist.new_group(
        range(0, world_size, 2)
    )  # all ranks must create the group, even if they aren't members
    value = torch.tensor(rank + 1)
    if rank % 2 == 0:
        dist.all_reduce(value, group=evens)
    return int(value)


def main() -> None:
    """Run both, and compare the sums with the formulas."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    total, subtotal = all_ranks_sum(rank), even_ranks_sum(rank, world_size)

    expected = world_size * (world_size + 1) // 2
    if total != expected:
        raise SystemExit(f"all_reduce: rank {rank} got {total}, not 1 + … + {world_size} = {expected}")
    expected = ((world_size + 1) // 2) ** 2 if rank % 2 == 0 else rank + 1
    if subtotal != expected:
        raise SystemExit(f"all_reduce: rank {rank} got {subtotal} from its group, not {expected}")
    print(f"rank {rank} of {world_size} on {socket.gethostname()}: {total} from all, {subtotal} from some")
    dist.barrier()
    if rank == 0:
        print(f"all_reduce: ok, {world_size} ranks sum to {total}, the even ones to {subtotal}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
