"""`run --on HOST` and `submit --on HOST`: from that host, so that this machine can sleep."""

import json
import os
import sys
from collections.abc import Sequence

from distlaunch.cli.elsewhere import Request, run_there, ssh_to
from distlaunch.cli.output import print_text
from distlaunch.cli.stderr import say
from distlaunch.errors import Exit, UsageError
from distlaunch.job.spec import JobSpec
from distlaunch.system.job_file import job_of, read_job, read_text
from distlaunch.transports.ssh import Ssh


def run_on(
    host: str, job: str, spec: JobSpec, overrides: Sequence[str], args: Sequence[str], detach: bool
) -> int:
    """Start the job there, as `--detach` does, and unless that is wanted attach to it; the exit status.

    `spec` is what it is taken for here. Raises `DistlaunchError`.
    """
    _check_file(spec)
    ssh, said = _way_to(host, spec), bytearray()
    request = _request(("run", "-", "--detach"), job, read_text(job), spec, overrides, args)
    status = run_there(ssh, request, said.extend)
    run = said.decode(errors="replace").strip()
    if status or not run:
        return status
    if detach:
        print(run, flush=True)
        if sys.stderr.isatty():
            say(f"running under the control of {host}; follow it with `distlaunch attach {host}:{run}`")
        return Exit.OK
    try:
        return run_there(ssh, Request(("attach", "--all", run)))
    except KeyboardInterrupt:
        say(f"detached from {run}, which is still running; `distlaunch stop {host}:{run}` stops it")
        return Exit.INTERRUPTED


def submit_on(
    ssh: Ssh, job: str, overrides: Sequence[str], args: Sequence[str], options: Sequence[str]
) -> int:
    """Submit the job there, with `options` of submit's; the exit status. Raises `DistlaunchError`."""
    text = read_job(job)
    spec = job_of(text, job, overrides, args, submitted=True)
    _check_file(spec)
    said = bytearray()
    request = _request(("submit", "-", *options), job, text, spec, overrides, args)
    status = run_there(ssh, request, said.extend)
    text = said.decode(errors="replace")
    print_text(text)
    if status == Exit.OK and len(text.split()) == 1 and sys.stderr.isatty():
        say(f"submitted on {ssh.host}; follow it with `distlaunch attach {ssh.host}:{text.strip()}`")
    return status


def _check_file(spec: JobSpec) -> None:
    if spec.invocation.piped:
        raise UsageError("--on can't take the job from a pipe or standard input; save it to a file")


def _way_to(host: str, spec: JobSpec) -> Ssh:
    """As the job reaches that node, if it is one of its nodes; else with the same options."""
    reached = [node.reach for node in spec.pool if isinstance(node.reach, Ssh)]
    for reach in reached:
        if reach.host == host:
            return reach
    return ssh_to(host, reached[0].options.config if reached else None)


def _request(
    command: Sequence[str], job: str, text: str, spec: JobSpec, overrides: Sequence[str], args: Sequence[str]
) -> Request:
    named = [f"name={json.dumps(spec.name)}", *overrides]
    words = [*command, *(word for one in named for word in ("--set", one))]
    folder = os.path.dirname(os.path.realpath(job))
    return Request((*words, *(["--", *args] if args else [])), folder, text, _inherited(spec))


def _inherited(spec: JobSpec) -> dict[str, str]:
    """What the job takes from the environment here: there are other values."""
    envs = [spec.env, *(node.env for node in spec.pool)]
    return {name: value.text for env in envs for name, value in env.items() if value.inherited}
