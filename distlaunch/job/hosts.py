"""Host names as people write them: user@host, host:port, and three forms of hostfiles."""

import re

from distlaunch.agent.frozen import Frozen
from distlaunch.errors import Problem
from distlaunch.job.document import Place
from distlaunch.wording import expand_ranges

MAX_SLOTS = 1024
"""`host:N` with more than this, or with ssh's 22, is a port in the wrong place."""


class HostEntry(Frozen):
    """One host of a hostfile: `slots` is its number of processes, None where the file does not say."""

    host: str
    user: str | None
    port: int | None
    slots: int | None
    place: Place


def host_error(host: str) -> str | None:
    """Why this host name may not reach a command line, or None."""
    if host.startswith("-"):
        return "a host name can't begin with a dash"
    if not re.fullmatch(r"[A-Za-z0-9_.:%\-]+", host):
        return f'"{host}" is not a valid host name'
    return None


def split_user(text: str) -> tuple[str | None, str]:
    """user@host → (user, host)."""
    user, at, host = text.rpartition("@")
    return (user if at else None), host


def parse_hostfile(text: str, source: str, problems: list[Problem]) -> list[HostEntry]:
    """The hosts of an Open MPI, DeepSpeed (`host slots=4`) or Horovod (`host:4`) hostfile, in order.

    Lines that name a host again add their slots, as Open MPI has it.
    """
    found: dict[str, HostEntry] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        place = Place(source, number, line.index(words[0]) + 1)
        try:
            for entry in _hostfile_line(words, place):
                earlier = found.get(entry.host)
                found[entry.host] = _added(earlier, entry) if earlier else entry
        except ValueError as error:
            problems.append(place.problem("", str(error)))
    if not found and not problems:
        problems.append(Place(source).problem("", "the hostfile lists no hosts"))
    return list(found.values())


def _added(first: HostEntry, again: HostEntry) -> HostEntry:
    # A host without slots counts once each time it is named.
    slots = (first.slots or 1) + (again.slots or 1)
    return HostEntry(first.host, first.user, first.port, slots, first.place)


def _hostfile_line(words: list[str], place: Place) -> list[HostEntry]:
    user, name = split_user(words[0])
    name, _, horovod_slots = name.partition(":")
    options = dict(_option(word) for word in words[1:])
    slots = options.get("slots", horovod_slots or None)
    if horovod_slots and "slots" not in options and _looks_like_a_port(horovod_slots):
        raise ValueError(_not_a_port(name, horovod_slots))
    if slots is not None and not re.fullmatch("[1-9][0-9]{0,5}", slots):
        raise ValueError(f'slots: expected a number, got "{slots}"')
    entries = []
    for host in expand_ranges(name):
        if error := host_error(host):
            raise ValueError(error)
        entries.append(HostEntry(host, user, None, int(slots) if slots else None, place))
    return entries


def _looks_like_a_port(slots: str) -> bool:
    return slots == "22" or (slots.isdecimal() and int(slots) > MAX_SLOTS)


def _not_a_port(host: str, number: str) -> str:
    return (
        f'"{host}:{number}" in a hostfile means {number} slots; for slots, write "{host} slots={number}"; '
        f"for a port, use ssh_config or nodes: [{{host: {host}, port: {number}}}]"
    )


def _option(word: str) -> tuple[str, str]:
    key, equals, value = word.partition("=")
    key = {"max-slots": "max_slots", "cpu": "slots", "count": "slots"}.get(key, key)
    if not equals or key not in ("slots", "max_slots"):
        raise ValueError(f'unexpected "{word}"; write "host slots=4" or "host:4"')
    return key, value


def parse_endpoint(text: str) -> tuple[str | None, int | None]:
    """`host:port`, `[v6]:port`, `host` or `:port` → (host, port). Raises ValueError."""
    found = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]]*))(?::([0-9]{1,9}))?", text)
    if not found:
        raise ValueError(f'"{text}" is not an endpoint; write host:port, or [address]:port for IPv6')
    host, port = found[1] or found[2] or None, int(found[3]) if found[3] else None
    if host and (error := host_error(host)):
        raise ValueError(error)
    if port is not None and not 0 < port < 65536:
        raise ValueError(f"port {port} is not in the range 1 to 65535")
    return host, port
