"""Finds the messages that distlaunch can print, in its code, for the index in docs/messages.md."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

SHOWN = {
    "Cause": (0,),
    "Finding": (2, 3, 4),
    "ShowMessage": (1,),
    "_error": (1, 2, 3),
    "_warning": (1, 2, 3),
    "error": (1,),
    "remark": (0,),
    "say": (0,),
}
"""Functions and classes whose arguments are messages, with the positions of these."""
INTERNAL = {
    "ProtocolError",
    "TypeError",
    "OSError",
    "KeyError",
    "TimeoutError",
    "FileNotFoundError",
    "IndexError",
}
"""Exceptions that aren't printed, or not with these words."""
PAGES = (
    ("launch/snapshot|agent/(tree|setup)|supervisor/placing", "code-and-environments"),
    ("launch/(collecting|start|controller)|observers", "output"),
    ("launch/(join|gather|inbound)|compat/(flags|torchrun)|cli/torchrun", "torchrun"),
    ("launch/(link_check|node_check|port_check)|check", "check"),
    ("agent|supervisor|launch", "failures"),
    ("schedulers/(task|base|queue|slurm)|cli/(submit|exec)", "slurm"),
    ("schedulers/grid", "grid-engine"),
    ("schedulers/pbs", "pbs"),
    ("schedulers", "lsf-flux"),
    ("plan|job/nodes|transports", "nodes"),
    ("job|cli/(job_file|init|options)", "job-file"),
    ("compat|cli/import", "migrating"),
    ("kubernetes", "kubernetes"),
    ("runs/(html|report|bundle|timeline)|cli/report", "report"),
    ("api", "python"),
    ("runs|cli/(run|logs|prune|remote|own)", "runs"),
    ("", "commands"),
)
"""The page about each module: the first pattern that matches the beginning of its path counts."""
LEAST_WORDS = 4
DEPTH = 4


class Message(NamedTuple):
    """A message, with … for each inserted value, and the page about its subject."""

    text: str
    page: str


def messages(package: Path) -> list[Message]:
    """Return all messages in the modules of a package, by page, in alphabetical order."""
    found = set()
    for path in sorted(package.rglob("*.py")):
        module = path.relative_to(package).as_posix()
        page = next(page for pattern, page in PAGES if re.match(pattern, module))
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = _assignments(tree.body)
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                words = _Words(constants | _assignments(ast.walk(function)))
                texts = (re.sub("…{2,}", "…", text) for text in _of_function(function, words))
                found |= {Message(text, page) for text in texts if _is_message(text)}
    return sorted(found, key=lambda each: (each.page, re.sub(r"\W+", "", each.text).lower(), each))


def _is_message(text: str) -> bool:
    """Return whether a text has enough words of its own. Findings have three parts."""
    first, dot, _ = text.partition(" · ")
    return len(re.findall(r"[A-Za-z']{2,}", first)) >= LEAST_WORDS - bool(dot)


def _assignments(nodes: Iterable[ast.AST]) -> dict[str, list[tuple[int, ast.expr]]]:
    """Return the values of each name, with the lines at which it gets them, in order."""
    found: dict[str, list[tuple[int, ast.expr]]] = {}
    binds = (ast.Assign, ast.AugAssign, ast.For)
    for each in sorted((each for each in nodes if isinstance(each, binds)), key=lambda it: it.lineno):
        target = each.targets[0] if isinstance(each, ast.Assign) else each.target
        pairs: list[tuple[ast.AST, ast.expr]]
        if isinstance(each, ast.For):  # unknown values
            pairs = [(name, ast.Name("")) for name in ast.walk(target)]
        elif isinstance(target, ast.Tuple) and isinstance(each.value, ast.Tuple):
            pairs = [*zip(target.elts, each.value.elts, strict=False)]
        else:
            pairs = [(target, each.value)]
        for name, value in pairs:
            if isinstance(name, ast.Name):
                known = found.setdefault(name.id, [])
                added = isinstance(each, ast.AugAssign) and known
                known.append((each.lineno, ast.BinOp(known[-1][1], ast.Add(), value) if added else value))
    return found


def _of_function(function: ast.AST, words: "_Words") -> Iterator[str]:
    """Yield the messages in a function, those with conditional expressions twice."""
    for node in ast.walk(function):
        parts: list[ast.expr] = []
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            raised = name.endswith("Error") and name not in INTERNAL
            parts = [node.args[i] for i in SHOWN.get(name, (0,) if raised else ()) if i < len(node.args)]
            parts += [each.value for each in node.keywords if name in SHOWN and each.arg == "do"]
        elif isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple) and len(node.value.elts) == 2:
            parts = [node.value.elts[1]]  # the elements are a key of the job file, and what is wrong with it
        for words.otherwise in (False, True):
            words.line = getattr(node, "lineno", 0)
            yield " · ".join(filter(None, map(words.of, parts)))


class _Words:
    """Turns expressions into text. Names are replaced by what was last assigned to them."""

    def __init__(self, assigned: dict[str, list[tuple[int, ast.expr]]]) -> None:
        self._assigned = assigned
        self.line, self.otherwise = 0, False
        """The line of the expression, and whether to take the second values of conditional expressions."""

    def of(self, node: ast.AST, depth: int = 0) -> str:
        """Return the text of an expression, with … for unknown parts."""
        text = "…"
        match node:
            case ast.Constant(value=str(known)):
                text = known
            case ast.JoinedStr():
                text = "".join(self.of(part, depth) for part in node.values)
            case ast.FormattedValue():
                text = self.of(node.value, depth)
            case ast.BinOp(op=ast.Add()):
                text = self.of(node.left, depth) + self.of(node.right, depth)
            case ast.BinOp(op=ast.Mod(), left=ast.Constant(value=str(known))):
                text = re.sub(r"%(?:\.\d+)?\w", "…", known)
            case ast.IfExp():
                first, second = (node.orelse, node.body) if self.otherwise else (node.body, node.orelse)
                text = self.of(first, depth) or self.of(second, depth)
            case ast.Call(func=ast.Attribute(attr="get"), args=[_, default]):
                text = self.of(default, depth)
            case ast.Name() if depth < DEPTH:
                before = [each for each in self._assigned.get(node.id, ()) if each[0] <= self.line]
                if before:
                    here, (self.line, value) = self.line, before[-1]
                    self.line -= 1  # a value may contain the name's earlier value
                    text, self.line = self.of(value, depth + 1), here
        return text
