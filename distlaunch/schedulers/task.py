"""The tasks of `distlaunch exec`: processes started by srun, mpirun, flux run or jsrun that become ranks."""

import re
from collections.abc import Callable, Mapping
from functools import partial

from distlaunch.agent.frozen import Frozen
from distlaunch.errors import UsageError
from distlaunch.job.spec import Allocation
from distlaunch.job.text import is_loopback
from distlaunch.schedulers.queue import VISIBLE, granted_gpus
from distlaunch.wording import counted, listed


class Advice(Frozen):
    """Text for advice on GPUs. `own_gpu` suggests replacing the option that assigns a GPU to each task."""

    local_rank: str = "local rank"
    own_gpu: str = ""
    tasks: str = "{} tasks per node"


class Task(Frozen):
    """The position of a task; `step` identifies the tasks that belong together.

    `nodes` are the hosts, beginning with rank 0's host, which is reachable at `addresses`. `node_rank` is the
    number of this host among `node_count` hosts, if known. `devices` is the number of visible GPUs; None =
    any. `restarts` counts the job's earlier starts, by the scheduler or by the distlaunch that runs mpirun.
    `manager` is a descriptor connected to the tasks' process manager.
    """

    step: str
    job: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int | None
    node_count: int | None
    nodes: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    devices: int | None = None
    restarts: int = 0
    advice: Advice = Advice()
    manager: int | None = None

    @property
    def on_one_node(self) -> bool:
        """Return whether all tasks are on this task's node."""
        return self.local_size == self.size


def number_of(environ: Mapping[str, str], name: str, starter: str, advice: str = "") -> int:
    """Return the number in a task's variable, which `starter` sets. Raises `UsageError` with `advice`."""
    text = environ.get(name, "")
    if not text.isdecimal():
        what = f"{name}={text} is not a number" if text else f"{name} is not set"
        raise UsageError(f"exec must run as a task of {starter}, but {what}{advice}")
    return int(text)


def check_devices(task: Task, environ: Mapping[str, str]) -> None:
    """Raise `UsageError` if a LOCAL_RANK on this node has no device.

    All tasks on the node raise the error, so none waits for another.
    """
    seen = task.devices
    if not seen or task.local_size <= seen:
        return
    devices = environ["CUDA_VISIBLE_DEVICES"]
    what = f"CUDA_VISIBLE_DEVICES={devices}, {task.advice.local_rank}={task.local_rank}"
    virtual = "`distlaunch exec --virtual-local-rank`"
    empty = "for a CPU job, make CUDA_VISIBLE_DEVICES empty"
    if seen == 1:
        raise UsageError(
            f"each task sees one GPU ({what}), but scripts use cuda:LOCAL_RANK: if each has its own, use "
            f"{task.advice.own_gpu}{virtual}, which sets LOCAL_RANK to 0; if they share it, request more "
            f"GPUs, or start one task per node; {empty}"
        )
    tasks, fitting = counted(task.local_size, "task"), task.advice.tasks.format(seen)
    fix = f"request more GPUs, or use {fitting}; if each task has its own GPUs, use {virtual}; {empty}"
    raise UsageError(f"each of {tasks} on this node sees only {seen} GPUs ({what}): {fix}")


def check_master(task: Task, environ: Mapping[str, str]) -> None:
    """Raise `UsageError` if MASTER_ADDR or MASTER_PORT can't belong to rank 0."""
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if host and not port:
        raise UsageError(f"MASTER_ADDR={host} is set but MASTER_PORT is not: set both or neither")
    if port and not (port.isdecimal() and 0 < int(port) < 65536):
        raise UsageError(f"MASTER_PORT={port} is not a port from 1 to 65535")
    if host and is_loopback(host) and not task.on_one_node:
        what = f"MASTER_ADDR={host} is a loopback address, which other nodes can't reach"
        raise UsageError(f"{what}; unset it and MASTER_PORT for all tasks, or {_SET_MASTER_X}")
    known = {name.partition(".")[0] for name in task.nodes}
    # Clusters name other interfaces of a host after it: node1i, node1-ib0.
    of_known = host and re.match(rf"(?:{'|'.join(map(re.escape, known))})(?!\d)", host)
    here = host == "localhost" and len(task.nodes) == 1
    if known and host and not host[0].isdigit() and ":" not in host and not of_known and not here:
        raise UsageError(
            f"MASTER_ADDR={host} is not among this step's hosts ({listed(task.nodes)}): unset MASTER_ADDR "
            f"and MASTER_PORT, or set MASTER_ADDR to {task.nodes[0]} or its IP address"
        )


# Schedulers that number tasks node by node


class Names(Frozen):
    """The names of the variables that a scheduler sets for its tasks. `nodes` or `local_size` is enough."""

    starter: str
    rank: str
    size: str
    local_rank: str
    job: str
    nodes: str = ""
    local_size: str = ""


Reader = Callable[[Mapping[str, str]], Allocation | None]


def numbered_task(names: Names, environ: Mapping[str, str], title: str, allocation_in: Reader) -> Task:
    """Locate the task with this environment. Raises `UsageError` if there is none, or for contradictions."""
    if names.rank not in environ:
        what = f"this {title} process is not a task of `{names.starter}`"
        raise UsageError(f"{what}: use `{names.starter} distlaunch exec`, or `distlaunch run job.yaml`")
    number = partial(number_of, environ, starter=names.starter, advice=f"; {SET_BY_A_SCRIPT}")
    size, part = number(names.size), number(names.nodes or names.local_size) or 1
    nodes, each = (part, size // part) if names.nodes else (size // part, part)
    if not size or each * nodes != size:
        what = f"{names.size}={size} and {names.nodes or names.local_size}={part}"
        raise UsageError(f"{names.starter} must start the same number of tasks on each node, but {what}")
    rank, local = number(names.rank), number(names.local_rank)
    if rank >= size or rank % each != local:
        what = f"{names.rank} is {rank}, but {names.local_rank} is {local}, with {each} tasks per node"
        how = "start the same number of tasks on each node, and number them node by node"
        raise UsageError(f"{names.starter} must {how}: {what}")
    allocation = allocation_in(environ)
    hosts = tuple(node.host for node in allocation.nodes) if allocation else ()
    if len(hosts) < nodes:
        what = f"{names.starter} runs on {counted(nodes, 'node')}, but {title} lists only {len(hosts)}"
        raise UsageError(f"{what}: instead of `distlaunch exec`, use `distlaunch run` with a job file")
    used = hosts[-nodes:]  # a launch node, which runs no tasks, comes first
    job = environ.get(names.job, "")
    step, devices = f"{job}.{environ.get('PMIX_NAMESPACE', '')}", granted_gpus(environ, VISIBLE)
    return Task(step, job, rank, size, local, each, rank // each, nodes, used, used[:1], devices)


# mpirun: Open MPI's variables, or those of Hydra, which is MPICH's mpirun

SET_BY_A_SCRIPT = "does a script or container change or remove variables?"
SET_MASTER = "set MASTER_ADDR to the host of rank 0, and MASTER_PORT to a free port there"
_SET_MASTER_X = f"{SET_MASTER} (mpirun -x MASTER_ADDR=… -x MASTER_PORT=…)"
_RANK, _HYDRAS_RANK = "OMPI_COMM_WORLD_RANK", "PMI_RANK"
_OPEN_MPI = (_RANK, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
_HYDRA = (_HYDRAS_RANK, "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_PMI_PIPE = "PMI_FD"
_MPIRUN, _DAEMON = "OMPI_MCA_orte_hnp_uri", "OMPI_MCA_orte_local_daemon_uri"
"""Variables with the addresses of mpirun and of this node's daemon, which are equal on mpirun's own host."""
_NODES = "OMPI_MCA_orte_num_nodes"
_STEPS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid")


def mpi_task(environ: Mapping[str, str]) -> Task | None:
    """Locate the task with this environment if mpirun started it. Raises `UsageError`."""
    if _RANK in environ:
        return _of_open_mpi(environ)
    return _of_hydra(environ) if _HYDRAS_RANK in environ and "MPI_LOCALRANKID" in environ else None


def _of_open_mpi(environ: Mapping[str, str]) -> Task:
    """Locate an Open MPI task. Its rank 0 has to be on mpirun's host."""
    step = next((environ[name] for name in _STEPS if name in environ), "")
    nodes = environ.get(_NODES, "")
    task = _task(environ, _OPEN_MPI, f"mpi-{step}", int(nodes) if nodes.isdecimal() else None)
    if task.on_one_node or environ.get("MASTER_ADDR"):
        return task
    if task.rank == 0 and environ.get(_MPIRUN) != environ.get(_DAEMON):
        raise UsageError(
            "rank 0 is not on mpirun's host, and Open MPI doesn't expose where it is: list mpirun's host "
            f"first, or {_SET_MASTER_X}"
        )
    if not (addresses := _addresses(environ.get(_MPIRUN, ""))):
        raise UsageError(f"Open MPI doesn't expose where rank 0 is: {_SET_MASTER_X}")
    return task._replace(addresses=addresses)


def _of_hydra(environ: Mapping[str, str]) -> Task:
    """Locate a Hydra task. Hydra's process manager can determine the host of rank 0."""
    pipe = environ.get(_PMI_PIPE, "")
    return _task(environ, _HYDRA, "mpi")._replace(manager=int(pipe) if pipe.isdecimal() else None)


def _task(environ: Mapping[str, str], names: tuple[str, ...], step: str, nodes: int | None = None) -> Task:
    """Locate a task from the variables `names`: rank, size, local rank, local size. Raises `UsageError`."""
    texts = [environ.get(name, "") for name in names]
    seen = ", ".join(f"{name}={text}" for name, text in zip(names, texts, strict=True))
    if not all(text.isdecimal() for text in texts):
        raise UsageError(f"mpirun's variables are not all numbers: {seen}; {SET_BY_A_SCRIPT}")
    rank, size, local_rank, local_size = [int(text) for text in texts]
    if not (rank < size and local_rank < local_size <= size):
        raise UsageError(f"mpirun's variables contradict each other: {seen}; {SET_BY_A_SCRIPT}")
    job = environ.get("DISTLAUNCH_JOB_ID", step)
    devices = granted_gpus(environ, VISIBLE)
    task = Task(step, job, rank, size, local_rank, local_size, None, None, devices=devices)
    node_rank, node_count = _node(task, nodes)
    restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "0") if "DISTLAUNCH_JOB_ID" in environ else "0"
    # If distlaunch started mpirun, these are the job's restarts.
    return task._replace(node_rank=node_rank, node_count=node_count, restarts=int(restarts))


def _node(task: Task, nodes: int | None) -> tuple[int | None, int | None]:
    """Return the node number and the node count.

    They are known if every node has the same number of tasks, assigned by slot or round-robin.
    """
    if task.on_one_node:
        return 0, 1
    if nodes is None or nodes * task.local_size != task.size:
        return None, None
    if task.rank % task.local_size == task.local_rank:
        return task.rank // task.local_size, nodes
    return (task.rank % nodes, nodes) if task.rank // nodes == task.local_rank else (None, None)


def _addresses(uri: str) -> tuple[str, ...]:
    """Return the addresses in a URI such as ``1.0;tcp://10.0.0.1,10.1.0.1:4000;tcp6://[fd00::2]:4001``."""
    hosts = re.findall(r"tcp4?://([0-9.,]+):\d+", uri) + re.findall(r"tcp6://\[([0-9a-f:,]+)\]:\d+", uri)
    return tuple(",".join(hosts).split(",")) if hosts else ()
