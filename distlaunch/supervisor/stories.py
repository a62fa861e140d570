"""What an exit means: facts first, as far as kernel and status tell them; then advice, marked as such."""

import re
import signal
from collections.abc import Callable, Sequence
from typing import NamedTuple

from distlaunch.supervisor.state import status_words

LAST_LINES = 40
"""Lines of a rank's last words in which a known trouble is looked for."""
SMALL_SHM = 1 << 30


class Ending(NamedTuple):
    """How a worker ended, and what its node's kernel says: OOM kills since the start, (size, free) of shm."""

    status: int
    oom_kills: int = 0
    shm: tuple[int, ...] = ()


def facts(ending: Ending) -> str:
    """The exit in words, with who or what caused it where that is known."""
    said = status_words(ending.status)
    if ending.status == -signal.SIGKILL:
        if ending.oom_kills > 0:
            return f"{said}, probably by the OOM killer: {ending.oom_kills} counted there meanwhile"
        return f"{said}, sent by someone: the kernel counted no OOM kill there"
    if ending.status == -signal.SIGBUS and len(ending.shm) == 2:
        size, free = ending.shm
        return f"{said}; /dev/shm there has {_size(free)} free of {_size(size)}"
    return said


def advice(ending: Ending, words: str) -> str:
    """One line of advice for a known trouble, or nothing."""
    of_status = _BY_STATUS.get(ending.status)
    if of_status:
        found = of_status(ending)
        if found:
            return found
    if ending.status == -signal.SIGABRT and not words.strip():
        return "a gloo thread that outlives the interpreter aborts so: end with dist.destroy_process_group()"
    last = "\n".join(words.splitlines()[-LAST_LINES:])
    return next((text for pattern, text in _BY_WORDS if re.search(pattern, last)), "")


def _killed(ending: Ending) -> str:
    if ending.oom_kills > 0:
        return "less memory: fewer data loader workers, smaller batches, or fewer ranks per node"
    return "look for a batch system's limit, a `kill`, or a container's limit on that node"


def _bus_error(ending: Ending) -> str:
    if len(ending.shm) == 2 and ending.shm[0] >= SMALL_SHM and ending.shm[1] > ending.shm[0] // 20:
        return "a mapped file may have been truncated, or its disk is full"
    return "data loaders share tensors in /dev/shm: enlarge it (docker run --shm-size=8g), or num_workers=0"


_BY_STATUS: dict[int, Callable[[Ending], str]] = {
    -signal.SIGKILL: _killed,
    -signal.SIGBUS: _bus_error,
    -signal.SIGSEGV: lambda _: (
        "env: {PYTHONFAULTHANDLER: 1} shows where; mixed versions of torch and CUDA are common"
    ),
    127: lambda _: "as shells have it, a command was not found: see what the script starts, and PATH in env",
    126: lambda _: "as shells have it, a file could not be run: see its mode, and the line after #!",
}

_BY_WORDS: Sequence[tuple[str, str]] = (
    (
        r"[Aa]ddress already in use|EADDRINUSE",
        "leave rendezvous.endpoint out to get a free port; `distlaunch check-port` names who has it",
    ),
    (
        r"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError",
        "the GPU's memory is full: smaller batches; `nvidia-smi` on the node shows what else uses it",
    ),
    (
        r"invalid device ordinal",
        "LOCAL_RANK is beyond the visible GPUs: lower procs_per_node, or see CUDA_VISIBLE_DEVICES",
    ),
    (
        r"Watchdog caught collective operation timeout|NCCL.*[Tt]imeout|Timed out waiting \d+ms",
        "a collective waited for a rank that never came: look for the rank that stood, or took another path",
    ),
    (
        r"NCCL (?:error|WARN)|ncclSystemError|ncclUnhandledCudaError|ncclInternalError",
        "env: {NCCL_DEBUG: INFO} tells more; NCCL_SOCKET_IFNAME must name an interface that the nodes share",
    ),
    (
        r"Connection reset by peer|Connection closed by peer|Broken pipe",
        "another rank may have ended first: its own last words are in its log",
    ),
    (
        r"[Nn]o space left on device",
        "a disk is full: see where the script writes, TMPDIR, and /dev/shm",
    ),
    (
        r"ModuleNotFoundError|ImportError",
        "the interpreter of the workers lacks a package: see `python:`, or workdir",
    ),
)


def _size(number: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number >> 10} KiB"
