"""Agents that misbehave: the real one, with a patch of ours that it runs before it starts."""

import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

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


_LYING = """
from distlaunch.agent import wire
encode = wire.encode_message
def raw(node, payload, length=None):
    head = encode(node, {{"op": "pong"}})[: wire.HEADER.size - 4]
    return head + (len(payload) if length is None else length).to_bytes(4, "big") + payload
def printed(node, channel, data):
    frame = raw(node, data)
    end = wire.HEADER.size - 4
    return bytes([wire.OUTPUT]) + frame[1 : end - 2] + channel.to_bytes(2, "big") + frame[end:]
def lie(node, message):
    if message["op"] != {op!r}:
        return encode(node, message)
    open({lied!r}, "w").close()
    return {words}
wire.encode_message = lie
"""


class Lie(NamedTuple):
    """What an agent says in place of its report `op`, and what is told of that.

    If nothing is told, the lie does no harm, and the job succeeds; `{host}` in it is the agent's. `words` are
    a Python expression of bytes, which may use `node` and `message`, what would have been said,
    `encode(node, message)`, `raw(node, payload, length)` for a control frame that need not be JSON, and
    `printed(node, channel, data)`.
    """

    op: str
    words: str
    told: str = ""


def python_that_lies(path: Path, lie: Lie) -> str:
    """An interpreter whose agent lies; beside it is then a file `lied`."""
    return python_with(path, _LYING.format(op=lie.op, words=lie.words, lied=str(path.with_name("lied"))))


MUCH = "'x' * 900_000"
NO_HELLO = "{host}: protocol error"
LOST = "{host} was lost: "
LIES = {
    "a long interpreter": Lie("hello", f"encode(node, {{**message, 'python': {MUCH}}})"),
    "an interpreter that leads elsewhere": Lie("hello", "encode(node, {**message, 'python': '../../x'})"),
    "a hostname that leads elsewhere": Lie("hello", "encode(node, {**message, 'hostname': '../../x'})"),
    "a lone surrogate": Lie("hello", "encode(node, {**message, 'python': '\\ud800'})"),
    "a rank of a million": Lie("started", "encode(node, {**message, 'local_rank': 10**6})"),
    "a long list of CPUs": Lie("started", f"encode(node, {{**message, 'cpus': {MUCH}}})"),
    "a negative rank": Lie("started", "encode(node, {**message, 'local_rank': -1})"),
    "an error record of lists": Lie("exited", "encode(node, {**message, 'error_record': [[[]]] * 9})"),
    "an odd interface": Lie("route", f"encode(node, {{**message, 'interface': {MUCH}}})"),
    "long names of stuck processes": Lie(
        "started",
        f"encode(node, {{'op': 'stuck', 'generation': 0, 'processes': [{{'command': {MUCH}, 'pid': []}}]}})",
    ),
    "a flood of warnings": Lie(
        "started",
        "encode(node, {'op': 'stuck', 'generation': 0, 'processes': []}) * 20_000 + encode(node, message)",
    ),
    "a flood of output": Lie("started", "printed(node, 0, bytes(65536)) * 1500"),
    "more ranks than there are": Lie(
        "exited", "encode(node, {'op': 'joined', 'local_ranks': [10**9, -1]}) + encode(node, message)"
    ),
    "a million GPUs": Lie("hello", "encode(node, {**message, 'gpus': 10**6})", NO_HELLO),
    "fewer than no GPUs": Lie("hello", "encode(node, {**message, 'gpus': -5})", NO_HELLO),
    "words for a number": Lie("hello", "encode(node, {**message, 'gpus': '8'})", NO_HELLO),
    "a number of a million digits": Lie(
        "hello", "raw(node, b'{\"op\":\"hello\",\"gpus\":' + b'1' * 1_000_000 + b'}')", NO_HELLO
    ),
    "nothing but the op": Lie("hello", "encode(node, {'op': 'hello'})", NO_HELLO),
    "no op": Lie("hello", "encode(node, {})", NO_HELLO),
    "an unknown op": Lie("hello", f"encode(node, {{'op': {MUCH}}})", NO_HELLO),
    "a deep list": Lie("hello", "raw(node, b'[' * 1_000_000)", NO_HELLO),
    "not a number": Lie("hello", "encode(node, {**message, 't': float('nan')})", NO_HELLO),
    "no hello": Lie(
        "hello", "encode(node, {'op': 'exited', 'local_rank': 0, 'status': 1, 't': 1})", NO_HELLO
    ),
    "another node's frame": Lie(
        "started", "encode(0, message)", f"{LOST}a frame for node 0 came on another node's link"
    ),
    "output of no rank": Lie(
        "started", "printed(node, 65535, b'x')", f"{LOST}output from local rank 32767, which is not running"
    ),
    "a rank that leads elsewhere": Lie(
        "started",
        "encode(node, {**message, 'local_rank': '../../x'})",
        f"{LOST}started: local_rank is not of type int",
    ),
    "CPUs that are no text": Lie(
        "started", "encode(node, {**message, 'cpus': [0, 1]})", f"{LOST}started: cpus is not of type str"
    ),
    "a status of a million": Lie(
        "exited", "encode(node, {**message, 'status': 10**6})", f"{LOST}status is out of range"
    ),
    "a long error record": Lie(
        "exited",
        f"encode(node, {{**message, 'status': 1, 'error_record': {{'message': {MUCH}}}}})",
        "failed first: exit status 1",
    ),
    "a clock of the far future": Lie(
        "exited", "encode(node, {**message, 't': 1e300})", f"{LOST}t is out of range"
    ),
    "a signal of a million": Lie(
        "started",
        "encode(node, {'op': 'leaving', 'signum': 10**6, 'orphaned': False, 'damage': ''})",
        f"{LOST}its agent was stopped by signal 1000000",
    ),
    "a long reason": Lie(
        "started",
        f"encode(node, {{'op': 'unstarted', 'local_rank': 0, 'stage': 'x', 'errno': 1, 'text': {MUCH}}})",
        "could not be started: xxx",
    ),
    "a long reason for no route": Lie(
        "route", f"encode(node, {{'op': 'no route', 'asked': message['asked'], 'error': {MUCH}}})", "xxx"
    ),
    "a frame of 4 GiB": Lie(
        "started",
        "raw(node, bytes(1 << 26), 0xFFFFFFFF)",
        "a frame of 4294967295 bytes is over the limit",
    ),
}
LONG_ADDRESS = Lie("route", f"encode(node, {{**message, 'address': {MUCH}}})")
