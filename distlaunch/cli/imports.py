"""`distlaunch import`: job files from what other launchers read."""

from typing import TYPE_CHECKING, Annotated

import typer

from distlaunch.cli.options import Json
from distlaunch.cli.output import print_json, print_text

if TYPE_CHECKING:
    from distlaunch.compat.draft import Draft

imports = typer.Typer(
    name="import",
    help="Print a job file for another launcher's command or file. Each command takes --json.",
    no_args_is_help=True,
)
Program = Annotated[
    list[str] | None, typer.Argument(metavar="[-- SCRIPT ARGS…]", help="The script and its arguments.")
]


@imports.command("torchrun")
def from_torchrun(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="'COMMAND LINE' | - | -- WORDS…",
            help="The whole command, quoted, or its words after `--`; - reads it from standard input.",
        ),
    ],
    as_json: Json = False,
) -> None:
    """Print a job file for a torchrun command."""
    from distlaunch.compat.from_torchrun import command_draft
    from distlaunch.here import cpu_count
    from distlaunch.job.file import STDIN, read_text

    given = [read_text(STDIN)] if words == [STDIN] else words
    _print(command_draft(given, cpu_count()), as_json)


@imports.command("sbatch")
def from_sbatch(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="The batch script, or - for standard input.")
    ],
    as_json: Json = False,
) -> None:
    """Print a job file for a Slurm batch script."""
    from distlaunch.compat.from_sbatch import sbatch_draft
    from distlaunch.here import cpu_count
    from distlaunch.job.file import read_text, source_of

    _print(sbatch_draft(read_text(script), source_of(script), cpu_count()), as_json)


@imports.command("accelerate")
def from_accelerate(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG.YAML", help="The file from `accelerate config`, or - for standard input."
        ),
    ],
    program: Program = None,
    as_json: Json = False,
) -> None:
    """Print a job file for an accelerate config."""
    from distlaunch.compat.from_accelerate import accelerate_draft
    from distlaunch.job.file import read_text, source_of
    from distlaunch.job.yaml_document import parse

    source = source_of(config)
    _print(accelerate_draft(parse(read_text(config), source), source, program or ()), as_json)


@imports.command("hostfile")
def from_hostfile(
    hosts: Annotated[
        str,
        typer.Argument(
            metavar="HOSTS", help="An Open MPI, DeepSpeed or Horovod hostfile, or - for standard input."
        ),
    ],
    program: Program = None,
    as_json: Json = False,
) -> None:
    """Print a job file for the hosts of a hostfile."""
    from distlaunch.compat.draft import hostfile_draft
    from distlaunch.job.file import read_text, source_of

    _print(hostfile_draft(read_text(hosts), source_of(hosts), program or ()), as_json)


def _print(draft: "Draft", as_json: bool) -> None:
    if as_json:
        print_json(draft.document())
    else:
        print_text(draft.text())
