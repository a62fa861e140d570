"""The meaning of exits and last output, as torch 2.13 and NCCL print it: facts, advice, root causes."""

import signal

import pytest

from distlaunch.diagnosis.exits import (
    TRACEBACK,
    Ending,
    Words,
    advice,
    facts,
    root_error,
    without_remarks,
    words_of,
)

GIB = 1 << 30
SHM_FULL, SHM_SMALL, SHM_FINE = (8 * GIB, 0), (64 << 20, 60 << 20), (8 * GIB, 7 * GIB)


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        (Ending(3), "exit status 3"),
        (Ending(-9, oom_kills=2), "probably by the OOM killer (the kernel reports 2 OOM kills on that node)"),
        (Ending(-9), "killed by signal 9 (SIGKILL); the kernel reports no OOM kill on that node"),
        (Ending(-7, shm=SHM_SMALL), "(SIGBUS); /dev/shm there has 60 MiB free of 64 MiB"),
        (Ending(-7), "killed by signal 7 (SIGBUS)"),
        (Ending(-15, oom_kills=1), "killed by signal 15 (SIGTERM)"),
    ],
)
def test_facts_name_the_signal_and_what_explains_it(ending: Ending, words: str) -> None:
    assert facts(ending).endswith(words)


@pytest.mark.parametrize(
    ("ending", "last_words", "hint"),
    [
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
        (
            Ending(-6),
            "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE)",
            "a rank that stalled",
        ),
        (Ending(1), "RuntimeError: Timed out waiting 1800000ms for recv operation", "a rank that stalled"),
        (Ending(1), "ncclSystemError: System call failed", "NCCL_DEBUG"),
        (Ending(1), "OSError: [Errno 28] No space left on device", "a disk is full"),
        (
            Ending(1, python="/opt/venv/bin/python"),
            "ModuleNotFoundError: No module named 'torch'",
            "the workers' Python (/opt/venv/bin/python) lacks a package",
        ),
        (Ending(1), "bdb.BdbQuit", "distlaunch torchrun"),
        (Ending(1, stdin=True), "bdb.BdbQuit", ""),
        (Ending(1), "EOFError: EOF when reading a line", "distlaunch torchrun"),
        (Ending(1, stdin=True), "EOFError: EOF when reading a line", ""),
        (Ending(1, module="train"), "ModuleNotFoundError: No module named 'train'", "lacks a package"),
        (Ending(1, module="train"), "/bin/python: No module named ninja", ""),
        (
            Ending(1),
            "Connection reset by peer\nRuntimeError: DataLoader worker (pid 7) is killed by signal: K.",
            "a DataLoader worker died",
        ),
        (
            Ending(1, oom_kills=1),
            "RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly",
            "the OOM killer killed a DataLoader worker",
        ),
        (Ending(1), "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. ", "--shm-size"),
        (Ending(1), "ConnectionResetError: [Errno 104] Connection reset by peer", ""),
        (Ending(1, peer_gone=True), "RuntimeError: Connection closed by peer", "no rank reported its own"),
        (Ending(1, peer_gone=True), "Timed out waiting 1800000ms for recv operation", "a rank that stalled"),
        (Ending(1), "ValueError: bad learning rate", ""),
        (Ending(0), "", ""),
    ],
)
def test_advice_fits_the_last_output(ending: Ending, last_words: str, hint: str) -> None:
    given = advice(ending, last_words)
    assert hint in given
    assert bool(given) == bool(hint)


def test_advice_ignores_old_output() -> None:
    assert advice(Ending(1), "CUDA out of memory\n" + "retried, went well\n" * 60) == ""


C10D = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
ELASTIC = "/venv/lib/python3.11/site-packages/torch/distributed/elastic/multiprocessing/errors/__init__.py"
GLOO = "[/pytorch/gloo/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.2]:17806: Connection reset by peer"
CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"
CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"


def raised(error: str, *files: str) -> str:
    """A traceback through these files, the innermost last."""
    frames = "".join(f'  File "{file}", line 9, in step\n    call()\n' for file in ("/job/train.py", *files))
    return f"{TRACEBACK}\n{frames}{error}\n"


def prefixed(text: str) -> str:
    """As torch.distributed's excepthook prints it."""
    return "".join(f"[rank3]: {line}\n" for line in text.splitlines())


VICTIM = raised(f"RuntimeError: {GLOO}", C10D)
OWN = raised("ValueError: bad")
BACKWARD = raised(f"RuntimeError: {GLOO}", "/venv/lib/python3.11/site-packages/torch/autograd/graph.py")


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(VICTIM, id="a collective"),
        pytest.param(prefixed(VICTIM), id="behind torch's prefix"),
        pytest.param(BACKWARD, id="a backward pass"),
        pytest.param(raised(f"RuntimeError: {GLOO}").replace("Read error", "Write error"), id="a hook"),
        pytest.param(raised("RuntimeError: Connection closed by peer", C10D), id="by its place alone"),
        pytest.param(
            raised("RuntimeError: [/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms"),
            id="time",
        ),
        pytest.param(
            raised("torch.distributed.DistNetworkError: failed to recv, got 0 bytes", C10D), id="the store"
        ),
        pytest.param(
            raised(
                "torch.distributed.DistStoreError: wait timeout after 600000ms, keys: /default_pg/0//0", C10D
            ),
            id="the store's wait",
        ),
        pytest.param(
            raised(
                "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, remote process exited "
                "or there was a network error, NCCL version 2.27.5\nncclRemoteError: A call failed possibly "
                "due to a network error or a remote process exiting prematurely.\nLast error:\n"
            ),
            id="nccl",
        ),
        pytest.param(VICTIM + CONTEXT + OWN, id="what was raised because of it"),
        pytest.param(VICTIM + CAUSE + raised("RuntimeError: training failed"), id="what it was wrapped in"),
        pytest.param(OWN + "retrying\n" + VICTIM, id="after an error that was only printed"),
        pytest.param(
            "terminate called after throwing an instance of 'gloo::IoException'\n  what():  " + GLOO,
            id="in C++",
        ),
        pytest.param(
            "[rank0]:[E1121 22:45:16 ProcessGroupNCCL.cpp:683] [Rank 0] Watchdog caught collective operation "
            "timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, Timeout(ms)=600000)",
            id="nccl's watchdog",
        ),
    ],
)
def test_errors_of_a_rank_whose_peer_is_gone(words: str) -> None:
    assert words_of(1, words).peer_gone
    assert words_of(-signal.SIGABRT, words).peer_gone


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("", id="not a word"),
        pytest.param(OWN, id="an exception"),
        pytest.param(prefixed(OWN), id="behind torch's prefix"),
        pytest.param(OWN + CONTEXT + VICTIM, id="before a collective in its finally failed too"),
        pytest.param(
            OWN + "[W1121 22:45:16 TCPStore.cpp:106] [c10d] sendBytes failed: Broken pipe\n",
            id="what C++ logs then",
        ),
        pytest.param(
            raised("RuntimeError: feature server: Connection reset by peer"), id="another connection"
        ),
        pytest.param(
            raised(
                "ConnectionResetError: [Errno 104] Connection reset by peer",
                "/venv/site-packages/urllib3/c.py",
            ),
            id="another library's",
        ),
        pytest.param(
            raised("RuntimeError: feature server: Connection reset by peer").replace(
                '  File "/job', f'  File "{ELASTIC}", line 362, in wrapper\n    f()\n  File "/job'
            ),
            id="under torch's @record",
        ),
        pytest.param(raised("ValueError: Invalid backend", C10D), id="wrong use of a collective"),
        pytest.param(
            raised("torch.distributed.DistBackendError: NCCL error in: x.cpp, unhandled system error"),
            id="nccl's own",
        ),
        pytest.param(
            raised("RuntimeError: DataLoader worker (pid 9) is killed by signal: Killed. "),
            id="a data loader",
        ),
    ],
)
def test_errors_of_the_rank_itself(words: str) -> None:
    assert not words_of(1, words).peer_gone


def test_distinguishes_a_timeout_from_a_lost_connection() -> None:
    timed_out = raised("RuntimeError: [/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 12000ms")
    assert words_of(1, timed_out) == Words(True, True, timed_out=True, stack=("step (train.py:9)",))
    assert words_of(1, VICTIM) == Words(traceback=True, peer_gone=True)


def test_torchs_error_record_overrides_the_output() -> None:
    assert words_of(1, VICTIM, {"message": "ValueError: bad", "callstack": OWN}) == Words(traceback=True)
    assert words_of(1, "", {"message": f"RuntimeError: {GLOO}", "callstack": ""}).peer_gone


def test_a_crash_is_the_ranks_own_error_whatever_it_printed() -> None:
    assert words_of(-signal.SIGSEGV, VICTIM) == Words()


def test_knows_whether_a_traceback_was_printed() -> None:
    assert words_of(-signal.SIGTERM, OWN).traceback
    assert not words_of(-signal.SIGTERM, "epoch 3\n").traceback


def test_without_a_traceback_the_last_lines_count() -> None:
    lines = [f"line {number}" for number in range(100)]
    assert root_error("\n".join(lines)).splitlines() == lines[-40:]


TIMED_OUT = "TCPStore.cpp:340] [c10d] The client socket has timed out"


@pytest.mark.parametrize(
    "remark",
    [
        f"[W1122 09:00:00.123456789 {TIMED_OUT}",
        f"[rank3]:[I1122 09:00:00.123456789 {TIMED_OUT}",
        f"W1122 09:00:00.123000 2689 {TIMED_OUT}",
    ],
)
def test_ignores_warnings_logged_by_torch(remark: str) -> None:
    assert without_remarks(f"{remark}\n\n") == ""
    assert without_remarks(f"{remark}\nboom\n") == "boom\n"
    assert not words_of(3, f"{remark}\n").peer_gone


def test_counts_errors_logged_by_torch() -> None:
    error = f"[E1122 09:00:00.123456789 {TIMED_OUT}\n"
    assert without_remarks(error) == error
    assert words_of(-signal.SIGABRT, error).peer_gone
