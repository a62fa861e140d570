"""Results on stdout."""

import json
import os
import sys

import typer

from distlaunch.errors import Exit


def print_json(document: object) -> None:
    """One JSON document on stdout."""
    print_text(json.dumps(document, indent=2) + "\n")


def print_text(text: str) -> None:
    """`text` on stdout; a reader that leaves ends the command, with the status that a shell gives it."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered must not be tried again
        raise typer.Exit(Exit.BROKEN_PIPE) from None
