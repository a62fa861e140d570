"""The keys and configurations with which a testbed's sshds and their users find each other.

The texts are pure functions of the testbed; `write` puts them and the keys into its folder.
"""

import re
from pathlib import Path

from .state import Host, Testbed
from .tools import TestbedError, attempt, run_together, tool

DEFAULT_PORT = 22

# ssh and sshd read these inside their quotes, each in its own way.
_UNQUOTABLE = set('"\\$%\n')

# From this release on, sshd shuts out an address that connects without logging in, as probes do.
_PENALISING = (9, 8)


def refuse_unquotable(folder: Path) -> None:
    """Raise TestbedError for a path that the configurations cannot name."""
    if found := _UNQUOTABLE & set(str(folder)):
        raise TestbedError(f"{str(folder)!r} holds {min(found)!r}: give --dir a path without it")


def sshd_config(testbed: Testbed, host: Host, extra: str = "") -> str:
    """Return the configuration of a host's sshd: keys only, its own files only."""
    folder = testbed.folder(host)
    return f"""\
ListenAddress {host.address}:{host.port}
HostKey "{folder / "host_key"}"
PidFile "{folder / "sshd.pid"}"
AuthorizedKeysFile "{testbed.dir / "id_ed25519.pub"}"
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UsePAM no
UseDNS no
PrintLastLog no
MaxStartups 100:30:200
LogLevel VERBOSE
Subsystem sftp internal-sftp
{extra}"""


def ssh_config(testbed: Testbed, user: str) -> str:
    """Return the configuration that makes `ssh host1` mean the testbed's host1, its key strictly checked."""
    # By their addresses too, where they listen on the default port.
    network = testbed.hosts[0].address.rpartition(".")[0]
    patterns = f"host* {network}.*" if testbed.mode == "netns" else "host*"
    places = [
        f"Host {host.name}\n    HostName {host.address}\n    Port {host.port}\n" for host in testbed.hosts
    ]
    return f"""\
{"".join(places)}Host {patterns}
    User {user}
    IdentityFile "{testbed.dir / "id_ed25519"}"
    IdentitiesOnly yes
    UserKnownHostsFile "{testbed.dir / "known_hosts"}"
    StrictHostKeyChecking yes
"""


def known_hosts(testbed: Testbed, public_keys: dict[str, str]) -> str:
    """Return the lines that know each host by name and address, from its public key."""
    return "".join(f"{_known_names(host)} {public_keys[host.name]}\n" for host in testbed.hosts)


def sshd_argv(testbed: Testbed, host: Host) -> list[str]:
    """Return the command of a host's sshd, which ends with the keeper that starts it."""
    folder = testbed.folder(host)
    sshd = [tool("sshd"), "-D", "-f", str(folder / "sshd_config"), "-E", str(folder / "sshd.log")]
    return [tool("setpriv"), "--pdeathsig", "KILL", "--", *sshd]


def write(testbed: Testbed, user: str) -> None:
    """Make the keys and write all configurations into the testbed's folder."""
    for host in testbed.hosts:
        testbed.folder(host).mkdir()
    keys = [testbed.dir / "id_ed25519", *(testbed.folder(host) / "host_key" for host in testbed.hosts)]
    run_together([_keygen_argv(key) for key in keys])
    public_keys = {
        host.name: (testbed.folder(host) / "host_key.pub").read_text().strip() for host in testbed.hosts
    }
    (testbed.dir / "known_hosts").write_text(known_hosts(testbed, public_keys))
    testbed.ssh_config.write_text(ssh_config(testbed, user))
    extra = "PerSourcePenalties no\n" if _sshd_version() >= _PENALISING else ""
    for host in testbed.hosts:
        (testbed.folder(host) / "sshd_config").write_text(sshd_config(testbed, host, extra))


def _keygen_argv(path: Path) -> list[str]:
    return [tool("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-C", "testbed", "-f", str(path)]


def _known_names(host: Host) -> str:
    names = [host.name, host.address]
    return ",".join(name if host.port == DEFAULT_PORT else f"[{name}]:{host.port}" for name in names)


def _sshd_version() -> tuple[int, int]:
    # Releases that do not know -V name their version in the complaint about it.
    found = re.search(r"OpenSSH_(\d+)\.(\d+)", attempt([tool("sshd"), "-V"]).stderr)
    return (int(found[1]), int(found[2])) if found else (0, 0)
