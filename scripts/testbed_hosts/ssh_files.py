"""The keys and configurations of a testbed's sshds and of their clients.

The texts are pure functions of the testbed. `write` saves them and the keys in its directory.
"""

import re
from pathlib import Path

from .state import Host, Testbed
from .tools import TestbedError, attempt, run_together, tool

DEFAULT_PORT = 22

# ssh and sshd interpret these inside quotes, each in a different way.
_UNQUOTABLE = set('"\\$%\n')

# From this release on, sshd blocks addresses that connect without logging in, as probes do.
_PENALISING = (9, 8)


def refuse_unquotable(directory: Path) -> None:
    """Raise TestbedError for a path that the configurations can't contain."""
    if found := _UNQUOTABLE & set(str(directory)):
        raise TestbedError(f"{str(directory)!r} holds {min(found)!r}: give --dir a path without it")


def sshd_config(testbed: Testbed, host: Host, extra: str = "") -> str:
    """Return the configuration of a host's sshd, which allows only keys and uses only its own files.

    The default key exchange of OpenSSH 9.0 to 9.8, sntrup761, takes 0.1 s of CPU time for each login. Newer
    defaults are about as fast as curve25519.
    """
    directory = testbed.directory(host)
    return f"""\
ListenAddress {host.address}:{host.port}
KexAlgorithms curve25519-sha256
HostKey "{directory / "host_key"}"
PidFile "{directory / "sshd.pid"}"
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
    """Return the configuration with which `ssh host1` reaches the testbed's host1, with strict key checks."""
    # Also by address, if they listen on the default port.
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
    """Return the known_hosts lines for each host's name and address."""
    return "".join(f"{_known_names(host)} {public_keys[host.name]}\n" for host in testbed.hosts)


def sshd_argv(testbed: Testbed, host: Host) -> list[str]:
    """Return the command for a host's sshd, which exits with the keeper that starts it."""
    directory = testbed.directory(host)
    sshd = [tool("sshd"), "-D", "-f", str(directory / "sshd_config"), "-E", str(directory / "sshd.log")]
    return [tool("setpriv"), "--pdeathsig", "KILL", "--", *sshd]


def write(testbed: Testbed, user: str) -> None:
    """Create the keys, and write all configurations to the testbed's directory."""
    for host in testbed.hosts:
        testbed.directory(host).mkdir()
    keys = [testbed.dir / "id_ed25519", *(testbed.directory(host) / "host_key" for host in testbed.hosts)]
    run_together([_keygen_argv(key) for key in keys])
    public_keys = {
        host.name: (testbed.directory(host) / "host_key.pub").read_text().strip() for host in testbed.hosts
    }
    (testbed.dir / "known_hosts").write_text(known_hosts(testbed, public_keys))
    testbed.ssh_config.write_text(ssh_config(testbed, user))
    extra = "PerSourcePenalties no\n" if _sshd_version() >= _PENALISING else ""
    for host in testbed.hosts:
        (testbed.directory(host) / "sshd_config").write_text(sshd_config(testbed, host, extra))


def _keygen_argv(path: Path) -> list[str]:
    return [tool("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-C", "testbed", "-f", str(path)]


def _known_names(host: Host) -> str:
    names = [host.name, host.address]
    return ",".join(name if host.port == DEFAULT_PORT else f"[{name}]:{host.port}" for name in names)


def _sshd_version() -> tuple[int, int]:
    # Releases without -V print their version in the error message.
    found = re.search(r"OpenSSH_(\d+)\.(\d+)", attempt([tool("sshd"), "-V"]).stderr)
    return (int(found[1]), int(found[2])) if found else (0, 0)
