"""A node of a Slurm allocation: srun's stdin and stdout are the link, one step per node."""

from collections.abc import Mapping, Sequence
from typing import Literal

from distlaunch.agent.frozen import Frozen
from distlaunch.transports.boot import SCRIPT
from distlaunch.transports.failure import LinkFailure, ProcessEnd, classify
from distlaunch.transports.slurm.failures import BY_SRUN, SRUN_FAILED, swept, telling

_OPTIONS = (
    "--overlap",  # what other steps use is not waited for, nor what this one uses by others
    "--mem=0",  # all that the job has on the node
    "--cpu-bind=none",  # which CPU is whose is the job file's to say
    "--mpi=none",
    "--input=all",
    "--output=all",
    "--error=all",
    "--kill-on-bad-exit=0",
    "--wait=0",
    "--export=ALL",
    "--chdir=/",
    "--quit-on-interrupt",
)
"""srun reads each from a variable, too, which the allocation, or a script in it, may have set."""

VARIABLES = ("SLURM_", "SRUN_", "PMI_", "PMIX_", "SLURMD_")
"""How the names begin that Slurm's tools set, and some of them read."""
_OF_THE_JOB = ("SLURM_JOB_", "SLURM_ARRAY_", "SLURM_SUBMIT_", "SLURM_HET_", "SLURM_JOBID_HET_")
_KEPT = ("SLURM_JOBID", "SLURM_CONF", "SLURM_CLUSTERS", "SLURM_CLUSTER_NAME", "SLURM_RESTART_COUNT")
_OF_THE_STEP = (
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS", "SLURM_TASK_PID"),
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NNODES"),
    *("SLURM_NODELIST", "SLURM_STEPID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES"),
    *("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_LAUNCHER_PORT"),
    *("SLURM_SRUN_COMM_HOST", "SLURM_SRUN_COMM_PORT", "SLURM_LAUNCH_NODE_IPADDR", "SLURM_DISTRIBUTION"),
    *("SLURM_CPU_BIND", "SLURM_CPU_BIND_LIST", "SLURM_CPU_BIND_TYPE", "SLURM_CPU_BIND_VERBOSE"),
    *("SLURM_CPUS_PER_TASK", "SLURM_UMASK", "PMI_RANK", "PMI_SIZE", "PMI_FD", "PMIX_RANK"),
)
"""The agent's own, which a rank would take for its rank and its world."""


class Slurm(Frozen):
    """As `distlaunch.transports.kinds` has it; `job` is the allocation's id, `group` the node's component.

    `options` are more options of srun, such as a plug-in's; `variables` are NAME=VALUE for the agent.
    """

    host: str
    job: str
    group: int | None = None
    options: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    name: Literal["slurm"] = "slurm"

    @property
    def here(self) -> bool:
        """A step may be confined otherwise than we are, on this machine, too."""
        return False

    @property
    def direct(self) -> bool:
        """slurmstepd runs our command; no login shell is in between."""
        return True

    @property
    def unknown(self) -> bool:
        """Outside of an allocation."""
        return not self.job

    @property
    def together(self) -> bool:
        """Each node has a step of its own."""
        return False

    @property
    def patience_s(self) -> float:
        """Only a living srun tells its step of our end."""
        return 0.5

    @property
    def folder(self) -> str:
        """None."""
        return ""

    def argv(self) -> list[str]:
        """srun, with every option that a variable may set, and behind it nothing of the job."""
        # Unbuffered: else srun waits for the ends of lines, which frames don't have.
        return self.step_argv([self.host], ["--nodes=1", "--ntasks=1", "--unbuffered"])

    def step_argv(self, hosts: Sequence[str], size: Sequence[str]) -> list[str]:
        """A step on `hosts`; `size` are options for its size and its output."""
        group = [] if self.group is None else [f"--het-group={self.group}"]
        unset = [part for name in _OF_THE_STEP for part in ("-u", name)]
        where = [f"--jobid={self.job}", *group, f"--nodelist={','.join(hosts)}"]
        env = ["env", *unset, *self.variables]
        return ["srun", *size, *_OPTIONS, *self.options, *where, *env, "/bin/sh", "-c", SCRIPT]

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Without what srun would take for options, and whatever else describes another step."""
        return {name: value for name, value in environ.items() if _passes(name)}

    def address_argv(self) -> list[str]:
        """Hosts of an allocation know each other by their names."""
        return []

    def failure(self, end: ProcessEnd) -> LinkFailure:
        """srun's own words, where it failed; else the node's."""
        said = end._replace(stderr=telling(end))
        failure = classify(said, BY_SRUN, SRUN_FAILED, "srun on this machine")
        return failure._replace(clean=failure.clean and swept(end))

    def advice(self, failure: LinkFailure, python: str | None) -> str:
        """With commands to paste."""
        from distlaunch.transports.slurm.advice import advice_for  # few nodes fail

        return advice_for(failure, self.host, self.job, python or "python3")


def _passes(name: str) -> bool:
    if name.startswith(_OF_THE_JOB) or name in _KEPT:
        return True
    return not name.startswith(VARIABLES)
