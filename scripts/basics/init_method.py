"""Manual rendezvous: init_method="tcp://ADDR:PORT", with rank and world_size from the command line."""

import argparse

import torch
import torch.distributed as dist


def main() -> None:
    """Join the other ranks, and check that each rank is present once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--init-method", required=True, metavar="tcp://ADDR:PORT")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    args = parser.parse_args()

    dist.init_process_group("gloo", init_method=args.init_method, rank=args.rank, world_size=args.world_size)
    ranks = [torch.tensor(-1) for _ in range(args.world_size)]
    dist.all_gather(ranks, torch.tensor(args.rank))

    met = [int(rank) for rank in ranks]
    if met != list(range(args.world_size)):
        raise SystemExit(f"init_method: rank {args.rank} met {met}, not every rank once")
    if args.rank == 0:
        print(f"init_method: ok, ranks {met} met at {args.init_method}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
