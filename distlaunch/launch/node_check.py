"""Asks the nodes of a job: connects as a run does, runs the probe on each, tries the port and all pairs."""

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

from distlaunch.agent import messages
from distlaunch.check.findings import PARTS, Finding, NodeReport, Problem, Report, report
from distlaunch.errors import JobError
from distlaunch.job.spec import JobSpec
from distlaunch.launch.addresses import answers, ask_addresses
from distlaunch.launch.agents import Agents
from distlaunch.launch.port_check import PortReport, folded, try_port
from distlaunch.plan.placement import Facts, LaunchPlan, make_plan
from distlaunch.supervisor.codec import event_of
from distlaunch.wording import counted, refused_port_words

CONNECT_S = 6.0
"""Maximum seconds to wait for agents. `run` waits longer, by default."""
PROBE_S = 8.0
"""Seconds for the answer of a probe, which limits itself to half of that."""


def check(spec: JobSpec) -> Report:
    """Check the nodes of a job. Raises `DistlaunchError`."""
    spec = spec._replace(membership=spec.membership._replace(spares=()))
    hurried = spec._replace(limits=spec.limits._replace(connect_s=min(spec.limits.connect_s, CONNECT_S)))
    asked = ask_addresses(spec)
    of_job, fine, plan = list(_run_directory(spec)), list[str](), None
    with Agents(hurried) as agents:
        known = {
            node: _facts(hello) for node, hello in sorted(agents.hellos.items()) if node in agents.present
        }
        try:
            plan = make_plan(spec, known, answers(asked).get(0)) if known else None
        except JobError as error:
            of_job.append(Finding(Problem("error", "reach", str(error))))
        probed = _probe(agents, spec, known, plan)
        if plan and len(known) == len(spec.nodes) and "network" not in spec.unchecked:
            ports = try_port(agents, spec, spec.nodes, plan.master_addr, spec.rendezvous.port)
            of_job += _port_findings(ports)
            fine += _port_words(ports) if ports.ok else []
    reports = [_of_node(spec, agents, index, probed.get(index)) for index in range(len(spec.nodes))]
    return report(plan, reports, of_job, fine, spec.unchecked)


def _facts(hello: messages.Hello) -> Facts:
    found: Facts = event_of(hello, float).facts  # type: ignore[union-attr]
    return found


def _run_directory(spec: JobSpec) -> Iterator[Finding]:
    """Yield a finding if the run directory can't be made here."""
    folder = spec.logs.folder
    while not os.path.isdir(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    if not os.access(folder, os.W_OK):
        what = f"the run directory can't be made: {folder} is not writable here"
        yield Finding(Problem("error", "place", what, "the run can't start", "set logs.dir"))


# The probe


def _probe(
    agents: Agents, spec: JobSpec, known: Mapping[int, Facts], plan: LaunchPlan | None
) -> dict[int, dict[str, Any]]:
    """Return each node's answer. Use the agent's Python on nodes that can't start the job's Python."""
    found = _ask(agents, spec, plan, {node: _python(spec, node, facts) for node, facts in known.items()})
    failed = [node for node, answer in found.items() if "python_error" in answer]
    if failed:
        agents.ask(dict.fromkeys(failed, messages.StopWorkers(0.0, "")), (messages.Swept,))
        again = _ask(agents, spec, plan, {node: known[node].python for node in failed})
        found |= {node: {**answer, **found[node]} for node, answer in again.items()}
    return found


def _python(spec: JobSpec, node: int, facts: Facts) -> str:
    return spec.program_of(spec.pool[node]).python or facts.python


def _ask(
    agents: Agents, spec: JobSpec, plan: LaunchPlan | None, pythons: Mapping[int, str]
) -> dict[int, dict[str, Any]]:
    began = time.time()
    probe = files("distlaunch.check").joinpath("probe.py").read_text()
    starts = {node: _start(spec, plan, node, (python, "-c", probe)) for node, python in pythons.items()}
    ends = agents.run(starts, PROBE_S)
    return {node: _answer(end, printed, pythons[node], began) for node, (end, printed) in ends.items()}


def _start(
    spec: JobSpec, plan: LaunchPlan | None, node: int, probe: tuple[str, ...]
) -> messages.StartWorkers:
    program = spec.program_of(spec.pool[node])
    word = program.words[0] if program.words else ""
    request = {
        "workdir": program.workdir,
        "script": word if program.kind == "script" and program.placed else None,
        "module": word if program.kind == "module" else None,
        "master": plan.master_addr if plan else None,
        "skip": spec.unchecked,
    }
    worker = messages.WorkerSpec(
        local_rank=0,
        argv=(*probe, json.dumps(request)),
        cwd="/",
        paths=(0,),
        env={name: value.text for name, value in program.env.items()},
        defaults={},
        one_device=False,
        shares=(),
    )
    return messages.StartWorkers(
        attempt=0,
        run_id=f"check-{os.getpid()}-{os.urandom(4).hex()}",
        grace_s=1.0,
        lease_s=spec.limits.lease_s,
        stall_s=None,
        watch_port=0,
        hosts_store=False,
        warning=signal.SIGUSR1,
        flight=False,
        temporary=(),
        env={},
        binding=None,
        workers=(worker,),
    )


def _answer(
    end: messages.WorkerExited | messages.WorkerUnstarted, printed: bytes, python: str, began: float
) -> dict[str, Any]:
    if isinstance(end, messages.WorkerUnstarted):
        return {"python_error": end.text}
    try:
        facts = json.loads(printed)
        assert isinstance(facts, dict)
    except (ValueError, AssertionError):
        why = f"the probe ended with status {end.status} and without an answer"
        return {"facts": dict.fromkeys(PARTS[1:], why), "python": python}
    then, now = facts.get("time"), time.time()
    apart = 0.0
    if isinstance(then, int | float):
        apart = min(then - began, 0.0) or max(then - now, 0.0)
    return {"facts": facts, "clock_s": apart, "python": python}


def _of_node(spec: JobSpec, agents: Agents, index: int, probed: Mapping[str, Any] | None) -> NodeReport:
    node = spec.nodes[index]
    failure = agents.failures.get(index)
    if failure and index not in agents.hellos:
        advice = node.reach.advice(failure, spec.program_of(node).python)
        return NodeReport(node.label, failure.kind.value, advice)
    whys = dict.fromkeys(PARTS[1:], f"no answer within {PROBE_S:g} s")
    return NodeReport(
        **{"label": node.label, "took_s": agents.took_s.get(index, 0.0), "facts": whys, **(probed or {})}
    )


# The rendezvous port, and connections between nodes


def _port_findings(ports: PortReport) -> Iterator[Finding]:
    if ports.free is False:
        why = refused_port_words(ports.error or "", ports.owners)
        do = "end that program, or leave out the port to get a free one"
        yield Finding(
            Problem("error", "network", f"port {ports.port} can't be used: {why}", "", do), (ports.node,)
        )
    failed: dict[str, list[str]] = {}
    for dial in ports.dials:
        if not dial.ok:
            failed.setdefault(f"{dial.address} port {ports.port}: {dial.error}", []).append(dial.source)
    for what, nodes in failed.items():
        problem = Problem(
            "error", "network", f"can't connect to {what}", "ranks can't join", "check the firewall"
        )
        yield Finding(problem, tuple(nodes))
    for line in folded(ports.pairs.failed) if ports.pairs else ():
        yield Finding(Problem("error", "network", line, "collectives will hang", "check the firewall"))


def _port_words(ports: PortReport) -> list[str]:
    if not ports.pairs:
        return ["network (the port is free)"]
    return [f"network (the port is free, {counted(ports.pairs.tried, 'connection')} between nodes)"]
