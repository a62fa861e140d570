"""The streams of several nodes in one srun --label: frames, last output, and srun's own messages."""

import socket
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.agent import wire
from distlaunch.agent.wire import HELLO_PREFIX, READY_MARKER, Frame, encode
from distlaunch.launch.link import Link, Links
from distlaunch.launch.process import Peer
from distlaunch.transports.failure import Kind, LinkFailure, ProcessEnd
from distlaunch.transports.handshake import NodeGone
from distlaunch.transports.slurm import LabeledStreams, SlurmStep
from distlaunch.transports.transport import Joined
from tests.unit.samples import bounded
from tests.unit.test_wire import cuts, slices

HOSTS, INDICES = ("a1", "a2", "b1"), (4, 5, 7)
STEP = SlurmStep("a1", "17")
HELLO = READY_MARKER + HELLO_PREFIX + b"n0nce\n"


def streams(*labels: int) -> LabeledStreams:
    """Those of three nodes, of which these have said hello."""
    made = LabeledStreams(b"opening", "n0nce", dict(zip(HOSTS, INDICES, strict=True)), STEP)
    for label in labels:
        made.receive(labeled(label, HELLO))
    return made


def labeled(label: int, data: bytes) -> bytes:
    return b"".join(b"%d: %b\n" % (label, line) for line in data.removesuffix(b"\n").split(b"\n"))


_text = st.text("\x1b[n\n=!0: ", max_size=9).map(str.encode)
_data = st.builds(lambda text, times: text * times, _text, st.sampled_from([1, 107, 400]))


@given(st.lists(st.tuples(st.integers(0, 2), _data), max_size=20), cuts)
@bounded()
def test_frames_survive_labels_however_they_are_cut(sent: list[tuple[int, bytes]], at: list[int]) -> None:
    encoded = [(label, wire.as_lines(encode(INDICES[label], 0, 0, data))) for label, data in sent]
    assert all(len(line) < 1000 for _, lines in encoded for line in lines.split(b"\n"))
    made, whole = streams(0, 1, 2), b"".join(labeled(label, lines) for label, lines in encoded)
    got = [frame for part in slices(whole, at) for frame in made.receive(part)[1]]
    expected = [(INDICES[label], data) for label, data in sent]
    assert [(frame.node, frame.payload) for frame in got if isinstance(frame, Frame)] == expected


def test_the_opening_is_for_all_and_each_says_hello() -> None:
    made = streams()
    assert made.without_marker() == b"opening"
    for label in (0, 2, 1):
        assert not made.booted
        made.receive(labeled(label, HELLO))
    assert made.booted


def test_an_agents_last_status_ends_its_node_once() -> None:
    made = streams(0, 1, 2)
    made.receive(b"1: =half")
    made.receive(b"a line\n1: \n")
    (gone,) = made.receive(b"1: !70\n")[1]
    assert gone == NodeGone(5, LinkFailure(Kind.LOST, clean=True))  # its guardian has swept
    assert made.listen(b"srun: error: a2: task 1: Exited with exit code 70\n") == []
    (frame,) = made.receive(labeled(2, wire.as_lines(encode(7, 0, 0, b"goes on"))))[1]
    assert isinstance(frame, Frame) and frame.payload == b"goes on"


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
    gone = streams(0, 1, 2).listen(words.encode() + b"\n")
    ends = [(node, ProcessEnd(f"{words}\n", booted=True, status=status)) for node, status in ended]
    assert gone == [NodeGone(node, STEP.failure(end)) for node, end in ends]
    assert not any(each.failure.clean for each in gone)


TASK_1 = b"srun: error: a2: task 1: Exited with exit code 127\n"


def test_a_failure_shows_only_its_own_nodes_output() -> None:
    made = streams()
    made.receive(labeled(1, READY_MARKER))
    made.listen(b"1: distlaunch: no python: python9\n2: chatter\n")
    (gone,) = made.listen(TASK_1)
    assert gone.failure.kind is Kind.NO_PYTHON and "chatter" not in gone.failure.words


def test_a_failure_before_the_hello_waits_for_the_output_of_its_node() -> None:
    made = streams()
    assert made.listen(TASK_1 + b"2: chatter\n") == []
    (gone,) = made.listen(b"1: distlaunch: no python: python9\n")
    assert (gone.node, gone.failure.kind) == (5, Kind.NO_PYTHON)
    assert made.listen(b"1: more\n") == []


def test_a_line_without_a_label_breaks_the_protocol() -> None:
    with pytest.raises(wire.ProtocolError, match="without srun's label"):
        streams(0, 1, 2).receive(b"hello\n")


def test_a_group_is_one_step_on_all_its_hosts() -> None:
    argv = STEP.group_argv(HOSTS)
    assert {"--nodelist=a1,a2,b1", "--nodes=3", "--ntasks=3", "--label", "--no-kill"} <= set(argv)
    assert "--unbuffered" not in argv


def test_what_a_dropped_node_still_sends_does_not_end_the_link_of_the_others() -> None:
    """Its agent answers heartbeats that waited while it was frozen, and another one has its place by now."""
    came, ended = list[int](), list[int]()
    links = Links(lambda frame: came.append(frame.node), lambda node, failure: ended.append(node))

    def turn() -> None:
        for _ in range(4):  # what was sent over loopback has arrived
            links.turn(0.1)

    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        first, second = (
            stack.enter_context(socket.create_connection(server.getsockname())) for _ in range(2)
        )
        by = Joined("a1")  # sockets instead of srun
        shared, own = (Link(by, Peer(server.accept()[0]), streams(0, 1, 2), lambda: b"") for _ in range(2))
        for node in INDICES:
            links.add(node, shared)
        links.give_up(4, "no heartbeat")
        links.add(4, own)
        for label, node in enumerate(INDICES):
            first.sendall(labeled(label, wire.as_lines(encode(node, 0, 0, b"late"))))
        turn()
        assert (came, ended, links.present) == ([5, 7], [4], [4, 5, 7])
        second.sendall(labeled(1, wire.as_lines(encode(5, 0, 0, b"forged"))))
        turn()
        assert (came, ended) == ([5, 7], [4, 4]), "a node that never had this link may not use it"
        links.close()
