"""Flux: see flux-batch(1), flux-jobs(1), flux-cancel(1) and flux-environment(7).

Written from the manuals, not tested on a live system. Agents are started over ssh, because flux exec
truncates its input at the first zero byte.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from distlaunch.errors import DistlaunchError
from distlaunch.job.spec import Allocation, JobSpec
from distlaunch.job.types import LINE, Field, Integer, by_their_names
from distlaunch.schedulers import base, queue, task

_TASKS = task.Names(
    *("flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_ID"),
    nodes="FLUX_JOB_NNODES",
)
QUEUED = "DISTLAUNCH_QUEUED"
"""The variable with the job's decimal queue ID, which is unknown inside the batch script's instance."""
_WAITING, _GOING, _ENDING = ("DEPEND", "PRIORITY", "SCHED"), ("RUN",), ("CLEANUP",)


class Flux(base.Scheduler):
    """The Flux scheduler.

    Flux's commands print IDs in another format, but accept the decimal numbers that distlaunch uses.
    See `Scheduler` for the attributes and methods.
    """

    name, title = "flux", "Flux"
    tasks = _TASKS
    mark = "#flux:"
    ends = ("flux", "cancel")  # sends SIGTERM, then SIGKILL a few seconds later
    hurries = ("flux", "job", "kill", "-s", "SIGTERM")
    over = re.compile(r"inactive|unknown", re.IGNORECASE)
    section = base.section(
        {
            "cpus": Field(Integer(1), "Cores per node.", "one per worker"),
            "gpus": Field(Integer(0), "GPUs per node.", "gpus_per_node"),
            "queue": base.QUEUE,
            "bank": Field(LINE, "Bank to charge."),
            "time": Field(
                base.TimeLimit('"12h"', "", "{}s".format), 'Time limit: "12h" or "1d12h".', "the queue's"
            ),
        },
        base.other_options(
            "flux batch",
            "--exclusive",
            r"(?P<output>--(?:output|error)\b)|--(?:job-name|wrap)\b",
            r"--?[A-Za-z][^\0\n]*",
        ),
        **by_their_names(bank="account project", cpus="cores"),
    )

    def listing(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        """Return the command that lists the hosts, because no variable does."""
        return ("flux", "hostlist", "--expand", "local")

    def allocation(self, environ: Mapping[str, str], listed: str) -> Allocation:
        """Return the hosts without slots, which Flux doesn't list."""
        own, queued = environ.get("FLUX_JOB_ID", ""), environ.get(QUEUED, "")
        found = queue.listed_nodes(self.title, ((host, 1) for host in listed.split()), environ)
        nodes = tuple(node._replace(procs=None) for node in found)
        return Allocation(self.name, self.title, own or queued, nodes, bool(queued and not own))

    def options(self, spec: JobSpec, followed: bool) -> Iterator[str]:
        """Request one slot for each node."""
        asked = self.asked(spec)
        gpus, name = asked.get("gpus", spec.nodes[0].gpus), base.plain_name(spec.name)
        yield f"--job-name={name}"
        yield from (f"{flag}={self.node_count(spec)}" for flag in ("--nodes", "--nslots"))
        yield f"--cores-per-slot={asked.get('cpus') or base.workers(spec, gpus)}"
        if gpus:
            yield f"--gpus-per-slot={gpus}"
        yield from base.given(asked, {"queue": "--queue=", "bank": "--bank=", "time": "--time-limit="})
        own = queue.output_path(spec.logs.directory, "{{id.dec}}", self.name)
        yield base.option("--output=", own if followed else f"{base.workdir(spec)}/{name}.o{{{{id}}}}")

    def opening(self, spec: JobSpec) -> Sequence[str]:
        """Set the variable with the job's ID."""
        return "", f'export {QUEUED}="$(flux job id --to=dec "$(flux getattr jobid)")"'

    def submit(self, script: str) -> str:
        """Submit with `flux batch`."""
        printed = queue.call(self.title, "flux", "batch", script).strip()
        try:
            output = queue.call(self.title, "flux", "job", "id", "--to=dec", printed)
        except DistlaunchError:  # the job is in the queue
            raise queue.unexpected("flux batch", printed) from None
        return queue.job_id(r"^\d+$", "flux job id", output)

    def look(self, jobs: Sequence[str]) -> dict[str, queue.Queued]:
        """Query `flux jobs`, which also lists jobs that have ended."""
        asked = ("jobs", "-n", "--color=never", "-o", "{id.dec}|{status}")
        output = queue.call(self.title, "flux", *asked, *jobs, forgives=self.over)
        rows = (line.strip().split("|", 1) for line in output.splitlines() if "|" in line)
        return {job: queued(state.strip()) for job, state in rows}


scheduler = Flux()


def queued(state: str) -> queue.Queued:
    """Convert a job's state from `flux jobs`. For a job that has ended, this is its result."""
    stage = queue.stage(state, _WAITING, _GOING, _ENDING)
    return queue.Queued(queue.CANCELLED if state == "CANCELED" else state, "", stage)
