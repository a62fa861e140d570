"""Code that a job brings to its nodes when something is wrong: with a store, a disk, a node, or two jobs."""

import hashlib
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.hosts import Site, parent_of
from tests.cluster.test_check import mounted
from tests.cluster.test_sync import SHOWS, Desk, desk_of
from tests.faults.sync import series
from tests.harness import (
    Done,
    completed,
    distlaunch_argv,
    kill,
    on_time,
    running,
    wait_until,
)

HOSTS = ("host1", "host2", "host3")
CODE = "package/model.py"
WAITS = f"""
import os, signal
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    print("ready", os.environ["RANK"], os.getpid(), flush=True)
    signal.pause()
{SHOWS}
"""
"""In the first attempt, ranks wait to be killed."""


@pytest.fixture
def desk(site: Site) -> Desk:
    return desk_of(site)


def blob_of(home: Path, data: bytes) -> Path:
    digest = hashlib.sha256(data).hexdigest()
    return home / ".cache/distlaunch/sync/blobs" / digest[:2] / digest[2:]


def assert_right(desk: Desk, done: Done, ranks: int = 3, sent: int | None = None) -> None:
    assert (done.returncode, done.stdout.count(desk.expected())) == (0, ranks), done.stderr
    assert sent is None or done.stderr.count(": sending ") == sent, done.stderr
    desk.check_clean()


def truncated(path: Path) -> None:
    os.truncate(path, 3)


def changed(path: Path) -> None:
    path.write_bytes(b"X" * path.stat().st_size)


def longer(path: Path) -> None:
    path.write_bytes(b"X" * 10_000)


def removed(path: Path) -> None:
    path.unlink()


def everything_removed(path: Path) -> None:
    shutil.rmtree(path.parents[3])


def test_a_damaged_store_of_one_node_is_mended(desk: Desk) -> None:
    assert_right(desk, desk.run(), sent=3)
    home, data = desk.homes[next(iter(desk.homes))], (desk.repository / CODE).read_bytes()
    for damage in (truncated, changed, longer, removed, everything_removed):
        damage(blob_of(home, data))
        assert_right(desk, desk.run(), sent=1)
    changed(blob_of(home, data))
    changed(blob_of(desk.here, data))
    done = desk.run()
    assert done.returncode == 1
    assert f"{blob_of(desk.here, data)} was changed; to replace it, start the job again" in done.stderr
    assert_right(desk, desk.run(), sent=1)


def test_of_nodes_with_a_shared_home_one_receives_the_code_and_a_changed_tree_is_an_error(site: Site) -> None:
    home = site.directory / "home"
    desk = desk_of(site, dict.fromkeys(HOSTS, home))
    assert_right(desk, desk.run(), sent=1)
    assert_right(desk, desk.run(), sent=0)
    (desk.repository / "train.py").write_text(WAITS)
    job = desk.job(restarts={"max": 3}, timeouts={"stop": "2s"})
    with running(job, env=desk.env) as run:
        run.wait_ready(3)
        (tree,) = [path for path in (home / ".cache/distlaunch/sync/runs").iterdir() if path.is_dir()]
        (tree / CODE).unlink()
        (tree / CODE).write_text("width = 9\n")
        kill(parent_of(run.worker_pids()[1]))  # its agent
        assert run.wait() == 1
    assert (
        f"can't copy the code to {[*desk.homes][1]}: {tree / CODE} was changed during the run" in run.stderr
    )
    assert f"the ranks left files in {tree}" in run.stderr
    assert [path.relative_to(tree) for path in tree.rglob("*") if path.is_file()] == [Path(CODE)]


@pytest.mark.parametrize("spare", [True, False], ids=["spare", "returned"])
def test_a_node_that_comes_in_a_restart_gets_the_code(desk: Desk, spare: bool) -> None:
    (desk.repository / "train.py").write_text(WAITS)
    first, second, third = desk.homes
    nodes = {"nodes": [first, second], "spares": [third]} if spare else {"nodes": [first, second, third]}
    with running(desk.job(restarts={"max": 1}, timeouts={"stop": "2s"}, **nodes), env=desk.env) as run:
        ready = run.wait_ready(2 if spare else 3)
        (desk.repository / CODE).write_text("width = 1000\n")  # too late for this run
        kill(parent_of(ready[1]))
        assert run.wait() == 0, run.stderr
    (desk.repository / CODE).write_text("width = 8\n")
    assert run.stdout.count(desk.expected()) == len(ready)
    if spare:  # the tree of the killed agent is still there
        assert_right(desk, desk.run(nodes=[second], script=CODE), ranks=0)
    desk.check_clean()


def test_two_jobs_at_once_have_each_their_own_code(desk: Desk) -> None:
    other = desk._replace(repository=desk.site.directory / "other", here=desk.here)
    shutil.copytree(desk.repository, other.repository)
    (other.repository / CODE).write_text("width = 16\n")
    with ThreadPoolExecutor() as pool:
        jobs = [desk, other, desk, other]
        for each in jobs[:2]:
            each.job()
        argv = distlaunch_argv("run", "job.yaml")
        runs = [pool.submit(completed, argv, cwd=each.repository, env=each.env) for each in jobs]
        for each, run in zip(jobs, runs, strict=True):
            done = run.result()
            assert (done.returncode, done.stdout.count(each.expected())) == (0, 3), done.stderr
    desk.check_clean()


@pytest.mark.parametrize(("limit", "files", "size"), [("size=400k", 1, 330 << 10), ("nr_inodes=100", 80, 0)])
def test_a_node_without_room_is_named_and_works_again_once_there_is_some(
    site: Site, limit: str, files: int, size: int
) -> None:
    places = {host: site.directory / f"home-{host}" for host in HOSTS}
    disk = ("-t", "tmpfs", "-o", limit, "tmpfs")
    with mounted(site, "host2", places["host2"], *disk):
        desk, inside = desk_of(site, places), Path(f"/proc/{site.bed.hosts['host2'].pid}/root")
        name, home = [*desk.homes][1], inside / places["host2"].relative_to("/")
        desk = desk._replace(homes={**desk.homes, name: home})
        for number in range(12):
            (desk.repository / f"package/{number}.bin").write_bytes(os.urandom(10_000))
        (home / "filled").mkdir()
        for number in range(files):
            (home / "filled" / str(number)).write_bytes(bytes(size))
        done = desk.run()
        assert (done.returncode, done.stdout) == (1, "")
        words = done.stderr.partition(f"can't copy the code to {name}: ")[2].partition("\n")[0]
        place = places["host2"] / ".cache/distlaunch/sync"
        assert words.startswith(str(place)) and ": No space left on device; " in words, done.stderr
        desk.check_clean()
        shutil.rmtree(home / "filled")
        assert_right(desk, desk.run())


def test_a_base_of_another_user_is_refused(desk: Desk) -> None:
    place = desk.site.directory / "theirs"
    place.mkdir(mode=0o777)
    os.chown(place, 12345, 12345)
    done = desk.run(sync={"to": str(place)})
    assert done.returncode == 1
    assert f"{place} belongs to another user; on a node, set sync.to" in done.stderr
    assert [*place.iterdir()] == []


def test_ctrl_c_while_code_is_sent_ends_at_once_and_leaves_nothing(desk: Desk) -> None:
    with (desk.repository / "large.bin").open("wb") as file:
        for _ in range(200):
            file.write(os.urandom(1 << 20))
    stores = [home / ".cache/distlaunch/sync" for home in desk.homes.values()]
    with running(desk.job(), env=desk.env) as run:
        run.wait_for("sending", times=3)
        wait_until(lambda: any([*store.glob("new/*.*")] for store in stores), lambda: run.stderr)
        run.process.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert run.wait() == 130
        on_time("the end", time.monotonic() - began, 2.0)
    assert "Traceback" not in run.stderr
    for store in stores:
        assert [*store.glob("runs/*")] == [] == [*store.glob("new/*")]


def test_several_nodes_on_one_machine_and_a_detached_run_get_the_code(desk: Desk) -> None:
    done = desk.run(nodes=3)
    assert_right(desk, done, sent=0)
    done = desk.run("--detach", nodes=3)
    assert done.returncode == 0, done.stderr
    completed(distlaunch_argv("attach", done.stdout.split()[0]), cwd=desk.repository, env=desk.env)
    desk.check_clean()


@pytest.mark.long
def test_kills_at_random_moments_leave_no_store_wrong(site: Site) -> None:
    series(site, 3, 1)


def test_what_ranks_write_beside_the_code_stays_and_is_named(desk: Desk) -> None:
    host, home = next(iter(desk.homes.items()))
    (desk.repository / "train.py").write_text("open('out.txt', 'w').write('result')\n")
    done = desk.run(nodes=[host])
    place = done.stderr.partition(f"{host}: the ranks left files in ")[2].partition("; ")[0]
    assert (Path(place) / "out.txt").read_text() == "result", done.stderr
    assert Path(place).parent == home / ".cache/distlaunch/sync/runs"
    assert [path.name for path in Path(place).rglob("*")] == ["out.txt"]
