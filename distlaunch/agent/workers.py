"""The workers of one node: starting, forwarding output, stopping and sweeping."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Sequence

from distlaunch.agent import evidence, messages, network, procfs, scratch, sweep, wire
from distlaunch.agent.messages import Setup, StartWorkers, WorkerSpec
from distlaunch.agent.outbox import Flow, Outbox
from distlaunch.agent.poller import Poller, make_room
from distlaunch.agent.watches import JoinWatch, StallWatch, UsageWatch
from distlaunch.agent.worker import DESCRIPTORS, Worker, at_home, environment, exec_failure, spawn, unstarted

_GPUS = "CUDA_VISIBLE_DEVICES"
DEADLINE = "deadline"
"""The file created after a termination warning. It contains the time when the job ends, in Unix seconds."""
STUCK_S = 5.0
"""Seconds that a sweep may take before the processes that survive it are reported."""


class Workers:
    """The workers of the current attempt. Reports go to `outbox`, error records to `directory`.

    `send` sends queued frames immediately, if the link accepts them. `swept` is set if no descendants are
    left.
    """

    def __init__(
        self, poller: Poller, outbox: Outbox, directory: scratch.Directory, send: Callable[[], None]
    ) -> None:
        self._poller, self._outbox, self._directory, self._send = poller, outbox, directory, send
        self._node = outbox.node
        self.flow = Flow(poller, outbox)
        self._read = memoryview(bytearray(wire.MAX_OUTPUT))
        self._workers: list[Worker] = []
        self._sweep: sweep.Sweep | None = None
        self._outlived: set[int] = set()  # PIDs killed by `_kill_left`
        self._joins = JoinWatch(poller, outbox, self._live)
        self._stalls = StallWatch(poller, outbox, self._live)
        self.usage = UsageWatch(poller, outbox, self._live)
        self._store_port: int | None = None  # None = not on this node, or already reported
        self._oom_kills = 0
        self._run_id, self._began = "", 0.0  # "" = no flight recorder dumps are requested
        self._attempt = 0
        self._stopping = self._failed = False
        self.swept = True

    def start(self, command: StartWorkers) -> None:
        """Spawn the workers of an attempt. System errors are reported, not raised."""
        if not self.swept:
            raise wire.ProtocolError("an attempt was started before the previous one had ended")
        self._attempt = command.attempt
        self._workers = []
        self._store_port = command.watch_port if command.hosts_store else None
        self._began = time.monotonic()
        self._oom_kills, self._run_id = procfs.oom_kills(), command.run_id if command.flight else ""
        self._sweep, self._stopping, self._failed, self.swept = None, False, False, False
        self._outlived = set()
        specs = self._prepared(command)
        if not specs:
            return
        shared = {**command.env, **self._marks()}
        shared.update(dict.fromkeys(command.temporary, self._directory.inner))
        make_room(DESCRIPTORS * len(specs) + 64)  # workers keep the old limit
        specs = [self._complete(spec, shared, command.environment) for spec in specs]
        counted = procfs.connections_counted()
        for spec in specs:
            self._spawn(spec)
        self._joins.begin(command.watch_port, counted)
        if command.stall_s:
            self._stalls.begin(command.stall_s)

    def _marks(self) -> dict[str, str]:
        """Return the variables for `sweep.kill_orphans`, without the job's ID. The directory exists."""
        deadline = os.path.join(self._directory.path, DEADLINE)
        return {"DISTLAUNCH_AGENT": sweep.agent_cookie(self._node), "DISTLAUNCH_DEADLINE": deadline}

    def marked(self, setup: Setup, run_id: str) -> Setup:
        """Return `setup` with the variables of workers by which later agents find processes left by this one.

        Raises `NoPlaceError`.
        """
        self._directory.make(setup.env.get("TMPDIR"))
        env = {**setup.env, "DISTLAUNCH_RUN_ID": run_id, **self._marks()}
        env["DISTLAUNCH_AGENT"] += sweep.job_id({**os.environ, **env}.get)
        return setup._replace(env=env)

    def _prepared(self, command: StartWorkers) -> Sequence[WorkerSpec]:
        """Create the directory for error records and choose CPUs. Return the workers; none if that fails."""
        tmpdir = command.env.get("TMPDIR")  # resolved against the workers' directory
        try:
            self._directory.make(tmpdir and os.path.join(at_home(command.workers[0]).cwd, tmpdir))
        except scratch.NoPlaceError as error:
            return self._refuse(command.workers, "scratch", errno.ENOSPC, str(error))
        chosen = os.environ.get(_GPUS)  # the only worker's variable is in `command.env`
        devices = [spec for spec in command.workers if spec.one_device and chosen]
        if blind := [spec for spec in devices if not environment(spec)[_GPUS]]:
            why = "virtual_local_rank: CUDA_VISIBLE_DEVICES=%s has no GPU for it; list one for each rank"
            why = why % chosen
            return self._refuse(blind, "setup", errno.EINVAL, why)
        if command.binding is None:
            return command.workers
        from distlaunch.agent import cpus  # few jobs bind CPUs

        try:
            return cpus.assign(command, command.binding)
        except cpus.BindingError as error:
            return self._refuse(command.workers[error.args[1] :], "setup", errno.EINVAL, error.args[0])

    def _refuse(self, workers: Sequence[WorkerSpec], stage: str, code: int, why: str) -> list[WorkerSpec]:
        """Report that these workers can't start. Return no workers, so that no others start either."""
        for spec in workers:
            self._outbox.report(unstarted(self._node, spec, stage, code, why))
        return []

    def _complete(self, spec: WorkerSpec, shared: dict[str, str], environment: str) -> WorkerSpec:
        """Return a worker's spec, with its paths expanded and the variables that all workers share added."""
        env = {**shared, **spec.env}
        if environment:  # also for commands, and for programs that a script starts
            path = env.get("PATH", os.environ.get("PATH", os.defpath))
            env.update(VIRTUAL_ENV=environment, PATH="%s/bin:%s" % (environment, path))
        env["DISTLAUNCH_AGENT"] += sweep.job_id({**os.environ, **env}.get)
        spec = at_home(spec)._replace(env=env)
        if not self._run_id:
            return spec
        own = evidence.variables(self._directory, self._attempt, self._run_id)
        return spec._replace(defaults={**spec.defaults, **own})

    def _spawn(self, spec: WorkerSpec) -> None:
        """Spawn a worker and watch its pipes, or report why that is impossible."""
        error_file = "%s/%d-%d.json" % (self._directory.path, self._attempt, spec.local_rank)
        try:
            worker = spawn(spec, error_file)
        except OSError as error:
            self._outbox.report(unstarted(self._node, spec, "fork", error.errno or 0))
            return
        self._workers.append(worker)
        self._poller.watch(worker.exec_pipe, lambda: self._confirm(worker))
        for stream, fd in worker.streams.items():
            self._watch_stream(worker, stream, fd)

    def _watch_stream(self, worker: Worker, stream: int, fd: int) -> None:
        def read() -> None:
            if not self.flow.holds(fd, read):
                self._pump(worker, stream)

        self._poller.watch(fd, read)

    def _confirm(self, worker: Worker) -> None:
        """Report the result of exec, once it is known."""
        if worker.exec_pipe < 0:
            return
        try:
            data = os.read(worker.exec_pipe, 256)
        except BlockingIOError:
            return
        self._poller.forget(worker.exec_pipe)
        os.close(worker.exec_pipe)
        worker.exec_pipe = -1
        worker.started = not data
        started = messages.WorkerStarted(self._node, worker.local_rank, worker.pid, worker.spec.cpus)
        self._outbox.report(exec_failure(self._node, data, worker.spec) if data else started)

    def _pump(self, worker: Worker, stream: int) -> bool:
        """Forward output of a worker. Return False if there is no more for now."""
        self._confirm(worker)  # the controller expects output only from workers that have started
        try:
            data = self._read[: os.readv(worker.streams[stream], [self._read])]
        except BlockingIOError:
            return False
        if data:
            worker.record_output(stream, data)
            self._outbox.output(self._attempt, 2 * worker.local_rank + stream, data)
        else:
            self._close_stream(worker, stream)
        return bool(data)

    def _close_stream(self, worker: Worker, stream: int) -> None:
        fd = worker.streams.pop(stream)
        self._poller.forget(fd)
        self.flow.forget(fd)
        os.close(fd)

    def children_changed(self) -> None:
        """Handle SIGCHLD: reap and report workers that exited, and continue a stop or sweep in progress."""
        by_pid = {worker.pid: worker for worker in self._workers if worker.running}
        for pid, status in sweep.reap():
            if pid in by_pid:
                self._on_exit(by_pid[pid], sweep.exit_status(status))
        if self._sweep:
            if sweep.has_children():
                self._sweep.kill_descendants()
            else:
                self._finish()
        elif self._stopping and not self._live():
            self.sweep()

    def _kill_left(self) -> None:
        """Kill processes left behind by workers that have exited, while other workers are still running."""
        files = {worker.error_file.encode() for worker in self._workers if not worker.running}
        self._outlived |= sweep.kill_left(files)

    def _on_exit(self, worker: Worker, status: int) -> None:
        """Report the exit of a reaped worker, after its last output."""
        worker.running = False
        self._poller.after(sweep.SETTLE_S, "left", self._kill_left)
        self._confirm(worker)
        if not worker.started:
            return  # its failure to start has already been reported
        self._read_output(worker)
        self._send()  # first, because the exit is a control frame, which would overtake the output
        if status != 0:
            self._failed = True
            self._report_usurper(worker)
        words, went_on = worker.words(status) if status != 0 else (b"", (0.0, 0.0))
        self._outbox.report(
            messages.WorkerExited(
                node=self._node,
                local_rank=worker.local_rank,
                status=status,
                at=time.monotonic(),
                error_record=worker.error_record(),
                words=words.decode(errors="replace"),
                oom_kills=procfs.oom_kills() - self._oom_kills,
                shm=procfs.shared_memory(),
                asked=worker.stopping or self._sweep is not None,
                went_on=went_on,
            )
        )

    def _read_output(self, worker: Worker) -> None:
        """Forward at most one full pipe of output per stream, since a grandchild may print endlessly."""
        for stream in (*worker.streams,):
            self._pump(worker, stream)

    def _report_usurper(self, worker: Worker) -> None:
        """Report a program that took the rendezvous port, before the failure of a rank that couldn't join."""
        if self._store_port is None or worker.local_rank in self._joins.joined:
            return
        owners = network.strangers(self._store_port)
        if owners:
            self._outbox.report(messages.PortUsurped(self._node, tuple(owners)))
        self._store_port = None

    def _live(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.running]

    def warn(self, command: messages.WarnWorkers) -> None:
        """Record when the job will end, if known, and send a signal to the workers that handle it."""
        if command.left_s is not None:
            self._directory.write(DEADLINE, "%.0f\n" % (time.time() + command.left_s))
        for worker in self._live() if command.signum else ():
            worker.warn(command.signum)

    def capture(self, command: messages.Capture) -> None:
        """Answer `Capture` with the state of all workers, and the stacks of some."""
        if not self.swept:
            self._stalls.excuse()
            site = evidence.Site(self._poller, self._outbox, self._directory, self._attempt)
            site.collect(command, self._live(), self._stalls.known_use, self._began)
            if self._run_id and self._live() and not command.quick:
                site.ask_nccl([worker.env for worker in self._live()])

    def read_stacks(self, command: messages.ReadStacks) -> None:
        """Answer `ReadStacks`."""
        site = evidence.Site(self._poller, self._outbox, self._directory, self._attempt)
        asked = [worker for worker in self._live() if worker.local_rank in command.local_ranks]
        site.read_stacks(asked, self._stalls.known_use)

    # The end of an attempt: SIGTERM, grace period, sweep.

    def stop(self, grace_s: float, signum: int = signal.SIGTERM) -> None:
        """Stop the attempt: send `signum`, send SIGKILL after `grace_s` seconds, then sweep.

        Another call can only shorten the grace period.
        """
        if not (self.swept or self._sweep or self._stopping):
            self.children_changed()  # a worker that has already exited was not stopped
        if self.swept:
            self._report_swept()
        elif grace_s <= 0 or not self._live():
            self.sweep()
        else:
            self._poller.within(grace_s, "grace", self.sweep, awake=True)  # the workers may be suspended, too
            if not self._stopping:
                self._stopping = True
                for worker in self._workers:
                    self._read_output(worker)
                    worker.stopping = True
                    worker.signal(signum)
                    worker.signal(signal.SIGCONT)  # signals stay pending in a suspended process

    def sweep(self) -> None:
        """Kill every descendant now, and report when none is left."""
        self._poller.cancel("grace")
        self._poller.cancel("left")
        self._joins.stop()
        self._stalls.stop()
        if not self._sweep:
            gentle = not self._failed and not self._live()  # no worker failed, so give helpers time
            self._sweep = sweep.Sweep([worker.pid for worker in self._workers], gentle)
            self._poller.after(self._sweep.settling_s, "settled", self.children_changed)
            self._poller.after(STUCK_S, "stuck", self._report_stuck, awake=True)
        self.children_changed()

    def _finish(self) -> None:
        """Finish the sweep: send the rest of the output and the dumps, and report `Swept`."""
        self._poller.cancel("settled")
        self._poller.cancel("stuck")
        for worker in self._workers:
            self._close(worker)
        ranks = {worker.env.get("RANK") for worker in self._workers}  # their children dump under other ranks
        for rank, piece in self._directory.flight_pieces(self._attempt) if self._run_id else ():
            if str(rank) in ranks:
                self._outbox.flight(self._attempt, rank, piece)
        self.swept, self._stopping = True, False
        self._report_swept()
        self._sweep = None

    def _close(self, worker: Worker) -> None:
        """Read the rest of the data in a worker's pipes, whose writers are all dead, and close the pipes."""
        for stream in (*worker.streams,):
            while self._pump(worker, stream):
                pass
            if stream in worker.streams:
                self._close_stream(worker, stream)

    def _report_swept(self) -> None:
        """Report the end of the sweep, and the output lost in this attempt."""
        worker_pids = {worker.pid for worker in self._workers}
        killed = self._sweep.killed - worker_pids | self._outlived if self._sweep else set()
        self._outbox.report(messages.Swept(self._node, self._attempt, len(killed)))
        for loss in self._outbox.losses():
            self._outbox.report(loss)

    def _report_stuck(self) -> None:
        assert self._sweep is not None
        stuck = [{"pid": pid, "command": procfs.command_name(pid)} for pid in self._sweep.stuck()]
        if stuck:  # the last may have ended just now
            self._outbox.report(messages.Stuck(self._node, tuple(stuck[:64])))
