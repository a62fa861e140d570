"""The constant command that starts an agent, and the text it then receives.

The same command goes to every node, so no value of a job is ever quoted for a remote shell:

1. sh prints READY_MARKER. Nothing of ours is sent before it is seen, so an rc file that reads stdin gets
   none of it: only, now and then, an empty line (NUDGE), so that its `read` does not wait forever.
2. The controller sends candidate interpreters, one per line, then an empty line; earlier ones are skipped. Or
   it sends a line by which sh becomes one in a container, which begins with step 1.
3. sh becomes the first that exists (~/ is its user's home), which reads blocks of eight digits and as many
   bytes: a loader, modules.
4. The agent writes HELLO_PREFIX and the nonce (see `distlaunch.agent.wire`).
"""

import zlib
from collections.abc import Mapping, Sequence

from distlaunch.agent.frozen import Frozen

TOO_OLD = "distlaunch-agent"
"""Followed by the version on stderr when the interpreter is older than 3.8; also the name in ps."""
NO_PYTHON = "distlaunch: no python"
NO_IMAGE = "distlaunch: no image"
NO_RUNTIME = "distlaunch: no container runtime"
PULLING = "distlaunch-pulling"
"""Printed, as a line, where an image has to be fetched first."""
ENTER = ">"
"""Before a line of shell that becomes another shell, in a container, which begins again with step 1."""
NUDGE = b"\n"
"""Sent every few seconds until the marker is seen."""

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
LOCAL = ("/bin/sh", "-c", SCRIPT)
"""Starts an agent on this machine."""

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
"""The module that imports all others."""


class Bundle(Frozen):
    """The agent's modules, ready to be sent.

    `code` is for interpreters with the same `magic` (the .pyc format's number), which spares them the
    compiling (20 ms); `source` is for all others. Each is a compressed mapping by the names of modules: to
    the marshalled code of each, and marshalled itself; or the repr of one to the source of each.
    """

    magic: bytes
    code: bytes
    source: bytes
    packages: frozenset[str]


def boot_text(bundle: Bundle, nonce: str, place: "int | tuple[str, Mapping[str, int]]") -> bytes:
    """What step 3 sends: a loader, then the modules in both forms; `place` as the guardian has it."""
    names = f"PACKAGES, SHIPPED = {set(bundle.packages)!r}, {SHIPPED!r}\nNONCE, PLACE = {(nonce, place)!r}\n"
    loader = zlib.compress((names + _LOADER).encode(), 1)
    blocks = (loader, bundle.magic, bundle.code, bundle.source)
    return b"".join(b"%08d" % len(block) + block for block in blocks)


def candidates_text(interpreters: Sequence[str]) -> bytes:
    """What step 2 sends."""
    return "".join(f"{name}\n" for name in interpreters).encode() + b"\n"
