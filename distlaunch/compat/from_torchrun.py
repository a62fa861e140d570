"""Job files from torchrun command lines, which are split as a shell would."""

import os.path
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from distlaunch.compat.draft import Draft
from distlaunch.compat.flags import FLAG, FLAGS, Flags, parse_flags
from distlaunch.compat.torchrun_job import FILLED, JOIN_TIMEOUTS, argument, chooses_endpoint, flag_messages
from distlaunch.contract import RESERVED
from distlaunch.errors import UsageError
from distlaunch.job.document import Data
from distlaunch.job.nodes import host_error
from distlaunch.job.text import is_loopback

NO_SHELL = "job files don't expand shell variables"
"""The reason why a word that a shell would expand must be replaced with its value."""
_PATHS = "relative paths are relative to this file: keep it in the directory where the command was run"
_STARTS_ALL = "`distlaunch run` starts the ranks of all nodes itself"
_BEFORE = "run it before `distlaunch run`, if the job needs it"
_BEHIND = "write it after `distlaunch run` or `distlaunch submit --wait` instead"
_INPUT = "set `stdin: rank 0`, and write it after `distlaunch run`"
_AS_THEY_ARE = ("max_restarts", "numa_binding", "role", "virtual_local_rank")
"""Flags whose values become the values of their keys unchanged."""
_MODULES = ("torch.distributed.run", "torch.distributed.launch", "distlaunch.torchrun")
_USE_ENV = ("--use-env", "--use_env")
"""Spellings of a flag that only torch.distributed.launch accepts."""
_RENDEZVOUS_FLAG = (
    r"--?(rdzv|nnodes|standalone|node[-_]rank|local[-_]addr(?!\w)|master|machine_rank|num_mach|main_pro)"
)
_IN_ENVIRONMENT = r"\b(uv|poetry|pdm|pipenv|hatch|rye|pixi|conda|(micro)?mamba) run\b"
_SYNTAX = "();<>|&\n"
_OPERATOR = rf"#|\d?[{_SYNTAX}]+"
_QUOTED = r"""(?s)'[^']*'|"(?:\\.|[^"\\])*"|\\."""
_HIDDEN = {ord(char): chr(0xE000 + index) for index, char in enumerate(_SYNTAX + "#")}
"""Private characters that stand for quoted syntax while a line is split."""
_SHOWN = {ord(hidden): char for char, hidden in _HIDDEN.items()}
_SUBSTITUTION = r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`"
"""A command that a shell replaces with its output. It may contain two levels of parentheses."""
_EXPANDED = r"(?s)[$`*?]|^#|^(?:[A-Za-z_]\w*=(?:.*:)?)?~|(?<!=)\[[^\],]+\]|\{[^{}]*(?:,|\.\.)[^{}]*\}"


class _Operator(str):
    """A shell's operator, in contrast to an argument with the same text."""


class Line(NamedTuple):
    """A command in a shell line: words before the launcher; the launcher and its arguments; comments."""

    before: Sequence[str]
    words: Sequence[str]
    notes: Sequence[str] = ()

    @property
    def env(self) -> dict[str, str]:
        """Return the variables set by the command."""
        return dict(self.before[i].split("=", 1) for i in _settings(self.before))

    @property
    def python(self) -> str:
        """Return the explicit interpreter, or the one next to torchrun; "" = neither."""
        beside, name = os.path.split(self.words[0])
        own = name if re.fullmatch(r"python\d+\.\d+", name) else ""
        if beside and name != "distlaunch":
            own = f"{beside}/{name if is_python(name) else 'python'}"
        return self.env.get("PYTHON_EXEC") or own

    @property
    def commands(self) -> list[str]:
        """Return the base names of the words before the launcher, except variables."""
        return [os.path.basename(word) for word in self.before if not is_variable(word)]


def command_draft(words: Sequence[str], cpus: int) -> Draft:
    """Draft a job from a command, given as words or as one shell line.

    `cpus` is the number of CPUs of this machine.

    Raises `UsageError` or `JobError`.
    """
    typed = len(words) == 1
    words = shell_words(words[0]) if typed else words
    line = cut_line(words, launcher_at(words))
    if line is None:
        known = "torchrun, python -m torch.distributed.run or .launch, or distlaunch torchrun"
        raise UsageError(
            f"expected a command with {known}; to convert a batch script: `distlaunch import sbatch FILE`"
        )
    draft = Draft("the command line", typed)
    draft.note(_PATHS, *line.notes)
    add_torchrun(draft, line, cpus)
    return draft.checked()


def shell_words(text: str) -> list[str]:
    """Split a line into words and operators like a shell, without expanding anything."""
    text = text.strip().replace("\\\n", "")
    commands, hidden = iter(re.findall(_SUBSTITUTION, text)), re.sub(_SUBSTITUTION, "\0", text)
    hidden = re.sub(_QUOTED, lambda quoted: quoted[0].translate(_HIDDEN), hidden)
    lexer = shlex.shlex(hidden, posix=True, punctuation_chars=_SYNTAX)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    words: list[str] = []
    try:
        numbered = {found[0] for word in shlex.split(hidden) if (found := re.match(r"\d[<>][<>&|]*", word))}
        for word in lexer:
            if words and words[-1] + word in numbered:  # the lexer splits 2>&1 like 2 >&1
                words[-1] += word
            else:
                words.append(word)
    except ValueError as error:
        raise UsageError(f"{str(error).lower()}: {text[:60]}") from None
    return [
        _Operator(word)
        if re.fullmatch(_OPERATOR, word)
        else re.sub("\0", lambda _: next(commands, ""), word.translate(_SHOWN))
        for word in words
    ]


def cut_line(words: Sequence[str], at: int | None) -> Line | None:
    """Return the command whose launcher is at index `at`. Raises `UsageError` for substitutions."""
    if at is None:
        return None
    end = next((i for i in range(at, len(words)) if isinstance(words[i], _Operator)), len(words))
    if "(" in "".join(words[end : end + 1]):
        what = "only a shell can run a command in parentheses: replace"
        raise UsageError(f"{what} $(…) with its output, and <(…) with a file that contains its output")
    before = _left_out(words[:at])
    hint = _BEFORE if any(isinstance(word, _Operator) for word in before) else _STARTS_ALL
    if re.search(_IN_ENVIRONMENT, " ".join(words[:at])):
        hint += "; set python to the environment's interpreter, such as .venv/bin/python"
    if any(word.startswith("--container-") for word in words[:at]):
        hint += ", and `container` names the image and its mounts"
    if "cd" in before:
        hint += "; instead of cd, set workdir"
    behind = _INPUT if "<" in words[end:] else _BEHIND
    parts = ((before, hint), (words[end:], behind))
    notes = [f"left out: `{_joined(part)}`: {why}" for part, why in parts if part]
    return Line(words[:at], words[at:end], notes)


def _left_out(words: Sequence[str]) -> list[str]:
    """Return words before a launcher without the assignments that begin a command, which become `env`."""
    kept: list[str] = []
    settings = _settings(words)
    for i, word in enumerate(words):
        sets = i in settings or (word in ("export", "env") and i + 1 in settings)
        begins = not kept or isinstance(kept[-1], _Operator)
        if not (begins and (sets or not word.strip(";&\n"))):
            kept.append(word)
    return kept


def _settings(words: Sequence[str]) -> list[int]:
    """Return the indices of assignments before a launcher, except those for another command."""
    found: list[int] = []
    start = 0
    for end in [*(i for i, word in enumerate(words) if isinstance(word, _Operator)), len(words)]:
        command = range(start, end)
        only_sets = all(is_variable(words[i]) or words[i] in ("export", "env") for i in command)
        if only_sets or end == len(words):
            found += [i for i in command if is_variable(words[i])]
        start = end + 1
    return found


def _joined(words: Sequence[str]) -> str:
    """Join words and operators for a shell."""
    text = " ".join(
        word.replace("\n", ";") if isinstance(word, _Operator) else shlex.quote(word) for word in words
    )
    return text.replace(">& ", ">&")


def is_variable(word: str) -> bool:
    """Check whether a word before a command sets a variable."""
    return re.match(r"[A-Za-z_]\w*=", word) is not None


def is_python(word: str) -> bool:
    """Check whether a word starts Python."""
    return re.fullmatch(r"python[0-9.]*", os.path.basename(word)) is not None


def launcher_at(words: Sequence[str]) -> int | None:
    """Return the index of torchrun, after variables and commands such as srun; None = not found."""
    # A Python that runs another program ends the search, because its arguments can be anything.
    starts = (i for i, word in enumerate(words) if launched(words, i) or is_python(word))
    return next((i for i in [*starts][:1] if launched(words, i)), None)


def launched(words: Sequence[str], at: int) -> tuple[str, list[str]] | None:
    """Return the launcher (torchrun or a module) that a word names, and its arguments, or None."""
    name, rest = os.path.basename(words[at]), list(words[at + 1 :])
    if name == "torchrun":
        return name, rest
    if is_python(name):
        while rest and rest[0] != "-m" and rest[0].startswith("-"):
            rest = rest[2 if rest[0] in ("-W", "-X") else 1 :]
        if rest and os.path.basename(rest[0]) == "torchrun":
            return "torchrun", rest[1:]
        name, *rest = rest[1:] if rest[:1] == ["-m"] and rest[1:] else [""]
    if name == "distlaunch" and rest[:1] == ["torchrun"]:
        return "distlaunch.torchrun", rest[1:]
    return (name, rest) if name in _MODULES else None


def started_directly(draft: Draft, words: Sequence[str], *flags: str) -> list[str]:
    """Return a torchrun command for a program that isn't started by torchrun."""
    program = list(words[2:] if words[1:2] == ["-u"] else words[1:])
    if not is_python(words[0]) or (program[:1] != ["-m"] and "".join(program[:1]).startswith("-")):
        return ["torchrun", *flags, "--no-python", *words]
    draft.set("python", words[0])
    return ["torchrun", *flags, *program]


def add_torchrun(draft: Draft, line: Line, cpus: int, hosts_known: bool = False) -> None:
    """Add the job from a line that starts torchrun. Raises `UsageError`.

    `cpus` is the number of CPUs of this machine. `hosts_known` = the job's nodes are already known.
    """
    flags, local_rank = _flags_of(line, draft.typed)
    draft.note(*_unexpanded(line, flags, draft.typed, hosts_known), *flag_messages(flags), *_remarks(flags))
    draft.set("python", draft.path(line.python) or None)
    if local_rank:
        text = "torch.distributed.launch passes --local-rank; scripts for torch 1.x expect --local_rank"
        draft.note(text, key="args")
    first = ["--local-rank={local_rank}"] if local_rank else []
    draft.set_program((flags.script, *flags.args), flags.kind, [*first, *map(argument, flags.args)])
    if not hosts_known:
        _add_nodes(draft, line, flags)
    _add_procs(draft, flags, cpus)
    _add_conduct(draft, flags)
    _add_logs(draft, flags)
    own = {flag.variable for flag in FLAGS} | RESERVED | {"PYTHON_EXEC"}
    draft.set_env({name: value for name, value in line.env.items() if name not in own})
    for name in [name for name in line.env if name in RESERVED]:
        draft.note(f"distlaunch sets {name} for each worker", key="env")


def _flags_of(line: Line, typed: bool) -> tuple[Flags, bool]:
    """Return the flags, and whether torch.distributed.launch passes --local-rank to workers."""
    module, words = launched(line.words, 0) or ("", [])
    legacy = module == "torch.distributed.launch"
    filled = [word for word in words if typed and re.search(r"[$`]", word)]
    flags = parse_flags(words, line.env, filled, _USE_ENV if legacy else ())
    if not flags.script:
        raise UsageError("no script given")
    before_script = words[: len(words) - len(flags.args) - 1]
    local_rank = legacy and not {*_USE_ENV}.intersection(before_script)
    if local_rank and flags.no_python:
        raise UsageError("torch.distributed.launch accepts --no-python only with --use-env")
    return flags, local_rank


def _unexpanded(line: Line, flags: Flags, typed: bool, hosts_known: bool) -> Iterator[str]:
    """Yield comments on words that need a shell. Raises `UsageError` if a value is required.

    A ~ in a path doesn't need a shell, because job files expand it.
    """
    for field, value in flags.unfilled:
        hint = FLAG[field].left_out
        if hosts_known and (hint or field == "nnodes"):
            continue
        if not hint:
            raise UsageError(f"{FLAG[field].name} {value}: write the value: {NO_SHELL}")
        yield f"left out: {FLAG[field].name} {value}: {hint}"
    if typed and "/" not in flags.script and re.search("[$`]", flags.script):
        if flags.kind == "module":
            raise UsageError(f"--module {flags.script}: write the value: {NO_SHELL}")
        hint = "write the flags or the script that it stands for"
        raise UsageError(f"{flags.script}: {hint}: {NO_SHELL}")
    env = [f"{name}={text}" for name, text in line.env.items() if not name.startswith("PET_")]
    paths = (path for path in (line.python, flags.script) if re.search(_EXPANDED, path.lstrip("~")))
    args = (arg for arg in flags.args if re.search(_EXPANDED, FILLED.sub("", arg)))
    kept = [*paths, *args, *(setting for setting in env if re.search(_EXPANDED, setting))]
    if typed and kept:
        hint = "job files don't expand variables or patterns, and expand ~ only in paths such as script"
        yield f"kept as written: {' '.join(dict.fromkeys(kept))}: {hint}"


def _remarks(flags: Flags) -> Iterator[str]:
    """Yield comments on flags that have no key in job files."""
    for flag in FLAGS:
        if flag.in_file and flag.field in flags.given:
            yield f"{flags.named(flag.field)} {flag.in_file}"
    if flags.logs_specs is not None:
        yield f"--logs-specs {flags.logs_specs} has no equivalent: it is {FLAG['logs_specs'].why}"
    if {"redirects", "tee"} & flags.given:
        yield "--redirects, --tee: the run directory always keeps each rank's stdout and stderr, separately"


def _add_nodes(draft: Draft, line: Line, flags: Flags) -> None:
    """Add the hosts and the endpoint; with srun, the hosts come from the allocation."""
    fewest, most = flags.nodes
    draft.set("min_nodes", fewest if fewest < most else None)
    if "srun" in line.commands:
        draft.set("nodes", most if most > 1 else None)
        note_rendezvous(draft, line.words)
        return
    host, port = _master(flags)
    draft.set("master_addr", host)
    draft.set("master_port", port)
    if "rdzv_id" in flags.given and not flags.standalone:
        draft.set("rendezvous.id", flags.rdzv_id or None)
    if most > 1:
        draft.set_hosts(host, most)
    if not flags.alone:
        _note_settings(draft, flags)


def _note_settings(draft: Draft, flags: Flags) -> None:
    """Add comments on the rendezvous of several nodes, whose settings have no keys."""
    if not flags.rdzv_backend.startswith("etcd"):
        for key, value in flags.conf.items():
            if key in JOIN_TIMEOUTS:
                draft.note(f"--rdzv-conf {key}={value}: set timeouts.join", key="timeouts")
            elif flags.c10d:
                draft.note(f"--rdzv-conf {key}={value} has no effect: {FLAG['rdzv_conf'].why}")
    if flags.rdzv_backend != "static":
        if "local_addr" in flags.given:
            draft.note("--local-addr applies to one node: set its address in nodes")
        draft.note_store("--rdzv-backend ", flags.rdzv_backend, flags.rdzv_endpoint)


def note_rendezvous(draft: Draft, words: Sequence[str], lines: Iterable[int] = ()) -> None:
    """Add a comment on unneeded rendezvous flags, in `words` and in the `lines` of a script."""
    flags = dict.fromkeys(word.partition("=")[0] for word in words if re.match(_RENDEZVOUS_FLAG, word))
    numbers = ", ".join(map(str, sorted(set(lines))))
    if parts := [*([f"lines {numbers}"] if numbers else []), *flags]:
        draft.note(f"left out: {', '.join(parts)}: distlaunch finds the hosts and sets up the rendezvous")


def _master(flags: Flags) -> tuple[str | None, int | None]:
    """Return the host and port of the store on rank 0, if they are valid on other machines."""
    if chooses_endpoint(flags):
        return flags.local_addr or None, None
    if flags.rdzv_backend.startswith("etcd"):
        return None, None
    host, port = flags.endpoint
    if error := host_error(host):
        raise UsageError(f"the command line: --master-addr or --rdzv-endpoint: {error}")
    named = {"master_port", "rdzv_endpoint"} & flags.given
    # Port 0 means any free port. Without a port, one node needs no endpoint.
    far = not is_loopback(host) and (named or flags.nodes[1] > 1)
    return (host if far else None), (port or None if named else None)


def _add_procs(draft: Draft, flags: Flags, cpus: int) -> None:
    """Set procs_per_node, with a comment if the command leaves the number to the machine."""
    match flags.procs:
        case int(number):
            draft.set("procs_per_node", number)
        case "auto":
            why = "one worker per GPU; on nodes without GPUs torchrun starts one per CPU, distlaunch only one"
            draft.note(f"--nproc-per-node auto: {why}", key="procs_per_node")
        case "cpu":
            draft.set("gpus_per_node", 0)
            draft.set("procs_per_node", cpus)
            draft.note("--nproc-per-node cpu: the number of CPUs on this machine", key="procs_per_node")


def _add_conduct(draft: Draft, flags: Flags) -> None:
    """Add restarts, the stop timeout, and the flags in `_AS_THEY_ARE`."""
    for field in _AS_THEY_ARE:
        value = getattr(flags, field)
        draft.set(FLAG[field].key, value if value != FLAG[field].default else None)
    if "shutdown_timeout" in flags.given:
        draft.set("timeouts.stop", f"{flags.shutdown_timeout}s")
    if flags.max_restarts:
        hint = "--max-restarts limits the whole run, but restarts.max limits each restarts.window (1h)"
        same = "the same exception in two attempts in a row ends the job (restarts.repeat)"
        draft.note(f"{hint}; {same}", key="restarts")
    elif flags.nodes[0] < flags.nodes[1]:
        draft.note("losing or regaining a node counts as a restart: at most 3 in an hour", key="restarts")


def _add_logs(draft: Draft, flags: Flags) -> None:
    """Add `logs`. The console shows both streams of a rank or neither."""
    redirects, tee = flags.streams("redirects"), flags.streams("tee")
    hidden = redirects & ~tee if isinstance(redirects, int) and isinstance(tee, int) else 1
    if flags.log_dir == "/dev/null":
        hidden = 0
        draft.note("--log-dir /dev/null: all output is shown, and also kept in the run directory", key="logs")
    else:
        draft.set("logs.dir", draft.path(flags.log_dir or "") or None)
    draft.set("logs.console", "none" if hidden == 3 else _shown_ranks(flags))
    if 0 < hidden < 3:
        draft.note("the console shows both streams of every rank in logs.console", key="logs")


def _shown_ranks(flags: Flags) -> Data:
    """Return the ranks with the selected local ranks: on all nodes if procs is known, else on node 0.

    None = all.
    """
    local_ranks = flags.local_ranks
    if not local_ranks:
        return None
    known = flags.nproc_per_node.isdecimal()
    procs = int(flags.nproc_per_node) if known else max(local_ranks) + 1
    nodes = range(flags.nodes[1] if known else 1)
    shown = [local for local in sorted(local_ranks) if 0 <= local < procs]
    return [node * procs + local for node in nodes for local in shown]
