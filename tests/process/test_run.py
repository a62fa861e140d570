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


def test_ranks_get_the_contract(tmp_path: Path) -> None:
    worker = "import json, os; json.dump(dict(os.environ), open(f'env{os.environ[\"RANK\"]}.json', 'w'))"
    distlaunch("run", str(write_job(tmp_path, worker, f"{FOUR}env: {{WORD: a b}}")), status=0)
    found = [json.loads((tmp_path / f"env{rank}.json").read_text()) for rank in range(4)]
    shared = {"WORLD_SIZE": "4", "ROLE_WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": found[0]["MASTER_PORT"], "WORD": "a b"}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "OMP_NUM_THREADS": "1", "DISTLAUNCH_BACKEND": "gloo"}
    for rank, env in enumerate(found):
        node, local = map(str, divmod(rank, 2))
        own = {"RANK": str(rank), "LOCAL_RANK": local, "NODE_RANK": node, "GROUP_RANK": node}
        assert env.items() >= (shared | own).items()


@pytest.mark.parametrize(("setting", "rank_0"), [("stdin=rank 0", "words"), ("stdin=none", "")])
def test_runs_a_script_without_a_job_file_and_only_rank_0_reads_stdin_if_the_job_says_so(
    tmp_path: Path, setting: str, rank_0: str
) -> None:
    text = "import os, sys; print(os.environ['RANK'], sys.argv[1:], repr(sys.stdin.read()))"
    (tmp_path / "told.py").write_text(text)
    words = ["run", "told.py", "-n", "2", "--set", "gpus_per_node=0", "--set", setting, "--", "-n", "x"]
    done = distlaunch(*words, cwd=tmp_path, input="words")
    told = sorted(line.partition("] ")[2] for line in done.stdout.splitlines())
    assert told == [f"0 ['-n', 'x'] {rank_0!r}", "1 ['-n', 'x'] ''"], done.stderr


@pytest.mark.parametrize("option", ["--view", "-d"])
def test_refuses_a_view_and_a_detached_run_if_a_rank_reads_the_terminal(tmp_path: Path, option: str) -> None:
    status, shown = on_a_terminal("run", option, str(write_job(tmp_path, "", f"{ONE}stdin: rank 0")))
    assert (status, b"`stdin: rank 0` can't be combined with --view, --on" in shown) == (2, True), shown


@pytest.mark.parametrize(
    ("console", "shown"), [("all", {0, 1, 2, 3}), ("rank0", {0}), ("none", set()), ("[0, 3]", {0, 3})]
)
def test_console_shows_the_chosen_ranks(tmp_path: Path, console: str, shown: set[int]) -> None:
    job = write_job(tmp_path, "import os; print('rank', os.environ['RANK'])", FOUR)
    done = distlaunch("run", str(job), "--set", f"logs.console={console}")
    assert {int(line.rsplit(" ", 1)[1]) for line in done.stdout.splitlines()} == shown


TELLS_ARGS = "import sys; print(sys.argv[1:])"
NOSUCH = "nosuch.invalid: "


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["job.yaml"], "distlaunch: 'job.yaml' is not a command; to run it, use `distlaunch run job.yaml`\n"),
        (["worker.py"], "'worker.py' is not a command; to run it, use `distlaunch torchrun worker.py`\n"),
        (["run", "job.yaml", "--lr", "0.1"], "such as --lr, go after `--`\n"),
        (
            ["import", "torchrun", "torchrun", "--nnodes", "2"],
            "╯\ndistlaunch: options of the script or command",
        ),
        (
            ["run", "--nproc-per-node", "2", "t.py"],
            "to set procs_per_node of the job, use --set procs_per_node=…",
        ),
        (
            ["dry-run", "job.yaml", "--max_restarts=2"],
            "to set restarts.max of the job, use --set restarts.max=…",
        ),
        *((words.split(), "╯\n") for words in ("run -n", "run --set", "logs --since", "ps --json=1")),
        (
            ["run", "-H", "a", "b", "worker.py"],
            "argument 'b': -H takes hosts separated by commas, as in -H a,b\n",
        ),
        (["run", "job.yaml", "--set", "nodes", "=", "2"], "'=': write --set KEY=VALUE without spaces\n"),
        (["run", "-"], "distlaunch: standard input:1:1: scirpt: unknown key; did you mean script?"),
        (
            ["submit", "worker.py"],
            "is a script, not a job file: `distlaunch dry-run worker.py --save job.yaml`",
        ),
        (["run"], "distlaunch: specify a job file or a script, as in `distlaunch run train.py -n 4`"),
        (
            ["run", "job.yaml", "-m", "x"],
            "-m x: 'job.yaml' can't be used with -m; to pass it to the module, put it after --",
        ),
        (["run", "job.yaml", "--set", "master_addr=nosuch.invalid"], f"master_addr: {NOSUCH}"),
        (["run", "job.yaml", "--set", "rendezvous.endpoint=nosuch.invalid:29876"], f"endpoint: {NOSUCH}"),
        *(
            ([command, "job.yaml", *more], said)
            for command in ("run", "dry-run")
            for more, said in (
                (["a=1"], "distlaunch: unexpected argument 'a=1': use --set to override a key\n"),
                (["job.yaml"], "put the script's arguments after --\n"),
            )
        ),
        (["check-port", "--ssh-config", "nope", "localhost:29777"], "--ssh-config nope: no such file\n"),
        *(
            (["check-port", port], f"{port}: neither a job file nor host:port; write localhost:29777 for")
            for port in ("29777", ":29777")
        ),
        (["view"], "view works only if stdout is a terminal; use `distlaunch attach`"),
        (["run", "--view", "job.yaml"], "--view works only if stdout is a terminal"),
        (["run", "--view", "--detach", "job.yaml"], "--view can't be combined with --detach or --on"),
        (["run", "--view", "--json", "job.yaml"], "--view can't be combined with --json or --quiet"),
        (["run", "--view", "-q", "job.yaml"], "--view can't be combined with --json or --quiet"),
        (["run", "--json", "-d", "job.yaml"], "--json can't be combined with --detach or --on"),
        (["run", "--json", "--on", "host", "job.yaml"], "--json can't be combined with --detach or --on"),
    ],
)
def test_refuses_a_command_line_and_starts_nothing(tmp_path: Path, words: list[str], said: str) -> None:
    write_job(tmp_path, "print('here')", ONE)
    done = distlaunch(*words, cwd=tmp_path, input="scirpt: x")
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    ("program", "words", "printed"),
    [
        ("script: worker.py\nargs: [a]", ["--", "--lr", "0.1", "-x"], "['a', '--lr', '0.1', '-x']"),
        ("module: pkg.train\nargs: ['{rank}']", [], "module ['0']"),
        ("command: [/bin/echo, rank, '{rank}', of, '{world_size}']", [], "rank 0 of 1"),
        (f"script: python.py\npython: {sys.executable}", [], sys.executable),
    ],
)
def test_ranks_run_the_program(tmp_path: Path, program: str, words: list[str], printed: str) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "train.py").write_text("import sys; print('module', sys.argv[1:])")
    (tmp_path / "worker.py").write_text(TELLS_ARGS)
    (tmp_path / "python.py").write_text("import sys; print(sys.executable)")
    (tmp_path / "job.yaml").write_text(f"{program}\n{ONE}")
    assert distlaunch("run", str(tmp_path / "job.yaml"), *words).stdout == f"[node0:0] {printed}\n"


SCRIPT = "script: worker.py\nworkdir: ~/w\npython: ~/python\nargs: [~/kept]"


@pytest.mark.parametrize(
    ("keys", "printed"),
    [
        (SCRIPT, "['{work}/worker.py', '~/kept'] {work} {work}"),
        ("command: [~/w/tell]", "{here}"),
    ],
    ids=["script", "command"],
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


def test_reads_a_job_from_standard_input(tmp_path: Path) -> None:
    text = write_job(tmp_path, "import os; print(os.getcwd())", ONE).read_text()
    done = {
        name: distlaunch(name, "-", input=text, cwd=tmp_path) for name in ("run", "dry-run", "check-port")
    }
    assert [each.returncode for each in done.values()] == [0, 0, 0]
    assert done["run"].stdout == f"[node0:0] {tmp_path}\n"
    assert [path.name.partition("-")[0] for path in (tmp_path / "runs").iterdir()] == ["job"]
    assert done["dry-run"].stdout.startswith("job: 1 rank on 1 node, gloo\n")


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
def test_prints_in_any_encoding_without_a_traceback(
    tmp_path: Path, arguments: list[str], environment: dict[str, str]
) -> None:
    job = write_job(tmp_path, "print('plain')", "gpus_per_node: 0\nname: jöb…\nargs: [é, ≥]\nenv: {X: é}")
    job = job.rename(tmp_path / "jöb.yaml")
    words = [word.format(job=job) for word in arguments]
    argv = [os.fsencode(word) for word in distlaunch_argv(*words)]
    done = subprocess.run(argv, capture_output=True, env={**os.environ, **environment}, check=False)
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr


def test_reports_a_file_name_that_the_locale_cannot_encode(tmp_path: Path) -> None:
    job = write_job(tmp_path, "", "gpus_per_node: 0\nlogs: {dir: jö}")
    done = distlaunch("run", str(job), env={**os.environ, **NO_UTF8}, status=2)
    assert done.stderr.startswith("distlaunch: this locale's encoding, ascii, can't represent '")


@pytest.mark.parametrize("most", [7, 8, 10, 12])
def test_reports_too_low_a_limit_on_descriptors(tmp_path: Path, most: int) -> None:
    job = write_job(tmp_path, "", "gpus_per_node: 0\nprocs_per_node: 4")
    limited = ["sh", "-c", f'ulimit -n {most}; exec "$@"', "sh", *distlaunch_argv("run", str(job))]
    done = completed(limited)
    assert "Traceback" not in done.stderr
    assert (done.returncode in (1, 126), "`ulimit -n`" in done.stderr) == (True, True), done.stderr


@pytest.mark.parametrize("limit", ["-n 80", "-S -n 64"])
def test_logs_leave_descriptors_for_links(tmp_path: Path, limit: str) -> None:
    """A low soft limit is raised. Under a low hard limit, few of the 64 log files stay open."""
    settings = (
        "gpus_per_node: 0\nnodes: 8\nprocs_per_node: 4\ncommand: [sh, -c, 'echo a; echo b >&2; sleep 1']"
    )
    job = tmp_path / "job.yaml"
    job.write_text(settings)
    limited = ["sh", "-c", f'ulimit {limit}; exec "$@"', "sh", *distlaunch_argv("run", str(job))]
    done = completed(limited, status=0)
    assert done.stdout.count("] a\n") == 32
    assert "finished" in done.stderr


@pytest.mark.parametrize("command", ["run", "check-port", "import"])
def test_dash_h_shows_the_help(command: str) -> None:
    assert distlaunch(command, "-h").stdout == distlaunch(command, "--help").stdout != ""


def test_a_terminal_gets_colored_prefixes_and_no_control_sequences_of_workers(tmp_path: Path) -> None:
    worker = r"print('\x1b]0;title\x07 \x1b[31mred\x1b[0m \x1b[2J \u202e done')"
    job = write_job(tmp_path, worker, ONE)
    _, shown = on_a_terminal("run", "--quiet", str(job))
    _, plain = on_a_terminal("run", "--quiet", str(job), NO_COLOR="1")
    assert shown.startswith(b"\x1b[36m[node0:0] \x1b[0m")
    assert b"\x1b[31mred\x1b[0m" in shown
    assert b"\\x1b]0;title\\x07" in shown
    assert b"\\x1b[2J" in shown
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


FATAL = "FATAL: /data is not mounted"
EXITS = "sys.exit(3)", "os.kill(os.getpid(), 15)", "os.abort()"


@pytest.mark.parametrize(
    ("worker", "lines"),
    [
        (f"print('{FATAL}'); sys.exit(4)", [FATAL]),  # where stderr is silent
        (f"sys.stderr.write('{WARNED}\\n'); sys.exit('boom')", ["boom"]),
        *((f"sys.stderr.write('{WARNED}\\n'); sys.stderr.flush(); {exits}", []) for exits in EXITS),
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
    ("fails", "last", "pointer"),
    [
        ("raise RuntimeError('boom')", "RuntimeError: boom", "its traceback is above, marked [node0:1]"),
        ("sys.exit('boom')", "boom", "its last output is above, marked [node0:1]"),
        ("print('boom'); sys.exit(1)", "boom", "its last output is above, marked [node0:1]"),
    ],
)
def test_the_summary_points_at_last_output_that_others_followed(
    tmp_path: Path, fails: str, last: str, pointer: str
) -> None:
    os.mkfifo(tmp_path / "ready")
    job = write_job(tmp_path, SPEAKS_LATER.format(fails=fails), TWO)
    status, shown = on_a_terminal("run", str(job), NO_COLOR="1")
    lines = shown.decode().splitlines()
    assert status == 1
    assert lines.count(f"[node0:1] {last}") == 1
    assert lines.index("[node0:0] told to end") > lines.index(f"[node0:1] {last}")
    cause = "distlaunch: rank 1 (node0) failed first: exit status 1"
    assert f"{cause}\ndistlaunch:   {pointer}\n" in "\n".join(lines)
    assert f"  | {last}" not in shown.decode()


def test_the_summary_points_at_a_traceback_that_others_interrupted(tmp_path: Path) -> None:
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
    job = write_job(tmp_path, worker, TWO)
    gate = (b"RuntimeError: boom", tmp_path / "shown")
    _, shown = on_a_terminal("run", str(job), gate=gate, NO_COLOR="1")
    assert shown.count(b"RuntimeError: boom") == 1
    assert b"distlaunch:   its traceback is above, marked [node0:1]" in shown


def test_the_summary_repeats_what_has_scrolled_away(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ready")
    worker = SPEAKS_LATER.replace("told to end", "x\\n" * 101).format(fails="sys.exit('boom')")
    job = write_job(tmp_path, worker, TWO)
    _, shown = on_a_terminal("run", str(job), NO_COLOR="1")
    assert b"distlaunch:   | boom" in shown


@pytest.mark.parametrize("shell", ["sh", "bash", "zsh"])
def test_pasted_commands_end_with_the_status_of_the_worker_that_failed(tmp_path: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is missing")
    job = write_job(tmp_path, "import os, sys; sys.exit(7 * int(os.environ['RANK']))", ONE)
    for procs, status in ((1, 0), (2, 7)):
        text = distlaunch("dry-run", str(job), "--set", f"procs_per_node={procs}", "--format", "shell").stdout
        assert subprocess.run([shell, "-c", text], check=False).returncode == status


def test_the_plan_of_a_thousand_nodes_is_whole_in_each_form(tmp_path: Path) -> None:
    job = write_job(tmp_path, "pass", "nodes: ['node[0001-1000]']\ngpus_per_node: 8\nbackend: nccl\n")
    table = distlaunch("dry-run", str(job)).stdout.splitlines()
    assert (table[0], len(table)) == ("job: 8000 ranks on 1000 nodes, nccl", 1003)
    assert table[3].split()[:4] == ["node0001", "0-7", "0-7", "cuda"]
    assert table[-1].split() == ["node1000", "0-7", "7992-7999", "cuda"]
    document = json.loads(distlaunch("dry-run", str(job), "--json").stdout)
    assert document["world_size"] == 8000


def test_a_run_that_cannot_begin_has_a_json_result_with_the_usual_keys(tmp_path: Path) -> None:
    good = run_one(tmp_path, "pass", "", "--json")
    for keys, status, words in (
        ("bogus: 1\n", 2, "bogus: unknown key"),
        ("logs: {dir: /proc/none}\n", 1, "can't create the run directory in /proc/none"),
    ):
        bad = run_one(tmp_path, "pass", keys, "--json")
        document = json.loads(bad.stdout)
        assert document.keys() == json.loads(good.stdout).keys()
        assert (bad.returncode, document["exit_status"]) == (status, status)
        assert words in document["cause"]["text"]
        assert words in bad.stderr


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


def test_a_job_is_saved_where_its_paths_begin(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/job.yaml").write_text("script: t.py\ngpus_per_node: 0\n")
    refused = distlaunch("dry-run", "sub/job.yaml", "--save", "new.yaml", cwd=tmp_path)
    assert f"save the job in {tmp_path}/sub; its paths are relative to" in refused.stderr
    assert distlaunch("dry-run", "sub/job.yaml", "--save", "sub/new.yaml", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(("keys", "told"), [("", True), ("rendezvous: none\n", False)])
def test_mentions_that_ranks_ran_as_independent_copies(keys: str, told: bool, tmp_path: Path) -> None:
    """As a script for one GPU does."""
    done = distlaunch("run", str(write_job(tmp_path, "pass", TWO + keys)), status=0)
    said = (
        "no rank joined the rendezvous, so 2 independent copies of the script ran; to train together, it must"
    )
    assert (said in done.stderr) == told


def test_simulates_no_nodes_of_a_schedulers_job_unless_told_to(tmp_path: Path) -> None:
    job = str(write_job(tmp_path, "print('here')", f"{TWO}nodes: 2\nslurm: {{time: 1h}}\n"))
    done = distlaunch("run", job, status=2)
    assert (
        f"nodes: not in an allocation: `distlaunch submit {job}` submits it to Slurm; to simulate"
        in done.stderr
    )
    assert distlaunch("run", job, "--set", "launcher=local", status=0).stdout.count("here") == 4
