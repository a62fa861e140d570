"""`distlaunch exec -- PROGRAM ARGS…`: becomes the program, as the rank that this task is."""

import os
import sys
from collections.abc import Mapping, Sequence

from distlaunch.allocation.engine_task import engine_task, task_names
from distlaunch.allocation.mpi_task import mpi_task
from distlaunch.allocation.slurm_task import slurm_task
from distlaunch.allocation.task import Task, check_devices, check_master
from distlaunch.cli.stderr import say
from distlaunch.errors import DistlaunchError, UsageError, reason
from distlaunch.system.allocation import allocation_here
from distlaunch.task.environment import task_environment
from distlaunch.task.meeting import meet

USAGE = "usage: distlaunch exec [--virtual-local-rank] -- PROGRAM [ARGS…]"
HELP = f"""{USAGE}

Run PROGRAM as one rank of many, started task by task by srun, mpirun, flux run or jsrun: sets RANK,
LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and the rest of torchrun's contract from their variables, and
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
    task, endpoint = _met(task, environ)
    sys.stdout.flush()
    return task_environment(task, environ, endpoint, virtual)


def _task(environ: Mapping[str, str]) -> Task:
    """mpirun's before the scheduler's, which may have started one task for all of it."""
    if task := mpi_task(environ):
        return task
    names = task_names(environ)
    if names is None:
        return slurm_task(environ)
    allocation = allocation_here()
    return engine_task(names, environ, [node.host for node in allocation.nodes] if allocation else [])


def _met(task: Task, environ: Mapping[str, str]) -> tuple[Task, tuple[str, int]]:
    """The task, and where the ranks meet: as the user has said, or as they agree."""
    if port := environ.get("MASTER_PORT"):
        return task, (_address(task, environ), int(port))
    if task.manager is None:
        return task, meet(task, say)
    from distlaunch.task.pmi import ProcessManager  # mpirun's tasks may have one

    manager = ProcessManager(task.manager)
    endpoint = manager.meet(task)
    number, count = manager.node_of(task.rank) or (None, None)
    manager.close()
    known = task._replace(step=manager.job, job=manager.job, node_rank=number, node_count=count)
    return known, endpoint


def _address(task: Task, environ: Mapping[str, str]) -> str:
    """The user's, or that of rank 0's host."""
    if told := environ.get("MASTER_ADDR"):
        return told
    if not task.on_one_node and not task.addresses:
        raise UsageError("MASTER_PORT is set, but not MASTER_ADDR: set both, or unset it")
    return "127.0.0.1" if task.on_one_node else task.addresses[0]
