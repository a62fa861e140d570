"""MPI's launcher: the daemons that it wants on nodes, and its end, which is the ranks' end."""

import re

from distlaunch.agent.mpi_hosts import host_of
from distlaunch.diagnosis.exits import exit_status_of
from distlaunch.errors import Exit
from distlaunch.state.actions import RunDaemon
from distlaunch.state.events import DaemonWanted, MpiEnded, MpiPlaceLost
from distlaunch.state.findings import GenerationFailed, Step
from distlaunch.state.job import Cause, State
from distlaunch.state.nodes import Up
from distlaunch.state.timers import Timer
from distlaunch.state.workers import WorkerPhase
from distlaunch.wording import status_words

VERDICT_S = 0.5
"""Seconds for us to hear of a rank that has failed: mpirun may have noticed it before. Ranks that then lose
their connection to mpirun need longer to fail of it."""
MAX_LINES = 3
"""As many lines of what mpirun said are told."""
_KILLED = "its process below mpirun was killed"
_ORNAMENT = re.compile(r"^[=\s-]+|[=\s-]+$")


def on_daemon_wanted(event: DaemonWanted, state: State, now: float) -> Step:
    """mpirun's remote shell was called: the node that it means runs the command."""
    asked = state.spec.mpirun and event.node in state.members[:1]  # else a node would command the others
    if not asked or not 0 <= event.place < len(state.members):
        return state, ()
    node = state.members[event.place]
    return state, (RunDaemon(node, event.command),) if isinstance(state.nodes[node], Up) else ()


def on_mpi_place_lost(event: MpiPlaceLost, state: State, now: float) -> Step:
    """mpirun has given up a rank, or somebody has killed what stood in its place: the first counts."""
    rank, known = state.rank_of(event.node, event.local_rank), state.suspect
    if rank is None or not state.worker(rank).going:
        return state, ()
    # Not "failed first": mpirun may have ended others before, of which we hear in the same moment.
    text = f"{state.named(rank)}: {_KILLED}"
    cause = Cause(text, Exit.FAILED, event.at, rank, event.node, peer_gone=True)
    if known is None:
        return _suspecting(state, cause, now), ()
    if known.rank is None:  # mpirun has ended of it, and was heard first
        return state.with_generation(suspect=_with_mpis_end(cause, known)), ()
    if _KILLED in known.text and event.at < known.at:  # the link of its node was slower
        text += known.text.partition(_KILLED)[2]
        return state.with_generation(suspect=cause._replace(text=text, exit_status=known.exit_status)), ()
    return state, ()


def on_mpi_ended(event: MpiEnded, state: State, now: float) -> Step:
    """mpirun, or a daemon of it, has ended: the ranks will, if it has failed or not started all of them."""
    if event.node not in state.members or not state.spec.mpirun:
        return state, ()
    unstarted = sum(worker.phase is WorkerPhase.PLANNED for worker in state.workers)
    if event.status == 0 and not unstarted:
        return state, ()
    cause = _cause(event, state, unstarted, now)
    if event.status < 0 or unstarted:
        return state, (GenerationFailed(cause),)
    if state.suspect is None:
        return _suspecting(state, cause, now), ()
    tells = event.program == state.spec.mpirun[0].rpartition("/")[2]  # a daemon's end says no more
    if tells and state.suspect.text.endswith(_KILLED):
        return state.with_generation(suspect=_with_mpis_end(state.suspect, cause)), ()
    return state, ()


def _suspecting(state: State, cause: Cause, now: float) -> State:
    """`state` in which `cause` is blamed soon, unless a rank turns out to have failed by itself."""
    return state.unwatched().with_generation(suspect=cause).with_timer(Timer.VERDICT, now + VERDICT_S)


def _with_mpis_end(lost: Cause, ended: Cause) -> Cause:
    """The loss of a place together with the end of mpirun that followed."""
    return lost._replace(text=f"{lost.text}; {ended.text}", exit_status=ended.exit_status)


def _cause(event: MpiEnded, state: State, unstarted: int, now: float) -> Cause:
    before = f" before all ranks had started ({unstarted} had not)" if unstarted else ""
    text = f"{event.program} on {state.label(event.node)} ended{before}: {status_words(event.status)}"
    if event.status > 0 and (said := _said(event.words, state)):
        text += f"; it said: {said}"
    return Cause(text, exit_status_of(event.status) or Exit.FAILED, now, node=event.node, peer_gone=True)


def _said(words: str, state: State) -> str:
    """The first lines of mpirun's words that say something, with nodes as the user calls them."""
    for place, node in reversed(list(enumerate(state.members))):
        words = re.sub(rf"\b{re.escape(host_of(place))}\b", state.label(node), words)
    lines = [_ORNAMENT.sub("", line) for line in words.splitlines()]
    return " / ".join([line for line in lines if line][:MAX_LINES])
