"""The torchrun command line: a table of flags (torch/distributed/run.py, 2.13) and its parser.

argparse also matches abbreviations after the script. This parser passes all later words to the script.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, get_args

from distlaunch.contract import HANDLED_SIGNALS
from distlaunch.errors import UsageError
from distlaunch.job.spec import NumaMode

Counted = Literal["auto", "cpu", "gpu"]
"""Values of `--nproc-per-node` for which a machine's devices are counted."""
Fate = Literal["used", "no effect", "handed over", "refused", "used, or handed over", "used, or no effect"]
"""How `distlaunch torchrun` treats a flag. Handed over = distlaunch execs the torch agent."""

C10D_PORT = 29400
"""torch's default port for c10d."""


class Flag(NamedTuple):
    """One flag, stored in `field` of `Flags`: its `letter`, and whether PET_<FIELD> sets its default.

    `here` is how `distlaunch torchrun` treats the flag, and `why` is the reason if the flag is unused. Some
    flags are unused only if --master-addr or a static --rdzv-endpoint sets the endpoint. `key` is the key in
    the job file. If there is none, `in_file` is the comment in the job file. `left_out` explains why a job
    file doesn't need a value that only a shell could provide; "" = the value is needed.
    """

    letter: str = ""
    choices: tuple[str, ...] = ()
    from_environment: bool = True
    here: Fate = "used"
    why: str = ""
    key: str = ""
    in_file: str = ""
    left_out: str = ""
    field: str = ""

    @property
    def name(self) -> str:
        """Return the flag as users write it."""
        return "--" + self.field.replace("_", "-")

    @property
    def variable(self) -> str:
        """Return the environment variable that sets the flag's default; "" = none."""
        return f"PET_{self.field.upper()}" if self.from_environment else ""

    @property
    def default(self) -> Any:
        """Return torch's default."""
        return Flags._field_defaults[self.field]

    @property
    def kind(self) -> type:
        """Return the type of the value; bool for a switch, which takes no value."""
        return str if self.default is None else type(self.default)


_RANKS = "distlaunch assigns the ranks itself"
_FREE = "the ranks connect to a free port on the first node"
_ONE_FILE = "this file starts all nodes"
_FORK = "workers are started by fork and exec"
_FILTER = "filter the log files instead"
_SIGNALS = "SIGINT, SIGTERM, SIGHUP and SIGQUIT stop the job, and workers get SIGTERM"
_COMPLETION = "only torchrun itself prints a completion script"
_OR_TORCH: Fate = "used, or handed over"
_OR_NOT: Fate = "used, or no effect"


class Flags(NamedTuple):
    """A torchrun command line with torch's defaults, and the interpretation of its values."""

    nnodes: Annotated[str, Flag(here=_OR_TORCH, key="nodes")] = "1:1"
    nproc_per_node: Annotated[str, Flag(key="procs_per_node")] = "1"
    rdzv_backend: Annotated[str, Flag(here=_OR_TORCH, key="rendezvous.backend", left_out=_RANKS)] = "static"
    rdzv_endpoint: Annotated[str, Flag(key="rendezvous.endpoint", left_out=_FREE)] = ""
    rdzv_id: Annotated[str, Flag(key="rendezvous.id", left_out="each run gets its own ID")] = "none"
    rdzv_conf: Annotated[str, Flag(here=_OR_NOT, why=_RANKS, key="rendezvous.conf", left_out=_RANKS)] = ""
    standalone: Annotated[bool, Flag()] = False
    max_restarts: Annotated[int, Flag(key="restarts.max")] = 0
    monitor_interval: Annotated[float, Flag(here="no effect", why="exits are noticed immediately")] = 0.1
    start_method: Annotated[
        str, Flag(choices=("spawn", "fork", "forkserver"), here="no effect", why=_FORK)
    ] = "spawn"
    event_log_handler: Annotated[
        str, Flag(here="no effect", why="events.jsonl in the log directory contains all events")
    ] = "null"
    role: Annotated[str, Flag(key="role")] = "default"
    module: Annotated[bool, Flag("m", key="module")] = False
    no_python: Annotated[bool, Flag(key="command")] = False
    run_path: Annotated[bool, Flag(key="script", in_file="has no effect: Python runs the script itself")] = (
        False
    )
    log_dir: Annotated[str | None, Flag(key="logs.dir")] = None
    redirects: Annotated[str, Flag("r", key="logs.console")] = "0"
    tee: Annotated[str, Flag("t")] = "0"
    log_line_prefix_template: Annotated[
        str | None, Flag(in_file="has no effect: the prefix is [node:rank]")
    ] = None
    local_ranks_filter: Annotated[str, Flag(key="logs.console")] = ""
    duplicate_stdout_filters: Annotated[str, Flag(here="no effect", why=_FILTER)] = ""
    duplicate_stderr_filters: Annotated[str, Flag(here="no effect", why=_FILTER)] = ""
    node_rank: Annotated[int, Flag(in_file=f"is not needed: {_ONE_FILE}", left_out=_ONE_FILE)] = 0
    master_addr: Annotated[str, Flag(key="master_addr", left_out=_FREE)] = "127.0.0.1"
    master_port: Annotated[int, Flag(key="master_port", left_out=_FREE)] = 29500
    local_addr: Annotated[
        str | None,
        Flag(here=_OR_NOT, why="workers connect to --master-addr or --rdzv-endpoint", key="master_addr"),
    ] = None
    logs_specs: Annotated[
        str | None, Flag(from_environment=False, here="handed over", why="a plugin of torch's agent")
    ] = None
    numa_binding: Annotated[
        NumaMode | None, Flag(choices=get_args(NumaMode), from_environment=False, key="numa_binding")
    ] = None
    signals_to_handle: Annotated[str, Flag(in_file=f"has no equivalent: {_SIGNALS}")] = HANDLED_SIGNALS
    shutdown_timeout: Annotated[int, Flag(key="timeouts.stop")] = 30
    virtual_local_rank: Annotated[bool, Flag(key="virtual_local_rank")] = False
    print_completion: Annotated[str | None, Flag(from_environment=False, here="refused", why=_COMPLETION)] = (
        None
    )
    help: Annotated[bool, Flag("h", from_environment=False)] = False
    script: str = ""
    args: tuple[str, ...] = ()
    given: frozenset[str] = frozenset()
    unfilled: tuple[tuple[str, str], ...] = ()
    """(field, value) of each flag whose value only a shell could expand."""
    inherited: frozenset[str] = frozenset()
    """The fields set by PET_ variables."""

    def named(self, field: str) -> str:
        """Return the flag, or the PET_ variable that set it, for messages."""
        flag: Flag = FLAG[field]
        return flag.variable if field in self.inherited else flag.name

    @property
    def nodes(self) -> tuple[int, int]:
        """Return the minimum and maximum number of nodes. Raises `UsageError`."""
        low, _, high = self.nnodes.partition(":")
        try:
            fewest, most = int(low), int(high or low)
        except ValueError:
            fewest = most = 0
        if not 1 <= fewest <= most:
            hint = f"expected N or MIN:MAX with 1 ≤ MIN ≤ MAX, got {self.nnodes!r}"
            raise UsageError(f"{self.named('nnodes')}: {hint}")
        if self.standalone and fewest > 1:
            what = f"{self.named('standalone')} is for one node, but {self.named('nnodes')} is {self.nnodes}"
            raise UsageError(f"{what}: use --rdzv-backend c10d --rdzv-endpoint HOST:PORT instead")
        return (1, 1) if self.standalone else (fewest, most)

    @property
    def procs(self) -> int | Counted:
        """Return the number of workers per node. Raises `UsageError`."""
        match self.nproc_per_node:
            case "auto" | "cpu" | "gpu" as counted:
                return counted
            case "xpu":
                raise UsageError(f"{self.named('nproc_per_node')} xpu: can't count XPUs; pass a number")
            case text if text.isdecimal() and int(text):
                return int(text)
        hint = f"expected a number ≥ 1, auto, cpu or gpu, got {self.nproc_per_node!r}"
        raise UsageError(f"{self.named('nproc_per_node')}: {hint}")

    @property
    def kind(self) -> Literal["script", "module", "command"]:
        """Return the kind of program; as in torch, --run-path overrides the other flags."""
        if self.run_path or not (self.module or self.no_python):
            return "script"
        return "module" if self.module else "command"

    @property
    def alone(self) -> bool:
        """Check whether torch would start a single agent, with the number of nodes fixed at one."""
        return self.standalone or (self.rdzv_backend == "c10d" and self.nodes[1] == 1)

    @property
    def c10d(self) -> bool:
        """Check whether several launchers join through c10d, which numbers the nodes."""
        return self.rdzv_backend == "c10d" and self.nodes[1] > 1

    @property
    def endpoint(self) -> tuple[str, int]:
        """Return the endpoint of the store; as in torch, --rdzv-endpoint overrides --master-addr.

        Raises `UsageError` for an impossible port.
        """
        if not self.rdzv_endpoint:
            return self.master_addr, _port(self.named("master_port"), str(self.master_port))
        host, colon, port = self.rdzv_endpoint.rpartition(":")
        if colon and (port.isdecimal() or not {*"[]:/,"}.intersection(host + port)):
            return host.strip("[]"), _port(self.named("rdzv_endpoint"), port)
        return self.rdzv_endpoint.strip("[]"), C10D_PORT if self.rdzv_backend == "c10d" else self.master_port

    @property
    def conf(self) -> dict[str, str]:
        """Return the settings of `--rdzv-conf`. Raises `UsageError`."""
        found: dict[str, str] = {}
        for setting in self.rdzv_conf.split(",") if self.rdzv_conf.strip() else []:
            key, equals, value = (part.strip() for part in setting.partition("="))
            if not (key and equals):
                hint = f"expected key=value,…, got {self.rdzv_conf!r}"
                raise UsageError(f"{self.named('rdzv_conf')}: {hint}")
            found[key] = value
        return found

    @property
    def local_ranks(self) -> frozenset[int]:
        """Return the local ranks whose output is shown; none = all. Raises `UsageError`."""
        text = self.local_ranks_filter
        try:
            return frozenset(int(rank) for rank in text.split(",") if rank.strip())
        except ValueError:
            name = self.named("local_ranks_filter")
            raise UsageError(f'{name}: expected ranks such as "0,2", got {text!r}') from None

    def streams(self, field: Literal["redirects", "tee"]) -> dict[int, int] | int:
        """Return the streams (stdout = 1, stderr = 2) for all or some local ranks. Raises `UsageError`."""
        text = self.redirects if field == "redirects" else self.tee
        if re.fullmatch("[0-3]", text):
            return int(text)
        if re.fullmatch("[0-9]+:[0-3](,[0-9]+:[0-3])*", text):
            return {int(rank): int(std) for rank, std in re.findall("([0-9]+):([0-9])", text)}
        hint = f"expected 0 (nothing), 1 (stdout), 2 (stderr), 3 (both), or rank:N,…, got {text!r}"
        raise UsageError(f"{self.named(field)}: {hint}")


FLAGS = tuple(
    kind.__metadata__[0]._replace(field=field)
    for field, kind in Flags.__annotations__.items()
    if hasattr(kind, "__metadata__")
)
FLAG = {flag.field: flag for flag in FLAGS}
"""Flags by their field."""
_OWN_FLAGS = "(see `distlaunch torchrun --help`); put the script's own flags after the script"
_BY_LETTER = {flag.letter: flag for flag in FLAGS if flag.letter}


def parse_flags(
    words: Sequence[str],
    environ: Mapping[str, str],
    filled: Collection[str] = (),
    foreign: Collection[str] = (),
) -> Flags:
    """Parse the command line `words`. Raises `UsageError` with argparse's message on one line.

    Skips `foreign` flags, and flags whose value is in `filled`: the words that need a shell.
    """
    values: dict[str, Any] = {}
    unfilled: list[tuple[str, str]] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        word = rest.pop(0)
        if word in foreign:
            continue
        flag, value = _flag_of(word)
        if flag.kind is bool and value and not word.startswith("--"):
            rest.insert(0, f"-{value}")  # -mr3 means -m -r3
            value = None
        elif value is None and flag.kind is not bool:
            value = word = _next_value(flag, rest)
        if word in filled:
            unfilled.append((flag.field, str(value)))
        else:
            values[flag.field] = _convert(flag, value)
    values |= (inherited := _from_environment(environ, values))
    values["given"], values["inherited"] = frozenset(values), frozenset(inherited)
    if "--" in rest[:2]:  # as in argparse, it may follow the script
        rest.remove("--")
    if not rest and not values.get("help"):
        raise UsageError("no script given: put it after the flags and their values")
    script, args = "".join(rest[:1]), tuple(rest[1:])
    return Flags(**values, script=script, args=args, unfilled=tuple(unfilled))


def _from_environment(environ: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of PET_ variables for flags that are not on the command line."""
    found: dict[str, Any] = {}
    for flag in FLAGS:
        text = environ.get(flag.variable)
        if text is None or flag.field in given:
            continue
        if flag.kind is not bool:
            found[flag.field] = _convert(flag, text, flag.variable)
        elif text.strip().lower() not in ("", "0", "false"):
            found[flag.field] = True
    return found


def _flag_of(word: str) -> tuple[Flag, str | None]:
    """Return the flag that a word names or abbreviates, and the attached value, if any."""
    if not word.startswith("--"):
        if word[1] not in _BY_LETTER:
            raise UsageError(f"torchrun has no flag {word} {_OWN_FLAGS}")
        return _BY_LETTER[word[1]], word[2:].removeprefix("=") or None
    name, equals, value = word[2:].partition("=")
    wanted = name.replace("-", "_")
    found = [FLAG[wanted]] if wanted in FLAG else [flag for flag in FLAGS if flag.field.startswith(wanted)]
    if len(found) == 1:
        return found[0], value if equals else None
    if not found:
        raise UsageError(f"torchrun has no flag --{name} {_OWN_FLAGS}")
    names = ", ".join(flag.name for flag in found)
    raise UsageError(f"--{name} could mean {names}")


def _next_value(flag: Flag, rest: list[str]) -> str:
    if not rest or re.match(r"-(?!\d)", rest[0]):  # a negative number is a value
        raise UsageError(f"{flag.name} needs a value")
    return rest.pop(0)


def _convert(flag: Flag, value: str | None, name: str = "") -> Any:
    """Convert the text of a value; `name` is its flag or variable in error messages."""
    name = name or flag.name
    if flag.kind is bool:
        if value is not None:
            raise UsageError(f"{name} takes no value")
        return True
    text = str(value)
    if flag.choices and text not in flag.choices:
        expected = " or ".join((", ".join(flag.choices[:-1]), flag.choices[-1]))
        raise UsageError(f"{name}: expected {expected}, got {text!r}")
    try:
        converted = flag.kind(text)
    except ValueError:
        what = "a whole number" if flag.kind is int else "a number"
        raise UsageError(f"{name}: expected {what}, got {text!r}") from None
    if flag.kind is not str and not converted >= 0:
        raise UsageError(f"{name}: expected a number ≥ 0, got {text!r}")
    return converted


def _port(flag: str, text: str) -> int:
    if text.isdecimal() and int(text) <= 65535:
        return int(text)
    raise UsageError(f"{flag}: expected a port from 1 to 65535, got {text!r}")
