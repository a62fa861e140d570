"""Keeps the store that several nodes' launchers and workers share; run by the workers' Python.

The first keeper serves the TCPStore at MASTER_PORT, as the agent of torchrun does; others are clients.

argv: host, port, node rank, nodes, workers here, seconds to wait for all. On stdout, lines of JSON:
    {"waiting": [node ranks]}   now and then, until all are there
    {"sizes": [workers]}        of each node: all are there
    {"ended": {"node", "status", "text"}}   another node has failed, or is lost
    {"over": true}              all nodes have ended well
On stdin, once, how this node ended: {"status", "text"}.
"""

import json
import select
import sys
import time
from datetime import timedelta
from typing import Any

BEAT_S = 0.2
LOST_S = 15.0
"""Seconds without a beat after which a node is lost."""
TELL_S = 15.0
LINGER_S = 3.0
"""Seconds that the store outlives a failure, so that the others hear of it."""
LOST_STATUS = 71


def say(**message: Any) -> None:
    """One line of JSON to the command."""
    print(json.dumps(message), flush=True)


class Keeper:
    """One node's end of the store."""

    def __init__(self, store: Any, rank: int, nodes: int) -> None:
        self.store, self.rank, self.nodes = store, rank, nodes
        self.beats: dict[int, tuple[int, float]] = dict.fromkeys(range(nodes), (0, time.monotonic()))
        self.done = False

    def meet(self, workers: int, wait_s: float) -> "list[int] | None":
        """Wait for all nodes; how many workers each has."""
        self.store.set(f"size{self.rank}", str(workers))
        began = told = time.monotonic()
        while missing := [rank for rank in range(self.nodes) if not self.store.check([f"size{rank}"])]:
            now = time.monotonic()
            if now - began > wait_s:
                say(ended={"node": missing[0], "status": 124, "text": f"nodes {missing} did not come"})
                return None
            if now - told > TELL_S:
                told = now
                say(waiting=missing)
            self.listen(BEAT_S)
        return [int(self.store.get(f"size{rank}")) for rank in range(self.nodes)]

    def watch(self) -> None:
        """Tell the command of the others, and the others of the command, until all is over."""
        while True:
            self.store.add(f"beat{self.rank}", 1)
            if self.store.check(["failed"]):
                ended = json.loads(self.store.get("failed"))
                if ended["node"] != self.rank:
                    say(ended=ended)
                return
            if all(self.store.check([f"done{rank}"]) for rank in range(self.nodes)):
                say(over=True)
                return
            if (lost := self.lost()) is not None:
                self.fail({"node": lost, "status": LOST_STATUS, "text": "nothing was heard from it"})
            self.listen(BEAT_S)

    def linger(self) -> None:
        """Serve the store until all have seen the end, or for moments."""
        self.store.set(f"seen{self.rank}", "")
        deadline = time.monotonic() + LINGER_S
        everyone = [f"seen{rank}" for rank in range(self.nodes)]
        while self.rank == 0 and not self.store.check(everyone) and time.monotonic() < deadline:
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
        """Wait for the command's word; its end without one is a failure."""
        if self.done:
            time.sleep(wait_s)
            return
        if not select.select([sys.stdin], [], [], wait_s)[0]:
            return
        line = sys.stdin.readline()
        ended = json.loads(line) if line else {"status": 70, "text": "its launcher was killed"}
        self.done = True
        if ended["status"]:
            self.fail({"node": self.rank, **ended})
        else:
            self.store.set(f"done{self.rank}", "")

    def fail(self, ended: "dict[str, Any]") -> None:
        """The first failure of all is the one that counts."""
        self.store.compare_set("failed", "", json.dumps(ended))


def main() -> None:
    """Keep until the end; status 75 when the port is taken."""
    host, port, rank, nodes, workers, wait_s = sys.argv[1], *map(int, sys.argv[2:6]), float(sys.argv[6])
    from torch.distributed import DistError, PrefixStore, TCPStore

    try:
        store = TCPStore(host, port, None, rank == 0, timedelta(seconds=wait_s), wait_for_workers=False)
    except (DistError, OSError) as error:
        text = f"no store at {host}:{port}: {str(error).splitlines()[0]}"
        say(ended={"node": 0, "status": 75 if rank == 0 else 69, "text": text})
        return
    keeper = Keeper(PrefixStore("distlaunch/", store), rank, nodes)
    try:
        sizes = keeper.meet(workers, wait_s)
        if sizes:
            say(sizes=sizes)
            keeper.watch()
            keeper.linger()
    except (DistError, OSError):
        say(ended={"node": 0, "status": LOST_STATUS, "text": "its store is gone"})


if __name__ == "__main__":
    main()
