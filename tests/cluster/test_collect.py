"""Files that ranks wrote come back from their nodes: the right ones, whole, and nothing else."""

import json
import os
import signal
import stat
import time
from pathlib import Path
from textwrap import dedent

import pytest

from distlaunch.agent.messages import FileBegins
from distlaunch.job.spec import Collect
from distlaunch.launch import collecting
from tests.cluster.hosts import Site, parent_of
from tests.cluster.test_sync import desk_of
from tests.faults.agents import Lie, python_that_lies
from tests.faults.disks import freezable_disk, frozen, small_disk
from tests.faults.memory import Meter, bare_mib
from tests.harness import PRESS_S, distlaunch, kill, open_gate, program, running, wait_until, write_job

WRITES = """
import os, pathlib
home, rank = pathlib.Path.home(), os.environ["RANK"]
ckpt = pathlib.Path("ckpt", "step-1")
ckpt.mkdir(parents=True)
(ckpt / ".metadata").touch()
(ckpt / "model.pt").write_bytes(rank.encode() * 300_000)
pathlib.Path("ckpt", "latest").symlink_to("step-1")
pathlib.Path("ckpt", "link.csv").symlink_to("/etc/passwd")
pathlib.Path("losses.csv").write_text(rank)
os.mkfifo("pipe.csv")
(home / "notes").mkdir()
(home / "notes" / "a.txt").write_text(rank)
"""


def files_in(directory: Path) -> dict[str, bytes]:
    """The files below it, none of which is open to others."""
    found = [path for path in directory.rglob("*") if not path.is_dir()]
    assert {stat.S_IMODE(path.lstat().st_mode) for path in found} <= {0o100600 & 0o777}
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.rglob("*") if path.is_dir()} <= {0o700}
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


def test_collects_from_all_nodes_what_the_patterns_match(site: Site) -> None:
    desk = desk_of(site)
    (desk.repository / "train.py").write_text(WRITES)
    paths = ["ckpt/latest", "**/*.csv", "~/notes", "no-*", f"{site.directory}/home-host1/notes/*"]
    done = desk.run(collect={"paths": paths, "from": "all"})
    assert done.returncode == 0, done.stderr
    (directory,) = (desk.here / "runs").iterdir()
    expected: dict[str, bytes] = {}
    for rank, (host, home) in enumerate(desk.homes.items()):
        text = str(rank).encode()
        own = {"ckpt/latest/.metadata": b"", "ckpt/latest/model.pt": text * 300_000, "losses.csv": text}
        # All hosts see the files of the first.
        own |= {f"{home}/notes/a.txt"[1:]: text, f"{site.directory}/home-host1/notes/a.txt"[1:]: b"0"}
        expected |= {f"{host}/{path}": content for path, content in own.items()}
    assert files_in(directory / "collected") == expected
    assert f"collected {len(expected)} files (878 KiB) into {directory}/collected" in done.stderr
    left_out = "pipe.csv (is not a regular file), ckpt/link.csv (is a symlink), no-* (matches nothing)"
    assert f"not collected from {', '.join(desk.homes)}: {left_out}" in done.stderr
    listed = json.loads((directory / "summary.json").read_text())["collected"]
    sizes = {path: len(content) for path, content in expected.items()}
    assert {f"{file['node']}/{file['path']}": file["size"] for file in listed} == sizes


def test_collects_from_the_node_of_rank_0_and_after_a_failure(site: Site) -> None:
    desk = desk_of(site)
    fails = "os._exit(3) if os.environ['RANK'] == '0' else signal.pause()"
    script = desk.repository / "train.py"
    script.write_text(f"import os, signal; open('part', 'w').write('x'); {fails}")
    assert desk.run(sync=None, workdir="~/", script=str(script), collect=["part"]).returncode == 3
    (directory,) = (desk.here / "runs").iterdir()
    assert files_in(directory / "collected") == {f"{next(iter(desk.homes))}/part": b"x"}


# On this machine


def test_leaves_out_what_exceeds_the_limit_and_the_logs_of_other_runs(tmp_path: Path) -> None:
    script = "open('a', 'w').write('x' * 5000); open('b', 'w').write('y' * 4000); open('c', 'w').write('z')"
    job = write_job(tmp_path, script, "gpus_per_node: 0\ncollect: {paths: ['?', '**/?'], limit: 4500}")
    for _ in range(2):
        done = distlaunch("run", str(job), status=0)
        assert "collected 2 files (3 KiB) into" in done.stderr
    for directory in (tmp_path / "runs").iterdir():
        assert files_in(directory / "collected") == {"node0/b": b"y" * 4000, "node0/c": b"z"}
    assert "not collected from node0: a (exceeds collect.limit)" in done.stderr


def test_a_big_file_takes_little_memory(tmp_path: Path) -> None:
    meter, bare = Meter(tmp_path), bare_mib()
    script = "file = open('big', 'wb')\nfor number in range(200): file.write(bytes([number]) * (1 << 20))"
    job = write_job(tmp_path, script, "gpus_per_node: 0\ncollect: [big]")
    distlaunch("run", str(job), executable=str(meter.program), status=0)
    (kept,) = tmp_path.glob("runs/*/collected/node0/big")
    assert kept.stat().st_size == 200 << 20 and kept.read_bytes() == (tmp_path / "big").read_bytes()
    assert meter.peak_mib - bare < 64  # of the largest process: the command, the agent, or the rank


def test_a_quiet_run_says_only_what_it_could_not_collect(tmp_path: Path) -> None:
    job = write_job(tmp_path, "open('first', 'w')", "gpus_per_node: 0\ncollect: [first, second]\n")
    done = distlaunch("run", "--quiet", str(job), status=0)
    assert done.stderr == "distlaunch: not collected from node0: second (matches nothing)\n"


@pytest.mark.parametrize("others", ["spares: [c]", "min_nodes: 1"])
def test_names_a_lost_node_that_the_run_ended_well_without(others: str, tmp_path: Path) -> None:
    for host in "abc":
        program(tmp_path / f"reach-{host}", 'exec "$@"')
    script = """
        import os, signal
        print("ready", os.environ["RANK"], os.getpid(), flush=True)
        os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and signal.pause()
    """
    keys = f"""
        gpus_per_node: 0
        nodes: [a, b]
        master_addr: 192.0.2.1
        launcher: {{command: ['{tmp_path}/reach-{{host}}']}}
        restarts: {{max: 1}}
        {others}
        timeouts: {{rejoin: 1s, stop: 100ms}}
        collect: {{paths: ['*.pt'], from: [b]}}
    """
    with running(write_job(tmp_path, script, dedent(keys))) as going:
        pids = going.wait_ready(2)
        (tmp_path / "reach-b").unlink()
        kill(parent_of(parent_of(pids[1])))
        assert going.wait() == 0, going.stderr
        directory = str(going.run_directory())
    told = "not collected from b: all files (the node was lost)\n"
    assert told in going.stderr and told in distlaunch("why", directory, status=0).stdout


def test_ctrl_c_twice_ends_the_collection_at_once(tmp_path: Path) -> None:
    script = f"open('first', 'w').write('x'); open('huge', 'w').truncate({4 << 30})"
    job = write_job(tmp_path, script, "gpus_per_node: 0\ncollect: {paths: [first, huge], limit: 8GiB}")
    with running(job) as going:
        wait_until(lambda: bool([*tmp_path.glob("runs/*/collecting/node0/huge")]), lambda: going.stderr)
        going.process.send_signal(signal.SIGINT)
        going.wait_for("all ranks have ended; press Ctrl-C again to stop collecting files")
        time.sleep(PRESS_S)  # faster, it would count as one
        going.process.send_signal(signal.SIGINT)
        assert going.wait() == 0, going.stderr
        assert files_in(going.run_directory() / "collected") == {"node0/first": b"x"}
    assert "huge (is incomplete)" in going.stderr


def test_what_the_last_rank_saves_at_the_end_is_collected_too(tmp_path: Path) -> None:
    """The nodes share a directory, as on a cluster. When rank 1 exits, node0 has long been without ranks."""
    os.mkfifo(tmp_path / "gate")
    script = """
        import os, signal, sys
        def save(*_):
            if os.environ["RANK"] == "1":
                open("gate").read()
                open("final", "w").write("whole")
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print("ready", os.environ["RANK"], os.getpid(), flush=True)
        signal.pause()
    """
    keys = "nodes: 2\nprocs_per_node: 1\ngpus_per_node: 0\nrendezvous: none\ncollect: [final]\n"
    with running(write_job(tmp_path, script, keys)) as going:
        going.wait_ready(2)
        going.process.send_signal(signal.SIGINT)
        going.wait_for("waiting for rank 1 (node1, pid ")
        open_gate(tmp_path / "gate")
        assert going.wait() == 130, going.stderr
        assert files_in(going.run_directory() / "collected") == {"node0/final": b"whole"}


def test_a_killed_controller_leaves_no_incomplete_file_under_its_name(tmp_path: Path) -> None:
    script = f"open('huge', 'w').truncate({4 << 30})"
    job = write_job(tmp_path, script, "gpus_per_node: 0\ncollect: {paths: [huge], limit: 8GiB}")
    with running(job) as going:
        wait_until(lambda: bool([*tmp_path.glob("runs/*/collecting/node0/huge")]), lambda: going.stderr)
        kill(going.process.pid)
        going.wait()
        directory = going.run_directory()
        assert not (directory / "collected").exists()
        said = distlaunch("wait", str(directory), status=71).stderr
    assert "files to collect are missing or incomplete (see collecting/ in the run directory)" in said


def test_a_full_disk_keeps_the_summary(tmp_path: Path) -> None:
    script = f"""
        for name, size in (("small", 1), ("large", {32 << 20}), ("last", 1)):
            open(name, "wb").write(b"x" * size)
    """
    job = write_job(tmp_path, script, "gpus_per_node: 0\ncollect: [small, large, last]")
    with small_disk(tmp_path / "runs", "size=24m"):
        done = distlaunch("run", str(job), status=0)
        (directory,) = (tmp_path / "runs").iterdir()
        assert files_in(directory / "collected") == {"node0/small": b"x", "node0/last": b"x"}
        assert json.loads((directory / "summary.json").read_text())["exit_status"] == 0
        why = "No space left on device: 16 MiB are kept free for the run's other files"
        told = f"not collected from node0: large ({why})\n"
        assert told in distlaunch("wait", str(directory), status=0).stderr
        assert told in distlaunch("why", str(directory), status=0).stdout
    assert told in done.stderr
    assert "could not be written" not in done.stderr


@pytest.mark.parametrize("quick", [True, False])  # or the disk turns out to be full between two pieces
def test_a_disk_that_fills_up_meanwhile_gets_room_again_at_once(
    quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "SPARE", -(1 << 40))
    with small_disk(tmp_path / "run", "size=4m") as disk:
        files = collecting.Files(str(disk), Collect(("*",)))
        for path, pieces in (("small", 1), ("large", 128), ("later", 1)):
            files.take(0, "a", FileBegins(0, path, pieces << 17))
            for _ in range(pieces):
                files.take(0, "a", bytes(1 << 17))
                assert quick or files._writer.flush()
        assert [path.name for path in (disk / "collecting" / "a").iterdir()] == ["small"]
        kept, lines = files.close({1: "b"})
    assert [file["path"] for file in kept] == ["small"]
    assert "large (No space left on device), later (No space left on device)" in lines[1]
    assert lines[2] == "not collected from b: all files (the node sent none)"


def test_a_stalled_disk_delays_no_result(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    script = f"print('waits', flush=True); open('gate').read(); open('large', 'wb').write(bytes({4 << 20}))"
    with freezable_disk(tmp_path / "disk") as disk:
        keys = f"gpus_per_node: 0\ncollect: [large]\nlogs: {{dir: {disk}}}"
        with running(write_job(tmp_path, script, keys)) as going:
            going.wait_for("waits")
            with frozen(disk):
                open_gate(tmp_path / "gate")
                going.wait_for("not collected from node0: large (is incomplete)")
            assert going.wait() == 0, going.stderr  # the kernel keeps a process that is writing


def test_a_node_chooses_no_path_here(site: Site) -> None:
    """Its link ends with the reason, and the job as if nothing had happened."""
    file = "{'op': 'FileBegins', 'path': '../../escaped', 'size': 1}"
    lie = Lie("Swept", f"encode(node, message) + encode(node, {file})")
    python = python_that_lies(site.directory / "python", lie)
    job = site.job([{"host": "host1", "python": python}], command=["true"], collect=["x"])
    done = distlaunch("run", str(job), status=0)
    words = "'../../escaped' is not the path of a collected file"
    assert f"not collected from host1: other files (protocol error: {words}" in done.stderr
    assert not [*site.directory.rglob("escaped")]


def test_a_file_that_was_not_requested_ends_the_link(site: Site) -> None:
    file = "{'op': 'FileBegins', 'path': 'x', 'size': 1}"
    lie = Lie("WorkerStarted", f"encode(node, message) + encode(node, {file})")
    python = python_that_lies(site.directory / "python", lie)
    done = distlaunch("run", str(site.job([{"host": "host1", "python": python}], command=["sleep", "1000"])))
    assert "host1 was lost: a file that was not requested" in done.stderr
