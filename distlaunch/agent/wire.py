"""Byte format of the protocol between controller and agent. `distlaunch.agent.messages` defines the messages.

A link is a pair of byte streams. After the boot (see
``distlaunch.transports.handshake``), the agent writes ``HELLO_PREFIX + nonce + b"\\n"``. Anything that a
login shell prints before that line is ignored. After it, both directions carry frames:

    offset  size  field
    0       1     kind: CONTROL, PACKED, OUTPUT, FLIGHT, FILE, TREE or END
    1       2     node index, since one link may serve several nodes
    3       2     attempt whose worker printed the payload, modulo ATTEMPTS; 0 for CONTROL
    5       2     channel: 0 for CONTROL; ``2 * local_rank + (0 stdout | 1 stderr)`` for OUTPUT;
                  the rank for FLIGHT
    7       4     length of the payload in bytes; the limit depends on the kind

A CONTROL payload is one JSON object with an ``op``: see `distlaunch.agent.messages`. A PACKED payload is such
an object, compressed with zlib. Only the controller sends it. A FLIGHT payload is a piece of a rank's flight
recorder dump, if `StartWorkers` requested dumps. A TREE payload, which only the controller sends, is the next
piece of the contents that a node lacks. The last one is empty: see `distlaunch.agent.tree`. A FILE payload is
the next piece of a file that a node sends at the end of the job: see `distlaunch.agent.collection`. END is
the last frame of a launcher that joined. Its payload, {"op": "end", "status", "words"}, describes how the
launcher's agent exited, and whether it was killed.

If several nodes write to one link, as with `srun --label`, only whole lines can be kept apart. Each frame
of a node then travels as lines of at most LINE bytes, which begin with PIECE. The last line of a node begins
with GONE and contains the exit status of its guardian. A newline inside a frame becomes ESCAPE and "n". An
ESCAPE becomes ESCAPE and "[".

Pickle is never used. Unknown kinds, overlong frames and invalid payloads close the link (`ProtocolError`).
"""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import zlib
from collections.abc import Mapping

from distlaunch.agent.frozen import Frozen

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing costs 10 ms on the node
    from typing import Any

    Message = dict[str, Any]
else:
    Message = dict

PROTOCOL = 1
READY_MARKER = b"distlaunch-ready-1\n"
HELLO_PREFIX = b"\x00distlaunch-agent "

CONTROL = 1
OUTPUT = 2
FLIGHT = 3
PACKED = 4
END = 5
TREE = 6
FILE = 7
PACK_BYTES = 900
"""Bytes beyond which commands are packed: srun splits more than 1024 bytes into pieces sent 40 ms apart."""
ATTEMPTS = 1 << 16
HEADER = struct.Struct("!BHHHI")
PIECE, GONE = b"=", b"!"
ESCAPE = b"\x1b"
LINE = 960
"""Bytes of a line. srun forwards at most 1024 bytes at once, and may split longer lines."""
LAST_WORD_S = 5.0
"""Seconds to wait until the last line of a node can be written."""
SHARED = "DISTLAUNCH_SHARED"
"""The variable that lists descriptors (stdin, stdout) that workers share with the controller: `5,6`.

It is empty for agents on other nodes.
"""
SHARED_PMI = "PMI_FD"
"""The variable with the descriptor of the connection to the MPI process manager, which a worker inherits."""

STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
"""Signals that stop an agent."""
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that are termination warnings, for an agent or for the controller."""
CLEAN, LEFT_EARLY, AGENT_DIED, NOT_CLEAN = 0, 72, 70, 71
"""Exit statuses on the node.

In order, they mean: the controller closed the agent; the agent left early; the agent was killed, but the
guardian has swept; processes remain after the sweep. No transport exits with one of the nonzero statuses when
it fails itself.
"""

LEASE_S = 30.0
"""Seconds without a heartbeat after which either side considers the other lost."""
HEARTBEATS = 6
"""Heartbeats in each lease, all but one of which may be lost."""
STALL_LOOKS = 8
STALL_LOOK_MAX_S = 15.0
"""Maximum seconds between checks for stalls. An agent makes at least `STALL_LOOKS` checks per timeout."""
DUMP_S = 10.0
"""Seconds for stalled workers to print stacks and write flight recorder dumps before they are stopped. In
torch 2.13, the first dump takes a second of CPU time, which doesn't count as activity."""
MAX_OUTPUT = 1 << 17
"""Maximum bytes of one OUTPUT payload, small enough that a control frame never waits long behind it.

A worker's pipe has the same capacity.
"""
MAX_REPORT = 1 << 20
"""Maximum bytes of one CONTROL payload from a node. A hostile agent must not fill the controller's memory."""
MAX_COMMAND = 1 << 26
"""Maximum bytes of one CONTROL payload to a node, which may contain the environments of many workers."""


class ProtocolError(Exception):
    """The peer violated the protocol. The link can't be used any further."""


class Frame(Frozen):
    """A frame: the fields of its header, and its payload."""

    kind: int
    node: int
    attempt: int
    channel: int
    payload: bytes

    def message(self) -> Message:
        """Return the JSON object of a CONTROL, PACKED or END frame. Raises `ProtocolError` if invalid."""
        try:
            text = zlib.decompress(self.payload) if self.kind == PACKED else self.payload
            message = json.loads(text.decode(), parse_constant=_refuse)
        except (ValueError, RecursionError, zlib.error) as error:
            raise ProtocolError("a control frame is not JSON: %s" % error) from None
        if not isinstance(message, dict) or not isinstance(message.get("op"), str):
            raise ProtocolError("a control frame is not an object with an op")
        return message


def _refuse(constant: str) -> None:
    raise ValueError("%s is not JSON" % constant)


def encode(node: int, attempt: int, channel: int, payload: bytes | memoryview, kind: int = OUTPUT) -> bytes:
    """Encode a frame. Unless the frame is a message, `payload` is at most MAX_OUTPUT bytes."""
    return HEADER.pack(kind, node, attempt % ATTEMPTS, channel, len(payload)) + payload


def encode_message(node: int, message: Message, kind: int = CONTROL) -> bytes:
    """Encode a CONTROL or END frame."""
    return encode(node, 0, 0, _json(message), kind)


def encode_command(node: int, message: Message) -> bytes:
    """Encode a frame from the controller: CONTROL, or PACKED if it is long."""
    payload = _json(message)
    if len(payload) <= PACK_BYTES:
        return encode(node, 0, 0, payload, CONTROL)
    return encode(node, 0, 0, zlib.compress(payload, 1), PACKED)


def _json(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()  # ASCII


REPORTS = {CONTROL: MAX_REPORT, END: MAX_REPORT, **dict.fromkeys((OUTPUT, FLIGHT, FILE), MAX_OUTPUT)}
COMMANDS = {CONTROL: MAX_COMMAND, PACKED: MAX_COMMAND, TREE: MAX_OUTPUT}
"""Kinds of frames that an agent sends (REPORTS) or receives (COMMANDS), with their maximum payload bytes."""


class FrameDecoder:
    """A decoder that turns received bytes into frames of the kinds in `caps`, without I/O.

    It buffers at most one frame and one read.
    """

    def __init__(self, caps: Mapping[int, int]) -> None:
        self._caps = caps
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that `data` completes. Raises `ProtocolError`."""
        self._buffer += data
        frames = []
        start = 0
        while len(self._buffer) - start >= HEADER.size:
            kind, node, attempt, channel, length = HEADER.unpack_from(self._buffer, start)
            if kind not in self._caps:
                raise ProtocolError("unknown frame kind %d" % kind)
            if length > self._caps[kind]:
                raise ProtocolError("a frame of %d bytes is over the limit" % length)
            end = start + HEADER.size + length
            if len(self._buffer) < end:
                break
            with memoryview(self._buffer) as view:
                payload = bytes(view[start + HEADER.size : end])  # slicing a bytearray copies twice
            frames.append(Frame(kind, node, attempt, channel, payload))
            start = end
        del self._buffer[:start]
        return frames


def as_lines(frame: bytes) -> bytes:
    """Encode a frame as lines."""
    plain = frame.replace(ESCAPE, b"\x1b[").replace(b"\n", b"\x1bn")
    return b"".join([b"=%b\n" % plain[at : at + LINE] for at in range(0, len(plain), LINE)])


def from_lines(pieces: bytes) -> tuple[bytes, bytes]:
    """Decode the joined pieces of lines. Also return the rest, which belongs to the next piece."""
    whole, rest = (pieces[:-1], pieces[-1:]) if pieces.endswith(ESCAPE) else (pieces, b"")
    return whole.replace(b"\x1bn", b"\n").replace(b"\x1b[", ESCAPE), rest


def say_last(fd: int, left: bytes) -> None:
    """Write the last line of a node. The guardian calls this. Gives up after LAST_WORD_S seconds."""
    writable = select.poll()
    writable.register(fd, select.POLLOUT)
    while left and writable.poll(LAST_WORD_S * 1000):
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:
            pass
        except OSError:
            return
