"""Agents started before the job file is read, and the code that agents are started from."""

import os
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distlaunch.agent import messages
from distlaunch.job.spec import JobSpec, Logs, NodeSpec, Program
from distlaunch.launch.link import Link
from distlaunch.launch.opening import open_early, open_links
from distlaunch.launch.process import start
from distlaunch.transports.handshake import Streams
from distlaunch.transports.transport import Command, Local
from tests.harness import PATIENCE_S, ROOT, completed, distlaunch_argv


def spec_of(node: NodeSpec, python: str | None = None) -> JobSpec:
    return JobSpec("job", (node,), Program("command", ("true",), workdir="/", python=python), Logs("/"))


@pytest.fixture
def early() -> Link:
    link = open_early(shares_stdio=False)
    assert link is not None
    return link


@pytest.mark.parametrize(
    ("spec", "taken"),
    [
        (spec_of(NodeSpec("a")), True),
        (spec_of(NodeSpec("a"), sys.executable), True),
        (spec_of(NodeSpec("a", python=sys.executable), "/another/python"), True),
        (spec_of(NodeSpec("a"), "/another/python"), False),
        (spec_of(NodeSpec("a", python="/another/python"), sys.executable), False),
        (spec_of(NodeSpec("a", Command("a", ("env",)))), False),
    ],
    ids=["no python", "ours", "ours on that node", "another", "another on that node", "another host"],
)
def test_an_early_agent_is_used_or_ends_at_once(spec: JobSpec, taken: bool, early: Link) -> None:
    links = open_links(spec, early)
    assert (links[0] is early) is taken
    assert early.has_ended is not taken
    links[0].discard()
    early.discard()  # as the command does in the end, whatever has become of it


def test_an_early_agent_in_use_is_not_discarded(early: Link) -> None:
    early.send(0, messages.Ping())
    early.discard()
    assert not early.has_ended
    early.hang_up()
    early.close()


def test_a_link_can_break_the_protocol_after_its_process_has_exited() -> None:
    child = start(["true"], os.environ)
    link = Link(Local(), child, Streams([b""], "nonce"), bytes)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    link.distrust("a lie")
    assert select.select([link.exit_descriptor()], [], [], PATIENCE_S)[0]
    assert "a lie" in link.failure().words
    link.close()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of distlaunch that nobody has started yet."""
    ignored = shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(ROOT / "distlaunch", tmp_path / "distlaunch", ignore=ignored))


def test_ships_the_agent_as_it_is_now_and_leaves_only_what_python_compiles(copy: Path) -> None:
    job = copy.parent / "job.yaml"
    job.write_text("command: ['true']\ngpus_per_node: 0\n")
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def status() -> int:
        env = {**kept, "PYTHONPATH": str(copy.parent)}
        return completed(distlaunch_argv("run", str(job)), env=env, cwd=copy.parent).returncode

    before = {path for path in copy.rglob("*") if path.is_file()}
    assert [status(), status()] == [0, 0]
    made = {path for path in copy.rglob("*") if path.is_file()} - before
    assert {path.suffix for path in made} == {".pyc"}
    assert {path.parent.name for path in made} == {"__pycache__"}
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
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(copy)], check=True)
    done = completed([sys.executable, "-c", code, str(copy.parent)])
    assert done.stdout == "distlaunch\n"  # which has no file
