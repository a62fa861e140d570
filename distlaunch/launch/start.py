"""The start of a run: its directory, the links to its nodes, and earlier starts of its scheduler job."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from shlex import join
from typing import TYPE_CHECKING

from distlaunch.agent import procfs
from distlaunch.agent.frozen import Frozen
from distlaunch.agent.needs import digest
from distlaunch.agent.procfs import boot_id, pid_namespace
from distlaunch.errors import DistlaunchError, UsageError, reason
from distlaunch.job.spec import Allocation, Earlier, JobSpec
from distlaunch.job.text import is_loopback
from distlaunch.launch.addresses import ask_addresses
from distlaunch.launch.link import Link, Links
from distlaunch.launch.opening import open_link, open_links
from distlaunch.launch.process import Child
from distlaunch.observers.run_directory import RunDirectory, new_run_id, status_in
from distlaunch.observers.run_list import Begun, Ticket, append, note_begin, starts_in, starts_path
from distlaunch.schedulers import allocation_in
from distlaunch.supervisor.checking import own_needs
from distlaunch.supervisor.events import NodeArrived
from distlaunch.supervisor.status import ControllerProcess, RunState, Status
from distlaunch.transports.transport import Joined

if TYPE_CHECKING:
    from distlaunch.agent.tree import Store
    from distlaunch.launch.inbound import InboundListener

NO_ALLOCATION = (
    "launcher: slurm needs an allocation: run this inside salloc or sbatch, or use `distlaunch submit`"
)


class Start(Frozen):
    """A run that has begun. `began` is the start time in monotonic seconds.

    `links`, keyed by node, are being opened, and the commands in `asked` look up nodes' addresses. `code`
    keeps the contents of the job's tree.
    """

    spec: JobSpec
    run_id: str
    directory: RunDirectory
    status: Status
    links: dict[int, Link]
    asked: dict[int, Child]
    began: float
    listener: "InboundListener | None" = None
    code: "Store | None" = None

    def now(self) -> float:
        """Return the seconds since the run began, in whole microseconds, for exact replays."""
        return round(time.monotonic() - self.began, 6)

    def open(self, node: int) -> Link:
        """Open and return a link to a node that has none. Raises `DistlaunchError`."""
        link = self.links.pop(node, None) or _joined(self.spec, node, self.run_id, self.listener)
        return link or open_link(self.spec, node)

    def note_ending(self) -> None:
        """Let launchers of the next job wait for the endpoint, which this one is about to leave."""
        if self.listener:
            self.listener.note_ending()

    def dismiss(self, why: str, status: int) -> None:
        """Tell the launchers that have joined too late to take part how the job has ended."""
        if self.listener:
            self.listener.dismiss(why, status)

    def attach(
        self,
        links: Links,
        arrived: Callable[[NodeArrived], None],
        lost: Callable[[int], bool],
        say: Callable[[str], None],
    ) -> None:
        """Watch through `links` for nodes that join or return, and call `arrived` for each.

        `lost` returns whether a node is lost and may return, whether or not its ranks have ended. `say` shows
        a message without waiting for a slow reader.
        """
        if self.listener:
            self.listener.attach(arrived, lost, say)
            links.watch(self.listener.fd, self.listener.turn)


def start_run(spec: JobSpec, listener: "InboundListener | None" = None) -> Start:
    """Begin a run of `spec`.

    After some checks on this machine, create the run directory, begin to open the links, and list the run for
    other commands. Nodes with their own launchers have joined, or will join, through the `listener`.

    Raises `DistlaunchError` if the run directory can't be created, notifications can't be sent, metrics
    would replace another file, or a transport can't be started.
    """
    check_allocation(spec)
    os.getcwd()  # it is listed with the run; if it no longer exists, fail before there is a run directory
    if spec.mpirun.argv:
        from distlaunch.plan.other_launchers import under_mpirun  # few jobs are for MPI

        spec = under_mpirun(spec, sys.executable)
    check_here(spec)
    began = time.monotonic()
    with suppress(OSError):  # it may exist only on the nodes
        script = digest(os.path.expanduser(own_needs(spec, 0).program))
        spec = spec._replace(invocation=spec.invocation._replace(script=script))
    if spec.logs.torchrun:
        spec = spec._replace(allocation=_surrounding(bool(listener)))
    nested = spec.allocation is not None and in_rank()  # the job's run is another one
    if spec.allocation and nested:
        spec = spec._replace(allocation=spec.allocation._replace(queued=False))
    if spec.allocation and spec.allocation.queued:
        spec = _continued(spec)
    run_id = new_run_id(spec.name)
    spec = spec.in_tree(run_id)
    controller = ControllerProcess(os.uname().nodename, os.getpid(), boot_id(), pid_namespace())
    now = time.time()
    status = Status(run_id, spec.name, RunState.CONNECTING, now, now, controller)
    status = status._replace(restarts=spec.restarts_before, file=spec.invocation.file)
    directory, code = run_directory(spec, run_id, status), None
    try:
        if spec.tree:
            from distlaunch.launch.snapshot import record  # few jobs copy their code

            code = record(spec.tree, directory, run_id)
        joined = {i: link for i in range(len(spec.pool)) if (link := _joined(spec, i, run_id, listener))}
        links = open_links(spec, joined)
    except BaseException:
        directory.close()
        directory.remove()
        raise
    if spec.allocation and spec.allocation.queued:
        append(path_of_starts(spec), _begun(spec, run_id, spec.allocation)._asdict())
    ticket = None if nested else _ticket(spec, listener)
    note_begin(run_id, directory.path, status.controller.host, ticket)
    # Looking up addresses takes as long as the name server does, so it runs while links are being opened.
    return Start(spec, run_id, directory, status, links, ask_addresses(spec), began, listener, code)


def check_allocation(spec: JobSpec) -> None:
    """Raise `UsageError` if the job's hosts are known only inside an allocation."""
    if spec.hosts_unknown:
        raise UsageError(NO_ALLOCATION)


def _ticket(spec: JobSpec, listener: "InboundListener | None") -> Ticket | None:
    """Return the scheduler job that is this run, or that contains its launchers; None = there is none."""
    allocation = spec.allocation
    if allocation and allocation.job and (allocation.queued or listener):
        return Ticket(allocation.scheduler, allocation.job)
    return None


def _surrounding(needed: bool) -> Allocation | None:
    """Return the allocation that contains the launchers, which are killed when it ends; None if none does."""
    with suppress(DistlaunchError):
        if found := allocation_in(os.environ, needed):
            return found._replace(queued=False)  # the batch script is the user's own
    return None


def in_rank() -> bool:
    """Return whether a rank of a run on this machine, in the same scheduler job, has started this process."""
    if "DISTLAUNCH_AGENT" not in os.environ:
        return False
    from distlaunch.agent import sweep  # few jobs are nested

    return sweep.in_its_job(procfs.environment(os.getpid()))


def _joined(spec: JobSpec, node: int, run_id: str, listener: "InboundListener | None") -> Link | None:
    """Return the link to a node's own launcher; None = the node has none."""
    place = spec.pool[node]
    return listener.link(node, run_id, place.label) if listener and isinstance(place.reach, Joined) else None


def check_here(spec: JobSpec) -> None:
    """Raise `JobError` if this machine can't do what the job needs from it, nodes aside."""
    if spec.notify.command:
        from distlaunch.observers.notifier import start_error  # few jobs notify

        if wrong := start_error(spec.notify.command[0]):
            raise spec.error("notify.command[0]", wrong)
    if spec.metrics:
        from distlaunch.observers.metrics import has_other_content  # few jobs write metrics

        if has_other_content(spec.metrics):
            text = f"{spec.metrics} already exists and isn't a metrics file that distlaunch wrote"
            raise spec.error("metrics.file", f"{text}; specify another file, or delete this one")
    _check_master(spec)


def _check_master(spec: JobSpec) -> None:
    """Raise an error if the master address can't be resolved, because ranks would keep retrying it."""
    host, here = spec.rendezvous.host, all(node.local for node in spec.pool) and not spec.container
    if not host or not here or spec.logs.torchrun or is_loopback(host):
        return
    import socket  # few jobs on one machine set it

    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        why = reason(error) if isinstance(error, OSError) else "not a host name"
        raise spec.error(spec.master_path, f"{host}: {why}") from None


def run_directory(spec: JobSpec, run_id: str, status: Status | None = None) -> RunDirectory:
    """Create the run directory in the first of the job's locations that works.

    Write the first `status` to it. Without `status`, the directory is only for the output of a launcher that
    joined another controller's run. Raises `DistlaunchError`.
    """
    refused = []
    for place in (spec.logs.directory, *spec.logs.spares):
        directory = None
        try:
            directory = RunDirectory(place, run_id)
            if status:
                directory.claim(status)
            return directory
        except OSError as error:
            refused.append(f"{place}: {reason(error)}")
            if directory:
                directory.close()
                directory.remove()
    flag = "TMPDIR, or torchrun's --log-dir," if spec.logs.spares else "--log-dir"
    text = f"can't create the run directory in {'; '.join(refused)}"
    raise DistlaunchError(f"{text}; set {flag if spec.logs.torchrun else 'logs.dir'} to another directory")


# Starts by a scheduler, which may requeue a job


def _continued(spec: JobSpec) -> JobSpec:
    """Record earlier runs in `spec` if the scheduler has started this job before."""
    allocation = spec.allocation
    if allocation is None or not allocation.starts:
        return spec
    before = _begun(spec, "", allocation).continued(starts_in(path_of_starts(spec)))
    if not before:
        return spec
    last = status_in(os.path.join(spec.logs.directory, before[-1].run))
    restarts = last.restarts + 1 if last else len(before)
    return spec._replace(invocation=spec.invocation._replace(earlier=Earlier(before[0].run, restarts)))


def _begun(spec: JobSpec, run_id: str, allocation: Allocation) -> Begun:
    return Begun(run_id, spec.name, allocation.starts, join(spec.program.args))


def path_of_starts(spec: JobSpec) -> str:
    """Return the path of the list of starts of the scheduler's job."""
    assert spec.allocation is not None
    return starts_path(spec.logs.directory, spec.allocation.job, spec.allocation.scheduler)
