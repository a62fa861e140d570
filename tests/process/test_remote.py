"""Commands for another machine, with a shell as a stand-in for ssh."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from distlaunch.cli.remote import Request, run_there
from distlaunch.errors import DistlaunchError
from distlaunch.transports.ssh import Ssh
from tests.harness import distlaunch


@pytest.fixture(autouse=True)
def shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def argv_for(self: Ssh, command: str, terminal: bool = False) -> Sequence[str]:
        return ["/bin/sh", "-c", command]

    monkeypatch.setattr(Ssh, "argv_for", argv_for)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")


def test_names_a_directory_that_the_host_lacks(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_there(Ssh("gpu-a"), Request(("--version",), "/nowhere/at/all")) == 2
    assert capfd.readouterr().err == (
        "distlaunch: /nowhere/at/all on gpu-a: No such file or directory; "
        "--on needs the job file's directory at the same path there\n"
    )


def test_reports_a_host_without_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(DistlaunchError, match=r"gpu-a: found no Python 3\.10 or later \(tried python3 and"):
        run_there(Ssh("gpu-a"), Request(("--version",)))


def test_refuses_to_send_a_job_from_a_pipe() -> None:
    done = distlaunch("run", "--on", "gpu-a", "-", input="command: ['true']\n")
    assert done.returncode == 2
    assert (
        "--on can't take the job from a pipe or the command line; save it to a file (--save)" in done.stderr
    )
