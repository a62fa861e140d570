"""The batch script of a job, as a person might have written it: for `submit` and `export slurm`."""

import re
import shlex
from collections.abc import Iterator

from distlaunch.agent.frozen import Frozen
from distlaunch.allocation.slurm import count_gpus
from distlaunch.job.spec import JobSpec
from distlaunch.job.types import seconds_in

KILLED = 137
"""Exit status of a command that SIGKILL has ended, as a shell has it."""
TRAP = ("", "# The signals that announce an end are distlaunch's to handle.", "trap : INT TERM USR1 USR2")
_PLAIN = ("partition", "account", "qos", "constraint", "gres", "mem", "cpus_per_task")
_MORE = ("nodelist", "exclude", "dependency", "signal", "comment")


class Call(Frozen):
    """The command that the script runs: its words, and what it reads from its standard input, if anything."""

    words: tuple[str, ...]
    stdin: str | None = None


def batch_script(spec: JobSpec, call: Call) -> str:
    """For sbatch. `spec` is the job as it is to be submitted, `call` what runs it."""
    head = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(spec))]
    setup = ["", *spec.slurm.setup] if spec.slurm.setup else []
    return "\n".join([*head, *TRAP, *setup, "", *run_lines(call), *_requeue(spec), ""])


def node_count(spec: JobSpec) -> int:
    """How many nodes the job is to get."""
    return spec.slurm.nodes or (len(spec.nodes) if "nodes" in spec.places else 1)


def output_path(folder: str, job: str, scheduler: str = "slurm") -> str:
    """Where what the script prints goes: into the folder of the runs, by the job's id."""
    return f"{folder}/{scheduler}-{job}.out"


def _options(spec: JobSpec) -> Iterator[str]:
    asked = spec.slurm
    yield _option("job-name", " ".join(spec.name.split()))  # a directive ends with its line
    yield _option("nodes", node_count(spec))
    yield from _of_each_node(spec)
    yield from _given(spec, _PLAIN)
    if asked.time is not None:
        yield _option("time", slurm_time(asked.time))
    if asked.exclusive:
        yield "--exclusive"
    yield from _given(spec, _MORE)
    # Elsewhere in it a % would begin a pattern of Slurm's, too.
    yield _option("output", output_path(spec.logs.folder.replace("%", "%%"), "%j"))
    yield "--open-mode=append"
    yield "--requeue" if spec.restarts.requeue else "--no-requeue"
    if spec.elastic or "spares" in spec.places:
        yield "--no-kill"
    yield from asked.extra


def _of_each_node(spec: JobSpec) -> Iterator[str]:
    node, asked = spec.nodes[0], spec.slurm
    gpus = node.gpus if asked.gpus is None else asked.gpus
    if gpus and not asked.gres:
        yield _option("gpus-per-node", gpus)
    if workers := node.procs or count_gpus(str(gpus or "")):
        yield _option("ntasks-per-node", workers)


def _given(spec: JobSpec, fields: tuple[str, ...]) -> Iterator[str]:
    for field in fields:
        value = getattr(spec.slurm, field)
        if value is not None:
            yield _option(field.replace("_", "-"), value)


def _option(name: str, value: object) -> str:
    """As a line of #SBATCH has it, which takes quotes as a shell does."""
    return f"--{name}={shlex.quote(str(value))}"


def slurm_time(text: str) -> str:
    """`1d12h` → `1-12:00:00`; what is Slurm's already stays."""
    seconds = seconds_in(text)
    if seconds is None:
        return text
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour:02}:{minute:02}:{second:02}"
    return f"{days}-{clock}" if days else clock


def run_lines(call: Call) -> list[str]:
    """The lines of a script that run it."""
    line = shlex.join(call.words)
    if call.stdin is None:
        return [line]
    end = "END_OF_JOB"
    while re.search(rf"^{end}$", call.stdin, re.MULTILINE):
        end += "_"
    return [f"{line} <<'{end}'", call.stdin.rstrip("\n"), end]


def _requeue(spec: JobSpec) -> list[str]:
    """distlaunch has the job requeued itself, unless it was killed."""
    if not spec.restarts.requeue:
        return []
    again = f'[ "${{SLURM_RESTART_COUNT:-0}}" -lt {spec.restarts.requeue} ]'
    return [
        "status=$?",
        "# distlaunch requeues the job itself, unless it was killed.",
        f'[ $status -ne {KILLED} ] || ! {again} || scontrol requeue "$SLURM_JOB_ID"',
        "exit $status",
    ]
