"""How launchers that somebody else started become one run: what each says before its link begins.

    launcher ─▶ controller    MAGIC, then its `Arrival` with {"nonce"}
    controller ─▶ launcher    {"nonce", "proves": "secret" | "munge" | ""}
    launcher ─▶ controller    {"proof"}, or {"refuses"}: why it does not join after all
    controller ─▶ launcher    {"proof"}
    controller ─▶ launcher    {"waiting"} …    which nodes are missing, now and then
    controller ─▶ launcher    {"node", "run", "nonce"}: from here on both send frames

Each is a line of JSON. In place of any of its lines the controller may send {"refused", "status", "another"}
and close; `another`: it is the controller of another job.
A proof covers both nonces and the arrival, so that none can be used twice. What is sent decides ranks,
addresses and ports alone: a launcher runs nothing but its own command line.
"""

import json
import os
import re
from collections.abc import Mapping
from typing import Any

from distlaunch.errors import DistlaunchError, Exit
from distlaunch.job.allocation import TaskPlace
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
_MUNGE_S = 5.0


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
        fewest, most = fields["nodes"]
        place = fields["place"]
        arrival = Arrival(**fields)._replace(
            nodes=(fewest, most), place=None if place is None else TaskPlace(*place)
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"it lacks something: {error}") from None
    numbers = (*arrival.nodes, arrival.node_rank, arrival.task, arrival.gpus, *(arrival.place or ()))
    if not all(number is None or (type(number) is int and 0 <= number < 1 << 20) for number in numbers):
        raise ValueError("a number is out of range")
    if not isinstance(arrival.job, str) or not isinstance(arrival.name, str):
        raise ValueError("a name is no text")
    if len(arrival.name) > MAX_NAME or not arrival.name.isprintable():
        raise ValueError("its host's name can't be one")
    return arrival


def nonce() -> str:
    """One that nobody has used before."""
    return os.urandom(16).hex()


class Prover:
    """Proves to the other side that we are who it expects, and checks its proof; `name` is this host's.

    With DISTLAUNCH_SECRET, a keyed hash (HMAC-SHA256); where MUNGE is at work, its credentials, by which only
    the same user gets in; else nothing, as with torchrun.
    """

    def __init__(self, environ: Mapping[str, str], name: str) -> None:
        self._name = name
        self._secret = environ.get(SECRET, "").encode(errors="surrogateescape")
        self._environ = environ

    @property
    def way(self) -> str:
        """What a controller demands: secret, munge or nothing."""
        if self._secret:
            return "secret"
        try:
            return "" if self._wrong_credential(self._credential("works"), "works") else "munge"
        except OSError:
            return ""  # its programs are missing, or its daemon does not answer

    def proof(self, way: str, side: str, said: str) -> str:
        """The proof of what was `said`, by one `side`. Raises `JoinError` where it can't be given."""
        if bool(self._secret) != (way == "secret"):
            ours = f"{SECRET} is set on {self._name}, but the controller has none"
            theirs = f"the controller demands {SECRET}, which is not set on {self._name}"
            text = f"{ours if self._secret else theirs}: set it to the same value on all nodes"
            raise JoinError(text, Exit.USAGE)
        if way == "secret":
            import hmac  # few jobs have one

            return hmac.new(self._secret, _covered(side, said), "sha256").hexdigest()
        if way == "munge":
            try:
                return self._credential(_digest(side, said))
            except OSError as error:
                text = f"{self._name} has no MUNGE credential: {error}; or set {SECRET} on all nodes"
                raise JoinError(text, Exit.USAGE) from None
        return ""

    def wrong(self, way: str, side: str, said: str, proof: object) -> str:
        """Why a proof of the other side's does not do; "" if it does."""
        if way == "secret":
            import hmac

            expected = self.proof(way, side, said)
            good = isinstance(proof, str) and proof.isascii() and hmac.compare_digest(proof, expected)
            return "" if good else f"its {SECRET} is another one"
        if way == "munge":
            return self._wrong_credential(str(proof), _digest(side, said))
        return ""

    def _credential(self, payload: str) -> str:
        """A credential of this process's user: see munge(1). Raises OSError."""
        status, text = self._munge(["munge", "--string", payload], "")
        if status:
            raise OSError(f"munge: {text.strip() or f'exit status {status}'}")
        return text.strip()

    def _wrong_credential(self, text: str, payload: str) -> str:
        """Why one is not our own user's for that payload; "" if it is. Each can be read once: unmunge(1)."""
        try:
            status, said = self._munge(["unmunge"], text)
        except OSError as error:
            return f"its MUNGE credential can't be read here: {error}"
        found = re.search(r"^UID: .*\((\d+)\)$", said, re.MULTILINE)
        if status or not found:
            return "it has no valid MUNGE credential"
        if int(found[1]) != os.geteuid():
            return f"it belongs to another user (uid {found[1]})"
        meant = said.rstrip("\n").endswith("\n\n" + payload)
        return "" if meant else "its MUNGE credential is for something else"

    def _munge(self, argv: list[str], text: str) -> tuple[int, str]:
        import subprocess  # few processes need it

        try:
            done = subprocess.run(
                argv,
                input=text,
                capture_output=True,
                text=True,
                timeout=_MUNGE_S,
                check=False,
                env=self._environ,
            )
        except subprocess.TimeoutExpired:
            raise OSError("no answer from munged") from None
        return done.returncode, done.stdout if argv[0] == "unmunge" or not done.returncode else done.stderr


def _covered(side: str, said: str) -> bytes:
    return f"distlaunch {side} {said}".encode()


def _digest(side: str, said: str) -> str:
    import hashlib  # of MUNGE alone

    return hashlib.sha256(_covered(side, said)).hexdigest()
