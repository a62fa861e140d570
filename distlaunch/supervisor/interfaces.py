"""Do GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, where the user sets them, name what a node has?"""

from collections.abc import Mapping

from distlaunch.job.spec import EnvValue
from distlaunch.supervisor.actions import Notice
from distlaunch.supervisor.ending import listed
from distlaunch.supervisor.events import RouteFound
from distlaunch.supervisor.nodes import route_of
from distlaunch.supervisor.state import State

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def misnamed(event: RouteFound, state: State) -> tuple[str, str]:
    """The setting that can't work on the node that has found its route, and why; ("", "") without one."""
    used = VARIABLES if state.plan and state.plan.backend == "nccl" else VARIABLES[:1]
    given = {name: EnvValue(text) for name, text in event.named}
    env: Mapping[str, EnvValue] = {**given, **state.spec.env, **state.spec.pool[event.node].env}
    for name in used:
        value = env.get(name)
        why = _flaw(name, value.text, dict(event.interfaces)) if value and event.interfaces else ""
        if value and why:
            setting = name if value.inherited else f"{name}={value.text}"
            way = f"; the route to the other nodes uses {event.interface}" if event.interface else ""
            return setting, why + way
    return "", ""


def interface_notices(state: State) -> tuple[Notice, ...]:
    """One warning for all nodes on which the same setting fails for the same reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for index in state.members:
        route = route_of(state.nodes[index])
        setting, why = route.misnamed if route else ("", "")
        if why:
            found.setdefault((setting, why), []).append(state.label(index))
    return tuple(
        Notice("warning", f"{setting} on {listed(nodes)}: {why}") for (setting, why), nodes in found.items()
    )


def _flaw(name: str, value: str, interfaces: Mapping[str, bool]) -> str:
    """Why no connection can be made with this value; `interfaces` says of each whether it has an address."""
    if not value:
        return ""
    if name == "GLOO_SOCKET_IFNAME":  # a device is made for each, and all must do
        flaws = [_flaw_of([each], interfaces) for each in value.split(",")]
        return next(filter(None, flaws), "")
    return _flaw_of(_chosen_by_nccl(value, interfaces), interfaces)


def _flaw_of(names: list[str], interfaces: Mapping[str, bool]) -> str:
    """Why none of these will do."""
    there = [name for name in names if name in interfaces]
    if not there:
        return "no such interface there"
    if not any(interfaces[name] for name in there):
        return "that interface has no address" if len(there) == 1 else "those interfaces have no address"
    return "lo leads to no other machine" if there == ["lo"] else ""


def _chosen_by_nccl(value: str, interfaces: Mapping[str, bool]) -> list[str]:
    """NCCL's own rule: prefixes, or whole names behind `=`; behind `^`, all but those; `:port` is ignored."""
    but = value.startswith("^")
    exact = value[but:].startswith("=")
    names = [part.partition(":")[0] for part in value[but + exact :].split(",") if part]
    return [
        each
        for each in interfaces
        if any(each == name if exact else each.startswith(name) for name in names) is not but
        and not (but and each == "lo")
    ]
