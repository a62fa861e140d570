"""Prints a plan in the form that was asked for."""

from distlaunch.cli.output import print_json, print_text
from distlaunch.plan.document import plan_document
from distlaunch.plan.layout import DEFAULT_PORT, LaunchPlan, planned_workers
from distlaunch.plan.shell_text import shell_text
from distlaunch.plan.torchrun_text import torchrun_text


def print_plan(plan: LaunchPlan, style: str) -> None:
    """`style` is table, shell, torchrun or json."""
    match style:
        case "json":
            print_json(plan_document(plan, planned_workers(plan)))
        case "shell":
            print_text(shell_text(plan, planned_workers(plan)))
        case "torchrun":
            print_text(torchrun_text(plan, plan.master_port or DEFAULT_PORT))
        case _:
            from distlaunch.cli.tables import print_plan_table  # needs rich (40 ms)

            print_plan_table(plan)
