"""Files that commands about runs write."""

import json
import os
from pathlib import Path

import pytest

from distlaunch.errors import DistlaunchError
from distlaunch.observers.run_list import Begun, append, lines_of, starts_in
from distlaunch.runs.run import replace_older
from distlaunch.runs.submissions import listing
from distlaunch.supervisor.status import ControllerProcess, RunState, Status, document_of
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


def test_the_latest_of_the_runs_of_one_second_is_the_one_that_began_last(tmp_path: Path) -> None:
    for name, began in (("z", 1.1), ("a", 1.2), ("m", 1.0)):
        run = f"{name}-20260101-120000-aaaaaaaa"
        status = Status(run, name, RunState.SUCCEEDED, 2.0, began, ControllerProcess("", 0))
        (tmp_path / run).mkdir()
        (tmp_path / run / "events.jsonl").touch()
        (tmp_path / run / "status.json").write_text(json.dumps(document_of(status)))
    (first,) = listing([str(tmp_path)], ended=True, most=1)
    assert first.status.job == "a"


FIRST = [("a1", 0, "--stage 1"), ("a2", 0, "--stage 2"), ("a3", 0, "--stage 2")]
SECOND = [("b1", 1, "--stage 1"), ("b2", 1, "--stage 2")]
CONTINUED = {
    "the only run": ([FIRST[0]], 1, "--stage 1", ["a1"]),
    "the same arguments": (FIRST, 1, "--stage 2", ["a2"]),
    "and the second time": ([*FIRST, SECOND[1]], 1, "--stage 2", ["a3"]),
    "although the first is skipped now": (FIRST[:2], 1, "--stage 2", ["a2"]),
    "in each start": ([*FIRST, *SECOND], 2, "--stage 2", ["a2", "b2"]),
    "not of this start": (FIRST[:1], 0, "--stage 1", []),
    "more than before": ([*FIRST[:1], SECOND[0]], 1, "--stage 1", []),
    "a later stage, for the first time": ([*FIRST[:1], SECOND[0]], 1, "--stage 2", []),
    "other arguments": (FIRST[:1], 1, "--resume", ["a1"]),
}
"""Runs that a job has started, with their numbers of earlier starts and arguments; the next one; and what it
continues."""


@pytest.mark.parametrize(("earlier", "starts", "args", "runs"), CONTINUED.values(), ids=CONTINUED)
def test_a_run_of_a_requeued_job_continues_the_one_that_it_is(
    earlier: list[tuple[str, int, str]], starts: int, args: str, runs: list[str]
) -> None:
    known = [Begun(run, "job", number, words) for run, number, words in earlier]
    known.append(Begun("x", "another", 0, args))
    assert [each.run for each in Begun("new", "job", starts, args).continued(known)] == runs


def test_a_line_that_a_full_disk_has_torn_costs_no_later_one(tmp_path: Path) -> None:
    path = str(tmp_path / "list")
    append(path, {"run": "first"})
    with longest_file(os.path.getsize(path) + 5):
        append(path, {"run": "torn"})
    for run in ("second", "third"):
        append(path, {"run": run})
    assert [line["run"] for line in lines_of(path)] == ["first", "second", "third"]


def test_a_list_of_starts_may_lack_arguments(tmp_path: Path) -> None:
    """It may be of an earlier version, from before the job was requeued."""
    (tmp_path / "list").write_text('{"run": "a", "job": "job", "starts": 0}\n{"run": "b", "job": "job"}\n')
    assert starts_in(str(tmp_path / "list")) == [Begun("a", "job", 0)]
