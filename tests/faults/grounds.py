"""Where random kills happen: hosts over ssh, or the nodes of a Slurm allocation."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.cluster.hosts import Bed, bed_of
from tests.cluster.slurm import NODES, Slurm, inside, slurm_of
from tests.faults.victims import OVER_SLURM, OVER_SSH, PROCS, Kind


class Ground:
    """Hosts over ssh: who may be hit there, how a job reaches them, and what else may be left of it."""

    hosts = 4
    kinds: Mapping[str, Kind] = OVER_SSH
    together = False
    """Whether two may be hit at once on one host: somebody is left there who ends the rest."""

    def __init__(self, bed: Bed) -> None:
        self.bed, self.ranks = bed, self.hosts * PROCS

    @property
    def keys(self) -> str:
        """What a job file says to reach the hosts."""
        how = self.bed.launcher or {"ssh": {"config": f"{self.bed.folder}/ssh_config"}}
        names = [f"host{i + 1}" for i in range(self.hosts)]
        keys = {"nodes": names, "gpus_per_node": 0} | how
        return "".join(f"{name}: {json.dumps(value)}\n" for name, value in keys.items())

    def steps(self) -> set[str]:
        """What a scheduler takes to be running, each with its host."""
        return set()


class Allocation(Ground):
    """The nodes of a Slurm allocation, inside of which this process is."""

    hosts, kinds, together = NODES, OVER_SLURM, True

    def __init__(self, slurm: Slurm) -> None:
        super().__init__(slurm)
        self._slurm = slurm

    def steps(self) -> set[str]:
        """The steps that slurmctld lists."""
        return set(self._slurm.tool("squeue", "--steps", "--noheader", "--format=%i %N").splitlines())


@contextlib.contextmanager
def _over_ssh(folder: Path) -> Iterator[Ground]:
    with bed_of(Ground.hosts, folder) as bed:
        yield Ground(bed)


@contextlib.contextmanager
def _over_slurm(folder: Path) -> Iterator[Ground]:
    patch = pytest.MonkeyPatch.context()
    with patch as patched, slurm_of(NODES, folder) as slurm, inside(slurm, patched, "--no-kill"):
        yield Allocation(slurm)


GROUNDS = {"ssh": _over_ssh, "slurm": _over_slurm}
"""How each is made, in a folder of its own."""
