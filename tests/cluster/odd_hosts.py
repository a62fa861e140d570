"""Ways for a host to be unusable, or to look so, and what a run then has to say."""

import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from distlaunch.wording import listed
from tests.cluster.hosts import Ended, Node, Site, find
from tests.harness import completed, program

UNREACHABLE = 69


def assert_refused(site: Site, ended: Ended, expected: dict[str, tuple[str, str]]) -> None:
    """The run failed for exactly these nodes: name → (kind, a pattern that its words have)."""
    assert ended.status == ended.document["exit_status"] == UNREACHABLE, ended.stderr
    kinds = {node: kind for node, (kind, _) in ended.failures.items()}
    assert kinds == {node: kind for node, (kind, _) in expected.items()}, ended.stderr
    for node, (kind, words) in expected.items():
        assert re.search(words, ended.failures[node][1]), (node, *ended.failures[node])
        told = ended.block(node)
        assert told.startswith(f"distlaunch: {node}: {kind}; ")
        assert re.search(words, told), told
    nodes = ended.document["nodes"]
    names = listed([node["name"] for node in nodes if node["name"] in expected])
    which = "the only node" if len(nodes) == 1 else f"{len(expected)} of {len(nodes)} nodes"
    kinds_said = {kind for kind, _ in expected.values()}
    why = f"{kinds_said.pop()}: " if len(kinds_said) == 1 else ""
    count = f"{why}{which} can't be used ({names}); nothing was started"
    assert f"distlaunch: {count}\n" in ended.stderr
    assert ended.document["cause"]["text"] == count
    assert ended.document["workers"] == [] and site.started() == []


def told_s(ended: Ended) -> float:
    """Seconds from the start until people were told why the job ends."""
    why = ended.document["cause"]["text"]
    (told,) = [event["t"] for event in ended.events("Message") if event["text"] == why]
    return float(told)


def assert_ran(site: Site, ended: Ended) -> None:
    """Every rank of the job was started and finished."""
    assert (ended.status, ended.failures) == (0, {}), ended.stderr
    assert site.started() == [str(rank) for rank in range(len(ended.document["nodes"]))]


Make = Callable[[Site, str], Node]
"""Makes a host of this name, and returns the job's entry for it."""


class Bad(NamedTuple):
    """A way to be unusable: how to make such a host, the kind that is told, and a pattern of the words."""

    make: Make
    kind: str
    words: str


NO_PROMPT = {"SSH_ASKPASS_REQUIRE": "force", "DISPLAY": ":0"}
"""Have ssh ask for passwords, where it may ask at all, by the program in SSH_ASKPASS."""


def assert_each_told(site: Site, bad: Mapping[str, Bad], *options: str) -> Ended:
    """A job with one good host and these bad ones is refused for those, and nobody is asked anything."""
    asked = site.directory / "asked"
    askpass = program(site.directory / "askpass", f"touch {asked}")
    nodes = ["host1", *(one.make(site, name) for name, one in bad.items())]
    ended = site.run(nodes, *options, env={**NO_PROMPT, "SSH_ASKPASS": askpass})
    assert_refused(site, ended, {name: (one.kind, one.words) for name, one in bad.items()})
    assert not asked.exists()
    return ended


# One host that can't be used


def a_key_it_does_not_know(site: Site, name: str) -> Node:
    return site.name(name, "host2", IdentityFile=another_key(site))


def asks_for_a_password(site: Site, name: str) -> Node:
    port = site.sshd("host2", "PubkeyAuthentication no", "PasswordAuthentication yes", "PermitRootLogin yes")
    return site.name(name, "host2", port, PasswordAuthentication="yes")


def reached(port: int = 22, **settings: str) -> Make:
    """A host behind that port, with these settings of ssh."""
    return lambda site, name: site.name(name, "host2", port, **settings)


another_host_key = reached(HostKeyAlias="host1")
no_known_host_key = reached(HostKeyAlias="unknown")
a_host_key_to_ask_about = reached(HostKeyAlias="asks", StrictHostKeyChecking="ask")


def with_python(python: str) -> Make:
    return lambda site, name: {"host": site.name(name, "host2"), "python": python}


def with_python_of(version: str) -> Make:
    return lambda site, name: with_python(python(site, version))(site, name)


def no_python_at_all(site: Site, name: str) -> Node:
    bare = site.directory / "bare"
    bare.mkdir()
    shutil.copy("/bin/sh", bare)  # which may be in the same directory as python
    # Without rc files too, which might set PATH again.
    over = {Path(sys.executable).parent: bare, **site.login(bare, "/bin/sh")}
    return site.name(name, "host2", site.sshd("host2", f"SetEnv PATH={bare}", over=over))


def silent_once_accepted(site: Site, name: str) -> Node:
    return site.name(name, "host2", site.server("host2", f"peer = server.accept()[0]; {TO_THE_END}"))


def another_key(site: Site) -> str:
    key = site.directory / "another_key"
    if not key.exists():
        completed(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], status=0)
    return f'"{key}"'


def with_rc_file(site: Site, name: str, text: str) -> Node:
    """A host whose login shell is a bash with this rc file, which it reads for ssh's commands too."""
    home = site.directory / f"home-of-{name}"
    home.mkdir()
    (home / ".bashrc").write_text(text)
    return site.name(name, "host2", site.sshd("host2", over=site.login(home, installed("bash"))))


def installed(name: str) -> str:
    path = find(name)
    if path is None:
        pytest.skip(f"{name} is missing")
    return path


def python(site: Site, version: str) -> str:
    """An interpreter of that version, or where there is none, a script that says what it would say."""
    candidates = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
    tells = "import sys; print('%d.%d' % sys.version_info[:2])"
    for candidate in [*map(str, candidates), shutil.which(f"python{version}")]:
        if candidate and completed([candidate, "-c", tells]).stdout.strip() == version:
            return candidate
    words = "Unknown option: -I" if version < "3" else f'"$5 {version}.0 (made up)"'
    return program(site.directory / f"python{version}", f"echo {words} >&2; exit 2")


TO_THE_END = "peer.recv(1 << 20, socket.MSG_WAITALL)"
HANGING_UP = "while True: server.accept()[0].close()"


# Hosts that work, whatever they look like


def run_behind(site: Site, shell: str, rc_file: str, text: str) -> Ended:
    """A job of two nodes runs, although the second one's login shell reads an rc file with this text."""
    rc_path, seen = site.directory / "home" / rc_file, site.directory / "seen"
    rc_path.parent.mkdir(parents=True)
    rc_path.write_text(f"{text}\ntouch '{seen}'\n")
    port = site.sshd("host2", over=site.login(site.directory / "home", installed(shell)))
    ended = site.run(["host1", site.name("odd", "host2", port)])
    assert_ran(site, ended)
    assert seen.exists(), f"{shell} has not read its {rc_file}"
    return ended


@contextmanager
def dead_master(path: Path) -> Iterator[None]:
    """A control socket that accepts and never answers, like that of a stopped ssh."""
    with socket.socket(socket.AF_UNIX) as master:
        master.bind(str(path))
        master.listen()
        yield
