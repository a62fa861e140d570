"""The packages that this machine provides to the nodes, for `setup: {from: controller}`.

They are kept in BASE/wheels/KEY, and are part of the job's code. KEY depends on the file that lists them, and
on the Python and the index that they are for.
"""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping

from distlaunch.agent.setup import key_of, read_lists
from distlaunch.errors import DistlaunchError, reason
from distlaunch.job.spec import DEFAULT_BASE
from distlaunch.wording import cut

_DIRECTORY = re.compile(
    rb"^\s*(?:-e\s*|--editable[\s=]|[\w.,\[\]-]+\s*@\s*)?(?:file://)?((?:\.|[^\s;#\[]*/)[^\s;#\[]*)",
    re.MULTILINE,
)
"""Finds lines of requirements.txt that may be the path of a package's source code."""
STALE_S = 30 * 86400.0
"""Seconds without use after which packages are removed."""


def wheels_of(source: str, python: str | None, env: Mapping[str, str]) -> list[str]:
    """Return the paths on this machine of the packages that the file `source` lists.

    pip builds or downloads them for `python` unless they are there already. `env` contains variables for pip
    and uv. Raises OSError or `DistlaunchError`.
    """
    import shutil  # slow to import, and few jobs need it

    given = os.path.expanduser(python or sys.executable)
    path = shutil.which(given)
    if path is None:
        raise DistlaunchError(
            f"can't get packages for the nodes: this machine does not have {given} (set by python); "
            "install it here, too, or use setup: uv, which gets the packages on each node"
        )
    env = {**os.environ, **env}
    workdir, name = os.path.split(source)
    key = key_of((), os.path.realpath(path), env, read_lists(workdir, [name], env).values())
    base = os.path.join(os.path.expanduser(DEFAULT_BASE), "wheels")
    os.makedirs(base, 0o700, exist_ok=True)
    ready = os.path.join(base, key)
    if os.path.isdir(ready):
        os.utime(ready)
    else:
        _tidy(base)
        new = f"{ready}.{os.urandom(4).hex()}"
        try:
            os.mkdir(new, 0o700)
            _fill(new, path, source, env)
            os.rename(new, ready)
        except OSError:
            if not os.path.isdir(ready):  # no other run has created it
                raise
        finally:
            shutil.rmtree(new, ignore_errors=True)
    return [os.path.join(ready, name) for name in os.listdir(ready) if name.endswith(".whl")]


def _tidy(base: str) -> None:
    """Remove packages that no run has used for a long time, and leftovers of killed runs."""
    import shutil

    for entry in os.scandir(base):
        with contextlib.suppress(FileNotFoundError):  # another run has just removed it
            if time.time() - entry.stat().st_mtime > STALE_S:
                shutil.rmtree(entry.path, ignore_errors=True)


def _fill(directory: str, python: str, source: str, env: Mapping[str, str]) -> None:
    """Put a wheel of each package that `source` lists into `directory`. Raises as `wheels_of` does."""
    import shutil

    workdir, name = os.path.split(source)
    own = os.path.join(directory, "venv")  # environments of uv have no pip
    wanted = os.path.join(directory, "wanted.txt")
    uv = (
        shutil.which("uv", path=os.pathsep.join((os.path.dirname(sys.executable), env.get("PATH", ""))))
        or "uv"
    )
    options = ["--no-deps"]  # uv's list is complete
    if name == "uv.lock":
        more = ("--frozen", "--no-emit-workspace", "--no-hashes", "--emit-index-url", "--quiet")
        _call([uv, "export", *more, "-o", wanted], workdir, env)
    elif name == "pyproject.toml":
        _call(
            [uv, "pip", "compile", "--python", python, "--emit-index-url", "--quiet", name, "-o", wanted],
            workdir,
            env,
        )
    else:
        wanted, options = name, []
    for path in map(os.fsdecode, _DIRECTORY.findall(b"\n".join(read_lists(workdir, [wanted], env).values()))):
        if os.path.isdir(os.path.join(workdir, path)):
            what = (
                f"can't get packages for the nodes: {name} contains {path}, whose code may change; remove it"
            )
            raise DistlaunchError(f"{what}, and set PYTHONPATH in env to the directory of its modules")
    _call([python, "-m", "venv", own], directory, env)
    _call([f"{own}/bin/pip", "wheel", *options, "--wheel-dir", directory, "-r", wanted], workdir, env)
    shutil.rmtree(own)


def _call(argv: list[str], workdir: str, env: Mapping[str, str]) -> None:
    """Run a command, which shows its progress on stderr. Raises `DistlaunchError` if it fails."""
    what = cut(" ".join([os.path.basename(argv[0]), *argv[1:]]), 200)
    print(f"+ {what}", file=sys.stderr, flush=True)
    try:
        subprocess.run(argv, check=True, cwd=workdir, env=env, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    except OSError as error:
        hint = "; install it on this machine (pip install uv)" if argv[0] == "uv" else ""
        raise DistlaunchError(f"can't run {argv[0]}: {reason(error)}{hint}") from None
    except subprocess.CalledProcessError as error:
        raise DistlaunchError(f"{what} ended with status {error.returncode}") from None
