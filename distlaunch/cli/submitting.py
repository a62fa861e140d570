"""`submit` and `export`: a job for a scheduler's queue."""

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distlaunch.cli.options import Args, Job, Set, check_dashes
from distlaunch.cli.output import print_json, print_text, say
from distlaunch.errors import DistlaunchError, reason

if TYPE_CHECKING:
    from distlaunch.batch.checks import Target
    from distlaunch.batch.script import Call
    from distlaunch.job.spec import JobSpec

queue = typer.Typer()
exports = typer.Typer(
    name="export",
    help="Print a batch script or manifest for the job. Nothing is submitted.",
    no_args_is_help=True,
)


class Scheduler(str, Enum):
    """Whose queue `submit` submits to."""

    slurm = "slurm"
    grid_engine = "grid-engine"
    pbs = "pbs"


class Workload(str, Enum):
    """What `export kubernetes` makes of a job."""

    job = "job"
    jobset = "jobset"
    trainjob = "trainjob"


@queue.command("submit")
def submit(
    context: typer.Context,
    job: Job,
    args: Args = None,
    overrides: Set = None,
    to: Annotated[
        Scheduler | None,
        typer.Option(
            "--to",
            help="The scheduler; by default the one that the job file has a section for, else Slurm.",
            show_default=False,
        ),
    ] = None,
    dry: Annotated[bool, typer.Option("--dry-run", help="Print the batch script; submit nothing.")] = False,
    waits: Annotated[
        bool, typer.Option("--wait", help="Wait until the job ends, and exit with its exit status.")
    ] = False,
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="HOST", help="Submit on HOST, such as a login node, reached over ssh."),
    ] = None,
    ssh_config: Annotated[
        str | None,
        typer.Option(
            "--ssh-config", metavar="FILE", help="The ssh_config file to reach HOST with, as with ssh -F."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the id and the script as JSON.")] = False,
) -> None:
    """Submit a job to a scheduler and print its id; ps, logs, attach, wait, stop and view take it."""
    check_dashes(context.obj, args)
    if on is not None:
        from distlaunch.cli.remote import ssh_to, submit_on

        chosen = {"--dry-run": dry, "--wait": waits, "--json": as_json}
        options = [option for option, wanted in chosen.items() if wanted]
        options += ["--to", to.value] if to else []
        raise typer.Exit(submit_on(ssh_to(on, ssh_config), job, overrides or (), args or (), options))
    spec, target, script = _prepared(job, overrides or (), args or (), to.value if to else None, True)
    if dry:
        print_text(script)
        return
    queued, kept = _submitted(spec, target, script)
    if as_json:
        print_json({"id": queued, "script": str(kept)})
    else:
        print_text(f"{queued}\n")
    if waits:
        raise typer.Exit(_waited(queued))
    if sys.stderr.isatty():
        from distlaunch.allocation.allocation import title_of

        say(f"submitted to {title_of(target)}; follow it with `distlaunch attach {queued}`")


@exports.command("slurm")
def export_slurm(context: typer.Context, job: Job, args: Args = None, overrides: Set = None) -> None:
    """Print the batch script that `submit` would submit to Slurm."""
    check_dashes(context.obj, args)
    print_text(_prepared(job, overrides or (), args or (), "slurm")[-1])


@exports.command("grid-engine")
def export_grid_engine(context: typer.Context, job: Job, args: Args = None, overrides: Set = None) -> None:
    """Print a batch script for Grid Engine's qsub."""
    check_dashes(context.obj, args)
    print_text(_prepared(job, overrides or (), args or (), "grid-engine")[-1])


@exports.command("pbs")
def export_pbs(context: typer.Context, job: Job, args: Args = None, overrides: Set = None) -> None:
    """Print a batch script for the qsub of PBS Professional and OpenPBS."""
    check_dashes(context.obj, args)
    print_text(_prepared(job, overrides or (), args or (), "pbs")[-1])


@exports.command("kubernetes")
def export_kubernetes(
    context: typer.Context,
    job: Job,
    args: Args = None,
    kind: Annotated[
        Workload,
        typer.Option("--kind", help="An indexed Job, a JobSet, or a TrainJob for Kubeflow Trainer."),
    ] = Workload.job,
    overrides: Set = None,
) -> None:
    """Print the job's Kubernetes manifests, for `kubectl apply -f -`."""
    from base64 import b64encode

    from distlaunch.kubernetes.checks import check_exported, left_out, with_gpus
    from distlaunch.kubernetes.manifests import manifests
    from distlaunch.launch.addresses import plan_without_nodes
    from distlaunch.system.job_file import job_of, read_job
    from distlaunch.system.payload import torchrun_payload
    from distlaunch.system.yaml_document import yaml_text

    check_dashes(context.obj, args)
    read = job_of(read_job(job), job, overrides or (), args or (), submitted=True, in_image=True)
    spec = with_gpus(read)
    check_exported(spec)
    procs = plan_without_nodes(spec).nodes[0].procs
    for line in left_out(spec, kind.value):
        say(line)
    print_text(yaml_text(manifests(spec, kind.value, procs, b64encode(torchrun_payload()).decode())))


def _prepared(
    job: str, overrides: Sequence[str], args: Sequence[str], to: "Target | None", followed: bool = False
) -> "tuple[JobSpec, Target, str]":
    """The job, its scheduler and its batch script; for `followed` see there. Raises `DistlaunchError`."""
    from distlaunch.batch.checks import check_submitted, says_no_gpus, target_of, with_gpus
    from distlaunch.batch.script import Call
    from distlaunch.launch.addresses import plan_without_nodes
    from distlaunch.system.here import own_command
    from distlaunch.system.job_file import job_of, read_job

    text = read_job(job)
    spec = job_of(text, job, overrides, args, submitted=True)
    target = to or target_of(spec)
    check_submitted(spec, target)
    plan_without_nodes(with_gpus(spec, target))
    if says_no_gpus(spec, target):
        say("no GPUs are requested: set gpus_per_node to the number of GPUs per node, or to 0 for a CPU job")
    piped = spec.invocation.piped
    settings = [word for setting in overrides for word in ("--set", setting)]
    file = "-" if piped else os.path.realpath(job)
    words = (*own_command(), "run", file, *settings, *(["--", *args] if args else []))
    return spec, target, _script(spec, Call(words, text if piped else None), target, followed)


def _script(spec: "JobSpec", call: "Call", target: "Target", followed: bool) -> str:
    from distlaunch.batch import engines, script

    match target:
        case "slurm":
            return script.batch_script(spec, call)
        case "grid-engine":
            return engines.grid_engine_script(spec, call, followed)
        case "pbs":
            return engines.pbs_script(spec, call, followed)


def _submitted(spec: "JobSpec", target: "Target", script: str) -> tuple[str, Path]:
    """Submit it; its id, and where the script is kept. Raises `DistlaunchError`."""
    from distlaunch.batch.queue import ToolMissingError
    from distlaunch.batch.queues import queue_of
    from distlaunch.runs.submissions import Submission, note

    written = _written(script, spec.logs.folder, target)
    try:
        queued = queue_of(target).submit(str(written))
    except ToolMissingError as error:
        written.unlink()
        raise DistlaunchError(f"{error}, for another scheduler --to") from None
    except BaseException:
        written.unlink()
        raise
    note(Submission(queued, spec.name, spec.logs.folder, time.time(), scheduler=target))
    return queued, written.rename(Path(spec.logs.folder, f"{target}-{queued}.sh"))


def _written(script: str, folder: str, target: "Target") -> Path:
    try:
        os.makedirs(folder, exist_ok=True)
        fd, name = tempfile.mkstemp(".sh", f"{target}-", folder)
        with os.fdopen(fd, "w") as file:
            file.write(script)
    except OSError as error:
        text = f"can't write the batch script to {folder}: {reason(error)}; set logs.dir"
        raise DistlaunchError(text) from None
    return Path(name)


def _waited(queued: str) -> int:
    from distlaunch.cli.runs import ended_words, follow_each, status_of
    from distlaunch.runs.following import wait

    run, signum = follow_each(queued, wait)
    if run.alive:
        return 128 + signum
    if status := status_of(run):
        say(ended_words(run))
    return status
