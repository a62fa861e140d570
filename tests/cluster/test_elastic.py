"""Training that goes on without a host that is cut off, and takes it in again."""

import importlib.util
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.cluster.hosts import Bed, Site, find
from tests.harness import ROOT, ended_well, running

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
    job = tmp_path / "job.yaml"
    shutil.copy(ROOT / "configs/hosts/elastic.yaml", job)
    (tmp_path / "slower.py").write_text(SLOWER)
    settings = [
        f"ssh.config={bed.directory}/ssh_config",
        "script=slower.py",
        "nodes=[host1, host2]",
        "min_nodes=1",
        f"args=[--dir, {tmp_path}/snapshot, --epochs, '100000']",
        "timeouts={lease: 6s, stop: 2s}",
        "env={OMP_NUM_THREADS: 1}",  # the hosts share this machine's cores
    ]
    with running(job, *(word for one in settings for word in ("--set", one))) as run:
        try:
            run.wait_for("on 2 ranks", times=5)
            bed.call("cut", "host2")
            run.wait_for("host2 was lost")
            run.wait_for("continuing with 1 of 2 nodes: host1")
            run.wait_for("on 1 ranks", times=5)
        finally:
            bed.call("heal", "host2")
        run.wait_for("host2 is back; restarting to include it")
        run.wait_for("continuing with 2 of 2 nodes: host1, host2")
        before = run.stdout.count("on 2 ranks")
        run.wait_for("on 2 ranks", times=before + 5)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130
        assert run.holders() == []
    assert_continues(run.stdout)


def assert_continues(text: str) -> None:
    """No epoch is trained twice but the one that a restart interrupted, and the loss does not start anew."""
    found = re.findall(r"epoch +(\d+)  loss ([\d.]+)  on (\d+) ranks\n", text)
    epochs = [(int(number), float(loss), int(ranks)) for number, loss, ranks in found]
    resumed = set(map(int, re.findall(r"resumed from epoch (\d+)", text)))
    sizes = [ranks for _, _, ranks in epochs]
    assert sorted(set(sizes)) == [1, 2]
    turns = [i for i in range(1, len(epochs)) if sizes[i] != sizes[i - 1]]
    assert len(turns) == 2
    first_loss = epochs[0][1]
    for turn in turns:
        (number, loss, _), (before, earlier, _) = epochs[turn], epochs[turn - 1]
        # A restart may come between an epoch's snapshot and the line that tells of it.
        assert before <= number <= before + 2, "it went on where it was"
        assert number - 1 in resumed, "and no epoch was left out"
        assert loss < min(first_loss * 0.9, earlier * 1.5 + 0.05), "and not from the beginning"


# torch's own agents, which meet at an etcd server


SIZES = """
import os, time, torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("gloo", timeout=timedelta(seconds=4))
rank = dist.get_rank()
os.write(1, f"ready {rank} {os.getpid()} {os.environ['HERE']}\\n".encode())
done = torch.zeros(2)
while not done[1]:
    first, done = not done[0], torch.tensor([1.0, float(os.path.exists("done"))])
    dist.all_reduce(done)
    if rank == 0 and first:
        os.write(1, f"on {int(done[0])} ranks\\n".encode())
    time.sleep(0.1)  # a step of training, but one that leaves the machine to the other tests
dist.barrier()
dist.destroy_process_group()
os.write(1, b"all done\\n")
"""
"""Sums with all others until there is a file `done`; where one of them is silent, a sum fails after 4 s."""


@pytest.fixture
def etcd(site: Site, bed: Bed) -> str:
    """The endpoint of an etcd server on host4."""
    if find("etcd") is None or importlib.util.find_spec("etcd") is None:
        pytest.skip("missing: etcd (etcd-server), or the Python package python-etcd")
    return f"{bed.hosts['host4'].address}:{site.etcd('host4')}"


def nameless(site: Site, host: str) -> str:
    """The host behind an sshd in whose sessions no host's name resolves, not even its own."""
    hosts = site.directory / "no_hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    port = site.sshd(host, over={Path("/etc/hosts"): hosts})
    return site.name(f"nameless-{host}", host, port)


@pytest.mark.long
def test_nameless_hosts_go_on_without_the_first_until_it_returns(site: Site, bed: Bed, etcd: str) -> None:
    (site.directory / "sizes.py").write_text(SIZES)
    procs = {nameless(site, "host1"): 2, nameless(site, "host2"): 1}
    first, second = procs
    job = site.job(
        [{"host": name, "procs": count, "env": {"HERE": name}} for name, count in procs.items()],
        command=[sys.executable, "sizes.py"],
        min_nodes=1,
        elastic={"grow": "now"},
        rendezvous={"backend": "etcd-v2", "endpoint": etcd},
        timeouts={"connect": "10s", "lease": "4s", "stop": "2s"},
    )
    before = site.processes()
    with running(job) as run:
        run.wait_for("on 3 ranks")
        for at, (host, ranks) in enumerate(procs.items()):
            run.wait_for(f"[{host}:{at}] ready", times=ranks)  # some links are slower
            assert len(re.findall(rf"\[{host}:{at}\] ready \d \d+ {host}\n", run.stdout)) == ranks
        bed.call("cut", "host1")
        try:
            run.wait_for(f"{first} was lost: ")
            run.wait_for(f"continuing with 1 of 2 nodes: {second}")
            run.wait_for("on 1 ranks")
        finally:
            bed.call("heal", "host1")
        run.wait_for(f"{first} is back; restarting to include it")
        run.wait_for("on 3 ranks", times=2)
        (site.directory / "done").touch()
        ended_well(run.wait(), run.stdout, run.stderr, last="all done\n", times=3)
        assert "2 torch agents on 2 nodes finished" in run.stderr
        assert run.holders() == []
    site.assert_gone(before)
