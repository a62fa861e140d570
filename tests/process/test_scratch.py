"""What the agent writes on its node: where it goes when a place is full, read-only or missing."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from shlex import quote

import pytest

from distlaunch.agent import wire
from distlaunch.agent.outbox import Spool
from distlaunch.agent.scratch import MEMORY, SPARE_PLACES, Folder, NoPlaceError, places
from tests.cluster.hosts import why_not
from tests.harness import PATIENCE_S, ROOT, distlaunch_argv, write_job

REASON = why_not()
mounts = pytest.mark.skipif(REASON is not None, reason=str(REASON))

READ_ONLY = "mount --bind {0} {0} && mount -o remount,bind,ro {0}"
# This checkout, which may be below the place, is put back before that is filled.
_ROOT = quote(str(ROOT))
FULL = (
    f"mkdir -p /mnt/kept && mount --bind {_ROOT} /mnt/kept && mount -t tmpfs -o size=64k none {{0}}"
    f" && mkdir -p {_ROOT} && mount --bind /mnt/kept {_ROOT}"
    " && {{ head -c 1000000 /dev/zero >{0}/fill 2>/dev/null || true; }}"
)
TELL = """
    import os
    print("in", os.path.dirname(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])))
"""


def run_among(spoilt: dict[str, str], folder: Path, job: str) -> "subprocess.CompletedProcess[str]":
    """Run a job whose rank tells where its error record goes; `spoilt` maps a place to what is done to it.

    `folder` is /mnt there, since /tmp may be hidden.
    """
    write_job(folder, TELL, f"gpus_per_node: 0\n{job}")
    return command_among(spoilt, folder, "run", "/mnt/job.yaml")


def command_among(
    spoilt: dict[str, str], folder: Path, *words: str, **environ: str
) -> "subprocess.CompletedProcess[str]":
    """The same for any command, with more in the environment."""
    lines = ['mount --bind "$0" /mnt', *(how.format(place) for place, how in spoilt.items())]
    script = " && ".join([*lines, "cd /mnt", 'exec "$@"'])
    argv = ["unshare", "--mount", "sh", "-c", script, str(folder), *distlaunch_argv(*words)]
    environment = {name: value for name, value in os.environ.items() if name != "TMPDIR"} | environ
    return subprocess.run(
        argv, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=environment
    )


@mounts
@pytest.mark.parametrize("how", [READ_ONLY, FULL], ids=["read-only", "full"])
def test_without_room_in_tmp_a_job_runs_all_the_same(how: str, tmp_path: Path) -> None:
    done = run_among({"/tmp": how}, tmp_path, "")
    assert (done.returncode, done.stdout.split()[-2:]) == (0, ["in", "/var/tmp"]), done.stderr


@mounts
def test_a_last_resort_is_shared_memory(tmp_path: Path) -> None:
    done = run_among({"/tmp": READ_ONLY, "/var/tmp": FULL}, tmp_path, "")
    assert (done.returncode, done.stdout.split()[-2:]) == (0, ["in", "/dev/shm"]), done.stderr


@mounts
def test_the_jobs_tmpdir_comes_first(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    done = run_among({}, tmp_path, "env: {TMPDIR: mine}")
    assert (done.returncode, done.stdout.split()[-2:]) == (0, ["in", "/mnt/mine"]), done.stderr
    assert list((tmp_path / "mine").iterdir()) == []


@mounts
def test_without_room_anywhere_every_place_is_named(tmp_path: Path) -> None:
    spoilt = dict.fromkeys(("/tmp", "/var/tmp", "/dev/shm"), READ_ONLY)
    done = run_among(spoilt, tmp_path, "env: {TMPDIR: /missing}")
    assert done.returncode == 126
    tried = "/missing: No such file or directory; " + "; ".join(
        f"{place}: Read-only file system" for place in spoilt
    )
    assert f"can't create a directory for error records in {tried}; set TMPDIR in env\n" in done.stderr
    assert "Traceback" not in done.stderr


@mounts
@pytest.mark.parametrize(
    ("spoilt", "environ", "place"),
    [
        (["/tmp"], {}, "/var/tmp"),
        (["/tmp", "/var/tmp"], {}, "/dev/shm"),
        (["/dev/shm"], {"TMPDIR": "/dev/shm"}, "/tmp"),
    ],
)
def test_torchruns_run_folder_is_where_it_can_be_made(
    spoilt: list[str], environ: dict[str, str], place: str, tmp_path: Path
) -> None:
    (tmp_path / "fail.py").write_text("raise SystemExit(3)")
    words = ("torchrun", "/mnt/fail.py")
    environ = environ or {"TMPDIR": "/tmp"}
    done = command_among(dict.fromkeys(spoilt, READ_ONLY), tmp_path, *words, **environ)
    found = re.search(r"with exit status 3; logs: (.*)/[^/]+\n", done.stderr)
    assert found and found[1] == place, done.stderr
    shutil.rmtree(re.findall("logs: (.*)\n", done.stderr)[0])


@mounts
def test_a_run_folder_that_can_be_made_nowhere_says_which_setting_says_where(tmp_path: Path) -> None:
    write_job(tmp_path, TELL, "gpus_per_node: 0\nlogs: {dir: /var/tmp}\n")
    spoilt = dict.fromkeys(("/tmp", "/var/tmp", "/dev/shm"), READ_ONLY)
    tried = "; ".join(f"{place}: Read-only file system" for place in spoilt)
    done = command_among(spoilt, tmp_path, "torchrun", "/mnt/worker.py")
    assert (
        done.returncode,
        f"run directory in {tried}; set TMPDIR or --log-dir to another place\n" in done.stderr,
    ) == (
        1,
        True,
    )
    done = command_among(spoilt, tmp_path, "run", "/mnt/job.yaml")
    told = "run directory in /var/tmp: Read-only file system; set logs.dir to another place\n"
    assert (done.returncode, told in done.stderr) == (1, True), done.stderr


def test_the_places_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    assert places() == list(SPARE_PLACES)
    assert places("/mine") == ["/mine", *SPARE_PLACES]
    monkeypatch.setenv("TMPDIR", "/var/tmp")
    assert places() == ["/var/tmp", "/tmp"]
    assert places("/mine") == ["/mine", *SPARE_PLACES]
    assert MEMORY not in places()


def test_what_the_agent_made_is_deleted_by_the_guardian(tmp_path: Path) -> None:
    folder = Folder()
    agent = os.fork()
    if agent == 0:
        try:
            folder.make(str(tmp_path))
            Path(folder.path, "0-0.json").touch()
        finally:
            os._exit(0)  # as if it were killed
    os.waitpid(agent, 0)
    (made,) = tmp_path.iterdir()
    assert [path.name for path in made.iterdir()] == ["0-0.json"]
    folder.remove_left()
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_without_any_place_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distlaunch.agent.scratch.SPARE_PLACES", (str(tmp_path / "b"), str(tmp_path / "c")))
    monkeypatch.setattr("distlaunch.agent.scratch.MEMORY", str(tmp_path / "d"))
    folder = Folder()
    with pytest.raises(NoPlaceError, match=r"/a: No such file.*/b: .*/c: .*/d: "):
        folder.make(str(tmp_path / "a"))
    folder.remove_left()
    folder.close()


# The spool of output that outruns its link


def frame(size: int, fill: bytes) -> bytes:
    return wire.encode_output(0, 0, 0, fill * size)


@pytest.fixture
def folder(tmp_path: Path) -> "Callable[..., Folder]":
    def with_places(*names: str) -> Folder:
        made = Folder()
        made.close()
        made.places = [str(tmp_path / name) for name in names]
        return made

    return with_places


def test_a_spool_goes_where_it_can(folder: "Callable[..., Folder]", tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    spool = Spool(folder("missing", "good"), memory=0)
    frames = [frame(100, fill) for fill in (b"a", b"b")]
    assert all(spool.append(each) for each in frames)
    assert list((tmp_path / "good").iterdir()) == [], "it has a name"
    assert [spool.pop() for _ in frames] == frames
    assert not spool


def test_a_spool_without_a_place_takes_nothing(folder: "Callable[..., Folder]") -> None:
    spool = Spool(folder("missing"), memory=0)
    assert not spool.append(frame(1, b"a"))
    assert not spool


@mounts
def test_a_spool_moves_on_when_a_place_is_full(folder: "Callable[..., Folder]", tmp_path: Path) -> None:
    for name in ("small", "large"):
        (tmp_path / name).mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", tmp_path / "small"], check=True)
    try:
        spool = Spool(folder("small", "large"), memory=0)
        frames = [frame(20_000, bytes([i])) for i in range(8)]
        assert all(spool.append(each) for each in frames)
        assert [spool.pop() for _ in frames] == frames, "order or bytes were lost"
    finally:
        subprocess.run(["umount", tmp_path / "small"], check=True)
