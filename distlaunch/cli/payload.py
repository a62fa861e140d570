"""This program, for a machine that has nothing but Python: with what it imports, or `torchrun` alone."""

import ast
import hashlib
import importlib.util
import io
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

PACKAGES = (
    *("distlaunch", "yaml", "typer", "click", "shellingham", "annotated_doc", "typing_extensions"),
    *("rich", "markdown_it", "mdurl"),
)
"""Those that commands there need; which of them Typer is made of depends on its version."""

_MAIN = "from distlaunch.__main__ import main\nmain()\n"
"""What makes the unpacked folder a program: `python3 FOLDER`."""

_TOP = Path(__file__).parents[1]
_ROOTS = ("distlaunch.cli.torchrun", "distlaunch.transports.opening")
_UNUSED = (
    *("distlaunch.cli.remote", "distlaunch.runs.starts", "distlaunch.job.file"),
    "distlaunch.view.watching",
)
"""What its imports name for other commands: `run` with its options, and jobs that Slurm starts again."""


def payload_key() -> str:
    """What changes when any of its files does."""
    known = hashlib.sha256(_MAIN.encode())
    for name, path in _files():
        status = path.stat()
        known.update(f"{name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return known.hexdigest()[:24]


def payload() -> bytes:
    """The zip."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in _files():
            archive.write(path, name)
        archive.writestr("__main__.py", _MAIN)
    return packed.getvalue()


def torchrun_payload() -> bytes:
    """A .tar.xz, the same for the same sources, of what `distlaunch torchrun` needs, as source."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz", preset=9) as archive:
        sources = [(name, path.read_bytes()) for name, path in torchrun_modules()]
        for name, data in (*sources, ("__main__.py", _MAIN.encode())):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def _files() -> Iterator[tuple[str, Path]]:
    """(name in the zip, file) of every module, as source."""
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        origin = Path(spec.origin)
        if spec.submodule_search_locations is None:
            yield origin.name, origin
        else:
            for path in sorted(origin.parent.rglob("*.py")):
                yield str(path.relative_to(origin.parent.parent)), path


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
    return ".".join(path.relative_to(_TOP.parent).with_suffix("").parts).removesuffix(".__init__")
