"""Several nodes of a Slurm allocation by one step: srun tells their output apart, line by line."""

import re
from collections.abc import Iterator, Mapping, Sequence

from distlaunch.agent import lines, wire
from distlaunch.agent.frozen import Frozen
from distlaunch.agent.wire import Frame
from distlaunch.ranges import expand_nodelist
from distlaunch.transport.failure import LinkFailure, ProcessEnd
from distlaunch.transport.handshake import Handshake
from distlaunch.transport.slurm import Slurm
from distlaunch.transport.streams import MAX_WORDS, NodeGone

NODE_VARIABLE = "SLURMD_NODENAME"
"""What tells a task which node it is on; the host's name may be another."""
_TASK_END = re.compile(r"srun: error: (\S+): tasks? [\d,-]+: (?:Exited with exit code (\d+)|.+)")
_LABEL = re.compile(rb" *(\d+): ?")


class SlurmGroup(Frozen):
    """What a link needs of a transport, for the nodes `hosts`, in the order of the allocation."""

    hosts: tuple[str, ...]
    first: Slurm

    @property
    def direct(self) -> bool:
        """As for one node."""
        return self.first.direct

    @property
    def patience_s(self) -> float:
        """As for one node."""
        return self.first.patience_s

    def argv(self) -> list[str]:
        """srun, with a task on each node; one that fails leaves the others alone."""
        count = len(self.hosts)
        more = ["--label", "--no-kill", "--distribution=block", "--ntasks-per-node=1"]
        return self.first.step_argv(self.hosts, [f"--nodes={count}", f"--ntasks={count}", *more])

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """As for one node."""
        return self.first.environment(environ)

    def failure(self, end: ProcessEnd) -> LinkFailure:
        """As for one node."""
        return self.first.failure(end)


class LabelledStreams:
    """As `distlaunch.transport.streams` has it, of the nodes `indices`, in the order of srun's labels."""

    def __init__(self, opening: bytes, nonce: str, group: SlurmGroup, indices: Sequence[int]) -> None:
        self._opening, self._group = opening, group
        self._indices = dict(zip(group.hosts, indices, strict=True))
        self._nodes = [_Node(index, nonce) for index in indices]
        self._open: set[int] = set(indices)
        self._half = {1: b"", 2: b""}
        self.words = b""

    @property
    def booted(self) -> bool:
        """Whether every agent has said hello."""
        return all(node.handshake.booted for node in self._nodes)

    @property
    def reached(self) -> bool:
        """Whether every node's shell has answered."""
        return all(node.handshake.reached for node in self._nodes)

    @property
    def opened(self) -> bool:
        """Whether that was sent."""
        return not self._opening

    @property
    def pulling(self) -> bool:
        """Never: each node with a container has a step of its own."""
        return False

    @property
    def noise(self) -> bytes:
        """None: no shell that prints is in between."""
        return b""

    def without_marker(self) -> bytes:
        """The opening, for all."""
        opening, self._opening = self._opening, b""
        return opening

    def receive(self, data: bytes) -> tuple[bytes, list[Frame | NodeGone]]:
        """Take what came on stdout. Raises `wire.ProtocolError`."""
        found: list[Frame | NodeGone] = []
        for label, line in self._lines(1, data):
            if label is None or label >= len(self._nodes):
                raise wire.ProtocolError("a line without srun's label")
            node = self._nodes[label]
            if line.startswith(lines.GONE) and node.handshake.booted:
                node.hear(b"task %d: Exited with exit code %b" % (label, line[1:]))  # as srun has it
                found += self._gone(node, int(line[1:]) if line[1:].isdigit() else None)
            else:
                found += node.feed(line)
        return b"", found

    def listen(self, data: bytes) -> list[NodeGone]:
        """Take what came on stderr: srun's own words, or labelled ones of a node."""
        found = []
        for label, line in self._lines(2, data):
            if label is not None and label < len(self._nodes):
                self._nodes[label].hear(line)
                continue
            self.words = (self.words + line + b"\n")[-MAX_WORDS:]
            if end := _TASK_END.match(line.decode(errors="replace")):
                found += self._ended(line, *end.groups())
        return found

    def _lines(self, stream: int, data: bytes) -> Iterator[tuple[int | None, bytes]]:
        *whole, self._half[stream] = (self._half[stream] + data).split(b"\n")
        for line in whole:
            found = _LABEL.match(line)
            yield (int(found[1]), line[found.end() :]) if found else (None, line)

    def _ended(self, words: bytes, hosts: str, status: str | None) -> list[NodeGone]:
        """What srun says of tasks that did not end well."""
        indices = {self._indices.get(host) for host in expand_nodelist(hosts)}
        of = [node for node in self._nodes if node.index in indices]
        for node in of:
            node.hear(words)
        return [gone for node in of for gone in self._gone(node, int(status) if status else None)]

    def _gone(self, node: "_Node", status: int | None) -> list[NodeGone]:
        """Once for each."""
        if node.index not in self._open:
            return []
        self._open.discard(node.index)
        end = ProcessEnd(node.words.decode(errors="replace"), node.handshake.booted, status)
        return [NodeGone(node.index, self._group.failure(end))]

    def nudges(self) -> bytes:
        """Nothing: no shell is in between that could wait."""
        return b""


class _Node:
    """One node's part of the streams."""

    def __init__(self, index: int, nonce: str) -> None:
        self.index = index
        self.handshake = Handshake([b""], nonce)
        self.words = self._rest = b""

    def feed(self, line: bytes) -> list[Frame]:
        """The frames that a line completes."""
        if not self.handshake.booted:
            return self.handshake.feed(line + b"\n")[1]
        if not line.startswith(lines.PIECE):
            return []  # the empty line before a last word
        data, self._rest = lines.decode(self._rest + line[1:])
        return self.handshake.feed(data)[1]

    def hear(self, line: bytes) -> None:
        """Keep a line of its stderr."""
        self.words = (self.words + line + b"\n")[-MAX_WORDS:]
