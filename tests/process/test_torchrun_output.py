"""`distlaunch torchrun` next to torchrun: where output goes."""

import re
from pathlib import Path

import pytest

from tests.process.torchruns import NEEDS_TORCH, OUTPUTS, PRINT, Torchruns, assert_fine, logs_of, ours, script

pytestmark = NEEDS_TORCH


@pytest.mark.parametrize("name", OUTPUTS)
def test_output_goes_where_torchrun_puts_it(tmp_path: Path, torchruns: Torchruns, name: str) -> None:
    script(tmp_path, PRINT)
    theirs = torchruns(name)
    mine = ours(tmp_path, *OUTPUTS[name], "--nproc-per-node=3", "--log-dir=logs", "worker.py")
    assert (theirs.status, mine.returncode) == (0, 0), mine.stderr
    assert lines_of_ranks(mine.stdout) == lines_of_ranks(theirs.stdout)
    assert lines_of_ranks(mine.stderr) == lines_of_ranks(theirs.stderr)
    assert logs_of(tmp_path) == logs_of(theirs.folder)


def lines_of_ranks(text: str) -> list[str]:
    return sorted(line for line in text.splitlines() if re.search(r"(out|err) \d+$", line))


def test_maps_reach_local_ranks_above_9(tmp_path: Path) -> None:
    """torchrun refuses them."""
    script(tmp_path, PRINT)
    done = ours(tmp_path, "-r=10:3,9:1", "-t=11:1", "--nproc-per-node=12", "--log-dir=logs", "worker.py")
    assert_fine(done)
    expected = {f"out {rank}" for rank in range(9)} | {"[default11]:out 11"}
    assert set(lines_of_ranks(done.stdout)) == expected
    assert set(lines_of_ranks(done.stderr)) == {f"err {rank}" for rank in (*range(10), 11)}
    assert logs_of(tmp_path) == {
        ("attempt_0/9/stdout.log", "out 9\n"),
        ("attempt_0/10/stdout.log", "out 10\n"),
        ("attempt_0/10/stderr.log", "err 10\n"),
        ("attempt_0/11/stdout.log", "out 11\n"),
    }


def test_the_prefixs_template(tmp_path: Path) -> None:
    script(tmp_path, PRINT)
    template = "--log-line-prefix-template=<${role_name}/${local_rank}/${rank}/$other> "
    done = ours(tmp_path, template, "--tee=1", "--role=trainer", "--log-dir=logs", "worker.py")
    assert_fine(done)
    assert done.stdout == "<trainer/0/0/$other> out 0\n"


def test_lines_of_teed_ranks_are_not_glued(tmp_path: Path) -> None:
    """torchrun glues a line that lacks its end to the next rank's."""
    script(tmp_path, "import sys; sys.stdout.write('no end')")
    done = ours(tmp_path, "--tee=1", "--nproc-per-node=2", "--log-dir=logs", "worker.py")
    assert sorted(done.stdout.splitlines()) == ["[default0]:no end", "[default1]:no end"]
    assert {text for _, text in logs_of(tmp_path)} == {"no end"}


def test_nothing_is_left_in_the_temporary_folder(tmp_path: Path) -> None:
    """torchrun leaves a folder there, each time."""
    script(tmp_path, PRINT)
    assert_fine(ours(tmp_path, "--nproc-per-node=2", "worker.py"))
    assert_fine(ours(tmp_path, "--log-dir=/dev/null", "--tee=3", "worker.py"))
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_log_folder_that_is_a_file_is_told_in_a_line(tmp_path: Path) -> None:
    script(tmp_path, PRINT)
    done = ours(tmp_path, "--log-dir=worker.py", "worker.py")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
