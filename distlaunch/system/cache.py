"""The user's cache: files that only make a start faster. Any may be missing, or be of something else."""

import os
import zlib

from distlaunch.packed import replace

FILES = 256
"""Of each kind, at most: of two keys with the same number only the last is kept."""


def file_for(kind: str, key: str) -> str:
    """The path of what is kept of a kind under that key."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    number = zlib.crc32(key.encode(errors="replace")) % FILES
    return os.path.join(folder, "distlaunch", kind, str(number))


def keep(file: str, data: bytes) -> None:
    """Keep this, if it can be."""
    try:
        os.makedirs(os.path.dirname(file), 0o700, exist_ok=True)
    except OSError:
        return
    replace(file, data)
