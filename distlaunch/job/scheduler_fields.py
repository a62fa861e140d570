"""The keys that schedulers and containers have in a job file: a part of the table in `fields.py`."""

from typing import get_args

from distlaunch.job.engine_options import GridEngineOptions, PbsOptions
from distlaunch.job.slurm_options import SlurmOptions
from distlaunch.job.spec import KubernetesOptions, Resources, SecretKey, Volume
from distlaunch.job.types import (
    ENV,
    LINE,
    Choice,
    Duration,
    Either,
    Field,
    Integer,
    Lines,
    ListOf,
    MapOf,
    OrNone,
    Record,
    Switch,
    Text,
    Tree,
    Word,
    built,
)
from distlaunch.transports.container import Container, Runtime

_CLOCK = r"[0-9]+:[0-9]{2}(?::[0-9]{2})?|[0-9]+-[0-9]{1,2}(?::[0-9]{2}){0,2}"
TIME = Text('a time such as "12h" or "1-12:00:00"', rf"{_CLOCK}|(?:[0-9]+[dhms])+")

ALLOCATED = Field(Integer(1, 4096), "Nodes to allocate, where spares: rest needs more than nodes.", "nodes")
SETUP = Field(Lines(), "Shell commands to run first on the first node, such as module load.")

SLURM = Record(
    {
        "nodes": ALLOCATED,
        "partition": Field(LINE, "Partition, or several, with commas."),
        "account": Field(LINE, "Account to charge."),
        "qos": Field(LINE, "Quality of service."),
        "time": Field(TIME, 'Time limit: "12h", "1d12h" or Slurm\'s "1-12:00:00".', "the partition's"),
        "constraint": Field(LINE, "Features that the nodes must have."),
        "gpus": Field(
            Either(number=Integer(0), text=LINE), "GPUs of each node, a100:8 for a type.", "gpus_per_node"
        ),
        "gres": Field(LINE, "Other resources of each node; replaces gpus."),
        "mem": Field(Either(number=Integer(0), text=LINE), "Memory of each node, e.g. 200G; 0 = all."),
        "cpus_per_task": Field(Integer(1), "CPUs for each worker."),
        "exclusive": Field(Switch(), "Share the nodes with no other job."),
        "nodelist": Field(LINE, "Hosts that must be among the nodes."),
        "exclude": Field(LINE, "Hosts that must not."),
        "dependency": Field(LINE, "What to wait for, e.g. afterok:1234."),
        "signal": Field(
            Text('a signal such as "USR1@120"', r"(?:R:)?[A-Z][A-Z0-9]*(?:@[0-9]{1,5})?"),
            "The notice before the time limit: USR1@120 comes two minutes before; see on_notice.",
        ),
        "comment": Field(LINE, "A comment on the job."),
        "setup": SETUP,
        "extra": Field(
            ListOf(Text('an option such as "--reservation=maint"', r"--?[A-Za-z][^\0\n]*")),
            "Any other options of sbatch.",
        ),
    },
    makes=SlurmOptions,
    foreign={
        "gpus_per_node": "gpus",
        "walltime": "time",
        "memory": "mem",
        "cpus": "cpus_per_task",
        "queue": "partition",
        "time_limit": "time",
        "feature": "constraint",
        "options": "extra",
        "sbatch_options": "extra",
        "modules": "setup",
    },
)

WALLTIME = Text('a time such as "12h" or "36:00:00"', r"[0-9]+:[0-9]{2}:[0-9]{2}|(?:[0-9]+[dhms])+")
QSUB_OPTIONS = ListOf(Text('an option such as "-p -100"', r"-[A-Za-z][^\0\n]*"))
_OF_BATCH = {"walltime": "time", "time_limit": "time", "options": "extra", "modules": "setup"}

GRID_ENGINE = Record(
    {
        "nodes": ALLOCATED,
        "pe": Field(LINE, "Parallel environment, which places slots on hosts: `qconf -spl` lists them."),
        "slots": Field(Integer(1), "Slots of each node.", "its workers"),
        "gpus": Field(LINE, "The request for GPUs, as -l takes it, e.g. gpu=8.", "as gpu=gpus_per_node"),
        "queue": Field(LINE, "Queue."),
        "project": Field(LINE, "Project to charge."),
        "time": Field(WALLTIME, 'Time limit (h_rt): "12h" or "36:00:00".', "the queue's"),
        "setup": SETUP,
        "extra": Field(QSUB_OPTIONS, "Any other options of qsub."),
    },
    makes=GridEngineOptions,
    foreign={**_OF_BATCH, "parallel_environment": "pe", "h_rt": "time"},
)

PBS = Record(
    {
        "nodes": ALLOCATED,
        "select": Field(LINE, "What to select, instead of nodes, cpus, gpus and mem: 4:ncpus=64:ngpus=8."),
        "cpus": Field(Integer(1), "CPUs of each node (ncpus).", "its workers"),
        "gpus": Field(Integer(0), "GPUs of each node (ngpus).", "gpus_per_node"),
        "mem": Field(LINE, "Memory of each node, e.g. 200gb."),
        "queue": Field(LINE, "Queue."),
        "project": Field(LINE, "Project (-P)."),
        "account": Field(LINE, "Account to charge (-A)."),
        "time": Field(WALLTIME, 'Time limit (walltime): "12h" or "36:00:00".', "the queue's"),
        "setup": SETUP,
        "extra": Field(QSUB_OPTIONS, "Any other options of qsub."),
    },
    makes=PbsOptions,
    foreign={**_OF_BATCH, "ncpus": "cpus", "ngpus": "gpus", "memory": "mem"},
)

KUBE_NAME = Text("a name in lower case such as gpu-jobs", r"[a-z0-9](?:[-.a-z0-9]{0,251}[a-z0-9])?")
KUBE_KEYS = r"(?:[a-z0-9](?:[-.a-z0-9]*[a-z0-9])?/)?[A-Za-z0-9](?:[-_.A-Za-z0-9]*[A-Za-z0-9])?"
KUBE_MAP = MapOf(Word(), KUBE_KEYS, "a name such as team or example.com/team", nulls=False)
IN_IMAGE = Text("an absolute path", r"/[^\0\n:]*")

RESOURCES = Record(
    {
        "limits": Field(KUBE_MAP, "What each pod may use at most, e.g. {memory: 64Gi}.", "GPUs alone"),
        "requests": Field(KUBE_MAP, "What is reserved for each pod.", "its limits"),
    },
    makes=Resources,
    foreign=dict.fromkeys(("cpu", "memory", "nvidia.com/gpu", "amd.com/gpu"), "limits"),
)

VOLUME = Record(
    {
        "mount": Field(IN_IMAGE, "Where it appears in the pods."),
        "claim": Field(KUBE_NAME, "A PersistentVolumeClaim."),
        "config_map": Field(KUBE_NAME, "A ConfigMap."),
        "secret": Field(KUBE_NAME, "A Secret."),
        "host_path": Field(IN_IMAGE, "A folder of the node that the pod runs on."),
        "sub_path": Field(LINE, "Only this folder of it."),
        "read_only": Field(Switch(), "Pods can't write to it."),
    },
    makes=Volume,
    foreign={
        "mount_path": "mount",
        "mountPath": "mount",
        "path": "mount",
        "persistent_volume_claim": "claim",
        "pvc": "claim",
        "configmap": "config_map",
        "hostPath": "host_path",
        "readOnly": "read_only",
        "subPath": "sub_path",
    },
    required=("mount",),
)

SECRET = Record(
    {
        "secret": Field(KUBE_NAME, "The Secret that has the variable's value."),
        "key": Field(Text("a key of the Secret", r"[-._A-Za-z0-9]{1,253}"), "Its key there."),
    },
    makes=SecretKey,
    required=("secret", "key"),
)

KUBERNETES = Record(
    {
        "image": Field(LINE, "The image of the pods, with Python 3.10 or later and torch."),
        "namespace": Field(KUBE_NAME, "Namespace.", "the one that kubectl uses"),
        "selector": Field(LINE, "Labels of the pods that launcher: kubernetes runs in, e.g. app=train."),
        "container": Field(KUBE_NAME, "The container of each of them.", "the first"),
        "labels": Field(KUBE_MAP, "Labels of the Job and its pods."),
        "annotations": Field(KUBE_MAP, "Annotations of the Job and its pods."),
        "node_selector": Field(KUBE_MAP, "Labels that the nodes must have."),
        "tolerations": Field(
            ListOf(Tree("a toleration such as {key: nvidia.com/gpu, operator: Exists}")),
            "Taints that the pods tolerate, as in a pod's `tolerations`.",
        ),
        "queue": Field(KUBE_NAME, "Kueue's LocalQueue to wait in, so that all pods start together."),
        "resources": Field(RESOURCES, "CPUs, memory and so on of each pod; GPUs come from gpus_per_node."),
        "volumes": Field(ListOf(VOLUME), "What to mount in each pod."),
        "secrets": Field(
            MapOf(SECRET, r"[A-Za-z_][A-Za-z0-9_]*", "a variable name", nulls=False),
            "Variables whose values come from Secrets; they win over env.",
        ),
        "service_account": Field(KUBE_NAME, "ServiceAccount of the pods."),
        "image_pull_secrets": Field(ListOf(KUBE_NAME), "Secrets to pull the image with."),
        "priority_class": Field(KUBE_NAME, "PriorityClass of the pods."),
        "ttl": Field(
            OrNone(Duration()), "The finished Job is deleted after this time; none = never.", field="ttl_s"
        ),
        "runtime": Field(KUBE_NAME, "The ClusterTrainingRuntime of a TrainJob."),
        "extra": Field(
            Tree("a mapping"),
            "Merged into the Job: mappings key by key, lists of mappings with name item by item; the rest is "
            "replaced.",
        ),
    },
    makes=KubernetesOptions,
    foreign={
        "nodeSelector": "node_selector",
        "serviceAccount": "service_account",
        "serviceAccountName": "service_account",
        "imagePullSecrets": "image_pull_secrets",
        "priorityClassName": "priority_class",
        "ttlSecondsAfterFinished": "ttl",
        "mounts": "volumes",
        "kueue": "queue",
        "pull_secrets": "image_pull_secrets",
    },
)

CONTAINER = Record(
    {
        "image": built(
            LINE, "The image: a name that the runtime knows, or a file where apptainer or enroot has it."
        ),
        "runtime": built(
            Either(text=Choice(get_args(Runtime)), items=ListOf(Word(), least=1)),
            "docker, podman, apptainer, enroot or pyxis; a list adds options of its own, as in "
            "[podman, --root=/scratch/images].",
            default="docker",
        ),
        "mounts": built(
            ListOf(LINE),
            "Paths of the node to mount inside: PATH, PATH:PATH_INSIDE or PATH:PATH_INSIDE:ro. The workers' "
            "directory always is.",
        ),
        "options": Field(ListOf(LINE), "More options, as the runtime takes them."),
        "env": Field(ENV, "Variables of the container; null = as on the node."),
    },
    makes=Container,
    required=("image",),
    foreign={"volumes": "mounts", "args": "options", "engine": "runtime", "name": "image"},
)
