"""`view` and `run --view` on a real terminal, which they restore."""

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.harness import PATIENCE_S, distlaunch, distlaunch_argv, write_job

ENTERED, LEFT = b"\x1b[?1049h", b"\x1b[?1049l"
HIDDEN, SHOWN = b"\x1b[?25l", b"\x1b[?25h"
TRAINS = """
    import os, signal, time
    step = 0
    while not os.path.exists("gate"):
        step += 1
        os.write(1, b"step %d loss %.3f\\n" % (step, 5 / step))
        time.sleep(0.1)
"""
JOB = "nodes: 2\nprocs_per_node: 2\ngpus_per_node: 0\nlogs: {watch: 'loss ([0-9.]+)'}\n"


class Seen:
    """A command on a terminal of its own, and all that was written there."""

    def __init__(self, directory: Path, *words: str, argv: Any = (), env: Any = os.environ) -> None:
        self._controller, self.terminal = os.openpty()
        self.resize(24, 80)
        self.before = termios.tcgetattr(self.terminal)
        self.written = b""
        options: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), self.terminal)
        options |= {"cwd": directory, "env": {**env, "TERM": "xterm-256color"}, "start_new_session": True}
        argv = [*(argv or distlaunch_argv()), *words]
        self.process: subprocess.Popen[bytes] = subprocess.Popen(argv, **options)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: bytes) -> None:
        os.write(self._controller, keys)

    def read(self, within_s: float) -> bool:
        """Whether something came."""
        if not select.select([self._controller], [], [], within_s)[0]:
            return False
        self.written += os.read(self._controller, 1 << 16)
        return True

    def wait_for(self, pattern: str) -> None:
        """Until something on the screen matches, or how it is drawn."""
        deadline, since = time.monotonic() + PATIENCE_S, len(self.written)
        while not re.search(pattern, plain(new := self.written[since:])) and not re.search(
            pattern.encode(), new
        ):
            assert time.monotonic() < deadline and self.process.poll() is None, plain(self.written)[-3000:]
            self.read(1.0)

    def ended(self) -> int:
        """Its exit status, once all that it wrote is read."""
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline
            self.read(0.1)
        while self.read(0.0):
            pass
        return self.process.returncode

    def assert_sane(self) -> None:
        """The terminal is as it was, its first screen is shown, and its cursor.

        After SIGKILL, or Ctrl-S, somebody else does it, whose last word is about the cursor.
        """
        while self.written.rfind(SHOWN) < self.written.rfind(HIDDEN):
            assert self.read(PATIENCE_S), plain(self.written)[-3000:]
        assert termios.tcgetattr(self.terminal) == self.before
        assert self.written.count(ENTERED) == self.written.count(LEFT)
        assert self.written.rfind(SHOWN) >= self.written.rfind(HIDDEN)

    @property
    def after_screen(self) -> str:
        """What is there when the screen is gone."""
        return plain(self.written.rpartition(LEFT)[2])

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._controller)
        os.close(self.terminal)


def plain(written: bytes) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written.decode(errors="replace"))


@contextmanager
def seen(directory: Path, *words: str, **options: Any) -> Iterator[Seen]:
    shown = Seen(directory, *words, **options)
    try:
        yield shown
    finally:
        shown.close()


@pytest.fixture
def left(tmp_path: Path) -> Iterator[str]:
    """A run of four ranks that train."""
    done = distlaunch("run", "-d", str(write_job(tmp_path, TRAINS, JOB)), cwd=tmp_path, status=0)
    yield done.stdout.strip()
    distlaunch("stop", "--now", done.stdout.strip(), cwd=tmp_path)


def test_view_shows_a_run_and_leaves_it_alone(tmp_path: Path, left: str) -> None:
    with seen(tmp_path, "view") as shown:
        shown.wait_for(r"job +RUNNING")
        shown.wait_for("q quit")
        for size in ((1, 250), (70, 1), (24, 80)):
            shown.resize(*size)
            os.killpg(shown.process.pid, signal.SIGWINCH)
            shown.read(0.02)
        shown.wait_for(r"\n3 +node1 +running +\d+% +\d")  # what ranks use is sampled
        shown.wait_for(r"/s +[▁-█]+")
        shown.press(b"j" * 3 + b"\r")
        shown.wait_for("── rank 3")
        shown.press(b"h")
        shown.wait_for("── history")
        shown.press(b"/step\r")
        shown.wait_for("lines containing 'step'")
        shown.press(b"q")
        assert shown.ended() == 0
        shown.assert_sane()
        assert f"detached from {left} without stopping it" in shown.after_screen
    assert "RUNNING" in distlaunch("ps", cwd=tmp_path).stdout


def test_says_how_to_follow_a_detached_run(tmp_path: Path) -> None:
    with seen(tmp_path, "run", "-d", str(write_job(tmp_path, "pass", JOB))) as shown:
        assert shown.ended() == 0
    run, told = plain(shown.written).splitlines()
    assert told == f"distlaunch: running in the background; follow it with `distlaunch attach {run}`"
    distlaunch("wait", run, cwd=tmp_path, status=0)


@pytest.mark.parametrize("command", ["view", "run --view"])
def test_shows_the_end_below_the_screen(tmp_path: Path, request: pytest.FixtureRequest, command: str) -> None:
    what = request.getfixturevalue("left") if command == "view" else str(write_job(tmp_path, TRAINS, JOB))
    with seen(tmp_path, *command.split(), what) as shown:
        shown.wait_for("q quit" if command == "view" else "q stop the run")
        shown.wait_for(r"\n3 +node1 +running +\d+%")
        (tmp_path / "gate").touch()
        assert shown.ended() == 0
        shown.assert_sane()
        assert "4 ranks on 2 nodes simulated on this machine finished in" in shown.after_screen


SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL]
PHASES = {
    "entered": (r"\?1049h", b""),
    "running": (r"job +RUNNING", b""),
    "typing": ("loss", b"/ste"),
    "history": ("loss", b"h"),
    "scrolled": ("loss", b"jj\r\x1b[5~"),
}
"""What is waited for on the screen, and what is then typed."""


@pytest.mark.parametrize("phase", ["entered", "running"])
@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_to_a_run_leaves_the_terminal_sane(tmp_path: Path, signum: int, phase: str) -> None:
    with seen(tmp_path, "run", "--view", str(write_job(tmp_path, TRAINS, JOB))) as shown:
        shown.wait_for(PHASES[phase][0])
        shown.process.send_signal(signum)
        assert shown.ended() in (128 + signum, -signum)
        shown.assert_sane()


def test_a_terminal_that_takes_no_output_delays_no_run(tmp_path: Path) -> None:
    """Ctrl-S stops it, even if Ctrl-Q, or a network that has come back, lets it go on only after the end."""
    with seen(tmp_path, "run", "--view", str(write_job(tmp_path, TRAINS, JOB))) as shown:
        shown.wait_for(r"job +RUNNING")
        shown.press(b"\x13")
        while shown.read(3.0):  # as long as something comes: there is a frame each second
            pass
        shown.process.send_signal(signal.SIGINT)
        assert shown.process.wait(PATIENCE_S) in (130, -signal.SIGINT)
        shown.press(b"\x11")
        shown.assert_sane()


@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_to_a_view_leaves_terminal_and_run_alone(tmp_path: Path, left: str, phase: str) -> None:
    pattern, keys = PHASES[phase]
    for signum in SIGNALS:
        with seen(tmp_path, "view", left) as shown:
            shown.wait_for(pattern)
            shown.press(keys)
            shown.process.send_signal(signum)
            assert shown.ended() in (128 + signum, -signum)
            shown.assert_sane()
    assert "RUNNING" in distlaunch("ps", cwd=tmp_path).stdout
