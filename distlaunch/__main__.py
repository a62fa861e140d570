"""The program's entry: `distlaunch`, `python -m distlaunch`."""

import gc
import os
import signal
import sys


def main() -> None:
    """Run the command line and exit with its documented status."""
    gc.disable()  # nothing that imports create is garbage: 5 ms of a start
    _fill_standard_descriptors()
    try:
        if sys.argv[1:2] in (["run"], ["torchrun"]):
            from distlaunch.launch.opening import ahead

            ahead.start(shares_stdio=sys.argv[1] == "torchrun")
        status = _run_command()
    except KeyboardInterrupt:
        status = 130  # while importing or parsing: nothing was started yet
    _leave(status)


def _run_command() -> int:
    if sys.argv[1:2] == ["torchrun"]:  # its command line is torchrun's, not Typer's
        from distlaunch.cli.torchrun import run_torchrun

        return run_torchrun(sys.argv[2:])
    from distlaunch.cli.app import run_app

    return run_app()


def _fill_standard_descriptors() -> None:
    """Open /dev/null for a standard stream that the caller closed: a pipe of ours would take its number."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _leave(status: int) -> None:
    """Exit without taking the interpreter apart (7 ms), once everything is written."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is over: another Ctrl-C has nothing to end
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream:  # Python has none for a descriptor that was closed
                stream.flush()
    except OSError:
        status = status or 141
    os._exit(status)


if __name__ == "__main__":
    main()
