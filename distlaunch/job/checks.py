"""Checks across a job file's keys, and of the job that they make."""

import re
from collections.abc import Iterator, Mapping
from itertools import starmap
from typing import Any, get_args

from distlaunch.contract import RESERVED
from distlaunch.job.document import setting
from distlaunch.job.fields import JOB, RENDEZVOUS
from distlaunch.job.paths import home_error
from distlaunch.job.placeholders import placeholder_error, placeholders_in
from distlaunch.job.pool import REST
from distlaunch.job.reading import Reading
from distlaunch.job.spec import JobSpec, NodeSpec
from distlaunch.job.types.hints import nearest, program_keys
from distlaunch.transport.command import HOST
from distlaunch.transport.container import BY_SRUN, Container, Runtime
from distlaunch.transport.slurm import Slurm
from distlaunch.wording import counted

VOLUME_SOURCES = frozenset({"claim", "config_map", "secret", "host_path"})
PROGRAMS = ("script", "module", "command")
_NOT_WITH_ETCD = ("master_addr", "master_port", "numa_binding", "cpu_binding")


def check_keys(reading: Reading) -> None:
    """Note problems that concern several keys."""
    _check_program(reading)
    _check_script(reading)
    if "nodes" in reading.checked and "hostfile" in reading.checked:
        reading.problem("hostfile", "set nodes or hostfile, not both")
    _check_rendezvous(reading, *reading.endpoint())
    _check_binding(reading)
    _check_homes(reading)
    _check_placeholders(reading)
    _check_stall(reading)
    _check_env(reading, "env", reading.checked.get("env"))
    for path, node in reading.listed():
        reading.hosts(path, node)
        if isinstance(node, Mapping):
            _check_env(reading, f"{path}.env", node.get("env"))


def check_spec(reading: Reading, spec: JobSpec) -> None:
    """Note problems that show only once hosts and endpoint are known."""
    _check_twice(reading, spec.pool)
    _check_master(reading, spec)
    _check_launcher(reading, spec)
    _check_mpi(reading, spec)
    _check_rest(reading)
    _check_allocated(reading)
    _check_volumes(reading)
    if spec.container:
        _check_container(reading, spec, spec.container)
    if spec.fewest > len(spec.nodes):
        has = counted(len(spec.nodes), "node")
        reading.problem("min_nodes", f"{spec.min_nodes} is too high: the job has {has}")


def _check_program(reading: Reading) -> None:
    given = [key for key in PROGRAMS if key in reading.checked]
    if len(given) != 1:
        told = " and ".join(given) or "none"
        reading.problem(given[-1] if given else "", f"set one of script, module or command; got {told}")


def _check_script(reading: Reading) -> None:
    text = reading.checked.get("script") or ""
    keys = program_keys(text)
    if re.match(r"(?:\S*/)?torchrun\s", text):
        import shlex  # only a mistake needs it

        made = f"`distlaunch import torchrun {shlex.quote(text)}`"
        reading.problem("script", f"{made} prints a job file for this command")
    elif keys and reading.places["script"].typed:
        gone = {} if "script" in keys else {"script": "null"}
        reading.problem("script", f"write {' '.join(starmap(setting, {**gone, **keys}.items()))}")
    elif keys:
        reading.problem("script", f"write {' and '.join(f'{key}: {value}' for key, value in keys.items())}")


def _check_rendezvous(reading: Reading, host: str | None, port: int | None) -> None:
    given, rendezvous = reading.checked, reading.section("rendezvous")
    backend, conf = RENDEZVOUS.value(rendezvous, "backend"), rendezvous.get("conf") or {}
    if backend != "etcd-v2":
        if conf and backend:
            reading.problem("rendezvous.conf", "conf has an effect only with backend: etcd-v2; remove it")
        return
    if not (host and port and "endpoint" in rendezvous):
        path = "rendezvous.endpoint" if "endpoint" in rendezvous else "rendezvous.backend"
        reading.problem(path, "etcd-v2 needs rendezvous.endpoint: host:port of your etcd server")
    for key in filter(given.get, _NOT_WITH_ETCD):
        reading.problem(key, f"with etcd-v2, torch's own agents decide that: remove {key}")
    for name, value in conf.items():
        if not value or "," in value:
            reading.problem(f"rendezvous.conf.{name}", "expected a non-empty value without commas")
    for key in ("command", "args"):
        for i, word in enumerate(given.get(key) or ()):
            for name in placeholders_in([word or ""]):
                told = f"torch's own agents choose {{{name}}} (etcd-v2): have the script read {name.upper()}"
                reading.problem(f"{key}[{i}]", told)


def _check_binding(reading: Reading) -> None:
    given = reading.checked.get("cpu_binding")
    if given and reading.checked.get("numa_binding"):
        reading.problem("cpu_binding", "set numa_binding or cpu_binding, not both")
    for i, cpus in enumerate(given if isinstance(given, tuple) else ()):
        for first, last in re.findall(r"(\d+)-(\d+)", str(cpus)):
            if int(last) < int(first):
                reading.problem(f"cpu_binding[{i}]", f"{first}-{last} ends before it begins")


def _check_stall(reading: Reading) -> None:
    on_stall, timeouts = reading.checked.get("on_stall"), reading.section("timeouts")
    never = "stall" in timeouts and timeouts["stall"] is None and "timeouts.stall" not in reading.refused
    if never and on_stall in ("restart", "stop"):
        reading.problem("on_stall", f"on_stall: {on_stall} has no effect because timeouts.stall is none")


def _check_homes(reading: Reading) -> None:
    for path, text in _file_paths(reading):
        if wrong := home_error(text) if isinstance(text, str) else None:
            reading.problem(path, wrong)


def _file_paths(reading: Reading) -> Iterator[tuple[str, str | None]]:
    """Path in the job file and text of each path to a file or folder."""
    checked = reading.checked
    yield from ((key, checked.get(key)) for key in ("script", "python", "workdir", "hostfile"))
    yield "logs.dir", reading.section("logs").get("dir")
    yield "ssh.config", reading.section("ssh").get("config")
    yield from (("command[0]", word) for word in (checked.get("command") or ())[:1] if word and "/" in word)
    yield from (("notify.command[0]", word) for word in (reading.section("notify").get("command") or ())[:1])
    yield "metrics.file", reading.section("metrics").get("file")
    for path, node in reading.listed():
        if isinstance(node, Mapping):
            yield from ((f"{path}.{key}", node.get(key)) for key in ("python", "workdir"))


def _check_placeholders(reading: Reading) -> None:
    for key, first in (("command", 1), ("args", 0)):
        for i, word in enumerate((reading.checked.get(key) or ())[first:], first):
            if word and (wrong := placeholder_error(word)):
                reading.problem(f"{key}[{i}]", wrong)


def _check_env(reading: Reading, path: str, env: Mapping[str, str | None] | None) -> None:
    environ = reading.around.environ
    for name, value in (env or {}).items():
        if name in RESERVED:
            reading.problem(f"{path}.{name}", f"distlaunch sets {name} for each worker; remove it")
        elif value is None and name not in environ and not reading.around.in_image:
            close = nearest(name, environ, 0.8)
            hint = f"; did you mean {close}?" if close else ""
            reading.problem(f"{path}.{name}", f"{name} is null, but it is not set in your environment{hint}")


def _check_twice(reading: Reading, nodes: tuple[NodeSpec, ...]) -> None:
    seen: dict[str, bool] = {}
    for node in nodes:
        spare = node.path.startswith("spares")
        if node.label in seen:
            reading.problem(node.path, _twice(node.label, spare, seen[node.label]))
        seen.setdefault(node.label, spare)


def _twice(host: str, spare: bool, spare_before: bool) -> str:
    if spare and not spare_before:
        return f"{host} is in both nodes and spares; remove it from one of them"
    hint = "remove one of them" if spare else "to run more workers on it, raise its procs"
    return f"{host} is listed twice; {hint}"


def _check_master(reading: Reading, spec: JobSpec) -> None:
    others = {name for node in spec.nodes[1:] for name in (node.label, node.address) if name}
    first = {spec.nodes[0].label, spec.nodes[0].address} if spec.nodes else set()
    if spec.master_host in others - first:
        place = "rendezvous.endpoint" if "rendezvous.endpoint" in reading.places else "master_addr"
        reading.problem(
            place,
            f"rank 0 runs on the first node, {spec.nodes[0].label}, but the endpoint is on "
            f"{spec.master_host}; list {spec.master_host} first",
        )


def _check_launcher(reading: Reading, spec: JobSpec) -> None:
    numbered = not isinstance(reading.checked.get("nodes"), tuple) and not reading.around.hostfile
    launcher, given = JOB.value(reading.checked, "launcher"), reading.checked.get("nodes")
    allocation = spec.allocation
    if launcher == "ssh" and numbered and not (allocation or reading.around.submitted):
        reading.problem("launcher", "launcher: ssh needs host names, but nodes is a number")
    if launcher == "kubernetes" and not reading.around.submitted:
        _check_pods(reading, numbered)
    if isinstance(launcher, Mapping):
        _check_command(reading, launcher, 0 if numbered and not allocation else len(spec.pool))
    if allocation and given and given > len(allocation.nodes):
        has = counted(len(allocation.nodes), "node")
        reading.problem("nodes", f"{given} nodes are asked for, but {allocation.name} has {has}")


def _check_pods(reading: Reading, numbered: bool) -> None:
    """Pods are known by their labels."""
    if not numbered:
        told = "the selector names the pods: set nodes to their number, or use launcher.command"
        reading.problem("nodes" if "nodes" in reading.checked else "hostfile", told)
    elif not reading.section("kubernetes").get("selector"):
        reading.problem("launcher", "launcher: kubernetes needs kubernetes.selector, such as app=train")


def _check_command(reading: Reading, launcher: Mapping[str, Any], named: int) -> None:
    """A launcher's command is for each of `named` hosts, and has no use for what is ssh's."""
    if not named:
        reading.problem("launcher", "launcher.command needs names: list the nodes")
    elif named > 1 and not any(HOST in word for word in launcher["command"]):
        told = f"{HOST} is in none of the words: all nodes would be the same"
        reading.problem("launcher.command", told)
    for path, node in reading.listed():
        for key in ("user", "port") if isinstance(node, Mapping) else ():
            if key in node:
                reading.problem(f"{path}.{key}", f"{key} has no meaning for launcher.command")


def _check_mpi(reading: Reading, spec: JobSpec) -> None:
    """MPI's launcher and torch's own agents both start ranks, and torch's mpi backend needs the former."""
    if spec.mpirun and spec.etcd:
        key = "mpirun" if "mpirun" in reading.checked else "launcher"
        reading.problem(key, "rendezvous.backend: etcd-v2 has torch's own agents start the ranks")
    if spec.backend == "mpi" and not spec.mpirun:
        reading.problem("backend", "mpi needs ranks that MPI starts: set launcher: mpirun")


def _check_rest(reading: Reading) -> None:
    """`spares: rest` means something where nodes is a number."""
    if reading.checked.get("spares") == REST and not isinstance(reading.checked.get("nodes"), int):
        reading.problem("spares", "rest is what a number of nodes leaves over: set nodes to one")


def _check_allocated(reading: Reading) -> None:
    """A scheduler's section may ask for more nodes than the job has, not for fewer."""
    nodes = reading.checked.get("nodes")
    for key in reading.around.sections:
        if isinstance(nodes, int) and (reading.section(key).get("nodes") or nodes) < nodes:
            reading.problem(f"{key}.nodes", f"the job needs more: nodes is {nodes}")


def _check_container(reading: Reading, spec: JobSpec, container: Container) -> None:
    """A runtime that we know, where it can be."""
    if container.runtime not in get_args(Runtime):
        known = ", ".join(get_args(Runtime))
        reading.problem("container.runtime", f"expected one of {known}, got {container.runtime!r}")
    by_slurm = all(isinstance(node.reach, Slurm) for node in spec.pool)
    if container.runtime == BY_SRUN and not by_slurm:
        reading.problem("container.runtime", "pyxis is a plug-in of srun: the nodes must be Slurm's")
    if container.runtime == BY_SRUN and container.before:
        reading.problem("container.runtime", "pyxis has no options here: use container.options")
    if any(node.reach.together for node in spec.pool):
        reading.problem("container", "nodes that share one process can't have containers")
    for i, mount in enumerate(container.mounts):
        if mount.count(":") > 2:
            reading.problem(f"container.mounts[{i}]", f"expected PATH:PATH_INSIDE:ro at most, got {mount!r}")


def _check_volumes(reading: Reading) -> None:
    for i, volume in enumerate(reading.section("kubernetes").get("volumes") or ()):
        if volume and len(VOLUME_SOURCES & {key for key, given in volume.items() if given}) != 1:
            reading.problem(f"kubernetes.volumes[{i}]", "set one of claim, config_map, secret and host_path")
