"""Runs on this machine: the contract of ranks, command lines, and what a terminal shows."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import (
    PATIENCE_S,
    agents_of,
    completed,
    distlaunch,
    distlaunch_argv,
    kill,
    on_a_terminal,
    open_gate,
    running,
    wait_gone,
    write_job,
)
from tests.process.commands import FOUR, ONE, TWO, run_one, sleeper


@pytest.mark.parametrize(("setting", "rank_0"), [("stdin=rank 0", "words"), ("stdin=none", "")])
def test_runs_a_script_and_only_rank_0_reads_stdin_if_told(tmp_path: Path, setting: str, rank_0: str) -> None:
    text = "import os, sys; print(os.environ['RANK'], sys.argv[1:], repr(sys.stdin.read()))"
    (tmp_path / "told.py").write_text(text)
    words = ["run", "told.py", "-n", "2", "--set", "gpus_per_node=0", "--set", setting, "--", "-n", "x"]
    done = distlaunch(*words, cwd=tmp_path, input="words")
    told = sorted(line.partition("] ")[2] for line in done.stdout.splitlines())
    assert told == [f"0 ['-n', 'x'] {rank_0!r}", "1 ['-n', 'x'] ''"], done.stderr


@pytest.mark.parametrize("more", [(), ("--set=logs.fold=true",)])
def test_a_rank_that_reads_the_terminal_shows_what_it_asks(tmp_path: Path, more: tuple[str, ...]) -> None:
    text = """
        import os
        if os.environ["RANK"] == "0":
            print(input("number? ") * 3)
            open("answered", "w").close()
        else:
            print("waits...", end="", flush=True)
            open("answered").read()
    """
    os.mkfifo(tmp_path / "answered")
    job = str(write_job(tmp_path, text, f"{TWO}stdin: rank 0"))
    status, shown = on_a_terminal("run", job, *more, press=(b"number? ", b"12\n"), NO_COLOR="1")
    assert (status, b"[node0:0] number? \r\n12\r\n[node0:0] 121212\r\n" in shown) == (0, True), shown


def test_runs_in_an_environment_with_a_nameless_variable(tmp_path: Path) -> None:
    argv = ["env", "=x", *distlaunch_argv("run", str(write_job(tmp_path, "print('here')", ONE)))]
    assert completed(argv, 0).stdout == "[node0:0] here\n"


def test_refuses_a_view_and_a_detached_run_if_a_rank_reads_the_terminal(tmp_path: Path) -> None:
    job = str(write_job(tmp_path, "", f"{ONE}stdin: rank 0"))
    for option in ("--view", "-d"):
        status, shown = on_a_terminal("run", option, job)
        assert (status, b"`stdin: rank 0` can't be combined with --view or --on" in shown) == (2, True), shown


def test_console_shows_the_chosen_ranks(tmp_path: Path) -> None:
    job = write_job(tmp_path, "import os; print('rank', os.environ['RANK'])", FOUR)
    for console, shown in (("all", "0123"), ("rank0", "0"), ("none", ""), ("[0, 3]", "03")):
        done = distlaunch("run", str(job), "--set", f"logs.console={console}")
        assert sorted(line[-1] for line in done.stdout.splitlines()) == [*shown]


NO_COMMAND, TO_SET = "is not a command; to run it, use `distlaunch", "of the job, use --set"
NO_TERMINAL, WITH_VIEW = (
    "works only if stdout is a terminal",
    "--view can't be combined with --json or --quiet",
)
WITH_JSON = "--json can't be combined with --detach or --on"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("job.yaml", f"distlaunch: 'job.yaml' {NO_COMMAND} run job.yaml`\n"),
        ("worker.py", f"'worker.py' {NO_COMMAND} run worker.py`\n"),
        ("run job.yaml --lr 0.1", "if --lr is for the script or command, put it after `--`; to set"),
        ("import torchrun torchrun --nnodes 2", "╯\ndistlaunch: if --nnodes is for the script or command"),
        ("run --nproc-per-node 2 t.py", f"to set procs_per_node {TO_SET} procs_per_node=…"),
        ("dry-run job.yaml --max_restarts=2", f"to set restarts.max {TO_SET} restarts.max=…"),
        *((words, "╯\n") for words in ("run -n", "run --set", "logs --since", "ps --json=1")),
        ("run -H a b worker.py", "argument 'b': -H takes hosts separated by commas, as in -H a,b\n"),
        ("run job.yaml --set nodes = 2", "'=': write --set KEY=VALUE without spaces\n"),
        ("run -", "distlaunch: standard input:1:1: scirpt: unknown key; did you mean script?"),
        ("submit worker.py", "a script, not a job file: `distlaunch dry-run worker.py --save job.yaml`"),
        ("run", "distlaunch: specify a job file or a script, as in `distlaunch run train.py -n 4`"),
        ("run job.yaml -m x", "'job.yaml' can't be used with -m; to pass it to the module, put it after --"),
        ("run job.yaml --set master_addr=nosuch.invalid", "master_addr: nosuch.invalid: "),
        ("run job.yaml --set rendezvous.endpoint=nosuch.invalid:2", "endpoint: nosuch.invalid: "),
        ("run job.yaml a=1", "distlaunch: unexpected argument 'a=1': use --set to override a key\n"),
        ("run -n 2 python3 train.py", "'train.py': leave out python3, as in `distlaunch run train.py`\n"),
        ("dry-run job.yaml job.yaml", "put the script's arguments after --\n"),
        ("check-port --ssh-config nope localhost:29777", "--ssh-config nope: no such file\n"),
        ("check-port 29777", "29777: neither a job file nor host:port; write localhost:29777 for"),
        ("check-port :29777", ":29777: neither a job file nor host:port; write localhost:29777 for"),
        ("view", f"view {NO_TERMINAL}; use `distlaunch attach`"),
        ("run --view job.yaml", f"--view {NO_TERMINAL}"),
        ("run --view --detach job.yaml", "--view can't be combined with --detach or --on"),
        ("run --view --json job.yaml", WITH_VIEW),
        ("run --view -q job.yaml", WITH_VIEW),
        ("run --json -d job.yaml", WITH_JSON),
        ("run --json --on host job.yaml", WITH_JSON),
    ],
)
def test_refuses_a_command_line_and_starts_nothing(tmp_path: Path, words: str, said: str) -> None:
    write_job(tmp_path, "print('here')", ONE)
    done = distlaunch(*words.split(), cwd=tmp_path, input="scirpt: x")
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert not list(tmp_path.glob("runs/*"))


SCRIPT = "script: worker.py\nworkdir: ~/w\npython: ~/python\nargs: [~/kept]"
ARGV = "['{work}/worker.py', '~/kept']"


@pytest.mark.parametrize(
    ("keys", "printed"), [(SCRIPT, f"{ARGV} {{work}} {{work}}"), ("command: [~/w/tell]", "{here}")]
)
def test_a_path_below_home_is_that_of_the_user_who_runs_it(tmp_path: Path, keys: str, printed: str) -> None:
    work = tmp_path / "home" / "w"
    work.mkdir(parents=True)
    (work / "worker.py").write_text("import os, sys; print(sys.argv, os.getcwd(), os.environ['PWD'])")
    (work / "tell").symlink_to("/bin/pwd")
    (tmp_path / "home" / "python").symlink_to(sys.executable)
    (tmp_path / "job.yaml").write_text(f"{keys}\nlogs: {{dir: ~/logs}}\n{ONE}")
    done = distlaunch("run", str(tmp_path / "job.yaml"), env={**os.environ, "HOME": str(tmp_path / "home")})
    assert done.stdout == f"[node0:0] {printed.format(work=work, here=tmp_path)}\n", done.stderr
    assert (tmp_path / "home" / "logs").is_dir()


NO_UTF8 = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize("environment", [{"PYTHONIOENCODING": "latin-1"}, NO_UTF8], ids=["latin-1", "ASCII"])
def test_prints_in_any_encoding_without_a_traceback(tmp_path: Path, environment: dict[str, str]) -> None:
    job = write_job(tmp_path, "print('plain')", "gpus_per_node: 0\nname: jöb…\nargs: [é, ≥]\nenv: {X: é}")
    job = job.rename(tmp_path / "jöb.yaml")
    forms = (f"dry-run {job} --format {form}" for form in ("table", "shell", "torchrun", "json"))
    runs = ("--help", "run --help", f"run {job}", f"run {job} --json -- é…")
    for words in (*runs, *forms, f"check-port {job} --set name=é…"):
        argv = distlaunch_argv(*words.split())
        done = completed(argv, 0, env={**os.environ, **environment}, text=False)
        assert b"Traceback" not in done.stderr


def test_reports_a_file_name_that_the_locale_cannot_encode(tmp_path: Path) -> None:
    job = write_job(tmp_path, "", "gpus_per_node: 0\nlogs: {dir: jö}")
    done = distlaunch("run", str(job), env={**os.environ, **NO_UTF8}, status=2)
    assert done.stderr.startswith("distlaunch: this locale's encoding, ascii, can't represent '")


@pytest.mark.parametrize("most", [7, 8, 10, 12])
def test_reports_too_low_a_limit_on_descriptors(tmp_path: Path, most: int) -> None:
    run = distlaunch_argv("run", str(write_job(tmp_path, "", "gpus_per_node: 0\nprocs_per_node: 4")))
    done = completed(["sh", "-c", f'ulimit -n {most}; exec "$@"', "sh", *run])
    assert "Traceback" not in done.stderr
    assert (done.returncode in (1, 126), "`ulimit -n`" in done.stderr) == (True, True), done.stderr


def test_dash_h_shows_the_help() -> None:
    for command in ("run", "check-port", "import"):
        assert distlaunch(command, "-h").stdout == distlaunch(command, "--help").stdout != ""


def test_a_terminal_gets_colored_prefixes_and_no_control_sequences_of_workers(tmp_path: Path) -> None:
    job = write_job(tmp_path, r"print('\x1b]0;title\x07 \x1b[31mred\x1b[0m \x1b[2J \u202e done')", ONE)
    shown = on_a_terminal("run", "-q", str(job))[1]
    plain = on_a_terminal("run", "-q", str(job), NO_COLOR="1")[1]
    assert shown.startswith(b"\x1b[36m[node0:0] \x1b[0m")
    for kept in (b"\x1b[31mred\x1b[0m", b"\\x1b]0;title\\x07", b"\\x1b[2J"):
        assert kept in shown
    assert "\u202e".encode() not in shown
    assert plain.startswith(b"[node0:0] ")


def test_a_progress_bar_is_shown_before_its_line_ends(tmp_path: Path) -> None:
    worker = sleeper("import sys\nfor percent in range(101): sys.stderr.write(f'\\r{percent}%')\n")
    with running(write_job(tmp_path, worker, ONE)) as run:
        run.wait_for("%")
        run.wait_ready(1)
        run.process.terminate()
        assert run.wait() == 143
        log = (run.run_directory() / "rank0.err").read_bytes()
        assert log == b"".join(b"\r%d%%" % percent for percent in range(101))


WARNED = "[W1122 09:00:00.123456789 socket.cpp:767] [c10d] The client socket cannot be initialized"


@pytest.mark.parametrize(
    ("worker", "lines"),
    [
        ("print('/data is not mounted'); sys.exit(4)", ["/data is not mounted"]),  # where stderr is silent
        (f"sys.stderr.write('{WARNED}\\n'); sys.exit('boom')", ["boom"]),
        (f"os.write(2, b'{WARNED}\\n'); sys.exit(3)", []),
        (f"os.write(2, b'{WARNED}\\n'); os.abort()", []),
    ],
)
def test_the_last_output_is_not_torchs_warning(tmp_path: Path, worker: str, lines: list[str]) -> None:
    done = run_one(tmp_path, f"import os, sys; {worker}", "", "--json")
    assert (f"[node0:0] {WARNED}\n" in done.stderr) == (WARNED in worker)
    assert re.findall(r"  \| (.*)", done.stderr) == lines
    assert json.loads(done.stdout)["cause"]["last_output"] == lines


def test_the_summary_repeats_a_traceback_only_if_the_terminal_did_not_show_it(tmp_path: Path) -> None:
    job = str(write_job(tmp_path, "raise RuntimeError('boom')", ONE))
    status, shown = on_a_terminal("run", job, NO_COLOR="1")
    assert status == 1
    assert shown.decode().splitlines().count("[node0:0] RuntimeError: boom") == 1
    assert shown.count(b"RuntimeError: boom") == 1, shown.decode()
    assert b"above" not in shown
    assert shown.index(b"RuntimeError: boom") < shown.index(b"failed first")
    assert shown.count(b"failed first: exit status 1") == 1
    _, silent = on_a_terminal("run", job, "--set", "logs.console=none", NO_COLOR="1")
    assert b"distlaunch:   | RuntimeError: boom" in silent
    _, shown = on_a_terminal("run", "--json", job, NO_COLOR="1")
    assert b"  | " not in shown
    assert json.loads(shown[shown.index(b"\n{") :])["cause"]["last_output"][-1] == "RuntimeError: boom"


@pytest.mark.parametrize("says", ["raise RuntimeError('boom')", "print('boom'); sys.exit(1)"])
def test_reports_an_exit_below_the_output_before_it(tmp_path: Path, gate: Path, says: str) -> None:
    """Also by an agent that learns of both at once, as under load."""
    worker = f"""
        import os, sys
        os.write(1, b"ready 0 %d\\n" % os.getpid())
        open("gate").read()
        {says}
    """
    with running(write_job(tmp_path, worker, ONE), stderr=subprocess.STDOUT) as run:
        (pid,) = run.wait_ready(1).values()
        (agent,) = agents_of(run.process.pid)
        kill(agent, signal.SIGSTOP)
        open_gate(gate)
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
    ("fails", "last", "what"),
    [
        ("raise RuntimeError('boom')", "RuntimeError: boom", "traceback"),
        ("sys.exit('boom')", "boom", "last output"),
        ("print('boom'); sys.exit(1)", "boom", "last output"),
    ],
)
def test_the_summary_points_at_output_further_up(tmp_path: Path, fails: str, last: str, what: str) -> None:
    os.mkfifo(tmp_path / "ready")
    job = write_job(tmp_path, SPEAKS_LATER.format(fails=fails), TWO)
    status, shown = on_a_terminal("run", str(job), NO_COLOR="1")
    lines = shown.decode().splitlines()
    assert (status, lines.count(f"[node0:1] {last}")) == (1, 1)
    assert lines.index("[node0:0] told to end") > lines.index(f"[node0:1] {last}")
    cause = lines.index("distlaunch: rank 1 (node0) failed first: exit status 1")
    assert lines[cause + 1] == f"distlaunch:   its {what} is above, marked [node0:1]"
    assert f"  | {last}" not in shown.decode()


def test_the_summary_points_at_a_traceback_that_others_interrupted(tmp_path: Path) -> None:
    """The rank to blame has the last word, but its traceback stands further up."""
    worker = """
        import atexit, os, signal
        if os.environ["RANK"] == "1":
            atexit.register(lambda: (open("said").read(), os.write(2, b"done\\n")))
            raise RuntimeError("boom")
        open("shown").read()
        os.write(2, b"between\\n")
        open("said", "w").close()
        signal.pause()
    """
    for name in ("shown", "said"):
        os.mkfifo(tmp_path / name)
    job = write_job(tmp_path, worker, TWO)
    gate = (b"RuntimeError: boom", tmp_path / "shown")
    _, shown = on_a_terminal("run", str(job), gate=gate, NO_COLOR="1")
    assert shown.count(b"RuntimeError: boom") == 1
    assert b"distlaunch:   its traceback is above, marked [node0:1]" in shown


def test_the_summary_repeats_what_has_scrolled_away(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ready")
    worker = SPEAKS_LATER.replace("told to end", "x\\n" * 101).format(fails="sys.exit('boom')")
    _, shown = on_a_terminal("run", str(write_job(tmp_path, worker, TWO)), NO_COLOR="1")
    assert b"distlaunch:   | boom" in shown


@pytest.mark.parametrize("shell", ["sh", "bash", "zsh"])
def test_pasted_commands_end_with_the_status_of_the_worker_that_failed(tmp_path: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is missing")
    job = write_job(tmp_path, "import os, sys; sys.exit(7 * int(os.environ['RANK']))", ONE)
    for procs, status in ((1, 0), (2, 7)):
        text = distlaunch("dry-run", str(job), "--set", f"procs_per_node={procs}", "--format", "shell").stdout
        assert subprocess.run([shell, "-c", text], check=False).returncode == status


def test_a_run_that_cannot_begin_has_a_json_result_with_the_usual_keys(tmp_path: Path) -> None:
    good = run_one(tmp_path, "pass", "", "--json")
    for keys, status, words in (
        ("bogus: 1\n", 2, "bogus: unknown key"),
        ("logs: {dir: /proc/none}\n", 1, "can't create the run directory in /proc/none"),
        ("nodes: [a]\nlauncher: {command: [no-ssh, '{host}']}\n", 1, "can't start no-ssh: No such file"),
    ):
        bad = run_one(tmp_path, "pass", keys, "--json")
        document = json.loads(bad.stdout)
        assert document.keys() == json.loads(good.stdout).keys()
        assert (bad.returncode, document["exit_status"]) == (status, status)
        assert words in document["cause"]["text"]
        assert words in bad.stderr
    assert len([*(tmp_path / "runs").iterdir()]) == 1


def test_tables_do_not_fold_on_a_narrow_terminal(tmp_path: Path) -> None:
    job = write_job(tmp_path, "pass", "nodes: 2\nprocs_per_node: 2\ngpus_per_node: 0\n")
    shown = on_a_terminal("dry-run", str(job), COLUMNS="40")[1].decode().replace("\r", "").splitlines()
    assert len(shown) == 7
    assert max(map(len, shown[1:])) <= 40


@pytest.mark.parametrize("words", [["-m", "show"], ["--set", "script=show.py"], ["show.py"]])
def test_words_after_the_dashes_are_arguments_of_any_program(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "show.py").write_text("import sys; print(sys.argv[1:])")
    done = distlaunch("run", "-q", *words, "-n", "1", "--", "a", "--b", cwd=tmp_path)
    assert done.stdout == "[node0:0] ['a', '--b']\n", done.stderr


def test_mentions_that_ranks_ran_as_independent_copies(tmp_path: Path) -> None:
    """As a script for one GPU does."""
    said = "no rank was seen to join the rendezvous, so 2 independent copies of the script may have run; to"
    for keys, told in (("", True), ("rendezvous: none\n", False)):
        done = distlaunch("run", str(write_job(tmp_path, "pass", TWO + keys)), status=0)
        assert (said in done.stderr) == told


def test_simulates_no_nodes_of_a_schedulers_job_unless_told_to(tmp_path: Path) -> None:
    job = str(write_job(tmp_path, "print('here')", f"{TWO}nodes: 2\nslurm: {{time: 1h}}\n"))
    submits = f"`distlaunch submit {job}` submits it to Slurm; to simulate"
    told = f"nodes: not in an allocation (no variables of Slurm are set): {submits}"
    assert told in distlaunch("run", job, status=2).stderr
    assert distlaunch("run", job, "--set", "launcher=local", status=0).stdout.count("here") == 4
