"""Does a node have the GPUs that the job file says? It may be right where the node's agent can't see them."""

from distlaunch.job.document import counted
from distlaunch.job.spec import Env
from distlaunch.supervisor.actions import Notice
from distlaunch.supervisor.ending import listed
from distlaunch.supervisor.nodes import facts_of
from distlaunch.supervisor.state import State

CHOOSES = "CUDA_VISIBLE_DEVICES"
"""Where the job sets it, what the agent's own environment shows counts for nothing."""


def gpu_notices(state: State) -> tuple[Notice, ...]:
    """One warning for all nodes on which as many GPUs are visible, fewer than the job file says."""
    found: dict[tuple[int, int], list[str]] = {}
    for index in state.members:
        said, visible = state.spec.pool[index].gpus, facts_of(state.nodes[index]).gpus
        env: Env = {**state.spec.env, **state.spec.pool[index].env}
        if said and visible is not None and visible < said and CHOOSES not in env:
            found.setdefault((said, visible), []).append(state.label(index))
    return tuple(Notice("warning", f"{listed(nodes)}: {_words(*gpus)}") for gpus, nodes in found.items())


def _words(said: int, visible: int) -> str:
    there = "none is" if not visible else f"only {visible} {'is' if visible == 1 else 'are'}"
    return f"the job file says {counted(said, 'GPU')}, but {there} visible there: compare `nvidia-smi -L`"
