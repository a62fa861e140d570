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

from distlaunch.cli.options import Args, Job, Json, Set, SshConfig
from distlaunch.cli.output import print_json, print_text, say
from distlaunch.errors import DistlaunchError, reason
from distlaunch.schedulers import TABLE, load, names, target_of

if TYPE_CHECKING:
    from distlaunch.job.spec import JobSpec
    from distlaunch.schedulers.script import Scheduler

queue = typer.Typer()
exports = typer.Typer(
    name="export",
    help="Print a batch script or manifest for the job. Nothing is submitted.",
    no_args_is_help=True,
)


class Workload(str, Enum):
    """What `export kubernetes` makes of a job."""

    job = "job"
    jobset = "jobset"
    trainjob = "trainjob"


def _known(name: str | None) -> str | None:
    """A scheduler's name; those of other packages are looked up only for one that is not in the table."""
    if name and name not in TABLE and name not in names():
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(map(repr, names()))}.")
    return name


@queue.command("submit")
def submit(
    job: Job,
    args: Args = None,
    overrides: Set = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar=f"[{'|'.join(TABLE)}]",
            callback=_known,
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
    ssh_config: SshConfig = None,
    as_json: Json = False,
) -> None:
    """Submit a job to a scheduler and print its id; ps, logs, attach, wait, stop and view take it."""
    if on is not None:
        from distlaunch.cli.remote import ssh_to, submit_on

        chosen = {"--dry-run": dry, "--wait": waits, "--json": as_json}
        options = [option for option, wanted in chosen.items() if wanted]
        options += ["--to", to] if to else []
        raise typer.Exit(submit_on(ssh_to(on, ssh_config), job, overrides or (), args or (), options))
    spec, scheduler, script = _prepared(job, overrides or (), args or (), to, True)
    if dry:
        print_text(script)
        return
    queued, kept = _submitted(spec, scheduler, script)
    if as_json:
        print_json({"id": queued, "script": str(kept)})
    else:
        print_text(f"{queued}\n")
    if waits:
        from distlaunch.cli.runs import wait_and_leave

        wait_and_leave(queued)
    if sys.stderr.isatty():
        say(f"submitted to {scheduler.title}; follow it with `distlaunch attach {queued}`")


def _export(name: str) -> None:
    """Add `export` of a batch script for that scheduler, which other commands don't load."""

    @exports.command(name, help=f"Print a batch script for {name}, to submit yourself.")
    def export(job: Job, args: Args = None, overrides: Set = None) -> None:
        print_text(_prepared(job, overrides or (), args or (), name)[-1])


for _name in TABLE:
    _export(_name)


@exports.command("kubernetes")
def export_kubernetes(
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

    from distlaunch.cli.payload import torchrun_payload
    from distlaunch.job.file import job_of, read_job
    from distlaunch.job.yaml_document import yaml_text
    from distlaunch.kubernetes.checks import check_exported, left_out, with_gpus
    from distlaunch.kubernetes.manifests import manifests
    from distlaunch.launch.addresses import plan_without_nodes

    read = job_of(read_job(job), job, overrides or (), args or (), submitted=True, in_image=True)
    spec = with_gpus(read)
    check_exported(spec)
    procs = plan_without_nodes(spec).nodes[0].procs
    for line in left_out(spec, kind.value):
        say(line)
    print_text(yaml_text(manifests(spec, kind.value, procs, b64encode(torchrun_payload()).decode())))


def _prepared(
    job: str, overrides: Sequence[str], args: Sequence[str], to: str | None, followed: bool = False
) -> tuple["JobSpec", "Scheduler", str]:
    """The job, its scheduler and its batch script; for `followed` see there. Raises `DistlaunchError`."""
    from distlaunch.here import own_command
    from distlaunch.job.file import job_of, read_job
    from distlaunch.launch.addresses import plan_without_nodes
    from distlaunch.schedulers.script import Call, check_submitted

    text = read_job(job)
    spec = job_of(text, job, overrides, args, submitted=True)
    scheduler = load(to or target_of(spec))
    check_submitted(spec, scheduler)
    plan_without_nodes(scheduler.with_gpus(spec))
    if spec.nodes[0].gpus is None and scheduler.gpus(spec) is None:
        say("no GPUs are requested: set gpus_per_node to the number of GPUs per node, or to 0 for a CPU job")
    piped = spec.invocation.piped
    settings = [word for setting in overrides for word in ("--set", setting)]
    file = "-" if piped else os.path.realpath(job)
    words = (*own_command(), "run", file, *settings, *(["--", *args] if args else []))
    return spec, scheduler, scheduler.script(spec, Call(words, text if piped else None), followed)


def _submitted(spec: "JobSpec", scheduler: "Scheduler", script: str) -> tuple[str, Path]:
    """Submit it; its ID, and where the script is kept. Raises `DistlaunchError`."""
    from distlaunch.runs.submissions import Submission, note
    from distlaunch.schedulers.queue import ToolMissingError

    folder = spec.logs.folder
    try:
        os.makedirs(folder, exist_ok=True)
        fd, path = tempfile.mkstemp(".sh", f"{scheduler.name}-", folder)
        with os.fdopen(fd, "w") as file:
            file.write(script)
    except OSError as error:
        text = f"can't write the batch script to {folder}: {reason(error)}; set logs.dir"
        raise DistlaunchError(text) from None
    try:
        queued = scheduler.submit(path)
    except BaseException as error:
        os.unlink(path)
        if isinstance(error, ToolMissingError):
            raise DistlaunchError(f"{error}, for another scheduler --to") from None
        raise
    note(Submission(queued, spec.name, folder, time.time(), scheduler=scheduler.name))
    return queued, Path(path).rename(Path(folder, f"{scheduler.name}-{queued}.sh"))
