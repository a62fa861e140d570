"""Every key of a job file, with its default and the value it becomes; nodes, paths and durations."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from distlaunch.cli.job_file import load_job
from distlaunch.job.keys import JOB, reference
from distlaunch.job.spec import Binding, Collect, EnvValue, Limits, Sync
from distlaunch.job.types import duration_text
from distlaunch.schedulers import job_keys
from distlaunch.supervisor.ranks import unstarted_advice
from distlaunch.transports.container import Container
from distlaunch.transports.ssh import Ssh
from distlaunch.transports.transport import Command, Local
from tests.unit.samples import Load, Problems, found_at, spec_of

ETCD, TSH = "backend: etcd-v2, endpoint: 'e:1'", "command: [tsh, '{host}']"
PODMAN, MOUNTS = Container("i", "podman", before=("-r",)), ("/a", "{here}/b:/c", "~/d")
# Keys outside of SECTIONS: what is written, where it shows, what it becomes ({here} is the file's directory).
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
    "success": ("success: any", "success", "any"),
    "stdin": ("stdin: rank 0", "stdin", "rank 0"),
    "nodes[].script": ("nodes: [{host: a, script: s.py}]", "nodes.0.script", "s.py"),
    "nodes[].args": ("nodes: [{host: a, args: [x, '{rank}']}]", "nodes.0.args", ("x", "{rank}")),
    "nodes[].role": ("nodes: [{host: a, role: reader}]", "nodes.0.role", "reader"),
    "nodes[].env": ("nodes: [{host: a, env: {A: b}}]", "nodes.0.env", {"A": EnvValue("b")}),
    "hostfile": ("hostfile: hosts", "nodes.0.reach", Ssh("from-hostfile")),
    "gpus_per_node": ("gpus_per_node: 8", "nodes.0.gpus", 8),
    "procs_per_node": ("procs_per_node: 6", "nodes.0.procs", 6),
    "numa_binding": ("numa_binding: core-complex", "placement.binding", Binding("core-complex")),
    "cpu_binding": ("cpu_binding: [0-3, 4, '5,7']", "placement.binding.cpus", ("0-3", "4", "5,7")),
    "backend": ("backend: gloo", "backend", "gloo"),
    "rendezvous.endpoint": ("master_port: 1\nrendezvous: {endpoint: 'm:29500'}", "rendezvous.port", 29500),
    "rendezvous.backend": (f"rendezvous: {{{ETCD}}}", "rendezvous.etcd.endpoint", "e:1"),
    "rendezvous.conf": (f"rendezvous: {{{ETCD}, conf: {{a: 9}}}}", "rendezvous.etcd.conf", {"a": "9"}),
    "rendezvous.id": ("rendezvous: {id: my-job}", "rendezvous.id", "my-job"),
    "master_addr": ("master_addr: 10.0.0.1", "rendezvous.host", "10.0.0.1"),
    "master_port": ("master_port: 29501", "rendezvous.port", 29501),
    "script": ("script: train.py", "program.words", ("train.py",)),
    "module": ("module: pkg.train", "program.words", ("pkg.train",)),
    "command": ("command: [./a.out, -x, 3]", "program.words", ("./a.out", "-x", "3")),
    "args": ("args: [--epochs, '10', -3]", "program.args", ("--epochs", "10", "-3")),
    "env": ("env: {A: b, N: 1}", "program.env", {"A": EnvValue("b"), "N": EnvValue("1")}),
    "python": ("python: venv/bin/python", "program.python", "{here}/venv/bin/python"),
    "workdir": ("workdir: sub/..", "program.workdir", "{here}"),
    "timeouts.connect": ("timeouts: {connect: 5s}", "limits.connect_s", 5.0),
    "timeouts.join": ("timeouts: {join: 2m}", "limits.join_s", 120.0),
    "timeouts.stop": ("timeouts: {stop: 250ms}", "limits.stop_s", 0.25),
    "timeouts.job": ("timeouts: {job: 1.5h}", "limits.job_s", 5400.0),
    "timeouts.lease": ("timeouts: {lease: 6s}", "limits.lease_s", 6.0),
    "timeouts.rejoin": ("timeouts: {rejoin: 1m}", "limits.rejoin_s", 60.0),
    "timeouts.stall": ("timeouts: {stall: 1h}", "limits.stall_s", 3600.0),
    "restarts": ("restarts: 3", "restarts.most", 3),
    "restarts.max": ("restarts: {max: 3}", "restarts.most", 3),
    "restarts.backoff": ("restarts: {backoff: 5s}", "restarts.backoff_s", 5.0),
    "restarts.window": ("restarts: {window: 2h}", "restarts.window_s", 7200.0),
    "min_nodes": ("nodes: 3\nmin_nodes: 2", "fewest", 2),
    "spares": ("nodes: [a]\nspares: [z]", "pool.1.reach", Ssh("z")),
    "elastic.grow": ("elastic: {grow: now}", "membership.grow", "now"),
    "role": ("role: trainer", "program.role", "trainer"),
    "virtual_local_rank": ("virtual_local_rank: true", "placement.one_device", True),
    "on_warning": ("on_warning: USR1", "limits.on_warning", "USR1"),
    "on_stall": ("on_stall: stop", "limits.on_stall", "stop"),
    "logs.dir": ("logs: {dir: out}", "logs.directory", "{here}/out"),
    "logs.console": ("logs: {console: [0, 3]}", "logs.console", (0, 3)),
    "logs.fold": ("logs: {fold: true}", "logs.fold", True),
    "logs.limit": ("logs: {limit: 2MiB}", "logs.limit", 2 << 20),
    "logs.watch": ("logs: {watch: 'loss ([0-9.]+)'}", "logs.watch", "loss ([0-9.]+)"),
    "notify.command": ("notify: {command: [mail, me]}", "notify.command", ("mail", "me")),
    "notify.on": ("notify: {command: [x], on: [failed]}", "notify.on", ("failed",)),
    "metrics.file": ("metrics: {file: job.prom}", "metrics", "{here}/job.prom"),
    "sync.tree": ("sync: true", "sync.tree", True),
    "sync.include": ("sync: {include: [/out]}", "sync", Sync(True, include=("/out",))),
    "sync.exclude": ("sync: {exclude: ['*.pt']}", "sync", Sync(True, exclude=("*.pt",))),
    "sync.to": ("sync: {to: ~/code}", "sync.base", "~/code"),
    "sync.limit": ("sync: {limit: 2MiB}", "sync.limit", 2 << 20),
    "setup.run": ("sync: true\nsetup: {run: make}", "setup.run", "make"),
    "setup.key": ("sync: true\nsetup: {run: make, key: [a.txt]}", "setup.files", ("a.txt",)),
    "setup.from": ("sync: true\nsetup: {from: controller}", "setup.kind", "controller"),
    "timeouts.setup": ("timeouts: {setup: 5m}", "limits.setup_s", 300.0),
    "files": ("sync: true\nfiles: [a.yaml]", "sync.files", ("{here}/a.yaml",)),
    "collect.paths": ("collect: [a/b, '*.pt']", "collect", Collect(("a/b", "*.pt"))),
    "collect.from": ("nodes: [a, b]\ncollect: {paths: [x], from: [b]}", "collect.nodes", ("b",)),
    "collect.limit": ("collect: {paths: [x], limit: 2KB}", "collect.limit", 2000),
    "checks.skip": ("checks: {skip: [place]}", "unchecked", ("place",)),
    "ssh.config": ("nodes: [a]\nssh: {config: c}", "nodes.0.reach.options.config", "{here}/c"),
    "ssh.options": ("nodes: [a]\nssh: {options: [A=b]}", "nodes.0.reach.options.words", ("A=b",)),
    "ssh.persist": ("nodes: [a]\nssh: {persist: 10m}", "nodes.0.reach.options.persist_s", 600),
    "launcher.command": (
        f"nodes: [a]\nlauncher: {{{TSH}}}",
        "nodes.0.reach",
        Command("a", ("tsh", "{host}")),
    ),
    "launcher.shell": (f"nodes: [a]\nlauncher: {{{TSH}, shell: true}}", "nodes.0.reach.shell", True),
    "mpirun": ("mpirun: [mpirun, -v]", "mpirun.argv", ("mpirun", "-v")),
    "container.image": ("container: {image: 'a/b:1'}", "container.image", "a/b:1"),
    "container.runtime": ("container: {image: i, runtime: [podman, -r]}", "container", PODMAN),
    "container.mounts": ("container: {image: i, mounts: [/a, b:/c, ~/d]}", "container.mounts", MOUNTS),
    "container.options": ("container: {image: i, options: [-v]}", "container.options", ("-v",)),
    "container.env": ("container: {image: i, env: {A: 1, B: null}}", "container.env", {"A": "1", "B": None}),
    "restarts.on": ("restarts: {max: 1, on: [node_lost, oom]}", "restarts.on", ("node_lost", "oom")),
    "restarts.on[].exit": ("restarts: {max: 1, on: [oom, exit: [75, 3]]}", "restarts.on", ("oom", 75, 3)),
    "restarts.never": ("restarts: {max: 1, never: [exception]}", "restarts.never", ("exception",)),
    "restarts.repeat": ("restarts: {repeat: true}", "restarts.repeat", True),
    "restarts.requeue": ("restarts: {requeue: 4}", "restarts.requeue", 4),
    "launcher": ("nodes: [a]\nlauncher: local", "nodes.0.reach", Local()),
}


QUEUE = "nodes: 3, time: 1d12h, setup: [module load cuda, conda activate x], extra: [-x 1]"
"""Keys of every scheduler."""
# Sections whose keys arrive as they are written, but for those that are listed beside them.
SECTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "slurm": (
        f"""{{partition: gpu, account: lab, qos: high, constraint: a, gpus: 'a:8', gres: 'gpu:8', mem: 0,
        cpus_per_task: 12, exclusive: true, nodelist: 'n[1-2]', exclude: n7, dependency: 'afterok:1',
        signal: USR1@120, comment: mine, {QUEUE}}}""",
        {"time": "1-12:00:00"},
    ),
    "grid_engine": (
        f"{{queue: q, project: p, pe: mpi, slots: 8, gpus: gpu=8, {QUEUE}}}",
        {"time": "36:00:00"},
    ),
    "pbs": (
        f"{{queue: q, project: p, account: a, select: 4:n=8, cpus: 64, gpus: 8, mem: 200gb, {QUEUE}}}",
        {"time": "36:00:00"},
    ),
    "lsf": (f"{{slots: 8, gpus: 'num=2:mode=shared', queue: q, project: p, {QUEUE}}}", {"time": "36:00"}),
    "flux": (f"{{cpus: 64, gpus: 8, queue: gpu, bank: lab, {QUEUE}}}", {"time": "129600s"}),
    "kubernetes": (
        """{image: a/b:1, namespace: ml, selector: app=train, container: main, labels: {team: nlp},
        annotations: {x.io/a: 1}, node_selector: {gpu: h100}, tolerations: [{key: gpu, operator: Exists}],
        queue: gpus, resources: {limits: {cpu: 8}, requests: {memory: 64Gi}}, volumes: [{mount: /d, claim: c,
        sub_path: s, read_only: true}, {mount: /e, config_map: c}, {mount: /f, secret: c}, {mount: /g,
        host_path: /x}], secrets: {A: {secret: s, key: k}}, service_account: me, image_pull_secrets: [ghcr],
        priority_class: high, ttl: 1h, runtime: torch-nightly, extra: {spec: {suspend: true}}}""",
        {"annotations": {"x.io/a": "1"}, "resources.limits": {"cpu": "8"}, "ttl": 3600.0},
    ),
}


@pytest.mark.parametrize("key", KEYS)
def test_every_key_arrives_in_the_spec(load: Load, tmp_path: Path, key: str) -> None:
    text, path, expected = KEYS[key]
    (tmp_path / "hosts").write_text("from-hostfile\n")
    has_program = key in ("script", "module", "command")
    found = found_at(load(text if has_program else f"{text}\nscript: x.py"), path)
    if "{here}" in repr(expected):
        found, expected = repr(found), repr(expected).replace("{here}", str(tmp_path))
    assert found == expected


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_of_a_section_arrives_in_the_spec(load: Load, section: str) -> None:
    text, changed = SECTIONS[section]
    spec = load(f"script: x.py\nnodes: 2\n{section}: {text}")
    start = section if section == "kubernetes" else f"sections.{section}"
    written = yaml.safe_load(text)
    resources = {f"resources.{name}": value for name, value in written.pop("resources", {}).items()}
    for key, value in {**written, **resources, **changed}.items():
        assert found_at(spec, f"{start}.{key}") == (tuple(value) if isinstance(value, list) else value)


def is_written(key: str, document: Any) -> bool:
    """Whether a document has a key; `[]` in it is any item of a list, NAME any name."""
    name, _, rest = key.partition(".")
    inside: list[Any] = [document[name]] if name in document else []
    if name == "NAME":
        inside = list(document.values())
    elif name.endswith("[]"):
        inside = document.get(name.removesuffix("[]"), [])
    return any(is_written(rest, each) if rest else each is not None for each in inside)


def test_the_tables_above_have_every_key() -> None:
    rows = [key for key, *_ in reference(job_keys())]
    parents = {key for key in rows if any(other.startswith(f"{key}.") for other in rows)}
    of_sections = {key for key in rows if key.partition(".")[0] in SECTIONS} - parents
    written = {section: yaml.safe_load(text) for section, (text, _) in SECTIONS.items()}
    assert [key for key in of_sections if not is_written(key, written)] == []
    assert set(KEYS) == set(rows) - parents - of_sections | {"restarts", "launcher"}


def test_defaults_of_the_smallest_job(load: Load, tmp_path: Path) -> None:
    spec = load("script: train.py")
    assert (spec.name, [node.reach for node in spec.nodes], spec.backend) == ("job", [Local()], "auto")
    assert (spec.program.workdir, spec.logs.directory) == (str(tmp_path), f"{tmp_path}/runs")
    assert spec.limits == Limits(30.0, 600.0, 10.0, None, 30.0, 300.0, 600.0)
    assert (spec.rendezvous.host, spec.rendezvous.port, spec.program.python) == (None, None, None)
    assert (spec.program.args, spec.program.env) == ((), {})


# Nodes


@pytest.mark.parametrize(
    ("nodes", "expected"),
    {
        "\n  - b[03-04]\n  - {host: 'a[1,3]', gpus: 2}\n  - z": [*map(Ssh, ("b03", "b04", "a1", "a3", "z"))],
        "['fe80::1%eth0', 10.0.0.1]": [Ssh("fe80::1%eth0"), Ssh("10.0.0.1")],
        "[me@a, {host: me@b, user: you}, me@corp@c]": [Ssh("a", "me"), Ssh("b", "you"), Ssh("c", "me@corp")],
        "[localhost]": [Local()],
        "[{host: localhost, port: 2222}]": [Ssh("localhost", None, 2222)],
        "[localhost]\nlauncher: ssh": [Ssh("localhost")],
    }.items(),
)
def test_nodes_are_names_ranges_users_or_this_machine(load: Load, nodes: str, expected: list[Any]) -> None:
    assert [node.reach for node in load(f"script: a\nnodes: {nodes}").nodes] == list(expected)


# Paths and durations


PATHS = {
    "workdir: ../w": ("program.workdir", "{parent}/w"),
    "workdir: /abs/w/.": ("program.workdir", "/abs/w"),
    "workdir: ~/w/../v": ("program.workdir", "~/v"),
    "workdir: ~/../v": ("program.workdir", "~/../v"),
    "workdir: '~'": ("program.workdir", "~"),
    "workdir: ~//w": ("program.workdir", "~/w"),
    "workdir: ./~/w": ("program.workdir", "{here}/~/w"),
    "nodes: [{host: b, workdir: ~/w}]": ("nodes.0.workdir", "~/w"),
    "nodes: [{host: b, python: ~/v/py}]": ("nodes.0.python", "~/v/py"),
    "python: python3.12": ("program.python", "python3.12"),  # PATH has it
    "python: ~/v/python": ("program.python", "~/v/python"),
    "logs: {dir: ~/r}": ("logs.directory", "/home/me/r"),  # here
    "nodes: [a]\nssh: {config: ~/c}": ("nodes.0.reach.options.config", "/home/me/c"),  # here, too
}


def test_paths_are_relative_to_the_file_or_to_a_home(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    found = {text: (path, found_at(load(f"script: a\n{text}"), path)) for text, (path, _) in PATHS.items()}
    directories = {"parent": tmp_path.parent, "here": tmp_path}
    assert found == {text: (path, value.format(**directories)) for text, (path, value) in PATHS.items()}


def test_a_workdir_is_absolute(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load("script: t.py")
    monkeypatch.chdir(tmp_path)
    assert load_job("job.yaml").program.workdir == str(tmp_path)


def test_durations_become_seconds(load: Load) -> None:
    printed = {"0.5s": 0.5, "1s": 1, "90s": 90, "10m": 600, "90m": 5400, "2h": 7200, "1d": 86400}
    others = {"500ms": 0.5, "1.5 h": 5400, "45": 45, "1h30m": 5400, "1h 1m 1s": 3661}
    for text, seconds in (printed | others).items():
        assert load(f"script: a\ntimeouts: {{job: {text}}}").limits.job_s == seconds
    assert list(map(duration_text, printed.values())) == [*printed]


@pytest.mark.parametrize(
    "text",
    [
        *("10 minutes", "1h30", "1h-30m", "-5s", "-1", "soon", "true", "[1s]", ".inf", ".nan", "''"),
        *("9" * 400, "9" * 400 + "s", "9" * 306 + "d"),  # no float holds so many seconds
    ],
)
def test_refuses_what_is_not_a_duration(problems: Problems, text: str) -> None:
    (problem,) = problems(f"script: a\ntimeouts: {{connect: {text}}}")
    assert problem.startswith('job.yaml:2:21: timeouts.connect: expected a duration such as "30s" or "10m"')


# Defaults


DEFAULTS = {key: re.split("[:;]", default)[0] for key, _, _, default in reference(job_keys())}
WRITTEN_DEFAULTS = [
    key for key, value in DEFAULTS.items() if value and " " not in value and value not in DEFAULTS
]
"""Those that are a word, a number or a duration; not those told in words, or another key's."""
assert {"numa_binding", "cpu_binding", "timeouts.stall", "ssh.persist"} <= set(WRITTEN_DEFAULTS)


@pytest.mark.parametrize("key", WRITTEN_DEFAULTS)
def test_a_documented_default_can_be_written_out(load: Load, key: str) -> None:
    section, _, inner = key.rpartition(".")
    needed = {"container": "image: x", "collect": "paths: [x]"}.get(section, "")
    setting = f"{section}: {{{needed and f'{needed}, '}{inner}: {DEFAULTS[key]}}}" if section else ""
    spec = load(f"script: x\n{setting or f'{key}: {DEFAULTS[key]}'}")
    present = needed or section in ("restarts", "slurm", "sync")
    plain = load(f"script: x\n{f'{section}: {{{needed}}}' if present else ''}")
    assert spec._replace(places={}) == plain._replace(places={})


@pytest.mark.parametrize(("lease", "interval_s"), [("3s", 0.5), ("30s", 5.0), ("10m", 5.0)])
def test_heartbeats_keep_alive_agents_that_do_not_know_the_lease_yet(lease: str, interval_s: float) -> None:
    assert spec_of(f"script: t.py\ntimeouts: {{lease: {lease}}}").limits.heartbeat_s == interval_s


@pytest.mark.parametrize("off", ["none", "null", "~"])
def test_bindings_and_the_stall_timeout_can_be_switched_off(load: Load, off: str) -> None:
    assert load("script: x\ntimeouts: {stall: none}").limits.stall_s is None
    assert load(f"script: x\nnuma_binding: {off}\ncpu_binding: {off}").placement.binding is None
    assert load(f"script: x\nnuma_binding: {off}\ncpu_binding: cores").placement.binding == Binding("cores")


def test_a_stall_restarts_only_a_job_that_may_restart(load: Load, problems: Problems) -> None:
    text = "script: x\non_stall: restart\n"
    words = "restart has no effect without restarts: set restarts.max, or use on_stall: stop"
    assert problems(text) == [f"job.yaml:2:11: on_stall: {words}"]
    for keys in ("restarts: 1", "restarts: {requeue: 1}", "nodes: 2\nmin_nodes: 1"):
        assert load(text + keys).limits.on_stall == "restart"


def test_reports_all_mistakes_in_the_order_of_the_file(problems: Problems) -> None:
    text = """
nodes: [a, {host: b, gpus: four}, -o, "g[2-1]"]
nproc_per_node: 3
backend: gluu
args: [x, [y]]
env: {RANK: 1, NOT_SET_HERE: null}
timeouts: {join: never, stop: 5s, stp: 1}
"""
    places = ["2:1", "2:28", "2:35", "2:39", "3:1", "4:10", "5:11", "6:13", "6:30", "7:18", "7:35"]
    assert [problem.split(" ")[0].rstrip(":") for problem in problems(text)] == [
        f"job.yaml:{place}" for place in places
    ]
    assert len(problems("script: x\nenv: {NOT_SET_HERE: [1]}")) == 1


def test_leaves_other_braces_alone(load: Load) -> None:
    words = ['{"a": 1}', "{}", "{1}", "${HOME}", "{a,b}", "{{nope}}", "{ rank }", "{a b}"]
    assert load(f"script: x\nargs: {words}").program.args == tuple(words)


def test_a_job_file_may_be_piped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    read, write = os.pipe()
    os.write(write, b"\xef\xbb\xbfscript: t.py")  # a byte order mark, as some editors write it
    os.close(write)
    spec = load_job(f"/dev/fd/{read}")
    os.close(read)
    advice = f" (by default the current directory, {tmp_path})"
    assert unstarted_advice(spec, 0, "workdir", 0) == advice
    assert (spec.name, spec.program.workdir, spec.logs.directory) == (
        "job",
        f"{tmp_path}",
        f"{tmp_path}/runs",
    )


def test_every_suggested_key_exists() -> None:
    known = {key for key, *_ in reference(job_keys())}
    assert {name for name in JOB.foreign.values() if name != "run --detach"} <= known
    assert not set(JOB.foreign) & set(JOB.fields)


def test_a_missing_variable_suggests_another(problems: Problems, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_ACCESS_TOKEN", "x")
    (problem,) = problems("script: x\nenv: {MY_ACESS_TOKEN: null}")
    assert "; did you mean MY_ACCESS_TOKEN? Otherwise, export it, or write a value" in problem


def test_an_argument_keeps_its_spelling(load: Load) -> None:
    words = ["010", "0x1F", "1_000", "12:30:45", "+7", "0b11", "0o17", "yes", "off", "0.10", "1.50e+3"]
    lines = [f"V{i}: {word}" for i, word in enumerate(words)]
    program = load(f"script: x\nargs: [{', '.join(words)}]\nenv: {{{', '.join(lines)}}}").program
    assert program.args == tuple(words) == tuple(value.text for value in program.env.values())
