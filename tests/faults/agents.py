"""Agents that misbehave: the real one, with a patch of ours that it runs before it starts."""

import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

from tests.harness import program

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
    return program(path, _INTERPRETER.format(python=sys.executable, patch=textwrap.dedent(patch)))


NAMELESS = """
from distlaunch.agent import network
network.machine = lambda: ""
"""
"""An agent that doesn't report its host, so that several names may mean the same one."""
_LYING = """
from distlaunch.agent import wire
encode = wire.encode_message
def raw(node, payload, length=None):
    head = encode(node, {{"op": "Pong"}})[: wire.HEADER.size - 4]
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
    lying = _LYING.format(op=lie.op, words=lie.words, lied=str(path.with_name("lied")))
    return python_with(path, NAMELESS + lying)


MUCH = "x" * 900_000
NO_HELLO = "{host}: protocol error"


def changed(op: str, told: str = "", /, **fields: Any) -> Lie:
    """The report `op` with these fields."""
    return Lie(op, f"encode(node, {{**message, **{fields!r}}})", told)


def before(op: str, told: str = "", /, **fields: Any) -> Lie:
    """Another report before `op`, of these fields."""
    return Lie(op, f"encode(node, {fields!r}) + encode(node, message)", told)


STUCK = [{"command": MUCH, "pid": []}]
NO_MESSAGES = "encode(node, {'op': 'Stuck', 'attempt': 0, 'processes': []}) * 20_000"
LEAVING = {"op": "AgentLeaving", "signum": 10**6, "orphaned": False, "damage": ""}
UNSTARTED = {"op": "WorkerUnstarted", "local_rank": 0, "stage": "x", "errno": 1, "text": MUCH}
NOT_RUNNING, OTHERS_FRAME = "which is not running", "a frame for node 0 came on another node's link"
FLOOD = Lie("WorkerStarted", "printed(node, 0, bytes(65536)) * 1500")
LIES = {
    "a long interpreter": changed("Hello", python=MUCH),
    "an interpreter that leads elsewhere": changed("Hello", python="../../x"),
    "a hostname that leads elsewhere": changed("Hello", hostname="../../x"),
    "a lone surrogate": changed("Hello", python="\ud800"),
    "a rank of a million": changed("WorkerStarted", local_rank=10**6),
    "a negative rank": changed("WorkerStarted", "{host} was lost: local_rank is out of range", local_rank=-1),
    "a long list of CPUs": changed("WorkerStarted", cpus=MUCH),
    "an error record of lists": changed("WorkerExited", error_record=[[[]]] * 9),
    "an odd interface": changed("RouteFound", interface=MUCH),
    "a long address": changed("RouteFound", address=MUCH),
    "absent ranks": before("WorkerExited", op="RanksJoined", local_ranks=[10**9, 10**8], torch=MUCH),
    "long names of stuck processes": before("WorkerStarted", op="Stuck", attempt=0, processes=STUCK),
    "a flood of warnings": Lie("WorkerStarted", f"{NO_MESSAGES} + encode(node, message)"),
    "a flood of output": FLOOD,
    "a million GPUs": changed("Hello", NO_HELLO, gpus=10**6),
    "an unknown op": changed("Hello", NO_HELLO, op=MUCH),
    "a deep list": Lie("Hello", "raw(node, b'[' * 1_000_000)", NO_HELLO),
    "no hello": before("Hello", NO_HELLO, op="WorkerExited", local_rank=0, status=1, t=1),
    "another node's frame": Lie("WorkerStarted", "encode(0, message)", OTHERS_FRAME),
    "output of no rank": Lie(
        "WorkerStarted", "printed(node, 65535, b'x')", f"local rank 32767, {NOT_RUNNING}"
    ),
    "a frame of 4 GiB": Lie(
        "WorkerStarted", "raw(node, bytes(1 << 26), 0xFFFFFFFF)", "of 4294967295 bytes is"
    ),
    "a rank with a path": changed("WorkerStarted", "local_rank is not of type int", local_rank="../../x"),
    "a long error record": changed("WorkerExited", "exit status 1", status=1, error_record={"message": MUCH}),
    "a signal of a million": before("WorkerStarted", "agent was stopped by signal 1000000", **LEAVING),
    "a long reason": before("WorkerStarted", "not be started: xxx", **UNSTARTED),
    "a long reason for no route": changed("RouteFound", "xxx", op="RouteFailed", error=MUCH),
}
FLOOD_BEFORE_THE_START = {"a flood of output": FLOOD._replace(told=f"local rank 0, {NOT_RUNNING}")}
"""Where no other node has to be waited for."""
