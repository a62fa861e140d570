"""What is begun before the job file is read: who takes it, and what becomes of it otherwise."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from distlaunch.__main__ import names_hosts
from distlaunch.job.spec import JobSpec, Logs, NodeSpec, Program
from distlaunch.links.ahead import open_ahead
from distlaunch.links.begun import Ahead
from distlaunch.links.opening import open_links
from tests.harness import PATIENCE_S, running, wait_gone, wait_until
from tests.process.stand_in_shell import WITHOUT_OPTIONS


def spec_of(node: NodeSpec, python: str | None = None) -> JobSpec:
    return JobSpec("job", (node,), Program("command", ("true",)), "/", Logs("/"), python=python)


@pytest.fixture
def early() -> Ahead:
    ahead = open_ahead(shares_stdio=False)
    assert ahead is not None
    return ahead


@pytest.mark.parametrize(
    ("spec", "taken"),
    [
        (spec_of(NodeSpec("a")), True),
        (spec_of(NodeSpec("a"), sys.executable), True),
        (spec_of(NodeSpec("a", python=sys.executable), "/another/python"), True),
        (spec_of(NodeSpec("a"), "/another/python"), False),
        (spec_of(NodeSpec("a", python="/another/python"), sys.executable), False),
    ],
    ids=["no python", "ours", "ours on that node", "another", "another on that node"],
)
def test_an_agent_that_runs_ahead_is_taken_by_whoever_wants_our_interpreter(
    spec: JobSpec, taken: bool, early: Ahead
) -> None:
    link = early._link
    links = open_links(spec, early)
    early.settle()
    assert (links[0] is link) is taken
    links[0].discard()


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("script: t.py", False),
        ("nodes: 2\nscript: t.py", False),
        ("min_nodes: 2\n# nodes: [a]", False),
        ("nodes: [a, b]\nscript: t.py", True),
        ("script: t.py\nnodes:\n  - a", True),
        ("script: t.py\r\nnodes:\r\n- a", True),
        ("hostfile: hosts", True),
        ("container: {image: i}", True),
    ],
)
def test_no_agent_is_started_ahead_for_a_job_on_other_hosts(tmp_path: Path, text: str, hosts: bool) -> None:
    job = tmp_path / "job.yaml"
    job.write_bytes(text.encode())
    assert names_hosts("run", ["run", "-q", str(job)]) is hosts
    assert not names_hosts("torchrun", ["torchrun", str(job)])
    assert not names_hosts("run", ["run", str(tmp_path / "missing.yaml")])


SSH = f"""#!/bin/sh
# A stand-in for ssh: notes the host and its process, and has a shell here run the rest; ssh -G has an answer.
[ "$1" = -G ] && {{ echo "-G $$" >>"$STARTED"; echo "hostname $ADDRESS"; exit; }}
{WITHOUT_OPTIONS}
echo "$1 $$" >>"$STARTED"
shift
exec sh -c "$*"
"""


BOTH = ["one", "two"]


class Hosts:
    """Hosts that a stand-in for ssh reaches, which are this machine; the job has them from a named pipe."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.job, self._started, self._patch = folder / "job.yaml", folder / "started", patch
        self._listed = folder / "hosts"
        os.mkfifo(self._listed)
        (folder / "bin").mkdir()
        (folder / "bin/ssh").write_text(SSH)
        (folder / "bin/ssh").chmod(0o755)
        (folder / "t.py").write_text("")
        patch.setenv("NEEDED", "1")
        more = f"master_addr: {os.uname().nodename}\nenv: {{NEEDED: null}}\n"
        self.job.write_text(f"script: t.py\ngpus_per_node: 0\nhostfile: hosts\n{more}")
        self._seen = 0
        patch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
        patch.setenv("STARTED", str(self._started))
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.delenv("SLURM_JOB_ID", raising=False)

    def run(self, *options: str, begun: Sequence[str] = (), listed: Sequence[str] = BOTH) -> int:
        """Run the job; its status. All processes that reached hosts are gone.

        It is told its hosts only once those of `begun` are reached, which then may be ended at any time.
        """
        with running(self.job, *options) as run:
            wait_until(lambda: len(self._all()) >= self._seen + len(begun), lambda: f"{self._all()}")
            self._listed.write_text("\n".join(listed))
            status = run.wait()
        wait_gone([pid for _, pid in self._all()], PATIENCE_S)
        return status

    def break_job(self) -> None:
        """The job is refused from now on, though its file is the same."""
        self._patch.delenv("NEEDED")

    def _all(self) -> list[tuple[str, int]]:
        lines = self._started.read_text().splitlines() if self._started.exists() else []
        return [(host, int(pid)) for host, pid in map(str.split, lines)]

    def reached(self) -> list[str]:
        """Which hosts were reached since the last call."""
        new = self._all()[self._seen :]
        self._seen += len(new)
        return sorted(host for host, _ in new)


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    """Nothing was run on them yet."""
    return Hosts(tmp_path, monkeypatch)


def test_what_was_begun_last_time_is_begun_before_the_job_is_read_and_taken(hosts: Hosts) -> None:
    assert hosts.run() == 0
    assert hosts.reached() == BOTH
    assert hosts.run() == 0
    assert hosts.reached() == BOTH  # once
    hosts.break_job()
    assert hosts.run(begun=BOTH) == 2
    assert hosts.reached() == BOTH  # it was begun, and has ended


def test_a_job_that_has_changed_begins_nothing_before_it_is_read(hosts: Hosts) -> None:
    assert hosts.run() == 0
    hosts.break_job()
    hosts.job.write_text(hosts.job.read_text() + "# changed\n")
    hosts.reached()
    assert hosts.run() == 2
    assert hosts.reached() == []


def test_another_command_line_begins_nothing_before_it_is_read(hosts: Hosts) -> None:
    assert hosts.run() == 0
    hosts.break_job()
    hosts.reached()
    assert hosts.run("--set", "name=other") == 2
    assert hosts.reached() == []


def test_the_address_is_asked_for_before_the_job_is_read_too(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADDRESS", os.uname().nodename)
    hosts.job.write_text("command: [sh, -c, 'echo $MASTER_ADDR']\ngpus_per_node: 0\nhostfile: hosts\n")
    assert hosts.run("--set", "env.NEEDED=null") == 0
    assert hosts.reached() == ["-G", *BOTH]
    assert hosts.run("--set", "env.NEEDED=null") == 0
    assert hosts.reached() == ["-G", *BOTH]  # once
    hosts.break_job()
    assert hosts.run("--set", "env.NEEDED=null", begun=["-G", *BOTH]) == 2
    assert hosts.reached() == ["-G", *BOTH]


def test_what_the_job_does_not_want_any_more_is_ended(hosts: Hosts) -> None:
    assert hosts.run() == 0
    hosts.reached()
    assert hosts.run(begun=BOTH, listed=["two", "three"]) == 0
    assert hosts.reached() == ["one", "three", "two"]
    assert hosts.run(listed=["two", "three"]) == 0
    assert hosts.reached() == ["three", "two"]


@pytest.mark.parametrize("junk", ["", "{", '{"key": 1}', "[]", '{"key": [], "begun": 1}'])
def test_a_memory_that_is_none_does_no_harm(hosts: Hosts, tmp_path: Path, junk: str) -> None:
    assert hosts.run() == 0
    (memory,) = (tmp_path / "cache/distlaunch/begun").iterdir()
    kept = memory.read_text()
    memory.write_text(junk)
    assert hosts.run() == 0
    assert memory.read_text() == kept


def test_where_nothing_can_be_remembered_all_goes_on(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    assert hosts.run() == 0
    assert hosts.run() == 0
