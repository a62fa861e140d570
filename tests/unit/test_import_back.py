"""The way back from an imported job file to the same torchrun flags."""

import os.path
import shlex
from collections.abc import Sequence
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from distlaunch.compat.flags import Flags, parse_flags
from distlaunch.compat.from_torchrun import command_draft
from distlaunch.job.spec import JobSpec
from distlaunch.job.text import fill, literal, placeholder_error
from distlaunch.plan.layout import Facts, make_plan
from distlaunch.plan.shell_text import torchrun_text
from tests.unit.drafts import CPUS, braces
from tests.unit.samples import FOLDER, bounded, process_text, spec_of

arguments = st.lists(process_text | braces, max_size=5)
_scripts = process_text.filter(bool)
_programs = (
    st.tuples(st.just(""), _scripts)
    | st.tuples(st.just("--module"), st.sampled_from(["a", "a.b_c"]))
    | st.tuples(st.just("--no-python"), _scripts.filter(lambda text: not text.startswith("-")))
)
_lines = process_text.filter(lambda text: text and "\n" not in text)
_values = st.fixed_dictionaries(
    {},
    optional={
        "nnodes": st.integers(1, 3).map(str),
        "nproc_per_node": st.integers(1, 9).map(str),
        "max_restarts": st.integers(0, 9),
        "role": _lines,
        "shutdown_timeout": st.integers(0, 99),
        "virtual_local_rank": st.just(True),
        "rdzv_id": _lines,
        "master_addr": st.sampled_from(["gpu-a", "10.0.0.9", "fe80::1"]),
        "master_port": st.integers(1, 65535),
    },
)


def words_of(values: dict[str, Any]) -> list[str]:
    flags = [(f"--{name.replace('_', '-')}", value) for name, value in values.items()]
    return [name if value is True else f"{name}={value}" for name, value in flags]


def back_to_flags(spec: JobSpec) -> Flags:
    """The flags of the last node's line of `dry-run --format torchrun`."""
    plan = make_plan(spec, {i: Facts("python3", 0) for i in range(len(spec.nodes))})
    line = torchrun_text(plan, plan.master_port or 29500).partition(f"# node {spec.nodes[-1].label}\n")[2]
    words = shlex.split(line.rstrip("\n").removesuffix(")"))
    return parse_flags(words[words.index("torchrun") + 1 :], {})


def there(program: str, script: str) -> str:
    """Where the user's command had it, run in FOLDER."""
    path = program == "" or (program == "--no-python" and "/" in script)
    return os.path.normpath(os.path.join(FOLDER, script)) if path else script


@given(values=_values, program=_programs, args=arguments, quoted=st.booleans())
@bounded(400)
def test_a_command_comes_back_from_its_job_file(
    values: dict[str, Any], program: tuple[str, str], args: Sequence[str], quoted: bool
) -> None:
    how, script = program
    words = ["torchrun", *words_of(values), *([how] if how else []), "--", script, *args]
    # In a line, shlex can't tell a quoted operator from one of the shell's, nor a quoted $ or ~.
    plain = not any(set(word) <= set("();<>|&\n") or word == "#" or "\\\n" in word for word in words if word)
    in_line = quoted and plain and not set("$`~") & set("".join(words[: len(words) - len(args)]))
    given = [shlex.join(words)] if in_line else words
    spec = spec_of(command_draft(given, CPUS).text())
    back = back_to_flags(spec)
    nodes = int(values.get("nnodes", "1"))
    # One node without a port needs no endpoint, and torchrun then has none of its address either.
    unheard = {"master_addr"} if nodes == 1 and "master_port" not in values else set()
    expected = {name: value for name, value in values.items() if name not in unheard}
    assert {name: getattr(back, name) for name in expected} == expected
    assert (back.node_rank, back.nnodes) == (nodes - 1, str(nodes))
    assert (back.module, back.no_python) == (how == "--module", how == "--no-python")
    assert (back.script, list(back.args)) == (there(how, script), list(args))


@given(
    env=st.dictionaries(st.text("ABC_19", max_size=4).map("V_".__add__), process_text, max_size=4),
    folder=process_text.filter(bool),
)
@example(env={}, folder="~you/x")
@example(env={"V_A": "{rank} {a}"}, folder="x")
@bounded()
def test_variables_and_paths_survive_the_import(env: dict[str, str], folder: str) -> None:
    words = [*(f"{name}={value}" for name, value in env.items()), "torchrun", f"--log-dir={folder}", "x.py"]
    spec = spec_of(command_draft(words, CPUS).text())
    filled = {
        name: fill(value.text, lambda word: "9", every=False) for name, value in spec.program.env.items()
    }
    assert filled == env
    assert spec.logs.folder == os.path.normpath(os.path.join(FOLDER, folder))
    assert (spec.program.workdir, spec.program.words) == (FOLDER, ("x.py",))


@given(argument=braces, every=st.booleans())
@bounded()
def test_literal_braces_survive_filling(argument: str, every: bool) -> None:
    assert fill(literal(argument, every), lambda word: "9", every) == argument
    assert placeholder_error(literal(argument)) is None
