"""Attempts as histories: restarts after failures, on which nodes, and when they are safe."""

import errno
import itertools
import signal
from typing import Any

import pytest

from distlaunch.agent import messages
from distlaunch.errors import Exit
from distlaunch.job.spec import Allocation
from distlaunch.plan.placement import Facts
from distlaunch.runs.why import awaited
from distlaunch.supervisor.actions import Connect, Drop, Finish, GiveUp, Send, StartWorkers
from distlaunch.supervisor.allocation_end import is_to_go_on
from distlaunch.supervisor.events import AgentUp, Event, LinkEnded, NodeArrived, Suspended
from distlaunch.supervisor.nodes import Lost, Unusable, Up, may_be_occupied, phase_word, unfit_words
from distlaunch.supervisor.state import Phase, Timer, Why
from distlaunch.supervisor.step import step
from distlaunch.supervisor.stopping import without_files
from distlaunch.supervisor.summary import Summary
from distlaunch.transports.failure import Kind, LinkFailure
from distlaunch.transports.transport import Joined
from tests.unit.orders import Close, FindRoute, HoldPort, PlaceTree, Reap, StopWorkers
from tests.unit.samples import PEER_GONE
from tests.unit.test_supervisor import (
    CONNECT_S,
    JOB,
    MASTER,
    OWN,
    Actions,
    History,
    T,
    exited,
    lost,
    texts,
    up,
    wanted,
)

STOP_S, FENCE_S, REJOIN_S, HEALTHY_S, BACKOFF_S = 10.0, 45.0, 300.0, 300.0, 4.0
RESTARTS = "restarts: {max: 3, backoff: 4s}"


def text_of(nodes: str = "[a, b]", *more: str, restarts: str = RESTARTS) -> str:
    """A job file: these nodes, and these lines."""
    return "\n".join([f"{JOB}nodes: {nodes}", restarts, *more])


class Job(History):
    """A job with restarts, whose nodes can be lost."""

    def __init__(self, text: str = "", chance: float = 0.0) -> None:
        super().__init__(text or text_of(), chance)

    def go_on(self) -> Actions:
        """Let time pass until the next attempt runs, or the job is over."""
        done = Actions()
        for _ in range(30):
            if self.state.phase in (Phase.RUNNING, Phase.DONE):
                return done
            done += self.obey(self.tick())
        raise AssertionError("it goes on for ever")

    def fail(self, status: int = 7) -> Actions:
        """The last local rank of the first node fails."""
        return self.obey(self.feed(exited(self.state.members[0], 1, status, self.now)))

    def restart(self) -> float:
        """A rank fails; seconds until the next attempt runs, or the job is over."""
        failed_at = self.now
        self.fail()
        self.go_on()
        return self.now - failed_at

    def lose(self, node: int, clean: bool = False, away: bool = True) -> Actions:
        """A node's agent is gone; while it is `away`, it can't be reached again."""
        if away:
            self.silent.add(node)
        return self.obey(self.feed(lost(node, clean=clean)))

    def stay_without(self, node: int) -> float:
        """Let time pass while a node can't be reached; seconds until the next attempt runs, or the end."""
        since = self.now
        while self.state.phase is Phase.RESTARTING:
            self.feed(unreachable(node))
            self.obey(self.tick())
        return self.now - since

    def come_back(self, node: int) -> Actions:
        """A lost node answers again when it is next tried."""
        self.silent.discard(node)
        for _ in range(9):
            if isinstance(self.state.nodes[node], Up):
                return Actions()
            done = self.obey(actions := self.tick())
            if Connect(node) in actions:
                return done
        raise AssertionError("it is never tried")


def elastic(*more: str) -> Job:
    """A job on a and b that can run on one of them."""
    return Job(text_of("[a, b]", "min_nodes: 1", *more)).to_running()


def with_spares(spares: str = "[c]") -> Job:
    return Job(text_of("[a, b]", f"spares: {spares}"))


def inside(allocation: Allocation, *lines: str) -> Job:
    """A running job of two nodes that may restart, inside an allocation."""
    job = Job(text_of("[a, b]", *lines))
    job.state = job.state._replace(spec=job.state.spec._replace(allocation=allocation))
    return job.to_running()


def unreachable(node: int, kind: Kind = Kind.UNREACHABLE) -> LinkEnded:
    return lost(node, "No route to host", kind)


# An attempt that fails, and the next


def test_a_failing_rank_restarts_the_job_in_the_same_agents_once_all_confirmed() -> None:
    job = Job().to_running()
    before = len(job.actions)
    said = job.feed(exited(1, 0, 7, job.now))
    assert texts(said, "warning") == ["rank 2 (b) failed: exit status 7; restart 1 of 3"]
    assert wanted(said) == [StopWorkers(0, STOP_S), StopWorkers(1, STOP_S)]
    assert job.feed(messages.Swept(0, 0, 0), exited(1, 1, -15, job.now)) + job.wait() == []
    assert job.feed(messages.Swept(1, 0, 0)) == [HoldPort(0, None)]
    assert job.feed(messages.PortHeld(0, 29444)) == [StartWorkers(0), StartWorkers(1)]
    assert (job.state.attempt, job.state.restart_count, job.state.port) == (1, 1, 29444)
    assert not Actions(job.actions[before:]).of(Connect, Close, Drop, GiveUp)
    assert job.state.cause is None


@pytest.mark.parametrize(("most", "times"), [(0, ""), (1, "once"), (3, "3 times")])
def test_a_crash_loop_has_exactly_one_attempt_more_than_restarts(most: int, times: str) -> None:
    job = Job(text_of(restarts=f"restarts: {{max: {most}}}")).to_running()
    for _ in range(most + 1):
        assert job.state.phase is Phase.RUNNING
        job.restart()
    assert job.state.phase is Phase.DONE
    assert (job.actions.count_of(StartWorkers(1)), len(job.actions.of(Finish))) == (most + 1, 1)
    assert job.blamed == (7, 1, 0)
    used_up = f"; not restarting: already restarted {times} in the last hour (restarts.max)" if most else ""
    assert texts(job.actions, "error") == [f"rank 1 (a) failed: exit status 7{used_up}"]


def test_restarts_before_the_window_do_not_count() -> None:
    job = Job(text_of(restarts="restarts: {max: 2, window: 100s, backoff: 0s}")).to_running()
    for wait_s, restarts in [(0.0, True), (60.0, True), (40.0, True), (59.9, False)]:
        job.now += wait_s
        job.fail()
        assert (job.state.phase is Phase.RUNNING) == restarts
    (words,) = texts(job.actions, "error")
    assert words.endswith("; not restarting: already restarted twice in the last 100 s (restarts.max)")


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.99])
def test_the_first_restart_is_at_once_and_each_further_one_waits_twice_as_long(chance: float) -> None:
    job = Job(text_of(restarts="restarts: {max: 20, backoff: 4s}"), chance).to_running()
    first, *others = [job.restart() for _ in range(12)]
    assert first == 0.0
    for attempt, wait_s in enumerate(others):
        assert 0.75 <= wait_s / min(BACKOFF_S * 2**attempt, 300.0) <= 1.25


def test_after_a_healthy_attempt_the_backoff_begins_again() -> None:
    job = Job(text_of(restarts="restarts: {max: 20, backoff: 4s}")).to_running()
    waits = [job.restart() for _ in range(3)]
    job.now += HEALTHY_S + 0.1
    assert [job.restart() for _ in range(3)] == pytest.approx(waits)
    job.now += HEALTHY_S - 20.0
    assert job.restart() > 10.0


def test_an_attempt_that_never_ran_is_not_healthy() -> None:
    job = Job(text_of(restarts="restarts: {max: 20, backoff: 4s}")).to_running()
    job.now += 10.0
    job.lose(1, clean=True)
    job.now += HEALTHY_S - 50.0
    job.silent.add(0)
    job.come_back(1)
    assert job.state.phase is Phase.PREPARING
    job.now += 40.0
    job.feed(lost(1, clean=True))
    assert (job.state.due_at(Timer.BACKOFF) or 0.0) > job.now


# Failures that would repeat, and those that the job excludes


def raises(job: Job, rank: int = 0, words: str = OWN) -> Actions:
    """A rank raises an exception, and time passes until the next attempt runs, or the job is over."""
    event = messages.WorkerExited(rank // 2, rank % 2, 1, job.now, words=words)
    return Actions(job.obey(job.feed(event)) + job.go_on())


REPEATED = "raised the same ValueError at t.py:7 as in the previous attempt"


def test_the_same_exception_twice_in_a_row_ends_the_job_for_good() -> None:
    job = Job(text_of(restarts="restarts: {max: 9, requeue: 5}")).to_running()
    raises(job, 0, OWN.replace("bad", "bad row 7"))
    assert job.state.phase is Phase.RUNNING
    (said,) = texts(raises(job, 3, OWN.replace("bad", "bad row 12")), "error")
    why = f"rank 3 {REPEATED} (to restart anyway, set restarts.repeat: true)"
    assert said == f"rank 3 (b) failed: exit status 1; not restarting: {why}"
    assert (job.state.phase, job.blamed) == (Phase.DONE, (1, 3, 1))
    assert not is_to_go_on(job.state)


def test_keeps_the_reason_why_it_does_not_restart_if_another_rank_failed_earlier() -> None:
    job = Job(text_of(restarts="restarts: {max: 9, requeue: 5}")).to_running()
    raises(job)
    late = messages.WorkerExited(1, 1, 1, job.now + 1.0, words=OWN)
    job.feed(late, late._replace(node=0, local_rank=0, at=job.now + 0.9), after=1.0)
    assert job.state.cause
    assert job.state.cause.text.startswith("rank 0 (a) failed first: exit status 1; not restarting: rank 3 ")
    assert not is_to_go_on(job.state)


@pytest.mark.parametrize("limit", ["never: [exception]", "on: [exit]"])
def test_an_earlier_failure_counts_for_requeueing_too(limit: str) -> None:
    """Whichever was reported first."""
    killed = messages.WorkerExited(0, 0, -9, 1000.0, oom_kills=1)
    raised = messages.WorkerExited(1, 1, 1, 1000.2, words=OWN)
    allowed = limit == "never: [exception]"
    for events in ([killed, raised], [raised, killed]):
        job = Job(text_of(restarts=f"restarts: {{requeue: 5, {limit}}}")).to_running()
        job.feed(*(each._replace(at=job.now + each.at - 1001.0) for each in events))
        cause = job.state.cause
        assert cause and cause.rank == 0
        assert ("not restarting" in cause.text) == (not allowed)
        assert is_to_go_on(job.state) == allowed


@pytest.mark.parametrize(
    ("other", "lived_s", "repeat"),
    [
        *((OWN.replace("line 7", "line 8"), 0.0, False), (OWN.replace("bad", "worse"), 0.0, False)),
        *((OWN, HEALTHY_S, False), (OWN, 0.0, True), ("", 0.0, False)),
    ],
)
def test_restarts_after_another_exception_progress_or_none(other: str, lived_s: float, repeat: bool) -> None:
    job = Job(text_of(restarts=f"restarts: {{max: 9, repeat: {str(repeat).lower()}}}")).to_running()
    for words in (OWN, other, OWN, other):
        job.now += lived_s
        raises(job, words=words)
    assert job.state.phase is Phase.RUNNING


@pytest.mark.parametrize("restarts", ["max: 3", "max: 3, never: [exception]"])
def test_a_root_cause_reported_late_that_excludes_a_restart_ends_the_job(restarts: str) -> None:
    job = Job(text_of(restarts=f"restarts: {{{restarts}}}")).to_running()
    for _ in range(2):
        job.silent = {1}
        job.feed(messages.WorkerExited(0, 0, 1, job.now, words=PEER_GONE))
        job.obey(job.tick())
        assert job.state.phase is Phase.RESTARTING
        job.silent = set()
        if job.obey(job.feed(messages.WorkerExited(1, 0, 1, job.now, words=OWN))).of(Finish):
            break
        job.obey(Actions([StopWorkers(1, STOP_S)]))
        job.go_on()
    assert job.state.phase is Phase.DONE
    assert "; not restarting: " in texts(job.actions, "error")[-1]
    assert len(job.state.restarts) == (1 if "never" in restarts else 2)
    assert "never" in restarts or job.state.restarts[0].cause.rank == 2


FAILED_WITH_3, KILLED = messages.WorkerExited(1, 0, 3, 0.0), messages.WorkerExited(1, 0, -9, 0.0)
RAISED, VICTIM = (messages.WorkerExited(1, 0, 1, 0.0, words=words) for words in (OWN, PEER_GONE))


@pytest.mark.parametrize(
    ("keys", "event", "why"),
    [
        ("never: [exception]", RAISED, "restarts.never includes exception"),
        ("on: [node_lost, exit]", RAISED, "restarts.on doesn't include exception"),
        ("on: [node_lost]", KILLED, "restarts.on doesn't include signal"),
        ("on: [signal]", KILLED._replace(oom_kills=1), "restarts.on doesn't include oom"),
        ("on: [exit: [75]]", FAILED_WITH_3, "restarts.on doesn't include exit status 3"),
        ("never: [exit: [3]]", FAILED_WITH_3, "restarts.never includes exit status 3"),
        ("never: [collective]", VICTIM, "restarts.never includes collective"),
        ("never: [node_lost]", lost(1, clean=True), "restarts.never includes node_lost"),
        ("on: [exception]", RAISED, ""),
        ("on: [exit: [3]], never: [exit]", FAILED_WITH_3, ""),
        ("on: [oom]", KILLED._replace(oom_kills=1), ""),
        ("on: [collective]", VICTIM, ""),
        ("never: [exception]", lost(1, clean=True), ""),
    ],
)
def test_restarts_only_after_failures_that_the_job_names(keys: str, event: Event, why: str) -> None:
    job = Job(text_of(restarts=f"restarts: {{max: 3, requeue: 1, {keys}}}")).to_running()
    job.obey(job.feed(event))
    while job.state.suspect:
        job.obey(job.tick())
    job.go_on()
    assert (job.state.phase is Phase.RUNNING) == (not why)
    reasons = [text.partition("; not restarting: ")[2] for text in texts(job.actions, "error")]
    assert reasons == ([why] if why else [])
    assert not (why and is_to_go_on(job.state))


# A node that keeps failing


def keeps_failing(*lines: str, restarts: str = "max: 9", lived_s: float = 0.0) -> Job:
    """A job after three failures of b in a row."""
    job = Job(text_of("[a, b]", *lines, restarts=f"restarts: {{{restarts}}}")).to_running()
    for _ in range(3):
        job.now += lived_s
        job.obey(job.feed(exited(1, 0, 7, job.now)))
        job.go_on()
    return job


LEFT_OUT = "b: root cause of three failures in a row; continuing without it"


@pytest.mark.parametrize(("lines", "members"), [("spares: [c]", (0, 2)), ("min_nodes: 1", (0,))])
def test_leaves_out_a_node_that_failed_three_times_in_a_row(lines: str, members: tuple[int, ...]) -> None:
    job = keeps_failing(lines, "elastic: {grow: now}")
    assert (job.state.phase, job.state.members) == (Phase.RUNNING, members)
    assert texts(job.actions, "warning")[-1] == LEFT_OUT
    job.lose(1, clean=True, away=False)
    told = ["b is back; after causing three failures in a row, it is used only if too few others are left"]
    assert texts(job.come_back(1), "info") == (told if len(members) == 1 else [])
    job.restart()
    assert job.state.members == members


@pytest.mark.parametrize(
    ("lines", "restarts", "lived_s"),
    [("", "max: 9", 0.0), ("spares: [c]", "max: 9", 601.0), ("spares: [c]", "max: 9, repeat: true", 0.0)],
)
def test_keeps_a_node_that_is_needed_or_ran_long(lines: str, restarts: str, lived_s: float) -> None:
    job = keeps_failing(lines, restarts=restarts, lived_s=lived_s)
    assert (job.state.phase, job.state.members) == (Phase.RUNNING, (0, 1))
    assert LEFT_OUT not in texts(job.actions)


# Failures without a restart


@pytest.mark.parametrize(
    ("phase", "event", "status"),
    [
        ("preparing", messages.PortRefused(0, "taken", ()), Exit.PORT_TAKEN),
        ("running", messages.WorkerUnstarted(1, 0, "exec", errno.ENOENT, "x"), 127),
    ],
)
def test_a_failure_beyond_repair_ends_a_restarted_job(phase: str, event: Event, status: int) -> None:
    job = Job().to_running()
    job.silent = {0} if phase == "preparing" else set()  # it holds no port
    job.obey(job.feed(exited(1, 0, 7, job.now), messages.Swept(0, 0, 0)))
    assert (job.state.phase.value, job.state.attempt) == (phase, 1)
    job.silent = set()
    job.obey(job.feed(event))
    assert (job.state.phase, job.state.outcome) == (Phase.DONE, status)
    assert len(job.state.restarts) == 1


def test_ignores_reports_of_what_was_not_requested() -> None:
    job = with_spares().to_running()
    outside = (messages.RanksStalled(2, (0,)), messages.PortRefused(2, "taken", ()), messages.PortHeld(2, 1))
    assert job.feed(*outside) == []
    job.silent = {0}  # it holds no port
    job.obey(job.feed(exited(1, 0, 7, job.now), messages.Swept(0, 0, 0)))
    assert job.feed(messages.RouteFailed(1, MASTER, "no route")) == []


@pytest.mark.parametrize("kind", [Kind.HOST_KEY, Kind.AUTHENTICATION, Kind.NO_PYTHON, Kind.BAD_OPTION])
def test_a_wrong_setting_ends_the_job_at_the_start(kind: Kind) -> None:
    job = Job()
    job.feed(up(0))
    job.obey(job.feed(unreachable(1, kind)))
    assert job.state.phase is Phase.DONE
    assert job.blamed == (Exit.UNREACHABLE, None, 1)
    assert len(job.actions.of(Connect)) == 2


def test_does_not_retry_a_lost_node_whose_host_key_changed() -> None:
    job = elastic()
    job.lose(1, clean=True)
    assert Connect(1) in job.tick()
    job.obey(job.feed(unreachable(1, Kind.HOST_KEY)))
    assert job.state.members == (0,)
    assert isinstance(job.state.nodes[1], Lost)
    assert job.actions.count_of(Connect(1)) == 2
    assert not job.wait(100.0).of(Connect)


# Nodes that don't fit


WITH_GPUS = text_of("[a, b]", "spares: [c, d]").replace("gpus_per_node: 0\n", "").replace("gloo", "auto")
NO_GPU = "can't be used: it has 0 GPUs for 2 workers, but nccl needs a GPU for each"


@pytest.mark.parametrize(("backend", "early"), [("auto", False), ("auto", True), ("nccl", True)])
def test_skips_a_spare_that_does_not_fit_with_a_warning_at_the_start(backend: str, early: bool) -> None:
    """It may connect before the job's own nodes."""
    job = Job(WITH_GPUS.replace("auto", backend))
    job.gpus = {0: 2, 1: 2, 3: 2}
    if early:
        job.obey(Actions([Connect(2), Connect(3), Connect(0)]))
        job.obey(Actions([Connect(1)]) if backend == "auto" else job.feed(unreachable(1, Kind.HOST_KEY)))
    else:
        job.to_running()
    if backend == "auto":
        assert texts(job.actions, "warning") == [f"c {NO_GPU}"]
        assert Drop(2) in job.actions
        job.lose(1, clean=True)
        job.feed(unreachable(1))
        job.go_on()
    assert texts(job.actions, "warning").count(f"c {NO_GPU}") == 1  # even if it was looked at again
    assert (job.state.members, job.state.phase) == ((0, 3), Phase.RUNNING)


def test_a_node_that_returns_before_its_gpus_rejoins_with_them() -> None:
    job = Job(WITH_GPUS.replace("spares: [c, d]", "min_nodes: 1\nelastic: {grow: now}"))
    job.gpus = {0: 2, 1: 2}
    job.to_running().lose(1, clean=True)
    job.go_on()
    job.gpus.pop(1)
    said = job.come_back(1)
    for _ in range(9):
        said += job.obey(job.tick())
    assert texts(said, "warning") == [f"b {NO_GPU}"]
    job.restart()
    assert job.state.plan
    assert (job.state.members, job.state.plan.backend) == ((0,), "nccl")
    job.gpus[1] = 2
    while len(job.state.members) == 1:
        job.obey(job.tick())
    assert (job.state.members, unfit_words(job.state.nodes[1])) == ((0, 1), "")


def test_waits_for_the_gpus_of_a_node_that_is_needed_but_not_for_ever() -> None:
    job, ending = (Job(WITH_GPUS.replace("spares: [c, d]", "on_stall: stop")) for _ in range(2))
    for each in (job, ending):
        each.gpus = {0: 2, 1: 2}
        each.to_running()
        each.gpus.pop(1)
        each.lose(1, clean=True, away=False)
        for _ in range(9):
            each.obey(each.tick())
        assert each.state.phase is Phase.RESTARTING
    job.gpus[1] = 2
    job.go_on()
    assert job.state.members == (0, 1)
    while ending.state.phase is Phase.RESTARTING:
        ending.obey(ending.tick())
    left = f"only 1 of 2 required nodes available after waiting 5 min (timeouts.rejoin); b {NO_GPU}"
    assert texts(ending.actions, "error") == [f"b was lost: Connection reset by peer; {left}"]
    assert ending.state.outcome == Exit.NODE_LOST


def test_does_not_judge_nodes_while_the_job_ends() -> None:
    job = Job(WITH_GPUS).to_running()
    job.feed(messages.Interrupted(signal.SIGTERM))
    assert texts(job.feed(messages.Reaped(1, 0), up(2))) == []


def test_skips_a_spare_without_a_route_until_it_returns() -> None:
    job = with_spares("[c, d]").to_running()
    job.silent.add(2)  # it does not find its way
    job.lose(1, clean=True)
    assert (job.state.members, job.state.phase) == ((0, 2), Phase.PREPARING)
    said = texts(job.obey(job.feed(messages.RouteFailed(2, MASTER, "no route"))), "warning")
    assert said[0].startswith(f"c can't reach MASTER_ADDR {MASTER}: no route; set nodes[0].address")
    job.go_on()
    assert job.state.members == (0, 3)
    job.lose(2, clean=True, away=False)
    job.lose(3, clean=True)
    job.come_back(2)
    job.go_on()
    assert job.state.members == (0, 2)


@pytest.mark.parametrize("others", [False, True])
def test_skips_a_spare_without_a_route_before_the_new_first_node_has_one(others: bool) -> None:
    job = Job(text_of("[a, b, c]", "spares: [z]", "min_nodes: 2")).to_running()
    job.state = job.state._replace(addresses={1: "10.0.0.2"})
    job.silent |= {0, 1, 2, 3}
    job.feed(lost(0, clean=True), *(messages.Swept(node, 0, 0) for node in (1, 2)))
    while job.state.phase is Phase.RESTARTING:
        job.feed(unreachable(0))
        job.tick()
    master = job.state.planned.master_addr
    assert (job.state.members, master) == ((1, 2, 3), "10.0.0.2")
    job.feed(messages.RouteFound(2, master, master, "eth0") if others else messages.PortHeld(1, 29500))
    job.silent -= {1, 2, 3}
    (said,) = texts(job.obey(job.feed(messages.RouteFailed(3, master, "no route"))), "warning")
    assert said.startswith("z can't reach MASTER_ADDR 10.0.0.2: no route; set nodes[1].address")
    job.go_on()
    assert (job.state.phase, job.state.members) == (Phase.RUNNING, (1, 2))


def test_a_route_that_is_found_while_restarting_counts_in_the_next_attempt() -> None:
    job = Job(text_of("[a, b, c]", "spares: [d, e]", "min_nodes: 2")).to_running()
    job.silent |= {1, 2, 3, 4}
    job.obey(job.feed(lost(1, clean=True), lost(2, clean=True)))
    assert (job.state.members, job.state.phase) == ((0, 3, 4), Phase.PREPARING)
    job.feed(messages.RouteFailed(4, MASTER, "no route"), messages.RouteFound(3, MASTER, MASTER, "eth3"))
    assert job.state.phase is Phase.RESTARTING
    job.silent.remove(3)
    job.go_on()
    assert (job.state.members, len(job.state.restarts)) == ((0, 3), 2)


def test_a_spare_lost_while_other_nodes_connect_is_left_out() -> None:
    job = with_spares()
    job.feed(up(2))
    assert texts(job.feed(lost(2))) == ["c was lost: Connection reset by peer"]
    job.silent.add(2)
    assert job.to_running().state.members == (0, 1)
    leaving = with_spares()
    leaving.feed(up(2))
    said = leaving.feed(messages.AgentLeaving(2, signal.SIGTERM), lost(2))
    assert texts(said) == ["c was lost: its agent was stopped by signal 15 (SIGTERM)"]


@pytest.mark.parametrize(
    ("restarts", "after_s", "again"), [(RESTARTS, 0.0, True), (RESTARTS, CONNECT_S, False), ("", 0.0, False)]
)
def test_a_node_lost_while_others_connect_is_connected_again_if_the_job_may_restart_and_time_is_left(
    restarts: str, after_s: float, again: bool
) -> None:
    job = Job(text_of(restarts=restarts))
    job.feed(up(0), after=after_s)
    said = job.feed(messages.AgentLeaving(0, signal.SIGTERM), lost(0, clean=True))
    lines = ["a was lost: its agent was stopped by signal 15 (SIGTERM); waiting for it to reconnect"]
    assert [line for line in texts(said, "warning") if "reconnect" in line] == lines * again
    assert (job.state.phase is Phase.CONNECTING) == again
    assert again or job.blamed == (Exit.NODE_LOST, None, 0)


@pytest.mark.parametrize("kind", [Kind.REFUSED, Kind.UNREACHABLE, Kind.ABSENT])
@pytest.mark.parametrize("returns", [True, False])
def test_a_node_lost_while_others_connect_is_tried_until_it_is_back_or_the_time_is_over(
    kind: Kind, returns: bool
) -> None:
    job = Job(text_of())
    job.feed(up(0), lost(0), up(1))
    tries = 0
    while job.state.phase is Phase.CONNECTING:
        assert job.now <= T + CONNECT_S
        if Connect(0) in job.tick():
            tries += 1
            job.feed(*([up(0), messages.Reaped(0, 0)] if returns and tries == 4 else [unreachable(0, kind)]))
    assert tries >= 4
    assert job.state.phase is (Phase.PREPARING if returns else Phase.STOPPING)
    if not returns:
        assert job.now == T + CONNECT_S and job.blamed == (Exit.NODE_LOST, None, 0)
        why = "" if kind is Kind.ABSENT else f": {kind.value}"
        assert job.state.cause and f"and did not reconnect{why}; nothing" in job.state.cause.text


@pytest.mark.parametrize("restarts", [RESTARTS, ""])
def test_another_launcher_may_join_for_one_that_was_killed_before_its_agent_was_there(restarts: str) -> None:
    job = Job(text_of(restarts=restarts))
    spec = job.state.spec
    nodes = (spec.nodes[0], spec.nodes[1]._replace(reach=Joined("b")))
    job.state = job.state._replace(spec=spec._replace(nodes=nodes))
    said = texts(job.feed(up(0), LinkEnded(1, LinkFailure(Kind.ABSENT))))
    if not restarts:
        assert said == ["connection lost: 1 of 2 nodes can't be used (b); nothing was started"]
        assert job.state.phase is Phase.STOPPING
        return
    assert said == ["b was lost: its launcher exited; waiting for it to reconnect"]
    assert Connect(1) in job.tick()
    job.feed(up(1), messages.Reaped(1, 0))
    assert job.state.phase is Phase.PREPARING


def test_launchers_that_fail_again_and_again_keep_the_next_one_waiting_no_longer() -> None:
    job = elastic()
    spec = job.state.spec
    job.state = job.state._replace(
        spec=spec._replace(nodes=(spec.nodes[0], spec.nodes[1]._replace(reach=Joined("b"))))
    )
    job.lose(1, clean=True)
    job.go_on()
    for _ in range(8):
        job.feed(NodeArrived(1, "b", here=False))
        while Connect(1) not in job.tick():
            pass
        job.feed(lost(1))
        lost_at = job.now
        while Connect(1) not in job.tick():
            pass
        assert job.now < lost_at + 1.0
        job.feed(LinkEnded(1, LinkFailure(Kind.ABSENT)))


def test_another_launcher_may_join_an_elastic_job_at_once_that_started_without_a_killed_one() -> None:
    job = Job(text_of(restarts=RESTARTS, nodes="[a, b]") + "\nmin_nodes: 1")
    spec = job.state.spec
    nodes = (spec.nodes[0], spec.nodes[1]._replace(reach=Joined("b")))
    job.state = job.state._replace(spec=spec._replace(nodes=nodes))
    job.feed(up(0), unreachable(1, Kind.ABSENT))
    assert job.state.phase is Phase.PREPARING
    assert Connect(1) in job.wait()


def test_nodes_that_leave_while_others_connect_are_missing_once_their_links_have_ended() -> None:
    job = Job(text_of("[a, b, c]", "min_nodes: 2", restarts="restarts: 0"))
    job.feed(up(0), up(1), *(messages.AgentLeaving(node, signal.SIGTERM) for node in (0, 1)), up(2))
    assert job.state.phase is Phase.CONNECTING
    assert "2 of 3 nodes can't be used (a, b)" in texts(job.feed(lost(0), lost(1)), "error")[-1]


def test_a_node_without_a_route_to_a_lost_master_is_asked_again() -> None:
    job = Job(text_of("[a, b, c]", "min_nodes: 2"))
    job.silent |= {0, 1, 2}
    job.feed(*(up(node) for node in (0, 1, 2)))
    master = job.state.up(1).asked
    job.feed(lost(0, clean=True), messages.RouteFailed(1, master, "Temporary failure in name resolution"))
    assert job.state.phase is Phase.RESTARTING
    job.silent = {0}
    job.go_on()
    assert (job.state.phase, job.state.members) == (Phase.RUNNING, (1, 2))


# Nodes that are lost


@pytest.mark.parametrize("restarts", ["restarts: 0", RESTARTS])
def test_a_job_whose_ranks_finished_while_this_machine_was_suspended_has_succeeded(restarts: str) -> None:
    """The agents have left by then, and the end of one may be read before the exits of others' ranks."""
    job = Job(text_of(restarts=restarts)).to_running()
    job.silent.add(1)
    job.feed(Suspended(36.0), *(exited(1, rank, 0, job.now) for rank in (0, 1)), lost(1, clean=True))
    assert job.state.phase is Phase.RUNNING
    job.feed(*(exited(0, rank, 0, job.now) for rank in (0, 1)), messages.Swept(0, 0, 0), lost(0, clean=True))
    assert (job.state.phase, job.state.outcome, job.state.restarts) == (Phase.DONE, Exit.OK, ())


@pytest.mark.parametrize(("status", "clean"), [(0, False), (None, True)])
def test_a_lost_node_fails_the_attempt_unless_its_ranks_had_finished_and_nothing_is_left(
    status: int | None, clean: bool
) -> None:
    job = Job().to_running()
    if status is not None:
        job.feed(*(exited(1, rank, status, job.now) for rank in (0, 1)))
    job.lose(1, clean=clean)
    assert job.state.phase is not Phase.RUNNING


def test_only_a_nodes_first_agent_confirms_that_its_ranks_are_gone() -> None:
    job = Job().to_running()
    job.feed(lost(1), messages.Swept(0, 0, 0))
    job.tick()
    job.feed(up(1), messages.Interrupted(signal.SIGINT), messages.Swept(1, 0, 0))
    said = texts(job.feed(lost(1, clean=True)))
    assert said == ["b: lost before it confirmed its cleanup; its ranks exit within 40 s"]


@pytest.mark.parametrize(("times", "fence_s"), [("stop: 10s", FENCE_S), ("stop: 2s, lease: 7s", 14.0)])
def test_fences_other_lost_nodes_for_lease_grace_and_five_seconds(times: str, fence_s: float) -> None:
    job = Job(text_of("[a, b, c]", "min_nodes: 2").replace("stop: 10s", times)).to_running()
    job.lose(1)
    assert job.state.due_at(Timer.FENCE, 1) == job.now + fence_s
    assert job.stay_without(1) == fence_s
    assert job.state.members == (0, 2)


def test_a_node_that_is_back_but_not_reaped_at_the_end_of_the_job_is_not_waited_for() -> None:
    """It never becomes clean, so no files would ever be requested from it."""
    job = Job(text_of("[a, b]", "collect: [x]")).to_running()
    job.silent.add(0)
    job.feed(lost(0), messages.Swept(1, 0, 0))
    assert job.tick() == [Connect(0)]
    assert job.feed(up(0)) == [Reap(0)]
    _, actions = step(job.state, messages.Interrupted(signal.SIGINT), job.now)
    commands = [each.command for each in actions if isinstance(each, Send) and each.node == 0]
    assert [each.collects for each in commands if isinstance(each, messages.Close)] == [False]


def test_a_node_that_returns_and_is_reaped_needs_no_fence_any_more() -> None:
    job = Job().to_running()
    lost_at = job.now
    job.silent.add(1)
    (_, waiting) = texts(job.feed(lost(1)))
    assert waiting == "b: waiting up to 45 s for its ranks to exit, or for it to reconnect"
    job.feed(messages.Swept(0, 0, 0))
    assert job.tick() == [Connect(1)]
    assert job.feed(up(1)) == [Reap(1)]
    assert job.wait(1.0) == []
    assert wanted(job.feed(messages.Reaped(1, 2)))[0] == HoldPort(0, None)
    assert job.now < lost_at + 2.0
    assert job.state.due_at(Timer.FENCE, 1) is None


@pytest.mark.parametrize(("machine", "waits"), [("A", False), ("B", True), ("", False)])
def test_a_launcher_on_another_host_of_the_same_name_waits_until_nothing_is_left_on_the_lost_one(
    machine: str, waits: bool
) -> None:
    def launched(machine: str) -> AgentUp:
        return up(1)._replace(facts=Facts("/usr/bin/python3", 0, machine=machine))

    job = Job()
    job.silent.add(1)
    job.obey(job.feed(up(0), launched("A")))
    job.obey(job.feed(messages.RouteFound(1, MASTER, MASTER, "eth0")))
    job.feed(*(messages.WorkerStarted(1, each, 100 + each) for each in (0, 1)))
    assert job.state.phase is Phase.RUNNING
    lost_at = job.now
    job.feed(lost(1), messages.Swept(0, 0, 0), NodeArrived(1, "b", here=False))
    assert job.tick() == [Connect(1)]
    assert job.feed(launched(machine)) == ([] if waits else [Reap(1)])
    while waits and job.tick() != [Reap(1)]:
        assert job.now < lost_at + FENCE_S


def test_another_host_takes_the_place_and_the_name_once_nothing_is_left_on_the_lost_one() -> None:
    job = Job().to_running()
    lost_at = job.now
    job.silent.add(1)
    job.feed(lost(1), messages.Swept(0, 0, 0), NodeArrived(1, "c", here=False))
    assert job.tick() == [Connect(1)]
    assert job.feed(up(1)) == []
    assert [*awaited(job.state)] == ["the next attempt starts once the last one's ranks have ended on b"]
    assert texts(job.feed(lost(1)), "warning")[0].startswith("c was lost: ")
    job.silent.discard(1)
    job.go_on()
    assert job.now == lost_at + FENCE_S
    assert (job.state.planned.node_words, job.state.restarts[-1].cause.text[:10]) == ("a, c", "b was lost")
    assert texts(job.feed(exited(1, 0, 7, job.now)), "warning")[0].startswith("rank 2 (c) failed: ")


LONG_STOP_S = 400.0
"""Longer than the time in which lost nodes may return."""


def test_another_host_may_take_the_place_after_a_grace_period_longer_than_the_wait_for_lost_nodes() -> None:
    job = Job(text_of().replace("stop: 10s", f"stop: {LONG_STOP_S:g}s")).to_running()
    lost_at = job.now
    job.silent.add(1)
    job.feed(lost(1), messages.Swept(0, 0, 0), NodeArrived(1, "c", here=False))
    assert job.tick() == [Connect(1)]
    assert job.feed(up(1)) == []
    job.silent.discard(1)
    job.go_on()
    assert job.now == lost_at + LONG_STOP_S + FENCE_S - STOP_S
    assert (job.state.phase, job.state.planned.node_words) == (Phase.RUNNING, "a, c")


def test_a_node_may_return_after_its_ranks_have_saved_for_longer_than_the_wait_for_lost_nodes() -> None:
    job = Job(text_of().replace("stop: 10s", f"stop: {LONG_STOP_S:g}s")).to_running()
    job.feed(messages.AgentLeaving(1, 15), messages.Swept(0, 0, 0))
    job.wait(REJOIN_S + 50.0)
    job.feed(messages.Swept(1, 0, 0), lost(1, clean=True))
    job.come_back(1)
    job.go_on()
    assert job.state.phase is Phase.RUNNING


@pytest.mark.parametrize(("restarts", "phase"), [(2, Phase.CONNECTING), (0, Phase.DONE)])
def test_a_job_with_restarts_connects_again_to_a_node_lost_while_it_connects(
    restarts: int, phase: Phase
) -> None:
    job = Job(text_of(restarts=f"restarts: {restarts}"))
    job.obey(job.feed(up(0), LinkEnded(1, LinkFailure(Kind.LOST, "its agent exited"))))
    assert job.state.phase is phase
    if restarts:
        assert job.tick() == [Connect(1)]
        job.obey(job.feed(up(1)))
        assert not job.state.restarts


def test_an_elastic_job_connects_again_to_lost_nodes_if_it_cannot_begin_without_them() -> None:
    job = Job(text_of("[a, b, c]", "min_nodes: 2"))
    job.obey(job.feed(up(0), up(1), lost(0), lost(1)))
    assert job.state.phase is Phase.CONNECTING
    said = texts(job.obey(job.feed(unreachable(2))), "warning")
    assert said == ["too few nodes are left; waiting for a, b to reconnect"]
    job.go_on()
    assert (job.state.phase, job.state.members, job.state.restarts) == (Phase.RUNNING, (0, 1), ())


def test_an_elastic_job_may_lose_a_node_again_that_has_reconnected() -> None:
    job = Job(text_of("[a, b, c]", "min_nodes: 2"))
    job.silent |= {1, 2}
    job.obey(job.feed(up(0), up(1), lost(0), lost(1), lost(2)))
    while not isinstance(job.state.nodes[0], Up):
        job.obey(job.tick())
    job.feed(LinkEnded(0, LinkFailure(Kind.NODE_DOWN, "Node failure")))
    while job.state.phase is Phase.CONNECTING:
        job.tick()
        job.feed(*(unreachable(node) for node in (1, 2)))
    assert texts(job.actions, "error")[-1].endswith("nothing was started")


def test_the_node_that_did_not_return_is_one_of_the_last_attempt() -> None:
    job = Job(text_of("[a, b]", "spares: [z]"))
    job.silent.add(2)
    job.to_running()
    job.feed(unreachable(2))
    job.restart()
    missing = messages.WorkerUnstarted(1, 0, "exec", errno.ENOENT, "no such program")
    job.obey(job.feed(missing))
    while job.state.phase is not Phase.DONE:
        job.feed(unreachable(2))
        job.obey(job.tick())
    assert (job.state.outcome, job.state.cause and job.state.cause.node) == (127, 1)


def test_an_elastic_job_ends_if_too_few_nodes_reconnect_in_time() -> None:
    job = Job(text_of("[a, b, c]", "min_nodes: 2"))
    job.silent |= {0, 1}
    job.feed(up(0), up(1), lost(0), lost(1), unreachable(2))
    while job.state.phase is Phase.CONNECTING:
        job.tick()
        job.feed(*(unreachable(node) for node in (0, 1)))
    assert job.now == job.state.began_at + CONNECT_S
    assert (
        texts(job.actions, "error")[-1]
        == "unreachable: 3 of 3 nodes can't be used (a, b, c); nothing was started"
    )


def test_a_connection_that_always_breaks_ends_the_job_with_its_reason() -> None:
    job = Job()
    job.feed(up(0), broken := LinkEnded(1, LinkFailure(Kind.LOST, "srun: error: no such image")))
    for _ in range(20):
        if job.state.phase is Phase.DONE:
            break
        if job.tick() == [Connect(1)]:
            job.obey(job.feed(broken))
    assert job.now < job.state.began_at + 30.0
    told = "connection lost: 1 of 2 nodes can't be used (b); nothing was started"
    assert job.state.cause and job.state.cause.text == told
    assert "  | srun: error: no such image" in Summary(job.state, "", {}, 1.0).lines()


@pytest.mark.parametrize("earlier", [False, True])
def test_the_same_exception_is_not_requeued_in_either_order_of_reports(earlier: bool) -> None:
    job = Job(text_of(restarts="restarts: {max: 1, requeue: 5}")).to_running()
    raises(job)
    same = messages.WorkerExited(0, 0, 1, job.now + 0.9, words=OWN)
    other = messages.WorkerExited(1, 1, 3, job.now + 1.0)
    job.feed(*([other, same] if earlier else [same, other]), after=1.0)
    assert (job.state.outcome, is_to_go_on(job.state)) == (1, False)


def test_a_late_launcher_gives_its_name_to_the_node_that_it_joins_as() -> None:
    job = Job(text_of("[a, node1]", "min_nodes: 1", "elastic: {grow: now}"))
    job.obey(job.feed(up(0), unreachable(1, Kind.ABSENT)))
    job.go_on()
    job.feed(NodeArrived(1, "c", here=False))
    assert texts(job.come_back(1), "info")[0] == "c joined; restarting to include it"
    assert job.state.planned.node_words == "a, c"


def test_drops_and_fences_a_node_that_does_not_confirm_in_time() -> None:
    job = elastic()
    failed_at = job.now
    job.silent.add(1)
    job.fail()
    (waiting,) = texts(job.tick(), "warning")
    assert waiting.startswith("waiting for rank 2 (b, pid 100), rank 3 (b, pid 101) to exit")
    actions = job.tick()
    assert job.now == failed_at + STOP_S + 14.0
    waiting = "b: waiting up to 45 s for its ranks to exit, or for it to reconnect"
    assert texts(actions, "warning") == ["b did not confirm its cleanup; treating the node as lost", waiting]
    assert (wanted(actions), job.stay_without(1)) == ([Drop(1)], FENCE_S)
    assert job.state.members == (0,)


def test_does_not_use_a_node_whose_agent_was_stopped_until_another_connects() -> None:
    job = elastic()
    said = job.obey(job.feed(messages.AgentLeaving(1, signal.SIGTERM)))
    assert texts(said)[0] == ("b was lost: its agent was stopped by signal 15 (SIGTERM); restart 1 of 3")
    assert (job.state.phase, job.state.members) == (Phase.RUNNING, (0,))
    assert texts(job.feed(lost(1, clean=True))) == []
    job.come_back(1)
    job.restart()
    assert job.state.members == (0, 1)


def test_waits_for_a_node_whose_agent_leaves_before_its_link_ends() -> None:
    job = Job().to_running()
    job.silent = {0, 1}
    said = job.obey(job.feed(messages.AgentLeaving(1, signal.SIGTERM)))
    assert wanted(said) == [StopWorkers(0, STOP_S), StopWorkers(1, STOP_S)]
    assert job.feed(messages.Swept(0, 0, 0), messages.Swept(1, 0, 0)) + job.wait() == []
    assert job.state.phase is Phase.RESTARTING
    job.feed(lost(1, clean=True))
    job.silent.clear()
    job.go_on()
    assert (job.state.phase, job.state.members) == (Phase.RUNNING, (0, 1))


# Members


def test_a_spare_replaces_a_lost_node() -> None:
    job = with_spares().to_running()
    assert job.state.members == (0, 1)
    actions = job.lose(1, clean=True)
    starts = [HoldPort(0, None), FindRoute(2, MASTER), StartWorkers(0), StartWorkers(2)]
    assert wanted(actions) == [StopWorkers(0, STOP_S), *starts]
    assert texts(actions)[1:] == ["continuing with 2 of 2 nodes: a, c"]
    assert job.state.plan is not None
    assert [part.first_rank for part in job.state.plan.nodes] == [0, 2]


LOST, IDLE = {1: "the node was lost"}, {2: "the node took no part in the last attempt"}


@pytest.mark.parametrize(("hosts", "told"), [("[b]", LOST), ("[c]", IDLE), ("all", LOST), ("all", {})])
def test_a_node_that_is_not_in_the_last_attempt_sends_no_files(hosts: str, told: dict[int, str]) -> None:
    job = Job(text_of("[a, b]", "spares: [c]", f"collect: {{paths: [x], from: {hosts}}}")).to_running()
    if told is LOST:
        job.lose(1, clean=True)
    job.fail()
    assert without_files(job.state) == told


def test_waits_for_a_late_spare_before_continuing_with_fewer_nodes() -> None:
    job = Job(text_of("[a, b]", "spares: [c]", "min_nodes: 1"))
    job.silent.add(2)
    job.to_running().lose(1, clean=True)
    job.tick()
    assert not job.feed(unreachable(1)).of(HoldPort)
    job.obey(job.feed(up(2)))
    assert job.state.members == (0, 2)


MEMBERS = [
    ("[a, b, c, d]", "min_nodes: 2", [1, 3], (0, 2)),
    ("[a, b, c, d]", "min_nodes: 2", [0], (1, 2, 3)),
    ("[a, b, c, d]", "min_nodes: 1", [0, 1, 2], (3,)),
    ("[a, b, c]", "spares: [d, e]", [0, 2], (1, 3, 4)),
    ("[a, b, c]", "spares: [d]\nmin_nodes: 2", [0, 1], (2, 3)),
]


@pytest.mark.parametrize(("nodes", "more", "away", "members"), MEMBERS)
def test_members_keep_their_order(nodes: str, more: str, away: list[int], members: tuple[int, ...]) -> None:
    job = Job(text_of(nodes, more)).to_running()
    for node in away:
        job.lose(node)
    job.go_on()
    assert job.state.members == members
    assert job.state.plan is not None
    assert job.state.plan.world_size == 2 * len(members) == len(job.state.workers)
    assert [part.node_rank for part in job.state.plan.nodes] == list(range(len(members)))
    assert job.state.port == 29401
    assert (HoldPort(members[0], None) in job.actions) and job.state.restart_count == 1


def test_rank_0_moves_if_its_node_is_lost_without_a_fence_if_its_agent_exited_cleanly() -> None:
    job = Job(text_of("[a, b, c]", "min_nodes: 2")).to_running()
    lost_at = job.now
    job.lose(0, clean=True)
    assert job.state.due_at(Timer.FENCE, 0) is None
    assert not job.obey(job.tick()).of(StartWorkers)  # it is tried once before the others go on
    actions = wanted(job.obey(job.feed(unreachable(0))))
    routes = [FindRoute(2, "b"), FindRoute(1, "b")]  # they are found again
    assert actions == [HoldPort(1, None), *routes, StartWorkers(1), StartWorkers(2)]
    assert job.now < lost_at + 1.0
    assert job.state.plan is not None and job.state.plan.master_addr == "b"


@pytest.mark.parametrize(
    ("nodes", "node"), [("[a, b]", 0), ("[a, b]", 1), ("[a, b, c]", 0), ("[a, b, c]", 1)]
)
def test_a_node_that_returns_in_time_has_its_place_again_with_its_route(nodes: str, node: int) -> None:
    job = Job(text_of(nodes)).to_running()
    job.lose(node)
    job.come_back(node)
    assert (job.state.phase, len(job.state.restarts)) == (Phase.RUNNING, 1)
    assert job.state.members == tuple(range(len(job.state.nodes)))
    assert job.interfaces == [f"eth{i}" for i in job.state.members]
    assert [asked.node for asked in job.actions.of(FindRoute)].count(node) == 2


def test_reports_once_which_node_it_waits_for_and_that_it_is_back() -> None:
    job = Job().to_running()
    job.lose(1)
    assert [*awaited(job.state)] == ["the next attempt starts once the last one's ranks have ended on b"]
    while not (told := [text for text in texts(job.actions) if "timeouts.rejoin" in text]):
        job.obey(job.tick())
    assert [*awaited(job.state)] == ["the next attempt waits for nodes; b may return"]
    assert told[0].startswith("only 1 of 2 required nodes available; waiting up to ")
    assert told[0].endswith(" s for b to return (timeouts.rejoin)")
    job.come_back(1)
    assert sum("timeouts.rejoin" in text for text in texts(job.actions)) == 1
    assert ("b is back" in texts(job.actions), job.state.phase) == (True, Phase.RUNNING)


def test_a_node_that_returned_rejoins_at_the_next_restart_and_routes_are_found_again() -> None:
    job = elastic(f"master_addr: {MASTER}")
    job.lose(1)
    job.go_on()
    assert job.interfaces == [None]
    actions = job.come_back(1)
    assert wanted(actions) == [Connect(1), Reap(1)]
    assert texts(actions) == ["b is back; it takes part from the next restart"]
    job.restart()
    assert (job.state.members, job.interfaces) == ((0, 1), ["eth0", "eth1"])
    assert job.state.restart_count == 2


def without_b(*more: str, restarts: str = RESTARTS) -> Job:
    """A job on a, b and c that goes on with a and c."""
    job = Job(text_of("[a, b, c]", "min_nodes: 2", *more, restarts=restarts)).to_running()
    job.lose(1)
    job.go_on()
    assert job.state.members == (0, 2)
    return job


@pytest.mark.parametrize(("wait_s", "phase"), [(0.0, Phase.DONE), (3600.0, Phase.RUNNING)])
def test_grow_now_restarts_at_once_without_counting(wait_s: float, phase: Phase) -> None:
    job = without_b("elastic: {grow: now}", restarts="restarts: {max: 1}")
    actions = job.come_back(1)
    assert texts(actions, "info")[0] == "b is back; restarting to include it"
    assert wanted(actions)[:4] == [Connect(1), Reap(1), StopWorkers(0, STOP_S), StopWorkers(2, STOP_S)]
    assert (job.state.phase, job.state.members) == (Phase.RUNNING, (0, 2, 1))
    assert [restart.why for restart in job.state.restarts] == [Why.FAILURE, Why.GROWTH]
    assert job.state.restart_count == 2
    torchrun = job.state._replace(spec=job.state.spec._replace(places={}))
    assert torchrun.restart_count == 1
    job.now += wait_s
    job.restart()
    assert job.state.phase is phase


@pytest.mark.parametrize(("last", "phase"), [(-0.01, Phase.DONE), (0.01, Phase.RUNNING)])
def test_ranks_that_finished_before_they_were_told_to_restart_are_not_run_again(
    last: float, phase: Phase
) -> None:
    job = without_b("elastic: {grow: now}")
    job.silent |= {0, 2}
    job.come_back(1)
    assert job.state.phase is Phase.RESTARTING
    told_at, number = job.now, job.state.attempt
    job.feed(*(exited(node, local_rank, 0, told_at - 0.01) for node, local_rank in [(0, 0), (0, 1), (2, 0)]))
    job.silent.clear()
    job.obey(job.feed(exited(2, 1, 0, told_at + last), *(messages.Swept(node, number, 0) for node in (0, 2))))
    again = phase is Phase.RUNNING
    assert (job.state.phase, job.state.outcome, job.state.attempt) == (phase, Exit.OK, number + again)


class Reimaged(Job):
    """A job whose node b returns without its workdir, or with another torch."""

    lacks_workdir = changed = False

    def _answers(self, action: Any, node: int) -> list[Event]:
        match action:
            case FindRoute() if node == 1 and self.lacks_workdir:
                seen = {"place": {"workdir": "/data", "exists": False}}
                return [messages.RouteFound(node, action.address, action.address, "eth1", seen=seen)]
            case PlaceTree():
                versions = (("torch", "2.10.0" if node == 1 and self.changed else "2.9.0"),)
                return [messages.TreePlaced(node, "5891", "/envs/x", versions)]
        return super()._answers(action, node)


@pytest.mark.parametrize("flaw", ["lacks_workdir", "changed"])
def test_a_node_that_returns_with_a_flaw_is_left_out_whatever_causes_restarts(flaw: str) -> None:
    keys = ("min_nodes: 1", "elastic: {grow: now}", "sync: true", "setup: uv")
    job = Reimaged(text_of("[a, b]", *keys, restarts="restarts: {max: 3, on: [node_lost]}")).to_running()
    job.lose(1)
    job.go_on()
    setattr(job, flaw, True)
    assert "b is back; restarting to include it" in texts(job.come_back(1))
    job.go_on()
    assert (job.state.phase, job.state.members) == (Phase.RUNNING, (0,))


def test_a_node_that_cannot_start_its_ranks_is_left_out_if_the_job_has_run_without_it() -> None:
    job = without_b("elastic: {grow: now}")
    job.come_back(1)
    assert 1 in job.state.members
    reports = [messages.WorkerUnstarted(1, rank, "exec", errno.ENOENT, "no such program") for rank in (0, 1)]
    said = texts(job.obey(job.feed(*reports)), "warning")
    assert said[0].startswith("rank 4 (b) could not be started: no such program; restart 2 of 3")
    job.go_on()
    assert job.state.members == (0, 2)


def test_two_nodes_that_cannot_start_their_ranks_are_both_left_out() -> None:
    job = Job(text_of("[a, b, c, d]", "min_nodes: 2")).to_running()
    job.restart()
    reports = [messages.WorkerUnstarted(node, 0, "scratch", errno.ENOSPC, "no space") for node in (2, 3)]
    job.obey(job.feed(*reports))
    job.go_on()
    assert (job.state.phase, job.state.members) == (Phase.RUNNING, (0, 1))


@pytest.mark.parametrize("restarts", ["{max: 1}", "{max: 3, never: [node_lost]}", "{max: 3, on: [oom]}"])
def test_a_node_that_comes_and_goes_ends_no_job_and_restarts_it_three_times_an_hour(restarts: str) -> None:
    job = Job(text_of("[a, b]", "min_nodes: 1", "elastic: {grow: now}", restarts=f"restarts: {restarts}"))
    job.obey(job.feed(up(0), unreachable(1)))
    job.go_on()
    for number in (1, 2, 3):
        job.silent.add(0)  # so that the new node is lost while the others are stopping
        job.come_back(1)
        assert job.state.phase is Phase.RESTARTING
        job.silent.discard(0)
        job.lose(1, clean=True)
        job.obey(job.feed(messages.Swept(0, job.state.attempt, 0)))
        while job.state.phase is Phase.RESTARTING:
            job.obey(job.feed(unreachable(1)))
            job.obey(job.tick())
        assert (job.state.phase, job.state.members, job.state.attempt) == (Phase.RUNNING, (0,), number)
    assert texts(job.come_back(1), "info") == ["b is back; it takes part from the next restart"]
    job.lose(1, clean=True)
    job.now += 3600.0
    assert texts(job.come_back(1), "info")[0] == "b is back; restarting to include it"


def test_grow_now_does_not_restart_ranks_that_are_finishing() -> None:
    job = without_b("elastic: {grow: now}")
    job.feed(exited(0, 0, 0, job.now))
    assert texts(job.come_back(1)) == ["b is back; it takes part from the next restart"]
    assert (job.state.phase, job.state.members) == (Phase.RUNNING, (0, 2))


def test_no_node_joins_after_a_termination_warning() -> None:
    job = without_b("elastic: {grow: now}", "on_warning: USR1")
    job.feed(messages.WarningReceived(0, signal.SIGUSR1))
    assert texts(job.come_back(1)) == []
    assert (job.state.phase, job.state.members) == (Phase.RUNNING, (0, 2))


def test_a_complete_job_does_not_grow() -> None:
    job = Job(text_of("[a, b]", "spares: [c]", "elastic: {grow: now}"))
    job.silent.add(2)
    assert job.to_running().feed(up(2)) == []
    assert wanted(job.feed(lost(2))) == []
    assert wanted(job.come_back(2)) == [Connect(2), Reap(2)]
    assert job.state.restarts == ()


def test_waits_for_too_few_nodes_but_not_for_ever() -> None:
    job = Job().to_running()
    job.lose(1)
    assert job.stay_without(1) == REJOIN_S
    left = "only 1 of 2 required nodes available after waiting 5 min (timeouts.rejoin)"
    assert texts(job.actions, "error") == [f"b was lost: Connection reset by peer; {left}"]
    assert (job.state.phase, job.blamed) == (Phase.DONE, (Exit.NODE_LOST, None, 1))


def test_names_the_node_that_was_lost_during_a_restart_if_that_ends_the_job() -> None:
    job = Job().to_running()
    job.silent.add(1)
    job.feed(exited(0, 1, 7, job.now), lost(1), messages.Swept(0, 0, 0))
    job.stay_without(1)
    left = "only 1 of 2 required nodes available after waiting 5 min (timeouts.rejoin)"
    why = f"b was lost and did not return; {left}; reason for the restart: rank 1 (a) failed: exit status 7"
    assert texts(job.actions, "error") == [why]
    assert (job.state.phase, job.blamed) == (Phase.DONE, (Exit.NODE_LOST, None, 1))


def test_retries_a_lost_node_ever_more_slowly() -> None:
    job = without_b()
    times = []
    for _ in range(12):
        job.feed(unreachable(1))
        if Connect(1) in job.tick():
            times.append(job.now)
    gaps = [later - sooner for sooner, later in itertools.pairwise(times)]
    assert max(gaps) <= 30.0 * 1.25 and min(gaps[-3:]) >= 30.0 * 0.75


# The start


@pytest.mark.parametrize("kind", [Kind.UNREACHABLE, Kind.HOST_KEY])
def test_starts_without_nodes_that_it_does_not_need_and_retries_none_with_wrong_settings(kind: Kind) -> None:
    job = Job(text_of("[a, b]", "min_nodes: 1"))
    job.feed(up(0))
    actions = job.obey(job.feed(unreachable(1, kind)))
    assert texts(actions)[-1] == "starting on 1 node, without b"
    assert wanted(actions) == [HoldPort(0, None), StartWorkers(0)]
    if kind is Kind.UNREACHABLE:
        assert texts(job.come_back(1)) == ["b joined; it takes part from the next restart"]
    else:
        assert isinstance(job.state.nodes[1], Unusable)
        assert job.wait(100.0) == []


def test_starts_with_a_spare_in_place_of_a_node_or_not_at_all_and_waits_for_no_other() -> None:
    job, few, slow = with_spares(), with_spares(), with_spares()
    for each in (job, few):
        each.feed(up(0), unreachable(1))
        assert each.state.phase is Phase.CONNECTING  # the spare may still come
    assert texts(job.obey(job.feed(up(2)))) == ["starting on 2 nodes, without b"]
    assert job.state.members == (0, 2)
    words = "unreachable: 2 of 3 nodes can't be used (b, c); nothing was started"
    assert texts(few.obey(few.feed(unreachable(2))), "error")[-1] == words
    assert few.state.phase is Phase.DONE
    slow.silent.add(2)
    assert slow.to_running().state.members == (0, 1)


# The end of a job amid a restart


def test_a_signal_during_the_backoff_or_while_waiting_for_a_node_ends_the_job() -> None:
    job, waiting = Job().to_running(), Job().to_running()
    job.fail()
    job.fail()
    assert job.state.phase is Phase.RESTARTING
    assert not any(map(may_be_occupied, job.state.nodes))
    waiting.lose(1)
    for each, words in ((job, ["closed", "closed"]), (waiting, ["closed", "lost"])):
        assert each.obey(each.feed(messages.Interrupted(signal.SIGTERM)))[-1] == Finish()
        assert [phase_word(node) for node in each.state.nodes] == words
    assert Drop(1) in waiting.actions


def test_a_job_that_ends_before_its_next_attempt_is_clean() -> None:
    job = with_spares().to_running()
    job.fail()
    job.silent.add(0)
    job.fail()
    job.silent.clear()
    actions = job.obey(job.feed(messages.Interrupted(signal.SIGINT)))
    assert actions[-1] == Finish()
    assert all(text.startswith("received SIGINT") for text in texts(actions, "warning"))
    assert [phase_word(node) for node in job.state.nodes] == ["closed"] * 3


def test_nodes_outside_the_last_attempt_end_without_a_warning() -> None:
    job = with_spares().to_running()
    job.fail()
    ended = job.obey(job.feed(*(exited(node, rank, 0, job.now) for node in (0, 1) for rank in (0, 1))))
    assert texts(ended, "warning") == []
    assert [phase_word(node) for node in job.state.nodes] == ["closed"] * 3
    assert job.state.outcome == Exit.OK


def test_an_earlier_exit_reported_while_restarting_is_the_root_cause() -> None:
    job = Job().to_running()
    job.now += 5.0
    job.silent = {0, 1}
    job.fail()
    job.feed(exited(1, 0, -15, job.now + 1.0))
    assert job.blamed == (7, 1, 0)
    job.feed(exited(1, 1, -11, job.now - 1.0))
    assert job.blamed == (139, 3, 1)
    assert [restart.cause for restart in job.state.restarts] == [job.state.cause]
    assert [worker.stopped for worker in job.state.workers] == [False, False, True, False]


# The rendezvous port


def test_moves_a_usurped_port_three_times_without_counting_restarts() -> None:
    job = Job(text_of(restarts="restarts: {max: 0}")).to_running()
    usurped = messages.PortUsurped(0, ({"uid": 0, "pid": 42, "command": "redis"},))
    for moves in (1, 2, 3):
        job.obey(job.feed(usurped))
        assert (job.state.phase, job.state.restart_count) == (Phase.RUNNING, 0)
        assert (job.state.port, job.state.attempt) == (29400 + moves, moves)
    job.obey(job.feed(usurped))
    why = "not restarting: this already happened on 3 other ports"
    assert texts(job.actions, "error") == [f"port 29403 on a was taken by redis (pid 42); {why}"]
    assert (job.state.phase, job.blamed) == (Phase.DONE, (Exit.PORT_TAKEN, None, 0))


@pytest.mark.parametrize("torchrun", [False, True])
def test_does_not_move_a_port_that_the_job_chose_and_believes_only_the_node_of_rank_0(torchrun: bool) -> None:
    job = Job(text_of("[a, b, c]", "master_port: 29555")).to_running()
    if torchrun:
        job.state = job.state._replace(spec=job.state.spec._replace(places={}))
    assert HoldPort(0, 29555) in job.actions
    assert job.feed(messages.PortUsurped(1, ()), messages.PortUsurped(2, ())) == []
    job.obey(job.feed(messages.PortUsurped(0, ())))
    own = "leave out the port (master_port) to get a free one"
    advice = "use another port on all nodes" if torchrun else own
    assert texts(job.actions, "error")[0].endswith(f"; {advice}")
    assert job.state.phase is Phase.DONE
    assert job.blamed == (Exit.PORT_TAKEN, None, 0)
