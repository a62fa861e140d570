"""Preparation of an attempt whose agents have connected: its plan, port, routes and workers.

Requests that the plan will most likely require are sent to nodes before their agents have connected. Each
is sent right after the agent's code, and its answer follows the agent's first report. This saves two round
trips before the ranks start. If the plan turns out different, the requests are sent again.
"""

import signal
from collections.abc import Mapping, Sequence

from distlaunch.agent import messages
from distlaunch.contract import INTERFACE_VARIABLES, chosen_by_nccl
from distlaunch.errors import Exit, JobError
from distlaunch.job.spec import EnvValue
from distlaunch.plan.placement import LaunchPlan, NodePlan, NodeRank, foreseen_master, make_plan
from distlaunch.plan.workers import WorkerPlan, binding_of, ids_of, meeting_of, worker_specs, workers
from distlaunch.supervisor import checking, placing, ranks
from distlaunch.supervisor.actions import Action, GiveUp, Send, ShowMessage, StartWorkers
from distlaunch.supervisor.events import AddressesFound, JobOver, Planned, StartAgain, Step
from distlaunch.supervisor.nodes import (
    ASKED,
    Code,
    Connecting,
    RankState,
    RankStates,
    Route,
    Up,
    facts_of,
    route_of,
)
from distlaunch.supervisor.state import Cause, Phase, State, Timer, Why
from distlaunch.wording import holders_words, listed, refused_port_words


def on_addresses_found(event: AddressesFound, state: State, now: float) -> Step:
    """Record the addresses that may become MASTER_ADDR if the job file doesn't set one."""
    return foresee(state._replace(addresses=dict(event.addresses)))


def foresee(state: State) -> tuple[State, tuple[Action, ...]]:
    """Send all nodes the requests for the plan that applies if every listed node connects."""
    if state.foreseen:
        return state, ()
    try:
        state = state._replace(foreseen=foreseen_master(state.spec, state.addresses.get(0)))
    except JobError:
        return state, ()  # reported when the plan is made
    actions: list[Action] = []
    for node in range(len(state.spec.nodes)):
        state, questions = ask_early(state, node)
        actions += questions
    return state, tuple(actions)


def ask_early(state: State, node: int) -> tuple[State, tuple[Action, ...]]:
    """Send a connecting node its requests for the foreseen plan, if there is such a plan."""
    this, wanted = state.nodes[node], state.spec.nodes
    foreseen = state.foreseen and state.phase is Phase.CONNECTING and node < len(wanted)
    if not foreseen or not isinstance(this, Connecting):
        return state, ()
    ports: tuple[Action, ...] = ()
    if node == 0:
        state, ports = state.with_node(0, this._replace(held=ASKED)), (_ask_for_ports(state, 0),)
    together = state.spec.together([each.reach for each in wanted])
    state, questions = _ask(state, node, "" if together else state.foreseen)
    return state, (*ports, *questions)


def _ask(state: State, node: int, address: str) -> tuple[State, tuple[Action, ...]]:
    """Request a node's route and the tree, unless already requested. The node may still be connecting.

    Without an `address`, no route is requested.
    """
    this, actions = state.nodes[node], list[Action]()
    assert isinstance(this, Connecting | Up)
    if address and this.asked != address and route_of(this) is None:
        this = this._replace(asked=address)
        actions.append(Send(node, messages.FindRoute(address, checking.needs_of(state, node))))
    if state.spec.tree and this.code is None:
        this = this._replace(code=Code())
        actions.append(placing.request(state, node))
    return state.with_node(node, this) if actions else state, tuple(actions)


def prepare(state: State, members: tuple[int, ...], now: float) -> Step:
    """Create the plan for an attempt on these nodes, in rank order. Hold the port and find the interfaces."""
    facts = {index: facts_of(state.nodes[index]) for index in members}
    # The backend chosen by the first attempt applies to the whole run.
    spec = state.spec._replace(backend=state.plan.backend) if state.plan else state.spec
    try:
        plan = make_plan(spec, facts, state.addresses.get(members[0]))
    except JobError as error:
        return state, (JobOver(Cause(str(error), error.exit_status, now)),)
    moved, first_time = _has_moved(state, plan, members[0]), state.plan is None
    state = _with_plan(state, plan)
    state = state.with_timer(Timer.PREPARE, now + state.spec.limits.connect_s)
    state, ports = _hold_ports(state, members[0])
    todo = [*ports]
    if plan.one_machine or moved:
        state = _with_routes(state, members, Route(None, "127.0.0.1") if plan.one_machine else None)
    for node in members:
        # The first node is asked last, because the other nodes report the address at which they reach it.
        later = node == members[0] and len(members) > 1
        state, questions = _ask(state, node, "" if later else plan.master_addr)
        todo += questions
    state, more = _ask_first_node(state)
    warning = _strange_master(state) if first_time and not more else ()
    return state, (*todo, *more, *warning, Planned())


def _ask_for_ports(state: State, node: int) -> Send:
    return Send(node, messages.HoldPort(state.spec.rendezvous.port, len(state.spec.port_names)))


def _with_plan(state: State, plan: LaunchPlan) -> State:
    number = state.attempt + 1 if state.plan else 0
    workers = RankStates(RankState(rank) for node in plan.nodes for rank in node.ranks)
    state = state.unwatched()._replace(phase=Phase.PREPARING, attempt=number, plan=plan, workers=workers)
    return state._replace(ports=(), started_at=None)


def _hold_ports(state: State, first: int) -> tuple[State, tuple[Action, ...]]:
    """Use the ports that the first node holds or has been asked to hold (ASKED), or else request them."""
    node = state.up(first)
    if node.held is None:
        return state, (_ask_for_ports(state, first),)
    state = state.with_node(first, node._replace(held=None))
    return state._replace(ports=node.held), ()


def _has_moved(state: State, plan: LaunchPlan, first: int) -> bool:
    """Return whether the routes to MASTER_ADDR must be found again."""
    before = state.plan
    if before is None:
        return state.foreseen != plan.master_addr
    if before.one_machine or route_of(state.nodes[first]) is None:
        return True
    return before.master_addr != plan.master_addr


def _with_routes(state: State, members: Sequence[int], route: Route | None) -> State:
    """Return `state` with this route for all members. If it is None, the routes must be requested again."""
    for index in members:
        state = state.with_node(index, state.up(index)._replace(route=route, asked=""))
    return state._replace(reached_by="")


def on_port_held(event: messages.PortHeld, state: State, now: float) -> Step:
    """Record the ports that the first node holds."""
    node, held = state.nodes[event.node], (event.port, *event.further)
    if isinstance(node, Up) and node.held == ASKED:
        return state.with_node(event.node, node._replace(held=held)), ()
    if event.node not in state.members[:1]:
        return state, ()  # it was not asked
    return state._replace(ports=held), ()


def on_port_refused(event: messages.PortRefused, state: State, now: float) -> Step:
    """End the job because the port can't be used, naming the process that holds it."""
    node = state.nodes[event.node]
    if isinstance(node, Up) and node.held == ASKED:  # if the plan needs that port, it is requested again
        return state.with_node(event.node, node._replace(held=None)), ()
    if event.node not in state.members[:1]:
        return state, ()
    label, port = state.label(event.node), state.planned.master_port
    text = f"can't get a free port for the rendezvous on {label}: {event.error.lower()}"
    if port is not None:
        why = refused_port_words(event.error, event.owners)
        text = f"can't use port {port} on {label}: {why}; {_other_port_words(state)}"
    return state, (JobOver(Cause(text, Exit.PORT_TAKEN, now, node=event.node)),)


def on_port_usurped(event: messages.PortUsurped, state: State, now: float) -> Step:
    """Move to another port because another program took this one; end the job if the user chose the port."""
    if event.node not in state.members[:1]:
        return state, ()
    text = f"port {state.port} on {state.label(event.node)} was taken by {holders_words(event.owners)}"
    cause = Cause(text, Exit.PORT_TAKEN, now, node=event.node)
    if state.spec.rendezvous.port is not None:
        return state, (JobOver(cause._replace(text=f"{text}; {_other_port_words(state)}")),)
    return state, (StartAgain(Why.PORT, cause, "restarting with another port"),)


def _other_port_words(state: State) -> str:
    """Return advice to change a port set by the user. Launchers need one to find each other."""
    spec = state.spec
    if not spec.places and len(spec.pool) > 1:
        return "use another port on all nodes"
    keys = (key for key in ("rendezvous.endpoint", "master_port") if key in spec.places)
    return f"leave out the port{spec.key_words(next(keys, ''))} to get a free one"


def on_route_found(event: messages.RouteFound, state: State, now: float) -> Step:
    """Record the route of a node to MASTER_ADDR.

    Once another node reports the address at which it reaches the first node, request the first node's
    interface with that address, or warn if MASTER_ADDR isn't an address of the first node.
    """
    node = state.nodes[event.node]
    if not isinstance(node, Up) or node.asked != event.asked:
        return state, ()
    ends = (event.asked, event.address)
    route = Route(event.interface, event.source, ends, _misnamed(event, state))
    seen = node.seen if event.seen is None else event.seen
    state = state.with_node(event.node, node._replace(route=route, asked="", seen=seen))
    is_first = event.node == (state.members[0] if state.members else 0)
    # Only these two answers can settle whether MASTER_ADDR is an address of the first node.
    may_warn = is_first or not state.reached_by
    if not is_first and not state.reached_by:
        state = state._replace(reached_by=event.address)
    if state.phase is Phase.CONNECTING:
        return state, ()
    state, again = _ask_first_node(state)
    return state, again or (_strange_master(state) if may_warn else ())


def _ask_first_node(state: State) -> tuple[State, tuple[Action, ...]]:
    """Find which interface of the first node has the address at which the other nodes reach it."""
    first, address = state.members[0], state.reached_by
    node = state.nodes[first]
    if state.phase is not Phase.PREPARING or not isinstance(node, Up) or node.asked or not address:
        return state, ()
    if node.route and (not node.route.ends or address in node.route.ends):
        return state, ()
    return _ask(state.with_node(first, node._replace(route=None)), first, address)


def on_route_failed(event: messages.RouteFailed, state: State, now: float) -> Step:
    """Handle a node without a route to MASTER_ADDR: continue without it if possible, else end with advice."""
    node = state.nodes[event.node]
    if not isinstance(node, Up) or node.asked != event.asked:
        return state, ()  # it was not asked
    node = node._replace(asked="")
    state = state.with_node(event.node, node)
    if state.plan is None or not isinstance(state.nodes[first := state.members[0]], Up):
        return state, ()  # if the plan needs that route, or the next attempt another, it is requested again
    if event.node == first:
        if len(state.members) > 1 and event.asked != state.reached_by:
            return _ask_first_node(state)  # the first node may be unable to resolve its own name
        return state.with_node(first, node._replace(route=Route())), ()
    return _no_route(state, event, now)


def _no_route(state: State, event: messages.RouteFailed, now: float) -> Step:
    first = state.members[0]
    key, label = state.spec.address_path(first), state.label(first)
    advice = f"set {key} to an address of {label} that the other nodes can reach"
    what = f"{state.label(event.node)} can't reach MASTER_ADDR {state.planned.master_addr}"
    text = f"{what}: {event.error}; {advice}"
    cause = Cause(text, Exit.USAGE, now, node=event.node, kind="node_lost")
    if state.attempt:
        return checking.leave_out(state, [event.node], cause)
    return state, (JobOver(cause),)


def start_when_prepared(state: State, now: float) -> Step:
    """Start the workers once everything is prepared.

    The rule of PREPARING. First compare the environments, and refuse nodes with problems.
    """
    no_spares = len(state.members) == len(state.nodes)  # spares need no routes
    if state.port is None or (no_spares and state.nodes.counts.unrouted):
        return state, ()
    if any(route_of(state.nodes[i]) is None or placing.lacks_code(state, i) for i in state.members):
        return state, ()
    if differs := placing.differing(state, now):
        if state.attempt and differs.node is not None:
            return checking.leave_out(state, [differs.node], differs)
        return state, (JobOver(differs),)
    state, found = placing.with_environments(state), checking.problems(state)
    if errors := [each for each in found if each.level == "error"]:
        return checking.refuse(state, errors, now)
    state = state._replace(phase=Phase.RUNNING, started_at=now).without_timers(Timer.PREPARE)
    state = ranks.watch(state, now)
    for index in state.members:
        state = state.with_node(index, state.up(index)._replace(occupied=True))
    warning = () if state.attempt else checking.warning(state, found)
    return state, (*warning, *map(StartWorkers, state.members))


def _owes_an_answer(state: State, node: int) -> bool:
    """Return whether a request for the port, the tree or a route of this member is unanswered."""
    this = state.nodes[node]
    if not isinstance(this, Up):
        return False
    if node == state.members[0] and state.port is None:
        return True
    if placing.lacks_code(state, node):
        return True
    # Sometimes, the first node is asked for its route only after another node has found one.
    return this.route is None and this.asked != ""


def prepare_overdue(state: State, now: float) -> Step:
    """Give up on a node that connected but no longer answers."""
    limit = f"{state.spec.limits.connect_s:g} s{state.spec.key_words('timeouts.connect')}"
    late = [index for index in state.members if _owes_an_answer(state, index)]
    if state.attempt:  # these nodes worked before, so they are lost, and the job may continue without them
        return state, tuple(GiveUp(index, f"no answer within {limit}") for index in late)
    names = listed([*map(state.label, late or state.members)])
    text = f"no answer from {names} within {limit}; DNS or a file system may be hanging there"
    return state, (JobOver(Cause(text, Exit.UNREACHABLE, now)),)


# Workers


def running_workers(state: State) -> dict[NodeRank, list[WorkerPlan]]:
    """Return the workers of each node as they are started in the current attempt."""
    return {part.node_rank: _workers_of(state, part) for part in state.planned.nodes}


def chosen_interfaces(state: State) -> dict[NodeRank, dict[str, str]]:
    """Return the interface that each node's workers use by default, if known, and the reason for the choice.

    Recorded in plan.json.
    """
    ways = {part.node_rank: (_way(state, part), part.node) for part in state.planned.nodes}
    return {
        rank: {"name": way.interface, "why": _why(state, way, node)}
        for rank, (way, node) in ways.items()
        if way.interface
    }


def _why(state: State, way: Route, node: int) -> str:
    if node == state.members[0] and state.reached_by in way.ends:
        return f"the other nodes reach MASTER_ADDR at {state.reached_by}, which it has"
    return f"the route from {way.source} to MASTER_ADDR {state.planned.master_addr} uses it"


def _workers_of(state: State, part: NodePlan) -> list[WorkerPlan]:
    plan, way = state.planned, _way(state, part)
    sources = [_way(state, each).source for each in plan.nodes] if state.spec.placeholders else ()
    meeting = meeting_of(plan, state.run_id, state.ports, state.restart_count, sources)
    return workers(plan, part, meeting, way.interface, way.source)


def _way(state: State, part: NodePlan) -> Route:
    return route_of(state.nodes[part.node]) or Route()


def start_command(state: State, node: int) -> messages.StartWorkers:
    """Return the command that starts the workers of a node in the current attempt."""
    plan, times = state.planned, state.spec.limits
    part = plan.nodes[plan.members.index(node)]
    planned = _workers_of(state, part)
    shared, specs = worker_specs(plan, part, planned, state.attempt)
    code = placing.code_of(state, node)
    return messages.StartWorkers(
        attempt=state.attempt,
        run_id=state.run_id,
        grace_s=times.stop_s,
        lease_s=times.lease_s,
        stall_s=times.stall_s,
        watch_port=state.ports[0],
        hosts_store=part.node_rank == 0,
        warning=signal.Signals[f"SIG{times.on_warning}"],
        flight=plan.backend == "nccl",
        temporary=planned[0].temporary,
        environment=code.environment if code else "",
        env=shared | ids_of(state.spec, state.run_id),
        binding=binding_of(state.spec, part),
        collects=bool(state.spec.collect.paths),
        workers=specs,
    )


# Variables that name unusable interfaces


def _misnamed(event: messages.RouteFound, state: State) -> tuple[tuple[str, str, str], ...]:
    """Return the variables that name unusable interfaces of a node, each as name, setting and reason."""
    if not event.interfaces:
        return ()
    set_on_node = {name: EnvValue(text) for name, text in event.named}
    env = {**set_on_node, **state.spec.program_of(state.spec.pool[event.node]).env}
    way = f"; the route to the other nodes uses {event.interface}" if event.interface else ""
    interfaces = dict(event.interfaces)
    return tuple(
        (name, name if value.inherited else f"{name}={value.text}", why + way)
        for name in INTERFACE_VARIABLES
        if (value := env.get(name)) and "{" not in value.text and (why := _flaw(name, value.text, interfaces))
    )


def _flaw(name: str, value: str, interfaces: Mapping[str, bool]) -> str:
    """Return why connections are impossible with this value, or "".

    `interfaces` maps each interface to whether it has an address.
    """
    if not value:
        return ""
    if name == "GLOO_SOCKET_IFNAME":  # Gloo creates a device for each, so all must be usable
        flaws = [_flaw_of([each], interfaces) for each in value.split(",")]
        return next(filter(None, flaws), "")
    return _flaw_of(chosen_by_nccl(value, interfaces), interfaces)


def _flaw_of(names: list[str], interfaces: Mapping[str, bool]) -> str:
    """Return why none of these interfaces is usable."""
    there = [name for name in names if name in interfaces]
    if not there:
        return "no such interface"
    if not any(interfaces[name] for name in there):
        return "that interface has no address" if len(there) == 1 else "those interfaces have no address"
    return "lo can't reach other machines" if there == ["lo"] else ""


def _strange_master(state: State) -> tuple[ShowMessage, ...]:
    """Warn if MASTER_ADDR is not an address of rank 0's node. Launchers check that themselves."""
    route = route_of(state.nodes[state.members[0]])
    if not (route and route.source and route.ends):
        return ()
    address, (_, came_to) = state.planned.master_addr, route.ends
    is_settled = len(state.members) == 1 or state.reached_by in route.ends
    if not is_settled or route.source == came_to:
        return ()
    is_it = "" if address == came_to else f" ({came_to})"
    label = state.label(state.members[0])
    text = f"MASTER_ADDR {address}{is_it} is not an address of {label}, where rank 0 runs"
    key = state.spec.address_path(state.members[0])
    advice = f"set {key} to {route.source}, unless MASTER_ADDR forwards connections to {label}"
    return (ShowMessage("warning", f"{text}; {advice}"),)
