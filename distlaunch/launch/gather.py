"""Brings the launchers of a run together that somebody else started, one on each node or one for each rank.

One of them is the controller: it listens at the rendezvous endpoint until all are there. The others connect
to it, and serve it (`distlaunch.launch.joined`).
"""

import errno
import ipaddress
import os
import re
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice, product
from typing import Any

from distlaunch.agent.frozen import Frozen
from distlaunch.errors import DistlaunchError, Exit
from distlaunch.job.spec import JobSpec, NodeSpec
from distlaunch.links.door import Door, Visitor
from distlaunch.links.join import (
    MAGIC,
    MAX_LINE,
    TORCHS_PING,
    JoinError,
    Prover,
    line_of,
    message_of,
    nonce,
)
from distlaunch.links.peer import watch_for_silence
from distlaunch.plan.gathering import Arrival, Gathering, in_order, ports_for
from distlaunch.plan.layout import is_loopback
from distlaunch.system.signals import Interrupts
from distlaunch.transport.joined import Joined
from distlaunch.transport.local import Local
from distlaunch.wording import NO_SUSPENDING_TORCHRUN, counted, listed, rank_list, spans

Say = Callable[[str], object]
CONNECT_S, ANSWER_S = 3.0, 10.0
RETRY_S, RETRY_MOST_S = 0.01, 0.5
TELL_S = 5.0
"""Seconds of waiting until that is told, and again each time the wait has doubled."""
NAME_S = 60.0
"""Seconds for a name server to learn of a machine that has just started, as a pod's does."""
TURN_S = 0.5
RUN_ID = re.compile(r"[A-Za-z0-9_.-]{1,200}")
"""A folder is named after it."""
MAX_NODES = 1 << 16
"""The header of a frame has no room for more."""


class Gathered(Frozen):
    """The controller's: the job on all nodes, and the door through which their links come."""

    spec: JobSpec
    door: Door


class Seat(Frozen):
    """A launcher's place in a run of another one: its node's number, and the connection to the controller.

    `unread` came on it behind the line that told the rest.
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
        self.began, self.limit_s, self._tell_s = time.monotonic(), limit_s, TELL_S

    @property
    def passed_s(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self.began

    @property
    def over(self) -> bool:
        """Whether the limit is reached."""
        return self.passed_s > self.limit_s

    def is_worth_telling(self) -> bool:
        """True after TELL_S, and after each doubling."""
        if self.passed_s < self._tell_s:
            return False
        self._tell_s *= 2
        return True


def gather(spec: JobSpec, gathering: Gathering, interrupts: Interrupts, say: Say) -> Gathered | Seat:
    """Come together with the other launchers; `spec` is the part of this node. Raises `JoinError`."""
    prover = Prover(os.environ, gathering.arrival.name)
    launcher = _Launcher(gathering, prover, interrupts, say)
    serves = gathering.serves
    if serves is not False and gathering.fixed:
        _await_name(gathering.hosts[0], gathering.wait_s, interrupts, say)
        here = is_here(gathering.hosts[0])
        if serves and not here and gathering.ordered:
            flags = "check --node-rank 0 and --master-addr"
            raise JoinError(f"{gathering.hosts[0]} is not an address of this machine: {flags}", Exit.USAGE)
        if here and serves is None and (seat := launcher.seated_late()):
            return seat  # of a run that has begun, and whose rank 0 may leave the endpoint's port unused
        serves = here or serves or False
    if serves:
        door = Door(gathering, prover, say)
        try:
            port = door.open(gathering.ports)
        except OSError as error:
            if gathering.serves or error.errno != errno.EADDRINUSE:
                where, why = gathering.label, error.strerror or error
                raise JoinError(
                    f"can't listen at {where} for the other nodes: {why}", Exit.PORT_TAKEN
                ) from None
        else:
            try:
                return _Controller(spec, gathering, door, interrupts, say).gathered(port)
            except BaseException:
                door.close()
                raise
    return launcher.seated()


def is_here(host: str) -> bool:
    """Whether a name, or address, is one of this machine's: what goes there has it as its source, too.

    To bind a socket to it would tell nothing where net.ipv4.ip_nonlocal_bind is on.
    """
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    return any(_is_source(family, address) for family, _, _, _, address in found)


def _is_source(family: int, address: tuple[object, ...]) -> bool:
    host = str(address[0])
    if ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        return True
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(address)
            return bool(sock.getsockname()[0] == host)
    except OSError:
        return False


def _await_name(host: str, wait_s: float, interrupts: Interrupts, say: Say) -> None:
    """Wait until a host name is known, at most NAME_S: until then nobody listens there."""
    wait = Wait(min(wait_s, NAME_S))
    while not wait.over:
        try:
            socket.getaddrinfo(host, None)
            return
        except (OSError, UnicodeError) as error:
            if wait.is_worth_telling():
                say(f"waiting for the name {host}: {getattr(error, 'strerror', None) or error}")
        _pause(interrupts, say, TURN_S)


def _pause(interrupts: Interrupts, say: Say, wait_s: float, *fds: int) -> None:
    """Wait so long, or until something can be read. Raises `JoinError` at a signal that ends the wait."""
    ready, _, _ = select.select([interrupts.fd, *fds], [], [], wait_s)
    for signum in interrupts.received() if interrupts.fd in ready else b"":
        if signum != signal.SIGTSTP:
            raise JoinError(f"stopped by {signal.Signals(signum).name}", 128 + signum)
        say(NO_SUSPENDING_TORCHRUN)


class _Controller:
    """Waits for the launchers of all other nodes, and makes one job of all."""

    def __init__(
        self, spec: JobSpec, gathering: Gathering, door: Door, interrupts: Interrupts, say: Say
    ) -> None:
        self._spec, self._gathering, self._door = spec, gathering, door
        self._interrupts, self._say = interrupts, say
        self._own = gathering.arrival
        self._fewest, self._most = self._own.nodes
        door.admits = self._refusal

    def gathered(self, port: int) -> Gathered:
        """Wait until all are there, or the fewest and their last call is over."""
        wait, enough_at = Wait(self._gathering.wait_s), 0.0
        while (count := 1 + len(self._door.joined)) < self._most:
            if count < self._fewest:
                enough_at = 0.0
            elif not enough_at:
                enough_at = time.monotonic()
            elif time.monotonic() - enough_at > self._gathering.last_call_s:
                break
            if wait.over and count < self._fewest:
                raise self._too_few()
            if wait.is_worth_telling():
                self._tell()
            _pause(self._interrupts, self._say, TURN_S, self._door.fd)
            self._door.turn()
        return self._seated(port)

    def _refusal(self, visitor: Visitor, arrival: Arrival) -> str:
        if arrival.nodes != self._own.nodes:
            theirs, ours = map(_nodes_words, (arrival.nodes, self._own.nodes))
            return f"it was started for {theirs} nodes, and the controller for {ours}"
        number = arrival.node_rank
        if self._gathering.ordered:
            taken = {
                self._own.node_rank,
                *(each.arrival.node_rank for each in self._door.joined if each.arrival),
            }
            if number is None or number >= self._most:
                return f"its number, {number}, is not below {self._most}"
            if number in taken:
                return f"another launcher with node rank {number} has already joined"
        if len(self._door.joined) + 1 >= self._most:
            return f"{self._most} of {self._most} nodes have already joined: start one launcher on each node"
        return ""

    def _missing_words(self) -> str:
        joined = [each.arrival for each in self._door.joined if each.arrival]
        missing = self._most - 1 - len(joined)
        if self._gathering.ordered:
            there = {each.node_rank for each in (self._own, *joined)}
            numbers = [number for number in range(self._most) if number not in there]
            if self._own.place:
                return rank_list(numbers)
            return (
                f"node{'s' if missing > 1 else ''} {spans(numbers).replace(',', ', ')}{self._absent(joined)}"
            )
        here = sorted(each.name for each in (self._own, *joined))
        return f"{missing} of {counted(self._most, 'node')} (joined: {listed(here)}){self._absent(joined)}"

    def _absent(self, joined: Sequence[Arrival]) -> str:
        """The hosts that a scheduler has given, and from which nobody has come."""
        came = {each.name.partition(".")[0] for each in (self._own, *joined)}
        hosts = [host for host in _scheduled_hosts() if host.partition(".")[0] not in came]
        return f": {listed(hosts)}" if hosts and len(hosts) == self._most - len(came) else ""

    def _tell(self) -> None:
        text = f"waiting for {self._missing_words()} at {self._gathering.label}"
        self._say(text)
        for visitor in self._door.joined:
            visitor.send(waiting=text)

    def _too_few(self) -> JoinError:
        place, wait_s = self._gathering.label, self._gathering.wait_s
        text = f"gave up after {wait_s:g} s: waited for {self._missing_words()} at {place}"
        for visitor in self._door.joined:
            visitor.send(refused=text, status=int(Exit.TIMEOUT))
        return JoinError(text, Exit.TIMEOUT)

    def _seated(self, port: int) -> Gathered:
        """The nodes in their order; those that may come later are last."""
        visitors = self._door.joined
        arrivals = [self._own, *(each.arrival for each in visitors if each.arrival)]
        if self._gathering.ordered:
            order = sorted(range(len(arrivals)), key=lambda i: arrivals[i].node_rank or 0)
        else:
            order = in_order(arrivals, [True, *(each.here for each in visitors)])
        seats: list[Visitor | None] = [visitors[i - 1] if i else None for i in order]
        nodes = [self._node(arrivals[i], seats[place]) for place, i in enumerate(order)]
        late = [f"node {number}" for number in range(len(nodes), self._most)]
        near = is_loopback(self._gathering.hosts[0])
        nodes += [self._spec.nodes[0]._replace(label=label, reach=Joined(label, near)) for label in late]
        key = f"{self._gathering.label} {self._own.job}"
        self._door.seat(seats, ports_for(key))
        self._tell_number(order.index(0))
        spec = self._spec._replace(nodes=tuple(nodes), min_nodes=self._fewest)
        fixed = self._gathering.fixed
        host = self._gathering.hosts[0] if fixed or len(self._gathering.hosts) == 1 else _reached(visitors)
        return Gathered(spec._replace(master_host=host, master_port=port if fixed else None), self._door)

    def _node(self, arrival: Arrival, visitor: Visitor | None) -> NodeSpec:
        reach = Joined(arrival.name, visitor.here) if visitor else Local()
        gpus = self._spec.nodes[0].gpus if arrival.gpus is None else arrival.gpus
        node = self._spec.nodes[0]._replace(label=arrival.name, reach=reach, gpus=gpus)
        return node._replace(place=arrival.place)

    def _tell_number(self, number: int) -> None:
        if self._own.node_rank not in (None, number):
            self._say(renumbered(number, self._own.node_rank))


def renumbered(number: int, wanted: int | None) -> str:
    """What to say where the user wanted another number."""
    why = "with c10d it counts only if all nodes have different ones; node 0 is on the endpoint's machine"
    return f"this is node {number}, not --node-rank {wanted}: {why}"


def _reached(visitors: Sequence[Visitor]) -> str:
    """Our address by which those on other machines came; the first that is no loopback one."""
    far = [visitor.reached for visitor in visitors if not visitor.here]
    return far[0] if far else "127.0.0.1"


def _nodes_words(nodes: tuple[int, int]) -> str:
    return str(nodes[0]) if nodes[0] == nodes[1] else "{}:{}".format(*nodes)


def _scheduled_hosts() -> tuple[str, ...]:
    from distlaunch.system.allocation import allocation_here  # only where somebody is waited for

    try:
        allocation = allocation_here()
    except DistlaunchError:
        return ()
    return tuple(node.host for node in allocation.nodes) if allocation else ()


class _Launcher:
    """Connects to the controller, and waits until all are there."""

    def __init__(self, gathering: Gathering, prover: Prover, interrupts: Interrupts, say: Say) -> None:
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
                raise JoinError(f"gave up after {wait.limit_s:g} s: {text}", Exit.UNREACHABLE)
            if wait.is_worth_telling():
                who = "node 0" if self._gathering.ordered else "the node that has this address"
                self._say(f"waiting for {who} at {place}: {self._why}")
            _pause(self._interrupts, self._say, pause_s)
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
        kept = False
        watch_for_silence(connection)
        try:
            seat = _Conversation(connection, host, self, strict=first and self._gathering.fixed).seat()
            kept = seat is not None
            return seat
        except (OSError, ValueError, TypeError, KeyError) as error:
            if first:
                self._why = self._what_listens(host, port, error)
            return None
        finally:
            if not kept:
                connection.close()

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
            probe.sendall(TORCHS_PING)
            return probe.recv(16) == TORCHS_PING[-4:]
    except OSError:
        return False


class _Conversation:
    """A launcher's side of what `distlaunch.links.join` has."""

    def __init__(self, connection: socket.socket, host: str, launcher: _Launcher, strict: bool) -> None:
        """`strict`: only the controller of this very job listens there; else any other may."""
        self._connection, self._host = connection, host
        self._launcher, self._strict = launcher, strict
        self._received = b""

    def seat(self) -> Seat | None:
        """The seat; None where the controller has exited.

        OSError, ValueError, TypeError, KeyError: it is no controller.
        """
        launcher, ours = self._launcher, nonce()
        line = line_of({**launcher._gathering.arrival._asdict(), "nonce": ours})
        self._connection.settimeout(ANSWER_S)
        self._connection.sendall(MAGIC + line)
        challenge = self._message(CONNECT_S)
        theirs, way = str(challenge["nonce"]), str(challenge["proves"])
        covered = f"{ours} {theirs} {line[:-1].decode()}"
        try:
            proof = launcher._prover.proof(way, "launcher", covered)
        except JoinError as error:
            self._connection.sendall(line_of({"refuses": str(error)}))
            raise
        self._connection.sendall(line_of({"proof": proof}))
        answer = self._message(ANSWER_S)
        if why := launcher._prover.wrong(way, "controller", covered, answer.get("proof")):
            raise JoinError(f"the controller at {self._host} is not to be trusted: {why}", Exit.USAGE)
        while True:
            try:
                message = self._message(None)
            except (OSError, ValueError):
                launcher._why = "the controller has exited"
                return None
            if "node" in message:
                return self._seat(message["node"], message["run"], str(message["nonce"]))
            launcher._say(str(message.get("waiting", "")))

    def _seat(self, node: object, run_id: str, nonce: str) -> Seat:
        if not isinstance(node, int) or not 0 <= node < MAX_NODES or not RUN_ID.fullmatch(run_id):
            raise ValueError("no such node or run can be")
        wanted = self._launcher._gathering.arrival.node_rank
        if wanted not in (None, node):
            self._launcher._say(renumbered(node, wanted))
        return Seat(self._connection, node, run_id, nonce, self._host, self._received)

    def _message(self, wait_s: float | None) -> dict[str, Any]:
        """The next line. Raises `JoinError` for a refusal; OSError, ValueError: it is no controller."""
        deadline = None if wait_s is None else time.monotonic() + wait_s
        while b"\n" not in self._received:
            left_s = TURN_S if deadline is None else deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("no answer")
            launcher = self._launcher
            _pause(launcher._interrupts, launcher._say, left_s, self._connection.fileno())
            if select.select([self._connection], [], [], 0)[0]:
                data = self._connection.recv(MAX_LINE)
                if not data or len(self._received) > MAX_LINE:
                    raise ValueError("it closed the connection" if not data else "it says too much")
                self._received += data
        line, _, self._received = self._received.partition(b"\n")
        message = message_of(line)
        if "refused" in message:
            if message.get("another") and not self._strict:
                raise ValueError("it is the controller of another job")
            raise JoinError(str(message["refused"]), int(message.get("status", Exit.USAGE)))
        return message
