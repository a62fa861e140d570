"""Puts the terminal right when a process that shows a screen is killed, which can't do that itself."""

import contextlib
import os
import subprocess
from collections.abc import Iterator

# stdout is the terminal. The other end of stdin is ours alone: without a word of ours, its end is our death.
_RESCUER = (
    "exec 3>&1; was=$(stty -g <&3) || exit; echo ready >&2; exec 2>/dev/null; "
    r"""read word || { stty "$was" <&3; printf '\033[?1049l\033[?25h\033[0m'; }"""
)


@contextlib.contextmanager
def rescued(terminal: int) -> Iterator[None]:
    """While the body runs, a shell waits for our death; then the `terminal` is made as it is now."""
    # In a session of its own, so that what kills us with our terminal's job does not kill it.
    with subprocess.Popen(
        ["/bin/sh", "-c", _RESCUER],
        stdin=subprocess.PIPE,
        stdout=terminal,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    ) as rescuer:
        assert rescuer.stdin is not None
        assert rescuer.stderr is not None
        rescuer.stderr.read(1)  # it has seen how the terminal is now, or is gone
        try:
            yield
        finally:
            with contextlib.suppress(BrokenPipeError):
                os.write(rescuer.stdin.fileno(), b"left\n")
