"""Jobs for a queue: their batch scripts, early refusals, states in the queue, and requeueing."""

import re
import shlex
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from distlaunch.agent.messages import Interrupted
from distlaunch.cli.job_file import job_of
from distlaunch.errors import DistlaunchError, JobError, UsageError
from distlaunch.job.spec import FailureKind, JobSpec
from distlaunch.schedulers import TABLE, flux, grid_engine, load, lsf, pbs, slurm, target_of
from distlaunch.schedulers.base import Call, check_submitted
from distlaunch.schedulers.queue import CANCELLED, Queued
from distlaunch.supervisor.allocation_end import is_to_go_on
from distlaunch.supervisor.state import Cause, Verdict
from tests.unit.test_restarts import Job, text_of
from tests.unit.test_supervisor import exited

CALL = Call(("distlaunch", "run", "/work/job.yaml"))
SLURM = load("slurm")


MARKS = {"slurm": "#SBATCH ", "grid-engine": "#$ ", "pbs": "#PBS ", "lsf": "#BSUB ", "flux": "#flux: "}


def submitted(text: str, directory: Path) -> JobSpec:
    path = directory / "job.yaml"
    path.write_text(text)
    return job_of(text, str(path), submitted=True)


def options_of(target: str, keys: str, directory: Path) -> list[str]:
    """What a job's script asks its scheduler for, one option each; Slurm's without their quotes."""
    script = load(target).script(submitted(f"script: train.py\n{keys}\n", directory), CALL)
    lines = [line for line in script.splitlines() if line.startswith(MARKS[target])]
    options = [line.removeprefix(MARKS[target]) for line in lines]
    return [" ".join(shlex.split(option)) for option in options] if target == "slurm" else options


OPTIONS = [
    ("slurm", "nodes: 4\nspares: rest\nslurm: {nodes: 5}", ["--nodes=5", "--no-kill"]),
    ("slurm", "nodes: 4\nmin_nodes: 2", ["--nodes=4", "--no-kill"]),
    ("slurm", "nodes: 4\nlauncher: {command: [tsh, '{host}']}", ["--nodes=4"]),
    ("slurm", "gpus_per_node: 8", ["--gpus-per-node=8", "--ntasks-per-node=8"]),
    ("slurm", "slurm: {gpus: 'a100:4'}", ["--gpus-per-node=a100:4", "--ntasks-per-node=4"]),
    ("slurm", "gpus_per_node: 0\nprocs_per_node: 3", ["--nodes=1", "--ntasks-per-node=3"]),
    ("slurm", "slurm: {gres: 'gpu:2', exclusive: true}", ["--gres=gpu:2", "--exclusive"]),
    ("slurm", "slurm: {time: 90s, signal: 'B:USR1'}", ["--time=00:01:30", "--signal=B:USR1"]),
    ("slurm", "slurm: {time: 1d12h, cpus_per_task: 12}", ["--time=1-12:00:00", "--cpus-per-task=12"]),
    ("slurm", "slurm: {time: '1-0', signal: USR1@120}", ["--time=1-0", "--signal=B:USR1@120"]),
    ("slurm", "slurm: {comment: 'it''s $x \"y\"'}", ['--comment=it\'s $x "y"']),
    ("slurm", "restarts: {requeue: 3}\nslurm: {extra: [-x], mem: 0}", ["--requeue", "-x", "--mem=0"]),
    ("slurm", "restarts: {max: 3}\nname: long run", ["--no-requeue", "--job-name=long run"]),
    ("slurm", 'name: "a\\nb"\nslurm: {signal: "R:USR1@120"}', ["--job-name=a b", "--signal=RB:USR1@120"]),
    ("slurm", "workdir: 50%j", ["--output={here}/50%%j/slurm-%j.out", "--open-mode=append"]),
    ("grid-engine", "", ["-S /bin/bash", "-N job", "-j y", "-o '{here}/$JOB_NAME.o$JOB_ID'", "-r n"]),
    ("grid-engine", "nodes: 4\ngpus_per_node: 8\ngrid_engine: {pe: mpi}", ["-pe mpi 32", "-l gpu=8"]),
    ("grid-engine", "gpus_per_node: 1\ngrid_engine: {pe: mpi, slots: 16, nodes: 3}", ["-pe mpi 48"]),
    ("grid-engine", "grid_engine: {gpus: 'g=2', time: '36:00:00'}", ["-l g=2", "-l h_rt=36:00:00"]),
    ("grid-engine", "grid_engine: {queue: 'a,b', time: 1d12h}", ["-q a,b", "-l h_rt=36:00:00"]),
    ("grid-engine", "grid_engine: {project: p, extra: [-p -100]}", ["-P p", "-p -100"]),
    ("grid-engine", "on_warning: USR1\nname: '7 of 9: x/y'", ["-notify", "-N job_7_of_9__x_y"]),
    ("pbs", "", ["-N job", "-l select=1:ncpus=1:mpiprocs=1", "-j oe", "-o {here}/", "-r n"]),
    ("pbs", "nodes: 4\ngpus_per_node: 8", ["-l select=4:ncpus=8:mpiprocs=8:ngpus=8", "-l place=scatter"]),
    ("pbs", "pbs: {gpus: 4, cpus: 64, mem: 9gb}", ["-l select=1:ncpus=64:mpiprocs=4:ngpus=4:mem=9gb"]),
    ("pbs", "pbs: {select: '2:ncpus=4+1:ncpus=8'}", ["-l select=2:ncpus=4+1:ncpus=8"]),
    ("pbs", "pbs: {queue: gpu, project: p, account: a, extra: [-x]}", ["-q gpu", "-P p", "-A a", "-x"]),
    ("pbs", "pbs: {time: 12h}", ["-l walltime=12:00:00"]),
    ("lsf", "", ["-J job", "-n 1", "-R 'span[ptile=1]'", "-o {here}/job.o%J", "-rn"]),
    ("lsf", "nodes: 4\ngpus_per_node: 8", ["-n 32", "-R 'span[ptile=8]'", "-gpu num=8"]),
    ("lsf", "nodes: 2\nlsf: {slots: 16, gpus: 4}", ["-n 32", "-R 'span[ptile=16]'", "-gpu num=4"]),
    ("lsf", "nodes: 4\nspares: rest\nlsf: {nodes: 5, time: 1d12h}", ["-n 5", "-W 36:00"]),
    ("lsf", "lsf: {gpus: 'num=2:mode=shared', time: 90s}", ["-gpu num=2:mode=shared", "-W 0:02"]),
    ("lsf", "lsf: {time: '9:30', queue: q, project: p, extra: [-x]}", ["-W 9:30", "-q q", "-P p", "-x"]),
    ("flux", "nodes: 4", ["--job-name=job", "--nodes=4", "--nslots=4", "--cores-per-slot=1"]),
    ("flux", "", ["--output='{here}/job.o{{{{id}}}}'"]),
    ("flux", "nodes: 4\ngpus_per_node: 8", ["--nslots=4", "--cores-per-slot=8", "--gpus-per-slot=8"]),
    ("flux", "flux: {cpus: 6, gpus: 4, extra: [-x]}", ["--cores-per-slot=6", "--gpus-per-slot=4", "-x"]),
    ("flux", "flux: {time: 1d, queue: q, bank: b}", ["--time-limit=86400s", "--queue=q", "--bank=b"]),
]


@pytest.mark.parametrize(("target", "keys", "asked"), OPTIONS)
def test_a_jobs_script_asks_its_scheduler(target: str, keys: str, asked: list[str], tmp_path: Path) -> None:
    found = options_of(target, keys, tmp_path)
    assert [each for each in asked if each.format(here=tmp_path) not in found] == []


def test_a_jobs_script_does_not_ask_twice_or_for_what_a_section_replaces(tmp_path: Path) -> None:
    for target, keys, option in (
        ("slurm", "gpus_per_node: 4\nslurm: {gres: 'gpu:4'}", "--gpus"),
        ("grid-engine", "", "-notify"),
        ("pbs", "pbs: {select: '2:ncpus=4+1:ncpus=8'}", "-l place"),
    ):
        assert not [each for each in options_of(target, keys, tmp_path) if each.startswith(option)]


USELESS = [
    ("slurm", "script: none.py", "script: {here}/none.py does not exist"),
    ("slurm", "workdir: sub", "workdir: {here}/sub does not exist"),
    ("slurm", "python: ./venv/bin/python", "python: {here}/venv/bin/python does not exist"),
    ("slurm", "launcher: local", "launcher: a submitted job runs on its own nodes: remove launcher: local"),
    ("slurm", "nodes: [a, b]", "nodes: Slurm chooses the hosts: set nodes to the number of nodes; "),
    (
        "slurm",
        "nodes: 2\nspares: rest",
        "spares: Slurm chooses the hosts: set spares: rest, and slurm.nodes to the total",
    ),
    (
        "slurm",
        "nodes: 2\nspares: [c]\nslurm: {nodes: 3}",
        "spares: Slurm chooses the hosts: set spares: rest, and slurm.nodes to the total",
    ),
    ("grid-engine", "nodes: 2", "grid_engine.pe: name a parallel environment"),
    ("grid-engine", "restarts: {requeue: 2}", "distlaunch can't requeue Grid Engine jobs; remove this key"),
    ("pbs", "nodes: [a, b]", "nodes: PBS chooses the hosts: set nodes to the number of nodes"),
]


@pytest.mark.parametrize(("target", "text", "problem"), USELESS)
def test_refuses_a_job_that_cannot_work(target: str, text: str, problem: str, tmp_path: Path) -> None:
    for launcher in ("auto", "ssh", "slurm"):
        setup = f"script: none.py\nslurm: {{setup: 'git clone x'}}\nlauncher: {launcher}\n"
        check_submitted(submitted(setup, tmp_path), SLURM)
    (tmp_path / "train.py").touch()
    spec = submitted(text if "script" in text else f"script: train.py\n{text}", tmp_path)
    with pytest.raises(JobError) as refused:
        check_submitted(spec, load(target))
    assert problem.format(here=tmp_path) in str(refused.value)
    assert "job.yaml:" in str(refused.value)


def test_a_job_in_a_queue_has_no_input(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="stdin: a job in a queue has no input: have rank 0 read a file"):
        submitted("script: train.py\nnodes: 2\nstdin: rank 0\n", tmp_path)


REQUESTED = [
    ("gpus_per_node: 3\nslurm: {gpus: 8}", 3),
    ("slurm: {gpus: 8}", 8),
    ("slurm: {gpus: 'volta:3,kepler:1'}", 4),
    ("slurm: {gres: 'nvme:1,gpu:h100:2'}", 2),
    ("slurm: {partition: gpu}", 0),
]


@pytest.mark.parametrize(("keys", "gpus"), REQUESTED)
def test_a_plan_before_the_queue_has_the_requested_gpus(keys: str, gpus: int, tmp_path: Path) -> None:
    read = submitted(f"script: train.py\nnodes: 2\n{keys}\n", tmp_path)
    spec = read.with_gpus(SLURM.gpus(read) or 0)
    assert [node.gpus for node in spec.nodes] == [gpus, gpus]


MISTAKES = [
    ("slurm: {extra: [--array=1-3]}", "slurm.extra[0]: --array can't be used: an array would start"),
    ("slurm: {extra: [-t 5 --array=1-3]}", "slurm.extra[0]: --array can't be used: an array would start"),
    ("slurm: {extra: [--test-only]}", "slurm.extra[0]: --test-only can't be used: distlaunch sets it"),
    ("slurm: {extra: [--nodes=5]}", "slurm.extra[0]: --nodes can't be used: set nodes"),
    ("slurm: {extra: [-N5]}", "slurm.extra[0]: -N can't be used: set nodes"),
    ("slurm: {extra: [-Mb]}", "-M can't be used: set SLURM_CLUSTERS, or use `submit --on HOST` with"),
    ("slurm: {extra: [--no-requeue]}", "--no-requeue can't be used: set restarts.requeue"),
    ("slurm: {extra: ['--signal=B:USR1@40']}", "--signal can't be used: set slurm.signal"),
    ("slurm: {extra: [-o x]}", "slurm.extra[0]: -o can't be used: the job's output goes to logs.dir"),
    ("slurm: {extra: {reservation: x}}", 'a map; each item must be an option such as "--reservation='),
    ("nodes: 4\nslurm: {nodes: 3}", "slurm.nodes: too few for the job: nodes is 4; raise or remove"),
    ("slurm: {signal: 'X:USR1@60'}", "slurm.signal: expected a signal"),
    ("slurm: {signal: TERM@60}", "slurm.signal: use USR1 or USR2; on_warning chooses what the ranks get"),
    ("grid_engine: {walltime: 90s}", "time"),
    ("grid_engine: {extra: [-t 1-3]}", "grid_engine.extra[0]: -t can't be used: an array would start"),
    ("pbs: {extra: [-J 1-3]}", "pbs.extra[0]: -J can't be used: an array would start"),
    ("pbs: {time: 1-0}", "pbs.time: expected a time"),
    ("lsf: {extra: [-oo x]}", "lsf.extra[0]: -oo can't be used: the job's output goes to logs.dir"),
    ("lsf: {extra: [-K]}", "lsf.extra[0]: -K can't be used: use `submit --wait`"),
    ("lsf: {time: '1:00:00'}", "lsf.time: expected a time"),
    ("flux: {extra: [--output=x]}", "flux.extra[0]: --output can't be used: the job's output goes to"),
    ("flux: {account: a}", "flux.account: unknown key; use bank"),
]


@pytest.mark.parametrize(("keys", "problem"), MISTAKES)
def test_explains_mistakes_in_a_schedulers_section(keys: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=re.escape(problem)):
        submitted(f"script: train.py\n{keys}\n", tmp_path)


# What a queue says of a job


QSTAT_XML = """<?xml version='1.0'?>
<job_info  xmlns:xsd="http://arc.liv.ac.uk/repos/darcs/sge/source/dist/util/resources/schemas/qstat/qstat.xsd">
  <queue_info>
    <job_list state="running">
      <JB_job_number>4711</JB_job_number>
      <JB_name>a & b <c></JB_name>
      <state>{state}</state>
    </job_list>
  </queue_info>
  <job_info>
    <job_list state="pending"><JB_job_number>4712</JB_job_number> <state>qw</state></job_list>
  </job_info>
</job_info>
"""
"""As `qstat -u ann -xml` of Grid Engine 8.1.9 prints it, by its schema, but for what nobody reads."""
QSTAT_F = """
a site's greeting
Job Id: 88.pbs.cluster.example
    Job_Name = train
    job_state = {state}
    Error_Path = login1:/rds/general/user/ann/home/project-
\tdirectory/job_state = Q.e88
    Variable_List = PBS_O_SYSTEM=Linux,PBS_O_SHELL=/bin/bash,
\tPBS_O_HOME=/home/ann,comment = none
{comment}    etime = Mon Feb 13 19:00:07 2026

Job Id: 89.pbs.cluster.example
    Job_Name = other
    job_state = R
    comment = Job run at Tue Feb 22 at 18:26 on (x1000:ncpus=8)

"""
"""As `qstat -f` of OpenPBS and Torque prints it."""
NOT_RUNNING = "    comment = Not Running: per-user limit reached on resource\n\t ncpus\n"


def grid_engine_queued(state: str) -> Queued:
    found = grid_engine.jobs_in(QSTAT_XML.format(state=state))
    assert (found["4712"].stage, found["4712"].words) == ("waits", "qw")
    return found["4711"]


def pbs_queued(state: str, comment: str = "") -> Queued:
    found = pbs.jobs_in(QSTAT_F.format(state=state, comment=comment))
    assert [*found] == ["88.pbs.cluster.example", "89.pbs.cluster.example"]
    return found["88.pbs.cluster.example"]


STAGES = [
    (slurm.queued, "waits", "PENDING REQUEUE_HOLD"),
    (slurm.queued, "goes", "RUNNING SUSPENDED"),
    (slurm.queued, "ends", "COMPLETING STAGE_OUT"),
    (slurm.queued, "over", "COMPLETED NODE_FAIL GONE"),
    (lsf.queued, "waits", "PEND PSUSP"),
    (lsf.queued, "goes", "RUN SSUSP UNKWN"),
    (lsf.queued, "over", "DONE EXIT"),
    (flux.queued, "waits", "DEPEND SCHED"),
    (flux.queued, "goes", "RUN"),
    (flux.queued, "ends", "CLEANUP"),
    (flux.queued, "over", "COMPLETED TIMEOUT"),
    (grid_engine_queued, "waits", "qw hqw hRqw"),
    (grid_engine_queued, "goes", "r t S Rr Rq"),
    (grid_engine_queued, "ends", "dr dqw"),
    (grid_engine_queued, "over", "z"),
    (pbs_queued, "waits", "Q H W"),
    (pbs_queued, "goes", "R S"),
    (pbs_queued, "ends", "E"),
    (pbs_queued, "over", "C F M"),
]


@pytest.mark.parametrize(("queued", "stage", "states"), STAGES)
def test_states_of_a_queue_become_stages(queued: Callable[[str], Queued], stage: str, states: str) -> None:
    found = [queued(state) for state in states.split()]
    assert [(each.words, each.stage) for each in found] == [(state, stage) for state in states.split()]


REASONS = [
    (grid_engine_queued("Eqw"), "Eqw (can't start: `qstat -j 4711` says why)", "waits"),
    (lsf.queued("PEND", "-", "Job dependency not satisfied"), "PEND (Job dependency not satisfied)", "waits"),
    (pbs_queued("Q", NOT_RUNNING), "Q (Not Running: per-user limit reached on resource ncpus)", "waits"),
    (pbs_queued("F", "    comment = and failed\n"), "F (and failed)", "over"),
    (lsf.queued("EXIT", "TERM_OWNER: job killed by owner"), CANCELLED, "over"),
    (flux.queued("CANCELED"), CANCELLED, "over"),
]


@pytest.mark.parametrize(("queued", "words", "stage"), REASONS)
def test_the_reason_for_a_jobs_state_is_shown(queued: Queued, words: str, stage: str) -> None:
    assert (queued.words, queued.stage) == (words, stage)


@pytest.mark.parametrize("name", ["slurm", "grid-engine"])
def test_a_user_without_a_name_has_no_jobs_to_look_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getuid", lambda: 2**32 - 2)
    with pytest.raises(DistlaunchError, match="this host has no user name for UID 4294967294"):
        load(name).look(["1", "2"])


# Which scheduler, and the parts of its script


def test_a_section_chooses_the_scheduler(tmp_path: Path) -> None:
    for keys, target in (
        ("", "slurm"),
        ("slurm: {partition: gpu}", "slurm"),
        ("grid_engine: {pe: mpi}", "grid-engine"),
        ("pbs: {time: 1h}\nslurm: {time: 1h}", "slurm"),
    ):
        assert target_of(submitted(f"script: train.py\n{keys}\n", tmp_path)) == target
    spec = submitted("script: train.py\npbs: {time: 1h}\ngrid_engine: {time: 1h}\n", tmp_path)
    with pytest.raises(UsageError, match="sections for pbs, grid-engine: choose one with --to"):
        target_of(spec)


def test_a_followed_job_prints_into_the_run_directorys_parent(tmp_path: Path) -> None:
    spec = submitted("script: train.py\nlogs: {dir: my runs}\n", tmp_path)
    script = load("grid-engine").script(spec, CALL, followed=True)
    assert f"#$ -o '{tmp_path}/my runs/grid-engine-$JOB_ID.out'\n" in script
    assert "#$ -notify\n" in script  # without it, qdel is a SIGKILL
    assert "#$ -cwd\n" in script  # a job from a pipe has no other directory
    script = load("pbs").script(spec, CALL, followed=True)
    assert f"#PBS -o '{tmp_path}/my runs/'\n" in script
    assert f"exec >>'{tmp_path}/my runs'/pbs-\"$PBS_JOBID\".out 2>&1\n" in script
    assert script.index("exec >>") < script.index('cd "$PBS_O_WORKDIR"\n') < script.index("distlaunch run")


def test_an_unknown_scheduler_is_refused() -> None:
    with pytest.raises(
        DistlaunchError,
        match="unknown scheduler oar: distlaunch knows slurm, grid-engine, pbs",
    ):
        load("oar")


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("setup", ["[ml cuda, ml nccl]", '"ml cuda\\nml nccl\\n"'])
def test_a_script_has_the_trap_the_setup_and_the_command(name: str, setup: str, tmp_path: Path) -> None:
    scheduler = load(name)
    spec = submitted(f"script: t.py\n{scheduler.key}: {{setup: {setup}}}\n", tmp_path)
    lines = scheduler.script(spec, CALL).splitlines()
    call = lines.index("distlaunch run /work/job.yaml" + " &" * scheduler.waits)
    ends = {"grid-engine": "exit $status", "slurm": "wait $!"}
    assert ("set +eu; trap - ERR  # the last lines must run" in lines) == (name in ends)
    shown = [line for line in lines[:call] if not line.startswith("set +eu")]
    trap, first, second, before, _, traps, after = shown[-7:]
    assert trap == ("trap : USR1" if name == "grid-engine" else "trap : USR1 USR2")
    assert (first, second, before) == ("ml cuda", "ml nccl", "")
    assert (traps, after) == ("trap : INT TERM; trap '' USR1 USR2", "")
    assert lines[call + 1 :][-1:] == [*filter(None, [ends.get(name)])]


CAUSE = Cause("why", 1, 1.0)


ENDS = [
    (None, False, False),
    (None, True, True),  # it may just have saved its work
    (CAUSE, False, True),
    *((CAUSE._replace(exit_status=status), False, False) for status in (2, 126)),
    (CAUSE._replace(exit_status=127), True, False),
    (CAUSE._replace(exit_status=130, cancelled=True), False, False),
    (CAUSE._replace(exit_status=143, scheduled=True), False, True),  # its time limit
    (CAUSE._replace(exit_status=143, scheduled=True, final=True), False, False),  # requeued already
]


@pytest.mark.parametrize(("cause", "warned", "goes_on"), ENDS)
def test_requeues_jobs_that_a_new_start_can_help(cause: Cause | None, warned: bool, goes_on: bool) -> None:
    state = Job().state._replace(warned=warned, verdict=Verdict(cause, 1.0))
    assert not is_to_go_on(state)
    wanted = state.spec._replace(restarts=state.spec.restarts._replace(requeue=1))
    assert is_to_go_on(state._replace(spec=wanted)) == goes_on


@pytest.mark.parametrize(
    ("exclusion", "kind", "warned", "goes_on"),
    [
        ("never: [stall]", "stall", False, False),
        ("on: [node_lost]", "stall", False, False),
        ("on: [stall]", "stall", False, True),
        ("never: [stall]", "stall", True, True),
        ("on: [node_lost]", None, False, True),  # timeouts.job, for example
    ],
)
def test_requeues_no_failure_that_restarts_exclude(
    exclusion: str, kind: FailureKind | None, warned: bool, goes_on: bool
) -> None:
    """Even if no restart came into question, as with `on_stall: stop`."""
    state = Job(text_of("[a, b]", "on_stall: stop", restarts=f"restarts: {{requeue: 1, {exclusion}}}")).state
    state = state._replace(warned=warned, verdict=Verdict(CAUSE._replace(kind=kind), 1.0))
    assert is_to_go_on(state) == goes_on


@pytest.mark.parametrize(("signum", "goes_on"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_does_not_requeue_a_job_that_the_user_stops_while_it_is_failing(signum: int, goes_on: bool) -> None:
    """Slurm sends SIGTERM at the time limit."""
    job = Job(text_of(restarts="restarts: {requeue: 1}")).to_running()
    job.feed(exited(0, 0, 3, job.now))
    job.feed(Interrupted(signum), after=2.0)
    assert (job.state.outcome, is_to_go_on(job.state)) == (3, goes_on)
