"""The quick parser of common `run` command lines, and its agreement with Typer."""

import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest

from distlaunch.api import Job
from distlaunch.cli.app import run
from distlaunch.cli.job_file import Typed, load_job
from distlaunch.cli.run import FLAGS, SET, RunOptions, plain_options
from distlaunch.errors import DistlaunchError
from distlaunch.job.spec import Invocation
from distlaunch.transports.ssh import Ssh

USUAL = [
    ("job.yaml", RunOptions("job.yaml")),
    ("-", RunOptions("-")),
    ("-q job.yaml --json", RunOptions("job.yaml", quiet=True, as_json=True)),
    ("job.yaml --set a=-1 --set b=c=d", RunOptions("job.yaml", overrides=("a=-1", "b=c=d"))),
    ("job.yaml -- -q --set x", RunOptions("job.yaml", args=("-q", "--set", "x"))),
    ("-d --view job.yaml", RunOptions("job.yaml", detach=True, view=True)),
    ("--fold job.yaml --set a=1", RunOptions("job.yaml", overrides=("a=1", "logs.fold=true"))),
]


@pytest.mark.parametrize(("line", "options"), USUAL)
def test_reads_usual_command_lines(line: str, options: RunOptions) -> None:
    assert plain_options(line.split()) == options


UNUSUAL = ["", "a b", "job.yaml lr=1", "--help", "job.yaml --set", "job.yaml --set x", "-dq j", "j --on h"]


@pytest.mark.parametrize("line", UNUSUAL)
def test_leaves_unusual_command_lines_to_typer(line: str) -> None:
    assert plain_options(line.split()) is None


def test_every_option_is_the_same_for_both() -> None:
    declared: dict[str, str] = {}
    for name, parameter in inspect.signature(run).parameters.items():
        for each in getattr(parameter.annotation, "__metadata__", ()):
            words = (getattr(each, "default", None), *(getattr(each, "param_decls", None) or ()))
            declared |= {word: name for word in words if str(word).startswith("-")}
    known = {**FLAGS, SET: "overrides"}
    assert known.items() <= declared.items()
    assert {*declared.values()} - {*known.values()} == {"on", "ranks", "hosts", "module", "save"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


ON_HOSTS = "name: t\nscript: t.py\nnodes: [a, me@b1, me@b2]"


SAME = [
    ("sub/t.py", Typed(ranks=4), "name: t\nscript: sub/t.py\nprocs_per_node: 4"),
    (None, Typed("pkg.t"), "name: pkg.t\nmodule: pkg.t"),
    ("t.py", Typed(hosts="a,me@b[1-2]", ranks=6), f"{ON_HOSTS}\nprocs_per_node: 2"),
]


@pytest.mark.parametrize(("path", "typed", "text"), SAME)
def test_a_line_is_the_same_as_a_job_file(here: Path, path: str | None, typed: Typed, text: str) -> None:
    (here / "job.yaml").write_text(f"{text}\nargs: [--lr, '1']\ntimeouts: {{job: 1h}}")
    paths: dict[str, Any] = {"source": "", "places": {}, "invocation": Invocation()}
    file = load_job("job.yaml")._replace(**paths)
    assert load_job(path, ["timeouts.job=1h"], ["--lr", "1"], typed)._replace(**paths) == file
    load_job(path, ["timeouts.job=1h"], ["--lr", "1"], typed._replace(save="saved.yaml"))
    assert load_job("saved.yaml")._replace(**paths) == file


def test_a_saved_job_keeps_the_spelling_of_arguments_and_variables(here: Path) -> None:
    words = "args: [yes, 0.10, 007, 12:30, 1_000, 'no']\nenv: {DEBUG: on, V: 1.20, N: -.inf}"
    (here / "job.yaml").write_text(f"script: t.py\nnodes: 2\n{words}")
    given = load_job("job.yaml", ["args[5]=off"], ["--x"], Typed(save="saved.yaml"))
    saved = load_job("saved.yaml")
    assert (saved.program, len(saved.nodes)) == (given.program, 2)


def test_a_piped_job_is_saved_in_the_current_directory(here: Path) -> None:
    read, write = os.pipe()
    os.write(write, b"script: t.py")
    os.close(write)
    load_job(f"/dev/fd/{read}", (), (), Typed(save="saved.yaml"))
    os.close(read)
    assert load_job("saved.yaml").program.words == ("t.py",)


def test_a_module_in_python_overrides_the_job_files(here: Path) -> None:
    (here / "job.yaml").write_text("module: old")
    assert Job.load("job.yaml", module="new").spec.program.words == ("new",)


REFUSED = [
    (Typed(ranks=3), "nodes=2", "-n 3: the job would have 2 ranks on 2 nodes (hosts without"),
    (Typed(ranks=2), "nodes=[{host: a, procs: 3}]", "-n 2: the job would have 3 ranks on 1 node"),
    (Typed(hosts="a,b"), "nodes=1", "-H and --set nodes both set the nodes"),
    (Typed(ranks=2), "procs_per_node=3", "-n and --set procs_per_node both set the ranks"),
    (Typed(save="/job.yaml"), "nodes=1", "--save /job.yaml: save the job in "),
    (Typed(save="t.py"), "nodes=1", "--save t.py: File exists"),
    (Typed(hosts="-o"), "name=x", "-H: a host name can't begin with a dash"),
    (Typed(hosts="a,a"), "name=x", "-H: nodes[1]: a is listed twice"),
    (Typed(hosts="a:22"), "name=x", "for an SSH port, use ssh_config or nodes: [{host: a, port: 22}]"),
    (Typed(hosts="a:2,b:4", ranks=8), "name=x", "-n 8: the job would have 6 ranks on 2 nodes (the sum"),
]


@pytest.mark.parametrize(("typed", "setting", "words"), REFUSED)
def test_refuses_what_no_job_file_can_express(here: Path, typed: Typed, setting: str, words: str) -> None:
    (here / "t.py").touch()
    with pytest.raises(DistlaunchError, match=re.escape(words)):
        load_job("t.py", [setting], (), typed)


def test_a_number_of_ranks_may_be_what_the_hostfile_adds_up_to(here: Path) -> None:
    (here / "t.py").touch()
    (here / "hf").write_text("host1 slots=2\nhost2\nhost3:3\n")
    assert [node.procs for node in load_job("t.py", ["hostfile=hf"], (), Typed(ranks=6)).nodes] == [2, 1, 3]


def test_a_host_on_the_command_line_keeps_its_settings_in_the_job_file(here: Path) -> None:
    nodes = "[{host: 'me@gpu[1-2]', address: 10.0.0.1, env: {A: 1.0}, procs: 8}, other]"
    (here / "job.yaml").write_text(f"script: t.py\nnodes: {nodes}\nprocs_per_node: 1\n")
    first, second = load_job("job.yaml", (), (), Typed(hosts="new,gpu2:4")).nodes
    assert (first.label, first.address, first.procs) == ("new", None, 1)
    assert (second.label, second.address, second.procs) == ("gpu2", "10.0.0.1", 4)
    assert (second.env["A"].text, second.reach) == ("1.0", Ssh("gpu2", "me"))
