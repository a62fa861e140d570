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


_SPEAKING = """
import os
from distlaunch.agent import serve, wire
encode, run = wire.encode_message, serve.Agent.run
def run_and_wait(agent):
    begin = os.open({begin!r}, os.O_RDONLY | os.O_NONBLOCK)
    def speak():
        agent._poller.forget(begin)
        agent._outbox.report({{"op": "ours"}})
    agent._poller.watch(begin, speak)
    return run(agent)
serve.Agent.run = run_and_wait
wire.encode_message = lambda node, message: {words} if message["op"] == "ours" else encode(node, message)
"""


def python_that_says(path: Path, words: str, begin: Path) -> str:
    """An interpreter whose agent says `words`, a Python expression of bytes, once `begin` is opened."""
    return python_with(path, _SPEAKING.format(words=words, begin=str(begin)))
