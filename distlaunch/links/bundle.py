"""The agent's modules, ready to be shipped: read once, and kept beside their .pyc files."""

import contextlib
import importlib.util
import marshal
import os
import sys
import zlib
from collections.abc import Iterator
from functools import cache
from importlib.machinery import SourceFileLoader

from distlaunch.agent.frozen import Frozen
from distlaunch.packed import kept_beside, replace, state_of
from distlaunch.transport.boot import Bundle

_PACKAGES = frozenset({"distlaunch", "distlaunch.agent", "distlaunch.agent.probes"})
_TRAVELS = 9
"""zlib's level: it is paid once."""


class Texts(Frozen):
    """The agent's modules as they were when `states` were those of their files.

    `here` is the code for interpreters like our own on this machine; `code` and `source` travel.
    """

    states: list[tuple[str, int, int]]
    here: bytes
    code: bytes
    source: bytes


@cache
def bundle_for(same_interpreter: bool) -> Bundle:
    """The agent's modules; where the node's interpreter is our own, without source, and not compressed."""
    texts = _texts()
    code, source = (texts.here, b"") if same_interpreter else (texts.code, texts.source)
    return Bundle(importlib.util.MAGIC_NUMBER, code, source, _PACKAGES)


def _texts() -> Texts:
    """What was kept, if that is still true; else all is read, and kept."""
    modules = dict(_modules())
    states = [state_of(path) for path in modules.values()]
    file = kept_beside(__file__, "agent")
    with contextlib.suppress(OSError, ValueError, EOFError, TypeError), open(file, "rb") as kept:
        known = Texts(*marshal.loads(kept.read()))  # noqa: S302 (as each .pyc is)
        if known.states == states:
            return known
    lasts = not sys.dont_write_bytecode and os.access(os.path.dirname(file), os.W_OK)
    texts = _read(modules, states, lasts)
    if lasts:
        replace(file, marshal.dumps(tuple(texts)))
    return texts


def _read(modules: dict[str, str], states: list[tuple[str, int, int]], lasts: bool) -> Texts:
    """All from its files. What `lasts` is worth compiling anew; else a .pyc will do, if there is one."""
    loaders = {name: SourceFileLoader(name, path) for name, path in modules.items()}
    # The parent package is there only so that the agent's has a home.
    sources = {"distlaunch": ""} | {name: loader.get_source(name) or "" for name, loader in loaders.items()}
    codes = {"distlaunch": marshal.dumps(compile("", "distlaunch", "exec"))}
    for name, loader in loaders.items():
        # Without docstrings, which are a third of it.
        lean = compile(sources[name], name, "exec", optimize=2) if lasts else loader.get_code(name)
        codes[name] = marshal.dumps(lean)
    return Texts(
        states,
        marshal.dumps({name: zlib.compress(code, 0) for name, code in codes.items()}),
        marshal.dumps({name: zlib.compress(code, _TRAVELS) for name, code in codes.items()}),
        zlib.compress(repr(sources).encode(), _TRAVELS),
    )


def _modules() -> Iterator[tuple[str, str]]:
    """Name and file of each module, a package before what is in it. (pkgutil takes 6 ms to import.)"""
    for package in sorted(_PACKAGES - {"distlaunch"}):
        (folder,) = importlib.import_module(package).__path__
        yield package, os.path.join(folder, "__init__.py")
        for name in sorted(os.listdir(folder)):
            if name.endswith(".py") and name != "__init__.py":
                yield f"{package}.{name[:-3]}", os.path.join(folder, name)
