"""The agent, which executes the controller's commands and holds the lease.

The agent makes no decisions about the job, except that it stops its workers, sweeps and exits when the link
closes, the lease expires or a signal arrives.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from itertools import islice

from distlaunch.agent import gpus, messages, network, procfs, scratch, sweep, wire
from distlaunch.agent.outbox import Outbox
from distlaunch.agent.poller import Poller, keep_memory, widen
from distlaunch.agent.worker import close_inherited
from distlaunch.agent.workers import Workers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from distlaunch.agent.collection import Collection
    from distlaunch.agent.tree import Placement

GRACE_S = 10.0
REAP_INTERVAL_S = 0.05
"""Seconds between checks for killed processes that aren't children, since no signal announces their exit."""
_LEAVING = "-leaving"
"""Suffix of the run ID in the claim of an agent that is stopping its workers, without a controller."""
FLUSH_S = 45.0
"""Seconds without progress after which the remaining output is discarded, once everything is swept.

Longer than the controller waits (`supervisor.stopping.DRAIN_S`), which reports that output is missing.
"""
DISMISS_S = 5.0
"""Maximum seconds for which an agent that has sent everything waits for `Dismiss`."""
REQUEST_S = 5.0
"""Maximum seconds for which an agent that was stopped waits for the request for files to collect."""
_READ = 1 << 18
_WHILE_LEAVING = (
    *(messages.Ping, messages.StopWorkers, messages.Reap),
    *(messages.Close, messages.Collect, messages.Dismiss),
)
"""Commands that an agent still obeys while leaving. Others would start processes that nothing waits for."""


def main(nonce: str, node: int, directory: scratch.Directory, alone: bool = True) -> None:
    """Serve on descriptors 0 and 1, then exit the process. `directory` is for error records.

    The guardian calls this in a fork. If the node is not `alone` on its link, the agent also receives frames
    for other nodes, and writes its own frames as lines.
    """

    def serve() -> int:
        close_inherited()
        os.set_blocking(0, False)
        received = sys.stdin.buffer.read() or b""  # commands may have been read together with the boot code
        link_in, link_out = _take_link()
        os.set_blocking(link_in, False)
        os.set_blocking(link_out, False)
        widen(link_out)
        keep_memory()
        hello = wire.HELLO_PREFIX + nonce.encode() + b"\n"
        outbox = Outbox(node, directory, None if alone else wire.as_lines, hello)
        return Agent(link_in, link_out, directory, outbox).run(received)

    exit_after(serve)


def exit_after(serve: Callable[[], int]) -> None:
    """Call `serve`, which runs an agent, and exit the process with the status that it returns."""
    status = wire.AGENT_DIED
    try:
        status = serve()
    except BaseException:
        # A bug in distlaunch: the controller shows this stderr. Without descriptors, no import succeeds.
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)


def _take_link() -> tuple[int, int]:
    """Move the link away from descriptors 0 and 1, so that no stray print can corrupt it."""
    link_in, link_out = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    return link_in, link_out


class Agent:
    """The agent of one node. `link_in` and `link_out` are the descriptors of the link.

    The agent of a launcher that joined overrides some methods: see `distlaunch.launch.joined_agent`.
    """

    def __init__(self, link_in: int, link_out: int, directory: scratch.Directory, outbox: Outbox) -> None:
        self._link_in, self._link_out, self._directory = link_in, link_out, directory
        self._poller, self._outbox, self._node = Poller(), outbox, outbox.node
        self._decoder = wire.FrameDecoder(wire.COMMANDS)
        self._workers = Workers(self._poller, self._outbox, directory, self._flush_early)
        self._hold: network.Hold | None = None
        self._claim: object | None = None  # from `_claimed`
        self._notice: object | None = None  # also from there, while this agent leaves early
        self._run_id = ""
        self._tree: Placement | None = None
        self._collection: Collection | None = None
        self._grace_s, self._lease_s, self._renewed_at = GRACE_S, wire.LEASE_S, time.monotonic()
        self._warning: int = signal.SIGTERM
        self._commands: dict[type, Callable[[Any], None]] = {
            messages.Ping: self._on_ping,
            messages.HoldPort: self._on_hold,
            messages.FindRoute: self._on_route,
            messages.StartWorkers: self._on_start,
            messages.StopWorkers: self._on_stop,
            messages.Capture: self._workers.capture,
            messages.ReadStacks: self._workers.read_stacks,
            messages.WatchUse: self._workers.usage.go_on,
            messages.WarnWorkers: self._workers.warn,
            messages.Reap: self._on_reap,
            messages.PlaceTree: self._on_place_tree,
            messages.Listen: self._on_listen,
            messages.DialAll: self._on_dial,
            messages.Close: self._on_close,
            messages.Collect: self._on_collect,
            messages.Dismiss: lambda command: self._lose_link(),
        }
        self._guardian = os.getppid()
        self._link_lost = self._link_full = self._leaving = self._collects = self._expects_request = False
        self._status = wire.CLEAN
        self._signums: tuple[int, ...] = (signal.SIGCHLD, *wire.STOPS, *wire.WARNINGS)

    def run(self, received: bytes = b"") -> int:
        """Serve until `Close` or a signal arrives, the link closes, or the lease expires.

        Return the exit status. `received` is input that arrived with the boot code.
        """
        self._poller.watch_signals(self._signums, self._on_signals)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the guardian blocked them
        self._poller.watch(self._link_in, self._receive)
        self._outbox.report(self._hello())
        self._renew_lease()
        self._execute(received)
        self._receive()
        # Answers are sent with the first report, since some links delay a small message that follows another.
        self._flush()
        self._report_orphans()
        gc.enable()  # disabled during the boot
        self._flush()
        while not (self._leaving and self._workers.swept and self._have_files()) or self._expects_request:
            self._turn()
        if self._tree:
            self._tree.close(self._turn)
        self._directory.remove()
        self._resume_guardian()
        self._flush_rest()
        return self._status

    def _turn(self) -> None:
        self._poller.turn()
        self._flush()

    def _hello(self) -> messages.Hello:
        """Return the first report, with facts that the controller needs for its plan.

        From `at`, the controller computes the offset of this node's clock. A launcher that joined overrides
        this, and adds the number of its workers, their role and the directory of its logs.
        """
        return messages.Hello(
            node=self._node,
            protocol=wire.PROTOCOL,
            python=sys.executable,
            gpus=gpus.gpu_count(),
            hostname=os.uname().nodename,
            at=time.monotonic(),
            machine=network.machine(),
        )

    def _report_orphans(self) -> None:
        """Remove leftovers of earlier runs whose agents are dead. Called once, after the first answers."""
        directories = list(islice(scratch.abandoned(), 64))  # they stay open meanwhile
        killed = sweep.kill_orphans()
        scratch.remove_abandoned(directories)
        if killed:
            self._outbox.report(messages.OrphansKilled(self._node, killed))

    # The link

    def _receive(self) -> None:
        """Read and execute commands. If the input has ended, leave."""
        try:
            data = os.read(self._link_in, _READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._execute(data)
        else:
            self._hear_end()

    def _hear_end(self, damage: str = "") -> None:
        """Report that the input has ended, or is invalid because of `damage`, and leave."""
        # A peer that closed only the input, as sshd does when the guardian dies, still receives this.
        self._report_leaving(0, damage)
        self._lose_link()

    def _execute(self, received: bytes) -> None:
        """Execute the commands for this node in `received`. An invalid command ends the link."""
        try:
            frames = [frame for frame in self._decoder.feed(received) if frame.node == self._node]
            for frame in frames:
                if frame.kind == wire.TREE:
                    if self._tree:
                        self._tree.feed(frame.payload)
                    continue
                command = messages.read(messages.COMMAND_TYPES, frame.message())
                if type(command) not in self._commands:
                    raise wire.ProtocolError("unexpected message: %s" % type(command).__name__)
                if not self._leaving or isinstance(command, _WHILE_LEAVING):
                    self._commands[type(command)](command)
        except wire.ProtocolError as error:
            self._hear_end(str(error))

    def _flush(self) -> None:
        """Write as much as the link accepts. Continue when it accepts more."""
        if self._link_lost:
            self._outbox.discard()  # including output printed during the grace period
            return
        try:
            is_last = self._leaving and self._workers.swept and not self._expects_request
            if self._outbox.write(self._link_out) and is_last:
                self._poller.after(FLUSH_S, "flush", self._lose_link)
        except OSError:
            # The reader is gone. Commands that it sent before are still valid, and the end of the input
            # follows.
            self._link_lost = True
            self._outbox.discard()
        self._workers.flow.sent()
        self._link_full = bool(self._outbox)
        if self._link_full:
            self._poller.watch(self._link_out, self._flush, select.POLLOUT)
        else:
            self._poller.forget(self._link_out)

    def _flush_early(self) -> None:
        """Send all queued frames before new ones. If the link is full, control frames go first instead."""
        if not self._link_full:
            self._flush()

    def _have_files(self) -> bool:
        """Queue some of the files to collect, unless the link is full. Return whether all are queued."""
        if self._link_lost or not self._collection:
            return True
        if not self._link_full:
            self._poller.after(0.0, "collect", lambda: None)  # continue immediately
            return self._collection.go_on()
        return False

    def _flush_rest(self) -> None:
        """Write the remaining frames, then a report that these were all.

        Then wait for `Dismiss`, which can't arrive without a guardian.
        """
        self._write_out()
        if not (self._link_lost or self._outbox.is_damaged):
            self._outbox.report(messages.AllSent(self._node))
            self._write_out()
            self._poller.after(DISMISS_S, "flush", self._lose_link)
            while not self._link_lost and os.getppid() == self._guardian:
                self._poller.turn()

    def _write_out(self) -> None:
        """Write all frames. Give up if the link accepts nothing for FLUSH_S seconds."""
        self._poller.after(FLUSH_S, "flush", self._lose_link)
        self._flush()
        while self._outbox and not self._link_lost:
            self._poller.turn()

    def _lose_link(self) -> None:
        """Stop the workers and leave, because the controller is gone."""
        self._link_lost, self._expects_request = True, False
        self._poller.forget(self._link_in)
        self._poller.forget(self._link_out)
        self._outbox.discard()
        # A node that was frozen, for example with its container, has used up its time: see `_fenced`.
        late_s = max(0.0, time.monotonic() - self._renewed_at - self._lease_s)
        self._leave_early(max(0.0, self._grace_s - late_s))
        # Another attempt may start elsewhere once this agent's time is over, whether or not it was suspended.
        self._poller.count_suspensions("grace")

    def _leave_early(self, grace_s: float) -> None:
        """Stop the workers, then exit, without a `Close` from the controller."""
        if not self._leaving:
            self._leaving, self._status = True, wire.LEFT_EARLY
            self._notice = self._claimed(self._run_id + _LEAVING)
            self._workers.stop(grace_s, self._warning)

    def _renew_lease(self) -> None:
        # Wait in two halves: if the whole job has been suspended, the controller can still send a heartbeat
        # during the second half.
        half_s = self._lease_s / 2
        if not self._poller.was_suspended:  # otherwise, the heartbeats may be old ones
            self._renewed_at = time.monotonic()
        self._poller.after(half_s, "lease", lambda: self._poller.after(half_s, "lease", self._lose_link))

    def _on_signals(self, received: bytes) -> None:
        """Handle the signals received, one number per byte.

        SIGCHLD means that workers may have exited. Termination warnings are only reported. A signal in STOPS
        makes the agent leave. A launcher that joined overrides this.
        """
        if signal.SIGCHLD in received:
            self._workers.children_changed()
        for signum in sorted({*received}.intersection(wire.WARNINGS)):
            self._outbox.report(messages.WarningReceived(self._node, signum))
            self._flush()
        stop = next((signum for signum in received if signum in wire.STOPS), None)
        if stop is not None and not self._leaving:
            self._report_leaving(stop)
            self._leave_early(self._grace_s)
            self._expects_request = self._collects and not self._link_lost
            self._poller.after(REQUEST_S, "request", self._expect_no_request)

    def _expect_no_request(self) -> None:
        self._expects_request = False

    def _report_leaving(self, signum: int, damage: str = "") -> None:
        """Report that the agent is leaving.

        The report precedes the exits of its workers, so that none of them becomes the root cause.
        """
        if not self._leaving:
            self._outbox.report(
                messages.AgentLeaving(self._node, signum, os.getppid() != self._guardian, damage)
            )
            self._flush()

    def _resume_guardian(self) -> None:
        """Resume the guardian if a signal has suspended it: it must be able to sweep and to exit."""
        if procfs.state(self._guardian) == "T" and os.getppid() == self._guardian:
            os.kill(self._guardian, signal.SIGCONT)
            self._outbox.report(messages.GuardianResumed(self._node, self._guardian))

    # Commands, one method each

    def _on_ping(self, command: messages.Ping) -> None:
        self._renew_lease()
        self._resume_guardian()
        self._outbox.report(messages.Pong(self._node, time.monotonic()))

    def _on_hold(self, command: messages.HoldPort) -> None:
        """Hold the requested ports, unless they are held already."""
        if self._hold and not self._hold.answers(*command):
            self._hold.close()
            self._hold = None
        try:
            self._hold = self._hold or network.Hold(*command)  # the same request gets the same answer
            self._outbox.report(messages.PortHeld(self._node, self._hold.port, tuple(self._hold.further)))
        except OSError as error:
            self._report_unheld(command.port, error)

    def _report_unheld(self, port: int | None, error: OSError) -> None:
        holders = tuple(network.owners(port)) if port else ()
        self._outbox.report(messages.PortRefused(self._node, error.strerror or str(error), holders))

    def _on_route(self, command: messages.FindRoute) -> None:
        if not network.is_address(command.address):
            self._flush()  # the hello must not wait for a name server
        found = network.route(self._node, command.address)
        if command.needs is None or isinstance(found, messages.RouteFailed):
            self._outbox.report(found)
            return
        from distlaunch.agent import needs  # jobs on one machine see such problems at the start anyway

        needs.look(self._poller, command.needs, lambda seen: self._outbox.report(found._replace(seen=seen)))

    def _on_start(self, command: messages.StartWorkers) -> None:
        if self._hold:
            self._hold.release()
        self._grace_s, self._lease_s, self._warning = command.grace_s, command.lease_s, command.warning
        self._collects = command.collects
        self._renew_lease()
        self._directory.limit_agent(self._grace_s + self._lease_s)
        self._run_id = command.run_id
        self._claim = self._claim or self._claimed(command.run_id)
        self._workers.start(command)

    def _on_stop(self, command: messages.StopWorkers) -> None:
        self._expects_request = False  # the job restarts
        self._workers.stop(command.grace_s)

    def _on_reap(self, command: messages.Reap, killed: int = 0, until: float = 0.0) -> None:
        """Kill the processes of the run until none is left and no other agent of the run can start any.

        If another agent is leaving, wait for it until the monotonic time `until`. `killed` counts the
        processes killed by earlier calls.
        """
        until = until or time.monotonic() + command.grace_s
        self._claim = self._claim or self._claimed(command.run_id)
        another = not self._claim and not self._claimed(command.run_id + _LEAVING)
        if another and time.monotonic() < until:
            self._poller.after(REAP_INTERVAL_S, "reap", lambda: self._on_reap(command, killed, until))
            return
        fresh = sweep.kill_run(command.run_id, self._node)
        if fresh or not self._claim:
            self._poller.after(REAP_INTERVAL_S, "reap", lambda: self._on_reap(command, killed + fresh, until))
        else:
            self._outbox.report(messages.Reaped(self._node, killed))

    def _claimed(self, run: str) -> object | None:
        """Claim a run on this node before workers are started or `Reap` is answered; see `network.claim`."""
        return network.claim("%s-%d" % (run, self._node))

    def _on_place_tree(self, command: messages.PlaceTree) -> None:
        from distlaunch.agent.tree import Placement  # few jobs send their code

        if command.setup:
            try:
                command = command._replace(setup=self._workers.marked(command.setup, command.run_id))
            except scratch.NoPlaceError as error:
                self._outbox.report(messages.TreeRefused(self._node, str(error)))
                return
        self._tree = Placement(self._node, self._poller, self._outbox.report, command)
        self._tree.go_on()

    def _on_listen(self, command: messages.Listen) -> None:
        try:
            port = network.listen(command.port, command.token.encode())
            self._outbox.report(messages.Listening(self._node, port))
        except OSError as error:
            self._report_unheld(command.port, error)

    def _on_dial(self, command: messages.DialAll) -> None:
        results = network.dial_all(command.targets, command.timeout_s, command.token.encode())
        self._outbox.report(messages.Dialed(self._node, results))

    def _on_close(self, command: messages.Close) -> None:
        self._leaving, self._collection = True, None  # a second Close cancels the collection
        self._expects_request = command.collects and not self._link_lost
        self._poller.cancel("request")
        self._directory.limit_agent(max(self._grace_s, command.grace_s) + self._lease_s)
        self._workers.stop(command.grace_s, command.signum)

    def _on_collect(self, command: messages.Collect) -> None:
        from distlaunch.agent.collection import Collection  # few jobs collect files

        self._expects_request = False
        self._collection = Collection(command, self._outbox)
