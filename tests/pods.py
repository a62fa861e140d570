"""Stands in for a kubelet: pods of a rendered Job as processes of this machine, since no cluster runs here.

What a cluster does beyond that (schedule, resolve names, start again) is its own, and is not tested.
"""

import base64
import contextlib
import os
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from distlaunch.kubernetes.pods import ARCHIVE, PACKED, UNPACKED
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


def unpack(bundle: Manifest, folder: Path) -> None:
    """What a volume of that ConfigMap has."""
    folder.mkdir()
    for key, text in bundle["binaryData"].items():
        (folder / key).write_bytes(base64.b64decode(text, validate=True))
    with tarfile.open(folder / ARCHIVE) as archive:
        assert {member.mtime for member in archive} == {0}


@contextlib.contextmanager
def pods(manifests: list[Manifest], folder: Path) -> Iterator[list[Going]]:
    """All pods of the Job, by their indices; each has a folder of its own, and `folder` is the image's."""
    bundle, *_, job = manifests
    spec = job["spec"]["template"]["spec"]
    unpack(bundle, folder / "packed")
    with contextlib.ExitStack() as stack:
        started = []
        for index in range(job["spec"]["completions"]):
            started.append(_start(spec, f"{job['metadata']['name']}-0", index, folder))
            stack.callback(started[-1].kill)
        yield started


def _start(spec: Manifest, first: str, index: int, folder: Path) -> Going:
    (container,) = spec["containers"]
    (own := folder / f"pod{index}").mkdir()
    given = {"JOB_COMPLETION_INDEX": str(index)}
    for each in container.get("env", []):
        given[each["name"]] = expand(each["value"], given)
    words = [expand(word, given) for word in (*container["command"], *container["args"])]
    name = f"{first}.{spec['subdomain']}" if "subdomain" in spec else first
    here = {PACKED: str(folder / "packed"), UNPACKED: str(own), name: "127.0.0.1"}
    argv = [_replaced(word, here) for word in words]
    env = {"PATH": os.environ["PATH"], "TMPDIR": str(own), "HOME": str(own), **given}
    return Going(folder, argv, cwd=container.get("workingDir", folder), env=env)


def _replaced(word: str, here: Mapping[str, str]) -> str:
    for there, place in here.items():
        word = word.replace(there, place)
    return word
