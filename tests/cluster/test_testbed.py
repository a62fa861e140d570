"""The testbed itself: real hosts, real sshds, and nothing left of them afterwards."""

import contextlib
import json
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

TESTBED = Path(__file__).parents[2] / "scripts" / "testbed"
BY_PYTHON: list[str | Path] = [sys.executable, TESTBED]
"""Its own first line takes the python3 on PATH, which may be a script that looks for one for longer."""
LIMIT_S = EVENT_LIMIT_S = 150.0
"""Only a hang gets there."""
STALL_S = 0.3
SBIN = f"{os.environ['PATH']}:/usr/local/sbin:/usr/sbin:/sbin"


def why_not_netns() -> str | None:
    if os.geteuid():
        return "root is missing: only root can make network namespaces"
    for name in ("ip", "iptables", "nsenter", "unshare"):
        if shutil.which(name, path=SBIN) is None:
            return f"{name} is missing"
    tried = subprocess.run(["unshare", "--net", "true"], check=False)
    return "network namespaces are missing" if tried.returncode else None


NO_SSH = [name for name in ("sshd", "ssh", "ssh-keygen", "setpriv") if shutil.which(name, path=SBIN) is None]
NO_NETNS = why_not_netns()

pytestmark = pytest.mark.skipif(bool(NO_SSH), reason=f"{NO_SSH} missing")
needs_netns = pytest.mark.skipif(NO_NETNS is not None, reason=str(NO_NETNS))


def call_testbed(
    *args: str | Path, prefix: Sequence[str | Path] = (), path: str | None = None
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*prefix, *BY_PYTHON, *args],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env=os.environ | ({"PATH": path} if path else {}),
    )


@dataclass(frozen=True)
class Bed:
    """A testbed that is up, as `--json` describes it."""

    dir: Path
    info: dict[str, Any]

    def call(self, command: str, *args: str) -> "subprocess.CompletedProcess[str]":
        return call_testbed(command, "--dir", self.dir, *args)

    def inside(self, host: str, *argv: str) -> "subprocess.CompletedProcess[str]":
        return call_testbed("exec", host, "--dir", self.dir, "--", *argv)

    def ssh(self, host: str, *argv: str) -> "subprocess.CompletedProcess[str]":
        command = ["ssh", "-F", self.info["ssh_config"], host, shlex.join(argv)]
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)

    def host(self, name: str) -> dict[str, Any]:
        status = json.loads(self.call("status", "--json").stdout)
        found: dict[str, Any] = next(host for host in status["hosts"] if host["name"] == name)
        return found


@pytest.fixture
def bring_up(tmp_path: Path) -> Iterator[Callable[..., Bed]]:
    folders: list[Path] = []

    def up(count: int, *options: str) -> Bed:
        folder = tmp_path / f"bed{len(folders)}"
        folders.append(folder)
        made = call_testbed("up", str(count), "--dir", folder, "--json", *options)
        assert made.returncode == 0, made.stderr
        return Bed(folder, json.loads(made.stdout))

    yield up
    for folder in folders:
        taken = call_testbed("down", "--dir", folder)
        assert taken.returncode == 0, taken.stderr
        assert not folder.exists()


def namespaces_of(pid: int | str) -> dict[Path, int]:
    paths = [Path(f"/proc/{pid}/ns/{kind}") for kind in ("net", "uts", "mnt")]
    return {path: path.stat().st_ino for path in paths}


def cgroups() -> set[str]:
    return {entry.name for entry in Path("/sys/fs/cgroup").iterdir()}


def interfaces() -> set[str]:
    shown = subprocess.run(["ip", "-j", "link"], capture_output=True, check=True)
    return {link["ifname"] for link in json.loads(shown.stdout)}


@dataclass(frozen=True)
class Footprint:
    """All that a testbed has on this machine, noted while it is up, to look for it afterwards."""

    dir: Path
    interfaces: frozenset[str]
    namespaces: frozenset[int]

    def left(self) -> dict[str, list[Any]]:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        rules = subprocess.run(["iptables", "-S"], capture_output=True, text=True, check=True).stdout
        return {
            "folder": [self.dir] if self.dir.exists() else [],
            "interfaces": sorted(self.interfaces & interfaces()),
            "processes": [pid for pid in self._pids() if self._is_inside(pid)],
            "mounts": [line for line in mounts if str(self.dir) in line],
            "rules": [line for line in rules.splitlines() if any(name in line for name in self.interfaces)],
        }

    def _pids(self) -> list[int]:
        return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]

    def _is_inside(self, pid: int) -> bool:
        try:
            return not self.namespaces.isdisjoint(namespaces_of(pid).values())
        except OSError:
            return False


@contextlib.contextmanager
def noted(info: dict[str, Any]) -> Iterator[Footprint]:
    """Yield the footprint of a testbed.

    The namespaces are held open meanwhile, for the kernel gives a dead one's number to the next, which
    may be another test's. A namespace in which no process is, and that is mounted nowhere, is only ours.
    """
    names = {info["bridge"], *(host["interface"] for host in info["hosts"])} - {None}
    pids = [host["pid"] for host in info["hosts"] if host["pid"]]
    inodes = {path: inode for pid in pids for path, inode in namespaces_of(pid).items()}
    with contextlib.ExitStack() as stack:
        for path in inodes:
            stack.enter_context(path.open())
        yield Footprint(Path(info["dir"]), frozenset(names), frozenset(inodes.values()))


NOTHING: dict[str, list[Any]] = {"folder": [], "interfaces": [], "processes": [], "mounts": [], "rules": []}


@contextlib.contextmanager
def watched(pid: int) -> Iterator[Callable[[float], bool]]:
    """Yield a function that tells whether exactly this process ends within so many seconds."""
    fd = os.pidfd_open(pid)
    try:
        yield lambda limit_s: bool(select.select([fd], [], [], limit_s)[0])
    finally:
        os.close(fd)


def banner_argv(host: str, port: int = 22) -> list[str]:
    code = f"import socket; print(socket.create_connection(({host!r}, {port}), 5).recv(4).decode())"
    return [sys.executable, "-c", code]


def bound_over(target: str, source: Path) -> list[str]:
    """Return a prefix that runs a command where `source` takes the place of a system file, only for it."""
    return ["unshare", "--mount", "sh", "-c", f'mount --bind "$0" {target} && exec "$@"', str(source)]


@needs_netns
def test_each_host_has_its_own_hostname_and_address_over_ssh(bring_up: Callable[..., Bed]) -> None:
    bed = bring_up(2)
    assert [host["name"] for host in bed.info["hosts"]] == ["host1", "host2"]
    for host in bed.info["hosts"]:
        assert bed.ssh(host["name"], "hostname").stdout == f"{host['name']}\n"
        assert host["address"] in bed.ssh(host["name"], "ip", "-4", "address", "show", "eth0").stdout
        assert bed.ssh(host["address"], "hostname").stdout == f"{host['name']}\n"


@needs_netns
def test_hosts_reach_each_other_by_name(bring_up: Callable[..., Bed]) -> None:
    bed = bring_up(2)
    assert bed.ssh("host1", *banner_argv("host2")).stdout == "SSH-\n"
    own = bed.ssh("host1", "getent", "hosts", "host1").stdout.split()
    assert own == [bed.info["hosts"][0]["address"], "host1"]
    assert bed.ssh("host1", "getent", "hosts", "controller").stdout.split()[0] == bed.info["gateway"]


@needs_netns
def test_hosts_reach_each_other_where_the_firewall_forwards_nothing(tmp_path: Path) -> None:
    # The machine is a namespace here, so that its firewall is ours to set, as Docker does.
    at = shlex.join(["--dir", str(tmp_path / "bed")])
    script = f"""
        ip link set lo up && iptables -P FORWARD DROP && {TESTBED} up 2 {at} >&2
        {TESTBED} exec host1 {at} -- {shlex.join(banner_argv("host2"))}
        {TESTBED} down {at} >&2
        iptables -S FORWARD
    """
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", script], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.stdout == "SSH-\n-P FORWARD DROP\n", done.stderr


@needs_netns
def test_a_host_sees_the_cgroups(bring_up: Callable[..., Bed]) -> None:
    bed = bring_up(1)
    before = cgroups()
    seen = set(bed.ssh("host1", "ls", "/sys/fs/cgroup").stdout.split())
    lasting = before & cgroups()  # other tests make some, and remove them
    assert lasting and lasting <= seen


@needs_netns
def test_a_changed_host_key_is_refused(bring_up: Callable[..., Bed]) -> None:
    bed = bring_up(1)
    other_key = (bed.dir / "id_ed25519.pub").read_text()
    (bed.dir / "known_hosts").write_text(f"host1,{bed.info['hosts'][0]['address']} {other_key}")
    refused = bed.ssh("host1", "true")
    assert refused.returncode == 255
    assert "Host key verification failed" in refused.stderr


@needs_netns
def test_a_locked_root_account_can_log_in(tmp_path: Path) -> None:
    folder, shadow = tmp_path / "bed", tmp_path / "shadow"
    shadow.write_text("root:!secret:19000:0:99999:7:::\nother:$6$hash:19000:0:99999:7:::\n")
    locked = bound_over("/etc/shadow", shadow)
    made = call_testbed("up", "1", "--dir", folder, "--json", prefix=locked)
    assert made.returncode == 0, made.stderr
    try:
        bed = Bed(folder, json.loads(made.stdout))
        assert bed.ssh("host1", "hostname").stdout == "host1\n"
        assert bed.inside("host1", "cat", "/etc/shadow").stdout.split() == [
            "root:*:19000:0:99999:7:::",
            "other:*:19000:0:99999:7:::",
        ]
    finally:
        assert call_testbed("down", "--dir", folder).returncode == 0


@needs_netns
def test_two_testbeds_live_side_by_side(bring_up: Callable[..., Bed]) -> None:
    first, second = bring_up(1), bring_up(1)
    assert first.info["gateway"] != second.info["gateway"]
    assert first.call("down").returncode == 0
    assert second.ssh("host1", "hostname").stdout == "host1\n"


@needs_netns
def test_testbeds_brought_up_at_once_get_different_networks(tmp_path: Path) -> None:
    folders = [tmp_path / f"bed{n}" for n in range(3)]
    ups = [
        subprocess.Popen([*BY_PYTHON, "up", "1", "--dir", folder, "--json"], stdout=subprocess.PIPE)
        for folder in folders
    ]
    try:
        described = [json.loads(up.communicate(timeout=LIMIT_S)[0]) for up in ups]
        assert len({info["gateway"] for info in described}) == len(folders)
    finally:
        assert [call_testbed("down", "--dir", folder).returncode for folder in folders] == [0, 0, 0]


@needs_netns
def test_exec_runs_inside_and_passes_the_exit_status_on(bring_up: Callable[..., Bed]) -> None:
    bed = bring_up(1)
    assert bed.inside("host1", "sh", "-c", "hostname; exit 7").returncode == 7
    assert bed.inside("host1", "hostname").stdout == "host1\n"
    assert bed.inside("host1", "pwd").stdout == f"{Path.cwd()}\n"
    assert bed.inside("host1", "printf", "%s|", "a b", "--dir", "$HOME").stdout == "a b|--dir|$HOME|"
    unknown = bed.inside("host9", "true")
    assert (unknown.returncode, unknown.stderr.count("\n")) == (1, 1)
    assert "no host 'host9'" in unknown.stderr


@needs_netns
def test_a_cut_host_is_silent_until_it_is_healed(bring_up: Callable[..., Bed]) -> None:
    bed = bring_up(2)
    address = (bed.info["hosts"][0]["address"], 22)
    assert bed.call("cut", "host1").returncode == 0
    assert bed.host("host1")["cut"] == "both"
    with pytest.raises(TimeoutError):
        socket.create_connection(address, STALL_S)
    assert bed.inside("host2", *banner_argv("host2")).stdout == "SSH-\n"
    assert bed.inside("host1", *banner_argv("host1")).stdout == "SSH-\n", "loopback must go on"
    assert bed.call("cut", "host1").returncode == 0, "twice is as good as once"
    assert bed.call("heal", "host1").returncode == 0
    assert bed.host("host1")["cut"] is None
    assert bed.ssh("host1", "hostname").stdout == "host1\n"
    assert bed.call("heal", "host1").returncode == 0


@needs_netns
def test_a_one_way_cut_lets_the_host_send(bring_up: Callable[..., Bed]) -> None:
    bed = bring_up(1)
    host = bed.info["hosts"][0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as controller:
        controller.bind((bed.info["gateway"], 0))
        controller.settimeout(EVENT_LIMIT_S)
        code = f"import socket; socket.socket(2, 2).sendto(b'alive', {controller.getsockname()!r})"
        bed.call("cut", "host1")
        assert "not permitted" in bed.inside("host1", sys.executable, "-c", code).stderr
        bed.call("cut", "host1", "--one-way")
        assert bed.host("host1")["cut"] == "in"
        assert bed.inside("host1", sys.executable, "-c", code).returncode == 0
        assert controller.recv(16) == b"alive"
        with pytest.raises(TimeoutError):
            socket.create_connection((host["address"], host["port"]), STALL_S)


@needs_netns
def test_down_leaves_nothing(bring_up: Callable[..., Bed]) -> None:
    bed = bring_up(2)
    with noted(bed.info) as footprint:
        before = footprint.left()
        assert before["folder"] and len(before["interfaces"]) == 3 and len(before["processes"]) >= 4
        taken = bed.call("down")
        assert taken.returncode == 0, taken.stderr
        assert footprint.left() == NOTHING
    assert bed.call("down").returncode == 0, "down of nothing is no error"


@needs_netns
def test_down_kills_what_left_its_session(bring_up: Callable[..., Bed]) -> None:
    bed = bring_up(1)
    started = bed.ssh("host1", "sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!")
    unshared = bed.ssh("host1", "sh", "-c", "setsid unshare --net sleep 1000 >/dev/null 2>&1 & echo $!")
    with watched(int(started.stdout)) as ends, watched(int(unshared.stdout)) as other_ends:
        assert not ends(0) and not other_ends(0)
        assert bed.call("down").returncode == 0
        assert ends(0) and other_ends(0)


@needs_netns
def test_down_after_the_sshd_was_killed(bring_up: Callable[..., Bed]) -> None:
    bed = bring_up(1)
    sshd = int((bed.dir / "host1" / "sshd.pid").read_text())
    with noted(bed.info) as footprint, watched(sshd) as ends:
        os.kill(sshd, signal.SIGKILL)
        assert ends(EVENT_LIMIT_S)
        assert (bed.host("host1")["sshd"], bed.host("host1")["alive"]) == (False, True)
        assert bed.inside("host1", "hostname").stdout == "host1\n", "the host outlives its sshd"
        assert bed.call("down").returncode == 0
        assert footprint.left() == NOTHING


@needs_netns
def test_down_after_a_keeper_was_killed(bring_up: Callable[..., Bed]) -> None:
    bed = bring_up(1)
    started = bed.ssh("host1", "sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!")
    keeper, sshd = bed.info["hosts"][0]["pid"], int((bed.dir / "host1" / "sshd.pid").read_text())
    with contextlib.ExitStack() as stack:
        footprint = stack.enter_context(noted(bed.info))
        ended = [stack.enter_context(watched(pid)) for pid in (keeper, sshd, int(started.stdout))]
        os.kill(keeper, signal.SIGKILL)
        assert ended[0](EVENT_LIMIT_S) and ended[1](EVENT_LIMIT_S)
        assert not bed.host("host1")["alive"]
        refused = bed.inside("host1", "true")
        assert (refused.returncode, "is dead" in refused.stderr) == (1, True)
        assert not ended[2](0)
        assert bed.call("down").returncode == 0
        assert ended[2](0)
        assert footprint.left() == NOTHING


@needs_netns
def test_down_spares_a_stranger_whose_namespace_got_the_same_number(bring_up: Callable[..., Bed]) -> None:
    bed = bring_up(1)
    keeper = bed.info["hosts"][0]["pid"]
    with watched(keeper) as ends:
        os.kill(keeper, signal.SIGKILL)
        assert ends(EVENT_LIMIT_S)
    stranger = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo; exec sleep 1000"], stdout=subprocess.PIPE
    )
    try:
        assert stranger.stdout is not None and stranger.stdout.readline()
        state = bed.dir / "state.json"
        data = json.loads(state.read_text())
        data["hosts"][0]["netns"] = Path(f"/proc/{stranger.pid}/ns/net").stat().st_ino
        state.write_text(json.dumps(data))
        assert bed.call("down").returncode == 0
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.communicate(timeout=EVENT_LIMIT_S)


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[Callable[[], str]]:
    """Yield a function that returns the next line somebody writes into tmp_path/fifo."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    with path.open("r+b", buffering=0) as pipe:

        def line() -> str:
            assert select.select([pipe], [], [], EVENT_LIMIT_S)[0], "nobody has written into the fifo"
            return os.read(pipe.fileno(), 4096).decode().splitlines()[0]

        yield line


def wrapped(tmp_path: Path, name: str, when: str, then: str) -> str:
    """Return a PATH on which a program, once, where its arguments match `when`, does `then` instead."""
    folder = tmp_path / "wrapped"
    folder.mkdir()
    real = shutil.which(name, path=SBIN)
    program = folder / name
    program.write_text(f"""#!/bin/sh
        case "$*" in {when}) if mkdir {folder}/once 2>/dev/null; then {then}; fi;; esac
        exec {real} "$@"
    """)
    program.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


# A program that `up` runs, the arguments it is run with, and what it still does before it hangs.
STAGES = {
    "keys": ("ssh-keygen", "*/id_ed25519", ":"),
    "no links yet": ("ip", "*-batch*", ":"),
    "links": ("ip", "*-batch*", f'{shutil.which("ip", path=SBIN)} "$@"'),
    "address inside": ("ip", "address?add*", ":"),
    "sshd": ("sshd", "-D*", ":"),
}


@needs_netns
@pytest.mark.parametrize(
    ("stage", "by"),
    [*((stage, signal.SIGKILL) for stage in STAGES), ("sshd", signal.SIGTERM), ("links", signal.SIGINT)],
)
def test_up_can_be_killed_anywhere(
    stage: str, by: signal.Signals, tmp_path: Path, fifo: Callable[[], str]
) -> None:
    name, when, work = STAGES[stage]
    folder = tmp_path / "bed"
    path = wrapped(tmp_path, name, when, f"{work}; echo $$ > {tmp_path / 'fifo'}; exec sleep 1000")
    up = subprocess.Popen([*BY_PYTHON, "up", "2", "--dir", folder], env=os.environ | {"PATH": path})
    stuck = int(fifo())
    try:
        with noted(_half_made(folder)) as footprint:
            assert bool(footprint.left()["processes"]) == (stage != "keys"), "keepers are written down"
            busy = call_testbed("down", "--dir", folder)
            assert (busy.returncode, "still at work" in busy.stderr) == (1, True)
            up.send_signal(by)
            up.wait(LIMIT_S)
            if by == signal.SIGKILL:
                assert call_testbed("down", "--dir", folder).returncode == 0
            else:
                assert up.returncode == 128 + by
            assert footprint.left() == NOTHING
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(stuck, signal.SIGKILL)
        up.kill()
        up.wait(LIMIT_S)
        call_testbed("down", "--dir", folder)


@needs_netns
def test_keepers_leave_if_up_dies_before_it_has_written_them_down(
    tmp_path: Path, fifo: Callable[[], str]
) -> None:
    folder = tmp_path / "bed"
    path = wrapped(tmp_path, "unshare", "*host2", f"echo $$ > {tmp_path / 'fifo'}; exec sleep 1000")
    up = subprocess.Popen([*BY_PYTHON, "up", "2", "--dir", folder], env=os.environ | {"PATH": path})
    stuck = fifo()
    children = Path(f"/proc/{up.pid}/task/{up.pid}/children").read_text().split()
    try:
        (keeper,) = set(children) - {stuck}
        with watched(int(keeper)) as ends:
            up.kill()
            assert ends(EVENT_LIMIT_S)
    finally:
        up.kill()
        up.wait(LIMIT_S)
        os.kill(int(stuck), signal.SIGKILL)
        assert call_testbed("down", "--dir", folder).returncode == 0


def _half_made(folder: Path) -> dict[str, Any]:
    """Describe a testbed whose `up` is still at work, which `status` refuses to."""
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    hosts = [host | {"pid": host["keeper"] and host["keeper"]["pid"]} for host in state["hosts"]]
    return state | {"hosts": hosts, "bridge": f"tb{state['tag']}"}


@needs_netns
def test_an_sshd_that_does_not_start_fails_up_and_leaves_nothing(
    tmp_path: Path, fifo: Callable[[], str]
) -> None:
    folder, go = tmp_path / "bed", tmp_path / "go"
    os.mkfifo(go)
    then = f"echo here > {tmp_path / 'fifo'}; read -r _ < {go}; echo it is broken >&2; exit 255"
    up = subprocess.Popen(
        [*BY_PYTHON, "up", "1", "--dir", folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PATH": wrapped(tmp_path, "sshd", "-D*", then)},
    )
    assert fifo() == "here"
    with noted(_half_made(folder)) as footprint:
        go.write_text("on\n")
        output, errors = up.communicate(timeout=LIMIT_S)
        assert (up.returncode, output) == (1, "")
        assert errors == "testbed: sshd of host1 does not answer: it is broken\n"
        assert footprint.left() == NOTHING


@needs_netns
def test_up_refuses_a_folder_that_holds_a_living_testbed(bring_up: Callable[..., Bed]) -> None:
    bed = bring_up(1)
    again = call_testbed("up", "1", "--dir", bed.dir)
    assert (again.returncode, again.stderr.count("\n")) == (1, 1)
    assert "living testbed" in again.stderr
    assert bed.ssh("host1", "hostname").stdout == "host1\n"


@needs_netns
def test_up_replaces_a_testbed_that_died(bring_up: Callable[..., Bed]) -> None:
    bed = bring_up(1)
    keeper, sshd = bed.info["hosts"][0]["pid"], int((bed.dir / "host1" / "sshd.pid").read_text())
    with watched(keeper) as ends, watched(sshd) as sshd_ends:
        os.kill(keeper, signal.SIGKILL)
        assert ends(EVENT_LIMIT_S) and sshd_ends(EVENT_LIMIT_S)
    made = call_testbed("up", "1", "--dir", bed.dir, "--json")
    assert made.returncode == 0, made.stderr
    assert bed.ssh("host1", "hostname").stdout == "host1\n"
    assert json.loads(made.stdout)["bridge"] != bed.info["bridge"]
    assert bed.info["bridge"] not in interfaces()


@needs_netns
def test_a_missing_sshd_is_named_with_its_package(tmp_path: Path) -> None:
    hidden = tmp_path / "sshd"
    hidden.touch(mode=0o644)
    prefix = bound_over(str(shutil.which("sshd", path=SBIN)), hidden)
    failed = call_testbed("up", "1", "--dir", tmp_path / "bed", prefix=prefix)
    assert (failed.returncode, failed.stderr) == (1, "testbed: sshd not found: apt install openssh-server\n")
    assert not (tmp_path / "bed").exists()


def test_a_folder_of_somebody_elses_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    for command in (["up", "1"], ["down"], ["status"]):
        refused = call_testbed(*command, "--dir", tmp_path)
        assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize(
    "arguments", [[], ["up"], ["up", "0"], ["up", "many"], ["exec", "host1"], ["up", "1", "--", "x"], ["fly"]]
)
def test_misuse_ends_with_status_2(arguments: list[str], tmp_path: Path) -> None:
    refused = subprocess.run(
        [TESTBED, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert refused.returncode == 2
    assert "usage:" in refused.stderr and "Traceback" not in refused.stderr


def test_loopback_hosts_need_no_namespaces(bring_up: Callable[..., Bed]) -> None:
    bed = bring_up(2, "--mode", "loopback")
    assert (bed.info["mode"], bed.info["bridge"]) == ("loopback", None)
    assert len({(host["address"], host["port"]) for host in bed.info["hosts"]}) == 2
    for host in bed.info["hosts"]:
        connection = bed.ssh(host["name"], "sh", "-c", "echo $SSH_CONNECTION").stdout.split()
        assert connection[2:] == [host["address"], str(host["port"])]
    assert bed.inside("host1", "sh", "-c", "pwd; exit 7").stdout == f"{Path.cwd()}\n"
    assert bed.inside("host1", "sh", "-c", "exit 7").returncode == 7
    assert bed.host("host1")["sshd"]
    refused = bed.call("cut", "host1")
    assert (refused.returncode, "cannot be cut off" in refused.stderr) == (1, True)


def test_down_of_loopback_hosts_kills_what_left_its_session(bring_up: Callable[..., Bed]) -> None:
    bed = bring_up(1, "--mode", "loopback")
    started = bed.ssh("host1", "sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!")
    sshd, keeper = int((bed.dir / "host1" / "sshd.pid").read_text()), bed.info["hosts"][0]["pid"]
    with watched(int(started.stdout)) as ends, watched(sshd) as sshd_ends, watched(keeper) as keeper_ends:
        assert not ends(0)
        assert bed.call("down").returncode == 0
        assert ends(0) and sshd_ends(0) and keeper_ends(0)
    assert not bed.dir.exists()


TESTER = 54321


@pytest.fixture
def ordinary_user() -> Iterator[tuple[Path, list[str | Path]]]:
    """Yield a folder of an ordinary user's and a prefix that runs commands as that user."""
    if os.geteuid():
        folder = Path(tempfile.mkdtemp())
        yield folder, []
        shutil.rmtree(folder)
        return
    # Outside of pytest's folders, which only root may enter.
    folder = Path(tempfile.mkdtemp(prefix="testbed"))
    passwd = folder / "passwd"
    passwd.write_text(Path("/etc/passwd").read_text() + f"tester:x:{TESTER}:{TESTER}::{folder}:/bin/sh\n")
    passwd.chmod(0o644)
    os.chown(folder, TESTER, TESTER)
    become = ["setpriv", f"--reuid={TESTER}", f"--regid={TESTER}", "--clear-groups", "--"]
    yield folder, [*bound_over("/etc/passwd", passwd), *become, "env", f"HOME={folder}"]
    shutil.rmtree(folder)


def _python_for(prefix: Sequence[str | Path]) -> str:
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        code = "import sys; sys.exit(sys.version_info < (3, 11))"
        if subprocess.run([*prefix, python, "-c", code], capture_output=True, check=False).returncode == 0:
            return python
    pytest.skip("a python3 (3.11 or later) that an ordinary user may run is missing")


@pytest.mark.skipif(os.geteuid() == 0 and NO_NETNS is not None, reason=str(NO_NETNS))
def test_an_ordinary_user_gets_loopback_hosts(ordinary_user: tuple[Path, list[str | Path]]) -> None:
    folder, prefix = ordinary_user
    python = _python_for(prefix)
    # Without what other tests, which run it, compile meanwhile.
    compiled = shutil.ignore_patterns("__pycache__")
    shutil.copytree(TESTBED.parent / "testbed_hosts", folder / "testbed_hosts", ignore=compiled)
    script, bed = shutil.copy(TESTBED, folder), folder / "bed"

    def as_user(*argv: str | Path) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*prefix, *argv], cwd="/", capture_output=True, text=True, timeout=LIMIT_S, check=False
        )

    made = as_user(python, script, "up", "2", "--dir", bed, "--json")
    assert made.returncode == 0, made.stderr
    try:
        assert (
            made.stderr == "testbed: only root can make network namespaces; making loopback hosts instead\n"
        )
        info = json.loads(made.stdout)
        assert info["mode"] == "loopback"
        answers = [as_user("ssh", "-F", info["ssh_config"], host, "id -u") for host in ("host1", "host2")]
        assert [answer.stdout for answer in answers] == [as_user("id", "-u").stdout] * 2
    finally:
        assert as_user(python, script, "down", "--dir", bed).returncode == 0
    assert not bed.exists()
    forced = as_user(python, script, "up", "1", "--dir", bed, "--mode", "netns")
    assert (forced.returncode, forced.stderr.count("\n")) == (1, 1)
