"""A job file that does what a torchrun command line does."""

import os.path
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from distlaunch.compat.flags import (
    FLAG,
    FLAGS,
    Flags,
    is_alone,
    node_range,
    parse_procs,
    parse_std,
    program_kind,
)
from distlaunch.compat.job_text import (
    Data,
    Draft,
    Note,
    checked,
    etcd_offer,
    gpus_offer,
    joined,
    kept_path,
    program_draft,
    visible_gpus,
)
from distlaunch.compat.joining import endpoint_of
from distlaunch.compat.parsing import parse_flags
from distlaunch.compat.torchrun_job import notices, ranks_of
from distlaunch.contract import RESERVED
from distlaunch.errors import UsageError
from distlaunch.job.hosts import host_error
from distlaunch.plan.layout import is_loopback

SOURCE = "the command line"
LISTED_HOSTS = 16
"""More hosts than this stand as a range."""
NO_SHELL = "job files don't expand shell variables"
_PATHS = "relative paths are relative to this file: keep it in the directory where the command was run"
_STARTS_ALL = "`distlaunch run` starts the ranks of all nodes itself"
_BEFORE = "run it before `distlaunch run`, if the job needs it"
_BEHIND = "write it after `distlaunch run` instead"
_AS_THEY_ARE = ("max_restarts", "numa_binding", "role", "virtual_local_rank")
"""Flags whose values are those of their keys."""
_MODULES = ("torch.distributed.run", "torch.distributed.launch", "distlaunch.torchrun")
_USE_ENV = ("--use-env", "--use_env")
_SYNTAX = "();<>|&\n"
_EXPANDED = re.compile(
    r"[$`*?]|^#|^(?:[A-Za-z_]\w*=(?:.*:)?)?~|(?<!=)\[[^\],]+\]|\{[^{}]*(?:,|\.\.)[^{}]*\}", re.DOTALL
)


class Call(NamedTuple):
    """A command that starts torchrun: its variables, its interpreter if it names one, torchrun's flags.

    `typed` = no shell has expanded it. With `local_rank_flag`, that of torch.distributed.launch, workers get
    `--local-rank=N`.
    """

    env: Mapping[str, str]
    python: str | None
    flags: Flags
    typed: bool = False
    local_rank_flag: bool = False

    @property
    def nodes(self) -> tuple[int, int]:
        """(fewest, most)."""
        return (1, 1) if self.flags.standalone else node_range(self.flags.nnodes)

    @property
    def master(self) -> tuple[str | None, int | None]:
        """Host and port of rank 0's store, as far as the command says something that holds elsewhere."""
        flags = self.flags
        if is_alone(flags, self.nodes[1]) or flags.rdzv_backend.startswith("etcd"):
            return None, None
        host, port = endpoint_of(flags)
        if error := host_error(host):
            raise UsageError(f"{SOURCE}: --master-addr or --rdzv-endpoint: {error}")
        named = {"master_port", "rdzv_endpoint"} & flags.given
        # Port 0 asks for a free one; without a port one node needs no endpoint.
        far = not is_loopback(host) and (named or self.nodes[1] > 1)
        return (host if far else None), (port or None if named else None)

    def path(self, text: str) -> str:
        """A path, in which a ~ that a shell has left as it was is part of a name."""
        return text if self.typed else kept_path(text)


class Line(NamedTuple):
    """A command of a shell line: the words before the launcher, those from it on, comments on the rest.

    `typed` = no shell has expanded it.
    """

    before: Sequence[str]
    words: Sequence[str]
    notes: Sequence[str] = ()
    typed: bool = True

    @property
    def env(self) -> dict[str, str]:
        """The variables that it sets."""
        return dict(word.split("=", 1) for word in self.before if is_variable(word))


def command_draft(words: Sequence[str], cpus: int) -> Draft:
    """The job of a command's words, or of a shell line that is the only one; `cpus` are this machine's.

    Raises `UsageError` or `JobError`.
    """
    typed = len(words) == 1
    words = shell_words(words[0]) if typed else words
    line = cut_line(words, launcher_at(words), typed)
    if line is None:
        got = " ".join(words[: 2 if words and is_python(words[0]) else 1])
        known = "torchrun, python -m torch.distributed.run or .launch, distlaunch torchrun"
        raise UsageError(f"expected {known}, got {got!r}" if got else f"expected {known}")
    notes = tuple(map(Note, (_PATHS, *line.notes)))
    return checked(gpus_offer(joined([Draft(notes=notes), torchrun_draft(call_of(line), cpus)])), SOURCE)


def shell_words(text: str) -> list[str]:
    """The words of a line in a shell's quoting, and its operators, with nothing expanded."""
    text = text.strip().replace("\\\n", "")
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_SYNTAX)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    words: list[str] = []
    try:
        numbered = {found[0] for word in shlex.split(text) if (found := re.match(r"\d[<>][<>&|]*", word))}
        for word in lexer:
            if words and words[-1] + word in numbered:  # 2>&1, which the lexer cuts like 2 >&1
                words[-1] += word
            else:
                words.append(word)
    except ValueError as error:
        raise UsageError(f"{str(error).lower()}: {text[:60]}") from None
    return words


def cut_line(words: Sequence[str], at: int | None, typed: bool = True) -> Line | None:
    """The command whose launcher stands there. Raises `UsageError` for output of commands."""
    if at is None:
        return None
    end = next((i for i in range(at, len(words)) if typed and _is_syntax(words[i])), len(words))
    if "(" in "".join(words[end : end + 1]):
        raise UsageError("only a shell can run what is in parentheses: write its output there")
    hint = _BEFORE if any(map(_is_syntax, words[:at])) else _STARTS_ALL
    parts = ((words[:at], hint), (words[end:], _BEHIND))
    notes = [
        f"left out: `{_joined(part)}`: {told}" for part, told in parts if not all(map(is_variable, part))
    ]
    return Line(words[:at], words[at:end], notes, typed)


def _joined(words: Sequence[str]) -> str:
    """Words and operators as a shell would read them."""
    text = " ".join(word.replace("\n", ";") if _is_syntax(word) else shlex.quote(word) for word in words)
    return text.replace(">& ", ">&")


def _is_syntax(word: str) -> bool:
    return re.fullmatch(rf"#|\d?[{_SYNTAX}]+", word) is not None


def is_variable(word: str) -> bool:
    """Whether a word before a command sets a variable for it."""
    return re.match(r"[A-Za-z_]\w*=", word) is not None


def is_python(word: str) -> bool:
    """Whether a word starts Python."""
    return re.fullmatch(r"python[0-9.]*", os.path.basename(word)) is not None


def launcher_at(words: Sequence[str]) -> int | None:
    """Where torchrun's name stands, behind variables and commands such as srun; None = nowhere."""
    for i, word in enumerate(words):
        if launched(words, i):
            return i
        if is_python(word):
            return None  # it runs another program, whose arguments may be anything
    return None


def launched(words: Sequence[str], at: int) -> tuple[str, list[str]] | None:
    """The launcher that the word there starts, or None, and what it gets: torchrun, or a module."""
    name = os.path.basename(words[at])
    if name == "torchrun":
        return name, list(words[at + 1 :])
    if name == "distlaunch" and list(words[at + 1 : at + 2]) == ["torchrun"]:
        return "distlaunch.torchrun", list(words[at + 2 :])
    rest = list(words[at + 1 :]) if is_python(name) else []
    while rest and rest[0] != "-m" and rest[0].startswith("-"):
        rest = rest[1:]
    if rest[:3] == ["-m", "distlaunch", "torchrun"]:
        return "distlaunch.torchrun", rest[3:]
    return (rest[1], rest[2:]) if rest[:1] == ["-m"] and rest[1:2] and rest[1] in _MODULES else None


def call_of(line: Line) -> Call:
    """The call of a line that starts torchrun. Raises `UsageError`."""
    module, rest = launched(line.words, 0) or ("", [])
    filled = [word for word in rest if line.typed and re.search(r"[$`]", word)]
    flags, use_env = _flags(rest, line.env, filled, module == "torch.distributed.launch")
    if not flags.script:
        raise UsageError("no script given")
    if flags.no_python and not use_env:
        raise UsageError("torch.distributed.launch accepts --no-python only with --use-env")
    beside, name = os.path.split(line.words[0])
    python = f"{beside}/{name if is_python(name) else 'python'}" if beside and name != "distlaunch" else None
    return Call(line.env, line.env.get("PYTHON_EXEC") or python, flags, line.typed, not use_env)


def _flags(
    words: list[str], env: Mapping[str, str], filled: Collection[str], legacy: bool
) -> tuple[Flags, bool]:
    """The flags, and whether workers find LOCAL_RANK in their environment alone.

    That takes --use-env for torch.distributed.launch, which has it beyond torchrun's flags.
    """
    at = next((i for i, word in enumerate(words) if legacy and word in _USE_ENV), None)
    if at is not None:
        less = [*words[:at], *words[at + 1 :]]
        flags = parse_flags(less, env, filled)
        if at <= len(less) - 1 - len(flags.args):
            return flags, True
    return parse_flags(words, env, filled), not legacy


def torchrun_draft(call: Call, cpus: int) -> Draft:
    """The job of a command; `cpus` are this machine's. Raises `UsageError`."""
    notes = tuple(map(Note, (*_unexpanded(call), *notices(call.flags))))
    parts = (part(call) for part in (_program, _nodes, _meeting, _conduct, _logs))
    return joined([Draft(notes=notes), *parts, _procs(call, cpus), env_draft(call.env)])


def _unexpanded(call: Call) -> Iterator[str]:
    """What to do about each word that a shell would have replaced. Raises `UsageError` if it matters."""
    for field, value in call.flags.unfilled:
        if not field:
            raise UsageError(f"{value}: write the flags in it: {NO_SHELL}")
        if not FLAG[field].left_out:
            raise UsageError(f"{FLAG[field].name} {value}: write the value: {NO_SHELL}")
        yield f"left out: {FLAG[field].name} {value}: {FLAG[field].left_out}"
    env = (f"{name}={text}" for name, text in call.env.items() if not name.startswith("PET_"))
    if call.typed:
        yield from kept_notes((call.python or "", call.flags.script), (*call.flags.args, *env))


def kept_notes(paths: Sequence[str], words: Sequence[str]) -> Iterator[str]:
    """A comment on the words that a shell would have expanded; in paths, a job file expands ~ itself."""
    kept = [path for path in paths if _EXPANDED.search(path.lstrip("~"))]
    kept += [word for word in words if _EXPANDED.search(word)]
    if kept:
        told = "job files don't expand variables and patterns, and ~ only in paths such as script"
        yield f"kept as written: {' '.join(dict.fromkeys(kept))}: {told}"


def _program(call: Call) -> Draft:
    flags = call.flags
    legacy = ("--local-rank={local_rank}",) if call.local_rank_flag else ()
    notes = [_remark("run_path", "script")] if flags.run_path else []
    if legacy:
        told = "torch.distributed.launch passes --local-rank; scripts for torch 1.x expect --local_rank"
        notes.append(Note(told, "args"))
    python: dict[str, Data] = {"python": call.path(call.python)} if call.python else {}
    own = program_draft((flags.script, *flags.args), program_kind(flags), legacy, call.path)
    return joined([own, Draft(python, tuple(notes))])


def _nodes(call: Call) -> Draft:
    fewest, most = call.nodes
    if most == 1:
        return Draft()
    first = call.master[0]
    others = [f"HOST[1-{most - 1}]"] if most > LISTED_HOSTS else [f"HOST{i}" for i in range(1, most)]
    advice = "rank 0 runs on the first" if first else "the one for rank 0 first"
    notes = [Note(f"put your host names here, as ssh knows them; {advice}", "nodes")]
    if "node_rank" in call.flags.given:
        notes.append(_remark("node_rank", "nodes"))
    elastic: dict[str, Data] = {"min_nodes": fewest} if fewest < most else {}
    return Draft({"nodes": [first or "HOST0", *others], **elastic}, tuple(notes))


def _procs(call: Call, cpus: int) -> Draft:
    match parse_procs(call.flags.nproc_per_node):
        case int(number):
            return Draft({"procs_per_node": number})
        case "gpu":
            return Draft()
        case "auto":
            why = "one worker per GPU; on a node without GPUs torchrun starts one per CPU, distlaunch one"
            return Draft(notes=(Note(f"--nproc-per-node auto: {why}", "procs_per_node"),))
        case "cpu":
            note = Note("--nproc-per-node cpu: the number of CPUs on this machine", "procs_per_node")
            return Draft({"gpus_per_node": 0, "procs_per_node": cpus}, (note,))


def _meeting(call: Call) -> Draft:
    flags, alone = call.flags, is_alone(call.flags, call.nodes[1])
    keys: dict[str, Data] = dict(zip(("master_addr", "master_port"), call.master, strict=True))
    if "rdzv_id" in flags.given and flags.rdzv_id and not flags.standalone:
        keys["rendezvous"] = {"id": flags.rdzv_id}
    notes = []
    if "local_addr" in flags.given and flags.rdzv_backend != "static" and call.nodes[1] > 1:
        notes.append(_remark("local_addr", "nodes"))
    waits = "timeout" in flags.rdzv_conf and not flags.rdzv_backend.startswith("etcd") and not alone
    if waits or (flags.rdzv_backend == "static" and flags.rdzv_conf):
        notes.append(Note(f"--rdzv-conf {flags.rdzv_conf}: set timeouts.join", "timeouts"))
    elastic = flags.rdzv_backend != "static" and not alone
    if elastic:
        told = "distlaunch assigns the ranks itself and needs no store"
        notes.append(Note(f"--rdzv-backend {flags.rdzv_backend}: {told}", "rendezvous"))
    offers = etcd_offer(flags.rdzv_backend, flags.rdzv_endpoint, flags.rdzv_conf) if elastic else ()
    return Draft({key: value for key, value in keys.items() if value}, tuple(notes), offers)


def _conduct(call: Call) -> Draft:
    flags = call.flags
    values = {field: getattr(flags, field) for field in _AS_THEY_ARE}
    given = {FLAG[field].key: value for field, value in values.items() if value != FLAG[field].default}
    if "shutdown_timeout" in flags.given:
        given[FLAG["shutdown_timeout"].key] = f"{flags.shutdown_timeout}s"
    parts = [(*key.rpartition("."), value) for key, value in given.items()]
    keys = {section or inner: {inner: value} if section else value for section, _, inner, value in parts}
    return Draft(keys, tuple(_conduct_notes(call)))


def _conduct_notes(call: Call) -> Iterator[Note]:
    flags = call.flags
    if flags.max_restarts:
        text = "--max-restarts counts over the whole run; restarts.max counts in each restarts.window (1h)"
        yield Note(text, "restarts")
    if call.nodes[0] < call.nodes[1] and not flags.max_restarts:
        yield Note("losing or regaining a node counts as a restart: at most 3 in an hour", "restarts")
    if "signals_to_handle" in flags.given:
        yield _remark("signals_to_handle")


def _remark(field: str, key: str = "", value: str = "") -> Note:
    """The note, at a key, on a flag that job files have no key for."""
    return Note(" ".join(filter(None, (FLAG[field].name, value, FLAG[field].in_file))), key)


def env_draft(env: Mapping[str, str]) -> Draft:
    """`env` of a command's variables, but for those of torchrun's flags and of each worker."""
    flags = {flag.variable for flag in FLAGS}
    keys = {name: value for name, value in env.items() if name not in {*flags, *RESERVED, "PYTHON_EXEC"}}
    notes = (Note(f"distlaunch sets {name} for each worker", "env") for name in env if name in RESERVED)
    return joined([Draft({"env": keys} if keys else {}, tuple(notes)), visible_gpus(keys)])


def _logs(call: Call) -> Draft:
    flags = call.flags
    shown, notes = _shown(call)
    if {"redirects", "tee"} & flags.given:
        told = "--redirects, --tee: the run directory always keeps each rank's stdout and stderr, separately"
        notes = [*notes, told]
    remarks = [Note(note, "logs") for note in notes]
    if flags.logs_specs is not None:
        remarks.append(_remark("logs_specs", "logs", flags.logs_specs))
    if flags.log_line_prefix_template is not None:
        remarks.append(_remark("log_line_prefix_template", "logs"))
    keys: dict[str, Data] = {"dir": call.path(flags.log_dir)} if flags.log_dir else {}
    keys |= {} if shown is None else {"console": shown}
    return Draft({"logs": keys} if keys else {}, tuple(remarks))


def _shown(call: Call) -> tuple[Data, list[str]]:
    """`logs.console` (None = all), and what it can't say."""
    flags = call.flags
    redirects, tee = parse_std("redirects", flags.redirects), parse_std("tee", flags.tee)
    local_ranks = ranks_of(flags.local_ranks_filter)
    hidden = redirects & ~tee if isinstance(redirects, int) and isinstance(tee, int) else 1
    if hidden == 3:
        return "none", []
    notes = ["the console shows both streams of every rank in logs.console"] if hidden else []
    return (_ranks(call, local_ranks) if local_ranks else None), notes


def _ranks(call: Call, local_ranks: frozenset[int]) -> Data:
    """Ranks of these local ranks on every node, where their number is known; else on the first."""
    text, nodes = call.flags.nproc_per_node, call.nodes[1]
    procs = int(text) if text.isdecimal() else max(local_ranks) + 1
    return [
        node * procs + local
        for node in range(nodes if text.isdecimal() else 1)
        for local in sorted(local_ranks)
        if 0 <= local < procs
    ]
