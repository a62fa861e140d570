"""Checks that `run` makes before the ranks start, using facts that agents report together with the routes.

`distlaunch.check.findings` contains the rules, which `check` also uses. An error ends the job before any rank
starts.
"""

from collections.abc import Iterator, Mapping, Sequence
from errno import ENOENT
from typing import TYPE_CHECKING, Any

from distlaunch.agent.messages import Needs
from distlaunch.contract import interface_variables
from distlaunch.errors import Exit
from distlaunch.job.spec import EnvValue, JobSpec
from distlaunch.job.text import path_in
from distlaunch.plan.placement import LaunchPlan
from distlaunch.supervisor.actions import ShowMessage
from distlaunch.supervisor.events import AttemptFailed, JobOver, Step
from distlaunch.supervisor.nodes import Up, facts_of, route_of
from distlaunch.supervisor.state import Cause, State
from distlaunch.wording import counted, listed

if TYPE_CHECKING:
    from distlaunch.check.findings import Expected, Finding, Level

CHOOSES_GPUS = "CUDA_VISIBLE_DEVICES"
"""If the job sets this variable, the agent and the workers see different GPUs."""


def needs_of(state: State, index: int) -> Needs | None:
    """Return the requirements to check on a node, or None if the results are known or checks are skipped.

    The requirements are sent with the request for the node's route.
    """
    node, spec = state.nodes[index], state.spec
    known = isinstance(node, Up) and node.seen is not None
    return None if known or {"place", "limits"} <= {*spec.unchecked} else own_needs(spec, index)


def own_needs(spec: JobSpec, index: int) -> Needs:
    """Return the requirements of the workers on a node."""
    program = spec.program_of(spec.pool[index])
    word, tmpdir = program.words[0], program.env.get("TMPDIR", EnvValue(""))
    is_file = program.is_file
    if spec.tree:  # the workdir and the program are verified with the tree, which may not have arrived yet
        program, is_file = program._replace(workdir="/"), False
    return Needs(
        workdir=program.workdir,
        program=path_in(program.workdir, word) if is_file else "",
        tmpdir="" if tmpdir.inherited or "{" in tmpdir.text else tmpdir.text,  # inherited: not recorded
    )


def problems(state: State) -> Sequence["Finding"]:
    """Return the problems with the nodes of the attempt, errors first.

    Called right before the workers start.
    """
    seen = {index: _seen(state, index) for index in state.members}
    if not any(seen.values()) and not any(_misnamed(state, index) for index in state.members):
        return ()
    from distlaunch.check.findings import NodeReport, report  # only jobs on several nodes have facts

    further = [each for index in state.members for each in _further(state, index, seen[index])]
    nodes = [NodeReport(state.label(index), facts=facts) for index, facts in seen.items()]
    return report(expected(state.planned), nodes, further, skip=state.spec.unchecked).findings


def expected(plan: LaunchPlan) -> "Expected":
    """Return the facts that a plan expects of its nodes."""
    from distlaunch.check.findings import Expected

    nodes = plan.spec.nodes
    uneven = {
        "GPUs": len({node.gpus for node in nodes}) > 1,
        "script": len({node.script for node in nodes}) > 1,
    }
    return Expected(
        backend=plan.backend,
        master_addr=plan.master_addr,
        master_key=plan.spec.address_path(plan.nodes[0].node),
        joins=plan.join_s is not None,
        one_machine=plan.one_machine,
        gpus={part.label: part.gpus for part in plan.nodes},
        procs={part.label: part.procs for part in plan.nodes},
        uneven=frozenset(filter(uneven.get, uneven)),
        can_sync=bool(plan.spec.places) and not plan.spec.mpirun.argv,
    )


def _seen(state: State, index: int) -> dict[str, Any]:
    """Return the facts of a node, in the format of `distlaunch.check.probe`."""
    node = state.up(index)
    visible = node.facts.gpus or 0
    devices = {"devices": {"counted": bool(visible), "gpus": [{}] * visible}}
    return {**(node.seen or {}), **(devices if _lacks_gpus(state, index) else {})}


def _lacks_gpus(state: State, index: int) -> bool:
    """Return whether the agent sees fewer GPUs than the job file requests."""
    node, visible = state.spec.pool[index], facts_of(state.nodes[index]).gpus
    if not node.gpus or visible is None or visible >= node.gpus:
        return False
    return CHOOSES_GPUS not in state.spec.program_of(node).env


def _further(state: State, index: int, seen: Mapping[str, Any]) -> Iterator["Finding"]:
    """Yield a node's problems that `check` derives from other facts."""
    from distlaunch.check.findings import Finding

    nodes = (state.label(index),)
    if isinstance(silent := seen.get("place"), str):  # the reason why there are no facts, instead of a dict
        what, why = f"{silent} about its directories", "a file system may be slow or down"
        yield Finding("warning", "place", what, why, "if the ranks hang, run `df` there", nodes)
    first, program = state.members[0], state.spec.program_of(state.spec.pool[index])
    own, usual = (facts_of(state.nodes[each]).python for each in (index, first))
    if own != usual and not (program.python or state.spec.setup) and program.kind != "command":
        what = f"its ranks run with {own}, but those on {state.label(first)} with {usual}"
        do = "set python to a path that all nodes have"
        yield Finding("warning", "software", what, "packages may differ", do, nodes)
    for name, setting, why in _misnamed(state, index):
        # A program that joins no rendezvous may ignore the variable.
        sure = name.startswith(_backend(state)) and state.spec.places and state.spec.limits.join_s
        level: Level = "error" if sure else "warning"
        what, do = f"{setting}: {why}", "correct or remove it"
        yield Finding(level, "network", what, "ranks can't connect", do, nodes)


def _backend(state: State) -> str:
    return state.planned.backend.upper()


def _misnamed(state: State, index: int) -> list[tuple[str, str, str]]:
    """Return the rows of `Route.misnamed` about variables that the backend reads."""
    route = route_of(state.nodes[index])
    used = interface_variables(state.planned.backend)
    return [each for each in route.misnamed if each[0] in used] if route else []


# Consequences


def refuse(state: State, errors: Sequence["Finding"], now: float) -> Step:
    """End the job or, if the nodes are new in a restart, continue without them."""
    named = {node for each in errors for node in each.nodes}
    bad = [index for index in state.members if state.label(index) in named]
    lines = [each.line for each in errors]
    if state.attempt:
        return leave_out(state, bad, Cause("; ".join(lines), _status(state, bad), now, node=bad[0]))
    if state.spec.places:  # torchrun has no such option
        lines.append("to start the job anyway: --no-check")
    return state, (JobOver(Cause("\n".join(lines), _status(state, bad), now, node=bad[0])),)


def leave_out(state: State, nodes: Sequence[int], cause: Cause) -> Step:
    """End the attempt, and start no other on these nodes, which are new in a restart."""
    for index in nodes:
        state = state.with_node(index, state.up(index)._replace(unfit=cause.text))
    return state, (AttemptFailed(cause._replace(kind="node_lost")),)


def _status(state: State, nodes: Sequence[int]) -> int:
    """Return the exit status that a worker would have if these nodes' problems kept it from starting."""
    places = [_seen(state, index).get("place") for index in nodes]
    found = [place for place in places if isinstance(place, dict)]
    if any(place.get("errno") == ENOENT or place.get("exists") is False for place in found):
        return 127
    return 126 if any(place.get("errno") or place.get("unrecorded") for place in found) else Exit.USAGE


def warning(state: State, found: Sequence["Finding"]) -> tuple[ShowMessage, ...]:
    """Return one message about all warnings or, if `check` can't repeat them, one about each."""
    spec, allocation = state.spec, state.spec.allocation
    if len(found) < 2 or not spec.invocation.file or (allocation and allocation.queued):
        return tuple(ShowMessage("warning", each.line) for each in found)
    what = "; ".join(f"{listed(each.nodes)}: {each.what}" for each in found)
    from shlex import quote  # few jobs have warnings

    same = any(place.source.startswith(("-H", "--set")) for place in spec.places.values())
    options = ", with the same -H, -n and --set," if same else ""
    more = f"; `distlaunch check {quote(spec.source)}`{options} shows details"
    return (ShowMessage("warning", f"{counted(len(found), 'warning')} about the nodes: {what}{more}"),)
