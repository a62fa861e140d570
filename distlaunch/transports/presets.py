"""How a scheduler starts a command on a host of its job: command lines, and their words when they fail.

From their manuals and sources: sge_submit(1), blaunch(1). PBS and Flux are absent: pbs_tmrsh has no stdin,
and flux exec ends what it passes on at the first zero byte, so that their hosts are reached over ssh.
"""

from collections.abc import Mapping
from types import MappingProxyType

from distlaunch.agent.frozen import Frozen
from distlaunch.allocation.pods import exec_words
from distlaunch.transports.failure import Kind, Patterns


class Preset(Frozen):
    """`words` and `shell` are as `Command` has them; the command ends with `failed` for failures of its own.

    `advice` is what to do about those that a setting of the scheduler's is behind. Jobs have the commands'
    folder in the variable `folder`, where a shell start-up file has set another PATH. One that is `deaf` must
    not end by the signals that announce a job's end, which its scheduler sends to all of the job's processes.
    """

    words: tuple[str, ...]
    failures: Patterns
    advice: Mapping[Kind, str]
    folder: str
    shell: bool = True
    failed: int | None = None
    deaf: bool = False


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "grid-engine": Preset(
            ("qrsh", "-inherit", "-V", "{host}"),
            (
                (Kind.TASK_REFUSED, r"didn't accept task|not in the parallel environment|no free slots"),
                (Kind.NO_ALLOCATION, r"JOB_ID|job .* (?:does not exist|is unknown)|unknown job"),
                (Kind.UNRESOLVED, r"can't resolve host ?name|unknown host"),
                (Kind.UNREACHABLE, r"can't find connection|failed sending task to execd|timeout|timed out"),
            ),
            {
                Kind.TASK_REFUSED: "is control_slaves TRUE in `qconf -sp $PE`? `--set launcher=ssh` does "
                "without it",
                Kind.NO_ALLOCATION: "the job is over: see `qstat -j $JOB_ID`",
            },
            "SGE_BINARY_PATH",
            failed=1,
        ),
        "kubernetes": Preset(
            exec_words(None, None),
            (
                (Kind.UNRESOLVED, r"pods .* not found|\(NotFound\)"),
                (
                    Kind.TASK_REFUSED,
                    r"\(Forbidden\)|[Cc]annot create resource|\(Unauthorized\)|must be logged in",
                ),
                (Kind.NODE_DOWN, r"container not found|cannot exec (?:into|in) a|completed pod"),
                (
                    Kind.UNREACHABLE,
                    r"[Uu]nable to connect|connection (?:refused|timed out)|i/o timeout|error dialing",
                ),
            ),
            {
                Kind.TASK_REFUSED: "try `kubectl auth can-i create pods --subresource=exec`",
            },
            "",
            failed=1,
        ),
        "lsf": Preset(
            ("blaunch", "{host}"),
            (
                (Kind.TASK_REFUSED, r"not (?:allocated|part of|in) .*(?:job|allocation)|[Ii]nvalid host"),
                (Kind.NO_ALLOCATION, r"LSB_JOBID|only .* (?:under|within) .*LSF|[Jj]ob .* not found"),
                (Kind.UNREACHABLE, r"Failed in .*connect|connection (?:refused|timed out)|not responding"),
            ),
            {
                Kind.TASK_REFUSED: "try `blaunch HOST hostname`; `--set launcher=ssh` does without it",
                Kind.NO_ALLOCATION: "the job is over: see `bjobs -l $LSB_JOBID`",
            },
            "LSF_BINDIR",
            failed=255,
            deaf=True,
        ),
    }
)
