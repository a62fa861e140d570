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
from collections.abc import Mapping
from typing import Any

from distlaunch.allocation.place import TaskPlace
from distlaunch.errors import DistlaunchError
from distlaunch.plan.gathering import Arrival

MAGIC = b"distlaunch join 1\n"
TORCHS_FIRST = b"\x00\xce\xf7\x85\x3c"
"""What a client of torch's TCPStore sends first."""
TORCHS_PING = TORCHS_FIRST + b"\x0d" + b"ping"
"""A request that a TCPStore answers with the four last bytes (torch 2.4 and later)."""
MAX_LINE = 1 << 14
"""Bytes of a line: a stranger must not fill the controller."""
SECRET = "DISTLAUNCH_SECRET"  # noqa: S105 (the name of a variable)
MAX_NAME = 253


class JoinError(DistlaunchError):
    """The nodes of a run did not come together."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.exit_status = status


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
