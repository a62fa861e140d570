"""Gathers independently started launchers, one per node or rank, into one run.

One launcher is the controller, which listens at the rendezvous endpoint until all have joined. The others
connect to the controller and act as its agents (`distlaunch.launch.joined_agent`).
"""

import errno
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress

from distlaunch.agent import network, procfs
from distlaunch.agent.frozen import Frozen
from distlaunch.errors import DistlaunchError, Exit, reason
from distlaunch.here import runs_ranks
from distlaunch.job.spec import JobSpec, NodeSpec
from distlaunch.job.text import is_loopback
from distlaunch.launch.inbound import ENDING, InboundConnection, InboundListener, claim_of
from distlaunch.launch.join import TURN_S, JoinError, Launcher, Prover, Say, Seat, Wait, pause, renumbered
from distlaunch.launch.opening import NO_RANKS_HERE, make_room_for_many
from distlaunch.schedulers import allocation_in
from distlaunch.signals import Interrupts
from distlaunch.transports.gathering import Arrival, Gathering, in_order, ports_for
from distlaunch.transports.transport import Joined, Local
from distlaunch.wording import counted, listed, rank_list, span_words

NAME_S = 60.0
"""Maximum seconds to wait until the name of a host that has just started, such as a pod, resolves."""


LOOK_S = 2.0
"""Seconds between two searches for the process that uses the port."""


class Gathered(Frozen):
    """The controller's result: the job on all nodes, and the listener for their links."""

    spec: JobSpec
    listener: InboundListener


def gather(spec: JobSpec, gathering: Gathering, interrupts: Interrupts, say: Say) -> Gathered | Seat:
    """Join the other launchers. `spec` is this node's part of the job. Raises `JoinError`.

    Return the whole job if this launcher is the controller, or else its place in the run.
    """
    if not runs_ranks():
        raise DistlaunchError(NO_RANKS_HERE)
    prover = Prover(os.environ, gathering.arrival.name)
    launcher = Launcher(gathering, prover, interrupts, say)
    serves = gathering.serves
    if serves is not False and gathering.fixed:
        unresolved = _await_name(gathering.hosts[0], gathering.wait_s, interrupts, say)
        here = is_here(gathering.hosts[0])
        if serves and not here and gathering.ordered:
            why = f"does not resolve ({unresolved})" if unresolved else "is not an address of this machine"
            raise JoinError(f"{gathering.hosts[0]} {why}: {gathering.elsewhere}", Exit.USAGE)
        if here and serves is None and (seat := launcher.seated_late()):
            return seat  # in a running job; its rank 0 might not be using the endpoint's port
        serves = here or serves or False
    if not serves:
        return launcher.seated()
    make_room_for_many(gathering.arrival.nodes[1])
    entry = _Entry(gathering, InboundListener(gathering, prover, say), spec.rendezvous.id or "")
    try:
        if seat := launcher.seated_unless(entry.opened):
            return seat
    except JoinError as error:
        if error.exit_status != Exit.UNREACHABLE or not entry.came_too_early:
            raise
        what = f"another launcher on this host already controlled a job at {gathering.label}"
        text = f"gave up after {gathering.wait_s:g} s: {what}, and no node was lost; start this one again"
        raise JoinError(text, Exit.UNREACHABLE) from None
    try:
        return _Controller(spec, gathering, entry.listener, interrupts, say).gathered(entry.port)
    except BaseException:
        entry.listener.close()
        raise


class _Entry:
    """The endpoint, for a launcher that may be the controller. `run_id` is the job's TORCHELASTIC_RUN_ID."""

    def __init__(self, gathering: Gathering, listener: InboundListener, run_id: str) -> None:
        self._gathering, self.listener, self._run_id = gathering, listener, run_id
        self._waits: bool | None = None
        """Whether the job that uses the endpoint is ending. If not, this launcher never controls one."""
        self._look_at, self._left, self.port = 0.0, None, 0

    @property
    def came_too_early(self) -> bool:
        """Return whether another launcher on this host controlled a job that wasn't ending yet."""
        return self._waits is False

    def opened(self) -> str | None:
        """Listen at the endpoint, and return None. Raises `JoinError` if that is impossible.

        If the port is still in use by this job's own ranks, whose launcher was killed, return which; if
        another launcher may be the controller, "".
        """
        claimed = self._claimed()
        if not claimed and self._waits:
            return "another launcher on this host is ending its job, which uses the port"
        if not claimed and self._gathering.serves:
            what = f"another launcher on this host uses port {self._gathering.ports[0]}"
            raise JoinError(f"{what}; {self._gathering.taken}", Exit.PORT_TAKEN)
        if not claimed:
            return ""
        try:
            try:
                self.port = self.listener.open(self._gathering.ports)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                if left := self._rank_left():
                    return f"process {left} uses the port, perhaps a rank of a launcher that was killed"
                self.port = self.listener.open(self._gathering.ports)  # the rank may just have exited
        except OSError as error:
            if error.errno == errno.EADDRINUSE and not self._gathering.serves:
                return ""
            text = f"can't listen at {self._gathering.label} for the other nodes: {reason(error)}"
            raise JoinError(f"{text}; {self._gathering.taken}", Exit.PORT_TAKEN) from None
        return None

    def _claimed(self) -> bool:
        """Claim the endpoint's port. Return whether no other launcher on this host controls a job there.

        While ranks start, nothing listens there. If another launcher controls a job that isn't ending yet,
        this one was started in vain, and must not begin the job again once that has ended.
        """
        if self.listener.claim or not self._gathering.fixed:
            return True
        if self._waits is False:
            return False
        port = self._gathering.ports[0]
        self.listener.claim = claim_of(port)
        if not self.listener.claim:
            self._waits = claim_of(port, ENDING) is None
            self.listener.claim = claim_of(port)  # in case the other has exited in between
        return bool(self.listener.claim)

    def _rank_left(self) -> int | None:
        """Return the PID of a rank of this job that listens on the endpoint's port, or None."""
        if time.monotonic() > self._look_at:
            self._look_at, host = time.monotonic() + LOOK_S, self._gathering.hosts[0]
            wanted = {f"TORCHELASTIC_RUN_ID={self._run_id}".encode(), f"MASTER_ADDR={host}".encode()}
            pids = [owner["pid"] for owner in network.owners(self._gathering.ports[0]) if owner["pid"]]
            held = ((pid, {*procfs.environment(pid).split(b"\0")}) for pid in pids)
            alone = self._gathering.arrival.nodes[0] == 1  # otherwise, a job of one node is another job
            own = (pid for pid, env in held if wanted <= env and (alone or b"GROUP_WORLD_SIZE=1" not in env))
            self._left = next(own, None)
        return self._left


def is_here(host: str) -> bool:
    """Return whether a name or address belongs to this machine.

    It does if the address would also be the source of traffic sent to it. A successful bind would prove
    nothing if net.ipv4.ip_nonlocal_bind is on.
    """
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    return any(_is_source(family, address) for family, _, _, _, address in found)


def _is_source(family: int, address: tuple[object, ...]) -> bool:
    host = str(address[0])
    if is_loopback(host):
        return True
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(address)
            return bool(sock.getsockname()[0] == host)
    except OSError:
        return False


def _await_name(host: str, wait_s: float, interrupts: Interrupts, say: Say) -> str:
    """Wait up to NAME_S seconds for a host name to resolve. Nothing can listen on the host before that.

    Return the reason if it doesn't resolve, or else "".
    """
    limit_s, why = min(wait_s, NAME_S), ""
    wait = Wait(limit_s)
    while not wait.over:
        try:
            socket.getaddrinfo(host, None)
            return ""
        except (OSError, UnicodeError) as error:
            why = str(getattr(error, "strerror", None) or error)
            if wait.is_worth_telling():
                say(f"waiting up to {span_words(limit_s)} for {host} to resolve: {why}")
        pause(interrupts, say, TURN_S)
    return why


class _Controller:
    """The controller's side, which waits for all other launchers and merges their parts into one job."""

    def __init__(
        self, spec: JobSpec, gathering: Gathering, listener: InboundListener, interrupts: Interrupts, say: Say
    ) -> None:
        self._spec, self._gathering, self._door = spec, gathering, listener
        self._interrupts, self._say = interrupts, say
        self._own = gathering.arrival
        self._fewest, self._most = self._own.nodes
        listener.admits = self._refusal

    def gathered(self, port: int) -> Gathered:
        """Wait until all nodes have joined, or until the last call is over and enough of them have joined."""
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
            pause(self._interrupts, self._say, TURN_S, self._door.fd)
            self._door.turn()
        return self._seated(port)

    def _refusal(self, arrival: Arrival) -> str:
        """Return the reason to refuse a launcher, or "" to admit it (`InboundListener.admits`)."""
        number = arrival.node_rank
        if self._gathering.ordered:
            taken = {each.node_rank for each in self._there()}
            if number is None or number >= self._most:
                return f"its node rank, {number}, is not below {self._most}"
            if number in taken:
                return f"another launcher with node rank {number} has already joined"
        if len(self._door.joined) + 1 >= self._most:
            return f"{self._most} of {self._most} nodes have already joined: start one launcher on each node"
        return ""

    def _there(self) -> list[Arrival]:
        """Return the launchers that have joined so far, this one first."""
        return [self._own, *(each.arrival for each in self._door.joined if each.arrival)]

    def _missing_words(self) -> str:
        """Describe the launchers that haven't joined, for messages: which, or how many."""
        there = self._there()
        if self._gathering.ordered:
            numbers = sorted({*range(self._most)} - {each.node_rank for each in there})
            if self._own.place:
                return rank_list(numbers)
            what = rank_list(numbers, "node")
        else:
            names = sorted(each.name for each in there)
            enough = self._fewest if len(there) < self._fewest else self._most
            what = f"{enough - len(there)} of {counted(enough, 'node')} (joined: {listed(names)})"
        return what + _absent(there, self._most)

    def _tell(self) -> None:
        text = f"waiting for {self._missing_words()} at {self._gathering.label}"
        self._say(text)
        for visitor in self._door.joined:
            visitor.send(waiting=text)

    def _too_few(self) -> JoinError:
        """Notify the joined launchers that the run won't start. Return the error."""
        place, wait_s = self._gathering.label, self._gathering.wait_s
        text = f"gave up after {wait_s:g} s: waited for {self._missing_words()} at {place}"
        text += "; check that every launcher was started with this endpoint; look for errors in their output"
        self._door.dismiss(text, Exit.TIMEOUT)
        return JoinError(text, Exit.TIMEOUT)

    def _seated(self, port: int) -> Gathered:
        """Return the job with its nodes in order. Nodes that may join later are last."""
        visitors = self._door.joined
        arrivals = self._there()
        if self._gathering.ordered:
            order = sorted(range(len(arrivals)), key=lambda i: arrivals[i].node_rank or 0)
        else:
            order = in_order(arrivals, [True, *(each.here for each in visitors)])
        seats: list[InboundConnection | None] = [visitors[i - 1] if i else None for i in order]
        nodes = [self._node(arrivals[i], seats[place]) for place, i in enumerate(order)]
        late = [f"node {number}" for number in range(len(nodes), self._most)]
        near = is_loopback(self._gathering.hosts[0])
        nodes += [self._spec.nodes[0]._replace(label=label, reach=Joined(label, near)) for label in late]
        self._door.seat(seats, ports_for(f"{self._gathering.label} {self._own.job}"))
        if self._own.node_rank not in (None, number := order.index(0)):
            self._say(renumbered(number, self._own.node_rank))
        membership = self._spec.membership._replace(min_nodes=self._fewest)
        fixed, host = self._gathering.fixed, self._gathering.hosts[0]
        if not fixed and len(self._gathering.hosts) > 1:
            # The local address to which launchers on other hosts have connected.
            host = next((each.reached for each in visitors if not each.here), "127.0.0.1")
        rendezvous = self._spec.rendezvous._replace(host=host, port=port if fixed else None)
        spec = self._spec._replace(nodes=tuple(nodes), membership=membership, rendezvous=rendezvous)
        return Gathered(spec, self._door)

    def _node(self, arrival: Arrival, visitor: InboundConnection | None) -> NodeSpec:
        """Return the node of a launcher; `visitor` is None for this one."""
        reach = Joined(arrival.name, visitor.here) if visitor else Local()
        own = self._spec.nodes[0]
        gpus = own.gpus if arrival.gpus is None else arrival.gpus
        return own._replace(label=arrival.name, reach=reach, gpus=gpus, place=arrival.place)


def _absent(there: Sequence[Arrival], most: int) -> str:
    """Return text that lists the scheduler's hosts from which no launcher has joined; "" if unclear."""
    came = {each.name.partition(".")[0] for each in there}
    hosts: list[str] = []
    with suppress(DistlaunchError):
        if allocation := allocation_in(os.environ):
            hosts = [node.host for node in allocation.nodes if node.host.partition(".")[0] not in came]
    return f": {listed(hosts)}" if hosts and len(hosts) == most - len(came) else ""
