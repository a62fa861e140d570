"""Shows a run on the terminal's alternate screen: a run of this process, or of another one."""

import contextlib
import os
import select
import signal
import subprocess
import termios
import time
import tty
from collections.abc import Iterator, Mapping

from rich.console import Console, Group
from rich.console import ConsoleDimensions as Size
from rich.live import Live

from distlaunch.observers.model import RunModel, uses_in
from distlaunch.observers.observer import Observed
from distlaunch.observers.recording import WATCHED
from distlaunch.observers.terminal import Terminal
from distlaunch.signals import Interrupts
from distlaunch.supervisor.actions import ShowMessage
from distlaunch.supervisor.nodes import Use
from distlaunch.supervisor.summary import Summary
from distlaunch.view.rendering import Wish, after, lines, row_at

LOOK_S = 0.1
"""Seconds between two checks for keys."""
TOUCH_S = 2.0
"""Seconds between two signals to the controller that there is a viewer."""
DRAW_S = 1.0
"""Seconds between two redraws without a key."""


class Screen(RunModel):
    """The terminal's alternate screen, for a run of this process, or one of another, in `folder`.

    `q` stops a run of this process, but only quits the screen of any other. `close` returns to the main
    screen, where the `terminal` shows how the run ended.
    """

    def __init__(
        self, terminal: Terminal, interrupts: Interrupts, folder: str = "", began: float | None = None
    ) -> None:
        super().__init__(time.time() if began is None else began)
        self._terminal, self._interrupts, self._folder = terminal, interrupts, folder
        self._messages: list[tuple[ShowMessage, float]] = []
        self._wish, self._drawn_at, self._touched_at, self._size = Wish(), 0.0, 0.0, Size(0, 0)
        with contextlib.ExitStack() as stack:
            output = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
            console = Console(file=stack.enter_context(output), highlight=False)
            live = Live(
                console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
            )
            stack.enter_context(_rescued(1))
            self._keys = stack.enter_context(_keyboard())
            self._live = stack.enter_context(live)
            self._draw()
            self.close = stack.pop_all().close
        self.wake_at = 0.0

    @classmethod
    def of(cls, run: Observed) -> "Screen":
        """Make the screen of a run of this process."""
        return cls(Terminal(run.shown.interrupts, run.shown.output_fd), run.shown.interrupts)

    def woken(self) -> None:
        """Handle keys, and redraw if anything may have changed."""
        now = time.monotonic()
        self.wake_at = now + LOOK_S
        if self._folder and now - self._touched_at > TOUCH_S:
            self._touched_at = now
            self.used(_watched_uses(self._folder), 0.0)
        wish = self._wish
        for key in _pressed(self._keys):
            wanted = after(self._wish, key, row_at(self, self._wish, self._size))
            if wanted is None:
                self._interrupts.send(0 if self._folder else signal.SIGINT)
            self._wish = wanted or self._wish
        late = now - self._drawn_at >= DRAW_S
        if late or wish != self._wish or self._live.console.size != self._size:
            self._draw()

    def message(self, message: ShowMessage, at: float) -> None:
        """Store the message for the history and for the end."""
        super().message(message, at)
        self._messages.append((message, at))

    def ended(self, summary: Summary) -> None:
        """Close the screen and show how the run ended; for a run of this process, its messages, too."""
        self.wake_at = None
        self.close()
        for message, at in () if self._folder else self._messages:
            self._terminal.message(message, at)
        self._terminal.ended(summary)

    def _draw(self) -> None:
        self._drawn_at, self._size = time.monotonic(), self._live.console.size
        shown = lines(self, self._wish, self._size, "quit" if self._folder else "stop the run")
        self._live.update(Group(*shown), refresh=True)


def _watched_uses(folder: str) -> Mapping[int, Use]:
    """Note for the controller that there is a viewer; return the use of ranks that it has written."""
    path = os.path.join(folder, WATCHED)
    with contextlib.suppress(OSError):  # without write access, show the existing values
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        os.utime(path)
    return uses_in(folder)


# Restores the terminal even if this process is killed. Stdout is the terminal. Only this process has the
# other end of stdin: if stdin ends without a line, this process is dead.
_RESCUER = (
    "exec 3>&1; was=$(stty -g <&3) || exit; echo ready >&2; exec 2>/dev/null; "
    r"""read word || { stty "$was" <&3; printf '\033[?1049l\033[?25h\033[0m'; }"""
)


@contextlib.contextmanager
def _rescued(terminal: int) -> Iterator[None]:
    """Make a shell restore the `terminal` if this process is killed while the body is running."""
    # In another session, so that it survives a signal to all processes of the terminal.
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
        rescuer.stderr.read(1)  # it has saved the terminal's state, or has exited
        try:
            yield
        finally:
            with contextlib.suppress(BrokenPipeError):
                os.write(rescuer.stdin.fileno(), b"left\n")


_KEYS = {
    b"\x1b[A": "up", b"\x1b[B": "down", b"\x1bOA": "up", b"\x1bOB": "down",
    b"\x1b[5~": "page up", b"\x1b[6~": "page down", b"\r": "enter", b"\n": "enter", b"\x1b": "escape",
    b"\x7f": "backspace", b"\x08": "backspace",
}  # fmt: skip


@contextlib.contextmanager
def _keyboard(fd: int = 0) -> Iterator[int | None]:
    """Read keys from the terminal one by one and without echo; None without a terminal."""
    if not os.isatty(fd):
        yield None
        return
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd, termios.TCSADRAIN)  # signals stay: Ctrl-C is one
    try:
        yield fd
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _pressed(fd: int | None) -> Iterator[str]:
    """Yield the keys pressed since the last call: names, or the characters themselves."""
    data = b""
    if fd is not None and select.select([fd], [], [], 0)[0]:
        with contextlib.suppress(OSError):
            data = os.read(fd, 1024)
    while data:
        size = next((n for n in (4, 3) if data[:n] in _KEYS), 1)
        if size == 1 and data[:1] == b"\x1b" and len(data) > 1:  # an unknown sequence
            return
        yield _KEYS.get(data[:size]) or data[:1].decode(errors="replace")
        data = data[size:]
