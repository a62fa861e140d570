"""The state of a job and its timers. Every deadline in the supervisor has a name here."""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any

from distlaunch.agent.frozen import Frozen
from distlaunch.diagnosis.exits import Raised
from distlaunch.errors import Exit
from distlaunch.job.spec import FOREVER_S, FailureKind, JobSpec
from distlaunch.plan.placement import LaunchPlan
from distlaunch.supervisor.actions import ShowMessage
from distlaunch.supervisor.nodes import Node, Nodes, RankStates, Reaping, Up, WorkerPhase, is_missing
from distlaunch.transports.transport import Joined
from distlaunch.wording import exit_words


class Timer(Enum):
    """The timers of a job. Timers due at the same time expire in this order."""

    JOB = "job"
    """`timeouts.job` has passed."""
    VERDICT = "verdict"
    """Ranks have lost peers, but no rank has failed on its own, so the root cause must be inferred."""
    STACKS = "stacks"
    """Requested stacks have had time to arrive from the ranks that others timed out waiting for."""
    ASK = "ask"
    """The scheduler has not yet answered whether it is ending this allocation."""
    JOIN = "join"
    """`timeouts.join` has passed."""
    JOIN_MESSAGE = "join message"
    """It is time to list the ranks that have not joined."""
    STALL_MESSAGE = "stall message"
    """A stall has spread to every rank that it blocks, so it can be reported."""
    STALL_ACT = "stall act"
    """The time for collecting stacks has passed, so `on_stall` takes effect."""
    STOP_MESSAGE = "stop message"
    """It is time to list the ranks that are still running."""
    PREPARE = "prepare"
    """A connected node has not answered while an attempt was being prepared."""
    CLEAR = "clear"
    """A node has not confirmed the end of an attempt."""
    CLOSE = "close"
    """A node has not confirmed its cleanup."""
    DRAIN = "drain"
    """Clean nodes have stopped delivering output."""
    ANSWER = "answer"
    """Of a node: its agent has not connected in time."""
    RETRY = "retry"
    """Of a node: it is time to reconnect."""
    FENCE = "fence"
    """Of a node: its workers must have ended by now, although the node can't confirm it."""
    BACKOFF = "backoff"
    """The delay before the next attempt is over."""
    REJOIN = "rejoin"
    """The wait for other nodes is over."""


WATCHES = (
    Timer.VERDICT,
    Timer.STACKS,
    Timer.JOIN,
    Timer.JOIN_MESSAGE,
    Timer.STALL_MESSAGE,
    Timer.STALL_ACT,
    Timer.STOP_MESSAGE,
)
"""Timers that watch workers from the time they start until they have ended or are told to stop."""
ANSWERS = (Timer.ANSWER, Timer.PREPARE, Timer.CLEAR, Timer.CLOSE)
"""Timers of answers from agents, which take several exchanges with the controller."""


class Alarm(Frozen):
    """A timer that has been set, for the job or for one node."""

    timer: Timer
    node: int | None = None


class Phase(Enum):
    """The phase of a job. Phases only move forward, except that RESTARTING leads back to PREPARING."""

    CONNECTING = "connecting"
    PREPARING = "preparing"
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    DONE = "done"


class Cause(Frozen):
    """The root cause: why an attempt, or the job, ends without success. Only the first one is reported.

    If `exit` is set, the cause is the exit of `rank`, which the rank's last output may explain. If
    `peer_gone` is set, the rank merely lost its connection to another rank, and no other cause is known yet.
    `cancelled` is set if the user stopped the job, and `scheduled` if the scheduler is ending the allocation,
    with `later` if it does so only after a grace period. If `inferred` is set, the root cause was inferred
    from the activity of the other ranks, or a rank on a lost node may have failed earlier. If `final` is set,
    the job must not be requeued. `agent_signum` is the signal that stopped the node's agent. `kind` is None
    for a cause that no restart can follow. `raised` is the exception raised by `rank`, unless it may be
    temporary. `note` is the end of `text` if it explains why no restart follows.
    """

    text: str
    exit_status: int
    at: float
    rank: int | None = None
    node: int | None = None
    peer_gone: bool = False
    cancelled: bool = False
    scheduled: bool = False
    later: bool = False
    final: bool = False
    agent_signum: int | None = None
    exit: bool = False
    inferred: bool = False
    kind: FailureKind | None = None
    raised: Raised | None = None
    note: str = ""

    def noted(self, note: str, final: bool) -> "Cause":
        """Return this root cause with a note on why no restart follows."""
        return self._replace(text=f"{self.text}{note}", note=note, final=final)

    @property
    def preliminary(self) -> str:
        """Return the text to show at the failure, when an earlier failure may not have been reported yet."""
        return self.text.replace(" failed first: ", " failed: ", 1)


class Why(Enum):
    """The reason for a new attempt. Only failures count against `restarts.max`."""

    FAILURE = "failure"
    GROWTH = "growth"
    PORT = "port"


class Restart(Frozen):
    """The end of an attempt that is followed by another. The attempt had run for `lived_s` seconds."""

    at: float
    why: Why
    cause: Cause
    lived_s: float


class Verdict(Frozen):
    """The decision to end the job. `cause` is None after success.

    `overtaken` is set if the scheduler ends the allocation before the job has ended.
    """

    cause: Cause | None
    at: float
    overtaken: bool = False


class Asked(Frozen):
    """A pending question to the scheduler, with the failure and messages held back until the answer.

    If the job was already `ending`, the answer doesn't replace its root cause, unless that `coincides` with
    the sign that the scheduler is ending the job, too: it may have stopped the rank that failed. `goes_on` is
    set once the scheduler has answered that the job goes on, if agents of other nodes may have been stopped.
    """

    cause: Cause | None = None
    also: tuple[ShowMessage, ...] = ()
    ending: bool = False
    coincides: bool = False
    goes_on: bool = False


class State(Frozen):
    """The state of the whole job.

    `nodes` contains the nodes of the pool. A node's number is always its pool index, except that `node_rank`
    is its index in an attempt. `addresses` contains the addresses that ssh uses, if the job needs them.

    The fields from `attempt` to `stall_told` belong to the current attempt: `attempt` is its number, from 0,
    and `workers` are in rank order. `plan` is None before the first attempt. `ports` contains MASTER_PORT and
    the additional ports, and is empty until the attempt is prepared. `started_at` is None until the attempt
    has started. `suspect` is the failure of a rank that lost a peer, until a rank fails for another reason.
    `stall_told` is set once a stall has been reported.

    `verdict` is set from STOPPING on. `stackless` contains the reasons already reported for missing stacks.
    `wait_told` is set once the nodes that the job is waiting for between two attempts have been listed.
    `warned` is set after a termination warning, and `asked` while a question to the scheduler is pending.
    `interrupted_by` is the node that passed on the last interrupt, or None for the controller itself.
    `unwanted` is set once the user, rather than perhaps a scheduler, has asked the job to stop.
    `resumed` contains the time at which the controller continued after a suspension of about `timeouts.lease`
    or longer, and the length of the suspension in seconds. `chance` (0 to 1) keeps many runs from acting at
    the same time. `foreseen` is the MASTER_ADDR in the requests sent to nodes before a plan existed.
    `reached_by` is the address at which other nodes reach the first one. `run_id` is "" in a replay.
    `arrived` contains the hosts whose launchers have joined during the run, perhaps in place of others.
    """

    spec: JobSpec
    nodes: Nodes
    began_at: float
    chance: float = 0.0
    run_id: str = ""
    addresses: Mapping[int, str] = MappingProxyType({})
    phase: Phase = Phase.CONNECTING
    timers: Mapping[Alarm, float] = MappingProxyType({})
    attempt: int = 0
    plan: LaunchPlan | None = None
    workers: RankStates = RankStates()
    ports: tuple[int, ...] = ()
    started_at: float | None = None
    suspect: Cause | None = None
    stall_told: bool = False
    stackless: frozenset[str] = frozenset()
    restarts: tuple[Restart, ...] = ()
    wait_told: bool = False
    verdict: Verdict | None = None
    interrupts: int = 0
    interrupted_at: float | None = None
    interrupted_by: int | None = None
    unwanted: bool = False
    resumed: tuple[float, float] | None = None
    warned: bool = False
    asked: Asked | None = None
    foreseen: str = ""
    reached_by: str = ""
    arrived: Mapping[int, Joined] = MappingProxyType({})

    @property
    def cause(self) -> Cause | None:
        """Return the root cause that ends, or has ended, the attempt or the job."""
        if self.verdict:
            return self.verdict.cause
        return self.restarts[-1].cause if self.phase is Phase.RESTARTING else None

    @property
    def scheduler_ends(self) -> bool:
        """Return whether the scheduler is ending the allocation, and may kill the controller."""
        scheduled = self.cause is not None and self.cause.scheduled
        return self.verdict is not None and (scheduled or self.verdict.overtaken)

    @property
    def ended_at(self) -> float:
        """Return the time at which the workers were told to stop."""
        return self.verdict.at if self.verdict else self.restarts[-1].at

    def with_cause(self, cause: Cause) -> "State":
        """Return this state, which is restarting or stopping, with another root cause."""
        if self.verdict:
            return self._replace(verdict=self.verdict._replace(cause=cause))
        *earlier, last = self.restarts
        return self._replace(restarts=(*earlier, last._replace(cause=cause)))

    def overtaken(self) -> "State":
        """Return this state, which is stopping, with the scheduler ending the allocation, too."""
        assert self.verdict
        return self._replace(verdict=self.verdict._replace(overtaken=True))

    @property
    def succeeded(self) -> bool:
        """Return whether the ranks that determine success have succeeded."""
        count, rule = self.workers.counts.succeeded, self.spec.success
        if rule == "rank 0":
            return count > 0 and self.workers[0].succeeded
        return count > 0 and (rule == "any" or count == len(self.workers))

    @property
    def outcome(self) -> int:
        """Return the exit status that the command will have."""
        return self.cause.exit_status if self.cause else Exit.OK

    @property
    def stall_s(self) -> float:
        """Return the seconds without activity after which a rank counts as stalled."""
        return self.spec.limits.stall_s or FOREVER_S

    # Timers

    @property
    def next_due(self) -> float | None:
        """Return the time at which the next timer expires, or None."""
        return min(self.timers.values(), default=None)

    def alarm(self, now: float) -> Alarm | None:
        """Return the first of the timers that are due, or None."""
        due = [(at, _TIMERS.index(alarm.timer), alarm) for alarm, at in self.timers.items() if at <= now]
        return min(due, key=lambda each: each[:2])[2] if due else None

    def due_at(self, timer: Timer, node: int | None = None) -> float | None:
        """Return the time at which a timer expires, or None if it isn't set."""
        return self.timers.get(Alarm(timer, node))

    def with_timer(self, timer: Timer, at: float, node: int | None = None) -> "State":
        """Return this state with a timer set to expire at `at`."""
        return self._replace(timers={**self.timers, Alarm(timer, node): at})

    def without_timers(self, *timers: Timer, node: int | None = None) -> "State":
        """Return this state with these timers cleared."""
        unset = {Alarm(timer, node) for timer in timers}
        if not any(alarm in self.timers for alarm in unset):  # isdisjoint would visit thousands of timers
            return self
        left = {**self.timers}
        for alarm in unset:
            left.pop(alarm, None)
        return self._replace(timers=left)

    def unwatched(self) -> "State":
        """Return this state without the timers that watch workers."""
        return self.without_timers(*WATCHES)._replace(suspect=None, stall_told=False)

    # Nodes

    def label(self, node: int) -> str:
        """Return the user's name for a node."""
        return self.spec.pool[node].label

    def agent_host(self, node: int) -> str:
        """Return the name of the host of a node's latest agent, which may be waiting to replace another."""
        return self.arrived[node].host if node in self.arrived else self.label(node)

    def replaces_host(self, node: int) -> bool:
        """Return whether the agent that has returned as a node is on another host than the last one was.

        Hosts may share a name: a pod or a virtual machine often has that of the one that it replaces.
        """
        this = self.nodes[node]
        if not isinstance(this, Reaping):
            return False
        # Boot ID and network namespace, within which `agent.network.claim` finds another agent of the run
        before, now = (machine.split()[:2] for machine in (this.away.machine, this.facts.machine))
        return before != now if before and now else self.agent_host(node) != self.label(node)

    def with_arrived_host(self, node: int) -> "State":
        """Return this state with the node on the host whose launcher has joined as that node."""
        if node not in self.arrived:
            return self
        nodes, reach = [*self.spec.nodes], self.arrived[node]
        nodes[node] = nodes[node]._replace(label=reach.host, reach=reach)
        return self._replace(spec=self.spec._replace(nodes=tuple(nodes)))

    def up(self, index: int) -> Up:
        """Return a node, which must be up."""
        node = self.nodes[index]
        assert isinstance(node, Up)
        return node

    def with_node(self, index: int, node: Node) -> "State":
        """Return this state with one node replaced."""
        return self._replace(nodes=self.nodes.replaced(index, node))

    def chance_of(self, node: int, tries: int) -> float:
        """Return a number from 0 to 1, spread so that nodes dropped together don't return together."""
        return (self.chance + (node + 1) * 0.618034 + tries * 0.414214) % 1.0

    # The current attempt

    @property
    def planned(self) -> LaunchPlan:
        """Return the plan of an attempt that has one."""
        assert self.plan is not None
        return self.plan

    @property
    def members(self) -> tuple[int, ...]:
        """Return the nodes of the current attempt, in rank order."""
        return self.plan.members if self.plan else ()

    @property
    def port(self) -> int | None:
        """Return MASTER_PORT, or None until the attempt is prepared."""
        return self.ports[0] if self.ports else None

    @property
    def restart_count(self) -> int:
        """Return TORCHELASTIC_RESTART_COUNT: the number of earlier attempts, except those that lost their
        port and, with torchrun, those that ended when a node joined."""
        counted = (Why.FAILURE, Why.GROWTH) if self.spec.places else (Why.FAILURE,)
        return self.spec.restarts_before + sum(restart.why in counted for restart in self.restarts)

    # The workers of the current attempt

    def with_worker(self, rank: int, **changes: Any) -> "State":
        """Return this state with one worker changed."""
        workers = self.workers
        return self._replace(workers=workers.replaced(rank, workers[rank]._replace(**changes)))

    def rank_of(self, node: int, local_rank: int) -> int | None:
        """Return the rank of a worker, or None if the plan has no such worker."""
        part = self.plan.part_of(node) if self.plan else None
        if part is None or not 0 <= local_rank < part.procs:
            return None
        return part.first_rank + local_rank

    def cut_off(self, node: int) -> list[int]:
        """Return the ranks of a node that was lost before all of their output had arrived.

        They include those whose start has not been reported.
        """
        started = self.plan and self.started_at is not None and is_missing(self.nodes[node])
        part = self.plan.part_of(node) if self.plan and started else None
        if part is None or part.logs is not None:
            return []
        return [rank for rank in part.ranks if self.workers[rank].phase is not WorkerPhase.UNSTARTED]

    def called(self, rank: int) -> str:
        """Return the short name of a worker in messages: `rank 3`, or just `mpirun` for the only mpirun."""
        return self.unit if self.unit == "mpirun" else f"{self.unit} {rank}"

    def named(self, rank: int, more: str = "") -> str:
        """Return the name of a worker in messages, with its node and `more`: `rank 3 (gpu-b, pid 812)`."""
        inside = ", ".join(filter(None, (self.planned.node_of(rank).label, more)))
        return f"{self.called(rank)} ({inside})"

    def described(self, rank: int) -> str:
        """Return the name of a worker with its activity: `rank 5 (gpu-b, pid 812: torch imported, idle)`."""
        worker = self.workers[rank]
        if worker.status is not None:
            return f"{self.named(rank)[:-1]}: {exit_words(worker.status)})"
        if worker.pid is None:
            return self.named(rank, "not started yet")
        doing = f": {worker.doing}" if worker.doing else ""
        return self.named(rank, f"pid {worker.pid}{doing}")

    @property
    def unit(self) -> str:
        """Return the word for a worker in messages."""
        return self.plan.unit if self.plan else "rank"


_TIMERS = tuple(Timer)
