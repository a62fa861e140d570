"""The keys that Kubernetes and containers have in a job file: a part of the table in `fields.py`."""

from typing import get_args

from distlaunch.job.types import (
    ENV,
    LINE,
    Choice,
    Duration,
    Either,
    Field,
    ListOf,
    MapOf,
    OrNone,
    Record,
    Switch,
    Text,
    Tree,
    Word,
    built,
    by_their_names,
)
from distlaunch.transports.container import Container, Runtime

KUBE_NAME = Text("a name in lower case such as gpu-jobs", r"[a-z0-9](?:[-.a-z0-9]{0,251}[a-z0-9])?")
KUBE_KEYS = r"(?:[a-z0-9](?:[-.a-z0-9]*[a-z0-9])?/)?[A-Za-z0-9](?:[-_.A-Za-z0-9]*[A-Za-z0-9])?"
KUBE_MAP = MapOf(Word(), KUBE_KEYS, "a name such as team or example.com/team", nulls=False)
IN_IMAGE = Text("an absolute path", r"/[^\0\n:]*")

RESOURCES = Record(
    {
        "limits": Field(KUBE_MAP, "What each pod may use at most, e.g. {memory: 64Gi}.", "GPUs alone"),
        "requests": Field(KUBE_MAP, "What is reserved for each pod.", "its limits"),
    },
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
    {
        "secret": Field(KUBE_NAME, "The Secret that has the variable's value."),
        "key": Field(Text("a key of the Secret", r"[-._A-Za-z0-9]{1,253}"), "Its key there."),
    },
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
            OrNone(Duration()),
            "The finished Job is deleted after this time; none = never.",
            field="ttl",
            default=604800.0,
        ),
        "runtime": Field(KUBE_NAME, "The ClusterTrainingRuntime of a TrainJob.", default="torch-distributed"),
        "extra": Field(
            Tree("a mapping"),
            "Merged into the Job: mappings key by key, lists of mappings with name item by item; the rest is "
            "replaced.",
        ),
    },
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
