"""A torchrun command line for one of several nodes: where the launchers come together."""

import re
from collections.abc import Iterator, Mapping

from distlaunch.dropin.flags import FLAG, Flags, node_range
from distlaunch.errors import UsageError
from distlaunch.plan.gathering import Arrival, Gathering
from distlaunch.plan.layout import is_loopback
from distlaunch.schedulers import load, step_nodes, task_number

C10D_PORT = 29400
"""torch's default, of c10d only."""
_TRUE, _FALSE = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")
_USED = ("is_host", "join_timeout", "timeout", "last_call_timeout", "store_type")


def endpoint_of(flags: Flags) -> tuple[str, int]:
    """Where rank 0's store is. As torch has it, --rdzv-endpoint wins over --master-addr and -port."""
    if not flags.rdzv_endpoint:
        return flags.master_addr, flags.master_port
    host, colon, port = flags.rdzv_endpoint.rpartition(":")
    if colon and port.isdecimal():
        return host.strip("[]"), int(port)
    return flags.rdzv_endpoint.strip("[]"), C10D_PORT if flags.rdzv_backend == "c10d" else flags.master_port


def is_c10d(flags: Flags) -> bool:
    """Whether several launchers come together by c10d, which gives their nodes their numbers."""
    return flags.rdzv_backend == "c10d" and not flags.standalone and node_range(flags.nnodes)[1] > 1


def left_to_torch(flags: Flags) -> str:
    """What of c10d only torch's own agent can do; "" if nothing."""
    kind = conf_of(flags).get("store_type", "tcp").lower()
    return "" if kind == "tcp" or not is_c10d(flags) else f"--rdzv-conf store_type={kind}"


def conf_of(flags: Flags) -> dict[str, str]:
    """The settings of `--rdzv-conf`. Raises `UsageError`."""
    found: dict[str, str] = {}
    for setting in flags.rdzv_conf.split(",") if flags.rdzv_conf.strip() else []:
        key, equals, value = (part.strip() for part in setting.partition("="))
        if not (key and equals):
            raise UsageError(f"--rdzv-conf: expected key=value,…, got {flags.rdzv_conf!r}")
        found[key] = value
    return found


def joining_notices(flags: Flags) -> Iterator[str]:
    """What to say of a command line for several nodes, before it waits for the others."""
    if is_c10d(flags):
        if idle := [key for key in conf_of(flags) if key not in _USED]:
            known = "is_host, join_timeout and last_call_timeout"
            yield f"--rdzv-conf {', '.join(idle)} has no effect: only {known} have one here"
        if "local_addr" in flags.given:
            yield f"--local-addr has no effect: {FLAG['local_addr'].why}"
    host, _ = endpoint_of(flags)
    if is_loopback(host):
        told = "is reachable only from this machine; for nodes on other machines, pass node 0's address"
        yield f"{_place_flag(flags)} {host} {told}"


def waits_as_told(flags: Flags) -> bool:
    """Whether --rdzv-conf of a static rendezvous says nothing but how long several nodes are waited for."""
    return node_range(flags.nnodes)[1] > 1 and {*conf_of(flags)} <= {"timeout", "join_timeout"}


def gathering_of(flags: Flags, name: str, environ: Mapping[str, str]) -> Gathering:
    """Where the launcher on the machine `name` meets those of the other nodes. Raises `UsageError`."""
    host, port = endpoint_of(flags)
    fewest, most = node_range(flags.nnodes)
    _check_place(flags, host, port)
    c10d = is_c10d(flags)
    given = flags.node_rank if "node_rank" in flags.given or not c10d else None
    if not c10d and not 0 <= flags.node_rank < most:
        raise UsageError(f"--node-rank {flags.node_rank}: expected 0 to {most - 1}, with --nnodes {most}")
    if c10d:
        _check_reach(flags, environ, host)
    task = task_number(environ) if c10d else None
    return Gathering(
        Arrival(f"--rdzv-id {flags.rdzv_id}", name, (fewest, most), given, task),
        hosts=(host,),
        ports=(port,),
        serves=_is_host(flags) if c10d else flags.node_rank == 0,
        wait_s=_seconds(flags, ("join_timeout", "timeout"), Gathering._field_defaults["wait_s"]),
        last_call_s=_seconds(flags, ("last_call_timeout",), Gathering._field_defaults["last_call_s"]),
        ordered=not c10d,
        hint=f"a node must have the address {host}, or get --rdzv-conf is_host=1"
        if c10d
        else "check --node-rank 0 and --master-addr",
    )


def _is_host(flags: Flags) -> bool | None:
    text = conf_of(flags).get("is_host", "").lower()
    if text not in ("", *_TRUE, *_FALSE):
        raise UsageError(f"--rdzv-conf is_host: expected 1 or 0, got {text!r}")
    return text in _TRUE if text else None


def _seconds(flags: Flags, keys: tuple[str, ...], default_s: float) -> float:
    conf = conf_of(flags)
    key = next((key for key in keys if key in conf), None)
    if key is None:
        return default_s
    if not conf[key].isdecimal() or not int(conf[key]):
        raise UsageError(f"--rdzv-conf {key}: expected a number of seconds ≥ 1, got {conf[key]!r}")
    return float(int(conf[key]))


def _check_place(flags: Flags, host: str, port: int) -> None:
    """Raise `UsageError` if several nodes can't meet there, as where a variable of a script is empty."""
    flag, text = _place_flag(flags), flags.rdzv_endpoint or host
    if not re.fullmatch(r"[^\s/@]+", host):
        raise UsageError(f"{flag} {text!r}: expected a host name or address; is a variable in it empty?")
    if not 0 < port < 65536:
        flag, text = (flag, text) if flags.rdzv_endpoint else ("--master-port", str(port))
        raise UsageError(f"{flag} {text!r}: several nodes need a port from 1 to 65535")


def _check_reach(flags: Flags, environ: Mapping[str, str], host: str) -> None:
    """Raise `UsageError` if each of several machines would take itself for the endpoint's."""
    name, count = step_nodes(environ)
    if count > 1 and is_loopback(host):
        whose = f"{load(name).title} {load(name).step}'s"
        raise UsageError(
            f"{_place_flag(flags)} {host}: each of this {whose} {count} nodes would wait for the others "
            "at its own; pass the first node's name"
        )


def _place_flag(flags: Flags) -> str:
    """The flag that says where the ranks meet, or should."""
    unsaid = flags.rdzv_backend == "c10d" and "master_addr" not in flags.given
    return "--rdzv-endpoint" if flags.rdzv_endpoint or unsaid else "--master-addr"
