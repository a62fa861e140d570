"""The first bytes of a link, without IO: noise, marker, hello, then frames."""

from collections.abc import Sequence

from distlaunch.agent import wire
from distlaunch.transports.boot import PULLING

MAX_NOISE = 1 << 16
"""Bytes that a login shell may print before the marker, and again before the hello."""


class Handshake:
    """Feed it what the node sent; it says what to send and which frames came.

    Each of `openings` is sent once, when a marker is seen: an earlier one makes of the shell another one,
    with a marker of its own. The hello must carry `nonce`.
    """

    def __init__(self, openings: Sequence[bytes], nonce: str) -> None:
        self._awaited = [(wire.READY_MARKER, then) for then in openings]
        self._awaited.append((wire.HELLO_PREFIX + nonce.encode() + b"\n", b""))
        self._noise = b""
        self._decoder = wire.FrameDecoder(wire.REPORTS)

    @property
    def booted(self) -> bool:
        """Whether the agent's hello has come."""
        return not self._awaited

    @property
    def reached(self) -> bool:
        """Whether the node's shell has answered, or the last of its shells."""
        return len(self._awaited) < 2

    @property
    def opened(self) -> bool:
        """Whether the opening has been sent: what follows is for the interpreter."""
        return not any(then for _, then in self._awaited)

    @property
    def pulling(self) -> bool:
        """Whether an image is being fetched."""
        return f"{PULLING}\n".encode() in self._noise

    def without_marker(self) -> bytes:
        """What to send when the first marker need not be awaited; it is still expected."""
        marker, then = self._awaited[0]
        self._awaited[0] = marker, b""
        return then

    @property
    def noise(self) -> bytes:
        """What has come that was not awaited, since the last awaited word."""
        return self._noise

    def feed(self, data: bytes) -> tuple[bytes, list[wire.Frame]]:
        """Take received bytes; return (bytes to send, frames). Raises `wire.ProtocolError`."""
        to_send = b""
        while self._awaited:
            self._noise += data
            word, then = self._awaited[0]
            before, found, data = self._noise.partition(word)
            if len(before) > MAX_NOISE:
                raise wire.ProtocolError(f"more than {MAX_NOISE} bytes of output before the agent started")
            if not found:
                return to_send, []
            self._noise = b""
            to_send += then
            self._awaited.pop(0)
        return to_send, self._decoder.feed(data)
