"""What the command line prints: results on stdout, its own words on stderr."""

import os
import sys

from distlaunch.errors import DistlaunchError, Exit
from distlaunch.wording import json_text


class ReaderLeftError(DistlaunchError):
    """Whoever read our output has left: there is nobody to tell, and nothing to do."""

    exit_status = Exit.BROKEN_PIPE


def reader_left() -> ReaderLeftError:
    """The error to raise; what is still buffered is not tried again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return ReaderLeftError()


def print_json(document: object) -> None:
    """One JSON document on stdout."""
    print_text(json_text(document, indent=2))


def print_text(text: str) -> None:
    """`text` on stdout; a reader that leaves ends the command, with the status that a shell gives it."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise reader_left() from None


def say(text: str) -> None:
    """Print `text` on stderr, each line as ours; escaped on a terminal: messages quote files."""
    if sys.stderr.isatty():
        from distlaunch.observers.console import escape

        text = escape(text)
    for line in text.splitlines():
        print(f"distlaunch: {line}", file=sys.stderr)
