"""PBS Professional, OpenPBS and Torque: see qsub(1B), qstat(1B), qsig(1B) and qdel(1B).

Hosts are reached over ssh: pbs_tmrsh has no stdin.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from distlaunch.job.allocation import Allocation
from distlaunch.job.spec import JobSpec
from distlaunch.job.types import LINE, Field, Integer, by_their_names
from distlaunch.schedulers import base, queue

_WAITING, _GOING = "QHWT", "RESUB"


class Pbs(base.Scheduler):
    """PBS, whose job IDs end with the name of the server."""

    name, title = "pbs", "PBS"
    mark = "#PBS"
    # `qdel -W force` would forget a job while processes of it may go on, and Torque has no such option.
    ends = ("qdel",)
    hurries = ("qsig", "-s", "TERM")
    withholds = "PBS_JOBID"
    over = re.compile("Unknown Job Id|Job has finished|invalid for (state of|finished) job", re.IGNORECASE)
    section = base.section(
        {
            "select": Field(LINE, "Selection instead of nodes, cpus, gpus and mem, e.g. 4:ncpus=64:ngpus=8."),
            "cpus": Field(Integer(1), "CPUs of each node (ncpus).", "its workers"),
            "gpus": Field(Integer(0), "GPUs of each node (ngpus).", "gpus_per_node"),
            "mem": Field(LINE, "Memory of each node, e.g. 200gb."),
            "queue": base.QUEUE,
            "project": Field(LINE, "Project (-P)."),
            "account": Field(LINE, "Account to charge (-A)."),
            "time": Field(base.WALLTIME, 'Time limit (walltime): "12h" or "36:00:00".', "the queue's"),
        },
        base.other_options("qsub", "-p -100", r"-(?:(?P<array>[Jt])|(?P<output>[oe])|[jNrk])(?![\w-])"),
        **by_their_names(cpus="ncpus", gpus="ngpus", mem="memory"),
    )

    def listing(self, environ: Mapping[str, str]) -> str:
        """Return the file with a line for each slot."""
        return environ["PBS_NODEFILE"]

    def allocation(self, environ: Mapping[str, str], listed: str) -> Allocation:
        """Return the hosts; a job of an array, which the queue knows by another ID, is not `queued`."""
        job, slots = environ["PBS_JOBID"], ((line, 1) for line in queue.lines_of(listed))
        queued = environ.get("PBS_ENVIRONMENT") == "PBS_BATCH" and "[" not in job
        return Allocation(self.name, self.title, job, queue.listed_nodes(self.title, slots, environ), queued)

    def gpus(self, spec: JobSpec) -> int | None:
        """Count `pbs.gpus`; `pbs.select` is not parsed."""
        gpus = super().gpus(spec)
        return 0 if gpus is None and "select" in self.asked(spec) else gpus

    def options(self, spec: JobSpec, followed: bool) -> Iterator[str]:
        """Yield options of qsub."""
        asked = self.asked(spec)
        yield f"-N {base.plain_name(spec.name)}"
        yield base.option("-l select=", asked.get("select") or self._select(spec))
        if "select" not in asked:
            yield "-l place=scatter"
        flags = {"time": "-l walltime=", "queue": "-q ", "project": "-P ", "account": "-A "}
        yield from base.given(asked, flags)
        if followed:
            yield "-S /bin/bash"  # else it may be the login shell
        yield "-j oe"
        yield base.option("-o ", f"{spec.logs.folder if followed else base.workdir(spec)}/")
        yield "-r n"

    def _select(self, spec: JobSpec) -> str:
        asked = self.asked(spec)
        gpus = asked.get("gpus", spec.nodes[0].gpus)
        each = base.workers(spec, gpus)
        parts = [str(self.node_count(spec)), f"ncpus={asked.get('cpus') or each}", f"mpiprocs={each}"]
        parts += [f"ngpus={gpus}"] if gpus else []
        parts += [f"mem={asked['mem']}"] if "mem" in asked else []
        return ":".join(parts)

    def opening(self, spec: JobSpec) -> Sequence[str]:
        """Begin in the directory where the job was submitted, as with Slurm."""
        return *super().opening(spec), 'cd "$PBS_O_WORKDIR"'

    def submit(self, script: str) -> str:
        """Submit by qsub."""
        return queue.job_id(r"^\d+\.[\w.-]+$", "qsub", queue.call(self.title, "qsub", script))

    def look(self, jobs: Sequence[str]) -> dict[str, queue.Queued]:
        """Look by qstat; most servers forget a job that is over."""
        # Not for all jobs of a user: the table of -u truncates IDs. Not -x, which is XML in Torque.
        return jobs_in(queue.call(self.title, "qstat", "-f", *jobs, forgives=self.over))


scheduler = Pbs()


def jobs_in(text: str) -> dict[str, queue.Queued]:
    """Read what `qstat -f` prints; the jobs by their IDs."""
    found = {}
    # Long values go on in another line, after a tab.
    for part in re.split(r"^Job Id:\s*", text.replace("\n\t", ""), flags=re.MULTILINE)[1:]:
        fields = dict(re.findall(r"^ {4}(job_state|comment) = (.*)$", part, re.MULTILINE))
        if state := fields.get("job_state", "").strip():
            stage: queue.Stage = "waits" if state in _WAITING else "goes" if state in _GOING else "over"
            found[part.split()[0]] = queue.Queued(state, fields.get("comment", "").strip(), stage)
    return found
