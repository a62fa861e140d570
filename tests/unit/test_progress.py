"""The line that shows the progress of a start."""

from distlaunch.agent.messages import PortHeld, RanksJoined, RanksLag, WorkerStarted
from distlaunch.observers.terminal import progress_words
from tests.unit.test_supervisor import JOB, History, up


def test_names_missing_nodes() -> None:
    job = History(f"{JOB}nodes: [gpu-a, gpu-b, gpu-c, gpu-d, gpu-e, gpu-f]")
    missing = "connecting: 0 of 6 nodes; waiting for gpu-a, gpu-b, gpu-c, gpu-d and 2 more"
    assert progress_words(job.state) == missing
    job.feed(*map(up, range(5)))
    assert progress_words(job.state) == "connecting: 5 of 6 nodes; waiting for gpu-f"
    job.feed(up(5))
    assert progress_words(job.state) == "6 nodes connected"


def test_counts_ranks_that_start_and_join() -> None:
    job = History(f"{JOB}nodes: 1".replace("procs_per_node: 2", "procs_per_node: 4"))
    job.feed(up(0), PortHeld(0, 29500), WorkerStarted(0, 0, 100))
    assert progress_words(job.state) == "starting: 1 of 4 ranks"
    job.feed(*(WorkerStarted(0, rank, 100 + rank) for rank in (1, 2, 3)))
    assert progress_words(job.state) == "4 ranks started"
    job.feed(RanksLag(0, ((3, True, "is connecting"),)))
    assert progress_words(job.state).startswith("joining: 0 of 4 ranks")
    job.feed(RanksJoined(0, (0, 2)))
    assert progress_words(job.state) == "joining: 2 of 4 ranks; waiting for ranks 1,3"
    job.feed(RanksJoined(0, (0, 1, 2)))
    assert progress_words(job.state) == "joining: 3 of 4 ranks; waiting for rank 3"
    job.feed(RanksJoined(0, (0, 1, 2, 3)))
    assert progress_words(job.state) == ""
