"""Nodes of a Slurm allocation: srun's stdin and stdout are the link, for a step on one node or on several."""

import re
from collections.abc import Iterator, Mapping, Sequence
from shlex import quote
from typing import Literal

from distlaunch.agent import wire
from distlaunch.transports.failure import Kind, LinkFailure, Patterns, ProcessEnd, classify
from distlaunch.transports.handshake import SCRIPT, Handshake, NodeGone, Streams
from distlaunch.transports.transport import Transport
from distlaunch.wording import expand_nodelist

_OPTIONS = (
    "--overlap",  # what other steps use is not waited for, nor what this one uses by others
    "--mem=0",  # all that the job has on the node
    "--cpu-bind=none",  # which CPU is whose is the job file's to say
    "--mpi=none",
    "--input=all",
    "--output=all",
    "--error=all",
    "--kill-on-bad-exit=0",
    "--wait=0",
    "--export=ALL",
    "--chdir=/",
    "--quit-on-interrupt",
)
"""srun reads each from a variable, too, which the allocation, or a script in it, may have set."""

VARIABLES = ("SLURM_", "SRUN_", "PMI_", "PMIX_", "SLURMD_")
"""How the names begin that Slurm's tools set, and some of them read."""
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
"""The agent's own, which a rank would take for its rank and its world."""


class Slurm(Transport):
    """A node of an allocation; `job` is the allocation's id, `group` the node's component.

    `options` are more options of srun, such as a plug-in's; `variables` are NAME=VALUE for the agent. A step
    may be confined otherwise than we are, also on this machine, so that no such node is `here`.
    """

    host: str
    job: str
    group: int | None = None
    options: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    name: Literal["slurm"] = "slurm"
    patience_s = 0.5  # only a living srun tells its step of our end

    @property
    def unknown(self) -> bool:
        """Outside of an allocation."""
        return not self.job

    def argv(self) -> list[str]:
        """srun, with every option that a variable may set, and behind it nothing of the job."""
        # Unbuffered: else srun waits for the ends of lines, which frames don't have.
        return self._step([self.host], ["--nodes=1", "--ntasks=1", "--unbuffered"])

    def group_argv(self, hosts: Sequence[str]) -> list[str]:
        """The same with a task on each of `hosts`, for `LabelledStreams`; if one fails, the others go on.

        The hosts are in the order of the allocation.
        """
        count = len(hosts)
        more = ["--label", "--no-kill", "--distribution=block", "--ntasks-per-node=1"]
        return self._step(hosts, [f"--nodes={count}", f"--ntasks={count}", *more])

    def _step(self, hosts: Sequence[str], size: Sequence[str]) -> list[str]:
        group = [] if self.group is None else [f"--het-group={self.group}"]
        unset = [part for name in _OF_THE_STEP for part in ("-u", name)]
        where = [f"--jobid={self.job}", *group, f"--nodelist={','.join(hosts)}"]
        env = ["env", *unset, *self.variables]
        return ["srun", *size, *_OPTIONS, *self.options, *where, *env, "/bin/sh", "-c", SCRIPT]

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Without what srun would take for options, and whatever else describes another step."""
        return {name: value for name, value in environ.items() if _passes(name)}

    def failure(self, end: ProcessEnd) -> LinkFailure:
        """srun's own words, where it failed; else the node's."""
        said = end._replace(stderr=_telling(end))
        failure = classify(said, _BY_SRUN, _SRUN_FAILED, "srun on this machine")
        return failure._replace(clean=failure.clean and _swept(end))

    def advice(self, failure: LinkFailure, python: str | None) -> str:
        """With a command to paste where there is one."""
        step = f"srun --jobid={self.job} --overlap -N1 -n1 -w {quote(self.host)}"
        match failure.kind:
            case Kind.NO_ALLOCATION:
                return f"the allocation is over: see `scontrol show job {self.job}`"
            case Kind.NODE_DOWN | Kind.UNREACHABLE | Kind.SILENT | Kind.LOST:
                return f"see `scontrol show node {quote(self.host)}`"
            case Kind.STEP_REFUSED:
                return f"try `{step} hostname`"
            case Kind.NO_PYTHON:
                return "set `python:` to an interpreter that exists there"
            case Kind.OLD_PYTHON:
                return "set `python:` to Python 3.8 or later"
            case _:
                return f"try `{step} {quote(python or 'python3')} -V`"


def _passes(name: str) -> bool:
    return name.startswith(_OF_THE_JOB) or name in _KEPT or not name.startswith(VARIABLES)


_SRUN_FAILED = 1
"""srun's own exit status, and a task's that ends so."""

# Read off Slurm 22.05 and its sources' messages.
_BY_SRUN: Patterns = (
    (
        Kind.NO_ALLOCATION,
        r"Invalid job id|[Jj]ob/step already complet|has been revoked|allocation .* has expired",
    ),
    (Kind.NO_ALLOCATION, r"Unable to confirm allocation"),
    (Kind.NODE_DOWN, r"[Nn]ode failure|required nodes? (?:is|are) not available|nodes? .* DOWN"),
    (
        Kind.UNREACHABLE,
        r"Communication connection failure|Unable to contact slurm|Connection (?:refused|timed out)",
    ),
    (Kind.STEP_REFUSED, r"Unable to create step|Unable to allocate resources|Access/permission denied"),
)

_CHATTER = r"lacks support for cpu binding"
_TASK_ENDED = r"tasks? [\d,-]+: Exited with exit code"
_KILLED = r"tasks? [\d,-]+: Killed"
_BROKEN = rf"[Nn]ode failure|Force Terminated|Job step aborted|{_KILLED}"
_FOLLOWS = (r"Force Terminated|Job step aborted|forcing job termination", _KILLED)
"""What srun says after the cause, which of these is the last to be left out."""


def _telling(end: ProcessEnd) -> str:
    """What srun said of the cause: not what it always says, nor a guardian's status, which says it itself."""
    silent = f"{_CHATTER}|{_TASK_ENDED}" if end.booted else _CHATTER
    said = _without(silent, end.stderr.splitlines(True))
    for pattern in _FOLLOWS:
        said = _without(pattern, said) or said
    return "".join(said)


def _without(pattern: str, said: Sequence[str]) -> list[str]:
    return [line for line in said if not re.search(pattern, line)]


def _swept(end: ProcessEnd) -> bool:
    """Whether the status is that of a guardian that found nothing below it: srun's own failure is 1, too."""
    if re.search(_BROKEN, end.stderr):
        return False
    return end.status == 0 or bool(re.search(_TASK_ENDED, end.stderr))


NODE_VARIABLE = "SLURMD_NODENAME"
"""What tells a task which node it is on; the host's name may be another."""
_TASK_END = re.compile(r"srun: error: (\S+): tasks? [\d,-]+: (?:Exited with exit code (\d+)|.+)")
_LABEL = re.compile(rb" *(\d+): ?")


class LabelledStreams(Streams):
    """Those of one step for several nodes, whose output srun tells apart line by line.

    `nodes` are their numbers by host, in the order of srun's labels. The `opening` is for all of them.
    """

    def __init__(self, opening: bytes, nonce: str, nodes: Mapping[str, int], step: Slurm) -> None:
        self._opening, self._step = opening, step
        self._nodes = [_Node(index, nonce) for index in nodes.values()]
        self._on = dict(zip(nodes, self._nodes, strict=True))
        super().__init__(*(handshake for node in self._nodes for handshake in node.handshakes))
        self._half = {1: b"", 2: b""}

    def without_marker(self) -> bytes:
        """The opening, for all: no shell that prints, or could wait, is in between."""
        return self._opening

    def receive(self, data: bytes) -> tuple[bytes, Sequence[wire.Frame | NodeGone]]:
        """Take what came on stdout. Raises `wire.ProtocolError`."""
        found: list[wire.Frame | NodeGone] = []
        for label, line in self._lines(1, data):
            if label is None or label >= len(self._nodes):
                raise wire.ProtocolError("a line without srun's label")
            node = self._nodes[label]
            if line.startswith(wire.GONE) and node.booted:
                node.listen(b"task %d: Exited with exit code %b\n" % (label, line[1:]))  # as srun has it
                found += self._gone(node, int(line[1:]) if line[1:].isdigit() else None)
            else:
                found += node.receive(line)[1]
        return b"", found

    def listen(self, data: bytes) -> list[NodeGone]:
        """Take what came on stderr: srun's own words, or labelled ones of a node."""
        found: list[NodeGone] = []
        for label, line in self._lines(2, data):
            if label is not None and label < len(self._nodes):
                self._nodes[label].listen(line + b"\n")
                continue
            super().listen(line + b"\n")
            if end := _TASK_END.match(line.decode(errors="replace")):
                found += self._ended(line, *end.groups())
        return found

    def _lines(self, stream: int, data: bytes) -> Iterator[tuple[int | None, bytes]]:
        *whole, self._half[stream] = (self._half[stream] + data).split(b"\n")
        for line in whole:
            found = _LABEL.match(line)
            yield (int(found[1]), line[found.end() :]) if found else (None, line)

    def _ended(self, words: bytes, hosts: str, status: str | None) -> list[NodeGone]:
        """What srun says of tasks that did not end well."""
        found = []
        for node in (self._on[host] for host in expand_nodelist(hosts) if host in self._on):
            node.listen(words + b"\n")
            found += self._gone(node, int(status) if status else None)
        return found

    def _gone(self, node: "_Node", status: int | None) -> list[NodeGone]:
        """Once for each."""
        if node.gone:
            return []
        node.gone = True
        return [NodeGone(node.index, self._step.failure(node.end(status)))]


class _Node(Streams):
    """One node's part of the streams."""

    def __init__(self, index: int, nonce: str) -> None:
        super().__init__(Handshake([b""], nonce))
        self.index = index
        self._rest = b""
        self.gone = False

    def receive(self, line: bytes) -> tuple[bytes, Sequence[wire.Frame | NodeGone]]:
        """The frames that a line completes."""
        if not self.booted:
            return super().receive(line + b"\n")
        if not line.startswith(wire.PIECE):
            return b"", []  # the empty line before a last word
        data, self._rest = wire.from_lines(self._rest + line[1:])
        return super().receive(data)
