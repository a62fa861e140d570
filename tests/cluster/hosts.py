"""Hosts for tests: a testbed, servers of a test's own inside it, jobs that run there, and what they leave."""

import contextlib
import itertools
import json
import os
import pwd
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tests.harness import (
    Done,
    command_line,
    completed,
    cookie_holders,
    distlaunch_argv,
    wait_gone,
    wait_until,
)

TESTBED = Path(__file__).resolve().parents[2] / "scripts/testbed"
GONE_S = 2.0
"""Within this time after a run's end nothing of it is left on any host."""
SESSIONS_GONE_S = 20.0
"""And of an sshd whose connection was cut, which learns of that only when TCP sends again, seconds later."""
TOOLS = ("ip", "iptables", "mount", "nsenter", "setpriv", "ssh", "ssh-keygen", "sshd", "unshare")

Node = str | dict[str, Any]
"""An entry of a job's `nodes`."""
Over = Mapping[Path, Path] | None
"""Directories and files, and what hides each of them."""


def find(name: str) -> str | None:
    """A program's path; an ordinary PATH often lacks the directories of ip and sshd."""
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/local/sbin:/usr/sbin:/sbin")


def missing(*names: str) -> str | None:
    """Which of these programs are missing, in words, or None."""
    found = ", ".join(name for name in names if find(name) is None)
    return f"missing: {found}" if found else None


def why_not() -> str | None:
    """What is missing for hosts with networks of their own, or None."""
    if os.geteuid():
        return "root is missing: only root can make network namespaces"
    if reason := missing(*TOOLS):
        return reason
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return "network namespaces are missing" if tried.returncode else None


class Host(NamedTuple):
    """One host of the testbed. `pid` is that of its keeper, `directory` has its sshd's files."""

    name: str
    address: str
    pid: int
    directory: Path


class Bed:
    """A testbed that is up."""

    def __init__(self, directory: Path, info: Mapping[str, Any]) -> None:
        self.directory, self.info = directory, info
        self.hosts = {
            host["name"]: Host(host["name"], host["address"], host["pid"], directory / host["name"])
            for host in info["hosts"]
        }
        self.launcher: dict[str, Any] = {}
        """What a job file says to reach the hosts; an ssh_config if nothing."""
        self.port = 22
        """Of the server through which an agent is started on a host."""
        self._networks = {network_of(host.pid) for host in self.hosts.values()}

    def argv(self, command: str, *words: str) -> list[str]:
        """The command line of one of the testbed's commands."""
        return [sys.executable, str(TESTBED), command, "--dir", str(self.directory), *words]

    def ask(self, command: str, *words: str) -> Done:
        """Have the testbed do something, whatever comes of it."""
        return completed(self.argv(command, *words))

    def call(self, command: str, *words: str) -> None:
        """Have the testbed do something, which must succeed."""
        completed(self.argv(command, *words), status=0)

    def inside(self, host: str, *argv: str, **options: Any) -> Done:
        """Run a command on a host."""
        return completed(self.argv("exec", host, "--", *argv), **options)

    @contextlib.contextmanager
    def rule(self, host: str, *words: str) -> Iterator[None]:
        """A rule of a host's firewall, for a while, after those that are there."""
        iptables = (str(find("iptables")), "-w", "5")
        self.inside(host, *iptables, "-A", *words, status=0)
        try:
            yield
        finally:
            self.inside(host, *iptables, "-D", *words, status=0)

    def processes(self) -> set[int]:
        """PIDs of all processes on the hosts."""
        return {pid for pid in _pids() if network_of(pid) in self._networks}

    @contextlib.contextmanager
    def emptied(self, within_s: float = 10.0) -> Iterator[None]:
        """What is started on the hosts in this block is gone soon after it, except a restarted daemon."""
        before = self.processes()
        yield
        wait_gone([pid for pid in self.processes() - before if program_of(pid) != "slurmd"], within_s)


def network_of(pid: int) -> int:
    """The number of a process's network namespace; 0 if it has ended meanwhile, or is a zombie."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return 0


SomeBed = TypeVar("SomeBed", bound=Bed)


@contextlib.contextmanager
def bed_up(
    kind: type[SomeBed], count: int, directory: Path, *words: str, prefix: Sequence[str] = ()
) -> Iterator[SomeBed]:
    """So many hosts, made by `up` with more words and a command before it, and taken down with the block."""
    up = [
        sys.executable,
        str(TESTBED),
        "up",
        str(count),
        "--mode",
        "netns",
        "--dir",
        str(directory),
        "--json",
    ]
    bed = kind(directory, json.loads(completed([*prefix, *up, *words], status=0).stdout))
    try:
        yield bed
    finally:
        bed.call("down")


def bed_of(count: int, directory: Path) -> contextlib.AbstractContextManager[Bed]:
    """Hosts host1, host2 … with networks of their own."""
    return bed_up(Bed, count, directory)


class Ended(NamedTuple):
    """A run that has ended: its exit status, what people and machines read, and the seconds it took."""

    status: int
    stderr: str
    document: Mapping[str, Any]
    took_s: float

    @property
    def failures(self) -> dict[str, tuple[str, str]]:
        """Node → (kind, ssh's words) of those that could not be used."""
        failed = {node["name"]: node["failure"] for node in self.document["nodes"]}
        return {name: (failure["kind"], failure["words"]) for name, failure in failed.items() if failure}

    def block(self, node: str) -> str:
        """What people are told about one node at the end: the line that names it and the words below it."""
        lines = self.stderr.splitlines()
        (start,) = [
            i for i, line in enumerate(lines) if re.match(rf"distlaunch: {re.escape(node)}: .*; ", line)
        ]
        words = itertools.takewhile(lambda line: line.startswith("distlaunch:   |"), lines[start + 1 :])
        return "\n".join([lines[start], *words])

    def events(self, name: str) -> list[dict[str, Any]]:
        """The recorded events of one kind."""
        lines = (Path(self.document["directory"]) / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == name]


class Site:
    """A directory with an ssh_config, from which jobs are started; its servers end with the test."""

    def __init__(self, bed: Bed, directory: Path, stack: contextlib.ExitStack) -> None:
        self.bed, self.directory, self._stack = bed, directory, stack
        self.ssh_config = directory / "ssh_config"
        self.ssh_config.touch()
        self._ports = itertools.count(2201)
        for name in bed.hosts:
            self.name(name, name)

    def name(self, name: str, host: str, port: int = 22, **settings: str) -> str:
        """Have `name` mean a host and port to ssh, with these settings of ssh_config; returns `name`."""
        known = self.bed.directory
        merged = {
            "HostName": self.bed.hosts[host].address,
            "Port": str(port),
            "HostKeyAlias": host,
            "User": pwd.getpwuid(os.geteuid()).pw_name,
            "IdentityFile": f'"{known / "id_ed25519"}"',
            "IdentitiesOnly": "yes",
            "UserKnownHostsFile": f'"{known / "known_hosts"}"',
            "StrictHostKeyChecking": "yes",
        } | settings
        with self.ssh_config.open("a") as config:
            config.writelines([f"Host {name}\n", *(f"    {key} {value}\n" for key, value in merged.items())])
        return name

    # What runs on the hosts

    def sshd(self, host: str, *settings: str, over: Over = None, inside: Sequence[str] = ()) -> int:
        """Start another sshd on a host; its port.

        `settings` win over those of the host's own; each directory or file in `over` is hidden behind its
        value, for this sshd and its sessions only. `inside` is the command that runs it.
        """
        port = next(self._ports)
        config = self.directory / f"sshd_config.{port}"
        listen = f"ListenAddress {self.bed.hosts[host].address}:{port}"
        wanted = [*settings, listen, "PidFile none"]
        own = (self.bed.hosts[host].directory / "sshd_config").read_text().splitlines()
        # Left out, not overruled: for some keywords the first value counts, for others the last.
        rest = [line for line in own if line.split()[0] not in {each.split()[0] for each in wanted}]
        config.write_text("\n".join([*wanted, *rest]) + "\n")
        argv = [str(find("sshd")), "-D", "-e", "-f", str(config)]
        self._start(host, [*inside, *hiding_argv(over, argv)], "Server listening")
        return port

    def login(self, home: Path, shell: str) -> dict[Path, Path]:
        """What to put over what, for `sshd`, so that our user has this home and login shell there."""
        us, passwd = pwd.getpwuid(os.geteuid()), self.directory / f"{home.name}.passwd"
        entry = f"{us.pw_name}:x:{us.pw_uid}:{us.pw_gid}::{home}:{shell}"
        passwd.write_text(f"{entry}\n{Path('/etc/passwd').read_text()}")  # the first of a name counts
        passwd.chmod(0o644)
        return {Path("/etc/passwd"): passwd}

    def server(self, host: str, code: str) -> int:
        """Start a Python program on a host that listens, as `server`, and says `ready`; its port."""
        port = next(self._ports)
        opening = f"import socket; server = socket.create_server(({self.bed.hosts[host].address!r}, {port}))"
        self._start(host, [sys.executable, "-u", "-c", f"{opening}; print('ready')\n{code}"], "ready")
        return port

    def etcd(self, host: str) -> int:
        """Start an etcd server with the v2 API on a host; its port."""
        port, peers = next(self._ports), next(self._ports)
        address = self.bed.hosts[host].address
        clients, others = f"http://{address}:{port}", f"http://127.0.0.1:{peers}"
        listen = ["--listen-client-urls", clients, "--advertise-client-urls", clients]
        data = ["--enable-v2", "--data-dir", str(self.directory / "etcd"), "--listen-peer-urls", others]
        self._start(host, [str(find("etcd")), *data, *listen], "serving insecure client requests")
        return port

    def cut(self, host: str) -> None:
        """Drop all that the host sends and receives, until the end of the test."""
        self._stack.callback(self.bed.call, "heal", host)
        self.bed.call("cut", host)

    def _start(self, host: str, argv: Sequence[str], ready: str) -> None:
        # Into a file, as nobody reads a pipe until the end: after some 270 logins, it holds up sshd.
        log = self.directory / f"server.{next(self._ports)}.log"
        with log.open("wb") as output:
            # Everything on the way execs, so that the process is the server itself.
            argv = self.bed.argv("exec", host, "--", *argv)
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        wait_until(lambda: ready in log.read_text(errors="replace"), lambda: log.read_text(errors="replace"))

    # Jobs

    def job(self, nodes: Sequence[Node], **keys: Any) -> Path:
        """A job file, without the keys that are None; by default each rank leaves a file when it starts."""
        merged: dict[str, Any] = {
            "nodes": list(nodes),
            "gpus_per_node": 0,
            "command": ["touch", "started-{rank}"],
            **(self.bed.launcher or {"ssh": {"config": self.ssh_config.name}}),
        }
        path = self.directory / "job.yaml"
        given = {key: value for key, value in (merged | keys).items() if value is not None}
        path.write_text(json.dumps(given))
        return path

    def run(
        self, nodes: Sequence[Node], *options: str, env: Mapping[str, str] | None = None, over: Over = None
    ) -> Ended:
        """Run a job to its end, after which nothing of it may be left, here or on the hosts.

        `over` hides files from distlaunch and its ssh, as in `sshd`.
        """
        job, before, began = self.job(nodes), self.processes(), time.monotonic()
        argv = hiding_argv(over, distlaunch_argv("run", str(job), "--json", *options))
        done = completed(argv, cwd=self.directory, env={**os.environ, **(env or {})})
        took_s = time.monotonic() - began
        assert "Traceback" not in done.stderr, done.stderr
        ended = Ended(done.returncode, done.stderr, json.loads(done.stdout), took_s)
        assert not cookie_holders(Path(ended.document["directory"]).name), "a rank is left"
        self.assert_gone(before)
        return ended

    def started(self) -> list[str]:
        """The ranks that the default command was started for."""
        return sorted(path.name.removeprefix("started-") for path in self.directory.glob("started-*"))

    def processes(self) -> set[int]:
        """PIDs of all processes on the hosts, and of those here that name this directory (ssh's clients)."""
        return self.bed.processes() | {pid for pid in _pids() if str(self.directory) in _line(pid)}

    def assert_gone(self, before: set[int]) -> None:
        """No process may be left but those of `before`: no rank, no agent, no session, no client."""
        deadline = time.monotonic() + SESSIONS_GONE_S
        while left := self.processes() - before:
            lines = {pid: _line(pid) for pid in left}
            try:
                wait_gone(sorted(left), max(0.0, deadline - time.monotonic()))
            except AssertionError as error:
                raise type(error)(f"{error}\nstill there: {lines}") from error


def hiding_argv(over: Over, argv: Sequence[str]) -> list[str]:
    """`argv`, run where each key of `over` is hidden behind its value, for it alone."""
    hiding = list(argv)
    for target, source in (over or {}).items():
        script = 'mount --bind "$0" "$1" && shift && exec "$@"'
        hiding = ["unshare", "--mount", "sh", "-c", script, str(source), str(target), *hiding]
    return hiding


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _line(pid: int) -> str:
    return " ".join(command_line(pid))


def program_of(pid: int) -> str:
    """The name of the program that a process runs; nothing once it is gone."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def named(pids: Iterable[int], *words: str) -> list[int]:
    """Those whose command lines have all these words."""
    return sorted(pid for pid in pids if {*words} <= {*command_line(pid)})


def parent_of(pid: int) -> int:
    """The parent of a process."""
    # The name before the last parenthesis may hold anything (proc(5)).
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
