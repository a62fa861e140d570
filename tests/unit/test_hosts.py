"""Host names, ranges, endpoints and hostfiles: accepted and refused spellings."""

import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from distlaunch.job.nodes import host_error, parse_endpoint
from distlaunch.wording import expand_ranges
from tests.unit.samples import bounded

hostish = st.text("ab[]0123,-.: @#=\t\n²slots", max_size=30)


@pytest.mark.parametrize(
    ("text", "expected"),
    {
        "gpu": "gpu",
        "gpu[08-11]": "gpu08 gpu09 gpu10 gpu11",
        "gpu[8-11]": "gpu8 gpu9 gpu10 gpu11",
        "gpu[03-05,9]": "gpu03 gpu04 gpu05 gpu9",
        "gpu[ 1, 3 ]": "gpu1 gpu3",
        "r[1-2]n[1-2]": "r1n1 r1n2 r2n1 r2n2",
        "gpu[1-2].site.org": "gpu1.site.org gpu2.site.org",
        "[1-2]": "1 2",
    }.items(),
)
def test_ranges_expand_in_order_and_keep_their_zeros(text: str, expected: str) -> None:
    assert expand_ranges(text) == expected.split()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((text, "unbalanced brackets") for text in ("gpu[1-3", "gpu1-3]", "gpu[[1-3]]")),
        *((f"gpu[{text}]", "is not a range") for text in ("", "a-c", "1-", "1,,2", "-1")),
        ("gpu[3-1]", "counts down"),
        ("gpu[1-1000000000000]", "names more than"),
        ("[fe80::1]", "write an IPv6 address without brackets"),
        ("gpu[1-999][1-999]", "more than 65535 hosts"),
    ],
)
def test_a_bad_range_is_explained(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        expand_ranges(text)


def test_too_many_hosts_are_refused_before_they_fill_the_memory() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="names more than"):
            expand_ranges("[1-9999]" * 20)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


@given(st.integers(0, 999), st.integers(0, 20), st.integers(1, 6))
@bounded()
def test_all_names_of_a_padded_range_are_as_wide_as_its_start(first: int, more: int, width: int) -> None:
    start = str(first).zfill(width)
    expanded = expand_ranges(f"n[{start}-{first + more}]")
    assert [int(name[1:]) for name in expanded] == list(range(first, first + more + 1))
    assert all(len(name) - 1 == max(len(start), len(str(int(name[1:])))) for name in expanded)


@given(hostish | st.text(max_size=30))
@example("n[" + "9" * 5000 + "]")
@bounded(300)
def test_any_text_expands_or_is_refused_with_a_reason(text: str) -> None:
    try:
        assert expand_ranges(text)
    except ValueError as error:
        assert str(error)


# What may reach a command line


def test_refuses_a_name_with_a_leading_dash_or_a_character_that_shells_know() -> None:
    bad = ["-oProxyCommand=x", "-", "--", "", "a$(id)", "a\n", *(f"a{char}b" for char in " ;`|&'\"\\\n*/ä")]
    good = ["a", "gpu-a", "a.b.c", "10.0.0.1", "fe80::1%eth0", "my_host", "A-9", "1"]
    assert [host for host in (*bad, *good) if host_error(host)] == bad


@given(st.text(max_size=20))
@bounded(300)
def test_accepted_hosts_are_one_plain_word(host: str) -> None:
    if host_error(host) is None:
        assert host.isascii() and host.isprintable() and host[0] != "-"
        assert not set(host) & set(" \t'\"\\$`;&|<>()*?[]{}!#~/")


# Endpoints


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:29500", ("a", 29500)),
        ("a", ("a", None)),
        (":29500", (None, 29500)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("[fe80::1]:65535", ("fe80::1", 65535)),
        ("[::1]", ("::1", None)),
    ],
)
def test_endpoints_are_host_port_or_either(text: str, expected: tuple[str | None, int | None]) -> None:
    assert parse_endpoint(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((text, "is not an endpoint") for text in ("a:", "a:b", "a:1:2", "[::1", "tcp://a:1")),
        ("::1", "is not an endpoint; write host:port, or .address.:port for IPv6"),
        ("a:0", "port 0 is not in the range 1 to 65535"),
        ("a:65536", "port 65536 is not in the range 1 to 65535"),
        *((text, "can't begin with a dash") for text in ("-o:1", "[-o]:1")),
        ("a b:1", "is not a valid host name"),
    ],
)
def test_a_bad_endpoint_is_explained(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_endpoint(text)


@given(hostish | st.text(max_size=20))
@example("a:" + "9" * 5000)
@bounded(300)
def test_any_text_is_an_endpoint_or_refused_with_a_reason(text: str) -> None:
    try:
        host, port = parse_endpoint(text)
    except ValueError as error:
        assert str(error)
    else:
        assert host is None or host_error(host) is None
        assert port is None or 0 < port < 65536
