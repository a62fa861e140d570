"""The agent that is started before the job file is read: who takes it."""

import sys

import pytest

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
