"""Starts the process that reaches a node: sh, ssh, srun, or whatever a transport says."""

import os
import subprocess
from collections.abc import Mapping, Sequence

from distlaunch.agent import shared


def start(
    argv: Sequence[str], environ: Mapping[str, str], sharing: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """A process with a pipe to each of its three streams, in a session of its own. Raises OSError.

    It gets copies of the descriptors in `sharing`. The terminal's Ctrl-C does not reach it: that is for us to
    interpret, not for ssh.
    """
    copies = [os.dup(fd) for fd in sharing]
    try:
        return subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            pass_fds=copies,
            env={**environ, shared.VARIABLE: ",".join(map(str, copies))},
        )
    finally:
        for fd in copies:
            os.close(fd)
