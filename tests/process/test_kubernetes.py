"""The manifests of `export kubernetes`, run by stand-ins for pods (tests/pods.py)."""

import json
import shutil
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.job.yaml_document import yaml_text
from tests.harness import all_ended_well, completed, distlaunch, kill
from tests.pods import cluster, pods
from tests.process.torchruns import NEEDS_TORCH, free_port
from tests.unit.samples import bounded

pytestmark = NEEDS_TORCH
ODD = ["it's", 'say "hi"', "$HOME $(JOB_COMPLETION_INDEX) $$", "two\nlines", "", "1e-4", "-x", "{{rank}}"]
AMBIGUOUS = (
    *("1e-4", "1_000", "0b1", "0o17", "0x1F", "01", "1.0", ".5", ".inf", "12:30", "2026-01-01"),
    *("y", "NO", "~", "null", "=", "<<"),
    *("!!str a", "? x", "- x", "a: b", " lead", "trail ", "\n\nx", "  a\nb", "a\n  b\n\n", "a\r\nb"),
    *("\t", "\x7f", "\x85", "\u2028x", "\ufeff", "\U0001f600"),
)
TRAIN = """
    import json, os, sys, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    told = {"sum": int(total), "args": sys.argv[1:], "odd": os.environ["ODD"]}
    os.write(1, f"{json.dumps(told)}\\n".encode())
"""


def manifests(directory: Path, script: str, keys: str = "", kind: str = "job") -> list[dict[str, Any]]:
    """Those of a job with two ranks in each of two pods."""
    (directory / "train.py").write_text(textwrap.dedent(script))
    job = {"script": "train.py", "nodes": 2, "gpus_per_node": 0, "procs_per_node": 2}
    job |= {"kubernetes": {"image": "a/b:1"}, "master_port": free_port(), "workdir": str(directory)}
    job |= {"python": sys.executable, "args": ODD, "env": {"ODD": ODD[2]}, **yaml.safe_load(keys or "{}")}
    said = {key: value for key, value in job.items() if value is not None}
    (directory / "job.yaml").write_text(yaml.safe_dump(said))
    done = distlaunch("export", "kubernetes", str(directory / "job.yaml"), "--kind", kind)
    assert (done.returncode, done.stderr) == (0, "")
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.parametrize(("kind", "ranks"), [("job", 2), ("jobset", 1)])
def test_ranks_of_two_pods_find_each_other_and_get_their_words(kind: str, ranks: int, tmp_path: Path) -> None:
    keys = f"procs_per_node: {ranks}\nlogs: {{dir: {tmp_path}/runs}}"
    with pods(manifests(tmp_path, TRAIN, keys, kind), tmp_path) as both:
        all_ended_well(both, '"sum"', ranks)
        for pod in both:
            told = [json.loads(line.partition("] ")[2]) for line in pod.stdout.splitlines()]
            args = [word.replace("{{rank}}", "{rank}") for word in ODD]
            assert told == [{"sum": 2 * ranks, "args": args, "odd": ODD[2]}] * ranks
    kept = [path.read_text() for path in (tmp_path / "runs").rglob("stdout.log")]
    assert [json.loads(text) for text in kept] == told * 2


def test_the_pods_of_a_trainjob_take_their_place_from_its_runtime(tmp_path: Path) -> None:
    made = manifests(tmp_path, TRAIN, "master_port: null\nprocs_per_node: 1", kind="trainjob")
    port = str(free_port())
    with cluster(made, tmp_path) as trainer:
        trainer.told = {"PET_MASTER_PORT": port}
        all_ended_well([trainer.start(0), trainer.start(1)], '"sum": 2')


def test_a_pod_that_comes_back_early_waits_until_the_others_have_ended(tmp_path: Path) -> None:
    script = """
        import os, pathlib, signal
        if not pathlib.Path("again").exists():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(1, f"ready {os.environ['RANK']} {os.getpid()}\\n".encode())
            signal.pause()
        os.write(1, b"done\\n")
    """
    with cluster(manifests(tmp_path, script, "timeouts: {stop: 2m}"), tmp_path) as job:
        first, second = job.start(0), job.start(1)
        stubborn, failing = first.wait_ready(2), second.wait_ready(2)
        for pid in failing.values():
            kill(pid, signal.SIGUSR1)
        assert second.wait() == 128 + signal.SIGUSR1
        (tmp_path / "again").touch()
        back = job.start(1)
        back.wait_for("waiting for node 0 at")
        for pid in stubborn.values():
            kill(pid, signal.SIGUSR1)
        assert first.wait() == 128 + signal.SIGUSR1
        again = job.start(0)
        assert (again.wait(), back.wait()) == (0, 0), (again.stderr, back.stderr)
        assert (again.stdout, back.stdout) == ("done\n" * 2,) * 2


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@given(st.lists(st.text() | st.sampled_from(AMBIGUOUS)))
@bounded(5)
def test_kubectl_reads_what_was_written(words: list[str]) -> None:
    """Its parser is not the one that other tests read the manifests with."""
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}
    manifest |= {"spec": {"containers": [{"name": "main", "args": [*AMBIGUOUS, *words]}]}}
    argv = ["kubectl", "annotate", "--local", "-f", "-", "a=b", "-o", "json"]
    read = completed(argv, input=yaml_text([manifest]), status=0)
    assert json.loads(read.stdout)["spec"]["containers"][0]["args"] == [*AMBIGUOUS, *words]
