"""Results on stdout."""

import json
import os
import sys

from distlaunch.errors import DistlaunchError, Exit

INDENTED = 1 << 18
"""Characters of JSON up to which it is indented for people to read."""


class ReaderLeftError(DistlaunchError):
    """Whoever read our output has left: there is nobody to tell, and nothing to do."""

    exit_status = Exit.BROKEN_PIPE


def reader_left() -> ReaderLeftError:
    """The error to raise; what is still buffered is not tried again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return ReaderLeftError()


def print_json(document: object) -> None:
    """One JSON document on stdout."""
    text = json.dumps(document)
    small = len(text) < INDENTED  # to indent what thousands of ranks have takes json half a second
    print_text((json.dumps(document, indent=2) if small else text) + "\n")


def print_text(text: str) -> None:
    """`text` on stdout; a reader that leaves ends the command, with the status that a shell gives it."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise reader_left() from None
