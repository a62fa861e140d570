"""Connecting, losing and reconnecting nodes, and choosing the nodes of the next attempt."""

from distlaunch.agent.messages import AgentLeaving, GuardianResumed, OrphansKilled, Reap, Reaped
from distlaunch.errors import Exit, JobError
from distlaunch.plan.placement import Facts, NodeRank, node_plan
from distlaunch.supervisor import preparing
from distlaunch.supervisor.actions import Action, Connect, Drop, GiveUp, Send, ShowMessage
from distlaunch.supervisor.events import (
    AgentUp,
    ImagePulled,
    JobOver,
    NodeArrived,
    NodeBack,
    NodeLeaving,
    NodeLost,
    Planned,
    Step,
    SuccessDoubted,
    Suspended,
)
from distlaunch.supervisor.nodes import (
    Away,
    Connecting,
    Leaving,
    Linked,
    Node,
    Reaping,
    Retrying,
    Unusable,
    Up,
    WorkerPhase,
    facts_of,
    failure_of,
    given_up,
    is_expected,
    is_missing,
    is_usable,
    machine_of,
    may_be_occupied,
    unfit_words,
)
from distlaunch.supervisor.state import ANSWERS, Cause, Phase, Restart, State, Timer, Why
from distlaunch.transports.failure import Kind, LinkFailure
from distlaunch.transports.transport import Joined
from distlaunch.wording import counted, listed, signal_words, span_words

BAD_NODE_S = 600.0
"""Seconds after which an attempt no longer counts against the node that ended it."""


def choose_members(state: State) -> tuple[int, ...]:
    """Return the nodes of the next attempt, in rank order.

    Nodes of the current attempt keep their order, so rank 0 stays on its host as long as possible. New or
    returned nodes of the job follow, then spares, up to the number of nodes that the job requests. If enough
    others are usable, a node that has repeatedly failed is left out.
    """
    stayed = [index for index in state.members if is_usable(state.nodes[index])]
    others = [index for index, node in enumerate(state.nodes) if is_usable(node) and index not in stayed]
    usable, bad = [*stayed, *others], repeatedly_failed(state)
    sound = [index for index in usable if index not in bad]
    return tuple((sound if len(sound) >= state.spec.fewest else usable)[: len(state.spec.nodes)])


def repeatedly_failed(state: State) -> set[int]:
    """Return the nodes that were the root cause of three short attempts in a row."""
    if state.spec.restarts.repeat:
        return set()
    blamed = [_blamed_node(restart) for restart in state.restarts]
    rows = zip(blamed, blamed[1:], blamed[2:], strict=False)
    return {row[0] for row in rows if row[0] is not None and len({*row}) == 1}


def _blamed_node(end: Restart) -> int | None:
    counts = end.why is Why.FAILURE and end.lived_s < BAD_NODE_S and not end.cause.peer_gone
    return end.cause.node if counts else None


def misfit(state: State, index: int) -> str:
    """Return why a connected node can't take part (it may lack GPUs, for example), or "" if it can.

    A job can't begin without the nodes that it lists. If one of those is unfit, `make_plan` raises an error.
    """
    known = state.plan.backend if state.plan else state.spec.backend
    if state.plan is None and index < len(state.spec.nodes):
        return ""
    try:
        part = node_plan(state.spec, facts_of(state.nodes[index]), index, NodeRank(0), 0)
    except JobError as error:
        return str(error)
    lacks = known == "nccl" and part.gpu_flaw
    return f"it has {part.gpu_flaw}, but nccl needs a GPU for each" if lacks else ""


def may_come(state: State) -> bool:
    """Return whether it will soon be clear if the job can use another node. If so, a restart waits."""
    return any(
        is_expected(node) or _first_try(state, node) or _to_be_reaped(state, node) for node in state.nodes
    )


def returning(state: State) -> list[str]:
    """Return the names of the nodes that may still return. A restart that lacks nodes waits for one."""
    nodes = enumerate(state.nodes)
    return [
        state.label(i) for i, n in nodes if isinstance(n, Connecting | Retrying) or _to_be_reaped(state, n)
    ]


def _to_be_reaped(state: State, node: Node) -> bool:
    return isinstance(node, Linked) and is_missing(node) and state.due_at(Timer.REJOIN) is not None


def _first_try(state: State, node: Node) -> bool:
    """Return whether this is the first connection attempt since the node was lost.

    `tries` also counts the connection that was lost.
    """
    match node:
        case Retrying(tries=1) | Connecting(tries=2):
            return is_missing(node)
        case Reaping(tries=2):
            # If the restart doesn't wait for other nodes, the limit is the time for clearing connected ones.
            return not state.spec.limits.rejoin_s and state.due_at(Timer.CLEAR) is not None
    return False


FENCE_MARGIN_S = 5.0
"""Seconds after the lease and the grace period until an unreachable node counts as empty."""
RECONNECT_S = 0.2
RECONNECT_MAX_S = 30.0


def link_ended(state: State, node: int, before: Linked, failure: LinkFailure, now: float) -> Step:
    """Treat a node as lost, and its workers with it. `before` is the node's previous state."""
    if state.phase is Phase.CONNECTING and _connects_again(state, now):
        state = _with_rejoin(state)
    state = lost(state, node, before, failure, now)
    if isinstance(before, Leaving):
        state = with_time_to_return(state, now)
    if state.phase is Phase.STOPPING:
        if (state.cause and state.cause.scheduled) or _was_suspended(state, now):
            return state, ()  # the scheduler kills leftovers, too, and agents leave when their lease expires
        left_s = state.spec.limits.lease_s + state.spec.limits.stop_s
        text = f"lost before it confirmed its cleanup; its ranks exit within {span_words(left_s)}"
        if not may_be_occupied(before) or (failure.clean and not is_missing(before)):
            text = "its agent exited early, but none of its ranks is left"
        return state, (ShowMessage("warning", f"{state.label(node)}: {text}"),)
    last = failure.words.splitlines()[-1:] or ["its agent exited"]
    cause = cause_of_loss(state, node, last[0].rstrip("."), now)
    told = isinstance(before, Leaving)
    if state.phase is not Phase.CONNECTING:
        return state, (_loss_of(state, node, failure, cause, told),)
    if state.spec.elastic:
        state = state.without_timers(Timer.RETRY, node=node).with_node(node, Unusable(failure))
        return state, () if told else (ShowMessage("warning", cause.text),)
    if not isinstance(state.nodes[node], Retrying):
        return state, (JobOver(cause),)
    return state, () if told else (_awaiting(state, node, cause),)


def _loss_of(
    state: State, node: int, failure: LinkFailure, cause: Cause, told: bool
) -> NodeLost | ShowMessage:
    """Return the loss of a node. It is none if the node's ranks had finished and nothing is left there."""
    if state.phase is Phase.RUNNING and failure.clean and has_finished(state, node):
        text = f"{state.label(node)}: its agent exited after its ranks had finished; output may be missing"
        return ShowMessage("warning", text)
    return NodeLost(node, cause, told)


def has_finished(state: State, node: int) -> bool:
    """Return whether all ranks of a node succeeded, perhaps while this machine was suspended."""
    part = state.plan.part_of(node) if state.plan else None
    return part is not None and all(state.workers[rank].succeeded for rank in part.ranks)


def _connects_again(state: State, now: float) -> bool:
    """Return whether to connect again to a node lost while others connect. Nothing has started yet."""
    return not state.spec.elastic and _is_in_time(state, now)


def _is_in_time(state: State, now: float) -> bool:
    in_time = now < state.began_at + state.spec.limits.connect_s
    return state.spec.takes_nodes_back and in_time and not state.asked


def _with_rejoin(state: State) -> State:
    return state.with_timer(Timer.REJOIN, state.began_at + state.spec.limits.connect_s)


def with_time_to_return(state: State, now: float) -> State:
    """Return `state` with enough time to admit a node whose ranks have ended only now.

    They may have taken longer than `timeouts.rejoin`, and no launcher could take their node's place before.
    """
    limits = state.spec.limits
    if state.phase is not Phase.RESTARTING or not limits.rejoin_s:
        return state
    until = max(state.due_at(Timer.REJOIN) or 0.0, now + min(limits.rejoin_s, limits.connect_s))
    return state.with_timer(Timer.REJOIN, until)


def _awaiting(state: State, node: int, cause: Cause) -> ShowMessage:
    what = f"{state.agent_host(node)} was lost" if cause.node is None else cause.text
    return ShowMessage("warning", f"{what}; waiting for it to reconnect")


def on_agent_leaving(event: AgentLeaving, state: State, now: float) -> Step:
    """Handle an agent that was stopped from outside. Its workers are not the root cause of later failures."""
    node = state.nodes[event.node]
    if state.phase is Phase.STOPPING:
        return state, (SuccessDoubted(),) if state.cause is None else ()
    if not isinstance(node, Up | Reaping):
        return state, ()
    tries = node.tries if isinstance(node, Reaping) else 1
    leaving = Leaving(may_be_occupied(node), tries, isinstance(node, Reaping), machine_of(node))
    state = state.with_node(event.node, leaving)
    cause = cause_of_loss(state, event.node, _why_it_leaves(event, facts_of(node)), now)
    cause = cause._replace(agent_signum=None if event.orphaned else event.signum or None)
    if state.phase is Phase.CONNECTING:
        if state.spec.elastic:
            return state, (ShowMessage("warning", cause.text),)
        scheduler = state.spec.allocation and state.spec.allocation.answers  # it may be ending the job
        waits = _connects_again(state, now) and not (scheduler and cause.agent_signum)
        return state, (_awaiting(state, event.node, cause) if waits else JobOver(cause),)
    finished = state.phase is Phase.RUNNING and has_finished(state, event.node)
    return state, () if finished else (NodeLeaving(event.node, cause),)


def _why_it_leaves(event: AgentLeaving, facts: Facts) -> str:
    if event.orphaned:
        above = "launcher" if facts.logs is not None else "agent's guardian process"
        return f"its {above} was killed"
    if event.signum:
        return f"its agent was stopped by {signal_words(event.signum)}"
    if event.damage:
        return f"the data sent to its agent was altered in transit ({event.damage})"
    return "the connection to its agent was interrupted"


def on_suspended(event: Suspended, state: State, now: float) -> Step:
    """Record a suspension, and give the nodes that have yet to answer that much more time.

    If leases of nodes expired in the meantime, the suspension is the root cause.
    """
    later = {alarm: at + event.for_s for alarm, at in state.timers.items() if alarm.timer in ANSWERS}
    state = state._replace(timers={**state.timers, **later})
    # The last heartbeat was sent up to a sixth of a lease before the suspension.
    long = event.for_s >= state.spec.limits.lease_s * 5 / 6
    return (state._replace(resumed=(now, event.for_s)) if long else state), ()


def _was_suspended(state: State, now: float) -> bool:
    """Return whether nodes are lost because the controller was suspended."""
    return state.resumed is not None and now - state.resumed[0] < state.spec.limits.lease_s


def cause_of_loss(state: State, node: int, why: str, now: float) -> Cause:
    """Return the root cause to report if the loss of this node ends the attempt."""
    if state.resumed and _was_suspended(state, now):
        what = f"this machine, or this command, was suspended for {state.resumed[1]:.0f} s"
        key = state.spec.key_words("timeouts.lease")
        lease = f"nodes stop their ranks after {span_words(state.spec.limits.lease_s)}{key}"
        advice = "set a longer timeouts.lease, or run the controller on a host that stays awake: `--on HOST`"
        advice = advice if key else "keep it running: prevent this machine from sleeping"
        return Cause(f"{what}; {lease}; {advice}", Exit.NODE_LOST, now, kind="node_lost")
    text = f"{state.agent_host(node)} was lost: {why}"
    return Cause(text, Exit.NODE_LOST, now, node=node, kind="node_lost")


def lost(state: State, node: int, before: Linked, failure: LinkFailure, now: float) -> State:
    """Return `state` after the end of an agent: its workers are lost, and its node is fenced unless clean."""
    clean = failure.clean and not is_missing(before)  # a later agent vouches only for its own workers
    away = Away(occupied=may_be_occupied(before) and not clean, machine=machine_of(before))
    tries = before.tries if isinstance(before, Reaping | Leaving) else 1
    part = state.plan.part_of(node) if state.plan else None
    for rank in part.ranks if part else ():
        if state.workers[rank].going:
            state = state.with_worker(rank, phase=WorkerPhase.VANISHED)
    state = _fenced(state, node, away, now)
    return reconnect_later(state, node, Retrying(tries, failure, away), now)


def _fenced(state: State, node: int, away: Away, now: float) -> State:
    """Return `state` with the time by which a lost node is certain to be clean.

    A later loss doesn't move that time.
    """
    if not away.occupied or state.phase is Phase.STOPPING:
        return state.without_timers(Timer.FENCE, node=node)
    times = state.spec.limits
    fence_at = now + times.lease_s + times.stop_s + FENCE_MARGIN_S
    return state.with_timer(Timer.FENCE, state.due_at(Timer.FENCE, node) or fence_at, node)


def reconnect_later(state: State, node: int, this: Retrying, now: float) -> State:
    """Reconnect a node after a growing delay, if the job can use the node and another try can help.

    Otherwise, give up on the node.
    """
    hopeless = this.failure is not None and not this.failure.may_pass
    state = state.without_timers(Timer.RETRY, Timer.ANSWER, node=node)
    begun = state.phase is not Phase.CONNECTING or state.due_at(Timer.REJOIN) is not None
    of_use = state.spec.takes_nodes_back and begun and state.phase is not Phase.STOPPING
    if hopeless or not of_use:
        return state.with_node(node, given_up(this, this.failure))
    spread = 0.75 + 0.5 * state.chance_of(node, this.tries)
    # A launcher comes by itself, once this process listens for it.
    comes = isinstance(state.spec.pool[node].reach, Joined)
    doublings = 0 if comes and not (this.failure and this.failure.kind is Kind.ABSENT) else this.tries - 1
    wait_s = min(RECONNECT_MAX_S, RECONNECT_S * 2.0 ** min(doublings, 30)) * spread
    state = state.with_node(node, this._replace(away=this.away or Away(new=True)))
    return state.with_timer(Timer.RETRY, now + wait_s, node)


MAX_TRIES = 6
PULL_S = 3600.0
"""Seconds for pulling an image. A large image takes minutes."""
RETRY_S = 0.4
"""Seconds before the second connection attempt. Each further delay is twice as long. All have jitter."""


def on_agent_up(event: AgentUp, state: State, now: float) -> Step:
    """Make a node usable once no processes of a lost agent are left on it."""
    node = state.nodes[event.node]
    if not isinstance(node, Connecting):
        return state, ()
    state = state.without_timers(Timer.ANSWER, node=event.node)
    if node.away:
        state = state.with_node(event.node, Reaping(event.facts, node.tries, node.away))
        # Another host can't end the workers that may be left on the lost one: `fence_due` goes on.
        waits = node.away.occupied and state.replaces_host(event.node)
        reap = Send(event.node, Reap(state.run_id, state.spec.limits.stop_s))
        return state, () if waits else (reap,)
    up = Up(event.facts, asked=node.asked, held=node.held, code=node.code)
    return _admit(state, event.node, up, 1, True, now)


def on_reaped(event: Reaped, state: State, now: float) -> Step:
    """Make a returned node usable now that it is clean."""
    node = state.nodes[event.node]
    if not isinstance(node, Reaping):
        return state, ()
    state = state.without_timers(Timer.FENCE, node=event.node)
    up = Up(node.facts, unfit=node.away.unfit)
    return _admit(state, event.node, up, node.tries, node.away.new, now)


def _admit(state: State, node: int, up: Up, tries: int, new: bool, now: float) -> Step:
    """Use a node whose agent is ready, or drop it if it can't take part. `new` is as in `NodeBack`.

    `NodeBack` follows unless the job is still connecting its first nodes.
    """
    new |= state.agent_host(node) != state.label(node)
    state = state.with_arrived_host(node).with_node(node, up)
    if state.phase is Phase.STOPPING:
        return state, ()
    why = misfit(state, node)
    if state.phase is Phase.CONNECTING:
        return state.with_node(node, up._replace(unfit=why)), _misfit_message(state, node, why)
    if why:
        return _drop(state, node, why, tries, now)
    return state.with_node(node, up._replace(unfit="")), (NodeBack(node, new),)


def _misfit_message(state: State, node: int, why: str) -> tuple[ShowMessage, ...]:
    """Return a warning about a node that can't take part, unless the reason is already known."""
    known = unfit_words(state.nodes[node]) == why
    return () if known else (ShowMessage("warning", f"{state.label(node)} can't be used: {why}"),)


def _drop(state: State, node: int, why: str, tries: int, now: float) -> tuple[State, tuple[Action, ...]]:
    """Drop a node that can't take part. The node is checked again later, in case its GPUs appear."""
    message = _misfit_message(state, node, why)
    again = Retrying(max(2, tries), None, Away(unfit=why))
    return reconnect_later(state, node, again, now), (*message, Drop(node))


def drop_misfits(found: Planned, state: State, now: float) -> Step:
    """Drop the spares that can't take part in the new plan. The decider of `Planned`."""
    actions: tuple[Action, ...] = ()
    for index, node in enumerate(state.nodes):
        idle = isinstance(node, Up) and index not in state.members
        if idle and (why := misfit(state, index)):
            state, more = _drop(state, index, why, 1, now)
            actions += more
    return state, actions


def on_orphans_killed(event: OrphansKilled, state: State, now: float) -> Step:
    """Report leftover processes of an agent that had been killed together with its guardian."""
    killed = counted(event.processes, "process")
    text = f"{state.label(event.node)}: killed {killed} left over from a crashed agent"
    return state, (ShowMessage("warning", text),)


def on_guardian_resumed(event: GuardianResumed, state: State, now: float) -> Step:
    """Report that a guardian had been stopped by a signal."""
    text = f"{state.label(event.node)}: resumed its guardian (pid {event.pid}), which a signal had stopped"
    return state, (ShowMessage("warning", text),)


def not_connected(state: State, node: int, this: Connecting, failure: LinkFailure, now: float) -> Step:
    """Handle a failed connection attempt, and try again if that can help."""
    if this.away or state.phase is not Phase.CONNECTING:
        return reconnect_later(state, node, Retrying(this.tries, failure, this.away), now), ()
    had_joined = isinstance(state.spec.pool[node].reach, Joined) and not state.spec.elastic
    if had_joined and failure.kind is Kind.ABSENT:
        failure = failure._replace(kind=Kind.LOST)
    if had_joined and failure.kind is Kind.LOST and _connects_again(state, now):
        why = failure.words.splitlines()[-1:] or ["its launcher exited"]
        cause = cause_of_loss(state, node, why[0].rstrip("."), now)
        state = reconnect_later(_with_rejoin(state), node, Retrying(this.tries, failure), now)
        return state, (_awaiting(state, node, cause),)
    answer_by = state.due_at(Timer.ANSWER, node)
    in_time = answer_by is not None and now < answer_by
    broken = failure.kind is Kind.LOST and _connects_again(state, now)
    if in_time and (failure.worth_retrying or broken) and this.tries < MAX_TRIES:
        retry_at = now + RETRY_S * 2 ** (this.tries - 1) * (0.5 + state.chance_of(node, this.tries))
        state = state.with_node(node, Retrying(this.tries, failure))
        return state.with_timer(Timer.RETRY, retry_at, node), ()
    if not in_time and this.failure and failure.kind is Kind.SILENT:
        failure = this.failure  # an attempt cut short carries less information than the one before
    return _unusable(state, node, failure)


def _unusable(state: State, node: int, failure: LinkFailure) -> Step:
    """Give up on a node before the job has begun. Show a message unless a later one explains more."""
    state = state.with_node(node, Unusable(failure)).without_timers(Timer.RETRY, Timer.ANSWER, node=node)
    if failure.kind is Kind.ABSENT:
        return state, ()  # its launcher announces itself later
    if not _more_may_come(state) and len(choose_members(state)) < state.spec.fewest:
        return state, ()  # the summary follows immediately and includes the advice
    return state, (ShowMessage("error", f"{state.label(node)}: {failure.kind.value}"),)


def _more_may_come(state: State) -> bool:
    """Return whether the job should wait for an expected node before it begins."""
    wanted = len(state.spec.nodes)
    if not state.nodes.counts.expected or wanted == len(state.nodes):
        return state.nodes.counts.expected > 0
    return any(map(is_expected, state.nodes[:wanted])) or len(choose_members(state)) < wanted


def begin_when_connected(state: State, now: float) -> Step:
    """Prepare an attempt once the job has its nodes, or end the job if it can't get enough of them.

    The rule of CONNECTING.
    """
    if _more_may_come(state):
        return state, ()
    found = choose_members(state)
    if len(found) < state.spec.fewest:
        return _with_too_few(state, len(found), now)
    state = _with_retries(state.without_timers(Timer.REJOIN), now)
    state, todo = preparing.prepare(state, found, now)
    if missing := [state.label(i) for i in range(len(state.spec.nodes)) if i not in found]:
        text = f"starting on {counted(len(found), 'node')}, without {listed(missing)}"
        todo = (ShowMessage("warning", text), *todo)
    return state, todo


def _with_too_few(state: State, found: int, now: float) -> Step:
    """Wait for nodes that were lost while others connected, or end the job."""
    if any(isinstance(node, Leaving) for node in state.nodes):
        return state, ()  # wait until its link has ended, which is why there are too few
    if again := _broken(state) if state.spec.elastic and _is_in_time(state, now) else []:
        return _reconnect(state, again, now)
    lost_nodes = [i for i, node in enumerate(state.nodes) if is_missing(node)]
    waits = returning(state) and state.due_at(Timer.REJOIN) is not None
    if waits and found + len(lost_nodes) >= state.spec.fewest:
        return state, ()
    if lost_nodes and not any(isinstance(node, Unusable) for node in state.nodes):
        return state, (_not_back(state, lost_nodes[0], now),)
    return state, (_too_few(state, now),)


def _broken(state: State) -> list[int]:
    """Return the nodes whose connection was lost before the job began, except launchers: they come back."""
    pool = enumerate(zip(state.nodes, state.spec.pool, strict=True))
    ours = [(i, node) for i, (node, each) in pool if not isinstance(each.reach, Joined)]
    return [
        i
        for i, node in ours
        if isinstance(node, Unusable) and node.failure and node.failure.kind is Kind.LOST
    ]


def _reconnect(state: State, again: list[int], now: float) -> Step:
    """Wait for nodes that were lost before the job began, because it can't begin without them."""
    state = _with_rejoin(state)
    for node in again:
        state = reconnect_later(state, node, Retrying(1, failure_of(state.nodes[node])), now)
    names = listed([state.label(node) for node in again])
    return state, (ShowMessage("warning", f"too few nodes are left; waiting for {names} to reconnect"),)


def _not_back(state: State, node: int, now: float) -> JobOver:
    """End a job because a node that was lost while others connected hasn't returned."""
    failure, label = failure_of(state.nodes[node]), state.label(node)
    why = f": {failure.kind.value}" if failure and failure.kind not in (Kind.LOST, Kind.ABSENT) else ""
    text = f"{label} was lost before all nodes had connected, and did not reconnect{why}; nothing was started"
    return JobOver(Cause(text, Exit.NODE_LOST, now, node=node, kind="node_lost"))


def _too_few(state: State, now: float) -> JobOver:
    unusable = [i for i, node in enumerate(state.nodes) if isinstance(node, Unusable) or is_missing(node)]
    names = listed([state.label(i) for i in unusable])
    kinds = {failure.kind.value for i in unusable if (failure := failure_of(state.nodes[i]))}
    why = "".join(f"{kind}: " for kind in kinds) if len(kinds) == 1 else ""
    which = "the only node" if len(state.nodes) == 1 else f"{len(unusable)} of {len(state.nodes)} nodes"
    text = f"{why}{which} can't be used ({names}); nothing was started"
    return JobOver(Cause(text, Exit.UNREACHABLE, now, node=unusable[0]))


def _with_retries(state: State, now: float) -> State:
    """Return `state` with further attempts to connect the nodes that the job starts without.

    Only once such an attempt has been made can another launcher join in place of one that has exited.
    """
    for index, node in enumerate(state.nodes):
        if isinstance(node, Unusable) and node.failure and node.failure.may_pass:
            state = state.with_node(index, Retrying(2, node.failure, Away(new=True)))
            wait_s = 0.0 if isinstance(state.spec.pool[index].reach, Joined) else RECONNECT_MAX_S
            state = state.with_timer(Timer.RETRY, now + wait_s, index)
    return state


def on_image_pulled(event: ImagePulled, state: State, now: float) -> Step:
    """Allow time for a node to pull its image. This time doesn't count against `timeouts.connect`."""
    container = state.spec.container
    if container is None or not isinstance(state.nodes[event.node], Connecting):
        return state, ()
    left_s = state.spec.limits.connect_s if event.over else PULL_S
    state = state.with_timer(Timer.ANSWER, now + left_s, event.node)
    what = "has" if event.over else "pulling"
    return state, (ShowMessage("info", f"{state.label(event.node)}: {what} image {container.image}"),)


def answer_overdue(state: State, node: int, now: float) -> Step:
    """Give up on a node that has not connected in time."""
    this = state.nodes[node]
    if isinstance(this, Connecting):
        key = state.spec.key_words("timeouts.connect")
        why = f"no agent within {state.spec.limits.connect_s:g} s{key}"
        return state, (GiveUp(node, why),)  # its `LinkEnded` follows, with everything received from it
    if not isinstance(this, Retrying) or this.failure is None:
        return state, ()
    if state.phase is Phase.CONNECTING:
        return _unusable(state, node, this.failure)
    return reconnect_later(state, node, this, now), ()


def on_node_arrived(event: NodeArrived, state: State, now: float) -> Step:
    """Connect a node immediately, now that its launcher has joined."""
    reach = Joined(event.host, event.here)
    state = state._replace(arrived={**state.arrived, event.node: reach})
    if isinstance(state.nodes[event.node], Retrying):
        return state.with_timer(Timer.RETRY, now, event.node), ()
    return state, ()


def retry_due(state: State, node: int, now: float) -> Step:
    """Reconnect a node."""
    this = state.nodes[node]
    assert isinstance(this, Retrying)
    state = state.with_node(node, Connecting(this.tries + 1, this.failure, this.away))
    if this.away:
        state = state.with_timer(Timer.ANSWER, now + state.spec.limits.connect_s, node)
    state, questions = preparing.ask_early(state, node)
    return state, (Connect(node), *questions)
