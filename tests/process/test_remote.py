"""Commands for another machine, with a shell as a stand-in for ssh."""

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from distlaunch.cli.job_file import load_job
from distlaunch.cli.remote import Request, run_on, run_there
from distlaunch.errors import DistlaunchError
from distlaunch.supervisor.codec import VERSION
from distlaunch.transports.ssh import Ssh
from distlaunch.transports.transport import SshOptions
from tests.harness import (
    PATIENCE_S,
    Going,
    distlaunch,
    distlaunch_argv,
    on_a_terminal,
    program,
    running,
    wait_until,
    write_job,
)
from tests.process.commands import ONE


@pytest.fixture(autouse=True)
def shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Ssh, "argv_for", lambda self, command, terminal=False: ["/bin/sh", "-c", command])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")


def test_names_a_directory_that_the_host_lacks(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_there(Ssh("gpu-a"), Request(("--version",), "/nowhere/at/all")) == 2
    needs = "--on needs the job file's directory at the same path on that host\n"
    text = f"distlaunch: /nowhere/at/all on gpu-a: No such file or directory; {needs}"
    assert capfd.readouterr().err == text


@pytest.mark.parametrize("link", [False, True])
def test_runs_no_program_from_a_directory_of_others(
    link: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kept, place = tmp_path / "cache/distlaunch", tmp_path / ("elsewhere" if link else "cache/distlaunch")
    kept.parent.mkdir()
    place.mkdir()
    if link:
        kept.symlink_to(place)
    else:
        kept.chmod(0o777)
    with pytest.raises(DistlaunchError):
        run_there(Ssh("gpu-a"), Request(("--version",)))
    text = f"distlaunch: {kept} must be a directory that only you can write to; remove it\n"
    assert capfd.readouterr().err == text
    assert [*kept.iterdir()] == []


def test_reports_a_host_without_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(DistlaunchError, match=r"gpu-a: found no Python 3\.10 or later \(tried python3 and"):
        run_there(Ssh("gpu-a"), Request(("--version",)))


def test_tells_of_a_failed_link(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Ssh, "argv_for", lambda self, command: ["/bin/sh", "-c", "exit 255"])
    assert run_there(Ssh("gpu-a", "me"), Request(("--version",))) == 69
    direct = "`ssh -o BatchMode=yes -o ControlPath=none -l me gpu-a true` must work"
    text = "load your key with ssh-add; if the host's key is new, check it once with `ssh -l me gpu-a`\n"
    failed = "distlaunch: the SSH connection to gpu-a failed for the reason that ssh gives above"
    assert capfd.readouterr().err == f"{failed}; {direct}: if permission is denied, {text}"


@pytest.mark.parametrize("does", ["exit 0", "exit 3", "read line", "exec sleep 60"])
def test_start_up_files_that_exit_or_read_are_no_result(
    does: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The data that follow what such a file has read are not executed."""
    monkeypatch.setattr(Ssh, "argv_for", lambda self, command: ["/bin/sh", "-c", f"{does}\n{command}"])
    monkeypatch.setattr("distlaunch.cli.remote.ANSWER_S", 1.0 if "sleep" in does else PATIENCE_S)
    request = Request((f"$(touch {tmp_path}/executed)",))
    if "sleep" in does:
        with pytest.raises(DistlaunchError, match="did not start on gpu-a within 1 s; the start-up files of"):
            run_there(Ssh("gpu-a"), request)
    else:
        assert run_there(Ssh("gpu-a"), request) == 69
        assert "gpu-a: the shell there ended before it started distlaunch" in capfd.readouterr().err
    assert not (tmp_path / "executed").exists()


LOST = '(read -r line; eval "$line"); exit 255'


def test_a_connection_that_is_lost_while_a_run_is_shown_does_not_stop_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Ssh, "argv_for", lambda self, command: ["/bin/sh", "-c", LOST])
    assert run_there(Ssh("gpu-a"), Request(("--version",)), name="gpu-a:r-1") == 69
    words = "to gpu-a was lost, which doesn't stop gpu-a:r-1; to continue: distlaunch attach gpu-a:r-1\n"
    assert words in capfd.readouterr().err
    monkeypatch.setattr(Ssh, "argv_for", lambda self, command: ["/bin/sh", "-c", "exit 255"])
    assert run_there(Ssh("gpu-a"), Request(("--version",)), name="gpu-a:r-1", runs=True) == 69
    assert words in capfd.readouterr().err  # the connection that follows a run which another one has started
    monkeypatch.setattr(Ssh, "argv_for", lambda self, command: ["/bin/sh", "-c", LOST])
    assert run_there(Ssh("gpu-a", options=SshOptions("my config")), Request(("--version",))) == 69
    words = "the command may have been carried out; `distlaunch ps -a --ssh-config 'my config' gpu-a:` shows"
    assert words in capfd.readouterr().err


def test_refuses_to_send_a_job_from_a_pipe() -> None:
    done = distlaunch("run", "--on", "gpu-a", "-", input="command: ['true']\n", status=2)
    assert "--on needs a job file; write one with `distlaunch dry-run --save job.yaml …`" in done.stderr


def test_ranks_run_with_this_python_and_not_with_that_of_the_controllers_host(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3").symlink_to(Path(sys.executable).resolve())
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    job = str(write_job(tmp_path, "import sys; print(sys.executable)", "gpus_per_node: 0\n"))
    assert run_on("gpu-a", job, load_job(job), (), (), (), detach=False) == 0
    assert capfd.readouterr().out == f"[node0:0] {sys.executable}\n"


def test_names_the_directory_where_a_script_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """To the host, the job is piped; the caller may be in another directory than the job file."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir("/")
    job = str(write_job(tmp_path, "", "gpus_per_node: 0\n"))
    (tmp_path / "worker.py").unlink()
    assert run_on("gpu-a", job, load_job(job), (), (), (), detach=False) == 127
    assert f"workdir (by default the current directory, {tmp_path})\n" in capfd.readouterr().err


@pytest.mark.parametrize("nodes", ["nodes: [alias]\nlauncher: ssh\n", ""])
def test_a_run_that_another_host_controls_is_found_by_id_and_job_file(tmp_path: Path, nodes: str) -> None:
    """A shell stands in for ssh: it knows the host only by its alias and the job's configuration."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    answers = f'export XDG_STATE_HOME="{tmp_path}/there"\nfor last; do :; done\nexec /bin/sh -c "$last"\n'
    named = f'case "$*" in *"-F {tmp_path}/config"*"-- alias "*) ;; *) exit 255 ;; esac\n'
    program(ssh, named + answers)
    (tmp_path / "config").touch()
    keys = f"{nodes}ssh: {{config: config}}\nlogs: {{dir: {tmp_path}/there/logs}}\n"
    job = write_job(tmp_path, "print('here job', flush=True)\nimport signal\nsignal.pause()", ONE + keys)
    own = {"PATH": f"{ssh.parent}:{os.environ['PATH']}", "XDG_STATE_HOME": f"{tmp_path}/s"}
    around: dict[str, Any] = {"env": os.environ | own}
    run = distlaunch("run", "-d", "-n", "2", "--on", "alias", str(job), **around).stdout.strip()
    another = {"run": f"{job.stem}2-20260101-120000-0a1b2c3d", "directory": "/none", "host": "other"}
    runs = tmp_path / "s/distlaunch/runs.jsonl"
    runs.write_text(f"{runs.read_text()}{json.dumps(another)}\n")
    (row,) = json.loads(distlaunch("ps", "--json", **around).stdout)
    assert (row["run"], row["state"], row["controller"]["host"]) == (run, "UNKNOWN", "alias")
    for word in ("job", run[:-3]):
        assert re.search(rf"{run} +RUNNING +2 ", distlaunch("ps", word, **around).stdout)
    both = distlaunch("ps", run, "alias:", **around, status=2)
    assert f"{run} is on another host, so it must be the only one" in both.stderr
    events = tmp_path / "there/logs" / run / "events.jsonl"
    at = events.read_bytes().index(b'"version": %d,' % VERSION) + len('"version": ')
    with open(events, "r+b", buffering=0) as file:  # to which the controller appends
        os.pwrite(file.fileno(), b"%d" % (VERSION + 1), at)
        distlaunch("attach", run, **around, status=1)  # which is not the run's end
        os.pwrite(file.fileno(), b"%d" % VERSION, at)
    assert run in distlaunch("ps", "--json", **around).stdout
    attached = Going(tmp_path, distlaunch_argv("attach", "-a", run), **around)
    attached.wait_for("here")
    attached.process.send_signal(signal.SIGINT)
    assert attached.wait() == 130
    assert f"detached from {run} without stopping it; `distlaunch stop {run}` stops it" in attached.stderr
    assert f"{run}: CANCELLED" in distlaunch("stop", str(job), **around).stderr
    assert "here" in distlaunch("logs", run[:-3], **around).stdout
    assert "here job\n" in distlaunch("logs", "job", "--grep", "job", **around).stdout
    told = distlaunch("report", run, **around, status=2).stderr
    assert "report would write its files on alias; use -o - and redirect stdout" in told
    assert distlaunch("report", run, "-o", "-", **around, status=0).stdout.startswith("<!DOCTYPE html>")
    words = ["why", "--ssh-config", f"{tmp_path}/config", "alias:"]
    none = distlaunch(*words, **around, cwd=ssh.parent, status=2)
    lists = f"`distlaunch ps -a --ssh-config {tmp_path}/config alias:` lists all runs on alias"
    assert f"in your home directory on alias; {lists}" in none.stderr
    for status in (143, 255):  # ssh itself exits with 255
        over = write_job(tmp_path, f"raise SystemExit({status})", ONE + keys)
        assert distlaunch("run", "--on", "alias", str(over), **around).returncode == status
    run = distlaunch("run", "-d", "--on", "alias", str(job), **around).stdout.strip()
    distlaunch("stop", f"{tmp_path}/there/logs/{run}", **around, status=0)  # as on a shared disk
    assert distlaunch("ps", "--json", **around).stdout == "[]\n"


def test_a_terminal_gets_no_control_sequences_from_another_host(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    pipes = '{ /bin/sh -c "$last" 2>&1 >&3 | cat >&2; } 3>&1'  # ssh runs commands without a terminal
    program(tmp_path / "bin/ssh", f"for last; do :; done\n{pipes}")
    writes = r"import os; os.write(1, b'\33]0;out\7\n'); os.write(2, b'\33[2Jerr\n')"
    job = write_job(tmp_path, writes, ONE)
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    _, shown = on_a_terminal("run", "--on", "alias", str(job), PATH=path)
    _, again = on_a_terminal("logs", f"alias:{next((tmp_path / 'runs').iterdir())}", PATH=path)
    for text in (shown, again):
        assert rb"\x1b]0;out\x07" in text
        assert rb"\x1b[2Jerr" in text
        assert b"\x1b" not in text


def test_ctrl_c_while_a_run_starts_on_another_host_stops_it(tmp_path: Path) -> None:
    """Its node doesn't answer."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    os.mkfifo(tmp_path / "never")
    waits = f'case "$*" in *"-- slow "*) exec cat "{tmp_path}/never" ;; esac\n'
    program(ssh, f'{waits}for last; do :; done\n/bin/sh -c "$last"; exit $?\n')
    job = write_job(tmp_path, "", f"{ONE}nodes: [slow]\nlauncher: ssh\nlogs: {{dir: {tmp_path}/logs}}\n")
    env = {**os.environ, "PATH": f"{ssh.parent}:{os.environ['PATH']}"}

    def state() -> str:
        return "".join(json.loads(path.read_text())["state"] for path in tmp_path.glob("logs/*/status.json"))

    with running(job, "--on", "alias", env=env) as run:
        wait_until(lambda: state() == "CONNECTING", state)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130
    wait_until(lambda: state() == "CANCELLED", state)
