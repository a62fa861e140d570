"""Converts a torchrun command line to a job on this node, and describes how its launchers gather."""

import os.path
import re
import signal
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from distlaunch.compat.flags import FLAG, FLAGS, Flags
from distlaunch.errors import UsageError
from distlaunch.job import spec as job
from distlaunch.job.text import is_loopback, literal
from distlaunch.schedulers import TABLE, step_size, step_title, task_number
from distlaunch.transports.gathering import Arrival, Gathering
from distlaunch.wording import counted

_UNHANDLED = ("SIGKILL", "SIGSTOP", "SIGTSTP", "SIGTTIN", "SIGTTOU")
FILLED = re.compile(r"\$(?:(\$)|local_rank\b|\{local_rank\})")
"""What torchrun replaces in an argument."""
_RUN_PATH = "import runpy,sys; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
_TRUE, _FALSE = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")
_OF_TORCH = {
    "TORCHELASTIC_ENABLE_FILE_TIMER": "1",
    "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": r"[\d.]*[1-9].*",
}
"""Variables for torch's agent, each with a pattern of the values that have an effect."""
JOIN_TIMEOUTS = ("join_timeout", "timeout")
"""Settings of `--rdzv-conf` that limit the wait for other nodes. The first overrides the second."""
_USED = ("is_host", *JOIN_TIMEOUTS, "last_call_timeout", "store_type")


class Here(NamedTuple):
    """The context of the command line; `temporary` lists parents for temporary directories, best first."""

    directory: str
    hostname: str
    python: str
    temporary: tuple[str, ...]
    gpus: int
    cpus: int
    environ: Mapping[str, str]


def left_to_torch(flags: Flags, environ: Mapping[str, str]) -> str:
    """Return a flag or variable that only torch's elastic agent supports; "" = none."""
    for name, effective in _OF_TORCH.items():
        if re.fullmatch(effective, environ.get(name, "")):
            return f"{name}={environ[name]}"
    fewest, most = flags.nodes
    for flag in FLAGS:
        if flag.here == "handed over" and flag.field in flags.given:
            return f"{flags.named(flag.field)} {getattr(flags, flag.field)}"
    if flags.alone:
        return ""
    if flags.rdzv_backend not in ("static", "c10d"):
        return f"{flags.named('rdzv_backend')} {flags.rdzv_backend}"
    if fewest != most and flags.rdzv_backend == "static":
        return f"{flags.named('nnodes')} {flags.nnodes} without {flags.named('rdzv_backend')} c10d"
    store = flags.conf.get("store_type", "tcp").lower()
    return f"{flags.named('rdzv_conf')} store_type={store}" if flags.c10d and store != "tcp" else ""


def flag_messages(flags: Flags) -> list[str]:
    """Return one line for each flag that has no effect. Raises `UsageError` for refused flags."""
    given = [flag for flag in FLAGS if flag.field in flags.given]
    for flag in given:
        if flag.here == "refused":
            raise UsageError(f"{flag.name}: {flag.why}")
    if flags.no_python and flags.module and not flags.run_path:
        raise UsageError("--no-python and --module can't be combined")
    static = flags.rdzv_backend == "static" and not chooses_endpoint(flags)
    unused = [
        f"{flags.named(flag.field)} has no effect: {flag.why}"
        for flag in given
        if not (flag.field == "rdzv_conf" and _has_only_timeouts(flags))
        if flag.here == "no effect" or (flag.here == "used, or no effect" and static)
    ]
    unknown = [name for name, known in _signals(flags).items() if name and not known]
    return [*unused, *(f"--signals-to-handle: ignoring {name}, which can't be handled" for name in unknown)]


def _has_only_timeouts(flags: Flags) -> bool:
    """Check whether --rdzv-conf contains only join timeouts, for several nodes. Raises `UsageError`."""
    return {*flags.conf} <= {*JOIN_TIMEOUTS} and flags.nodes[1] > 1


def job_of(flags: Flags, here: Here) -> job.JobSpec:
    """Return this node's job. Other nodes may have their own launchers."""
    fewest, most = flags.nodes
    chosen = chooses_endpoint(flags)
    host, port = flags.endpoint
    procs = procs_of(flags, here)
    args = (flags.script, *flags.args) if flags.run_path else flags.args
    fills = "$" in "".join(args)
    unnamed = chosen and flags.rdzv_backend != "c10d" and "rdzv_id" not in flags.given
    return job.JobSpec(
        name=flags.rdzv_id if flags.rdzv_id != "none" else "torchrun",
        nodes=(job.NodeSpec(here.hostname, procs=procs, path="--nproc-per-node"),),
        program=job.Program(
            flags.kind,
            ("-c" if flags.run_path else flags.script,),
            workdir=here.directory,
            args=(*([_RUN_PATH] if flags.run_path else []), *(map(argument, args) if fills else args)),
            python=here.environ.get("PYTHON_EXEC") or here.python,
            role=flags.role,
        ),
        logs=_logs(flags, here),
        rendezvous=job.RendezvousSpec(
            flags.local_addr if chosen else host,
            None if chosen else port,
            # None = the run's ID. torch also generates an ID, but with c10d only if the given one is empty.
            None if flags.standalone or unnamed else flags.rdzv_id or ("" if chosen else "none"),
        ),
        limits=job.Limits(join_s=job.FOREVER_S, stop_s=_stop_s(flags, here)),
        membership=job.Membership(grow="now" if fewest < most else "restart"),
        restarts=job.Restarts(flags.max_restarts, 0.0, job.FOREVER_S, repeat=True),
        placement=job.Placement(
            flags.virtual_local_rank, job.Binding(flags.numa_binding) if flags.numa_binding else None
        ),
        source="the command line",
        invocation=job.Invocation(
            placeholders=fills, shares_stdio=True, signals=tuple(filter(None, _signals(flags).values()))
        ),
    )


def argument(word: str) -> str:
    """Return an argument as written in a job file. torch fills in `${local_rank}`, and turns `$$` to `$`."""
    text = FILLED.sub(lambda found: found[1] or "\0", word)
    return literal(text).replace("\0", "{local_rank}")


def procs_of(flags: Flags, here: Here) -> int:
    """Return the number of workers on this node. Raises `UsageError`."""
    procs = flags.procs
    if procs == "gpu" and not here.gpus:
        look = "check the driver, CUDA_VISIBLE_DEVICES, and the GPUs of the job or container"
        what = f"no GPU is visible; {look}; on a CPU node, pass a number"
        raise UsageError(f"{flags.named('nproc_per_node')} gpu: {what}")
    counts = {"cpu": here.cpus, "auto": here.gpus or here.cpus, "gpu": here.gpus}
    return procs if isinstance(procs, int) else counts[procs]


def _stop_s(flags: Flags, here: Here) -> float:
    text = here.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    if text is None or "shutdown_timeout" in flags.given:
        return float(min(flags.shutdown_timeout, job.FOREVER_S))
    if not text.isdecimal():
        what = f"expected a whole number of seconds ≥ 0, got {text!r}"
        raise UsageError(f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT: {what}")
    return float(min(int(text), job.FOREVER_S))


def _signals(flags: Flags) -> dict[str, str]:
    """Map the names in `--signals-to-handle` to system names; "" = can't be handled."""
    names = [name.strip() for name in flags.signals_to_handle.split(",")]
    known = {name: number.name for name, number in signal.Signals.__members__.items()}  # SIGPOLL is SIGIO
    return {name: known.get(name, "") if name not in _UNHANDLED else "" for name in names}


def _logs(flags: Flags, here: Here) -> job.Logs:
    """Return the output settings. If no files are kept, the run directory is temporary."""
    nowhere = flags.log_dir == "/dev/null"  # as in torch: no files, all output is shown
    template = flags.log_line_prefix_template or here.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
    redirects, tee = flags.streams("redirects"), flags.streams("tee")
    redirects, tee = (0, 0) if nowhere else (redirects, tee)
    streams = job.TorchrunLogs(redirects, tee, template or job.TorchrunLogs().prefix, flags.local_ranks)
    wanted = None if nowhere else flags.log_dir
    places = (wanted,) if wanted else here.temporary
    directory, *spares = (os.path.join(here.directory, place) for place in places)
    kept = wanted or streams.redirects or streams.tee
    return job.Logs(directory, temporary=not kept, torchrun=streams, spares=tuple(spares))


# Endpoints of ranks and launchers


def chooses_endpoint(flags: Flags) -> bool:
    """Check whether torch chooses the endpoint, as on one node without a static endpoint.

    The c10d endpoint is the agents' store, which the ranks of a single node never use.
    """
    named = flags.rdzv_endpoint or "master_port" in flags.given
    return flags.alone or (flags.nodes[1] == 1 and not named)


def gathering_messages(flags: Flags) -> Iterator[str]:
    """Yield the messages to show before the launchers of several nodes gather."""
    if flags.c10d:
        if idle := [key for key in flags.conf if key not in _USED]:
            known = "is_host, join_timeout and last_call_timeout"
            yield f"{flags.named('rdzv_conf')} {', '.join(idle)} has no effect: only {known} are used"
        if "local_addr" in flags.given:
            yield f"{flags.named('local_addr')} has no effect: {FLAG['local_addr'].why}"
    host, _ = flags.endpoint
    if is_loopback(host):
        hint = "is reachable only from this machine; for nodes on other machines, pass node 0's address"
        yield f"{_endpoint_flag(flags)} {host} {hint}"


def gathering_of(flags: Flags, name: str, environ: Mapping[str, str]) -> Gathering:
    """Describe how a launcher on the machine `name` joins the others. Raises `UsageError`."""
    host, port = flags.endpoint
    fewest, most = flags.nodes
    c10d = flags.c10d
    _check_endpoint(flags, host, port, environ)
    if not c10d and flags.node_rank >= most:
        what = f"expected 0 to {most - 1}, with {flags.named('nnodes')} {most}"
        raise UsageError(f"{flags.named('node_rank')} {flags.node_rank}: {what}")
    number = flags.node_rank if "node_rank" in flags.given or not c10d else None
    task = task_number(environ) if c10d else None
    serves, flag = _is_host(flags) if c10d else flags.node_rank == 0, _endpoint_flag(flags)
    if c10d:
        runs, elsewhere = f"a launcher is running on {host} or with --rdzv-conf is_host=1", ""
        taken = "set is_host=1 on only one node, or " if serves else ""
    else:
        runs = f"node 0 is running, that {flag} is its address"
        elsewhere = f"if this isn't node 0, set --node-rank; if it is, set {flag} to its address, or, behind "
        elsewhere += "NAT, use --rdzv-backend c10d on all nodes and --rdzv-conf is_host=1 on this one"
        taken = "if this isn't node 0, set --node-rank; otherwise, "
    return Gathering(
        Arrival(f"--rdzv-id {flags.rdzv_id}", name, (fewest, most), number, task),
        hosts=(host,),
        ports=(port,),
        serves=serves,
        wait_s=_seconds(flags, JOIN_TIMEOUTS, Gathering._field_defaults["wait_s"]),
        last_call_s=_seconds(flags, ("last_call_timeout",), Gathering._field_defaults["last_call_s"]),
        ordered=not c10d,
        unreached=f"check that {runs}, and that no firewall blocks the port",
        elsewhere=elsewhere,
        taken=f"{taken}use another port above 1023 on all nodes",
    )


def _is_host(flags: Flags) -> bool | None:
    """Return whether this launcher hosts the endpoint, according to is_host; None = the address decides."""
    text = flags.conf.get("is_host", "").lower()
    if text not in ("", *_TRUE, *_FALSE):
        raise UsageError(f"{flags.named('rdzv_conf')} is_host: expected 1 or 0, got {text!r}")
    return text in _TRUE if text else None


def _seconds(flags: Flags, keys: tuple[str, ...], default_s: float) -> float:
    given = [(key, flags.conf[key]) for key in keys if key in flags.conf]
    for key, text in given[:1]:
        if not text.isdecimal() or not int(text):
            what = f"expected a whole number of seconds ≥ 1, got {text!r}"
            raise UsageError(f"{flags.named('rdzv_conf')} {key}: {what}")
        return float(int(text))
    return default_s


def _check_endpoint(flags: Flags, host: str, port: int, environ: Mapping[str, str]) -> None:
    """Raise `UsageError` if several nodes can't use the endpoint, for example because a variable was empty.

    With a loopback address, each of several machines would act as the endpoint's host.
    """
    flag, text = _endpoint_flag(flags), flags.rdzv_endpoint or host
    if not re.fullmatch(r"[^\s/@,\[]+", host):
        why = ", without blanks, commas, brackets, / or @" if host else "; is a variable in it empty?"
        raise UsageError(f"{flag} {text!r}: expected one host name or address{why}")
    if not 0 < port < 65536:
        flag, text = (flag, text) if flags.rdzv_endpoint else (flags.named("master_port"), str(port))
        raise UsageError(f"{flag} {text!r}: several nodes need a port from 1 to 65535")
    scheduler, count, tasks = step_size(environ)
    whose = step_title(scheduler) if scheduler else ""
    if tasks > flags.nodes[1]:
        nodes, name = counted(count, "node"), flags.named("nnodes")
        what, advice = f"this {whose} has {tasks} tasks on {nodes}", "start one launcher on each node"
        if flags.nodes[1] != count:
            what, advice = f"{what}, but {name} is {flags.nnodes}", f"set {name} to {count}, and {advice}"
        raise UsageError(f"{what}: {advice}: {TABLE[scheduler].one_each.format(count)}")
    if flags.c10d and count > 1 and is_loopback(host):
        hint = f"each of the {count} nodes of this {whose} would wait for the others at its own address"
        raise UsageError(f"{flag} {host}: {hint}; pass the first node's name")


def _endpoint_flag(flags: Flags) -> str:
    """Return the flag that sets the endpoint, or should set it."""
    unsaid = flags.rdzv_backend == "c10d" and "master_addr" not in flags.given
    return flags.named("rdzv_endpoint" if flags.rdzv_endpoint or unsaid else "master_addr")
