"""The ratios of the benchmark, with a margin for a busy machine, and the waterfall."""

import json
import os
import runpy
import sys
from pathlib import Path

import pytest

from tests.harness import PATIENCE_S, ROOT, completed

MARGIN = 2.5
"""The tests beside this one take from either competitor what they want."""


def test_the_ratios_of_the_benchmark_are_kept(tmp_path: Path) -> None:
    argv = [sys.executable, str(ROOT / "scripts/benchmark"), "here", "plan", "--runs", "2", "--json"]
    done = completed([*argv, "--out", str(tmp_path)], timeout=3 * PATIENCE_S, status=0)
    document = json.loads(done.stdout)
    assert json.loads((tmp_path / "benchmark.json").read_text()) == document
    ratios = [ratio for contest in document["contests"] for ratio in contest["ratios"]]
    assert ratios, "nothing was compared"
    for ratio in ratios:
        assert ratio["ratio"] <= MARGIN * ratio["at_most"], ratio


def test_the_waterfall_shows_each_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its processes end only once it has looked at them."""
    waterfall = runpy.run_path(str(ROOT / "scripts/waterfall"))["main"].__globals__
    look = waterfall["command_line"]

    def looked_at(pid: int) -> str:
        words: str = look(pid)
        if words == "cat gate":
            os.close(os.open("gate", os.O_WRONLY))
        return words

    os.mkfifo(tmp_path / "gate")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(waterfall, "command_line", looked_at)
    monkeypatch.setattr(sys, "argv", ["waterfall", "--runs", "2", "sh", "-c", "cat gate & wait; exit 3"])
    try:
        waterfall["main"]()
    except SystemExit as refused:
        pytest.skip(str(refused))
    *lines, empty, summary = capsys.readouterr().out.splitlines()
    told = [line.split("#", 1)[1] for line in lines]
    assert told[0].startswith("0 becomes sh -c cat gate")
    assert "1 is forked by #0" in told
    assert "1 becomes cat gate" in told
    assert "1 exits with 0" in told
    assert told[-1] == "0 exits with 3"
    assert (empty, summary.split(", ")[1].split(" (")[0]) == ("", "the median of 2 runs")
