"""Runs slurmdbd and its MariaDB on the first host, for a Slurm with accounting, as on most clusters."""

from . import namespaces
from .slurm_files import CLUSTER, directory
from .state import Testbed
from .tools import retry, run, tool

READY_LIMIT_S = 60.0
_PORT = 3306


def write(testbed: Testbed) -> None:
    """Write slurmdbd's configuration, before any host runs."""
    for name in ("slurmdbd", "mariadbd", "mariadb-install-db"):
        tool(name)
    where, first = directory(testbed), testbed.hosts[0]
    configuration = where / "slurmdbd.conf"
    configuration.touch(mode=0o600)
    configuration.write_text(f"""\
AuthType=auth/munge
AuthInfo=socket={where}/munge.socket
DbdHost={first.name}
DbdAddr={first.address}
SlurmUser=root
PidFile={where}/slurmdbd.pid
LogFile={where}/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={_PORT}
StorageUser=root
""")


def start(testbed: Testbed) -> None:
    """Start both, and register the cluster. munged must be running, and slurmctld starts afterwards."""
    where, inside = directory(testbed), namespaces.enter_argv(testbed.hosts[0])
    data = f"--datadir={where}/mysql"
    run([*inside, tool("mariadb-install-db"), "--no-defaults", data, "--user=root", "--skip-test-db"])
    # No one else is in this network, so the database of a testbed needs no passwords.
    server = [tool("mariadbd"), "--no-defaults", data, "--user=root", "--skip-grant-tables"]
    place = [f"--socket={where}/mysql.socket", "--bind-address=127.0.0.1", f"--port={_PORT}"]
    log = f"{where}/mariadbd.log"
    run([*inside, "/bin/sh", "-c", f'exec setsid --fork "$@" >{log} 2>&1 </dev/null', "sh", *server, *place])
    there = [*inside, "test", "-S", f"{where}/mysql.socket"]
    retry(there, READY_LIMIT_S, "MariaDB does not answer")
    run([*inside, tool("slurmdbd")])
    known = [tool("sacctmgr"), "--immediate", "add", "cluster", CLUSTER]
    retry([*inside, *known], READY_LIMIT_S, "slurmdbd does not answer")
