"""Plans as shell commands to paste, run by real shells."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.contract import Rendezvous
from distlaunch.job.spec import (
    NO_ENV,
    Binding,
    Env,
    EnvValue,
    JobSpec,
    Logs,
    NodeSpec,
    Placement,
    Program,
    RendezvousSpec,
)
from distlaunch.plan.placement import Facts, LaunchPlan, make_plan
from distlaunch.plan.shell_text import shell_text, torchrun_text
from distlaunch.plan.workers import workers
from distlaunch.transports.ssh import Ssh
from tests.harness import completed, program
from tests.unit.samples import bounded, process_text

SHELLS = sorted(
    {Path(found).resolve().name for shell in ("sh", "bash", "dash") if (found := shutil.which(shell))}
)
"""The different shells that there are; sh is one of them."""
TELL = "import json,os,sys;os.write(1,json.dumps([sys.argv[1:],dict(os.environ)]).encode()+b'\\n')"
TELLER = (sys.executable, "-I", "-S", "-c", TELL)
"""A worker that prints its arguments and its environment."""
PROGRAM = Program("command", TELLER)
MEETING = Rendezvous("10.0.0.1", 29500, "run-1", "gloo")

# A prefix keeps clear of names that belong to the shell, such as IFS, PWD or bash's readonly UID.
env_names = st.text("ABC_19", max_size=4).map("V_".__add__)
envs = st.dictionaries(env_names, process_text, max_size=4)


def job(
    args: Sequence[str] = (),
    env: Env = NO_ENV,
    program: Program = PROGRAM,
    **changes: Any,
) -> JobSpec:
    program = program._replace(
        workdir=changes.pop("workdir", "/"), args=tuple(args), env=env, python=changes.pop("python", None)
    )
    nodes = tuple(NodeSpec(f"n{i}", Ssh(f"n{i}")) for i in range(changes.pop("count", 1)))
    return JobSpec("job", nodes, program, Logs("/logs"))._replace(**changes)


def plan_of(spec: JobSpec) -> LaunchPlan:
    return make_plan(spec, {i: Facts("python3", 0) for i in range(len(spec.nodes))}, "10.0.0.1")


def text_of(plan: LaunchPlan) -> str:
    return shell_text(plan, {node.node_rank: workers(plan, node, MEETING) for node in plan.nodes})


def run_in(shell: str, text: str, environ: Mapping[str, str] | None = None) -> list[Any]:
    """What the workers told when `shell` ran the block, sorted by rank; nothing may be said on stderr."""
    env = {"PATH": os.environ["PATH"], **(environ or {})}
    ran = completed([shell, "-c", text], env=env, text=False, status=0)
    assert ran.stderr == b""
    told = [json.loads(line) for line in ran.stdout.splitlines()]
    return sorted(told, key=lambda each: int(each[1].get("RANK", 0)))


def make_teller(path: Path) -> None:
    """Make a program that tells its arguments and its environment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    program(path, f"#!{sys.executable} -IS\n{TELL}\n")


def plain(values: Mapping[str, str]) -> dict[str, EnvValue]:
    return {name: EnvValue(value) for name, value in values.items()}


@pytest.mark.parametrize("shell", SHELLS)
@given(args=st.lists(process_text, max_size=8), env=envs)
@bounded(40)
def test_arguments_and_variables_arrive_exactly(shell: str, args: list[str], env: dict[str, str]) -> None:
    plan = plan_of(job(args, plain(env)))
    ((argv, environ),) = run_in(shell, text_of(plan))
    assert argv == list(plan.spec.program.args)
    assert {name: environ[name] for name in env} == env


@pytest.mark.parametrize("shell", SHELLS)
@given(secrets=envs)
@bounded(25)
def test_inherited_values_come_from_the_shell_and_are_never_in_the_text(
    shell: str, secrets: dict[str, str]
) -> None:
    values = {name: f"canary{text}canary" for name, text in secrets.items()}
    plan = plan_of(job(env={name: EnvValue(value, inherited=True) for name, value in values.items()}))
    text = text_of(plan)
    assert "canary" not in text
    assert "canary" not in torchrun_text(plan, 29500)
    ((_, environ),) = run_in(shell, text, values)
    assert {name: environ[name] for name in values} == values


@pytest.mark.parametrize("shell", SHELLS)
def test_a_missing_inherited_variable_stops_the_worker_and_is_named(shell: str) -> None:
    text = text_of(plan_of(job(env={"V_TOKEN": EnvValue("x", inherited=True)})))
    ran = completed([shell, "-c", text], env={})
    assert ran.stdout == ""
    assert "V_TOKEN: not set" in ran.stderr


@pytest.mark.parametrize("shell", SHELLS)
def test_each_worker_of_a_block_gets_its_own_contract_and_the_block_waits_for_all(shell: str) -> None:
    spec = job(["{rank}", "{{rank}}"], rendezvous=RendezvousSpec(id="an 'id'"))
    spec = spec._replace(nodes=(NodeSpec("n0", procs=3),))
    plan = plan_of(spec)
    told = run_in(shell, text_of(plan))
    assert [argv for argv, _ in told] == [["0", "{rank}"], ["1", "{rank}"], ["2", "{rank}"]]
    for (_, environ), worker in zip(told, workers(plan, plan.nodes[0], MEETING), strict=True):
        assert worker.contract.items() <= environ.items()
        assert worker.defaults.items() <= environ.items()


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("of_the_node", "of_the_job", "expected"),
    [
        pytest.param({}, {}, "1", id="the default, as torchrun has it"),
        pytest.param({"OMP_NUM_THREADS": "4"}, {}, "4", id="what the node has wins"),
        pytest.param({"OMP_NUM_THREADS": "4"}, {"OMP_NUM_THREADS": "8"}, "8", id="what the job says wins"),
        pytest.param({"OMP_NUM_THREADS": ""}, {}, "", id="set to nothing is set"),
    ],
)
def test_defaults_hold_only_where_nothing_is_set(
    shell: str, of_the_node: dict[str, str], of_the_job: dict[str, str], expected: str
) -> None:
    spec = job(env=plain(of_the_job))._replace(nodes=(NodeSpec("n0", procs=2),))
    told = run_in(shell, text_of(plan_of(spec)), of_the_node)
    assert [environ["OMP_NUM_THREADS"] for _, environ in told] == [expected, expected]


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("name", ["a b", "it's", "$(id)", "-n", "new\nline", "é"])
def test_a_working_directory_may_have_any_name(shell: str, name: str, tmp_path: Path) -> None:
    directory = tmp_path / name
    directory.mkdir()
    ((_, environ),) = run_in(shell, text_of(plan_of(job(workdir=str(directory)))))
    assert environ["PWD"] == str(directory)


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("text", [shell_text, torchrun_text], ids=["shell", "torchrun"])
@pytest.mark.parametrize("name", ["", "w", "a b", "it's", "$(id)", "-n", "é"])
def test_a_home_is_that_of_the_user_who_pastes(
    shell: str, text: Callable[..., str], name: str, tmp_path: Path
) -> None:
    make_teller(tmp_path / name / "v" / "python")
    program = Program("script", ("t.py",), placed=True)
    home = f"~/{name}".rstrip("/")
    odd = plain({"V_A": "b 'c'"})
    plan = plan_of(job(["~/kept"], odd, program, workdir=home, python=f"{home}/v/python"))
    given = {0: workers(plan, plan.nodes[0], MEETING)} if text is shell_text else 29500
    ((argv, environ),) = run_in(shell, text(plan, given), {"HOME": str(tmp_path)})
    assert (environ["PWD"], environ["V_A"]) == (home.replace("~", str(tmp_path)), "b 'c'")
    assert argv[-2:] == [home.replace("~", str(tmp_path)) + "/t.py", "~/kept"]


def test_every_node_has_a_block_under_its_name() -> None:
    text = text_of(plan_of(job(count=2)))
    assert [line for line in text.splitlines() if line.startswith("#")] == ["# node n0", "# node n1"]
    blocks = text.split("# node n1\n")
    assert [run_in("sh", block)[0][1]["RANK"] for block in blocks] == ["0", "1"]


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("name", ["echo", "test", "exit", "if", "a=b", "it's"])
def test_a_program_may_be_called_like_something_that_the_shell_knows(
    shell: str, name: str, tmp_path: Path
) -> None:
    make_teller(tmp_path / name)
    path = f"{tmp_path}:{os.environ['PATH']}"
    plan = plan_of(job(["a\\nb"], program=Program("command", (name,))))
    assert [argv for argv, _ in run_in(shell, text_of(plan), {"PATH": path})] == [["a\\nb"]]


# torchrun


@pytest.mark.parametrize(
    ("changes", "shell", "torchrun"),
    [
        ({"args": ("--rank={rank}",)}, "", "# torchrun can't fill in {rank}"),
        ({"program": Program("command", ("a.out", "--rank={rank}"))}, "", "# torchrun can't fill in {rank}"),
        (
            {"placement": Placement(binding=Binding("cores"))},
            "# cpu_binding is left out:",
            "# cpu_binding is left out:",
        ),
        ({"placement": Placement(binding=Binding("core-complex"))}, "# numa_binding is left out:", ""),
        ({"args": ("{{rank}}",)}, "", ""),
    ],
    ids=["in the arguments", "in the command", "cores", "NUMA", "a literal brace"],
)
def test_says_in_a_comment_what_it_leaves_out(changes: dict[str, Any], shell: str, torchrun: str) -> None:
    plan = plan_of(job(**changes))
    for text, comment in ((text_of(plan), shell), (torchrun_text(plan, 29500), torchrun)):
        assert text.startswith(comment or "# node ")
        assert "{{rank}}" not in text
    assert (" --numa-binding=core-complex " in torchrun_text(plan, 29500)) == bool(shell and not torchrun)
