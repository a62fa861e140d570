"""Keeps the store that several nodes' launchers and workers share; run by the workers' Python.

The first keeper serves the TCPStore at MASTER_PORT, as the agent of torchrun does; others are clients.

argv: host, port, node rank, nodes, workers here, seconds to wait for all. On stdout, lines of JSON:
    {"waiting": [node ranks], "why"}   now and then, until all are there
    {"sizes": [workers]}               of each node: all are there
    {"ended": {"node", "status", "text"}}   another node has failed, or is lost
    {"over": true}                     all nodes have ended well
On stdin, how this node ended: {"status", "text"}; again when it is stopped while it waits for the others.
"""

import contextlib
import json
import os
import select
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import Any

BEAT_S = 0.2
LOST_S = 15.0
"""Seconds without a beat after which a node is lost."""
TELL_S = 5.0
"""Seconds of waiting before the command is told; after that at every doubling."""
LINGER_S = 3.0
"""Seconds that the store outlives a failure, so that the others hear of it."""
LOST_STATUS = 71


def say(**message: Any) -> None:
    """One line of JSON to the command."""
    print(json.dumps(message), flush=True)


class StaleError(Exception):
    """The store is that of another job, or of one that has ended, or two nodes have the same rank."""


class Patience:
    """How long something has been waited for, and when to tell of it."""

    def __init__(self, wait_s: float) -> None:
        self.began = time.monotonic()
        self.wait_s, self.tell_s = wait_s, TELL_S

    def over(self) -> bool:
        """Whether that was all."""
        return time.monotonic() - self.began > self.wait_s

    def worth_a_word(self) -> bool:
        """True at TELL_S, and at every doubling."""
        if time.monotonic() - self.began < self.tell_s:
            return False
        self.tell_s *= 2
        return True


class Keeper:
    """One node's end of the store."""

    def __init__(self, store: Any, rank: int, nodes: int) -> None:
        self.store, self.rank, self.nodes = store, rank, nodes
        self.beats: dict[int, tuple[int, float]] = {}
        self.done = self.failed_here = self.left = False
        self.turned = time.monotonic()
        threading.Thread(target=self.watch_the_store, daemon=True).start()

    def meet(self, workers: int, wait_s: float) -> "list[int] | None":
        """Wait for all nodes; how many workers each has."""
        if (agreed := int(self.store.compare_set("nodes", "", str(self.nodes)))) != self.nodes:
            text = f"was started with --nnodes {self.nodes}, another node with {agreed}"
            self.fail({"node": self.rank, "status": 2, "text": text})
            self.tell_failure()
            return None
        self.store.set(f"size{self.rank}", str(workers))
        patience = Patience(wait_s)
        while missing := [rank for rank in range(self.nodes) if not self.store.check([f"size{rank}"])]:
            if self.tell_failure():
                return None
            if patience.over():
                others = f"; nor did {', '.join(map(str, missing[1:]))}" if missing[1:] else ""
                text = f"did not come within {wait_s:g} s{others}"
                self.fail({"node": missing[0], "status": 124, "text": text})
            elif patience.worth_a_word():
                say(waiting=missing)
            self.listen(BEAT_S)
        return [int(self.store.get(f"size{rank}")) for rank in range(self.nodes)]

    def watch(self) -> None:
        """Tell the command of the others, and the others of the command, until all is over."""
        self.beats = dict.fromkeys(range(self.nodes), (0, time.monotonic()))  # not before: they may meet late
        while True:
            self.store.add(f"beat{self.rank}", 1)
            if self.tell_failure():
                return
            if all(self.store.check([f"done{rank}"]) for rank in range(self.nodes)):
                say(over=True)
                return
            if (lost := self.lost()) is not None:
                self.fail({"node": lost, "status": LOST_STATUS, "text": f"no heartbeat for {LOST_S:g} s"})
            self.listen(BEAT_S)

    def watch_the_store(self) -> None:
        """End when the store's host has gone silent: the store's client waits for an answer without limit."""
        while time.monotonic() - self.turned < LOST_S:
            time.sleep(BEAT_S)
        say(ended={"node": 0, "status": LOST_STATUS, "text": f"no heartbeat for {LOST_S:g} s"})
        os._exit(0)

    def tell_failure(self) -> bool:
        """Whether a node has failed; the command is told, unless it was the one that said so."""
        if not self.store.check(["failed"]):
            return False
        if not self.failed_here:
            say(ended=json.loads(self.store.get("failed")))
        return True

    def linger(self) -> None:
        """Serve the store until all have seen the end, or for moments."""
        self.store.set(f"seen{self.rank}", "")
        patience = Patience(LINGER_S)
        everyone = [f"seen{rank}" for rank in range(self.nodes)]
        while self.rank == 0 and not self.store.check(everyone) and not patience.over():
            time.sleep(BEAT_S)

    def lost(self) -> "int | None":
        """A node that has stopped to beat before it was done, or None."""
        now = time.monotonic()
        for rank, (count, at) in self.beats.items():
            latest = self.store.add(f"beat{rank}", 0)
            if latest != count:
                self.beats[rank] = (latest, now)
            elif now - at > LOST_S and not self.store.check([f"done{rank}"]):
                return rank
        return None

    def listen(self, wait_s: float) -> None:
        """Wait for the command's word; its end without one is a failure. A good end may turn bad."""
        self.turned = time.monotonic()
        if self.left:
            time.sleep(wait_s)
            return
        if not select.select([sys.stdin], [], [], wait_s)[0]:
            return
        line = sys.stdin.readline()
        self.left = not line
        if self.left and self.done:
            return
        ended = json.loads(line) if line else {"status": 70, "text": "its launcher was killed"}
        self.done = True
        if ended["status"]:
            self.failed_here = True
            self.fail({"node": self.rank, **ended})
        else:
            self.store.set(f"done{self.rank}", "")

    def fail(self, ended: "dict[str, Any]") -> None:
        """The first failure of all is the one that counts."""
        self.store.compare_set("failed", "", json.dumps(ended))


def reach(host: str, port: int, wait_s: float) -> None:
    """Wait until somebody listens there, and tell of it now and then. Raises `OSError` after `wait_s`."""
    patience = Patience(wait_s)
    while True:
        try:
            socket.create_connection((host, port), timeout=LINGER_S).close()
            return
        except OSError as error:
            if patience.over():
                raise
            if patience.worth_a_word():
                say(waiting=[0], why=error.strerror or str(error))
        pause()


def pause() -> None:
    """Let a moment pass before the next try; end if the command has ended."""
    if select.select([sys.stdin], [], [], BEAT_S)[0]:
        raise SystemExit


def attach(host: str, port: int, rank: int, wait_s: float) -> Any:
    """A connection to the store of this job. Raises `OSError`, `DistError`, `StaleError`.

    A store of launchers that were just killed lives for moments: its port is still taken, and a node
    that comes to it finds that it was there before, or that a node has failed.
    """
    from torch.distributed import DistError, PrefixStore, TCPStore

    if rank:
        reach(host, port, wait_s)
    patience = Patience(2 * LINGER_S)
    # An address that is not ours may be translated to one, but then it answers soon.
    limit = timedelta(seconds=LOST_S if rank or is_here(host) else LINGER_S)
    while True:
        try:
            store = TCPStore(host, port, None, rank == 0, limit, wait_for_workers=False)
            store = PrefixStore("distlaunch/", store)
            twice = store.add(f"came{rank}", 1) > 1
            if not twice and not store.check(["failed"]):
                return store
            why = (
                f"another launcher with --node-rank {rank} has joined"
                if twice
                else "another node has already failed"
            )
            problem: Exception = StaleError(f"{why}, says the store at {host}:{port}")
        except (DistError, OSError) as error:
            problem = error
        if patience.over():
            raise problem
        pause()
        if rank:
            reach(host, port, wait_s)


def is_here(host: str) -> bool:
    """Whether a name, or address, is one of this machine's: a socket can be bound to it."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, _, _, address in found:
        with socket.socket(family, kind) as sock, contextlib.suppress(OSError):
            sock.bind(address)
            return True
    return False


def unserved(host: str, port: int, rank: int, error: Exception) -> "dict[str, Any]":
    """Why this node has no store, and the status: 75 where its port is taken, 69 where it is out of reach."""
    if rank == 0 and not is_here(host):
        text = f"{host} is not an address of this machine: is --node-rank 0 right, and --master-addr?"
        return {"node": 0, "status": 2, "text": text}
    can = "serve" if rank == 0 else "reach"
    text = f"can't {can} the store at {host}:{port}: {str(error).splitlines()[0]}"
    return {"node": 0, "status": 75 if rank == 0 else 69, "text": text}


def main() -> None:
    """Keep until the end; status 75 when the port is taken."""
    host, port, rank, nodes, workers, wait_s = sys.argv[1], *map(int, sys.argv[2:6]), float(sys.argv[6])
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported
    from torch.distributed import DistError

    try:
        keeper = Keeper(attach(host, port, rank, wait_s), rank, nodes)
    except StaleError as error:
        say(ended={"node": rank, "status": 2, "text": str(error)})
        return
    except (DistError, OSError) as error:
        say(ended=unserved(host, port, rank, error))
        return
    try:
        sizes = keeper.meet(workers, wait_s)
        if sizes:
            say(sizes=sizes)
            keeper.watch()
        keeper.linger()
    except (DistError, OSError):
        say(ended={"node": 0, "status": LOST_STATUS, "text": "its store closed the connection"})


if __name__ == "__main__":
    main()
