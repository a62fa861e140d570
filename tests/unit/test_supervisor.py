"""The policy of a job as histories: what happened, and what the supervisor then wants, says and blames."""

import errno
import itertools
import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import Self

from distlaunch.agent.messages import (
    MAX_LACKS,
    AgentLeaving,
    Interrupted,
    OutputLost,
    PortHeld,
    PortRefused,
    PortUsurped,
    RanksJoined,
    RanksLag,
    RanksStalled,
    Reaped,
    RouteFailed,
    RouteFound,
    StackDumped,
    Stuck,
    Swept,
    TreeLacks,
    TreePlaced,
    TreeProgress,
    TreeRefused,
    WorkerExited,
    WorkerStarted,
    WorkerUnstarted,
)
from distlaunch.errors import Exit
from distlaunch.job.spec import Invocation, Tree
from distlaunch.plan.placement import Facts
from distlaunch.supervisor.actions import (
    AskScheduler,
    Connect,
    Drop,
    Finish,
    GiveUp,
    SendTree,
    ShowMessage,
    StartWorkers,
)
from distlaunch.supervisor.events import (
    AddressesFound,
    AgentUp,
    Event,
    LinkEnded,
    OutputFlows,
    Suspended,
    TimerDue,
)
from distlaunch.supervisor.nodes import Lost, Route, failure_of, is_over, route_of
from distlaunch.supervisor.preparing import start_command
from distlaunch.supervisor.state import Phase, Timer
from distlaunch.supervisor.step import begin, step
from distlaunch.supervisor.summary import Summary
from distlaunch.transports.failure import Kind, LinkFailure
from tests.unit.orders import Capture, Close, FindRoute, HoldPort, PlaceTree, Reap, StopWorkers, orders
from tests.unit.samples import PEER_GONE, WATCHDOG, bounded, spec_of
from tests.unit.test_random_histories import check_step
from tests.unit.test_reports import EVENTS, EXITED

JOB = (
    "script: t.py\nbackend: gloo\ngpus_per_node: 0\nprocs_per_node: 2\ntimeouts: {connect: 30s, stop: 10s}\n"
)
TWO = f"{JOB}nodes: [a, b]"
"""Ranks 0 and 1 on a, 2 and 3 on b."""
CONNECT_S, STOP_S = 30.0, 10.0
STOP_MARGIN_S, DRAIN_S = 14.0, 30.0  # until a node that does not confirm, or does not deliver, is given up
MASTER = "10.0.0.1"
T = 1000.0
"""When every history begins."""
OWN = 'Traceback (most recent call last):\n  File "/t.py", line 7, in <module>\nValueError: bad\n'
TIMED_OUT = PEER_GONE.replace("Connection closed by peer", "Timed out waiting 12000ms for send operation")


Blamed = tuple[int, int | None, int | None]
"""Exit status, rank and node of a root cause."""


class Actions(list[Any]):
    """Actions that are equal only if their kinds are: as tuples, Connect(0) and Drop(0) would be."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list) and self._kinds() == Actions(other)._kinds()

    __hash__ = None

    def __contains__(self, action: object) -> bool:
        return self.count_of(action) > 0

    def _kinds(self) -> list[tuple[type, Any]]:
        return [(type(action), action) for action in self]

    def count_of(self, action: object) -> int:
        return sum(type(each) is type(action) and each == action for each in self)

    def of(self, *kinds: type) -> "Actions":
        return Actions(action for action in self if isinstance(action, kinds))


_ALOOF = ShowMessage | Finish | AskScheduler
"""Actions that concern no node."""


class History:
    """A job under a fake clock: feed it events, look at what it wants.

    Its nodes do what they are asked to where it is told to `obey`, but for those in `silent`.
    """

    def __init__(self, text: str = TWO, chance: float = 0.0) -> None:
        self.now = T
        spec = spec_of(text)
        if spec.sync.tree:
            spec = spec._replace(tree=Tree("5891", "~/code", "/home/me/job", 3, 70))
        begun, first = begin(spec, self.now, run_id="run-1")
        self.state = begun._replace(addresses={0: MASTER}, chance=chance)
        self.actions = Actions(orders(first))
        self.silent: set[int] = set()
        self.gpus: dict[int, int] = {}
        self._began = dict.fromkeys(range(len(self.state.nodes)), 0)

    def feed(self, *events: Event, after: float = 0.0) -> Actions:
        """What the supervisor wants because of these events."""
        self.now += after
        before = len(self.actions)
        for event in events:
            state = self.state
            self.state, actions = step(state, event, self.now)
            wanted = orders(actions)
            check_step(state, event, wanted, self.state, self.now)
            self.actions += wanted
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

    def obey(self, actions: Actions) -> Actions:
        """All that the supervisor wants until the nodes have answered to everything."""
        done = Actions(actions)
        for action in done:  # it grows
            if isinstance(action, GiveUp) or not (isinstance(action, _ALOOF) or action.node in self.silent):
                done += self.feed(*self._answers(action, action.node))
        return done

    def _answers(self, action: Any, node: int) -> list[Event]:
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
                answer = [Swept(node, self._began[node], 0), lost(node, clean=True)]
            case GiveUp():
                answer = [lost(node, action.why, Kind.SILENT)]
        return answer

    def to_preparing(self, gpus: int = 0) -> Self:
        self.feed(*(up(node, gpus) for node in range(len(self.state.nodes))))
        return self._now_in(Phase.PREPARING)

    def to_running(self) -> Self:
        self.obey(self.actions)
        return self._now_in(Phase.RUNNING)

    def to_stopping(self) -> Self:
        """Rank 0 has failed with 7."""
        self.to_running().feed(ended(0, 7))
        return self._now_in(Phase.STOPPING)

    def to_restarting(self) -> Self:
        """Rank 0 has failed with 7, and its attempt is being stopped."""
        self.to_running().feed(ended(0, 7))
        return self._now_in(Phase.RESTARTING)

    def _now_in(self, phase: Phase) -> Self:
        assert self.state.phase is phase
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
    def blamed(self) -> Blamed:
        cause = self.state.cause
        return (self.state.outcome, cause and cause.rank, cause and cause.node)


PHASES = ["connecting", "preparing", "running"]
WITH_RESTARTS = f"{TWO}\nrestarts: {{max: 1}}"


def job_in(phase: str, text: str = TWO) -> History:
    """A job that has come to that phase."""
    job = History(text)
    return job if phase == "connecting" else getattr(job, f"to_{phase}")()


def with_times(times: str, text: str = TWO) -> str:
    return text.replace("stop: 10s", f"stop: 10s, {times}")


def up(node: int, gpus: int = 0) -> AgentUp:
    return AgentUp(node, Facts("/usr/bin/python3", gpus), f"host{node}")


def exited(node: int, local_rank: int, status: int, at: float) -> WorkerExited:
    return WorkerExited(node, local_rank, status, at)


def ended(rank: int, status: int, at: float = 0.0, words: str = "") -> WorkerExited:
    """The end of one of four ranks on two nodes, so many seconds after the beginning."""
    return WorkerExited(rank // 2, rank % 2, status, T + at, words=words)


def victim(rank: int, at: float = 0.0, status: int = 1) -> WorkerExited:
    """A rank that ends because another one was gone."""
    return ended(rank, status, at, PEER_GONE)


def failed(rank: int, at: float = 0.0, status: int = 1) -> WorkerExited:
    """A rank that ends with an error of its own."""
    return ended(rank, status, at, OWN)


def lost(
    node: int, words: str = "Connection reset by peer", kind: Kind = Kind.LOST, clean: bool = False
) -> LinkEnded:
    return LinkEnded(node, LinkFailure(kind, words, clean))


def texts(actions: Actions, level: str | None = None) -> list[str]:
    return [a.text for a in actions if isinstance(a, ShowMessage) and level in (None, a.level)]


def wanted(actions: Actions) -> Actions:
    """All but messages, and requests for evidence without stacks."""
    quiet = (action for action in actions if not isinstance(action, Capture) or action.local_ranks)
    return Actions(action for action in quiet if not isinstance(action, ShowMessage))


# The way to the workers' start


def test_connects_to_all_nodes_then_holds_the_port_and_finds_routes_before_workers_start() -> None:
    job = History()
    assert job.actions == [Connect(0), Connect(1)]
    assert job.feed(up(1)) == []
    assert job.feed(up(0)) == [HoldPort(0, None), FindRoute(1, MASTER)]
    assert job.feed(PortHeld(0, 29400), PortHeld(1, 1)) == [], "the other one was not asked"
    assert job.feed(RouteFound(1, MASTER, "10.0.0.7", "eth0")) == [FindRoute(0, "10.0.0.7")]
    assert job.feed(RouteFound(0, "10.0.0.7", "10.0.0.7", "eth1")) == [StartWorkers(0), StartWorkers(1)]
    assert job.interfaces == ["eth1", "eth0"]
    assert job.state.port == 29400


def test_further_ports_and_the_addresses_of_nodes_reach_workers_and_a_restart_gets_new_ports() -> None:
    text = f"{WITH_RESTARTS}\nenv: {{A: '{{port:x}} {{hosts:80}} {{rank}}'}}"
    job = foreseeing(text, further=1)
    for port in (29411, 29422):
        job.feed(*answers(1), up(0), PortHeld(0, port - 1, (port,)), *answers(0)[2:])
        start = start_command(job.state, 1)
        assert [worker.env["A"] for worker in start.workers] == [
            f"{port} {MASTER}:80,{MASTER}:81,10.0.0.2:80,10.0.0.2:81 {rank}" for rank in (2, 3)
        ]
        assert "A" not in start.env
        job.feed(ended(0, 7), Swept(0, job.state.attempt, 0), Swept(1, job.state.attempt, 0))
        job.wait()
    assert job.actions.count_of(HoldPort(0, None, 1)) == 2


def foreseeing(text: str = TWO, address: str = MASTER, further: int = 0) -> History:
    """A job whose nodes have been asked before their agents are there."""
    job = History(text)
    asked = job.feed(AddressesFound(((0, address),)))
    assert asked == [
        HoldPort(0, None, further),
        *(FindRoute(node, address) for node in range(len(job.state.nodes))),
    ]
    return job


def answers(node: int, asked: str = MASTER, address: str = MASTER) -> list[Event]:
    """All that an agent says that was asked early."""
    port, source = ([PortHeld(0, 29400)], address) if node == 0 else ([], f"10.0.0.{1 + node}")
    return [up(node), *port, RouteFound(node, asked, address, f"eth{node}", source)]


WITH_CODE = f"{WITH_RESTARTS}\nsync: true"


def lacking_code() -> History:
    """A job whose nodes have been asked for the code, and are ready but for that."""
    job = History(WITH_CODE)
    asked = job.feed(AddressesFound(((0, MASTER),)))
    assert asked.of(PlaceTree) == [PlaceTree(0), PlaceTree(1)]
    assert job.feed(*answers(0), *answers(1)).of(StartWorkers) == []
    return job


def test_ranks_start_once_every_node_has_the_code() -> None:
    job = lacking_code()
    assert wanted(job.feed(TreeLacks(1, ()))) == [SendTree(1, ())]
    assert wanted(job.feed(TreeLacks(1, (0, 2)))) == [SendTree(1, (0, 2))]
    assert job.feed(TreePlaced(0, "5891"), TreePlaced(1, "other")).of(StartWorkers) == []
    assert job.feed(TreePlaced(1, "5891")) == [StartWorkers(0), StartWorkers(1)]
    assert job.feed(TreeLacks(1, (0,)), TreeLacks(1, ())) == [], "it has the code"


def test_a_node_that_makes_progress_with_the_code_gets_more_time() -> None:
    job = lacking_code()
    for _ in range(3):
        assert job.feed(TreeProgress(0, 1), after=CONNECT_S - 1) == []
    job.tick()
    assert job.state.cause is not None
    words = "no answer from a, b within 30 s (timeouts.connect); DNS or a file system may be hanging there"
    assert job.state.cause.text == words


def test_a_node_can_not_request_files_that_are_not_in_the_code_or_any_amount_of_them() -> None:
    job = lacking_code()
    refused = job.feed(TreeLacks(1, (0, 3)))
    assert texts(refused, "error") == ["can't copy the code to b: the node requests files that are not in it"]
    assert refused.of(SendTree) == [] and len(refused.of(Close)) == 2
    job = lacking_code()
    for _ in range(MAX_LACKS):
        assert len(job.feed(TreeLacks(1, (0,))).of(SendTree)) == 1
    again = job.feed(TreeLacks(1, (0,)), TreeLacks(1, (0,)))
    assert again.of(SendTree) == []
    assert "requests it again and again" in texts(again, "error")[0]


def test_a_job_ends_if_a_node_can_not_get_the_code_but_not_because_of_one_in_a_restart() -> None:
    full = TreeRefused(1, "/home/me: No space left on device")
    words = "can't copy the code to b: /home/me: No space left on device"
    assert texts(lacking_code().feed(full), "error")[0].startswith(words)
    job = History(f"{TWO}\nsync: true\nmin_nodes: 1\nrestarts: {{max: 3}}").to_preparing()
    job.obey(job.actions)
    job.feed(TreePlaced(0, "5891"), TreePlaced(1, "5891"))
    job._now_in(Phase.RUNNING)
    job.obey(job.feed(lost(1)))
    job.obey(job.wait(60.0))
    assert job.state.attempt == 1
    refused = job.obey(job.feed(full))
    assert words in " ".join(texts(refused))
    refused += job.obey(job.wait(60.0))
    job.feed(TreePlaced(0, "5891"))
    job._now_in(Phase.RUNNING)
    assert (job.state.members, job.state.attempt) == ((0,), 2)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_nodes_prepare_before_their_agents_are_there(order: tuple[int, ...]) -> None:
    job = foreseeing(f"{JOB}nodes: [a, b, c]")
    *first, last = [event for node in order for event in answers(node)]
    assert job.feed(*first) == []
    assert job.feed(last) == [StartWorkers(node) for node in range(3)]
    assert job.state.port == 29400
    assert job.interfaces == ["eth0", "eth1", "eth2"]


def test_asks_the_first_node_again_if_its_name_means_another_address_there() -> None:
    """On Debian its own /etc/hosts has 127.0.1.1 for it."""
    job = foreseeing(address="a")
    first, other = answers(0, "a", "127.0.1.1"), answers(1, "a", MASTER)
    assert job.feed(*first, *other) == [FindRoute(0, MASTER)]
    assert job.feed(RouteFound(0, MASTER, MASTER, "eth1", MASTER)) == [StartWorkers(0), StartWorkers(1)]
    job = foreseeing(address="a")
    assert job.feed(*other, *first) == [FindRoute(0, MASTER)]


def test_the_first_node_needs_no_route_to_itself() -> None:
    job = foreseeing(address="a")
    unknown = RouteFailed(0, "a", "Name or service not known")
    assert job.feed(up(0), PortHeld(0, 29400), unknown, *answers(1, "a")) == [FindRoute(0, MASTER)]
    assert job.feed(RouteFailed(0, MASTER, "no route")) == [StartWorkers(0), StartWorkers(1)]
    assert route_of(job.state.nodes[0]) == Route()


def test_repeats_a_request_that_was_refused_early_and_reports_its_second_failure() -> None:
    job = foreseeing()
    assert job.feed(up(1), RouteFailed(1, MASTER, "no route to host"), up(0)) == [FindRoute(1, MASTER)]
    said = job.feed(RouteFailed(1, MASTER, "no route to host"))
    assert "b can't reach MASTER_ADDR" in texts(said, "error")[0]
    job = foreseeing()
    assert job.feed(up(0), taken(), up(1)) == [HoldPort(0, None)]
    assert job.blamed[0] == 0
    job.feed(taken())
    assert job.blamed[0] == Exit.PORT_TAKEN


def test_a_plan_without_the_first_node_prepares_again() -> None:
    job = foreseeing(f"{JOB}nodes: [a, b, c]\nmin_nodes: 2")
    job.feed(AddressesFound(((0, MASTER), (1, "10.0.0.8"))), lost(0, "x", Kind.UNREACHABLE))
    asked = job.feed(*answers(1), *answers(2))
    assert wanted(asked) == [HoldPort(1, None), FindRoute(2, "10.0.0.8")]
    job.feed(PortHeld(1, 29400), *answers(2)[1:])
    assert job.state.phase is Phase.PREPARING, "an answer to the first question"
    job.feed(RouteFound(2, "10.0.0.8", "10.0.0.8", "eth2"))
    assert job.feed(RouteFound(1, "10.0.0.8", "10.0.0.8", "eth1")) == [StartWorkers(1), StartWorkers(2)]


def test_a_node_that_reconnects_prepares_again() -> None:
    job = foreseeing()
    job.feed(lost(1, "Connection closed", Kind.DROPPED))
    assert job.tick() == [Connect(1), FindRoute(1, MASTER)]
    assert job.feed(*answers(0), *answers(1)) == [StartWorkers(0), StartWorkers(1)]


@pytest.mark.parametrize("early", [True, False])
def test_warns_if_node_0_lacks_master_addr_or_another_its_interface(early: bool) -> None:
    text = f"{TWO}\nenv: {{GLOO_SOCKET_IFNAME: eth9}}"
    job = foreseeing(text) if early else History(text).to_preparing()
    first, other = ([up(0)], [up(1)]) if early else ([], [])
    job.feed(*first, PortHeld(0, 29400), *other)
    job.feed(RouteFound(1, MASTER, MASTER, "eth0", "10.0.0.8", (("eth0", True),)))
    said = job.feed(RouteFound(0, MASTER, MASTER, "eth0", "10.0.0.7"))
    (warning,) = texts(said, "warning")
    assert warning == (
        f"MASTER_ADDR {MASTER} is not an address of a, where rank 0 runs; "
        "set nodes[0].address to 10.0.0.7, unless MASTER_ADDR forwards connections to a"
    )
    assert texts(said, "error")[0].startswith("network: b: GLOO_SOCKET_IFNAME=eth9: no such interface")


def test_a_job_on_one_machine_needs_no_route() -> None:
    job = History(f"{JOB}nodes: 2")
    assert job.actions == [Connect(0), Connect(1), HoldPort(0, None)]
    assert job.feed(up(0), up(1)) == []
    assert job.feed(PortHeld(0, 29400)) == [StartWorkers(0), StartWorkers(1)]
    assert job.interfaces == [None, None], "a script may also talk to other machines"


# Nodes that can't be used


def test_reports_every_node_that_can_not_be_used_and_starts_nothing() -> None:
    job = History(f"{JOB}nodes: [a, b, c]")
    said = job.feed(up(0), lost(1, "Permission denied", Kind.AUTHENTICATION))
    assert said == [ShowMessage("error", "b: authentication failed")]
    assert job.state.phase is Phase.CONNECTING
    said = job.feed(lost(2, "no", Kind.UNRESOLVED))
    assert texts(said, "error") == ["2 of 3 nodes can't be used (b, c); nothing was started"]
    assert wanted(said) == [Close(0, STOP_S)]
    assert job.close() == [Finish()]
    assert job.blamed == (Exit.UNREACHABLE, None, 1)
    kinds = [failure.kind for failure in map(failure_of, job.state.nodes) if failure]
    assert kinds == [Kind.AUTHENTICATION, Kind.UNRESOLVED]


def test_counts_many_failed_nodes_rather_than_naming_all() -> None:
    job = History(f"{JOB}nodes: ['n[1-50]']")
    said = job.feed(*(lost(node) for node in range(50)))
    assert texts(said)[-1].startswith("connection lost: 50 of 50 nodes can't be used (n1, ")
    assert texts(said)[-1].endswith("and 42 more); nothing was started")
    assert said[-1] == Finish()


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
def test_retries_only_dropped_connections(kind: Kind) -> None:
    job = History(f"{JOB}nodes: [a]")
    job.feed(lost(0, "x", kind))
    assert (job.state.phase is Phase.CONNECTING) == (kind in (Kind.DROPPED, Kind.PROXY))


def test_retries_a_dropped_connection_ever_later_but_not_for_ever() -> None:
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


def test_retries_nodes_that_were_dropped_together_at_different_times() -> None:
    job = History(f"{JOB}nodes: ['n[1-16]']")
    job.feed(*(lost(node, "Connection closed", Kind.DROPPED) for node in range(16)))
    times = sorted(job.state.due_at(Timer.RETRY, node) or 0.0 for node in range(16))
    gaps = [later - sooner for sooner, later in itertools.pairwise(times)]
    assert min(gaps) > 0.4 / 16 / 4


def test_gives_up_nodes_that_have_not_answered_at_the_deadline() -> None:
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


def test_a_retry_that_the_deadline_cuts_short_keeps_the_earlier_failure() -> None:
    job = History(f"{JOB}nodes: [a]")
    job.feed(lost(0, "Connection closed", Kind.DROPPED), after=CONNECT_S - 1.0)
    assert job.wait(0.9) == [Connect(0), HoldPort(0, None)]
    assert wanted(job.wait(0.1)) == [GiveUp(0, f"no agent within {CONNECT_S:g} s (timeouts.connect)")]
    job.feed(lost(0, "", Kind.SILENT))
    failure = failure_of(job.state.nodes[0])
    assert failure and failure.kind is Kind.DROPPED


def test_an_agent_stopped_while_others_connect_ends_the_job() -> None:
    job = History()
    said = job.feed(up(0), AgentLeaving(0, signal.SIGTERM))
    assert texts(said, "error") == ["a was lost: its agent was stopped by signal 15 (SIGTERM)"]
    assert job.state.phase is Phase.STOPPING
    assert job.blamed == (Exit.NODE_LOST, None, 0)


def test_a_node_lost_while_others_connect_ends_the_job() -> None:
    job = History()
    job.feed(up(0))
    said = job.feed(lost(0, "Timeout, server a not responding."))
    assert texts(said, "error") == ["a was lost: Timeout, server a not responding"]
    assert wanted(said) == [Drop(1), Finish()]
    assert job.blamed == (Exit.NODE_LOST, None, 0)


# Preparations that fail


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TWO.replace("gloo", "nccl"), "nccl needs a GPU for each worker, but a has 0 GPUs for 2 workers"),
        (f"{TWO}\nmaster_addr: 127.0.0.1", "127.0.0.1 is a loopback address"),
    ],
    ids=["GPUs are missing", "loopback"],
)
def test_an_impossible_plan_ends_the_job(text: str, words: str) -> None:
    job = History(text)
    actions = job.feed(up(0), up(1))
    assert words in texts(actions, "error")[0]
    assert wanted(actions) == [Close(0, STOP_S), Close(1, STOP_S)]
    assert job.close() == [Finish()]
    assert job.blamed == (Exit.USAGE, None, None)


def taken(*owners: dict[str, object]) -> PortRefused:
    return PortRefused(0, "Address already in use", owners)


PORT, LOST = (Exit.PORT_TAKEN, 0), (Exit.NODE_LOST, 1)
NO_NAME = RouteFailed(1, MASTER, "Name or service not known")
UNPREPARED: dict[str, tuple[Event, int, int, str]] = {
    "port held by a program": (
        taken({"uid": 0, "pid": 42, "command": "redis"}),
        *PORT,
        "can't use port 29555 on a: in use by redis (pid 42); leave out the port to get a free one",
    ),
    "port held by another user": (
        taken({"uid": 1007, "pid": None, "command": None}),
        *(*PORT, "in use by a process of uid 1007"),
    ),
    "port held by nobody": (taken(), *PORT, "in use by a process that is not listening on it"),
    "no route": (NO_NAME, Exit.USAGE, 1, "Name or service not known; set nodes[0].address to an"),
    "node lost": (lost(1), *LOST, "b was lost: Connection reset by peer"),
    "agent stopped": (AgentLeaving(1, 15), *LOST, "b was lost: its agent was stopped by"),
    "guardian killed": (
        AgentLeaving(1, signal.SIGTERM, orphaned=True),
        *(*LOST, "b was lost: its agent's guardian process was killed"),
    ),
    "connection closed": (AgentLeaving(1, 0), *LOST, "the connection to its agent was interrupted"),
    "connection damaged": (
        AgentLeaving(1, 0, damage="unknown frame kind 97"),
        *(*LOST, "b was lost: the data sent to its agent was altered in transit (unknown frame kind 97)"),
    ),
}


@pytest.mark.parametrize(("event", "status", "node", "words"), UNPREPARED.values(), ids=UNPREPARED)
def test_a_failure_while_preparing_ends_the_job(event: Event, status: int, node: int, words: str) -> None:
    job = History(f"{TWO}\nmaster_port: 29555").to_preparing()
    assert words in texts(job.feed(event), "error")[0]
    assert isinstance(job.close()[-1], Finish)
    assert job.blamed == (status, None, node)
    assert not job.actions.of(StartWorkers)


def test_names_no_port_and_gives_no_advice_if_no_port_was_chosen() -> None:
    job = History().to_preparing()
    (words,) = texts(job.feed(PortRefused(0, "Cannot assign requested address", ())), "error")
    assert "None" not in words
    assert "leave out the port" not in words


def test_names_nodes_that_do_not_answer_while_preparing() -> None:
    job = History().to_preparing()
    job.feed(PortHeld(0, 29400))
    words = f"no answer from b within {CONNECT_S:g} s (timeouts.connect)"
    assert any(text.startswith(words) for text in texts(job.tick()))
    assert job.now == 1000.0 + CONNECT_S
    assert job.blamed[0] == Exit.UNREACHABLE


# Workers


def test_a_job_succeeds_when_all_workers_do() -> None:
    job = History().to_running()
    assert job.feed(*(ended(rank, 0) for rank in range(3))) == []
    assert job.feed(ended(3, 0)) == [Close(0, 0.0), Close(1, 0.0)]
    assert job.close() == [Finish()]
    assert job.blamed == (Exit.OK, None, None)
    assert not any(worker.stopped for worker in job.state.workers)


@pytest.mark.parametrize(
    ("status", "outcome", "words"),
    [
        (7, 7, "exit status 7"),
        (
            *(-signal.SIGKILL, 137),
            "killed by signal 9 (SIGKILL); the kernel reports no OOM kill on that node",
        ),
        (-40, 168, "killed by signal 40"),
    ],
)
def test_the_first_failure_ends_the_job_with_its_status(status: int, outcome: int, words: str) -> None:
    job = History().to_running()
    actions = job.feed(ended(2, status))
    assert texts(actions, "error") == [f"rank 2 (b) failed: {words}"]
    assert wanted(actions) == [Close(0, STOP_S), Close(1, STOP_S)]
    assert job.close() == [Finish()]
    assert job.blamed == (outcome, 2, 1)


def unstarted(rank: int, code: int, text: str = "x") -> WorkerUnstarted:
    return WorkerUnstarted(rank // 2, rank % 2, "exec", code, text)


SIGINT, SIGTERM = Interrupted(signal.SIGINT), Interrupted(signal.SIGTERM)
STOPPED_AGENT = AgentLeaving(1, signal.SIGTERM)
ROOT_CAUSES: dict[str, tuple[list[Event], Blamed]] = {
    "ranks that are stopped": ([ended(1, 7), ended(0, -15, 1), ended(2, -15, 1), ended(3, 1, 2)], (7, 1, 0)),
    "an earlier exit that arrives later": ([ended(0, 1, 2), ended(2, 7, 1)], (7, 2, 1)),
    "the earliest of three": ([ended(0, 1, 3), ended(2, 7, 2), ended(3, -11, 1)], (139, 3, 1)),
    "two at the same time": ([ended(0, 1, 2), ended(2, 7, 2)], (1, 0, 0)),
    "an earlier success": ([ended(0, 1, 2), ended(2, 0, 1)], (1, 0, 0)),
    "a rank that ends twice": ([ended(0, 1), ended(0, 9, -1)], (1, 0, 0)),
    "after a success": ([ended(0, 0), ended(2, 3)], (3, 2, 1)),
    "an exit before a node is lost": ([lost(1), ended(0, 1, -1)], (71, None, 1)),
    "a node lost afterwards": ([ended(0, 1), lost(1)], (1, 0, 0)),
    "the first node lost": ([lost(0), lost(1)], (71, None, 0)),
    "an exit before a signal": ([SIGTERM, ended(0, -15, -1)], (143, None, None)),
    "a signal to all that reaches an agent first": ([STOPPED_AGENT, SIGTERM], (143, None, None)),
    "a signal of another kind": ([STOPPED_AGENT, SIGINT], (71, None, 1)),
    "the first not started": ([unstarted(0, errno.ENOENT), unstarted(2, errno.EACCES)], (127, 0, 0)),
    "a start that fails afterwards": ([ended(0, 1), unstarted(2, errno.ENOENT)], (1, 0, 0)),
    "an agent that takes its workers with it": ([STOPPED_AGENT, ended(2, -15), lost(1)], (71, None, 1)),
    "leaving afterwards": ([ended(0, 1), STOPPED_AGENT], (1, 0, 0)),
    "a late refusal": ([ended(0, 1), PortRefused(0, "late", ())], (1, 0, 0)),
    "a late route": ([ended(0, 1), RouteFailed(1, MASTER, "late")], (1, 0, 0)),
    # A rank that lost its peer may end before the one that it lost.
    "a victim, then sys.exit without a word": ([victim(0), ended(1, 7, 0.5)], (7, 1, 0)),
    "a victim, then a killed rank": ([victim(0), ended(1, -9, 0.5)], (137, 1, 0)),
    "a victim, then a lost node": ([victim(0), lost(1)], (71, None, 1)),
    "a victim, then a stopped agent": ([victim(0), STOPPED_AGENT], (71, None, 1)),
    "two victims before": ([victim(0), victim(2, -1), failed(3, 0.5)], (1, 3, 1)),
    "a victim that was earlier": ([failed(0), victim(2, -1)], (1, 0, 0)),
    "a victim when the user is there": ([victim(0), SIGINT], (1, 0, 0)),
    "a traceback before the stop": ([victim(0), SIGINT, failed(2, 1, -15)], (1, 2, 1)),
    "another victim that was stopped": ([victim(0), SIGINT, victim(2, 1, -15)], (1, 0, 0)),
    "an exit after the stop": ([victim(0), SIGINT, ended(2, 3, 1)], (1, 0, 0)),
    "an exit before the stop": ([victim(0), SIGINT, ended(2, 3, -1)], (3, 2, 1)),
    "nobody left to wait for": ([victim(0), victim(1, 0.1), victim(2, 0.2), victim(3, 0.3)], (1, 0, 0)),
    "the first with its own error": ([victim(0), failed(1, 0.1), failed(2)], (1, 2, 1)),
    "a crash after losing a peer": ([victim(0, status=-11)], (139, 0, 0)),
}


@pytest.mark.parametrize(("events", "blamed"), ROOT_CAUSES.values(), ids=ROOT_CAUSES)
def test_finds_the_root_cause(events: list[Event], blamed: Blamed) -> None:
    job = History().to_running()
    job.feed(*events)
    assert job.state.phase in (Phase.STOPPING, Phase.DONE)
    job.close()
    assert isinstance(job.actions[-1], Finish)
    assert job.blamed == blamed
    assert not any("failed first" in text for text in texts(job.actions)), "which is known only at the end"
    told = [text for text in texts(job.actions) if text.startswith("received SIG")]
    assert len(texts(job.actions, "error") + told) == 1, "whatever follows from it"
    assert all(job.actions.count_of(Close(node, STOP_S)) <= 1 for node in (0, 1))


@pytest.mark.parametrize(
    ("code", "status"),
    [(errno.ENOENT, 127), (errno.EACCES, 126), (errno.ENOEXEC, 126), (errno.EAGAIN, 126), (errno.E2BIG, 126)],
    ids=lambda code: errno.errorcode.get(code, str(code)),
)
def test_a_worker_that_can_not_start_ends_the_job_with_the_status_of_a_shell(code: int, status: int) -> None:
    job = History().to_running()
    (words,) = texts(job.feed(unstarted(3, code, "./a.out: why")), "error")
    assert words == "rank 3 (b) could not be started: ./a.out: why"
    job.close()
    assert job.blamed == (status, 3, 1)
    assert job.state.workers[3].phase_word == "not started"


def test_a_lost_node_takes_its_running_workers_with_it() -> None:
    job = History().to_running()
    job.feed(ended(2, 0))
    actions = job.feed(lost(1, "a\nTimeout, server b not responding."))
    assert texts(actions, "error")[0].startswith("b was lost: ")
    assert wanted(actions) == [Close(0, STOP_S)]
    phases = [worker.phase_word for worker in job.state.workers]
    assert phases == ["running", "running", "exited", "lost with its node"]
    assert job.close() == [Finish()]


def test_a_rank_that_exits_like_the_root_cause_during_the_stop_has_also_failed() -> None:
    job = History().to_running()
    job.feed(ended(1, 2), ended(0, 2), ended(2, 143))
    lines = Summary(job.state, "", {}, 1.0).lines()
    assert "rank 0: also failed, exit status 2" in lines
    assert "rank 2: stopped by distlaunch (exit status 143)" in lines


def test_the_summary_counts_the_nodes_that_were_lost() -> None:
    job = History().to_running()
    one_node = History().to_running()
    one_node.feed(ended(0, 7), lost(1))
    assert "ranks 2-3: lost with their node" in Summary(one_node.state, "", {}, 1.0).lines()
    job.feed(Suspended(35.0), lost(0), lost(1))
    assert "ranks 0-3: lost with their nodes" in (lines := Summary(job.state, "", {}, 1.0).lines())
    assert "logs of ranks 0-3 are incomplete: the nodes were lost before all output had arrived" in lines


@pytest.mark.parametrize("for_s", [35.0, 10.0])
def test_a_suspension_of_the_controller_is_the_root_cause_of_lost_nodes(for_s: float) -> None:
    job = History().to_running()
    words = f"this machine, or this command, was suspended for {for_s:.0f} s"
    assert job.feed(Suspended(for_s)) == []
    said = texts(job.feed(lost(0), lost(1), after=1.0))
    if for_s == 10.0:
        assert said[0] == "a was lost: Connection reset by peer"
    else:
        assert said == [f"{words}; nodes stop their ranks after 30 s (timeouts.lease); {AWAKE}"]
        assert job.blamed == (Exit.NODE_LOST, None, None)


def test_a_loss_long_after_a_suspension_has_its_own_cause() -> None:
    job = History().to_running()
    job.feed(Suspended(20.0))
    assert texts(job.feed(lost(0), after=31.0), "error") == ["a was lost: Connection reset by peer"]


AWAKE = "set a longer timeouts.lease, or run the controller on a host that stays awake: `--on HOST`"


def test_ignores_a_local_rank_that_the_plan_does_not_have() -> None:
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


# The end of nodes


SURVIVES = "kill what belongs to another user as root; what hangs in the kernel may need a reboot"
WARNINGS: dict[str, tuple[list[Event], str]] = {
    "lost output": (
        [OutputLost(1, 0, 1, 4096)],
        (
            "4096 bytes of rank 2's stderr were lost: its node can't buffer more in TMPDIR; "
            "print less, or set env.TMPDIR to a larger disk"
        ),
    ),
    "stuck": (
        [Stuck(1, ({"pid": 7, "command": "cp"},))],
        f"b: 1 process survived SIGKILL: cp (pid 7); {SURVIVES}",
    ),
    "left-over processes": (
        [*(ended(rank, 0) for rank in range(4)), Swept(0, 0, 3)],
        "a: killed 3 processes that outlived their workers",
    ),
    "unconfirmed cleanup": (
        [ended(0, 7), lost(1)],
        "b: lost before it confirmed its cleanup; its ranks exit within 40 s",
    ),
}


@pytest.mark.parametrize(("events", "words"), WARNINGS.values(), ids=WARNINGS)
def test_warns_about_losses(events: list[Event], words: str) -> None:
    job = History().to_running()
    job.feed(*events)
    assert texts(job.actions, "warning") == [words]


def test_a_failed_job_keeps_its_status_and_does_not_report_left_over_processes() -> None:
    job = History().to_stopping()
    job.feed(lost(1))
    assert job.feed(Swept(0, 0, 3), lost(0)) == [Finish()]
    assert job.blamed == (7, 0, 0)


def test_names_workers_that_take_long_to_exit_once() -> None:
    job = History().to_running()
    job.feed(ended(0, 7), ended(2, -15))
    (waiting,) = texts(job.tick())
    assert waiting == "waiting for rank 1 (a, pid 101), rank 3 (b, pid 101) to exit; SIGKILL in 7 s"
    assert job.now == T + 3.0
    job.close()
    assert len(job.actions.of(ShowMessage)) == 2  # that, and the cause


def test_does_not_wait_for_workers_that_are_killed() -> None:
    job = History().to_running()
    job.feed(SIGTERM)
    job.feed(SIGTERM, after=1.0)
    assert not any("waiting" in text for text in texts(job.tick()))


def test_gives_up_nodes_that_do_not_confirm_after_grace_and_margin() -> None:
    job = History().to_stopping()
    job.feed(Swept(0, 0, 0), lost(0), after=1.0)
    assert job.wait(STOP_S + STOP_MARGIN_S - 1.1) == []
    actions = job.wait(0.1)
    assert wanted(actions) == [Drop(1), Finish()]
    assert texts(actions, "warning") == [
        "gave up on b: it did not confirm its cleanup; check that no ranks are left there"
    ]
    assert isinstance(job.state.nodes[1], Lost)


def test_a_clean_node_may_deliver_its_output_longer_but_not_for_ever() -> None:
    job = History().to_stopping()
    job.feed(Swept(0, 0, 0), Swept(1, 0, 0), lost(0), after=20.0)
    assert job.wait(DRAIN_S - 0.1) == []
    assert job.feed(OutputFlows(1)) == []
    assert job.wait(DRAIN_S - 0.1) == []
    actions = job.wait(0.1)
    assert wanted(actions) == [Drop(1), Finish()]
    assert texts(actions, "warning") == [
        "gave up on b: nothing arrived for 30 s; its output may be incomplete"
    ]


def test_a_clean_node_has_time_to_deliver_when_the_last_other_node_is_lost() -> None:
    job = History().to_stopping()
    job.feed(Swept(0, 0, 0), after=1.0)
    job.feed(lost(1), after=STOP_S + STOP_MARGIN_S - 2.0)
    assert wanted(job.wait(2.0)) == []
    assert job.feed(lost(0)) == [Finish()]


def test_a_clean_node_has_time_to_deliver_when_another_is_given_up() -> None:
    job = History().to_stopping()
    job.feed(Swept(0, 0, 0), after=1.0)
    assert wanted(job.wait(STOP_S + STOP_MARGIN_S - 1.0)) == [Drop(1)]
    job.feed(OutputFlows(0), after=DRAIN_S - 1.0)
    assert wanted(job.wait(DRAIN_S - 0.1)) == []
    assert job.feed(lost(0)) == [Finish()]


# Interrupts


@pytest.mark.parametrize(
    ("torchrun", "way"), [(False, "`distlaunch run --detach`"), (True, "nohup or in tmux")]
)
def test_ctrl_z_explains_how_to_free_the_terminal(torchrun: bool, way: str) -> None:
    job = History().to_running()
    invocation = job.state.spec.invocation._replace(shares_stdio=torchrun)
    job.state = job.state._replace(spec=job.state.spec._replace(invocation=invocation))
    said = texts(job.feed(Interrupted(signal.SIGTSTP)), "warning")
    assert said == [f"a run can't be suspended; to free the terminal, start it with {way}"]


SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE]


@pytest.mark.parametrize("phase", [*PHASES, "restarting"])
@pytest.mark.parametrize("signum", SIGNALS, ids=lambda signum: signum.name)
def test_one_signal_ends_the_job_gracefully_in_every_phase(phase: str, signum: signal.Signals) -> None:
    job = job_in(phase, WITH_RESTARTS)
    before = len(job.actions)
    actions = job.feed(Interrupted(signum))
    (words, *_) = texts(actions)
    if phase in ("connecting", "preparing"):
        assert words == f"stopped by {signum.name}"
    else:
        insists = signum in (signal.SIGINT, signal.SIGTERM)
        again = (
            "another `distlaunch stop` or Ctrl-C kills them"
            if signum == signal.SIGINT
            else f"another {signum.name} kills them"
        )
        left = "4 ranks" if phase == "running" else "3 ranks"
        waiting = f"received {signum.name}: waiting up to 10 s for {left} to exit"
        assert words == (f"{waiting}; {again}" if insists else waiting)
    if phase == "connecting":
        assert wanted(actions) == [Drop(0), Drop(1), Finish()]
    else:
        assert wanted(actions) == [Close(0, STOP_S), Close(1, STOP_S)]
        assert job.close() == [Finish()]
    assert job.blamed == (128 + signum, None, None)
    assert not Actions(job.actions[before:]).of(StartWorkers)


@pytest.mark.parametrize("phase", ["preparing", "running", "restarting", "stopping"])
def test_two_signals_kill_and_three_exit_at_once(phase: str) -> None:
    job = job_in(phase, TWO if phase == "stopping" else WITH_RESTARTS)
    job.feed(SIGINT, after=1.0)
    assert wanted(job.feed(SIGTERM, after=1.0)) == [Close(0, 0.0), Close(1, 0.0)]
    left = ShowMessage("warning", "exiting without waiting for the agents, which kill all remaining workers")
    assert job.feed(SIGINT, after=1.0) == [left, Finish()]
    assert job.blamed == ((7, 0, 0) if phase == "stopping" else (130, None, None))
    assert job.feed(SIGINT, Swept(0, 0, 0), Swept(1, 0, 0), lost(0)) + job.wait() == []


def test_signals_at_the_same_time_count_once() -> None:
    job = job_in("running")
    job.feed(SIGINT)
    assert job.feed(SIGINT, after=0.02) == []
    assert job.feed(SIGTERM, after=0.07) == []
    assert wanted(job.feed(SIGINT, after=0.02)) == [Close(0, 0.0), Close(1, 0.0)]


@pytest.mark.parametrize(("name", "reaches"), [("SIGUSR1", "SIGUSR1"), ("SIGINT", "SIGTERM")])
def test_passes_on_the_signals_that_the_job_names(name: str, reaches: str) -> None:
    job = job_in("running")
    invocation = Invocation(signals=("SIGUSR1", "SIGTERM"))
    job.state = job.state._replace(spec=job.state.spec._replace(invocation=invocation))
    actions = job.feed(Interrupted(signal.Signals[name]))
    assert wanted(actions) == [Close(node, STOP_S, signal.Signals[reaches]) for node in range(2)]


def test_a_signal_while_a_retry_waits_ends_the_job() -> None:
    job = History(f"{JOB}nodes: [a]")
    job.feed(lost(0, "Connection closed", Kind.DROPPED))
    assert wanted(job.feed(SIGINT, after=1.0)) == [Drop(0), Finish()]


# Time limits


@pytest.mark.parametrize("phase", [*PHASES, "restarting"])
def test_the_jobs_time_limit_holds_in_every_phase(phase: str) -> None:
    job = job_in(phase, with_times("job: 20s", WITH_RESTARTS))
    assert texts(job.wait(19.9), "error") == []
    assert texts(job.wait(0.1), "error") == ["the job timed out after 20 s (timeouts.job)"]
    job.close()
    assert job.blamed == (Exit.TIMEOUT, None, None)


def test_a_job_that_is_stopping_has_no_other_time_limit() -> None:
    job = History(with_times("job: 20s")).to_stopping()
    ends_at = job.now + STOP_S + STOP_MARGIN_S
    job.tick()  # who has not ended is named
    assert job.state.next_due == ends_at
    job.wait(18.0)
    assert job.blamed == (7, 0, 0)


def test_names_ranks_that_do_not_join_ever_more_rarely_and_ends_the_job_at_last() -> None:
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


REFUSED = "the rendezvous refuses its connection"
ALL_REFUSED: list[Event] = [RanksLag(node, ((0, True, REFUSED), (1, True, REFUSED))) for node in (0, 1)]
OTHERS_REFUSED: list[Event] = [RanksLag(0, ((0, False, "idle"), (1, True, REFUSED))), ALL_REFUSED[1]]
UNJOINED = "exited with status 0"
WAIT_FOR_0 = "the others are waiting for rank 0"
FIRST = "0/4 ranks joined; waiting for rank 0"
OTHERS = f"rank 1 (a, pid 101: {REFUSED}), rank 2 (b, pid 100: {REFUSED}), rank 3 (b, pid 101: {REFUSED})"
LAGGING: dict[str, tuple[list[Event], str]] = {
    "a rank that exited": (
        [RanksJoined(0, (0, 1)), RanksJoined(1, (0,)), ended(3, 0)],
        f"3/4 ranks joined; waiting for rank 3 (b: {UNJOINED})",
    ),
    "a rank that tries": (
        [RanksJoined(0, (1,)), RanksLag(1, ((0, True, "no answer"),)), ended(3, 0)],
        f"1{FIRST[1:]} (a, pid 100), rank 2 (b, pid 100: no answer), rank 3 (b: {UNJOINED}); {WAIT_FOR_0}",
    ),
    "rank 0 is elsewhere": (OTHERS_REFUSED, f"{FIRST} (a, pid 100: idle), {OTHERS}; {WAIT_FOR_0}"),
    "rank 0 has exited": ([*OTHERS_REFUSED, ended(0, 0)], f"{FIRST} (a: {UNJOINED}), {OTHERS}; {WAIT_FOR_0}"),
    "nobody has joined": (
        ALL_REFUSED,
        f"{FIRST} (a, pid 100: {REFUSED}), {OTHERS}; the rendezvous is at {MASTER}:29400",
    ),
}


@pytest.mark.parametrize(("events", "words"), LAGGING.values(), ids=LAGGING)
def test_says_why_ranks_have_not_joined(events: list[Event], words: str) -> None:
    job = History().to_running()
    job.feed(*events)
    assert texts(job.tick()) == [words]


OVERDUE = "gave up after 10 min (timeouts.join)"
ADVICE = "if the script does not use MASTER_ADDR and MASTER_PORT, set rendezvous: none"
JOIN_LIMITS: dict[str, tuple[str, float, list[Event], float, str]] = {
    "the default": ("", 0.0, OTHERS_REFUSED, 600.0, f"; {WAIT_FOR_0}; {OVERDUE}"),
    "rank 0 has exited": ("", 0.0, [ended(0, 0), *OTHERS_REFUSED], 600.0, f"; {WAIT_FOR_0}; {OVERDUE}"),
    "after data was prepared": ("", 5000.0, OTHERS_REFUSED, 5600.0, f"; {WAIT_FOR_0}; {OVERDUE}"),
    "the job's": ("join: 20s", 0.0, [], 20.0, f"; gave up after 20 s (timeouts.join); {ADVICE}"),
}


@pytest.mark.parametrize(("times", "after", "events", "ends", "words"), JOIN_LIMITS.values(), ids=JOIN_LIMITS)
def test_the_join_limit_counts_from_the_first_try_of_a_rank_unless_the_job_sets_it(
    times: str, after: float, events: list[Event], ends: float, words: str
) -> None:
    job = History(with_times(times)).to_running()
    job.feed(*events, after=after)
    while job.state.phase is Phase.RUNNING:
        said = job.tick()
    assert job.now == T + ends
    assert texts(said, "error")[0].startswith(FIRST)
    assert texts(said, "error")[0].endswith(words)
    assert job.blamed == (Exit.TIMEOUT, None, None)


def test_reports_once_that_all_ranks_joined() -> None:
    job = History().to_running()
    assert job.feed(RanksJoined(0, (0, 1))) == []
    said = job.feed(RanksJoined(1, (0, 1)), after=1.5)
    assert texts(said, "info") == [f"all 4 ranks joined the rendezvous at {MASTER}:29400 in 1.5 s"]
    assert job.feed(RanksJoined(1, (0, 1))) == []
    assert job.state.next_due is None


def test_warns_if_nodes_have_loaded_different_versions_of_torch() -> None:
    job = History().to_running()
    job.feed(RanksJoined(0, (0, 1), "2.13.0+cpu"))
    said = job.feed(RanksJoined(1, (0, 1), "2.12.1"))
    words = "the nodes have different versions of torch: 2.13.0+cpu on a; 2.12.1 on b; install the same one"
    assert texts(said, "warning") == [words]


def test_a_job_that_does_not_use_the_rendezvous_gets_one_message_and_no_limit() -> None:
    job = History().to_running()
    seen = ((0, False, "torch imported, busy"), (1, False, "has not imported torch or JAX yet"))
    job.feed(RanksLag(0, seen))
    (words,) = texts(job.tick(), "info")
    assert words.startswith(f"{FIRST} (a, pid 100: torch imported, busy), rank 1 (")
    assert words.endswith(
        "; if the script does not use MASTER_ADDR and MASTER_PORT, ignore this or set rendezvous: none"
    )
    for _ in range(20):
        assert job.tick() == []
    assert job.state.phase is Phase.RUNNING


def test_does_not_suggest_ignoring_missing_ranks_if_the_job_file_limits_the_join() -> None:
    job = History(TWO.replace("timeouts: {", "timeouts: {join: 5m, ")).to_running()
    (words,) = texts(job.tick(), "info")
    assert words.endswith("; if the script does not use MASTER_ADDR and MASTER_PORT, set rendezvous: none")


def test_does_not_report_a_lone_rank_without_a_rendezvous() -> None:
    job = History("script: t.py\nbackend: gloo\ngpus_per_node: 0").to_running()
    for _ in range(20):
        assert job.tick() == []


@pytest.mark.parametrize(("rule", "ranks"), [("all", (3, 0, 1, 2)), ("any", (3,)), ("rank 0", (3, 0))])
def test_success_ends_the_other_ranks_gracefully(rule: str, ranks: tuple[int, ...]) -> None:
    job = History(f"{TWO}\nsuccess: {rule}").to_running()
    *first, last = ranks
    assert job.feed(*(ended(rank, 0) for rank in first)) == []
    done = job.feed(ended(last, 0))
    said = [f"rank {last} finished; stopping the others (success: {rule})"]
    assert (texts(done), wanted(done)) == (
        ([], [Close(0, 0.0, 15), Close(1, 0.0, 15)])
        if rule == "all"
        else (said, [Close(0, STOP_S, 15), Close(1, STOP_S, 15)])
    )
    job.feed(ended(1, 143))
    assert job.blamed == (0, None, None)


@pytest.mark.parametrize("rule", ["all", "any", "rank 0"])
def test_a_failure_before_success_ends_the_job(rule: str) -> None:
    job = History(f"{TWO}\nsuccess: {rule}").to_running()
    job.feed(ended(3, 9), ended(0, 0))
    assert job.blamed == (9, 3, 1)


@pytest.mark.parametrize("text", [with_times("join: none"), f"{TWO}\nrendezvous: none"])
def test_without_a_join_limit_nobody_is_waited_for(text: str) -> None:
    job = History(text).to_running()
    job.feed(ALL_REFUSED[1])
    assert job.state.next_due is None


def test_names_a_rank_that_has_not_started_without_a_pid() -> None:
    job = job_in("preparing", with_times("join: 0s"))
    job.feed(PortHeld(0, 29400), RouteFound(1, MASTER, MASTER, "eth0"))
    job.feed(RouteFound(0, MASTER, MASTER, "eth1"))
    (words,) = texts(job.tick(), "error")
    assert words.startswith(f"{FIRST} (a, not started yet), ")


# A rank that lost its peer may end before the one that it lost


LOST_PEER = "after losing the connection to another rank"
WAITED = "after timing out while waiting for another rank"
WITHOUT_OWN_ERROR: dict[str, tuple[list[Event], str]] = {
    "uneven batches": (
        [victim(0), victim(2, 0.1), ended(3, 0, 0.2)],
        f"{LOST_PEER}; rank 3 had already exited with status 0 (uneven batches?)",
    ),
    "a rank that had joined unseen": (
        [ended(1, 0), RanksJoined(0, (0,)), *(victim(rank) for rank in (0, 2, 3))],
        f"{LOST_PEER}; rank 1 had already exited with status 0 (uneven batches?)",
    ),
}


@pytest.mark.parametrize(("events", "words"), WITHOUT_OWN_ERROR.values(), ids=WITHOUT_OWN_ERROR)
def test_blames_the_first_victim_if_no_rank_has_an_error_of_its_own(events: list[Event], words: str) -> None:
    job = History().to_running()
    job.feed(*events)
    job.wait(1.0)
    assert texts(job.actions, "error") == [f"rank 0 (a) failed: exit status 1, {words}"]
    assert job.blamed == (1, 0, 0)


def timed_out(rank: int, at: float = 0.0, call: str = "all_reduce") -> WorkerExited:
    return ended(rank, 1, at, TIMED_OUT.replace("all_reduce", call))


LEFT: list[Event] = [timed_out(0), timed_out(1), victim(2, 0.1)]
FIRST_WAITED = f"rank 0 (a) failed: exit status 1, {WAITED}"
WAITING = "ranks 0-1 were waiting in all_reduce (t.py:9)"
NEVER_JOINED = "never joined the rendezvous"
IN_INIT = [timed_out(rank, 0.1 * rank, "init_process_group") for rank in (0, 1, 3)]
AWAY: dict[str, tuple[list[Event], str, int | None]] = {
    "unknown": (
        LEFT,
        f"{FIRST_WAITED}; rank 3 had not failed (stalled, or in another collective?)",
        0,
    ),
    "most ranks still run": ([timed_out(0)], FIRST_WAITED, 0),
    "others lost the connection to it first": (
        [victim(1), timed_out(0, 0.1), victim(2, 0.2), victim(3, 0.3)],
        FIRST_WAITED,
        0,
    ),
    "never joined": (
        [RanksJoined(0, (0, 1)), RanksLag(1, ((0, False, "idle"),)), RanksJoined(1, (1,)), *IN_INIT],
        f"rank 2 (b, pid 100: idle) {NEVER_JOINED}; ranks 0-1, 3 were waiting in init_process_group (t.py:9)",
        2,
    ),
    "rank 0 never joined": (
        [timed_out(3, 0, "init_process_group")],
        f"rank 0 (a, pid 100) {NEVER_JOINED}; rank 3 was waiting in init_process_group (t.py:9)",
        0,
    ),
    "stopped": (
        [RanksStalled(1, (1,), ((1, 7),)), *LEFT],
        f"rank 3 (b) was stopped by a signal; {WAITING}",
        3,
    ),
    "stalled": (
        [RanksStalled(1, (1,)), *LEFT],
        f"rank 3 (b) stalled: no output, CPU or GPU use for 10 min; {WAITING}",
        3,
    ),
    "most ranks are stalled": (
        [RanksStalled(0, (1,)), RanksStalled(1, (0, 1)), timed_out(0)],
        FIRST_WAITED,
        0,
    ),
    "another collective": (
        [timed_out(0), timed_out(1), timed_out(2, 0.2, "barrier"), timed_out(3)],
        "rank 2 (b) was in barrier (t.py:9); ranks 0-1, 3 were waiting in all_reduce (t.py:9)",
        2,
    ),
    "a tie": (
        [timed_out(0), timed_out(3), timed_out(1, 0.2, "barrier"), timed_out(2, 0.2, "barrier")],
        (
            "rank 0 (a), rank 1 (a), rank 2 (b), rank 3 (b) disagree about the next collective: "
            "ranks 0, 3 in all_reduce (t.py:9), ranks 1-2 in barrier (t.py:9)"
        ),
        None,
    ),
}


@pytest.mark.parametrize(("events", "words", "rank"), AWAY.values(), ids=AWAY)
def test_blames_the_rank_that_the_others_waited_for(
    events: list[Event], words: str, rank: int | None
) -> None:
    job = History(with_times("stall: 10m")).to_running()
    if not any(isinstance(event, RanksJoined) for event in events) and NEVER_JOINED not in words:
        job.feed(RanksJoined(0, (0, 1)), RanksJoined(1, (0, 1)))
    job.feed(*events)
    job.wait(1.0)
    job.wait(1.0)
    assert texts(job.actions, "error") == [words]
    assert job.blamed == (1, rank, None if rank is None else rank // 2)


def test_blames_the_running_rank_that_is_elsewhere_by_its_stack() -> None:
    job = History().to_running()
    job.feed(RanksJoined(0, (0, 1)), RanksJoined(1, (0, 1)), *LEFT)
    assert wanted(job.tick()) == [Capture(1, (1,), abort=False)]
    job.feed(stack(3, *IN_RECORD))
    assert texts(job.tick(), "error") == [f"rank 3 (b) was in step (t.py:3); {WAITING}"]


def test_with_nccl_a_stack_outside_collectives_is_no_proof() -> None:
    """A rank that has called a collective goes on, and waits for its GPU wherever it needs the result."""
    job = History().to_running()
    job.feed(RanksJoined(0, (0, 1)), RanksJoined(1, (0, 1)))
    job.feed(*(ended(rank, -signal.SIGABRT, 0, WATCHDOG) for rank in (0, 1)), victim(2, 0.1))
    assert wanted(job.tick()) == [Capture(1, (1,), abort=False)]
    job.feed(stack(3, *IN_RECORD))
    (text,) = texts(job.tick(), "error")
    assert text.endswith("; rank 3 had not failed (stalled, or in another collective?)")


def test_collects_evidence_on_all_nodes_before_it_stops_their_workers() -> None:
    for job, stop in ((History(), Close), (History(WITH_RESTARTS), StopWorkers)):
        acts = [each for each in job.to_running().feed(ended(2, 7)) if isinstance(each, (Capture, stop))]
        assert [(type(each), each.node) for each in acts] == [
            (Capture, 0),
            (Capture, 1),
            (stop, 0),
            (stop, 1),
        ]
    job = History().to_running()
    assert not any(isinstance(action, Capture) for action in job.feed(Interrupted(signal.SIGINT)))


def test_a_restart_blames_the_rank_with_its_own_error_too() -> None:
    job = History(WITH_RESTARTS).to_running()
    assert wanted(job.feed(victim(0))) == []
    job.tick()
    assert job.state.phase is Phase.RESTARTING
    job.feed(failed(2, 1.1, -15))
    assert [restart.cause.rank for restart in job.state.restarts] == [2]


# Ranks that stall


def stalled(on_stall: str, limit: str = "10m") -> History:
    """Rank 1 of four has stalled for the time that counts, which is not told yet."""
    text = with_times(f"stall: {limit}", WITH_RESTARTS)
    job = History(f"{text}\non_stall: {on_stall}").to_running()
    job.feed(RanksJoined(0, (0, 1)), RanksJoined(1, (0, 1)), RanksLag(0, ((1, False, "stale words"),)))
    assert job.feed(RanksStalled(0, (1,)), after=700.0) == []
    return job


def stack(rank: int, *frames: str) -> StackDumped:
    """As py-spy prints it."""
    lines = "".join(f"    {frame}\n" for frame in frames)
    text = f"Process 7: python\n\nThread 7 (idle): MainThread\n{lines}Thread 8 (idle): x\n    y\n"
    return StackDumped(rank // 2, rank % 2, text)


def test_reports_stalled_and_active_ranks_and_dumps_stacks() -> None:
    job = stalled("warn")
    said = job.tick()
    assert texts(said, "warning") == [
        "stalled: rank 1 (a, pid 101): no output, CPU or GPU use for 10 min; ranks 0, 2-3 are still active"
    ]
    assert wanted(said) == [Capture(0, (1,), abort=False)]
    assert texts(job.feed(RanksStalled(0, ()))) == ["stalled ranks resumed"]
    assert job.state.next_due is None


def test_reports_a_stall_that_spreads_again() -> None:
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
def test_waits_for_agents_that_look_at_different_times(limit: str, settles_s: float) -> None:
    job = stalled("warn", limit)
    since = job.now
    job.tick()
    assert job.now - since == settles_s


def test_does_not_report_a_stall_that_is_already_over() -> None:
    job = stalled("stop")
    assert job.feed(RanksStalled(0, ()), after=1.0) == []
    assert job.state.next_due is None


def test_a_stack_that_arrives_late_does_not_make_a_resumed_rank_stalled() -> None:
    job = stalled("warn")
    job.tick()
    job.feed(RanksStalled(0, ()), stack(1, *IN_RECORD))
    assert not any(worker.stalled for worker in job.state.workers)


@pytest.mark.parametrize(
    ("on_stall", "then", "phase"),
    [("stop", Close, Phase.STOPPING), ("restart", StopWorkers, Phase.RESTARTING)],
)
def test_a_stall_may_stop_or_restart_the_job(on_stall: str, then: type, phase: Phase) -> None:
    job = stalled(on_stall)
    assert wanted(job.tick()) == [Capture(0, (1,), abort=True)]
    assert wanted(job.tick()) == [then(0, 10.0), then(1, 10.0)]
    assert job.state.phase is phase
    assert phase is Phase.RESTARTING or job.blamed == (Exit.TIMEOUT, 1, 0)


def test_a_stall_that_spreads_replaces_no_dump_right_before_the_stop() -> None:
    job = stalled("stop", "8s")
    assert wanted(job.tick()) == [Capture(0, (1,), abort=True, quick=False)]
    job.feed(RanksStalled(1, (0,)), stack(1, *IN_RECORD))
    assert wanted(job.tick()) == [Capture(1, (0,), abort=True, quick=True)]
    assert wanted(job.tick()) == [Close(0, 10.0), Close(1, 10.0)]


ABORTED = """Fatal Python error: Aborted

Thread 0x00007f0a (most recent call first):
  File "/v/lib/python3.11/threading.py", line 324 in wait

Current thread 0x00007f0b (most recent call first):
{}
Extension modules: numpy._core._multiarray_umath (total: 1)
"""
"""What Python prints of SIGABRT under PYTHONFAULTHANDLER."""


def aborted(rank: int, *frames: str) -> WorkerExited:
    """A rank that has died of its dump."""
    lines = "".join(f'  File "{frame}\n' for frame in frames)
    return ended(rank, -signal.SIGABRT, words=ABORTED.format(lines))


def test_finds_the_culprit_by_the_stacks_that_ranks_die_of() -> None:
    job = stalled("stop")
    job.feed(RanksStalled(0, (0, 1)), RanksStalled(1, (0,)))
    job.tick()
    waits = ('/v/torch/distributed/c10d.py", line 9 in all_reduce', '/j/t.py", line 5 in main')
    culprit = aborted(1, '/j/t.py", line 3 in step')
    assert job.feed(aborted(0, *waits), victim(3, 0.1), culprit) == []
    (words,) = texts(job.feed(aborted(2, *waits)), "error")
    assert words == ("rank 1 (a) stalled for 10 min in step (t.py:3); ranks 0, 2 are waiting in a collective")
    job.close()
    assert job.blamed == (Exit.TIMEOUT, 1, 0)
    assert [worker.stopped for worker in job.state.workers] == [True, True, True, False]


def test_does_not_wait_for_ever_for_ranks_to_die_of_their_dumps() -> None:
    job = stalled("stop")
    job.feed(RanksStalled(0, (0, 1)))
    job.tick()
    job.feed(aborted(0, '/j/t.py", line 5 in main'))
    (words,) = texts(job.tick(), "error")
    assert words.startswith("rank 0 (a), rank 1 (a) stalled for")


STALLED_1 = (Exit.TIMEOUT, 1, 0)


@pytest.mark.parametrize(
    ("events", "blamed"),
    [
        pytest.param([ended(1, -signal.SIGABRT)], STALLED_1, id="the stalled rank, of its dump"),
        pytest.param([RanksStalled(0, ()), aborted(1, '/j/t.py", line 3 in step')], STALLED_1, id="resumed"),
        pytest.param([ended(3, 7)], (7, 3, 1), id="another rank"),
        pytest.param([ended(3, -signal.SIGABRT)], (134, 3, 1), id="another rank that aborts"),
        pytest.param([ended(1, 9)], (9, 1, 0), id="the stalled rank, by itself"),
    ],
)
def test_a_stalled_rank_that_dies_of_its_dump_is_still_blamed(events: list[Event], blamed: Blamed) -> None:
    job = stalled("stop")
    job.tick()
    said = texts(job.feed(*events), "error")
    assert (said == ["rank 1 (a) stalled for 10 min"]) == (blamed == STALLED_1)
    assert job.blamed == blamed


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
JOINING = ("_new_group (torch/distributed/c10d.py:1)", "init_process_group (torch/distributed/c10d.py:9)")
EVERYBODY = "rank 0 (a), rank 1 (a), rank 2 (b), rank 3 (b) stalled for 10 min"
ALL_STALLED: dict[str, tuple[list[StackDumped], str, int | None, int | None]] = {
    "one is not in the collective": (
        [stack(0, *IN_COLLECTIVE), stack(1, *IN_BACKWARD), stack(2, *IN_RECORD), stack(3, *IN_COLLECTIVE)],
        *("rank 2 (b) stalled for 10 min in step (t.py:3); ranks 0-1, 3 are waiting in a collective", 2, 1),
    ),
    "all are joining": (
        [stack(rank, *JOINING) for rank in range(4)],
        f"{EVERYBODY}; some ranks are still in init_process_group; `distlaunch check-port` tests the network",
        *(None, None),
    ),
    "no stacks": ([], EVERYBODY, None, None),
    "all in collectives": ([stack(rank, *IN_COLLECTIVE) for rank in (0, 1)], EVERYBODY, None, None),
    "all elsewhere": ([stack(rank, *IN_RECORD) for rank in (0, 1)], EVERYBODY, None, None),
}


@pytest.mark.parametrize(("stacks", "words", "rank", "node"), ALL_STALLED.values(), ids=ALL_STALLED)
def test_blames_the_rank_that_is_not_in_the_collective_if_stacks_show_it(
    stacks: list[StackDumped], words: str, rank: int | None, node: int | None
) -> None:
    job = stalled("stop")
    job.feed(RanksStalled(0, (0, 1)), RanksStalled(1, (0, 1)))
    job.tick()
    job.feed(*stacks)
    assert texts(job.tick(), "error") == [words]
    assert job.blamed == (Exit.TIMEOUT, rank, node)


def test_names_the_rank_that_is_still_active_if_all_stalled_ranks_wait_in_a_collective() -> None:
    job = stalled("stop")
    job.feed(RanksStalled(0, (0,)), RanksStalled(1, (0, 1)))
    job.tick()
    job.feed(*(stack(rank, *IN_COLLECTIVE) for rank in (0, 2, 3)))
    waiting = "ranks 0, 2-3 stalled for 10 min, waiting in a collective"
    assert texts(job.tick(), "error") == [f"rank 1 (a) was still active; {waiting}"]
    assert job.blamed == (Exit.TIMEOUT, 1, 0)


def test_names_the_innermost_frames_of_a_blocked_rank_or_once_why_there_are_none() -> None:
    job = stalled("warn")
    (words,) = texts(job.feed(stack(1, "read (t.py:3)", "main (t.py:9)")))
    assert words == "rank 1 is blocked in: read (t.py:3) < main (t.py:9)"
    for why in ("Permission denied", "py-spy is not there"):
        assert texts(job.feed(StackDumped(0, 1, why))) == [f"no stack for rank 1: {why}"]
        assert job.feed(StackDumped(0, 0, why), StackDumped(1, 0, why)) == []


def test_blames_a_rank_that_a_signal_has_stopped_before_those_that_wait_for_it() -> None:
    job = stalled("stop")
    job.feed(RanksStalled(0, (0, 1), ((1, 812),)))
    said = job.tick()
    (words,) = texts(said, "warning")
    stopped = "rank 1 (a, pid 101: stopped by a signal; `kill -CONT 812` resumes it)"
    assert words.startswith(f"stalled: rank 0 (a, pid 100), {stopped}: no output"), words
    assert wanted(said) == [Capture(0, (0,), abort=True)]
    job.feed(stack(0, *IN_COLLECTIVE))
    (words,) = texts(job.tick(), "error")
    assert words == "rank 1 (a) stalled for 10 min: stopped by a signal"
    assert job.blamed == (Exit.TIMEOUT, 1, 0)


# Any history, also of an agent that is broken, or not ours at all

_node = st.integers(0, 2)
_local_rank = st.sampled_from([-1, 0, 1, 2, 9])
_failures = st.builds(
    LinkFailure,
    st.sampled_from(Kind),
    st.sampled_from(["", "why", "a\nb"]),
    st.booleans(),
)


def reported(report: Any, node: int, local_rank: int, status: int, at: float) -> Event:
    """A sample of a report, from any node and local rank."""
    drawn = {"node": node, "local_rank": local_rank, "status": status, "at": at, "asked": MASTER}
    event: Event = report._replace(**{name: drawn[name] for name in drawn.keys() & {*report._fields}})
    return event


_samples = st.sampled_from([sample for sample in (*EVENTS, EXITED) if not isinstance(sample, PortUsurped)])
_statuses = st.sampled_from([0, 0, 0, 1, 255, -9])
_events = st.one_of(
    st.builds(reported, _samples, _node, _local_rank, _statuses, st.floats(0, 3 * T)),
    st.builds(RanksJoined, _node, st.lists(_local_rank, max_size=3).map(tuple)),
    st.builds(Swept, _node, st.sampled_from([0, 1, 8]), st.integers(0, 2)),
    st.builds(up, _node, st.integers(0, 3)),
    st.builds(LinkEnded, _node, _failures),
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


@given(_jobs, _phases, _histories, st.booleans())
@bounded(300)
def test_any_history_even_of_a_broken_agent_ends_once_and_starts_nothing_afterwards(
    text: str, phase: str, history: list[tuple[float, Event]], punctual: bool
) -> None:
    job = job_in(phase, text)
    for wait_s, event in history:
        job.feed(event, after=wait_s)
        if punctual:
            job.wait()
    job.feed(SIGTERM)
    for _ in range(2 * len(job.state.nodes) + 2):
        if job.state.phase is not Phase.DONE:
            job.tick()
    assert job.state.phase is Phase.DONE
    assert len(job.actions.of(Finish)) == 1
    for node in range(3):
        assert job.actions.count_of(StartWorkers(node)) <= 1
