"""The pods that `export kubernetes` prints, each as a container of podman's on a host of its own.

No cluster runs here. From each pod's template everything is taken that a node's kubelet would take: command,
arguments, variables, directory, volumes. Only the image is another one, and DNS is a line in /etc/hosts.
"""

import contextlib
import sys
from pathlib import Path

import yaml

from tests.cluster.containers import IMAGE, LIMITS, MOUNTS, Podman, volumes
from tests.cluster.hosts import Bed
from tests.cluster.test_one_job_everywhere import TRAINS
from tests.harness import Going, all_ended_well, distlaunch
from tests.pods import Manifest, expand, unpack
from tests.process.torchruns import NEEDS_TORCH

pytestmark = NEEDS_TORCH


def argv_of(podman: Podman, workload: Manifest, index: int, folder: Path, first: str) -> list[str]:
    """How podman runs the pod of that index; `folder` is in the image, with the ConfigMap's files below."""
    pod = workload["spec"]["template"]["spec"]
    (main,) = pod["containers"]
    given = {"JOB_COMPLETION_INDEX": str(index)}
    for each in main.get("env", []):
        if "value" in each:  # there are no Secrets
            given[each["name"]] = expand(each["value"], given)
    kinds = {volume["name"]: volume for volume in pod["volumes"]}
    own = [mount for mount in MOUNTS if not mount.startswith("/etc")]  # a place for the ConfigMap
    mounts = volumes(*own, str(folder))
    for mount in main["volumeMounts"]:
        if "configMap" in kinds[mount["name"]]:
            mounts.append(f"--volume={folder}/packed:{mount['mountPath']}:ro")
        else:
            assert "emptyDir" in kinds[mount["name"]]
            mounts.append(f"--tmpfs={mount['mountPath']}")
    name = f"{workload['metadata']['name']}-0.{pod['subdomain']}"
    words = [expand(word, given) for word in (*main["command"], *main["args"])]
    return [
        *(*podman.words, "run", "--rm", "--network=host", f"--add-host={name}:{first}", *LIMITS, *mounts),
        *(f"--env={name}={value}" for name, value in given.items()),
        *(f"--workdir={main['workingDir']}", "--entrypoint=", IMAGE, *words),
    ]


def test_ranks_train_in_the_pods_of_a_job(bed: Bed, tmp_path: Path, podman: Podman) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    job = {
        "script": "train.py",
        "nodes": 2,
        "gpus_per_node": 0,
        "master_port": 29500,
        "python": sys.executable,
        "workdir": str(tmp_path),
        "kubernetes": {"image": "a/b:1"},
        "env": {"OMP_NUM_THREADS": 1},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    done = distlaunch("export", "kubernetes", str(tmp_path / "job.yaml"))
    assert done.returncode == 0, done.stderr
    bundle, *_, workload = yaml.safe_load_all(done.stdout)
    unpack(bundle, tmp_path / "packed")
    with contextlib.ExitStack() as stack:
        pods = []
        for index in range(workload["spec"]["completions"]):
            argv = argv_of(podman, workload, index, tmp_path, bed.hosts["host1"].address)
            pods.append(Going(tmp_path, bed.argv("exec", f"host{index + 1}", "--", *argv)))
            stack.callback(pods[-1].kill)
        all_ended_well(pods, "- True\n")
        told = [line.split() for pod in pods for line in pod.stdout.splitlines()]
    assert [(row[0], row[3]) for row in told] == [("0", "True"), ("1", "True")]
    assert told[0][1] == told[1][1]
