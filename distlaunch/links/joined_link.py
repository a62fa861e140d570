"""A link that its far end opened: the launcher there passes frames between it and its own agent."""

import os
import socket
from collections.abc import Mapping
from typing import Any

from distlaunch.agent import messages, wire
from distlaunch.agent.wire import Frame
from distlaunch.contract import SENT
from distlaunch.links.dial import watch_for_silence
from distlaunch.links.link import Link
from distlaunch.transport.joined import Joined
from distlaunch.transport.streams import NodeGone, OneStream


class Peer:
    """A connection in the place of a link's process; None = one that never was.

    Its far end tells the `status`.
    """

    def __init__(self, sock: socket.socket | None) -> None:
        self.status: int | None = None
        # Nothing comes here: stderr is at its end.
        self.stderr, write = os.pipe()
        os.close(write)
        if sock is None:
            self.stdout, self.stdin = os.dup(self.stderr), os.open(os.devnull, os.O_WRONLY)
            return
        watch_for_silence(sock)
        self.stdout = sock.detach()
        self.stdin = os.dup(self.stdout)  # each is watched by itself

    def poll(self) -> int | None:
        """The status of its far end's agent, once that has ended."""
        return self.status

    def wait(self) -> None:
        """There is no process."""

    def signal(self, signum: int) -> None:
        """End it, whatever the signal."""
        self.kill()

    def signal_group(self, signum: int) -> None:
        """The same."""
        self.kill()

    def kill(self) -> None:
        """Close the connection both ways: its far end stops what it has, and leaves."""
        try:
            with socket.socket(fileno=os.dup(self.stdout)) as sock:
                sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is gone

    def exit_descriptor(self) -> int:
        """Readable at once: nothing more is told after the end of the connection."""
        return os.dup(self.stderr)

    def close_stdin(self) -> None:
        """Close our half of it."""
        self.kill()

    def close(self) -> None:
        """Let go of it."""
        for fd in (self.stdin, self.stdout, self.stderr):
            os.close(fd)


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
            self._streams.listen(f"{error.strerror}\n".encode())
            return []
        kept = []
        for frame in frames:
            if isinstance(frame, Frame) and frame.kind == wire.END:
                told = frame.message()
                self._peer.status = told["status"] if isinstance(told.get("status"), int) else None
                self._streams.listen(str(told.get("words", "")).encode())
            else:
                kept.append(frame)
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
