"""In which order output came, and when: output.index, beside the files that have it by rank."""

import struct

from distlaunch.agent.frozen import Frozen

NAME = "output.index"
RECORD = struct.Struct("<dQIIIH")


class Stamp(Frozen):
    """A piece of a rank's stdout (0) or stderr (1) that came at `time`, in seconds since the epoch."""

    time: float
    rank: int
    generation: int
    stream: int

    def packed(self, offset: int, size: int) -> bytes:
        """The record of a piece of `size` bytes that stands at `offset` in its file."""
        return RECORD.pack(self.time, offset, size, self.rank, self.generation, self.stream)


class Entry(Frozen):
    """A record: which `size` bytes, from `offset` on, of which file came then."""

    stamp: Stamp
    offset: int
    size: int


def unpacked(data: bytes) -> list[Entry]:
    """The entries of whole records."""
    return [
        Entry(Stamp(time, rank, generation, stream), offset, size)
        for time, offset, size, rank, generation, stream in RECORD.iter_unpack(data)
    ]
