"""Launchers that distlaunch runs and that start the ranks themselves.

With torch elastic agents (`python -m torch.distributed.run`), an agent is the only worker of each node. With
mpirun, the only worker of the job is mpirun on the first node. mpirun reaches the other nodes itself and runs
`distlaunch exec` as each rank. These ranks join an ordinary run at the job's MASTER_ADDR and MASTER_PORT.
"""

import re

from distlaunch.contract import Rendezvous
from distlaunch.job.spec import FOREVER_S, EnvValue, JobSpec, NodeSpec, Program
from distlaunch.job.text import literal
from distlaunch.transports.ssh import Ssh

TEMPORARY = ("PET_LOG_DIR",)
"""Variables for directories that the torch agent creates and never deletes."""


def agent_words(
    spec: JobSpec, program: Program, size: tuple[int, int], meeting: Rendezvous, source: str | None
) -> tuple[str, ...]:
    """Return the Python arguments of a torch agent that precede the program.

    `size` contains the number of nodes and the number of the agent's ranks. `source` is the address at which
    the other nodes reach this one. The agents of an attempt exit when their first rank fails, and the
    supervisor starts the agents of the next attempt.
    """
    # A new ID, since a finished rendezvous can't be joined.
    own = meeting._replace(run_id=f"{meeting.run_id}-{meeting.restart_count}", max_restarts=0)
    flags = agent_flags(spec, program, size, own)
    # torch would use the host name, which might not resolve on the nodes.
    here = [f"--local-addr={source}"] if source else []
    # Without "--", argparse would interpret script arguments as abbreviated flags.
    return ("-u", "-m", "torch.distributed.run", *flags, *here, *program_flag(program), "--")


def agent_flags(spec: JobSpec, program: Program, size: tuple[int, int], meeting: Rendezvous) -> list[str]:
    """Return the torchrun flags of an agent that joins through an etcd server. See agent_words for `size`."""
    assert spec.rendezvous.etcd
    join_s = FOREVER_S if spec.limits.join_s is None else spec.limits.join_s
    conf = {"join_timeout": f"{max(1, round(join_s))}", **spec.rendezvous.etcd.conf}
    return [
        f"--nnodes={size[0]}",
        f"--nproc-per-node={size[1]}",
        "--rdzv-backend=etcd-v2",
        f"--rdzv-endpoint={spec.rendezvous.etcd.endpoint}",
        f"--rdzv-id={meeting.run_id}",
        f"--rdzv-conf={','.join(f'{name}={value}' for name, value in conf.items())}",
        f"--max-restarts={meeting.max_restarts}",
        *workers_flags(spec, program),
    ]


def workers_flags(spec: JobSpec, program: Program) -> list[str]:
    """Return the torchrun flags for worker settings that differ from the defaults."""
    role = [f"--role={program.role}"] if program.role != "default" else []
    return [*role, *(["--virtual-local-rank"] if spec.placement.one_device else [])]


def program_flag(program: Program) -> list[str]:
    """Return the torchrun flag for a program other than a script."""
    return {"module": ["--module"], "command": ["--no-python"], "script": []}[program.kind]


def torch_literal(text: str) -> str:
    """Escape an argument for torch's agents, which fill in `${local_rank}` and replace `$$` with `$`."""
    return re.sub(r"\$(?=\$|\{*local_rank\b)", "$$", text)  # `fill`, which removes braces, comes later


_PASSED_ON = (
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
    *("DISTLAUNCH_JOB_ID", "DISTLAUNCH_BACKEND"),
)
_DEFAULTS = {
    # Running as root is the user's decision.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # The job controls binding. With two ranks, Open MPI would bind each, with all its threads, to one core.
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    # --host lists the hosts, and a step of ours lacks the variables that describe the allocation.
    "OMPI_MCA_ras": "^slurm",
    "PRTE_MCA_ras": "^slurm",
}
_EXPORTED = "OMPI_MCA_mca_base_env_list"
"""The variable that lists the variables for Open MPI to pass to other nodes. MPICH passes all of them."""


def under_mpirun(spec: JobSpec, python: str) -> JobSpec:
    """Return the job for `run` and `dry-run`: unchanged, or with mpirun as its worker. Raises `JobError`.

    `python` is the default interpreter. With mpirun, distlaunch must be installed for it on every node.
    """
    if not spec.mpirun.argv or spec.mpirun.hosts:
        return spec
    python = spec.program.python or python
    hosts = tuple(("localhost" if node.local else node.label, _procs(spec, node)) for node in spec.nodes)
    words = [*map(literal, spec.mpirun.argv[1:]), "-n", str(sum(procs for _, procs in hosts))]
    words += ["--host", ",".join(f"{host}:{procs}" for host, procs in hosts)]
    words += [python, "-m", "distlaunch", "exec", "--", *spec.program.before(python)]
    words += [spec.program.words[0], *spec.program.arguments]
    return spec._replace(
        nodes=(spec.nodes[0]._replace(procs=1),),
        program=spec.program._replace(
            kind="command",
            words=(spec.mpirun.argv[0],),
            placed=False,
            args=tuple(words),
            env={**_settings(spec), **spec.program.env},
        ),
        limits=spec.limits._replace(join_s=None, stall_s=None),  # `exec` watches the ranks
        mpirun=spec.mpirun._replace(hosts=hosts),
    )


def rows(spec: JobSpec) -> list[tuple[str, int, int]]:
    """Return the host, local rank and rank of each process, as placed by mpirun."""
    places = [(host, local_rank) for host, procs in spec.mpirun.hosts for local_rank in range(procs)]
    return [(*place, rank) for rank, place in enumerate(places)]


def _procs(spec: JobSpec, node: NodeSpec) -> int:
    """Return the number of ranks on a node without contacting it. Raises `JobError` if it is unknown."""
    gpus = node.gpus if node.gpus is not None else None if node.cpu_procs is None else 0
    procs = node.procs or gpus or node.cpu_procs or (1 if gpus == 0 else None)
    if procs is None:
        text = f"mpirun needs the number of ranks on {node.label}: set procs_per_node or gpus_per_node"
        raise spec.error(node.path, text)
    return procs


def _settings(spec: JobSpec) -> dict[str, EnvValue]:
    """Return mpirun settings as variables, since options differ between Open MPI 4, Open MPI 5 and MPICH."""
    settings = {**_DEFAULTS, _EXPORTED: ";".join((*_PASSED_ON, *spec.program.env))}
    launchers = {node.reach.hydra for node in spec.nodes}
    if len(launchers) == 1 and "" not in launchers:
        settings["HYDRA_LAUNCHER"] = launchers.pop()  # which Hydra itself chooses outside a step
    reach = next((node.reach for node in spec.nodes if isinstance(node.reach, Ssh)), None)
    if reach and reach.options.config:
        shell = f"ssh -F {reach.options.config}"
        settings["OMPI_MCA_plm_rsh_agent"] = settings["PRTE_MCA_plm_ssh_agent"] = shell
        settings["HYDRA_LAUNCHER"], settings["HYDRA_LAUNCHER_EXTRA_ARGS"] = "ssh", shell.partition(" ")[2]
    return {name: EnvValue(value) for name, value in settings.items()}
