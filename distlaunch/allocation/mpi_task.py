"""The place of a task that mpirun has started, by Open MPI's variables or those of Hydra, MPICH's mpirun."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from distlaunch.allocation.task import Task, visible_devices
from distlaunch.errors import UsageError

_RANK, _HYDRAS_RANK = "OMPI_COMM_WORLD_RANK", "PMI_RANK"
_OPEN_MPI = (_RANK, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
_HYDRA = (_HYDRAS_RANK, "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_PMI_PIPE = "PMI_FD"
_MPIRUN, _DAEMON = "OMPI_MCA_orte_hnp_uri", "OMPI_MCA_orte_local_daemon_uri"
"""Where mpirun is, and the daemon of this node: the same on mpirun's own."""
_NODES = "OMPI_MCA_orte_num_nodes"
_STEPS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid")


class _Place(NamedTuple):
    rank: int
    size: int
    local_rank: int
    local_size: int


def mpi_task(environ: Mapping[str, str]) -> Task | None:
    """The task that has this environment, if mpirun has started it. Raises `UsageError`."""
    if _RANK in environ:
        return _of_open_mpi(environ)
    return _of_hydra(environ) if _HYDRAS_RANK in environ and "MPI_LOCALRANKID" in environ else None


def _of_open_mpi(environ: Mapping[str, str]) -> Task:
    place = _place(environ, _OPEN_MPI)
    step = next((environ[name] for name in _STEPS if name in environ), "")
    nodes = environ.get(_NODES, "")
    task = _task(f"mpi-{step}", place, environ, int(nodes) if nodes.isdecimal() else None)
    if task.on_one_node or environ.get("MASTER_ADDR"):
        return task
    if place.rank == 0 and environ.get(_MPIRUN) != environ.get(_DAEMON):
        raise UsageError(
            "rank 0 is not on mpirun's host, and Open MPI does not tell where it is: set MASTER_ADDR and "
            "MASTER_PORT (mpirun -x MASTER_ADDR=… -x MASTER_PORT=…), or list mpirun's host first"
        )
    if not (addresses := _addresses(environ.get(_MPIRUN, ""))):
        raise UsageError(
            "Open MPI does not tell where rank 0 is: set MASTER_ADDR and MASTER_PORT (mpirun -x)"
        )
    return task._replace(addresses=addresses)


def _of_hydra(environ: Mapping[str, str]) -> Task:
    """Its process manager tells all others where rank 0 is."""
    pipe = environ.get(_PMI_PIPE, "")
    task = _task("mpi", _place(environ, _HYDRA), environ)
    return task._replace(manager=int(pipe) if pipe.isdecimal() else None)


def _task(step: str, place: _Place, environ: Mapping[str, str], nodes: int | None = None) -> Task:
    number, count = _node(place, nodes)
    restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "0") if "DISTLAUNCH_JOB_ID" in environ else "0"
    return Task(
        step=step,
        job=environ.get("DISTLAUNCH_JOB_ID", step),
        restarts=int(restarts),  # of the job that started mpirun, if distlaunch did
        rank=place.rank,
        size=place.size,
        local_rank=place.local_rank,
        local_size=place.local_size,
        node_rank=number,
        node_count=count,
        devices=visible_devices(environ),
        scheduler=None,
    )


def _node(place: _Place, nodes: int | None) -> tuple[int | None, int | None]:
    """The node's number and how many there are, if all have as many tasks, dealt by slot or in turn."""
    if place.local_size == place.size:
        return 0, 1
    if nodes is None or nodes * place.local_size != place.size:
        return None, None
    if place.rank % place.local_size == place.local_rank:
        return place.rank // place.local_size, nodes
    return (place.rank % nodes, nodes) if place.rank // nodes == place.local_rank else (None, None)


def _place(environ: Mapping[str, str], names: tuple[str, ...]) -> _Place:
    texts = [environ.get(name, "") for name in names]
    if not all(text.isdecimal() for text in texts):
        seen = ", ".join(f"{name}={text}" for name, text in zip(names, texts, strict=True))
        raise UsageError(f"mpirun's variables are not all numbers: {seen}; does a script set one of them?")
    place = _Place(*map(int, texts))
    if not (place.rank < place.size and place.local_rank < place.local_size <= place.size):
        raise UsageError(f"mpirun's variables contradict each other: {place._asdict()}")
    return place


def _addresses(uri: str) -> tuple[str, ...]:
    """Those of mpirun's host, of a URI such as ``1.0;tcp://10.0.0.1,10.1.0.1:4000;tcp6://[fd00::2]:4001``."""
    four = [address for part in re.findall(r"tcp4?://([0-9.,]+):\d+", uri) for address in part.split(",")]
    six = [
        address for part in re.findall(r"tcp6://\[([0-9a-f:,]+)\]:\d+", uri) for address in part.split(",")
    ]
    return (*four, *six)
