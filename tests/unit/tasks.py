"""The environment of a scheduler's task, taken from the plan of all tasks."""

from collections.abc import Mapping

from distlaunch.cli import exec_task
from distlaunch.plan.placement import Facts, make_plan
from distlaunch.plan.workers import meeting_of, workers
from distlaunch.schedulers.task import Task


def task_environment(task: Task, environ: Mapping[str, str], endpoint: tuple[str, int]) -> dict[str, str]:
    """The environment of the task's rank, whose controller is at `endpoint`; the other tasks are like it."""
    arrival = exec_task.gathering_of(task, False, environ).arrival
    spec = exec_task.job_of(task, ["true"], arrival)
    host, port = endpoint
    rendezvous = spec.rendezvous._replace(host=host, port=port)
    spec = spec._replace(nodes=spec.nodes * task.size, rendezvous=rendezvous)
    plan = make_plan(spec, {node: Facts("python") for node in range(task.size)})
    meeting = meeting_of(plan, "run", [port], spec.restarts_before)
    (worker,) = workers(plan, plan.nodes[task.rank], meeting)
    return {**worker.defaults, **environ, **worker.contract}


def variables(text: str) -> dict[str, str]:
    """An environment, from NAME=VALUE separated by blanks."""
    return dict(word.split("=", 1) for word in text.split())
