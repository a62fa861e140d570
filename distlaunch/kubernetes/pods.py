"""Running pods as hosts for a job, as listed by `kubectl get pods` and reached by `kubectl exec`."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from distlaunch.errors import UsageError, reason
from distlaunch.job.spec import AllocatedNode, Allocation
from distlaunch.schedulers.queue import printed
from distlaunch.transports.failure import Kind
from distlaunch.transports.gathering import natural
from distlaunch.transports.transport import Command
from distlaunch.wording import listed

GPU = re.compile(r".*/(?:gpu(?:\.shared)?$|mig-)|gpu\.intel\.com/(?:i915|xe)$")
"""Resources that are GPUs of any kind, and not the memory of one, such as nvidia.com/gpumem."""
_NAMED = "check kubectl; if you have no permission to list pods, name them in nodes, with launcher.command"


class Kubectl(Command):
    """A pod reached by kubectl. See `Command` for the attributes."""

    failures = (
        (Kind.UNRESOLVED, r"pods .* not found|\(NotFound\)"),
        (Kind.TASK_REFUSED, r"\(Forbidden\)|[Cc]annot create resource|\(Unauthorized\)|must be logged in"),
        (Kind.NODE_DOWN, r"container not found|cannot exec (?:into|in) a|completed pod"),
        (Kind.UNREACHABLE, r"[Uu]nable to connect|connection (?:refused|timed out)"),
        (Kind.UNREACHABLE, r"i/o timeout|error dialing"),
    )
    failed = 1
    advised = ((Kind.TASK_REFUSED, "try `kubectl auth can-i create pods --subresource=exec`"),)


def pods_here(selector: str, namespace: str | None, container: str | None) -> Allocation:
    """Return the running pods that match a selector. Raises `UsageError`."""
    command = pods_argv(selector, namespace)
    try:
        found = pods_listed(printed(tuple(command), _NAMED), selector, container)
    except OSError as error:
        hint = "install it on this machine, or correct PATH"
        raise UsageError(f"can't run kubectl: {reason(error)}; {hint}") from None
    except ValueError as error:
        raise UsageError(f"can't parse the output of `{shlex.join(command)}`: {error}; {_NAMED}") from None
    if not found.nodes:
        raise UsageError(f"no running pod matches {selector}: see `{shlex.join(command[:-1])}`")
    return found


def reach_pod(namespace: str | None, node: AllocatedNode) -> Kubectl:
    """Return the transport to a pod."""
    return Kubectl(node.host, exec_words(namespace, node.container))


def pods_argv(selector: str, namespace: str | None) -> list[str]:
    """Return the command that lists pods."""
    return ["kubectl", "get", "pods", f"--selector={selector}", *_in(namespace), "--output=json"]


def exec_words(namespace: str | None, container: str | None) -> tuple[str, ...]:
    """Return the command prefix for a container of the pod {host}; None = kubectl's default container."""
    named = [f"--container={container}"] if container else []
    return ("kubectl", "exec", "--stdin", *_in(namespace), *named, "{host}", "--")


def _in(namespace: str | None) -> list[str]:
    return [f"--namespace={namespace}"] if namespace else []


def pods_listed(text: str, selector: str, container: str | None) -> Allocation:
    """Return the running pods in the natural order of their names. Raises ValueError for invalid output."""
    try:
        pods = sorted(json.loads(text)["items"], key=lambda pod: natural(pod["metadata"]["name"]))
        nodes = tuple(node for pod in pods for node in _node(pod, container))
    except (KeyError, TypeError, AttributeError):
        raise ValueError("not a list of pods") from None
    return Allocation("kubernetes", f"Kubernetes ({selector})", "", nodes)


def _node(pod: Mapping[str, Any], container: str | None) -> Iterator[AllocatedNode]:
    """Yield the pod if it is running and isn't being deleted."""
    if pod["status"].get("phase") != "Running" or pod["metadata"].get("deletionTimestamp"):
        return
    containers = {each["name"]: each for each in pod["spec"]["containers"]}
    chosen = container or next(iter(containers))
    if chosen not in containers:
        has = f"pod {pod['metadata']['name']} has no container {chosen}, but {listed([*containers])}"
        raise UsageError(f"{has}: correct kubernetes.container, or exclude the pod with kubernetes.selector")
    limits = containers[chosen].get("resources", {}).get("limits", {})
    gpus = sum(int(count) for name, count in limits.items() if GPU.match(name))
    yield AllocatedNode(
        pod["metadata"]["name"], gpus or None, address=pod["status"].get("podIP"), container=chosen
    )
