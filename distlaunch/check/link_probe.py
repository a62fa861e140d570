"""The link probe: a program that measures the links between peers. The job's Python runs it as each rank.

`python -c SOURCE REQUEST` needs torch and Python 3.8. A peer is a node or, if there is only one node, a rank.
The request contains `backend`, `peers` (the ranks of each) and `order` (the peers, shuffled). Rank 0 directs
the test through a store at the rendezvous port: it announces each step, takes part in it, and waits a limited
time for all answers. It prints one JSON object per line: first the missing ranks, then each measurement. Each
group in a step is a separate process group, so a group that hangs doesn't affect the others.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import signal
import statistics
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from typing import Any, Tuple

    Pair = Tuple[int, int]

SLOW = 0.5
"""Share of the usual bandwidth below which a link counts as slow."""
FEW, ROUNDS = 8, 3
"""Maximum number of peers for measuring all pairs, and number of rounds of shuffled pairs for more peers."""
JOIN_S, LIMIT_S, BUDGET_S = 30.0, 6.0, 45.0
"""Seconds for all ranks to join, for one measurement, and for all steps except the last two."""
TOTAL_S = JOIN_S + BUDGET_S + 4 * LIMIT_S
"""Seconds after which the program exits in any case."""
OWN_FAULT = r"(?i)CUDA|out of memory|Duplicate GPU|No space left"
"""Errors of a rank itself, which say nothing about links."""
FIRST_SIZE, MAX_SIZE = 1 << 16, 1 << 28
ENOUGH_S, REPEATS, RETESTS = 0.02, 10, 3
"""Seconds that a message should take, number of messages (the fastest counts), and maximum retests."""


# The choice of pairs


def pairings(order: Sequence[int]) -> list[list[Pair]]:
    """Return rounds of disjoint pairs, using the circle method. `order` lists the peers in random order."""
    count, order = len(order), [*order, *[-1] * (len(order) % 2)]  # the peer paired with -1 sits out
    half, rounds = len(order) // 2, []
    for _ in range(len(order) - 1 if count <= FEW else ROUNDS):
        pairs = zip(order[:half], reversed(order[half:]))
        rounds.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        order = [order[0], order[-1], *order[1:-1]]
    return rounds


def usual(best: Mapping[Pair, float]) -> float:
    """Return the median of the peers' medians, so that one peer's slow links don't affect the result."""
    works = [pair for pair in best if best[pair]]
    peers = {peer for pair in works for peer in pair}
    own = [statistics.median_high([best[pair] for pair in works if peer in pair]) for peer in peers]
    return statistics.median(own) if own else 0.0


def slow_pairs(best: Mapping[Pair, float]) -> list[Pair]:
    """Return the pairs that are slow compared with the others, and those that hang (0)."""
    least = SLOW * usual(best)
    return sorted(pair for pair, value in best.items() if value < least or not value)


def retests(best: Mapping[Pair, float]) -> list[list[Pair]]:
    """Return rounds of one pair each: the slow pairs again, and each of their peers with two good peers."""
    slow = slow_pairs(best)[:16]  # more would take too long
    suspects = {peer for pair in slow for peer in pair}
    good = sorted({peer for pair in best for peer in pair} - suspects)[:2]
    others = {(min(a, b), max(a, b)) for a in suspects for b in good} - {*best}
    # A pair that hangs would only hang again.
    return [[pair] for pair in sorted(others | {pair for pair in slow if best[pair]})]


# The ranks


class Rank:
    """One rank of the test. `step` counts the steps. `absent` contains the ranks that no longer answer.

    Rank 0 calls `direct`, the others `follow`.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        import torch.distributed

        self.torch, self.dist = torch, torch.distributed
        self.backend, self.peers, self.order = request["backend"], request["peers"], request["order"]
        self.rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        self.device = torch.device("cpu" if self.backend == "gloo" else "cuda:%d" % local_rank)
        torch.ones(1, device=self.device)  # a CUDA context takes seconds
        end = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        hosts, limit = self.rank == 0, seconds(TOTAL_S)
        self.store = self.dist.TCPStore(*end, None, hosts, limit, wait_for_workers=False)
        self.step = 0
        self.absent: set[int] = set()
        self.answer("joined")

    def answer(self, value: Any) -> None:
        """Answer the current step, for rank 0. The key in the store is `STEP from RANK`."""
        self.store.set("%d from %d" % (self.step, self.rank), json.dumps(value))

    def follow(self) -> None:
        """Take part in the steps that rank 0 announces, until there are no more."""
        while True:
            self.step += 1
            step = json.loads(self.store.get("step %d" % self.step))
            self.answer(self.perform(step) if step else "left")
            if not step:
                return

    def perform(self, step: Mapping[str, Any]) -> dict[str, Any]:
        """Measure in this rank's group, if the step has one, within a time limit. Return the rank's answer.

        `stuck` means that this rank can't take part in later steps.
        """
        found = {"busbw": 0.0, "error": "no end within %g s" % LIMIT_S, "stuck": True}
        for ranks in step["groups"]:
            if self.rank in ranks:
                # Whatever blocks the thread, such as NCCL connecting, would also block later steps.
                run = threading.Thread(target=self.measured, args=(step["test"], ranks, found), daemon=True)
                run.start()
                run.join(LIMIT_S + 2)
        return {**found}

    def measured(self, test: str, ranks: Sequence[int], found: dict[str, Any]) -> None:
        """Measure among `ranks` in a new process group, and update the result `found`. May hang."""
        store = self.dist.PrefixStore("%d of %d" % (self.step, ranks[0]), self.store)
        place = {"rank": ranks.index(self.rank), "world_size": len(ranks)}
        try:
            # The count is in the keys of the store. It differs between ranks once a group has failed on some.
            self.dist.distributed_c10d._world.group_count = 0
            self.dist.init_process_group(self.backend, store=store, timeout=seconds(LIMIT_S), **place)
            found.update(busbw=self.busbw(test, len(ranks), place["rank"]), error="", stuck=False)
            self.dist.destroy_process_group()
        except Exception as error:  # from torch, gloo or NCCL: each has its own classes
            first, _, rest = (str(error) or repr(error)).partition("\n")
            reason = rest.partition("Last error:\n")[2].partition("\n")[0]  # NCCL's own
            found.update(error=(reason or first)[:200])
            with contextlib.suppress(Exception):  # a group that failed might not exist
                # NCCL would wait for the collective that hangs.
                self.dist.distributed_c10d._abort_process_group()
            found.update(stuck=self.dist.is_initialized())

    # Bandwidth as nccl-tests counts it

    def busbw(self, test: str, count: int, place: int) -> float:
        """Return the bus bandwidth in GB/s, measured with messages large enough to take a while."""
        if self.device.type == "cuda":
            self.torch.cuda.set_device(self.device)  # applies to this thread only
        size, total = FIRST_SIZE, 0.0
        times: list[float] = []
        while not times or (len(times) < REPEATS and total < 1):
            if not times:
                data, space = (self.torch.zeros(size // 4, device=self.device) for _ in range(2))
            took = self.timed(self.exchange, test, data, space, count, place)
            longest = self.torch.tensor([took], device=self.device)
            self.timed(self.dist.all_reduce, longest, self.dist.ReduceOp.MAX)
            times.append(float(longest.item()))  # the slowest rank's: all continue with the same size
            total += times[-1]
            if times[-1] < ENOUGH_S and size < MAX_SIZE:
                size, times = size * 4, []
        factor = 1.0 if test == "send/recv" else 2 * (count - 1) / count
        return float(factor * size / min(times) / 1e9)

    def exchange(self, test: str, data: Any, space: Any, count: int, place: int) -> None:
        """Do one all-reduce, or send to the next peer while receiving from the previous one."""
        if test != "send/recv":
            self.dist.all_reduce(data)
            return
        dist, shift = self.dist, len(self.peers[0])  # to the next peer, from the previous one
        send = dist.P2POp(dist.isend, data, (place + shift) % count)
        receive = dist.P2POp(dist.irecv, space, (place - shift) % count)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    def timed(self, operation: Callable[..., object], *words: Any) -> float:
        """Return the seconds that an operation takes. On a GPU, raises TimeoutError after LIMIT_S."""
        began = time.perf_counter()
        operation(*words)
        if self.device.type == "cuda":
            event = self.torch.cuda.Event()
            event.record()
            while not event.query():  # synchronize() has no time limit
                if time.perf_counter() > began + LIMIT_S:
                    raise TimeoutError("no end within %g s" % LIMIT_S)
                time.sleep(1e-4)
        return time.perf_counter() - began

    # Rank 0

    def direct(self) -> None:
        """Choose and announce the steps, and print their results."""
        peers = range(len(self.peers))
        everyone = [rank for ranks in self.peers for rank in ranks]
        self.absent = {*everyone} - {*self.answers(everyone, JOIN_S)}
        say({"test": "join", "peers": [*peers], "busbw": 0.0, "error": "", "silent": sorted(self.absent)})
        self.measure("alone", [(peer,) for peer in peers])
        best: dict[Pair, float] = {}
        deadline = time.monotonic() + BUDGET_S
        for attempt in range(1 + RETESTS):  # on a busy machine, any link may be slow for a moment
            for pairs in retests(best) if attempt else pairings(self.order):
                if time.monotonic() < deadline:
                    for row in self.measure("pair", pairs):
                        best[row["peers"]] = max(best.get(row["peers"], 0.0), row["busbw"])
        if all(best.values()):
            self.measure("all-reduce", [(*peers,)])
            self.measure("send/recv", [(*peers,)])
        self.step += 1
        self.store.set("step %d" % self.step, "null")
        self.answers([*{*everyone} - self.absent - {0}], 2.0)  # the store ends with this process

    def measure(self, test: str, groups: Sequence[tuple[int, ...]]) -> list[dict[str, Any]]:
        """Make groups of peers run `test` at the same time. Print and return their results."""
        ranks_of = {group: [rank for peer in group for rank in self.peers[peer]] for group in groups}
        ranks_of = {g: ranks for g, ranks in ranks_of.items() if ranks[1:] and not self.absent & {*ranks}}
        step = {"test": test, "groups": [*ranks_of.values()]}
        self.step += 1
        self.store.set("step %d" % self.step, json.dumps(step))
        self.answer(self.perform(step))
        asked = [rank for ranks in ranks_of.values() for rank in ranks]
        found = self.answers(asked, LIMIT_S + 4)
        self.absent |= {rank for rank in asked if rank not in found or found[rank]["stuck"]}
        rows = []
        for group, ranks in ranks_of.items():
            silent = [rank for rank in ranks if rank not in found]
            errors = [found[rank]["error"] for rank in ranks if rank in found]
            error = max(errors, key=lambda text: (bool(re.search(OWN_FAULT, text)), text), default="")
            busbw = 0.0 if silent else min(found[rank]["busbw"] for rank in ranks)
            rows.append({"test": test, "peers": group, "busbw": busbw, "error": error, "silent": silent})
            say(rows[-1])
        return rows

    def answers(self, ranks: Collection[int], within_s: float) -> dict[int, Any]:
        """Return the answers to the current step that arrive in time, keyed by rank."""
        keys = {rank: "%d from %d" % (self.step, rank) for rank in ranks}
        with contextlib.suppress(Exception):  # its class depends on the version of torch
            self.store.wait([*keys.values()], seconds(within_s))
        return {r: json.loads(self.store.get(key)) for r, key in keys.items() if self.store.check([key])}


def seconds(number: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=number)


def say(row: Mapping[str, Any]) -> None:
    print(json.dumps(row), flush=True)


def main() -> None:
    signal.alarm(int(TOTAL_S))  # ends the process whatever it is doing
    # A collective that hangs is a result, and must not end the program.
    os.environ.update(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_DUMP_ON_TIMEOUT="0")
    rank = Rank(json.loads(sys.argv[1]))
    (rank.follow if rank.rank else rank.direct)()
    os._exit(0)  # threads may hang, and gloo sometimes aborts at the end


if __name__ == "__main__":
    main()
