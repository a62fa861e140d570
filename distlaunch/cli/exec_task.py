"""`distlaunch exec -- PROGRAM ARGS…`: runs the program as the rank that this task is."""

import os
import sys
from collections.abc import Mapping, Sequence

from distlaunch.allocation.engine_task import engine_task, task_names
from distlaunch.allocation.mpi_task import mpi_task
from distlaunch.allocation.slurm_task import slurm_task
from distlaunch.allocation.task import Task, check_devices, check_master
from distlaunch.cli.stderr import say
from distlaunch.errors import DistlaunchError, UsageError
from distlaunch.job.spec import Earlier, Invocation, JobSpec, Logs, NodeSpec, Program, TaskPlace, TorchrunLogs
from distlaunch.links.join import Arrival, Gathering, ports_for
from distlaunch.system.allocation import allocation_here

USAGE = "usage: distlaunch exec [--virtual-local-rank] -- PROGRAM [ARGS…]"
HELP = f"""{USAGE}

Run PROGRAM as one rank of many, started task by task by srun, mpirun, flux run or jsrun: sets RANK,
LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and the rest of torchrun's contract from their variables.
The task of rank 0 controls all: when a rank fails, the others are stopped, and each task says which it was.

  --virtual-local-rank  LOCAL_RANK is 0: each task sees only its own GPU (srun --gpus-per-task)
  -h, --help            Show this help and exit.
"""


def run_exec(words: Sequence[str]) -> int:
    """Run the program as this task's rank; the exit status."""
    try:
        virtual, argv = _parsed(words)
        if not argv:
            print(HELP, end="")
            return 0
        environ = os.environ
        task = _task(environ)
        if not virtual:
            check_devices(task, environ)
        check_master(task, environ)
        return _run(_job(task, argv, virtual), task, _address(task, environ), environ.get("MASTER_PORT"))
    except DistlaunchError as error:
        say(str(error))
        return error.exit_status


def _run(spec: JobSpec, task: Task, hosts: tuple[str, ...], port: str | None) -> int:
    from distlaunch.cli.running import run_gathered, run_shown  # after the command line is understood

    if task.size == 1:
        return run_shown(spec, quiet=True).state.outcome
    (node,) = spec.nodes
    job = f"{task.step} {task.restarts} {os.getuid()}"
    sizes = (task.size, task.size)
    gathering = Gathering(
        Arrival(job, node.label, 1, sizes, task.rank, place=node.place, gpus=node.gpus),
        hosts=hosts,
        ports=(int(port),) if port else ports_for(job),
        serves=task.rank == 0,
        fixed=port is not None,
        hint="check MASTER_ADDR",
    )
    return run_gathered(spec, gathering, own_first=True)


def _job(task: Task, argv: Sequence[str], virtual: bool) -> JobSpec:
    """The part of this task in the job: a node with one rank."""
    from distlaunch.agent import scratch

    place = TaskPlace(0 if virtual else task.local_rank, task.local_size, task.node_rank, task.node_count)
    gpus = 1 if task.devices and (virtual or task.devices >= task.local_size) else 0
    folder, *spares = scratch.places()
    return JobSpec(
        name=os.path.basename(argv[0]),
        nodes=(NodeSpec(os.uname().nodename or "localhost", gpus=gpus, procs=1, place=place),),
        program=Program("command", (argv[0],)),
        args=tuple(argv[1:]),
        workdir=os.getcwd(),
        logs=Logs(folder, temporary=True, torchrun=TorchrunLogs(), spares=tuple(spares)),
        rendezvous_id=task.step,
        python=sys.executable,
        source="the command line",
        invocation=Invocation(
            placeholders=False,
            shares_stdio=True,
            earlier=Earlier(task.job, task.restarts) if task.restarts else None,
        ),
    )


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


def _task(environ: Mapping[str, str]) -> Task:
    """mpirun's before the scheduler's, which may have started one task for all of it."""
    if task := mpi_task(environ):
        if task.manager is None or environ.get("MASTER_PORT"):
            return task
        from distlaunch.system.pmi import located  # of MPICH alone

        return located(task, task.manager)
    names = task_names(environ)
    if names is None:
        return slurm_task(environ)
    allocation = allocation_here()
    return engine_task(names, environ, [node.host for node in allocation.nodes] if allocation else [])


def _address(task: Task, environ: Mapping[str, str]) -> tuple[str, ...]:
    """By which rank 0's host is reached: the user's, else what the task knows."""
    if told := environ.get("MASTER_ADDR"):
        return (told,)
    if task.on_one_node:
        return ("127.0.0.1",)
    if not task.addresses:
        raise UsageError("MASTER_PORT is set, but not MASTER_ADDR: set both, or unset it")
    return task.addresses
