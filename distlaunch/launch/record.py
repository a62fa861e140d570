"""What is kept and shown of a run: its events, its output, the last words of each rank."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distlaunch.job.spec import JobSpec
from distlaunch.launch.commands import running_workers
from distlaunch.launch.summary import Above, Summary
from distlaunch.plan.document import plan_document
from distlaunch.plan.layout import LaunchPlan
from distlaunch.plan.output import Route, routes
from distlaunch.replay.history import BEGAN, NOTICE, beginning, fields_of
from distlaunch.rim.console import Console
from distlaunch.rim.run_folder import RunFolder
from distlaunch.state.actions import Notice
from distlaunch.state.events import Event, StackDumped, WorkerExited, WorkerStarted, WorkerUnstarted
from distlaunch.state.job import State

LAST_WORDS = 16384
"""Bytes of a rank's stderr that are kept for the summary."""
LAST_LINES = 2048
"""Bytes of its stdout."""
FIRST_SIGNS_OF_WORKERS = (WorkerStarted, WorkerUnstarted, WorkerExited)
_COLOURS = {"info": None, "warning": 33, "error": 31}


class Record:
    """Sends what happens to the run folder and the console."""

    def __init__(self, folder: RunFolder, console: Console, quiet: bool = False) -> None:
        self._folder, self._console, self._quiet = folder, console, quiet
        self._planned = -1
        self._members: tuple[int, ...] = ()
        self._warned = False
        self._flights: set[int] = set()
        self._routes: dict[int, dict[tuple[int, int], Route]] = {}
        self.last_words: dict[int, bytes] = {}
        self.last_lines: dict[int, bytes] = {}
        """The end of each rank's stdout, for those that say nothing on stderr."""
        self.printed: dict[int, int] = {}
        """Lines on each rank's stderr."""

    def begin(self, spec: JobSpec, chance: float, now: float) -> None:
        """Write down what the run was asked to be."""
        self._folder.record(now, BEGAN, beginning(spec, chance))

    def event(self, event: Event, state: State, now: float) -> None:
        """Write an event down, and the plan once there is one."""
        fresh = state.generation > self._planned
        if not state.spec.engine.gives_ranks and state.plan and len(state.members) > len(self._members):
            self._members = state.members
            self._routes[state.generation] = routes(state.plan, state.generation)
        if state.plan and isinstance(event, FIRST_SIGNS_OF_WORKERS) and fresh:
            # Not before the workers are on their way: they need no plan.
            self._begin_generation(state, state.plan)
        self._keep_file(event, state)
        self._folder.record(now, type(event).__name__, fields_of(event))

    def _begin_generation(self, state: State, plan: LaunchPlan) -> None:
        self._planned = state.generation
        self.last_words.clear()
        self.last_lines.clear()
        self.printed.clear()
        streams = self._routes[state.generation] = routes(plan, state.generation)
        document = plan_document(plan, running_workers(state, self._folder.run_id))
        self._folder.write_plan(document, state.generation)
        for route in streams.values() if state.spec.logs.torchrun else ():
            if route.file:
                self._folder.append(route.file, b"")  # as torchrun: also for a stream that says nothing

    def _keep_file(self, event: Event, state: State) -> None:
        """What an event brings that people look for in a file of its own."""
        if isinstance(event, StackDumped):
            rank = state.rank_of(event.node, event.local_rank)
            if rank is not None:
                self._folder.write_stack(rank, event.text, state.generation)
        elif isinstance(event, WorkerExited) and event.error_record and state.spec.logs.torchrun:
            name = f"attempt_{state.generation}/{event.local_rank}/error.json"
            self._folder.append(name, json.dumps(_as_torch(event.error_record)).encode())

    def has_begun(self, generation: int) -> bool:
        """Whether workers of this generation are or were on their way."""
        return generation in self._routes

    def output(self, rank: int, stream: int, data: bytes, generation: int) -> None:
        """Keep and show what a rank printed."""
        if generation >= self._planned:
            self._note(rank, stream, data)
        route = self._routes[generation][rank, stream]
        if route.file:
            self._folder.append(route.file, data)
        if self._folder.lost_bytes and not self._warned:
            self._warned = True
            self._console.say(f"distlaunch: can't write to {self._folder.path}: output is being lost", 33)
        if route.shown:
            self._console.output(rank, stream, data, route.prefix)

    def _note(self, rank: int, stream: int, data: bytes) -> None:
        if stream == 1:
            self.last_words[rank] = (self.last_words.get(rank, b"") + data)[-LAST_WORDS:]
            self.printed[rank] = self.printed.get(rank, 0) + data.count(b"\n")
        else:
            self.last_lines[rank] = (self.last_lines.get(rank, b"") + data[-LAST_LINES:])[-LAST_LINES:]

    def flight(self, rank: int, data: bytes, generation: int) -> None:
        """Keep what a rank's flight recorder dumped."""
        self._flights.add(generation)
        self._folder.append_flight(rank, data, generation)

    def lagging(self, state: State) -> list[str]:
        """Who never came to the last collective, where flight recorders tell it."""
        if state.generation not in self._flights:
            return []
        from distlaunch.launch.flight import lagging_words  # few jobs end so

        self._folder.flush()
        return lagging_words(Path(self._folder.generation_path(state.generation)), len(state.workers))

    def notice(self, notice: Notice, now: float) -> None:
        """Tell the user."""
        self._folder.record(now, NOTICE, {"level": notice.level, "text": notice.text})
        if notice.level != "info" or not self._quiet:
            for line in notice.text.splitlines():
                self._console.say(f"distlaunch: {line}", _COLOURS[notice.level])

    def finish(self) -> None:
        """Show the last lines that lack their end."""
        self._console.finish_lines()

    def above(self, state: State) -> dict[int, Above]:
        """By stream, what the terminal has shown already of the rank to blame, if it marks its lines."""
        rank = state.cause.rank if state.cause else None
        if rank is None:
            return {}
        found = {}
        for stream, said in enumerate((self.last_lines, self.last_words)):
            route = self._routes.get(state.generation, {}).get((rank, stream))
            if route and route.shown and route.prefix:
                since = self._console.lines_since(rank, stream, _length(said.get(rank, b"")))
                found.update({} if since is None else {stream: Above(since, route.prefix.strip())})
        return found

    def summarise(self, summary: Summary) -> None:
        """Tell how it ended, and keep it."""
        self._folder.write_summary(summary.document())
        self._folder.close()
        if self._folder.lost_bytes:
            self._console.say(
                f"distlaunch: {self._folder.lost_bytes} bytes could not be written to {self._folder.path}", 33
            )
        if summary.temporary:
            self._folder.remove()
        failed = summary.state.cause is not None
        if failed or not self._quiet:
            first, *others = (f"distlaunch: {line}" for line in summary.lines())
            told = first == self._console.last_said  # the cause may be right above
            for line in others if told else (first, *others):
                self._console.say(line)


def _length(words: bytes) -> int:
    """Lines of the last traceback in `words`, with what follows it; 1 without one."""
    _, found, last = words.rpartition(b"Traceback (most recent call last):")
    return 1 + last.rstrip(b"\n").count(b"\n") if found else 1


def _as_torch(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """An error record in the form that torch's @record writes."""
    extra = {"py_callstack": record.get("callstack", "")}
    return {"message": {"message": record.get("message", ""), "extraInfo": extra}}
