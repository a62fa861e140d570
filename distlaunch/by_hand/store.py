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
"""Seconds of waiting until the command hears of it, and again each time the wait has doubled."""
LINGER_S = 3.0
"""Seconds that the store outlives a failure, so that the others hear of it."""
LOST_STATUS = 71
SILENT = f"no heartbeat for {LOST_S:g} s"


def say(**message: Any) -> None:
    """One line of JSON to the command."""
    print(json.dumps(message), flush=True)


def ended(node: int, status: int, text: str) -> "dict[str, Any]":
    """The message that a node has failed."""
    return {"ended": {"node": node, "status": status, "text": text}}


class StaleError(Exception):
    """The store is that of another job, or of one that has ended, or two nodes have the same rank."""


class Patience:
    """How long we have waited for something, and when to say so."""

    def __init__(self, wait_s: float) -> None:
        self.began = time.monotonic()
        self.wait_s, self.tell_s = wait_s, TELL_S

    def over(self) -> bool:
        """Whether the wait has lasted long enough."""
        return time.monotonic() - self.began > self.wait_s

    def worth_a_word(self) -> bool:
        """True at TELL_S, and at every doubling."""
        if time.monotonic() - self.began < self.tell_s:
            return False
        self.tell_s *= 2
        return True


class Roll:
    """What node 0 knows of all nodes: it alone, next to the store, asks for their states, all in one call."""

    def __init__(self, store: Any, keys: "list[str]") -> None:
        self.store, self.keys = store, keys
        self.heard: dict[int, tuple[bytes, float]] = {}

    def sizes(self) -> "list[int] | None":
        """How many workers each node has, once all are there."""
        if not self.store.check(self.keys):
            return None
        return [int(state.split()[0]) for state in self.store.multi_get(self.keys)]

    def verdict(self) -> "dict[str, Any] | None":
        """What ends all nodes: one has stopped beating before it was done, or all are done."""
        now = time.monotonic()
        for rank, state in enumerate(self.store.multi_get(self.keys)):
            if rank not in self.heard or state != self.heard[rank][0]:
                self.heard[rank] = (state, now)
        running = {rank: at for rank, (state, at) in self.heard.items() if not state.endswith(b"done")}
        lost = [rank for rank, at in running.items() if now - at > LOST_S]
        if lost:
            return ended(lost[0], LOST_STATUS, SILENT)
        return None if running else {"over": True}


class Keeper:
    """One node's end of the store.

    Each node keeps one key, its state: how many workers it has, and a count of beats, or "done". From all of
    them node 0 sets `sizes`, with which all start, and `verdict`, with which all end; a node that has failed
    sets the verdict itself.
    """

    def __init__(self, store: Any, rank: int, nodes: int) -> None:
        self.store, self.rank = store, rank
        self.keys = [f"node{node}" for node in range(nodes)]
        self.roll = None if rank else Roll(store, self.keys)
        self.workers = self.beats = 0
        self.done = self.failed_here = self.left = False
        self.turned = time.monotonic()

    def meet(self, workers: int, wait_s: float) -> "list[int] | None":
        """Wait for all nodes; how many workers each has."""
        self.join(workers)
        patience = Patience(wait_s)
        while not self.tell_verdict():
            if self.roll and (sizes := self.roll.sizes()):
                self.store.set("sizes", json.dumps(sizes))
            if self.store.check(["sizes"]):
                return list(json.loads(self.store.get("sizes")))
            self.look_for_missing(patience)
            self.listen(BEAT_S)
        return None

    def join(self, workers: int) -> None:
        """Be there, if this node expects as many nodes as the first that came."""
        nodes = len(self.keys)
        if (agreed := int(self.store.compare_set("nodes", "", str(nodes)))) != nodes:
            text = f"was started with --nnodes {nodes}, but another node with {agreed}"
            self.end(ended(self.rank, 2, text))
        else:
            self.workers = workers
            self.beat()

    def look_for_missing(self, patience: Patience) -> None:
        """Name the missing nodes now and then; at the limit, fail."""
        over = patience.over()
        if not (over or patience.worth_a_word()):
            return
        missing = [rank for rank, key in enumerate(self.keys) if not self.store.check([key])]
        if over and missing:
            others = f"; nor did {', '.join(map(str, missing[1:]))}" if missing[1:] else ""
            self.end(ended(missing[0], 124, f"did not join within {patience.wait_s:g} s{others}"))
        elif missing:
            say(waiting=missing)

    def watch(self) -> None:
        """Tell the command about the others, and the others about the command, until all have ended."""
        while not self.turn():
            self.listen(BEAT_S)

    def turn(self) -> bool:
        """One beat, and a look at the others; whether all is over."""
        self.beat()
        if self.roll and (verdict := self.roll.verdict()):
            self.end(verdict)
        return self.tell_verdict()

    def beat(self) -> None:
        """Show that this node is there, or done."""
        self.beats += 1
        self.store.set(self.keys[self.rank], f"{self.workers} {'done' if self.done else self.beats}")

    def watch_the_store(self) -> None:
        """End when the store's host has gone silent: the store's client waits for an answer without limit."""
        while time.monotonic() - self.turned < LOST_S:
            time.sleep(BEAT_S)
        say(**ended(0, LOST_STATUS, SILENT))
        os._exit(0)

    def tell_verdict(self) -> bool:
        """Whether all have ended; tells the command how, unless its own failure ended them."""
        if not self.store.check(["verdict"]):
            return False
        if not self.failed_here:
            say(**json.loads(self.store.get("verdict")))
        return True

    def linger(self) -> None:
        """Serve the store until all have seen the end, or for moments."""
        self.store.set(f"seen{self.rank}", "")
        patience = Patience(LINGER_S)
        everyone = [f"seen{rank}" for rank in range(len(self.keys))]
        while self.rank == 0 and not self.store.check(everyone) and not patience.over():
            time.sleep(BEAT_S)

    def listen(self, wait_s: float) -> None:
        """Wait for the command's report; its end without one is a failure. A success may turn into one."""
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
        word = json.loads(line) if line else {"status": 70, "text": "its launcher was killed"}
        self.done = True
        if word["status"]:
            self.failed_here = True
            self.end(ended(self.rank, **word))

    def end(self, verdict: "dict[str, Any]") -> None:
        """The first verdict of all is the one that counts."""
        self.store.compare_set("verdict", "", json.dumps(verdict))


def reach(host: str, port: int, wait_s: float) -> None:
    """Wait until somebody listens there, and say so now and then. Raises `OSError` after `wait_s`."""
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
            if not twice and not store.check(["verdict"]):
                return store
            why = (
                f"another launcher with --node-rank {rank} has already joined"
                if twice
                else "another node has already failed"
            )
            problem: Exception = StaleError(f"{why} (store at {host}:{port})")
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
        text = f"{host} is not an address of this machine: check --node-rank 0 and --master-addr"
        return ended(0, 2, text)
    can = "serve" if rank == 0 else "reach"
    text = f"can't {can} the store at {host}:{port}: {str(error).splitlines()[0]}"
    return ended(0, 75 if rank == 0 else 69, text)


def main() -> None:
    """Keep until the end; status 75 when the port is taken."""
    host, port, rank, nodes, workers, wait_s = sys.argv[1], *map(int, sys.argv[2:6]), float(sys.argv[6])
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported
    from torch.distributed import DistError

    try:
        keeper = Keeper(attach(host, port, rank, wait_s), rank, nodes)
    except StaleError as error:
        say(**ended(rank, 2, str(error)))
        return
    except (DistError, OSError) as error:
        say(**unserved(host, port, rank, error))
        return
    threading.Thread(target=keeper.watch_the_store, daemon=True).start()
    try:
        sizes = keeper.meet(workers, wait_s)
        if sizes:
            say(sizes=sizes)
            keeper.watch()
        keeper.linger()
    except (DistError, OSError):
        say(**ended(0, LOST_STATUS, "its store closed the connection"))


if __name__ == "__main__":
    main()
