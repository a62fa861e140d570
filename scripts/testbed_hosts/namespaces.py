"""Hosts as network namespaces on a bridge: their addresses, cables, hostnames and /etc/hosts.

No namespace has a name and nothing is mounted outside of them: a host's processes alone keep it, so a
host whose processes are dead is gone, mounts included. `unshare` instead of `ip netns exec`, because the
latter hides /sys/fs/cgroup.
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
"""What bash reads at the start of each ssh session: empty on the hosts, since that of this machine's user may
do anything, and take a tenth of a second for it."""
_SHADOW = Path("/etc/shadow")


def why_not() -> str | None:
    """Return why there can be no namespace hosts here, or None where there can."""
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
    """Return the prefix that starts a command in namespaces of its own.

    Slave propagation keeps the host's mounts to itself, yet an umount outside happens inside too, so that
    a host never keeps a file system busy.
    """
    return [tool("unshare"), "--net", "--uts", "--mount", "--propagation", "slave", "--"]


def enter_argv(host: Host) -> list[str]:
    """Return the prefix that runs a command inside a host whose keeper lives."""
    assert host.keeper is not None
    return [tool("nsenter"), "--target", str(host.keeper.pid), "--net", "--uts", "--mount", "--"]


@contextlib.contextmanager
def claimed_subnet(tag: str) -> Iterator[IPv4Network]:
    """Choose a /24 that nothing here uses, and keep other testbeds off it until its bridge has an address.

    The claim is an abstract Unix socket's name: taken or free at once, and never left behind.
    """
    for subnet in _free_subnets(int(tag, 16)):
        with socket.socket(socket.AF_UNIX) as claim:
            # Looked at once more, for another `up` may have let go of its claim just before ours.
            if _is_bound(claim, f"\0testbed-{subnet}") and subnet in _free_subnets(int(tag, 16)):
                yield subnet
                return
    raise TestbedError("all of 10.213.0.0/16 is in use here: take a testbed down first")


def plan_hosts(count: int, tag: str, subnet: IPv4Network) -> tuple[Host, ...]:
    """Return the hosts host1 … hostN with the addresses .1 … .N."""
    numbers = range(1, count + 1)
    return tuple(Host(f"host{n}", str(subnet[n]), DEFAULT_PORT, interface=f"tb{tag}-{n}") for n in numbers)


def hosts_file(testbed: Testbed) -> str:
    """Return the /etc/hosts of all hosts: a host's own name means its own address there, as on a cluster."""
    local = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    names = [f"{host.address} {host.name}" for host in testbed.hosts]
    if testbed.schedulers.slurm_nodes:
        names += slurm_files.hosts_lines(testbed)
    return "\n".join([*local, *names, f"{testbed.gateway} controller"]) + "\n"


def unlocked_shadow(user: str) -> str | None:
    """Return a shadow file without any password for the hosts to use, or None where they need none.

    Without PAM, sshd refuses an account whose password starts with `!`, which is root's on many desktops,
    even with a key. `*` means no password either, but does not lock the account. See shadow(5).
    """
    lines = [line.split(":") for line in _SHADOW.read_text().splitlines()]
    if not any(name == user and password.startswith("!") for name, password, *_ in lines):
        return None
    return "".join(":".join([name, "*", *rest]) + "\n" for name, _, *rest in lines)


def mark(testbed: Testbed, host: Host) -> str:
    """Return what a host's loopback interface is labeled with, to know the namespace again."""
    return f"testbed {testbed.tag} {host.name}"


def is_marked(pid: int, label: str) -> bool:
    """Tell whether a process's network namespace carries this label.

    The kernel gives a dead namespace's inode number to the next one, so the number alone proves nothing.
    """
    shown = attempt([tool("nsenter"), f"--net=/proc/{pid}/ns/net", tool("ip"), "-j", "link", "show", "lo"])
    return shown.returncode == 0 and json.loads(shown.stdout)[0].get("ifalias") == label


def setup_argvs(testbed: Testbed, host: Host) -> list[list[str]]:
    """Return what the keeper runs inside the host before the sshd, in order."""
    ip, mount = tool("ip"), tool("mount")
    bound = [(testbed.dir / "hosts", "/etc/hosts"), (testbed.dir / "shadow", str(_SHADOW))]
    bound.append((slurm_files.folder(testbed), str(slurm_files.CONF_DIR)))
    bound.append((grid_engine_files.folder(testbed), str(grid_engine_files.CELL)))
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
    """Make the bridge, and a cable from it to each host; the keepers must live."""
    bridge = testbed.bridge
    # The bridge's hardware address is fixed, because by default it changes with the cables plugged in.
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
    """Remove the bridge, the cables and the firewall's rule, as far as they exist; TestbedError if not."""
    _forward_rule("-D", testbed)
    ours = _our_interfaces(testbed)
    if ours:
        # Forced past errors: the kernel removes a dead host's cable by itself, perhaps before this does.
        lines = "".join(f"link delete dev {name}\n" for name in ours)
        finished = attempt([tool("ip"), "-force", "-batch", "-"], lines)
        if left := _our_interfaces(testbed):
            raise TestbedError(f"cannot remove the interfaces {', '.join(left)}: {finished.stderr.strip()}")


def _forward_rule(action: str, testbed: Testbed) -> None:
    # Where bridged packets pass the firewall, Docker's policy to drop what is forwarded would part the
    # hosts. No check: without iptables nothing drops, and a rule that is not there needs no removal.
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
    # A route to more than a /24, a VPN's to all of 10.0.0.0/8 perhaps, does no harm: ours is more specific.
    addresses = json.loads(run([tool("ip"), "-j", "-4", "address", "show"]))
    routes = json.loads(run([tool("ip"), "-j", "-4", "route", "show"]))
    texts = [info["local"] for link in addresses for info in link.get("addr_info", ())]
    texts += [route["dst"] for route in routes if route["dst"] != "default"]
    networks = [ip_network(text) for text in texts]
    return [network for network in networks if isinstance(network, IPv4Network)]
