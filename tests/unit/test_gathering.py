"""Launchers that gather: endpoints and flags, the messages they exchange, their order and proofs."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.agent import messages
from distlaunch.compat.torchrun_job import flag_messages, gathering_messages, gathering_of
from distlaunch.contract import SENT, ranks_alone
from distlaunch.errors import UsageError
from distlaunch.launch.join import SECRET, JoinError, Prover, arrival_of, line_of, message_of
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
