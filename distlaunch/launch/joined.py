"""Runs this node's part of a run whose controller is another launcher: an agent here serves it.

Over the link come ranks, addresses, ports, and when to start and to stop. The program, its arguments and its
environment are this launcher's own, and so is where the ranks' output goes. What the agent reports goes back.
"""

import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping

from distlaunch.agent import messages, wire
from distlaunch.agent.frozen import Frozen
from distlaunch.agent.wire import HELLO_PREFIX, Frame, FrameDecoder, ProtocolError
from distlaunch.contract import SENT, Rendezvous
from distlaunch.errors import Exit
from distlaunch.job.spec import JobSpec
from distlaunch.launch.gather import Seat
from distlaunch.launch.start import run_folder
from distlaunch.links.links import Links
from distlaunch.links.opening import open_here
from distlaunch.links.peer import watch_for_silence
from distlaunch.observers.console import Console
from distlaunch.observers.run_folder import RunFolder
from distlaunch.plan.layout import Facts, LaunchPlan, NodeRank, node_plan, workers
from distlaunch.plan.output import Destination, destinations
from distlaunch.system.signals import Interrupts
from distlaunch.translation.commands import shared_descriptors
from distlaunch.transport.failure import LinkFailure
from distlaunch.wording import NO_SUSPENDING_TORCHRUN

PATIENCE_S = 5.0
READ = 1 << 18
OBEYED = (
    *(messages.Ping, messages.HoldPort, messages.FindRoute, messages.StartRanks, messages.StopWorkers),
    *(messages.DumpStacks, messages.WatchUse, messages.GiveNotice, messages.Reap, messages.Close),
)
"""All that a controller may ask of a launcher that joined: none of it names a program or a path."""


class Attempt(Frozen):
    """One start of this node's ranks: the first of them, and where each stream goes."""

    number: int
    first_rank: int
    destinations: Mapping[tuple[int, int], Destination]


class Joined:
    """This node, until its agent has ended. `status` is then the launcher's own."""

    def __init__(
        self, spec: JobSpec, seat: Seat, interrupts: Interrupts, say: Callable[[str], object]
    ) -> None:
        self._spec, self._seat, self._interrupts, self._say = spec, seat, interrupts, say
        self._socket = seat.connection
        self._socket.setblocking(False)
        watch_for_silence(self._socket)
        self._writes = os.dup(self._socket.fileno())  # each direction is watched by itself
        self._decoder = FrameDecoder(wire.COMMANDS)
        self._unsent = bytearray(HELLO_PREFIX + seat.nonce.encode() + b"\n")
        self._links = Links(self._report, lambda node, failure, cut: self._end(failure))
        self._console = Console(lambda: interrupts.send(signal.SIGPIPE))
        self._folder: RunFolder | None = None
        self._attempts: dict[int, Attempt] = {}
        self._heard = time.monotonic()
        self._lease_s = spec.timeouts.lease_s
        self._lost = ""
        self._signals = 0
        self._finished = self._told = self._stopping = False
        self.own_status = 0
        self.status = int(Exit.OK)

    def run(self) -> int:
        """Serve the controller until this node's part is over; the exit status."""
        self._links.watch(self._interrupts.fd, self._on_signals)
        self._links.watch(self._socket.fileno(), self._receive)
        self._links.add(self._seat.node, open_here(self._spec, self._seat.node))
        if self._seat.unread:
            self._obey(self._seat.unread)
        while not self._finished:
            self._send()
            self._links.turn(wire.LEASE_S / wire.HEARTBEATS)
            if time.monotonic() - self._heard > self._lease_s:
                self._lose(f"no heartbeat for {self._lease_s:g} s")
        self._close()
        return self.status

    # The controller

    def _receive(self) -> None:
        try:
            data = self._socket.recv(READ)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(error.strerror or str(error))
            return
        if data:
            self._heard = time.monotonic()
            self._obey(data)
        else:
            self._lose("it closed the connection")

    def _obey(self, data: bytes) -> None:
        try:
            for frame in self._decoder.feed(data):
                command = messages.read(messages.COMMANDS, frame.message())
                if not isinstance(command, OBEYED):
                    raise ProtocolError(f"a controller may not send {type(command).__name__}")
                self._do(command)
        except ProtocolError as error:
            self._lose(f"it sent what it may not: {error}")

    def _do(self, command: tuple[object, ...]) -> None:
        match command:
            case messages.StartRanks():
                self._stopping = False
                command = self._started(command)
            case messages.Reap(run_id=run_id) if run_id != self._seat.run_id:
                raise ProtocolError("a controller may end processes of its own run alone")
            case messages.Close() if not self._told:
                self._told = self._stopping = True
                self.status = command.outcome
                if command.why:
                    self._say(command.why)
            case messages.StopWorkers():
                self.own_status, self._stopping = 0, True
                self._say(f"{command.why}; restarting")
        self._links.send(self._seat.node, command)

    def _lose(self, why: str) -> None:
        """Nobody is there any more: have the agent stop its ranks and leave."""
        if self._lost or self._finished:
            return
        self._lost = why
        self._links.unwatch(self._socket.fileno())
        if not self._told:
            self.status = int(Exit.NODE_LOST)
            self._say(f"lost the controller on {self._seat.controller}: {why}; stopping this node's ranks")
        self._links.leave(self._seat.node)

    def _send(self) -> None:
        try:
            while self._unsent and not self._lost:
                sent = self._socket.send(self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose(error.strerror or str(error))
        self._links.unwatch(self._writes)
        if self._unsent and not self._lost:
            self._links.watch(self._writes, self._send, selectors.EVENT_WRITE)

    def _on_signals(self) -> None:
        for signum in self._interrupts.received():
            if signum == signal.SIGTSTP:
                self._say(NO_SUSPENDING_TORCHRUN)
                continue
            self._signals += signum in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
            if self._signals > 2:
                self._lose("stopped three times")
            message = messages.as_object(messages.Interrupted(signum))
            self._unsent += wire.encode_message(self._seat.node, message)

    # The agent

    def _started(self, ranks: messages.StartRanks) -> messages.StartWorkers:
        """The start of this launcher's own program as the ranks that the controller says."""
        spec, procs = self._spec, self._spec.nodes[0].procs
        if ranks.run_id != self._seat.run_id:
            raise ProtocolError("it starts ranks of another run")
        strange = [name for each in ranks.workers for name in (*each.env, *each.defaults) if name not in SENT]
        strange += [name for name in ranks.env if name not in SENT]
        if strange or [each.local_rank for each in ranks.workers] != list(range(procs or 0)):
            raise ProtocolError(f"its ranks are not this node's {procs}, or it sets {strange[:1]}")
        first = {**ranks.env, **ranks.workers[0].env}.get("RANK", "")
        if not first.isdecimal():
            raise ProtocolError("it gives no rank")
        plan = self._plan(int(first))
        (part,) = plan.nodes
        shares = shared_descriptors(plan, part, ranks.generation)
        goes_to = destinations(plan, ranks.generation)
        for each in goes_to.values():
            if each.file and self._folder:
                self._folder.append(each.file, b"")  # as torchrun has it, also for a stream that says nothing
        self._attempts[ranks.generation % wire.GENERATIONS] = Attempt(ranks.generation, int(first), goes_to)
        self._console.finish_lines()
        planned = workers(plan, part, Rendezvous("", 0, "", plan.backend))
        binding = spec.binding and messages.Binding(spec.binding.how, part.gpus, list(spec.binding.cpus))
        return messages.StartWorkers(
            **{
                name: getattr(ranks, name)
                for name in messages.StartRanks.__annotations__
                if name != "workers"
            },
            temporary=[],
            binding=binding,
            mpi=None,
            workers=[
                messages.WorkerSpec(
                    local_rank=each.local_rank,
                    argv=list(own.argv),
                    cwd=own.cwd,
                    paths=list(own.paths),
                    env=each.env,
                    defaults=each.defaults,
                    one_device=spec.one_device,
                    shares=shares[own.rank],
                )
                for each, own in zip(ranks.workers, planned, strict=True)
            ],
        )

    def _plan(self, first_rank: int) -> LaunchPlan:
        spec = self._spec._replace(backend="gloo")  # the controller has chosen; it matters to nothing here
        part = node_plan(spec, Facts(spec.python or "", 0), 0, NodeRank(self._seat.node), first_rank)
        return LaunchPlan(spec, (part,), part.procs, "gloo", "", None)

    def _report(self, frame: Frame) -> None:
        if frame.kind == wire.OUTPUT:
            self._show(frame)
            return
        if frame.kind == wire.CONTROL and (hello := self._noted(frame)):
            self._unsent += wire.encode_message(frame.node, hello)
            return
        self._unsent += wire.HEADER.pack(
            frame.kind, frame.node, frame.generation, frame.channel, len(frame.payload)
        )
        self._unsent += frame.payload

    def _noted(self, frame: Frame) -> dict[str, object] | None:
        """Take note of how a rank has ended; of a hello, what it is to be here."""
        message = frame.message()
        if message["op"] == "exited" and not (self.own_status or self._stopping):
            self.own_status = message["status"]
        procs = self._spec.nodes[0].procs
        return {**message, "procs": procs, "logs": self._logs()} if message["op"] == "hello" else None

    def _logs(self) -> str:
        """Where this node's logs are, if there are any: made now, as the controller is to know."""
        goes_to = destinations(self._plan(0), 0).values()
        if self._folder is None and any(each.file for each in goes_to):
            part = f"{self._seat.run_id}-node{self._seat.node}"
            self._folder = run_folder(self._spec, f"{part}-{os.urandom(2).hex()}")  # it may join again
        return self._folder.path if self._folder else ""

    def _show(self, frame: Frame) -> None:
        local_rank, stream = divmod(frame.channel, 2)
        attempt = self._attempts.get(frame.generation)
        goes_to = attempt and attempt.destinations.get((attempt.first_rank + local_rank, stream))
        if attempt is None or goes_to is None:
            raise ProtocolError(f"output from local rank {local_rank}, which is not running")
        if goes_to.file and self._folder:
            self._folder.append(goes_to.file, frame.payload)
        if goes_to.shown:
            self._console.output(attempt.first_rank + local_rank, stream, frame.payload, goes_to.prefix)

    def _end(self, failure: LinkFailure) -> None:
        """The agent has ended: tell the controller how, and finish."""
        status = wire.CLEAN if failure.clean else wire.NOT_CLEAN
        self._unsent += wire.encode_end(self._seat.node, status, failure.words)
        self._finished = True
        if not (self._told or self._lost):
            self.status = int(Exit.NODE_LOST)
            self._say(f"this node's agent has ended: {failure.words or 'it was killed'}")
        self._socket.setblocking(True)
        self._socket.settimeout(PATIENCE_S)
        if not self._lost:
            try:
                self._socket.sendall(self._unsent)
            except OSError:
                return

    def _close(self) -> None:
        self._console.finish_lines()
        self._console.close(lambda silent_s: silent_s < PATIENCE_S or not self._interrupts.any())
        if self._folder:
            self._folder.close()
        self._links.close()
        self._socket.close()
        os.close(self._writes)


def serve(
    spec: JobSpec, seat: Seat, interrupts: Interrupts, say: Callable[[str], object], own_first: bool = False
) -> int:
    """Run this node's part of the run; the job's exit status.

    With `own_first` it is that of a rank that failed here, if one did.
    """
    node = Joined(spec, seat, interrupts, say)
    status = node.run()
    own = node.own_status if own_first else 0
    return (own if own > 0 else 128 - own) if own else status
