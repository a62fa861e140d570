"""Ranks in the places that MPI's own launcher has for them.

mpirun runs on the first node, below its agent, and takes each node for a machine with a name of ours. What it
starts there in the place of a rank is a stand-in, which hands its variables, and its connection to mpirun, to
the node's agent. With these the agent starts the worker, as always: what it prints, how it ends and what it
leaves are as without MPI. The stand-in ends when the worker has ended well; else it waits until it is killed,
so that mpirun, which ends all when one fails, never knows it before the controller does. One that ends before
its worker was killed, by mpirun for the most part.

mpirun needs a remote shell for its daemons, one on each node. It is given one that hands their command line
to the agent; the controller has it run by the agent of the node that is meant. No node needs ssh to another.
"""

import json
import os
import shlex
import socket
import struct
import sys
import time

from distlaunch.agent.messages import DaemonWanted, MpiEnded, MpiPlaceLost
from distlaunch.agent.mpi_hosts import host_of, place_of
from distlaunch.agent.sweep import exit_status
from distlaunch.agent.worker import begin, forked

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Dict, List, Tuple

    from distlaunch.agent.messages import MpiPlaces
    from distlaunch.agent.outbox import Outbox
    from distlaunch.agent.poller import Poller

    Enter = Callable[[int, Dict[str, str], List[int]], None]

SHELL = "mpi-shell"
"""The file in the agent's folder that is mpirun's remote shell."""
MAX_WORDS = 1 << 12
"""Bytes of what mpirun or a daemon said last that are reported with its end."""
MAX_TOLD = 1 << 18
_PMI_FD = "PMI_FD"
_VARIABLES = ("OMPI_", "ORTE_", "PRTE_", "PMIX_", "PMI_", "HYDI_", "MPI_LOCAL", "I_MPI_", "MPIR_CVAR_CH3_")
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_SETTINGS = {
    # The nodes are known already, whatever scheduler has allocated them.
    "OMPI_MCA_ras": "^alps,gridengine,lsf,slurm,tm",
    # Who runs a job as root has decided that before.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
"""What mpirun gets where its environment does not say otherwise."""
_NOT_OURS = "MPIR_CVAR_CH3_INTERFACE_HOSTNAME"
"""Hydra's name of the node, by which MPICH would look for its address: one of ours."""

_CONNECT = (
    "import array,json,os,socket,sys;s=socket.socket(socket.AF_UNIX,socket.SOCK_SEQPACKET);"
    "s.connect(chr(0)+sys.argv[1]);"
)
_STAND_IN = _CONNECT + (
    "e={k:v for k,v in os.environ.items() if k.startswith(%r)};f=[int(e[k]) for k in [%r] if k in e];"
    "s.sendmsg([json.dumps(e).encode()],[(socket.SOL_SOCKET,socket.SCM_RIGHTS,array.array(chr(105),f))][:len(f)]);"
    "os._exit(0 if s.recv(1) else 1)"
) % (_VARIABLES, _PMI_FD)
_REMOTE_SHELL = _CONNECT + (
    "w=sys.argv[2:];w=w[next(i for i,x in enumerate(w) if x[:1]!=chr(45)):];"
    "s.send(json.dumps(dict(host=w[0],command=chr(32).join(w[1:]))).encode());"
    "os._exit(0 if s.recv(1) else 1)"
)

_OPEN_MPI = ["--bind-to", "none", "--mca", "plm", "rsh", "--mca", "plm_rsh_no_tree_spawn", "1"]
_HYDRA = ["-rmk", "user", "-launcher", "ssh"]


def command_line(version: str, places: "MpiPlaces", shell: str) -> "List[str]":
    """mpirun's command line, for the program that answers so to --version: each rank on its node."""
    hydra = "HYDRA" in version or "Intel" in version
    hosts = ["%s:%d" % (host_of(i), procs) for i, (procs, _) in enumerate(places.nodes)]
    argv = list(places.command)
    if hydra:
        argv += [*_HYDRA, "-launcher-exec", shell, "-localhost", places.address, "-hosts", ",".join(hosts)]
    else:
        argv += [*_OPEN_MPI, "--mca", "plm_rsh_agent", shell]
    for i, (procs, python) in enumerate(places.nodes):
        argv += [":"] if i else []
        argv += ["-n", str(procs)] + ([] if hydra else ["--host", hosts[i]])
        argv += [python, "-I", "-S", "-c", _STAND_IN, "%s-%d" % (places.socket, i)]
    return argv


class Mpi:
    """mpirun, its daemons and the stand-ins of one generation, on one node.

    `environ` is what mpirun and its daemons get. `enter(local_rank, variables, descriptors)` starts a worker.
    """

    def __init__(
        self,
        poller: "Poller",
        outbox: "Outbox",
        places: "MpiPlaces",
        environ: "Dict[str, str]",
        enter: "Enter",
    ) -> None:
        self._poller, self._outbox, self._enter = poller, outbox, enter
        self._environ = {**_SETTINGS, **environ}
        self._name = "%s-%d" % (places.socket, places.place)
        self._programs: "Dict[int, Tuple[str, int]]" = {}
        self._words: "Dict[int, bytes]" = {}
        self._mpirun = 0
        self._stand_ins: "Dict[int, socket.socket]" = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0" + self._name)
        self._listener.listen(socket.SOMAXCONN)
        self._listener.setblocking(False)
        poller.watch(self._listener.fileno(), self._accept)

    def start(self, places: "MpiPlaces", folder: str) -> None:
        """Start mpirun, whose remote shell is written into `folder`. Raises OSError."""
        shell = os.path.join(folder, SHELL)
        with open(os.open(shell, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o700), "w") as file:
            words = (sys.executable, "-I", "-S", "-c", _REMOTE_SHELL, self._name)
            file.write('#!/bin/sh\nexec %s "$@"\n' % " ".join(map(shlex.quote, words)))
        self._mpirun = self._run(
            os.path.basename(places.command[0]),
            lambda: command_line(_version(places.command[0]), places, shell),
        )

    def run_daemon(self, command: str) -> None:
        """Run what mpirun wants to run on this node. Raises OSError."""
        program = next((word for word in command.replace('"', " ").split() if "=" not in word), "sh")
        self._run(os.path.basename(program), lambda: ["/bin/sh", "-c", command])

    def _run(self, program: str, argv: "Callable[[], List[str]]") -> int:
        """Fork a process that becomes what `argv`, called there, says; its PID."""
        read, write = os.pipe()
        agent = os.getpid()
        pid = forked(lambda: _become(argv, self._environ, write, agent))
        os.close(write)
        os.set_blocking(read, False)
        self._programs[pid], self._words[read] = (program, read), b""
        self._poller.watch(read, lambda: self._hear(read))
        return pid

    def _hear(self, fd: int) -> bool:
        """Take in what a program says; False when there is no more for now."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        self._words[fd] = (self._words[fd] + data)[-MAX_WORDS:]
        if not data:
            self._poller.forget(fd)
        return bool(data)

    def ended(self, pid: int, status: int) -> None:
        """A child has ended that is no worker: told, if it is mpirun or a daemon that has failed."""
        program, fd = self._programs.pop(pid, ("", -1))
        if not program or (status == 0 and pid != self._mpirun):
            return  # daemons go on in the background
        while self._hear(fd):
            pass
        words = self._words[fd].decode(errors="replace")
        self._outbox.report(MpiEnded(program, exit_status(status), words))

    # Stand-ins, and the remote shell

    def _accept(self) -> None:
        try:
            connection = self._listener.accept()[0]
        except OSError:
            return
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if struct.unpack("3i", credentials)[1] != os.geteuid():
            connection.close()  # anyone here may find the name
            return
        self._poller.watch(connection.fileno(), lambda: self._receive(connection))

    def _receive(self, connection: "socket.socket") -> None:
        self._poller.forget(connection.fileno())
        try:
            data, rights, _, _ = connection.recvmsg(MAX_TOLD, socket.CMSG_SPACE(struct.calcsize("i")))
            told = json.loads(data)
            if "host" in told:
                self._outbox.report(DaemonWanted(place_of(told["host"]), told["command"]))
                connection.send(b"\0")
                connection.close()
            else:
                descriptors = [fd for _, _, raw in rights for fd in struct.unpack("i", raw)]
                self._take_in(connection, told, descriptors)
        except (OSError, ValueError, LookupError, StopIteration):
            connection.close()  # killed meanwhile, or of an MPI that we don't know: mpirun ends all

    def _take_in(
        self, connection: "socket.socket", variables: "Dict[str, str]", descriptors: "List[int]"
    ) -> None:
        local_rank = int(next(variables[name] for name in _LOCAL_RANKS if name in variables))
        variables.pop(_NOT_OURS, None)
        if descriptors:
            variables[_PMI_FD] = str(descriptors[0])
        self._stand_ins[local_rank] = connection
        self._poller.watch(connection.fileno(), lambda: self._lose(local_rank))
        self._enter(local_rank, variables, descriptors)
        for fd in descriptors:
            os.close(fd)

    def _lose(self, local_rank: int) -> None:
        """A stand-in, which never says more, was killed."""
        self._outbox.report(MpiPlaceLost(local_rank, time.monotonic()))
        self._close(self._stand_ins.pop(local_rank))

    def _close(self, connection: "socket.socket") -> None:
        self._poller.forget(connection.fileno())
        connection.close()

    def finished(self, local_rank: int) -> None:
        """A worker has ended well: its stand-in may, too."""
        connection = self._stand_ins.pop(local_rank, None)
        if connection:
            try:
                connection.send(b"\0")
            except OSError:
                pass  # killed
            self._close(connection)

    def close(self) -> None:
        """All is swept: nobody is there any more."""
        for connection in (self._listener, *self._stand_ins.values()):
            self._close(connection)
        for fd in self._words:
            self._poller.forget(fd)
            os.close(fd)


def _version(program: str) -> str:
    """What mpirun says of itself."""
    import subprocess

    asked = subprocess.run(
        [program, "--version"], check=False, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    return asked.stdout.decode(errors="replace")


def _become(argv: "Callable[[], List[str]]", environ: "Dict[str, str]", output: int, agent: int) -> None:
    try:
        begin(agent)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.clear()
        os.environ.update(environ)
        words = argv()
        os.execvp(words[0], words)
    except OSError as error:
        os.write(2, ("%s: %s\n" % (error.filename, error.strerror)).encode())
    finally:
        os._exit(127)
