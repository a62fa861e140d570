"""`why`: explains why a run failed, or what it is waiting for."""

from typing import Annotated

from typer import Option

from distlaunch.cli.options import Json
from distlaunch.cli.output import print_json, print_text
from distlaunch.cli.runs import Which
from distlaunch.runs.find import find

_DIFF = "Compare with this run instead of the job's last good one."
Diff = Annotated[str | None, Option("--diff", metavar="RUN", help=_DIFF, show_default=False)]
Verbose = Annotated[bool, Option("--verbose", "-v", help="Also print the evidence.")]


def why(which: Which = None, diff: Diff = None, verbose: Verbose = False, as_json: Json = False) -> None:
    """Explain why a run failed, or what it is waiting for.

    Shows the root cause, the evidence, the consequences, and what to do next.
    """
    from distlaunch.observers.console import escape
    from distlaunch.runs.submissions import run_of
    from distlaunch.runs.why import explain

    found = explain(run_of(which), find(diff) if diff else None, with_stacks=True)
    if as_json:
        print_json(found.document())
        return
    lines = found.lines()
    if diff:
        lines += [f"since {found.other}:", *found.changes()]
    if verbose:
        lines += [line for record in found.evidence for line in record.lines()]
    print_text(escape("\n".join([*lines, ""])))  # on a pipe, too: `less -R` acts on escapes
