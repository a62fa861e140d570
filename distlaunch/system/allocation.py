"""The allocation that this process runs in: reads what its scheduler has written down for its jobs."""

import os

from distlaunch.allocation.allocation import TITLES, Allocation
from distlaunch.allocation.find import Listing, find_allocation, listing_for, scheduler_of
from distlaunch.errors import UsageError, reason

ANSWER_S = 10.0
"""Seconds for a scheduler's command to list the hosts."""
MAX_BYTES = 1 << 24
_NAMED = "or list the pods in nodes, with launcher.command"
_INSTEAD = "list the hosts in nodes, or use `--set launcher=local`"


def allocation_here(needed: bool = True) -> Allocation | None:
    """It, if there is one; where it is not `needed`, only one that variables tell. Raises `UsageError`."""
    listing = listing_for(os.environ)
    if listing != Listing() and not needed:
        return None
    listed = _listed(listing)
    try:
        return find_allocation(os.environ, listed)
    except ValueError as error:
        where = listing.path or " ".join(listing.command) or "the environment"
        raise UsageError(f"can't read the allocation from {where}: {error}") from None


def pods_here(selector: str, namespace: str | None, container: str | None) -> Allocation:
    """The running pods that a selector means, as kubectl sees them. Raises `UsageError`."""
    from distlaunch.allocation.pods import pods_argv, pods_listed  # few jobs run in pods

    command = pods_argv(selector, namespace)
    try:
        found = pods_listed(_said(tuple(command), _NAMED), selector, container)
    except OSError as error:
        raise UsageError(f"can't list the pods: kubectl: {reason(error)}; {_NAMED}") from None
    except ValueError as error:
        raise UsageError(f"can't read what `{' '.join(command)}` prints: {error}") from None
    if not found.nodes:
        raise UsageError(f"no running pod matches {selector}: see `{' '.join(command[:-1])}`")
    return found


def _listed(listing: Listing) -> str:
    try:
        if listing.command:
            return _said(listing.command)
        return _text(listing.path) if listing.path else ""
    except OSError as error:
        what = listing.path or listing.command[0]
        text = f"can't read the hosts of this {_title()} job: {what}: {reason(error)}; {_INSTEAD}"
        raise UsageError(text) from None


def _title() -> str:
    scheduler = scheduler_of(os.environ)
    return TITLES[scheduler] if scheduler else ""


def _text(path: str) -> str:
    with open(path, "rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise UsageError(f"{path}: larger than {MAX_BYTES >> 20} MiB: not a list of hosts")
    return data.decode(errors="replace")


def _said(command: tuple[str, ...], instead: str = _INSTEAD) -> str:
    """What a command prints. Raises OSError, or `UsageError`."""
    import subprocess  # few schedulers have to be asked

    line = " ".join(command)
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=ANSWER_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"`{line}` did not answer within {ANSWER_S:g} s; {instead}") from None
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        told = words[-1] if words else f"exit status {done.returncode}"
        raise UsageError(f"`{line}` failed: {told}; {instead}")
    return done.stdout.decode(errors="replace")
