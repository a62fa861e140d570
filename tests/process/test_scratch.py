"""Directories that the agent and torchrun write to, also where places are full, read-only or missing."""

import os
import re
import shutil
import sys
from pathlib import Path
from shlex import quote
from textwrap import dedent
from unittest.mock import Mock

import pytest

from distlaunch.agent import scratch, serve, sweep
from tests.cluster.hosts import why_not
from tests.harness import ROOT, Done, completed, distlaunch_argv, write_job

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
    os.makedirs(os.environ["TORCHELASTIC_ERROR_FILE"] + "/more")
    print("in", os.path.dirname(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])))
"""


def command_among(spoilt: dict[str, str], directory: Path, job: str, *words: str, **environ: str) -> Done:
    """Run a command by the job of a rank that tells where its error record goes.

    `spoilt` maps a place to what is done to it. `directory` is /mnt there, since /tmp may be hidden.
    """
    write_job(directory, TELL, f"gpus_per_node: 0\n{job}\n")
    lines = ['mount --bind "$0" /mnt', *(how.format(place) for place, how in spoilt.items())]
    script = " && ".join([*lines, "cd /mnt", 'exec "$@"'])
    argv = ["unshare", "--mount", "sh", "-c", script, str(directory), *distlaunch_argv(*words)]
    environment = {name: value for name, value in os.environ.items() if name != "TMPDIR"} | environ
    return completed(argv, env=environment)


PLACES = {
    "read-only": ({"/tmp": READ_ONLY}, "", "/var/tmp"),
    "full": ({"/tmp": FULL}, "", "/var/tmp"),
    "last resort": ({"/tmp": READ_ONLY, "/var/tmp": FULL}, "", "/dev/shm"),
    "the job's": ({}, "env: {TMPDIR: mine}", "/mnt/mine"),
}
"""What is done to places, a key of the job, and the place where there is room."""


@mounts
@pytest.mark.parametrize("name", PLACES)
def test_a_job_runs_where_one_place_has_room(name: str, tmp_path: Path) -> None:
    spoilt, job, place = PLACES[name]
    (tmp_path / "mine").mkdir()
    done = command_among(spoilt, tmp_path, job, "run", "/mnt/job.yaml")
    assert (done.returncode, done.stdout.split()[-2:]) == (0, ["in", place]), done.stderr
    assert list((tmp_path / "mine").iterdir()) == []


ALL_READ_ONLY = dict.fromkeys(("/tmp", "/var/tmp", "/dev/shm"), READ_ONLY)
TRIED = "; ".join(f"{place}: Read-only file system" for place in ALL_READ_ONLY)


MISSING = (
    f"error records in /missing: No such file or directory; {TRIED}; set TMPDIR (env.TMPDIR in a job file)\n"
)
NO_LOGS = "run directory in /var/tmp: Read-only file system; set logs.dir to another directory\n"


NO_TMP = f"run directory in {TRIED}; set TMPDIR, or torchrun's --log-dir, to another directory\n"
NO_ROOM = {
    "env: {TMPDIR: /missing}": ("run /mnt/job.yaml", 126, MISSING),
    "logs: {dir: /var/tmp}": ("run /mnt/job.yaml", 1, NO_LOGS),
    "": ("torchrun /mnt/worker.py", 1, NO_TMP),
}
"""By a key of the job: the command, its status and what it tells."""


@mounts
@pytest.mark.parametrize("keys", NO_ROOM)
def test_names_every_place_without_room(keys: str, tmp_path: Path) -> None:
    command, status, words = NO_ROOM[keys]
    done = command_among(ALL_READ_ONLY, tmp_path, keys, *command.split())
    assert (done.returncode, words in done.stderr) == (status, True), done.stderr
    assert "Traceback" not in done.stderr


@mounts
@pytest.mark.parametrize(
    ("spoilt", "place"),
    [(["/tmp"], "/var/tmp"), (["/tmp", "/var/tmp"], "/dev/shm"), (["/dev/shm"], "/tmp")],
)
def test_torchruns_run_directory_is_where_room_is(spoilt: list[str], place: str, tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text("raise SystemExit(3)")
    among = dict.fromkeys(spoilt, READ_ONLY)
    done = command_among(among, tmp_path, "", "torchrun", "/mnt/fail.py", TMPDIR=spoilt[0])
    found = re.search(r"with exit status 3; logs: ((.*)/[^/]+)\n", done.stderr)
    assert found and found[2] == place, done.stderr
    shutil.rmtree(found[1])


def here_only(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents' directories are in this place alone."""
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr(scratch, "SPARE_PLACES", ())
    monkeypatch.setattr(scratch, "MEMORY", str(place))


MAKES = """
    import os, sys
    from distlaunch.agent import scratch

    def look(frame, event, argument):
        scratch.remove_abandoned(scratch.abandoned())
        looks.append(frame.f_lineno)
        return look

    scratch.SPARE_PLACES, scratch.MEMORY = (), os.environ["TMPDIR"]  # other tests' directories stay
    looks, directory = [], scratch.Directory()
    sys.settrace(lambda frame, *_: look if frame.f_code.co_filename == scratch.__file__ else None)
    directory.make()
    sys.settrace(None)
    scratch.remove_abandoned(scratch.abandoned())
    print(len(looks), os.path.isdir(directory.path))
"""


def test_a_directory_for_error_records_is_not_taken_for_abandoned_while_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever another agent looks for abandoned ones: here, before each line."""
    here_only(tmp_path, monkeypatch)
    looks, is_there = completed([sys.executable, "-c", dedent(MAKES)], status=0).stdout.split()
    assert int(looks) > 10
    assert is_there == "True"
    assert len(list(tmp_path.iterdir())) == 1
    scratch.remove_abandoned(scratch.abandoned())  # its process has ended
    assert list(tmp_path.iterdir()) == []


def test_the_directory_of_an_agent_that_dies_during_a_sweep_is_left_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, the processes that the agent has left would not be known as orphans."""
    here_only(tmp_path, monkeypatch)
    left = tmp_path / f"{scratch._prefix()}0123456789abcdef"

    def die() -> int:
        left.mkdir(exist_ok=True)
        return 0

    monkeypatch.setattr(sweep, "kill_orphans", die)
    serve.Agent._report_orphans(Mock())
    assert left.exists()
    serve.Agent._report_orphans(Mock())
    assert not left.exists()
