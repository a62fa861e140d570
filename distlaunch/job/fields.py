"""The keys of the job file: the single source of checks, job fields, JSON Schema and reference.

A plain key is a `Field` here; the field with its value and its default is in `spec.py`. A `built` key needs
code in `build.py`. Schedulers declare their own sections: see `with_sections`. In a job, those sections and
`kubernetes` are maps of the given keys, and their defaults are declared here.
"""

import re
from collections.abc import Mapping, Sequence
from typing import get_args

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
    Regex,
    Schema,
    Switch,
    Text,
    Tree,
    Word,
    built,
    by_their_names,
)
from distlaunch.transports.container import Container, Runtime
from distlaunch.transports.ssh import SshOptions


def _program_error(word: str) -> str | None:
    return home_error(word) if "/" in word else None  # else a name for PATH on the node


def _cpus_error(cpus: str) -> str | None:
    spans = re.findall(r"(\d+)-(\d+)", cpus)
    return next((f"{a}-{b} ends before it begins" for a, b in spans if int(b) < int(a)), None)


AUTO = Choice(("auto",))
PORT = Integer(1, 65535)
CONF = MapOf(Word(), r"[A-Za-z_]\w*", "a setting's name")
FILE = Text("a non-empty string", r"[^\0]+", home_error)
PYTHON = Text("an interpreter such as python3.12, or its path", r"(?![0-9.]+$)[^\0\n]+", home_error)
ARGUMENT = Word(placeholder_error)
LIMIT = OrNone(Duration())
_CPUS = r"[0-9]{1,5}(?:-[0-9]{1,5})?"
CPUS = Text('a list of CPUs such as "0-3,8"', rf"{_CPUS}(?:,{_CPUS})*", _cpus_error)

NODE = Record(
    host=built(SOME_TEXT, "The host as ssh knows it; user@host and ranges such as gpu[03-10] work, too."),
    gpus=built(Either(number=Integer(0), text=AUTO), "GPUs of this node.", "gpus_per_node"),
    procs=built(Integer(1), "Workers on this node.", "procs_per_node"),
    address=Field(SOME_TEXT, "Address at which the other nodes reach it.", "the address that ssh uses"),
    user=built(SOME_TEXT, "User to log in as.", "as ssh does"),
    port=built(PORT, "Port of its sshd.", "as ssh does"),
    python=built(PYTHON, "Interpreter on this node.", "python"),
    workdir=built(FILE, "Working directory on this node; a relative script is looked for there.", "workdir"),
    env=built(ENV, "Variables of this node's workers; they win over the job's."),
    makes=spec.NodeSpec,
    foreign=by_their_names(
        host="hostname name",
        procs="slots nproc_per_node procs_per_node",
        gpus="num_gpus gpus_per_node",
        address="ip",
        workdir="cwd",
    ),
    required=("host",),
    title="a host or a mapping with host",
    main="host",
)

RENDEZVOUS = Record(
    endpoint=built(
        SOME_TEXT,
        "host:port of rank 0's store; with etcd-v2, of your etcd server.",
        "the first node, a free port that distlaunch holds",
    ),
    backend=built(
        Choice(("static", "c10d", "etcd-v2")),  # c10d means the same as static
        "Who assigns ranks: static, c10d = distlaunch; etcd-v2 = torch's own agents, one on each node.",
        default="static",
    ),
    conf=built(CONF, "Settings for torch's --rdzv-conf, such as last_call_timeout; etcd-v2 only."),
    id=Field(SOME_TEXT, "TORCHELASTIC_RUN_ID of the workers.", "the run's id", "rendezvous_id"),
    makes=spec.JobSpec,
    foreign=by_their_names(endpoint="rdzv_endpoint", backend="rdzv_backend", id="rdzv_id", conf="rdzv_conf"),
)

TIMEOUTS = Record(
    connect=Field(Duration(), "Until every node's agent runs."),
    join=Field(
        LIMIT,
        "Until all ranks have joined the rendezvous, or the job ends and the missing are named. "
        "The default counts from when the first rank tries, yours from the start; none = no limit.",
    ),
    stop=Field(Duration(), "Between SIGTERM and SIGKILL."),
    job=Field(LIMIT, "The whole job."),
    lease=Field(Duration(least_s=3), "Silence after which a node counts as lost and ends its workers."),
    rejoin=Field(Duration(), "How long to wait for a lost node that the job can't continue without."),
    stall=Field(
        LIMIT, "Time without output, CPU or GPU use after which a rank counts as stalled; none = never."
    ),
    makes=spec.Timeouts,
)

RESTARTS = Record(
    max=Field(
        Integer(0, 10000),
        "Restarts of the whole job, in any window, after a worker failed or a node was lost.",
        f"; {spec.ELASTIC_RESTARTS} with min_nodes or spares",
        "most",
    ),
    backoff=Field(Duration(), "Wait before the second restart in a row, then twice as long each time."),
    window=Field(Duration(), "The time in which at most max restarts may happen."),
    requeue=Field(
        Integer(0, 10000),
        "How often Slurm may start the job again: after a failure that max does not cover, at the time "
        "limit, and after a termination warning; never after exit status 2, 126 or 127.",
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
    makes=spec.JobSpec,
)

LOGS = Record(
    dir=built(FILE, "Where run directories are made.", default="runs"),
    console=Field(
        Either(text=Choice(get_args(spec.Shown)), items=ListOf(Integer(0))),
        "Whose output is shown: all, rank0, none or a list of ranks.",
    ),
    watch=Field(
        Regex(group="the number, as in 'loss[ =:]+([-0-9.eE+]+)'"),
        "A regular expression for a number in the output that `view` plots: its first group, e.g. "
        "'loss[ =:]+([-0-9.eE+]+)'.",
    ),
    fold=Field(
        Switch(), "Show a line that several ranks print within 0.2 s only once, marked with all their ranks."
    ),
    makes=spec.Logs,
    foreign=by_their_names(dir="log_dir path directory folder"),
)

NOTIFY = Record(
    command=Field(
        ListOf(Word(), least=1, first=Word(home_error)),
        "Program and arguments, run on the controller's machine; it reads the event as JSON from stdin "
        "and is killed after 30 s.",
    ),
    on=Field(
        ListOf(Choice(get_args(spec.Occasion))),
        "The events to run it for: failed, restarted, stalled, finished.",
        "all four",
    ),
    makes=spec.Notify,
    required=("command",),
)

METRICS = Record(
    file=built(
        FILE, "Path on the controller's machine; node_exporter's textfile collector reads only *.prom."
    ),
    makes=spec.JobSpec,
    required=("file",),
)

SSH_OPTION = Text('an option such as "Compression=no"', r"[A-Za-z]+\s*[= ][^\0\n]*")
SSH = Record(
    config=built(FILE, "An ssh_config file to use.", "as ssh does"),
    options=Field(ListOf(SSH_OPTION), "More -o options.", field="words"),
    persist=built(LIMIT, "Keep connections open this long for the next run."),
    makes=SshOptions,
)

LAUNCHER = Record(
    command=built(
        ListOf(Word(), least=1),
        "A command that runs the command appended to it on a node; {host} is the node's name, as in "
        '[kubectl, exec, -i, "{host}", --].',
    ),
    shell=built(Switch(), "The command behind it is one word for a shell on the node, as with ssh."),
    makes=spec.JobSpec,
    required=("command",),
)

KUBE_NAME = Text("a name in lower case such as gpu-jobs", r"[a-z0-9](?:[-.a-z0-9]{0,251}[a-z0-9])?")
KUBE_KEYS = r"(?:[a-z0-9](?:[-.a-z0-9]*[a-z0-9])?/)?[A-Za-z0-9](?:[-_.A-Za-z0-9]*[A-Za-z0-9])?"
KUBE_MAP = MapOf(Word(), KUBE_KEYS, "a name such as team or example.com/team", nulls=False)
IN_IMAGE = Text("an absolute path", r"/[^\0\n:]*")

RESOURCES = Record(
    limits=Field(KUBE_MAP, "What each pod may use at most, e.g. {memory: 64Gi}.", "GPUs alone"),
    requests=Field(KUBE_MAP, "What is reserved for each pod.", "its limits"),
    foreign=dict.fromkeys(("cpu", "memory", "nvidia.com/gpu", "amd.com/gpu"), "limits"),
)

VOLUME = Record(
    mount=Field(IN_IMAGE, "Where it appears in the pods."),
    claim=Field(KUBE_NAME, "A PersistentVolumeClaim."),
    config_map=Field(KUBE_NAME, "A ConfigMap."),
    secret=Field(KUBE_NAME, "A Secret."),
    host_path=Field(IN_IMAGE, "A folder of the node that the pod runs on."),
    sub_path=Field(LINE, "Only this folder of it."),
    read_only=Field(Switch(), "Pods can't write to it."),
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
    secret=Field(KUBE_NAME, "The Secret that has the variable's value."),
    key=Field(Text("a key of the Secret", r"[-._A-Za-z0-9]{1,253}"), "Its key there."),
    required=("secret", "key"),
)

KUBERNETES = Record(
    image=Field(LINE, "The image of the pods, with Python 3.10 or later and torch."),
    namespace=Field(KUBE_NAME, "Namespace.", "the one that kubectl uses"),
    selector=Field(LINE, "Labels of the pods that launcher: kubernetes runs in, e.g. app=train."),
    container=Field(KUBE_NAME, "The container of each of them.", "the first"),
    labels=Field(KUBE_MAP, "Labels of the Job and its pods."),
    annotations=Field(KUBE_MAP, "Annotations of the Job and its pods."),
    node_selector=Field(KUBE_MAP, "Labels that the nodes must have."),
    tolerations=Field(
        ListOf(Tree("a toleration such as {key: nvidia.com/gpu, operator: Exists}")),
        "Taints that the pods tolerate, as in a pod's `tolerations`.",
    ),
    queue=Field(KUBE_NAME, "Kueue's LocalQueue to wait in, so that all pods start together."),
    resources=Field(RESOURCES, "CPUs, memory and so on of each pod; GPUs come from gpus_per_node."),
    volumes=Field(ListOf(VOLUME), "What to mount in each pod."),
    secrets=Field(
        MapOf(SECRET, r"[A-Za-z_][A-Za-z0-9_]*", "a variable name", nulls=False),
        "Variables whose values come from Secrets; they win over env.",
    ),
    service_account=Field(KUBE_NAME, "ServiceAccount of the pods."),
    image_pull_secrets=Field(ListOf(KUBE_NAME), "Secrets to pull the image with."),
    priority_class=Field(KUBE_NAME, "PriorityClass of the pods."),
    ttl=Field(
        LIMIT, "The finished Job is deleted after this time; none = never.", field="ttl", default=604800.0
    ),
    runtime=Field(KUBE_NAME, "The ClusterTrainingRuntime of a TrainJob.", default="torch-distributed"),
    extra=Field(
        Tree("a mapping"),
        "Merged into the Job: mappings key by key, lists of mappings with name item by item; the rest is "
        "replaced.",
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
    image=built(
        LINE, "The image: a name that the runtime knows, or a file where apptainer or enroot has it."
    ),
    runtime=built(
        Either(text=Choice(get_args(Runtime)), items=ListOf(Word(), least=1)),
        "docker, podman, apptainer, enroot or pyxis; a list adds options of its own, as in "
        "[podman, --root=/scratch/images].",
        default="docker",
    ),
    mounts=built(
        ListOf(LINE),
        "Paths of the node to mount inside: PATH, PATH:PATH_INSIDE or PATH:PATH_INSIDE:ro. The workers' "
        "directory always is.",
    ),
    options=Field(ListOf(LINE), "More options, as the runtime takes them."),
    env=Field(ENV, "Variables of the container; null = as on the node."),
    makes=Container,
    required=("image",),
    foreign={"volumes": "mounts", "args": "options", "engine": "runtime", "name": "image"},
)

JOB = Record(
    name=built(SOME_TEXT, "The job's name.", "the file's stem"),
    nodes=built(
        Either(number=Integer(1, 4096), items=ListOf(NODE, least=1)),
        "The hosts in rank order; or a number of nodes, of the allocation or on this machine.",
        told="all of the allocation; outside of one, 1",
    ),
    min_nodes=Field(Integer(1), "Minimum nodes to continue with when others are lost.", "all of them"),
    spares=built(
        Either(text=Choice(("rest",)), items=ListOf(NODE)),
        "Hosts that replace lost nodes; rest = those of the allocation that nodes leaves over.",
    ),
    hostfile=built(FILE, "A hostfile (Open MPI, DeepSpeed, Horovod) instead of nodes."),
    gpus_per_node=built(
        Either(number=Integer(0), text=AUTO), "GPUs of each node; 0 = a CPU job.", default="auto"
    ),
    procs_per_node=built(Integer(1), "Workers on each node.", "one per GPU, 1 on a CPU job"),
    numa_binding=built(
        Choice(get_args(spec.NumaMode), none=True),
        "CPUs of each worker, as with torchrun: node = those of its GPU's NUMA node; socket = those of "
        "its GPU's socket; exclusive = its own share of that NUMA node's cores; core-complex = those of "
        "one last-level cache.",
    ),
    cpu_binding=built(
        Either(
            text=Choice(("cores",), none=True),
            items=ListOf(Either(number=Integer(0, 99999), text=CPUS), least=1),
        ),
        "CPUs of each worker: cores = an equal share of the node's physical cores, shared with no other "
        'worker; or a list by local rank, such as ["0-3", "4-7"].',
    ),
    backend=Field(
        Choice(("auto", *get_args(spec.Backend))),
        "What torch.distributed will use.",
        ": nccl with GPUs, else gloo",
    ),
    rendezvous=Field(RENDEZVOUS, "Where the ranks meet."),
    master_addr=built(SOME_TEXT, "Host of the endpoint; rendezvous.endpoint wins."),
    master_port=built(PORT, "Port of the endpoint; rendezvous.endpoint wins."),
    script=built(FILE, "A Python script; relative to the workdir of its node."),
    module=built(Text("a dotted module name", r"[A-Za-z_][\w.]*"), "A Python module, as with python -m."),
    command=built(
        ListOf(ARGUMENT, least=1, first=Word(_program_error)),
        "Any program, from PATH or by its path, and its arguments.",
    ),
    args=Field(
        ListOf(ARGUMENT),
        "Arguments; {rank}, {local_rank}, {node_rank}, {world_size}, {local_world_size}, {master_addr} "
        "and {master_port} are filled in; write {{rank}} for a literal {rank}.",
    ),
    env=built(
        ENV,
        "Variables of the workers; null passes on the value from your shell, and fails if it is unset. "
        "{job_id} in a value is the job's id, for trackers that resume by it.",
    ),
    python=built(
        PYTHON, "Interpreter on the nodes.", "the path of distlaunch's own if it exists there, else python3"
    ),
    workdir=built(
        FILE, "Working directory of the workers; ~/ is the home of the node's user.", "the job file's folder"
    ),
    timeouts=Field(TIMEOUTS, "How long things may take."),
    restarts=built(RESTARTS, "Whether the whole job starts again after a failure; a number sets max."),
    elastic=Field(ELASTIC, "How an elastic job (min_nodes, spares) changes its size."),
    on_stall=Field(Choice(get_args(spec.OnStall)), "What to do when ranks stall for timeouts.stall."),
    on_warning=Field(
        Choice(get_args(spec.OnWarning)),
        "The signal that ranks get when a scheduler announces the job's end; after TERM or INT they must "
        "leave, after USR1 or USR2 they go on.",
    ),
    role=Field(LINE, "ROLE_NAME of the workers."),
    virtual_local_rank=Field(
        Switch(), "Each worker sees only its own GPU, and LOCAL_RANK is 0.", field="one_device"
    ),
    logs=built(LOGS, "Where output goes."),
    notify=built(NOTIFY, "A program to run when the run fails, restarts, stalls or finishes."),
    metrics=built(METRICS, "Write the run's metrics to a file in Prometheus' text format."),
    ssh=built(SSH, "How ssh is called."),
    container=built(CONTAINER, "Run the ranks in a container on each node, and the agent with them."),
    mpirun=built(
        Either(text=LINE, items=ListOf(Word(), least=1)),
        "MPI's launcher, which runs `distlaunch exec` as each rank: a program; a list adds options, as "
        "in [mpirun, --mca, btl, self,tcp].",
        "as launcher says",
    ),
    kubernetes=Field(KUBERNETES, "What `export kubernetes` asks of a cluster."),
    launcher=built(
        Either(text=Choice(("auto", "kubernetes", "local", "mpirun", "slurm", "ssh")), entries=LAUNCHER),
        "How nodes are reached, or a command that reaches each; kubernetes = pods that run already; "
        "mpirun = as auto, and MPI's launcher starts the ranks.",
        ": its scheduler's way inside an allocation, ssh for hosts, else local",
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
    title="a mapping of job keys",
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
    """Return (key, type, explanation, default) of every key, sections before their keys.

    A section with several uses is described once; `shown` are the sections already described.
    """
    rows: list[tuple[str, str, str, str]] = []
    for key, entry in record.fields.items():
        rows.append((prefix + key, entry.kind.name, entry.doc, record.default_text(key)))
        for inner, inner_prefix in entry.kind.sections(prefix + key):
            if inner not in shown:
                rows += reference(inner, inner_prefix, shown)
                shown = [*shown, inner]
    return rows
