"""Sends the controller the files that the workers wrote, at the end of the job.

A file is announced with `FileBegins`. Its contents follow in FILE frames, as fast as the link accepts them.
If the file has changed in the meantime, the last frame is held back, so the controller drops the file.
"""

from __future__ import annotations

import errno
import fnmatch
import itertools
import os
import stat
import time
from collections.abc import Iterator

from distlaunch.agent import messages, wire
from distlaunch.agent.outbox import Outbox

TURN_S = 0.02
MAX_FILES, MAX_LEFT_OUT = 10_000, 50
"""Maximum number of files to try, and of files to list as left out."""
MAX_PATH, MAX_DEPTH = 1024, 200
"""Maximum characters of a path, and maximum directories in it."""


class Collection:
    """The files that match a `Collect`, found and queued in steps."""

    def __init__(self, command: messages.Collect, outbox: Outbox) -> None:
        self._command, self._outbox = command, outbox
        self._tried: set[str] = set()
        self._sent: set[str] = set()  # names, which are the same for /ckpt and ckpt
        self._left_out: list[tuple[str, str]] = []
        self._root = ""
        self._apart = os.path.realpath(command.apart)
        self._room, self._more = command.limit, 0  # bytes left, and files left out but not listed
        self._steps = self._all()

    def go_on(self) -> bool:
        """Continue for a moment, while the outbox has room. Return whether everything is queued.

        The agent calls this in each turn of its loop until it returns True.
        """
        until = time.monotonic() + TURN_S
        while self._outbox.has_room and time.monotonic() < until:
            if next(self._steps, self) is self:
                return True
        if not self._outbox.has_output:
            self._outbox.file(b"")  # a keepalive during a long search
        return False

    def _all(self) -> Iterator[None]:
        """Queue the files that match the patterns, then `FilesEnd`. Yield between steps."""
        for pattern in self._command.paths:
            path, matched = os.path.normpath(os.path.expanduser(pattern)), False
            base = "/" if os.path.isabs(path) else os.path.expanduser(self._command.workdir)
            parts = [part for part in path.strip("/").split("/") if part != "."] or ["**"]
            # Several ** in a row match the same as one, but take exponential time.
            parts = [part for before, part in zip(["", *parts], parts) if (before, part) != ("**", "**")]
            fixed = itertools.takewhile(lambda part: not {*part} & {*"*?"}, parts if base == "/" else ())
            self._root = os.path.realpath(os.path.join(base, *fixed))
            for found in self._search(base, parts):
                yield
                matched = matched or bool(found)
                if found and found not in self._tried:
                    if len(self._tried) == MAX_FILES:
                        self._leave_out(pattern, "matches too many files")
                        break
                    self._tried.add(found)
                    name = found[len(base) :].lstrip("/")
                    try:
                        yield from self._send(found, name)
                    except OSError as error:
                        self._leave_out(name, error.strerror)
            if not matched:
                self._leave_out(pattern, "matches nothing")
        end = messages.FilesEnd(self._outbox.node, tuple(self._left_out), self._more)
        self._outbox.report_in_order(end)

    def _search(self, directory: str, parts: list[str]) -> Iterator[str]:
        """Yield the paths that match `parts` below a directory, and "" as a sign of progress.

        A matching directory stands for all files below it. A symlink to a directory is followed only if one
        of the parts is its exact name. Others are yielded, too, if nothing else can find the files there.
        """
        yield ""
        first, rest = parts[0], parts[1:]
        names, deep = [first], first == "**"
        if {*first} & {*"*?"}:
            try:
                names = sorted(fnmatch.filter(os.listdir(directory), first.replace("[", "[[]")))
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                    self._leave_out(directory, error.strerror)
                return
        if deep and rest:
            yield from self._search(directory, rest)
        for name in names:
            path = os.path.join(directory, name)
            is_directory = os.path.isdir(path) and (name == first or not os.path.islink(path))
            if is_directory and path.count("/") >= MAX_DEPTH:
                self._leave_out(path, f"is more than {MAX_DEPTH} directories deep")
            elif is_directory and os.path.realpath(path) != self._apart:
                yield from self._search(path, parts if deep else rest or ["**"])
            elif not is_directory and os.path.lexists(path) and (not rest or self._leads_away(path)):
                yield path

    def _leads_away(self, path: str) -> bool:
        """Return whether a path is a symlink to a directory outside of the one that is searched."""
        inside = os.path.commonpath([os.path.realpath(path), self._root]) == self._root
        return os.path.isdir(path) and not inside

    def _leave_out(self, name: str, why: str | None) -> None:
        if len(self._left_out) < MAX_LEFT_OUT:
            self._left_out.append((name[:MAX_PATH], why or ""))
        else:
            self._more += 1

    def _send(self, path: str, name: str) -> Iterator[None]:
        """Queue a file in steps, announced as `name`. Raises OSError with the reason for leaving it out."""
        mode = os.lstat(path).st_mode  # merely opening a device may have side effects
        if not stat.S_ISREG(mode):
            raise OSError(0, "is a symlink" if stat.S_ISLNK(mode) else "is not a regular file")
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb", buffering=0) as file:
            before = os.fstat(file.fileno())
            left = before.st_size
            if left > self._room:
                raise OSError(0, "exceeds collect.limit")
            if len(name) > MAX_PATH:
                raise OSError(0, "has too long a path")
            if name in self._sent:
                raise OSError(0, "another file has the same path under collected/")
            self._sent.add(name)
            self._room -= left
            self._outbox.report_in_order(messages.FileBegins(self._outbox.node, name, left))
            while left:
                piece = file.read(min(left, wire.MAX_OUTPUT))
                left -= len(piece)
                if not piece or (not left and os.fstat(file.fileno()).st_mtime_ns != before.st_mtime_ns):
                    raise OSError(0, "changed while it was read")
                self._outbox.file(piece)
                yield
