"""Which scheduler the caller is inside of, by its environment."""

from collections.abc import Mapping

from distlaunch.agent.frozen import Frozen
from distlaunch.allocation.allocation import Allocation, Scheduler

_MARKS: tuple[tuple[Scheduler, tuple[str, ...]], ...] = (
    ("slurm", ("SLURM_JOB_ID",)),
    ("grid-engine", ("JOB_ID", "PE_HOSTFILE")),
    ("grid-engine", ("JOB_ID", "SGE_TASK_ID", "HOSTNAME")),  # a job without a parallel environment
    ("pbs", ("PBS_JOBID", "PBS_NODEFILE")),
    ("lsf", ("LSB_JOBID", "LSB_MCPU_HOSTS")),
    ("lsf", ("LSB_JOBID", "LSB_DJOB_HOSTFILE")),
    ("flux", ("FLUX_JOB_ID",)),
    ("flux", ("FLUX_URI",)),
)
"""Variables that only jobs have; the first scheduler of which all are set is meant."""
FLUX_HOSTS = ("flux", "hostlist", "--expand", "local")


class Listing(Frozen):
    """Where the hosts are listed, if not in variables: in a file, or in what a command prints."""

    path: str = ""
    command: tuple[str, ...] = ()


def scheduler_of(environ: Mapping[str, str]) -> Scheduler | None:
    """The scheduler that has started a process with this environment."""
    found = (name for name, marks in _MARKS if all(environ.get(mark) for mark in marks))
    # `flux proxy` sets FLUX_URI on a machine that is outside.
    return next((name for name in found if name != "flux" or not environ.get("FLUX_PROXY_REMOTE")), None)


def listing_for(environ: Mapping[str, str]) -> Listing:
    """Where the hosts of that allocation are listed."""
    match scheduler_of(environ):
        case "grid-engine":
            return Listing(environ.get("PE_HOSTFILE", ""))
        case "pbs":
            return Listing(environ["PBS_NODEFILE"])
        case "lsf" if not environ.get("LSB_MCPU_HOSTS"):
            return Listing(environ["LSB_DJOB_HOSTFILE"])
        case "flux":
            return Listing(command=FLUX_HOSTS)
    return Listing()


def find_allocation(environ: Mapping[str, str], listed: str = "") -> Allocation | None:
    """The allocation that a process with this environment runs in; `listed` is the text of its listing.

    Raises ValueError for nonsense.
    """
    scheduler = scheduler_of(environ)
    if scheduler is None or scheduler == "kubernetes":  # no variable tells of pods
        return None
    if scheduler == "slurm":
        from distlaunch.allocation.slurm import slurm_allocation

        return slurm_allocation(environ)
    from distlaunch.allocation.engines import engine_allocation

    return engine_allocation(scheduler, environ, listed)
