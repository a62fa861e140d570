"""The commands that tell an agent what to do, from what the supervisor wants and the plan."""

import signal
from collections.abc import Mapping, Sequence
from typing import Any

from distlaunch.agent import messages
from distlaunch.job.spec import JobSpec
from distlaunch.plan.layout import (
    LaunchPlan,
    NodePlan,
    NodeRank,
    WorkerPlan,
    common_contract,
    meeting_of,
    workers,
)
from distlaunch.plan.output import destinations
from distlaunch.state.actions import (
    Close,
    DumpStacks,
    FindRoute,
    GiveNotice,
    HoldPort,
    Reap,
    StartWorkers,
    StopWorkers,
)
from distlaunch.state.job import State
from distlaunch.state.nodes import Route, route_of

AgentAction = HoldPort | FindRoute | StartWorkers | StopWorkers | DumpStacks | GiveNotice | Reap | Close
"""What is for an agent to do."""


def command_for(action: AgentAction, state: State, run_id: str) -> tuple[Any, ...]:
    """The command that has an agent do what the supervisor wants."""
    why = state.cause.text if state.cause else ""
    match action:
        case StartWorkers():
            return _start(state, action.node, run_id)
        case StopWorkers():
            return messages.StopWorkers(action.grace_s, why)
        case Close():
            return messages.Close(action.grace_s, action.signum, state.outcome, why)
        case Reap():
            return messages.Reap(run_id)
    kind = getattr(messages, type(action).__name__)  # the command has the action's fields, but for the node
    return kind(*(list(value) if isinstance(value, tuple) else value for value in action[1:]))  # type: ignore[no-any-return]


def running_workers(state: State, run_id: str) -> dict[NodeRank, list[WorkerPlan]]:
    """Each node's workers, as they are started in the current generation."""
    assert state.plan is not None
    return {part.node_rank: _workers_of(state, part, run_id) for part in state.plan.nodes}


def _workers_of(state: State, part: NodePlan, run_id: str) -> list[WorkerPlan]:
    assert state.plan is not None
    assert state.port is not None
    meeting = meeting_of(state.plan, run_id, state.port, state.restart_count)
    way = route_of(state.nodes[part.node]) or Route()
    return workers(state.plan, part, meeting, way.interface, way.source)


def _start(state: State, node: int, run_id: str) -> messages.StartWorkers:
    assert state.plan is not None
    assert state.port is not None
    part = state.plan.part_of(node)
    assert part is not None
    planned = _workers_of(state, part, run_id)
    shared = common_contract(planned)
    times = state.spec.timeouts
    return messages.StartWorkers(
        generation=state.generation,
        run_id=run_id,
        grace_s=times.stop_s,
        lease_s=times.lease_s,
        stall_s=times.stall_s,
        watch_port=state.port,
        hosts_store=part.node_rank == 0,
        notice=signal.Signals[f"SIG{state.spec.on_notice}"],
        flight=state.plan.backend == "nccl",
        temporary=list(planned[0].temporary),
        # What all workers of the node have in common travels once.
        env=_environment(state.spec, planned[0], run_id) | shared,
        binding=binding_of(state.spec, part),
        workers=_worker_specs(state, part, planned, shared),
    )


def _environment(spec: JobSpec, worker: WorkerPlan, run_id: str) -> dict[str, str]:
    """What the job sets; {job_id} is for trackers, which resume by it after a restart."""
    job_id = spec.invocation.earlier.job_id if spec.invocation.earlier else run_id
    env = {name: value.text for name, value in worker.env.items()}
    if spec.invocation.placeholders:
        env = {name: text.replace("{job_id}", job_id) for name, text in env.items()}
    return env | {"DISTLAUNCH_RUN_ID": run_id, "DISTLAUNCH_JOB_ID": job_id}


def binding_of(spec: JobSpec, part: NodePlan) -> messages.Binding | None:
    """The CPUs that the job wants for a node's workers."""
    binding = spec.binding
    return messages.Binding(binding.how, part.gpus, list(binding.cpus)) if binding else None


def _worker_specs(
    state: State, part: NodePlan, planned: Sequence[WorkerPlan], shared: Mapping[str, str]
) -> list[messages.WorkerSpec]:
    assert state.plan is not None
    shares = shared_descriptors(state.plan, part, state.generation)
    return [
        messages.WorkerSpec(
            local_rank=worker.local_rank,
            argv=list(worker.argv),
            cwd=worker.cwd,
            paths=list(worker.paths),
            env={name: value for name, value in worker.contract.items() if name not in shared},
            defaults=dict(worker.defaults),
            one_device="CUDA_VISIBLE_DEVICES" in worker.contract,
            shares=shares[worker.rank],
        )
        for worker in planned
    ]


def shared_descriptors(plan: LaunchPlan, part: NodePlan, generation: int) -> Mapping[int, list[int]]:
    """Rank → which of stdin (0) and stdout (1) are the command's own."""
    if not plan.spec.invocation.shares_stdio or part.logs is not None:
        return {rank: [] for rank in part.ranks}
    streams = destinations(plan, generation)
    return {rank: [0, 1] if streams[rank, 0].direct else [0] for rank in part.ranks}
