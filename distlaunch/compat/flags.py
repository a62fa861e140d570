"""torchrun's flags (torch/distributed/run.py, 2.13): the one table of what each is and what becomes of it."""

from typing import Any, Literal, NamedTuple, get_args

from distlaunch.contract import HANDLED_SIGNALS
from distlaunch.errors import UsageError
from distlaunch.job.spec import NumaMode

Kind = Literal["text", "whole", "number", "switch"]
Fate = Literal["used", "no effect", "handed over", "refused", "used, or handed over", "used, or no effect"]
"""What `distlaunch torchrun` makes of a flag: to hand over is to become torch's own agent."""


class Flags(NamedTuple):
    """A command line of torchrun's; defaults as torch has them."""

    nnodes: str = "1:1"
    nproc_per_node: str = "1"
    rdzv_backend: str = "static"
    rdzv_endpoint: str = ""
    rdzv_id: str = "none"
    rdzv_conf: str = ""
    standalone: bool = False
    max_restarts: int = 0
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    event_log_handler: str = "null"
    role: str = "default"
    module: bool = False
    no_python: bool = False
    run_path: bool = False
    log_dir: str | None = None
    redirects: str = "0"
    tee: str = "0"
    log_line_prefix_template: str | None = None
    local_ranks_filter: str = ""
    duplicate_stdout_filters: str = ""
    duplicate_stderr_filters: str = ""
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    local_addr: str | None = None
    logs_specs: str | None = None
    numa_binding: NumaMode | None = None
    signals_to_handle: str = HANDLED_SIGNALS
    shutdown_timeout: int = 30
    virtual_local_rank: bool = False
    print_completion: str | None = None
    help: bool = False
    script: str = ""
    args: tuple[str, ...] = ()
    given: frozenset[str] = frozenset()
    unfilled: tuple[tuple[str, str], ...] = ()
    """(field, value) of flags whose value only a shell knows; field "" = a word that stands for flags."""


class Flag(NamedTuple):
    """One flag: its `field` in `Flags`, a letter, and whether PET_<FIELD> is its default.

    `here` is what `distlaunch torchrun` makes of it; where that is not to use it, or `only_static`, where
    --master-addr or a static --rdzv-endpoint says where the ranks meet, `why` says why.
    `key` is that of a job file for it; `in_file` is what a job file says of one that it has no key for,
    `left_out` why it doesn't need one whose value only a shell knows; "" = it does.
    """

    field: str
    letter: str = ""
    choices: tuple[str, ...] = ()
    from_environment: bool = True
    here: Fate = "used"
    why: str = ""
    only_static: bool = False
    key: str = ""
    in_file: str = ""
    left_out: str = ""

    @property
    def name(self) -> str:
        """As users write it."""
        return "--" + self.field.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable that is its default; "" = none."""
        return f"PET_{self.field.upper()}" if self.from_environment else ""

    @property
    def default(self) -> Any:
        """Torch's."""
        return Flags._field_defaults[self.field]

    @property
    def kind(self) -> Kind:
        """What its value is."""
        kinds: dict[type, Kind] = {bool: "switch", int: "whole", float: "number"}
        return kinds.get(type(self.default), "text")


_RANKS = "distlaunch assigns the ranks itself"
_FREE = "the ranks meet on the first node, at a free port"
_FILTER = "filter the log files instead"
_SIGNALS = "SIGINT, SIGTERM, SIGHUP and SIGQUIT end the job, and workers get SIGTERM"
FLAGS = (
    Flag("nnodes", here="used, or handed over", key="nodes"),
    Flag("nproc_per_node", key="procs_per_node"),
    Flag("rdzv_backend", here="used, or handed over", key="rendezvous.backend", left_out=_RANKS),
    Flag("rdzv_endpoint", key="rendezvous.endpoint", left_out=_FREE),
    Flag("rdzv_id", key="rendezvous.id", left_out="each run gets its own id"),
    Flag(
        "rdzv_conf",
        here="used, or no effect",
        why=_RANKS,
        only_static=True,
        key="rendezvous.conf",
        left_out=_RANKS,
    ),
    Flag("standalone"),
    Flag("max_restarts", key="restarts.max"),
    Flag("monitor_interval", here="no effect", why="exits are seen at once"),
    Flag(
        "start_method",
        choices=("spawn", "fork", "forkserver"),
        here="no effect",
        why="workers are started by fork and exec",
    ),
    Flag("event_log_handler", here="no effect", why="events.jsonl in the log folder has all events"),
    Flag("role", key="role"),
    Flag("module", "m", key="module"),
    Flag("no_python", key="command"),
    Flag("run_path", key="script", in_file="has no effect: Python runs the script itself"),
    Flag("log_dir", key="logs.dir"),
    Flag("redirects", "r", key="logs.console"),
    Flag("tee", "t"),
    Flag("log_line_prefix_template", in_file="has no effect: the prefix is [node:rank]"),
    Flag("local_ranks_filter", key="logs.console"),
    Flag("duplicate_stdout_filters", here="no effect", why=_FILTER),
    Flag("duplicate_stderr_filters", here="no effect", why=_FILTER),
    Flag(
        "node_rank",
        in_file="is not needed: this one file starts all nodes",
        left_out="this one file starts all nodes",
    ),
    Flag("master_addr", key="master_addr", left_out=_FREE),
    Flag("master_port", key="master_port", left_out=_FREE),
    Flag(
        "local_addr",
        here="used, or no effect",
        why="workers connect to --master-addr or --rdzv-endpoint",
        only_static=True,
        in_file="is one node's: set that node's address in nodes",
    ),
    Flag(
        "logs_specs",
        from_environment=False,
        here="handed over",
        why="a plug-in of torch's agent",
        in_file="has no equivalent: it is a plug-in of torch's agent",
    ),
    Flag("numa_binding", choices=get_args(NumaMode), from_environment=False, key="numa_binding"),
    Flag("signals_to_handle", in_file=f"has no equivalent: {_SIGNALS}"),
    Flag("shutdown_timeout", key="timeouts.stop"),
    Flag("virtual_local_rank", key="virtual_local_rank"),
    Flag(
        "print_completion",
        from_environment=False,
        here="refused",
        why="distlaunch torchrun prints no completion; torchrun does",
    ),
    Flag("help", "h", from_environment=False),
)
FLAG = {flag.field: flag for flag in FLAGS}
"""Each flag by its field."""


def parse_std(name: str, text: str) -> dict[int, int] | int:
    """`0` … `3`, or `0:1,1:3`: which of stdout (1) and stderr (2), for all local ranks or for some."""
    try:
        if ":" not in text:
            return _std(text)
        pairs = (pair.split(":") for pair in text.split(","))
        return {int(rank): _std(std) for rank, std in pairs}
    except ValueError:
        text = f"expected 0 (nothing), 1 (stdout), 2 (stderr), 3 (both), or rank:N,…, got {text!r}"
        raise UsageError(f"--{name}: {text}") from None


def _std(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 3:
        raise ValueError(text)
    return value


def node_range(text: str) -> tuple[int, int]:
    """(fewest, most) of `--nnodes`: `N` or `MIN:MAX`."""
    try:
        low, _, high = text.partition(":")
        fewest, most = int(low), int(high or low)
    except ValueError:
        raise UsageError(f"--nnodes: expected N or MIN:MAX, got {text!r}") from None
    if not 1 <= fewest <= most:
        raise UsageError(f"--nnodes: expected 1 ≤ MIN ≤ MAX, got {text!r}")
    return fewest, most


Counted = Literal["auto", "cpu", "gpu"]
"""Words of `--nproc-per-node` for what a machine has."""


def parse_procs(text: str) -> int | Counted:
    """Workers on a node, of `--nproc-per-node`. Raises `UsageError`."""
    match text:
        case "auto" | "cpu" | "gpu":
            return text
        case "xpu":
            raise UsageError("--nproc-per-node xpu: can't count XPUs; pass a number")
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--nproc-per-node: expected a number ≥ 1, auto, cpu or gpu, got {text!r}")
    return int(text)


def program_kind(flags: Flags) -> Literal["script", "module", "command"]:
    """What the script is. --run-path wins over the others, as torch has it."""
    if flags.run_path or not (flags.module or flags.no_python):
        return "script"
    return "module" if flags.module else "command"


def is_alone(flags: Flags, most: int) -> bool:
    """Whether torch would start agents that negotiate with none: one node, whose number never changes."""
    return flags.standalone or (flags.rdzv_backend == "c10d" and most == 1)
