"""Code that a job brings to its nodes: the right tree, or a clear error, and nothing left behind."""

import hashlib
import json
import os
import shutil
import signal
import sys
import time
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cluster.hosts import Site, parent_of
from tests.cluster.test_check import mounted
from tests.harness import (
    Done,
    Run,
    completed,
    distlaunch,
    distlaunch_argv,
    kill,
    on_time,
    running,
    wait_until,
)

SHOWS = """
import hashlib, os, pathlib
names = sorted(str(path) for path in pathlib.Path().rglob("*") if path.is_file())
text = "".join(name + "\\0" + hashlib.sha256(pathlib.Path(name).read_bytes()).hexdigest() for name in names)
print(os.environ["RANK"], hashlib.sha256(text.encode()).hexdigest(), oct(os.stat("train.py").st_mode))
"""
"""Each rank prints a digest of all files below its working directory."""


class Desk(NamedTuple):
    """A user's repository here, and three hosts of which each has a home directory of its own."""

    site: Site
    repository: Path
    homes: Mapping[str, Path]
    here: Path

    def job(self, **keys: Any) -> Path:
        """The job file, with more `keys`."""
        job = {"nodes": [*self.homes], "gpus_per_node": 0, "python": sys.executable, "script": "train.py"}
        ours = {"ssh": {"config": str(self.site.ssh_config)}, "logs": {"dir": str(self.here / "runs")}}
        given = {**job, **ours, "sync": True, **keys}
        given = {key: value for key, value in given.items() if value is not None}
        (self.repository / "job.yaml").write_text(json.dumps(given))
        return self.repository / "job.yaml"

    @property
    def env(self) -> dict[str, str]:
        """The variables of commands here."""
        return {**os.environ, "HOME": str(self.here)}

    def run(self, *words: str, **keys: Any) -> Done:
        """Run the job to its end."""
        done = distlaunch("run", str(self.job(**keys)), *words, cwd=self.repository, env=self.env)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def expected(self) -> str:
        """The digest that the ranks print of the repository as it is now."""
        argv = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = completed(argv, 0, cwd=self.repository).stdout
        names = sorted(filter(None, listed.split("\0")))
        digests = (hashlib.sha256((self.repository / name).read_bytes()).hexdigest() for name in names)
        text = "".join(f"{name}\0{digest}" for name, digest in zip(names, digests, strict=True))
        return hashlib.sha256(text.encode()).hexdigest()

    def stores(self) -> list[Path]:
        """The stores here and on the hosts."""
        return [home / ".cache" / "distlaunch" / "sync" for home in (self.here, *self.homes.values())]

    def check_clean(self) -> None:
        """No tree is left, and contents in the stores are what their names say.

        The run doesn't wait for nodes that were still being connected when it ended.
        """
        wait_until(lambda: not self.left(), lambda: str(self.left()))
        for store in self.stores():
            self.check_contents(store)

    def check_contents(self, store: Path) -> None:
        """Each content in a store is what its name says."""
        for path in store.glob("blobs/*/*"):
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            assert digest == path.parent.name + path.name.removesuffix("x"), path

    def left(self) -> list[Path]:
        """What is left of runs in the stores."""
        return [path for store in self.stores() for path in (*store.glob("runs/*"), *store.glob("new/*"))]


@pytest.fixture
def desk(site: Site) -> Desk:
    return desk_of(site)


def desk_of(site: Site, places: Mapping[str, Path] | None = None) -> Desk:
    """A desk whose hosts have these homes, or one of its own each."""
    places = places or {host: site.directory / f"home-{host}" for host in ("host1", "host2", "host3")}
    repository, here = site.directory / "repository", site.directory / "here"
    repository.mkdir()
    here.mkdir()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.example"]
    (repository / "train.py").write_text(SHOWS)
    (repository / "package").mkdir()
    (repository / "package" / "model.py").write_text("width = 8\n")
    (repository / "package" / "empty.py").touch()
    (repository / ".gitignore").write_text("*.pt\njob.yaml\n")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        completed([*git, *words], cwd=repository, status=0)
    homes = {}
    for host, home in places.items():
        home.mkdir(exist_ok=True)
        port = site.sshd(host, over=site.login(home, "/bin/sh"))
        homes[site.name(f"{host}-{port}", host, port)] = home
    return Desk(site, repository, homes, here)


def rows(done: Done | Run) -> list[str]:
    """What the ranks printed, without their tags."""
    return sorted(line.partition("] ")[2] for line in done.stdout.splitlines())


def test_every_node_has_the_same_proven_tree_and_keeps_none(desk: Desk) -> None:
    (desk.repository / "package" / "new.py").write_text("untracked = True\n")
    (desk.repository / "big.pt").write_bytes(bytes(1 << 16))  # ignored by git
    done = desk.run()
    assert (done.returncode, rows(done)) == (0, [f"{rank} {desk.expected()} 0o100400" for rank in range(3)])
    assert desk.left() == []
    for store in desk.stores():
        assert {path.stat().st_mode & 0o777 for path in store.rglob("*") if path.is_file()} <= {0o400, 0o600}
    assert desk.run().stderr.count("sending") == 0, "nothing has changed"
    (desk.repository / "package" / "model.py").write_text("width = 16\n")
    done = desk.run()
    assert (done.returncode, done.stderr.count("sending 1 file ")) == (0, 3)
    assert done.stdout.count(desk.expected()) == 3


def wheel(directory: Path, name: str, body: str) -> None:
    """A wheel of one module, which can be installed without a network."""
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": body,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    directory.mkdir(exist_ok=True)
    with zipfile.ZipFile(directory / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


USES = "import os, sys, tiny; print(tiny.ANSWER, sys.prefix != sys.base_prefix)"


RUN = {"run": "pip install -r requirements.txt", "key": ["requirements.txt"]}


@pytest.mark.parametrize(("setup", "count"), [("uv", 3), (RUN, 1)], ids=["uv", "run"])
def test_each_node_builds_the_environment_once(desk: Desk, setup: Any, count: int) -> None:
    wheel(desk.repository / "wheels", "tiny", "ANSWER = 41\n")
    (desk.repository / "requirements.txt").write_text("--no-index\n--find-links wheels\ntiny\n")
    (desk.repository / "train.py").write_text(USES)
    hosts, path = [*desk.homes][:count], f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"  # with uv
    keys = {"setup": setup, "nodes": hosts, "env": {"PATH": path}}
    done = desk.run(**keys)
    assert (done.returncode, rows(done)) == (0, ["41 True"] * count), done.stderr
    assert f"{hosts[0]}: + " in done.stderr
    assert not any(f"{host}: + " in done.stderr for host in hosts[1:])
    (directory,) = (desk.here / "runs").iterdir()
    assert {path.name for path in directory.glob("setup-*")} == {f"setup-{host}.log" for host in hosts}
    (desk.repository / "train.py").write_text(USES + "\n")
    done = desk.run(**keys)
    assert (done.returncode, rows(done)) == (0, ["41 True"] * count), done.stderr
    assert ": + " not in done.stderr
    stores = [desk.homes[host] / ".cache/distlaunch/sync/envs" for host in hosts]
    assert [len([*store.glob("*.lock")]) for store in stores] == [1] * count
    (desk.repository / "requirements.txt").write_text("--no-index\n--find-links wheels\nnonesuch\n")
    done = desk.run(**keys)
    assert (done.returncode, done.stdout) == (1, "")
    assert any(f"can't build the environment on {host}: " in done.stderr for host in hosts)
    assert "nonesuch" in done.stderr and "ended with status 1" in done.stderr
    for store in stores:
        assert sum(path.is_dir() and not path.is_symlink() for path in store.iterdir()) == 1, "a half is left"


# When something is wrong: with a store, a disk, a node, or two jobs


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


def assert_right(desk: Desk, done: Done, ranks: int = 3, sent: int | None = None) -> None:
    assert (done.returncode, done.stdout.count(desk.expected())) == (0, ranks), done.stderr
    assert sent is None or done.stderr.count(": sending ") == sent, done.stderr
    desk.check_clean()


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
    told = f"can't copy the code to {[*desk.homes][1]}: {tree / CODE} was changed during the run"
    assert told in run.stderr
    assert f"the job left files in {tree}" in run.stderr
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


def test_a_node_that_returns_gets_the_code_beside_what_its_ranks_wrote(desk: Desk) -> None:
    own = "import pathlib; mine = pathlib.Path('mine.txt')\n"
    own += "print('found', mine.exists() and mine.read_text()); mine.unlink(missing_ok=True)\n"
    waits = WAITS.replace("    print(", "    open('mine.txt', 'w').write(os.environ['RANK'])\n    print(", 1)
    (desk.repository / "train.py").write_text(waits.replace(SHOWS, own + SHOWS))
    with running(desk.job(restarts={"max": 1}, timeouts={"stop": "2s", "lease": "3s"}), env=desk.env) as run:
        ready = run.wait_ready(3)
        kill(parent_of(parent_of(ready[1])))  # the guardian, so that the agent leaves
        assert run.wait() == 0, run.stderr
    assert sorted(row for row in rows(run) if "found" in row) == [f"found {rank}" for rank in range(3)]
    assert run.stdout.count(desk.expected()) == 3
    desk.check_clean()


def test_two_jobs_at_once_have_each_their_own_code(desk: Desk) -> None:
    other = desk._replace(repository=desk.site.directory / "other")
    shutil.copytree(desk.repository, other.repository)
    (other.repository / CODE).write_text("width = 16\n")
    jobs = [desk, other, desk, other]
    for each in jobs[:2]:
        each.job()
    argv = distlaunch_argv("run", "job.yaml")
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(completed, argv, cwd=each.repository, env=each.env) for each in jobs]
    for each, run in zip(jobs, runs, strict=True):
        done = run.result()
        assert (done.returncode, done.stdout.count(each.expected())) == (0, 3), done.stderr
    desk.check_clean()


def test_a_node_without_room_is_named_and_works_again_once_there_is_some(site: Site) -> None:
    places = {host: site.directory / f"home-{host}" for host in HOSTS}
    with mounted(site, "host2", places["host2"], "-t", "tmpfs", "-o", "size=400k", "tmpfs"):
        desk, inside = desk_of(site, places), Path(f"/proc/{site.bed.hosts['host2'].pid}/root")
        name, home = [*desk.homes][1], inside / places["host2"].relative_to("/")
        desk = desk._replace(homes={**desk.homes, name: home})
        (desk.repository / "package/large.bin").write_bytes(os.urandom(120_000))
        (home / "filled").write_bytes(bytes(330 << 10))
        done = desk.run()
        assert (done.returncode, done.stdout) == (1, "")
        words = done.stderr.partition(f"can't copy the code to {name}: ")[2].partition("\n")[0]
        place = places["host2"] / ".cache/distlaunch/sync"
        assert words.startswith(str(place)) and ": No space left on device; " in words, done.stderr
        desk.check_clean()
        (home / "filled").unlink()
        assert_right(desk, desk.run())


def test_a_base_of_another_user_is_refused(desk: Desk) -> None:
    place = desk.site.directory / "theirs"
    place.mkdir(mode=0o777)
    os.chown(place, 12345, 12345)
    done = desk.run(sync={"to": str(place)})
    assert done.returncode == 1
    assert f"{place} belongs to another user; for a node, set sync.to" in done.stderr
    assert [*place.iterdir()] == []


def test_ctrl_c_while_code_is_sent_ends_at_once_and_leaves_nothing(desk: Desk) -> None:
    (desk.repository / "large.bin").write_bytes(os.urandom(200 << 20))
    stores = desk.stores()[1:]
    with running(desk.job(), env=desk.env) as run:
        run.wait_for("sending", times=3)
        wait_until(lambda: any([*store.glob("new/*.*")] for store in stores), lambda: run.stderr)
        run.process.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert run.wait() == 130
        on_time("the end", time.monotonic() - began, 2.0)
    assert "Traceback" not in run.stderr
    assert desk.left() == []


def test_several_nodes_on_one_machine_and_a_detached_run_get_the_code(desk: Desk) -> None:
    assert_right(desk, desk.run(nodes=3), sent=0)
    done = desk.run("--detach", nodes=3)
    assert done.returncode == 0, done.stderr
    completed(distlaunch_argv("attach", done.stdout.split()[0]), cwd=desk.repository, env=desk.env)
    desk.check_clean()


@pytest.mark.long
def test_kills_at_random_moments_leave_no_store_wrong(site: Site) -> None:
    from tests.faults.sync import series  # which needs what is above

    series(site, kills=3, seed=1, files=500)
