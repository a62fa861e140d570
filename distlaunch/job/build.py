"""Builds a `JobSpec` from a checked document; what spans several keys is checked here."""

import difflib
import os.path
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import starmap
from typing import Any, NamedTuple

from distlaunch.contract import RESERVED
from distlaunch.errors import JobError, Problem
from distlaunch.job.document import (
    Entries,
    Items,
    Place,
    Scalar,
    Value,
    as_list,
    counted,
    describe,
    is_unset,
    setting,
)
from distlaunch.job.elastic import check_torch_agents
from distlaunch.job.fields import JOB
from distlaunch.job.hosts import HostEntry, expand_ranges, host_error, parse_endpoint, split_user
from distlaunch.job.paths import home_error, path_in
from distlaunch.job.placeholders import placeholder_error
from distlaunch.job.spec import (
    Binding,
    EnvValue,
    Invocation,
    JobSpec,
    Logs,
    NodeSpec,
    Program,
    Restarts,
    Timeouts,
)
from distlaunch.job.types import colon_hint
from distlaunch.transport.kinds import Transport
from distlaunch.transport.local import Local
from distlaunch.transport.ssh import Ssh, SshOptions

Checked = Mapping[str, Any]
ELASTIC_RESTARTS = 3
"""An elastic job without `restarts.max` restarts so often; one that never does would not be elastic."""


class Surroundings(NamedTuple):
    """What a job file is read against: its folder, the caller's, the environment, the hostfile's entries.

    `name` is the job's unless it says one itself; None = its file's stem. One that was `piped` has no folder.
    """

    folder: str
    home: str
    environ: Mapping[str, str]
    hostfile: tuple[HostEntry, ...] | None = None
    name: str | None = None
    piped: bool = False

    def path(self, text: str) -> str:
        """A path on this machine, absolute."""
        path = path_in(self.folder, text)
        return os.path.normpath(self.home + path[1:]) if path.startswith("~") else path


def build_spec(document: Value, source: str, around: Surroundings) -> JobSpec:
    """The job that `document` describes. Raises `JobError` with every problem found."""
    if isinstance(document, Scalar) and document.value is None:
        raise JobError([Place(source).problem("", "the job file is empty; it needs at least `script:`")])
    if not isinstance(document, Entries):
        text = document.value if isinstance(document, Scalar) and isinstance(document.value, str) else ""
        if hint := colon_hint(text, document.place):
            raise JobError([document.place.problem("", hint)])
        hint = "to run a script, write a YAML file with `script:`"
        text = f"expected {JOB.name}, got {describe(document)}; {hint}"
        raise JobError([document.place.problem("", text)])
    problems: list[Problem] = []
    checked = JOB.check(document, "", problems)
    if checked is None:
        raise JobError(problems)
    builder = _Builder(checked, document, around, problems)
    builder.check_across()
    if problems:
        raise JobError(sorted(set(problems), key=lambda problem: (problem.line, problem.column, *problem)))
    spec = builder.build(source)
    if problems:
        raise JobError(problems)
    return spec


class _Builder:
    """Holds the checked values and the document they came from while a spec is built."""

    def __init__(
        self, checked: Checked, document: Value, around: Surroundings, problems: list[Problem]
    ) -> None:
        self.checked, self.document, self.around, self.problems = checked, document, around, problems
        self.places = dict(_places(document, ""))
        self.refused = {problem.path for problem in problems if problem.path}

    def problem(self, path: str, text: str) -> None:
        """Note a problem with what stands at `path`, unless that is refused already."""
        if path in self.refused:
            return
        self.refused |= {path} - {""}
        self.problems.append(self.places.get(path, self.document.place).problem(path, text))

    def check_across(self) -> None:
        """Check what one key alone can't tell."""
        programs = [key for key in ("script", "module", "command") if key in self.checked]
        if len(programs) != 1:
            given = " and ".join(programs) or "none of them"
            self.problem(
                programs[-1] if programs else "", f"give one of script, module or command; got {given}"
            )
        self._check_script()
        if "nodes" in self.checked and "hostfile" in self.checked:
            self.problem("hostfile", "give nodes or hostfile, not both")
        self._endpoint()
        self._check_binding()
        self._check_homes()
        self._check_placeholders()
        self._check_stall()
        check_torch_agents(self.checked, self.problem)
        self._check_env("env", self.checked.get("env"))
        for path, node in self._listed():
            self._hosts(path, node)
            if isinstance(node, Mapping):
                self._check_env(f"{path}.env", node.get("env"))

    def _check_script(self) -> None:
        text = self.checked.get("script") or ""
        keys = _program_of(text)
        if re.match(r"(?:\S*/)?torchrun\s", text):
            import shlex  # only a mistake needs it

            made = f"`distlaunch import torchrun {shlex.quote(text)}`"
            self.problem("script", f"{made} prints a job file for this command")
        elif keys and self.places["script"].typed:
            gone = {} if "script" in keys else {"script": "null"}
            self.problem("script", f"write {' '.join(starmap(setting, {**gone, **keys}.items()))}")
        elif keys:
            self.problem("script", f"write {' and '.join(f'{key}: {value}' for key, value in keys.items())}")

    def _check_binding(self) -> None:
        given = self.checked.get("cpu_binding")
        if given and self.checked.get("numa_binding"):
            self.problem("cpu_binding", "give numa_binding or cpu_binding, not both")
        for i, cpus in enumerate(given if isinstance(given, tuple) else ()):
            for first, last in re.findall(r"(\d+)-(\d+)", str(cpus)):
                if int(last) < int(first):
                    self.problem(f"cpu_binding[{i}]", f"{first}-{last} ends before it begins")

    def _check_stall(self) -> None:
        on_stall, timeouts = self.checked.get("on_stall"), self.checked.get("timeouts") or {}
        never = "stall" in timeouts and timeouts["stall"] is None and "timeouts.stall" not in self.refused
        if never and on_stall in ("restart", "stop"):
            self.problem("on_stall", f"on_stall: {on_stall} has no effect, since timeouts.stall is none")

    def _check_homes(self) -> None:
        for path, text in self._file_paths():
            if wrong := home_error(text) if isinstance(text, str) else None:
                self.problem(path, wrong)

    def _check_placeholders(self) -> None:
        for key, first in (("command", 1), ("args", 0)):
            for i, word in enumerate((self.checked.get(key) or ())[first:], first):
                if word and (wrong := placeholder_error(word)):
                    self.problem(f"{key}[{i}]", wrong)

    def _file_paths(self) -> Iterator[tuple[str, str | None]]:
        """Path in the job file and text of each path to a file or folder."""
        checked = self.checked
        yield from ((key, checked.get(key)) for key in ("script", "python", "workdir", "hostfile"))
        yield "logs.dir", (checked.get("logs") or {}).get("dir")
        yield "ssh.config", (checked.get("ssh") or {}).get("config")
        yield from (
            ("command[0]", word) for word in (checked.get("command") or ())[:1] if word and "/" in word
        )
        for path, node in self._listed():
            if isinstance(node, Mapping):
                yield from ((f"{path}.{key}", node.get(key)) for key in ("python", "workdir"))

    def _listed(self) -> Iterator[tuple[str, str | Checked]]:
        """Path and item of every host that is listed, in `nodes` and `spares`."""
        for key in ("nodes", "spares"):
            listed = self.checked.get(key)
            for i, node in enumerate(listed if isinstance(listed, tuple) else ()):
                if node is not None:
                    yield f"{key}[{i}]", node

    def _check_env(self, path: str, env: Mapping[str, str | None] | None) -> None:
        for name, value in (env or {}).items():
            if name in RESERVED:
                self.problem(f"{path}.{name}", f"{name} is set by distlaunch for each worker; remove it")
            elif value is None and name not in self.around.environ:
                self.problem(
                    f"{path}.{name}",
                    f"{name} is null, but your environment does not have it{self._near(name)}",
                )

    def _near(self, name: str) -> str:
        close = difflib.get_close_matches(name, self.around.environ, 1, 0.8)
        return f"; did you mean {close[0]}?" if close else ""

    def build(self, source: str) -> JobSpec:
        """The spec; problems that only show now are noted."""
        checked = self.checked
        host, port = self._endpoint()
        rendezvous = checked.get("rendezvous", {})
        spec = JobSpec(
            name=checked.get("name") or self.around.name or os.path.splitext(os.path.basename(source))[0],
            nodes=self._nodes(),
            program=self._program(),
            workdir=self._on_node(checked.get("workdir", ".")),
            logs=self._logs(),
            backend=checked.get("backend", "auto"),
            master_host=host,
            master_port=port,
            ranking=rendezvous.get("backend", "static"),
            rendezvous_id=rendezvous.get("id"),
            rendezvous_conf=rendezvous.get("conf", {}),
            args=checked.get("args", ()),
            env=self._env(checked.get("env")),
            python=self._interpreter(checked.get("python")),
            timeouts=self._timeouts(),
            restarts=self._restarts(),
            spares=self._spares(),
            min_nodes=checked.get("min_nodes"),
            grow=checked.get("elastic", {}).get("grow", "restart"),
            on_stall=checked.get("on_stall", "notice"),
            role=checked.get("role", "default"),
            one_device=checked.get("virtual_local_rank", False),
            binding=self._binding(),
            places=self.places,
            source=source,
            invocation=Invocation(piped=self.around.piped),
        )
        self._check_twice(spec.pool)
        self._check_master(spec)
        if spec.fewest > len(spec.nodes):
            self.problem(
                "min_nodes", f"{spec.min_nodes} is more than the job has: {counted(len(spec.nodes), 'node')}"
            )
        return spec

    def _program(self) -> Program:
        checked = self.checked
        if "script" in checked:
            return Program("script", (checked["script"],), placed=True)
        if "module" in checked:
            return Program("module", (checked["module"],))
        first, *rest = checked["command"]
        return Program("command", (first, *rest), placed="/" in first)  # else a name for the node's PATH

    def _endpoint(self) -> tuple[str | None, int | None]:
        host, port = self.checked.get("master_addr"), self.checked.get("master_port")
        endpoint = (self.checked.get("rendezvous") or {}).get("endpoint")
        if endpoint is None:
            return host, port
        try:
            return parse_endpoint(endpoint)
        except ValueError as error:
            self.problem("rendezvous.endpoint", str(error))
            return None, None

    def _nodes(self) -> tuple[NodeSpec, ...]:
        if self.around.hostfile is not None:
            nodes = [self._from_hostfile(entry) for entry in self.around.hostfile]
        else:
            given = self.checked.get("nodes", 1)
            if isinstance(given, int):
                return tuple(self._node_of(f"node{i}", Local(), {}, "nodes") for i in range(given))
            nodes = [spec for i, node in enumerate(given) for spec in self._from_list(f"nodes[{i}]", node)]
        return tuple(nodes)

    def _spares(self) -> tuple[NodeSpec, ...]:
        given = self.checked.get("spares", ())
        return tuple(spec for i, node in enumerate(given) for spec in self._from_list(f"spares[{i}]", node))

    def _from_hostfile(self, entry: HostEntry) -> NodeSpec:
        reach = self._reach(entry.host, entry.user, entry.port)
        slots = {} if entry.slots is None else {"procs": entry.slots}
        return self._node_of(entry.host, reach, slots, "hostfile")

    def _from_list(self, path: str, node: str | Checked) -> Iterator[NodeSpec]:
        record: Checked = {"host": node} if isinstance(node, str) else node
        for user, host in self._hosts(path, node):
            reach = self._reach(host, record.get("user", user), record.get("port"))
            yield self._node_of(host, reach, record, path)

    def _hosts(self, path: str, node: str | Checked) -> list[tuple[str | None, str]]:
        """(user, host) of each host that a listed item names; what is no host is noted."""
        text = node.get("host") if isinstance(node, Mapping) else node
        if not isinstance(text, str):
            return []  # noted by the type's check
        user, pattern = split_user(text)
        if found := re.fullmatch(r"([^:]+):([0-9]+)", pattern):
            login = f", user: {user}" if user else ""
            record = f"{{host: {found[1]}, port: {found[2]}{login}}}"
            self.problem(path, f"{text}: write {self.places[path].instead(text, record)}")
            return []
        try:
            hosts = expand_ranges(pattern)
        except ValueError as error:
            self.problem(path, str(error))
            return []
        if wrong := next(filter(None, map(host_error, hosts)), None):
            self.problem(path, wrong)
            return []
        return [(user, host) for host in hosts]

    def _node_of(self, host: str, reach: Transport, record: Checked, path: str) -> NodeSpec:
        gpus = record.get("gpus", self.checked.get("gpus_per_node"))
        return NodeSpec(
            host,
            reach,
            gpus=gpus if isinstance(gpus, int) else None,
            procs=record.get("procs", self.checked.get("procs_per_node")),
            address=record.get("address"),
            python=self._interpreter(record.get("python")),
            workdir=self._on_node(record["workdir"]) if "workdir" in record else None,
            env=self._env(record.get("env")),
            path=path,
        )

    def _reach(self, host: str, user: str | None, port: int | None) -> Transport:
        launcher = self.checked.get("launcher", "auto")
        if launcher == "local" or (launcher == "auto" and host == "localhost" and not user and not port):
            return Local()
        return Ssh(host, user, port, self._ssh)

    def _check_twice(self, nodes: tuple[NodeSpec, ...]) -> None:
        seen: dict[str, bool] = {}
        for node in nodes:
            spare = node.path.startswith("spares")
            if node.label in seen:
                self.problem(node.path, _twice(node.label, spare, seen[node.label]))
            seen.setdefault(node.label, spare)

    def _check_master(self, spec: JobSpec) -> None:
        others = {name for node in spec.nodes[1:] for name in (node.label, node.address) if name}
        first = {spec.nodes[0].label, spec.nodes[0].address} if spec.nodes else set()
        if spec.engine.serves_store and spec.master_host in others - first:
            place = "rendezvous.endpoint" if "rendezvous.endpoint" in self.places else "master_addr"
            self.problem(
                place,
                f"rank 0 runs on the first node, {spec.nodes[0].label}, but the endpoint is on "
                f"{spec.master_host}; list {spec.master_host} first",
            )
        if (
            self.checked.get("launcher") == "ssh"
            and isinstance(self.checked.get("nodes", 1), int)
            and not self.around.hostfile
        ):
            self.problem("launcher", "launcher: ssh needs hosts; nodes is a number here")

    def _env(self, env: Mapping[str, str | None] | None) -> dict[str, EnvValue]:
        environ = self.around.environ
        return {
            name: EnvValue(environ[name], inherited=True) if value is None else EnvValue(value)
            for name, value in (env or {}).items()
        }

    def _logs(self) -> Logs:
        logs = self.checked.get("logs", {})
        return Logs(self._path(logs.get("dir", "runs")), logs.get("console", "all"))

    def _timeouts(self) -> Timeouts:
        return Timeouts(**{f"{key}_s": value for key, value in self.checked.get("timeouts", {}).items()})

    def _restarts(self) -> Restarts:
        given = self.checked.get("restarts", {})
        elastic = "min_nodes" in self.checked or bool(self.checked.get("spares"))
        default = Restarts(most=ELASTIC_RESTARTS if elastic else 0)
        return Restarts(
            given.get("max", default.most),
            given.get("backoff", default.backoff_s),
            given.get("window", default.window_s),
        )

    def _binding(self) -> Binding | None:
        listed = self.checked.get("cpu_binding")
        if isinstance(listed, tuple):
            return Binding("listed", tuple(map(str, listed)))
        how = self.checked.get("numa_binding") or listed
        return Binding(how) if how else None

    @cached_property
    def _ssh(self) -> SshOptions:
        ssh = self.checked.get("ssh", {})
        connect_s = self._timeouts().connect_s
        return SshOptions(
            config=self._path(ssh["config"]) if "config" in ssh else None,
            words=ssh.get("options", ()),
            persist_s=None if ssh.get("persist") is None else max(1, round(ssh["persist"])),
            connect_s=max(1, int(connect_s / 2)),
            alive_s=max(1, int(self._timeouts().lease_s / 6)),
        )

    def _path(self, text: str) -> str:
        """A path on this machine."""
        return self.around.path(text)

    def _on_node(self, text: str) -> str:
        """A path on a node, whose user has a ~ of its own."""
        return path_in(self.around.folder, text)

    def _interpreter(self, text: str | None) -> str | None:
        """A path if it has a slash, else a name for the node's PATH."""
        return self._on_node(text) if text and "/" in text else text


def _program_of(text: str) -> dict[str, str]:
    """The keys for a script that was written as a command line; none for a mere path."""
    if found := re.fullmatch(r"(\S+\.py)\s+(\S.*)", text):
        return {"script": found[1], "args": as_list(found[2])}
    if found := re.fullmatch(r"((?:\S*/)?python[0-9.]*)\s+(-m\s+)?([^\s-]\S*)(?:\s+(\S.*))?", text):
        keys = {"module" if found[2] else "script": found[3]}
        keys |= {"args": as_list(found[4])} if found[4] else {}
        return keys if found[1] in ("python", "python3") else {**keys, "python": found[1]}
    if re.match(r"(?:\S*/)?(?:python[0-9.]*|bash|sh)\s", text):
        return {"command": as_list(text)}
    return {}


def _twice(host: str, spare: bool, spare_before: bool) -> str:
    if spare and not spare_before:
        return f"{host} is in nodes too: a host can't be both; drop it from nodes or spares"
    hint = "drop one of the two" if spare else "give it more procs instead"
    return f"{host} is listed twice; {hint}"


def _places(value: Value, path: str) -> Iterator[tuple[str, Place]]:
    yield path, value.place
    if isinstance(value, Items):
        for i, item in enumerate(value.items):
            yield from _places(item, f"{path}[{i}]")
    elif isinstance(value, Entries):
        for key, _, entry in value.walk():
            if not is_unset(entry):
                yield from _places(entry, f"{path}.{key}" if path else key)
