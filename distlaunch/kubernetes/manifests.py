"""A job's Kubernetes objects as data, in the order in which a cluster needs them."""

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from distlaunch.agent.frozen import Frozen
from distlaunch.job.keys import KUBERNETES
from distlaunch.job.spec import FOREVER_S, JobSpec
from distlaunch.job.text import fill
from distlaunch.kubernetes.pods import GPU
from distlaunch.plan.placement import DEFAULT_PORT
from distlaunch.plan.shell_text import dashes, job_flags, torch_argument

Kind = Literal["job", "jobset", "trainjob"]
GROUP = "node"
"""The name of the replicated job in a JobSet, and in the runtime of a TrainJob."""
MOST = 63
"""Maximum characters of a DNS label, such as the name of a host or Service."""
_HASH = 6
_RANDOM = "-abcde"
"""The random suffix of a pod's name, which also counts toward JobSet's limit."""
Manifest = dict[str, Any]
ARCHIVE = "distlaunch.tar.xz"
"""The key of the launcher's archive in the ConfigMap."""
PACKED, UNPACKED = "/etc/distlaunch", "/run/distlaunch"
INDEX = "$(JOB_COMPLETION_INDEX)"
"""The node rank, which Kubernetes expands."""
SECRET = "DISTLAUNCH_SECRET"  # noqa: S105 (the name of a variable)
"""The variable that contains the secret that the job's pods need to join its run."""
MORE_S = 10
"""Seconds allowed for the launcher to exit after its ranks have ended."""
_BOOT = f"""\
import os, sys
if sys.version_info < (3, 10):
    sys.exit("distlaunch: needs Python 3.10 or later; %s is %s" % (sys.executable, sys.version.split()[0]))
import tarfile
with tarfile.open("{PACKED}/{ARCHIVE}") as archive:
    archive.extraction_filter = lambda member, path: member
    archive.extractall("{UNPACKED}")
os.execv(sys.executable, [sys.executable, "-I", "{UNPACKED}", *sys.argv[1:]])
"""


def object_name(name: str, kind: Kind, nodes: int) -> str:
    """Return the job's name as a DNS label, with room for the suffix of pods.

    A shortened name ends with a hash.
    """
    room = MOST - len(_suffix(kind, nodes))
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    label = plain if plain[:1].isalpha() else f"job-{plain}".rstrip("-")
    if len(label) <= room:
        return label
    tail = hashlib.sha256(name.encode()).hexdigest()[:_HASH]
    return f"{label[: room - _HASH - 1].rstrip('-')}-{tail}"


def first_host(name: str, kind: Kind) -> str:
    """Return the host name of the first pod, as the others resolve it."""
    return f"{name}-0.{name}" if kind == "job" else f"{name}-{GROUP}-0-0.{name}"


def _suffix(kind: Kind, nodes: int) -> str:
    """Return the suffix of the longest pod host name."""
    return f"-{nodes - 1}" if kind == "job" else f"-{GROUP}-0-{nodes - 1}{_RANDOM}"


class Pods(Frozen):
    """The pods of a job: the name and kind of its objects, and the number of ranks in each pod."""

    spec: JobSpec
    name: str
    kind: Kind
    procs: int

    @property
    def number(self) -> int:
        """Return the number of pods."""
        return len(self.spec.nodes)

    @property
    def port(self) -> int:
        """Return the port of the rendezvous."""
        return self.spec.rendezvous.port or DEFAULT_PORT

    @property
    def bundle(self) -> str:
        """Return the name of the ConfigMap."""
        return f"{self.name}-distlaunch"

    @property
    def stop_s(self) -> int:
        """Return the seconds allowed for the ranks to exit."""
        return max(1, math.ceil(self.spec.limits.stop_s))


def pod_template(pods: Pods) -> Manifest:
    """Return the template of the pods."""
    asked = pods.spec.kubernetes
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": pods.stop_s + MORE_S,
        "enableServiceLinks": False,  # a Service named master would set MASTER_PORT in each pod
        "subdomain": pods.name if pods.kind == "job" and pods.number > 1 else None,
        "nodeSelector": asked.get("node_selector"),
        "tolerations": list(asked.get("tolerations", ())),
        "serviceAccountName": asked.get("service_account"),
        "imagePullSecrets": [{"name": name} for name in asked.get("image_pull_secrets", ())],
        "priorityClassName": asked.get("priority_class"),
        "containers": [_container(pods)],
        "volumes": volumes(pods),
    }
    meta = given({"labels": labels(pods), "annotations": asked.get("annotations")})
    return {"metadata": meta, "spec": given(pod)}


def labels(pods: Pods) -> dict[str, str]:
    """Return the labels of all objects of the job."""
    known = {"app.kubernetes.io/name": pods.name, "app.kubernetes.io/managed-by": "distlaunch"}
    return {**known, **pods.spec.kubernetes.get("labels", {})}


def given(fields: Mapping[str, Any]) -> Manifest:
    """Return the fields that have a value."""
    return {key: value for key, value in fields.items() if value not in (None, [], {}, "")}


def _container(pods: Pods) -> Manifest:
    spec = pods.spec
    return {
        "name": "main",
        "image": spec.kubernetes["image"],
        **given({"workingDir": "" if spec.program.workdir == "." else spec.program.workdir}),
        "command": command(pods),
        "args": args(pods),
        **given({"env": env(pods), "resources": resources(pods)}),
        "volumeMounts": mounts(pods),
    }


def command(pods: Pods) -> list[str]:
    """Return the command that unpacks and execs the launcher, with the ranks' interpreter."""
    workdir = pods.spec.program.workdir
    # A TrainJob has no field for the working directory.
    enter = f"import os; os.chdir({workdir!r})\n" if pods.kind == "trainjob" and workdir != "." else ""
    return [pods.spec.program.python or "python3", "-c", unexpanded(enter + _BOOT)]


def args(pods: Pods) -> list[str]:
    """Return the launcher's command line, which is the same in all pods."""
    spec = pods.spec
    program = [*dashes(spec.program), spec.program.words[0], *map(torch_argument, spec.program.arguments)]
    # Write log files only if the job sets a directory, which outlives the pod.
    kept = unexpanded(spec.logs.directory)
    files = (f"--log-dir={kept}", "--tee=3", "--log-line-prefix-template=[${rank}] ")
    logs = files if "logs.dir" in spec.places else ()
    own = (*_place(pods), *_wait(pods), f"--shutdown-timeout={pods.stop_s}", *logs)
    return ["torchrun", *own, *map(unexpanded, (*job_flags(spec, spec.program), *program))]


def _place(pods: Pods) -> Iterator[str]:
    """Yield the flags that connect the launchers. A TrainJob uses variables instead."""
    if pods.kind == "trainjob":
        return
    yield f"--nnodes={pods.number}"
    yield f"--nproc-per-node={pods.procs}"
    if pods.number > 1:
        yield f"--node-rank={INDEX}"
        yield f"--master-addr={first_host(pods.name, pods.kind)}"
        yield f"--master-port={pods.port}"


def _wait(pods: Pods) -> list[str]:
    """Return the flag for the time limit of the rendezvous, if the job sets it."""
    if "timeouts.join" not in pods.spec.places or pods.number == 1:
        return []
    limit_s = pods.spec.limits.join_s
    return [f"--rdzv-conf=timeout={math.ceil(FOREVER_S if limit_s is None else max(1, limit_s))}"]


def unexpanded(text: str) -> str:
    """Return `text` protected from Kubernetes $(NAME) expansion."""
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


def env(pods: Pods) -> list[Manifest]:
    """Return the job's variables, with references to Secrets."""
    secrets = pods.spec.kubernetes.get("secrets", {})
    own = ((name, value) for name, value in pods.spec.program.env.items() if name not in secrets)
    plain = {name: fill(value.text, every=False) for name, value in own}
    values = [{"name": name, "value": unexpanded(text)} for name, text in plain.items()]
    keys: Manifest = {name: {"name": each["secret"], "key": each["key"]} for name, each in secrets.items()}
    if pods.number > 1 and SECRET not in {*plain, *keys}:
        keys[SECRET] = {"name": f"{pods.name}-launchers", "key": "secret", "optional": True}
    return [*values, *({"name": name, "valueFrom": {"secretKeyRef": ref}} for name, ref in keys.items())]


def resources(pods: Pods) -> Manifest:
    """Return the resources of each pod."""
    asked, gpus = pods.spec.kubernetes.get("resources", {}), pods.spec.nodes[0].gpus
    limits = dict(asked.get("limits", {}))
    if gpus and not any(map(GPU.match, limits)):
        limits["nvidia.com/gpu"] = str(gpus)
    return given({"limits": limits, "requests": asked.get("requests")})


def volumes(pods: Pods) -> list[Manifest]:
    """Return the volumes of the launcher and of the job."""
    own: list[Manifest] = [
        {"name": "distlaunch", "configMap": {"name": pods.bundle}},
        {"name": "unpacked", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # DataLoaders and NCCL need more than 64 MiB
    ]
    return own + _each_volume(pods, _source)


def _each_volume(pods: Pods, part: Callable[[Mapping[str, Any]], Manifest]) -> list[Manifest]:
    asked = pods.spec.kubernetes.get("volumes", ())
    return [{"name": f"volume{i}", **part(volume)} for i, volume in enumerate(asked)]


def _source(volume: Mapping[str, Any]) -> Manifest:
    match volume:
        case {"claim": name}:
            return {"persistentVolumeClaim": given({"claimName": name, "readOnly": volume.get("read_only")})}
        case {"config_map": name}:
            return {"configMap": {"name": name}}
        case {"secret": name}:
            return {"secret": {"secretName": name}}
    return {"hostPath": {"path": volume["host_path"]}}


def mounts(pods: Pods) -> list[Manifest]:
    """Return the mounts of the volumes."""
    own: list[Manifest] = [
        {"name": "distlaunch", "mountPath": PACKED, "readOnly": True},
        {"name": "unpacked", "mountPath": UNPACKED},
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 — the container's own
    ]
    return own + _each_volume(pods, _mount)


def _mount(volume: Mapping[str, Any]) -> Manifest:
    names = {"mount": "mountPath", "sub_path": "subPath", "read_only": "readOnly"}
    return {own: volume[key] for key, own in names.items() if key in volume}


MISTAKES = [2, 126, 127]
"""Exit statuses after which another start would fail, too."""
_QUEUE = "kueue.x-k8s.io/queue-name"


def manifests(spec: JobSpec, kind: Kind, procs: int, archive: str) -> list[Manifest]:
    """Return the objects of a job with `procs` ranks per pod. `archive` is the launcher (.tar.xz, base64)."""
    pods = Pods(spec, object_name(spec.name, kind, len(spec.nodes)), kind, procs)
    bundle = {"metadata": _metadata(pods, pods.bundle), "binaryData": {ARCHIVE: archive}}
    service = [_service(pods)] if kind == "job" and pods.number > 1 else []
    workload = merged(_KINDS[kind](pods), spec.kubernetes.get("extra", {}))
    return [{"apiVersion": "v1", "kind": "ConfigMap", **bundle}, *service, workload]


def merged(base: Manifest, more: Mapping[str, Any]) -> Manifest:
    """Return `base` overridden by `more`: maps key by key, lists of named maps item by item."""
    return {**base, **{key: _merged_value(base.get(key), value) for key, value in more.items()}}


def _merged_value(base: Any, more: Any) -> Any:
    if isinstance(base, dict) and isinstance(more, dict):
        return merged(base, more)
    if not (_is_named(base) and _is_named(more)):
        return more
    known = {_key(each): each for each in base}
    for each in more:
        known[_key(each)] = merged(known.get(_key(each), {}), each)
    return list(known.values())


def _key(each: Mapping[str, Any]) -> Any:
    """Return the key by which Kubernetes merges lists: a volume can be mounted at several paths."""
    return each.get("mountPath", each["name"])


def _is_named(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) and "name" in each for each in value)


def _metadata(pods: Pods, name: str) -> Manifest:
    return given({"name": name, "namespace": pods.spec.kubernetes.get("namespace"), "labels": labels(pods)})


def _workload(pods: Pods, version: str, kind: str, spec: Manifest) -> Manifest:
    asked, meta = pods.spec.kubernetes, _metadata(pods, pods.name)
    if "queue" in asked:
        meta["labels"][_QUEUE] = asked["queue"]
    meta |= given({"annotations": asked.get("annotations")})
    return {"apiVersion": version, "kind": kind, "metadata": meta, "spec": spec}


def _service(pods: Pods) -> Manifest:
    """Return a headless Service, which gives each pod a name even before it is ready."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"batch.kubernetes.io/job-name": pods.name},
        "ports": [{"name": "rendezvous", "port": pods.port}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(pods, pods.name), "spec": spec}


def _job(pods: Pods) -> Manifest:
    # When a pod fails, all pods of the job fail, and each failure counts.
    spec = {**_job_spec(pods, pods.spec.restarts.requeue * pods.number), **_ttl(pods)}
    return _workload(pods, "batch/v1", "Job", spec)


def _ttl(pods: Pods) -> Manifest:
    return _limit("ttlSecondsAfterFinished", KUBERNETES.value(pods.spec.kubernetes, "ttl"))


def _limit(name: str, seconds: float | None) -> Manifest:
    return {} if seconds is None else {name: math.ceil(seconds)}


def _job_spec(pods: Pods, backoff: int) -> Manifest:
    """Return the spec of an indexed Job, whose failed pods are replaced up to `backoff` times."""
    return {
        "completionMode": "Indexed",
        "completions": pods.number,
        "parallelism": pods.number,
        "backoffLimit": backoff,
        "podFailurePolicy": {"rules": _rules(backoff)},
        **_limit("activeDeadlineSeconds", pods.spec.limits.job_s),
        "template": pod_template(pods),
    }


def _rules(backoff: int) -> list[Manifest]:
    """Return the rules for failed pods: mistakes end the Job; an eviction doesn't count toward `backoff`."""
    codes = {"containerName": "main", "operator": "In", "values": MISTAKES}
    mistakes: Manifest = {"action": "FailJob", "onExitCodes": codes}
    evicted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return [mistakes, evicted] if backoff else [mistakes]


def _jobset(pods: Pods) -> Manifest:
    requeue = pods.spec.restarts.requeue
    reasons = ["PodFailurePolicy", "DeadlineExceeded"]
    rule = {"name": "mistakes", "action": "FailJobSet", "onJobFailureReasons": reasons}
    policy = {"failurePolicy": {"maxRestarts": requeue, "rules": [rule]}} if requeue else {}
    group = {"name": GROUP, "replicas": 1, "template": {"spec": _job_spec(pods, 0)}}
    network = {"enableDNSHostnames": True, "subdomain": pods.name, "publishNotReadyAddresses": True}
    spec = {"network": network, **policy, **_ttl(pods), "replicatedJobs": [group]}
    return _workload(pods, "jobset.x-k8s.io/v1alpha2", "JobSet", spec)


def _trainjob(pods: Pods) -> Manifest:
    """Return a TrainJob, whose runtime creates the pods. The other pod settings become a patch."""
    trainer = {
        "image": pods.spec.kubernetes["image"],
        "command": command(pods),
        "args": args(pods),
        "numNodes": pods.number,
        "numProcPerNode": pods.procs,
        **given({"env": env(pods), "resourcesPerNode": resources(pods)}),
    }
    patch = {"manager": "distlaunch", "trainingRuntimeSpec": {"template": {"spec": _patch(pods)}}}
    limit = _limit("activeDeadlineSeconds", pods.spec.limits.job_s)
    reference = {"name": KUBERNETES.value(pods.spec.kubernetes, "runtime")}
    spec = {"runtimeRef": reference, **limit, "trainer": trainer, "runtimePatches": [patch]}
    return _workload(pods, "trainer.kubeflow.org/v1alpha1", "TrainJob", spec)


def _patch(pods: Pods) -> Manifest:
    """Return a TrainJob's changes to the pods of its runtime, apart from the command."""
    template = pod_template(pods)
    pod = {key: template["spec"][key] for key in _PATCHED if key in template["spec"]}
    pod["containers"] = [{"name": GROUP, "volumeMounts": mounts(pods)}]
    inner = {"template": {"metadata": template["metadata"], "spec": pod}}
    return {"replicatedJobs": [{"name": GROUP, "template": {"spec": inner}}]}


_PATCHED = (
    *("terminationGracePeriodSeconds", "nodeSelector", "tolerations", "serviceAccountName"),
    *("imagePullSecrets", "volumes"),
)
_KINDS: Mapping[Kind, Callable[[Pods], Manifest]] = {"job": _job, "jobset": _jobset, "trainjob": _trainjob}
