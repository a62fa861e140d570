"""GPUs that the job file says and a node does not show: told once for all nodes that are alike."""

import pytest

from distlaunch.agent.messages import PortHeld, RouteFound
from tests.unit.test_supervisor import MASTER, History, texts, up

LOOK = "visible there; check with `nvidia-smi -L`"


def warnings(keys: str, *visible: int) -> list[str]:
    """What is said at the start of a job on three nodes, which show so many GPUs each."""
    job = History(f"script: t.py\nprocs_per_node: 2\nnodes: [a, b, c]\n{keys}")
    job.feed(*(up(node, gpus) for node, gpus in enumerate(visible)), PortHeld(0, 29400))
    job.feed(*(RouteFound(node, MASTER, MASTER, "eth0") for node in (1, 2, 0)))
    return texts(job.actions, "warning")


@pytest.mark.parametrize(
    ("keys", "visible", "told"),
    [
        ("gpus_per_node: 2", (0, 0, 0), [f"a, b, c: the job file says 2 GPUs, but none is {LOOK}"]),
        ("gpus_per_node: 1", (1, 0, 1), [f"b: the job file says 1 GPU, but none is {LOOK}"]),
        ("gpus_per_node: 8", (8, 4, 8), [f"b: the job file says 8 GPUs, but only 4 are {LOOK}"]),
        (
            "gpus_per_node: 2",
            (1, 0, 1),
            [
                f"a, c: the job file says 2 GPUs, but only 1 is {LOOK}",
                f"b: the job file says 2 GPUs, but none is {LOOK}",
            ],
        ),
        ("gpus_per_node: 2", (2, 2, 8), []),
        ("gpus_per_node: 0", (0, 0, 0), []),
        ("gpus_per_node: auto", (0, 0, 0), []),
        ("gpus_per_node: 2\nbackend: nccl", (0, 2, 2), [f"a: the job file says 2 GPUs, but none is {LOOK}"]),
        ("gpus_per_node: 2\nenv: {CUDA_VISIBLE_DEVICES: '0,1'}", (0, 0, 0), []),
    ],
)
def test_gpus_that_are_missing_are_told_once(keys: str, visible: tuple[int, ...], told: list[str]) -> None:
    assert warnings(keys, *visible) == told
