"""What differs with torch's elastic agents: they restart workers, and go on without lost nodes."""

import re
from typing import Any

from distlaunch.errors import JobError
from distlaunch.plan.elastic import with_node
from distlaunch.supervisor import blame, stalling, workers
from distlaunch.supervisor.actions import Action, FindRoute, Notice
from distlaunch.supervisor.ending import end_job, listed
from distlaunch.supervisor.events import WorkerExited
from distlaunch.supervisor.nodes import Leaving, Route, Up, facts_of, is_missing
from distlaunch.supervisor.preparing import start_when_prepared
from distlaunch.supervisor.state import Cause, Phase, State, Step
from distlaunch.supervisor.timers import Timer
from distlaunch.supervisor.workers import Worker

NEVER_IN = re.compile(r"\bRendezvous(Closed|Connection|Timeout|State)Error\b|\bDistNetworkError\b")
"""How a torch agent fails that finds no rendezvous to join."""


def agent_failed(state: State, rank: int, event: WorkerExited, now: float) -> Step:
    """A torch agent has failed: so has the job, unless it only went with its node, or came too late."""
    from distlaunch.supervisor.peer_errors import Words  # most agents don't fail

    cause = blame.cause_of(state, rank, event, Words())
    if stalling.died_of_its_dump(state, rank, event.status):
        return stalling.stall_act_due(state.without_timers(Timer.STALL_ACT), now)
    if state.phase is not Phase.RUNNING:
        return blame.blamed_instead(state, cause, Words()), ()
    return _failed(state, rank, cause, event.error_record, now)


def _failed(state: State, rank: int, cause: Cause, record: Any, now: float) -> Step:
    node = state.members[rank]
    if isinstance(state.nodes[node], Leaving):
        return state.with_worker(rank, phase=workers.Phase.VANISHED), ()
    if _finishing(state) and NEVER_IN.search(_message(record)):
        text = f"{state.label(node)}: its torch agent joined too late, when the others had finished"
        state, actions = finish(state.with_worker(rank, phase=workers.Phase.VANISHED), now)
        return state, (Notice("info", text), *actions)
    gone = [state.label(part) for part in state.members if is_missing(state.nodes[part])]
    after = f"; before that, {listed(gone)} was lost" if gone else ""
    return end_job(state, cause._replace(text=cause.text + after), now)


def _message(record: Any) -> str:
    message = record.get("message") if isinstance(record, dict) else None
    return message if isinstance(message, str) else ""


def finish(state: State, now: float) -> Step:
    """Success once every torch agent that is left has ended well."""
    done = all(worker.status == 0 or worker.phase is workers.Phase.VANISHED for worker in state.workers)
    return end_job(state, None, now) if done and _finishing(state) else (state, ())


def _finishing(state: State) -> bool:
    """Whether some torch agent has ended well: it does so when all ranks of its round have."""
    return any(worker.status == 0 for worker in state.workers)


def node_lost(state: State, node: int, cause: Cause, leaving: bool, now: float) -> Step:
    """A node is lost; if it was leaving, that is told already."""
    return go_on(state, now) if leaving else node_gone(state, node, cause, now)


def node_gone(state: State, node: int, cause: Cause, now: float) -> Step:
    """A node is lost, or will be in a moment: the others go on, if they can."""
    if state.spec.ranking == "c10d" and node == state.members[0] and not _has_ended_well(state, node):
        why = "; torch's c10d store was there, and no torch agent can go on without it"
        return end_job(state, cause._replace(text=cause.text + (why if state.spec.elastic else "")), now)
    left, fewest = len(_going_on(state)), state.spec.fewest
    if left < fewest:
        few = f"; {left} of at least {fewest} nodes are left" if state.spec.elastic else ""
        return end_job(state, cause._replace(text=cause.text + few), now)
    said = Notice(
        "warning", f"{cause.text}; torch's agents go on with {left} of {len(state.spec.nodes)} nodes"
    )
    state, actions = go_on(state, now)
    return state, (said, *actions)


def go_on(state: State, now: float) -> Step:
    """Do what a node that is gone was the last to be waited for."""
    state, ended = finish(state, now)
    state, started = start_when_prepared(state, now)
    return state, (*ended, *started)


def _going_on(state: State) -> list[int]:
    """The nodes whose torch agent runs, or will, or has ended well."""
    return [
        node for node in state.members if isinstance(state.nodes[node], Up) or _has_ended_well(state, node)
    ]


def _has_ended_well(state: State, node: int) -> bool:
    return state.workers[state.members.index(node)].status == 0


def take_in(state: State, node: int, now: float) -> Step:
    """Have a torch agent started on a node that is back, or comes late: at once, in the same generation."""
    assert state.plan is not None
    if _finishing(state):
        return state, (Notice("info", f"{state.label(node)} is there, but the job is about to end"),)
    how = "is back" if node in state.members else "is there now"
    try:
        plan = with_node(state.plan, node, facts_of(state.nodes[node]))
    except JobError as error:
        return state, (Notice("warning", f"{state.label(node)} {how}, but can't be used: {error}"),)
    said = Notice("info", f"{state.label(node)} {how}: its torch agent is started")
    state, actions = _find_way(_with_new_worker(state._replace(plan=plan), node), node, now)
    return state, (said, *actions)


def _with_new_worker(state: State, node: int) -> State:
    number = state.members.index(node)
    return state._replace(workers=(*state.workers[:number], Worker(number), *state.workers[number + 1 :]))


def _find_way(state: State, node: int, now: float) -> tuple[State, tuple[Action, ...]]:
    assert state.plan is not None
    this, address = state.nodes[node], state.plan.master_addr
    assert isinstance(this, Up)
    if state.plan.one_machine:
        state = state.with_node(node, this._replace(route=Route("lo", "127.0.0.1")))
        return start_when_prepared(state, now)
    state = state.with_timer(Timer.ANSWER, now + state.spec.timeouts.connect_s, node)
    return state, (FindRoute(node, address),)
