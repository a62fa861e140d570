"""`distlaunch exec -- PROGRAM ARGS…`: runs a program as one rank, inside a task of srun or mpirun."""

import os
import re
import select
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from distlaunch.cli.output import print_text, say
from distlaunch.errors import DistlaunchError, Exit, UsageError, reason
from distlaunch.launch.join import Launcher, Prover, blocked
from distlaunch.schedulers import task_in
from distlaunch.schedulers.task import SET_MASTER, Task, check_devices, check_master, mpi_task
from distlaunch.transports.gathering import Arrival, Gathering, TaskPlace, ports_for

if TYPE_CHECKING:
    from distlaunch.job.spec import JobSpec


USAGE = "usage: distlaunch exec [--virtual-local-rank] -- PROGRAM [ARGS…]"
HELP = f"""{USAGE}

Run PROGRAM as one rank, in a task started by srun, mpirun, flux run or jsrun. RANK, LOCAL_RANK, WORLD_SIZE,
MASTER_ADDR, MASTER_PORT and torchrun's other variables are derived from that command's variables. Rank 0's
task controls the run. When a rank fails, the others are stopped, and each host shows which rank failed.

  --virtual-local-rank  Set LOCAL_RANK to 0, for tasks that see only their own GPU (srun --gpus-per-task).
  -h, --help            Show this help and exit.
"""


def run_exec(words: Sequence[str]) -> int:
    """Run the program as the rank of this task; return its exit status. Raises `DistlaunchError`."""
    virtual, argv = _parsed(words)
    if not argv:
        print_text(HELP)
        return Exit.OK
    task = task_of(os.environ)
    if not virtual:
        check_devices(task, os.environ)
    check_master(task, os.environ)
    try:
        return _run(task, argv, gathering_of(task, virtual, os.environ))
    finally:
        if task.manager is not None:  # otherwise, Hydra counts the rank as failed
            finalize(task.manager)


def gathering_of(task: Task, virtual: bool, environ: Mapping[str, str]) -> Gathering:
    """Describe how a step's tasks gather: at the user's endpoint, or at ports that each task can derive."""
    job = f"{task.step} {task.restarts} {os.getuid()}"
    port = environ.get("MASTER_PORT")
    local_rank = 0 if virtual else task.local_rank
    place = TaskPlace(local_rank, task.local_size, task.node_rank, task.node_count)
    gpus = 1 if task.devices and (virtual or task.devices >= task.local_size) else 0
    name = os.uname().nodename or "localhost"
    return Gathering(
        Arrival(job, name, (task.size, task.size), task.rank, place=place, gpus=gpus),
        hosts=_hosts(task, environ),
        ports=(int(port),) if port else ports_for(job),
        serves=task.rank == 0,
        fixed=bool(port),
        unreached="check that rank 0 is running; if so, set MASTER_ADDR and MASTER_PORT to reach it",
        elsewhere="set MASTER_ADDR to an address of the host of rank 0",
        taken="set MASTER_PORT to a free port above 1023",
    )


def _run(task: Task, argv: list[str], gathering: Gathering) -> int:
    """Control the run if this is rank 0, else join it. Return the exit status."""
    if gathering.serves:
        from distlaunch.cli.run import run_gathered

        return run_gathered(job_of(task, argv, gathering.arrival), gathering)
    from distlaunch.signals import Signals

    with Signals() as signals:
        seat = Launcher(gathering, Prover(os.environ, gathering.arrival.name), signals, say).seated()
        blocked(signals.watched)
    from distlaunch.launch.joined_agent import Part, serve  # late: gathering comes first

    return serve(seat, Part(argv, first=task.local_rank == 0), signals.watched, own_first=True)


def job_of(task: Task, argv: list[str], arrival: Arrival) -> "JobSpec":
    """Return this task's part of the job: a node with one rank."""
    from distlaunch.agent import scratch
    from distlaunch.job import spec as job

    directory, *spares = scratch.places()
    backend = os.environ.get("DISTLAUNCH_BACKEND")
    earlier = job.Earlier(task.job, task.restarts) if task.restarts else None
    return job.JobSpec(
        name=os.path.basename(argv[0]),
        nodes=(job.NodeSpec(arrival.name, gpus=arrival.gpus, procs=1, place=arrival.place),),
        program=job.Program(
            "command", (argv[0],), workdir=os.getcwd(), args=tuple(argv[1:]), python=sys.executable
        ),
        logs=job.Logs(directory, temporary=True, torchrun=job.TorchrunLogs(), spares=tuple(spares)),
        rendezvous=job.RendezvousSpec(id=task.step),
        # Only `distlaunch run` with mpirun passes it on. GPUs decide whether nccl can be used.
        backend="mpi" if backend == "mpi" else "gloo" if backend == "gloo" else "auto",
        source="the command line",
        invocation=job.Invocation(placeholders=False, shares_stdio=True, earlier=earlier),
    )


def _parsed(words: Sequence[str]) -> tuple[bool, list[str]]:
    """Parse the command line: whether a task sees only its own GPU, and the program ([] for --help).

    Raises `UsageError`.
    """
    dashes = list(words).index("--") if "--" in words else len(words)
    options, argv = words[:dashes], list(words[dashes + 1 :])
    if {"-h", "--help"}.intersection(options):
        return False, []
    unknown = [word for word in options if word != "--virtual-local-rank"]
    if unknown or not argv:
        raise UsageError(f"{f'unexpected {unknown[0]}' if unknown else 'no program'}; {USAGE}")
    return bool(options), argv


def task_of(environ: Mapping[str, str]) -> Task:
    """Return mpirun's task if there is one, because a single scheduler task may run all of mpirun."""
    if task := mpi_task(environ):
        if task.manager is None or environ.get("MASTER_PORT"):
            return task
        try:
            return located(task, task.manager)
        except OSError as error:
            what = f"can't communicate with mpirun through PMI_FD: {reason(error)}"
            raise DistlaunchError(f"{what}; if mpirun is still running, {SET_MASTER}") from None
    return task_in(environ)


def _hosts(task: Task, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the hosts at which rank 0 might be reachable: the user's choice, or those known to the task."""
    if given := environ.get("MASTER_ADDR"):
        return (given,)
    if task.on_one_node:
        return ("127.0.0.1",)
    if not task.addresses:
        raise UsageError(f"the host of rank 0 is unknown: {SET_MASTER}")
    return task.addresses


# MPICH's process manager (PMI-1), through which tasks exchange addresses. The protocol has lines such as
# `cmd=get kvsname=kvs_1 key=a`, on the socket with the descriptor PMI_FD. The program also uses this socket
# later, so nothing is initialized here.

START_S, FINISH_S = 600.0, 2.0
"""Maximum seconds to wait for an answer at the start, which may need all ranks, and at the end."""
KEY = "distlaunch"
HOST = "MPIR_CVAR_CH3_INTERFACE_HOSTNAME"
"""The variable that contains the name by which mpirun and the other hosts know this host."""


def located(task: Task, descriptor: int) -> Task:
    """Complete the task with facts from its process manager: the job, its node, and the host of rank 0."""
    with socket.socket(fileno=os.dup(descriptor)) as manager:
        job = _ask(manager, "cmd=get_my_kvsname")["kvsname"]
        if task.rank == 0:
            host = os.environ.get(HOST) or os.uname().nodename
            _ask(manager, f"cmd=put kvsname={job} key={KEY} value={host}")
        _ask(manager, "cmd=barrier_in")
        host = _ask(manager, f"cmd=get kvsname={job} key={KEY}")["value"]
        mapping = _ask(manager, f"cmd=get kvsname={job} key=PMI_process_mapping").get("value", "")
    node, count = node_of(mapping, task.rank) or (None, None)
    return task._replace(step=job, job=job, node_rank=node, node_count=count, addresses=(host,))


def finalize(descriptor: int) -> None:
    """Sign off from the process manager, in case the program hasn't done so.

    Otherwise, Hydra treats the closed connection as a crash. If Hydra notices this before it has reaped the
    task, mpirun exits with status 1, whatever the task's status.
    """
    with suppress(OSError, DistlaunchError), socket.socket(fileno=os.dup(descriptor)) as manager:
        _ask(manager, "cmd=finalize", FINISH_S)


def node_of(mapping: str, rank: int) -> tuple[int, int] | None:
    """Return a rank's node and the number of nodes from a mapping such as ``(vector,(0,2,8),(2,1,4))``.

    Each block is (first node, nodes, ranks on each). Ranks are assigned to the blocks cyclically.
    """
    blocks = [tuple(map(int, found)) for found in re.findall(r"\((\d+),(\d+),(\d+)\)", mapping)]
    dealt = [
        node for first, nodes, each in blocks for node in range(first, first + nodes) for _ in range(each)
    ]
    return (dealt[rank % len(dealt)], len({*dealt})) if dealt else None


def _ask(manager: socket.socket, line: str, within_s: float | None = None) -> dict[str, str]:
    """Send a command to the process manager, and return the fields of its answer.

    Raises OSError, also if no answer arrives within `within_s` seconds (by default, START_S), or
    `DistlaunchError` if it refuses the command.
    """
    within_s = within_s or START_S
    manager.sendall(line.encode() + b"\n")
    answer, answered, until = b"", select.poll(), time.monotonic() + within_s
    answered.register(manager, select.POLLIN)  # a timeout of the socket would also apply to the program
    while not answer.endswith(b"\n"):
        if not answered.poll(max(0.0, until - time.monotonic()) * 1000):
            raise TimeoutError(f"no answer to `{line}` within {within_s:g} s; perhaps a host hangs")
        piece = manager.recv(1)  # only the answer: later bytes belong to the program
        if not piece:
            raise OSError("it closed the connection")
        answer += piece
    text = answer.decode(errors="replace").strip()
    fields = dict(word.partition("=")[::2] for word in text.split())
    if fields.get("rc", "0") != "0":
        raise DistlaunchError(f"mpirun's process manager refused `{line}`: {text}; {SET_MASTER}")
    return fields
