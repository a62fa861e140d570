"""Runs over ssh that nobody's terminal holds: left here, or controlled by another host."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.hosts import Site
from tests.harness import PATIENCE_S, Going, cookie_holders, distlaunch, distlaunch_argv, kill, wait_gone
from tests.process.test_view import seen

LEASE_S = 3.0
SIX = ["host1", "host2", "host3"]
WAITS = """\
echo "rank $RANK is here"
while [ ! -e gate ]; do sleep 0.1; done
echo "rank $RANK went on"
if [ -e "gate/$RANK" ]; then . "./gate/$RANK"; fi
"""
"""Until somebody makes the folder gate; a file there with its rank has what it does then."""


class There:
    """A job of six ranks on three hosts, and commands about its run from sessions of their own."""

    def __init__(self, site: Site) -> None:
        self.site, self.folder = site, site.folder
        self.run = ""
        self.servers: set[int] = set()

    def far(self, host: str) -> str:
        """Another name of a host, for commands: nothing of theirs is kept in the user's home there."""
        places = [f"XDG_{name}_HOME={self.folder}/{name}" for name in ("CACHE", "STATE")]
        before = self.site.processes()
        port = self.site.sshd(host, f"SetEnv {' '.join(places)}")
        self.servers |= self.site.processes() - before
        return self.site.name(f"far-{host}", host, port)

    def job(self, nodes: list[str], **keys: Any) -> str:
        command = {"command": ["sh", "-c", WAITS], "procs_per_node": 2}
        return str(self.site.job(nodes, **{**command, **keys}))

    def leave(self, job: str, *words: str) -> None:
        """By a shell on a terminal of its own, which is killed with its session afterwards."""
        controller, terminal = os.openpty()
        argv = distlaunch_argv("run", "--detach", *words, job)
        shell = subprocess.Popen(
            ["sh", "-c", '"$@"; read line', "sh", *argv],
            cwd=self.folder, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
        )  # fmt: skip
        os.close(terminal)
        said = b""
        while not (found := re.search(rb"^(job-[0-9]{8}-[0-9]{6}-[0-9a-f]{8})\r?\n", said, re.MULTILINE)):
            said += os.read(controller, 4096)
        self.run = found[1].decode()
        os.killpg(shell.pid, signal.SIGHUP)
        shell.kill()
        shell.wait(PATIENCE_S)
        os.close(controller)

    def ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        return distlaunch(*words, cwd=self.folder)

    def ps(self) -> dict[str, Any]:
        (run,) = json.loads(self.ask("ps", "-a", ".", "--json").stdout)
        return dict(run)

    def beside(self, *words: str) -> Going:
        return Going(self.folder / "no runs", distlaunch_argv(*words), cwd=self.folder)

    def open_gate(self, **ends: str) -> None:
        """What each rank in `ends` does then, as shell text."""
        fresh = self.folder / "fresh"
        fresh.mkdir()
        for rank, text in ends.items():
            (fresh / rank.removeprefix("rank")).write_text(text)
        fresh.rename(self.folder / "gate")


@pytest.fixture
def there(site: Site) -> Iterator[There]:
    there = There(site)
    before = site.processes()
    yield there
    if there.run:
        there.ask("stop", there.run, "--now")
    site.assert_gone(before | there.servers)


@pytest.mark.parametrize(
    ("ends", "status", "state"),
    [
        ({}, 0, "SUCCEEDED"),
        ({"rank3": "exit 7"}, 7, "FAILED"),
        ({"rank5": "kill -KILL $$"}, 137, "FAILED"),
    ],
)
def test_a_left_run_ends_as_it_would_have(
    ends: dict[str, str], status: int, state: str, there: There
) -> None:
    there.leave(there.job(SIX))
    assert (there.ps()["state"], there.ps()["ranks"], there.ps()["where"]) == ("RUNNING", 6, ", ".join(SIX))
    follow, attached = there.beside("logs", "-f"), there.beside("attach", there.run)
    try:
        follow.wait_for("is here", times=6)
        there.open_gate(**ends)
        assert there.ask("wait").returncode == status
        assert attached.wait() == status
        assert follow.wait() == 0
    finally:
        follow.kill()
        attached.kill()
    assert (there.ps()["state"], there.ps()["exit_status"]) == (state, status)
    went_on = follow.stdout.count("went on")  # the one that fails may end the others before
    assert went_on == 6 if status == 0 else went_on >= 1


def test_a_left_run_is_stopped_from_another_session(there: There) -> None:
    there.leave(there.job(SIX))
    waiting = there.beside("wait")
    try:
        done = there.ask("stop")
        assert waiting.wait() == 130
    finally:
        waiting.kill()
    assert (done.returncode, there.ps()["state"]) == (0, "CANCELLED")
    assert not cookie_holders(there.run)


def test_the_death_of_a_left_runs_controller_ends_its_ranks(there: There) -> None:
    there.leave(there.job(SIX, timeouts={"lease": f"{LEASE_S:g}s"}))
    ranks = cookie_holders(there.run)
    assert len(ranks) >= 6
    controller = there.ps()["controller"]["pid"]
    kill(controller)
    wait_gone([controller], PATIENCE_S)
    assert there.ps()["state"] == "LOST"
    wait_gone(ranks, PATIENCE_S)
    assert there.ask("wait").returncode == 71


def test_a_run_that_another_host_controls(there: There) -> None:
    """Its owner's machine is cut off and comes back: training went on, and every line is there."""
    far, config = there.far("host2"), str(there.site.ssh_config)
    job = there.job(["host2", "host3"])
    argv = there.site.bed.argv("exec", "host1", "--", *distlaunch_argv("run", "-d", "--on", far, job))
    done = subprocess.run(
        argv, cwd=there.folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    there.run = done.stdout.strip()
    name = f"{far}:{there.run}"
    assert there.ps()["state"] == "RUNNING"
    there.site.bed.call("cut", "host1")
    there.open_gate()
    assert there.ask("wait").returncode == 0  # by the folder, which all machines here share
    there.site.bed.call("heal", "host1")
    for words, status in ((("wait", name), 0), (("ps", "-a", f"{far}:{there.folder}"), 0)):
        asked = there.site.bed.argv("exec", "host1", "--", *distlaunch_argv(*words, "--ssh-config", config))
        end = subprocess.run(
            asked, cwd=there.folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert end.returncode == status, end.stderr
    lines = there.ask("logs", name, "--ssh-config", config).stdout.splitlines()
    for rank in range(4):
        mine = [line.partition("] ")[2] for line in lines if f":{rank}] " in line]
        assert mine == [f"rank {rank} is here", f"rank {rank} went on"]


def test_commands_for_a_run_of_another_host(there: There) -> None:
    config = ("--ssh-config", str(there.site.ssh_config))
    far, job = there.far("host3"), there.job(["host2", "host3"])
    attached = there.beside("run", "--on", far, job)  # attached at once
    try:
        attached.wait_for("is here", times=4)
        there.run = there.ps()["run"]
        attached.process.send_signal(signal.SIGINT)
        assert attached.wait() == 130
        assert f"detached from {there.run}, which is still running" in attached.stderr
    finally:
        attached.kill()
    again = there.beside("attach", f"{far}:{there.run}", *config)
    try:
        done = there.ask("stop", f"{far}:{there.run[:-2]}", *config)
        assert done.returncode == 0, done.stderr
        assert "CANCELLED" in done.stderr
        assert again.wait() == 130
    finally:
        again.kill()


def test_a_run_of_another_host_is_watched_on_this_terminal(there: There) -> None:
    far, job = there.far("host3"), there.job(["host2", "host3"])
    done = there.ask("run", "-d", "--on", far, job)
    assert done.returncode == 0, done.stderr
    there.run = done.stdout.strip()
    config = ("--ssh-config", str(there.site.ssh_config))
    with seen(there.folder, "view", f"{far}:{there.run}", *config) as shown:
        shown.wait_for(r"\n3 +host3 +running +\d+%")
        shown.press(b"q")
        assert shown.ended() == 0
        shown.assert_sane()
        assert f"detached from {there.run}, which is still running" in shown.after_screen
    done = there.ask("stop", f"{far}:{there.run}", *config)
    assert (done.returncode, "CANCELLED" in done.stderr) == (0, True), done.stderr


def test_a_host_that_can_not_be_reached_or_lacks_python_is_told(there: There) -> None:
    config = ("--ssh-config", str(there.site.ssh_config))
    there.site.name("nowhere", "host1", port=9)
    done = there.ask("wait", "nowhere:job", *config)
    assert done.returncode == 69
    assert "refused" in done.stderr
    assert there.ask("run", "--on", "nowhere", there.job(["host1"])).returncode == 69
    missing = there.ask("wait", f"{there.far('host1')}:{there.folder}/none", *config)
    assert missing.returncode == 2
    assert "not a run directory" in missing.stderr
