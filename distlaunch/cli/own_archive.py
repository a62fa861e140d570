"""Archives of this program for machines that have only Python: the complete program, or only `torchrun`."""

import ast
import hashlib
import importlib.util
import io
import tarfile
import zipfile
from collections.abc import Iterator
from modulefinder import ModuleFinder
from pathlib import Path

PACKAGES = (
    *("distlaunch", "yaml", "typer", "click", "shellingham", "annotated_doc", "typing_extensions"),
    *("rich", "markdown_it", "mdurl"),
)
"""Packages needed by commands on the other machine. Some Typer versions don't use all of them."""

_MAIN = "from distlaunch.__main__ import main\nmain()\n"
"""The main module of the unpacked directory, for `python3 DIRECTORY`."""

_TOP = Path(__file__).parents[1]
_ROOTS = (
    *("distlaunch.__main__", "distlaunch.cli.torchrun", "distlaunch.launch.opening"),
    "distlaunch.observers.terminal",  # named only in a table
)
_UNUSED = (
    *("distlaunch.cli.app", "distlaunch.cli.exec_task", "distlaunch.cli.remote", "distlaunch.api"),
    "distlaunch.cli.job_file",
)
"""Modules that only other commands import, such as `run` with its options."""


def payload_key() -> str:
    """Return a digest that changes whenever any of the files changes.

    The digest is the key in the cache of `cli.remote` on the other machine.
    """
    known = hashlib.sha256(_MAIN.encode())
    for name, path in _files():
        status = path.stat()
        known.update(f"{name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return known.hexdigest()[:24]


def payload() -> bytes:
    """Return the complete program as a zip."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in _files():
            archive.write(path, name)
        archive.writestr("__main__.py", _MAIN)
    return packed.getvalue()


def torchrun_payload() -> bytes:
    """Return the sources for `distlaunch torchrun`, without comments, as a reproducible .tar.xz."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz", preset=9) as archive:
        sources = [(name, _bare(path.read_bytes())) for name, path in torchrun_modules()]
        for name, data in (*sources, ("__main__.py", _MAIN.encode())):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def _bare(source: bytes) -> bytes:
    """Return a module without comments and docstrings, since `kubectl apply` takes at most 256 KiB."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [each for each in node.body if not _is_text(each)] or [ast.Pass()]
    return ast.unparse(tree).encode()


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _files() -> Iterator[tuple[str, Path]]:
    """Yield (name in the zip, file) of every module and style sheet."""
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        origin = Path(spec.origin)
        if spec.submodule_search_locations is None:
            yield origin.name, origin
        else:
            for path in sorted(each for each in origin.parent.rglob("*") if each.suffix in (".py", ".css")):
                yield str(path.relative_to(origin.parent.parent)), path


def torchrun_modules() -> list[tuple[str, Path]]:
    """Return (path in the archive, file) of each module in `agent`, or imported by `torchrun`."""
    finder = ModuleFinder([str(_TOP.parent)], excludes=_UNUSED)
    agents = (f"distlaunch.agent.{path.stem}" for path in (_TOP / "agent").glob("[!_]*.py"))
    for name in (*_ROOTS, *agents):
        finder.import_hook(name)
    found = {vars(module)["__file__"] for module in finder.modules.values()} - {None}  # of built-in modules
    return [(str(Path(file).relative_to(_TOP.parent)), Path(file)) for file in sorted(found)]
