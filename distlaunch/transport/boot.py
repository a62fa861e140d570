"""The constant command that starts an agent, and the text it then receives.

The same command goes to every node, so no value of a job is ever quoted for a remote shell:

1. sh prints READY_MARKER. Nothing is sent before it is seen, so an rc file that reads stdin gets nothing.
2. The controller sends candidate interpreters, one per line, then an empty line.
3. sh becomes the first that exists; that reads eight digits and as many bytes of compressed source.
4. The agent writes HELLO_PREFIX and the nonce (see `distlaunch.agent.wire`).
"""

import zlib
from collections.abc import Sequence
from typing import NamedTuple

TOO_OLD = "distlaunch-agent"
"""Followed by the version on stderr when the interpreter is older than 3.8; also the name in ps."""
NO_PYTHON = "distlaunch: no python"

# No single quote, `!` or newline: the script must survive single quotes in sh, csh and fish.
# The marker is printed in two halves so that a shell that echoes the command can't fake it.
_PYTHON = (
    "import sys,zlib;v=sys.version_info;v<(3,8) and sys.exit(sys.argv[1]+sys.version);"
    "r=sys.stdin.buffer.read;exec(zlib.decompress(r(int(r(8)))))"
)
SCRIPT = (
    'printf "distlaunch%s\\n" -ready-1; x=; '
    'while IFS= read -r p && [ -n "$p" ]; do '
    '[ -z "$x" ] && command -v "$p" >/dev/null 2>&1 && x=$p; done; '
    f'[ -n "$x" ] || {{ echo "{NO_PYTHON}" >&2; exit 127; }}; '
    f'exec "$x" -I -S -c "{_PYTHON}" {TOO_OLD}'
)

_LOADER = """
def load(name, forms):
    import marshal, sys
    module = type(sys)(name)
    module.__path__ = []
    parent, _, child = name.rpartition('.')
    if parent:
        module.__package__ = parent
        setattr(sys.modules[parent], child, module)
    sys.modules[name] = module
    import _imp, _frozen_importlib_external as external
    magic = external.MAGIC_NUMBER
    code = marshal.loads(forms[magic]) if magic in forms else compile(forms['source'], name, 'exec')
    exec(code, module.__dict__)
"""


class AgentModule(NamedTuple):
    """One module of the agent: its dotted name, source text, and marshalled code with its magic number."""

    name: str
    source: str
    magic: bytes
    code: bytes


def boot_text(modules: Sequence[AgentModule], nonce: str, node: int, run_id: str) -> bytes:
    """What step 3 sends: `modules` in import order, then the call that never returns."""
    forms: list[tuple[str, dict[object, object]]] = [("distlaunch", {"source": ""})]
    forms += [(module.name, {"source": module.source, module.magic: module.code}) for module in modules]
    calls = "".join(f"load({name!r}, {form!r})\n" for name, form in forms)
    main = f"sys.modules['distlaunch.agent.guardian'].main({nonce!r}, {node}, {run_id!r})\n"
    packed = zlib.compress((_LOADER + calls + "import sys\n" + main).encode(), 1)
    return b"%08d" % len(packed) + packed


def candidates_text(interpreters: Sequence[str]) -> bytes:
    """What step 2 sends."""
    return "".join(f"{name}\n" for name in interpreters).encode() + b"\n"
