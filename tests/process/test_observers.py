"""Observers of runs, and several runs in one process."""

import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest

from distlaunch.agent.messages import WorkerExited
from distlaunch.job.spec import Invocation, JobSpec, Logs, NodeSpec, Program
from distlaunch.launch.controller import supervise
from distlaunch.launch.start import start_run
from distlaunch.observers.observer import Observer, Printed, Shown
from distlaunch.signals import Interrupts
from distlaunch.supervisor.events import Event
from distlaunch.supervisor.state import State
from distlaunch.supervisor.summary import Summary


def job(directory: Path, script: str, procs: int = 2) -> JobSpec:
    return JobSpec(
        "toy",
        (NodeSpec("here", gpus=0, procs=procs),),
        Program("command", ("sh",), workdir=str(directory), args=("-c", script)),
        Logs(str(directory / "runs")),
        invocation=Invocation(placeholders=False),
    )


def run_job(
    spec: JobSpec, observers: Iterable[Observer] = (), interrupts: Interrupts | None = None
) -> Summary:
    """A run inside a program, whose signal handlers and standard streams stay as they are."""
    with nullcontext(interrupts) if interrupts else Interrupts() as received:
        return supervise(start_run(spec), Shown(received), observers)


# A toy observer: all that one needs


class Metrics(Observer):
    """Counts lines, and when each rank ended: what a live view or an exporter would want."""

    def __init__(self) -> None:
        self.lines = 0
        self.ends: dict[int, float] = {}
        self.exit_status: int | None = None

    def printed(self, output: Printed) -> None:
        self.lines += output.data.count(b"\n")

    def happened(self, event: Event, state: State, at: float) -> None:
        if isinstance(event, WorkerExited):
            rank = state.rank_of(event.node, event.local_rank)
            assert rank is not None
            self.ends[rank] = at

    def ended(self, summary: Summary) -> None:
        self.exit_status = summary.state.outcome


def test_a_small_observer_sees_a_run(tmp_path: Path) -> None:
    metrics = Metrics()
    summary = run_job(job(tmp_path, 'echo one; echo two; exit "$((RANK * 3))"'), [metrics])
    assert metrics.lines == 4
    assert set(metrics.ends) == {0, 1}
    assert all(0.0 < at <= summary.seconds for at in metrics.ends.values())
    assert metrics.exit_status == summary.state.outcome == 3


# The entry for programs: nothing of the process is touched


@pytest.fixture
def untouched() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    assert handlers == {number: signal.getsignal(number) for number in handlers}


@pytest.mark.usefixtures("untouched")
def test_a_program_runs_jobs_in_threads_and_one_after_another(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    outcomes: dict[int, int] = {}

    def run(number: int) -> None:
        directory = tmp_path / str(number)
        directory.mkdir()
        outcomes[number] = run_job(job(directory, f"echo said; exit {number}")).state.outcome

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(run, (3, 4)))
    run(5)
    assert outcomes == {3: 3, 4: 4, 5: 5}
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("untouched")
def test_a_program_ends_a_job_by_an_interrupt(tmp_path: Path) -> None:
    class EndOnFirstLine(Observer):
        def printed(self, output: Printed) -> None:
            interrupts.send(signal.SIGTERM)

    with Interrupts() as interrupts:
        summary = run_job(
            job(tmp_path, "echo ready; exec sleep 600", procs=1), [EndOnFirstLine()], interrupts
        )
    assert summary.state.outcome == 128 + signal.SIGTERM
