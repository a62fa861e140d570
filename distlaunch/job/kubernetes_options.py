"""What a job file's `kubernetes` section asks of a cluster, for an export or for pods that run already."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from distlaunch.agent.frozen import Frozen

_NONE: Mapping[str, Any] = MappingProxyType({})


class Resources(Frozen):
    """Of each pod, by name: what it may use, and what it is sure to get, in Kubernetes' quantities."""

    limits: Mapping[str, str] = _NONE
    requests: Mapping[str, str] = _NONE


class Volume(Frozen):
    """What is mounted in each pod: one of `claim`, `config_map`, `secret` and `host_path`."""

    mount: str = ""
    claim: str | None = None
    config_map: str | None = None
    secret: str | None = None
    host_path: str | None = None
    sub_path: str | None = None
    read_only: bool | None = None


class SecretKey(Frozen):
    """One value of a Secret."""

    secret: str = ""
    key: str = ""


class KubernetesOptions(Frozen):
    """None = the cluster's own default. `secrets` are by variable; `extra` is merged into the Job.

    `ttl_s` after its end the Job is deleted, None = never; `runtime` is a TrainJob's.
    """

    image: str = ""
    namespace: str | None = None
    selector: str | None = None
    container: str | None = None
    labels: Mapping[str, str] = _NONE
    annotations: Mapping[str, str] = _NONE
    node_selector: Mapping[str, str] = _NONE
    tolerations: tuple[Mapping[str, Any], ...] = ()
    queue: str | None = None
    resources: Resources = Resources()
    volumes: tuple[Volume, ...] = ()
    secrets: Mapping[str, SecretKey] = _NONE
    service_account: str | None = None
    image_pull_secrets: tuple[str, ...] = ()
    priority_class: str | None = None
    ttl_s: float | None = 604800.0
    runtime: str = "torch-distributed"
    extra: Mapping[str, Any] = _NONE
