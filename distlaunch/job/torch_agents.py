"""What a job file may not ask for when torch's elastic agents assign its ranks."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from distlaunch.job.fields import LOGS, RENDEZVOUS
from distlaunch.job.hosts import parse_endpoint
from distlaunch.job.placeholders import placeholders_in

Note = Callable[[str, str], None]
"""Notes a problem with what stands at a path."""


def check_torch_agents(job: Mapping[str, Any], note: Note) -> None:
    """Note every key of the checked `job` that its rendezvous backend can't serve."""
    rendezvous = job.get("rendezvous") or {}
    backend = RENDEZVOUS.value(rendezvous, "backend")
    if backend is None:
        return  # it is refused itself
    if backend == "static":
        if "conf" in rendezvous:
            note("rendezvous.conf", "conf works only with torch's elastic agents: backend c10d or etcd-v2")
        return
    for path, text in (*_impossible(job), *_unfillable(job), *_wrong_conf(rendezvous.get("conf") or {})):
        note(path, f"{text} (rendezvous.backend is {backend})")
    if backend == "etcd-v2":
        _check_etcd(job, rendezvous, note)


def _impossible(job: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if job.get("spares"):
        yield (
            "spares",
            "torch's elastic agents don't support spares: list the hosts in nodes, and set min_nodes",
        )
    if "grow" in (job.get("elastic") or {}):
        yield "elastic.grow", "torch's elastic agents always take in a node at once"
    if job.get("on_stall") == "restart":
        yield "on_stall", "torch's elastic agents restart only workers that fail: use notice or stop"
    for key in ("backoff", "window"):
        if key in (job.get("restarts") or {}):
            yield f"restarts.{key}", f"torch's elastic agents don't support {key}"
    if LOGS.value(job.get("logs") or {}, "console") not in ("all", "none"):
        yield "logs.console", "torch's elastic agents mix the output of a node's ranks: use all or none"


def _unfillable(job: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key in ("command", "args"):
        for i, word in enumerate(job.get(key) or ()):
            for name in placeholders_in([word] if word else []):  # what is not a word is noted already
                told = f"have the script read {name.upper()} instead"
                yield f"{key}[{i}]", f"torch's elastic agents choose {{{name}}}: {told}"


def _wrong_conf(conf: Mapping[str, str | None]) -> Iterator[tuple[str, str]]:
    for name, value in conf.items():
        if name == "is_host":
            yield "rendezvous.conf.is_host", "distlaunch sets is_host for each node; remove it"
        elif not value or "," in value:
            yield f"rendezvous.conf.{name}", "expected a non-empty value without commas"


def _check_etcd(job: Mapping[str, Any], rendezvous: Mapping[str, Any], note: Note) -> None:
    for key in ("master_addr", "master_port"):
        if key in job:
            note(key, "torch's elastic agents choose it; rendezvous.endpoint is your etcd server")
    if "endpoint" not in rendezvous:
        note("rendezvous.backend", "etcd-v2 needs rendezvous.endpoint: host:port of your etcd server")
        return
    try:
        whole = None not in parse_endpoint(rendezvous["endpoint"] or "")
    except ValueError:
        return  # noted where every endpoint is
    if not whole:
        note("rendezvous.endpoint", "etcd-v2 needs host:port of your etcd server, such as etcd:2379")
