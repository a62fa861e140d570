"""The first bytes of a link: the constant command that starts an agent, its input, and its answers.

The same command goes to every node, so no value of a job is ever quoted for a remote shell:

1. sh prints READY_MARKER. Nothing is sent before that, so an rc file that reads stdin gets none of it, except
   for an empty line (NUDGE) every few seconds, in case its `read` would wait forever.
2. The controller sends candidate interpreters, one per line, then an empty line; earlier ones are skipped. Or
   it sends a line that replaces sh by one in a container, which begins with step 1.
3. sh execs the first interpreter that exists (~/ is the home of its user), which reads blocks of eight digits
   and as many bytes: a loader, modules.
4. The agent writes HELLO_PREFIX and the nonce (see `distlaunch.agent.wire`). From there on both send frames.

A `Handshake` is the controller's side of this. `Streams` holds all output of a node. Neither does I/O.
"""

import zlib
from collections.abc import Mapping, Sequence

from distlaunch.agent import wire
from distlaunch.agent.frozen import Frozen
from distlaunch.transports.failure import NO_PYTHON, TOO_OLD, LinkFailure, ProcessEnd

PULLING = "distlaunch-pulling"
"""Line that is printed if an image has to be fetched first."""
ENTER = ">"
"""Start of a line that execs another shell, in a container, which begins again with step 1."""
NUDGE = b"\n"
"""Sent every few seconds until the marker is received."""

# No single quote, `!` or newline: the script must survive single quotes in sh, csh and fish.
# The marker is printed in two halves so that a shell that echoes the command can't fake it.
_PYTHON = (
    "import sys,zlib;v=sys.version_info;v<(3,8) and sys.exit(sys.argv[1]+chr(32)+sys.version);"
    "r=sys.stdin.buffer.read;exec(zlib.decompress(r(int(r(8)))))"
)
SCRIPT = (
    'printf "distlaunch%s\\n" -ready-1; x=; t=; '
    "while IFS= read -r p; do "
    '[ -n "$p" ] || { [ -z "$t" ] && continue || break; }; '
    f'case "$p" in "{ENTER}"*) eval "${{p#?}}"; exit;; "~/"*) p="$HOME${{p#?}}";; esac; t="$t $p"; '
    '[ -z "$x" ] && command -v "$p" >/dev/null 2>&1 && x=$p; done; '
    f'[ -n "$x" ] || {{ echo "{NO_PYTHON}:$t" >&2; exit 127; }}; '
    f'exec "$x" -I -S -c "{_PYTHON}" {TOO_OLD}'
)

_LOADER = """
import marshal, zlib
from _frozen_importlib_external import MAGIC_NUMBER
def block(): return r(int(r(8)))
magic, code, source = block(), block(), block()
same = magic == MAGIC_NUMBER
codes = marshal.loads(zlib.decompress(code)) if same else eval(zlib.decompress(source))
exec(marshal.loads(codes[SHIPPED]) if same else codes[SHIPPED])
install(codes, PACKAGES)
from distlaunch.agent.guardian import main
main(NONCE, PLACE)
"""
SHIPPED = "distlaunch.agent.shipped"
"""The agent's module that imports all others."""
PACKAGES = ["distlaunch", "distlaunch.agent"]
"""The packages among the agent's modules."""


class Bundle(Frozen):
    """The agent's modules, ready to be sent.

    `code` is for interpreters with the same `magic` (the number of the .pyc format) and saves them 20 ms of
    compilation; `source` is for all others. Both are compressed. `code` is a marshalled mapping of module
    names to marshalled code, and `source` the repr of a mapping of module names to sources.
    """

    magic: bytes
    code: bytes
    source: bytes


def boot_text(bundle: Bundle, nonce: str, place: "int | tuple[str, Mapping[str, int]]") -> bytes:
    """Return the input of step 3: a loader, then the modules in both forms; `place` as in the guardian."""
    names = f"PACKAGES, SHIPPED = {PACKAGES!r}, {SHIPPED!r}\nNONCE, PLACE = {(nonce, place)!r}\n"
    loader = zlib.compress((names + _LOADER).encode(), 1)
    blocks = (loader, bundle.magic, bundle.code, bundle.source)
    return b"".join(b"%08d" % len(block) + block for block in blocks)


def candidates_text(interpreters: Sequence[str]) -> bytes:
    """Return the input of step 2."""
    return "".join(f"{name}\n" for name in interpreters).encode() + b"\n"


MAX_NOISE = 1 << 16
"""Bytes that a login shell may print before the marker, and again before the hello."""


class Handshake:
    """The controller's side of the handshake with one node: turns received bytes into input and frames.

    Each of `openings` is sent once, after a marker. All but the last exec another shell, with a marker of its
    own. The hello must have this `nonce`.
    """

    def __init__(self, openings: Sequence[bytes], nonce: str) -> None:
        self._awaited = [(wire.READY_MARKER, then) for then in openings]
        self._awaited.append((wire.HELLO_PREFIX + nonce.encode() + b"\n", b""))
        self.noise = b""
        """Unexpected output since the last expected word."""
        self._decoder = wire.FrameDecoder(wire.REPORTS)

    @property
    def booted(self) -> bool:
        """Whether the agent has sent its hello."""
        return not self._awaited

    @property
    def opened(self) -> bool:
        """Whether all openings have been sent; further input is for the interpreter."""
        return not any(then for _, then in self._awaited)

    def without_marker(self) -> bytes:
        """Return the first opening to send without waiting for its marker, which is still expected."""
        marker, then = self._awaited[0]
        self._awaited[0] = marker, b""
        return then

    def feed(self, data: bytes) -> tuple[bytes, list[wire.Frame]]:
        """Take received bytes; return (bytes to send, frames). Raises `wire.ProtocolError`."""
        to_send = b""
        while self._awaited:
            self.noise += data
            word, then = self._awaited[0]
            before, found, data = self.noise.partition(word)
            if len(before) > MAX_NOISE:
                raise wire.ProtocolError(f"more than {MAX_NOISE} bytes of output before the agent started")
            if not found:
                return to_send, []
            self.noise = b""
            to_send += then
            self._awaited.pop(0)
        return to_send, self._decoder.feed(data)


MAX_NOISE_SHOWN = 1024
MAX_WORDS = 8192
"""Bytes of the stderr of a transport that are kept, from its end."""


class NodeGone(Frozen):
    """One of several nodes on a link has ended, and the others go on."""

    node: int
    failure: LinkFailure


class Streams:
    """The output of the process of a transport, here for one node.

    For a process that serves several nodes, see `distlaunch.transports.slurm`.
    """

    def __init__(self, *handshakes: Handshake) -> None:
        self.handshakes = handshakes
        self.words = b""
        """The last bytes received on stderr."""

    @property
    def booted(self) -> bool:
        """Whether every agent has sent its hello."""
        return all(handshake.booted for handshake in self.handshakes)

    @property
    def opened(self) -> bool:
        """Whether all openings have been sent to every node."""
        return all(handshake.opened for handshake in self.handshakes)

    @property
    def pulling(self) -> bool:
        """Whether an image is being fetched."""
        return any(f"{PULLING}\n".encode() in handshake.noise for handshake in self.handshakes)

    def without_marker(self) -> bytes:
        """Return the opening to send without waiting for a marker."""
        return self.handshakes[0].without_marker()

    def receive(self, data: bytes) -> tuple[bytes, Sequence[wire.Frame | NodeGone]]:
        """Take data of stdout; return the bytes to send and the frames. Raises `wire.ProtocolError`."""
        return self.handshakes[0].feed(data)

    def listen(self, data: bytes) -> list[NodeGone]:
        """Keep data of stderr."""
        self.words = (self.words + data)[-MAX_WORDS:]
        return []

    def nudges(self) -> bytes:
        """Return a line for a shell that has not answered, in case its rc file waits for one.

        After the opening, a line would be input for the agent.
        """
        return b"" if self.opened else NUDGE

    def end(self, status: int | None, timed_out: bool = False, protocol_error: str = "") -> ProcessEnd:
        """Return the end of the process with its output, as far as it is known."""
        noise = b"".join(handshake.noise for handshake in self.handshakes)
        shown = noise[-MAX_NOISE_SHOWN:].decode(errors="replace")
        words = self.words.decode(errors="replace")
        return ProcessEnd(words, self.booted, status, shown, timed_out, protocol_error)
