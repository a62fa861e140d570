"""What of a job can be checked before it is submitted: a mistake would show only after hours in the queue."""

import os
from collections.abc import Iterator
from typing import Literal, get_args

from distlaunch.allocation.allocation import TITLES
from distlaunch.allocation.slurm import count_gpus
from distlaunch.job.engine_options import GridEngineOptions, PbsOptions
from distlaunch.job.slurm_options import SlurmOptions
from distlaunch.job.spec import JobSpec
from distlaunch.job.text import path_in

Target = Literal["slurm", "grid-engine", "pbs"]
"""A scheduler that a job can be written for."""
TARGETS: tuple[Target, ...] = get_args(Target)


def check_submitted(spec: JobSpec, target: Target = "slurm") -> None:
    """Raise `JobError` for what can't work, whatever the queue gives; nodes are taken to see our files."""
    spec.refuse(_mistakes(spec, target))


def target_of(spec: JobSpec) -> Target:
    """The only one that the job has a section for; else Slurm."""
    named = [target for target in TARGETS if section_of(target) in spec.places]
    return named[0] if len(named) == 1 else "slurm"


def section_of(target: Target) -> str:
    """Its key in a job file."""
    return target.replace("-", "_")


def with_gpus(spec: JobSpec, target: Target = "slurm") -> JobSpec:
    """The job with the GPUs that it asks its scheduler for, where it does not say how many it uses."""
    return spec.with_gpus(_asked_gpus(spec, target))


def says_no_gpus(spec: JobSpec, target: Target) -> bool:
    """Whether neither the job nor what it asks of the scheduler has a word on GPUs."""
    asked = options_for(spec, target)
    requests = (asked.gpus, getattr(asked, "gres", None), getattr(asked, "select", None))
    return spec.nodes[0].gpus is None and requests[0] is None and not any(requests[1:])


def options_for(spec: JobSpec, target: Target) -> SlurmOptions | GridEngineOptions | PbsOptions:
    """What the job asks of that scheduler."""
    match target:
        case "slurm":
            return spec.slurm
        case "grid-engine":
            return spec.grid_engine
        case "pbs":
            return spec.pbs


def _asked_gpus(spec: JobSpec, target: Target) -> int:
    if target != "slurm":
        return spec.pbs.gpus or 0 if target == "pbs" else 0
    gres = [
        part.removeprefix("gpu:") for part in (spec.slurm.gres or "").split(",") if part.startswith("gpu")
    ]
    asked = gres[0] if gres else str(spec.slurm.gpus or 0)
    return count_gpus(asked) or 0


def _mistakes(spec: JobSpec, target: Target) -> Iterator[tuple[str, str]]:
    """(path in the job file, what is wrong) of each."""
    title, asked, section = TITLES[target], options_for(spec, target), section_of(target)
    for path in ("nodes[0]", "hostfile"):
        if path in spec.places:
            more = "; slurm.nodelist asks for certain hosts" if target == "slurm" else ""
            yield path.partition("[")[0], f"{title} chooses the hosts: set nodes to the number of nodes{more}"
    if "spares" in spec.places and not asked.nodes:
        yield "spares", f"set {section}.nodes to the number of all nodes, spares included"
    if target != "slurm" and spec.restarts.requeue:
        yield "restarts.requeue", f"only Slurm can be asked to start a job again, not {title}"
    if target == "grid-engine" and not spec.grid_engine.pe and _slots(spec) > 1:
        yield "grid_engine.pe", "name a parallel environment: `qconf -spl` lists them"
    if not asked.setup:  # which may make what is missing
        yield from _missing(spec)


def _slots(spec: JobSpec) -> int:
    node, asked = spec.nodes[0], spec.grid_engine
    return (asked.slots or node.procs or node.gpus or 1) * (asked.nodes or len(spec.nodes))


def _missing(spec: JobSpec) -> Iterator[tuple[str, str]]:
    workdir = os.path.expanduser(spec.workdir)
    if not os.path.isdir(workdir):
        yield "workdir", f"{workdir} does not exist"
        return
    program = spec.program
    script = os.path.expanduser(path_in(workdir, program.words[0]))
    if program.placed and not os.path.isfile(script):
        yield ("command" if program.kind == "command" else program.kind), f"{script} does not exist"
    python = "" if spec.container else spec.python or ""  # that of an image can't be seen from here
    if "/" in python and not os.path.isfile(os.path.expanduser(python)):
        yield "python", f"{python} does not exist"
