"""What to do when a node of an allocation can't be used."""

from shlex import quote

from distlaunch.transports.failure import Kind, LinkFailure


def advice_for(failure: LinkFailure, host: str, job: str, python: str) -> str:
    """In a line, with a command to paste where there is one."""
    step = f"srun --jobid={job} --overlap -N1 -n1 -w {quote(host)}"
    try_python = f"try `{step} {quote(python)} -V`"
    match failure.kind:
        case Kind.NO_ALLOCATION:
            return f"the allocation is over: see `scontrol show job {job}`"
        case Kind.NODE_DOWN | Kind.UNREACHABLE | Kind.SILENT | Kind.LOST:
            return f"see `scontrol show node {quote(host)}`"
        case Kind.STEP_REFUSED:
            return f"try `{step} hostname`"
        case Kind.NO_PYTHON:
            return "set `python:` to an interpreter that exists there"
        case Kind.OLD_PYTHON:
            return "set `python:` to Python 3.8 or later"
        case _:
            return try_python
