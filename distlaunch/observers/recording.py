"""Records a run: on disk, its start, every event, all output and its end; in memory, its last output."""

import contextlib
import io
import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from distlaunch.agent.messages import Interrupted, SetupPrinted, StackDumped, WorkerExited
from distlaunch.diagnosis.exits import TRACEBACK
from distlaunch.diagnosis.flight import waiting_lines
from distlaunch.errors import reason
from distlaunch.job.spec import JobSpec
from distlaunch.observers.observer import Attempts, Observed, Observer, Printed
from distlaunch.observers.run_directory import (
    SAVE_S,
    STATUS,
    SUMMARY,
    Entry,
    fd_of,
    file_of,
    status_bytes,
)
from distlaunch.plan.placement import LaunchPlan, NodePlan
from distlaunch.plan.workers import destinations, plan_document
from distlaunch.supervisor.actions import ShowMessage
from distlaunch.supervisor.codec import BEGAN, MESSAGE, beginning, fields_of
from distlaunch.supervisor.events import Event, LinkEnded, TimerDue
from distlaunch.supervisor.nodes import Exited, Use
from distlaunch.supervisor.preparing import chosen_interfaces, running_workers
from distlaunch.supervisor.state import Phase, State, Timer
from distlaunch.supervisor.status import RunState, status_now
from distlaunch.supervisor.summary import STDERR, STDOUT, Summary
from distlaunch.wording import json_text, listed

USE, USES = "use.json", "uses.jsonl"
"""The latest resource use of each rank, for viewers, and that of each node over time."""
REQUESTS = "requests"
"""Other processes append their requests to this file, which always exists: an NFS client notices a new file
only after a minute."""
USE_REQUEST, STACKS_REQUEST = b"u", b"s"
"""A viewer regularly requests USE. `distlaunch why` requests the stacks of all ranks, which are added to
EVIDENCE."""
FIRST_SAMPLE_S, SAMPLE_S, SAMPLE_SHARE, SAMPLING_S = 2.0, 10.0, 0.01, 3.0
"""Seconds until use is first recorded, seconds between records (at least a share of the run's age), and
seconds to wait for measurements from the nodes."""
EVIDENCE = "evidence.jsonl"
LOOK_S, FADES_S = 0.5, 6.0
"""Seconds between checks for requests, which take effect one check later, and seconds that a viewer counts as
present after its last request."""
STDERR_BYTES, STDOUT_BYTES = 16384, 2048
"""Bytes of each rank's last output kept for the summary."""
MAX_DUMP = 64 << 20
"""Size limit in bytes for reading the dump of a flight recorder."""
QUIET_S = 120.0
"""Seconds without output after which ranks that the user stops may have been hanging."""
ENDS_LINKS = (Timer.CLEAR, Timer.CLOSE, Timer.DRAIN)
"""Timers that make the supervisor give up on nodes without another event."""


class Recorder(Observer):
    """The writer of the run directory. `Observer` describes when each method is called."""

    def __init__(self, run: Observed) -> None:
        self._directory, self.status = run.directory, run.status
        self._flights: set[int] = set()
        self._uses: dict[int, Use] = {}
        self._measured = set[int]()
        """Ranks whose use was measured since the last sample."""
        self._sample_at, self._save_at, self._viewed_until = math.inf, 0.0, 0.0
        self._heard_at = math.inf
        self._plan: LaunchPlan | None = None
        self._loss_told = False
        self._limit: int | None = None
        self._sizes = Counter[str]()
        """Bytes of output for each file, saved or not."""
        self._attempts = Attempts()
        self._cut_off: set[tuple[int, int]] = set()
        self._at = 0.0
        self._open, self._temporary = True, False

    def began(self, spec: JobSpec, chance: float, at: float) -> None:
        """Record the job."""
        self.wake_at = time.monotonic() + LOOK_S
        self._limit = spec.logs.limit
        self._directory.record(at, BEGAN, beginning(spec, chance))
        self._directory.append(REQUESTS, b"")

    def happened(self, event: Event, state: State, at: float) -> None:
        """Record the event. Also write stack dumps and error records to separate files."""
        self._at = at
        if isinstance(event, StackDumped):
            rank = state.rank_of(event.node, event.local_rank)
            if rank is not None:
                name = file_of(state.attempt, f"rank{rank}.stack")
                self._directory.append(name, event.text.encode() + b"\n")
        elif isinstance(event, WorkerExited) and event.error_record and _keeps_output(state, event.node):
            name = f"attempt_{state.attempt}/{event.local_rank}/error.json"
            self._directory.append(name, json.dumps(_as_torch(event.error_record)).encode())
        elif isinstance(event, SetupPrinted):
            name = f"setup-{state.label(event.node)}.log".replace("/", "-")
            self._directory.append(name, event.text.encode())
        elif isinstance(event, LinkEnded):
            self._mark_gaps(state, [event.node])
        elif isinstance(event, Interrupted) and state.cause and self.status.state is RunState.RUNNING:
            if not state.spec.invocation.shares_stdio:  # otherwise, launchers show the output
                self._mention_silence(time.monotonic() - self._heard_at)
        elif isinstance(event, TimerDue) and event.timer in ENDS_LINKS:
            self._mark_gaps(state, range(len(state.nodes)))
        self._directory.record(at, type(event).__name__, fields_of(event))
        if state.phase is not Phase.DONE:  # the end is recorded once everything else is
            self._keep_status(state)

    def _mention_silence(self, quiet_s: float) -> None:
        """If the ranks that the user stops may have been hanging, explain how to see where, next time."""
        if quiet_s >= QUIET_S:
            silence = f"no rank has printed anything for {quiet_s / 60:.0f} min"
            advice = "if the job hangs again, run `distlaunch why` before you stop it: it shows where"
            self.remark(f"{silence}; {advice}")

    def _mark_gaps(self, state: State, nodes: Iterable[int]) -> None:
        """Append a note to the stderr log of each rank whose last output may have been lost with its node."""
        if (attempt := self._attempts.of(state.attempt)) is None:
            return
        for rank in [rank for node in nodes for rank in state.cut_off(node)]:
            goes_to, label = attempt.destinations[rank, STDERR], attempt.plan.node_of(rank).label
            if goes_to.file and (attempt.number, rank) not in self._cut_off:
                self._cut_off.add((attempt.number, rank))
                when = time.strftime("%Y-%m-%d %H:%M:%S")
                what = f"the connection to {label} was lost at {when}; any later output is missing"
                words = f"\ndistlaunch: {what}\n".encode()
                entry = Entry(time.time(), 0, len(words), rank, attempt.number, STDERR)
                self._directory.append(goes_to.file, words, entry)

    def _keep_status(self, state: State) -> None:
        status = status_now(self.status, state, time.time())
        if status != self.status:
            self.status = status
            self._directory.put(STATUS, status_bytes(status), "over")

    def started(self, state: State, at: float) -> None:
        """Record the plan."""
        assert state.plan is not None
        self._uses.clear()
        self._measured.clear()
        self._plan = state.plan
        self._heard_at = time.monotonic()
        self._sample_at = self._heard_at + FIRST_SAMPLE_S
        self._attempts.note(state)
        workers = running_workers(state)
        document = plan_document(state.plan, workers, chosen_interfaces(state))
        self._directory.append(file_of(state.attempt, "plan.json"), json_text(document, indent=1).encode())
        if state.spec.logs.torchrun:  # as with torchrun, even for a stream without output
            for each in destinations(state.plan, state.attempt).values():
                if each.file:
                    self._directory.append(each.file, b"")

    def message(self, message: ShowMessage, at: float) -> None:
        """Record the message."""
        self._directory.record(at, MESSAGE, {"level": message.level, "text": message.text})

    def remarked(self, text: str) -> None:
        """Record the message, marked as one that the supervisor didn't send."""
        self._directory.record(self._at, MESSAGE, {"level": "warning", "text": text, "remark": True})

    def printed(self, output: Printed) -> None:
        """Record the output, byte for byte."""
        rank, stream, data, attempt, goes_to = output
        self._heard_at = time.monotonic()
        if goes_to.file and (data := self._within_limit(goes_to.file, data)):
            entry = Entry(time.time(), 0, len(data), rank, attempt, stream)
            self._directory.append(goes_to.file, data, entry)
        if self._directory.lost and not self._loss_told:
            self._loss_told = True
            self.status = self.status._replace(trouble=self._directory.trouble)
            self._directory.put(STATUS, status_bytes(self.status), "over")
            trouble = self._directory.trouble
            self.remark(f"can't write to {self._directory.path}: {trouble}; output is being lost")

    def _within_limit(self, name: str, data: bytes) -> bytes:
        """Return as much of the `data` for a file as logs.limit allows."""
        if self._limit is None:
            return data
        left = self._limit - self._sizes[name]
        self._sizes[name] += len(data)
        if len(data) > left >= 0:
            self.remark(f"{name} has reached logs.limit: further output is not saved")
        return data[: max(0, left)]

    def woken(self) -> None:
        """Check for requests, and whether to record the nodes' resource use."""
        now = time.monotonic()
        self.wake_at = now + LOOK_S
        if now >= self._save_at:
            self._save_at = now + SAVE_S
            self._directory.put(STATUS, status_bytes(self.status), "over")
        requests = self._directory.read_on(REQUESTS)
        if STACKS_REQUEST in requests:
            self.wants_stacks = True
        if USE_REQUEST in requests:
            self._viewed_until = now + FADES_S
        if now >= self._sample_at + SAMPLING_S:
            self._record_sample()
            self._sample_at = now + max(SAMPLE_S, SAMPLE_SHARE * (time.time() - self.status.began))
        self.wants_use = now < self._viewed_until or now >= self._sample_at

    def _record_sample(self) -> None:
        """Append each node's resource use, as measured since the last sample, to USES."""
        nodes = {}
        for part in self._plan.nodes if self._plan else ():
            if uses := [self._uses[rank] for rank in part.ranks if rank in self._measured]:
                nodes[part.label] = of_node(uses)
        if nodes:
            line = json.dumps({"time": round(time.time(), 1), "nodes": nodes})
            self._directory.append(USES, line.encode() + b"\n")
            self._write_uses()
        self._measured.clear()

    def used(self, uses: Mapping[int, Use], at: float) -> None:
        """Keep the latest values of all ranks, and write them for viewers."""
        self._uses.update(uses)
        self._measured.update(uses)
        if time.monotonic() < self._viewed_until:
            self._write_uses()

    def _write_uses(self) -> None:
        """Replace USE, which `uses_in` reads. Each rank has a row: its number and the fields of `Use`."""
        ranks = sorted((rank, *use) for rank, use in self._uses.items())
        self._directory.put(USE, json.dumps({"time": time.time(), "ranks": ranks}).encode(), "whole")

    def dumped(self, rank: int, data: bytes, attempt: int) -> None:
        """Record the dump."""
        self._flights.add(attempt)
        self._directory.append(file_of(attempt, f"rank{rank}.flight"), data)

    def captured(self, part: NodePlan, taken: Mapping[str, Any], attempt: int) -> None:
        """Record the evidence."""
        line = {**taken, "time": round(time.time(), 3), "node": part.label, "first_rank": part.first_rank}
        self._directory.append(file_of(attempt, EVIDENCE), json.dumps(line).encode() + b"\n")

    def lagging(self, state: State) -> list[str]:
        """Describe the collectives that hang, and the ranks that never reached them, from flight recorders.

        The controller adds the lines to the summary before `ended`.
        """
        if state.attempt not in self._flights:
            return []
        self._directory.flush()
        dumps = flight_dumps(self._directory.path, state.attempt, len(state.workers))
        finished = {worker.rank for worker in state.workers if worker.succeeded}
        return waiting_lines(dumps, len(state.workers), finished)

    def ended(self, summary: Summary) -> None:
        """Record how the run ended. Other observers may still send messages."""
        self._temporary = summary.temporary
        self._directory.put(SUMMARY, json_text(summary.document(), indent=1).encode(), "whole")
        self._keep_error(summary.state)
        self._keep_status(summary.state)
        if not self._directory.flush():
            self._close_files()  # don't wait twice for a stalled disk
        elif os.path.exists(self._directory.path):
            if gone := self._directory.removed():
                names = listed(gone)
                self.remark(f"files removed from {self._directory.path} during the run are lost: {names}")
        elif not summary.temporary:
            what = "if it was removed, its logs are lost"
            self.remark(f"{self._directory.path} was removed or renamed during the run; {what}")
        if self._directory.lost:
            self.remark(self._loss_words())
        if self._limit and (over := sum(max(0, size - self._limit) for size in self._sizes.values())):
            self.remark(f"{over} bytes of output beyond logs.limit were not kept")

    def _loss_words(self) -> str:
        log = self._directory
        ranks = sorted((rank, size) for rank, size in log.lost.items() if rank is not None)
        of_ranks = listed([f"{size} of rank {rank}" for rank, size in ranks]) or "no output"
        return f"{log.lost_bytes} bytes could not be written to {log.path}: {log.trouble} ({of_ranks})"

    def _keep_error(self, state: State) -> None:
        """Write the error record of the first failure to this process's own error file, as torchrun does."""
        path, failed = os.environ.get("TORCHELASTIC_ERROR_FILE"), state.cause and state.cause.rank
        end = next((worker.phase for worker in state.workers if worker.rank == failed), None)
        if path and isinstance(end, Exited) and end.error_record:
            record = _as_torch(end.error_record)
            record["message"]["errorCode"] = end.status
            try:
                with open(path, "w", encoding="utf-8") as file:
                    json.dump(record, file)
            except OSError as error:
                self.remark(f"can't write to TORCHELASTIC_ERROR_FILE={path}: {reason(error)}")

    def close(self) -> None:
        """Close the run directory; delete it if it was temporary.

        Called by the controller after all observers have ended.
        """
        self._close_files()
        if self._temporary:
            self._directory.remove()

    def _close_files(self) -> None:
        if self._open:
            self._open = False
            self._directory.close()


def request(directory: str, what: bytes) -> None:
    """Send a request to the controller of an active run. Raises OSError, for example without write access."""
    path = os.path.join(directory, REQUESTS)
    with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW), "wb", buffering=0) as file:
        file.write(what)


def _keeps_output(state: State, node: int) -> bool:
    """Return whether a node's logs are saved by this process, in torchrun's layout."""
    part = state.plan.part_of(node) if state.plan else None
    return state.spec.logs.torchrun is not None and part is not None and part.logs is None


def _as_torch(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return an error record in the format of torch's @record, whose reader needs whole seconds."""
    stamp = record.get("timestamp", "")
    stamp = stamp if stamp.isdecimal() else str(int(time.time()))
    extra = {"py_callstack": record.get("callstack", ""), "timestamp": stamp}
    return {"message": {"message": record.get("message", ""), "extraInfo": extra}}


def _unpickled(data: bytes) -> Any:
    """Return the plain data in a pickle. Raises any exception if it is malformed or contains other types."""
    import pickle  # 1 ms, and rarely needed

    class PlainData(pickle.Unpickler):
        """An unpickler of plain containers, strings and numbers, since a node's pickle could run code."""

        def find_class(self, module: str, name: str) -> Any:
            raise pickle.UnpicklingError(f"{module}.{name}")

    return PlainData(io.BytesIO(data)).load()


def of_node(uses: Sequence[Use]) -> Use:
    """Return the resource use of a node: the sums over its ranks, and the mean of GPU percentages."""
    gpus = [use.gpu for use in uses if use.gpu is not None]
    sizes = [use.gpu_memory for use in uses if use.gpu_memory is not None]
    return Use(
        round(sum(use.cpu for use in uses), 1),
        sum(use.memory for use in uses),
        round(sum(gpus) / len(gpus)) if gpus else None,
        sum(sizes) if sizes else None,
    )


def flight_dumps(directory: str, attempt: int, world_size: int) -> Iterator[tuple[int, Any]]:
    """Yield ranks with their flight recorder dumps. Missing, large or malformed ones are skipped.

    Only one of them is in memory at a time.
    """
    for rank in range(world_size):
        # According to its documentation, pickle may raise any exception for malformed bytes.
        dump = None
        with contextlib.suppress(Exception):
            with open(fd_of(directory, file_of(attempt, f"rank{rank}.flight")), "rb") as file:
                data = file.read(MAX_DUMP + 1)
            dump = _unpickled(data) if len(data) <= MAX_DUMP else None
        if dump is not None:
            yield rank, dump


class LastOutput(Observer):
    """The last output of each rank in the last attempt. `Observer` describes when each method is called."""

    def __init__(self) -> None:
        self._attempt = 0
        self._ends: dict[int, dict[int, bytes]] = {STDOUT: {}, STDERR: {}}
        self._lines: dict[int, int] = {}
        """Lines that each rank has printed to stderr."""

    def started(self, state: State, at: float) -> None:
        """Forget the output of the previous attempt."""
        self._attempt = state.attempt
        self._ends = {STDOUT: {}, STDERR: {}}
        self._lines.clear()

    def happened(self, event: Event, state: State, at: float) -> None:
        """Get the last output from the agent's report if the rank's output stays on its node.

        Also get an error from there that the rank printed to stdout.
        """
        if not (isinstance(event, WorkerExited) and event.words):
            return
        rank = state.rank_of(event.node, event.local_rank)
        if rank is None:
            return
        stderr = self._ends[STDERR].get(rank, b"")
        here = rank in self._ends[STDOUT] or stderr
        words = event.words.encode()
        is_error = TRACEBACK in event.words or "terminate called" in event.words
        if not here or (is_error and words[-100:] not in stderr):
            self._ends[STDERR][rank] = words

    def printed(self, output: Printed) -> None:
        """Keep the end of the output."""
        rank, stream, data, attempt, _ = output
        if attempt < self._attempt:
            return
        ends, most = self._ends[stream], STDERR_BYTES if stream else STDOUT_BYTES
        ends[rank] = (ends.get(rank, b"") + data[-most:])[-most:]
        if stream:
            self._lines[rank] = self._lines.get(rank, 0) + data.count(b"\n")

    def summary(self, state: State, directory: str, seconds: float) -> Summary:
        """Return the summary of a run after `seconds`; `directory` is the run directory."""
        lines, words = (
            {rank: data.decode(errors="replace") for rank, data in self._ends[stream].items()}
            for stream in (STDOUT, STDERR)
        )
        return Summary(state, directory, words, seconds, printed=self._lines, last_lines=lines)
