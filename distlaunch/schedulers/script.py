"""Batch scripts: what all schedulers' share, and what can be checked before a job waits in a queue."""

import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from distlaunch.job.spec import JobSpec
from distlaunch.job.text import path_in
from distlaunch.job.types import LINE, Field, Integer, Lines, ListOf, Record, Text, seconds_in
from distlaunch.schedulers import DEFAULT, Call, Scheduler
from distlaunch.schedulers.queue import ANYTHING, call, output_path, pause_for_another_wish

TRAP = ("", "# The signals that announce an end are distlaunch's to handle.", "trap : INT TERM USR1 USR2")
MAX_NAME = 200

# A section of the job file

NODES = Field(Integer(1, 4096), "Nodes to allocate, where spares: rest needs more than nodes.", "nodes")
QUEUE = Field(LINE, "Queue.")
SETUP = Field(Lines(), "Shell commands to run first on the first node, such as module load.")
FOREIGN = {"walltime": "time", "time_limit": "time", "options": "extra", "modules": "setup"}
_ARRAY = "an array would start the same job many times; submit each by itself"
_WHY = {"array": _ARRAY, "output": "the job's output goes to logs.dir", "wait": "use `submit --wait`"}


class TimeLimit(Text):
    """A time such as 12h, which becomes what a scheduler has for so many seconds, or its `own` pattern."""

    def __init__(self, examples: str, own: str, written: Callable[[int], str]) -> None:
        super().__init__(f"a time such as {examples}", rf"{own}(?:[0-9]+[dhms])+")
        self.written = written

    def made(self, checked: Any) -> Any:
        """The time for the scheduler's command."""
        seconds = seconds_in(checked)
        return checked if seconds is None else self.written(int(seconds))


class _OtherOption(Text):
    """An option of a command, as it takes it, but none that `taken` matches: a group of that says why."""

    def __init__(self, example: str, pattern: str, taken: str) -> None:
        super().__init__(f'an option such as "{example}"', pattern, self._mistake)
        self.taken = taken

    def _mistake(self, option: str) -> str | None:
        found = re.match(self.taken, option)
        return found and f"{found[0]} can't be used: {_WHY.get(found.lastgroup or '', 'distlaunch sets it')}"


def other_options(command: str, example: str, taken: str, pattern: str = r"-[A-Za-z][^\0\n]*") -> Field:
    """Return the key for other options of a scheduler's command."""
    return Field(ListOf(_OtherOption(example, pattern, taken)), f"Any other options of {command}.")


def section(keys: Mapping[str, Field], extra: Field, **foreign: str) -> Record:
    """Return a section of the job file with these keys, and those that each has."""
    every = {"nodes": NODES, **keys, "setup": SETUP, "extra": extra}
    return Record(every, foreign={**FOREIGN, **foreign})


# A job


def target_of(spec: JobSpec) -> str:
    """Return the only scheduler that the job has a section for; else the default."""
    named = [key.replace("_", "-") for key in spec.sections]
    return named[0] if len(named) == 1 else DEFAULT


def check_submitted(spec: JobSpec, scheduler: Scheduler) -> None:
    """Raise `JobError` for what can't work, whatever the queue gives; nodes are taken to see our files."""
    spec.refuse(_mistakes(spec, scheduler))


def _mistakes(spec: JobSpec, scheduler: Scheduler) -> Iterator[tuple[str, str]]:
    """(path in the job file, what is wrong) of each."""
    asked = scheduler.asked(spec)
    for path in ("nodes[0]", "hostfile"):
        if path in spec.places:
            yield path.partition("[")[0], f"{scheduler.title} chooses the hosts: {scheduler.chooses}"
    if "spares" in spec.places and not asked.get("nodes"):
        yield "spares", f"set {scheduler.key}.nodes to the number of all nodes, spares included"
    if spec.restarts.requeue and not scheduler.answers:
        yield "restarts.requeue", f"only Slurm can be asked to start a job again, not {scheduler.title}"
    yield from scheduler.mistakes(spec)
    if not asked.get("setup"):  # which may make what is missing
        yield from _missing(spec)


def _missing(spec: JobSpec) -> Iterator[tuple[str, str]]:
    workdir = os.path.expanduser(spec.workdir)
    if not os.path.isdir(workdir):
        yield "workdir", f"{workdir} does not exist"
        return
    program = spec.program
    script = os.path.expanduser(path_in(workdir, program.words[0]))
    if program.placed and not os.path.isfile(script):
        yield ("command" if program.kind == "command" else program.kind), f"{script} does not exist"
    python = "" if spec.container else spec.python or ""  # that of an image can't be seen from here
    if "/" in python and not os.path.isfile(os.path.expanduser(python)):
        yield "python", f"{python} does not exist"


def workers(spec: JobSpec, gpus: object = None) -> int:
    """Count the workers of each node, as far as the job says; else 1."""
    node = spec.nodes[0]
    return node.procs or node.gpus or (gpus if isinstance(gpus, int) else 0) or 1


def workdir(spec: JobSpec) -> str:
    """Return where the output of a script goes that nobody follows: a directory that exists."""
    return os.path.expanduser(spec.workdir)


def plain_name(name: str) -> str:
    """Write a job's name as most schedulers take it: no blanks, a letter first."""
    plain = re.sub(r"[^A-Za-z0-9_.+-]", "_", name)[:MAX_NAME]
    return plain if plain[:1].isalpha() else f"job_{plain}"


# Its script


class BatchScheduler(Scheduler):
    """A scheduler whose batch scripts have its options in comments."""

    mark = ""
    """What is before an option."""
    ends: tuple[str, ...] = ()
    """The command that ends a job."""
    hurries: tuple[str, ...] = ()
    """The command that sends a running job a signal, if the scheduler has one for users."""
    over: "re.Pattern[str] | None" = None
    """What its commands say of a job that is over."""

    def options(self, spec: JobSpec, followed: bool) -> Iterable[str]:
        """Write the options in such a script, but those of `extra`."""
        raise NotImplementedError

    def opening(self, spec: JobSpec) -> Sequence[str]:
        """Write the lines after the options, of a job that is to be followed."""
        return ()

    def closing(self, spec: JobSpec) -> Sequence[str]:
        """Write the lines after the call."""
        return ()

    def cancel(self, job: str, at_once: bool = False) -> None:
        """End a job; `at_once` sends it a signal before, because distlaunch hurries at the second one."""
        if at_once and self.hurries:
            call(self.title, *self.hurries, job, forgives=ANYTHING)  # it may not run
            pause_for_another_wish()
        call(self.title, *self.ends, job, forgives=self.over)

    def script(self, spec: JobSpec, call: Call, followed: bool = False) -> str:
        """Write options, traps, the lines of `setup`, and the call."""
        lines, extra = self.asked(spec).get("setup") or (), self.asked(spec).get("extra", ())
        options = (*self.options(spec, followed), *extra)
        head = ["#!/bin/bash", *(f"{self.mark} {option}" for option in options)]
        head += [*(self.opening(spec) if followed else ()), *TRAP, *(["", *lines] if lines else [])]
        return "\n".join([*head, "", *_run_lines(call), *self.closing(spec), ""])

    def node_count(self, spec: JobSpec) -> int:
        """Count the nodes that the job is to get."""
        return self.asked(spec).get("nodes") or (len(spec.nodes) if "nodes" in spec.places else 1)

    def print_into(self, folder: str, variable: str) -> str:
        """Redirect a script's output to where it is looked for, by the ID in a variable."""
        path = output_path(shlex.quote(folder), f'"${variable}"', self.name)
        return f"exec >>{path} 2>&1"


def _run_lines(call: Call) -> list[str]:
    line = shlex.join(call.words)
    if call.stdin is None:
        return [line]
    end = "END_OF_JOB"
    while re.search(rf"^{end}$", call.stdin, re.MULTILINE):
        end += "_"
    return [f"{line} <<'{end}'", call.stdin.rstrip("\n"), end]


def given(asked: Mapping[str, Any], flags: Mapping[str, str]) -> Iterator[str]:
    """Write the option of each key of `flags` that was given."""
    for key, flag in flags.items():
        if asked.get(key) is not None:
            yield option(flag, asked[key])


def option(flag: str, value: object) -> str:
    """Write an option as lines of a script have it: quoted as in a shell."""
    return f"{flag}{shlex.quote(str(value))}"


def clock(seconds: int) -> str:
    """Write a day and a half as `36:00:00`."""
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


WALLTIME = TimeLimit('"12h" or "36:00:00"', r"[0-9]+:[0-9]{2}:[0-9]{2}|", clock)
