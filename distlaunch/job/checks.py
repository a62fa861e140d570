"""Checks for mistakes that involve several keys, or the resulting job.

A mistake is a (path, explanation) pair.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import starmap
from typing import get_args

from distlaunch.agent.frozen import Frozen
from distlaunch.contract import RESERVED
from distlaunch.job.document import Place, nearest, program_keys, setting
from distlaunch.job.keys import JOB, RENDEZVOUS
from distlaunch.job.nodes import REST, Surroundings, endpoint_of, users_and_hosts
from distlaunch.job.spec import JobSpec
from distlaunch.job.text import IDS, instead_of, is_loopback, placeholders_in
from distlaunch.job.types import Checked
from distlaunch.transports import launchers, load
from distlaunch.transports.container import BY_SRUN, Runtime
from distlaunch.transports.slurm import SlurmStep
from distlaunch.transports.ssh import Ssh
from distlaunch.transports.transport import HOST
from distlaunch.wording import counted, listed

Mistakes = Iterator[tuple[str, str]]
_NOT_WITH_MPIRUN = (
    *("numa_binding", "cpu_binding", "spares", "min_nodes", "container"),
    *("virtual_local_rank", "success", "sync", "collect", "role", "on_stall"),
)
_OF_EXEC = ("timeouts.join", "timeouts.stall", "rendezvous.id")
"""Keys for which `distlaunch exec`, which mpirun runs, has its own values."""
_NOT_WITH_ETCD = ("master_addr", "master_port", "numa_binding", "cpu_binding", "success")


class Reading(Frozen):
    """A job file being read: its keys (None = refused), the places of all paths, and the refused paths."""

    checked: Checked
    places: Mapping[str, Place]
    refused: frozenset[str]
    around: Surroundings

    def section(self, key: str) -> Checked:
        """Return the keys of a section, or an empty map if it is missing or refused."""
        return self.checked.get(key) or {}

    def levels(self) -> Iterator[tuple[str, Checked]]:
        """Yield the path prefix and keys of the job and of every listed host."""
        yield "", self.checked
        yield from ((f"{path}.", node) for path, node in self.listed())

    def listed(self) -> Iterator[tuple[str, Checked]]:
        """Yield the path and keys of every host listed in `nodes` and `spares`."""
        for key in ("nodes", "spares"):
            given = self.checked.get(key)
            for i, node in enumerate(given if isinstance(given, tuple) else ()):
                if node is not None:
                    yield f"{key}[{i}]", node


# Checks of keys


def _program(reading: Reading) -> Mistakes:
    given = [key for key in ("script", "module", "command") if key in reading.checked]
    misspelled = any(nearest(key, ("script", "module", "command")) for key in reading.refused)
    scripts = [node.get("script") for _, node in reading.listed()]
    of_nodes = isinstance(reading.checked.get("nodes"), tuple) and all(scripts)
    if len(given) != 1 and (given or not (misspelled or of_nodes)):
        got = " and ".join(given) or "none"
        typed = [bool(reading.places[key].typed) for key in given]
        old = given[typed.index(False)] if {*typed} == {True, False} else ""
        hint = f"; to override {old}, add --set {old}=null" if old else ""
        yield "".join(given[-1:]), f"set one of script, module or command; got {got}{hint}"


def _script(reading: Reading) -> Mistakes:
    """Refuse a `script` that is a whole command line, and suggest the keys to write instead."""
    text = reading.checked.get("script") or ""
    keys = program_keys(text)
    if re.match(r"(?:\S*/)?(?:torchrun|python[0-9.]*\s+-m\s+torch\.distributed\.(?:run|launch))\s", text):
        import shlex  # needed only for mistakes

        made = f"`distlaunch import torchrun {shlex.quote(text)}`"
        yield "script", f"this is a torchrun command, not a script: {made} converts it to a job file"
    elif keys and reading.places["script"].typed:
        given = keys if "script" in keys else {"script": "null", **keys}
        yield "script", f"write {' '.join(starmap(setting, given.items()))}"
    elif keys:
        yield "script", f"write {' and '.join(f'{key}: {value}' for key, value in keys.items())}"


def _exclusive(reading: Reading) -> Mistakes:
    if "nodes" in reading.checked and "hostfile" in reading.checked:
        yield "hostfile", "set nodes or hostfile, not both (--set KEY=null removes one from the job)"
    if reading.checked.get("cpu_binding") and reading.checked.get("numa_binding"):
        yield "cpu_binding", "set numa_binding or cpu_binding, not both"


def _rendezvous(reading: Reading) -> Mistakes:
    """Check the endpoint, and refuse settings that only another backend uses."""
    host = port = None
    try:
        host, port = endpoint_of(reading.checked)
    except ValueError as error:
        yield "rendezvous.endpoint", str(error)
    rendezvous = reading.section("rendezvous")
    backend, conf = RENDEZVOUS.value(rendezvous, "backend"), rendezvous.get("conf") or {}
    if backend == "etcd-v2":
        if not (host and port and "endpoint" in rendezvous):
            path = "rendezvous.endpoint" if "endpoint" in rendezvous else "rendezvous.backend"
            yield path, "etcd-v2 needs the host:port of your etcd server in rendezvous.endpoint"
        yield from _with_etcd(reading, conf)
    elif backend == "none" and reading.section("timeouts").get("join"):
        yield "timeouts.join", "has no effect with rendezvous: none; remove it"
    elif conf and backend:
        limit = "" if backend == "none" else " (timeouts.join limits the wait)"
        yield "rendezvous.conf", f"has an effect only with rendezvous.backend: etcd-v2; remove it{limit}"


def _with_etcd(reading: Reading, conf: Checked) -> Mistakes:
    for key in _in_use(reading, _NOT_WITH_ETCD):
        yield key, f"with etcd-v2, torch's own agents control this: remove {key}"
    for name, value in conf.items():
        if not value or "," in value:
            yield f"rendezvous.conf.{name}", "expected a non-empty value without commas"
    yield from _unfilled(reading, "torch's own agents choose {%s} (etcd-v2)")


def _in_use(reading: Reading, keys: Sequence[str]) -> Iterator[str]:
    """Yield the keys that are set to something other than their default."""
    for key in keys:
        value = reading.checked.get(key)
        if value and value != JOB.default(key) and (key != "sync" or is_synced(reading)):
            yield key


def _unfilled(reading: Reading, why: str) -> Mistakes:
    """Report placeholders that distlaunch can't fill in. `why` has %s for the placeholder."""
    for path, word in (each for level in reading.levels() for each in placed_in(*level)):
        if word not in IDS:
            yield path, f"{why % word}: {instead_of(word)}"


def placed_in(prefix: str, given: Checked) -> Mistakes:
    """Yield the placeholders in the arguments and variables of a job or node, with their paths."""
    lists = ((key, enumerate(given.get(key) or ())) for key in ("command", "args"))
    texts = [(f"{prefix}{key}[{i}]", word) for key, words in lists for i, word in words]
    texts += [(f"{prefix}env.{name}", text) for name, text in (given.get("env") or {}).items()]
    for path, text in texts:
        yield from ((path, word) for word in placeholders_in([text or ""]))


def _stall(reading: Reading) -> Mistakes:
    on_stall, timeouts = reading.checked.get("on_stall"), reading.section("timeouts")
    never = "stall" in timeouts and timeouts["stall"] is None and "timeouts.stall" not in reading.refused
    if never and on_stall in ("restart", "stop"):
        yield "on_stall", f"{on_stall} has no effect because timeouts.stall is none; remove one of them"


def _hosts(reading: Reading) -> Mistakes:
    for path, node in reading.listed():
        try:
            if node.get("host"):
                users_and_hosts(node["host"], reading.places[path])
        except ValueError as error:
            yield path, str(error)


def _variables(reading: Reading) -> Mistakes:
    """Refuse variables that distlaunch sets, and null for variables that the caller's environment lacks."""
    around = reading.around
    by_torch = reading.section("rendezvous").get("backend") == "etcd-v2"
    own_gpu = reading.checked.get("virtual_local_rank") and not by_torch
    for path, keys in reading.levels():
        for name, value in (keys.get("env") or {}).items():
            if name in RESERVED:
                own = f", or set {name.lower()} instead" if name.lower() in JOB.fields else ""
                yield f"{path}env.{name}", f"distlaunch sets {name} for each worker; remove it{own}"
            elif name == "CUDA_VISIBLE_DEVICES" and own_gpu:
                what = "virtual_local_rank sets it for each worker: remove one of them"
                yield f"{path}env.{name}", f"{what}; to choose GPUs, set the variable on the node instead"
            elif value is None and name not in around.environ and not around.in_image:
                close = nearest(name, around.environ, 0.8)
                hint = f"did you mean {close}? Otherwise, " if close else ""
                hint += "export it, or write a value"
                if around.allocation and around.allocation.scheduler != "kubernetes":
                    key = around.allocation.scheduler.replace("-", "_")
                    hint += "; a batch job has only the variables that its scheduler passes on: with "
                    hint += f"`distlaunch submit`, add the scheduler's option for {name} to {key}.extra"
                yield f"{path}env.{name}", f"{name} is null, but it is not set in your environment; {hint}"


def is_synced(reading: Reading) -> bool:
    """Return whether the job copies its code to the nodes."""
    return "sync" in reading.checked and bool(reading.section("sync").get("tree", True))


def _files(reading: Reading) -> Mistakes:
    for key in ("files", "setup"):
        if key in reading.checked and not is_synced(reading):
            mpirun = reading.checked.get("launcher") == "mpirun" or "mpirun" in reading.checked
            advice = "mpirun jobs can't copy it, so" if mpirun else "set sync: true (without --no-sync), or"
            yield key, f"it needs the code on the nodes: {advice} leave this key out (--set {key}=null)"
    setup = reading.checked.get("setup")
    if isinstance(setup, dict) and ("from" in setup) == bool({"run", "key"} & {*setup}):
        yield "setup", "set either run, with or without key, or from: controller"
    elif isinstance(setup, dict) and "key" in setup and "run" not in setup:
        yield "setup.key", "it needs run: the command that uses these files"


OF_KEYS = (_program, _script, _exclusive, _rendezvous, _stall, _hosts, _variables, _files)
"""Checks of keys, before the job is built."""


# Checks of the job


def _repeated(_: Reading, spec: JobSpec) -> Mistakes:
    """Refuse a host that occurs twice in nodes and spares."""
    seen: dict[str, bool] = {}
    for node in spec.pool:
        host, spare = node.label, node.path.startswith("spares")
        if host in seen and spare and not seen[host]:
            yield node.path, f"{host} is in both nodes and spares; remove it from one of them"
        elif host in seen:
            port = "for another SSH port, give the host another name in ssh_config"
            simulate = f"to simulate {len(spec.nodes)} nodes on this machine, use nodes: {len(spec.nodes)}; "
            more = f"{simulate if node.local else ''}to run more workers on it, raise its procs"
            more = port if getattr(node.reach, "port", None) else more
            hint = "remove one of them" if spare else more
            yield node.path, f"{host} is listed twice; {hint}"
        seen.setdefault(host, spare)


def _master(reading: Reading, spec: JobSpec) -> Mistakes:
    others = {name: node.label for node in spec.nodes[1:] for name in (node.label, node.address) if name}
    first = {spec.nodes[0].label, spec.nodes[0].address} if spec.nodes else set()
    if spec.rendezvous.host in others.keys() - first:
        path = "rendezvous.endpoint" if "rendezvous.endpoint" in reading.places else "master_addr"
        host, on = spec.nodes[0].label, spec.rendezvous.host
        where = f"rank 0 runs on the first node, {host}, but the endpoint is on {on}"
        yield path, f"{where}; list {others[on]} first, or remove {path}"


def _loopback(_: Reading, spec: JobSpec) -> Mistakes:
    """Refuse nodes that could become the first node, but whose address the others can't reach."""
    for index, node in enumerate(spec.pool[1:] if spec.elastic and not spec.one_machine else (), 1):
        if is_loopback(node.address or node.label):
            what = f"a restart can make {node.label} the first node, but the others can't reach that address"
            yield node.path, f"{what}; set {spec.address_path(index)} to one that they can reach"


def _launcher(reading: Reading, spec: JobSpec) -> Mistakes:
    """Check that the launcher can reach the nodes, which are given as a list of hosts or as a number."""
    launcher, given = JOB.value(reading.checked, "launcher"), reading.checked.get("nodes")
    allocation, submitted = spec.allocation, reading.around.submitted
    numbered = not isinstance(given, tuple) and not reading.around.hostfile
    nameless = numbered and not (allocation or submitted)
    if launcher in launchers() and load(launcher).needs_names and nameless:
        yield "launcher", f"{launcher} needs host names: {_names_hint(spec)}"
    if launcher == "kubernetes" and not submitted and not numbered:
        key = "nodes" if "nodes" in reading.checked else "hostfile"
        hint = 'to list pods, write launcher: {command: [kubectl, exec, -i, "{host}", --]}'
        yield key, f"kubernetes.selector selects the pods: remove {key}; {hint}"
    elif launcher == "kubernetes" and not submitted and not reading.section("kubernetes").get("selector"):
        what = "this launcher uses running pods: set kubernetes.selector to their label, such as app=train"
        yield "launcher", f"{what}; to create pods, use `distlaunch export kubernetes`"
    if isinstance(launcher, Mapping):
        missing = _names_hint(spec) if nameless or not spec.pool else ""
        yield from _command(reading, launcher, missing, len(spec.pool))
    if allocation and given and given > len(allocation.nodes):
        pods = launcher == "kubernetes"
        has = counted(len(allocation.nodes), "running pod" if pods else "node")
        hint = "" if pods else f"; to simulate {given} nodes on this machine, use --set launcher=local"
        yield "nodes", f"the job requests {given} nodes, but {allocation.name} has {has}{hint}"


def _names_hint(spec: JobSpec) -> str:
    submit = "a scheduler assigns them to a submitted job (`distlaunch submit`); otherwise, "
    return f"{submit if spec.sections else ''}list the hosts in nodes"


def _command(reading: Reading, launcher: Checked, missing: str, hosts: int) -> Mistakes:
    """Check launcher.command, which needs host names and ignores ssh settings.

    `missing` is the advice if there are no names; otherwise, `hosts` is their number.
    """
    if missing:
        yield "launcher", f"launcher.command needs host names: {missing}"
    elif hosts > 1 and not any(HOST in word for word in launcher["command"]):
        yield "launcher.command", f"{HOST} is missing; without it, the command always reaches the same node"
    for path, node in reading.listed():
        login = [key for key in ("user", "port") if key in node] or ["user"] * ("@" in node.get("host", ""))
        for key in login:
            text = f"{key} has no effect with launcher.command; remove it, or write it into the command"
            yield f"{path}.{key}" if key in node else path, text


def _mpi(reading: Reading, spec: JobSpec) -> Mistakes:
    """Refuse settings that mpirun can't honor, and the mpi backend without mpirun."""
    if spec.backend == "mpi" and not spec.mpirun.argv:
        yield "backend", "mpi requires MPI to start the ranks: set launcher: mpirun, or another backend"
    if not spec.mpirun.argv:
        return
    if spec.rendezvous.etcd:
        key = "mpirun" if "mpirun" in reading.checked else "launcher"
        yield key, "mpirun and torch's own agents (etcd-v2) can't both start the ranks: remove one of them"
    for key in (*_in_use(reading, _NOT_WITH_MPIRUN), *(key for key in _OF_EXEC if key in reading.places)):
        yield key, "can't be combined with mpirun, which places and starts the ranks; remove one of them"
    for path, node in reading.listed():
        for key in {*node} & {"python", "workdir", "env", "args", "script", "role"}:
            advice = f"remove {key} here, or move it to the top level"
            yield f"{path}.{key}", f"mpirun starts the same command everywhere: {advice}"
    ways = ((each.path, each.reach) for each in spec.nodes[1:])  # mpirun runs on the first node
    for path in dict.fromkeys(path for path, way in ways if isinstance(way, Ssh) and (way.user or way.port)):
        yield path, "mpirun ignores a node's user and port: set them in ssh_config on the first node instead"
    program = spec.program
    for key, word in (("python", program.python), (program.kind, program.words[0])):
        if (word or "").startswith("~"):
            yield key, "mpirun doesn't expand ~: write the full path"
    yield from _unfilled(reading, "mpirun chooses {%s}")


def _stdin(reading: Reading, spec: JobSpec) -> Mistakes:
    elsewhere = [node for node in (spec.pool if spec.elastic else spec.nodes[:1]) if not node.local]
    if spec.stdin != "none" and spec.nodes and (spec.container or elsewhere):
        first = "list this machine first in nodes, as localhost, or have rank 0 read a file"
        every = "to run all ranks here, add --set nodes=1 --set launcher=local"
        what = f"rank 0 must run on this machine, without ssh, srun or a container: {first}; {every}"
        moves = "a restart can move rank 0 to another machine: remove min_nodes and spares, or this key"
        queued = "a job in a queue has no input: have rank 0 read a file, or remove this key"
        why = moves if spec.nodes[0].local and not spec.container else what
        yield "stdin", queued if reading.around.submitted else why


def _replaced(_: Reading, spec: JobSpec) -> Mistakes:
    """Refuse nodes that a restart couldn't replace or leave out, because the others run something else."""
    spares = spec.membership.spares
    programs = {(program.words, program.role) for program in map(spec.program_of, (*spec.nodes, *spares))}
    if spec.elastic and len(programs) > 1:
        key = "spares" if spares else "min_nodes"
        what = "the nodes have different scripts or roles, so a restart can't do without any of them"
        yield key, f"{what}: remove spares and min_nodes, or start a separate job for each program"
    for node in spares:
        if node.args is None and any(each.args is not None for each in spec.nodes):
            yield node.path, "the nodes set their own args, which a spare doesn't take over: set args here"


def _numbers(reading: Reading, spec: JobSpec) -> Mistakes:
    numbered = isinstance(reading.checked.get("nodes"), int)
    if reading.checked.get("spares") == REST and not numbered:
        yield (
            "spares",
            "rest means the other nodes of an allocation: set nodes to a number, or list the spare hosts",
        )
    if spec.fewest > len(spec.nodes):
        has = counted(len(spec.nodes), "node")
        unset = not (spec.allocation or reading.around.hostfile or "nodes" in reading.checked)
        why = ", because nodes is not set" if unset else ""
        yield "min_nodes", f"{spec.membership.min_nodes} is too high: the job has {has}{why}"
    if spec.limits.on_stall == "restart" and not (spec.restarts.most or spec.restarts.requeue):
        yield "on_stall", "restart has no effect without restarts: set restarts.max, or use on_stall: stop"


def _collect(_: Reading, spec: JobSpec) -> Mistakes:
    if isinstance(spec.collect.nodes, tuple) and not spec.hosts_unknown:
        for host in sorted({*spec.collect.nodes} - {node.label for node in spec.pool}):
            nodes = listed([node.label for node in spec.pool])
            yield "collect.from", f"{host} is not a node of the job, whose nodes are {nodes}"


def _restarts(reading: Reading, spec: JobSpec) -> Mistakes:
    """Refuse `on` and `never` if they contradict each other or have no effect."""
    limit, given = spec.restarts, reading.section("restarts")
    requeues = spec.limits.on_stall == "stop" and limit.requeue
    if "stall" in (limit.on or ()) and spec.limits.on_stall != "restart" and not requeues:
        yield "restarts.on", "stall has no effect without on_stall: restart"
    for each in dict.fromkeys(limit.on or ()):
        if each in limit.never:
            yield "restarts.never", f"{each} is in both on and never; remove it from one of them"
    for key in {*given} & {"on", "never"}:
        if not (limit.most or limit.requeue):
            advice = f"set restarts.max, or remove {key}"
            yield f"restarts.{key}", f"{key} has no effect without restarts: {advice}"


def _allocated(reading: Reading, _: JobSpec) -> Mistakes:
    """Check that no scheduler section requests fewer nodes than the job needs."""
    nodes = reading.checked.get("nodes")
    for key in reading.around.sections:
        if isinstance(nodes, int) and reading.section(key).get("nodes", nodes) < nodes:
            yield f"{key}.nodes", f"too few for the job: nodes is {nodes}; raise or remove {key}.nodes"


def _volumes(reading: Reading, _: JobSpec) -> Mistakes:
    for i, volume in enumerate(reading.section("kubernetes").get("volumes", ())):
        if sum(bool(volume.get(key)) for key in ("claim", "config_map", "secret", "host_path")) != 1:
            yield f"kubernetes.volumes[{i}]", "set exactly one of claim, config_map, secret or host_path"


def _container(reading: Reading, spec: JobSpec) -> Mistakes:
    """Check that the container runtime is known, and usable on the nodes of the job."""
    container = spec.container
    if container is None:
        return
    if container.runtime not in get_args(Runtime):
        what = f"the first word must be one of {', '.join(get_args(Runtime))}, got {container.runtime!r}"
        yield "container.runtime", f"{what}; it must be in PATH on the nodes, and work without sudo"
    by_slurm = all(isinstance(node.reach, SlurmStep) for node in spec.pool)
    if container.runtime == BY_SRUN and not by_slurm:
        yield "container.runtime", "pyxis is a plugin for srun: use it in a Slurm job, with launcher: slurm"
    if container.runtime == BY_SRUN and container.before:
        yield "container.runtime", "pyxis options belong in container.options"
    for i, mount in enumerate(reading.section("container").get("mounts", ())):
        if mount.count(":") > 2:
            yield f"container.mounts[{i}]", f"expected PATH:PATH_INSIDE:ro at most, got {mount!r}"
    for name, value in container.env.items():
        if "\n" in (value or ""):  # the shell on the node reads the command as one line
            yield (
                f"container.env.{name}",
                "it can't contain newlines; if only the ranks need it, move it to env",
            )


OF_SPEC = (
    *(_numbers, _repeated, _master, _loopback, _launcher, _mpi, _stdin, _replaced, _collect, _restarts),
    *(_allocated, _volumes, _container),
)
"""Checks of the job, once its hosts and endpoint are known."""
