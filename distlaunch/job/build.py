"""Builds a `JobSpec` from a document: each key by its declaration, and what needs work here."""

import os.path
from collections.abc import Mapping
from typing import Any

from distlaunch.errors import JobError, Problem
from distlaunch.job.checks import check_keys, check_spec
from distlaunch.job.container_fields import CONTAINER, KUBERNETES, SECRET, VOLUME
from distlaunch.job.document import Entries, Place, Scalar, Value, describe
from distlaunch.job.fields import JOB, LOGS, NOTIFY, RENDEZVOUS, RESTARTS, with_sections
from distlaunch.job.kubernetes_options import KubernetesOptions
from distlaunch.job.paths import path_in
from distlaunch.job.pool import Pool
from distlaunch.job.reading import Checked, Reading, Surroundings
from distlaunch.job.spec import (
    ELASTIC_RESTARTS,
    Binding,
    EnvValue,
    Etcd,
    Invocation,
    JobSpec,
    Logs,
    Notify,
    Program,
    Restarts,
)
from distlaunch.job.types.hints import colon_hint
from distlaunch.job.types.records import Record
from distlaunch.transport.container import Container


def build_spec(document: Value, source: str, around: Surroundings) -> JobSpec:
    """The job that `document` describes. Raises `JobError` with every problem found."""
    if not isinstance(document, Entries):
        raise JobError([_no_job(document, source)])
    problems: list[Problem] = []
    checked = with_sections(around.sections).check(document, "", problems)
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
        etcd = self._etcd()
        host, port = (None, None) if etcd else self.reading.endpoint()
        pool = Pool(self.reading, self._of_node)
        return JobSpec(
            name=checked.get("name") or self.around.name or os.path.splitext(os.path.basename(source))[0],
            nodes=pool.nodes(),
            program=self._program(),
            workdir=self._on_node(checked.get("workdir", ".")),
            logs=self._logs(),
            master_host=host,
            master_port=port,
            etcd=etcd,
            env=self._env(checked.get("env")),
            python=self._interpreter(checked.get("python")),
            restarts=self._restarts(),
            spares=pool.spares(),
            allocation=pool.allocation,
            binding=self._binding(),
            notify=self._notify(),
            metrics=self._metrics(),
            container=self._container(),
            mpirun=self._mpirun(),
            sections={key: self._section(key) for key in self.around.sections if key in checked},
            kubernetes=self._kubernetes(),
            places=self.reading.places,
            source=source,
            invocation=Invocation(piped=self.around.piped),
            **JOB.fields_of({key: value for key, value in checked.items() if key in JOB.fields}),
        )

    def _section(self, key: str) -> Checked:
        """What is asked of a scheduler, but what it does anyway."""
        record, given = self.around.sections[key].kind, self.reading.section(key)
        assert isinstance(record, Record)
        return {name: value for name, value in given.items() if value != record.default(name)}

    def _program(self) -> Program:
        checked = self.checked
        if "script" in checked:
            return Program("script", (checked["script"],), placed=True)
        if "module" in checked:
            return Program("module", (checked["module"],))
        first, *rest = checked["command"]
        return Program("command", (first, *rest), placed="/" in first)  # else a name for the node's PATH

    def _etcd(self) -> Etcd | None:
        given = self.reading.section("rendezvous")
        is_used = RENDEZVOUS.value(given, "backend") == "etcd-v2"
        return Etcd(given["endpoint"], given.get("conf") or {}) if is_used else None

    def _of_node(self, record: Checked) -> dict[str, Any]:
        """The fields of a node that are made as the job's own are."""
        return {
            "python": self._interpreter(record.get("python")),
            "workdir": self._on_node(record["workdir"]) if "workdir" in record else None,
            "env": self._env(record.get("env")),
        }

    def _env(self, env: Mapping[str, str | None] | None) -> dict[str, EnvValue]:
        environ = self.around.environ
        return {
            name: EnvValue(environ.get(name, ""), inherited=True) if value is None else EnvValue(value)
            for name, value in (env or {}).items()
        }

    def _logs(self) -> Logs:
        logs = self.reading.section("logs")
        place = self._on_node if self.around.in_image else self._path
        return Logs(place(LOGS.value(logs, "dir")), **LOGS.fields_of(logs))

    def _metrics(self) -> str | None:
        section = self.reading.section("metrics")
        return self._path(section["file"]) if section else None

    def _notify(self) -> Notify:
        made: Notify = NOTIFY.made(self.reading.section("notify"))
        if not made.command or "/" not in made.command[0]:
            return made  # a name for our PATH
        first, *rest = made.command
        return made._replace(command=(self._path(first), *rest))

    def _mpirun(self) -> tuple[str, ...]:
        given = self.checked.get("mpirun", ())
        if not given and self.checked.get("launcher") == "mpirun":
            return ("mpirun",)
        return (given,) if isinstance(given, str) else tuple(given)

    def _container(self) -> Container | None:
        section = self.reading.section("container")
        if not section:
            return None
        runtime = CONTAINER.value(section, "runtime")
        name, *before = (runtime,) if isinstance(runtime, str) else runtime  # any: see check_spec
        return Container(
            image=section["image"],
            runtime=name,  # type: ignore[arg-type]
            mounts=tuple(map(self._mount, section.get("mounts", ()))),
            before=tuple(before),
            **CONTAINER.fields_of(section),
        )

    def _mount(self, text: str) -> str:
        """PATH or PATH:PATH_INSIDE…, the first as on the node."""
        source, colon, inside = text.partition(":")
        return f"{self._on_node(source)}{colon}{inside}"

    def _kubernetes(self) -> KubernetesOptions:
        section = self.reading.section("kubernetes")
        return KubernetesOptions(
            volumes=tuple(map(VOLUME.made, section.get("volumes", ()))),
            secrets={name: SECRET.made(each) for name, each in section.get("secrets", {}).items()},
            **KUBERNETES.fields_of(section),
        )

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

    def _path(self, text: str) -> str:
        """A path on this machine."""
        return self.around.path(text)

    def _on_node(self, text: str) -> str:
        """A path on a node, whose user has a ~ of its own."""
        return path_in("" if self.around.in_image else self.around.folder, text)

    def _interpreter(self, text: str | None) -> str | None:
        """A path if it has a slash, else a name for the node's PATH."""
        return self._on_node(text) if text and "/" in text else text
