"""Takes a run that has begun to its end: loop, console, records, summary."""

import gc
import signal
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from distlaunch.job.spec import JobSpec
from distlaunch.launch.loop import Loop
from distlaunch.launch.master import ssh_addresses
from distlaunch.launch.record import Record
from distlaunch.launch.start import Start
from distlaunch.launch.summary import Summary
from distlaunch.rim.console import Console
from distlaunch.rim.signals import Signals

if TYPE_CHECKING:
    from distlaunch.launch.peers.meeting import Peers


PATIENCE_S = 5.0
"""Seconds for a reader to take something, at the end of a run whose log files have all."""


def _patience(spec: JobSpec, signals: Signals) -> Callable[[float], bool]:
    """Whether a reader of our output that has taken nothing for so long is waited for when all is over.

    Where there may be no log files, as under torchrun, it is, unless a signal has come.
    """
    needed = spec.logs.torchrun is not None
    return lambda silent_s: silent_s < PATIENCE_S or (needed and not signals.any())


def supervise(
    start: Start, signals: Signals, peers: "Peers | None" = None, *, as_json: bool, quiet: bool
) -> Summary:
    """Run the supervisor over the links of `start`, and tell how it ended."""
    gc.freeze()  # off since the start of the program: what was imported stays, what a long run makes may not
    gc.enable()
    console = Console(lambda: signals.raise_from_thread(signal.SIGPIPE), output_fd=2 if as_json else 1)
    record = Record(start.folder, console, quiet)
    loop = Loop(start, record, signals, peers)
    state = loop.run(start.links, lambda: ssh_addresses(start.spec))
    record.finish()
    words, lines = (_texts(said) for said in (record.last_words, record.last_lines))
    seconds = start.clock.now()
    lagging = record.lagging(state)
    above = record.above(state)
    summary = Summary(state, start.folder.path, words, seconds, lagging, record.printed, lines, above)
    record.summarise(summary)
    console.close(_patience(start.spec, signals))
    return summary


def _texts(said: Mapping[int, bytes]) -> dict[int, str]:
    return {rank: data.decode(errors="replace") for rank, data in said.items()}
