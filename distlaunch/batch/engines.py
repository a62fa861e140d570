"""The batch scripts of a job for Grid Engine and for PBS: for `submit` and `export`."""

import os.path
import re
import shlex
from collections.abc import Iterator

from distlaunch.batch.script import TRAP, Call, output_path, run_lines
from distlaunch.job.spec import JobSpec
from distlaunch.job.types import seconds_in

MAX_NAME = 200


def grid_engine_script(spec: JobSpec, call: Call, followed: bool = False) -> str:
    """For Grid Engine's qsub. `spec` is the job as it is to be submitted, `call` what runs it.

    Of a job that is to be `followed` the output goes to the folder of its runs, and `stop` gives it notice.
    It begins in the folder where it was submitted, as a job of Slurm's does.
    """
    return _script("#$", _grid_engine_options(spec, followed), spec.grid_engine.setup, call)


def pbs_script(spec: JobSpec, call: Call, followed: bool = False) -> str:
    """For the qsub of PBS Professional and OpenPBS; otherwise the same."""
    before = _pbs_beginning(spec) if followed else ()
    return _script("#PBS", _pbs_options(spec, followed), spec.pbs.setup, call, before)


def workers(spec: JobSpec, gpus: int | None = None) -> int:
    """Workers of each node, as far as the job says; else 1."""
    node = spec.nodes[0]
    return node.procs or node.gpus or gpus or 1


def _script(
    mark: str, options: Iterator[str], setup: tuple[str, ...], call: Call, before: tuple[str, ...] = ()
) -> str:
    head = ["#!/bin/bash", *(f"{mark} {option}" for option in options), *before]
    return "\n".join([*head, *TRAP, *(["", *setup] if setup else []), "", *run_lines(call), ""])


def _grid_engine_options(spec: JobSpec, followed: bool) -> Iterator[str]:
    asked, node = spec.grid_engine, spec.nodes[0]
    yield "-S /bin/bash"
    yield f"-N {_name(spec.name)}"
    if asked.pe is not None:
        slots = (asked.slots or workers(spec)) * _nodes(spec, asked.nodes)
        yield f"-pe {shlex.quote(asked.pe)} {slots}"
    if gpus := asked.gpus or (f"gpu={node.gpus}" if node.gpus else ""):
        yield f"-l {shlex.quote(gpus)}"
    for flag, value in (("-q", asked.queue), ("-P", asked.project)):
        if value is not None:
            yield f"{flag} {shlex.quote(value)}"
    if asked.time is not None:
        yield f"-l h_rt={clock(asked.time)}"
    yield "-j y"
    output = output_path(spec.logs.folder, "$JOB_ID", "grid-engine")
    yield f"-o {shlex.quote(output if followed else _folder(spec) + '/$JOB_NAME.o$JOB_ID')}"
    yield "-r n"
    if followed:
        yield "-cwd"
    if followed or "on_notice" in spec.places:
        yield "-notify"
    yield from asked.extra


def _pbs_options(spec: JobSpec, followed: bool) -> Iterator[str]:
    asked = spec.pbs
    yield f"-N {_name(spec.name)}"
    yield f"-l select={shlex.quote(asked.select or _select(spec))}"
    if asked.select is None:
        yield "-l place=scatter"
    if asked.time is not None:
        yield f"-l walltime={clock(asked.time)}"
    for flag, value in (("-q", asked.queue), ("-P", asked.project), ("-A", asked.account)):
        if value is not None:
            yield f"{flag} {shlex.quote(value)}"
    if followed:
        yield "-S /bin/bash"  # else it may be the login shell, whichever that is
    yield "-j oe"
    yield f"-o {shlex.quote((spec.logs.folder if followed else _folder(spec)) + '/')}"
    yield "-r n"
    yield from asked.extra


def _pbs_beginning(spec: JobSpec) -> tuple[str, ...]:
    folder, name = output_path(shlex.quote(spec.logs.folder), '"$PBS_JOBID"', "pbs").rsplit("/", 1)
    told = "# PBS itself shows what a job prints only when it has ended."
    return "", told, f"exec >>{folder}/{name} 2>&1", 'cd "$PBS_O_WORKDIR"'


def _select(spec: JobSpec) -> str:
    asked, node = spec.pbs, spec.nodes[0]
    gpus = node.gpus if asked.gpus is None else asked.gpus
    each = workers(spec, gpus)
    parts = [str(_nodes(spec, asked.nodes)), f"ncpus={asked.cpus or each}", f"mpiprocs={each}"]
    parts += [f"ngpus={gpus}"] if gpus else []
    parts += [f"mem={asked.mem}"] if asked.mem is not None else []
    return ":".join(parts)


def _nodes(spec: JobSpec, asked: int | None) -> int:
    return asked or (len(spec.nodes) if "nodes" in spec.places else 1)


def _folder(spec: JobSpec) -> str:
    """Where the output goes: both want a folder that exists."""
    return os.path.expanduser(spec.workdir)


def _name(name: str) -> str:
    """As both take it: no blanks, a letter first."""
    plain = re.sub(r"[^A-Za-z0-9_.+-]", "_", name)[:MAX_NAME]
    return plain if plain[:1].isalpha() else f"job_{plain}"


def clock(text: str) -> str:
    """`1d12h` → `36:00:00`; what is a clock already stays."""
    seconds = seconds_in(text)
    if seconds is None:
        return text
    minutes, second = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"
