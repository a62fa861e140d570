"""Nodes reached over ssh: command lines, errors with advice, and the script that starts an agent."""

import itertools
import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.agent.wire import READY_MARKER
from distlaunch.transports.failure import NO_PYTHON, TOO_OLD, Kind, LinkFailure, ProcessEnd
from distlaunch.transports.handshake import SCRIPT
from distlaunch.transports.ssh import Ssh, on_the_way
from distlaunch.transports.transport import Local, SshOptions, Transport
from tests.unit.samples import bounded, spec_of

PLAIN = Ssh("a")


def classify(stderr: str, **more: Any) -> LinkFailure:
    """What it means that ssh, or the node behind it, ends so."""
    return PLAIN.failure(ProcessEnd(stderr, **more))


def options_of(argv: list[str]) -> list[str]:
    return [value for flag, value in itertools.pairwise(argv) if flag == "-o"]


# The command line


def test_only_the_constant_command_follows_the_host() -> None:
    assert Local().argv() == ["/bin/sh", "-c", SCRIPT]
    argv = Ssh("gpu-a", "me", 2222).argv()
    assert argv[-7:] == ["-l", "me", "-p", "2222", "--", "gpu-a", f"exec /bin/sh -c '{SCRIPT}'"]


def test_a_host_like_an_option_comes_after_two_dashes() -> None:
    argv = Ssh("-oProxyCommand=id").argv()
    assert argv[-3:-1] == ["--", "-oProxyCommand=id"]
    assert Ssh("-oProxyCommand=id").address_argv()[-2:] == ["--", "-oProxyCommand=id"]


def test_nothing_of_the_job_reaches_a_command_line() -> None:
    text = """
name: canary1
nodes: [{host: gpu-a, env: {A: canary2}, workdir: canary3, python: canary4}, gpu-b]
script: canary5
args: [canary6]
env: {B: canary7}
python: canary8
workdir: canary9
rendezvous: {id: canary10}
logs: {dir: canary11}
"""
    spec = spec_of(text)
    argvs = [node.reach.argv() for node in spec.nodes]
    assert "canary" not in str(argvs)
    assert [word for word in argvs[0] if word != "gpu-a"] == [word for word in argvs[1] if word != "gpu-b"]


def test_fixed_options_come_before_the_users() -> None:
    mine = ("BatchMode=no", "Compression=no", "RequestTTY=force")
    options = options_of(Ssh("a", options=SshOptions(words=mine)).argv())
    first = options.index(mine[0])
    assert tuple(options[first : first + 3]) == mine
    assert options.index("BatchMode=yes") < options.index("BatchMode=no")
    assert options.index("RequestTTY=no") < options.index("RequestTTY=force")


def test_options_unknown_to_old_clients_follow_ignore_unknown() -> None:
    options = options_of(PLAIN.argv())
    excused = options[options.index("IgnoreUnknown=*") + 1 :]
    assert [option.partition("=")[0] for option in excused] == [
        "StdinNull",
        "ForkAfterAuthentication",
        "SessionType",
    ]


def test_sets_ssh_options_but_leaves_host_keys_to_the_users_ssh() -> None:
    plain = options_of(PLAIN.argv())
    assert "HostKey" not in str(PLAIN.argv()[:-1]) and "KnownHosts" not in str(PLAIN.argv()[:-1])
    assert {"ControlMaster=no", "ControlPath=none"} <= {*plain}, "never the user's own master"
    assert {"ForwardAgent=no", "ClearAllForwardings=yes"} <= {*plain}
    persistent = options_of(Ssh("a", options=SshOptions(persist_s=60)).argv())
    assert {"ControlMaster=auto", "ControlPersist=60"} <= {*persistent}
    assert "ConnectTimeout=7" in options_of(Ssh("a", options=SshOptions(connect_s=7)).argv())


def test_resolves_with_the_jobs_ssh_config() -> None:
    options = SshOptions(config="/j/config", words=("Port=7",))
    assert Ssh("a", options=options).argv()[:3] == ["ssh", "-F", "/j/config"]
    assert Ssh("a", "me", 5, options).address_argv() == [
        *["ssh", "-G", "-F", "/j/config", "-o", "Port=7", "-l", "me", "-p", "5", "--", "a"]
    ]


# What ssh's last output means, with OpenSSH 7 to 9

_GONE = "kex_exchange_identification: Connection closed by remote host"
_STRICT = "you have requested strict checking."
_UNVERIFIED = "Host key verification failed."
_BEHIND = f"{_GONE} / Connection closed by UNKNOWN port 65535"
_CHANGED = "@@@@@@@@@@@ / @    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @ / @@@@@@@@@@@"
"""ssh warns so too where it is told not to mind, and goes on."""


# " / " stands for the end of a line.
WORDS = {
    Kind.REFUSED: ["ssh: connect to host gpu-a port 22: Connection refused"],
    Kind.UNREACHABLE: [
        "ssh: connect to host gpu-a port 22: Connection timed out",
        "ssh: connect to host gpu-a port 22: No route to host",
        "ssh: connect to host fe80::1 port 22: Network is unreachable",
        "ssh: connect to host gpu-a port 22: Host is down",
        "ssh: connect to host 2001:db8::1 port 22: Permission denied",  # ICMPv6 "administratively prohibited"
    ],
    Kind.UNRESOLVED: ["ssh: Could not resolve hostname gpu-a: Name or service not known"],
    Kind.AUTHENTICATION: [
        "Permission denied (publickey).",
        'Load key "/home/me/.ssh/id_rsa": Permission denied / me@gpu-a: Permission denied (publickey).',
        "sign_and_send_pubkey: signing failed: agent refused operation / a: Permission denied (publickey).",
        f"{_CHANGED} / me@gpu-a: Permission denied (publickey).",
        "Received disconnect from ::1 port 22:2: Too many authentication failures / Disconnected from ::1",
        "Received disconnect from 10.0.0.1: 2: Too many authentication failures for me",
    ],
    Kind.HOST_KEY: [
        "Host key verification failed.",
        f"No ED25519 host key is known for gpu-a and {_STRICT} / {_UNVERIFIED}",
        f"{_CHANGED} / No ED25519 host key is known for b and you have requested strict checking.",
    ],
    Kind.HOST_KEY_CHANGED: [
        f"{_CHANGED} / Host key for gpu-a has changed and {_STRICT} / {_UNVERIFIED}",
        "RSA host key for gpu-a has changed and you have requested strict checking.",
    ],
    Kind.HOST_KEY_REVOKED: [
        (
            "@@@@@@@@@@@ / @       WARNING: REVOKED HOST KEY DETECTED!               @ / @@@@@@@@@@@"
            f" / The ED25519 host key for gpu-a is marked as revoked. / {_UNVERIFIED}"
        ),
        "ED25519 host key for gpu-a was revoked and you have requested strict checking.",
        "Host key ED25519 SHA256:miF revoked by file /etc/ssh/revoked / Host key verification failed.",
    ],
    Kind.DROPPED: [
        _GONE,
        f"kex_exchange_identification: banner line 0: Exceeded MaxStartups / {_GONE}",
        f"kex_exchange_identification: banner line 0: Not allowed at this time / {_GONE}",
        "kex_exchange_identification: read: Connection reset by peer",
        "kex_exchange_identification: read: Connection reset by peer / Connection reset by 10.0.0.1 port 22",
        "ssh_exchange_identification: Connection closed by remote host",
        "ssh_exchange_identification: read: Connection reset by peer",
        "Connection closed by 10.0.0.1 port 22",
        "Connection reset by 10.0.0.1 port 22",
        "ssh: connect to host gpu-a port 22: Connection reset by peer",
        f"{_GONE} / Connection closed by 10.0.0.1 port 22 / {_BEHIND}",  # the jump host's own server
    ],
    Kind.PROXY: [
        _BEHIND,
        f"proxy: tunnel denied / {_BEHIND}",
        f"Authorised use only; intruders will not be found / {_BEHIND}",
        f"ModuleNotFoundError: No module named 'nothing' / {_BEHIND}",
    ],
    Kind.NO_PROXY: [
        f"{words} / {_BEHIND}"
        for words in (
            "/bin/bash: line 1: exec: nc: not found",
            "/bin/bash: line 0: exec: nc: not found",
            "/bin/bash: line 1: /nowhere/proxy: No such file or directory",
            "/bin/bash: line 1: exec: /etc/passwd: cannot execute: Permission denied",
            "/usr/bin/dash: 1: exec: nc: not found",
            "/bin/sh: 1: exec: /etc/passwd: Permission denied",
            "zsh:1: command not found: nc",
            "zsh:1: no such file or directory: /nowhere/proxy",
            "zsh:1: permission denied: /etc/passwd",
            "nc: Command not found.",
            "/etc/passwd: Permission denied.",
            "fish: Unknown command: nc / fish: / exec nc x / ^~~~~~~~~^",
            "/bin/no-such-shell: No such file or directory",
        )
    ]
    + [
        # ssh notices it while it still writes.
        (
            "/bin/bash: line 1: exec: /etc/passwd: cannot execute: Permission denied"
            " / banner exchange: Connection to UNKNOWN port 65535: Broken pipe"
        )
    ],
    Kind.FORWARDING: [
        (
            "channel 0: open failed: administratively prohibited: open failed / stdio forwarding failed"
            f" / {_BEHIND}"
        )
    ],
    Kind.JUMP_UNRESOLVED: [
        f"channel 0: open failed: connect failed: {words} / stdio forwarding failed / {_BEHIND}"
        for words in ("Temporary failure in name resolution", "gpu-a: Name or service not known")
    ],
    Kind.NOT_SSH: [
        (
            "kex_exchange_identification: banner line too long"
            " / banner exchange: Connection to 10.0.0.1 port 80: invalid format"
        ),
        (
            "Protocol major versions differ: 2 vs. 1"
            " / banner exchange: Connection to 10.0.0.1 port 22: could not read protocol version"
        ),
    ],
    Kind.SHARING: [
        "unix_listener: cannot bind to path /root/.ssh/distlaunch-91c6.wXK: No such file or directory",
        'unix_listener: path "/long/.ssh/distlaunch-91c6.wXK" too long for Unix domain socket',
        "ControlPath too long ('/long/.ssh/distlaunch-91c6' >= 108 bytes)",
    ],
    Kind.ALGORITHM: [
        "Unable to negotiate with ::1 port 22: no matching host key type found. Their offer: ssh-rsa"
    ],
    Kind.SESSION: ["channel 0: open failed: connect failed: open failed", "exec request failed on channel 0"],
    Kind.SILENT: [
        "Connection timed out during banner exchange",
        "Connection timed out during banner exchange / Connection to 10.0.0.1 port 22 timed out",
        "banner exchange: Connection to 10.0.0.1 port 22: Connection timed out",
    ],
    Kind.BAD_OPTION: [
        "command-line: line 0: Bad configuration option: bogus",
        'command-line line 0: unsupported option "maybe".',
        "/j/c: line 2: Bad configuration option: bogus / /j/c: terminating, 1 bad configuration options",
        '/j/config line 2: unsupported option "maybe". / /j/config: terminating, 1 bad configuration options',
        "Can't open user config file /j/config: No such file or directory",
        "Bad owner or permissions on /home/me/.ssh/config",
        "bind 192.0.2.7: Cannot assign requested address / ssh: connect to host 10.0.0.1 port 22: failure",
        "getifaddrs: eth99: no suitable addresses / ssh: connect to host 10.0.0.1 port 22: failure",
    ],
    Kind.LOST: [
        "",
        "Timeout, server gpu-a not responding.",
        "Connection to gpu-a closed by remote host.",
        "client_loop: send disconnect: Broken pipe",
        "packet_write_wait: Connection to 10.0.0.1 port 22: Broken pipe",
        "Read from remote host gpu-a: Connection reset by peer",
        "bash: /root/.bashrc: Permission denied / Connection to gpu-a closed by remote host.",
    ],
    Kind.NO_PYTHON: [NO_PYTHON, f"bash: /root/.bashrc: Permission denied / {NO_PYTHON}"],
    Kind.OLD_PYTHON: [
        f"{TOO_OLD} 3.6.9 (default, Jul 17 2020)",
        "Unknown option: -I / usage: python [option] ... [-c cmd | -m mod | file | -]",
    ],
}


SLURMS = {Kind.NO_ALLOCATION, Kind.NODE_DOWN, Kind.STEP_REFUSED, Kind.TASK_REFUSED}
CONTAINERS = {Kind.NO_RUNTIME, Kind.NO_IMAGE}


def test_every_kind_of_ssh_failure_has_an_example() -> None:
    assert set(Kind) - set(WORDS) - SLURMS - CONTAINERS - {Kind.ABSENT} == {
        Kind.PROTOCOL,
        Kind.NOISE,
        Kind.UNSTARTED,
    }


def test_a_status_other_than_255_is_the_nodes_shells() -> None:
    failure = classify("bash: Permission denied (publickey)", status=3, noise="Welcome!")
    assert failure == LinkFailure(
        Kind.UNSTARTED,
        "bash: Permission denied (publickey)\nWelcome!\nexited with status 3 before the agent started",
    )
    assert classify("a: Permission denied (publickey).", status=255).kind is Kind.AUTHENTICATION
    assert classify("a: Permission denied (publickey).", status=255, booted=True).kind is Kind.LOST


@pytest.mark.parametrize("booted", [False, True])
def test_a_killed_ssh_is_a_lost_link(booted: bool) -> None:
    words = "ssh on this machine was killed by signal 9 (SIGKILL)"
    assert classify("", status=-9, booted=booted) == LinkFailure(Kind.LOST, words)


@pytest.mark.parametrize(
    ("kind", "words"),
    [pytest.param(kind, words, id=f"{kind.name}-{words}") for kind in WORDS for words in WORDS[kind]],
)
def test_understands_ssh_errors(kind: Kind, words: str) -> None:
    failure = classify(words.replace(" / ", "\n"))
    assert failure.kind is kind
    assert classify(words.replace(" / ", "\r\n") + "\r\n") == failure


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        *((WORDS[kind][0], kind) for kind in (Kind.UNRESOLVED, Kind.REFUSED, Kind.UNREACHABLE)),
        *((WORDS[kind][0], kind) for kind in (Kind.AUTHENTICATION, Kind.HOST_KEY)),
        ("channel 0: open failed: connect failed: Connection refused\nstdio forwarding failed", Kind.REFUSED),
        (
            "channel 0: open failed: connect failed: No route to host\nstdio forwarding failed",
            Kind.UNREACHABLE,
        ),
        ("channel 0: open failed: connect failed: open failed\nstdio forwarding failed", Kind.UNREACHABLE),
    ],
    ids=lambda value: value.partition("\n")[0][:60] if isinstance(value, str) else value.name,
)
@pytest.mark.parametrize("more", ["", "\nConnection closed by UNKNOWN port 65535"], ids=["", "more words"])
def test_a_jump_hosts_failure_counts_and_is_not_retried(words: str, kind: Kind, more: str) -> None:
    failure = classify(f"{words}\n{_GONE}{more}")
    assert failure.kind is kind
    assert not failure.worth_retrying


def test_without_ssh_output_other_evidence_counts() -> None:
    assert classify("", timed_out=True).kind is Kind.SILENT
    assert classify("Welcome!\n", protocol_error="x bytes came") == LinkFailure(
        Kind.NOISE, "Welcome!\nx bytes came"
    )
    assert classify("", booted=True, protocol_error="a frame is too long").kind is Kind.PROTOCOL
    assert classify("Host key verification failed.", timed_out=True, protocol_error="x").kind is Kind.HOST_KEY


# What the user can do

ODD = Ssh("gpu-a", "me", 2222, SshOptions(config="/my job/ssh_config", words=("Compression=no",)))
BY_HAND = "ssh -F '/my job/ssh_config' -o Compression=no -l me -p 2222 gpu-a"


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind not in {*SLURMS, *CONTAINERS, Kind.ABSENT}])
@pytest.mark.parametrize("reach", [Local(), PLAIN, ODD])
def test_each_kind_of_failure_has_complete_advice(kind: Kind, reach: Transport) -> None:
    advice = reach.advice(LinkFailure(kind), None)
    assert advice and not set(advice.replace("ssh: {options: […]}", "")) & set("{}")
    if reach.here:
        assert "`ssh" not in advice


def test_commands_in_advice_can_be_pasted() -> None:
    assert f"`{BY_HAND} python3 -V`" in ODD.advice(LinkFailure(Kind.UNSTARTED), None)
    assert f"`{BY_HAND} /v/bin/python -V`" in ODD.advice(LinkFailure(Kind.UNSTARTED), "/v/bin/python")
    advice = PLAIN.advice(LinkFailure(Kind.UNSTARTED), "/my env/python")
    _, host, remote = shlex.split(advice.split("`")[1])
    assert (host, shlex.split(remote)) == ("a", ["/my env/python", "-V"])
    asking = BY_HAND.replace("ssh", "ssh -o StrictHostKeyChecking=ask", 1)
    assert f"`{asking}`" in ODD.advice(LinkFailure(Kind.HOST_KEY), None)
    assert "`python3 -V`" in Local().advice(LinkFailure(Kind.UNSTARTED), None)
    assert "`python:`" in Local().advice(LinkFailure(Kind.NO_PYTHON), None)
    _, *words = shlex.split(ODD.advice(LinkFailure(Kind.AUTHENTICATION), None).split("`")[1])
    assert words[:2] == ["-o", "BatchMode=yes"] and words[-2:] == ["gpu-a", "true"]


def test_advice_removes_a_changed_key_from_its_file() -> None:
    words = (
        "Offending ED25519 key in /my home/known_hosts:7\n"
        "Host key for [gpu-a]:2222 has changed and you have requested strict checking.\n"
        "Host key verification failed."
    )
    advice = ODD.advice(classify(words), None)
    assert "`ssh-keygen -f '/my home/known_hosts' -R '[gpu-a]:2222'`" in advice
    assert "intercept" in advice


def test_advice_names_a_failing_jump_host() -> None:
    behind = _BEHIND.replace(" / ", "\n")
    behind_it = classify(f"ssh: connect to host jump port 22: Connection refused\n{behind}")
    there = "channel 0: open failed: connect failed: Connection refused\nstdio forwarding failed"
    assert (behind_it.kind, on_the_way(behind_it)) == (Kind.REFUSED, True)
    assert "jump host" in PLAIN.advice(behind_it, None)
    assert "jump host" not in PLAIN.advice(classify(f"{there}\n{behind}"), None)


@given(st.text(max_size=80))
@bounded()
def test_any_output_is_a_failure_and_is_kept(words: str) -> None:
    failure = classify(words)
    assert failure.words.split() == words.replace("\r", "").split()


# The script that starts an agent


def test_the_script_needs_no_quotes_and_does_not_contain_the_marker() -> None:
    assert not set(SCRIPT) & set("'!\n")
    assert SCRIPT.isascii()
    assert READY_MARKER.strip().decode() not in SCRIPT, "an echo of the command is no answer"


def test_limits_sshs_memory_unless_the_user_sets_it() -> None:
    mine = {"PATH": "/bin", "MALLOC_TRIM_THRESHOLD_": "1"}
    told = Ssh("a").environment(mine)
    assert {**told, **mine} == told
    assert int(told["MALLOC_MMAP_THRESHOLD_"]) > 2 << 20
