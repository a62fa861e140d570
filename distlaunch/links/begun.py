"""What was begun for a job before it was read; see `distlaunch.links.ahead`."""

import os
from collections.abc import Sequence
from contextlib import suppress

from distlaunch.agent.lean import decode, encode
from distlaunch.links import process
from distlaunch.system import cache
from distlaunch.transport.malloc import ssh_environment

TYPE_CHECKING = False
if TYPE_CHECKING:  # an agent starts meanwhile
    from typing import Any

    from distlaunch.links.link import Link

MOST = 64
"""Hosts that are remembered: more are held up by their number, not by our start."""


class Ahead:
    """What was begun: a `link` to an agent on this machine, or processes, by their command lines.

    `memory` is the file that has the command lines of last time, and what they were for.
    """

    def __init__(self, link: "Link | None" = None, memory: "Memory | None" = None) -> None:
        self._link, self._memory = link, memory
        self._begun = memory.begun() if memory else {}
        self._asked: list[list[str]] = []

    def link(self) -> "Link | None":
        """The link, whose agent is then the caller's."""
        link, self._link = self._link, None
        return link

    def child(self, argv: Sequence[str]) -> process.Child | None:
        """The process with this command line, if there is one, which is then the caller's."""
        self._asked.append(list(argv))
        return self._begun.pop(tuple(argv), None)

    def discard(self) -> None:
        """End what nobody has taken, at once and without a trace."""
        if self._link:
            self._link.discard()
            self._link = None
        while self._begun:
            _, child = self._begun.popitem()
            child.kill()
            child.wait()
            child.close()

    def settle(self) -> None:
        """All was asked for that will be: the rest is ended, and the next start of this command begins so."""
        self.discard()
        if self._memory:
            self._memory.keep(self._asked)


class Memory:
    """The command lines of ssh that the command of that name began, while `key` is the same: in the cache."""

    def __init__(self, name: str, key: "Sequence[Any]") -> None:
        self._path, self._key = cache.file_for("begun", name), list(key)
        self._known: list[list[str]] = []
        with suppress(OSError, ValueError, RecursionError), open(self._path, encoding="utf-8") as file:
            kept = decode(file.read())
            if isinstance(kept, dict) and kept.get("key") == self._key:
                self._known = [list(map(str, argv)) for argv in kept["begun"]]

    def begun(self) -> dict[tuple[str, ...], process.Child]:
        """Begin all of them."""
        begun = {}
        for argv in self._known:
            with suppress(OSError):  # if the job needs it, beginning it again says why
                begun[tuple(argv)] = process.start(argv, ssh_environment(os.environ))
        return begun

    def keep(self, asked: list[list[str]]) -> None:
        """Write them down, if they are new, and few enough, and ssh's."""
        if asked == self._known or len(asked) > MOST or any(argv[0] != "ssh" for argv in asked):
            return
        cache.keep(self._path, encode({"key": self._key, "begun": asked}).encode())  # ASCII
