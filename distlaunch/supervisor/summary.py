"""The summary of a run: its root cause with the last output, how the other ranks ended, and the logs."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from distlaunch.agent.frozen import Frozen
from distlaunch.diagnosis import exits
from distlaunch.supervisor.nodes import Exited, Lost, RankState, Unusable, WorkerPhase, failure_of, phase_word
from distlaunch.supervisor.root_cause import STOPPED
from distlaunch.supervisor.state import Cause, State
from distlaunch.transports.container import advice_for
from distlaunch.wording import counted, lost_peer_words, rank_list, status_words

MAX_LINES, HEAD_LINES = 24, 7
"""Maximum lines of last output shown, and how many of these are the first lines of a longer traceback."""
STDOUT_LINES = 5
"""Maximum lines of stdout shown for a rank that printed nothing to stderr."""
LEFT_OUT = r"\(\d+ (?:earlier )?lines? not shown\)"
"""A line in place of output that isn't shown."""
RECORD, STDERR, STDOUT = 2, 1, 0
"""Sources of the last output of a rank."""
OWN_NETWORK = (
    "several nodes were lost: if that happened at the same time, the network of the host that controls the "
    "run has failed, not theirs"
)
FAR = 100
"""Lines after which output on the terminal counts as scrolled away."""


class Above(Frozen):
    """A rank's output that the terminal already shows, marked with `mark`.

    `since` counts the lines printed after that output.
    """

    since: int
    mark: str


NOWHERE: Mapping[int, Above] = MappingProxyType({})


class Summary(Frozen):
    """The facts known at the end of a run.

    `last_output` is the end of each rank's stderr, which had `printed` lines. `last_lines` is the end of each
    rank's stdout. `lagging` contains lines about ranks that missed a collective. `collected` lists files from
    the nodes as JSON objects, and `collecting` contains lines about these files.
    """

    state: State
    directory: str
    last_output: Mapping[int, str]
    seconds: float
    lagging: Sequence[str] = ()
    printed: Mapping[int, int] = MappingProxyType({})
    last_lines: Mapping[int, str] = MappingProxyType({})
    collected: Sequence[Mapping[str, Any]] = ()
    collecting: Sequence[str] = ()

    @property
    def temporary(self) -> bool:
        """Return whether the run directory is no longer needed."""
        return self.state.spec.logs.temporary and self.state.cause is None

    def lines(self, above: Mapping[int, Above] = NOWHERE) -> list[str]:
        """Return the summary as lines for the user.

        `above` is the failed rank's output that is already on the screen, keyed by stream.
        """
        cause = self.state.cause
        if cause is None:
            what = self.state.plan.size_words if self.state.plan else "nothing"
            after = f" after {counted(self.state.attempt, 'restart')}" if self.state.attempt else ""
            finished = f"{what} finished in {self.seconds:.1f} s{after}; logs: {self.directory}"
            return [finished, *self._apart(), *self._gaps(), *self.collecting]
        lines = [*self.node_lines(), *self._cause_lines(cause, above), *self.others()]
        return [
            *lines,
            *self._gaps(),
            *self.collecting,
            f"ended after {self.seconds:.1f} s with exit status {cause.exit_status}; logs: {self.directory}",
            *(f"logs on {label}: {directory}" for label, directory in self._logs_elsewhere()),
        ]

    def warnings(self) -> list[str]:
        """Return the lines about a run that succeeded for a user who wants to see only warnings."""
        left_out = [line for line in self.collecting if line.startswith("not ")]
        return [*self._gaps(), *left_out]

    def _apart(self) -> list[str]:
        """Warn that the ranks of a Python script didn't train together. It may be for a single GPU."""
        spec, workers = self.state.spec, self.state.workers
        watched = self.state.plan is not None and self.state.plan.join_s is not None
        if not watched or len(workers) < 2 or workers.counts.joined or spec.program.kind == "command":
            return []
        # Ranks may also have joined only between two looks at their connections.
        copies = f"{len(workers)} independent copies of the {spec.program.kind} may have run"
        advice = "to train together, it must call torch.distributed.init_process_group"
        unless = "; otherwise, set rendezvous: none" if spec.places else ""
        return [f"no rank was seen to join the rendezvous, so {copies}; {advice}{unless}"]

    def node_lines(self) -> list[str]:
        """Return why nodes can't be used, with advice and the last output of the transport."""
        lines, spec = [], self.state.spec
        for index, node in enumerate(self.state.nodes):
            if isinstance(node, Unusable) and (failure := failure_of(node)):
                there = spec.pool[index]
                python = spec.program_of(there).python
                inside = advice_for(failure, spec.container, python) if spec.container else ""
                what = inside or there.reach.advice(failure, python)
                lines.append(f"{self.state.label(index)}: {failure.kind.value}; {what}")
                lines += [f"  | {line}" for line in failure.words.splitlines()[-MAX_LINES:]]
        return lines

    def _gaps(self) -> list[str]:
        """List the ranks whose last output was lost with their nodes."""
        ranks = [rank for index in self.state.members for rank in self.state.cut_off(index)]
        if not ranks:
            return []
        cause, allocation = self.state.cause, self.state.spec.allocation
        one = len({self._node_of(rank) for rank in ranks}) == 1
        are = "are" if all(self.state.workers[rank].pid for rank in ranks) else "may be"
        how = f"{are} incomplete: {'the node was' if one else 'the nodes were'} lost"
        if not any(map(failure_of, self.state.nodes)):
            how = f"may be incomplete: distlaunch gave up on the {'node' if one else 'nodes'}"
        if cause and cause.scheduled and allocation:
            how = f"may be incomplete: {allocation.title} ended the ranks"
        return [f"logs of {rank_list(ranks, self.state.unit)} {how} before all output had arrived"]

    def _node_of(self, rank: int) -> str:
        return self.state.planned.node_of(rank).label

    def _logs_elsewhere(self) -> list[tuple[str, str]]:
        """Return pairs of node and directory for the nodes whose own launchers keep the output."""
        nodes = self.state.plan.nodes if self.state.plan else ()
        return [(part.label, part.logs) for part in nodes if part.logs]

    def document(self) -> dict[str, Any]:
        """Return the summary as a JSON object."""
        cause = self.state.cause
        return {
            "exit_status": self.state.outcome,
            "cause": cause and self.cause_document(cause),
            "hint": self.advice or None,
            "lagging": list(self.lagging),
            "restarts": [
                {
                    "why": each.why.value,
                    "cause": each.cause.text,
                    "rank": self._place(each.cause)["rank"],
                    "kind": each.cause.kind,
                }
                for each in self.state.restarts
            ],
            "seconds": round(self.seconds, 3),
            "world_size": self.state.plan.world_size if self.state.plan else 0,
            "code": self.state.spec.tree and self.state.spec.tree.document(),
            "collected": list(self.collected),
            "collecting": list(self.collecting),
            "workers": [self._worker(worker) for worker in self.state.workers],
            "nodes": [_node_document(self.state, index) for index in range(len(self.state.nodes))],
            "directory": self.directory,
            "remote_directories": dict(self._logs_elsewhere()),
        }

    def cause_document(self, cause: Cause) -> dict[str, Any]:
        """Return the root cause of the end, or of a restart, as a JSON object."""
        known = cause.rank in {worker.rank for worker in self.state.workers}
        return {
            "text": cause.text,
            "kind": cause.kind,
            "certainty": "unknown" if cause.peer_gone else "likely" if cause.inferred else "fact",
            **self._place(cause),
            "last_output": self._shown_words(cause.rank)[0] if cause.rank is not None and known else [],
        }

    def _place(self, cause: Cause) -> dict[str, Any]:
        """Return the rank and the node of a root cause. If mpirun failed, its ranks may be on any node."""
        unit, node = self.state.unit, cause.node
        unknown = node is None or (cause.rank is not None and unit == "mpirun")
        label = None if unknown else self.state.label(node or 0)
        return {"rank": cause.rank if unit == "rank" else None, "node": label}

    def _worker(self, worker: RankState) -> dict[str, Any]:
        return {
            "rank": worker.rank,
            "node": self._node_of(worker.rank),
            "phase": worker.phase_word,
            "status": worker.status,
            "stopped": worker.stopped,
            "pid": worker.pid,
            "cpus": worker.cpus,
        }

    def _cause_lines(self, cause: Cause, above: Mapping[int, Above]) -> list[str]:
        hints = [f"hint: {hint}"] if (hint := self.advice) else []
        if cause.rank is None:
            return [*cause.text.splitlines(), *self.lagging, *(hints if cause.kind == "node_lost" else [])]
        return [cause.text, *self._words_lines(cause.rank, above), *self.lagging, *hints]

    def _words_lines(self, rank: int, shown: Mapping[int, Above]) -> list[str]:
        """Return the last output of a rank, or where to find it if the terminal already shows it."""
        words, source = self._shown_words(rank)
        above = shown.get(STDERR if source == RECORD else source)
        if not words or above is None or above.since > FAR or not self._as_printed(rank, source):
            return [f"  | {line}" for line in words]
        what = "its traceback is" if exits.TRACEBACK in self._stderr_end(rank) else "its last output is"
        return [f"  {what} above, marked {above.mark}"] if above.since else []

    def _as_printed(self, rank: int, source: int) -> bool:
        """Return whether a rank's output contains, unchanged, the text that the summary would show."""
        recorded = "\n".join(self._recorded_lines(self.state.workers[rank]))
        words = self.last_output.get(rank, "")
        return recorded in words if source == RECORD else self._stderr_end(rank) == words

    def _shown_words(self, rank: int) -> tuple[list[str], int]:
        """Return the last output of a rank: its torch error record, else the end of its stderr or stdout.

        The second item is its source.
        """
        if recorded := self._recorded_lines(self.state.workers[rank]):
            return _end_of(recorded, len(recorded)), RECORD
        words = self._stderr_end(rank)
        if lines := exits.without_remarks(words).splitlines():
            remarks = len(words.splitlines()) - len(lines)
            return _end_of(lines, max(len(lines), self.printed.get(rank, 0) - remarks)), STDERR
        return self.last_lines.get(rank, "").splitlines()[-STDOUT_LINES:], STDOUT

    def error_of(self, rank: int) -> str:
        """Return everything known of a rank's last output: its torch error record, else its stderr."""
        return "\n".join(self._recorded_lines(self.state.workers[rank])) or self._stderr_end(rank)

    def _recorded_lines(self, worker: RankState) -> list[str]:
        words, report = _record_text(worker).splitlines(), self._split(worker.rank)[1]
        return [*words, report] if words and report not in ("", words[-1]) else words

    def _stderr_end(self, rank: int) -> str:
        """Return the end of the stderr of a rank, with another launcher's report reduced to one line."""
        words, report = self._split(rank)
        return f"{words}{report}\n" if report else words

    def _split(self, rank: int) -> tuple[str, str]:
        """Return the end of a rank's stderr without another launcher's report, and that report or ""."""
        return exits.split_launcher(self.last_output.get(rank, ""))

    @property
    def advice(self) -> str:
        """Return advice about the first failed rank or a stall, or ""."""
        cause, reasons = self.state.cause, self.state.stackless
        if cause and cause.kind == "stall" and not any(w.stack or w.stopped_pid for w in self.state.workers):
            lacks = not reasons or any("py-spy is not installed" in why for why in reasons)
            hint = "install py-spy on the nodes (pip install py-spy): it shows where each rank is waiting"
            return hint if lacks else ""
        if cause and cause.kind == "node_lost" and cause.node is not None:
            lost = [i for i in self.state.members if isinstance(self.state.nodes[i], Lost)]
            # The controller's own node, if it is one of them, stays.
            return OWN_NETWORK if 2 <= len(lost) >= len(self.state.members) - 1 else ""
        if cause is None or cause.rank is None or not cause.exit:
            return ""
        worker = self.state.workers[cause.rank]
        if not isinstance(worker.phase, Exited):
            return ""
        if cause.peer_gone and self.lagging:
            return exits.PARTED
        output = exits.without_remarks(self._stderr_end(cause.rank))
        words = _record_text(worker) + output
        part = self.state.planned.node_of(cause.rank)
        program = part.program
        python = "" if program.kind == "command" else part.python
        module = program.words[0] if program.kind == "module" else ""
        ending = exits.Ending(
            *(worker.phase.status, worker.phase.oom_kills, worker.phase.shm, cause.peer_gone, python, module),
            stdin=bool(self.state.spec.shared),
            networked=not self.state.spec.one_machine,
        )
        return exits.advice(ending, words)

    def others(self) -> list[str]:
        """Return how ranks other than the root cause ended, in one line for each kind of end."""
        return [f"{rank_list(ranks, self.state.unit)}: {fate}" for fate, ranks in self.ends().items()]

    def ends(self) -> dict[str, list[int]]:
        """Return the ranks other than the root cause, keyed by how they ended."""
        groups: dict[str, list[int]] = {}
        for worker in self.state.workers:
            if self.state.cause is None or worker.rank != self.state.cause.rank:
                groups.setdefault(self._end_words(worker), []).append(worker.rank)
        if len(ranks := groups.get(WorkerPhase.VANISHED.value, [])) > 1:
            nodes = "node" if len({*map(self._node_of, ranks)}) == 1 else "nodes"
            groups[f"lost with their {nodes}"] = groups.pop(WorkerPhase.VANISHED.value)
        return groups

    def _end_words(self, worker: RankState) -> str:
        """Return how a rank other than the root cause ended. Ranks with the same words share a line."""
        end = worker.phase
        if not isinstance(end, Exited):
            return "not started" if end is WorkerPhase.PLANNED else worker.phase_word
        if end.status == 0:
            return "stopped by distlaunch, exit status 0" if end.stopped else "finished"
        was_going = end.stopped and end.status < 0  # whatever errors it had printed
        if not was_going and self._same_traceback(worker.rank):
            return "also failed, with the same traceback"
        lost_peer = lost_peer_words(end.peer_gone, end.timed_out)
        if lost_peer and not was_going:
            return f"also failed, {lost_peer}"
        return self._own_end(worker.rank, end)

    def _own_end(self, rank: int, end: Exited) -> str:
        last, cause, allocation = self._last_line(rank), self.state.cause, self.state.spec.allocation
        if cause and cause.scheduled and allocation and end.status in STOPPED:
            return f"stopped by {allocation.title}"
        if end.stopped and not (cause and self._failed_like(cause.rank, end.status, last)):
            its_own = end.status > 0  # it may have exited on its own
            return "stopped by distlaunch" + (f" ({status_words(end.status)})" if its_own else "")
        return f"also failed, {status_words(end.status)}" + (f": {last[:200]}" if last else "")

    def _failed_like(self, rank: int | None, status: int, last: str) -> bool:
        """Return whether the first failed rank had this status, which must be above 0, and this last line."""
        same = rank is not None and self.state.workers[rank].status == status > 0
        return same and self._last_line(rank or 0) == last

    def _last_line(self, rank: int) -> str:
        return (exits.without_remarks(self._stderr_end(rank)).strip().splitlines() or [""])[-1]

    def _same_traceback(self, rank: int) -> bool:
        cause = self.state.cause
        if cause is None or cause.rank is None:
            return False
        mine, first = (exits.traceback_key(self._split(r)[0]) for r in (rank, cause.rank))
        return bool(mine) and mine == first


def unstarted(why: str, exit_status: int) -> dict[str, Any]:
    """Return the JSON document of a run that could not begin."""
    nothing = dict.fromkeys(("kind", "rank", "node"))
    cause: dict[str, Any] = {**nothing, "text": why, "certainty": "fact", "last_output": []}
    known = {"exit_status": exit_status, "cause": cause, "hint": None, "seconds": 0.0, "world_size": 0}
    names = ("lagging", "restarts", "collected", "collecting", "workers", "nodes")
    lists: dict[str, Any] = {name: [] for name in names}
    return {**known, **lists, "code": None, "directory": None, "remote_directories": {}}


def _end_of(lines: list[str], whole: int) -> list[str]:
    """Return the end of `lines`, which is itself the end of an output of `whole` lines.

    A long traceback keeps its first lines, which are usually those of the user's own code, and its exception.
    """
    start = max(0, len(lines) - MAX_LINES)
    traceback = max((at for at, line in enumerate(lines) if exits.TRACEBACK in line), default=start)
    kept = [*range(start, len(lines))]
    if traceback < start:
        head, kept = traceback + HEAD_LINES, kept[HEAD_LINES:]
        exception = exits.exception_line(lines, head, kept[0])
        kept = [*range(traceback, head), *exception, *kept]
    left_out = whole - len(lines) + min(start, traceback)
    shown = [f"({counted(left_out, 'earlier line')} not shown)"] if left_out > 0 else []
    for before, at in zip([kept[0] - 1, *kept], kept, strict=False):
        shown += [f"({counted(at - before - 1, 'line')} not shown)"] if at > before + 1 else []
        shown.append(lines[at])
    return shown


def _record_text(worker: RankState) -> str:
    return exits.record_text(worker.phase.error_record) if isinstance(worker.phase, Exited) else ""


def _node_document(state: State, index: int) -> dict[str, Any]:
    node, known = state.nodes[index], failure_of(state.nodes[index])
    failure = known and {"kind": known.kind.value, "words": known.words}
    return {"name": state.label(index), "phase": phase_word(node), "failure": failure}
