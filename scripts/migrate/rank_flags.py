"""A script written before torchrun, with flags for rank, world size and master.

It ignores the environment.
"""

import argparse
import os

import torch
import torch.distributed as dist


def main() -> None:
    """Join the other ranks according to the flags, and add up their numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world_size", type=int, required=True)
    parser.add_argument("--master_addr", default="127.0.0.1")
    parser.add_argument("--master_port", default="29500")
    args = parser.parse_args()

    os.environ["MASTER_ADDR"] = args.master_addr
    os.environ["MASTER_PORT"] = args.master_port
    dist.init_process_group("gloo", rank=args.rank, world_size=args.world_size)

    value = torch.tensor(args.rank)
    dist.all_reduce(value)

    expected = sum(range(args.world_size))
    if value != expected:
        raise SystemExit(f"rank_flags: rank {args.rank} got {value}, not {expected}")
    if args.rank == 0:
        print(f"rank_flags: ok, {args.world_size} ranks at {args.master_addr}:{args.master_port}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
