"""Which module speaks to which scheduler's queue."""

from distlaunch.batch.queue import Queue
from distlaunch.errors import DistlaunchError


def queue_of(scheduler: str) -> Queue:
    """The queue of that scheduler. Raises `DistlaunchError` for one that only a later version may know."""
    match scheduler:
        case "slurm":
            from distlaunch.batch import slurm

            return slurm
        case "grid-engine":
            from distlaunch.batch import grid_engine

            return grid_engine
        case "pbs":
            from distlaunch.batch import pbs

            return pbs
    raise DistlaunchError(f"this version of distlaunch can't ask {scheduler}")
