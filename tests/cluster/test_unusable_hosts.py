"""Hosts that can't be used, each in its own way: named, with ssh's own words, and nothing started anywhere.

Those of the fault catalogue are in tests/faults/test_ssh.py.
"""

import os
import signal
import subprocess

import pytest

from tests.cluster.hosts import Site, why_not
from tests.cluster.odd_hosts import (
    HANGING_UP,
    SHORT,
    Bad,
    a_key_it_does_not_know,
    a_login_shell_that_ends,
    a_login_shell_that_prints_without_end,
    a_login_shell_that_refuses,
    a_proxy_at_a_wrong_path,
    a_proxy_that_gives_up,
    a_proxy_that_is_no_program,
    a_proxy_that_is_not_installed,
    a_python_that_does_not_start,
    a_revoked_host_key,
    an_address_of_another_machine,
    assert_refused,
    assert_told,
    behind_a_jump_host_that_forwards_elsewhere,
    behind_a_jump_host_that_forwards_nothing,
    behind_a_jump_host_that_hangs_up,
    behind_a_jump_host_that_is_down,
    behind_an_unknown_jump_host,
    no_algorithm_in_common,
    no_session_for_anybody,
    no_sshd_but_another_service,
    no_sshd_there,
    program,
    python_3_7,
    refusing_its_jump_host,
    too_many_keys,
    unknown_to_its_jump_host,
)
from tests.harness import PATIENCE_S, running

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

BAD = [
    Bad(no_sshd_there, "connection refused", r"connect to host \S+ port 2: Connection refused"),
    Bad(too_many_keys, "authentication failed", r"Too many authentication failures"),
    Bad(no_algorithm_in_common, "no algorithm in common", r"no matching cipher found. Their offer: "),
    Bad(a_python_that_does_not_start, "agent not started", r"python3: version not set"),
    Bad(a_login_shell_that_refuses, "agent not started", r"This account is not available\."),
    Bad(a_login_shell_that_ends, "agent not started", r"no licence"),
    Bad(a_login_shell_that_prints_without_end, "too much output before the agent started", r"65536 bytes"),
    Bad(a_revoked_host_key, "host key revoked", r"revoked by file"),
    Bad(no_sshd_but_another_service, "not an ssh server", r"banner line too long"),
    Bad(no_session_for_anybody, "session refused", r"open failed"),
    Bad(an_address_of_another_machine, "ssh refused its options", r"Cannot assign requested address"),
]
PROXIES = [
    Bad(behind_an_unknown_jump_host, "unknown host", r"Could not resolve hostname no-such-jump"),
    Bad(behind_a_jump_host_that_is_down, "connection refused", r"port 2: Connection refused"),
    Bad(unknown_to_its_jump_host, "unknown to the jump host", r"open failed: connect failed: "),
    Bad(refusing_its_jump_host, "connection refused", r"open failed: connect failed: Connection refused"),
    Bad(behind_a_jump_host_that_forwards_nothing, "jump host refuses to forward", r"administratively prohib"),
    Bad(behind_a_jump_host_that_forwards_elsewhere, "jump host refuses to forward", r"administratively"),
    Bad(a_proxy_that_is_not_installed, "ProxyCommand can't be run", r"no-such-proxy: .*not found"),
    Bad(a_proxy_at_a_wrong_path, "ProxyCommand can't be run", r"/nowhere/proxy: "),
    Bad(a_proxy_that_is_no_program, "ProxyCommand can't be run", r"[Pp]ermission denied"),
]
"""None of these is worth another try."""
DROPPING = [
    Bad(behind_a_jump_host_that_hangs_up, "dropped by the server", r"kex_exchange_identification: "),
    Bad(a_proxy_that_gives_up, "closed by its proxy", r"no tunnel for you"),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.make.__name__)
def test_a_host_that_cannot_be_used_is_named_and_nothing_is_started(bad: Bad, site: Site) -> None:
    assert_told(bad, site, *SHORT)


@pytest.mark.parametrize("bad", PROXIES, ids=lambda bad: bad.make.__name__)
def test_a_jump_host_or_proxy_that_fails_is_told_as_that_and_at_once(bad: Bad, site: Site) -> None:
    ended = assert_told(bad, site, *SHORT)
    tries = [event["failure"] for event in ended.events("LinkEnded") if event["node"] == 1]
    assert len(tries) == 1, f"it was tried again: {tries}"
    assert "MaxStartups" not in ended.block("bad")


@pytest.mark.parametrize("bad", DROPPING, ids=lambda bad: bad.make.__name__)
def test_a_jump_host_or_proxy_that_may_be_overloaded_is_tried_again(bad: Bad, site: Site) -> None:
    ended = assert_told(bad, site, *SHORT)
    assert [event["node"] for event in ended.events("LinkEnded")].count(1) > 1, "it was not tried again"


def test_a_proxy_that_hangs_ends_with_the_run(site: Site) -> None:
    up = site.folder / "up"
    os.mkfifo(up)
    stubborn = f"trap '' HUP TERM; echo up > '{up}'; sleep 1000 </dev/null >/dev/null 2>&1"
    proxy = program(site.folder / "proxy", stubborn)
    site.name("stuck", "host2", ProxyCommand=proxy)
    before = site.processes()
    with running(site.job(["host1", "stuck"])) as run:
        assert up.read_text() == "up\n"
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.stderr
        site.assert_gone(before)


def test_advice_names_the_command_that_shows_it(site: Site) -> None:
    ended = assert_told(Bad(a_login_shell_that_ends, "agent not started", r"no licence"), site, *SHORT)
    told = ended.block("bad").splitlines()[0]
    command = told.split("`")[1]
    assert command.startswith(f"ssh -F {site.ssh_config} ")
    done = subprocess.run(
        command, shell=True, cwd="/", capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stderr.strip()) == (3, "no licence")


def test_all_that_cannot_be_used_are_told_at_once(site: Site) -> None:
    nodes = [
        a_key_it_does_not_know(site, "locked"),
        "host1",
        no_sshd_there(site, "refusing"),
        python_3_7(site, "ancient"),
    ]
    ended = site.run(nodes)
    expected = {
        "locked": ("authentication failed", "Permission denied"),
        "refusing": ("connection refused", "Connection refused"),
        "ancient": ("python too old", "3.7"),
    }
    assert_refused(site, ended, expected)
    assert ended.document["nodes"][1] == {"name": "host1", "phase": "closed", "failure": None}


def test_a_server_that_keeps_hanging_up_is_named_so_when_time_is_over(site: Site) -> None:
    port = site.server("host2", HANGING_UP)
    ended = site.run(["host1", site.name("full", "host2", port)], "--set", "timeouts.connect=8s")
    assert_refused(site, ended, {"full": ("dropped by the server", "kex_exchange_identification: ")})
    assert [event["node"] for event in ended.events("LinkEnded")].count(1) > 1, "it was not tried again"
