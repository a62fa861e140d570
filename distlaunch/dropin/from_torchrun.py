"""A job file that does what a torchrun command line does."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from distlaunch.contract import RESERVED
from distlaunch.dropin.calls import Call, parse_call
from distlaunch.dropin.flags import FLAGS, Flags, node_range, parse_std
from distlaunch.dropin.job_text import Data, Draft, Note, args_of, as_path, check_draft, flow_text, joined
from distlaunch.dropin.torchrun import endpoint_of, notices, ranks_of
from distlaunch.errors import UsageError
from distlaunch.job.hosts import host_error
from distlaunch.job.placeholders import PLACEHOLDERS
from distlaunch.plan.layout import is_loopback

SOURCE = "the command line"
LISTED_HOSTS = 16
"""More hosts than this stand as a range."""
_PATHS = "relative paths are relative to this file: keep it in the folder where the command was run"


class Setting(NamedTuple):
    """One torchrun command, and this machine's CPUs."""

    call: Call
    cpus: int

    @property
    def flags(self) -> Flags:
        """torchrun's own words."""
        return self.call.flags

    @property
    def nodes(self) -> tuple[int, int]:
        """(fewest, most)."""
        return (1, 1) if self.flags.standalone else node_range(self.flags.nnodes)

    @property
    def master(self) -> tuple[str | None, int | None]:
        """Host and port of rank 0's store, as far as the command says something that holds elsewhere."""
        flags = self.flags
        if flags.standalone or flags.rdzv_backend.startswith("etcd"):
            return None, None
        host, port = endpoint_of(flags)
        if error := host_error(host):
            raise UsageError(f"{SOURCE}: --master-addr or --rdzv-endpoint: {error}")
        named = {"master_port", "rdzv_endpoint"} & flags.given
        # Port 0 asks for a free one; without a port one node needs no endpoint.
        far = not is_loopback(host) and (named or self.nodes[1] > 1)
        return (host if far else None), (port or None if named else None)


def torchrun_draft(words: Sequence[str], cpus: int, variables: Sequence[str] = ()) -> Draft:
    """The job of a command in `words`; a shell would have replaced `variables` in it. Raises our errors."""
    setting = Setting(parse_call(words), cpus)
    top = [_PATHS, *_unexpanded(variables), *notices(setting.flags)]
    parts = (part(setting) for part in _PARTS)
    draft = joined([Draft(notes=tuple(map(Note, top))), *parts])
    check_draft(draft, SOURCE)
    return draft


def _unexpanded(variables: Sequence[str]) -> Iterator[str]:
    if variables:
        yield f"no shell fills in {' '.join(variables)} here: write the values"


def _program(setting: Setting) -> Draft:
    flags, call = setting.flags, setting.call
    kind = "module" if flags.module else "command" if flags.no_python else "script"
    path = as_path(flags.script) if kind == "script" or "/" in flags.script else flags.script
    legacy = ["--local-rank={local_rank}"] if call.local_rank_flag else []
    keys: dict[str, Data] = {kind: [path] if kind == "command" else path, **args_of(flags.args, legacy)}
    if call.python:
        keys["python"] = as_path(call.python)
    return Draft(keys, tuple(_program_notes(setting)))


def _program_notes(setting: Setting) -> Iterator[Note]:
    if setting.flags.run_path:
        yield Note("--run-path has no effect: Python runs the script itself", "script")
    if setting.call.local_rank_flag:
        yield Note("torch.distributed.launch gives --local-rank; its old spelling is --local_rank", "args")
    found = [name for name in PLACEHOLDERS if any("{" + name + "}" in word for word in setting.flags.args)]
    if found:
        names = ", ".join("{{" + name + "}}" for name in found)
        yield Note(f"{names}: doubled braces arrive as single ones; single ones are filled in", "args")


def _nodes(setting: Setting) -> Draft:
    fewest, most = setting.nodes
    if most == 1:
        return Draft()
    hosts, first = _hosts(most, setting.master[0]), setting.master[0]
    advice = "the first is rank 0's" if first else "rank 0's first"
    notes = [Note(f"put the names of the machines here, as your ssh knows them; {advice}", "nodes")]
    if "node_rank" in setting.flags.given:
        notes.append(Note("--node-rank has no place: this one file starts all nodes", "nodes"))
    elastic: dict[str, Data] = {"min_nodes": fewest} if fewest < most else {}
    return Draft({"nodes": hosts, **elastic}, tuple(notes))


def _hosts(count: int, first: str | None) -> list[str]:
    if count > LISTED_HOSTS:
        return [first or "HOST0", f"HOST[1-{count - 1}]"]
    return [first or "HOST0", *(f"HOST{i}" for i in range(1, count))]


def _procs(setting: Setting) -> Draft:
    match text := setting.flags.nproc_per_node:
        case "gpu":
            return Draft()
        case "auto":
            why = "one worker per GPU; on a node without GPUs torchrun starts one per CPU, distlaunch one"
            return Draft(notes=(Note(f"--nproc-per-node auto: {why}", "procs_per_node"),))
        case "cpu":
            note = Note("--nproc-per-node cpu: as many as this machine has", "procs_per_node")
            return Draft({"gpus_per_node": 0, "procs_per_node": setting.cpus}, (note,))
        case "xpu":
            raise UsageError("--nproc-per-node xpu: give their number")
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
    return Draft(keys, tuple(_rendezvous_notes(flags)))


def _rendezvous_notes(flags: Flags) -> Iterator[Note]:
    if flags.standalone or flags.rdzv_backend == "static":
        return
    name = flags.rdzv_backend
    given = {"backend": name, "endpoint": flags.rdzv_endpoint, "id": flags.rdzv_id}
    line = {key: value for key, value in given.items() if value and value != "none"}
    yield Note(
        f"--rdzv-backend {name}: distlaunch assigns the ranks itself, which needs no store;", "rendezvous"
    )
    yield Note("for torch's own agents instead:", "rendezvous")
    yield Note(f"rendezvous: {flow_text(line)}", "rendezvous")


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
        notes.append(
            Note("a node that is lost or returns is a restart too: at most 3 in an hour", "restarts")
        )
    if "signals_to_handle" in flags.given:
        text = "--signals-to-handle has no equal: SIGINT, SIGTERM, SIGHUP and SIGQUIT end the job, by SIGTERM"
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
    folder: dict[str, Data] = {"dir": as_path(flags.log_dir)} if flags.log_dir else {}
    shown, notes = _shown(setting)
    if {"redirects", "tee"} & flags.given:
        notes = [*notes, "--redirects, --tee: each rank's output is always kept, stdout and stderr apart"]
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
