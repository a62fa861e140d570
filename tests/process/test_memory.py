"""What a process keeps of the memory that it frees."""

import platform
import subprocess
import sys

import pytest

from tests.harness import ROOT

READS = """
import resource, sys
from distlaunch.agent.poller import keep_memory
if sys.argv[1] == "kept":
    keep_memory()
zeros = open("/dev/zero", "rb", buffering=0)
for _ in range(40):
    waiting = [zeros.read(128 << 10) for _ in range(8)]
    waiting.clear()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


def faults(how: str) -> int:
    argv = [sys.executable, "-c", READS, how]
    return int(subprocess.run(argv, capture_output=True, cwd=ROOT, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another libc's malloc")
def test_blocks_that_are_soon_gone_are_not_given_back() -> None:
    """40 times 8 of 32 pages, which are touched once, or nearly each time."""
    assert faults("kept") + 20 * 8 * 32 < faults("given back")


def test_a_limit_on_address_space_is_no_failure() -> None:
    limited = "import resource; resource.setrlimit(resource.RLIMIT_AS, (1, 1))\n"
    text = f"from distlaunch.agent.poller import keep_memory\n{limited}keep_memory()\nprint('on')"
    argv = [sys.executable, "-c", text]
    assert subprocess.run(argv, capture_output=True, cwd=ROOT, check=True).stdout == b"on\n"
