"""A torchrun command line as a job: what ours does itself, and what is left to torch's own agent."""

import os.path
import signal
from collections.abc import Mapping
from typing import NamedTuple

from distlaunch.compat.flags import FLAGS, Flags, is_alone, node_range, parse_procs, parse_std, program_kind
from distlaunch.compat.joining import endpoint_of, is_c10d, waits_as_told
from distlaunch.compat.joining import left_to_torch as left_of_c10d
from distlaunch.errors import UsageError
from distlaunch.job.spec import (
    FOREVER_S,
    Binding,
    Invocation,
    JobSpec,
    Logs,
    NodeSpec,
    Program,
    Restarts,
    Timeouts,
    TorchrunLogs,
)

LEASE_S = 86400.0
"""Agent and command are on one machine and see each other's end; a job that is suspended may go on."""
NODES_LEASE_S = Timeouts().lease_s
_UNHANDLED = ("SIGKILL", "SIGSTOP", "SIGTSTP", "SIGTTIN", "SIGTTOU")
_RUN_PATH = "import runpy,sys; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"


class Here(NamedTuple):
    """What the command line is read against; `temporary` are the folders for temporary ones, best first."""

    folder: str
    hostname: str
    python: str
    temporary: tuple[str, ...]
    gpus: int
    cpus: int
    environ: Mapping[str, str]


def left_to_torch(flags: Flags) -> str:
    """The flag that only torch's own elastic agent can serve; "" if none."""
    fewest, most = node_range(flags.nnodes)
    for flag in FLAGS:
        if flag.here == "handed over" and flag.field in flags.given:
            return f"{flag.name} {getattr(flags, flag.field)}"
    if is_alone(flags, most):
        return ""
    if flags.rdzv_backend not in ("static", "c10d"):
        return f"--rdzv-backend {flags.rdzv_backend}"
    if fewest != most and flags.rdzv_backend == "static":
        return f"--nnodes {flags.nnodes}"
    return left_of_c10d(flags)


def _makes_up_the_place(flags: Flags) -> bool:
    """Whether torch chooses where the ranks meet, as it does on one node without a static endpoint.

    c10d's endpoint is that of the agents' own store: the ranks of one node never see it.
    """
    if flags.standalone or flags.rdzv_backend == "c10d":
        return not is_c10d(flags)
    named = flags.rdzv_endpoint or "master_port" in flags.given
    return node_range(flags.nnodes)[1] == 1 and not named


def notices(flags: Flags) -> list[str]:
    """One line for each flag that was given and has no meaning here. Raises `UsageError` for refused ones."""
    given = [flag for flag in FLAGS if flag.field in flags.given]
    for flag in given:
        if flag.here == "refused":
            raise UsageError(f"{flag.name}: {flag.why}")
    if flags.no_python and flags.module and not flags.run_path:
        raise UsageError("--no-python and --module can't be combined")
    static = flags.rdzv_backend == "static" and not _makes_up_the_place(flags)
    unused = [
        f"{flag.name} has no effect: {flag.why}"
        for flag in given
        if "no effect" in flag.here and (static or not flag.only_static)
        if not (flag.field == "rdzv_conf" and waits_as_told(flags))
    ]
    unknown = [name for name, known in _signals(flags).items() if name and not known]
    return [*unused, *(f"--signals-to-handle: ignoring {name}, which can't be handled" for name in unknown)]


def job_of(flags: Flags, here: Here) -> JobSpec:
    """The job of one node, which may be one of several that have launchers of their own."""
    fewest, most = (1, 1) if flags.standalone else node_range(flags.nnodes)
    made_up = _makes_up_the_place(flags)
    host, port = endpoint_of(flags)
    return JobSpec(
        name=flags.rdzv_id if flags.rdzv_id != "none" else "torchrun",
        nodes=(NodeSpec(here.hostname, procs=procs_of(flags.nproc_per_node, here), path="--nproc-per-node"),),
        program=_program(flags),
        workdir=here.folder,
        logs=_logs(flags, here),
        master_host=flags.local_addr if made_up else host,
        master_port=None if made_up else port,
        rendezvous_id=_rendezvous_id(flags, made_up),
        args=_args(flags),
        python=here.environ.get("PYTHON_EXEC") or here.python,
        timeouts=Timeouts(stop_s=_stop_s(flags, here), lease_s=LEASE_S if most == 1 else NODES_LEASE_S),
        grow="now" if fewest < most else "restart",
        restarts=Restarts(flags.max_restarts, 0.0, FOREVER_S),
        role=flags.role,
        one_device=flags.virtual_local_rank,
        binding=Binding(flags.numa_binding) if flags.numa_binding else None,
        source="the command line",
        invocation=Invocation(
            placeholders=False,
            shares_stdio=True,
            signals=tuple(filter(None, _signals(flags).values())),
        ),
    )


def procs_of(text: str, here: Here) -> int:
    """Workers on this node, of `--nproc-per-node`. Raises `UsageError`."""
    match parse_procs(text):
        case int(number):
            return number
        case "cpu":
            return here.cpus
        case "auto":
            return here.gpus or here.cpus
    if not here.gpus:
        raise UsageError("--nproc-per-node gpu: no GPU found on this machine")
    return here.gpus


def _rendezvous_id(flags: Flags, made_up: bool) -> str | None:
    """None = the run's own name: torch, too, makes one up, but for c10d only where the id is empty."""
    unnamed = made_up and flags.rdzv_backend != "c10d" and "rdzv_id" not in flags.given
    return None if flags.standalone or unnamed else flags.rdzv_id or ("" if made_up else "none")


def _stop_s(flags: Flags, here: Here) -> float:
    text = here.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    if text is None or "shutdown_timeout" in flags.given:
        return float(min(flags.shutdown_timeout, FOREVER_S))
    if not text.isdecimal():
        raise UsageError(f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT: expected a number ≥ 0, got {text!r}")
    return float(min(int(text), FOREVER_S))


def _signals(flags: Flags) -> dict[str, str]:
    """Each name that `--signals-to-handle` gives, and the system's own; "" for what can't be handled."""
    names = [name.strip() for name in flags.signals_to_handle.split(",")]
    known = {name: number.name for name, number in signal.Signals.__members__.items()}  # SIGPOLL is SIGIO
    return {name: known.get(name, "") if name not in _UNHANDLED else "" for name in names}


def _program(flags: Flags) -> Program:
    return Program(program_kind(flags), ("-c" if flags.run_path else flags.script,))


def _args(flags: Flags) -> tuple[str, ...]:
    return (_RUN_PATH, flags.script, *flags.args) if flags.run_path else flags.args


def _logs(flags: Flags, here: Here) -> Logs:
    nowhere = flags.log_dir == "/dev/null"  # torch: no files, all is shown
    template = flags.log_line_prefix_template or here.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
    redirects, tee = parse_std("redirects", flags.redirects), parse_std("tee", flags.tee)
    streams = TorchrunLogs(
        redirects=0 if nowhere else redirects,
        tee=0 if nowhere else tee,
        prefix=template or TorchrunLogs().prefix,
        local_ranks=ranks_of(flags.local_ranks_filter),
    )
    wanted = None if nowhere else flags.log_dir
    places = (wanted,) if wanted else here.temporary
    folder, *spares = (os.path.join(here.folder, place) for place in places)
    kept = wanted or streams.redirects or streams.tee
    return Logs(folder, temporary=not kept, torchrun=streams, spares=tuple(spares))


def ranks_of(text: str) -> frozenset[int]:
    """The local ranks of `--local-ranks-filter`. Raises `UsageError`."""
    try:
        return frozenset(int(rank) for rank in text.split(",") if rank.strip())
    except ValueError:
        raise UsageError(f"--local-ranks-filter: expected ranks such as 0,2, got {text!r}") from None
