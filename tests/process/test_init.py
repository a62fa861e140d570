"""`distlaunch init`: its questions, its flags, and job files that pass `check`."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness import ROOT, Going, descendants_of, distlaunch, distlaunch_argv, line_pipe, wait_gone
from tests.process.test_allocations import HERE, PBS, environment


@pytest.fixture(autouse=True)
def in_any_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@contextmanager
def asked(directory: Path, typed: str, *words: str, command: str = "init") -> Iterator[Going]:
    """`distlaunch init`, or another command, on a terminal with these lines."""
    (directory / "train.py").write_text("import torch\n")
    (directory / "tool.py").touch()
    controller, terminal = os.openpty()
    os.write(controller, typed.encode())
    run = Going(directory, distlaunch_argv(command, *words), cwd=directory, stdin=terminal)
    try:
        yield run
    finally:
        run.kill()
        os.close(controller)
        os.close(terminal)


@pytest.mark.parametrize(("typed", "script"), [("\n\n", "train.py"), ("no.py\ntool\ntool.py\n\n", "tool.py")])
def test_asks_on_a_terminal_for_a_job_that_passes_check(tmp_path: Path, typed: str, script: str) -> None:
    with asked(tmp_path, typed) as run:
        assert run.wait() == 0, run.stderr
    assert "script [train.py]: " in run.stderr
    assert "hosts, separated by commas [this machine]: " in run.stderr
    assert ("no Python script 'no.py' here" in run.stderr) == typed.startswith("no.py")
    assert ("'tool' doesn't end in .py; for another" in run.stderr) == typed.startswith("no.py")
    assert "distlaunch check job.yaml" in run.stdout
    assert f"\nscript: {script}\n" in (tmp_path / "job.yaml").read_text()
    distlaunch("check", "job.yaml", cwd=tmp_path, status=0)


def test_asks_for_gpus_that_it_cannot_count(tmp_path: Path) -> None:
    with asked(tmp_path, "\nno.invalid,nope.invalid:2\nx\n99999999\n8\n") as run:
        assert run.wait() == 1, run.stderr
    assert "no.invalid can't be reached: unknown host; check the name" in run.stderr
    assert "GPUs on each node [counted at each start]: " in run.stderr
    text = (tmp_path / "job.yaml").read_text()
    assert "\nnodes: [no.invalid, {host: nope.invalid, procs: 2}]\n" in text
    assert "\ngpus_per_node: 8\n" in text


@pytest.mark.parametrize(
    ("words", "typed", "asked_for"),
    [("tool.py -n 2", "a b:0\nthis machine\n", (False, 2)), ("-H localhost", "\n", (True, 0))],
)
def test_asks_only_for_what_is_not_given_and_again_after_a_mistake(
    tmp_path: Path, words: str, typed: str, asked_for: tuple[bool, int]
) -> None:
    with asked(tmp_path, typed, *words.split()) as run:
        run.wait()
    assert ("script [" in run.stderr, run.stderr.count("hosts, separated by")) == asked_for
    assert (tmp_path / "job.yaml").exists()


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    with asked(tmp_path, "") as run:
        run.wait_for("script [train.py]: ")
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == -signal.SIGINT  # which ends a shell's loop, too
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "job.yaml").exists()


@pytest.mark.parametrize("command", ["init", "check"])
def test_ctrl_c_ends_the_transport_to_a_node_that_does_not_answer(tmp_path: Path, command: str) -> None:
    # It answers nothing, and is up once a part of the agent has arrived.
    script = f"head -c 50000 >/dev/null; echo up >{tmp_path}/up; exec sleep 1000"
    hangs = f"launcher={{command: [sh, -c, '{script}']}}"
    words = ["train.py", "-H", "x", "--set", hangs]
    with line_pipe(tmp_path / "up") as line, asked(tmp_path, "", *words, command=command) as run:
        assert line() == "up"
        transports = descendants_of(run.process.pid)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == -signal.SIGINT, run.stderr
        assert transports
        wait_gone(transports, 2.0)
    assert not (tmp_path / "job.yaml").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "specify the script, as in `distlaunch init train.py"),
        ("-H a,b", "specify the script, as in"),
        ("no.py", "/no.py: correct the path or, if only the nodes have the script, add -H HOSTS"),
        (
            "tool",
            "tool is not a .py file: to convert a torchrun command, use `distlaunch import torchrun '…'`;",
        ),
        ("job.yaml", "job.yaml is not a script: to write this job file, use -o job.yaml"),
        ("old.yaml", "old.yaml is not a script: to pass it to the script, name the script first and"),
        (
            "-m pkg.train old.yaml",
            "-m pkg.train: 'old.yaml' can't be used with -m; to pass it to the module, put",
        ),
        ("train.py -o old.yaml", "old.yaml already exists; choose another name with -o"),
        ("train.py -o /job.yaml", "-o /job.yaml: save the job in "),
        ("train.py --set node=1", "did you mean nodes?"),
    ],
)
def test_without_a_terminal_names_a_mistake_and_writes_nothing(tmp_path: Path, words: str, told: str) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "old.yaml").write_text("mine")
    done = distlaunch("init", *words.split(), cwd=tmp_path, status=2)
    assert told in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["old.yaml", "train.py"]
    assert (tmp_path / "old.yaml").read_text() == "mine"


def test_the_keys_in_comments_are_valid(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "0,1"}
    distlaunch("init", "train.py", "-n", "2", "--", "{rank}", cwd=tmp_path, status=0, env=env)
    text = (tmp_path / "job.yaml").read_text()
    for line in ("gpus_per_node: 2\n", "procs_per_node: 2\n", 'args: ["{rank}"]\n'):
        assert line in text
    all_set, count = re.subn(r"(?m)^# (\w+: .*  #)", r"\1", text)
    assert count == 4
    (tmp_path / "job.yaml").write_text(all_set)
    planned = distlaunch("dry-run", str(tmp_path / "job.yaml"), status=0)
    assert "4 ranks on 2 nodes" in planned.stdout


def test_inside_an_allocation_the_hosts_are_left_to_the_scheduler(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    env = environment(tmp_path, PBS, f"{HERE}\nhost2\n")
    done = distlaunch("init", "train.py", cwd=tmp_path, status=0, env=env)
    assert "looking at host2\n" in done.stderr
    text = (tmp_path / "job.yaml").read_text()
    assert "# without `nodes`, the job runs on the nodes of PBS job 88.pbs\n" in text
    assert not re.search("^(nodes|gpus_per_node):", text, re.MULTILINE)
