"""How agents start: by a script that real login shells run, and early, before the job file is read."""

import contextlib
import fcntl
import importlib.util
import marshal
import os
import select
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
import zlib
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from distlaunch.agent import messages, procfs
from distlaunch.agent.wire import AGENT_DIED, HELLO_PREFIX, READY_MARKER, encode, encode_command
from distlaunch.launch import process
from distlaunch.launch.link import Link, Links
from distlaunch.transports.failure import NO_PYTHON, TOO_OLD, Kind, LinkFailure, ProcessEnd
from distlaunch.transports.handshake import (
    NUDGE,
    PACKAGES,
    SHIPPED,
    Bundle,
    Streams,
    boot_text,
    candidates_text,
)
from distlaunch.transports.ssh import Ssh
from distlaunch.transports.transport import Local
from tests.harness import (
    PATIENCE_S,
    ROOT,
    Going,
    children_of,
    completed,
    descendants_of,
    distlaunch,
    kill,
    program,
    wait_gone,
    wait_until,
)
from tests.process.commands import run_one

PLAIN = Ssh("a")
LOGIN_SHELLS = [shell for shell in ("dash", "bash", "zsh", "csh", "fish") if shutil.which(shell)] or ["sh"]


def bundle_of(source: str, compiled: str, magic: bytes = importlib.util.MAGIC_NUMBER) -> Bundle:
    """An agent whose guardian is `source`, or `compiled` for interpreters of the version `magic`."""
    shipped = (ROOT / "distlaunch/agent/shipped.py").read_text()
    texts = {**dict.fromkeys(PACKAGES, ""), SHIPPED: shipped, "distlaunch.agent.guardian": source}
    codes = {name: compile(text, name, "exec") for name, text in texts.items()}
    codes["distlaunch.agent.guardian"] = compile(compiled, "guardian", "exec")
    marshalled = marshal.dumps({name: marshal.dumps(code) for name, code in codes.items()})
    return Bundle(magic, zlib.compress(marshalled), zlib.compress(repr(texts).encode()))


def start(
    shell: str, data: bytes, path: str | None = None, home: str | None = None
) -> subprocess.CompletedProcess[bytes]:
    """What happens on a node whose login shell is `shell` when `data` comes through the link."""
    env = {"PATH": path or "/usr/bin:/bin", **({"HOME": home} if home else {})}
    argv, found = [shell, "-c", PLAIN.argv()[-1]], shutil.which(shell)
    return completed(argv, input=data, env=env, text=False, executable=found)


@pytest.fixture
def fake_python(tmp_path: Path) -> Path:
    """An interpreter that tells its arguments and then copies its stdin."""
    return Path(program(tmp_path / "my python's", 'printf "%s|" "$0" "$@"\nexec cat'))


@pytest.mark.parametrize("shell", LOGIN_SHELLS)
def test_the_first_interpreter_that_exists_gets_exactly_what_follows(shell: str, fake_python: Path) -> None:
    payload = bytes(range(256)) * 40
    ran = start(shell, candidates_text(["/nowhere/python", str(fake_python), "cat"]) + payload)
    assert ran.stdout.startswith(READY_MARKER)
    *argv, _, old, rest = ran.stdout[len(READY_MARKER) :].split(b"|", 6)
    assert [*argv, old] == [bytes(fake_python), b"-I", b"-S", b"-c", TOO_OLD.encode()]
    assert rest == payload
    assert (ran.returncode, ran.stderr) == (0, b"")


ODD_NAMES = ["a b", "$(id)", "`id`", "a'b", 'a"b', "a\\nb", "*", " x ", "é", "-x"]
BELOW_HOME = ["~/v/python", "~/a b/python", "~/it's/python", "~/$(id)/python", "~/~/python"]


@pytest.mark.parametrize("shell", LOGIN_SHELLS)
@pytest.mark.parametrize("named", [*(f"HERE/{name}" for name in ODD_NAMES), *BELOW_HOME, "pythonX"])
def test_finds_an_interpreter_by_path_or_name(shell: str, named: str, fake_python: Path) -> None:
    home = fake_python.parent
    there = home / named.removeprefix("HERE/").removeprefix("~/")
    there.parent.mkdir(exist_ok=True)
    fake_python.rename(there)
    asked = named.replace("HERE", str(home))
    ran = start(shell, candidates_text([asked]), f"{home}:/usr/bin:/bin", str(home))
    assert ran.stdout.startswith(READY_MARKER + bytes(there) + b"|-I|")


@pytest.mark.parametrize("shell", LOGIN_SHELLS)
@pytest.mark.parametrize("names", ["", "~/v/python ~you/python", "nopython3 ;id $(id)"])
def test_reports_a_node_without_an_interpreter_and_each_place(shell: str, names: str) -> None:
    ran = start(shell, candidates_text(names.split()), home="/home/me")
    assert (ran.returncode, ran.stdout) == (127, READY_MARKER)
    assert ran.stderr.decode().rstrip() == f"{NO_PYTHON}: {names.replace('~/', '/home/me/')}".rstrip()
    assert PLAIN.failure(ProcessEnd(ran.stderr.decode())).kind is Kind.NO_PYTHON


def test_reports_an_interpreter_that_is_too_old(tmp_path: Path) -> None:
    pretend = "import sys;sys.version_info=(3,6,9);sys.version='3.6.9 (default)';_,*_,code,name=sys.argv"
    code = f"#!{sys.executable} -IS\n{pretend};sys.argv=['-c',name];exec(code)\n"
    ran = start("sh", candidates_text([program(tmp_path / "python3.6", code)]))
    assert (ran.returncode, ran.stdout) == (1, READY_MARKER)
    failure = LinkFailure(Kind.OLD_PYTHON, f"{TOO_OLD} 3.6.9 (default)")
    assert PLAIN.failure(ProcessEnd(ran.stderr.decode())) == failure


@pytest.mark.parametrize(
    ("magic", "printed"),
    [(importlib.util.MAGIC_NUMBER, b"compiled n0nce 3\n"), (b"\0\0\r\n", b"source n0nce 3\n")],
    ids=["same version", "another version"],
)
def test_compiled_code_is_used_only_by_the_version_that_made_it(magic: bytes, printed: bytes) -> None:
    source, compiled = (f"def main(*given): print({word!r}, *given)" for word in ("source", "compiled"))
    text = boot_text(bundle_of(source, compiled, magic), "n0nce", 3)
    ran = start("sh", candidates_text([sys.executable]) + text)
    assert (ran.stdout, ran.stderr) == (READY_MARKER + printed, b"")


def test_an_agent_imports_no_slow_module_that_it_does_not_need() -> None:
    slow = {"contextlib", "dataclasses", "shutil", "subprocess", "tempfile", "threading", "typing"}
    here = f"import sys; sys.path[:0] = [{str(ROOT)!r}]"
    code = f"{here}\nfrom distlaunch.agent import guardian, serve\nprint(*sys.modules)"
    modules = set(completed([sys.executable, "-I", "-S", "-c", code]).stdout.split())
    assert "distlaunch.agent.serve" in modules
    assert modules & {*slow, "distlaunch.agent.cpus", "distlaunch.agent.mpi"} == set()


def test_an_agent_works_under_a_limit_on_its_address_space() -> None:
    limited = "import resource; resource.setrlimit(resource.RLIMIT_AS, (1, 1))\n"
    text = f"from distlaunch.agent.poller import keep_memory\n{limited}keep_memory()\nprint('on')"
    assert completed([sys.executable, "-c", text], cwd=ROOT).stdout == "on\n"


def test_a_job_runs_on_python_3_8(tmp_path: Path) -> None:
    """The oldest one for which an agent is written."""
    named = [*map(str, Path.home().glob(".pyenv/versions/3.8.*/bin/python")), shutil.which("python3.8")]
    works = [path for path in named if path and completed([path, "-c", ""]).returncode == 0]
    if not works:
        pytest.skip("python3.8 is missing")
    done = run_one(tmp_path, "print('ran')", f"procs_per_node: 2\npython: {works[0]}\n", status=0)
    assert done.stdout.count("ran") == 2


def test_empty_lines_before_the_candidates_are_skipped(fake_python: Path) -> None:
    ran = start("sh", NUDGE * 3 + candidates_text([str(fake_python)]))
    assert ran.stdout.startswith(READY_MARKER + bytes(fake_python) + b"|-I|")


SERVES = "from distlaunch.agent import guardian; guardian.main('n', 0)"


class Agent(Going):
    """An agent that this code starts, with its end of the link."""

    def __init__(self, directory: Path, code: str = SERVES) -> None:
        super().__init__(directory, [sys.executable, "-c", code], stdin=subprocess.PIPE, cwd=ROOT)
        self._directory = directory
        assert self.process.stdin
        self.link = self.process.stdin

    def send(self, *commands: Any) -> None:
        self.link.write(b"".join(encode_command(0, messages.as_object(each)) for each in commands))

    def start_of(self, *argv: str, lease_s: float) -> messages.StartWorkers:
        """The command to start one worker."""
        worker = messages.WorkerSpec(0, argv, str(self._directory), (), {}, {}, False, ())
        return messages.StartWorkers(0, "r", 1, lease_s, {}, (worker,))

    def suspend(self) -> int:
        """Stop the agent itself, but not its guardian. Return its PID."""
        pid = children_of(self.process.pid)[0]
        kill(pid, signal.SIGSTOP)
        wait_until(lambda: procfs.state(pid) == "T", lambda: "not suspended")
        return pid

    def close(self) -> None:
        self.kill()
        self.link.close()


def test_a_leaving_agent_starts_no_workers(tmp_path: Path) -> None:
    """The guardian's death and the command to start are found together by an agent that was suspended."""
    agent, pid = Agent(tmp_path), 0
    try:
        for pongs in (1, 2):  # the second comes from the loop
            agent.send(messages.Ping())
            agent.wait_for('"Pong"', pongs)
        pid = agent.suspend()
        agent.send(agent.start_of("sleep", "1000", lease_s=9))
        kill(agent.process.pid)
        agent.process.wait(10.0)  # so that its death is there to be found
        kill(pid, signal.SIGCONT)
        agent.wait(10.0)
        assert '"WorkerStarted"' not in agent.stdout
    finally:
        agent.close()
        if pid:
            with contextlib.suppress(ProcessLookupError):
                kill(pid)


@pytest.mark.parametrize("status", [0, 3])
def test_a_workers_output_comes_before_its_exit(status: int, tmp_path: Path) -> None:
    """A check, which ends with the last exit, would miss an answer that comes after it."""
    script = f"while [ ! -e go ]; do sleep 0.02; done; echo the answer; exit {status}"
    agent = Agent(tmp_path)
    try:
        agent.send(agent.start_of("sh", "-c", script, lease_s=PATIENCE_S))
        agent.wait_for('"WorkerStarted"')
        pid = agent.suspend()
        [rank] = children_of(pid)
        (tmp_path / "go").touch()
        wait_until(lambda: procfs.state(rank) == "Z", lambda: "not over")
        kill(pid, signal.SIGCONT)
        agent.wait_for('"WorkerExited"')
        assert "the answer" in agent.stdout.partition('"WorkerExited"')[0]
    finally:
        agent.close()


HANGS = """
import ctypes
from distlaunch.agent import guardian, network

def hang(*_):  # as in a driver: no signal handler of Python runs
    lock, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    while True:
        libc.pthread_mutex_lock(lock)

network.route = hang
guardian.main("n", 0)
"""


def test_the_guardian_ends_an_agent_that_hangs_once_its_grace_period_and_lease_are_over(
    tmp_path: Path,
) -> None:
    agent = Agent(tmp_path, HANGS)
    try:
        agent.send(agent.start_of("sleep", "1000", lease_s=1))
        agent.wait_for('"WorkerStarted"')
        below = descendants_of(agent.process.pid)
        agent.send(messages.FindRoute("far"))
        agent.link.close()
        wait_gone(below, PATIENCE_S)
        assert agent.wait() == AGENT_DIED
    finally:
        agent.close()


def test_an_agent_that_is_suspended_before_it_has_started_is_killed(tmp_path: Path) -> None:
    python = program(tmp_path / "python", f"echo $$ > {tmp_path}/pid\nkill -STOP $$")
    run_one(tmp_path, "", f"python: {python}\ntimeouts: {{connect: 1s}}\n", status=69)
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


def test_a_link_can_break_the_protocol_after_its_process_has_exited() -> None:
    child = process.start(["true"], os.environ)
    link = Link(Local(), child, Streams([b""], "nonce"), bytes)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    link.distrust("a lie")
    assert select.select([link.exit_descriptor()], [], [], PATIENCE_S)[0]
    assert "a lie" in link.failure().words
    link.close()


def test_a_link_can_be_waited_for_after_its_process_was_reaped() -> None:
    child = process.start(["true"], os.environ)
    link = Link(Local(), child, Streams([b""], "nonce"), bytes)
    child.wait()
    link.kill_at(time.monotonic() + PATIENCE_S)
    link.reap(time.monotonic() + PATIENCE_S)
    link.close()


def test_a_turn_that_was_suspended_for_longer_than_its_wait_still_sees_what_has_arrived() -> None:
    """A signal handler that takes longer than the wait does to it what a suspension does."""
    read, write = os.pipe()
    links = Links(lambda frame: None, lambda node, failure: None)
    links.watch(read, lambda: os.close(read))

    def suspend(*_: object) -> None:
        os.close(write)
        time.sleep(1.0)

    before = signal.signal(signal.SIGUSR1, suspend)
    sender = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
    sender.start()
    try:
        links.turn(0.7)
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)
        links.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read)


def test_a_turn_takes_little_from_each_of_many_links(tmp_path: Path) -> None:
    """Heartbeats, Ctrl-C and failures wait until a slow disk has taken what a turn takes from all links."""
    nodes, mib, taken = range(64), 1 << 20, Counter[int]()
    links = Links(lambda frame: taken.update({frame.node: len(frame.payload)}), lambda node, failure: None)
    for node in nodes:
        output = HELLO_PREFIX + b"nonce\n" + encode(node, 0, 0, bytes(4000)) * 15
        (tmp_path / f"{node}").write_bytes(output)
        child = process.start(["cat", f"{tmp_path}/{node}"], os.environ)
        links.add(node, Link(Local(), child, Streams([], "nonce"), bytes))
        wait_until(partial(all_waits, child.stdout, len(output)), lambda: "nothing came")
    links.turn(0.0)
    assert taken.keys() == {*nodes} and taken.total() <= mib
    links.close()


def all_waits(fd: int, size: int) -> bool:
    """Whether so many bytes can be read at once."""
    return fcntl.ioctl(fd, termios.FIONREAD, bytes(4)) == size.to_bytes(4, sys.byteorder)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of distlaunch that nobody has started yet."""
    ignored = shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(ROOT / "distlaunch", tmp_path / "distlaunch", ignore=ignored))


def test_ships_the_agent_as_it_is_now_and_leaves_only_what_python_compiles(copy: Path) -> None:
    (copy.parent / "job.yaml").write_text("command: ['true']\ngpus_per_node: 0\n")
    env = {**os.environ, "PYTHONPATH": str(copy.parent)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)

    def status() -> int:
        return distlaunch("run", "job.yaml", env=env, cwd=copy.parent).returncode

    before = {path for path in copy.rglob("*") if path.is_file()}
    assert [status(), status()] == [0, 0]
    made = {path for path in copy.rglob("*") if path.is_file()} - before
    assert {(path.parent.name, path.suffix) for path in made} == {("__pycache__", ".pyc")}
    module = copy / "agent" / "serve.py"
    module.write_text(module.read_text() + "\nos._exit(9)\n")
    assert status() != 0


def test_the_agents_modules_are_not_compiled_each_time(copy: Path) -> None:
    code = (
        "import builtins, sys; sys.path[0:0] = [sys.argv[1]]\n"
        "from distlaunch.launch import opening\n"
        "opening.bundle_for(False)\n"  # now there are .pyc files of all
        "made, real = [], compile\n"
        "builtins.compile = lambda *words, **more: made.append(words[1]) or real(*words, **more)\n"
        "opening.bundle_for.cache_clear()\n"
        "opening.bundle_for(False)\n"
        "print(*made)"
    )
    completed([sys.executable, "-m", "compileall", "-q", copy], status=0)
    done = completed([sys.executable, "-c", code, str(copy.parent)])
    assert done.stdout == "distlaunch\n"  # which has no file
