"""Job files for Slurm batch scripts, parsed with the tree-sitter grammar of bash."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from math import prod
from os.path import basename
from typing import TYPE_CHECKING

from distlaunch.compat import from_torchrun as torchrun
from distlaunch.compat.draft import Draft
from distlaunch.contract import RESERVED
from distlaunch.errors import Problem, UsageError
from distlaunch.job.document import Data, Place, value_of
from distlaunch.schedulers.slurm import SIGNAL, Slurm, count_gpus

if TYPE_CHECKING:
    from tree_sitter import Node

_LETTERS = {
    **dict(zip("ACDJNW", ("account", "constraint", "chdir", "job-name", "nodes", "wait"), strict=True)),
    **dict(zip("acdeno", ("array", "cpus-per-task", "dependency", "error", "ntasks", "output"), strict=True)),
    **dict(zip("Gpqtwx", ("gpus", "partition", "qos", "time", "nodelist", "exclude"), strict=True)),
    "tasks-per-node": "ntasks-per-node",
}
"""Short options of sbatch and srun, and other spellings."""
_FLAGS = (
    *"EHKOQXZklsuv",
    *("label", "unbuffered", "exclusive", "overlap", "exact", "oversubscribe", "overcommit"),
    *("kill-on-bad-exit", "no-kill", "pty", "quiet", "verbose"),
)
"""Options that don't take the next word as their value."""
_COUNTS = ("nodes", "ntasks", "ntasks-per-node", "cpus-per-task")
_VARIABLES = {
    **{f"SLURM_{name.replace('-', '_').upper()}": name for name in (*_COUNTS, "gpus-per-node", "job-name")},
    **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), "nodes"),
}
"""Slurm variables, keyed by the options that set them."""
_LEFT_OUT = {
    **dict.fromkeys(("output", "error", "open-mode"), "each rank's output is in logs.dir"),
    **dict.fromkeys(("requeue", "no-requeue"), "set restarts.requeue"),
    **dict.fromkeys(("wait", "parsable", "wrap"), "it affects only the sbatch command"),
    "gpus": "this total isn't a multiple of the nodes; set gpus_per_node",
    "array": "an array would start the same job many times; submit each job separately",
}
_SETUP = r"(module|ml|source|\.|ulimit|umask|(conda|(micro)?mamba) activate|spack (load|env))\s|eval \"?\$\("
"""Commands that prepare the environment. `distlaunch submit` also runs them in its batch script."""
_RENDEZVOUS = r"\b(scontrol|MASTER_(ADDR|PORT)|SLURM_\w*(NODELIST|PROCID|NODEID))\b"
_PERHAPS = r"\b(hostname|RANDOM)\b"
"""A variable with such a value also belongs to the rendezvous, unless it is exported for the program."""
_OF_COMMAND = r"[\s'\"\\]*(--|\S*(torchrun|accelerate|python))"
"""The beginning of a value that is part of the command and may contain rendezvous flags."""
_ASSIGNED = {"variable_assignment", "variable_name"}
_COMMANDS = ("command", "redirected_statement", "pipeline", "list")
MAX_CHARACTERS = 1 << 15
"""Maximum characters of a script (tree-sitter is slow on nonsense), and of expanded variables."""
_PLACE = "relative paths are relative to this file: keep it in the directory where sbatch was run"


def sbatch_draft(text: str, source: str, cpus: int) -> Draft:
    """Draft a job from a batch script; `cpus` is the number of CPUs of this machine.

    Raises `UsageError` or `JobError`.
    """
    draft = Draft(source, typed=True)
    try:
        script = _Script(text)
        line = script.launch()
        draft.note(f"queue it with `distlaunch submit`; {_PLACE}")
        if script.setup:  # The activated environment comes first in PATH.
            draft.set("python", "python")
            draft.set("slurm.setup", script.setup)
        draft.note(*line.notes, *script.left)
        options = _of_the_step(script.options, _srun_options(line.before))
        _add_ranks(draft, line, options, cpus)
        used = {*re.findall(r"\w+", " ".join(map(str, draft.keys.get("args", ()))))}
        for name in [name for name in script.rendezvous if name in used]:
            number = script.rendezvous.pop(name)
            draft.note(
                f"left out: line {number}: the value of {name} needs a shell: set it in args", key="args"
            )
        torchrun.note_rendezvous(draft, line.words, script.rendezvous.values())
        _add_requests(draft, _divided(options))
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None
    return draft.checked()


def _add_ranks(draft: Draft, line: torchrun.Line, options: Mapping[str, str], cpus: int) -> None:
    """Add the program and its ranks, as started by torchrun."""
    words = list(line.words)
    if _accelerates(words):
        flags, program = _accelerated(words[2:])
        if flags:
            draft.note(f"not understood: `accelerate launch {shlex.join(flags)}`: set procs_per_node and env")
        words = ["torchrun", "--nproc-per-node=gpu", *program]
    elif not torchrun.launched(words, 0):
        words = torchrun.started_directly(draft, words, f"--nproc-per-node={_tasks(options)}")
    torchrun.add_torchrun(draft, line._replace(words=words), cpus, hosts_known=True)


def _launches(words: Sequence[str], at: int = 0) -> bool:
    """Check whether the word at index `at` starts torchrun or `accelerate launch`."""
    return _accelerates(words[at:]) or torchrun.launched(words, at) is not None


def _accelerates(words: Sequence[str]) -> bool:
    return basename(words[0]) == "accelerate" and list(words[1:2]) == ["launch"]


def _accelerated(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments of `accelerate launch` into its flags, and the program as words for torchrun."""
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
    """Return (name, value) of each sbatch or srun option; "" = no value. A stray word gets the name ""."""
    found: list[tuple[str, str]] = []
    for word in words:
        name, _, value = word[2:].partition("=") if word.startswith("--") else (word[1:2], "", word[2:])
        if word.startswith("-"):
            found.append((_LETTERS.get(name, name), value))
        elif found and found[-1][0] and not found[-1][1] and found[-1][0] not in _FLAGS:
            found[-1] = (found[-1][0], word)
        else:
            found.append(("", word))
    return found


def _srun_options(words: Sequence[str]) -> dict[str, str]:
    """Return srun's own options among the words before a program, which other programs may precede."""
    own = list(words)[[*map(basename, words), "srun"].index("srun") + 1 :] or words
    return dict(takewhile(lambda option: option[0], _options(own)))


def _of_the_step(options: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Return the options of a batch script with those of its step, for which `--ntasks` is a total."""
    counts = {name: text for name, text in own.items() if name in _COUNTS}
    if "ntasks" in counts:
        options = {name: text for name, text in options.items() if name != "ntasks-per-node"}
        nodes = min(_count({**options, **counts}, "nodes") or 1, _count(counts, "ntasks") or 1)
        counts = {"nodes": str(nodes), **counts}
    return {**options, **counts}


def _count(options: Mapping[str, str], name: str) -> int:
    text = options.get(name, "0")
    if not text.isdecimal():
        raise UsageError(f"--{name}={text}: expected a number")
    return int(text)


def _tasks(options: Mapping[str, str]) -> int:
    """Return the number of Slurm tasks per node."""
    total = _count(options, "ntasks") // (_count(options, "nodes") or 1)
    return _count(options, "ntasks-per-node") or total or 1


def _gpus(options: Mapping[str, str]) -> int | None:
    """Return the number of GPUs per node."""
    gres = re.search(r"\bgpu(?::[^,:]+)?:(\d+)", options.get("gres", ""))
    text = options.get("gpus-per-node", gres[1] if gres else "")
    return count_gpus(text) if text.isascii() else None


def _divided(options: Mapping[str, str]) -> dict[str, str]:
    """Replace --gpus, a total such as `a100:8`, with --gpus-per-node, if all nodes get equal shares."""
    total = re.fullmatch(r"(?a)(\w+:|)(\d{1,6})", options.get("gpus", ""))
    if not total or int(total[2]) % (nodes := _count(options, "nodes") or 1):
        return {**options}
    others = {name: text for name, text in options.items() if name != "gpus"}
    return {"gpus-per-node": f"{total[1]}{int(total[2]) // nodes}", **others}


def _add_requests(draft: Draft, options: Mapping[str, str]) -> None:
    """Add the resources requested from Slurm. Slurm's tasks become workers."""
    gpus = _gpus(options)
    nodes, tasks = _count(options, "nodes") or 1, _count(options, "ntasks")
    draft.set("nodes", nodes)
    if tasks % nodes and "ntasks-per-node" not in options:
        what = f"{tasks} tasks can't be divided evenly among {nodes} nodes"
        draft.note(f"{what}; each node gets {tasks // nodes or 1}", key="nodes")
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
        if name == "signal" and re.match(SIGNAL, value):
            data = _warning(draft, value)
        if name in _LEFT_OUT:
            draft.note(f"left out: {given}: {_LEFT_OUT[name]}", key="slurm")
        elif name in (*_VARIABLES.values(), "chdir"):
            continue
        elif _fits(key, data):
            draft.set(f"slurm.{key}", data)
        else:
            extra.append(given)
    draft.set("slurm.extra", extra or None)


def _warning(draft: Draft, text: str) -> str:
    """Return the value of --signal. distlaunch forwards the signal to the ranks if srun would."""
    flags, which, at = text.rpartition(":")[0], *re.split("(?=@|$)", text.rpartition(":")[2], maxsplit=1)
    name = which.removeprefix("SIG")
    if name not in ("USR1", "USR2"):
        draft.note(
            f"--signal={text}: USR1 warns distlaunch; on_warning chooses what the ranks get", key="slurm"
        )
        return f"USR1{at}"
    draft.set("on_warning", None if "B" in flags else name)
    return f"{flags}:{name}{at}".lstrip(":")


def _fits(key: str, value: Data) -> bool:
    """Check whether the slurm section of a job file accepts a key and value."""
    problems: list[Problem] = []
    Slurm.section.check(value_of({key: value}, Place("")), "", problems)
    return not problems


class _Script:
    """A batch script, read statement by statement: requests, variables, launches, and comments on the rest.

    `rendezvous` maps variables used to find hosts and ports to their line numbers.
    """

    def __init__(self, text: str) -> None:
        self.options: dict[str, str] = {}
        self.setup: list[str] = []
        self.left: list[str] = []  # comments on statements that are left out
        self._known: dict[str, str] = {}  # variables whose values are known
        self._env: dict[str, str] = {}  # exported variables
        self.rendezvous: dict[str, int] = {}
        self._launches: list[tuple[int, torchrun.Line]] = []
        self._room = MAX_CHARACTERS  # for expanded variables
        self._source = text
        nodes = _parse(text).named_children
        started = next((i for i, node in enumerate(nodes) if node.type != "comment"), len(nodes))
        for i, node in enumerate(nodes):
            try:
                self._take(node, i < started)
            except ValueError:  # shlex reads some quotes differently
                self._leave(node)
            except UsageError as error:
                self._leave(node, str(error))

    def launch(self) -> torchrun.Line:
        """Return the only command that starts ranks."""
        if len(self._launches) > 1:
            lines = ", ".join(str(line) for line, _ in self._launches)
            what = f"lines {lines} all start ranks, but a job file has one program"
            raise UsageError(f"{what}: comment out all but one")
        if self._launches:
            return self._launches[0][1]
        hint = "found no srun with Python, torchrun or accelerate outside of if, for and functions"
        if re.search(r"^[^#\n]*\bdistlaunch (run|exec)", self._source, re.MULTILINE):
            raise UsageError("this script already starts distlaunch: submit it with sbatch")
        close = [text for text in self.left if re.search("srun|torchrun|accelerate|python", text)]
        raise UsageError("; ".join((hint, *close[:3])))

    def _take(self, node: "Node", leads: bool) -> None:
        """Classify a statement; `leads` = only comments come before it."""
        text = self._text(node)
        parts = [node] if node.type == "variable_assignment" else node.named_children
        if node.has_error:
            self._leave(node, "syntax error")
        elif node.type == "comment":
            if text.startswith("#SBATCH"):
                self._request(node, leads)
        elif node.type in _COMMANDS and self._run(node):
            pass
        elif self._launches:
            self._leave(node, "left out because it comes after the ranks")
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
        """Read an #SBATCH line; sbatch ignores such lines after the first command."""
        given = _options(shlex.split(self._text(node)[7:], comments=True))
        if not leads or any(not re.fullmatch(r"[A-Za-z][\w-]*", name) for name, _ in given):
            self._leave(node, "not understood" if leads else "sbatch ignores it after the first command")
            return
        self.options |= given
        self._known = {name: self.options[key] for name, key in _VARIABLES.items() if key in self.options}
        self._known["SLURM_GPUS_ON_NODE"] = str(_gpus(_divided(self.options)) or "$SLURM_GPUS_ON_NODE")

    def _assign(self, node: "Node", exported: bool) -> None:
        """Record the value of a variable. A value that needs a shell becomes part of the setup."""
        text = self._filled(node)
        name, equals, value = text.partition("=")
        telling = _RENDEZVOUS if exported else f"{_RENDEZVOUS}|{_PERHAPS}"
        wires = re.search(telling, text) or self.rendezvous.keys() & re.findall(r"\w+", text)
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
        """Record the launch if a statement starts ranks, and return whether it does."""
        given = torchrun.shell_words(self._filled(node))
        words = [word for word in given if word not in ("$@", "$*")]
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
            raise UsageError("syntax error")
        env = [f"{name}={value}" for name, value in self._env.items()]
        notes = [f"line {_line(node)}: {note}" for note in line.notes]
        if words != given:
            notes.append(
                "left out: the script's own arguments; `distlaunch submit` takes them after the file"
            )
        self._launches.append((_line(node), torchrun.Line([*env, *line.before], line.words, notes)))
        return True

    def _leave(self, node: "Node", why: str = "not understood") -> None:
        """Add a comment on a statement, and forget variables that it may have changed."""
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
        """Return the text of a statement, with known variables expanded."""
        at, parts, left = node.start_byte, [], [node]
        while left:
            each = left.pop()
            value = self._value(each) if "expansion" in each.type else None
            if value is None or len(value) > self._room:
                left += reversed(each.children)
                continue
            self._room -= len(value)
            # In a string, tree-sitter-bash counts blanks as part of the next node.
            parts += [self._source[at : each.end_byte - len(self._text(each).lstrip())], value]
            at = each.end_byte
        return "".join([*parts, self._source[at : node.end_byte]]).replace("\\\n", "")

    def _value(self, expansion: "Node") -> str | None:
        """Return the value of $NAME, ${NAME} or the product $((A * B)), if known."""
        names = re.findall(r"\w+", self._text(expansion))
        if re.fullmatch(r"\s*\$\{?\w+\}?", self._text(expansion)):
            return self._known.get(names[0])
        factors = [self._known.get(name, name) for name in names]
        product = re.fullmatch(r"\s*\$\(\([\s${}]*\w+}?(\s*\*[\s${]*\w+}?)+\s*\)\)", self._text(expansion))
        return str(prod(map(int, factors))) if product and all(map(str.isdecimal, factors)) else None


def _parse(text: str) -> "Node":
    if len(text) > MAX_CHARACTERS:
        raise UsageError(f"expected a batch script of at most {MAX_CHARACTERS:,} characters")
    try:
        from tree_sitter import Language, Parser
        from tree_sitter_bash import language
    except ImportError:
        hint = "reading a batch script needs tree-sitter: pip install 'distlaunch[sbatch]'"
        raise UsageError(hint) from None
    # tree-sitter-bash passes characters to C's isalpha(), which can crash on characters above 255.
    plain = re.sub("[^\0-\x7f]", "_", text).encode()
    return Parser(Language(language())).parse(plain).root_node


def _line(node: "Node") -> int:
    return node.start_point.row + 1
