"""The modules of a command in one file: a start opens that instead of a .pyc file of each.

The first start that finds much of what it imports missing writes it into the package's `__pycache__`. As of
a .pyc file, size and time of the source must be those that it had then. Only modules of packages are there:
where others are found depends on all of sys.path, which may be another the next time.
"""

import contextlib
import marshal
import os
import sys
from _frozen_importlib import ModuleSpec
from _frozen_importlib_external import SourceFileLoader, cache_from_source
from collections.abc import Iterator, Sequence
from types import CodeType, ModuleType

WORTHWHILE = 8
"""Modules that must lack before it is written again."""
Entry = tuple[str, int, int, bytes]
"""A source's path, time (ns) and size, and its code, marshalled: not all that is there is imported."""


class Loader(SourceFileLoader):
    """Loads a module whose code is known."""

    def __init__(self, name: str, path: str, code: bytes) -> None:
        super().__init__(name, path)
        self._code = code

    def get_code(self, fullname: str) -> CodeType:
        """Its code."""
        code: CodeType = marshal.loads(self._code)  # noqa: S302 (as each .pyc is)
        return code


class Packed:
    """Finds modules in the file of that path."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._entries: dict[str, Entry] = {}
        try:
            with open(file, "rb") as packed:
                entries = marshal.loads(packed.read())  # noqa: S302 (as each .pyc is)
            # Earlier versions wrote code there.
            self._entries = {name: entry for name, entry in entries.items() if isinstance(entry[3], bytes)}
        except (OSError, ValueError, EOFError, TypeError, AttributeError):
            pass  # it is not there, or somebody has cut it off

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """For Python's import: `path` is that of the package."""
        entry = self._entries.get(name)
        if not entry or not path:
            return None
        source, *_, code = entry
        folder, _, file = source.rpartition("/")
        is_package = file == "__init__.py"
        if (folder.rpartition("/")[0] if is_package else folder) not in path:
            return None
        if entry[:3] != state_of(source):
            return None
        spec = ModuleSpec(name, Loader(name, source, code), origin=source, is_package=is_package)
        spec.has_location, spec.cached = True, self._file
        if is_package:
            spec.submodule_search_locations = [folder]
        return spec

    def keep(self) -> None:
        """Write what was imported, if much of that is not there and it may be written."""
        if sys.dont_write_bytecode:
            return
        used = dict(_from_source())
        if sum(not self._has(name, path) for name, path in used.items()) >= WORTHWHILE:
            replace(self._file, marshal.dumps({name: _entry(name, path) for name, path in used.items()}))

    def _has(self, name: str, path: str) -> bool:
        entry = self._entries.get(name)
        return entry is not None and entry[:3] == state_of(path)


def _from_source() -> Iterator[tuple[str, str]]:
    """The modules of packages that were imported from source files, or their .pyc files, and these."""
    for name, module in sys.modules.items():
        loader = getattr(module, "__loader__", None)
        if "." in name and isinstance(loader, SourceFileLoader):
            yield name, loader.path


def _entry(name: str, path: str) -> Entry:
    state = state_of(path)
    code = SourceFileLoader(name, path).get_code(name)
    assert code is not None  # only a namespace has none
    return *state, marshal.dumps(code)


def state_of(path: str) -> tuple[str, int, int]:
    """What tells one state of a source file from another."""
    try:
        found = os.stat(path)
    except OSError:
        return path, 0, 0
    return path, found.st_mtime_ns, found.st_size


def kept_beside(source: str, name: str) -> str:
    """The file of that name among the .pyc files of a source's folder, for this version of Python."""
    like = cache_from_source(os.path.join(os.path.dirname(source), f"{name}.py"))
    return os.path.splitext(like)[0] + ".packed"


def replace(file: str, data: bytes) -> None:
    """Have a file hold just `data`; where it may not be written, or the disk is full, it stays as it is."""
    unfinished = f"{file}.{os.getpid()}"
    try:
        with open(unfinished, "xb") as packed:
            packed.write(data)
        os.replace(unfinished, file)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)


def install(command: str) -> Packed:
    """Have modules taken from the file of that command from now on."""
    packed = Packed(kept_beside(__file__, command))
    sys.meta_path.insert(0, packed)
    return packed
