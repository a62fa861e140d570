"""torch's elastic agents over ssh: hosts come late, are killed, are cut off and return; c10d and etcd."""

import importlib.util
import signal
import sys
from pathlib import Path

import pytest

from tests.cluster.hosts import Bed, Site, find, parent_of
from tests.harness import ROOT, cookie_holders, ended_well, kill, running

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
HASTE = "last_call_timeout: 1, keep_alive_interval: 1, keep_alive_max_attempt: 3"


def nameless(site: Site, host: str) -> str:
    """The host behind an sshd in whose sessions no host's name resolves, not even its own."""
    hosts = site.folder / "no_hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    port = site.sshd(host, over={Path("/etc/hosts"): hosts})
    return site.name(f"nameless-{host}", host, port)


def test_all_ranks_agree_over_c10d_on_hosts_that_know_no_names(site: Site) -> None:
    procs = {nameless(site, "host1"): 2, nameless(site, "host2"): 1, nameless(site, "host3"): 1}
    job = site.job(
        [{"host": name, "procs": count} for name, count in procs.items()],
        rendezvous={"backend": "c10d"},
        command=[sys.executable, str(ROOT / "scripts/basics/all_reduce.py")],
    )
    before = site.processes()
    with running(job) as run:
        ended_well(run.wait(), run.stdout, run.stderr, last="all_reduce: ok, 4 ranks")
        for host, ranks in procs.items():
            assert run.stdout.count(f"[{host}] rank ") == ranks
        assert "all 3 torch agents joined the rendezvous at" in run.stderr
        assert cookie_holders(run.run_folder().name) == []
    site.assert_gone(before)


def job_of(site: Site, names: list[str], rendezvous: str) -> Path:
    """Hosts that go on with two, and take another in."""
    (site.folder / "sizes.py").write_text(SIZES)
    nodes = ", ".join(f"{{host: {name}, env: {{HERE: {name}}}}}" for name in names)
    job = site.folder / "job.yaml"
    job.write_text(
        f"script: sizes.py\nnodes: [{nodes}]\nmin_nodes: 2\ngpus_per_node: 0\n"
        f"rendezvous: {{{rendezvous}, conf: {{{HASTE}}}}}\nrestarts: {{max: 9}}\n"
        f"timeouts: {{connect: 10s, lease: 4s, stop: 2s}}\nssh: {{config: {site.ssh_config}}}\n"
    )
    return job


@pytest.mark.long
def test_a_host_that_comes_late_is_taken_in_and_again_after_its_agent_was_killed(site: Site) -> None:
    late = site.name("late", "host3", port=2201)
    job = job_of(site, ["host1", "host2", late], "backend: c10d")
    before = site.processes()
    with running(job) as run:
        run.wait_for("starting on 2 nodes, without late")
        run.wait_for("on 2 ranks")
        sshd = site.processes()
        assert site.sshd("host3") == 2201
        server = site.processes() - sshd
        run.wait_for("late is up; starting its torch agent")
        run.wait_for("on 3 ranks")
        run.wait_until(lambda: f"[{late}] ready".encode() in run.out, f"a worker on {late}")
        pids = worker_of(run.stdout, late)
        kill(parent_of(parent_of(pids)))  # ours, above torch's
        run.wait_for("late was lost: ")
        run.wait_for("torch's agents continue with 2 of 3 nodes")
        run.wait_for("late is back; starting its torch agent")
        run.wait_for("on 3 ranks", times=2)
        (site.folder / "done").touch()
        ended_well(run.wait(), run.stdout, run.stderr, last="all done\n", times=3)
        assert run.holders() == []
    site.assert_gone(before | server)


def worker_of(output: str, host: str) -> int:
    """The PID of the latest worker of a host."""
    return int([line.split()[3] for line in output.splitlines() if "] ready " in line and host in line][-1])


@pytest.mark.long
def test_with_etcd_the_first_host_may_be_cut_off_and_return(site: Site, bed: Bed) -> None:
    if find("etcd") is None or importlib.util.find_spec("etcd") is None:
        pytest.skip("missing: etcd (etcd-server), or the Python package python-etcd")
    port = site.etcd("host4")
    before = site.processes()
    endpoint = f"backend: etcd-v2, endpoint: '{bed.hosts['host4'].address}:{port}'"
    with running(job_of(site, ["host1", "host2", "host3"], endpoint)) as run:
        run.wait_for("on 3 ranks")
        bed.call("cut", "host1")
        try:
            run.wait_for("host1 was lost: ")
            run.wait_for("torch's agents continue with 2 of 3 nodes")
            run.wait_for("on 2 ranks")
        finally:
            bed.call("heal", "host1")
        run.wait_for("host1 is back; starting its torch agent")
        run.wait_for("on 3 ranks", times=2)
        (site.folder / "done").touch()
        ended_well(run.wait(), run.stdout, run.stderr, last="all done\n", times=3)
        assert run.holders() == []
    site.assert_gone(before)


def test_with_c10d_the_loss_of_the_first_host_ends_the_job(site: Site) -> None:
    before = site.processes()
    with running(job_of(site, ["host1", "host2", "host3"], "backend: c10d")) as run:
        run.wait_for("on 3 ranks")
        kill(parent_of(parent_of(worker_of(run.stdout, "host1"))), signal.SIGKILL)
        assert run.wait() == 71
        assert "host1 was lost: " in run.stderr
        assert "it hosted torch's c10d store, which every torch agent needs" in run.stderr
        assert run.holders() == []
    site.assert_gone(before)
