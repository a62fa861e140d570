"""`checkout`: writes the code of a run into a directory."""

import os
from typing import Annotated

import typer
from typer import Argument

from distlaunch.cli.options import Json, SshConfig
from distlaunch.cli.output import print_json, say
from distlaunch.cli.runs import offered, run_elsewhere
from distlaunch.errors import UsageError
from distlaunch.runs.find import find
from distlaunch.wording import counted

_RUN = "A run's ID, a unique prefix of its ID, its directory, or the name or file of its job."
Run = Annotated[str, Argument(metavar="RUN", help=_RUN, autocompletion=offered)]
Folder = Annotated[str, Argument(metavar="DIRECTORY", help="A new directory for the code.")]


def checkout(
    context: typer.Context, run: Run, folder: Folder, as_json: Json = False, ssh_config: SshConfig = None
) -> None:
    """Write the code of a run that used `sync` to a new directory."""
    from distlaunch.launch.snapshot import check_out

    run_elsewhere(context, run, ssh_config)
    if os.path.lexists(folder):
        raise UsageError(f"{folder} already exists; specify a new directory")
    found = find(run)
    files = check_out(found.folder, folder)
    if as_json:
        print_json({"run": found.id, "directory": os.path.abspath(folder), "files": files})
        return
    say(f"wrote {counted(files, 'file')} to {folder}")
