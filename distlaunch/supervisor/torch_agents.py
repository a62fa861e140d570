"""What differs with torch's elastic agents: they restart workers, and go on without lost nodes."""

import re
from typing import Any

from distlaunch.errors import JobError
from distlaunch.plan.torch_agents import with_node
from distlaunch.state import workers
from distlaunch.state.actions import FindRoute, Notice
from distlaunch.state.findings import (
    JobOver,
    NodeBack,
    NodeLeaving,
    NodeLost,
    Step,
    WorkerFailed,
    WorkerFinished,
)
from distlaunch.state.job import Cause, Phase, State
from distlaunch.state.nodes import Leaving, Route, Up, facts_of, is_missing
from distlaunch.state.timers import Timer
from distlaunch.state.workers import Worker, Workers
from distlaunch.supervisor.blame import blamed_instead, cause_of
from distlaunch.wording import counted, listed

NEVER_IN = re.compile(r"\bRendezvous(Closed|Connection|Timeout|State)Error\b|\bDistNetworkError\b")
"""How a torch agent fails when it finds no rendezvous to join."""


def agent_failed(found: WorkerFailed, state: State, now: float) -> Step:
    """A torch agent has failed: so has the job, unless it only went with its node, or came too late."""
    rank, event = found
    if state.phase is not Phase.RUNNING:
        return blamed_instead(state, rank, event), ()
    return _failed(state, rank, cause_of(state, rank, event), event.error_record)


def _failed(state: State, rank: int, cause: Cause, record: Any) -> Step:
    node = state.members[rank]
    if isinstance(state.nodes[node], Leaving):
        return state.with_worker(rank, phase=workers.WorkerPhase.VANISHED), ()
    if _finishing(state) and NEVER_IN.search(_message(record)):
        text = f"{state.label(node)}: its torch agent joined too late, after the others had finished"
        state = state.with_worker(rank, phase=workers.WorkerPhase.VANISHED)
        return state, (Notice("info", text), *_success(state))
    gone = [state.label(part) for part in state.members if is_missing(state.nodes[part])]
    after = f"; {listed(gone)} had been lost before" if gone else ""
    return state, (JobOver(cause._replace(text=cause.text + after)),)


def _message(record: Any) -> str:
    message = record.get("message") if isinstance(record, dict) else None
    return message if isinstance(message, str) else ""


def agent_finished(found: WorkerFinished, state: State, now: float) -> Step:
    """A torch agent has ended well."""
    return state, _success(state)


def _success(state: State) -> tuple[JobOver, ...]:
    """The end of the job once every torch agent that is left has ended well."""
    done = all(worker.status == 0 or worker.phase is workers.WorkerPhase.VANISHED for worker in state.workers)
    return (JobOver(),) if done and _finishing(state) else ()


def _finishing(state: State) -> bool:
    """Whether some torch agent has ended well: it does so when all ranks of its round have."""
    return any(worker.status == 0 for worker in state.workers)


def node_lost(found: NodeLost, state: State, now: float) -> Step:
    """A node is lost; if it was leaving, we have said so already."""
    if found.node not in state.members:
        return state, () if found.told else (Notice("warning", found.cause.text),)
    return (state, _success(state)) if found.told else _gone(state, found.node, found.cause)


def node_leaving(found: NodeLeaving, state: State, now: float) -> Step:
    """A node will be lost in a moment."""
    if found.node not in state.members:
        return state, (Notice("warning", found.cause.text),)
    return _gone(state, found.node, found.cause)


def _gone(state: State, node: int, cause: Cause) -> Step:
    """The others go on, if they can."""
    if state.spec.ranking == "c10d" and node == state.members[0] and not _has_ended_well(state, node):
        why = "; it hosted torch's c10d store, which every torch agent needs"
        return state, (JobOver(cause._replace(text=cause.text + (why if state.spec.elastic else ""))),)
    left, fewest = len(_going_on(state)), state.spec.fewest
    if left < fewest:
        few = f"; {left} of {counted(fewest, 'required node')} left" if state.spec.elastic else ""
        return state, (JobOver(cause._replace(text=cause.text + few)),)
    on = f"torch's agents continue with {left} of {len(state.spec.nodes)} nodes"
    return state, (Notice("warning", f"{cause.text}; {on}"), *_success(state))


def _going_on(state: State) -> list[int]:
    """The nodes whose torch agent runs, or will, or has ended well."""
    return [
        node for node in state.members if isinstance(state.nodes[node], Up) or _has_ended_well(state, node)
    ]


def _has_ended_well(state: State, node: int) -> bool:
    return state.workers[state.members.index(node)].status == 0


def take_in(found: NodeBack, state: State, now: float) -> Step:
    """Start a torch agent on a node that returns or comes late, at once, in the same generation."""
    assert state.plan is not None
    node = found.node
    if _finishing(state):
        return state, (Notice("info", f"{state.label(node)} is up, but the job is about to end"),)
    how = "is back" if node in state.members else "is up"
    try:
        plan = with_node(state.plan, node, facts_of(state.nodes[node]))
    except JobError as error:
        return state, (Notice("warning", f"{state.label(node)} {how}, but can't be used: {error}"),)
    said = Notice("info", f"{state.label(node)} {how}; starting its torch agent")
    state, asked = _find_way(_with_new_worker(state.with_generation(plan=plan), node), node, now)
    return state, (said, *asked)


def _with_new_worker(state: State, node: int) -> State:
    number = state.members.index(node)
    before, after = state.workers[:number], state.workers[number + 1 :]
    return state.with_generation(workers=Workers((*before, Worker(number), *after)))


def _find_way(state: State, node: int, now: float) -> tuple[State, tuple[FindRoute, ...]]:
    assert state.plan is not None
    this, address = state.nodes[node], state.plan.master_addr
    assert isinstance(this, Up)
    if state.plan.one_machine:
        return state.with_node(node, this._replace(route=Route("lo", "127.0.0.1"))), ()
    state = state.with_node(node, this._replace(asked=address))
    state = state.with_timer(Timer.ANSWER, now + state.spec.timeouts.connect_s, node)
    return state, (FindRoute(node, address),)
