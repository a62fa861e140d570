"""Faults of ssh and the start: told in time and in ssh's own words, or overcome; nothing is left."""

import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.cluster import odd_hosts
from tests.cluster.hosts import Node, Site
from tests.cluster.odd_hosts import Bad, assert_ran, assert_refused, told_s, with_python, with_python_of
from tests.faults.agents import NAMELESS, python_with
from tests.faults.figures import Figures, Pace, fault

CONNECT_S, TELLING_S = 30.0, 1.0
"""The default of timeouts.connect, and what it takes to say what is wrong once the time is over."""


@pytest.fixture(scope="session")
def connect_s(pace: Pace) -> float:
    """A `timeouts.connect` for what is only told when it is over."""
    return 10.0 if pace.keys else CONNECT_S  # the good hosts have to be there by then


NOISE = r"""
echo 'Welcome! You have mail.'
echo 'distlaunch-ready' 'distlaunch%s' -ready-1 distlaunch-agent
printf 'distlaunch%s\n' -ready-1
printf '\0distlaunch-agent 00000000000000000000000000000000\n'
printf '\001\0\0\0\0\377\377\377\377\033[2J'
head -c 50000 /dev/urandom
echo 'stderr too' >&2
"""
RC_FILES = {"bash": ".bashrc", "csh": ".cshrc", "fish": ".config/fish/config.fish"}
RC_FILES |= {"tcsh": ".tcshrc", "zsh": ".zshenv"}
READS = {"with a limit": "read -t 1 x\ntimeout 1 cat > /dev/null", "a line": "read x"}


@pytest.mark.parametrize(
    ("shell", "text"),
    [
        *(fault(34, f"the rc file of {shell} prints noise", "8", shell, NOISE) for shell in RC_FILES),
        *(fault(35, f"an rc file reads stdin, {how}", "8", "bash", text) for how, text in READS.items()),
    ],
)
def test_runs_behind_an_rc_file(shell: str, text: str, site: Site, figures: Figures) -> None:
    ended = odd_hosts.run_behind(site, shell, RC_FILES[shell], text)
    figures("the whole run", ended.took_s, at_most=CONNECT_S)


def of_another_version(site: Site, name: str) -> Node:
    patch = "from distlaunch.agent import wire; wire.PROTOCOL += 1"
    return {"host": site.name(name, "host2"), "python": python_with(site.directory / "newer", patch)}


NOT_KNOWN = "host key not accepted"
NO_PYTHON = re.escape(sys.executable) + r".* python3$"
NEWER = Bad(of_another_version, "protocol error", r"speaks protocol \d+, not \d+")
PASSWORD = Bad(odd_hosts.asks_for_a_password, "authentication failed", r"Permission denied \(password\)")
PYTHONS = {
    "not-in-path": Bad(with_python("no-such-python"), "no python", r"no-such-python"),
    "not-there": Bad(with_python("/nowhere/bin/python3"), "no python", r"/nowhere/bin/python3"),
    "none": Bad(odd_hosts.no_python_at_all, "no python", NO_PYTHON),
    "python-2-7": Bad(with_python_of("2.7"), "python too old", r"Unknown option: -I"),
    "python-3-6": Bad(with_python_of("3.6"), "python too old", r"3\.6\.\d"),
    "python-3-7": Bad(with_python_of("3.7"), "python too old", r"3\.7\.\d"),
}
KEYS = {
    "changed": Bad(odd_hosts.another_host_key, "host key changed", "REMOTE HOST IDENTIFICATION HAS CHANGED"),
    "unknown": Bad(odd_hosts.no_known_host_key, NOT_KNOWN, r"No \S+ host key is known for unknown"),
    "asks": Bad(odd_hosts.a_host_key_to_ask_about, NOT_KNOWN, r"Host key verification failed"),
}


@pytest.mark.parametrize(
    "bad",
    [
        fault(36, "no python, or too old a one", "8, 11", PYTHONS),
        fault(37, "an agent of another version", "8, 11", {"newer": NEWER}),
        fault(40, "an unknown or changed host key", "8, 11", KEYS),
        fault(41, "a server that asks for a password", "8, 11", {"asks": PASSWORD}),
    ],
)
def test_tells_why_a_host_is_unusable(bad: Mapping[str, Bad], site: Site, figures: Figures) -> None:
    figures("until told", told_s(odd_hosts.assert_each_told(site, bad)), at_most=CONNECT_S)


@pytest.mark.fault(38, "sshd drops connections (MaxStartups 2:100:2)", promise="8")
def test_retries_at_a_server_that_sheds_load(site: Site, figures: Figures) -> None:
    port = site.sshd("host2", "MaxStartups 2:100:2")
    python = python_with(site.directory / "python", NAMELESS)
    ended = site.run([{"host": site.name(f"name{i}", "host2", port), "python": python} for i in range(8)])
    assert_ran(site, ended)
    dropped = [e for e in ended.events("LinkEnded") if e["failure"]["kind"] == "dropped by the server"]
    assert dropped, "the server let all in at once"
    figures("connections that were dropped, of 8", len(dropped), unit="")
    figures("until all 8 had run", ended.took_s, at_most=CONNECT_S)


# Says to each that calls what an sshd says to those whose logins failed, from OpenSSH 9.8 on.
COUNTING = """
import os
calls = os.open({calls!r}, os.O_WRONLY | os.O_CREAT, 0o600)
while True:
    peer = server.accept()[0]
    os.write(calls, b"x")
    peer.recv(4096)
    peer.sendall(b"Not allowed at this time\\r\\n")
    peer.close()
"""


@pytest.mark.long
@pytest.mark.fault(39, "a server that punishes failed logins", promise="8")
def test_retries_little_at_a_server_that_punishes(site: Site, figures: Figures) -> None:
    calls = site.directory / "calls"
    server = site.server("host2", COUNTING.format(calls=str(calls)))
    locked = odd_hosts.a_key_it_does_not_know(site, "locked")
    nodes = ["host1", locked, site.name("punishing", "host2", server)]
    ended = site.run(nodes)
    expected = {
        "locked": ("authentication failed", "Permission denied"),
        "punishing": ("dropped by the server", "kex_exchange_identification: "),
    }
    assert_refused(site, ended, expected)
    tried = [event["node"] for event in ended.events("LinkEnded")]
    figures("logins with a key that was refused", tried.count(1), at_most=1, unit="")
    figures("calls while punished", calls.stat().st_size, at_most=6, unit="")
    figures("until told", told_s(ended), at_most=CONNECT_S + TELLING_S)


@pytest.mark.fault(42, "servers that accept and say nothing, and all else that waits", promise="8")
def test_gives_up_on_servers_that_say_nothing(site: Site, connect_s: float, figures: Figures) -> None:
    site.cut("host3")
    greets = f"peer = server.accept()[0]; peer.sendall(b'SSH-2.0-mute\\r\\n'); {odd_hosts.TO_THE_END}"
    nodes = [
        "host1",
        "host3",
        site.name("down", "host3", ConnectionAttempts="9"),
        odd_hosts.silent_once_accepted(site, "silent"),
        site.name("mute", "host2", site.server("host2", greets)),
        site.name("full", "host2", site.server("host2", odd_hosts.HANGING_UP)),
        odd_hosts.with_rc_file(site, "waiting", "echo password for the licence server: >&2; cat >/dev/null"),
    ]
    ended = site.run(nodes, "--set", f"timeouts.connect={connect_s:g}s")
    overdue = f"no agent within {connect_s:g} s"
    expected = {
        "host3": ("unreachable", "Connection timed out"),
        "down": ("unreachable", "Connection timed out"),
        "silent": ("no answer", "timed out during banner exchange"),
        "mute": ("no answer", rf"Connection to \S+ port \d+ timed out|{overdue}"),
        "full": ("dropped by the server", "kex_exchange_identification: "),
        "waiting": ("no answer", rf"(?s)licence server.*{overdue}"),
    }
    assert_refused(site, ended, expected)
    figures("until all six were told", told_s(ended), at_most=connect_s + TELLING_S)


# Says that `missing` is no name, tells where `slow` is after a second, and ignores all else.
NAME_SERVER = """
import time
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind((server.getsockname()[0], 53))
while True:
    query, peer = udp.recvfrom(512)
    question = query[12 : query.index(0, 12) + 5]
    head = lambda flags, answers: query[:2] + flags + b"\\0\\1" + answers + b"\\0\\0\\0\\0" + question
    if b"missing" in question:
        udp.sendto(head(b"\\x81\\x83", b"\\0\\0"), peer)
    elif b"slow" in question:
        time.sleep(1)
        record = b"\\xc0\\x0c\\0\\1\\0\\1\\0\\0\\0\\0\\0\\4" + socket.inet_aton(server.getsockname()[0])
        udp.sendto(head(b"\\x81\\x80", b"\\0\\1") + record, peer)
"""


@pytest.mark.fault(43, "DNS fails, is slow, or is silent", promise="8")
def test_survives_slow_dns_and_names_unknown_hosts(site: Site, connect_s: float, figures: Figures) -> None:
    site.server("host2", NAME_SERVER)
    config = site.directory / "resolv.conf"
    config.write_text(f"nameserver {site.bed.hosts['host2'].address}\noptions timeout:30\n")
    resolver = {Path("/etc/resolv.conf"): config}
    for name in ("slow", "missing", "silent"):
        site.name(name, "host2", HostName=f"{name}.invalid.", AddressFamily="inet")
    ended = site.run(["host1", "slow"], over=resolver)
    assert_ran(site, ended)
    figures("slow: the whole run", ended.took_s, at_most=CONNECT_S)
    for path in site.directory.glob("started-*"):
        path.unlink()
    bad = {
        "missing": ("unknown host", "Could not resolve hostname missing", CONNECT_S),
        "silent": ("no answer", f"no agent within {connect_s:g} s", connect_s + TELLING_S),
    }
    for name, (kind, words, limit_s) in bad.items():
        ended = site.run(["host1", name], "--set", f"timeouts.connect={connect_s:g}s", over=resolver)
        assert_refused(site, ended, {name: (kind, words)})
        figures(f"{name}: until told", told_s(ended), at_most=limit_s)


HOSTILE = """
    IgnoreUnknown=UseKeychain UseKeychain=yes BatchMode=no ControlMaster=auto ControlPersist=yes
    LogLevel=QUIET ExitOnForwardFailure=yes ForkAfterAuthentication=yes PermitLocalCommand=yes
    RequestTTY=force SessionType=none StdinNull=yes
"""


@pytest.mark.fault(44, "ControlMaster, RemoteCommand, RequestTTY and more in ssh_config", promise="11")
def test_overrides_a_hostile_ssh_config(site: Site, figures: Figures) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, odd_hosts.dead_master(site.directory / "s"):
        local = {"LocalForward": f"127.0.0.1:{taken.getsockname()[1]} localhost:9"}
        local |= {"LocalCommand": f"touch '{site.directory}/local'", "RemoteCommand": "echo hijacked"}
        hostile = dict(setting.split("=") for setting in HOSTILE.split()) | local
        nodes = [
            site.name("new", "host1", 22, **hostile, ControlPath=f'"{site.directory}/%n"'),
            site.name("old", "host2", 22, **hostile, ControlPath=f'"{site.directory}/s"'),
        ]
        ended = site.run(nodes)
    assert_ran(site, ended)
    assert not (site.directory / "local").exists()
    assert not (site.directory / "new").exists(), "a master was left"
    figures("the whole run", ended.took_s, at_most=CONNECT_S)
