"""`distlaunch import`: converts the files and command lines of other launchers to job files."""

from typing import Annotated

import typer
from typer import Argument

from distlaunch.cli.job_file import STDIN, read_job, read_text, source_of
from distlaunch.cli.options import Json
from distlaunch.cli.output import print_json, print_text
from distlaunch.compat.draft import Draft, hostfile_draft
from distlaunch.errors import UsageError
from distlaunch.here import cpu_count

imports = typer.Typer(
    name="import",
    help="Print another launcher's command or file as a job file. Its subcommands accept --json.",
    no_args_is_help=True,
)
_WORDS = "The whole command, quoted, or its words after `--`; - reads it from standard input."
Words = Annotated[list[str], Argument(metavar="'COMMAND LINE' | - | -- WORDS…", help=_WORDS)]
Script = Annotated[str, Argument(metavar="SCRIPT", help="The batch script, or - for standard input.")]
_CONFIG = "The file written by `accelerate config`, or - for standard input."
Config = Annotated[str, Argument(metavar="CONFIG.YAML", help=_CONFIG)]
_HOSTS = "An Open MPI, DeepSpeed or Horovod hostfile, or - for standard input."
Hosts = Annotated[str, Argument(metavar="HOSTS", help=_HOSTS)]
_PROGRAM = "The script and its arguments."
Program = Annotated[list[str] | None, Argument(metavar="[-- SCRIPT ARGS…]", help=_PROGRAM)]


@imports.command("torchrun")
def from_torchrun(words: Words, as_json: Json = False) -> None:
    """Convert a torchrun command to a job file and print it."""
    from distlaunch.compat.from_torchrun import command_draft

    given = [read_job(STDIN)] if words == [STDIN] else words
    _print(command_draft(given, cpu_count()), as_json)


@imports.command("mpirun")
def from_mpirun(words: Words, as_json: Json = False) -> None:
    """Convert an mpirun command (Open MPI or MPICH) to a job file and print it."""
    from distlaunch.compat.from_mpirun import mpirun_draft

    _print(mpirun_draft([read_text(STDIN)] if words == [STDIN] else words), as_json)


@imports.command("sbatch")
def from_sbatch(script: Script, as_json: Json = False) -> None:
    """Convert a Slurm batch script to a job file and print it."""
    from distlaunch.compat.from_sbatch import sbatch_draft

    _print(sbatch_draft(read_text(script), source_of(script), cpu_count()), as_json)


@imports.command("accelerate")
def from_accelerate(config: Config, program: Program = None, as_json: Json = False) -> None:
    """Convert an accelerate config to a job file and print it."""
    from distlaunch.compat.from_accelerate import accelerate_draft
    from distlaunch.job.yaml_document import parse

    source = source_of(config)
    text = _file(config, "the file that `accelerate config` wrote")
    _print(accelerate_draft(parse(text, source), source, program or ()), as_json)


@imports.command("hostfile")
def from_hostfile(hosts: Hosts, program: Program = None, as_json: Json = False) -> None:
    """Convert a hostfile to a job file and print it."""
    _print(hostfile_draft(_file(hosts, "the hostfile"), source_of(hosts), program or ()), as_json)


def _file(path: str, what: str) -> str:
    """Return the text of a file that isn't a script. Raises `UsageError`."""
    if path.endswith(".py"):
        raise UsageError(f"{path} is a script: first name {what}, and then, after --, the script")
    return read_job(path)


def _print(draft: Draft, as_json: bool) -> None:
    if as_json:
        print_json(draft.document())
    else:
        print_text(draft.text())
