"""A launcher's way into a run whose controller is another launcher: see `distlaunch.transports.join`."""

import re
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import cycle, islice, product
from typing import TYPE_CHECKING, Any

from distlaunch.agent.frozen import Frozen
from distlaunch.errors import Exit
from distlaunch.plan.gathering import Gathering, ports_for
from distlaunch.transports import join
from distlaunch.transports.process import watch_for_silence
from distlaunch.wording import NO_SUSPENDING_TORCHRUN

if TYPE_CHECKING:
    from distlaunch.signals import Interrupts

Say = Callable[[str], object]
CONNECT_S, ANSWER_S = 3.0, 10.0
RETRY_S, RETRY_MOST_S = 0.01, 0.5
TELL_S = 5.0
"""Seconds of waiting until that is told, and again each time the wait has doubled."""
TURN_S = 0.5
MAX_NODES = 1 << 16
"""The header of a frame has no room for more."""
MAX_RUN_ID = 200


class Seat(Frozen):
    """A launcher's place in a run of another one: its node's number, and the connection to the controller.

    `unread` is what the connection brought after the line with the other fields.
    """

    connection: socket.socket
    node: int
    run_id: str
    nonce: str
    controller: str
    unread: bytes


class Wait:
    """How long something has been waited for, and when to tell."""

    def __init__(self, limit_s: float) -> None:
        self._began, self.limit_s, self._tell_s = time.monotonic(), limit_s, TELL_S

    @property
    def over(self) -> bool:
        """Whether the limit is reached."""
        return time.monotonic() - self._began > self.limit_s

    def is_worth_telling(self) -> bool:
        """True after TELL_S, and after each doubling."""
        if time.monotonic() - self._began < self._tell_s:
            return False
        self._tell_s *= 2
        return True


def pause(interrupts: "Interrupts", say: Say, wait_s: float, *fds: int) -> None:
    """Wait so long, or until something can be read. Raises `JoinError` at a signal that ends the wait."""
    ready, _, _ = select.select([interrupts.fd, *fds], [], [], wait_s)
    for signum in interrupts.received() if interrupts.fd in ready else b"":
        if signum != signal.SIGTSTP:
            raise join.JoinError(f"stopped by {signal.Signals(signum).name}", 128 + signum)
        say(NO_SUSPENDING_TORCHRUN)


def blocked(signums: Iterable[int]) -> None:
    """Have these signals wait, in this process and those that it forks, for whoever takes them up."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signums)


def renumbered(number: int, wanted: int | None) -> str:
    """What to say where the user wanted another number."""
    why = "with c10d it counts only if all nodes have different ones; node 0 is on the endpoint's machine"
    return f"this is node {number}, not --node-rank {wanted}: {why}"


class Launcher:
    """Connects to the controller, and waits until all are there."""

    def __init__(self, gathering: Gathering, prover: join.Prover, interrupts: "Interrupts", say: Say) -> None:
        self._gathering, self._prover = gathering, prover
        self._interrupts, self._say = interrupts, say
        self._why = ""
        key = f"{gathering.label} {gathering.arrival.job}"
        self._second = [*product(gathering.hosts[:1], ports_for(key) if gathering.fixed else ())]
        self._next = cycle(self._second)

    def seated(self) -> Seat:
        """The place in the run, once the controller has all nodes. Raises `JoinError`."""
        wait, pause_s = Wait(self._gathering.wait_s), RETRY_S
        while True:
            for host, port in self._places():
                if seat := self._tried(host, port):
                    return seat
            place = self._gathering.label
            if wait.over:
                hint = f"; {self._gathering.hint}" if self._gathering.hint else ""
                text = f"can't reach the controller at {place}: {self._why}{hint}"
                raise join.JoinError(f"gave up after {wait.limit_s:g} s: {text}", Exit.UNREACHABLE)
            if wait.is_worth_telling():
                who = "node 0" if self._gathering.ordered else "the node that has this address"
                self._say(f"waiting for {who} at {place}: {self._why}")
            pause(self._interrupts, self._say, pause_s)
            pause_s = min(pause_s * 1.5, RETRY_MOST_S)

    def seated_late(self) -> Seat | None:
        """The place in a run that has begun and misses a node, if there is one."""
        return next(filter(None, (self._tried(host, port) for host, port in self._second)), None)

    def _places(self) -> Iterator[tuple[str, int]]:
        """Where the controller may listen: at first, and later for nodes that return.

        Of those for later it is one at a time: a firewall may have each cost CONNECT_S.
        """
        yield from product(self._gathering.hosts, self._gathering.ports)
        yield from islice(self._next, 1)

    def _tried(self, host: str, port: int) -> Seat | None:
        """The seat, if the controller is there and gives one; else `_why` says what was seen."""
        first = (host, port) == (self._gathering.hosts[0], self._gathering.ports[0])
        try:
            connection = socket.create_connection((host, port), timeout=CONNECT_S)
        except (OSError, UnicodeError) as error:
            if first:
                self._why = getattr(error, "strerror", None) or str(error)
            return None
        watch_for_silence(connection)
        seat = None
        try:
            seat = self._asked(connection, host, strict=first and self._gathering.fixed)
        except (OSError, ValueError, TypeError, KeyError) as error:
            if first:
                self._why = self._what_listens(host, port, error)
        finally:
            if not seat:
                connection.close()
        return seat

    def _asked(self, connection: socket.socket, host: str, strict: bool) -> Seat | None:
        """The seat; None where the controller has exited. See `distlaunch.transports.join`.

        `strict`: only the controller of this very job listens there; else any other may.
        OSError, ValueError, TypeError, KeyError: it is no controller.
        """
        arrival, ours, received = self._gathering.arrival, join.nonce(), bytearray()
        heard = partial(self._message, connection, received, strict)
        line = join.line_of({**arrival._asdict(), "nonce": ours})
        connection.settimeout(ANSWER_S)
        connection.sendall(join.MAGIC + line)
        challenge = heard(CONNECT_S)
        theirs, way = str(challenge["nonce"]), str(challenge["proves"])
        covered = f"{ours} {theirs} {line[:-1].decode()}"
        try:
            proof = self._prover.proof(way, "launcher", covered)
        except join.JoinError as error:
            connection.sendall(join.line_of({"refuses": str(error)}))
            raise
        connection.sendall(join.line_of({"proof": proof}))
        answer = heard(ANSWER_S)
        if why := self._prover.wrong(way, "controller", covered, answer.get("proof")):
            raise join.JoinError(f"the controller at {host} is not to be trusted: {why}", Exit.USAGE)
        message: dict[str, Any] = {}
        while "node" not in message:
            try:
                message = heard(None)
            except (OSError, ValueError):
                self._why = "the controller has exited"
                return None
            if "waiting" in message and arrival.place is None:  # else one of many tasks
                self._say(str(message["waiting"]))
        node, run_id = message["node"], message["run"]
        if not isinstance(node, int) or not 0 <= node < MAX_NODES or not _is_run_id(run_id):
            raise ValueError("no such node or run can be")
        if arrival.node_rank not in (None, node):
            self._say(renumbered(node, arrival.node_rank))
        return Seat(connection, node, run_id, str(message["nonce"]), host, bytes(received))

    def _message(
        self, connection: socket.socket, received: bytearray, strict: bool, wait_s: float | None
    ) -> dict[str, Any]:
        """The next line. Raises `JoinError` for a refusal; OSError, ValueError: it is no controller."""
        deadline = None if wait_s is None else time.monotonic() + wait_s
        while b"\n" not in received:
            left_s = TURN_S if deadline is None else deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("no answer")
            pause(self._interrupts, self._say, left_s, connection.fileno())
            if select.select([connection], [], [], 0)[0]:
                data = connection.recv(join.MAX_LINE)
                if not data or len(received) > join.MAX_LINE:
                    raise ValueError("it closed the connection" if not data else "it says too much")
                received += data
        line, _, rest = received.partition(b"\n")
        received[:] = rest
        message = join.message_of(bytes(line))
        if "refused" in message:
            if message.get("another") and not strict:
                raise ValueError("it is the controller of another job")
            raise join.JoinError(str(message["refused"]), int(message.get("status", Exit.USAGE)))
        return message

    def _what_listens(self, host: str, port: int, error: Exception) -> str:
        if _is_torchs(host, port):
            return (
                "a TCPStore of torch's is there: either torchrun was started there, then run `distlaunch "
                "torchrun` on all nodes; or the run has all its nodes already"
            )
        words = getattr(error, "strerror", None) or str(error)
        words = f"it lacks {words}" if isinstance(error, KeyError) else words
        return f"what listens there is no controller of distlaunch's ({words})"


def _is_torchs(host: str, port: int) -> bool:
    """Whether a store of torch's answers there."""
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S) as probe:
            probe.sendall(join.TORCHS_PING)
            return probe.recv(16) == join.TORCHS_PING[-4:]
    except OSError:
        return False


def _is_run_id(text: str) -> bool:
    """Whether a folder may be named so."""
    named = isinstance(text, str) and re.fullmatch(r"[-._]*[^\W_][-.\w]*", text)
    return bool(named) and len(text) <= MAX_RUN_ID
