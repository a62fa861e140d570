"""`check` on this machine: its output, and GPUs and NCCL libraries by stand-ins with their C interfaces.

The stand-ins are compiled from nvml.h's and nccl.h's declarations, since no test machine has a GPU.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.harness import completed, distlaunch

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


def checked(folder: Path, **job: Any) -> tuple[int, dict[str, Any]]:
    (folder / "job.yaml").write_text(json.dumps({"command": ["true"], "gpus_per_node": 0, **job}))
    done = distlaunch("check", str(folder / "job.yaml"), "--json")
    return done.returncode, json.loads(done.stdout)


def said(report: dict[str, Any], part: str) -> list[tuple[str, str]]:
    return [(each["level"], each["what"]) for each in report["findings"] if each["part"] == part]


def test_reads_gpus_through_nvml(tmp_path: Path) -> None:
    library(tmp_path / "lib" / "libnvidia-ml.so.1", NVML)
    env = {"LD_LIBRARY_PATH": str(tmp_path / "lib")}
    status, report = checked(tmp_path, env=env, gpus_per_node=4, procs_per_node=1, backend="gloo")
    assert status == 1
    init = (Path("/proc/1/comm").read_text().strip(), 1)
    assert said(report, "devices") == [
        ("error", "2 GPUs instead of 4"),
        ("warning", "GPU 0 has had 3 uncorrectable memory errors"),
        ("warning", f"GPU 1 already has 40 GiB of 80 GiB in use, by {init[0]} (pid {init[1]})"),
    ]


def test_names_several_nccl_libraries(tmp_path: Path) -> None:
    library(tmp_path / "a" / "libnccl.so.2", NCCL.replace("NUMBER", "22703"))
    library(tmp_path / "b" / "libnccl.so.2", NCCL.replace("NUMBER", "21904"))
    status, report = checked(tmp_path, env={"LD_LIBRARY_PATH": f"{tmp_path}/a:{tmp_path}/b"})
    assert status == 0
    ((level, words),) = said(report, "software")
    assert level == "warning"
    assert f"2.27.3 in {tmp_path}/a/libnccl.so.2" in words
    assert f"2.19.4 in {tmp_path}/b/libnccl.so.2" in words


@pytest.mark.parametrize(("script", "status"), [("import json\n", 0), ("import nonesuch\n", 1)])
def test_the_exit_status_says_whether_the_job_can_work(tmp_path: Path, script: str, status: int) -> None:
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "job.yaml").write_text("script: train.py\ngpus_per_node: 0\n")
    done = distlaunch("check", str(tmp_path / "job.yaml"), status=status)
    assert ("lacks nonesuch · the script imports it" in done.stdout) == bool(status)
    assert done.stdout.splitlines()[-1].startswith("fine: reach (1 node, ")
