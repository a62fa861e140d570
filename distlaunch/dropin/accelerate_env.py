"""The variables that `accelerate launch` makes of its config (accelerate/utils/launch.py, 1.15).

A section's values are texts as Python prints them, since accelerate takes str() of each.
"""

from collections.abc import Callable, Mapping

from distlaunch.dropin.job_text import Data, Draft, Note, joined

Section = Mapping[str, str]
VISIBLE = {
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
_FSDP_GIVEN = {
    "fsdp_auto_wrap_policy": "FSDP_AUTO_WRAP_POLICY",
    "fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "fsdp_backward_prefetch": "FSDP_BACKWARD_PREFETCH",
    "fsdp_state_dict_type": "FSDP_STATE_DICT_TYPE",
    "fsdp_ignored_modules": "FSDP_IGNORED_MODULES",
}
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
_WITH_CAPITALS = frozenset(
    {"deepspeed_config_file", "deepspeed_moe_layer_cls_names", "fsdp_sharding_strategy"}
)


def sections_draft(kind: str, mixed_precision: str | None, sections: Mapping[str, Section]) -> Draft:
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


def _env(variables: Mapping[str, Data], notes: list[str]) -> Draft:
    return Draft({"env": variables}, tuple(Note(note, "env") for note in notes))


def _prefixed(prefix: str, section: Section) -> dict[str, str]:
    return {key if key.startswith(prefix) else prefix + key: value for key, value in section.items()}


def _dynamo(section: Section) -> Draft:
    given = _prefixed("dynamo_", section)
    if "dynamo_backend" in given:
        given["dynamo_backend"] = given["dynamo_backend"].upper()
    return _env({f"ACCELERATE_{key.upper()}": value for key, value in given.items()}, [])


def _fp8(section: Section) -> Draft:
    given = _prefixed("fp8_", section)
    notes = [f"fp8_config: the script must set {key} itself" for key in given if "override_linear" in key]
    kept = {key: value for key, value in given.items() if "override_linear" not in key}
    return _env({f"ACCELERATE_{key.upper()}": value for key, value in kept.items()}, notes)


def _fsdp(section: Section) -> Draft:
    given = {**_FSDP, **_prefixed("fsdp_", section)}
    names = {**{key: key.upper() for key in _FSDP}, **_FSDP_GIVEN}
    variables = {
        names[key]: value.lower() if key in _FSDP and key not in _WITH_CAPITALS else value
        for key, value in given.items()
        if key in names
    }
    notes = [f"fsdp_config: unknown key {key}" for key in given if key not in names]
    return _env({"ACCELERATE_USE_FSDP": "true", **variables}, notes)


def _deepspeed(section: Section) -> Draft:
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
    return _env({"ACCELERATE_USE_DEEPSPEED": "true", **variables}, notes)


def _deepspeed_fields(kind: str, mixed_precision: str | None, sections: Mapping[str, Section]) -> Draft:
    """The config's fields that DeepSpeed's own config file must not contradict."""
    if kind != "DEEPSPEED":
        return Draft()
    fields = [*sections.get("deepspeed_config", {}), *(["mixed_precision"] if mixed_precision else [])]
    return _env({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_CONFIG_DS_FIELDS": ",".join(fields)}, [])


def _megatron(section: Section) -> Draft:
    given = {key.upper(): value for key, value in _prefixed("megatron_lm_", section).items()}
    return _env({"ACCELERATE_USE_MEGATRON_LM": "true", **given}, [])


def _parallelism(section: Section) -> Draft:
    given = {key.upper(): value for key, value in _prefixed("parallelism_config_", section).items()}
    return _env({"ACCELERATE_USE_PARALLELISM_CONFIG": "true", **given}, [])


_Part = Callable[[Section], Draft]
_ALWAYS: Mapping[str, _Part] = {"dynamo_config": _dynamo, "parallelism_config": _parallelism}
_BY_TYPE: Mapping[str, dict[str, _Part]] = {
    "FSDP": {"fsdp_config": _fsdp},
    "DEEPSPEED": {"deepspeed_config": _deepspeed},
    "MEGATRON_LM": {"megatron_lm_config": _megatron},
}
