"""The same sum with MPI and with torch.distributed."""

import torch
import torch.distributed as dist
from mpi4py import MPI


def main() -> None:
    by_mpi = MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank + 1)
    dist.init_process_group("gloo")
    by_torch = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(by_torch)
    assert (MPI.COMM_WORLD.rank, by_mpi) == (dist.get_rank(), by_torch.item())
    if dist.get_rank() == 0:
        print(f"mpi4py: ok, MPI and torch agree on {dist.get_world_size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
