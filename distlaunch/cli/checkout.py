"""`checkout`: writes the code of a run into a directory."""

import os
from typing import Annotated

from typer import Argument

from distlaunch.cli.options import Json
from distlaunch.cli.output import print_json, say
from distlaunch.cli.runs import offered
from distlaunch.errors import UsageError
from distlaunch.runs.find import find
from distlaunch.wording import counted

_RUN = "A run's ID, a unique prefix of its ID, its directory, or the name or file of its job."
Run = Annotated[str, Argument(metavar="RUN", help=_RUN, autocompletion=offered)]
Folder = Annotated[str, Argument(metavar="DIRECTORY", help="A new directory for the code.")]


def checkout(which: Run, folder: Folder, as_json: Json = False) -> None:
    """Write the code of a run that used `sync` to a new directory."""
    from distlaunch.launch.snapshot import check_out

    if os.path.lexists(folder):
        raise UsageError(f"{folder} already exists; specify a new directory")
    found = find(which)
    files = check_out(found.folder, folder)
    if as_json:
        print_json({"run": found.id, "directory": os.path.abspath(folder), "files": files})
        return
    say(f"wrote {counted(files, 'file')} to {folder}")
