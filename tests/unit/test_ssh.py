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


def test_only_the_constant_command_follows_the_host_even_if_that_looks_like_an_option() -> None:
    assert Local().argv() == ["/bin/sh", "-c", SCRIPT]
    argv = Ssh("gpu-a", "me", 2222).argv()
    assert argv[-7:] == ["-l", "me", "-p", "2222", "--", "gpu-a", f"exec /bin/sh -c '{SCRIPT}'"]
    odd = Ssh("-oProxyCommand=id")
    assert odd.argv()[-3:-1] == odd.address_argv()[-2:] == ["--", "-oProxyCommand=id"]


def test_nothing_of_the_job_reaches_a_command_line() -> None:
    text = """{nodes: [{host: gpu-a, env: {A: canary1}, workdir: canary2, python: canary3}, gpu-b],
name: canary4, script: canary5, args: [canary6], env: {B: canary7}, python: canary8, workdir: canary9,
rendezvous: {id: canary10}, logs: {dir: canary11}}"""
    argvs = [node.reach.argv() for node in spec_of(text).nodes]
    assert "canary" not in str(argvs)
    assert [word for word in argvs[0] if word != "gpu-a"] == [word for word in argvs[1] if word != "gpu-b"]


def test_fixed_options_come_before_the_users_and_those_unknown_to_old_clients_are_excused() -> None:
    mine = ("BatchMode=no", "Compression=no", "RequestTTY=force")
    options = options_of(Ssh("a", options=SshOptions(words=mine)).argv())
    first = options.index(mine[0])
    assert tuple(options[first : first + 3]) == mine
    assert {"BatchMode=yes", "RequestTTY=no"} <= {*options[:first]}
    excused = [option.partition("=")[0] for option in options[options.index("IgnoreUnknown=*") + 1 :]]
    assert excused == ["StdinNull", "ForkAfterAuthentication", "SessionType"]


@pytest.mark.parametrize("lease_s", [6, 8, 10, 11, 16, 23, 30, 600])
def test_a_silent_network_counts_as_broken_after_most_of_a_lease(lease_s: int) -> None:
    """ssh gives up four intervals after the last answer."""
    (node,) = spec_of(f"{{nodes: [gpu-a], script: x, timeouts: {{lease: {lease_s}s}}}}").nodes
    given = dict(option.split("=", 1) for option in options_of(node.reach.argv()))
    intervals = int(given["ServerAliveCountMax"]) + 1
    assert lease_s / 2 <= intervals * int(given["ServerAliveInterval"]) <= lease_s


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
    argv = Ssh("a", "me", 5, options).address_argv()
    assert argv == [*["ssh", "-G", "-F", "/j/config", "-o", "Port=7", "-l", "me", "-p", "5", "--", "a"]]


# What ssh's last output means, with OpenSSH 7 to 9

_GONE = "kex_exchange_identification: Connection closed by remote host"
_STRICT = "you have requested strict checking."
_UNVERIFIED = "Host key verification failed."
_BEHIND = f"{_GONE} / Connection closed by UNKNOWN port 65535"
_CHANGED = "@@@@@@@@@@@ / @    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @ / @@@@@@@@@@@"
"""ssh warns so too where it is told not to mind, and goes on."""
_REVOKED = "@@@@@@@@@@@ / @       WARNING: REVOKED HOST KEY DETECTED!               @ / @@@@@@@@@@@"
# ssh may notice this while it still writes.
_CANNOT = "/bin/bash: line 1: exec: /etc/passwd: cannot execute: Permission denied"
_OLD = "Protocol major versions differ: 2 vs. 1"
_CHANNEL = "channel 0: open failed: connect failed: "
_UNFORWARDED = f"stdio forwarding failed / {_BEHIND}"
# "Permission denied" instead of a connection is ICMPv6's "administratively prohibited". A connection that an
# address has closed behind a proxy was that of the jump host's own server.
_EXAMPLES = f"""
REFUSED ssh: connect to host gpu-a port 22: Connection refused
UNREACHABLE ssh: connect to host gpu-a port 22: Connection timed out
UNREACHABLE ssh: connect to host gpu-a port 22: No route to host
UNREACHABLE ssh: connect to host fe80::1 port 22: Network is unreachable
UNREACHABLE ssh: connect to host gpu-a port 22: Host is down
UNREACHABLE ssh: connect to host 2001:db8::1 port 22: Permission denied
UNRESOLVED ssh: Could not resolve hostname gpu-a: Name or service not known
AUTHENTICATION Permission denied (publickey).
AUTHENTICATION Load key "/home/me/.ssh/id_rsa": Permission denied / me@gpu-a: Permission denied (publickey).
AUTHENTICATION {_CHANGED} / me@gpu-a: Permission denied (publickey).
AUTHENTICATION Received disconnect from ::1: 2: Too many authentication failures / Disconnected from ::1
HOST_KEY {_UNVERIFIED}
HOST_KEY No ED25519 host key is known for gpu-a and {_STRICT} / {_UNVERIFIED}
HOST_KEY {_CHANGED} / No ED25519 host key is known for b and {_STRICT}
HOST_KEY_CHANGED {_CHANGED} / Host key for gpu-a has changed and {_STRICT} / {_UNVERIFIED}
HOST_KEY_CHANGED RSA host key for gpu-a has changed and {_STRICT}
HOST_KEY_REVOKED {_REVOKED} / The ED25519 host key for gpu-a is marked as revoked. / {_UNVERIFIED}
HOST_KEY_REVOKED ED25519 host key for gpu-a was revoked and {_STRICT}
HOST_KEY_REVOKED Host key ED25519 SHA256:miF revoked by file /etc/ssh/revoked / {_UNVERIFIED}
DROPPED {_GONE}
DROPPED ssh_exchange_identification: Connection closed by remote host
DROPPED kex_exchange_identification: banner line 0: Exceeded MaxStartups / {_GONE}
DROPPED kex_exchange_identification: banner line 0: Not allowed at this time / {_GONE}
DROPPED kex_exchange_identification: read: Connection reset by peer / Connection reset by 10.0.0.1 port 22
DROPPED Connection closed by 10.0.0.1 port 22
DROPPED ssh: connect to host gpu-a port 22: Connection reset by peer
DROPPED {_GONE} / Connection closed by 10.0.0.1 port 22 / {_BEHIND}
PROXY {_BEHIND}
PROXY Authorised use only; intruders will not be found / {_BEHIND}
PROXY ModuleNotFoundError: No module named 'nothing' / {_BEHIND}
NO_PROXY /bin/bash: line 1: exec: nc: not found / {_BEHIND}
NO_PROXY /bin/bash: line 1: /nowhere/proxy: No such file or directory / {_BEHIND}
NO_PROXY {_CANNOT} / {_BEHIND}
NO_PROXY /usr/bin/dash: 1: exec: nc: not found / {_BEHIND}
NO_PROXY /bin/sh: 1: exec: /etc/passwd: Permission denied / {_BEHIND}
NO_PROXY zsh:1: command not found: nc / {_BEHIND}
NO_PROXY zsh:1: no such file or directory: /nowhere/proxy / {_BEHIND}
NO_PROXY zsh:1: permission denied: /etc/passwd / {_BEHIND}
NO_PROXY nc: Command not found. / {_BEHIND}
NO_PROXY /etc/passwd: Permission denied. / {_BEHIND}
NO_PROXY fish: Unknown command: nc / fish: / exec nc x / ^~~~~~~~~^ / {_BEHIND}
NO_PROXY {_CANNOT} / banner exchange: Connection to UNKNOWN port 65535: Broken pipe
FORWARDING channel 0: open failed: administratively prohibited: open failed / {_UNFORWARDED}
JUMP_UNRESOLVED {_CHANNEL}Temporary failure in name resolution / {_UNFORWARDED}
JUMP_UNRESOLVED {_CHANNEL}gpu-a: Name or service not known / {_UNFORWARDED}
NOT_SSH kex_exchange_identification: banner line too long
NOT_SSH banner exchange: Connection to 10.0.0.1 port 80: invalid format
NOT_SSH {_OLD} / banner exchange: Connection to 10.0.0.1 port 22: could not read protocol version
SHARING unix_listener: cannot bind to path /root/.ssh/distlaunch-91c6.wXK: No such file or directory
SHARING unix_listener: path "/long/.ssh/distlaunch-91c6.wXK" too long for Unix domain socket
SHARING ControlPath too long ('/long/.ssh/distlaunch-91c6' >= 108 bytes)
ALGORITHM Unable to negotiate with ::1 port 22: no matching host key type found. Their offer: ssh-rsa
SESSION {_CHANNEL}open failed
SESSION exec request failed on channel 0
SILENT Connection timed out during banner exchange / Connection to 10.0.0.1 port 22 timed out
SILENT Connection to 10.0.0.1 port 22 timed out
SILENT banner exchange: Connection to 10.0.0.1 port 22: Connection timed out
BAD_OPTION command-line: line 0: Bad configuration option: bogus
BAD_OPTION command-line line 0: unsupported option "maybe".
BAD_OPTION /j/config line 2: unsupported option "maybe". / /j/config: terminating, 1 bad configuration options
BAD_OPTION Can't open user config file /j/config: No such file or directory
BAD_OPTION Bad owner or permissions on /home/me/.ssh/config
BAD_OPTION bind 192.0.2.7: Cannot assign requested address / ssh: connect to host ::1 port 22: failure
BAD_OPTION getifaddrs: eth99: no suitable addresses / ssh: connect to host ::1 port 22: failure
LOST
LOST Timeout, server gpu-a not responding.
LOST Connection to gpu-a closed by remote host.
LOST bash: /root/.bashrc: Permission denied / Connection to gpu-a closed by remote host.
NO_PYTHON {NO_PYTHON}
NO_PYTHON bash: /root/.bashrc: Permission denied / {NO_PYTHON}
OLD_PYTHON {TOO_OLD} 3.6.9 (default, Jul 17 2020)
OLD_PYTHON Unknown option: -I / usage: python [option] ... [-c cmd | -m mod | file | -]
"""
"""A kind of failure in each line, and ssh's words; " / " stands for the end of a line."""
EXAMPLES = [(Kind[line.split()[0]], line.partition(" ")[2]) for line in _EXAMPLES.strip().splitlines()]
WORDS = dict(reversed(EXAMPLES))
"""The first example of each kind."""
OF_SCHEDULERS = {Kind.NO_ALLOCATION, Kind.NO_SCHEDULER, Kind.NODE_DOWN, Kind.STEP_REFUSED, Kind.TASK_REFUSED}
OF_SSH = {*Kind} - OF_SCHEDULERS
OF_SSH -= {Kind.NO_RUNTIME, Kind.NO_IMAGE, Kind.ABSENT}
"""All kinds but those of Slurm, containers and joined launchers."""


def test_every_kind_of_ssh_failure_has_an_example() -> None:
    assert OF_SSH - {*WORDS} == {Kind.PROTOCOL, Kind.NOISE, Kind.UNSTARTED}


def test_a_status_other_than_255_is_the_nodes_shells() -> None:
    failure = classify("bash: Permission denied (publickey)", status=3, noise="Welcome!")
    words = "bash: Permission denied (publickey)\nWelcome!\nexited with status 3 before the agent started"
    assert failure == LinkFailure(Kind.UNSTARTED, words)
    assert classify("a: Permission denied (publickey).", status=255).kind is Kind.AUTHENTICATION
    assert classify("a: Permission denied (publickey).", status=255, booted=True).kind is Kind.LOST


def test_a_killed_ssh_is_a_lost_link() -> None:
    lost = LinkFailure(Kind.LOST, "ssh on this machine was killed by signal 9 (SIGKILL)")
    assert classify("", status=-9) == classify("", status=-9, booted=True) == lost
    either = "its agent exited, or a signal stopped ssh on this machine"  # it may have been a SIGTERM
    assert classify("", status=255, booted=True) == LinkFailure(Kind.LOST, either)


@pytest.mark.parametrize(("kind", "words"), EXAMPLES)
def test_understands_ssh_errors(kind: Kind, words: str) -> None:
    failure = classify(words.replace(" / ", "\n"))
    assert failure.kind is kind
    assert classify(words.replace(" / ", "\r\n") + "\r\n") == failure


KINDS = (Kind.UNRESOLVED, Kind.REFUSED, Kind.UNREACHABLE, Kind.AUTHENTICATION, Kind.HOST_KEY)
JUMPS = [
    *((kind, WORDS[kind]) for kind in KINDS),
    (Kind.REFUSED, f"{_CHANNEL}Connection refused\nstdio forwarding failed"),
    (Kind.UNREACHABLE, f"{_CHANNEL}No route to host\nstdio forwarding failed"),
    (Kind.UNREACHABLE, f"{_CHANNEL}open failed\nstdio forwarding failed"),
]


@pytest.mark.parametrize(("kind", "words"), JUMPS)
def test_a_jump_hosts_failure_counts_and_is_not_retried(kind: Kind, words: str) -> None:
    for more in (_GONE, _BEHIND.replace(" / ", "\n")):
        failure = classify(f"{words}\n{more}")
        assert failure.kind is kind and not failure.worth_retrying


def test_without_ssh_output_other_evidence_counts() -> None:
    assert classify("", timed_out=True).kind is Kind.SILENT
    noise = classify("Welcome!\n", protocol_error="x bytes came")
    assert noise == LinkFailure(Kind.NOISE, "Welcome!\nx bytes came")
    assert classify("", booted=True, protocol_error="a frame is too long").kind is Kind.PROTOCOL
    assert classify(_UNVERIFIED, timed_out=True, protocol_error="x").kind is Kind.HOST_KEY


# What the user can do

ODD = Ssh("gpu-a", "me", 2222, SshOptions(config="/my job/ssh_config", words=("Compression=no",)))
BY_HAND = "ssh -F '/my job/ssh_config' -o Compression=no -l me -p 2222 gpu-a"


@pytest.mark.parametrize("reach", [Local(), PLAIN, ODD])
def test_each_kind_of_failure_has_complete_advice(reach: Transport) -> None:
    for kind in OF_SSH:
        advice = reach.advice(LinkFailure(kind), None)
        assert advice and not set(advice.replace("ssh: {options: […]}", "")) & set("{}")
        assert not (reach.here and "`ssh" in advice)


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
    assert words[:4] == ["-o", "BatchMode=yes", "-o", "ControlPath=none"]
    assert words[-2:] == ["gpu-a", "true"]


def test_advice_removes_a_changed_key_from_its_file() -> None:
    words = "Offending ED25519 key in /my home/known_hosts:7\nHost key for [gpu-a]:2222 has changed and"
    advice = ODD.advice(classify(f"{words} {_STRICT}\n{_UNVERIFIED}"), None)
    assert "`ssh-keygen -f '/my home/known_hosts' -R '[gpu-a]:2222'`" in advice
    assert "intercept" in advice


def test_advice_names_a_failing_jump_host() -> None:
    behind = _BEHIND.replace(" / ", "\n")
    behind_it = classify(f"{WORDS[Kind.REFUSED]}\n{behind}")
    there = f"{_CHANNEL}Connection refused\nstdio forwarding failed"
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
