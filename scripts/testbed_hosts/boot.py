"""Boots a host: talks to its keeper, and waits until its sshd responds."""

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from .processes import ProcessId, identify, netns_of
from .state import Host
from .tools import TestbedError

BOOT_LIMIT_S = 10.0
RETRY_S = 0.01

_KEEPER = Path(__file__).with_name("keeper.py")


class Boot:
    """The boot of one host, from a keeper that waits for orders to an sshd that accepts connections."""

    def __init__(self, host: Host, directory: Path, prefix: Sequence[str]) -> None:
        """Start the keeper with the command prefix `prefix`, which may create namespaces."""
        self.host = host
        self._directory = directory
        self._deadline = time.monotonic() + BOOT_LIMIT_S
        self._heard = b""
        self._ordered = False
        with (directory / "keeper.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, "-I", "-S", str(_KEEPER), host.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd="/",
                bufsize=0,
                start_new_session=True,
            )

    def ready(self) -> tuple[ProcessId, int | None]:
        """Wait for the keeper.

        Return its identity, and the inode of its network namespace, None for this one.
        """
        self._expect("ready")
        netns = netns_of(self._process.pid)
        return identify(self._process.pid), None if netns == netns_of("self") else netns

    def order(self, setup: Sequence[Sequence[str]], sshd: Sequence[str]) -> None:
        """Let the keeper run the setup and then the sshd."""
        assert self._process.stdin is not None
        self._ordered = True
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"setup": setup, "sshd": sshd}).encode() + b"\n")

    def up(self) -> None:
        """Wait until the host's sshd has sent its banner. Raises TestbedError with the sshd's last output."""
        self._expect("up")
        # No event announces that another process listens, so this waits by retrying. It ends early if the
        # keeper writes a line, because the sshd has then ended.
        while not _has_banner(self.host, self._deadline):
            if self._heard or self._hears(RETRY_S) or time.monotonic() >= self._deadline:
                raise TestbedError(f"sshd of {self.host.name} does not answer: {self._words()}")

    def close(self) -> None:
        """Disconnect from the keeper. A keeper with orders keeps running, any other is killed."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        if not self._ordered:
            self._process.kill()
            self._process.wait(BOOT_LIMIT_S)

    def _expect(self, word: str) -> None:
        while b"\n" not in self._heard:
            if not self._hears(self._deadline - time.monotonic()):
                raise TestbedError(f"{self.host.name} is not {word} after {BOOT_LIMIT_S:g} s")
            self._listen(word)
        line, _, self._heard = self._heard.partition(b"\n")
        if line.decode() != word:
            raise TestbedError(f"{self.host.name}: {line.decode()}")

    def _hears(self, limit_s: float) -> bool:
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], max(limit_s, 0.0))[0])

    def _listen(self, word: str) -> None:
        assert self._process.stdout is not None
        chunk = os.read(self._process.stdout.fileno(), 4096)
        if not chunk:
            raise TestbedError(f"{self.host.name} is not {word}: {self._words()}")
        self._heard += chunk

    def _words(self) -> str:
        logs = [self._directory / "keeper.log", self._directory / "sshd.log"]
        text = "".join(log.read_text(errors="replace") for log in logs if log.exists())
        return text.rstrip().rpartition("\n")[2] or "it gave no reason"


@contextlib.contextmanager
def booting(
    hosts: Sequence[Host], directories: Sequence[Path], prefix: Sequence[str]
) -> Iterator[list[Boot]]:
    """Start the keepers of all hosts.

    At the end, disconnect from those that were started, even after an error.
    """
    with contextlib.ExitStack() as stack:
        boots = []
        for host, directory in zip(hosts, directories, strict=True):
            boots.append(Boot(host, directory, prefix))
            stack.callback(boots[-1].close)
        yield boots


def _has_banner(host: Host, deadline: float) -> bool:
    rest_s = max(deadline - time.monotonic(), RETRY_S)
    try:
        with socket.create_connection((host.address, host.port), timeout=rest_s) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False
