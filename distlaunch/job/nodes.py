"""The surroundings of a job file, and its nodes: listed hosts, a hostfile, an allocation, or this machine."""

import os.path
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from distlaunch.agent.frozen import Frozen
from distlaunch.agent.wire import HEARTBEATS
from distlaunch.errors import JobError, Problem
from distlaunch.job.document import Place
from distlaunch.job.keys import JOB, NODE, SSH, TIMEOUTS
from distlaunch.job.spec import AllocatedNode, Allocation, Env, EnvValue, Limits, NodeSpec
from distlaunch.job.text import path_in
from distlaunch.job.types import Checked, Field
from distlaunch.transports import launchers, load
from distlaunch.transports.transport import Local, SshOptions, Transport, Way
from distlaunch.wording import expand_ranges

MAX_SLOTS = 1024
"""Maximum slots of a host. If N in `host:N` is larger, or is 22 (ssh), it must be a misplaced port."""
REST = "rest"
"""Value of `spares` that stands for all other nodes of the allocation."""
UNKNOWN = "slurm"
"""The transport of a queued job, whose hosts are unknown."""


class HostEntry(Frozen):
    """One host of a hostfile; `slots` is the number of processes, None = not given."""

    host: str
    user: str | None
    slots: int | None


class Surroundings(Frozen):
    """The context in which a job file is read: directory, home, environment and hostfile entries.

    `name` is the default name of the job; None = the stem of the file. `file` is the file's resolved path; ""
    = piped. `allocation` is the caller's allocation; None for a job to be `submitted`. `reach` returns the
    transport for a host of the allocation; None = ssh. `sections` contains the keys of schedulers. With
    `in_image`, the nodes are containers with their own files and variables.
    """

    directory: str
    home: str
    environ: Mapping[str, str]
    hostfile: tuple[HostEntry, ...] | None = None
    name: str | None = None
    file: str = ""
    allocation: Allocation | None = None
    reach: Callable[[AllocatedNode], Transport | None] | None = None
    sections: Mapping[str, Field] = MappingProxyType({})
    submitted: bool = False
    in_image: bool = False

    def path(self, text: str) -> str:
        """Return an absolute path on this machine."""
        path = path_in(self.directory, text)
        return os.path.normpath(self.home + path[1:]) if path.startswith("~") else path

    def on_node(self, text: str) -> str:
        """Return a path on a node, with a leading ~ kept for the user's home on that node."""
        return path_in("" if self.in_image else self.directory, text)

    def interpreter(self, text: str | None) -> str | None:
        """Return a path on a node if `text` has a slash, else a name to be looked up in PATH."""
        return self.on_node(text) if text and "/" in text else text

    def variables(self, given: Mapping[str, str | None] | None) -> Env:
        """Return the workers' variables; None in `given` stands for the value in the caller's environment."""
        return {
            name: EnvValue(self.environ.get(name, ""), inherited=True) if value is None else EnvValue(value)
            for name, value in (given or {}).items()
        }


def host_error(host: str) -> str | None:
    """Return why a host name isn't safe on a command line, or None."""
    if host.startswith("-"):
        return "a host name can't begin with a dash"
    if not re.fullmatch(r"[A-Za-z0-9_.:%\-]+", host):
        return f'"{host}" is not a valid host name'
    return None


def _hosts_in(pattern: str) -> list[str]:
    """Expand a range of hosts, or a single name. Raises ValueError."""
    hosts = expand_ranges(pattern)
    if wrong := next(filter(None, map(host_error, hosts)), None):
        raise ValueError(wrong)
    return hosts


def split_user(text: str) -> tuple[str | None, str]:
    """Split user@host into (user, host)."""
    user, at, host = text.rpartition("@")
    return (user if at else None), host


def users_and_hosts(text: str, place: Place) -> list[tuple[str | None, str]]:
    """Return (user, host) of each host in an item of `nodes`. Raises ValueError."""
    user, pattern = split_user(text)
    if found := re.fullmatch(r"([^:]+):([0-9]+)", pattern):
        login = f", user: {user}" if user else ""
        host = found[1] if re.fullmatch(r"[\w.-]+", found[1]) else f'"{found[1]}"'
        record = f"{{host: {host}, port: {found[2]}{login}}}"
        raise ValueError(f"{text}: write {place.instead(text, record)}")
    return [(user, host) for host in _hosts_in(pattern)]


def parse_endpoint(text: str) -> tuple[str | None, int | None]:
    """Parse `host:port`, `[v6]:port`, `host` or `:port` into (host, port). Raises ValueError."""
    found = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]]*))(?::([0-9]{1,9}))?", text)
    if not found:
        raise ValueError(f'"{text}" is not an endpoint; write host:port, or [address]:port for IPv6')
    host, port = found[1] or found[2] or None, int(found[3]) if found[3] else None
    if host and (error := host_error(host)):
        raise ValueError(error)
    if port is not None and not 0 < port < 65536:
        free = "; for a free port, leave it out" if not port else ""
        raise ValueError(f"port {port} is not in the range 1 to 65535{free}")
    return host, port


def endpoint_of(checked: Checked) -> tuple[str | None, int | None]:
    """Return the host and port of the store on rank 0; None = not given. Raises ValueError."""
    endpoint = (checked.get("rendezvous") or {}).get("endpoint")
    if endpoint is None:
        return checked.get("master_addr"), checked.get("master_port")
    return parse_endpoint(endpoint)


def parse_hostfile(text: str, source: str) -> tuple[HostEntry, ...]:
    """Return the hosts of an Open MPI, DeepSpeed (`host slots=4`) or Horovod (`host:4`) hostfile, in order.

    The slots of a repeated host are added up, as in Open MPI. Raises `JobError` with all problems.
    """
    found: dict[str, HostEntry] = {}
    problems: list[Problem] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            for entry in host_entries(words):
                # A host without slots counts as one slot for each of its lines.
                first = found.get(entry.host)
                again = first and first._replace(slots=(first.slots or 1) + (entry.slots or 1))
                found[entry.host] = again or entry
        except ValueError as error:
            problems.append(Problem(source, number, line.index(words[0]) + 1, "", str(error)))
    if not found and not problems:
        problems.append(Place(source).problem("", "the hostfile lists no hosts"))
    if problems:
        raise JobError(problems)
    return tuple(found.values())


def host_entries(words: Sequence[str]) -> list[HostEntry]:
    """Return the hosts in a line of a hostfile. Raises ValueError."""
    user, name = split_user(words[0])
    v6 = re.fullmatch(r"\[(.*:.*:.*)\](?::(.*))?|(.*::.*|(?:\w+:){7}\w+)", name)
    name, horovod_slots = (v6[1] or v6[3], v6[2]) if v6 else name.partition(":")[::2]
    slots = dict(map(_option, words[1:])).get("slots")
    if slots is None and horovod_slots:
        slots = horovod_slots
        if slots == "22" or (slots.isdecimal() and int(slots) > MAX_SLOTS):
            whole, keys = words[0].rpartition(":")[0], f"host: {name}, port: {slots}"
            keys += f", user: {user}" if user else ""
            raise ValueError(
                f'"{whole}:{slots}" means {slots} slots; if that is right, write "{whole} slots={slots}" in '
                f"a hostfile; for an SSH port, use ssh_config or nodes: [{{{keys}}}]"
            )
    if slots is not None and not re.fullmatch("[1-9][0-9]{0,5}", slots):
        raise ValueError(f'slots: expected a number from 1 to 999999, got "{slots}"')
    return [HostEntry(host, user, int(slots) if slots else None) for host in _hosts_in(name)]


def _option(word: str) -> tuple[str, str]:
    key, equals, value = word.partition("=")
    key = {"max-slots": "max_slots", "cpu": "slots", "count": "slots"}.get(key, key)
    if not equals or key not in ("slots", "max_slots"):
        raise ValueError(f'unexpected "{word}"; write one host per line, as in "host slots=4" or "host:4"')
    return key, value


class Pool:
    """The nodes and spares of a job, determined by its checked keys and its surroundings."""

    def __init__(self, checked: Checked, around: Surroundings) -> None:
        self._checked, self._around = checked, around
        launcher = JOB.value(checked, "launcher")
        self._launcher = "auto" if launcher == "mpirun" else launcher
        queued = around.submitted and self._launcher in ("auto", "ssh")
        self._named = UNKNOWN if queued else str(self._launcher)  # used only if it names a transport
        self.ssh = self._ssh_options()

    def _ssh_options(self) -> SshOptions:
        ssh = self._checked.get("ssh", {})
        timeouts: Limits = TIMEOUTS.made(self._checked.get("timeouts", {}))
        return SshOptions(
            config=self._around.path(ssh["config"]) if "config" in ssh else None,
            persist_s=None if ssh.get("persist") is None else max(1, round(ssh["persist"])),
            connect_s=max(1, int(timeouts.connect_s / 2)),
            alive_s=max(1, round(timeouts.lease_s / HEARTBEATS)),
            **SSH.fields_of(ssh),
        )

    def nodes(self) -> tuple[NodeSpec, ...]:
        """Return the nodes of the job, in rank order."""
        if self._around.hostfile is not None:
            return tuple(map(self._from_hostfile, self._around.hostfile))
        given = self._checked.get("nodes")
        if isinstance(given, tuple):
            return self._listed("nodes", given)
        if allocation := self.allocation:
            return self._allocated(allocation.nodes[:given], "nodes")
        later = self._named in launchers() and load(self._named).allocated
        labels = [f"node{i}" for i in range(given or 1)]
        reach = [load(self._named).to(label, Way()) if later else Local() for label in labels]
        return tuple(self._node(label, each, {}, "nodes") for label, each in zip(labels, reach, strict=True))

    def spares(self) -> tuple[NodeSpec, ...]:
        """Return the standby nodes."""
        given = self._checked.get("spares", ())
        if given == REST:
            allocation, used = self.allocation, self._checked.get("nodes")
            return self._allocated(allocation.nodes[used:], "spares") if allocation else ()
        return self._listed("spares", given)

    @property
    def allocation(self) -> Allocation | None:
        """Return the caller's allocation if the job runs on its nodes."""
        numbered = self._around.hostfile is None and not isinstance(self._checked.get("nodes"), tuple)
        found = self._around.allocation
        given = isinstance(self._launcher, Mapping)
        fits = found and (given or self._launcher in ("auto", "ssh", found.scheduler))
        return found if numbered and fits else None

    def _listed(self, key: str, given: Sequence[Checked]) -> tuple[NodeSpec, ...]:
        return tuple(spec for i, node in enumerate(given) for spec in self._from_list(f"{key}[{i}]", node))

    def _from_list(self, path: str, node: Checked) -> Iterator[NodeSpec]:
        for user, host in users_and_hosts(node["host"], Place("")):
            reach = self._reach(host, node.get("user", user), node.get("port"))
            yield self._node(host, reach, node, path)

    def _from_hostfile(self, entry: HostEntry) -> NodeSpec:
        slots = {} if entry.slots is None else {"procs": entry.slots}
        return self._node(entry.host, self._reach(entry.host, entry.user, None), slots, "hostfile")

    def _allocated(self, nodes: Sequence[AllocatedNode], path: str) -> tuple[NodeSpec, ...]:
        gpus = JOB.value(self._checked, "gpus_per_node")
        return tuple(
            self._node(node.host, self._within(node), {}, path)._replace(
                gpus=gpus if isinstance(gpus, int) else node.gpus, cpu_procs=node.procs, address=node.address
            )
            for node in nodes
        )

    def _within(self, node: AllocatedNode) -> Transport:
        """Return the transport of an allocated node: its scheduler's, unless `launcher` overrides it."""
        if self._launcher == "ssh" or isinstance(self._launcher, Mapping):
            return self._reach(node.host, None, None)
        reach = self._around.reach
        return (reach and reach(node)) or load("ssh").to(node.host, Way(ssh=self.ssh))

    def _node(self, host: str, reach: Transport, record: Checked, path: str) -> NodeSpec:
        """Return a node with the settings of `record`, the checked map of a listed host."""
        gpus = record.get("gpus", JOB.value(self._checked, "gpus_per_node"))
        return NodeSpec(
            host,
            reach,
            gpus=gpus if isinstance(gpus, int) else None,
            procs=record.get("procs", self._checked.get("procs_per_node")),
            python=self._around.interpreter(record.get("python")),
            workdir=self._around.on_node(record["workdir"]) if "workdir" in record else None,
            env=self._around.variables(record.get("env")),
            path=path,
            **NODE.fields_of(record),
        )

    def _reach(self, host: str, user: str | None, port: int | None) -> Transport:
        """Return the transport to a host, according to `launcher`."""
        allocation = self._around.allocation
        groups = {node.host: node.group for node in allocation.nodes} if allocation else {}
        way = Way(user, port, self.ssh, allocation.job if allocation else "", groups.get(host))
        if isinstance(self._launcher, Mapping):
            words, shell = self._launcher["command"], bool(self._launcher.get("shell"))
            return load("command").to(host, way._replace(words=words, shell=shell))
        if self._named in launchers():
            return load(self._named).to(host, way)
        here = self._launcher == "auto" and host == "localhost" and not user and not port
        return load("local" if here else "ssh").to(host, way)
