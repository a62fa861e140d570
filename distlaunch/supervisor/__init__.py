"""The policy of a run, without I/O: `step(state, event, now)` returns the next state and the actions.

    event ─▶ handler ─▶ findings ─▶ deciders ─▶ rules of the job's phase ─▶ actions

`step.py` contains the tables of handlers, deciders and rules. An event is a report from an agent
(`agent/messages.py`) or an observation by the controller (`events.py`). The event's handler records the new
facts in the `State` (`state.py`, `nodes.py`). If another part must react, the handler returns a finding
(`events.py`), and one function, the finding's decider, decides what follows. The parts:

    connecting      nodes that connect, are lost, or return
    preparing       the plan, the port, the routes, the workers
    checking        problems that would keep the ranks from working, found before they start
    ranks           ranks that start, join the rendezvous, stall and exit
    root_cause      the root cause when several ranks fail, time out or stall
    allocation_end  whether the scheduler is ending the job (every failure is checked here first)
    restarting      a new attempt, or the end of the job
    stopping        the end of all ranks

A deadline is a `Timer` in the state. `step.py` maps each timer to the function that handles its expiry.
`summary.py` and `status.py` describe a run. `codec.py` converts agents' reports to events, and events to
lines of JSON.
"""
