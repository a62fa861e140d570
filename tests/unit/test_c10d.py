"""c10d on several nodes: what a command line says of where they meet, and which number each gets."""

import re
from typing import Any

import pytest

from distlaunch.by_hand.store import numbers_of
from distlaunch.dropin.torchrun_job import job_of, notices
from distlaunch.errors import UsageError
from distlaunch.job.spec import Arrival, ByHand
from tests.unit.test_torchrun_flags import here_with, parsed

MEET = ("--rdzv-backend=c10d", "--nnodes=2", "--rdzv-endpoint=h:5")


@pytest.mark.parametrize(
    ("words", "environ", "arrival"),
    [
        ((), {}, Arrival("none", "here", None, (None, None))),
        (("--rdzv-id=j", "--node-rank=1"), {"SLURM_PROCID": "3"}, Arrival("j", "here", None, (1, 3))),
        (
            ("--rdzv-conf=is_host=True",),
            {"OMPI_COMM_WORLD_RANK": "2", "SLURM_PROCID": "0"},
            Arrival("none", "here", True, (None, 2)),
        ),
        (("--rdzv-conf=is_host=no",), {"SLURM_PROCID": "x"}, Arrival("none", "here", False, (None, None))),
    ],
)
def test_what_launchers_tell_each_other_when_they_meet(
    words: tuple[str, ...], environ: dict[str, str], arrival: Arrival
) -> None:
    here = here_with(environ=environ)._replace(hostname="here")
    met = job_of(parsed(*MEET, *words, "s.py"), here).invocation.by_hand
    assert met == ByHand("h", 5, 0, 2, arrival=arrival)


def test_the_wait_for_nodes_with_numbers() -> None:
    words = ("--nnodes=2", "--master-addr=h", "--rdzv-conf=timeout=9")
    met = job_of(parsed(*words, "s.py"), here_with()).invocation.by_hand
    assert met == ByHand("h", 29500, 0, 2, wait_s=9.0)
    assert notices(parsed(*words, "s.py")) == []
    assert notices(parsed(*words[:2], "--rdzv-conf=a=b", "s.py")) != []


@pytest.mark.parametrize(
    ("conf", "wait_s"),
    [("", 600.0), ("join_timeout=5,timeout=9", 5.0), ("timeout=9", 9.0), ("read_timeout=9", 600.0)],
)
def test_the_wait_for_nodes(conf: str, wait_s: float) -> None:
    met = job_of(parsed(*MEET, f"--rdzv-conf={conf}", "s.py"), here_with()).invocation.by_hand
    assert met is not None
    assert met.wait_s == wait_s


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "--rdzv-endpoint=:29500",
            "--rdzv-endpoint ':29500': expected a host name or address; is a variable in it empty?",
        ),
        ("--rdzv-endpoint=h:0", "--rdzv-endpoint 'h:0': several nodes need a port from 1 to 65535"),
        (
            "--rdzv-backend=static --rdzv-endpoint= --master-addr=",
            "--master-addr '': expected a host name or address",
        ),
        ("--rdzv-conf=join_timeout=soon", "--rdzv-conf join_timeout: expected a number of seconds ≥ 1"),
        ("--rdzv-conf=is_host=maybe", "--rdzv-conf is_host: expected 1 or 0, got 'maybe'"),
        ("--rdzv-conf=x", "--rdzv-conf: expected key=value,…, got 'x'"),
        ("--rdzv-endpoint=127.0.1.1:5", "--rdzv-endpoint 127.0.1.1: each of this Slurm step's 4 nodes would"),
    ],
)
def test_mistakes_about_where_nodes_meet_are_told(words: str, told: str) -> None:
    with pytest.raises(UsageError, match=re.escape(told)):
        job_of(parsed(*MEET, *words.split(), "s.py"), here_with(environ={"SLURM_STEP_NUM_NODES": "4"}))


def near(name: str, *places: int | None, near: bool = False) -> dict[str, Any]:
    return {"name": name, "near": near, "places": places}


@pytest.mark.parametrize(
    ("arrivals", "numbers"),
    [
        ([near("a", None, 2, near=True), near("b", None, 0), near("c", None, 1)], [0, 1, 2]),
        ([near("c", None, None, near=True), near("n10", None, None), near("n2", None, None)], [0, 2, 1]),
        ([near("a", 1, 0, near=True), near("a", 0, 1, near=True), near("b", 2, 2)], [1, 0, 2]),
        ([near("a", 0, 1, near=True), near("a", 0, 0, near=True)], [1, 0]),  # one --node-rank for all
        (
            [near("b", None, 0, near=True), near("a", None, 0), near("c", None, 0)],
            [0, 1, 2],
        ),  # steps of their own
        ([near("a", None, None, near=True), near("a", None, None, near=True)], [0, 1]),
    ],
)
def test_numbers_of_nodes_that_have_met(arrivals: list[dict[str, Any]], numbers: list[int]) -> None:
    assert numbers_of(arrivals) == numbers
