"""The script that starts an agent, run by real login shells."""

import contextlib
import importlib.util
import json
import marshal
import shutil
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from distlaunch.agent import messages, procfs
from distlaunch.agent.wire import READY_MARKER, encode_command
from distlaunch.transports.failure import NO_PYTHON, TOO_OLD, Kind, LinkFailure, ProcessEnd
from distlaunch.transports.handshake import NUDGE, PACKAGES, SHIPPED, Bundle, boot_text, candidates_text
from distlaunch.transports.ssh import Ssh
from tests.harness import (
    ROOT,
    Going,
    children_of,
    completed,
    distlaunch,
    kill,
    program,
    wait_until,
    write_job,
)

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
    command = PLAIN.argv()[-1]
    environ = {"PATH": path or "/usr/bin:/bin", **({"HOME": home} if home else {})}
    return completed(
        [shell, "-c", command],
        input=data,
        env=environ,
        text=False,
        executable=shutil.which(shell),
    )


@pytest.fixture
def fake_python(tmp_path: Path) -> Path:
    """An interpreter that tells its arguments and then copies its stdin."""
    path = tmp_path / "my python's"
    program(path, 'printf "%s|" "$0" "$@"\nexec cat')
    return path


@pytest.mark.parametrize("shell", LOGIN_SHELLS)
def test_the_first_interpreter_that_exists_gets_exactly_the_bytes_that_follow(
    shell: str, fake_python: Path
) -> None:
    payload = bytes(range(256)) * 40
    ran = start(shell, candidates_text(["/nowhere/python", str(fake_python), "cat"]) + payload)
    assert ran.stdout.startswith(READY_MARKER)
    *argv, rest = ran.stdout[len(READY_MARKER) :].split(b"|", 6)
    assert argv[0] == bytes(fake_python)
    assert [argv[1], argv[2], argv[3], argv[5]] == [b"-I", b"-S", b"-c", TOO_OLD.encode()]
    assert rest == payload
    assert (ran.returncode, ran.stderr) == (0, b"")


ODD_NAMES = ["a b", "$(id)", "`id`", "a'b", 'a"b', "a\\nb", "*", " x ", "é", "-x"]
BELOW_HOME = ["~/v/python", "~/a b/python", "~/it's/python", "~/$(id)/python", "~/~/python"]


@pytest.mark.parametrize("shell", LOGIN_SHELLS)
@pytest.mark.parametrize("named", [*(f"HERE/{name}" for name in ODD_NAMES), *BELOW_HOME, "pythonX"])
def test_finds_an_interpreter_by_path_below_the_home_or_on_the_path(
    shell: str, named: str, fake_python: Path
) -> None:
    home = fake_python.parent
    there = home / named.removeprefix("HERE/").removeprefix("~/")
    there.parent.mkdir(exist_ok=True)
    fake_python.rename(there)
    asked = named.replace("HERE", str(home))
    ran = start(shell, candidates_text([asked]), f"{home}:/usr/bin:/bin", str(home))
    assert ran.stdout.startswith(READY_MARKER + bytes(there) + b"|-I|")


def test_names_each_place_where_an_interpreter_is_missing() -> None:
    ran = start("sh", candidates_text(["~/v/python", "~you/python"]), home="/home/me")
    assert ran.stderr.decode() == f"{NO_PYTHON}: /home/me/v/python ~you/python\n"


@pytest.mark.parametrize("shell", LOGIN_SHELLS)
@pytest.mark.parametrize(
    "names", [[], ["/nowhere/python"], ["nopython3", ";id", "$(id)"]], ids=["none", "one", "odd"]
)
def test_reports_a_node_without_an_interpreter(shell: str, names: list[str]) -> None:
    ran = start(shell, candidates_text(names))
    assert (ran.returncode, ran.stdout) == (127, READY_MARKER)
    assert PLAIN.failure(ProcessEnd(ran.stderr.decode())).kind is Kind.NO_PYTHON


def test_reports_an_interpreter_that_is_too_old(tmp_path: Path) -> None:
    pretend = "import sys;sys.version_info=(3,6,9);sys.version='3.6.9 (default)';_,*_,code,name=sys.argv"
    code = f"#!{sys.executable} -IS\n{pretend};sys.argv=['-c',name];exec(code)\n"
    ran = start("sh", candidates_text([program(tmp_path / "python3.6", code)]))
    assert (ran.returncode, ran.stdout) == (1, READY_MARKER)
    assert PLAIN.failure(ProcessEnd(ran.stderr.decode())) == LinkFailure(
        Kind.OLD_PYTHON, f"{TOO_OLD} 3.6.9 (default)"
    )


TELL_MAIN = """
def main(nonce, node):
    import json, sys
    print(json.dumps([nonce, node, __name__, sys.argv]), flush=True)
"""


def test_a_real_interpreter_runs_the_agent_that_comes_through_the_pipe() -> None:
    text = boot_text(bundle_of(TELL_MAIN, TELL_MAIN), "n0nce", 3)
    ran = start("sh", candidates_text([sys.executable]) + text)
    assert ran.stderr == b""
    told = json.loads(ran.stdout[len(READY_MARKER) :])
    assert told == ["n0nce", 3, "distlaunch.agent.guardian", ["-c", TOO_OLD]]


@pytest.mark.parametrize(
    ("magic", "printed"),
    [(importlib.util.MAGIC_NUMBER, b"compiled\n"), (b"\0\0\r\n", b"source\n")],
    ids=["same version", "another version"],
)
def test_compiled_code_is_used_only_by_the_version_that_made_it(magic: bytes, printed: bytes) -> None:
    source, compiled = (f"def main(*_): print({word!r})" for word in ("source", "compiled"))
    text = boot_text(bundle_of(source, compiled, magic), "n", 0)
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


def python_3_8() -> str:
    """The oldest interpreter for which an agent is written, if it is here."""
    named = [*Path.home().glob(".pyenv/versions/3.8.*/bin/python"), shutil.which("python3.8")]
    found = [str(path) for path in named if path]
    works = (path for path in found if subprocess.run([path, "-c", ""], check=False).returncode == 0)
    return next(works, "")


def test_a_job_runs_on_python_3_8(tmp_path: Path) -> None:
    python = python_3_8()
    if not python:
        pytest.skip("python3.8 is missing")
    job = write_job(tmp_path, "print('ran')", f"gpus_per_node: 0\nprocs_per_node: 2\npython: {python}\n")
    done = distlaunch("run", str(job))
    assert (done.returncode, done.stdout.count("ran")) == (0, 2), done.stderr


@pytest.mark.parametrize("nudges", [0, 1, 3])
def test_empty_lines_before_the_candidates_are_skipped(nudges: int, fake_python: Path) -> None:
    ran = start("sh", NUDGE * nudges + candidates_text([str(fake_python)]))
    assert ran.returncode != 127
    assert NO_PYTHON.encode() not in ran.stderr


def test_a_leaving_agent_starts_no_workers(tmp_path: Path) -> None:
    """The guardian's death and the command to start are found together by an agent that was suspended."""
    worker = messages.WorkerSpec(0, ("sleep", "1000"), str(tmp_path), (), {}, {}, False, ())
    start = messages.StartWorkers(0, "r", 1, 9, {}, (worker,))
    code = "from distlaunch.agent import guardian; guardian.main('n', 0)"
    agent = Going(tmp_path, [sys.executable, "-c", code], stdin=subprocess.PIPE, cwd=ROOT)
    link, pid = agent.process.stdin, 0
    assert link is not None
    try:
        for pongs in (1, 2):  # the second comes from the loop
            link.write(encode_command(0, messages.as_object(messages.Ping())))
            agent.wait_for('"Pong"', pongs)
        pid = children_of(agent.process.pid)[0]
        kill(pid, signal.SIGSTOP)
        wait_until(lambda: procfs.state(pid) == "T", lambda: "not suspended")
        link.write(encode_command(0, messages.as_object(start)))
        kill(agent.process.pid)
        agent.process.wait(10.0)  # so that its death is there to be found
        kill(pid, signal.SIGCONT)
        agent.wait(10.0)
        assert '"WorkerStarted"' not in agent.stdout
    finally:
        agent.kill()
        link.close()
        if pid:
            with contextlib.suppress(ProcessLookupError):
                kill(pid)
