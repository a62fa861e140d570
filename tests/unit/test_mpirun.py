"""`launcher: mpirun`: the job becomes one whose only worker is mpirun."""

import re

import pytest

from distlaunch.errors import JobError
from distlaunch.job.spec import JobSpec
from distlaunch.plan.layout import Facts, make_plan, planned_workers
from distlaunch.plan.other_launchers import under_mpirun
from tests.unit.samples import spec_of

TWO = """
script: train.py
launcher: mpirun
nodes: [{host: a, procs: 2}, {host: b, procs: 1}]
gpus_per_node: 0
"""


def planned(text: str) -> JobSpec:
    return under_mpirun(spec_of(text), "/usr/bin/python3")


def test_mpirun_runs_exec_as_each_rank_on_its_node() -> None:
    spec = planned(f"{TWO}mpirun: [mpiexec, -v]\nargs: [--lr, '1', '{{{{x}}}}']")
    assert [node.label for node in spec.nodes] == ["a"]
    assert (spec.program.words, spec.args) == (
        ("mpiexec",),
        (
            *("-v", "-n", "3", "--host", "a:2,b:1", "/usr/bin/python3", "-m", "distlaunch", "exec", "--"),
            *("/usr/bin/python3", "-u", "train.py", "--lr", "1", "{x}"),
        ),
    )
    ((worker,),) = planned_workers(make_plan(spec, {0: Facts("/usr/bin/python3", 0)})).values()
    assert worker.argv == ("mpiexec", *spec.args)
    assert worker.contract["MASTER_ADDR"] == "a"


def test_variables_of_the_job_go_by_name_alone() -> None:
    spec = planned(f"{TWO}env: {{TOKEN: secret}}")
    assert spec.env["TOKEN"].text == "secret"
    assert spec.env["OMPI_MCA_mca_base_env_list"].text.split(";")[-1] == "TOKEN"
    assert "secret" not in " ".join(spec.args)


def test_ssh_config_is_passed_on_to_both_mpis() -> None:
    spec = planned(f"{TWO}ssh: {{config: /etc/ours}}")
    assert spec.env["OMPI_MCA_plm_rsh_agent"].text == "ssh -F /etc/ours"
    assert spec.env["HYDRA_LAUNCHER_EXTRA_ARGS"].text == "-F /etc/ours"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("script: t.py\nlauncher: mpirun\nnodes: [a, b]", "set procs_per_node or gpus_per_node"),
        (f"{TWO}args: ['{{rank}}']", "mpirun chooses {rank}: have the script read RANK"),
        (f"{TWO}spares: [c]", "mpirun places and starts the ranks: remove spares"),
        (f"{TWO}container: {{image: x}}", "mpirun places and starts the ranks: remove container"),
        ("script: t.py\nlauncher: mpirun\nnodes: [{host: a, env: {A: b}}]", "set env for all nodes"),
    ],
)
def test_what_mpirun_decides_is_refused(text: str, words: str) -> None:
    with pytest.raises(JobError, match=re.escape(words)):
        planned(text)


def test_a_job_without_mpirun_is_unchanged() -> None:
    spec = spec_of("script: t.py")
    assert under_mpirun(spec, "python3") is spec
