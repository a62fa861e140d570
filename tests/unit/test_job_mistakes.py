"""Mistakes in a job file: each with its line, column, path and advice."""

import json
import re
from pathlib import Path

import pytest

from tests.unit.samples import Load, Problems

# Below `script: x`, which is line 1. … stands for any words; docs/messages.md has the whole messages.
PLAIN_MISTAKES = {
    "scirpt: y": "2:1: scirpt: unknown key; did you mean script?",
    "zzz: y": "2:1: zzz: unknown key; known keys: name, nodes,…",
    "timeout: {join: 5}": "2:1: timeout: unknown key; did you mean timeouts?",
    "timeout: 5": "2:1: timeout: unknown key; use timeouts.job",
    "nproc_per_node: 2": "2:1: nproc_per_node: unknown key; use procs_per_node",
    "nodes:\n  - hostname: a": "3:5: nodes[0].hostname: unknown key; use host",
    "detach: true": "2:1: detach: unknown key; use run --detach",
    "numa_binding: core_complex": '2:15: numa_binding: expected "node", …; did you mean "core-complex"?',
    "cpu_binding: [0-3, '4:2']": '2:20: cpu_binding[1]: expected … a list of CPUs such as "0-3,8"…',
    "nodes: gpu[1-4]": '2:8: nodes: expected …, got "gpu[1-4]"; write nodes: ["gpu[1-4]"]',
    "nodes: 'a, b'": '2:8: nodes: expected …, got "a, b"; write nodes: [a, b]',
    'args: --lr 0.1 "a b"': '2:7: args: expected a list, got …; write args: [--lr, 0.1, "\\"a", "b\\""]',
    "procs_per_node: 0": "2:17: procs_per_node: expected an integer ≥ 1, got 0",
    "nodes: '2'": '2:8: nodes: expected …, got "2"; write nodes: 2',
    "nodes: true": "2:8: nodes: expected an integer from 1 to 4096 or a non-empty list, got true",
    "nodes: []": "2:8: nodes: expected a non-empty list, got an empty list",
    "env: {A-B: 1}": '2:7: env.A-B: expected a variable name, got "A-B"',
    "args: [null]": '2:8: args[0]: expected a string, got null; quote it: "null"',
    "backend: ncll": '2:10: backend: expected "auto", "nccl", "gloo" or "mpi", …; did you mean "nccl"?',
    "master_port: 70000": "2:14: master_port: expected an integer from 1 to 65535, got 70000",
    "nodes: [{gpus: 1}]": "2:9: nodes[0]: host is missing",
    'python: "a\\0"': '2:9: python: expected an interpreter such as python3.12, or its path, got "a\x00"',
    'hostfile: "a\\0"': '2:11: hostfile: expected a non-empty string, got "a\x00"',
    "gpus_per_node: many": '2:16: gpus_per_node: expected an integer from 0 to 4096 or "auto", got "many"',
    "procs_per_node: 2.5": "2:17: procs_per_node: expected an integer ≥ 1, got 2.5",
    "command: []": "2:10: command: expected a non-empty list, got an empty list",
    "command: ls -l": '2:10: command: expected …, got "ls -l"; write command: [ls, -l]',
    "command: a; b": '2:10: command: expected …, got "a; b"; write command: [sh, -c, "a; b"]',
    "args: [[x]]": "2:8: args[0]: expected a string, got a list",
    "env: [A]": "2:6: env: expected a map of settings, got a list",
    "restarts: {max: 1, on: [node-lost]}": '2:25: restarts.on[0]: expected …; did you mean "node_lost"?',
    "restarts: {max: 1, on: [exit: 75]}": "2:31: restarts.on[0].exit: …, got 75; write exit: [75]",
    "restarts: {max: 1, on: [stall]}": "2:24: restarts.on: stall has no effect without on_stall: restart",
    "gpus_per_node: 4097": '2:16: gpus_per_node: expected an integer from 0 to 4096 or "auto", got 4097',
    "timeouts: {stop: soon}": '2:18: timeouts.stop: expected a duration such as "30s" or "10m", got "soon"',
    "timeouts: {boot: 1s}": "2:12: timeouts.boot: unknown key; known keys: connect, join, stop, job, …",
    "logs: {console: some}": '2:17: logs.console: expected "all", "rank0", "none" or a list, got "some"',
    "launcher: slrm": '2:11: launcher: expected "auto", "kubernetes", …, got "slrm"; did you mean "slurm"?',
    "collect: [/]": '2:11: collect[0]: expected a path or pattern of files, got "/"',
    "collect: a.pt": "2:10: collect: expected a non-empty list or a map with paths, … write collect: [a.pt]",
    "collect: {paths: [x], from: rank0}": '2:29: collect.from: expected …; did you mean "rank 0"?',
    "name: ''": '2:7: name: expected a non-empty string, got ""',
    "cpu_binding: 0-3": '2:14: cpu_binding: expected "cores", "none" or a non-empty list, got "0-3"',
    "module: -m": '2:9: module: expected a dotted module name, got "-m"',
    "nodes: {host1: }": "2:8: nodes: expected …, got a map; write - host: host1",
    "nodes:\n  host1: {procs: 2}": "3:3: nodes: expected …, got a map; write - host: host1",
    "spares: {host1: }": '2:9: spares: expected "rest" or a list, got a map; write - host: host1',
    "nodes: {host: a, procs: 2}": "2:8: nodes: …; start each list item with a dash, … - host: …",
    "ssh: {options: -v}": '2:16: ssh.options: expected a list, … must be an option such as "Compression=no"',
    "args: [~]": '2:8: args[0]: expected a string, got ~, which YAML reads as null; quote it: "~"',
    "args: [Null]": '2:8: args[0]: expected a string, got Null; quote it: "Null"',
    "name: 7": '2:7: name: expected a non-empty string, got 7; quote it: "7"',
    "name: yes": '2:7: name: expected a non-empty string, got yes, which YAML reads as true; quote it: "yes"',
    "role: on": "2:7: role: expected a non-empty single-line string, got on, which YAML reads as true…",
    "name: 010": '2:7: name: expected a non-empty string, got 010, which YAML reads as 8; quote it: "010"',
    "master_addr: 10.1": '2:14: master_addr: expected a non-empty string, got 10.1; quote it: "10.1"',
    "rendezvous: {endpoint: 12:30}": '2:24: rendezvous.endpoint: … reads as 750; quote it: "12:30"',
    "nodes: [7]": '2:9: nodes[0]: expected a host or a map with host, got 7; quote it: "7"',
    "logs: {limit: much}": '2:15: logs.limit: expected a size such as "500MiB" or "2GB"…',
    "on_stall: no": '2:11: on_stall: expected "warn", "restart" or "stop", got no, which YAML reads as false',
    "python: 3.12": "2:9: python: expected an interpreter such as python3.12, or its path, got 3.12",
}
"""Those that the schema for editors marks, too."""
MISTAKES = {
    "setup: |\n  a\n  b": r'2:8: setup: expected "uv", "conda" or a map with run …, got "a\nb"',
    "sync: true\nsetup: {run: a, from: controller}": "3:8: setup: set either run, with…",
    "sync: true\nsetup: {key: [a]}": "3:14: setup.key: it needs run: the command that uses these files",
    "sync: false\nsetup: uv": "3:8: setup: it needs the code on the nodes: set sync: true …setup=null)",
    "launcher: mpirun\nfiles: [a]": "3:8: files: … mpirun jobs can't copy it, so leave …files=null)",
    "restarts: {max: 1, on: [oom, exit: [7, 75]], never: [exit: [75]]}": "2:53: …75 is in both on and never…",
    "restarts: {never: [oom]}": "2:19: restarts.never: never has no effect without restarts: set…",
    "logs: {watch: 'x{99999999999999999999}'}": "2:15: logs.watch: … the repetition number…",
    "logs: {watch: loss}": "2:15: logs.watch: expected a group around the number, as in 'loss[ =:]+…",
    'args: ["a\\0b"]\nrendezvous: {backend: etcd-v2, endpoint: "e:1"}': '2:8: args[0]: …, got "a\x00b"',
    "cpu_binding: cores\nnuma_binding: node": "2:14: cpu_binding: set numa_binding or cpu_binding, not both",
    "cpu_binding: [0-3, 7-4]": "2:20: cpu_binding[1]: 7-4 ends before it begins",
    "nodes: [gpu[1-2]]": '2:12: quote a range inside a list: "gpu[1-2]"',
    "nodes: [me@host1:22]": "2:9: nodes[0]: me@host1:22: write {host: host1, port: 22, user: me}",
    "nodes: ['a[1-2]:22']": '2:9: nodes[0]: a[1-2]:22: write {host: "a[1-2]", port: 22}',
    "nodes: [me@a]\nlauncher: {command: [x, '{host}']}": "2:9: nodes[0]: user has no effect with launcher…",
    "args: ['{local-rank}']": "2:8: args[0]: … mean {local_rank}? {{local-rank}} passes {local-rank} to…",
    "args: ['{nope}']": "2:8: args[0]: unknown placeholder {nope}; known: {rank}, …, {hosts_json:PORT};…",
    "args: ['{{hosts:0}} {hosts:65000}']": "2:8: args[0]: {hosts:65000}: … 1 to 61439, got '65000'; …",
    "env: {A: '{hosts_json:x}'}": "2:10: env.A: {hosts_json:x}: expected a port from 1 to 61439, got 'x'; …",
    f"env: {{A: '{{hosts:{'9' * 5000}}}'}}": "2:10: env.A: {hosts:99…",
    "nodes: [{host: a, env: {A: '{port:a-b}'}}]": "2:28: nodes[0].env.A: … as in {port:store}, got 'a-b'; …",
    "script: y": "2:1: script: duplicate key; the first is on line 1",
    "env: {A: 1, A: 2}": "2:13: A: duplicate key; the first is on line 2",
    "module: y": "2:9: module: set one of script, module or command; got script and module",
    "env: {NOT_SET_HERE: null}": "2:21: env.NOT_SET_HERE: NOT_SET_HERE is null, but it is not set in your…",
    "env: {RANK: 0}": "2:13: env.RANK: distlaunch sets RANK for each worker; remove it",
    "env: {MASTER_PORT: 1}": "2:20: env.MASTER_PORT: distlaunch sets …, or set master_port instead",
    "nodes: [{host: a, env: {MASTER_ADDR: b}}]": "2:38: nodes[0].env.MASTER_ADDR: distlaunch sets …",
    "env: {CUDA_VISIBLE_DEVICES: '4,5'}\nvirtual_local_rank: true": "2:29: env.CUDA_VISIBLE_DEVICES: …",
    "rendezvous: {endpoint: 'a:0'}": "2:24: rendezvous.endpoint: port 0 is not in the range 1 to 65535; …",
    "nodes: [-oProxyCommand=x]": "2:9: nodes[0]: a host name can't begin with a dash",
    "nodes: ['g[3-1]']": '2:9: nodes[0]: "[3-1]" counts down; write the smaller number first',
    "nodes: [a, b]\nmaster_addr: b": "3:14: master_addr: rank 0 runs on the first node, a, …; list b first…",
    "rendezvous: none\ntimeouts: {join: 5s}": "3:18: timeouts.join: has no effect with rendezvous: none…",
    "restarts: {max: 2, window: 0s}": "2:28: restarts.window: expected a duration ≥ 1s such as…",
    "rendezvous: nothing": '2:13: rendezvous: expected "static", "c10d", "etcd-v2" or "none"…',
    "nodes: [a]\nstdin: rank 0": "3:8: stdin: rank 0 must run on this machine, without ssh, …",
    "nodes: [a, localhost]\nmin_nodes: 1": "2:12: nodes[1]: a restart can make localhost the first node, …",
    "nodes: [a, {host: b, script: b.py}]\nspares: [c]": "3:9: spares: the nodes have different scripts …",
    "nodes: [a, {host: b, role: reader}]\nmin_nodes: 1": "3:12: min_nodes: the nodes have different …",
    "nodes: [a]\nspares: [{host: b, script: b.py}]": "3:9: spares: the nodes have different scripts …",
    "nodes: [{host: a, args: [x]}]\nspares: [b]": "3:10: spares[0]: the nodes set their own args, which a …",
    "nodes: [localhost]\nspares: [a]\nstdin: rank 0": "4:8: stdin: a restart can move rank 0 to another …",
    "nodes: 2\nlauncher: ssh": "3:11: launcher: ssh needs host names: list the hosts in nodes",
    "nodes: 2\nlauncher: ssh\nslurm: {}": "3:11: launcher: ssh needs host names: a scheduler assigns …",
    "nodes: [a]\nhostfile: hosts": "3:11: hostfile: set nodes or hostfile, not both …",
    "nodes: [a, b]\nspares: [b]": "3:10: spares[0]: b is in both nodes and spares; …",
    "nodes: [a]\nspares: [c, c]": "3:13: spares[1]: c is listed twice; remove one of them",
    "nodes: [localhost, localhost]": "2:20: nodes[1]: localhost is listed twice; to simulate 2 nodes on…",
    "nodes: [a, a]": "2:12: nodes[1]: a is listed twice; to run more workers on it, raise its procs",
    "nodes: [{host: a, port: 1}, {host: a, port: 2}]": "2:29: nodes[1]: … for another SSH port, …",
    "logs: {dir: ~you}": "2:13: logs.dir: ~you is not expanded, only ~/ is…",
    "hostfile: ~you/h": "2:11: hostfile: ~you is not expanded, only ~/ is…",
    "nodes: [{host: a, workdir: ~you}]": "2:28: nodes[0].workdir: ~you is not expanded, only ~/ is…",
    "collect: [../x]": "2:11: collect[0]: write an absolute path instead of ..",
    "collect: {paths: [x], from: [b]}": "2:29: collect.from: b is not … whose nodes are node0",
    "launcher: mpirun\ncollect: [x]": "3:10: collect: can't be combined with mpirun, which places …",
    # What is refused takes no part in other checks.
    "rendezvous: {backend: c10}": '2:23: rendezvous.backend: expected "static", "c10d", "etcd-v2" or "none"…',
    "rendezvous: {backend: c10, conf: {a: b}}": "2:23: rendezvous.backend: expected…",
    "rendezvous: {backend: etcd-v2, endpoint: [1]}": "2:42: rendezvous.endpoint: expected a non-empty…",
    "rendezvous: {backend: static, endpoint: [x]}": "2:41: rendezvous.endpoint: expected a non-empty…",
    "rendezvous: {backend: etcd-v2, endpoint: 'e:1', conf: {a: [1]}}": "2:59: rendezvous.conf.a: expected…",
    "rendezvous: {backend: etcd-v2, endpoint: 'e:1'}\nnuma_binding: {a: node}": "3:15: numa_binding: …",
    "min_nodes: 2": "2:12: min_nodes: 2 is too high: the job has 1 node, because nodes is not set",
    "rendezvous: etcd-v2": "2:13: rendezvous.backend: etcd-v2 needs…",
    "timeouts: {stall: none}\non_stall: stop": "3:11: on_stall: … timeouts.stall is none; remove one of them",
}
WHOLE_FILES = {
    "nodes:\n  - a\n  - host: b\n    gpus: four\nscript: x": '4:11: nodes[1].gpus: expected …, got "four"',
    "scirpt: x": "1:1: scirpt: unknown key; did you mean script?",  # and is not also missing
    "script: python -m torch.distributed.run x.py": "1:9: script: this is a torchrun command, …",
    "script: x.py --lr 0.1": "1:9: script: write script: x.py and args: [--lr, 0.1]",
    "command: [x, '{rnak}']": "1:14: command[1]: unknown placeholder {rnak}; did you mean {rank}?…",
    "script:f.py": "1:1: put a space after the colon: script: f.py",
    "script: x\nargs: !!python/tuple [y]": "2:7: tags (!name) are not allowed in a job file",
    "name: &n x\nscript: *n": '2:9: aliases (*name) are not allowed in a job file; … quote it: "*n"',
    "name: x": "1:1: set one of script, module or command; got none",
    "# nothing": " the job file is empty; it needs at least `script:`",
    "": " the job file is empty; it needs at least `script:`",
    "just words": "1:1: expected a map of job keys, got…",
    "- script": "1:1: expected a map of job keys, got a list; to run a program, write `command: …",
    "\tscript: x": "1:1: tabs can't indent: use spaces",
    "nodes:\n\t- a": "2:1: tabs can't indent: use spaces",
    "? [a]\n: b\nscript: x": "1:3: a key must be a word",
    "script: ~you/t.py": "1:9: script: ~you is not expanded, … or ./~you for a file of that name",
    "script: ~": '1:9: script: expected a non-empty string, got ~, which YAML reads as null; quote it: "~"',
    "command: [~you/x]": "1:11: command[0]: ~you is not expanded, only ~/ is…",
}


def told(problem: str, expected: str) -> bool:
    return bool(re.fullmatch(re.escape(f"job.yaml:{expected}").replace("…", ".*"), problem))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((f"script: x\n{text}", expected) for text, expected in {**PLAIN_MISTAKES, **MISTAKES}.items()),
        *WHOLE_FILES.items(),
    ],
)
def test_places_and_explains_a_mistake(problems: Problems, tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "hosts").write_text("a\n")
    (problem,) = problems(text)
    assert told(problem, expected)


def test_a_key_need_not_be_ascii(problems: Problems) -> None:
    first, second = problems("é: 1\nscript: x\nü: [ß, {ö: 1}]")
    assert first.startswith("job.yaml:1:1: é: unknown key")
    assert second.startswith("job.yaml:3:1: ü: unknown key")


# What is no YAML, or not what was meant: the message, whole
SYNTAX = {
    "args: [*.txt]": """2:8: an unquoted value can't start with *; quote it: "*.txt\"""",
    "args: [a, *]": """2:11: an unquoted value can't start with *; quote it: "*\"""",
    "name: *.x # y": """2:7: an unquoted value can't start with *; quote it: "*.x\"""",
    "name: @x": """2:7: an unquoted value can't start with @; quote it: "@x\"""",
    "name: `x`": """2:7: an unquoted value can't start with `; quote it: "`x`\"""",
    "args: [%x, b]": """2:8: an unquoted value can't start with %; quote it: "%x\"""",
    "name: |x": """2:7: an unquoted value can't start with |; quote it: "|x\"""",
    "name: ,x": """2:7: an unquoted value can't start with ,; quote it: ",x\"""",
    "args: [!x]": """2:8: an unquoted value can't start with !; quote it: "!x\"""",
    "name: -": """2:7: an unquoted value can't be just a dash; quote it: "-\"""",
    "name: ?": """2:7: an unquoted value can't be just a question mark; quote it: "?\"""",
    "args: [?]": """2:8: an unquoted value can't be just a question mark; quote it: "?\"""",
    "args: [*x]": '2:8: aliases (*name) are not allowed in a job file; if it is plain text, quote it: "*x"',
    "args: [&x]": '2:8: anchors (&name) are not allowed in a job file; if it is plain text, quote it: "&x"',
    "name: !!python/name:os.sep y": (
        "2:7: tags (!name) are not allowed in a job file; if it is plain text, quote it: "
        '"!!python/name:os.sep y"'
    ),
    "name: !x y": '2:7: tags (!name) are not allowed in a job file; if it is plain text, quote it: "!x y"',
    "args: [--t={rank}]": """2:12: an unquoted value in a list can't contain {; quote it: "--t={rank}\"""",
    "args: [--d=${A}/x]": """2:13: an unquoted value in a list can't contain {; quote it: "--d=${A}/x\"""",
    "args: [--t=[a]]": """2:12: an unquoted value in a list can't contain [; quote it: "--t=[a]\"""",
    "args: [{rank}]": """2:8: args[0]: expected a string, got a map; quote it: "{rank}\"""",
    "args:\n  - --x: y": """3:5: args[0]: expected a string, got a map; quote it: "--x: y\"""",
    "workdir: {rank}.d": """2:16: unexpected .d after the end of the value; quote the whole: "{rank}.d\"""",
    "name: {{ x }}": "2:8: a key must be a word; quote a value that begins with {{",
    "name: a: b": """2:8: an unquoted value can't contain ": "; quote it: "a: b\"""",
    "args: [a: b: c]": """2:12: an unquoted value can't contain ": "; quote it: "a: b: c\"""",
    "env: {A: b: c}": """2:11: an unquoted value can't contain ": "; quote it: "b: c\"""",
    "name:x": "2:5: put a space after the colon: name: x",
    "env: {A:1}": "2:7: env.A:1: put a space after the colon: A: 1",
    "nodes: [{host:a}]": "2:10: nodes[0].host:a: put a space after the colon: host: a",
    "timeouts:\n  join:5s": '3:3: timeouts: … "join:5s"; put a space after the colon: join: 5s',
    "name = x": "2:1: write a colon between a key and its value: name: x",
    "name": '2:1: "name" is not followed by a colon; write key: value',
    "---\nscript: y": "2:1: a second document starts here, but a job file holds one job: put the other …",
    "name: 'x": "2:7: this ' is not closed",
    'args: ["x, b]\nname: x': '2:8: this " is not closed',
    "args: [a, b": "2:7: this [ is not closed",
    "args: [a, b\nname: z": "2:7: this [ is not closed",
    "env: {A: b\nname: z": "2:6: this { is not closed",
    "args: ['a' 'b']": "2:12: a comma is missing before 'b'",
    "args: [a, , b]": "2:11: a value is missing before ,",
    "args: [- a]": "2:8: list items in brackets take no dashes: [a, b]",
    "args: - a": "2:7: put each list item on its own line, or the list in brackets: [a]",
    "name: 'it's'": """2:11: unexpected s' after the end of the value; quote the whole: "it's\"""",
    "name: [x] | y": """2:11: unexpected | y after the end of the value; quote the whole: "[x] | y\"""",
    "name: [x] && y": """2:11: unexpected && y after the end of the value; quote the whole: "[x] && y\"""",
    "args: [a]]": "2:10: unexpected ] after the end of the value: remove it, or put it in the list",
    "name: 'x\nrole: 'y'": "3:8: a quote from an earlier line is still open here; close it on that line",
    'name: "C:\\data"': "2:10: in double quotes a backslash starts an escape; …: 'C:\\data'",
    " name: x": "2:6: this line's indentation doesn't match the lines above it…",
    "env:\n  A: 1\n B: 2": "4:2: this line's indentation doesn't match the lines above it…",
    "args:\n  - a\n - b": "4:2: this line's indentation doesn't match the lines above it…",
}


@pytest.mark.parametrize(("text", "expected"), SYNTAX.items(), ids=SYNTAX)
def test_explains_yaml_syntax_errors(problems: Problems, text: str, expected: str) -> None:
    (problem,) = problems(f"script: x\n{text}\n")
    assert told(problem, expected)
    (dos,) = problems(f"script: x\n{text}\n".replace("\n", "\r\n").encode())
    assert dos == problem


@pytest.mark.parametrize("text", [text for text, told in SYNTAX.items() if "quote it: " in told])
def test_the_suggested_quoting_loads(load: Load, problems: Problems, text: str) -> None:
    (problem,) = problems(f"script: x\n{text}\n")
    quoted = problem.partition("quote it: ")[2]
    load(f"script: x\n{text}\n".replace(json.loads(quoted), quoted))
