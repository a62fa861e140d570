"""A command line that `ssh` runs on another host, in a shell's words."""

import os.path
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from distlaunch.job.hosts import host_error, split_user

UNNAMED = "HOST0"
"""Stands for a host that only a shell knows."""
_VALUED = "BbcDEeFIiJLlmOopPQRSWw"


class SshCall(NamedTuple):
    """ssh's host, its options that have a value, and the words of what it runs there."""

    host: str
    options: tuple[str, ...]
    words: tuple[str, ...]

    @property
    def hint(self) -> str:
        """What does the same for a job file."""
        told = "`distlaunch run` reaches the hosts in nodes over ssh itself"
        if not self.options:
            return told
        return f"{told}; put {shlex.join(self.options)} into your ssh_config (nodes takes user and port, too)"


class Remote(NamedTuple):
    """Where ssh runs a command: the host, and the folder as seen from its user's home."""

    host: str
    workdir: str


def ssh_call(words: Sequence[str]) -> SshCall | None:
    """The call of ssh in these words, if they have one with a host."""
    names = list(map(os.path.basename, words))
    if "ssh" not in names:
        return None
    before, rest = _options(words[names.index("ssh") + 1 :])
    after, command = _options(rest[1:])
    if not rest:
        return None
    host = UNNAMED if host_error(split_user(rest[0])[1]) else rest[0]
    return SshCall(host, (*before, *after), tuple(command))


def _options(words: Sequence[str]) -> tuple[list[str], Sequence[str]]:
    """The options with a value that stand first, and the words behind all options."""
    found: list[str] = []
    at = 0
    while at < len(words) and words[at].startswith("-"):
        letter = next((i for i, char in enumerate(words[at]) if i and char in _VALUED), None)
        whole = letter is None or letter < len(words[at]) - 1
        option = words[at : at + 1] if whole else words[at : at + 2]
        found += option if letter else []
        at += len(option)
    return found, words[at:]
