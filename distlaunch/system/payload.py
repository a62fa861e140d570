"""This program, for a machine that has nothing but Python: with what it imports, or `torchrun` alone."""

import hashlib
import importlib.util
import io
import os
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
    from distlaunch.system.imported import torchrun_modules

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz", preset=9) as archive:
        for name, path in torchrun_modules():
            _add(archive, name, path.read_bytes())
        _add(archive, "__main__.py", _MAIN.encode())
    return packed.getvalue()


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    archive.addfile(entry, io.BytesIO(data))


def _files() -> Iterator[tuple[str, Path]]:
    """(name in the zip, file) of every module, as source."""
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        origin = Path(spec.origin)
        if spec.submodule_search_locations is None:
            yield origin.name, origin
            continue
        for place, folders, names in os.walk(origin.parent):
            folders.sort()
            for name in sorted(names):
                if name.endswith(".py"):
                    path = Path(place, name)
                    yield str(path.relative_to(origin.parent.parent)), path
