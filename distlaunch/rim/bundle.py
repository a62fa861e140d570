"""Reads the agent's modules, to be shipped."""

import importlib.util
import marshal
from functools import cache
from importlib.machinery import SourceFileLoader

from distlaunch.transport.boot import AgentModule

# In import order: the node has no importer for them.
_NAMES = (
    "",
    ".wire",
    ".procfs",
    ".ports",
    ".probes",
    ".sweep",
    ".workers",
    ".outbox",
    ".poller",
    ".crew",
    ".serve",
    ".guardian",
)


@cache
def agent_modules() -> tuple[AgentModule, ...]:
    """The agent's modules in import order."""
    return tuple(_read(f"distlaunch.agent{name}") for name in _NAMES)


def _read(name: str) -> AgentModule:
    spec = importlib.util.find_spec(name)
    if spec is None or not isinstance(spec.loader, SourceFileLoader):
        raise RuntimeError(f"{name} is not installed as source")
    code = spec.loader.get_code(name)  # from the .pyc where there is one
    return AgentModule(
        name, spec.loader.get_source(name) or "", importlib.util.MAGIC_NUMBER, marshal.dumps(code)
    )
