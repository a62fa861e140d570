"""The program's entry: `distlaunch`, `python -m distlaunch`."""

import gc
import os
import sys


def main() -> None:
    """Run the command line and exit with its documented status."""
    gc.disable()  # nothing that imports create is garbage: 5 ms of a start
    try:
        if sys.argv[1:2] == ["run"]:
            from distlaunch.launch.opening import ahead

            ahead.start()
        from distlaunch.cli.app import run_app

        status = run_app()
    except KeyboardInterrupt:
        status = 130  # while importing or parsing: nothing was started yet
    _leave(status)


def _leave(status: int) -> None:
    """Exit without taking the interpreter apart (7 ms), once everything is written."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        status = status or 141
    os._exit(status)


if __name__ == "__main__":
    main()
