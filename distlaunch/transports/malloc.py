"""What glibc's malloc is told in ssh, whose buffers grow with each packet while their reader is late.

Else it gives their pages back and faults them in again: a third of ssh's CPU time while it carries output.
"""

from collections.abc import Mapping

_KEPT = 64 << 20
"""Bytes that stay with a process: ssh has no more than its window of 2 MiB, a few times over."""
_TOLD = {"MALLOC_MMAP_THRESHOLD_": str(_KEPT // 2), "MALLOC_TRIM_THRESHOLD_": str(_KEPT)}


def ssh_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for ssh; what the user has set for malloc counts."""
    return {**_TOLD, **environ}
