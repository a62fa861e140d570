"""Starts distributed PyTorch jobs: one YAML file, one command, any number of machines.

    __main__, cli/    read the command line, run or print what the others make; open an agent here meanwhile
    JobSpec           of job.yaml: job/file, job/; of torchrun's command line: compat/

    launch/start      opens a Link to each node (transports/), makes the run folder
    launch/gather     if somebody else starts distlaunch per node or rank: one of them is the controller,
                      the others join it (transports/door, dial) and become its agents (launch/joined)
      on the node     sh ─▶ guardian ─▶ agent (agent/, shipped over the link) ─▶ workers

    launch/loop       agent ─Frame─▶ Links ─report─▶ translation/ ─Event─▶ supervisor/step(State, Event)
                      agent ◀─Frame─ Links ◀─command─ translation/ ◀─Action─┘    │
                                                                                 └▶ observers/
    supervisor/       pure; once agents are there, plan/ makes a LaunchPlan of JobSpec and their Facts: ranks,
                      and each worker's environment (contract.py); diagnosis/ says why a worker failed
    observers/        the run folder, the terminal
    launch/supervise  at the end: State ─supervisor/summary─▶ Summary: the words, the exit status

Beside it: `schedulers/` (hosts from a scheduler, and a job for its queue: one module each), `kubernetes/` (a
job for a cluster), `checks/` (check-port), `runs/` (runs by their folders: ps, logs, attach, stop; replayed
from their events). Each package says in its `__init__` what it holds; CONTRIBUTING.md has a table of what to
touch for what.
"""

__version__ = "0.1.0"
