"""Tuples of nodes and workers that keep their counts."""

from hypothesis import given
from hypothesis import strategies as st

from distlaunch.plan.layout import Facts
from distlaunch.supervisor.nodes import (
    Connecting,
    End,
    Exited,
    Nodes,
    Retrying,
    Up,
    Worker,
    WorkerPhase,
    Workers,
)
from tests.unit.samples import bounded

_phases: st.SearchStrategy[WorkerPhase | Exited] = st.sampled_from(
    [WorkerPhase.PLANNED, WorkerPhase.RUNNING, Exited(0, 1.0), Exited(7, 1.0)]
)
_workers: st.SearchStrategy[Worker] = st.tuples(_phases, st.booleans(), st.booleans()).map(
    lambda drawn: Worker(0)._replace(phase=drawn[0], joined=drawn[1], trying=drawn[2])
)


@given(
    st.lists(_workers, min_size=1, max_size=9),
    st.lists(st.tuples(st.integers(0), _workers), max_size=9),
)
@bounded(200)
def test_replacements_and_counts_are_those_of_a_list(
    items: list[Worker], changes: list[tuple[int, Worker]]
) -> None:
    many = Workers(items)
    for number, worker in changes:
        before, index = many, number % len(items)
        many = many.replaced(index, worker)
        assert before == tuple(items), "a frozen sequence has changed"
        items = [*items[:index], worker, *items[index + 1 :]]
    assert many == tuple(items)
    assert ([*many], len(many), many[-1]) == (items, len(items), items[-1])
    assert many == Workers(items) and hash(many) == hash(Workers(items)) and many[1:3] == tuple(items[1:3])
    assert many.counts.succeeded == sum(worker.status == 0 for worker in items)
    assert many.counts.joined == sum(worker.joined for worker in items)
    assert many.counts.joining == sum(worker.joined or worker.trying for worker in items)
    assert many.counts.alive == sum(worker.going for worker in items)


def test_nodes_are_counted_by_phase() -> None:
    nodes = Nodes([Connecting(), Retrying(1, None), Up(Facts("python3")), End.CLOSED])
    assert tuple(nodes.counts) == (2, 1, 1, 1)
    nodes = nodes.replaced(0, End.CLOSED)
    assert tuple(nodes.counts) == (1, 1, 1, 2)


def test_empty_tuples_count_nothing() -> None:
    assert (Workers().counts.succeeded, len(Workers()), [*Workers()]) == (0, 0, [])
