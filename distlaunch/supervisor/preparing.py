"""Between the last agent's hello and the start: the plan, the port, the routes."""

from collections.abc import Sequence

from distlaunch.errors import Exit, JobError
from distlaunch.job.spec import JobSpec
from distlaunch.plan.engine import make_plan
from distlaunch.plan.layout import Facts, LaunchPlan
from distlaunch.supervisor.actions import Action, FindRoute, GiveUp, HoldPort, StartWorkers
from distlaunch.supervisor.ending import end_job, listed
from distlaunch.supervisor.events import PortHeld, PortRefused, RouteFound
from distlaunch.supervisor.interfaces import interface_notices, misnamed
from distlaunch.supervisor.joining import watched
from distlaunch.supervisor.state import Cause, Phase, State, Step, WorkerPhase, WorkerState
from distlaunch.supervisor.timers import Timer


def prepare(state: State, members: Sequence[int], now: float) -> Step:
    """All agents are there: make the plan, hold the port, find the interfaces."""
    facts = {index: state.nodes[index].facts or Facts("") for index in members}
    try:
        plan = make_plan(_with_its_backend(state), facts, state.nodes[members[0]].address)
    except JobError as error:
        return end_job(state, Cause(str(error), error.exit_status, now), now)
    moved = _has_moved(state, plan, members[0])
    state = state._replace(
        phase=Phase.PREPARING,
        plan=plan,
        workers=tuple(WorkerState(rank) for node in plan.nodes for rank in node.ranks),
    )
    state = state.with_timer(Timer.PREPARE, now + state.spec.timeouts.connect_s)
    state, hold = _hold_port(state, plan, members[0])
    if plan.one_machine:
        state = _all_ready(state, members, "lo" if state.spec.one_machine else None)
        state, started = start_when_prepared(state, now)
        return state, (*hold, *started)
    if moved:
        for index in members:
            state = state.with_node(index, ready=False, interface=None, source=None)
    asked = [index for index in _first_asked(state, members) if not state.nodes[index].ready]
    return state, (*hold, *(FindRoute(index, plan.master_addr) for index in asked))


def _with_its_backend(state: State) -> JobSpec:
    """What was chosen for the first generation holds for the whole run."""
    return state.spec._replace(backend=state.plan.backend) if state.plan else state.spec


def _hold_port(state: State, plan: LaunchPlan, first: int) -> Step:
    if state.spec.ranking == "etcd-v2" or state.spec.by_hand:  # the user's server has it, or the first keeper
        return state._replace(port=plan.master_port), ()
    return state, (HoldPort(first, plan.master_port),)


def _first_asked(state: State, members: Sequence[int]) -> Sequence[int]:
    """Who is asked for its way to MASTER_ADDR at once; the first, if it is there, not before the others."""
    alone = len(members) == 1
    return members if alone or state.spec.ranking == "etcd-v2" else members[1:]


def _has_moved(state: State, plan: LaunchPlan, first: int) -> bool:
    """Whether the ways to the master have to be found again."""
    before = state.plan
    if before is None or before.one_machine or not state.nodes[first].ready:
        return True
    return before.master_addr != plan.master_addr


def _all_ready(state: State, members: Sequence[int], interface: str | None) -> State:
    for index in members:
        state = state.with_node(index, ready=True, interface=interface, source="127.0.0.1")
    return state


def on_port_held(event: PortHeld, state: State, now: float) -> Step:
    """The first node has the port."""
    if event.node not in state.members[:1]:
        return state, ()  # nobody asked it
    return start_when_prepared(state._replace(port=event.port), now)


def on_port_refused(event: PortRefused, state: State, now: float) -> Step:
    """The port is taken: end, naming who has it."""
    if event.node not in state.members[:1] or state.plan is None:
        return state, ()
    text = f"{state.label(event.node)} has no port to spare for the rendezvous: {event.error.lower()}"
    if state.plan.master_port is not None:
        who = holders_words(event.owners)
        port = f"port {state.plan.master_port} on {state.label(event.node)}"
        advice = "leave the port out to get a free one"
        text = f"{port} can't be used: {event.error.lower()}; held by {who}; {advice}"
    return end_job(state, Cause(text, Exit.PORT_TAKEN, now, node=event.node), now)


def holders_words(owners: Sequence[object]) -> str:
    """Who holds a port, for people, also where nobody is seen."""
    return ", ".join(map(_owner_words, owners)) or "a program that does not listen on it"


def _owner_words(owner: object) -> str:
    """`owner` is {uid, pid, command} as an agent reports it."""
    fields = owner if isinstance(owner, dict) else {}
    if fields.get("pid") is None:
        return f"a process of user id {fields.get('uid')}"
    return f"{fields.get('command')} (pid {fields['pid']})"


def on_route_found(event: RouteFound, state: State, now: float) -> Step:
    """A node knows its way to the master."""
    if event.node not in state.members or state.nodes[event.node].ready:
        return state, ()
    found = {"interface": event.interface, "source": event.source, "misnamed": misnamed(event, state)}
    state = state.with_node(event.node, ready=True, **found).without_timers(Timer.ANSWER, node=event.node)
    first = state.members[0]
    its_own = state.spec.ranking != "etcd-v2"
    if (
        its_own
        and event.node != first
        and state.nodes[first].interface is None
        and not state.nodes[first].ready
    ):
        # The master's interface is the one that carries the address by which the others reach it.
        return state.with_node(first, interface=""), (FindRoute(first, event.address),)
    return start_when_prepared(state, now)


def start_when_prepared(state: State, now: float) -> Step:
    """Start the workers once all is prepared for them; torch's agents also on nodes that come later."""
    if state.phase is Phase.RUNNING:
        return _start(state, [node for node in _here(state) if _waits(state, node)])
    if state.phase is not Phase.PREPARING or state.port is None:
        return state, ()
    here = _here(state)
    if not all(state.nodes[index].ready for index in here):
        return state, ()
    state = state._replace(phase=Phase.RUNNING, started_at=now).without_timers(Timer.PREPARE)
    state = watched(state, now)
    state, started = _start(state, here)
    return state, (*(() if state.generation else interface_notices(state)), *started)


def _here(state: State) -> list[int]:
    """The members but for those that torch's agents go on without."""
    return [index for index in state.members if not (state.nodes[index].lost or state.nodes[index].leaving)]


def _waits(state: State, node: int) -> bool:
    this, planned = state.nodes[node], state.workers[state.members.index(node)].phase is WorkerPhase.PLANNED
    return state.spec.torch_agents and planned and this.ready and this.clean


def _start(state: State, nodes: Sequence[int]) -> Step:
    actions: list[Action] = []
    for index in nodes:
        state = state.with_node(index, clean=False)
        actions.append(StartWorkers(index))
    return state, tuple(actions)


def _owes_an_answer(state: State, node: int) -> bool:
    """The first node is asked for its route only when another has found its own."""
    if node != state.members[0]:
        return not state.nodes[node].ready
    return state.port is None or (not state.nodes[node].ready and state.nodes[node].interface is not None)


def prepare_overdue(state: State, now: float) -> Step:
    """A node that said hello does not answer any more."""
    slow = [state.label(i) for i in state.members if not state.nodes[i].ready] or [
        state.label(state.members[0])
    ]
    if state.generation:  # it worked before: lost, and the job may go on without it
        late = [i for i in state.members if _owes_an_answer(state, i)]
        why = f"no answer in {state.spec.timeouts.connect_s:g} s"
        return state, tuple(GiveUp(i, why) for i in late)
    text = f"no answer from {listed(slow)} while preparing"
    return end_job(state, Cause(text, Exit.UNREACHABLE, now), now)
