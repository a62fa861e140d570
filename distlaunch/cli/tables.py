"""Prints plans in several formats, and the reports from `check-port`."""

import shutil
import sys
from collections.abc import Sequence

from distlaunch.cli.output import print_json, print_text
from distlaunch.launch.port_check import EVERY, PortReport, folded
from distlaunch.observers.console import escape, wants_color
from distlaunch.plan.placement import DEFAULT_PORT, LaunchPlan, NodePlan
from distlaunch.plan.shell_text import shell_text, torchrun_text
from distlaunch.plan.workers import plan_document, planned_workers
from distlaunch.wording import aligned, counted, cut, refused_port_words, size_words, spans

MANY = 256
"""Number of ranks beyond which a table has one row per node."""


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table. The first of the `rows` contains the names of the columns."""
    head, *others = aligned([[escape(cell) for cell in row] for row in rows], 3)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    return [cut(line, width) for line in (head, "─" * len(head), *others)]


def print_plan(plan: LaunchPlan, style: str) -> None:
    """Print a plan; `style` is table, shell, torchrun or json. Raises `JobError`."""
    spec = plan.spec
    if style in ("shell", "torchrun") and len(plan.nodes) > 1 and (plan.one_machine or spec.hosts_unknown):
        text = f"commands for {counted(len(plan.nodes), 'node')} need host names"
        advice = "list them, as in --set 'nodes=[gpu-a, gpu-b]', or run this in an allocation"
        if "launcher" in spec.places:
            advice += "; if launcher is local or slurm, add --set launcher=auto"
        raise spec.error("nodes", f"{text}; {advice}")
    match style:
        case "json":
            print_json(plan_document(plan, planned_workers(plan)))
        case "shell":
            print_text(shell_text(plan, planned_workers(plan)))
        case "torchrun":
            print_text(torchrun_text(plan, plan.master_port or DEFAULT_PORT))
        case _:
            print_text("\n".join([_heading(plan), *_code(plan), *table(_rows(plan)), ""]))


def _heading(plan: LaunchPlan) -> str:
    size = plan.size_words
    if hosts := plan.spec.mpirun.hosts:
        ranks = counted(sum(procs for _, procs in hosts), "rank")
        size = f"{ranks} on {counted(len(hosts), 'node')}, started by {plan.spec.mpirun.argv[0]}"
    inside = plan.spec.container
    where = f", in containers of {inside.image} ({inside.runtime})" if inside else ""
    return f"{plan.spec.name}: {size}, {plan.backend}{where}"


def _code(plan: LaunchPlan) -> list[str]:
    tree = plan.spec.tree
    size = tree and f"{counted(tree.files, 'file')}, {size_words(tree.size)}, from {tree.root}: {tree.words}"
    return [f"code for each node: {size}"] if size else []


def _rows(plan: LaunchPlan) -> list[list[str]]:
    """Return a row for each rank, with any CPU binding. For many ranks, return a row for each node."""
    if plan.spec.mpirun.hosts:
        from distlaunch.plan.other_launchers import rows as places

        columns = ["node", "local rank", "rank", "address"]
        return [columns, *([h, str(local), str(r), _meeting(plan, r)] for h, local, r in places(plan.spec))]
    many = plan.world_size > MANY
    numbers = ("local ranks", "ranks") if many else ("local rank", "rank")
    wished = [plan.spec.placement.binding.key] if plan.spec.placement.binding else []
    rows = [["node", *numbers, "device", *wished, "address"]]
    for node in plan.nodes:
        each = [range(node.procs)] if many else [[local_rank] for local_rank in range(node.procs)]
        rows += [_row(plan, node, local_ranks) for local_ranks in each]
    return rows


def _row(plan: LaunchPlan, node: NodePlan, local_ranks: Sequence[int]) -> list[str]:
    """Return the row of one rank, or of all ranks of a node."""
    many, binding = len(local_ranks) > 1, plan.spec.placement.binding
    devices = [node.device(local_rank) for local_rank in local_ranks]
    kinds = dict.fromkeys(device.partition(":")[0] for device in devices) if many else devices
    wish = [", ".join(dict.fromkeys(map(binding.wish, local_ranks)))] if binding else []
    ranks = [node.ranks[local_rank] for local_rank in local_ranks]
    return [node.label, spans(local_ranks), spans(ranks), ", ".join(kinds), *wish, _meeting(plan, ranks[0])]


def _meeting(plan: LaunchPlan, rank: int) -> str:
    return plan.meeting_place if rank == 0 else ""


def print_port_report(report: PortReport) -> None:
    """Print whether the port is free, and a row for each attempted connection."""
    port = f"port {report.port}" if report.port else "port"
    state = "free" if report.free else refused_port_words(str(report.error), report.owners)
    if report.free is None:
        state = "unknown: the node can't be used"
    lines = [f"{port} on {report.node}: {state}"]
    for node, kind, words, advice in report.failures:
        lines.append(f"  {node}: {kind}; {advice}")
        lines += [f"    | {line}" for line in words.splitlines()]
    if report.dials:
        rows = [["from", "to", "family", "result"]]
        for dial in report.dials:
            result = "ok" if dial.ok else dial.error or "failed"
            rows.append([dial.source, f"{report.host} ({dial.address})", dial.family, result])
        head, rule, *dialed = table(rows)
        lines += [head, rule, *map(_colored, dialed, (dial.ok for dial in report.dials))]
    if report.own_address:
        lines.append(f"{report.host} is not an address of {report.node}, but {report.own_address} is")
    lines += _pair_lines(report)
    print_text("\n".join([*lines, ""]))


def _colored(line: str, good: bool) -> str:
    return f"\x1b[{32 if good else 31}m{line}\x1b[0m" if wants_color(sys.stdout.isatty()) else line


def _pair_lines(report: PortReport) -> list[str]:
    """Describe which pairs of nodes can and can't connect, and which spares were not tested."""
    lines = [f"spares not tested: {', '.join(report.spares)}"] if report.spares else []
    if report.pairs is None or not report.pairs.tried:
        return lines
    tried, of, failed = report.pairs
    sample = f" (a sample of {of})" if of > EVERY * (EVERY - 1) else ""
    failures = [f"  {line}" for line in folded(failed)]
    return [f"pairs of nodes that can connect: {tried - len(failed)} of {tried}{sample}", *failures, *lines]
