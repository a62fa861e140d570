"""Builds the machines of a `JobSpec`: hosts that are listed, those of an allocation, or this one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from distlaunch.agent.wire import HEARTBEATS
from distlaunch.job.allocation import AllocatedNode, Allocation
from distlaunch.job.fields import JOB, NODE, SSH, TIMEOUTS
from distlaunch.job.hosts import HostEntry
from distlaunch.job.reading import Checked, Reading
from distlaunch.job.spec import NodeSpec, Timeouts
from distlaunch.transport.command import Command
from distlaunch.transport.kinds import Transport
from distlaunch.transport.local import Local
from distlaunch.transport.slurm import Slurm
from distlaunch.transport.ssh import Ssh, SshOptions

REST = "rest"
"""As `spares` has it: those of the allocation that `nodes` leaves over."""
_STEPS: Mapping[str, type[Slurm]] = {"slurm": Slurm}
"""Launchers that are a scheduler's own, whose hosts may not be known yet: their transports."""


class Pool:
    """`made` makes the fields of a node that are made as the job's own are."""

    def __init__(self, reading: Reading, made: Callable[[Checked], Mapping[str, Any]]) -> None:
        self._reading, self._made, self._checked = reading, made, reading.checked
        launcher = JOB.value(self._checked, "launcher")
        self._launcher = "auto" if launcher == "mpirun" else launcher
        queued = reading.around.submitted and self._launcher in ("auto", "ssh")
        # Of a job that is to wait in a queue, whichever, no host is known.
        self._steps = Slurm if queued else _STEPS.get(str(self._launcher))
        self._hostfile = reading.around.hostfile
        self._ssh = _ssh_options(reading)

    def nodes(self) -> tuple[NodeSpec, ...]:
        """The job's nodes, in the order of their ranks."""
        if self._hostfile is not None:
            return tuple(map(self._from_hostfile, self._hostfile))
        given = self._checked.get("nodes")
        if isinstance(given, tuple):
            return self._listed("nodes", given)
        if allocation := self.allocation:
            wanted = allocation.nodes[: given or len(allocation.nodes)]
            return self._allocated(wanted, "nodes")
        labels = [f"node{i}" for i in range(given or 1)]
        unknown = self._steps  # known inside an allocation
        return tuple(
            self._node(each, unknown(each, "") if unknown else Local(), {}, "nodes") for each in labels
        )

    def spares(self) -> tuple[NodeSpec, ...]:
        """Those that stand in for a lost node."""
        given = self._checked.get("spares", ())
        if given == REST:
            allocation, used = self.allocation, self._checked.get("nodes")
            return self._allocated(allocation.nodes[used:], "spares") if allocation else ()
        return self._listed("spares", given)

    @property
    def allocation(self) -> Allocation | None:
        """That of the caller, if the job's nodes come from it."""
        numbered = self._hostfile is None and not isinstance(self._checked.get("nodes"), tuple)
        found = self._reading.around.allocation
        given = isinstance(self._launcher, Mapping)
        fits = found and (given or self._launcher in ("auto", "ssh", found.scheduler))
        return found if numbered and fits else None

    def _listed(self, key: str, given: Sequence[str | Checked]) -> tuple[NodeSpec, ...]:
        return tuple(spec for i, node in enumerate(given) for spec in self._from_list(f"{key}[{i}]", node))

    def _allocated(self, nodes: Sequence[AllocatedNode], path: str) -> tuple[NodeSpec, ...]:
        return tuple(self._from_allocation(node, path) for node in nodes)

    def _from_allocation(self, node: AllocatedNode, path: str) -> NodeSpec:
        spec = self._node(node.host, self._within(node), {}, path)
        told = JOB.value(self._checked, "gpus_per_node")
        gpus = told if isinstance(told, int) else node.gpus
        return spec._replace(gpus=gpus, cpu_procs=node.procs, address=node.address)

    def _within(self, node: AllocatedNode) -> Transport:
        """As its scheduler has it, unless the launcher is another."""
        if self._launcher == "ssh" or isinstance(self._launcher, Mapping):
            return self._reach(node.host, None, None)
        reach = self._reading.around.reach
        return (reach and reach(node)) or Ssh(node.host, None, None, self._ssh)

    def _from_hostfile(self, entry: HostEntry) -> NodeSpec:
        reach = self._reach(entry.host, entry.user, entry.port)
        slots = {} if entry.slots is None else {"procs": entry.slots}
        return self._node(entry.host, reach, slots, "hostfile")

    def _from_list(self, path: str, node: str | Checked) -> Iterator[NodeSpec]:
        record: Checked = {"host": node} if isinstance(node, str) else node
        for user, host in self._reading.hosts(path, node):
            reach = self._reach(host, record.get("user", user), record.get("port"))
            yield self._node(host, reach, record, path)

    def _node(self, host: str, reach: Transport, record: Checked, path: str) -> NodeSpec:
        gpus = record.get("gpus", JOB.value(self._checked, "gpus_per_node"))
        return NodeSpec(
            host,
            reach,
            gpus=gpus if isinstance(gpus, int) else None,
            procs=record.get("procs", self._checked.get("procs_per_node")),
            path=path,
            **self._made(record),
            **NODE.fields_of(record),
        )

    def _reach(self, host: str, user: str | None, port: int | None) -> Transport:
        if self._launcher == "local":
            return Local()
        if isinstance(self._launcher, Mapping):
            return Command(host, self._launcher["command"], bool(self._launcher.get("shell")))
        if steps := self._steps:
            allocation = self._reading.around.allocation
            groups = {node.host: node.group for node in allocation.nodes} if allocation else {}
            return steps(host, allocation.job if allocation else "", groups.get(host))
        if self._launcher == "auto" and host == "localhost" and not user and not port:
            return Local()
        return Ssh(host, user, port, self._ssh)


def _ssh_options(reading: Reading) -> SshOptions:
    ssh = reading.section("ssh")
    timeouts: Timeouts = TIMEOUTS.made(reading.section("timeouts"))
    return SshOptions(
        config=reading.around.path(ssh["config"]) if "config" in ssh else None,
        persist_s=None if ssh.get("persist") is None else max(1, round(ssh["persist"])),
        connect_s=max(1, int(timeouts.connect_s / 2)),
        alive_s=max(1, int(timeouts.lease_s / HEARTBEATS)),
        **SSH.fields_of(ssh),
    )
