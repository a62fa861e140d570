"""A job file while it is read: the keys that were given, where they stand, and what is wrong with them."""

import os.path
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from distlaunch.agent.frozen import Frozen
from distlaunch.errors import Problem
from distlaunch.job.allocation import AllocatedNode, Allocation
from distlaunch.job.document import Entries, Items, Place, Value, is_unset
from distlaunch.job.hosts import HostEntry, host_error, parse_endpoint, split_user
from distlaunch.job.paths import path_in
from distlaunch.job.types.records import Field
from distlaunch.ranges import expand_ranges
from distlaunch.transport.kinds import Transport

Checked = Mapping[str, Any]


class Surroundings(Frozen):
    """What a job file is read against: its folder, the caller's, the environment, the hostfile's entries.

    `name` is the job's unless it says one itself; None = its file's stem. One that was `piped` has no folder.
    `allocation` is what a scheduler has given the caller; a job that is to be `submitted` has none yet.
    `reach` makes what reaches a host of it, None = ssh. `sections` are the keys of schedulers.
    `in_image`: its nodes will be containers, whose files and variables are not the caller's.
    """

    folder: str
    home: str
    environ: Mapping[str, str]
    hostfile: tuple[HostEntry, ...] | None = None
    name: str | None = None
    piped: bool = False
    allocation: Allocation | None = None
    reach: Callable[[AllocatedNode], Transport | None] | None = None
    sections: Mapping[str, Field] = MappingProxyType({})
    submitted: bool = False
    in_image: bool = False

    def path(self, text: str) -> str:
        """A path on this machine, absolute."""
        path = path_in(self.folder, text)
        return os.path.normpath(self.home + path[1:]) if path.startswith("~") else path


class Reading:
    """The checked keys, None where one is refused, and the document they came from; collects problems."""

    def __init__(
        self, checked: Checked, document: Value, around: Surroundings, problems: list[Problem]
    ) -> None:
        self.checked, self.document, self.around, self.problems = checked, document, around, problems
        self.places = dict(_places(document, ""))
        self.refused = {problem.path for problem in problems if problem.path}

    def problem(self, path: str, text: str) -> None:
        """Note a problem with what stands at `path`, unless that is refused already."""
        if path in self.refused:
            return
        self.refused |= {path} - {""}
        self.problems.append(self.places.get(path, self.document.place).problem(path, text))

    def section(self, key: str) -> Checked:
        """The keys of a section, none where it is not given, or refused."""
        return self.checked.get(key) or {}

    def listed(self) -> Iterator[tuple[str, str | Checked]]:
        """Path and item of every host that is listed, in `nodes` and `spares`."""
        for key in ("nodes", "spares"):
            given = self.checked.get(key)
            for i, node in enumerate(given if isinstance(given, tuple) else ()):
                if node is not None:
                    yield f"{key}[{i}]", node

    def hosts(self, path: str, node: str | Checked) -> list[tuple[str | None, str]]:
        """(user, host) of each host that a listed item names; notes what is not a host."""
        text = node.get("host") if isinstance(node, Mapping) else node
        if not isinstance(text, str):
            return []  # noted by the type's check
        user, pattern = split_user(text)
        if found := re.fullmatch(r"([^:]+):([0-9]+)", pattern):
            login = f", user: {user}" if user else ""
            record = f"{{host: {found[1]}, port: {found[2]}{login}}}"
            self.problem(path, f"{text}: write {self.places[path].instead(text, record)}")
            return []
        try:
            hosts = expand_ranges(pattern)
        except ValueError as error:
            self.problem(path, str(error))
            return []
        if wrong := next(filter(None, map(host_error, hosts)), None):
            self.problem(path, wrong)
            return []
        return [(user, host) for host in hosts]

    def endpoint(self) -> tuple[str | None, int | None]:
        """Host and port of rank 0's store, as far as they are given; notes what is not an endpoint."""
        endpoint = self.section("rendezvous").get("endpoint")
        if endpoint is None:
            return self.checked.get("master_addr"), self.checked.get("master_port")
        try:
            return parse_endpoint(endpoint)
        except ValueError as error:
            self.problem("rendezvous.endpoint", str(error))
            return None, None


def _places(value: Value, path: str) -> Iterator[tuple[str, Place]]:
    yield path, value.place
    if isinstance(value, Items):
        for i, item in enumerate(value.items):
            yield from _places(item, f"{path}[{i}]")
    elif isinstance(value, Entries):
        for key, _, entry in value.walk():
            if not is_unset(entry):
                yield from _places(entry, f"{path}.{key}" if path else key)
