"""Checks whether a job can run on Kubernetes, and finds keys that have no effect there."""

import re
from collections.abc import Iterator

from distlaunch.contract import RESERVED
from distlaunch.job.checks import placed_in
from distlaunch.job.spec import JobSpec, Mpirun
from distlaunch.job.text import instead_of
from distlaunch.kubernetes.manifests import Kind
from distlaunch.kubernetes.pods import GPU

_OWN = re.compile(r"PET_.*|PYTHON_EXEC|JOB_COMPLETION_INDEX")
"""Variables of a pod that determine the launcher's position, or would mislead it."""
_NO_CONTROLLER = "it needs a controller, and pods run without one"
_NO_FLAG = "`distlaunch torchrun`, which the pods run, has no flag for it"
_CONSOLE = "`kubectl logs` shows what all ranks of a pod print"
_LEFT_OUT = {
    "ssh": "pods are not reached over SSH",
    "launcher": "each pod starts its own ranks",
    "kubernetes.selector": "it selects pods that are already running",
    "kubernetes.container": "it belongs to pods that are already running",
    "mpirun": "each pod starts its own ranks",
    "container": "the settings of pods are in kubernetes; its image defaults to container.image",
    "notify": _NO_CONTROLLER,
    "metrics": _NO_CONTROLLER,
    "backend": "in a pod with GPUs, DISTLAUNCH_BACKEND is nccl",
    "cpu_binding": "torchrun binds only by NUMA node; use numa_binding",
    "on_stall": _NO_CONTROLLER,
    "on_warning": "ranks get the SIGTERM that Kubernetes sends",
    "elastic": "the number of pods is fixed",
    "logs.console": _CONSOLE,
    "logs.fold": _CONSOLE,
    "logs.watch": "`distlaunch view` can't see runs in pods",
    "restarts.backoff": "ranks restart immediately",
    "restarts.window": "restarts.max limits the whole run",
    "logs.limit": _NO_FLAG,
    "checks": _NO_FLAG,
    "collect": _NO_CONTROLLER,
    **dict.fromkeys(("sync", "files", "setup"), "the code is in the image, or on a volume"),
    "success": _NO_FLAG,
    **dict.fromkeys(("restarts.on", "restarts.never", "restarts.repeat"), _NO_FLAG),
    **dict.fromkeys(("timeouts.connect", "timeouts.lease", "timeouts.rejoin", "timeouts.stall"), _NO_FLAG),
}
_OF_TRAINJOB = {
    "kubernetes.ttl": "a TrainJob has no such field",
    "kubernetes.priority_class": "its runtime decides that",
    "restarts.requeue": "its runtime decides that",
    "rendezvous.endpoint": "the runtime chooses the port",
    "master_port": "the runtime chooses the port",
}


def with_gpus(spec: JobSpec) -> JobSpec:
    """Return the job with defaults: GPUs from the limits of pods, and the image from `container`."""
    spec = spec._replace(mpirun=Mpirun())  # each pod starts its own ranks
    if spec.container and spec.container.runtime in ("docker", "podman"):  # other runtimes use files
        spec = spec._replace(kubernetes={"image": spec.container.image, **spec.kubernetes})
    limits = spec.kubernetes.get("resources", {}).get("limits", {})
    counts = [count for name, count in limits.items() if GPU.match(name)]
    return spec.with_gpus(int(counts[0])) if counts and counts[0].isdecimal() else spec


def check_exported(spec: JobSpec) -> None:
    """Raise `JobError` for anything that can't work in a cluster."""
    if "image" not in spec.kubernetes:
        raise spec.error("kubernetes.image", "set it to an image with Python 3.10 or later and torch")
    spec.refuse((*_nodes(spec), *_paths(spec), *_rendezvous(spec), *_words(spec), *_env(spec)))


def left_out(spec: JobSpec, kind: Kind) -> list[str]:
    """Return a line for each job file key that has no effect in a cluster."""
    idle = {**_LEFT_OUT, **(_OF_TRAINJOB if kind == "trainjob" else {})}
    ours = (path for path in idle if path in spec.places and not _is_default(spec, path))
    return [f"{path} is left out: {idle[path]}" for path in ours]


def _is_default(spec: JobSpec, path: str) -> bool:
    """Return whether the key has its default value."""
    usual = {"on_stall": spec.limits.on_stall == "warn", "on_warning": spec.limits.on_warning == "TERM"}
    usual["logs.console"] = spec.logs.console == "all"
    usual["backend"] = spec.backend != "gloo" or not spec.nodes[0].gpus
    usual["restarts.requeue"] = not spec.restarts.requeue
    usual["rendezvous.endpoint"] = spec.rendezvous.port is None
    return usual.get(path, False)


def _nodes(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield each mistake: (path in the job file, text)."""
    for path in ("nodes[0]", "hostfile"):
        if path in spec.places:
            advice = "replace this with nodes: N, the number of pods; to limit the choice, set"
            text = f"Kubernetes chooses the nodes: {advice} kubernetes.node_selector"
            yield path.partition("[")[0], text
    if "spares" in spec.places:
        yield (
            "spares",
            "Kubernetes has no spares: remove this key; it replaces lost pods (see restarts.requeue)",
        )
    if spec.fewest < len(spec.nodes):
        yield "min_nodes", "the number of pods is fixed: remove min_nodes"
    if spec.nodes[0].gpus is None and "nodes[0]" not in spec.places:
        text = "set it to the number of NVIDIA GPUs of each pod, 0 for a CPU job"
        yield "gpus_per_node", f"{text}; for other GPUs, set kubernetes.resources.limits instead"


def _paths(spec: JobSpec) -> Iterator[tuple[str, str]]:
    if spec.program.workdir != "." and not spec.program.workdir.startswith("/"):
        yield "workdir", "expected an absolute path in the image"
    if spec.program.python and "/" in spec.program.python and not spec.program.python.startswith("/"):
        yield "python", "expected a name or an absolute path in the image"
    if spec.program.placed and spec.program.words[0].startswith("~"):
        yield spec.program.kind, "write the full path: in the image, ~ is not your home directory"
    if "logs.dir" in spec.places and not spec.logs.directory.startswith("/"):
        yield "logs.dir", "expected an absolute path, such as a directory on a volume"


def _rendezvous(spec: JobSpec) -> Iterator[tuple[str, str]]:
    if spec.rendezvous.etcd:
        yield "rendezvous.backend", "distlaunch assigns the ranks in pods; remove it"
    elif spec.rendezvous.host:
        in_endpoint = "rendezvous.endpoint" in spec.places
        path = "rendezvous.endpoint" if in_endpoint else "master_addr"
        advice = 'set only the port, as in ":29500"' if in_endpoint else "remove it"
        yield path, f"ranks always connect to the first pod; {advice}"


def _words(spec: JobSpec) -> Iterator[tuple[str, str]]:
    env = {name: value.text for name, value in spec.program.env.items() if not value.inherited}
    pods = "have the script build the pods' names, which are MASTER_ADDR with another number before the dot"
    for path, word in placed_in("", {"command": spec.program.words, "args": spec.program.args, "env": env}):
        advice = pods if word.startswith("hosts") else instead_of(word)
        yield path, f"{{{word}}} can't be filled in when a job is exported; {advice}"


def _env(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Refuse values from the caller's environment, and variables that the launcher sets or reads."""
    secrets = spec.kubernetes.get("secrets", {})
    for name, value in spec.program.env.items():
        if value.inherited and name not in secrets:
            advice = f"put it in a Secret and set kubernetes.secrets.{name}: {{secret: …, key: …}}"
            yield f"env.{name}", f"a value from your environment is never printed: write it here, or {advice}"
    for path, names in (("env", spec.program.env), ("kubernetes.secrets", secrets)):
        for name in filter(_OWN.fullmatch, names):
            advice = "remove it, and use the corresponding key of the job file, if there is one"
            yield f"{path}.{name}", f"{name} would change what the launcher in each pod does; {advice}"
        for name in RESERVED & names.keys():
            yield f"{path}.{name}", f"distlaunch sets {name} for each worker; remove it"
