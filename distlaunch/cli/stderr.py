"""What the command line itself has to say, on stderr."""

import sys


def say(text: str) -> None:
    """Print `text`, each line as ours; on a terminal without what it would obey, since files are quoted."""
    if sys.stderr.isatty():
        from distlaunch.observers.console import escape

        text = escape(text)
    for line in text.splitlines():
        print(f"distlaunch: {line}", file=sys.stderr)
