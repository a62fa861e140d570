"""Attempts as histories: restarts after failures, on which nodes, and when they are safe."""

import errno
import itertools
import signal

import pytest

from distlaunch.agent.messages import (
    AgentLeaving,
    Interrupted,
    PortHeld,
    PortRefused,
    PortUsurped,
    Reaped,
    RouteFailed,
    Swept,
    WorkerExited,
    WorkerUnstarted,
)
from distlaunch.errors import Exit
from distlaunch.job.spec import Allocation
from distlaunch.supervisor.actions import Connect, Drop, Finish, GiveUp, StartWorkers
from distlaunch.supervisor.allocation_end import is_to_go_on
from distlaunch.supervisor.events import Event, LinkEnded
from distlaunch.supervisor.nodes import (
    Lost,
    Unusable,
    Up,
    may_be_occupied,
    phase_word,
    unfit_words,
)
from distlaunch.supervisor.state import Phase, Timer, Why
from distlaunch.transports.failure import Kind
from tests.unit.orders import Close, FindRoute, HoldPort, Reap, StopWorkers
from tests.unit.samples import PEER_GONE
from tests.unit.test_supervisor import (
    JOB,
    MASTER,
    OWN,
    STOP_MARGIN_S,
    STOP_S,
    Actions,
    History,
    exited,
    lost,
    texts,
    up,
    wanted,
)

FENCE_S, REJOIN_S, HEALTHY_S, BACKOFF_S = 45.0, 300.0, 300.0, 4.0
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

    def restart(self) -> None:
        """A rank fails, and time passes until the next attempt runs, or the job is over."""
        self.fail()
        self.go_on()

    def go_on_without(self, node: int, clean: bool = False) -> None:
        """A node is lost, and time passes until the next attempt runs, or the job is over."""
        self.lose(node, clean)
        self.go_on()

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
            if Connect(node) in (actions := self.tick()):
                return self.obey(actions)
            self.obey(actions)
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
    assert job.feed(Swept(0, 0, 0), exited(1, 1, -15, job.now)) + job.wait() == []
    assert job.feed(Swept(1, 0, 0)) == [HoldPort(0, None)]
    assert job.feed(PortHeld(0, 29444)) == [StartWorkers(0), StartWorkers(1)]
    assert (job.state.attempt, job.state.restart_count, job.state.port) == (1, 1, 29444)
    assert not Actions(job.actions[before:]).of(Connect, Close, Drop, GiveUp)
    assert job.state.cause is None


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_crash_loop_has_exactly_one_attempt_more_than_restarts(most: int) -> None:
    job = Job(text_of(restarts=f"restarts: {{max: {most}}}")).to_running()
    attempts = 0
    while job.state.phase is Phase.RUNNING:
        attempts += 1
        job.restart()
    assert attempts == most + 1 == job.actions.count_of(StartWorkers(1))
    assert job.blamed == (7, 1, 0)
    assert len(job.actions.of(Finish)) == 1
    times = {1: "once", 2: "twice"}.get(most, f"{most} times")
    used_up = f"; not restarting: already restarted {times} in the last hour (restarts.max)"
    assert texts(job.actions, "error") == [f"rank 1 (a) failed: exit status 7{used_up if most else ''}"]


def test_restarts_before_the_window_do_not_count() -> None:
    job = Job(text_of(restarts="restarts: {max: 2, window: 100s, backoff: 0s}")).to_running()
    for wait_s, restarts in [(0.0, True), (60.0, True), (40.0, True), (59.9, False)]:
        job.now += wait_s
        job.fail()
        assert (job.state.phase is Phase.RUNNING) == restarts
    (words,) = texts(job.actions, "error")
    assert words.endswith("; not restarting: already restarted twice in the last 100 s (restarts.max)")


def wait_for_the_next(job: Job) -> float:
    """Seconds from a failure to the next attempt."""
    failed_at = job.now
    job.restart()
    return job.now - failed_at


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.99])
def test_the_first_restart_is_at_once_and_each_further_one_waits_twice_as_long(chance: float) -> None:
    job = Job(text_of(restarts="restarts: {max: 20, backoff: 4s}"), chance).to_running()
    first, *others = [wait_for_the_next(job) for _ in range(12)]
    assert first == 0.0
    for attempt, wait_s in enumerate(others):
        assert 0.75 <= wait_s / min(BACKOFF_S * 2**attempt, 300.0) <= 1.25


def test_after_a_healthy_attempt_the_backoff_begins_again() -> None:
    job = Job(text_of(restarts="restarts: {max: 20, backoff: 4s}")).to_running()
    waits = [wait_for_the_next(job) for _ in range(3)]
    job.now += HEALTHY_S + 0.1
    for again, before in zip([wait_for_the_next(job) for _ in range(3)], waits, strict=True):
        assert again == pytest.approx(before)
    job.now += HEALTHY_S - 20.0
    assert wait_for_the_next(job) > 10.0


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
    return Actions(
        job.obey(job.feed(WorkerExited(rank // 2, rank % 2, 1, job.now, words=words))) + job.go_on()
    )


REPEATED = "raised the same ValueError at t.py:7 as in the previous attempt"


def test_the_same_exception_twice_in_a_row_ends_the_job_for_good() -> None:
    job = Job(text_of(restarts="restarts: {max: 9, requeue: 5}")).to_running()
    raises(job, 0, OWN.replace("bad", "bad row 7"))
    assert job.state.phase is Phase.RUNNING
    said = texts(raises(job, 3, OWN.replace("bad", "bad row 12")), "error")
    how = "rank 3 (b) failed: exit status 1"
    assert said == [
        f"{how}; not restarting: rank 3 {REPEATED} (to restart anyway, set restarts.repeat: true)"
    ]
    assert (job.state.phase, job.blamed) == (Phase.DONE, (1, 3, 1))
    assert not is_to_go_on(job.state)


def test_keeps_the_reason_why_it_does_not_restart_if_another_rank_failed_earlier() -> None:
    job = Job(text_of(restarts="restarts: {max: 9, requeue: 5}")).to_running()
    raises(job)
    job.now += 1.0
    job.feed(WorkerExited(1, 1, 1, job.now, words=OWN), WorkerExited(0, 0, 1, job.now - 0.1, words=OWN))
    assert job.state.cause
    assert job.state.cause.text.startswith("rank 0 (a) failed first: exit status 1; not restarting: rank 3 ")
    assert not is_to_go_on(job.state)


@pytest.mark.parametrize(
    ("other", "lived_s", "restarts"),
    [
        (OWN.replace("line 7", "line 8"), 0.0, "max: 9"),
        (OWN.replace("bad", "worse"), 0.0, "max: 9"),
        (OWN, HEALTHY_S, "max: 9"),
        (OWN, 0.0, "max: 9, repeat: true"),
        ("", 0.0, "max: 9"),
    ],
)
def test_restarts_after_another_exception_progress_or_an_exit_without_one(
    other: str, lived_s: float, restarts: str
) -> None:
    job = Job(text_of(restarts=f"restarts: {{{restarts}}}")).to_running()
    for words in (OWN, other, OWN, other):
        job.now += lived_s
        raises(job, words=words)
    assert job.state.phase is Phase.RUNNING


@pytest.mark.parametrize("restarts", ["max: 3", "max: 3, never: [exception]"])
def test_a_root_cause_reported_late_that_excludes_a_restart_ends_the_job(restarts: str) -> None:
    job = Job(text_of(restarts=f"restarts: {{{restarts}}}")).to_running()
    for _ in range(2):
        job.silent = {1}
        job.feed(WorkerExited(0, 0, 1, job.now, words=PEER_GONE))
        job.obey(job.tick())
        assert job.state.phase is Phase.RESTARTING
        job.silent = set()
        if job.obey(job.feed(WorkerExited(1, 0, 1, job.now, words=OWN))).of(Finish):
            break
        job.obey(Actions([StopWorkers(1, STOP_S)]))
        job.go_on()
    assert job.state.phase is Phase.DONE
    assert "; not restarting: " in texts(job.actions, "error")[-1]
    assert len(job.state.restarts) == (1 if "never" in restarts else 2)


FAILED_WITH_3, KILLED = WorkerExited(1, 0, 3, 0.0), WorkerExited(1, 0, -9, 0.0)
RAISED, VICTIM = WorkerExited(1, 0, 1, 0.0, words=OWN), WorkerExited(1, 0, 1, 0.0, words=PEER_GONE)


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
    assert [text.partition("; not restarting: ")[2] for text in texts(job.actions, "error")] == [why] * bool(
        why
    )
    assert not (why and is_to_go_on(job.state))


# A node that keeps failing


def keeps_failing(*lines: str, restarts: str = "restarts: {max: 9}", lived_s: float = 0.0) -> Job:
    """A job after three failures of b in a row."""
    job = Job(text_of("[a, b]", *lines, restarts=restarts)).to_running()
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
    [
        ("", "restarts: {max: 9}", 0.0),
        ("spares: [c]", "restarts: {max: 9}", 601.0),
        ("spares: [c]", "restarts: {max: 9, repeat: true}", 0.0),
    ],
)
def test_keeps_a_node_that_is_needed_or_ran_long(lines: str, restarts: str, lived_s: float) -> None:
    job = keeps_failing(lines, restarts=restarts, lived_s=lived_s)
    assert (job.state.phase, job.state.members) == (Phase.RUNNING, (0, 1))
    assert LEFT_OUT not in texts(job.actions)


# Failures without a restart

NEVER = [
    pytest.param("preparing", PortRefused(0, "taken", ()), Exit.PORT_TAKEN, id="no port"),
    pytest.param("running", WorkerUnstarted(1, 0, "exec", errno.ENOENT, "x"), 127, id="no program"),
    pytest.param("running", WorkerUnstarted(1, 0, "exec", errno.EACCES, "x"), 126, id="not executable"),
]


@pytest.mark.parametrize("attempt", [0, 1])
@pytest.mark.parametrize(("phase", "event", "status"), NEVER)
def test_a_failure_beyond_repair_ends_the_job(attempt: int, phase: str, event: Event, status: int) -> None:
    job = Job()
    if attempt:
        job.to_running()
    if phase == "preparing":
        job.silent = {0}  # it holds no port
    job.obey(job.feed(exited(1, 0, 7, job.now), Swept(0, 0, 0)) if attempt else job.actions)
    job.feed(up(0))
    assert (job.state.phase.value, job.state.attempt) == (phase, attempt)
    job.silent = set()
    job.obey(job.feed(event))
    assert job.state.phase is Phase.DONE
    assert job.state.outcome == status
    assert len(job.state.restarts) == attempt


def test_a_node_without_a_route_at_the_start_ends_the_job() -> None:
    job = Job()
    job.silent = {0}
    job.obey(job.actions)
    job.silent = {1}
    job.obey(job.feed(up(0), RouteFailed(1, MASTER, "no route")))
    assert job.blamed == (Exit.USAGE, None, 1)
    assert job.state.restarts == ()


def test_ignores_a_lost_route_that_was_not_requested() -> None:
    job = Job().to_running()
    job.silent = {0}  # it holds no port
    job.obey(job.feed(exited(1, 0, 7, job.now), Swept(0, 0, 0)))
    assert job.feed(RouteFailed(1, MASTER, "no route")) == []


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


@pytest.mark.parametrize("early", [False, True])
def test_skips_a_spare_that_does_not_fit_with_a_warning_at_the_start(early: bool) -> None:
    """It may connect before the job's own nodes."""
    job = Job(WITH_GPUS)
    job.gpus = {0: 2, 1: 2, 3: 2}
    if early:
        job.obey(Actions([Connect(2), Connect(3)]))
        job.obey(Actions([Connect(0), Connect(1)]))
    else:
        job.to_running()
    assert texts(job.actions, "warning") == [f"c {NO_GPU}"]
    assert Drop(2) in job.actions
    job.lose(1, clean=True)
    job.feed(unreachable(1))
    job.go_on()
    assert job.state.members == (0, 3)
    assert texts(job.actions, "warning").count(f"c {NO_GPU}") == 1  # though it was looked at again


def test_skips_a_spare_that_does_not_fit_a_named_backend_at_the_first_start() -> None:
    job = Job(WITH_GPUS.replace("auto", "nccl"))
    job.gpus = {0: 2, 3: 2}
    job.obey(Actions([Connect(2), Connect(3), Connect(0)]))
    job.obey(job.feed(unreachable(1, Kind.HOST_KEY)))
    assert (job.state.members, job.state.phase) == ((0, 3), Phase.RUNNING)
    assert f"c {NO_GPU}" in texts(job.actions, "warning")


def test_a_node_that_returns_before_its_gpus_rejoins_with_them() -> None:
    job = Job(WITH_GPUS.replace("spares: [c, d]", "min_nodes: 1\nelastic: {grow: now}"))
    job.gpus = {0: 2, 1: 2}
    job.to_running().lose(1, clean=True)
    job.go_on()
    job.gpus.pop(1)
    before = len(job.actions)
    job.come_back(1)
    for _ in range(9):
        job.obey(job.tick())
    assert texts(Actions(job.actions[before:]), "warning") == [f"b {NO_GPU}"]
    job.restart()
    assert job.state.plan
    assert (job.state.members, job.state.plan.backend) == ((0,), "nccl")
    job.gpus[1] = 2
    while len(job.state.members) == 1:
        job.obey(job.tick())
    assert job.state.members == (0, 1)
    assert unfit_words(job.state.nodes[1]) == ""


def test_waits_for_the_gpus_of_a_node_that_is_needed() -> None:
    job = Job(WITH_GPUS.replace("spares: [c, d]", "on_stall: stop"))
    job.gpus = {0: 2, 1: 2}
    job.to_running()
    job.gpus.pop(1)
    job.lose(1, clean=True, away=False)
    for _ in range(9):
        job.obey(job.tick())
    assert job.state.phase is Phase.RESTARTING
    job.gpus[1] = 2
    job.go_on()
    assert job.state.members == (0, 1)


def test_does_not_judge_nodes_while_the_job_ends() -> None:
    job = Job(WITH_GPUS).to_running()
    job.feed(Interrupted(signal.SIGTERM))
    before = len(job.actions)
    job.feed(Reaped(1, 0), up(2))
    assert texts(Actions(job.actions[before:])) == []


def test_skips_a_spare_without_a_route_until_it_returns() -> None:
    job = with_spares("[c, d]").to_running()
    job.silent.add(2)  # it does not find its way
    job.lose(1, clean=True)
    assert (job.state.members, job.state.phase) == ((0, 2), Phase.PREPARING)
    said = texts(job.obey(job.feed(RouteFailed(2, MASTER, "no route"))), "warning")
    assert said[0].startswith(f"c can't reach MASTER_ADDR {MASTER}: no route; set nodes[0].address")
    job.go_on()
    assert job.state.members == (0, 3)
    job.lose(2, clean=True, away=False)
    job.lose(3, clean=True)
    job.come_back(2)
    job.go_on()
    assert job.state.members == (0, 2)


def test_the_job_ends_without_a_node_that_fits() -> None:
    job = Job(text_of("[{host: a, gpus: 2}]", "spares: [{host: b, gpus: 0}]").replace("gloo", "nccl"))
    job.to_running().lose(0, clean=True)
    while job.state.phase is Phase.RESTARTING:
        job.obey(job.tick())
    left = "only 0 of 1 required node available after waiting 5 min (timeouts.rejoin)"
    assert texts(job.actions, "error") == [f"a was lost: Connection reset by peer; {left}; b {NO_GPU}"]
    assert job.state.outcome == Exit.NODE_LOST


# Nodes that are lost


def test_a_node_whose_agent_exited_cleanly_needs_no_fence() -> None:
    job = Job(text_of("[a, b, c]", "min_nodes: 2")).to_running()
    lost_at = job.now
    job.lose(1, clean=True)
    assert job.state.due_at(Timer.FENCE, 1) is None
    assert StartWorkers(2) not in job.obey(job.tick())  # it is tried once before the others go on
    assert wanted(job.obey(job.feed(unreachable(1))))[-1] == StartWorkers(2)
    assert job.now < lost_at + 1.0
    assert job.state.members == (0, 2)


@pytest.mark.parametrize(("times", "fence_s"), [("stop: 10s", FENCE_S), ("stop: 2s, lease: 7s", 14.0)])
def test_fences_other_lost_nodes_for_lease_grace_and_five_seconds(times: str, fence_s: float) -> None:
    job = Job(text_of("[a, b, c]", "min_nodes: 2").replace("stop: 10s", times)).to_running()
    job.lose(1)
    assert job.state.due_at(Timer.FENCE, 1) == job.now + fence_s
    assert job.stay_without(1) == fence_s
    assert job.state.members == (0, 2)


def test_a_node_that_returns_and_is_reaped_needs_no_fence_any_more() -> None:
    job = Job().to_running()
    lost_at = job.now
    job.silent.add(1)
    assert texts(job.feed(lost(1))) == [
        "b was lost: Connection reset by peer; restart 1 of 3",
        "b: waiting up to 45 s for its ranks to exit, or for it to reconnect",
    ]
    job.feed(Swept(0, 0, 0))
    assert job.tick() == [Connect(1)]
    assert job.feed(up(1)) == [Reap(1)]
    assert job.wait(1.0) == []
    assert wanted(job.feed(Reaped(1, 2)))[0] == HoldPort(0, None)
    assert job.now < lost_at + 2.0
    assert job.state.due_at(Timer.FENCE, 1) is None


def test_drops_and_fences_a_node_that_does_not_confirm_in_time() -> None:
    job = elastic()
    failed_at = job.now
    job.silent.add(1)
    job.fail()
    (waiting,) = texts(job.tick(), "warning")
    assert waiting == "waiting for rank 2 (b, pid 100), rank 3 (b, pid 101) to exit; SIGKILL in 7 s"
    actions = job.tick()
    assert job.now == failed_at + STOP_S + STOP_MARGIN_S
    assert texts(actions, "warning") == ["b did not confirm its cleanup; treating the node as lost"]
    assert wanted(actions) == [Drop(1)]
    assert job.stay_without(1) == FENCE_S
    assert job.state.members == (0,)


def test_does_not_use_a_node_whose_agent_was_stopped_until_another_connects() -> None:
    job = elastic()
    said = job.obey(job.feed(AgentLeaving(1, signal.SIGTERM)))
    assert texts(said)[0] == ("b was lost: its agent was stopped by signal 15 (SIGTERM); restart 1 of 3")
    assert (job.state.phase, job.state.members) == (Phase.RUNNING, (0,))
    assert texts(job.feed(lost(1, clean=True))) == []
    job.come_back(1)
    job.restart()
    assert job.state.members == (0, 1)


def test_waits_for_a_node_whose_agent_leaves_before_its_link_ends() -> None:
    job = Job(text_of("[a, b]")).to_running()
    job.silent = {0, 1}
    said = job.obey(job.feed(AgentLeaving(1, signal.SIGTERM)))
    assert wanted(said) == [StopWorkers(0, STOP_S), StopWorkers(1, STOP_S)]
    assert job.feed(Swept(0, 0, 0), Swept(1, 0, 0)) + job.wait() == []
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
    assert wanted(actions)[:3] == [StopWorkers(0, STOP_S), HoldPort(0, None), FindRoute(2, MASTER)]
    assert wanted(actions)[3:] == [StartWorkers(0), StartWorkers(2)]
    assert texts(actions)[1:] == ["continuing with 2 of 2 nodes: a, c"]
    assert job.state.plan is not None
    assert [part.first_rank for part in job.state.plan.nodes] == [0, 2]


def test_waits_for_a_late_spare_before_continuing_with_fewer_nodes() -> None:
    job = Job(text_of("[a, b]", "spares: [c]", "min_nodes: 1"))
    job.silent.add(2)
    job.to_running().lose(1, clean=True)
    job.tick()
    assert not job.feed(unreachable(1)).of(HoldPort)
    job.obey(job.feed(up(2)))
    assert job.state.members == (0, 2)


MEMBERS = [
    ("[a, b, c, d]", "min_nodes: 2", [1], (0, 2, 3)),
    ("[a, b, c, d]", "min_nodes: 2", [1, 3], (0, 2)),
    ("[a, b, c, d]", "min_nodes: 2", [0], (1, 2, 3)),
    ("[a, b, c, d]", "min_nodes: 1", [0, 1, 2], (3,)),
    ("[a, b, c]", "spares: [d, e]", [1], (0, 2, 3)),
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


def test_rank_0_moves_if_its_node_is_lost_and_routes_are_found_again() -> None:
    job = Job(text_of("[a, b, c]", "min_nodes: 2")).to_running()
    job.lose(0, clean=True)
    job.tick()
    actions = job.obey(job.feed(unreachable(0)))
    assert wanted(actions)[:3] == [HoldPort(1, None), FindRoute(2, "b"), FindRoute(1, "b")]
    assert wanted(actions)[3:] == [StartWorkers(1), StartWorkers(2)]
    assert job.state.plan is not None and job.state.plan.master_addr == "b"


@pytest.mark.parametrize("nodes", ["[a, b]", "[a, b, c]"])
@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_returns_in_time_has_its_place_again_with_its_route(nodes: str, node: int) -> None:
    job = Job(text_of(nodes)).to_running()
    job.lose(node)
    job.come_back(node)
    assert job.state.phase is Phase.RUNNING
    assert job.state.members == tuple(range(len(job.state.nodes)))
    assert job.interfaces == [f"eth{i}" for i in job.state.members]
    asked = [each for each in job.actions if isinstance(each, FindRoute) and each.node == node]
    assert len(asked) == 2
    assert len(job.state.restarts) == 1


def test_reports_once_which_node_it_waits_for_and_that_it_is_back() -> None:
    job = Job().to_running()
    job.lose(1)
    while not (told := [text for text in texts(job.actions) if "timeouts.rejoin" in text]):
        job.obey(job.tick())
    assert told[0].startswith("only 1 of 2 required nodes available; waiting up to ")
    assert told[0].endswith(" s for b to return (timeouts.rejoin)")
    job.come_back(1)
    assert sum("timeouts.rejoin" in text for text in texts(job.actions)) == 1
    assert "b is back" in texts(job.actions)
    assert job.state.phase is Phase.RUNNING


def test_finds_routes_again_after_an_attempt_on_one_node() -> None:
    job = elastic(f"master_addr: {MASTER}")
    job.go_on_without(1)
    assert job.interfaces == [None]
    job.come_back(1)
    job.restart()
    assert job.state.members == (0, 1)
    assert job.interfaces == ["eth0", "eth1"]


def without_b(*more: str, restarts: str = RESTARTS) -> Job:
    """A job on a, b and c that goes on with a and c."""
    job = Job(text_of("[a, b, c]", "min_nodes: 2", *more, restarts=restarts)).to_running()
    job.go_on_without(1)
    assert job.state.members == (0, 2)
    return job


def test_a_node_that_returned_rejoins_at_the_next_restart() -> None:
    job = without_b()
    actions = job.come_back(1)
    assert wanted(actions) == [Connect(1), Reap(1)]
    assert texts(actions) == ["b is back; it rejoins at the next restart"]
    job.restart()
    assert job.state.members == (0, 2, 1)
    assert job.state.restart_count == 2


def test_grow_now_restarts_at_once_without_counting() -> None:
    job = without_b("elastic: {grow: now}", restarts="restarts: {max: 1}")
    actions = job.come_back(1)
    assert texts(actions, "info")[0] == "b is back; restarting to include it"
    assert wanted(actions)[:4] == [Connect(1), Reap(1), StopWorkers(0, STOP_S), StopWorkers(2, STOP_S)]
    assert (job.state.phase, job.state.members) == (Phase.RUNNING, (0, 2, 1))
    assert [restart.why for restart in job.state.restarts] == [Why.FAILURE, Why.GROWTH]
    assert job.state.restart_count == 2
    job.restart()
    assert job.state.outcome == 7


def test_growth_before_the_window_leaves_all_restarts() -> None:
    job = without_b("elastic: {grow: now}", restarts="restarts: {max: 1, window: 100s}")
    job.come_back(1)
    job.now += 100.0
    job.restart()
    assert job.state.phase is Phase.RUNNING


def test_a_complete_job_does_not_grow() -> None:
    job = Job(text_of("[a, b]", "spares: [c]", "elastic: {grow: now}"))
    job.silent.add(2)
    job.to_running()
    assert job.feed(up(2)) == []
    assert wanted(job.feed(lost(2))) == []
    assert job.obey(job.tick())[-1] == Connect(2)
    job.silent.clear()
    assert job.obey(Actions([Connect(2)])) == [Connect(2), Reap(2)]
    assert job.state.restarts == ()


def test_waits_for_too_few_nodes_but_not_for_ever() -> None:
    job = Job().to_running()
    job.lose(1)
    assert job.stay_without(1) == REJOIN_S
    assert job.blamed == (Exit.NODE_LOST, None, 1)
    left = "only 1 of 2 required nodes available after waiting 5 min (timeouts.rejoin)"
    assert texts(job.actions, "error") == [f"b was lost: Connection reset by peer; {left}"]
    assert job.state.phase is Phase.DONE


def test_retries_a_lost_node_ever_more_slowly() -> None:
    job = without_b()
    times = []
    for _ in range(12):
        job.feed(unreachable(1))
        if Connect(1) in job.tick():
            times.append(job.now)
    gaps = [later - sooner for sooner, later in itertools.pairwise(times)]
    assert max(gaps) <= 30.0 * 1.25
    assert min(gaps[-3:]) >= 30.0 * 0.75


# The start


def test_starts_without_nodes_that_it_does_not_need() -> None:
    job = Job(text_of("[a, b]", "min_nodes: 1"))
    job.feed(up(0))
    actions = job.obey(job.feed(unreachable(1)))
    assert texts(actions) == ["b: unreachable", "starting on 1 node, without b"]
    assert wanted(actions) == [HoldPort(0, None), StartWorkers(0)]
    assert texts(job.come_back(1)) == ["b is back; it rejoins at the next restart"]


def test_starts_with_a_spare_in_place_of_a_node_and_waits_for_no_other() -> None:
    job = with_spares()
    job.feed(up(0), unreachable(1))
    assert job.state.phase is Phase.CONNECTING  # the spare may still come
    assert texts(job.obey(job.feed(up(2)))) == ["starting on 2 nodes, without b"]
    assert job.state.members == (0, 2)
    job = with_spares()
    job.silent.add(2)
    assert job.to_running().state.members == (0, 1)


def test_starts_without_retrying_a_node_with_wrong_settings() -> None:
    job = Job(text_of("[a, b]", "min_nodes: 1"))
    job.obey(job.feed(up(0), unreachable(1, Kind.HOST_KEY)))
    job.silent.add(1)
    assert isinstance(job.state.nodes[1], Unusable)
    assert job.obey(job.wait(100.0)) == []


def test_starts_nothing_on_too_few_nodes() -> None:
    job = with_spares()
    job.feed(up(0), unreachable(1))
    actions = job.obey(job.feed(unreachable(2)))
    assert (
        texts(actions, "error")[-1] == "unreachable: 2 of 3 nodes can't be used (b, c); nothing was started"
    )
    assert job.state.phase is Phase.DONE


# The end of a job amid a restart


def test_a_signal_during_the_backoff_ends_the_job_with_the_nodes_clean() -> None:
    job = Job().to_running()
    job.fail()
    job.fail()
    assert job.state.phase is Phase.RESTARTING
    assert not any(map(may_be_occupied, job.state.nodes))
    assert job.obey(job.feed(Interrupted(signal.SIGTERM)))[-1] == Finish()
    assert [phase_word(node) for node in job.state.nodes] == ["closed"] * 2


def test_a_signal_while_waiting_for_a_lost_node_ends_the_job() -> None:
    job = Job().to_running()
    job.lose(1)
    actions = job.obey(job.feed(Interrupted(signal.SIGINT)))
    assert Drop(1) in actions and actions[-1] == Finish()
    assert [phase_word(node) for node in job.state.nodes] == ["closed", "lost"]


def test_a_job_that_ends_before_its_next_attempt_is_clean() -> None:
    job = with_spares().to_running()
    job.fail()
    job.silent.add(0)
    job.fail()
    job.silent.clear()
    actions = job.obey(job.feed(Interrupted(signal.SIGINT)))
    assert actions[-1] == Finish()
    assert [text for text in texts(actions, "warning") if not text.startswith("received SIGINT")] == []
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
    (restart,) = job.state.restarts
    assert restart.cause == job.state.cause
    assert [worker.stopped for worker in job.state.workers] == [False, False, True, False]


# The rendezvous port


def test_moves_a_usurped_port_three_times_without_counting_restarts() -> None:
    job = Job(text_of(restarts="restarts: {max: 0}")).to_running()
    owners = ({"uid": 0, "pid": 42, "command": "redis"},)
    for moves in (1, 2, 3):
        job.obey(job.feed(PortUsurped(0, owners)))
        assert job.state.phase is Phase.RUNNING
        assert (job.state.port, job.state.attempt) == (29400 + moves, moves)
        assert job.state.restart_count == 0
    job.obey(job.feed(PortUsurped(0, owners)))
    why = "not restarting: this already happened on 3 other ports"
    assert texts(job.actions, "error") == [f"port 29403 on a was taken by redis (pid 42); {why}"]
    assert job.blamed == (Exit.PORT_TAKEN, None, 0)
    assert job.state.phase is Phase.DONE


def test_does_not_move_a_port_that_the_job_chose_and_believes_only_the_node_of_rank_0() -> None:
    job = Job(text_of("[a, b, c]", "master_port: 29555")).to_running()
    assert HoldPort(0, 29555) in job.actions
    assert job.feed(PortUsurped(1, ()), PortUsurped(2, ())) == []
    job.obey(job.feed(PortUsurped(0, ())))
    assert job.state.phase is Phase.DONE
    assert job.blamed == (Exit.PORT_TAKEN, None, 0)
