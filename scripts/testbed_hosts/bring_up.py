"""Creates a testbed: claim, files, keepers, links and sshds. `down` can undo this at any point."""

import contextlib
import os
import pwd
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from . import (
    grid_engine,
    grid_engine_files,
    loopback,
    namespaces,
    slurm,
    slurm_accounting,
    slurm_files,
    ssh_files,
)
from .boot import booting
from .processes import identify
from .state import Mode, Schedulers, Testbed, claim, load, refuse_unfinished, save, with_keepers
from .take_down import population, take_down
from .tools import TestbedError, tool

# sshd doesn't start as root without it, and packages create it only when their own service starts.
_PRIVILEGE_SEPARATION = Path("/run/sshd")


def choose_mode(wanted: Mode | None) -> tuple[Mode, str | None]:
    """Return the mode to use, and if it isn't the best one, the reason.

    Raises TestbedError if `wanted` is impossible.
    """
    if wanted == "loopback":
        return "loopback", None
    reason = namespaces.why_not()
    if reason and wanted:
        raise TestbedError(f"{reason}: use --mode loopback")
    return ("loopback" if reason else "netns"), reason


def bring_up(count: int, directory: Path, mode: Mode, schedulers: Schedulers) -> Testbed:
    """Create a testbed, and return it once every sshd responds. After a failure, nothing is left behind."""
    ssh_files.refuse_unquotable(directory)
    for name in ("sshd", "ssh-keygen", "setpriv"):
        tool(name)
    _refuse_live(directory)
    with _planned(count, directory, mode) as planned:
        testbed = replace(planned, schedulers=schedulers)
        claim(testbed)
        try:
            finished = replace(_boot(testbed), maker=None)
            save(finished)
            return finished
        except BaseException as failure:
            _undo(load(directory) or testbed, failure)
            raise


def _undo(testbed: Testbed, failure: BaseException) -> None:
    try:
        take_down(testbed)
    except TestbedError as second:
        first = failure if isinstance(failure, Exception) else "stopped"
        raise TestbedError(f"{first}; then, taking it down: {second}") from failure


def _refuse_live(directory: Path) -> None:
    left = load(directory)
    if left is None:
        return
    refuse_unfinished(left)
    if any(population(left).values()):
        raise TestbedError(f"{directory} holds a living testbed: run `down --dir {directory}` first")
    take_down(left)


@contextlib.contextmanager
def _planned(count: int, directory: Path, mode: Mode) -> Iterator[Testbed]:
    tag, maker = os.urandom(3).hex(), identify(os.getpid())
    if mode == "loopback":
        with loopback.held_hosts(count) as hosts:
            yield Testbed(directory, mode, tag, maker, hosts)
        return
    with namespaces.claimed_subnet(tag) as subnet:
        hosts = namespaces.plan_hosts(count, tag, subnet)
        yield Testbed(directory, mode, tag, maker, hosts, gateway=str(subnet[namespaces.GATEWAY]))


def _boot(testbed: Testbed) -> Testbed:
    directories = [testbed.directory(host) for host in testbed.hosts]
    _write_files(testbed)
    prefix = namespaces.unshare_argv() if testbed.mode == "netns" else []
    with booting(testbed.hosts, directories, prefix) as boots:
        testbed = with_keepers(testbed, [boot.ready() for boot in boots])
        # Before the keepers are released, because a keeper that isn't recorded exits with this process.
        save(testbed)
        if testbed.mode == "netns":
            namespaces.make_links(testbed)
        for host, boot in zip(testbed.hosts, boots, strict=True):
            setup = namespaces.setup_argvs(testbed, host) if testbed.mode == "netns" else []
            boot.order(setup, ssh_files.sshd_argv(testbed, host))
        for boot in boots:
            boot.up()
    if testbed.schedulers.slurm_nodes:
        slurm.start(testbed)
    if testbed.schedulers.grid_engine:
        grid_engine.start(testbed)
    return testbed


def _write_files(testbed: Testbed) -> None:
    user = pwd.getpwuid(os.geteuid()).pw_name
    ssh_files.write(testbed, user)
    if os.geteuid() == 0:
        _PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
    if testbed.mode == "netns":
        if testbed.schedulers.slurm_nodes:
            slurm_files.write(testbed)
        if testbed.schedulers.slurm_accounts:
            slurm_accounting.write(testbed)
        if testbed.schedulers.grid_engine:
            grid_engine_files.write(testbed)
        (testbed.dir / "hosts").write_text(namespaces.hosts_file(testbed))
        if namespaces.RC_FILE.exists():
            (testbed.dir / namespaces.RC_FILE.name).touch()
        if shadow := namespaces.unlocked_shadow(user):
            (testbed.dir / "shadow").write_text(shadow)
