"""Opens the links to the nodes of a job: the transport's command line, the interpreters, the agent's text."""

import contextlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from distlaunch.errors import DistlaunchError, reason
from distlaunch.job.spec import JobSpec
from distlaunch.system.here import runs_ranks
from distlaunch.transports import process
from distlaunch.transports.boot import boot_text, candidates_text
from distlaunch.transports.bundle import bundle_for
from distlaunch.transports.container import BY_SRUN, Container
from distlaunch.transports.kinds import Transport
from distlaunch.transports.link import Link
from distlaunch.transports.local import Local
from distlaunch.transports.slurm import Slurm
from distlaunch.transports.streams import OneStream

if TYPE_CHECKING:
    from distlaunch.transports.slurm.group import SlurmGroup

STEP_NODES = 32
"""Nodes of an allocation by one step, where there are more of them."""
NO_RANKS_HERE = "ranks run only on Linux, and this machine has another system: list Linux hosts in nodes"


def open_link(spec: JobSpec, *indices: int) -> Link:
    """Start the transport to a node, or to several that have one together; their agents will say hello."""
    pythons = {index: spec.pool[index].python or spec.python for index in indices}
    if spec.container:
        return _open_container(spec, spec.container, indices[0], pythons)
    reaches = [spec.pool[index].reach for index in indices]
    steps = [reach for reach in reaches if isinstance(reach, Slurm)]
    if len(steps) > 1:
        return _open_step(steps, pythons)
    return _open(reaches[0], pythons, spec.invocation.shares_stdio)


def _open_container(
    spec: JobSpec, container: Container, index: int, pythons: Mapping[int, str | None]
) -> Link:
    """A container on the node: by the node's shell, or by srun itself."""
    from distlaunch.transports.container_entry import entry, in_step  # few jobs have them

    node = spec.pool[index]
    reach = Local(container.runtime) if isinstance(node.reach, Local) else node.reach
    workdir, named = node.workdir or spec.workdir, pythons[index]
    opening = candidates_text([named] if named else ["python3", "python"])
    if container.runtime == BY_SRUN and isinstance(reach, Slurm):
        step = in_step(reach, container, workdir, os.path.expanduser("~"))
        return _open(step, pythons, inside=(opening,))
    inside = (entry(container, workdir), opening)
    return _open(reach, pythons, inside=inside)


def open_links(
    spec: JobSpec, early: Link | None = None, joined: Mapping[int, Link] | None = None
) -> dict[int, Link]:
    """Start the transports to all nodes; the agent opened `early` serves the first one, or is discarded.

    `joined` are the links to nodes whose launchers have opened them.
    """
    links = dict(joined or {})
    first = spec.nodes[0]
    ours = (first.python or spec.python) in (None, sys.executable) and not spec.container
    if early and isinstance(first.reach, Local) and ours:
        links[0] = early
    for group in _groups(spec):
        if group[0] not in links:
            links |= dict.fromkeys(group, open_link(spec, *group))
    if early and links[0] is not early:
        early.discard()
    return links


def _groups(spec: JobSpec) -> Iterable[list[int]]:
    """The nodes, by whether they have a process together."""
    by_steps = spec.allocation and all(isinstance(node.reach, Slurm) for node in spec.pool)
    if by_steps and len(spec.pool) > STEP_NODES and not spec.container:
        return _steps(spec)
    groups: dict[Transport | int, list[int]] = {}
    for index, node in enumerate(spec.pool):
        groups.setdefault(node.reach if node.reach.together else index, []).append(index)
    return groups.values()


def _steps(spec: JobSpec) -> Iterable[list[int]]:
    """A large allocation's nodes by few steps, of about the same size: more would overwhelm a scheduler."""
    alike: dict[tuple[int | None, str | None], list[int]] = {}
    for index, node in enumerate(spec.pool):
        component = node.reach.group if isinstance(node.reach, Slurm) else None
        alike.setdefault((component, node.python), []).append(index)
    for indices in alike.values():
        size, count = len(indices), -(-len(indices) // STEP_NODES)
        yield from (indices[size * part // count : size * (part + 1) // count] for part in range(count))


def _open(
    reach: Transport,
    pythons: Mapping[int, str | None],
    shares: bool = False,
    inside: Sequence[bytes] = (),
) -> Link:
    """`pythons` has, by node, the interpreter that is named for it.

    `inside` is what the shells on the way into a container are sent, the last of them that in it.
    """
    if reach.here and not runs_ranks():
        raise DistlaunchError(NO_RANKS_HERE)
    if reach.folder:
        _make_folder(reach.folder)
    return _link(reach, _start(reach, (0, 1) if shares else ()), pythons, inside)


def _start(reach: "Transport | SlurmGroup", sharing: Sequence[int] = ()) -> process.Child:
    argv = reach.argv()
    try:
        return process.start(argv, reach.environment(os.environ), sharing)
    except OSError as error:
        raise DistlaunchError(f"can't start {argv[0]}: {reason(error)}") from None


def _link(
    reach: Transport,
    child: process.Child,
    pythons: Mapping[int, str | None],
    inside: Sequence[bytes] = (),
) -> Link:
    nonce = os.urandom(16).hex()
    (first, named), *others = pythons.items()

    def boot() -> bytes:
        texts = [_boot_text(reach, named, nonce, first, own=not inside)]
        texts += [_opening(name) + _boot_text(reach, name, nonce, index) for index, name in others]
        return b"".join(texts)

    return Link(reach, child, OneStream(inside or [_opening(named)], nonce), boot)


def _open_step(reaches: "Sequence[Slurm]", pythons: Mapping[int, str | None]) -> Link:
    """One step for several nodes, which have the same interpreter."""
    from distlaunch.transports.slurm.group import NODE_VARIABLE, LabelledStreams, SlurmGroup

    nonce, hosts = os.urandom(16).hex(), tuple(reach.host for reach in reaches)
    named = next(iter(pythons.values()))
    place = (NODE_VARIABLE, dict(zip(hosts, pythons, strict=True)))
    boot = boot_text(bundle_for(same_interpreter=False), nonce, place)
    group = SlurmGroup(hosts, reaches[0])
    streams = LabelledStreams(_opening(named), nonce, group, list(pythons))
    return Link(group, _start(group), streams, lambda: boot)


def _opening(named: str | None) -> bytes:
    return candidates_text([named] if named else [sys.executable, "python3"])


def _boot_text(reach: Transport, named: str | None, nonce: str, index: int, own: bool = True) -> bytes:
    """`own`: the machine's own interpreters are meant, not those in a container."""
    same = own and reach.here and named in (None, sys.executable)
    return boot_text(bundle_for(same), nonce, index)


def _make_folder(path: str) -> None:
    """Make a folder of the user's; the home is that of the user database, as ssh has it."""
    from pwd import getpwuid  # few transports need one

    with contextlib.suppress(OSError, KeyError):  # the transport says what it lacks
        os.mkdir(path.replace("~", getpwuid(os.geteuid()).pw_dir, 1), 0o700)
