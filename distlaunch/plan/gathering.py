"""Launchers that somebody else starts: what each says of itself, where they meet, and which node each is."""

import re
import zlib
from collections.abc import Sequence
from typing import Any

from distlaunch import __version__
from distlaunch.agent.frozen import Frozen
from distlaunch.job.allocation import TaskPlace

PORTS, LOWEST_PORT, PORT_SPAN = 8, 10_000, 20_000
"""Below the ports that the system gives to connections."""


class Arrival(Frozen):
    """What a launcher says of itself: the `job` that it belongs to, and its host's `name`.

    `nodes` are the fewest and the most that it was told to expect. `node_rank` is the number that it was
    given, `task` the scheduler's; None = none. `place` is that of a single rank among the tasks of a
    scheduler, and `gpus` how many of its own such a task has.
    """

    job: str
    name: str
    nodes: tuple[int, int]
    node_rank: int | None = None
    task: int | None = None
    place: TaskPlace | None = None
    gpus: int | None = None
    version: str = __version__


class Gathering(Frozen):
    """Where the launchers of a run come together, and this one among them.

    The controller listens at the first of `ports` that it gets; others try all `hosts` and ports. `serves`
    says whether this launcher is the controller; None = if it runs on the first of the hosts, and is the
    first there. `fixed`: the first port is to be rank 0's, too. Once the fewest nodes are there, more are
    waited for until `last_call_s` are over. `ordered`: the launchers know their numbers.
    """

    arrival: Arrival
    hosts: tuple[str, ...]
    ports: tuple[int, ...]
    serves: bool | None
    wait_s: float = 600.0
    last_call_s: float = 30.0
    fixed: bool = True
    ordered: bool = True
    hint: str = ""

    @property
    def label(self) -> str:
        """For people."""
        host = self.hosts[0]
        return f"[{host}]:{self.ports[0]}" if ":" in host else f"{host}:{self.ports[0]}"


def ports_for(key: str) -> tuple[int, ...]:
    """Ports that all launchers of a job draw alike: where it has no endpoint, or rank 0 has taken that."""
    drawn = (zlib.crc32(f"{key} {i}".encode()) for i in range(PORTS))
    return tuple(LOWEST_PORT + number % PORT_SPAN for number in drawn)


def in_order(arrivals: Sequence[Arrival], near: Sequence[bool]) -> list[int]:
    """Which of the arrivals is node 0, node 1 and so on, where nobody has numbered them.

    Those on the endpoint's machine come first: MASTER_ADDR is to be rank 0's. Within that, numbers count that
    all have, each another: those they were given, else the scheduler's; else the hosts' names.
    """
    given = [[each.node_rank for each in arrivals], [each.task for each in arrivals]]
    numbers = next((kind for kind in given if None not in kind and len({*kind}) == len(kind)), None)

    def key(i: int) -> tuple[Any, ...]:
        return not near[i], numbers[i] if numbers else 0, natural(arrivals[i].name), i

    return sorted(range(len(arrivals)), key=key)


def natural(name: str) -> list[tuple[bool, int, str]]:
    """The key by which gpu2 comes before gpu10."""
    parts = re.split(r"([0-9]+)", name)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]
