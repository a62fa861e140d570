"""The policy of a job as histories: what happened, and what the supervisor then wants, says and blames."""

import errno
import itertools
import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import Self

from distlaunch.agent import messages
from distlaunch.agent.messages import (
    AllSent,
    PortHeld,
    RanksJoined,
    RanksLag,
    RanksStalled,
    RouteFound,
    Swept,
)
from distlaunch.errors import Exit
from distlaunch.plan.placement import Facts
from distlaunch.runs.why import awaited
from distlaunch.supervisor import events
from distlaunch.supervisor.actions import Connect, Drop, Finish, GiveUp, SendTree, ShowMessage, StartWorkers
from distlaunch.supervisor.events import AddressesFound, Event, LinkEnded, OutputFlows, Suspended, TimerDue
from distlaunch.supervisor.nodes import Lost, Route, failure_of, is_over, route_of
from distlaunch.supervisor.preparing import start_command
from distlaunch.supervisor.state import Phase, Timer
from distlaunch.supervisor.status import ControllerProcess, RunState, Status, status_now
from distlaunch.supervisor.step import begin, step
from distlaunch.supervisor.summary import OWN_NETWORK, Summary
from distlaunch.transports.failure import Kind, LinkFailure
from tests.unit.orders import (
    Capture,
    Close,
    Collect,
    Dismiss,
    FindRoute,
    HoldPort,
    PlaceTree,
    Reap,
    StopWorkers,
    orders,
)
from tests.unit.samples import PEER_GONE, WATCHDOG, bounded, spec_of
from tests.unit.test_random_histories import check_step, with_tree
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

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list) and self._kinds() == Actions(other)._kinds()

    def __contains__(self, action: object) -> bool:
        return self.count_of(action) > 0

    def _kinds(self) -> list[tuple[type, Any]]:
        return [(type(action), action) for action in self]

    def count_of(self, action: object) -> int:
        return self._kinds().count((type(action), action))

    def of(self, *kinds: type) -> "Actions":
        return Actions(action for action in self if isinstance(action, kinds))


class History:
    """A job under a fake clock: feed it events, look at what it wants.

    Its nodes do what they are asked to where it is told to `obey`, but for those in `silent`.
    """

    def __init__(self, text: str = TWO, chance: float = 0.0) -> None:
        self.now = T
        begun, first = begin(with_tree(spec_of(text)), self.now, run_id="run-1")
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
            if isinstance(action, GiveUp) or getattr(action, "node", None) not in {None, *self.silent}:
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
                answer = [messages.WorkerStarted(node, rank, 100 + rank) for rank in (0, 1)]
            case StopWorkers():
                answer = [Swept(node, self._began[node], 0)]
            case Reap():
                answer = [messages.Reaped(node, 1)]
            case Close():
                answer = [Swept(node, self._began[node], 0), AllSent(node)]
            case Dismiss():
                answer = [lost(node, clean=True)]
            case GiveUp():
                answer = [lost(node, action.why, Kind.SILENT)]
        return answer

    def to_preparing(self, gpus: int = 0) -> Self:
        self.feed(*(up(node, gpus) for node in range(len(self.state.nodes))))
        return self.now_in(Phase.PREPARING)

    def to_running(self) -> Self:
        self.obey(self.actions)
        return self.now_in(Phase.RUNNING)

    def to_stopping(self) -> Self:
        """Rank 0 has failed with 7, and its attempt, or the job, is being stopped."""
        self.to_running().feed(ended(0, 7))
        return self.now_in(Phase.RESTARTING if self.state.spec.restarts.most else Phase.STOPPING)

    def now_in(self, phase: Phase) -> Self:
        assert self.state.phase is phase
        return self

    def close(self) -> Actions:
        """Every node that is left confirms its clean-up and ends."""
        left = [node for node, each in enumerate(self.state.nodes) if not is_over(each)]
        ends = (end for node in left for end in (AllSent(node), lost(node, clean=True)))
        done = self.feed(*(Swept(node, 0, 0) for node in left), *ends)
        return Actions(each for each in done if not isinstance(each, Dismiss))

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
    phase = "stopping" if phase == "restarting" else phase
    return job if phase == "connecting" else getattr(job, f"to_{phase}")()


def with_times(times: str, text: str = TWO) -> str:
    return text.replace("stop: 10s", f"stop: 10s, {times}")


def up(node: int, gpus: int = 0) -> events.AgentUp:
    return events.AgentUp(node, Facts("/usr/bin/python3", gpus), f"host{node}")


def exited(node: int, local_rank: int, status: int, at: float) -> messages.WorkerExited:
    return messages.WorkerExited(node, local_rank, status, at)


def ended(rank: int, status: int, at: float = 0.0, words: str = "") -> messages.WorkerExited:
    """The end of one of four ranks on two nodes, so many seconds after the beginning."""
    return messages.WorkerExited(rank // 2, rank % 2, status, T + at, words=words)


def recorded(rank: int, second: int, at: float = 0.0, status: int = 1) -> messages.WorkerExited:
    """A rank with torch's record of an exception that it raised in that second."""
    record = {"message": "ValueError: bad", "callstack": OWN, "timestamp": str(second)}
    return ended(rank, status, at)._replace(error_record=record)


def victim(rank: int, at: float = 0.0, status: int = 1) -> messages.WorkerExited:
    """A rank that ends because another one was gone."""
    return ended(rank, status, at, PEER_GONE)


def failed(rank: int, at: float = 0.0, status: int = 1) -> messages.WorkerExited:
    """A rank that ends with an error of its own."""
    return ended(rank, status, at, OWN)


def lost(
    node: int, words: str = "Connection reset by peer", kind: Kind = Kind.LOST, clean: bool = False
) -> LinkEnded:
    return LinkEnded(node, LinkFailure(kind, words, clean))


def dropped(node: int = 0) -> LinkEnded:
    return lost(node, "Connection closed", Kind.DROPPED)


def texts(actions: Actions, level: str | None = None) -> list[str]:
    return [a.text for a in actions if isinstance(a, ShowMessage) and level in (None, a.level)]


def wanted(actions: Actions) -> Actions:
    """All but messages, and requests for evidence without stacks."""
    quiet = (action for action in actions if not isinstance(action, Capture) or action.local_ranks)
    return Actions(action for action in quiet if not isinstance(action, ShowMessage))


def on_both(order: Any, *values: Any) -> list[Any]:
    """This order for each of two nodes."""
    return [order(node, *values) for node in (0, 1)]


# The way to the workers' start


def test_connects_to_all_nodes_then_holds_the_port_and_finds_routes_before_workers_start() -> None:
    job = History()
    assert job.actions == on_both(Connect)
    assert job.feed(up(1)) == []
    assert job.feed(up(0)) == [HoldPort(0, None), FindRoute(1, MASTER)]
    assert job.feed(PortHeld(0, 29400), PortHeld(1, 1)) == [], "the other one was not asked"
    assert job.feed(RouteFound(1, MASTER, "10.0.0.7", "eth0")) == [FindRoute(0, "10.0.0.7")]
    assert job.feed(RouteFound(0, "10.0.0.7", "10.0.0.7", "eth1")) == on_both(StartWorkers)
    assert (job.interfaces, job.state.port) == (["eth1", "eth0"], 29400)


def test_further_ports_and_the_addresses_of_nodes_reach_workers_and_a_restart_gets_new_ports() -> None:
    job = foreseeing(f"{WITH_RESTARTS}\nenv: {{A: '{{port:x}} {{hosts:80}} {{rank}}'}}", further=1)
    hosts = f"{MASTER}:80,{MASTER}:81,10.0.0.2:80,10.0.0.2:81"
    for port in (29411, 29422):
        job.feed(*answers(1), up(0), PortHeld(0, port - 1, (port,)), *answers(0)[2:])
        start = start_command(job.state, 1)
        assert [worker.env["A"] for worker in start.workers] == [f"{port} {hosts} {rank}" for rank in (2, 3)]
        assert "A" not in start.env
        job.feed(ended(0, 7), *on_both(Swept, job.state.attempt, 0))
        job.wait()
    assert job.actions.count_of(HoldPort(0, None, 1)) == 2


def foreseeing(text: str = TWO, address: str = MASTER, further: int = 0) -> History:
    """A job whose nodes have been asked before their agents are there."""
    job = History(text)
    routes = [FindRoute(node, address) for node in range(len(job.state.nodes))]
    assert job.feed(AddressesFound(((0, address),))) == [HoldPort(0, None, further), *routes]
    return job


def answers(node: int, asked: str = MASTER, address: str = MASTER) -> list[Event]:
    """All that an agent says that was asked early."""
    port, source = ([PortHeld(0, 29400)], address) if node == 0 else ([], f"10.0.0.{1 + node}")
    return [up(node), *port, RouteFound(node, asked, address, f"eth{node}", source)]


def lacking_code() -> History:
    """A job whose nodes have been asked for the code, and are ready but for that."""
    job = History(f"{WITH_RESTARTS}\nsync: true")
    assert job.feed(AddressesFound(((0, MASTER),))).of(PlaceTree) == on_both(PlaceTree)
    assert job.feed(*answers(0)).of(StartWorkers) == []
    assert [*awaited(job.state)] == ["no connection yet to b"]
    assert job.feed(*answers(1)).of(StartWorkers) == []
    return job


def test_ranks_start_once_every_node_has_the_code() -> None:
    job = lacking_code()
    assert wanted(job.feed(messages.TreeLacks(1, ()))) == [SendTree(1, ())]
    assert wanted(job.feed(messages.TreeLacks(1, (0, 2)))) == [SendTree(1, (0, 2))]
    assert job.feed(messages.TreePlaced(0, "5891"), messages.TreePlaced(1, "other")).of(StartWorkers) == []
    assert [*awaited(job.state)] == ["no copy of the code yet on b"]
    assert job.feed(messages.TreePlaced(1, "5891")) == on_both(StartWorkers)
    assert job.feed(messages.TreeLacks(1, (0,)), messages.TreeLacks(1, ())) == [], "it has the code"


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ({"python": "3.12.1"}, "; set python to the same version on all nodes"),
        ({"cuda": "none"}, "; pin the exact versions of torch and its dependencies"),
        ({"torch": "none", "cuda": "none"}, " on b to see why, correct that, and delete /envs/1 there"),
    ],
)
def test_says_what_to_do_if_environments_differ(versions: dict[str, str], words: str) -> None:
    job, usual = lacking_code(), {"python": "3.11.7", "torch": "2.13.0", "cuda": "13.0"}
    job.feed(messages.TreePlaced(0, "5891", "/envs/0", tuple(usual.items())))
    done = job.feed(messages.TreePlaced(1, "5891", "/envs/1", tuple({**usual, **versions}.items())))
    assert words in texts(done, "error")[0]


def test_a_node_that_makes_progress_with_the_code_gets_more_time_and_one_that_does_not_is_named() -> None:
    job = lacking_code()
    job.feed(messages.TreePlaced(0, "5891"))
    for _ in range(3):
        assert job.feed(messages.TreeProgress(1, 1), after=CONNECT_S - 1) == []
    (words,) = texts(job.tick(), "error")
    assert words.startswith("no answer from b within 30 s (timeouts.connect); DNS or a file system may be")
    assert (job.now, job.blamed[0]) == (T + 4 * CONNECT_S - 3, Exit.UNREACHABLE)


def test_a_node_can_not_request_files_that_are_not_in_the_code_or_any_amount_of_them() -> None:
    mistakes = ((0, (0, 3), "requests files that are not"), (messages.MAX_LACKS, (0,), "requests it again"))
    for before, lacks, words in mistakes:
        job = lacking_code()
        for _ in range(before):
            assert len(job.feed(messages.TreeLacks(1, lacks)).of(SendTree)) == 1
        refused = job.feed(messages.TreeLacks(1, lacks), messages.TreeLacks(1, lacks))
        assert texts(refused, "error")[0].startswith(f"can't copy the code to b: the node {words}")
        assert refused.of(SendTree) == [] and len(refused.of(Close)) == 2


def test_a_job_ends_if_a_node_can_not_get_the_code_but_not_because_of_one_in_a_restart() -> None:
    full = messages.TreeRefused(1, "/home/me: No space left on device")
    words = "can't copy the code to b: /home/me: No space left on device"
    assert texts(lacking_code().feed(full), "error")[0].startswith(words)
    job = History(f"{TWO}\nsync: true\nmin_nodes: 1\nrestarts: {{max: 3}}").to_preparing()
    job.obey(job.actions)
    job.feed(*on_both(messages.TreePlaced, "5891"))
    job.now_in(Phase.RUNNING).obey(job.feed(lost(1)))
    job.obey(job.wait(60.0))
    assert job.state.attempt == 1
    assert words in " ".join(texts(job.obey(job.feed(full))))
    job.obey(job.wait(60.0))
    job.feed(messages.TreePlaced(0, "5891"))
    assert (job.now_in(Phase.RUNNING).state.members, job.state.attempt) == ((0,), 2)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_nodes_prepare_before_their_agents_are_there(order: tuple[int, ...]) -> None:
    job = foreseeing(f"{JOB}nodes: [a, b, c]")
    *first, last = [event for node in order for event in answers(node)]
    assert job.feed(*first) == []
    assert job.feed(last) == [StartWorkers(node) for node in range(3)]
    assert (job.interfaces, job.state.port) == (["eth0", "eth1", "eth2"], 29400)


@pytest.mark.parametrize("swapped", [False, True])
def test_asks_the_first_node_again_if_its_name_means_another_address_there(swapped: bool) -> None:
    """On Debian its own /etc/hosts has 127.0.1.1 for it."""
    job = foreseeing(address="a")
    first, other = answers(0, "a", "127.0.1.1"), answers(1, "a", MASTER)
    assert job.feed(*(other + first if swapped else first + other)) == [FindRoute(0, MASTER)]
    assert job.feed(RouteFound(0, MASTER, MASTER, "eth1", MASTER)) == on_both(StartWorkers)


def test_the_first_node_needs_no_route_to_itself() -> None:
    job = foreseeing(address="a")
    unknown = messages.RouteFailed(0, "a", "Name or service not known")
    assert job.feed(up(0), PortHeld(0, 29400), unknown, *answers(1, "a")) == [FindRoute(0, MASTER)]
    assert job.feed(messages.RouteFailed(0, MASTER, "no route")) == on_both(StartWorkers)
    assert route_of(job.state.nodes[0]) == Route()


NO_NAME = messages.RouteFailed(1, MASTER, "Name or service not known")


def taken(**owner: object) -> messages.PortRefused:
    return messages.PortRefused(0, "Address already in use", (owner,) if owner else ())


def test_repeats_a_request_that_was_refused_early_and_ends_the_job_at_its_second_failure() -> None:
    for refusal, again, status in (
        (NO_NAME, FindRoute(1, MASTER), Exit.USAGE),
        (taken(), HoldPort(0, None), Exit.PORT_TAKEN),
    ):
        job = foreseeing()
        assert job.feed(up(refusal.node), refusal, up(1 - refusal.node)) == [again]
        assert job.blamed[0] == 0
        (words,) = texts(job.feed(refusal), "error")
        assert "None" not in words and "leave out the port" not in words, "none was chosen"
        assert job.blamed[0] == status


def test_a_plan_without_the_first_node_prepares_again() -> None:
    job = foreseeing(f"{JOB}nodes: [a, b, c]\nmin_nodes: 2")
    job.feed(AddressesFound(((0, MASTER), (1, "10.0.0.8"))), lost(0, "x", Kind.UNREACHABLE))
    asked = job.feed(*answers(1), *answers(2))
    assert wanted(asked) == [HoldPort(1, None), FindRoute(2, "10.0.0.8")]
    job.feed(PortHeld(1, 29400), *answers(2)[1:])
    job.now_in(Phase.PREPARING)  # that was an answer to the first question
    job.feed(RouteFound(2, "10.0.0.8", "10.0.0.8", "eth2"))
    assert job.feed(RouteFound(1, "10.0.0.8", "10.0.0.8", "eth1")) == [StartWorkers(1), StartWorkers(2)]


def test_a_node_that_reconnects_prepares_again() -> None:
    job = foreseeing()
    job.feed(dropped(1))
    assert job.tick() == [Connect(1), FindRoute(1, MASTER)]
    assert job.feed(*answers(0), *answers(1)) == on_both(StartWorkers)


def test_warns_if_node_0_lacks_master_addr() -> None:
    job = foreseeing()
    job.feed(up(0), PortHeld(0, 29400), up(1), RouteFound(1, MASTER, MASTER, "eth0", "10.0.0.8"))
    (words,) = texts(job.feed(RouteFound(0, MASTER, MASTER, "eth0", "10.0.0.7")), "warning")
    assert words.startswith(f"MASTER_ADDR {MASTER} is not an address of a, where rank 0 runs; set nodes[0].")
    assert words.endswith("address to 10.0.0.7, unless MASTER_ADDR forwards connections to a")


def test_a_job_on_one_machine_needs_no_route() -> None:
    job = History(f"{JOB}nodes: 2")
    assert job.actions == [*on_both(Connect), HoldPort(0, None)]
    assert job.feed(up(0), up(1)) == []
    assert job.feed(PortHeld(0, 29400)) == on_both(StartWorkers)
    assert job.interfaces == [None, None], "a script may also talk to other machines"


# Nodes that can't be used


def test_reports_every_node_that_can_not_be_used_and_starts_nothing() -> None:
    job = History(f"{JOB}nodes: [a, b, c]")
    said = job.feed(up(0), lost(1, "Permission denied", Kind.AUTHENTICATION))
    assert said == [ShowMessage("error", "b: authentication failed")]
    said = job.now_in(Phase.CONNECTING).feed(lost(2, "no", Kind.UNRESOLVED))
    assert texts(said, "error") == ["2 of 3 nodes can't be used (b, c); nothing was started"]
    assert wanted(said) == [Close(0, STOP_S)]
    assert job.close() == [Finish()]
    assert job.blamed == (Exit.UNREACHABLE, None, 1)
    failures = [failure_of(node) for node in job.state.nodes[1:]]
    assert [each and each.kind for each in failures] == [Kind.AUTHENTICATION, Kind.UNRESOLVED]


def test_counts_many_failed_nodes_rather_than_naming_all() -> None:
    said = History(f"{JOB}nodes: ['n[1-50]']").feed(*(lost(node) for node in range(50)))
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
    for attempt in range(5):
        before = job.now
        assert job.feed(dropped()) == []
        assert job.tick() == [Connect(0), HoldPort(0, None)]
        assert 0.5 <= (job.now - before) / (0.4 * 2**attempt) <= 1.5
    assert job.now - T < CONNECT_S
    assert wanted(job.feed(dropped())) == [Finish()]
    assert job.blamed == (Exit.UNREACHABLE, None, 0)


def test_retries_nodes_that_were_dropped_together_at_different_times() -> None:
    job = History(f"{JOB}nodes: ['n[1-16]']")
    job.feed(*map(dropped, range(16)))
    times = sorted(job.state.due_at(Timer.RETRY, node) or 0.0 for node in range(16))
    assert min(later - sooner for sooner, later in itertools.pairwise(times)) > 0.4 / 16 / 4


def test_gives_up_nodes_that_have_not_answered_at_the_deadline_and_keeps_their_earlier_failures() -> None:
    job = History(f"{JOB}nodes: [a, b, c, d]")
    job.feed(up(0), dropped(2), after=CONNECT_S - 1.0)
    assert Connect(2) in job.wait(0.9)
    job.feed(dropped(3))
    said = job.wait(0.1)
    late = f"no agent within {CONNECT_S:g} s (timeouts.connect)"
    assert wanted(said) == [GiveUp(1, late), GiveUp(2, late)]
    assert texts(said) == ["d: dropped by the server"]
    assert wanted(job.feed(*(lost(node, "", Kind.SILENT) for node in (1, 2)))) == [Close(0, STOP_S)]
    failure = failure_of(job.state.nodes[2])
    assert failure and failure.kind is Kind.DROPPED
    assert job.feed(up(1)) == []
    assert job.blamed[0] == Exit.UNREACHABLE


# Preparations that fail


NO_GPUS = (TWO.replace("gloo", "nccl"), "nccl needs a GPU for each worker, but a has 0 GPUs for 2 workers")
LOOPBACK = (f"{TWO}\nmaster_addr: 127.0.0.1", "127.0.0.1 is a loopback address")


@pytest.mark.parametrize(("text", "words"), [NO_GPUS, LOOPBACK], ids=["GPUs are missing", "loopback"])
def test_an_impossible_plan_ends_the_job(text: str, words: str) -> None:
    job = History(text)
    actions = job.feed(up(0), up(1))
    assert words in texts(actions, "error")[0]
    assert wanted(actions) == on_both(Close, STOP_S)
    assert job.close() == [Finish()]
    assert job.blamed == (Exit.USAGE, None, None)


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (taken(uid=0, pid=42, command="redis"), "use port 29555 on a: in use by redis (pid 42); leave out"),
        (taken(uid=1007, pid=None, command=None), "in use by a process of uid 1007"),
        (taken(), "in use by a process that is not listening on it"),
        (NO_NAME, "Name or service not known; set nodes[0].address to an"),
    ],
)
def test_a_failure_while_preparing_ends_the_job(event: Any, words: str) -> None:
    job = History(f"{WITH_RESTARTS}\nmaster_port: 29555").to_preparing()
    assert words in texts(job.feed(event), "error")[0]
    assert isinstance(job.close()[-1], Finish)
    assert not job.state.restarts
    assert job.blamed == (Exit.USAGE if event is NO_NAME else Exit.PORT_TAKEN, None, event.node)
    assert not job.actions.of(StartWorkers)


@pytest.mark.parametrize("phase", ["connecting", "preparing"])
@pytest.mark.parametrize(
    ("event", "words"),
    [
        (lost(1, "Timeout, server b not responding."), "Timeout, server b not responding"),
        (messages.AgentLeaving(1, 15), "its agent was stopped by signal 15 (SIGTERM)"),
        (messages.AgentLeaving(1, 15, orphaned=True), "its agent's guardian process was killed"),
        (messages.AgentLeaving(1, 0), "the connection to its agent was interrupted"),
        (messages.AgentLeaving(1, 0, damage="x"), "the data sent to its agent was altered in transit (x)"),
    ],
)
def test_a_node_that_is_lost_before_workers_start_ends_the_job(phase: str, event: Event, words: str) -> None:
    job = job_in(phase)
    job.feed(*([up(1)] if phase == "connecting" else []))
    (told,) = texts(job.feed(event), "error")
    assert told.startswith(f"b was lost: {words}")
    job.close()
    assert job.now_in(Phase.DONE).blamed == (Exit.NODE_LOST, None, 1)
    assert not job.actions.of(StartWorkers)


# Workers


def test_a_job_succeeds_when_all_workers_do() -> None:
    job = History().to_running()
    assert job.feed(*(ended(rank, 0) for rank in range(3))) == []
    assert job.feed(ended(3, 0)) == on_both(Close, 0.0)
    assert job.close() == [Finish()]
    assert job.blamed == (Exit.OK, None, None)
    assert not any(worker.stopped for worker in job.state.workers)


def unstarted(rank: int, code: int, text: str = "x") -> messages.WorkerUnstarted:
    return messages.WorkerUnstarted(rank // 2, rank % 2, "exec", code, text)


SIGINT, SIGTERM = messages.Interrupted(signal.SIGINT), messages.Interrupted(signal.SIGTERM)
STOPPED_AGENT = messages.AgentLeaving(1, signal.SIGTERM)
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
    "ranks that their agent stopped before": (
        [ended(0, -9, 2), STOPPED_AGENT, ended(2, -15, 1)._replace(asked=True)],
        (137, 0, 0),
    ),
    "a rank that its agent stopped before the user came": (
        [victim(0), SIGINT, ended(2, -15, -1)._replace(asked=True)],
        (1, 0, 0),
    ),
    "a late refusal": ([ended(0, 1), messages.PortRefused(0, "late", ())], (1, 0, 0)),
    "a late route": ([ended(0, 1), messages.RouteFailed(1, MASTER, "late")], (1, 0, 0)),
    # A rank that lost its peer may end before the one that it lost.
    "a victim, then sys.exit without a word": ([victim(0), ended(1, 7, 0.5)], (7, 1, 0)),
    "a victim, then a killed rank": ([victim(0), ended(1, -9, 0.5)], (137, 1, 0)),
    "a victim, then a lost node": ([victim(0), lost(1)], (71, None, 1)),
    "a victim, then a stopped agent": ([victim(0), STOPPED_AGENT], (71, None, 1)),
    "two victims before": ([victim(0), victim(2, -1), failed(3, 0.5)], (1, 3, 1)),
    "a victim that was earlier": ([failed(0), victim(2, -1)], (1, 0, 0)),
    "a victim when the user is there": ([victim(0), SIGINT], (1, 0, 0)),
    "a traceback before the stop": ([victim(0), SIGINT, failed(2, 1, -15)], (1, 2, 1)),
    "an error handled before the stop": (
        [victim(0), SIGINT, ended(2, -15, 1, f"{OWN}skipped a sample\n")],
        (1, 0, 0),
    ),
    "another victim that was stopped": ([victim(0), SIGINT, victim(2, 1, -15)], (1, 0, 0)),
    "an exit after the stop": ([victim(0), SIGINT, ended(2, 3, 1)], (1, 0, 0)),
    "an exit before the stop": ([victim(0), SIGINT, ended(2, 3, -1)], (3, 2, 1)),
    "nobody left to wait for": ([victim(0), victim(1, 0.1), victim(2, 0.2), victim(3, 0.3)], (1, 0, 0)),
    "the first with its own error": ([victim(0), failed(1, 0.1), failed(2)], (1, 2, 1)),
    "a crash after losing a peer": ([victim(0, status=-11)], (139, 0, 0)),
    "an earlier exception of a rank that takes longer to exit": (
        [recorded(3, 101), recorded(2, 100, 1.0, -15)],
        (1, 2, 1),
    ),
    "an earlier exception by the clock of another node": (
        [recorded(3, 101), recorded(0, 100, 1.0)],
        (1, 3, 1),
    ),
    "an exception in the same second": ([recorded(3, 101), recorded(2, 101, 1.0)], (1, 3, 1)),
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
    assert all(job.actions.count_of(order) <= 1 for order in on_both(Close, STOP_S))


@pytest.mark.parametrize(
    ("code", "status"),
    [(errno.ENOENT, 127), (errno.EACCES, 126), (errno.ENOEXEC, 126), (errno.EAGAIN, 126), (errno.E2BIG, 126)],
    ids=lambda code: errno.errorcode.get(code, str(code)),
)
def test_a_worker_that_can_not_start_ends_the_job_with_the_status_of_a_shell(code: int, status: int) -> None:
    job = History(WITH_RESTARTS).to_running()
    said = texts(job.feed(unstarted(3, code, "./a.out: why")), "error")
    assert said == ["rank 3 (b) could not be started: ./a.out: why"]
    job.close()
    assert (job.blamed, job.state.restarts) == ((status, 3, 1), ())
    assert job.state.workers[3].phase_word == "not started"


STOPPED_2 = "rank 2: stopped by distlaunch (exit status 143)"
CUT_SHORT = "logs of ranks 0-3 are incomplete: the nodes were lost before all output had arrived"


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (
            [ended(1, 2), ended(0, 2), ended(2, 143)._replace(asked=True)],
            ["rank 0: also failed, exit status 2", STOPPED_2],
        ),
        ([ended(0, 7), lost(1)], ["ranks 2-3: lost with their node"]),
        (
            [ended(0, 7), ended(2, -15, words=PEER_GONE)._replace(asked=True)],
            ["rank 2: stopped by distlaunch"],  # which went on after that error
        ),
        ([Suspended(35.0), lost(0), lost(1)], ["ranks 0-3: lost with their nodes", CUT_SHORT]),
        ([lost(0), lost(1)], [f"hint: {OWN_NETWORK}"]),
    ],
)
def test_the_summary_tells_what_became_of_the_other_ranks(events: list[Event], expected: list[str]) -> None:
    job = History().to_running()
    job.feed(*events)
    lines = {*Summary(job.state, "", {}, 1.0).lines()}
    assert set(expected) <= lines
    assert any("network of the host" in line for line in lines) == any("network" in line for line in expected)


def test_what_ranks_printed_may_be_lost_even_if_their_start_was_not_reported() -> None:
    job = foreseeing()
    job.feed(*answers(0), *answers(1))
    job.now_in(Phase.RUNNING).feed(lost(1, "", Kind.SILENT))
    gaps = "logs of ranks 2-3 may be incomplete: the node was lost before all output had arrived"
    assert job.state.cut_off(1) == [2, 3] and gaps in Summary(job.state, "", {}, 1.0).lines()


def test_a_lost_node_takes_its_running_workers_with_it() -> None:
    job = History().to_running()
    job.feed(ended(2, 0))
    assert wanted(job.feed(lost(1, "a\nTimeout, server b not responding."))) == [Close(0, STOP_S)]
    phases = [worker.phase_word for worker in job.state.workers]
    assert phases == ["running", "running", "exited", "lost with its node"]
    assert job.close() == [Finish()]


SUSPENDED = "this machine, or this command, was suspended for 35 s; nodes stop their ranks after 30 s (time"


@pytest.mark.parametrize(("for_s", "after", "is_cause"), [(35, 1, True), (10, 1, False), (20, 31, False)])
def test_a_long_suspension_is_the_cause_of_losses_soon_after(
    for_s: float, after: float, is_cause: bool
) -> None:
    job = History().to_running()
    assert job.feed(Suspended(for_s)) == []
    (said,) = texts(job.feed(lost(0), lost(1), after=after), "error")
    assert said.startswith(SUSPENDED if is_cause else "a was lost: Connection reset by peer")
    assert job.blamed == (Exit.NODE_LOST, None, None if is_cause else 0)


def test_nodes_have_as_much_more_time_to_answer_as_the_controller_was_suspended() -> None:
    job = History()
    (due,) = {job.state.due_at(Timer.ANSWER, node) for node in (0, 1)}
    assert due is not None
    said = job.feed(Suspended(due), TimerDue(Timer.ANSWER, 0), TimerDue(Timer.ANSWER, 1), after=due)
    assert (said, job.state.due_at(Timer.ANSWER, 1)) == ([], 2 * due)


def test_ignores_a_local_rank_that_the_plan_does_not_have() -> None:
    job = History().to_running()
    before = job.state
    for rank in (-1, 2, 70000):
        job.feed(messages.WorkerStarted(0, rank, 1), exited(0, rank, 1, job.now), RanksJoined(0, (rank,)))
        job.feed(messages.WorkerUnstarted(0, rank, "exec", 2, "x"))
    assert job.state == before


# The end of nodes


LOST_BYTES = "4096 bytes of rank 2's stderr were lost: the rank printed faster than its node could"
UNCONFIRMED = "b: lost before it confirmed its cleanup; its ranks exit within 40 s"
ALL_SUCCEED = [ended(rank, 0) for rank in range(4)]


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([messages.OutputLost(1, 0, 1, 4096)], LOST_BYTES),
        ([messages.Stuck(1, ({"pid": 7, "command": "cp"},))], "b: 1 process survived SIGKILL: cp (pid 7)"),
        ([*ALL_SUCCEED, Swept(0, 0, 3)], "a: killed 3 processes that outlived their workers"),
        ([ended(0, 7), lost(1), Swept(0, 0, 3)], UNCONFIRMED),  # which they may in a job that failed
        ([lost(1)], "b: its ranks exit within 45 s"),
    ],
)
def test_warns_about_losses(events: list[Event], words: str) -> None:
    job = History().to_running()
    job.feed(*events)
    (warning,) = texts(job.actions, "warning")
    assert warning.startswith(words)


def test_the_first_failure_ends_the_job_and_names_workers_that_take_long_to_exit_once() -> None:
    job = History().to_running()
    said = job.feed(ended(0, -40))
    assert texts(said, "error") == ["rank 0 (a) failed: killed by signal 40"]
    assert wanted(said) == on_both(Close, STOP_S)
    job.feed(ended(2, -15))
    waiting = "waiting for rank 1 (a, pid 101), rank 3 (b, pid 101) to exit; SIGKILL in 7 s"
    assert (texts(job.tick()), job.now) == ([waiting], T + 3.0)
    job.close()
    assert len(job.actions.of(ShowMessage)) == 2  # that, and the cause
    assert job.blamed == (168, 0, 0)


def test_gives_up_nodes_that_do_not_confirm_after_grace_and_margin() -> None:
    job = History().to_stopping()
    job.feed(Swept(0, 0, 0), lost(0), after=1.0)
    assert job.wait(STOP_S + STOP_MARGIN_S - 1.1) == []
    actions = job.wait(0.1)
    assert wanted(actions) == [Drop(1), Finish()]
    (warning,) = texts(actions, "warning")
    assert warning.startswith("gave up on b: it did not confirm its cleanup; check that no ranks are left")
    assert isinstance(job.state.nodes[1], Lost)
    gaps = "may be incomplete: distlaunch gave up on the node before all output had arrived"
    assert f"logs of ranks 2-3 {gaps}" in Summary(job.state, "", {}, 1.0).lines()


@pytest.mark.parametrize("known", [True, False])
def test_a_rank_is_not_called_the_first_if_others_may_have_failed_unseen(known: bool) -> None:
    job = History().to_running()
    job.feed(exited(0, 0, 7, T), exited(0, 1, -15, T))
    if known:
        job.feed(exited(1, 0, -15, T), exited(1, 1, -15, T))
    job.feed(Swept(0, 0, 0), lost(0), lost(1))
    cause = job.state.cause
    assert cause and (job.state.phase, cause.inferred) == (Phase.DONE, not known)
    assert cause.text == f"rank 0 (a) failed{' first' if known else ''}: exit status 7"


def test_the_status_of_a_stopped_run_names_the_nodes_on_which_ranks_may_be_left() -> None:
    """`distlaunch stop` shows nothing else of the run."""
    job = History().to_running()
    job.feed(SIGINT, Swept(0, 0, 0), lost(0))
    job.wait(STOP_S + STOP_MARGIN_S)
    began = Status("r", "job", RunState.STOPPING, T, T, ControllerProcess("", 0))
    status = status_now(began, job.state, job.now)
    assert status.state is RunState.CANCELLED
    words = "stopped by SIGINT; ranks may be left on b, which did not confirm the cleanup"
    assert status.why == words


def test_a_clean_node_may_deliver_its_output_longer_but_not_for_ever() -> None:
    job = History().to_stopping()
    job.feed(*on_both(Swept, 0, 0), lost(0), after=20.0)
    for _ in range(2):
        assert job.wait(DRAIN_S - 0.1) == []
        assert job.feed(OutputFlows(1)) == []
    assert job.wait(DRAIN_S - 0.1) == []
    actions = job.wait(0.1)
    assert wanted(actions) == [Drop(1), Finish()]
    words = "gave up on b: nothing arrived for 30 s; its output may be incomplete"
    assert texts(actions, "warning") == [words]


@pytest.mark.parametrize("given_up", [False, True])
def test_a_clean_node_has_time_to_deliver_when_another_is_lost_or_given_up(given_up: bool) -> None:
    job = History().to_stopping()
    job.feed(Swept(0, 0, 0), after=1.0)
    if given_up:
        assert wanted(job.wait(STOP_S + STOP_MARGIN_S - 1.0)) == [Drop(1)]
        job.feed(OutputFlows(0), after=DRAIN_S - 1.0)
        assert wanted(job.wait(DRAIN_S - 0.1)) == []
    else:
        job.feed(lost(1), after=STOP_S + STOP_MARGIN_S - 2.0)
        assert wanted(job.wait(2.0)) == []
    assert job.feed(AllSent(0), lost(0, clean=True)) == [Dismiss(0), Finish()]


@pytest.mark.parametrize("end", ["clean", "lost", "given up", "insisted"])
def test_files_are_requested_once_no_rank_is_left_on_any_node(end: str) -> None:
    """Nodes may share a disk, to which the last rank still writes."""
    job = History(f"{TWO}\ncollect: [x]").to_stopping()
    asked = list(job.feed(Swept(0, 0, 0), after=1.0).of(Collect))
    if end == "clean":
        asked += job.feed(Swept(1, 0, 0), after=1.0).of(Collect)
    elif end == "lost":
        asked += job.feed(lost(1), after=1.0).of(Collect)
    elif end == "given up":
        asked += job.wait(STOP_S + STOP_MARGIN_S).of(Collect)
    else:
        job.feed(SIGINT, after=1.0)
        job.feed(SIGINT, after=1.0)
        asked += job.feed(Swept(1, 0, 0), after=1.0).of(Collect)
    assert asked == [Collect(0)] * (end != "insisted")


def test_output_that_a_clean_node_could_not_deliver_is_told() -> None:
    """srun may fail when the ranks are long gone."""
    job = History().to_stopping()
    job.feed(Swept(0, 0, 0), Swept(1, 0, 0))
    said = texts(job.feed(LinkEnded(0, LinkFailure(Kind.LOST, clean=True))), "warning")
    assert said == ["a: its connection ended early; its output may be incomplete"]
    said = texts(job.feed(lost(1, "srun: error: unexpected eof")), "warning")
    assert said == ["b: srun: error: unexpected eof; its output may be incomplete"]


@pytest.mark.parametrize("exits", [True, False])
def test_a_node_that_has_sent_everything_is_only_told_to_exit(exits: bool) -> None:
    job = History().to_stopping()
    job.feed(*on_both(Swept, 0, 0), AllSent(0), lost(0, clean=True))
    assert job.feed(AllSent(1)) == [Dismiss(1)]
    if exits:
        assert job.feed(lost(1, "srun: error: unexpected eof")) == [Finish()]
    else:
        assert texts(job.wait(DRAIN_S), "warning") == ["b: its agent did not exit within 30 s"]
    assert not any("incomplete" in line for line in Summary(job.state, "", {}, 1.0).lines())


# Interrupts


def invoked(**values: Any) -> History:
    """A running job of a command with these properties."""
    job = job_in("running")
    invocation = job.state.spec.invocation._replace(**values)
    job.state = job.state._replace(spec=job.state.spec._replace(invocation=invocation))
    return job


@pytest.mark.parametrize(
    ("torchrun", "way"), [(False, "`distlaunch run --detach`"), (True, "nohup or in tmux")]
)
def test_ctrl_z_explains_how_to_free_the_terminal(torchrun: bool, way: str) -> None:
    said = texts(invoked(shares_stdio=torchrun).feed(messages.Interrupted(signal.SIGTSTP)), "warning")
    assert said == [f"a run can't be suspended; to free the terminal, start it with {way}"]


SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE]
AGAIN = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


@pytest.mark.parametrize("phase", [*PHASES, "restarting"])
@pytest.mark.parametrize("signum", SIGNALS, ids=lambda signum: signum.name)
def test_one_signal_ends_the_job_gracefully_in_every_phase(phase: str, signum: signal.Signals) -> None:
    job = job_in(phase, WITH_RESTARTS)
    before = len(job.actions)
    actions = job.feed(messages.Interrupted(signum))
    if ranks := {"running": 4, "restarting": 3}.get(phase):
        waiting = f"received {signum.name}: waiting up to 10 s for {ranks} ranks to exit"
        again = f"; another {AGAIN[signum]} kills them" if signum in AGAIN else ""
        assert texts(actions)[0] == f"{waiting}{again}"
    else:
        assert texts(actions)[0] == f"stopped by {signum.name}"
    if phase == "connecting":
        assert wanted(actions) == [*on_both(Drop), Finish()]
    else:
        assert wanted(actions) == on_both(Close, STOP_S)
        assert job.close() == [Finish()]
    assert job.blamed == (128 + signum, None, None)
    assert not Actions(job.actions[before:]).of(StartWorkers)


def test_names_the_command_that_stopped_the_job_as_the_way_to_kill_its_ranks() -> None:
    stop = messages.Interrupted(signal.SIGINT, by_command=True)
    (said,) = texts(History().to_running().feed(stop))
    assert said.endswith(" for 4 ranks to exit; another `distlaunch stop` kills them")
    job = History(f"{TWO}\ncollect: [out]").to_stopping()
    again = "already stopping; run `distlaunch stop` again to kill the workers now, without collecting files"
    assert texts(job.feed(stop)) == [again]


@pytest.mark.parametrize("phase", ["preparing", "running", "restarting", "stopping"])
def test_two_signals_kill_and_three_exit_at_once(phase: str) -> None:
    job = job_in(phase, TWO if phase == "stopping" else WITH_RESTARTS)
    job.feed(SIGINT, after=1.0)
    assert wanted(job.feed(SIGTERM, after=1.0)) == on_both(Close, 0.0)
    left = ShowMessage("warning", "exiting without waiting for the agents, which kill all remaining workers")
    assert job.feed(SIGINT, after=1.0) == [left, Finish()]
    assert job.blamed == ((7, 0, 0) if phase == "stopping" else (130, None, None))
    assert job.feed(SIGINT, *on_both(Swept, 0, 0), lost(0)) + job.wait() == []


def test_signals_at_the_same_time_count_once() -> None:
    job = job_in("running")
    job.feed(SIGINT)
    assert job.feed(SIGINT, after=0.02) == []
    assert job.feed(SIGTERM, after=0.07) == []
    assert wanted(job.feed(SIGINT, after=0.02)) == on_both(Close, 0.0)
    assert not any("waiting" in text for text in texts(job.tick())), "for workers that are killed"


@pytest.mark.parametrize(("name", "reaches"), [("SIGUSR1", "SIGUSR1"), ("SIGINT", "SIGTERM")])
def test_passes_on_the_signals_that_the_job_names(name: str, reaches: str) -> None:
    actions = invoked(signals=("SIGUSR1", "SIGTERM")).feed(messages.Interrupted(signal.Signals[name]))
    assert wanted(actions) == on_both(Close, STOP_S, signal.Signals[reaches])


def test_a_signal_while_a_retry_waits_ends_the_job() -> None:
    job = History(f"{JOB}nodes: [a]")
    job.feed(dropped(0))
    assert wanted(job.feed(SIGINT, after=1.0)) == [Drop(0), Finish()]


# Time limits


def test_a_job_that_is_stopping_has_no_other_time_limit() -> None:
    job = History(with_times("job: 20s")).to_stopping()
    ends_at = job.now + STOP_S + STOP_MARGIN_S
    job.tick()  # who has not ended is named
    assert job.state.next_due == ends_at
    job.wait(18.0)
    assert job.blamed == (7, 0, 0)


@pytest.mark.parametrize("phase", [*PHASES, "restarting"])
def test_the_jobs_time_limit_holds_in_every_phase(phase: str) -> None:
    job = job_in(phase, with_times("job: 20s", WITH_RESTARTS))
    assert texts(job.wait(19.9), "error") == []
    assert texts(job.wait(0.1), "error") == ["the job timed out after 20 s (timeouts.job)"]
    job.close()
    assert job.blamed == (Exit.TIMEOUT, None, None)


def test_names_ranks_that_do_not_join_ever_more_rarely_and_ends_the_job_at_last() -> None:
    job = History().to_running()
    job.feed(RanksJoined(0, (0, 1)), RanksJoined(1, (0,)), RanksLag(1, ((1, False, "stopped by a signal"),)))
    words = "3/4 ranks joined; waiting for rank 3 (b, pid 101: stopped by a signal)"
    for at in (15, 30, 60, 120, 240, 480):
        assert (texts(job.tick()), job.now) == ([words], T + at)
    assert (texts(job.tick()), job.now) == ([f"{words}; gave up after 10 min (timeouts.join)"], T + 600)
    job.close()
    assert job.blamed == (Exit.TIMEOUT, None, None)


REFUSED = "the rendezvous refuses its connection"
ALL_REFUSED: list[Event] = [RanksLag(node, ((0, True, REFUSED), (1, True, REFUSED))) for node in (0, 1)]
OTHERS_REFUSED: list[Event] = [RanksLag(0, ((0, False, "idle"), (1, True, REFUSED))), ALL_REFUSED[1]]
UNJOINED = "exited with status 0"
WAIT_FOR_0 = "the others are waiting for rank 0"
FIRST = "0/4 ranks joined; waiting for rank 0"
OTHERS = f"rank 1 (a, pid 101: {REFUSED}), rank 2 (b, pid 100: {REFUSED}), rank 3 (b, pid 101: {REFUSED})"


TRIES = f"1{FIRST[1:]} (a, pid 100), rank 2 (b, pid 100: slow), rank 3 (b: {UNJOINED}); {WAIT_FOR_0}"
NOBODY = f"{FIRST} (a, pid 100: {REFUSED}), {OTHERS}; the rendezvous is at {MASTER}:29400"
LAGGING: dict[str, tuple[list[Event], str]] = {
    "one tries": ([RanksJoined(0, (1,)), RanksLag(1, ((0, True, "slow"),)), ended(3, 0)], TRIES),
    "rank 0 is elsewhere": (OTHERS_REFUSED, f"{FIRST} (a, pid 100: idle), {OTHERS}; {WAIT_FOR_0}"),
    "rank 0 has exited": ([*OTHERS_REFUSED, ended(0, 0)], f"{FIRST} (a: {UNJOINED}), {OTHERS}; {WAIT_FOR_0}"),
    "nobody has joined": (ALL_REFUSED, NOBODY),
}


@pytest.mark.parametrize(("events", "words"), LAGGING.values(), ids=LAGGING)
def test_says_why_ranks_have_not_joined(events: list[Event], words: str) -> None:
    job = History().to_running()
    job.feed(*events)
    assert texts(job.tick()) == [words]


OVERDUE = f"; {WAIT_FOR_0}; gave up after 10 min (timeouts.join)"
APART = "ranks that never call torch.distributed.init_process_group run independently; if that is intended,"
ADVICE = f"{APART} replace timeouts.join with rendezvous: none"
JOIN_LIMITS: dict[str, tuple[str, float, list[Event], float, str]] = {
    "the default": ("", 0.0, OTHERS_REFUSED, 600.0, OVERDUE),
    "rank 0 has exited": ("", 0.0, [ended(0, 0), *OTHERS_REFUSED], 600.0, OVERDUE),
    "after data was prepared": ("", 5000.0, OTHERS_REFUSED, 5600.0, OVERDUE),
    "the job's": ("join: 20s", 0.0, [], 20.0, f"; gave up after 20 s (timeouts.join); {ADVICE}"),
}


@pytest.mark.parametrize(("times", "after", "events", "ends", "words"), JOIN_LIMITS.values(), ids=JOIN_LIMITS)
def test_the_join_limit_counts_from_the_first_try_of_a_rank_unless_the_job_sets_it(
    times: str, after: float, events: list[Event], ends: float, words: str
) -> None:
    job = History(with_times(times)).to_running()
    job.feed(*events, after=after)
    while job.state.phase is Phase.RUNNING:
        said = texts(job.tick(), "error")
    assert job.now == T + ends
    assert said[0].startswith(FIRST) and said[0].endswith(words)
    assert job.blamed == (Exit.TIMEOUT, None, None)


@pytest.mark.parametrize("other", ["2.13.0+cpu", "2.12.1"])
def test_reports_once_that_all_ranks_joined_and_different_versions_of_torch(other: str) -> None:
    job = History().to_running()
    assert job.feed(RanksJoined(0, (0, 1), "2.13.0+cpu")) == []
    said = job.feed(RanksJoined(1, (0, 1), other), after=1.5)
    assert texts(said, "info") == [f"all 4 ranks joined the rendezvous at {MASTER}:29400 in 1.5 s"]
    what = "the nodes have different versions of torch"
    words = f"{what}: 2.13.0+cpu on a; 2.12.1 on b; install the same version on all of them"
    assert texts(said, "warning") == [words] * (other == "2.12.1")
    assert job.feed(RanksJoined(1, (0, 1))) == []
    assert job.state.next_due is None


@pytest.mark.parametrize(("times", "way"), [("", "set"), ("join: 5m", "replace timeouts.join with")])
def test_a_job_that_does_not_use_the_rendezvous_gets_one_message_and_no_limit(times: str, way: str) -> None:
    job = History(with_times(times)).to_running()
    job.feed(RanksLag(0, ((0, False, "torch imported, busy"), (1, False, "has not imported torch yet"))))
    (words,) = texts(job.tick(), "info")
    assert words.startswith(f"{FIRST} (a, pid 100: torch imported, busy), rank 1 (")
    assert words.endswith(f"; {APART} {way} rendezvous: none")
    if not times:
        assert [job.tick() for _ in range(20)] == [[]] * 20
        job.now_in(Phase.RUNNING)


def test_does_not_report_a_lone_rank_without_a_rendezvous() -> None:
    job = History("script: t.py\nbackend: gloo\ngpus_per_node: 0").to_running()
    assert [job.tick() for _ in range(20)] == [[]] * 20


@pytest.mark.parametrize(("rule", "ranks"), [("all", (3, 0, 1, 2)), ("any", (3,)), ("rank 0", (3, 0))])
def test_success_ends_the_other_ranks_gracefully_unless_one_failed(rule: str, ranks: tuple[int, ...]) -> None:
    job, failing = (History(f"{TWO}\nsuccess: {rule}").to_running() for _ in range(2))
    *first, last = ranks
    assert job.feed(*(ended(rank, 0) for rank in first)) == []
    done = job.feed(ended(last, 0))
    said = [f"rank {last} finished; stopping the others (success: {rule})"]
    assert texts(done) == ([] if rule == "all" else said)
    assert wanted(done) == on_both(Close, 0.0 if rule == "all" else STOP_S, 15)
    job.feed(ended(1, 143))
    failing.feed(ended(3, 9), ended(0, 0))
    assert (job.blamed, failing.blamed) == ((0, None, None), (9, 3, 1))


@pytest.mark.parametrize("text", [with_times("join: none"), f"{TWO}\nrendezvous: none"])
def test_without_a_join_limit_nobody_is_waited_for(text: str) -> None:
    job = History(text).to_running()
    job.feed(ALL_REFUSED[1])
    assert job.state.next_due is None


def test_names_a_rank_that_has_not_started_without_a_pid() -> None:
    job = job_in("preparing", with_times("join: 0s"))
    job.feed(PortHeld(0, 29400), *(RouteFound(node, MASTER, MASTER, "eth0") for node in (1, 0)))
    (words,) = texts(job.tick(), "error")
    assert words.startswith(f"{FIRST} (a, not started yet), ")


# A rank that lost its peer may end before the one that it lost


def timed_out(rank: int, at: float = 0.0, call: str = "all_reduce") -> messages.WorkerExited:
    return ended(rank, 1, at, TIMED_OUT.replace("all_reduce", call))


JOINED: list[Event] = on_both(RanksJoined, (0, 1))
LEFT: list[Event] = [timed_out(0), timed_out(1), victim(2, 0.1)]
FIRST_WAITED = "rank 0 (a) failed: exit status 1, after timing out while waiting for another rank"
UNKNOWN = f"{FIRST_WAITED}; rank 3 had not failed (stalled, or in another collective?)"
WAITING = "ranks 0-2 were waiting in all_reduce (t.py:9)"
STALLED = "stalled: no output, CPU or GPU use for 10 min"
UNJOINED_2: list[Event] = [RanksJoined(0, (0, 1)), RanksLag(1, ((0, False, "idle"),)), RanksJoined(1, (1,))]
IN_INIT: list[Event] = [timed_out(rank, 0.1 * rank, "init_process_group") for rank in (0, 1, 3)]
IN_BARRIER: list[Event] = [timed_out(rank, 0.2, "barrier") for rank in (1, 2)]
LEFT_BARRIER: list[Event] = [
    ended(rank, 1, 0.2, PEER_GONE.replace("all_reduce", "barrier")) for rank in (1, 2)
]
LATE_WAIT: list[Event] = [victim(1), timed_out(0, 0.1), victim(2, 0.2), victim(3, 0.3)]
ALL_BUT_0: list[Event] = [RanksStalled(0, (1,)), RanksStalled(1, (0, 1))]
NEVER_2 = "rank 2 (b, pid 100: idle) never joined the rendezvous; ranks 0-1, 3 were waiting in"
NEVER_0 = "rank 0 (a, pid 100) never joined the rendezvous; rank 3 was waiting in"
BARRIER = "rank 2 (b) was in barrier (t.py:9); ranks 0-1, 3 were waiting in all_reduce (t.py:9)"
DISAGREE = (
    "rank 0 (a), rank 1 (a), rank 2 (b), rank 3 (b) disagree about the next collective: "
    "ranks 0, 3 in all_reduce (t.py:9), ranks 1-2 in barrier (t.py:9)"
)
LOST_PEER = "rank 0 (a) failed: exit status 1, after losing the connection to another rank"
UNEVEN_1, UNEVEN_3 = (
    f"{LOST_PEER}; rank {rank} had already exited with status 0 (uneven batches?)" for rank in (1, 3)
)
AWAY: dict[str, tuple[list[Event], str, int | None]] = {
    "uneven batches": ([*JOINED, victim(0), victim(2, 0.1), ended(3, 0, 0.2)], UNEVEN_3, 0),
    "a rank that joined unseen": ([ended(1, 0), RanksJoined(0, (0,)), *map(victim, (0, 2, 3))], UNEVEN_1, 0),
    "unknown": ([*JOINED, *LEFT], UNKNOWN, 0),
    "one that takes long to fail": (
        [*JOINED, *map(victim, (0, 1, 2))],
        *(f"{LOST_PEER}; rank 3 was still running", 0),
    ),
    "most ranks still run": ([*JOINED, timed_out(0)], FIRST_WAITED, 0),
    "others lost the connection to it first": ([*JOINED, *LATE_WAIT], FIRST_WAITED, 0),
    "never joined": ([*UNJOINED_2, *IN_INIT], f"{NEVER_2} init_process_group (t.py:9)", 2),
    "rank 0 never joined": (IN_INIT[2:], f"{NEVER_0} init_process_group (t.py:9)", 0),
    "stopped": (
        [*JOINED, RanksStalled(1, (1,), ((1, 7),)), *LEFT],
        *(f"rank 3 (b) was stopped by a signal; {WAITING}", 3),
    ),
    "stalled": ([*JOINED, RanksStalled(1, (1,)), *LEFT], f"rank 3 (b) {STALLED}; {WAITING}", 3),
    "most ranks are stalled": ([*JOINED, *ALL_BUT_0, timed_out(0)], FIRST_WAITED, 0),
    "another collective": ([*JOINED, *map(timed_out, (0, 1, 3)), IN_BARRIER[1]], BARRIER, 2),
    "another collective, left when the others had timed out": (
        [*JOINED, *map(timed_out, (0, 1, 3)), LEFT_BARRIER[1]],
        *(BARRIER, 2),
    ),
    "another collective, but a rank is still running": ([*JOINED, timed_out(0), *LEFT_BARRIER], UNKNOWN, 0),
    "a gather that its other ranks have left": (
        [*JOINED, timed_out(0, 0.0, "gather"), *LEFT_BARRIER, victim(3, 0.2)],
        *(FIRST_WAITED, 0),
    ),
    "a tie": ([*JOINED, timed_out(0), timed_out(3), *IN_BARRIER], DISAGREE, None),
}


@pytest.mark.parametrize(("events", "words", "rank"), AWAY.values(), ids=AWAY)
def test_blames_whom_the_others_waited_for(events: list[Event], words: str, rank: int | None) -> None:
    job = History(with_times("stall: 10m")).to_running()
    job.feed(*events)
    job.wait(1.0)
    job.wait(1.0)
    assert texts(job.actions, "error") == [words]
    assert job.blamed == (1, rank, None if rank is None else rank // 2)


def test_a_record_is_not_compared_with_a_rank_that_has_not_exited() -> None:
    job = History(with_times("stall: 10m")).to_running()
    job.feed(*JOINED, RanksStalled(1, (1,)), *LEFT[:2])
    job.wait(1.0)
    job.wait(1.0)
    assert job.state.cause and job.state.cause.rank == 3
    job.feed(recorded(2, 100, 1.0, -15))
    assert job.state.cause.rank == 3


def test_blames_the_running_rank_that_is_elsewhere_by_its_stack() -> None:
    job = History().to_running()
    job.feed(*JOINED, *LEFT)
    assert wanted(job.tick()) == [Capture(1, (1,), abort=False)]
    job.feed(stack(3, *IN_RECORD))
    assert texts(job.tick(), "error") == [f"rank 3 (b) was in step (t.py:3); {WAITING}"]
    job = History().to_running()
    job.feed(*JOINED, *LEFT)
    job.tick()
    said = texts(job.feed(stack(3, *IN_RECORD)._replace(stopped=104)))
    assert said == ["rank 3 is stopped by a signal; `kill -CONT 104` resumes it"]
    assert texts(job.tick(), "error") == [f"rank 3 (b) was stopped by a signal; {WAITING}"]


def test_if_nccl_timed_out_a_stack_outside_collectives_is_no_proof() -> None:
    """A rank that has called a collective of nccl goes on, and waits for its GPU where it needs a result."""
    job = History().to_running()
    job.feed(*JOINED, *(ended(rank, -signal.SIGABRT, 0, WATCHDOG) for rank in (0, 1)), victim(2, 0.1))
    assert wanted(job.tick()) == [Capture(1, (1,), abort=False)]
    job.feed(stack(3, *IN_RECORD))
    (text,) = texts(job.tick(), "error")
    assert text.endswith("; rank 3 had not failed (stalled, or in another collective?)")


@pytest.mark.parametrize(("text", "stop"), [(TWO, Close), (WITH_RESTARTS, StopWorkers)])
def test_collects_evidence_on_all_nodes_before_it_stops_their_workers(text: str, stop: type) -> None:
    actions = History(text).to_running().feed(ended(2, 7)).of(Capture, stop)
    assert [(type(each), each.node) for each in actions] == [*itertools.product((Capture, stop), (0, 1))]
    assert not History(text).to_running().feed(SIGINT).of(Capture)


# Ranks that stall


def stalled(on_stall: str, *more: RanksStalled, limit: str = "10m") -> History:
    """Rank 1 of four has stalled for the time that counts, which is not told yet, and so have `more`."""
    text = with_times(f"stall: {limit}", WITH_RESTARTS)
    job = History(f"{text}\non_stall: {on_stall}").to_running()
    job.feed(*JOINED, RanksLag(0, ((1, False, "stale words"),)))
    assert job.feed(RanksStalled(0, (1,)), after=700.0) == []
    job.feed(*more)
    return job


def stack(rank: int, *frames: str) -> messages.StackDumped:
    """As py-spy prints it."""
    lines = "".join(f"    {frame}\n" for frame in frames)
    text = f"Process 7: python\n\nThread 7 (idle): MainThread\n{lines}Thread 8 (idle): x\n    y\n"
    return messages.StackDumped(rank // 2, rank % 2, text)


def test_reports_stalled_and_active_ranks_when_a_stall_spreads_and_when_it_is_over() -> None:
    job = stalled("warn")
    said = job.tick()
    words = ": no output, CPU or GPU use for 10 min; ranks 0, 2-3 are still active"
    assert texts(said, "warning") == [f"stalled: rank 1 (a, pid 101){words}"]
    assert wanted(said) == [Capture(0, (1,), abort=False)]
    assert job.feed(RanksStalled(1, (0, 1)), after=20.0) == []
    (words,) = texts(job.tick())
    assert words.startswith("now stalled: rank 1 (a, pid 101), rank 2 (b, pid 100), rank 3 (b, pid 101): ")
    assert words.endswith("; rank 0 is still active")
    assert job.feed(RanksStalled(1, (1,))) == []
    assert texts(job.feed(RanksStalled(0, ()), RanksStalled(1, ()))) == ["stalled ranks resumed"]
    assert job.state.next_due is None
    job.feed(stack(1, *IN_RECORD))  # late
    assert not any(worker.stalled for worker in job.state.workers)


def test_a_process_that_stalls_before_its_program_starts_is_a_stalled_rank() -> None:
    job = History("script: t.py\ngpus_per_node: 0\nprocs_per_node: 2\non_stall: stop\ntimeouts: {stall: 8s}")
    job.feed(up(0), PortHeld(0, 29500), messages.WorkerStarted(0, 1, 101))
    job.feed(RanksStalled(0, (0,), ((0, 100),)), after=8.0)
    told = "stalled: rank 0 (node0, not started yet: stopped by a signal; `kill -CONT 100` resumes it): "
    assert texts(job.tick(), "warning")[0].startswith(told)
    assert texts(job.wait(10.0), "error") == ["rank 0 (node0) stalled for 8 s: stopped by a signal"]


@pytest.mark.parametrize(("limit", "settles_s"), [("8s", 3.0), ("20s", 4.5), ("10m", 17.0)])
def test_waits_for_agents_that_look_at_different_times(limit: str, settles_s: float) -> None:
    job = stalled("warn", limit=limit)
    since = job.now
    job.tick()
    assert job.now - since == settles_s


def test_does_not_report_a_stall_that_is_already_over() -> None:
    job = stalled("stop")
    assert job.feed(RanksStalled(0, ()), after=1.0) == []
    assert job.state.next_due is None


@pytest.mark.parametrize(
    ("on_stall", "then", "phase"),
    [("stop", Close, Phase.STOPPING), ("restart", StopWorkers, Phase.RESTARTING)],
)
def test_a_spreading_stall_replaces_no_dump_before_the_stop(on_stall: str, then: type, phase: Phase) -> None:
    job = stalled(on_stall, limit="8s")
    assert wanted(job.tick()) == [Capture(0, (1,), abort=True)]
    job.feed(RanksStalled(1, (0,)), stack(1, *IN_RECORD))
    assert wanted(job.tick()) == [Capture(1, (0,), abort=True, quick=True)]
    assert wanted(job.tick()) == on_both(then, 10.0)
    assert job.state.phase is phase


def aborted(rank: int, *frames: str) -> messages.WorkerExited:
    """A rank that has died of its dump, with what Python prints of SIGABRT under PYTHONFAULTHANDLER."""
    header = "hread 0x00007f0a (most recent call first):\n"
    lines = "".join(f'  File "{frame}\n' for frame in frames)
    other = f'T{header}  File "/v/lib/python3.11/threading.py", line 324 in wait\n'
    words = (
        f"Fatal Python error: Aborted\n\n{other}\nCurrent t{header}{lines}\nExtension modules: numpy._core\n"
    )
    return ended(rank, -signal.SIGABRT, words=words)


def test_finds_the_culprit_by_the_stacks_that_ranks_die_of() -> None:
    job = stalled("stop", RanksStalled(0, (0, 1)), RanksStalled(1, (0,)))
    job.tick()
    waits = ('/v/torch/distributed/c10d.py", line 9 in all_reduce', '/j/t.py", line 5 in main')
    culprit = aborted(1, '/j/t.py", line 3 in step')
    assert job.feed(aborted(0, *waits), victim(3, 0.1), culprit) == []
    words = "rank 1 (a) stalled for 10 min in step (t.py:3); ranks 0, 2 are waiting in a collective"
    assert texts(job.feed(aborted(2, *waits)), "error") == [words]
    job.close()
    assert job.blamed == STALLED_1
    assert [worker.stopped for worker in job.state.workers] == [True, True, True, False]


def test_does_not_wait_for_ever_for_ranks_to_die_of_their_dumps() -> None:
    job = stalled("stop", RanksStalled(0, (0, 1)))
    job.tick()
    job.feed(aborted(0, '/j/t.py", line 5 in main'))
    (words,) = texts(job.tick(), "error")
    assert words.startswith("rank 0 (a), rank 1 (a) stalled for")


def test_ranks_that_die_of_their_dump_are_no_ranks_that_resumed() -> None:
    """Others have left before they could die of theirs; then a node looks for stalled ranks again."""
    job = stalled("stop", RanksStalled(0, (0, 1)), RanksStalled(1, (0, 1)))
    job.tick()
    dumped = aborted(0), aborted(1, '/j/t.py", line 3 in step')
    assert job.feed(*dumped, victim(2, 0.1), victim(3, 0.2)) == []
    words = "rank 1 (a) stalled for 10 min in step (t.py:3); ranks 2-3 are waiting in a collective"
    assert texts(job.feed(RanksStalled(0, ()))) == [words]
    assert job.state.phase is Phase.STOPPING


def test_the_stack_of_which_a_rank_died_is_kept_when_its_node_looks_again() -> None:
    job = stalled("stop", RanksStalled(0, (0, 1)), RanksStalled(1, (0,)))
    job.tick()
    job.feed(aborted(1, '/j/t.py", line 3 in step'), RanksStalled(0, (0,)))
    job.feed(stack(0, *IN_COLLECTIVE), stack(2, *IN_COLLECTIVE))
    assert "rank 1 (a) stalled for 10 min in step (t.py:3)" in texts(job.tick(), "error")[0]


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
    where = " in step (t.py:3)" if len(events) == 2 else ""  # which the dump tells
    assert (said == [f"rank 1 (a) stalled for 10 min{where}"]) == (blamed == STALLED_1)
    assert job.blamed == blamed


def test_a_rank_that_aborts_long_after_it_stalled_has_failed() -> None:
    job = stalled("stop")
    job.tick()
    assert texts(job.feed(RanksStalled(0, ()))) == ["stalled ranks resumed"]
    job.feed(ended(1, -signal.SIGABRT, at=86400.0))
    assert job.blamed == (134, 1, 0)


@pytest.mark.parametrize("told", [False, True])
def test_a_stalled_rank_that_finishes_ends_no_job(told: bool) -> None:
    job = stalled("stop")
    if told:
        job.tick()
    job.feed(ended(1, 0))
    assert job.tick() == []
    assert job.state.phase is Phase.RUNNING
    job.feed(RanksStalled(1, (0,)))
    job.tick()
    assert texts(job.tick(), "error") == ["rank 2 (b) stalled for 10 min"]


IN_COLLECTIVE = ("wait (torch/distributed/c.py:1)", "all_reduce (torch/distributed/c.py:9)", "main (t.py:5)")
IN_BACKWARD = ("_engine_run_backward (torch/autograd/graph.py:824)", "main (t.py:7)")
IN_RECORD = ("step (t.py:3)", "wrapper (torch/distributed/elastic/multiprocessing/errors/__init__.py:362)")
JOINING = ("_new_group (torch/distributed/c10d.py:1)", "init_process_group (torch/distributed/c10d.py:9)")
EVERYBODY = "rank 0 (a), rank 1 (a), rank 2 (b), rank 3 (b) stalled for 10 min"
MIXED = [IN_COLLECTIVE, IN_BACKWARD, IN_RECORD, IN_COLLECTIVE]
IN_STEP = "rank 2 (b) stalled for 10 min in step (t.py:3); ranks 0-1, 3 are waiting in a collective"
NETWORK = "some ranks are still in init_process_group; `distlaunch check-port job.yaml` tests the network"
ACTIVE_1 = "rank 1 (a) was still active; ranks 0, 2-3 stalled for 10 min, waiting in a collective"
ALL_STALLED: dict[str, tuple[list[tuple[str, ...]], str, int | None]] = {
    "one is not in the collective": (MIXED, IN_STEP, 2),
    "one is still active": ([IN_COLLECTIVE, (), IN_COLLECTIVE, IN_COLLECTIVE], ACTIVE_1, 1),
    "all are joining": ([JOINING] * 4, f"{EVERYBODY}; {NETWORK}", None),
    "no stacks": ([], EVERYBODY, None),
    "all in collectives": ([IN_COLLECTIVE] * 2, EVERYBODY, None),
    "two elsewhere": ([IN_RECORD] * 2, EVERYBODY, None),
    "all in one place": ([IN_RECORD] * 4, f"{EVERYBODY} in step (t.py:3)", None),
    "all in two places": ([IN_RECORD, ("load (t.py:9)",)] * 2, EVERYBODY, None),
}


@pytest.mark.parametrize(("stacks", "words", "rank"), ALL_STALLED.values(), ids=ALL_STALLED)
def test_blames_the_rank_that_is_not_in_the_collective_if_stacks_show_it(
    stacks: list[tuple[str, ...]], words: str, rank: int | None
) -> None:
    job = stalled("stop", RanksStalled(0, (0,) if () in stacks else (0, 1)), RanksStalled(1, (0, 1)))
    job.tick()
    job.feed(*(stack(rank, *frames) for rank, frames in enumerate(stacks) if frames))
    assert texts(job.tick(), "error") == [words]
    assert job.blamed == (Exit.TIMEOUT, rank, None if rank is None else rank // 2)


def test_names_the_innermost_frames_of_a_blocked_rank_or_once_why_there_are_none() -> None:
    job = stalled("warn")
    (words,) = texts(job.feed(stack(1, "read (t.py:3)", "main (t.py:9)")))
    assert words == "rank 1 is blocked in: read (t.py:3) < main (t.py:9)"
    for why in ("Permission denied", "py-spy is not there"):
        assert texts(job.feed(messages.StackDumped(0, 1, why))) == [f"no stack for rank 1: {why}"]
        assert job.feed(messages.StackDumped(0, 0, why), messages.StackDumped(1, 0, why)) == []
    header = messages.StackDumped(0, 1, 'Process 7: python3 t.py\nPython v3.11.7\n\nThread 7: "MainThread"\n')
    assert texts(job.feed(header)) == ["no stack for rank 1: its Python is starting or exiting"]


@pytest.mark.parametrize(
    ("why", "hinted"),
    [("py-spy is not installed on its node (pip install py-spy)", True), ("Error: Operation failed", False)],
)
def test_advises_to_install_py_spy_unless_it_is_installed_and_has_failed(why: str, hinted: bool) -> None:
    job = stalled("stop")
    job.tick()
    job.feed(messages.StackDumped(0, 1, why))
    job.tick()
    assert job.blamed == (Exit.TIMEOUT, 1, 0)
    assert Summary(job.state, "", {}, 1.0).advice.startswith("install py-spy on the nodes") == hinted


def test_blames_a_rank_that_a_signal_has_stopped_before_those_that_wait_for_it() -> None:
    job = stalled("stop", RanksStalled(0, (0, 1), ((1, 812),)))
    said = job.tick()
    (words,) = texts(said, "warning")
    stopped = "rank 1 (a, pid 101: stopped by a signal; `kill -CONT 812` resumes it)"
    assert words.startswith(f"stalled: rank 0 (a, pid 100), {stopped}: no output"), words
    assert wanted(said) == [Capture(0, (0,), abort=True)]
    job.feed(stack(0, *IN_COLLECTIVE))
    assert texts(job.tick(), "error") == ["rank 1 (a) stalled for 10 min: stopped by a signal"]
    assert job.blamed == STALLED_1


# Any history, also of an agent that is broken, or not ours at all

_node = st.integers(0, 2)
_local_rank = st.sampled_from([-1, 0, 1, 2, 9])
_failures = st.builds(LinkFailure, st.sampled_from(Kind), st.sampled_from(["", "why", "a\nb"]), st.booleans())


def reported(report: Any, node: int, local_rank: int, status: int, at: float) -> Event:
    """A sample of a report, from any node and local rank."""
    drawn = {"node": node, "local_rank": local_rank, "status": status, "at": at, "asked": MASTER}
    event: Event = report._replace(**{name: drawn[name] for name in drawn.keys() & {*report._fields}})
    return event


_samples = st.sampled_from(
    [sample for sample in (*EVENTS, EXITED) if not isinstance(sample, messages.PortUsurped)]
)
_statuses = st.sampled_from([0, 0, 0, 1, 255, -9])
_events = st.one_of(
    st.builds(reported, _samples, _node, _local_rank, _statuses, st.floats(0, 3 * T)),
    st.builds(RanksJoined, _node, st.lists(_local_rank, max_size=3).map(tuple)),
    st.builds(Swept, _node, st.sampled_from([0, 1, 8]), st.integers(0, 2)),
    st.builds(up, _node, st.integers(0, 3)),
    st.builds(LinkEnded, _node, _failures),
    st.builds(messages.Interrupted, st.sampled_from(SIGNALS)),
    st.builds(TimerDue, st.sampled_from(Timer), st.none() | _node),
)
_histories = st.lists(st.tuples(st.sampled_from([0.0, 0.3, 5.0, 40.0]), _events), max_size=25)
THREE = f"{JOB}nodes: [a, b, c]"
_jobs = st.sampled_from([THREE, f"{JOB}nodes: 3", THREE.replace("stop: 10s", "stop: 0s, job: 60s, join: 7s")])


@given(_jobs, st.sampled_from([*PHASES, "stopping"]), _histories, st.booleans())
@bounded(300)
def test_any_history_even_of_a_broken_agent_ends_once(
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
    job.now_in(Phase.DONE)
    assert len(job.actions.of(Finish)) == 1
    assert all(job.actions.count_of(StartWorkers(node)) <= 1 for node in range(3))
