"""The configuration and key of a testbed's Slurm. Their directory replaces /etc/slurm inside the hosts."""

import os
import stat
from pathlib import Path

from .state import Host, Testbed
from .tools import TestbedError, tool

CLUSTER = "testbed"
CONF_DIR = Path("/etc/slurm")
FIRST_PORT = 17000
"""First port of the slurmds that share a host."""
REQUEUE_S = 5
"""Seconds that credentials are valid and that requeued jobs wait. Slurm's minimum."""
GPUS = 2
"""Fake GPUs of each node, which are plain files, to test how Slurm assigns and reports them."""


def directory(testbed: Testbed) -> Path:
    """Return the directory for all Slurm files."""
    return testbed.dir / "slurm"


def nodes_of(testbed: Testbed) -> list[tuple[str, Host]]:
    """Return the name and host of each node: one node per host, or the requested number over all hosts."""
    hosts, count = testbed.hosts, testbed.schedulers.slurm_nodes
    if count == len(hosts):
        return [(host.name, host) for host in hosts]
    return [(f"n{i + 1}", hosts[i * len(hosts) // count]) for i in range(count)]


def write(testbed: Testbed) -> None:
    """Write the configuration and the key, before the keepers run."""
    for name in ("munged", "slurmctld", "slurmd", "srun"):
        tool(name)
    if not CONF_DIR.is_dir():
        raise TestbedError(f"{CONF_DIR} does not exist: apt install slurm-wlm")
    where = directory(testbed)
    for name, _ in nodes_of(testbed):
        (where / "spool" / name).mkdir(parents=True)
    (where / "state").mkdir()
    key = where / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    for number in range(GPUS):
        os.mknod(where / f"gpu{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    (where / "gres.conf").write_text(f"Name=gpu File={where}/gpu[0-{GPUS - 1}]\n")
    (where / "slurm.conf").write_text(_configuration(testbed))


def hosts_lines(testbed: Testbed) -> list[str]:
    """Return the lines of /etc/hosts for nodes whose names differ from their hosts'."""
    shared = [(name, host) for name, host in nodes_of(testbed) if name != host.name]
    return [f"{host.address} {name}" for name, host in shared]


def _configuration(testbed: Testbed) -> str:
    where, first = directory(testbed), testbed.hosts[0]
    nodes = "".join(
        f"NodeName={name} NodeHostname={host.name} NodeAddr={host.address} Port={_port(testbed, number)} "
        f"CPUs=8 Gres=gpu:{GPUS} State=UNKNOWN\n"
        for number, (name, host) in enumerate(nodes_of(testbed))
    )
    accounts = (
        f"AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost={first.address}\n"
        f"AccountingStoragePass={where}/munge.socket\n"
        if testbed.schedulers.slurm_accounts
        else ""
    )
    return f"""\
ClusterName={CLUSTER}
SlurmctldHost={first.name}({first.address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={where}/munge.socket,cred_expire={REQUEUE_S}
StateSaveLocation={where}/state
SlurmdSpoolDir={where}/spool/%n
SlurmctldPidFile={where}/slurmctld.pid
SlurmdPidFile={where}/slurmd.%n.pid
SlurmctldLogFile={where}/slurmctld.log
SlurmdLogFile={where}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=20
KillWait=5
MinJobAge=600
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
TreeWidth=65533
{accounts}{nodes}PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def _port(testbed: Testbed, number: int) -> int:
    return 6818 if testbed.schedulers.slurm_nodes == len(testbed.hosts) else FIRST_PORT + number
