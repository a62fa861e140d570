"""Attempts as histories: what a failure restarts, when that is safe, on which nodes, and when it ends."""

import errno
import itertools
import signal
from typing import TypeVar

import pytest
from typing_extensions import Self

from distlaunch.agent.messages import (
    AgentLeaving,
    Interrupted,
    PortHeld,
    PortRefused,
    PortUsurped,
    Reaped,
    RouteFailed,
    RouteFound,
    Swept,
    WorkerStarted,
    WorkerUnstarted,
)
from distlaunch.errors import Exit
from distlaunch.supervisor.actions import (
    Action,
    AskScheduler,
    Close,
    Connect,
    Drop,
    FindRoute,
    Finish,
    GiveUp,
    HoldPort,
    Reap,
    ShowMessage,
    StartWorkers,
    StopWorkers,
)
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
from distlaunch.transports.failure import Kind, LinkFailure
from tests.unit.test_supervisor import (
    JOB,
    MASTER,
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

LEASE_S, FENCE_S, REJOIN_S, HEALTHY_S, BACKOFF_S = 30.0, 45.0, 300.0, 300.0, 4.0
RESTARTS = "restarts: {max: 3, backoff: 4s}"


def text_of(nodes: str = "[a, b]", *more: str, restarts: str = RESTARTS) -> str:
    """A job file: these nodes, and these lines."""
    return "\n".join([f"{JOB}nodes: {nodes}", restarts, *more])


J = TypeVar("J", bound="Job")


_ALOOF = ShowMessage | Finish | AskScheduler
"""What no node has to do with."""


class Job(History):
    """A job whose nodes do what they are asked to, but for those in `silent`."""

    def __init__(self, text: str = "", chance: float = 0.0) -> None:
        super().__init__(text or text_of())
        self.state = self.state._replace(chance=chance)
        self.silent: set[int] = set()
        self.gpus: dict[int, int] = {}
        self._began = dict.fromkeys(range(len(self.state.nodes)), 0)

    def started(self) -> Self:
        """The first attempt runs."""
        self.obey(self.actions)
        assert self.state.phase is Phase.RUNNING
        return self

    def obey(self, actions: Actions) -> Actions:
        """All that the supervisor wants until the nodes have answered to everything."""
        done = Actions(actions)
        for action in done:  # it grows
            if isinstance(action, GiveUp) or not (isinstance(action, _ALOOF) or action.node in self.silent):
                done += self.feed(*self._answers(action, action.node))
        return done

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

    def lose(self, node: int, clean: bool = False, away: bool = True) -> Actions:
        """A node's agent is gone; while it is `away`, it can't be reached again."""
        if away:
            self.silent.add(node)
        return self.obey(self.feed(gone(node, clean)))

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

    def _answers(self, action: Action, node: int) -> list[Event]:
        answer: list[Event] = []
        match action:
            case Connect():
                self._began[node] = 0
                answer = [up(node, self.gpus.get(node, 0))]
            case HoldPort():
                answer = [PortHeld(node, 29400 + self.state.attempt)]
            case FindRoute():
                answer = [RouteFound(node, action.address, action.address, f"eth{node}")]
            case StartWorkers():
                self._began[node] = self.state.attempt
                answer = [WorkerStarted(node, rank, 100 + rank) for rank in (0, 1)]
            case StopWorkers():
                answer = [Swept(node, self._began[node], 0)]
            case Reap():
                answer = [Reaped(node, 1)]
            case Close():
                answer = [Swept(node, self._began[node], 0), gone(node, clean=True)]
            case GiveUp():
                answer = [lost(node, action.why, Kind.SILENT)]
        return answer


def gone(node: int, clean: bool = False) -> LinkEnded:
    """The end of an agent that had been up."""
    return LinkEnded(node, LinkFailure(Kind.LOST, "Connection reset by peer", clean))


def unreachable(node: int, kind: Kind = Kind.UNREACHABLE) -> LinkEnded:
    return lost(node, "No route to host", kind)


# An attempt that fails, and the next


def test_a_failing_rank_restarts_the_job_in_the_same_agents_once_all_have_confirmed() -> None:
    job = Job().started()
    before = len(job.actions)
    said = job.feed(exited(1, 0, 7, job.now))
    assert texts(said, "warning") == ["rank 2 (b) failed first: exit status 7; restart 1 of 3"]
    assert wanted(said) == [StopWorkers(0, STOP_S), StopWorkers(1, STOP_S)]
    assert job.feed(Swept(0, 0, 0), exited(1, 1, -15, job.now)) + job.wait() == []
    assert job.feed(Swept(1, 0, 0)) == [HoldPort(0, None)]
    assert job.feed(PortHeld(0, 29444)) == [StartWorkers(0), StartWorkers(1)]
    assert (job.state.attempt, job.state.restart_count, job.state.port) == (1, 1, 29444)
    assert not Actions(job.actions[before:]).of(Connect, Close, Drop, GiveUp)
    assert job.state.cause is None


def test_a_confirmation_of_an_earlier_attempt_is_none() -> None:
    job = Job().started()
    job.fail()
    job.silent = {0, 1}
    job.fail()
    assert job.feed(Swept(0, 0, 0), Swept(1, 0, 0)) == []
    assert all(map(may_be_occupied, job.state.nodes))


def test_one_failure_is_one_restart_whatever_follows_from_it() -> None:
    job = Job().started()
    job.silent = {0, 1}
    job.fail()
    assert wanted(job.feed(exited(1, 0, 1, job.now), AgentLeaving(1, signal.SIGTERM))) == []
    assert len(job.state.restarts) == 1


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_crash_loop_has_exactly_one_attempt_more_than_restarts(most: int) -> None:
    job = Job(text_of(restarts=f"restarts: {{max: {most}}}")).started()
    attempts = 0
    while job.state.phase is Phase.RUNNING:
        attempts += 1
        job.fail()
        job.go_on()
    assert attempts == most + 1 == job.actions.count_of(StartWorkers(1))
    assert job.blamed == (7, 1, 0)
    assert len(job.actions.of(Finish)) == 1
    times = {1: "once", 2: "twice"}.get(most, f"{most} times")
    used_up = f"; not restarting: already restarted {times} in the last hour"
    assert texts(job.actions, "error") == [f"rank 1 (a) failed first: exit status 7{used_up if most else ''}"]


def test_the_window_forgets_old_failures() -> None:
    job = Job(text_of(restarts="restarts: {max: 2, window: 100s, backoff: 0s}")).started()
    for wait_s, restarts in [(0.0, True), (60.0, True), (40.0, True), (59.9, False)]:
        job.now += wait_s
        job.fail()
        assert (job.state.phase is Phase.RUNNING) == restarts
    assert texts(job.actions, "error")[0].endswith(
        "; not restarting: already restarted twice in the last 100 s"
    )


def wait_for_the_next(job: Job) -> float:
    """Seconds from a failure to the next attempt."""
    failed_at = job.now
    job.fail()
    job.go_on()
    return job.now - failed_at


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.99])
def test_the_first_restart_is_at_once_and_each_further_one_waits_twice_as_long(chance: float) -> None:
    job = Job(text_of(restarts="restarts: {max: 20, backoff: 4s}"), chance).started()
    first, *others = [wait_for_the_next(job) for _ in range(12)]
    assert first == 0.0
    for attempt, wait_s in enumerate(others):
        assert 0.75 <= wait_s / min(BACKOFF_S * 2**attempt, 300.0) <= 1.25


def test_after_a_attempt_that_worked_the_wait_is_as_at_the_first_failure() -> None:
    job = Job(text_of(restarts="restarts: {max: 20, backoff: 4s}")).started()
    waits = [wait_for_the_next(job) for _ in range(3)]
    job.now += HEALTHY_S + 0.1
    for again, before in zip([wait_for_the_next(job) for _ in range(3)], waits, strict=True):
        assert again == pytest.approx(before)
    job.now += HEALTHY_S - 20.0
    assert wait_for_the_next(job) > 10.0


def test_a_attempt_that_never_ran_has_not_worked() -> None:
    job = Job(text_of(restarts="restarts: {max: 20, backoff: 4s}")).started()
    job.now += 10.0
    job.lose(1, clean=True)
    job.now += HEALTHY_S - 50.0
    job.silent.add(0)
    job.come_back(1)
    assert job.state.phase is Phase.PREPARING
    job.now += 40.0
    job.feed(gone(1, clean=True))
    assert (job.state.due_at(Timer.BACKOFF) or 0.0) > job.now


# What is never tried again

NEVER = [
    pytest.param("preparing", PortRefused(0, "taken", ()), Exit.PORT_TAKEN, id="no port"),
    pytest.param("running", WorkerUnstarted(1, 0, "exec", errno.ENOENT, "x"), 127, id="no program"),
    pytest.param("running", WorkerUnstarted(1, 0, "exec", errno.EACCES, "x"), 126, id="not executable"),
]


@pytest.mark.parametrize("attempt", [0, 1])
@pytest.mark.parametrize(("phase", "event", "status"), NEVER)
def test_what_a_restart_can_not_mend_ends_the_job(
    attempt: int, phase: str, event: Event, status: int
) -> None:
    job = Job()
    if attempt:
        job.started()
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


def test_a_node_that_knows_no_way_at_the_start_ends_the_job() -> None:
    job = Job()
    job.silent = {0}
    job.obey(job.actions)
    job.silent = {1}
    job.obey(job.feed(up(0), RouteFailed(1, MASTER, "no route")))
    assert job.blamed == (Exit.USAGE, None, 1)
    assert job.state.restarts == ()


def test_a_node_that_knows_its_way_is_not_heard_when_it_loses_it_unasked() -> None:
    job = Job().started()
    job.silent = {0}  # it holds no port
    job.obey(job.feed(exited(1, 0, 7, job.now), Swept(0, 0, 0)))
    assert job.feed(RouteFailed(1, MASTER, "no route")) == []


@pytest.mark.parametrize("kind", [Kind.HOST_KEY, Kind.AUTHENTICATION, Kind.NO_PYTHON, Kind.BAD_OPTION])
def test_a_setting_that_is_wrong_at_the_start_ends_the_job(kind: Kind) -> None:
    job = Job()
    job.feed(up(0))
    job.obey(job.feed(unreachable(1, kind)))
    assert job.state.phase is Phase.DONE
    assert job.blamed == (Exit.UNREACHABLE, None, 1)
    assert len(job.actions.of(Connect)) == 2


def test_a_lost_node_whose_host_key_has_changed_is_not_tried_again() -> None:
    job = Job(text_of("[a, b]", "min_nodes: 1")).started()
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
def test_a_spare_that_does_not_fit_is_told_at_the_start_and_passed_over(early: bool) -> None:
    """It may be there before the job's own nodes have told what they have."""
    job = Job(WITH_GPUS)
    job.gpus = {0: 2, 1: 2, 3: 2}
    if early:
        job.obey(Actions([Connect(2), Connect(3)]))
        job.obey(Actions([Connect(0), Connect(1)]))
    else:
        job.started()
    assert texts(job.actions, "warning") == [f"c {NO_GPU}"]
    assert Drop(2) in job.actions
    job.lose(1, clean=True)
    job.feed(unreachable(1))
    job.go_on()
    assert job.state.members == (0, 3)
    assert texts(job.actions, "warning").count(f"c {NO_GPU}") == 1  # though it was looked at again


def test_a_spare_that_does_not_fit_a_named_backend_is_passed_over_at_the_first_start() -> None:
    job = Job(WITH_GPUS.replace("auto", "nccl"))
    job.gpus = {0: 2, 3: 2}
    job.obey(Actions([Connect(2), Connect(3), Connect(0)]))
    job.obey(job.feed(unreachable(1, Kind.HOST_KEY)))
    assert (job.state.members, job.state.phase) == ((0, 3), Phase.RUNNING)
    assert f"c {NO_GPU}" in texts(job.actions, "warning")


def test_a_node_that_returns_before_its_gpus_is_told_once_and_taken_in_with_them() -> None:
    job = Job(WITH_GPUS.replace("spares: [c, d]", "min_nodes: 1\nelastic: {grow: now}"))
    job.gpus = {0: 2, 1: 2}
    job.started().lose(1, clean=True)
    job.go_on()
    job.gpus.pop(1)
    before = len(job.actions)
    job.come_back(1)
    for _ in range(9):
        job.obey(job.tick())
    assert texts(Actions(job.actions[before:]), "warning") == [f"b {NO_GPU}"]
    job.fail()
    job.go_on()
    assert job.state.plan
    assert (job.state.members, job.state.plan.backend) == ((0,), "nccl")
    job.gpus[1] = 2
    while len(job.state.members) == 1:
        job.obey(job.tick())
    assert job.state.members == (0, 1)
    assert unfit_words(job.state.nodes[1]) == ""


def test_a_node_that_is_needed_has_time_for_its_gpus_to_come() -> None:
    job = Job(WITH_GPUS.replace("spares: [c, d]", "on_stall: stop"))
    job.gpus = {0: 2, 1: 2}
    job.started()
    job.gpus.pop(1)
    job.lose(1, clean=True, away=False)
    for _ in range(9):
        job.obey(job.tick())
    assert job.state.phase is Phase.RESTARTING
    job.gpus[1] = 2
    job.go_on()
    assert job.state.members == (0, 1)


def test_what_comes_while_the_job_ends_is_not_judged() -> None:
    job = Job(WITH_GPUS).started()
    job.feed(Interrupted(signal.SIGTERM))
    before = len(job.actions)
    job.feed(Reaped(1, 0), up(2))
    assert texts(Actions(job.actions[before:])) == []


def test_a_spare_without_a_way_to_the_master_is_passed_over_until_it_returns() -> None:
    job = Job(text_of("[a, b]", "spares: [c, d]")).started()
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


def test_without_a_node_that_fits_the_job_ends() -> None:
    job = Job(text_of("[{host: a, gpus: 2}]", "spares: [{host: b, gpus: 0}]").replace("gloo", "nccl"))
    job.started().lose(0, clean=True)
    while job.state.phase is Phase.RESTARTING:
        job.obey(job.tick())
    left = "only 0 of 1 required node available after waiting 5 min (timeouts.rejoin)"
    assert texts(job.actions, "error") == [f"a was lost: Connection reset by peer; {left}; b {NO_GPU}"]
    assert job.state.outcome == Exit.NODE_LOST


# Nodes that are lost


def test_a_node_that_ended_clean_has_no_fence() -> None:
    job = Job(text_of("[a, b, c]", "min_nodes: 2")).started()
    lost_at = job.now
    job.lose(1, clean=True)
    assert job.state.due_at(Timer.FENCE, 1) is None
    assert StartWorkers(2) not in job.obey(job.tick())  # it is tried once before the others go on
    assert wanted(job.obey(job.feed(unreachable(1))))[-1] == StartWorkers(2)
    assert job.now < lost_at + 1.0
    assert job.state.members == (0, 2)


def test_a_node_that_did_not_is_fenced_for_lease_grace_and_five_seconds() -> None:
    job = Job(text_of("[a, b, c]", "min_nodes: 2")).started()
    lost_at = job.now
    job.lose(1)
    assert job.state.due_at(Timer.FENCE, 1) == lost_at + FENCE_S
    while job.state.phase is Phase.RESTARTING:
        assert job.now < lost_at + FENCE_S
        job.feed(unreachable(1))
        job.obey(job.tick())
    assert job.now == lost_at + FENCE_S
    assert job.state.members == (0, 2)


def test_lease_and_grace_of_the_file_make_the_fence() -> None:
    job = Job(text_of().replace("stop: 10s", "stop: 2s, lease: 7s")).started()
    job.lose(1)
    assert job.state.due_at(Timer.FENCE, 1) == job.now + 14.0


def test_a_node_that_returns_and_is_reaped_has_no_fence_any_more() -> None:
    job = Job().started()
    lost_at = job.now
    job.silent.add(1)
    assert texts(job.feed(gone(1))) == [
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


def test_a_node_that_is_lost_again_before_it_was_reaped_keeps_its_fence() -> None:
    job = Job().started()
    fence_at = job.now + FENCE_S
    job.silent.add(1)
    job.lose(1)
    job.tick()
    job.feed(up(1), after=3.0)
    job.feed(gone(1))
    assert job.state.due_at(Timer.FENCE, 1) == fence_at


def test_the_clean_end_of_a_later_agent_says_nothing_of_an_earlier_one() -> None:
    job = Job().started()
    fence_at = job.now + FENCE_S
    job.lose(1)
    job.tick()
    job.feed(up(1))
    job.feed(gone(1, clean=True))
    assert (may_be_occupied(job.state.nodes[1]), job.state.due_at(Timer.FENCE, 1)) == (True, fence_at)


@pytest.mark.parametrize("clean", [True, False])
def test_a_node_that_returned_is_not_used_before_it_is_reaped(clean: bool) -> None:
    job = Job(text_of("[a, b]", "min_nodes: 1")).started()
    job.silent.add(1)
    job.feed(gone(1, clean))
    job.tick()
    assert job.feed(up(1)) == [Reap(1)]
    job.feed(Swept(0, 0, 0))
    job.go_on()
    assert job.state.members == (0,)
    assert job.actions.count_of(FindRoute(1, MASTER)) == 1


def test_a_node_that_is_reaped_while_it_has_workers_is_stopped_all_the_same() -> None:
    job = Job(text_of("[a, b]", "min_nodes: 1")).started()
    job.lose(1, clean=True)
    job.tick()
    job.feed(up(1))
    job.go_on()
    job.feed(Reaped(1, 0))
    used = [node for node in (0, 1) if may_be_occupied(job.state.nodes[node])]
    assert used == list(job.state.members)


def test_a_node_whose_agents_end_at_once_is_not_waited_for_for_ever() -> None:
    job = Job(text_of("[a, b]", "min_nodes: 1")).started()
    job.lose(1, clean=True)
    lost_at = job.now
    while job.state.phase is not Phase.RUNNING:
        assert job.now < lost_at + REJOIN_S
        if Connect(1) in job.obey(job.tick()):
            job.feed(up(1))
            job.obey(job.feed(gone(1, clean=True)))
    assert job.state.members == (0,)


def test_a_node_that_does_not_confirm_in_time_is_dropped_and_fenced() -> None:
    job = Job(text_of("[a, b]", "min_nodes: 1")).started()
    failed_at = job.now
    job.silent.add(1)
    job.fail()
    (waiting,) = texts(job.tick(), "warning")
    assert waiting == "waiting for rank 2 (b, pid 100), rank 3 (b, pid 101) to exit; SIGKILL in 7 s"
    actions = job.tick()
    assert job.now == failed_at + STOP_S + STOP_MARGIN_S
    assert texts(actions, "warning") == ["b did not confirm its cleanup; treating the node as lost"]
    assert wanted(actions) == [Drop(1)]
    assert job.state.due_at(Timer.FENCE, 1) == job.now + FENCE_S
    dropped_at = job.now
    while job.state.phase is Phase.RESTARTING:
        job.feed(unreachable(1))
        job.obey(job.tick())
    assert job.now == dropped_at + FENCE_S
    assert job.state.members == (0,)


def test_a_node_whose_agent_is_told_to_leave_is_not_used_until_another_one_is_there() -> None:
    job = Job(text_of("[a, b]", "min_nodes: 1")).started()
    said = job.obey(job.feed(AgentLeaving(1, signal.SIGTERM)))
    assert texts(said)[0] == ("b was lost: its agent was stopped by signal 15 (SIGTERM); restart 1 of 3")
    assert (job.state.phase, job.state.members) == (Phase.RUNNING, (0,))
    assert texts(job.feed(gone(1, clean=True))) == []
    job.come_back(1)
    job.fail()
    job.go_on()
    assert job.state.members == (0, 1)


def test_a_node_whose_agent_leaves_is_hoped_for_before_its_link_has_ended() -> None:
    job = Job(text_of("[a, b]")).started()
    job.silent = {0, 1}
    said = job.obey(job.feed(AgentLeaving(1, signal.SIGTERM)))
    assert wanted(said) == [StopWorkers(0, STOP_S), StopWorkers(1, STOP_S)]
    assert job.feed(Swept(0, 0, 0), Swept(1, 0, 0)) + job.wait() == []
    assert job.state.phase is Phase.RESTARTING
    job.feed(gone(1, clean=True))
    job.silent.clear()
    job.go_on()
    assert (job.state.phase, job.state.members) == (Phase.RUNNING, (0, 1))


# Who takes part


def test_a_spare_stands_in_for_a_lost_node() -> None:
    job = Job(text_of("[a, b]", "spares: [c]")).started()
    assert job.state.members == (0, 1)
    actions = job.lose(1, clean=True)
    assert wanted(actions) == [
        StopWorkers(0, STOP_S),
        HoldPort(0, None),
        FindRoute(2, MASTER),
        StartWorkers(0),
        StartWorkers(2),
    ]
    assert texts(actions)[1:] == ["continuing with 2 of 2 nodes: a, c"]
    assert job.state.plan is not None
    assert [part.first_rank for part in job.state.plan.nodes] == [0, 2]


def test_a_spare_that_answers_late_is_waited_for_before_the_job_goes_on_with_fewer() -> None:
    job = Job(text_of("[a, b]", "spares: [c]", "min_nodes: 1"))
    job.silent.add(2)
    job.started().lose(1, clean=True)
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
def test_survivors_keep_their_order_and_rank_0_its_host_while_that_is_there(
    nodes: str, more: str, away: list[int], members: tuple[int, ...]
) -> None:
    job = Job(text_of(nodes, more)).started()
    for node in away:
        job.lose(node)
    job.go_on()
    assert job.state.members == members
    assert job.state.plan is not None
    assert job.state.plan.world_size == 2 * len(members) == len(job.state.workers)
    assert [part.node_rank for part in job.state.plan.nodes] == list(range(len(members)))
    assert job.state.port == 29401
    assert (HoldPort(members[0], None) in job.actions) and job.state.restart_count == 1


def test_the_master_moves_when_its_node_is_lost_and_the_routes_are_found_again() -> None:
    job = Job(text_of("[a, b, c]", "min_nodes: 2")).started()
    job.lose(0, clean=True)
    job.tick()
    actions = job.obey(job.feed(unreachable(0)))
    assert wanted(actions) == [
        HoldPort(1, None),
        FindRoute(2, "b"),
        FindRoute(1, "b"),
        StartWorkers(1),
        StartWorkers(2),
    ]
    assert job.state.plan is not None and job.state.plan.master_addr == "b"


@pytest.mark.parametrize("nodes", ["[a, b]", "[a, b, c]"])
@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_returns_in_time_has_its_place_again_and_every_route_is_known(
    nodes: str, node: int
) -> None:
    job = Job(text_of(nodes)).started()
    job.lose(node)
    job.come_back(node)
    assert job.state.phase is Phase.RUNNING
    assert job.state.members == tuple(range(len(job.state.nodes)))
    assert job.interfaces == [f"eth{i}" for i in job.state.members]
    asked = [each for each in job.actions if isinstance(each, FindRoute) and each.node == node]
    assert len(asked) == 2
    assert len(job.state.restarts) == 1


def test_who_is_waited_for_is_told_once_and_that_it_is_back() -> None:
    job = Job(text_of("[a, b]")).started()
    job.lose(1)
    said = job.tick() if job.state.due_at(Timer.FENCE, 1) is None else Actions()
    while not any("timeouts.rejoin" in text for text in texts(said)):
        said = job.obey(job.tick())
    (words,) = [text for text in texts(said) if "timeouts.rejoin" in text]
    assert words.startswith("only 1 of 2 required nodes available; waiting up to ")
    assert words.endswith(" s for b to return (timeouts.rejoin)")
    job.come_back(1)
    told = texts(job.actions)
    assert sum("timeouts.rejoin" in text for text in told) == 1
    assert "b is back" in told
    assert job.state.phase is Phase.RUNNING


def test_after_a_attempt_on_one_node_the_routes_are_found_again() -> None:
    job = Job(text_of("[a, b]", "min_nodes: 1", f"master_addr: {MASTER}")).started()
    job.lose(1)
    job.go_on()
    assert job.interfaces == [None]
    job.come_back(1)
    job.fail()
    job.go_on()
    assert job.state.members == (0, 1)
    assert job.interfaces == ["eth0", "eth1"]


def without_b(*more: str, restarts: str = RESTARTS) -> Job:
    """A job on a, b and c that goes on with a and c."""
    job = Job(text_of("[a, b, c]", "min_nodes: 2", *more, restarts=restarts)).started()
    job.lose(1)
    job.go_on()
    assert job.state.members == (0, 2)
    return job


def test_a_node_that_returned_is_taken_in_at_the_next_restart() -> None:
    job = without_b()
    actions = job.come_back(1)
    assert wanted(actions) == [Connect(1), Reap(1)]
    assert texts(actions) == ["b is back; it rejoins at the next restart"]
    job.fail()
    job.go_on()
    assert job.state.members == (0, 2, 1)
    assert job.state.restart_count == 2


def test_or_at_once_where_the_job_says_so_without_being_counted() -> None:
    job = without_b("elastic: {grow: now}", restarts="restarts: {max: 1}")
    actions = job.come_back(1)
    assert texts(actions, "info")[0] == "b is back; restarting to include it"
    assert wanted(actions)[:4] == [
        Connect(1),
        Reap(1),
        StopWorkers(0, STOP_S),
        StopWorkers(2, STOP_S),
    ]
    assert (job.state.phase, job.state.members) == (Phase.RUNNING, (0, 2, 1))
    assert [restart.why for restart in job.state.restarts] == [Why.FAILURE, Why.GROWTH]
    assert job.state.restart_count == 2
    job.fail()
    job.go_on()
    assert job.state.outcome == 7


def test_growth_after_the_window_leaves_all_restarts() -> None:
    job = without_b("elastic: {grow: now}", restarts="restarts: {max: 1, window: 100s}")
    job.come_back(1)
    job.now += 100.0
    job.fail()
    job.go_on()
    assert job.state.phase is Phase.RUNNING


def test_a_complete_job_does_not_grow() -> None:
    job = Job(text_of("[a, b]", "spares: [c]", "elastic: {grow: now}"))
    job.silent.add(2)
    job.started()
    assert job.feed(up(2)) == []
    assert wanted(job.feed(gone(2))) == []
    assert job.obey(job.tick())[-1] == Connect(2)
    job.silent.clear()
    assert job.obey(Actions([Connect(2)])) == [Connect(2), Reap(2)]
    assert job.state.restarts == ()


def test_too_few_nodes_are_waited_for_and_not_for_ever() -> None:
    job = Job().started()
    lost_at = job.now
    job.lose(1)
    while job.state.phase is Phase.RESTARTING:
        job.feed(unreachable(1))
        job.obey(job.tick())
    assert job.now == lost_at + REJOIN_S
    assert job.blamed == (Exit.NODE_LOST, None, 1)
    left = "only 1 of 2 required nodes available after waiting 5 min (timeouts.rejoin)"
    assert texts(job.actions, "error") == [f"b was lost: Connection reset by peer; {left}"]
    assert job.state.phase is Phase.DONE


def test_a_node_that_returns_late_ends_the_wait() -> None:
    job = Job().started()
    job.lose(1)
    for _ in range(12):
        job.feed(unreachable(1))
        job.obey(job.tick())
    assert job.state.phase is Phase.RESTARTING
    job.feed(unreachable(1))
    job.come_back(1)
    assert (job.state.phase, job.state.members) == (Phase.RUNNING, (0, 1))


def test_a_lost_node_is_tried_ever_more_slowly() -> None:
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


def test_a_job_may_start_without_nodes_that_it_can_do_without() -> None:
    job = Job(text_of("[a, b]", "min_nodes: 1"))
    job.feed(up(0))
    actions = job.obey(job.feed(unreachable(1)))
    assert texts(actions) == ["b: unreachable", "starting on 1 node, without b"]
    assert wanted(actions) == [HoldPort(0, None), StartWorkers(0)]
    assert texts(job.come_back(1)) == ["b is back; it rejoins at the next restart"]
    job.fail()
    job.go_on()
    assert job.state.members == (0, 1)


def test_or_with_a_spare_in_their_place() -> None:
    job = Job(text_of("[a, b]", "spares: [c]"))
    job.feed(up(0), unreachable(1))
    assert job.state.phase is Phase.CONNECTING  # the spare may still come
    assert texts(job.obey(job.feed(up(2)))) == ["starting on 2 nodes, without b"]
    assert job.state.members == (0, 2)


def test_a_spare_is_not_waited_for_when_the_nodes_are_there() -> None:
    job = Job(text_of("[a, b]", "spares: [c]"))
    job.silent.add(2)
    assert job.started().state.members == (0, 1)


def test_a_node_whose_settings_are_wrong_is_not_tried_again_although_the_job_starts() -> None:
    job = Job(text_of("[a, b]", "min_nodes: 1"))
    job.obey(job.feed(up(0), unreachable(1, Kind.HOST_KEY)))
    job.silent.add(1)
    assert isinstance(job.state.nodes[1], Unusable)
    assert job.obey(job.wait(100.0)) == []


def test_too_few_at_the_start_are_too_few_also_with_spares() -> None:
    job = Job(text_of("[a, b]", "spares: [c]"))
    job.feed(up(0), unreachable(1))
    actions = job.obey(job.feed(unreachable(2)))
    assert texts(actions, "error")[-1] == "2 of 3 nodes can't be used (b, c); nothing was started"
    assert job.state.phase is Phase.DONE


# The end in the middle of a restart


def restarting() -> Job:
    """A job whose first attempt is being ended."""
    job = Job().started()
    job.feed(exited(0, 1, 7, job.now))
    assert job.state.phase is Phase.RESTARTING
    return job


def test_one_signal_while_restarting_ends_the_job_gracefully() -> None:
    job = restarting()
    actions = job.feed(Interrupted(signal.SIGINT))
    assert wanted(actions) == [Close(0, STOP_S), Close(1, STOP_S)]
    assert wanted(job.obey(actions))[-1] == Finish()
    assert job.blamed == (130, None, None)
    assert len(job.actions.of(StartWorkers)) == 2


def test_two_signals_while_restarting_kill_and_three_leave() -> None:
    job = restarting()
    job.feed(Interrupted(signal.SIGINT), after=1.0)
    assert wanted(job.feed(Interrupted(signal.SIGINT), after=1.0)) == [Close(0, 0.0), Close(1, 0.0)]
    assert wanted(job.feed(Interrupted(signal.SIGINT), after=1.0)) == [Finish()]
    assert job.feed(Swept(0, 0, 0), Swept(1, 0, 0)) + job.wait() == []


def test_a_signal_during_the_backoff_ends_the_job_with_the_nodes_clean() -> None:
    job = Job().started()
    job.fail()
    job.fail()
    assert job.state.phase is Phase.RESTARTING
    assert not any(map(may_be_occupied, job.state.nodes))
    assert job.obey(job.feed(Interrupted(signal.SIGTERM)))[-1] == Finish()
    assert [phase_word(node) for node in job.state.nodes] == ["closed"] * 2


def test_a_signal_while_a_lost_node_is_awaited_ends_the_job() -> None:
    job = Job().started()
    job.lose(1)
    actions = job.obey(job.feed(Interrupted(signal.SIGINT)))
    assert Drop(1) in actions and actions[-1] == Finish()
    assert [phase_word(node) for node in job.state.nodes] == ["closed", "lost"]


def test_a_job_that_ends_before_its_next_attempt_has_started_is_clean() -> None:
    job = Job(text_of("[a, b]", "spares: [c]")).started()
    job.fail()
    job.silent.add(0)
    job.fail()
    job.silent.clear()
    actions = job.obey(job.feed(Interrupted(signal.SIGINT)))
    assert texts(actions, "warning") == []
    assert [phase_word(node) for node in job.state.nodes] == ["closed"] * 3


def test_nodes_that_took_no_part_in_the_last_attempt_end_without_a_warning() -> None:
    job = Job(text_of("[a, b]", "spares: [c]")).started()
    job.fail()
    ended = job.obey(job.feed(*(exited(node, rank, 0, job.now) for node in (0, 1) for rank in (0, 1))))
    assert texts(ended, "warning") == []
    assert [phase_word(node) for node in job.state.nodes] == ["closed"] * 3
    assert job.state.outcome == Exit.OK


def test_a_lost_node_that_was_not_reaped_in_time_is_not_called_clean() -> None:
    job = Job().started()
    job.silent.add(1)
    job.lose(1)
    job.tick()
    job.feed(up(1))
    job.silent.clear()
    job.obey(job.feed(Interrupted(signal.SIGINT)))
    assert may_be_occupied(job.state.nodes[1])
    assert isinstance(job.state.nodes[1], Lost)


@pytest.mark.parametrize("silent", [{0, 1}, {1}])
def test_the_jobs_time_limit_holds_while_restarting(silent: set[int]) -> None:
    job = Job(text_of().replace("stop: 10s", "stop: 10s, job: 20s")).started()
    job.silent = set(silent)
    job.fail()
    assert job.state.phase is Phase.RESTARTING
    job.tick()  # who has not ended is named
    assert texts(job.tick(), "error") == ["the job timed out after 20 s (timeouts.job)"]
    assert job.now == 1020.0
    assert job.blamed == (Exit.TIMEOUT, None, None)


def test_an_earlier_exit_that_is_heard_of_while_restarting_is_the_first_cause() -> None:
    job = Job().started()
    job.now += 5.0
    job.silent = {0, 1}
    job.fail()
    job.feed(exited(1, 1, -11, job.now - 1.0))
    job.feed(exited(1, 0, 3, job.now - 0.5))
    assert job.blamed == (139, 3, 1)
    (restart,) = job.state.restarts
    assert restart.cause == job.state.cause
    assert [worker.stopped for worker in job.state.workers] == [False, False, True, False]


def test_a_later_exit_is_not() -> None:
    job = restarting()
    job.feed(exited(1, 1, -15, job.now + 1.0))
    assert job.blamed == (7, 1, 0)


# The rendezvous port


def test_a_port_that_is_usurped_is_moved_without_being_counted() -> None:
    job = Job(text_of(restarts="restarts: {max: 0}")).started()
    owners = ({"uid": 0, "pid": 42, "command": "redis"},)
    for moves in (1, 2, 3):
        job.obey(job.feed(PortUsurped(0, owners)))
        assert job.state.phase is Phase.RUNNING
        assert (job.state.port, job.state.attempt) == (29400 + moves, moves)
        assert job.state.restart_count == 0
    job.obey(job.feed(PortUsurped(0, owners)))
    assert texts(job.actions, "error") == ["port 29403 on a was taken by redis (pid 42)"]
    assert job.blamed == (Exit.PORT_TAKEN, None, 0)
    assert job.state.phase is Phase.DONE


def test_a_moved_port_leaves_all_restarts_for_failures() -> None:
    job = Job(text_of(restarts="restarts: {max: 1}")).started()
    job.obey(job.feed(PortUsurped(0, ())))
    job.fail()
    job.go_on()
    assert (job.state.phase, job.state.restart_count) == (Phase.RUNNING, 1)
    job.fail()
    assert job.state.phase is Phase.DONE


def test_a_port_that_the_user_chose_is_not_moved() -> None:
    job = Job(text_of("[a, b]", "master_port: 29555")).started()
    job.obey(job.feed(PortUsurped(0, ())))
    assert job.state.phase is Phase.DONE
    assert job.blamed == (Exit.PORT_TAKEN, None, 0)


@pytest.mark.parametrize("node", [1, 2])
def test_only_the_first_node_can_tell_of_the_port(node: int) -> None:
    job = Job(text_of("[a, b, c]")).started()
    assert job.feed(PortUsurped(node, ())) == []
