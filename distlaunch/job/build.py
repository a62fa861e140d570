"""Builds a `JobSpec` from a document: each key by its declaration, and what needs work here."""

import os.path
from collections.abc import Iterator, Mapping
from functools import cached_property

from distlaunch.agent.wire import HEARTBEATS
from distlaunch.errors import JobError, Problem
from distlaunch.job.checks import check_keys, check_spec
from distlaunch.job.document import Entries, Place, Scalar, Value, describe
from distlaunch.job.fields import JOB, LOGS, NODE, RESTARTS, SSH, TIMEOUTS
from distlaunch.job.hosts import HostEntry
from distlaunch.job.paths import path_in
from distlaunch.job.reading import Checked, Reading, Surroundings
from distlaunch.job.spec import (
    ELASTIC_RESTARTS,
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
from distlaunch.job.types.hints import colon_hint
from distlaunch.transport.kinds import Transport
from distlaunch.transport.local import Local
from distlaunch.transport.ssh import Ssh, SshOptions


def build_spec(document: Value, source: str, around: Surroundings) -> JobSpec:
    """The job that `document` describes. Raises `JobError` with every problem found."""
    if not isinstance(document, Entries):
        raise JobError([_no_job(document, source)])
    problems: list[Problem] = []
    checked = JOB.check(document, "", problems)
    if checked is None:
        raise JobError(problems)
    reading = Reading(checked, document, around, problems)
    check_keys(reading)
    if problems:
        raise JobError(sorted(set(problems), key=lambda problem: (problem.line, problem.column, *problem)))
    spec = _Builder(reading).spec(source)
    check_spec(reading, spec)
    if problems:
        raise JobError(problems)
    return spec


def _no_job(document: Value, source: str) -> Problem:
    """The problem with a document that is not a mapping."""
    if isinstance(document, Scalar) and document.value is None:
        return Place(source).problem("", "the job file is empty; it needs at least `script:`")
    text = document.value if isinstance(document, Scalar) and isinstance(document.value, str) else ""
    if hint := colon_hint(text, document.place):
        return document.place.problem("", hint)
    hint = "to run a script, write a YAML file with `script:`"
    return document.place.problem("", f"expected {JOB.name}, got {describe(document)}; {hint}")


class _Builder:
    """Makes what the declarations in `fields.py` call `built`; no key is refused any more."""

    def __init__(self, reading: Reading) -> None:
        self.reading, self.checked, self.around = reading, reading.checked, reading.around

    def spec(self, source: str) -> JobSpec:
        """The whole."""
        checked = self.checked
        host, port = self.reading.endpoint()
        return JobSpec(
            name=checked.get("name") or self.around.name or os.path.splitext(os.path.basename(source))[0],
            nodes=self._nodes(),
            program=self._program(),
            workdir=self._on_node(checked.get("workdir", ".")),
            logs=self._logs(),
            master_host=host,
            master_port=port,
            env=self._env(checked.get("env")),
            python=self._interpreter(checked.get("python")),
            restarts=self._restarts(),
            spares=self._spares(),
            binding=self._binding(),
            metrics=self._metrics(),
            places=self.reading.places,
            source=source,
            invocation=Invocation(piped=self.around.piped),
            **JOB.fields_of(checked),
        )

    def _program(self) -> Program:
        checked = self.checked
        if "script" in checked:
            return Program("script", (checked["script"],), placed=True)
        if "module" in checked:
            return Program("module", (checked["module"],))
        first, *rest = checked["command"]
        return Program("command", (first, *rest), placed="/" in first)  # else a name for the node's PATH

    def _nodes(self) -> tuple[NodeSpec, ...]:
        if self.around.hostfile is not None:
            return tuple(map(self._from_hostfile, self.around.hostfile))
        given = JOB.value(self.checked, "nodes")
        if isinstance(given, int):
            return tuple(self._node(f"node{i}", Local(), {}, "nodes") for i in range(given))
        return tuple(spec for i, node in enumerate(given) for spec in self._from_list(f"nodes[{i}]", node))

    def _spares(self) -> tuple[NodeSpec, ...]:
        given = self.checked.get("spares", ())
        return tuple(spec for i, node in enumerate(given) for spec in self._from_list(f"spares[{i}]", node))

    def _from_hostfile(self, entry: HostEntry) -> NodeSpec:
        reach = self._reach(entry.host, entry.user, entry.port)
        slots = {} if entry.slots is None else {"procs": entry.slots}
        return self._node(entry.host, reach, slots, "hostfile")

    def _from_list(self, path: str, node: str | Checked) -> Iterator[NodeSpec]:
        record: Checked = {"host": node} if isinstance(node, str) else node
        for user, host in self.reading.hosts(path, node):
            reach = self._reach(host, record.get("user", user), record.get("port"))
            yield self._node(host, reach, record, path)

    def _node(self, host: str, reach: Transport, record: Checked, path: str) -> NodeSpec:
        gpus = record.get("gpus", JOB.value(self.checked, "gpus_per_node"))
        return NodeSpec(
            host,
            reach,
            gpus=gpus if isinstance(gpus, int) else None,
            procs=record.get("procs", self.checked.get("procs_per_node")),
            python=self._interpreter(record.get("python")),
            workdir=self._on_node(record["workdir"]) if "workdir" in record else None,
            env=self._env(record.get("env")),
            path=path,
            **NODE.fields_of(record),
        )

    def _reach(self, host: str, user: str | None, port: int | None) -> Transport:
        launcher = JOB.value(self.checked, "launcher")
        if launcher == "local" or (launcher == "auto" and host == "localhost" and not user and not port):
            return Local()
        return Ssh(host, user, port, self._ssh)

    def _env(self, env: Mapping[str, str | None] | None) -> dict[str, EnvValue]:
        environ = self.around.environ
        return {
            name: EnvValue(environ[name], inherited=True) if value is None else EnvValue(value)
            for name, value in (env or {}).items()
        }

    def _logs(self) -> Logs:
        logs = self.reading.section("logs")
        return Logs(self._path(LOGS.value(logs, "dir")), **LOGS.fields_of(logs))

    def _metrics(self) -> str | None:
        section = self.reading.section("metrics")
        return self._path(section["file"]) if section else None

    def _restarts(self) -> Restarts:
        given = self.reading.section("restarts")
        made: Restarts = RESTARTS.made(given)
        elastic = "min_nodes" in self.checked or bool(self.checked.get("spares"))
        return made._replace(most=ELASTIC_RESTARTS) if elastic and "max" not in given else made

    def _binding(self) -> Binding | None:
        listed = self.checked.get("cpu_binding")
        if isinstance(listed, tuple):
            return Binding("listed", tuple(map(str, listed)))
        how = self.checked.get("numa_binding") or listed
        return Binding(how) if how else None

    @cached_property
    def _ssh(self) -> SshOptions:
        ssh = self.reading.section("ssh")
        timeouts: Timeouts = TIMEOUTS.made(self.reading.section("timeouts"))
        return SshOptions(
            config=self._path(ssh["config"]) if "config" in ssh else None,
            persist_s=None if ssh.get("persist") is None else max(1, round(ssh["persist"])),
            connect_s=max(1, int(timeouts.connect_s / 2)),
            alive_s=max(1, int(timeouts.lease_s / HEARTBEATS)),
            **SSH.fields_of(ssh),
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
