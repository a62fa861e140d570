"""The container in which the agent and the ranks of a node run: its command line and its failures.

The guardian is the first process in the container, so both end together and no process escapes. The node's
shell evaluates the command line, because some values, such as the user's IDs, are known only on the node.
"""

from collections.abc import Iterator, Mapping
from shlex import quote
from types import MappingProxyType
from typing import Literal

from distlaunch.agent.frozen import Frozen
from distlaunch.transports.failure import NO_IMAGE, NO_RUNTIME, Kind, LinkFailure
from distlaunch.transports.handshake import ENTER, PULLING, SCRIPT
from distlaunch.transports.slurm import SlurmStep

Runtime = Literal["docker", "podman", "apptainer", "enroot", "pyxis"]
BY_SRUN: Runtime = "pyxis"
"""The runtime that is a plug-in of srun and adds options to it."""
_OF_THE_NODE = (
    *("CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT"),
    "SLURM_ARRAY_TASK_ID",
)
"""Variables copied from the node into containers, whose environment is otherwise separate."""
_GPUS = "[ -e /dev/nvidiactl ]"


class Container(Frozen):
    """The `container` section of a job file.

    `options` are arguments for the runtime, one per item. `mounts` are `PATH` or `PATH:PATH_INSIDE[:ro]`.
    `before` contains the words between the name of the runtime and its subcommand. In `env`, None stands for
    the value on the node.
    """

    image: str
    runtime: Runtime = "docker"
    mounts: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    env: Mapping[str, str | None] = MappingProxyType({})
    before: tuple[str, ...] = ()


def entry(container: Container, workdir: str, store: str = "") -> bytes:
    """Return the line that replaces a node's shell with a shell in a container, in the same `workdir`.

    `store` is the node's directory for the job's code, in which the agent then creates the `workdir`.
    """
    line = "; ".join(_steps(container, workdir, store))
    return f"{ENTER}{line}\n".encode()


def _steps(container: Container, workdir: str, store: str) -> Iterator[str]:
    """Yield shell commands: find the runtime, pull the image if necessary, and exec a shell in it."""
    name = container.runtime
    yield f'command -v {name} >/dev/null 2>&1 || {{ echo "{NO_RUNTIME}: {name}" >&2; exit 127; }}'
    runtime = " ".join([name, *map(quote, container.before)])
    image = _placed(container.image)
    failed = f'{{ echo "{NO_IMAGE}" >&2; exit 125; }}'
    if name in ("docker", "podman"):
        pull = f"{{ echo {PULLING}; {runtime} pull {image} >&2 || {failed}; }}"
        yield f"{runtime} image inspect {image} >/dev/null 2>&1 || {pull}"
    elif "://" in container.image:
        yield f"echo {PULLING}"  # announced early: these runtimes don't report whether they have the image
    else:
        yield f"[ -e {image} ] || {failed}"
    mounts = list(_mounted(container, workdir, store))
    if [store, store] in mounts:
        yield f"mkdir -p -m 700 {_placed(store)} || exit 73"  # only directories that exist can be mounted
    before, flag, shell = _options(name)
    if name in ("docker", "podman") and any(path.startswith("~/") for path in (store, workdir)):
        before.append('--env=HOME="$HOME"')  # so that the agent finds what is mounted below ~
    words = [
        *before,
        *_env(container),
        *(f"--{flag}={':'.join(map(_placed, mount))}" for mount in mounts),
        *map(quote, container.options),
        f"{image} {shell} {quote(SCRIPT)}",
    ]
    yield f"exec {runtime} {' '.join(words)}"


def _options(runtime: Runtime) -> tuple[list[str], str, str]:
    """Return the runtime command with its first options, its option for mounts, and the shell command."""
    if runtime == "apptainer":
        # Apptainer keeps the user's UID, home, network and IPC. --pid ends all processes with the container.
        return [f"exec --pid --pwd=/ $({_GPUS} && echo --nv)"], "bind", "/bin/sh -c"
    if runtime == "enroot":
        # Enroot hooks add GPUs. The container shares the node's network, IPC and processes.
        return ["start --rw"], "mount", "/bin/sh -c"
    docker = runtime == "docker"  # podman maps users and names GPUs differently
    options = [
        "run --rm --interactive --pull=never --network=host --ipc=host --workdir=/ --entrypoint=/bin/sh",
        '--user="$(id -u):$(id -g)"' if docker else '$([ "$(id -u)" = 0 ] || echo --userns=keep-id)',
        f"$({_GPUS} && echo {'--gpus=all' if docker else '--device=nvidia.com/gpu=all'})",
        *(f"--env={name}" for name in _OF_THE_NODE),
    ]
    return options, "volume", "-c"


def _env(container: Container) -> Iterator[str]:
    for name, value in container.env.items():
        yield f'--env={name}="${{{name}}}"' if value is None else f"--env={quote(f'{name}={value}')}"


def _mounted(container: Container, workdir: str, store: str) -> Iterator[list[str]]:
    """Yield [PATH, PATH_INSIDE, …] per mount. Add the directories that the job mounts nothing on.

    These are `store` and, if it isn't in there, `workdir`.
    """
    listed = [mount.split(":") for mount in container.mounts]
    pairs = [parts if len(parts) > 1 else parts * 2 for parts in listed]
    yield from pairs
    own = [workdir] if not store else [store] if f"{workdir}/".startswith(f"{store}/") else [store, workdir]
    taken = {"/", *(inside for _, inside, *_ in pairs)}
    yield from ([path, path] for path in own if path not in taken)


def _placed(path: str) -> str:
    """Return a path quoted for the node's shell, which expands a leading ~/ itself."""
    return '"$HOME"' + quote(path[1:]) if path.startswith("~/") else quote(path)


def in_step(step: SlurmStep, container: Container, workdir: str, home: str, store: str = "") -> SlurmStep:
    """Return a step that srun starts in the container with pyxis. All nodes have the same `home`."""
    paths = [[_at_home(path, home) for path in mount] for mount in _mounted(container, workdir, store)]
    mounts = ",".join(map(":".join, paths))
    kept = [name for name, value in container.env.items() if value is None]
    options = (
        f"--container-image={_at_home(container.image, home)}",
        f"--container-mounts={mounts}",
        "--no-container-entrypoint",
        *([f"--container-env={','.join(kept)}"] if kept else []),
        *container.options,
    )
    variables = tuple(f"{name}={value}" for name, value in container.env.items() if value is not None)
    return step._replace(options=options, variables=variables)


def _at_home(path: str, home: str) -> str:
    return home + path[1:] if path.startswith("~/") else path


def advice_for(failure: LinkFailure, container: Container, python: str | None) -> str:
    """Return advice on a container in which no agent started, or "" if the container isn't the cause.

    This advice replaces the advice of the node's transport.
    """
    inside = f"`python3` in {container.image}" if python is None else f"`{python}` in {container.image}"
    return {
        Kind.NO_RUNTIME: f"install {container.runtime} on the node, or set container.runtime",
        Kind.NO_IMAGE: f"check container.image: {container.image}",
        Kind.NO_PYTHON: f"the image needs Python 3.8 or later, but {inside} was not found: set `python:`",
        Kind.OLD_PYTHON: f"the agent needs Python 3.8 or later; {inside} is older: set `python:`",
        Kind.UNSTARTED: f"{container.runtime} exited before the agent started",
    }.get(failure.kind, "")
