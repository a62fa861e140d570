"""Launchers that people started by hand, one on each node: their ranks start together, and again together."""

from distlaunch.state.actions import Action, MeetPeers, RestartPeers
from distlaunch.state.events import PeerFailed, PeerRestarts, PeersMet
from distlaunch.state.findings import GenerationFailed, JobOver, Step
from distlaunch.state.job import Cause, Launchers, Phase, State


def on_peer_failed(event: PeerFailed, state: State, now: float) -> Step:
    """Another node has failed for good: so has the job."""
    return state, (JobOver(Cause(event.text, event.status, now)),)


def on_peer_restarts(event: PeerRestarts, state: State, now: float) -> Step:
    """Another node has failed, and all start again."""
    if state.phase is Phase.RESTARTING:
        return state, ()  # something has failed here, too
    return state, (GenerationFailed(Cause(event.text, event.status, now)),)


def on_peers_met(event: PeersMet, state: State, now: float) -> Step:
    """All nodes are ready for their next generation."""
    return state._replace(launchers=Launchers.TOGETHER, store_port=event.port), ()


def parted(state: State, cause: Cause) -> tuple[State, tuple[Action, ...]]:
    """`state`, whose generation has ended by `cause`, with the others told."""
    if state.spec.invocation.by_hand is None:
        return state, ()
    return state._replace(launchers=Launchers.APART), (RestartPeers(cause.exit_status, cause.text),)


def gather(state: State) -> tuple[State, tuple[Action, ...]]:
    """Have the others know that we are ready, and wait for them."""
    if state.launchers is Launchers.AWAITED:
        return state, ()
    return state._replace(launchers=Launchers.AWAITED), (MeetPeers(),)
