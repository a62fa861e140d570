"""What the command line prints: results on stdout, its own words on stderr."""

import contextlib
import os
import sys
from collections.abc import Iterator

from distlaunch.errors import DistlaunchError, Exit
from distlaunch.wording import json_text


class ReaderLeftError(DistlaunchError):
    """Whoever read our output has left: there is nobody to tell, and nothing to do."""

    exit_status = Exit.BROKEN_PIPE


@contextlib.contextmanager
def while_read() -> Iterator[None]:
    """Raise `ReaderLeftError` if the reader of stdout leaves; what is still buffered is dropped."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise ReaderLeftError from None


def print_json(document: object) -> None:
    """One JSON document on stdout."""
    print_text(json_text(document, indent=2))


def print_text(text: str) -> None:
    """`text` on stdout; a reader that leaves ends the command, with the status that a shell gives it."""
    with while_read():
        sys.stdout.write(text)
        sys.stdout.flush()


def say(text: str) -> None:
    """Print `text` on stderr, each line as ours; escaped on a terminal: messages quote files."""
    if sys.stderr.isatty():
        from distlaunch.observers.console import escape

        text = escape(text)
    for line in text.splitlines():
        print(f"distlaunch: {line}", file=sys.stderr)
