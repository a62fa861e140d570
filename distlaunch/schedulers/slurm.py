"""Slurm: see sbatch(1), squeue(1), scontrol(1), srun(1).

Allocations are read from variables, because Slurm's commands may be missing in a container. The `slurm`
transport reaches hosts through steps.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone

from distlaunch.errors import DistlaunchError, UsageError
from distlaunch.job.spec import AllocatedNode, Allocation, JobSpec
from distlaunch.job.types import LINE, Either, Field, Integer, Switch, Text, by_their_names
from distlaunch.schedulers import base, queue, task
from distlaunch.supervisor.events import AllocationReported
from distlaunch.transports.slurm import VARIABLES, SlurmStep
from distlaunch.wording import expand_nodelist

KILLED = 137
"""Exit status of a command killed by SIGKILL, as in a shell."""
ADVICE = task.Advice(
    "SLURM_LOCALID", "--gpus-per-node instead of --gpus-per-task, or ", "--ntasks-per-node={}"
)
_STARTER = "srun or mpirun"
_ADVICE = (
    ": use `srun distlaunch exec -- …`, `mpirun distlaunch exec -- …`, or else `distlaunch run`; in a "
    "container, pass on the variables of srun or mpirun"
)
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS")
_FILTERS = ("SQUEUE_", "SCANCEL_")
"""Prefixes of variables that add conditions to squeue and scancel: they then miss the job in question."""
_OVERRIDES = {f"SBATCH_{name}" for name in ("ARRAY_INX", "CLUSTERS", "NO_REQUEUE", "REQUEUE", "WAIT")}
"""Variables that would replace options of the script. squeue and scancel don't know SBATCH_CLUSTERS."""
_PLAIN = (
    *("partition", "account", "qos", "constraint", "gres", "mem", "cpus_per_task"),
    *("nodelist", "exclude", "dependency", "comment", "time"),
)
"""Keys with the same names as options of sbatch."""
_WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_HELD = ("RUNNING", "SUSPENDED", "STOPPED", "CONFIGURING", "SIGNALING", "RESIZING")
_ENDING = ("COMPLETING", "STAGE_OUT")
_WHYS = {
    "TIMEOUT": "reached its time limit",
    "DEADLINE": "reached its deadline",
    "PREEMPTED": "was preempted",
    "NODE_FAIL": "lost a node",
    "OUT_OF_MEMORY": "ran out of memory",
    "PENDING": "was requeued",
    "REQUEUED": "was requeued",
    "SCRIPT": "failed because its batch script was killed",
    "SCRIPT_EXIT": "ended because its batch script exited",
}
_MAY_GO_ON = (_WHYS["TIMEOUT"], _WHYS["OUT_OF_MEMORY"], _WHYS["SCRIPT_EXIT"])
"""Reasons for which the job itself must request a requeue. Slurm requeues preempted jobs on its own."""
_REASONS = {
    "NodeDown": "NODE_FAIL",
    "TimeLimit": "TIMEOUT",
    "DeadLine": "DEADLINE",
    "JobLaunchFailure": "SCRIPT",
    "NonZeroExitCode": "SCRIPT_EXIT",  # a canceled job has no reason, however its script exits
}
"""What the reason of a job that is ending means, while its state is still COMPLETING."""
_HINTS = {"DependencyNeverSatisfied": ": its dependency can't be met anymore; `distlaunch stop` cancels it"}
"""Advice for pending reasons that mean that a job will never start."""
_REFUSED = re.compile("disabled|denied|not supported|Invalid|batch jobs|already complet")
"""Answers to a requeue that don't change, for example because the job was submitted with --no-requeue."""
SIGNAL = r"(?:[BR]{1,2}:)?[A-Z][A-Z0-9]*"
_CLOCK = r"[0-9]+:[0-9]{2}(?::[0-9]{2})?|[0-9]+-[0-9]{1,2}(?::[0-9]{2}){0,2}"


def _days(seconds: int) -> str:
    """Format seconds as days and time, such as `1-12:00:00`."""
    days, rest = divmod(seconds, 86400)
    clock = base.clock(rest).zfill(8)
    return f"{days}-{clock}" if days else clock


def _signal_mistake(signal: str) -> str | None:
    warns = re.search(r"(?:^|:)(?:SIG)?USR[12](?:@|$)", signal)
    return None if warns else "use USR1 or USR2; on_warning chooses what the ranks get"


_UNLIMITED = ("UNLIMITED", "365-00:00:00")
"""The time limit of a job without one. Slurm limits such jobs to a year when they start."""


class Slurm(base.Scheduler):
    """The Slurm scheduler, which can report why a job ended, and requeue it.

    See `Scheduler` for the attributes and methods.
    """

    name, title, step = "slurm", "Slurm", "step"
    mark = "#SBATCH"
    answers, waits = True, True
    chooses = "set nodes to the number of nodes; slurm.nodelist requests specific hosts"
    section = base.section(
        {
            "partition": Field(LINE, "Partition, or several separated by commas."),
            "account": Field(LINE, "Account to charge."),
            "qos": Field(LINE, "Quality of service."),
            "time": Field(
                base.TimeLimit('"12h" or "1-12:00:00"', rf"{_CLOCK}|", _days),
                'Time limit: "12h", "1d12h" or Slurm\'s "1-12:00:00".',
                "the partition's",
            ),
            "constraint": Field(LINE, "Features that the nodes must have."),
            "gpus": Field(
                Either(number=Integer(0), text=LINE), "GPUs per node, e.g. 8 or a100:8.", "gpus_per_node"
            ),
            "gres": Field(LINE, "Generic resources per node (--gres); replaces gpus."),
            "mem": Field(Either(number=Integer(0), text=LINE), "Memory per node, e.g. 200G; 0 = all."),
            "cpus_per_task": Field(Integer(1), "CPUs for each worker."),
            "exclusive": Field(Switch(), "Don't share the nodes with other jobs.", default=False),
            "nodelist": Field(LINE, "Hosts that must be among the nodes."),
            "exclude": Field(LINE, "Hosts to exclude."),
            "dependency": Field(LINE, "Jobs to wait for, e.g. afterok:1234."),
            "signal": Field(
                Text('a signal such as "USR1@120"', rf"{SIGNAL}(?:@[0-9]{{1,5}})?", _signal_mistake),
                "A termination warning: USR1@120 arrives 2 to 3 min before the time limit; see on_warning.",
            ),
            "comment": Field(LINE, "A comment for the job."),
        },
        base.other_options(
            "sbatch",
            "--reservation=maint",
            r"(?P<array>--array\b|-a)|(?P<output>--(?:output|error)\b|-[oe])|(?P<wait>--wait\b|-W)"
            r"|--(?:wrap|parsable|open-mode|test-only)\b|(?P<nodes>--nodes\b|-N)|(?P<requeue>--(?:no-)?requeue\b)"
            r"|(?P<cluster>--clusters?\b|-M)|(?P<signal>--signal\b)",
            r"--?[A-Za-z][^\0\n]*",
        ),
        **by_their_names(
            gpus="gpus_per_node",
            mem="memory",
            cpus_per_task="cpus",
            partition="queue",
            constraint="feature",
            extra="sbatch_options",
        ),
    )

    def allocation(self, environ: Mapping[str, str], listed: str = "") -> Allocation:
        """Return the allocation of SLURM_JOB_ID, with all components of a heterogeneous job."""
        components = int(environ.get("SLURM_HET_SIZE") or 0)
        groups = range(components) if components else [None]
        nodes = tuple(node for group in groups for node in _component(environ, group))
        if not nodes:
            raise UsageError(
                "SLURM_JOB_ID is set, but SLURM_JOB_NODELIST is not: in a container, pass on both; after ssh "
                "to a node of the job, set SLURM_JOB_NODELIST to the output of "
                "`squeue -h -j $SLURM_JOB_ID -o %N`; outside Slurm, `unset SLURM_JOB_ID`"
            )
        queued, starts = environ.get("ENVIRONMENT") == "BATCH", _earlier_starts(environ)
        return Allocation(self.name, self.title, environ["SLURM_JOB_ID"], nodes, queued, starts, answers=True)

    def reach(self, allocation: Allocation, node: AllocatedNode, here: str) -> SlurmStep:
        """Return a step for the host, even if it is this host."""
        return SlurmStep(node.host, allocation.job, node.group)

    def task(self, environ: Mapping[str, str]) -> task.Task:
        """Locate a task of srun. Raises `UsageError` for missing or contradictory variables."""
        rank, size = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_NTASKS")
        node, local = _number(environ, "SLURM_NODEID"), _number(environ, "SLURM_LOCALID")
        if "SLURM_STEP_NODELIST" not in environ:  # a batch script has the other variables
            raise UsageError(f"exec must run as a task of {_STARTER}{_ADVICE}")
        try:
            nodes = tuple(expand_nodelist(environ["SLURM_STEP_NODELIST"]))
            counts = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
        except ValueError as error:
            what = f"SLURM_STEP_NODELIST or SLURM_STEP_TASKS_PER_NODE: {error}"
            raise UsageError(f"{what}; {task.SET_BY_A_SCRIPT}") from None
        if sum(counts) == 1 < size:  # the interactive step of salloc
            raise UsageError(f"this step has only one task; exec must run as a task of {_STARTER}{_ADVICE}")
        if len(nodes) != len(counts) or sum(counts) != size or not node < len(nodes):
            names = ("SLURM_NTASKS", "SLURM_NODEID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")
            seen = ", ".join(f"{name}={environ.get(name, '')}" for name in names)
            raise UsageError(f"Slurm's variables contradict each other: {seen}; {task.SET_BY_A_SCRIPT}")
        if not (rank < size and local < counts[node]):
            what = f"SLURM_PROCID={rank} and SLURM_LOCALID={local} are inconsistent with {size} tasks"
            raise UsageError(f"{what}; {task.SET_BY_A_SCRIPT}")
        job = environ["SLURM_JOB_ID"]
        step = f"{job}.{environ.get('SLURM_STEP_ID', '')}"
        devices = queue.granted_gpus(environ, queue.VISIBLE)
        place = (rank, size, local, counts[node], node, len(nodes))
        return task.Task(step, job, *place, nodes, nodes[:1], devices, _earlier_starts(environ), ADVICE)

    def gpus(self, spec: JobSpec) -> int | None:
        """Return the number of GPUs in `gres` or, without it, in `gpus`."""
        asked = self.asked(spec)
        if gres := asked.get("gres"):
            of_gpus = [part for part in gres.split(",") if part.startswith("gpu")]
            return count_gpus(of_gpus[0].removeprefix("gpu:")) or 0 if of_gpus else 0
        return None if asked.get("gpus") is None else count_gpus(str(asked["gpus"])) or 0

    def remarks(self, spec: JobSpec) -> Iterator[str]:
        """Also mention the signal that ranks get after a termination warning, unless the job file sets it."""
        yield from super().remarks(spec)
        if "signal" in self.asked(spec) and "on_warning" not in spec.places:
            yield "after slurm.signal, ranks get SIGTERM and must exit; for another signal, set on_warning"

    def options(self, spec: JobSpec, followed: bool) -> Iterator[str]:
        """Yield options of sbatch."""
        asked, node = self.asked(spec), spec.nodes[0]
        name = " ".join(spec.name.split())  # a directive ends at the end of its line
        yield base.option("--job-name=", name)
        yield base.option("--nodes=", self.node_count(spec))
        gpus = node.gpus if asked.get("gpus") is None else asked["gpus"]
        if gpus and not asked.get("gres"):
            yield base.option("--gpus-per-node=", gpus)
        if workers := node.procs or count_gpus(str(gpus or "")):
            yield base.option("--ntasks-per-node=", workers)
        yield from base.given(asked, {key: f"--{key.replace('_', '-')}=" for key in _PLAIN})
        if signal := asked.get("signal"):
            flags, _, which = signal.rpartition(":")
            # Without B, every process of every step gets the signal, but the script doesn't.
            yield f"--signal={flags.replace('B', '')}B:{which}"
        if asked.get("exclusive"):
            yield "--exclusive"
        directory = spec.logs.directory if followed else base.workdir(spec)
        directory = directory.replace("%", "%%")  # % also begins a Slurm filename pattern
        yield base.option("--output=", queue.output_path(directory, "%j", self.name))
        yield "--open-mode=append"
        yield "--requeue" if spec.restarts.requeue else "--no-requeue"
        if spec.elastic or "spares" in spec.places:
            yield "--no-kill"

    def closing(self, spec: JobSpec) -> list[str]:
        """Pass on termination warnings, and requeue a job that a killed distlaunch couldn't requeue."""
        lines = [
            "# Slurm may send a termination warning only to this shell.",
            "set +o posix  # in which `wait` forgets",
            "trap 'kill -USR1 $!' USR1; trap 'kill -USR2 $!' USR2",
            "while kill -0 $! 2>/dev/null; do wait $!; done",
            "wait $!",
        ]
        if not spec.restarts.requeue:
            return lines
        counted = """$(cat "$starts" 2>/dev/null | grep -c '^{"requeue')"""
        return [
            *lines,
            "status=$?",
            "# distlaunch requeues the job itself, unless it was killed before it could decide.",
            f'starts={shlex.quote(spec.logs.directory)}/{self.name}-"$SLURM_JOB_ID".jsonl',
            f'if [ $status -eq {KILLED} ] && [ "{counted}" -lt {spec.restarts.requeue} ] &&',
            """    ! sed -n "/\\"starts\\": ${SLURM_RESTART_COUNT:-0},/,\\$p" "$starts" 2>/dev/null |""",
            """    grep -Eq '^{"(decided|requeue)'; then""",
            "    # One task of an array has the ID of the whole array.",
            '    [ "$SLURM_ARRAY_JOB_ID" != "$SLURM_JOB_ID" ] || SLURM_JOB_ID+="_$SLURM_ARRAY_TASK_ID"',
            "    # In any other state, Slurm is ending the job, for example because a user canceled it.",
            '    squeue -h -t all -j "$SLURM_JOB_ID" -o %T | grep -qx RUNNING &&',
            """        (umask 077; echo '{"requeue": true}' >>"$starts") &&""",
            '        scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            "exit $status",
        ]

    def submit(self, script: str) -> str:
        """Submit with sbatch."""
        return queue.job_id(r"^(\d+)(?:;.*)?$", "sbatch", _call("sbatch", "--parsable", script))

    def look(self, jobs: Sequence[str]) -> dict[str, queue.Queued]:
        """Query squeue."""
        # With several job IDs, squeue fails if it has forgotten one of them.
        which = f"--jobs={jobs[0]}" if len(jobs) == 1 else f"--user={queue.user_name()}"
        asked = ("--noheader", "--states=all", which, "--format=%A|%T|%r")
        output = _call("squeue", *asked, forgives=re.compile("Invalid job id"))
        rows = (line.split("|", 2) for line in output.splitlines() if line.count("|") >= 2)
        return {job.strip(): queued(state, reason) for job, state, reason in rows}

    def array_tasks(self, job: str, ended: bool = False) -> dict[str, str]:
        """Query squeue. Tasks that wait have one entry, such as `12_[3-7]`."""
        # The variables of an array would also be in the environment of jobs that its tasks submit.
        states = ["--states=all"] if ended or "_" in job else []
        asked = ("--noheader", f"--jobs={job}", *states, "--format=%F_%K|%A")
        output = _call("squeue", *asked, forgives=re.compile("Invalid job id"))
        return dict(re.findall(r"(?m)^(\d+_[\d[].*)\|(\d+)$", output))

    def cancel(self, job: str, at_once: bool = False) -> None:
        """Cancel with scancel."""
        # scancel takes the ID of an array's last task for the whole array, and ignores those of other tasks.
        tasks = self.array_tasks(job, ended=True)
        job = next((name for name, each in tasks.items() if each == job), job)
        if at_once:  # before the job is cancelled, since Slurm then refuses other signals
            with suppress(DistlaunchError):  # it may not have started yet
                # For a job that is waiting or ending, scancel would try for a minute.
                _call("scancel", "--state=RUNNING", "--signal=TERM", "--full", job)
                queue.pause_for_another_wish()
        _call("scancel", job)

    def requeue(self, job: str, environ: Mapping[str, str]) -> None:
        """Requeue with scontrol, which refuses a job that has already been requeued."""
        if job == environ.get("SLURM_ARRAY_JOB_ID"):  # one task has the ID of the whole array
            job += f"_{environ.get('SLURM_ARRAY_TASK_ID')}"
        try:
            _call("scontrol", "requeue", job, forgives=re.compile("pending execution"))
        except DistlaunchError as error:
            raise (UsageError if _REFUSED.search(str(error)) else DistlaunchError)(str(error)) from None

    def fate_argv(self, job: str) -> list[str]:
        """Return the command that shows the job."""
        return ["scontrol", "--oneliner", "show", "job", job]  # options first, in case of POSIXLY_CORRECT

    def fate(self, starts: int, text: str, now: float) -> AllocationReported:
        """Parse the output of scontrol, which may describe a later start of the job.

        Lines after the first are about other tasks of an array, or other components of the job.
        """
        fields = dict(re.findall(r"(?:^|\s)([A-Za-z]+)=(\S*)", text.partition("\n")[0]))
        state, end = fields.get("JobState"), _time(fields.get("EndTime", ""))
        unlimited = fields.get("TimeLimit") in _UNLIMITED
        left_s = None if end is None or unlimited else round(end - now, 3)
        if state is None:
            return AllocationReported(None)
        if int(fields.get("Restarts", "0")) > starts:
            return AllocationReported(True, _WHYS["REQUEUED"], final=True)
        if state in _HELD:
            preempted = _time(fields.get("PreemptTime", "")) is not None
            return AllocationReported(False, _WHYS["PREEMPTED"] if preempted else "", left_s)
        why = _WHYS.get(state) or _why_completing(fields, end)
        return AllocationReported(True, why, left_s, final=why not in _MAY_GO_ON)


scheduler = Slurm()


def _component(environ: Mapping[str, str], group: int | None) -> Iterable[AllocatedNode]:
    """Yield the nodes of a heterogeneous job's component; for any other job, `group` is None."""

    def value(name: str) -> str:
        suffix = "" if group is None else f"_HET_GROUP_{group}"
        return environ.get(name + suffix, "")

    hosts = expand_nodelist(value("SLURM_JOB_NODELIST") or value("SLURM_NODELIST"))
    asked = "SLURM_NTASKS" if group is None else f"SLURM_NTASKS_HET_GROUP_{group}"
    # By default, Slurm counts one task per node, which doesn't mean one worker.
    tasks = expand_counts(value("SLURM_TASKS_PER_NODE")) if asked in environ else []
    gpus = count_gpus(value("SLURM_GPUS_PER_NODE"))
    for index, host in enumerate(hosts):
        yield AllocatedNode(host, gpus, tasks[index] if index < len(tasks) else None, group)


def expand_counts(text: str) -> list[int]:
    """Expand `2(x3),1` to [2, 2, 2, 1]. Raises ValueError."""
    counts: list[int] = []
    for item in text.split(",") if text else ():
        found = re.fullmatch(r"([0-9]+)(?:\(x([0-9]{1,5})\))?", item)
        if not found:
            raise ValueError(f'"{text}" is not a list of task counts per node')
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def count_gpus(text: str) -> int | None:
    """Return 4 for `4`, `a100:4` and `volta:3,kepler:1`; None if there is no number."""
    counts = [item.rpartition(":")[2] for item in text.split(",")]
    return sum(map(int, counts)) if all(count.isdigit() for count in counts) else None


def _earlier_starts(environ: Mapping[str, str]) -> int:
    """Return how often Slurm has requeued the job."""
    count = environ.get("SLURM_RESTART_COUNT", "")
    return int(count) if count.isdecimal() else 0


def _number(environ: Mapping[str, str], name: str) -> int:
    return task.number_of(environ, name, _STARTER, _ADVICE)


def queued(state: str, reason: str = "") -> queue.Queued:
    """Convert a job's state from squeue."""
    stage = queue.stage(state, _WAITING, _HELD, _ENDING)
    return queue.Queued(state, "" if reason == "None" else reason + _HINTS.get(reason, ""), stage)


def _call(*argv: str, forgives: "re.Pattern[str] | None" = None) -> str:
    return queue.call(scheduler.title, *argv, passes=_passes, forgives=forgives)


def _passes(name: str) -> bool:
    """Return whether a variable is safe for sbatch, which uses variables of a surrounding job as options."""
    return name in _KEPT or not (name.startswith((*VARIABLES, *_FILTERS)) or name in _OVERRIDES)


def _why_completing(fields: Mapping[str, str], end: float | None) -> str:
    """Infer why a job is ending from its other fields, while its state doesn't show the reason yet."""
    if (reason := fields.get("Reason")) in _REASONS:
        return _WHYS[_REASONS[reason]]
    if end is None:  # the job has started again
        return _WHYS["REQUEUED"]
    if _time(fields.get("PreemptTime", "")) is not None:
        return _WHYS["PREEMPTED"]
    return "was cancelled"


def _time(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        return None  # Unknown, None
