"""Launchers started by another program: the data they send, their endpoint, and their order."""

import re
import zlib
from collections.abc import Sequence
from typing import Any

from distlaunch import __version__
from distlaunch.agent.frozen import Frozen

PORTS, LOWEST_PORT, PORT_SPAN = 8, 10_000, 20_000
"""Number of ports, and the start and size of their range, which is below the system's ephemeral ports."""


class TaskPlace(Frozen):
    """The position of a scheduler task on its host and among the hosts. None means unknown.

    Each such task counts as a node with one rank.
    """

    local_rank: int
    local_size: int
    node_rank: int | None
    node_count: int | None


class Arrival(Frozen):
    """The data that a launcher sends about itself: its `job`, the `name` of its host, and so on.

    `nodes` contains the minimum and maximum number of expected nodes. `node_rank` is an explicit node number,
    and `task` is the task number from the scheduler. Either is None if there is none. `place` is the position
    of a single rank among the tasks of a scheduler, and `gpus` is the number of GPUs of such a task. `lacks`
    is the reason why its program can't be started, if known, or "".
    """

    job: str
    name: str
    nodes: tuple[int, int]
    node_rank: int | None = None
    task: int | None = None
    place: TaskPlace | None = None
    gpus: int | None = None
    lacks: str = ""
    version: str = __version__


class Gathering(Frozen):
    """The endpoint of the launchers of a run, and the role of one launcher.

    The controller listens on the first available port of `ports`. The other launchers try all `hosts` and
    ports. `serves` makes this launcher the controller. If it is None, the first launcher on the first host
    becomes the controller. If `fixed`, the first port is also reserved for rank 0. Once the minimum number of
    nodes has connected, the controller waits up to `last_call_s` seconds for more. `wait_s` limits the wait
    before that. If `ordered`, the launchers have node numbers. `unreached`, `elsewhere` and `taken` are
    advice in case the controller can't be reached, the endpoint is not on this machine, or its port can't be
    used.
    """

    arrival: Arrival
    hosts: tuple[str, ...]
    ports: tuple[int, ...]
    serves: bool | None
    wait_s: float = 600.0
    last_call_s: float = 30.0
    fixed: bool = True
    ordered: bool = True
    unreached: str = ""
    elsewhere: str = ""
    taken: str = ""

    @property
    def label(self) -> str:
        """Return the endpoint for messages."""
        host = self.hosts[0]
        return f"[{host}]:{self.ports[0]}" if ":" in host else f"{host}:{self.ports[0]}"

    @property
    def fixed_port(self) -> int | None:
        """Return the port of the endpoint if the command line or the environment sets it."""
        return self.ports[0] if self.fixed else None


def ports_for(key: str) -> tuple[int, ...]:
    """Return ports that every launcher of a job derives from `key`.

    They are used if no endpoint is given, or once rank 0 uses the port of the endpoint."""
    drawn = (zlib.crc32(f"{key} {i}".encode()) for i in range(PORTS))
    return tuple(LOWEST_PORT + number % PORT_SPAN for number in drawn)


def in_order(arrivals: Sequence[Arrival], near: Sequence[bool]) -> list[int]:
    """Return the indices of the arrivals in node order, for launchers without node numbers.

    Launchers on the endpoint's machine (`near`) are first, since MASTER_ADDR belongs to rank 0. The others
    are sorted by node number if all have different ones, else by task number if all have different ones, else
    by host name.
    """
    given = [[each.node_rank for each in arrivals], [each.task for each in arrivals]]
    numbers = next((kind for kind in given if None not in kind and len({*kind}) == len(kind)), None)

    def key(i: int) -> tuple[Any, ...]:
        return not near[i], numbers[i] if numbers else 0, natural(arrivals[i].name), i

    return sorted(range(len(arrivals)), key=key)


def natural(name: str) -> list[tuple[bool, int, str]]:
    """Return a sort key that puts gpu2 before gpu10."""
    parts = re.split(r"([0-9]+)", name)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]
