"""Jobs for a queue: their batch scripts, what is refused before they wait, and which of them go on."""

import shlex
from pathlib import Path

import pytest

from distlaunch.errors import DistlaunchError, JobError
from distlaunch.job.file import job_of
from distlaunch.job.spec import JobSpec
from distlaunch.runs.submissions import Submission, submission
from distlaunch.schedulers import TABLE, flux, grid_engine, load, lsf, pbs, target_of
from distlaunch.schedulers.queue import CANCELLED
from distlaunch.schedulers.script import Call, Scheduler, check_submitted
from distlaunch.schedulers.slurm import queued
from distlaunch.supervisor.scheduling import is_to_go_on
from distlaunch.supervisor.state import Cause, Verdict
from tests.unit.test_restarts import Job

CALL = Call(("distlaunch", "run", "/work/job.yaml"))
SLURM = load("slurm")


def submitted(text: str, folder: Path) -> JobSpec:
    path = folder / "job.yaml"
    path.write_text(text)
    return job_of(text, str(path), submitted=True)


def options(text: str, folder: Path) -> list[str]:
    """What sbatch is asked for; #SBATCH lines are split as a shell would."""
    lines = SLURM.script(submitted(text, folder), CALL).splitlines()
    return [word for line in lines if line.startswith("#SBATCH ") for word in shlex.split(line)[1:]]


@pytest.mark.parametrize(
    ("keys", "asked"),
    [
        ("", ["--nodes=1"]),
        ("nodes: 4", ["--nodes=4"]),
        ("nodes: 4\nspares: rest\nslurm: {nodes: 5}", ["--nodes=5", "--no-kill"]),
        ("nodes: 4\nmin_nodes: 2", ["--no-kill"]),
        ("gpus_per_node: 8", ["--gpus-per-node=8", "--ntasks-per-node=8"]),
        ("slurm: {gpus: 'a100:4'}", ["--gpus-per-node=a100:4", "--ntasks-per-node=4"]),
        ("gpus_per_node: 0\nprocs_per_node: 3", ["--ntasks-per-node=3"]),
        ("slurm: {gres: 'gpu:2'}", ["--gres=gpu:2"]),
        ("slurm: {mem: 0, cpus_per_task: 12}", ["--mem=0", "--cpus-per-task=12"]),
        ("slurm: {time: 1d12h}", ["--time=1-12:00:00"]),
        ("slurm: {exclusive: true}", ["--exclusive"]),
        ("slurm: {comment: 'it''s $x \"y\"'}", ['--comment=it\'s $x "y"']),
        ("slurm: {signal: USR1@120}", ["--signal=USR1@120"]),
        ("slurm: {extra: [--reservation=maint, --spread-job]}", ["--reservation=maint", "--spread-job"]),
        ("restarts: {requeue: 3}", ["--requeue"]),
        ("restarts: {max: 3}", ["--no-requeue"]),
        ("name: long run", ["--job-name=long run"]),
        ('name: "a\\nb"', ["--job-name=a b"]),
        ("logs: {dir: '100%'}", ["--open-mode=append"]),
    ],
)
def test_what_a_job_asks_of_slurm(keys: str, asked: list[str], tmp_path: Path) -> None:
    found = options(f"script: train.py\n{keys}\n", tmp_path)
    assert [each for each in asked if each not in found] == []


def test_gpus_are_not_asked_for_twice(tmp_path: Path) -> None:
    found = options("script: train.py\ngpus_per_node: 4\nslurm: {gres: 'gpu:4'}\n", tmp_path)
    assert not [each for each in found if each.startswith("--gpus")]


def test_a_percent_sign_in_a_folder_is_no_pattern_of_slurms(tmp_path: Path) -> None:
    found = options("script: train.py\nlogs: {dir: '50%j'}\n", tmp_path)
    assert f"--output={tmp_path}/50%%j/slurm-%j.out" in found


@pytest.mark.parametrize(
    ("text", "time"),
    [("90s", "00:01:30"), ("12h", "12:00:00"), ("1d12h", "1-12:00:00"), ("1-0", "1-0"), ("10:00", "10:00")],
)
def test_times_as_slurm_has_them(text: str, time: str, tmp_path: Path) -> None:
    assert f"--time={time}" in options(f"script: train.py\nslurm: {{time: '{text}'}}\n", tmp_path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("script: none.py", "script: {here}/none.py does not exist"),
        (
            "script: train.py\nnodes: [a, b]",
            "nodes: Slurm chooses the hosts: set nodes to the number of nodes; ",
        ),
        ("script: train.py\nworkdir: sub", "workdir: {here}/sub does not exist"),
        ("script: train.py\npython: ./venv/bin/python", "python: {here}/venv/bin/python does not exist"),
        ("script: train.py\nnodes: 2\nspares: rest", "spares: set slurm.nodes to the number of all nodes"),
    ],
)
def test_what_can_not_work_is_refused_before_it_waits(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with pytest.raises(JobError) as refused:
        check_submitted(submitted(text, tmp_path), SLURM)
    assert problem.format(here=tmp_path) in str(refused.value)
    assert "job.yaml:" in str(refused.value)


@pytest.mark.parametrize(
    ("keys", "gpus"),
    [
        ("gpus_per_node: 3\nslurm: {gpus: 8}", 3),
        ("slurm: {gpus: 8}", 8),
        ("slurm: {gpus: 'a100:4'}", 4),
        ("slurm: {gres: 'nvme:1,gpu:h100:2'}", 2),
        ("slurm: {partition: gpu}", 0),
    ],
)
def test_a_plan_before_the_queue_takes_the_gpus_that_are_asked_for(
    keys: str, gpus: int, tmp_path: Path
) -> None:
    spec = SLURM.with_gpus(submitted(f"script: train.py\nnodes: 2\n{keys}\n", tmp_path))
    assert [node.gpus for node in spec.nodes] == [gpus, gpus]


def test_a_setup_may_make_the_script(tmp_path: Path) -> None:
    check_submitted(submitted("script: none.py\nslurm: {setup: 'git clone x'}\n", tmp_path), SLURM)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ("slurm: {extra: [--array=1-3]}", "slurm.extra[0]: --array can't be used: an array would start"),
        ("slurm: {extra: [-o x]}", "slurm.extra[0]: -o can't be used: the job's output goes to logs.dir"),
        ("nodes: 4\nslurm: {nodes: 3}", "slurm.nodes: the job needs more: nodes is 4"),
        ("slurm: {time: 12:00:00}", 'quote it: "12:00:00"'),
        ("slurm: {signal: 'B:USR1@60'}", "slurm.signal: expected a signal"),
    ],
)
def test_mistakes_in_the_section(keys: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(JobError) as refused:
        submitted(f"script: train.py\n{keys}\n", tmp_path)
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("state", "waits", "over"),
    [
        ("PENDING", True, False),
        ("REQUEUE_HOLD", True, False),
        ("RUNNING", False, False),
        ("COMPLETING", False, False),
        ("COMPLETED", False, True),
        ("NODE_FAIL", False, True),
        ("GONE", False, True),
    ],
)
def test_what_a_queues_words_mean(state: str, waits: bool, over: bool) -> None:
    assert (queued(state).waits, queued(state).over) == (waits, over)


# Grid Engine and PBS


@pytest.mark.parametrize(
    ("keys", "target"),
    [
        ("", "slurm"),
        ("slurm: {partition: gpu}", "slurm"),
        ("grid_engine: {pe: mpi}", "grid-engine"),
        ("pbs: {time: 1h}", "pbs"),
        ("pbs: {time: 1h}\nslurm: {time: 1h}", "slurm"),
        ("pbs: {time: 1h}\ngrid_engine: {time: 1h}", "slurm"),
    ],
)
def test_a_job_goes_where_it_has_a_section_for(keys: str, target: str, tmp_path: Path) -> None:
    assert target_of(submitted(f"script: train.py\n{keys}\n", tmp_path)) == target


def test_a_job_that_is_followed_prints_into_the_folder_of_its_runs(tmp_path: Path) -> None:
    spec = submitted("script: train.py\nlogs: {dir: my runs}\n", tmp_path)
    script = load("grid-engine").script(spec, CALL, followed=True)
    assert f"#$ -o '{tmp_path}/my runs/grid-engine-$JOB_ID.out'\n" in script
    assert "#$ -notify\n" in script  # without it, qdel is a SIGKILL
    assert "#$ -cwd\n" in script  # a job from a pipe has no other folder
    script = load("pbs").script(spec, CALL, followed=True)
    assert f"#PBS -o '{tmp_path}/my runs/'\n" in script
    assert f"exec >>'{tmp_path}/my runs'/pbs-\"$PBS_JOBID\".out 2>&1\n" in script
    assert script.index("exec >>") < script.index('cd "$PBS_O_WORKDIR"\n') < script.index("distlaunch run")


@pytest.mark.parametrize("name", TABLE)
def test_every_scheduler_is_whole(name: str) -> None:
    scheduler = load(name)
    assert scheduler.name == name
    for needed in ("allocation", "options", "submit", "look"):
        assert getattr(type(scheduler), needed) is not getattr(Scheduler, needed)
    if scheduler.answers:
        assert {"fate_argv", "fate", "requeue"} <= vars(type(scheduler)).keys()


def test_a_scheduler_that_another_version_knew_is_told() -> None:
    with pytest.raises(DistlaunchError, match="this version of distlaunch can't ask oar"):
        load("oar")


def test_what_was_listed_before_there_were_other_schedulers_is_slurms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "distlaunch").mkdir()
    lines = (
        '{"queued": "17", "id": "17", "job": "train", "folder": "/w/runs", "at": 5.0, "end": ""}',
        '{"run": "train-20261122-091211-78fd1953", "folder": "/w/runs/x", "host": "h", "queued": "18"}',
        '{"queued": "17", "end": "COMPLETED"}',
    )
    (tmp_path / "distlaunch" / "runs.jsonl").write_text("\n".join(lines))
    first, second = submission("17"), submission("18")
    assert first == Submission("17", "train", "/w/runs", 5.0, "COMPLETED", "slurm")
    assert second == Submission("18", "", "/w/runs", 0.0)
    assert first.output == "/w/runs/slurm-17.out"


QSTAT_XML = """<?xml version='1.0'?>
<job_info  xmlns:xsd="http://arc.liv.ac.uk/repos/darcs/sge/source/dist/util/resources/schemas/qstat/qstat.xsd">
  <queue_info>
    <job_list state="running">
      <JB_job_number>4711</JB_job_number>
      <JAT_prio>0.55500</JAT_prio>
      <JB_name>train</JB_name>
      <JB_owner>ann</JB_owner>
      <state>{running}</state>
      <JAT_start_time>2026-07-06T14:48:01</JAT_start_time>
      <queue_name>all.q@node1</queue_name>
      <slots>8</slots>
    </job_list>
  </queue_info>
  <job_info>
    <job_list state="pending">
      <JB_job_number>4712</JB_job_number>
      <JAT_prio>0.00000</JAT_prio>
      <JB_name>a & b <c></JB_name>
      <JB_owner>ann</JB_owner>
      <state>{pending}</state>
      <JB_submission_time>2026-07-06T14:48:01</JB_submission_time>
      <queue_name></queue_name>
      <slots>8</slots>
    </job_list>
  </job_info>
</job_info>
"""
"""As `qstat -u ann -xml` of Grid Engine 8.1.9 prints it, by its schema."""


@pytest.mark.parametrize(
    ("running", "pending", "stages", "words"),
    [
        ("r", "qw", ("goes", "waits"), "qw"),
        ("t", "hqw", ("goes", "waits"), "hqw"),
        ("S", "hRqw", ("goes", "waits"), "hRqw"),
        ("dr", "Eqw", ("goes", "waits"), "Eqw (can't start: `qstat -j 4712` says why)"),
        ("Rr", "dqw", ("goes", "goes"), "dqw"),
        ("z", "Rq", ("over", "goes"), "Rq"),
    ],
)
def test_what_grid_engines_letters_mean(
    running: str, pending: str, stages: tuple[str, str], words: str
) -> None:
    found = grid_engine.jobs_in(QSTAT_XML.format(running=running, pending=pending))
    assert (found["4711"].stage, found["4712"].stage) == stages
    assert found["4712"].words == words


def test_an_empty_queue_of_grid_engine() -> None:
    said = "<?xml version='1.0'?><job_info><queue_info></queue_info><job_info></job_info></job_info>"
    assert grid_engine.jobs_in(said) == {}


QSTAT_F = """
a site's greeting
Job Id: 88.pbs.cluster.example
    Job_Name = train
    Job_Owner = ann@login1
    job_state = {state}
    queue = gpu
    server = pbs
    Error_Path = login1:/rds/general/user/ann/home/project-
\tdirectory/job_state = Q.e88
    Variable_List = PBS_O_SYSTEM=Linux,PBS_O_SHELL=/bin/bash,
\tPBS_O_HOME=/home/ann,comment = none
{comment}    etime = Mon Feb 13 19:00:07 2026

Job Id: 89.pbs.cluster.example
    Job_Name = other
    job_state = R
    comment = Job run at Tue Feb 22 at 18:26 on (x1000:ncpus=8)
    run_count = 1

"""
"""As `qstat -f` of OpenPBS and Torque prints it."""
NOT_RUNNING = """    comment = Not Running: Queue gpu per-user limit reached on resource
\t ncpus
"""


@pytest.mark.parametrize(
    ("state", "comment", "stage", "words"),
    [
        ("Q", NOT_RUNNING, "waits", "Q (Not Running: Queue gpu per-user limit reached on resource ncpus)"),
        ("Q", "", "waits", "Q"),
        ("H", "", "waits", "H"),
        ("W", "", "waits", "W"),
        ("R", "", "goes", "R"),
        ("S", "", "goes", "S"),
        ("E", "", "goes", "E"),
        ("C", "", "over", "C"),
        ("F", "    comment = and failed\n", "over", "F (and failed)"),
        ("M", "", "over", "M"),
    ],
)
def test_what_pbs_says_of_a_job(state: str, comment: str, stage: str, words: str) -> None:
    found = pbs.jobs_in(QSTAT_F.format(state=state, comment=comment))
    assert [*found] == ["88.pbs.cluster.example", "89.pbs.cluster.example"]
    told = found["88.pbs.cluster.example"]
    assert (told.stage, told.words) == (stage, words)


MARKS = {"grid-engine": "#$ ", "pbs": "#PBS ", "lsf": "#BSUB ", "flux": "#flux: "}


def script_of(target: str, keys: str, folder: Path) -> list[str]:
    """The options that a script asks its scheduler for."""
    script = load(target).script(submitted(f"script: train.py\n{keys}\n", folder), CALL)
    lines = script.splitlines()
    return [line.removeprefix(MARKS[target]) for line in lines if line.startswith(MARKS[target])]


@pytest.mark.parametrize(
    ("keys", "asked"),
    [
        ("", ["-S /bin/bash", "-N job", "-j y", "-o '{here}/$JOB_NAME.o$JOB_ID'", "-r n"]),
        ("nodes: 4\ngpus_per_node: 8\ngrid_engine: {pe: mpi}", ["-pe mpi 32", "-l gpu=8"]),
        ("nodes: 4\nprocs_per_node: 2\ngrid_engine: {pe: mpi}", ["-pe mpi 8"]),
        ("nodes: 2\ngpus_per_node: 1\ngrid_engine: {pe: mpi, slots: 16, nodes: 3}", ["-pe mpi 48"]),
        ("gpus_per_node: 2\ngrid_engine: {gpus: 'gpu_card=2'}", ["-l gpu_card=2"]),
        ("grid_engine: {queue: 'gpu.q,long.q', project: lab}", ["-q gpu.q,long.q", "-P lab"]),
        ("grid_engine: {time: 1d12h}", ["-l h_rt=36:00:00"]),
        ("grid_engine: {time: '36:00:00'}", ["-l h_rt=36:00:00"]),
        ("grid_engine: {walltime: 90s}", None),
        ("on_notice: USR1", ["-notify"]),
        ("name: '7 of 9: x/y'", ["-N job_7_of_9__x_y"]),
        ("grid_engine: {extra: [-p -100, -hard]}", ["-p -100", "-hard"]),
    ],
)
def test_what_a_job_asks_of_grid_engine(keys: str, asked: list[str] | None, tmp_path: Path) -> None:
    if asked is None:
        with pytest.raises(JobError, match="time"):
            script_of("grid-engine", keys, tmp_path)
        return
    found = script_of("grid-engine", keys, tmp_path)
    assert [each for each in asked if each.format(here=tmp_path) not in found] == []
    assert ("-notify" in found) == ("on_notice" in keys)


@pytest.mark.parametrize(
    ("keys", "asked"),
    [
        ("", ["-N job", "-l select=1:ncpus=1:mpiprocs=1", "-l place=scatter", "-j oe", "-o {here}/", "-r n"]),
        ("nodes: 4\ngpus_per_node: 8", ["-l select=4:ncpus=8:mpiprocs=8:ngpus=8"]),
        (
            "nodes: 4\npbs: {gpus: 4, cpus: 64, mem: 200gb}",
            ["-l select=4:ncpus=64:mpiprocs=4:ngpus=4:mem=200gb"],
        ),
        ("nodes: 4\nspares: rest\npbs: {nodes: 5}", ["-l select=5:ncpus=1:mpiprocs=1"]),
        ("pbs: {select: '2:ncpus=4+1:ncpus=8'}", ["-l select=2:ncpus=4+1:ncpus=8"]),
        ("pbs: {time: 12h}", ["-l walltime=12:00:00"]),
        ("pbs: {queue: gpu, project: p, account: a}", ["-q gpu", "-P p", "-A a"]),
        ("pbs: {extra: [-l filesystems=home]}", ["-l filesystems=home"]),
    ],
)
def test_what_a_job_asks_of_pbs(keys: str, asked: list[str], tmp_path: Path) -> None:
    found = script_of("pbs", keys, tmp_path)
    assert [each for each in asked if each.format(here=tmp_path) not in found] == []
    assert ("-l place=scatter" in found) == ("select:" not in keys)


@pytest.mark.parametrize(
    ("keys", "asked"),
    [
        ("", ["-J job", "-n 1", "-R 'span[ptile=1]'", "-o {here}/job.o%J", "-rn"]),
        ("nodes: 4\ngpus_per_node: 8", ["-n 32", "-R 'span[ptile=8]'", "-gpu num=8"]),
        ("nodes: 2\nlsf: {slots: 16, gpus: 4}", ["-n 32", "-R 'span[ptile=16]'", "-gpu num=4"]),
        ("lsf: {gpus: 'num=2:mode=exclusive_process'}", ["-gpu num=2:mode=exclusive_process"]),
        ("nodes: 4\nspares: rest\nlsf: {nodes: 5}", ["-n 5"]),
        ("lsf: {time: 1d12h}", ["-W 36:00"]),
        ("lsf: {time: 90s}", ["-W 0:02"]),
        ("lsf: {time: '36:30', queue: gpu, project: p}", ["-W 36:30", "-q gpu", "-P p"]),
        ("lsf: {extra: [-x]}", ["-x"]),
    ],
)
def test_what_a_job_asks_of_lsf(keys: str, asked: list[str], tmp_path: Path) -> None:
    found = script_of("lsf", keys, tmp_path)
    assert [each for each in asked if each.format(here=tmp_path) not in found] == []


@pytest.mark.parametrize(
    ("keys", "asked"),
    [
        ("", ["--job-name=job", "--nodes=1", "--nslots=1", "--cores-per-slot=1"]),
        ("", ["--output='{here}/job.o{{{{id}}}}'"]),
        (
            "nodes: 4\ngpus_per_node: 8",
            ["--nodes=4", "--nslots=4", "--cores-per-slot=8", "--gpus-per-slot=8"],
        ),
        ("flux: {cpus: 64, gpus: 4}", ["--cores-per-slot=64", "--gpus-per-slot=4"]),
        ("flux: {time: 1d12h, queue: gpu, bank: b}", ["--time-limit=129600s", "--queue=gpu", "--bank=b"]),
        ("flux: {extra: [--exclusive]}", ["--exclusive"]),
    ],
)
def test_what_a_job_asks_of_flux(keys: str, asked: list[str], tmp_path: Path) -> None:
    found = script_of("flux", keys, tmp_path)
    assert [each for each in asked if each.format(here=tmp_path) not in found] == []


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("setup", ["[ml cuda, ml nccl]", '"ml cuda\\nml nccl\\n"'])
def test_a_script_has_the_trap_the_setup_and_the_command(name: str, setup: str, tmp_path: Path) -> None:
    scheduler = load(name)
    spec = submitted(f"script: t.py\n{scheduler.key}: {{setup: {setup}}}\n", tmp_path)
    *_, trap, before, first, second, after, call = scheduler.script(spec, CALL).splitlines()
    assert (before, after) == ("", "")
    assert (trap, first, second) == ("trap : INT TERM USR1 USR2", "ml cuda", "ml nccl")
    assert call == "distlaunch run /work/job.yaml"


@pytest.mark.parametrize(
    ("state", "reason", "stage", "words"),
    [
        ("PEND", "Job dependency condition not satisfied", "waits", None),
        ("PSUSP", "-", "waits", "PSUSP"),
        ("RUN", "-", "goes", "RUN"),
        ("SSUSP", "", "goes", "SSUSP"),
        ("UNKWN", "-", "goes", "UNKWN"),
        ("DONE", "-", "over", "DONE"),
        ("EXIT", "-", "over", "EXIT"),
    ],
)
def test_what_lsf_says_of_a_job(state: str, reason: str, stage: str, words: str | None) -> None:
    found = lsf.queued(state, "-", reason)
    assert (found.stage, found.words) == (stage, words or f"{state} ({reason})")
    assert lsf.queued("EXIT", "TERM_OWNER: job killed by owner").state == CANCELLED


@pytest.mark.parametrize(
    ("status", "stage", "state"),
    [
        ("DEPEND", "waits", "DEPEND"),
        ("SCHED", "waits", "SCHED"),
        ("RUN", "goes", "RUN"),
        ("CLEANUP", "goes", "CLEANUP"),
        ("COMPLETED", "over", "COMPLETED"),
        ("TIMEOUT", "over", "TIMEOUT"),
        ("CANCELED", "over", "CANCELLED"),
    ],
)
def test_what_flux_says_of_a_job(status: str, stage: str, state: str) -> None:
    found = flux.queued(status)
    assert (found.stage, found.state) == (stage, state)


@pytest.mark.parametrize(
    ("target", "keys", "problem"),
    [
        ("grid-engine", "nodes: 2", "grid_engine.pe: name a parallel environment"),
        ("pbs", "nodes: [a, b]", "nodes: PBS chooses the hosts: set nodes to the number of nodes"),
        ("pbs", "nodes: 2\nspares: rest", "spares: set pbs.nodes to the number of all nodes"),
        ("grid-engine", "restarts: {requeue: 2}", "only Slurm can be asked to start a job again, not Grid"),
        ("flux", "restarts: {requeue: 2}", "only Slurm can be asked to start a job again, not Flux"),
        ("lsf", "nodes: [a, b]", "nodes: LSF chooses the hosts: set nodes to the number of nodes"),
        ("pbs", "script: none.py", "script: {here}/none.py does not exist"),
    ],
)
def test_what_can_not_work_for_an_engine(target: str, keys: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    text = keys if "script" in keys else f"script: train.py\n{keys}"
    with pytest.raises(JobError) as refused:
        check_submitted(submitted(text, tmp_path), load(target))
    assert problem.format(here=tmp_path) in str(refused.value)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ("grid_engine: {extra: [-t 1-3]}", "grid_engine.extra[0]: -t can't be used: an array would start"),
        ("grid_engine: {extra: [-o x]}", "grid_engine.extra[0]: -o can't be used"),
        ("pbs: {extra: [-J 1-3]}", "pbs.extra[0]: -J can't be used: an array would start"),
        ("nodes: 4\npbs: {nodes: 3}", "pbs.nodes: the job needs more: nodes is 4"),
        ("pbs: {time: 12:00:00}", 'quote it: "12:00:00"'),
        ("pbs: {time: 1-0}", "pbs.time: expected a time"),
        ("lsf: {extra: [-oo x]}", "lsf.extra[0]: -oo can't be used: the job's output goes to logs.dir"),
        ("lsf: {extra: [-K]}", "lsf.extra[0]: -K can't be used: use `submit --wait`"),
        ("lsf: {time: '1:00:00'}", "lsf.time: expected a time"),
        ("flux: {extra: [--output=x]}", "flux.extra[0]: --output can't be used: the job's output goes to"),
        ("flux: {account: a}", "flux.account: unknown key; use bank"),
    ],
)
def test_mistakes_in_an_engines_section(keys: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(JobError) as refused:
        submitted(f"script: train.py\n{keys}\n", tmp_path)
    assert problem in str(refused.value)


CAUSE = Cause("why", 1, 1.0)


@pytest.mark.parametrize(
    ("cause", "noticed", "goes_on"),
    [
        (None, False, False),
        (None, True, True),  # it may just have saved its work
        (CAUSE, False, True),
        (CAUSE._replace(exit_status=2), False, False),
        (CAUSE._replace(exit_status=126), False, False),
        (CAUSE._replace(exit_status=127), True, False),
        (CAUSE._replace(exit_status=130, cancelled=True), False, False),
        (CAUSE._replace(exit_status=143, scheduled=True), False, True),  # its time limit
        (CAUSE._replace(exit_status=143, scheduled=True, final=True), False, False),  # requeued already
    ],
)
def test_which_jobs_are_to_go_on(cause: Cause | None, noticed: bool, goes_on: bool) -> None:
    state = Job().state._replace(noticed=noticed, verdict=Verdict(cause, 1.0))
    assert not is_to_go_on(state)
    wanted = state.spec._replace(restarts=state.spec.restarts._replace(requeue=1))
    assert is_to_go_on(state._replace(spec=wanted)) == goes_on
