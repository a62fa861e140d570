"""The Python API: two jobs at once, their logs and results, and nothing that is left or changed."""

import asyncio
import functools
import inspect
import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import distlaunch as dl
from tests.harness import ROOT, completed, holders_of, kill, wait_gone

WAITS = """
import os, signal, sys
print("here", os.environ["RANK"], flush=True)
print("to stderr", file=sys.stderr, flush=True)
signal.pause()
"""
ENDS = 'import os; print("rank", os.environ["RANK"], os.environ["COLOR"])'


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "waits.py").write_text(WAITS)
    (tmp_path / "ends.py").write_text(ENDS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def job(script: str, **keys: Any) -> dl.Job:
    return dl.Job(script, nodes=2, gpus_per_node=0, **keys)


def test_two_jobs_at_once_and_the_root_cause_of_one(directory: Path) -> None:
    before = {signum: signal.getsignal(signum) for signum in signal.valid_signals()}
    with job("waits.py", name="first").start() as first, job("waits.py", name="second").start() as second:
        assert {first.state, second.state} == {"RUNNING"}
        assert {first.id, second.id} <= {run.id for run in dl.list_runs()}
        lines = first.logs(follow=True)
        assert {line.text for line in itertools.islice(lines, 4)} >= {"here 0", "here 1"}
        pids = holders_of(f"DISTLAUNCH_RUN_ID={second.id}")
        (pid,) = [pid for pid in pids if b"RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()]
        kill(pid, signal.SIGKILL)
        result = second.wait(timeout=30)
        assert (result.state, result.exit_status, result.statuses[1]) == ("FAILED", 137, -9)
        cause = result.root_cause
        assert cause and (cause.rank, cause.node, second.why().rank) == (1, "node1", 1)
        assert not first.over
    assert first.result().state == "CANCELLED"
    assert {signum: signal.getsignal(signum) for signum in signal.valid_signals()} == before


def test_a_result_and_its_errors(directory: Path) -> None:
    with job("ends.py", env={"COLOR": "blue"}, procs_per_node=2).start() as run:
        result = run.wait().check()
    assert (result.ok, result.attempts, result.statuses) == (True, 1, dict.fromkeys(range(4), 0))
    assert sorted(line.text for line in run.logs()) == [f"rank {rank} blue" for rank in range(4)]
    assert [line.text for line in run.logs(rank=3)] == ["rank 3 blue"]
    assert dl.Run.attach(run.id).result() == result
    assert run.report("run.html") == (directory / "run.html").read_text()
    failed = dl.Job("ends.py", gpus_per_node=0).run()
    with pytest.raises(dl.RunError, match="rank 0") as caught:
        failed.check()
    cause = caught.value.root_cause
    assert cause and cause.kind == "exception" and "KeyError: 'COLOR'" in cause.last_output


def test_mistakes_are_known_before_anything_starts(directory: Path) -> None:
    assert dl.Job(directory / "ends.py", gpus_per_node=0).plan().ranks == ((0, "node0", 0),)
    with pytest.raises(dl.JobError, match="did you mean nodes"):
        dl.Job("ends.py", nodez=3)
    for wrong in ({"script": 3}, {"script": "a", "nodes": {"a"}}, {"script": "a", "env": object()}):
        with pytest.raises(dl.DistlaunchError):
            dl.Job(**wrong)
    (directory / "job.yaml").write_text("script: ends.py\nnodes: 0\n")
    with pytest.raises(dl.JobError, match=r"job\.yaml:2:8"):
        dl.Job.load("job.yaml")
    missing = dl.Job.load("job.yaml", nodes=1, gpus_per_node=0, script="missing.py").run()
    assert (missing.state, missing.exit_status) == ("FAILED", 127)
    refused: dict[str, dict[str, Any]] = {"an allocation": {"slurm": {}}, "no stdin": {"stdin": "rank 0"}}
    for words, keys in refused.items():
        with pytest.raises(dl.DistlaunchError, match=words):
            job("ends.py", **keys).run()
    with pytest.raises(dl.UsageError, match="env: can't be written to a job file: b'x' has the type bytes"):
        dl.Job("train.py", env={"A": b"x"})
    with pytest.raises(dl.DistlaunchError, match="/proc"):
        dl.Job("ends.py", gpus_per_node=0, logs={"dir": "/proc"}).start()
    with pytest.raises(dl.DistlaunchError, match="no run matches"):
        dl.Run.attach("nothing-like-it")


def test_a_current_directory_that_is_gone_is_an_error_of_ours(directory: Path) -> None:
    (directory / "job.yaml").write_text("script: ends.py\n")
    (gone := directory / "gone").mkdir()
    os.chdir(gone)
    gone.rmdir()
    wanted: list[Callable[[], object]] = [
        lambda: dl.Job(directory / "ends.py"),
        lambda: dl.Job.load(directory / "job.yaml"),
        lambda: dl.call("math:sqrt", 4),
        lambda: dl.Run.attach(str(directory)),
        dl.list_runs,
    ]
    for each in wanted:
        with pytest.raises(dl.DistlaunchError, match="the current directory no longer exists"):
            each()


@pytest.mark.parametrize("wrong", ["--lr 0.1", None, 5, {"a": 1}, ["a", None], [["a"]], [{"a": 1}]])
def test_args_must_be_a_list_of_words_as_in_a_job_file(directory: Path, wrong: Any) -> None:
    with pytest.raises(dl.JobError, match=r"^Job: args(\[\d\])?: expected a (list|string), got "):
        dl.Job("train.py", args=wrong)
    (directory / "job.yaml").write_text("script: train.py\nargs: [first]\n")
    with pytest.raises(dl.JobError, match="expected a "):
        dl.Job.load("job.yaml", args=wrong)


def test_args_can_be_paths_and_numbers(directory: Path) -> None:
    with pytest.raises(dl.JobError, match=r'got "--lr 0\.1"; write args: \[--lr, 0\.1\]'):
        dl.Job("train.py", args="--lr 0.1")
    for wrong in (b"ab", [b"ab"]):
        with pytest.raises(
            dl.UsageError, match="args: can't be written to a job file: b'ab' has the type bytes"
        ):
            dl.Job("train.py", args=wrong)
    words = ("--out", Path("a/b"), 3, 0.1, Fraction(1, 3))
    assert dl.Job("train.py", args=words).spec.program.args == ("--out", "a/b", "3", "0.1", "1/3")


def test_the_plan(directory: Path) -> None:
    plan = job("ends.py", procs_per_node=2, env={"COLOR": "red", "ODD": "\N{ROCKET}\x7f\n"}).plan()
    assert plan.ranks == ((0, "node0", 0), (1, "node0", 1), (2, "node1", 0), (3, "node1", 1))
    own = {"COLOR": "red", "ODD": "\N{ROCKET}\x7f\n"}
    assert {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", **own}.items() <= plan.env(3).items()
    with pytest.raises(IndexError):
        plan.env(4)
    assert "<td>node1:1</td>" in plan._repr_html_()


def test_awaiting_and_iterating(directory: Path) -> None:
    async def follow(color: str) -> tuple[list[str], str]:
        run = job("ends.py", env={"COLOR": color}).start()
        lines = [line.text async for line in run.logs(follow=True)]
        return sorted(lines), (await run).state

    async def both() -> list[tuple[list[str], str]]:
        return list(await asyncio.gather(follow("red"), follow("blue")))

    said = ([f"rank {rank} {color}" for rank in range(2)] for color in ("red", "blue"))
    assert asyncio.run(both()) == [(lines, "SUCCEEDED") for lines in said]


def test_works_in_any_thread(directory: Path) -> None:
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(job("ends.py", env={"COLOR": "red"}).run).result(60).state == "SUCCEEDED"


PROGRAM = """
import os, sys
import distlaunch as dl
run = dl.Job("waits.py", gpus_per_node=0).start()
if sys.argv[1] == "detach":
    run.detach()
print(run.id, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", ["", "detach"])
def test_a_run_ends_with_its_program_unless_it_was_detached(directory: Path, how: str) -> None:
    done = completed([sys.executable, "-c", PROGRAM, how], env={**os.environ, "PYTHONPATH": str(ROOT)})
    run = dl.Run.attach(done.stdout.strip())
    if how:
        assert run.state == "RUNNING"
        run.stop()
    assert run.wait(timeout=60).state == "CANCELLED"
    wait_gone(holders_of(f"DISTLAUNCH_RUN_ID={run.id}"), 10.0)


@pytest.mark.parametrize("closed", ["0", "1", "2", "012"])
def test_a_program_need_not_have_the_standard_streams(directory: Path, closed: str) -> None:
    program = """
import os, sys
for fd in sys.argv[1]:
    os.close(int(fd))
import distlaunch as dl
result = dl.Job("ends.py", gpus_per_node=0, env={"COLOR": "red"}).run()
open("result", "w").write(f"{result.state} {result.why}")
"""
    completed([sys.executable, "-c", program, closed], status=0, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (directory / "result").read_text() == "SUCCEEDED "


def test_a_job_ends_with_its_program_although_a_fork_of_it_lives(directory: Path) -> None:
    program = """
import distlaunch as dl, os, signal
run = dl.Job("waits.py", gpus_per_node=0).start()
fork = os.fork() or signal.pause()
print(run.id, fork, flush=True)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        run_id, fork = process.stdout.readline().split()
        kill(process.pid, signal.SIGKILL)
        try:
            wait_gone(holders_of(f"DISTLAUNCH_RUN_ID={run_id}"), 20.0)
            assert dl.Run.attach(run_id).wait(timeout=20).state == "CANCELLED"
        finally:
            kill(int(fork), signal.SIGKILL)


# Functions


def test_calls_a_function_by_name_or_by_value(directory: Path) -> None:
    own = "import os\ndef main(x, *, y): return int(os.environ['RANK']) * x + y\n"
    (directory / "own.py").write_text(own)
    assert dl.call("own:main", 10, y=1, procs=3, gpus_per_node=0) == [1, 11, 21]

    def local(x: int) -> tuple[str, int]:
        print("printed")
        return os.environ["RANK"], x

    assert dl.call(local, 7, nodes=2, gpus_per_node=0) == [("0", 7), ("1", 7)]
    assert dl.call(functools.partial(local, 7), gpus_per_node=0) == [("0", 7)]
    (directory / "leaves.py").write_text("import os\ndef main(): os.environ['RANK'] == '0' and os._exit(0)\n")
    with pytest.raises(dl.RankError, match=r"rank 0 exited without a result$"):
        dl.call("leaves:main", procs=2, gpus_per_node=0)
    again = "attempt == os.environ['RANK'] and os._exit(1 - int(attempt))"
    main = f"def main(): attempt = os.environ['TORCHELASTIC_RESTART_COUNT']; {again}"
    (directory / "again.py").write_text(f"import os\n{main}\n")
    with pytest.raises(dl.RankError, match=r"rank 1 exited without a result$"):  # in the last attempt
        dl.call("again:main", procs=2, gpus_per_node=0, restarts={"max": 1})
    with pytest.raises(dl.RankError) as caught:
        dl.call("math:sqrt", -1.0, gpus_per_node=0)
    assert caught.value.rank == 0
    assert re.fullmatch(r"(?s)Traceback.*ValueError: math domain error", caught.value.traceback)
    (directory / "odd.py").write_text(
        "class Odd(Exception):\n    def __init__(self, a, b): super().__init__(a)\n"
    )
    (directory / "gives.py").write_text("from odd import Odd\ndef main(): return Odd(1, 2)\n")
    with pytest.raises(dl.RankError, match="the result of rank 0 can't be unpickled: ") as caught:
        dl.call("gives:main", gpus_per_node=0)
    assert caught.value.rank == 0
    with pytest.raises(dl.UsageError, match="pass the path of a file"):
        dl.call("own:main", os.urandom(2 << 20), y=1)
    with pytest.raises(dl.UsageError, match=r"package\.module:name"):
        dl.call("main")
    with pytest.raises(dl.UsageError, match=r"^call\(\) doesn't take procs_per_node: it runs"):
        dl.call("math:sqrt", 1.0, procs_per_node=2)


# Where it is used

CELL = """
import distlaunch as dl
run = dl.Job("ends.py", gpus_per_node=0, env={"COLOR": "red"}).start()
result = run.wait()
assert result.ok and [line.text for line in run.logs()] == ["rank 0 red"]
with dl.Job("waits.py", gpus_per_node=0).start() as other:
    pass
print(other.result().state)
"""


NOTEBOOK = """
import sys, nbclient, nbformat
cell = nbformat.v4.new_code_cell(sys.argv[1])
notebook = nbformat.v4.new_notebook(cells=[cell])
nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
for each in notebook.cells[0].outputs:
    print(each.text if each.output_type == "stream" else each.data["text/html"])
"""


def test_works_in_a_notebook(directory: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = completed([sys.executable, "-c", NOTEBOOK, CELL], cwd=directory, env=env, status=0)
    assert "<td>SUCCEEDED</td>" in done.stdout, "the table of progress"
    assert done.stdout.endswith("CANCELLED\n\n")


# What it costs, and what it promises


def test_importing_it_imports_almost_nothing() -> None:
    code = "import sys; before = set(sys.modules); import distlaunch; print(*set(sys.modules) - before)"
    imported = completed([sys.executable, "-c", code], cwd=ROOT, status=0).stdout.split()
    assert {*imported} <= {"distlaunch", "distlaunch._version"}
    code = "import sys, distlaunch; distlaunch.Job; print(*{'typer', 'rich', 'torch'} & set(sys.modules))"
    assert completed([sys.executable, "-c", code], cwd=ROOT, status=0).stdout == "\n"


def without_types(function: Any) -> str:
    """The parameters of a function and their defaults."""
    whole = inspect.signature(function)
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in whole.parameters.values()]
    words = str(whole.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return re.sub(r"\((self|cls)(, )?", "(", words)


def test_the_documentation_has_every_signature() -> None:
    text = (ROOT / "docs" / "python.md").read_text()
    documented = dict(re.findall(r"(?m)^\| `([\w.]+)(\(.*?\))?` \|", text))
    assert set(dl.__all__) <= {name.partition(".")[0] for name in documented}
    assert documented["Job"] == without_types(dl.Job.__init__).replace("_file=None, ", "")
    for name in dl.__all__:
        thing = getattr(dl, name)
        if inspect.isfunction(thing):
            assert documented[name] == without_types(thing)
        for method, attribute in vars(thing).items() if name in ("Job", "Run", "Plan", "Result") else ():
            function = getattr(attribute, "__func__", attribute)
            if inspect.isfunction(function) and not method.startswith("_"):
                assert documented[f"{name}.{method}"] == without_types(function)
