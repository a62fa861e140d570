"""Overrides of a job file on the command line: --set, extra arguments, and their mistakes."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from distlaunch.errors import DistlaunchError, UsageError
from distlaunch.job.spec import EnvValue, Limits, Restarts
from distlaunch.transports.ssh import Ssh
from tests.unit.samples import Load, Problems, found_at


@pytest.mark.parametrize(
    ("base", "override", "path", "expected"),
    [
        ("backend: nccl", "backend=gloo", "backend", "gloo"),
        ("timeouts: {stop: 3s}", "timeouts.job=1h", "limits", Limits(30, 600, 3, 3600)),
        ("", "args=[a, 'b c']", "program.args", ("a", "b c")),
        ("args: [a, b]", "args[1]=c", "program.args", ("a", "c")),
        ("nodes: [{host: a, gpus: 1}]", "nodes[0].gpus=4", "nodes.0.gpus", 4),
        ("", "env.A=b=c", "program.env", {"A": EnvValue("b=c")}),
        ("", "env.A=", "program.env", {"A": EnvValue("")}),
        ("", "env.A=#b", "program.env", {"A": EnvValue("#b")}),
        ("", "env.A=b # c", "program.env", {"A": EnvValue("b # c")}),
        ("", "env.A='b' # c", "program.env", {"A": EnvValue("b")}),
        ("args: [a, b]", "args[1]=", "program.args", ("a", "")),
        ("nodes: [a]", "nodes[0].procs=4", "nodes.0.procs", 4),
        ("nodes: ['a[1-2]']", "nodes[0].procs=4", "nodes.1.procs", 4),
        ("nodes: [a]\nspares: [b]", "spares[0].gpus=1", "pool.1.gpus", 1),
        ("restarts: 3", "restarts.window=1m", "restarts", Restarts(3, 1, 60)),
    ],
)
def test_set_overrides_a_key(load: Load, base: str, override: str, path: str, expected: Any) -> None:
    assert found_at(load(f"script: x\n{base}", override), path) == expected


ETCD = "rendezvous: {backend: etcd-v2, endpoint: 'e:1', conf: {a: b}}"


@pytest.mark.parametrize(
    ("base", "overrides", "path", "expected"),
    [
        ("script: x", ("script=null", "module=m"), "program.kind", "module"),
        ("script: x", ("script=~", "command=[ls]"), "program.words", ("ls",)),
        ("script: x\nnodes: 3", ("nodes=null", "hostfile=hosts"), "nodes.0.label", "from-hostfile"),
        ("script: x\nnodes: [a]", ("nodes=null",), "nodes.0.label", "node0"),
        ("script: x\ntimeouts: {join: 5s}", ("timeouts.join=null",), "names_join_limit", False),
        ("script: x\nrestarts: 3", ("restarts.max=null",), "restarts.most", 0),
        ("script: x\nnodes: [{host: a, procs: 3}]", ("nodes[0].procs=null",), "nodes.0.procs", None),
        ("script: x\nenv: {A: b}", ("env=null",), "program.env", {}),
        ("script: x\nargs: [a]", ("args=null",), "program.args", ("more",)),
        ("script: x", ("name=null",), "name", "job"),
        ("script: x", ("script=null", "script=y"), "program.words", ("y",)),
        ("script: x\nenv: {A: b, C: d}", ("env.A=null",), "program.env", {"C": EnvValue("d")}),
        ("script: x\nenv: {A: null}", ("env.A=null",), "program.env", {}),
        ("script: x", ("env.A=b", "env.A=null"), "program.env", {}),
        ("script: x\nnodes: [{host: a, env: {A: b}}]", ("nodes[0].env.A=null",), "nodes.0.env", {}),
        ("script: x\nnodes: [a]", ("launcher.command=null",), "nodes.0.reach", Ssh("a")),
        ("script: x\nmetrics: {file: m.prom}", ("metrics.file=null",), "metrics", None),
        (f"script: x\n{ETCD}", ("rendezvous.conf.a=null",), "rendezvous.etcd.conf", {}),
        ("", ("command=[ls]",), "program.words", ("ls",)),
    ],
)
def test_null_removes_a_key(
    load: Load, tmp_path: Path, base: str, overrides: tuple[str, ...], path: str, expected: Any
) -> None:
    (tmp_path / "hosts").write_text("from-hostfile\n")
    assert found_at(load(base, *overrides, extra=("more",)), path) == expected


def test_null_takes_the_callers_variable_as_a_secret(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "s3cret")
    jobs = (["env: {TOKEN: null}"], ["", "env.TOKEN=null"], ["env: {TOKEN: a}", "env={TOKEN: null}"])
    for text, *overrides in jobs:
        secret = {"TOKEN": EnvValue("s3cret", inherited=True)}
        assert load(f"script: x\n{text}", *overrides).program.env == secret


@pytest.mark.parametrize(
    "override", ["nodes.0.procs=3", "nodes[0].host=a", "spares[0]=a", "logs.console[0]=1"]
)
@pytest.mark.parametrize("base", ["script: x", "script: x\nnodes: 2"])
def test_an_item_of_a_missing_list_suggests_the_list(load: Load, base: str, override: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(base, override)
    key = re.split(r"\[|\.0", override)[0]
    assert f"{override}: {key} is not a list in the job file" in str(caught.value)
    assert str(caught.value).endswith(f"set the whole list: --set {shlex.quote(f'{key}=[…]')}")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("python ddp.py --epochs 3", "write script: ddp.py and args: [--epochs, 3]"),
        ("python3 a/ddp.py", "write script: a/ddp.py"),
        ("python3.12 ddp.py a", "write script: ddp.py and args: [a] and python: python3.12"),
        ("/v/bin/python ddp.py", "write script: ddp.py and python: /v/bin/python"),
        ("python -m a.b c", "write module: a.b and args: [c]"),
        ("python -u ddp.py", "write command: [python, -u, ddp.py]"),
        ("bash ddp.sh a", "write command: [bash, ddp.sh, a]"),
        ("bash a.sh; b", 'write command: [sh, -c, "bash a.sh; b"]'),
        ("python ddp.py > log", 'write command: [sh, -c, "python ddp.py > log"]'),
    ],
)
def test_suggests_keys_for_a_command_in_script(load: Load, problems: Problems, text: str, hint: str) -> None:
    assert problems(f"script: {text}") == [f"job.yaml:1:9: script: {hint}"]
    load(hint.removeprefix("write ").replace(" and ", "\n"))


def test_suggests_an_import_of_a_torchrun_command_and_nothing_for_blanks(
    load: Load, problems: Problems
) -> None:
    advice = "`distlaunch import torchrun 'torchrun a.py'` converts it to a job file"
    assert problems("script: torchrun a.py")[0].endswith(f"is a torchrun command, not a script: {advice}")
    assert load("script: my python script.py").program.words == ("my python script.py",)


def test_refuses_null_for_a_required_key(problems: Problems) -> None:
    nodes, container = "nodes: [{host: a}, b]", "container: {image: i, env: {A: b}}"
    assert problems(f"script: x\n{nodes}", "nodes[0].host=null")[0].endswith("nodes[0]: host is missing")
    told = "container: image is missing"
    assert problems(f"script: x\n{container}", "container.image=null")[0].endswith(told)


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("nodes==2", "--set nodes=2"),
        ("nodes=a,b", "--set 'nodes=[a, b]'"),
        ("nodes=gpu[1-2]", """--set 'nodes=["gpu[1-2]"]'"""),
        ("nodes=[gpu[1-2]]", """--set 'nodes=["gpu[1-2]"]'"""),
        ("nodes=[a, b:22]", "--set 'nodes=[a, {host: b, port: 22}]'"),
        ("nodes=[17, 7x, 7]", """--set 'nodes=["17", 7x, 7]'"""),
        ("args=--lr 0.1", "--set 'args=[--lr, 0.1]'"),
        ("args=a,b", "--set 'args=[a, b]'"),
        ("args=[*.txt]", """--set 'args=["*.txt"]'"""),
        ("args=[--t={x}]", """--set 'args=["--t={x}"]'"""),
        ("args=[{rank}]", """--set 'args=["{rank}"]'"""),
        ("script=x.py --lr 0.1", "--set script=x.py --set 'args=[--lr, 0.1]'"),
        ("name=7", """--set 'name="7"'"""),
        ("name=@x", """--set 'name="@x"'"""),
        ("name=it's: x", """--set 'name="it'"'"'s: x"'"""),
        ("env.A=*x", """--set 'env.A="*x"'"""),
        ("env={A:1}", "--set 'env={A: 1}'"),
        ("ssh.options=A=b", "--set 'ssh.options=[A=b]'"),
        ("nodes={a: , b: }", "--set 'nodes=[{host: a}, {host: b}]'"),
        ("script=python a.py b", "--set script=a.py --set 'args=[b]'"),
        ("script=python -m a.b", "--set script=null --set module=a.b"),
    ],
)
def test_hints_for_set_can_be_pasted(load: Load, problems: Problems, override: str, hint: str) -> None:
    problem = problems("script: x", override)[0]
    assert problem.endswith(hint)
    if override.startswith("nodes=[17"):
        return  # the next number is told next
    if override.startswith("args=[--t="):
        hint = hint.replace("{x}", "{rank}")  # that this one is no placeholder is told next
    words = shlex.split(hint)
    load("script: x", *(word for word in words if word != "--set"))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("backend", "--set backend: expected key=value"),
        ("=x", "--set =x: expected key=value"),
        ("args[2]=x", r"--set args\[2\]=x: index 2 is out of range: the list has 1 item"),
        ("args[²]=x", "--set args.²"),
        ("args.a=x", "--set args.a=x: it is a list here, which has no key a; choose an item, as in"),
        ("script.a=x", '--set script.a=x: "x" has no key a; replace the whole value'),
        ("backend=smoke", '--set backend: expected "auto", "nccl"'),
        ("nodes=0", "--set nodes: expected an integer from 1 to 4096"),
        ("bakend=gloo", "--set bakend: unknown key; did you mean backend"),
        ("bakend=null", "--set bakend: unknown key; did you mean backend"),
        ("args=[a", r"--set args: this \[ is not closed"),
        ("env.A=*x", "--set env.A: aliases"),
        ("name=\udcff", "--set name"),
        pytest.param("a." * 3000 + "b=1", "--set a.a.a", id="too deep"),
    ],
)
def test_a_bad_override_is_explained(load: Load, override: str, words: str) -> None:
    with pytest.raises(DistlaunchError, match=words):
        load("script: x\nargs: [a]", override)


def test_extra_arguments_are_appended_as_they_are(load: Load) -> None:
    odd = ("--lr", "0.1", "yes", "010", "[x", "*y", "")
    assert load("script: x", extra=odd).program.args == odd
    nodes = "nodes: [{host: a, args: []}, {host: b, args: [x]}, c]\nspares: [{host: d, args: [y]}]"
    spec = load(f"script: x\nargs: [all]\n{nodes}", extra=odd)
    each = [spec.program_of(node).args for node in spec.pool]
    assert each == [odd, ("x", *odd), ("all", *odd), ("y", *odd)]


def test_extra_arguments_do_not_hide_a_mistake_in_args(problems: Problems) -> None:
    (problem,) = problems("script: x\nargs: --epochs 10", extra=("--lr", "1"))
    assert problem.startswith("job.yaml:2:7: args: expected a list")
