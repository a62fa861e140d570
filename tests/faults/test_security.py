"""Faults of trust: hostile job files, names, output and nodes reach no shell, no path and no terminal."""

import itertools
import json
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from distlaunch.cli.job_file import load_job
from distlaunch.errors import JobError, UsageError
from distlaunch.job.keys import reference
from distlaunch.schedulers import job_keys
from distlaunch.transports.handshake import SCRIPT
from tests import harness
from tests.cluster.hosts import Node, Site, parent_of
from tests.cluster.odd_hosts import UNREACHABLE
from tests.cluster.workers import SLEEPER, worker
from tests.faults.agents import FLOOD_BEFORE_THE_START, LIES, NO_HELLO, Lie, python_that_lies
from tests.faults.figures import Figures, fault
from tests.faults.memory import Meter, bare_mib
from tests.faults.networks import listening
from tests.faults.scenes import NODE_LOST, ONE, interrupted, there
from tests.harness import PATIENCE_S, children_of, command_line, distlaunch, program, running, write_job

USAGE, CONNECT_S = 2, 30.0
OPTION = "-oProxyCommand=touch$IFS$0pwned"
HOSTS: list[dict[str, Any]] = [
    {"nodes": [OPTION]},
    {"nodes": [f"me@{OPTION}"]},
    {"nodes": [{"host": OPTION, "procs": 1}]},
    {"nodes": ["-oProxyCommand=x[1-2]"]},
    {"hostfile": "hosts"},
    {"nodes": 2, "rendezvous": {"endpoint": "-oProxyCommand=x:29500"}},
]


@pytest.mark.fault(64, "a host named -oProxyCommand=…", promise="11")
def test_a_host_that_looks_like_an_option_is_refused(tmp_path: Path, figures: Figures) -> None:
    (tmp_path / "hosts").write_text(f"{OPTION} slots=1\n")
    for keys in HOSTS:
        (tmp_path / "job.yaml").write_text(json.dumps({"command": ["true"], "gpus_per_node": 0, **keys}))
        done = distlaunch("run", "job.yaml", cwd=tmp_path, status=USAGE)
        assert "a host name can't begin with a dash" in done.stderr, (keys, done.stderr)
    assert not list(tmp_path.rglob("pwned"))
    figures("ways to name it, all refused", len(HOSTS), unit="")


def injections(pwned: Path) -> list[str]:
    """Texts, each of which would make the file `pwned` in one place or other of a shell's command line."""
    act = f"touch {pwned}"
    endings = [f";{act};", f"\n{act}\n", f"|{act}", f"&{act}&"]
    quoted = [f"{quote}{ending}#" for quote in "'\"" for ending in endings]
    substituted = [f"$({act})", f"`{act}`", f"'$({act})'", f'"$({act})"']
    odd = [f"}};{act};{{", f"-oProxyCommand={act}", f"!{act}", f"%({act})", "$IFS~*?[a-z]{a,b}<>\\"]
    return [*substituted, *endings, *quoted, *odd]


RECORDING = worker("""
    import json
    json.dump({"argv": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ)}, open("seen.json", "w"))
    ready()
    wait()
""")


@pytest.mark.fault(65, "every free text of a job file is shell code", promise="11")
def test_shell_code_in_texts_reaches_no_shell(site: Site, figures: Figures) -> None:
    pwned = site.directory / "pwned"
    texts = injections(pwned)
    everything = "".join(texts)
    subprocess.run(["sh", "-c", f"true {everything}"], capture_output=True, check=False, timeout=PATIENCE_S)
    assert pwned.exists(), "a shell that is given this text is not taken in"
    pwned.unlink()
    place = site.directory / everything
    place.mkdir(parents=True)
    (place / "worker.py").write_text(RECORDING)
    (place / "config").write_text(site.ssh_config.read_text())
    python = site.directory / everything.replace("\n", "") / "python"
    python.parent.mkdir(parents=True)
    program(python, f'exec {sys.executable} "$@"')
    shared, own = ({f"{name}{i}": text for i, text in enumerate(texts)} for name in ("JOB", "NODE"))
    keys = {
        "script": f"{place}/worker.py",
        "workdir": str(place),
        "args": texts,
        "env": shared,
        "name": everything,
        "rendezvous": {"id": everything},
        "ssh": {"config": f"{place}/config", "options": [f'SetEnv=A="{texts[0]}"']},
        "nodes": [{"host": "host1", "env": own, "python": str(python)}],
        "gpus_per_node": 0,
    }
    job = site.directory / "job.yaml"
    job.write_text(json.dumps(keys))
    with running(job, cwd=site.directory) as run:
        run.wait_ready(1)
        lines = [command_line(pid) for pid in children_of(run.process.pid)]
    seen = json.loads((place / "seen.json").read_text())
    assert seen["argv"] == texts and seen["cwd"] == os.path.normpath(place)
    assert seen["env"]["TORCHELASTIC_RUN_ID"] == everything
    assert {name: seen["env"].get(name) for name in (*shared, *own)} == {**shared, **own}
    # One child, and no zombie of an agent that was started ahead in vain: that would have no command line.
    assert [line[-3:] for line in lines] == [["--", "host1", f"exec /bin/sh -c '{SCRIPT}'"]]
    assert not pwned.exists()
    figures("texts that arrived as they were", len(texts) + len(shared) + len(own) + 6, unit="")


def with_text(within: dict[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    """A mapping with a value at the end of a path such as ``a``, ``b[]``, ``c``."""
    first, *rest = path
    key = first.removesuffix("[]")
    if not rest:
        return {**within, key: value}
    inner = within.get(key)
    if first != key:
        (item,) = inner if isinstance(inner, list) and isinstance(inner[0], dict) else [{}]
        return {**within, key: [with_text({"host": "host1"} | item if key == "nodes" else item, rest, value)]}
    return {**within, key: with_text(inner if isinstance(inner, dict) else {}, rest, value)}


@pytest.mark.long
@pytest.mark.fault(65, "each key of a job file is shell code, or has a NUL", promise="11")
def test_shell_code_in_a_key_reaches_no_shell(site: Site, figures: Figures) -> None:
    """Most keys refuse such a text when the file is read; with each of the others the job is run."""
    pwned = site.directory / "pwned"
    text = "".join(injections(pwned))
    base: dict[str, Any] = {"nodes": [{"host": "host1"}], "gpus_per_node": 0, "timeouts": {"connect": "10s"}}
    base["ssh"] = {"config": "ssh_config"}
    before, numbers, accepted = site.processes(), itertools.count(), []

    def job_with(path: str, kind: str, code: str) -> Path:
        keys = base if path in ("script", "module", "command") else {**base, "command": ["true"]}
        value: Any = [code] if kind.startswith("a list") else code
        value = {"NAME": code} if kind.endswith("a map of settings") else value
        job = site.directory / f"{next(numbers)}.yaml"
        job.write_text(json.dumps(with_text(keys, path.split("."), value)))
        return job

    rows = [(path, kind) for path, kind, _, _ in reference(job_keys())]
    for path, kind in rows:
        with pytest.raises(JobError):
            load_job(str(job_with(path, kind, "a\0b")))
        for code in (text, text.replace("\n", ";")):
            job = job_with(path, kind, code)
            try:
                load_job(str(job))
            except JobError:
                continue
            except UsageError:  # of a file that a key names
                pass
            accepted.append(job)
            break
    assert not pwned.exists()

    def run(job: Path) -> int:
        done = distlaunch("run", str(job), cwd=site.directory)
        assert "Traceback" not in done.stderr and not pwned.exists(), (job.read_text(), done.stderr)
        return done.returncode

    with ThreadPoolExecutor(4) as pool:
        statuses = list(pool.map(run, accepted))
    # 1 = the code can't be brought to a directory with such a name
    assert {*statuses} <= {0, 1, USAGE, UNREACHABLE, 126, 127}, statuses
    assert statuses.count(1) <= 2
    site.assert_gone(before)
    figures("keys with such a text, one by one", 3 * len(rows), unit="")
    assert statuses.count(0) >= 10, "where hardly any job runs, hardly any text goes anywhere"


ALIASES = "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60))
YAMLS = {
    "a billion laughs": (f"a0: &a0 [x]\n{ALIASES}", "aliases"),
    "an object of Python": (
        "script: !!python/object/apply:os.system ['touch pwned']",
        "tags (!name) are not",
    ),
    "a call of Python": (
        "script: a\nname: !!python/object/apply:os.system 'touch pwned'",
        "tags (!name) are not",
    ),
    "a name of Python": ("script: a\nname: !!python/name:os.system ''", "tags (!name) are not"),
    "half a million values": (f"script: a\nargs: [{'x,' * 500_000}]", ""),
    "a million hosts": (f"script: a\nnodes: ['{'[1-99]' * 100_000}']", "names more than"),
    "a long decimal number": (f"script: a\nname: {'1' * 1_000_000}", ""),
    "a long hexadecimal number": (f"script: a\nname: 0x{'f' * 1_000_000}", ""),
    "a long number of base 60": (f"script: a\nname: 1{':1' * 250_000}", ""),
    "a long fraction of base 60": (f"script: a\nname: 1{':1' * 400}.5", ""),
    "a number that is no float": ("script: a\ntimeouts: {job: 1e+999999999}", "expected a duration"),
}
"""What is wrong with a job file → the file, and what is said of it; nothing where it may be taken."""
YAML_S = 10.0


@pytest.mark.long
@pytest.mark.fault(66, "YAML that runs code, grows or nests", promise="11")
def test_hostile_yaml_runs_nothing_and_stays_small(tmp_path: Path, figures: Figures) -> None:
    meter, met = Meter(tmp_path), list[tuple[float, float]]()
    for name, (text, words) in YAMLS.items():
        (tmp_path / "job.yaml").write_text(text)
        argv = ("dry-run", "job.yaml", "--set", "gpus_per_node=0")
        done = distlaunch(*argv, cwd=tmp_path, executable=meter.program)
        met.append((meter.cpu_s, meter.over_bare_mib))
        refused = done.returncode == USAGE and words in done.stderr
        assert refused or (not words and done.returncode == 0), (name, done.returncode, done.stderr[-200:])
        assert "Traceback" not in done.stderr, (name, done.stderr)
    assert not (tmp_path / "pwned").exists()
    figures("most memory", max(mib for _, mib in met), at_most=512.0, unit="MiB")
    figures("the slowest, CPU time", max(cpu_s for cpu_s, _ in met), at_most=YAML_S)


SECRET = "canary-4f1c9d2e77"


@pytest.mark.fault(67, "a secret from the caller's environment", promise="11")
def test_a_secret_of_the_environment_is_shown_nowhere(site: Site, figures: Figures) -> None:
    script = "echo ready {rank} $$ ${#TOKEN}; read line < go; exit 3"
    os.mkfifo(site.directory / "go")
    job = site.job(["host1", "host2", "localhost"], command=["sh", "-c", script], env={"TOKEN": None})
    options: dict[str, Any] = {"env": {**os.environ, "TOKEN": SECRET}, "cwd": site.directory}
    with running(job, "--json", **options) as run:
        run.wait_for(f" {len(SECRET)}\n", times=3)
        argvs = [command_line(int(pid)) for pid in os.listdir("/proc") if pid.isdigit()]
        with (site.directory / "go").open("w") as go:
            go.write("go\n" * 3)
        assert run.wait() == 3
        texts = {str(path): path.read_text(errors="replace") for path in run.run_directory().iterdir()}
        texts |= {"stdout": run.stdout, "stderr": run.stderr}
    for style in ("table", "shell", "torchrun", "json"):
        argv = ("dry-run", str(job), "--format", style, "--set", "nodes=[host1, host2]")
        done = distlaunch(*argv, **options, status=0)
        texts[f"dry-run --format {style}"] = done.stdout + done.stderr
    figures("argvs with it", sum(SECRET in " ".join(argv) for argv in argvs), at_most=0, unit="")
    figures("outputs and files with it", sum(SECRET in text for text in texts.values()), at_most=0, unit="")


@pytest.mark.fault(68, "umask 0", promise="11")
def test_files_are_private_under_umask_0(tmp_path: Path, figures: Figures) -> None:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    options = {"env": {**os.environ, "TMPDIR": str(scratch)}, "umask": 0}
    text = worker("os.write(2, b'words\\n'); ready(); wait()")
    with running(write_job(tmp_path, text, "nodes: 2\ngpus_per_node: 0"), **options) as run:
        run.wait_ready(2)
        made = [tmp_path / "runs", *(tmp_path / "runs").rglob("*"), *scratch.rglob("*")]
        interrupted(run)
        made += [path for path in run.run_directory().iterdir() if path not in made]
        modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in made if path.exists()}
    assert {path.name for path in modes} >= {"plan.json", "events.jsonl", "summary.json", "rank1.out"}
    open_to_all = [f"{path.name}: {mode:o}" for path, mode in modes.items() if mode & 0o022]
    which = ", ".join(open_to_all) or "none"
    figures(f"files writable by others ({which})", len(open_to_all), at_most=0, unit="")
    private = [run.run_directory(), *run.run_directory().iterdir()]
    assert {modes[path] for path in private} == {0o700, 0o600}


@pytest.mark.fault(68, "links planted where files will be", promise="11")
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_planted_links_are_not_followed(
    link: Callable[[Path, Path], None], tmp_path: Path, gate: Path, figures: Figures
) -> None:
    text = worker("ready(); open('gate').read(); os.write(2, b'words\\n')")
    names = ("rank0.err", "summary.json")
    with running(write_job(tmp_path, text, ONE)) as run:
        run.wait_ready(1)
        for name in names:
            (tmp_path / name).write_text("mine")
            link(tmp_path / name, run.run_directory() / name)
        harness.open_gate(gate)
        assert run.wait() == 0, run.stderr
    reached = [name for name in names if (tmp_path / name).read_text() != "mine"]
    figures(f"followed, made by {link.__name__}", len(reached), at_most=0, unit="")
    assert len(re.findall("is being lost|could not be written", run.stderr)) == 1, run.stderr


NAMES = [
    *("../../escaped", "/escaped", "..", ".", "a/b", "a\nb", "\x1b[2J", "~", "%s%n", "-rf", "é\u202e"),
    "x" * 5000,
]
KEPT = re.compile(
    r"runs/[^/]+-[0-9-]*-[0-9a-f]{8}/"
    r"((plan|status|summary)\.json|(events|evidence)\.jsonl|output\.index|requests|rank\d+\.(out|err))"
)
"""The files of a run."""


@pytest.mark.fault(69, "names that lead elsewhere", promise="11")
def test_names_lead_to_no_other_directory(tmp_path: Path, figures: Figures) -> None:
    place = tmp_path / "a" / "b"
    place.mkdir(parents=True)
    for name in NAMES:
        keys = {"name": name, "command": ["echo", "word"], "gpus_per_node": 0}
        distlaunch("run", "-", input=json.dumps(keys), cwd=place, status=0)
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(found) == 7 * len(NAMES)
    figures("files elsewhere", len(strange(found, place)), at_most=0, unit="")


def strange(files: Iterable[Path], directory: Path) -> list[Path]:
    """Those that are none of a run's in `directory`."""
    return [path for path in files if not KEPT.fullmatch(str(path).removeprefix(f"{directory}/"))]


HIDING = ("\x1b[8m", "\x1b[1;08;31m", "\x1b[38;5;1;8m", "\x1b[48;2;1;2;3;8m")
COMMANDS = [
    *(chr(code) for code in (*range(1, 9), *range(11, 32), *range(127, 160)) if code != 13),
    *"\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069",
    *("\x1b]0;title\x07", "\x1b]52;c;aGk=\x1b\\", "\x1b]8;;http://elsewhere\x1b\\", "\x1bP+q544e\x1b\\"),
    *("\x1b[2J", "\x1b[6n", "\x1b[?1049h", "\x1b[5i", "\x1bc", "\x1b#8", "\x9b2J"),
    *HIDING,
]
"""What terminals obey: the controls of C0, C1 and bidi, and some sequences, such as for hidden text."""
ODD = b"<\x9b2J><\x90x\x9c>\n<over\rwritten>\xff\xfe\n\0end"
BYTES = b"".join(f"<{text}>".encode() for text in COMMANDS) + ODD


def obeyed(shown: bytes) -> list[str]:
    """What a terminal would obey in all that was shown on it, other than line ends, tabs and colors."""
    text = shown.decode(errors="surrogateescape").replace("\r\n", "\n")
    hidden = [colors for colors in HIDING if colors in text]
    text = re.sub(r"\x1b\[[0-9;:]*m", "", text)
    bad = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\udc80-\udcff]"
    return hidden + re.findall(bad, text)


def worker_of(code: str) -> dict[str, Any]:
    return {"command": [sys.executable, "-c", code], "gpus_per_node": 0}


RECORD = {"message": {"message": "m", "extraInfo": {"py_callstack": BYTES.decode(errors="replace")}}}
RECORDS = f"""
import json, os
json.dump({RECORD!r}, open(os.environ["TORCHELASTIC_ERROR_FILE"], "w"))
1 / 0
"""
SPEAKERS: dict[str, tuple[str, dict[str, Any]]] = {
    "stdout": ("run", worker_of(f"import os; os.write(1, {BYTES!r})")),
    "stderr": ("run", worker_of(f"import os; os.write(2, {BYTES!r})")),
    "last output": ("run", worker_of(f"import os; os.write(2, {BYTES!r}); os._exit(3)")),
    "an error record": ("run", worker_of(RECORDS)),
    "a node's interpreter": ("run", {**worker_of(""), "python": "./speaking"}),
    "a key of the job file": ("run", {**worker_of(""), "".join(COMMANDS): 1}),
    "a value of the job file": ("run", {**worker_of(""), "backend": "".join(COMMANDS)}),
    "a path of the job file": ("run", {"script": "x", "workdir": "".join(COMMANDS), "gpus_per_node": 0}),
    "a plan as a script": ("dry-run --format=shell", {**worker_of(""), "args": [f"<{c}>" for c in COMMANDS]}),
    "an export": (
        "export kubernetes",
        {**worker_of(""), "env": {"A": "".join(COMMANDS)}, "kubernetes": {"image": "i"}},
    ),
    "a plan": ("dry-run", {**worker_of(""), "name": "".join(COMMANDS), "args": COMMANDS}),
}
"""Who says it → the command that shows it, and the job."""


@pytest.mark.parametrize(
    ("speaker", "log"),
    [
        fault(55, "binary output: NUL, bad UTF-8, what terminals obey", "10", "stdout", "rank0.out"),
        *(fault(70, f"terminal commands in {name}", "11", name, "") for name in list(SPEAKERS)[1:]),
    ],
)
def test_terminal_commands_are_escaped(speaker: str, log: str, tmp_path: Path, figures: Figures) -> None:
    """On the terminal only: what a rank prints is kept as it was."""
    command, keys = SPEAKERS[speaker]
    (tmp_path / "job.yaml").write_text(json.dumps(keys))
    program(
        tmp_path / "speaking", f"#!{sys.executable} -IS\nimport os; os.write(2, {BYTES!r}); os._exit(3)\n"
    )
    _, shown = harness.on_a_terminal(*command.split(), str(tmp_path / "job.yaml"))
    figures(f"{speaker}: terminal commands obeyed", len(obeyed(shown)), at_most=0, unit="")
    assert b"\\" in shown, shown
    if log:
        (kept,) = tmp_path.glob(f"runs/*/{log}")
        assert kept.read_bytes() == BYTES
        _, again = harness.on_a_terminal("logs", str(kept.parent))
        assert (obeyed(again), b"\\" in again) == ([], True)


@pytest.mark.fault(71, "LD_PRELOAD and PYTHONPATH in the job's env", promise="11")
def test_preloads_of_the_job_reach_workers_only(site: Site, figures: Figures) -> None:
    hooks, note = site.directory / "hooks", site.directory / "hooked"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(f"import os; print(os.getpid(), file=open({str(note)!r}, 'a'))")

    def has_them(pid: int) -> bool:
        return str(hooks).encode() in Path(f"/proc/{pid}/environ").read_bytes()

    env = {"PYTHONPATH": str(hooks), "LD_PRELOAD": str(hooks / "missing.so")}
    job = there(site, ["host1", "localhost"], SLEEPER, env=env)
    with running(job) as run:
        workers = set(run.wait_ready(2).values())
        above = {run.process.pid, *children_of(run.process.pid)}
        for pid in workers:
            while (pid := parent_of(pid)) not in (0, 1, os.getpid()):
                above.add(pid)
        others = [pid for pid in above if has_them(pid)]
        assert all(has_them(pid) for pid in workers)
        interrupted(run)
    hooked = {int(line) for line in note.read_text().split()}
    figures("processes above the workers with the variables", len(others), at_most=0, unit="")
    figures("others that were hooked", len(hooked - workers), at_most=0, unit="")
    assert hooked == workers
    preloads = [line for line in run.stderr.splitlines() if "cannot be preloaded" in line]
    assert preloads and all(line.startswith("[") for line in preloads), run.stderr


LINE_BYTES = 65536
"""No line of what people are told is longer: it may be a node's words."""


def prepared(site: Site, number: int, lies: Mapping[str, Lie], good: Sequence[str] = ("host1",)) -> Path:
    """The directory of a job on good hosts and, for each lie, one whose agent lies.

    All files are written before any job runs: a program that is still written to can't be executed.
    """
    directory = site.directory / str(number)
    nodes: list[Node] = [{"host": host, "gpus": 0} for host in good]
    for i, lie in enumerate(lies.values()):
        (directory / str(i)).mkdir(parents=True)
        python = python_that_lies(directory / str(i) / "python", lie)
        nodes.append({"host": site.name(f"liar{number}-{i}", "host2"), "python": python, "gpus": "auto"})
    keys = {"nodes": nodes, "command": ["true"], "timeouts": {"connect": "20s", "lease": "5m"}}
    (directory / "job.yaml").write_text(json.dumps(keys | {"ssh": {"config": str(site.ssh_config)}}))
    return directory


def meet(directory: Path, lies: Mapping[str, Lie], meter: Meter) -> tuple[int, int, float]:
    """Run the job: every lie is said, and told of as it should be, and nothing else is written.

    Its status, the longest line that was told, and the seconds that it took.
    """
    own, began = set(directory.rglob("*")), time.monotonic()
    done = distlaunch("run", str(directory / "job.yaml"), executable=meter.program)
    took_s = time.monotonic() - began
    context = (list(lies), done.returncode, done.stderr[-1000:])
    assert done.returncode in (0, 1, USAGE, UNREACHABLE, NODE_LOST, 126), context
    assert "Traceback" not in done.stderr, context
    for i, (name, lie) in enumerate(lies.items()):
        said = directory / str(i) / "lied"
        assert said.exists(), f"{name}: was not said"
        own.add(said)
        assert lie.told.format(host=f"liar{directory.name}-{i}") in done.stderr, (name, *context)
        assert bool(done.returncode) == bool(lie.told), (name, *context)
    made = {path for path in directory.rglob("*") if path.is_file()} - own - {meter.result, meter.program}
    assert not strange(made, directory), context
    return done.returncode, max(map(len, done.stderr.splitlines())), took_s


@pytest.mark.long
@pytest.mark.fault(72, "agents that lie, flood and name paths", promise="10, 11")
def test_lies_of_agents_harm_nobody_else(site: Site, figures: Figures) -> None:
    """Lies that do no harm, and those in place of a hello, are each told in one run; others end the run."""
    before, _ = site.processes(), bare_mib()
    groups: dict[str, dict[str, Lie]] = {}
    for name, lie in LIES.items():
        groups.setdefault(lie.told if lie.told in ("", NO_HELLO) else name, {})[name] = lie
    directories = [prepared(site, number, lies) for number, lies in enumerate(groups.values())]
    directories.append(prepared(site, len(directories), FLOOD_BEFORE_THE_START, good=()))
    meters = [Meter(directory) for directory in directories]
    with ThreadPoolExecutor(3) as pool:
        met = pool.map(meet, directories, [*groups.values(), FLOOD_BEFORE_THE_START], meters)
        statuses, longest, took_s = zip(*met, strict=True)
    site.assert_gone(before)
    assert statuses[-1] == NODE_LOST
    figures("the slowest run", max(took_s), at_most=2 * CONNECT_S)
    figures("most memory", max(meter.over_bare_mib for meter in meters), at_most=64.0, unit="MiB")
    figures("the longest line told", max(longest), at_most=LINE_BYTES, unit="bytes")


@pytest.mark.fault(73, "sockets that listen, before, during and after", promise="11")
def test_no_socket_listens_for_a_run(site: Site, figures: Figures) -> None:
    hosts = list(site.bed.hosts.values())
    # The controller runs on host4, where nobody else makes sockets.
    enter = f"nsenter --net=/proc/{hosts[3].pid}/ns/net"
    inside = program(site.directory / "inside", f'exec {enter} {sys.executable} "$@"')
    job = site.job(["host1", "host2", "host3"], command=["sh", "-c", "echo ready {rank} $$; exec sleep 1000"])
    before = {host.name: listening(host) for host in hosts}
    assert all(before.values()), "not even the hosts' own sshd is seen"
    with running(job, executable=inside) as run:
        run.wait_ready(3)
        assert os.stat(f"/proc/{run.process.pid}/ns/net") == os.stat(f"/proc/{hosts[3].pid}/ns/net")
        during = {host.name: listening(host) for host in hosts}
        interrupted(run)
    after = {host.name: listening(host) for host in hosts}
    for when, found in (("while it runs", during), ("after it", after)):
        more = {name: found[name] ^ before[name] for name in found if found[name] != before[name]}
        figures(f"sockets of difference {when}", sum(map(len, more.values())), at_most=0, unit="")
