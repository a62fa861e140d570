"""torchrun's c10d rendezvous on several nodes, as ours: where launchers meet, and what each tells there."""

from collections.abc import Iterator

from distlaunch.dropin.flags import FLAG, Flags, node_range
from distlaunch.errors import UsageError
from distlaunch.job.spec import Arrival

PORT = 29400
"""torch's default, of c10d only."""
_TRUE, _FALSE = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")
_USED = ("is_host", "join_timeout", "timeout", "store_type")


def meets(flags: Flags) -> bool:
    """Whether several launchers are to meet by c10d, which then number their nodes themselves."""
    return flags.rdzv_backend == "c10d" and not flags.standalone and node_range(flags.nnodes)[1] > 1


def left_to_torch(flags: Flags) -> str:
    """What only torch's own agent can do when launchers `meets`; "" if nothing."""
    kind = conf_of(flags).get("store_type", "tcp").lower()
    if kind != "tcp":
        return f"--rdzv-conf store_type={kind}"
    return ""


def conf_of(flags: Flags) -> dict[str, str]:
    """The settings of `--rdzv-conf`. Raises `UsageError`."""
    found: dict[str, str] = {}
    for setting in flags.rdzv_conf.split(",") if flags.rdzv_conf.strip() else []:
        key, equals, value = (part.strip() for part in setting.partition("="))
        if not (key and equals):
            raise UsageError(f"--rdzv-conf: expected key=value,…, got {flags.rdzv_conf!r}")
        found[key] = value
    return found


def notices(flags: Flags) -> Iterator[str]:
    """One line for each thing that was given and has no meaning here."""
    idle = [key for key in conf_of(flags) if key not in _USED]
    if idle:
        yield f"--rdzv-conf {', '.join(idle)} has no effect: only is_host and join_timeout have one here"
    if "local_addr" in flags.given:
        yield f"--local-addr has no effect: {FLAG['local_addr'].why}"


def wait_s(flags: Flags, default_s: float) -> float:
    """How long to wait for all nodes. Raises `UsageError`."""
    conf = conf_of(flags)
    key = "join_timeout" if "join_timeout" in conf else "timeout"
    text = conf.get(key)
    if text is None:
        return default_s
    if not text.isdecimal() or not int(text):
        raise UsageError(f"--rdzv-conf {key}: expected a number of seconds ≥ 1, got {text!r}")
    return float(int(text))


def arrival_of(flags: Flags, name: str, task: int | None) -> Arrival:
    """What this launcher tells the others; `task` is the scheduler's number. Raises `UsageError`."""
    text = conf_of(flags).get("is_host", "").lower()
    if text not in ("", *_TRUE, *_FALSE):
        raise UsageError(f"--rdzv-conf is_host: expected 1 or 0, got {text!r}")
    given = flags.node_rank if "node_rank" in flags.given else None
    return Arrival(flags.rdzv_id, name, text in _TRUE if text else None, (given, task))
