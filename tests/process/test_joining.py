"""Ranks that join the rendezvous late or never, as seen from outside."""

import re
import socket
import sys
from pathlib import Path

import pytest

from distlaunch.agent import procfs
from distlaunch.agent.watches import Arrivals
from tests.harness import Going, running, wait_until, write_job

ONE_IS_MISSING = """
    import os, signal, sys
    if os.environ["RANK"] == "0":
        {rank_0}
    from torch.distributed import destroy_process_group, init_process_group
    init_process_group("gloo")
    destroy_process_group()
"""
TWICE_A_SLOW_IMPORT_S = 40
"""Until then rank 1 has imported torch, also on two cores that run other tests."""
JOB = f"gpus_per_node: 0\nprocs_per_node: 2\ntimeouts: {{join: {TWICE_A_SLOW_IMPORT_S}s}}"


@pytest.mark.long
@pytest.mark.parametrize(
    ("rank_0", "words"),
    [
        ("signal.pause()", r"pid \d+: has not imported torch yet"),
        ("sys.exit(0)", "exited with status 0 without joining"),
    ],
)
def test_gives_up_when_rank_0_does_not_join(tmp_path: Path, rank_0: str, words: str) -> None:
    with running(write_job(tmp_path, ONE_IS_MISSING.format(rank_0=rank_0), JOB)) as run:
        assert run.wait() == 124
    told = rf"0/2 ranks joined; waiting for rank 0 \(node0.*{words}\), rank 1 \(node0, pid \d+: "
    refused = r"connection to the rendezvous refused\); the others are waiting for rank 0"
    at_the_end = rf"; gave up after {TWICE_A_SLOW_IMPORT_S} s \(timeouts\.join\)\n"
    notice, *_, end = re.findall(rf"{told}.*\n", run.stderr)
    assert "gave up" not in notice  # after 15 s; rank 1 may still import torch
    assert re.fullmatch(rf"{told}{refused}{at_the_end}", end), end


CONNECTS = """
import signal, socket, sys
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print("connected", flush=True)
signal.pause()
"""


def test_looks_again_at_a_connection_that_takes_its_time(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        port = server.getsockname()[1]

        def is_sent() -> bool:
            return any(s.state == procfs.SYN_SENT and s.remote_port == port for s in procfs.sockets())

        # The queue is full: a SYN is dropped, and sent again.
        with socket.create_connection(("127.0.0.1", port)):
            arrivals = Arrivals(port)
            worker = Going(tmp_path, [sys.executable, "-c", CONNECTS, str(port)])
            try:
                wait_until(is_sent, lambda: "no SYN was sent")
                assert arrivals.look({0: worker.process.pid}) == set()
                server.accept()[0].close()
                worker.wait_for("connected")
                assert arrivals.look({0: worker.process.pid}) == {0}
            finally:
                worker.kill()
