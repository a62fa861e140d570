"""Which modules `distlaunch torchrun` may ever import, as their sources tell: also those for a failure."""

import ast
from collections.abc import Iterator
from pathlib import Path

_TOP = Path(__file__).parents[1]
_ROOTS = ("distlaunch.cli.torchrun", "distlaunch.links.ahead")
_UNUSED = ("distlaunch.view.watching", "distlaunch.catalog.starts")
"""What its imports name for other commands: `run --view`, and jobs that Slurm starts again."""


def torchrun_modules() -> list[tuple[str, Path]]:
    """(path below the folder of the package, file) of each; agents are sent all of `agent`."""
    files = {_name(path): path for path in sorted(_TOP.rglob("*.py"))}
    agents = [name for name in files if name.startswith("distlaunch.agent")]
    wanted = {"distlaunch.__main__"} | _reached([*_ROOTS, *agents], files)
    return [(str(files[name].relative_to(_TOP.parent)), files[name]) for name in sorted(wanted)]


def _reached(names: list[str], files: dict[str, Path]) -> set[str]:
    found: set[str] = set()
    while names:
        name = names.pop()
        if name in found or name not in files or name in _UNUSED:
            continue
        found.add(name)
        names += [name.rpartition(".")[0], *_imports(files[name])]
    return found


def _imports(path: Path) -> Iterator[str]:
    """What a module imports, wherever in it; a name that it imports from a package may be a module."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _name(path: Path) -> str:
    """Of the module in a file."""
    parts = path.relative_to(_TOP.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
