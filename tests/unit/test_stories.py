"""What an exit means: a table of endings, the facts that are told of them, and the advice."""

import signal

import pytest

from distlaunch.diagnosis.exits import Ending, advice, facts

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
def test_facts(ending: Ending, words: str) -> None:
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
        (Ending(1, peer_gone=True), "RuntimeError: Connection closed by peer", "no rank reported an error"),
        (Ending(1, peer_gone=True), "Timed out waiting 1800000ms for recv operation", "a rank that stalled"),
        (Ending(1), "ValueError: bad learning rate", ""),
        (Ending(0), "", ""),
    ],
)
def test_advice(ending: Ending, last_words: str, hint: str) -> None:
    given = advice(ending, last_words)
    assert hint in given
    assert bool(given) == bool(hint)


def test_only_the_last_lines_count() -> None:
    assert advice(Ending(1), "CUDA out of memory\n" + "retried, went well\n" * 60) == ""
