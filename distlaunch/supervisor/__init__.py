"""The policy of a run, pure: `step(state, event, now)` returns the next state and the actions. No I/O.

    event ─▶ handler ─▶ findings ─▶ deciders ─▶ rules of the job's phase ─▶ actions

`step.py` has all the tables. An event is a report of an agent (`agent/messages.py`) or an observation of the
controller (`events.py`). Its handler records what is now known in the `State` (`state.py`, `nodes.py`). What
follows elsewhere is a finding (`findings.py`), for which one function decides. The parts:

    connecting      nodes come, are lost, and return
    preparing       the plan, the port, the routes
    joining         ranks that haven't joined the rendezvous
    stalling        ranks that neither print nor compute
    rank_exits      ranks that exit, or can't be started
    root_cause      the rank to name when several fail, time out or stall
    allocation_end  whether the scheduler is ending the job: every failure is decided here first
    restarting      a new attempt, or the end of the job
    stopping        the end of all ranks

A deadline is a `Timer` in the state, and `step.py` names what happens when it passes. `summary.py` and
`status.py` describe a run, and `history.py` writes its events. `codec.py` converts reports of agents to
events, and actions to commands. `starting.py` makes the command that starts the workers of a node.
"""
