"""The first bytes of a link, without IO: noise, marker, hello, then frames."""

from distlaunch.agent import wire

MAX_NOISE = 1 << 16
"""Bytes that a login shell may print before the marker, and again before the hello."""


class Handshake:
    """Feed it what the node sent; it says what to send and which frames came.

    `opening` is sent once, when the marker is seen; the hello must carry `nonce`.
    """

    def __init__(self, opening: bytes, nonce: str) -> None:
        self._opening = opening
        self._awaited = [wire.READY_MARKER, wire.HELLO_PREFIX + nonce.encode() + b"\n"]
        self._noise = b""
        self._decoder = wire.FrameDecoder(wire.MAX_REPORT)

    @property
    def booted(self) -> bool:
        """Whether the agent's hello has come."""
        return not self._awaited

    @property
    def reached(self) -> bool:
        """Whether the node's shell has answered."""
        return len(self._awaited) < 2

    def without_marker(self) -> bytes:
        """What to send when the marker need not be awaited; it is still expected."""
        opening, self._opening = self._opening, b""
        return opening

    @property
    def noise(self) -> bytes:
        """What has come that was not awaited, since the last awaited word."""
        return self._noise

    def feed(self, data: bytes) -> tuple[bytes, list[wire.Frame]]:
        """Take received bytes; return (bytes to send, frames). Raises `wire.ProtocolError`."""
        to_send = b""
        while self._awaited:
            self._noise += data
            before, found, data = self._noise.partition(self._awaited[0])
            if len(before) > MAX_NOISE:
                raise wire.ProtocolError(f"more than {MAX_NOISE} bytes of output before the agent started")
            if not found:
                return to_send, []
            self._noise = b""
            to_send += self._opening
            self._opening = b""
            self._awaited.pop(0)
        return to_send, self._decoder.feed(data)
