"""Launchers that start the ranks themselves, as programs that distlaunch runs.

torch's own elastic agents are one worker on each node (`python -m torch.distributed.run`). mpirun is one
worker, on the first node: it reaches the others by its own means and runs `distlaunch exec` as each rank.
These ranks join one run of the usual kind, at MASTER_ADDR and MASTER_PORT of the job.
"""

from distlaunch.contract import Rendezvous
from distlaunch.job.spec import FOREVER_S, EnvValue, JobSpec, NodeSpec, Program
from distlaunch.job.text import fill
from distlaunch.transports.ssh import Ssh

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


_PASSED_ON = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "DISTLAUNCH_JOB_ID")
_DEFAULTS = {
    # Whoever runs a job as root has decided so before.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # Binding is up to the job: Open MPI would put two ranks with all their threads on one core each.
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}
_EXPORTED = "OMPI_MCA_mca_base_env_list"
"""The variables that Open MPI takes along to other nodes; MPICH takes all."""


def under_mpirun(spec: JobSpec, python: str) -> JobSpec:
    """The job as `run` and `dry-run` plan it: unchanged, or mpirun on the first node. Raises `JobError`.

    `python` is the interpreter of jobs that name none: distlaunch must be installed for it on every node.
    """
    if not spec.mpirun or spec.mpirun_hosts:
        return spec
    python = spec.python or python
    hosts = tuple(("localhost" if node.local else node.label, _procs(spec, node)) for node in spec.nodes)
    words = [*spec.mpirun[1:], "-n", str(sum(procs for _, procs in hosts))]
    words += ["--host", ",".join(f"{host}:{procs}" for host, procs in hosts)]
    words += [python, "-m", "distlaunch", "exec", "--", *spec.program.before(python)]
    words += [spec.program.words[0], *arguments(spec)]
    return spec._replace(
        nodes=(spec.nodes[0]._replace(procs=1),),
        program=Program("command", (spec.mpirun[0],)),
        args=tuple(words),
        env={**_settings(spec), **spec.env},
        timeouts=spec.timeouts._replace(join_s=None, stall_s=None),  # `exec` watches the ranks
        invocation=spec.invocation._replace(placeholders=False),
        mpirun_hosts=hosts,
    )


def rows(spec: JobSpec) -> list[tuple[str, int, int]]:
    """Host, local rank and rank of each rank, as mpirun places them by slots."""
    places = [(host, local_rank) for host, procs in spec.mpirun_hosts for local_rank in range(procs)]
    return [(*place, rank) for rank, place in enumerate(places)]


def _procs(spec: JobSpec, node: NodeSpec) -> int:
    gpus = node.gpus if node.gpus is not None else None if node.cpu_procs is None else 0
    procs = node.procs or gpus or node.cpu_procs or (1 if gpus == 0 else None)
    if procs is None:
        text = f"mpirun needs to know how many ranks {node.label} has: set procs_per_node or gpus_per_node"
        raise spec.error(node.path, text)
    return procs


def _settings(spec: JobSpec) -> dict[str, EnvValue]:
    """mpirun's own settings, as variables: options differ between Open MPI 4, Open MPI 5 and MPICH."""
    settings = {**_DEFAULTS, _EXPORTED: ";".join((*_PASSED_ON, *spec.env))}
    reach = next((node.reach for node in spec.nodes if isinstance(node.reach, Ssh)), None)
    if reach and reach.options.config:
        shell = f"ssh -F {reach.options.config}"
        settings["OMPI_MCA_plm_rsh_agent"] = settings["PRTE_MCA_plm_ssh_agent"] = shell
        settings["HYDRA_LAUNCHER"], settings["HYDRA_LAUNCHER_EXTRA_ARGS"] = "ssh", shell.partition(" ")[2]
    return {name: EnvValue(value) for name, value in settings.items()}
