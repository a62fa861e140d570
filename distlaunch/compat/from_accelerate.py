"""Job files from configs written by `accelerate config`, as used by `accelerate launch`.

The variables are those in accelerate/utils/launch.py, version 1.15.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from distlaunch.compat.draft import Draft
from distlaunch.errors import JobError, Problem
from distlaunch.job.document import Entries, Scalar, Value
from distlaunch.job.nodes import host_error
from distlaunch.job.text import is_loopback
from distlaunch.job.types import Choice, Integer, Switch, Tree, Type, Word

_FSDP = {
    "fsdp_version": 1,
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_reshard_after_forward": True,
    "fsdp_offload_params": False,
    "fsdp_min_num_params": 100000000,
    "fsdp_forward_prefetch": False,
    "fsdp_use_orig_params": True,
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_sync_module_states": True,
    "fsdp_activation_checkpointing": False,
    "fsdp_activation_checkpointing_offload": False,
}
"""accelerate's defaults for keys that the config doesn't set."""


class Section(NamedTuple):
    """A section of the config: the prefix of its keys, and the prefix of the resulting variables.

    `kind` is the type of job that uses the section ("" = any), and `switch` is a variable that enables it.
    `lower` = booleans are lowercase.
    """

    prefix: str
    variables: str = ""
    kind: str = ""
    switch: str = ""
    lower: bool = False
    defaults: Mapping[str, Any] = {}


_SECTIONS = {
    "dynamo_config": Section("dynamo_", "ACCELERATE_"),
    "fp8_config": Section("fp8_", "ACCELERATE_"),
    "fsdp_config": Section("fsdp_", "", "FSDP", "ACCELERATE_USE_FSDP", True, _FSDP),
    "deepspeed_config": Section("deepspeed_", "ACCELERATE_", "DEEPSPEED", "ACCELERATE_USE_DEEPSPEED", True),
    "megatron_lm_config": Section("megatron_lm_", "", "MEGATRON_LM", "ACCELERATE_USE_MEGATRON_LM"),
    "parallelism_config": Section("parallelism_config_", switch="ACCELERATE_USE_PARALLELISM_CONFIG"),
}
_RENAMED = {
    "fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "deepspeed_gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "deepspeed_gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "deepspeed_zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
}
_LEFT_OUT = {
    "deepspeed_multinode_launcher": "applies only to DeepSpeed's own launcher",
    "deepspeed_exclusion_filter": "applies only to DeepSpeed's own launcher",
    "deepspeed_inclusion_filter": "applies only to DeepSpeed's own launcher",
    "fp8_override_linear_precision": "must be set by the script",
    "deepspeed_hostfile": "becomes the key hostfile if there are several machines",
}
"""Section keys that don't become variables, each with the reason."""
_TYPES = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM")
"""Types of jobs that run on CPUs, or on the GPUs in CUDA_VISIBLE_DEVICES."""
_SWITCHES = {
    "use_cpu": ("ACCELERATE_USE_CPU", "True"),
    "debug": ("ACCELERATE_DEBUG_MODE", "true"),
    "enable_cpu_affinity": ("ACCELERATE_CPU_AFFINITY", "1"),
}
"""Boolean keys, each with a variable and the value that it gets for true."""
_KEYS: Mapping[str, Type] = {
    "compute_environment": Choice(("LOCAL_MACHINE",)),
    "num_machines": Integer(1, 4096),
    "num_processes": Integer(-1),
    "machine_rank": Integer(0),
    "main_process_port": Integer(0, 65535),
    "mixed_precision": Choice(("no", "fp16", "bf16", "fp8")),
    **dict.fromkeys(("distributed_type", "main_process_ip", "gpu_ids"), Word()),
    **dict.fromkeys(("rdzv_backend", "main_training_function"), Word()),
    **dict.fromkeys((*_SWITCHES, "same_network"), Switch()),
    **dict.fromkeys((*_SECTIONS, "mpirun_config"), Tree()),
}


def accelerate_draft(document: Value, source: str, program: Sequence[str] = ()) -> Draft:
    """Draft a job from a config file, which doesn't name a script. Raises `JobError` with all problems."""
    config = _read(document)
    draft = Draft(source)
    draft.note("relative paths are relative to this file")
    draft.set_program(program)
    _add_nodes(draft, config)
    _add_procs(draft, config)
    _add_config(draft, config)
    return draft.checked()


def _read(document: Value) -> dict[str, Any]:
    """Validate the config and return the keys whose value isn't null. Raises `JobError` with all problems."""
    problems: list[Problem] = []
    given = Tree("an accelerate config (a map of settings)").check(document, "", problems) or {}
    config = {key: value for key, value in given.items() if value is not None}
    if config and not _KEYS.keys() & config.keys():
        text = "not an accelerate config: it has none of the usual keys (distributed_type, num_processes, …)"
        problems.append(document.place.problem("", text))
    for key, _, value in document.walk() if isinstance(document, Entries) else ():
        if key not in _KEYS or key not in config:
            continue
        # YAML reads `mixed_precision: no` as false.
        no = isinstance(value, Scalar) and value.value is False and value.text.lower() == "no"
        config[key] = _KEYS[key].check(Scalar("no", value.place, "no") if no else value, key, problems)
        if key == "main_process_ip" and (error := host_error(str(config[key]))):
            problems.append(value.place.problem(key, error))
    if problems:
        raise JobError(problems)
    if config.get("distributed_type") == "MULTI_CPU":
        config["use_cpu"] = True
    return {"distributed_type": "NO", "num_machines": 1, "rdzv_backend": "static", **config}


def _add_nodes(draft: Draft, config: Mapping[str, Any]) -> None:
    """Add the hosts and the endpoint, which is main_process_ip unless that is an etcd server."""
    machines, backend = config["num_machines"], config["rdzv_backend"]
    host, port = config.get("main_process_ip", ""), config.get("main_process_port")
    first = host if host and machines > 1 and not is_loopback(host) else None
    if not backend.startswith("etcd"):
        draft.set("master_addr", first)
        draft.set("master_port", port or None)
    if backend not in ("static", "c10d") or (backend == "c10d" and machines > 1):
        draft.note_store("rdzv_backend: ", backend, f"{host}:{port or 29500}" if host else "")
    if machines == 1:
        return
    hostfile = config.get("deepspeed_config", {}).get("deepspeed_hostfile")
    if hostfile := hostfile or config.get("mpirun_config", {}).get("mpirun_hostfile"):
        draft.set("hostfile", str(hostfile))
    else:
        draft.set_hosts(first, machines)
    if "machine_rank" in config:
        draft.note("machine_rank is not needed: this file starts all machines", key="nodes")


def _add_config(draft: Draft, config: Mapping[str, Any]) -> None:
    """Add settings for every node."""
    env = {name: text for key, (name, text) in _SWITCHES.items() if config.get(key)}
    precision, ids = config.get("mixed_precision", "no"), config.get("gpu_ids", "all")
    if precision != "no":
        env["ACCELERATE_MIXED_PRECISION"] = precision
    if config.get("use_cpu"):
        draft.set("gpus_per_node", 0)
    elif ids != "all" and config["distributed_type"] in _TYPES:
        env["CUDA_VISIBLE_DEVICES"] = ids
        if config["num_machines"] > 1:
            draft.note(
                "gpu_ids: the config sets those of one machine; in a job file, they apply to all", key="env"
            )
    draft.set_env(env)
    for name in _SECTIONS:
        _add_section(draft, name, config)
    foreign = set() if config["distributed_type"] in _TYPES else {"distributed_type", "gpu_ids"}
    for key, value in config.items():
        if key not in _KEYS.keys() - foreign and str(value) not in ("no", "False", "[]", "{}", ""):
            draft.note(f"{key}: {value} has no equivalent in a job file")


def _add_procs(draft: Draft, config: Mapping[str, Any]) -> None:
    """Set procs_per_node from num_processes, which is the total over all machines."""
    total, machines = config.get("num_processes", -1), config["num_machines"]
    share, rest = divmod(total, machines)
    if config["distributed_type"] == "NO":
        draft.set("procs_per_node", 1)
    elif total < 1:
        draft.note("num_processes is not set: one worker per GPU", key="procs_per_node")
    else:
        draft.set("procs_per_node", max(1, share))
        if rest:
            text = f"num_processes: {total} on {machines} machines: accelerate starts {share} on each"
            draft.note(text, key="procs_per_node")


def _add_section(draft: Draft, name: str, config: Mapping[str, Any]) -> None:
    """Add the variables of a section if it applies to the type of job."""
    rule, kind = _SECTIONS[name], config["distributed_type"]
    given = {key: value for key, value in config.get(name, {}).items() if value is not None}
    idle = rule.kind not in ("", kind) or (name == "fp8_config" and config.get("mixed_precision") != "fp8")
    if not given and (idle or not rule.kind):
        return
    if idle:
        draft.note(f"{name} has no effect in a job of type {kind}", key="env")
        return
    env = {rule.switch: "true"} if rule.switch else {}
    named = {key if key.startswith(rule.prefix) else rule.prefix + key: value for key, value in given.items()}
    for key, value in {**rule.defaults, **named}.items():
        text = str(value).lower() if rule.lower and str(value) in ("True", "False") else str(value)
        text = text.upper() if key == "dynamo_backend" else text
        if key in _LEFT_OUT:
            draft.note(f"{name}: {key}: {text} {_LEFT_OUT[key]}", key="env")
        else:
            env[_RENAMED.get(key, rule.variables + key.upper())] = text
    if kind == rule.kind == "DEEPSPEED":
        # Fields that DeepSpeed's own config file must not contradict.
        fields = [*given, *(["mixed_precision"] if "mixed_precision" in config else [])]
        env["ACCELERATE_CONFIG_DS_FIELDS"] = ",".join(fields)
        hint = "for DeepSpeed, accelerate adds the current directory to PYTHONPATH; do so if imports fail"
        draft.note(hint, key="env")
    draft.set_env(env)
