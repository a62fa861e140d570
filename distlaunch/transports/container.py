"""A container in which a node's agent runs, and its ranks: the command line that makes it, and what can fail.

The agent's guardian is the first process there, so that its end is the container's, and nothing gets out. The
node's own shell evaluates the line: it knows what the controller does not, such as who the user is there.
"""

from collections.abc import Iterator, Mapping
from shlex import quote
from types import MappingProxyType
from typing import Literal

from distlaunch.agent.frozen import Frozen
from distlaunch.transports.failure import NO_IMAGE, NO_RUNTIME, Kind, LinkFailure
from distlaunch.transports.handshake import ENTER, PULLING, SCRIPT
from distlaunch.transports.slurm import Slurm

Runtime = Literal["docker", "podman", "apptainer", "enroot", "pyxis"]
BY_SRUN: Runtime = "pyxis"
"""The one that is a plug-in of srun, which has options for it."""
_OF_THE_NODE = (
    *("CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT"),
    "SLURM_ARRAY_TASK_ID",
)
"""Variables of the node's that containers get, which have an environment of their own."""
_GPUS = "[ -e /dev/nvidiactl ]"


class Container(Frozen):
    """The job file's `container` section; `options` are arguments for the runtime, one per item.

    `mounts` are `PATH` or `PATH:PATH_INSIDE[:ro]`; `before` are words between the runtime's name and its
    command. `env` has a value None for what is as on the node.
    """

    image: str
    runtime: Runtime = "docker"
    mounts: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    env: Mapping[str, str | None] = MappingProxyType({})
    before: tuple[str, ...] = ()


def entry(container: Container, workdir: str) -> bytes:
    """What makes of a node's shell one in a container, where `workdir` is as outside."""
    line = "; ".join(_steps(container, workdir))
    return f"{ENTER}{line}\n".encode()


def _steps(container: Container, workdir: str) -> Iterator[str]:
    name = container.runtime
    yield f'command -v {name} >/dev/null 2>&1 || {{ echo "{NO_RUNTIME}: {name}" >&2; exit 127; }}'
    runtime = " ".join([name, *map(quote, container.before)])
    image = _placed(container.image)
    failed = f'{{ echo "{NO_IMAGE}" >&2; exit 125; }}'
    if name in ("docker", "podman"):
        pull = f"{{ echo {PULLING}; {runtime} pull {image} >&2 || {failed}; }}"
        yield f"{runtime} image inspect {image} >/dev/null 2>&1 || {pull}"
    elif "://" in container.image:
        yield f"echo {PULLING}"  # as it starts; whether it is there already nobody tells
    else:
        yield f"[ -e {image} ] || {failed}"
    before, flag, shell = _options(name)
    words = [
        *before,
        *_env(container),
        *(f"--{flag}={mount}" for mount in _mounts(container, workdir)),
        *map(quote, container.options),
        f"{image} {shell} {quote(SCRIPT)}",
    ]
    yield f"exec {runtime} {' '.join(words)}"


def _options(runtime: Runtime) -> tuple[list[str], str, str]:
    """The runtime's command with its first options, its option for a mount, and what starts a shell."""
    if runtime == "apptainer":
        # It has the user's own uid, home, network and IPC; its processes end with it in a PID namespace.
        return [f"exec --pid --pwd=/ $({_GPUS} && echo --nv)"], "bind", "/bin/sh -c"
    if runtime == "enroot":
        # Its hooks bring in GPUs; network, IPC and processes are the node's.
        return ["start --rw"], "mount", "/bin/sh -c"
    docker = runtime == "docker"  # podman differs in who the user is and in how it names GPUs
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


def _mounts(container: Container, workdir: str) -> Iterator[str]:
    """As words for the node's shell."""
    for source, inside, *mode in _mounted(container, workdir):
        yield ":".join([_placed(source), _placed(inside), *mode])


def _mounted(container: Container, workdir: str) -> Iterator[list[str]]:
    """[PATH, PATH_INSIDE, …]; that of the workers' directory unless the job says itself what is there."""
    given = [mount.split(":") for mount in container.mounts]
    pairs = [parts if len(parts) > 1 else parts * 2 for parts in given]
    yield from pairs
    if workdir != "/" and workdir not in [inside for _, inside, *_ in pairs]:
        yield [workdir, workdir]


def _placed(path: str) -> str:
    """A word for the node's shell, whose user has a ~ of its own."""
    return '"$HOME"' + quote(path[1:]) if path.startswith("~/") else quote(path)


def in_step(step: Slurm, container: Container, workdir: str, home: str) -> Slurm:
    """A step that srun itself starts in the container, by pyxis. Users have the same `home` on all nodes."""
    paths = [[_at_home(path, home) for path in mount] for mount in _mounted(container, workdir)]
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
    """What to do about a container without an agent; "" where that is not the container's doing."""
    inside = f"`python3` in {container.image}" if python is None else f"`{python}` in {container.image}"
    return {
        Kind.NO_RUNTIME: f"install {container.runtime} there, or set container.runtime",
        Kind.NO_IMAGE: f"check container.image: {container.image}",
        Kind.NO_PYTHON: f"the image needs Python 3.8 or later, but {inside} was not found: set `python:`",
        Kind.OLD_PYTHON: f"the agent needs Python 3.8 or later; {inside} is older: set `python:`",
        Kind.UNSTARTED: f"{container.runtime} exited before the agent started",
    }.get(failure.kind, "")
