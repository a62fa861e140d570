"""Nodes that are reached through others (`ssh.tree`): without those, they are connected from here."""

from collections.abc import Sequence

from distlaunch.state.actions import Action, Notice
from distlaunch.state.events import LinkEnded
from distlaunch.state.findings import ConnectAgain, Finding, JobOver, NodeLost, Step
from distlaunch.state.job import Phase, State
from distlaunch.state.nodes import Connecting, End, Leaving, Reaping, Up
from distlaunch.state.timers import Timer
from distlaunch.supervisor.losing import cause_of_loss, lost
from distlaunch.transport.failure import Kind, LinkFailure, cut_off
from distlaunch.wording import listed


def from_here(state: State, nodes: Sequence[int], failure: LinkFailure, now: float) -> Step:
    """Connect nodes that could not be reached through `failure.via`, which may be the fault of that one."""
    for node in nodes:
        state = state.with_node(node, Connecting(2, failure))
        state = state.with_timer(Timer.ANSWER, now + state.spec.timeouts.connect_s, node)
    connects = tuple(map(ConnectAgain, nodes))
    names = listed([state.label(node) for node in nodes])
    if failure.kind is Kind.RELAY:
        text = f"connecting to {names} from here instead of through {failure.via} (ssh.tree)"
        return state, (Notice("info", text), *connects)
    if state.flat_told:
        return state, connects
    what = f"{failure.via} can't reach {names}: {failure.kind.value}"
    text = f"{what}; connecting from here to nodes that others can't reach (ssh.tree)"
    return state._replace(flat_told=True), (Notice("warning", text), *connects)


def is_worth_another_way(state: State, event: LinkEnded) -> bool:
    """Whether a node was not reached through another one, while the job still connects."""
    waits = isinstance(state.nodes[event.node], Connecting) and state.phase is Phase.CONNECTING
    return waits and bool(event.failure.via)


def cut(state: State, event: LinkEnded, now: float) -> Step:
    """Nodes have lost their links together with another one, through which they went."""
    failure = cut_off(state.label(event.node))
    waiting, lost_too = [], []
    for node in event.cut:
        match state.nodes[node]:
            case Connecting():
                waiting.append(node)
            case Up() | Reaping() | Leaving() as before:
                state = lost(state, node, before, failure, now)
                lost_too.append(node)
            case End.CLEAN:
                state = state.with_node(node, End.CLOSED)
    done: tuple[Finding | Action, ...] = ()
    if waiting and state.phase is Phase.CONNECTING:
        state, done = from_here(state, waiting, failure, now)
    if lost_too:
        done = (*done, _notice(state, lost_too, failure.via), *_finding(state, event.node, lost_too, now))
    return state, done


def _notice(state: State, nodes: Sequence[int], relay: str) -> Notice:
    names = listed([state.label(node) for node in nodes])
    if state.phase is Phase.STOPPING:
        return Notice("warning", f"{names}: cut off with {relay} before confirming their cleanup")
    return Notice("warning", f"{names}: cut off with {relay}")


def _finding(state: State, relay: int, nodes: Sequence[int], now: float) -> tuple[Finding, ...]:
    """What follows for the job, unless the relay is one of its own nodes: then that follows from its loss."""
    hit = next((node for node in nodes if node in state.members), None)
    if state.phase is Phase.STOPPING or relay in state.members or (hit is None and state.current):
        return ()
    cause = cause_of_loss(state, nodes[0] if hit is None else hit, f"cut off with {state.label(relay)}", now)
    return (JobOver(cause),) if hit is None else (NodeLost(hit, cause, told=True),)
