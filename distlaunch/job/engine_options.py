"""What a job file's `grid_engine` and `pbs` sections ask of those schedulers, for a job that is submitted."""

from distlaunch.agent.frozen import Frozen


class GridEngineOptions(Frozen):
    """qsub's options by what they mean, None = its own default; `slots` and `gpus` are of each node.

    `gpus` is a request as -l takes it. `nodes`, `setup` and `extra` are as in `SlurmOptions`.
    """

    nodes: int | None = None
    pe: str | None = None
    slots: int | None = None
    gpus: str | None = None
    queue: str | None = None
    project: str | None = None
    time: str | None = None
    setup: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()


class PbsOptions(Frozen):
    """qsub's options by what they mean, None = its own default; `cpus`, `gpus` and `mem` are of each node.

    `select` replaces all that is asked of the nodes. `nodes`, `setup` and `extra` are as in `SlurmOptions`.
    """

    nodes: int | None = None
    select: str | None = None
    cpus: int | None = None
    gpus: int | None = None
    mem: str | None = None
    queue: str | None = None
    project: str | None = None
    account: str | None = None
    time: str | None = None
    setup: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
