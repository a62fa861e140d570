"""The short status of a run, common to all commands: its state, when that state began, and its controller."""

from collections.abc import Mapping
from enum import Enum
from typing import Any

from distlaunch.agent.frozen import Frozen
from distlaunch.supervisor.nodes import may_be_occupied
from distlaunch.supervisor.state import Cause, Phase, State
from distlaunch.wording import listed

VERSION = 1
"""Version of status.json. It changes whenever the format changes incompatibly."""
MAX_NUMBER, MAX_TIME = 1 << 31, 1e11
"""Limits of the integers and of the times in status.json."""


class RunState(Enum):
    """The state of a run. The last four are final.

    LOST means that the controller died without recording an end. SUSPENDED means that a signal has stopped
    the controller. UNKNOWN means that the state is known only on another host.
    """

    PENDING = "PENDING"
    CONNECTING = "CONNECTING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    RESTARTING = "RESTARTING"
    STOPPING = "STOPPING"
    UNKNOWN = "UNKNOWN"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    LOST = "LOST"

    @property
    def over(self) -> bool:
        """Return whether the state is final."""
        return self in (RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED, RunState.LOST)


class ControllerProcess(Frozen):
    """The process that runs a job. `boot` identifies the current boot of its host; "" = unknown.

    `pid` is its PID for the processes in its `namespace`, a PID namespace; "" = unknown.
    """

    host: str
    pid: int
    boot: str = ""
    namespace: str = ""


class Status(Frozen):
    """The contents of status.json. Times are seconds since the epoch.

    `where` names the nodes. `why` is the root cause of a failure. `file` is the path of the job file.
    `trouble` is the reason why output is being lost. While a scheduler is ending the job, `ends_as` and
    `ends_with` are the final state and exit status of the run, even if the controller is killed first.
    """

    run: str
    job: str
    state: RunState
    since: float
    began: float
    controller: ControllerProcess
    ranks: int = 0
    nodes: int = 0
    where: str = ""
    restarts: int = 0
    exit_status: int | None = None
    why: str = ""
    file: str = ""
    trouble: str = ""
    ends_as: RunState | None = None
    ends_with: int | None = None


WHY_CHARACTERS = 600
"""Maximum characters of the root cause in status.json. summary.json contains the whole text."""


def document_of(status: Status) -> dict[str, Any]:
    """Return a status as a JSON object."""
    fields = status._asdict()
    return {
        "version": VERSION,
        **fields,
        "state": status.state.value,
        "ends_as": status.ends_as and status.ends_as.value,
        "controller": status.controller._asdict(),
        "why": status.why[:WHY_CHARACTERS],
    }


def status_of(document: Mapping[str, Any]) -> Status:
    """Return the status in a JSON object, ignoring unknown keys. Raises KeyError, TypeError, ValueError."""
    known = {name: value for name, value in document.items() if name in Status._fields}
    process, fields = document["controller"], ControllerProcess._fields
    controller = ControllerProcess(**{name: process[name] for name in fields if name in process})
    ends_as = RunState(known["ends_as"]) if known.get("ends_as") else None
    states = {"state": RunState(document["state"]), "ends_as": ends_as}
    status = Status(**{**known, **states, "controller": controller})
    for record in tuple[Any, ...]((status, controller)):  # anything may have damaged the file
        for value, kind in zip(record, record.__annotations__.values(), strict=True):
            form, limit = (float | int, MAX_TIME) if kind is float else (kind, MAX_NUMBER)
            if not isinstance(value, form) or (isinstance(value, float | int) and not 0 <= value < limit):
                raise TypeError(f"of another type, or out of range: {value!r}")
    return status


def run_state(state: State) -> RunState:
    """Return the state of a run from the state of its supervisor."""
    if state.phase is Phase.DONE:
        return _final_state(state.cause)
    if state.phase is Phase.PREPARING:
        return RunState.RESTARTING if state.restarts else RunState.CONNECTING
    return RunState(state.phase.value.upper())


def _final_state(cause: Cause | None) -> RunState:
    if cause is None:
        return RunState.SUCCEEDED
    return RunState.CANCELLED if cause.cancelled else RunState.FAILED


def status_now(last: Status, state: State, now: float) -> Status:
    """Return the status of a run at time `now`."""
    here, ends = run_state(state), state.scheduler_ends
    return last._replace(
        state=here,
        since=last.since if last.state is here else now,
        ranks=len(state.workers),
        nodes=len(state.members),
        where=_where(state),
        restarts=state.spec.restarts_before + len(state.restarts),
        exit_status=state.outcome if here.over else None,
        why=_why(state),
        ends_as=_final_state(state.cause) if ends else None,
        ends_with=state.outcome if ends else None,
    )


def _why(state: State) -> str:
    """Return the root cause. After a stop, also name the nodes on which ranks may be left.

    A scheduler ends what is left on its nodes.
    """
    cause = state.cause
    if cause is None or not (cause.cancelled and state.phase is Phase.DONE) or state.spec.allocation:
        return cause.text if cause else ""
    left = [state.label(i) for i, node in enumerate(state.nodes) if may_be_occupied(node)]
    where = f"; ranks may be left on {listed(left)}, which did not confirm the cleanup"
    return cause.text + (where if left else "")


def _where(state: State) -> str:
    nodes, allocation = state.plan.node_words if state.plan else "", state.spec.allocation
    return f"{allocation.name}: {nodes}" if allocation and nodes else nodes
