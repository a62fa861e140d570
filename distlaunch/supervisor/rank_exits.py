"""The start and the exit of workers.

`root_cause` picks the rank to report. What follows isn't decided here: `step.py` passes `AttemptFailed` and
`JobOver` to `allocation_end`, which hands them on to `restarting` or `stopping`.
"""

import errno

from distlaunch.agent.messages import OutputLost, WorkerExited, WorkerStarted, WorkerUnstarted
from distlaunch.diagnosis.exits import words_of
from distlaunch.job.spec import JobSpec
from distlaunch.supervisor import root_cause, stalling
from distlaunch.supervisor.actions import ShowMessage
from distlaunch.supervisor.events import AttemptFailed, JobOver, Step
from distlaunch.supervisor.nodes import Exited, WorkerPhase
from distlaunch.supervisor.stalling import dumping
from distlaunch.supervisor.state import Cause, Phase, State, Timer


def on_worker_started(event: WorkerStarted, rank: int, state: State, now: float) -> Step:
    """Record that a worker is running."""
    return state.with_worker(rank, phase=WorkerPhase.RUNNING, pid=event.pid, cpus=event.cpus), ()


def on_worker_unstarted(event: WorkerUnstarted, rank: int, state: State, now: float) -> Step:
    """End the job because a worker can't be started. The job file must be wrong."""
    state = state.with_worker(rank, phase=WorkerPhase.UNSTARTED)
    # As in a shell: 127 if the program doesn't exist, 126 if it can't be run.
    status = 127 if event.errno == errno.ENOENT else 126
    advice = unstarted_advice(state.spec, event.node, event.stage, event.errno)
    text = f"{state.named(rank)} could not be started: {event.text}{advice}"
    return state, (JobOver(Cause(text, status, now, rank, event.node)),)


def unstarted_advice(spec: JobSpec, node: int, stage: str, code: int) -> str:
    """Return advice on which key of the job file to check. It is appended to the agent's error.

    `stage` and `code` are `stage` and `errno` of `WorkerUnstarted`.
    """
    if not spec.places:  # no job file: the command line of torchrun
        return ""
    if stage == "workdir":
        return f" ({_workdir_key(spec, node)})"
    program = spec.program_of(spec.pool[node])
    kind, word = program.kind, program.words[0]
    looked_for = stage == "script" or (stage == "exec" and kind == "command")
    if code != errno.ENOENT or not looked_for or not program.placed:
        return ""
    if word.startswith(("/", "~")):
        return f" (set by {kind if spec.pool[node].script is None else f'{spec.pool[node].path}.script'})"
    return f"; a relative {kind} is looked for in the node's workdir ({_workdir_key(spec, node)})"


def _workdir_key(spec: JobSpec, node: int) -> str:
    if spec.pool[node].workdir is not None:
        return f"set by {spec.pool[node].path}.workdir"
    file = spec.invocation.file
    default = "the job file's directory" if file else "the current directory, since the job is in no file"
    return "set by workdir" if "workdir" in spec.places else f"by default {default}"


def on_worker_exited(event: WorkerExited, rank: int, state: State, now: float) -> Step:
    """Record the exit of a worker.

    The rank may have died of a dump of its stacks, failed, or completed the success of the job.
    """
    if isinstance(state.workers[rank].phase, Exited):
        return state, ()
    running = state.phase is Phase.RUNNING
    dumped = stalling.died_of_its_dump(state, rank, event.status)
    stopped = dumped or not (running or event.unasked or event.at < state.ended_at)
    exited = Exited(event.status, event.at, stopped, event.error_record, event.oom_kills, event.shm)
    state = state.with_worker(rank, phase=exited)
    if dumped:
        return stalling.dump_came(state, rank, event.words, now)
    if event.status != 0:
        return _rank_failed(state, rank, event, now)
    if not (running and state.succeeded) or state.asked:
        return state, ()
    text = f"{state.called(rank)} finished, so the others are stopped (success: {state.spec.success})"
    return state, (*((ShowMessage("info", text),) if state.workers.counts.alive else ()), JobOver())


def on_output_lost(event: OutputLost, rank: int, state: State, now: float) -> Step:
    """Report how much output a node was unable to keep."""
    stream = "stderr" if event.stream else "stdout"
    lost = f"{event.size} bytes of {state.called(rank)}'s {stream} were lost"
    return state, (ShowMessage("warning", f"{lost}: its node had no room to buffer them"),)


def _rank_failed(state: State, rank: int, event: WorkerExited, now: float) -> Step:
    """End the attempt after a nonzero exit, once the root cause is clear.

    If the rank merely lost a peer, wait for a better cause until Timer.VERDICT.
    """
    words = words_of(event.status, event.words, event.error_record)
    if words.peer_gone:
        state = root_cause.with_exit(state, rank, peer_gone=True, timed_out=words.timed_out)
    if words.stack:
        state = state.with_worker(rank, stack=words.stack)
    if state.phase is not Phase.RUNNING:
        return root_cause.with_earlier_cause(state, rank, event, words), ()
    if words.peer_gone and dumping(state):
        return state, ()  # the lost peer died of its dump
    cause = root_cause.exit_cause(state, rank, event, words)
    if not cause.peer_gone:
        return state, (AttemptFailed(cause),)
    if state.suspect is not None:
        return state, ()
    evidence = root_cause.capture(state)
    state = state.unwatched()._replace(suspect=cause).with_timer(Timer.VERDICT, now + root_cause.VERDICT_S)
    return state, tuple(evidence)
