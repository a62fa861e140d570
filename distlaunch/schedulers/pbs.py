"""PBS Professional, OpenPBS and Torque: see qsub(1B), qstat(1B), qsig(1B) and qdel(1B).

Agents are started over ssh, because pbs_tmrsh has no stdin.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from distlaunch.job.spec import Allocation, JobSpec
from distlaunch.job.types import LINE, Field, Integer, by_their_names
from distlaunch.schedulers import base, queue

_WAITING, _GOING, _ENDING = "QHWT", "RSUB", "E"


class Pbs(base.Scheduler):
    """The PBS scheduler. Its job IDs end with the name of the server.

    See `Scheduler` for the attributes and methods.
    """

    name, title = "pbs", "PBS"
    mark = "#PBS"
    # `qdel -W force` may remove a job while its processes keep running, and Torque has no such option.
    ends = ("qdel",)
    hurries = ("qsig", "-s", "TERM")
    withholds = "PBS_JOBID"
    over = re.compile("Unknown Job Id|Job has finished|invalid for (state of|finished) job", re.IGNORECASE)
    section = base.section(
        {
            "select": Field(LINE, "Selection; replaces nodes, cpus, gpus and mem, e.g. 4:ncpus=64:ngpus=8."),
            "cpus": Field(Integer(1), "CPUs per node (ncpus).", "one per worker"),
            "gpus": Field(Integer(0), "GPUs per node (ngpus).", "gpus_per_node"),
            "mem": Field(LINE, "Memory per node, e.g. 200gb."),
            "queue": base.QUEUE,
            "project": Field(LINE, "Project (-P)."),
            "account": Field(LINE, "Account to charge (-A)."),
            "time": Field(base.WALLTIME, 'Time limit (walltime): "12h" or "36:00:00".', "the queue's"),
        },
        base.other_options("qsub", "-p -100", r"-(?:(?P<array>[Jt])|(?P<output>[oe])|[jNrk])(?![\w-])"),
        **by_their_names(cpus="ncpus", gpus="ngpus", mem="memory"),
    )

    def listing(self, environ: Mapping[str, str]) -> str:
        """Return the path of the file with one line per slot."""
        return environ["PBS_NODEFILE"]

    def allocation(self, environ: Mapping[str, str], listed: str) -> Allocation:
        """Return the hosts. A job of an array isn't `queued`, because its ID in the queue is different."""
        job, slots = environ["PBS_JOBID"], ((line, 1) for line in queue.lines_of(listed))
        queued = environ.get("PBS_ENVIRONMENT") == "PBS_BATCH" and "[" not in job
        return Allocation(self.name, self.title, job, queue.listed_nodes(self.title, slots, environ), queued)

    def gpus(self, spec: JobSpec) -> int | None:
        """Return `pbs.gpus`. `pbs.select` is not parsed."""
        gpus = super().gpus(spec)
        return 0 if gpus is None and "select" in self.asked(spec) else gpus

    def options(self, spec: JobSpec, followed: bool) -> Iterator[str]:
        """Yield options of qsub. `followed` is as in `Scheduler.script`."""
        asked = self.asked(spec)
        yield f"-N {base.plain_name(spec.name)}"
        yield base.option("-l select=", asked.get("select") or self._select(spec))
        if "select" not in asked:
            yield "-l place=scatter"
        flags = {"time": "-l walltime=", "queue": "-q ", "project": "-P ", "account": "-A "}
        yield from base.given(asked, flags)
        if followed:
            yield "-S /bin/bash"  # otherwise, the script may run in the login shell
        yield "-j oe"
        yield base.option("-o ", f"{spec.logs.directory if followed else base.workdir(spec)}/")
        yield "-r n"  # by default, PBS may requeue the job after losing a node

    def _select(self, spec: JobSpec) -> str:
        asked = self.asked(spec)
        gpus = asked.get("gpus", spec.nodes[0].gpus)
        each = base.workers(spec, gpus)
        parts = [str(self.node_count(spec)), f"ncpus={asked.get('cpus') or each}", f"mpiprocs={each}"]
        parts += [f"ngpus={gpus}"] if gpus else []
        parts += [f"mem={asked['mem']}"] if "mem" in asked else []
        return ":".join(parts)

    def opening(self, spec: JobSpec) -> Sequence[str]:
        """Return the line that changes to the submission directory, where Slurm jobs also start."""
        return *super().opening(spec), 'cd "$PBS_O_WORKDIR"'

    def submit(self, script: str) -> str:
        """Submit with qsub."""
        return queue.job_id(r"^\d+\.[\w.-]+$", "qsub", queue.call(self.title, "qsub", script))

    def look(self, jobs: Sequence[str]) -> dict[str, queue.Queued]:
        """Query qstat. Most servers forget jobs that have ended."""
        # Not -u, whose table truncates IDs, and not -x, which means XML in Torque.
        return jobs_in(queue.call(self.title, "qstat", "-f", *jobs, forgives=self.over))


scheduler = Pbs()


def jobs_in(text: str) -> dict[str, queue.Queued]:
    """Parse the output of `qstat -f`, and return the jobs by ID."""
    found = {}
    # Long values continue on the next line, after a tab.
    for part in re.split(r"^Job Id:\s*", text.replace("\n\t", ""), flags=re.MULTILINE)[1:]:
        fields = dict(re.findall(r"^ {4}(job_state|comment) = (.*)$", part, re.MULTILINE))
        if state := fields.get("job_state", "").strip():
            stage = queue.stage(state, _WAITING, _GOING, _ENDING)
            found[part.split()[0]] = queue.Queued(state, fields.get("comment", "").strip(), stage)
    return found
