"""What comes from the nodes of one process, without IO: who is there, their frames, who is gone."""

from collections.abc import Sequence
from typing import Protocol

from distlaunch.agent.frozen import Frozen
from distlaunch.agent.wire import Frame
from distlaunch.transport.failure import ProcessEnd
from distlaunch.transport.handshake import Handshake


class NodeGone(Frozen):
    """A node of several has ended, and the others go on; `end` is its part of the process's end."""

    node: int
    end: ProcessEnd


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

    def feed(self, data: bytes) -> tuple[bytes, Sequence[Frame | NodeGone]]:
        """Take what came on stdout; what to send, and what that meant. Raises `wire.ProtocolError`."""

    def listen(self, data: bytes) -> list[NodeGone]:
        """Take what came on stderr."""


MAX_WORDS = 8192
"""Bytes of a transport's stderr that are kept, from its end."""


class OneStream(Handshake):
    """That of a process whose output is as its agents wrote it."""

    def __init__(self, opening: bytes, nonce: str, entry: bytes = b"") -> None:
        super().__init__(opening, nonce, entry)
        self.words = b""

    def listen(self, data: bytes) -> list[NodeGone]:
        """Keep it."""
        self.words = (self.words + data)[-MAX_WORDS:]
        return []
