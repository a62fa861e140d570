"""The line that shows the progress of a start."""

from distlaunch.agent.messages import PortHeld, RanksJoined, RanksLag, RouteFound, WorkerStarted
from distlaunch.observers.terminal import progress_words
from distlaunch.plan.layout import Facts
from distlaunch.supervisor.events import AgentUp, Event
from distlaunch.supervisor.state import State
from distlaunch.supervisor.step import begin, step
from tests.unit.samples import spec_of

JOB = "command: [x]\ngpus_per_node: 0\nprocs_per_node: 2\nnodes: [gpu-a, gpu-b, gpu-c, gpu-d, gpu-e, gpu-f]"


def after(*happened: Event, job: str = JOB) -> State:
    state, _ = begin(spec_of(job), 0.0)
    for event in happened:
        state, _ = step(state, event, 1.0)
    return state


def up(node: int) -> Event:
    return AgentUp(node, Facts("/usr/bin/python3", 0), f"host{node}")


def test_missing_nodes_are_named() -> None:
    missing = "connecting: 0 of 6 nodes; waiting for gpu-a, gpu-b, gpu-c, gpu-d and 2 more"
    assert progress_words(after()) == missing
    assert progress_words(after(*map(up, range(5)))) == "connecting: 5 of 6 nodes; waiting for gpu-f"
    assert progress_words(after(*map(up, range(6)))) == "6 nodes connected"


ONE = "command: [x]\ngpus_per_node: 0\nprocs_per_node: 4\nnodes: 1"
STARTED = (
    up(0),
    PortHeld(0, 29500),
    RouteFound(0, "127.0.0.1", "127.0.0.1", "lo", "127.0.0.1", (), ()),
    WorkerStarted(0, 0, 100, None),
)


def test_ranks_that_start_and_join_are_counted() -> None:
    assert progress_words(after(*STARTED, job=ONE)) == "starting: 1 of 4 ranks"
    all_started = (*STARTED, *(WorkerStarted(0, rank, 100 + rank, None) for rank in (1, 2, 3)))

    def said(event: Event) -> str:
        return progress_words(after(*all_started, event, job=ONE))

    assert progress_words(after(*all_started, job=ONE)) == "4 ranks started"
    assert said(RanksJoined(0, (0, 2))) == "joining: 2 of 4 ranks; waiting for ranks 1,3"
    assert said(RanksJoined(0, (0, 1, 2))) == "joining: 3 of 4 ranks; waiting for rank 3"
    assert said(RanksLag(0, ((3, True, "is connecting"),))).startswith("joining: 0 of 4 ranks")
    assert said(RanksJoined(0, (0, 1, 2, 3))) == ""
