"""A stand-in for srun whose tasks are agents without processes: all nodes of a step in this one.

Each agent says hello, holds ports and finds routes; its workers start, join and end as the variable WIDE
says: `end` = with status 0; `fail RANK` = that one with 7 once somebody opens the pipe WIDE_GATE, the others
when they are told to; `print LINES` = after that many lines each.
"""

import ast
import os
import re
import select
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator

from distlaunch.agent import messages, wire


class Step:
    """The agents of this step, by their nodes' indices."""

    def __init__(self) -> None:
        self._out = sys.stdout.buffer
        self._labels: dict[int, int] = {}
        self._labelled = "--label" in sys.argv
        self._how, *rest = os.environ.get("WIDE", "end").split()
        self._number = int(rest[0]) if rest else 0
        self._started: dict[int, messages.StartWorkers] = {}
        self._fails: tuple[int, int] | None = None

    def open(self) -> None:
        """Say hello for all once the whole opening has come: lines, an empty one, and four blocks."""
        while _exactly(1) != b"\n" or _exactly(1) != b"\n":
            pass
        opening, *_ = [_exactly(int(_exactly(8))) for _ in range(4)]
        told = re.search(rb"NONCE, PLACE, HIDDEN = (.*)\n", zlib.decompress(opening))
        assert told is not None
        nonce, place, _ = ast.literal_eval(told[1].decode())
        indices = {"": place} if isinstance(place, int) else place[1]
        for label, index in enumerate(indices.values()):
            self._labels[index] = label
            self._line(label, wire.READY_MARKER.rstrip(b"\n"))
            self._line(label, wire.HELLO_PREFIX + nonce.encode())
            hello = messages.Hello(index, wire.PROTOCOL, "/usr/bin/python3", 0, f"n{index}", 1.0, None, None)
            self._tell(index, hello)
        self._out.flush()

    def obey(self, frames: Iterable[wire.Frame]) -> bool:
        """Do what agents do on commands; whether all have left."""
        for frame in frames:
            self._obey(frame)
        self._out.flush()
        return not self._labels

    def _obey(self, frame: wire.Frame) -> None:
        node = frame.node
        match messages.read(messages.COMMAND_TYPES, frame.message()):
            case messages.Ping():
                self._tell(node, messages.Pong(node, 1.0))
            case messages.HoldPort():
                self._tell(node, messages.PortHeld(node, 29500))
            case messages.FindRoute() as find:
                route = (find.address, find.address, "eth0", "10.0.0.1", (("eth0", True),))
                self._tell(node, messages.RouteFound(node, *route))
            case messages.StartWorkers() as start:
                self._start(node, start)
            case messages.StopWorkers() | messages.Close() as end:
                self._stop(node, leave=isinstance(end, messages.Close))

    def _start(self, node: int, start: messages.StartWorkers) -> None:
        self._started[node] = start
        ranks = [spec.local_rank for spec in start.workers]
        for rank in ranks:
            self._tell(node, messages.WorkerStarted(node, rank, 100 + rank, None))
        self._tell(node, messages.RanksJoined(node, tuple(ranks)))
        first = int(start.workers[0].env["RANK"])
        for rank in ranks:
            for number in range(self._number if self._how == "print" else 0):
                text = b"step %d: loss 0.%03d\n" % (number, number % 1000)
                self._send(node, wire.encode(node, start.attempt, 2 * rank, text))
            if self._how in ("end", "print"):
                self._exit(node, rank, 0)
            elif self._how == "fail" and first + rank == self._number:
                self._fails = node, rank

    def fail(self) -> None:
        """Have the rank that is to fail do so, if it is one of these."""
        if self._fails:
            self._exit(*self._fails, 7)
            self._out.flush()

    def _stop(self, node: int, leave: bool) -> None:
        start = self._started.pop(node, None)
        for spec in start.workers if start and self._how == "fail" else ():
            if int(spec.env["RANK"]) != self._number:
                self._exit(node, spec.local_rank, -15)
        self._tell(node, messages.Swept(node, start.attempt if start else 0, 0))
        if leave:
            self._tell(node, messages.AllSent(node))
            if self._labelled:
                self._line(self._labels[node], b"!0")
            self._labels.pop(node)

    def _exit(self, node: int, rank: int, status: int) -> None:
        words = "Traceback: boom\n" if status > 0 else ""
        self._tell(node, messages.WorkerExited(node, rank, status, time.monotonic(), words=words))

    def _tell(self, node: int, report: tuple[object, ...]) -> None:
        self._send(node, wire.encode_message(node, messages.as_object(report)))

    def _send(self, node: int, frame: bytes) -> None:
        if not self._labelled:
            self._out.write(frame)
            return
        for line in wire.as_lines(frame).split(b"\n")[:-1]:
            self._line(self._labels[node], line)

    def _line(self, label: int, line: bytes) -> None:
        self._out.write(b"%d: %b\n" % (label, line) if self._labelled else line + b"\n")


def _exactly(size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (read := os.read(0, size - len(data))):
            sys.exit("the opening ended early")
        data += read
    return data


def _reads(fail: Callable[[], None]) -> Iterator[bytes]:
    """What comes on stdin; in between, once the gate is opened, `fail` is called."""
    path = os.environ.get("WIDE_GATE")
    gate = [os.open(path, os.O_RDONLY | os.O_NONBLOCK)] if path else []
    while True:
        ready, _, _ = select.select([0, *gate], [], [])
        if gate and gate[0] in ready:
            gate.clear()
            fail()
        if 0 not in ready:
            continue
        if not (data := os.read(0, 1 << 20)):
            return
        yield data


def main() -> None:
    """Serve until all have left."""
    step, decoder = Step(), wire.FrameDecoder(wire.COMMANDS)
    step.open()
    for data in _reads(step.fail):
        if step.obey(decoder.feed(data)):
            return


if __name__ == "__main__":
    main()
