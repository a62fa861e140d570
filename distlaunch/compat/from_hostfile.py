"""A job file with the hosts of a hostfile."""

import re
from collections.abc import Sequence

from distlaunch.compat.job_text import Data, Draft, Note, Offer, checked, gpus_offer, joined, program_draft
from distlaunch.errors import JobError, Problem
from distlaunch.job.hosts import HostEntry, parse_hostfile


def hostfile_draft(text: str, source: str, program: Sequence[str] = (), piped: bool = False) -> Draft:
    """The job of an Open MPI, DeepSpeed or Horovod hostfile. Raises `JobError` with all problems.

    One that was `piped` can't be read again.
    """
    problems: list[Problem] = []
    entries = parse_hostfile(text, source, problems)
    if problems:
        raise JobError(problems)
    offer = Offer("instead of nodes, to read the hostfile at each start:", "hostfile", source, "nodes")
    hosts = Draft(_hosts(entries), offers=() if piped else (offer,))
    return checked(gpus_offer(joined([program_draft(program), hosts, *_remarks(text)])), source)


def _hosts(entries: Sequence[HostEntry]) -> dict[str, Data]:
    """`procs_per_node` where all hosts have the same slots, else each host its own."""
    slots = {entry.slots for entry in entries}
    if len(slots) > 1:
        return {"nodes": [_host(entry) for entry in entries]}
    (number,) = slots
    same: dict[str, Data] = {} if number is None else {"procs_per_node": number}
    return {"nodes": [_name(entry) for entry in entries], **same}


def _host(entry: HostEntry) -> Data:
    if entry.slots is None:
        return _name(entry)
    return {"host": _name(entry), "procs": entry.slots}


def _name(entry: HostEntry) -> str:
    return f"{entry.user}@{entry.host}" if entry.user else entry.host


def _remarks(text: str) -> list[Draft]:
    if not re.search(r"max[-_]slots=", text):
        return []
    return [Draft(notes=(Note("max_slots has no equivalent: distlaunch never oversubscribes", "nodes"),))]
