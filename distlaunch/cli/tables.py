"""Tables for people."""

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from distlaunch.plan.layout import LaunchPlan


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def print_plan(plan: LaunchPlan) -> None:
    """One row per worker: node, local rank, rank, device, address."""
    port = plan.master_port or "a free port"
    heading = f"{plan.spec.name}: {plan.world_size} ranks on {len(plan.nodes)} nodes, {plan.backend}"
    table = _table("node", "local rank", "rank", "device", "address")
    for node in plan.nodes:
        for local_rank in range(node.procs):
            rank = node.first_rank + local_rank
            address = f"MASTER_ADDR {plan.master_addr}, {port}" if rank == 0 else ""
            row = (node.label, str(local_rank), str(rank), node.device(local_rank), address)
            table.add_row(*map(Text, row))
    console = Console(highlight=False)
    console.print(Text(heading))
    console.print(table)
