"""Measures how long it takes to print a plan with many nodes."""

from pathlib import Path

from .contest import Contest, command
from .starting import OURS

FORMATS = ("table", "json", "shell", "torchrun")


def of_thousand(directory: Path) -> Contest:
    """Time `dry-run` of 1,000 nodes with 8 ranks each, in every format."""
    job = directory / "wide.yaml"
    job.write_text("script: train.py\nnodes: ['node[0001-1000]']\ngpus_per_node: 8\nbackend: nccl\n")
    (directory / "train.py").write_text("")
    ways = {
        f"dry-run, {each}": command(
            [*OURS, "dry-run", str(job), *(["--json"] if each == "json" else _format(each))]
        )
        for each in FORMATS
    }
    return Contest("dry-run of 1,000 nodes with 8 ranks each (at most 300 ms)", ways)


def _format(each: str) -> list[str]:
    return [] if each == "table" else ["--format", each]
