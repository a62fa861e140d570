"""`submit` and `export`: prepare a job for a scheduler's queue or a cluster."""

import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from distlaunch.cli.job_file import job_of, read_job
from distlaunch.cli.options import Args, Job, Json, NoCheck, Set, SshConfig
from distlaunch.cli.output import print_json, print_text, say
from distlaunch.errors import DistlaunchError, reason
from distlaunch.here import own_command
from distlaunch.job.document import flow_text
from distlaunch.job.spec import JobSpec
from distlaunch.kubernetes.manifests import Kind, manifests
from distlaunch.launch.addresses import plan_without_nodes
from distlaunch.schedulers import TABLE, load, names, target_of
from distlaunch.schedulers.base import Call, Scheduler, check_submitted

exports = typer.Typer(
    name="export",
    help="Print a batch script or manifest for the job, without submitting it.",
    no_args_is_help=True,
)


def _known(name: str | None) -> str | None:
    """Check the name of a scheduler. Other packages are searched only if the name isn't in the table."""
    if name and name not in TABLE and name not in names():
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(map(repr, names()))}.")
    return name


_UNANSWERED = r"(?i)timed out|did not answer|Zero Bytes were|unexpected output"
"""Messages of a scheduler's command whose request may have been carried out nonetheless."""
_METAVAR = f"[{'|'.join(TABLE)}]"
_TO = "The scheduler. Default: the one with a section in the job file, else Slurm."
To = Annotated[str | None, Option("--to", metavar=_METAVAR, callback=_known, help=_TO, show_default=False)]
Dry = Annotated[bool, Option("--dry-run", help="Print the batch script without submitting it.")]
Waits = Annotated[bool, Option("--wait", help="Wait until the job ends, and exit with its exit status.")]
_ON = "Submit the job on HOST, such as a login node, over SSH."
On = Annotated[str | None, Option("--on", metavar="HOST", help=_ON)]


def submit(
    job: Job,
    args: Args = None,
    overrides: Set = None,
    to: To = None,
    dry: Dry = False,
    waits: Waits = False,
    on: On = None,
    ssh_config: SshConfig = None,
    as_json: Json = False,
    unchecked: NoCheck = False,
) -> None:
    """Submit a job to a scheduler and print its ID, which ps, logs, attach, wait, stop and view accept."""
    from distlaunch.cli.run import settings_of

    settings = settings_of(overrides, unchecked=unchecked)
    if on is not None:
        from distlaunch.cli.remote import submit_on

        chosen = {"--dry-run": dry, "--wait": waits, "--json": as_json}
        options = [option for option, wanted in chosen.items() if wanted]
        options += ["--to", to] if to else []
        raise typer.Exit(submit_on(on, ssh_config, job, settings, args or (), options))
    spec, scheduler, script = _prepared(job, settings, args or (), to, True)
    if dry:
        print_text(script)
        return
    queued, kept = _submitted(spec, scheduler, script)
    if as_json:
        print_json({"id": queued, "script": str(kept)})
    else:
        print_text(f"{queued}\n")
    if waits:
        from distlaunch.cli.runs import wait

        wait(queued)  # exits
    if sys.stderr.isatty():
        say(f"submitted to {scheduler.title}; follow it with `distlaunch attach {queued}`")


def _export(name: str) -> None:
    """Add the command `export NAME` for a scheduler, whose module is loaded when the command is used."""
    title = name.upper() if len(name) == 3 else name.replace("-", " ").title()

    @exports.command(name, help=f"Print a batch script for {title} that you can submit yourself.")
    def export(job: Job, args: Args = None, overrides: Set = None) -> None:
        print_text(_prepared(job, overrides or (), args or (), name)[-1])


for _name in TABLE:
    _export(_name)


_KIND = "What to print: an Indexed Job, a JobSet, or a TrainJob for Kubeflow Trainer."
Workload = Annotated[Kind, Option("--kind", help=_KIND)]


@exports.command("kubernetes")
def export_kubernetes(
    job: Job,
    args: Args = None,
    kind: Workload = "job",
    overrides: Set = None,
) -> None:
    """Print the job's Kubernetes manifests, for `kubectl apply -f -`."""
    from base64 import b64encode

    from distlaunch.cli.own_archive import torchrun_payload
    from distlaunch.job.yaml_document import yaml_text
    from distlaunch.kubernetes.checks import check_exported, left_out, with_gpus

    read = job_of(read_job(job), job, overrides or (), args or (), submitted=True, in_image=True)
    spec = with_gpus(read)
    check_exported(spec)
    procs = plan_without_nodes(spec).nodes[0].procs
    for line in left_out(spec, kind):
        say(line)
    print_text(yaml_text(manifests(spec, kind, procs, b64encode(torchrun_payload()).decode())))


def _prepared(
    job: str, overrides: Sequence[str], args: Sequence[str], to: str | None, followed: bool = False
) -> tuple[JobSpec, Scheduler, str]:
    """Return the job, its scheduler and its batch script. `followed` is as in `Scheduler.script`.

    Raises `DistlaunchError`.
    """
    source = read_job(job)
    spec = job_of(source, job, overrides, args, submitted=True)
    scheduler = load(to or target_of(spec))
    check_submitted(spec, scheduler)
    gpus = scheduler.gpus(spec)
    unknown = spec.nodes[0].gpus is None and not gpus
    plan_without_nodes(spec.with_gpus(gpus or 0)._replace(backend="gloo" if unknown else spec.backend))
    for text in scheduler.remarks(spec):
        say(text)
    file = spec.invocation.file
    if followed and "logs.dir" in spec.places:  # ~ may be another directory where the script runs
        overrides = [*overrides, f"logs.dir={flow_text(spec.logs.directory)}"]
    settings = [word for setting in overrides for word in ("--set", setting)]
    words = (*own_command(), "run", file or "-", *settings, *(["--", *args] if args else []))
    return spec, scheduler, scheduler.script(spec, Call(words, None if file else source), followed)


def _submitted(spec: JobSpec, scheduler: Scheduler, script: str) -> tuple[str, Path]:
    """Submit the script; return the ID of the job and the path of the script. Raises `DistlaunchError`."""
    from distlaunch.observers.run_list import Ticket, index_path
    from distlaunch.runs.submissions import Submission, note, submissions
    from distlaunch.schedulers.queue import ToolMissingError

    directory, path = spec.logs.directory, ""
    try:
        os.makedirs(directory, exist_ok=True)
        if os.stat(directory).st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
            what = f"{directory} is writable by all users, who could replace the job's files"
            raise DistlaunchError(f"{what}; use chmod o-w or chmod +t, or set logs.dir to another directory")
        fd, path = tempfile.mkstemp(".sh", f"{scheduler.name}-", directory)
        with os.fdopen(fd, "wb") as file:
            file.write(os.fsencode(script))
    except OSError as error:
        if path:
            os.unlink(path)
        what = f"can't write the batch script to {directory}: {reason(error)}"
        raise DistlaunchError(f"{what}; set logs.dir to another directory") from None
    try:
        queued = scheduler.submit(path)
    except BaseException as error:
        os.unlink(path)
        if isinstance(error, ToolMissingError):
            on = "to submit from elsewhere, use --on HOST, where the PATH of SSH commands must contain it"
            raise DistlaunchError(f"{error}; {on}; for another scheduler, use --to") from None
        advice = "before you submit the job again, check whether it is in the queue"
        if re.search(_UNANSWERED, str(error)):
            raise DistlaunchError(f"{error}; {advice}") from None
        if isinstance(error, KeyboardInterrupt):
            say(f"interrupted; {advice}")
        raise
    note(Submission(queued, spec.name, directory, time.time(), "", scheduler.name, spec.invocation.file))
    if Ticket(scheduler.name, queued) not in submissions():
        advice = "from other directories, use the scheduler's commands for this job"
        say(f"can't add the job to the list of runs, {index_path()}: {advice}")
    with suppress(OSError):  # another user's file may have that name
        path = os.fspath(Path(path).rename(Path(directory, f"{scheduler.name}-{queued}.sh")))
    return queued, Path(path)
