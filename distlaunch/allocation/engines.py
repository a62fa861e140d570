"""What Grid Engine, PBS, LSF and Flux tell their jobs: hosts and slots, as each writes them down.

See sge_pe(5), qsub(1B), LSF's "Environment variables set for job execution" and flux-environment(7).
"""

import re
from collections.abc import Iterable, Mapping
from typing import Literal

from distlaunch.allocation.allocation import TITLES, AllocatedNode, Allocation
from distlaunch.wording import MAX_HOSTS

Engine = Literal["grid-engine", "pbs", "lsf", "flux"]
Slots = Iterable[tuple[str, int]]
"""Hosts, each with its slots there; one that comes again adds them up."""
MAX_SLOTS = 1_000_000
"""More than this on one host is no count."""
_HOST = r"[A-Za-z0-9_][A-Za-z0-9_.:%\-]*"


def engine_allocation(engine: Engine, environ: Mapping[str, str], listed: str) -> Allocation:
    """The allocation of a job of that engine. Raises ValueError for a list that is none."""
    match engine:
        case "grid-engine":
            job, slots = _grid_engine_job(environ), _grid_engine_slots(environ, listed)
        case "pbs":
            job, slots = environ["PBS_JOBID"], ((line, 1) for line in _lines(listed))
        case "lsf":
            job, slots = _lsf_job(environ), _lsf_slots(environ, listed)
        case "flux":
            # A batch script's own instance has no variable for the id.
            job, slots = environ.get("FLUX_JOB_ID", ""), ((host, 1) for host in listed.split())
    counts = _summed(slots)
    if not counts:
        raise ValueError(f"{TITLES[engine]} lists no hosts")
    told, gpus = engine != "flux", granted_gpus(environ)  # Flux lists no slots
    nodes = (AllocatedNode(host, gpus, count if told else None) for host, count in counts.items())
    return Allocation(engine, job, tuple(nodes), _is_queued(engine, job, environ))


def _is_queued(engine: Engine, job: str, environ: Mapping[str, str]) -> bool:
    """Whether it is a batch job, and not one of an array: that is known in its queue by another id."""
    if engine == "grid-engine":
        # Of an interactive one it is QRSH or QLOGIN. ENVIRONMENT=BATCH, as in submit(1), is not set by 8.1.9.
        return environ.get("JOB_SCRIPT", "").startswith("/") and job.isdecimal()
    return engine == "pbs" and environ.get("PBS_ENVIRONMENT") == "PBS_BATCH" and "[" not in job


def granted_gpus(environ: Mapping[str, str]) -> int | None:
    """GPUs that the job was given on this host, as on each; None = its environment does not say."""
    for name in ("SGE_HGR_gpu", "SGE_HGR_GPU", "CUDA_VISIBLE_DEVICES"):
        if name in environ:
            ids = re.split(r"[,\s]+", environ[name].strip())
            return len([each for each in ids if each and not each.startswith(("-", "No"))])
    return None


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _summed(slots: Slots) -> dict[str, int]:
    counts: dict[str, int] = {}
    for host, count in slots:
        if not re.fullmatch(_HOST, host):
            raise ValueError(f'"{host[:60]}" is not a valid host name')
        counts[host] = counts.get(host, 0) + count
        if len(counts) > MAX_HOSTS:
            raise ValueError(f"more than {MAX_HOSTS} hosts")
    return counts


def _count(text: str, line: str) -> int:
    if not re.fullmatch("[0-9]{1,7}", text) or not 0 < int(text) <= MAX_SLOTS:
        raise ValueError(f'"{line[:60]}" does not name a host and its slots')
    return int(text)


def _grid_engine_job(environ: Mapping[str, str]) -> str:
    task = environ.get("SGE_TASK_ID", "undefined")
    return environ["JOB_ID"] + ("" if task in ("", "undefined") else f".{task}")


def _grid_engine_slots(environ: Mapping[str, str], listed: str) -> Slots:
    """`host slots queue processors` in each line; a host is in a line for each of its queues."""
    if not environ.get("PE_HOSTFILE"):
        yield environ["HOSTNAME"], 1
    for line in _lines(listed):
        host, *rest = line.split()
        yield host, _count(rest[0] if rest else "", line)


def _lsf_job(environ: Mapping[str, str]) -> str:
    index = environ.get("LSB_JOBINDEX", "0")
    return environ["LSB_JOBID"] + ("" if index in ("", "0") else f"[{index}]")


def _lsf_slots(environ: Mapping[str, str], listed: str) -> Slots:
    """`host slots host slots …` in LSB_MCPU_HOSTS, else a line for each slot in the file."""
    words = environ.get("LSB_MCPU_HOSTS", "").split()
    if not words:
        yield from ((line, 1) for line in _lines(listed))
    for at in range(0, len(words), 2):
        pair = words[at : at + 2]
        yield pair[0], _count(pair[-1] if len(pair) == 2 else "", " ".join(pair))
