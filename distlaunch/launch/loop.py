"""The loop: waits for links, signals and deadlines, feeds the supervisor, executes its actions."""

import os
import time
from functools import partial

from distlaunch.agent import messages, wire
from distlaunch.agent.poller import keep_memory
from distlaunch.launch.addresses import answers
from distlaunch.launch.start import Start
from distlaunch.observers.observer import Generations, Observer, Observers, Printed
from distlaunch.schedulers import load
from distlaunch.signals import Interrupts
from distlaunch.supervisor import actions, events
from distlaunch.supervisor.codec import command_for, event_of, seconds, uses_of
from distlaunch.supervisor.nodes import End
from distlaunch.supervisor.state import State
from distlaunch.supervisor.step import begin, step
from distlaunch.transports.link import Links

WATCH_S = 4.0
"""Between two requests to tell what ranks use, as long as somebody wants to know."""
FIRST_SIGNS_OF_WORKERS = (messages.WorkerStarted, messages.WorkerUnstarted, messages.WorkerExited)


class Loop:
    """Runs one job to its end."""

    def __init__(self, start: Start, observers: Observers, interrupts: Interrupts) -> None:
        self._spec, self._run_id, self._now = start.spec, start.run_id, start.clock.now
        self._observers, self._tell, self._interrupts = observers, observers.tell, interrupts
        self._open, self._asked = start.open, start.asked
        self._links = Links(
            self._take,
            lambda node, failure: self._feed(events.LinkEnded(node, failure)),
            lambda node, over: self._feed(events.ImagePulled(node, over)),
        )
        self._links.watch(interrupts.fd, self._on_interrupts)
        start.attach(self._links.watch, lambda node: self._feed(events.NodeArrived(node)))
        self._heard: dict[int, float] = {}
        self._flow_told = 0.0
        self._clock_offsets: dict[int, float] = {}
        self._lease_s = start.spec.timeouts.lease_s
        self._heartbeat_s = self._lease_s / wire.HEARTBEATS
        self._next_heartbeat = self._now() + self._heartbeat_s
        self._next_watch = 0.0
        self._begun = Generations()
        self._finished = False
        self.state: State

    def run(self) -> State:
        """Run the job; the last state tells how it ended."""
        keep_memory()
        chance, now = int.from_bytes(os.urandom(2), "big") / 65536, self._now()
        self.state, first = begin(self._spec, now, chance)
        self._execute(first, now)
        self._tell(Observer.began, self._spec, chance, now)
        if not self._spec.one_machine:
            # Only now: the links are under way, which take longer.
            self._feed(events.AddressesFound(tuple(answers(self._asked).items())))
        while not self._finished:
            self._links.turn(self._wait_s())
            self._look_at_clock()
        self._links.close()
        return self.state

    def _wait_s(self) -> float:
        timer = self.state.next_due
        due = self._next_heartbeat if timer is None else min(timer, self._next_heartbeat)
        wait_s = due - self._now()
        if (wake_at := self._observers.wake_at) is not None:
            wait_s = min(wait_s, wake_at - time.monotonic())
        if self._observers.want_use:
            wait_s = min(wait_s, self._next_watch - self._now())
        return max(0.0, wait_s)

    def _look_at_clock(self) -> None:
        self._observers.wake()
        now = self._now()
        if self._observers.want_use and now >= self._next_watch:
            self._next_watch = now + WATCH_S
            for node in self._links.answering:
                self._links.send(node, messages.WatchUse(2 * WATCH_S))
        if alarm := self.state.alarm(now):
            self._feed(events.TimerDue(*alarm))
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + self._heartbeat_s
            self._links.nudge()
            for node in self._links.answering:
                self._links.send(node, messages.Ping())
                if now - self._heard.get(node, now) > self._lease_s:
                    self._links.give_up(node, f"no heartbeat for {self._lease_s:g} s (timeouts.lease)")

    def _feed(self, event: events.Event) -> None:
        now = self._now()
        self.state, todo = step(self.state, event, now)
        self._tell(Observer.happened, event, self.state, now)
        self._execute(todo, now)
        # A start is noted once the workers are under way, to delay none.
        if isinstance(event, FIRST_SIGNS_OF_WORKERS) and self._begun.note(self.state):
            self._next_watch = now
            self._tell(Observer.started, self.state, now)

    def _execute(self, todo: tuple[actions.Action, ...], now: float) -> None:
        for action in todo:
            match action:
                case actions.Connect():
                    self._connect(action.node)
                case actions.Drop():
                    self._links.drop(action.node)
                case actions.GiveUp():
                    self._links.give_up(action.node, action.why)
                case actions.Notice():
                    self._tell(Observer.told, action, now)
                case actions.AskScheduler():
                    self._ask_scheduler()
                case actions.Finish():
                    self._finished = True
                case _:
                    self._links.send(action.node, command_for(action, self.state, self._run_id))

    def _ask_scheduler(self) -> None:
        from distlaunch.schedulers.queue import Question  # few jobs have one

        allocation = self._spec.allocation
        assert allocation is not None
        scheduler = load(allocation.scheduler)
        question = Question(scheduler.fate_argv(allocation.job), partial(scheduler.fate, allocation.starts))

        def answered() -> None:
            if (told := question.answer()) is not None:
                self._links.unwatch(question.fd)
                question.close()
                self._feed(told)

        self._links.watch(question.fd, answered)

    def _connect(self, node: int) -> None:
        link = self._open(node)
        for learnt in (self._heard, self._clock_offsets):
            learnt.pop(node, None)  # of an agent that was there before
        self._links.add(node, link)

    def _take(self, frame: wire.Frame) -> None:
        node = frame.node
        self._heard[node] = self._now()
        if frame.kind == wire.OUTPUT:
            self._take_output(node, frame)
            return
        if frame.kind == wire.FLIGHT:
            self._take_flight(node, frame)
            return
        report = messages.report_in(frame)
        if isinstance(report, messages.Usage):
            self._take_use(node, report)
            return
        if isinstance(report, messages.WorkerStarted) and report.local_rank == 0:
            # srun holds the next small message back for 40 ms, unless something goes the other way.
            self._links.send(node, messages.Ping())
        if (node_time := getattr(report, "at", None)) is not None:
            self._learn_clock(node, seconds(node_time, "at"))
        event = event_of(report, lambda at: at + self._clock_offsets.get(node, 0.0))
        if event is not None:
            self._feed(event)

    def _take_output(self, node: int, frame: wire.Frame) -> None:
        local_rank, stream = divmod(frame.channel, 2)
        begun = self._begun.of(frame.generation)
        part = begun and begun.plan.part_of(node)
        if not begun or not part or local_rank >= part.procs:
            raise wire.ProtocolError(f"output from local rank {local_rank}, which is not running")
        rank = part.first_rank + local_rank
        goes_to = begun.destinations.get((rank, stream))
        if goes_to is None:
            raise wire.ProtocolError(f"output from rank {rank}, which is shown on its own node")
        self._tell(Observer.printed, Printed(rank, stream, frame.payload, begun.number, goes_to))
        self._tell_of_flow(node)

    def _take_use(self, node: int, report: messages.Usage) -> None:
        """It is told of, but decides nothing: no event."""
        uses = {self.state.rank_of(node, local): use for local, use in uses_of(report).items()}
        self._tell(Observer.used, {rank: use for rank, use in uses.items() if rank is not None}, self._now())

    def _take_flight(self, node: int, frame: wire.Frame) -> None:
        begun = self._begun.of(frame.generation)
        part = begun and begun.plan.part_of(node)
        if not begun or not part or frame.channel not in part.ranks:
            raise wire.ProtocolError(f"a flight record from rank {frame.channel}, which is not running")
        self._tell(Observer.dumped, frame.channel, frame.payload, begun.number)
        self._tell_of_flow(node)

    def _tell_of_flow(self, node: int) -> None:
        now = self._now()
        if self.state.nodes[node] is End.CLEAN and now - self._flow_told > 1.0:
            self._flow_told = now
            self._feed(events.OutputFlows(node))

    def _learn_clock(self, node: int, node_time: float) -> None:
        """The smallest difference seen is the one with the least delay on the way."""
        offset = self._now() - node_time
        self._clock_offsets[node] = min(offset, self._clock_offsets.get(node, offset))

    def _on_interrupts(self) -> None:
        for signum in self._interrupts.received():
            self._feed(messages.Interrupted(signum))
