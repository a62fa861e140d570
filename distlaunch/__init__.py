"""Starts distributed PyTorch jobs: one YAML file, one command, any number of machines.

    __main__, cli/    read the command line, run or print what the others make; open an agent here meanwhile
    JobSpec           of job.yaml: system/job_file, job/; of torchrun's command line: dropin/

    launch/start      opens a Link to each node (links/, by its kind of transport/), makes the run folder
    launch/gather     if somebody else starts distlaunch per node or rank: one of them is the controller,
                      the others join it (links/door, links/dial) and become its agents (launch/joined)
      on the node     sh ─▶ guardian ─▶ agent (agent/, shipped over the link) ─▶ workers

    launch/loop       agent ─Frame─▶ links/ ─report─▶ translation/ ─Event─▶ supervisor/step(State, Event)
                      agent ◀─Frame─ links/ ◀─command─ translation/ ◀─Action─┘    │
                                                                                 └▶ observers/
    supervisor/       pure; once agents are there, plan/ makes a LaunchPlan of JobSpec and their Facts: ranks,
                      and each worker's environment (contract.py); diagnosis/ says why a worker failed
    observers/        the run folder, the terminal
    launch/supervise  at the end: State ─diagnosis/summary─▶ Summary: the words, the exit status

`state/` has the types of all this. Beside it: `schedulers/` (hosts from a scheduler, and a job for its queue:
one module each), `kubernetes/` (a job for a cluster),
`checks/` (check-port), `replay/` (a run again, from its events), `catalog/` and `follow/` (runs by their
folders: ps, logs, attach, stop). Each package says in its `__init__` what it holds; what to touch for
something new is tabled in CONTRIBUTING.md.
"""

__version__ = "0.1.0"
