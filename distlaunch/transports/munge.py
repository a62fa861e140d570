"""MUNGE credentials, by which a cluster's processes prove whose they are: see munge(1) and unmunge(1)."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping

_LIMIT_S = 5.0


def works(environ: Mapping[str, str]) -> bool:
    """Whether credentials can be made and read here: its programs are there, and its daemon answers."""
    path = environ.get("PATH")
    if not (shutil.which("munge", path=path) and shutil.which("unmunge", path=path)):
        return False
    try:
        return not wrong(credential("works"), "works")
    except OSError:
        return False


def credential(payload: str) -> str:
    """A credential of this process's user. Raises OSError."""
    status, text = _run(["munge", "--string", payload], "")
    if status:
        raise OSError(f"munge: {text.strip() or f'exit status {status}'}")
    return text.strip()


def wrong(text: str, payload: str) -> str:
    """Why a credential is not one of our own user's for that payload; "" if it is. Each can be read once."""
    try:
        status, said = _run(["unmunge"], text)
    except OSError as error:
        return f"its MUNGE credential can't be read here: {error}"
    found = re.search(r"^UID: .*\((\d+)\)$", said, re.MULTILINE)
    if status or not found:
        return "it has no valid MUNGE credential"
    if int(found[1]) != os.geteuid():
        return f"it belongs to another user (uid {found[1]})"
    meant = said.rstrip("\n").endswith("\n\n" + payload)
    return "" if meant else "its MUNGE credential is for something else"


def _run(argv: list[str], text: str) -> tuple[int, str]:
    try:
        done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise OSError("no answer from munged") from None
    return done.returncode, done.stdout if argv[0] == "unmunge" or not done.returncode else done.stderr
