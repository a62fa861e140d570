"""Frames and the first bytes of a link: the same whatever the slices, bounded whatever the peer sends."""

import contextlib
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.agent import wire
from distlaunch.agent.wire import CONTROL, HEADER, OUTPUT, FrameDecoder, ProtocolError
from distlaunch.transports.handshake import MAX_NOISE, NUDGE, Streams
from tests.unit.samples import bounded

Told = tuple[int, int, int, bytes]
_short = st.integers(0, 65535)
_optional = {"t": st.floats(allow_nan=False), "é": st.none()}
_message = st.fixed_dictionaries({"op": st.text(max_size=8)}, optional=_optional)
_frame = st.builds(wire.encode_message, _short, _message)
_frame |= st.builds(wire.encode, _short, _short, _short, st.binary(max_size=200))
streams = st.lists(_frame, max_size=6).map(b"".join)
cuts = st.lists(st.integers(0, 1200), max_size=8)


def told(frame: wire.Frame) -> Told:
    return (frame.kind, frame.node, frame.channel, frame.payload)


def slices(data: bytes, at: list[int]) -> list[bytes]:
    ends = sorted({min(cut, len(data)) for cut in at} | {len(data)})
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def decoded(parts: list[bytes]) -> list[Told]:
    decoder = FrameDecoder(wire.REPORTS)
    return [told(frame) for part in parts for frame in decoder.feed(part)]


# Frames


@given(streams, cuts)
@bounded()
def test_frames_are_the_same_byte_by_byte_in_slices_and_at_once(stream: bytes, at: list[int]) -> None:
    whole = decoded([stream])
    assert decoded([stream[i : i + 1] for i in range(len(stream))]) == whole
    assert decoded(slices(stream, at)) == whole


_value = st.text(max_size=5) | st.integers() | st.lists(st.booleans())


@given(st.dictionaries(st.text(max_size=5), _value, max_size=4))
@bounded()
def test_a_message_comes_back_as_it_was_even_if_a_value_is_not_unicode(fields: dict[str, object]) -> None:
    message = {**fields, "op": "start", "argument": "\udcff"}
    (frame,) = FrameDecoder(wire.REPORTS).feed(wire.encode_message(7, message))
    assert (frame.kind, frame.node, frame.channel, frame.message()) == (CONTROL, 7, 0, message)


def test_refuses_an_unknown_kind_of_frame() -> None:
    for kind in (0, 4, 0x7F, 0xFF):
        with pytest.raises(ProtocolError, match=f"unknown frame kind {kind}"):
            FrameDecoder(wire.REPORTS).feed(HEADER.pack(kind, 0, 0, 0, 0))


@pytest.mark.parametrize(("kind", "most"), [(OUTPUT, wire.MAX_OUTPUT), (CONTROL, wire.MAX_REPORT)])
def test_refuses_an_overlong_frame_by_its_header_alone(kind: int, most: int) -> None:
    (frame,) = FrameDecoder(wire.REPORTS).feed(HEADER.pack(kind, 0, 0, 0, most) + bytes(most))
    assert len(frame.payload) == most
    for length in (most + 1, 0xFFFFFFFF):
        with pytest.raises(ProtocolError, match=f"a frame of {length} bytes is over the limit"):
            FrameDecoder(wire.REPORTS).feed(HEADER.pack(kind, 0, 0, 0, length))
    header = HEADER.pack(CONTROL, 0, 0, 0, wire.MAX_REPORT + 1)
    assert FrameDecoder(wire.COMMANDS).feed(header) == [], "each direction has its own limit"


@given(st.binary(max_size=64), cuts)
@bounded(200)
def test_junk_is_frames_or_a_protocol_error(junk: bytes, at: list[int]) -> None:
    with contextlib.suppress(ProtocolError):
        assert all(kind in (CONTROL, OUTPUT) for kind, *_ in decoded(slices(junk, at)))


NO_OBJECTS = [b"[]", b"null", b"{}", b'{"op": 1}', b'{"op": "x", "n": ' + b"9" * 5000 + b"}"]
NOT_JSON = [
    *(b"", b"{", b'{"op": "x"', b"\xff\xfe", b'{"op": "x"} {}', b'{"op": "x", "t": NaN}', b"nul", b"NaN"),
    *(b'{"op":Infinity}', b'"\x01"', b"[1,]", b"1 2", b"[" * 100_000, b'{"op": ' + b"[" * 100_000),
]
"""Python's own decoder takes some of them, and runs out of its stack on others."""


@pytest.mark.parametrize("payload", [*NO_OBJECTS, *NOT_JSON], ids=lambda payload: repr(payload[:20]))
def test_refuses_a_payload_that_is_not_a_message(payload: bytes) -> None:
    header = HEADER.pack(CONTROL, 0, 0, 0, len(payload))
    (frame,) = FrameDecoder(wire.REPORTS).feed(header + payload)
    with pytest.raises(ProtocolError, match="not JSON" if payload in NOT_JSON else None):
        frame.message()


def test_does_not_keep_long_frames_in_memory() -> None:
    frame = wire.encode(0, 0, 0, bytes(wire.MAX_OUTPUT))
    decoder = FrameDecoder(wire.REPORTS)
    tracemalloc.start()
    try:
        for part in (frame[:1000], frame[1000:]) * 300:
            decoder.feed(part)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * wire.MAX_OUTPUT


# The first bytes

HELLO = wire.HELLO_PREFIX + b"n0nce\n"
REPORT = wire.encode_message(0, {"op": "hello"})


def shaken(parts: list[bytes]) -> tuple[bytes, list[Told], Streams]:
    """What a handshake sends and tells when it is fed `parts`."""
    handshake = Streams([b"opening"], "n0nce")
    sent, frames = b"", []
    for part in parts:
        more, new = handshake.receive(part)
        sent += more
        frames += [told(frame) for frame in new if isinstance(frame, wire.Frame)]
    return sent, frames, handshake


_noise = st.binary(max_size=60).filter(lambda noise: not noise.endswith((wire.READY_MARKER[:1], b"\0")))


@given(_noise, _noise, streams, cuts)
@bounded(200)
def test_skips_noise_before_marker_and_hello(motd: bytes, noise: bytes, stream: bytes, at: list[int]) -> None:
    data = motd + wire.READY_MARKER + noise + HELLO + stream
    sent, frames, handshake = shaken(slices(data, at))
    assert (sent, handshake.booted, frames) == (b"opening", True, decoded([stream]))


def test_byte_by_byte_nothing_is_sent_before_the_marker_is_whole() -> None:
    handshake = Streams([b"opening"], "n0nce")
    for byte in wire.READY_MARKER[:-1]:
        assert handshake.receive(bytes([byte])) == (b"", []) and not handshake.opened
    assert handshake.receive(wire.READY_MARKER[-1:]) == (b"opening", [])
    assert handshake.opened and not handshake.booted
    sent, _, _ = shaken([wire.READY_MARKER, wire.READY_MARKER, HELLO, b""])
    assert sent == b"opening", "once"


def test_a_hello_without_our_nonce_boots_nothing() -> None:
    others = [wire.HELLO_PREFIX + end for end in (b"another\n", b"n0nce2\n", b"\n", b"n0nce")]
    for hello in (*others, b"distlaunch-agent n0nce\n"):
        _, frames, handshake = shaken([wire.READY_MARKER, hello, REPORT])
        assert (frames, handshake.opened, handshake.booted) == ([], True, False), hello
    sent, frames, handshake = shaken([HELLO, REPORT])
    assert (sent, frames, handshake.opened, handshake.booted) == (b"", [], False, False), "without a marker"


def test_nudges_a_shell_until_it_was_sent_what_it_reads() -> None:
    awaited, direct = (Streams([b"python3\n\n"], "n0nce") for _ in range(2))
    assert awaited.nudges() == NUDGE
    awaited.receive(wire.READY_MARKER)
    direct.without_marker()
    assert awaited.nudges() == direct.nudges() == b""
    inside = Streams([b">docker run\n", b"python3\n\n"], "n0nce")
    inside.without_marker()
    assert inside.nudges() == NUDGE  # for the shell in the container


@pytest.mark.parametrize("before", [b"", wire.READY_MARKER], ids=["before the marker", "before the hello"])
@pytest.mark.parametrize("piece", [1000, MAX_NOISE, MAX_NOISE * 4])
def test_refuses_endless_noise(before: bytes, piece: int) -> None:
    handshake = Streams([b"opening"], "n0nce")
    handshake.receive(before)
    with pytest.raises(ProtocolError, match="before the agent started"):
        any(handshake.receive(b"x" * piece)[1] for _ in range(MAX_NOISE * 2 // piece + 1))


def test_accepts_a_long_message_of_the_day_but_no_damaged_frame() -> None:
    with pytest.raises(ProtocolError, match="unknown frame kind"):
        shaken([wire.READY_MARKER + HELLO + b"segfaulted!"])
    motd = b"welcome\r\n" * (MAX_NOISE // 10)
    sent, _, handshake = shaken([motd, wire.READY_MARKER, motd, HELLO])
    assert (sent, handshake.booted) == (b"opening", True)


def test_only_the_controller_packs_long_messages() -> None:
    message = {"op": "start", "env": {f"NAME{i}": "value" for i in range(100)}}
    data = wire.encode_command(3, message)
    assert len(data) < 1024 < len(wire.encode_message(3, message))
    (frame,) = FrameDecoder(wire.COMMANDS).feed(data)
    assert (frame.node, frame.message()) == (3, message)
    with pytest.raises(ProtocolError, match="unknown frame kind"):
        FrameDecoder(wire.REPORTS).feed(data)
    short = {"op": "ping"}
    assert wire.encode_command(3, short) == wire.encode_message(3, short)
    (junk,) = FrameDecoder(wire.COMMANDS).feed(HEADER.pack(wire.PACKED, 0, 0, 0, 4) + b"junk")
    with pytest.raises(ProtocolError, match="not JSON"):
        junk.message()
