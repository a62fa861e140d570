"""Who takes part in the next generation."""

from distlaunch.errors import JobError
from distlaunch.plan.layout import NodeRank, node_plan
from distlaunch.state.job import State
from distlaunch.state.nodes import (
    Connecting,
    Linked,
    Node,
    Reaping,
    Retrying,
    facts_of,
    is_expected,
    is_missing,
    is_usable,
)
from distlaunch.state.timers import Timer


def choose_members(state: State) -> tuple[int, ...]:
    """The nodes of the next generation, in rank order.

    Those that were there keep their order, so that rank 0 keeps its host while that is there; then come
    nodes of the job that are new or have returned, then spares, up to the number that the job asks for.
    """
    stayed = [index for index in state.members if is_usable(state.nodes[index])]
    others = [index for index, node in enumerate(state.nodes) if is_usable(node) and index not in stayed]
    return tuple([*stayed, *others][: len(state.spec.nodes)])


def misfit(state: State, index: int) -> str:
    """Why a connected node can't take part, such as a lack of GPUs; "" if it can.

    A job can't begin without the nodes that it lists; for those, making the plan fails.
    """
    known = state.plan.backend if state.plan else state.spec.backend
    if state.plan is None and index < len(state.spec.nodes):
        return ""
    try:
        part = node_plan(state.spec, facts_of(state.nodes[index]), index, NodeRank(0), 0)
    except JobError as error:
        return str(error)
    lacks = known == "nccl" and part.gpu_flaw
    return f"it has {part.gpu_flaw}, but nccl needs a GPU for each" if lacks else ""


def may_come(state: State) -> bool:
    """Whether we will know within moments if another node can be used."""
    return any(
        is_expected(node) or _first_try(state, node) or _to_be_reaped(state, node) for node in state.nodes
    )


def hope_is_left(state: State) -> bool:
    """Whether any node may still come back."""
    return any(isinstance(node, Connecting | Retrying) or _to_be_reaped(state, node) for node in state.nodes)


def _to_be_reaped(state: State, node: Node) -> bool:
    return isinstance(node, Linked) and is_missing(node) and state.due_at(Timer.REJOIN) is not None


def _first_try(state: State, node: Node) -> bool:
    """Whether this is the first attempt since the node was lost."""
    match node:
        case Retrying(attempt=1) | Connecting(attempt=2):
            return is_missing(node)
        case Reaping(attempt=2):
            # Where others are not waited for, it has as long as those that were there.
            return not state.spec.timeouts.rejoin_s and state.due_at(Timer.CLEAR) is not None
    return False
