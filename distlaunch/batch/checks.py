"""What of a job can be checked before it is submitted: a mistake would show only after hours in the queue."""

import os
from collections.abc import Iterator

from distlaunch.allocation.slurm import count_gpus
from distlaunch.errors import JobError
from distlaunch.job.paths import path_in
from distlaunch.job.spec import JobSpec


def check_submitted(spec: JobSpec) -> None:
    """Raise `JobError` for what can't work, whatever the queue gives; nodes are taken to see our files."""
    problems = [problem for path, text in _mistakes(spec) for problem in spec.error(path, text).problems]
    if problems:
        raise JobError(problems)


def with_gpus(spec: JobSpec) -> JobSpec:
    """The job with the GPUs that it asks Slurm for, where it does not say how many it uses."""
    gres = [
        part.removeprefix("gpu:") for part in (spec.slurm.gres or "").split(",") if part.startswith("gpu")
    ]
    asked = gres[0] if gres else str(spec.slurm.gpus or 0)
    known = count_gpus(asked) or 0
    nodes = tuple(node._replace(gpus=known) if node.gpus is None else node for node in spec.nodes)
    return spec._replace(nodes=nodes)


def _mistakes(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """(path in the job file, what is wrong) of each."""
    for path in ("nodes[0]", "hostfile"):
        if path in spec.places:
            number = "nodes to their number; slurm.nodelist asks for certain hosts"
            yield path.partition("[")[0], f"Slurm chooses the hosts: set {number}"
    if "spares" in spec.places and not spec.slurm.nodes:
        yield "spares", "set slurm.nodes to the number of all nodes, spares included"
    if not spec.slurm.setup:  # which may make what is missing
        yield from _missing(spec)


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
