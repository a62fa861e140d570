"""The program's entry: `distlaunch`, `python -m distlaunch`."""

import gc
import os
import signal
import sys
from types import FrameType

_INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Run the command line and exit with its documented status."""
    gc.disable()  # nothing that imports create is garbage: 5 ms of a start
    _fill_standard_descriptors()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as under nohup
        signal.signal(signal.SIGINT, _interrupted)
    try:
        if sys.argv[1:2] in (["run"], ["torchrun"]):
            from distlaunch.launch.opening import ahead

            ahead.start(shares_stdio=sys.argv[1] == "torchrun")
        _leave(_run_command())
    except KeyboardInterrupt:
        _leave(_INTERRUPTED)  # while importing or parsing: nothing was started yet


def _interrupted(signum: int, frame: FrameType | None) -> None:
    """The first Ctrl-C unwinds; another one leaves from wherever that has come to, without a traceback."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    raise KeyboardInterrupt


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
    # It is over: another Ctrl-C has nothing to end. (Python tells of one that comes as SIG_IGN is set.)
    signal.signal(signal.SIGINT, lambda *_: None)
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream:  # Python has none for a descriptor that was closed
                stream.flush()
    except OSError:
        status = status or 141
    os._exit(status)


if __name__ == "__main__":
    main()
