"""What is begun before a job is read, which takes as long as an agent takes to boot, or ssh to log in.

For a job on this machine that is an agent. For one on others it is what the same command began the last time,
if the job file has not changed since; its command lines are kept in the user's cache. What the job turns out
not to need is ended: its hosts were only logged in to.
"""

import os
import signal
import sys
import zlib
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from distlaunch.agent.lean import decode, encode
from distlaunch.links import process
from distlaunch.transport.boot import LOCAL, boot_text, candidates_text

if TYPE_CHECKING:
    from distlaunch.links.link import Link

MOST = 64
"""Hosts that are remembered: more are held up by their number, not by our start."""


FILES = 256
"""In the cache, at most; of two command lines with the same number only the last is remembered."""


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
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            child.close()

    def remember(self) -> None:
        """Have the next start of this command begin with what was asked for."""
        if self._memory:
            self._memory.keep(self._asked)


class Memory:
    """The command lines of ssh that a command began, in the file of that path, while `key` is the same."""

    def __init__(self, path: str, key: Sequence[Any]) -> None:
        self._path, self._key = path, list(key)
        self._known: list[list[str]] = []
        with suppress(OSError, ValueError, RecursionError), open(path, encoding="utf-8") as file:
            kept = decode(file.read())
            if isinstance(kept, dict) and kept.get("key") == self._key:
                self._known = [list(map(str, argv)) for argv in kept["begun"]]

    def begun(self) -> dict[tuple[str, ...], process.Child]:
        """Begin all of them."""
        begun = {}
        for argv in self._known:
            with suppress(OSError):  # if the job needs it, beginning it again says why
                begun[tuple(argv)] = process.start(argv, os.environ)
        return begun

    def keep(self, asked: list[list[str]]) -> None:
        """Write them down, if they are new, and few enough, and ssh's."""
        if asked == self._known or len(asked) > MOST or any(argv[0] != "ssh" for argv in asked):
            return
        folder, unfinished = os.path.dirname(self._path), f"{self._path}.{os.getpid()}"
        with suppress(OSError, UnicodeError):  # a start without it takes a little longer
            os.makedirs(folder, 0o700, exist_ok=True)
            with open(unfinished, "x", encoding="utf-8") as file:
                file.write(encode({"key": self._key, "begun": asked}))
            os.replace(unfinished, self._path)


def begin_again(words: Sequence[str], job: str) -> Ahead:
    """Begin what the command line `words` began the last time, for the job file of that path."""
    try:
        state, here = os.stat(job), os.getcwd()
    except OSError:
        return Ahead()  # it is told when the job is read
    key = [here, list(words), state.st_mtime_ns, state.st_size, state.st_ino]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    number = zlib.crc32(repr((here, words)).encode(errors="replace")) % FILES
    return Ahead(memory=Memory(os.path.join(cache, "distlaunch", "begun", f"{number}.json"), key))


def open_ahead(shares_stdio: bool) -> Ahead | None:
    """An agent on this machine, for the first node of a job, if one starts.

    It boots on another core while YAML and the supervisor are imported.
    """
    if sys.platform != "linux":
        return None
    try:
        child = process.start(LOCAL, os.environ, (0, 1) if shares_stdio else ())
    except OSError:
        return None  # if the job needs it, opening it again says why
    os.set_blocking(child.stdin, False)
    nonce = os.urandom(16).hex()
    left = _written(child.stdin, candidates_text([sys.executable, "python3"]))
    from distlaunch.links.bundle import bundle_for  # its interpreter starts meanwhile

    left = _written(child.stdin, left + boot_text(bundle_for(same_interpreter=True), nonce, 0))
    from distlaunch.links.opening import link_here  # it imports what came

    return Ahead(link_here(child, nonce, left))


def _written(pipe: int, data: bytes) -> bytes:
    """Write what the pipe takes now; the rest."""
    try:
        return data[os.write(pipe, data) :]
    except OSError:
        return data  # it is full; or nobody reads, which the link's end tells
