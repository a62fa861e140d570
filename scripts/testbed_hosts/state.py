"""The description of a testbed, and the file in its directory that stores it.

The file is written before each thing in it is created, so `down` finds everything even if `up` fails.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from .processes import ProcessId, lives
from .tools import TestbedError

Mode = Literal["netns", "loopback"]

_STATE = "state.json"
_UNFINISHED = "state.json.new"


@dataclass(frozen=True)
class Host:
    """One host. `interface` is this machine's end of its cable, `netns` the inode number of its namespace."""

    name: str
    address: str
    port: int
    interface: str | None = None
    keeper: ProcessId | None = None
    netns: int | None = None


@dataclass(frozen=True)
class Schedulers:
    """The schedulers of a testbed. `slurm_nodes` is the number of Slurm nodes; 0 = no Slurm.

    `slurm_accounts` adds slurmdbd.
    """

    slurm_nodes: int = 0
    slurm_accounts: bool = False
    grid_engine: bool = False

    def __bool__(self) -> bool:
        return bool(self.slurm_nodes or self.grid_engine)


@dataclass(frozen=True)
class Testbed:
    """A testbed.

    `tag` is the random part of its interface names, `maker` the `up` that is still creating it.
    """

    dir: Path
    mode: Mode
    tag: str
    maker: ProcessId | None
    hosts: tuple[Host, ...]
    gateway: str | None = None
    schedulers: Schedulers = Schedulers()

    @property
    def bridge(self) -> str | None:
        """The name of the bridge that connects the hosts; None on loopback."""
        return f"tb{self.tag}" if self.mode == "netns" else None

    @property
    def ssh_config(self) -> Path:
        """The configuration with which ssh reaches the hosts by name."""
        return self.dir / "ssh_config"

    def directory(self, host: Host) -> Path:
        """Return the directory for the files of one host."""
        return self.dir / host.name

    def host(self, name: str) -> Host:
        """Return the host with that name. Raises TestbedError if there is none."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise TestbedError(f"no host {name!r} in {self.dir}: it has {', '.join(h.name for h in self.hosts)}")


def with_keepers(testbed: Testbed, keepers: Sequence[tuple[ProcessId, int | None]]) -> Testbed:
    """Return the testbed with each host's keeper and network namespace filled in, in the hosts' order."""
    kept = [
        replace(host, keeper=keeper, netns=netns)
        for host, (keeper, netns) in zip(testbed.hosts, keepers, strict=True)
    ]
    return replace(testbed, hosts=tuple(kept))


def describe(testbed: Testbed) -> dict[str, Any]:
    """Return the data that `--json` prints, for programs that use the hosts.

    A host's `netns` is for `nsenter --net=PATH`, and its `pid` for `nsenter --target PID`.
    """
    return {
        "mode": testbed.mode,
        "dir": str(testbed.dir),
        "ssh_config": str(testbed.ssh_config),
        "bridge": testbed.bridge,
        "gateway": testbed.gateway,
        "schedulers": asdict(testbed.schedulers),
        "hosts": [_describe_host(host) for host in testbed.hosts],
    }


def _describe_host(host: Host) -> dict[str, Any]:
    pid = host.keeper and host.keeper.pid
    return {
        "name": host.name,
        "address": host.address,
        "port": host.port,
        "netns": f"/proc/{pid}/ns/net" if pid and host.netns else None,
        "interface": host.interface,
        "pid": pid,
    }


def claim(testbed: Testbed) -> None:
    """Create the testbed's directory with a first state. Raises TestbedError if the directory is in use.

    An existing directory must be empty, because `down` deletes it with its contents.
    """
    testbed.dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_unclaimed(testbed.dir):
        raise TestbedError(f"{testbed.dir} is not empty: give --dir a new or an empty directory")
    testbed.dir.chmod(0o700)
    try:
        # Unlike a rename, a link fails if another `up` was faster.
        os.link(_written(testbed), testbed.dir / _STATE)
    except FileExistsError:
        raise TestbedError(
            f"another `up` is at work in {testbed.dir}: give --dir another directory"
        ) from None
    (testbed.dir / _UNFINISHED).unlink()


def save(testbed: Testbed) -> None:
    """Replace the state on disk atomically."""
    _written(testbed).replace(testbed.dir / _STATE)


def load(directory: Path) -> Testbed | None:
    """Return the testbed in a directory, or None. Raises TestbedError if its state is unreadable."""
    try:
        data = json.loads((directory / _STATE).read_text())
        return Testbed(
            dir=directory,
            mode=data["mode"],
            tag=data["tag"],
            maker=_process(data["maker"]),
            hosts=tuple(_host(entry) for entry in data["hosts"]),
            gateway=data["gateway"],
            schedulers=Schedulers(**data["schedulers"]),
        )
    except FileNotFoundError:
        return None
    except PermissionError:
        raise TestbedError(f"{directory} belongs to another user: run this as its owner") from None
    except (ValueError, KeyError, TypeError) as error:
        raise TestbedError(f"{directory / _STATE} is not a testbed's state: {error}") from None


def existing(directory: Path) -> Testbed:
    """Return the testbed in a directory.

    Raises TestbedError if there is none, or `up` is still creating it.
    """
    testbed = load(directory)
    if testbed is None:
        raise TestbedError(f"no testbed in {directory}: make one with `up N --dir {directory}`")
    refuse_unfinished(testbed)
    return testbed


def refuse_unfinished(testbed: Testbed) -> None:
    """Raise TestbedError if another process is still creating this testbed."""
    if testbed.maker and testbed.maker.pid != os.getpid() and lives(testbed.maker):
        raise TestbedError(f"`up`, process {testbed.maker.pid}, is still at work in {testbed.dir}")


def is_unclaimed(directory: Path) -> bool:
    """Return whether a directory has no files, except those of an `up` that died before its first state."""
    return all(entry.name == _UNFINISHED for entry in directory.iterdir())


def _host(entry: dict[str, Any]) -> Host:
    return Host(**entry | {"keeper": _process(entry["keeper"])})


def _process(entry: dict[str, Any] | None) -> ProcessId | None:
    return ProcessId(**entry) if entry else None


def _written(testbed: Testbed) -> Path:
    path = testbed.dir / _UNFINISHED
    path.write_text(json.dumps(asdict(testbed) | {"dir": str(testbed.dir)}, indent=2) + "\n")
    return path
