"""Nodes whose launchers people started by hand: who is blamed where one node has only lost its peers."""

import pytest

from distlaunch.job.spec import ByHand, Invocation
from distlaunch.state.events import PeerFailed, PeerRestarts
from distlaunch.state.job import Phase
from distlaunch.supervisor.blame import VERDICT_S
from tests.unit.samples import PEER_GONE
from tests.unit.test_supervisor import JOB, History, exited


def beside_another(nodes: int = 2) -> History:
    """Ranks 1 and 2 run here, rank 0 on node 0."""
    job = History(f"{JOB}restarts: 1\nmaster_addr: localhost\nmaster_port: 29500").to_running()
    how = Invocation(by_hand=ByHand("localhost", 29500, 1, nodes, sizes=(1, 2)))
    job.state = job.state._replace(spec=job.state.spec._replace(invocation=how))
    return job


def lose_all_peers(job: History) -> None:
    for rank in (0, 1):
        job.feed(exited(0, rank, 1, job.now)._replace(words=PEER_GONE))


@pytest.mark.parametrize(
    "event", [PeerRestarts(5, "node 0 failed: rank 0"), PeerFailed(5, "node 0 failed: rank 0")]
)
def test_another_nodes_word_counts_before_a_lost_connection(event: PeerRestarts | PeerFailed) -> None:
    job = beside_another()
    lose_all_peers(job)
    assert job.state.phase is Phase.RUNNING, "nobody waits for what the other node says"
    job.feed(event)
    assert job.state.cause is not None
    assert (job.state.cause.text, job.state.cause.exit_status) == ("node 0 failed: rank 0", 5)


def test_without_such_a_word_it_is_blamed_after_a_moment() -> None:
    job = beside_another()
    lose_all_peers(job)
    job.wait(VERDICT_S)
    assert (
        job.state.cause is not None and "after losing the connection to another rank" in job.state.cause.text
    )


def test_where_no_other_node_is_nobody_waits() -> None:
    job = beside_another(nodes=1)
    lose_all_peers(job)
    assert job.state.cause is not None
