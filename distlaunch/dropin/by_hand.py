"""A torchrun command line of one of several nodes: where they meet, and this one's place among them."""

import re
from collections.abc import Mapping

from distlaunch.allocation.place import step_nodes, task_number
from distlaunch.dropin import c10d
from distlaunch.dropin.flags import Flags, node_range
from distlaunch.errors import UsageError
from distlaunch.job.spec import ByHand
from distlaunch.plan.layout import is_loopback


def endpoint_of(flags: Flags) -> tuple[str, int]:
    """Where rank 0's store is. As torch has it, --rdzv-endpoint wins over --master-addr and -port."""
    if not flags.rdzv_endpoint:
        return flags.master_addr, flags.master_port
    host, colon, port = flags.rdzv_endpoint.rpartition(":")
    if colon and port.isdecimal():
        return host.strip("[]"), int(port)
    return flags.rdzv_endpoint.strip("[]"), c10d.PORT if flags.rdzv_backend == "c10d" else flags.master_port


def by_hand_notices(flags: Flags) -> list[str]:
    """Notices on a job whose nodes are started by hand, before it waits for the others."""
    lines = [*c10d.notices(flags)] if c10d.meets(flags) else []
    host, _ = endpoint_of(flags)
    if is_loopback(host):
        flag = _place_flag(flags)
        told = "is reachable only from this machine; for nodes on other machines, pass node 0's address"
        lines.append(f"{flag} {host} {told}")
    return lines


def by_hand_of(flags: Flags, name: str, environ: Mapping[str, str]) -> ByHand:
    """The place of a launcher on the machine `name` among those of all nodes. Raises `UsageError`."""
    host, port = endpoint_of(flags)
    nodes = node_range(flags.nnodes)[1]
    _check_place(flags, host, port)
    if not c10d.meets(flags):
        if not 0 <= flags.node_rank < nodes:
            raise UsageError(
                f"--node-rank {flags.node_rank}: expected 0 to {nodes - 1}, with --nnodes {nodes}"
            )
        return ByHand(host, port, flags.node_rank, nodes, _wait_s(flags))
    _check_reach(flags, environ, host)
    arrival = c10d.arrival_of(flags, name, task_number(environ))
    return ByHand(host, port, 0, nodes, _wait_s(flags), arrival=arrival)


def waits_as_told(flags: Flags) -> bool:
    """Whether --rdzv-conf of a static rendezvous says nothing but how long several nodes are waited for."""
    return node_range(flags.nnodes)[1] > 1 and {*c10d.conf_of(flags)} <= {"timeout", "join_timeout"}


def _wait_s(flags: Flags) -> float:
    return c10d.wait_s(flags, ByHand._field_defaults["wait_s"])


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
    count = step_nodes(environ)
    if count > 1 and is_loopback(host):
        whose = "Flux job's" if "FLUX_JOB_NNODES" in environ else "Slurm step's"
        raise UsageError(
            f"{_place_flag(flags)} {host}: each of this {whose} {count} nodes would wait for the others "
            "at its own; pass the first node's name"
        )


def _place_flag(flags: Flags) -> str:
    """The flag that says where the ranks meet, or should."""
    unsaid = flags.rdzv_backend == "c10d" and "master_addr" not in flags.given
    return "--rdzv-endpoint" if flags.rdzv_endpoint or unsaid else "--master-addr"
