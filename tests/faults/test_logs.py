"""Faults of output and time: no worker is slowed, no byte is lost unseen, memory stays bounded."""

import contextlib
import hashlib
import itertools
import json
import mmap
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest

from tests import harness
from tests.cluster.hosts import Bed
from tests.cluster.workers import SLEEPER, worker
from tests.faults import scenes
from tests.faults.disks import freezable_disk, frozen, small_disk
from tests.faults.figures import Figures, Pace
from tests.faults.memory import memory_figures
from tests.faults.networks import narrow
from tests.faults.scenes import CPU, ONE, RANKS, Ending, clean, ends, here, on_hosts, starts, stop_after
from tests.harness import PATIENCE_S, Run, distlaunch, held, kill, open_gate, running, wait_gone, write_job

MIB = 1 << 20
LONG_S = 5
"""As long as the writer of a run directory waits for its disk."""


@pytest.fixture(autouse=True)
def no_big_files(tmp_path: Path) -> Iterator[None]:
    """Pytest keeps directories; the logs of these tests are too big for that."""
    yield
    for log in tmp_path.glob("runs/*/rank*"):
        log.unlink()


@contextlib.contextmanager
def drained(run: Run) -> Iterator[None]:
    """Somebody else reads what the run prints, and forgets it."""
    with subprocess.Popen(["cat"], stdin=run.process.stdout, stdout=subprocess.DEVNULL) as reader:
        assert run.process.stdout
        run.process.stdout.close()
        try:
            yield
        finally:
            reader.kill()


def lost(run: Run, rank: int, size: int) -> int:
    """How many bytes of so many, in lines of 1 KiB, are missing in a rank's log."""
    return size - (run.run_directory() / f"rank{rank}.out").read_bytes().count(b"x" * 1023 + b"\n") * 1024


@pytest.mark.fault(30, "nobody reads what the command prints", promise="10")
def test_a_stalled_reader_slows_no_worker(tmp_path: Path, gate: Path, figures: Figures) -> None:
    prints = worker("""
        ready()
        began = time.monotonic()
        for _ in range(64 * 1024): print("x" * 1023)
        print("took", time.monotonic() - began, "s", file=sys.stderr, flush=True)
        open("gate").read()
    """)
    with running(write_job(tmp_path, prints, ONE)) as run:
        pids = run.wait_ready(1)
        stalled, run.process.stdout = run.process.stdout, None
        run.wait_for(" s\n")
        took_s = float(run.stderr.split("took ")[1].split()[0])
        figures("a worker printed 64 MiB", took_s, at_most=5.0)
        memory_figures(run, pids[0], figures)
        open_gate(gate)
        run.process.stdout = stalled
        told = Ending(0, "lines not shown: the terminal or pipe was too slow", 10.0)
        ends(run, figures, told, time.monotonic())
        harness.nothing_was_dropped(run.stderr)
        figures("bytes lost from the log", lost(run, 0, 64 * MIB), at_most=0, unit="bytes")


@pytest.mark.fault(32, "the disk of the logs is full", promise="10")
@pytest.mark.parametrize("limit", ["size=1m", "nr_inodes=5"])
def test_counts_what_a_full_disk_loses(tmp_path: Path, figures: Figures, limit: str) -> None:
    prints = 'for _ in range(3000): print("x" * 1023)'
    with small_disk(tmp_path / "runs", limit):
        job = write_job(tmp_path, prints, f"{CPU}logs: {{console: none}}\n")
        with running(job) as run:
            ends(run, figures, Ending(0, "can't write to", 30.0), run.began)
            figures("warnings", run.stderr.count("can't write to"), at_most=1, unit="warnings")
            kept = sum(log.stat().st_size for log in run.run_directory().glob("rank*"))
            (summary,) = run.directory.glob("runs/*/summary.json")
            assert json.loads(summary.read_text())["exit_status"] == 0
            (listed,) = json.loads(distlaunch("ps", "-a", str(run.directory), "--json").stdout)
            assert listed["trouble"] == "No space left on device"
            why = distlaunch("why", str(run.run_directory())).stdout
            assert "; output was lost: No space left on device\n" in why
            streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
            said = distlaunch("logs", str(run.run_directory()), **streams).stderr
            assert "bytes could not be written to" in said
    assert "can't write to" in run.stderr and ": No space left on device; output is being" in run.stderr
    assert "OSError" not in run.stderr
    missing = RANKS * 3000 * 1024 - kept
    assert sum(map(int, re.findall(r"(\d+) of rank \d", run.stderr))) == missing > 0
    told = max(map(int, re.findall(r"(\d+) bytes", run.stderr)), default=0)
    figures("lost bytes that were not counted", max(0, missing - told), at_most=0, unit="bytes")


@pytest.mark.parametrize("limit", ["size=64k", "nr_inodes=2"])
def test_does_not_start_on_a_full_disk(tmp_path: Path, limit: str) -> None:
    with small_disk(tmp_path / "runs", limit):
        done = distlaunch("run", "-d", str(write_job(tmp_path, "pass", CPU)))
        assert [*(tmp_path / "runs").iterdir()] == []
    full = f"can't create the run directory in {tmp_path}/runs: No space left on device; set logs.dir to"
    assert (done.returncode, full in done.stderr) == (1, True)


@pytest.mark.fault(33, "the log directory's disk stalls", promise="1, 10")
def test_a_stalled_disk_delays_no_tear_down(tmp_path: Path, figures: Figures) -> None:
    with freezable_disk(tmp_path / "disk") as disk:
        chatty = worker("ready()\nwhile True:\n    print('still here', flush=True)\n    time.sleep(0.02)")
        with running(here(tmp_path, chatty, nodes=2, logs={"dir": str(disk)})) as run:
            started = starts(run, 0, 2)
            with frozen(disk):
                run.wait_for("still here", times=run.stdout.count("still here") + 200)
                began = time.monotonic()
                kill(started[0])
                run.wait_for("rank 0 (node0) failed")
                figures("told", time.monotonic() - began, at_most=1.0)
                wait_gone([*started.values()], PATIENCE_S)
                figures("all ranks gone", time.monotonic() - began, at_most=2.0)
            assert run.wait() == 137
            assert "Traceback" not in run.stderr


def test_stop_ends_a_run_whose_disk_is_stuck(tmp_path: Path) -> None:
    with (
        freezable_disk(tmp_path / "disk") as disk,
        running(here(tmp_path, SLEEPER, logs={"dir": str(disk)})) as run,
    ):
        pids, (directory,) = run.wait_ready(1), disk.glob("job-*")
        with frozen(disk):
            stop = subprocess.Popen(harness.distlaunch_argv("stop", str(directory)))
            wait_gone([*pids.values()], PATIENCE_S)
        assert (stop.wait(PATIENCE_S), run.wait()) == (0, 130)


@pytest.mark.fault(33, "the disk of metrics.file stalls", promise="1, 10")
def test_a_stalled_disk_of_metrics_delays_no_tear_down(tmp_path: Path, figures: Figures, pace: Pace) -> None:
    with freezable_disk(tmp_path / "disk") as disk:
        keys = {"metrics": {"file": f"{disk}/job.prom"}, "timeouts": pace.keys}
        with running(here(tmp_path, SLEEPER, nodes=2, **keys)) as run:
            started = starts(run, 0, 2)
            with frozen(disk):
                began = time.monotonic()
                kill(started[0])
                run.wait_for("rank 0 (node0) failed first", within_s=30.0)
                figures("told", time.monotonic() - began, at_most=2.0)
                run.wait_for(f"can't replace {disk}/job.prom: the disk is too slow;", within_s=30.0)
            assert run.wait() == 137


def test_a_run_whose_disk_is_stuck_at_its_end_is_told_as_it_ended(tmp_path: Path) -> None:
    """Its directory doesn't show it, and its output is lost."""
    for rank in range(2):
        os.mkfifo(tmp_path / f"gate{rank}")
    prints = worker("ready()\nopen(f'gate{RANK}').read()\nprint('x' * 1000, flush=True)")
    with freezable_disk(tmp_path / "disk") as disk:
        with running(here(tmp_path, prints, nodes=2, logs={"dir": str(disk / "runs")})) as run:
            starts(run, 0, 2)
            with frozen(disk):
                for rank in range(2):
                    open_gate(tmp_path / f"gate{rank}")
                run.wait_for(" finished in ")
            assert run.wait() == 0
        assert re.search(r"the disk is too slow \(\d+ of rank 0, \d+ of rank 1\)", run.stderr), run.stderr
        (row,) = json.loads(distlaunch("ps", "-a", "--json", str(disk / "runs")).stdout)
        assert (row["state"], row["exit_status"]) == ("SUCCEEDED", 0)


@pytest.mark.everywhere
@pytest.mark.fault(53, "one node's link is slow: 1 Mbit/s", promise="10")
def test_a_slow_node_slows_no_other(tmp_path: Path, bed: Bed, figures: Figures) -> None:
    """Its output would need a minute to arrive; the job is then ended while most of it waits."""
    prints = worker("""
        ready()
        open("gate" + RANK).read()
        for _ in range(3072): print("x" * 1023)
        print("rank", RANK, "has printed all", flush=True)
        os.close(os.open("done" + RANK, os.O_WRONLY))
        wait()
    """)
    for rank, name in itertools.product(range(RANKS), ("gate", "done")):
        os.mkfifo(tmp_path / f"{name}{rank}")
    with running(write_job(tmp_path, prints, on_hosts(bed))) as run:
        pids = run.wait_ready(RANKS)
        with narrow(bed, "host2"):
            began = time.monotonic()
            for rank in range(RANKS):
                open_gate(tmp_path / f"gate{rank}")
            for rank in (1, 2):
                (tmp_path / f"done{rank}").read_bytes()
            figures("the slow node's ranks printed 3 MiB each", time.monotonic() - began, at_most=5.0)
            for rank in (0, 3):
                (tmp_path / f"done{rank}").read_bytes()
                run.wait_for(f"rank {rank} has printed all")
            figures("the others' output arrived", time.monotonic() - began, at_most=5.0)
            assert (run.run_directory() / "rank1.out").stat().st_size < 2 * MIB, "the link was not slow"
            kill(pids[0])
            figures("all ranks gone", wait_gone([*pids.values()], PATIENCE_S), at_most=2.0)
        assert run.wait() == 137, run.stderr
        harness.nothing_was_dropped(run.stderr)
        figures("bytes lost of the slow node", lost(run, 1, 3 * MIB), at_most=0, unit="bytes")
        scenes.assert_no_traceback(run.stderr)


@pytest.mark.fault(54, "a line that does not end", promise="10")
def test_keeps_a_line_without_end(tmp_path: Path, gate: Path, figures: Figures, pace: Pace) -> None:
    """1 GiB at the default pace, else a quarter of that: it is the memory that matters."""
    blocks = 256 if pace.keys else 1024
    prints = worker(f"""
        import hashlib
        block = os.urandom(1 << 20).replace(b"\\n", b"n").replace(b"\\r", b"r")
        seen = hashlib.sha1()
        os.write(2, b"ready 0 %d\\n" % os.getpid())
        for _ in range({blocks}):
            seen.update(block)
            left = block
            while left:
                left = left[os.write(1, left):]
        os.write(2, b"digest " + seen.hexdigest().encode() + b"\\n")
        open("gate").read()
    """)
    with running(write_job(tmp_path, prints, ONE)) as run, drained(run):
        run.wait_for("digest")
        pid = int(run.stderr.split("ready 0 ")[1].split()[0])
        memory_figures(run, pid, figures)
        open_gate(gate)
        ends(run, figures, Ending(0, "1 rank on 1 node finished", 10.0), time.monotonic())
        harness.nothing_was_dropped(run.stderr)
        log = run.run_directory() / "rank0.out"
        figures("bytes lost", blocks * MIB - log.stat().st_size, at_most=0, unit="bytes")
        with log.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as kept:
            assert f"digest {hashlib.sha1(kept).hexdigest()}" in run.stderr


@pytest.mark.fault(56, "a rank fails while all print as fast as they can", promise="1, 10")
@pytest.mark.parametrize("nodes", ["here", "ssh"], indirect=True)
def test_sees_a_failure_in_a_flood_of_output(tmp_path: Path, nodes: str, figures: Figures) -> None:
    floods = r"""
        import os
        os.write(2, b"up %s %d\n" % (os.environb[b"RANK"], os.getpid()))
        block = (b"x" * 1023 + b"\n") * 64
        while True: os.write(1, block)
    """
    with running(write_job(tmp_path, floods, nodes)) as run, drained(run):
        up = re.compile(rb"\] up (\d+) (\d+)\n")
        run.wait_until(lambda: len(up.findall(run.err)) >= RANKS, "ranks that are up")
        pids = {int(rank): int(pid) for rank, pid in up.findall(run.err)}

        def kept() -> int:
            return sum(log.stat().st_size for log in run.run_directory().glob("rank*.out"))

        harness.wait_until(lambda: kept() >= 8 * MIB, lambda: f"{kept()} bytes are kept")
        with held(pids.values()) as ranks:
            kill(pids[1])
            began = time.monotonic()
            run.wait_for("failed")
            figures("the exit was seen", time.monotonic() - began, at_most=1.0)
            ranks.wait_ends(ranks.pids, began + PATIENCE_S)
            figures("all ranks gone", time.monotonic() - began, at_most=2.0)
        # What was printed until then is delivered first: for that there is no limit but progress.
        ends(run, figures, Ending(137, "failed first: killed by signal 9 (SIGKILL)", 30.0), began)


@pytest.mark.fault(57, "the last line has no end, the worker is killed", promise="10")
def test_keeps_the_last_line_without_end(tmp_path: Path, gate: Path, figures: Figures) -> None:
    prints = worker(r"""
        ready()
        if RANK == "1": open("gate").read()
        for stream in (1, 2):
            os.write(stream, b"whole\n" * 1000 + b"the last output of rank " + RANK.encode())
        if RANK == "1": os.kill(os.getpid(), signal.SIGKILL)
        open("printed", "w").close()
        wait()
    """)
    os.mkfifo(tmp_path / "printed")
    with running(write_job(tmp_path, prints, f"nodes: 2\n{ONE}")) as run:
        pids = run.wait_ready(2)
        (tmp_path / "printed").read_bytes()
        with clean(run, pids, figures, Ending(137, "  | the last output of rank 1", 2.0)):
            open_gate(gate)
            wait_gone([pids[1]], PATIENCE_S)
        shown = kept = 0
        for rank, (name, text) in itertools.product((0, 1), (("out", run.stdout), ("err", run.stderr))):
            words = f"the last output of rank {rank}"
            shown += f":{rank}] {words}\n" in text
            kept += (run.run_directory() / f"rank{rank}.{name}").read_text().endswith(words)
        figures("last lines lost on the console", 4 - shown, at_most=0, unit="lines")
        figures("last lines lost from the logs", 4 - kept, at_most=0, unit="lines")


CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    static volatile long long *shift;
    int fd = shift ? -1 : open(getenv("SHIFT_FILE"), O_RDONLY | O_CLOEXEC);
    if (!shift) shift = mmap(0, 8, PROT_READ, MAP_SHARED, fd, 0);
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += *shift;
    return status;
}
"""
"""Seconds by which the wall clock is wrong are shared by all processes that have the file."""


@pytest.mark.fault(58, "the wall clock jumps by an hour", promise="3, 8")
@pytest.mark.parametrize("hours", [1, -1])
def test_a_jump_of_the_wall_clock_has_no_effect(
    tmp_path: Path, gate: Path, figures: Figures, pace: Pace, hours: int
) -> None:
    """For the job's processes only, agents included: the real clock is the whole machine's.

    A heartbeat, the job's limit and the grace all pass after the jump.
    """
    compiler, library, shift = shutil.which("cc"), tmp_path / "clock.so", tmp_path / "shift"
    if compiler is None:
        pytest.skip("cc is needed to make a wall clock that can jump")
    made = [compiler, "-shared", "-fPIC", "-o", str(library), "-x", "c", "-", "-ldl"]
    harness.completed(made, 0, input=CLOCK)
    shift.write_bytes(struct.pack("=q", 0))
    env = {**os.environ, "LD_PRELOAD": str(library), "SHIFT_FILE": str(shift)}
    tells = worker("""
        resist()
        before = time.time()
        ready()
        open("gate").read()
        print("the clock jumped by", round((time.time() - before) / 3600), "h", flush=True)
        wait()
    """)
    options = (*stop_after(pace.stop_s), "--set", "timeouts.job=6s")
    with running(write_job(tmp_path, tells, ONE), *options, env=env) as run:
        pids = run.wait_ready(1)
        with shift.open("r+b") as file:  # not emptied first: the processes have it mapped
            file.write(struct.pack("=q", hours * 3600))
        open_gate(gate)
        run.wait_for(f"the clock jumped by {hours} h")
        with clean(run, pids, figures, Ending(124, "the job timed out after 6 s", pace.stop_s + 2.0)):
            run.wait_for("the job timed out")
            figures("the limit's error", abs(time.monotonic() - run.began - 6.0), at_most=3.0)
        first, last = run.events("AgentUp")[0]["time"], run.events("Swept")[-1]["time"]
        assert abs(last - first - hours * 3600) < 60, "the command's own clock did not jump"


def test_keeps_at_most_the_limit_of_each_log_and_says_so(tmp_path: Path) -> None:
    command = "command: [sh, -c, 'printf 12345; echo 6789; echo err >&2']"
    (tmp_path / "job.yaml").write_text(f"{command}\n{ONE}logs: {{limit: 7B}}\n")
    done = distlaunch("run", str(tmp_path / "job.yaml"), status=0)
    (directory,) = (tmp_path / "runs").iterdir()
    kept = [(directory / name).read_text() for name in ("rank0.out", "rank0.err")]
    assert (done.stdout, kept) == ("[node0:0] 123456789\n", ["1234567", "err\n"])
    beyond = "distlaunch: 3 bytes of output beyond logs.limit were not kept\n"
    assert "rank0.out has reached logs.limit: further output is not saved\n" in done.stderr
    assert beyond in done.stderr
    shown = distlaunch("logs", str(directory))
    assert sorted(shown.stdout.splitlines()) == ["[node0:0] 1234567", "[node0:0] err"]
    assert shown.stderr == beyond


def test_says_that_the_run_directory_was_removed(tmp_path: Path) -> None:
    with running(write_job(tmp_path, SLEEPER, ONE)) as run:
        pids = run.wait_ready(1)
        shutil.rmtree(run.run_directory())
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130
    wait_gone([*pids.values()], 0.0)
    assert " was removed or renamed during the run; if it was removed, its logs are lost" in run.stderr
    assert not [*(tmp_path / "runs").iterdir()]


def test_everything_moves_with_a_run_directory_that_is_renamed(tmp_path: Path, gate: Path) -> None:
    """Its project, for example: the second attempt's files, the status and the summary are in it, too."""
    (tmp_path / "project").mkdir()
    fails_once = """
        import os
        print("up", flush=True)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            open("../gate").read()
            raise SystemExit(5)
    """
    with running(write_job(tmp_path / "project", fails_once, f"{ONE}restarts: 1\n")) as run:
        run.wait_for("up")
        was = run.run_directory()
        (tmp_path / "project/runs").rename(tmp_path / "moved")
        open_gate(gate)
        assert run.wait() == 0
    assert f"{was} was removed or renamed during the run; if it was removed" in run.stderr
    (moved,) = (tmp_path / "moved").iterdir()
    assert (moved / "attempt1/rank0.out").read_text() == "up\n"
    (row,) = json.loads(distlaunch("ps", "-a", "--json", str(tmp_path / "moved")).stdout)
    assert (row["state"], row["exit_status"]) == ("SUCCEEDED", 0)
    assert (moved / "summary.json").exists()
    assert not (tmp_path / "project/runs").exists()


RELAY = """
import os, subprocess, sys, threading, time
agent = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

def commands():
    while data := os.read(0, 1 << 16):
        agent.stdin.write(data)
        agent.stdin.flush()
    agent.stdin.close()

def pieces():
    carried = 0
    while data := os.read(agent.stdout.fileno(), 1 << 16):
        yield (carried := carried + len(data))
        while data:
            data = data[os.write(1, data):]
        time.sleep(0.02)

threading.Thread(target=commands, daemon=True).start()
"""
STANDS_STILL = """
still = False
for carried in pieces():
    if carried > 6 << 20 and not still:
        still = True
        time.sleep(20)
os._exit(agent.wait())
"""
LOSES_THE_END = """
for carried in pieces():
    if agent.poll() is not None:  # what is left in the pipe is lost, as by conmon
        break
os._exit(agent.wait())
"""
BREAKS = """
for carried in pieces():
    if carried > 6 << 20:
        os._exit(0)
"""


@pytest.mark.parametrize("relay", [STANDS_STILL, LOSES_THE_END, BREAKS], ids=["still", "lossy", "broken"])
def test_output_that_a_connection_delivers_late_is_kept_and_what_it_loses_is_told(
    tmp_path: Path, relay: str
) -> None:
    """A connection may stand still for less time than the controller waits for it, 30 s."""
    program = tmp_path / "relay.py"
    program.write_text(RELAY + relay)
    far = {"nodes": ["far"], "launcher": {"command": [sys.executable, str(program)]}}
    prints = "import sys\nfor i in range(20_000):\n    sys.stdout.write(f'{i:999}\\n')\n"
    keys = {"python": sys.executable, "rendezvous": "none", "logs": {"console": "none"}, **far}
    keys["timeouts"] = {"lease": "60s"}
    told = distlaunch("run", str(here(tmp_path, prints, **keys)), status=0).stderr
    (log,) = tmp_path.glob("runs/*/rank0.out")
    lost = "far: its connection ended early; its output may be incomplete" in told
    assert (log.stat().st_size == 20_000 * 1000, lost) == (relay != BREAKS, relay == BREAKS), told


def test_a_suspended_process_does_not_take_its_disk_for_a_slow_one() -> None:
    script = (
        "from distlaunch.observers.outlet import Backlog; import os\n"
        "def write():\n"
        "    while backlog.queue:\n"
        "        os.read(0, 1)\n"
        "        with backlog.changed: backlog.written(backlog.queue.popleft())\n"
        "backlog = Backlog('slow', write)\n"
        "with backlog.changed: backlog.add(1, 1)\n"
        "print('writes', flush=True)\n"
        f"print(backlog.drain({LONG_S}, lambda quiet_s: quiet_s < {LONG_S}))"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdin and process.stdout and process.stdout.readline() == "writes\n"
        kill(process.pid, signal.SIGSTOP)
        time.sleep(LONG_S + 1)  # the suspension itself
        process.stdin.close()
        kill(process.pid, signal.SIGCONT)
        assert process.stdout.read() == "True\n"
