"""The controller's door: where launchers that somebody else started join the run.

It is open while the run waits for nodes: first at the rendezvous endpoint, which then is rank 0's; later,
while one is missing, at the first of the second ports that is free. Whoever stays silent, sends something
else or belongs to another run is turned away, and named.
"""

import errno
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distlaunch import __version__
from distlaunch.agent import messages, wire
from distlaunch.agent.network import acceptor
from distlaunch.contract import SENT
from distlaunch.errors import Exit
from distlaunch.plan.gathering import Arrival, Gathering
from distlaunch.transports import join
from distlaunch.transports.handshake import Handshake, NodeGone, Streams
from distlaunch.transports.link import Link
from distlaunch.transports.process import Peer, watch_for_silence
from distlaunch.transports.transport import Joined

HELLO_S = 5.0
"""Seconds for a connection to say whose it is."""
MOST_STRANGERS = 256
"""Connections that have not said whose they are; the oldest one goes when there are more."""
MOST_NAMED, MAX_WORDS = 20, 500
BACKLOG = 1024


class JoinedLink(Link):
    """A link to the agent of another launcher, which is sent ranks, addresses and ports, and no program."""

    def __init__(self, transport: Joined, connection: socket.socket | None, nonce: str) -> None:
        super().__init__(transport, Peer(connection), Streams(Handshake([], nonce)), bytes)

    def send(self, node: int, command: tuple[Any, ...]) -> None:
        """As of every link, but what its workers run is known there alone."""
        super().send(node, ranks_alone(command) if isinstance(command, messages.StartWorkers) else command)

    def receive(self) -> list[wire.Frame | NodeGone]:
        """As of every link; the last frame tells how the agent ended."""
        try:
            frames = super().receive()
        except OSError as error:
            self.at_end = True
            self.streams.listen(f"its launcher: {error.strerror}\n".encode())
            return []
        kept = []
        for frame in frames:
            if isinstance(frame, wire.Frame) and frame.kind == wire.END:
                told = frame.message()
                self._process.status = told["status"] if isinstance(told.get("status"), int) else None
                self.streams.listen(str(told.get("words", "")).encode())
            else:
                kept.append(frame)
        if self.at_end and self._process.status is None and self.streams.booted:
            self.streams.listen(b"its launcher closed the connection\n")
        return kept


def ranks_alone(command: messages.StartWorkers) -> messages.StartRanks:
    """What of a command may travel to a launcher that runs its own command line."""

    def sent(variables: Mapping[str, str]) -> dict[str, str]:
        return {name: text for name, text in variables.items() if name in SENT}

    return messages.StartRanks(
        **{name: getattr(command, name) for name in messages.StartRanks.__annotations__ if name != "workers"}
        | {"env": sent(command.env)},
        workers=tuple(
            messages.RankSpec(each.local_rank, sent(each.env), sent(each.defaults))
            for each in command.workers
        ),
    )


class Visitor:
    """A connection: its `arrival` says whose it is, and it has `joined` once that is proven."""

    def __init__(self, sock: socket.socket, host: str, reached: str) -> None:
        """It comes from `host` to our address `reached`."""
        self.sock, self.host, self.reached = sock, host, reached
        self.began = time.monotonic()
        self.received = b""
        self.line = ""
        self.arrival: Arrival | None = None
        self.joined = False

    @property
    def here(self) -> bool:
        """Whether it comes from this machine."""
        return self.host == self.reached

    @property
    def name(self) -> str:
        """For people."""
        return self.arrival.name if self.arrival else self.host

    def send(self, **message: object) -> None:
        """Send a line, which always fits; that it is gone is noticed elsewhere."""
        try:
            self.sock.send(join.line_of(message))
        except OSError:
            return


class Door:
    """Lets launchers in; `say` gets what there is to tell."""

    def __init__(self, gathering: Gathering, prover: join.Prover, say: Callable[[str], object]) -> None:
        self._gathering, self._prover, self._say = gathering, prover, say
        self._way = prover.way
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._visitors: list[Visitor] = []
        self._named: set[str] = set()
        self._seated: dict[int, Visitor] = {}
        self._expected: set[int] = set()
        self._second_ports: Sequence[int] = ()
        self._held: list[socket.socket] = []
        """Open until this process ends, so that the other side can tell when that is."""
        self._on_arrival: Callable[[int], object] = lambda node: None
        self.admits: Callable[[Visitor, Arrival], str] = lambda visitor, arrival: ""
        """Why a launcher that has proven whose it is can't join; "" = it can."""

    @property
    def fd(self) -> int:
        """To be watched for reading."""
        return self._selector.fileno()  # type: ignore[no-any-return, attr-defined, unused-ignore]

    @property
    def joined(self) -> list[Visitor]:
        """Those that have joined and are still there, in the order in which they came."""
        return [visitor for visitor in self._visitors if visitor.joined]

    def open(self, ports: Sequence[int]) -> int:
        """Listen at the first of the ports that is free. Raises OSError when none is."""
        for port in ports:
            try:
                # Rank 0's store takes the port once this is closed, while the links go on: with SO_REUSEADDR.
                listener = acceptor(port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or port == ports[-1]:
                    raise
                continue
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
            self._listener = listener
            return port
        raise OSError(errno.EADDRINUSE, "Address already in use")

    def close(self) -> None:
        """Listen no more; who has not joined by now is turned away, and told why if that is known."""
        if self._listener:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        for visitor in [each for each in self._visitors if not each.joined]:
            if visitor.arrival and (why := self.admits(visitor, visitor.arrival)):
                self._refuse(visitor, why)
            else:
                self._drop(visitor)

    def dismiss(self, why: str, status: int) -> None:
        """Tell those that have joined and have no seat yet that there will be no run."""
        for visitor in self.joined:
            visitor.send(refused=why, status=status)

    def turn(self, wait_s: float = 0.0) -> None:
        """Wait at most so long for something to happen, and see to it."""
        for key, _ in self._selector.select(wait_s):
            if key.fileobj is self._listener:
                self._accept()
            elif key.data in self._visitors:
                self._hear(key.data)
        silent = [each for each in self._visitors if not each.joined]
        now = time.monotonic()
        for i, visitor in enumerate(silent):
            if now - visitor.began > HELLO_S or i < len(silent) - MOST_STRANGERS:
                self._turn_away(
                    visitor, f"did not say within {HELLO_S:g} s that it is a launcher of this run"
                )

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(BACKLOG):
            try:
                sock, address = self._listener.accept()
                own = sock.getsockname()[0]
            except OSError:
                return  # no more; or it has left already
            sock.setblocking(False)
            watch_for_silence(sock)
            visitor = Visitor(sock, *(host.removeprefix("::ffff:") for host in (address[0], own)))
            self._visitors.append(visitor)
            self._selector.register(sock, selectors.EVENT_READ, visitor)

    def _hear(self, visitor: Visitor) -> None:
        try:
            data = visitor.sock.recv(join.MAX_LINE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(visitor)
            return
        visitor.received += data
        if visitor.received.startswith(join.TORCHS_FIRST):
            self._turn_away(
                visitor, "runs torchrun: run `distlaunch torchrun` on all nodes, or torchrun on all"
            )
        elif not visitor.received.startswith(join.MAGIC[: len(visitor.received)]):
            self._turn_away(visitor, "sent something that is no launcher's")
        elif len(visitor.received) > join.MAX_LINE or visitor.joined:
            self._turn_away(visitor, "sent more than a launcher does")
        else:
            self._read_lines(visitor)

    def _read_lines(self, visitor: Visitor) -> None:
        lines = visitor.received[len(join.MAGIC) :].split(b"\n")[:-1]
        try:
            if visitor.arrival is None and lines:
                self._challenge(visitor, lines[0])
            if visitor.arrival is not None and lines[1:]:
                self._judge(visitor, visitor.arrival, join.message_of(lines[1]))
        except ValueError as error:
            self._turn_away(visitor, f"sent something that is no launcher's ({error})")

    def _challenge(self, visitor: Visitor, line: bytes) -> None:
        message = join.message_of(line)
        theirs = message.get("version")
        if theirs != __version__:
            told = str(theirs)[:40]
            self._refuse(
                visitor, f"distlaunch is {told} there and {__version__} here: install the same version"
            )
            return
        arrival, ours = join.arrival_of(message), self._gathering.arrival
        visitor.arrival = arrival
        if arrival.job != ours.job:
            self._refuse(visitor, f"its job is {arrival.job[:80]!r}, not {ours.job[:80]!r}", another=True)
            return
        nonce = join.nonce()
        visitor.line = f"{message.get('nonce')} {nonce} {line.decode(errors='replace')}"
        visitor.send(nonce=nonce, proves=self._way)

    def _judge(self, visitor: Visitor, arrival: Arrival, message: Mapping[str, Any]) -> None:
        if "refuses" in message:
            self._name(f"the launcher on {visitor.name} does not join: {str(message['refuses'])[:MAX_WORDS]}")
            self._drop(visitor)
            return
        wrong = self._prover.wrong(self._way, "launcher", visitor.line, message.get("proof"))
        if why := wrong or self.admits(visitor, arrival):
            self._refuse(visitor, why)
            return
        visitor.joined = True
        visitor.send(proof=self._prover.proof(self._way, "controller", visitor.line))
        if self._expected:
            self._seat_again(visitor, arrival)

    def _refuse(self, visitor: Visitor, why: str, another: bool = False) -> None:
        here = self._gathering.arrival.name
        told = f"the controller on {here} refused the launcher on {visitor.name}: {why}"
        visitor.send(refused=told, status=int(Exit.USAGE), another=another)
        self._name(f"refused the launcher on {visitor.name}: {why}")
        self._drop(visitor)

    def _turn_away(self, visitor: Visitor, what: str) -> None:
        self._name(f"closed a connection from {visitor.host}, which {what}")
        self._drop(visitor)

    def _name(self, text: str) -> None:
        if len(self._named) < MOST_NAMED and text not in self._named:
            self._named.add(text)
            self._say(text)

    def _drop(self, visitor: Visitor) -> None:
        if visitor in self._visitors:
            self._visitors.remove(visitor)
            self._selector.unregister(visitor.sock)
            visitor.sock.close()

    # Nodes

    def seat(self, visitors: Sequence[Visitor | None], second_ports: Sequence[int]) -> None:
        """All are there: these are the nodes, by number; None = the node is this launcher's, or missing."""
        self.close()
        self._second_ports = second_ports
        self._seated = {node: visitor for node, visitor in enumerate(visitors) if visitor}

    def attach(self, on_arrival: Callable[[int], object]) -> None:
        """From now on, call `on_arrival` with a missing node's number when its launcher has joined."""
        self._on_arrival = on_arrival
        self.admits = self._admits_again

    def _admits_again(self, visitor: Visitor, arrival: Arrival) -> str:
        return "" if self._place_for(arrival) is not None else "the run has all the nodes it needs"

    def _place_for(self, arrival: Arrival) -> int | None:
        """The missing node whose place a launcher takes: its own by number, else any."""
        free = sorted(self._expected - {*self._seated})
        if self._gathering.ordered:
            return arrival.node_rank if arrival.node_rank in free else None
        return free[0] if free else None

    def _seat_again(self, visitor: Visitor, arrival: Arrival) -> None:
        node = self._place_for(arrival)
        assert node is not None
        self._seated[node] = visitor
        self._say(f"the launcher on {visitor.name} joins as node {node}")
        self._on_arrival(node)

    def link(self, node: int, run_id: str, host: str) -> JoinedLink:
        """The link to a node: to the launcher that has joined for it, else one that has ended already."""
        visitor, number = self._seated.pop(node, None), join.nonce()
        if visitor is None or visitor not in self._visitors:
            self._await(node)
            return JoinedLink(Joined(host), None, number)
        self._expected.discard(node)
        if not self._expected:
            self.close()
        self._visitors.remove(visitor)
        self._selector.unregister(visitor.sock)
        visitor.send(node=node, run=run_id, nonce=number)
        self._held.append(visitor.sock.dup())
        return JoinedLink(Joined(visitor.name, visitor.here), visitor.sock, number)

    def _await(self, node: int) -> None:
        """Be open for the launcher that takes a missing node's place."""
        self._expected.add(node)
        if self._listener is None:
            try:
                self.open(self._second_ports)
            except OSError as error:
                self._say(f"can't listen for nodes that return: {error.strerror}")
