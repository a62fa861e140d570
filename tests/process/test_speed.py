"""What the benchmark compares keeps its ratios, with a margin for a machine that is busy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import PATIENCE_S, ROOT

MARGIN = 2.5
"""The tests beside this one take from either competitor what they want."""


def test_the_ratios_of_the_benchmark_are_kept(tmp_path: Path) -> None:
    argv = [sys.executable, str(ROOT / "scripts/benchmark"), "here", "plan", "--runs", "3", "--json"]
    done = subprocess.run(
        [*argv, "--out", str(tmp_path)], capture_output=True, text=True, timeout=3 * PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert json.loads((tmp_path / "benchmark.json").read_text()) == document
    ratios = [ratio for contest in document["contests"] for ratio in contest["ratios"]]
    assert ratios, "nothing was compared"
    for ratio in ratios:
        assert ratio["ratio"] <= MARGIN * ratio["at_most"], ratio


def test_a_contest_that_there_is_not_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/benchmark"), "nonsense"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 2
    assert "unknown contest: nonsense; there are here, plan, " in done.stderr


def test_the_waterfall_shows_each_process(tmp_path: Path) -> None:
    argv = [
        sys.executable,
        str(ROOT / "scripts/waterfall"),
        "--runs",
        "2",
        "sh",
        "-c",
        "sleep 0 & wait; exit 3",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    if "only root" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    *lines, empty, summary = done.stdout.splitlines()
    told = [line.split("#", 1)[1] for line in lines]
    assert told[0].startswith("0 becomes sh -c sleep 0")
    assert "1 is forked by #0" in told
    assert "1 becomes sleep 0" in told
    assert "1 exits with 0" in told
    assert told[-1] == "0 exits with 3"
    assert (empty, summary.split(", ")[1].split(" (")[0]) == ("", "the median of 2 runs")
