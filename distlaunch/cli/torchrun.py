"""`distlaunch torchrun`: runs the command line of torchrun."""

import errno
import os
import sys
from collections.abc import Sequence

from distlaunch.cli.output import print_text, say
from distlaunch.compat import torchrun_job
from distlaunch.compat.flags import FLAGS, parse_flags
from distlaunch.errors import DistlaunchError, Exit
from distlaunch.job.spec import JobSpec

NOT_FOUND = 127
"""The exit status that shells use for a missing program."""
USAGE = """\
usage: distlaunch torchrun [flags] SCRIPT [script arguments]

Run a torchrun command line with distlaunch. It starts in a tenth of a second, a failure on one node stops all
nodes, and the exit status is that of the first worker that failed. The environment variable PET_<FLAG> sets
a flag's default. Commands that need torch's own elastic agent, such as those with etcd or --logs-specs, are
handed over to it.

flags:
{flags}

docs/torchrun.md describes what each flag does.
"""


def run_torchrun(words: Sequence[str]) -> int:
    """Run a torchrun command line; return its exit status. Raises `DistlaunchError`."""
    flags = parse_flags(words, os.environ)
    if flags.help:
        from textwrap import indent, wrap  # only help needs it

        names = "\n".join(wrap(", ".join(flag.name for flag in FLAGS), 100, break_on_hyphens=False))
        print_text(USAGE.format(flags=indent(names, "  ")))
        return Exit.OK
    if why := torchrun_job.left_to_torch(flags, os.environ):
        _hand_over(why, words)
    for line in torchrun_job.flag_messages(flags):
        say(line)
    place = here()
    _check_python(os.environ.get("PYTHON_EXEC"))
    spec = torchrun_job.job_of(flags, place)
    from distlaunch.cli.run import run_gathered, run_shown  # after the command line has been parsed

    if flags.nodes[1] == 1:
        return run_shown(spec, quiet=True).state.outcome
    gathering = torchrun_job.gathering_of(flags, place.hostname, os.environ)
    for line in torchrun_job.gathering_messages(flags):
        say(line)
    arrival = gathering.arrival._replace(lacks=_lacks(spec))
    return run_gathered(spec, gathering._replace(arrival=arrival))


def _lacks(spec: JobSpec) -> str:
    """Return why the program can't be started on this node, or "". A run that has started refuses it then."""
    from shutil import which  # few commands run on several nodes

    from distlaunch.agent.needs import digest
    from distlaunch.launch.join import MAX_LACKS
    from distlaunch.supervisor.checking import own_needs

    text, program = "", spec.program
    if script := own_needs(spec, 0).program:
        try:
            digest(os.path.expanduser(script))
        except OSError as error:
            text = f"can't read the script {script}: {error.strerror}"
    elif program.kind == "command" and which(program.words[0]) is None:
        text = f"can't find the program {program.words[0]}"
    return "".join(char if char.isprintable() else "?" for char in text)[:MAX_LACKS]


def _check_python(python: str | None) -> None:
    """Raise `DistlaunchError` if the interpreter is missing, before waiting for other nodes."""
    from shutil import which  # few commands name an interpreter

    if python and which(python) is None:
        why = os.strerror(errno.EACCES if os.path.exists(python) else errno.ENOENT)
        error = DistlaunchError(f"PYTHON_EXEC: {python}: {why}")
        error.exit_status = NOT_FOUND
        raise error


def here() -> torchrun_job.Here:
    """Return facts about this machine and process."""
    from distlaunch.agent import scratch
    from distlaunch.agent.gpus import gpu_count
    from distlaunch.here import cpu_count

    return torchrun_job.Here(
        directory=os.getcwd(),
        hostname=os.uname().nodename or "localhost",
        python=sys.executable,
        temporary=(*scratch.places(), scratch.MEMORY),
        gpus=gpu_count(),
        cpus=cpu_count(),
        environ=os.environ,
    )


def _hand_over(why: str, words: Sequence[str]) -> None:
    """Exec torch's own elastic agent."""
    python = os.environ.get("PYTHON_EXEC") or sys.executable
    say(f"{why} needs torch's elastic agent; handing over to {python} -m torch.distributed.run")
    sys.stderr.flush()
    try:
        os.execvp(  # noqa: S606 — there is no shell, as wanted
            python, [python, "-m", "torch.distributed.run", *words]
        )
    except OSError as error:
        raise DistlaunchError(f"PYTHON_EXEC: {python}: {error.strerror}") from None
