"""The controller's listener, through which launchers join a run.

The listener is open while the run is waiting for nodes. At first it uses the rendezvous endpoint, which rank
0 uses afterward. Later, while a node is missing, it uses the first free port of a second list. Connections
that stay silent, send invalid data or belong to another run are closed and reported.
"""

import errno
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from distlaunch import __version__
from distlaunch.agent import messages, wire
from distlaunch.agent.network import acceptor, claim
from distlaunch.contract import ranks_alone
from distlaunch.errors import Exit
from distlaunch.job.text import is_loopback
from distlaunch.launch import join
from distlaunch.launch.link import Link
from distlaunch.launch.process import Peer, watch_for_silence
from distlaunch.supervisor import events
from distlaunch.transports.gathering import Arrival, Gathering
from distlaunch.transports.handshake import NodeGone, Streams
from distlaunch.transports.transport import Joined
from distlaunch.wording import rank_list

HELLO_S = 5.0
"""Seconds that a connection has to identify itself."""
MOST_STRANGERS = 256
"""Maximum number of unidentified connections. Beyond that, the oldest is closed."""
MOST_NAMED, MAX_WORDS = 20, 500
"""Maximum number of messages about connections, and characters of a text from a launcher."""
BACKLOG = 1024
TURN_S = 0.5
"""Seconds after which a turn leaves the rest to the next one. If munged hangs, each proof takes seconds, and
the run's heartbeats are due."""


class JoinedLink(Link):
    """A link to another launcher's agent. It sends ranks, addresses and ports, but no program."""

    def __init__(self, transport: Joined, connection: socket.socket | None, nonce: str) -> None:
        super().__init__(transport, Peer(connection), Streams([], nonce), bytes)

    def send(self, node: int, command: tuple[Any, ...]) -> None:
        """Send a command without the workers' programs, because each launcher starts its own."""
        super().send(node, ranks_alone(command) if isinstance(command, messages.StartWorkers) else command)

    def receive(self, size: int) -> list[wire.Frame | NodeGone]:
        """Return the received frames except the END frame, which contains the agent's exit status."""
        try:
            frames = super().receive(size)
        except OSError as error:
            self.at_end = True
            self.streams.listen(f"its launcher: {error.strerror}\n".encode())
            return []
        kept = []
        for frame in frames:
            if isinstance(frame, wire.Frame) and frame.kind == wire.END:
                report = frame.message()
                self._process.status = report["status"] if isinstance(report.get("status"), int) else None
                self.streams.listen(str(report.get("words", "")).encode())
            else:
                kept.append(frame)
        if self.at_end and self._process.status is None and self.streams.booted:
            self.streams.listen(b"its launcher closed the connection\n")
        return kept


class InboundConnection:
    """A connection identified by its `arrival`. `joined` is true once its identity is proven.

    Proofs cover the `transcript`: both nonces and the arrival.
    """

    def __init__(self, sock: socket.socket, host: str, reached: str) -> None:
        """Wrap a connection from `host` to the local address `reached`."""
        self.sock, self.host, self.reached = sock, host, reached
        self.began = time.monotonic()
        self.received = b""
        self.transcript = ""
        self.arrival: Arrival | None = None
        self.joined = False

    @property
    def here(self) -> bool:
        """Return whether the connection comes from this machine."""
        # A connection to any address of 127.0.0.0/8, such as 127.0.0.2, comes from 127.0.0.1.
        return self.host == self.reached or is_loopback(self.host)

    @property
    def name(self) -> str:
        """Return the name of the other side for messages."""
        return self.arrival.name if self.arrival else self.host

    def send(self, **message: object) -> None:
        """Send a line, which always fits into the buffer. A closed connection is detected elsewhere."""
        with suppress(OSError):
            self.sock.send(join.line_of(message))


ENDING = "-ending"


def claim_of(port: int, suffix: str = "") -> socket.socket | None:
    """Claim an endpoint's port on this host, as `agent.network.claim` does.

    With the suffix ENDING, claim that the job there is ending.
    """
    return claim(f"port-{port}{suffix}")


class InboundListener:
    """The listener that admits launchers to a run. `say` prints messages."""

    def __init__(self, gathering: Gathering, prover: join.Prover, say: Callable[[str], object]) -> None:
        self._gathering, self._prover, self._say = gathering, prover, say
        self._way = prover.way
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._visitors: list[InboundConnection] = []
        self._shown: set[str] = set()
        self._seated: dict[int, InboundConnection] = {}  # by node, until `link` is called
        self._hosts: dict[int, str] = {}  # of the latest launchers, by node
        self._expected: set[int] = set()  # missing nodes
        self._second_ports: Sequence[int] = ()
        self.claim: socket.socket | None = None
        """The claim of the endpoint; see `gather`."""
        self._ending: socket.socket | None = None
        self._held: dict[int, socket.socket] = {}
        """Duplicate sockets of the nodes' latest launchers, which stay open until this process exits, so that
        launchers detect its exit."""
        self._on_arrival: Callable[[events.NodeArrived], object] = lambda event: None
        self._lost: Callable[[int], bool] = lambda node: False
        self.admits: Callable[[Arrival], str] = lambda arrival: ""
        """Returns the reason to refuse a launcher with proven identity, or "" to admit it."""

    @property
    def fd(self) -> int:
        """Return the descriptor to watch for reading."""
        return self._selector.fileno()  # type: ignore[no-any-return, attr-defined, unused-ignore]

    @property
    def _strangers(self) -> list[InboundConnection]:
        return [visitor for visitor in self._visitors if not visitor.joined]

    @property
    def joined(self) -> list[InboundConnection]:
        """Return the launchers that have joined and are still connected, in the order of arrival."""
        return [visitor for visitor in self._visitors if visitor.joined]

    def open(self, ports: Sequence[int]) -> int:
        """Listen on the first free port of `ports` and return it. Raises OSError if none is free."""
        port, *others = ports
        try:
            # With SO_REUSEADDR, rank 0's store can use the port once this closes, while links stay open.
            self._listener = acceptor(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not others:
                raise
            return self.open(others)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        return port

    def note_ending(self) -> None:
        """Let launchers that start from now on wait for the endpoint: they belong to the next job."""
        if self.claim and not self._ending:
            self._ending = claim_of(self._gathering.ports[0], ENDING)

    def close(self) -> None:
        """Stop listening. Close connections that haven't joined, after sending them the reason, if any."""
        if self._listener:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        for visitor in self._strangers:
            if visitor.arrival and (why := self.admits(visitor.arrival)):
                self._refuse(visitor, why)
            else:
                self._drop(visitor)

    def dismiss(self, why: str, status: int) -> None:
        """Notify the joined launchers that they won't take part."""
        for visitor in self.joined:
            visitor.send(refused=why, status=status)

    def turn(self) -> None:
        """Handle the events that have occurred, without waiting."""
        until = time.monotonic() + TURN_S
        for key, _ in self._selector.select(0):
            if key.fileobj is self._listener:
                self._accept()
            elif key.data in self._visitors:
                self._hear(key.data)
            if time.monotonic() > until:
                return  # the others have no chance to identify themselves
        silent, overdue = self._strangers, time.monotonic() - HELLO_S
        for i, visitor in enumerate(silent):
            if visitor.began < overdue or i < len(silent) - MOST_STRANGERS:
                what = f"did not identify itself as a launcher of this run within {HELLO_S:g} s"
                self._turn_away(visitor, what)

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(BACKLOG):
            try:
                sock, address = self._listener.accept()
                own = sock.getsockname()[0]
            except OSError:
                return  # no more connections, or a connection that is already closed
            sock.setblocking(False)
            watch_for_silence(sock)
            visitor = InboundConnection(sock, *(host.removeprefix("::ffff:") for host in (address[0], own)))
            self._visitors.append(visitor)
            self._selector.register(sock, selectors.EVENT_READ, visitor)

    def _hear(self, visitor: InboundConnection) -> None:
        """Receive data from a connection, and turn it away if it can't be a launcher."""
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
        if visitor.received == join.TORCHS_PING:
            self._drop(visitor)  # a launcher that has just found the port in use; it tries again
        elif visitor.received.startswith(join.TORCHS_FIRST):
            what = "is torch's: run `distlaunch torchrun` on all nodes, or torchrun on all"
            self._turn_away(visitor, what)
        elif not visitor.received.startswith(join.MAGIC[: len(visitor.received)]):
            self._turn_away(visitor, "sent an invalid message")
        elif len(visitor.received) > join.MAX_LINE or visitor.joined:
            self._turn_away(visitor, "sent too much data")
        else:
            self._read_lines(visitor)

    def _read_lines(self, visitor: InboundConnection) -> None:
        """Handle the lines received from a launcher so far: its arrival, then its proof."""
        lines = visitor.received[len(join.MAGIC) :].split(b"\n")[:-1]
        try:
            if visitor.arrival is None and lines:
                self._challenge(visitor, lines[0])
            if visitor.arrival is not None and lines[1:]:
                self._judge(visitor, visitor.arrival, join.message_of(lines[1]))
        except ValueError as error:
            self._refuse(visitor, f"it sent an invalid message ({error})")

    def _challenge(self, visitor: InboundConnection, line: bytes) -> None:
        """Handle the first line of a launcher: refuse it, or request a proof."""
        message = join.message_of(line)
        theirs, ours = message.get("version"), self._gathering.arrival
        if theirs != __version__:
            both = f"it has distlaunch {str(theirs)[:40]}, but the controller has {__version__}"
            another = message.get("job") != ours.job
            self._refuse(visitor, f"{both}: install the same version", another=another)
            return
        arrival = join.arrival_of(message)
        visitor.arrival = arrival
        if arrival.job != ours.job:
            self._refuse(visitor, f"its job is {arrival.job[:80]!r}, not {ours.job[:80]!r}", another=True)
            return
        # Another job's launchers with the same ID may try this port, too: see `Launcher._places`.
        port = self._gathering.fixed_port
        if (theirs := message.get("endpoint", port)) != port:
            self._refuse(visitor, f"its endpoint's port is {str(theirs)[:9]}, not {port}", another=True)
            return
        if arrival.nodes != ours.nodes:
            wanted, own = (":".join(map(str, dict.fromkeys(each.nodes))) for each in (arrival, ours))
            self._refuse(visitor, f"it was started for {wanted} nodes, but the controller for {own}")
            return
        nonce = join.nonce()
        visitor.transcript = f"{message.get('nonce')} {nonce} {line.decode(errors='replace')}"
        visitor.send(nonce=nonce, proves=self._way)

    def _judge(self, visitor: InboundConnection, arrival: Arrival, message: Mapping[str, Any]) -> None:
        """Handle the proof of a launcher: refuse it, or let it join.

        A launcher that joins a started run takes the place of a missing node.
        """
        if "refuses" in message:
            self._warn(f"the launcher on {visitor.name} won't join: {str(message['refuses'])[:MAX_WORDS]}")
            self._drop(visitor)
            return
        if wrong := self._prover.wrong(self._way, "launcher", visitor.transcript, message.get("proof")):
            wrong += f"; if both belong to your job, {join.SAME_SECRET}"
        if why := wrong or self.admits(arrival):
            self._refuse(visitor, why)
            return
        if self._expected and self._will_be_needed(arrival):
            which = f"node {arrival.node_rank}" if self._gathering.ordered else "a node"
            visitor.send(later=f"ranks of {which}, which was lost, may not have ended yet")
            self._drop(visitor)
            return
        visitor.joined = True
        visitor.send(proof=self._prover.proof(self._way, "controller", visitor.transcript))
        if self._expected and (node := self._place_for(arrival)) is not None:
            self._seated[node] = visitor
            self._say(f"the launcher on {visitor.name} joined as node {node}")
            self._on_arrival(events.NodeArrived(node, visitor.name, visitor.here))

    def _refuse(self, visitor: InboundConnection, why: str, another: bool = False) -> None:
        """Refuse a launcher: send it the reason, which it also shows, and close its connection."""
        here = self._gathering.arrival.name
        text = f"the controller on {here} refused the launcher on {visitor.name}: {why}"
        visitor.send(refused=text, status=int(Exit.USAGE), another=another)
        self._warn(f"refused the launcher on {visitor.name}: {why}")
        self._drop(visitor)

    def _turn_away(self, visitor: InboundConnection, what: str) -> None:
        """Close a connection that isn't from a launcher of this run, without an answer."""
        self._warn(f"closed a connection from {visitor.host}, which {what}")
        self._drop(visitor)

    def _warn(self, text: str) -> None:
        """Print a message unless it was printed before. At most MOST_NAMED are printed."""
        if len(self._shown) < MOST_NAMED and text not in self._shown:
            self._shown.add(text)
            self._say(text)

    def _drop(self, visitor: InboundConnection) -> None:
        if visitor in self._visitors:
            self._visitors.remove(visitor)
            self._selector.unregister(visitor.sock)
            visitor.sock.close()

    # Nodes

    def seat(self, visitors: Sequence[InboundConnection | None], second_ports: Sequence[int]) -> None:
        """Assign node numbers in the order of `visitors`. None stands for this launcher or a missing node."""
        self.close()
        self._second_ports = second_ports
        self._seated = {node: visitor for node, visitor in enumerate(visitors) if visitor}

    def attach(
        self,
        on_arrival: Callable[[events.NodeArrived], object],
        lost: Callable[[int], bool],
        say: Callable[[str], object],
    ) -> None:
        """Call `on_arrival` whenever a launcher joins as a missing node. See `Start.attach` for the rest."""
        self._on_arrival, self._lost, self._say = on_arrival, lost, say
        self.admits = lambda arrival: arrival.lacks or self._no_place(arrival)

    def _no_place(self, arrival: Arrival) -> str:
        """Return why a launcher can't become a missing node; "" if it can, now or later."""
        if self._place_for(arrival) is not None or self._will_be_needed(arrival):
            return ""
        if free := sorted(self._expected - {*self._seated}):
            wanted = rank_list(free, "node")
            return f"its node rank is {arrival.node_rank}; the run is waiting for {wanted}"
        return "the run has all the nodes it needs"

    def _will_be_needed(self, arrival: Arrival) -> bool:
        """Return whether a launcher can become a node that has been lost, once its ranks there have ended."""
        most, ordered = self._gathering.arrival.nodes[1], self._gathering.ordered
        if self._place_for(arrival) is not None:
            return False
        numbers = {arrival.node_rank} & {*range(most)} if ordered else {*range(most)}
        return any(number is not None and self._lost(number) for number in numbers - self._expected)

    def _place_for(self, arrival: Arrival) -> int | None:
        """Return the missing node that a launcher can become; None = there is none.

        If node numbers are fixed, it is the one with the launcher's number. Otherwise, it is one that was on
        the same host, or else the lowest one.
        """
        free = sorted(self._expected - {*self._seated})
        if self._gathering.ordered:
            return arrival.node_rank if arrival.node_rank in free else None
        known = [node for node in free if self._hosts.get(node) == arrival.name]
        return next(iter(known or free), None)

    def link(self, node: int, run_id: str, host: str) -> JoinedLink:
        """Return the link to a node's launcher. `host` names the node in case there is no launcher.

        In that case, return a link that has already ended, and open the listener to admit a launcher.
        """
        visitor, number = self._seated.pop(node, None), join.nonce()
        if visitor is None or visitor not in self._visitors:
            self._await(node)
            return JoinedLink(Joined(host), None, number)
        self._hosts[node] = visitor.name
        self._expected.discard(node)
        if not self._expected:
            self.close()
        self._visitors.remove(visitor)
        self._selector.unregister(visitor.sock)
        visitor.send(node=node, run=run_id, nonce=number)
        if earlier := self._held.pop(node, None):
            earlier.close()
        self._held[node] = visitor.sock.dup()
        return JoinedLink(Joined(visitor.name, visitor.here), visitor.sock, number)

    def _await(self, node: int) -> None:
        """Open the listener for a launcher that can replace a missing node."""
        self._expected.add(node)
        if self._listener is None:
            try:
                self.open(self._second_ports)
            except OSError as error:
                self._warn(f"can't listen for recovered nodes: {error.strerror}")
