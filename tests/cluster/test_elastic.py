"""Training that goes on without a host that is cut off, and takes it in again."""

import re
import shutil
import signal
from itertools import pairwise
from pathlib import Path

import pytest

from tests.cluster.hosts import Bed
from tests.harness import ROOT, running

SLOWER = f"""
import sys, time
from torch.utils.data import DistributedSampler
deal = DistributedSampler.set_epoch
DistributedSampler.set_epoch = lambda *words: (time.sleep(0.3), deal(*words))
sys.path[:0] = ["{ROOT}/scripts/training"]
import ddp_snapshot
ddp_snapshot.main()
"""
"""The example, with epochs that leave the machine to the other tests."""


@pytest.mark.long
def test_the_loss_curve_continues_over_the_loss_and_return_of_a_host(tmp_path: Path, bed: Bed) -> None:
    job = Path(shutil.copy(ROOT / "configs/hosts/elastic.yaml", tmp_path))
    (tmp_path / "slower.py").write_text(SLOWER)
    settings = [
        f"ssh.config={bed.directory}/ssh_config",
        "script=slower.py",
        f"args=[--dir, {tmp_path}/snapshot, --epochs, '100000']",
        "timeouts={lease: 6s, stop: 2s}",
        "env={OMP_NUM_THREADS: 1}",  # the hosts share this machine's cores
    ]
    with running(job, *(word for one in settings for word in ("--set", one))) as run:
        try:
            run.wait_for("on 3 ranks", times=5)
            bed.call("cut", "host2")
            run.wait_for("host2 was lost")
            run.wait_for("continuing with 2 of 3 nodes: host1, host3")
            run.wait_for("on 2 ranks", times=5)
        finally:
            bed.call("heal", "host2")
        run.wait_for("host2 is back; restarting to include it")
        run.wait_for("continuing with 3 of 3 nodes: host1, host3, host2")
        before = run.stdout.count("on 3 ranks")
        run.wait_for("on 3 ranks", times=before + 5)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130
        assert run.holders() == []
    assert_continues(run.stdout)


def assert_continues(text: str) -> None:
    """No epoch is trained twice but the one that a restart interrupted, and the loss does not start anew."""
    found = re.findall(r"epoch +(\d+)  loss ([\d.]+)  on (\d+) ranks\n", text)
    epochs = [(int(number), float(loss), int(ranks)) for number, loss, ranks in found]
    resumed = set(map(int, re.findall(r"resumed from epoch (\d+)", text)))
    turns = [(before, after) for before, after in pairwise(epochs) if before[2] != after[2]]
    assert [after[2] for _, after in turns] == [2, 3]
    for (before, earlier, _), (number, loss, _) in turns:
        # A restart may come between an epoch's snapshot and the line that tells of it.
        assert before <= number <= before + 2, "it went on where it was"
        assert number - 1 in resumed, "and no epoch was left out"
        assert loss < min(epochs[0][1] * 0.9, earlier * 1.5 + 0.05), "and not from the beginning"
