"""Files that commands about runs write."""

import os
from pathlib import Path

import pytest

from distlaunch.errors import DistlaunchError
from distlaunch.runs.run import replace_older
from tests.unit.samples import longest_file


def test_a_report_goes_through_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
        replace_older(str(pipe), b"page", lambda head: False)
        assert reader.read() == b"page"
    assert pipe.is_fifo()


def test_a_report_that_does_not_fit_leaves_no_file(tmp_path: Path) -> None:
    with longest_file(3), pytest.raises(DistlaunchError, match="can't write"):
        replace_older(str(tmp_path / "page"), b"page", lambda head: False)
    assert list(tmp_path.iterdir()) == []
