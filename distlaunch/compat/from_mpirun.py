"""Job files for mpirun command lines (Open MPI and MPICH)."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from distlaunch.compat import from_torchrun as torchrun
from distlaunch.compat.draft import Draft
from distlaunch.contract import RESERVED
from distlaunch.errors import UsageError
from distlaunch.job.nodes import parse_hostfile
from distlaunch.wording import counted

_PARTS = {
    **dict.fromkeys(("n", "np", "c"), "ranks"),
    **dict.fromkeys(("H", "host", "hosts"), "hosts"),
    **dict.fromkeys(("f", "hostfile", "machinefile"), "hostfile"),
    **dict.fromkeys(("N", "npernode", "ppn"), "procs"),
    **dict.fromkeys(("wdir", "wd"), "workdir"),
}
"""Parts of a job, keyed by the options that set them."""
_PAIRS = ("genv", "env", "mca", "gmca", "prtemca")
_FLAGS = (
    "oversubscribe|allow-run-as-root|g?env(all|none)|(report|display|tag|timestamp)-.*|quiet|verbose|[qvl]"
)
"""Options with two values, and options without a value. All others have one."""
_RANK = "scripts that read OMPI_COMM_WORLD_RANK or PMI_RANK must read RANK; launcher: mpirun keeps mpirun"


def mpirun_draft(words: Sequence[str]) -> Draft:
    """Draft a job from a command, given as words or as one shell line. Raises `UsageError` or `JobError`."""
    typed = len(words) == 1
    words = torchrun.shell_words(words[0]) if typed else words
    at = next((i for i, word in enumerate(words) if re.search(r"(^|/)mpi(run|exec)(\.\w+)?$", word)), None)
    line = torchrun.cut_line(words, at)
    rest = list(line.words[1:]) if line else []
    if ":" in rest:
        more = " ".join(rest[rest.index(":") :])
        other = "if it is for other hosts, add them to nodes, each with its own procs, script, args and env"
        same = "otherwise, have one script choose by RANK"
        raise UsageError(f"`{more}`: remove everything from the colon on; {other}; {same}")
    draft, given, variables = Draft("the command line", typed), dict[str, str](), list[str]()
    for option, value in _options(rest):
        name = option.lstrip("-")
        part = _PARTS.get(name)
        if hint := _flaw(part, value, given, typed):
            raise UsageError(f"{option} {value}: {hint}")
        if part:
            given[part] = value
        elif name in ("x", "genv", "env"):
            variables.append(value)
        else:
            draft.note(f"left out: {option} {value}".rstrip())
    if line is None or not rest:
        raise UsageError("expected mpirun or mpiexec, its options, and a program (-- ends the options)")
    draft.note("relative paths are relative to this file", _RANK, *line.notes)
    draft.set("workdir", given.get("workdir"))
    before = [*line.before, *(word for word in variables if "=" in word)]
    line = line._replace(before=before, words=torchrun.started_directly(draft, rest))
    torchrun.add_torchrun(draft, line, cpus=1, hosts_known=True)
    draft.keys.pop("procs_per_node")  # torchrun's default
    inherited = dict.fromkeys(word for word in variables if "=" not in word and word not in RESERVED)
    draft.set("env", {**inherited, **draft.keys.get("env", {})} or None)
    _add_nodes(draft, given)
    return draft.checked()


def _flaw(part: str | None, value: str, given: Mapping[str, str], typed: bool) -> str:
    """Return why the value of an option can't be used, or ""."""
    if part in given:
        return "given twice"
    if part and typed and re.search("[$`]", value):
        return f"write the value: {torchrun.NO_SHELL}"
    is_number = part not in ("ranks", "procs") or re.fullmatch("[0-9]{1,6}", value)
    return "" if is_number else "expected a number"


def _options(words: list[str]) -> Iterator[tuple[str, str]]:
    """Remove the options from the beginning of `words`, and yield (option, value) of each; "" = no value."""
    while words and words[0].startswith("-"):
        option, _, value = words.pop(0).partition("=")
        name = option.lstrip("-")
        if not name:
            return  # the program comes after --
        none = value or re.fullmatch(_FLAGS, name) or re.match("-|python", "".join(words[:1]))
        count = 0 if none else 1 + (name in _PAIRS and "=" not in "".join(words[:1]))
        values, words[:count] = words[:count], []
        yield option, value or "=".join(values)


def _add_nodes(draft: Draft, given: Mapping[str, str]) -> None:
    """Add hosts and ranks. Raises `UsageError` for numbers that don't add up."""
    ranks, procs = int(given.get("ranks", 0)), int(given.get("procs", 0))
    draft.set("hostfile", given.get("hostfile"))
    if "hosts" in given:
        entries = parse_hostfile(given["hosts"].replace(",", "\n"), "the hosts")
        shares = _shares(ranks, [procs or entry.slots for entry in entries])
        draft.set_hostfile([each._replace(slots=n) for each, n in zip(entries, shares, strict=True) if n])
    elif ranks > procs > 0 and "hostfile" not in given:
        if ranks % procs:
            raise UsageError(
                f"-n {ranks} is not a multiple of {procs} ranks per node: list the hosts with -H"
            )
        draft.set("nodes", ranks // procs)
        draft.set("procs_per_node", procs)
    else:
        draft.set("procs_per_node", (procs if "hostfile" in given else ranks or procs) or None)
        text = "all nodes together must have as many as mpirun -n; slots in a hostfile set it for each node"
        draft.note(text, key="procs_per_node")


def _shares(ranks: int, slots: Sequence[int | None]) -> list[int]:
    """Return the number of ranks on each host: fill slots in order or, without slots, use equal shares."""
    share, more = divmod(ranks, len(slots)) if not any(slots) else (0, 0)
    given = [slot or share + (i < more) or 1 for i, slot in enumerate(slots)]
    if ranks > sum(given):
        hint = "raise -N or the slots in -H, or add hosts, as in -H a:4,b:4"
        raise UsageError(f"-n {ranks}: the hosts have only {counted(sum(given), 'slot')}; {hint}")
    ends = accumulate(given)
    return [max(0, min(count, (ranks or end) - end + count)) for count, end in zip(given, ends, strict=True)]
