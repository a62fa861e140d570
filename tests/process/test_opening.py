"""The agent that is started before the job file is read: who takes it."""

import sys
from pathlib import Path

import pytest

from distlaunch.__main__ import names_hosts
from distlaunch.job.spec import JobSpec, Logs, NodeSpec, Program
from distlaunch.links.ahead import open_ahead
from distlaunch.links.link import Link
from distlaunch.links.opening import open_links


def spec_of(node: NodeSpec, python: str | None = None) -> JobSpec:
    return JobSpec("job", (node,), Program("command", ("true",)), "/", Logs("/"), python=python)


@pytest.fixture
def early() -> Link:
    link = open_ahead(shares_stdio=False)
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
    ],
    ids=["no python", "ours", "ours on that node", "another", "another on that node"],
)
def test_an_agent_that_runs_ahead_is_taken_by_whoever_wants_our_interpreter(
    spec: JobSpec, taken: bool, early: Link
) -> None:
    links = open_links(spec, early)
    assert (links[0] is early) is taken
    links[0].discard()


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("script: t.py", False),
        ("nodes: 2\nscript: t.py", False),
        ("min_nodes: 2\n# nodes: [a]", False),
        ("nodes: [a, b]\nscript: t.py", True),
        ("script: t.py\nnodes:\n  - a", True),
        ("script: t.py\r\nnodes:\r\n- a", True),
        ("hostfile: hosts", True),
        ("container: {image: i}", True),
    ],
)
def test_no_agent_is_started_ahead_for_a_job_on_other_hosts(tmp_path: Path, text: str, hosts: bool) -> None:
    job = tmp_path / "job.yaml"
    job.write_bytes(text.encode())
    assert names_hosts("run", ["run", "-q", str(job)]) is hosts
    assert not names_hosts("torchrun", ["torchrun", str(job)])
    assert not names_hosts("run", ["run", str(tmp_path / "missing.yaml")])
