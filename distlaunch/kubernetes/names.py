"""What the objects of a job are called: names that Kubernetes takes, of the job's own."""

import hashlib
import re
from typing import Literal

Kind = Literal["job", "jobset", "trainjob"]
GROUP = "node"
"""The replicated job in a JobSet; a TrainJob's runtime calls its own so."""
MOST = 63
"""Characters of a DNS label: a host name, or a Service's."""
_HASH = 6
_RANDOM = "-abcde"
"""What Kubernetes adds to a pod's name, which JobSet counts, too."""


def object_name(name: str, kind: Kind, nodes: int) -> str:
    """The job's name as a DNS label, with room for what its pods' host names add; where cut, with a hash."""
    room = MOST - len(_suffix(kind, nodes))
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    label = plain if plain[:1].isalpha() else f"job-{plain}".rstrip("-")
    if len(label) <= room:
        return label
    tail = hashlib.sha256(name.encode()).hexdigest()[:_HASH]
    return f"{label[: room - _HASH - 1].rstrip('-')}-{tail}"


def first_host(name: str, kind: Kind) -> str:
    """The host name of the first node's pod, as the others resolve it."""
    return f"{name}-0.{name}" if kind == "job" else f"{name}-{GROUP}-0-0.{name}"


def _suffix(kind: Kind, nodes: int) -> str:
    """What the longest host name of a pod has after the name."""
    return f"-{nodes - 1}" if kind == "job" else f"-{GROUP}-0-{nodes - 1}{_RANDOM}"
