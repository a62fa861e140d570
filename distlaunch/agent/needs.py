"""Checks the workers' requirements on the node before they start: directories, program, space and limits."""

from __future__ import annotations

import _thread
import errno
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
"""Maximum seconds to wait for facts, so that they can be sent together with the first report."""
LIMIT_S = 2.0
"""Seconds after which the ranks start anyway, because a dead file server would never answer."""
UNCOUNTED = 1 << 50
"""Free bytes to report for a file system that doesn't count them."""
MAX_READ = 1 << 20
"""Maximum bytes of a program to compare, since a program may be a large archive."""


def look(poller: Poller, needs: Needs, report: Callable[[Message], None]) -> None:
    """Within LIMIT_S seconds, call `report` with facts about `needs`, in `distlaunch.check.probe`'s format.

    This is part of the answer to `FindRoute`. It blocks the agent for at most SOON_S seconds. A thread
    collects the facts, because a file system may not answer. Unless the limit has passed, the thread has
    ended before workers are forked.
    """
    seen: Message = {"place": "no answer within %g s" % LIMIT_S}
    read, write = os.pipe()

    def find() -> None:
        try:
            nofile = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            seen.update(place=_place(needs), limits={"nofile": nofile})
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


def _place(needs: Needs) -> Message:
    """Return facts about the workers' directories and program, in the format of `place` in the probe."""
    workdir, program = os.path.expanduser(needs.workdir), os.path.expanduser(needs.program)
    place: Message = {"workdir": workdir, "exists": os.path.isdir(workdir), "script": program}
    if program:
        try:
            place["digest"] = digest(program)
        except OSError as error:
            place["unreadable"], place["errno"] = error.strerror, error.errno
    temporary = scratch.places(os.path.join(workdir, needs.tmpdir) if needs.tmpdir else None)
    refused = {path: _refusal(path) for path in (*temporary, scratch.MEMORY)}
    if all(refused.values()):
        place["unrecorded"] = scratch.no_place(refused)
    place["disks"] = {"temporary": _disk(temporary[0])}
    if os.access(workdir, os.W_OK):  # users often can't write to the workdir
        place["disks"]["workdir"] = _disk(workdir)
    return place


def digest(program: str) -> str:
    """Return a value that differs between different programs; "" if they can't be compared.

    Before a job's ranks start, `distlaunch.check.findings` compares the values from the nodes. `distlaunch
    why` compares the values of two runs. Raises OSError if the program can't be started.
    """
    found = os.stat(program)
    if not stat.S_ISREG(found.st_mode):
        return ""
    try:
        with open(program, "rb") as file:
            return "%08x" % zlib.crc32(file.read(MAX_READ), found.st_size)
    except PermissionError:
        if os.access(program, os.X_OK):
            return ""  # a binary file only has to be executable
        raise


def _refusal(path: str) -> str:
    """Return the reason why no file can be created in a directory, or ""."""
    try:
        disk = os.statvfs(path)
    except OSError as error:
        return str(error.strerror)
    if disk.f_flag & os.ST_RDONLY:
        return os.strerror(errno.EROFS)
    if disk.f_blocks and not free_bytes(disk):
        return os.strerror(errno.ENOSPC)
    return "" if os.access(path, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)


def free_bytes(disk: os.statvfs_result) -> int:
    """Return the number of bytes that this user can write. The last part of a disk is reserved for root."""
    return (disk.f_bavail if os.geteuid() else disk.f_bfree) * disk.f_frsize


def _disk(path: str) -> Message:
    """Return facts about the disk that holds a directory. `files` is its free inodes; None = unknown."""
    try:
        disk = os.statvfs(path)
    except OSError:
        return {"path": path, "writable": False}
    writable = os.access(path, os.W_OK) and not disk.f_flag & os.ST_RDONLY
    free = free_bytes(disk) if disk.f_blocks else UNCOUNTED
    files = disk.f_favail if disk.f_files else None
    return {"path": path, "writable": writable, "free": free, "files": files}
