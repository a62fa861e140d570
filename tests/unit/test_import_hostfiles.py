"""Import of hostfiles as job files, and refusals."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.compat.draft import hostfile_draft
from distlaunch.compat.from_mpirun import mpirun_draft
from distlaunch.errors import JobError, UsageError
from distlaunch.job.nodes import parse_hostfile
from distlaunch.job.spec import JobSpec, NodeSpec
from distlaunch.job.text import fill, unfilled
from distlaunch.plan.layout import Facts, make_plan
from distlaunch.transports.ssh import Ssh
from tests.unit.drafts import comments, keys_of
from tests.unit.samples import bounded, spec_of


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("a\nb\n", {"nodes": ["a", "b"]}),
        ("a slots=4\nb slots=4 max_slots=8\n", {"nodes": ["a", "b"], "procs_per_node": 4}),
        ("a:2\nme@10.0.0.2:2\n", {"nodes": ["a", "me@10.0.0.2"], "procs_per_node": 2}),
        (
            "a slots=4\nb\nme@c slots=1",
            {"nodes": [{"host": "a", "procs": 4}, "b", {"host": "me@c", "procs": 1}]},
        ),
        ("a slots=1\na slots=2", {"nodes": ["a"], "procs_per_node": 3}),
    ],
)
def test_a_hostfile_becomes_a_job(text: str, keys: dict[str, Any]) -> None:
    assert keys_of(hostfile_draft(text, "hosts", ["x.py"])) == {"script": "x.py", **keys}


@pytest.mark.parametrize(
    ("line", "keys"),
    [
        (
            "A=1 mpirun -np 8 -H a:4,b:4 --mca btl self -x B=2 -x C python -u t.py --lr 1",
            {
                "nodes": ["a", "b"],
                "procs_per_node": 4,
                "env": {"A": "1", "B": "2", "C": None},
                "args": ["--lr", "1"],
            },
        ),
        ("mpirun -n 4 -H a:3,b python t.py", {"nodes": [{"host": "a", "procs": 3}, "b"]}),
        ("mpirun -n 4 -H a,b python t.py", {"nodes": ["a", "b"], "procs_per_node": 2}),
        (
            "mpirun -n 5 -H a:3,b:2 python t.py",
            {"nodes": [{"host": "a", "procs": 3}, {"host": "b", "procs": 2}]},
        ),
        ("mpirun --oversubscribe -np 2 python t.py | tee log", {"procs_per_node": 2}),
        (
            "mpiexec -ppn 2 -hosts a,b -wdir /w python t.py",
            {"nodes": ["a", "b"], "procs_per_node": 2, "workdir": "/w"},
        ),
        ("mpirun --hostfile h -np 8 python t.py", {"hostfile": "h"}),
    ],
)
def test_a_line_of_mpirun_becomes_a_job(line: str, keys: dict[str, Any]) -> None:
    draft = mpirun_draft([line])
    assert draft.document()["job"] == {"script": "t.py", "python": "python", **keys}
    left = [word for word in ("--mca btl=self", "--oversubscribe", "`| tee log`") if word.split()[0] in line]
    assert all(word.lstrip("-") in comments(draft) for word in left)


@pytest.mark.parametrize("line", ["mpirun -n 2", "torchrun t.py", "mpirun -n x python t.py", ""])
def test_refuses_what_is_no_line_of_mpirun(line: str) -> None:
    with pytest.raises(UsageError, match="expected"):
        mpirun_draft([line])


def test_doubled_braces_become_a_comment() -> None:
    draft = hostfile_draft("a\n", "hosts", ["x.py", "{epoch}"])
    assert "{{epoch}}: doubled braces" in comments(draft)
    assert fill(spec_of(draft.text()).program.args[0], unfilled) == "{epoch}"


@pytest.mark.parametrize(
    ("hosts", "gpus"), [("a slots=2\nb slots=2\n", 2), ("a\n", 8), ("a slots=1\nb\n", 8)]
)
def test_an_imported_hostfile_says_what_dry_run_needs(hosts: str, gpus: int) -> None:
    draft = hostfile_draft(hosts, "hosts")
    assert "set gpus_per_node to the number of GPUs per node" in comments(draft)
    text = draft.text()
    facts = dict.fromkeys(range(hosts.count("\n")), Facts("python", None))
    with pytest.raises(JobError, match="set gpus_per_node"):
        make_plan(spec_of(text), facts)
    taken = spec_of(f"{text}gpus_per_node: {gpus}\n")
    assert [node.gpus for node in taken.nodes] == [gpus] * len(facts)
    assert make_plan(taken, facts)


def test_a_hostfile_is_refused_with_its_place() -> None:
    with pytest.raises(JobError, match="hosts:2:1: slots: expected a number"):
        hostfile_draft("a\nb slots=x", "hosts")
    assert "max_slots has no equivalent" in comments(hostfile_draft("a max_slots=2", "hosts"))


@given(text=st.text("ab[]0123,-.: @#=\t\nslots", max_size=40))
@bounded(300)
def test_an_imported_hostfile_means_the_same_as_hostfile(text: str) -> None:
    try:
        copied = spec_of(hostfile_draft(text, "hosts").text())
    except JobError:
        with pytest.raises(JobError):
            _read_hosts(text)
        return
    read = _read_hosts(text)
    assert list(map(_reached, copied.nodes)) == list(map(_reached, read.nodes))


def _read_hosts(text: str) -> JobSpec:
    return spec_of("{script: x, hostfile: hosts}", hostfile=parse_hostfile(text, "hosts"))


def _reached(node: NodeSpec) -> tuple[str, str | None, str | None, int | None]:
    assert isinstance(node.reach, Ssh)
    return node.label, node.reach.host, node.reach.user or None, node.procs
