"""This program as a zip, for a machine that has nothing but Python: itself and what it imports."""

import hashlib
import importlib.util
import io
import os
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
