"""A job file that does what a Slurm batch script does, as tree-sitter's grammar of bash reads it."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from os.path import basename
from typing import TYPE_CHECKING

from distlaunch.compat import from_torchrun as torchrun
from distlaunch.compat.draft import Data, Draft, value_of
from distlaunch.contract import RESERVED
from distlaunch.errors import Problem, UsageError
from distlaunch.job.document import Place
from distlaunch.schedulers.slurm import Slurm, count_gpus

if TYPE_CHECKING:
    from tree_sitter import Node

_LETTERS = {
    **dict(zip("ACDJNW", ("account", "constraint", "chdir", "job-name", "nodes", "wait"), strict=True)),
    **dict(zip("acdeno", ("array", "cpus-per-task", "dependency", "error", "ntasks", "output"), strict=True)),
    **dict(zip("pqtwx", ("partition", "qos", "time", "nodelist", "exclude"), strict=True)),
}
"""Short options of sbatch and srun."""
_COUNTS = ("nodes", "ntasks", "ntasks-per-node", "cpus-per-task")
_VARIABLES = {
    **{f"SLURM_{name.replace('-', '_').upper()}": name for name in (*_COUNTS, "gpus-per-node", "job-name")},
    **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), "nodes"),
}
"""Slurm's variables, and the options that they come from."""
_LEFT_OUT = {
    **dict.fromkeys(("output", "error", "open-mode"), "each rank's output is in logs.dir"),
    **dict.fromkeys(("requeue", "no-requeue"), "set restarts.requeue"),
    **dict.fromkeys(("wait", "parsable", "wrap"), "it is for the sbatch command"),
    "array": "an array would start the same job many times; submit each by itself",
}
_SETUP = r"(module|ml|source|\.|ulimit|umask|(conda|(micro)?mamba) activate|spack (load|env))\s|eval \"?\$\("
"""Commands that prepare the environment: the batch script of `distlaunch submit` runs them, too."""
_RENDEZVOUS = r"\b(scontrol|hostname|RANDOM|MASTER_(ADDR|PORT)|SLURM_\w*(NODELIST|PROCID|NODEID))\b"
_OF_COMMAND = r"[\s'\"\\]*(--|\S*(torchrun|accelerate|python))"
"""How a value begins that is a part of the command, in which flags for the rendezvous may be."""
_ASSIGNED = {"variable_assignment", "variable_name"}
_COMMANDS = ("command", "redirected_statement", "pipeline", "list")
MAX_CHARACTERS = 1 << 15
"""Of a script, where tree-sitter takes long to make sense of nonsense; and of the values filled in."""
_PLACE = "relative paths are relative to this file: keep it in the directory where sbatch was run"


def sbatch_draft(text: str, source: str, cpus: int) -> Draft:
    """The job of a batch script; `cpus` are this machine's. Raises `UsageError` or `JobError`."""
    draft = Draft(source, typed=True)
    try:
        script = _Script(text)
        line = script.launch()
        draft.note(f"queue it with `distlaunch submit`; {_PLACE}")
        if script.setup:  # What it activates is first in PATH.
            draft.set("python", "python")
            draft.set("slurm.setup", script.setup)
        torchrun.note_rendezvous(draft, line.words, script.rendezvous.values())
        for note in (*line.notes, *script.left):
            draft.note(note)
        options = script.options | {name: text for name, text in _options(line.before) if name in _COUNTS}
        _add_ranks(draft, line, options, cpus)
        _add_requests(draft, options)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None
    return draft.checked()


def _add_ranks(draft: Draft, line: torchrun.Line, options: Mapping[str, str], cpus: int) -> None:
    """Add the program and its ranks, as torchrun would start them."""
    words = list(line.words)
    if torchrun.launched(words, 0):
        torchrun.add_torchrun(draft, line, cpus, hosts_known=True)
        return
    if _launches(words):
        flags, program = _accelerated(words[2:])
        if flags:
            draft.note(f"not understood: `accelerate launch {shlex.join(flags)}`: set procs_per_node and env")
        words = ["torchrun", "--nproc-per-node=gpu", *program]
    else:
        draft.set("python", words[0])
        program = words[2:] if words[1:2] == ["-u"] else words[1:]
        runs = program[:1] == ["-m"] or not "".join(program[:1]).startswith("-")
        procs = f"--nproc-per-node={_tasks(options)}"
        words = ["torchrun", procs, *(program if runs else ["--no-python", *words])]
    torchrun.add_torchrun(draft, line._replace(words=words), cpus, hosts_known=True)


def _launches(words: Sequence[str], at: int = 0) -> bool:
    """Whether the word there starts torchrun or `accelerate launch`."""
    accelerate = basename(words[at]) == "accelerate" and list(words[at + 1 : at + 2]) == ["launch"]
    return accelerate or torchrun.launched(words, at) is not None


def _accelerated(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """What follows `accelerate launch`: its flags with their values, and torchrun's words for the program."""
    rest, flags, kind = list(words), list[str](), list[str]()
    while rest and rest[0].startswith("-"):
        flag = rest.pop(0)
        if flag in ("-m", "--module", "--no_python"):
            kind = ["--no-python" if flag == "--no_python" else "--module"]
            continue
        flags.append(flag)
        if "=" not in flag and rest and not re.match(r"-|.*\.py$", rest[0]):
            flags.append(rest.pop(0))
    return flags, [*kind, *rest]


def _options(words: Iterable[str]) -> list[tuple[str, str]]:
    """(name, value) of each option of sbatch or srun, "" for no value; name "" for a word that is none."""
    found: list[tuple[str, str]] = []
    for word in words:
        name, _, value = word[2:].partition("=") if word.startswith("--") else (word[1:2], "", word[2:])
        if word.startswith("-"):
            found.append((_LETTERS.get(name, name), value))
        elif found and found[-1][0] and not found[-1][1]:
            found[-1] = (found[-1][0], word)
        else:
            found.append(("", word))
    return found


def _count(options: Mapping[str, str], name: str) -> int:
    text = options.get(name, "0")
    if not text.isdecimal():
        raise UsageError(f"--{name}={text}: expected a number")
    return int(text)


def _tasks(options: Mapping[str, str]) -> int:
    """Slurm's tasks on each node."""
    total = _count(options, "ntasks") // (_count(options, "nodes") or 1)
    return _count(options, "ntasks-per-node") or total or 1


def _gpus(options: Mapping[str, str]) -> int | None:
    """GPUs of each node."""
    gres = re.search(r"\bgpu(?::[^,:]+)?:(\d+)", options.get("gres", ""))
    text = options.get("gpus-per-node", gres[1] if gres else "")
    return count_gpus(text) if text.isascii() else None


def _add_requests(draft: Draft, options: Mapping[str, str]) -> None:
    """Add what the script asks of Slurm, whose tasks are the job's workers."""
    gpus = _gpus(options)
    draft.set("nodes", _count(options, "nodes") or 1)
    draft.set("gpus_per_node", gpus)
    draft.set("name", options.get("job-name"))
    draft.set("workdir", options.get("chdir"))
    if cpus := _count(options, "cpus-per-task") * _tasks(options):
        workers = draft.keys.get("procs_per_node", gpus or 1)
        draft.set("slurm.cpus_per_task", max(1, cpus // workers))
    if ":" in options.get("gpus-per-node", ""):
        draft.set("slurm.gpus", options["gpus-per-node"])
    extra = []
    for name, value in options.items():
        flag, equals = (f"--{name}", "=") if name[1:] else (f"-{name}", " ")
        given = f"{flag}{equals}{shlex.quote(value)}" if value else flag
        key = name.replace("-", "_")
        data = f"{value}m" if name == "time" and value.isdecimal() else value or True
        if name in _LEFT_OUT:
            draft.note(f"left out: {given}: {_LEFT_OUT[name]}", "slurm")
        elif name in (*_VARIABLES.values(), "chdir"):
            continue
        elif _fits(key, data):
            draft.set(f"slurm.{key}", data)
        else:
            extra.append(given)
    draft.set("slurm.extra", extra or None)


def _fits(key: str, value: Data) -> bool:
    """Whether a job file's slurm section may say so."""
    problems: list[Problem] = []
    Slurm.section.check(value_of({key: value}, Place("")), "", problems)
    return not problems


class _Script:
    """A batch script, statement by statement: what it requests, sets and starts, and comments on the rest.

    `rendezvous` has the variables that help to find hosts and ports, and their lines.
    """

    def __init__(self, text: str) -> None:
        self.options: dict[str, str] = {}
        self.setup: list[str] = []
        self.left: list[str] = []
        self._known: dict[str, str] = {}
        self._env: dict[str, str] = {}
        self.rendezvous: dict[str, int] = {}
        self._launches: list[tuple[int, torchrun.Line]] = []
        self._room = MAX_CHARACTERS
        self._source = text
        nodes = _parse(text).named_children
        started = next((i for i, node in enumerate(nodes) if node.type != "comment"), len(nodes))
        for i, node in enumerate(nodes):
            try:
                self._take(node, i < started)
            except ValueError:  # quotes that tree-sitter reads otherwise than shlex
                self._leave(node)
            except UsageError as error:
                self._leave(node, str(error))

    def launch(self) -> torchrun.Line:
        """The one command that starts ranks."""
        if len(self._launches) > 1:
            lines = ", ".join(str(line) for line, _ in self._launches)
            raise UsageError(f"lines {lines} start ranks: a job file has one program; import one at a time")
        if self._launches:
            return self._launches[0][1]
        told = "no srun with Python, torchrun or accelerate, outside of if, for and functions"
        close = [text for text in self.left if re.search("srun|torchrun|accelerate|python", text)]
        raise UsageError("; ".join((told, *close[:3])))

    def _take(self, node: "Node", leads: bool) -> None:
        """Find what a statement does; it `leads` if only comments are before it."""
        text = self._text(node)
        parts = [node] if node.type == "variable_assignment" else node.named_children
        if node.has_error:
            self._leave(node, "a syntax error")
        elif node.type == "comment":
            if text.startswith("#SBATCH"):
                self._request(node, leads)
        elif node.type in _COMMANDS and self._run(node):
            pass
        elif self._launches:
            self._leave(node, "left out behind the ranks")
        elif parts and node.type != "unset_command" and {part.type for part in parts} <= _ASSIGNED:
            for part in parts:
                self._assign(part, text.startswith("export"))
        elif node.type in _COMMANDS[:2] and re.match(_SETUP, text):
            self.setup += self._filled(node).splitlines()
        elif place := re.fullmatch(r"cd\s+([^\s$`]+)", self._filled(node)):
            self.options["chdir"] = place[1]
        else:
            self._leave(node)

    def _request(self, node: "Node", leads: bool) -> None:
        """Read an #SBATCH line; those behind the first command mean nothing to sbatch."""
        given = _options(shlex.split(self._text(node)[7:], comments=True))
        if not leads or any(not re.fullmatch(r"[A-Za-z][\w-]*", name) for name, _ in given):
            self._leave(node, "not understood" if leads else "sbatch ignores it behind the first command")
            return
        self.options |= given
        self._known = {name: self.options[key] for name, key in _VARIABLES.items() if key in self.options}
        self._known["SLURM_GPUS_ON_NODE"] = str(_gpus(self.options) or "$SLURM_GPUS_ON_NODE")

    def _assign(self, node: "Node", exported: bool) -> None:
        """Note a variable's value; one that only a shell can tell is for the setup."""
        text = self._filled(node)
        name, equals, value = text.partition("=")
        wires = re.search(_RENDEZVOUS, text) or self.rendezvous.keys() & re.findall(r"\w+", text)
        if name in RESERVED or (wires and not re.match(_OF_COMMAND, value)):
            self.rendezvous[name] = _line(node)
            return
        if not name.isidentifier() or value.startswith("("):
            self._leave(node)
            return
        known = " ".join(shlex.split(value.replace("\\$", "$"))) if equals else self._known.get(name, "$")
        exported = exported or name in self._env
        self._known.pop(name, None)
        self._env.pop(name, None)
        if not re.search(r"['\"\\`()]", known):
            self._known[name] = known.replace("\n", " ")
        if exported and not re.search(r"[$`]", known):
            self._env[name] = known
        elif exported and not wires:
            self.setup += f"export {text}".splitlines()

    def _run(self, node: "Node") -> bool:
        """Whether a statement starts ranks."""
        words = torchrun.shell_words(self._filled(node))
        starts = (i for i, word in enumerate(words) if torchrun.is_python(word) or _launches(words, i))
        line = torchrun.cut_line(words, next(starts, None))
        if line is None:
            return False
        direct = not line.commands and _launches(line.words)
        if line.commands[:1] == ["echo"] or not ("srun" in line.commands or direct):
            return False
        behind = node.next_named_sibling
        gap = self._source[node.end_byte : behind.start_byte] if behind and behind.has_error else "\n"
        if not re.search(r"(?<!\\)\n", gap):
            raise UsageError("a syntax error")
        env = [f"{name}={value}" for name, value in self._env.items()]
        notes = [f"line {_line(node)}: {note}" for note in line.notes]
        self._launches.append((_line(node), torchrun.Line([*env, *line.before], line.words, notes)))
        return True

    def _leave(self, node: "Node", why: str = "not understood") -> None:
        """Comment on a statement; the variables that it names may have other values behind it."""
        text, first = self._text(node), _line(node)
        lines = f"lines {first}-{node.end_point.row + 1}" if "\n" in text else f"line {first}"
        self.left.append(f"{lines}: {why}: `{text.partition(chr(10))[0][:80]}`")
        for name in re.findall(r"(?<![\w${])[A-Za-z_]\w*", text):
            self._known.pop(name, None)
            if node.type == "unset_command":
                self._env.pop(name, None)

    def _text(self, node: "Node") -> str:
        return self._source[node.start_byte : node.end_byte]

    def _filled(self, node: "Node") -> str:
        """A statement's text with the values of the variables that are known."""
        at, parts, left = node.start_byte, [], [node]
        while left:
            each = left.pop()
            value = self._value(each) if "expansion" in each.type else None
            if value is None or len(value) > self._room:
                left += reversed(each.children)
                continue
            self._room -= len(value)
            # tree-sitter-bash has blanks in a string begin what follows them.
            parts += [self._source[at : each.end_byte - len(self._text(each).lstrip())], value]
            at = each.end_byte
        return "".join([*parts, self._source[at : node.end_byte]]).replace("\\\n", "")

    def _value(self, expansion: "Node") -> str | None:
        """The value of $NAME, ${NAME} or the product $((A * B)), if it is known."""
        names = re.findall(r"\w+", self._text(expansion))
        if re.fullmatch(r"\s*\$\{?\w+\}?", self._text(expansion)):
            return self._known.get(names[0])
        factors = [self._known.get(name, name) for name in names]
        product = re.fullmatch(r"\s*\$\(\([\s${}]*\w+}?(\s*\*[\s${]*\w+}?)+\s*\)\)", self._text(expansion))
        return str(prod(map(int, factors))) if product and all(map(str.isdecimal, factors)) else None


def _parse(text: str) -> "Node":
    if len(text) > MAX_CHARACTERS:
        raise UsageError(f"expected a batch script; this is longer than {MAX_CHARACTERS:,} characters")
    try:
        from tree_sitter import Language, Parser
        from tree_sitter_bash import language
    except ImportError:
        told = "reading a batch script needs tree-sitter: pip install 'distlaunch[sbatch]'"
        raise UsageError(told) from None
    # tree-sitter-bash passes characters to C's isalpha(), which may crash for those beyond bytes.
    plain = re.sub("[^\0-\x7f]", "_", text).encode()
    return Parser(Language(language())).parse(plain).root_node


def _line(node: "Node") -> int:
    return node.start_point.row + 1
