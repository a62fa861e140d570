"""What is kept of a run, in its folder: how it began, every event, all output, how it ended."""

import json
import time
from collections.abc import Mapping
from typing import Any

from distlaunch.job.spec import JobSpec
from distlaunch.observers.observer import Observer, Printed
from distlaunch.observers.output_index import Stamp
from distlaunch.observers.run_folder import RunFolder
from distlaunch.plan.document import plan_document
from distlaunch.plan.output import destinations
from distlaunch.supervisor.actions import Notice
from distlaunch.supervisor.codec import running_workers
from distlaunch.supervisor.events import Event, StackDumped, WorkerExited
from distlaunch.supervisor.history import BEGAN, NOTICE, beginning, fields_of
from distlaunch.supervisor.state import Phase, State
from distlaunch.supervisor.status import Status, status_now
from distlaunch.supervisor.summary import Summary


class Folder(Observer):
    """Writes all of a run into its folder."""

    def __init__(self, folder: RunFolder, status: Status) -> None:
        self._folder, self._status = folder, status
        self._flights: set[int] = set()
        self._loss_told = False
        self._at = 0.0
        self._told: object = None
        self._open, self._temporary = True, False

    def began(self, spec: JobSpec, chance: float, at: float) -> None:
        """Write down what the run was asked to be."""
        self._folder.record(at, BEGAN, beginning(spec, chance))

    def happened(self, event: Event, state: State, at: float) -> None:
        """Write it down, and what people look for in a file of its own there."""
        self._at = at
        if isinstance(event, StackDumped):
            rank = state.rank_of(event.node, event.local_rank)
            if rank is not None:
                self._folder.write_stack(rank, event.text, state.generation)
        elif isinstance(event, WorkerExited) and event.error_record and _keeps_output(state, event.node):
            name = f"attempt_{state.generation}/{event.local_rank}/error.json"
            self._folder.append(name, json.dumps(_as_torch(event.error_record)).encode())
        self._folder.record(at, type(event).__name__, fields_of(event))
        if state.phase is not Phase.DONE:  # its end is kept when all of it is
            self._keep_status(state)

    def _keep_status(self, state: State) -> None:
        told = (state.phase, state.plan, state.cause, state.restarts)
        if told == self._told:
            return  # nothing that a status says is another; of thousands of ranks most events are such
        self._told = told
        status = status_now(self._status, state, time.time())
        if status != self._status:
            self._status = status
            self._folder.write_status(status)

    def started(self, state: State, at: float) -> None:
        """Keep the plan."""
        assert state.plan is not None
        document = plan_document(state.plan, running_workers(state, self._folder.run_id))
        self._folder.write_plan(document, state.generation)
        if state.spec.logs.torchrun:  # as torchrun has it, also for a stream that says nothing
            for each in destinations(state.plan, state.generation).values():
                self._append(each.file, b"")

    def told(self, notice: Notice, at: float) -> None:
        """Write it down."""
        self._folder.record(at, NOTICE, {"level": notice.level, "text": notice.text})

    def remarked(self, text: str) -> None:
        """Write it down as what it is to who reads it; the supervisor has not said it."""
        self._folder.record(self._at, NOTICE, {"level": "warning", "text": text, "remark": True})

    def printed(self, output: Printed) -> None:
        """Keep it, byte for byte."""
        rank, stream, data, generation, goes_to = output
        self._append(goes_to.file, data, Stamp(time.time(), rank, generation, stream))
        if self._folder.lost_bytes and not self._loss_told:
            self._loss_told = True
            self.remark(f"can't write to {self._folder.path}: output is being lost")

    def _append(self, file: str | None, data: bytes, stamp: Stamp | None = None) -> None:
        if file:
            self._folder.append(file, data, stamp)

    def dumped(self, rank: int, data: bytes, generation: int) -> None:
        """Keep it."""
        self._flights.add(generation)
        self._folder.append_flight(rank, data, generation)

    def lagging(self, state: State) -> list[str]:
        """Which ranks never reached the last collective, if flight recorders tell."""
        if state.generation not in self._flights:
            return []
        from pathlib import Path  # few jobs end so

        from distlaunch.observers.flight_records import lagging_words

        self._folder.flush()
        return lagging_words(Path(self._folder.generation_path(state.generation)), len(state.workers))

    def ended(self, summary: Summary) -> None:
        """Keep how it ended; others may still remark something."""
        self._temporary = summary.temporary
        self._folder.write_summary(summary.document())
        self._keep_status(summary.state)
        if not self._folder.flush():
            self._close_files()  # a disk that takes nothing is not waited for twice
        if self._folder.lost_bytes:
            self.remark(f"{self._folder.lost_bytes} bytes could not be written to {self._folder.path}")

    def close(self) -> None:
        """Let go of the run, and keep nothing where the folder was a temporary one."""
        self._close_files()
        if self._temporary:
            self._folder.remove()

    def _close_files(self) -> None:
        if self._open:
            self._open = False
            self._folder.close()


def _keeps_output(state: State, node: int) -> bool:
    """Whether a node's logs are here, as torchrun has them."""
    part = state.plan.part_of(node) if state.plan else None
    return state.spec.logs.torchrun is not None and part is not None and part.logs is None


def _as_torch(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """An error record in the form that torch's @record writes."""
    extra = {"py_callstack": record.get("callstack", "")}
    return {"message": {"message": record.get("message", ""), "extraInfo": extra}}
