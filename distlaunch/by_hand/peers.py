"""The command's end of the keeper: meeting the other nodes, hearing of them, telling them of our end."""

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from distlaunch.errors import DistlaunchError, Exit
from distlaunch.job.spec import ByHand, JobSpec
from distlaunch.state.events import PeerFailed, PeerRestarts, PeersMet
from distlaunch.system.signals import Interrupts
from distlaunch.wording import NO_SUSPENDING_TORCHRUN, counted, listed

BARRIER_S = 300.0
"""How long a node that has succeeded waits for the others, as in torchrun's exit barrier."""
END_S = 5.0
NOT_STARTED = 127
"""A shell's status of what can't be started."""


class Met(NamedTuple):
    """All nodes are there: the number of this one, and how many workers each has."""

    node_rank: int
    sizes: tuple[int, ...]


class PeerEnded(NamedTuple):
    """How another node ended: a status other than 0; `again`: all nodes are to start again.

    `node` is negative where it is not known which; `name` is its host, where a number alone says too little.
    """

    node: int
    status: int
    text: str
    name: str = ""
    again: bool = False

    @property
    def who(self) -> str:
        """Which node, for people; "" = not known."""
        name = "" if self.name in self.text else self.name
        if self.node < 0:
            return name
        return f"node {self.node} ({name})" if name else f"node {self.node}"

    @property
    def words(self) -> str:
        """For people."""
        return f"{self.who} failed: {self.text}" if self.who else self.text


class MeetingError(DistlaunchError):
    """The nodes did not meet, or did not stay together."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.exit_status = status


class Peers:
    """The other nodes, by way of the keeper. `say` gets what there is to say."""

    def __init__(self, spec: JobSpec, by_hand: ByHand, say: Callable[[str], object]) -> None:
        self._say = say
        keeper = Path(__file__).with_name("store.py")
        procs = spec.nodes[0].procs or 1
        numbers = (by_hand.port, by_hand.node_rank, by_hand.nodes, procs, by_hand.wait_s)
        arrival = by_hand.arrival and by_hand.arrival._asdict()
        argv = [str(spec.python), str(keeper), by_hand.host, *map(str, numbers), json.dumps(arrival)]
        pipe = subprocess.PIPE
        self._python = argv[0]
        self._place = f"[{by_hand.host}]" if ":" in by_hand.host else by_hand.host
        self._place += f":{by_hand.port}"
        # A pipe that nobody reads would fill and stop the keeper.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                argv, stdin=pipe, stdout=pipe, stderr=self._errors, start_new_session=True, bufsize=0
            )  # unbuffered: what a keeper that has ended did not take must not come up again at the close
        except OSError as error:
            self._errors.close()
            raise MeetingError(f"PYTHON_EXEC: {self._python}: {error.strerror}", NOT_STARTED) from None
        assert self._process.stdout is not None
        self.fd = self._process.stdout.fileno()
        os.set_blocking(self.fd, False)
        self._buffer = b""
        self._told: int | None = None
        self._over = False

    def meet(self, interrupts: Interrupts) -> Met:
        """Wait for all nodes. Raises `MeetingError`."""
        while True:
            self._wait(interrupts, None)
            for message in self._messages():
                if "sizes" in message:
                    return Met(message["number"], tuple(message["sizes"]))
                if "waiting" in message or "missing" in message:
                    self._say(_waiting(message, self._place))
                if "ended" in message:
                    ended = _ended(message)
                    who = f"{ended.who}: " if ended.who else ""
                    raise MeetingError(f"{who}{ended.text}", ended.status)

    def heard(self) -> list[PeerFailed | PeerRestarts | PeersMet | str]:
        """What has become of the others, and what there is to say meanwhile."""
        return [self._heard(message) for message in self._messages() if "over" not in message]

    def _heard(self, message: dict[str, Any]) -> PeerFailed | PeerRestarts | PeersMet | str:
        if "ended" in message:
            ended = _ended(message)
            return (PeerRestarts if ended.again else PeerFailed)(ended.status, ended.words)
        if "sizes" in message:
            return PeersMet(message["port"])
        return _waiting(message, self._place)

    def tell(self, status: int, text: str) -> None:
        """Tell the other nodes how it ended here; once, but for a good end that another's failure undoes."""
        if self._told is None or (status and not self._told):
            self._told = status
            self._write(status=status, text=text)

    def restart(self, status: int, text: str) -> None:
        """Tell them that it failed, here or elsewhere, and that all start again."""
        self._write(status=status, text=text, again=True)

    def meet_again(self) -> None:
        """Tell them that we are ready for that."""
        self._write(ready=True)

    def _write(self, **word: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the keeper has ended: its last words say why
            self._process.stdin.write(json.dumps(word).encode() + b"\n")

    def wait_for_all(self, interrupts: Interrupts) -> PeerEnded | None:
        """After a good end here: wait for the others' ends, at most BARRIER_S; a failure among them.

        Raises `MeetingError` when this node is stopped meanwhile.
        """
        deadline = time.monotonic() + BARRIER_S
        while not self._over and time.monotonic() < deadline:
            try:
                self._wait(interrupts, deadline)
                for message in self._messages():
                    if "ended" in message:
                        ended = _ended(message)
                        self.tell(ended.status, "it had succeeded already, and can't start again")
                        return ended
            except MeetingError as stopped:
                self.tell(stopped.exit_status, str(stopped))  # for the others it was well until now
                raise
        if self._over:
            return None
        return PeerEnded(
            -1,
            Exit.TIMEOUT,
            f"gave up after {BARRIER_S:g} s: this node is done, but others are still running",
        )

    def close(self) -> None:
        """Let the keeper end: the first node's store outlives a failure for moments."""
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        self._errors.close()

    def _wait(self, interrupts: Interrupts, deadline: float | None) -> None:
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([self.fd, interrupts.fd], [], [], left_s)
        for signum in interrupts.received() if interrupts.fd in ready else b"":
            name = signal.Signals(signum).name
            if signum != signal.SIGTSTP:
                raise MeetingError(f"stopped by {name}", 128 + signum)
            self._say(NO_SUSPENDING_TORCHRUN)

    def _messages(self) -> Iterator[dict[str, Any]]:
        try:
            data = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for message in map(json.loads, lines):
            self._over = self._over or "over" in message  # it may come while our own end is under way
            yield message
        if not data and not self._over:
            yield {"ended": {"node": -1, "status": Exit.FAILED, "text": self._last_words()}}

    def _last_words(self) -> str:
        self._errors.seek(0)
        words = self._errors.read().decode(errors="replace")
        last = words.strip().splitlines()[-1:] or ["it exited without a message"]
        return f"the helper that connects this node to the others ({self._python}) failed: {last[0]}"


def _waiting(message: dict[str, Any], place: str) -> str:
    why = f": {message['why']}" if "why" in message else ""
    if "missing" in message:
        here = f" (joined: {listed(message['here'])})"
        return f"waiting for {message['missing']} of {counted(message['of'], 'node')} at {place}{here}{why}"
    if not message["waiting"]:
        return f"waiting for the node that serves {place}{why}"
    nodes = "node" if len(message["waiting"]) == 1 else "nodes"
    return f"waiting for {nodes} {', '.join(map(str, message['waiting']))} at {place}{why}"


def _ended(message: dict[str, Any]) -> PeerEnded:
    return PeerEnded(**message["ended"])
