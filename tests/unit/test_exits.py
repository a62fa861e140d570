"""The meaning of exits and last output, as torch 2.13 and NCCL print it: facts, advice, root causes."""

import re
import signal
from typing import Any

import pytest

from distlaunch.agent.messages import LATER_S
from distlaunch.diagnosis import exits
from distlaunch.diagnosis.exits import TRACEBACK, Ending, Raised, Words, words_of
from tests.unit.samples import MISSED, NCCL_ABORTED, NCCL_LOST, TWO_ON_A_GPU, WATCHDOG

GIB = 1 << 30
LOADER = "RuntimeError: DataLoader worker (pid 7)"
SHM_FULL, SHM_SMALL, SHM_FINE = (8 * GIB, 0), (64 << 20, 60 << 20), (8 * GIB, 7 * GIB)


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        (Ending(3), "exit status 3"),
        (Ending(-9, oom_kills=2), "probably by the OOM killer (the kernel reports 2 OOM kills on that node)"),
        (Ending(-9), "killed by signal 9 (SIGKILL); the kernel reports no OOM kill in its agent's cgroup"),
        (Ending(-7, shm=SHM_SMALL), "(SIGBUS); /dev/shm on that node has 60 MiB free of 64 MiB"),
        (Ending(-7), "killed by signal 7 (SIGBUS)"),
        (Ending(-15, oom_kills=1), "killed by signal 15 (SIGTERM)"),
    ],
)
def test_facts_name_the_signal_and_what_explains_it(ending: Ending, words: str) -> None:
    assert exits.facts(ending).endswith(words)


ADVICE: list[tuple[Ending, str, str]] = [
    (Ending(-9, oom_kills=1), "", "reduce memory use"),
    (Ending(-9), "", "a memory limit"),
    (Ending(-7, shm=SHM_FULL), "", "--shm-size"),
    (Ending(-7, shm=SHM_SMALL), "", "--shm-size"),
    (Ending(-7, shm=SHM_FINE), "", "truncated"),
    (Ending(-11), "", "PYTHONFAULTHANDLER"),
    (Ending(127), "sh: 1: nvcc: not found", "when a command is not found"),
    (Ending(126), "", "can't be executed"),
    (Ending(-signal.SIGABRT), "terminate called without an active exception", "destroy_process_group"),
    (Ending(-signal.SIGABRT), "", ""),
    (Ending(1), "DistNetworkError: port: 29500, errno: 98, EADDRINUSE", "check-port"),
    (Ending(1), "RuntimeError: Address already in use", "check-port"),
    (Ending(1), "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "smaller batches"),
    (Ending(1), "RuntimeError: CUDA error: invalid device ordinal", "procs_per_node"),
    (Ending(-6), "Watchdog caught collective operation timeout: WorkNCCL", "a rank that stalled"),
    (Ending(1), "RuntimeError: Timed out waiting 1800000ms for recv operation", "a rank that stalled"),
    (Ending(1), "ncclSystemError: System call failed", "NCCL_DEBUG"),
    (Ending(1), TWO_ON_A_GPU, "torch.cuda.set_device(LOCAL_RANK)"),
    (
        Ending(-6),
        "there may be a mismatch in collective sizes or environment settings",
        "another size or type",
    ),
    (Ending(-6, peer_gone=True), NCCL_LOST, "no rank reported its own"),
    (Ending(1), "OSError: [Errno 28] No space left on device", "a disk is full"),
    (Ending(-6), "4 vs 2. Is there a distributed collective mismatch in your code?", "another size or type"),
    (Ending(1), "AcceleratorError: CUDA error: device-side assert triggered", "CUDA_LAUNCH_BLOCKING"),
    (Ending(1, python="/py"), "ModuleNotFoundError: No module named 'torch'", "Python (/py) lacks a package"),
    (Ending(1), "bdb.BdbQuit", "distlaunch torchrun"),
    (Ending(1), "EOFError: EOF when reading a line", "distlaunch torchrun"),
    (Ending(1, stdin=True), "EOFError: EOF when reading a line", ""),
    (Ending(1, module="train"), "ModuleNotFoundError: No module named 'train'", "lacks a package"),
    (Ending(1, module="train"), "/bin/python: No module named ninja", ""),
    (Ending(1), f"Connection reset by peer\n{LOADER} is killed by signal: K.", "a DataLoader worker died"),
    (Ending(1, oom_kills=1), f"{LOADER} exited unexpectedly", "the OOM killer killed a DataLoader worker"),
    (Ending(1), f"{LOADER} is killed by signal: Bus error. ", "--shm-size"),
    (Ending(1), "ConnectionResetError: [Errno 104] Connection reset by peer", ""),
    (Ending(1, peer_gone=True), "RuntimeError: Connection closed by peer", "no rank reported its own"),
    (Ending(1, peer_gone=True), "Timed out waiting 1800000ms for recv operation", "a rank that stalled"),
    (Ending(1, peer_gone=True, networked=True), "Connection closed by peer", "check --links"),
    (Ending(1), "CUDA out of memory\n" + "retried, went well\n" * 60, ""),
    (Ending(1), "ValueError: bad learning rate", ""),
    (Ending(0), "", ""),
]


@pytest.mark.parametrize(("ending", "last_output", "hint"), ADVICE)
def test_advice_fits_the_last_output(ending: Ending, last_output: str, hint: str) -> None:
    given = exits.advice(ending, last_output)
    assert hint in given
    assert bool(given) == bool(hint)


def test_a_stack_that_is_there_is_not_asked_for() -> None:
    given = exits.advice(Ending(-11), "Fatal Python error: Segmentation fault\n")
    assert given.startswith("mismatched torch and CUDA versions")


C10D = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
ELASTIC = "/venv/lib/python3.11/site-packages/torch/distributed/elastic/multiprocessing/errors/__init__.py"
GLOO = "[/pytorch/gloo/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.2]:17806: Connection reset by peer"
CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"
CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"


def raised(error: str, *files: str) -> str:
    """A traceback through these files, the innermost last."""
    frames = "".join(f'  File "{file}", line 9, in step\n    call()\n' for file in ("/job/train.py", *files))
    return f"{TRACEBACK}\n{frames}{error}\n"


VICTIM = raised(f"RuntimeError: {GLOO}", C10D)
OWN = raised("ValueError: bad")
MISSING = raised("ModuleNotFoundError: No module named 'apex'")


@pytest.mark.parametrize(
    ("last_output", "hint"),
    [
        (f"{MISSING}falling back\n{OWN}", False),
        (f"{MISSING}{CAUSE}{OWN}", True),
        (f"{OWN}trying again\n{MISSING}", True),
        (f"{MISSING}CUDA out of memory\n{OWN}", True),
    ],
    ids=["handled", "a cause", "last", "a remark after it"],
)
def test_a_handled_exception_causes_no_advice(last_output: str, hint: bool) -> None:
    assert bool(exits.advice(Ending(1), last_output)) == hint


STORE = "wait timeout after 5000ms, keys: /default_pg/0//cpu//0/0"
PEER_GONE = {
    "behind torch's prefix": re.sub("(?m)^(?=.)", "[rank3]: ", VICTIM),
    "a backward pass": raised(f"RuntimeError: {GLOO}", "/v/site-packages/torch/autograd/graph.py"),
    "a hook": raised(f"RuntimeError: {GLOO}").replace("Read error", "Write error"),
    "by its place alone": raised("RuntimeError: Connection closed by peer", C10D),
    "the store": raised("torch.distributed.DistNetworkError: failed to recv, got 0 bytes", C10D),
    "the store that ended": raised("DistNetworkError: Failed to recv, got 0 bytes. …", C10D),
    "the store's wait": raised("DistStoreError: wait timeout after 600000ms, keys: /default_pg/0//0", C10D),
    "the store's connection": raised("DistNetworkError: The client socket has timed out after 9000ms", C10D),
    "a file store's wait": raised(
        "DistStoreError: Timeout waiting for key: default_pg/0//0 after 9 ms", C10D
    ),
    "a barrier": raised("DistStoreError: barrier timeout after 9000ms, key: b", C10D),
    "a monitored barrier": raised(
        "RuntimeError: [Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 9000 ms", C10D
    ),
    "rpc": raised("RuntimeError: eof (this error originated at tensorpipe/transport/shm/x_impl.cc:259)"),
    "nccl": raised(
        "DistBackendError: NCCL error in: x.cpp:77, remote process exited or …\nncclRemoteError: …\n"
    ),
    "what was raised because of it": VICTIM + CONTEXT + OWN,
    "before one that is ignored": VICTIM + "Exception ignored in: <function A.__del__ at 0x7f>\n" + OWN,
    "what it was wrapped in": VICTIM + CAUSE + raised("RuntimeError: training failed"),
    "after an error that was only printed": OWN + "retrying\n" + VICTIM,
    "as the script's exception": raised(f"train.TrainError: {STORE}"),
    "in C++": "terminate called after throwing an instance of 'gloo::IoException'\n  what():  " + GLOO,
    "in C++, with stacks": "terminate called after throwing an instance of 'gloo::IoException'\n"
    f"  what():  {GLOO}\nFatal Python error: Aborted\n\nThread 0x7f (most recent call first):\n"
    '  File "/job/train.py", line 9 in step\n',
}


JAX = "client.h:80] Terminating process because the JAX distributed service detected fatal errors. This most "
JAX = f"F1129 10:25:20.598251     109 {JAX}likely indicates that another task died; see …\nBarrier: 'D'\n"

OWN_ERRORS = {
    "before one that is ignored, too": f"{OWN}Exception ignored in atexit callback: <f>\n{VICTIM}",
    "before jax ends the process": OWN + JAX,
    "not a word": "",
    "its own behind torch's prefix": re.sub("(?m)^(?=.)", "[rank3]: ", OWN),
    "before a collective in its finally failed too": OWN + CONTEXT + VICTIM,
    "what C++ logs then": OWN + "[W1121 22:45:16 TCPStore.cpp:106] [c10d] sendBytes failed: Broken pipe\n",
    "another connection": raised("RuntimeError: feature server: Connection reset by peer"),
    "another library's": raised("ConnectionResetError: Connection reset by peer", "/v/site-packages/u/c.py"),
    "under torch's @record": raised("RuntimeError: feature server: Connection reset by peer").replace(
        '  File "/job', f'  File "{ELASTIC}", line 362, in wrapper\n    f()\n  File "/job'
    ),
    "wrong use of a collective": raised("ValueError: Invalid backend", C10D),
    "nccl's own": raised("torch.distributed.DistBackendError: NCCL error in: x.cpp, unhandled system error"),
    "a timeout of the wrong type": raised(
        "TypeError: Expected timeout argument to be of type datetime.timedelta, got 30", C10D
    ),
    "an unknown key": raised("ValueError: unknown key 'nccl_timeout'"),
    "a usage line": "usage: t.py [--backend {nccl}] [--timeout S]\nt.py: error: unrecognized argument: -x\n",
    "beside a collective's name": raised("RuntimeError: feature server timed out").replace(
        "call()", "init_process_group('nccl')"
    ),
    "what NCCL logs then": raised("KeyError: 'x'")
    + "gpu-a:12:34 [0] NCCL INFO misc/socket.cc:47 -> Connection closed by remote peer\n",
    "a data loader": raised("RuntimeError: DataLoader worker (pid 9) is killed by signal: Killed. "),
}


@pytest.mark.parametrize("words", [*PEER_GONE.values(), *OWN_ERRORS.values()], ids=[*PEER_GONE, *OWN_ERRORS])
def test_distinguishes_the_loss_of_a_peer_from_a_ranks_own_errors(words: str) -> None:
    gone = words in PEER_GONE.values()
    assert words_of(1, words).peer_gone == words_of(-signal.SIGABRT, words).peer_gone == gone


NAMED = "torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys"
CHECKPOINT = """ (RANK 1)
  File "/v/torch/distributed/checkpoint/utils.py", line 252, in all_reduce
    local_data = map_fun()
OSError: [Errno 27] File too large
"""


@pytest.mark.parametrize("ranks", [(1,), (1, 12)])
@pytest.mark.parametrize("prefix", ["", "[rank3]: "])
def test_finds_the_ranks_that_failed_to_save_a_checkpoint(ranks: tuple[int, ...], prefix: str) -> None:
    text = raised(f"{NAMED}({[*ranks]})") + TRACEBACK + CHECKPOINT
    words = re.sub("(?m)^(?=.)", prefix, text)
    assert words_of(1, words).of_ranks == ranks
    for link in (CAUSE, CONTEXT):
        assert words_of(1, words + re.sub("(?m)^(?=.)", prefix, f"{link}{OWN}")).of_ranks == ranks
    assert words_of(1, f"{words}falling back\n{OWN}").of_ranks == ()


BAD = ("ValueError", "train.py:9", "bad")
SYNTAX = f'{TRACEBACK}\n  File "/job/t.py", line 3\n    a b\n      ^\nSyntaxError: no\n'
GROUPED = f"""  + Exception Group {TRACEBACK}
  |   File "/job/train.py", line 14, in main
  |     raise ExceptionGroup("several", errors)
  | ExceptionGroup: several (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Exception Group {TRACEBACK}
    |   File "/job/train.py", line 12, in main
    |     raise ExceptionGroup("inner", errors)
    | ExceptionGroup: inner (2 sub-exceptions)
    +-+---------------- 1 ----------------
      | {TRACEBACK}
      |   File "/job/train.py", line 9, in step
      |     raise ValueError("bad")
      | ValueError: bad
      +---------------- 2 ----------------
      | {TRACEBACK}
      |   File "/job/train.py", line 7, in save
      | KeyError: 'c'
      +------------------------------------
    +---------------- 2 ----------------
    | Exception Group {TRACEBACK}
    |   File "/job/train.py", line 8, in save
    | ExceptionGroup: other (1 sub-exception)
    +-+---------------- 1 ----------------
      | {TRACEBACK}
      |   File "/job/train.py", line 7, in save
      | KeyError: 'd'
      +------------------------------------
"""
"""As Python prints exception groups. The last group's line ends all of them."""
RAISED = {
    "the first of a group": (GROUPED, BAD),
    "a group, marked by torch": (re.sub("(?m)^(?=.)", "[rank3]: ", GROUPED), BAD),
    "the only one of a group": (re.sub(r"(?s) {6}\+-+ 2 -.*(?= {6}\+-+\n)", "", GROUPED), BAD),
    "numbers left out": (raised("E: row 17 of <T at 0x7fab>"), ("E", "train.py:9", "row # of <T at #>")),
    "in a library": (raised("KeyError", "/v/lib/python3.12/json/x.py", C10D), ("KeyError", "train.py:9", "")),
    "a mistake in the script": (SYNTAX, ("SyntaxError", "t.py:3", "no")),
    "before others are lost": (OWN + CONTEXT + VICTIM, BAD),
    "the last of a chain": (OWN + CONTEXT + raised("KeyError: 'x'"), ("KeyError", "train.py:9", "'x'")),
    "handled": (OWN + "the lease has ended\n", None),
    "in a data loader": (raised("E: Caught") + "Original " + OWN, BAD),
    "a device": (raised("torch.AcceleratorError: CUDA error: an illegal memory access"), None),
    "a setting's name": (
        raised("ValueError: unknown key 'timeout'"),
        ("ValueError", "train.py:9", "unknown key 'timeout'"),
    ),
    "the network": (raised("requests.exceptions.ConnectTimeout: x"), None),
    "storage": (raised("OSError: [Errno 116] Stale file handle"), None),
}


@pytest.mark.parametrize(("words", "found"), RAISED.values(), ids=RAISED)
def test_finds_the_exception_and_its_place_unless_it_may_pass(words: str, found: object) -> None:
    assert words_of(1, words).raised == found


MARKED = re.sub("(?m)^(?=.)", "[rank3]: ", OWN)
FAILED = Words(traceback=True, raised=Raised(*BAD))
TIMEOUT = raised("RuntimeError: [/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 12000ms")
STACK = (
    "all_reduce (torch/distributed/distributed_c10d.py:3068)",
    "wrapper (torch/distributed/c10d_logger.py:83)",
    "step (train.py:16)",
)
IN_C10D = ("step (torch/distributed/distributed_c10d.py:9)", "step (train.py:9)")
JUDGED: dict[str, tuple[int, str, dict[str, str] | None, Words]] = {
    "a lost connection": (1, VICTIM, None, Words(True, True, stack=IN_C10D)),
    "a timeout": (1, TIMEOUT, None, Words(True, True, True, ("step (train.py:9)",))),
    "torch's record": (1, VICTIM, {"message": "ValueError: bad", "callstack": OWN}, FAILED),
    "a record alone": (1, "", {"message": f"RuntimeError: {GLOO}", "callstack": ""}, Words(True, True)),
    "nccl's timeout": (-signal.SIGABRT, WATCHDOG, None, Words(False, True, True, STACK, on_gpu=True)),
    "nccl's timeout on another rank": (-signal.SIGTERM, MISSED, None, Words()),
    "nccl's lost connection": (-signal.SIGABRT, NCCL_LOST, None, Words(peer_gone=True, on_gpu=True)),
    "the end of what nccl prints": (-signal.SIGABRT, NCCL_ABORTED, None, Words(peer_gone=True, on_gpu=True)),
    "a crash, whatever was printed": (-signal.SIGSEGV, VICTIM, None, Words()),
    "a traceback before the stop": (-signal.SIGTERM, OWN, None, FAILED),
    "a traceback of an error that was handled": (-signal.SIGTERM, OWN + "skipped a sample\n", None, Words()),
    "a loss that was handled": (-signal.SIGKILL, VICTIM + "trying again\n", None, Words()),
    "an error that was handled, before nccl's timeout": (
        -signal.SIGABRT,
        f"{OWN}skipped a sample\n{WATCHDOG}",
        None,
        Words(False, True, True, STACK, on_gpu=True),
    ),
    "before nccl would have ended it": (-signal.SIGABRT, OWN + NCCL_LOST, None, FAILED),
    "before gloo ended it": (-signal.SIGABRT, OWN + PEER_GONE["in C++"], None, FAILED),
    "a long message before the stop": (-signal.SIGTERM, raised("E: a\n  b\n"), None, Words(traceback=True)),
    "an uncaught one before more": (-signal.SIGTERM, MARKED + "uploading\n", None, Words(traceback=True)),
    "an exit hook's lines": (-signal.SIGTERM, f"{OWN}wandb: Syncing\n", None, Words(traceback=True)),
    "jax on another rank": (
        -signal.SIGABRT,
        f"step\n{JAX}    @ 0x7efc (unknown)\n",
        None,
        Words(False, True),
    ),
    "before jax ended it, in many lines": (
        -signal.SIGABRT,
        f"{OWN}E1129 13:49:28.89     546 coordination_service.cc:1520] Barrier failed:\nTimed out\n{JAX}",
        None,
        Words(traceback=True),
    ),
    "before jax would have ended it": (-signal.SIGTERM, OWN + JAX, None, FAILED),
    "no traceback": (-signal.SIGTERM, "epoch 3\n", None, Words()),
}


@pytest.mark.parametrize(("status", "text", "record", "words"), JUDGED.values(), ids=JUDGED)
def test_judges_an_exit_by_output_and_record(status: int, text: str, record: Any, words: Words) -> None:
    assert words_of(status, text, record) == words


LATER = (0.0, LATER_S)


@pytest.mark.parametrize("status", [-signal.SIGTERM, -signal.SIGKILL])
def test_a_rank_that_printed_more_on_the_other_stream_has_handled_its_error(status: int) -> None:
    assert words_of(status, OWN, went_on=LATER) == words_of(status, VICTIM, went_on=LATER) == Words()
    assert words_of(status, MARKED, went_on=LATER) == FAILED
    assert words_of(status, OWN, went_on=(0.0, 0.1)) == FAILED, "it may only clean up"
    assert words_of(1, OWN, went_on=LATER) == FAILED


@pytest.mark.parametrize("words", [OWN, VICTIM, TIMEOUT])
def test_a_rank_that_printed_more_long_after_an_error_has_handled_it(words: str) -> None:
    for went_on in ((20.0, 0.0), (0.0, 20.0), (20.0, 20.0)):
        assert words_of(5, f"{words}no data\n", went_on=went_on) == Words()
    assert words_of(1, f"{words}wandb: Syncing\n", went_on=(20.0, 0.0)).traceback
    assert words_of(1, f"{MARKED}no data\n", went_on=(20.0, 20.0)).traceback
    assert words_of(1, f"{words}no data\n", went_on=(2.0, 2.0)).traceback


def test_an_error_that_was_handled_explains_no_abort() -> None:
    waited = words_of(-signal.SIGABRT, WATCHDOG)
    assert words_of(-signal.SIGABRT, OWN + WATCHDOG, went_on=LATER) == waited


CLIENTS = "Timed out after 6 seconds waiting for clients. 1/2 clients joined."


@pytest.mark.parametrize("words", [f"training failed: {STORE}\n", f"step 3\n{CLIENTS}\n"])
def test_a_timeout_of_the_store_counts_as_the_last_line_of_a_script_that_exits(words: str) -> None:
    assert words_of(1, words) == Words(peer_gone=True, timed_out=True)
    assert words_of(1, f"{words}no data\n") == words_of(-signal.SIGKILL, words) == Words()


def test_shows_an_error_of_nccl_in_one_line() -> None:
    line = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3) ran for 12 s."
    assert exits.headline(WATCHDOG, True) == [line]
    assert exits.headline(NCCL_LOST, True)[0].startswith("NCCL error: remote process exited or ")
    assert "frame #" not in exits.without_remarks(WATCHDOG)
    assert exits.without_remarks(MISSED) == ""
    gone = (
        "NCCL error: remote process exited or there was a network error: socketProgress: Connection closed by"
    )
    assert exits.headline(NCCL_ABORTED, True) == [f"{gone} remote peer"]
    shared = "invalid usage: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 60"
    error = f"torch.distributed.DistBackendError: NCCL error: {shared}"
    assert exits.headline(TWO_ON_A_GPU, True) == [error, "in step (train.py:27)"]


def test_shows_the_first_exception_of_a_group_and_its_place() -> None:
    assert exits.headline(f"step 3\n{GROUPED}", True) == ["ValueError: bad", "in step (train.py:9)"]


def test_a_rule_below_a_message_is_no_error() -> None:
    message = "mpirun noticed that process rank 2 with PID 7 on node host2 exited on signal 9 (Killed)."
    assert exits.headline(f"{'-' * 74}\n{message}\n{'-' * 74}\n", False) == [message]
    assert exits.headline("----\n", False) == []


STACKS = 'Thread 0x7f (most recent call first):\n  File "/job/train.py", line 9 in step\n'
THROWN = "terminate called after throwing an instance of 'c10::Error'\n  what():  no kernel image\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (f"Fatal Python error: Segmentation fault\n\n{STACKS}", "Fatal Python error: Segmentation fault"),
        (
            f"Fatal Python error: Aborted\n\n{STACKS}\nExtension modules: numpy (total: 1)\n",
            "Fatal Python error: Aborted",
        ),
        (f"{THROWN}Fatal Python error: Aborted\n\n{STACKS}", "what():  no kernel image"),
        (f"Timeout (0:00:02)!\n{STACKS}", "Timeout (0:00:02)!"),
        (f"Timeout (0:00:02)!\n{STACKS}going on\nbad shard\n", "bad shard"),
        ("\x1b[31mbad shard\x1b[0m\n\x1b[0m\n", "bad shard"),
    ],
)
def test_the_line_of_an_error_without_a_traceback(words: str, line: str) -> None:
    assert exits.headline(words, False) == [line]


def test_without_a_traceback_the_last_lines_count() -> None:
    lines = [f"line {number}" for number in range(100)]
    assert exits.root_error("\n".join(lines)).splitlines() == lines[-40:]


TIMED_OUT = "TCPStore.cpp:340] [c10d] The client socket has timed out"


def test_ignores_warnings_logged_by_torch_but_counts_its_errors() -> None:
    for begin in ("[W1122 09:00:00.12", "[rank3]:[I1122 09:00:00.12", "W1122 09:00:00.12 2689"):
        remark = f"{begin} {TIMED_OUT}"
        assert exits.without_remarks(f"{remark}\n\n") == ""
        assert exits.without_remarks(f"{remark}\nboom\n") == "boom\n"
        assert not words_of(3, f"{remark}\n").peer_gone
    error = f"[E1122 09:00:00.123456789 {TIMED_OUT}\n"
    assert exits.without_remarks(error) == error
    assert words_of(-signal.SIGABRT, error).peer_gone
    for status in (3, -signal.SIGKILL, -signal.SIGTERM):
        assert not words_of(status, error).peer_gone  # it tried again
