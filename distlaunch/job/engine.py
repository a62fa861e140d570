"""Who gives out the ranks: distlaunch, or torch's elastic agents; and all that follows from it alone."""

from collections.abc import Mapping
from typing import Literal

from distlaunch.agent.frozen import Frozen

Ranking = Literal["static", "c10d", "etcd-v2"]
"""As `rendezvous.backend` has it: by distlaunch, or by torch's elastic agents with a store of that kind."""


class Engine(Frozen):
    """What is started on the nodes, each of which is a worker to us: ranks, or agents that start ranks.

    With `gives_ranks` a worker is a rank, else it numbers and restarts some of its own. With `serves_store`
    the rendezvous's store is on the first node, at a port that distlaunch holds. `unit` is what
    people call a worker, `stem` what its files are named after.
    """

    gives_ranks: bool
    serves_store: bool
    unit: str
    stem: str

    def called(self, rank: int, home: str) -> str:
        """A worker for people, in short: `rank 3`, or `torch's agent on gpu-b`."""
        return f"{self.unit} {rank}" if self.gives_ranks else f"torch's agent on {home}"

    def counted(self, number: int) -> str:
        """A number of workers: `3 ranks`, or `3 torch agents`."""
        return f"{number} {self.unit}" + ("s" if number != 1 else "")


ENGINES: Mapping[Ranking, Engine] = {
    "static": Engine(gives_ranks=True, serves_store=True, unit="rank", stem="rank"),
    "c10d": Engine(gives_ranks=False, serves_store=True, unit="torch agent", stem="agent"),
    "etcd-v2": Engine(gives_ranks=False, serves_store=False, unit="torch agent", stem="agent"),
}
