"""Detached runs over ssh, controlled here or by another host."""

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.cluster.hosts import Site
from tests.harness import Done, Going, distlaunch, distlaunch_argv
from tests.process.test_view import seen

WAITS = """\
echo "rank $RANK is here"
while [ ! -e gate ]; do sleep 0.1; done
echo "rank $RANK went on"
"""
"""Until somebody makes the file gate."""


class There:
    """A job, and commands about its run from sessions of their own."""

    def __init__(self, site: Site) -> None:
        self.site, self.directory = site, site.directory
        self.config = ("--ssh-config", str(site.ssh_config))
        self.run = ""
        self.servers: set[int] = set()

    def far(self, host: str) -> str:
        """Another name of a host, for commands: nothing of theirs is kept in the user's home there."""
        places = [f"XDG_{name}_HOME={self.directory}/{name}" for name in ("CACHE", "STATE")]
        before = self.site.processes()
        port = self.site.sshd(host, f"SetEnv {' '.join(places)}")
        self.servers |= self.site.processes() - before
        return self.site.name(f"far-{host}", host, port)

    def job(self) -> str:
        """A job of two ranks on each of two hosts."""
        return str(self.site.job(["host2", "host3"], command=["sh", "-c", WAITS], procs_per_node=2))

    def ask(self, *words: str) -> Done:
        return distlaunch(*words, cwd=self.directory)

    def ps(self) -> dict[str, Any]:
        (run,) = json.loads(self.ask("ps", "-a", ".", "--json").stdout)
        return dict(run)


@pytest.fixture
def there(site: Site) -> Iterator[There]:
    before, there = site.processes(), There(site)
    yield there
    if there.run:
        there.ask("stop", there.run, "--now")
    site.assert_gone(before | there.servers)


def test_a_run_that_another_host_controls_outlives_its_owners_connection(there: There) -> None:
    """Its owner's machine is cut off and comes back: training went on, and every line is there."""
    far, bed = there.far("host2"), there.site.bed
    around: dict[str, Any] = {"cwd": there.directory, "status": 0}
    argv = distlaunch_argv("run", "-d", "--on", far, there.job())
    there.run = bed.inside("host1", *argv, **around).stdout.strip()
    name = f"{far}:{there.run}"
    assert there.ps()["state"] == "RUNNING"
    bed.call("cut", "host1")
    (there.directory / "gate").touch()
    assert there.ask("wait").returncode == 0  # by the directory, which all machines here share
    bed.call("heal", "host1")
    for words in (("wait", name), ("ps", "-a", f"{far}:{there.directory}")):
        bed.inside("host1", *distlaunch_argv(*words, *there.config), **around)
    lines = there.ask("logs", name, *there.config).stdout.splitlines()
    for rank in range(4):
        mine = [line.partition("] ")[2] for line in lines if f":{rank}] " in line]
        assert mine == [f"rank {rank} is here", f"rank {rank} went on"]


def test_attaches_to_shows_and_stops_a_run_of_another_host(there: There) -> None:
    far, job = there.far("host3"), there.job()
    argv = distlaunch_argv("run", "--on", far, job)
    attached = Going(there.directory / "no runs", argv, cwd=there.directory)  # its end isn't the run's
    with ExitStack() as stack:
        stack.callback(attached.kill)
        attached.wait_for("is here", times=4)  # attached at once
        there.run = there.ps()["run"]
        attached.process.send_signal(signal.SIGINT)
        assert attached.wait() == 130
    assert f"detached from {there.run} without stopping it" in attached.stderr
    with seen(there.directory, "view", f"{far}:{there.run}", *there.config) as shown:
        shown.wait_for(r"\n3 +host3 +running +\d+%")
        shown.press(b"q")
        assert shown.ended() == 0
        shown.assert_sane()
        assert f"detached from {far}:{there.run} without stopping it" in shown.after_screen
    done = there.ask("stop", f"{far}:{there.run[:-2]}", *there.config)
    assert (done.returncode, "CANCELLED" in done.stderr) == (0, True), done.stderr
