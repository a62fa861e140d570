"""Agents that misbehave: the real one, with a patch of ours that it runs before it starts."""

import sys
import textwrap
from pathlib import Path

_INTERPRETER = """\
#!{python} -IS
import sys, zlib
r = sys.stdin.buffer.read
loader = zlib.decompress(r(int(r(8)))).decode()
last = "main(NONCE, NODE)"
assert loader.rstrip().endswith(last)
exec(loader.rstrip().removesuffix(last) + {patch!r} + "\\n" + last)
"""


def python_with(path: Path, patch: str) -> str:
    """An interpreter for a job's `python` that runs the agent it is sent with this patch."""
    path.write_text(_INTERPRETER.format(python=sys.executable, patch=textwrap.dedent(patch)))
    path.chmod(0o755)
    return str(path)
