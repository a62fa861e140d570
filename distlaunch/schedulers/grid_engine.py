"""Grid Engine: see sge_pe(5), qsub(1), qstat(1), qdel(1) and sge_submit(1)."""

import re
from collections.abc import Iterator, Mapping, Sequence

from distlaunch.job.spec import Allocation, JobSpec
from distlaunch.job.types import LINE, Field, Integer
from distlaunch.schedulers import base, queue
from distlaunch.transports.failure import Kind
from distlaunch.transports.transport import Command

# No XML parser, because declarations differ between versions, and job names are not always escaped.
_JOB = re.compile(r"<JB_job_number>(\d+)</JB_job_number>.*?<state>(\w+)</state>", re.DOTALL)
_END = "</job_info>"
_REFUSED = "is control_slaves TRUE in `qconf -sp $PE`? `--set launcher=ssh` doesn't need it"


class Qrsh(Command):
    """A host reached by `qrsh -inherit`, which starts a task of the job there.

    See `Command` for the attributes.
    """

    failures = (
        (Kind.TASK_REFUSED, r"didn't accept task|not in the parallel environment|no free slots"),
        (Kind.NO_ALLOCATION, r"JOB_ID|job .* (?:does not exist|is unknown)|unknown job"),
        (Kind.UNRESOLVED, r"can't resolve host ?name|unknown host"),
        (Kind.UNREACHABLE, r"can't find connection|failed sending task to execd|timeout|timed out"),
    )
    failed = 1
    advised = ((Kind.TASK_REFUSED, _REFUSED), (Kind.NO_ALLOCATION, "the job is over: see `qstat -j $JOB_ID`"))
    tools = "SGE_BINARY_PATH"
    deaf = True


class GridEngine(base.Scheduler):
    """Grid Engine and its successors. See `Scheduler` for the attributes and methods."""

    name, title = "grid-engine", "Grid Engine"
    mark = "#$"
    harmless = ("USR1",)  # SIGUSR2 announces the end
    ends = ("qdel",)  # `qdel -f` is for administrators and unresponsive hosts
    over = re.compile("does not exist")
    section = base.section(
        {
            "pe": Field(LINE, "Parallel environment, which places slots on hosts; see `qconf -spl`."),
            "slots": Field(Integer(1), "Slots per node.", "one per worker"),
            "gpus": Field(LINE, "GPU request for -l, e.g. gpu=8.", "gpu=N, with N from gpus_per_node"),
            "queue": base.QUEUE,
            "project": Field(LINE, "Project to charge."),
            "time": Field(base.WALLTIME, 'Time limit (h_rt): "12h" or "36:00:00".', "the queue's"),
        },
        base.other_options("qsub", "-p -100", r"-(?:(?P<array>t)|(?P<output>[oe])|[jNSr]|sync)(?![\w-])"),
        parallel_environment="pe",
        h_rt="time",
    )

    def listing(self, environ: Mapping[str, str]) -> str:
        """Return the path in PE_HOSTFILE, which is not set without a parallel environment."""
        return environ.get("PE_HOSTFILE", "")

    def allocation(self, environ: Mapping[str, str], listed: str) -> Allocation:
        """Return the hosts. A job of an array isn't `queued`, because its ID in the queue is different."""
        task = environ.get("SGE_TASK_ID", "undefined")
        job = environ["JOB_ID"] + ("" if task in ("", "undefined") else f".{task}")
        nodes = queue.listed_nodes(self.title, _slots(environ, listed), environ)
        # It is QRSH or QLOGIN for interactive jobs. 8.1.9 doesn't set ENVIRONMENT=BATCH, despite submit(1).
        queued = environ.get("JOB_SCRIPT", "").startswith("/") and job.isdecimal()
        return Allocation(self.name, self.title, job, nodes, queued)

    def command(self, host: str) -> Qrsh:
        """Return the transport that starts a task of the job on the host."""
        return Qrsh(host, ("qrsh", "-inherit", "-V", "{host}"), True)

    def mistakes(self, spec: JobSpec) -> Iterator[tuple[str, str]]:
        """Report a missing parallel environment, which a job with several slots needs."""
        if "pe" not in self.asked(spec) and self._slots(spec) > 1:
            yield "grid_engine.pe", "name a parallel environment: `qconf -spl` lists them"

    def options(self, spec: JobSpec, followed: bool) -> Iterator[str]:
        """Yield options of qsub.

        A followed job starts in the directory from which it was submitted, as with Slurm.
        """
        asked, gpus = self.asked(spec), spec.nodes[0].gpus
        yield "-S /bin/bash"
        yield f"-N {base.plain_name(spec.name)}"
        if "pe" in asked:
            yield f"{base.option('-pe ', asked['pe'])} {self._slots(spec)}"
        if wanted := asked.get("gpus") or (f"gpu={gpus}" if gpus else ""):
            yield base.option("-l ", wanted)
        yield from base.given(asked, {"queue": "-q ", "project": "-P ", "time": "-l h_rt="})
        yield "-j y"
        own = queue.output_path(spec.logs.directory, "$JOB_ID", self.name)
        yield base.option("-o ", own if followed else f"{base.workdir(spec)}/$JOB_NAME.o$JOB_ID")
        yield "-r n"  # Grid Engine itself must not start the job again
        if followed:
            yield "-cwd"
        if followed or "on_warning" in spec.places:
            yield "-notify"

    def closing(self, spec: JobSpec) -> list[str]:
        """Change exit statuses that have a meaning for Grid Engine."""
        return [
            "status=$?",
            "# Grid Engine would start the job again after 99, and keep it in the queue after 100.",
            "[ $status -ne 99 ] && [ $status -ne 100 ] || status=1",
            "exit $status",
        ]

    def _slots(self, spec: JobSpec) -> int:
        return (self.asked(spec).get("slots") or base.workers(spec)) * self.node_count(spec)

    def submit(self, script: str) -> str:
        """Submit with qsub."""
        return queue.job_id(r"^\d+$", "qsub", queue.call(self.title, "qsub", "-terse", script))

    def look(self, jobs: Sequence[str]) -> dict[str, queue.Queued]:
        """Query qstat, which doesn't list jobs that have ended."""
        output = queue.call(self.title, "qstat", "-u", queue.user_name(), "-xml")
        if _END not in output:  # a truncated answer must not look as if all jobs had ended
            raise queue.unexpected("qstat", output)
        return {job: state for job, state in jobs_in(output).items() if job in jobs}


scheduler = GridEngine()


def _slots(environ: Mapping[str, str], listed: str) -> queue.Slots:
    """Parse lines of `host slots queue processors`. A host has one line for each of its queues."""
    if not environ.get("PE_HOSTFILE"):
        yield environ["HOSTNAME"], 1
    for line in queue.lines_of(listed):
        host, *rest = line.split()
        yield host, queue.slots_in(rest[0] if rest else "", line)


def jobs_in(output: str) -> dict[str, queue.Queued]:
    """Parse the output of `qstat -xml`, and return the jobs by ID."""
    return {job: _queued(letters, job) for job, letters in _JOB.findall(output)}


def _queued(letters: str, job: str) -> queue.Queued:
    """Convert a state from qstat, which consists of letters, such as qw, r, Eqw or dr."""
    if "E" in letters:
        return queue.Queued(letters, f"can't start: `qstat -j {job}` says why", "waits")
    goes: queue.Stage = "ends" if "d" in letters else "waits" if "w" in letters else "goes"
    return queue.Queued(letters, "", "over" if "z" in letters else goes)
