"""The testbed itself: real hosts, real sshds, and nothing left of them afterwards."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import TESTBED, Bed, bed_up, find, hiding_argv, network_of, why_not
from tests.harness import PATIENCE_S, Done, Held, completed, held, line_pipe, program

Words = Sequence[str | Path]
BY_PYTHON: Words = [sys.executable, TESTBED]
"""Its own first line takes the python3 on PATH, which may be a script that looks for one for longer."""
NO_SSH = [name for name in ("sshd", "ssh", "ssh-keygen", "setpriv") if find(name) is None]
NO_NETNS = why_not()

pytestmark = [pytest.mark.skipif(bool(NO_SSH), reason=f"{NO_SSH} missing"), pytest.mark.together("testbed")]
needs_netns = pytest.mark.skipif(NO_NETNS is not None, reason=str(NO_NETNS))


class Hosts(Bed):
    """A testbed that is up, and what is known of its hosts."""

    def ssh(self, host: str, *argv: str) -> Done:
        return completed(["ssh", "-F", self.info["ssh_config"], host, shlex.join(argv)])

    def status(self, name: str = "host1") -> dict[str, Any]:
        status = json.loads(self.ask("status", "--json").stdout)
        return dict(next(host for host in status["hosts"] if host["name"] == name))

    def sshd(self, name: str = "host1") -> int:
        return int((self.hosts[name].directory / "sshd.pid").read_text())

    def daemon(self, name: str = "host1", start: str = "setsid") -> int:
        """Start a process that leaves its session; its PID."""
        return int(self.ssh(name, "sh", "-c", f"{start} sleep 1000 >/dev/null 2>&1 & echo $!").stdout)


def call_testbed(command: str, directory: Path, *words: str) -> Done:
    return completed([*BY_PYTHON, command, "--dir", directory, *words])


@contextlib.contextmanager
def brought_up(directory: Path, count: int, prefix: Sequence[str] = ()) -> Iterator[Hosts]:
    if NO_NETNS:
        pytest.skip(NO_NETNS)
    with bed_up(Hosts, count, directory, prefix=prefix) as bed:
        yield bed
    assert not directory.exists()


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Hosts]:
    """One host, which the test may harm."""
    with brought_up(tmp_path / "bed", 1) as bed:
        yield bed


def ended(processes: Held, pid: int, within_s: float = PATIENCE_S) -> bool:
    return processes.has_ended(pid, time.monotonic() + within_s)


def namespaces_of(pid: int | str) -> dict[Path, int]:
    """None once the process has ended."""
    paths = [Path(f"/proc/{pid}/ns/{kind}") for kind in ("net", "uts", "mnt")]
    with contextlib.suppress(OSError):
        return {path: path.stat().st_ino for path in paths}
    return {}


def interfaces() -> set[str]:
    return {link["ifname"] for link in json.loads(completed(["ip", "-j", "link"]).stdout)}


@contextlib.contextmanager
def noted(info: Mapping[str, Any]) -> Iterator[Callable[[], dict[str, list[str]]]]:
    """Note all that a testbed has on this machine; what is yielded finds what is left of it.

    The namespaces are held open meanwhile, for the kernel gives a dead one's number to the next, which
    may be another test's. A namespace in which no process is, and that is mounted nowhere, is only ours.
    """
    names = {info["bridge"], *(host["interface"] for host in info["hosts"])} - {None}
    pids = [host["pid"] for host in info["hosts"] if host["pid"]]
    inodes = {path: inode for pid in pids for path, inode in namespaces_of(pid).items()}
    directory, inside = info["dir"], set(inodes.values())

    def left() -> dict[str, list[str]]:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        rules = completed(["iptables", "-S"]).stdout.splitlines()
        found = {
            "directory": [directory] * os.path.exists(directory),
            "interfaces": sorted(names & interfaces()),
            "processes": [pid for pid in os.listdir("/proc") if inside & {*namespaces_of(pid).values()}],
            "mounts": [line for line in mounts if directory in line],
            "rules": [line for line in rules if any(name in line for name in names)],
        }
        return {kind: values for kind, values in found.items() if values}

    with contextlib.ExitStack() as stack:
        for path in inodes:
            stack.enter_context(path.open())
        yield left


# What hosts are


def test_exec_passes_on_words_and_status_and_a_living_testbed_is_left_alone(
    bed: Hosts, tmp_path: Path
) -> None:
    words = ("hostname; pwd; printf '%s|' \"$@\"; exit 7", "sh", "a b", "--dir", "$HOME")
    done = bed.inside("host1", "sh", "-c", *words)
    assert (done.returncode, done.stdout) == (7, f"host1\n{Path.cwd()}\na b|--dir|$HOME|")
    unknown = bed.inside("host9", "true")
    assert (unknown.returncode, unknown.stderr.count("\n")) == (1, 1)
    assert "no host 'host9'" in unknown.stderr
    (tmp_path / "precious").write_text("mine")
    commands = (("up", bed.directory, "1"), ("up", tmp_path, "1"), ("down", tmp_path), ("status", tmp_path))
    for command, directory, *more in commands:
        refused = call_testbed(str(command), Path(directory), *map(str, more))
        assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert (tmp_path / "precious").read_text() == "mine", "nor is a directory of others changed"
    assert bed.ssh("host1", "hostname").stdout == "host1\n"


@needs_netns
def test_hosts_reach_each_other_where_the_firewall_forwards_nothing(tmp_path: Path) -> None:
    # The machine is a namespace here, so that its firewall is ours to set, as Docker does.
    at = shlex.join(["--dir", str(tmp_path / "bed")])
    greeted = "import socket; print(socket.create_connection(('host2', 22), 5).recv(4).decode())"
    script = f"""
        ip link set lo up && iptables -P FORWARD DROP && {TESTBED} up 2 {at} >&2
        {TESTBED} exec host1 {at} -- {shlex.join([sys.executable, "-c", greeted])}
        {TESTBED} down {at} >&2
        iptables -S FORWARD
    """
    done = completed(["unshare", "--net", "sh", "-c", script])
    assert done.stdout == "SSH-\n-P FORWARD DROP\n", done.stderr


def test_a_locked_root_account_can_log_in(tmp_path: Path) -> None:
    shadow = tmp_path / "shadow"
    shadow.write_text("root:!secret:19000:0:99999:7:::\nother:$6$hash:19000:0:99999:7:::\n")
    with brought_up(tmp_path / "bed", 1, prefix=hiding_argv({Path("/etc/shadow"): shadow}, [])) as bed:
        assert bed.ssh("host1", "hostname").stdout == "host1\n"
        entries = bed.inside("host1", "cat", "/etc/shadow").stdout.split()
        assert entries == [f"{name}:*:19000:0:99999:7:::" for name in ("root", "other")]


# What down leaves


def test_down_leaves_nothing_also_where_an_sshd_or_a_keeper_was_killed(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        bed = stack.enter_context(brought_up(tmp_path / "bed", 3))
        left = stack.enter_context(noted(bed.info))
        before = left()
        assert before["directory"] and len(before["interfaces"]) == 4 and len(before["processes"]) >= 6
        sshd, keeper, keepers_sshd = bed.sshd("host1"), bed.hosts["host2"].pid, bed.sshd("host2")
        daemons = [bed.daemon("host2"), bed.daemon("host3"), bed.daemon("host3", "setsid unshare --net")]
        processes = stack.enter_context(held([sshd, keeper, keepers_sshd, *daemons]))
        os.kill(sshd, signal.SIGKILL)
        assert ended(processes, sshd)
        assert (bed.status("host1")["sshd"], bed.status("host1")["alive"]) == (False, True)
        assert bed.inside("host1", "hostname").stdout == "host1\n", "the host outlives its sshd"
        os.kill(keeper, signal.SIGKILL)
        assert ended(processes, keeper) and ended(processes, keepers_sshd)
        assert not bed.status("host2")["alive"]
        refused = bed.inside("host2", "true")
        assert (refused.returncode, "is dead" in refused.stderr) == (1, True)
        assert not any(ended(processes, pid, 0) for pid in daemons)
        bed.call("down")
        assert all(ended(processes, pid, 0) for pid in daemons)
        assert left() == {}
    # Down of nothing, at the end of the block, is no error.


def kill_keeper(bed: Hosts) -> None:
    """End a host by its keeper; its sshd ends with it."""
    with held([bed.hosts["host1"].pid, bed.sshd()]) as processes:
        os.kill(bed.hosts["host1"].pid, signal.SIGKILL)
        processes.wait_ends(processes.pids, time.monotonic() + PATIENCE_S)


def test_down_spares_a_stranger_whose_namespace_got_the_same_number(bed: Hosts) -> None:
    kill_keeper(bed)
    argv = ["unshare", "--net", "sh", "-c", "echo; exec sleep 1000"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as stranger:
        assert stranger.stdout is not None and stranger.stdout.readline()
        state = bed.directory / "state.json"
        data = json.loads(state.read_text())
        data["hosts"][0]["netns"] = network_of(stranger.pid)
        state.write_text(json.dumps(data))
        try:
            bed.call("down")
            assert stranger.poll() is None
        finally:
            stranger.kill()


def test_up_replaces_a_testbed_that_died(bed: Hosts) -> None:
    kill_keeper(bed)
    made = call_testbed("up", bed.directory, "1", "--json")
    assert made.returncode == 0, made.stderr
    assert bed.ssh("host1", "hostname").stdout == "host1\n"
    assert json.loads(made.stdout)["bridge"] != bed.info["bridge"]
    assert bed.info["bridge"] not in interfaces()


# What an up that ends early leaves


# A program that `up` runs, the arguments it is run with, and what it still does before it hangs.
KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
KEYS, LINKS, SSHD = (
    ("ssh-keygen", "*/id_ed25519", ":"),
    ("ip", "*-batch*", f'{find("ip")} "$@"'),
    ("sshd", "-D*", ":"),
)


@needs_netns
@pytest.mark.parametrize(
    ("stage", "by"), [*((stage, KILL) for stage in (KEYS, LINKS, SSHD)), (SSHD, TERM), (LINKS, INT)]
)
def test_up_can_be_killed_anywhere(stage: tuple[str, str, str], by: int, tmp_path: Path) -> None:
    (name, when, work), directory, path = stage, tmp_path / "bed", tmp_path / "bin"
    path.mkdir()
    hangs = f"mkdir {path}/once 2>/dev/null && {{ {work}; echo $$ > {tmp_path}/fifo; exec sleep 1000; }}"
    program(path / name, f'case "$*" in {when}) {hangs};; esac\nexec {find(name)} "$@"')
    env = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}"}
    with line_pipe(tmp_path / "fifo") as line:
        up = subprocess.Popen([*BY_PYTHON, "up", "2", "--dir", directory], env=env)
        stuck = int(line())
        try:
            check_killed(up, by, directory, keepers=stage != KEYS)
        finally:
            up.kill()
            up.wait(PATIENCE_S)
            with contextlib.suppress(ProcessLookupError):
                os.kill(stuck, signal.SIGKILL)
            assert call_testbed("down", directory).returncode == 0


def check_killed(up: "subprocess.Popen[bytes]", by: int, directory: Path, keepers: bool) -> None:
    """Nothing is left of an `up` that is still at work, whose `status` is refused, once it is killed."""
    state: dict[str, Any] = json.loads((directory / "state.json").read_text())
    hosts = [host | {"pid": host["keeper"] and host["keeper"]["pid"]} for host in state["hosts"]]
    with noted(state | {"hosts": hosts, "bridge": f"tb{state['tag']}"}) as left:
        assert ("processes" in left()) == keepers, "keepers are written down"
        busy = call_testbed("down", directory)
        assert (busy.returncode, "still at work" in busy.stderr) == (1, True)
        up.send_signal(by)
        up.wait(PATIENCE_S)
        if by == KILL:
            assert call_testbed("down", directory).returncode == 0
        else:
            assert up.returncode == 128 + by
        assert left() == {}


# Without namespaces


TESTER = 54321


def ordinary_user(directory: Path) -> list[str]:
    """The words by which root has another user, of whom this is the home, run a command."""
    if os.geteuid():
        return []
    passwd = directory / "passwd"
    us = f"tester:x:{TESTER}:{TESTER}::{directory}:/bin/sh\n"
    passwd.write_text(Path("/etc/passwd").read_text() + us)
    passwd.chmod(0o644)
    os.chown(directory, TESTER, TESTER)
    become = ["setpriv", f"--reuid={TESTER}", f"--regid={TESTER}", "--clear-groups", "--"]
    return [*hiding_argv({Path("/etc/passwd"): passwd}, become), "env", f"HOME={directory}"]


def python_of(prefix: list[str]) -> str:
    code = "import sys; sys.exit(sys.version_info < (3, 11))"
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        if completed([*prefix, python, "-c", code]).returncode == 0:
            return python
    pytest.skip("a python3 (3.11 or later) that an ordinary user may run is missing")


@pytest.fixture
def home() -> Iterator[Path]:
    """Outside of pytest's directories, which only root may enter."""
    with tempfile.TemporaryDirectory(prefix="testbed") as name:
        yield Path(name)


@pytest.mark.skipif(os.geteuid() == 0 and NO_NETNS is not None, reason=str(NO_NETNS))
def test_an_ordinary_user_gets_loopback_hosts(home: Path) -> None:
    # Without what other tests, which run it, compile meanwhile.
    compiled = shutil.ignore_patterns("__pycache__")
    shutil.copytree(TESTBED.parent / "testbed_hosts", home / "testbed_hosts", ignore=compiled)
    script, bed, prefix = shutil.copy(TESTBED, home), home / "bed", ordinary_user(home)
    python = python_of(prefix)

    def as_user(*argv: str | Path) -> Done:
        return completed([*prefix, *argv], cwd="/")

    def testbed(command: str, *words: str) -> Done:
        return as_user(python, script, command, "--dir", bed, *words)

    made = testbed("up", "2", "--json")
    assert made.returncode == 0, made.stderr
    try:
        told = "testbed: only root can make network namespaces; making loopback hosts instead\n"
        assert made.stderr == told
        info = json.loads(made.stdout)
        assert (info["mode"], info["bridge"]) == ("loopback", None)
        ssh = ("ssh", "-F", info["ssh_config"])
        for host in info["hosts"]:
            user, *connection = as_user(*ssh, host["name"], "id -u; echo $SSH_CONNECTION").stdout.split()
            assert f"{user}\n" == as_user("id", "-u").stdout
            assert connection[2:] == [host["address"], str(host["port"])]
        assert testbed("exec", "host1", "--", "sh", "-c", "exit 7").returncode == 7
        refused = testbed("cut", "host1")
        assert (refused.returncode, "cannot be cut off" in refused.stderr) == (1, True)
        daemon = int(as_user(*ssh, "host1", "setsid sleep 1000 >/dev/null 2>&1 & echo $!").stdout)
        with held([daemon, *(host["pid"] for host in info["hosts"])]) as processes:
            assert not ended(processes, daemon, 0)
            assert testbed("down").returncode == 0
            assert all(ended(processes, pid, 0) for pid in processes.pids)
    finally:
        assert testbed("down").returncode == 0  # of nothing, it is no error
    assert not bed.exists()
    forced = testbed("up", "1", "--mode", "netns")
    assert (forced.returncode, forced.stderr.count("\n")) == (1, 1)


STALL_S = 0.3


def banner_argv(host: str) -> list[str]:
    code = f"import socket; print(socket.create_connection(({host!r}, 22), 5).recv(4).decode())"
    return [sys.executable, "-c", code]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Hosts]:
    """Two hosts."""
    with brought_up(tmp_path / "bed", 2) as bed:
        yield bed


def test_a_cut_host_is_silent_until_it_is_healed(pair: Hosts) -> None:
    address = (pair.hosts["host1"].address, 22)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as controller:
        controller.bind((pair.info["gateway"], 0))
        controller.settimeout(PATIENCE_S)
        code = f"import socket; socket.socket(2, 2).sendto(b'alive', {controller.getsockname()!r})"
        sends = ("host1", sys.executable, "-c", code)
        for _ in range(2):  # twice is as good as once
            pair.call("cut", "host1")
            assert pair.status()["cut"] == "both"
        with pytest.raises(TimeoutError):
            socket.create_connection(address, STALL_S)
        assert "not permitted" in pair.inside(*sends).stderr
        assert pair.inside("host2", *banner_argv("host2")).stdout == "SSH-\n"
        assert pair.inside("host1", *banner_argv("host1")).stdout == "SSH-\n", "loopback must go on"
        pair.call("cut", "host1", "--one-way")
        assert pair.status()["cut"] == "in"
        assert pair.inside(*sends).returncode == 0
        assert controller.recv(16) == b"alive"
        with pytest.raises(TimeoutError):
            socket.create_connection(address, STALL_S)
    for _ in range(2):
        pair.call("heal", "host1")
        assert pair.status()["cut"] is None
    assert pair.ssh("host1", "hostname").stdout == "host1\n"
