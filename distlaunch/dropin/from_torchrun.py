"""A job file that does what a torchrun command line does."""

import os.path
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from distlaunch.contract import RESERVED
from distlaunch.dropin.calls import Call, parse_call
from distlaunch.dropin.flags import (
    FLAG,
    FLAGS,
    Flags,
    is_alone,
    node_range,
    parse_procs,
    parse_std,
    program_kind,
)
from distlaunch.dropin.job_text import (
    Data,
    Draft,
    Note,
    args_of,
    as_path,
    brace_notes,
    checked,
    etcd_offer,
    gpus_offer,
    joined,
    visible_gpus,
)
from distlaunch.dropin.joining import endpoint_of
from distlaunch.dropin.over_ssh import UNNAMED, Remote
from distlaunch.dropin.shell_words import Command
from distlaunch.dropin.torchrun_job import notices, ranks_of
from distlaunch.dropin.unexpanded import left_out, unexpanded
from distlaunch.errors import UsageError
from distlaunch.job.hosts import host_error
from distlaunch.plan.layout import is_loopback

SOURCE = "the command line"
LISTED_HOSTS = 16
"""More hosts than this stand as a range."""
_PATHS = "relative paths are relative to this file: keep it in the folder where the command was run"
_SSH_STARTS = "ssh starts commands in the user's home directory"
_AS_THEY_ARE = ("max_restarts", "numa_binding", "role", "virtual_local_rank")
"""Flags whose values are those of their keys."""


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
        if is_alone(flags, self.nodes[1]) or flags.rdzv_backend.startswith("etcd"):
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
    shells = (*left_out(setting.flags), *unexpanded(setting.call, command))
    top = [*([] if remote else [_PATHS]), *around, *shells, *notices(setting.flags)]
    parts = (part(setting) for part in _PARTS)
    return checked(gpus_offer(joined([Draft(notes=tuple(map(Note, top))), *parts])), SOURCE)


def _program(setting: Setting) -> Draft:
    flags, call = setting.flags, setting.call
    kind = program_kind(flags)
    path = setting.path(flags.script) if kind == "script" or "/" in flags.script else flags.script
    legacy = ["--local-rank={local_rank}"] if call.local_rank_flag else []
    keys: dict[str, Data] = {kind: [path] if kind == "command" else path, **args_of(flags.args, legacy)}
    if call.python:
        keys["python"] = setting.path(call.python)
    return Draft(keys, tuple(_program_notes(setting)))


def _program_notes(setting: Setting) -> Iterator[Note]:
    if setting.flags.run_path:
        yield _remark("run_path", "script")
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
    advice = "rank 0 runs on the first" if first else "the one for rank 0 first"
    notes = [Note(f"put your host names here, as ssh knows them; {advice}", "nodes")]
    if "node_rank" in setting.flags.given:
        notes.append(_remark("node_rank", "nodes"))
    elastic: dict[str, Data] = {"min_nodes": fewest} if fewest < most else {}
    nodes = Draft({"nodes": _with(setting, hosts), **elastic}, tuple(notes))
    return joined([nodes, _workdir(setting.remote)])


def _lone(remote: Remote | None) -> Draft:
    """The one host that ssh ran the command on."""
    if not remote:
        return Draft()
    note = Note("put the host name here, as ssh knows it", "nodes")
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
    if setting.unknown("nproc_per_node"):
        return Draft()
    match parse_procs(setting.flags.nproc_per_node):
        case int(number):
            return Draft({"procs_per_node": number})
        case "gpu":
            return Draft()
        case "auto":
            why = "one worker per GPU; on a node without GPUs torchrun starts one per CPU, distlaunch one"
            return Draft(notes=(Note(f"--nproc-per-node auto: {why}", "procs_per_node"),))
        case "cpu":
            note = Note("--nproc-per-node cpu: the number of CPUs on this machine", "procs_per_node")
            return Draft({"gpus_per_node": 0, "procs_per_node": setting.cpus}, (note,))


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
    notes = (_remark("local_addr", "nodes"),) if far else ()
    waits = "timeout" in flags.rdzv_conf and not flags.rdzv_backend.startswith("etcd")
    if waits and not is_alone(flags, setting.nodes[1]):
        notes = (*notes, Note(f"--rdzv-conf {flags.rdzv_conf}: set timeouts.join", "timeouts"))
    return joined([Draft(keys, notes), _agents(setting)])


def _agents(setting: Setting) -> Draft:
    """torch's own elastic agents, where they would have had something to do."""
    flags, name = setting.flags, setting.flags.rdzv_backend
    if name == "static" or is_alone(flags, setting.nodes[1]):
        return Draft()
    told = f"--rdzv-backend {name}: distlaunch assigns the ranks itself and needs no store"
    offers = etcd_offer(name, flags.rdzv_endpoint, flags.rdzv_conf)
    return Draft(notes=(Note(told, "rendezvous"),), offers=offers)


def _conduct(setting: Setting) -> Draft:
    flags = setting.flags
    keys: dict[str, Data] = {}
    for flag in map(FLAG.__getitem__, _AS_THEY_ARE):
        value = getattr(flags, flag.field)
        keys |= _entry(flag.key, value) if value != flag.default else {}
    if "shutdown_timeout" in flags.given:
        keys |= _entry(FLAG["shutdown_timeout"].key, f"{flags.shutdown_timeout}s")
    return Draft(keys, tuple(_conduct_notes(setting)))


def _entry(key: str, value: Data) -> dict[str, Data]:
    """A job file's `key`, which may be one of a section's."""
    section, _, inner = key.rpartition(".")
    return {section: {inner: value}} if section else {key: value}


def _conduct_notes(setting: Setting) -> Iterator[Note]:
    flags = setting.flags
    if flags.max_restarts:
        text = "--max-restarts counts over the whole run; restarts.max counts in each restarts.window (1h)"
        yield Note(text, "restarts")
    if setting.nodes[0] < setting.nodes[1] and not flags.max_restarts:
        yield Note("losing or regaining a node counts as a restart: at most 3 in an hour", "restarts")
    if "signals_to_handle" in flags.given:
        yield _remark("signals_to_handle")


def _remark(field: str, key: str = "", value: str = "") -> Note:
    """The note, at a key, on a flag that job files have no key for."""
    return Note(" ".join(filter(None, (FLAG[field].name, value, FLAG[field].in_file))), key)


def _env(setting: Setting) -> Draft:
    env = setting.call.env
    flags = {flag.variable for flag in FLAGS}
    keys = {name: value for name, value in env.items() if name not in {*flags, *RESERVED, "PYTHON_EXEC"}}
    notes = (Note(f"distlaunch sets {name} for each worker", "env") for name in env if name in RESERVED)
    return joined([Draft({"env": keys} if keys else {}, tuple(notes)), visible_gpus(keys)])


def _logs(setting: Setting) -> Draft:
    flags = setting.flags
    folder: dict[str, Data] = {"dir": setting.path(flags.log_dir)} if flags.log_dir else {}
    shown, notes = _shown(setting)
    if {"redirects", "tee"} & flags.given:
        notes = [
            *notes,
            "--redirects, --tee: the run folder always keeps each rank's stdout and stderr, separately",
        ]
    told = [Note(note, "logs") for note in notes]
    if flags.logs_specs is not None:
        told.append(_remark("logs_specs", "logs", flags.logs_specs))
    if flags.log_line_prefix_template is not None:
        told.append(_remark("log_line_prefix_template", "logs"))
    keys = folder if shown is None else {**folder, "console": shown}
    return Draft({"logs": keys} if keys else {}, tuple(told))


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
    notes = ["the console shows both streams of every rank in logs.console"] if partly else []
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
