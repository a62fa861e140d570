"""Results on stdout."""

import json
import os
import sys

from distlaunch.errors import DistlaunchError, Exit


class ReaderLeftError(DistlaunchError):
    """Whoever read our output has left: there is nobody to tell, and nothing to do."""

    exit_status = Exit.BROKEN_PIPE


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
        raise ReaderLeftError from None
