"""What comes from the nodes of one process, without IO: who is there, their frames, who is gone."""

from collections.abc import Sequence
from typing import Protocol

from distlaunch.agent.frozen import Frozen
from distlaunch.agent.wire import Frame
from distlaunch.transports.boot import NUDGE
from distlaunch.transports.failure import LinkFailure, ProcessEnd
from distlaunch.transports.handshake import Handshake


class NodeGone(Frozen):
    """A node of several has ended, and the others go on."""

    node: int
    failure: LinkFailure


class Streams(Protocol):
    """Fed with what a transport's process prints."""

    @property
    def booted(self) -> bool:
        """Whether every agent has said hello."""

    @property
    def reached(self) -> bool:
        """Whether every node's shell has answered."""

    @property
    def opened(self) -> bool:
        """Whether every node's shell was sent all that it is to get."""

    @property
    def pulling(self) -> bool:
        """Whether an image is being fetched."""

    @property
    def noise(self) -> bytes:
        """What has come that was not awaited."""

    @property
    def words(self) -> bytes:
        """The end of what came on stderr."""

    def without_marker(self) -> bytes:
        """What to send when no marker need be awaited."""

    def receive(self, data: bytes) -> tuple[bytes, Sequence[Frame | NodeGone]]:
        """Take what came on stdout; what to send, and what that meant. Raises `wire.ProtocolError`."""

    def listen(self, data: bytes) -> list[NodeGone]:
        """Take what came on stderr."""

    def nudges(self) -> bytes:
        """What to send to shells that have not answered: their rc files may wait for a line."""


def end_of(
    streams: Streams, status: int | None, timed_out: bool = False, protocol_error: str = ""
) -> ProcessEnd:
    """The end of a process, or what there is of it so far, with what it has printed."""
    return ProcessEnd(
        streams.words.decode(errors="replace"),
        booted=streams.booted,
        status=status,
        noise=streams.noise[-MAX_NOISE_SHOWN:].decode(errors="replace"),
        timed_out=timed_out,
        protocol_error=protocol_error,
    )


MAX_NOISE_SHOWN = 1024
MAX_WORDS = 8192
"""Bytes of a transport's stderr that are kept, from its end."""


class OneStream(Handshake):
    """That of a process whose output is as its agents wrote it."""

    def __init__(self, openings: Sequence[bytes], nonce: str) -> None:
        super().__init__(openings, nonce)
        self.words = b""

    def receive(self, data: bytes) -> tuple[bytes, Sequence[Frame | NodeGone]]:
        """As a handshake does: nobody tells of one of its nodes alone."""
        return self.feed(data)

    def listen(self, data: bytes) -> list[NodeGone]:
        """Keep it."""
        self.words = (self.words + data)[-MAX_WORDS:]
        return []

    def nudges(self) -> bytes:
        """For its one shell, until that was sent what it reads: behind that, a line is the agent's."""
        return b"" if self.opened else NUDGE
