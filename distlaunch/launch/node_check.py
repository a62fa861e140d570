"""Checks a job's nodes: connects as a run does, runs the probe on each, and tests the port and node pairs."""

import base64
import glob
import json
import os
import subprocess
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.resources import files
from typing import Any

from distlaunch.agent import messages
from distlaunch.agent.needs import free_bytes
from distlaunch.check.findings import MIB, PROBED, Finding, NodeReport, Report, report
from distlaunch.check.probe import digest, imported
from distlaunch.errors import JobError
from distlaunch.job.spec import JobSpec, Program
from distlaunch.launch.addresses import answers, ask_addresses
from distlaunch.launch.agents import Agents, Ended, start_of
from distlaunch.launch.port_check import PortReport, folded, try_port
from distlaunch.launch.start import check_allocation, check_here
from distlaunch.plan.placement import Facts, make_plan
from distlaunch.supervisor.checking import expected
from distlaunch.transports.failure import Kind
from distlaunch.wording import counted, listed, refused_port_words, size_words

CONNECT_S = 6.0
"""Maximum seconds to wait for agents. By default, `run` waits longer."""
PROBE_S = 8.0
"""Seconds to wait for a probe, which limits itself to half of this."""
MAX_WORD = 100_000
"""Maximum characters of an argument. Linux allows 128 KiB."""
MAX_FILES = 10_000
LOCKS = ("uv.lock", "poetry.lock", "requirements*.txt")


def check(spec: JobSpec, code: bool = False) -> Report:
    """Check the nodes of a job and, with `code`, the files on them. Raises `DistlaunchError`."""
    check_allocation(spec)
    spares = [node.label for node in spec.membership.spares]
    skipped = [f"spares: {listed(spares)}"] if spares else []
    spec = hurried(spec)
    lookups = ask_addresses(spec)
    of_job, fine, plan = list(_run_directory(spec)), list[str](), None
    try:
        check_here(spec)
    except JobError as error:
        of_job.append(Finding("error", "place", str(error), "the run can't start"))
    files, more = _code(spec) if code and not spec.sync.tree else ({}, False)
    if code and spec.sync.tree:
        skipped.append("code: `run` copies it to the nodes (sync: true)")
    elif code and (more or not files):
        none = f"no git repository or lock file in {spec.program.workdir} here"
        skipped.append(f"code: {f'files after the first {MAX_FILES}' if more else none}")
    with Agents(spec) as agents:
        known = agents.facts
        try:
            plan = make_plan(spec, known, answers(lookups).get(0)) if known else None
        except JobError as error:
            of_job.append(Finding("error", "reach", str(error)))
        probed = _probe(agents, spec, known, {"master": plan.master_addr if plan else None, "code": files})
        if "network" not in spec.unchecked:
            skipped += _unconnected(spec, known)
        if plan and 0 in known and "network" not in spec.unchecked:
            ports = try_port(agents, spec, spec.nodes, plan.master_addr, spec.rendezvous.port)
            of_job += _port_findings(ports, spec.address_path(0))
            fine += _port_words(ports) if ports.ok else []
    return report(
        plan and expected(plan), _reports(spec, agents, probed), of_job, fine, skipped, spec.unchecked
    )


def look(spec: JobSpec) -> tuple[list[NodeReport], list[int | None]]:
    """Return a report on each node of a job, and its number of GPUs; None = the node can't be reached.

    `distlaunch init` writes a job file for these nodes.
    """
    with Agents(hurried(spec)) as agents:
        known = agents.facts
        probed = _probe(agents, spec, known, {"master": None, "code": {}})
    gpus = [known[index].gpus if index in known else None for index in range(len(spec.nodes))]
    return _reports(spec, agents, probed), gpus


def hurried(spec: JobSpec) -> JobSpec:
    """Return the job to check: without spares, and with at most CONNECT_S seconds to connect."""
    limits = spec.limits._replace(connect_s=min(spec.limits.connect_s, CONNECT_S))
    return spec._replace(membership=spec.membership._replace(spares=()), limits=limits)


def _run_directory(spec: JobSpec) -> Iterator[Finding]:
    """Yield a finding if the run directory can't be created, or its disk has no room."""
    directory = spec.logs.directory
    cannot = f"the run directory can't be created in {directory}"
    while not os.path.lexists(directory) and os.path.dirname(directory) != directory:
        directory = os.path.dirname(directory)
    if not os.path.isdir(directory):
        what = f"{cannot}: {directory} is not a directory"
        yield Finding("error", "place", what, "the run can't start", "set logs.dir to another directory")
        return
    disk = os.statvfs(directory)
    free = free_bytes(disk)
    if not os.access(directory, os.W_OK):
        what = f"{cannot}: {directory} is not writable on this machine"
        yield Finding("error", "place", what, "the run can't start", "set logs.dir to another directory")
    elif disk.f_blocks and free < MIB:  # some file systems don't count
        room = f"has only {size_words(free)} free on this machine"
        what = f"the disk for the run directory, {directory}, {room}"
        yield Finding("error", "place", what, "the run can't start", "free up some space, or set logs.dir")
    elif disk.f_files and not disk.f_favail:
        what = f"the disk for the run directory, {directory}, has no inodes left on this machine"
        yield Finding(
            "error", "place", what, "the run can't start", "delete some files there, or set logs.dir"
        )


def _code(spec: JobSpec) -> tuple[dict[str, str], bool]:
    """Return digests of lock files and git-tracked files, keyed by path relative to the workdir.

    Also return whether there are more than MAX_FILES.
    """
    workdir = os.path.expanduser(spec.program.workdir)
    names = [path for lock in LOCKS for path in sorted(glob.glob(lock, root_dir=workdir))]
    argv = ["git", "-C", workdir, "ls-files", "-z", ":/"]
    try:
        git = subprocess.run(argv, capture_output=True, check=True, timeout=PROBE_S)
        names += os.fsdecode(git.stdout).split("\0")[:-1]
    except (OSError, subprocess.SubprocessError):
        pass  # no git, or no repository
    names = [*dict.fromkeys(names)]
    digests = {name: digest(os.path.join(workdir, name)) for name in names[:MAX_FILES]}
    # A submodule has none.
    return {name: found for name, found in digests.items() if found}, len(names) > MAX_FILES


# The probe


def _probe(
    agents: Agents, spec: JobSpec, known: Mapping[int, Facts], request: Mapping[str, Any]
) -> dict[int, dict[str, Any]]:
    """Return each node's answer. Use the agent's Python on nodes that can't start the job's Python."""
    pythons = {node: spec.program_of(spec.pool[node]).python or facts.python for node, facts in known.items()}
    found = _ask(agents, spec, request, pythons)
    failed = [node for node, answer in found.items() if "python_error" in answer]
    if failed:
        agents.ask(dict.fromkeys(failed, messages.StopWorkers(0.0, "")), (messages.Swept,))
        again = _ask(agents, spec, request, {node: known[node].python for node in failed})
        found |= {node: {**answer, **found[node]} for node, answer in again.items()}
    return found


def _ask(
    agents: Agents, spec: JobSpec, request: Mapping[str, Any], pythons: Mapping[int, str]
) -> dict[int, dict[str, Any]]:
    """Run the probe on nodes, each with its interpreter. Return the answers that arrive in time."""
    began = time.time()
    probe = files("distlaunch.check").joinpath("probe.py").read_text()
    starts = {node: _start(spec, request, node, (python, "-c", probe)) for node, python in pythons.items()}
    ends = agents.run(starts, PROBE_S)
    return {node: _answer(ended, pythons[node], began) for (node, _), ended in ends.items() if ended[0]}


def _start(
    spec: JobSpec, request: Mapping[str, Any], node: int, probe: tuple[str, ...]
) -> messages.StartWorkers:
    """Return the command that starts the probe. The compressed request is split into arguments."""
    program = spec.program_of(spec.pool[node])
    word = program.words[0] if program.words else ""
    there = not spec.sync.tree  # otherwise, `run` copies the code
    request = {
        **request,
        "workdir": program.workdir if there else spec.sync.base,
        "sync": not there,
        "setup": spec.setup is not None,
        "script": word if there and program.kind == "script" and program.placed else None,
        "module": word if there and program.kind == "module" else None,
        "imports": [] if there or spec.setup or program.kind != "script" else _imports(program),
        "skip": spec.unchecked,
    }
    packed = base64.b64encode(zlib.compress(json.dumps(request).encode())).decode()
    worker = messages.WorkerSpec(
        local_rank=0,
        argv=(*probe, *(packed[at : at + MAX_WORD] for at in range(0, len(packed), MAX_WORD))),
        cwd="/",
        paths=(0,),
        env=program.fixed_env,
        defaults={},
    )
    return start_of(spec, {}, worker)


def _imports(program: Program) -> list[str]:
    """Return the packages that a script imports."""
    if "PYTHONPATH" in program.env:
        return []  # its own modules may be anywhere
    path = os.path.join(program.workdir, program.words[0])
    with suppress(OSError, SyntaxError, ValueError):  # `run` reports it, or it is no Python script
        return imported(path) if path.endswith(".py") else []
    return []


def _answer(ended: Ended, python: str, began: float) -> dict[str, Any]:
    """Return fields of a `NodeReport`: the facts, or the reason why the interpreter can't start."""
    end, printed = ended
    assert end is not None
    if isinstance(end, messages.WorkerUnstarted):
        return {"python_error": end.text}
    try:
        facts = json.loads(printed)
        assert isinstance(facts, dict)
    except (ValueError, RecursionError, AssertionError):
        why = f"the probe ended with status {end.status} and without an answer"
        return {"facts": dict.fromkeys(PROBED, why), "python": python}
    then, now = facts.get("time"), time.time()
    apart = 0.0
    if isinstance(then, float):
        apart = min(then - began, 0.0) or max(then - now, 0.0)
    return {"facts": facts, "clock_s": apart, "python": python}


def _reports(spec: JobSpec, agents: Agents, probed: Mapping[int, dict[str, Any]]) -> list[NodeReport]:
    return [_of_node(spec, agents, index, probed.get(index)) for index in range(len(spec.nodes))]


def _of_node(spec: JobSpec, agents: Agents, index: int, probed: Mapping[str, Any] | None) -> NodeReport:
    """Return the report on a node. If its agent lives but doesn't answer, each part of the report says so."""
    node = spec.nodes[index]
    failure = agents.failures.get(index)
    if failure and (index not in agents.took_s or failure.kind is not Kind.SILENT):
        advice = node.reach.advice(failure, spec.program_of(node).python)
        return NodeReport(node.label, failure.kind.value, advice)
    whys = dict.fromkeys(PROBED, f"no answer within {PROBE_S:g} s")
    return NodeReport(
        **{"label": node.label, "took_s": agents.took_s.get(index, 0.0), "facts": whys, **(probed or {})}
    )


# The rendezvous port, and connections between nodes


def _unconnected(spec: JobSpec, known: Mapping[int, Facts]) -> Iterator[str]:
    """Yield the tests that can't be run because some nodes can't be reached."""
    away = [node.label for index, node in enumerate(spec.nodes) if index not in known]
    if away and 0 not in known:
        yield f"the port, and connections between nodes: they need {spec.nodes[0].label}"
    elif away:
        yield f"connections between {listed(away)} and the other nodes"


def _port_findings(ports: PortReport, key: str) -> Iterator[Finding]:
    """Yield the findings about the rendezvous port, and the connections to it and between nodes.

    `key` is the key that sets the first node's address.
    """
    if ports.free is False:
        why = refused_port_words(ports.error or "", ports.owners)
        do = "end that program, or " if ports.owners else ""
        do += "leave the port out of the job file to get a free one"
        yield Finding("error", "network", f"port {ports.port} can't be used: {why}", "", do, (ports.node,))
    failed: dict[tuple[str, str], list[str]] = {}
    reaches_itself = any(dial.ok and dial.source == ports.node for dial in ports.dials)
    for dial in ports.dials:
        if not dial.ok:
            what = f"can't connect to {dial.address} port {ports.port}: {dial.error}"
            do = f"set {key} to an IP address of the first node"
            if ports.own_address:
                do = f"set {key} to {ports.own_address}: {ports.host} is not {ports.node}'s"
            elif reaches_itself and dial.family and "another service" not in what:
                do = _remedy(what)
            failed.setdefault((what, do), []).append(dial.source)
    for (what, do), nodes in failed.items():
        yield Finding("error", "network", what, "ranks can't join", do, tuple(nodes))
    for line in folded(ports.pairs.failed) if ports.pairs else ():
        yield Finding("error", "network", line, "collectives will hang", _remedy(line))


def _remedy(failure: str) -> str:
    """Return what to do about a failed connection to an address that was resolved."""
    return "lower the MTU of its interface" if "MTU" in failure else "check the firewall"


def _port_words(ports: PortReport) -> list[str]:
    if not (ports.pairs and ports.pairs.tried):
        return ["network (the port is free)"]
    return [f"network (the port is free, {counted(ports.pairs.tried, 'connection')} between nodes)"]
