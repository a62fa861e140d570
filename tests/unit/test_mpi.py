"""MPI: `launcher: mpirun`, and the place of a task that Open MPI 4.1 or MPICH 4.0 has started."""

import re
import socket

import pytest

from distlaunch.cli import exec_task
from distlaunch.cli.exec_task import node_of, task_of
from distlaunch.errors import DistlaunchError, JobError, UsageError
from distlaunch.job.spec import JobSpec
from distlaunch.plan.other_launchers import under_mpirun
from distlaunch.plan.placement import Facts, make_plan
from distlaunch.plan.workers import planned_workers
from distlaunch.schedulers.task import mpi_task
from tests.unit.samples import spec_of
from tests.unit.tasks import task_environment, variables

TWO = "script: t.py\nlauncher: mpirun\nnodes: [{host: a, procs: 2}, b]\nprocs_per_node: 1\ngpus_per_node: 0\n"


def planned(text: str) -> JobSpec:
    return under_mpirun(spec_of(text), "/usr/bin/python3")


def test_mpirun_runs_exec_as_each_rank_on_its_node() -> None:
    spec = planned(f"{TWO}mpirun: [mpiexec, -v]\nargs: [--lr, '{{job_id}}', '{{{{x}}}}']")
    assert [node.label for node in spec.nodes] == ["a"]
    assert (*spec.program.words, *spec.program.args) == (
        *("mpiexec", "-v", "-n", "3", "--host", "a:2,b:1", "/usr/bin/python3", "-m", "distlaunch", "exec"),
        *("--", "/usr/bin/python3", "-u", "t.py", "--lr", "{job_id}", "{{x}}"),
    )
    plain = spec_of("script: t.py")
    assert under_mpirun(plain, "python3") is plain
    ((worker,),) = planned_workers(make_plan(spec, {0: Facts("/usr/bin/python3", 0)})).values()
    assert worker.argv == ("mpiexec", *spec.program.args[:-2], "job", "{x}")
    assert worker.contract["MASTER_ADDR"] == "a"


def test_mpirun_gets_only_names_of_variables_and_ssh_config() -> None:
    spec = planned(f"{TWO}env: {{TOKEN: secret}}\nssh: {{config: /etc/ours}}")
    env = {name: value.text for name, value in spec.program.env.items()}
    assert env["TOKEN"] == "secret"
    assert env["OMPI_MCA_mca_base_env_list"].split(";")[-1] == "TOKEN"
    assert "secret" not in " ".join(spec.program.args)
    assert env["OMPI_MCA_plm_rsh_agent"] == "ssh -F /etc/ours"
    assert env["HYDRA_LAUNCHER_EXTRA_ARGS"] == "-F /etc/ours"


def test_ranks_get_the_mpi_backend_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    exported = planned(f"{TWO}backend: mpi").program.env["OMPI_MCA_mca_base_env_list"]
    assert "DISTLAUNCH_BACKEND" in exported.text.split(";")
    monkeypatch.setenv("DISTLAUNCH_BACKEND", "mpi")
    task = mpi_task(open_mpi(0, 2, 0, 2, 1))
    assert task and task_environment(task, {}, ("a", 1))["DISTLAUNCH_BACKEND"] == "mpi"


DECIDED = [
    ("script: t.py\nlauncher: mpirun\nnodes: [a, b]", "set procs_per_node or gpus_per_node"),
    (f"{TWO}args: ['{{rank}}']", "mpirun chooses {rank}: have the script read RANK"),
    (f"{TWO}env: {{A: '{{hosts}}'}}", "env.A: mpirun chooses {hosts}: write the names of the hosts"),
    (f"{TWO}spares: [c]", "spares: can't be combined with mpirun"),
    (f"{TWO}container: {{image: x}}", "container: can't be combined with mpirun"),
    (TWO.replace("t.py", "~/t.py"), "script: mpirun doesn't expand ~"),
    (f"{TWO}python: ~/venv/bin/python", "python: mpirun doesn't expand ~"),
    (f"{TWO}on_stall: stop", "on_stall: can't be combined with mpirun"),
    (f"{TWO}timeouts: {{join: 1m}}", "timeouts.join: can't be combined with mpirun"),
    ("script: t.py\nlauncher: mpirun\nnodes: [{host: a, env: {A: b}}]", "remove env here, or move it"),
    (TWO.replace("b]", "'me@b[1-2]']"), "nodes[1]: mpirun ignores a node's user"),
    (TWO.replace("b]", "{host: b, port: 2222}]"), "nodes[1]: mpirun ignores a node's user and port"),
]


@pytest.mark.parametrize(("text", "words"), DECIDED)
def test_refuses_keys_that_mpirun_decides(text: str, words: str) -> None:
    with pytest.raises(JobError, match=re.escape(words)):
        planned(text)


def test_accepts_defaults_of_keys_that_mpirun_decides() -> None:
    first = TWO.replace("host: a", "host: me@a")  # distlaunch itself logs in to the first node
    assert planned(f"{first}success: all\nsync: false\nspares: []\nrole: default").mpirun.hosts


HOST = "7.0;tcp://10.0.0.1,192.168.0.1:4000;tcp6://[fd00::2]:4001"


def open_mpi(rank: int, size: int, local: int, local_size: int, nodes: int, **more: str) -> dict[str, str]:
    names = (f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    place = zip(names, map(str, (rank, size, local, local_size)), strict=True)
    hosts = {f"OMPI_MCA_orte_{name}_uri": HOST for name in ("hnp", "local_daemon")}
    return {"PMIX_NAMESPACE": "917", **dict(place), "OMPI_MCA_orte_num_nodes": str(nodes), **hosts, **more}


def test_places_a_task_of_open_mpi() -> None:
    task = mpi_task(open_mpi(5, 8, 1, 4, 2, CUDA_VISIBLE_DEVICES="0,1,2,3"))
    assert task is not None
    assert (task.step, task.rank, task.size, task.local_rank, task.local_size) == ("mpi-917", 5, 8, 1, 4)
    assert (task.node_rank, task.node_count, task.devices) == (1, 2, 4)
    assert task.addresses == ("10.0.0.1", "192.168.0.1", "fd00::2")
    without = mpi_task(open_mpi(5, 8, 1, 4, 2, CUDA_VISIBLE_DEVICES="-1"))
    assert without and without.devices == 0, "-1 hides all GPUs"
    wanted = "GROUP_RANK=1 NODE_RANK=1 GROUP_WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=999 RANK=5"
    env = task_environment(task, {}, ("10.0.0.1", 999))
    assert env.items() >= variables(wanted).items()


PLACES = [
    ((1, 4, 1, 4, 1), (0, 1)),
    ((1, 2, 1, 2, 3), (0, 1)),  # of three nodes one is used
    ((3, 4, 1, 2, 2), (1, 2)),
    ((1, 4, 0, 2, 2), (1, 2)),  # --map-by node
    ((0, 4, 0, 2, 3), (None, None)),  # 2 + 1 + 1
    ((3, 4, 0, 1, 3), (None, None)),
]


@pytest.mark.parametrize(("place", "node"), PLACES)
def test_knows_the_node_rank_of_even_nodes(place: tuple[int, ...], node: tuple[int | None, ...]) -> None:
    task = mpi_task(open_mpi(*place))
    assert task and (task.node_rank, task.node_count) == node
    of_nodes = {"GROUP_RANK", "NODE_RANK", "GROUP_WORLD_SIZE"}
    env = task_environment(task, {}, ("a", 1))
    assert of_nodes & {*env} == (set() if node == (None, None) else of_nodes)


def test_refuses_rank_0_on_another_host_than_mpirun() -> None:
    elsewhere = {"OMPI_MCA_orte_local_daemon_uri": "7.1;tcp://10.0.0.2:4000"}
    with pytest.raises(UsageError, match="rank 0 is not on mpirun's host"):
        mpi_task(open_mpi(0, 4, 0, 2, 2, **elsewhere))
    assert mpi_task(open_mpi(2, 4, 0, 2, 2, **elsewhere))
    assert mpi_task(open_mpi(0, 4, 0, 2, 2, **elsewhere, MASTER_ADDR="a"))
    with pytest.raises(UsageError, match="doesn't expose where rank 0 is"):
        mpi_task(open_mpi(2, 4, 0, 2, 2, OMPI_MCA_orte_hnp_uri=""))


CONTRADICTIONS = [
    ("SIZE=", "not all numbers: OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=,"),
    ("SIZE=1", "contradict each other"),
    ("LOCAL_SIZE=0", "contradict each other"),
]


@pytest.mark.parametrize(("change", "told"), CONTRADICTIONS)
def test_refuses_contradictory_mpi_variables(change: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        mpi_task(open_mpi(1, 4, 1, 2, 2) | variables(f"OMPI_COMM_WORLD_{change}"))


def test_places_a_task_of_hydra_but_not_of_srun() -> None:
    assert mpi_task({"SLURM_PROCID": "1", "PMI_RANK": "1"}) is None  # srun sets PMI_RANK, too
    env = variables("PMI_RANK=2 PMI_SIZE=3 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1")
    task = mpi_task(env)
    assert task is not None
    assert (task.rank, task.size, task.local_rank, task.local_size, task.node_rank) == (2, 3, 0, 1, None)
    gone = env | {"PMI_FD": "999999"}
    with pytest.raises(DistlaunchError, match="PMI_FD: Bad file descriptor; if mpirun is still running"):
        task_of(gone)
    assert task_of(gone | {"MASTER_PORT": "29500"}).rank == 2


def test_waits_for_the_ranks_of_hydra_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exec_task, "START_S", 0.01)
    own, manager = socket.socketpair()
    env = variables(f"PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1 PMI_FD={own.fileno()}")
    with own, manager:
        with pytest.raises(DistlaunchError, match=r"no answer to `cmd=get_my_kvsname` within 0\.01 s"):
            task_of(env)
        assert own.getblocking()


MAPPINGS = [
    ("(vector,(0,1,4))", [0, 0, 0, 0]),
    ("(vector,(0,2,2))", [0, 0, 1, 1]),
    ("(vector,(0,1,2),(1,2,1))", [0, 0, 1, 2]),
    ("(vector,(0,2,1))", [0, 1, 0, 1]),  # dealt in turn
]


@pytest.mark.parametrize(("mapping", "nodes"), MAPPINGS)
def test_reads_the_node_rank_from_hydras_mapping(mapping: str, nodes: list[int]) -> None:
    assert [node_of(mapping, rank) for rank in range(4)] == [(node, max(nodes) + 1) for node in nodes]
    assert node_of("", 0) is None
