"""Whether a job that is over is to be started again by its scheduler."""

from distlaunch.state.job import State

MISTAKES = (2, 126, 127)
"""Exit statuses that another start would only repeat: wrong usage, and a program that can't be run."""


def is_to_go_on(state: State) -> bool:
    """Whether the job of this last state is not done, as far as anybody can tell.

    After a notice a success may be that of a rank that has just saved its work.
    """
    cause, wanted = state.cause, state.spec.restarts.requeue
    if not wanted or (cause and (cause.cancelled or cause.final)):
        return False
    return state.noticed if state.outcome == 0 else state.outcome not in MISTAKES
