"""A tree of nodes: ssh to a few, whose relays start ssh to others. Without IO.

A relay (see `distlaunch.agent.relay`) hands on the three streams of the processes that it serves: those of
its own node's agent, and of ssh to each node right below. Here they are taken apart again, a level for each
relay on the way.
"""

import json
from collections.abc import Sequence

from distlaunch.agent import relay, wire
from distlaunch.agent.frozen import Frozen
from distlaunch.agent.wire import Frame, ProtocolError
from distlaunch.transport.failure import LinkFailure, ProcessEnd, classify, cut_off
from distlaunch.transport.ssh import Ssh
from distlaunch.transport.ssh.failures import BY_SSH, SSH_FAILED
from distlaunch.transport.streams import NodeGone, OneStream, end_of


class Branch(Frozen):
    """A node: how it is reached, what its shell and its interpreter are sent, what is reached from there."""

    node: int
    reach: Ssh
    opening: bytes
    loader: bytes
    below: "tuple[Branch, ...]" = ()

    @property
    def nodes(self) -> list[int]:
        """It, and all below."""
        return [self.node, *(node for each in self.below for node in each.nodes)]


def shares(items: Sequence[int], most: int) -> list[Sequence[int]]:
    """`items` in at most so many parts, of about the same size, in their order."""
    size, count = len(items), min(most, len(items))
    return [items[size * part // count : size * (part + 1) // count] for part in range(count)]


class Relayed(OneStream):
    """As `distlaunch.transport.streams` has it, of the nodes that a relay serves: `top`'s own, and below."""

    def __init__(self, top: Branch, nonce: str) -> None:
        super().__init__([top.opening], nonce, caps=wire.RELAYED)
        self.top = top
        own = _Served(top.node, top.reach.host, OneStream([], nonce))
        below = [_Below(branch, nonce, top.reach.host) for branch in top.below]
        self._served: dict[int, _Served] = {each.node: each for each in (own, *below)}
        self._way = {node: each for each in self._served.values() for node in each.left}

    def openings(self) -> bytes:
        """What a relay that was just booted is told: to start ssh to the nodes right below."""
        return b"".join(
            wire.encode_relay(branch.node, relay.OPEN, json.dumps(_argv(branch.reach)).encode())
            for branch in self.top.below
        )

    def receive(self, data: bytes) -> tuple[bytes, Sequence[Frame | NodeGone]]:
        """Take what came on stdout. Raises `wire.ProtocolError`."""
        to_send, frames = self.feed(data)
        found: list[Frame | NodeGone] = []
        for frame in frames:
            more, of_one = self._of(frame.node).take(frame)
            to_send += more
            found += of_one
        return to_send, found

    def _of(self, node: int) -> "_Served":
        if node not in self._served:
            raise ProtocolError(f"a relay's frame for node {node}, which it does not serve")
        return self._served[node]

    def addressed(self, node: int, data: bytes) -> bytes:
        """`data` for a node's agent, as it travels."""
        return self._way[node].addressed(node, data)

    def nudges(self) -> bytes:
        """A line for each shell that has not answered, here or below."""
        if not self.booted:
            return super().nudges()
        return b"".join(each.nudges() for each in self._served.values())

    def parting(self, node: int) -> bytes:
        """What makes a node's agent leave."""
        return self._way[node].parting(node)

    def part_of(self, node: int, failure: LinkFailure, overdue: str) -> LinkFailure:
        """A relay's failure is that of its own node alone; the others may be reached without it."""
        if node == self.top.node:
            return failure
        if overdue and self.booted:
            return self._way[node].failure(node, overdue)
        return cut_off(self.top.reach.host)


class _Served:
    """A relay's own node: its guardian is the relay's child."""

    def __init__(self, node: int, host: str, stream: OneStream, nodes: Sequence[int] = ()) -> None:
        self.node, self._host, self.stream = node, host, stream
        self.left = dict.fromkeys(nodes or [node])
        """The nodes from which more may come, its own first."""

    def take(self, frame: Frame) -> tuple[bytes, list[Frame | NodeGone]]:
        """What the relay has sent about it; what to send, and what that meant."""
        try:
            match frame.channel:
                case relay.DATA:
                    return self._feed(frame.payload)
                case relay.ERRORS:
                    self.stream.listen(frame.payload)
                    return b"", []
                case relay.ENDED:
                    return b"", self._gone(status=int(frame.payload))
            raise ProtocolError(f"a relay's frame of the unknown kind {frame.channel}")
        except (ProtocolError, ValueError) as error:
            return self._sent(relay.SHUT), self._gone(protocol_error=str(error))

    def _feed(self, data: bytes) -> tuple[bytes, list[Frame | NodeGone]]:
        to_send, found = self.stream.receive(data)
        for each in found:
            if each.node not in self.left:
                raise ProtocolError(f"a frame for node {each.node} came on another node's link")
            if isinstance(each, NodeGone):
                for node in (each.node, *each.cut):
                    self.left.pop(node, None)
        return self._answers(to_send), list(found)

    def _answers(self, to_send: bytes) -> bytes:
        return self._sent(relay.DATA, to_send) if to_send else b""

    def addressed(self, node: int, data: bytes) -> bytes:
        """For the relay's own agent."""
        return self._sent(relay.DATA, data)

    def nudges(self) -> bytes:
        """None: it has no shell."""
        return b""

    def parting(self, node: int) -> bytes:
        """Its input is closed."""
        self.left.pop(node, None)
        return self._sent(relay.SHUT)

    def failure(self, node: int, overdue: str) -> LinkFailure:
        """What it means that a node is `overdue`."""
        return self._failure(timed_out=True).saying(overdue)

    def _gone(self, status: int | None = None, protocol_error: str = "") -> list[Frame | NodeGone]:
        if not self.left:
            return []  # that was told before
        first, *cut = self.left
        self.left.clear()
        failure = self._failure(status=status, protocol_error=protocol_error)
        return [NodeGone(first, failure if first == self.node else cut_off(self._host), tuple(cut))]

    def _failure(
        self, status: int | None = None, timed_out: bool = False, protocol_error: str = ""
    ) -> LinkFailure:
        return self._classified(end_of(self.stream, status, timed_out, protocol_error))

    def _classified(self, end: ProcessEnd) -> LinkFailure:
        return classify(end, process="its agent's guardian process")

    def _sent(self, what: int, data: bytes = b"") -> bytes:
        return wire.encode_relay(self.node, what, data)


class _Below(_Served):
    """A node below a relay, which reaches it by ssh; it may be a relay, too."""

    def __init__(self, branch: Branch, nonce: str, via: str) -> None:
        stream = Relayed(branch, nonce) if branch.below else OneStream([branch.opening], nonce)
        super().__init__(branch.node, branch.reach.host, stream, branch.nodes)
        self._branch, self._via, self._is_begun = branch, via, False
        self._behind_boot = b""

    def _answers(self, to_send: bytes) -> bytes:
        answer = super()._answers(to_send)
        if self.stream.opened and not self._is_begun:
            self._is_begun = True
            answer += self._sent(relay.BOOT, self._branch.loader)
            if isinstance(self.stream, Relayed):
                answer += self._sent(relay.DATA, self.stream.openings())
            answer += self._behind_boot
        return answer

    def addressed(self, node: int, data: bytes) -> bytes:
        """For its agent, or one below; kept until it boots."""
        travelling = self.stream.addressed(node, data)
        wrapped = self._sent(relay.DATA, travelling) if travelling else b""
        if self._is_begun:
            return wrapped
        self._behind_boot += wrapped
        return b""

    def nudges(self) -> bytes:
        """For its shell, and those below."""
        due = self.stream.nudges() if self.left else b""
        return self._sent(relay.DATA, due) if due else b""

    def parting(self, node: int) -> bytes:
        """ssh is killed, unless it is to a relay that others need."""
        self.left.pop(node, None)
        if self.left and self.stream.booted:
            return self._sent(relay.DATA, self.stream.parting(node))
        return b"" if self.left else self._sent(relay.SHUT)

    def failure(self, node: int, overdue: str) -> LinkFailure:
        """Of a node below, its own relay may know more."""
        if node == self.node:
            return super().failure(node, overdue)
        if self.stream.booted:
            return self.stream.part_of(node, cut_off(self._host), overdue)
        return cut_off(self._host)

    def _classified(self, end: ProcessEnd) -> LinkFailure:
        return classify(end, BY_SSH, SSH_FAILED, f"ssh on {self._via}")._replace(via=self._via)


def _argv(reach: Ssh) -> list[str]:
    """ssh as from here, but for connections that are kept open: nobody would find them."""
    return reach._replace(options=reach.options._replace(persist_s=None)).argv()
