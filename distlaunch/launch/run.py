"""Runs a job from spec to summary."""

import signal
import time

from distlaunch.errors import DistlaunchError
from distlaunch.job.spec import JobSpec
from distlaunch.launch.loop import Loop, Signals
from distlaunch.launch.master import master_address
from distlaunch.launch.record import Record
from distlaunch.launch.summary import Summary
from distlaunch.rim.console import Console
from distlaunch.rim.run_folder import RunFolder, new_run_id


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
        state = Loop(spec, run_id, record, signals).run(lambda: master_address(spec))
        record.finish()
        words = {rank: data.decode(errors="replace") for rank, data in record.last_words.items()}
        summary = Summary(state, folder.path, words, time.monotonic() - began)
        record.summarise(summary)
        console.close()
    return summary
