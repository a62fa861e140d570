"""torch's own agents over ssh: they meet at an etcd server, and a host that is cut off is done without."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from tests.cluster.hosts import Bed, Site, find
from tests.harness import ended_well, running

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
    hosts = site.folder / "no_hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    port = site.sshd(host, over={Path("/etc/hosts"): hosts})
    return site.name(f"nameless-{host}", host, port)


@pytest.mark.long
def test_hosts_that_know_no_names_go_on_without_the_first_until_it_returns(
    site: Site, bed: Bed, etcd: str
) -> None:
    (site.folder / "sizes.py").write_text(SIZES)
    procs = {nameless(site, "host1"): 2, nameless(site, "host2"): 1, nameless(site, "host3"): 1}
    first, second, third = procs
    job = site.job(
        [{"host": name, "procs": count, "env": {"HERE": name}} for name, count in procs.items()],
        command=[sys.executable, "sizes.py"],
        min_nodes=2,
        elastic={"grow": "now"},
        rendezvous={"backend": "etcd-v2", "endpoint": etcd},
        timeouts={"connect": "10s", "lease": "4s", "stop": "2s"},
    )
    before = site.processes()
    with running(job) as run:
        run.wait_for("on 4 ranks")
        for at, (host, ranks) in enumerate(procs.items()):
            run.wait_for(f"[{host}:{at}] ready", times=ranks)  # some links are slower
            assert len(re.findall(rf"\[{host}:{at}\] ready \d \d+ {host}\n", run.stdout)) == ranks
        bed.call("cut", "host1")
        try:
            run.wait_for(f"{first} was lost: ")
            run.wait_for(f"continuing with 2 of 3 nodes: {second}, {third}")
            run.wait_for("on 2 ranks")
        finally:
            bed.call("heal", "host1")
        run.wait_for(f"{first} is back; restarting to include it")
        run.wait_for("on 4 ranks", times=2)
        (site.folder / "done").touch()
        ended_well(run.wait(), run.stdout, run.stderr, last="all done\n", times=4)
        assert "3 torch agents on 3 nodes finished" in run.stderr
        assert run.holders() == []
    site.assert_gone(before)
