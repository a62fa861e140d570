"""Imports the modules of the agent from the data received over the link.

The boot code runs this module first. See `distlaunch.transports.handshake`.
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
    """A finder and loader for the import system.

    `codes` maps the name of each module to its source, or to its marshaled code, which is loaded when the
    module is imported. `packages` are the names of packages.
    """

    def __init__(self, codes: "dict[str, str | bytes]", packages: "Collection[str]") -> None:
        self._codes, self._packages = codes, packages

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        """Return the spec of a module, or None if the module isn't in the bundle."""
        if name not in self._codes:
            return None
        return ModuleSpec(name, self, is_package=name in self._packages)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Use the default module."""

    def exec_module(self, module: "ModuleType") -> None:
        """Run the code of a module."""
        name = module.__name__
        code = self._codes[name]
        made = marshal.loads(code) if isinstance(code, bytes) else compile(code, name, "exec")  # noqa: S302 (trusted)
        exec(made, module.__dict__)  # noqa: S102 (as importers do)


def install(codes: "dict[str, str | bytes]", packages: "Collection[str]") -> None:
    """Make these modules importable from now on."""
    gc.disable()  # until the agent is ready, because all objects created until then are kept
    sys.meta_path.insert(0, Shipped(codes, packages))
