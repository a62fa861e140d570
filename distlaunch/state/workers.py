"""Where a worker is, and what is seen of it."""

from enum import Enum
from typing import Any

from distlaunch.agent.frozen import Frozen
from distlaunch.state.many import Many


class WorkerPhase(Enum):
    """What is known of a worker whose end is not."""

    PLANNED = "planned"
    RUNNING = "running"
    UNSTARTED = "not started"
    VANISHED = "lost with its node"


class Exited(Frozen):
    """It ended by itself, or `stopped`: after we told it to. The rest is as in the event.

    `peer_gone`: it failed because another rank was gone or, if `timed_out`, never came.
    """

    status: int
    at: float
    stopped: bool = False
    error_record: Any = None
    oom_kills: int = 0
    shm: tuple[int, ...] = ()
    peer_gone: bool = False
    timed_out: bool = False


class Meeting(Frozen):
    """What is seen of its way to the rendezvous: until it has `joined`, whether it is `trying`, in words."""

    joined: bool = False
    trying: bool = False
    doing: str = ""


class Stall(Frozen):
    """It neither prints nor computes; `stack` is where, innermost frame first, once that is known.

    `stopped_pid` is the process of its own that a signal has stopped.
    """

    stack: tuple[str, ...] = ()
    stopped_pid: int | None = None


class Use(Frozen):
    """What it uses: CPU in percent of one, bytes, its GPU in percent, bytes there; None = not known."""

    cpu: float
    memory: int
    gpu: int | None = None
    gpu_memory: int | None = None


class Worker(Frozen):
    """One worker of the current generation; `pid` and `cpus` are known once it has started.

    `dumping`: it was told to print its stacks, and may die of that.
    """

    rank: int
    phase: WorkerPhase | Exited = WorkerPhase.PLANNED
    pid: int | None = None
    cpus: str | None = None
    meeting: Meeting = Meeting()
    stall: Stall | None = None
    dumping: bool = False

    @property
    def status(self) -> int | None:
        """Its exit status, or the negative signal number; None unless it has ended."""
        return self.phase.status if isinstance(self.phase, Exited) else None

    @property
    def stopped(self) -> bool:
        """Whether it ended after we told it to."""
        return isinstance(self.phase, Exited) and self.phase.stopped

    @property
    def running(self) -> bool:
        """Whether its process is there, as far as we know."""
        return self.phase is WorkerPhase.RUNNING

    @property
    def going(self) -> bool:
        """Whether its end is still to come."""
        return self.phase in (WorkerPhase.PLANNED, WorkerPhase.RUNNING)

    @property
    def phase_word(self) -> str:
        """Its phase in a word or a few."""
        return "exited" if isinstance(self.phase, Exited) else self.phase.value


class Workers(Many[Worker]):
    """Those of a generation, in rank order."""

    __slots__ = ()

    @staticmethod
    def _weigh(item: Worker) -> tuple[int, ...]:
        meeting = item.meeting
        return (item.status == 0, meeting.joined, meeting.joined or meeting.trying, item.going)

    @property
    def succeeded(self) -> int:
        """How many have ended with status 0."""
        return self._count(0)

    @property
    def joined(self) -> int:
        """How many have joined the rendezvous."""
        return self._count(1)

    @property
    def begun(self) -> int:
        """How many have joined it, or try to."""
        return self._count(2)

    @property
    def going(self) -> int:
        """How many have not ended."""
        return self._count(3)
