"""Detached runs: found, followed, stopped and deleted by other commands."""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import Mock

import pytest

from distlaunch.agent import procfs
from distlaunch.cli.app import run_app
from distlaunch.errors import DistlaunchError
from distlaunch.observers.observer import Observer
from distlaunch.observers.run_directory import FRESH_S, INDEX_RECORD, RunDirectory
from distlaunch.observers.run_list import forget, index_path, lines_of, note_begin, note_end, note_way, ways
from distlaunch.runs import following, replay
from distlaunch.runs.following import interrupt
from distlaunch.runs.replay import Playback
from distlaunch.runs.run import Run, afar, elsewhere, run_in
from distlaunch.runs.submissions import Submission, note
from distlaunch.signals import Interrupts
from distlaunch.supervisor.status import ControllerProcess, RunState, Status
from tests.faults.disks import fail, freezable_disk
from tests.harness import (
    PATIENCE_S,
    PRESS_S,
    ROOT,
    Done,
    Going,
    completed,
    distlaunch,
    distlaunch_argv,
    held,
    holders_of,
    kill,
    on_a_terminal,
    open_gate,
    program,
    running,
    wait_gone,
    wait_until,
    write_job,
)
from tests.process.commands import ONE, SLEEPER, STUBBORN, TWO

WAITS = """
    import os, signal
    os.write(1, b"here %s\\n" % os.environ["RANK"].encode())
    os.write(2, b"pid %d\\n" % os.getpid())
    open("gate").read()  # a named pipe: nobody has opened it yet
    os.write(1, b"went on\\n")
    raise SystemExit(int(os.environ["RANK"]) * 7)
"""
"""Rank 1 ends with status 7 once the gate is opened."""


@pytest.fixture(autouse=True)
def stopped(tmp_path: Path) -> Iterator[None]:
    """What a test has left behind is ended."""
    yield
    if (tmp_path / "runs").exists():
        for run in listed(tmp_path, "-a"):
            if run["state"] not in ("SUCCEEDED", "FAILED", "CANCELLED", "LOST"):
                ran(tmp_path, "stop", run["directory"], "--now")


def ran(directory: Path, *words: str, status: int | None = None) -> Done:
    return distlaunch(*words, status=status, cwd=directory)


@pytest.fixture
def known_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The list of runs of this test alone: those of others may have the same names."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state/distlaunch/runs.jsonl"


def beside(directory: Path, *words: str) -> Going:
    """A command about a run, whose end is not the run's."""
    return Going(directory / "no runs", distlaunch_argv(*words), cwd=directory)


@contextlib.contextmanager
def watching(directory: Path, *words: str) -> Iterator[Going]:
    """The same, which is ended with the block."""
    going = beside(directory, *words)
    try:
        yield going
    finally:
        going.kill()


def listed(directory: Path, *words: str) -> list[dict[str, Any]]:
    """What `ps` says of the runs in a directory."""
    done = ran(directory, "ps", ".", "--json", *words, status=0)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def left(directory: Path, worker: str = WAITS, job: str = "") -> str:
    """The id of a run of two ranks that goes on without its command."""
    done = ran(directory, "run", "--detach", str(write_job(directory, worker, TWO + job)), status=0)
    assert re.fullmatch(r"job-\d{8}-\d{6}-[0-9a-f]{8}\n", done.stdout)
    return done.stdout.strip()


def left_here(directory: Path) -> str:
    """The same, once both ranks have printed where they are."""
    run = left(directory)
    with watching(directory, "logs", "-f", run) as follow:
        follow.wait_for("here", times=2)
        follow.wait_for("pid", times=2)
    return run


def test_finds_follows_and_waits_for_a_detached_run(tmp_path: Path, gate: Path) -> None:
    run = left_here(tmp_path)
    (there,) = listed(tmp_path)
    assert (there["run"], there["state"], there["ranks"], there["exit_status"]) == (run, "RUNNING", 2, None)
    with watching(tmp_path, "logs", "--follow") as follow, watching(tmp_path, "attach", run) as attached:
        follow.wait_for("here", times=2)
        wait_until_attached(attached)
        open_gate(gate)
        assert ran(tmp_path, "wait", run).returncode == 7
        assert follow.wait() == 0
        assert follow.stdout.count("went on\n") == 2
        assert f"distlaunch: {run}: FAILED, exit status 7: rank 1 (node0) failed first" in follow.stderr
        assert attached.wait() == 7
        assert "rank 1 (node0) failed first: exit status 7" in attached.stderr
    (there,) = listed(tmp_path, "-a")
    assert (there["state"], there["exit_status"]) == ("FAILED", 7)
    assert listed(tmp_path) == []
    again = ran(tmp_path, "wait", status=7)
    assert again.stderr == ran(tmp_path, "attach").stderr
    assert f"{run}: FAILED, exit status 7" in again.stderr
    told = ran(tmp_path, "wait", "--json")
    assert (json.loads(told.stdout)["exit_status"], told.stderr) == (7, "")
    directory = tmp_path / "runs" / run
    assert (directory / "controller.log").read_text() == ""


def wait_until_attached(attached: Going) -> None:
    """It has opened the index of the output, so it has read the events before."""

    def opened() -> str:
        return str(completed(["ls", "-l", f"/proc/{attached.process.pid}/fd"]).stdout)

    wait_until(lambda: "output.index" in opened(), opened)


def test_reports_a_detached_run_that_cannot_start(tmp_path: Path) -> None:
    for keys, status, said in (
        ("command: [nowhere]", 127, "nowhere"),
        ("command: [sleep, 60]\nnodes: [a]\nlauncher: nonsense", 2, "launcher"),
        ("command: [sleep, 60]\nlogs: {dir: /proc/nowhere}", 1, "logs.dir"),
    ):
        (tmp_path / "job.yaml").write_text(keys)
        done = ran(tmp_path, "run", "--detach", "job.yaml", status=status)
        assert (done.stdout, said in done.stderr) == ("", True)
        assert listed(tmp_path) == []


@pytest.mark.parametrize("words", [["run"], ["run", "-d"]])
def test_a_directory_that_was_deleted_is_reported_before_there_is_a_run(
    tmp_path: Path, words: list[str]
) -> None:
    job, gone = write_job(tmp_path, "pass", ONE), tmp_path / "gone"
    gone.mkdir()
    argv = ["sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh", *distlaunch_argv(*words, str(job))]
    done = completed(argv, cwd=gone, env={**os.environ, "PYTHONPATH": str(ROOT)}, status=2)
    assert "distlaunch: the current directory no longer exists: cd to one that does\n" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_run_that_can_not_be_listed_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/state")
    done = distlaunch("run", "-d", str(write_job(tmp_path, "pass", ONE)), cwd=tmp_path, status=0)
    run = done.stdout.strip()
    words = f"can't add {run} to the list of runs, /proc/state/distlaunch/runs.jsonl; find it by its run"
    assert done.stderr == f"distlaunch: {words} directory, in {tmp_path}/runs\n"
    assert ran(tmp_path, "wait", f"runs/{run}").returncode == 0


def test_ctrl_c_before_all_ranks_have_started_ends_the_run(tmp_path: Path) -> None:
    """The agent's interpreter waits for a gate that stays shut."""
    os.mkfifo(tmp_path / "shut")
    python = program(tmp_path / "python", f"read line < {tmp_path}/shut")
    (tmp_path / "job.yaml").write_text(
        f"command: [sleep, 60]\nnodes: [{{host: a, python: {python}}}]\nlauncher: local\nbackend: gloo\n"
    )
    with watching(tmp_path, "run", "-d", "job.yaml") as going:
        while not listed(tmp_path):
            assert going.process.poll() is None
        going.process.send_signal(signal.SIGINT)
        assert going.wait() == 130
        assert going.stdout == ""
    (there,) = listed(tmp_path, "-a")
    assert there["state"] == "CANCELLED"


def test_a_run_of_another_host_is_active_as_long_as_its_status_is_saved(tmp_path: Path, gate: Path) -> None:
    """Many file systems don't show the locks of other hosts. The copy, too, has none."""
    left(tmp_path)
    (there,) = listed(tmp_path)
    real, place = Path(there["directory"]) / "status.json", tmp_path / "copy"
    copy = place / "runs" / there["run"] / "status.json"
    shutil.copytree(real.parent, copy.parent)
    (mine,) = listed(place, "-a")
    assert mine["state"] == "LOST"  # this host would show the lock
    copy.write_text(real.read_text().replace(f'"{os.uname().nodename}"', '"another"'))
    (far,) = listed(place)
    assert (far["state"], far["controller"]["host"]) == ("RUNNING", "another")
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin/ssh", "exit 255")
    env = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    done = distlaunch("stop", str(copy.parent), env=env, status=69)
    use = f"use `distlaunch stop {there['run']}` on another"
    assert f"if {there['run']} is still active, {use}" in done.stderr
    assert listed(tmp_path)[0]["state"] == "RUNNING"  # here, a process has the PID of that controller
    os.utime(copy, (0, time.time() - 60))
    os.utime(copy.parent / "output.index", (0, last := round(time.time()) + 1))
    (far,) = listed(place, "-a")
    assert (far["state"], far["since"]) == ("LOST", last)
    done = distlaunch("stop", str(copy.parent), env=env, status=69)  # which that is, only its host knows
    assert "had already ended" not in done.stderr
    os.utime(real, (0, 0))
    wait_until(lambda: real.stat().st_mtime > 0, lambda: "never saved again")
    open_gate(gate)


def test_a_killed_controller_leaves_no_rank_and_the_run_is_lost(tmp_path: Path, gate: Path) -> None:
    run = left_here(tmp_path)
    (there,) = listed(tmp_path)
    ranks = holders_of(f"DISTLAUNCH_RUN_ID={run}")
    assert len(ranks) >= 2
    controller = there["controller"]["pid"]
    with watching(tmp_path, "attach", run) as attached, held(ranks) as processes:
        kill(controller)
        wait_gone([controller], PATIENCE_S)
        (lost,) = listed(tmp_path, "-a")
        assert lost["state"] == "LOST"
        assert f"process {controller}" in lost["why"]
        assert attached.wait() == 71
        processes.wait_ends(ranks, time.monotonic() + PATIENCE_S)
    done = ran(tmp_path, "wait", run, status=71)
    (lost,) = listed(tmp_path, "-a")
    assert lost["why"].endswith("(it crashed or was killed); the end of the ranks' output may be missing")
    once = f"distlaunch: {run}: LOST: {lost['why']}; logs: {there['directory']}\n"
    assert done.stderr == attached.stderr == once
    for words in ([], ["--all"]):
        assert ran(tmp_path, "attach", run, *words).stderr.count("LOST") == 1
    assert ran(tmp_path, "logs", run).stdout.count("here") == 2
    stop = ran(tmp_path, "stop", run)
    assert (stop.returncode, stop.stderr) == (0, once.replace(f"{run}:", f"{run} had already ended:", 1))
    (Path(there["directory"]) / "controller.log").write_text("Traceback\n")
    assert listed(tmp_path, "-a")[0]["why"].endswith("; see controller.log in the run directory")
    status = Path(there["directory"]) / "status.json"
    status.write_text(status.read_text().replace(json.dumps(os.uname().nodename), '"elsewhere"'))
    os.utime(status, (0, 0))
    assert "(it crashed or was killed, or its machine went down)" in listed(tmp_path, "-a")[0]["why"]


def test_stop_says_that_the_run_ended_meanwhile(
    tmp_path: Path, gate: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def too_late(run: Run, at_once: bool) -> bool:
        open_gate(gate)
        ran(tmp_path, "wait", run.id, status=7)
        return interrupt(run, at_once)

    run = left_here(tmp_path)
    monkeypatch.setattr("distlaunch.cli.runs.interrupt", too_late)
    assert run_app(["stop", str(tmp_path / "runs" / run)]) == 0
    assert f"{run} had already ended: FAILED, exit status 7: rank 1" in capfd.readouterr().err


# Told again


LINES = 50
SPEAKS = f"""
    import os, sys
    rank, count = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    for number in range({LINES}):
        print(f"out {{rank}} {{count}} {{number}}", flush=True)
        print(f"err {{rank}} {{count}} {{number}}", file=sys.stderr, flush=True)
    os.write(1, b"unfinished")
    if count == "0" and rank == "0":
        sys.exit(3)
"""


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two attempts that is over; "shown" has what it showed."""
    directory = tmp_path_factory.mktemp("restarted")
    job = write_job(directory, SPEAKS, f"{TWO}restarts: {{max: 1, backoff: 0s}}\n")
    (directory / "shown").write_text(ran(directory, "run", str(job), status=0).stdout)
    return directory


def in_one_place(directory: Path, *words: str) -> str:
    """All that a command prints, where both its streams go to one pipe."""
    done = completed(distlaunch_argv(*words), cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return str(done.stdout)


def test_attach_shows_everything_in_its_order(restarted: Path) -> None:
    """A line without its end is not joined to one of another attempt."""
    on_terminal = on_a_terminal("attach", "--all", str(restarted), NO_COLOR="1")[1].decode().replace("\r", "")
    for shown in (in_one_place(restarted, "attach", "--all"), on_terminal):
        said = shown.splitlines()
        assert [line for line in said if line.startswith("[node0:")] == spoken(restarted)
        (again,) = (at for at, line in enumerate(said) if line.endswith("restart 1 of 1"))
        assert again < min(at for at, line in enumerate(said) if re.search(r"(out|err) \d 1 ", line))
    for text in (shown, (restarted / "shown").read_text(), in_one_place(restarted, "logs")):
        assert "[node0:0] unfinished\n" in text[: text.index("out 0 1 0")]


def test_pieces_of_the_index_keep_their_place(restarted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run,) = (restarted / "runs").iterdir()
    told = []
    for size in (replay.PIECE, INDEX_RECORD.size):
        monkeypatch.setattr(replay, "PIECE", size)
        played = Playback(str(run), observer := Mock(spec=Observer, wake_at=None))
        played.catch_up()
        played.close()
        told.append([call for call in observer.mock_calls if call[0] in ("printed", "message")])
    assert told[0] == told[1]
    assert len(told[0]) > 4


def test_output_is_told_although_the_clock_was_set_back(restarted: Path, tmp_path: Path) -> None:
    (run,) = (restarted / "runs").iterdir()
    shutil.copytree(run, moved := tmp_path / run.name)
    index = (run / "output.index").read_bytes()
    pieces = [INDEX_RECORD.pack(at - 600, *rest) for at, *rest in INDEX_RECORD.iter_unpack(index)]
    (moved / "output.index").write_bytes(b"".join(pieces))
    assert sorted(spoken(tmp_path, moved.name)) == sorted(spoken(restarted))


def test_the_first_piece_is_told_from_the_beginning_of_its_line(restarted: Path, tmp_path: Path) -> None:
    (run,) = (restarted / "runs").iterdir()
    shutil.copytree(run, moved := tmp_path / run.name)
    at, _, size, *rest = INDEX_RECORD.unpack_from((run / "output.index").read_bytes())
    pieces = [INDEX_RECORD.pack(at, 0, 5, *rest), INDEX_RECORD.pack(at, 5, size - 5, *rest)]
    (moved / "output.index").write_bytes(b"".join(pieces))
    observer = Mock(spec=Observer, wake_at=None)
    with contextlib.closing(Playback(str(moved), observer, lambda entry: entry.offset == 5)) as played:
        played.catch_up()
    (told,) = (call.args[0].data for call in observer.mock_calls if call[0] == "printed")
    assert re.match(rb"(out|err) \d 0 0", told)


# Logs


def spoken(directory: Path, *words: str) -> list[str]:
    done = ran(directory, "logs", *words, status=0)
    return done.stdout.splitlines()


def test_all_lines_come_in_their_order_over_restarts(restarted: Path) -> None:
    lines = spoken(restarted)
    for rank in "01":
        mine = [line.partition("] ")[2] for line in lines if line.startswith(f"[node0:{rank}]")]
        for stream in ("out", "err"):
            numbers = [line.split()[2:] for line in mine if line.startswith(stream)]
            assert numbers[-LINES:] == [["1", str(number)] for number in range(LINES)]
            assert numbers[:-LINES] == [["0", str(number)] for number in range(len(numbers) - LINES)]
    assert len([line for line in lines if "out 0 0 " in line]) == LINES
    attempts = [found[1] for line in lines if (found := re.search(r"(?:out|err) \d (\d) ", line))]
    assert attempts == sorted(attempts)
    assert sum(line.endswith("unfinished") for line in lines) >= 3


def test_shows_the_last_lines_after_the_clock_was_set_back(tmp_path: Path) -> None:
    distlaunch("run", str(write_job(tmp_path, "for n in range(3000): print(n, 'x' * 1000)", ONE)), status=0)
    index = next((tmp_path / "runs").glob("*/output.index"))
    entries = [*INDEX_RECORD.iter_unpack(index.read_bytes())]
    later = [(at - 1000, *rest) for at, *rest in entries[-len(entries) // 4 :]]
    index.write_bytes(b"".join(INDEX_RECORD.pack(*each) for each in [*entries[: -len(later)], *later]))
    done = distlaunch("logs", "-n", "2", cwd=tmp_path, status=0)
    assert [line.split()[-2] for line in done.stdout.splitlines()] == ["2998", "2999"]


def test_logs_mention_output_that_the_events_do_not_explain(tmp_path: Path) -> None:
    distlaunch("run", str(write_job(tmp_path, "print('here')", ONE)), status=0)
    events = next((tmp_path / "runs").glob("*/events.jsonl"))
    text = events.read_text()
    events.write_text("".join(line for line in text.splitlines(keepends=True) if "PortHeld" not in line))
    done = distlaunch("logs", cwd=tmp_path, status=0)
    events.write_text(text[: text.index('"WorkerExited"')])
    (summary := events.with_name("summary.json")).rename(tmp_path / "summary.json")
    cut = distlaunch("logs", cwd=tmp_path, status=0)
    explained = distlaunch("why", cwd=tmp_path, status=0).stdout
    (tmp_path / "summary.json").rename(summary)
    events.write_text(text)  # all runs are replayed after a test
    assert f"5 bytes of output can't be shown because lines of {events} are missing" in done.stderr
    assert "the last output may be missing" in cut.stderr and "here" in cut.stdout
    assert "incomplete: events.jsonl: the end is missing, as after a full or slow disk\n" in explained
    assert distlaunch("logs", cwd=tmp_path, status=0).stderr == ""


def test_shows_a_restart_between_the_lines(restarted: Path) -> None:
    for words in ([], ["--fold"], ["--rank", "0"]):
        before, said, after = in_one_place(restarted, "logs", *words).partition("distlaunch: restart 1\n")
        assert said
        assert f"out 0 0 {LINES - 1}\n" in before
        assert "out 0 1 0" in after
        assert re.search(r"\[(node0:0|0-1)\] unfinished\n", before)
        assert not re.search(r"(out|err) \d 1 ", before)
        assert "distlaunch" not in after
    assert "restart" not in in_one_place(restarted, "logs", "-n", "1")
    assert "FAILED" not in in_one_place(restarted, "logs", "-f")


def test_shows_only_the_chosen_lines(restarted: Path) -> None:
    everything = spoken(restarted)
    for words, lines in (
        ("-n 3", everything[-3:]),
        ("-n 0", []),
        ("--rank 1", [line for line in everything if line.startswith("[node0:1]")]),
        ("--rank 0-1", everything),
        ("--stderr", [line for line in everything if "err" in line]),
        ("--grep ^out.0.1.[12]$", ["[node0:0] out 0 1 1", "[node0:0] out 0 1 2"]),
        ("--grep err -n 1 -r 0", [f"[node0:0] err 0 1 {LINES - 1}"]),
        ("--since 1h", everything),
        ("--since 36000.5", everything),
        ("--since 0s", []),
        ("--since 0", []),
        ("-f", everything),
    ):
        assert spoken(restarted, *words.split()) == lines, words


def test_the_last_lines_of_a_long_output_are_those_of_all(tmp_path: Path) -> None:
    """Only the end is read, or more of it if that has too few."""
    text = """
        import os
        if os.environ["RANK"] == "1":
            print("few\\n" * 2, end="")
        else:
            print(*(f"{number} " + "x" * 99 for number in range(20_000)), sep="\\n")
    """
    distlaunch("run", str(write_job(tmp_path, text, TWO)), status=0)
    for words in ((), ("-r", "1"), ("--grep", "7777"), ("--fold",)):
        everything = spoken(tmp_path, *words)
        for most in (1, 3, 15_000):
            assert spoken(tmp_path, *words, "-n", str(most)) == everything[-most:]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rank 1-", "--rank: expected ranks"),
        ("--rank 7", "no rank 7: the run has ranks 0-1"),
        ("--rank 0-9", "no ranks 2-9: the run has ranks 0-1"),
        ("-f --rank 0,3-5,2", "no ranks 2-5: the run has ranks 0-1"),
        ("--since soon", "--since: expected a duration"),
        ("--grep (", "--grep: '(' is not a valid regular expression"),
        ("--grep x{99999999999999999999}", "regular expression: the repetition number is too large"),
        (f"--grep {'(' * 5000}{')' * 5000}", "is not a valid regular expression: it is nested too deeply"),
        (f"--grep {'.?' * 40}=", "--grep: the pattern takes more than 0.5 s on a line"),
        (f"-n {'9' * 30}", "Invalid value for '--lines' / '-n'"),
        ("nothing-like-it", "no run matches 'nothing-like-it'"),
        ("./nowhere", "./nowhere: not a run directory, and it contains no runs"),
    ],
    ids=lambda text: text[:30],
)
def test_refuses_an_impossible_choice(restarted: Path, words: str, said: str) -> None:
    done = ran(restarted, "logs", *words.split(), status=2)
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_the_replay_tool_shows_events_changes_and_differences(restarted: Path, tmp_path: Path) -> None:
    replay, altered = [sys.executable, str(ROOT / "scripts/replay")], tmp_path / "altered.jsonl"
    (run,) = (restarted / "runs").iterdir()
    done = completed([*replay, str(run)], 0)
    assert done.stderr == ""
    for shown in ("  AgentUp(node=0", "phase: RUNNING → RESTARTING", "→ StartWorkers(node=0)"):
        assert shown in done.stdout
    assert "AgentUp" not in completed([*replay, str(run), "--to", "0"]).stdout
    added = {"event": "Message", "t": 99.0, "level": "info", "text": "as it was"}
    altered.write_text((run / "events.jsonl").read_text() + json.dumps(added) + "\n")
    assert completed([*replay, str(altered)], 1).stderr == "recorded: as it was\nreplayed: nothing more\n"
    assert "none: No such file or directory\n" in completed([*replay, str(tmp_path / "none")], 2).stderr


def test_a_run_without_a_status_is_not_listed(restarted: Path, tmp_path: Path) -> None:
    shutil.copytree(restarted / "runs", tmp_path / "runs")
    (directory,) = (tmp_path / "runs").iterdir()
    said = f"distlaunch: {directory}/status.json is missing or damaged; what the run printed"
    for text in ("", "nonsense", "{}", '{"controller": 3}'):
        (directory / "status.json").write_text(text)
        assert listed(tmp_path, "-a") == []
        for command, word in (("logs", str(directory)), ("why", "runs"), ("wait", directory.name)):
            assert said in ran(tmp_path, command, word, status=2).stderr


def damages(path: Path) -> Iterator[None]:
    """Put something else in the place of a file, one after another."""
    for link in ("/etc/passwd", path.name, "nowhere"):
        path.unlink()
        path.symlink_to(link)
        yield
    path.unlink()
    os.mkfifo(path)
    yield
    for data in (b"\xff" * 1000, b"[" * 100_000, b"[1]\n" * 99):
        path.unlink()
        path.write_bytes(data)
        yield
    path.unlink()
    path.mkdir()
    yield
    path.rmdir()


@pytest.mark.parametrize("name", ["status.json", "events.jsonl", "output.index", "summary.json", "rank0.out"])
def test_a_damaged_file_is_an_error_or_ignored(restarted: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(restarted / "runs", tmp_path / "runs")
    (directory,) = (tmp_path / "runs").iterdir()
    for _ in damages(directory / name):
        for words in (["logs", "--fold", "-r", "0"], ["attach", "--all"], ["stop"]):
            with contextlib.suppress(DistlaunchError):
                run_app([*words, str(directory)])


# Finding


LONG = f"a-long-name-of-a-job-{os.getpid()}"
NOTHING = "command: ['true']\nnodes: 1\n"


@pytest.fixture(scope="module")
def over(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that are over: of `my job (1)` with status 3 and then 4, of `a-long-name-of-a-job` with 5."""
    directory = tmp_path_factory.mktemp("over")
    for file, name, status in (("train", "my job (1)", 3), ("train", "my job (1)", 4), ("eval", LONG, 5)):
        path = directory / f"{file}.yaml"
        path.write_text(f"name: {name}\ncommand: [sh, -c, 'exit $SAID']\nnodes: 1\n")
        ran(directory, "run", path.name, "--set", f"env.SAID={status}", status=status)
    (directory / "none.yaml").write_text(NOTHING)
    return directory


def by_status(directory: Path) -> dict[int, str]:
    """The ids of all runs in a directory, the latest first."""
    return {run["exit_status"]: run["run"] for run in listed(directory, "-a")}


def test_finds_a_run_by_each_of_its_names(over: Path) -> None:
    runs = by_status(over)
    assert [*runs] == [5, 4, 3]
    names = {"my job (1)": 4, "train.yaml": 4, LONG: 5, str(over / "eval.yaml"): 5, ".": 5, "./runs": 5}
    for word, status in (*names.items(), *((run, status) for status, run in runs.items())):
        ran(over, "wait", word, status=status)
    ran(over, "wait", status=5)
    for status, run in runs.items():
        ran(Path("/"), "wait", str(over / "runs" / run), status=status)
        ran(Path("/"), "wait", run, status=status)  # it is listed


@pytest.mark.parametrize("name", ["жоб", "x/y"])
def test_finds_a_run_by_a_name_that_its_id_cannot_contain(tmp_path: Path, name: str) -> None:
    (tmp_path / "job.yaml").write_text(f"name: {name}\n{NOTHING}")
    ran(tmp_path, "run", "job.yaml", status=0)
    ran(tmp_path, "wait", name, status=0)


def test_refuses_a_name_of_no_run_or_of_several(over: Path) -> None:
    runs = by_status(over)
    alike = runs[3][: -len("-120000-0a1b2c3d")]
    ambiguous = ran(over, "wait", alike, status=2).stderr
    assert f"'{alike}' is ambiguous: it matches " in ambiguous  # those of other tests, too
    assert runs[3] in ambiguous and runs[4] in ambiguous
    assert "my job [1]" in ran(over, "wait", "my job [1]", status=2).stderr
    ran(over, "wait", "none.yaml", status=2)
    # The beginning of a job's name may be another's, and so may its name with a part of the date.
    for word in ("", "…", runs[5][:9], LONG[:5], alike[:-7]):
        ran(over, "stop", word, status=2)


def test_a_word_without_ascii_letters_is_no_run_of_another_job_on_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for day, name in (1, "job"), (2, "модель"):  # both IDs begin with "job"
        note_way(f"job-2026010{day}-120000-0a1b2c3d", name, "", ("far.invalid",))
    assert [elsewhere(word, alone=True) for word in ("…", "обучение")] == [None, None]
    assert elsewhere("модель", alone=True) == ("job-20260102-120000-0a1b2c3d", ["far.invalid"])
    assert [run.status.job for run in afar(())] == ["job", "модель"]


def test_ps_lists_what_is_named(over: Path) -> None:
    one = by_status(over)[5]
    for word in (LONG, one, one[:-3], "eval.yaml", f"{one[:9]}…{one[-9:]}"):
        assert [line.split()[0] for line in ran(over, "ps", word).stdout.splitlines()[1:]] == [one]
    assert ran(over, "ps", ".").stdout == ""
    assert [len(listed(over, "-n", number)) for number in ("5", "1")] == [3, 1]
    (over / "file").touch()
    known = "no known run matches none.yaml; `distlaunch ps -a` lists all known runs\n"
    for place, text in (
        ("nonesuch", "no run matches"),
        ("file", "no run matches 'file'"),
        ("none.yaml", known),
        ("/none", "/none: No such"),
    ):
        done = ran(over, "ps", place, status=2)
        assert (done.stdout, done.stderr.startswith(f"distlaunch: {text}")) == ("", True)


def test_ps_fits_into_its_terminal(over: Path) -> None:
    assert by_status(over)[5] in ran(over, "ps", "-a", ".").stdout
    for columns in (200, 80, 60, 20):
        shown = on_a_terminal("ps", "-a", str(over), COLUMNS=str(columns))[1].decode()
        lines = shown.replace("\r", "").splitlines()
        assert len(lines) == 4
        assert max(map(len, lines)) <= columns
        assert ran(over, "wait", lines[1].split()[0]).returncode == 5


@pytest.mark.usefixtures("known_runs")
def test_ps_and_stop_find_a_run_without_its_status_or_directory(tmp_path: Path, gate: Path) -> None:
    def where() -> str:
        (tmp_path / "runs" / run / "status.json").write_text("no JSON")  # the controller renews it at times
        (there,) = listed(tmp_path)
        assert (there["run"], there["state"]) == (run, "RUNNING")
        return str(there["where"])

    (tmp_path / "empty").mkdir()
    assert "no active runs" in ran(tmp_path, "ps", "empty").stderr
    for loses in ("status", "directory"):
        run = left(tmp_path)
        (there,) = listed(tmp_path)
        for directory, place in ((tmp_path, "runs"), (tmp_path, f"runs/{run}"), (tmp_path / "runs", run)):
            shown = ran(directory, "ps", place).stdout.splitlines()
            assert re.fullmatch(r"RUN +STATE +RANKS +RESTARTS +AGE +LAST +WHERE", shown[0])
            assert [line.split()[0] for line in shown[1:]] == [run]
        if loses == "status":
            wait_until(lambda: where() == "unreadable", where)
            (tmp_path / "runs" / run / "status.json").write_bytes(b"")
        else:
            shutil.rmtree(there["directory"])
            (row,) = json.loads(ran(tmp_path, "ps", "--json").stdout)
            assert (row["run"], row["state"]) == (run, "RUNNING")
        with held([there["controller"]["pid"]]) as processes:
            ran(Path("/"), "stop", run, status=0)
            processes.wait_ends(processes.pids, time.monotonic())


@pytest.mark.usefixtures("known_runs")
def test_a_run_whose_disk_fails_is_found_stopped_and_waited_for(tmp_path: Path, gate: Path) -> None:
    with freezable_disk(tmp_path / "disk") as disk, contextlib.ExitStack() as commands:
        going = commands.enter_context(running(write_job(tmp_path, WAITS, f"{TWO}logs: {{dir: {disk}}}\n")))
        going.wait_for("here", times=2)
        (run,) = (path.name for path in disk.glob("job-*"))
        follow = commands.enter_context(watching(tmp_path, "logs", "-f", run))
        follow.wait_for("here", times=2)
        follow.wait_for("pid", times=2)
        fail(disk)
        assert follow.wait() == 1
        told = f"distlaunch: {disk}/{run}/events.jsonl: Input/output error\n"
        assert follow.stderr.endswith(told) and "Traceback" not in follow.stderr
        for places in ([run], [f"disk/{run}"], ["disk"], []):
            (row,) = json.loads(ran(tmp_path, "ps", "--json", *places).stdout)
            assert (row["run"], row["state"]) == (run, "RUNNING")
        waiting = commands.enter_context(watching(tmp_path, "wait", run))
        assert f"{run}: CANCELLED" in ran(tmp_path, "stop", f"disk/{run}", status=0).stderr
        assert (waiting.wait(), going.wait()) == (130, 130), waiting.stderr
        assert f"{run}: CANCELLED" in ran(tmp_path, "wait", run, status=130).stderr
        told = f"distlaunch: can't read {disk}/{run}/status.json: Input/output error\n"
        assert told == ran(tmp_path, "why", run, status=2).stderr


@pytest.mark.usefixtures("known_runs")
def test_a_program_with_a_status_file_of_its_own_is_not_stopped(tmp_path: Path) -> None:
    """Whatever the name of its directory, and whether it has locked the file."""
    text = "import fcntl, sys; files = [open(path, 'w') for path in sys.argv[1:]]; "
    text += "fcntl.flock(files[0], fcntl.LOCK_EX); print('open', flush=True); sys.stdin.read()"
    paths = [tmp_path / name / "status.json" for name in ("other", "other-20260101-000000-00000000")]
    for path in paths:
        path.parent.mkdir()
    argv = [sys.executable, "-c", text, *map(str, paths)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as bystander:
        assert bystander.stdout and bystander.stdout.readline() == b"open\n"
        for path in paths:
            ran(Path("/"), "stop", path.parent.name, status=2)
            assert [each.name for each in path.parent.iterdir()] == ["status.json"]
        bystander.communicate()
        assert bystander.returncode == 0


def test_stop_asks_which_if_a_waiting_job_and_a_run_on_another_host_have_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's command and ssh are stand-ins. A run that is known to be over isn't meant."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for name, text in (
        ("ssh", f"touch {tmp_path}/called; exit 255"),
        ("squeue", f"[ -e {tmp_path}/over ] && echo '17|CANCELLED|None' || echo '17|PENDING|None'"),
        ("scancel", f"touch {tmp_path}/over"),
    ):
        program(tmp_path / name, text)
    note_way((sent := "train-20260101-120000-0a1b2c3d"), "train", "", ("far.invalid", None))
    note(Submission("17", "train", str(tmp_path), time.time()))
    told = f"several runs of train wait or are active: 17, {sent}; specify one by its ID"
    assert told in ran(tmp_path, "stop", "train", status=2).stderr
    ran(tmp_path, "stop", sent, status=69)
    (tmp_path / "called").unlink()
    note_end(sent)
    assert "Slurm job 17: cancelled" in ran(tmp_path, "stop", "train", status=0).stderr
    assert not (tmp_path / "called").exists()


@pytest.mark.usefixtures("known_runs")
def test_a_name_means_a_running_run_rather_than_one_that_ended(tmp_path: Path, gate: Path) -> None:
    going = left_here(tmp_path)
    ran(tmp_path, "run", "job.yaml", "--set", "command=['true']", "--set", "script=null", status=0)
    for word in ([], ["job"], ["job.yaml"], ["."], ["./job.yaml"], [going[:-15]]):  # both begin like that
        assert "here 0" in ran(tmp_path, "logs", *word).stdout
        with watching(tmp_path, "attach", *word) as attached:
            wait_until_attached(attached)
    assert f"{going}: CANCELLED" in ran(tmp_path, "stop", "job").stderr
    ran(tmp_path, "wait", "job", status=0)  # no run goes on: the one that began last


def test_a_job_file_means_the_runs_of_this_file_only(tmp_path: Path, gate: Path) -> None:
    (tmp_path / "other").mkdir()
    os.mkfifo(tmp_path / "other" / "gate")
    theirs, mine = left(tmp_path / "other"), left(tmp_path)
    renamed = ran(tmp_path, "run", "-d", "job.yaml", "--set", "name=renamed").stdout.strip()
    (tmp_path / "link.yaml").symlink_to("job.yaml")
    for word in ("job.yaml", "link.yaml", f"{tmp_path}/job.yaml"):
        done = ran(tmp_path, "stop", word)
        assert f"2 runs of {word} are running: {renamed}, {mine}; specify one by its ID" in done.stderr
    assert f"{theirs}: CANCELLED" in ran(tmp_path, "stop", "other/job.yaml").stderr
    for word in ("stop", "logs", "attach", "wait", "why"):
        assert ran(tmp_path, word, "job.yml").returncode == 2  # no run of that file, though one named job


def test_a_signal_while_a_job_waits_for_its_next_start_isnt_told_as_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The queue is a stand-in: it has the job's first run, and then waits."""
    distlaunch("run", str(write_job(tmp_path, "raise SystemExit(3)", ONE)), status=3)
    (directory,) = (tmp_path / "runs").iterdir()
    first = run_in(str(directory))
    assert first

    def runs(word: str, interrupts: Interrupts, tell: Any) -> Iterator[tuple[Run, bool]]:
        yield first, False
        os.kill(os.getpid(), signal.SIGTERM)
        while not interrupts.any():
            following.pause(interrupts, PRESS_S)

    monkeypatch.setattr("distlaunch.cli.runs.runs_of", runs)
    assert run_app(["wait", "12"]) == 128 + signal.SIGTERM
    assert capfd.readouterr().err == ""


def test_a_detached_run_that_a_rank_has_started_ends_with_it_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "next").mkdir()
    inner = distlaunch_argv(
        "run", "-d", str(write_job(tmp_path / "next", "import signal; signal.pause()", ONE))
    )
    starts = f"import subprocess; print('next', subprocess.check_output({inner}, text=True), flush=True)"
    done = distlaunch("run", str(write_job(tmp_path, starts, ONE)), status=0)
    (run,) = re.findall(r"next (\S+)", done.stdout)
    assert (
        f"a rank started {run}, which will be killed when that rank exits; `distlaunch wait {run}`"
        in done.stderr
    )
    wait_gone(holders_of(f"DISTLAUNCH_RUN_ID={run}"), PATIENCE_S)


@pytest.mark.usefixtures("known_runs")
def test_the_name_of_a_job_is_not_taken_for_the_directory_of_other_runs(tmp_path: Path, gate: Path) -> None:
    """Or for a directory without runs, such as a Python package."""
    for name in ("job", "package"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "job/gate")
    write_job(tmp_path / "job", WAITS, TWO)
    mine, start = left(tmp_path), ("run", "-d", "job.yaml", "--set")
    package = ran(tmp_path, *start, "name=package", status=0).stdout.strip()
    other = ran(tmp_path / "job", *start, "name=other", status=0).stdout.strip()
    assert [row["run"] for row in json.loads(ran(tmp_path, "ps", "--json", "job").stdout)] == [mine]
    assert [row["run"] for row in json.loads(ran(tmp_path, "ps", "--json", "./job").stdout)] == [other]
    dot = ran(tmp_path / "job", *start, "name=.", status=0).stdout.strip()
    assert {row["run"] for row in listed(tmp_path)} == {mine, package}
    ran(tmp_path, "stop", dot, status=0)
    assert f"{package}: CANCELLED" in ran(tmp_path, "stop", "package", status=0).stderr
    assert f"{mine}: CANCELLED" in ran(tmp_path, "stop", "job", status=0).stderr
    assert f"{other}: CANCELLED" in ran(tmp_path, "stop", "./job", status=0).stderr
    (tmp_path / "job/runs").rename(
        tmp_path / "job/moved"
    )  # what is said of the run is in its directory still
    assert f"{other}: CANCELLED" in ran(tmp_path / "job/moved", "wait", other, status=130).stderr
    shutil.rmtree(tmp_path / "job/moved")
    gone = ran(tmp_path, "wait", "--json", other, status=130)
    assert json.loads(gone.stdout)["state"] == "CANCELLED"
    assert ran(tmp_path, "wait", other, status=130).stderr.endswith("stopped by `distlaunch stop`\n")


def test_a_number_is_not_taken_for_the_name_of_a_run_to_stop(tmp_path: Path, gate: Path) -> None:
    """It may be meant for a job of a scheduler, as with torchrun's `--rdzv_id $SLURM_JOB_ID`."""
    write_job(tmp_path, WAITS, TWO)
    run = ran(tmp_path, "run", "-d", "job.yaml", "--set", "name='87'", status=0).stdout.strip()
    refused = f"87 is the name of {run}, but may also be the ID of a scheduler's job; specify the run"
    assert refused in ran(tmp_path, "stop", "87", status=2).stderr
    assert [row["state"] for row in listed(tmp_path)] == ["RUNNING"]
    assert f"{run}: CANCELLED" in ran(tmp_path, "stop", run, status=0).stderr
    note_way((sent := "88-20260101-120000-0a1b2c3d"), "88", "", ("localhost",))
    refused = f"88 is the name of {sent}, but may also be the ID of a scheduler's job; specify the run"
    assert refused in ran(tmp_path, "stop", "88", status=2).stderr


def test_finds_a_run_sent_elsewhere_by_its_job_file_and_the_latest_without_a_name(tmp_path: Path) -> None:
    """Whether the run was sent to a host that shares the list, or has its directory elsewhere."""
    job = write_job(tmp_path, "raise SystemExit(4)", ONE)
    distlaunch("run", "-", input=job.read_text(), cwd=tmp_path, status=4)
    (run,) = (tmp_path / "runs").iterdir()
    note_way(run.name, "job", str(job), ("localhost",))
    assert ran(tmp_path, "why", "job.yaml").stdout.startswith(f"{run.name}: FAILED with exit status 4")
    for words, status in (["run", str(job)], 4), (["torchrun", "--no-python", "sh", "-c", "exit 5"], 5):
        distlaunch(*words, cwd=tmp_path, status=status)
        assert f": FAILED with exit status {status}" in ran(tmp_path, "why", status=0).stdout


@pytest.mark.usefixtures("known_runs")
def test_stop_asks_which_of_several_running_runs_and_says_how_it_ended(tmp_path: Path, gate: Path) -> None:
    (tmp_path / "over").mkdir()
    distlaunch("run", str(write_job(tmp_path / "over", "pass", ONE)), status=0)
    first, second = left(tmp_path), left(tmp_path)
    for word, which in (["job"], "of job"), ([], "of this directory"), (["./runs"], "in ./runs"):
        done = ran(tmp_path, "stop", *word, status=2)
        assert f"2 runs {which} are running: {second}, {first}; specify one by its ID" in done.stderr
    elsewhere = ran(tmp_path / "over", "stop", status=2).stderr
    assert f"no active runs of this directory; active elsewhere: {second}, {first}" in elsewhere
    assert len(listed(tmp_path)) == 2
    ranks = holders_of(f"DISTLAUNCH_RUN_ID={first}")
    cancelled = "CANCELLED, exit status 130: stopped by `distlaunch stop`; logs: "
    assert f"distlaunch: {first}: {cancelled}" in ran(tmp_path, "stop", first[:-3], status=0).stderr
    wait_gone(ranks, 0.0)
    ran(tmp_path, "wait", first, status=130)
    again = ran(tmp_path, "stop", first, status=0).stderr
    assert f"distlaunch: {first} had already ended: {cancelled}" in again
    bare = ran(tmp_path, "stop").stderr.splitlines()
    assert bare[0] == f"distlaunch: stopping {second} ({tmp_path}/runs/{second})"
    assert bare[1].startswith(f"distlaunch: {second}: CANCELLED")
    assert "stopping" not in ran(tmp_path, "stop").stderr


def test_the_list_of_runs_is_only_a_hint(tmp_path: Path, known_runs: Path) -> None:
    (tmp_path / "job.yaml").write_text(NOTHING)
    ran(tmp_path, "run", "job.yaml", status=0)
    assert "SUCCEEDED" in ran(Path("/"), "ps", "-a").stdout
    known_runs.write_text("no JSON\n[]\n" + known_runs.read_text() + '{"run": 3}\n{"half')
    assert "SUCCEEDED" in ran(Path("/"), "ps", "-a").stdout
    known_runs.unlink()
    assert ran(Path("/"), "ps", "-a").stdout == ""
    assert [run["state"] for run in listed(tmp_path, "-a")] == ["SUCCEEDED"]
    ran(tmp_path, "wait", "job", status=0)
    known_runs.parent.rename(tmp_path / "elsewhere")
    known_runs.parent.write_text("a file")
    ran(tmp_path, "run", "job.yaml", status=0)  # it can't be listed
    assert len(listed(tmp_path, "-a")) == 2


def test_a_lock_of_the_list_that_is_never_released_delays_a_run_only_briefly(
    tmp_path: Path, known_runs: Path
) -> None:
    """As that of a host that crashed, on NFS. Only `prune`, which would lose lines, leaves the list alone."""
    known_runs.parent.mkdir(parents=True)
    (tmp_path / "job.yaml").write_text(NOTHING)
    with known_runs.open("w") as list_:
        fcntl.flock(list_, fcntl.LOCK_EX)
        with watching(tmp_path, "run", "job.yaml") as run:
            assert run.wait(20.0) == 0
        (there,) = json.loads(ran(tmp_path, "ps", "-a", "--json").stdout)
        shutil.rmtree(tmp_path / "runs")
        with pytest.raises(BlockingIOError):
            forget([there["run"]])
    assert f'"{there["run"]}"' in known_runs.read_text()


# Deleting


@pytest.mark.usefixtures("known_runs")
def test_prune_deletes_old_runs_that_are_over_here_or_elsewhere(tmp_path: Path, gate: Path) -> None:
    going = left(tmp_path)
    note_way("sent-20260101-120000-0a1b2c3d", "sent", "", ("localhost",))
    (tmp_path / "other.yaml").write_text(f"name: other\n{NOTHING}")
    for place in ("runs", "elsewhere/runs"):
        ran(tmp_path, "run", "other.yaml", "--set", f"logs.dir={place}", status=0)
    (old,) = (run for run in listed(tmp_path, "-a") if run["run"] != going)
    assert ran(tmp_path, "prune", "--older", "1h", status=0).stdout == ""
    assert "sent-20260101-120000-0a1b2c3d" in ways()
    gone = ran(tmp_path, "prune", "none", "--older", "0s", status=2)
    assert gone.stderr == "distlaunch: none: No such file or directory\n"
    ran(tmp_path, "prune", "elsewhere", "--older", "0s", status=0)
    assert list((tmp_path / "elsewhere/runs").iterdir()) == []
    assert old["directory"] in ran(tmp_path, "prune", "--older", "0s", "--dry-run").stdout
    assert Path(old["directory"]).is_dir()
    done = ran(tmp_path, "prune", "--older", "0s", "--json")
    assert old["run"] in [each["run"] for each in json.loads(done.stdout)]
    assert not Path(old["directory"]).exists()
    assert [run["run"] for run in listed(tmp_path, "-a")] == [going]
    assert not ways()
    damaged = tmp_path / "runs" / "d-20260101-120000-0a1b2c3d"
    damaged.mkdir()
    (damaged / "events.jsonl").touch()
    kept = "kept runs with an unreadable status; if they have ended, delete them: rm -r"
    shown = ran(tmp_path, "prune", "--older", "0s").stderr
    assert shown.startswith(f"distlaunch: {kept} {damaged}\n")
    week = ran(tmp_path, "prune", "--older", "1w", status=2)
    assert "(units: ms, s, m, h, d), got '1w'" in week.stderr
    assert "e.g. --older 30d" in ran(tmp_path, "prune", status=2).stderr


def test_other_commands_find_a_run_while_prune_removes_others_from_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever they look: here, before each line."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for run in ("old", "kept", "older"):
        note_begin(run, str(tmp_path / run), "here")
    seen = []

    def names() -> list[str]:
        return [line["run"] for line in lines_of(index_path())]  # not those that are cached

    def look(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_name == "forget":
            seen.append("kept" in names())
        return look

    tracer = sys.gettrace()
    sys.settrace(look)
    try:
        forget(["old", "older"])
    finally:
        sys.settrace(tracer)
    assert len(seen) > 5
    assert all(seen)
    assert names() == ["kept"]


def test_prune_accepts_that_another_one_deletes_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run moved elsewhere, with a link in its place, is kept."""

    def overtaken(path: str) -> None:
        rmtree(path)
        rmtree(path)

    (tmp_path / "job.yaml").write_text(NOTHING)
    ran(tmp_path, "run", "job.yaml", status=0)
    (run,) = (tmp_path / "runs").iterdir()
    shutil.copytree(run, kept := tmp_path / "kept")
    run.with_name("job-20260101-120000-0a1b2c3d").symlink_to(kept)
    rmtree, _ = shutil.rmtree, monkeypatch.setattr(shutil, "rmtree", overtaken)
    assert run_app(["prune", str(tmp_path), "--older", "0s"]) == 0
    assert "deleted 1 run" in capfd.readouterr().err
    assert [*kept.iterdir()]


def claimed(directory: RunDirectory, host: str) -> Run:
    """A run that a process on that host controls."""
    place = ControllerProcess(host, os.getpid(), procfs.boot_id(), procfs.pid_namespace())
    directory.claim(Status(directory.run_id, "job", RunState.RUNNING, 1.0, 1.0, place))
    run = run_in(directory.path)
    assert run and run.alive
    return run


@pytest.mark.parametrize("glitch", ["directory", "clock", "for good"])
def test_a_run_on_another_host_is_not_lost_at_the_first_sight_of_it(
    glitch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its directory may be out of reach for a moment, or this host's clock may jump. A copy has no lock."""

    def passes(_: Interrupts, seconds: float) -> None:
        now[0] += seconds
        if (look := next(looks)) == 0:
            place.rename(tmp_path / "away") if glitch != "clock" else os.utime(status, (0, 0))
        elif look == 3 and glitch != "for good":
            (tmp_path / "away").rename(place) if glitch != "clock" else os.utime(status)
        elif look == 6 and glitch != "for good":
            status.write_text(status.read_text().replace("RUNNING", "SUCCEEDED"))

    with contextlib.closing(
        RunDirectory(str(tmp_path / "made"), "job-20260101-000000-00000000")
    ) as directory:
        run = claimed(directory, "another")
        shutil.copytree(tmp_path / "made", place := tmp_path / "runs")
    run, looks, now = run._replace(directory=str(place / run.id)), itertools.count(), [1000.0]
    status = place / run.id / "status.json"
    monkeypatch.setattr(following, "pause", passes)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    ended = following.follow(run, Mock(spec=Interrupts, any=lambda: False))
    if glitch == "for good":
        assert (ended.status.state, now[0] - 1000.0 >= FRESH_S) == (RunState.LOST, True)
    else:
        assert ended.status.state is RunState.SUCCEEDED


def test_without_locks_an_active_controller_on_this_host_is_seen_by_its_open_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk may be stuck, so that it can't save its status."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with contextlib.closing(RunDirectory(str(tmp_path), "job-20260101-000000-00000000")) as directory:
        claimed(directory, os.uname().nodename)
        os.utime(f"{directory.path}/status.json", (0, 0))
        run = run_in(directory.path)
        assert run and run.alive
    run = run_in(directory.path)
    assert run and run.status.state is RunState.LOST


@pytest.mark.parametrize(("command", "lose"), [("wait", os.rename), ("attach", shutil.rmtree)])
def test_a_run_without_its_directory_is_followed_to_its_end(
    command: str, lose: Any, tmp_path: Path, gate: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    run = left_here(tmp_path)
    (there,) = listed(tmp_path)
    directory, looks, pause = Path(there["directory"]), itertools.count(), following.pause

    def taken_away(interrupts: Interrupts, _: float) -> None:
        pause(interrupts, 0.01)  # the controller needs time, too
        if directory.exists():
            lose(directory, *([tmp_path / "elsewhere"] if lose is os.rename else []))
        elif next(looks) == 3:
            open_gate(gate)

    monkeypatch.setattr(following, "pause", taken_away)
    with held([there["controller"]["pid"]]) as processes:
        assert run_app([command, run]) == 7
        assert next(looks) > 3, "it waits while the controller lives"
        processes.wait_ends(processes.pids, time.monotonic() + PATIENCE_S)
    assert f"{run}: FAILED, exit status 7: rank 1 (node0) failed first" in capfd.readouterr().err


@pytest.mark.usefixtures("known_runs")
def test_an_active_run_without_its_directory_comes_before_an_ended_one_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "next").mkdir()
    distlaunch("run", str(write_job(tmp_path, "pass", ONE)), cwd=tmp_path, status=0)
    run = left(tmp_path / "next", SLEEPER)
    shutil.rmtree(tmp_path / "next/runs")
    assert f"{run}: CANCELLED" in ran(tmp_path / "next", "stop", "job", status=0).stderr


def test_stop_waits_for_the_ranks_of_a_killed_controller(tmp_path: Path) -> None:
    run = left(tmp_path, STUBBORN, "timeouts: {stop: 6s}\n")
    (there,) = listed(tmp_path)
    ranks = holders_of(f"DISTLAUNCH_RUN_ID={run}")
    with held([there["controller"]["pid"], *ranks]) as processes:
        kill(there["controller"]["pid"])
        processes.wait_ends([there["controller"]["pid"]], time.monotonic() + PATIENCE_S)
        said = ran(tmp_path, "stop", run).stderr
        assert f"{run} had already ended: LOST" in said
        assert f"{run} has lost its controller; waiting until its ranks (such as process " in said
        processes.wait_ends(ranks, time.monotonic())


def test_stop_resumes_a_suspended_controller(tmp_path: Path) -> None:
    run = left(tmp_path, STUBBORN, "timeouts: {stop: 100ms}\n")
    (there,) = listed(tmp_path)
    kill(there["controller"]["pid"], signal.SIGSTOP)
    assert f"{run}: CANCELLED" in ran(tmp_path, "stop", run).stderr


def test_a_pid_of_another_container_means_no_process_here(tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path), "job-20260101-000000-00000000")
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        kill(bystander.pid, signal.SIGSTOP)
        place = ControllerProcess(os.uname().nodename, bystander.pid, procfs.boot_id(), "pid:[1]")
        directory.claim(Status(directory.run_id, "job", RunState.RUNNING, 1.0, 1.0, place))
        run = run_in(directory.path)
        assert run and (run.alive, run.status.state) == (True, RunState.RUNNING)
        with pytest.raises(DistlaunchError, match="is controlled outside this container"):
            interrupt(run)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
        directory.close()


def test_completion_offers_ended_runs_only_where_they_are_of_use(over: Path) -> None:
    ended = {run for status, run in by_status(over).items() if status != 5}
    for command, offered in (("logs", ended), ("stop", set())):
        env = {**os.environ, "COMP_WORDS": f"distlaunch {command} my-", "COMP_CWORD": "2"}
        done = distlaunch(cwd=over, env={**env, "_PYTHON _M DISTLAUNCH_COMPLETE": "complete_bash"})
        assert ended & {*done.stdout.split()} == offered


def test_one_stop_waits_and_a_second_kills(tmp_path: Path) -> None:
    """`stop` twice, as two presses of Ctrl-C, kills; once does not."""
    run = left(tmp_path, STUBBORN, "timeouts: {stop: 600s}\n")
    with watching(tmp_path, "stop", run) as first:
        while not any(there["state"] == "STOPPING" for there in listed(tmp_path)):
            assert first.process.poll() is None
        time.sleep(PRESS_S)
        ran(tmp_path, "stop", run, status=0)
        assert first.wait() == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_trusts_no_run_directory_or_list_of_another_user(tmp_path: Path, known_runs: Path) -> None:
    distlaunch("run", str(write_job(tmp_path, "pass", ONE)), status=0)
    (directory,) = (tmp_path / "runs").iterdir()
    for path in (directory, *directory.iterdir()):
        os.chown(path, 4711, 4711)
    for command, place in ("stop", directory), ("logs", directory), ("logs", tmp_path), ("ps", tmp_path):
        assert f"{directory} belongs to another user" in distlaunch(command, str(place)).stderr
    assert directory.name not in distlaunch("ps", "-a", str(tmp_path / "runs")).stdout
    shutil.rmtree(directory)
    known_runs.chmod(0o666)
    what = f"{known_runs}: this list of runs is writable by other users; use chmod go-w, or set "
    told = f"distlaunch: {what}XDG_STATE_HOME to another directory\n"
    assert distlaunch("ps", "-a", status=2).stderr == told


FULL = "can't write to stdout: No space left on device"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("run -d", f"runs in the background\ndistlaunch: {FULL}\n"),
        ("run --json", "/summary.json\n"),
        ("dry-run", f"distlaunch: {FULL}\n"),
        ("run --help", f"distlaunch: {FULL}\n"),
    ],
)
def test_tells_that_stdout_can_not_be_written(command: str, told: str, tmp_path: Path) -> None:
    job = write_job(tmp_path, "", "gpus_per_node: 0")
    with Path("/dev/full").open("w") as full:
        done = distlaunch(*command.split(), str(job), status=1, stdout=full, stderr=subprocess.PIPE)
    assert done.stderr.endswith(told)
    for run in tmp_path.glob("runs/*"):
        distlaunch("wait", str(run), status=0)


def test_names_a_log_that_was_removed_during_the_run(tmp_path: Path, gate: Path) -> None:
    text = "import os; os.write(1, b'ready 0 1\\n'); open('gate').read()"
    with running(write_job(tmp_path, text, ONE), cwd=tmp_path) as run:
        run.wait_ready(1)
        log = run.run_directory() / "rank0.out"
        wait_until(log.exists, lambda: "no log")
        log.unlink()
        open_gate(gate)
        assert run.wait() == 0
    assert f"files removed from {run.run_directory()} during the run are lost: rank0.out\n" in run.stderr
