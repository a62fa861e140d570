"""The objects of a job as data, in the order in which a cluster is to get them."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from distlaunch.job.spec import JobSpec
from distlaunch.kubernetes import pods as of
from distlaunch.kubernetes.names import GROUP, Kind, object_name
from distlaunch.kubernetes.pods import ARCHIVE, Manifest, Pods, given, labels, pod_template

MISTAKES = [2, 126, 127]
"""Exit statuses that no other start would change."""
_QUEUE = "kueue.x-k8s.io/queue-name"


def manifests(spec: JobSpec, kind: Kind, procs: int, archive: str) -> list[Manifest]:
    """`procs` are the ranks of each pod; `archive` is the launcher, a .tar.xz in base64."""
    pods = Pods(spec, object_name(spec.name, kind, len(spec.nodes)), kind, procs)
    bundle = {"metadata": _metadata(pods, pods.bundle), "binaryData": {ARCHIVE: archive}}
    service = [_service(pods)] if kind == "job" and pods.number > 1 else []
    workload = merged(_KINDS[kind](pods), spec.kubernetes.extra)
    return [{"apiVersion": "v1", "kind": "ConfigMap", **bundle}, *service, workload]


def merged(base: Manifest, more: Mapping[str, Any]) -> Manifest:
    """`base` with `more` on top: mappings key by key, lists of named mappings item by item."""
    return {**base, **{key: _merged_value(base.get(key), value) for key, value in more.items()}}


def _merged_value(base: Any, more: Any) -> Any:
    if isinstance(base, dict) and isinstance(more, dict):
        return merged(base, more)
    if not (_is_named(base) and _is_named(more)):
        return more
    known = {each["name"]: each for each in base}
    for each in more:
        known[each["name"]] = merged(known.get(each["name"], {}), each)
    return list(known.values())


def _is_named(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) and "name" in each for each in value)


def _metadata(pods: Pods, name: str) -> Manifest:
    return given({"name": name, "namespace": pods.spec.kubernetes.namespace, "labels": labels(pods)})


def _workload(pods: Pods, version: str, kind: str, spec: Manifest) -> Manifest:
    asked, meta = pods.spec.kubernetes, _metadata(pods, pods.name)
    if asked.queue:
        meta["labels"][_QUEUE] = asked.queue
    meta.update(given({"annotations": dict(asked.annotations)}))
    return {"apiVersion": version, "kind": kind, "metadata": meta, "spec": spec}


def _service(pods: Pods) -> Manifest:
    """Headless: it gives each pod a name, also before it is ready."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"batch.kubernetes.io/job-name": pods.name},
        "ports": [{"name": "rendezvous", "port": pods.port}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(pods, pods.name), "spec": spec}


def _job(pods: Pods) -> Manifest:
    # One pod that fails ends all others, and each of them counts.
    spec = {**_job_spec(pods, pods.spec.restarts.requeue * pods.number), **_ttl(pods)}
    return _workload(pods, "batch/v1", "Job", spec)


def _ttl(pods: Pods) -> Manifest:
    ttl_s = pods.spec.kubernetes.ttl_s
    return {} if ttl_s is None else {"ttlSecondsAfterFinished": math.ceil(ttl_s)}


def _job_spec(pods: Pods, backoff: int) -> Manifest:
    return {
        "completionMode": "Indexed",
        "completions": pods.number,
        "parallelism": pods.number,
        "backoffLimit": backoff,
        "podFailurePolicy": {"rules": _rules(backoff)},
        **_deadline(pods),
        "template": pod_template(pods),
    }


def _rules(backoff: int) -> list[Manifest]:
    codes = {"containerName": "main", "operator": "In", "values": MISTAKES}
    mistakes: list[Manifest] = [{"action": "FailJob", "onExitCodes": codes}]
    evicted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return [*mistakes, *([evicted] if backoff else [])]


def _deadline(pods: Pods) -> Manifest:
    limit_s = pods.spec.timeouts.job_s
    return {} if limit_s is None else {"activeDeadlineSeconds": math.ceil(limit_s)}


def _jobset(pods: Pods) -> Manifest:
    requeue = pods.spec.restarts.requeue
    rule = {"name": "mistakes", "action": "FailJobSet"}
    rule_of = {**rule, "onJobFailureReasons": ["PodFailurePolicy", "DeadlineExceeded"]}
    policy = {"failurePolicy": {"maxRestarts": requeue, "rules": [rule_of]}} if requeue else {}
    group = {"name": GROUP, "replicas": 1, "template": {"spec": _job_spec(pods, 0)}}
    network = {"enableDNSHostnames": True, "subdomain": pods.name, "publishNotReadyAddresses": True}
    spec = {"network": network, **policy, **_ttl(pods), "replicatedJobs": [group]}
    return _workload(pods, "jobset.x-k8s.io/v1alpha2", "JobSet", spec)


def _trainjob(pods: Pods) -> Manifest:
    trainer = {
        "image": pods.spec.kubernetes.image,
        "command": of.command(pods),
        "args": of.args(pods),
        "numNodes": pods.number,
        "numProcPerNode": pods.procs,
        **given({"env": of.env(pods), "resourcesPerNode": of.resources(pods)}),
    }
    patch = {"manager": "distlaunch", "trainingRuntimeSpec": {"template": {"spec": _patch(pods)}}}
    reference = {"name": pods.spec.kubernetes.runtime}
    spec = {"runtimeRef": reference, **_deadline(pods), "trainer": trainer, "runtimePatches": [patch]}
    return _workload(pods, "trainer.kubeflow.org/v1alpha1", "TrainJob", spec)


def _patch(pods: Pods) -> Manifest:
    """What a TrainJob says of its pods beside what they run."""
    template = pod_template(pods)
    pod = {key: template["spec"][key] for key in _PATCHED if key in template["spec"]}
    pod["containers"] = [{"name": GROUP, "volumeMounts": of.mounts(pods)}]
    inner = {"template": {"metadata": template["metadata"], "spec": pod}}
    return {"replicatedJobs": [{"name": GROUP, "template": {"spec": inner}}]}


_PATCHED = (
    *("terminationGracePeriodSeconds", "nodeSelector", "tolerations", "serviceAccountName"),
    *("imagePullSecrets", "volumes"),
)
_KINDS: Mapping[Kind, Callable[[Pods], Manifest]] = {"job": _job, "jobset": _jobset, "trainjob": _trainjob}
