"""The program's entry: `distlaunch`, `python -m distlaunch`."""

import sys


def main() -> None:
    """Run the command line and exit with its documented status."""
    try:
        from distlaunch.cli.app import run_app

        status = run_app()
    except KeyboardInterrupt:
        status = 130  # while importing or parsing: nothing was started yet
    sys.exit(status)


if __name__ == "__main__":
    main()
