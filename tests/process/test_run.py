"""Runs on this machine: what workers get, what users see, what is kept."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import (
    PATIENCE_S,
    agents_of,
    distlaunch,
    distlaunch_argv,
    kill,
    nothing_was_dropped,
    on_a_terminal,
    running,
    wait_gone,
    write_job,
)

CPU = "nodes: 2\ngpus_per_node: 0\nprocs_per_node: 2\n"


def test_workers_get_the_contract(tmp_path: Path) -> None:
    job = write_job(
        tmp_path,
        """
        import json, os, sys
        json.dump(dict(os.environ), open(f"env{os.environ['RANK']}.json", "w"))
        """,
        CPU + 'args: ["--rank={rank}"]\nenv: {WORD: "a b"}',
    )
    done = distlaunch("run", str(job))
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / f"env{rank}.json").read_text()) for rank in range(4)]
    assert [(env["RANK"], env["LOCAL_RANK"], env["NODE_RANK"], env["GROUP_RANK"]) for env in found] == [
        ("0", "0", "0", "0"),
        ("1", "1", "0", "0"),
        ("2", "0", "1", "1"),
        ("3", "1", "1", "1"),
    ]
    for env in found:
        assert env["WORLD_SIZE"] == env["ROLE_WORLD_SIZE"] == "4"
        assert (env["LOCAL_WORLD_SIZE"], env["GROUP_WORLD_SIZE"]) == ("2", "2")
        assert env["MASTER_ADDR"] == "127.0.0.1"
        assert env["MASTER_PORT"] == found[0]["MASTER_PORT"]
        assert env["TORCHELASTIC_USE_AGENT_STORE"] == "False"
        assert env["OMP_NUM_THREADS"] == "1"
        assert env["WORD"] == "a b"
        assert env["DISTLAUNCH_BACKEND"] == "gloo"


def test_output_is_prefixed_by_whole_lines_and_kept_byte_for_byte(tmp_path: Path) -> None:
    job = write_job(
        tmp_path,
        r"""
        import os, sys
        rank = os.environ["RANK"].encode()
        sys.stdout.buffer.write(b"one " + rank + b"\nb\xff\x00nary\nno end")
        sys.stderr.buffer.write(b"err " + rank + b"\n")
        """,
        CPU,
    )
    with running(job) as run:
        assert run.wait() == 0
        for rank in range(4):
            node = rank // 2
            assert f"[node{node}:{rank}] one {rank}\n".encode() in run.out
            assert f"[node{node}:{rank}] no end\n".encode() in run.out
            assert f"[node{node}:{rank}] err {rank}\n".encode() in run.err
            log = run.run_folder() / f"rank{rank}.out"
            assert log.read_bytes() == f"one {rank}\n".encode() + b"b\xff\x00nary\nno end"
            assert (run.run_folder() / f"rank{rank}.err").read_bytes() == f"err {rank}\n".encode()
            assert stat.S_IMODE(log.stat().st_mode) == 0o600
        assert stat.S_IMODE(run.run_folder().stat().st_mode) == 0o700


def test_a_flood_arrives_whole(tmp_path: Path) -> None:
    line = "x" * 99
    job = write_job(
        tmp_path,
        f"""
        import os, sys
        for i in range(50000):
            sys.stdout.write("{line}\\n")
        """,
        "gpus_per_node: 0\nprocs_per_node: 2\nlogs: {console: none}",
    )
    with running(job) as run:
        assert run.wait() == 0
        nothing_was_dropped(run.stderr)
        for rank in range(2):
            assert (run.run_folder() / f"rank{rank}.out").read_text() == f"{line}\n" * 50000
        assert run.stdout == ""


@pytest.mark.parametrize(
    ("console", "shown"), [("all", {0, 1, 2, 3}), ("rank0", {0}), ("none", set()), ("[0, 3]", {0, 3})]
)
def test_console_shows_the_chosen_ranks(tmp_path: Path, console: str, shown: set[int]) -> None:
    job = write_job(tmp_path, "import os; print('rank', os.environ['RANK'])", CPU)
    done = distlaunch("run", str(job), "--set", f"logs.console={console}")
    assert {int(line.rsplit(" ", 1)[1]) for line in done.stdout.splitlines()} == shown


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("master_addr: nosuch.invalid", "master_addr"),
        ("rendezvous: {endpoint: 'nosuch.invalid:29876'}", "endpoint"),
    ],
)
def test_a_master_that_nobody_knows_is_told_before_ranks_try_it(tmp_path: Path, key: str, path: str) -> None:
    done = distlaunch("run", str(write_job(tmp_path, "print('here')", f"{key}\ngpus_per_node: 0\n")))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{path}: nosuch.invalid: " in done.stderr
    assert not list(tmp_path.glob("runs/*"))


def test_a_job_file_without_a_command_is_told_how_to_run_it(tmp_path: Path) -> None:
    done = distlaunch("job.yaml")
    assert done.returncode == 2
    assert done.stderr == "distlaunch: no command 'job.yaml': `distlaunch run job.yaml` runs a job\n"


def test_a_job_file_may_be_a_pipe(tmp_path: Path) -> None:
    """As of `<(…)`: it is read once."""
    text = f"command: [echo, here]\nnodes: [{os.uname().nodename}]\nlauncher: local\ngpus_per_node: 0\n"
    os.mkfifo(tmp_path / "job.yaml")
    with running(tmp_path / "job.yaml", cwd=tmp_path) as run:
        (tmp_path / "job.yaml").write_text(text)
        assert run.wait() == 0, run.stderr
        assert run.stdout.endswith("here\n")


def test_stdin_of_workers_is_empty(tmp_path: Path) -> None:
    job = write_job(tmp_path, "import sys; print(repr(sys.stdin.read()))", "gpus_per_node: 0")
    assert distlaunch("run", str(job)).stdout == "[node0:0] ''\n"


def test_arguments_after_dashes_reach_the_script(tmp_path: Path) -> None:
    job = write_job(tmp_path, "import sys; print(sys.argv[1:])", "gpus_per_node: 0\nargs: [a]")
    done = distlaunch("run", str(job), "--", "--lr", "0.1", "-x")
    assert done.stdout == "[node0:0] ['a', '--lr', '0.1', '-x']\n"


def test_module_and_command(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "train.py").write_text("import sys; print('module', sys.argv[1:])")
    (tmp_path / "module.yaml").write_text("module: pkg.train\ngpus_per_node: 0\nargs: ['{rank}']")
    assert distlaunch("run", str(tmp_path / "module.yaml")).stdout == "[node0:0] module ['0']\n"
    command = ["/bin/echo", "rank", "{rank}", "of", "{world_size}"]
    (tmp_path / "command.yaml").write_text(f"command: {json.dumps(command)}\ngpus_per_node: 0")
    assert distlaunch("run", str(tmp_path / "command.yaml")).stdout == "[node0:0] rank 0 of 1\n"


def test_env_null_takes_the_callers_value_and_keeps_it_secret(tmp_path: Path) -> None:
    secret = "canary-4711"
    job = write_job(
        tmp_path, "import os; print(len(os.environ['TOKEN']))", "gpus_per_node: 0\nenv: {TOKEN: null}"
    )
    environment = {"TOKEN": secret, "PATH": "/usr/bin:/bin"}
    with running(job, env=environment) as run:
        assert run.wait() == 0
        assert run.stdout == f"[node0:0] {len(secret)}\n"
        for kept in run.run_folder().iterdir():
            assert secret.encode() not in kept.read_bytes(), kept
    for style in ("table", "shell", "torchrun", "json"):
        assert secret not in distlaunch("dry-run", str(job), "--format", style, env=environment).stdout


def test_json_result(tmp_path: Path) -> None:
    job = write_job(tmp_path, "import os, sys; print('hi'); sys.exit(int(os.environ['RANK']) * 5)", CPU)
    done = distlaunch("run", str(job), "--json", "--set", "nodes=1")
    result = json.loads(done.stdout)
    assert done.returncode == result["exit_status"] == 5
    assert result["cause"]["rank"] == 1
    assert [worker["rank"] for worker in result["workers"]] == [0, 1]
    assert "[node0:1] hi" in done.stderr


def test_the_named_interpreter_is_used(tmp_path: Path) -> None:
    job = write_job(
        tmp_path, "import sys; print(sys.executable)", f"gpus_per_node: 0\npython: {sys.executable}"
    )
    assert distlaunch("run", str(job)).stdout == f"[node0:0] {sys.executable}\n"


def test_a_path_below_home_is_that_of_the_user_who_runs_it(tmp_path: Path) -> None:
    work = tmp_path / "home" / "w"
    work.mkdir(parents=True)
    (work / "worker.py").write_text("import os, sys; print(sys.argv, os.getcwd(), os.environ['PWD'])")
    (tmp_path / "home" / "python").symlink_to(sys.executable)
    job = tmp_path / "job.yaml"
    paths = "script: worker.py\nworkdir: ~/w\npython: ~/python\nlogs: {dir: ~/logs}"
    job.write_text(f"{paths}\nargs: [~/kept]\ngpus_per_node: 0")
    done = distlaunch("run", str(job), env={**os.environ, "HOME": str(tmp_path / "home")})
    assert done.stdout == f"[node0:0] ['{work}/worker.py', '~/kept'] {work} {work}\n", done.stderr
    assert (tmp_path / "home" / "logs").is_dir()
    job.write_text("command: [~/w/tell]\ngpus_per_node: 0")
    (work / "tell").symlink_to("/bin/pwd")
    done = distlaunch("run", str(job), env={**os.environ, "HOME": str(tmp_path / "home")})
    assert done.stdout == f"[node0:0] {tmp_path}\n", done.stderr


@pytest.mark.parametrize("command", ["run", "dry-run", "check-port"])
def test_a_job_is_read_from_standard_input(tmp_path: Path, command: str) -> None:
    job = write_job(tmp_path, "import os; print(os.getcwd())", "gpus_per_node: 0")
    done = subprocess.run(
        distlaunch_argv(command, "-"),
        input=job.read_text(),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
        timeout=PATIENCE_S,
    )
    if command == "run":
        assert done.stdout == f"[node0:0] {tmp_path}\n"
        assert [path.name.partition("-")[0] for path in (tmp_path / "runs").iterdir()] == ["job"]
    if command == "dry-run":
        assert done.stdout.startswith("job: 1 rank on 1 node, gloo\n")


def test_mistakes_on_standard_input_are_placed() -> None:
    argv = distlaunch_argv("run", "-")
    done = subprocess.run(
        argv, input="scirpt: x", capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == 2
    assert "distlaunch: standard input:1:1: scirpt: unknown key; did you mean script?" in done.stderr


NO_UTF8 = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize("environment", [{"PYTHONIOENCODING": "latin-1"}, NO_UTF8], ids=["latin-1", "ASCII"])
@pytest.mark.parametrize(
    "arguments",
    [
        *(["--help"], ["run", "--help"], ["run", "{job}"], ["run", "{job}", "--json", "--", "é…"]),
        *(["dry-run", "{job}", "--format", style] for style in ("table", "shell", "torchrun", "json")),
        ["check-port", "{job}", "--set", "name=é…"],
    ],
    ids=" ".join,
)
def test_no_encoding_ends_in_a_traceback(
    tmp_path: Path, arguments: list[str], environment: dict[str, str]
) -> None:
    job = write_job(tmp_path, "print('plain')", "gpus_per_node: 0\nname: jöb…\nargs: [é, ≥]\nenv: {X: é}")
    job = job.rename(tmp_path / "jöb.yaml")
    words = [word.format(job=job) for word in arguments]
    argv = [os.fsencode(word) for word in distlaunch_argv(*words)]
    done = subprocess.run(
        argv, capture_output=True, env={**os.environ, **environment}, check=False, timeout=PATIENCE_S
    )
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr


def test_a_file_name_that_the_locale_can_not_spell_is_told(tmp_path: Path) -> None:
    job = write_job(tmp_path, "", "gpus_per_node: 0\nlogs: {dir: jö}")
    done = distlaunch("run", str(job), env={**os.environ, **NO_UTF8})
    assert done.returncode == 2
    assert done.stderr.startswith("distlaunch: this locale's encoding, ascii, can't represent '")


@pytest.mark.parametrize("most", [7, 8, 10, 12])
def test_too_few_descriptors_are_told(tmp_path: Path, most: int) -> None:
    job = write_job(tmp_path, "", "gpus_per_node: 0\nprocs_per_node: 4")
    limited = ["sh", "-c", f'ulimit -n {most}; exec "$@"', "sh", *distlaunch_argv("run", str(job))]
    done = subprocess.run(limited, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert "Traceback" not in done.stderr
    assert (done.returncode in (1, 126), "`ulimit -n`" in done.stderr) == (True, True), done.stderr


@pytest.mark.parametrize("command", ["run", "dry-run", "check-port", "schema", "import"])
def test_h_is_help(command: str) -> None:
    assert distlaunch(command, "-h").stdout == distlaunch(command, "--help").stdout != ""


@pytest.mark.parametrize("target", ["29777", ":29777"])
def test_a_port_alone_to_check_is_told_with_a_host(target: str) -> None:
    done = distlaunch("check-port", target)
    words = f"{target}: neither a job file nor host:port; write localhost:29777 for a port on this machine"
    assert (done.returncode, done.stderr) == (2, f"distlaunch: {words}\n")


def test_a_rank_to_show_must_be_there(tmp_path: Path) -> None:
    job = write_job(tmp_path, "", "gpus_per_node: 0\nprocs_per_node: 3\nlogs: {console: [7]}")
    for command in ("run", "dry-run"):
        done = distlaunch(command, str(job))
        assert done.returncode == 2
        assert (
            "job.yaml:4:18: logs.console[0]: rank 7 does not exist: the job has ranks 0 to 2" in done.stderr
        )


def test_without_a_terminal_there_are_no_colours(tmp_path: Path) -> None:
    job = write_job(tmp_path, "print('plain')", "gpus_per_node: 0")
    done = distlaunch("run", str(job))
    assert "\x1b" not in done.stdout + done.stderr


def shown_on_a_terminal(job: Path, **environment: Any) -> bytes:
    """All that a run writes to its terminal."""
    status, shown = on_a_terminal("run", "--quiet", str(job), **environment)
    assert status == 0, shown
    return shown


def test_a_terminal_gets_coloured_prefixes_and_no_commands_of_workers(tmp_path: Path) -> None:
    worker = r"print('\x1b]0;title\x07 \x1b[31mred\x1b[0m \x1b[2J \u202e done')"
    job = write_job(tmp_path, worker, "gpus_per_node: 0")
    shown = shown_on_a_terminal(job)
    assert shown.startswith(b"\x1b[36m[node0:0] \x1b[0m")
    assert b"\x1b[31mred\x1b[0m" in shown
    assert b"\\x1b]0;title\\x07" in shown
    assert b"\\x1b[2J" in shown
    assert "\u202e".encode() not in shown
    assert shown_on_a_terminal(job, NO_COLOR="1").startswith(b"[node0:0] ")


def test_a_progress_bar_is_shown_before_its_line_ends(tmp_path: Path) -> None:
    worker = """
        import os, signal, sys
        for percent in range(101):
            sys.stderr.write(f"\\r{percent}%")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        os.write(1, b"ready 0 %d\\n" % os.getpid())
        signal.pause()
    """
    with running(write_job(tmp_path, worker, "gpus_per_node: 0")) as run:
        run.wait_for("%")
        run.wait_ready(1)
        run.process.terminate()
        assert run.wait() == 143
        log = (run.run_folder() / "rank0.err").read_bytes()
        assert log == b"".join(b"\r%d%%" % percent for percent in range(101))


def test_last_words_on_stdout_are_told_where_stderr_is_silent(tmp_path: Path) -> None:
    worker = "import sys; print('FATAL: /data is not mounted'); sys.exit(4)"
    done = distlaunch("run", str(write_job(tmp_path, worker, "gpus_per_node: 0")), "--json")
    assert "distlaunch:   | FATAL: /data is not mounted\n" in done.stderr
    assert json.loads(done.stdout)["cause"]["last_words"] == ["FATAL: /data is not mounted"]


WARNED = "[W1122 09:00:00.123456789 socket.cpp:767] [c10d] The client socket cannot be initialized"


@pytest.mark.parametrize("end", ["sys.exit(3)", "os.kill(os.getpid(), 15)", "os.abort()"])
def test_a_warning_of_torchs_is_no_ranks_last_words(tmp_path: Path, end: str) -> None:
    worker = f"""
        import os, sys
        sys.stderr.write("{WARNED}\\n")
        sys.stderr.flush()
        {end}
    """
    done = distlaunch("run", str(write_job(tmp_path, worker, "gpus_per_node: 0")), "--json")
    assert f"[node0:0] {WARNED}\n" in done.stderr
    assert "  | " not in done.stderr
    assert json.loads(done.stdout)["cause"]["last_words"] == []


def test_last_words_behind_a_warning_of_torchs_are_told(tmp_path: Path) -> None:
    worker = f"import sys; sys.stderr.write('{WARNED}\\n'); sys.exit('boom')"
    done = distlaunch("run", str(write_job(tmp_path, worker, "gpus_per_node: 0")))
    assert f"  | {WARNED}\ndistlaunch:   | boom\n" in done.stderr


def test_nobody_knows_who_sent_a_signal(tmp_path: Path) -> None:
    """A rank that kills itself ends just as one that another process kills."""
    for name in ("SIGKILL", "SIGTERM"):
        worker = f"import os, signal; os.kill(os.getpid(), signal.{name})"
        done = distlaunch("run", str(write_job(tmp_path, worker, "gpus_per_node: 0")))
        assert f"failed first: killed by signal {signal.Signals[name]:d} ({name})" in done.stderr
        assert "sent by" not in done.stderr


def test_a_traceback_that_the_terminal_has_just_shown_is_not_repeated(tmp_path: Path) -> None:
    worker = "raise RuntimeError('boom')"
    status, shown = on_a_terminal("run", str(write_job(tmp_path, worker, "gpus_per_node: 0")), NO_COLOR="1")
    lines = shown.decode().splitlines()
    assert status == 1
    assert lines.count("[node0:0] RuntimeError: boom") == 1
    assert shown.count(b"RuntimeError: boom") == 1, shown.decode()
    assert b"above" not in shown
    assert shown.index(b"RuntimeError: boom") < shown.index(b"failed first")
    assert shown.count(b"failed first: exit status 1") == 1


@pytest.mark.parametrize("says", ["raise RuntimeError('boom')", "print('boom'); sys.exit(1)"])
def test_an_exit_is_told_below_what_the_rank_said_before_it(tmp_path: Path, says: str) -> None:
    """Also by an agent that learns of both at once, as under load."""
    worker = f"""
        import os, sys
        os.write(1, b"ready 0 %d\\n" % os.getpid())
        open("go").read()
        {says}
    """
    os.mkfifo(tmp_path / "go")
    with running(write_job(tmp_path, worker, "gpus_per_node: 0\n"), stderr=subprocess.STDOUT) as run:
        (pid,) = run.wait_ready(1).values()
        (agent,) = agents_of(run.process.pid)
        kill(agent, signal.SIGSTOP)
        (tmp_path / "go").write_text("")
        wait_gone([pid], PATIENCE_S)
        kill(agent, signal.SIGCONT)
        assert run.wait() == 1
    assert run.stdout.index("boom\n") < run.stdout.index("failed first: exit status 1")


SPEAKS_LATER = """
    import os, signal, sys
    def answer(*_):
        print("told to end", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, answer)
    if os.environ["RANK"] == "1":
        open("ready").read()
        {fails}
    with open("ready", "w"):
        pass
    signal.pause()
"""


@pytest.mark.parametrize(
    ("fails", "last", "pointer"),
    [
        ("raise RuntimeError('boom')", "RuntimeError: boom", "its traceback is above, marked [node0:1]"),
        ("sys.exit('boom')", "boom", "its last output is above, marked [node0:1]"),
        ("print('boom'); sys.exit(1)", "boom", "its last output is above, marked [node0:1]"),
    ],
)
def test_where_others_spoke_since_the_summary_points_at_the_last_words(
    tmp_path: Path, fails: str, last: str, pointer: str
) -> None:
    os.mkfifo(tmp_path / "ready")
    job = write_job(tmp_path, SPEAKS_LATER.format(fails=fails), "gpus_per_node: 0\nprocs_per_node: 2\n")
    status, shown = on_a_terminal("run", str(job), NO_COLOR="1")
    lines = shown.decode().splitlines()
    assert status == 1
    assert lines.count(f"[node0:1] {last}") == 1
    assert lines.index("[node0:0] told to end") > lines.index(f"[node0:1] {last}")
    cause = "distlaunch: rank 1 (node0) failed first: exit status 1"
    assert f"{cause}\ndistlaunch:   {pointer}\n" in "\n".join(lines)
    assert f"  | {last}" not in shown.decode()


def test_where_others_spoke_meanwhile_the_summary_points_at_the_traceback(tmp_path: Path) -> None:
    """The rank to blame has the last word, but its traceback stands further up."""
    worker = """
        import atexit, os, signal, sys
        if os.environ["RANK"] == "1":
            def leave():
                open("said").read()
                print("done", file=sys.stderr, flush=True)
            atexit.register(leave)
            raise RuntimeError("boom")
        open("shown").read()
        print("between", file=sys.stderr, flush=True)
        open("said", "w").close()
        signal.pause()
    """
    for name in ("shown", "said"):
        os.mkfifo(tmp_path / name)
    job = write_job(tmp_path, worker, "gpus_per_node: 0\nprocs_per_node: 2\n")
    gate = (b"RuntimeError: boom", tmp_path / "shown")
    _, shown = on_a_terminal("run", str(job), gate=gate, NO_COLOR="1")
    assert shown.count(b"RuntimeError: boom") == 1
    assert b"distlaunch:   its traceback is above, marked [node0:1]" in shown


def test_what_the_terminal_does_not_show_is_told_by_the_summary(tmp_path: Path) -> None:
    job = write_job(tmp_path, "raise RuntimeError('boom')", "gpus_per_node: 0\nlogs: {console: none}\n")
    _, shown = on_a_terminal("run", str(job), NO_COLOR="1")
    assert b"distlaunch:   | RuntimeError: boom" in shown


def test_what_has_scrolled_away_is_told_by_the_summary(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ready")
    worker = SPEAKS_LATER.replace("told to end", "x\\n" * 101).format(fails="sys.exit('boom')")
    job = write_job(tmp_path, worker, "gpus_per_node: 0\nprocs_per_node: 2\n")
    _, shown = on_a_terminal("run", str(job), NO_COLOR="1")
    assert b"distlaunch:   | boom" in shown


def test_json_has_the_last_words_that_the_terminal_has_shown(tmp_path: Path) -> None:
    job = write_job(tmp_path, "raise RuntimeError('boom')", "gpus_per_node: 0")
    _, shown = on_a_terminal("run", "--json", str(job), NO_COLOR="1")
    assert b"  | " not in shown
    assert json.loads(shown[shown.index(b"\n{") :])["cause"]["last_words"][-1] == "RuntimeError: boom"


@pytest.mark.parametrize("command", ["run", "dry-run"])
def test_a_second_word_is_no_argument_of_the_script(tmp_path: Path, command: str) -> None:
    job = str(write_job(tmp_path, "import sys; print(sys.argv[1:])", "gpus_per_node: 0"))
    done = distlaunch(command, job, "procs_per_node=1")
    assert (done.returncode, done.stderr) == (
        2,
        "distlaunch: unexpected argument 'procs_per_node=1': use --set to override a key\n",
    )
    done = distlaunch(command, job, job)
    assert done.stderr.endswith("put the script's arguments after --\n")
    assert distlaunch(command, job, "--", "--lr", "1").returncode == 0


def test_a_script_in_place_of_a_job_file_is_told(tmp_path: Path) -> None:
    write_job(tmp_path, "print(1)")
    done = distlaunch("run", str(tmp_path / "worker.py"))
    assert done.returncode == 2
    assert "is a script, not a job file: write a job file with `script: " in done.stderr


@pytest.mark.parametrize("shell", ["sh", "bash", "zsh"])
def test_pasted_commands_end_with_the_status_of_the_worker_that_failed(tmp_path: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is missing")
    job = write_job(tmp_path, "import os, sys; sys.exit(7 * int(os.environ['RANK']))", "gpus_per_node: 0")
    for procs, status in ((1, 0), (2, 7)):
        text = distlaunch("dry-run", str(job), "--set", f"procs_per_node={procs}", "--format", "shell").stdout
        assert subprocess.run([shell, "-c", text], check=False).returncode == status


def test_gpus_that_are_not_there_are_told_at_the_start(tmp_path: Path) -> None:
    job = write_job(tmp_path, "", "nodes: 2\ngpus_per_node: 2\n")
    done = distlaunch("run", str(job), env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    told = "node0, node1: the job file says 2 GPUs, but none is visible there; check with `nvidia-smi -L`\n"
    assert (done.returncode, done.stderr.count(told)) == (0, 1), done.stderr


def test_a_plan_of_many_ranks_has_a_row_for_each_node(tmp_path: Path) -> None:
    job = write_job(tmp_path, "pass", "nodes: ['gpu[001-100]']\ngpus_per_node: 4\nbackend: nccl\n")
    shown = distlaunch("dry-run", str(job)).stdout.splitlines()
    rows = [line.split()[:4] for line in shown if line.startswith("gpu")]
    assert rows[0] == ["gpu001", "0-3", "0-3", "cuda"] and rows[-1] == ["gpu100", "0-3", "396-399", "cuda"]
    assert len(rows) == 100


def test_the_plan_of_a_thousand_nodes_is_whole_in_each_form(tmp_path: Path) -> None:
    job = write_job(tmp_path, "pass", "nodes: ['node[0001-1000]']\ngpus_per_node: 8\nbackend: nccl\n")
    table = distlaunch("dry-run", str(job)).stdout.splitlines()
    assert (table[0], len(table)) == ("job: 8000 ranks on 1000 nodes, nccl", 1003)
    assert table[-1].split() == ["node1000", "0-7", "7992-7999", "cuda"]
    document = json.loads(distlaunch("dry-run", str(job), "--json").stdout)
    assert document["world_size"] == 8000
