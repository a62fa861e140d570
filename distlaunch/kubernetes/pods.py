"""What each pod of a job runs: one launcher, which comes in a ConfigMap."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from distlaunch.agent.frozen import Frozen
from distlaunch.job.spec import FOREVER_S, JobSpec, Volume
from distlaunch.job.text import fill
from distlaunch.kubernetes.checks import names_gpus
from distlaunch.kubernetes.names import Kind, first_host
from distlaunch.plan.layout import DEFAULT_PORT
from distlaunch.plan.torchrun_text import job_flags

Manifest = dict[str, Any]
ARCHIVE = "distlaunch.tar.xz"
"""The key in the ConfigMap."""
PACKED, UNPACKED = "/etc/distlaunch", "/run/distlaunch"
INDEX = "$(JOB_COMPLETION_INDEX)"
SECRET = "DISTLAUNCH_SECRET"  # noqa: S105 (the name of a variable)
"""With it, nobody but the job's own pods can join its run."""
"""The node rank, which Kubernetes fills in."""
MORE_S = 10
"""Seconds of grace in which the launcher ends, once its ranks have."""
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


class Pods(Frozen):
    """A job's pods: the name of its objects, its kind, and how many ranks each pod has."""

    spec: JobSpec
    name: str
    kind: Kind
    procs: int

    @property
    def number(self) -> int:
        """Of pods."""
        return len(self.spec.nodes)

    @property
    def port(self) -> int:
        """Where the launchers meet."""
        return self.spec.master_port or DEFAULT_PORT

    @property
    def bundle(self) -> str:
        """The name of the ConfigMap."""
        return f"{self.name}-distlaunch"


def pod_template(pods: Pods) -> Manifest:
    """The pods of a Job."""
    asked = pods.spec.kubernetes
    told = {
        "nodeSelector": dict(asked.node_selector),
        "tolerations": list(asked.tolerations),
        "serviceAccountName": asked.service_account,
        "imagePullSecrets": [{"name": name} for name in asked.image_pull_secrets],
        "priorityClassName": asked.priority_class,
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace_s(pods),
        "enableServiceLinks": False,  # a Service called master would give each pod a MASTER_PORT
        **({"subdomain": pods.name} if pods.kind == "job" and pods.number > 1 else {}),
        **given(told),
        "containers": [_container(pods)],
        "volumes": volumes(pods),
    }
    meta = given({"labels": labels(pods), "annotations": dict(asked.annotations)})
    return {"metadata": meta, "spec": pod}


def labels(pods: Pods) -> dict[str, str]:
    """Of all objects of the job."""
    known = {"app.kubernetes.io/name": pods.name, "app.kubernetes.io/managed-by": "distlaunch"}
    return {**known, **pods.spec.kubernetes.labels}


def given(fields: Mapping[str, Any]) -> Manifest:
    """The fields that have a value."""
    return {key: value for key, value in fields.items() if value not in (None, [], {}, "")}


def grace_s(pods: Pods) -> int:
    """Seconds from SIGTERM to SIGKILL."""
    return _stop_s(pods) + MORE_S


def _stop_s(pods: Pods) -> int:
    return max(1, math.ceil(pods.spec.timeouts.stop_s))


def _container(pods: Pods) -> Manifest:
    spec = pods.spec
    return {
        "name": "main",
        "image": spec.kubernetes.image,
        **given({"workingDir": workdir(pods)}),
        "command": command(pods),
        "args": args(pods),
        **given({"env": env(pods), "resources": resources(pods)}),
        "volumeMounts": mounts(pods),
    }


def workdir(pods: Pods) -> str | None:
    """None = the image's."""
    return None if pods.spec.workdir == "." else pods.spec.workdir


def command(pods: Pods) -> list[str]:
    """Unpacks and becomes the launcher, under the ranks' interpreter."""
    return [pods.spec.python or "python3", "-c", _BOOT]


def args(pods: Pods) -> list[str]:
    """The launcher's command line, the same in each pod."""
    spec = pods.spec
    program = [spec.program.words[0], *(fill(word, {}) for word in (*spec.program.words[1:], *spec.args))]
    own = (*_place(pods), *_wait(pods), f"--shutdown-timeout={_stop_s(pods)}", *_logs(spec))
    flags = (*own, *map(unexpanded, job_flags(spec)))
    return ["torchrun", *flags, *map(unexpanded, program)]


def _place(pods: Pods) -> Iterator[str]:
    """Flags by which the launchers find each other; a TrainJob's have variables for that."""
    if pods.kind == "trainjob":
        return
    yield f"--nnodes={pods.number}"
    yield f"--nproc-per-node={pods.procs}"
    if pods.number > 1:
        yield f"--node-rank={INDEX}"
        yield f"--master-addr={first_host(pods.name, pods.kind)}"
        yield f"--master-port={pods.port}"


def _wait(pods: Pods) -> list[str]:
    """How long the first pods wait for the last, where the job says it."""
    if "timeouts.join" not in pods.spec.places or pods.number == 1:
        return []
    limit_s = pods.spec.timeouts.join_s
    return [f"--rdzv-conf=timeout={math.ceil(FOREVER_S if limit_s is None else max(1, limit_s))}"]


def _logs(spec: JobSpec) -> list[str]:
    """Files only where the job names a place that outlives the pod."""
    if "logs.dir" not in spec.places:
        return []
    return [f"--log-dir={unexpanded(spec.logs.folder)}", "--tee=3", "--log-line-prefix-template=[${rank}] "]


def unexpanded(text: str) -> str:
    """`text` so that Kubernetes, which fills in $(NAME), leaves it as it is."""
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


def env(pods: Pods) -> list[Manifest]:
    """The job's variables; those of Secrets by reference."""
    secrets = pods.spec.kubernetes.secrets
    plain = {name: value.text for name, value in pods.spec.env.items() if name not in secrets}
    values = [{"name": name, "value": unexpanded(text)} for name, text in plain.items()]
    keys: dict[str, Manifest] = {
        name: {"name": each.secret, "key": each.key} for name, each in secrets.items()
    }
    if pods.number > 1 and SECRET not in {*plain, *keys}:
        keys[SECRET] = {"name": f"{pods.name}-launchers", "key": "secret", "optional": True}
    return [*values, *({"name": name, "valueFrom": {"secretKeyRef": ref}} for name, ref in keys.items())]


def resources(pods: Pods) -> Manifest:
    """Of each pod."""
    asked, gpus = pods.spec.kubernetes.resources, pods.spec.nodes[0].gpus
    limits = dict(asked.limits)
    if gpus and not names_gpus(limits):
        limits["nvidia.com/gpu"] = str(gpus)
    return given({"limits": limits, "requests": dict(asked.requests)})


def volumes(pods: Pods) -> list[Manifest]:
    """Ours and the job's."""
    ours: list[Manifest] = [
        {"name": "distlaunch", "configMap": {"name": pods.bundle}},
        {"name": "unpacked", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # DataLoaders and NCCL need more than 64 MiB
    ]
    asked = enumerate(pods.spec.kubernetes.volumes)
    return [*ours, *({"name": f"volume{i}", **_source(volume)} for i, volume in asked)]


def _source(volume: Volume) -> Manifest:
    if volume.claim:
        return {"persistentVolumeClaim": given({"claimName": volume.claim, "readOnly": volume.read_only})}
    if volume.config_map:
        return {"configMap": {"name": volume.config_map}}
    if volume.secret:
        return {"secret": {"secretName": volume.secret}}
    return {"hostPath": {"path": volume.host_path}}


def mounts(pods: Pods) -> list[Manifest]:
    """Where they appear."""
    ours: list[Manifest] = [
        {"name": "distlaunch", "mountPath": PACKED, "readOnly": True},
        {"name": "unpacked", "mountPath": UNPACKED},
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 — the container's own
    ]
    asked = enumerate(pods.spec.kubernetes.volumes)
    return [*ours, *({"name": f"volume{i}", **_mount(volume)} for i, volume in asked)]


def _mount(volume: Volume) -> Manifest:
    told = {"mountPath": volume.mount, "subPath": volume.sub_path, "readOnly": volume.read_only}
    return given(told)
