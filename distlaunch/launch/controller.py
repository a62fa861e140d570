"""The loop of a run. It waits for links, signals and deadlines, and executes the supervisor's actions."""

import math
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from distlaunch.agent import messages, wire
from distlaunch.agent.poller import keep_memory
from distlaunch.errors import DistlaunchError, UsageError
from distlaunch.job.spec import JobSpec
from distlaunch.launch import process
from distlaunch.launch.addresses import answers
from distlaunch.launch.link import Links
from distlaunch.launch.start import Start, path_of_starts
from distlaunch.observers import observers_of
from distlaunch.observers.observer import Attempts, Observed, Observer, Observers, Printed, Shown
from distlaunch.observers.recording import LastOutput, Recorder
from distlaunch.observers.run_directory import STOPPED, within
from distlaunch.observers.run_list import append, is_stopped, lines_of, note_end
from distlaunch.schedulers import load
from distlaunch.signals import Interrupts
from distlaunch.supervisor import actions, events
from distlaunch.supervisor.allocation_end import is_to_go_on
from distlaunch.supervisor.codec import OF_FILES, event_of, seconds, uses_of
from distlaunch.supervisor.nodes import End, may_return
from distlaunch.supervisor.preparing import start_command
from distlaunch.supervisor.restarting import early_exception, repetition_words
from distlaunch.supervisor.state import Phase, State
from distlaunch.supervisor.status import document_of
from distlaunch.supervisor.step import begin, step
from distlaunch.supervisor.stopping import collect_of, without_files
from distlaunch.supervisor.summary import Summary
from distlaunch.transports.failure import Kind, LinkFailure

# A scheduler may send SIGTERM to all processes of a job at once, including the command that queries the
# scheduler for the reason. SIGTERM is blocked until the shell ignores it. The shell's children inherit that.
# Local times would be ambiguous when clocks are put back.
_UNSTOPPED = ("/bin/sh", "-c", 'trap "" TERM; export TZ=UTC0; exec "$@"', "sh")
MISSED = 3.5
"""Unanswered heartbeats of a lease before a node counts as lost, unless its transport detects dead
connections, as ssh does."""
LATE_S = 1.0
"""Seconds after which the loop counts as suspended if it should have run."""
CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""A clock that keeps running while the machine is suspended."""
RECENT_S = 120.0
"""Seconds in which the difference between a node's clock and this one hardly changes."""
FIRST_BEAT_S = 0.1
"""Seconds from the start of an attempt to its first heartbeat. The interval then doubles, up to the usual.
Ranks often fail soon after the start. By then, the clock offsets of distant nodes must be known."""
WATCH_S = 4.0
"""Seconds between requests for data on resource use, while an observer needs the data."""
DECIDE_S = 10.0
"""Maximum seconds for reading and writing the list of a job's starts, whose disk may be stuck."""
AGAIN_S, AGAIN_GAP_S = 600.0, 10.0
"""Seconds in which to try again to requeue a job whose scheduler doesn't answer, and between two tries."""
_UNCOUNTED = "requeues are counted in {}, but it can't be written"
LOOK_S = 0.5
"""Maximum seconds to look into the run directory after a signal, in case its disk hangs."""
FIRST_SIGNS_OF_WORKERS = (messages.WorkerStarted, messages.WorkerUnstarted, messages.WorkerExited)


_UNKNOWN = (-math.inf, math.inf)
"""The least and the greatest possible difference between the clock of a node and this one."""


class _ClockOffset:
    """The seconds to add to a node's monotonic time to get this run's time.

    It is at most the time of a report's arrival less the time in the report, and at least the time of a
    heartbeat less the time in its answer. Each bound is wrong by the least delay of several messages. The
    middle is right if these are equal. Older reports don't count, since clocks drift apart: over days, by
    more than the time between the failures of two ranks.
    """

    def __init__(self, now: float) -> None:
        self._since, self._recent, self._before = now, _UNKNOWN, _UNKNOWN
        self._sent = deque[float]()

    def ping(self, now: float) -> None:
        """Note that a heartbeat was sent. If the node may not answer at once, `now` is minus infinity."""
        self._sent.append(now)

    def add(self, now: float, node_time: float, pong: bool = False) -> None:
        """Take the time in a report that arrived at `now`: perhaps the answer to the first open heartbeat."""
        if now - self._since > RECENT_S:
            self._since, self._recent, self._before = now, _UNKNOWN, self._recent
        least, most = self._recent
        if pong and self._sent:
            least = max(least, self._sent.popleft() - node_time)
        self._recent = least, min(most, now - node_time)

    @property
    def seconds(self) -> float:
        """Return the most exact estimate from at least the last RECENT_S."""
        least, most = max(self._recent[0], self._before[0]), min(self._recent[1], self._before[1])
        return (least + most) / 2 if math.isfinite(least) else most


class Controller:
    """The controller of one job, from start to finish."""

    def __init__(self, start: Start, observers: Observers, interrupts: Interrupts) -> None:
        self._spec, self._run_id, self._now = start.spec, start.run_id, start.now
        self._observers, self._tell, self._interrupts = observers, observers.tell, interrupts
        self._open, self._lookups, self._directory = start.open, start.asked, start.directory.path
        self._links = Links(
            self._take,
            lambda node, failure: self._feed(events.LinkEnded(node, failure)),
            lambda node, over: self._feed(events.ImagePulled(node, over)),
        )
        self._links.watch(interrupts.fd, self._on_interrupts)
        start.attach(
            self._links,
            self._feed,
            lambda node: may_return(self.state.nodes[node]),
            lambda text: self._tell(Observer.remarked, text),
        )
        self._note_ending, self._dismiss = start.note_ending, start.dismiss
        self._last_frame: dict[int, float] = {}
        self._flow_reported_at = 0.0
        self._clock_offsets: dict[int, _ClockOffset] = {}
        self._lease_s = start.spec.limits.lease_s
        self._heartbeat_s = self._beat_s = start.spec.limits.heartbeat_s
        self._next_heartbeat = self._now() + self._beat_s
        self._next_watch = 0.0
        self._awake_at = self._wakes_by = time.clock_gettime(CLOCK)
        self._attempts = Attempts()
        self._finished = False
        self._requeueing: threading.Thread | None = None
        self._requeue_messages = list[str]()
        self.files = None
        if start.spec.collect.paths:
            from distlaunch.launch.collecting import Files  # few jobs collect files

            self.files = Files(start.directory.path, start.spec.collect)
        self.state: State

    def run(self) -> State:
        """Run the job and return its final state."""
        keep_memory()
        chance, now = int.from_bytes(os.urandom(2), "big") / 65536, self._now()
        self.state, first = begin(self._spec, now, chance, self._run_id)
        self._execute(first, now)
        self._tell(Observer.began, self._spec, chance, now)
        if not self._spec.one_machine:
            # The lookups ran while links were being opened, which takes longer.
            self._feed(events.AddressesFound(tuple(answers(self._lookups).items())))
        while not self._finished:
            wait_s = self._wait_s()
            self._wakes_by = time.clock_gettime(CLOCK) + wait_s
            self._links.turn(wait_s)
            self._look_at_clock()
        cause = self.state.cause
        why = f"the job had ended: {cause.text}" if cause else "the job had already finished"
        self._dismiss(why, self.state.outcome)
        self._links.close(wait=self.state.interrupts < 3)
        if self._requeueing:
            self._requeueing.join()
            for text in self._requeue_messages:
                self._tell(Observer.remarked, text)
        return self.state

    def _wait_s(self) -> float:
        """Return the seconds until a timer, a heartbeat or an observer is due."""
        timer = self.state.next_due
        due = self._next_heartbeat if timer is None else min(timer, self._next_heartbeat)
        wait_s = due - self._now()
        if (wake_at := self._observers.wake_at) is not None:
            wait_s = min(wait_s, wake_at - time.monotonic())
        if self._observers.want_use:
            wait_s = min(wait_s, self._next_watch - self._now())
        return max(0.0, wait_s)

    def _notice_suspension(self) -> None:
        """Feed a `Suspended` event if the loop runs more than LATE_S seconds later than it should."""
        before, due, now = self._awake_at, self._wakes_by, time.clock_gettime(CLOCK)
        self._awake_at = self._wakes_by = now
        if now - due > LATE_S:
            self._last_frame = dict.fromkeys(self._last_frame, self._now())  # others may be on their way
            self._feed(events.Suspended(round(now - before, 3)))

    def _look_at_clock(self) -> None:
        """Do what is due after each turn of the loop.

        This detects a suspension, wakes observers, requests data for them from the nodes, feeds a `TimerDue`
        event, and sends heartbeats. A node that has been silent for too long is treated as lost.
        """
        self._notice_suspension()
        self._observers.wake()
        now = self._now()
        if self._observers.want_use and now >= self._next_watch:
            self._next_watch = now + WATCH_S
            for node in self._links.answering:
                self._links.send(node, messages.WatchUse(2 * WATCH_S))
        if self._observers.stacks_requested():
            self._request_stacks()
        if alarm := self.state.alarm(now):
            self._feed(events.TimerDue(*alarm))
        if now >= (due := self._next_heartbeat):
            self._next_heartbeat = now + self._beat_s
            self._beat_s = min(2 * self._beat_s, self._heartbeat_s)
            for node in self._links.beat():
                self._clock(node).ping(now)
                reach = self._spec.pool[node].reach
                most_s = self._lease_s if reach.keeps_alive else MISSED * self._lease_s / wire.HEARTBEATS
                # Not `now`: this process couldn't receive anything while it was suspended.
                if due - self._last_frame.get(node, due) > most_s:
                    key = self._spec.key_words(f"timeouts.lease is {self._lease_s:g} s")
                    why = f"no heartbeat for {round(most_s, 1):g} s{key}"
                    self._links.give_up(node, why)

    def _request_stacks(self) -> None:
        """Request the stacks of all running ranks. The answers are recorded, but affect no decision."""
        plan = self.state.plan if self.state.phase is Phase.RUNNING else None
        for part in plan.nodes if plan else ():
            running = tuple(rank for rank in part.ranks if self.state.workers[rank].running)
            if running and part.node in self._links.answering:
                local_ranks = tuple(rank - part.first_rank for rank in running)
                self._links.send(part.node, messages.ReadStacks(local_ranks))

    def _feed(self, event: events.Event) -> None:
        """Pass an event to the supervisor, notify the observers, and execute the supervisor's actions."""
        self._notice_suspension()
        now = self._now()
        self.state, todo = step(self.state, event, now)
        self._tell(Observer.happened, event, self.state, now)
        self._execute(todo, now)
        # Observers are notified only once the workers are starting, to avoid delaying the workers.
        if isinstance(event, FIRST_SIGNS_OF_WORKERS) and self._attempts.note(self.state):
            self._next_watch = now
            self._beat_s = min(FIRST_BEAT_S, self._heartbeat_s)
            self._next_heartbeat = min(self._next_heartbeat, now + self._beat_s)
            self._tell(Observer.started, self.state, now)
        if self.state.phase is Phase.STOPPING:
            self._note_ending()
        cause = self.state.cause  # without one, another success may yet be doubted
        ends_badly = not cause.later if cause else self.state.warned
        if self.state.scheduler_ends and ends_badly and not self._requeueing:
            self._decide_on_requeue()

    def _decide_on_requeue(self) -> None:
        """Decide whether to requeue a job that its scheduler is ending, before that kills this process.

        The ranks may take longer to end than the scheduler waits. The new start comes only after this one.
        """

        def requeue() -> None:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # which the commands get, too
            ask_for_another(self.state, self._requeue_messages.append)

        thread = threading.Thread(target=requeue, daemon=True)
        with suppress(RuntimeError):  # no more threads can be started
            thread.start()
            self._requeueing = thread

    def _execute(self, todo: tuple[actions.Action, ...], now: float) -> None:
        for action in todo:
            match action:
                case actions.Connect():
                    self._connect(action.node)
                case actions.Drop():
                    self._links.drop(action.node)
                case actions.GiveUp():
                    self._links.give_up(action.node, action.why)
                case actions.SendTree():
                    self._send_tree(action)
                case actions.ShowMessage():
                    self._tell(Observer.message, action, now)
                case actions.AskScheduler():
                    self._ask_scheduler()
                case actions.Finish():
                    self._finished = True
                case actions.Send():
                    self._links.send(action.node, action.command)
                case _:  # StartWorkers
                    self._links.send(action.node, start_command(self.state, action.node))

    def _ask_scheduler(self) -> None:
        """Ask the scheduler whether it is ending the allocation. Feed its answer as an event."""
        allocation = self._spec.allocation
        assert allocation is not None
        if not allocation.answers:
            self._feed(_fate_by_stop(self._spec))
            return
        scheduler, printed = load(allocation.scheduler), bytearray()
        argv = [*_UNSTOPPED, *scheduler.fate_argv(allocation.job)]
        try:
            command = process.start(argv, os.environ, blocked=(signal.SIGTERM,))
        except OSError:  # no more processes or descriptors
            self._feed(events.AllocationReported(None))
            return

        def receive() -> None:
            piece = os.read(command.stdout, 1 << 16)
            printed.extend(piece)
            if not piece:
                self._links.unwatch(command.stdout)
                command.kill()
                command.wait()
                command.close()
                fate = scheduler.fate(allocation.starts, printed.decode(errors="replace"), time.time())
                stops = list[events.AllocationReported]()
                cause = self.state.cause
                # Its script may have exited, or a grace period may have ended, because of `distlaunch stop`.
                if fate.ends and (not fate.final or (cause and cause.later)):
                    within(LOOK_S, lambda: stops.append(_fate_by_stop(self._spec)))
                self._feed(next((stop for stop in stops if stop.ends), fate))

        self._links.watch(command.stdout, receive)

    def _send_tree(self, action: actions.SendTree) -> None:
        """Send a node the contents it lacks, as its link accepts them. Feed an error as the node's report."""
        from distlaunch.launch.snapshot import contents  # few jobs copy their code

        def pieces() -> Iterator[bytes]:
            assert self._spec.tree is not None
            try:
                yield from contents(self._spec.tree.digest, action.contents)
            except DistlaunchError as error:
                self._feed(messages.TreeRefused(action.node, str(error)))

        self._links.stream(action.node, pieces())

    def _connect(self, node: int) -> None:
        """Open a link to a node, and discard data from the node's earlier agents."""
        for known in (self._last_frame, self._clock_offsets):
            known.pop(node, None)  # from an earlier agent
        try:
            self._links.add(node, self._open(node))
        except DistlaunchError as error:  # the job may not need this node again
            self._feed(events.LinkEnded(node, LinkFailure(Kind.UNSTARTED, str(error))))

    def _take(self, frame: wire.Frame) -> None:
        """Handle a frame from an agent, according to its kind. Most reports become events.

        Raises `ProtocolError`, which closes the link.
        """
        node = frame.node
        self._last_frame[node] = self._now()
        if frame.kind in (wire.OUTPUT, wire.FLIGHT):
            self._take_output(node, frame)
            return
        report = frame.payload if frame.kind == wire.FILE else messages.report_in(frame)
        if isinstance(report, (bytes, *OF_FILES)):
            self._take_file(node, report)
            return
        if isinstance(report, messages.Usage):  # only shown; it affects no decision, so it isn't an event
            ranks = ((self.state.rank_of(node, local), use) for local, use in uses_of(report).items())
            uses = {rank: use for rank, use in ranks if rank is not None}
            self._tell(Observer.used, uses, self._now())
            return
        if isinstance(report, messages.Evidence):
            self._take_evidence(report)
            return
        if isinstance(report, messages.WorkerStarted) and report.local_rank == 0:
            # srun delays the next small message by 40 ms unless data flows in the other direction.
            self._links.send(node, messages.Ping())
            self._clock(node).ping(-math.inf)  # the workers keep all cores busy
        if (node_time := getattr(report, "at", None)) is not None:
            is_pong = isinstance(report, messages.Pong)
            self._clock(node).add(self._now(), seconds(node_time, "at"), is_pong)
        event = event_of(report, lambda at: at + self._clock(node).seconds)
        if event is not None:
            self._feed(event)

    def _clock(self, node: int) -> _ClockOffset:
        return self._clock_offsets.setdefault(node, _ClockOffset(self._now()))

    def _take_evidence(self, report: messages.Evidence) -> None:
        if not isinstance(report.taken, dict):
            raise wire.ProtocolError("evidence that is not a map")
        attempt = self._attempts.of(report.attempt)
        part = attempt and attempt.plan.part_of(report.node)
        if attempt and part:  # otherwise, the job is being stopped while its workers start
            self._tell(Observer.captured, part, report.taken, attempt.number)

    def _take_output(self, node: int, frame: wire.Frame) -> None:
        """Pass output, or a piece of a flight recorder dump, to the observers. Raises `ProtocolError`."""
        attempt = self._attempts.of(frame.attempt)
        part = attempt and attempt.plan.part_of(node)
        running, (local_rank, stream) = part.ranks if part else (), divmod(frame.channel, 2)
        if frame.kind == wire.FLIGHT:
            if not attempt or frame.channel not in running:
                raise wire.ProtocolError(f"a flight record from rank {frame.channel}, which is not running")
            self._tell(Observer.dumped, frame.channel, frame.payload, attempt.number)
        else:
            if not attempt or local_rank >= len(running):
                raise wire.ProtocolError(f"output from local rank {local_rank}, which is not running")
            rank = running[local_rank]
            goes_to = attempt.destinations.get((rank, stream))
            if goes_to is None:
                raise wire.ProtocolError(f"output from rank {rank}, which is shown on its own node")
            self._tell(Observer.printed, Printed(rank, stream, frame.payload, attempt.number, goes_to))
        self._note_flow(node)

    def _take_file(self, node: int, what: messages.FileBegins | messages.FilesEnd | bytes) -> None:
        if not self.files or not self.state.verdict or not collect_of(self.state, node):
            raise wire.ProtocolError("a file that was not requested")
        self.files.take(node, self.state.label(node), what)
        self._note_flow(node)

    def _note_flow(self, node: int) -> None:
        """Feed an event, at most once a second, if a clean node is still sending: the run waits for it."""
        now = self._now()
        if self.state.nodes[node] is End.CLEAN and now - self._flow_reported_at > 1.0:
            self._flow_reported_at = now
            self._feed(events.OutputFlows(node))

    def _on_interrupts(self) -> None:
        """Feed signals to this process as events. `distlaunch stop` writes STOPPED, then sends SIGINT."""
        path, found = os.path.join(self._directory, STOPPED), list[bool]()
        look = threading.Thread(target=lambda: found.append(os.path.exists(path)), daemon=True)
        with suppress(RuntimeError):  # no more threads can be started
            look.start()
            look.join(LOOK_S)
        for signum in self._interrupts.received():
            self._feed(messages.Interrupted(signum, by_command=any(found) and signum == signal.SIGINT))


def supervise(start: Start, shown: Shown, observers: Iterable[Observer] = ()) -> Summary:
    """Run the supervisor over the links of `start`. Notify the built-in observers, then `observers`."""
    last_output = LastOutput()
    observed = Observed(start.spec, start.run_id, start.directory, start.status, last_output.summary, shown)
    recorder, *others = observers_of(observed)
    assert isinstance(recorder, Recorder)
    seeing = Observers((last_output, recorder, *others, *observers))
    controller = Controller(start, seeing, shown.interrupts)
    state = controller.run()
    seeing.tell(Observer.drained, state)
    summary = last_output.summary(state, start.directory.path, start.now())
    summary = summary._replace(lagging=recorder.lagging(state))
    if controller.files:
        wanted = state.members if state.interrupts < 2 else ()
        expected = {node: state.label(node) for node in wanted if collect_of(state, node)}
        for node, why in without_files(state).items():
            controller.files.take(node, state.label(node), messages.FilesEnd(node, (("all files", why),), 0))
        collected, lines = controller.files.close(expected)
        summary = summary._replace(collected=collected, collecting=lines)
    seeing.tell(Observer.ended, summary)
    note_end(start.run_id, document_of(recorder.status))  # first: `close` may remove the directory
    recorder.close()
    if start.code:
        start.code.release()
    return summary


def _fate_by_stop(spec: JobSpec) -> events.AllocationReported:
    """Return the report for a job whose scheduler doesn't answer: canceled or unknown."""
    stopped = is_stopped(path_of_starts(spec))
    return events.AllocationReported(stopped or None, "was cancelled" if stopped else "", final=stopped)


def ask_for_another(state: State, tell: Callable[[str], None], interrupts: Interrupts | None = None) -> None:
    """Requeue the job if it should continue, once per run. Call `tell` with messages about the result.

    Called at the end of a run, with `interrupts`: if the scheduler doesn't answer, try again until a signal
    arrives, for at most AGAIN_S. An earlier call, without them, leaves that to the call at the end. What was
    decided is recorded in the list of starts. The batch script looks there, too: the status of a run whose
    rank was killed is that of a killed distlaunch.
    """
    allocation = state.spec.allocation
    if allocation is None or not allocation.requeues or not state.spec.restarts.requeue:
        return
    path, decision = path_of_starts(state.spec), {"decided": state.run_id}
    lines = list[dict[str, Any]]()
    is_read = within(DECIDE_S, lambda: lines.extend(lines_of(path)))
    if decision in lines:
        return
    if is_to_go_on(state):
        if not is_read:
            tell(f"not requeueing {allocation.name}: {_UNCOUNTED.format(path)}")
            return
        if interrupts:
            append(path, {"trying": state.run_id})  # for `stop`, because the scheduler may not answer
        if error := _requeue(state, path, tell, interrupts):
            again = f"trying again for up to {AGAIN_S / 60:g} min"
            tell(f"can't requeue {allocation.name} yet: {error}; {again}")
            if interrupts is None:
                return
            _requeue_later(state, path, tell, interrupts)
    within(DECIDE_S, lambda: append(path, decision))


def _requeue_later(state: State, path: str, tell: Callable[[str], None], interrupts: Interrupts) -> None:
    """Try again to requeue the job until the scheduler answers, a signal arrives, or AGAIN_S have passed."""
    allocation, until = state.spec.allocation, time.monotonic() + AGAIN_S
    assert allocation is not None
    while not _told_to_stop(interrupts, AGAIN_GAP_S):
        if not (error := _requeue(state, path, tell, interrupts)):
            return
        if time.monotonic() >= until:
            tell(f"can't requeue {allocation.name}: {error}")
            return
    tell(f"not requeueing {allocation.name}: received a signal")


def _told_to_stop(interrupts: Interrupts | None, within_s: float = 0.0) -> bool:
    """Return whether a signal to stop arrives in time. Other signals, such as warnings, may end the wait."""
    if interrupts is None or not select.select([interrupts.fd], [], [], within_s)[0]:
        return False
    return not {*wire.STOPS}.isdisjoint(interrupts.received())


def _requeue(
    state: State, path: str, tell: Callable[[str], None], interrupts: Interrupts | None
) -> DistlaunchError | None:
    """Requeue the job, or tell why not. Return an error of the scheduler, if it may answer later.

    The requeue is counted only once per run, in the list of starts at `path`, or not at all in a grace period
    before a preemption. At its end, Slurm would requeue the job itself, but not if the job ends earlier.
    """
    from distlaunch.schedulers import queue  # imported already, by that scheduler

    allocation = state.spec.allocation
    assert allocation is not None
    preempted = state.cause is not None and state.cause.later
    # The batch script doesn't count lines that begin with another key.
    own = {"preempted": True} if preempted else dict[str, Any]()
    own |= {"requeue": True, "raised": early_exception(state), "by": state.run_id}
    lines = [*lines_of(path)]
    earlier = [line for line in lines if "requeue" in line and "preempted" not in line and line != own]
    try:
        why = ("" if preempted else _why_not_again(state, earlier)) or _end_of_job(state.spec)
        if not why and _told_to_stop(interrupts):  # while scontrol was waiting for its answer
            why = "received a signal"
        if not why and own not in lines and not (why := _why_unnoted(path, own)):
            count = f", {len(earlier) + 1} of {state.spec.restarts.requeue}"
            uncounted = "; preemption doesn't count toward restarts.requeue"
            tell(f"requeueing {allocation.name}{uncounted if preempted else count}")
        if why:
            tell(f"not requeueing {allocation.name}: {why}")
        else:
            load(allocation.scheduler).requeue(allocation.job, os.environ)  # may kill this process at once
    except (UsageError, queue.ToolMissingError) as error:
        tell(f"can't requeue {allocation.name}: {error}")
    except DistlaunchError as error:
        return error
    return None


def _why_unnoted(path: str, own: Mapping[str, Any]) -> str:
    """Add the line about a requeue to the list of starts. Return why it must not follow, or ""."""
    append(path, own)
    if own not in [*lines_of(path)]:
        return f"{_UNCOUNTED.format(path)}, or others may write to it"
    return "it was cancelled" if is_stopped(path) else ""  # by a `stop` that can't have seen the line


def _end_of_job(spec: JobSpec) -> str:
    """Return how the job was ended for good, by `stop` or by its scheduler, or "" if it wasn't."""
    from distlaunch.schedulers import queue

    fate, allocation = _fate_by_stop(spec), spec.allocation
    if allocation and not fate.ends:
        scheduler = load(allocation.scheduler)
        # The state doesn't show a cancellation that happened when this process couldn't be notified.
        shown = queue.call(scheduler.title, *scheduler.fate_argv(allocation.job), before=_UNSTOPPED)
        fate = scheduler.fate(allocation.starts, shown, time.time())
    return f"it {fate.why}" if fate.ends and fate.final else ""


def _why_not_again(state: State, earlier: Sequence[Mapping[str, Any]]) -> str:
    """Return why a job with these `earlier` requeues isn't requeued again; "" = it is."""
    if (made := len(earlier)) >= state.spec.restarts.requeue:
        times = "once" if made == 1 else f"{made} times"
        rest = "; the ranks may not have finished: they ended after a warning" if state.outcome == 0 else ""
        return f"already requeued {times} (restarts.requeue){rest}"
    raised = early_exception(state)
    if raised and state.cause and earlier and earlier[-1].get("raised") == raised:
        return repetition_words(state, state.cause)
    return ""
