"""Dumps the Python stacks of workers, with py-spy where the node has it."""

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Optional

    from distlaunch.agent.poller import Poller

DUMP_S = 20.0
MAX_STACK = 1 << 16
"""Bytes of one worker's stacks."""


def py_spy(python: str) -> "Optional[str]":
    """py-spy beside the worker's interpreter, or in PATH."""
    folders = [os.path.dirname(python), *os.environ.get("PATH", os.defpath).split(os.pathsep)]
    paths = (os.path.join(folder, "py-spy") for folder in folders if folder)
    return next((path for path in paths if os.access(path, os.X_OK)), None)


class Dump:
    """One run of py-spy; `on_end` gets what it printed. Its process is reaped with all others."""

    def __init__(self, poller: "Poller", program: str, pid: int, on_end: "Callable[[bytes], object]") -> None:
        self._poller, self._on_end, self._name = poller, on_end, "stacks of %d" % pid
        self._text = b""
        self._pipe, write = os.pipe()
        os.set_blocking(self._pipe, False)
        if os.fork() == 0:
            _become(program, pid, write)
        os.close(write)
        poller.watch(self._pipe, self._read)
        poller.after(DUMP_S, self._name, self._end)  # the sweep takes a py-spy that hangs

    def _read(self) -> None:
        data = os.read(self._pipe, 1 << 16)
        self._text = (self._text + data)[:MAX_STACK]
        if not data:
            self._end()

    def _end(self) -> None:
        self._poller.cancel(self._name)
        self._poller.forget(self._pipe)
        os.close(self._pipe)
        self._on_end(self._text)


def _become(program: str, pid: int, output: int) -> None:
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.execv(program, [program, "dump", "--nonblocking", "--pid", str(pid)])
    finally:
        os._exit(127)
