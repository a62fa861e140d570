"""Starts distributed PyTorch jobs: one YAML file, one command, any number of machines.

    __main__, cli/    parse the command line, and run a job or print results; meanwhile, open a local agent
    JobSpec           made from job.yaml (cli/job_file) or from a torchrun command line (compat/)

    launch/start      opens a Link to each node (link, opening; using transports/), creates the run directory
    launch/gather     if another program starts distlaunch on each node or for each rank, one launcher
                      controls the run, and the others join it (inbound, join) as agents (joined_agent)
      on the node     sh ─▶ guardian ─▶ agent (agent/, sent over the link) ─▶ workers

    launch/controller makes all decisions, and carries them out through agents
                      agent ─Frame─▶ Links ─report─▶ supervisor/codec ─Event─▶ supervisor/step(State, Event)
                      agent ◀─Frame─ Links ◀─command───────────────────◀─Send───┘    │
                                                                                     └▶ observers/
                      at the end: State.outcome is the exit status, supervisor/summary describes the outcome
    supervisor/       pure; once the agents are up, plan/ turns the JobSpec and the agents' Facts into a
                      LaunchPlan: the ranks, and each worker's environment (contract.py); diagnosis/
                      explains why a worker failed
    observers/        write the run directory, and show the run on the terminal or full-screen

Other parts:

    schedulers/       hosts from a scheduler, and jobs for its queue; one module per scheduler
    kubernetes/       jobs for a cluster
    check/            findings about nodes before a launch; agent/needs has those of `run`
    runs/             runs, identified by their directories: ps, logs, attach, stop, replay; why a run failed
                      (also from agent/evidence), and pages about it
    api               runs from Python, each controlled by a child process (cli/child)
    code              the code that a job copies to its nodes: launch/snapshot, supervisor/placing and
                      agent/tree; agent/setup builds the environment
    cli/schemas       JSON Schemas of the output of --json
    at the top        errors, signals, wording (counts, durations and lists for messages), and here
                      (differences between Linux and macOS)

Each layer imports only from itself and from the layers above it in this list:

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

Tables to extend: job keys in job/keys; torchrun flags in compat/flags; `TABLE` in schedulers/, transports/
and observers/; `HANDLERS`, `_DUE` and `_RULES` in supervisor/step; `_commands` in agent/serve, together with
`OBEYED` in launch/joined_agent; and commands in cli/app. CONTRIBUTING.md describes how to extend each.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from distlaunch.api import Job, Line, Plan, RankError, Result, RootCause, Run, RunError, call, list_runs
    from distlaunch.errors import DistlaunchError, JobError, UsageError

try:
    from distlaunch._version import __version__ as __version__
except ImportError:  # a checkout that was never installed: the build writes the module from git tags
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
    """Import the Python API on first use, because the commands don't need it."""
    if name not in __all__:
        raise AttributeError(f"module 'distlaunch' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("distlaunch.errors" if name in _ERRORS else "distlaunch.api"), name)


_ERRORS = ("DistlaunchError", "JobError", "UsageError")
