"""Opens links to a job's nodes: starts transports, and sends the agent's code and the interpreters to try."""

import contextlib
import importlib.util
import marshal
import os
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.machinery import SourceFileLoader

import distlaunch.agent
from distlaunch.agent.poller import make_room
from distlaunch.errors import DistlaunchError, reason
from distlaunch.here import runs_ranks
from distlaunch.job.spec import JobSpec
from distlaunch.job.text import path_in
from distlaunch.launch import process
from distlaunch.launch.link import Link
from distlaunch.transports.container import BY_SRUN, Container, entry, in_step
from distlaunch.transports.handshake import Bundle, Streams, boot_text, candidates_text
from distlaunch.transports.slurm import NODE_VARIABLE, LabeledStreams, SlurmStep
from distlaunch.transports.transport import Local, Transport

PYTHON = os.environ.get("DISTLAUNCH_PYTHON", sys.executable)
"""The interpreter to try first on nodes: that of the user's command, even if --on forwards the command."""
DESCRIPTORS_PER_LINK, RESERVE = 6, 300
"""Descriptors per link (three pipes, a pidfd, and two more while it is being opened), and for all else."""
MANY_NODES = 20
"""Number of nodes at which the usual limit on descriptors may become too low."""
STEP_NODES = 32
"""Maximum nodes per step."""
NO_RANKS_HERE = (
    "ranks run only on Linux, but this machine runs another system: run this command on Linux, or use "
    "`distlaunch run` with Linux hosts in nodes or -H"
)
_TRAVELS = 1
"""zlib's compression level. Level 6 would take 8 ms more at each start, for 184 KiB instead of 210 KiB."""


def open_links(spec: JobSpec, joined: Mapping[int, Link] | None = None) -> dict[int, Link]:
    """Start the transports to all nodes. `joined` are the links that nodes' own launchers opened."""
    make_room_for_many(len(spec.pool))
    links = dict(joined or {})
    for group in _groups(spec):
        if group[0] not in links:
            links |= dict.fromkeys(group, open_link(spec, *group))
    make_room(DESCRIPTORS_PER_LINK * len(links) + RESERVE)
    return links


def make_room_for_many(nodes: int) -> None:
    """Allow enough descriptors before links to many nodes are opened, or their launchers gather.

    For few nodes, this waits: an agent on this machine inherits the limit, and gives it to its workers.
    """
    if nodes > MANY_NODES:
        make_room(DESCRIPTORS_PER_LINK * nodes + RESERVE)


def open_link(spec: JobSpec, *indices: int) -> Link:
    """Start the transport to a node, or one step for several nodes. Each agent will send a hello."""
    first = indices[0]
    reach, named = spec.pool[first].reach, spec.program_of(spec.pool[first]).python
    if spec.container:
        return _open_container(spec, spec.container, first, named)
    steps = {index: step for index in indices if isinstance(step := spec.pool[index].reach, SlurmStep)}
    if len(steps) > 1:
        return _open_step(steps, named)
    return _open(reach, first, named, spec.shared)


def _groups(spec: JobSpec) -> Iterable[list[int]]:
    """Yield the groups of nodes that share a step."""
    large = spec.allocation and len(spec.pool) > STEP_NODES and not spec.container
    if not large or not all(isinstance(node.reach, SlurmStep) for node in spec.pool):
        yield from ([index] for index in range(len(spec.pool)))
        return
    # Few steps, of about the same size: more would overwhelm a scheduler.
    alike: dict[tuple[int | None, str | None], list[int]] = {}
    for index, node in enumerate(spec.pool):
        alike.setdefault((getattr(node.reach, "group", None), node.python), []).append(index)
    for indices in alike.values():
        size, count = len(indices), -(-len(indices) // STEP_NODES)
        yield from (indices[size * part // count : size * (part + 1) // count] for part in range(count))


def _open_container(spec: JobSpec, container: Container, index: int, named: str | None) -> Link:
    """Open a container on the node, with the node's shell or with srun itself."""
    node = spec.pool[index]
    reach = node.reach._replace(runtime=container.runtime) if isinstance(node.reach, Local) else node.reach
    store = path_in(spec.sync.base, "") if spec.sync.tree else ""
    # Without a snapshot, as in `check`, the code is not in the store yet, and the node may not have it.
    workdir = store if store and not spec.tree else spec.program_of(node).workdir
    opening = candidates_text([named] if named else ["python3", "python"])
    if container.runtime == BY_SRUN and isinstance(reach, SlurmStep):
        step = in_step(reach, container, workdir, os.path.expanduser("~"), store)
        return _open(step, index, named, inside=(opening,))
    return _open(reach, index, named, inside=(entry(container, workdir, store), opening))


def _open(
    reach: Transport, index: int, named: str | None, shared: Sequence[int] = (), inside: Sequence[bytes] = ()
) -> Link:
    """Open a link. `named` is the node's interpreter, if the job sets one.

    `inside` contains the openings for the node's shell, if any, and for the shell inside a container.
    """
    if reach.here and not runs_ranks():
        raise DistlaunchError(NO_RANKS_HERE)
    if reach.directory:
        _make_directory(reach.directory)
    child = _start(reach, reach.argv(), shared)
    nonce, same = os.urandom(16).hex(), reach.here and (named or PYTHON) == sys.executable and not inside
    streams = Streams(inside or [_opening(named)], nonce)
    hidden = _hidden_from_sh() if isinstance(reach, (Local, SlurmStep)) and not inside else ()
    return Link(reach, child, streams, lambda: boot_text(bundle_for(same), nonce, index, hidden))


def _hidden_from_sh() -> tuple[tuple[bytes, bytes], ...]:
    """Return the variables that not every sh passes on, such as functions that bash has exported."""
    # Without the empty name, as in `=x`, which can be inherited but not set.
    lost = [name for name in os.environb if name and not (name.isascii() and name.decode().isidentifier())]
    return tuple((name, os.environb[name]) for name in lost)


def _open_step(steps: Mapping[int, SlurmStep], named: str | None) -> Link:
    """Open one step for several nodes that have the same interpreter."""
    first, nonce = next(iter(steps.values())), os.urandom(16).hex()
    by_host = {step.host: index for index, step in steps.items()}
    boot = boot_text(bundle_for(same_interpreter=False), nonce, (NODE_VARIABLE, by_host), _hidden_from_sh())
    child = _start(first, first.group_argv(list(by_host)))
    return Link(first, child, LabeledStreams(_opening(named), nonce, by_host, first), lambda: boot)


def _start(reach: Transport, argv: Sequence[str], sharing: Sequence[int] = ()) -> process.Child:
    try:
        return process.start(argv, reach.environment(os.environ), sharing)
    except OSError as error:
        raise DistlaunchError(f"can't start {argv[0]}: {reason(error)}") from None


def _opening(named: str | None) -> bytes:
    """Return the interpreters to try on a node: the one the job sets, or else the usual ones."""
    return candidates_text([named] if named else [PYTHON, "python3"])


def _make_directory(path: str) -> None:
    """Create a directory in the home directory from the user database, as ssh does."""
    from pwd import getpwuid  # few transports need a directory

    with contextlib.suppress(OSError, KeyError):  # the transport reports a missing directory
        os.mkdir(path.replace("~", getpwuid(os.geteuid()).pw_dir, 1), 0o700)


@cache
def bundle_for(same_interpreter: bool) -> Bundle:
    """Return the agent's modules. For this interpreter on this machine, they are uncompressed bytecode.

    Otherwise, they are compressed, and include the sources, because a node may have another Python.
    """
    loaders = [SourceFileLoader(*module) for module in _modules()]
    # The agent's package needs its parent package.
    codes = {"distlaunch": marshal.dumps(compile("", "distlaunch", "exec"))}
    codes |= {loader.name: marshal.dumps(loader.get_code(loader.name)) for loader in loaders}
    code, source = zlib.compress(marshal.dumps(codes), 0 if same_interpreter else _TRAVELS), b""
    if not same_interpreter:
        sources = {"distlaunch": ""} | {loader.name: loader.get_source(loader.name) for loader in loaders}
        source = zlib.compress(repr(sources).encode(), _TRAVELS)
    return Bundle(importlib.util.MAGIC_NUMBER, code, source)


def _modules() -> Iterator[tuple[str, str]]:
    """Yield the name and file of each module, the package first. (pkgutil takes 6 ms to import.)"""
    (directory,) = distlaunch.agent.__path__
    yield "distlaunch.agent", os.path.join(directory, "__init__.py")
    for name in sorted(os.listdir(directory)):
        if name.endswith(".py") and name != "__init__.py":
            yield f"distlaunch.agent.{name[:-3]}", os.path.join(directory, name)
