"""Cuts a host off from the network, or reconnects it, with iptables rules inside the host.

Unlike a pulled cable, dropped packets cause no errors: neighbors still resolve the address, and connections
just stall, as with a dead switch or a lost route.
"""

from pathlib import Path
from typing import Literal

from .namespaces import enter_argv
from .processes import lives
from .state import Host, Testbed
from .tools import TestbedError, attempt, find, run, tool

Cut = Literal["both", "in"]

_CHAINS: dict[Cut | None, tuple[str, ...]] = {None: (), "in": ("INPUT",), "both": ("INPUT", "OUTPUT")}
_MARK = ("-m", "comment", "--comment", "testbed-cut", "-j", "DROP")


def cut(testbed: Testbed, host: Host, direction: Cut | None) -> None:
    """Drop all packets to and from the host, or only those to it, or with None, reconnect it.

    Loopback traffic continues. Raises TestbedError if the testbed has no namespaces, or the host's keeper is
    dead.
    """
    require_namespace(testbed, host)
    for chain in ("INPUT", "OUTPUT"):
        for argv in _firewalls(host):
            present = _has_rule(argv, chain)
            if present != (chain in _CHAINS[direction]):
                run([*argv, "-D" if present else "-I", chain, *_rule(chain)])


def cut_of(testbed: Testbed, host: Host) -> Cut | None:
    """Return how a running host is currently cut off."""
    if testbed.mode == "loopback" or find("iptables") is None:
        return None
    inside = [*enter_argv(host), tool("iptables"), "-w", "5"]
    if not _has_rule(inside, "INPUT"):
        return None
    return "both" if _has_rule(inside, "OUTPUT") else "in"


def require_namespace(testbed: Testbed, host: Host) -> None:
    """Raise TestbedError unless the host is a namespace with a running keeper."""
    if testbed.mode == "loopback":
        raise TestbedError("loopback hosts share this machine's network and cannot be cut off: needs root")
    if not lives(host.keeper):
        raise TestbedError(f"{host.name} is dead: take the testbed down and bring it up again")


def _firewalls(host: Host) -> list[list[str]]:
    # If the kernel supports IPv6, hosts automatically have link-local addresses.
    names = ["iptables", "ip6tables"] if Path("/proc/net/if_inet6").exists() else ["iptables"]
    return [[*enter_argv(host), tool(name), "-w", "5"] for name in names]


def _has_rule(argv: list[str], chain: str) -> bool:
    return attempt([*argv, "-C", chain, *_rule(chain)]).returncode == 0


def _rule(chain: str) -> list[str]:
    return ["!", "-i" if chain == "INPUT" else "-o", "lo", *_MARK]
