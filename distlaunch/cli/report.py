"""Commands that explain a run, or write about it: `why`, `report`, `bundle`, and `checkout` for its code."""

import io
import json
import os
import tarfile
import zlib
from collections.abc import Callable
from typing import Annotated

from typer import Argument, Option

from distlaunch.cli.options import Json
from distlaunch.cli.output import print_json, print_raw, print_text, say
from distlaunch.cli.runs import Which, offered
from distlaunch.errors import UsageError
from distlaunch.runs.run import find, replace_older
from distlaunch.runs.submissions import end_after, run_of
from distlaunch.wording import counted, listed

_DIFF = "Compare with this run instead of the job's last good run."
Diff = Annotated[str | None, Option("--diff", metavar="RUN", help=_DIFF, show_default=False)]
Verbose = Annotated[bool, Option("--verbose", "-v", help="Also print the evidence from every node.")]


def why(which: Which = None, diff: Diff = None, verbose: Verbose = False, as_json: Json = False) -> None:
    """Explain why a run failed, or what it is waiting for.

    Shows the root cause, the consequences, and what to do next.
    """
    from distlaunch.observers.console import escape
    from distlaunch.runs.why import explain

    found = explain(run := run_of(which), find(diff) if diff else None, with_stacks=True)
    if as_json:
        print_json(found.document())
        return
    lines = found.lines()
    if diff:
        lines += [f"since {found.other}:", *(found.changes() or ["no differences"])]
    if verbose:
        lines += [line for record in found.evidence for line in record.lines()]
    print_text(escape("\n".join([*lines, ""])))  # on a pipe, too: `less -R` acts on escapes
    if later := end_after(which, run):  # last, because the scheduler may not answer
        say(later)


_OUTPUT = "Write to FILE instead of RUN_ID.html in the current directory; - is stdout."
Output = Annotated[str | None, Option("--output", "-o", metavar="FILE", help=_OUTPUT, show_default=False)]
_TRACE = "Write a Chrome trace to FILE instead, for ui.perfetto.dev; - is stdout."
Trace = Annotated[str | None, Option("--trace", metavar="FILE", help=_TRACE, show_default=False)]


def report(which: Which = None, output: Output = None, trace: Trace = None, as_json: Json = False) -> None:
    """Write an HTML page about a run: what happened, where the time went, its ranks and their last output."""
    from distlaunch.runs.html import is_page_of, page
    from distlaunch.runs.report import report_of

    _refuse_two_documents(as_json, output, trace)
    found = report_of(run_of(which))
    if as_json:
        print_json(found.document())
    if trace:
        text = json.dumps(found.trace()).encode() + b"\n"
        _write(trace, text, lambda head: head.startswith(b'{"displayTimeUnit"'))
    if output or not (trace or as_json):
        text = page(found).encode(errors="replace")
        _write(output or f"{found.run.id}.html", text, lambda head: is_page_of(head, found.run.id))


_ARCHIVE = "Write to FILE instead of RUN_ID.tar.gz in the current directory; - is stdout."
Archive = Annotated[str | None, Option("--output", "-o", metavar="FILE", help=_ARCHIVE, show_default=False)]
Anonymous = Annotated[bool, Option("--anonymous", help="Also replace host names and home directories.")]


def bundle(
    which: Which = None, output: Archive = None, anonymous: Anonymous = False, as_json: Json = False
) -> None:
    """Write an archive of a run for a bug report: report, events and last output, with secrets hidden."""
    from distlaunch.runs.bundle import bundle_of

    _refuse_two_documents(as_json, output)
    run = run_of(which)
    files, unknown = bundle_of(run, os.environ, anonymous)
    if unknown:
        names = listed(unknown)
        what = f"values from the run's environment can't be hidden because they aren't set here: {names}"
        say(
            f"{what}; set them as they were for the run and try again, or check the files before sharing them"
        )
    if as_json:
        print_json({"run": run.id, "files": {name: len(data) for name, data in files.items()}})
    for name, data in () if as_json else files.items():
        say(f"{len(data):>9}  {name}")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"{run.id}/{name}")
            member.size, member.mode, member.mtime = len(data), 0o600, int(run.status.since)
            archive.addfile(member, io.BytesIO(data))
    _write(output or f"{run.id}.tar.gz", packed.getvalue(), lambda head: _holds(head, run.id))


def _refuse_two_documents(as_json: bool, *paths: str | None) -> None:
    if (*paths, "-" if as_json else None).count("-") > 1:
        raise UsageError("only one of --json and files written to - can be printed to stdout")


def _holds(head: bytes, run: str) -> bool:
    """Return whether an archive that begins with these bytes is a bundle of the run."""
    try:
        return zlib.decompressobj(wbits=31).decompress(head, 512).startswith(f"{run}/".encode())
    except zlib.error:
        return False


def _write(path: str, data: bytes, is_older: Callable[[bytes], bool]) -> None:
    """Write a file as `replace_older` does, or write to stdout if the path is -."""
    if path == "-":
        print_raw(data)
        return
    replace_older(path, data, is_older)
    say(f"wrote {path}")


_RUN = "A run's ID, a unique prefix of its ID, its directory, or the name or file of its job."
Run = Annotated[str, Argument(metavar="RUN", help=_RUN, autocompletion=offered)]
Directory = Annotated[str, Argument(metavar="DIRECTORY", help="A new directory for the code.")]


def checkout(which: Run, directory: Directory, as_json: Json = False) -> None:
    """Write a run's code, as copied by `sync`, to a new directory."""
    from distlaunch.launch.snapshot import check_out

    if os.path.lexists(directory):
        raise UsageError(f"{directory} already exists; specify a new directory")
    found = find(which)
    files = check_out(found.directory, directory)
    if as_json:
        print_json({"run": found.id, "directory": os.path.abspath(directory), "files": files})
        return
    say(f"wrote {counted(files, 'file')} to {directory}")
