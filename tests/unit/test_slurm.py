"""Slurm: its variables, steps and messages, and supervision inside an allocation."""

import re
import time
from collections.abc import Sequence
from typing import Any

import pytest

from distlaunch.agent.messages import AgentLeaving, Interrupted, RouteFound, Swept, WarningReceived
from distlaunch.agent.wire import AGENT_DIED, CLEAN, LEFT_EARLY
from distlaunch.cli.run import refuse_copy
from distlaunch.errors import UsageError
from distlaunch.job.spec import AllocatedNode, Allocation
from distlaunch.schedulers import allocation_in
from distlaunch.schedulers.slurm import ADVICE, scheduler
from distlaunch.schedulers.task import Task, check_devices, check_master
from distlaunch.supervisor.actions import AskScheduler
from distlaunch.supervisor.allocation_end import is_to_go_on
from distlaunch.supervisor.events import AllocationReported, LinkEnded
from distlaunch.supervisor.state import Phase
from distlaunch.supervisor.summary import Summary
from distlaunch.transports.failure import Kind, LinkFailure, ProcessEnd
from distlaunch.transports.slurm import SlurmStep
from tests.unit.orders import Close, WarnWorkers
from tests.unit.samples import PEER_GONE
from tests.unit.tasks import task_environment, variables
from tests.unit.test_restarts import Job, inside, text_of
from tests.unit.test_supervisor import MASTER, Actions, exited, lost, texts

# Variables


# As Slurm 22.05 sets them.
PLAIN = variables(
    "SLURM_JOB_ID=17 SLURM_JOB_NODELIST=host[1-3] SLURM_TASKS_PER_NODE=1(x3) SLURM_GPUS_PER_NODE=a100:2"
)
HET = variables(
    "SLURM_JOB_ID=10 SLURM_HET_SIZE=2 "
    "SLURM_JOB_NODELIST_HET_GROUP_0=host1 SLURM_JOB_NODELIST_HET_GROUP_1=host[2-3] "
    "SLURM_GPUS_PER_NODE_HET_GROUP_0=1 SLURM_NTASKS_HET_GROUP_1=4 "
    "SLURM_TASKS_PER_NODE_HET_GROUP_0=1 SLURM_TASKS_PER_NODE_HET_GROUP_1=2(x2)"
)


def test_reads_an_allocation() -> None:
    nodes = tuple(AllocatedNode(f"host{i}", gpus=2) for i in (1, 2, 3))
    assert allocation_in(PLAIN) == Allocation("slurm", "Slurm", "17", nodes, answers=True)
    nodes = (AllocatedNode("host1", 1, None, 0), *(AllocatedNode(f"host{i}", None, 2, 1) for i in (2, 3)))
    assert allocation_in(HET) == Allocation("slurm", "Slurm", "10", nodes, answers=True)
    odd = allocation_in(PLAIN | {"SLURM_JOB_NODELIST": "a[09-10,12],b-[1-2]-x,c"})
    assert odd and [node.host for node in odd.nodes] == ["a09", "a10", "a12", "b-1-x", "b-2-x", "c"]
    asked = allocation_in(PLAIN | {"SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": "2(x2),1"})
    assert asked and [node.procs for node in asked.nodes] == [2, 2, 1]
    for counts in ("x", "2(x", "2(3)", "-1"):
        with pytest.raises(UsageError, match="not a list of task counts"):
            allocation_in(PLAIN | {"SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": counts})
    for hosts in ("", "SLURM_JOB_NODELIST="):
        with pytest.raises(UsageError, match="SLURM_JOB_ID is set, but SLURM_JOB_NODELIST is not"):
            allocation_in(variables(f"SLURM_JOB_ID=1 {hosts}"))
    assert allocation_in({"SLURM_CONF": "/etc/slurm.conf"}) is None


def test_only_the_first_task_of_a_step_runs_a_job() -> None:
    step = variables("SLURM_JOB_ID=3 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2")
    refuse_copy({**step, "SLURM_PROCID": "0"})
    refuse_copy({"SLURM_JOB_ID": "3", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"})  # a batch script
    with pytest.raises(UsageError, match="this Slurm step has 2 tasks, of which only the first runs"):
        refuse_copy({**step, "SLURM_PROCID": "1"})
    refuse_copy({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "8"})
    with pytest.raises(UsageError, match="mpirun started 8 tasks, of which only the first runs"):
        refuse_copy({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8"})


# Steps


def test_an_agents_step_overrides_every_option_that_a_variable_may_set() -> None:
    argv = SlurmStep("gpu7", "17", 1).argv()
    options = argv[1 : argv.index("env")]
    assert options[-3:] == ["--jobid=17", "--het-group=1", "--nodelist=gpu7"]
    wanted = "--overlap --cpu-bind=none --mpi=none --kill-on-bad-exit=0 --wait=0 --unbuffered"
    assert {*wanted.split()} <= {*options}


def test_only_variables_that_describe_the_job_reach_srun() -> None:
    kept = variables("PATH=/bin SLURM_JOB_ID=17 SLURM_CONF=/x SLURM_ARRAY_TASK_ID=3 SLURM_RESTART_COUNT=1")
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
NO_ANSWER = "srun: error: Unable to confirm allocation for job 9: Unable to contact slurm controller"
NO_STEP = "srun: error: Unable to create step for job 2: Requested node configuration is not available"


SRUN_ENDS = [
    (ProcessEnd(f"{CHATTER}{ENDED} 70\n", True, AGENT_DIED), (Kind.LOST, "", True)),
    (ProcessEnd(f"{ENDED} 72\n", True, LEFT_EARLY), (Kind.LOST, "", True)),
    (ProcessEnd(CHATTER, True, CLEAN), (Kind.LOST, "", True)),
    (ProcessEnd(REFUSED, True, 1), (Kind.LOST, REFUSED, False)),
    (ProcessEnd(FORCED, True, 0), (Kind.LOST, FORCED, False)),
    (ProcessEnd(f"{KILLED}\n{FORCED}", True, 137), (Kind.LOST, KILLED, False)),
    (ProcessEnd("\n".join([ABORTED, CANCELLED, FORCED]), True, 137), (Kind.LOST, CANCELLED, False)),
    (ProcessEnd(CHATTER, True, -9), (Kind.LOST, SRUN_KILLED, False)),
    (ProcessEnd(f"{ABORTED}\n{FAILED}", True, 1), (Kind.NODE_DOWN, FAILED, False)),
    (ProcessEnd(NO_JOB, status=1), (Kind.NO_ALLOCATION, NO_JOB, False)),
    (ProcessEnd(NO_ANSWER, status=1), (Kind.NO_SCHEDULER, NO_ANSWER, False)),
    (ProcessEnd(NO_STEP, status=1), (Kind.STEP_REFUSED, NO_STEP, False)),
]


@pytest.mark.parametrize(("end", "failure"), SRUN_ENDS)
def test_understands_srun_errors(end: ProcessEnd, failure: tuple[Kind, str, bool]) -> None:
    assert SlurmStep("host2", "17").failure(end) == LinkFailure(*failure)


def test_advice_names_a_command_or_a_key() -> None:
    for kind in (
        Kind.NO_ALLOCATION,
        Kind.NO_SCHEDULER,
        Kind.NODE_DOWN,
        Kind.STEP_REFUSED,
        Kind.SILENT,
        Kind.NO_PYTHON,
    ):
        assert "`" in SlurmStep("host2", "17").advice(LinkFailure(kind), None)


# A job's fate, as `scontrol show job` tells it


def shown(**changes: str) -> str:
    told = {"JobId": "17", "JobState": "RUNNING", "Reason": "None", "TimeLimit": "00:10:00"} | changes
    return " ".join(f"{name}={value}" for name, value in told.items())


def shown_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def job_fate(text: str, starts: int = 0) -> AllocationReported:
    return scheduler.fate(starts, text, time.time())


def test_reads_a_jobs_fate_from_scontrol() -> None:
    begin = 1_790_000_000.0
    times = {"StartTime": shown_time(begin), "EndTime": shown_time(begin + 600)}
    assert scheduler.fate(0, shown(**times), begin) == AllocationReported(False, "", 600)
    assert job_fate(shown(EndTime="Unknown")) == AllocationReported(False)
    for none in ("UNLIMITED", "365-00:00:00"):
        assert scheduler.fate(0, shown(**times, TimeLimit=none), begin) == AllocationReported(False)
    grace = {"PreemptTime": shown_time(begin), "EndTime": shown_time(begin + 10)}
    assert scheduler.fate(0, shown(**grace), begin) == AllocationReported(False, "was preempted", 10)
    ending = {"JobState": "COMPLETING", **times}
    early = ending | {"EndTime": shown_time(begin + 60)}
    for changes, why in (
        (early | {"Reason": "TimeLimit"}, "reached its time limit"),
        (early, "was cancelled"),
        (ending, "was cancelled"),  # after a suspension, for example
        (early | {"Reason": "NodeDown"}, "lost a node"),
        (early | {"Reason": "JobLaunchFailure"}, "failed because its batch script was killed"),
        (early | {"Reason": "NonZeroExitCode"}, "ended because its batch script exited"),
        (early | {"EndTime": "Unknown"}, "was requeued"),
    ):
        assert job_fate(shown(**changes)).why == why
    assert job_fate("slurm_load_jobs error: Invalid job id specified") == AllocationReported(None)
    timed_out = job_fate(shown(JobState="TIMEOUT"))
    assert (timed_out.why, timed_out.final) == ("reached its time limit", False)  # it may be requeued
    assert all(job_fate(shown(JobState=state)).final for state in ("CANCELLED", "NODE_FAIL"))
    times = {"StartTime": shown_time(time.time()), "EndTime": shown_time(time.time() + 600), "Restarts": "2"}
    assert job_fate(shown(**ending | times), starts=1).why == "was requeued"
    assert not job_fate(shown(**times), starts=2).ends
    another_task = shown(JobId="18", JobState="CANCELLED")
    assert job_fate(f"{shown()}\n{another_task}\n") == AllocationReported(False)


# Supervision inside an allocation


SLURM_JOB = Allocation("slurm", "Slurm", "17", (), answers=True)
CONTINUES = AllocationReported(ends=False)
PREEMPTS = AllocationReported(False, "was preempted", 118.4)
"""As long as its grace period lasts."""
CANCELS, REQUEUES = (AllocationReported(True, f"was {done}") for done in ("cancelled", "requeued"))


def asks(actions: Actions) -> bool:
    """Whether the scheduler is asked, and nothing else is done."""
    return [type(action) for action in actions] == [AskScheduler]


def phase(job: Job) -> Phase:
    return job.state.phase


def cause(job: Job) -> str:
    """Why the job ends, in words."""
    return job.state.cause.text if job.state.cause else ""


SILENT, DOWN = (LinkEnded(1, LinkFailure(kind)) for kind in (Kind.SILENT, Kind.NODE_DOWN))


LOSSES = [
    (lost(1), CONTINUES, "b was lost: Connection reset by peer"),
    (lost(1), None, "b was lost: Connection reset by peer"),
    (lost(1), CANCELS, "Slurm job 17 was cancelled"),
    (lost(1), PREEMPTS, "Slurm job 17 was preempted"),
    (SILENT, CANCELS, "Slurm job 17 was cancelled"),
    (SILENT, REQUEUES, "b was lost; Slurm job 17 was requeued"),
    (DOWN, REQUEUES, "b was lost; Slurm job 17 was requeued"),
]


@pytest.mark.parametrize(("loss", "answer", "text"), LOSSES)
def test_asks_before_a_restart(loss: LinkEnded, answer: AllocationReported | None, text: str) -> None:
    job = inside(SLURM_JOB)
    assert asks(job.feed(loss))
    assert phase(job) is Phase.RUNNING
    if answer:
        job.feed(answer)
    else:
        job.wait(1.0)
    assert (phase(job), cause(job)) == (Phase.STOPPING if "Slurm" in text else Phase.RESTARTING, text)
    assert "Slurm" not in text or job.state.outcome == 143


@pytest.mark.parametrize("is_clean", [False, True])
@pytest.mark.parametrize(
    ("answer", "after_s", "kind", "text"),
    [
        (REQUEUES, 0.0, Kind.NODE_DOWN, "b was lost; Slurm job 17 was requeued"),
        (REQUEUES, 0.0, Kind.LOST, "Slurm job 17 was requeued"),
        (REQUEUES, 2.0, Kind.NODE_DOWN, "Slurm job 17 was requeued"),
        (CANCELS, 0.0, Kind.NODE_DOWN, "Slurm job 17 was cancelled"),
    ],
)
def test_names_a_lost_node_after_the_answer(
    answer: AllocationReported, after_s: float, kind: Kind, text: str, is_clean: bool
) -> None:
    """Slurm ends the steps of all nodes at once, and the lost one's may end last."""
    job = inside(SLURM_JOB)
    assert asks(job.feed(Interrupted(15)))
    told = texts(job.feed(answer))
    if is_clean:
        job.feed(Swept(1, 0, 0))
    told += texts(job.feed(lost(1, kind=kind), after=after_s), "error")
    assert (told[-1], cause(job), job.state.outcome) == (text, text, 143)


def test_a_spare_that_does_not_fit_is_refused_once_slurm_has_answered() -> None:
    job = Job(text_of("[a, b]", "spares: [c]"))
    job.state = job.state._replace(spec=job.state.spec._replace(allocation=SLURM_JOB))
    job.to_running().silent.add(2)
    job.lose(1, clean=True)
    job.obey(job.feed(CONTINUES))
    missing = {"place": {"workdir": "/scratch/me", "exists": False}}
    assert asks(job.feed(RouteFound(2, MASTER, MASTER, "eth2", seen=missing)))
    said = texts(job.feed(CONTINUES))
    assert "restart 2 of 3" in said[0]


def test_a_failed_rank_counts_although_the_others_succeed_while_slurm_is_asked() -> None:
    job = inside(SLURM_JOB, "success: rank 0")
    assert asks(job.feed(exited(1, 1, -9, job.now)))
    assert job.feed(exited(0, 0, 0, job.now)) == []
    job.feed(CONTINUES)
    job.wait(1.0)
    assert phase(job) is Phase.RESTARTING


@pytest.mark.parametrize("rule", ["all", "any", "rank 0"])
def test_ranks_that_exit_with_0_because_their_agents_were_stopped_are_no_success(rule: str) -> None:
    """By `scancel --signal=TERM`, which signals all steps, but not the script with the controller."""
    job = inside(SLURM_JOB, f"success: {rule}")
    assert asks(job.feed(AgentLeaving(0, 15)))
    job.feed(CONTINUES)  # within milliseconds
    job.feed(AgentLeaving(1, 15), after=0.1)
    job.feed(*(exited(node, rank, 0, job.now)._replace(asked=True) for node in (0, 1) for rank in (0, 1)))
    job.wait(0.4)
    told = "stopped by SIGTERM, sent to the agents on all 2 nodes"
    assert (phase(job), cause(job), job.state.outcome) == (Phase.STOPPING, told, 143)


def test_a_node_whose_agent_alone_was_stopped_is_lost() -> None:
    """By a scancel of its step."""
    job = inside(SLURM_JOB)
    assert asks(job.feed(AgentLeaving(0, 15)))
    job.feed(*(exited(0, rank, 0, job.now)._replace(asked=True) for rank in (0, 1)), CONTINUES)
    job.wait(0.5)
    told = "a was lost: its agent was stopped by signal 15 (SIGTERM)"
    assert (phase(job), cause(job)) == (Phase.RESTARTING, told)


@pytest.mark.parametrize("first", [AgentLeaving(0, 15), Interrupted(15)])
def test_a_signal_at_the_beginning_of_a_grace_period_is_a_preemption(first: Any) -> None:
    """Slurm sends it to all steps. The batch script goes on, so that there is time for the ranks to exit."""
    job = inside(SLURM_JOB)
    assert asks(job.feed(first))
    closing = job.feed(PREEMPTS)
    told = "Slurm job 17 was preempted"
    assert (phase(job), cause(job), job.state.outcome) == (Phase.STOPPING, told, 143)
    assert {action.grace_s for action in closing.of(Close)} == {job.state.spec.limits.stop_s}


@pytest.mark.parametrize(
    ("signals", "told"),
    [
        ((Interrupted(15, by_command=True),), "stopped by `distlaunch stop`"),
        ((Interrupted(2),), "stopped by SIGINT"),
        ((Interrupted(15), CANCELS), "Slurm job 17 was cancelled"),
        ((Interrupted(15), PREEMPTS), "Slurm job 17 was preempted"),
    ],
    ids=["stop", "Ctrl-C", "scancel", "the end of the grace period"],
)
def test_a_job_that_is_cancelled_in_a_grace_period_is_cancelled(signals: Sequence[Any], told: str) -> None:
    """The first such signal doesn't kill the ranks, although Slurm has sent one, too."""
    job = inside(SLURM_JOB)
    spec = job.state.spec
    job.state = job.state._replace(spec=spec._replace(restarts=spec.restarts._replace(requeue=1)))
    job.feed(Interrupted(15))
    preempted = "Slurm job 17 was preempted"
    assert preempted in texts(job.feed(PREEMPTS))
    did = Actions(action for each in signals for action in job.feed(each, after=5.0))
    assert (texts(did), did.of(Close)) == ([told] * (told != preempted), [])
    assert (cause(job), is_to_go_on(job.state)) == (told, told == preempted)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (WarningReceived(0, 10), "Slurm job 17 received a warning signal"),
        (Interrupted(15), "stopped by SIGTERM"),
    ],
)
def test_a_signal_during_a_restart_makes_no_success_of_the_failed_attempt(told: Any, why: str) -> None:
    job = inside(SLURM_JOB, "success: rank 0", "on_warning: USR1")
    job.feed(exited(1, 1, 7, job.now))
    job.feed(exited(0, 0, 0, job.now + 0.1)._replace(asked=True), told, CONTINUES)
    assert (phase(job), job.state.outcome) == (Phase.STOPPING, 143)
    assert cause(job).startswith(why)


def test_a_second_signal_kills_although_slurm_has_not_answered() -> None:
    job = inside(SLURM_JOB)
    assert asks(job.feed(Interrupted(15)))
    closing = job.feed(Interrupted(15), after=0.5)
    assert {action.grace_s for action in closing.of(Close)} == {0.0}


def test_ranks_that_the_scheduler_has_stopped_did_not_fail() -> None:
    job = inside(SLURM_JOB)
    job.feed(exited(1, 1, -15, job.now))
    job.feed(exited(1, 0, -15, job.now)._replace(asked=True))  # by its agent, which Slurm signals, too
    job.feed(CANCELS)
    assert "ranks 2-3: stopped by Slurm" in Summary(job.state, "", {}, 1.0).lines()


@pytest.mark.parametrize("answers", [True, False])
def test_a_late_answer_of_the_scheduler_still_says_why_the_job_has_ended(answers: bool) -> None:
    job = inside(SLURM_JOB)
    assert asks(job.feed(Interrupted(15)))
    job.obey(job.wait(1.0))
    assert phase(job) is Phase.STOPPING, "the answer is awaited"
    if answers:
        assert texts(job.feed(CANCELS)) == ["Slurm job 17 was cancelled"]
    else:
        job.wait(3.0)
    assert (phase(job), job.state.cause and job.state.cause.scheduled) == (Phase.DONE, answers)
    assert answers or cause(job) == "stopped by SIGTERM"


def test_an_answer_counts_as_long_as_the_ranks_are_exiting() -> None:
    """A busy scheduler takes longer to answer than a failure can wait."""
    job = inside(SLURM_JOB)
    assert asks(job.feed(SIGTERM))
    closing = job.wait(1.0)
    job.wait(9.0)
    assert texts(job.feed(CANCELS)) == ["Slurm job 17 was cancelled"]
    job.obey(closing)
    assert (phase(job), cause(job)) == (Phase.DONE, "Slurm job 17 was cancelled")


@pytest.mark.parametrize("answers", [True, False])
def test_ranks_that_exit_0_on_sigterm_are_no_success_until_slurm_has_answered(answers: bool) -> None:
    job = inside(SLURM_JOB)
    assert asks(job.feed(SIGTERM))
    succeed(job)
    job.obey(job.wait(1.0))
    job.wait(9.0)
    assert phase(job) is Phase.STOPPING
    if answers:
        job.feed(CANCELS)
    else:
        job.wait(15.0)
    assert (phase(job), job.state.outcome) == (Phase.DONE, 143 if answers else 0)


@pytest.mark.parametrize(("after_s", "outcome"), [(0.5, 143), (2.0, 3)])
def test_slurm_may_have_stopped_a_rank_that_failed_just_before(after_s: float, outcome: int) -> None:
    """The rank got Slurm's signal before the controller did."""
    job = inside(SLURM_JOB)
    spec = job.state.spec
    job.state = job.state._replace(spec=spec._replace(restarts=spec.restarts._replace(most=0)))
    job.feed(exited(0, 0, 3, job.now))
    assert AskScheduler() in job.feed(SIGTERM, after=after_s)
    job.feed(AllocationReported(True, "reached its time limit"))
    assert (job.state.outcome, job.state.scheduler_ends) == (outcome, True)


def test_a_success_that_slurm_cannot_have_caused_does_not_wait_long_for_the_answer() -> None:
    job = inside(SLURM_JOB)
    closing = succeed(job)
    assert AskScheduler() in job.feed(SIGTERM, after=5.0)
    job.obey(closing)
    job.wait(4.0)
    assert (phase(job), job.state.outcome) == (Phase.DONE, 0)


def test_slurm_may_have_ended_the_peers_of_a_rank_that_lost_its_connection() -> None:
    for answer, text in ((CANCELS, "Slurm job 17 was cancelled"), (CONTINUES, "stopped by SIGTERM")):
        job = inside(SLURM_JOB)
        job.feed(exited(0, 0, 1, job.now)._replace(words=PEER_GONE))
        assert job.state.suspect
        assert asks(job.feed(SIGTERM))
        job.feed(answer)
        assert cause(job) == text


def test_slurm_ends_a_job_whose_own_failure_is_reported_late() -> None:
    """The first report was of a rank that Slurm may have killed."""
    job = inside(SLURM_JOB)
    spec = job.state.spec
    job.state = job.state._replace(spec=spec._replace(restarts=spec.restarts._replace(most=0)))
    assert asks(job.feed(exited(0, 0, -9, job.now)))
    job.wait(1.0)
    job.feed(exited(1, 0, 3, job.now - 2.0))
    assert texts(job.feed(CANCELS)) == ["Slurm job 17 was cancelled"]
    assert (job.state.outcome, job.state.scheduler_ends) == (3, True)


WHILE_CONNECTING = [
    ([], CANCELS, "Slurm job 17 was cancelled"),
    ([Interrupted(15)], CANCELS, "Slurm job 17 was cancelled"),
    ([], CONTINUES, "agent not started: 2 of 2 nodes can't be used"),
    ([Interrupted(15)], CONTINUES, ""),
]


@pytest.mark.parametrize(("first", "answer", "text"), WHILE_CONNECTING)
def test_blames_no_node_for_a_cancel(first: list[Interrupted], answer: AllocationReported, text: str) -> None:
    job = Job()
    job.state = job.state._replace(spec=job.state.spec._replace(allocation=SLURM_JOB))
    events = (*first, *(LinkEnded(node, LinkFailure(Kind.UNSTARTED)) for node in (0, 1)))
    assert [asks(job.feed(each)) for each in events].count(True) == 1
    assert phase(job) is Phase.CONNECTING
    job.feed(answer)
    assert phase(job) is Phase.DONE
    assert cause(job).startswith(text)


def test_a_rank_killed_with_its_node_is_not_the_root_cause() -> None:
    for node, blamed in ((1, "b was lost"), (0, "rank 3 (b) failed")):
        job = inside(SLURM_JOB)
        assert asks(job.feed(exited(1, 1, -9, job.now)))
        job.feed(lost(node))
        said = texts(job.feed(CONTINUES)) + texts(job.wait(1.0))
        assert any(text.startswith(blamed) for text in said), said


def test_a_rank_killed_with_its_node_is_not_the_root_cause_although_slurm_answers_first() -> None:
    """`scancel` of a step kills the rank and its agent, which may have had time for a last report."""
    for loss, blamed in ((lost(1), "b was lost"), (None, "rank 3 (b) failed")):
        job = inside(SLURM_JOB)
        assert asks(job.feed(exited(1, 1, -9, job.now)))
        assert texts(job.feed(CONTINUES)) == []
        said = texts(job.feed(*filter(None, [loss]), after=0.5)) + texts(job.wait(1.0))
        assert any(text.startswith(blamed) for text in said), said


def test_a_job_that_ends_with_a_killed_rank_waits_for_no_other_answer() -> None:
    job = inside(SLURM_JOB)
    spec = job.state.spec
    job.state = job.state._replace(spec=spec._replace(restarts=spec.restarts._replace(most=0)))
    assert asks(job.feed(exited(1, 1, -9, job.now)))
    job.feed(CONTINUES)
    job.wait(1.0)
    assert (phase(job), job.state.asked) == (Phase.STOPPING, None)


@pytest.mark.parametrize("answer", [AllocationReported(ends=False, left_s=118.4), PREEMPTS])
def test_gives_a_termination_warning_once_with_the_time_left(answer: AllocationReported) -> None:
    job = inside(SLURM_JOB, "on_warning: USR1")
    assert asks(job.feed(WarningReceived(0, 10)))
    assert job.feed(WarningReceived(1, 10)) == []
    given = job.feed(answer)
    assert given.of(WarnWorkers) == [WarnWorkers(node, 10, 118.4) for node in (0, 1)]
    assert texts(given) == ["Slurm job 17 ends in 118 s: sent SIGUSR1 to all ranks (on_warning)"]
    assert phase(job) is Phase.RUNNING


def test_a_termination_warning_waits_for_the_time_left_but_a_failure_does_not() -> None:
    job = inside(SLURM_JOB, "on_warning: USR1")
    assert asks(job.feed(WarningReceived(0, 10)))
    assert not job.wait(4.0), "Slurm is slow to answer"
    job.feed(lost(1))
    job.wait(1.0)
    assert phase(job) is Phase.STOPPING
    assert cause(job).startswith("b was lost: Connection reset by peer; not restarting")
    job = inside(SLURM_JOB, "on_warning: USR1")
    job.feed(WarningReceived(0, 10))
    told = "Slurm job 17 received a warning signal: sent SIGUSR1 to all ranks (on_warning)"
    assert texts(job.wait(5.0)) == [told]


def test_a_termination_warning_that_stops_ranks_gives_them_the_time_left() -> None:
    job = inside(SLURM_JOB)
    job.feed(WarningReceived(0, 10))
    closing = job.feed(AllocationReported(ends=False, left_s=300.0))
    assert {action.grace_s for action in closing.of(Close)} == {295.0}
    orders = [order for order in closing if isinstance(order, (WarnWorkers, Close))]
    assert orders[:2] == [WarnWorkers(node, 0, 300.0) for node in (0, 1)]  # creates the file only
    (told,) = texts(closing)
    assert told == "Slurm job 17 ends in 5 min: sent SIGTERM to all ranks, which must exit (on_warning)"


SIGTERM = Interrupted(15)


def succeed(job: Job) -> Actions:
    """All ranks of a job have succeeded."""
    return job.feed(*(exited(node, rank, 0, job.now) for node in (0, 1) for rank in (0, 1)))


@pytest.mark.parametrize(
    "signs", [[AgentLeaving(1, 15)], [SIGTERM, AgentLeaving(1, 15)], [AgentLeaving(1, 15), SIGTERM]]
)
def test_ranks_that_exit_0_when_slurm_stops_them_are_no_success(signs: list[Any]) -> None:
    for answer, outcome in ((CANCELS, 143), (CONTINUES, 0)):
        job = inside(SLURM_JOB)
        closing = succeed(job)
        assert phase(job) is Phase.STOPPING
        assert AskScheduler() in job.feed(*signs)
        job.obey(closing)
        assert phase(job) is Phase.STOPPING, "the answer is awaited"
        job.feed(answer)
        assert (phase(job), job.state.outcome) == (Phase.DONE, outcome)
        assert job.state.scheduler_ends == bool(outcome)


def test_ranks_that_had_ended_before_slurm_ends_the_job_are_a_success() -> None:
    job = inside(SLURM_JOB)
    closing = succeed(job)
    job.wait(10.0)
    assert not asks(job.feed(AgentLeaving(1, 15)))
    assert AskScheduler() in job.feed(SIGTERM)
    assert texts(job.feed(CANCELS)) == ["Slurm job 17 was cancelled"]
    job.obey(closing)
    assert (phase(job), job.state.outcome, job.state.scheduler_ends) == (Phase.DONE, 0, True)


def test_a_failed_job_that_slurm_ends_keeps_its_cause_and_a_second_signal_waits_for_no_answer() -> None:
    for again in (False, True):
        job = inside(SLURM_JOB)
        spec = job.state.spec
        job.state = job.state._replace(spec=spec._replace(restarts=spec.restarts._replace(most=0)))
        closing = job.feed(exited(0, 0, 3, job.now))
        assert AskScheduler() in job.feed(SIGTERM, after=2.0)
        if again:
            job.feed(SIGTERM, after=2.0)
        job.obey(closing)
        assert (phase(job) is Phase.DONE) == again
        job.feed(CANCELS)
        assert (phase(job), job.state.outcome, job.state.scheduler_ends) == (Phase.DONE, 3, not again)


# Tasks

TASK = variables(
    "SLURM_JOB_ID=17 SLURM_STEP_ID=2 SLURM_PROCID=4 SLURM_NTASKS=5 SLURM_LOCALID=0 SLURM_NODEID=2 "
    "SLURM_STEP_NODELIST=host[1-3] SLURM_STEP_TASKS_PER_NODE=2(x2),1 SLURM_RESTART_COUNT=3 "
    "CUDA_VISIBLE_DEVICES=0,1"
)


def test_places_a_task_and_sets_its_environment() -> None:
    task = scheduler.task(TASK)
    assert task == Task("17.2", "17", 4, 5, 0, 1, 2, 3, ("host1", "host2", "host3"), ("host1",), 2, 3, ADVICE)
    wanted = variables(
        "RANK=4 WORLD_SIZE=5 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK=2 GROUP_WORLD_SIZE=3 "
        "MASTER_ADDR=host1 MASTER_PORT=12345 TORCHELASTIC_RESTART_COUNT=3 "
        "TORCHELASTIC_USE_AGENT_STORE=False DISTLAUNCH_BACKEND=nccl SLURM_PROCID=4"
    )
    env = task_environment(task, TASK, ("host1", 12345))
    assert {name: env[name] for name in wanted} == wanted


SAME = ("SLURM_NTASKS=6", "SLURM_STEP_NODELIST=host[1-2]", "SLURM_LOCALID=1", "SLURM_NODEID=3")
CONTRADICTIONS = {
    **{change: change for change in SAME},
    "SLURM_PROCID=": "SLURM_PROCID is not set",
    "SLURM_PROCID=x": "SLURM_PROCID=x is not a number",
    "SLURM_STEP_TASKS_PER_NODE=2(y)": "not a list of task counts",
}


@pytest.mark.parametrize(("change", "said"), CONTRADICTIONS.items())
def test_refuses_contradictory_slurm_variables(change: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        scheduler.task(TASK | variables(change))


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
    with pytest.raises(UsageError, match=r"8 tasks .* sees only 2 GPUs .* or use --ntasks-per-node=2;"):
        check_devices(task._replace(local_size=8), TASK)


def test_refuses_a_master_of_another_step() -> None:
    task = scheduler.task(TASK)
    check_master(task, {})
    for host in ("host1", "host1.cluster", "10.0.0.1"):
        check_master(task, {"MASTER_ADDR": host, "MASTER_PORT": "29500"})
    for given, said in (
        ("MASTER_ADDR=127.0.0.1 MASTER_PORT=29500", "is a loopback address, which other nodes can't reach"),
        ("MASTER_ADDR=gpu7 MASTER_PORT=29500", "set MASTER_ADDR to host1 or its IP address"),
        ("MASTER_ADDR=host1", "but MASTER_PORT is not"),
        ("MASTER_PORT=70000", "is not a port from 1 to 65535"),
    ):
        with pytest.raises(UsageError, match=said):
            check_master(task, variables(given))
