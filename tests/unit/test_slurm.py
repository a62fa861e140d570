"""Slurm: its variables, steps and messages, and supervision inside an allocation."""

import re
import time

import pytest

from distlaunch.agent.messages import AgentLeaving, Interrupted, WarningReceived
from distlaunch.agent.wire import AGENT_DIED, CLEAN, LEFT_EARLY
from distlaunch.cli.run import refuse_copy
from distlaunch.errors import UsageError
from distlaunch.job.spec import AllocatedNode, Allocation
from distlaunch.schedulers import allocation_in
from distlaunch.schedulers.slurm import ADVICE, scheduler
from distlaunch.schedulers.task import Task, check_devices, check_master
from distlaunch.supervisor.actions import AskScheduler
from distlaunch.supervisor.events import AllocationReported, LinkEnded
from distlaunch.supervisor.state import Phase
from distlaunch.supervisor.summary import Summary
from distlaunch.transports.failure import Kind, LinkFailure, ProcessEnd
from distlaunch.transports.slurm import SlurmStep
from tests.unit.orders import Close, WarnWorkers
from tests.unit.tasks import task_environment
from tests.unit.test_restarts import Job, inside
from tests.unit.test_supervisor import Actions, exited, lost, texts

# Variables


# As Slurm 22.05 sets them.
PLAIN = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": "host[1-3]",
    "SLURM_TASKS_PER_NODE": "1(x3)",
    "SLURM_GPUS_PER_NODE": "a100:2",
}
HET = {
    "SLURM_JOB_ID": "10",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "host1",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "host[2-3]",
    "SLURM_GPUS_PER_NODE_HET_GROUP_0": "1",
    "SLURM_NTASKS_HET_GROUP_1": "4",
    "SLURM_TASKS_PER_NODE_HET_GROUP_0": "1",
    "SLURM_TASKS_PER_NODE_HET_GROUP_1": "2(x2)",
}


def test_reads_an_allocation() -> None:
    nodes = tuple(AllocatedNode(f"host{i}", gpus=2) for i in (1, 2, 3))
    assert allocation_in(PLAIN) == Allocation("slurm", "Slurm", "17", nodes, answers=True)
    odd = allocation_in(PLAIN | {"SLURM_JOB_NODELIST": "a[09-10,12],b-[1-2]-x,c"})
    assert odd and [node.host for node in odd.nodes] == ["a09", "a10", "a12", "b-1-x", "b-2-x", "c"]
    asked = allocation_in(PLAIN | {"SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": "2(x2),1"})
    assert asked is not None
    assert [node.procs for node in asked.nodes] == [2, 2, 1]
    for counts in ("x", "2(x", "2(3)", "-1"):
        with pytest.raises(UsageError, match="not a list of task counts"):
            allocation_in(PLAIN | {"SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": counts})
    assert allocation_in({"SLURM_CONF": "/etc/slurm.conf"}) is None


@pytest.mark.parametrize("hosts", [{}, {"SLURM_JOB_NODELIST": ""}])
def test_refuses_a_job_id_without_hosts(hosts: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="SLURM_JOB_ID is set, but SLURM_JOB_NODELIST is not"):
        allocation_in({"SLURM_JOB_ID": "1", **hosts})


def test_only_the_first_task_of_a_step_runs_a_job() -> None:
    step = {"SLURM_JOB_ID": "3", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2"}
    refuse_copy({**step, "SLURM_PROCID": "0"})
    refuse_copy({"SLURM_JOB_ID": "3", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"})  # a batch script
    with pytest.raises(UsageError, match="this Slurm step has 2 tasks, of which only the first runs"):
        refuse_copy({**step, "SLURM_PROCID": "1"})


def test_reads_a_heterogeneous_allocation() -> None:
    first, *others = (
        AllocatedNode("host1", 1, None, 0),
        *(AllocatedNode(h, None, 2, 1) for h in ("host2", "host3")),
    )
    assert allocation_in(HET) == Allocation("slurm", "Slurm", "10", (first, *others), answers=True)


# Steps


def test_an_agents_step_overrides_every_option_that_a_variable_may_set() -> None:
    argv = SlurmStep("gpu7", "17", 1).argv()
    options = argv[1 : argv.index("env")]
    assert options[-3:] == ["--jobid=17", "--het-group=1", "--nodelist=gpu7"]
    wanted = "--overlap --cpu-bind=none --mpi=none --kill-on-bad-exit=0 --wait=0 --unbuffered"
    assert {*wanted.split()} <= {*options}


def test_only_variables_that_describe_the_job_reach_srun() -> None:
    kept = {
        "PATH": "/bin",
        "SLURM_JOB_ID": "17",
        "SLURM_CONF": "/x",
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_RESTART_COUNT": "1",
    }
    options = ("SLURM_CPU_BIND", "SLURM_NTASKS", "SLURM_EXPORT_ENV", "SRUN_CPUS_PER_TASK")
    others = dict.fromkeys((*options, "SLURM_PROCID", "PMI_RANK"), "x")
    assert SlurmStep("a", "17").environment(kept | others) == kept


CHATTER = "srun: cluster configuration lacks support for cpu binding\n"


ENDED = "srun: error: host2: task 0: Exited with exit code"
REFUSED = "srun: error: Connection refused"
FORCED = "srun: Force Terminated StepId=6.1"
KILLED = "srun: error: host2: task 0: Killed"
CANCELLED = "slurmstepd-host2: error: *** STEP 6.1 ON host2 CANCELLED AT 2026-01-01T12:00:00 ***"
ABORTED = "srun: Job step aborted: Waiting up to 7 seconds for job step to finish."
SRUN_KILLED = "srun on this machine was killed by signal 9 (SIGKILL)"
FAILED = "srun: error: Node failure on host2"
NO_JOB = "srun: error: Unable to confirm allocation for job 9: Invalid job id specified"
NO_STEP = "srun: error: Unable to create step for job 2: Requested node configuration is not available"


@pytest.mark.parametrize(
    ("end", "failure"),
    [
        (ProcessEnd(f"{CHATTER}{ENDED} 70\n", True, AGENT_DIED), (Kind.LOST, "", True)),
        (ProcessEnd(f"{ENDED} 1\n", True, LEFT_EARLY), (Kind.LOST, "", True)),
        (ProcessEnd(CHATTER, True, CLEAN), (Kind.LOST, "", True)),
        # srun's own failure has the status of an agent that left early.
        (ProcessEnd(REFUSED, True, 1), (Kind.LOST, REFUSED, False)),
        (ProcessEnd(FORCED, True, 0), (Kind.LOST, FORCED, False)),
        (ProcessEnd(f"{KILLED}\n{FORCED}", True, 137), (Kind.LOST, KILLED, False)),
        (ProcessEnd("\n".join([ABORTED, CANCELLED, FORCED]), True, 137), (Kind.LOST, CANCELLED, False)),
        (ProcessEnd(CHATTER, True, -9), (Kind.LOST, SRUN_KILLED, False)),
        (ProcessEnd(f"{ABORTED}\n{FAILED}", True, 1), (Kind.NODE_DOWN, FAILED, False)),
        (ProcessEnd(NO_JOB, status=1), (Kind.NO_ALLOCATION, NO_JOB, False)),
        (ProcessEnd(NO_STEP, status=1), (Kind.STEP_REFUSED, NO_STEP, False)),
    ],
)
def test_understands_srun_errors(end: ProcessEnd, failure: tuple[Kind, str, bool]) -> None:
    assert SlurmStep("host2", "17").failure(end) == LinkFailure(*failure)


ADVISED = [Kind.NO_ALLOCATION, Kind.NODE_DOWN, Kind.STEP_REFUSED, Kind.SILENT, Kind.NO_PYTHON]


@pytest.mark.parametrize("kind", ADVISED)
def test_advice_names_a_command_or_a_key(kind: Kind) -> None:
    assert "`" in SlurmStep("host2", "17").advice(LinkFailure(kind), None)


# A job's fate, as `scontrol show job` tells it


def shown(**changes: str) -> str:
    told = {"JobId": "17", "JobState": "RUNNING", "Reason": "None", "TimeLimit": "00:10:00"} | changes
    return " ".join(f"{name}={value}" for name, value in told.items())


def local(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))


def job_fate(text: str, starts: int = 0) -> AllocationReported:
    return scheduler.fate(starts, text, time.time())


def test_reads_a_jobs_fate_from_scontrol() -> None:
    begin = 1_790_000_000.0
    times = {"StartTime": local(begin), "EndTime": local(begin + 600)}
    assert scheduler.fate(0, shown(**times), begin) == AllocationReported(False, "", 600)
    assert job_fate(shown(EndTime="Unknown")) == AllocationReported(False)
    ending = {"JobState": "COMPLETING", **times}
    assert job_fate(shown(**ending)).why == "reached its time limit"
    early = ending | {"EndTime": local(begin + 60)}
    assert job_fate(shown(**early)).why == "was cancelled"
    assert job_fate(shown(**early, Reason="NodeDown")).why == "lost a node"
    assert job_fate(shown(**early | {"EndTime": "Unknown"})).why == "was requeued"
    assert job_fate(shown(JobState="TIMEOUT")).why == "reached its time limit"
    assert job_fate("slurm_load_jobs error: Invalid job id specified") == AllocationReported(None)


def test_a_later_start_means_the_job_was_requeued() -> None:
    times = {"StartTime": local(time.time()), "EndTime": local(time.time() + 600)}
    again = shown(JobState="COMPLETING", Restarts="2", **times)
    assert job_fate(again, starts=1).why == "was requeued"
    assert not job_fate(shown(Restarts="2", **times), starts=2).ends


def test_only_a_timed_out_job_may_be_requeued() -> None:
    assert not job_fate(shown(JobState="TIMEOUT")).final
    assert job_fate(shown(JobState="CANCELLED")).final
    assert job_fate(shown(JobState="NODE_FAIL")).final


# Supervision inside an allocation


SLURM_JOB = Allocation("slurm", "Slurm", "17", (), answers=True)


def asks(actions: Actions) -> bool:
    """Whether the scheduler is asked, and nothing else is done."""
    return [type(action) for action in actions] == [AskScheduler]


def phase(job: Job) -> Phase:
    return job.state.phase


def test_a_lost_node_restarts_the_job_once_the_scheduler_has_answered() -> None:
    job = inside(SLURM_JOB)
    assert asks(job.feed(lost(1)))
    assert phase(job) is Phase.RUNNING
    job.feed(AllocationReported(ends=False))
    assert phase(job) is Phase.RESTARTING


def test_a_job_that_the_scheduler_ends_is_not_restarted() -> None:
    job = inside(SLURM_JOB)
    job.feed(lost(1))
    job.feed(AllocationReported(ends=True, why="was cancelled"))
    assert phase(job) is Phase.STOPPING
    assert job.state.cause is not None
    assert (job.state.cause.text, job.state.outcome) == ("Slurm job 17 was cancelled", 143)


@pytest.mark.parametrize("kind", [Kind.SILENT, Kind.NODE_DOWN])
def test_names_the_node_for_which_the_scheduler_ends_the_job(kind: Kind) -> None:
    for why, first in (("was requeued", "b was lost; "), ("was cancelled", "")):
        job = inside(SLURM_JOB)
        job.feed(LinkEnded(1, LinkFailure(kind)))
        job.feed(AllocationReported(ends=True, why=why))
        assert job.state.cause is not None
        assert job.state.cause.text == f"{first}Slurm job 17 {why}"


def test_restarts_if_the_scheduler_does_not_answer() -> None:
    job = inside(SLURM_JOB)
    job.feed(lost(1))
    job.wait(1.0)
    assert phase(job) is Phase.RESTARTING


def test_ranks_that_the_scheduler_has_stopped_did_not_fail() -> None:
    job = inside(SLURM_JOB)
    job.feed(exited(1, 1, -15, job.now))
    job.feed(AllocationReported(ends=True, why="was cancelled"))
    assert "rank 3: stopped by Slurm" in Summary(job.state, "", {}, 1.0).lines()


def test_a_late_answer_of_the_scheduler_still_says_why_the_job_has_ended() -> None:
    job = inside(SLURM_JOB)
    assert asks(job.feed(Interrupted(15)))
    job.obey(job.wait(1.0))
    assert phase(job) is Phase.STOPPING, "the answer is awaited"
    told = job.feed(AllocationReported(ends=True, why="was cancelled"))
    assert texts(told) == ["Slurm job 17 was cancelled"]
    assert (phase(job), job.state.cause and job.state.cause.scheduled) == (Phase.DONE, True)


@pytest.mark.parametrize("first", [(), (Interrupted(15),)])
@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (AllocationReported(ends=True, why="was cancelled"), "Slurm job 17 was cancelled"),
        (AllocationReported(ends=False), "agent not started: 2 of 2 nodes can't be used"),
    ],
)
def test_a_job_cancelled_while_it_connects_does_not_blame_its_nodes(
    first: tuple[Interrupted, ...], answer: AllocationReported, text: str
) -> None:
    job = Job()
    job.state = job.state._replace(spec=job.state.spec._replace(allocation=SLURM_JOB))
    asked = [asks(job.feed(each)) for each in first]
    asked += [asks(job.feed(LinkEnded(node, LinkFailure(Kind.UNSTARTED)))) for node in (0, 1)]
    assert (asked.count(True), phase(job)) == (1, Phase.CONNECTING)
    job.feed(answer)
    assert phase(job) is Phase.DONE
    assert job.state.cause is not None
    if answer.ends or not first:
        assert job.state.cause.text.startswith(text)


def test_a_job_does_not_wait_for_ever_for_the_scheduler() -> None:
    job = inside(SLURM_JOB)
    job.feed(Interrupted(15))
    job.obey(job.wait(1.0))
    job.wait(3.0)
    assert phase(job) is Phase.DONE
    assert job.state.cause is not None
    assert job.state.cause.text == "stopped by SIGTERM"


def test_a_rank_killed_with_its_node_is_not_the_root_cause() -> None:
    for node, blamed in ((1, "b was lost"), (0, "rank 3 (b) failed")):
        job = inside(SLURM_JOB)
        assert asks(job.feed(exited(1, 1, -9, job.now)))
        job.feed(lost(node))
        said = texts(job.feed(AllocationReported(ends=False)))
        assert any(text.startswith(blamed) for text in said), said


def test_gives_a_termination_warning_once_with_the_time_left() -> None:
    job = inside(SLURM_JOB, "on_warning: USR1")
    assert asks(job.feed(WarningReceived(0, 10)))
    assert job.feed(WarningReceived(1, 10)) == []
    given = job.feed(AllocationReported(ends=False, left_s=118.4))
    notices = [action for action in given if isinstance(action, WarnWorkers)]
    assert notices == [WarnWorkers(i, 10, 118.4) for i in (0, 1)]
    assert texts(given) == ["Slurm job 17 ends in 118 s: sent SIGUSR1 to all ranks (on_warning)"]
    assert phase(job) is Phase.RUNNING


def test_a_termination_warning_that_stops_ranks_gives_them_the_time_left() -> None:
    job = inside(SLURM_JOB)
    job.feed(WarningReceived(0, 10))
    closing = job.feed(AllocationReported(ends=False, left_s=300.0))
    assert {action.grace_s for action in closing if isinstance(action, Close)} == {295.0}
    assert texts(closing) == [
        "Slurm job 17 ends in 5 min: sent SIGTERM to all ranks, which must exit (on_warning)"
    ]


def test_ranks_that_exit_0_when_slurm_stops_them_are_no_success() -> None:
    for ends, outcome in ((True, 143), (False, 0)):
        job = inside(SLURM_JOB)
        ends_of_ranks = [exited(node, local_rank, 0, job.now) for node in (0, 1) for local_rank in (0, 1)]
        closing = job.feed(*ends_of_ranks)
        assert phase(job) is Phase.STOPPING
        assert asks(job.feed(AgentLeaving(1, 15)))
        job.obey(closing)
        assert phase(job) is Phase.STOPPING, "the answer is awaited"
        job.feed(AllocationReported(ends=ends, why="was cancelled" if ends else ""))
        assert (phase(job), job.state.outcome) == (Phase.DONE, outcome)


# Tasks

TASK = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "4",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "host[1-3]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "CUDA_VISIBLE_DEVICES": "0,1",
    "SLURM_RESTART_COUNT": "3",
}


def test_places_a_task_and_sets_its_environment() -> None:
    task = scheduler.task(TASK)
    assert task == Task("17.2", "17", 4, 5, 0, 1, 2, 3, ("host1", "host2", "host3"), ("host1",), 2, 3, ADVICE)
    env = task_environment(task, TASK, ("host1", 12345))
    wanted = {
        "RANK": "4",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "3",
        "MASTER_ADDR": "host1",
        "MASTER_PORT": "12345",
        "TORCHELASTIC_RESTART_COUNT": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "DISTLAUNCH_BACKEND": "nccl",
        "SLURM_PROCID": "4",
    }
    assert {name: env[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"SLURM_PROCID": ""}, "SLURM_PROCID is not set"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID=x is not a number"),
        ({"SLURM_NTASKS": "6"}, "SLURM_NTASKS=6"),
        ({"SLURM_STEP_NODELIST": "host[1-2]"}, "SLURM_STEP_NODELIST=host[1-2]"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(y)"}, "not a list of task counts"),
        ({"SLURM_LOCALID": "1"}, "SLURM_LOCALID=1"),
        ({"SLURM_NODEID": "3"}, "SLURM_NODEID=3"),
    ],
)
def test_refuses_contradictory_slurm_variables(changes: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        scheduler.task(TASK | changes)


def test_refuses_exec_in_a_batch_script() -> None:
    batch = {name: value for name, value in TASK.items() if not name.startswith("SLURM_STEP")}
    with pytest.raises(UsageError, match="exec must run as a task of srun or mpirun: use `srun distlaunch"):
        scheduler.task(batch)


def test_refuses_tasks_that_cannot_have_a_gpu_each() -> None:
    task = scheduler.task(TASK)
    check_devices(task._replace(local_size=2), TASK)
    check_devices(task._replace(devices=None, local_size=8), {})
    with pytest.raises(UsageError, match="instead of --gpus-per-task"):
        check_devices(task._replace(devices=1, local_size=8), {"CUDA_VISIBLE_DEVICES": "3"})
    with pytest.raises(UsageError, match=r"8 tasks .* share 2 GPUs .* or use --ntasks-per-node=2; for a CPU"):
        check_devices(task._replace(local_size=8), TASK)


def test_accepts_a_master_of_its_own_step() -> None:
    check_master(scheduler.task(TASK), {})
    for host in ("host1", "host1.cluster", "10.0.0.1"):
        check_master(scheduler.task(TASK), {"MASTER_ADDR": host, "MASTER_PORT": "29500"})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"MASTER_ADDR": "gpu7", "MASTER_PORT": "29500"}, "set MASTER_ADDR to host1 or its IP address"),
        ({"MASTER_ADDR": "host1"}, "but MASTER_PORT is not"),
        ({"MASTER_PORT": "70000"}, "is not a port from 1 to 65535"),
    ],
)
def test_refuses_a_master_of_another_step(given: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        check_master(scheduler.task(TASK), given)
