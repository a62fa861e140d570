"""Grid Engine, PBS, LSF and Flux: their variables and host lists, tasks and errors.

Grid Engine's environment, file and words are those of 8.1.9, but for SGE_HGR_gpu, which only its successors
set. Those of PBS, LSF and Flux are written from their manuals; none was seen on a live system.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from distlaunch.agent import sweep
from distlaunch.agent.messages import Interrupted, WarningReceived
from distlaunch.cli.job_file import load_job
from distlaunch.errors import JobError, UsageError
from distlaunch.job.spec import AllocatedNode, Allocation, JobSpec
from distlaunch.launch.opening import STEP_NODES, _groups
from distlaunch.schedulers import TABLE, load, scheduler_in, step_size, task_in, task_number
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
from tests.unit.tasks import task_environment, variables
from tests.unit.test_restarts import inside
from tests.unit.test_supervisor import lost, texts

Environ = dict[str, str]
GRID_ENGINE = variables(
    "JOB_ID=4711 SGE_TASK_ID=undefined SGE_TASK_FIRST=undefined NSLOTS=6 NHOSTS=2 HOSTNAME=node1.cluster "
    "PE=mpi PE_HOSTFILE=/var/spool/gridengine/execd/node1/active_jobs/4711.1/pe_hostfile"
)
PE_HOSTFILE = "node1.cluster 2 all.q@node1.cluster UNDEFINED\nnode2.cluster 4 all.q@node2.cluster UNDEFINED\n"
PBS = variables("PBS_JOBID=88.pbs PBS_NODEFILE=/var/spool/pbs/aux/88.pbs PBS_ENVIRONMENT=PBS_BATCH")
PBS_NODEFILE = "x1000\nx1000\nx1001\nx1001\n"
LSF = {"LSB_JOBID": "905", "LSB_JOBINDEX": "0", "LSB_MCPU_HOSTS": "hostA 2 hostB 2 "}
FLUX = variables("FLUX_JOB_ID=ƒ2Cm FLUX_JOB_NNODES=2 FLUX_URI=local:///run/flux/local")

# Allocations


def found_in(environ: Environ, listed: str = "") -> Allocation:
    """The allocation of a process with this environment."""
    found = inside_of(environ).allocation(environ, listed)
    assert found is not None
    return found


def inside_of(environ: Environ) -> Scheduler:
    return load(scheduler_in(environ) or "")


def test_a_sweep_knows_the_variable_that_holds_each_schedulers_job_id() -> None:
    assert {*sweep.JOB_IDS} == {entry.marks[0].split()[0] for entry in TABLE.values()}


GE_SCRIPT = {"JOB_SCRIPT": "/spool/job_scripts/4711"}
LSF_SCRIPT = LSF | {"LSB_JOBFILENAME": "/home/ann/.lsbatch/1.905"}
NOT_NAMED = "does not name a host and its slots"


ALLOCATIONS = [
    (GRID_ENGINE, PE_HOSTFILE, "Grid Engine job 4711", {"node1.cluster": 2, "node2.cluster": 4}),
    (GRID_ENGINE | {"SGE_TASK_ID": "3"}, "a 1 q@a <NULL>", "Grid Engine job 4711.3", {"a": 1}),
    (GRID_ENGINE, "a 2 q@a 0,0:0,1\nb 1 q -\n\na 3 r@a -", "Grid Engine job 4711", {"a": 5, "b": 1}),
    (PBS, PBS_NODEFILE, "PBS job 88.pbs", {"x1000": 2, "x1001": 2}),
    (PBS, "b\na\nb", "PBS job 88.pbs", {"b": 2, "a": 1}),
    (PBS, "a\r\n" * 128, "PBS job 88.pbs", {"a": 128}),
    (LSF, "", "LSF job 905", {"hostA": 2, "hostB": 2}),
    (LSF | {"LSB_JOBINDEX": "7"}, "", "LSF job 905[7]", {"hostA": 2, "hostB": 2}),
    ({"LSB_JOBID": "9", "LSB_DJOB_HOSTFILE": "/h"}, "b\nb\na\n", "LSF job 9", {"b": 2, "a": 1}),
    (FLUX, "flux1 flux2\n", "Flux job ƒ2Cm", {"flux1": None, "flux2": None}),
    ({"FLUX_URI": "local:///x"}, "flux1\n", "Flux", {"flux1": None}),
]


@pytest.mark.parametrize(("environ", "listed", "name", "slots"), ALLOCATIONS)
def test_reads_an_allocation(environ: Environ, listed: str, name: str, slots: dict[str, int | None]) -> None:
    found = found_in(environ, listed)
    assert (found.name, {node.host: node.procs for node in found.nodes}) == (name, slots)
    assert (found.answers, found.requeues) == (False, False)


QUEUED = [
    (GRID_ENGINE, False),
    (GRID_ENGINE | GE_SCRIPT, True),
    (GRID_ENGINE | GE_SCRIPT | {"SGE_TASK_ID": "3"}, False),
    (PBS, True),
    (PBS | {"PBS_ENVIRONMENT": "PBS_INTERACTIVE"}, False),
    (PBS | {"PBS_JOBID": "88[3].pbs"}, False),
    (LSF, False),
    (LSF_SCRIPT, True),
    (LSF_SCRIPT | {"LSB_JOBINDEX": "7"}, False),
    (LSF_SCRIPT | {"LSB_INTERACTIVE": "Y"}, False),
    (FLUX, False),
    ({"FLUX_URI": "local:///x", "DISTLAUNCH_QUEUED": "17"}, True),
    (FLUX | {"DISTLAUNCH_QUEUED": "17"}, False),  # a job inside of that one
]


@pytest.mark.parametrize(("environ", "queued"), QUEUED)
def test_knows_whether_the_job_came_from_a_queue(environ: Environ, queued: bool) -> None:
    assert found_in(environ, "a 1" if "PE_HOSTFILE" in environ else "a\n").queued == queued


MALFORMED = [
    (GRID_ENGINE, "", "Grid Engine lists no hosts"),
    (PBS, "\n \n", "PBS lists no hosts"),
    (FLUX, "", "Flux lists no hosts"),
    *((GRID_ENGINE, bad, f'"{bad}" {NOT_NAMED}') for bad in ("a", "a 0 q", "a x q", "a 99999999")),
    (PBS, "-oProxyCommand=x", '"-oProxyCommand=x" is not a valid host name'),
    (PBS, "\0\1\2", "is not a valid host name"),
    *((LSF | {"LSB_MCPU_HOSTS": bad}, "", f'"{bad}" {NOT_NAMED}') for bad in ("b", "2 a")),
    (PBS, "".join(f"h{i}\n" for i in range(70_000)), "more than 65535 hosts"),
]


@pytest.mark.parametrize(("environ", "listed", "error"), MALFORMED)
def test_refuses_a_malformed_host_list(environ: Environ, listed: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        found_in(environ, listed)


def test_finds_the_schedulers_host_list() -> None:
    for environ, listing in (
        (GRID_ENGINE, GRID_ENGINE["PE_HOSTFILE"]),
        (PBS, PBS["PBS_NODEFILE"]),
        (LSF, ""),
        ({"LSB_JOBID": "9", "LSB_DJOB_HOSTFILE": "/h"}, "/h"),
        (FLUX, ("flux", "hostlist", "--expand", "local")),
        ({"SLURM_JOB_ID": "17"}, ""),
    ):
        assert inside_of(environ).listing(environ) == listing


def test_finds_no_scheduler_outside_a_job() -> None:
    assert scheduler_in({}) is None
    for environ in (
        *("JOB_ID=4711 HOSTNAME=x", "SGE_ROOT=/sge PE_HOSTFILE=/x", "PBS_NODEFILE=/x", "LSB_MCPU_HOSTS=a"),
        "FLUX_URI=ssh://test0/run/flux/local FLUX_PROXY_REMOTE=test0",
    ):
        assert scheduler_in(variables(environ)) is None


def test_a_grid_engine_job_without_a_parallel_environment_has_one_host() -> None:
    environ = {name: value for name, value in GRID_ENGINE.items() if name != "PE_HOSTFILE"}
    nodes = (AllocatedNode("node1.cluster", None, 1),)
    assert found_in(environ) == Allocation("grid-engine", "Grid Engine", "4711", nodes)


def test_counts_granted_gpus() -> None:
    assert granted_gpus({}) is None
    assert granted_gpus({"SGE_HGR_gpu": "0 3"}) == 2
    assert granted_gpus({"SGE_HGR_gpu": "0 3", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}) == 2
    for devices, gpus in (("GPU-8d3a,GPU-11fe,GPU-7ab1", 3), ("", 0), ("-1", 0), ("NoDevFiles", 0)):
        assert granted_gpus({"CUDA_VISIBLE_DEVICES": devices}) == gpus


# Jobs


Load = Callable[..., JobSpec]
HERE = os.uname().nodename


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Reads a job file inside an allocation; `listed` is the text of the file that its scheduler wrote."""

    def load(text: str, environ: Environ, listed: str = "") -> JobSpec:
        (tmp_path / "hosts").write_text(listed)
        path = tmp_path / "job.yaml"
        path.write_text(f"script: t.py\n{text}\n")
        with monkeypatch.context() as inside:
            for name, value in environ.items():
                inside.setenv(name, str(tmp_path / "hosts") if value.startswith("/") else value)
            return load_job(str(path))

    return load


QRSH = ("qrsh", "-inherit", "-V", "{host}")


def test_reaches_hosts_by_the_schedulers_command_or_ssh_and_localhost_directly(job: Load) -> None:
    assert job("", PBS, "localhost\n").nodes[0].reach == Local()
    ignoring = 'trap "" USR1 USR2; '
    assert isinstance(job("", PBS, PBS_NODEFILE).nodes[1].reach, Ssh)
    listed = PE_HOSTFILE.replace("node1.cluster", f"{HERE.upper()}.cluster")
    first, second = job("gpus_per_node: 0", GRID_ENGINE, listed).nodes
    assert (first.label, first.reach, first.cpu_procs) == (f"{HERE.upper()}.cluster", Local(deaf=True), 2)
    assert (second.reach, second.cpu_procs) == (Qrsh("node2.cluster", QRSH, True), 4)
    *start, command = second.reach.argv()
    deaf = ["/bin/sh", "-c", f'{ignoring}exec "$@"', "sh"]
    assert start == [*deaf, "qrsh", "-inherit", "-V", "node2.cluster"]
    assert command.startswith(f"exec /bin/sh -c '{ignoring}")
    *start, command = job("", LSF).nodes[1].reach.argv()
    assert start == [*deaf, "blaunch", "hostB"]


def test_uses_granted_gpus_unless_the_job_sets_them(job: Load) -> None:
    environ = GRID_ENGINE | {"SGE_HGR_gpu": "0 1"}
    assert [node.gpus for node in job("", environ, PE_HOSTFILE).nodes] == [2, 2]
    assert [node.gpus for node in job("gpus_per_node: 1", environ, PE_HOSTFILE).nodes] == [1, 1]


def test_a_job_may_use_part_of_an_allocation(job: Load) -> None:
    spec = job("nodes: 1\nspares: rest", PBS, PBS_NODEFILE)
    assert [node.label for node in (*spec.nodes, *spec.membership.spares)] == ["x1000", "x1001"]
    assert len(spec.nodes) == 1
    with pytest.raises(
        JobError, match=r"the job requests 3 nodes, but PBS job 88\.pbs has 2 nodes; to simulate 3 nodes"
    ):
        job("nodes: 3", PBS, PBS_NODEFILE)
    with pytest.raises(JobError, match="spares: rest means the other nodes of an allocation: set nodes"):
        job("spares: rest", PBS, PBS_NODEFILE)


def test_launcher_overrides_the_allocation(job: Load) -> None:
    over_ssh = job("launcher: ssh", GRID_ENGINE, PE_HOSTFILE.replace("node1.cluster", HERE))
    assert [type(node.reach) for node in over_ssh.nodes] == [Ssh, Ssh]
    assert over_ssh.allocation is not None
    for text in ("launcher: local", "launcher: local\nnodes: 2", "nodes: [a, b]", "launcher: slurm"):
        assert job(text, GRID_ENGINE, PE_HOSTFILE).allocation is None
    assert isinstance(job("nodes: [a, b]", GRID_ENGINE, PE_HOSTFILE).nodes[1].reach, Ssh)
    in_slurm = job("launcher: ssh", {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "a[1-2]"})
    assert [(node.label, type(node.reach)) for node in in_slurm.nodes] == [("a1", Ssh), ("a2", Ssh)]


def test_only_slurm_nodes_share_a_process(job: Load) -> None:
    listed = "".join(f"node{i} 1 all.q UNDEFINED\n" for i in range(2 * STEP_NODES))
    for launcher in ("auto", "ssh"):
        spec = job(f"launcher: {launcher}", GRID_ENGINE, listed)
        assert list(_groups(spec)) == [[i] for i in range(2 * STEP_NODES)]


def test_launcher_command_reaches_the_hosts_of_an_allocation(job: Load) -> None:
    spec = job('launcher: {command: [tmrsh, "{host}"]}', PBS, f"{HERE}\nx1001\n")
    assert [node.reach for node in spec.nodes] == [Command(to, ("tmrsh", "{host}")) for to in (HERE, "x1001")]
    for nodes, environ in (("", PBS), ("nodes: ['gpu[1-2]']", {})):
        with pytest.raises(JobError, match=r"\{host\} is missing; without it, the command always reaches"):
            job(f"{nodes}\nlauncher: {{command: [tmrsh]}}", environ, PBS_NODEFILE)


def test_an_unreadable_host_list_matters_only_where_it_is_needed(job: Load) -> None:
    missing = {"JOB_ID": "1", "PE_HOSTFILE": "no/such/file"}
    advice = "; use a job file that lists the hosts in nodes, or `distlaunch run --set launcher=local`"
    with pytest.raises(UsageError) as refused:
        job("", missing)
    why = "can't read the hosts of this Grid Engine job: no/such/file: No such file or directory"
    assert str(refused.value) == f"{why}{advice}"
    assert job("launcher: local", missing).allocation is job("nodes: [a]", missing).allocation is None
    with pytest.raises(UsageError, match=f"read the allocation from /.*: Grid Engine lists no hosts{advice}"):
        job("", GRID_ENGINE, "")


# How their commands fail


FAILED = "error: executing task of job 4711 failed: "
ALLOW = "is control_slaves TRUE in `qconf -sp $PE`? `--set launcher=ssh` doesn't need it"
TRY_QRSH, TRY_BLAUNCH = "try `qrsh -inherit -V b python3 -V`", "try `blaunch b python3 -V`"


ERRORS = [
    (GRID_ENGINE, 'execution daemon on host "b" didn\'t accept task', 1, Kind.TASK_REFUSED, ALLOW),
    (GRID_ENGINE, "failed sending task to a@b: can't resolve host name", 1, Kind.UNRESOLVED, TRY_QRSH),
    (GRID_ENGINE, "failed sending task to a@b: can't find connection", 1, Kind.UNREACHABLE, TRY_QRSH),
    (LSF, "LSF: strange words", 255, Kind.LOST, TRY_BLAUNCH),
    (LSF, "sh: python3: not found", 127, Kind.UNSTARTED, TRY_BLAUNCH),
]


@pytest.mark.parametrize(("environ", "words", "status", "kind", "advice"), ERRORS)
def test_explains_errors(environ: Environ, words: str, status: int, kind: Kind, advice: str) -> None:
    reach = inside_of(environ).command("b")
    assert reach is not None
    failure = reach.failure(ProcessEnd(FAILED + words if environ is GRID_ENGINE else words, status=status))
    assert (failure.kind, reach.advice(failure, None)) == (kind, advice)


def test_looks_for_commands_in_the_schedulers_directory() -> None:
    grid_engine, lsf = Qrsh("b", QRSH, True), Blaunch("b", ("x",), True)
    environ = variables("PATH=/bin LSF_BINDIR=/opt/lsf/bin")
    assert lsf.environment(environ) == {**environ, "PATH": "/bin:/opt/lsf/bin"}
    assert grid_engine.environment({"PATH": "/bin", "SGE_BINARY_PATH": "/sge"})["PATH"] == "/bin:/sge"
    assert grid_engine.environment(environ) == environ
    assert Command("b", ("x",)).environment(environ) is environ


# What a scheduler does to a job that it can't be asked about

GRID_ENGINE_JOB = Allocation("grid-engine", "Grid Engine", "4711", ())


def test_does_not_wait_for_a_scheduler_that_cannot_answer() -> None:
    without, stopped = inside(GRID_ENGINE_JOB), inside(GRID_ENGINE_JOB)
    without.feed(lost(1))
    assert (without.state.phase, without.state.asked) == (Phase.RESTARTING, None)
    stopped.feed(Interrupted(15))
    assert stopped.state.phase is Phase.STOPPING
    assert stopped.state.cause and stopped.state.cause.text == "stopped by SIGTERM"


@pytest.mark.parametrize("event", [WarningReceived(0, 12), Interrupted(12)])
def test_a_termination_warning_is_passed_on_at_once(event: WarningReceived | Interrupted) -> None:
    job = inside(GRID_ENGINE_JOB, "on_warning: USR1")
    given = job.feed(event)
    assert given.of(WarnWorkers) == [WarnWorkers(node, 10, None) for node in (0, 1)]
    assert texts(given) == [
        "Grid Engine job 4711 received a warning signal: sent SIGUSR1 to all ranks (on_warning)"
    ]


# Tasks

FLUX_TASK = variables(
    "FLUX_JOB_ID=f2Cm FLUX_JOB_SIZE=4 FLUX_JOB_NNODES=2 FLUX_TASK_RANK=3 FLUX_TASK_LOCAL_ID=1 "
    "CUDA_VISIBLE_DEVICES=0,1"
)
JSM_TASK = LSF | variables(
    "JSM_NAMESPACE_RANK=3 JSM_NAMESPACE_SIZE=4 JSM_NAMESPACE_LOCAL_RANK=1 JSM_NAMESPACE_LOCAL_SIZE=2"
)


@pytest.fixture(autouse=True)
def flux_lists(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hosts of a Flux job, as a command lists them."""
    hosts = ["flux1", "flux2"]
    monkeypatch.setattr("distlaunch.schedulers.queue.printed", lambda *_: " ".join(hosts))
    return hosts


def test_places_tasks_of_flux_and_jsrun(flux_lists: list[str]) -> None:
    assert task_number(FLUX_TASK | {"SLURM_PROCID": "0"}) == task_number(JSM_TASK) == 3
    steps: list[Environ] = [FLUX_TASK, {"SLURM_STEP_NUM_NODES": "3"}, {}]
    assert [step_size(environ) for environ in steps] == [("flux", 2, 4), ("slurm", 3, 1), ("", 1, 1)]
    task = task_in(FLUX_TASK)
    assert task == Task("f2Cm.", "f2Cm", 3, 4, 1, 2, 1, 2, ("flux1", "flux2"), ("flux1",), 2, 0)
    # The script of such an LSF job runs on a launch node, which comes first.
    on_lsf = task_in(JSM_TASK | {"LSB_MCPU_HOSTS": "launch 1 hostA 2 hostB 2"})
    assert on_lsf == Task("905.", "905", 3, 4, 1, 2, 1, 2, ("hostA", "hostB"), ("hostA",), None, 0)
    env = task_environment(task, FLUX_TASK, ("flux1", 12345))
    assert env.items() >= variables("RANK=3 LOCAL_RANK=1 GROUP_RANK=1 MASTER_ADDR=flux1").items()
    flux_lists.pop()
    with pytest.raises(UsageError, match="on 2 nodes, but Flux lists only 1: instead of `distlaunch exec"):
        task_in(FLUX_TASK)


CONTRADICTIONS = [
    ("FLUX_JOB_SIZE=5", "same number of tasks on each node, but FLUX_JOB_SIZE=5 and FLUX_JOB_NNODES=2"),
    ("FLUX_TASK_LOCAL_ID=0", "node by node: FLUX_TASK_RANK is 3, but FLUX_TASK_LOCAL_ID is 0"),
    ("FLUX_JOB_SIZE=", "exec must run as a task of flux run, but FLUX_JOB_SIZE is not set"),
    ("FLUX_JOB_NNODES=x", "FLUX_JOB_NNODES=x is not a number"),
    ("FLUX_TASK_RANK=9 FLUX_TASK_LOCAL_ID=1", "node by node: FLUX_TASK_RANK is 9"),
]


@pytest.mark.parametrize(("changes", "said"), CONTRADICTIONS)
def test_refuses_contradictory_flux_variables(changes: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        task_in(FLUX_TASK | variables(changes))


NO_TASKS = [
    (GRID_ENGINE, r"^Grid Engine doesn't number its tasks: use `mpirun distlaunch exec` \(Open MPI"),
    (PBS, r"^PBS doesn't number its tasks: use `mpirun .*\), or `distlaunch run job.yaml`$"),
    (LSF, "^this LSF process is not a task of `jsrun`: use `jsrun distlaunch exec`, or `distlaunch run"),
    (FLUX, "^this Flux process is not a task of `flux run`: use `flux run distlaunch exec`, or `distl"),
    ({"SLURM_JOB_ID": "17"}, "SLURM_PROCID is not set: use `srun distlaunch exec"),
    ({}, "SLURM_PROCID is not set: use `srun distlaunch exec"),
]


@pytest.mark.parametrize(("environ", "said"), NO_TASKS)
def test_refuses_exec_outside_a_task(environ: Environ, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        task_in(environ)
