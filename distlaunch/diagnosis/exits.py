"""What an exit means: first the facts, from the kernel and the status; then advice, marked as such."""

import re
import signal
from collections.abc import Callable, Sequence

from distlaunch.agent.frozen import Frozen
from distlaunch.wording import counted, status_words

LAST_LINES = 40
"""Lines of a rank's last words that are searched for a known problem."""
SMALL_SHM = 1 << 30


class Ending(Frozen):
    """How a worker ended, and what its node's kernel says: OOM kills since the start, (size, free) of shm.

    `peer_gone`: it lost its connection to another rank; `python` is its interpreter, `module` what that was
    to run, if not a file; `stdin`: it has the command's own.
    """

    status: int
    oom_kills: int = 0
    shm: tuple[int, ...] = ()
    peer_gone: bool = False
    python: str = "python"
    module: str = ""
    stdin: bool = False


def exit_status_of(status: int) -> int:
    """A worker's status as a shell has it: 128 + n for signal n."""
    return status if status >= 0 else 128 - status


def facts(ending: Ending) -> str:
    """The exit in words, with who or what caused it where that is known."""
    said = status_words(ending.status)
    if ending.status == -signal.SIGKILL:
        if ending.oom_kills > 0:
            kills = counted(ending.oom_kills, "OOM kill")
            return f"{said}, probably by the OOM killer (the kernel reports {kills} on that node)"
        return f"{said}; the kernel reports no OOM kill on that node"  # a rank may have sent it to itself
    if ending.status == -signal.SIGBUS and len(ending.shm) == 2:
        size, free = ending.shm
        return f"{said}; /dev/shm there has {_size(free)} free of {_size(size)}"
    return said


def advice(ending: Ending, words: str) -> str:
    """One line of advice on a known problem; "" if none is known."""
    of_status = _BY_STATUS.get(ending.status)
    if of_status and (said := of_status(ending)):
        return said
    if ending.status == -signal.SIGABRT and "terminate called without an active exception" in words:
        return "a gloo thread outlived the interpreter: end the script with dist.destroy_process_group()"
    if ending.peer_gone and re.search(_TIMED_OUT, words):
        return _MISSED
    if ending.peer_gone:
        return "no rank reported an error of its own; check the end of each rank's log"
    last = "\n".join(words.splitlines()[-LAST_LINES:])
    if ending.module and (said := _of_module(ending.module, last)):
        return said
    found = next((text for pattern, text in _BY_WORDS if re.search(pattern, last)), None)
    return found(ending) if callable(found) else found or ""


def _of_module(module: str, words: str) -> str:
    """Advice on the name of the job's own module, if that is what `python -m` complains about."""
    name = re.escape(module)
    if without_py := re.search(rf"Try using '(\S+)' instead of '{name}' as the module name", words):
        return f"name a module without .py: `module: {without_py[1]}`; for a file, use `script:`"
    if re.search(rf"No module named {name}\.__main__; ", words):
        return f"name a module in that package, or add a __main__.py, which `python -m {module}` runs"
    if re.search(
        rf"(?m)^\S+: (?:No module named {name}$|Error while finding .* '{name}' .*No module)", words
    ):
        return "check the module's name: Python looks for it in the workdir and on PYTHONPATH"
    return ""


def _needs_stdin(what: str, needed: str) -> Callable[[Ending], str]:
    hint = f"{what} needs {needed}, which ranks lack under `run`: use `distlaunch torchrun` on one node"
    return lambda ending: "" if ending.stdin else hint


def _no_package(ending: Ending) -> str:
    return f"the workers' Python ({ending.python}) lacks a package: install it there, or use another Python"


def _data_loader(ending: Ending) -> str:
    if ending.oom_kills > 0:
        return "the OOM killer killed a DataLoader worker: reduce num_workers or the batch size"
    return "a DataLoader worker died, often from lack of memory: try fewer num_workers or smaller batches"


def _killed(ending: Ending) -> str:
    if ending.oom_kills > 0:
        return "reduce memory use: fewer DataLoader workers, smaller batches, or fewer ranks per node"
    return "check for a memory limit (batch system, container), or for a `kill` on that node or in the script"


def _bus_error(ending: Ending) -> str:
    if len(ending.shm) == 2 and ending.shm[0] >= SMALL_SHM and ending.shm[1] > ending.shm[0] // 20:
        return "a memory-mapped file may have been truncated, or its disk may be full"
    return _SHM


_TIMED_OUT = r"Watchdog caught collective operation timeout|NCCL.*[Tt]imeout|Timed out waiting \d+ms"
_MISSED = "a collective timed out: look for a rank that stalled, or that called another collective"
_SHM = "data loaders share tensors in /dev/shm: enlarge it (docker run --shm-size=8g) or set num_workers=0"

_BY_STATUS: dict[int, Callable[[Ending], str]] = {
    -signal.SIGKILL: _killed,
    -signal.SIGBUS: _bus_error,
    -signal.SIGSEGV: lambda _: (
        "set env: {PYTHONFAULTHANDLER: 1} to see where; mismatched torch and CUDA versions are a common cause"
    ),
    127: lambda _: "shells return 127 when a command is not found: check what the script starts, and PATH",
    126: lambda _: "shells return 126 when a file can't be executed: check its mode and its #! line",
}

_BY_WORDS: Sequence[tuple[str, str | Callable[[Ending], str]]] = (
    (r"DataLoader worker .* killed by signal: Bus error", _SHM),
    (r"DataLoader worker .*(?:killed by signal|exited unexpectedly)", _data_loader),
    (r"bdb\.BdbQuit", _needs_stdin("breakpoint()", "a terminal")),
    (r"EOFError: EOF when reading a line", _needs_stdin("input()", "stdin")),
    (
        r"[Aa]ddress already in use|EADDRINUSE",
        "leave out rendezvous.endpoint to get a free port; `distlaunch check-port` names the port's holder",
    ),
    (
        r"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError",
        "GPU memory is full: use smaller batches; `nvidia-smi` on the node shows what else uses it",
    ),
    (
        r"invalid device ordinal",
        "LOCAL_RANK is beyond the visible GPUs: lower procs_per_node, or check CUDA_VISIBLE_DEVICES",
    ),
    (
        _TIMED_OUT,
        _MISSED,
    ),
    (
        r"NCCL (?:error|WARN)|ncclSystemError|ncclUnhandledCudaError|ncclInternalError",
        "set env: {NCCL_DEBUG: INFO} to see more; NCCL_SOCKET_IFNAME must name an interface on every node",
    ),
    (
        r"connection to etcd has failed",
        "no etcd server answers that node at rendezvous.endpoint, or it lacks the v2 API (etcd --enable-v2)",
    ),
    (
        r"[Nn]o space left on device",
        "a disk is full: check where the script writes, TMPDIR, and /dev/shm",
    ),
    (r"ModuleNotFoundError|ImportError", _no_package),
)


def _size(number: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number >> 10} KiB"
