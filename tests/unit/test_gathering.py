"""Launchers that gather: endpoints and flags, the messages they exchange, their order and proofs."""

import errno
import json
import os
import re
import select
import selectors
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.agent import messages
from distlaunch.compat.torchrun_job import flag_messages, gathering_messages, gathering_of
from distlaunch.contract import SENT, ranks_alone
from distlaunch.errors import UsageError
from distlaunch.launch import gather
from distlaunch.launch.inbound import InboundConnection, InboundListener
from distlaunch.launch.join import (
    MAGIC,
    SECRET,
    TORCHS_PING,
    JoinError,
    Launcher,
    Prover,
    arrival_of,
    line_of,
    message_of,
)
from distlaunch.transports.gathering import LOWEST_PORT, PORT_SPAN, Arrival, TaskPlace, in_order, ports_for
from tests.unit.samples import anything, bounded
from tests.unit.test_messages import START, WORKER
from tests.unit.test_torchrun_flags import parsed

MEET = ("--rdzv-backend=c10d", "--nnodes=2", "--rdzv-endpoint=h:5")
ARRIVAL = Arrival("job", "gpu-a", (2, 2))
HERE = Arrival("--rdzv-id none", "here", (2, 2))


def gathering(*words: str, **environ: str) -> Any:
    """The Gathering of the launcher on the machine `here`."""
    return gathering_of(parsed(*words, "s.py"), "here", environ)


# Command lines


RANKED = {"job": "--rdzv-id j", "node_rank": 1, "task": 3}
TASK_2 = {"OMPI_COMM_WORLD_RANK": "2", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("words", "environ", "arrival", "serves"),
    [
        ("", {}, {}, None),
        ("--rdzv-id=j --node-rank=1", {"SLURM_PROCID": "3"}, RANKED, None),
        ("--rdzv-conf=is_host=True", TASK_2, {"task": 2}, True),
        ("--rdzv-conf=is_host=no --nnodes=1:4", {"SLURM_PROCID": "x"}, {"nodes": (1, 4)}, False),
    ],
)
def test_c10d_flags_become_an_arrival(
    words: str, environ: dict[str, str], arrival: dict[str, Any], serves: bool | None
) -> None:
    met = gathering(*MEET, *words.split(), **environ)
    assert (met.arrival, met.serves, met.ordered) == (HERE._replace(**arrival), serves, False)
    assert (met.hosts, met.ports, met.label) == (("h",), (5,), "h:5")


@pytest.mark.parametrize(("number", "serves"), [(0, True), (1, False)])
def test_node_ranks_become_an_ordered_arrival(number: int, serves: bool) -> None:
    met = gathering("--nnodes=2", "--master-addr=fd00::1", f"--node-rank={number}", SLURM_PROCID="3")
    assert met.arrival == HERE._replace(node_rank=number)
    assert (met.serves, met.ordered, met.label) == (serves, True, "[fd00::1]:29500")


STATIC = ("--nnodes=2", "--master-addr=h")


@pytest.mark.parametrize(
    ("words", "wait_s", "last_call_s"),
    [
        ((*MEET,), 600.0, 30.0),
        ((*MEET, "--rdzv-conf=join_timeout=5,timeout=9"), 5.0, 30.0),
        ((*MEET, "--rdzv-conf=timeout=9,last_call_timeout=1"), 9.0, 1.0),
        ((*MEET, "--rdzv-conf=read_timeout=9"), 600.0, 30.0),
        (STATIC, 600.0, 30.0),
        ((*STATIC, "--rdzv-conf=timeout=9"), 9.0, 30.0),
    ],
)
def test_launchers_wait_for_each_other(words: tuple[str, ...], wait_s: float, last_call_s: float) -> None:
    met = gathering(*words)
    assert (met.wait_s, met.last_call_s) == (wait_s, last_call_s)
    assert words[:2] != STATIC or flag_messages(parsed(*words, "s.py")) == []
    assert flag_messages(parsed(*STATIC, "--rdzv-conf=a=b", "s.py")) != []


NO_HOST = "expected one host name or address"
SECONDS = "expected a whole number of seconds"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--rdzv-endpoint=:29500", f"--rdzv-endpoint ':29500': {NO_HOST}; is a variable in it empty?"),
        ("--rdzv-endpoint=http://h:5", f"--rdzv-endpoint 'http://h:5': {NO_HOST}, without blanks, "),
        ("--rdzv-endpoint=n[1-2]:5", f"--rdzv-endpoint 'n[1-2]:5': {NO_HOST}, without blanks, commas, br"),
        ("--rdzv-endpoint=h:0", "--rdzv-endpoint 'h:0': several nodes need a port from 1 to 65535"),
        ("--rdzv-backend=static --rdzv-endpoint= --master-addr=", f"--master-addr '': {NO_HOST}"),
        ("--rdzv-backend=static --node-rank=2", "--node-rank 2: expected 0 to 1, with --nnodes 2"),
        ("--rdzv-conf=join_timeout=soon", f"--rdzv-conf join_timeout: {SECONDS} ≥ 1"),
        ("--rdzv-conf=last_call_timeout=0", f"--rdzv-conf last_call_timeout: {SECONDS}"),
        ("--rdzv-conf=is_host=maybe", "--rdzv-conf is_host: expected 1 or 0, got 'maybe'"),
        ("--rdzv-conf=x", "--rdzv-conf: expected key=value,…, got 'x'"),
        ("--rdzv-endpoint=127.0.1.1:5", "--rdzv-endpoint 127.0.1.1: each of the 4 nodes of this Slurm step"),
    ],
)
def test_explains_mistakes_about_the_endpoint(words: str, told: str) -> None:
    with pytest.raises(UsageError, match=re.escape(told)):
        gathering(*MEET, *words.split(), SLURM_STEP_NUM_NODES="4")


@pytest.mark.parametrize("words", [MEET, ("--nnodes=1:2", *MEET[1:]), STATIC])
def test_refuses_several_launchers_on_a_node(words: tuple[str, ...]) -> None:
    gathering(*words, SLURM_STEP_NUM_NODES="2", SLURM_STEP_NUM_TASKS="2")
    told = "this Slurm step has 3 tasks on 2 nodes: start one launcher on each node: "
    told += "srun --nodes=2 --ntasks=2 --ntasks-per-node=1"
    with pytest.raises(UsageError, match=told):
        gathering(*words, SLURM_STEP_NUM_NODES="2", SLURM_STEP_NUM_TASKS="3")  # heterogeneous


C10D = "--rdzv-backend=c10d"
NO_EFFECT = ["--rdzv-conf read_timeout, a has no effect: ", "--local-addr has no effect: workers connect to"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", ["--master-addr 127.0.0.1 is reachable only from this machine"]),
        ("--master-addr=localhost", ["--master-addr localhost is reachable only from this"]),
        ("--rdzv-endpoint=[::1]:5", ["--rdzv-endpoint ::1 is reachable only from this machine"]),
        ("--master-addr=gpu-a", []),
        ("--master-addr=gpu-a --max-restarts=1", []),
        (f"{C10D} --rdzv-endpoint=gpu-a --rdzv-conf=join_timeout=9,is_host=0", []),
        (f"--nnodes=1:2 {C10D} --rdzv-endpoint=gpu-a --rdzv-conf=last_call_timeout=9", []),
        (C10D, ["--rdzv-endpoint 127.0.0.1 is reachable only from this machine"]),
        (f"{C10D} --rdzv-endpoint=h --rdzv-conf=read_timeout=9,a=b --local-addr=i", NO_EFFECT),
    ],
)
def test_warns_about_endpoints_and_flags_without_effect(words: str, told: list[str]) -> None:
    lines = [*gathering_messages(parsed("--nnodes=2", *words.split(), "s.py"))]
    assert len(lines) == len(told)
    assert all(line.startswith(start) for line, start in zip(lines, told, strict=True))


# Which node each is


NEAR = True


@pytest.mark.parametrize(
    ("arrivals", "order"),
    [
        ([("a", None, 2, NEAR), ("b", None, 0), ("c", None, 1)], [0, 1, 2]),
        ([("c", None, None, NEAR), ("n10", None, None), ("n2", None, None)], [0, 2, 1]),
        ([("a", 1, 0, NEAR), ("a", 0, 1, NEAR), ("b", 2, 2)], [1, 0, 2]),
        ([("a", 0, 1, NEAR), ("a", 0, 0, NEAR)], [1, 0]),  # one --node-rank for all
        ([("b", None, 0, NEAR), ("c", None, 0), ("a", None, 0)], [0, 2, 1]),  # steps of their own
        ([("a", None, None, NEAR), ("a", None, None, NEAR)], [0, 1]),
    ],
)
def test_orders_nodes_that_have_connected(arrivals: list[tuple[Any, ...]], order: list[int]) -> None:
    """By name, node rank and task; those that are near the endpoint come first."""
    made = [ARRIVAL._replace(name=name, node_rank=rank, task=task) for name, rank, task, *_ in arrivals]
    assert in_order(made, [len(each) == 4 for each in arrivals]) == order


def test_all_launchers_of_a_job_draw_the_same_ports() -> None:
    drawn = ports_for("h:5 job")
    assert drawn == ports_for("h:5 job") != ports_for("h:5 another")
    assert all(LOWEST_PORT <= port < LOWEST_PORT + PORT_SPAN for port in drawn)


# What launchers say to each other


@pytest.mark.parametrize(
    "arrival", [ARRIVAL, ARRIVAL._replace(node_rank=0, task=7, gpus=1, place=TaskPlace(0, 2, None, None))]
)
def test_an_arrival_survives_the_wire(arrival: Arrival) -> None:
    assert arrival_of(message_of(line_of({**arrival._asdict(), "nonce": "1"}))) == arrival


@pytest.mark.parametrize("name", ARRIVAL._fields)
def test_refuses_an_arrival_that_lacks_a_field(name: str) -> None:
    message = ARRIVAL._asdict()
    del message[name]
    with pytest.raises(ValueError, match=f"a field is missing: '{name}'"):
        arrival_of(message)


@pytest.mark.parametrize(
    "changes",
    [
        *({"nodes": [2]}, {"nodes": ["x", 2]}, {"nodes": [-1, 2]}, {"nodes": [2, 1 << 40]}),
        *({"node_rank": -1}, {"node_rank": "0"}, {"node_rank": False}, {"task": [0]}, {"gpus": -1}),
        *({"place": [1, 2, 3]}, {"place": [1, 2, 3, "4"]}, {"place": "here"}, {"job": ["job"]}),
        *({"lacks": None}, {"lacks": "x" * 301}, {"lacks": "a\nb"}),
        *({"name": 7}, {"name": None}, {"name": "gpu-a\x1b[2J"}, {"name": "two\nlines"}),
        pytest.param({"name": "x" * 300}, id="a long name"),
    ],
    ids=repr,
)
def test_refuses_an_arrival_with_an_impossible_value(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=" "):
        arrival_of({**ARRIVAL._asdict(), **changes})


@given(st.fixed_dictionaries(dict.fromkeys(ARRIVAL._fields, anything)))
@bounded(300)
def test_any_message_is_an_arrival_or_a_value_error(message: dict[str, Any]) -> None:
    try:
        arrival = arrival_of(message)
    except ValueError:
        return
    assert arrival.name.isprintable() and all(number >= 0 for number in arrival.nodes)


@pytest.mark.parametrize("line", [b"", b"[]", b"{", b"7", b"\xff\xfe", b"[" * 9999, b"\0"], ids=len)
def test_refuses_a_line_that_is_not_a_message(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        message_of(line)


# Proofs

SAID = "n1 n2 {}"


def prover(secret: str = "") -> Prover:
    return Prover({SECRET: secret, "PATH": "/nowhere"}, "gpu-a")


OURS = prover("s3cret")


@pytest.mark.parametrize(
    ("proof", "is_wrong"),
    [
        pytest.param(prover("s3cret").proof("secret", "launcher", SAID), False, id="the same secret"),
        pytest.param(prover("another").proof("secret", "launcher", SAID), True, id="another secret"),
        pytest.param(OURS.proof("secret", "controller", SAID), True, id="our own, sent back"),
        pytest.param(OURS.proof("secret", "launcher", "n0 n2 {}"), True, id="of another time"),
        *((proof, True) for proof in ("", None, 7, ["a"], "\xe9", "\ud800")),
    ],
)
def test_accepts_only_a_proof_with_the_same_secret(proof: object, is_wrong: bool) -> None:
    assert OURS.way == "secret"
    words = f"its {SECRET} is different" if is_wrong else ""
    assert OURS.wrong("secret", "launcher", SAID, proof) == words


ELSEWHERE = f"{SECRET} is set on gpu-a, but not for the controller; if that"


@pytest.mark.parametrize(
    ("secret", "way", "words"),
    [
        ("", "secret", f"the controller requires {SECRET}, which is not set on gpu-a; if that"),
        # Else anybody who listens at the endpoint could have it run its program.
        *(("s3cret", "", ELSEWHERE), ("s3cret", "munge", ELSEWHERE)),
    ],
)
def test_a_launcher_without_a_proof_says_what_to_set(secret: str, way: str, words: str) -> None:
    with pytest.raises(JoinError, match=f"^{re.escape(words)}") as caught:
        prover(secret).proof(way, "launcher", SAID)
    assert caught.value.exit_status == 2


# What is sent to a launcher of what its ranks get


def test_launchers_receive_only_variables_of_the_contract() -> None:
    env = {"RANK": "3", "HOME": "/root", "LD_PRELOAD": "/x.so"}
    start = START._replace(
        env={"MASTER_ADDR": "h", "PYTHONPATH": "/x"},
        workers=(WORKER._replace(env=env, defaults={"OMP_NUM_THREADS": "1", "PATH": "/x"}),),
    )
    sent = ranks_alone(start)
    assert sent.env == {"MASTER_ADDR": "h"}
    assert sent.workers == (messages.WorkerSpec(0, (), "", (), {"RANK": "3"}, {"OMP_NUM_THREADS": "1"}),)
    text = json.dumps(messages.as_object(sent))
    assert not any(word in text for word in (*WORKER.argv, WORKER.cwd))
    assert not {"PATH", "PYTHONPATH", "LD_PRELOAD", "LD_LIBRARY_PATH", "HOME", "TMPDIR"} & SENT


# The controller's listener


@contextmanager
def listening(*words: str) -> Iterator[InboundListener]:
    """The listener of a job that has begun, which has lost nodes 1 and 2 and waits for node 1."""
    met = gathering(*MEET, *words) if words[:1] != ("static",) else gathering("--nnodes=3", "--node-rank=0")
    met = met._replace(arrival=met.arrival._replace(nodes=(3, 3)))
    listener = InboundListener(met, Prover({SECRET: "s"}, "here"), lambda text: None)
    listener.attach(lambda event: None, lambda node: node in (1, 2), lambda text: None)
    with closing(socket.socket()) as free:
        free.bind(("", 0))
        listener.seat((), [free.getsockname()[1]])
        free.close()
        listener.link(1, "run-1", "gpu-a").close()
        yield listener
        listener.close()
        listener._selector.close()
        for sock in listener._held.values():
            sock.close()


def visitor_of(listener: InboundListener) -> InboundConnection:
    """A launcher that has joined as node 1."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        theirs = socket.create_connection(server.getsockname())
        ours = server.accept()[0]
    visitor = InboundConnection(ours, "10.0.0.2", "10.0.0.1")
    visitor.joined = True
    listener._visitors.append(visitor)
    listener._selector.register(ours, selectors.EVENT_READ, visitor)
    listener._seated[1] = visitor
    theirs.close()
    return visitor


@pytest.mark.parametrize(("words", "number"), [((), None), (("static",), 2)])
def test_a_launcher_that_will_be_needed_is_not_refused(words: tuple[str, ...], number: int | None) -> None:
    """Of two nodes that were lost, one may still run ranks while a launcher takes the other's place."""
    with listening(*words) as listener:
        other = ARRIVAL._replace(nodes=(3, 3), node_rank=number)
        visitor_of(listener)
        assert listener.admits(other) == ""
        listener.link(1, "run-1", "gpu-a").close()
        assert listener.admits(other) == ""
        listener.attach(lambda event: None, lambda node: False, lambda text: None)
        assert listener.admits(other) == "the run has all the nodes it needs"


def test_takes_no_launcher_that_asks_who_listens_for_torch() -> None:
    with listening() as listener, closing(socket.socket()) as asks:
        said = list[str]()
        assert listener._listener
        asks.connect(("127.0.0.1", listener._listener.getsockname()[1]))
        listener.attach(lambda event: None, lambda node: False, said.append)
        asks.sendall(TORCHS_PING)
        while not select.select([asks], [], [], 0.1)[0]:
            listener.turn()
        assert (asks.recv(1), said) == (b"", [])


@pytest.mark.parametrize("port", [5, 6])
def test_a_launcher_with_another_endpoint_belongs_to_another_job(port: int) -> None:
    """Jobs often have the same ID, and the later ports of one may be the endpoint of the other."""
    with listening() as listener, closing(socket.socket()) as other:
        assert listener._listener
        other.connect(("127.0.0.1", listener._listener.getsockname()[1]))
        arrival = HERE._replace(nodes=(3, 3))._asdict()
        other.sendall(MAGIC + line_of({**arrival, "nonce": "1", "endpoint": port}))
        while not select.select([other], [], [], 0.1)[0]:
            listener.turn()
        answer = message_of(other.recv(4096).splitlines()[0])
        assert answer.get("another", False) == (port == 6)
        assert ("its endpoint's port is 6, not 5" in answer.get("refused", "")) == (port == 6)


def test_launchers_that_come_and_go_leave_no_descriptors() -> None:
    with listening() as listener:
        counts = list[int]()
        for _ in range(3):
            visitor_of(listener)
            listener.link(1, "run-1", "gpu-a").close()
            counts.append(len(os.listdir("/proc/self/fd")))
        assert counts[1] == counts[2]


def test_tries_all_ports_at_once_unless_a_firewall_delays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("distlaunch.launch.join.time", SimpleNamespace(monotonic=lambda: clock[0]))
    launcher = Launcher(gathering(*MEET), Prover({}, "here"), mock.Mock(), mock.Mock())
    later = ports_for("h:5 --rdzv-id none")
    assert [*launcher._places()] == [("h", 5), *(("h", port) for port in later)]
    tried = list[int]()
    for _ in range(2):
        for _, port in launcher._places():
            tried.append(port)
            clock[0] += 3.0
    assert tried == [5, later[0], 5, later[1]]


@pytest.mark.parametrize(("fewest", "holder", "waits"), [(2, "2", True), (2, "1", False), (1, "1", True)])
def test_waits_for_a_rank_of_the_last_job_to_leave_the_port(
    fewest: int, holder: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of one node is another one, unless this one may be such a job."""
    met = gathering(*MEET, "--rdzv-conf=is_host=1")
    met = met._replace(arrival=met.arrival._replace(nodes=(fewest, 2)))
    env = f"TORCHELASTIC_RUN_ID=none\0MASTER_ADDR=h\0GROUP_WORLD_SIZE={holder}".encode()
    monkeypatch.setattr("distlaunch.agent.network.owners", lambda port: [{"pid": 7}])
    monkeypatch.setattr("distlaunch.agent.procfs.environment", lambda pid: env)
    monkeypatch.setattr(gather, "claim_of", lambda *_: mock.Mock())
    listener = mock.Mock(claim=None, open=mock.Mock(side_effect=OSError(errno.EADDRINUSE, "in use")))
    entry = gather._Entry(met, listener, "none")
    if not waits:
        with pytest.raises(JoinError, match="can't listen at h:5"):
            entry.opened()
        return
    told = "process 7 uses the port, perhaps a rank of a launcher that was killed"
    assert entry.opened() == told
    monkeypatch.setattr("distlaunch.agent.network.owners", lambda port: [])
    monkeypatch.setattr(gather, "LOOK_S", 0.0)
    entry._look_at = 0.0
    listener.open.side_effect = [OSError(errno.EADDRINUSE, "in use"), 5]  # it leaves between two looks
    assert (entry.opened(), entry.port) == (None, 5)
