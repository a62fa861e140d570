"""Who takes part in the next generation."""

from distlaunch.errors import JobError
from distlaunch.plan.layout import Facts, choose_backend, node_plan
from distlaunch.supervisor.actions import Notice
from distlaunch.supervisor.state import NodePhase, NodeState, State


def choose_members(state: State) -> tuple[int, ...]:
    """The nodes of the next generation, in rank order.

    Those that were there keep their order, so that rank 0 keeps its host while that is there; then come
    nodes of the job that are new or have returned, then spares, up to the number that the job asks for.
    """
    fit = [index for index, node in enumerate(state.nodes) if node.usable and not misfit(state, index)]
    stayed = [index for index in state.members if index in fit]
    others = [index for index in fit if index not in stayed]
    return tuple([*stayed, *others][: len(state.spec.nodes)])


def misfit(state: State, index: int) -> str:
    """Why a node that is there can't take part in a job that has begun, or nothing: it may lack GPUs."""
    if state.plan is None or state.spec.torch_agents:
        return ""
    if state.nodes[index].unfit:
        return state.nodes[index].unfit
    try:
        part = node_plan(state.spec, state.nodes[index].facts or Facts(""), index, 0, 0)
        choose_backend(state.spec, [part])
    except JobError as error:
        return str(error)
    return ""


def misfit_notices(state: State, *indices: int) -> tuple[Notice, ...]:
    """A line for each of these nodes that can't take part."""
    reasons = {index: misfit(state, index) for index in indices if state.nodes[index].usable}
    return tuple(
        Notice("warning", f"{state.label(index)} can't take part: {why}")
        for index, why in reasons.items()
        if why
    )


def complete(state: State) -> bool:
    """Whether this generation has as many nodes as the job asks for."""
    return len(state.members) >= len(state.spec.nodes)


def may_come(state: State) -> bool:
    """Whether a node that could take part will be known to be usable, or not, within moments."""
    return any(node.pending or _first_try(node) or _to_be_reaped(state, node) for node in state.nodes)


def hope_is_left(state: State) -> bool:
    """Whether any node may still come back."""
    coming = (NodePhase.CONNECTING, NodePhase.RETRYING)
    return any(node.phase in coming or _to_be_reaped(state, node) for node in state.nodes)


def _to_be_reaped(state: State, node: NodeState) -> bool:
    return node.lost and node.phase is NodePhase.UP and state.rejoin_by is not None


def _first_try(node: NodeState) -> bool:
    first_attempt = {NodePhase.RETRYING: 1, NodePhase.CONNECTING: 2}
    return node.lost and first_attempt.get(node.phase) == node.attempts
