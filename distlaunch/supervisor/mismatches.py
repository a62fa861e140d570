"""Differences between a node and the job file: missing GPUs, and variables that name unusable interfaces."""

from collections.abc import Mapping

from distlaunch.agent.messages import RouteFound
from distlaunch.contract import INTERFACE_VARIABLES
from distlaunch.job.spec import Env, EnvValue
from distlaunch.supervisor.actions import Notice
from distlaunch.supervisor.nodes import facts_of, route_of
from distlaunch.supervisor.state import State
from distlaunch.wording import counted, listed

CHOOSES_GPUS = "CUDA_VISIBLE_DEVICES"
"""If the job sets this variable, the GPUs visible to the agent are not those visible to the workers."""


def mismatches(state: State) -> tuple[Notice, ...]:
    """Return warnings about the nodes of the attempt, one for all nodes with the same problem."""
    found: dict[tuple[str, str], list[str]] = {}
    for look in (_missing_gpus, _misnamed_interface):
        for index in state.members:
            if words := look(state, index):
                found.setdefault(words, []).append(state.label(index))
    return tuple(Notice("warning", f"{one}{listed(nodes)}{other}") for (one, other), nodes in found.items())


def _missing_gpus(state: State, index: int) -> tuple[str, str] | None:
    """Return the words before and after the names of nodes with too few GPUs visible to the agent."""
    said, visible = state.spec.pool[index].gpus, facts_of(state.nodes[index]).gpus
    env: Env = {**state.spec.env, **state.spec.pool[index].env}
    if not said or visible is None or visible >= said or CHOOSES_GPUS in env:
        return None
    there = "none is" if not visible else f"only {visible} {'is' if visible == 1 else 'are'}"
    asked = counted(said, "GPU")
    return "", f": the job file says {asked}, but {there} visible there; check with `nvidia-smi -L`"


def _misnamed_interface(state: State, index: int) -> tuple[str, str] | None:
    route = route_of(state.nodes[index])
    used = INTERFACE_VARIABLES if state.plan and state.plan.backend == "nccl" else INTERFACE_VARIABLES[:1]
    for name, setting, why in route.misnamed if route else ():
        if name in used:
            return f"{setting} on ", f": {why}"
    return None


def misnamed(event: RouteFound, state: State) -> tuple[tuple[str, str, str], ...]:
    """Return variables that can't work on a node that has found its route, as name, setting and reason."""
    if not event.interfaces:
        return ()
    given = {name: EnvValue(text) for name, text in event.named}
    env: Mapping[str, EnvValue] = {**given, **state.spec.env, **state.spec.pool[event.node].env}
    way = f"; the route to the other nodes uses {event.interface}" if event.interface else ""
    interfaces = dict(event.interfaces)
    return tuple(
        (name, name if value.inherited else f"{name}={value.text}", why + way)
        for name in INTERFACE_VARIABLES
        if (value := env.get(name)) and (why := _flaw(name, value.text, interfaces))
    )


def _flaw(name: str, value: str, interfaces: Mapping[str, bool]) -> str:
    """Return why no connection is possible with this value, or "".

    `interfaces` maps each interface to whether it has an address.
    """
    if not value:
        return ""
    if name == "GLOO_SOCKET_IFNAME":  # Gloo creates a device for each, so all must be usable
        flaws = [_flaw_of([each], interfaces) for each in value.split(",")]
        return next(filter(None, flaws), "")
    return _flaw_of(_chosen_by_nccl(value, interfaces), interfaces)


def _flaw_of(names: list[str], interfaces: Mapping[str, bool]) -> str:
    """Return why none of these interfaces is usable."""
    there = [name for name in names if name in interfaces]
    if not there:
        return "no such interface"
    if not any(interfaces[name] for name in there):
        return "that interface has no address" if len(there) == 1 else "those interfaces have no address"
    return "lo does not reach other machines" if there == ["lo"] else ""


def _chosen_by_nccl(value: str, interfaces: Mapping[str, bool]) -> list[str]:
    """Apply the NCCL rule: prefixes, or whole names after `=`; with `^` all others; `:port` is ignored."""
    but = value.startswith("^")
    exact = value[but:].startswith("=")
    names = [part.partition(":")[0] for part in value[but + exact :].split(",") if part]
    return [
        each
        for each in interfaces
        if any(each == name if exact else each.startswith(name) for name in names) is not but
        and not (but and each == "lo")
    ]


def strange_master(state: State) -> tuple[Notice, ...]:
    """Warn if MASTER_ADDR is not an address of the node of rank 0. Launchers check that themselves."""
    route = route_of(state.nodes[state.members[0]])
    if state.plan is None or not (route and route.source and route.ends):
        return ()
    address, (_, came_to) = state.plan.master_addr, route.ends
    is_settled = len(state.members) == 1 or state.reached_by in route.ends
    if not is_settled or route.source == came_to:
        return ()
    is_it = "" if address == came_to else f" ({came_to})"
    text = f"MASTER_ADDR {address}{is_it} is not an address of {state.label(state.members[0])}"
    advice = f"no rank can join unless it is forwarded to {route.source}"
    return (Notice("warning", f"{text}, where rank 0 runs; {advice}"),)
