"""`check`: finds problems that would keep a job from working, before it starts."""

import sys
from typing import Annotated

import typer
from typer import Option

from distlaunch.check.findings import Report
from distlaunch.cli.job_file import Typed, check_not_simulated, load_job, with_code
from distlaunch.cli.options import Args, Hosts, Json, Module, Ranks, Set, Source, job_and_args
from distlaunch.cli.output import print_json, print_text
from distlaunch.cli.tables import table
from distlaunch.errors import Exit
from distlaunch.observers.console import escape
from distlaunch.wording import listed

_CODE = "Also check that git-tracked files and lock files on the nodes match those on this machine."
Code = Annotated[bool, Option("--code", help=_CODE)]
Links = Annotated[bool, Option("--links", help="Also measure the links between nodes, and report slow ones.")]


def check(
    context: typer.Context,
    job: Source = None,
    args: Args = None,
    ranks: Ranks = None,
    hosts: Hosts = None,
    module: Module = None,
    overrides: Set = None,
    code: Code = False,
    links: Links = False,
    as_json: Json = False,
) -> None:
    """Connect to a job's nodes and report problems.

    Exits with 1 if any problem would keep the job from working.

    The job itself isn't started. With --links, a small program that needs torch runs in place of the ranks.
    """
    from distlaunch.launch.node_check import check as ask

    job, words = job_and_args(context, job, args)
    spec = load_job(job, overrides or (), words, Typed(module, hosts, ranks, None))
    check_not_simulated(spec)
    with_code(spec)  # refuses what `run` would refuse
    report = ask(spec, code)
    if spec.setup:
        unbuilt = "packages of the environment that setup builds when the job starts"
        report = report._replace(unchecked=(*report.unchecked, unbuilt))
    if links and any((each.level, each.part) == ("error", "reach") for each in report.findings):
        report = report._replace(unchecked=(*report.unchecked, "links: some nodes can't be used"))
    elif links:
        from distlaunch.launch.link_check import check_links

        report = report.joined(check_links(spec, _show_step))
        _show_step("")
    if as_json:
        print_json(report.document())
    else:
        print_text("\n".join([*_lines(report), ""]))
    raise typer.Exit(Exit.OK if report.ok else Exit.FAILED)


def _show_step(text: str) -> None:
    """Show the progress on a terminal, replacing the previous step."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K" + escape(text and f"distlaunch: links: {text}"))
        sys.stderr.flush()


def _lines(report: Report) -> list[str]:
    """Return the report as lines: findings, differences between nodes, slow links, and the rest."""
    lines = [f"{finding.level}: {finding.line}" for finding in report.findings]
    if report.differs:
        rows = [["differs", "value", "nodes"]]
        for name, values in report.differs.items():
            rows += [
                [name, value, listed([node for node, each in values.items() if each == value])]
                for value in dict.fromkeys(values.values())
            ]
        lines += ["", *table(rows), ""]
    if report.slow:
        lines += ["", *table([["slow", "busbw", "median"], *report.slow]), ""]
    lines += [f"not checked: {text}" for text in report.unchecked]
    return [*lines, f"fine: {', '.join(report.fine) or 'nothing'}"]
