"""A job's timers: every deadline in the supervisor has a name here."""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any

from distlaunch.agent.frozen import Frozen
from distlaunch.errors import Exit
from distlaunch.job.spec import JobSpec
from distlaunch.plan.layout import Foreseen, LaunchPlan
from distlaunch.supervisor.actions import Notice
from distlaunch.supervisor.nodes import Node, Nodes, Worker, Workers
from distlaunch.wording import counted


class Timer(Enum):
    """A job's timers, in the order in which those that are due at the same time come."""

    JOB = "job"
    """`timeouts.job` has passed."""
    VERDICT = "verdict"
    """No other rank has failed by itself: blame the first that lost a peer."""
    ASK = "ask"
    """The scheduler has not told what becomes of our allocation."""
    JOIN = "join"
    """`timeouts.join` has passed."""
    JOIN_NOTICE = "join notice"
    """Say which ranks have not joined."""
    STALL_NOTICE = "stall notice"
    """A stall has spread to every rank that it blocks: report it."""
    STALL_ACT = "stall act"
    """The time for stacks has passed: do what `on_stall` says."""
    STOP_NOTICE = "stop notice"
    """Say which ranks are still running."""
    PREPARE = "prepare"
    """A node that said hello has not answered since."""
    CLEAR = "clear"
    """A node has not confirmed the end of a generation."""
    CLOSE = "close"
    """A node has not confirmed its clean-up."""
    DRAIN = "drain"
    """Clean nodes have not delivered more of their output."""
    ANSWER = "answer"
    """Of a node: its hello is overdue."""
    RETRY = "retry"
    """Of a node: connect it again."""
    FENCE = "fence"
    """Of a node: its workers are taken to have ended, though it can't be asked."""
    BACKOFF = "backoff"
    """The next generation may start."""
    REJOIN = "rejoin"
    """Stop waiting for other nodes."""


WATCHES = (
    Timer.VERDICT,
    Timer.JOIN,
    Timer.JOIN_NOTICE,
    Timer.STALL_NOTICE,
    Timer.STALL_ACT,
    Timer.STOP_NOTICE,
)
"""Those that watch workers, from their start until they are told to end, or until they have ended."""


class Alarm(Frozen):
    """One timer that is set: of the job, or of one node."""

    timer: Timer
    node: int | None = None


class Phase(Enum):
    """Where the job is; it moves forward, but for RESTARTING, which leads back to PREPARING."""

    CONNECTING = "connecting"
    PREPARING = "preparing"
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    DONE = "done"


class Cause(Frozen):
    """Why a generation, or the job, ends other than by success: the first, and the only one that is blamed.

    `peer_gone`: the rank only lost its connection to another one, of which nothing worse is known yet.
    `cancelled`: the user wanted it. `scheduled`: the scheduler ends all that it has given us. `final`:
    whether the job goes on is settled, it is not to be asked for. `agent_signum`: the signal that
    stopped the agent of the node.
    """

    text: str
    exit_status: int
    at: float
    rank: int | None = None
    node: int | None = None
    peer_gone: bool = False
    cancelled: bool = False
    scheduled: bool = False
    final: bool = False
    agent_signum: int | None = None


class Why(Enum):
    """Why there was a new generation; only failures count against `restarts.max`."""

    FAILURE = "failure"
    GROWTH = "growth"
    PORT = "port"


class Restart(Frozen):
    """The end of a generation that another one follows; it had lived `lived_s` seconds."""

    at: float
    why: Why
    cause: Cause
    lived_s: float


class Verdict(Frozen):
    """The end of the job was decided on; `cause` None is success."""

    cause: Cause | None
    at: float


class Asked(Frozen):
    """The scheduler was asked what becomes of the job; a failure, if any, and what is said after it, wait."""

    cause: Cause | None = None
    also: tuple[Notice, ...] = ()


class Generation(Frozen):
    """One start of all workers: where each is to run, and what has become of it. `workers` are in rank order.

    `port` and `started_at` are known once it is prepared, and has started. The `suspect` would be blamed,
    unless another rank turns out to have failed by itself.
    """

    number: int
    plan: LaunchPlan
    workers: Workers
    port: int | None = None
    started_at: float | None = None
    suspect: Cause | None = None
    stall_told: bool = False


class State(Frozen):
    """The whole job.

    `nodes` are the pool's, and a node's number is its place there, everywhere but in what is called
    `node_rank`: its place in a generation. `addresses` are those by which ssh reaches nodes, as far as
    the job needs to know. `current` is the last generation that was planned. The `verdict` is there from
    STOPPING on. `stackless` has the reasons for missing stacks that we have reported, `wait_told` is
    whether we have said which nodes we wait for between two generations. With `noticed`, the end was
    announced; `asked`: the scheduler was asked about it. `interrupted_by` is the node that passed on the last
    interrupt, None = our own. `chance` (0 to 1) spreads what many runs would do at once. `foreseen` is what
    nodes were asked about before there was a plan, `reached_by` the address by which others reach the first
    node.
    """

    spec: JobSpec
    nodes: Nodes
    began_at: float
    chance: float = 0.0
    addresses: Mapping[int, str] = MappingProxyType({})
    phase: Phase = Phase.CONNECTING
    timers: Mapping[Alarm, float] = MappingProxyType({})
    current: Generation | None = None
    stackless: frozenset[str] = frozenset()
    restarts: tuple[Restart, ...] = ()
    wait_told: bool = False
    verdict: Verdict | None = None
    interrupts: int = 0
    interrupted_at: float | None = None
    interrupted_by: int | None = None
    noticed: bool = False
    asked: Asked | None = None
    foreseen: Foreseen | None = None
    reached_by: str = ""

    @property
    def cause(self) -> Cause | None:
        """Why the generation, or the job, is being ended, or was."""
        if self.verdict:
            return self.verdict.cause
        return self.restarts[-1].cause if self.phase is Phase.RESTARTING else None

    @property
    def ended_at(self) -> float:
        """When the workers were told to end."""
        return self.verdict.at if self.verdict else self.restarts[-1].at

    def blaming(self, cause: Cause) -> "State":
        """This state, which is restarting or ending, with another cause of that."""
        if self.verdict:
            return self._replace(verdict=self.verdict._replace(cause=cause))
        *earlier, last = self.restarts
        return self._replace(restarts=(*earlier, last._replace(cause=cause)))

    @property
    def outcome(self) -> int:
        """The exit status that the command will have."""
        return self.cause.exit_status if self.cause else Exit.OK

    # Timers

    @property
    def next_due(self) -> float | None:
        """When the next timer is due, or None."""
        return min(self.timers.values(), default=None)

    def alarm(self, now: float) -> Alarm | None:
        """The first of the timers that are due."""
        due = [(at, _TIMERS.index(alarm.timer), alarm) for alarm, at in self.timers.items() if at <= now]
        return min(due, key=lambda each: each[:2])[2] if due else None

    def due_at(self, timer: Timer, node: int | None = None) -> float | None:
        """When a timer is due; None where it is not set."""
        return self.timers.get(Alarm(timer, node))

    def with_timer(self, timer: Timer, at: float | None, node: int | None = None) -> "State":
        """This state with a timer set to another time, or with None not set."""
        if at is None:
            return self.without_timers(timer, node=node)
        return self._replace(timers={**self.timers, Alarm(timer, node): at})

    def without_timers(self, *timers: Timer, node: int | None = None) -> "State":
        """This state with these timers not set."""
        unset = {Alarm(timer, node) for timer in timers}
        if not any(alarm in self.timers for alarm in unset):  # isdisjoint would look at each of thousands
            return self
        left = {**self.timers}
        for alarm in unset:
            left.pop(alarm, None)
        return self._replace(timers=left)

    def unwatched(self) -> "State":
        """This state with nothing watched about the workers."""
        return self.without_timers(*WATCHES).with_generation(suspect=None, stall_told=False)

    # Nodes

    def label(self, node: int) -> str:
        """What the user calls the node."""
        return self.spec.pool[node].label

    def with_node(self, index: int, node: Node) -> "State":
        """This state with one node as it is now."""
        return self._replace(nodes=self.nodes.replaced(index, node))

    def chance_of(self, node: int, attempt: int) -> float:
        """0 to 1, spread by the golden ratio: nodes that are dropped together don't come back together."""
        return (self.chance + (node + 1) * 0.618034 + attempt * 0.414214) % 1.0

    # The current generation

    def with_generation(self, **changes: Any) -> "State":
        """This state with its current generation changed, if there is one."""
        return self._replace(current=self.current._replace(**changes)) if self.current else self

    @property
    def generation(self) -> int:
        """Its number; they count from 0."""
        return self.current.number if self.current else 0

    @property
    def plan(self) -> LaunchPlan | None:
        """Its plan."""
        return self.current.plan if self.current else None

    @property
    def port(self) -> int | None:
        """That of its rendezvous."""
        return self.current.port if self.current else None

    @property
    def started_at(self) -> float | None:
        """When it did."""
        return self.current.started_at if self.current else None

    @property
    def suspect(self) -> Cause | None:
        """Who has lost a peer, and is blamed unless another rank has failed by itself."""
        return self.current.suspect if self.current else None

    @property
    def members(self) -> tuple[int, ...]:
        """Its nodes, in rank order."""
        return self.plan.members if self.plan else ()

    @property
    def restart_count(self) -> int:
        """TORCHELASTIC_RESTART_COUNT: earlier generations, but for those that only lost their port."""
        return self.spec.restarts_before + sum(restart.why is not Why.PORT for restart in self.restarts)

    # Its workers

    @property
    def workers(self) -> Workers:
        """All of them, in rank order."""
        return self.current.workers if self.current else Workers()

    def worker(self, rank: int) -> Worker:
        """The worker of that rank."""
        return self.workers[rank]

    def with_worker(self, rank: int, **changes: Any) -> "State":
        """This state with one worker changed."""
        workers = self.workers
        return self.with_generation(workers=workers.replaced(rank, workers[rank]._replace(**changes)))

    def rank_of(self, node: int, local_rank: int) -> int | None:
        """The rank of a worker, or None when the plan has no such worker."""
        part = self.plan.part_of(node) if self.plan else None
        if part is None or not 0 <= local_rank < part.procs:
            return None
        return part.first_rank + local_rank

    def called(self, rank: int) -> str:
        """A worker for people, in short: `rank 3`."""
        return f"{self.unit} {rank}"

    def named(self, rank: int, more: str = "") -> str:
        """A worker for people, with where it is, and `more`: `rank 3 (gpu-b, pid 812)`."""
        assert self.plan is not None
        inside = ", ".join(filter(None, (self.plan.node_of(rank).label, more)))
        return f"{self.called(rank)} ({inside})"

    def counted(self, number: int) -> str:
        """A number of workers: `3 ranks`."""
        return counted(number, self.unit)

    @property
    def unit(self) -> str:
        """What people call a worker."""
        return self.plan.unit if self.plan else "rank"


_TIMERS = tuple(Timer)
