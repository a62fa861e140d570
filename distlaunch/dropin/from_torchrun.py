"""A job file that does what a torchrun command line does."""

import os.path
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from distlaunch.contract import RESERVED
from distlaunch.dropin.calls import Call, parse_call
from distlaunch.dropin.flags import FLAGS, Flags, node_range, parse_std
from distlaunch.dropin.job_text import (
    Data,
    Draft,
    Note,
    Offer,
    args_of,
    as_path,
    brace_notes,
    checked,
    gpus_offer,
    joined,
)
from distlaunch.dropin.over_ssh import UNNAMED, Remote
from distlaunch.dropin.torchrun import endpoint_of, notices, ranks_of
from distlaunch.dropin.words import Command
from distlaunch.errors import UsageError
from distlaunch.job.hosts import host_error
from distlaunch.plan.layout import is_loopback

SOURCE = "the command line"
LISTED_HOSTS = 16
"""More hosts than this stand as a range."""
_PATHS = "relative paths are relative to this file: keep it in the folder where the command was run"
_NO_SHELL = "a job file expands no shell variables"
_NO_HOME = "a job file expands ~ only in paths such as script and workdir"
_NO_PATTERN = "a job file expands no patterns"
_SSH_STARTS = "ssh starts a command in the home of its user"
_FREE = "the ranks meet on the first node, at a free port"
_LEFT_OUT = {
    "": "write its flags into the command, or their keys here",
    "nnodes": "list as many nodes as it stood for",
    "nproc_per_node": "without procs_per_node there is one worker per GPU",
    "node_rank": "this one file starts all nodes",
    "rdzv_id": "each run has an id of its own",
    "rdzv_backend": "distlaunch assigns the ranks itself",
    "rdzv_conf": "distlaunch assigns the ranks itself",
    "max_restarts": "set restarts.max",
    "shutdown_timeout": "set timeouts.stop",
    "log_dir": "set logs.dir",
    "role": "set role",
    **dict.fromkeys(("rdzv_endpoint", "master_addr", "master_port"), _FREE),
}
"""What to do about a flag with a value that only a shell knows; else the value has to be written."""


class Setting(NamedTuple):
    """One torchrun command, this machine's CPUs, where ssh runs it, and words whose ~ a shell replaces."""

    call: Call
    cpus: int
    remote: Remote | None = None
    homes: tuple[str, ...] = ()

    @property
    def flags(self) -> Flags:
        """torchrun's own words."""
        return self.call.flags

    def path(self, text: str) -> str:
        """A path, in which a ~ stays what it was to the shell: a home, or part of a name."""
        # An interpreter is named by the launcher's path, beside which it stands.
        beside = f"{os.path.dirname(text)}/torchrun"
        home = any(word in (text, beside) or word.endswith(f"={text}") for word in self.homes)
        return text if home else as_path(text)

    def unknown(self, field: str) -> bool:
        """Whether only a shell knows what this flag says, or whether it is there at all."""
        unfilled = dict(self.flags.unfilled)
        return field in unfilled or ("" in unfilled and field not in self.flags.given)

    @property
    def nodes(self) -> tuple[int, int]:
        """(fewest, most); some, where only a shell knows how many."""
        if self.flags.standalone:
            return 1, 1
        return (2, 2) if "nnodes" in dict(self.flags.unfilled) else node_range(self.flags.nnodes)

    @property
    def master(self) -> tuple[str | None, int | None]:
        """Host and port of rank 0's store, as far as the command says something that holds elsewhere."""
        flags = self.flags
        alone_with_c10d = flags.rdzv_backend == "c10d" and self.nodes[1] == 1
        if flags.standalone or alone_with_c10d or flags.rdzv_backend.startswith("etcd"):
            return None, None
        host, port = endpoint_of(flags)
        if error := host_error(host):
            raise UsageError(f"{SOURCE}: --master-addr or --rdzv-endpoint: {error}")
        named = {"master_port", "rdzv_endpoint"} & flags.given
        # Port 0 asks for a free one; without a port one node needs no endpoint.
        far = not is_loopback(host) and (named or self.nodes[1] > 1)
        return (host if far else None), (port or None if named else None)


def torchrun_draft(
    command: Command, cpus: int, around: Sequence[str] = (), remote: Remote | None = None
) -> Draft:
    """The job of a command; `around` are comments on what stood around it. Raises our errors."""
    setting = Setting(parse_call(command.words, command.filled), cpus, remote, command.homes)
    unfilled = (*_unfilled(setting.flags), *_unexpanded(setting.call, command))
    top = [*([] if remote else [_PATHS]), *around, *unfilled, *notices(setting.flags)]
    parts = (part(setting) for part in _PARTS)
    return checked(gpus_offer(joined([Draft(notes=tuple(map(Note, top))), *parts])), SOURCE)


def _unfilled(flags: Flags) -> Iterator[str]:
    """What to do about the flags that were left out."""
    for field, value in flags.unfilled:
        name = f"--{field.replace('_', '-')} " if field else ""
        yield f"left out: {name}{value}: {_LEFT_OUT.get(field, f'{_NO_SHELL}; write the value')}"


def _unexpanded(call: Call, command: Command) -> Iterator[str]:
    """What stays as it is, though a shell would have put something else there."""
    env = (text for name, text in call.env.items() if not name.startswith("PET_"))
    words = (call.flags.script, *call.flags.args, *env)
    left = [name for name in command.variables if any(name in word for word in words)]
    if left:
        yield f"{_NO_SHELL}: write the values of {' '.join(left)}"
    args = set(call.flags.args)
    of_env = {f"{name}={text}" for name, text in call.env.items() if not name.startswith("PET_")}
    if homes := [word for word in command.homes if word in args | of_env]:
        yield f"{_NO_HOME}: write the whole path for {' '.join(homes)}"
    if patterns := [word for word in command.patterns if word in {call.flags.script, *args}]:
        yield f"{_NO_PATTERN}: write the words for {' '.join(patterns)}"


def _program(setting: Setting) -> Draft:
    flags, call = setting.flags, setting.call
    kind = "module" if flags.module else "command" if flags.no_python else "script"
    path = setting.path(flags.script) if kind == "script" or "/" in flags.script else flags.script
    legacy = ["--local-rank={local_rank}"] if call.local_rank_flag else []
    keys: dict[str, Data] = {kind: [path] if kind == "command" else path, **args_of(flags.args, legacy)}
    if call.python:
        keys["python"] = setting.path(call.python)
    return Draft(keys, tuple(_program_notes(setting)))


def _program_notes(setting: Setting) -> Iterator[Note]:
    if setting.flags.run_path:
        yield Note("--run-path has no effect: Python runs the script itself", "script")
    if setting.call.local_rank_flag:
        yield Note(
            "torch.distributed.launch passes --local-rank; scripts for torch 1.x expect --local_rank", "args"
        )
    yield from brace_notes(setting.flags.args)


def _nodes(setting: Setting) -> Draft:
    fewest, most = setting.nodes
    if most == 1:
        return _lone(setting.remote)
    hosts, first = _hosts(most, setting.master[0]), setting.master[0]
    advice = "the first is rank 0's" if first else "rank 0's first"
    notes = [Note(f"put the names of the machines here, as your ssh knows them; {advice}", "nodes")]
    if "node_rank" in setting.flags.given:
        notes.append(Note("--node-rank is not needed: this one file starts all nodes", "nodes"))
    elastic: dict[str, Data] = {"min_nodes": fewest} if fewest < most else {}
    nodes = Draft({"nodes": _with(setting, hosts), **elastic}, tuple(notes))
    return joined([nodes, _workdir(setting.remote)])


def _lone(remote: Remote | None) -> Draft:
    """The one host that ssh ran the command on."""
    if not remote:
        return Draft()
    note = Note("put the name of the machine here, as your ssh knows it", "nodes")
    nodes = Draft({"nodes": [remote.host]}, (note,) if remote.host == UNNAMED else ())
    return joined([nodes, _workdir(remote)])


def _workdir(remote: Remote | None) -> Draft:
    if not remote:
        return Draft()
    notes = (Note(_SSH_STARTS, "workdir"),) if remote.workdir == "~" else ()
    return Draft({"workdir": remote.workdir}, notes)


def _with(setting: Setting, hosts: list[str]) -> list[str]:
    """The hosts with that of ssh in the place of the node that its command started."""
    rank, remote = setting.flags.node_rank, setting.remote
    if not remote or remote.host in (*hosts, UNNAMED) or not rank < len(hosts) <= LISTED_HOSTS:
        return hosts
    at = rank if "node_rank" in setting.flags.given else int(setting.master[0] is not None)
    return [remote.host if i == at else host for i, host in enumerate(hosts)]


def _hosts(count: int, first: str | None) -> list[str]:
    if count > LISTED_HOSTS:
        return [first or "HOST0", f"HOST[1-{count - 1}]"]
    return [first or "HOST0", *(f"HOST{i}" for i in range(1, count))]


def _procs(setting: Setting) -> Draft:
    match text := setting.flags.nproc_per_node:
        case _ if setting.unknown("nproc_per_node"):
            return Draft()
        case "gpu":
            return Draft()
        case "auto":
            why = "one worker per GPU; on a node without GPUs torchrun starts one per CPU, distlaunch one"
            return Draft(notes=(Note(f"--nproc-per-node auto: {why}", "procs_per_node"),))
        case "cpu":
            note = Note("--nproc-per-node cpu: as many as this machine has", "procs_per_node")
            return Draft({"gpus_per_node": 0, "procs_per_node": setting.cpus}, (note,))
        case "xpu":
            raise UsageError("--nproc-per-node xpu: XPUs are not counted; pass a number")
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--nproc-per-node: expected a number ≥ 1, auto, cpu or gpu, got {text!r}")
    return Draft({"procs_per_node": int(text)})


def _meeting(setting: Setting) -> Draft:
    host, port = setting.master
    flags = setting.flags
    keys: dict[str, Data] = {}
    if host:
        keys["master_addr"] = host
    if port:
        keys["master_port"] = port
    if "rdzv_id" in flags.given and flags.rdzv_id and not flags.standalone:
        keys["rendezvous"] = {"id": flags.rdzv_id}
    far = "local_addr" in flags.given and flags.rdzv_backend != "static" and setting.nodes[1] > 1
    notes = (Note("--local-addr is one node's: set that node's address in nodes", "nodes"),) if far else ()
    return joined([Draft(keys, notes), _agents(setting)])


def _agents(setting: Setting) -> Draft:
    """torch's own elastic agents, where they would have had something to do."""
    flags, name = setting.flags, setting.flags.rdzv_backend
    if flags.standalone or name == "static" or (name == "c10d" and setting.nodes[1] == 1):
        return Draft()
    told = f"--rdzv-backend {name}: distlaunch assigns the ranks itself and needs no store"
    return Draft(
        notes=(Note(told, "rendezvous"),), offers=agents_offer(name, flags.rdzv_endpoint, flags.rdzv_conf)
    )


def agents_offer(backend: str, endpoint: str, conf: str = "") -> tuple[Offer, ...]:
    """`rendezvous` with torch's own elastic agents, as far as a job file knows their backend."""
    known = {"c10d": "c10d", "etcd": "etcd-v2", "etcd-v2": "etcd-v2"}.get(backend)
    if not known:
        return ()
    place = _store(endpoint) if known == "c10d" else _etcd(endpoint)
    more = dict(re.findall(r"(?:^|,)\s*([A-Za-z_]\w*)\s*=\s*([^,]+?)\s*(?=,|$)", conf))
    more.pop("is_host", None)  # distlaunch sets it for each node
    value: dict[str, Data] = {"backend": known}
    value |= {key: part for key, part in (("endpoint", place), ("conf", more)) if part}
    return (Offer("for torch's own elastic agents instead:", "rendezvous", value),)


def _store(endpoint: str) -> str:
    """HOST:PORT of an agent's store, as far as it says something that holds elsewhere."""
    host, _, port = endpoint.rpartition(":")
    host = (host or endpoint).strip("[]")
    return "" if is_loopback(host) or port == "0" else endpoint


def _etcd(endpoint: str) -> str:
    """HOST:PORT of an etcd server; 2379 is its port for clients."""
    if not endpoint:
        return "ETCD_HOST:2379"
    return endpoint if re.search(r":[0-9]+$", endpoint) else f"{endpoint}:2379"


def _conduct(setting: Setting) -> Draft:
    flags = setting.flags
    given: dict[str, Data] = {
        "restarts": {"max": flags.max_restarts} if flags.max_restarts else None,
        "timeouts": {"stop": f"{flags.shutdown_timeout}s"} if "shutdown_timeout" in flags.given else None,
        "numa_binding": flags.numa_binding,
        "role": flags.role if flags.role != "default" else None,
        "virtual_local_rank": flags.virtual_local_rank or None,
    }
    notes = []
    if flags.max_restarts:
        text = "--max-restarts counts over the whole run; restarts.max in any restarts.window, an hour"
        notes.append(Note(text, "restarts"))
    if setting.nodes[0] < setting.nodes[1] and not flags.max_restarts:
        notes.append(Note("losing or regaining a node counts as a restart: at most 3 in an hour", "restarts"))
    if "signals_to_handle" in flags.given:
        text = "SIGINT, SIGTERM, SIGHUP and SIGQUIT end the job, and workers get SIGTERM"
        text = f"--signals-to-handle has no equivalent: {text}"
        notes.append(Note(text))
    keys = {key: value for key, value in given.items() if value is not None}
    return Draft(keys, tuple(notes))


def _env(setting: Setting) -> Draft:
    env = setting.call.env
    flags = {f"PET_{flag.field.upper()}" for flag in FLAGS if flag.from_environment}
    keys = {name: value for name, value in env.items() if name not in {*flags, *RESERVED, "PYTHON_EXEC"}}
    notes = (Note(f"{name} is set by distlaunch, for each worker", "env") for name in env if name in RESERVED)
    return joined([Draft({"env": keys} if keys else {}, tuple(notes)), visible_gpus(keys)])


def visible_gpus(env: Mapping[str, str]) -> Draft:
    """`gpus_per_node` where the job itself says which GPUs its workers see."""
    text = env.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return Draft()
    return Draft({"gpus_per_node": len([name for name in text.split(",") if name.strip() not in ("", "-1")])})


def _logs(setting: Setting) -> Draft:
    flags = setting.flags
    folder: dict[str, Data] = {"dir": setting.path(flags.log_dir)} if flags.log_dir else {}
    shown, notes = _shown(setting)
    if {"redirects", "tee"} & flags.given:
        notes = [*notes, "--redirects, --tee: each rank's output is always kept, stdout and stderr apart"]
    if flags.logs_specs is not None:
        notes = [
            *notes,
            f"--logs-specs {flags.logs_specs} has no equivalent: it is a plug-in of torch's agent",
        ]
    if flags.log_line_prefix_template is not None:
        notes = [*notes, "--log-line-prefix-template has no effect: the prefix is [node:rank]"]
    keys = folder if shown is None else {**folder, "console": shown}
    return Draft({"logs": keys} if keys else {}, tuple(Note(note, "logs") for note in notes))


def _shown(setting: Setting) -> tuple[Data, list[str]]:
    """`logs.console` (None = all), and what it can't say."""
    flags = setting.flags
    redirects, tee = parse_std("redirects", flags.redirects), parse_std("tee", flags.tee)
    local_ranks = ranks_of(flags.local_ranks_filter)
    if isinstance(redirects, int) and isinstance(tee, int):
        if redirects & ~tee == 3:
            return "none", []
        partly = redirects & ~tee
    else:
        partly = True
    notes = ["the console shows both streams, of all ranks in logs.console"] if partly else []
    return (_ranks(setting, local_ranks), notes) if local_ranks else (None, notes)


def _ranks(setting: Setting, local_ranks: frozenset[int]) -> Data:
    """Ranks of these local ranks on every node, where their number is known; else on the first."""
    text, nodes = setting.flags.nproc_per_node, setting.nodes[1]
    procs = int(text) if text.isdecimal() else max(local_ranks) + 1
    return [
        node * procs + local
        for node in range(nodes if text.isdecimal() else 1)
        for local in sorted(local_ranks)
        if 0 <= local < procs
    ]


_PARTS: tuple[Callable[[Setting], Draft], ...] = (_program, _nodes, _procs, _meeting, _conduct, _env, _logs)
