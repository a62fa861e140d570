"""Code that a job brings to its nodes: the right tree, or a clear error, and nothing left behind."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cluster.hosts import Site
from tests.harness import Done, completed, distlaunch_argv, wait_until

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
        job = {
            "nodes": [*self.homes],
            "gpus_per_node": 0,
            "ssh": {"config": str(self.site.ssh_config)},
            "python": sys.executable,
            "script": "train.py",
            "sync": True,
            "logs": {"dir": str(self.here / "runs")},
        }
        (self.repository / "job.yaml").write_text(json.dumps(job | keys))
        return self.repository / "job.yaml"

    @property
    def env(self) -> dict[str, str]:
        """The variables of commands here."""
        return {**os.environ, "HOME": str(self.here)}

    def run(self, *words: str, command: str = "run", **keys: Any) -> Done:
        """Run the job to its end."""
        argv = distlaunch_argv(command, str(self.job(**keys)), *words)
        done = completed(argv, cwd=self.repository, env=self.env)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def expected(self) -> str:
        """The digest that the ranks print of the repository as it is now."""
        argv = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(argv, cwd=self.repository, check=True, capture_output=True, text=True).stdout
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

    def left(self) -> list[Path]:
        """What is left of runs in the stores."""
        return [
            path
            for store in self.stores()
            for directory in ("runs", "new")
            for path in store.glob(f"{directory}/*")
        ]

    def check_contents(self, store: Path) -> None:
        """Each content in a store is what its name says."""
        for path in store.glob("blobs/*/*"):
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            assert digest == path.parent.name + path.name.removesuffix("x"), path


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


def test_every_node_has_the_same_proven_tree_and_keeps_none(desk: Desk) -> None:
    (desk.repository / "package" / "new.py").write_text("untracked = True\n")
    (desk.repository / "big.pt").write_bytes(bytes(1 << 16))  # ignored by git
    done = desk.run()
    rows = sorted(line.partition("] ")[2] for line in done.stdout.splitlines())
    assert (done.returncode, rows) == (0, [f"{rank} {desk.expected()} 0o100400" for rank in range(3)])
    for store in desk.stores():
        assert [*(store / "runs").iterdir()] == [] == [*(store / "new").iterdir()]
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


def rows(done: Done) -> list[str]:
    """What the ranks printed, without their tags."""
    return sorted(line.partition("] ")[2] for line in done.stdout.splitlines())


RUN = {"run": "pip install -r requirements.txt", "key": ["requirements.txt"]}


@pytest.mark.parametrize(("setup", "count"), [("uv", 3), (RUN, 1)], ids=["uv", "run"])
def test_each_node_builds_the_environment_once(desk: Desk, setup: Any, count: int) -> None:
    wheel(desk.repository / "wheels", "tiny", "ANSWER = 41\n")
    (desk.repository / "requirements.txt").write_text("--no-index\n--find-links wheels\ntiny\n")
    (desk.repository / "train.py").write_text(USES)
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))
    hosts = [*desk.homes][:count]
    keys = {"setup": setup, "nodes": hosts, "env": {"PATH": path}}  # uv is there
    done = desk.run(**keys)
    assert (done.returncode, rows(done)) == (0, ["41 True"] * count), done.stderr
    assert f"{hosts[0]}: + " in done.stderr
    assert not any(f"{host}: + " in done.stderr for host in hosts[1:])
    (directory,) = (desk.here / "runs").iterdir()
    assert {path.name for path in directory.glob("setup-*")} == {f"setup-{host}.log" for host in hosts}
    (desk.repository / "train.py").write_text(USES + "\n")
    done = desk.run(**keys)
    assert (done.returncode, rows(done), ": + " in done.stderr) == (0, ["41 True"] * count, False), (
        done.stderr
    )
    stores = [desk.homes[host] / ".cache/distlaunch/sync/envs" for host in hosts]
    assert [len([*store.glob("*.lock")]) for store in stores] == [1] * count
    (desk.repository / "requirements.txt").write_text("--no-index\n--find-links wheels\nnonesuch\n")
    done = desk.run(**keys)
    assert (done.returncode, done.stdout) == (1, "")
    assert any(f"can't build the environment on {host}: " in done.stderr for host in hosts)
    assert "nonesuch" in done.stderr and "ended with status 1" in done.stderr
    for store in stores:
        assert sum(path.is_dir() and not path.is_symlink() for path in store.iterdir()) == 1, "a half is left"
