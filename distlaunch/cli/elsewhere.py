"""Commands that run on another machine, over ssh: this very program, taken along if it is not there yet."""

import base64
import contextlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from distlaunch.agent.frozen import Frozen
from distlaunch.errors import DistlaunchError, Exit
from distlaunch.system.payload import payload, payload_key
from distlaunch.transports.ssh import Ssh, SshOptions

HAVE, NEED = b"\0distlaunch: have\n", b"\0distlaunch: need\n"
NO_PYTHON = 95
"""Exit status of the first line there where Python is missing or too old."""
_FIND_PYTHON = (
    "for p in python3 python3.13 python3.12 python3.11 python3.10; do "
    'if "$p" -c "import sys; sys.exit(sys.version_info < (3, 10))" 2>/dev/null; then break; fi; p=; done; '
    f'[ -n "$p" ] || exit {NO_PYTHON}; '
)
_LOADER = """
import io, json, os, shutil, sys, tempfile, threading, time, zipfile
def line():
    data = b""
    while not data.endswith(b"\\n"):
        piece = os.read(0, 1)
        if not piece: os._exit(129)
        data += piece
    return data
asked = json.loads(line())
cache = os.environ.get("XDG_CACHE_HOME", "")
top = os.path.join(cache if os.path.isabs(cache) else os.path.expanduser("~/.cache"), "distlaunch")
home = os.path.join(top, asked["key"])
def tell(word):
    os.write(1, word.encode("latin-1"))
if os.path.isdir(home) and os.stat(home).st_uid == os.getuid():
    os.utime(home)
    tell(asked["have"])
else:
    tell(asked["need"])
    size, data = int(line()), b""
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece: os._exit(129)
        data += piece
    os.makedirs(top, 0o700, exist_ok=True)
    fresh = tempfile.mkdtemp(dir=top)
    zipfile.ZipFile(io.BytesIO(data)).extractall(fresh)
    try:
        os.rename(fresh, home)
    except OSError:
        shutil.rmtree(fresh)
    for other in os.scandir(top):  # of versions that nobody has used for a month
        if other.stat().st_mtime < time.time() - 30 * 86400:
            shutil.rmtree(other.path, ignore_errors=True)
os.environ.update(asked["env"])
if asked["folder"]:
    try:
        os.chdir(asked["folder"])
    except OSError as error:
        words = (asked["folder"], asked["host"], error.strerror)
        rest = "; --on needs the job file's folder at the same path there"
        sys.stderr.write("distlaunch: %s on %s: %s" % words + rest + "\\n")
        os._exit(2)
caller = os.dup(0)
with tempfile.TemporaryFile() as file:
    file.write(asked["stdin"].encode())
    file.flush()
    os.dup2(file.fileno(), 0)
os.lseek(0, 0, os.SEEK_SET)
def leave_with_the_caller():
    while os.read(caller, 4096): pass
    os._exit(129)
threading.Thread(target=leave_with_the_caller, daemon=True).start()
sys.path.insert(0, home)
sys.argv = ["distlaunch", *asked["words"]]
from distlaunch.__main__ import main
main()
"""


_THERE = """
import os, sys
cache = os.environ.get("XDG_CACHE_HOME", "")
top = os.path.join(cache if os.path.isabs(cache) else os.path.expanduser("~/.cache"), "distlaunch")
sys.path.insert(0, os.path.join(top, {key!r}))
sys.argv = {words!r}
from distlaunch.__main__ import main
main()
"""


class Request(Frozen):
    """A command line for another machine; `folder` "" is the user's home, `env` is added to what is there."""

    words: tuple[str, ...]
    folder: str = ""
    stdin: str = ""
    env: Mapping[str, str] = {}


def ssh_to(host: str, config: str | None) -> Ssh:
    """The way to a host, `user@host` included."""
    user, _, name = host.rpartition("@")
    return Ssh(name, user or None, options=SshOptions(config=config))


def run_there(ssh: Ssh, request: Request, show: Callable[[bytes], object] | None = None) -> int:
    """Run it; its exit status. What it prints goes to our streams, or its stdout to `show`.

    Raises `DistlaunchError`.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(_argv(ssh), stdin=pipe, stdout=pipe, bufsize=0) as process:
        try:
            output = _hand_over(process, ssh.host, request)
            _pump(process, output, show or _print)
        except BrokenPipeError:
            pass  # its end is told by its status
        except KeyboardInterrupt:
            process.kill()
            process.wait()
            raise
    return _status(ssh, process.returncode)


def show_there(ssh: Ssh, words: Sequence[str]) -> int:
    """Run a command there on our terminal; its exit status. Raises `DistlaunchError`."""
    if status := run_there(ssh, Request(("--version",)), lambda output: None):
        return status
    code = _THERE.format(key=payload_key(), words=["distlaunch", *words])
    encoded = base64.b64encode(code.encode()).decode()  # no shell has a meaning for any of it
    run = f'exec "$p" -I -c "import base64,sys;exec(base64.b64decode(sys.argv.pop()))" {encoded}'
    start = f"exec /bin/sh -c '{_FIND_PYTHON}{run}'"
    return _status(ssh, subprocess.run(ssh.argv_for(start, terminal=True), check=False).returncode)


def _argv(ssh: Ssh) -> list[str]:
    """ssh to a shell that takes its one line from stdin: no login shell's quoting is in the way."""
    return ssh.argv_for("exec /bin/sh -c 'read -r line; eval \"$line\"'")


def _hand_over(process: "subprocess.Popen[bytes]", host: str, request: Request) -> bytes:
    """Send the command, and this program if it is wanted; what of the output has been read by then."""
    assert process.stdin is not None
    words = {"have": HAVE.decode(), "need": NEED.decode()}
    head = {"key": payload_key(), "host": host, **words, **request._asdict()}
    start = _FIND_PYTHON + f'exec "$p" -I -c {shlex.quote(f"exec({_LOADER!r})")}'
    process.stdin.write(start.encode() + b"\n" + json.dumps(head).encode() + b"\n")
    said = b""
    while HAVE not in said and NEED not in said:
        piece = _read(process)
        if not piece:
            return said
        said += piece
    if NEED in said:
        data = payload()
        process.stdin.write(b"%d\n" % len(data) + data)
    return said.partition(HAVE if HAVE in said else NEED)[2]


def _read(process: "subprocess.Popen[bytes]") -> bytes:
    assert process.stdout is not None
    return os.read(process.stdout.fileno(), 1 << 16)


def _print(output: bytes) -> None:
    sys.stdout.buffer.write(output)
    sys.stdout.flush()


def _pump(process: "subprocess.Popen[bytes]", output: bytes, show: Callable[[bytes], object]) -> None:
    """Its stdout, as it comes."""
    while output or (output := _read(process)):
        try:
            show(output)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            process.kill()
            raise
        output = b""
    with contextlib.suppress(BrokenPipeError):
        assert process.stdin is not None
        process.stdin.close()


def _status(ssh: Ssh, status: int) -> int:
    if status == NO_PYTHON:
        raise DistlaunchError(
            f"{ssh.host}: found no Python 3.10 or later (tried python3 and python3.10 to python3.13 in "
            "PATH); install one there"
        )
    if status == 255:
        return Exit.UNREACHABLE  # ssh has said why
    return status if status >= 0 else 128 - status


def split(word: str | None) -> tuple[str, str] | None:
    """The host and the rest of `HOST:RUN`; None where the word is no such thing."""
    if not word or os.sep in word.partition(":")[0] or ":" not in word or os.path.exists(word):
        return None
    host, _, rest = word.partition(":")
    return (host, rest) if host else None


def with_rest(words: Sequence[str], word: str, rest: str) -> tuple[str, ...]:
    """`words` with `rest` in the place of `word`, or behind them where that is not there."""
    if word not in words:
        return (*words, rest)
    at = len(words) - 1 - list(reversed(words)).index(word)
    return (*words[:at], *([rest] if rest else []), *words[at + 1 :])
