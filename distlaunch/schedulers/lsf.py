"""LSF: see bsub(1), bjobs(1), bkill(1), blaunch(1) and "Environment variables set for job execution".

Written from the manuals, not tested on a live system.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from distlaunch.job.spec import Allocation, JobSpec
from distlaunch.job.types import LINE, Either, Field, Integer
from distlaunch.schedulers import base, queue, task
from distlaunch.transports.failure import Kind
from distlaunch.transports.transport import Command

_TASKS = task.Names(
    *("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "LSB_JOBID"),
    local_size="JSM_NAMESPACE_LOCAL_SIZE",
)
_WAITING, _ENDED = ("PEND", "PSUSP", "WAIT"), ("DONE", "EXIT")


def _minutes(seconds: int) -> str:
    """Format seconds as hours and minutes, such as `36:00`."""
    minutes = -(-seconds // 60)
    return f"{minutes // 60}:{minutes % 60:02}"


class Blaunch(Command):
    """A host reached by blaunch.

    LSF sends termination warnings to all processes of a job, and blaunch must survive them. See `Command` for
    the attributes.
    """

    failures = (
        (Kind.TASK_REFUSED, r"not (?:allocated|part of|in) .*(?:job|allocation)|[Ii]nvalid host"),
        (Kind.NO_ALLOCATION, r"LSB_JOBID|only .* (?:under|within) .*LSF|[Jj]ob .* not found"),
        (Kind.UNREACHABLE, r"Failed in .*connect|connection (?:refused|timed out)|not responding"),
    )
    failed = 255
    advised = (
        (Kind.TASK_REFUSED, "try `blaunch HOST hostname`; `--set launcher=ssh` doesn't need it"),
        (Kind.NO_ALLOCATION, "the job is over: see `bjobs -l $LSB_JOBID`"),
    )
    tools = "LSF_BINDIR"
    deaf = True


class Lsf(base.Scheduler):
    """The LSF scheduler. See `Scheduler` for the attributes and methods."""

    name, title = "lsf", "LSF"
    tasks = _TASKS
    mark = "#BSUB"
    ends = ("bkill",)  # sends SIGINT, then SIGTERM, then SIGKILL
    hurries = ("bkill", "-s", "TERM")
    withholds = "LSB_JOBID"
    over = re.compile(r"is not found|already finished|No matching job", re.IGNORECASE)
    section = base.section(
        {
            "slots": Field(Integer(1), "Slots per node (span[ptile]).", "one per worker"),
            "gpus": Field(
                Either(number=Integer(0), text=LINE),
                "GPUs per node, or a value for -gpu.",
                "gpus_per_node",
            ),
            "queue": base.QUEUE,
            "project": Field(LINE, "Project to charge (-P)."),
            "time": Field(
                base.TimeLimit('"12h" or "36:00"', r"[0-9]+:[0-9]{2}|", _minutes),
                'Time limit (-W): "12h" or "36:00".',
                "the queue's",
            ),
        },
        base.other_options("bsub", "-x", r"-(?:(?P<output>oo?|eo?)|(?P<wait>K)|J|rn?|I\w*)(?![\w-])"),
        ptile="slots",
    )

    def listing(self, environ: Mapping[str, str]) -> str:
        """Return the path of the file that lists the hosts if they don't fit into a variable."""
        return "" if environ.get("LSB_MCPU_HOSTS") else environ.get("LSB_DJOB_HOSTFILE", "")

    def allocation(self, environ: Mapping[str, str], listed: str) -> Allocation:
        """Return the hosts. A job of an array isn't `queued`, because its ID in the queue is different."""
        index = environ.get("LSB_JOBINDEX", "0")
        not_in_array = index in ("", "0")
        job = environ.get("LSB_JOBID", "") + ("" if not_in_array else f"[{index}]")
        queued = not_in_array and "LSB_JOBFILENAME" in environ and not environ.get("LSB_INTERACTIVE")
        nodes = queue.listed_nodes(self.title, _slots(environ, listed), environ)
        return Allocation(self.name, self.title, job, nodes, queued)

    def command(self, host: str) -> Blaunch:
        """Return the transport that starts a task of the job on the host."""
        return Blaunch(host, ("blaunch", "{host}"), True)

    def options(self, spec: JobSpec, followed: bool) -> Iterator[str]:
        """Yield options of bsub."""
        asked = self.asked(spec)
        gpus, name = asked.get("gpus", spec.nodes[0].gpus), base.plain_name(spec.name)
        slots = asked.get("slots") or base.workers(spec, gpus)
        yield f"-J {name}"
        yield f"-n {slots * self.node_count(spec)}"
        yield base.option("-R ", f"span[ptile={slots}]")
        if gpus:
            yield base.option("-gpu ", gpus if isinstance(gpus, str) else f"num={gpus}")
        yield from base.given(asked, {"queue": "-q ", "project": "-P ", "time": "-W "})
        own = queue.output_path(spec.logs.directory, "%J", self.name)  # LSF appends its report to this file
        yield base.option("-o ", own if followed else f"{base.workdir(spec)}/{name}.o%J")
        yield "-rn"  # LSF itself must not start the job again

    def submit(self, script: str) -> str:
        """Submit with bsub, which reads scripts with options from standard input."""
        output = queue.call(self.title, "bsub", stdin=script)
        return queue.job_id(r"^Job <(\d+)> is submitted", "bsub", output)

    def look(self, jobs: Sequence[str]) -> dict[str, queue.Queued]:
        """Query bjobs, which lists jobs for an hour after they have ended."""
        asked = ("-noheader", "-o", "jobid stat exit_reason pend_reason delimiter='|'")
        output = queue.call(self.title, "bjobs", *asked, *jobs, forgives=self.over)
        rows = (line.split("|", 3) for line in output.splitlines() if line.count("|") >= 3)
        return {job: queued(state, ended, reason.strip()) for job, state, ended, reason in rows}


scheduler = Lsf()


def _slots(environ: Mapping[str, str], listed: str) -> queue.Slots:
    """Parse `host slots host slots …` from LSB_MCPU_HOSTS, or else one line per slot from the file."""
    words = environ.get("LSB_MCPU_HOSTS", "").split()
    if not words:
        yield from ((line, 1) for line in queue.lines_of(listed))
    for at in range(0, len(words), 2):
        pair = words[at : at + 2]
        yield pair[0], queue.slots_in(pair[-1] if len(pair) == 2 else "", " ".join(pair))


def queued(state: str, ended: str = "-", waits: str = "-") -> queue.Queued:
    """Convert a job's state from bjobs, with the reason why the job ended or is waiting."""
    if ended.startswith("TERM_OWNER"):
        return queue.Queued(queue.CANCELLED)
    # A job may be running even if LSF has lost contact with it.
    stage: queue.Stage = "waits" if state in _WAITING else "over" if state in _ENDED else "goes"
    return queue.Queued(state, waits if stage == "waits" and waits != "-" else "", stage)
