"""The streams of several nodes in one srun --label: frames, last output, and srun's own messages."""

import random

import pytest

from distlaunch.agent import wire
from distlaunch.agent.wire import HELLO_PREFIX, READY_MARKER, Frame, encode
from distlaunch.transports.failure import Kind, LinkFailure, ProcessEnd
from distlaunch.transports.handshake import NodeGone
from distlaunch.transports.slurm import LabeledStreams, SlurmStep

HOSTS, INDICES = ("a1", "a2", "b1"), (4, 5, 7)
STEP = SlurmStep("a1", "17")
HELLO = READY_MARKER + HELLO_PREFIX + b"n0nce\n"


def streams() -> LabeledStreams:
    return LabeledStreams(b"opening", "n0nce", dict(zip(HOSTS, INDICES, strict=True)), STEP)


def labeled(label: int, data: bytes) -> bytes:
    return b"".join(b"%d: %b\n" % (label, line) for line in data.removesuffix(b"\n").split(b"\n"))


def booted() -> LabeledStreams:
    made = streams()
    for label in range(3):
        made.receive(labeled(label, HELLO))
    return made


@pytest.mark.parametrize("seed", range(5))
def test_frames_survive_labels_however_they_are_cut(seed: int) -> None:
    chance = random.Random(seed)
    sent: dict[int, list[bytes]] = {index: [] for index in INDICES}
    pieces = []
    for _ in range(30):
        label = chance.randrange(3)
        data = bytes(chance.choice(b"\x1b[n\n=!0: ") for _ in range(chance.choice([0, 1, 5, 959, 3000])))
        sent[INDICES[label]].append(data)
        encoded = wire.as_lines(encode(INDICES[label], 0, 0, data))
        assert max(map(len, encoded.split(b"\n"))) < 1000
        pieces.append(labeled(label, encoded))
    made, whole, got = booted(), b"".join(pieces), dict[int, list[bytes]]()
    while whole:
        size = chance.randrange(1, 2000)
        for frame in made.receive(whole[:size])[1]:
            assert isinstance(frame, Frame)
            got.setdefault(frame.node, []).append(frame.payload)
        whole = whole[size:]
    assert got == {index: data for index, data in sent.items() if data}


def test_the_opening_is_for_all_and_each_says_hello() -> None:
    made = streams()
    assert made.without_marker() == b"opening"
    made.receive(labeled(0, HELLO) + labeled(2, HELLO))
    assert not made.booted
    made.receive(labeled(1, HELLO))
    assert made.booted


def test_an_agents_last_status_ends_its_node_once() -> None:
    made = booted()
    made.receive(b"1: =half")
    made.receive(b"a line\n1: \n")
    (gone,) = made.receive(b"1: !70\n")[1]
    assert isinstance(gone, NodeGone)
    assert gone == NodeGone(5, LinkFailure(Kind.LOST, clean=True))  # its guardian has swept
    assert made.listen(b"srun: error: a2: task 1: Exited with exit code 70\n") == []
    (frame,) = made.receive(labeled(2, wire.as_lines(encode(7, 0, 0, b"goes on"))))[1]
    assert isinstance(frame, Frame)
    assert frame.payload == b"goes on"


@pytest.mark.parametrize(
    ("words", "ended"),
    [
        ("srun: error: a2: task 1: Killed", [(5, None)]),
        ("srun: error: a[1-2]: tasks 0-1: Exited with exit code 9", [(4, 9), (5, 9)]),
        ("srun: error: Node failure on a2", []),
        ("srun: got SIGCONT", []),
    ],
)
def test_understands_srun_messages_about_tasks(words: str, ended: list[tuple[int, int | None]]) -> None:
    gone = booted().listen(words.encode() + b"\n")
    assert gone == [
        NodeGone(node, STEP.failure(ProcessEnd(f"{words}\n", booted=True, status=status)))
        for node, status in ended
    ]
    assert not any(each.failure.clean for each in gone)


def test_a_failure_shows_only_its_own_nodes_output() -> None:
    made = streams()
    made.receive(labeled(1, READY_MARKER))
    made.listen(b"1: distlaunch: no python: python9\n2: chatter\n")
    (gone,) = made.listen(b"srun: error: a2: task 1: Exited with exit code 127\n")
    assert gone.failure.kind is Kind.NO_PYTHON
    assert "chatter" not in gone.failure.words


def test_a_failure_before_the_hello_waits_for_the_output_of_its_node() -> None:
    made = streams()
    assert made.listen(b"srun: error: a2: task 1: Exited with exit code 127\n2: chatter\n") == []
    (gone,) = made.listen(b"1: distlaunch: no python: python9\n")
    assert (gone.node, gone.failure.kind) == (5, Kind.NO_PYTHON)
    assert made.listen(b"1: more\n") == []


def test_a_line_without_a_label_breaks_the_protocol() -> None:
    with pytest.raises(wire.ProtocolError, match="without srun's label"):
        booted().receive(b"hello\n")


def test_a_group_is_one_step_on_all_its_hosts() -> None:
    argv = STEP.group_argv(HOSTS)
    assert {"--nodelist=a1,a2,b1", "--nodes=3", "--ntasks=3", "--label", "--no-kill"} <= set(argv)
    assert "--unbuffered" not in argv
