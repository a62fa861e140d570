"""`distlaunch exec -- PROGRAM ARGS…`: becomes the program, as the rank that this task is."""

import os
import sys
from collections.abc import Mapping, Sequence

from distlaunch.allocation.engine_task import engine_task, task_names
from distlaunch.allocation.slurm_task import slurm_task
from distlaunch.allocation.task import Task, check_devices, check_master
from distlaunch.cli.stderr import say
from distlaunch.errors import DistlaunchError, UsageError, reason
from distlaunch.system.allocation import allocation_here
from distlaunch.task.environment import task_environment
from distlaunch.task.meeting import meet

USAGE = "usage: srun distlaunch exec [--virtual-local-rank] -- PROGRAM [ARGS…]"
HELP = f"""{USAGE}

Run PROGRAM as one rank of many, started task by task by srun, flux run or jsrun: sets RANK, LOCAL_RANK,
WORLD_SIZE, MASTER_ADDR, MASTER_PORT and the rest of torchrun's contract from the scheduler's variables, and
becomes the program.

  --virtual-local-rank  LOCAL_RANK is 0: each task sees only its own GPU (srun --gpus-per-task)
  -h, --help            Show this help and exit.
"""


def run_exec(words: Sequence[str]) -> int:
    """Become the program; the exit status if that can't be."""
    try:
        virtual, argv = _parsed(words)
        if not argv:
            print(HELP, end="")
            return 0
        environ = _environment(virtual)
    except DistlaunchError as error:
        say(str(error))
        return error.exit_status
    try:
        os.execvpe(argv[0], argv, environ)  # noqa: S606 — there is no shell, as wanted
    except OSError as error:
        say(f"{argv[0]}: {reason(error)}")
        return 127 if isinstance(error, FileNotFoundError) else 126


def _parsed(words: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether a task sees only its own GPU, and the program, none if help is wanted. Raises `UsageError`."""
    dashes = list(words).index("--") if "--" in words else len(words)
    options, argv = words[:dashes], list(words[dashes + 1 :])
    if {"-h", "--help"}.intersection(options):
        return False, []
    unknown = [word for word in options if word != "--virtual-local-rank"]
    if unknown or not argv:
        raise UsageError(f"{f'unexpected {unknown[0]}' if unknown else 'no program'}; {USAGE}")
    return bool(options), argv


def _environment(virtual: bool) -> dict[str, str]:
    environ = dict(os.environ)
    task = _task(environ)
    if not virtual:
        check_devices(task, environ)
    check_master(task, environ)
    given = environ.get("MASTER_PORT")
    port = int(given) if given else meet(task, say)
    sys.stdout.flush()
    return task_environment(task, environ, port, virtual)


def _task(environ: Mapping[str, str]) -> Task:
    names = task_names(environ)
    if names is None:
        return slurm_task(environ)
    allocation = allocation_here()
    return engine_task(names, environ, [node.host for node in allocation.nodes] if allocation else [])
