"""Starts distributed PyTorch jobs: one YAML file, one command, any number of machines.

    __main__, cli/    read the command line; run a job or print results; open an agent here meanwhile
    JobSpec           from job.yaml: cli/job_file; from torchrun's command line: compat/

    launch/start      opens a Link to each node (link, opening; by transports/) and makes the run directory
    launch/gather     if something else starts distlaunch per node or rank, one launcher controls the run,
                      and the others join it (inbound, join) as agents (joined_agent)
      on the node     sh ─▶ guardian ─▶ agent (agent/, sent over the link) ─▶ workers

    launch/controller makes all decisions, and carries them out through agents
                      agent ─Frame─▶ Links ─report─▶ supervisor/codec ─Event─▶ supervisor/step(State, Event)
                      agent ◀─Frame─ Links ◀─command───────────────────◀─Send───┘    │
                                                                                     └▶ observers/
                      at the end: State.outcome is the exit status, and supervisor/summary describes the end
    supervisor/       pure; once agents are up, plan/ makes a LaunchPlan of JobSpec and their Facts: ranks,
                      and each worker's environment (contract.py); diagnosis/ explains why a worker failed
    observers/        the run directory, the terminal, a run full-screen

In addition: `schedulers/` (hosts from a scheduler, and a job for its queue: one module each), `kubernetes/`
(a job for a cluster), `check/` (findings about nodes before a launch: agent/needs for those of `run`),
`runs/` (runs by their directories: ps, logs, attach, stop, replay, why they failed, from agent/evidence, too,
and pages about them), `api` (runs from Python; a child process controls each: cli/child),
`launch/snapshot`, `supervisor/placing` and `agent/tree` (the code that a job brings to its nodes;
agent/setup builds its environment), `cli/schemas` (JSON Schemas of what --json prints). At the top: `errors`,
`signals`, `wording` (counts, durations and lists for messages), `here` (differences between Linux and macOS).

Each layer imports only from itself and those above it in this list:

    agent/
    transports/, job/, plan/, supervisor/, diagnosis/, check/, schedulers/, compat/, kubernetes/, contract,
    errors, wording   (all pure)
    observers/, here, signals
    launch/, runs/
    cli/, api, __main__

Two paths through the program, by module:

    nodes → RANK      cli/job_file, job/keys, job/build, job/nodes; supervisor/connecting, preparing
                      (plan/placement, plan/workers, contract); agent/messages, workers, worker
    exit → status     agent/sweep, workers, messages; launch/controller, supervisor/codec, step, ranks
                      (diagnosis/exits), root_cause, allocation_end, restarting or stopping, State.outcome;
                      cli/run, __main__

Tables to extend: job keys in job/keys, torchrun flags in compat/flags, `TABLE` in schedulers/, transports/
and observers/, `HANDLERS`, `_DUE` and `_RULES` in supervisor/step, `_commands` in agent/serve with `OBEYED`
in launch/joined_agent, commands in cli/app. CONTRIBUTING.md describes what belongs to each.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from distlaunch.api import Job, Line, Plan, RankError, Result, RootCause, Run, RunError, call, list_runs
    from distlaunch.errors import DistlaunchError, JobError, UsageError

try:
    from distlaunch._version import __version__ as __version__
except ImportError:  # a checkout that was never installed: the build writes that module from git's tags
    __version__ = "0+unknown"
__all__ = [
    "DistlaunchError",
    "Job",
    "JobError",
    "Line",
    "Plan",
    "RankError",
    "Result",
    "RootCause",
    "Run",
    "RunError",
    "UsageError",
    "call",
    "list_runs",
]


def __getattr__(name: str) -> "Any":
    """Import the Python API when it is used. The commands don't need it."""
    if name not in __all__:
        raise AttributeError(f"module 'distlaunch' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("distlaunch.errors" if name in _ERRORS else "distlaunch.api"), name)


_ERRORS = ("DistlaunchError", "JobError", "UsageError")
