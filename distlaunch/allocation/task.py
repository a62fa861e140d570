"""A task that a scheduler has started: one of many processes, each of which is to be a rank."""

from collections.abc import Mapping

from distlaunch.agent.frozen import Frozen
from distlaunch.allocation.allocation import Scheduler
from distlaunch.errors import UsageError
from distlaunch.wording import counted


class Task(Frozen):
    """Its place: `step` is the same for all tasks that belong together, and for no others.

    `nodes` are the hosts, that of rank 0 first; `node_rank` is this one's number of `node_count`, if that is
    known, and `addresses` lead to rank 0's. `devices` are the GPUs that it sees, None = any. `restarts`
    counts how often the scheduler has started the job again; mpirun's tasks have none. `manager` is the
    descriptor of a process manager that can tell tasks of each other.
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
    scheduler: Scheduler | None = "slurm"
    manager: int | None = None

    @property
    def on_one_node(self) -> bool:
        """Whether all tasks are on this task's node."""
        return self.local_size == self.size


def visible_devices(environ: Mapping[str, str]) -> int | None:
    """How many GPUs a task sees; None = any."""
    devices = environ.get("CUDA_VISIBLE_DEVICES")
    return None if devices is None else len([name for name in devices.split(",") if name])


def number_of(environ: Mapping[str, str], name: str, starter: str, advice: str = "") -> int:
    """A variable of a task, which `starter` sets. Raises `UsageError` with what to do instead."""
    text = environ.get(name, "")
    if not text.isdecimal():
        what = f"{name}={text} is not a number" if text else f"{name} is not set"
        raise UsageError(f"exec runs as a task of {starter}, but {what}{advice}")
    return int(text)


def check_devices(task: Task, environ: Mapping[str, str]) -> None:
    """Raise `UsageError` if a LOCAL_RANK here is no device: in all tasks, so that none waits for another."""
    seen = task.devices
    if not seen or task.local_size <= seen:
        return
    slurms = task.scheduler == "slurm"
    name = "SLURM_LOCALID" if slurms else "local rank"
    told = f"CUDA_VISIBLE_DEVICES={environ['CUDA_VISIBLE_DEVICES']}, {name}={task.local_rank}"
    if seen == 1:
        other = "--gpus-per-node instead of --gpus-per-task, or " if slurms else ""
        raise UsageError(
            f"each task sees a GPU of its own ({told}), but scripts use cuda:LOCAL_RANK: use {other}"
            "`exec --virtual-local-rank`, which makes LOCAL_RANK 0"
        )
    tasks = counted(task.local_size, "task")
    advice = f"--ntasks-per-node={seen}" if slurms else f"{seen} tasks"
    raise UsageError(f"{tasks} on this node share {seen} GPUs ({told}): use {advice}")


def check_master(task: Task, environ: Mapping[str, str]) -> None:
    """Raise `UsageError` if MASTER_ADDR or MASTER_PORT can't be those of rank 0."""
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if host and not port:
        raise UsageError(f"MASTER_ADDR={host} is set, but not MASTER_PORT: set both, or unset it")
    if port and not (port.isdecimal() and 0 < int(port) < 65536):
        raise UsageError(f"MASTER_PORT={port} is not a port")
    known = {name.partition(".")[0] for name in task.nodes}
    if known and host and not host[0].isdigit() and ":" not in host and host.partition(".")[0] not in known:
        raise UsageError(
            f"MASTER_ADDR={host} is not among this step's hosts ({', '.join(task.nodes)}): unset "
            "MASTER_ADDR and MASTER_PORT, or set them to rank 0's"
        )
