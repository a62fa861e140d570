"""What comes through the relays of a tree of nodes, taken apart: frames, words, ends; and what goes there."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.agent import relay, wire
from distlaunch.agent.wire import HELLO_PREFIX, READY_MARKER, RELAY, Frame, FrameDecoder, encode_relay
from distlaunch.transport.boot import NUDGE
from distlaunch.transport.failure import Kind, LinkFailure, cut_off
from distlaunch.transport.ssh import Ssh, SshOptions
from distlaunch.transport.ssh.tree import Branch, Relayed, shares
from distlaunch.transport.streams import NodeGone, OneStream
from tests.unit.samples import bounded

HELLO = HELLO_PREFIX + b"n0nce\n"
HOSTS = "abcdef"


def branch(node: int, *below: Branch) -> Branch:
    reach = Ssh(HOSTS[node], options=SshOptions(persist_s=60))
    return Branch(node, reach, b"opening %d" % node, b"loader %d" % node, below)


def streams() -> Relayed:
    """a reaches b and c, and c reaches d and e."""
    return Relayed(branch(0, branch(1), branch(2, branch(3), branch(4))), "n0nce")


def report(node: int) -> bytes:
    return wire.encode_message(node, {"op": "hello"})


def through(*path: int, data: bytes, what: int = relay.DATA) -> bytes:
    """What a relay sends, in those of the relays above it."""
    *above, node = path
    for each in (node, *reversed(above)):
        data, what = encode_relay(each, what, data), relay.DATA
    return data


def booted() -> Relayed:
    """All have said hello."""
    made = streams()
    for data in (
        READY_MARKER + HELLO,
        through(0, data=HELLO),
        through(1, data=READY_MARKER + HELLO),
        through(2, data=READY_MARKER + HELLO),
        through(2, 2, data=HELLO),
        through(2, 3, data=READY_MARKER + HELLO),
        through(2, 4, data=READY_MARKER + HELLO),
    ):
        made.receive(data)
    return made


def frames(data: bytes) -> list[tuple[int, int, bytes]]:
    """(node, what, payload) of each frame for a relay."""
    return [(each.node, each.channel, each.payload) for each in FrameDecoder(wire.RELAYED).feed(data)]


@bounded()
@given(st.lists(st.integers(), max_size=100), st.integers(1, 40))
def test_shares_have_all_in_order_and_hardly_differ(items: list[int], most: int) -> None:
    parts = shares(items, most)
    assert [each for part in parts for each in part] == items
    sizes = {len(part) for part in parts}
    assert len(parts) <= most
    assert not sizes or (min(sizes) > 0 and max(sizes) - min(sizes) <= 1)


def test_a_relay_is_told_how_to_reach_those_right_below() -> None:
    opens = frames(streams().openings())
    assert [(node, what) for node, what, _ in opens] == [(1, relay.OPEN), (2, relay.OPEN)]
    argv = json.loads(opens[1][2])
    assert (argv[0], argv[-2]) == ("ssh", "c")
    assert "ControlMaster=no" in argv  # nobody would find a connection that is kept open there


def test_a_node_below_gets_its_opening_and_is_booted_from_what_its_relay_has() -> None:
    made = streams()
    assert made.receive(READY_MARKER) == (b"opening 0", [])
    made.receive(HELLO)
    to_send, found = made.receive(through(1, data=b"welcome\n" + READY_MARKER))
    assert frames(to_send) == [(1, relay.DATA, b"opening 1"), (1, relay.BOOT, b"loader 1")]
    assert found == []
    assert made.receive(through(1, data=b"more")) == (b"", [])


def test_a_relay_below_is_told_how_to_reach_its_own() -> None:
    made = streams()
    made.receive(READY_MARKER + HELLO)
    to_send, _ = made.receive(through(2, data=READY_MARKER))
    opening, boot, opens = frames(to_send)
    assert (opening, boot) == ((2, relay.DATA, b"opening 2"), (2, relay.BOOT, b"loader 2"))
    assert [(node, what) for node, what, _ in frames(opens[2])] == [(3, relay.OPEN), (4, relay.OPEN)]


@bounded()
@given(st.lists(st.integers(1, 40), max_size=40))
def test_frames_come_out_as_they_went_in_however_they_are_cut(cuts: list[int]) -> None:
    made, got = booted(), list[int]()
    data = through(0, data=report(0)) + through(2, 4, data=report(4)[:7]) + through(1, data=report(1))
    data += through(2, 4, data=report(4)[7:]) + through(2, 2, data=report(2))
    for size in (*cuts, len(data)):
        for frame in made.receive(data[:size])[1]:
            assert isinstance(frame, Frame)
            got.append(frame.node)
        data = data[size:]
    assert got == [0, 1, 4, 2]


@pytest.mark.parametrize(
    ("node", "path"), [(0, (0,)), (1, (1,)), (2, (2, 2)), (3, (2, 3)), (4, (2, 4))], ids=str
)
def test_what_a_node_is_sent_goes_by_its_relays(node: int, path: tuple[int, ...]) -> None:
    assert booted().addressed(node, b"command") == through(*path, data=b"command")


def test_what_is_long_travels_in_pieces() -> None:
    long = bytes(3 * wire.MAX_OUTPUT)
    found = frames(encode_relay(1, relay.DATA, long))
    assert {len(payload) for _, _, payload in found} == {wire.MAX_OUTPUT}
    assert b"".join(payload for *_, payload in found) == long


@pytest.mark.parametrize(
    ("status", "failure"),
    [
        (b"0", LinkFailure(Kind.LOST, clean=True)),
        (b"70", LinkFailure(Kind.LOST, clean=True)),
        (b"-9", LinkFailure(Kind.LOST, "its agent's guardian process was killed by signal 9 (SIGKILL)")),
    ],
)
def test_the_end_of_a_relays_own_agent_leaves_the_others(status: bytes, failure: LinkFailure) -> None:
    made = booted()
    assert made.receive(through(0, data=status, what=relay.ENDED)) == (b"", [NodeGone(0, failure)])
    (frame,) = made.receive(through(2, 3, data=report(3)))[1]
    assert frame.node == 3


def test_the_end_of_ssh_to_a_relay_cuts_off_those_below_that_are_left() -> None:
    made = booted()
    made.receive(through(2, 3, data=b"0", what=relay.ENDED))
    (gone,) = made.receive(through(2, data=b"-9", what=relay.ENDED))[1]
    failure = LinkFailure(Kind.LOST, "ssh on a was killed by signal 9 (SIGKILL)", via="a")
    assert gone == NodeGone(2, failure, cut=(4,))
    assert made.receive(through(2, data=b"0", what=relay.ENDED))[1] == []


def test_the_end_of_ssh_to_a_relay_whose_agent_has_ended_leaves_the_rest_cut_off() -> None:
    made = booted()
    made.receive(through(2, 2, data=b"0", what=relay.ENDED))
    (gone,) = made.receive(through(2, data=b"255", what=relay.ENDED))[1]
    assert gone == NodeGone(3, cut_off("c"), cut=(4,))


def test_why_a_node_can_not_be_reached_is_told_as_from_here_with_the_host_that_tried() -> None:
    made = streams()
    made.receive(READY_MARKER + HELLO)
    made.receive(through(1, data=b"me@b: Permission denied (publickey).\n", what=relay.ERRORS))
    (gone,) = made.receive(through(1, data=b"255", what=relay.ENDED))[1]
    assert gone == NodeGone(
        1, LinkFailure(Kind.AUTHENTICATION, "me@b: Permission denied (publickey).", via="a")
    )


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (through(1, data=report(3)), "a frame for node 3 came on another node's link"),
        (through(1, data=b"\x09" + bytes(10)), "unknown frame kind 9"),
        (through(1, data=b"", what=9), "a relay's frame of the unknown kind 9"),
        (through(1, data=b"x", what=relay.ENDED), "invalid literal"),
    ],
)
def test_a_node_that_breaks_the_protocol_is_parted_with_alone(data: bytes, why: str) -> None:
    made = booted()
    to_send, (gone,) = made.receive(data)
    assert frames(to_send) == [(1, relay.SHUT, b"")]
    assert isinstance(gone, NodeGone)
    assert (gone.node, gone.failure.kind, gone.cut) == (1, Kind.PROTOCOL, ())
    assert why in gone.failure.words


def test_a_relay_that_names_a_strange_node_ends_the_link() -> None:
    with pytest.raises(wire.ProtocolError, match="node 3, which it does not serve"):
        booted().receive(through(3, data=b""))
    with pytest.raises(wire.ProtocolError, match="unknown frame kind"):
        booted().receive(wire.encode_message(0, {"op": "hello"}))


def test_a_shell_is_nudged_until_that_was_sent_what_it_reads() -> None:
    awaited, direct = OneStream([b"python3\n\n"], "n0nce"), OneStream([b"python3\n\n"], "n0nce")
    assert awaited.nudges() == NUDGE
    awaited.receive(READY_MARKER)
    direct.without_marker()
    assert awaited.nudges() == direct.nudges() == b""
    inside = OneStream([b">docker run\n", b"python3\n\n"], "n0nce")
    inside.without_marker()
    assert inside.nudges() == NUDGE  # for the shell in the container


def test_shells_that_have_not_answered_are_nudged_wherever_they_are() -> None:
    made = streams()
    assert made.nudges() == NUDGE
    made.receive(READY_MARKER + HELLO)
    assert frames(made.nudges()) == [(1, relay.DATA, NUDGE), (2, relay.DATA, NUDGE)]
    made.receive(through(2, data=READY_MARKER + HELLO))
    (_, (_, _, below)) = frames(made.nudges())
    assert frames(below) == [(3, relay.DATA, NUDGE), (4, relay.DATA, NUDGE)]
    assert booted().nudges() == b""


def test_a_node_that_is_not_wanted_any_more_is_parted_with_where_it_is_reached() -> None:
    made = booted()
    assert made.parting(3) == through(2, 3, data=b"", what=relay.SHUT)
    assert made.parting(2) == through(2, 2, data=b"", what=relay.SHUT)
    assert frames(made.parting(4)) == [(2, relay.SHUT, b"")]  # its relay is of no use to others


def test_a_node_is_overdue_by_itself_or_since_its_relay_is() -> None:
    why, late = "no agent within 30 s", LinkFailure(Kind.SILENT, "no agent within 30 s")
    made = streams()
    assert made.part_of(0, late, why) == late
    assert made.part_of(1, late, why) == made.part_of(3, late, why) == cut_off("a")
    made.receive(READY_MARKER + HELLO)
    assert made.part_of(1, late, why) == late._replace(via="a")
    assert made.part_of(3, late, why) == cut_off("c")
    made.receive(through(2, data=READY_MARKER + HELLO))
    assert made.part_of(3, late, why) == late._replace(via="c")


def test_the_end_of_the_whole_link_is_that_of_its_first_node_alone() -> None:
    ended = LinkFailure(Kind.LOST, "ssh on this machine was killed by signal 9 (SIGKILL)")
    made = booted()
    assert made.part_of(0, ended, "") == ended
    assert made.part_of(4, ended, "") == cut_off("a")


def test_relayed_frames_are_of_one_kind_and_have_their_limit() -> None:
    with pytest.raises(wire.ProtocolError, match="over the limit"):
        FrameDecoder(wire.RELAYED).feed(wire.HEADER.pack(RELAY, 1, 0, 0, wire.MAX_OUTPUT + 1))
