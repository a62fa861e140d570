"""Which scheduler the caller is inside of, by its environment."""

from collections.abc import Mapping

from distlaunch.allocation.allocation import Allocation


def find_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """The allocation that a process with this environment runs in. Raises ValueError for nonsense."""
    if "SLURM_JOB_ID" in environ:
        from distlaunch.allocation.slurm import slurm_allocation

        return slurm_allocation(environ)
    return None
