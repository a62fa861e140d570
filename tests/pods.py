"""Stands in for a cluster, since none runs here: the pods of manifests as processes of this machine.

What a cluster does beyond that (schedule, resolve names, start again) is its own, and is not tested.
"""

import base64
import contextlib
import os
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from distlaunch.kubernetes.manifests import ARCHIVE, PACKED, UNPACKED
from tests.harness import Going

Manifest = dict[str, Any]


def expand(text: str, variables: Mapping[str, str]) -> str:
    """As Kubernetes does (third_party/forked/golang/expansion): $(NAME) of what is known, $$ for $."""
    out, rest = "", text
    while rest:
        before, dollar, rest = rest.partition("$")
        out += before
        if rest.startswith("$"):
            out, rest = f"{out}$", rest[1:]
        elif rest.startswith("(") and ")" in rest:
            name, _, rest = rest[1:].partition(")")
            out += variables.get(name, f"$({name})")
        else:
            out += dollar
    return out


class Cluster:
    """The pods of a workload; each has a directory of its own, and `directory` is for their files."""

    def __init__(self, manifests: list[Manifest], directory: Path, stack: contextlib.ExitStack) -> None:
        bundle, *_, self.workload = manifests
        self.directory, self.stack = directory, stack
        self.told: dict[str, str] = {}
        (packed := directory / "packed").mkdir()  # what a volume of the ConfigMap has
        for key, text in bundle["binaryData"].items():
            (packed / key).write_bytes(base64.b64decode(text, validate=True))
        with tarfile.open(packed / ARCHIVE) as archive:
            assert {member.mtime for member in archive} == {0}
        self.count, self.container = _run_by(self.workload)

    def start(self, index: int) -> Going:
        """A pod of that index, as the first or in place of one that has ended."""
        own = Path(tempfile.mkdtemp(prefix=f"pod{index}-", dir=self.directory))
        given = {**self._told(index), **self.told}
        for each in self.container.get("env", []):
            if "value" in each:  # there are no Secrets
                given[each["name"]] = expand(each["value"], given)
        here = {PACKED: str(self.directory / "packed"), UNPACKED: str(own), self._first(): "127.0.0.1"}
        argv = [expand(word, given) for word in (*self.container["command"], *self.container["args"])]
        for there, place in here.items():
            argv = [word.replace(there, place) for word in argv]
        env = {"PATH": os.environ["PATH"], "TMPDIR": str(own), "HOME": str(own), **given}
        cwd = self.container.get("workingDir", "/")
        pod = Going(self.directory, argv, cwd=cwd, env=env)
        self.stack.callback(pod.kill)
        return pod

    def _first(self) -> str:
        """The first pod's name, as the others resolve it."""
        name = self.workload["metadata"]["name"]
        return f"{name}-0.{name}" if self.workload["kind"] == "Job" else f"{name}-node-0-0.{name}"

    def _told(self, index: int) -> dict[str, str]:
        """The variables that a controller adds: for a TrainJob those of Trainer's torch plug-in."""
        if self.workload["kind"] != "TrainJob":
            return {"JOB_COMPLETION_INDEX": str(index)}
        shape = {"NNODES": self.count, "NPROC_PER_NODE": self.workload["spec"]["trainer"]["numProcPerNode"]}
        place = {"NODE_RANK": index, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
        return {f"PET_{name}": str(value) for name, value in {**shape, **place}.items()}


def _run_by(workload: Manifest) -> tuple[int, Manifest]:
    """How many pods, and what each runs."""
    spec = workload["spec"]
    if workload["kind"] == "TrainJob":
        return spec["trainer"]["numNodes"], spec["trainer"]
    job = spec if workload["kind"] == "Job" else spec["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    return job["completions"], container


@contextlib.contextmanager
def cluster(manifests: list[Manifest], directory: Path) -> Iterator[Cluster]:
    """For these manifests; its pods are ended when the test is."""
    with contextlib.ExitStack() as stack:
        yield Cluster(manifests, directory, stack)


@contextlib.contextmanager
def pods(manifests: list[Manifest], directory: Path) -> Iterator[list[Going]]:
    """All pods, by their indices."""
    with cluster(manifests, directory) as made:
        yield [made.start(index) for index in range(made.count)]
