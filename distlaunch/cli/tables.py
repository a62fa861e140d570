"""Tables for people."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from distlaunch.checks.pairs import EVERY, folded
from distlaunch.checks.port_check import PortReport
from distlaunch.cli.output import print_text
from distlaunch.observers.console import escape
from distlaunch.plan.layout import LaunchPlan, NodePlan
from distlaunch.wording import counted, refused_port_words, spans

MANY = 256
"""A table of more ranks has a row for each node, and one of more rows is not laid out for the terminal."""
Told = tuple[str, list[str], list[list[str]]]
"""A heading, the names of columns, and the rows."""


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def print_plan_table(plan: LaunchPlan) -> None:
    """One row per worker: node, local rank, rank, device, address."""
    heading, columns, rows = _ranks(plan)
    if len(rows) > MANY:
        print_text(_aligned(escape(heading), [columns, *rows]))
        return
    table = _table(*columns)
    for row in rows:
        table.add_row(*(Text(escape(cell)) for cell in row))
    console = Console(highlight=False)
    with console.capture() as printed:
        console.print(Text(escape(heading)))
        console.print(table)
    print_text(printed.get())


def _aligned(heading: str, rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, however wide: a table that fits the terminal takes rich 0.3 ms for each row."""
    cells = [[escape(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["   ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    return "\n".join([heading, *lines, ""])


def _ranks(plan: LaunchPlan) -> Told:
    """One row per rank, with its CPU binding if the job asks for one; of many ranks one per node."""
    size = _size(plan)
    inside = plan.spec.container
    where = f", in containers of {inside.image} ({inside.runtime})" if inside else ""
    heading = f"{plan.spec.name}: {size}, {plan.backend}{where}"
    wished = [plan.spec.binding.key] if plan.spec.binding else []
    if plan.spec.mpirun_hosts:
        from distlaunch.plan.other_launchers import rows as places

        rows = [
            [host, str(local), str(rank), _meeting(plan, rank)] for host, local, rank in places(plan.spec)
        ]
        return heading, ["node", "local rank", "rank", "address"], rows
    many = plan.world_size > MANY
    numbers = ("local ranks", "ranks") if many else ("local rank", "rank")
    rows = [row for node in plan.nodes for row in ([_of_node(plan, node)] if many else _of_ranks(plan, node))]
    return heading, ["node", *numbers, "device", *wished, "address"], rows


def _size(plan: LaunchPlan) -> str:
    if hosts := plan.spec.mpirun_hosts:
        ranks = counted(sum(procs for _, procs in hosts), "rank")
        return f"{ranks} on {counted(len(hosts), 'node')}, started by {plan.spec.mpirun[0]}"
    return f"{counted(plan.world_size, plan.unit)} on {counted(len(plan.nodes), 'node')}"


def _of_ranks(plan: LaunchPlan, node: NodePlan) -> Iterator[list[str]]:
    binding = plan.spec.binding
    for local_rank, rank in enumerate(node.ranks):
        wish = [binding.wish(local_rank)] if binding else []
        yield [node.label, str(local_rank), str(rank), node.device(local_rank), *wish, _meeting(plan, rank)]


def _of_node(plan: LaunchPlan, node: NodePlan) -> list[str]:
    binding = plan.spec.binding
    devices = dict.fromkeys(node.device(local_rank).partition(":")[0] for local_rank in range(node.procs))
    wish = [", ".join(dict.fromkeys(map(binding.wish, range(node.procs))))] if binding else []
    local, ranks = spans(range(node.procs)), spans(node.ranks)
    return [node.label, local, ranks, ", ".join(devices), *wish, _meeting(plan, node.first_rank)]


def _meeting(plan: LaunchPlan, rank: int) -> str:
    return plan.meeting_place if rank == 0 else ""


def print_port_report(report: PortReport) -> None:
    """Whether the port is free, then one row per connection that was tried."""
    console = Console(highlight=False)
    port = f"port {report.port}" if report.port else "port"
    console.print(Text(f"{port} on {report.node}: {_port_state(report)}"))
    for node, failure, advice in report.failures:
        # Not wrapped: it has commands to paste.
        console.print(Text(f"  {node}: {failure.kind.value}; {escape(advice)}"), soft_wrap=True)
        for line in failure.words.splitlines():
            console.print(Text(f"    | {escape(line)}"), soft_wrap=True)
    if report.dials:
        table = _table("from", "to", "family", "result")
        for dial in report.dials:
            result = Text("ok", "green") if dial.ok else Text(escape(dial.error or "failed"), "red")
            table.add_row(Text(dial.source), Text(f"{report.host} ({dial.address})"), dial.family, result)
        console.print(table)
    for line in _pair_lines(report):
        console.print(Text(escape(line)), soft_wrap=True)


def _pair_lines(report: PortReport) -> list[str]:
    """How many pairs of nodes can connect, which can't, and which nodes were not tested."""
    lines = [f"spares not tested: {', '.join(report.spares)}"] if report.spares else []
    if report.pairs is None or not report.pairs.tried:
        return lines
    tried, of, failed = report.pairs
    sample = f" (a sample of {of})" if of > EVERY * (EVERY - 1) else ""
    failures = [f"  {line}" for line in folded(failed)]
    return [f"pairs of nodes that can connect: {tried - len(failed)} of {tried}{sample}", *failures, *lines]


def _port_state(report: PortReport) -> str:
    if report.free is None:
        return "unknown: the node can't be used"
    if report.free:
        return "free"
    return escape(refused_port_words(str(report.error), report.owners))
