"""Import of accelerate configs as job files, and refusals."""

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.errors import JobError
from tests.unit.drafts import CONFIGS, accelerated, comments, keys_of
from tests.unit.samples import bounded, process_text


@pytest.mark.parametrize(("text", "keys"), CONFIGS)
def test_an_accelerate_config_becomes_a_job(text: str, keys: dict[str, Any]) -> None:
    assert keys_of(accelerated(text, "x.py", "a")) == {"script": "x.py", "args": ["a"], **keys}


def test_refuses_a_file_without_accelerate_keys() -> None:
    with pytest.raises(JobError, match="not an accelerate config: it has none of the usual keys"):
        accelerated("{script: train.py, procs_per_node: 2}")


def test_fsdp_gets_accelerates_implicit_settings() -> None:
    env = keys_of(
        accelerated(
            "{distributed_type: FSDP, num_processes: 2, fsdp_config: {fsdp_version: 2, offload_params: True, "
            "fsdp_transformer_layer_cls_to_wrap: BertLayer, fsdp_odd: 1}, parallelism_config: "
            "{parallelism_config_tp_size: 2}}"
        )
    )["env"]
    assert (
        env.items()
        >= {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
            "FSDP_OFFLOAD_PARAMS": "true",
            "FSDP_TRANSFORMER_CLS_TO_WRAP": "BertLayer",
            "FSDP_MIN_NUM_PARAMS": "100000000",
            "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
            "PARALLELISM_CONFIG_TP_SIZE": "2",
        }.items()
    )


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("frob: 3", "frob: 3 has no equivalent here"),
        ("tpu_use_sudo: true", "tpu_use_sudo: True has no equivalent"),
        (
            "num_machines: 2, rdzv_backend: etcd, main_process_ip: a",
            "set rendezvous.backend to etcd-v2 and rendezvous.endpoint to a:29500",
        ),
        ("num_machines: 2, machine_rank: 0", "machine_rank is not needed"),
        ("num_machines: 2", "replace with your host names"),
        ("num_machines: 3", "num_processes: 2 on 3 machines"),
        ("fsdp_config: {a: b}", "fsdp_config has no effect in a job of type MULTI_GPU"),
        ("num_machines: 2, gpu_ids: 0", "here they apply to all"),
    ],
)
def test_settings_without_an_equivalent_become_comments(more: str, words: str) -> None:
    told = comments(accelerated(f"{{distributed_type: MULTI_GPU, num_processes: 2, {more}}}"))
    assert words in told
    assert "replace with your script and its arguments" in told


@pytest.mark.parametrize("kind", ["MULTI_NPU", "XLA"])
def test_other_accelerators_become_comments(kind: str) -> None:
    draft = accelerated(f"{{distributed_type: {kind}, num_processes: 2, gpu_ids: '0,1'}}", "x.py")
    assert keys_of(draft) == {"script": "x.py", "procs_per_node": 2}
    assert f"distributed_type: {kind} has no equivalent here" in comments(draft)
    assert "gpu_ids: 0,1 has no equivalent here" in comments(draft)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a", "c.yaml:1:1: expected an accelerate config"),
        ("num_machines: x", "c.yaml:1:15: num_machines: expected an integer"),
        ("distributed_type: [XLA]", "c.yaml:1:19: distributed_type: expected"),
        ("compute_environment: AMAZON_SAGEMAKER", "c.yaml:1:22: compute_environment: expected"),
        ("fsdp_config: 3", "c.yaml:1:14: fsdp_config: expected a map of settings"),
        ("main_process_ip: -x", "c.yaml:1:18: main_process_ip: a host name can't begin"),
    ],
)
def test_refuses_a_wrong_config_with_its_place(text: str, words: str) -> None:
    with pytest.raises(JobError) as caught:
        accelerated(text)
    assert str(caught.value).startswith(words)


_section = st.dictionaries(
    st.text("abz_", min_size=1), process_text | st.integers() | st.booleans(), max_size=3
)
_configs = st.fixed_dictionaries(
    {},
    optional={
        "distributed_type": st.sampled_from(["NO", "MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM"]),
        "num_machines": st.integers(0, 20),
        "num_processes": st.integers(-1, 20),
        "main_process_ip": process_text | st.just("gpu-a"),
        "main_process_port": st.integers(-1, 70000),
        "gpu_ids": process_text,
        "mixed_precision": st.sampled_from(["no", "fp16", "fp8", "x", False]),
        "rdzv_backend": process_text,
        "fsdp_config": _section,
        "deepspeed_config": _section,
        "megatron_lm_config": _section,
        "dynamo_config": _section,
        "other": process_text,
    },
)


@given(config=_configs)
@bounded(300)
def test_any_config_becomes_a_job_or_is_refused_with_its_place(config: dict[str, Any]) -> None:
    try:
        draft = accelerated(yaml.safe_dump(config, allow_unicode=True))
    except JobError as error:
        assert all(problem.source == "c.yaml" for problem in error.problems)
    else:
        keys_of(draft)
