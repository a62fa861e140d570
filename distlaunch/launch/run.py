"""Runs a job from spec to summary."""

import signal
import subprocess
import time
from collections.abc import Sequence

from distlaunch.errors import DistlaunchError
from distlaunch.job.spec import JobSpec
from distlaunch.launch.loop import Loop, Signals
from distlaunch.launch.record import Record
from distlaunch.launch.summary import Summary
from distlaunch.plan.layout import is_loopback
from distlaunch.rim.console import Console
from distlaunch.rim.run_folder import RunFolder, new_run_id
from distlaunch.transport.argv import ssh_resolve_argv

RESOLVE_S = 10.0


def run_job(spec: JobSpec, *, as_json: bool = False, quiet: bool = False) -> Summary:
    """Run `spec`; ranks' output goes to the console and the run folder. Raises `DistlaunchError`."""
    began = time.monotonic()
    run_id = new_run_id(spec.name)
    try:
        folder = RunFolder(spec.logs.folder, run_id)
    except OSError as error:
        raise DistlaunchError(f"can't make the run folder in {spec.logs.folder}: {error.strerror}") from None
    with Signals() as signals:
        console = Console(lambda: signals.raise_from_thread(signal.SIGPIPE), output_fd=2 if as_json else 1)
        record = Record(folder, console, quiet)
        state = Loop(spec, run_id, record, signals).run(master_address(spec))
        record.finish()
        words = {rank: data.decode(errors="replace") for rank, data in record.last_words.items()}
        summary = Summary(state, folder.path, words, time.monotonic() - began)
        record.summarise(summary)
        console.close()
    return summary


def master_address(spec: JobSpec) -> str | None:
    """The address by which ssh reaches the first node, where the job needs it and does not say it."""
    first = spec.nodes[0]
    if spec.one_machine or spec.master_host or first.address or first.local:
        return None
    return _resolved(ssh_resolve_argv(first.reach, spec.ssh))


def _resolved(argv: Sequence[str]) -> str | None:
    try:
        answer = subprocess.run(
            argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=RESOLVE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = [line.split()[1] for line in answer.stdout.splitlines() if line.startswith("hostname ")]
    # An alias for this very machine says nothing about what the others call it.
    return found[0] if found and not is_loopback(found[0]) else None
