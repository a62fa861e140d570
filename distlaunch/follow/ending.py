"""How a run that is over ended, in the words that its command had for it."""

import os

from distlaunch.catalog.folder import summary_in
from distlaunch.diagnosis.summary import STDERR, STDOUT, Summary
from distlaunch.observers.recording import STDERR_BYTES, STDOUT_BYTES
from distlaunch.plan.output import destinations
from distlaunch.state.job import State


def summary_of(folder: str, state: State) -> Summary | None:
    """The summary of a run whose last state that is; None where it left none."""
    document = summary_in(folder)
    if document is None:
        return None
    rank = state.cause.rank if state.cause else None
    lines = {} if rank is None else {rank: _count(folder, state, rank)}
    return Summary(
        state,
        folder,
        last_words=_ends(folder, state, STDERR, STDERR_BYTES),
        seconds=document.get("seconds", 0.0),
        lagging=document.get("lagging", ()),
        printed=lines,
        last_lines=_ends(folder, state, STDOUT, STDOUT_BYTES),
    )


def _ends(folder: str, state: State, stream: int, most: int) -> dict[int, str]:
    """The end of what each rank of the last generation printed; what it left in no file is not known."""
    found = {}
    for (rank, of), goes_to in _files(state).items():
        if of == stream and goes_to and (data := _end(os.path.join(folder, goes_to), most)):
            found[rank] = data.decode(errors="replace")
    return found


def _count(folder: str, state: State, rank: int) -> int:
    name = _files(state).get((rank, STDERR))
    try:
        with open(os.path.join(folder, name or ""), "rb") as file:
            return sum(piece.count(b"\n") for piece in iter(lambda: file.read(1 << 20), b""))
    except OSError:
        return 0


def _files(state: State) -> dict[tuple[int, int], str | None]:
    if state.plan is None:
        return {}
    places = destinations(state.plan, state.generation)
    return {stream: goes_to.file for stream, goes_to in places.items()}


def _end(path: str, most: int) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most))
            return file.read(most)
    except OSError:
        return b""
