"""Some work that a profile shows: most samples are in `slow`."""

import os


def fast() -> int:
    return sum(range(1_000))


def slow() -> int:
    return sum(range(50_000))


def main() -> None:
    for _ in range(500):
        fast()
        slow()
    print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} has finished")


if __name__ == "__main__":
    main()
