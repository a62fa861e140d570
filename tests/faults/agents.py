"""Agents that misbehave: the real one, with a patch of ours that it runs before it starts."""

import sys
import textwrap
from pathlib import Path

_INTERPRETER = """\
#!{python} -IS
import sys, zlib
r = sys.stdin.buffer.read
loader = zlib.decompress(r(int(r(8)))).decode()
last = "main(NONCE, PLACE)"
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
def run_and_wait(agent, *received):
    begin = os.open({begin!r}, os.O_RDONLY | os.O_NONBLOCK)
    def speak():
        agent._poller.forget(begin)
        agent._outbox.post({{"op": "ours"}})
    agent._poller.watch(begin, speak)
    return run(agent, *received)
serve.Agent.run = run_and_wait
def say(node, message):
    HEAD = encode(node, message)[: wire.HEADER.size - 4]
    return {words} if message["op"] == "ours" else encode(node, message)
wire.encode_message = say
"""


def python_that_says(path: Path, words: str, begin: Path) -> str:
    """An interpreter whose agent says `words`, a Python expression of bytes, once `begin` is opened.

    The expression may use HEAD, the header of a control frame without its last part, the length.
    """
    return python_with(path, _SPEAKING.format(words=words, begin=str(begin)))


_LYING = """
from distlaunch.agent import wire
encode = wire.encode_message
def raw(node, payload):
    head = encode(node, {{"op": "pong"}})[: wire.HEADER.size - 4]
    return head + len(payload).to_bytes(4, "big") + payload
def printed(node, channel, data):
    frame = raw(node, data)
    end = wire.HEADER.size - 4
    return bytes([wire.OUTPUT]) + frame[1 : end - 2] + channel.to_bytes(2, "big") + frame[end:]
def lie(node, message):
    return {words} if message["op"] == {op!r} else encode(node, message)
wire.encode_message = lie
"""


def python_that_lies(path: Path, op: str, words: str) -> str:
    """An interpreter whose agent puts `words`, a Python expression of bytes, in place of its reports `op`.

    The expression may use `node` and `message`, what would have been said, `encode(node, message)`,
    `raw(node, payload)` for a control frame that need not be JSON, and `printed(node, channel, data)`.
    """
    return python_with(path, _LYING.format(op=op, words=words))


MUCH = "'x' * 900_000"
LIES = {
    "a million GPUs": ("hello", "encode(node, {**message, 'gpus': 10**6})"),
    "fewer than no GPUs": ("hello", "encode(node, {**message, 'gpus': -5})"),
    "words for a number": ("hello", "encode(node, {**message, 'gpus': '8'})"),
    "a number of a million digits": (
        "hello",
        "raw(node, b'{\"op\":\"hello\",\"gpus\":' + b'1' * 1_000_000 + b'}')",
    ),
    "a long interpreter": ("hello", f"encode(node, {{**message, 'python': {MUCH}}})"),
    "an interpreter that leads elsewhere": ("hello", "encode(node, {**message, 'python': '../../x'})"),
    "a hostname that leads elsewhere": ("hello", "encode(node, {**message, 'hostname': '../../x'})"),
    "a lone surrogate": ("hello", "encode(node, {**message, 'python': '\\ud800'})"),
    "nothing but the op": ("hello", "encode(node, {'op': 'hello'})"),
    "no op": ("hello", "encode(node, {})"),
    "an unknown op": ("hello", f"encode(node, {{'op': {MUCH}}})"),
    "a deep list": ("hello", "raw(node, b'[' * 1_000_000)"),
    "not a number": ("hello", "encode(node, {**message, 't': float('nan')})"),
    "another node's frame": ("started", "encode(0, message)"),
    "output of no rank": ("started", "printed(node, 65535, b'x')"),
    "a rank that leads elsewhere": ("started", "encode(node, {**message, 'local_rank': '../../x'})"),
    "a rank of a million": ("started", "encode(node, {**message, 'local_rank': 10**6})"),
    "CPUs that are no text": ("started", "encode(node, {**message, 'cpus': [0, 1]})"),
    "a long list of CPUs": ("started", f"encode(node, {{**message, 'cpus': {MUCH}}})"),
    "a negative rank": ("started", "encode(node, {**message, 'local_rank': -1})"),
    "no hello": (
        "hello",
        "encode(node, {'op': 'exited', 'local_rank': 0, 'status': 1, 't': 1})",
    ),
    "a status of a million": ("exited", "encode(node, {**message, 'status': 10**6})"),
    "an error record of lists": (
        "exited",
        "encode(node, {**message, 'error_record': [[[]]] * 9})",
    ),
    "a long error record": (
        "exited",
        f"encode(node, {{**message, 'status': 1, 'error_record': {{'message': {MUCH}}}}})",
    ),
    "a clock of the far future": ("exited", "encode(node, {**message, 't': 1e300})"),
    "a signal of a million": (
        "started",
        "encode(node, {'op': 'leaving', 'signum': 10**6, 'orphaned': False, 'damage': ''})",
    ),
    "a long reason": (
        "started",
        f"encode(node, {{'op': 'unstarted', 'local_rank': 0, 'stage': 'x', 'errno': 1, 'text': {MUCH}}})",
    ),
    "a long reason for no route": (
        "route",
        f"encode(node, {{'op': 'no route', 'asked': message['asked'], 'error': {MUCH}}})",
    ),
    "an odd interface": ("route", f"encode(node, {{**message, 'interface': {MUCH}}})"),
    "long names of stuck processes": (
        "started",
        f"encode(node, {{'op': 'stuck', 'generation': 0, 'processes': [{{'command': {MUCH}, 'pid': []}}]}})",
    ),
    "a flood of warnings": (
        "started",
        "encode(node, {'op': 'stuck', 'generation': 0, 'processes': []}) * 20_000 + encode(node, message)",
    ),
    "a flood of output": (
        "started",
        "printed(node, 0, bytes(65536)) * 1500",
    ),
    "more ranks than there are": (
        "joined",
        "encode(node, {**message, 'local_ranks': [10**9, -1]})",
    ),
}
"""What a hostile agent does → the report in place of which it does it, and what it says instead."""
LONG_ADDRESS = ("route", f"encode(node, {{**message, 'address': {MUCH}}})")
REFUSED = {
    **dict.fromkeys(
        (
            *("a million GPUs", "fewer than no GPUs", "words for a number", "a number of a million digits"),
            *("nothing but the op", "no op", "an unknown op", "a deep list", "not a number", "no hello"),
        ),
        "host2: protocol error",
    ),
    "another node's frame": "host2 was lost: a frame for node 0 came on another node's link",
    "output of no rank": "host2 was lost: output from local rank 32767, which is not running",
    "a rank that leads elsewhere": "host2 was lost: started: local_rank is not of type int",
    "CPUs that are no text": "host2 was lost: started: cpus is not of type str",
    "a status of a million": "host2 was lost: status is out of range",
    "a clock of the far future": "host2 was lost: t is out of range",
    "a signal of a million": "host2 was lost: its agent was stopped by signal 1000000",
    "a long reason": "could not be started: xxx",
    "a long error record": "failed first: exit status 1",
    "a long reason for no route": "xxx",
}
"""What is told of those that end the run; the others do no harm, and the job succeeds."""
