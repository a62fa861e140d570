"""Any job in a simulated world: nodes do what they are told, late or never, and faults come at random.

What the supervisor believes is compared with what is so: workers that nobody can see live on here, too.
"""

import errno
import heapq
import itertools
import json
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from distlaunch.agent import messages
from distlaunch.job.spec import Allocation, JobSpec, RendezvousSpec, Tree
from distlaunch.plan.placement import Facts
from distlaunch.runs.replay import loaded, replay
from distlaunch.supervisor import actions, events
from distlaunch.supervisor.codec import BEGAN, beginning, fields_of
from distlaunch.supervisor.events import Event
from distlaunch.supervisor.nodes import Connecting, End, Linked, Lost, Nodes, RankStates, Up, may_be_occupied
from distlaunch.supervisor.root_cause import VERDICT_S
from distlaunch.supervisor.state import Phase, State, Timer, Why
from distlaunch.supervisor.step import DECIDERS, HANDLERS, begin, step
from distlaunch.transports.failure import Kind, LinkFailure
from distlaunch.transports.transport import Joined
from tests.unit import orders
from tests.unit.samples import PEER_GONE, bounded, spec_of

CHANCE = 0.25
DRAWN: Counter[type] = Counter()
"""The events that the histories had, by kind."""

RAISED = 'Traceback (most recent call last):\n  File "/t.py", line 7, in f\nValueError: bad\n'
NO_WORKDIR = {"place": {"workdir": "/data", "exists": False}}
PROCS = 2
PULL_S = 60.0
LEASE_S, STOP_S, SLACK_S = 30.0, 10.0, 4.5  # slack: what a busy node takes longer
NOTICED_S = 20.0
"""Seconds until a link that is dead without a word is taken to be."""
NEVER_S = 1e6
TOLD_S = 12.0
"""Seconds until a stall is told, its stacks have come and it is acted on."""
QUIET_END_S, SIGNALLED_END_S = 1500.0, 120.0
"""Within so many seconds every job ends: when all workers succeed from now on, and after a signal."""


class Agent:
    """One agent, present or past, of a simulated node; `running` are its workers, all of one attempt."""

    def __init__(self, node: int, host: str) -> None:
        self.node, self.host, self.attempt = node, host, 0
        self.running: set[int] = set()
        self.linked = True  # to the controller, which may not know yet that it is not
        self.mute = False  # it neither hears nor tells anything more
        self.reaping = False
        self.told_until, self.up_at = 0.0, 0.0


class Fault(NamedTuple):
    """What goes wrong on a node, after a wait: see the methods of World with these names."""

    wait_s: float
    kind: str
    node: int
    number: int = 0


class World:
    """Nodes, agents and workers under a fake clock, and the supervisor's state.

    Each answer takes the next of `delays`, again and again; only a `smooth` start has none.
    """

    def __init__(
        self, text: str, delays: list[float], smooth: bool, refuses: Iterable[type], fates: Any, joined: bool
    ) -> None:
        self.now = 1000.0
        self._delays = itertools.cycle([0.0])
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._spins, self._quiet, self.finished = 0, False, 0
        self._fates = itertools.cycle(fates)
        allocation = Allocation("slurm", "Slurm", "17", (), answers=True) if fates else None
        spec = with_tree(spec_of(text))._replace(allocation=allocation)
        if joined:
            spec = _with_launchers(spec)
        self.state, first = begin(spec, self.now, CHANCE)
        self._lines = [_line(self.now, BEGAN, beginning(self.state.spec, CHANCE))]
        self.agents: list[list[Agent]] = [[] for _ in self.state.nodes]
        self._away_until = [0.0 for _ in self.state.nodes]
        self._refuses, self._with_tree = set(refuses), set[int]()
        self._joined = {node for node, each in enumerate(spec.pool) if isinstance(each.reach, Joined)}
        self._at_the_door = set() if actions.Connect in self._refuses else set(self._joined)
        self._hosts = {node: self.state.label(node) for node in self._joined}
        self._execute(orders.orders(first))
        self._feed(events.AddressesFound(tuple((node, f"10.0.0.{node}") for node in range(len(self.agents)))))
        if smooth:
            self.run(1.0)
        self._delays = itertools.cycle(delays)

    # Time

    def run(self, seconds: float) -> None:
        """Let so much time pass, or what is left until the job is over."""
        until = self.now + seconds
        while not self.finished:
            planned = self._queue[0][0] if self._queue else until
            due = self.state.next_due
            at = planned if due is None else min(planned, due)
            if at >= until:
                break
            self._spins = self._spins + 1 if at <= self.now else 0
            assert self._spins < 300, "time stands still"
            self.now = max(self.now, at)
            if at == planned:
                heapq.heappop(self._queue)[2]()
            else:
                alarm = self.state.alarm(self.now)
                assert alarm is not None
                self._feed(events.TimerDue(*alarm))
        self.now = until if not self.finished else self.now

    def calm_down(self) -> None:
        """No more faults: every node can be reached, answers soon, and its workers succeed."""
        self._quiet = True
        self._refuses.clear()
        self._delays = itertools.cycle([0.1])
        self._away_until = [0.0 for _ in self.state.nodes]
        for agent in itertools.chain.from_iterable(self.agents):
            self._succeed(agent)

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._count), what))

    def _delay(self, most: float = 1e9) -> float:
        return min(next(self._delays), most)

    # The supervisor

    def _feed(self, event: Event) -> None:
        DRAWN[type(event)] += 1
        self._lines.append(_line(self.now, type(event).__name__, fields_of(event)))
        before = self.state
        self.state, actions_ = step(before, event, self.now)
        wanted = orders.orders(actions_)
        check_step(before, event, wanted, self.state, self.now)
        self._execute(wanted)
        self._check_beliefs()

    def _execute(self, wanted: list[Any]) -> None:
        for action in wanted:
            match action:
                case actions.Connect():
                    self._connect(action.node)
                case actions.Drop() | actions.GiveUp():
                    if agent := self._agent(action.node):
                        self._orphan(agent)
                    if isinstance(action, actions.GiveUp):
                        self._feed(events.LinkEnded(action.node, LinkFailure(Kind.SILENT, action.why)))
                case actions.AskScheduler():
                    self._later(self._delay(), self._answer)
                case actions.Finish():
                    self.finished += 1
                case actions.ShowMessage() | orders.WarnWorkers():
                    pass
                case _:
                    agent = self._agent(action.node)
                    if agent and not agent.mute:
                        self._command(agent, action)

    def _answer(self) -> None:
        """Of the scheduler; it may be busy for long."""
        if not self.finished:
            self._feed(next(self._fates))

    def check_record(self) -> None:
        """What has been written down of this history leads to the same state."""
        *_, last = replay(loaded("\n".join(self._lines)))
        assert last.state == self.state

    def _check_beliefs(self) -> None:
        alive = [agent for agents in self.agents for agent in agents if agent.running]
        assert len({agent.attempt for agent in alive}) <= 1, "two attempts at once"
        for agent in alive:
            assert may_be_occupied(self.state.nodes[agent.node]), "workers on a node taken to be clean"
            if self.finished and self.state.interrupts < 3:
                assert isinstance(self.state.nodes[agent.node], Lost)

    # The nodes

    def _agent(self, node: int) -> Agent | None:
        return next((agent for agent in self.agents[node] if agent.linked), None)

    def _connect(self, node: int) -> None:
        assert self._agent(node) is None, "two links to one node"
        agent, delay_s = Agent(node, self._hosts.get(node, "")), self._delay()
        self.agents[node].append(agent)
        if node in self._joined - self._at_the_door:
            self._end_link(agent, LinkFailure(Kind.LOST))
            self._later(max(delay_s, self._away_until[node] - self.now), lambda: self._arrive(node))
            return
        self._at_the_door.discard(node)
        if self.now + delay_s < self._away_until[node]:
            self._end_link(agent, LinkFailure(Kind.UNREACHABLE), delay_s)
        else:
            if self.state.spec.container:
                self._tell(agent, events.ImagePulled(node, over=False))
                self._tell(agent, events.ImagePulled(node, over=True), min(delay_s, PULL_S))
            self._tell(agent, events.AgentUp(node, Facts("python3", 0, machine=agent.host), "host"), delay_s)
            agent.up_at = self.now + delay_s

    def _arrive(self, node: int) -> None:
        """Somebody has started a launcher there, or on another host in its place."""
        self._at_the_door.add(node)
        self._hosts[node] = f"host {self._delay():g}"
        name = f"name {self._delay():.0f}"  # others may have it, too
        if not self.finished:
            self._feed(events.NodeArrived(node, name, here=False))

    def _command(self, agent: Agent, action: Any) -> None:
        node, delay_s = agent.node, self._delay() + max(0.0, agent.up_at - self.now)
        match action:
            case orders.HoldPort():
                refused, held = messages.PortRefused(node, "in use", ()), messages.PortHeld(node, 29400)
                self._tell(agent, refused if orders.HoldPort in self._refuses else held, delay_s)
            case orders.FindRoute():
                failed = messages.RouteFailed(node, action.address, "no route")
                seen = NO_WORKDIR if node % 2 and messages.RouteFound in self._refuses else None
                found = messages.RouteFound(node, action.address, action.address, "eth0", seen=seen)
                self._tell(agent, failed if orders.FindRoute in self._refuses else found, delay_s)
            case orders.PlaceTree() | actions.SendTree():
                self._place_tree(agent, action, delay_s)
            case orders.Capture():
                self._dump(agent, action)
            case actions.StartWorkers():
                self._start(agent)
            case orders.StopWorkers() | orders.Close():
                leave = isinstance(action, orders.Close)
                self._later(delay_s, lambda: self._stop(agent, leave=leave))
            case orders.Reap():
                agent.reaping = True
                self._later(delay_s, lambda: self._reap(agent))

    def _place_tree(self, agent: Agent, action: Any, delay_s: float) -> None:
        """Even nodes share a store, and so do odd ones, but they request what they lack at the same time."""
        node = agent.node
        if isinstance(action, actions.SendTree):
            self._with_tree.update(range(node % 2, len(self.agents), 2))
            self._tell(agent, messages.TreeProgress(node, 35), delay_s)
        if orders.PlaceTree in self._refuses:
            self._tell(agent, messages.TreeRefused(node, "No space left on device"), delay_s)
        elif node in self._with_tree:
            torch = "2.10.0" if node % 2 and messages.TreePlaced in self._refuses else "2.9.0"
            self._tell(agent, messages.TreePlaced(node, "5891", "/env", (("torch", torch),)), delay_s)
        else:
            self._tell(agent, messages.TreeLacks(node, (0, 2)), delay_s)

    def _start(self, agent: Agent) -> None:
        assert isinstance(self.state.nodes[agent.node], Up)
        assert not agent.running and not agent.reaping
        agent.attempt, agent.running = self.state.attempt, set(range(PROCS))
        for rank in range(PROCS):
            if actions.StartWorkers in self._refuses and not self._quiet:
                agent.running.remove(rank)
                self._tell(agent, messages.WorkerUnstarted(agent.node, rank, "exec", errno.ENOENT, "why"))
            else:
                self._tell(agent, messages.WorkerStarted(agent.node, rank, 100 + rank))
        self._succeed(agent)

    def _dump(self, agent: Agent, dump: orders.Capture) -> None:
        """With py-spy, or by SIGABRT where that is wanted."""
        for rank in sorted(agent.running & set(dump.local_ranks)):
            if dump.abort and self._delay() > 1.0:
                self._end_worker(agent, rank, agent.attempt, -signal.SIGABRT)
            else:
                self._tell(agent, messages.StackDumped(agent.node, rank, "Thread 1: x\n    wait (t.py:1)\n"))

    def _succeed(self, agent: Agent) -> None:
        attempt = agent.attempt
        for rank in agent.running if self._quiet else ():
            self._later(10.0, lambda rank=rank: self._end_worker(agent, rank, attempt))  # type: ignore[misc]

    def _end_worker(self, agent: Agent, rank: int, attempt: int, status: int = 0, words: str = "") -> None:
        if rank in agent.running and agent.attempt == attempt:
            agent.running.remove(rank)
            exited = messages.WorkerExited(agent.node, rank, status, self.now, words=words)
            self._tell(agent, exited, self._delay(3.0))

    def _stop(self, agent: Agent, *, leave: bool = False) -> None:
        for rank in sorted(agent.running):
            self._end_worker(agent, rank, agent.attempt, -signal.SIGTERM)
        self._tell(agent, messages.Swept(agent.node, agent.attempt, 0))
        if leave:
            self._tell(agent, messages.AllSent(agent.node))
            self._end_link(agent, LinkFailure(Kind.LOST, clean=True))

    def _reap(self, agent: Agent) -> None:
        if not agent.mute:
            for other in self.agents[agent.node]:
                if other.host == agent.host:
                    other.running.clear()
            agent.reaping = False
            self._tell(agent, messages.Reaped(agent.node, 1))

    def _tell(self, agent: Agent, event: Event, delay_s: float = 0.0) -> None:
        """What an agent reports comes in order, and not after its link's end."""
        ends = isinstance(event, events.LinkEnded)

        def come() -> None:
            if agent.linked:
                if ends:
                    self._orphan(agent)
                self._feed(event)

        if not agent.mute:
            agent.told_until = max(agent.told_until, self.now + delay_s)
            self._later(agent.told_until - self.now, come)
            agent.mute = ends

    def _end_link(self, agent: Agent, failure: LinkFailure, delay_s: float = 0.0) -> None:
        self._tell(agent, events.LinkEnded(agent.node, failure), delay_s)

    def _orphan(self, agent: Agent) -> None:
        """Nobody hears of its workers any more: they end a little after its lease and grace."""
        agent.linked, agent.mute = False, True
        self._later(self._delay(LEASE_S + STOP_S + SLACK_S), agent.running.clear)

    # Faults: nothing happens where there is no agent

    def suffer(self, fault: Fault) -> None:
        """Have it happen, once its time has come."""
        self.run(fault.wait_s)
        agent = self._agent(fault.node % len(self.agents))
        if agent and not agent.mute and not self.finished:
            getattr(self, fault.kind)(agent, fault.number)

    def fail(self, agent: Agent, status: int, words: str = "") -> None:
        """A worker ends, with status 1 by an exception."""
        words = words or (RAISED if status == 1 else "")
        self._end_worker(agent, min(agent.running, default=-1), agent.attempt, status, words)

    def lose_peer(self, agent: Agent, status: int) -> None:
        """A worker ends since another one is gone, or seems to be."""
        self.fail(agent, status, PEER_GONE)

    def refuse(self, agent: Agent, number: int) -> None:
        """From now on, ports can't be held, routes not be found, workers not be started, or nodes differ."""
        self._refuses.add(_refused[number][0])

    def stall(self, agent: Agent, number: int) -> None:
        """Some workers do nothing, or do something again."""
        stalled = {rank for rank in agent.running if number >> rank & 1}
        self._tell(agent, messages.RanksStalled(agent.node, tuple(sorted(stalled))))
        self.run(TOLD_S if number == 3 else 0.0)

    def join(self, agent: Agent, number: int) -> None:
        """Some workers join the rendezvous; the others are still trying, or haven't tried."""
        for rank in sorted(agent.running):
            lag = messages.RanksLag(agent.node, ((rank, number > 1, "what it does"),))
            self._tell(agent, messages.RanksJoined(agent.node, (rank,)) if number >> rank & 1 else lag)

    def remark(self, agent: Agent, number: int) -> None:
        """What changes nothing is told, too."""
        node = agent.node
        killed, stuck = messages.OrphansKilled(node, 1), messages.Stuck(node, ())
        resumed, lost = messages.GuardianResumed(node, 7), messages.OutputLost(node, 0, 1, 5)
        kept, printed = messages.TreeKept(node, "~/code/runs/x"), messages.SetupPrinted(node, "Installed")
        progress, flows = messages.TreeProgress(node, 70), events.OutputFlows(node)
        for event in (killed, resumed, lost, progress, kept, printed, stuck, flows):
            self._tell(agent, event)
        self._feed(events.Suspended(15.0 * number))

    def interrupt_there(self, agent: Agent, signum: int) -> None:
        """Ctrl-C, of a launcher that somebody started on that node."""
        if agent.node in self._joined:
            self._tell(agent, messages.Interrupted(signum, agent.node))

    def end_clean(self, agent: Agent, away_s: int) -> None:
        """An agent ends together with its workers, and its guardian says so."""
        agent.running.clear()
        self.vanish(agent, away_s, clean=True)

    def vanish(self, agent: Agent, away_s: int, clean: bool = False) -> None:
        """A node can't be reached any more: its workers live on until its lease ends."""
        self._away_until[agent.node] = self.now + away_s
        self._end_link(agent, LinkFailure(Kind.LOST, clean=clean), self._delay(NOTICED_S))

    def leave(self, agent: Agent, signum: int) -> None:
        """Somebody stops an agent."""
        self._tell(agent, messages.AgentLeaving(agent.node, 15))
        self._later(self._delay(STOP_S), lambda: self._stop(agent, leave=True))

    def announce(self, agent: Agent, signum: int) -> None:
        """A scheduler announces the end of the job, to its agents or to the command."""
        if signum:
            self._tell(agent, messages.WarningReceived(agent.node, signum))
        else:
            self._feed(messages.Interrupted(signal.SIGUSR1))

    def usurp(self, agent: Agent, _: int) -> None:
        """Somebody else listens on the rendezvous port, of the first node if that is there."""
        agent = self._agent(0) or agent
        self._tell(agent, messages.PortUsurped(agent.node, ()))

    def interrupt(self) -> None:
        """Ctrl-C."""
        if not self.finished:
            self._feed(messages.Interrupted(signal.SIGINT))


def with_tree(spec: JobSpec) -> JobSpec:
    """`spec` with the code that it copies, if it does."""
    return spec._replace(tree=Tree("5891", "~/code", "/home/me/job", 3, 70)) if spec.sync.tree else spec


def _with_launchers(spec: JobSpec) -> JobSpec:
    """`spec` where all nodes but the first have launchers that somebody else starts."""
    joined = (node._replace(reach=Joined(node.label)) for node in spec.nodes[1:])
    membership, rendezvous = spec.membership._replace(spares=()), RendezvousSpec("n0", 29500)
    return spec._replace(nodes=(spec.nodes[0], *joined), membership=membership, rendezvous=rendezvous)


def _line(now: float, name: str, fields: Mapping[str, Any]) -> str:
    return json.dumps({"t": now, "time": 0.0, "event": name, **fields})


NOT_AHEAD = (actions.StartWorkers, orders.StopWorkers, orders.Capture, orders.Reap, orders.Close)
"""What only an agent that has said hello is told."""
NOT_AT_THE_END = (actions.StartWorkers, actions.Connect, orders.HoldPort, orders.FindRoute)


def check_step(before: State, event: Event, wanted: list[Any], after: State, now: float) -> None:
    """What holds for every step of every history."""
    ending = before.phase in (Phase.STOPPING, Phase.DONE)
    assert not (ending and any(isinstance(action, NOT_AT_THE_END) for action in wanted))
    closes = any(isinstance(action, orders.Close) for action in wanted)
    assert not (ending and closes) or isinstance(event, messages.Interrupted)
    assert after.attempt in (before.attempt, before.attempt + 1)
    for action in wanted:
        if isinstance(action, NOT_AHEAD):
            nodes = [state.nodes[action.node] for state in (before, after)]
            joining = isinstance(nodes[0], Connecting) and isinstance(action, orders.Close)
            joining = joining and isinstance(after.spec.pool[action.node].reach, Joined)
            assert joining or any(isinstance(node, Linked) or node is End.CLEAN for node in nodes)
    finishes = sum(isinstance(action, actions.Finish) for action in wanted)
    assert finishes == (after.phase is Phase.DONE and before.phase is not Phase.DONE)
    limit = after.spec.restarts
    recent = [each for each in after.restarts if each.why is Why.FAILURE and now - each.at < limit.window_s]
    assert len(recent) <= limit.most
    corrected = before.phase is after.phase and before.cause is not None and after.cause != before.cause
    grew = bool(before.restarts) and before.restarts[-1].why is Why.GROWTH  # a loss meanwhile is its cause
    late = after.cause is not None and after.cause.scheduled  # the scheduler's answer
    if corrected and before.cause and before.cause.agent_signum is not None and not late:
        # The signal was for all, and an agent heard it before us.
        assert after.cause is not None and after.cause.cancelled
    elif corrected and before.cause and before.cause.later:  # the user didn't wait for the preemption
        assert after.cause is not None and after.cause.cancelled
    elif corrected and before.cause and not (grew or late):
        assert after.cause is not None and None not in (before.cause.rank, after.cause.rank)
        assert after.cause.at <= before.cause.at or (before.cause.peer_gone and not after.cause.peer_gone)
    assert after.phase is Phase.RESTARTING or (after.outcome == 0) == (after.cause is None)
    assert before.phase is not Phase.DONE or (wanted, after) == ([], before)
    assert not ending or after.phase in (Phase.STOPPING, Phase.DONE)
    assert after.nodes.counts == Nodes(after.nodes).counts, "not what counting anew would give"
    assert after.workers.counts == RankStates(after.workers).counts, "not what counting anew would give"
    if after.suspect and not ending:
        due = after.due_at(Timer.VERDICT) or after.due_at(Timer.STACKS)  # one after the other
        assert due is not None and due <= now + VERDICT_S


_limits = st.sampled_from(["10m", "none", "30s"])
_rules = st.sampled_from(["", "", ", repeat: true", ", never: [signal]", ", on: [node_lost, exception]"])


@st.composite
def job_texts(draw: st.DrawFn) -> str:
    """Elastic jobs and others."""
    nodes, spares = draw(st.integers(1, 4)), draw(st.integers(0, 2))
    fewest = draw(st.integers(1, nodes))
    rejoin, window = draw(st.sampled_from(["5m", "20s", "0s"])), draw(st.sampled_from(["1h", "60s"]))
    most = draw(st.sampled_from([3, 3, 2, 1, 0]))
    limits = f"stop: {STOP_S:g}s, lease: {LEASE_S:g}s, rejoin: {rejoin}, join: {draw(_limits)}, stall: 20s"
    restarts = f"max: {most}, window: {window}{draw(_rules) if most else ''}"
    on_stall = draw(st.sampled_from(["warn", "stop", "restart"][: 3 if most else 2]))
    on_warning, grow = draw(st.sampled_from(["USR1", "TERM"])), draw(st.sampled_from(["restart", "now"]))
    container = draw(st.sampled_from(["", "container: {image: pytorch},"]))
    success = draw(st.sampled_from(["all", "any", "rank 0"]))
    return f"""{{script: t.py, backend: gloo, gpus_per_node: 0, procs_per_node: {PROCS}, min_nodes: {fewest},
nodes: {[f"n{i}" for i in range(nodes)]}, spares: {[f"s{i}" for i in range(spares)]}, timeouts: {{{limits}}},
restarts: {{{restarts}}}, {container} {draw(st.sampled_from(["", "sync: true,"]))} elastic: {{grow: {grow}}},
on_stall: {on_stall}, on_warning: {on_warning}, success: {success}}}"""


_waits = st.sampled_from([0.3, 0.0, 5.0, 20.0, 40.0, 400.0])
_nodes = st.sampled_from([1, 0, 1, 2, 3, 4])
FAULTS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("end_clean", "vanish"), (0, 0, 10, 100)),
    **dict.fromkeys(("leave", "remark", "usurp"), (0,)),
    "join": (0, 1, 2, 3),
    "refuse": (0, 1, 2, 3, 4, 5),
    "announce": (10, 0),
    "fail": (7, 1, -9, 0),
    "interrupt_there": (signal.SIGTERM, signal.SIGUSR1),
    "lose_peer": (1, -6, -15),
    "stall": (1, 3, 2, 0),
}
"""The methods of World for faults, and their numbers."""
_faults: st.SearchStrategy[Fault] = st.sampled_from(list(FAULTS)).flatmap(
    lambda kind: st.builds(Fault, _waits, st.just(kind), _nodes, st.sampled_from(FAULTS[kind]))
)
_delays = st.lists(st.sampled_from([0.1, 0.0, 0.3, 2.0, 12.0, 45.0, NEVER_S]), min_size=1, max_size=8)


_fates: list[tuple[events.AllocationReported, ...]] = [
    (),
    (events.AllocationReported(False, "", 20.0), events.AllocationReported(None)),
    (events.AllocationReported(False), events.AllocationReported(True, "was cancelled")),
    (
        events.AllocationReported(False, "was preempted", 20.0),
        events.AllocationReported(True, "was requeued"),
    ),
    (events.AllocationReported(True, "was cancelled"),),
]
"""What the scheduler says whenever it is asked; none = there is no scheduler."""
_refused: list[tuple[Any, ...]] = [
    *((orders.FindRoute,), (actions.StartWorkers,), (orders.HoldPort,), (orders.PlaceTree,)),
    *((messages.RouteFound,), (messages.TreePlaced,)),
]
_starts = st.tuples(
    st.sampled_from([True, True, True, False]),
    st.sampled_from([*[()] * 4, *_refused]),
    st.sampled_from(_fates),
    st.sampled_from([True, False]),
)
"""Whether the start has no delays, what is refused from then on, what the scheduler says, and whether others
start the launchers of all nodes but the first; of those, where connections fail, none is there yet."""


_many, _few = st.lists(_faults, min_size=1, max_size=12), st.lists(_faults, max_size=3)


@given(job_texts(), _delays, _starts, _many, st.sampled_from([0, 0, 0, 1, 2, 3]), _few)
@bounded(400)
def any_history(
    text: str, delays: list[float], start: Any, faults: list[Fault], signals: int, late: list[Fault]
) -> None:
    world = World(text, delays, *start)
    for fault in faults:
        world.suffer(fault)
    for _ in range(signals):
        world.interrupt()
    for fault in late:
        world.suffer(fault)
    world.calm_down()
    world.run(SIGNALLED_END_S if signals else QUIET_END_S)
    assert world.finished == 1, world.state
    assert world.state.phase is Phase.DONE
    world.check_record()


def test_attempts_never_overlap_and_every_job_ends_whatever_happens() -> None:
    DRAWN.clear()
    any_history()
    own = {each for each in vars(events).values() if getattr(each, "__module__", "") == events.__name__}
    assert own <= {*HANDLERS, *DECIDERS}
    assert set(DRAWN) == set(HANDLERS), "the histories did not have every event there is"
