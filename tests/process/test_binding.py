"""Workers bound to CPUs: what the kernel reports and what users see."""

import errno
import json
import os
import select
from pathlib import Path

import pytest

from distlaunch.agent import worker as workers
from distlaunch.agent.cpus import Machine, cpu_list, cpu_set
from distlaunch.agent.messages import WorkerSpec
from tests.harness import running, write_job

ALLOWED = os.sched_getaffinity(0)
CORES = len(Machine(ALLOWED).cores)
RANKS = min(2, CORES)
CPU = f"gpus_per_node: 0\nprocs_per_node: {RANKS}\n"
FIRST = min(ALLOWED)
TELL = """
    import json, os, threading
    own = []
    def look():
        status = open(f"/proc/self/task/{threading.get_native_id()}/status").read()
        own.append(status.partition("Cpus_allowed_list:")[2].split()[0])
    look()
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    json.dump(own, open(f"cpus{os.environ['RANK']}.json", "w"))
"""


def told(directory: Path, ranks: int) -> list[str]:
    """What the kernel has told each rank, in all of its threads."""
    found = [json.loads((directory / f"cpus{rank}.json").read_text()) for rank in range(ranks)]
    assert all(len(set(own)) == 1 for own in found)
    return [own[0] for own in found]


BINDINGS = [f"numa_binding: {name}" for name in ("node", "socket", "exclusive", "core-complex")]


@pytest.mark.parametrize(
    "binding", ["", *BINDINGS, "cpu_binding: cores", f"cpu_binding: ['{FIRST}', '{cpu_list(ALLOWED)}']"]
)
def test_ranks_run_on_the_requested_cpus(tmp_path: Path, binding: str) -> None:
    job = write_job(tmp_path, TELL, CPU + binding)
    with running(job, "--json") as run:
        assert run.wait() == 0, run.stderr
        cpus = told(tmp_path, RANKS)
        reported = cpus if binding else [None] * RANKS
        started = {event["local_rank"]: event["cpus"] for event in run.events("WorkerStarted")}
        assert [started[rank] for rank in range(RANKS)] == reported
        assert [worker["cpus"] for worker in json.loads(run.stdout)["workers"]] == reported
    sets = [cpu_set(own) for own in cpus]
    assert all(own and own <= ALLOWED for own in sets)
    if not binding:
        assert sets == [ALLOWED] * RANKS
    if "exclusive" in binding or "cores" in binding:
        assert sum(map(len, sets)) == len(set().union(*sets))
    if "cores" in binding:
        assert set().union(*sets) == ALLOWED
    if "['" in binding:
        assert sets == [{FIRST}, ALLOWED][:RANKS]


FEW = f"{CORES + 1} workers on a node need a core each, but have only {CORES}"
LACKING = {
    "cores": (CORES + 1, 0, f"cpu_binding: {FEW}"),
    f"['{FIRST}', '9999']": (2, 1, "cpu_binding lists CPU 9999, but this node has only "),
    "null\nvirtual_local_rank: true": (2, 1, "virtual_local_rank: CUDA_VISIBLE_DEVICES=5 has no GPU for it"),
}
"""By cpu_binding: the number of ranks, the one that can't be started, and why."""


@pytest.mark.parametrize("binding", LACKING)
def test_names_the_rank_that_lacks_a_cpu_or_a_gpu_and_starts_none(tmp_path: Path, binding: str) -> None:
    procs, rank, why = LACKING[binding]
    keys = f"gpus_per_node: 0\nprocs_per_node: {procs}\ncpu_binding: {binding}\n"
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "5"}
    with running(write_job(tmp_path, "pass", keys), env=env) as run:
        assert run.wait() == 126
        assert f"rank {rank} (node0) could not be started: {why}" in run.stderr
        assert {event["stage"] for event in run.events("WorkerUnstarted")} == {"setup"}
        assert run.events("WorkerStarted") == []


def test_reports_that_the_kernel_refuses_a_binding(tmp_path: Path) -> None:
    # The CPUs were chosen among those of the agent, and have gone offline since.
    spec = WorkerSpec(0, ("/bin/true",), "/", (), {}, {}, False, (), "8000-8001")
    worker = workers.spawn(spec, str(tmp_path / "error.json"))
    select.select([worker.exec_pipe], [], [])
    report = workers.exec_failure(0, os.read(worker.exec_pipe, 256), spec)
    os.waitpid(worker.pid, 0)
    for end in (*worker.streams.values(), worker.exec_pipe):
        os.close(end)
    assert (report.stage, report.errno) == ("setup", errno.EINVAL)
    assert report.text == "binding to CPU 8000-8001: Invalid argument"
