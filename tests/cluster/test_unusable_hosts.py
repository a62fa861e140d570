"""Hosts that can't be used, each in its own way: named, with ssh's own words, and nothing started anywhere.

Also those that only look unusable (odd login shells, a server that sheds load, a hostile ssh_config), and
one that is lost because its session is killed.
"""

import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cluster.hosts import GONE_S, Ended, Node, Site, find, parent_of, why_not
from tests.harness import PATIENCE_S, kill, running, wait_gone

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

UNREACHABLE, NODE_LOST = 69, 71
CONNECT_S = 30.0
"""The default of timeouts.connect: whatever is wrong with hosts is told by then."""
SHORT = ("--set", "timeouts.connect=4s")


def assert_refused(site: Site, ended: Ended, expected: dict[str, tuple[str, str]]) -> None:
    """The run failed for exactly these nodes: name → (kind, a pattern that its words have)."""
    assert ended.status == ended.document["exit_status"] == UNREACHABLE, ended.stderr
    kinds = {node: kind for node, (kind, _) in ended.failures.items()}
    assert kinds == {node: kind for node, (kind, _) in expected.items()}, ended.stderr
    for node, (kind, words) in expected.items():
        assert re.search(words, ended.failures[node][1]), ended.failures[node]
        told = ended.block(node)
        assert told.startswith(f"distlaunch: {node}: {kind}; ")
        assert re.search(words, told), told
    nodes = ended.document["nodes"]
    names = ", ".join(node["name"] for node in nodes if node["name"] in expected)
    count = f"{len(expected)} of {len(nodes)} nodes can't be used ({names}); nothing was started"
    assert f"distlaunch: {count}\n" in ended.stderr
    assert ended.document["cause"]["text"] == count
    assert ended.document["workers"] == [] and site.started() == []


# One host that can't be used. Each function makes it, and returns the job's entry for it.


def no_sshd_there(site: Site, name: str) -> Node:
    return site.name(name, "host2", port=2)


def no_such_name(site: Site, name: str) -> Node:
    return site.name(name, "host2", HostName="no-such-host.invalid")


def a_key_it_does_not_know(site: Site, name: str) -> Node:
    return site.name(name, "host2", IdentityFile=another_key(site))


def too_many_keys(site: Site, name: str) -> Node:
    port = site.sshd("host2", "MaxAuthTries 1")
    return site.name(name, "host2", port, IdentityFile=another_key(site))


def asks_for_a_password(site: Site, name: str) -> Node:
    port = site.sshd("host2", "PubkeyAuthentication no", "PasswordAuthentication yes", "PermitRootLogin yes")
    return site.name(name, "host2", port, PasswordAuthentication="yes")


def another_host_key(site: Site, name: str) -> Node:
    return site.name(name, "host2", HostKeyAlias="host1")


def no_known_host_key(site: Site, name: str) -> Node:
    return site.name(name, "host2", HostKeyAlias=name)


def a_host_key_to_ask_about(site: Site, name: str) -> Node:
    return site.name(name, "host2", HostKeyAlias=name, StrictHostKeyChecking="ask")


def no_algorithm_in_common(site: Site, name: str) -> Node:
    port = site.sshd("host2", "Ciphers aes128-ctr")
    # ssh tells of this on a level that LogLevel may silence.
    return site.name(name, "host2", port, Ciphers="aes256-ctr", LogLevel="ERROR")


def no_python_of_that_name(site: Site, name: str) -> Node:
    return {"host": site.name(name, "host2"), "python": "python-that-is-missing"}


def no_python_at_that_path(site: Site, name: str) -> Node:
    return {"host": site.name(name, "host2"), "python": "/nowhere/bin/python3"}


def no_python_at_all(site: Site, name: str) -> Node:
    bare = site.folder / "bare"
    bare.mkdir()
    shutil.copy("/bin/sh", bare)  # which may be in the same folder as python
    # Without rc files too, which might set PATH again.
    over = {Path(sys.executable).parent: bare, **site.login(bare, "/bin/sh")}
    return site.name(name, "host2", site.sshd("host2", f"SetEnv PATH={bare}", over=over))


def python_2_7(site: Site, name: str) -> Node:
    return {"host": site.name(name, "host2"), "python": python(site, "2.7")}


def python_3_6(site: Site, name: str) -> Node:
    return {"host": site.name(name, "host2"), "python": python(site, "3.6")}


def python_3_7(site: Site, name: str) -> Node:
    return {"host": site.name(name, "host2"), "python": python(site, "3.7")}


def a_python_that_does_not_start(site: Site, name: str) -> Node:
    shim = program(site.folder / "shim", "echo 'python3: version not set' >&2; exit 126")
    return {"host": site.name(name, "host2"), "python": shim}


def a_login_shell_that_refuses(site: Site, name: str) -> Node:
    shell = program(site.folder / "nologin", "echo This account is not available.; exit 1")
    return site.name(name, "host2", site.sshd("host2", over=site.login(site.folder, shell)))


def a_login_shell_that_ends(site: Site, name: str) -> Node:
    return with_rc_file(site, name, "echo no licence >&2; exit 3")


def a_login_shell_that_prints_without_end(site: Site, name: str) -> Node:
    return with_rc_file(site, name, "yes")


def silent_once_accepted(site: Site, name: str) -> Node:
    return site.name(name, "host2", site.server("host2", f"peer = server.accept()[0]; {TO_THE_END}"))


def another_key(site: Site) -> str:
    key = site.folder / "another_key"
    if not key.exists():
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True, timeout=PATIENCE_S
        )
    return f'"{key}"'


def with_rc_file(site: Site, name: str, text: str) -> Node:
    """A host whose login shell is a bash with this rc file, which it reads for ssh's commands too."""
    home = site.folder / f"home-of-{name}"
    home.mkdir()
    (home / ".bashrc").write_text(text)
    return site.name(name, "host2", site.sshd("host2", over=site.login(home, installed("bash"))))


def installed(name: str) -> str:
    path = find(name)
    if path is None:
        pytest.skip(f"{name} is missing")
    return path


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def python(site: Site, version: str) -> str:
    """An interpreter of that version, or where there is none, a script that says what it would say."""
    candidates = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
    for candidate in [*map(str, candidates), shutil.which(f"python{version}")]:
        if candidate and version_of(candidate) == version:
            return candidate
    words = "Unknown option: -I" if version < "3" else f'"$5 {version}.0 (made up)"'
    return program(site.folder / f"python{version}", f"echo {words} >&2; exit 2")


def version_of(interpreter: str) -> str:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    asked = subprocess.run(
        [interpreter, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    return asked.stdout.strip()


TO_THE_END = "peer.recv(1 << 20, socket.MSG_WAITALL)"
HANGING_UP = "while True: server.accept()[0].close()"


class Bad(NamedTuple):
    """A way to be unusable: how to make such a host, the kind that is told, and a pattern of the words."""

    make: Callable[[Site, str], Node]
    kind: str
    words: str


BAD = [
    Bad(no_sshd_there, "connection refused", r"connect to host \S+ port 2: Connection refused"),
    Bad(no_such_name, "unknown host", r"Could not resolve hostname no-such-host\.invalid"),
    Bad(a_key_it_does_not_know, "authentication failed", r"Permission denied \(publickey\)"),
    Bad(too_many_keys, "authentication failed", r"Too many authentication failures"),
    Bad(asks_for_a_password, "authentication failed", r"Permission denied \(password\)"),
    Bad(another_host_key, "host key not accepted", r"REMOTE HOST IDENTIFICATION HAS CHANGED"),
    Bad(no_known_host_key, "host key not accepted", r"No \S+ host key is known for bad"),
    Bad(a_host_key_to_ask_about, "host key not accepted", r"Host key verification failed"),
    Bad(no_algorithm_in_common, "ssh refused its options", r"no matching cipher found. Their offer: "),
    Bad(no_python_of_that_name, "no python", r"python-that-is-missing"),
    Bad(no_python_at_that_path, "no python", r"/nowhere/bin/python3"),
    Bad(no_python_at_all, "no python", re.escape(sys.executable) + r".* python3$"),
    Bad(python_2_7, "python too old", r"Unknown option: -I"),
    Bad(python_3_6, "python too old", r"3\.6\.\d"),
    Bad(python_3_7, "python too old", r"3\.7\.\d"),
    Bad(a_python_that_does_not_start, "agent not started", r"python3: version not set"),
    Bad(a_login_shell_that_refuses, "agent not started", r"This account is not available\."),
    Bad(a_login_shell_that_ends, "agent not started", r"no licence"),
    Bad(a_login_shell_that_prints_without_end, "not an agent of this version", r"65536 bytes"),
    Bad(silent_once_accepted, "no answer", r"timed out during banner exchange"),
]
NO_PROMPT = {"SSH_ASKPASS_REQUIRE": "force", "DISPLAY": ":0"}
"""Have ssh ask for passwords, where it may ask at all, by the program in SSH_ASKPASS."""


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.make.__name__)
def test_a_host_that_cannot_be_used_is_named_and_nothing_is_started(bad: Bad, site: Site) -> None:
    asked = site.folder / "asked"
    askpass = program(site.folder / "askpass", f"touch {asked}")
    node = bad.make(site, "bad")
    ended = site.run(["host1", node], *SHORT, env={**NO_PROMPT, "SSH_ASKPASS": askpass})
    assert_refused(site, ended, {"bad": (bad.kind, bad.words)})
    assert not asked.exists()


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


def test_those_that_never_answer_are_told_within_the_default_time(site: Site) -> None:
    """All that waits, waits at the same time here."""
    site.cut("host3")
    greets = f"peer = server.accept()[0]; peer.sendall(b'SSH-2.0-mute\\r\\n'); {TO_THE_END}"
    nodes = [
        "host1",
        "host3",
        site.name("down", "host3", ConnectionAttempts="9"),
        silent_once_accepted(site, "silent"),
        site.name("mute", "host2", site.server("host2", greets)),
        site.name("full", "host2", site.server("host2", HANGING_UP)),
        with_rc_file(site, "waiting", "echo password for the licence server: >&2; cat >/dev/null"),
    ]
    ended = site.run(nodes)
    expected = {
        "host3": ("unreachable", "Connection timed out"),
        "down": ("unreachable", "Connection timed out"),
        "silent": ("no answer", "timed out during banner exchange"),
        "mute": ("no answer", r"Connection to \S+ port \d+ timed out"),
        "full": ("dropped by the server", "kex_exchange_identification: "),
        "waiting": ("no answer", r"(?s)licence server.*no agent after 30 s"),
    }
    assert_refused(site, ended, expected)
    assert ended.took_s < CONNECT_S + 5, "more than its own start and end take"


def test_a_server_that_keeps_hanging_up_is_named_so_when_time_is_over(site: Site) -> None:
    port = site.server("host2", HANGING_UP)
    ended = site.run(["host1", site.name("full", "host2", port)], "--set", "timeouts.connect=2s")
    assert_refused(site, ended, {"full": ("dropped by the server", "kex_exchange_identification: ")})
    assert [event["node"] for event in ended.events("LinkEnded")].count(1) > 1, "it was not tried again"


def test_name_servers_that_do_not_answer_are_not_waited_for(site: Site) -> None:
    site.cut("host3")
    resolver = site.folder / "resolv.conf"
    resolver.write_text(f"nameserver {site.bed.hosts['host3'].address}\noptions timeout:1 attempts:1\n")
    nodes = ["host1", site.name("nowhere", "host2", HostName="nowhere.invalid")]
    ended = site.run(nodes, over={Path("/etc/resolv.conf"): resolver})
    assert_refused(site, ended, {"nowhere": ("unknown host", "Could not resolve hostname nowhere.invalid")})


# Hosts that work, whatever they look like


def assert_ran(site: Site, ended: Ended) -> None:
    """Every rank of the job was started and finished."""
    assert (ended.status, ended.failures) == (0, {}), ended.stderr
    assert site.started() == [str(rank) for rank in range(len(ended.document["nodes"]))]


def test_nodes_that_a_server_drops_are_tried_again_until_all_run(site: Site) -> None:
    port = site.sshd("host2", "MaxStartups 2:100:2")
    ended = site.run([site.name(f"name{i}", "host2", port) for i in range(8)])
    assert_ran(site, ended)
    kinds = [event["failure"]["kind"] for event in ended.events("LinkEnded")]
    assert "dropped by the server" in kinds, "the server let all in at once"


NOISE = r"""
echo 'Welcome! You have mail.'
echo 'distlaunch-ready' 'distlaunch%s' -ready-1 distlaunch-agent
printf 'distlaunch%s\n' -ready-1
printf '\0distlaunch-agent 00000000000000000000000000000000\n'
printf '\001\0\0\0\0\377\377\377\377\033[2J'
head -c 50000 /dev/urandom
echo 'stderr too' >&2
"""
READING = """
read -t 1 x
timeout 1 cat > /dev/null
"""
SHELLS = {
    "bash": (".bashrc", NOISE),
    "bash reading stdin": (".bashrc", READING),
    "bash waiting for a line": (".bashrc", "read x"),
    "csh": (".cshrc", NOISE),
    "fish": (".config/fish/config.fish", NOISE),
    "tcsh": (".tcshrc", NOISE),
    "zsh": (".zshenv", NOISE),
}


@pytest.mark.parametrize("name", SHELLS)
def test_login_shells_and_their_rc_files_do_no_harm(name: str, site: Site) -> None:
    shell = installed(name.partition(" ")[0])
    rc_file, text = SHELLS[name]
    rc_path, seen = site.folder / "home" / rc_file, site.folder / "seen"
    rc_path.parent.mkdir(parents=True)
    rc_path.write_text(f"{text}\ntouch '{seen}'\n")
    port = site.sshd("host2", over=site.login(site.folder / "home", shell))
    assert_ran(site, site.run(["host1", site.name("odd", "host2", port)]))
    assert seen.exists(), f"{shell} has not read its {rc_file}"


@contextmanager
def dead_master(path: Path) -> Iterator[None]:
    """A control socket that accepts and never answers, like that of a stopped ssh."""
    with socket.socket(socket.AF_UNIX) as master:
        master.bind(str(path))
        master.listen()
        yield


def test_what_a_hostile_ssh_config_says_is_overruled(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, dead_master(site.folder / "s"):
        hostile = {
            "IgnoreUnknown": "UseKeychain",
            "UseKeychain": "yes",
            "BatchMode": "no",
            "ControlMaster": "auto",
            "ControlPersist": "yes",
            "ExitOnForwardFailure": "yes",
            "ForkAfterAuthentication": "yes",
            "LocalCommand": f"touch '{site.folder}/local'",
            "LocalForward": f"127.0.0.1:{taken.getsockname()[1]} localhost:9",
            "LogLevel": "QUIET",
            "PermitLocalCommand": "yes",
            "RemoteCommand": "echo hijacked",
            "RequestTTY": "force",
            "SessionType": "none",
            "StdinNull": "yes",
        }
        nodes = [
            site.name("new", "host1", 22, **hostile, ControlPath=f'"{site.folder}/%n"'),
            site.name("old", "host2", 22, **hostile, ControlPath=f'"{site.folder}/s"'),
        ]
        ended = site.run(nodes, *SHORT)
    assert_ran(site, ended)
    assert not (site.folder / "local").exists()
    assert not (site.folder / "new").exists(), "a master was left"


# Lost


def test_a_node_whose_session_is_killed_ends_the_job_everywhere(site: Site) -> None:
    script = "echo ready {rank} $$; exec sleep 1000"
    nodes: list[Node] = ["host1", "host2", "host3"]
    job, before = site.job(nodes, command=["sh", "-c", script]), site.processes()
    with running(job) as run:
        run.wait_for("ready", times=3)
        ranks = run.worker_pids()
        agent = parent_of(ranks[1])
        session = parent_of(parent_of(agent))
        kill(session)
        wait_gone([*ranks.values(), agent], GONE_S)
        assert run.wait() == NODE_LOST
        assert "host2 was lost" in run.stderr and "Traceback" not in run.stderr
        assert run.holders() == []
        site.assert_gone(before)
