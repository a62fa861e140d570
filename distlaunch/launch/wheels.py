"""The packages that this machine provides to the nodes, for `setup: {from: controller}`.

They are kept in BASE/wheels/KEY. KEY depends on the files that list them, and on the Python they are for.
"""

import glob
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping

from distlaunch.agent.tree import digest_of
from distlaunch.errors import DistlaunchError, reason
from distlaunch.job.spec import DEFAULT_BASE, Program
from distlaunch.wording import cut

DIRECTORY = ".distlaunch-wheels"
"""The directory for the packages, in the root of the job's code on the nodes."""
SOURCES = ("uv.lock", "requirements.txt", "pyproject.toml")
"""The files in the workdir that may list the packages; the first one found counts."""


def wheels_of(program: Program, env: Mapping[str, str]) -> dict[str, str]:
    """Return the paths on this machine of a program's packages, by their paths in the code on the nodes.

    They are built and downloaded by pip if the lists have changed. There are none if there is no list. `env`
    contains variables for pip and uv. Raises `DistlaunchError`.
    """
    python = shutil.which(program.python or sys.executable) or sys.executable
    lists = [path for name in SOURCES if os.path.isfile(path := os.path.join(program.workdir, name))]
    if not lists:
        return {}
    texts = [os.path.realpath(python)]
    for path in lists:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            texts.append(file.read())
    base = os.path.join(os.path.expanduser(DEFAULT_BASE), "wheels")
    ready = os.path.join(base, digest_of("\0".join(texts).encode(errors="surrogateescape"))[:16])
    if not os.path.isdir(ready):
        new = f"{ready}.{os.getpid()}"
        try:
            os.makedirs(new, 0o700)
            _fill(new, python, lists[0], {**os.environ, **env})
            os.rename(new, ready)
        except OSError as error:
            if not os.path.isdir(ready):  # by another run
                raise DistlaunchError(
                    f"can't keep the packages for the nodes: {base}: {reason(error)}"
                ) from None
        finally:
            shutil.rmtree(new, ignore_errors=True)
    return {
        f"{DIRECTORY}/{os.path.basename(path)}": path for path in glob.glob(f"{glob.escape(ready)}/*.whl")
    }


def _fill(directory: str, python: str, source: str, env: Mapping[str, str]) -> None:
    """Put a wheel of each package that `source` lists into `directory`. Raises OSError, `DistlaunchError`."""
    workdir, name = os.path.split(source)
    wanted = os.path.join(directory, "wanted.txt")
    uv = shutil.which("uv", path=env.get("PATH")) or "uv"
    if name == "uv.lock":
        _call([uv, "export", "--frozen", "--no-emit-project", "--no-hashes", "-o", wanted], workdir, env)
    elif name == "pyproject.toml":
        _call([uv, "pip", "compile", "--python", python, name, "-o", wanted], workdir, env)
    else:
        wanted = name
    _call([python, "-m", "pip", "wheel", "--wheel-dir", directory, "-r", wanted], workdir, env)


def _call(argv: list[str], workdir: str, env: Mapping[str, str]) -> None:
    """Run a command, which shows its progress on stderr. Raises `DistlaunchError` if it fails."""
    what = cut(" ".join([os.path.basename(argv[0]), *argv[1:]]), 200)
    print(f"+ {what}", file=sys.stderr, flush=True)
    try:
        subprocess.run(argv, check=True, cwd=workdir, env=env, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    except FileNotFoundError:
        raise DistlaunchError(f"{argv[0]} is not installed on this machine: pip install {argv[0]}") from None
    except subprocess.CalledProcessError as error:
        raise DistlaunchError(f"{what} ended with status {error.returncode}") from None
