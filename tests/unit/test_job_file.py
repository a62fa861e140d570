"""Job files as people write them, right and wrong: what each becomes, and the words for each mistake."""

import json
import os
import re
import shlex
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from distlaunch.errors import DistlaunchError, JobError, UsageError
from distlaunch.job.fields import JOB
from distlaunch.job.reference import reference
from distlaunch.job.spec import Binding, EnvValue, JobSpec, Restarts, Timeouts
from distlaunch.plan.advice import unstarted_advice
from distlaunch.system.job_file import load_job
from distlaunch.transport.local import Local
from distlaunch.transport.ssh import Ssh
from tests.unit.samples import bounded, job_documents

Load = Callable[..., JobSpec]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Loads a job from text (or bytes) that stands in `tmp_path`/job.yaml."""

    def load_text(text: str | bytes, *overrides: str, extra: tuple[str, ...] = ()) -> JobSpec:
        path = tmp_path / "job.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return load_job(str(path), overrides, extra)

    return load_text


@pytest.fixture
def problems(load: Load, tmp_path: Path) -> Callable[..., list[str]]:
    """The problems of a job, one per line, without the file's folder."""

    def refused(text: str | bytes, *overrides: str, extra: tuple[str, ...] = ()) -> list[str]:
        with pytest.raises(JobError) as caught:
            load(text, *overrides, extra=extra)
        return [str(problem).replace(f"{tmp_path}/", "") for problem in caught.value.problems]

    return refused


Problems = Callable[..., list[str]]


# Every key: what is written, where it shows, what it becomes ({here} is the file's folder).
KEYS: dict[str, tuple[str, str, Any]] = {
    "name": ("name: mnist", "name", "mnist"),
    "nodes": ("nodes: 3", "nodes", 3),
    "nodes[].host": ("nodes: [{host: gpu-a}]", "nodes.0.reach", Ssh("gpu-a")),
    "nodes[].gpus": ("nodes: [{host: a, gpus: 4}]", "nodes.0.gpus", 4),
    "nodes[].procs": ("nodes: [{host: a, procs: 2}]", "nodes.0.procs", 2),
    "nodes[].address": ("nodes: [{host: a, address: 10.0.0.2}]", "nodes.0.address", "10.0.0.2"),
    "nodes[].user": ("nodes: [{host: a, user: me}]", "nodes.0.reach", Ssh("a", "me")),
    "nodes[].port": ("nodes: [{host: a, port: 2222}]", "nodes.0.reach", Ssh("a", None, 2222)),
    "nodes[].python": ("nodes: [{host: a, python: /opt/py}]", "nodes.0.python", "/opt/py"),
    "nodes[].workdir": ("nodes: [{host: a, workdir: data}]", "nodes.0.workdir", "{here}/data"),
    "nodes[].env": ("nodes: [{host: a, env: {A: b}}]", "nodes.0.env", {"A": EnvValue("b")}),
    "hostfile": ("hostfile: hosts", "nodes.0.reach", Ssh("from-hostfile")),
    "gpus_per_node": ("gpus_per_node: 8", "nodes.0.gpus", 8),
    "procs_per_node": ("procs_per_node: 6", "nodes.0.procs", 6),
    "numa_binding": ("numa_binding: core-complex", "binding", Binding("core-complex")),
    "cpu_binding": (
        "cpu_binding: [0-3, 4, '5,7']",
        "binding",
        Binding("listed", ("0-3", "4", "5,7")),
    ),
    "backend": ("backend: gloo", "backend", "gloo"),
    "rendezvous.endpoint": ("rendezvous: {endpoint: 'm:29500'}", "master_port", 29500),
    "rendezvous.backend": ("rendezvous: {backend: c10d}", "ranking", "c10d"),
    "rendezvous.conf": (
        "rendezvous: {backend: c10d, conf: {read_timeout: 9}}",
        "rendezvous_conf",
        {"read_timeout": "9"},
    ),
    "rendezvous.id": ("rendezvous: {id: my-job}", "rendezvous_id", "my-job"),
    "master_addr": ("master_addr: 10.0.0.1", "master_host", "10.0.0.1"),
    "master_port": ("master_port: 29501", "master_port", 29501),
    "script": ("script: train.py", "program.words", ("train.py",)),
    "module": ("module: pkg.train", "program.words", ("pkg.train",)),
    "command": ("command: [./a.out, -x, 3]", "program.words", ("./a.out", "-x", "3")),
    "args": ("args: [--epochs, '10', -3]", "args", ("--epochs", "10", "-3")),
    "env": ("env: {NCCL_DEBUG: WARN, N: 1}", "env", {"NCCL_DEBUG": EnvValue("WARN"), "N": EnvValue("1")}),
    "python": ("python: venv/bin/python", "python", "{here}/venv/bin/python"),
    "workdir": ("workdir: sub/..", "workdir", "{here}"),
    "timeouts.connect": ("timeouts: {connect: 5s}", "timeouts.connect_s", 5.0),
    "timeouts.join": ("timeouts: {join: 2m}", "timeouts.join_s", 120.0),
    "timeouts.stop": ("timeouts: {stop: 250ms}", "timeouts.stop_s", 0.25),
    "timeouts.job": ("timeouts: {job: 1.5h}", "timeouts.job_s", 5400.0),
    "timeouts.lease": ("timeouts: {lease: 6s}", "timeouts.lease_s", 6.0),
    "timeouts.rejoin": ("timeouts: {rejoin: 1m}", "timeouts.rejoin_s", 60.0),
    "timeouts.stall": ("timeouts: {stall: 1h}", "timeouts.stall_s", 3600.0),
    "restarts": ("restarts: 3", "restarts.most", 3),
    "restarts.max": ("restarts: {max: 3}", "restarts.most", 3),
    "restarts.backoff": ("restarts: {backoff: 5s}", "restarts.backoff_s", 5.0),
    "restarts.window": ("restarts: {window: 2h}", "restarts.window_s", 7200.0),
    "min_nodes": ("nodes: 3\nmin_nodes: 2", "fewest", 2),
    "spares": ("nodes: [a]\nspares: [z]", "pool.1.reach", Ssh("z")),
    "elastic.grow": ("elastic: {grow: now}", "grow", "now"),
    "role": ("role: trainer", "role", "trainer"),
    "virtual_local_rank": ("virtual_local_rank: true", "one_device", True),
    "on_stall": ("on_stall: stop", "on_stall", "stop"),
    "logs.dir": ("logs: {dir: out}", "logs.folder", "{here}/out"),
    "logs.console": ("logs: {console: [0, 3]}", "logs.console", (0, 3)),
    "ssh.config": (
        "nodes: [a]\nssh: {config: ssh_config}",
        "nodes.0.reach.options.config",
        "{here}/ssh_config",
    ),
    "ssh.options": (
        "nodes: [a]\nssh: {options: [Compression=no]}",
        "nodes.0.reach.options.words",
        ("Compression=no",),
    ),
    "ssh.persist": ("nodes: [a]\nssh: {persist: 10m}", "nodes.0.reach.options.persist_s", 600),
    "launcher": ("nodes: [a]\nlauncher: local", "nodes.0.reach", Local()),
}


def found_at(spec: JobSpec, path: str) -> Any:
    value: Any = spec
    for step in path.split("."):
        value = value[int(step)] if step.isdigit() else attrgetter(step)(value)
    return len(value) if path == "nodes" else value


def in_folder(value: Any, folder: Path) -> Any:
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(in_folder(item, folder) for item in value)
    return value.replace("{here}", str(folder)) if isinstance(value, str) else value


@pytest.mark.parametrize("key", KEYS)
def test_every_key_arrives_in_the_spec(load: Load, tmp_path: Path, key: str) -> None:
    text, path, expected = KEYS[key]
    (tmp_path / "hosts").write_text("from-hostfile\n")
    has_program = key in ("script", "module", "command")
    spec = load(text if has_program else f"{text}\nscript: x.py")
    assert found_at(spec, path) == in_folder(expected, tmp_path)


def test_the_table_above_has_every_key() -> None:
    rows = [key for key, *_ in reference()]
    sections = {key for key in rows if any(other.startswith(f"{key}.") for other in rows)}
    assert set(KEYS) == set(rows) - sections | {"restarts"}


def test_defaults_of_the_smallest_job(load: Load, tmp_path: Path) -> None:
    spec = load("script: train.py")
    assert spec.name == "job"
    assert [node.reach for node in spec.nodes] == [Local()]
    assert spec.backend == "auto"
    assert spec.workdir == str(tmp_path)
    assert spec.logs.folder == f"{tmp_path}/runs"
    assert spec.timeouts == Timeouts(30.0, 600.0, 10.0, None, 30.0, 300.0, 600.0)
    assert (spec.master_host, spec.master_port, spec.python, spec.args, spec.env) == (
        None,
        None,
        None,
        (),
        {},
    )


# Nodes


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        pytest.param("\n  - gpu[03-05]", ["gpu03", "gpu04", "gpu05"], id="range"),
        pytest.param("\n  - b\n  - a\n  - c", ["b", "a", "c"], id="the order of the file is kept"),
        pytest.param("\n  - {host: 'n[1,3]', gpus: 2}\n  - z", ["n1", "n3", "z"], id="range in a mapping"),
        pytest.param("2", ["node0", "node1"], id="number"),
        pytest.param("['fe80::1%eth0', 10.0.0.1]", ["fe80::1%eth0", "10.0.0.1"], id="addresses"),
    ],
)
def test_nodes_are_listed_by_name_range_or_number(load: Load, nodes: str, expected: list[str]) -> None:
    assert [node.label for node in load(f"script: a\nnodes: {nodes}").nodes] == expected


def test_user_at_host_is_split_and_user_wins_over_it(load: Load) -> None:
    spec = load("script: a\nnodes: [me@a, {host: me@b, user: you}]")
    assert [node.reach for node in spec.nodes] == [Ssh("a", "me"), Ssh("b", "you")]


def test_localhost_is_this_machine_unless_ssh_details_are_given(load: Load) -> None:
    assert load("script: a\nnodes: [localhost]").nodes[0].local
    assert not load("script: a\nnodes: [{host: localhost, port: 2222}]").nodes[0].local
    assert not load("script: a\nnodes: [localhost]\nlauncher: ssh").nodes[0].local


def test_what_a_node_says_wins_over_what_the_job_says(load: Load) -> None:
    text = "script: a\ngpus_per_node: 8\nprocs_per_node: 8\nnodes: [a, {host: b, gpus: 0, procs: 1}]"
    assert [(node.gpus, node.procs) for node in load(text).nodes] == [(8, 8), (0, 1)]


def test_the_endpoint_wins_over_master_addr_and_port(load: Load) -> None:
    text = "script: a\nmaster_addr: x\nmaster_port: 1\nrendezvous: {endpoint: 'y:2'}"
    assert (load(text).master_host, load(text).master_port) == ("y", 2)


def test_null_takes_the_callers_variable_and_marks_it_as_secret(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "s3cret")
    assert load("script: a\nenv: {SOME_TOKEN: null}").env == {
        "SOME_TOKEN": EnvValue("s3cret", inherited=True)
    }


# Paths and durations


@pytest.mark.parametrize(
    ("text", "path", "expected"),
    [
        pytest.param("script: a\nworkdir: ../w", "workdir", "{parent}/w", id="up"),
        pytest.param("script: a\nworkdir: /abs/w/.", "workdir", "/abs/w", id="absolute"),
        pytest.param("script: a\nworkdir: ~/w/../v", "workdir", "~/v", id="the node's home"),
        pytest.param("script: a\nworkdir: ~/../v", "workdir", "~/../v", id="beside the node's home"),
        pytest.param("script: a\nworkdir: '~'", "workdir", "~", id="the node's home itself"),
        pytest.param("script: a\nworkdir: ~//w", "workdir", "~/w", id="two slashes"),
        pytest.param("script: a\nworkdir: ./~/w", "workdir", "{here}/~/w", id="a folder called ~"),
        pytest.param(
            "script: a\nnodes: [{host: b, workdir: ~/w}]", "nodes.0.workdir", "~/w", id="a node's home"
        ),
        pytest.param(
            "script: a\nnodes: [{host: b, python: ~/v/py}]", "nodes.0.python", "~/v/py", id="a node's python"
        ),
        pytest.param("script: a\npython: python3.12", "python", "python3.12", id="a bare python is for PATH"),
        pytest.param("script: a\npython: ~/v/python", "python", "~/v/python", id="python at home there"),
        pytest.param("script: a\nlogs: {dir: ~/r}", "logs.folder", "/home/me/r", id="logs are here"),
        pytest.param(
            "script: a\nnodes: [a]\nssh: {config: ~/c}",
            "nodes.0.reach.options.config",
            "/home/me/c",
            id="ssh is called here",
        ),
    ],
)
def test_paths_are_relative_to_the_file_or_to_a_home(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, path: str, expected: str
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    expected = expected.replace("{parent}", str(tmp_path.parent)).replace("{here}", str(tmp_path))
    assert found_at(load(text), path) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("script: ~you/t.py", "1:9: script: ~you is not expanded, only ~/ is", id="script"),
        pytest.param("script: ~", "1:9: script: expected a non-empty string, got ~, which", id="null"),
        pytest.param("command: [~you/x]", "1:11: command[0]: ~you is not expanded", id="command"),
        pytest.param("script: x\nlogs: {dir: ~you}", "2:13: logs.dir: ~you is not expanded", id="logs"),
        pytest.param("script: x\nhostfile: ~you/h", "2:11: hostfile: ~you is not expanded", id="hostfile"),
        pytest.param(
            "script: x\nnodes: [{host: a, workdir: ~you}]", "2:28: nodes[0].workdir: ~you is", id="a node's"
        ),
    ],
)
def test_a_home_that_is_not_the_users_is_refused(problems: Problems, text: str, expected: str) -> None:
    (problem,) = problems(text)
    assert problem.startswith(f"job.yaml:{expected}")


def test_the_callers_folder_does_not_matter(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load("script: t.py")
    monkeypatch.chdir(tmp_path)
    assert load_job("job.yaml").workdir == str(tmp_path)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("30s", 30),
        ("10m", 600),
        ("24h", 86400),
        ("7d", 604800),
        ("1.5 h", 5400),
        ("45", 45),
        ("1h30m", 5400),
        ("1h 1m 1s", 3661),
    ],
)
def test_durations_become_seconds(load: Load, text: str, seconds: float) -> None:
    assert load(f"script: a\ntimeouts: {{job: {text}}}").timeouts.job_s == seconds


@pytest.mark.parametrize(
    "text",
    [
        "10 minutes",
        "1h30",
        "1h-30m",
        "-5s",
        "-1",
        "soon",
        "true",
        "[1s]",
        ".inf",
        ".nan",
        "''",
        pytest.param("9" * 400, id="a number that no float holds"),
        pytest.param("9" * 400 + "s", id="seconds that no float holds"),
        pytest.param("9" * 306 + "d", id="days whose seconds no float holds"),
    ],
)
def test_what_is_no_duration_is_refused(problems: Problems, text: str) -> None:
    (problem,) = problems(f"script: a\ntimeouts: {{connect: {text}}}")
    assert problem.startswith('job.yaml:2:21: timeouts.connect: expected a duration such as "30s" or "10m"')


# Mistakes: each with its line, column, path and what to do


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "nodes:\n  - a\n  - host: b\n    gpus: four\nscript: x",
            '4:11: nodes[1].gpus: expected an integer ≥ 0 or "auto", got "four"',
            id="wrong type",
        ),
        pytest.param("script: x\nscirpt: y", "2:1: scirpt: unknown key; did you mean script?", id="typo"),
        pytest.param("script: x\nzzz: y", "2:1: zzz: unknown key; known keys: name, nodes,", id="unknown"),
        pytest.param(
            "script: x\nnproc_per_node: 2",
            "2:1: nproc_per_node: unknown key; use procs_per_node",
            id="torchrun's name",
        ),
        pytest.param(
            "script: x\nnodes:\n  - hostname: a",
            "3:5: nodes[0].hostname: unknown key; use host",
            id="another name inside a node",
        ),
        pytest.param(
            "script: x\ndetach: true",
            "2:1: detach: detach is not supported by this",
            id="later",
        ),
        pytest.param(
            'script: x\nargs: ["a\\0b"]\nrendezvous: {backend: c10d}',
            "2:8: args[0]: expected a string",
            id="no word for torch's agents",
        ),
        pytest.param(
            "script: x\nnuma_binding: core_complex",
            '2:15: numa_binding: expected "node", "socket", "exclusive", "core-complex" or "none", '
            'got "core_complex"; did you mean "core-complex"?',
            id="a mode of numa_binding",
        ),
        pytest.param(
            "script: x\ncpu_binding: cores\nnuma_binding: node",
            "2:14: cpu_binding: set numa_binding or cpu_binding, not both",
            id="both bindings",
        ),
        pytest.param(
            "script: x\ncpu_binding: [0-3, 7-4]",
            "2:20: cpu_binding[1]: 7-4 ends before it begins",
            id="CPUs backwards",
        ),
        pytest.param(
            "script: x\ncpu_binding: [0-3, '4:2']",
            '2:20: cpu_binding[1]: expected an integer from 0 to 99999 or a list of CPUs such as "0-3,8"',
            id="no list of CPUs",
        ),
        pytest.param(
            "script: x\nnodes: gpu[1-4]",
            "2:8: nodes: expected an integer from 1 to 4096 or a non-empty list, "
            'got "gpu[1-4]"; write nodes: ["gpu[1-4]"]',
            id="a range that is no list",
        ),
        pytest.param(
            "script: x\nnodes: 'a, b'",
            "2:8: nodes: expected an integer from 1 to 4096 or a non-empty list, "
            'got "a, b"; write nodes: [a, b]',
            id="hosts with commas",
        ),
        pytest.param(
            "script: x\nnodes: [gpu[1-2]]",
            '2:12: quote a range inside a list: "gpu[1-2]"',
            id="a range in a list",
        ),
        pytest.param(
            "script: x\nnodes: [me@host1:22]",
            "2:9: nodes[0]: me@host1:22: write {host: host1, port: 22, user: me}",
            id="a port",
        ),
        pytest.param(
            'script: x\nargs: --lr 0.1 "a b"',
            '2:7: args: expected a list, got "--lr 0.1 "a b""; write args: [--lr, 0.1, ',
            id="arguments in a string",
        ),
        pytest.param(
            "script: x.py --lr 0.1",
            "1:9: script: write script: x.py and args: [--lr, 0.1]",
            id="a script with arguments",
        ),
        pytest.param(
            "script: x\nargs: ['{local-rank}']",
            "2:8: args[0]: unknown placeholder {local-rank}; did you "
            "mean {local_rank}? {{local-rank}} passes {local-rank} to the script",
            id="another dash",
        ),
        pytest.param(
            "command: [x, '{rnak}']",
            "1:14: command[1]: unknown placeholder {rnak}; did you mean {rank}?",
            id="a typo in a placeholder",
        ),
        pytest.param(
            "script: x\nargs: ['{nope}']",
            "2:8: args[0]: unknown placeholder {nope}; known: {rank}, "
            "{local_rank}, {node_rank}, {world_size}, {local_world_size}, {master_addr}, {master_port};",
            id="no placeholder",
        ),
        pytest.param(
            "script: x\nscript: y", "2:1: script: duplicate key; the first is on line 1", id="twice"
        ),
        pytest.param(
            "script: x\nenv: {A: 1, A: 2}",
            "2:13: A: duplicate key; the first is on line 2",
            id="twice inside",
        ),
        pytest.param("name: &n x\nscript: *n", "2:9: aliases (*name) are not allowed", id="alias"),
        pytest.param(
            "script: x\nprocs_per_node: -1", "2:17: procs_per_node: expected an integer ≥ 1", id="-1"
        ),
        pytest.param("script: x\nprocs_per_node: 0", "2:17: procs_per_node: expected an integer ≥ 1", id="0"),
        pytest.param("script: x\nprocs_per_node: 2.0", "2:17: procs_per_node: expected an integer", id="2.0"),
        pytest.param("script: x\nnodes: true", "2:8: nodes: expected an integer from 1 to 4096", id="true"),
        pytest.param("script: x\nnodes: []", "2:8: nodes: expected a non-empty list", id="no nodes"),
        pytest.param(
            "script: x\nmodule: y",
            "2:9: module: set one of script, module or command; got script and",
            id="two",
        ),
        pytest.param("name: x", "1:1: set one of script, module or command; got none", id="none"),
        pytest.param(
            "script: x\nenv: {NOT_SET_HERE: null}",
            "2:21: env.NOT_SET_HERE: NOT_SET_HERE is null, but it is not set in your environment",
            id="missing variable",
        ),
        pytest.param(
            "script: x\nenv: {RANK: 0}",
            "2:13: env.RANK: distlaunch sets RANK for each worker",
            id="RANK",
        ),
        pytest.param(
            "script: x\nnodes: [{host: a, env: {MASTER_ADDR: b}}]",
            "2:38: nodes[0].env.MASTER_ADDR: distlaunch sets MASTER_ADDR",
            id="reserved on a node",
        ),
        pytest.param(
            "script: x\nenv: {A-B: 1}", '2:7: env.A-B: expected a variable name, got "A-B"', id="no name"
        ),
        pytest.param("script: x\nargs: [null]", "2:8: args[0]: expected a string, got null", id="null"),
        pytest.param("script: x\nargs: --a b", "2:7: args: expected a list, got", id="args as one string"),
        pytest.param(
            "script: x\nbackend: ncll",
            '2:10: backend: expected "auto", "nccl" or "gloo", got "ncll"; did',
            id="ncll",
        ),
        pytest.param(
            "script: x\nmaster_port: 70000", "2:14: master_port: expected an integer from 1", id="port"
        ),
        pytest.param(
            "script: x\nrendezvous: {endpoint: 'a:0'}",
            "2:24: rendezvous.endpoint: port 0 is not",
            id="port 0",
        ),
        pytest.param(
            "script: x\nnodes: [-oProxyCommand=x]", "2:9: nodes[0]: a host name can't begin", id="dash"
        ),
        pytest.param("script: x\nnodes: [a, a]", "2:12: nodes[1]: a is listed twice", id="host twice"),
        pytest.param("script: x\nnodes: ['g[3-1]']", '2:9: nodes[0]: "[3-1]" counts down', id="range"),
        pytest.param("script: x\nnodes: [{gpus: 1}]", "2:9: nodes[0]: host is missing", id="no host"),
        pytest.param(
            "script: x\nnodes: [a, b]\nmaster_addr: b",
            "3:14: master_addr: rank 0 runs on the first node, a, but the endpoint is on b; list b first",
            id="endpoint on another node",
        ),
        pytest.param(
            "script: x\nnodes: 2\nlauncher: ssh",
            "3:11: launcher: launcher: ssh needs host names",
            id="ssh to a number",
        ),
        pytest.param(
            "script: x\nnodes: [a]\nhostfile: hosts",
            "3:11: hostfile: set nodes or hostfile, not both",
            id="both",
        ),
        pytest.param('script: x\npython: "a\\0"', "2:9: python: expected an interpreter", id="NUL"),
        pytest.param(
            'script: x\nhostfile: "a\\0"', "2:11: hostfile: expected a non-empty string", id="NUL, read"
        ),
        pytest.param("# nothing", "the job file is empty; it needs at least `script:`", id="only a comment"),
        pytest.param("", "the job file is empty; it needs at least `script:`", id="empty"),
        pytest.param("just words", "1:1: expected a mapping of job keys, got", id="a word"),
        pytest.param("- script", "1:1: expected a mapping of job keys, got a list", id="a list"),
        pytest.param("\tscript: x", "1:1: tabs can't indent: use spaces", id="tab first"),
        pytest.param("nodes:\n\t- a", "2:1: tabs can't indent", id="tab in a list"),
        pytest.param("? [a]\n: b\nscript: x", "1:3: a key must be a word", id="a list as a key"),
        pytest.param("é: 1\nscript: x\nü: [ß, {ö: 1}]", "1:1: é: unknown key", id="columns count characters"),
    ],
)
def test_a_mistake_is_placed_and_explained(
    problems: Problems, tmp_path: Path, text: str, expected: str
) -> None:
    (tmp_path / "hosts").write_text("a\n")
    place = "job.yaml:" if expected[0].isdigit() else "job.yaml: "
    assert any(problem.startswith(f"{place}{expected}") for problem in problems(text))


# What is no YAML, or not what was meant: the message, whole
SYNTAX = [
    ("args: [*.txt]", """2:8: an unquoted value can't start with *; quote it: "*.txt\""""),
    ("args: [a, *]", """2:11: an unquoted value can't start with *; quote it: "*\""""),
    ("name: *.x # y", """2:7: an unquoted value can't start with *; quote it: "*.x\""""),
    ("name: @x", """2:7: an unquoted value can't start with @; quote it: "@x\""""),
    ("name: `x`", """2:7: an unquoted value can't start with `; quote it: "`x`\""""),
    ("args: [%x, b]", """2:8: an unquoted value can't start with %; quote it: "%x\""""),
    ("name: |x", """2:7: an unquoted value can't start with |; quote it: "|x\""""),
    ("name: ,x", """2:7: an unquoted value can't start with ,; quote it: ",x\""""),
    ("args: [!x]", """2:8: an unquoted value can't start with !; quote it: "!x\""""),
    ("name: -", """2:7: an unquoted value can't be just a dash; quote it: "-\""""),
    ("name: ?", """2:7: an unquoted value can't be just a question mark; quote it: "?\""""),
    ("args: [?]", """2:8: an unquoted value can't be just a question mark; quote it: "?\""""),
    (
        "args: [*x]",
        '2:8: aliases (*name) are not allowed in a job file; if it is plain text, quote it: "*x"',
    ),
    (
        "args: [&x]",
        '2:8: anchors (&name) are not allowed in a job file; if it is plain text, quote it: "&x"',
    ),
    (
        "name: !x y",
        '2:7: tags (!name) are not allowed in a job file; if it is plain text, quote it: "!x y"',
    ),
    (
        "args: [--t={rank}]",
        """2:12: an unquoted value in a list can't contain {; quote it: "--t={rank}\"""",
    ),
    (
        "args: [--d=${A}/x]",
        """2:13: an unquoted value in a list can't contain {; quote it: "--d=${A}/x\"""",
    ),
    ("args: [--t=[a]]", """2:12: an unquoted value in a list can't contain [; quote it: "--t=[a]\""""),
    ("args: [{rank}]", """2:8: args[0]: expected a string, got a mapping; quote it: "{rank}\""""),
    ("args:\n  - --x: y", """3:5: args[0]: expected a string, got a mapping; quote it: "--x: y\""""),
    ("workdir: {rank}.d", """2:16: unexpected .d after the end of the value; quote the whole: "{rank}.d\""""),
    ("name: {{ x }}", "2:8: a key must be a word; quote a value that begins with {{"),
    ("name: a: b", """2:8: an unquoted value can't contain ": "; quote it: "a: b\""""),
    ("args: [a: b: c]", """2:12: an unquoted value can't contain ": "; quote it: "a: b: c\""""),
    ("env: {A: b: c}", """2:11: an unquoted value can't contain ": "; quote it: "b: c\""""),
    ("name:x", "2:5: put a space after the colon: name: x"),
    ("name:x\nbackend: gloo", "2:5: put a space after the colon: name: x"),
    ("env: {A:1}", "2:7: env.A:1: put a space after the colon: A: 1"),
    ("nodes: [{host:a}]", "2:10: nodes[0].host:a: put a space after the colon: host: a"),
    (
        "timeouts:\n  join:5s",
        '3:3: timeouts: expected a mapping, got "join:5s"; put a space after the colon: join: 5s',
    ),
    ("name = x", "2:1: write a colon between a key and its value: name: x"),
    ("name", '2:1: "name" is not followed by a colon; write key: value'),
    (
        "---\nscript: y",
        "2:1: a second document starts here, but a job file holds one job: put the other in its own file",
    ),
    ("name: 'x", "2:7: this ' is not closed"),
    ('args: ["x, b]\nname: x', '2:8: this " is not closed'),
    ("args: [a, b", "2:7: this [ is not closed"),
    ("args: [a, b\nname: z", "2:7: this [ is not closed"),
    ("env: {A: b\nname: z", "2:6: this { is not closed"),
    ("args: ['a' 'b']", "2:12: a comma is missing before 'b'"),
    ("args: [a, , b]", "2:11: a value is missing before ,"),
    ("args: [- a]", "2:8: list items in brackets take no dashes: [a, b]"),
    ("args: - a", "2:7: put each list item on a line of its own, or the list in brackets: [a]"),
    ("name: 'it's'", """2:11: unexpected s' after the end of the value; quote the whole: "it's\""""),
    ("args: [a]]", "2:10: unexpected ] after the end of the value: remove it, or put it in the list"),
    (
        "name: 'x\nrole: 'y'",
        "3:8: the quote before this was opened on an earlier line; close it there",
    ),
    (
        'name: "C:\\data"',
        "2:10: in double quotes a backslash starts an escape; to keep it, use single quotes: 'C:\\data'",
    ),
    (" name: x", "2:6: this line's indentation doesn't match the lines above it"),
    ("env:\n  A: 1\n B: 2", "4:2: this line's indentation doesn't match the lines above it"),
    ("args:\n  - a\n - b", "4:2: this line's indentation doesn't match the lines above it"),
]


@pytest.mark.parametrize(("text", "expected"), SYNTAX, ids=[text for text, _ in SYNTAX])
def test_what_yaml_reads_otherwise_is_told_in_words(problems: Problems, text: str, expected: str) -> None:
    (problem,) = problems(f"script: x\n{text}\n")
    assert problem.startswith(f"job.yaml:{expected}")
    (dos,) = problems(f"script: x\n{text}\n".replace("\n", "\r\n").encode())
    assert dos == problem


def test_a_space_that_is_missing_in_the_only_line_is_told(problems: Problems) -> None:
    assert problems("script:f.py") == ["job.yaml:1:1: put a space after the colon: script: f.py"]


@pytest.mark.parametrize("text", [text for text, told in SYNTAX if "quote it: " in told])
def test_what_a_hint_says_to_write_loads(load: Load, problems: Problems, text: str) -> None:
    (problem,) = problems(f"script: x\n{text}\n")
    quoted = problem.partition("quote it: ")[2]
    load(f"script: x\n{text}\n".replace(json.loads(quoted), quoted))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: 7", '2:7: name: expected a non-empty string, got 7; quote it: "7"'),
        ("name: 1.0", 'got 1.0; quote it: "1.0"'),
        ("name: yes", 'got yes, which YAML reads as true; quote it: "yes"'),
        ("role: on", 'got on, which YAML reads as true; quote it: "on"'),
        ("name: 010", 'got 010, which YAML reads as 8; quote it: "010"'),
        ("master_addr: 10.1", 'got 10.1; quote it: "10.1"'),
        ("rendezvous: {endpoint: 12:30}", 'got 12:30, which YAML reads as 750; quote it: "12:30"'),
        ("logs: {dir: 2024}", 'got 2024; quote it: "2024"'),
        ("nodes: [7]", '2:9: nodes[0]: expected a host or a mapping with host, got 7; quote it: "7"'),
        ("on_stall: no", 'expected "notice", "restart" or "stop", got no, which YAML reads as false'),
        ("python: 3.12", "python: expected an interpreter such as python3.12, or its path, got 3.12"),
    ],
)
def test_a_string_that_yaml_takes_for_something_else_is_to_be_quoted(
    problems: Problems, text: str, expected: str
) -> None:
    (problem,) = problems(f"script: x\n{text}")
    assert problem.endswith(expected) or problem == f"job.yaml:{expected}"


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("timeout: {join: 5}", "timeouts"),
        ("node: 2", "nodes"),
        ("spare: [a]", "spares"),
        ("restart: 3", "restarts"),
        ("log: {dir: a}", "logs"),
        ("arg: [a]", "args"),
        ("scripts: x", "script"),
        ("gpu_per_node: 1", "gpus_per_node"),
    ],
)
def test_the_other_number_of_a_word_leads_to_the_key(problems: Problems, text: str, meant: str) -> None:
    assert f"unknown key; did you mean {meant}?" in problems(f"command: [x]\n{text}")[0]


def test_what_another_tool_calls_a_key_inside_a_section_is_named(problems: Problems) -> None:
    assert problems("script: x\ntimeout: 5") == ["job.yaml:2:1: timeout: unknown key; use timeouts.job"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "nodes: [a, b]\nspares: [b]",
            "3:10: spares[0]: b is in both nodes and spares; remove it from one of them",
        ),
        ("nodes: [a]\nspares: [c, c]", "3:13: spares[1]: c is listed twice; remove one of them"),
        ("nodes: [a, a]", "2:12: nodes[1]: a is listed twice; to run more workers on it, raise its procs"),
    ],
)
def test_what_to_do_about_a_host_listed_twice_depends_on_where(
    problems: Problems, text: str, expected: str
) -> None:
    assert problems(f"script: x\n{text}") == [f"job.yaml:{expected}"]


# Defaults


def _documented_defaults() -> list[tuple[str, str]]:
    """Each default that is a word, a number or a duration; not those told in words, or another key's."""
    rows = [(key, re.split("[:;]", default)[0]) for key, _, _, default in reference()]
    names = {name for name, *_ in reference()}
    return [(key, value) for key, value in rows if value and " " not in value and value not in names]


@pytest.mark.parametrize(("key", "value"), _documented_defaults())
def test_a_documented_default_can_be_written_out(load: Load, key: str, value: str) -> None:
    section, _, inner = key.rpartition(".")
    assert not section.endswith("[]")
    spec = load(f"script: x\n{section}: {{{inner}: {value}}}" if section else f"script: x\n{key}: {value}")
    plain = load("script: x\nrestarts: {}" if section == "restarts" else "script: x")
    assert spec._replace(places={}) == plain._replace(places={})


def test_there_are_defaults_to_write_out() -> None:
    assert {"numa_binding", "cpu_binding", "timeouts.stall", "ssh.persist"} <= dict(
        _documented_defaults()
    ).keys()


@pytest.mark.parametrize("off", ["none", "null", "~"])
def test_a_binding_can_be_switched_off(load: Load, off: str) -> None:
    assert load(f"script: x\nnuma_binding: {off}\ncpu_binding: {off}").binding is None
    assert load(f"script: x\nnuma_binding: {off}\ncpu_binding: cores").binding == Binding("cores")


def test_stalls_that_are_not_looked_for_can_not_end_a_job(load: Load, problems: Problems) -> None:
    assert load("script: x\ntimeouts: {stall: none}").timeouts.stall_s is None
    assert problems("script: x\ntimeouts: {stall: none}\non_stall: stop") == [
        "job.yaml:3:11: on_stall: on_stall: stop has no effect because timeouts.stall is none"
    ]


def test_all_mistakes_are_told_at_once_in_the_order_of_the_file(problems: Problems) -> None:
    text = """
nodes: [a, {host: b, gpus: four}]
nproc_per_node: 3
backend: gluu
args: [x, [y]]
env: {RANK: 1, NOT_SET_HERE: null}
timeouts: {join: never, stop: 5s, stp: 1}
"""
    assert [problem.split(" ")[0].rstrip(":") for problem in problems(text)] == [
        f"job.yaml:{place}"
        for place in ("2:1", "2:28", "3:1", "4:10", "5:11", "6:13", "6:30", "7:18", "7:35")
    ]


def test_mistakes_that_need_two_looks_are_told_with_the_others(problems: Problems) -> None:
    text = "script: x\nnodes: [-o, 'g[2-1]']\nrendezvous: {endpoint: 'a:0'}\nprocs_per_node: 0"
    assert [problem.split(" ")[1] for problem in problems(text)] == [
        "nodes[0]:",
        "nodes[1]:",
        "rendezvous.endpoint:",
        "procs_per_node:",
    ]


def test_one_mistake_is_told_once(problems: Problems) -> None:
    assert len(problems("script: x\nenv: {NOT_SET_HERE: [1]}")) == 1
    assert len(problems("command: []")) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        "backend: c10",
        "backend: etcd-v2, endpoint: [1]",
        "backend: c10d, conf: {a: [1]}",
        "backend: c10d}\nlogs: {console: some",
        "backend: c10d}\non_stall: {a: restart",
        "backend: c10d}\nrestarts: {max: many",
        "backend: static, endpoint: [x]",
    ],
)
def test_what_is_refused_has_no_part_in_other_checks(problems: Problems, wrong: str) -> None:
    (problem,) = problems(f"script: x\nrendezvous: {{{wrong}}}")
    assert "expected" in problem


@pytest.mark.parametrize(
    "argument", ['{"a": 1}', "{}", "{1}", "${HOME}", "{a,b}", "{{nope}}", "{ rank }", "{a b}"]
)
def test_other_braces_are_left_alone(load: Load, argument: str) -> None:
    assert load(f"script: x\nargs: ['{argument}']").args == (argument,)


def test_a_job_file_may_be_piped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    read, write = os.pipe()
    os.write(write, b"script: t.py")
    os.close(write)
    spec = load_job(f"/dev/fd/{read}")
    os.close(read)
    assert (
        unstarted_advice(spec, 0, "workdir", 0)
        == " (by default the current directory, since the job is piped)"
    )
    assert (spec.name, spec.workdir, spec.logs.folder) == ("job", str(tmp_path), f"{tmp_path}/runs")


def test_every_foreign_name_leads_to_a_key_that_exists() -> None:
    known = {key for key, *_ in reference()}
    assert set(JOB.foreign.values()) <= known
    assert not set(JOB.foreign) & set(JOB.fields)


def test_a_missing_variable_suggests_one_that_is_set(
    problems: Problems, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_ACCESS_TOKEN", "x")
    (problem,) = problems("script: x\nenv: {MY_ACESS_TOKEN: null}")
    assert problem.endswith("did you mean MY_ACCESS_TOKEN?")


@pytest.mark.parametrize(
    "spelling", ["010", "0x1F", "1_000", "12:30:45", "+7", "0b11", "0o17", "yes", "off", "0.10", "1.50e+3"]
)
def test_an_argument_keeps_its_spelling(load: Load, spelling: str) -> None:
    spec = load(f"script: x\nargs: [{spelling}]\nenv: {{A: {spelling}}}")
    assert spec.args == (spelling,)
    assert spec.env["A"].text == spelling


# What is no job file at all


@pytest.mark.parametrize(
    ("data", "words"),
    [
        pytest.param(b"\xff\xfe\x00", "not UTF-8 text (byte 0)", id="not UTF-8"),
        pytest.param("ä".encode("latin-1") + b": 1", "not UTF-8 text (byte 0)", id="Latin-1"),
        pytest.param(b"[" * 10_000_000, "larger than 1 MiB", id="10 MB of nesting"),
    ],
)
def test_a_file_that_is_no_text_is_refused_as_a_whole(load: Load, data: bytes, words: str) -> None:
    with pytest.raises(UsageError, match=f"job.yaml: {words}".replace("(", r"\(").replace(")", r"\)")):
        load(data)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("[" * 900_000, id="0.9 MB of lists"),
        pytest.param("{" * 900_000, id="0.9 MB of mappings"),
        pytest.param("- " * 400_000, id="lists in block style"),
        pytest.param("? " * 400_000, id="keys of keys"),
        pytest.param("".join(f"{' ' * depth}a:\n" for depth in range(1000)), id="mappings in block style"),
    ],
)
def test_deep_nesting_is_refused_before_it_hurts(problems: Problems, text: str) -> None:
    (problem,) = problems(text)
    assert problem.endswith("nested more than 20 levels deep")


def test_binary_junk_is_refused(problems: Problems) -> None:
    assert problems(bytes(range(32)))[0].startswith("job.yaml: not YAML: unacceptable character")


@pytest.mark.parametrize(
    "value",
    [
        "!!bool maybe",
        "!!int ''",
        "!!float ''",
        "!!int x",
        "!!float x",
        "!!timestamp x",
        "!!binary x",
        "!!set x",
    ],
)
def test_a_tag_that_does_not_fit_its_value_is_no_crash(load: Load, value: str) -> None:
    with pytest.raises(JobError):
        load(f"script: x\nprocs_per_node: {value}")


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"/none\.yaml: No such file or directory"):
        load_job(f"{tmp_path}/none.yaml")
    with pytest.raises(UsageError, match="Is a directory"):
        load_job(str(tmp_path))


def test_a_byte_order_mark_is_no_part_of_the_first_key(load: Load) -> None:
    assert load(b"\xef\xbb\xbfscript: x").program.kind == "script"


# --set and extra arguments


@pytest.mark.parametrize(
    ("base", "override", "path", "expected"),
    [
        pytest.param("", "backend=gloo", "backend", "gloo", id="a new key"),
        pytest.param("backend: nccl", "backend=gloo", "backend", "gloo", id="a key that is there"),
        pytest.param(
            "timeouts: {stop: 3s}", "timeouts.job=1h", "timeouts", Timeouts(30, 600, 3, 3600), id="inside"
        ),
        pytest.param("", "timeouts.job=1h", "timeouts.job_s", 3600, id="inside of what is not there"),
        pytest.param("", "args=[a, 'b c']", "args", ("a", "b c"), id="a list"),
        pytest.param("args: [a, b]", "args[1]=c", "args", ("a", "c"), id="an item"),
        pytest.param("nodes: [{host: a, gpus: 1}]", "nodes[0].gpus=4", "nodes.0.gpus", 4, id="in an item"),
        pytest.param("", "env.A=b=c", "env", {"A": EnvValue("b=c")}, id="the first = divides"),
        pytest.param("", "env={A: b}", "env", {"A": EnvValue("b")}, id="a mapping"),
        pytest.param("", "script=other.py", "program.kind", "script", id="the script"),
        pytest.param("", "env.A=", "env", {"A": EnvValue("")}, id="an empty variable"),
        pytest.param("", "env.A=''", "env", {"A": EnvValue("")}, id="an empty string"),
        pytest.param("", "env.A=#b", "env", {"A": EnvValue("#b")}, id="not a comment"),
        pytest.param("args: [a, b]", "args[1]=", "args", ("a", ""), id="an empty argument"),
        pytest.param("nodes: [a]", "nodes[0].procs=4", "nodes.0.procs", 4, id="in a host"),
        pytest.param("nodes: ['a[1-2]']", "nodes[0].procs=4", "nodes.1.procs", 4, id="in a range of hosts"),
        pytest.param("nodes: [a]\nspares: [b]", "spares[0].gpus=1", "pool.1.gpus", 1, id="in a spare"),
        pytest.param(
            "restarts: 3", "restarts.window=1m", "restarts", Restarts(3, 1, 60), id="in a short form"
        ),
        pytest.param("restarts: 3", "restarts.max=4", "restarts.most", 4, id="over a short form"),
    ],
)
def test_set_overrides_a_key(load: Load, base: str, override: str, path: str, expected: Any) -> None:
    assert found_at(load(f"script: x\n{base}", override), path) == expected


def test_set_alone_makes_a_job_of_an_empty_file(load: Load) -> None:
    assert load("", "command=[ls]").program.words == ("ls",)


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
        ("script: x\nenv: {A: b}", ("env=null",), "env", {}),
        ("script: x\nargs: [a]", ("args=null",), "args", ("more",)),
        ("script: x", ("name=null",), "name", "job"),
        ("script: x", ("script=null", "script=y"), "program.words", ("y",)),
        ("script: x\nenv: {A: b, C: d}", ("env.A=null",), "env", {"C": EnvValue("d")}),
        ("script: x\nenv: {A: null}", ("env.A=null",), "env", {}),
        ("script: x", ("env.A=b", "env.A=null"), "env", {}),
        ("script: x\nnodes: [{host: a, env: {A: b}}]", ("nodes[0].env.A=null",), "nodes.0.env", {}),
        (
            "script: x\nrendezvous: {backend: c10d, conf: {a: b}}",
            ("rendezvous.conf.a=null",),
            "rendezvous_conf",
            {},
        ),
    ],
)
def test_null_takes_a_key_out(
    load: Load, tmp_path: Path, base: str, overrides: tuple[str, ...], path: str, expected: Any
) -> None:
    (tmp_path / "hosts").write_text("from-hostfile\n")
    assert found_at(load(base, *overrides, extra=("more",)), path) == expected


def test_null_still_takes_the_callers_variable(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "s3cret")
    assert load("script: x", "env.SOME_TOKEN=null").env["SOME_TOKEN"].text == "s3cret"
    told = load("script: x\nenv: {SOME_TOKEN: a}", "env={SOME_TOKEN: null}")
    assert told.env["SOME_TOKEN"].text == "s3cret"


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("nodes.0.procs=3", "nodes=[{host: …, procs: 3}]"),
        ("nodes[0].env.A=3", "nodes=[{host: …, env: {A: 3}}]"),
        ("nodes[0].host=a", "nodes=[{host: a}]"),
        ("spares[0]=a", "spares=[a]"),
        ("command[1]=b", "command=[b]"),
        ("logs.console[0]=1", "logs.console=[1]"),
    ],
)
@pytest.mark.parametrize("base", ["script: x", "script: x\nnodes: 2"])
def test_an_item_of_a_list_that_is_not_there_needs_the_whole_list(
    load: Load, base: str, override: str, value: str
) -> None:
    with pytest.raises(UsageError) as caught:
        load(base, override)
    key = value.partition("=")[0]
    assert f"{override}: {key} is not a list in the job file" in str(caught.value)
    assert str(caught.value).endswith(f"set the whole list: --set {shlex.quote(value)}")


HOSTS_AS_KEYS = [
    (
        "nodes: {host1: }",
        "2:8: nodes: expected an integer from 1 to 4096 or a non-empty list",
        "- host: host1",
    ),
    ("nodes:\n  host1: {procs: 2}", "3:3: nodes: expected an integer", "- host: host1"),
    ("spares: {host1: }", "2:9: spares: expected a list", "- host: host1"),
    ("nodes: {host: a, procs: 2}", "2:8: nodes: expected", "even a single one: - host: …"),
    ("ssh: {options: -v}", "2:16: ssh.options:", 'each item must be an option such as "Compression=no"'),
    ("args: [--a, null]", "2:13: args[1]: expected a string, got null", 'quote it: "null"'),
    ("args: [~]", "2:8: args[0]: expected a string, got ~, which YAML reads as null", 'quote it: "~"'),
    ("args: [Null]", "2:8: args[0]: expected a string, got Null", 'quote it: "Null"'),
]


@pytest.mark.parametrize(("text", "start", "end"), HOSTS_AS_KEYS)
def test_what_to_write_for_an_item_is_told(problems: Problems, text: str, start: str, end: str) -> None:
    (problem,) = problems(f"script: x\n{text}")
    assert problem.startswith(f"job.yaml:{start}")
    assert problem.endswith(end)


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
        ("torchrun a.py", "`distlaunch import torchrun 'torchrun a.py'` prints a job file for this command"),
    ],
)
def test_a_command_line_as_a_script_is_told_as_keys(
    load: Load, problems: Problems, text: str, hint: str
) -> None:
    assert problems(f"script: {text}") == [f"job.yaml:1:9: script: {hint}"]
    if hint.startswith("write"):
        load(hint.removeprefix("write ").replace(" and ", "\n"))


def test_a_script_with_blanks_in_its_name_is_one(load: Load) -> None:
    assert load("script: my python script.py").program.words == ("my python script.py",)


def test_null_for_a_key_that_does_not_exist_is_refused(problems: Problems) -> None:
    assert problems("script: x", "bakend=null") == [
        "--set bakend: bakend: unknown key; did you mean backend?"
    ]


@pytest.mark.parametrize(
    ("override", "hint"),
    [
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
def test_a_hint_about_an_override_is_one_to_paste(
    load: Load, problems: Problems, override: str, hint: str
) -> None:
    problem = problems("script: x", override)[0]
    assert problem.endswith(hint)
    if override.startswith("nodes=[17"):
        return  # the next number is told next
    if override.startswith("args=[--t="):
        hint = hint.replace("{x}", "{rank}")  # that this one is no placeholder is told next
    words = shlex.split(hint)
    load("script: x", *(word for word in words if word != "--set"))


def test_later_overrides_win(load: Load) -> None:
    assert load("script: x", "name=a", "name=b").name == "b"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        pytest.param("backend", "--set backend: expected key=value", id="no ="),
        pytest.param("=x", "--set =x: expected key=value", id="no key"),
        pytest.param(
            "args[2]=x",
            r"--set args\[2\]=x: index 2 is out of range: the list has 1 item",
            id="no such item",
        ),
        pytest.param("args[²]=x", "--set args.²", id="an item that is no number"),
        pytest.param("script.a=x", '--set script.a=x: "x" has no key a', id="below a word"),
        pytest.param("backend=mpii", '--set backend: backend: expected "auto", "nccl" or', id="wrong value"),
        pytest.param("nodes=0", "--set nodes: nodes: expected an integer from 1 to 4096", id="too few"),
        pytest.param("bakend=gloo", "--set bakend: bakend: unknown key; did you mean backend", id="typo"),
        pytest.param("args=[a", r"--set args:1:1: this \[ is not closed", id="no YAML"),
        pytest.param("env.A=*x", "--set env.A:1:1: aliases", id="alias"),
        pytest.param("name=\udcff", "--set name", id="bytes that are no text"),
        pytest.param("a." * 3000 + "b=1", "--set a.a.a", id="too deep"),
    ],
)
def test_a_bad_override_is_explained(load: Load, override: str, words: str) -> None:
    with pytest.raises(DistlaunchError, match=words):
        load("script: x\nargs: [a]", override)


@pytest.mark.parametrize(
    ("args", "extra", "expected"),
    [
        pytest.param("", ("--lr", "0.1"), ("--lr", "0.1"), id="alone"),
        pytest.param("args: [a]", ("b", "c"), ("a", "b", "c"), id="after those of the file"),
        pytest.param(
            "args: [a]", ("yes", "010", "[x", "*y", ""), ("a", "yes", "010", "[x", "*y", ""), id="as is"
        ),
    ],
)
def test_extra_arguments_are_appended_as_they_are(
    load: Load, args: str, extra: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    assert load(f"script: x\n{args}", extra=extra).args == expected


def test_extra_arguments_do_not_hide_a_mistake_in_args(problems: Problems) -> None:
    (problem,) = problems("script: x\nargs: --epochs 10", extra=("--lr", "1"))
    assert problem.startswith("job.yaml:2:7: args: expected a list")


# Hostfiles


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("a slots=4\nb slots=2 max_slots=8", [("a", 4), ("b", 2)], id="Open MPI"),
        pytest.param("a slots=4 max-slots=8\n", [("a", 4)], id="Open MPI's other spelling"),
        pytest.param(
            "worker-1 slots=8\nworker-2 slots=8\n", [("worker-1", 8), ("worker-2", 8)], id="DeepSpeed"
        ),
        pytest.param("a:4\nb:2\n", [("a", 4), ("b", 2)], id="Horovod"),
        pytest.param("# all\n\n  a   # the first\n\tb\n", [("a", None), ("b", None)], id="comments"),
        pytest.param("a\na\n", [("a", 2)], id="a host that is named twice has two slots"),
        pytest.param("a slots=2\nb\na slots=3", [("a", 5), ("b", None)], id="slots add up"),
        pytest.param("a slots=22\nb slots=2000", [("a", 22), ("b", 2000)], id="slots like ports"),
        pytest.param("n[01-02]:2", [("n01", 2), ("n02", 2)], id="range"),
        pytest.param("a\r\nb\r\n", [("a", None), ("b", None)], id="CRLF"),
    ],
)
def test_hostfiles_of_three_tools_are_read(
    load: Load, tmp_path: Path, text: str, expected: list[tuple[str, int | None]]
) -> None:
    (tmp_path / "hosts").write_bytes(text.encode())
    nodes = load("script: x\nhostfile: hosts").nodes
    assert [(node.label, node.procs) for node in nodes] == expected


def test_a_hostfiles_user_is_kept_and_procs_per_node_is_the_default(load: Load, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("me@a\nb slots=2\n")
    nodes = load("script: x\nhostfile: hosts\nprocs_per_node: 7").nodes
    assert [(node.reach, node.procs) for node in nodes] == [(Ssh("a", "me"), 7), (Ssh("b"), 2)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("a\n  b slots=x", '2:3: slots: expected a number, got "x"', id="slots"),
        pytest.param("a slots=²", '1:1: slots: expected a number, got "²"', id="a digit that is no number"),
        pytest.param("a slots=0", "1:1: slots", id="no slots"),
        pytest.param("a gpus=4", '1:1: unexpected "gpus=4"; write "host slots=4" or "host:4"', id="word"),
        pytest.param("-oProxyCommand=x", "1:1: a host name can't begin with a dash", id="dash"),
        pytest.param("a;b", '1:1: "a;b" is not a valid host name', id="no host"),
        pytest.param(
            "a\nb:2222",
            '2:1: "b:2222" in a hostfile means 2222 slots; for slots, write "b slots=2222"; '
            "for a port, use ssh_config or nodes: [{host: b, port: 2222}]",
            id="a port",
        ),
        pytest.param("a:22", '1:1: "a:22" in a hostfile means 22 slots', id="ssh's port"),
        pytest.param("# nobody\n", " the hostfile lists no hosts", id="empty"),
    ],
)
def test_a_hostfiles_mistakes_name_its_line(
    problems: Problems, tmp_path: Path, text: str, expected: str
) -> None:
    (tmp_path / "hosts").write_text(text)
    (problem,) = problems("script: x\nhostfile: hosts")
    assert problem.startswith(f"hosts:{expected}")


def test_a_hostfile_that_is_not_there_is_named(load: Load) -> None:
    with pytest.raises(DistlaunchError, match="nowhere: No such file or directory"):
        load("script: x\nhostfile: nowhere")


# Never a traceback

_TOKENS = [
    *(f"{key}: " for key in JOB.fields),
    *("host: ", "gpus: ", "endpoint: ", "connect: ", "console: ", "persist: ", "config: ", "A: "),
    *("\n", "\n  ", "\n    ", "- ", "\n- ", "\n  - ", ", ", ": ", " ", "\t", "#", "---\n", "...\n"),
    *("[", "]", "{", "}", "'", '"', "|\n  ", ">\n  ", "? ", "&a ", "*a", "<<: ", "%YAML 1.1\n", "@", "`"),
    *("!!int ", "!!bool ", "!!float ", "!!null ", "!!str ", "!!seq ", "!!map ", "!!timestamp ", "!x ", "!"),
    *(
        "null",
        "~",
        "yes",
        "1",
        "-1",
        "0x",
        "1e5",
        ".inf",
        "1:30",
        "2024-01-01",
        "9" * 400,
        "auto",
        "10m",
        "5s",
    ),
    *(
        "train.py",
        "gpu[1-3]",
        "a@b",
        "localhost",
        "a:0",
        "\\0",
        "\\ud800",
        "é",
        "\x85",
        "\u2028",
        "\ufeff",
        "x",
    ),
]


@given(st.lists(st.sampled_from(_TOKENS), max_size=25).map("".join) | st.text(max_size=40))
@example("script: x\nname: !!bool x")
@bounded(400)
def test_any_text_loads_or_is_refused_in_words(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "random.yaml"
    path.write_text(text, encoding="utf-8", errors="replace")
    try:
        load_job(str(path))
    except DistlaunchError as error:
        assert str(error)


@given(job_documents)
@bounded(200)
def test_any_document_of_known_keys_loads_or_is_refused_in_words(
    tmp_path_factory: pytest.TempPathFactory, document: dict[str, Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "random.yaml"
    path.write_text(yaml.safe_dump(document, allow_unicode=True))
    try:
        spec = load_job(str(path))
    except JobError as error:
        assert all(problem.line > 0 and problem.text for problem in error.problems)
    else:
        assert spec.nodes
        assert os.path.isabs(spec.workdir)


@given(st.text(max_size=30), st.text(max_size=30))
@bounded(200)
def test_any_override_is_taken_or_refused_in_words(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "random.yaml"
    path.write_text("script: x\nargs: [a]\nnodes: [{host: a}]\n")
    try:
        load_job(str(path), [f"{key}={value}"])
    except DistlaunchError as error:
        assert str(error)
