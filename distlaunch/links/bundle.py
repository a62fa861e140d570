"""Reads the agent's modules, to be shipped."""

import importlib.util
import marshal
import pkgutil
import zlib
from functools import cache
from importlib.machinery import SourceFileLoader

import distlaunch.agent
from distlaunch.transport.boot import Bundle

_PACKAGES = frozenset({"distlaunch", "distlaunch.agent", "distlaunch.agent.probes"})


@cache
def bundle_for(same_interpreter: bool) -> Bundle:
    """The agent's modules; without their source where the node's interpreter is our own."""
    loaders = {name: _loader(name) for name in _names()}
    # The parent package is there only so that the agent's has a home.
    code: dict[str, object] = {"distlaunch": compile("", "distlaunch", "exec")}
    code |= {name: loader.get_code(name) for name, loader in loaders.items()}  # from a .pyc if there is one
    source = b""
    if not same_interpreter:
        texts = {"distlaunch": ""} | {name: loader.get_source(name) for name, loader in loaders.items()}
        source = zlib.compress(repr(texts).encode(), 1)
    return Bundle(importlib.util.MAGIC_NUMBER, zlib.compress(marshal.dumps(code), 1), source, _PACKAGES)


def _names() -> list[str]:
    package = distlaunch.agent
    modules = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    return [package.__name__, *(module.name for module in modules)]


def _loader(name: str) -> SourceFileLoader:
    spec = importlib.util.find_spec(name)
    if spec is None or not isinstance(spec.loader, SourceFileLoader):
        raise RuntimeError(f"{name} is not installed as source")
    return spec.loader
