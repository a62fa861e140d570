"""`check` on this machine: its output, and GPUs and NCCL libraries by stand-ins with their C interfaces.

The stand-ins are compiled from nvml.h's and nccl.h's declarations, since no test machine has a GPU.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distlaunch.check import link_probe
from distlaunch.job.spec import JobSpec, Logs, Program
from distlaunch.launch import node_check
from tests.harness import PATIENCE_S, completed, distlaunch, distlaunch_argv
from tests.process.torchruns import free_port

NVML = """
#include <string.h>
typedef struct { unsigned long long total, free, used; } memory;
typedef struct { unsigned pid; unsigned long long memory; unsigned gi, ci; } process;
static int handles[2] = {0, 1};
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **handle) { *handle = &handles[i]; return 0; }
int nvmlDeviceGetName(void *h, char *text, unsigned size) { strncpy(text, "Toy H100", size); return 0; }
int nvmlDeviceGetMemoryInfo(int *h, memory *m) {
    m->total = 80ULL << 30; m->used = *h ? 40ULL << 30 : 0; m->free = m->total - m->used; return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(int *h, unsigned *count, process *users) {
    *count = *h; users[0].pid = 1; return 0;
}
int nvmlDeviceGetUUID(int *h, char *text, unsigned size) { strcpy(text, *h ? "GPU-1" : "GPU-0"); return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(int *h, unsigned long long *bits) {
    *bits = *h ? 0x41 : 0x5; return 0;
}
int nvmlDeviceGetMigMode(int *h, unsigned *now, unsigned *next) { *now = *h; return 0; }
int nvmlDeviceGetPciInfo_v3(int *h, char *info) { return 3; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 12020; return 0; }
int nvmlDeviceGetTotalEccErrors(int *h, int type, int counter, unsigned long long *errors) {
    if (type != 1 || counter != 0) return 2;
    *errors = *h ? 0 : 3; return 0;
}
"""
NCCL = "int ncclGetVersion(int *version) { *version = NUMBER; return 0; }"


def library(path: Path, code: str) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("cc is needed to make a stand-in for a library")
    path.parent.mkdir(exist_ok=True)
    completed([compiler, "-shared", "-fPIC", "-w", "-x", "c", "-o", str(path), "-"], input=code, status=0)


def checked(directory: Path, *options: str, **job: Any) -> tuple[int, dict[str, Any]]:
    (directory / "job.yaml").write_text(json.dumps({"command": ["true"], "gpus_per_node": 0, **job}))
    done = distlaunch("check", str(directory / "job.yaml"), "--json", *options)
    return done.returncode, json.loads(done.stdout)


def said(report: dict[str, Any], part: str) -> list[tuple[str, str]]:
    return [(each["level"], each["what"]) for each in report["findings"] if each["part"] == part]


def test_reads_gpus_through_nvml_and_names_several_nccl_libraries(tmp_path: Path) -> None:
    library(tmp_path / "lib" / "libnvidia-ml.so.1", NVML)
    library(tmp_path / "a" / "libnccl.so.2", NCCL.replace("NUMBER", "22703"))
    library(tmp_path / "b" / "libnccl.so.2", NCCL.replace("NUMBER", "21904"))
    env = {"LD_LIBRARY_PATH": ":".join(f"{tmp_path}/{name}" for name in ("lib", "a", "b"))}
    status, report = checked(tmp_path, env=env, gpus_per_node=4, procs_per_node=1, backend="gloo")
    assert status == 1
    user = f"{Path('/proc/1/comm').read_text().strip()} (pid 1)"
    assert said(report, "devices") == [
        ("error", "2 GPUs instead of 4"),
        ("warning", "GPU 0 has had 3 uncorrectable memory errors"),
        ("warning", f"GPU 1 already has 40 GiB of 80 GiB in use, by {user}"),
        ("warning", "GPU 1 is throttled (temperature)"),
        ("warning", "GPU 1 is divided (MIG)"),
    ]
    assert {rank: gpu["uuid"] for rank, gpu in report["ranks"].items()} == {"0": "GPU-0"}
    filled = {**env, "CUDA_VISIBLE_DEVICES": "{local_rank}"}
    own = checked(tmp_path, env=filled, gpus_per_node=2, backend="gloo")[1]
    assert ("error", "0 GPUs instead of 2") not in said(own, "devices")
    second = checked(tmp_path, env={**env, "CUDA_VISIBLE_DEVICES": "1"}, gpus_per_node=1, backend="gloo")[1]
    assert [words.split(" ")[1] for _, words in said(second, "devices")] == ["1", "1", "1"]
    assert second["ranks"]["0"]["uuid"] == "GPU-1"
    ((level, words),) = said(report, "software")
    assert level == "warning"
    for found in (f"2.27.3 in {tmp_path}/a/libnccl.so.2", f"2.19.4 in {tmp_path}/b/libnccl.so.2"):
        assert found in words


def test_the_exit_status_says_whether_the_job_can_work(tmp_path: Path) -> None:
    found = {
        "import json, __main__\n": "",
        "import nonesuch\n": "lacks nonesuch · the script imports it",
        "import sys\nsys.path.append('lib')\nimport nonesuch\n": "",
        "import paths, nonesuch\n": "",  # a module beside the script may change the search path
        "from site import addsitedir as add\nadd('lib')\nimport nonesuch\n": "",
        "'What it does.'\nimport json\nimport nonesuch, paths\n": "lacks nonesuch",
        "import own\n": "",  # in a directory on PYTHONPATH, which is relative to the workdir
        "import json\ndef train(:\n": "can't parse the script: invalid syntax (train.py, line 2) · no rank",
        "import json\0\n": "can't parse the script: source code string cannot contain null bytes",
        "if True:\n    return\n": "can't parse the script: 'return' outside function (train.py, line 2)",
    }
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "own.py").touch()
    (tmp_path / "paths.py").touch()
    for script, error in found.items():
        (tmp_path / "train.py").write_text(script)
        (tmp_path / "job.yaml").write_text("script: train.py\ngpus_per_node: 0\nenv: {PYTHONPATH: src}\n")
        done = distlaunch("check", str(tmp_path / "job.yaml"), status=int(bool(error)))
        assert ("error: software: " in done.stdout) == bool(error) and error in done.stdout, done.stdout
        assert done.stdout.splitlines()[-1].startswith("fine: reach (1 node, ")


def test_finds_modules_beside_the_script_that_a_link_leads_to(tmp_path: Path) -> None:
    """As Python does, and not beside the link."""
    for name in ("exp", "src"):
        (tmp_path / name).mkdir()
    for name in ("exp", "src"):
        (tmp_path / name / f"of_{name}.py").touch()
        (tmp_path / "src" / f"{name}.py").write_text(f"import of_{name}\n")
        (tmp_path / "exp" / f"{name}.py").symlink_to(f"../src/{name}.py")
        (tmp_path / "job.yaml").write_text(f"script: exp/{name}.py\ngpus_per_node: 0\n")
        done = distlaunch("check", str(tmp_path / "job.yaml"), status=int(name == "exp"))
        assert ("lacks of_exp" in done.stdout) == (name == "exp"), done.stdout


def test_checks_a_module_without_importing_its_packages(tmp_path: Path) -> None:
    found = {
        "pkg.train": "",
        "pkg.inner": "",  # its __main__.py
        "pkg": "lacks pkg",
        "pkg.nonesuch": "lacks pkg.nonesuch",
        "pkg.lacks": "",  # the package may change the search path
        "lacks": "lacks nonesuch · the script imports it",
        "pkg.wrong": "can't parse the script: invalid syntax (wrong.py, line 1)",
    }
    (tmp_path / "pkg" / "inner").mkdir(parents=True)
    files = {
        "__init__": "raise SystemExit('imported')",
        "train": "",
        "inner/__main__": "",
        "inner/__init__": "",
    }
    (tmp_path / "lacks.py").write_text("import nonesuch")
    for name, text in {
        **files,
        "lacks": "from . import x, y\nimport nonesuch",
        "wrong": "def train(:",
    }.items():
        (tmp_path / "pkg" / f"{name}.py").write_text(text)
    for module, error in found.items():
        (tmp_path / "job.yaml").write_text(f"module: {module}\ngpus_per_node: 0\n")
        done = distlaunch("check", str(tmp_path / "job.yaml"), status=int(bool(error)))
        assert ("error: software: " in done.stdout) == bool(error) and error in done.stdout, done.stdout


def test_names_a_missing_script_once_and_checks_what_it_can(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("script: train.py\ngpus_per_node: 0\nnodes: 2\n")
    done = distlaunch("check", str(tmp_path / "job.yaml"), status=1)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("warning: ")]  # of this machine
    error, unchecked, fine = lines
    assert error.startswith(f"error: place: node0, node1: can't read the script {tmp_path}/train.py: No such")
    assert unchecked == "not checked: imports of the script: node0, node1 can't read it"
    assert ", software (Python " in fine and fine.endswith(", network (the port is free)")


def test_an_agent_that_dies_during_the_check_is_an_error(tmp_path: Path) -> None:
    python = tmp_path / "python"
    # The agent itself is started with further options.
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && kill -9 "$PPID"\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "train.py").touch()
    (tmp_path / "job.yaml").write_text(f"script: train.py\ngpus_per_node: 0\npython: {python}\n")
    done = distlaunch("check", str(tmp_path / "job.yaml"), status=1)
    assert "error: reach: node0: connection lost" in done.stdout, done.stdout


def test_finds_what_run_would_refuse_and_names_what_it_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine\n")
    refused = {"notify": {"command": ["./nonesuch"]}, "metrics": {"file": str(tmp_path / "notes.txt")}}
    for key, value in refused.items():
        status, report = checked(tmp_path, **{key: value})
        ((level, words),) = said(report, "place")
        assert (status, level) == (1, "error")
        assert words in distlaunch("run", str(tmp_path / "job.yaml"), status=2).stderr
    spare = {"host": "gpu-z", "address": "192.0.2.7"}
    _, report = checked(tmp_path, nodes=[{"host": "localhost", "address": "192.0.2.8"}], spares=[spare])
    assert "spares: gpu-z" in report["unchecked"]


def test_measures_links_between_the_ranks_of_one_node(tmp_path: Path) -> None:
    env = {"PYTHONPATH": str(tmp_path), "WHERE": "{hosts:3000}"}
    job = {"command": ["touch", "started"], "env": env, "rendezvous": {"endpoint": "127.0.0.1:23456"}}
    status, report = checked(tmp_path, "--links", procs_per_node=2, **job)
    assert status == 0  # on a busy machine, some link may be slow
    rows = [(row["test"], row["peers"]) for row in report["links"]["measurements"]]
    both = ["rank 0", "rank 1"]
    assert rows[-3:] == [("pair", both), ("all-reduce", both), ("send/recv", both)]
    status, report = checked(tmp_path, "--links", procs_per_node=1, **job)
    assert (status, report["unchecked"][-1]) == (0, "links: one rank on one node has none")
    assert not (tmp_path / "started").exists()


def test_reports_ranks_that_cannot_run_the_link_test(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    status, report = checked(tmp_path, "--links", procs_per_node=2, env={"PYTHONPATH": str(tmp_path)})
    ((level, words),) = said(report, "links")
    assert (status, level) == (1, "error")
    assert words == "the link test exited with status 1: ImportError: no torch here"


def test_the_link_probe_measures_nodes_with_several_ranks() -> None:
    """On GPUs, a node has several ranks. Here, gloo stands in for NCCL."""
    port = str(free_port())
    request = json.dumps({"backend": "gloo", "peers": [[0, 1], [2, 3]], "order": [1, 0]})
    argv = [sys.executable, link_probe.__file__, request]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": "0"}
    envs = [{**common, "RANK": str(rank)} for rank in range(4)]
    ranks = [subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) for env in envs]
    printed = [process.communicate(timeout=PATIENCE_S)[0] for process in ranks]
    assert ([process.returncode for process in ranks], printed[1:]) == ([0] * 4, [""] * 3)
    join, *rows = map(json.loads, printed[0].splitlines())
    assert (join["test"], join["peers"], join["busbw"]) == ("join", [0, 1], 0)
    tests = [("alone", [0]), ("alone", [1])]
    tests += [(name, [0, 1]) for name in ("pair", "all-reduce", "send/recv")]
    assert [(row["test"], row["peers"]) for row in rows if row["busbw"]] == tests


def test_names_ranks_that_are_here_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """distlaunch itself isn't one, even in a shell with a rank's variables."""
    for name, value in {"DISTLAUNCH_RUN_ID": "own-run", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    env = {**os.environ, "DISTLAUNCH_RUN_ID": "other-run"}
    rank, child = (
        subprocess.Popen(["sleep", "1000"], env=env) for _ in range(2)
    )  # a child inherits the rank
    with rank, child:
        report = checked(tmp_path)[1]
        for process in (rank, child):
            process.kill()
    what = "found 1 rank of other-run already running, such as sleep (pid {})"
    told = {what.format(process.pid) for process in (rank, child)}
    found = [words for _, words in said(report, "load")]
    assert len(told.intersection(found)) == 1
    assert "own-run" not in str(found)


def test_notices_files_beyond_those_it_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although a directory, such as a submodule, is among the first."""
    monkeypatch.setattr(node_check, "MAX_FILES", 2)
    (tmp_path / "requirements-a.txt").mkdir()
    (tmp_path / "requirements-b.txt").touch()
    spec = JobSpec("job", (), Program("command", ("true",), workdir=str(tmp_path)), Logs("/"))
    for more in (False, True):
        files, truncated = node_check._code(spec)
        assert ([*files], truncated) == (["requirements-b.txt"], more)
        (tmp_path / "requirements-c.txt").touch()


MEMORY = 64 << 30
CARDS: dict[str, list[dict[str, Any]]] = {
    "AMD": [{"mem_info_vram_total": MEMORY, "mem_info_vram_used": used} for used in (0, 60 << 30)],
    "Intel": [{"vendor": "0x8086", "tile0/physical_vram_size_bytes": MEMORY}, {"vendor": "0x8086"}],
}
"""Intel's second one has no memory of its own."""
IN_USE = ("warning", "GPU 1 already has 60 GiB of 64 GiB in use")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
@pytest.mark.parametrize("vendor", CARDS)
def test_reads_other_gpus_from_sysfs(tmp_path: Path, vendor: str) -> None:
    """Their files, in place of a driver's."""
    for number, files in enumerate(CARDS[vendor]):
        for name, text in files.items():
            path = tmp_path / "class/drm" / f"card{number}" / "device" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
    script = 'mount --bind "$0" /sys/class && exec "$@"'
    here = ["unshare", "--mount", "sh", "-c", script, str(tmp_path / "class")]
    keys = "command: ['true']\ngpus_per_node: 3\nprocs_per_node: 1\nbackend: gloo\n"
    (tmp_path / "job.yaml").write_text(keys)
    done = completed([*here, *distlaunch_argv("check", str(tmp_path / "job.yaml"), "--json")], status=1)
    amd, intel = [("error", "2 GPUs instead of 3"), IN_USE], [("error", "1 GPU instead of 3")]
    assert said(json.loads(done.stdout), "devices") == (amd if vendor == "AMD" else intel)
