"""The entry point of `distlaunch` and `python -m distlaunch`; `distlaunch/__init__.py` has an overview."""

import contextlib
import errno
import gc
import io
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

_INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Run the command line and exit with its documented status."""
    gc.disable()  # imports create no garbage; saves 5 ms at startup
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, the exit statuses of children are lost
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as under nohup
        signal.signal(signal.SIGINT, _interrupted)
    try:
        from distlaunch.cli.output import fill_standard_descriptors  # a Ctrl-C meanwhile is handled

        fill_standard_descriptors()
        _print_anything()
        _leave(_run_command(sys.argv[1:]))
    except KeyboardInterrupt:
        _leave(_INTERRUPTED)  # while importing or parsing: nothing has been started yet
    except OSError as error:
        if _directory_is_gone():
            _fail("the current directory no longer exists: cd to one that does", 2)
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        _fail("too many open files: raise the limit with `ulimit -n`", 1)
    except MemoryError:
        _fail("out of memory; check the limits shown by `ulimit -v` and `ulimit -d`", 1)
    except UnicodeEncodeError as error:
        if error.encoding != sys.getfilesystemencoding():
            raise
        name, encoding = ascii(error.object), error.encoding
        _fail(f"this locale's encoding, {encoding}, can't represent {name}: try LC_ALL=C.UTF-8", 2)


def _fail(text: str, status: int) -> None:
    sys.stderr.write(f"distlaunch: {text}\n")
    _leave(status)


def _directory_is_gone() -> bool:
    try:
        os.getcwd()
    except OSError:
        return True
    return False


def _interrupted(signum: int, frame: FrameType | None) -> None:
    """Unwind at the first Ctrl-C; exit immediately at the next, without a traceback."""
    signal.signal(signal.SIGINT, _interrupted_again)
    raise KeyboardInterrupt


def _interrupted_again(signum: int, frame: FrameType | None) -> None:
    _end(_INTERRUPTED, by_ctrl_c=_has_a_terminal())


def _run_command(words: Sequence[str]) -> int:
    """Run the command. Only distlaunch's own errors are caught, so a bug shows its traceback."""
    from distlaunch.errors import DistlaunchError

    try:
        return _command_of(words)
    except DistlaunchError as error:
        from distlaunch.cli.output import say

        say(str(error))
        return error.exit_status


def _command_of(words: Sequence[str]) -> int:
    command = words[0] if words else ""
    if command == "exec":  # first, because many tasks may be waiting
        from distlaunch.cli.exec_task import run_exec

        return run_exec(words[1:])
    if command == "torchrun":  # its command line is torchrun's, not Typer's
        from distlaunch.cli.torchrun import run_torchrun

        return run_torchrun(words[1:])
    if command == "run":
        from distlaunch.cli.run import plain_options, run_with

        if options := plain_options(words[1:]):
            return run_with(options)
    from distlaunch.cli.app import run_app

    return run_app(words)


def _print_anything() -> None:
    """Make stdout and stderr print non-UTF-8 names unchanged, and escape characters they can't encode."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="surrogateescape" if stream.encoding == "utf-8" else "backslashreplace")


def _leave(status: int) -> None:
    """Flush the output, and exit without finalizing the interpreter, which would take 7 ms."""
    by_ctrl_c = status == _INTERRUPTED and _has_a_terminal() and _got_ctrl_c()
    # Another Ctrl-C has nothing to stop. (With SIG_IGN, Python would report a Ctrl-C that arrives now.)
    signal.signal(signal.SIGINT, lambda *_: None)
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        status = status or 141
    except OSError as error:
        with contextlib.suppress(OSError):
            os.write(2, f"distlaunch: can't write to stdout: {error.strerror}\n".encode())
        status = status or 1
    _end(status, by_ctrl_c)


def _end(status: int, by_ctrl_c: bool) -> None:
    if by_ctrl_c:
        # After Ctrl-C, a shell goes on with its loop unless the signal itself ended the command.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)  # has no effect on the first process of a container
    os._exit(status)


def _has_a_terminal() -> bool:
    return any(map(os.isatty, range(3)))


def _got_ctrl_c() -> bool:
    """Return whether SIGINT arrived, at `_interrupted` or at a `Signals`."""
    from distlaunch.signals import caught  # takes 5 ms, and few commands end this way

    return signal.getsignal(signal.SIGINT) is _interrupted_again or signal.SIGINT in caught


if __name__ == "__main__":
    main()
