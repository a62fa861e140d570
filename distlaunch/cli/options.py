"""Arguments and options shared by several commands."""

import os
from typing import Annotated

import typer
from typer import Argument, Option

from distlaunch.errors import UsageError


def _check_dashes(context: typer.Context, args: list[str] | None) -> list[str] | None:
    """Reject arguments without `--`, which are probably a mistake. Raises `UsageError`."""
    if args and "--" not in context.obj:
        raise UsageError(_stray(context.obj, args[0]))
    return args


def _stray(words: tuple[str, ...], word: str) -> str:
    """Return the message about an extra `word`, or about the preceding word that made it extra."""
    after_hosts = words[words.index("-H") + 2 :][:1] if "-H" in words else ()
    if after_hosts and not after_hosts[0].startswith("-") and not os.path.exists(after_hosts[0]):
        return f"unexpected argument {after_hosts[0]!r}: -H takes hosts separated by commas, as in -H a,b"
    if (python := words[words.index(word) - 1]).startswith("python"):
        return f"unexpected argument {word!r}: leave out {python}, as in `distlaunch run train.py`"
    if "=" in words:
        return "unexpected argument '=': write --set KEY=VALUE without spaces"
    what = "use --set to override a key" if "=" in word else "put the script's arguments after --"
    return f"unexpected argument {word!r}: {what}"


def job_and_args(
    context: typer.Context, job: str | None, args: list[str] | None
) -> tuple[str | None, tuple[str, ...]]:
    """Return the job file or script, if any, and the arguments, which are the words after `--`."""
    words = context.obj
    after = words[words.index("--") + 1 :] if "--" in words else ()
    return (None, after) if after and len(after) > len(args or ()) else (job, tuple(args or ()))


_JOB = "The job file, or - for standard input."
Job = Annotated[str, Argument(metavar="JOB.YAML", help=_JOB, show_default=False)]
_RUN = "The job file (- for standard input), or a Python script to run without a job file."
Source = Annotated[str | None, Argument(metavar="JOB.YAML | SCRIPT.py", help=_RUN, show_default=False)]
Ranks = Annotated[int | None, Option("-n", min=1, metavar="N", help="The total number of ranks.")]
Hosts = Annotated[
    str | None, Option("-H", metavar="HOST[:PROCS],…", help="The hosts, in rank order; replaces `nodes`.")
]
_MODULE = "A Python module to run without a job file."
Module = Annotated[str | None, Option("-m", metavar="MODULE", help=_MODULE)]
Save = Annotated[str | None, Option("--save", metavar="JOB.YAML", help="Also save the job to this new file.")]
_ARGS = "Arguments for the script, added to those in the job file."
Args = Annotated[list[str] | None, Argument(metavar="[-- ARGS…]", help=_ARGS, callback=_check_dashes)]
_SET = (
    "Override a key of the job file, e.g. --set timeouts.job=1h; null removes the key. "
    "--set env.NAME=null passes your shell's NAME through if the file doesn't set it."
)
Set = Annotated[list[str] | None, Option("--set", metavar="KEY=VALUE", help=_SET)]
Json = Annotated[bool, Option("--json", help="Print the result as JSON.")]
Fold = Annotated[bool, Option("--fold", help="Collapse identical lines from several ranks.")]
NoCheck = Annotated[bool, Option("--no-check", help="Start the ranks without checking the nodes first.")]
SSH_CONFIG = "Use this ssh_config file to reach HOST, as with ssh -F."
SshConfig = Annotated[str | None, Option("--ssh-config", metavar="FILE", help=SSH_CONFIG)]
