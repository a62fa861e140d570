"""torch's own elastic agents: the command line of `python -m torch.distributed.run`, the worker of a node."""

from distlaunch.contract import Rendezvous
from distlaunch.job.spec import FOREVER_S, JobSpec
from distlaunch.job.text import fill

TEMPORARY = ("PET_LOG_DIR",)
"""Variables for folders that torch's agent makes and never deletes."""


def agent_words(
    spec: JobSpec, nodes: int, ranks: int, meeting: Rendezvous, source: str | None
) -> tuple[str, ...]:
    """Python's arguments before the program, of an agent that starts `ranks` on one of so many `nodes`.

    The agents of a generation end with their first rank that fails: the supervisor starts the next ones.
    `source` is the node's own address, as the others reach it.
    """
    # An id of its own: nobody can join a rendezvous that has ended.
    own = meeting._replace(run_id=f"{meeting.run_id}-{meeting.restart_count}", max_restarts=0)
    flags = agent_flags(spec, nodes, ranks, own)
    # torch would use the host's own name, which the others, or the host itself, may not resolve.
    here = [f"--local-addr={source}"] if source else []
    # After "--", argparse takes no argument of the script for an abbreviated flag of its own.
    return ("-u", "-m", "torch.distributed.run", *flags, *here, *program_flag(spec), "--")


def agent_flags(spec: JobSpec, nodes: int, ranks: int, meeting: Rendezvous) -> list[str]:
    """torchrun's flags for agents that meet at an etcd server."""
    assert spec.etcd
    join_s = FOREVER_S if spec.timeouts.join_s is None else spec.timeouts.join_s
    conf = {"join_timeout": f"{max(1, round(join_s))}", **spec.etcd.conf}
    return [
        f"--nnodes={nodes}",
        f"--nproc-per-node={ranks}",
        "--rdzv-backend=etcd-v2",
        f"--rdzv-endpoint={spec.etcd.endpoint}",
        f"--rdzv-id={meeting.run_id}",
        f"--rdzv-conf={','.join(f'{name}={value}' for name, value in conf.items())}",
        f"--max-restarts={meeting.max_restarts}",
        *workers_flags(spec),
    ]


def workers_flags(spec: JobSpec) -> list[str]:
    """torchrun's flags for what all workers have otherwise than by default."""
    role = [f"--role={spec.role}"] if spec.role != "default" else []
    return [*role, *(["--virtual-local-rank"] if spec.one_device else [])]


def program_flag(spec: JobSpec) -> list[str]:
    """torchrun's flag for a program that is not a script."""
    return {"module": ["--module"], "command": ["--no-python"], "script": []}[spec.program.kind]


def arguments(spec: JobSpec) -> tuple[str, ...]:
    """The program's arguments: torchrun fills nothing in."""
    return tuple(fill(argument, {}) for argument in (*spec.program.words[1:], *spec.args))
