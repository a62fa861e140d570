"""This machine, where systems differ: the controller also runs on macOS, agents and ranks on Linux alone."""

import os
import resource
import select
import signal
import sys
from collections.abc import Callable

DESCRIPTORS_PER_LINK = 6
"""Three pipes and a pidfd, and two more while it is opened."""
RESERVE = 300
"""Log files, and what else is open."""


def own_command() -> tuple[str, ...]:
    """Words that start this very program, from any folder and at any time."""
    program = os.path.abspath(sys.argv[0])
    if os.path.basename(program) == "distlaunch" and os.access(program, os.X_OK) and os.path.isfile(program):
        return (program,)
    top = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    taken_along = os.path.join(top, "__main__.py")
    if os.path.exists(taken_along):
        return (sys.executable, "-I", top)
    return (sys.executable, "-m", "distlaunch")


def runs_ranks() -> bool:
    """Whether this machine can be a node."""
    return sys.platform == "linux"


def cpu_count() -> int:
    """CPUs that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def exit_descriptor(pid: int) -> int:
    """A descriptor, to be closed, that is readable once our child has ended (pidfd, since Linux 5.3)."""
    if sys.platform == "linux":
        return os.pidfd_open(pid)
    queue = select.kqueue()
    ended = select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT)
    try:
        queue.control([ended], 0)
        return os.dup(queue.fileno())
    except ProcessLookupError:  # it has ended already: what is at its end can be read
        return os.open(os.devnull, os.O_RDONLY)


def send_signal(pid: int, signum: int, still: Callable[[], bool]) -> bool:
    """Send a signal to a process that is `still` the one that is meant; whether it was sent."""
    if sys.platform != "linux":
        if still():
            os.kill(pid, signum)
            return True
        return False
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if still():  # so it was when it was opened
            signal.pidfd_send_signal(process, signum)
            return True
        return False
    except ProcessLookupError:
        return False
    finally:
        os.close(process)


def boot_id() -> str:
    """What tells this start of the machine from any other; "" where nothing does."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def make_room_for_links(count: int) -> None:
    """Raise the soft limit on descriptors, as far as the hard one allows, if `count` links need it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_PER_LINK * count + RESERVE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
