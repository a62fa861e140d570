"""Hosts that are network namespaces on a bridge: addresses, cables, hostnames and /etc/hosts.

The namespaces have no names, and nothing is mounted outside of them. A host exists only as long as its
processes: when they are dead, it is gone with its mounts. Uses `unshare` instead of `ip netns exec`, which
hides /sys/fs/cgroup.
"""

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Network, ip_network
from pathlib import Path

from . import grid_engine_files, slurm_files
from .ssh_files import DEFAULT_PORT
from .state import Host, Testbed
from .tools import TestbedError, attempt, find, run, tool

MOST_HOSTS = 250
GATEWAY = 254

_TOOLS = ("hostname", "ip", "mount", "nsenter", "unshare")
_BRIDGED_TRAFFIC_IS_FILTERED = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
RC_FILE = Path("~/.bashrc").expanduser()
"""The file that bash reads at the start of each ssh session.

It is empty on the hosts, because the user's own may do anything, and may take a tenth of a second.
"""
_SHADOW = Path("/etc/shadow")


def why_not() -> str | None:
    """Return why hosts can't be namespaces on this machine, or None if they can."""
    if os.geteuid():
        return "only root can make network namespaces"
    try:
        for name in _TOOLS:
            tool(name)
    except TestbedError as missing:
        return str(missing)
    tried = attempt([*unshare_argv(), "true"])
    return f"no network namespaces here ({tried.stderr.strip()})" if tried.returncode else None


def unshare_argv() -> list[str]:
    """Return the prefix that starts a command in new namespaces.

    With slave propagation, mounts of the host stay inside, but an umount outside also applies inside. A host
    therefore never keeps a file system busy.
    """
    return [tool("unshare"), "--net", "--uts", "--mount", "--propagation", "slave", "--"]


def enter_argv(host: Host) -> list[str]:
    """Return the prefix that runs a command inside a host with a running keeper."""
    assert host.keeper is not None
    return [tool("nsenter"), "--target", str(host.keeper.pid), "--net", "--uts", "--mount", "--"]


@contextlib.contextmanager
def claimed_subnet(tag: str) -> Iterator[IPv4Network]:
    """Choose an unused /24, and reserve it until the bridge has an address.

    The claim is the name of an abstract Unix socket, which is acquired atomically and never left behind.
    """
    for subnet in _free_subnets(int(tag, 16)):
        with socket.socket(socket.AF_UNIX) as claim:
            # Checked again, because another `up` may have released its claim just before this one.
            if _is_bound(claim, f"\0testbed-{subnet}") and subnet in _free_subnets(int(tag, 16)):
                yield subnet
                return
    raise TestbedError("all of 10.213.0.0/16 is in use here: take a testbed down first")


def plan_hosts(count: int, tag: str, subnet: IPv4Network) -> tuple[Host, ...]:
    """Return the hosts host1 … hostN, with the addresses .1 … .N."""
    numbers = range(1, count + 1)
    return tuple(Host(f"host{n}", str(subnet[n]), DEFAULT_PORT, interface=f"tb{tag}-{n}") for n in numbers)


def hosts_file(testbed: Testbed) -> str:
    """Return the /etc/hosts of all hosts. As on a cluster, a host's own name resolves to its own address."""
    local = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    names = [f"{host.address} {host.name}" for host in testbed.hosts]
    if testbed.schedulers.slurm_nodes:
        names += slurm_files.hosts_lines(testbed)
    return "\n".join([*local, *names, f"{testbed.gateway} controller"]) + "\n"


def unlocked_shadow(user: str) -> str | None:
    """Return a shadow file without passwords for the hosts, or None if they don't need one.

    Without PAM, sshd refuses an account whose password starts with `!`, even with a key. On many desktops,
    root is such an account. `*` also means no password, but doesn't lock the account. See shadow(5).
    """
    lines = [line.split(":") for line in _SHADOW.read_text().splitlines()]
    if not any(name == user and password.startswith("!") for name, password, *_ in lines):
        return None
    return "".join(":".join([name, "*", *rest]) + "\n" for name, _, *rest in lines)


def mark(testbed: Testbed, host: Host) -> str:
    """Return the label of a host's loopback interface, which identifies the namespace."""
    return f"testbed {testbed.tag} {host.name}"


def is_marked(pid: int, label: str) -> bool:
    """Return whether the network namespace of a process has this label.

    The kernel reuses inode numbers of namespaces, so the number alone isn't enough.
    """
    shown = attempt([tool("nsenter"), f"--net=/proc/{pid}/ns/net", tool("ip"), "-j", "link", "show", "lo"])
    return shown.returncode == 0 and json.loads(shown.stdout)[0].get("ifalias") == label


def setup_argvs(testbed: Testbed, host: Host) -> list[list[str]]:
    """Return the commands that the keeper runs inside the host before the sshd, in order."""
    ip, mount = tool("ip"), tool("mount")
    bound = [(testbed.dir / "hosts", "/etc/hosts"), (testbed.dir / "shadow", str(_SHADOW))]
    bound.append((slurm_files.directory(testbed), str(slurm_files.CONF_DIR)))
    bound.append((grid_engine_files.directory(testbed), str(grid_engine_files.CELL)))
    bound.append((testbed.dir / RC_FILE.name, str(RC_FILE)))
    return [
        [tool("hostname"), host.name],
        *([mount, "--bind", str(source), target] for source, target in bound if source.exists()),
        [ip, "link", "set", "dev", "lo", "alias", mark(testbed, host)],
        [ip, "link", "set", "dev", "lo", "up"],
        [ip, "address", "add", f"{host.address}/24", "brd", "+", "dev", "eth0"],
        [ip, "link", "set", "dev", "eth0", "up"],
    ]


def make_links(testbed: Testbed) -> None:
    """Create the bridge, and a cable from it to each host. The keepers must be running."""
    bridge = testbed.bridge
    # The bridge's hardware address is fixed, because by default it changes with the connected cables.
    octets = ":".join(testbed.tag[i : i + 2] for i in (0, 2, 4))
    lines = [
        f"link add {bridge} address 02:00:{octets}:fe type bridge",
        f"address add {testbed.gateway}/24 brd + dev {bridge}",
        f"link set dev {bridge} up",
    ]
    for host in testbed.hosts:
        assert host.keeper is not None
        lines += [
            f"link add {host.interface} type veth peer name eth0 netns {host.keeper.pid}",
            f"link set dev {host.interface} master {bridge} up",
        ]
    run([tool("ip"), "-batch", "-"], "\n".join(lines) + "\n")
    if _BRIDGED_TRAFFIC_IS_FILTERED.exists() and _BRIDGED_TRAFFIC_IS_FILTERED.read_text().strip() != "0":
        _forward_rule("-I", testbed)


def remove_links(testbed: Testbed) -> None:
    """Remove the bridge, the cables and the firewall rule, if they exist. Raises TestbedError on failure."""
    _forward_rule("-D", testbed)
    ours = _our_interfaces(testbed)
    if ours:
        # Continue after errors: the kernel also removes the cables of dead hosts, and may be faster.
        lines = "".join(f"link delete dev {name}\n" for name in ours)
        finished = attempt([tool("ip"), "-force", "-batch", "-"], lines)
        if left := _our_interfaces(testbed):
            raise TestbedError(f"cannot remove the interfaces {', '.join(left)}: {finished.stderr.strip()}")


def _forward_rule(action: str, testbed: Testbed) -> None:
    # If bridged packets pass the firewall, Docker's policy of dropping forwarded packets would separate the
    # hosts. Errors are ignored: without iptables nothing is dropped, and the rule may not exist.
    iptables = find("iptables")
    if iptables and testbed.bridge:
        bridge = testbed.bridge
        attempt([iptables, "-w", "5", action, "FORWARD", "-i", bridge, "-o", bridge, "-j", "ACCEPT"])


def _our_interfaces(testbed: Testbed) -> list[str]:
    ours: Sequence[str | None] = [testbed.bridge, *(host.interface for host in testbed.hosts)]
    links = json.loads(run([tool("ip"), "-j", "link", "show"]))
    return [link["ifname"] for link in links if link["ifname"] in ours]


def _free_subnets(first: int) -> list[IPv4Network]:
    used = _networks_in_use()
    subnets = [IPv4Network(f"10.213.{(first + step) % 256}.0/24") for step in range(256)]
    return [subnet for subnet in subnets if not any(network.subnet_of(subnet) for network in used)]


def _is_bound(claim: socket.socket, name: str) -> bool:
    try:
        claim.bind(name)
    except OSError:
        return False
    return True


def _networks_in_use() -> list[IPv4Network]:
    # A route to a larger network, such as a VPN's to 10.0.0.0/8, does no harm, because a /24 is more
    # specific.
    addresses = json.loads(run([tool("ip"), "-j", "-4", "address", "show"]))
    routes = json.loads(run([tool("ip"), "-j", "-4", "route", "show"]))
    texts = [info["local"] for link in addresses for info in link.get("addr_info", ())]
    texts += [route["dst"] for route in routes if route["dst"] != "default"]
    networks = [ip_network(text) for text in texts]
    return [network for network in networks if isinstance(network, IPv4Network)]
