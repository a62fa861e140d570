"""The environment variables that scripts rely on, with torchrun's names and meanings.

Source: torch/distributed/elastic/agent/server/local_elastic_agent.py and the torchrun documentation,
torch 2.13.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from distlaunch.agent.frozen import Frozen
from distlaunch.agent.messages import StartWorkers, WorkerSpec

RESERVED = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "DISTLAUNCH_BACKEND", "DISTLAUNCH_RUN_ID", "DISTLAUNCH_JOB_ID"),
        *("DISTLAUNCH_AGENT", "DISTLAUNCH_DEADLINE"),
        *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
        *("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_SIGNALS_TO_HANDLE"),
    }
)
"""Variables that a job may not set, because distlaunch sets them for each worker or for the run.

OMP_NUM_THREADS is not included: like torchrun, distlaunch only provides a default for it.
"""


INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""The variables that name the ranks' network interface. `interface_variables` lists those of a backend."""
SENT = RESERVED - {"DISTLAUNCH_AGENT", "DISTLAUNCH_DEADLINE", "TORCHELASTIC_ERROR_FILE"} | {
    *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", *INTERFACE_VARIABLES),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT"),
}
"""The only variables that a controller may set for the workers of a launcher that has joined."""


def interface_variables(backend: str) -> tuple[str, ...]:
    """Return the variables that a backend reads to choose the network interface."""
    return INTERFACE_VARIABLES if backend == "nccl" else INTERFACE_VARIABLES[:1]


def chosen_by_nccl(value: str, interfaces: Iterable[str]) -> list[str]:
    """Return the interfaces that this value of NCCL_SOCKET_IFNAME selects.

    The value lists prefixes or, after `=`, whole names. A leading `^` selects all others. `:port` is ignored.
    """
    others = value.startswith("^")
    exact = value[others:].startswith("=")
    names = [part.partition(":")[0] for part in value[others + exact :].split(",") if part]
    return [
        each
        for each in interfaces
        if any(each == name if exact else each.startswith(name) for name in names) is not others
        and not (others and each == "lo")
    ]


def ranks_alone(command: StartWorkers) -> StartWorkers:
    """Return the part of a command that a launcher with its own program and environment accepts.

    The controller sends this part, and the launcher refuses a command that contains anything else.
    """

    def sent(variables: Mapping[str, str]) -> dict[str, str]:
        return {name: text for name, text in variables.items() if name in SENT}

    ranks = [
        WorkerSpec(own.local_rank, (), "", (), sent(own.env), sent(own.defaults)) for own in command.workers
    ]
    shared = sent(command.env)
    return command._replace(env=shared, temporary=(), environment="", binding=None, workers=tuple(ranks))


NO_VALUES: Mapping[str, Any] = MappingProxyType({})
HANDLED_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""torchrun's default for --signals-to-handle."""


class Position(Frozen):
    """The position of one worker in the job and in its role. `node_rank` is None if unknown."""

    rank: int
    local_rank: int
    local_world_size: int
    node_rank: int | None
    role: str
    role_rank: int
    role_world_size: int


class Rendezvous(Frozen):
    """The values that all workers of one attempt share.

    Three fields are only for placeholders. `ids` contains the IDs of the job and the run, keyed by variable.
    `ports` contains the additional ports, keyed by placeholder. `sources` contains each node's source
    address on its route to MASTER_ADDR.
    """

    master_addr: str
    master_port: int
    run_id: str
    backend: str
    restart_count: int = 0
    max_restarts: int = 0
    signals: str = HANDLED_SIGNALS
    ids: Mapping[str, str] = NO_VALUES
    ports: Mapping[str, str] = NO_VALUES
    sources: tuple[str | None, ...] = ()


def shared_environment(meeting: Rendezvous, world_size: int, nodes: int | None) -> dict[str, str]:
    """Return the variables that all workers of an attempt share. `nodes` is None if unknown."""
    return _known(GROUP_WORLD_SIZE=nodes) | {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": meeting.master_addr,
        "MASTER_PORT": str(meeting.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(meeting.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(meeting.max_restarts),
        "TORCHELASTIC_RUN_ID": meeting.run_id,
        # With True, even rank 0 would connect to a store in the launcher. distlaunch has no such store.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": meeting.signals,
        "DISTLAUNCH_BACKEND": meeting.backend,
    }


def _known(**numbers: int | None) -> dict[str, str]:
    return {name: str(number) for name, number in numbers.items() if number is not None}


def own_environment(position: Position, one_device: bool = False) -> dict[str, str]:
    """Return the variables that differ from worker to worker.

    With `one_device` (torchrun's --virtual-local-rank), each worker sees only its own GPU, and LOCAL_RANK is
    0. If the node sets CUDA_VISIBLE_DEVICES, the agent uses the corresponding entry of that list instead.
    """
    return {"ROLE_NAME": position.role} | _known(
        CUDA_VISIBLE_DEVICES=position.local_rank if one_device else None,
        GROUP_RANK=position.node_rank,
        NODE_RANK=position.node_rank,
        RANK=position.rank,
        LOCAL_RANK=0 if one_device else position.local_rank,
        LOCAL_WORLD_SIZE=position.local_world_size,
        ROLE_RANK=position.role_rank,
        ROLE_WORLD_SIZE=position.role_world_size,
    )


def defaults(local_world_size: int, interface: str | None, backend: str) -> dict[str, str]:
    """Return defaults for variables that neither the node nor the job sets. `interface` None = unknown."""
    values = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    if backend == "nccl":
        # The flight recorder records each collective, and dumps its records when a collective times out.
        values |= {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    if local_world_size > 1:
        values["OMP_NUM_THREADS"] = "1"  # like torchrun; otherwise, every worker would use all cores
    if interface:
        values |= dict.fromkeys(INTERFACE_VARIABLES, interface)
    return values
