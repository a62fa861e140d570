"""Manifests of jobs for clusters of three versions: contents, names, refusals, and keys without effect.

No cluster runs here. Kubernetes' own schemas stand in for its API server, and the models of Kubeflow's client
for JobSet's and Trainer's; tests/process/test_kubernetes.py runs what the pods would.
"""

import json
import sys
from base64 import b64encode
from pathlib import Path
from string import Template
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.cli.job_file import job_of
from distlaunch.cli.own_archive import torchrun_modules, torchrun_payload
from distlaunch.errors import JobError
from distlaunch.job.spec import JobSpec
from distlaunch.job.yaml_document import yaml_text
from distlaunch.kubernetes.checks import check_exported, left_out, with_gpus
from distlaunch.kubernetes.manifests import Kind, first_host, manifests, merged, object_name, unexpanded
from distlaunch.launch.addresses import plan_without_nodes
from tests.pods import expand
from tests.unit.samples import bounded
from tests.unit.test_floors import MODULES, imports_of, name_of

VERSIONS = ("1.30", "1.33", "1.37")
KINDS: tuple[Kind, ...] = ("job", "jobset", "trainjob")
APPLY_LIMIT = 262144
"""Bytes of an object that `kubectl apply` can keep in its annotation."""
ODD = (
    *("it's", 'say "hi"', "$HOME `id` $(id)", "$(POD_IP) $$ a$", "two\nlines\n", " ", "", "\t\\n", "1e-4"),
    *("0o17", "yes", "null", "~", "- x", "#", "&a", "!t", "%d", "@", "{{brace}}", "é\x85\ud7ff\U0001f600"),
)

CPU_JOB = {"script": "t.py", "gpus_per_node": 0}
TWO = "script: t.py\nnodes: 2\n"
JOBS = {
    "CPU": "script: train.py\ngpus_per_node: 0\nprocs_per_node: 4\n",
    "64 GPUs": "script: train.py\nnodes: 8\ngpus_per_node: 8\nnuma_binding: node\n",
    "AMD GPUs": f"{TWO}kubernetes: {{resources: {{limits: {{amd.com/gpu: 8, memory: 64Gi}}}}}}\n",
    "a long name": f"name: {'Llama 3.1 8B, ' * 9}\nscript: train.py\nnodes: 300\ngpus_per_node: 1\n",
    "odd words": yaml.safe_dump({**CPU_JOB, "nodes": 2, "args": [*ODD], "env": {"X": ODD[2]}}),
    "secrets": "script: t.py\ngpus_per_node: 1\nenv: {HF_TOKEN: null, A: b}\n"
    "kubernetes: {secrets: {HF_TOKEN: {secret: hf, key: token}}}\n",
    "a module": "module: pkg.train\nnodes: 2\ngpus_per_node: 2\npython: /venv/bin/python\nworkdir: /src\n",
    "a command": "command: [./a.out, -x]\nnodes: 2\ngpus_per_node: 0\nrole: trainer\n",
    "restarts": "script: t.py\nnodes: 4\ngpus_per_node: 8\nrestarts: {max: 3, requeue: 5}\n"
    "timeouts: {job: 12h}\n",
    "everything": f"""{TWO}gpus_per_node: 8
logs: {{dir: /data/runs}}
rendezvous: {{endpoint: ":29600", id: seven}}
kubernetes: {{namespace: ml, labels: {{team: nlp}}, annotations: {{example.com/note: "on: off"}},
  node_selector: {{gpu: h100}}, tolerations: [{{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}}],
  queue: gpus, resources: {{requests: {{cpu: 16}}}}, volumes: [
  {{mount: /data, claim: data, sub_path: me, read_only: true}}, {{mount: /etc/conf, config_map: conf}},
  {{mount: /keys, secret: keys}}, {{mount: /scratch, host_path: /mnt/nvme}}], service_account: trainer,
  image_pull_secrets: [ghcr], priority_class: high, ttl: none,
  extra: {{metadata: {{annotations: {{added: "1"}}}}}}}}""",
}


def exported(text: str, *overrides: str, image: str = "kubernetes.image=a/b:1") -> JobSpec:
    return with_gpus(
        job_of(text, "/project/job.yaml", (image, *overrides), (), submitted=True, in_image=True)
    )


@pytest.mark.parametrize(
    ("more", "image"), [("", "c:1"), (", runtime: [podman, -v]", "c:1"), (", runtime: apptainer", None)]
)
def test_pods_run_the_image_of_the_container_if_kubernetes_has_none(more: str, image: str | None) -> None:
    text = f"script: t.py\ngpus_per_node: 0\ncontainer: {{image: 'c:1'{more}}}"
    assert exported(text, image="kubernetes.image=null").kubernetes.get("image") == image
    assert exported(text).kubernetes["image"] == "a/b:1"


def printed(text: str, kind: Kind = "job", *overrides: str) -> list[dict[str, Any]]:
    """The manifests, as they are read back from what is printed."""
    spec = exported(text, *overrides)
    check_exported(spec)
    made = manifests(spec, kind, plan_without_nodes(spec).nodes[0].procs, "AAAA")
    read = list(yaml.safe_load_all(yaml_text(made)))
    assert read == made
    return read


def job(text: str, *overrides: str) -> dict[str, Any]:
    return printed(text, "job", *overrides)[-1]


def pod(text: str, *overrides: str) -> Any:
    return job(text, *overrides)["spec"]["template"]["spec"]


def main(text: str, *overrides: str) -> Any:
    (found,) = pod(text, *overrides)["containers"]
    return found


# What a cluster takes


def without_empty(value: Any) -> Any:
    """A model knows no difference between what is empty and what is not there."""
    if isinstance(value, dict):
        return {key: without_empty(each) for key, each in value.items() if each not in ({}, [], None)}
    return [without_empty(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("text", JOBS.values(), ids=JOBS)
def test_clusters_accept_the_manifests_and_kubeflows_client_knows_every_field(text: str) -> None:
    # Here, because they take a second, and each worker of pytest imports this module.
    import kubernetes_validate
    from kubeflow_trainer_api.models import JobsetV1alpha2JobSet, TrainerV1alpha1TrainJob

    bundle, jobset = printed(text, "jobset")
    (group,) = jobset["spec"]["replicatedJobs"]
    alone = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **group["template"]}
    for version in VERSIONS:
        for manifest in (*printed(text), alone):
            kubernetes_validate.validate(manifest, version, strict=True)
    other_bundle, trainjob = printed(text, "trainjob")
    for manifest in (bundle, other_bundle):
        kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)
    for workload, model in ((jobset, JobsetV1alpha2JobSet), (trainjob, TrainerV1alpha1TrainJob)):
        assert without_empty(json.loads(model.from_dict(workload).to_json())) == without_empty(workload)


# Words arrive as they were written


@given(st.text("$()aX ") | st.text())
@bounded(300)
def test_kubernetes_fills_nothing_into_the_jobs_words(text: str) -> None:
    assert expand(unexpanded(text), {"a": "wrong", "X": "wrong"}) == text


def test_args_and_variables_arrive_as_they_were_written() -> None:
    container = main(JOBS["odd words"])
    expanded = [expand(word, {"POD_IP": "wrong", "id": "wrong"}) for word in container["args"]]
    words = [Template(word).safe_substitute() for word in expanded]  # as torchrun does
    assert words[words.index("t.py") + 1 :] == [word.replace("{{brace}}", "{brace}") for word in ODD]
    variable, secret = container["env"]
    assert expand(variable["value"], {"id": "wrong"}) == ODD[2]
    assert secret["name"] == "DISTLAUNCH_SECRET"  # which pods of one run share, if there is one
    assert secret["valueFrom"]["secretKeyRef"]["optional"] is True


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.text() | st.lists(st.text())))
@bounded(200)
def test_yaml_gives_back_what_was_written(data: dict[str, Any]) -> None:
    assert yaml.safe_load(yaml_text([data])) == data


def test_words_that_another_parser_takes_for_something_else_are_quoted() -> None:
    for word in ("1e-4", "0o17", "1_000", "0b1", "y", "NO", "0x1F", "12:30", "2026-01-01", ".5", "="):
        assert yaml_text([[word]]) == f'---\n- "{word}"\n'


# What a pod runs


def test_each_pod_runs_one_launcher_that_finds_the_first_pod() -> None:
    assert main(JOBS["64 GPUs"], "timeouts.stop=2500ms")["args"] == [
        *("torchrun", "--nnodes=8", "--nproc-per-node=8", "--node-rank=$(JOB_COMPLETION_INDEX)"),
        *("--master-addr=job-0.job", "--master-port=29500", "--shutdown-timeout=3", "--numa-binding=node"),
        "train.py",
    ]


def test_pods_wait_for_each_other() -> None:
    for join, seconds in (("1h", "=3600"), ("500ms", "=1"), ("none", "=1000000000"), ("null", "")):
        args = main(JOBS["64 GPUs"], f"timeouts.join={join}")["args"]
        wanted = [f"--rdzv-conf=timeout{seconds}"] if seconds else []
        assert [word for word in args if word.startswith("--rdzv-conf=")] == wanted


def test_the_first_pods_name_follows_from_the_job_and_its_service() -> None:
    _, service, workload = printed(JOBS["64 GPUs"])
    assert service["metadata"]["name"] == workload["metadata"]["name"] == "job"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": "job"}
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    spec = workload["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 8, 8)
    assert spec["template"]["spec"]["subdomain"] == "job"


def test_one_pod_needs_no_service_and_no_endpoint() -> None:
    assert [each["kind"] for each in printed(JOBS["CPU"])] == ["ConfigMap", "Job"]
    words = ["torchrun", "--nnodes=1", "--nproc-per-node=4", "--shutdown-timeout=10", "train.py"]
    assert main(JOBS["CPU"])["args"] == words
    assert main(JOBS["CPU"], "args=['--', a]")["args"] == [*words[:-1], "--", "train.py", "--", "a"]


def test_keys_of_the_job_become_torchrun_flags() -> None:
    logs = ["--log-dir=/data/runs", "--tee=3", "--log-line-prefix-template=[${rank}] "]
    for name, flags in {
        "a module": ["--module", "pkg.train"],
        "a command": ["--role=trainer", "--no-python", "./a.out", "-x"],
        "restarts": ["--max-restarts=3", "t.py"],
        "everything": ["--master-port=29600", "--shutdown-timeout=10", *logs, "--rdzv-id=seven", "t.py"],
    }.items():
        assert main(JOBS[name])["args"][-len(flags) :] == flags


def test_paths_are_paths_in_the_image() -> None:
    found = [
        (main(JOBS[name])["command"][0], main(JOBS[name]).get("workingDir")) for name in ("a module", "CPU")
    ]
    assert found == [("/venv/bin/python", "/src"), ("python3", None)]


@pytest.mark.parametrize(
    ("job", "limits", "ranks"),
    [
        ("CPU", {}, 4),
        ("64 GPUs", {"nvidia.com/gpu": "8"}, 8),
        ("AMD GPUs", {"amd.com/gpu": "8", "memory": "64Gi"}, 8),
    ],
)
def test_each_pod_has_its_gpus_and_as_many_ranks(job: str, limits: dict[str, str], ranks: int) -> None:
    container = main(JOBS[job])
    assert container.get("resources", {}).get("limits", {}) == limits
    assert f"--nproc-per-node={ranks}" in container["args"]


def test_a_pod_has_shared_memory_and_leaves_ranks_their_grace() -> None:
    made = pod(JOBS["CPU"], "timeouts.stop=1m")
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in made["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in made["containers"][0]["volumeMounts"]
    assert made["terminationGracePeriodSeconds"] == 70
    assert "--shutdown-timeout=60" in made["containers"][0]["args"]


# Secrets


def test_a_secret_is_named_and_never_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    assert "s3cret" not in yaml_text(printed(JOBS["secrets"]))
    source = {"secretKeyRef": {"name": "hf", "key": "token"}}
    plain, secret = main(JOBS["secrets"])["env"]
    assert (plain, secret) == ({"name": "A", "value": "b"}, {"name": "HF_TOKEN", "valueFrom": source})


# Whole restarts, and the end


def test_without_requeue_no_pod_is_started_again() -> None:
    spec = job(JOBS["64 GPUs"])["spec"]
    assert (spec["backoffLimit"], spec["template"]["spec"]["restartPolicy"]) == (0, "Never")
    assert [rule["action"] for rule in spec["podFailurePolicy"]["rules"]] == ["FailJob"]


def test_requeue_counts_all_pods_but_no_mistakes_and_no_evictions() -> None:
    spec = job(JOBS["restarts"])["spec"]
    mistakes = {"containerName": "main", "operator": "In", "values": [2, 126, 127]}
    assert spec["podFailurePolicy"]["rules"] == [
        {"action": "FailJob", "onExitCodes": mistakes},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    assert (spec["backoffLimit"], spec["activeDeadlineSeconds"]) == (5 * 4, 12 * 3600)


def test_a_jobset_starts_again_as_a_whole() -> None:
    spec = printed(JOBS["restarts"], "jobset")[-1]["spec"]
    each = spec["replicatedJobs"][0]["template"]["spec"]
    assert (spec["failurePolicy"]["maxRestarts"], each["backoffLimit"]) == (5, 0)
    assert "--master-addr=job-node-0-0.job" in each["template"]["spec"]["containers"][0]["args"]
    assert spec["network"]["subdomain"] == "job"


def test_a_trainjob_leaves_the_rendezvous_to_the_runtime() -> None:
    trainer = printed(JOBS["64 GPUs"], "trainjob")[-1]["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (8, 8)
    assert trainer["args"] == ["torchrun", "--shutdown-timeout=10", "--numa-binding=node", "train.py"]
    assert [each["name"] for each in trainer["env"]] == ["DISTLAUNCH_SECRET"]


@pytest.mark.parametrize(("ttl", "seconds"), [("1h", 3600), ("none", None)])
def test_a_finished_job_is_deleted(ttl: str, seconds: int | None) -> None:
    assert job(JOBS["CPU"], f"kubernetes.ttl={ttl}")["spec"].get("ttlSecondsAfterFinished") == seconds


# Extra


def test_extra_is_merged_deeply() -> None:
    more = "{spec: {containers: [{name: main, securityContext: {runAsUser: 7}}]}}"
    made = job(JOBS["CPU"], f"kubernetes.extra={{spec: {{suspend: true, template: {more}}}}}")
    (container,) = made["spec"]["template"]["spec"]["containers"]
    found = made["spec"]["suspend"], container["securityContext"], container["image"]
    assert found == (True, {"runAsUser": 7}, "a/b:1")


def test_lists_are_merged_by_name_or_replaced() -> None:
    old = {"a": [{"name": "x", "v": 1}]}
    assert merged(old, {"a": [{"name": "y"}]}) == {"a": [*old["a"], {"name": "y"}]}
    mounted = {"a": [{"name": "x", "mountPath": "/m"}, {"name": "x", "mountPath": "/n"}]}  # one volume
    assert merged({"a": []}, mounted) == merged(mounted, mounted) == mounted
    for more in ({"a": [3]}, {"a": [{"name": "x", "v": 2}]}, {"a": None}):
        assert merged(old, more) == more


# Names


def test_the_jobs_name_becomes_a_kubernetes_name() -> None:
    names = {"mnist": "mnist", "Llama 3.1 / 8B": "llama-3-1-8b", "7b": "job-7b", "日本": "job", "--x--": "x"}
    assert {name: object_name(name, "job", 2) for name in names} == names
    assert object_name("x" * 80 + "1", "job", 2) != object_name("x" * 80 + "2", "job", 2)


@given(st.text(min_size=1), st.sampled_from(KINDS), st.integers(1, 4096))
@bounded(300)
def test_every_pods_host_name_is_a_valid_label(name: str, kind: Kind, nodes: int) -> None:
    made = object_name(name, kind, nodes)
    host = first_host(made, kind).partition(".")[0]
    assert len(host) + len(str(nodes)) - 1 <= 63
    assert made[0].isalpha() and made[-1].isalnum() and made == made.lower()


# What comes along


def test_the_bundle_is_the_whole_agent_small_and_reproducible_and_needs_only_python() -> None:
    payload = torchrun_payload()
    bundle = manifests(exported(JOBS["everything"]), "job", 8, b64encode(payload).decode())[0]
    assert len(json.dumps(bundle)) < APPLY_LIMIT
    along = {name_of(Path(path)) for _, path in torchrun_modules()}
    assert {name for name in MODULES if name.startswith("distlaunch.agent")} <= along
    outside = {module.split(".")[0] for name in along for module in imports_of(name)} - {"distlaunch"}
    # mypy alone imports the first, and a job that brings its code the second
    assert outside - {"typing_extensions", "pathspec"} <= sys.stdlib_module_names
    assert torchrun_payload() == payload


# What is refused, and what is left out


NEVER = "can't be filled in when a job is exported; have the script read"


@pytest.mark.parametrize(
    ("text", "problem"),
    {
        "script: ~/t.py": "write the full path: in the image, ~ is not your home directory",
        "nodes: [a, b]": "nodes: Kubernetes chooses the nodes: replace this with nodes: N, the number ",
        "nodes: 2\nspares: rest": "spares: Kubernetes has no spares: remove this key; ",
        "nodes: 4\nmin_nodes: 2": "min_nodes: the number of pods is fixed: ",
        "gpus_per_node: auto": "gpus_per_node: set it to the number of NVIDIA GPUs of each pod",
        "workdir: src": "workdir: expected an absolute path in the image",
        "workdir: ~/src": "workdir: expected an absolute path in the image",
        "python: venv/bin/python": "python: expected a name or an absolute path in the image",
        "logs: {dir: out}": "logs.dir: expected an absolute path, such as a directory on a volume",
        "rendezvous: {backend: etcd-v2, endpoint: 'e:1'}": "rendezvous.backend: distlaunch assigns the",
        "master_addr: gpu-a": "master_addr: ranks always connect to the first pod; remove it",
        "args: ['--rank={rank}']": f"args[0]: {{rank}} {NEVER} RANK",
        "env: {PATH: null}": "a Secret and set kubernetes.secrets.PATH: {secret: …, key: …}",
        "env: {HOSTS: '{hosts:1}'}": "have the script build the pods' names, which are MASTER_ADDR",
        "env: {NOT_SET_HERE: null}": "env.NOT_SET_HERE: a value from your environment is never printed",
        "env: {RUN: 'x-{job_id}'}": f"env.RUN: {{job_id}} {NEVER}",
        "kubernetes: {secrets: {RANK: {secret: s, key: k}}}": "kubernetes.secrets.RANK: distlaunch sets RANK",
        "env: {PET_NNODES: 3}": "PET_NNODES would change what the launcher in each pod does",
        "kubernetes: {volumes: [{mount: /x}]}": "kubernetes.volumes[0]: set exactly one of claim, config_map",
    }.items(),
)
def test_refuses_what_a_cluster_cannot_do(text: str, problem: str) -> None:
    text += "" if "gpus_per_node" in text else "\ngpus_per_node: 1"
    text += "" if "script" in text else "\nscript: train.py"
    with pytest.raises(JobError) as refused:
        check_exported(exported(text))
    assert problem in str(refused.value) and "job.yaml:" in str(refused.value)


def test_refuses_a_job_without_an_image() -> None:
    with pytest.raises(JobError, match=r"kubernetes\.image: set it to an image with Python 3.10 or later"):
        check_exported(exported(JOBS["CPU"], image="name=x"))


CONTROLLER = "is left out: it needs a controller, and pods run without one"
FLAG = "is left out: `distlaunch torchrun`, which the pods run, has no flag for it"


@pytest.mark.parametrize(
    ("text", "told"),
    {
        "container: {image: i}": "container is left out: the settings of pods are in kubernetes; its image …",
        "notify: {command: [x]}": f"notify {CONTROLLER}",
        "collect: [x]": f"collect {CONTROLLER}",
        "cpu_binding: cores": "cpu_binding is left out: torchrun binds only by NUMA node; use numa_binding",
        "timeouts: {stall: 1m}": f"timeouts.stall {FLAG}",
        "restarts: {max: 1, on: [oom]}": f"restarts.on {FLAG}",
        "logs: {limit: 1GB}": f"logs.limit {FLAG}",
        "restarts: {max: 1, window: 1d}": "restarts.window is left out: restarts.max limits the whole run",
        "logs: {console: rank0}": "logs.console is left out: `kubectl logs` shows what all ranks of a pod …",
        "on_warning: USR1": "on_warning is left out: ranks get the SIGTERM that Kubernetes sends",
        "gpus_per_node: 8\nbackend: gloo": "backend is left out: in a pod with GPUs, DISTLAUNCH_BACKEND …",
        "ssh: {options: [A=b]}": "ssh is left out: pods are not reached over SSH",
        "on_warning: TERM\non_stall: warn\nlogs: {console: all}\nslurm: {time: 1h}": "",  # the defaults
    }.items(),
)
def test_names_keys_without_effect(text: str, told: str) -> None:
    text += "" if "gpus_per_node" in text else "\ngpus_per_node: 0"
    lines = left_out(exported(f"script: t.py\n{text}\n"), "job")
    assert len(lines) == bool(told)
    assert "".join(lines).startswith(told.removesuffix("…"))


def test_a_trainjob_leaves_out_more_keys() -> None:
    spec, more = exported(JOBS["everything"]), ["kubernetes.ttl", "kubernetes.priority_class"]
    assert left_out(spec, "job") == []
    found = [line.partition(" ")[0] for line in left_out(spec, "trainjob")]
    assert found == [*more, "rendezvous.endpoint"]
