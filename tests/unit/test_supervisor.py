"""The policy of a job as histories: what happened, and what the supervisor then wants, says and blames."""

import errno
import itertools
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.agent.messages import (
    AgentLeaving,
    Interrupted,
    OutputLost,
    PortHeld,
    PortRefused,
    RanksJoined,
    RanksLag,
    RanksStalled,
    RouteFailed,
    RouteFound,
    StackDumped,
    Stuck,
    Swept,
    WorkerExited,
    WorkerStarted,
    WorkerUnstarted,
)
from distlaunch.diagnosis.exits import exit_status_of
from distlaunch.errors import Exit
from distlaunch.job.spec import Invocation
from distlaunch.plan.layout import Facts
from distlaunch.supervisor.actions import (
    Action,
    Close,
    Connect,
    Drop,
    DumpStacks,
    FindRoute,
    Finish,
    GiveUp,
    HoldPort,
    ShowMessage,
    StartWorkers,
    StopWorkers,
)
from distlaunch.supervisor.events import AddressesFound, AgentUp, Event, LinkEnded, OutputFlows, TimerDue
from distlaunch.supervisor.nodes import Exited, Lost, Route, failure_of, is_over, route_of
from distlaunch.supervisor.state import Phase, State, Timer
from distlaunch.supervisor.step import begin, step
from distlaunch.transports.failure import Kind, LinkFailure
from distlaunch.transports.ssh import Ssh
from distlaunch.wording import status_words
from tests.unit.samples import PEER_GONE, bounded, spec_of

JOB = (
    "script: t.py\nbackend: gloo\ngpus_per_node: 0\nprocs_per_node: 2\ntimeouts: {connect: 30s, stop: 10s}\n"
)
TWO = f"{JOB}nodes: [a, b]"
"""Ranks 0 and 1 on a, 2 and 3 on b."""
CONNECT_S, STOP_S = 30.0, 10.0
STOP_MARGIN_S, DRAIN_S = 14.0, 30.0  # until a node that does not confirm, or does not deliver, is given up
MASTER = "10.0.0.1"
BY_SOMEONE = """rank 2 (b) failed first: killed by signal 9 (SIGKILL); the kernel reports no \
OOM kill on that node"""


class Actions(list[Action]):
    """Actions that are equal only if their kinds are: as tuples, Connect(0) and Drop(0) would be."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list) and self._kinds() == Actions(other)._kinds()

    __hash__ = None

    def __contains__(self, action: object) -> bool:
        return self.count_of(action) > 0

    def _kinds(self) -> list[tuple[type, Action]]:
        return [(type(action), action) for action in self]

    def count_of(self, action: object) -> int:
        return sum(type(each) is type(action) and each == action for each in self)

    def of(self, *kinds: type) -> "Actions":
        return Actions(action for action in self if isinstance(action, kinds))


class History:
    """A job under a fake clock: feed it events, look at what it wants."""

    def __init__(self, text: str = TWO) -> None:
        self.now = 1000.0
        begun, first = begin(spec_of(text), self.now)
        self.state = begun._replace(addresses={0: MASTER})
        self.actions = Actions(first)

    def feed(self, *events: Event, after: float = 0.0) -> Actions:
        """What the supervisor wants because of these events."""
        self.now += after
        before = len(self.actions)
        for event in events:
            self.state, actions = step(self.state, event, self.now)
            self.actions += actions
        return Actions(self.actions[before:])

    def tick(self) -> Actions:
        """Let the next timer come due."""
        assert self.state.next_due is not None, "nothing is ever going to happen"
        self.now = max(self.now, self.state.next_due)
        alarm = self.state.alarm(self.now)
        assert alarm is not None
        return self.feed(TimerDue(*alarm))

    def wait(self, seconds: float = 0.0) -> Actions:
        """Let time pass, and then all timers come that are due."""
        self.now += seconds
        done = Actions()
        while alarm := self.state.alarm(self.now):
            done += self.feed(TimerDue(*alarm))
        return done

    def to_preparing(self, gpus: int = 0) -> "History":
        self.feed(*(up(node, gpus) for node in range(len(self.state.nodes))))
        assert self.state.phase is Phase.PREPARING
        return self

    def to_running(self) -> "History":
        self.to_preparing()
        self.feed(PortHeld(0, 29400))
        if not self.state.spec.one_machine:
            self.feed(*(RouteFound(node, MASTER, MASTER, "eth0") for node in range(1, len(self.state.nodes))))
            self.feed(RouteFound(0, MASTER, MASTER, "eth1"))
        assert self.state.phase is Phase.RUNNING
        for node in self.state.plan.nodes if self.state.plan else ():
            self.feed(*(WorkerStarted(node.node_rank, rank, 100 + rank) for rank in range(node.procs)))
        return self

    def to_stopping(self) -> "History":
        """Rank 0 has failed with 7."""
        self.to_running()
        self.feed(exited(0, 0, 7, self.now))
        assert self.state.phase is Phase.STOPPING
        return self

    def close(self) -> Actions:
        """Every node that is left confirms its clean-up and ends."""
        left = [node for node, each in enumerate(self.state.nodes) if not is_over(each)]
        return self.feed(*(Swept(node, 0, 0) for node in left), *(lost(node, "closed") for node in left))

    @property
    def interfaces(self) -> list[str | None]:
        """Those of the nodes whose routes are known."""
        return [route.interface for route in map(route_of, self.state.nodes) if route]

    @property
    def blamed(self) -> tuple[int, int | None, int | None]:
        """Exit status, rank and node of the cause."""
        cause = self.state.cause
        return (self.state.outcome, cause and cause.rank, cause and cause.node)


PHASES = ["connecting", "preparing", "running"]


def job_in(phase: str, text: str = TWO) -> History:
    """A job that has come to that phase."""
    job = History(text)
    ways = {"preparing": job.to_preparing, "running": job.to_running, "stopping": job.to_stopping}
    return ways[phase]() if phase in ways else job


def up(node: int, gpus: int = 0) -> AgentUp:
    return AgentUp(node, Facts("/usr/bin/python3", gpus), f"host{node}")


def exited(node: int, local_rank: int, status: int, at: float) -> WorkerExited:
    return WorkerExited(node, local_rank, status, at)


def lost(node: int, words: str = "Connection reset by peer", kind: Kind = Kind.LOST) -> LinkEnded:
    return LinkEnded(node, LinkFailure(kind, words))


def texts(actions: Actions, level: str | None = None) -> list[str]:
    return [a.text for a in actions if isinstance(a, ShowMessage) and level in (None, a.level)]


def wanted(actions: Actions) -> Actions:
    return Actions(action for action in actions if not isinstance(action, ShowMessage))


# The way to the workers' start


def test_all_nodes_are_connected_at_once() -> None:
    assert History().actions == [Connect(0), Connect(1)]


def test_a_job_on_two_machines_holds_the_port_and_finds_the_routes_before_it_starts() -> None:
    job = History()
    assert job.feed(up(1)) == []
    assert job.feed(up(0)) == [HoldPort(0, None), FindRoute(1, MASTER)]
    assert job.feed(PortHeld(0, 29400)) == []
    assert job.feed(RouteFound(1, MASTER, "10.0.0.7", "eth0")) == [FindRoute(0, "10.0.0.7")]
    assert job.feed(RouteFound(0, "10.0.0.7", "10.0.0.7", "eth1")) == [StartWorkers(0), StartWorkers(1)]
    assert job.interfaces == ["eth1", "eth0"]
    assert job.state.port == 29400


def foreseeing(text: str = TWO, address: str = MASTER) -> History:
    """A job whose nodes have been asked before their agents are there."""
    job = History(text)
    asked = job.feed(AddressesFound(((0, address),)))
    assert asked == [HoldPort(0, None), *(FindRoute(node, address) for node in range(len(job.state.nodes)))]
    return job


def answers(node: int, asked: str = MASTER, address: str = MASTER) -> list[Event]:
    """All that an agent says that was asked early."""
    port, source = ([PortHeld(0, 29400)], address) if node == 0 else ([], f"10.0.0.{1 + node}")
    return [up(node), *port, RouteFound(node, asked, address, f"eth{node}", source)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_nodes_are_asked_early_what_the_plan_most_likely_needs(order: tuple[int, ...]) -> None:
    job = foreseeing(f"{JOB}nodes: [a, b, c]")
    *first, last = [event for node in order for event in answers(node)]
    assert job.feed(*first) == []
    assert job.feed(last) == [StartWorkers(node) for node in range(3)]
    assert job.state.port == 29400
    assert job.interfaces == ["eth0", "eth1", "eth2"]


def test_answers_may_come_after_the_plan() -> None:
    job = foreseeing()
    assert job.feed(up(0), up(1)) == []
    assert job.state.phase is Phase.PREPARING
    assert job.feed(*answers(1)[1:], *answers(0)[1:]) == [StartWorkers(0), StartWorkers(1)]


def test_the_first_node_is_asked_again_where_its_name_means_another_address_there() -> None:
    """On Debian its own /etc/hosts has 127.0.1.1 for it."""
    job = foreseeing(address="a")
    first, other = answers(0, "a", "127.0.1.1"), answers(1, "a", MASTER)
    assert job.feed(*first, *other) == [FindRoute(0, MASTER)]
    assert job.feed(RouteFound(0, MASTER, MASTER, "eth1", MASTER)) == [StartWorkers(0), StartWorkers(1)]
    job = foreseeing(address="a")
    assert job.feed(*other, *first) == [FindRoute(0, MASTER)]


def test_the_first_node_may_not_know_its_own_name() -> None:
    job = foreseeing(address="a")
    unknown = RouteFailed(0, "a", "Name or service not known")
    assert job.feed(up(0), PortHeld(0, 29400), unknown, *answers(1, "a")) == [FindRoute(0, MASTER)]
    assert job.feed(RouteFailed(0, MASTER, "no route")) == [StartWorkers(0), StartWorkers(1)]


def test_what_was_refused_early_is_asked_again_and_told() -> None:
    job = foreseeing()
    assert job.feed(up(1), RouteFailed(1, MASTER, "no route to host"), up(0)) == [FindRoute(1, MASTER)]
    said = job.feed(RouteFailed(1, MASTER, "no route to host"))
    assert "b can't reach MASTER_ADDR" in texts(said, "error")[0]
    job = foreseeing()
    taken = PortRefused(0, "Address already in use", ())
    assert job.feed(up(0), taken, up(1)) == [HoldPort(0, None)]
    assert job.blamed[0] == 0
    job.feed(taken)
    assert job.blamed[0] == Exit.PORT_TAKEN


def test_a_plan_without_the_first_node_asks_anew() -> None:
    job = foreseeing(f"{JOB}nodes: [a, b, c]\nmin_nodes: 2")
    job.feed(AddressesFound(((0, MASTER), (1, "10.0.0.8"))), lost(0, "x", Kind.UNREACHABLE))
    asked = job.feed(*answers(1), *answers(2))
    assert wanted(asked) == [HoldPort(1, None), FindRoute(2, "10.0.0.8")]
    job.feed(PortHeld(1, 29400), *answers(2)[1:])
    assert job.state.phase is Phase.PREPARING, "an answer to the first question"
    job.feed(RouteFound(2, "10.0.0.8", "10.0.0.8", "eth2"))
    assert job.feed(RouteFound(1, "10.0.0.8", "10.0.0.8", "eth1")) == [StartWorkers(1), StartWorkers(2)]


def test_a_node_that_is_connected_again_is_asked_again() -> None:
    job = foreseeing()
    job.feed(lost(1, "Connection closed", Kind.DROPPED))
    assert job.tick() == [Connect(1), FindRoute(1, MASTER)]
    assert job.feed(*answers(0), *answers(1)) == [StartWorkers(0), StartWorkers(1)]


def test_early_answers_warn_as_late_ones_do() -> None:
    job = foreseeing(f"{TWO}\nenv: {{GLOO_SOCKET_IFNAME: eth9}}")
    other = RouteFound(1, MASTER, MASTER, "eth0", "10.0.0.8", (("eth0", True),))
    own = RouteFound(0, MASTER, MASTER, "eth0", "10.0.0.7")
    said = texts(job.feed(up(0), PortHeld(0, 29400), own, up(1), other), "warning")
    assert said[0].startswith("MASTER_ADDR 10.0.0.1 is not an address of a, where rank 0 runs; ")
    assert said[1].startswith("GLOO_SOCKET_IFNAME=eth9 on b: no such interface")


def test_the_port_of_the_file_is_the_one_that_is_held() -> None:
    job = History(f"{TWO}\nmaster_port: 29555")
    assert HoldPort(0, 29555) in job.feed(up(0), up(1))


def test_a_job_on_one_machine_needs_no_route() -> None:
    job = History(f"{JOB}nodes: 2")
    assert job.actions == [Connect(0), Connect(1), HoldPort(0, None)]
    assert job.feed(up(0), up(1)) == []
    assert job.feed(PortHeld(0, 29400)) == [StartWorkers(0), StartWorkers(1)]
    assert job.interfaces == ["lo", "lo"]


@pytest.mark.parametrize("last", [0, 2, 3], ids=["the port", "a node's route", "the first node's route"])
def test_workers_start_once_all_preparations_are_done_in_any_order(last: int) -> None:
    job = History(f"{JOB}nodes: [a, b, c]").to_preparing()
    events: list[Event] = [
        PortHeld(0, 29400),
        *(RouteFound(node, MASTER, MASTER, "eth0") for node in (1, 2, 0)),
    ]
    awaited = events.pop(last)
    assert not job.feed(*events).of(StartWorkers)
    assert job.feed(awaited) == [StartWorkers(0), StartWorkers(1), StartWorkers(2)]
    assert job.actions.count_of(FindRoute(0, MASTER)) == 1


def test_a_first_node_that_does_not_know_its_own_route_is_no_reason_to_stop() -> None:
    job = History().to_preparing()
    job.feed(PortHeld(0, 29400), RouteFound(1, MASTER, MASTER, "eth0"))
    assert job.feed(RouteFailed(0, MASTER, "no route")) == [StartWorkers(0), StartWorkers(1)]
    assert route_of(job.state.nodes[0]) == Route()


# Nodes that can't be used


def test_all_nodes_that_fail_are_told_before_the_job_ends_and_nothing_is_started() -> None:
    job = History(f"{JOB}nodes: [a, b, c]")
    said = job.feed(up(0), lost(1, "Permission denied", Kind.AUTHENTICATION))
    assert said == [ShowMessage("error", "b: authentication failed")]
    assert job.state.phase is Phase.CONNECTING
    said = job.feed(lost(2, "no", Kind.UNRESOLVED))
    assert texts(said, "error") == ["2 of 3 nodes can't be used (b, c); nothing was started"]
    assert wanted(said) == [Close(0, STOP_S)]
    assert job.close() == [Finish()]
    assert job.blamed == (Exit.UNREACHABLE, None, 1)
    assert [failure.kind for failure in map(failure_of, job.state.nodes) if failure] == [
        Kind.AUTHENTICATION,
        Kind.UNRESOLVED,
    ]


def test_when_no_node_can_be_used_the_job_is_over_at_once() -> None:
    assert isinstance(History().feed(lost(0), lost(1))[-1], Finish)


def test_many_failed_nodes_are_counted_rather_than_all_named() -> None:
    job = History(f"{JOB}nodes: ['n[1-50]']")
    last = texts(job.feed(*(lost(node) for node in range(50))))[-1]
    assert last.startswith("50 of 50 nodes can't be used (n1, ")
    assert last.endswith("and 42 more); nothing was started")


@pytest.mark.parametrize(
    "kind", [kind for kind in Kind if kind not in (Kind.DROPPED, Kind.PROXY)], ids=lambda kind: kind.name
)
def test_only_dropped_connections_are_tried_again(kind: Kind) -> None:
    job = History(f"{JOB}nodes: [a]")
    assert Connect(0) not in job.feed(lost(0, "x", kind))
    assert job.state.phase is Phase.DONE


def test_a_dropped_connection_is_tried_again_ever_later_and_not_for_ever() -> None:
    job = History(f"{JOB}nodes: [a]")
    dropped = lost(0, "Connection closed", Kind.DROPPED)
    waits = []
    for _ in range(5):
        before = job.now
        assert job.feed(dropped) == []
        assert job.tick() == [Connect(0), HoldPort(0, None)]
        waits.append(job.now - before)
    for attempt, wait in enumerate(waits):
        assert 0.5 <= wait / (0.4 * 2**attempt) <= 1.5
    assert sum(waits) < CONNECT_S
    assert wanted(job.feed(dropped)) == [Finish()]
    assert job.blamed == (Exit.UNREACHABLE, None, 0)


def test_nodes_that_are_dropped_together_do_not_come_back_together() -> None:
    job = History(f"{JOB}nodes: ['n[1-16]']")
    job.feed(*(lost(node, "Connection closed", Kind.DROPPED) for node in range(16)))
    times = sorted(job.state.due_at(Timer.RETRY, node) or 0.0 for node in range(16))
    gaps = [later - sooner for sooner, later in itertools.pairwise(times)]
    assert min(gaps) > 0.4 / 16 / 4


def test_a_retry_that_works_is_as_good_as_the_first_try() -> None:
    job = History(f"{JOB}nodes: [a]")
    job.feed(lost(0, "Connection closed", Kind.DROPPED))
    job.tick()
    assert job.feed(up(0), PortHeld(0, 29400)) == [StartWorkers(0)]


def test_who_has_not_answered_at_the_deadline_is_given_up_and_named() -> None:
    job = History(f"{JOB}nodes: [a, b, c]")
    job.feed(up(0), lost(2, "Connection closed", Kind.DROPPED), after=CONNECT_S - 0.1)
    assert job.wait() == []
    said = job.wait(0.1)
    assert wanted(said) == [GiveUp(1, f"no agent within {CONNECT_S:g} s (timeouts.connect)")]
    assert texts(said) == ["c: dropped by the server"]
    said = job.feed(lost(1, "", Kind.SILENT))
    assert texts(said) == ["2 of 3 nodes can't be used (b, c); nothing was started"]
    assert wanted(said) == [Close(0, STOP_S)]
    assert job.feed(up(1)) == []
    assert job.close() == [Finish()]
    assert job.blamed[0] == Exit.UNREACHABLE


def test_a_try_that_time_cuts_short_says_less_than_the_one_before_it() -> None:
    job = History(f"{JOB}nodes: [a]")
    job.feed(lost(0, "Connection closed", Kind.DROPPED), after=CONNECT_S - 1.0)
    assert job.wait(0.9) == [Connect(0), HoldPort(0, None)]
    assert wanted(job.wait(0.1)) == [GiveUp(0, f"no agent within {CONNECT_S:g} s (timeouts.connect)")]
    job.feed(lost(0, "", Kind.SILENT))
    failure = failure_of(job.state.nodes[0])
    assert failure and failure.kind is Kind.DROPPED


def test_a_link_that_ends_before_all_are_connected_ends_the_job() -> None:
    job = History()
    job.feed(up(0))
    said = job.feed(lost(0, "Timeout, server a not responding."))
    assert texts(said, "error") == ["a was lost: Timeout, server a not responding"]
    assert wanted(said) == [Drop(1), Finish()]
    assert job.blamed == (Exit.NODE_LOST, None, 0)


# Preparations that fail


@pytest.mark.parametrize(
    ("text", "facts", "words"),
    [
        (TWO.replace("gloo", "nccl"), 0, "nccl needs a GPU for each worker, but a has 0 GPUs for 2 workers"),
        (f"{TWO}\nmaster_addr: 127.0.0.1", 0, "127.0.0.1 is a loopback address"),
    ],
    ids=["GPUs are missing", "loopback"],
)
def test_a_plan_that_is_impossible_on_these_nodes_ends_the_job(text: str, facts: int, words: str) -> None:
    job = History(text)
    actions = job.feed(up(0, facts), up(1, facts))
    assert words in texts(actions, "error")[0]
    assert wanted(actions) == [Close(0, STOP_S), Close(1, STOP_S)]
    assert job.close() == [Finish()]
    assert job.blamed == (Exit.USAGE, None, None)


@pytest.mark.parametrize(
    ("event", "status", "node", "words"),
    [
        pytest.param(
            PortRefused(0, "Address already in use", ({"uid": 0, "pid": 42, "command": "redis"},)),
            Exit.PORT_TAKEN,
            0,
            "can't use port 29555 on a: in use by redis (pid 42); leave out the port to get a free one",
            id="port held by a program",
        ),
        pytest.param(
            PortRefused(0, "Address already in use", ({"uid": 1007, "pid": None, "command": None},)),
            Exit.PORT_TAKEN,
            0,
            "in use by a process of uid 1007",
            id="port held by another user",
        ),
        pytest.param(
            PortRefused(0, "Address already in use", ()),
            Exit.PORT_TAKEN,
            0,
            "in use by a process that is not listening on it",
            id="port held by nobody that shows",
        ),
        pytest.param(
            RouteFailed(1, MASTER, "Name or service not known"),
            Exit.USAGE,
            1,
            f"b can't reach MASTER_ADDR {MASTER}: Name or service not known; set nodes[0].address to an",
            id="no route",
        ),
        pytest.param(lost(1), Exit.NODE_LOST, 1, "b was lost: Connection reset by peer", id="node lost"),
        pytest.param(
            AgentLeaving(1, signal.SIGTERM),
            Exit.NODE_LOST,
            1,
            "b was lost: its agent was stopped by",
            id="leaving",
        ),
        pytest.param(
            AgentLeaving(1, signal.SIGTERM, orphaned=True),
            Exit.NODE_LOST,
            1,
            "b was lost: its agent's guardian process was killed",
            id="leaving without its guardian",
        ),
        pytest.param(
            AgentLeaving(1, 0),
            Exit.NODE_LOST,
            1,
            "b was lost: the connection to its agent was closed on the way",
            id="leaving at the end of its input",
        ),
        pytest.param(
            AgentLeaving(1, 0, damage="unknown frame kind 97"),
            Exit.NODE_LOST,
            1,
            "b was lost: the data sent to its agent was altered on the way (unknown frame kind 97)",
            id="leaving as its input is damaged",
        ),
    ],
)
def test_a_preparation_that_fails_ends_the_job_before_any_worker_starts(
    event: Event, status: int, node: int, words: str
) -> None:
    job = History(f"{TWO}\nmaster_port: 29555").to_preparing()
    assert words in texts(job.feed(event), "error")[0]
    assert isinstance(job.close()[-1], Finish)
    assert job.blamed == (status, None, node)
    assert not job.actions.of(StartWorkers)


def test_when_no_port_was_asked_for_none_is_named_and_leaving_it_out_is_no_advice() -> None:
    job = History().to_preparing()
    (words,) = texts(job.feed(PortRefused(0, "Cannot assign requested address", ())), "error")
    assert "None" not in words
    assert "leave the port out" not in words


def test_a_node_that_does_not_answer_while_preparing_is_named() -> None:
    job = History().to_preparing()
    job.feed(PortHeld(0, 29400))
    assert f"no answer from a, b within {CONNECT_S:g} s (timeouts.connect)" in texts(job.tick())
    assert job.now == 1000.0 + CONNECT_S
    assert job.blamed[0] == Exit.UNREACHABLE


# Workers


def test_when_all_workers_succeed_the_job_does() -> None:
    job = History().to_running()
    ranks = [(0, 0), (0, 1), (1, 0), (1, 1)]
    for node, local_rank in ranks[:-1]:
        assert job.feed(exited(node, local_rank, 0, job.now)) == []
    assert job.feed(exited(1, 1, 0, job.now)) == [Close(0, 0.0), Close(1, 0.0)]
    assert job.close() == [Finish()]
    assert job.blamed == (Exit.OK, None, None)
    assert not any(worker.stopped for worker in job.state.workers)


@pytest.mark.parametrize(
    ("status", "outcome", "words"),
    [
        (1, 1, "rank 2 (b) failed first: exit status 1"),
        (7, 7, "rank 2 (b) failed first: exit status 7"),
        (255, 255, "rank 2 (b) failed first: exit status 255"),
        (-signal.SIGKILL, 137, BY_SOMEONE),
        (-signal.SIGSEGV, 139, "rank 2 (b) failed first: killed by signal 11 (SIGSEGV)"),
        (-signal.SIGTERM, 143, "rank 2 (b) failed first: killed by signal 15 (SIGTERM)"),
        (-40, 168, "rank 2 (b) failed first: killed by signal 40"),
    ],
)
def test_the_first_failure_ends_the_job_with_its_status(status: int, outcome: int, words: str) -> None:
    job = History().to_running()
    actions = job.feed(exited(1, 0, status, job.now))
    assert texts(actions, "error") == [words]
    assert wanted(actions) == [Close(0, STOP_S), Close(1, STOP_S)]
    assert job.close() == [Finish()]
    assert job.blamed == (outcome, 2, 1)


T = 1000.0  # when every history begins


@pytest.mark.parametrize(
    ("events", "blamed"),
    [
        pytest.param(
            [exited(0, 1, 7, T), exited(0, 0, -15, T + 1), exited(1, 0, -15, T + 1), exited(1, 1, 1, T + 2)],
            (7, 1, 0),
            id="who was stopped afterwards is not blamed",
        ),
        pytest.param(
            [exited(0, 0, 1, T + 2), exited(1, 0, 7, T + 1)],
            (7, 2, 1),
            id="an earlier exit that came later is",
        ),
        pytest.param(
            [exited(0, 0, 1, T + 3), exited(1, 0, 7, T + 2), exited(1, 1, -11, T + 1)],
            (139, 3, 1),
            id="the earliest of three",
        ),
        pytest.param(
            [exited(0, 0, 1, T + 2), exited(1, 0, 7, T + 2)], (1, 0, 0), id="at the same time: who came first"
        ),
        pytest.param(
            [exited(0, 0, 1, T + 2), exited(1, 0, 0, T + 1)], (1, 0, 0), id="an earlier success is no cause"
        ),
        pytest.param([exited(0, 0, 1, T), exited(0, 0, 9, T - 1)], (1, 0, 0), id="a rank ends once"),
        pytest.param([exited(0, 0, 0, T), exited(1, 0, 3, T)], (3, 2, 1), id="after a success"),
        pytest.param([lost(1), exited(0, 0, 1, T - 1)], (71, None, 1), id="a lost node stays the cause"),
        pytest.param([exited(0, 0, 1, T), lost(1)], (1, 0, 0), id="a node lost afterwards does not"),
        pytest.param([lost(0), lost(1)], (71, None, 0), id="the first node lost"),
        pytest.param(
            [Interrupted(signal.SIGTERM), exited(0, 0, -15, T - 1)], (143, None, None), id="a signal stays"
        ),
        pytest.param(
            [AgentLeaving(1, signal.SIGTERM), Interrupted(signal.SIGTERM)],
            (143, None, None),
            id="a signal to all that reaches an agent first",
        ),
        pytest.param(
            [AgentLeaving(1, signal.SIGTERM), Interrupted(signal.SIGINT)],
            (71, None, 1),
            id="a signal of another kind",
        ),
        pytest.param(
            [
                WorkerUnstarted(0, 0, "exec", errno.ENOENT, "x"),
                WorkerUnstarted(1, 0, "exec", errno.EACCES, "x"),
            ],
            (127, 0, 0),
            id="the first that could not be started",
        ),
        pytest.param(
            [exited(0, 0, 1, T), WorkerUnstarted(1, 0, "exec", errno.ENOENT, "x")],
            (1, 0, 0),
            id="a start that fails afterwards",
        ),
        pytest.param(
            [AgentLeaving(1, signal.SIGTERM), exited(1, 0, -15, T), lost(1)],
            (71, None, 1),
            id="an agent that is stopped takes its workers with it",
        ),
        pytest.param(
            [exited(0, 0, 1, T), AgentLeaving(1, signal.SIGTERM)], (1, 0, 0), id="leaving afterwards"
        ),
        pytest.param([exited(0, 0, 1, T), PortRefused(0, "late", ())], (1, 0, 0), id="a late refusal"),
        pytest.param([exited(0, 0, 1, T), RouteFailed(1, MASTER, "late")], (1, 0, 0), id="a late route"),
    ],
)
def test_the_first_cause_is_the_one_that_is_blamed(
    events: list[Event], blamed: tuple[int, int | None, int | None]
) -> None:
    job = History().to_running()
    job.feed(*events)
    job.close()
    assert isinstance(job.actions[-1], Finish)
    assert job.blamed == blamed


def test_every_node_is_told_to_close_once_however_many_failures_follow() -> None:
    job = History().to_stopping()
    job.feed(exited(0, 1, 1, job.now), exited(1, 0, -6, job.now))
    job.feed(WorkerUnstarted(1, 1, "exec", errno.ENOENT, "x"))
    assert job.actions.of(Close) == [Close(0, STOP_S), Close(1, STOP_S)]
    assert len(texts(job.actions, "error")) == 1


def test_who_was_stopped_is_told_from_who_failed_by_itself() -> None:
    job = History().to_running()
    job.feed(exited(0, 0, 1, T + 5), exited(0, 1, -15, T + 6), exited(1, 0, 7, T + 4))
    assert [worker.stopped for worker in job.state.workers] == [False, True, False, False]
    assert [worker.phase_word for worker in job.state.workers] == [*["exited"] * 3, "running"]


def test_torchs_error_record_is_kept_with_its_rank() -> None:
    job = History().to_running()
    job.feed(WorkerExited(1, 1, 1, job.now, {"message": "boom"}))
    exited_so = job.state.workers[3].phase
    assert isinstance(exited_so, Exited)
    assert exited_so.error_record == {"message": "boom"}


@pytest.mark.parametrize(
    ("code", "status"),
    [(errno.ENOENT, 127), (errno.EACCES, 126), (errno.ENOEXEC, 126), (errno.EAGAIN, 126), (errno.E2BIG, 126)],
    ids=lambda code: errno.errorcode.get(code, str(code)),
)
def test_a_worker_that_could_not_be_started_ends_the_job_as_shells_have_it(code: int, status: int) -> None:
    job = History().to_running()
    (words,) = texts(job.feed(WorkerUnstarted(1, 1, "exec", code, "./a.out: why")), "error")
    assert words == "rank 3 (b) could not be started: ./a.out: why"
    job.close()
    assert job.blamed == (status, 3, 1)
    assert job.state.workers[3].phase_word == "not started"


def test_a_lost_node_takes_its_running_workers_with_it() -> None:
    job = History().to_running()
    job.feed(exited(1, 0, 0, job.now))
    actions = job.feed(lost(1, "a\nTimeout, server b not responding."))
    assert texts(actions, "error")[0].startswith("b was lost: ")
    assert wanted(actions) == [Close(0, STOP_S)]
    assert [worker.phase_word for worker in job.state.workers] == [
        *["running"] * 2,
        "exited",
        "lost with its node",
    ]
    assert job.close() == [Finish()]


def test_a_local_rank_that_the_plan_does_not_have_is_ignored() -> None:
    job = History().to_running()
    before = job.state
    for local_rank in (-1, 2, 70000):
        job.feed(
            WorkerStarted(0, local_rank, 1),
            exited(0, local_rank, 1, job.now),
            WorkerUnstarted(0, local_rank, "exec", 2, "x"),
            RanksJoined(0, (local_rank,)),
        )
    assert job.state == before


def test_lost_output_and_processes_that_can_not_be_killed_are_told() -> None:
    job = History().to_running()
    assert texts(job.feed(OutputLost(1, 0, 1, 4096)), "warning") == [
        "4096 bytes of rank 2's stderr were lost: its node had no room to buffer them"
    ]
    assert texts(job.feed(Stuck(1, ({"pid": 7, "command": "cp"},))), "warning") == [
        "b: 1 process resists SIGKILL: cp (pid 7)"
    ]


# The end of nodes


def test_left_over_processes_of_a_job_that_succeeded_are_told() -> None:
    job = History(f"{JOB}nodes: [a]").to_running()
    job.feed(exited(0, 0, 0, job.now), exited(0, 1, 0, job.now))
    assert texts(job.feed(Swept(0, 0, 3)), "warning") == ["a: killed 3 processes that outlived their workers"]


def test_left_over_processes_of_a_job_that_failed_are_no_news() -> None:
    assert History().to_stopping().feed(Swept(0, 0, 3)) == []


def test_a_node_that_ends_without_confirming_its_clean_up_is_told_and_changes_no_status() -> None:
    job = History().to_stopping()
    assert texts(job.feed(lost(1)), "warning") == ["b: its agent exited before confirming its cleanup"]
    assert job.feed(Swept(0, 0, 0), lost(0)) == [Finish()]
    assert job.blamed == (7, 0, 0)


def test_workers_that_take_long_to_end_are_named_once() -> None:
    job = History().to_running()
    job.feed(exited(0, 0, 7, job.now), exited(1, 0, -15, job.now))
    (waiting,) = texts(job.tick())
    assert waiting == "waiting for rank 1 (a, pid 101), rank 3 (b, pid 101) to exit; SIGKILL in 7 s"
    assert job.now == 1003.0
    job.close()
    assert len(job.actions.of(ShowMessage)) == 2  # that, and the cause


def test_nobody_waits_for_workers_that_are_killed() -> None:
    job = History().to_running()
    job.feed(Interrupted(signal.SIGTERM))
    job.feed(Interrupted(signal.SIGTERM), after=1.0)
    assert not any("waiting" in text for text in texts(job.tick()))


def test_nodes_that_do_not_confirm_are_given_up_after_grace_and_margin() -> None:
    job = History().to_stopping()
    job.feed(Swept(0, 0, 0), lost(0), after=1.0)
    assert job.wait(STOP_S + STOP_MARGIN_S - 1.1) == []
    actions = job.wait(0.1)
    assert wanted(actions) == [Drop(1), Finish()]
    assert texts(actions, "warning") == ["gave up on b: it did not confirm its cleanup"]
    assert isinstance(job.state.nodes[1], Lost)


def test_a_clean_node_may_take_longer_to_deliver_its_output_but_not_for_ever() -> None:
    job = History().to_stopping()
    job.feed(Swept(0, 0, 0), Swept(1, 0, 0), lost(0), after=20.0)
    assert job.wait(DRAIN_S - 0.1) == []
    assert job.feed(OutputFlows(1)) == []
    assert job.wait(DRAIN_S - 0.1) == []
    actions = job.wait(0.1)
    assert wanted(actions) == [Drop(1), Finish()]
    assert texts(actions, "warning") == ["gave up on b: its output is incomplete"]


def test_a_clean_node_has_its_time_when_the_last_other_node_is_lost() -> None:
    job = History().to_stopping()
    job.feed(Swept(0, 0, 0), after=1.0)
    job.feed(lost(1), after=STOP_S + STOP_MARGIN_S - 2.0)
    assert wanted(job.wait(2.0)) == []
    assert job.feed(lost(0)) == [Finish()]


# Interrupts


@pytest.mark.parametrize(
    ("torchrun", "way"), [(False, "`distlaunch run --detach`"), (True, "nohup or in tmux")]
)
def test_ctrl_z_is_answered_with_what_frees_the_terminal(torchrun: bool, way: str) -> None:
    job = History().to_running()
    invocation = job.state.spec.invocation._replace(shares_stdio=torchrun)
    job.state = job.state._replace(spec=job.state.spec._replace(invocation=invocation))
    said = texts(job.feed(Interrupted(signal.SIGTSTP)), "warning")
    assert said == [f"a run can't be suspended; to free the terminal, start it with {way}"]


SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("signum", SIGNALS, ids=lambda signum: signum.name)
def test_one_signal_ends_the_job_gracefully_in_every_phase(phase: str, signum: signal.Signals) -> None:
    job = job_in(phase)
    actions = job.feed(Interrupted(signum))
    assert texts(actions, "error") == [f"stopped by {signum.name}"]
    if phase == "connecting":
        assert wanted(actions) == [Drop(0), Drop(1), Finish()]
    else:
        assert wanted(actions) == [Close(0, STOP_S), Close(1, STOP_S)]
        assert job.close() == [Finish()]
    assert job.blamed == (128 + signum, None, None)


@pytest.mark.parametrize("phase", ["preparing", "running"])
def test_two_signals_kill_and_three_leave(phase: str) -> None:
    job = job_in(phase)
    job.feed(Interrupted(signal.SIGINT), after=1.0)
    assert wanted(job.feed(Interrupted(signal.SIGTERM), after=1.0)) == [Close(0, 0.0), Close(1, 0.0)]
    assert job.feed(Interrupted(signal.SIGINT), after=1.0) == [
        ShowMessage("warning", "exited; agents are still cleaning up"),
        Finish(),
    ]
    assert job.blamed == (130, None, None)
    assert job.feed(Interrupted(signal.SIGINT), Swept(0, 0, 0), lost(0)) + job.wait() == []


def test_signals_that_come_at_once_are_one_wish() -> None:
    job = job_in("running")
    job.feed(Interrupted(signal.SIGINT))
    assert job.feed(Interrupted(signal.SIGINT), after=0.02) == []
    assert job.feed(Interrupted(signal.SIGTERM), after=0.07) == []
    assert wanted(job.feed(Interrupted(signal.SIGINT), after=0.02)) == [Close(0, 0.0), Close(1, 0.0)]


@pytest.mark.parametrize(("name", "reaches"), [("SIGUSR1", "SIGUSR1"), ("SIGINT", "SIGTERM")])
def test_signals_that_are_named_reach_the_workers_as_they_are(name: str, reaches: str) -> None:
    job = job_in("running")
    invocation = Invocation(signals=("SIGUSR1", "SIGTERM"))
    job.state = job.state._replace(spec=job.state.spec._replace(invocation=invocation))
    actions = job.feed(Interrupted(signal.Signals[name]))
    assert wanted(actions) == [Close(node, STOP_S, signal.Signals[reaches]) for node in range(2)]


def test_a_signal_while_the_job_ends_by_itself_changes_no_status() -> None:
    job = History().to_stopping()
    assert wanted(job.feed(Interrupted(signal.SIGINT), after=1.0)) == []
    assert wanted(job.feed(Interrupted(signal.SIGINT), after=1.0)) == [Close(0, 0.0), Close(1, 0.0)]
    assert wanted(job.feed(Interrupted(signal.SIGINT), after=1.0)) == [Finish()]
    assert job.blamed == (7, 0, 0)


def test_a_signal_while_a_retry_waits_ends_the_job() -> None:
    job = History(f"{JOB}nodes: [a]")
    job.feed(lost(0, "Connection closed", Kind.DROPPED))
    assert wanted(job.feed(Interrupted(signal.SIGINT), after=1.0)) == [Drop(0), Finish()]


def test_a_node_that_connects_after_the_signal_is_not_used() -> None:
    job = History()
    job.feed(up(0), Interrupted(signal.SIGINT))
    assert job.feed(up(1)) == []
    assert job.close() == [Finish()]


# Time limits


@pytest.mark.parametrize("phase", PHASES)
def test_the_jobs_time_limit_holds_in_every_phase(phase: str) -> None:
    job = job_in(phase, TWO.replace("stop: 10s", "stop: 10s, job: 20s"))
    job.wait(19.9)
    assert job.state.cause is None
    assert texts(job.wait(0.1), "error") == ["the job timed out after 20 s (timeouts.job)"]
    job.close()
    assert job.blamed == (Exit.TIMEOUT, None, None)


def test_a_job_that_is_ending_has_no_time_limit_but_that_of_its_end() -> None:
    job = History(TWO.replace("stop: 10s", "stop: 10s, job: 20s")).to_stopping()
    ends_at = job.now + STOP_S + STOP_MARGIN_S
    job.tick()  # who has not ended is named
    assert job.state.next_due == ends_at
    job.wait(18.0)
    assert job.blamed == (7, 0, 0)


def test_ranks_that_do_not_join_are_named_ever_more_rarely_and_at_last_end_the_job() -> None:
    job = History().to_running()
    began = job.now
    job.feed(RanksJoined(0, (0, 1)), RanksJoined(1, (0,)), RanksLag(1, ((1, False, "stopped by a signal"),)))
    words = "3/4 ranks joined; waiting for rank 3 (b, pid 101: stopped by a signal)"
    told = {}
    while job.state.phase is Phase.RUNNING:
        said = job.tick()
        told[job.now - began] = texts(said)
    *notices, end = told
    assert notices == [15, 30, 60, 120, 240, 480]
    assert {tuple(told[at]) for at in notices} == {(words,)}
    assert (end, told[end]) == (600, [f"{words}; gave up after 10 min (timeouts.join)"])
    job.close()
    assert job.blamed == (Exit.TIMEOUT, None, None)


def test_a_rank_that_ended_instead_of_joining_is_named_with_its_status() -> None:
    job = History().to_running()
    job.feed(RanksJoined(0, (0, 1)), RanksJoined(1, (0,)), exited(1, 1, 0, job.now))
    assert texts(job.tick()) == [
        "3/4 ranks joined; waiting for rank 3 (b: exited with status 0 without joining)"
    ]


def test_a_rank_that_tries_to_join_shows_that_the_job_uses_the_rendezvous() -> None:
    job = History().to_running()
    job.feed(RanksLag(1, ((0, True, "no answer from the rendezvous"),)))
    (words,) = texts(job.tick())
    assert words.startswith("0/4 ranks joined; waiting for ")
    assert "rank 2 (b, pid 100: no answer from the rendezvous)" in words


def test_once_all_have_joined_the_time_to_join_is_over() -> None:
    job = History().to_running()
    assert job.feed(RanksJoined(0, (0, 1))) == []
    said = job.feed(RanksJoined(1, (0, 1)), after=1.5)
    assert texts(said, "info") == [f"all 4 ranks joined the rendezvous at {MASTER}:29400 in 1.5 s"]
    assert job.feed(RanksJoined(1, (0, 1))) == []
    assert job.state.next_due is None


def test_a_job_that_does_not_use_the_rendezvous_is_left_alone_but_not_without_a_word() -> None:
    job = History().to_running()
    job.feed(RanksLag(0, ((0, False, "torch imported, busy"), (1, False, "has not imported torch yet"))))
    (words,) = texts(job.tick(), "info")
    assert words.startswith(
        "0/4 ranks joined; waiting for rank 0 (a, pid 100: torch imported, busy), rank 1 ("
    )
    assert words.endswith("; ignore this if the script does not use MASTER_ADDR and MASTER_PORT")
    for _ in range(20):
        assert job.tick() == []
    assert job.state.phase is Phase.RUNNING


def test_a_lone_rank_that_does_not_use_the_rendezvous_is_no_news() -> None:
    job = History("script: t.py\nbackend: gloo\ngpus_per_node: 0").to_running()
    for _ in range(20):
        assert job.tick() == []


REFUSED = "connection to the rendezvous refused"


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(RanksLag(0, ((0, False, "torch imported, idle"),)), id="rank 0 is elsewhere"),
        pytest.param(exited(0, 0, 0, 1000.0), id="rank 0 has ended"),
    ],
)
def test_ranks_that_are_refused_wait_for_rank_0_which_ends_the_job(first: Event) -> None:
    job = History().to_running()
    job.feed(first, RanksLag(0, ((1, True, REFUSED),)), RanksLag(1, ((0, True, REFUSED), (1, True, REFUSED))))
    (words,) = texts(job.tick())
    assert words.startswith("0/4 ranks joined; waiting for rank 0 (a")
    assert words.endswith(f"rank 3 (b, pid 101: {REFUSED}); the others are waiting for rank 0")
    while job.state.phase is Phase.RUNNING:
        (said,) = texts(job.tick())
    assert said == f"{words}; gave up after 10 min (timeouts.join)"
    assert job.now == 1000.0 + 600.0
    assert job.blamed == (Exit.TIMEOUT, None, None)


def test_the_default_limit_counts_from_when_the_first_rank_tries() -> None:
    job = History().to_running()
    job.feed(RanksLag(1, ((0, True, REFUSED),)), after=5000.0)  # the data was prepared before
    while job.state.phase is Phase.RUNNING:
        job.tick()
    assert job.now == 1000.0 + 5000.0 + 600.0


def test_a_limit_that_the_file_gives_counts_whatever_the_ranks_look_like() -> None:
    job = History(f"{JOB.replace('stop: 10s', 'stop: 10s, join: 20s')}nodes: [a, b]").to_running()
    job.tick()
    (words,) = texts(job.tick(), "error")
    assert job.now == 1000.0 + 20.0
    assert words.startswith("0/4 ranks joined; waiting for rank 0 (a, pid 100), rank 1 (a, pid 101), ")
    assert words.endswith(
        "; gave up after 20 s (timeouts.join); "
        "if the script does not use MASTER_ADDR and MASTER_PORT, set timeouts: {join: none}"
    )
    assert job.blamed == (Exit.TIMEOUT, None, None)


def test_where_nobody_has_joined_the_place_is_told() -> None:
    job = History().to_running()
    job.feed(RanksLag(0, ((0, True, REFUSED),)), RanksLag(1, ((0, True, REFUSED),)))
    (words,) = texts(job.tick())
    assert words.endswith(f"; the rendezvous is at {MASTER}:29400")


def test_an_address_that_is_not_rank_0s_is_told_at_the_start() -> None:
    job = History().to_preparing()
    job.feed(PortHeld(0, 29400), RouteFound(1, MASTER, MASTER, "eth0", "10.0.0.2"))
    (words,) = texts(job.feed(RouteFound(0, MASTER, MASTER, "eth1", "10.0.0.7")), "warning")
    assert words == (
        f"MASTER_ADDR {MASTER} is not an address of a, where rank 0 runs; "
        "no rank can join unless it is forwarded to 10.0.0.7"
    )
    job = History().to_preparing()
    job.feed(PortHeld(0, 29400), RouteFound(1, MASTER, MASTER, "eth0", "10.0.0.2"))
    assert texts(job.feed(RouteFound(0, MASTER, MASTER, "lo", MASTER))) == []


def test_without_a_limit_nobody_is_waited_for() -> None:
    job = History(f"{JOB.replace('stop: 10s', 'stop: 10s, join: none')}nodes: [a, b]").to_running()
    job.feed(RanksLag(1, ((0, True, REFUSED),)))
    assert job.state.next_due is None


# Who is blamed: a rank that lost its peer may end before the one that it lost


OWN = 'Traceback (most recent call last):\n  File "/t.py", line 7, in <module>\nValueError: bad\n'


TIMED_OUT = PEER_GONE.replace("Connection closed by peer", "Timed out waiting 12000ms for send operation")


def victim(node: int, local_rank: int, at: float, status: int = 1) -> WorkerExited:
    """A rank that ends because another one was gone."""
    return WorkerExited(node, local_rank, status, at, words=PEER_GONE)


def failed(node: int, local_rank: int, at: float, status: int = 1, words: str = OWN) -> WorkerExited:
    """A rank that ends with an error of its own."""
    return WorkerExited(node, local_rank, status, at, words=words)


def test_a_rank_that_lost_its_peer_is_not_blamed_before_the_others_had_a_moment() -> None:
    job = History().to_running()
    assert job.feed(victim(0, 0, T)) == []
    assert job.state.next_due == T + 1.0
    (words,) = texts(job.feed(failed(1, 1, T + 0.4), after=0.4), "error")
    assert words == "rank 3 (b) failed first: exit status 1"
    assert job.blamed == (1, 3, 1)


@pytest.mark.parametrize(
    ("events", "blamed"),
    [
        pytest.param(
            [victim(0, 0, T), failed(0, 1, T + 0.5, 7, "")], (7, 1, 0), id="sys.exit without a word"
        ),
        pytest.param([victim(0, 0, T), failed(0, 1, T + 0.5, -9, "")], (137, 1, 0), id="killed"),
        pytest.param([victim(0, 0, T), lost(1)], (71, None, 1), id="a lost node"),
        pytest.param(
            [victim(0, 0, T), AgentLeaving(1, signal.SIGTERM)], (71, None, 1), id="an agent that is stopped"
        ),
        pytest.param(
            [victim(0, 0, T), victim(1, 0, T - 1), failed(1, 1, T + 0.5)], (1, 3, 1), id="two victims before"
        ),
        pytest.param([failed(0, 0, T), victim(1, 0, T - 1)], (1, 0, 0), id="a victim that was earlier"),
        pytest.param(
            [victim(0, 0, T), Interrupted(signal.SIGINT)], (1, 0, 0), id="nobody waits once the user is there"
        ),
        pytest.param(
            [victim(0, 0, T), Interrupted(signal.SIGINT), failed(1, 0, T + 1, -15)],
            (1, 2, 1),
            id="a traceback that was out before the rank was stopped",
        ),
        pytest.param(
            [victim(0, 0, T), Interrupted(signal.SIGINT), failed(1, 0, T + 1, -15, PEER_GONE)],
            (1, 0, 0),
            id="another victim that was stopped",
        ),
        pytest.param(
            [victim(0, 0, T), Interrupted(signal.SIGINT), failed(1, 0, T + 1, 3, "")],
            (1, 0, 0),
            id="who ends otherwise after it was stopped",
        ),
        pytest.param(
            [victim(0, 0, T), Interrupted(signal.SIGINT), failed(1, 0, T - 1, 3, "")],
            (3, 2, 1),
            id="who had ended before it was stopped",
        ),
        pytest.param(
            [victim(0, 0, T), victim(0, 1, T + 0.1), victim(1, 0, T + 0.2), victim(1, 1, T + 0.3)],
            (1, 0, 0),
            id="nobody is left to wait for",
        ),
        pytest.param(
            [victim(0, 0, T), failed(0, 1, T + 0.1), failed(1, 0, T)], (1, 2, 1), id="the first by itself"
        ),
        pytest.param([failed(0, 0, T, -11, PEER_GONE)], (139, 0, 0), id="no exception ends with SIGSEGV"),
    ],
)
def test_who_failed_by_itself_is_blamed_before_who_lost_a_peer(
    events: list[Event], blamed: tuple[int, int | None, int | None]
) -> None:
    job = History().to_running()
    job.feed(*events)
    assert job.state.phase is Phase.STOPPING
    job.close()
    assert job.blamed == blamed


def test_when_no_other_rank_fails_in_a_second_the_first_that_lost_its_peer_is_blamed() -> None:
    job = History().to_running()
    job.feed(victim(0, 0, T), victim(1, 0, T + 0.1), exited(1, 1, 0, T + 0.2))
    (words,) = texts(job.tick(), "error")
    assert job.now == T + 1.0
    assert words == (
        "rank 0 (a) failed first: exit status 1, after losing the connection to another rank; "
        "rank 3 had already exited with status 0 (uneven batches?)"
    )
    assert job.blamed == (1, 0, 0)


def test_who_was_waited_for_until_time_was_up_is_named() -> None:
    job = History().to_running()
    job.feed(failed(0, 0, T, 1, TIMED_OUT), failed(0, 1, T, 1, TIMED_OUT), victim(1, 0, T + 0.1))
    (words,) = texts(job.tick(), "error")
    assert words == (
        "rank 0 (a) failed first: exit status 1, after timing out while waiting for another rank; "
        "rank 3 had not failed (stalled, or in another collective?)"
    )


def test_nobody_is_named_where_most_ranks_still_run() -> None:
    job = History().to_running()
    job.feed(failed(0, 0, T, 1, TIMED_OUT))
    (words,) = texts(job.tick(), "error")
    assert words.endswith("while waiting for another rank")


def test_a_rank_that_ended_before_it_joined_left_no_uneven_batches() -> None:
    job = History().to_running()
    job.feed(exited(0, 1, 0, T), RanksJoined(0, (0,)), failed(1, 0, T, 1, TIMED_OUT))
    (words,) = texts(job.tick(), "error")
    assert words.endswith("rank 1 had already exited with status 0 without joining the rendezvous")


def test_a_restart_blames_who_failed_by_itself_too() -> None:
    job = History(f"{TWO}\nrestarts: {{max: 1}}").to_running()
    assert job.feed(victim(0, 0, T)) == []
    job.tick()
    assert job.state.phase is Phase.RESTARTING
    job.feed(failed(1, 0, T + 1.1, -15))
    assert [restart.cause.rank for restart in job.state.restarts] == [2]


# Ranks that stall


def stalled(on_stall: str, limit: str = "10m") -> History:
    """Rank 1 of four has stalled for the time that counts, which is not told yet."""
    times = JOB.replace("stop: 10s", f"stop: 10s, stall: {limit}")
    job = History(f"{times}nodes: [a, b]\non_stall: {on_stall}\nrestarts: {{max: 1}}").to_running()
    job.feed(RanksJoined(0, (0, 1)), RanksJoined(1, (0, 1)), RanksLag(0, ((1, False, "stale words"),)))
    assert job.feed(RanksStalled(0, (1,)), after=700.0) == []
    return job


def stack(node: int, local_rank: int, *frames: str) -> StackDumped:
    """As py-spy prints it."""
    lines = "".join(f"    {frame}\n" for frame in frames)
    return StackDumped(
        node,
        local_rank,
        f"Process 7: python\n\nThread 7 (idle): MainThread\n{lines}Thread 8 (idle): x\n    y\n",
    )


def test_a_stall_is_told_with_who_is_stalled_and_who_is_active_and_stacks_are_dumped() -> None:
    job = stalled("warn")
    said = job.tick()
    assert texts(said, "warning") == [
        "stalled: rank 1 (a, pid 101): no output, CPU or GPU use for 10 min; ranks 0, 2, 3 are still active"
    ]
    assert wanted(said) == [DumpStacks(0, (1,), abort=False)]
    assert texts(job.feed(RanksStalled(0, ()))) == ["stalled ranks resumed"]
    assert job.state.next_due is None


def test_a_stall_that_spreads_after_it_was_told_is_told_again() -> None:
    job = stalled("warn")
    job.tick()
    assert job.feed(RanksStalled(1, (0, 1)), after=20.0) == []
    said = job.tick()
    (words,) = texts(said)
    assert words.startswith("now stalled: rank 1 (a, pid 101), rank 2 (b, pid 100), rank 3 (b, pid 101): ")
    assert words.endswith("; rank 0 is still active")
    assert job.feed(RanksStalled(1, (1,))) == []
    assert job.state.next_due is None


@pytest.mark.parametrize(("limit", "settles_s"), [("8s", 3.0), ("20s", 4.5), ("10m", 17.0)])
def test_agents_that_look_at_different_times_are_waited_for(limit: str, settles_s: float) -> None:
    job = stalled("warn", limit)
    since = job.now
    job.tick()
    assert job.now - since == settles_s


def test_a_stall_that_is_over_before_it_is_told_is_no_news() -> None:
    job = stalled("stop")
    assert job.feed(RanksStalled(0, ()), after=1.0) == []
    assert job.state.next_due is None


def test_a_stall_may_stop_the_job() -> None:
    job = stalled("stop")
    assert wanted(job.tick()) == [DumpStacks(0, (1,), abort=True)]
    assert wanted(job.tick()) == [Close(0, 10.0), Close(1, 10.0)]
    assert job.blamed == (Exit.TIMEOUT, 1, 0)


def test_a_stall_may_restart_the_job() -> None:
    job = stalled("restart")
    job.tick()
    assert wanted(job.tick()) == [StopWorkers(0, 10.0), StopWorkers(1, 10.0)]
    assert job.state.phase is Phase.RESTARTING


def test_a_rank_that_dies_of_the_dump_of_its_stacks_is_blamed_for_the_stall() -> None:
    job = stalled("stop")
    job.tick()
    (words,) = texts(job.feed(exited(0, 1, -signal.SIGABRT, job.now)), "error")
    assert words == "rank 1 (a) stalled for 10 min"


ABORTED = """Fatal Python error: Aborted

Thread 0x00007f0a (most recent call first):
  File "/v/lib/python3.11/threading.py", line 324 in wait

Current thread 0x00007f0b (most recent call first):
{}
Extension modules: numpy._core._multiarray_umath (total: 1)
"""
"""What Python prints of SIGABRT under PYTHONFAULTHANDLER."""


def aborted(node: int, local_rank: int, *frames: str) -> WorkerExited:
    """A rank that has died of its dump."""
    lines = "".join(f'  File "{frame}\n' for frame in frames)
    return WorkerExited(node, local_rank, -signal.SIGABRT, T, words=ABORTED.format(lines))


def test_stacks_that_ranks_die_of_tell_who_is_at_fault() -> None:
    job = stalled("stop")
    job.feed(RanksStalled(0, (0, 1)), RanksStalled(1, (0,)))
    job.tick()
    waits = ('/v/torch/distributed/c10d.py", line 9 in all_reduce', '/j/t.py", line 5 in main')
    culprit = aborted(0, 1, '/j/t.py", line 3 in step')
    assert job.feed(aborted(0, 0, *waits), victim(1, 1, T + 0.1), culprit) == []
    (words,) = texts(job.feed(aborted(1, 0, *waits)), "error")
    assert words == ("rank 1 (a) stalled for 10 min in step (t.py:3); ranks 0, 2 are waiting in a collective")
    job.close()
    assert job.blamed == (Exit.TIMEOUT, 1, 0)
    assert [worker.stopped for worker in job.state.workers] == [True, True, True, False]


def test_who_has_died_of_its_dump_does_not_hold_the_others_up_for_ever() -> None:
    job = stalled("stop")
    job.feed(RanksStalled(0, (0, 1)))
    job.tick()
    job.feed(aborted(0, 0, '/j/t.py", line 5 in main'))
    (words,) = texts(job.tick(), "error")
    assert words.startswith("rank 0 (a), rank 1 (a) stalled for")


@pytest.mark.parametrize(
    ("event", "blamed"),
    [
        pytest.param(exited(1, 1, 7, T), (7, 3, 1), id="another rank"),
        pytest.param(exited(1, 1, -signal.SIGABRT, T), (134, 3, 1), id="another rank that aborts"),
        pytest.param(exited(0, 1, 9, T), (9, 1, 0), id="the stalled rank, by itself"),
    ],
)
def test_a_rank_that_fails_after_the_notice_has_not_died_of_the_dump(
    event: Event, blamed: tuple[int, int | None, int | None]
) -> None:
    job = stalled("stop")
    job.tick()
    job.feed(event)
    assert job.blamed == blamed


def test_a_rank_that_resumes_while_it_dies_of_its_dump_has_stalled_all_the_same() -> None:
    job = stalled("stop")
    job.tick()
    assert texts(job.feed(RanksStalled(0, ()))) == ["stalled ranks resumed"]
    (words,) = texts(job.feed(aborted(0, 1, '/j/t.py", line 3 in step')), "error")
    assert words.startswith("rank 1 (a) stalled for 10 min")
    assert job.blamed == (Exit.TIMEOUT, 1, 0)


IN_COLLECTIVE = (
    "wait (torch/distributed/c10d.py:1)",
    "all_reduce (torch/distributed/c10d.py:9)",
    "main (t.py:5)",
)
IN_BACKWARD = (
    "_engine_run_backward (torch/autograd/graph.py:824)",
    "backward (torch/_tensor.py:6)",
    "main (t.py:7)",
)
IN_RECORD = ("step (t.py:3)", "wrapper (torch/distributed/elastic/multiprocessing/errors/__init__.py:362)")


def all_stalled(*stacks: StackDumped) -> History:
    """All four ranks have stalled, with these stacks."""
    job = stalled("stop")
    job.feed(RanksStalled(0, (0, 1)), RanksStalled(1, (0, 1)))
    job.tick()
    job.feed(*stacks)
    job.tick()
    return job


def test_the_rank_that_is_not_in_the_collective_is_blamed_where_stacks_tell_it() -> None:
    job = all_stalled(
        stack(0, 0, *IN_COLLECTIVE),
        stack(0, 1, *IN_BACKWARD),
        stack(1, 0, *IN_RECORD),
        stack(1, 1, *IN_COLLECTIVE),
    )
    assert texts(job.actions, "error") == [
        "rank 2 (b) stalled for 10 min in step (t.py:3); ranks 0, 1, 3 are waiting in a collective"
    ]
    assert job.blamed == (Exit.TIMEOUT, 2, 1)


def test_ranks_that_stall_while_they_meet_are_sent_to_check_port() -> None:
    meeting = ("_new_group (torch/distributed/c10d.py:1)", "init_process_group (torch/distributed/c10d.py:9)")
    job = all_stalled(*(stack(node, rank, *meeting) for node in (0, 1) for rank in (0, 1)))
    (words,) = texts(job.actions, "error")
    assert words.endswith("init_process_group; `distlaunch check-port` tests the network")


def test_a_rank_that_has_not_started_is_named_without_a_pid() -> None:
    job = job_in("preparing", f"{JOB.replace('stop: 10s', 'stop: 10s, join: 0s')}nodes: [a, b]")
    job.feed(PortHeld(0, 29400), RouteFound(1, MASTER, MASTER, "eth0"))
    job.feed(RouteFound(0, MASTER, MASTER, "eth1"))
    (words,) = texts(job.tick(), "error")
    assert words.startswith("0/4 ranks joined; waiting for rank 0 (a, not started yet), ")


def test_limits_can_be_lifted_by_their_word() -> None:
    job = History(f"{JOB.replace('stop: 10s', 'stop: 10s, job: none')}nodes: [a, b]\nssh: {{persist: none}}")
    reach = job.state.spec.nodes[0].reach
    assert isinstance(reach, Ssh)
    assert (job.state.spec.timeouts.job_s, reach.options.persist_s) == (None, None)


@pytest.mark.parametrize(
    "stacks",
    [
        pytest.param([], id="no stacks"),
        pytest.param([stack(0, rank, *IN_COLLECTIVE) for rank in (0, 1)], id="all in collectives"),
        pytest.param([stack(0, rank, *IN_RECORD) for rank in (0, 1)], id="all elsewhere"),
    ],
)
def test_where_stacks_do_not_tell_it_nobody_is_singled_out(stacks: list[StackDumped]) -> None:
    job = all_stalled(*stacks)
    (words,) = texts(job.actions, "error")
    assert words == "rank 0 (a), rank 1 (a), rank 2 (b), rank 3 (b) stalled for 10 min"
    assert job.blamed == (Exit.TIMEOUT, None, None)


def test_where_a_rank_is_blocked_is_told_by_its_innermost_frames() -> None:
    job = stalled("warn")
    (words,) = texts(job.feed(stack(0, 1, "read (t.py:3)", "main (t.py:9)")))
    assert words == "rank 1 is blocked in: read (t.py:3) < main (t.py:9)"
    (words,) = texts(job.feed(StackDumped(0, 1, "Permission denied")))
    assert words == "no stack for rank 1: Permission denied"


def test_why_there_are_no_stacks_is_told_once_in_a_run() -> None:
    job = stalled("warn")
    why = "py-spy is not there"
    said = [texts(job.feed(StackDumped(node, rank, why))) for node, rank in ((0, 1), (0, 0), (1, 0))]
    assert said == [["no stack for rank 1: py-spy is not there"], [], []]


def test_a_rank_that_a_signal_has_stopped_is_told_so_and_blamed_before_those_that_wait_for_it() -> None:
    job = stalled("stop")
    job.feed(RanksStalled(0, (0, 1), ((1, 812),)))
    said = job.tick()
    (words,) = texts(said, "warning")
    stopped = "rank 1 (a, pid 101: stopped by a signal; `kill -CONT 812` resumes it)"
    assert words.startswith(f"stalled: rank 0 (a, pid 100), {stopped}: no output"), words
    assert wanted(said) == [DumpStacks(0, (0,), abort=True)]
    job.feed(stack(0, 0, *IN_COLLECTIVE))
    (words,) = texts(job.tick(), "error")
    assert words == "rank 1 (a) stalled for 10 min: stopped by a signal"
    assert job.blamed == (Exit.TIMEOUT, 1, 0)


# Reports out of turn: an agent may be broken, or not ours at all

EVENTS: list[Event] = [
    up(0),
    AgentLeaving(0, signal.SIGTERM),
    AgentLeaving(0, 9999),
    PortHeld(0, 29400),
    PortHeld(1, 29400),
    PortRefused(0, "why", ()),
    PortRefused(1, "why", ({},)),
    PortRefused(0, "why", ({"pid": 4},)),
    RouteFound(1, MASTER, MASTER, "eth0"),
    RouteFailed(0, MASTER, "why"),
    RouteFailed(1, MASTER, "why"),
    WorkerStarted(0, 1, 5),
    WorkerUnstarted(0, 1, "exec", 2, "why"),
    WorkerExited(0, 1, 0, T),
    RanksJoined(0, (0, 1, 9)),
    OutputLost(0, 9, 7, 1),
    Swept(0, 0, 1),
    Swept(0, 8, 1),
    Stuck(0, ({},)),
    TimerDue(Timer.JOIN),
    TimerDue(Timer.ANSWER, 1),
]


@pytest.mark.parametrize("phase", [*PHASES, "stopping"])
@pytest.mark.parametrize("event", EVENTS, ids=str)
def test_a_report_out_of_turn_is_no_crash(phase: str, event: Event) -> None:
    job = job_in(phase)
    job.feed(event)
    job.feed(Interrupted(signal.SIGINT))
    for _ in range(8):
        if job.state.phase is not Phase.DONE:
            job.tick()
    assert isinstance(job.actions[-1], Finish)


@pytest.mark.parametrize("event", EVENTS, ids=str)
def test_a_report_out_of_turn_starts_nothing_and_blames_nobody_else_once_the_job_ends(event: Event) -> None:
    job = History().to_stopping()
    cause = job.state.cause
    assert not job.feed(event).of(StartWorkers, Connect, Close)
    assert job.state.cause == cause


# Any history

_node = st.integers(0, 2)
_local_rank = st.integers(-1, 2)
_failures = st.builds(
    LinkFailure,
    st.sampled_from(Kind),
    st.sampled_from(["", "why", "a\nb"]),
    st.booleans(),
)
_mapping = st.sampled_from([{"uid": 5, "pid": 1, "command": "x"}, {"uid": 5, "pid": None, "command": None}])
_mappings = st.lists(_mapping, max_size=2).map(tuple)
_events = st.one_of(
    st.builds(up, _node, st.integers(0, 3)),
    st.builds(AgentLeaving, _node, st.sampled_from([1, 2, 15])),
    st.builds(LinkEnded, _node, _failures),
    st.builds(PortHeld, st.just(0), st.just(29400)),
    st.builds(PortRefused, st.just(0), st.just("why"), _mappings),
    st.builds(RouteFound, _node, st.just(MASTER), st.just(MASTER), st.sampled_from([None, "eth0"])),
    st.builds(RouteFailed, _node, st.just(MASTER), st.just("why")),
    st.builds(WorkerStarted, _node, _local_rank, st.integers(1, 9)),
    st.builds(WorkerUnstarted, _node, _local_rank, st.just("exec"), st.sampled_from([2, 13]), st.just("why")),
    st.builds(exited, _node, _local_rank, st.sampled_from([0, 0, 0, 1, 255, -9]), st.floats(0, 3 * T)),
    st.builds(RanksJoined, _node, st.lists(_local_rank, max_size=3).map(tuple)),
    st.builds(OutputLost, _node, _local_rank, st.integers(0, 1), st.integers(1, 9)),
    st.builds(Swept, _node, st.integers(0, 1), st.integers(0, 2)),
    st.builds(Stuck, _node, _mappings),
    st.builds(Interrupted, st.sampled_from(SIGNALS)),
    st.builds(TimerDue, st.sampled_from(Timer), st.none() | _node),
)
_phases = st.sampled_from([*PHASES, "stopping"])
_histories = st.lists(st.tuples(st.sampled_from([0.0, 0.3, 5.0, 40.0]), _events), max_size=25)
_jobs = st.sampled_from(
    [
        f"{JOB}nodes: [a, b, c]",
        f"{JOB}nodes: 3",
        f"{JOB}nodes: [a, b, c]".replace("stop: 10s", "stop: 0s, job: 60s, join: 7s"),
    ]
)


def check_step(before: State, actions: Actions, after: State) -> None:
    """What holds for every step of every history."""
    ended = before.phase in (Phase.STOPPING, Phase.DONE)
    assert not (ended and actions.of(StartWorkers, Connect))
    assert list(Phase).index(after.phase) >= list(Phase).index(before.phase)
    assert (after.outcome == 0) == (after.cause is None)
    assert len(actions.of(Finish)) == (after.phase is Phase.DONE and before.phase is not Phase.DONE)
    assert not actions.of(Finish) or isinstance(actions[-1], Finish)
    if ended and after.cause != before.cause:
        assert before.cause is not None
        assert after.cause is not None
        if before.cause.agent_signum is not None:  # the signal was for all, and an agent heard it before us
            assert after.cause.cancelled
        else:
            assert before.cause.rank is not None
            assert after.cause.at < before.cause.at
    if before.phase is Phase.DONE:
        assert (actions, after) == ([], before)


@given(_jobs, _phases, _histories)
@bounded(250)
def test_any_history_ends_once_with_its_first_cause_and_starts_nothing_afterwards(
    text: str, phase: str, history: list[tuple[float, Event]]
) -> None:
    job = job_in(phase, text)
    for wait_s, event in [*history, (0.0, Interrupted(signal.SIGTERM))]:
        before = job.state
        check_step(before, job.feed(event, after=wait_s), job.state)
    for _ in range(2 * len(job.state.nodes) + 2):
        if job.state.phase is not Phase.DONE:
            before, due = job.state, job.state.next_due
            assert due is not None
            check_step(before, job.tick(), job.state)
    assert job.state.phase is Phase.DONE
    assert len(job.actions.of(Finish)) == 1
    for node in range(3):
        assert job.actions.count_of(StartWorkers(node)) <= 1


@given(_jobs, _phases, _histories)
@bounded(120)
def test_a_timer_that_has_come_due_is_gone(text: str, phase: str, history: list[tuple[float, Event]]) -> None:
    job = job_in(phase, text)
    for wait_s, event in history:
        job.feed(event, after=wait_s)
        for _ in range(5):
            if alarm := job.state.alarm(job.now):
                job.feed(TimerDue(*alarm))
        due = None if job.state.phase is Phase.DONE else job.state.next_due
        assert due is None or due > job.now


# Words for statuses


def test_every_way_to_fail_is_a_failure_for_the_shell() -> None:
    for status in (*range(1, 256), *(-number for number in range(1, 65))):
        assert 0 < exit_status_of(status) < 256
        assert str(abs(status)) in status_words(status)
