"""The first bytes of a link: the constant command that starts an agent, its input, and its output.

Every node receives the same command, so no value of a job is ever quoted for a remote shell:

1. sh prints READY_MARKER. Before that, the controller sends only an empty line (NUDGE) every few seconds. An
   rc file that reads stdin thus consumes nothing else, and its `read` doesn't wait forever.
2. The controller sends candidate interpreters, one per line, then an empty line. sh skips empty lines before
   the first candidate. Alternatively, the controller sends a line that replaces sh with another sh in a
   container, and that sh begins with step 1.
3. sh execs the first interpreter that exists (~/ stands for the user's home directory). The interpreter reads
   blocks, each preceded by its length as eight digits: a loader, then modules.
4. The agent writes HELLO_PREFIX and the nonce (see `distlaunch.agent.wire`). After that, both sides send
   frames.

`Streams` is the controller's side of this protocol, and handles all output of a node. It does no I/O.
"""

import zlib
from collections.abc import Mapping, Sequence

from distlaunch.agent import wire
from distlaunch.agent.frozen import Frozen
from distlaunch.transports.failure import NO_PYTHON, TOO_OLD, LinkFailure, ProcessEnd

PULLING = "distlaunch-pulling"
"""Line that the node prints if an image must be pulled first."""
ENTER = ">"
"""Start of a line that execs another shell in a container. That shell begins again with step 1."""
NUDGE = b"\n"
"""Line that the controller sends every few seconds until it receives the marker."""

# Contains no single quote, `!` or newline, since the script is single-quoted in sh, csh and fish.
# The marker is printed in two halves so that a shell that echoes the command can't fake it.
# The alarm, which the loader cancels, ends the process if the connection is lost meanwhile.
_PYTHON = (
    "import signal,sys,zlib;signal.alarm(120);v=sys.version_info;"
    "v<(3,8) and sys.exit(sys.argv[1]+chr(32)+sys.version);"
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
import marshal, os, signal, zlib
from _frozen_importlib_external import MAGIC_NUMBER
def block(): return r(int(r(8)))
magic, code, source = block(), block(), block()
same = magic == MAGIC_NUMBER
codes = marshal.loads(zlib.decompress(code)) if same else eval(zlib.decompress(source))
exec(marshal.loads(codes[SHIPPED]) if same else codes[SHIPPED])
install(codes, PACKAGES)
os.environb.update(HIDDEN)
signal.alarm(0)
from distlaunch.agent.guardian import main
main(NONCE, PLACE)
"""
SHIPPED = "distlaunch.agent.shipped"
"""The agent's module that imports all others."""
PACKAGES = ["distlaunch", "distlaunch.agent"]
"""The packages among the modules sent to the agent."""


class Bundle(Frozen):
    """The agent's modules, ready to be sent.

    `code` is for interpreters with the same `magic` (the number of the .pyc format). It saves them 20 ms of
    compilation. `source` is for all others. Both are compressed. `code` is a marshaled map of marshaled code,
    keyed by module name. `source` is the repr of a map of sources, keyed by module name.
    """

    magic: bytes
    code: bytes
    source: bytes


def boot_text(
    bundle: Bundle,
    nonce: str,
    place: "int | tuple[str, Mapping[str, int]]",
    hidden: Sequence[tuple[bytes, bytes]] = (),
) -> bytes:
    """Return the input of step 3: a loader, then the modules in both forms. `place` goes to the guardian.

    `hidden` contains the variables that step 1 may have lost.
    """
    given = (nonce, place, hidden)
    names = f"PACKAGES, SHIPPED = {PACKAGES!r}, {SHIPPED!r}\nNONCE, PLACE, HIDDEN = {given!r}\n"
    loader = zlib.compress((names + _LOADER).encode(), 1)
    blocks = (loader, bundle.magic, bundle.code, bundle.source)
    return b"".join(b"%08d" % len(block) + block for block in blocks)


def candidates_text(interpreters: Sequence[str]) -> bytes:
    """Return the input of step 2."""
    return "".join(f"{name}\n" for name in interpreters).encode() + b"\n"


MAX_NOISE = 1 << 16
"""Maximum bytes that a login shell may print before the marker, and again before the hello."""


MAX_NOISE_SHOWN = 1024
MAX_WORDS = 8192
"""Bytes kept from the end of a transport's stderr."""


class NodeGone(Frozen):
    """The end of one of several nodes on a link. The others continue."""

    node: int
    failure: LinkFailure


class Streams:
    """The output of a transport process that serves one node, and the controller's side of the handshake.

    Each of `openings` is sent once, after a marker. All but the last exec another shell, which prints another
    marker. The hello must contain this `nonce`. `distlaunch.transports.slurm` has a subclass for processes
    that serve several nodes.
    """

    def __init__(self, openings: Sequence[bytes], nonce: str) -> None:
        # The expected markers, each with the bytes to send once it arrives; empty after the hello
        self._awaited = [(wire.READY_MARKER, then) for then in openings]
        self._awaited.append((wire.HELLO_PREFIX + nonce.encode() + b"\n", b""))
        self.noise = b""
        """Unexpected output since the last marker."""
        self.words = b""
        """The last bytes received on stderr."""
        self._decoder = wire.FrameDecoder(wire.REPORTS)

    @property
    def booted(self) -> bool:
        """Return whether every agent has sent its hello."""
        return not self._awaited

    @property
    def opened(self) -> bool:
        """Return whether all openings have been sent. Any later input is for the interpreter."""
        return not any(then for _, then in self._awaited)

    @property
    def pulling(self) -> bool:
        """Return whether an image is being pulled."""
        return f"{PULLING}\n".encode() in self.noise

    def without_marker(self) -> bytes:
        """Return the first opening, to be sent before its marker arrives. The marker is still expected.

        A link calls this for a direct transport.
        """
        marker, then = self._awaited[0]
        self._awaited[0] = marker, b""
        return then

    def receive(self, data: bytes) -> tuple[bytes, Sequence[wire.Frame | NodeGone]]:
        """Process stdout data. Return the bytes to send and the frames. Raises `wire.ProtocolError`."""
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

    def listen(self, data: bytes) -> list[NodeGone]:
        """Store stderr data. A subclass for several nodes returns those that the data reports as ended."""
        self.words = (self.words + data)[-MAX_WORDS:]
        return []

    def nudges(self) -> bytes:
        """Return a line for a shell that has not printed its marker, in case its rc file waits for input.

        Once the opening has been sent, return nothing, since the agent would read the line.
        """
        return b"" if self.opened else NUDGE

    def end(self, status: int | None, timed_out: bool = False, protocol_error: str = "") -> ProcessEnd:
        """Return the end of the process with the output received so far."""
        shown = self.noise[-MAX_NOISE_SHOWN:].decode(errors="replace")
        words = self.words.decode(errors="replace")
        return ProcessEnd(words, self.booted, status, shown, timed_out, protocol_error)
