"""Shared parts of the tests of imports: drafts of job files, and configs of accelerate."""

from typing import Any

import yaml
from hypothesis import strategies as st

from distlaunch.compat.draft import Draft
from distlaunch.compat.from_accelerate import accelerate_draft
from distlaunch.compat.from_torchrun import command_draft
from distlaunch.job.fields import with_sections
from distlaunch.job.text import PLACEHOLDERS
from distlaunch.job.yaml_document import parse
from tests.unit.samples import SECTIONS, spec_of

CPUS = 6


def imported(command: str) -> Draft:
    return command_draft([command], CPUS)


def keys_of(draft: Draft) -> dict[str, Any]:
    """The keys as the text has them; that a job file may say so is tried."""
    text = draft.text()
    spec_of(text)
    loaded: dict[str, Any] = yaml.safe_load(text)
    assert loaded == draft.document()["job"]
    assert list(loaded) == [key for key in with_sections(SECTIONS).fields if key in loaded]
    return loaded


def comments(draft: Draft) -> str:
    return "\n".join(line for line in draft.text().splitlines() if line.startswith("#"))


# The way back

_brace = st.sampled_from(
    [f"{{{name}}}" for name in (*PLACEHOLDERS, "a-b", "X1", "1")] + [*"{}x$", "{{", "}}"]
)
braces = st.lists(_brace, max_size=6).map("".join)


# accelerate


def accelerated(text: str, *program: str) -> Draft:
    return accelerate_draft(parse(text, "c.yaml"), "c.yaml", program)


CONFIGS: list[tuple[str, dict[str, Any]]] = {
    "{distributed_type: 'NO', num_processes: 1, num_machines: 1, mixed_precision: no, gpu_ids: all}": {
        "procs_per_node": 1
    },
    (
        "{distributed_type: MULTI_GPU, num_processes: 8, num_machines: 2, machine_rank: 1, "
        "main_process_ip: gpu-a, main_process_port: 29500, rdzv_backend: static, same_network: true}"
    ): {"nodes": ["gpu-a", "HOST1"], "procs_per_node": 4, "master_addr": "gpu-a", "master_port": 29500},
    (
        "{distributed_type: MULTI_GPU, num_processes: 2, gpu_ids: '0,1', mixed_precision: bf16, "
        "debug: true, enable_cpu_affinity: true, main_process_port: 0}"
    ): {
        "gpus_per_node": 2,
        "procs_per_node": 2,
        "env": {
            "CUDA_VISIBLE_DEVICES": "0,1",
            "ACCELERATE_MIXED_PRECISION": "bf16",
            "ACCELERATE_DEBUG_MODE": "true",
            "ACCELERATE_CPU_AFFINITY": "1",
        },
    },
    "{distributed_type: MULTI_CPU, num_processes: 4, use_cpu: true}": {
        "gpus_per_node": 0,
        "procs_per_node": 4,
        "env": {"ACCELERATE_USE_CPU": "True"},
    },
    (
        "{distributed_type: MULTI_GPU, num_processes: -1, dynamo_config: {dynamo_backend: inductor,"
        " mode: x, use_dynamic: true}}"
    ): {
        "env": {
            "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
            "ACCELERATE_DYNAMO_MODE": "x",
            "ACCELERATE_DYNAMO_USE_DYNAMIC": "True",
        }
    },
    (
        "{distributed_type: DEEPSPEED, num_processes: 4, num_machines: 2, mixed_precision: bf16, "
        "deepspeed_config: {zero_stage: 3, gradient_clipping: 1.0, offload_param_device: none, "
        "zero3_init_flag: True, deepspeed_hostfile: hosts, deepspeed_multinode_launcher: pdsh}}"
    ): {
        "hostfile": "hosts",
        "procs_per_node": 2,
        "env": {
            "ACCELERATE_MIXED_PRECISION": "bf16",
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
            "ACCELERATE_GRADIENT_CLIPPING": "1.0",
            "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
            "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
            "ACCELERATE_CONFIG_DS_FIELDS": "zero_stage,gradient_clipping,offload_param_device,"
            "zero3_init_flag,deepspeed_hostfile,deepspeed_multinode_launcher,mixed_precision",
        },
    },
    (
        "{distributed_type: MEGATRON_LM, num_processes: 2, mixed_precision: fp8, "
        "megatron_lm_config: {megatron_lm_tp_degree: 2}, fp8_config: {backend: TE}}"
    ): {
        "procs_per_node": 2,
        "env": {
            "ACCELERATE_MIXED_PRECISION": "fp8",
            "ACCELERATE_USE_MEGATRON_LM": "true",
            "MEGATRON_LM_TP_DEGREE": "2",
            "ACCELERATE_FP8_BACKEND": "TE",
        },
    },
}
