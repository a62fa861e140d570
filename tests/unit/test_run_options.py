"""The quick parser of common `run` command lines, and its agreement with Typer."""

import inspect

import pytest

from distlaunch.cli.app import run
from distlaunch.cli.run import FLAGS, SET, RunOptions, plain_options


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("job.yaml", RunOptions("job.yaml")),
        ("-", RunOptions("-")),
        ("-q job.yaml --json", RunOptions("job.yaml", quiet=True, as_json=True)),
        ("job.yaml --set a=-1 --set b=c=d", RunOptions("job.yaml", overrides=("a=-1", "b=c=d"))),
        ("job.yaml -- -q --set x", RunOptions("job.yaml", args=("-q", "--set", "x"))),
        ("-d --fold --view job.yaml", RunOptions("job.yaml", detach=True, fold=True, view=True)),
    ],
)
def test_reads_usual_command_lines(line: str, options: RunOptions) -> None:
    assert plain_options(line.split()) == options


@pytest.mark.parametrize(
    "line", ["", "a b", "job.yaml lr=1", "--help", "job.yaml --set", "job.yaml --set x", "-dq j", "j --on h"]
)
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
    assert {*declared.values()} - {*known.values()} == {"on"}  # few use it
