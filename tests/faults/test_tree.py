"""A tree of 24 real hosts with a fan-out of four: what a user sees, and what is told when a relay is lost."""

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import GONE_S, Bed, bed_of, find, parent_of, why_not
from tests.faults.conftest import Figures
from tests.harness import Run, children_of, command_line, distlaunch, kill, running, wait_gone

HOSTS, FAN_OUT = 24, 4
STOP_S, LEASE_S, CONNECT_S = 2.0, 9.0, 30.0
SLEEPER = """
import os, signal
os.write(1, f"ready {os.environ['RANK']} {os.getpid()}\\n".encode())
signal.pause()
"""
pytestmark = pytest.mark.together("tree")
RELAY, BELOW, INNER = 6, range(7, 12), 8
"""The second of the four that are reached from here, those below it, and of these one that has some, too."""


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """The hosts host1 … host24, of which node N is host N + 1."""
    if reason := why_not():
        pytest.skip(reason)
    with bed_of(HOSTS, tmp_path_factory.mktemp("tree") / "bed") as bed:
        yield bed


@pytest.fixture(autouse=True)
def clean(many: Bed) -> Iterator[None]:
    """No process of a test is left on any host."""
    before = many.processes()
    yield
    wait_gone(sorted(many.processes() - before), 10.0)


def job(many: Bed, folder: Path, worker: str = SLEEPER, **keys: object) -> Path:
    """One rank on each host."""
    (folder / "worker.py").write_text(worker)
    ssh = {"config": f"{many.folder}/ssh_config", "tree": True, "fan_out": FAN_OUT}
    timeouts = {"stop": f"{STOP_S:g}s", "lease": f"{LEASE_S:g}s"}
    known = {"script": "worker.py", "gpus_per_node": 0, "ssh": ssh, "timeouts": timeouts}
    names = [f"host{i + 1}" for i in range(HOSTS)]
    (folder / "job.yaml").write_text(json.dumps(known | {"nodes": names} | keys))
    return folder / "job.yaml"


def test_few_are_reached_from_here_and_nothing_that_is_printed_is_changed(tmp_path: Path, many: Bed) -> None:
    worker = """
import os, signal, sys
rank = int(os.environ["RANK"])
sys.stdout.buffer.write(bytes((i * 7 + rank) % 256 for i in range(300000)))
sys.stdout.flush()
os.write(2, f"ready {rank} {os.getpid()}\\n".encode())
"""
    with running(job(many, tmp_path, worker, logs={"console": "none"})) as run:
        run.wait_for("24 ranks on 24 nodes")
        assert run.wait() == 0
        connected = {event["node"]: event["hostname"] for event in run.events("AgentUp")}
        assert connected == {node: f"host{node + 1}" for node in range(HOSTS)}
        for rank in range(HOSTS):
            printed = (run.run_folder() / f"rank{rank}.out").read_bytes()
            assert printed == bytes((i * 7 + rank) % 256 for i in range(300000)), rank


def relay(run: Run) -> int:
    return parent_of(parent_of(parent_of(run.worker_pids()[RELAY])))


def ssh_to_relay(run: Run) -> int:
    return children_of(run.process.pid)[1]


def ssh_below(run: Run) -> int:
    return next(pid for pid in children_of(relay(run)) if f"host{INNER + 1}" in command_line(pid))


@pytest.mark.fault(81, "the relay of a tree, or ssh to it, is killed", promise="1, 6")
@pytest.mark.parametrize("victim", [relay, ssh_to_relay])
def test_a_lost_relay_is_blamed_alone_and_the_hosts_below_are_taken_up_again(
    tmp_path: Path, many: Bed, victim: Callable[[Run], int], figures: Figures
) -> None:
    with running(job(many, tmp_path, restarts=1), "--quiet") as run:
        ranks = run.wait_ready(HOSTS)
        assert len(children_of(run.process.pid)) == FAN_OUT
        kill(victim(run))
        gone_s = wait_gone(list(ranks.values()), STOP_S + GONE_S)
        figures(f"{victim.__name__}: all ranks gone", gone_s, at_most=STOP_S + GONE_S)
        run.wait_for("ready", times=2 * HOSTS)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.stderr
        told = [line for line in run.stderr.splitlines() if "was lost" in line or "cut off" in line]
        assert len(told) == 2, run.stderr
        assert f"host{RELAY + 1} was lost: " in told[0] + told[1]
        names = ", ".join(f"host{node + 1}" for node in BELOW)
        assert any(f"{names}: cut off with host{RELAY + 1}" in line for line in told), run.stderr


@pytest.mark.fault(82, "ssh from a host to another is killed", promise="1")
def test_ssh_from_one_host_to_another_is_blamed_by_the_host_that_had_it(
    tmp_path: Path, many: Bed, figures: Figures
) -> None:
    with running(job(many, tmp_path), "--quiet") as run:
        ranks = run.wait_ready(HOSTS)
        kill(ssh_below(run))
        gone_s = wait_gone(list(ranks.values()), STOP_S + GONE_S)
        figures("all ranks gone", gone_s, at_most=STOP_S + GONE_S)
        assert run.wait() == 71
        lost = f"host{INNER + 1} was lost: ssh on host{RELAY + 1} was killed by signal 9 (SIGKILL)"
        assert lost in run.stderr, run.stderr


@pytest.mark.fault(83, "the relay of a tree is stopped", promise="5")
def test_a_silent_relay_ends_the_job_within_its_lease(tmp_path: Path, many: Bed, figures: Figures) -> None:
    with running(job(many, tmp_path), "--quiet") as run:
        ranks = run.wait_ready(HOSTS)
        stopped = relay(run)
        kill(stopped, signal.SIGSTOP)
        at_most = LEASE_S + STOP_S + 2 * GONE_S
        figures("all gone", wait_gone([*ranks.values(), stopped], at_most), at_most)
        assert run.wait() == 71
        # Its own agent's lease ends when ours does. That wakes it, and it tells of others that have ended so.
        hosts = "|".join(f"host{node + 1}" for node in (RELAY, *BELOW))
        assert re.search(rf"({hosts}) was lost: (no heartbeat for 9 s|its agent exited)", run.stderr)


@pytest.mark.fault(84, "hosts can't reach each other", promise="8")
def test_hosts_that_can_not_reach_each_other_are_reached_from_here(
    tmp_path: Path, many: Bed, figures: Figures
) -> None:
    """A key that is only here, as an agent's or a laptop's is."""
    text = (many.folder / "ssh_config").read_text()
    here, there = tmp_path / "here", tmp_path / "there"
    here.write_text(text)
    there.write_text(text.replace("id_ed25519", "missing"))
    # The hosts have our files: what they find under this name is another one, mounted there.
    for host in many.hosts.values():
        _inside(host.pid, find("mount") or "mount", "--bind", str(there), str(here))
    ssh = {"config": str(here), "tree": True, "fan_out": FAN_OUT}
    began = time.monotonic()
    done = distlaunch("run", str(job(many, tmp_path, "print('here')", ssh=ssh)))
    figures("the whole run", time.monotonic() - began, at_most=CONNECT_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("here") == HOSTS
    refused = [line for line in done.stderr.splitlines() if "can't reach" in line]
    assert len(refused) == 1, done.stderr
    assert "authentication failed; connecting from here to nodes that others can't reach" in refused[0]


def _inside(keeper: int, *argv: str) -> None:
    subprocess.run([find("nsenter") or "nsenter", "-t", str(keeper), "-m", *argv], check=True)


@pytest.mark.fault(85, "a host that is to reach others is down", promise="8")
def test_hosts_below_one_that_is_down_are_reached_without_it(
    tmp_path: Path, many: Bed, figures: Figures
) -> None:
    names = [f"host{i + 1}" for i in range(HOSTS)]
    names[RELAY] = "nowhere.invalid"
    made = job(many, tmp_path, "print('here')", nodes=names, min_nodes=HOSTS - 1)
    began = time.monotonic()
    done = distlaunch("run", str(made))
    figures("the whole run", time.monotonic() - began, at_most=CONNECT_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("here") == HOSTS - 1
    below = ", ".join(f"host{node + 1}" for node in BELOW)
    assert f"connecting to {below} from here instead of through nowhere.invalid" in done.stderr, done.stderr
