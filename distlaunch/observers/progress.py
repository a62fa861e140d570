"""How far a start has come, in a line."""

from distlaunch.supervisor.nodes import Reaping, Up, WorkerPhase
from distlaunch.supervisor.state import Phase, State
from distlaunch.wording import counted, spans

MOST_NAMED = 4


def progress_words(state: State) -> str:
    """`connecting: 12 of 16 nodes; waiting for gpu-3, gpu-7`; "" where there is nothing to wait for."""
    if state.phase in (Phase.CONNECTING, Phase.PREPARING):
        return _connecting(state)
    if state.phase is Phase.RUNNING:
        return _starting(state) or _joining(state)
    return ""


def _connecting(state: State) -> str:
    missing = [index for index, node in enumerate(state.nodes) if not isinstance(node, Up | Reaping)]
    there = len(state.nodes) - len(missing)
    if not missing:
        return f"{counted(there, 'node')} connected"
    return f"connecting: {there} of {counted(len(state.nodes), 'node')}; waiting for {_names(state, missing)}"


def _starting(state: State) -> str:
    planned = [worker.rank for worker in state.workers if worker.phase is WorkerPhase.PLANNED]
    started = len(state.workers) - len(planned)
    return f"starting: {started} of {state.counted(len(state.workers))}" if planned else ""


def _joining(state: State) -> str:
    """Ranks that have nothing to do with torch never join: as long as none tries, we don't speak of it."""
    missing = [worker.rank for worker in state.workers if worker.running and not worker.meeting.joined]
    joined = len(state.workers) - len(missing)
    if not joined and not any(worker.meeting.trying for worker in state.workers):
        return f"{state.counted(len(state.workers))} started"
    if not missing:
        return ""
    names = f"{'rank' if len(missing) == 1 else 'ranks'} {spans(missing)}"
    return f"joining: {joined} of {state.counted(len(state.workers))}; waiting for {names}"


def _names(state: State, nodes: list[int]) -> str:
    shown = ", ".join(state.label(node) for node in nodes[:MOST_NAMED])
    return shown if len(nodes) <= MOST_NAMED else f"{shown} and {len(nodes) - MOST_NAMED} more"
