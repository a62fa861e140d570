"""What marks the processes of a run, so that a later agent finds what an earlier one has left.

Every worker carries two variables, and its descendants inherit them: DISTLAUNCH_RUN_ID, and
DISTLAUNCH_AGENT, which names the node (several may share a machine), the agent and its guardian, these
with their start times so that no later process with the same PID is taken for them. A process whose agent
and guardian are both dead is an orphan: nobody will sweep it.
"""

import os

from distlaunch.agent.lean import signal, socket
from distlaunch.agent.probes import procfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Optional

RUN, AGENT = b"DISTLAUNCH_RUN_ID=", b"DISTLAUNCH_AGENT="


def agent_cookie(node: int) -> str:
    """DISTLAUNCH_AGENT's value: node index, PID namespace, then PID and start time of agent and guardian."""
    agent, guardian = os.getpid(), os.getppid()
    each = ["%d.%d" % (pid, procfs.start_time(pid)) for pid in (agent, guardian)]
    return "-".join([str(node), _pid_namespace(os.getpid()), *each])


def kill_orphans() -> int:
    """Kill every process whose agent is dead; their number."""
    here = _pid_namespace(os.getpid())
    return _kill(lambda environ: _is_orphan(_value(environ, AGENT), here))


def kill_run(run_id: str, node: int) -> int:
    """Kill every process of a run's node, whichever agent started it; their number."""
    run, mine = run_id.encode(), b"%d-" % node
    return _kill(lambda environ: _value(environ, RUN) == run and _value(environ, AGENT).startswith(mine))


def claim(run_id: str, node: int) -> "Optional[socket.socket]":
    """Be the only agent of a run's node here, for as long as the socket is open; None while another is.

    The name is in the kernel's abstract namespace (unix(7)): nothing listens on it, and it ends with us.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        sock.bind("\0distlaunch-%s-%d" % (run_id, node))
    except OSError:
        sock.close()
        return None
    return sock


def _kill(wanted: "Callable[[bytes], bool]") -> int:
    """SIGKILL to every process whose environment is `wanted`, in a session of ours or not."""
    found = [pid for pid in procfs.pids() if wanted(procfs.environment(pid))]
    for signum in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that none forks meanwhile
        for pid in found:
            try:
                os.kill(pid, signum)
            except OSError:
                continue
    return len(found)


def _value(environ: bytes, name: bytes) -> bytes:
    _, found, rest = (b"\0" + environ).partition(b"\0" + name)
    return rest.partition(b"\0")[0] if found else b""


def _is_orphan(cookie: bytes, here: str) -> bool:
    words = cookie.decode(errors="replace").split("-")
    if len(words) != 4 or words[1] != here:
        return False  # not ours, or of a container whose PIDs mean something else
    return not any(_alive(process) for process in words[2:])


def _alive(process: str) -> bool:
    pid, _, started = process.partition(".")
    return pid.isdigit() and started.isdigit() and procfs.start_time(int(pid)) == int(started)


def _pid_namespace(pid: int) -> str:
    try:
        return os.readlink("/proc/%d/ns/pid" % pid)[5:-1]  # pid:[4026531836]
    except OSError:
        return "?"
