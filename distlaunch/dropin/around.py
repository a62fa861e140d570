"""What surrounds a launcher's command in a shell line, and what does the same for a job file."""

import os.path
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from distlaunch.dropin.calls import is_variable, launcher_at
from distlaunch.dropin.over_ssh import Remote, SshCall, ssh_call
from distlaunch.dropin.shell_words import Command, shell_commands

_NO_STDIN = "ranks started from a job file have no stdin"
_BEFORE_RUN = "put it before `distlaunch run` if the job needs it"
_ENVIRONMENT = "do it in the shell that runs distlaunch, or set python to the environment's interpreter"
_STARTS_ALL = "`distlaunch run` starts all nodes itself: run it once"
_KEEPS = "works with `distlaunch run` too; each rank's output is kept in logs.dir"
_PROMPT = r"\s*(?:\([^()\s]+\)\s*)*(?:\[?[\w.-]+@[\w.-]+(?:[: ][^\s$#%>&|;]*)?\]?\s?)?[$%#>\u276f]\s+"
"""`$ `, `(base) me@host:~$ `, `[me@host dir]# `: a variable's $ has no space after it."""
_HINTS = {
    "nohup": "use `distlaunch run --detach`",
    "time": "`time distlaunch run` works too",
    "exec": "`exec distlaunch run` works too",
    "timeout": "set timeouts.job",
    "numactl": "set numa_binding",
    "taskset": "set numa_binding",
    "cd": "keep this file in that folder",
    **dict.fromkeys(("srun", "mpirun", "mpiexec", "pdsh"), _STARTS_ALL),
    **dict.fromkeys(("source", ".", "conda", "module", "uv", "poetry", "pipenv"), _ENVIRONMENT),
}


class Line(NamedTuple):
    """A launcher's command, a comment on each thing around it, and where ssh runs it.

    `folder` is that of a `cd` before it.
    """

    command: Command
    notes: tuple[str, ...] = ()
    remote: Remote | None = None
    folder: str = ""


def launcher_line(text: str, remotely: bool = False) -> Line:
    """The command in a shell's line that starts torchrun; else its first. Raises `UsageError`.

    `remotely` = ssh runs the line, in another folder.
    """
    commands = shell_commands(_without_prompts(text)) or (Command(()),)
    for i, command in enumerate(commands):
        if _inner(command.words) is None and launcher_at(command.words) is None:
            continue
        moved = remotely or _ssh(command) is not None
        notes = (
            *_before(commands[:i], remotely),
            *_wrapped(command),
            *_behind(command, commands[i + 1 :]),
            *_remarks(commands),
        )
        line = Line(command, notes, folder=_folder(commands[:i]) if remotely else "")
        return _with_inner(line, commands[:i], moved)
    return Line(commands[0])


def _with_inner(line: Line, before: Sequence[Command], moved: bool) -> Line:
    """The line inside `bash -c` or ssh, if the command has one; and where ssh runs it."""
    call, inner = _ssh(line.command), _inner(line.command.words)
    if inner is None:
        line = line._replace(command=_with_exports(line.command, before))
    else:
        found = launcher_line(inner, moved)
        command = _with_exports(found.command, (*before, line.command))
        line = Line(command, (*line.notes, *found.notes), found.remote, found.folder or line.folder)
    return line._replace(remote=Remote(call.host, _below_home(line.folder))) if call else line


def _ssh(command: Command) -> SshCall | None:
    """The ssh that the launcher is started by, if it is."""
    at = launcher_at(command.words)
    return ssh_call(command.words[:at])


def _folder(before: Sequence[Command]) -> str:
    """Where the last `cd` led."""
    return next((each.words[1] for each in reversed(before) if _is_move(each)), "")


def _is_move(command: Command) -> bool:
    return command.words[:1] == ("cd",) and len(command.words) == 2 and not command.filled


def _below_home(folder: str) -> str:
    """A folder as the shell that ssh starts would see it."""
    return folder if folder.startswith(("/", "~")) else f"~/{folder}".rstrip("/")


def _remarks(commands: Sequence[Command]) -> Iterator[str]:
    for command in commands:
        yield from (f"from the command line: {remark}" for remark in command.remarks)


def _without_prompts(text: str) -> str:
    """A line without a copied shell prompt, and without those of its continuation lines."""
    found = re.match(_PROMPT, text)
    if not found:
        return text
    return re.sub(r"\\\n> ?", "\\\n", text[found.end() :])


def _inner(words: Sequence[str]) -> str | None:
    """The command line that `bash -c` or ssh is given, if it is torchrun's."""
    call = ssh_call(words)
    if call and len(call.words) == 1 and launcher_at(words) is None:
        return _torchruns(call.words[0])
    for i, word in enumerate(words[:-2]):
        if os.path.basename(word) in ("bash", "sh") and words[i + 1] in ("-c", "-lc"):
            return _torchruns(words[i + 2])
    return None


def _torchruns(text: str) -> str | None:
    return text if "torchrun" in text or "torch.distributed" in text else None


def _with_exports(command: Command, before: Sequence[Command]) -> Command:
    """The command with the variables that those before it set for it."""
    found = [word for each in before for word in _assignments(each)]
    variables = [name for each in before if _assignments(each) for name in each.variables]
    return command._replace(
        words=(*found, *command.words),
        variables=tuple(dict.fromkeys((*variables, *command.variables))),
        filled=command.filled.union(*(each.filled for each in before)),
        homes=(*(word for word in found if _from_home(word, before)), *command.homes),
    )


def _from_home(word: str, before: Sequence[Command]) -> bool:
    return any(word in each.homes for each in before)


def _assignments(command: Command) -> list[str]:
    """What `export A=b` sets; also a variable before `bash -c`."""
    words = command.words[1:] if command.words[:1] == ("export",) else command.words
    count = next((i for i, word in enumerate(words) if not is_variable(word)), len(words))
    wanted = count == len(words) or _inner(command.words) is not None
    return list(words[:count]) if wanted else []


def _before(commands: Sequence[Command], remotely: bool) -> Iterator[str]:
    for command in commands:
        if _assignments(command) or not command.words or (remotely and _is_move(command)):
            continue
        hint = _NO_STDIN if command.operator in ("|", "|&") else _hint(command.words, "run it first")
        yield f"left out: `{shlex.join(command.words)} {command.operator}`: {hint}"


def _wrapped(command: Command) -> Iterator[str]:
    """What precedes the launcher's name in its own command."""
    at = launcher_at(command.words)
    words = command.words[:at] if at is not None else command.words[:-1]  # `bash -c` and its text
    rest = [word for word in words if not is_variable(word) and word != "env"]
    if rest:
        yield f"left out: `{shlex.join(rest)}`: {_hint(rest, _BEFORE_RUN)}"


def _hint(words: Sequence[str], otherwise: str) -> str:
    known = [_HINTS[name] for name in map(os.path.basename, words) if name in _HINTS]
    known += [call.hint] if (call := ssh_call(words)) else []
    return "; ".join(dict.fromkeys(known)) or otherwise


def _behind(command: Command, rest: Sequence[Command]) -> Iterator[str]:
    reads = [text for text in command.redirected if text.lstrip("0123456789").startswith("<")]
    writes = [text for text in command.redirected if text not in reads]
    for texts, hint in ((reads, _NO_STDIN), (writes, _KEEPS)):
        if texts:
            yield f"left out: `{' '.join(texts)}`: {hint}"
    operator = command.operator
    for later in rest:
        if later.words:
            hint = _KEEPS if operator in ("|", "|&") else "put it after `distlaunch run`"
            yield f"left out: `{operator} {shlex.join(later.words)}`: {hint}"
        operator = later.operator
    if operator == "&":
        yield "left out: `&`: use `distlaunch run --detach`"
