"""Arguments and options that several commands have."""

from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from distlaunch.errors import UsageError

if TYPE_CHECKING:
    from distlaunch.transports.link import Link


class Call(NamedTuple):
    """What a command may want to know beside its arguments; Typer's `obj`."""

    words: tuple[str, ...]
    """The whole command line."""
    early: "Link | None"
    """An agent on this machine, opened before the job was read."""


def _check_dashes(context: typer.Context, args: list[str] | None) -> list[str] | None:
    """Refuse a second word, which is more likely a slip than the script's. Raises `UsageError`."""
    if args and "--" not in context.obj.words:
        what = "use --set to override a key" if "=" in args[0] else "put the script's arguments after --"
        raise UsageError(f"unexpected argument {args[0]!r}: {what}")
    return args


Job = Annotated[
    str, typer.Argument(metavar="JOB.YAML", help="The job file, or - for standard input.", show_default=False)
]
Args = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[-- ARGS…]",
        help="Arguments for the script, added to those in the job file.",
        callback=_check_dashes,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the job file, e.g. --set timeouts.job=1h; null removes it. "
        "--set env.NAME=null passes on NAME from your shell if the file does not set it.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Fold = Annotated[bool, typer.Option("--fold", help="Collapse identical lines from several ranks.")]
SshConfig = Annotated[
    str | None,
    typer.Option(
        "--ssh-config", metavar="FILE", help="The ssh_config file to reach HOST with, as with ssh -F."
    ),
]
