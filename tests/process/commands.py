"""Commands that run to their ends, and jobs of one rank: what many tests of real processes start."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.harness import PATIENCE_S, distlaunch, write_job

Done = subprocess.CompletedProcess[str]
ONE = "gpus_per_node: 0\n"


def completed(argv: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[Any]:
    """Run any command to its end, whatever its status."""
    streams = {} if "stdout" in options else {"capture_output": True}
    options = {"text": True, "timeout": PATIENCE_S, **streams, **options}
    return subprocess.run(argv, check=False, **options)


def run_one(folder: Path, worker: str, keys: str = "", *words: str, **options: Any) -> Done:
    """`distlaunch run` of the Python text `worker` on the CPU, by one rank unless `keys` say otherwise."""
    return distlaunch("run", str(write_job(folder, worker, ONE + keys)), *words, **options)
