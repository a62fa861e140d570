"""The protocol for joining independently started launchers into one run, and the joining launcher's side.

    launcher ─▶ controller    MAGIC, then its `Arrival` with {"nonce", "endpoint"}
    controller ─▶ launcher    {"nonce", "proves": "secret" | "munge" | ""}
    launcher ─▶ controller    {"proof"}, or {"refuses"}, the reason not to join
    controller ─▶ launcher    {"proof"}
    controller ─▶ launcher    {"waiting"} …    periodically, the missing nodes
    controller ─▶ launcher    {"node", "run", "nonce"}: afterward, both sides send frames

Each message is a line of JSON. The controller may send {"refused", "status", "another"} instead of any of its
messages and close the connection. `another` means that it controls another job, with another ID or another
port as its `endpoint`. A proof covers both nonces and the arrival, so it can't be replayed. The messages set
only ranks, addresses and ports. A launcher runs only its own command line.
"""

import json
import os
import re
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import cycle, islice, product
from typing import Any

from distlaunch.agent.frozen import Frozen
from distlaunch.errors import DistlaunchError, Exit
from distlaunch.launch.process import watch_for_silence
from distlaunch.signals import Interrupts
from distlaunch.transports.gathering import Arrival, Gathering, TaskPlace, ports_for
from distlaunch.wording import NO_SUSPENDING_TORCHRUN

MAGIC = b"distlaunch join 1\n"
TORCHS_FIRST = b"\x00\xce\xf7\x85\x3c"
"""The first bytes that a TCPStore client sends."""
TORCHS_PING = TORCHS_FIRST + b"\x0d" + b"ping"
"""A request that a TCPStore (torch 2.4 and later) answers with the last four bytes of the request."""
MAX_LINE = 1 << 14
"""Maximum bytes of a line. A limit is needed because anyone may connect."""
SECRET = "DISTLAUNCH_SECRET"  # noqa: S105 (the name of a variable)
SAME_SECRET = f"set {SECRET} to the same value on all nodes"
_OTHER_JOB = f"if that controller belongs to another job, use another port; otherwise, {SAME_SECRET}"
_CHECK_NAME = "check this name, or add it to /etc/hosts"
MAX_NAME, MAX_LACKS = 253, 300
_MUNGE_S = 5.0
Say = Callable[[str], object]
CONNECT_S, ANSWER_S = 3.0, 10.0
RETRY_S, RETRY_MOST_S = 0.01, 0.5
"""Seconds between two rounds of attempts to reach the controller, at first and at most."""
QUICK_S = 0.1
"""Maximum seconds of an attempt that a free port has refused, rather than a firewall dropped."""
TELL_S = 5.0
"""Seconds from the beginning of a wait to the first message about it. The time doubles with each message."""
TURN_S = 0.5
MAX_NODES = 1 << 16
"""Maximum number of nodes, limited by the frame header."""
MAX_RUN_ID = 200


class JoinError(DistlaunchError):
    """The launchers of a run couldn't join."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.exit_status = status


def line_of(message: Mapping[str, Any]) -> bytes:
    """Return a message as a line."""
    return json.dumps(message).encode() + b"\n"


def message_of(line: bytes) -> dict[str, Any]:
    """Return the message in a line. Raises ValueError."""
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError("not an object")
    return message


def arrival_of(message: Mapping[str, Any]) -> Arrival:
    """Return the arrival in a launcher's message. Raises ValueError if there is none."""
    try:
        fields = {name: message[name] for name in Arrival._fields}
        fewest, most = fields["nodes"]
        place = None if fields["place"] is None else TaskPlace(*fields["place"])
        arrival = Arrival(**{**fields, "nodes": (fewest, most), "place": place})
    except (KeyError, TypeError) as error:
        raise ValueError(f"a field is missing: {error}") from None
    numbers = (*arrival.nodes, arrival.node_rank, arrival.task, arrival.gpus, *(arrival.place or ()))
    if not all(number is None or (type(number) is int and 0 <= number < 1 << 20) for number in numbers):
        raise ValueError("a number such as --node-rank is out of range")
    if not isinstance(arrival.job, str) or not isinstance(arrival.name, str):
        raise ValueError("a name is not a string")
    if len(arrival.name) > MAX_NAME or not arrival.name.isprintable():
        raise ValueError("its host name is invalid")
    if (
        not isinstance(arrival.lacks, str)
        or len(arrival.lacks) > MAX_LACKS
        or not arrival.lacks.isprintable()
    ):
        raise ValueError("its problem is invalid")
    return arrival


def nonce() -> str:
    """Return a new random nonce."""
    return os.urandom(16).hex()


class Prover:
    """Creates and checks identity proofs. `name` is the name of this host.

    With DISTLAUNCH_SECRET, a proof is a keyed hash (HMAC-SHA256). With MUNGE, a proof is a credential that
    only the same user can create. Without either, there is no proof, as with torchrun.
    """

    def __init__(self, environ: Mapping[str, str], name: str) -> None:
        self._name = name
        self._secret = environ.get(SECRET, "").encode(errors="surrogateescape")
        self._environ = environ

    @property
    def way(self) -> str:
        """Return the kind of proof that a controller requires: "secret", "munge" or "" for none."""
        if self._secret:
            return "secret"
        try:
            return "" if self._wrong_credential(self._credential("works"), "works") else "munge"
        except OSError:
            return ""  # its programs are missing, or its daemon does not answer

    def proof(self, way: str, side: str, transcript: str) -> str:
        """Return one `side`'s proof of a `transcript`. Raises `JoinError` if that is impossible.

        `side` is launcher or controller. The transcript consists of both nonces and the arrival.
        """
        if bool(self._secret) != (way == "secret"):
            ours = f"{SECRET} is set on {self._name}, but not for the controller"
            theirs = f"the controller requires {SECRET}, which is not set on {self._name}"
            raise JoinError(f"{ours if self._secret else theirs}; {_OTHER_JOB}", Exit.USAGE)
        if way == "secret":
            import hmac  # few jobs have a secret

            return hmac.new(self._secret, _covered(side, transcript), "sha256").hexdigest()
        if way == "munge":
            try:
                return self._credential(_digest(side, transcript))
            except OSError as error:
                why = f"munge: {error.strerror}" if error.strerror else error  # not there, or what it said
                what = f"the controller requires a MUNGE credential, which {self._name} can't create: {why}"
                advice = f"set up MUNGE there, or {SAME_SECRET}"
                raise JoinError(f"{what}; {advice}", Exit.USAGE) from None
        return ""

    def wrong(self, way: str, side: str, transcript: str, proof: object) -> str:
        """Return the reason why the other side's proof is invalid, or "" if it is valid."""
        if way == "secret":
            import hmac

            expected = self.proof(way, side, transcript)
            good = isinstance(proof, str) and proof.isascii() and hmac.compare_digest(proof, expected)
            return "" if good else f"its {SECRET} is different"
        if way == "munge":
            return self._wrong_credential(str(proof), _digest(side, transcript))
        return ""

    def _credential(self, payload: str) -> str:
        """Return a MUNGE credential of this process's user; see munge(1). Raises OSError."""
        status, text = self._munge(["munge", "--string", payload], "")
        if status:
            raise OSError(text.strip() or f"munge: exit status {status}")
        return text.strip()

    def _wrong_credential(self, text: str, payload: str) -> str:
        """Return the reason why a credential is invalid, or "" if this user created it for `payload`.

        A credential can be read only once; see unmunge(1).
        """
        try:
            status, printed = self._munge(["unmunge"], text)
        except OSError as error:
            return f"its MUNGE credential can't be read on {self._name}: {error}"
        found = re.search(r"^UID: .*\((\d+)\)$", printed, re.MULTILINE)
        if status or not found:
            why = re.search(r"^STATUS: +(.*) \(\d+\)$", printed, re.MULTILINE)
            return f"it has no valid MUNGE credential{f' ({why[1]})' if why else ''}"
        if int(found[1]) != os.geteuid():
            return f"it belongs to another user (uid {found[1]})"
        meant = printed.rstrip("\n").endswith("\n\n" + payload)
        return "" if meant else "its MUNGE credential is for something else"

    def _munge(self, argv: list[str], text: str) -> tuple[int, str]:
        """Run munge(1) or unmunge(1) with `text` as input. Return its status and output. Raises OSError."""
        import subprocess  # few processes need it

        run = partial(subprocess.run, capture_output=True, text=True, check=False, env=self._environ)
        try:
            done = run(argv, input=text, timeout=_MUNGE_S)
        except subprocess.TimeoutExpired:
            raise OSError("no answer from munged") from None
        return done.returncode, done.stdout if argv[0] == "unmunge" or not done.returncode else done.stderr


def _covered(side: str, transcript: str) -> bytes:
    return f"distlaunch {side} {transcript}".encode()


def _digest(side: str, transcript: str) -> str:
    import hashlib  # only MUNGE needs it

    return hashlib.sha256(_covered(side, transcript)).hexdigest()


# A launcher's way into a run that another launcher controls


class Seat(Frozen):
    """A launcher's place in a run, with its node number and its connection to the controller.

    `unread` contains the bytes received after the line with the other fields.
    """

    connection: socket.socket
    node: int
    run_id: str
    nonce: str
    controller: str
    unread: bytes


class Wait:
    """The time limit of a wait, and the schedule of messages about it."""

    def __init__(self, limit_s: float) -> None:
        self._began, self.limit_s, self._tell_s = time.monotonic(), limit_s, TELL_S

    @property
    def over(self) -> bool:
        """Return whether the limit is reached."""
        return time.monotonic() - self._began > self.limit_s

    def is_worth_telling(self) -> bool:
        """Return whether a message is due, according to TELL_S."""
        if time.monotonic() - self._began < self._tell_s:
            return False
        self._tell_s *= 2
        return True


def pause(interrupts: Interrupts, say: Say, wait_s: float, *fds: int) -> None:
    """Wait up to `wait_s` seconds for a readable descriptor. Raises `JoinError` on a signal to stop."""
    ready, _, _ = select.select([interrupts.fd, *fds], [], [], wait_s)
    for signum in interrupts.received() if interrupts.fd in ready else b"":
        if signum != signal.SIGTSTP:
            raise JoinError(f"stopped by {signal.Signals(signum).name}", 128 + signum)
        say(NO_SUSPENDING_TORCHRUN)


def blocked(signums: Iterable[int]) -> None:
    """Block signals in this process and its future forks until a later reader handles them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signums)


def renumbered(number: int, wanted: int | None) -> str:
    """Return the message for a user who requested node number `wanted` and got `number`."""
    why = "with c10d it counts only if it differs on all nodes; node 0 is on the endpoint's host"
    return f"this is node {number}, not --node-rank {wanted}: {why}"


class _TooEarlyError(ValueError):
    """The controller can't admit this launcher yet."""


class Launcher:
    """A launcher that connects to the controller and waits until all nodes have joined."""

    def __init__(self, gathering: Gathering, prover: Prover, interrupts: Interrupts, say: Say) -> None:
        self._gathering, self._prover = gathering, prover
        self._interrupts, self._say = interrupts, say
        self._why = self._advice = ""
        key = f"{gathering.label} {gathering.arrival.job}"
        # Addresses at which a controller that lacks a node may listen later
        self._second = [*product(gathering.hosts[:1], ports_for(key) if gathering.fixed else ())]
        self._next = cycle(self._second)

    def seated(self) -> Seat:
        """Return the place in the run once all nodes have joined. Raises `JoinError`."""
        seat = self.seated_unless(lambda: "")
        assert seat
        return seat

    def seated_unless(self, opened: Callable[[], str | None]) -> Seat | None:
        """Return the place in the run, or None once `opened` returns None: this launcher is the controller.

        `opened` returns why this launcher can't be the controller yet, or "" if another one may be it.
        """
        wait, pause_s, place = Wait(self._gathering.wait_s), RETRY_S, self._gathering.label
        while (busy := opened()) is not None:
            for host, port in () if busy else self._places():
                if seat := self._try(host, port):
                    return seat
            if wait.over:
                what = f"can't reach the controller at {place}: {self._why}{self._advice}"
                what = f"can't listen at {place}: {busy}" if busy else what
                status = Exit.PORT_TAKEN if busy else Exit.UNREACHABLE
                raise JoinError(f"gave up after {wait.limit_s:g} s: {what}", status)
            if wait.is_worth_telling():
                who = "node 0 at" if self._gathering.ordered else "the node with the address"
                self._say(
                    f"waiting for {place}: {busy}" if busy else f"waiting for {who} {place}: {self._why}"
                )
            pause(self._interrupts, self._say, pause_s)
            pause_s = min(pause_s * 1.5, RETRY_MOST_S)
        return None

    def seated_late(self) -> Seat | None:
        """Return the place in a started run that lacks a node, or None if there is no such run."""
        return next(filter(None, (self._try(host, port) for host, port in self._second)), None)

    def _places(self) -> Iterator[tuple[str, int]]:
        """Yield the addresses of the initial listener, then those that it may use later.

        Where a firewall delays each attempt, by up to CONNECT_S seconds, each call yields one of the latter.
        """
        yield from product(self._gathering.hosts, self._gathering.ports)
        for place in islice(self._next, len(self._second)):
            began = time.monotonic()
            yield place
            if time.monotonic() - began > QUICK_S:
                break

    def _try(self, host: str, port: int) -> Seat | None:
        """Return the seat assigned by the controller. If there is none, return None and set `_why`."""
        first = (host, port) == (self._gathering.hosts[0], self._gathering.ports[0])
        try:
            connection = socket.create_connection((host, port), timeout=CONNECT_S)
        except (OSError, UnicodeError) as error:
            if first:
                self._why = getattr(error, "strerror", None) or str(error)
                unresolved = isinstance(error, (socket.gaierror, UnicodeError))
                self._advice = f"; {_CHECK_NAME if unresolved else self._gathering.unreached}"
            return None
        watch_for_silence(connection)
        seat = None
        try:
            seat = self._request(connection, host, strict=first and self._gathering.fixed)
        except _TooEarlyError as error:
            self._why, self._advice = str(error), ""
        except (OSError, ValueError, TypeError, KeyError) as error:
            if first:
                self._why, self._advice = self._what_listens(host, port, error), ""
        finally:
            if not seat:
                connection.close()
        return seat

    def _request(self, connection: socket.socket, host: str, strict: bool) -> Seat | None:
        """Return the seat, or None if the controller has exited.

        With `strict`, the controller of another job is an error. Raises OSError, ValueError, TypeError or
        KeyError if the other side is not a controller.
        """
        arrival, ours, received = self._gathering.arrival, nonce(), bytearray()
        receive = partial(self._message, connection, received, strict)
        line = line_of({**arrival._asdict(), "nonce": ours, "endpoint": self._gathering.fixed_port})
        connection.settimeout(ANSWER_S)
        connection.sendall(MAGIC + line)
        challenge = receive(CONNECT_S)
        theirs, way = str(challenge["nonce"]), str(challenge["proves"])
        covered = f"{ours} {theirs} {line[:-1].decode()}"
        try:
            proof = self._prover.proof(way, "launcher", covered)
        except JoinError as error:
            connection.sendall(line_of({"refuses": str(error)}))
            raise
        connection.sendall(line_of({"proof": proof}))
        if why := self._prover.wrong(way, "controller", covered, receive(ANSWER_S).get("proof")):
            raise JoinError(f"the controller at {host} can't be trusted: {why}; {_OTHER_JOB}", Exit.USAGE)
        message: dict[str, Any] = {}
        while "node" not in message:
            try:
                message = receive(None)
            except (OSError, ValueError):
                self._why = "the controller has exited"
                return None
            if "waiting" in message and arrival.place is None:  # one of many tasks would repeat the message
                self._say(str(message["waiting"]))
        node, run_id = message["node"], message["run"]
        if not isinstance(node, int) or not 0 <= node < MAX_NODES or not _is_run_id(run_id):
            raise ValueError("it sent an invalid node number or run ID")
        if arrival.node_rank not in (None, node):
            self._say(renumbered(node, arrival.node_rank))
        return Seat(connection, node, run_id, str(message["nonce"]), host, bytes(received))

    def _message(
        self, connection: socket.socket, received: bytearray, strict: bool, wait_s: float | None
    ) -> dict[str, Any]:
        """Return the next message. Bytes after it stay in `received`.

        Raises `JoinError` for a refusal, `_TooEarlyError` for a request to wait, and OSError or ValueError
        if the other side is not a controller.
        """
        deadline = None if wait_s is None else time.monotonic() + wait_s
        while b"\n" not in received:
            left_s = TURN_S if deadline is None else deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("no answer")
            pause(self._interrupts, self._say, left_s, connection.fileno())
            if select.select([connection], [], [], 0)[0]:
                data = connection.recv(MAX_LINE)
                if not data or len(received) > MAX_LINE:
                    raise ValueError("it closed the connection" if not data else "its answer is too long")
                received += data
        line, _, rest = received.partition(b"\n")
        received[:] = rest
        message = message_of(bytes(line))
        if "later" in message:
            raise _TooEarlyError(str(message["later"]))
        if "refused" in message:
            if message.get("another") and not strict:
                raise ValueError("it is the controller of another job")
            raise JoinError(str(message["refused"]), int(message.get("status", Exit.USAGE)))
        return message

    def _what_listens(self, host: str, port: int, error: Exception) -> str:
        """Describe, for messages, the program at an address that doesn't answer like a controller."""
        if _is_torchs(host, port):
            return (
                "a torch TCPStore uses this address: if torchrun was started, run `distlaunch torchrun` on "
                "all nodes; if it is another job's, use another port; otherwise, the run has all its nodes, "
                "or is still stopping the ranks of one that it lost"
            )
        words = getattr(error, "strerror", None) or str(error)
        words = f"it lacks {words}" if isinstance(error, KeyError) else words
        what = f"the process that listens there may not be the controller of this job ({words})"
        # Without a fixed port, the controller uses the next one if another program has the first.
        unless = "unless it is one of this job's ranks, use another port, or correct the address"
        return f"{what}; {unless if self._gathering.fixed else self._gathering.unreached}"


def _is_torchs(host: str, port: int) -> bool:
    """Return whether a TCPStore answers at this address."""
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S) as probe:
            probe.sendall(TORCHS_PING)
            return probe.recv(16) == TORCHS_PING[-4:]
    except OSError:
        return False


def _is_run_id(text: str) -> bool:
    """Return whether the text is safe as the name of a directory."""
    named = isinstance(text, str) and re.fullmatch(r"[-._]*[^\W_][-.\w]*", text)
    return bool(named) and len(text) <= MAX_RUN_ID
