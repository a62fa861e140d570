"""The hosts that tests share, and a check after every test that nothing is left of it."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.containers import Podman, podman_alone, why_no_podman
from tests.cluster.hosts import Bed, Site, bed_of, why_not
from tests.cluster.slurm import NODES, Slurm, inside, slurm_of
from tests.cluster.slurm import why_not as why_no_slurm
from tests.harness import PATIENCE_S, children_of
from tests.replays import check_replays

pytest_plugins = ["tests.beside", "tests.tries"]


def pytest_configure() -> None:
    """Ctrl-C and SIGTERM end the tests in order: what they have set up is taken down.

    A shell starts what it puts in the background with SIGINT ignored, as nohup does with SIGHUP, and all its
    children inherit that; a handler, however, is not inherited.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)


@pytest.fixture(scope="session", autouse=True)
def list_of_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The user's own list of runs has none of ours, nor has the cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def _descriptors() -> set[str]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that reads the directory
            found.add(f"{entry.name} → {os.readlink(entry)}")
    return found


def _threads() -> set[threading.Thread]:
    """Those that `threading` has started. It lists xdist's, of `_thread`, once they use it."""
    return {each for each in threading.enumerate() if not isinstance(each, threading._DummyThread)}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No child, thread or descriptor outlives a test."""
    children, threads, descriptors = set(children_of(os.getpid())), _threads(), _descriptors()
    yield
    assert set(children_of(os.getpid())) <= children, "a child process is left"
    for each in _threads() - threads:
        each.join(PATIENCE_S)  # a slow disk can still keep one that closes files
    running = _threads() - threads
    assert not running, f"a thread is left: {running}"
    left = {entry for entry in _descriptors() - descriptors if "/proc/" not in entry}
    assert not left, "a descriptor is left"


@pytest.fixture(autouse=True)
def runs_replay(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every run that a test makes can be lived again from its events, to the end that its summary tells."""
    directory = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    yield
    if directory:
        check_replays(directory)


@pytest.fixture(scope="session")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """Four hosts, host1 … host4."""
    if reason := why_not():
        pytest.skip(reason)
    with bed_of(4, tmp_path_factory.mktemp("hosts") / "bed") as bed:
        yield bed


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A Slurm with the nodes host1 … host3."""
    if reason := why_no_slurm():
        pytest.skip(reason)
    with slurm_of(NODES, tmp_path_factory.mktemp("slurm") / "bed") as slurm:
        yield slurm


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    """podman with a store of its own."""
    if reason := why_no_podman():
        pytest.skip(reason)
    with podman_alone() as podman:
        yield podman


@pytest.fixture
def allocation(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The id of an allocation of all nodes, inside of which the test is."""
    with inside(slurm, monkeypatch, "--no-kill") as job:
        yield job


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A fifo in the workers' directory; who reads it waits for `open_gate`."""
    os.mkfifo(tmp_path / "gate")
    return tmp_path / "gate"


@pytest.fixture
def site(bed: Bed, tmp_path: Path) -> Iterator[Site]:
    """A place to start jobs from, that ends with all that it started."""
    with contextlib.ExitStack() as stack:
        yield Site(bed, tmp_path, stack)
