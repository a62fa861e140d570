"""Mistakes in a job file: each with its line, column, path and advice."""

import json
from pathlib import Path

import pytest

from tests.unit.samples import Load, Problems

# Below `script: x`, which is line 1
MISTAKES = [
    ("scirpt: y", "2:1: scirpt: unknown key; did you mean script?"),
    ("zzz: y", "2:1: zzz: unknown key; known keys: name, nodes,"),
    ("nproc_per_node: 2", "2:1: nproc_per_node: unknown key; use procs_per_node"),
    ("nodes:\n  - hostname: a", "3:5: nodes[0].hostname: unknown key; use host"),
    (
        "logs: {watch: 'x{99999999999999999999}'}",
        "2:15: logs.watch: expected a regular expression: the repetition number is too large",
    ),
    (
        "logs: {watch: loss}",
        "2:15: logs.watch: expected a group around the number, as in 'loss[ =:]+([-0-9.eE+]+)'",
    ),
    ("detach: true", "2:1: detach: unknown key; use run --detach"),
    ('args: ["a\\0b"]\nrendezvous: {backend: etcd-v2, endpoint: "e:1"}', "2:8: args[0]: expected a string"),
    (
        "numa_binding: core_complex",
        (
            '2:15: numa_binding: expected "node", "socket", "exclusive", "core-complex" or "none", '
            'got "core_complex"; did you mean "core-complex"?'
        ),
    ),
    (
        "cpu_binding: cores\nnuma_binding: node",
        "2:14: cpu_binding: set numa_binding or cpu_binding, not both",
    ),
    ("cpu_binding: [0-3, 7-4]", "2:20: cpu_binding[1]: 7-4 ends before it begins"),
    (
        "cpu_binding: [0-3, '4:2']",
        '2:20: cpu_binding[1]: expected an integer from 0 to 99999 or a list of CPUs such as "0-3,8"',
    ),
    (
        "nodes: gpu[1-4]",
        (
            "2:8: nodes: expected an integer from 1 to 4096 or a non-empty list, "
            'got "gpu[1-4]"; write nodes: ["gpu[1-4]"]'
        ),
    ),
    (
        "nodes: 'a, b'",
        (
            "2:8: nodes: expected an integer from 1 to 4096 or a non-empty list, "
            'got "a, b"; write nodes: [a, b]'
        ),
    ),
    ("nodes: [gpu[1-2]]", '2:12: quote a range inside a list: "gpu[1-2]"'),
    ("nodes: [me@host1:22]", "2:9: nodes[0]: me@host1:22: write {host: host1, port: 22, user: me}"),
    ('args: --lr 0.1 "a b"', '2:7: args: expected a list, got "--lr 0.1 "a b""; write args: [--lr, 0.1, '),
    (
        "args: ['{local-rank}']",
        (
            "2:8: args[0]: unknown placeholder {local-rank}; did you "
            "mean {local_rank}? {{local-rank}} passes {local-rank} to the script"
        ),
    ),
    (
        "args: ['{nope}']",
        (
            "2:8: args[0]: unknown placeholder {nope}; known: {rank}, "
            "{local_rank}, {node_rank}, {world_size}, {local_world_size}, {master_addr}, {master_port}, "
            "{job_id}, {run_id}, {port:NAME}, {hosts}, {hosts:PORT}, {hosts_json}, {hosts_json:PORT};"
        ),
    ),
    ("script: y", "2:1: script: duplicate key; the first is on line 1"),
    ("env: {A: 1, A: 2}", "2:13: A: duplicate key; the first is on line 2"),
    ("procs_per_node: 0", "2:17: procs_per_node: expected an integer ≥ 1"),
    ("procs_per_node: 2.0", "2:17: procs_per_node: expected an integer"),
    ("nodes: true", "2:8: nodes: expected an integer from 1 to 4096"),
    ("nodes: []", "2:8: nodes: expected a non-empty list"),
    ("module: y", "2:9: module: set one of script, module or command; got script and"),
    (
        "env: {NOT_SET_HERE: null}",
        "2:21: env.NOT_SET_HERE: NOT_SET_HERE is null, but it is not set in your environment",
    ),
    ("env: {RANK: 0}", "2:13: env.RANK: distlaunch sets RANK for each worker"),
    (
        "nodes: [{host: a, env: {MASTER_ADDR: b}}]",
        "2:38: nodes[0].env.MASTER_ADDR: distlaunch sets MASTER_ADDR",
    ),
    ("env: {A-B: 1}", '2:7: env.A-B: expected a variable name, got "A-B"'),
    ("args: [null]", "2:8: args[0]: expected a string, got null"),
    ("backend: ncll", '2:10: backend: expected "auto", "nccl", "gloo" or "mpi", got "ncll"; did'),
    ("master_port: 70000", "2:14: master_port: expected an integer from 1"),
    ("rendezvous: {endpoint: 'a:0'}", "2:24: rendezvous.endpoint: port 0 is not"),
    ("nodes: [-oProxyCommand=x]", "2:9: nodes[0]: a host name can't begin"),
    ("nodes: ['g[3-1]']", '2:9: nodes[0]: "[3-1]" counts down'),
    ("nodes: [{gpus: 1}]", "2:9: nodes[0]: host is missing"),
    (
        "nodes: [a, b]\nmaster_addr: b",
        "3:14: master_addr: rank 0 runs on the first node, a, but the endpoint is on b; list b first",
    ),
    ("rendezvous: none\ntimeouts: {join: 5s}", "3:18: timeouts.join: with rendezvous: none, nothing waits"),
    ("rendezvous: nothing", '2:13: rendezvous: expected "static", "c10d", "etcd-v2" or "none"'),
    ("nodes: [a]\nstdin: rank 0", "3:8: stdin: rank 0 must be on this machine and in no container"),
    ("nodes: 2\nlauncher: ssh", "3:11: launcher: launcher: ssh needs host names"),
    ("nodes: [a]\nhostfile: hosts", "3:11: hostfile: set nodes or hostfile, not both"),
    ('python: "a\\0"', "2:9: python: expected an interpreter"),
    ('hostfile: "a\\0"', "2:11: hostfile: expected a non-empty string"),
]
WHOLE_FILES = [
    (
        "nodes:\n  - a\n  - host: b\n    gpus: four\nscript: x",
        '4:11: nodes[1].gpus: expected an integer ≥ 0 or "auto", got "four"',
    ),
    ("script: x.py --lr 0.1", "1:9: script: write script: x.py and args: [--lr, 0.1]"),
    ("command: [x, '{rnak}']", "1:14: command[1]: unknown placeholder {rnak}; did you mean {rank}?"),
    ("name: &n x\nscript: *n", "2:9: aliases (*name) are not allowed"),
    ("name: x", "1:1: set one of script, module or command; got none"),
    ("# nothing", "the job file is empty; it needs at least `script:`"),
    ("", "the job file is empty; it needs at least `script:`"),
    ("just words", "1:1: expected a map of job keys, got"),
    ("- script", "1:1: expected a map of job keys, got a list"),
    ("\tscript: x", "1:1: tabs can't indent: use spaces"),
    ("nodes:\n\t- a", "2:1: tabs can't indent"),
    ("? [a]\n: b\nscript: x", "1:3: a key must be a word"),
    ("é: 1\nscript: x\nü: [ß, {ö: 1}]", "1:1: é: unknown key"),
]


@pytest.mark.parametrize(
    ("text", "expected"), [*((f"script: x\n{text}", expected) for text, expected in MISTAKES), *WHOLE_FILES]
)
def test_places_and_explains_a_mistake(problems: Problems, tmp_path: Path, text: str, expected: str) -> None:
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
    ("args: [*x]", '2:8: aliases (*name) are not allowed in a job file; if it is plain text, quote it: "*x"'),
    ("args: [&x]", '2:8: anchors (&name) are not allowed in a job file; if it is plain text, quote it: "&x"'),
    ("name: !x y", '2:7: tags (!name) are not allowed in a job file; if it is plain text, quote it: "!x y"'),
    ("args: [--t={rank}]", """2:12: an unquoted value in a list can't contain {; quote it: "--t={rank}\""""),
    ("args: [--d=${A}/x]", """2:13: an unquoted value in a list can't contain {; quote it: "--d=${A}/x\""""),
    ("args: [--t=[a]]", """2:12: an unquoted value in a list can't contain [; quote it: "--t=[a]\""""),
    ("args: [{rank}]", """2:8: args[0]: expected a string, got a map; quote it: "{rank}\""""),
    ("args:\n  - --x: y", """3:5: args[0]: expected a string, got a map; quote it: "--x: y\""""),
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
        '3:3: timeouts: expected a map of settings, got "join:5s"; put a space after the colon: join: 5s',
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
    ("args: - a", "2:7: put each list item on its own line, or the list in brackets: [a]"),
    ("name: 'it's'", """2:11: unexpected s' after the end of the value; quote the whole: "it's\""""),
    ("args: [a]]", "2:10: unexpected ] after the end of the value: remove it, or put it in the list"),
    ("name: 'x\nrole: 'y'", "3:8: the quote before this was opened on an earlier line; close it there"),
    (
        'name: "C:\\data"',
        "2:10: in double quotes a backslash starts an escape; to keep it, use single quotes: 'C:\\data'",
    ),
    (" name: x", "2:6: this line's indentation doesn't match the lines above it"),
    ("env:\n  A: 1\n B: 2", "4:2: this line's indentation doesn't match the lines above it"),
    ("args:\n  - a\n - b", "4:2: this line's indentation doesn't match the lines above it"),
]


@pytest.mark.parametrize(("text", "expected"), SYNTAX, ids=[text for text, _ in SYNTAX])
def test_explains_yaml_syntax_errors(problems: Problems, text: str, expected: str) -> None:
    (problem,) = problems(f"script: x\n{text}\n")
    assert problem.startswith(f"job.yaml:{expected}")
    (dos,) = problems(f"script: x\n{text}\n".replace("\n", "\r\n").encode())
    assert dos == problem


def test_explains_a_missing_space_in_the_only_line(problems: Problems) -> None:
    assert problems("script:f.py") == ["job.yaml:1:1: put a space after the colon: script: f.py"]


@pytest.mark.parametrize("text", [text for text, told in SYNTAX if "quote it: " in told])
def test_the_suggested_quoting_loads(load: Load, problems: Problems, text: str) -> None:
    (problem,) = problems(f"script: x\n{text}\n")
    quoted = problem.partition("quote it: ")[2]
    load(f"script: x\n{text}\n".replace(json.loads(quoted), quoted))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: 7", '2:7: name: expected a non-empty string, got 7; quote it: "7"'),
        ("name: yes", 'got yes, which YAML reads as true; quote it: "yes"'),
        ("role: on", 'got on, which YAML reads as true; quote it: "on"'),
        ("name: 010", 'got 010, which YAML reads as 8; quote it: "010"'),
        ("master_addr: 10.1", 'got 10.1; quote it: "10.1"'),
        ("rendezvous: {endpoint: 12:30}", 'got 12:30, which YAML reads as 750; quote it: "12:30"'),
        ("logs: {dir: 2024}", 'got 2024; quote it: "2024"'),
        ("nodes: [7]", '2:9: nodes[0]: expected a host or a map with host, got 7; quote it: "7"'),
        ("on_stall: no", 'expected "warn", "restart" or "stop", got no, which YAML reads as false'),
        ("python: 3.12", "python: expected an interpreter such as python3.12, or its path, got 3.12"),
    ],
)
def test_suggests_quotes_for_a_string_that_yaml_reads_as_something_else(
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
def test_suggests_the_key_for_a_singular_or_plural(problems: Problems, text: str, meant: str) -> None:
    assert f"unknown key; did you mean {meant}?" in problems(f"command: [x]\n{text}")[0]


def test_suggests_the_key_inside_a_section(problems: Problems) -> None:
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
def test_advice_about_a_duplicate_host_depends_on_the_place(
    problems: Problems, text: str, expected: str
) -> None:
    assert problems(f"script: x\n{text}") == [f"job.yaml:{expected}"]
