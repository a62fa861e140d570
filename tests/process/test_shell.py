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
from distlaunch.job import spec as specs
from distlaunch.job.spec import EnvValue, JobSpec, Logs, NodeSpec, Program
from distlaunch.plan.placement import Facts, LaunchPlan, make_plan
from distlaunch.plan.shell_text import shell_text, torchrun_text
from distlaunch.plan.workers import workers
from distlaunch.transports.ssh import Ssh
from tests.harness import completed, program
from tests.unit.samples import bounded, process_text

_FOUND = filter(None, map(shutil.which, ("sh", "bash", "dash")))
SHELLS = sorted({Path(found).resolve().name for found in _FOUND})
"""The different shells that there are; sh is one of them."""


@pytest.fixture(scope="module", params=SHELLS)
def shell(request: pytest.FixtureRequest) -> str:
    return str(request.param)


TELL = "import json,os,sys;os.write(1,json.dumps([sys.argv[1:],dict(os.environ)]).encode()+b'\\n')"
PROGRAM = Program("command", (sys.executable, "-I", "-S", "-c", TELL))
"""A worker that prints its arguments and its environment."""
MEETING = Rendezvous("10.0.0.1", 29500, "run-1", "gloo")

# A prefix keeps clear of names that belong to the shell, such as IFS, PWD or bash's readonly UID.
env_names = st.text("ABC_19", max_size=4).map("V_".__add__)
envs = st.dictionaries(env_names, process_text, max_size=4)


def job(
    args: Sequence[str] = (),
    env: Mapping[str, EnvValue] = specs.NO_ENV,
    program: Program = PROGRAM,
    **changes: Any,
) -> JobSpec:
    workdir, python = changes.pop("workdir", "/"), changes.pop("python", None)
    program = program._replace(workdir=workdir, args=tuple(args), env=env, python=python)
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


@given(args=st.lists(process_text, max_size=8), env=envs)
@bounded(40)
def test_arguments_and_variables_arrive_exactly(shell: str, args: list[str], env: dict[str, str]) -> None:
    plan = plan_of(job(args, plain(env)))
    ((argv, environ),) = run_in(shell, text_of(plan))
    assert argv == list(plan.spec.program.args)
    assert env.items() <= environ.items()


@given(secrets=envs)
@bounded(25)
def test_inherited_values_come_from_the_shell_not_the_text(shell: str, secrets: dict[str, str]) -> None:
    values = {name: f"canary{text}canary" for name, text in secrets.items()}
    plan = plan_of(job(env={name: EnvValue(value, inherited=True) for name, value in values.items()}))
    text = text_of(plan)
    assert "canary" not in text
    assert "canary" not in torchrun_text(plan, 29500)
    ((_, environ),) = run_in(shell, text, values)
    assert values.items() <= environ.items()


def test_a_missing_inherited_variable_stops_the_worker_and_is_named(shell: str) -> None:
    text = text_of(plan_of(job(env={"V_TOKEN": EnvValue("x", inherited=True)})))
    ran = completed([shell, "-c", text], env={})
    assert (ran.stdout, "V_TOKEN: not set" in ran.stderr) == ("", True)


def test_each_worker_of_a_block_gets_its_own_contract_and_the_block_waits_for_all(shell: str) -> None:
    spec = job(["{rank}", "{{rank}}"], rendezvous=specs.RendezvousSpec(id="an 'id'"))
    spec = spec._replace(nodes=(NodeSpec("n0", procs=3),))
    plan = plan_of(spec)
    told = run_in(shell, text_of(plan))
    assert [argv for argv, _ in told] == [["0", "{rank}"], ["1", "{rank}"], ["2", "{rank}"]]
    for (_, environ), worker in zip(told, workers(plan, plan.nodes[0], MEETING), strict=True):
        assert worker.contract.items() <= environ.items()
        assert worker.defaults.items() <= environ.items()


@pytest.mark.parametrize(
    ("own", "given", "expected"),
    [(None, None, "1"), ("4", None, "4"), ("4", "8", "8"), ("", None, "")],
    ids=["the default, as torchrun has it", "the node's", "the job's", "set to nothing is set"],
)
def test_defaults_yield_to_what_is_set(shell: str, own: str | None, given: str | None, expected: str) -> None:
    name = "OMP_NUM_THREADS"
    spec = job(env={} if given is None else plain({name: given}))
    plan = plan_of(spec._replace(nodes=(NodeSpec("n0", procs=2),)))
    told = run_in(shell, text_of(plan), {} if own is None else {name: own})
    assert [environ[name] for _, environ in told] == [expected, expected]


@pytest.mark.parametrize("text", [shell_text, torchrun_text], ids=["shell", "torchrun"])
@pytest.mark.parametrize("name", ["", "w", "a b", "it's", "$(id)", "-n", "new\nline", "é"])
def test_a_directory_may_have_any_name_and_a_home_is_that_of_the_user_who_pastes(
    shell: str, text: Callable[..., str], name: str, tmp_path: Path
) -> None:
    make_teller(tmp_path / name / "v" / "python")
    program = Program("script", ("t.py",), placed=True)
    home = f"~/{name}".rstrip("/")
    odd = plain({"V_A": "b 'c'"})
    plan = plan_of(job(["~/kept"], odd, program, workdir=home, python=f"{home}/v/python"))
    given = {0: workers(plan, plan.nodes[0], MEETING)} if text is shell_text else 29500
    ((argv, environ),) = run_in(shell, text(plan, given), {"HOME": str(tmp_path)})
    place = home.replace("~", str(tmp_path))
    assert (environ["PWD"], environ["V_A"], argv[-2:]) == (place, "b 'c'", [f"{place}/t.py", "~/kept"])
    ((_, environ),) = run_in(shell, text_of(plan_of(job(workdir=place))))
    assert environ["PWD"] == place


@pytest.mark.parametrize("name", ["echo", "test", "exit", "if", "a=b", "it's"])
def test_a_program_may_be_called_like_what_the_shell_knows(shell: str, name: str, tmp_path: Path) -> None:
    make_teller(tmp_path / name)
    path = f"{tmp_path}:{os.environ['PATH']}"
    plan = plan_of(job(["a\\nb"], program=Program("command", (name,))))
    assert [argv for argv, _ in run_in(shell, text_of(plan), {"PATH": path})] == [["a\\nb"]]


# torchrun


CANT_FILL, NO_CPUS = "# torchrun can't fill in {rank}", "# cpu_binding is left out:"
CORES, COMPLEX = (specs.Placement(binding=specs.Binding(name)) for name in ("cores", "core-complex"))


@pytest.mark.parametrize(
    ("changes", "shell", "torchrun"),
    [
        ({"args": ("--rank={rank}",)}, "", CANT_FILL),
        ({"program": Program("command", ("a.out", "--rank={rank}"))}, "", CANT_FILL),
        ({"placement": CORES}, NO_CPUS, NO_CPUS),
        ({"placement": COMPLEX}, "# numa_binding is left out:", ""),
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
