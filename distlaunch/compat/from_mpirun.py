"""Job files for mpirun command lines (Open MPI and MPICH)."""

import re
from collections.abc import Iterator, Mapping, Sequence

from distlaunch.compat import from_torchrun as torchrun
from distlaunch.compat.draft import Draft
from distlaunch.errors import UsageError
from distlaunch.job.nodes import parse_hostfile

_PARTS = {
    **dict.fromkeys(("n", "np", "c"), "ranks"),
    **dict.fromkeys(("H", "host", "hosts"), "hosts"),
    **dict.fromkeys(("f", "hostfile", "machinefile"), "hostfile"),
    **dict.fromkeys(("N", "npernode", "ppn"), "procs"),
    **dict.fromkeys(("wdir", "wd"), "workdir"),
}
"""Parts of a job by the options that set them."""
_PAIRS = ("genv", "env", "mca", "gmca", "prtemca")
_FLAGS = "oversubscribe|allow-run-as-root|(report|display|tag|timestamp)-.*|quiet|verbose|[qvl]"
"""Options with two values, and options without a value. All others have one."""
_RANK = "scripts that read OMPI_COMM_WORLD_RANK or PMI_RANK must read RANK; launcher: mpirun keeps mpirun"


def mpirun_draft(words: Sequence[str]) -> Draft:
    """Draft the job of a command, given as words or as one shell line. Raises `UsageError` or `JobError`."""
    typed = len(words) == 1
    words = torchrun.shell_words(words[0]) if typed else words
    at = next((i for i, word in enumerate(words) if re.search(r"(^|/)mpi(run|exec)(\.\w+)?$", word)), None)
    line = torchrun.cut_line(words, at, typed)
    rest = list(line.words[1:]) if line else []
    draft, given, env = Draft("the command line", typed), dict[str, str](), dict[str, str | None]()
    for name, value in _options(rest):
        if name in ("x", "genv", "env"):
            variable, equals, text = value.partition("=")
            env[variable] = text if equals else None
        elif name in _PARTS:
            given[_PARTS[name]] = value
        else:
            draft.note(f"left out: -{name} {value}".rstrip())
    if line is None or not rest:
        raise UsageError("expected mpirun or mpiexec, and a program")
    draft.note("relative paths are relative to this file", _RANK, *line.notes)
    draft.set("workdir", given.get("workdir"))
    line = line._replace(words=torchrun.started_directly(draft, rest))
    torchrun.add_torchrun(draft, line, cpus=1, hosts_known=True)
    draft.keys.pop("procs_per_node")  # torchrun's default
    draft.set("env", {**draft.keys.get("env", {}), **env} or None)
    _add_nodes(draft, given)
    return draft.checked()


def _options(words: list[str]) -> Iterator[tuple[str, str]]:
    """Remove the options from the beginning of `words`, and yield (name, value) of each; "" = no value."""
    while words and words[0].startswith("-"):
        name, _, value = words.pop(0).lstrip("-").partition("=")
        count = 0 if value or re.fullmatch(_FLAGS, name) else 2 if name in _PAIRS else 1
        values, words[:count] = words[:count], []
        yield name, value or "=".join(values)


def _add_nodes(draft: Draft, given: Mapping[str, str]) -> None:
    """Add hosts and ranks. Raises `UsageError` for invalid numbers."""
    numbers = [given.get(key, "0") for key in ("ranks", "procs")]
    if not all(re.fullmatch("[0-9]{1,6}", number) for number in numbers):
        raise UsageError(f"expected a number of ranks, got {' and '.join(numbers)}")
    (ranks, procs), count = map(int, numbers), 1
    draft.set("hostfile", given.get("hostfile"))
    if "hosts" in given:
        entries = parse_hostfile(given["hosts"].replace(",", "\n"), "the hosts")
        draft.set_hostfile(entries)
        count = len(entries)
    own = "hostfile" in given or any(isinstance(node, dict) for node in draft.keys.get("nodes", ()))
    share = procs or (0 if own or ranks % count else ranks // count)
    draft.set("procs_per_node", share or None)
    if ranks and not share:
        draft.note(f"-n {ranks}: make procs_per_node, or procs in nodes, add up to it", key="procs_per_node")
