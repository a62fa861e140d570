"""Hosts that can't be used, each in its own way: named, with ssh's own words, and nothing started anywhere.

Those of the fault catalogue are in tests/faults/test_ssh.py.
"""

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
    a_python_that_does_not_start,
    assert_refused,
    assert_told,
    no_algorithm_in_common,
    no_sshd_there,
    python_3_7,
    too_many_keys,
)

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

BAD = [
    Bad(no_sshd_there, "connection refused", r"connect to host \S+ port 2: Connection refused"),
    Bad(too_many_keys, "authentication failed", r"Too many authentication failures"),
    Bad(no_algorithm_in_common, "ssh refused its options", r"no matching cipher found. Their offer: "),
    Bad(a_python_that_does_not_start, "agent not started", r"python3: version not set"),
    Bad(a_login_shell_that_refuses, "agent not started", r"This account is not available\."),
    Bad(a_login_shell_that_ends, "agent not started", r"no licence"),
    Bad(a_login_shell_that_prints_without_end, "not an agent of this version", r"65536 bytes"),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.make.__name__)
def test_a_host_that_cannot_be_used_is_named_and_nothing_is_started(bad: Bad, site: Site) -> None:
    assert_told(bad, site, *SHORT)


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
