"""A container in which a node's agent runs, and its ranks."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from distlaunch.agent.frozen import Frozen

Runtime = Literal["docker", "podman", "apptainer", "enroot", "pyxis"]
BY_SRUN: Runtime = "pyxis"
"""The one that is a plug-in of srun, which has options for it."""


class Container(Frozen):
    """What the job file's `container` section says; `options` are the runtime's, each a word.

    `mounts` are `PATH` or `PATH:PATH_INSIDE[:ro]`; `before` are words between the runtime's name and its
    command. `env` has a value None for what is as on the node.
    """

    image: str
    runtime: Runtime = "docker"
    mounts: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    env: Mapping[str, str | None] = MappingProxyType({})
    before: tuple[str, ...] = ()
