"""Keeps the store that several nodes' launchers and workers share; run by the workers' Python.

The first keeper serves the TCPStore at MASTER_PORT, as the agent of torchrun does; others are clients.

argv: host, port, node rank, nodes, workers here, seconds to wait for all, and as JSON an `Arrival`, or null
where the node rank is given. On stdout, lines of JSON:
    {"waiting": [node ranks], "why"}   now and then, until all are there
    {"missing", "of", "here": [hosts], "why"}   the same of nodes without numbers
    {"sizes": [workers], "number", "port"}   of each node, and the node rank of this one: all are there; the
                                       port is that of the ranks' store, where it is not this one
    {"ended": {"node", "status", "text", "name"}}   another node has failed, or is lost; with "again": true,
                                       {"sizes"} follows, once all are ready for another round
    {"over": true}                     all nodes have ended well
On stdin, how this node ended: {"status", "text"}; again when it is stopped while it waits for the others.
With "again": true, another round is to follow, for which it is {"ready": true} in time.
"""

import gc
import importlib.util
import ipaddress
import json
import os
import re
import select
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable
from datetime import timedelta
from typing import Any

BEAT_S = 0.2
LOST_S = 15.0
"""Seconds without a beat after which a node is lost."""
TELL_S = 5.0
"""Seconds of waiting until the command hears of it, and again each time the wait has doubled."""
LINGER_S = 3.0
"""Seconds that the store outlives a failure, so that the others hear of it."""
NAME_S = 60.0
"""Seconds for a name server to learn of a machine that has just started, as a pod's does."""
LOST_STATUS = 71
SILENT = f"no heartbeat for {LOST_S:g} s"
UNNUMBERED = -1
TRIED = ("2.13",)
"""Versions of torch whose store works without the rest of torch."""
NAMED = 8
"""Hosts named in one line."""
ENDING = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
"""Slurm sends these to all processes of a step; we end with the command."""


def say(**message: Any) -> None:
    """One line of JSON to the command."""
    print(json.dumps(message), flush=True)


def ended(node: int, status: int, text: str, name: str = "") -> "dict[str, Any]":
    """The message that a node has failed; `name` is its host's, where the number alone tells nobody who."""
    known = {"name": name} if name else {}
    return {"ended": {"node": node, "status": status, "text": text, **known}}


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
    """What the store's host knows of all nodes: it alone asks for their states, all in one call."""

    def __init__(self, store: Any, keys: "list[str]", arrivals: "list[str]") -> None:
        self.store, self.keys, self.arrivals = store, keys, arrivals
        self.numbers, self.names = list(range(len(keys))), [""] * len(keys)
        self.heard: dict[int, tuple[bytes, float]] = {}

    def met(self) -> "dict[str, Any] | None":
        """How many workers each node has, its number and its name, once all are there."""
        if not self.store.check(self.keys):
            return None
        sizes = [int(state.split()[0]) for state in self.store.multi_get(self.keys)]
        if self.arrivals:
            arrivals = [json.loads(each) for each in self.store.multi_get(self.arrivals)]
            self.numbers, self.names = numbers_of(arrivals), [each["name"] for each in arrivals]
        return {"sizes": sizes, "numbers": self.numbers, "names": self.names}

    def verdict(self) -> "dict[str, Any] | None":
        """What ends all nodes: one has stopped beating before it was done, or all are done."""
        now = time.monotonic()
        for slot, state in enumerate(self.store.multi_get(self.keys)):
            if slot not in self.heard or state != self.heard[slot][0]:
                self.heard[slot] = (state, now)
        running = {slot: at for slot, (state, at) in self.heard.items() if not state.endswith(b"done")}
        lost = [slot for slot, at in running.items() if now - at > LOST_S]
        if lost:
            return ended(self.numbers[lost[0]], LOST_STATUS, SILENT, self.names[lost[0]])
        return None if running else {"over": True}


def numbers_of(arrivals: "list[dict[str, Any]]") -> "list[int]":
    """The number of each node. Those on the store's machine come first: MASTER_ADDR is to be rank 0's.

    Within that, the first kind of place counts that all nodes have, each another; else their names.
    """
    kinds = ([each["places"][kind] for each in arrivals] for kind in range(len(arrivals[0]["places"])))
    places = next((kind for kind in kinds if None not in kind and len({*kind}) == len(kind)), None)

    def key(slot: int) -> "tuple[Any, ...]":
        each = arrivals[slot]
        return not each["near"], places[slot] if places else 0, _natural(each["name"]), slot

    order = {slot: number for number, slot in enumerate(sorted(range(len(arrivals)), key=key))}
    return [order[slot] for slot in range(len(arrivals))]


def _natural(name: str) -> "list[str | int]":
    """The key by which gpu2 comes before gpu10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", name)]


class Keeper:
    """One node's end of the store.

    Each node keeps one key, its state: how many workers it has, and a count of beats, or "done". From all of
    them the store's host sets `met`, with which all start, and `verdict`, with which all end; a node that has
    failed sets the verdict itself. A node's slot is its number or, where nodes get theirs only once all have
    met, its place in the order in which they came; slot 0 is the store's host. Each round has keys of its
    own.
    """

    def __init__(
        self, store: Any, slot: int, nodes: int, arrival: "dict[str, Any] | None" = None, place: str = ""
    ) -> None:
        self.all_rounds, self.round = store, 0
        self.store, self.slot, self.arrival, self.place = store, slot, arrival, place
        self.keys = [f"node{each}" for each in range(nodes)]
        self.arrivals = [f"arrival{each}" for each in range(nodes)] if arrival else []
        self.numbers = [UNNUMBERED if arrival else each for each in range(nodes)]
        self.names = [""] * nodes
        self.names[slot] = arrival["name"] if arrival else ""
        self.roll = None if slot else Roll(store, self.keys, self.arrivals)
        self.workers = self.beats = 0
        self.done = self.failed_here = self.left = self.ready = self.together = False
        self.final: dict[str, Any] | None = None
        self.unread = b""
        self.ranks_store: Any = None
        self.port: int | None = None
        self.turned = time.monotonic()

    def meet(self, workers: int, wait_s: float) -> "list[int] | None":
        """Wait for all nodes; how many workers each has, by their numbers."""
        self.join(workers)
        patience = Patience(wait_s)
        while not self.tell_verdict():
            if self.roll and (met := self.roll.met()):
                self.store.set("met", json.dumps({**met, "port": self.serve_ranks()}))
            if self.store.check(["met"]):
                return self.learn(**json.loads(self.store.get("met")))
            self.look_for_missing(patience)
            self.listen(BEAT_S)
        return None

    def serve_ranks(self) -> "int | None":
        """The port of a store for the ranks, without what an earlier round has left; None in the first."""
        from torch.distributed import TCPStore

        if not self.round:
            return None
        limit = timedelta(seconds=LOST_S)
        self.ranks_store = TCPStore("localhost", 0, None, True, limit, wait_for_workers=False)
        return int(self.ranks_store.port)

    def learn(
        self, sizes: "list[int]", numbers: "list[int]", names: "list[str]", port: "int | None"
    ) -> "list[int]":
        """Take note of who is who, and where the ranks' store is; how many workers each node has."""
        self.numbers, self.names, self.port = numbers, names, port
        return [sizes[numbers.index(number)] for number in range(len(numbers))]

    @property
    def number(self) -> int:
        """Of this node."""
        return self.numbers[self.slot]

    def join(self, workers: int) -> None:
        """Be there, if this node expects as many nodes as the first that came."""
        nodes = len(self.keys)
        if self.arrival:
            self.store.set(self.arrivals[self.slot], json.dumps(self.arrival))
        if (agreed := int(self.store.compare_set("nodes", "", str(nodes)))) != nodes:
            why = f"was started with --nnodes {nodes}, but another node with {agreed}"
            self.end(ended(self.number, 2, why, self.names[self.slot]))
        else:
            self.workers = workers
            self.beat()

    def look_for_missing(self, patience: Patience) -> None:
        """Name the missing nodes now and then; at the limit, fail."""
        over = patience.over()
        if not (over or patience.worth_a_word()):
            return
        missing = [slot for slot, key in enumerate(self.keys) if not self.store.check([key])]
        if missing and self.arrival:
            self.tell_how_many(missing, patience.wait_s if over else None)
        elif missing and over:
            others = f"; nor did {', '.join(map(str, missing[1:]))}" if missing[1:] else ""
            self.end(ended(missing[0], 124, f"did not join within {patience.wait_s:g} s{others}"))
        elif missing:
            say(waiting=missing)

    def tell_how_many(self, missing: "list[int]", waited_s: "float | None") -> None:
        """Name those that are there instead, while nobody knows who the others are."""
        there = [self.arrivals[slot] for slot in range(len(self.keys)) if slot not in missing]
        here = sorted((json.loads(self.store.get(key))["name"] for key in there), key=_natural)
        why = {"why": self.store.get("refused").decode()} if self.store.check(["refused"]) else {}
        if waited_s is None:
            say(missing=len(missing), of=len(self.keys), here=here, **why)
            return
        text = f"{len(missing)} of {len(self.keys)} nodes did not join at {self.place} within {waited_s:g} s"
        known = f"; joined: {', '.join(here[:NAMED])}{', …' if here[NAMED:] else ''}"
        self.end(ended(UNNUMBERED, 124, text + known + "".join(f"; {each}" for each in why.values())))

    def watch(self) -> None:
        """Tell the command about the others, and the others about the command, until all have ended."""
        self.together = True
        while not self.turn():
            self.listen(BEAT_S)
        self.together = False

    def turn(self) -> bool:
        """One beat, and a look at the others; whether all is over."""
        self.beat()
        if self.roll and (verdict := self.roll.verdict()):
            self.end(verdict)
        return self.tell_verdict()

    def beat(self) -> None:
        """Show that this node is there, or done."""
        self.beats += 1
        self.store.set(self.keys[self.slot], f"{self.workers} {'done' if self.done else self.beats}")

    def watch_the_store(self) -> None:
        """End when the store's host has gone silent: the store's client waits for an answer without limit."""
        while time.monotonic() - self.turned < LOST_S:
            time.sleep(BEAT_S)
        self.tell_store_lost(SILENT)
        os._exit(0)

    def tell_store_lost(self, text: str) -> None:
        """Tell the command that the store's host is gone."""
        name = self.names[0] or (f"the store at {self.place}" if self.arrival else "")
        say(**ended(self.numbers[0], LOST_STATUS, text, name))

    def tell_verdict(self) -> bool:
        """Whether all have ended; tells the command how, unless its own failure ended them."""
        if not self.store.check(["verdict"]):
            return False
        if not self.failed_here:
            say(**json.loads(self.store.get("verdict")))
        return True

    def next_round(self) -> bool:
        """Whether all start again: wait until the command is ready for it, unless somebody fails for good."""
        from torch.distributed import PrefixStore

        if not json.loads(self.store.get("verdict")).get("ended", {}).get("again"):
            return False
        self.round += 1
        self.store = PrefixStore(f"round{self.round}/", self.all_rounds)
        self.roll = None if self.slot else Roll(self.store, self.keys, self.arrivals)
        self.done = self.failed_here = self.ready = False
        if self.final:  # it came as the others were about to start again
            self.fail(self.final)
        while not (self.ready or self.tell_verdict()):
            self.listen(BEAT_S)
        return self.ready

    def linger(self) -> None:
        """Serve the store until all have seen the end, or for moments."""
        self.store.set(f"seen{self.slot}", "")
        patience = Patience(LINGER_S)
        everyone = [f"seen{slot}" for slot in range(len(self.keys))]
        while self.slot == 0 and not self.store.check(everyone) and not patience.over():
            time.sleep(BEAT_S)

    def listen(self, wait_s: float) -> None:
        """Wait for the command's word; its end without one is a failure. A success may turn into one."""
        self.turned = time.monotonic()
        word = self.next_word(wait_s)
        if word is None:
            return
        if "ready" in word:
            self.ready = True
        elif not word.get("again"):
            self.done = True
            if word["status"]:
                self.final = word
                self.fail(word)
        elif self.together:  # else that round is over already
            self.fail(word)

    def next_word(self, wait_s: float) -> "dict[str, Any] | None":
        """What the command has said, if anything, within `wait_s`."""
        if self.left:
            time.sleep(wait_s)
            return None
        if b"\n" not in self.unread:
            if not select.select([0], [], [], wait_s)[0]:
                return None
            data = os.read(0, 1 << 16)
            self.unread += data
            self.left = not data
            if self.left:
                return None if self.done else {"status": 70, "text": "its launcher was killed"}
        line, newline, rest = self.unread.partition(b"\n")
        if not newline:
            return None
        self.unread = rest
        word: dict[str, Any] = json.loads(line)
        return word

    def fail(self, word: "dict[str, Any]") -> None:
        """End all nodes with the command's word, in this round or for good."""
        self.failed_here = True
        verdict = ended(self.number, word["status"], word["text"], self.names[self.slot])
        verdict["ended"].update({"again": True} if word.get("again") else {})
        self.end(verdict)

    def end(self, verdict: "dict[str, Any]") -> None:
        """The first verdict of all is the one that counts."""
        self.store.compare_set("verdict", "", json.dumps(verdict))


def await_name(host: str, wait_s: float) -> None:
    """Wait until a host name is known, at most NAME_S: until then nobody is the store's host."""
    patience = Patience(min(wait_s, NAME_S))
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            if patience.over():
                return
            if patience.worth_a_word():
                say(waiting=[], why=f"{host}: {error.strerror}")
        pause()


class Store:
    """Where the store of a job is, and who serves it: True = we do, None = we do if nobody else does.

    `rank` is this node's, or UNNUMBERED.
    """

    def __init__(self, host: str, port: int, rank: int, serves: "bool | None", wait_s: float) -> None:
        self.host, self.port, self.rank, self.serves, self.wait_s = host, port, rank, serves, wait_s
        self.place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.first = [] if rank == UNNUMBERED else [0]

    def knock(self) -> None:
        """Raise `OSError` if nobody listens there."""
        socket.create_connection((self.host, self.port), timeout=LINGER_S).close()

    def reach(self) -> None:
        """Wait until somebody listens there, and say so now and then. Raises `OSError` after `wait_s`."""
        patience = Patience(self.wait_s)
        while True:
            try:
                return self.knock()
            except OSError as error:
                if patience.over():
                    raise
                if patience.worth_a_word():
                    say(waiting=self.first, why=error.strerror or str(error))
            pause()

    def opened(self, limit_s: float) -> "tuple[Any, bool]":
        """The store, and whether it is served here. Raises `OSError`, `DistError`."""
        from torch.distributed import DistError

        if self.serves is not False:
            try:
                return self._tcp_store(True, limit_s), True
            except (DistError, OSError) as error:
                if self.serves or "in use" not in str(error):
                    raise
            self.knock()  # to wait would be wrong: who has the port may be about to leave it to us
        else:
            self.reach()
        return self._tcp_store(False, limit_s), False

    def _tcp_store(self, serves: bool, limit_s: float) -> Any:
        """In a thread: a client waits without limit for the first answer of who listens and says nothing."""
        from torch.distributed import TCPStore

        found: list[Any] = []

        def connect() -> None:
            try:
                limit = timedelta(seconds=limit_s)
                found.append(TCPStore(self.host, self.port, None, serves, limit, wait_for_workers=False))
            except Exception as error:
                found.append(error)

        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        thread.join(limit_s + LINGER_S)
        result = found[0] if found else TimeoutError("connected, but got no answer")
        if isinstance(result, Exception):
            raise result
        return result


def pause() -> None:
    """Let a moment pass before the next try; end if the command has ended."""
    if select.select([0], [], [], BEAT_S)[0]:
        raise SystemExit


def attach(where: Store, claim: "Callable[[Any, bool], str]") -> Any:
    """A connection to the store of this job. Raises `OSError`, `DistError`, `StaleError`.

    `claim` takes this node's place in it, or says why it can't. A store of launchers that were just killed
    lives for moments: its port is still taken, and a node that comes to it finds that it was there before,
    or that a node has failed.
    """
    from torch.distributed import DistError, PrefixStore

    if where.serves is False:
        where.reach()
    patience = Patience(2 * LINGER_S)
    # An address that is not ours may be translated to one, but then it answers soon.
    limit_s = LINGER_S if where.serves and not is_here(where.host) else LOST_S
    while True:
        try:
            store, served = where.opened(limit_s)
            store = PrefixStore("distlaunch/", store)
            why = claim(store, served)
            if not why:
                return store
            problem: Exception = StaleError(f"{why} (store at {where.place})")
        except (DistError, OSError) as error:
            problem = error
        if patience.over():
            raise problem
        pause()


def numbered(where: Store, nodes: int) -> Keeper:
    """The keeper of a node that knows its number. Raises as `attach`."""
    rank = where.rank

    def claim(store: Any, _: bool) -> str:
        if store.add(f"came{rank}", 1) > 1:
            return f"another launcher with --node-rank {rank} has already joined"
        return "another node has already failed" if store.check(["verdict"]) else ""

    return Keeper(attach(where, claim), rank, nodes)


def unnumbered(where: Store, nodes: int, arrival: "dict[str, Any]") -> Keeper:
    """The keeper of a node that gets its number once all have met. Raises as `attach`."""
    slots: list[int] = []

    def claim(store: Any, served: bool) -> str:
        if store.check(["verdict"]):
            return "another node has already failed"
        if served:
            store.set("job", json.dumps(arrival["job"]))
        elif why := refusal(store, arrival["job"]):
            return why
        expected = int(store.compare_set("nodes", "", str(nodes)))
        slots[:] = [0 if served else store.add("came", 1)]
        if slots[0] >= expected or store.check(["met"]):
            return f"{expected} of {expected} nodes have already joined: start one launcher on each node"
        return ""

    store = attach(where, claim)
    near = slots[0] == 0 or is_here(where.host)
    return Keeper(store, slots[0], nodes, {**arrival, "near": near}, where.place)


def refusal(store: Any, job: str) -> str:
    """Why a launcher of the job can't be part of what the store's host serves it for; "" = it can."""
    if not store.check(["job"]):
        return "another program serves a store there: choose another port"
    theirs = json.loads(store.get("job"))
    if theirs == job:
        return ""
    store.set("refused", f"a launcher with --rdzv-id {job} was refused, since the others have {theirs}")
    return f"--rdzv-id is {job} here, but {theirs} where others have joined: pass the same on all nodes"


def serves_of(told: "bool | None", host: str) -> "bool | None":
    """Whether a node without a number serves the store: as told, else if it is on the host."""
    return told if told is not None or is_here(host) else False


def is_here(host: str) -> bool:
    """Whether a name, or address, is one of this machine's: what goes there has it as its source, too.

    To bind a socket to it would tell nothing where net.ipv4.ip_nonlocal_bind is on.
    """
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_is_source(family, address) for family, _, _, _, address in found)


def _is_source(family: int, address: "tuple[Any, ...]") -> bool:
    if ipaddress.ip_address(address[0].partition("%")[0]).is_loopback:
        return True
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(address)
            return bool(sock.getsockname()[0] == address[0])
    except OSError:
        return False


def unserved(where: Store, error: Exception) -> "dict[str, Any]":
    """Why this node has no store, and the status: 75 where its port is taken, 69 where it is out of reach."""
    if where.rank == 0 and not is_here(where.host):
        text = f"{where.host} is not an address of this machine: check --node-rank 0 and --master-addr"
        return ended(0, 2, text)
    why = str(error).splitlines()[0]
    if where.serves is None:
        why = f"another program uses that port ({why})"
    elif where.rank == UNNUMBERED and not where.serves:
        why += f"; a node must have the address {where.host}, or get --rdzv-conf is_host=1"
    serves = where.serves is not False
    text = f"can't {'serve' if serves else 'reach'} the store at {where.place}: {why}"
    return ended(min(where.rank, 0), 75 if serves else 69, text)


def keeper_at(where: Store, nodes: int, arrival: "dict[str, Any] | None") -> "Keeper | None":
    """This node's end of the store; None after telling why it has none."""
    from torch.distributed import DistError

    try:
        return unnumbered(where, nodes, arrival) if arrival else numbered(where, nodes)
    except StaleError as error:
        say(**ended(where.rank, 2, str(error)))
    except (DistError, OSError) as error:
        say(**unserved(where, error))
    return None


def prepare_torch() -> None:
    """Have torch's store without the rest of torch, which takes a second to import.

    Where that has not been tried, or does not work, all of torch is imported when the store is.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return
    (folder, *_) = spec.submodule_search_locations
    try:
        with open(os.path.join(folder, "version.py"), encoding="utf-8") as file:
            version = file.read()
        if any(f"'{each}." in version for each in TRIED):
            _import_store(folder)
    except Exception:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
            del sys.modules[name]


def _import_store(folder: str) -> None:
    torch, distributed = (types.ModuleType(name) for name in ("torch", "torch.distributed"))
    torch.__path__ = [folder]
    sys.modules.update({"torch": torch, "torch.distributed": distributed})
    core: Any = importlib.import_module("torch._C")
    core._c10d_init()
    store: Any = importlib.import_module("torch._C._distributed_c10d")
    found = {"TCPStore": store.TCPStore, "PrefixStore": store.PrefixStore, "DistError": core._DistError}
    vars(distributed).update(found)


def main() -> None:
    """Keep until the end; status 75 when the port is taken."""
    for name in ENDING:
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    host, port, rank, nodes, workers, wait_s = sys.argv[1], *map(int, sys.argv[2:6]), float(sys.argv[6])
    arrival = json.loads(sys.argv[7])
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported
    prepare_torch()
    await_name(host, wait_s)
    serves = serves_of(arrival["serves"], host) if arrival else rank == 0
    where = Store(host, port, UNNUMBERED if arrival else rank, serves, wait_s)
    keeper = keeper_at(where, nodes, arrival)
    if keeper:
        keep(keeper, workers, wait_s)


def keep(keeper: Keeper, workers: int, wait_s: float) -> None:
    """Meet the other nodes, and stay with them until all have ended."""
    from torch.distributed import DistError

    threading.Thread(target=keeper.watch_the_store, daemon=True).start()
    try:
        while sizes := keeper.meet(workers, wait_s):
            say(sizes=sizes, number=keeper.number, port=keeper.port)
            keeper.watch()
            if not keeper.next_round():
                break
        keeper.linger()
    except (DistError, OSError):
        keeper.tell_store_lost("its store closed the connection")


if __name__ == "__main__":
    gc.disable()  # what torch imports is no garbage: a tenth of the time that takes
    main()
    sys.stdout.flush()
    os._exit(0)  # to take torch apart would be another third of it
