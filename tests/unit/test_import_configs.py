"""Import of accelerate configs, of mpirun command lines and of hostfiles as job files, and refusals."""

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.compat.draft import Draft, hostfile_draft
from distlaunch.compat.from_accelerate import accelerate_draft
from distlaunch.compat.from_mpirun import mpirun_draft
from distlaunch.errors import JobError, UsageError
from distlaunch.job.nodes import parse_hostfile
from distlaunch.job.spec import JobSpec, NodeSpec
from distlaunch.job.yaml_document import parse
from distlaunch.plan.placement import Facts, make_plan
from distlaunch.transports.ssh import Ssh
from tests.unit.drafts import comments, keys_of
from tests.unit.samples import bounded, process_text, spec_of
from tests.unit.tasks import variables


def accelerated(text: str, *program: str) -> Draft:
    return accelerate_draft(parse(text, "c.yaml"), "c.yaml", program)


ETCD = "num_machines: 2, rdzv_backend: etcd, main_process_ip: a"


CONFIGS = {
    "distributed_type: 'NO', num_processes: 1, mixed_precision: no, gpu_ids: all": "{procs_per_node: 1}",
    """distributed_type: MULTI_GPU, num_processes: 8, num_machines: 2, machine_rank: 1,
    main_process_ip: gpu-a, main_process_port: 29500, rdzv_backend: static, same_network: true""": """
    {nodes: [gpu-a, NODE_NAME_1], procs_per_node: 4, master_addr: gpu-a, master_port: 29500}""",
    """distributed_type: MULTI_GPU, num_processes: 2, gpu_ids: '0,1', mixed_precision: bf16,
    debug: true, enable_cpu_affinity: true, main_process_port: 0""": """
    {gpus_per_node: 2, procs_per_node: 2, env: {CUDA_VISIBLE_DEVICES: "0,1", ACCELERATE_MIXED_PRECISION: bf16,
    ACCELERATE_DEBUG_MODE: "true", ACCELERATE_CPU_AFFINITY: "1"}}""",
    "distributed_type: MULTI_CPU, num_processes: 4, use_cpu: true": """
    {gpus_per_node: 0, procs_per_node: 4, env: {ACCELERATE_USE_CPU: "True"}}""",
    """distributed_type: MULTI_GPU, num_processes: -1,
    dynamo_config: {dynamo_backend: inductor, mode: x, use_dynamic: true}""": """
    {env: {ACCELERATE_DYNAMO_BACKEND: INDUCTOR, ACCELERATE_DYNAMO_MODE: x,
    ACCELERATE_DYNAMO_USE_DYNAMIC: "True"}}""",
    """distributed_type: DEEPSPEED, num_processes: 4, num_machines: 2, mixed_precision: bf16,
    deepspeed_config: {zero_stage: 3, gradient_clipping: 1.0, offload_param_device: none,
    zero3_init_flag: True, deepspeed_hostfile: hosts, deepspeed_multinode_launcher: pdsh}""": """
    {hostfile: hosts, procs_per_node: 2, env: {
    ACCELERATE_MIXED_PRECISION: bf16, ACCELERATE_USE_DEEPSPEED: "true", ACCELERATE_DEEPSPEED_ZERO_STAGE: "3",
    ACCELERATE_GRADIENT_CLIPPING: "1.0", ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE: none,
    ACCELERATE_DEEPSPEED_ZERO3_INIT: "true", ACCELERATE_CONFIG_DS_FIELDS: "zero_stage,gradient_clipping,\\
    offload_param_device,zero3_init_flag,deepspeed_hostfile,deepspeed_multinode_launcher,mixed_precision"}}""",
    """distributed_type: MEGATRON_LM, num_processes: 2, mixed_precision: fp8,
    megatron_lm_config: {megatron_lm_tp_degree: 2}, fp8_config: {backend: TE}""": """
    {procs_per_node: 2, env: {ACCELERATE_MIXED_PRECISION: fp8, ACCELERATE_USE_MEGATRON_LM: "true",
    MEGATRON_LM_TP_DEGREE: "2", ACCELERATE_FP8_BACKEND: TE}}""",
}


def test_a_module_may_be_the_program() -> None:
    found = accelerated("num_processes: 1", "-m", "pkg.train", "-m").keys
    assert (found["module"], found["args"], "script" in found) == ("pkg.train", ["-m"], False)


@pytest.mark.parametrize(("text", "keys"), CONFIGS.items())
def test_an_accelerate_config_becomes_a_job(text: str, keys: str) -> None:
    draft = accelerated(f"{{{text}}}", "x.py", "a")
    assert keys_of(draft) == {"script": "x.py", "args": ["a"], **yaml.safe_load(keys)}


def test_fsdp_gets_accelerates_implicit_settings() -> None:
    draft = accelerated(
        "{distributed_type: FSDP, num_processes: 2, fsdp_config: {fsdp_version: 2, offload_params: True, "
        "fsdp_transformer_layer_cls_to_wrap: BertLayer, fsdp_odd: 1}, parallelism_config: "
        "{parallelism_config_tp_size: 2}}"
    )
    wanted = variables(
        "ACCELERATE_USE_FSDP=true FSDP_VERSION=2 FSDP_SHARDING_STRATEGY=FULL_SHARD FSDP_OFFLOAD_PARAMS=true "
        "FSDP_TRANSFORMER_CLS_TO_WRAP=BertLayer FSDP_MIN_NUM_PARAMS=100000000 "
        "ACCELERATE_USE_PARALLELISM_CONFIG=true PARALLELISM_CONFIG_TP_SIZE=2"
    )
    assert keys_of(draft)["env"].items() >= wanted.items()


NO_EQUIVALENT = [
    ("frob: 3", "frob: 3 has no equivalent in a job file"),
    ("tpu_use_sudo: true", "tpu_use_sudo: True has no equivalent"),
    (ETCD, "set rendezvous.backend to etcd-v2 and rendezvous.endpoint to a:29500"),
    ("num_machines: 2, machine_rank: 0", "machine_rank is not needed"),
    ("num_machines: 2", "replace with your host names"),
    ("num_machines: 3", "num_processes: 2 on 3 machines"),
    ("fsdp_config: {a: b}", "fsdp_config has no effect in a job of type MULTI_GPU"),
    ("num_machines: 2, gpu_ids: 0", "in a job file, they apply to all"),
]


@pytest.mark.parametrize(("more", "words"), NO_EQUIVALENT)
def test_settings_without_an_equivalent_become_comments(more: str, words: str) -> None:
    told = comments(accelerated(f"{{distributed_type: MULTI_GPU, num_processes: 2, {more}}}"))
    assert words in told
    assert "replace with your script and its arguments" in told


def test_other_accelerators_become_comments() -> None:
    for kind in ("MULTI_NPU", "XLA"):
        draft = accelerated(f"{{distributed_type: {kind}, num_processes: 2, gpu_ids: '0,1'}}", "x.py")
        assert keys_of(draft) == {"script": "x.py", "procs_per_node": 2}
        for setting in (f"distributed_type: {kind}", "gpu_ids: 0,1"):
            assert f"{setting} has no equivalent in a job file" in comments(draft)


WRONG_CONFIGS = [
    ("a", "c.yaml:1:1: expected an accelerate config"),
    ("script: t.py", "c.yaml:1:1: not an accelerate config: it has none of the usual keys"),
    ("num_machines: x", "c.yaml:1:15: num_machines: expected an integer"),
    ("distributed_type: [XLA]", "c.yaml:1:19: distributed_type: expected"),
    ("compute_environment: AMAZON_SAGEMAKER", "c.yaml:1:22: compute_environment: expected"),
    ("fsdp_config: 3", "c.yaml:1:14: fsdp_config: expected a map of settings"),
    ("main_process_ip: -x", "c.yaml:1:18: main_process_ip: a host name can't begin"),
]


@pytest.mark.parametrize(("text", "words"), WRONG_CONFIGS)
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
        **{f"{name}_config": _section for name in ("fsdp", "deepspeed", "megatron_lm", "dynamo")},
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


# Hostfiles


HOSTFILES = [
    ("a\nb\n", {"nodes": ["a", "b"]}),
    ("a slots=4\nb slots=4 max_slots=8\n", {"nodes": ["a", "b"], "procs_per_node": 4}),
    ("a:2\nme@10.0.0.2:2\n", {"nodes": ["a", "me@10.0.0.2"], "procs_per_node": 2}),
    ("a slots=4\nb", {"nodes": [{"host": "a", "procs": 4}, "b"]}),
    ("a slots=4\nme@c slots=1", {"nodes": [{"host": "a", "procs": 4}, {"host": "me@c", "procs": 1}]}),
    ("a slots=1\na slots=2", {"nodes": ["a"], "procs_per_node": 3}),
]


@pytest.mark.parametrize(("text", "keys"), HOSTFILES)
def test_a_hostfile_becomes_a_job(text: str, keys: dict[str, Any]) -> None:
    draft = hostfile_draft(text, "hosts", ["x.py"])
    assert keys_of(draft) == {"script": "x.py", **keys}
    assert ("max_slots has no equivalent" in comments(draft)) == ("max_slots" in text)


A_B: dict[str, Any] = {"nodes": ["a", "b"], "procs_per_node": 2}
A_1 = {"env": {"A": "1"}, "args": ["--lr", "1"]}


def uneven(a: int, b: int) -> dict[str, Any]:
    return {"nodes": [{"host": "a", "procs": a}, {"host": "b", "procs": b}]}


MPIRUN = [
    ("A=1 mpirun -np 4 -H a:2,b:2 --mca btl self python -u t.py --lr 1", A_B | A_1),
    ("mpirun -n 2 -x B=2 -x C python t.py", {"procs_per_node": 2, "env": {"B": "2", "C": None}}),
    ("mpirun -n 4 -H a:3,b:2,c:2 -- python t.py", uneven(3, 1)),
    ("mpirun -n 4 -H a,b python t.py", A_B),
    ("mpirun -N 2 -n 4 -x MASTER_ADDR python t.py", {"nodes": 2, "procs_per_node": 2}),
    ("mpirun -genvall -genv A=$B -n 2 python t.py", {"procs_per_node": 2, "env": {"A": "$B"}}),
    ("mpirun -n 5 -H a,b python t.py", uneven(3, 2)),
    ("mpirun --oversubscribe -np 2 python t.py | tee log", {"procs_per_node": 2}),
    ("mpiexec -ppn 2 -hosts a,b -wdir /w python t.py", {**A_B, "workdir": "/w"}),
    ("mpirun --hostfile h -np 8 python t.py", {"hostfile": "h"}),
]


@pytest.mark.parametrize(("line", "keys"), MPIRUN)
def test_a_line_of_mpirun_becomes_a_job(line: str, keys: dict[str, Any]) -> None:
    draft = mpirun_draft([line])
    assert draft.document()["job"] == {"script": "t.py", "python": "python", **keys}
    left = ("--mca btl=self", "--oversubscribe", "`| tee log`", "-genvall", "$B: job files don't expand")
    assert all(word in comments(draft) for word in left if word.split()[0].strip(":") in line)


WRONG_MPIRUN = [
    *((line, "expected") for line in ("mpirun -n 2", "torchrun t.py", "")),
    ("mpirun -np abc python t.py", "-np abc: expected a number"),
    ("mpirun -n 1 python a.py : -n 2 b.py", "`: -n 2 b.py`: remove everything from the colon on"),
    ("mpirun -n 8 -H a:2,b:2 python t.py", "-n 8: the hosts have only 4 slots"),
    ("mpirun -n 3 -N 2 python t.py", "-n 3 is not a multiple of 2"),
    ("mpirun -n $N python t.py", r"-n \$N: write the value"),
    ("mpirun -H a -host b python t.py", "-host b: given twice"),
]


@pytest.mark.parametrize(("line", "error"), WRONG_MPIRUN)
def test_refuses_what_it_cannot_read_in_a_line_of_mpirun(line: str, error: str) -> None:
    with pytest.raises(UsageError, match=error):
        mpirun_draft([line])


def test_an_imported_hostfile_says_what_dry_run_needs() -> None:
    for hosts in ("a\n", "a slots=1\nb\n"):
        draft = hostfile_draft(hosts, "hosts")
        assert "set gpus_per_node to the number of GPUs per node" in comments(draft)
        facts = dict.fromkeys(range(hosts.count("\n")), Facts("python", None))
        with pytest.raises(JobError, match="set gpus_per_node"):
            make_plan(spec_of(draft.text()), facts)
        taken = spec_of(f"{draft.text()}gpus_per_node: 8\n")
        assert [node.gpus for node in taken.nodes] == [8] * len(facts)
        assert make_plan(taken, facts)


@given(text=st.text("ab[]0123,-.: @#=\t\n²slots", max_size=40) | st.text(max_size=60))
@bounded(300)
def test_an_imported_hostfile_means_the_same_as_hostfile(text: str) -> None:
    def read() -> JobSpec:
        return spec_of("{script: x, hostfile: hosts}", hostfile=parse_hostfile(text, "hosts"))

    def reached(node: NodeSpec) -> tuple[str, str | None, str | None, int | None]:
        assert isinstance(node.reach, Ssh)
        return node.label, node.reach.host, node.reach.user or None, node.procs

    try:
        copied = spec_of(hostfile_draft(text, "hosts").text())
    except JobError:
        with pytest.raises(JobError):
            read()
    else:
        assert list(map(reached, copied.nodes)) == list(map(reached, read().nodes))
