"""The dumps of torch's flight recorder, which workers leave in the agent's folder."""

import os

from distlaunch.agent import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator, Tuple

MAX_BYTES = 32 << 20
"""Bytes that are taken of one rank's dump."""


class Flight:
    """Where the workers of a generation leave their dumps: torch adds the rank to `prefix`."""

    def __init__(self, folder: str, generation: int) -> None:
        self._folder, self._name = folder, "flight-%d-" % generation
        self.prefix = os.path.join(folder, self._name)

    def pieces(self) -> "Iterator[Tuple[int, bytes]]":
        """(rank, bytes) of all that is there, in order."""
        for name in sorted(os.listdir(self._folder)):
            rank = name[len(self._name) :]
            if name.startswith(self._name) and rank.isdigit() and int(rank) <= 0xFFFF:
                for piece in self._read(name):
                    yield int(rank), piece

    def _read(self, name: str) -> "Iterator[bytes]":
        try:
            # A job may have put anything there: a pipe would block, a link would lead elsewhere.
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
            with open(os.open(os.path.join(self._folder, name), flags), "rb") as file:
                for _ in range(MAX_BYTES // wire.MAX_OUTPUT):
                    piece = file.read(wire.MAX_OUTPUT)
                    if not piece:
                        return
                    yield piece
        except OSError:
            return
