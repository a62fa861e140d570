"""What a job file's `slurm` section asks of Slurm, for a job that is submitted."""

from distlaunch.agent.frozen import Frozen


class SlurmOptions(Frozen):
    """sbatch's options by their names, None = its own default; `gpus` and `mem` are per node.

    `nodes` are those to allocate, where the job leaves some of them over. `setup` are lines of shell that
    come before; `extra` are options as sbatch takes them.
    """

    nodes: int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    constraint: str | None = None
    gpus: int | str | None = None
    gres: str | None = None
    mem: int | str | None = None
    cpus_per_task: int | None = None
    exclusive: bool = False
    nodelist: str | None = None
    exclude: str | None = None
    dependency: str | None = None
    signal: str | None = None
    comment: str | None = None
    setup: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
