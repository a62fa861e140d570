"""Looks for what workers need on their node before they start: directories, program, room, and limits."""

from __future__ import annotations

import _thread
import os
import resource
import select
import stat
import zlib
from collections.abc import Callable

from distlaunch.agent import scratch
from distlaunch.agent.messages import Needs
from distlaunch.agent.poller import Poller
from distlaunch.agent.wire import Message

SOON_S = 0.05
"""Seconds to wait for an answer that can be sent together with the first report."""
LIMIT_S = 2.0
"""Seconds after which the ranks start anyway, since a dead file server doesn't answer."""
MAX_READ = 1 << 20
"""Bytes of a program to compare. A program may be a large archive."""


def look(poller: Poller, folder: scratch.Folder, needs: Needs, report: Callable[[Message], None]) -> None:
    """Look for `needs`, create `folder`, and call `report` with the facts, LIMIT_S later at most.

    The facts have the form of those in `distlaunch.check.probe`. A thread collects them, since a file system
    may not answer. It has ended before workers are forked, unless its limit has passed.
    """
    workdir, program = os.path.expanduser(needs.workdir), os.path.expanduser(needs.program)
    unrecorded = ""
    try:
        folder.make(os.path.join(workdir, needs.tmpdir) if needs.tmpdir else None)
    except scratch.NoPlaceError as error:
        unrecorded = str(error)
    seen: Message = {"place": "no answer within %g s" % LIMIT_S}
    read, write = os.pipe()

    def find() -> None:
        try:
            place = _place(workdir, program, folder)
            limits = {"nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[0]}
            seen.update(place={**place, "unrecorded": unrecorded}, limits=limits)
        finally:
            os.close(write)

    def answer() -> None:
        poller.forget(read)
        poller.cancel("look")
        os.close(read)
        report(dict(seen))

    try:
        _thread.start_new_thread(find, ())
    except RuntimeError:  # the user's limit on processes is reached
        find()
    if select.select([read], [], [], SOON_S)[0]:
        answer()
    else:
        poller.watch(read, answer)
        poller.after(LIMIT_S - SOON_S, "look", answer)


def _place(workdir: str, program: str, folder: scratch.Folder) -> Message:
    place: Message = {"workdir": workdir, "exists": os.path.isdir(workdir), "script": program, "disks": {}}
    if program:
        try:
            place["digest"] = _digest(program)
        except OSError as error:
            place["unreadable"], place["errno"] = error.strerror, error.errno
    if os.access(workdir, os.W_OK):  # a workdir that isn't is usual
        place["disks"]["workdir"] = _disk(workdir, True)
    wanted = folder.places[0]
    place["disks"]["temporary"] = _disk(wanted, os.path.dirname(folder.path) == wanted)
    return place


def _digest(program: str) -> str:
    """Return a value that differs between different programs. Raises OSError if it can't be started."""
    found = os.stat(program)
    if not stat.S_ISREG(found.st_mode):
        return ""
    try:
        with open(program, "rb") as file:
            return "%08x" % zlib.crc32(file.read(MAX_READ), found.st_size)
    except PermissionError:
        if os.access(program, os.X_OK):
            return ""  # a binary file needs no more than that
        raise


def _disk(path: str, writable: bool) -> Message:
    try:
        disk = os.statvfs(path)
    except OSError:
        return {"path": path, "writable": False}
    free, files = disk.f_bavail * disk.f_frsize, disk.f_files and disk.f_favail
    return {"path": path, "free": free, "files": files, "writable": writable}
