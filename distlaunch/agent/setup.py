"""Builds the Python environment of a job on its node, once for each `key_of`, and reuses it in later runs.

    BASE/envs/NAME       a link to the environment, created once it is complete
    BASE/envs/NAME.1a2b  the environment, which can't be moved, since scripts in it contain its path
    BASE/envs/NAME.lock  locked by the process that builds the environment

A child of the agent builds the environment, and the agent reports the output.
"""

from __future__ import annotations

import codecs
import errno
import fcntl
import glob
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from urllib.parse import unquote, urlsplit

from distlaunch.agent.messages import Setup
from distlaunch.agent.poller import Poller
from distlaunch.agent.scratch import MAX_ERROR_RECORD, read_left
from distlaunch.agent.wire import MAX_OUTPUT, Message
from distlaunch.agent.worker import start_child

ENVIRONMENTS = "envs"
FACTS = "distlaunch.json"
"""The file in an environment's directory that lists the versions."""
LAST_LINES = 4
"""Number of lines, the last ones printed, to report if the environment can't be built."""
REMOVE_S = 2.0
"""Maximum seconds for removing an unfinished environment, which keeps the agent from doing anything else."""
MAX_PRINTED = 4096
"""Characters of output to keep for that report."""
MAX_LINE = MAX_OUTPUT // 2
"""Bytes of a line after which its beginning is sent, so that no report exceeds MAX_OUTPUT."""
_INCLUDED = re.compile(
    rb"(?:^|\s)(?:-[rc]|--requirement|--constraint)[ \t=]*(\"[^\"\n]+\"|'[^'\n]+'|(?:\\[^\n]|[^\s\"'#])+)"
)
"""Finds the files that a list of packages for pip includes, also in a section of environment.yml."""
_VERSIONS = """
import json, sys
facts = {"python": "%d.%d.%d" % sys.version_info[:3]}
try:
    import torch
except ImportError:
    pass
else:
    facts.update(torch=torch.__version__, cuda=torch.version.cuda or "none")
    with open("/proc/self/maps") as maps:
        paths = sorted({line.split()[-1] for line in maps if "libnccl" in line})
    if paths:
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        facts["libnccl"] = paths[0].rpartition("/lib/")[2]
print(json.dumps(facts))
"""


def read_lists(workdir: str, names: Iterable[str], env: Mapping[str, str]) -> dict[str, bytes]:
    """Return the contents of those `names` that are files in `workdir`, and of all files that they include.

    Their names may contain variables of `env`. Raises OSError.
    """
    found: dict[str, bytes] = {}
    left = list(names)
    while left:
        name = os.path.normpath(left.pop())
        path = os.path.join(os.path.expanduser(workdir), os.path.expanduser(name))
        if name not in found and os.path.isfile(path):
            with open(path, "rb") as file:
                found[name] = file.read()
            left += [os.path.join(os.path.dirname(name), each) for each in _included(found[name], env)]
    return found


def _included(content: bytes, env: Mapping[str, str]) -> Iterator[str]:
    """Yield the names of the files that a list of packages includes, as pip reads them."""
    for word in map(os.fsdecode, _INCLUDED.findall(content)):
        name = word[1:-1] if word[0] in "\"'" else re.sub(r"\\(.)", r"\1", word)
        yield re.sub(r"\$\{(\w+)\}", lambda found: env.get(found[1], found[0]), name)


def key_of(what: Iterable[str], python: str, env: Mapping[str, str], lists: Iterable[bytes]) -> str:
    """Return a digest of everything that determines which packages are installed, and for which interpreter.

    `env` contains variables for the installer, of which only some count: those of package managers, and those
    whose names occur in `what`, or as ${NAME} in `lists`, the contents of files that name packages.
    """
    words, lists = " ".join(what), [*lists]
    mentions = words + "".join(name.decode() for name in re.findall(rb"\$\{\w+\}", b" ".join(lists)))
    used = [name for name in env if name.startswith(("PIP_", "UV_", "CONDA_")) or name in mentions]
    parts = [
        words,
        python,
        platform.machine(),
        [(name, env[name]) for name in sorted(used)],
        *(hashlib.sha256(each).hexdigest() for each in lists),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


class Environment:
    """The environment for a `setup`, below the directory `base`. Its Python is bin/python in `path`.

    The constructor raises OSError.
    """

    def __init__(self, base: str, setup: Setup) -> None:
        python = os.path.expanduser(setup.python)
        self._setup = setup._replace(python=python)
        self._env = {**os.environ, **setup.env}
        self._directory = os.path.join(os.path.expanduser(base), ENVIRONMENTS)
        packages = setup.files if setup.kind == "controller" else ()  # their names contain their digests
        self._lists = read_lists(setup.workdir, () if packages else setup.files, self._env)
        found = shutil.which(python or sys.executable, path=self._env.get("PATH"))
        real = os.path.realpath(found) if found else python  # such as 3.12, for uv
        what = (setup.kind, setup.run, *packages, *filter(None, [setup.image]))
        key = key_of(what, real, setup.env, self._lists.values())
        version = "py%d.%d" % sys.version_info[:2]
        name = "-".join((key, version, sys.platform, platform.machine()))
        self.path = os.path.join(self._directory, name)
        self._halves = "%s.%s." % (self.path, os.uname().nodename)
        self._new = self._halves + os.urandom(4).hex()
        self._printed = ""
        self._ended = b"\0" + os.urandom(8).hex().encode()
        """What the child prints last, unless it is killed."""
        self.builder = 0
        """The PID of the process that is building the environment, or 0."""
        self.late = False
        """Whether building took too long."""

    @property
    def complete(self) -> bool:
        """Return whether the environment has been built."""
        return os.path.exists(os.path.join(self.path, "bin", "python"))

    @property
    def last_output(self) -> str:
        """Return the last lines printed by the commands, without pip's notices."""
        lines = [line for line in self._printed.split("\n") if line.strip() and "[notice]" not in line]
        return "\n".join(lines[-LAST_LINES:])

    def facts(self) -> Message:
        """Return the versions in the environment."""
        try:
            found = json.loads(b"".join(read_left(os.path.join(self.path, FACTS), MAX_ERROR_RECORD)))
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def build(self, poller: Poller, printed: Callable[[str], None], ended: Callable[[], None]) -> None:
        """Build the environment. Call `printed` with the output, and `ended` at the end. Raises OSError."""
        os.makedirs(self._directory, 0o700, exist_ok=True)
        rest, decode = b"", codecs.getincrementaldecoder("utf-8")("replace").decode

        def receive(data: bytes) -> bool:
            nonlocal rest
            rest += data
            size = rest.rfind(b"\n") + 1
            if len(rest) - size > MAX_LINE:
                size = len(rest) - len(self._ended)
            if size:
                show(rest[:size])
                rest = rest[size:]
            return rest.endswith(self._ended)

        def show(output: bytes, last: bool = False) -> None:
            text = decode(output, last)
            self._printed = (self._printed + text)[-MAX_PRINTED:]
            printed(text)

        def end(late: bool) -> None:
            finished = rest.endswith(self._ended)
            show(rest[: -len(self._ended)] if finished else rest, last=True)
            self.late = late
            if late:
                self._printed += "\nnot finished within %g s (timeouts.setup)" % self._setup.limit_s
                self._kill()
            elif not finished:
                self._printed += "\nthe process that was building it was killed"
            else:
                with suppress(OSError):
                    os.killpg(self.builder, signal.SIGKILL)  # what its commands have left running
            self.builder = 0
            ended()

        self.builder = start_child(poller, self._run, self._setup.limit_s, receive, end)

    def stop(self) -> None:
        """Kill the builder, if it is running, and remove unfinished files, as far as possible in REMOVE_S."""
        if self.builder:
            self._kill()
            with suppress(ChildProcessError):  # reaped already
                os.waitpid(self.builder, 0)
        if not self.complete:  # the next build here removes what remains
            with suppress(OSError, subprocess.TimeoutExpired):
                argv = ["/bin/sh", "-c", 'exec rm -rf -- "$1"', "sh", self._new]
                subprocess.run(argv, timeout=REMOVE_S, check=False)

    def _kill(self) -> None:
        with suppress(OSError):  # it has just exited
            try:
                os.killpg(self.builder, signal.SIGKILL)
            except ProcessLookupError:
                os.kill(self.builder, signal.SIGKILL)  # its process group doesn't exist yet

    # In the child

    def _run(self) -> None:
        """Build the environment. If that fails, print the reason, which the agent reports."""
        try:
            self._build()
        except Exception as error:
            print(_words(error), flush=True)
        os.write(1, self._ended)

    def _build(self) -> None:
        """Build the environment in a new directory, unless another run has built it in the meantime."""
        os.chdir(os.path.expanduser(self._setup.workdir))
        with open(self.path + ".lock", "w") as lock:
            locked = True
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("waiting for another node or run that is building the same environment", flush=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError:
                locked = False  # the file system has no locks: each builds its own, and the last one counts
            if self.complete:
                return
            # Builders that were killed on this host left these. Hosts may share the directory, and many file
            # systems don't show locks of other hosts.
            for left in glob.glob(glob.escape(self._halves) + "*[0-9a-f]") if locked else ():
                shutil.rmtree(left, ignore_errors=True)
            self._fill(self._new)
            self._check_sources(self._new)
            self._publish(self._new)

    def _fill(self, new: str) -> None:
        """Create the environment in the directory `new`. Raises OSError or CalledProcessError."""
        setup, python, env = self._setup, self._setup.python or sys.executable, self._env
        if setup.kind == "conda":
            found = (shutil.which(name, path=env.get("PATH")) for name in ("conda", "mamba", "micromamba"))
            conda = next(filter(None, found), None)
            if not conda:
                raise FileNotFoundError(errno.ENOENT, "not found on this node", "conda")
            _call([conda, "env", "create", "--yes", "--prefix", new, "--file", self._list()], env)
        elif setup.kind == "uv":
            self._fill_by_uv(new, env)
        else:
            _call([python, "-m", "venv", new], env)
            if setup.kind == "controller":
                if setup.files:
                    _call([new + "/bin/pip", "install", "--no-index", "--no-deps", *setup.files], env)
                return
            inside = {"VIRTUAL_ENV": new, "PATH": "%s/bin:%s" % (new, env.get("PATH", os.defpath))}
            _call(["/bin/sh", "-ec", setup.run], {**env, **inside}, "setup.run")  # which may contain a secret

    def _fill_by_uv(self, new: str, env: dict[str, str]) -> None:
        """Create the environment from uv.lock, or else requirements.txt, or else pyproject.toml."""
        setup, uv = self._setup, self._uv(env)
        version = ["--python", setup.python] if setup.python else []
        source = self._list()
        if source == "uv.lock":
            # Packages of the project aren't installed: their code changes from run to run, and is copied.
            into = {**env, "UV_PROJECT_ENVIRONMENT": new}
            _call([uv, "sync", "--frozen", "--no-install-workspace", *version], into)
            return
        _call([uv, "venv", "--quiet", *version, new], env)
        _call([uv, "pip", "install", "--python", os.path.join(new, "bin", "python"), "-r", source], env)

    def _list(self) -> str:
        """Return the name of the file in the workdir that lists the packages."""
        return next(name for name in self._setup.files if name in self._lists)

    def _uv(self, env: dict[str, str]) -> str:
        """Return the path of uv, which is installed beside the environments if the node doesn't have it."""
        directory = os.path.join(self._directory, "uv-" + platform.machine())  # nodes may share the home
        own = os.path.join(directory, "bin", "uv")
        for path in (shutil.which("uv", path=env.get("PATH")), os.path.expanduser("~/.local/bin/uv"), own):
            if path and os.access(path, os.X_OK):
                return path
        _call([sys.executable, "-m", "venv", directory], env)
        _call([os.path.join(directory, "bin", "pip"), "install", "--quiet", "uv"], env)
        return own

    def _check_sources(self, new: str) -> None:
        """Raise ValueError if a package in `new` is a copy of this run's code, which later runs would import.

        pip and uv record where each package comes from, see PEP 610.
        """
        runs = os.path.realpath(os.path.join(self._directory, os.pardir, "runs")) + "/"
        own = self._setup.kind == "run"
        for path in glob.glob(glob.escape(new) + "/lib/python*/site-packages/*.dist-info/direct_url.json"):
            with open(path, encoding="utf-8") as file:
                found = json.load(file)
            inside = os.path.realpath(unquote(urlsplit(found["url"]).path)).startswith(runs)
            if not inside or "dir_info" not in found:
                continue
            if own and self._setup.files and not found["dir_info"].get("editable"):
                continue  # rebuilt when these files change
            name = os.path.basename(os.path.dirname(path)).partition("-")[0]
            what = (
                "%s is part of the job's code; in the environment, later runs would import this copy; " % name
            )
            if own:
                what += "install it without -e, and list in setup.key the files that it is built from; or "
            source = "setup.run" if own else self._list()
            what += "remove it from %s, and set PYTHONPATH in env to the directory of its modules" % source
            raise ValueError(what)

    def _publish(self, new: str) -> None:
        """Record the versions in the environment `new`. Then link `path` to it, which completes it."""
        argv = [os.path.join(new, "bin", "python"), "-c", _VERSIONS]
        done = subprocess.run(argv, stdout=subprocess.PIPE, check=False)
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, "`import torch` in the new environment")
        with open(os.path.join(new, FACTS), "wb") as file:
            file.write(done.stdout)
        link = new + ".link"
        os.symlink(os.path.basename(new), link)
        os.replace(link, self.path)


def _call(argv: list[str], env: dict[str, str], name: str = "") -> None:
    """Print and run a command, called `name` in messages if given. Raises CalledProcessError and OSError."""
    words = name or " ".join([os.path.basename(argv[0]), *argv[1:]])
    print("+ " + words, flush=True)
    status = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, check=False).returncode
    if status:
        raise subprocess.CalledProcessError(status, words)


def _words(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        how = "ended with status %d" if error.returncode > 0 else "was killed by signal %d"
        return "%s %s" % (error.cmd[:200], how % abs(error.returncode))
    return "%s: %s" % (getattr(error, "filename", None) or "setup", getattr(error, "strerror", None) or error)
