"""The interpretation of an exit: facts from the kernel and the status, the origin of the error, and advice.

Patterns are compiled on first use, because most ranks don't fail.
"""

import re
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distlaunch.agent.frozen import Frozen
from distlaunch.agent.messages import LATER_S
from distlaunch.wording import counted, size_words, status_words

LAST_LINES = 40
"""Lines of a rank's last output to search for advice and, without a traceback, for the error's origin."""
HANDLED_S = 10.0
"""Seconds after a traceback from which output of a rank that then exits shows that it has continued."""
SMALL_SHM = 1 << 30
TRACEBACK = "Traceback (most recent call last):"


class Ending(Frozen):
    """The end of a worker, with facts from the kernel: OOM kills since the start, (size, free) of /dev/shm.

    `peer_gone` is set if the worker lost its connection to another rank. `python` is its interpreter, unless
    it ran a command. `module` is the module that it ran instead of a file. `stdin` is set if it has the
    controller's stdin. `networked` is set if the ranks run on several machines.
    """

    status: int
    oom_kills: int = 0
    shm: tuple[int, ...] = ()
    peer_gone: bool = False
    python: str = ""
    module: str = ""
    stdin: bool = False
    networked: bool = False


def exit_status_of(status: int) -> int:
    """Return a worker's status as a shell reports it: 128 + n for signal n."""
    return status if status >= 0 else 128 - status


def facts(ending: Ending) -> str:
    """Return a description of the exit, with its cause if known."""
    words = status_words(ending.status)
    if ending.status == -signal.SIGKILL:
        if ending.oom_kills > 0:
            kills = counted(ending.oom_kills, "OOM kill")
            return f"{words}, probably by the OOM killer (the kernel reports {kills} on that node)"
        # A rank may have killed itself, or be in another cgroup.
        return f"{words}; the kernel reports no OOM kill in its agent's cgroup"
    if ending.status == -signal.SIGBUS and len(ending.shm) == 2:
        size, free = ending.shm
        return f"{words}; /dev/shm on that node has {size_words(free)} free of {size_words(size)}"
    return words


# The origin of an error. When a rank fails, the ranks that wait for it in a collective lose their connections
# and fail, too. They often exit before that rank, which may be in a `finally` block or shutting down.

_RANK_PREFIX = r"(?m)^\[\w*rank\d+\]:?\s?"
"""Prefix that the excepthook of torch.distributed puts before each line."""
_IGNORED = rf"(?m)^Exception ignored .*\n(?:{re.escape(TRACEBACK)}\n(?: .*\n)*.*\n?)?"
"""An exception that doesn't end the program, for example in `__del__` while the interpreter shuts down."""
_GROUP = "Exception Group Traceback"
_LATER_IN_GROUP = r"(?m)^( +)\+-+ 2 -+\n(?:\1.*\n?)*"
"""The exceptions of a group except the first. Only the innermost group ends with a line."""
_MARGIN = r"(?m)^ +\+[-+]+(?: 1 -+)?\n|^ +[|+] ?"
_CHAINED = (
    r"(?m)^(?:During handling of the above exception, another exception occurred"
    r"|The above exception was the direct cause of the following exception):$"
)
_LOG = r"(?m)^\[?[WEIF]\d{4} .*|^\S.* NCCL (?:INFO|WARN|TRACE) .*"
"""Log lines of torch's C++ code and of NCCL: from other threads or, after a traceback, its consequences."""
_FATAL = r"(?m)^(?:\[?F\d{4} |terminate called after throwing )"
"""The start of what C++ code prints when it ends the process, perhaps as a consequence of an exception."""
_REMARK = (
    r"(?m)^(?:\[\w*rank\d+\]:? ?)?(?:\[?[IW]\d{4} \d\d:\d\d:\d\d\.\d+ .*|frame #\d+: .* \(0x[0-9a-f]+ in .*\)"
    r"|\[E\d{4} .*ProcessGroupNCCL.*(?:dump signal|signal dumping|dump debug info).*"
    r"|Exception raised from \S+ at \S+:\d+ \(most recent call first\):)\n?"
)
"""Lines that don't indicate why a rank ended: information and warnings in torch's logs, frames of C++ code,
and the logs of a flight recorder, which may have been requested by another rank."""
_WATCHDOG = (
    r"Watchdog caught collective operation timeout: .*"
    r"|(?<=raised the following async exception: )NCCL error.*"
    r"|(?<=watchdog thread terminated with exception: )NCCL error.*"
)
_NCCL_ERROR = (
    r"NCCL error(?: in: \S+)?[:,] ([^\n(]{1,200}?)(?: \(run with [^\n)]*\))?, NCCL version [\d.]+\n"
    r"(?:nccl\w+: .*\n)?Last error:\n *(\S.*)"
)
"""An error of nccl as torch reports it, and then what NCCL itself says of it (c10d/NCCLUtils.cpp)."""
_ABORT = rf"(?m)^(?:\[?[EF]\d{{4}} |terminate called after throwing )|{_WATCHDOG}"
"""The start of what C++ code may print after a traceback before it ends the process."""
_WATCHDOG_FRAME = r"(?m)^#\d+ (.+) from (.+):(\d+)$"
"""The error and its frames, as torch logs them when nccl fails (c10d/ProcessGroupNCCL.cpp)."""
_FRAME = r'(?m)^ +File "([^"]+)", line (\d+)'
_LIBRARY = r"/(?:site|dist)-packages/|/lib/python\d|^<frozen "
_EXCEPTION = r"(?m)^([A-Za-z_][\w.]*)(?:: (.*))?$"
_EXPIRED = (
    r"(?i:timed out|time-out|\b(?:wait|socket|operation|application|connect|connection|read|write|barrier"
    r"|request|gateway) timeout\b|timeout waiting|failed to pass monitoredbarrier)"
)
"""What torch, gloo and others say when time runs out. The word "timeout" alone may be a setting's name."""
_TRANSIENT = (
    rf"OSError|IOError|Connect|Timeout|{_EXPIRED}|HTTP|URLError|SSL|gaierror|[Tt]emporar|[Uu]navailable"
    r"|AcceleratorError|(?:CUDA|HIP) error|CUDA_ERROR|NCCL|ECC"
)
"""Errors of networks, storage and devices, which might not recur in the next attempt."""
_AFTERWARDS = rf"terminate called without an active exception|\[?[WEIF]\d{{4}} |{_CHAINED[4:]}"
"""Lines after a traceback that don't show a separate reason: from C++ code, from logs, or in a chain."""
_MORE = (
    r"\s|CUDA kernel errors|For debugging consider|Compile with `|Search for `|frame #|nccl\w+Error"
    r"|Last error:|Cuda failure|wandb: |Set the environment variable HYDRA|from user code:"
)
"""Further lines of a message: indented, from torch's and NCCL's C++ code, or from exit hooks."""
_FAULT = r"(?m)(?<=^  )what\(\): .*$|^Fatal Python error: .*$|^Timeout \(\d+:\d\d:\d\d\)!$"
"""The reason why a process ends, above the stacks that faulthandler prints with it."""
_STACK = r' +File ".*", line \d+ in |Extension modules: '
"""The last line of such stacks."""
_COLOUR = r"\x1b\[[\d;]*m"
_IN_TORCH_DISTRIBUTED = r"/torch/distributed/(?!elastic/|launcher/|run\.py)"
_COLLECTIVES = (
    r"gloo/|[Gg]loo connect|c10d|TCPStore|Dist(?:Network|Store|Backend)Error|ProcessGroup|nccl|NCCL"
    r"|monitoredBarrier|JAX distributed service|tensorpipe"
)
_OF_THE_STORE = (
    r"wait timeout after \d+ms, keys: |Timed out after \d+ seconds waiting for clients"
    r"|failed to recv, got 0 bytes"
)
"""Messages of torch's store, which a script may raise or print as its own, without the name of the store."""
_LOST = (
    r"[Cc]onnection (?:was )?(?:closed|reset|refused)|Broken pipe|[Ff]ailed to recv"
    r"|failed to connect|remote process exit|ncclRemoteError|network error|pair closure"
    r"|received errors while waiting|another task died|\beof \(this error originated at tensorpipe"
)
_OF_RANKS = r"CheckpointException ranks:dict_keys\(\[([\d, ]+)\]\)"
"""The failed ranks in the exception that torch.distributed.checkpoint raises on all ranks."""
_TORCHRUN = (
    r'(?m)^Traceback \(most recent call last\):\n(?:  .*\n)*?  File ".*/torch/distributed/run\.py", line '
)
"""The start of the traceback that torchrun itself prints when one of its ranks has failed."""
_ROOT = (
    r"Root Cause \(first observed failure\):\n(?:.*\n)*?"
    r"  rank +: (\d+) \(local_rank: (\d+)\)\n  exitcode +: (-?\d+) \(pid: (\d+)\)"
)

_BELOW = r"(?m)^distlaunch: (rank \d+ .*?) failed(?: first)?: (.*)$"


class Raised(Frozen):
    """An exception: its type, place in the user's code (`train.py:41`), and message without numbers."""

    error: str
    place: str
    message: str

    @property
    def words(self) -> str:
        """Return the exception for messages: `ValueError at train.py:41`."""
        return f"{self.error} at {self.place}"


class Words(Frozen):
    """The evidence in a rank's last output: whether there is a `traceback`, and whether a peer was gone.

    In the output of a rank that was stopped, only a traceback at the end counts, since it may have handled
    earlier ones.
    `timed_out` is set if no connection was lost but waiting for the peer timed out. `on_gpu` is set if
    torch's watchdog for nccl reported the error. `stack` contains the frames in which the rank was waiting.
    `raised` is the exception, or None if there is none or it may be temporary. `of_ranks` are the ranks that
    the exception names as the ones that failed, if any.
    """

    traceback: bool = False
    peer_gone: bool = False
    timed_out: bool = False
    stack: tuple[str, ...] = ()
    raised: Raised | None = None
    on_gpu: bool = False
    of_ranks: tuple[int, ...] = ()


def words_of(
    status: int,
    words: str,
    record: Mapping[str, Any] | None = None,
    went_on: tuple[float, float] = (0.0, 0.0),
) -> Words:
    """Return the evidence in a rank's status, its last output and its error record (see `WorkerExited`)."""
    if status < 0 and status not in (-signal.SIGABRT, -signal.SIGTERM, -signal.SIGKILL):
        return Words()  # no Python exception ends like this
    output, below = split_launcher(words)
    marked = re.search(_RANK_PREFIX + re.escape(TRACEBACK), output) is not None
    output, recorded = _plain(output), _plain(record_text(record))
    if not marked:
        output = _without_handled(output, status, went_on)
    # torch also logs errors after which it tries again. C++ code that can't go on aborts.
    counts_logs = below or status == -signal.SIGABRT
    text = root_error(recorded or (output if counts_logs else re.sub(_LOG, "", output)))
    watchdog = None if TRACEBACK in output or recorded else re.search(_WATCHDOG, output)
    error = watchdog[0] if watchdog else _of_a_collective(text)
    if not error and status > 0 and TRACEBACK not in output:  # earlier lines may be about tries
        error = "".join(line for line in text.splitlines()[-1:] if re.search(_OF_THE_STORE, line))
    lost, timed_out = re.search(_LOST, error) is not None, re.search(_EXPIRED, error) is not None
    on_gpu, peer_gone = watchdog is not None, lost or timed_out
    stack = _watchdog_frames(output) if watchdog else python_frames(text)[::-1] if peer_gone else ()
    last = _final_exception(recorded or output)
    raised = _raised_in(last)
    found = TRACEBACK in output or bool(recorded)
    of_ranks = _of_ranks(recorded or output) if found else ()
    return Words(found, peer_gone, timed_out and not lost, stack, raised, on_gpu, of_ranks)


def _without_handled(output: str, status: int, went_on: tuple[float, float]) -> str:
    """Return a rank's output without tracebacks of exceptions that it must have handled.

    A rank that a signal ended has handled an exception if it printed anything after it. One that exits may
    print more because of an exception, but not for HANDLED_S. When C++ code ends a rank after an exception
    that nothing handled, what it prints is only a consequence.
    """
    before = output
    if status == -signal.SIGABRT:
        abort = re.compile(_ABORT).search(output, max(0, output.rfind(TRACEBACK)))
        if not abort:
            return output
        before = output[: abort.start()]
    if TRACEBACK not in before:
        return output
    printed_more = not _ends_with_error(before)
    by_signal, by_exit = printed_more or went_on[1] >= LATER_S, printed_more and max(went_on) >= HANDLED_S
    if not (by_signal if status < 0 else by_exit):
        return output
    after = _parsed(before.rpartition(TRACEBACK)[2])[2]
    return "\n".join(after) + output[len(before) :]


def _of_ranks(words: str) -> tuple[int, ...]:
    """Return the failed ranks that the last chain of exceptions names. It quotes their tracebacks, too."""
    _, chain = _chains(words.replace(f"{TRACEBACK} (RANK", "(RANK"))
    named = re.findall(_OF_RANKS, "\n".join(chain))
    return tuple(int(rank) for rank in named[-1].split(",")) if named else ()


def _plain(words: str) -> str:
    """Return output without torch's prefixes and exceptions that Python ignores.

    The first exception of a group is like any other.
    """
    text = re.sub(_IGNORED, "", re.sub(_RANK_PREFIX, "", words))
    return re.sub(_MARGIN, "", re.sub(_LATER_IN_GROUP, "", text)) if _GROUP in text else text


def record_text(record: Any) -> str:
    """Return the text in an error record by torch's @record: its traceback, else its message."""
    text = isinstance(record, dict) and (record.get("callstack") or record.get("message"))
    return text if isinstance(text, str) else ""


def _raised_in(error: str) -> Raised | None:
    """Return the exception at the end of a traceback, if nothing follows that could be the real reason."""
    frames, last, after = _parsed(error)
    if last is None or re.search(_TRANSIENT, last[0]) or after:
        return None
    own = [frame for frame in frames if not re.search(_LIBRARY, frame[1])] or frames
    place = f"{_short_path(own[-1][1])}:{own[-1][2]}"
    return Raised(last[1], place, re.sub(r"0x[0-9a-f]+|\d+", "#", last[2] or ""))


def _ends_with_error(output: str) -> bool:
    """Return whether the output ends with a traceback, perhaps with an error message of several lines."""
    _, found, error = output.rpartition(TRACEBACK)
    _, last, after = _parsed(error)
    return bool(found) and last is not None and all(re.match(_MORE, line) for line in after)


def _parsed(error: str) -> tuple[list[re.Match[str]], re.Match[str] | None, list[str]]:
    """Return a traceback's frames, its exception, and the lines after it that don't follow from it."""
    frames = list(re.finditer(_FRAME, error))
    rest = re.split(_FATAL, error[frames[-1].end() :], maxsplit=1)[0] if frames else ""
    last = re.search(_EXCEPTION, rest)
    lines = rest[last.end() :].splitlines() if last else []
    return frames, last, [line for line in lines if line.strip() and not re.match(_AFTERWARDS, line)]


def exception_line(lines: Sequence[str], start: int, end: int) -> range:
    """Return the index of a traceback's exception among the lines from `start` to `end`; empty without one.

    Unlike the other lines of a traceback, it is not indented.
    """
    for at in range(start, end):
        if re.match(r"\S", re.sub(_RANK_PREFIX, "", lines[at])):
            return range(at, at + 1)
    return range(0)


def python_frames(text: str) -> tuple[str, ...]:
    """Return the frames in a traceback or in faulthandler output, in the same order: `read (t.py:3)`."""
    found = re.findall(r'(?m)^  File "(.+)", line (\d+),? in (.+)$', text)
    return tuple(f"{name} ({_short_path(path)}:{line})" for path, line, name in found)


def _watchdog_frames(text: str) -> tuple[str, ...]:
    """Return the frames of a collective that failed, innermost first."""
    found = re.findall(_WATCHDOG_FRAME, text)
    return tuple(f"{name} ({_short_path(path)}:{line})" for name, path, line in found)


def py_spy_frames(dump: str) -> tuple[str, ...]:
    """Return the frames of the first thread, innermost first, as py-spy prints them: `read (t.py:3)`.

    An error message from py-spy contains no frames.
    """
    first_thread = re.split(r"(?m)^Thread .*\n", dump)[1:2]
    return tuple(line.strip() for text in first_thread for line in re.findall(r"(?m)^    .*$", text))


def py_spy_error(dump: str) -> str:
    """Return py-spy's reason for a dump without frames."""
    reason = dump.strip().partition("\n")[0]
    return "its Python is starting or exiting" if reason.startswith("Process ") else reason


def _short_path(path: str) -> str:
    _, torch, rest = path.rpartition("/torch/")
    return f"torch/{rest}" if torch else path.rpartition("/")[2]


def root_error(words: str) -> str:
    """Return the first error: the oldest exception in the last traceback's chain, else the last lines."""
    _, chain = _chains(words)
    return chain[0] if chain else "\n".join(without_remarks(words).splitlines()[-LAST_LINES:])


def _chains(words: str) -> tuple[list[str], list[str]]:
    """Split output at its tracebacks. Return what precedes the last chain of exceptions, and that chain."""
    blocks = words.split(TRACEBACK)
    first = len(blocks) - 1
    while first > 1 and re.search(_CHAINED, blocks[first - 1]):
        first -= 1
    return (blocks[:first], blocks[first:]) if first else (blocks, [])


def headline(words: str, raised: bool) -> list[str]:
    """Return an error in at most two lines: the exception and its place if one was `raised`, else one line.

    The place is the innermost frame in the user's own code. Without a traceback, the line is that of torch's
    watchdog, of C++ or of faulthandler, or else the last one with a word in it (mpirun draws a rule below its
    message).
    """
    text = re.sub(_COLOUR, "", _plain(without_remarks(words)))
    text = re.sub(_NCCL_ERROR, r"NCCL error: \1: \2", text)
    lines = [line for line in text.splitlines() if re.search(r"\w", line) and not re.match(_AFTERWARDS, line)]
    error = _final_exception(text)
    frames = list(re.finditer(_FRAME, error)) if raised else []
    if not frames:
        known = re.search(_WATCHDOG, text)
        if not known and re.match(_STACK, "".join(lines[-1:])):
            known = re.search(_FAULT, text)
        return [known[0].rstrip()] if known else lines[-1:]
    after = error[frames[-1].end() :].splitlines()[1:]
    own = [frame for frame in python_frames(error) if "(torch/" not in frame]
    return [*[line for line in after if line[:1].strip()][:1], *(f"in {frame}" for frame in own[-1:])]


def _final_exception(words: str) -> str:
    """Return the last traceback in `words` and the text after it; in a chain, the exception raised last.

    If that is only the loss of another rank, perhaps during the cleanup, return the oldest exception.
    """
    last = words.rpartition(TRACEBACK)[2]
    return root_error(words) if _of_a_collective(last) else last


def _of_a_collective(error: str) -> str:
    """Return the message of an error in a collective, or "" for any other error.

    Another error may have the same message. The source line before it and library logs after it aren't part
    of it.
    """
    frames, last, _ = _parsed(error)
    message = re.split(_LOG, last.string[last.start() :], maxsplit=1)[0] if last else error
    within = bool(frames) and bool(re.search(_IN_TORCH_DISTRIBUTED, frames[-1][1]))
    patterns = rf"{_COLLECTIVES}|{_OF_THE_STORE}" if last else _COLLECTIVES
    return message if within or re.search(patterns, message) else ""


def split_launcher(words: str) -> tuple[str, str]:
    """Return the last output of the first rank that failed below a launcher, and a line about the failure.

    A launcher is torchrun, or mpirun with its own distlaunch. For any other program, return its own last
    output and "".
    """
    if below := list(re.finditer(_BELOW, words)):
        quoted = "".join(re.findall(r"(?m)^distlaunch:   \| (.*\n)", words))
        return quoted or words[: below[0].start()], f"root cause: {below[-1][1]}: {below[-1][2]}"
    own = list(re.finditer(_TORCHRUN, words))
    if not own:
        return words, ""
    output, report = words[: own[-1].start()], words[own[-1].start() :]
    found = re.search(_ROOT, report)
    if not found:  # torchrun itself has failed: its last line contains the error
        return output, report.strip().splitlines()[-1]
    rank, local_rank, exitcode, pid = found.groups()
    # If torch.distributed marks the output of ranks, leave out the other ranks, which lost this one.
    marked = re.findall(rf"(?m)^\[\w*rank{rank}\]:.*\n", output)
    how = f"root cause: rank {rank} (local rank {local_rank}, pid {pid}): {status_words(int(exitcode))}"
    return "".join(marked) or output, how


def without_remarks(words: str) -> str:
    """Return `words` without lines that don't indicate why a rank ended, or "" if nothing remains."""
    rest = re.sub(_REMARK, "", words)
    return rest if rest.strip() else ""


def traceback_key(words: str) -> str:
    """Return the last traceback in `words` without differences between ranks, or "" if there is none."""
    _, found, last = words.rpartition(TRACEBACK)
    return re.sub(r"\d+", "#", re.sub(_RANK_PREFIX, "", last)).strip() if found else ""


# Advice


def advice(ending: Ending, words: str) -> str:
    """Return one line of advice on a known problem, or "" if no known problem matches."""
    of_status = _BY_STATUS.get(ending.status)
    if of_status and (hint := of_status(ending)):
        return hint
    if ending.status == -signal.SIGSEGV:
        common = "mismatched torch and CUDA versions are a common cause"
        shown = "Fatal Python error" in words
        return common if shown else f"set PYTHONFAULTHANDLER=1 in its environment to see where; {common}"
    aborted = ending.status == -signal.SIGABRT and "terminate called without an active exception" in words
    if aborted and TRACEBACK not in words:  # after an exception, the traceback is more informative
        return "a gloo thread outlived the interpreter: end the script with dist.destroy_process_group()"
    if ending.peer_gone:
        hint = next((hint for pattern, hint in _WITHOUT_PEER if re.search(pattern, words)), _NO_ERROR)
        return hint + _CUT_OFF * ending.networked
    last = "\n".join(_without_earlier_exceptions(words).splitlines()[-LAST_LINES:])
    if ending.module and (hint := _of_module(ending.module, last)):
        return hint
    found = next((text for pattern, text in _BY_WORDS if re.search(pattern, last)), "")
    return found(ending) if callable(found) else found


def _without_earlier_exceptions(words: str) -> str:
    """Return output without tracebacks before the last chain of exceptions: the script has handled them."""
    (start, *earlier), chain = _chains(_plain(words))
    return "\n".join([start, *("\n".join(_parsed(block)[2]) for block in earlier), *chain])


def _of_module(module: str, words: str) -> str:
    """Return advice on the name of the job's own module if `python -m` can't run it."""
    name = re.escape(module)
    if without_py := re.search(rf"Try using '(\S+)' instead of '{name}' as the module name", words):
        return f"write the module without .py: `module: {without_py[1]}`; for a file, use `script:`"
    if re.search(rf"No module named {name}\.__main__; ", words):
        return f"specify a module in that package, or add a __main__.py, which `python -m {module}` runs"
    if re.search(
        rf"(?m)^\S+: (?:No module named {name}$|Error while finding .* '{name}' .*No module)", words
    ):
        return "check the module's name: Python looks for it in the workdir and on PYTHONPATH"
    return ""


def _needs_stdin(what: str, needed: str) -> Callable[[Ending], str]:
    hint = f"{what} needs {needed}, which ranks lack: set `stdin: rank 0`, or use `distlaunch torchrun`"
    return lambda ending: "" if ending.stdin else hint


def _no_package(ending: Ending) -> str:
    python = f"the workers' Python ({ending.python})" if ending.python else "the program's Python"
    own = "your own modules must be beside the script or on PYTHONPATH"
    lacks = f"{python} lacks a package: install it there, or use another Python"
    return f"{lacks}; {own} (sync.include adds files that git ignores)"


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


_TIMED_OUT = (
    r"Watchdog caught collective operation timeout|NCCL.*[Tt]imeout(?!\(ms\)=)|Timed out waiting \d+ms"
)
_MISSED = "a collective timed out: look for a rank that stalled, or that called another collective"
_IN_INIT = r"(?:wait timeout|Timed out) after .*(?:/default_pg/0/|clients joined)"
PARTED = "look for a branch that depends on the rank, for uneven data, or for a rank that is stuck"
OTHER_SIZE = (
    "init_process_group waited for another rank: if all ranks reached it, its world_size is too large "
    "(by default, it is WORLD_SIZE)"
)
_NO_ERROR = "no rank reported its own error; check the end of each rank's log"
_CUT_OFF = (
    "; otherwise, the network between the nodes may have failed: check firewalls and NCCL_SOCKET_IFNAME or "
    "GLOO_SOCKET_IFNAME, and run `distlaunch check --links`"
)
_WITHOUT_PEER = ((_IN_INIT, OTHER_SIZE), (_TIMED_OUT, _MISSED))
_SHM = "data loaders share tensors in /dev/shm: enlarge it (docker run --shm-size=8g) or set num_workers=0"

_BY_STATUS: dict[int, Callable[[Ending], str]] = {
    -signal.SIGKILL: _killed,
    -signal.SIGBUS: _bus_error,
    127: lambda _: "shells return 127 when a command is not found: check what the script starts, and PATH",
    126: lambda _: "shells return 126 when a file can't be executed: check its mode and its #! line",
}

_BY_WORDS: Sequence[tuple[str, str | Callable[[Ending], str]]] = (
    (
        "distributed collective mismatch|mismatch in collective sizes",
        "perhaps another rank passed a tensor of another size or type, or called another collective",
    ),
    (r"DataLoader worker .* killed by signal: Bus error", _SHM),
    (r"DataLoader worker .*(?:killed by signal|exited unexpectedly)", _data_loader),
    (r"bdb\.BdbQuit", _needs_stdin("breakpoint()", "a terminal")),
    (r"EOFError: EOF when reading a line", _needs_stdin("input()", "stdin")),
    (
        r"[Aa]ddress already in use|EADDRINUSE",
        "leave out rendezvous.endpoint to get a free port; `distlaunch check-port` shows what uses this one",
    ),
    (
        r"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError",
        "GPU memory is full: use smaller batches; `nvidia-smi` on the node shows what else is using it",
    ),
    (
        r"invalid device ordinal",
        "LOCAL_RANK is beyond the visible GPUs: lower procs_per_node, or check CUDA_VISIBLE_DEVICES",
    ),
    (
        r"device-side assert|illegal memory access|unspecified launch failure|misaligned address",
        "a GPU kernel failed, perhaps in an earlier call: set env: {CUDA_LAUNCH_BLOCKING: 1} to see in which",
    ),
    (
        "Duplicate GPU detected",
        (
            "two ranks share a GPU: call torch.cuda.set_device(LOCAL_RANK); if they are meant to share it, "
            "give each node or rank its own NCCL_HOSTID"
        ),
    ),
    (_TIMED_OUT, _MISSED),
    (
        r"NCCL (?:error|WARN)|ncclSystemError|ncclUnhandledCudaError|ncclInternalError",
        "set env: {NCCL_DEBUG: INFO} to see more; NCCL_SOCKET_IFNAME must name an interface on every node",
    ),
    (
        r"connection to etcd has failed",
        "that node reaches no etcd server at rendezvous.endpoint, or none with the v2 API (etcd --enable-v2)",
    ),
    (
        r"[Nn]o space left on device",
        "a disk is full: check where the script writes, TMPDIR, and /dev/shm",
    ),
    (r"ModuleNotFoundError", _no_package),
)
