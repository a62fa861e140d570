"""Launchers that join one run on this machine, and everything else that connects."""

import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distlaunch import __version__
from distlaunch.agent import messages, wire
from distlaunch.errors import Exit
from distlaunch.launch import gather
from distlaunch.launch.join import MAGIC, SECRET, Prover, line_of
from distlaunch.signals import Interrupts
from distlaunch.transports.gathering import Arrival
from tests.harness import PATIENCE_S, Going, all_ended_well, children_of, kill, on_time, wait_until
from tests.process.commands import adds, sleeper
from tests.process.launchers import LOST, launcher, statuses, told, workers
from tests.process.torchruns import NEEDS_TORCH, OURS, TORCHRUN, free_port, going, our_lines, script

pytestmark = NEEDS_TORCH
HERE = socket.gethostname()
LATE_S = 3.0
"""More than the second that strangers may cost: a busy machine takes that long to start two launchers."""


@pytest.fixture
def port() -> int:
    return free_port()


def ends(*runs: Going) -> None:
    """Launchers whose ranks run are stopped by one of them."""
    runs[0].process.terminate()
    assert statuses(runs) == [143] * len(runs), told(runs)


# Waiting


@pytest.mark.parametrize(
    ("meets", "missing"), [("static", "node 2"), ("c10d", f"1 of 3 nodes (joined: {HERE}, {HERE})")]
)
def test_gives_up_naming_the_missing_nodes(place: Path, port: int, meets: str, missing: str) -> None:
    start = partial(launcher, place, port, "--rdzv-conf=join_timeout=2", nodes=3, meets=meets)
    with start() as first, start(node=1) as second:
        assert statuses([first, second]) == [Exit.TIMEOUT, Exit.TIMEOUT]
        gave_up = f"distlaunch: gave up after 2 s: waited for {missing} at localhost:{port}; check that every"
        assert our_lines(first)[-1] == our_lines(second)[-1]
        assert our_lines(first)[-1].startswith(gave_up)
        assert "localhost is reachable only from this machine" in our_lines(first)[0]


ELSEWHERE = "--rdzv-backend=c10d --rdzv-endpoint=192.0.2.77:29500 --rdzv-conf="  # RFC 5737


HAVE = "check that a launcher is running on 192.0.2.77 or with --rdzv-conf is_host=1, and that no firewall"
NO_NAME = "--rdzv-backend=c10d --rdzv-endpoint=no-such-host.invalid:29500 --rdzv-conf="
HERE_1 = "--master-addr=localhost --master-port=1 --node-rank=1 --rdzv-conf=timeout=6"
REFUSED = "distlaunch: waiting for node 0 at localhost:1: Connection refused\n"
NOT_HERE = "192.0.2.1 is not an address of this machine: if this isn't node 0, set --node-rank"


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (f"{ELSEWHERE}join_timeout=1", Exit.UNREACHABLE, HAVE),
        (f"{ELSEWHERE}is_host=0,join_timeout=1", Exit.UNREACHABLE, HAVE),
        (f"{NO_NAME}join_timeout=1", Exit.UNREACHABLE, "; check this name, or add it to /etc/hosts\n"),
        (HERE_1, Exit.UNREACHABLE, REFUSED),
        ("--master-addr=192.0.2.1 --node-rank=0", Exit.USAGE, NOT_HERE),
        ("--master-addr=192.0.2.1", Exit.USAGE, NOT_HERE),
    ],
    ids=["is not here", "is told so", "no such name", "nobody listens", "node 0", "no number"],
)
def test_reports_an_endpoint_without_a_controller(place: Path, words: str, status: int, said: str) -> None:
    with going(OURS, place, "--nnodes=2", *words.split(), "worker.py") as run:
        assert (run.wait(), said in run.stderr) == (status, True), run.stderr
        gave_up = rf"gave up after {words[-1]} s: can't reach the controller at \S+:\d+: "
        assert bool(re.search(gave_up, run.stderr)) == (status == Exit.UNREACHABLE), run.stderr


def test_waits_a_while_for_a_name_to_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod starts before its cluster's name server knows it."""
    clock, said = [1000.0], list[str]()

    def resolve(name: str, _: None) -> list[object]:
        if clock[0] < 1007:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return []

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(gather, "pause", lambda *_: clock.append(clock.pop() + 1))
    monkeypatch.setattr("distlaunch.launch.join.time", SimpleNamespace(monotonic=lambda: clock[0]))
    with Interrupts() as interrupts:
        gather._await_name("job-0.job", 600, interrupts, said.append)
        assert clock == [1007]
        assert said == ["waiting up to 1 min for job-0.job to resolve: Name or service not known"]
        clock[0] = 0.0
        gather._await_name("no-such-name", 600, interrupts, said.append)
        assert clock == [gather.NAME_S + 1]


@pytest.mark.parametrize("node", [0, 1], ids=["controller", "another"])
def test_a_signal_ends_only_the_wait_of_that_launcher(place: Path, port: int, node: int) -> None:
    with launcher(place, port, nodes=3) as first, launcher(place, port, nodes=3, node=1) as second:
        second.wait_for("waiting for node 2")
        runs = (first, second)
        runs[node].process.send_signal(signal.SIGTSTP)
        runs[node].wait_for("can't be suspended")
        runs[node].process.send_signal(signal.SIGINT)
        assert runs[node].wait() == 130
        assert our_lines(runs[node])[-1] == "distlaunch: stopped by SIGINT"
        words = "waiting for nodes 1-2 at" if node else "waiting for node 0 at"
        runs[1 - node].wait_for(words)


@pytest.mark.parametrize("dies", [0, 1], ids=["controller", "another"])
@pytest.mark.parametrize(
    ("meets", "missing"), [("static", "node 2"), ("c10d, told", f"1 of 3 nodes (joined: {HERE}, {HERE})")]
)
def test_waits_again_for_a_dead_launcher(place: Path, port: int, meets: str, missing: str, dies: int) -> None:
    """The controller tells the others for which nodes it waits."""
    start = partial(launcher, place, port, nodes=3, meets=meets)
    with ExitStack() as stack:
        runs = [stack.enter_context(start(node=node)) for node in range(2)]
        for run in runs:
            run.wait_for(f"distlaunch: waiting for {missing} at localhost:{port}\n")
        runs[dies].process.kill()
        runs[dies].wait()
        runs[dies] = stack.enter_context(start(node=dies))
        runs.append(stack.enter_context(start(node=2)))
        assert len(workers(runs)) == 3
        ends(*runs)


@pytest.mark.parametrize("most", [9, 11, 13])
def test_shows_why_an_agent_without_descriptors_exits(place: Path, port: int, most: int) -> None:
    limited = ["bash", "-c", f'ulimit -n {most}; exec "$@"', "bash", *OURS]
    with launcher(place, port) as first, launcher(place, port, node=1, argv=limited) as second:
        assert second.wait() == Exit.INTERNAL
        assert "OSError: [Errno 24] Too many open files" in second.stderr, second.stderr
        first.wait()


# Who is refused


@pytest.mark.parametrize(("meets", "nodes"), [("static", 2), ("c10d", 2), ("c10d", "1:3")])
def test_both_sides_say_why_a_launcher_is_refused(place: Path, port: int, meets: str, nodes: Any) -> None:
    why = f"it was started for {nodes} nodes, but the controller for 3"
    waits = f"2 of 3 nodes (joined: {HERE})" if meets == "c10d" else "nodes 1-2"
    with launcher(place, port, nodes=3, meets=meets) as first:
        first.wait_for(f"distlaunch: waiting for {waits} at localhost:{port}\n")
        with launcher(place, port, nodes=nodes, node=1, meets=meets) as second:
            assert second.wait() == Exit.USAGE
            refused = f"distlaunch: the controller on {HERE} refused the launcher on {HERE}: {why}"
            assert our_lines(second)[-1] == refused
            assert "ready" not in second.stdout
        first.wait_for(f"distlaunch: refused the launcher on {HERE}: {why}\n")
        assert first.process.poll() is None


def test_refuses_a_second_launcher_of_a_node(place: Path, port: int) -> None:
    with launcher(place, port, nodes=3) as first, launcher(place, port, nodes=3, node=2) as second:
        second.wait_for("waiting for node 1")
        words = "another launcher with node rank 2 has already joined"
        with launcher(place, port, nodes=3, node=2) as third:
            assert (third.wait(), words in third.stderr) == (Exit.USAGE, True)
        first.wait_for(words)
        with launcher(place, port, nodes=3, node=1) as fourth:
            assert len(workers([first, second, fourth])) == 3
            ends(first, second, fourth)


def test_a_controller_that_cannot_start_the_run_tells_all_launchers(place: Path, port: int) -> None:
    with launcher(place, port, "--log-dir=/proc/none") as first, launcher(place, port, node=1) as second:
        assert statuses([first, second]) == [1, 1], told([first, second])
        why = "can't create the run directory in /proc/none: "
        assert f"distlaunch: {why}" in first.stderr
        assert f"the controller can't start the run: {why}" in second.stderr


def test_a_launcher_that_cannot_save_output_tells_the_controller_why(place: Path, port: int) -> None:
    start = partial(launcher, place, port, "--redirects=3")
    with start() as first, start("--log-dir=/proc/none", node=1) as second:
        assert statuses([first, second]) == [Exit.UNREACHABLE, Exit.FAILED], told([first, second])
        for run in (first, second):
            assert "can't create the run directory in /proc/none: " in run.stderr
            assert "Traceback" not in run.stderr


def test_refuses_one_launcher_too_many(place: Path, port: int) -> None:
    """All come while the controller does not look."""
    connection, table = re.compile(rf"(?m)^ *\d+: \S+ \w+:{port:04X} 01 "), Path("/proc/net/tcp")
    with ExitStack() as stack:
        first = stack.enter_context(launcher(place, port, meets="c10d, told"))
        first.wait_for("waiting for")
        first.process.send_signal(signal.SIGSTOP)
        others = [stack.enter_context(launcher(place, port, meets="c10d, told", node=1)) for _ in range(2)]
        wait_until(lambda: len(connection.findall(table.read_text())) >= 2, table.read_text)
        first.process.send_signal(signal.SIGCONT)
        why = "2 of 2 nodes have already joined: start one launcher on each node"
        first.wait_for(f"refused the launcher on {HERE}: {why}")
        workers([first])
        (refused,) = (run for run in others if run.process.poll() is not None or "refused" in run.stderr)
        assert (refused.wait(), why in refused.stderr) == (Exit.USAGE, True)


# What else is at the endpoint


def test_reports_a_port_that_another_program_has(place: Path, port: int) -> None:
    with socket.create_server(("127.0.0.1", port)), launcher(place, port) as first:
        assert first.wait() == Exit.PORT_TAKEN
        words = f"can't listen at localhost:{port} for the other nodes: Address already in use"
        assert words in first.stderr


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, "no answer"),
        (b"", "it closed the connection"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "Expecting value: line 1 column 1"),
        (b"{}\n", "it lacks 'nonce'"),
        (b'{"refused": 1, "status": null}\n', "int"),
        (b"x" * (1 << 16), "its answer is too long"),
    ],
    ids=["silent", "closes", "http", "nothing", "a refusal of sorts", "much"],
)
def test_reports_a_listener_that_is_not_a_controller(
    place: Path, port: int, answer: bytes | None, why: str
) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", port)))
        server.settimeout(0.1)
        run = stack.enter_context(launcher(place, port, "--rdzv-conf=join_timeout=1", node=1))
        while run.process.poll() is None:
            with suppress(OSError):
                connection = stack.enter_context(server.accept()[0])
                connection.recv(1 << 14)
                connection.sendall(answer or b"")
                if answer == b"":
                    connection.close()
        assert run.wait() == Exit.UNREACHABLE
        assert "the process that listens there may not be the controller of this job (" in run.stderr
        assert why in run.stderr and "Traceback" not in run.stderr


def test_recognizes_a_store_of_torchs_at_the_endpoint(place: Path, port: int) -> None:
    """As that of a torchrun, or of another job's rank 0."""
    store = f"store = TCPStore('127.0.0.1', {port}, None, True, wait_for_workers=False)"
    serves = f"from torch.distributed import TCPStore; {store}; print('serves', flush=True)"
    with going([sys.executable, "-c"], place, f"import signal; {serves}; signal.pause()") as server:
        server.wait_for("serves")
        for meets in ("static", "c10d"):
            with launcher(place, port, node=1, meets=meets) as run:
                run.wait_for("a torch TCPStore uses this address: if torchrun was started, run")


def test_recognizes_a_torchrun_that_connects(place: Path, port: int) -> None:
    with launcher(place, port, meets="c10d") as first:
        first.wait_for("waiting for")
        with launcher(place, port, "--rdzv-conf=is_host=0", meets="c10d", argv=TORCHRUN):
            words = "which is torch's: run `distlaunch torchrun` on all nodes, or torchrun on all"
            first.wait_for(f"closed a connection from 127.0.0.1, {words}")
        assert first.process.poll() is None


def test_a_launcher_too_many_does_not_disturb_a_job_that_trains(tmp_path: Path, port: int) -> None:
    """It finds the store of the job's rank 0, and says what may be wrong."""
    script(tmp_path, adds(before="os.write(1, b'here\\n'); dist.get_rank() or open('fifo').read()"))
    os.mkfifo(tmp_path / "fifo")
    with launcher(tmp_path, port) as first, launcher(tmp_path, port, node=1) as second:
        first.wait_for("here")
        with launcher(tmp_path, port, node=1) as third:
            third.wait_for("otherwise, the run has all its nodes, or is still stopping")
        (tmp_path / "fifo").write_text("go on")
        all_ended_well([first, second], last="sum 2\n")


@pytest.mark.parametrize("word", ["--rdzv-id=7", "--rdzv-id=other", "--rdzv-endpoint=127.0.0.1:PORT"])
def test_a_launcher_too_many_does_not_begin_a_second_job_while_nothing_listens(
    place: Path, port: int, word: str
) -> None:
    """Nor one of another job, which would take the port from the ranks of the first."""
    start = partial(launcher, place, port, meets="c10d")
    with start() as first, start() as second:
        workers([first, second])
        words = ("--rdzv-conf=join_timeout=8", word.replace("PORT", str(port)))
        with launcher(place, port, *words, meets="c10d") as third:
            third.wait_for(f":{port}: Connection refused")  # after 5 s
            second.process.terminate()
            assert statuses([first, second]) == [143, 143], told([first, second])
            assert (third.wait(), "nodes (joined" in third.stderr) == (Exit.UNREACHABLE, False)
            assert "another launcher on this host already controlled a job at" in third.stderr


# Strangers at the controller's listener

HELLO = {**Arrival("--rdzv-id 7", "gpu-b", (3, 3), 1)._asdict(), "nonce": "1"}
NONSENSE: dict[str, bytes] = {
    "no magic": b"\0" * 100,
    "an http request": b"GET / HTTP/1.1\r\nHost: gpu-a\r\n\r\n",
    "no json": MAGIC + b"{\n",
    "deep": MAGIC + b"[" * 9000 + b"\n",
    "not a word of it": MAGIC + b"{}\n",
    "no version": MAGIC + line_of({**HELLO, "version": None}),
    "an infinite number": MAGIC + line_of({**HELLO, "nodes": [2, float("inf")]}),
    "lines for a name": MAGIC + line_of({**HELLO, "name": "a\ndistlaunch: all is well"}),
    "no utf-8": MAGIC + b"\xff\xfe\n",
    "a list for a proof": MAGIC + line_of(HELLO) + line_of({"proof": []}),
    "no ascii for a proof": MAGIC + line_of(HELLO) + line_of({"proof": "\xe9"}),
    "a long line": MAGIC + b"x" * (1 << 15),
    "more than it should": MAGIC + line_of(HELLO) + b"x" * (1 << 15),
    "too much of a refusal": MAGIC + line_of(HELLO) + line_of({"refuses": "x" * 9000}),
    "a surrogate": MAGIC + line_of({**HELLO, "name": "\ud800"}),
}


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port))


def answered(sock: socket.socket) -> bytes:
    """All that the controller says until it closes the connection."""
    said = b""
    with suppress(ConnectionResetError):
        while data := sock.recv(1 << 16):
            said += data
    return said


@contextmanager
def gathering(directory: Path, port: int, secret: str = "") -> Iterator[Going]:
    """A controller that waits for nodes 1 and 2 of job 7.

    In the end the others join, and the job starts in time: strangers are no hindrance.
    """
    start = partial(launcher, directory, port, "--rdzv-id=7", nodes=3, secret=secret)
    with start() as first:
        first.wait_for("waiting for")
        yield first
        with start(node=1) as second, start(node=2) as third:
            workers([first, second, third])
            on_time("the start", time.monotonic() - second.began, LATE_S)
            ends(first, second, third)
        assert "Traceback" not in first.stderr and not (secret and secret in first.stderr)


@pytest.mark.parametrize("secret", ["", "s3cr\xe9t"], ids=["no secret", "secret"])
def test_names_connections_that_send_nonsense_and_starts_in_time(place: Path, port: int, secret: str) -> None:
    with gathering(place, port, secret) as first:
        for what, sent in NONSENSE.items():
            with closing(connected(port)) as sock:
                with suppress(OSError):  # it may have closed the connection already
                    sock.sendall(sent)
                    sock.shutdown(socket.SHUT_WR)
                answered(sock)
            assert first.process.poll() is None, what
        for named in ("an invalid message", "too much data"):
            first.wait_for(f"closed a connection from 127.0.0.1, which sent {named}\n")


def test_names_launchers_of_another_job_or_version_and_starts_in_time(place: Path, port: int) -> None:
    """A launcher of the same job is named as it says; others may say anything."""
    version = f"it has distlaunch 9.9, but the controller has {__version__}: install the same version"
    with gathering(place, port) as first:
        for claim, name, why in (
            ({"job": "--rdzv-id 8"}, "gpu-b", "its job is '--rdzv-id 8', not '--rdzv-id 7'"),
            ({"version": "9.9"}, "127.0.0.1", version),
        ):
            with closing(connected(port)) as sock:
                sock.sendall(MAGIC + line_of({**HELLO, **claim}))
                said = json.loads(answered(sock))
            refused = f"refused the launcher on {name}: {why}"
            words = f"the controller on {HERE} {refused}"
            assert said == {"refused": words, "status": 2, "another": "job" in claim}
            first.wait_for(f"{refused}\n")


def test_closes_and_names_slow_connections_and_starts_in_time(place: Path, port: int) -> None:
    """One is silent, one speaks a byte at a time; 200 more are held open while the job starts."""
    with ExitStack() as stack:
        with gathering(place, port) as first:
            silent, slow = (stack.enter_context(closing(connected(port))) for _ in range(2))
            slow.settimeout(0.1)
            with suppress(ConnectionError):
                for byte in MAGIC + line_of(HELLO):
                    slow.send(bytes([byte]))
                    with suppress(TimeoutError):
                        assert slow.recv(1) == b""
                        break
                else:
                    pytest.fail("it was not closed")
            assert answered(silent) == b""
            named = "127.0.0.1, which did not identify itself as a launcher of this run within 5 s\n"
            first.wait_for(named)
            held = [stack.enter_context(closing(connected(port))) for _ in range(200)]
        assert {answered(sock) for sock in held} == {b""}


def test_more_launchers_may_join_than_the_soft_limit_on_descriptors_allows(place: Path, port: int) -> None:
    limited = ["bash", "-c", 'ulimit -Sn 40; exec "$@"', "bash", *OURS]
    with launcher(place, port, "--rdzv-id=7", nodes=60, argv=limited) as first, ExitStack() as stack:
        first.wait_for("waiting for")
        for node in range(1, 59):
            sock = stack.enter_context(closing(connected(port)))
            sock.settimeout(PATIENCE_S)
            sock.sendall(MAGIC + line_of({**HELLO, "nodes": [60, 60], "node_rank": node}))
            assert json.loads(sock.recv(1 << 14))["proves"] == ""
            sock.sendall(line_of({"proof": ""}))
            assert json.loads(sock.recv(1 << 14)) == {"proof": ""}


# Secrets


REQUIRED = f"the controller requires {SECRET}, which is not set on {HERE}; if that"


@pytest.mark.parametrize(("secret", "why"), [("another", f"its {SECRET} is different"), ("", REQUIRED)])
def test_refuses_a_launcher_without_the_same_secret(place: Path, port: int, secret: str, why: str) -> None:
    with gathering(place, port, "s3cret") as first:
        with launcher(place, port, "--rdzv-id=7", nodes=3, node=1, secret=secret) as second:
            assert second.wait() == Exit.USAGE
            assert why in second.stderr and "ready" not in second.stdout
        first.wait_for(why)


def test_a_proof_cannot_be_reused(place: Path, port: int) -> None:
    """What a launcher has said, word for word, is not believed from another connection."""
    prover, line = Prover({SECRET: "s3cret"}, "gpu-b"), line_of(HELLO)

    def introduced(sock: socket.socket) -> str:
        sock.sendall(MAGIC + line)
        challenge = json.loads(sock.recv(1 << 14))
        assert challenge["proves"] == "secret"
        return f"1 {challenge['nonce']} {line[:-1].decode()}"

    with gathering(place, port, "s3cret"):
        with closing(connected(port)) as sock:
            proof = line_of({"proof": prover.proof("secret", "launcher", introduced(sock))})
            sock.sendall(proof)
            said = json.loads(sock.recv(1 << 14))
            assert "refused" not in said and said["proof"]
        with closing(connected(port)) as sock:
            introduced(sock)
            sock.sendall(proof)
            assert "its DISTLAUNCH_SECRET is different" in json.loads(answered(sock))["refused"]


def test_a_launcher_with_a_secret_serves_only_a_controller_that_knows_it(place: Path, port: int) -> None:
    for secret, words in (
        ("", f"{SECRET} is set on {HERE}, but not for the controller; if that"),
        ("another", f"can't be trusted: its {SECRET} is"),
    ):
        with closing(Liar(port)) as liar, launcher(place, port, node=1, secret="s3cret") as run:
            liar.meet(secret)
            assert (run.wait(), words in run.stderr) == (Exit.USAGE, True), run.stderr


# Controllers that lie


SEAT: dict[str, Any] = {"node": 1, "run": "job-1", "nonce": "3"}


class Liar:
    """A controller that the test plays, for one launcher of node 1."""

    def __init__(self, port: int) -> None:
        self._stack = ExitStack()
        self.close = self._stack.close
        self._server = self._stack.enter_context(socket.create_server(("127.0.0.1", port)))
        self._server.settimeout(PATIENCE_S)

    def meet(self, secret: str = "", **seat: Any) -> None:
        """Let the launcher join, and have this seat."""
        self._socket = self._stack.enter_context(self._server.accept()[0])
        self._file = self._stack.enter_context(self._socket.makefile("rb"))
        assert self._file.readline() == MAGIC
        line = self._file.readline()
        prover = Prover({SECRET: secret}, HERE)
        self._say(nonce="2", proves="secret" if secret else "")
        self._file.readline()
        covered = f"{json.loads(line)['nonce']} 2 {line[:-1].decode()}"
        self._say(proof=prover.proof("secret", "controller", covered) if secret else "")
        if seat:
            self._say(**seat)

    def _say(self, **message: Any) -> None:
        with suppress(ConnectionError):
            self._socket.sendall(line_of(message))

    def seat(self) -> None:
        """Have the launcher be node 1, and wait for its agent."""
        self.meet(**SEAT)
        assert self._file.readline() == wire.HELLO_PREFIX + b"3\n"

    def send(self, command: Any) -> None:
        self._socket.sendall(wire.encode_command(1, messages.as_object(command)))

    def reports(self) -> Iterator[dict[str, Any]]:
        """What the launcher reports, until it closes the connection."""
        decoder = wire.FrameDecoder({**wire.REPORTS, wire.END: wire.MAX_REPORT})
        with suppress(ConnectionResetError):
            while data := self._file.read1():
                for frame in decoder.feed(data):
                    yield frame.message()


RANK = messages.WorkerSpec(0, (), "", (), {"RANK": "5", "LOCAL_RANK": "0"}, {"OMP_NUM_THREADS": "1"})
START = messages.StartWorkers(
    0, "job-1", 5.0, 30.0, watch_port=29500, env={"WORLD_SIZE": "6"}, workers=(RANK,)
)
LIES: dict[str, Any] = {
    "a program": START._replace(workers=(RANK._replace(argv=("touch", "evil")),)),
    "a directory": START._replace(workers=(RANK._replace(cwd="/"),)),
    "a binding": START._replace(binding=messages.Binding("listed", 0, ("0",))),
    "an environment": START._replace(environment="/evil"),
    "a library": START._replace(env={"LD_PRELOAD": "/evil.so"}),
    "a path": START._replace(workers=(RANK._replace(env={"RANK": "5", "PATH": "/evil"}),)),
    "a default": START._replace(workers=(RANK._replace(defaults={"PYTHONPATH": "/evil"}),)),
    "another number of ranks": START._replace(workers=(RANK, RANK._replace(local_rank=1))),
    "no ranks": START._replace(workers=()),
    "no number": START._replace(workers=(RANK._replace(env={"LOCAL_RANK": "0"}),)),
    "a number that is none": START._replace(workers=(RANK._replace(env={"RANK": "../5"}),)),
    "ranks of another run": START._replace(run_id="job-2"),
    "the end of another run": messages.Reap("job-2", 0.0),
    "to listen": messages.Listen(None, "token"),
    "to connect": messages.DialAll((("localhost", 22),), 1.0, "token"),
}
TELLS = """
    import os
    os.write(1, f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}\\n".encode())
    open("ran", "w").close()
"""


def test_a_launcher_obeys_a_controller_that_keeps_to_the_protocol(tmp_path: Path, port: int) -> None:
    """That the tests of lies below would find what is done for them."""
    script(tmp_path, TELLS)
    with closing(Liar(port)) as liar, launcher(tmp_path, port, node=1) as run:
        liar.seat()
        liar.send(messages.HoldPort(None))
        liar.send(START)
        for report in liar.reports():
            if report["op"] == "WorkerExited":
                liar.send(messages.Close(1.0, signal.SIGTERM, 9, "so it is"))
        assert (run.wait(), run.stdout) == (9, "5 of 6\n")
        assert our_lines(run)[-1] == "distlaunch: so it is"
        assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_reaches_the_controller_although_the_agent_has_yet_to_boot(
    tmp_path: Path, port: int, signum: int
) -> None:
    """It would kill a process that is not prepared for it."""
    script(tmp_path, TELLS)
    with closing(Liar(port)) as liar, launcher(tmp_path, port, node=1) as run:
        liar.seat()
        run.process.send_signal(signum)
        told = (report for report in liar.reports() if report["op"] in ("Interrupted", "end"))
        assert next(told) == messages.as_object(messages.Interrupted(signum, 1))
        liar.send(messages.Close(1.0, signal.SIGTERM, 128 + signum, ""))
        assert run.wait() == 128 + signum


def test_a_node_that_was_frozen_for_longer_than_its_time_stops_its_ranks_at_once(
    tmp_path: Path, port: int
) -> None:
    """Others may run in their place by now."""
    script(tmp_path, sleeper("import signal; signal.signal(signal.SIGTERM, lambda *_: open('saved', 'w'))"))
    lease_s, grace_s = 1.0, 2.0
    with closing(Liar(port)) as liar, launcher(tmp_path, port, node=1) as run:
        liar.seat()
        liar.send(messages.HoldPort(None))
        env = {"RANK": "5", "LOCAL_RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"}
        start = START._replace(grace_s=grace_s, lease_s=lease_s, workers=(RANK._replace(env=env),))
        liar.send(start)
        run.wait_for("ready 5")
        (agent,) = children_of(run.process.pid)
        for pid in (run.process.pid, agent):
            kill(pid, signal.SIGSTOP)
        for _ in range(6):  # until the controller gives up
            liar.send(messages.Ping())
        liar.close()
        time.sleep(lease_s + grace_s + 1.0)  # the time of the freeze itself
        for pid in (agent, run.process.pid):
            kill(pid, signal.SIGCONT)
        assert run.wait() == LOST
        assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_launcher_leaves_a_controller_that_asks_too_much(tmp_path: Path, port: int, lie: Any) -> None:
    script(tmp_path, TELLS)
    with closing(Liar(port)) as liar, launcher(tmp_path, port, node=1) as run:
        liar.seat()
        liar.send(lie)
        assert "WorkerExited" not in [report["op"] for report in liar.reports()]
        assert run.wait() == LOST
        assert "lost the controller on localhost: it sent an invalid command: " in run.stderr
        assert not (tmp_path / "ran").exists() and not (tmp_path / "evil").exists()


IMPOSSIBLE: list[dict[str, Any]] = [
    *({"node": -1}, {"node": 1 << 16}, {"node": "1"}, {"run": "../../evil"}, {"run": None})
]


@pytest.mark.parametrize("seat", [*({**SEAT, **lie} for lie in IMPOSSIBLE), {"node": 1}], ids=str)
def test_a_launcher_refuses_an_impossible_seat(tmp_path: Path, port: int, seat: dict[str, Any]) -> None:
    script(tmp_path, TELLS)
    words = ("--tee=3", "--log-dir=logs", "--rdzv-conf=timeout=1")
    with closing(Liar(port)) as liar, launcher(tmp_path, port, *words, node=1) as run:
        liar.meet(**seat)
        liar.close()
        assert run.wait() == Exit.UNREACHABLE
        assert "Traceback" not in run.stderr
    assert not (tmp_path / "evil").exists() and not (tmp_path / "ran").exists()
