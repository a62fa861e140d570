"""A Ray driver: waits for all nodes, then runs a task on each."""

import os
import time

import ray


@ray.remote(num_cpus=1)
def node() -> str:
    """Return the ID of the node that runs this task."""
    time.sleep(0.5)  # long enough that no node runs all of them
    return str(ray.get_runtime_context().get_node_id())


def main() -> None:
    ray.init(address=f"{os.environ['MASTER_ADDR']}:6379")
    while ray.cluster_resources().get("CPU", 0) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.2)
    nodes = set(ray.get([node.options(scheduling_strategy="SPREAD").remote() for _ in range(4)]))
    print(f"ray: ok, tasks ran on {len(nodes)} nodes")


if __name__ == "__main__":
    main()
