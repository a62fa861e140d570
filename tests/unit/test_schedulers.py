"""Grid Engine, PBS, LSF and Flux: their variables and host lists, tasks and errors.

Grid Engine's environment, file and words are those of 8.1.9, but for SGE_HGR_gpu, which only its successors
set. Those of PBS, LSF and Flux are written from their manuals; none was seen on a live system.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from distlaunch.agent.messages import Interrupted, WarningReceived
from distlaunch.cli.job_file import load_job
from distlaunch.errors import JobError, UsageError
from distlaunch.job.spec import AllocatedNode, Allocation, JobSpec
from distlaunch.launch.opening import STEP_NODES, _groups
from distlaunch.schedulers import load, scheduler_in, step_size, task_in, task_number
from distlaunch.schedulers.base import Scheduler
from distlaunch.schedulers.grid_engine import Qrsh
from distlaunch.schedulers.lsf import Blaunch
from distlaunch.schedulers.queue import granted_gpus
from distlaunch.schedulers.task import Task
from distlaunch.supervisor.state import Phase
from distlaunch.transports.failure import Kind, ProcessEnd
from distlaunch.transports.ssh import Ssh
from distlaunch.transports.transport import Command, Local
from tests.unit.orders import WarnWorkers
from tests.unit.tasks import task_environment
from tests.unit.test_restarts import inside
from tests.unit.test_supervisor import lost, texts

GRID_ENGINE = {
    "JOB_ID": "4711",
    "SGE_TASK_ID": "undefined",
    "PE_HOSTFILE": "/var/spool/gridengine/execd/node1/active_jobs/4711.1/pe_hostfile",
    "SGE_BINARY_PATH": "bin/lx-amd64",
    "SGE_TASK_FIRST": "undefined",
    "SGE_CELL": "default",
    "NSLOTS": "6",
    "NHOSTS": "2",
    "NQUEUES": "2",
    "PE": "mpi",
    "QUEUE": "all.q",
    "HOSTNAME": "node1.cluster",
}
PE_HOSTFILE = "node1.cluster 2 all.q@node1.cluster UNDEFINED\nnode2.cluster 4 all.q@node2.cluster UNDEFINED\n"
PBS = {"PBS_JOBID": "88.pbs", "PBS_NODEFILE": "/var/spool/pbs/aux/88.pbs", "PBS_ENVIRONMENT": "PBS_BATCH"}
PBS_NODEFILE = "x1000\nx1000\nx1001\nx1001\n"
LSF = {"LSB_JOBID": "905", "LSB_JOBINDEX": "0", "LSB_MCPU_HOSTS": "hostA 2 hostB 2 "}
FLUX = {"FLUX_JOB_ID": "ƒ2Cm", "FLUX_JOB_NNODES": "2", "FLUX_URI": "local:///run/flux/local"}

# Allocations


def found_in(environ: dict[str, str], listed: str = "") -> Allocation:
    """The allocation of a process with this environment."""
    found = inside_of(environ).allocation(environ, listed)
    assert found is not None
    return found


def inside_of(environ: dict[str, str]) -> Scheduler:
    return load(scheduler_in(environ) or "")


@pytest.mark.parametrize(
    ("environ", "listed", "name", "slots"),
    [
        (GRID_ENGINE, PE_HOSTFILE, "Grid Engine job 4711", {"node1.cluster": 2, "node2.cluster": 4}),
        (GRID_ENGINE | {"SGE_TASK_ID": "3"}, "a 1 q@a <NULL>", "Grid Engine job 4711.3", {"a": 1}),
        pytest.param(
            GRID_ENGINE,
            "a 2 all.q@a 0,0:0,1\nb 1 all.q@b UNDEFINED\n\na 3 long.q@a UNDEFINED",
            "Grid Engine job 4711",
            {"a": 5, "b": 1},
            id="a host in two queues",
        ),
        (PBS, PBS_NODEFILE, "PBS job 88.pbs", {"x1000": 2, "x1001": 2}),
        (PBS, "b\na\nb", "PBS job 88.pbs", {"b": 2, "a": 1}),
        (PBS, "a\r\n" * 128, "PBS job 88.pbs", {"a": 128}),
        (LSF, "", "LSF job 905", {"hostA": 2, "hostB": 2}),
        (LSF | {"LSB_JOBINDEX": "7"}, "", "LSF job 905[7]", {"hostA": 2, "hostB": 2}),
        ({"LSB_JOBID": "9", "LSB_DJOB_HOSTFILE": "/h"}, "b\nb\na\n", "LSF job 9", {"b": 2, "a": 1}),
        (FLUX, "flux1 flux2\n", "Flux job ƒ2Cm", {"flux1": None, "flux2": None}),
        ({"FLUX_URI": "local:///x"}, "flux1\n", "Flux", {"flux1": None}),
    ],
)
def test_an_allocation_has_a_name_hosts_and_slots(
    environ: dict[str, str], listed: str, name: str, slots: dict[str, int | None]
) -> None:
    found = found_in(environ, listed)
    assert (found.name, {node.host: node.procs for node in found.nodes}) == (name, slots)
    assert (found.answers, found.requeues) == (False, False)


@pytest.mark.parametrize(
    ("environ", "queued"),
    [
        (GRID_ENGINE, False),
        (GRID_ENGINE | {"JOB_SCRIPT": "/spool/job_scripts/4711"}, True),
        (GRID_ENGINE | {"JOB_SCRIPT": "/spool/job_scripts/4711", "SGE_TASK_ID": "3"}, False),
        (PBS, True),
        (PBS | {"PBS_ENVIRONMENT": "PBS_INTERACTIVE"}, False),
        (PBS | {"PBS_JOBID": "88[3].pbs"}, False),
        (LSF, False),
        (LSF | {"LSB_JOBFILENAME": "/home/ann/.lsbatch/1.905"}, True),
        (LSF | {"LSB_JOBFILENAME": "/home/ann/.lsbatch/1.905", "LSB_JOBINDEX": "7"}, False),
        (LSF | {"LSB_JOBFILENAME": "/home/ann/.lsbatch/1.905", "LSB_INTERACTIVE": "Y"}, False),
        (FLUX, False),
        ({"FLUX_URI": "local:///x", "DISTLAUNCH_QUEUED": "17"}, True),
        (FLUX | {"DISTLAUNCH_QUEUED": "17"}, False),  # a job inside of that one
    ],
)
def test_knows_whether_the_job_came_from_a_queue(environ: dict[str, str], queued: bool) -> None:
    found = found_in(environ, "a\n" if "PE_HOSTFILE" not in environ else "a 1")
    assert found.queued == queued


@pytest.mark.parametrize(
    ("environ", "listed", "error"),
    [
        (GRID_ENGINE, "", "Grid Engine lists no hosts"),
        (PBS, "\n \n", "PBS lists no hosts"),
        (FLUX, "", "Flux lists no hosts"),
        (GRID_ENGINE, "a", '"a" does not name a host and its slots'),
        (GRID_ENGINE, "a 0 q", "does not name a host and its slots"),
        (GRID_ENGINE, "a two q", "does not name a host and its slots"),
        (GRID_ENGINE, "a 99999999999999999999", "does not name a host and its slots"),
        (PBS, "-oProxyCommand=x", '"-oProxyCommand=x" is not a valid host name'),
        (PBS, "\0\1\2", "is not a valid host name"),
        (LSF | {"LSB_MCPU_HOSTS": "a 2 b"}, "", '"b" does not name a host and its slots'),
        (LSF | {"LSB_MCPU_HOSTS": "2 a"}, "", '"2 a" does not name'),
        (PBS, "".join(f"h{i}\n" for i in range(70_000)), "more than 65535 hosts"),
    ],
)
def test_refuses_a_malformed_host_list(environ: dict[str, str], listed: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        found_in(environ, listed)


@pytest.mark.parametrize(
    ("environ", "listing"),
    [
        (GRID_ENGINE, GRID_ENGINE["PE_HOSTFILE"]),
        (PBS, PBS["PBS_NODEFILE"]),
        (LSF, ""),
        ({"LSB_JOBID": "9", "LSB_DJOB_HOSTFILE": "/h"}, "/h"),
        (FLUX, ("flux", "hostlist", "--expand", "local")),
        ({"SLURM_JOB_ID": "17"}, ""),
    ],
)
def test_finds_the_schedulers_host_list(environ: dict[str, str], listing: str | tuple[str, ...]) -> None:
    assert inside_of(environ).listing(environ) == listing


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"JOB_ID": "4711", "HOSTNAME": "x"},
        {"SGE_ROOT": "/opt/sge", "PE_HOSTFILE": "/x"},
        {"PBS_NODEFILE": "/x"},
        {"LSB_MCPU_HOSTS": "a 1"},
        {"FLUX_URI": "ssh://test0/run/flux/local", "FLUX_PROXY_REMOTE": "test0"},
    ],
)
def test_finds_no_scheduler_outside_a_job(environ: dict[str, str]) -> None:
    assert scheduler_in(environ) is None


def test_a_grid_engine_job_without_a_parallel_environment_has_one_host() -> None:
    environ = {name: value for name, value in GRID_ENGINE.items() if name != "PE_HOSTFILE"}
    assert found_in(environ) == Allocation(
        "grid-engine", "Grid Engine", "4711", (AllocatedNode("node1.cluster", None, 1),)
    )


@pytest.mark.parametrize(
    ("environ", "gpus"),
    [
        ({}, None),
        ({"SGE_HGR_gpu": "0 3"}, 2),
        ({"SGE_HGR_gpu": "0 3", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8d3a,GPU-11fe,GPU-7ab1"}, 3),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0),
    ],
)
def test_counts_granted_gpus(environ: dict[str, str], gpus: int | None) -> None:
    assert granted_gpus(environ) == gpus


# Jobs


Load = Callable[..., JobSpec]
HERE = os.uname().nodename


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Reads a job file inside an allocation; `listed` is the text of the file that its scheduler wrote."""

    def load(text: str, environ: dict[str, str], listed: str = "") -> JobSpec:
        (tmp_path / "hosts").write_text(listed)
        for name, value in environ.items():
            monkeypatch.setenv(name, str(tmp_path / "hosts") if value.startswith("/") else value)
        path = tmp_path / "job.yaml"
        path.write_text(f"script: t.py\n{text}\n")
        return load_job(str(path))

    return load


QRSH = ("qrsh", "-inherit", "-V", "{host}")


def test_reaches_grid_engine_hosts_by_qrsh_and_localhost_directly(job: Load) -> None:
    assert job("", PBS, "localhost\n").nodes[0].reach == Local()
    listed = PE_HOSTFILE.replace("node1.cluster", f"{HERE.upper()}.cluster")
    first, second = job("gpus_per_node: 0", GRID_ENGINE, listed).nodes
    assert (first.label, first.reach, first.cpu_procs) == (f"{HERE.upper()}.cluster", Local(), 2)
    assert second.reach == Qrsh("node2.cluster", QRSH, True)
    assert second.cpu_procs == 4
    *start, command = second.reach.argv()
    assert start == ["qrsh", "-inherit", "-V", "node2.cluster"]
    assert command.startswith("exec /bin/sh -c '")


@pytest.mark.parametrize(
    ("environ", "listed", "start"),
    [
        (LSF, "", ["/bin/sh", "-c", 'trap "" USR1 USR2; exec "$@"', "sh", "blaunch", "hostB"]),
        (PBS, PBS_NODEFILE, None),
    ],
)
def test_reaches_lsf_hosts_by_blaunch_and_pbs_hosts_over_ssh(
    job: Load, environ: dict[str, str], listed: str, start: list[str] | None
) -> None:
    other = job("", environ, listed).nodes[1].reach
    assert isinstance(other, Ssh) if start is None else other.argv()[:-1] == start


def test_uses_granted_gpus_unless_the_job_sets_them(job: Load) -> None:
    environ = GRID_ENGINE | {"SGE_HGR_gpu": "0 1"}
    assert [node.gpus for node in job("", environ, PE_HOSTFILE).nodes] == [2, 2]
    assert [node.gpus for node in job("gpus_per_node: 1", environ, PE_HOSTFILE).nodes] == [1, 1]


def test_a_job_may_use_part_of_an_allocation(job: Load) -> None:
    spec = job("nodes: 1\nspares: rest", PBS, PBS_NODEFILE)
    assert [[node.label for node in each] for each in (spec.nodes, spec.membership.spares)] == [
        ["x1000"],
        ["x1001"],
    ]
    with pytest.raises(JobError, match=r"the job requests 3 nodes, but PBS job 88\.pbs has 2 nodes"):
        job("nodes: 3", PBS, PBS_NODEFILE)


def test_launcher_overrides_the_allocation(job: Load) -> None:
    over_ssh = job("launcher: ssh", GRID_ENGINE, PE_HOSTFILE.replace("node1.cluster", HERE))
    assert [type(node.reach) for node in over_ssh.nodes] == [Ssh, Ssh]
    assert over_ssh.allocation is not None
    for text in ("launcher: local", "launcher: local\nnodes: 2", "nodes: [a, b]", "launcher: slurm"):
        assert job(text, GRID_ENGINE, PE_HOSTFILE).allocation is None
    assert isinstance(job("nodes: [a, b]", GRID_ENGINE, PE_HOSTFILE).nodes[1].reach, Ssh)
    in_slurm = job("launcher: ssh", {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "a[1-2]"})
    assert [(node.label, type(node.reach)) for node in in_slurm.nodes] == [("a1", Ssh), ("a2", Ssh)]


@pytest.mark.parametrize("launcher", ["auto", "ssh"])
def test_only_slurm_nodes_share_a_process(job: Load, launcher: str) -> None:
    listed = "".join(f"node{i} 1 all.q UNDEFINED\n" for i in range(2 * STEP_NODES))
    spec = job(f"launcher: {launcher}", GRID_ENGINE, listed)
    assert list(_groups(spec)) == [[i] for i in range(2 * STEP_NODES)]


def test_launcher_command_reaches_the_hosts_of_an_allocation(job: Load) -> None:
    text = 'launcher: {command: [tmrsh, "{host}"]}'
    spec = job(text, PBS, f"{HERE}\nx1001\n")
    assert [node.reach for node in spec.nodes] == [
        Command(host, ("tmrsh", "{host}")) for host in (HERE, "x1001")
    ]
    with pytest.raises(JobError, match=r"\{host\} is missing: the command would always reach the same node"):
        job("launcher: {command: [tmrsh]}", PBS, PBS_NODEFILE)
    with pytest.raises(JobError, match=r"\{host\} is missing: the command"):
        job("nodes: ['gpu[1-2]']\nlauncher: {command: [tmrsh]}", {})


def test_an_unreadable_host_list_matters_only_where_it_is_needed(job: Load) -> None:
    missing = {"JOB_ID": "1", "PE_HOSTFILE": "no/such/file"}
    with pytest.raises(UsageError) as refused:
        job("", missing)
    assert str(refused.value) == (
        "can't read the hosts of this Grid Engine job: no/such/file: No such file or directory; list the "
        "hosts in nodes, or use `--set launcher=local`"
    )
    assert job("launcher: local", missing).allocation is None
    assert job("nodes: [a]", missing).allocation is None
    with pytest.raises(
        UsageError, match=r"can't read the allocation from /.*: Grid Engine lists no hosts; list"
    ):
        job("", GRID_ENGINE, "")


# How their commands fail


@pytest.mark.parametrize(
    ("scheduler", "words", "status", "kind", "advice"),
    [
        (
            "grid-engine",
            'error: executing task of job 4711 failed: execution daemon on host "b" didn\'t accept task',
            1,
            Kind.TASK_REFUSED,
            "is control_slaves TRUE in `qconf -sp $PE`? `--set launcher=ssh` doesn't need it",
        ),
        (
            "grid-engine",
            "error: executing task of job 5 failed: failed sending task to execd@b: can't resolve host name",
            1,
            Kind.UNRESOLVED,
            "try `qrsh -inherit -V b python3 -V`",
        ),
        (
            "grid-engine",
            "error: executing task of job 4711 failed: failed sending task to execd@b: can't find connection",
            1,
            Kind.UNREACHABLE,
            "try `qrsh -inherit -V b python3 -V`",
        ),
        ("lsf", "LSF: strange words", 255, Kind.LOST, "try `blaunch b python3 -V`"),
        ("lsf", "sh: python3: not found", 127, Kind.UNSTARTED, "try `blaunch b python3 -V`"),
    ],
)
def test_explains_qrsh_and_blaunch(scheduler: str, words: str, status: int, kind: Kind, advice: str) -> None:
    reach = inside_of(GRID_ENGINE if scheduler == "grid-engine" else LSF).command("b")
    assert reach is not None
    failure = reach.failure(ProcessEnd(words, status=status))
    assert (failure.kind, reach.advice(failure, None)) == (kind, advice)


def test_looks_for_commands_in_the_schedulers_directory() -> None:
    reach = Qrsh("b", QRSH, True)
    assert reach.environment({"PATH": "/bin", "SGE_BINARY_PATH": "/opt/sge/bin"}) == {
        "PATH": "/bin:/opt/sge/bin",
        "SGE_BINARY_PATH": "/opt/sge/bin",
    }
    assert reach.environment({"PATH": "/bin"}) == {"PATH": "/bin"}
    plain = {"PATH": "/bin", "LSF_BINDIR": "/opt/lsf/bin"}
    assert Command("b", ("x",)).environment(plain) is plain
    assert Blaunch("b", ("x",), True).environment(plain)["PATH"] == "/bin:/opt/lsf/bin"


# What a scheduler does to a job that it can't be asked about

GRID_ENGINE_JOB = Allocation("grid-engine", "Grid Engine", "4711", ())


def test_does_not_wait_for_a_scheduler_that_cannot_answer() -> None:
    without, stopped = inside(GRID_ENGINE_JOB), inside(GRID_ENGINE_JOB)
    without.feed(lost(1))
    assert (without.state.phase, without.state.asked) == (Phase.RESTARTING, None)
    stopped.feed(Interrupted(15))
    assert stopped.state.phase is Phase.STOPPING
    assert stopped.state.cause is not None
    assert stopped.state.cause.text == "stopped by SIGTERM"


@pytest.mark.parametrize("event", [WarningReceived(0, 12), Interrupted(12)])
def test_a_termination_warning_is_passed_on_at_once(event: WarningReceived | Interrupted) -> None:
    job = inside(GRID_ENGINE_JOB, "on_warning: USR1")
    given = job.feed(event)
    notices = [action for action in given if isinstance(action, WarnWorkers)]
    assert notices == [WarnWorkers(node, 10, None) for node in (0, 1)]
    assert texts(given) == ["Grid Engine job 4711 ends soon: sent SIGUSR1 to all ranks (on_warning)"]


# Tasks

FLUX_TASK = {
    "FLUX_JOB_ID": "f2Cm",
    "FLUX_JOB_SIZE": "4",
    "FLUX_JOB_NNODES": "2",
    "FLUX_TASK_RANK": "3",
    "FLUX_TASK_LOCAL_ID": "1",
    "CUDA_VISIBLE_DEVICES": "0,1",
}
JSM_TASK = {
    **LSF,
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
}


@pytest.fixture(autouse=True)
def flux_lists(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """What the command prints that lists the hosts of a Flux job."""

    def lists(hosts: str) -> None:
        monkeypatch.setattr("distlaunch.schedulers.queue.printed", lambda _: hosts)

    lists("flux1 flux2")
    return lists


def test_places_tasks_of_flux_and_jsrun(flux_lists: Callable[[str], None]) -> None:
    assert task_number(FLUX_TASK | {"SLURM_PROCID": "0"}) == task_number(JSM_TASK) == 3
    steps: list[dict[str, str]] = [FLUX_TASK, {"SLURM_STEP_NUM_NODES": "3"}, {}]
    assert [step_size(environ) for environ in steps] == [("flux", 2, 4), ("slurm", 3, 1), ("", 1, 1)]
    task = task_in(FLUX_TASK)
    assert task == Task("f2Cm.", "f2Cm", 3, 4, 1, 2, 1, 2, ("flux1", "flux2"), ("flux1",), 2, 0)
    # The script of such an LSF job runs on a launch node, which comes first.
    on_lsf = task_in(JSM_TASK | {"LSB_MCPU_HOSTS": "launch 1 hostA 2 hostB 2"})
    assert on_lsf == Task("905.", "905", 3, 4, 1, 2, 1, 2, ("hostA", "hostB"), ("hostA",), None, 0)
    flux_lists("flux1")
    with pytest.raises(
        UsageError, match="flux run runs on 2 nodes, but Flux lists only 1: instead of `distlaunch exec"
    ):
        task_in(FLUX_TASK)
    env = task_environment(task, FLUX_TASK, ("flux1", 12345))
    wanted = {"RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1", "MASTER_ADDR": "flux1"}
    assert {name: env[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"FLUX_JOB_SIZE": "5"},
            "same number of tasks on each node, but FLUX_JOB_SIZE=5 and FLUX_JOB_NNODES=2",
        ),
        (
            {"FLUX_TASK_LOCAL_ID": "0"},
            "number them node by node: FLUX_TASK_RANK is 3, but FLUX_TASK_LOCAL_ID is 0",
        ),
        ({"FLUX_JOB_SIZE": ""}, "exec must run as a task of flux run, but FLUX_JOB_SIZE is not set"),
        ({"FLUX_JOB_NNODES": "x"}, "FLUX_JOB_NNODES=x is not a number"),
        ({"FLUX_TASK_RANK": "9", "FLUX_TASK_LOCAL_ID": "1"}, "node by node: FLUX_TASK_RANK is 9"),
    ],
)
def test_refuses_contradictory_flux_variables(changes: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        task_in(FLUX_TASK | changes)


@pytest.mark.parametrize(
    ("environ", "said", "starter"),
    [
        (GRID_ENGINE, "Grid Engine doesn't number its tasks", "mpirun"),
        (PBS, "PBS doesn't number its tasks", "mpirun"),
        (LSF, "this LSF process is not a task of `jsrun`", "jsrun"),
        (FLUX, "this Flux process is not a task of `flux run`", "flux run"),
    ],
)
def test_refuses_exec_outside_a_task(environ: dict[str, str], said: str, starter: str) -> None:
    with pytest.raises(UsageError) as caught:
        task_in(environ)
    assert str(caught.value) == f"{said}: use `{starter} distlaunch exec`, or `distlaunch run job.yaml`"
    for other in ({"SLURM_JOB_ID": "17"}, {}):
        with pytest.raises(UsageError, match="SLURM_PROCID is not set: use `srun distlaunch exec"):
            task_in(other)
