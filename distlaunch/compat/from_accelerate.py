"""A job file that does what `accelerate launch` does with a config of `accelerate config`."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from distlaunch.compat.job_text import (
    Data,
    Draft,
    Note,
    checked,
    etcd_offer,
    flow_text,
    gpus_offer,
    joined,
    program_draft,
    value_of,
    visible_gpus,
)
from distlaunch.errors import JobError, Problem
from distlaunch.job.document import Entries, Items, Place, Scalar, Value, describe
from distlaunch.job.hosts import host_error
from distlaunch.job.types.values import Choice, Integer, Switch, Type, Word
from distlaunch.plan.layout import is_loopback

_SECTIONS = (
    *("deepspeed_config", "dynamo_config", "fp8_config", "fsdp_config"),
    *("megatron_lm_config", "mpirun_config", "parallelism_config"),
)
_ACCELERATORS = (
    *("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA"),
    *("MULTI_XPU", "MULTI_HPU", "MULTI_NEURON", "FSDP", "DEEPSPEED", "MEGATRON_LM"),
)
_KEYS: Mapping[str, Type] = {
    "compute_environment": Choice(("LOCAL_MACHINE",)),
    "distributed_type": Choice(_ACCELERATORS),
    "num_machines": Integer(1, 4096),
    "num_processes": Integer(-1),
    "machine_rank": Integer(0),
    "main_process_ip": Word(),
    "main_process_port": Integer(0, 65535),
    "gpu_ids": Word(),
    "use_cpu": Switch(),
    "debug": Switch(),
    "enable_cpu_affinity": Switch(),
    "mixed_precision": Choice(("no", "fp16", "bf16", "fp8")),
    "rdzv_backend": Word(),
    "main_training_function": Word(),
}
_SWITCHES: Mapping[str, tuple[str, Any]] = {
    **{name: (name, True) for name in ("use_cpu", "debug", "enable_cpu_affinity", "same_network")},
    **{f"use_{kind.lower()}": ("distributed_type", kind) for kind in ("DEEPSPEED", "FSDP", "MEGATRON_LM")},
    "cpu": ("use_cpu", True),
    "multi_gpu": ("distributed_type", "MULTI_GPU"),
}
"""Flags of accelerate launch without a value, as keys of a config."""
_RENDEZVOUS = ("machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "rdzv_conf")
_SILENT = frozenset({"same_network", "main_training_function", "mpirun_config", "deepspeed_config_file"})
"""Without an effect on a job of ours, whatever their value."""


class Config(NamedTuple):
    """accelerate's config: checked values, sections as texts, and the keys that mean nothing here."""

    values: Mapping[str, Any]
    sections: Mapping[str, Mapping[str, str]]
    others: Mapping[str, str]

    @property
    def kind(self) -> str:
        """distributed_type."""
        return str(self.values.get("distributed_type", "NO"))

    @property
    def machines(self) -> int:
        """num_machines."""
        return int(self.values.get("num_machines", 1))


def accelerate_draft(document: Value, source: str, program: Sequence[str] = ()) -> Draft:
    """The job of a config file, which names no script. Raises `JobError` with all problems."""
    hint = (Note("relative paths are relative to this file"),)
    parts = (Draft(notes=hint), program_draft(program), *_parts(_read(document)))
    return checked(gpus_offer(joined(parts)), source)


def launch_draft(words: Sequence[str], machines: int, source: str) -> tuple[Draft, list[str]]:
    """What `accelerate launch` sets with these flags, and torchrun's words for its program.

    Flags for the rendezvous have no effect. Raises `JobError` with all problems.
    """
    given: dict[str, Any] = {"distributed_type": "MULTI_GPU"}
    rest, kind = list(words), []
    while rest and rest[0].startswith("-"):
        flag, equals, value = rest.pop(0).lstrip("-").partition("=")
        name = flag.replace("-", "_")
        if name in ("m", "module", "no_python"):
            kind = [f"--{'module' if name == 'm' else name}"]
            continue
        if name not in _SWITCHES and not equals and rest and not re.match(r"-|.*\.py$", rest[0]):
            value = rest.pop(0)
        name, data = _SWITCHES.get(name, (name, int(value) if value.isdecimal() else value or True))
        section = next((each for each in _SECTIONS if name.startswith(each.removesuffix("config"))), "")
        section = "deepspeed_config" if name in _DEEPSPEED else section
        (given.setdefault(section, {}) if section else given)[name] = data
    file = given.pop("config_file", "")
    told = f"left out: --config_file {file}: `distlaunch import accelerate {file}` prints what it sets"
    kept = {name: value for name, value in given.items() if name not in _RENDEZVOUS}
    config = _read(value_of({**kept, "num_machines": machines}, Place(source)))
    return joined([Draft(notes=(Note(told),) if file else ()), *_parts(config)]), [*kind, *rest]


def _parts(config: Config) -> tuple[Draft, ...]:
    return _nodes(config), _procs(config), _meeting(config), _env(config), _others(config)


def _read(document: Value) -> Config:
    if not isinstance(document, Entries):
        text = f"expected an accelerate config (a mapping), got {describe(document)}"
        raise JobError([document.place.problem("", text)])
    problems: list[Problem] = []
    given = {key: value for key, _, value in document.walk() if not _is_null(value)}
    if given and not {*_KEYS, *_SECTIONS, *_SILENT}.intersection(given):
        text = "expected an accelerate config; none of its keys (distributed_type, num_processes, …) is there"
        raise JobError([document.place.problem("", text)])
    values = {
        key: _KEYS[key].check(_spelled(value), key, problems) for key, value in given.items() if key in _KEYS
    }
    sections = {key: _section(value, key, problems) for key, value in given.items() if key in _SECTIONS}
    others = {key: _text(value) for key, value in given.items() if key not in (*_KEYS, *_SECTIONS)}
    if error := host_error(str(values.get("main_process_ip") or "none")):
        problems.append(given["main_process_ip"].place.problem("main_process_ip", error))
    if problems:
        raise JobError(problems)
    return Config(values, sections, others)


def _is_null(value: Value) -> bool:
    return isinstance(value, Scalar) and value.value is None


def _spelled(value: Value) -> Value:
    """`mixed_precision: no` is false to YAML and means the word; other words are given in any case."""
    if isinstance(value, Scalar) and value.value is False and value.text.lower() == "no":
        return Scalar("no", value.place, "no")
    return value


def _section(value: Value, key: str, problems: list[Problem]) -> dict[str, str]:
    if not isinstance(value, Entries):
        problems.append(value.place.problem(key, f"expected a mapping, got {describe(value)}"))
        return {}
    return {name: _text(entry) for name, _, entry in value.walk() if not _is_null(entry)}


def _text(value: Value) -> str:
    """What Python's str() makes of a value."""
    match value:
        case Scalar():
            return str(value.value)
        case Items():
            return flow_text([_text(item) for item in value.items])
        case Entries():
            return flow_text({key: _text(entry) for key, _, entry in value.walk()})


def _nodes(config: Config) -> Draft:
    hostfile = config.sections.get("deepspeed_config", {}).get("deepspeed_hostfile")
    hostfile = hostfile or config.sections.get("mpirun_config", {}).get("mpirun_hostfile")
    if config.machines == 1:
        return Draft()
    notes = []
    if "machine_rank" in config.values:
        notes.append("machine_rank is not needed: this one file starts all machines")
    if hostfile:
        return _noted("hostfile", hostfile, notes)
    first = _far(config) or "HOST0"
    hosts = [first, *(f"HOST{i}" for i in range(1, config.machines))]
    advice = "put your host names here, as ssh knows them; rank 0 runs on the first"
    return _noted("nodes", hosts, [advice, *notes])


def _noted(key: str, value: Data, notes: list[str]) -> Draft:
    return Draft({key: value}, tuple(Note(note, key) for note in notes))


def _far(config: Config) -> str | None:
    """The main process's host, where its name holds on other machines too."""
    host = config.values.get("main_process_ip")
    return str(host) if host and not is_loopback(str(host)) else None


def _procs(config: Config) -> Draft:
    """num_processes is the total over all machines, of which each starts its whole share."""
    total = config.values.get("num_processes", -1)
    if config.kind == "NO":
        return Draft({"procs_per_node": 1})
    if total < 1:
        return Draft(notes=(Note("num_processes is not set: one worker per GPU", "procs_per_node"),))
    share, rest = divmod(total, config.machines)
    if share == 0 or rest:
        text = f"num_processes: {total} over {config.machines} machines: accelerate starts {share} on each"
        return Draft({"procs_per_node": max(1, share)}, (Note(text, "procs_per_node"),))
    return Draft({"procs_per_node": share})


def _meeting(config: Config) -> Draft:
    values = config.values
    backend, port = str(values.get("rdzv_backend") or "static"), values.get("main_process_port")
    near = _near(config, port)
    if backend == "static" or (backend == "c10d" and config.machines == 1):
        return Draft(near)
    told = f"rdzv_backend: {backend}: distlaunch assigns the ranks itself and needs no store"
    host = values.get("main_process_ip")
    offers = etcd_offer(backend, f"{host}:{port or 29500}" if host else "")
    return Draft({} if backend.startswith("etcd") else near, (Note(told, "rendezvous"),), offers)


def _near(config: Config, port: int | None) -> dict[str, Data]:
    """Where the ranks meet, unless main_process_ip is an etcd server's."""
    host = _far(config) if config.machines > 1 else None
    keys: dict[str, Data] = {"master_addr": host, "master_port": port}
    return {key: value for key, value in keys.items() if value}


def _env(config: Config) -> Draft:
    values = config.values
    env: dict[str, Data] = {}
    if values.get("use_cpu") or config.kind == "MULTI_CPU":
        env["ACCELERATE_USE_CPU"] = "True"
    precision = values.get("mixed_precision")
    if precision and precision != "no":
        env["ACCELERATE_MIXED_PRECISION"] = precision
    if values.get("debug"):
        env["ACCELERATE_DEBUG_MODE"] = "true"
    if values.get("enable_cpu_affinity"):
        env["ACCELERATE_CPU_AFFINITY"] = "1"
    own = joined([_devices(config), Draft({"env": env} if env else {})])
    return joined([own, _sections(config.kind, precision, config.sections)])


def _devices(config: Config) -> Draft:
    if config.values.get("use_cpu") or config.kind == "MULTI_CPU":
        return Draft({"gpus_per_node": 0})
    ids = config.values.get("gpu_ids")
    if ids in (None, "all"):
        return Draft()
    env = {_VISIBLE.get(config.kind, "CUDA_VISIBLE_DEVICES"): str(ids)}
    notes = (
        (Note("gpu_ids: the config gives those of one machine; here they apply to all", "env"),)
        if config.machines > 1
        else ()
    )
    return joined([Draft({"env": env}, notes), visible_gpus(env)])


def _others(config: Config) -> Draft:
    idle = ("no", "False", "[]", "")
    notes = [
        f"{key}: {value} has no equivalent here"
        for key, value in config.others.items()
        if key not in _SILENT and value not in idle
    ]
    return Draft(notes=tuple(map(Note, notes)))


# The variables that `accelerate launch` makes of its config (accelerate/utils/launch.py, 1.15). A section's
# values are texts as Python prints them, since accelerate takes str() of each.

_Section = Mapping[str, str]
_VISIBLE = {
    "MULTI_XPU": "ZE_AFFINITY_MASK",
    "MULTI_MLU": "MLU_VISIBLE_DEVICES",
    "MULTI_SDAA": "SDAA_VISIBLE_DEVICES",
    "MULTI_MUSA": "MUSA_VISIBLE_DEVICES",
    "MULTI_NPU": "ASCEND_RT_VISIBLE_DEVICES",
    "MULTI_HPU": "HABANA_VISIBLE_MODULES",
    "MULTI_NEURON": "NEURON_RT_VISIBLE_CORES",
}
"""What `gpu_ids` becomes; CUDA_VISIBLE_DEVICES elsewhere. accelerate asks the drivers, we the type."""

_FSDP = {
    "fsdp_version": "1",
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_reshard_after_forward": "true",
    "fsdp_offload_params": "false",
    "fsdp_min_num_params": "100000000",
    "fsdp_forward_prefetch": "false",
    "fsdp_use_orig_params": "true",
    "fsdp_cpu_ram_efficient_loading": "true",
    "fsdp_sync_module_states": "true",
    "fsdp_activation_checkpointing": "false",
    "fsdp_activation_checkpointing_offload": "false",
}
"""What accelerate sets with or without a value in the config."""
_FSDP_GIVEN = (
    *("fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap", "fsdp_backward_prefetch"),
    *("fsdp_state_dict_type", "fsdp_ignored_modules"),
)
_DEEPSPEED = {
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "deepspeed_moe_layer_cls_names": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
}
_WITH_CAPITALS = ("deepspeed_config_file", "deepspeed_moe_layer_cls_names", "fsdp_sharding_strategy")


def _sections(kind: str, mixed_precision: str | None, sections: Mapping[str, _Section]) -> Draft:
    """`env` from the config's sections, as far as a job of that distributed_type has them."""
    used = {**_ALWAYS, **_BY_TYPE.get(kind, {})}
    if mixed_precision == "fp8":
        used["fp8_config"] = _fp8
    parts = [used[name](section) for name, section in sections.items() if section and name in used]
    if kind == "FSDP" and not sections.get("fsdp_config"):
        parts.append(_fsdp({}))
    idle = [name for name, section in sections.items() if section and name not in used]
    notes = tuple(Note(f"{name} has no effect in a job of type {kind}", "env") for name in idle)
    return joined([*parts, Draft(notes=notes), _deepspeed_fields(kind, mixed_precision, sections)])


def _variables(variables: Mapping[str, Data], notes: list[str]) -> Draft:
    return Draft({"env": variables}, tuple(Note(note, "env") for note in notes))


def _prefixed(prefix: str, section: _Section) -> dict[str, str]:
    return {key if key.startswith(prefix) else prefix + key: value for key, value in section.items()}


def _dynamo(section: _Section) -> Draft:
    given = _prefixed("dynamo_", section)
    if "dynamo_backend" in given:
        given["dynamo_backend"] = given["dynamo_backend"].upper()
    return _variables({f"ACCELERATE_{key.upper()}": value for key, value in given.items()}, [])


def _fp8(section: _Section) -> Draft:
    given = _prefixed("fp8_", section)
    notes = [f"fp8_config: the script must set {key} itself" for key in given if "override_linear" in key]
    kept = {key: value for key, value in given.items() if "override_linear" not in key}
    return _variables({f"ACCELERATE_{key.upper()}": value for key, value in kept.items()}, notes)


def _fsdp(section: _Section) -> Draft:
    given = {**_FSDP, **_prefixed("fsdp_", section)}
    names = {key: key.upper().replace("LAYER_CLS", "CLS") for key in (*_FSDP, *_FSDP_GIVEN)}
    variables = {
        names[key]: value.lower() if key in _FSDP and key not in _WITH_CAPITALS else value
        for key, value in given.items()
        if key in names
    }
    notes = [f"fsdp_config: unknown key {key}" for key in given if key not in names]
    return _variables({"ACCELERATE_USE_FSDP": "true", **variables}, notes)


def _deepspeed(section: _Section) -> Draft:
    variables = {
        name: section[key] if key in _WITH_CAPITALS else section[key].lower()
        for key, name in _DEEPSPEED.items()
        if key in section
    }
    idle = [key for key in section if key not in _DEEPSPEED and key != "deepspeed_hostfile"]
    notes = [f"deepspeed_config: {key}: {section[key]} is for DeepSpeed's own launcher" for key in idle]
    notes.append(
        "accelerate adds the current folder to PYTHONPATH for DeepSpeed: if imports fail, do the same"
    )
    return _variables({"ACCELERATE_USE_DEEPSPEED": "true", **variables}, notes)


def _deepspeed_fields(kind: str, mixed_precision: str | None, sections: Mapping[str, _Section]) -> Draft:
    """The config's fields that DeepSpeed's own config file must not contradict."""
    if kind != "DEEPSPEED":
        return Draft()
    fields = [*sections.get("deepspeed_config", {}), *(["mixed_precision"] if mixed_precision else [])]
    return _variables(
        {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_CONFIG_DS_FIELDS": ",".join(fields)}, []
    )


def _megatron(section: _Section) -> Draft:
    given = {key.upper(): value for key, value in _prefixed("megatron_lm_", section).items()}
    return _variables({"ACCELERATE_USE_MEGATRON_LM": "true", **given}, [])


def _parallelism(section: _Section) -> Draft:
    given = {key.upper(): value for key, value in _prefixed("parallelism_config_", section).items()}
    return _variables({"ACCELERATE_USE_PARALLELISM_CONFIG": "true", **given}, [])


_Part = Callable[[_Section], Draft]
_ALWAYS: Mapping[str, _Part] = {"dynamo_config": _dynamo, "parallelism_config": _parallelism}
_BY_TYPE: Mapping[str, dict[str, _Part]] = {
    "FSDP": {"fsdp_config": _fsdp},
    "DEEPSPEED": {"deepspeed_config": _deepspeed},
    "MEGATRON_LM": {"megatron_lm_config": _megatron},
}
