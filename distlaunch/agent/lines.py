"""A link that keeps only whole lines apart, since others write to it, too: srun's output with --label.

Each frame travels as lines of at most LINE bytes, which begin with PIECE; the last line of a node begins with
GONE and has its guardian's exit status. A newline inside of a frame is ESCAPE and "n", an ESCAPE itself
ESCAPE and "[".
"""

import os
import select

PIECE, GONE = b"=", b"!"
ESCAPE = b"\x1b"
LINE = 960
"""srun passes on at most 1024 bytes at once, and lines whole only up to that."""
LAST_WORD_S = 5.0


def encode(frame: bytes) -> bytes:
    """A frame as lines."""
    plain = frame.replace(ESCAPE, b"\x1b[").replace(b"\n", b"\x1bn")
    return b"".join([b"=%b\n" % plain[at : at + LINE] for at in range(0, len(plain), LINE)])


def decode(pieces: bytes) -> "tuple[bytes, bytes]":
    """The bytes of pieces put together, and what at their end belongs to the next one."""
    whole, rest = (pieces[:-1], pieces[-1:]) if pieces.endswith(ESCAPE) else (pieces, b"")
    return whole.replace(b"\x1bn", b"\n").replace(b"\x1b[", ESCAPE), rest


def say_gone(fd: int, status: int) -> None:
    """Write the last line; an agent that was killed may have left half a one. Gives up after some seconds."""
    left = b"\n!%d\n" % status
    writable = select.poll()
    writable.register(fd, select.POLLOUT)
    while left and writable.poll(LAST_WORD_S * 1000):
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:
            pass
        except OSError:
            return
