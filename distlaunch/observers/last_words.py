"""Keeps the end of what each rank has printed, for the summary."""

from collections.abc import Mapping

from distlaunch.observers.observer import Observer, Printed
from distlaunch.supervisor.events import Event, WorkerExited
from distlaunch.supervisor.state import State
from distlaunch.supervisor.summary import STDERR, STDOUT, Summary

STDERR_BYTES = 16384
STDOUT_BYTES = 2048


class LastWords(Observer):
    """Of the ranks of the last generation."""

    def __init__(self) -> None:
        self._generation = 0
        self._ends: dict[tuple[int, int], bytes] = {}
        self.lines: dict[int, int] = {}
        """Of each rank's stderr, so far."""

    def started(self, state: State, at: float) -> None:
        """What an earlier generation has said does not count any more."""
        self._generation = state.generation
        self._ends.clear()
        self.lines.clear()

    def happened(self, event: Event, state: State, at: float) -> None:
        """Of a rank whose output stays on its node, its agent tells the end."""
        if isinstance(event, WorkerExited) and event.words:
            rank = state.rank_of(event.node, event.local_rank)
            if rank is not None:
                self._ends.setdefault((rank, STDERR), event.words.encode())

    def printed(self, output: Printed) -> None:
        """Keep the end of it."""
        rank, stream, data, generation, _ = output
        if generation < self._generation:
            return
        most = STDERR_BYTES if stream else STDOUT_BYTES
        self._ends[rank, stream] = (self._ends.get((rank, stream), b"") + data[-most:])[-most:]
        if stream:
            self.lines[rank] = self.lines.get(rank, 0) + data.count(b"\n")

    def of(self, stream: int) -> Mapping[int, str]:
        """The end of each rank's stdout (0) or stderr (1)."""
        ends = {rank: data for (rank, of), data in self._ends.items() if of == stream}
        return {rank: data.decode(errors="replace") for rank, data in ends.items()}


def summary_so_far(state: State, folder: str, words: LastWords, seconds: float) -> Summary:
    """The summary of a run after so many seconds; `folder` is the run's."""
    return Summary(
        state,
        folder,
        last_words=words.of(STDERR),
        seconds=seconds,
        printed=words.lines,
        last_lines=words.of(STDOUT),
    )
