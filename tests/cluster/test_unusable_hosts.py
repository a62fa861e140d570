"""Hosts that can't be used, each in its own way: named, with ssh's own words, and nothing started anywhere.

Those of the fault catalog are in tests/faults/test_ssh.py.
"""

import os
import signal
from collections.abc import Callable

from tests.cluster.hosts import Node, Site
from tests.cluster.odd_hosts import (
    HANGING_UP,
    Bad,
    Make,
    another_key,
    assert_each_told,
    reached,
    with_rc_file,
)
from tests.harness import completed, program, running


def behind_sshd(of_server: str, **settings: str) -> Make:
    """A host whose sshd has a setting."""
    return lambda site, name: site.name(name, "host2", site.sshd("host2", of_server), **settings)


def behind_server(code: str) -> Make:
    """A host where another program answers."""
    return lambda site, name: site.name(name, "host2", site.server("host2", code))


def by_jump(at: Callable[[Site], int] = lambda site: 22, **settings: str) -> Make:
    """A host behind a jump host that has this port and settings."""
    return lambda site, name: site.name(
        name, "host2", ProxyJump=site.name(f"jump-to-{name}", "host1", at(site), **settings)
    )


def too_many_keys(site: Site, name: str) -> Node:
    return behind_sshd("MaxAuthTries 1", IdentityFile=another_key(site))(site, name)


def revoked_host_key(site: Site, name: str) -> Node:
    return reached(RevokedHostKeys=str(site.bed.hosts["host2"].directory / "host_key.pub"))(site, name)


def python_that_does_not_start(site: Site, name: str) -> Node:
    shim = program(site.directory / "shim", "echo 'python3: version not set' >&2; exit 126")
    return {"host": site.name(name, "host2"), "python": shim}


def login_shell_that_refuses(site: Site, name: str) -> Node:
    shell = program(site.directory / "nologin", "echo This account is not available.; exit 1")
    return site.name(name, "host2", site.sshd("host2", over=site.login(site.directory, shell)))


def behind_rc_file(text: str) -> Make:
    """A host whose login shell reads an rc file with this text."""
    return lambda site, name: with_rc_file(site, name, text)


def proxy_that_gives_up(site: Site, name: str) -> Node:
    proxy = program(site.directory / "proxy", "echo proxy: no tunnel for you >&2; exit 1")
    return reached(ProxyCommand=proxy)(site, name)


SENDS_NO_BANNER = "while True: peer = server.accept()[0]; peer.sendall(b'x' * 100000); peer.close()"
REFUSED, NOT_RUN = "connection refused", "ProxyCommand can't be run"
DROPPED = ("dropped by the server", r"kex_exchange_identification: ")
# ssh tells of ciphers on a level that LogLevel may silence.
CIPHERS = behind_sshd("Ciphers aes128-ctr", Ciphers="aes256-ctr", LogLevel="ERROR")
BOUND = reached(BindAddress="192.0.2.7")  # an address of another machine
UNKNOWN = reached(HostName="no-such-host.invalid", ProxyJump="host1")
BAD = {
    "no-sshd": Bad(reached(2), REFUSED, r"connect to host \S+ port 2: Connection refused"),
    "too-many-keys": Bad(too_many_keys, "authentication failed", r"Too many authentication failures"),
    "ciphers": Bad(CIPHERS, "no algorithm in common", r"no matching cipher found. Their offer: "),
    "python": Bad(python_that_does_not_start, "agent not started", r"python3: version not set"),
    "nologin": Bad(login_shell_that_refuses, "agent not started", r"This account is not available\."),
    "rc-file": Bad(behind_rc_file("yes"), "too much output before the agent started", r"65536 bytes"),
    "revoked": Bad(revoked_host_key, "host key revoked", r"revoked by file"),
    "another-service": Bad(behind_server(SENDS_NO_BANNER), "not an ssh server", r"banner line too long"),
    "no-session": Bad(behind_sshd("MaxSessions 0"), "session refused", r"open failed"),
    "address": Bad(BOUND, "ssh refused its options", r"Cannot assign requested address"),
}
PROXIES = {
    "name": Bad(by_jump(HostName="no.invalid"), "unknown host", r"Could not resolve hostname no\.invalid"),
    "down": Bad(by_jump(lambda site: 2), REFUSED, r"port 2: Connection refused"),
    "unknown-to-it": Bad(UNKNOWN, "unknown to the jump host", r"open failed: connect failed: "),
    "no-forwarding": Bad(
        by_jump(lambda site: site.sshd("host1", "AllowTcpForwarding no")),
        *("jump host refuses to forward", r"administratively prohib"),
    ),
    "no-proxy": Bad(reached(ProxyCommand="no-such-proxy %h"), NOT_RUN, r"no-such-proxy: .*not found"),
    "no-program": Bad(reached(ProxyCommand="/dev/null"), NOT_RUN, r"[Pp]ermission denied"),
}
"""None of these is worth another try."""
DROPPING = {
    "server": Bad(behind_server(HANGING_UP), *DROPPED),
    "jump-host": Bad(by_jump(lambda site: site.server("host1", HANGING_UP)), *DROPPED),
    "proxy": Bad(proxy_that_gives_up, "closed by its proxy", r"no tunnel for you"),
}


def test_names_unusable_hosts_and_starts_nothing(site: Site) -> None:
    assert_each_told(site, BAD)


def test_names_the_failures_of_jump_hosts_and_proxies_at_once(site: Site) -> None:
    ended = assert_each_told(site, PROXIES)
    tried = [event["node"] for event in ended.events("LinkEnded")]
    for node, name in enumerate(PROXIES, 1):
        assert tried.count(node) == 1, f"{name} was tried again"
        assert "MaxStartups" not in ended.block(name)


def test_tries_again_what_may_be_overloaded(site: Site) -> None:
    ended = assert_each_told(site, DROPPING, "--set", "timeouts.connect=10s")
    tried = [event["node"] for event in ended.events("LinkEnded")]
    for node, name in enumerate(DROPPING, 1):
        assert tried.count(node) > 1, f"{name} was not tried again"


def test_a_proxy_that_hangs_ends_with_the_run(site: Site) -> None:
    up = site.directory / "up"
    os.mkfifo(up)
    stubborn = f"trap '' HUP TERM; echo up > '{up}'; sleep 1000 </dev/null >/dev/null 2>&1"
    proxy = program(site.directory / "proxy", stubborn)
    site.name("stuck", "host2", ProxyCommand=proxy)
    before = site.processes()
    with running(site.job(["host1", "stuck"])) as run:
        assert up.read_text() == "up\n"
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.stderr
        site.assert_gone(before)


def test_names_a_login_shell_that_ends_with_the_command_that_shows_it(site: Site) -> None:
    bad = Bad(behind_rc_file("echo no licence >&2; exit 3"), "agent not started", r"no licence")
    told = assert_each_told(site, {"bad": bad}).block("bad").splitlines()[0]
    command = told.split("`")[1]
    assert command.startswith(f"ssh -F {site.ssh_config} ")
    done = completed(["/bin/sh", "-c", command], cwd="/")
    assert (done.returncode, done.stderr.strip()) == (3, "no licence")


def test_refuses_a_host_that_is_listed_under_two_names(site: Site) -> None:
    ended = site.run(["host1", "host2", site.name("alias", "host2")])
    assert ended.status == 2
    assert "nodes[2]: alias and host2 are the same host; remove one" in ended.stderr
    assert site.started() == []
