"""Between the last agent's hello and the start: the plan, the port, the routes."""

from collections.abc import Sequence

from distlaunch.errors import Exit, JobError
from distlaunch.job.spec import JobSpec
from distlaunch.plan.engine import make_plan
from distlaunch.plan.layout import LaunchPlan
from distlaunch.state import workers
from distlaunch.state.actions import Action, FindRoute, GiveUp, HoldPort, Notice, StartWorkers
from distlaunch.state.events import PortHeld, PortRefused, PortUsurped, RouteFailed, RouteFound
from distlaunch.state.findings import GenerationFailed, JobOver, Planned, Prepare, StartAgain, Started, Step
from distlaunch.state.job import Cause, Generation, Phase, State, Why
from distlaunch.state.nodes import Route, Up, facts_of, is_usable, route_of
from distlaunch.state.timers import Timer
from distlaunch.state.workers import Worker, Workers
from distlaunch.supervisor.mismatches import mismatches, misnamed
from distlaunch.wording import holders_words, listed, refused_port_words


def prepare(found: Prepare, state: State, now: float) -> Step:
    """All agents are there: make the plan, hold the port, find the interfaces."""
    members = found.members
    facts = {index: facts_of(state.nodes[index]) for index in members}
    try:
        plan = make_plan(_with_its_backend(state), facts, state.addresses.get(members[0]))
    except JobError as error:
        return state, (JobOver(Cause(str(error), error.exit_status, now)),)
    moved = _has_moved(state, plan, members[0])
    state = state._replace(phase=Phase.PREPARING, current=_generation(state, plan))
    state = state.with_timer(Timer.PREPARE, now + state.spec.timeouts.connect_s)
    state, todo = _hold_port(state, plan, members[0])
    if plan.one_machine:
        way = Route("lo" if state.spec.one_machine else None, "127.0.0.1")
        return _with_routes(state, members, way), (*todo, Planned())
    if moved:
        state = _with_routes(state, members, None)
    asked = [index for index in _first_asked(state, members) if route_of(state.nodes[index]) is None]
    return state, (*todo, *(FindRoute(index, plan.master_addr) for index in asked), Planned())


def _generation(state: State, plan: LaunchPlan) -> Generation:
    number = state.generation + 1 if state.current else 0
    return Generation(number, plan, Workers(Worker(rank) for node in plan.nodes for rank in node.ranks))


def _with_its_backend(state: State) -> JobSpec:
    """The spec with the backend that the first generation chose: it holds for the whole run."""
    return state.spec._replace(backend=state.plan.backend) if state.plan else state.spec


def _hold_port(state: State, plan: LaunchPlan, first: int) -> tuple[State, tuple[Action, ...]]:
    if not state.spec.engine.serves_store or state.spec.invocation.by_hand:
        # The user's server has it, or the launcher of the first node.
        return state.with_generation(port=state.store_port or plan.master_port), ()
    return state, (HoldPort(first, plan.master_port),)


def _first_asked(state: State, members: Sequence[int]) -> Sequence[int]:
    """The nodes to ask at once for their route to MASTER_ADDR; the first one is asked after the others."""
    alone = len(members) == 1
    return members[1:] if state.spec.engine.serves_store and not alone else members


def _has_moved(state: State, plan: LaunchPlan, first: int) -> bool:
    """Whether the routes to the master have to be found again."""
    before = state.plan
    if before is None or before.one_machine or route_of(state.nodes[first]) is None:
        return True
    return before.master_addr != plan.master_addr


def _with_routes(state: State, members: Sequence[int], route: Route | None) -> State:
    for index in members:
        node = state.nodes[index]
        assert isinstance(node, Up)
        state = state.with_node(index, node._replace(route=route, asked=False))
    return state


def on_port_held(event: PortHeld, state: State, now: float) -> Step:
    """The first node has the port."""
    if event.node not in state.members[:1]:
        return state, ()  # nobody asked it
    return state.with_generation(port=event.port), ()


def on_port_refused(event: PortRefused, state: State, now: float) -> Step:
    """The port can't be used: end, naming the process that holds it."""
    if event.node not in state.members[:1] or state.plan is None:
        return state, ()
    text = f"can't get a free port for the rendezvous on {state.label(event.node)}: {event.error.lower()}"
    if state.plan.master_port is not None:
        port = f"port {state.plan.master_port} on {state.label(event.node)}"
        why = refused_port_words(event.error, event.owners)
        text = f"can't use {port}: {why}; leave out the port to get a free one"
    return state, (JobOver(Cause(text, Exit.PORT_TAKEN, now, node=event.node)),)


def on_port_usurped(event: PortUsurped, state: State, now: float) -> Step:
    """Another program took the rendezvous port: move to another port, or end if the user chose this one."""
    if event.node not in state.members[:1]:
        return state, ()
    text = f"port {state.port} on {state.label(event.node)} was taken by {holders_words(event.owners)}"
    cause = Cause(text, Exit.PORT_TAKEN, now, node=event.node)
    fixed = state.spec.master_port is not None or not state.spec.engine.gives_ranks
    return state, (JobOver(cause) if fixed else StartAgain(Why.PORT, cause, "restarting with another port"),)


def on_route_found(event: RouteFound, state: State, now: float) -> Step:
    """A node has found its route to the master."""
    node = state.nodes[event.node]
    if event.node not in state.members or not isinstance(node, Up) or node.route:
        return state, ()
    route = Route(event.interface, event.source, misnamed(event, state))
    state = state.with_node(event.node, node._replace(route=route))
    state = state.without_timers(Timer.ANSWER, node=event.node)
    first = state.nodes[state.members[0]]
    if state.spec.engine.serves_store and isinstance(first, Up) and not (first.route or first.asked):
        # The master's interface is the one that carries the address by which the others reach it.
        state = state.with_node(state.members[0], first._replace(asked=True))
        return state, (FindRoute(state.members[0], event.address),)
    return state, _strange_master(event, state)


def _strange_master(event: RouteFound, state: State) -> tuple[Notice, ...]:
    """A warning if MASTER_ADDR is not an address of the node of rank 0; launchers by hand look themselves."""
    serves = state.spec.engine.serves_store and not state.spec.invocation.by_hand
    theirs = event.node != state.members[0] or not serves
    if theirs or state.plan is None or event.source in (None, event.address):
        return ()
    address = state.plan.master_addr
    is_it = "" if address == event.address else f" ({event.address})"
    text = f"MASTER_ADDR {address}{is_it} is not an address of {state.label(event.node)}, where rank 0 runs"
    advice = f"no rank can join unless it is forwarded to {event.source}"
    return (Notice("warning", f"{text}; {advice}"),)


def on_route_failed(event: RouteFailed, state: State, now: float) -> Step:
    """A node has no route to the master: continue without it if others can, else end, saying what to set."""
    node = state.nodes[event.node]
    if state.plan is None or event.node not in state.members or not isinstance(node, Up) or node.route:
        return state, ()  # nobody asked it
    first = state.members[0]
    if event.node == first and state.spec.engine.serves_store:
        return state.with_node(first, node._replace(route=Route())), ()
    text = _no_route_words(state, state.plan.master_addr, event)
    if state.phase is Phase.RUNNING:  # the others go on without it
        return state, (Notice("warning", text),)
    cause = Cause(text, Exit.USAGE, now, node=event.node)
    if state.generation and route_of(state.nodes[first]):
        return state.with_node(event.node, node._replace(unfit=text)), (GenerationFailed(cause),)
    return state, (JobOver(cause),)


def _no_route_words(state: State, master: str, event: RouteFailed) -> str:
    node, first = state.label(event.node), state.members[0]
    if not state.spec.engine.serves_store:
        return f"{node} can't reach etcd at {master}: {event.error}"
    key = f"{state.spec.pool[first].path}.address"
    advice = f"set {key} to an address of {state.label(first)} that the other nodes can reach"
    return f"{node} can't reach MASTER_ADDR {master}: {event.error}; {advice}"


def start_when_prepared(state: State, now: float) -> Step:
    """Start the workers once all is prepared for them."""
    alone = len(state.members) == len(state.nodes)  # no spares, which need no routes
    if state.port is None or (alone and state.nodes.unrouted):
        return state, ()
    here = _here(state)
    if any(route_of(state.nodes[index]) is None for index in here):
        return state, ()
    state = state._replace(phase=Phase.RUNNING).with_generation(started_at=now).without_timers(Timer.PREPARE)
    state, started = _start(state, here)
    return state, (Started(), *(() if state.generation else mismatches(state)), *started)


def start_latecomers(state: State, now: float) -> Step:
    """Start torch's agents on nodes that come, or come back, while the others run."""
    if state.spec.engine.gives_ranks:
        return state, ()
    return _start(state, [node for node in _here(state) if _waits(state, node)])


def _here(state: State) -> list[int]:
    """The members but for those that torch's agents go on without."""
    return [index for index in state.members if isinstance(state.nodes[index], Up)]


def _waits(state: State, node: int) -> bool:
    planned = state.workers[state.members.index(node)].phase is workers.WorkerPhase.PLANNED
    ready = is_usable(state.nodes[node]) and route_of(state.nodes[node]) is not None
    return planned and ready


def _start(state: State, nodes: Sequence[int]) -> tuple[State, tuple[Action, ...]]:
    actions: list[Action] = []
    for index in nodes:
        node = state.nodes[index]
        assert isinstance(node, Up)
        state = state.with_node(index, node._replace(occupied=True))
        actions.append(StartWorkers(index))
    return state, tuple(actions)


def _owes_an_answer(state: State, node: int) -> bool:
    this = state.nodes[node]
    if not isinstance(this, Up):
        return False
    if node == state.members[0] and state.port is None:
        return True
    # The first node may be asked for its route only when another has found its own.
    return this.route is None and (this.asked or node in _first_asked(state, state.members))


def prepare_overdue(state: State, now: float) -> Step:
    """A node that said hello does not answer any more."""
    slow = [state.label(i) for i in state.members if route_of(state.nodes[i]) is None] or [
        state.label(state.members[0])
    ]
    if state.generation:  # it worked before: lost, and the job may go on without it
        late = [i for i in state.members if _owes_an_answer(state, i)]
        why = f"no answer within {state.spec.timeouts.connect_s:g} s (timeouts.connect)"
        return state, tuple(GiveUp(i, why) for i in late)
    limit = f"{state.spec.timeouts.connect_s:g} s (timeouts.connect)"
    text = f"no answer from {listed(slow)} within {limit}"
    return state, (JobOver(Cause(text, Exit.UNREACHABLE, now)),)
