"""Builds a `JobSpec` from a document: plain keys from their declarations, `built` keys with code."""

import os.path
from collections.abc import Iterable, Iterator
from typing import get_args

from distlaunch.errors import JobError, Problem
from distlaunch.job import keys, spec
from distlaunch.job.checks import OF_KEYS, OF_SPEC, Reading, is_synced
from distlaunch.job.document import Entries, Items, Place, Scalar, Value, colon_hint, describe, is_unset
from distlaunch.job.nodes import Pool, Surroundings, endpoint_of
from distlaunch.job.types import Record
from distlaunch.transports.container import Container


def build_spec(document: Value, source: str, around: Surroundings) -> spec.JobSpec:
    """Return the job described by `document`. Raises `JobError` with every problem found."""
    if not isinstance(document, Entries):
        raise JobError([_no_job(document, source)])
    problems: list[Problem] = []
    known = keys.with_sections(around.sections)
    checked = known.check(document, "", problems)
    refused = frozenset(problem.path for problem in problems)
    reading = Reading(checked, dict(_places(document, "")), refused, around)
    _refuse(problems, (mistake for look in OF_KEYS for mistake in look(reading)), reading)
    job = _job(reading, known, source)
    _refuse([], (mistake for look in OF_SPEC for mistake in look(reading, job)), reading)
    return job


def _no_job(document: Value, source: str) -> Problem:
    """Return the problem with a document that is not a map."""
    if isinstance(document, Scalar) and document.value is None:
        return Place(source).problem("", "the job file is empty; it needs at least `script:`")
    text = document.value if isinstance(document, Scalar) and isinstance(document.value, str) else ""
    if hint := colon_hint(text, document.place):
        return document.place.problem("", hint)
    hint = "to run a program, write `command: [./PROGRAM]`, or `script:` for Python, in a YAML file"
    return document.place.problem("", f"expected {keys.JOB.name}, got {describe(document)}; {hint}")


def _places(value: Value, path: str) -> Iterator[tuple[str, Place]]:
    yield path, value.place
    if isinstance(value, Items):
        for i, item in enumerate(value.items):
            yield from _places(item, f"{path}[{i}]")
    elif isinstance(value, Entries):
        for key, _, entry in value.walk():
            if not is_unset(entry):
                yield from _places(entry, f"{path}.{key}" if path else key)


def _refuse(problems: list[Problem], mistakes: Iterable[tuple[str, str]], reading: Reading) -> None:
    """Raise `JobError` if there are problems or mistakes, with at most one mistake per path."""
    first: dict[str, str] = {}
    for path, text in mistakes:
        if path not in reading.refused - {""}:  # a refused path has a problem already; "" is the whole file
            first.setdefault(path, text)
    for path, text in first.items():  # a shorthand, such as `restarts: 3`, has the place of its section
        known = next(each for each in (path, path.rpartition(".")[0], "") if each in reading.places)
        problems.append(reading.places[known].problem(path, text))
    if problems:
        raise JobError(sorted(set(problems), key=lambda problem: (problem.line, problem.column, *problem)))


def _job(reading: Reading, known: Record, source: str) -> spec.JobSpec:
    """Return the job, including its `built` keys. Requires that no key was refused."""
    checked, around = reading.checked, reading.around
    pool = Pool(checked, around)
    return spec.JobSpec(
        name=checked.get("name") or around.name or os.path.splitext(os.path.basename(source))[0],
        nodes=pool.nodes(),
        program=_program(reading)._replace(
            workdir=around.on_node(checked.get("workdir", ".")),
            env=around.variables(checked.get("env")),
            python=around.interpreter(checked.get("python")),
            **known.fields_of(checked, spec.Program),
        ),
        logs=_logs(reading),
        rendezvous=_rendezvous(reading),
        limits=keys.TIMEOUTS.made(reading.section("timeouts"))._replace(
            **known.fields_of(checked, spec.Limits),
            **({"join_s": None} if reading.section("rendezvous").get("backend") == "none" else {}),
        ),
        restarts=_restarts(reading),
        membership=spec.Membership(
            pool.spares(),
            **known.fields_of(checked, spec.Membership),
            **keys.ELASTIC.fields_of(reading.section("elastic")),
        ),
        allocation=pool.allocation,
        placement=spec.Placement(binding=_binding(reading), **known.fields_of(checked, spec.Placement)),
        notify=_notify(reading),
        metrics=around.path(checked["metrics"]["file"]) if checked.get("metrics") else None,
        unchecked=_unchecked(reading),
        sync=_sync(reading),
        setup=_setup(reading),
        collect=_collect(reading),
        container=_container(reading),
        mpirun=spec.Mpirun(_mpirun(reading)),
        ssh=pool.ssh,
        sections={
            key: each.kind.made(checked[key]) for key, each in around.sections.items() if key in checked
        },
        places=reading.places,
        source=source,
        invocation=spec.Invocation(file=around.file),
        **known.fields_of(checked),
    )


def _program(reading: Reading) -> spec.Program:
    """Return the program with its kind and words. The caller adds the keys that all kinds share."""
    checked = reading.checked
    if "module" in checked:
        return spec.Program("module", (checked["module"],))
    if "command" in checked:
        first, *rest = checked["command"]
        return spec.Program("command", (first, *rest), placed="/" in first)  # otherwise looked up in PATH
    script = checked["script"] if "script" in checked else checked["nodes"][0]["script"]
    return spec.Program("script", (script,), placed=True)


def _rendezvous(reading: Reading) -> spec.RendezvousSpec:
    given = reading.section("rendezvous")
    made = spec.RendezvousSpec(**keys.RENDEZVOUS.fields_of(given))
    if keys.RENDEZVOUS.value(given, "backend") == "etcd-v2":
        return made._replace(etcd=spec.Etcd(given["endpoint"], given.get("conf") or {}))
    host, port = endpoint_of(reading.checked)
    return made._replace(host=host, port=port)


def _logs(reading: Reading) -> spec.Logs:
    logs = reading.section("logs")
    place = reading.around.on_node if reading.around.in_image else reading.around.path
    return spec.Logs(place(keys.LOGS.value(logs, "dir")), **keys.LOGS.fields_of(logs))


def _notify(reading: Reading) -> spec.Notify:
    made: spec.Notify = keys.NOTIFY.made(reading.section("notify"))
    if not made.command or "/" not in made.command[0]:
        return made  # looked up in PATH on this machine
    first, *rest = made.command
    return made._replace(command=(reading.around.path(first), *rest))


def _unchecked(reading: Reading) -> tuple[spec.Checked, ...]:
    skip = reading.section("checks").get("skip", ())
    return get_args(spec.Checked) if skip == "all" else tuple(skip)


def _sync(reading: Reading) -> spec.Sync:
    given = reading.section("sync")
    files = tuple(map(reading.around.path, reading.checked.get("files") or ()))
    made: spec.Sync = keys.SYNC.made(given)
    return made._replace(tree=is_synced(reading), files=files)


def _setup(reading: Reading) -> spec.Setup | None:
    given = reading.checked.get("setup")
    if given is None:
        return None
    if given in ("uv", "conda"):
        return spec.Setup(given)
    if "run" not in given:
        return spec.Setup("controller")
    return spec.Setup("run", given["run"], tuple(given.get("key") or ()))


def _collect(reading: Reading) -> spec.Collect:
    given = reading.checked.get("collect", ())
    made: spec.Collect = keys.COLLECT.made({"paths": given} if isinstance(given, tuple) else given)
    return made


def _mpirun(reading: Reading) -> tuple[str, ...]:
    default = "mpirun" if reading.checked.get("launcher") == "mpirun" else ()
    given = reading.checked.get("mpirun", default)
    return (given,) if isinstance(given, str) else tuple(given)


def _container(reading: Reading) -> Container | None:
    section = reading.section("container")
    if not section:
        return None
    runtime = keys.CONTAINER.value(section, "runtime")
    # A list has options before the subcommand: [podman, --remote]. `checks.py` refuses other runtimes.
    name, *before = (runtime,) if isinstance(runtime, str) else runtime
    mounts = (mount.partition(":") for mount in section.get("mounts", ()))
    return Container(
        image=section["image"],
        runtime=name,  # type: ignore[arg-type]
        mounts=tuple(f"{reading.around.on_node(source)}{colon}{inside}" for source, colon, inside in mounts),
        before=tuple(before),
        **keys.CONTAINER.fields_of(section),
    )


def _restarts(reading: Reading) -> spec.Restarts:
    given = reading.section("restarts")
    made: spec.Restarts = keys.RESTARTS.made(given)
    elastic = "min_nodes" in reading.checked or bool(reading.checked.get("spares"))
    return made._replace(most=spec.ELASTIC_RESTARTS) if elastic and "max" not in given else made


def _binding(reading: Reading) -> spec.Binding | None:
    listed = reading.checked.get("cpu_binding")
    if isinstance(listed, tuple):
        return spec.Binding("listed", tuple(map(str, listed)))
    how = reading.checked.get("numa_binding") or listed
    return spec.Binding(how) if how else None
