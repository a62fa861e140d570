"""How launchers that somebody else started become one run: what each says before its link begins.

    launcher ─▶ controller    MAGIC, then its `Arrival` with {"nonce"}
    controller ─▶ launcher    {"nonce", "proves": "secret" | "munge" | ""}
    launcher ─▶ controller    {"proof"}
    controller ─▶ launcher    {"proof"}
    controller ─▶ launcher    {"waiting"} …    which nodes are missing, now and then
    controller ─▶ launcher    {"node", "run", "nonce"}: from here on both send frames

Each is a line of JSON. In place of any of its lines the controller may send {"refused", "status", "another"}
and close; `another`: it is the controller of another job.
A proof covers both nonces and the arrival, so that none can be used twice. What is sent decides ranks,
addresses and ports alone: a launcher runs nothing but its own command line.
"""

import hashlib
import hmac
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from distlaunch import __version__
from distlaunch.agent.frozen import Frozen
from distlaunch.allocation.place import TaskPlace
from distlaunch.errors import DistlaunchError

MAGIC = b"distlaunch join 1\n"
TORCHS_FIRST = b"\x00\xce\xf7\x85\x3c"
"""What a client of torch's TCPStore sends first."""
TORCHS_PING = TORCHS_FIRST + b"\x0d" + b"ping"
"""A request that a TCPStore answers with the four last bytes (torch 2.4 and later)."""
MAX_LINE = 1 << 14
"""Bytes of a line: a stranger must not fill the controller."""
SECRET = "DISTLAUNCH_SECRET"  # noqa: S105 (the name of a variable)
PORTS, LOWEST_PORT, PORT_SPAN = 8, 10_000, 20_000
"""Below the ports that the system gives to connections."""
MAX_NAME = 253


class JoinError(DistlaunchError):
    """The nodes of a run did not come together."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.exit_status = status


class Arrival(Frozen):
    """What a launcher says of itself: the `job` that it belongs to, its host's `name`, its number of workers.

    `nodes` are the fewest and the most that it was told to expect. `node_rank` is the number that it was
    given, `task` the scheduler's; None = none. `place` is that of a single rank among the tasks of a
    scheduler, and `gpus` how many of its own such a task has.
    """

    job: str
    name: str
    procs: int
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
    digest = hashlib.sha256(key.encode()).digest()
    drawn = (int.from_bytes(digest[2 * i : 2 * i + 2], "big") for i in range(PORTS))
    return tuple(LOWEST_PORT + number % PORT_SPAN for number in drawn)


def line_of(message: Mapping[str, Any]) -> bytes:
    """A message as it is sent."""
    return json.dumps(message).encode() + b"\n"


def message_of(line: bytes) -> dict[str, Any]:
    """The message in a line. Raises ValueError."""
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError("not an object")
    return message


def arrival_of(message: Mapping[str, Any]) -> Arrival:
    """The arrival that a launcher has sent. Raises ValueError for one that is none."""
    try:
        fields = {name: message[name] for name in Arrival._fields}
        fewest, most = map(int, fields["nodes"])
        place = fields["place"]
        arrival = Arrival(**fields)._replace(
            nodes=(fewest, most), place=None if place is None else TaskPlace(*place)
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"it lacks something: {error}") from None
    numbers = (arrival.procs, arrival.node_rank, arrival.task, arrival.gpus, *(arrival.place or ()))
    if not all(number is None or (isinstance(number, int) and 0 <= number < 1 << 20) for number in numbers):
        raise ValueError("a number is out of range")
    texts = (arrival.job, arrival.name, arrival.version)
    if not all(isinstance(text, str) and len(text) <= MAX_NAME for text in texts) or not arrival.procs:
        raise ValueError("a name is too long")
    return arrival


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


def nonce() -> str:
    """One that nobody has used before."""
    return os.urandom(16).hex()


class Prover:
    """Proves to the other side that we are who it expects, and checks its proof.

    With DISTLAUNCH_SECRET, a keyed hash (HMAC-SHA256); where MUNGE is at work, its credentials, by which only
    the same user gets in; else nothing, as with torchrun.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._secret = environ.get(SECRET, "").encode()
        self._environ = environ

    @property
    def way(self) -> str:
        """What a controller demands: secret, munge or nothing."""
        if self._secret:
            return "secret"
        from distlaunch.links import munge  # its programs are looked for once

        return "munge" if munge.works(self._environ) else ""

    def proof(self, way: str, side: str, said: str) -> str:
        """The proof of what was `said`, by one `side`. Raises `JoinError` where it can't be given."""
        if way == "secret":
            if not self._secret:
                raise JoinError(f"the controller demands a secret: set {SECRET} here to the same value", 2)
            return hmac.new(self._secret, _covered(side, said), "sha256").hexdigest()
        if way == "munge":
            from distlaunch.links import munge

            try:
                return munge.credential(_digest(side, said))
            except OSError as error:
                text = f"the controller demands a MUNGE credential: {error}; or set {SECRET} on all nodes"
                raise JoinError(text, 2) from None
        return ""

    def wrong(self, way: str, side: str, said: str, proof: object) -> str:
        """Why a proof of the other side's does not do; "" if it does."""
        if way == "secret":
            good = isinstance(proof, str) and hmac.compare_digest(proof, self.proof(way, side, said))
            return "" if good else f"its {SECRET} is another one"
        if way == "munge":
            from distlaunch.links import munge

            return munge.wrong(str(proof), _digest(side, said))
        return ""


def _covered(side: str, said: str) -> bytes:
    return f"distlaunch {side} {said}".encode()


def _digest(side: str, said: str) -> str:
    return hashlib.sha256(_covered(side, said)).hexdigest()
