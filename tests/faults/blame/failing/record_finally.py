# Rank 1 of 3, exit status 1: torch's @record around a main() that destroys the group in a finally.
# It says: shard 1 has 0 samples

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


def train() -> None:
    samples = torch.tensor([8.0])
    for step in range(10):
        if dist.get_rank() == 1 and step == 3:
            samples -= 8
        if samples == 0:
            raise RuntimeError(f"shard {dist.get_rank()} has 0 samples")
        total = samples.clone()
        dist.all_reduce(total)


def main() -> None:
    dist.init_process_group("gloo")
    try:
        train()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    record(main)()
