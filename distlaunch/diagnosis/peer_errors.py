"""Whether a rank failed by itself or because it lost a peer, judged by its last words.

When a rank fails, those that wait for it in a collective lose their connections and fail as well, often
before the first one has ended: it may still be in a `finally`, or the interpreter's shutdown.
"""

import re
import signal
from collections.abc import Mapping
from typing import Any

from distlaunch.agent.frozen import Frozen
from distlaunch.wording import status_words

LAST_LINES = 40
"""Lines of last words that count if they hold no traceback."""
TRACEBACK = "Traceback (most recent call last):"
_RANK_PREFIX = re.compile(r"(?m)^\[\w*rank\d+\]:?\s?")
"""torch.distributed's excepthook puts it before each line."""
_CHAINED = re.compile(
    r"(?m)^(?:During handling of the above exception, another exception occurred"
    r"|The above exception was the direct cause of the following exception):$"
)
_LOG = re.compile(r"(?m)^\[[WEIF]\d{4} .*")
"""What torch's C++ logs: of other threads, and after a traceback of its consequences."""
_REMARK = re.compile(r"(?m)^(?:\[\w*rank\d+\]:? ?)?\[?[IW]\d{4} \d\d:\d\d:\d\d\.\d+ .*\n?")
"""What torch logs as information or as a warning: neither ends a rank."""
_FRAME = re.compile(r'(?m)^ +File "([^"]+)", line \d+')
_IN_TORCH_DISTRIBUTED = re.compile(r"/torch/distributed/(?!elastic/|launcher/|run\.py)")
_COLLECTIVES = re.compile(
    r"gloo/|[Gg]loo connect|c10d|TCPStore|Dist(?:Network|Store|Backend)Error|ProcessGroup|nccl|NCCL"
    r"|monitoredBarrier"
)
_LOST = re.compile(
    r"[Cc]onnection (?:was )?(?:closed|reset|refused)|Broken pipe|failed to recv"
    r"|failed to connect|remote process exit|ncclRemoteError|network error|pair closure"
    r"|received errors while waiting"
)
_TIMED_OUT = re.compile(r"[Tt]im(?:ed |e)out")
_TORCHRUN = re.compile(
    r'(?m)^Traceback \(most recent call last\):\n(?:  .*\n)*?  File ".*/torch/distributed/run\.py", line '
)
"""How torchrun's own traceback begins, with which it ends when a rank of its own has failed."""
_ROOT = re.compile(
    r"Root Cause \(first observed failure\):\n(?:.*\n)*?"
    r"  rank +: (\d+) \(local_rank: (\d+)\)\n  exitcode +: (-?\d+) \(pid: (\d+)\)"
)


class Words(Frozen):
    """What a rank's last words tell: whether they hold a `traceback`, and whether a peer was gone.

    `timed_out`: no connection was lost, but waiting for the peer timed out.
    """

    traceback: bool = False
    peer_gone: bool = False
    timed_out: bool = False


def words_of(status: int, stderr: str, record: Mapping[str, Any] | None = None) -> Words:
    """Judge a rank's exit by its status (as in `WorkerExited`), the end of its stderr, its error record."""
    if status < 0 and status not in (-signal.SIGABRT, -signal.SIGTERM, -signal.SIGKILL):
        return Words()  # no Python exception ends so
    said = _RANK_PREFIX.sub("", split_torchrun(stderr)[0])
    recorded = record and (record.get("callstack") or record.get("message"))
    text = root_error(recorded if isinstance(recorded, str) else said)
    error = _of_a_collective(text)
    lost, timed_out = _LOST.search(error) is not None, _TIMED_OUT.search(error) is not None
    return Words(TRACEBACK in said or bool(recorded), lost or timed_out, timed_out and not lost)


def root_error(words: str) -> str:
    """What went wrong first: the oldest exception of the last traceback's chain, or else the last lines."""
    blocks = words.split(TRACEBACK)
    if len(blocks) == 1:
        return "\n".join(without_remarks(words).splitlines()[-LAST_LINES:])
    first = len(blocks) - 1
    while first > 1 and _CHAINED.search(blocks[first - 1]):
        first -= 1
    return blocks[first]


def _of_a_collective(error: str) -> str:
    """What a collective says of its error; nothing of any other, which may use the same words."""
    frames = list(_FRAME.finditer(error))
    message = _LOG.split(error[frames[-1].end() :], maxsplit=1)[0] if frames else error
    within = bool(frames) and bool(_IN_TORCH_DISTRIBUTED.search(frames[-1][1]))
    return message if within or _COLLECTIVES.search(message) else ""


def split_torchrun(words: str) -> tuple[str, str]:
    """The last words of a torchrun: those of its first rank that failed, and in a line how it did.

    Those of any other program are its own, and "".
    """
    own = list(_TORCHRUN.finditer(words))
    if not own:
        return words, ""
    said, report = words[: own[-1].start()], words[own[-1].start() :]
    found = _ROOT.search(report)
    if not found:  # torchrun itself has failed: its last line says how
        return said, report.strip().splitlines()[-1]
    rank, local_rank, exitcode, pid = found.groups()
    # Where torch.distributed marks what ranks say, the others, whom it lost, are left out.
    marked = re.findall(rf"(?m)^\[\w*rank{rank}\]:.*\n", said)
    how = f"root cause: rank {rank} (local rank {local_rank}, pid {pid}): {status_words(int(exitcode))}"
    return "".join(marked) or said, how


def without_remarks(words: str) -> str:
    """`words` without the lines that torch logs as information or warnings; "" if nothing else is left."""
    rest = _REMARK.sub("", words)
    return rest if rest.strip() else ""


def traceback_key(words: str) -> str:
    """The last traceback in `words`, without what differs from rank to rank; "" where they hold none."""
    _, found, last = words.rpartition(TRACEBACK)
    return re.sub(r"\d+", "#", _RANK_PREFIX.sub("", last)).strip() if found else ""
