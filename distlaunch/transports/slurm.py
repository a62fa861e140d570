"""The nodes of a Slurm allocation. A link is srun's stdin and stdout, for a step on one or more nodes."""

import re
from collections.abc import Iterator, Mapping, Sequence
from shlex import quote
from typing import Literal

from distlaunch.agent import wire
from distlaunch.transports.failure import Kind, LinkFailure, Patterns, ProcessEnd, classify
from distlaunch.transports.handshake import SCRIPT, NodeGone, Streams
from distlaunch.transports.transport import OLD_PYTHON, Transport, Way
from distlaunch.wording import expand_nodelist

_OPTIONS = (
    "--overlap",  # this step shares resources with other steps, so neither waits for the other
    "--mem=0",  # all memory of the job on the node
    "--cpu-bind=none",  # the job file determines the CPUs
    *("--mpi=none", "--input=all", "--output=all", "--error=all", "--kill-on-bad-exit=0", "--wait=0"),
    *("--export=ALL", "--chdir=/", "--quit-on-interrupt", "--job-name=distlaunch"),
)
"""srun options that variables of the allocation or of a script could also set."""

VARIABLES = ("SLURM_", "SRUN_", "PMI_", "PMIX_", "SLURMD_")
"""Prefixes of the variables that Slurm's tools set. The tools also read some of them."""
_JOB_NAME = "DISTLAUNCH_JOB_NAME"
_START = (
    # Slurm may send a termination warning to every process, which would kill ranks that don't handle it.
    'trap "" USR1 USR2; '
    # srun has replaced the job name with the step name.
    f'SLURM_JOB_NAME="${{{_JOB_NAME}:-$SLURM_JOB_NAME}}"; unset {_JOB_NAME}; exec "$@"'
)
_OF_THE_JOB = ("SLURM_JOB_", "SLURM_ARRAY_", "SLURM_SUBMIT_", "SLURM_HET_", "SLURM_JOBID_HET_")
_KEPT = ("SLURM_JOBID", "SLURM_CONF", "SLURM_CLUSTERS", "SLURM_CLUSTER_NAME", "SLURM_RESTART_COUNT")
_OF_THE_STEP = (
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS", "SLURM_TASK_PID"),
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NNODES"),
    *("SLURM_NODELIST", "SLURM_STEPID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES"),
    *("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_LAUNCHER_PORT"),
    *("SLURM_SRUN_COMM_HOST", "SLURM_SRUN_COMM_PORT", "SLURM_LAUNCH_NODE_IPADDR", "SLURM_DISTRIBUTION"),
    *("SLURM_CPU_BIND", "SLURM_CPU_BIND_LIST", "SLURM_CPU_BIND_TYPE", "SLURM_CPU_BIND_VERBOSE"),
    *("SLURM_CPUS_PER_TASK", "SLURM_UMASK", "PMI_RANK", "PMI_SIZE", "PMI_FD", "PMIX_RANK"),
)
"""Variables of the agent's own task. A rank would mistake these for its rank and world size."""


class SlurmStep(Transport):
    """A node of an allocation.

    `job` is the ID of the allocation, and `group` is the component that the node belongs to. `options` are
    additional srun options, such as those of a plug-in. `variables` are NAME=VALUE strings for the agent.
    Even on this machine, Slurm may confine a step differently from this process, so such a node is never
    `here`.
    """

    host: str
    job: str
    group: int | None = None
    options: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    name: Literal["slurm"] = "slurm"
    hydra = "slurm"
    keeps_alive = False
    patience_s = 0.5  # srun must be running to end its step
    allocated = True

    @classmethod
    def to(cls, host: str, way: Way) -> "SlurmStep":
        """Return the transport that uses a step of the allocation."""
        return cls(host, way.job, way.group)

    @property
    def unknown(self) -> bool:
        """Return whether this process runs outside an allocation."""
        return not self.job

    def argv(self) -> list[str]:
        """Return the srun command with every option that variables can set. It contains no job values."""
        # Without --unbuffered, srun would wait for newlines, which frames don't have.
        return self._step([self.host], ["--nodes=1", "--ntasks=1", "--unbuffered"])

    def group_argv(self, hosts: Sequence[str]) -> list[str]:
        """Return the command for a step with a task on each of `hosts`. `LabeledStreams` reads its output.

        If one task fails, the others continue. The hosts are in the order of the allocation.
        """
        count = len(hosts)
        more = ["--label", "--no-kill", "--distribution=block", "--ntasks-per-node=1"]
        return self._step(hosts, [f"--nodes={count}", f"--ntasks={count}", *more])

    def _step(self, hosts: Sequence[str], size: Sequence[str]) -> list[str]:
        group = [] if self.group is None else [f"--het-group={self.group}"]
        unset = [part for name in _OF_THE_STEP for part in ("-u", name)]
        where = [f"--jobid={self.job}", *group, f"--nodelist={','.join(hosts)}"]
        start = ["env", *unset, *self.variables, "/bin/sh", "-c", _START, "sh"]
        return ["srun", *size, *_OPTIONS, *self.options, *where, *start, "/bin/sh", "-c", SCRIPT]

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment without variables that set srun options or describe another step."""
        named = {_JOB_NAME: environ["SLURM_JOB_NAME"]} if "SLURM_JOB_NAME" in environ else {}
        return {name: value for name, value in environ.items() if _passes(name)} | named

    def failure(self, end: ProcessEnd) -> LinkFailure:
        """Return the failure, based on srun's messages if srun itself failed, else on the node's messages."""
        relevant = end._replace(stderr=_telling(end))
        failure = classify(relevant, _BY_SRUN, _SRUN_FAILED, "srun on this machine")
        if failure.kind is Kind.LOST and re.search(_NODE_FAILED, end.stderr):
            failure = failure._replace(kind=Kind.NODE_DOWN)
        return failure._replace(clean=failure.clean and not re.search(_BROKEN, end.stderr))

    def advice(self, failure: LinkFailure, python: str | None) -> str:
        """Return advice, with a command to paste if there is one."""
        step = f"srun --jobid={self.job} --overlap -N1 -n1 -w {quote(self.host)}"
        of_the_node = (Kind.NODE_DOWN, Kind.UNREACHABLE, Kind.SILENT, Kind.LOST)
        known = {
            **dict.fromkeys(of_the_node, f"see `scontrol show node {quote(self.host)}`"),
            Kind.NO_ALLOCATION: f"the allocation is over: see `scontrol show job {self.job}`",
            Kind.NO_SCHEDULER: "see `scontrol ping`",
            Kind.STEP_REFUSED: f"try `{step} hostname`",
            Kind.NO_PYTHON: "set `python:` to an interpreter that exists on the node",
            Kind.OLD_PYTHON: OLD_PYTHON,
        }
        return known.get(failure.kind) or f"try `{step} {quote(python or 'python3')} -V`"


def _passes(name: str) -> bool:
    return name.startswith(_OF_THE_JOB) or name in _KEPT or not name.startswith(VARIABLES)


_SRUN_FAILED = 1
"""Exit status of srun's own failures."""

_NODE_FAILED = "[Nn]ode failure"
# From the output of Slurm 22.05 and the messages in its source code.
_BY_SRUN: Patterns = (
    (Kind.NO_SCHEDULER, r"Unable to contact slurm"),
    (Kind.NO_ALLOCATION, r"Invalid job id|[Jj]ob/step already complet|has been revoked"),
    (Kind.NO_ALLOCATION, r"allocation .* has expired|Unable to confirm allocation"),
    (Kind.NODE_DOWN, rf"{_NODE_FAILED}|required nodes? (?:is|are) not available|nodes? .* DOWN"),
    (Kind.UNREACHABLE, r"Communication connection failure"),
    (Kind.UNREACHABLE, r"Connection (?:refused|timed out)"),
    (Kind.STEP_REFUSED, r"Unable to create step|Unable to allocate resources|Access/permission denied"),
)

_CHATTER = r"lacks support for cpu binding"
_TASK_ENDED = r"tasks? [\d,-]+: Exited with exit code"
_KILLED = r"tasks? [\d,-]+: Killed"
_BROKEN = rf"{_NODE_FAILED}|Force Terminated|Job step aborted|{_KILLED}"
_FOLLOWS = (r"Force Terminated|Job step aborted|forcing job termination", _KILLED)
"""Messages that srun prints after the cause. Each is left out, in this order, unless nothing would remain."""


def _telling(end: ProcessEnd) -> str:
    """Return srun's messages about the cause, without routine messages and the status of a guardian."""
    silent = f"{_CHATTER}|{_TASK_ENDED}" if end.booted else _CHATTER
    relevant = _without(silent, end.stderr.splitlines(True))
    for pattern in _FOLLOWS:
        relevant = _without(pattern, relevant) or relevant
    return "".join(relevant)


def _without(pattern: str, relevant: Sequence[str]) -> list[str]:
    return [line for line in relevant if not re.search(pattern, line)]


NODE_VARIABLE = "SLURMD_NODENAME"
"""The variable with the name of a task's node, which may differ from the host name."""
_TASK_END = re.compile(r"srun: error: (\S+): tasks? [\d,-]+: (?:Exited with exit code (\d+)|.+)")
_LABEL = re.compile(rb" *(\d+): ?")


class LabeledStreams(Streams):
    """The output of one step on several nodes. srun labels each line.

    `nodes` maps each host to its node number, in the order of the labels. The `opening` is for all nodes.
    """

    def __init__(self, opening: bytes, nonce: str, nodes: Mapping[str, int], step: SlurmStep) -> None:
        self._opening, self._step = opening, step
        self._nodes = [_Node(index, nonce) for index in nodes.values()]
        self._on = dict(zip(nodes, self._nodes, strict=True))
        super().__init__([b""], nonce)
        self._half = {1: b"", 2: b""}  # incomplete last lines of stdout and stderr

    @property
    def booted(self) -> bool:
        """Return whether every agent has sent its hello."""
        return all(node.booted for node in self._nodes)

    def end(self, status: int | None, timed_out: bool = False, protocol_error: str = "") -> ProcessEnd:
        """Return the end of the process with the output of all nodes."""
        self.noise = b"".join(node.noise for node in self._nodes)
        return super().end(status, timed_out, protocol_error)

    def without_marker(self) -> bytes:
        """Return the opening for all nodes. No shell in between prints or waits for input."""
        return self._opening

    def receive(self, data: bytes) -> tuple[bytes, Sequence[wire.Frame | NodeGone]]:
        """Process stdout data. Raises `wire.ProtocolError`."""
        found: list[wire.Frame | NodeGone] = []
        for label, line in self._lines(1, data):
            if label is None or label >= len(self._nodes):
                raise wire.ProtocolError("a line without srun's label")
            node = self._nodes[label]
            if line.startswith(wire.GONE) and node.booted:
                node.listen(b"task %d: Exited with exit code %b\n" % (label, line[1:]))  # as srun prints it
                found += self._gone(node, int(line[1:]) if line[1:].isdigit() else None)
            else:
                found += node.receive(line)[1]
        return b"", found

    def listen(self, data: bytes) -> list[NodeGone]:
        """Process stderr data, which contains messages of srun and labeled lines of nodes."""
        found: list[NodeGone] = []
        heard: list[_Node] = []
        for label, line in self._lines(2, data):
            if label is not None and label < len(self._nodes):
                self._nodes[label].listen(line + b"\n")
                heard.append(self._nodes[label])
                continue
            super().listen(line + b"\n")
            if end := _TASK_END.match(line.decode(errors="replace")):
                found += self._ended(line, *end.groups())
        return found + [gone for node in heard if node.late for gone in self._gone(node, node.late)]

    def _lines(self, stream: int, data: bytes) -> Iterator[tuple[int | None, bytes]]:
        """Yield (label, text) of each line that is complete. The label of srun's own messages is None."""
        *whole, self._half[stream] = (self._half[stream] + data).split(b"\n")
        for line in whole:
            found = _LABEL.match(line)
            yield (int(found[1]), line[found.end() :]) if found else (None, line)

    def _ended(self, words: bytes, hosts: str, status: str | None) -> list[NodeGone]:
        """Record the end of tasks, as reported by srun."""
        found = []
        for node in (self._on[host] for host in expand_nodelist(hosts) if host in self._on):
            if status and not (node.booted or node.words):
                node.late = int(status)  # srun reports the exit before the output that gives the reason
            node.listen(words + b"\n")
            if not node.late:
                found += self._gone(node, int(status) if status else None)
        return found

    def _gone(self, node: "_Node", status: int | None) -> list[NodeGone]:
        """Return the end of a node on the first call, and nothing after that."""
        if node.gone:
            return []
        node.gone = True
        return [NodeGone(node.index, self._step.failure(node.end(status)))]


class _Node(Streams):
    """The output of one node of a step. `gone` is set once the node's end has been returned."""

    def __init__(self, index: int, nonce: str) -> None:
        super().__init__([b""], nonce)
        self.index = index
        self._rest = b""
        self.gone = False
        self.late = 0
        """The exit status of a node whose last output has not arrived yet; otherwise 0."""

    def receive(self, line: bytes) -> tuple[bytes, Sequence[wire.Frame | NodeGone]]:
        """Return the frames that a line, without its label, completes."""
        if not self.booted:
            return super().receive(line + b"\n")
        if not line.startswith(wire.PIECE):
            return b"", []  # the empty line before the last message
        data, self._rest = wire.from_lines(self._rest + line[1:])
        return super().receive(data)
