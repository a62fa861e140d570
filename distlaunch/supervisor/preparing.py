"""Between the last agent's hello and the start: the plan, the port, the routes."""

from collections.abc import Sequence

from distlaunch.errors import Exit, JobError
from distlaunch.plan.layout import Facts, make_plan
from distlaunch.supervisor.actions import FindRoute, HoldPort, StartWorkers
from distlaunch.supervisor.ending import end_job, listed
from distlaunch.supervisor.events import PortHeld, PortRefused, RouteFailed, RouteFound
from distlaunch.supervisor.state import Cause, Phase, State, Step, WorkerState


def prepare(state: State, now: float) -> Step:
    """All agents are there: make the plan, hold the port, find the interfaces."""
    facts = [node.facts or Facts("") for node in state.nodes]
    try:
        plan = make_plan(state.spec, facts, state.master_address)
    except JobError as error:
        return end_job(state, Cause(str(error), error.exit_status, now), now)
    state = state._replace(
        phase=Phase.PREPARING,
        plan=plan,
        workers=tuple(WorkerState(rank) for rank in range(plan.world_size)),
        deadline=now + state.spec.timeouts.connect_s,
    )
    if state.spec.one_machine:
        nodes = tuple(node._replace(ready=True, interface="lo") for node in state.nodes)
        return state._replace(nodes=nodes), (HoldPort(0, plan.master_port),)
    routes = tuple(FindRoute(node.node_rank, plan.master_addr) for node in plan.nodes[1:])
    return state, (HoldPort(0, plan.master_port), *routes)


def on_port_held(event: PortHeld, state: State, now: float) -> Step:
    """The first node has the port."""
    if event.node != 0:
        return state, ()  # nobody asked it
    return _all_prepared(state._replace(port=event.port), now)


def on_port_refused(event: PortRefused, state: State, now: float) -> Step:
    """The port is taken: end, naming who has it."""
    if event.node != 0 or state.plan is None:
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
    state = state.with_node(event.node, ready=True, interface=event.interface)
    if event.node != 0 and state.nodes[0].interface is None and not state.nodes[0].ready:
        # The master's interface is the one that carries the address by which the others reach it.
        return state.with_node(0, interface=""), (FindRoute(0, event.address),)
    return _all_prepared(state, now)


def on_route_failed(event: RouteFailed, state: State, now: float) -> Step:
    """A node knows no way to the master: end, saying what to set."""
    assert state.plan is not None
    if event.node == 0:
        return _all_prepared(state.with_node(0, ready=True, interface=None), now)
    text = (
        f"{state.label(event.node)} can't reach MASTER_ADDR {state.plan.master_addr}: {event.error}; "
        f"set {state.spec.nodes[0].path}.address to what the other nodes call {state.label(0)}"
    )
    return end_job(state, Cause(text, Exit.USAGE, now, node=event.node), now)


def _all_prepared(state: State, now: float) -> Step:
    if state.phase is not Phase.PREPARING or state.port is None or not all(n.ready for n in state.nodes):
        return state, ()
    state = state._replace(
        phase=Phase.RUNNING,
        deadline=None,
        started_at=now,
        join_deadline=now + state.spec.timeouts.join_s,
    )
    return state, tuple(StartWorkers(node) for node in range(len(state.nodes)))


def prepare_overdue(state: State, now: float) -> Step:
    """A node that said hello does not answer any more."""
    slow = [state.label(i) for i, node in enumerate(state.nodes) if not node.ready] or [state.label(0)]
    text = f"no answer from {listed(slow)} while preparing"
    return end_job(state, Cause(text, Exit.UNREACHABLE, now), now)
