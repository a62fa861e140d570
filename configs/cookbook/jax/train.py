"""JAX on several processes: a sum over the devices of all of them."""

import argparse

import jax
from jax.experimental.multihost_utils import process_allgather


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--id", type=int, required=True)
    args = parser.parse_args()

    jax.distributed.initialize(args.coordinator, args.processes, args.id)
    numbers = process_allgather(jax.numpy.array(jax.process_index() + 1))
    if jax.process_index() == 0:
        print(f"jax: ok, {jax.process_count()} processes, sum {numbers.sum()}")
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
