"""A link that its far end opened: the launcher there passes frames between it and its own agent."""

from collections.abc import Mapping
from typing import Any

from distlaunch.agent import messages, wire
from distlaunch.agent.wire import Frame
from distlaunch.contract import SENT
from distlaunch.transports.joined import Joined
from distlaunch.transports.link import Link
from distlaunch.transports.peer import Peer
from distlaunch.transports.streams import NodeGone, OneStream


class JoinedLink(Link):
    """A link to the agent of another launcher, which is sent ranks, addresses and ports, and no program."""

    def __init__(self, transport: Joined, peer: Peer, node: int, nonce: str) -> None:
        self._peer = peer
        super().__init__(transport, peer, OneStream([], nonce), lambda: b"")

    def send(self, node: int, command: tuple[Any, ...]) -> None:
        """As of every link, but what its workers run is known there alone."""
        super().send(node, ranks_alone(command) if isinstance(command, messages.StartWorkers) else command)

    def receive(self) -> list[Frame | NodeGone]:
        """As of every link; the last frame tells how the agent ended."""
        try:
            frames = super().receive()
        except OSError as error:
            self.at_end = True
            self._streams.listen(f"its launcher: {error.strerror}\n".encode())
            return []
        kept = []
        for frame in frames:
            if isinstance(frame, Frame) and frame.kind == wire.END:
                told = frame.message()
                self._peer.status = told["status"] if isinstance(told.get("status"), int) else None
                self._streams.listen(str(told.get("words", "")).encode())
            else:
                kept.append(frame)
        if self.at_end and self._peer.status is None and self.booted:
            self._streams.listen(b"its launcher closed the connection\n")
        return kept


def ranks_alone(command: messages.StartWorkers) -> messages.StartRanks:
    """What of a command may travel to a launcher that runs its own command line."""

    def sent(variables: Mapping[str, str]) -> dict[str, str]:
        return {name: text for name, text in variables.items() if name in SENT}

    return messages.StartRanks(
        **{name: getattr(command, name) for name in messages.StartRanks.__annotations__ if name != "workers"}
        | {"env": sent(command.env)},
        workers=[
            messages.RankSpec(each.local_rank, sent(each.env), sent(each.defaults))
            for each in command.workers
        ],
    )
