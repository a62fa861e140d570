"""The keys of the job file: the single source of the checks, job fields, JSON Schema and reference.

A plain key is declared here as a `Field`; the attribute with its value and default is in `spec.py`. A `built`
key needs code in `build.py`. Schedulers declare their own sections: see `with_sections`. In a `JobSpec`,
these sections and `kubernetes` are maps of the keys that are set. Their defaults are declared with the keys.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from distlaunch.job import spec
from distlaunch.job.text import home_error, placeholder_error
from distlaunch.job.types import (
    ENV,
    LINE,
    SOME_TEXT,
    Choice,
    Duration,
    Either,
    Field,
    Integer,
    ListOf,
    MapOf,
    OrNone,
    Record,
    Schema,
    Size,
    Switch,
    Text,
    Tree,
    Word,
    built,
    by_their_names,
    compiled,
)
from distlaunch.transports import launchers
from distlaunch.transports.container import Container, Runtime
from distlaunch.transports.transport import SshOptions


def _program_error(word: str) -> str | None:
    return home_error(word) if "/" in word else None  # otherwise looked up in PATH on the node


def _cpus_error(cpus: str) -> str | None:
    spans = re.findall(r"(\d+)-(\d+)", cpus)
    return next((f"{a}-{b} ends before it begins" for a, b in spans if int(b) < int(a)), None)


def _watch_error(pattern: str) -> str | None:
    """Return why this `logs.watch` can't find a number, or None."""
    try:
        found = compiled(pattern).groups
    except ValueError as error:
        return f"expected a regular expression: {error}"
    return None if found else "expected a group around the number, as in 'loss[ =:]+([-0-9.eE+]+)'"


AUTO = Choice(("auto",))
PORT = Integer(1, 65535)
GPUS = Integer(0, spec.MAX_GPUS)
CONF = MapOf(Word(), r"[A-Za-z_]\w*", "a setting's name")
FILE = Text("a non-empty string", r"[^\0]+", home_error)
PYTHON = Text("an interpreter such as python3.12, or its path", r"(?![0-9.]+$)[^\0\n]+", home_error)
ARGUMENT = Word(placeholder_error)
LIMIT = OrNone(Duration())
_CPUS = r"[0-9]{1,5}(?:-[0-9]{1,5})?"
CPUS = Text('a list of CPUs such as "0-3,8"', rf"{_CPUS}(?:,{_CPUS})*", _cpus_error)

NODE = Record(
    host=built(SOME_TEXT, "Host name, as used with ssh; user@host and ranges such as gpu[03-10] also work."),
    gpus=built(Either(number=GPUS, text=AUTO), "GPUs on this node.", "gpus_per_node"),
    procs=built(Integer(1), "Workers on this node.", "procs_per_node"),
    address=Field(
        SOME_TEXT, "Address that the other nodes use to reach this node.", "the address that ssh uses"
    ),
    user=built(SOME_TEXT, "User to log in as.", "ssh's default"),
    port=built(PORT, "Port of the SSH server on this node.", "ssh's default"),
    python=built(PYTHON, "Interpreter on this node.", "python"),
    workdir=built(FILE, "Working directory on this node; relative script paths start there.", "workdir"),
    env=built(ENV, "Environment variables of this node's workers; they override the job's."),
    script=Field(FILE, "A Python script for this node's workers, in place of the job's program."),
    args=Field(ListOf(ARGUMENT), "Arguments for this node's workers, in place of the job's."),
    role=Field(LINE, "ROLE_NAME of this node's workers; ROLE_RANK is numbered within each role.", "role"),
    makes=spec.NodeSpec,
    foreign=by_their_names(
        host="hostname name",
        procs="slots nproc_per_node procs_per_node",
        gpus="num_gpus gpus_per_node",
        address="ip",
        workdir="cwd",
    ),
    required=("host",),
    title="a host or a map with host",
    main="host",
)

RENDEZVOUS = Record(
    endpoint=built(
        SOME_TEXT,
        "host:port of rank 0's store, or with etcd-v2, of your etcd server.",
        "a free port on the first node, held by distlaunch",
    ),
    backend=built(
        Choice(("static", "c10d", "etcd-v2", "none")),  # c10d means the same as static
        "What assigns ranks: static or c10d = distlaunch; etcd-v2 = torch's own agents, one per node; "
        "none = distlaunch, without waiting for ranks to join, for jobs that never connect to MASTER_ADDR.",
        default="static",
    ),
    conf=built(CONF, "Settings for torch's --rdzv-conf, such as last_call_timeout; etcd-v2 only."),
    id=Field(SOME_TEXT, "TORCHELASTIC_RUN_ID of the workers.", "the run's ID"),
    makes=spec.RendezvousSpec,
    foreign=by_their_names(endpoint="rdzv_endpoint", backend="rdzv_backend", id="rdzv_id", conf="rdzv_conf"),
    main="backend",
)

TIMEOUTS = Record(
    connect=Field(Duration(), "Time limit for starting the agents on all nodes."),
    join=Field(
        LIMIT,
        "Time limit for all ranks to join the rendezvous. When it expires, the job ends, and a message lists "
        "the missing ranks. The default limit starts when the first rank tries to join; an explicit limit "
        "starts when the ranks start. none = no limit.",
    ),
    stop=Field(Duration(), "Time between SIGTERM and SIGKILL."),
    job=Field(LIMIT, "Time limit for the whole job."),
    lease=Field(
        Duration(least_s=3),
        "Time without a heartbeat after which a node counts as lost and stops its workers.",
    ),
    rejoin=Field(Duration(), "How long to wait for a lost node that the job can't continue without."),
    setup=Field(Duration(), "Time limit for building the environment (setup) on a node."),
    stall=Field(
        LIMIT, "Time without output, CPU or GPU use after which a rank counts as stalled; none = never."
    ),
    makes=spec.Limits,
)


class Failures(ListOf):
    """A list of kinds of failures and exit statuses; becomes a flat tuple."""

    def __init__(self) -> None:
        statuses = Field(ListOf(Integer(1, 255), least=1), "Only these exit statuses.")
        item = Record(exit=statuses, required=("exit",), title="a map such as {exit: [75]}")
        super().__init__(Either(text=Choice(get_args(spec.FailureKind)), entries=item), least=1)

    def made(self, checked: Any) -> Any:
        """Return the kinds and statuses."""
        return tuple(one for each in checked for one in ([each] if isinstance(each, str) else each["exit"]))


FAILURES = Failures()
RESTARTS = Record(
    max=Field(
        Integer(0, 10000),
        "Maximum restarts of the whole job in any restarts.window, after a worker fails or a node is lost.",
        f"; {spec.ELASTIC_RESTARTS} with min_nodes or spares",
        "most",
    ),
    backoff=Field(Duration(), "Delay before the second restart in a row; doubles with each further restart."),
    window=Field(Duration(least_s=1), "The period in which at most restarts.max restarts may happen."),
    requeue=Field(
        Integer(0, 10000),
        "How many times Slurm may requeue the job: after a failure when no restarts are left, at the time "
        "limit, or after a termination warning; never after exit status 2, 126 or 127.",
    ),
    on=Field(
        FAILURES,
        "The failures that cause a restart: exception, exit, signal, oom, collective, stall, node_lost; "
        "{exit: [75]} = exit status 75.",
        "any failure",
    ),
    never=Field(FAILURES, "Failures that don't cause a restart."),
    repeat=Field(
        Switch(),
        "Restart even after the same exception as in the previous attempt, and on a node that caused three "
        "failures in a row.",
    ),
    makes=spec.Restarts,
    main="max",
    foreign=by_their_names(max="max_restarts limit retries", backoff="delay"),
)

ELASTIC = Record(
    grow=Field(
        Choice(get_args(spec.Grow)),
        "When a recovered node rejoins: at the next restart, or now (which restarts the job).",
    ),
    makes=spec.Membership,
)

LOGS = Record(
    dir=built(FILE, "Where run directories are created.", default="runs"),
    console=Field(
        Either(text=Choice(get_args(spec.Shown)), items=ListOf(Integer(0))),
        "Ranks whose output is shown: all, rank0, none or a list of ranks.",
    ),
    watch=Field(
        Text("a regular expression", r"[^\0]+", _watch_error),
        "A regular expression; `view` plots the number that its first group matches, e.g. "
        "'loss[ =:]+([-0-9.eE+]+)'.",
    ),
    fold=Field(Switch(), "Collapse identical lines that several ranks print within 0.2 s into one line."),
    limit=Field(OrNone(Size()), "Maximum size of each log file; further output is shown, but not saved."),
    makes=spec.Logs,
    foreign=by_their_names(dir="log_dir path directory folder"),
)

NOTIFY = Record(
    command=Field(
        ListOf(Word(), least=1, first=Word(home_error)),
        "Program and arguments, run on the controller's host; it receives the event as JSON on stdin "
        "and is killed after 30 s.",
    ),
    on=Field(
        ListOf(Choice(get_args(spec.Occasion))),
        "The events that trigger the program: failed, restarted, stalled, finished.",
        "all four",
    ),
    makes=spec.Notify,
    required=("command",),
)

METRICS = Record(
    file=built(FILE, "Path on the controller's host; node_exporter's textfile collector reads only *.prom."),
    makes=spec.JobSpec,
    required=("file",),
)

CHECKS = Record(
    skip=built(
        Either(text=Choice(("all",)), items=ListOf(Choice(get_args(spec.Checked)))),
        "Parts of `check` to skip; all = every part.",
    ),
    makes=spec.JobSpec,
)

PATTERNS = ListOf(LINE)
SYNC = Record(
    tree=built(Switch(), "Whether to copy the code to the nodes.", told="true if sync is given"),
    include=Field(PATTERNS, "Files to copy even though git ignores them; patterns as in .gitignore."),
    exclude=Field(PATTERNS, "Files to leave out, in addition to those in .distlaunchignore."),
    to=Field(
        Text("an absolute path, or one that begins with ~/", r"~?/[^\0]*"),
        "Directory on the nodes for the code of all jobs.",
        field="base",
    ),
    limit=Field(Size(), "Maximum size of the code."),
    makes=spec.Sync,
    main="tree",
    foreign=by_their_names(exclude="ignore excludes", include="includes", to="dir directory path"),
)

SETUP = Record(
    {
        "run": built(LINE, "A shell command, run in the workdir and inside a new virtual environment."),
        "key": built(
            ListOf(FILE), "Files in the workdir; the environment is rebuilt when one of them changes."
        ),
        "from": built(
            Choice(("controller",)),
            "Used instead of run. Installs the packages from the same files as setup: uv; pip on this "
            "machine builds or downloads them.",
        ),
    },
    makes=spec.Setup,
    foreign=by_their_names(run="command", key="keys files"),
    title="a map with run or from: controller",
)


def _path_error(path: str) -> str | None:
    return "write an absolute path instead of .." if ".." in path.split("/") else home_error(path)


PATHS = ListOf(Text("a path or pattern of files", r"[^\0\n]*[^\0\n/]/*", _path_error), least=1)
COLLECT = Record(
    {
        "paths": Field(PATHS, "Files, directories and patterns, as described for collect."),
        "from": Field(
            Either(text=Choice(("rank 0", "all")), items=ListOf(SOME_TEXT, least=1)),
            "The nodes to collect from: rank 0's, all of them, or a list of hosts.",
            field="nodes",
        ),
        "limit": Field(Size(), "Maximum total size of the files collected from each node."),
    },
    spec.Collect,
    required=("paths",),
    foreign=by_their_names(paths="files patterns path", **{"from": "nodes hosts node"}),
)

SSH_OPTION = Text('an option such as "Compression=no"', r"[A-Za-z]+\s*[= ][^\0\n]*")
SSH = Record(
    config=built(FILE, "An ssh_config file to use.", "ssh's default"),
    options=Field(ListOf(SSH_OPTION), "Additional -o options for ssh.", field="words"),
    persist=built(LIMIT, "How long to keep connections open for the next run."),
    makes=SshOptions,
)

LAUNCHER = Record(
    command=built(
        ListOf(Word(), least=1),
        "A command that runs the command appended to it on a node; {host} becomes the node's name, as in "
        '[kubectl, exec, -i, "{host}", --].',
    ),
    shell=built(Switch(), "Append the command as a single word for a shell on the node, as with ssh."),
    makes=spec.JobSpec,
    required=("command",),
)

KUBE_NAME = Text("a lowercase name such as gpu-jobs", r"[a-z0-9](?:[-.a-z0-9]{0,251}[a-z0-9])?")
KUBE_KEYS = r"(?:[a-z0-9](?:[-.a-z0-9]*[a-z0-9])?/)?[A-Za-z0-9](?:[-_.A-Za-z0-9]*[A-Za-z0-9])?"
KUBE_MAP = MapOf(Word(), KUBE_KEYS, "a name such as team or example.com/team", nulls=False)
IN_IMAGE = Text("an absolute path", r"/[^\0\n:]*")

RESOURCES = Record(
    limits=Field(KUBE_MAP, "Resource limits of each pod, e.g. {memory: 64Gi}.", "GPUs only"),
    requests=Field(KUBE_MAP, "Resources reserved for each pod.", "the limits"),
    foreign=dict.fromkeys(("cpu", "memory", "nvidia.com/gpu", "amd.com/gpu"), "limits"),
)

VOLUME = Record(
    mount=Field(IN_IMAGE, "Mount path in the pods."),
    claim=Field(KUBE_NAME, "A PersistentVolumeClaim."),
    config_map=Field(KUBE_NAME, "A ConfigMap."),
    secret=Field(KUBE_NAME, "A Secret."),
    host_path=Field(IN_IMAGE, "A directory on the pod's node."),
    sub_path=Field(LINE, "Mount only this subdirectory."),
    read_only=Field(Switch(), "Mount the volume read-only."),
    foreign=by_their_names(
        mount="mount_path mountPath path",
        claim="persistent_volume_claim pvc",
        config_map="configmap",
        host_path="hostPath",
        read_only="readOnly",
        sub_path="subPath",
    ),
    required=("mount",),
)

SECRET = Record(
    secret=Field(KUBE_NAME, "The Secret with the variable's value."),
    key=Field(Text("a key of the Secret", r"[-._A-Za-z0-9]{1,253}"), "The key in the Secret."),
    required=("secret", "key"),
)

KUBERNETES = Record(
    image=Field(
        LINE,
        "The image for the pods, with Python 3.10 or later and torch.",
        "container.image with docker or podman",
    ),
    namespace=Field(KUBE_NAME, "Namespace of the pods.", "kubectl's current namespace"),
    selector=Field(LINE, "Labels of the pods that launcher: kubernetes uses as nodes, e.g. app=train."),
    container=Field(KUBE_NAME, "The container to use in each selected pod.", "the first"),
    labels=Field(KUBE_MAP, "Labels of the Job and its pods."),
    annotations=Field(KUBE_MAP, "Annotations of the Job and its pods."),
    node_selector=Field(KUBE_MAP, "Labels that the nodes must have."),
    tolerations=Field(
        ListOf(Tree("a toleration such as {key: nvidia.com/gpu, operator: Exists}")),
        "Taints that the pods tolerate, as in a pod's `tolerations`.",
    ),
    queue=Field(KUBE_NAME, "Kueue LocalQueue for the job; Kueue starts all pods together."),
    resources=Field(RESOURCES, "CPUs, memory and other resources of each pod; GPUs come from gpus_per_node."),
    volumes=Field(ListOf(VOLUME), "Volumes to mount in each pod."),
    secrets=Field(
        MapOf(SECRET, r"[A-Za-z_][A-Za-z0-9_]*", "a variable name", nulls=False),
        "Variables whose values come from Secrets; they override env.",
    ),
    service_account=Field(KUBE_NAME, "ServiceAccount of the pods."),
    image_pull_secrets=Field(ListOf(KUBE_NAME), "Secrets to pull the image with."),
    priority_class=Field(KUBE_NAME, "PriorityClass of the pods."),
    ttl=Field(
        LIMIT, "Time after which a finished Job is deleted; none = never.", field="ttl", default=604800.0
    ),
    runtime=Field(KUBE_NAME, "The ClusterTrainingRuntime of a TrainJob.", default="torch-distributed"),
    extra=Field(
        Tree(),
        "Settings to merge into the Job: maps key by key, and lists of named maps item by item. Other values "
        "are replaced.",
    ),
    foreign=by_their_names(
        node_selector="nodeSelector",
        service_account="serviceAccount serviceAccountName",
        image_pull_secrets="imagePullSecrets pull_secrets",
        priority_class="priorityClassName",
        ttl="ttlSecondsAfterFinished",
        volumes="mounts",
        queue="kueue",
    ),
)

CONTAINER = Record(
    image=built(LINE, "The name of the image; apptainer and enroot also accept a file."),
    runtime=built(
        Either(text=Choice(get_args(Runtime)), items=ListOf(Word(), least=1)),
        "docker, podman, apptainer, enroot or pyxis; a list adds options for the runtime itself, as in "
        "[podman, --root=/scratch/images].",
        default="docker",
    ),
    mounts=built(
        ListOf(LINE),
        "Paths on the node to mount: PATH, PATH:PATH_INSIDE or PATH:PATH_INSIDE:ro. The workers' "
        "directory is always mounted.",
    ),
    options=Field(ListOf(LINE), "Additional options for the runtime."),
    env=Field(ENV, "Environment variables for the container; null = the node's value."),
    makes=Container,
    required=("image",),
    foreign={"volumes": "mounts", "args": "options", "engine": "runtime", "name": "image"},
)

JOB = Record(
    name=built(SOME_TEXT, "The job's name.", "the file's stem"),
    nodes=built(
        Either(number=Integer(1, 4096), items=ListOf(NODE, least=1)),
        "The hosts in rank order, or the number of nodes to use in the allocation or to simulate on this "
        "machine.",
        told="all of the allocation; 1 outside an allocation",
    ),
    min_nodes=Field(
        Integer(1),
        "Minimum number of nodes to continue with when others are lost.",
        "all of them",
        part=spec.Membership,
    ),
    spares=built(
        Either(text=Choice(("rest",)), items=ListOf(NODE)),
        "Hosts that replace lost nodes; rest = all other nodes of the allocation.",
    ),
    hostfile=built(FILE, "A hostfile (Open MPI, DeepSpeed, Horovod) instead of nodes."),
    gpus_per_node=built(Either(number=GPUS, text=AUTO), "GPUs per node; 0 = a CPU job.", default="auto"),
    procs_per_node=built(Integer(1), "Workers per node.", "one per GPU, or 1 for a CPU job"),
    numa_binding=built(
        Choice(get_args(spec.NumaMode), none=True),
        "CPUs for each worker, as with torchrun: node = all CPUs of its GPU's NUMA node; socket = all CPUs "
        "of its GPU's socket; exclusive = an exclusive share of that NUMA node's cores; core-complex = "
        "all CPUs that share one last-level cache.",
    ),
    cpu_binding=built(
        Either(
            text=Choice(("cores",), none=True),
            items=ListOf(Either(number=Integer(0, 99999), text=CPUS), least=1),
        ),
        "CPUs for each worker: cores = an equal, exclusive share of the node's physical cores; or a list "
        'in order of local rank, such as ["0-3", "4-7"].',
    ),
    backend=Field(
        Choice(("auto", *get_args(spec.Backend))),
        "Backend of torch.distributed.",
        ": nccl with GPUs, else gloo",
    ),
    rendezvous=built(RENDEZVOUS, "How the ranks connect to each other."),
    master_addr=built(SOME_TEXT, "Host of the endpoint; rendezvous.endpoint overrides it."),
    master_port=built(PORT, "Port of the endpoint; rendezvous.endpoint overrides it."),
    script=built(FILE, "A Python script, relative to the workdir of each node."),
    module=built(Text("a dotted module name", r"[A-Za-z_][\w.]*"), "A Python module, as with python -m."),
    command=built(
        ListOf(ARGUMENT, least=1, first=Word(_program_error)),
        "Any program, by name or path, and its arguments.",
    ),
    args=Field(
        ListOf(ARGUMENT), "Arguments, with placeholders such as {rank} (see above).", part=spec.Program
    ),
    env=built(
        ENV,
        "Environment variables for workers, with placeholders; null = the value in your shell, which must "
        "be set.",
    ),
    python=built(
        PYTHON, "Interpreter on the nodes.", "distlaunch's own, if that path exists on the node, else python3"
    ),
    workdir=built(
        FILE,
        "Working directory of the workers; ~/ is the home directory on the node.",
        "the job file's directory",
    ),
    timeouts=built(TIMEOUTS, "Time limits."),
    restarts=built(RESTARTS, "Whether the whole job restarts after a failure; a number sets max."),
    elastic=built(ELASTIC, "How an elastic job (min_nodes, spares) changes its size."),
    on_stall=Field(
        Choice(get_args(spec.OnStall)), "What to do when ranks stall for timeouts.stall.", part=spec.Limits
    ),
    on_warning=Field(
        Choice(get_args(spec.OnWarning)),
        "The signal that ranks get after a termination warning from a scheduler. After TERM or INT, they "
        "must exit; after USR1 or USR2, they continue.",
        part=spec.Limits,
    ),
    role=Field(LINE, "ROLE_NAME of the workers.", part=spec.Program),
    success=Field(
        Choice(get_args(spec.Success)), "Ranks that must exit with 0; once they have, the others are stopped."
    ),
    stdin=Field(
        Choice(get_args(spec.Stdin)), "The rank that reads distlaunch's stdin; it must run on this machine."
    ),
    virtual_local_rank=Field(
        Switch(),
        "Each worker sees only its own GPU, and LOCAL_RANK is 0.",
        field="one_device",
        part=spec.Placement,
    ),
    logs=built(LOGS, "Where output goes."),
    notify=built(NOTIFY, "A program to run when the run fails, restarts, stalls or finishes."),
    metrics=built(METRICS, "Write the run's metrics to a file in Prometheus text format."),
    checks=built(CHECKS, "Settings for `check`, and for the checks that `run` does before starting ranks."),
    sync=built(
        SYNC,
        "Copy the code to every node before the ranks start: the files of the git repository that contains "
        "the job file, or else all files in the job file's directory.",
        default="false",
    ),
    setup=built(
        Either(text=Choice(("uv", "conda")), entries=SETUP),
        "Build the ranks' Python environment on each node, once per version of the lock file. Requires "
        "`sync`. In the workdir, uv uses uv.lock, requirements.txt or pyproject.toml, and conda uses "
        "environment.yml.",
    ),
    files=built(
        ListOf(FILE), "Additional files to copy into the job file's directory on the nodes. Requires `sync`."
    ),
    collect=built(
        Either(items=PATHS, entries=COLLECT),
        "Files to copy back to the run directory when the job ends. Paths are absolute, start with ~/, or "
        "are relative to the workdir, and may contain *, ? and **. A list sets collect.paths.",
    ),
    ssh=built(SSH, "Settings for ssh."),
    container=built(CONTAINER, "Run the agent and the ranks of each node in a container."),
    mpirun=built(
        Either(text=LINE, items=ListOf(Word(), least=1)),
        "The MPI launcher, which runs `distlaunch exec` for each rank; a list adds options, as "
        "in [mpirun, --mca, btl, self,tcp].",
        "depends on launcher",
    ),
    kubernetes=Field(KUBERNETES, "Settings for `export kubernetes` and launcher: kubernetes."),
    launcher=built(
        Either(text=Choice(tuple(sorted(("auto", "kubernetes", "mpirun", *launchers())))), entries=LAUNCHER),
        "How to reach the nodes, or a command that reaches a node; kubernetes = running pods; "
        "mpirun = like auto, but mpirun starts the ranks.",
        ": the scheduler's transport inside an allocation, ssh for hosts, else local",
        "auto",
    ),
    makes=spec.JobSpec,
    foreign={
        **by_their_names(
            procs_per_node="nproc_per_node ntasks_per_node num_processes slots proc procs",
            nodes="nnodes num_nodes num_machines host hosts hostname hostnames",
            gpus_per_node="gpu gpus num_gpus",
            master_addr="main_process_ip",
            master_port="main_process_port",
            rendezvous="rdzv",
            script="entrypoint program training_script",
            args="training_script_args script_args arguments",
            env="environ environment environments envs",
            workdir="cwd working_dir",
            logs="logging",
            min_nodes="min_nnodes",
            spares="spare_nodes",
            backend="distributed_backend",
            numa_binding="affinity_mode",
            cpu_binding="cpu_bind bind_cores_to_rank",
            on_warning="on_notice",
        ),
        **{theirs: f"rendezvous.{key}" for theirs, key in RENDEZVOUS.foreign.items()},
        "log_dir": "logs.dir",
        "timeout": "timeouts.job",
        "rejoin": "timeouts.rejoin",
        "stall": "timeouts.stall",
        "max_restarts": "restarts.max",
        "grow": "elastic.grow",
        "detach": "run --detach",
    },
    title="a map of job keys",
)


def with_sections(sections: Mapping[str, Field]) -> Record:
    """Return the keys of a job file with these scheduler sections."""
    return Record({**JOB.fields, **sections}, JOB.makes, foreign=JOB.foreign, title=JOB.name)


def json_schema(job: Record) -> Schema:
    """Return the JSON Schema (draft 2020-12) of job files with the keys of `job`, for editors."""
    schema = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": schema, "title": "distlaunch job", **job.schema()}


def reference(
    record: Record, prefix: str = "", shown: Sequence[Record] = ()
) -> list[tuple[str, str, str, str]]:
    """Return (key, type, explanation, default) of every key, with sections before their keys.

    A section that is used several times is described once; `shown` lists the sections already described.
    """
    rows: list[tuple[str, str, str, str]] = []
    for key, entry in record.fields.items():
        rows.append((prefix + key, entry.kind.name, entry.doc, record.default_text(key)))
        for inner, inner_prefix in entry.kind.sections(prefix + key):
            if inner not in shown:
                rows += reference(inner, inner_prefix, shown)
                shown = [*shown, inner]
    return rows
