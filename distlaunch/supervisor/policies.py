"""What differs with who gives out the ranks, once they run: one set of answers for each."""

from collections.abc import Callable
from typing import NamedTuple

from distlaunch.supervisor import blame, restarting, torch_agents
from distlaunch.supervisor.events import WorkerExited
from distlaunch.supervisor.state import Cause, State, Step


class Policy(NamedTuple):
    """What is done about a worker, or a member's node; `cause` is why the job would end, if it does."""

    worker_failed: Callable[[State, int, WorkerExited, float], Step]
    """Rank; it has ended with a status other than 0."""
    worker_finished: Callable[[State, float], Step]
    """While all is well."""
    member_lost: Callable[[State, int, Cause, bool, float], Step]
    """Node, and whether it was known to be leaving."""
    member_leaving: Callable[[State, int, Cause, float], Step]
    """Node: its workers will end in a moment."""
    node_back: Callable[[State, int, float], Step]
    """Node, which is usable while the others run."""


_OURS = Policy(
    worker_failed=blame.rank_failed,
    worker_finished=blame.rank_finished,
    member_lost=restarting.member_lost,
    member_leaving=restarting.member_leaving,
    node_back=restarting.is_back,
)
"""One failure ends a generation; another may follow, with the nodes that are there then."""
_TORCHS = Policy(
    worker_failed=torch_agents.agent_failed,
    worker_finished=torch_agents.finish,
    member_lost=torch_agents.node_lost,
    member_leaving=torch_agents.node_gone,
    node_back=torch_agents.take_in,
)
"""Torch's agents restart their ranks and go on without a node; we take nodes in, and end the job."""


def policy_of(state: State) -> Policy:
    """That of the job's engine."""
    return _OURS if state.spec.engine.gives_ranks else _TORCHS
