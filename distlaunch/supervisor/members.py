"""Who takes part in the next generation."""

from distlaunch.errors import JobError
from distlaunch.plan.layout import Facts, node_plan
from distlaunch.supervisor.state import NodePhase, NodeState, State
from distlaunch.supervisor.timers import Timer


def choose_members(state: State) -> tuple[int, ...]:
    """The nodes of the next generation, in rank order.

    Those that were there keep their order, so that rank 0 keeps its host while that is there; then come
    nodes of the job that are new or have returned, then spares, up to the number that the job asks for.
    """
    stayed = [index for index in state.members if state.nodes[index].usable]
    others = [index for index, node in enumerate(state.nodes) if node.usable and index not in stayed]
    return tuple([*stayed, *others][: len(state.spec.nodes)])


def misfit(state: State, index: int) -> str:
    """Why a node that is there can't take part, or nothing: it may lack GPUs.

    A job can't begin without the nodes that it lists; of those it is the plan that says it.
    """
    known = state.plan.backend if state.plan else state.spec.backend
    if state.spec.torch_agents or (state.plan is None and index < len(state.spec.nodes)):
        return ""
    try:
        part = node_plan(state.spec, state.nodes[index].facts or Facts(""), index, 0, 0)
    except JobError as error:
        return str(error)
    if known == "nccl" and part.gpus < part.procs:
        return f"it has {part.gpus} GPUs for {part.procs} workers, and the job runs with nccl"
    return ""


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
    return node.lost and node.phase is NodePhase.UP and state.due_at(Timer.REJOIN) is not None


def _first_try(node: NodeState) -> bool:
    first_attempt = {NodePhase.RETRYING: 1, NodePhase.CONNECTING: 2}
    return node.lost and first_attempt.get(node.phase) == node.attempts
