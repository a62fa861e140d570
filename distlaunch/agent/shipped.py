"""Imports the agent's modules from what came through the link: the boot runs this one first.

See `distlaunch.transports.handshake`.
"""

import gc
import marshal
import sys
from _frozen_importlib import ModuleSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection
    from types import ModuleType


class Shipped:
    """A finder and loader, as the import system wants them.

    `codes` has by the name of a module its source, or its code, which stays marshalled until it is imported.
    `packages` are the names of those that are packages.
    """

    def __init__(self, codes: "dict[str, str | bytes]", packages: "Collection[str]") -> None:
        self._codes, self._packages = codes, packages

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        """Of a module that is there."""
        if name not in self._codes:
            return None
        return ModuleSpec(name, self, is_package=name in self._packages)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """The usual one will do."""

    def exec_module(self, module: "ModuleType") -> None:
        """Run its code."""
        name = module.__name__
        code = self._codes[name]
        made = marshal.loads(code) if isinstance(code, bytes) else compile(code, name, "exec")  # noqa: S302 (ours)
        exec(made, module.__dict__)  # noqa: S102 (as importers do)


def install(codes: "dict[str, str | bytes]", packages: "Collection[str]") -> None:
    """Import modules from there from now on."""
    gc.disable()  # until the agent is ready: what it makes until then stays
    sys.meta_path.insert(0, Shipped(codes, packages))
