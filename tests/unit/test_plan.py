"""Plans: ranks, devices, environments and command lines of all workers, and refused jobs."""

import errno
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch import contract
from distlaunch.cli.tables import print_plan
from distlaunch.contract import Rendezvous
from distlaunch.errors import JobError
from distlaunch.job.text import fill, is_loopback
from distlaunch.plan.placement import Facts, LaunchPlan, make_plan
from distlaunch.plan.workers import WorkerPlan, plan_document, planned_workers, workers
from distlaunch.supervisor.ranks import unstarted_advice
from tests.unit.samples import bounded, spec_of

Sizes = list[tuple[int, int]]
MEETING = Rendezvous("10.0.0.1", 29500, "run-1", "gloo", restart_count=2, max_restarts=3)
sizes = st.lists(st.tuples(st.integers(0, 8), st.integers(1, 8)), min_size=1, max_size=6)
"""(GPUs, workers) of each node."""


def plan_of(text: str, *gpus: int | None, master_address: str | None = "10.0.0.1") -> LaunchPlan:
    """The plan of a job whose nodes have so many GPUs (by default none)."""
    spec = spec_of(f"script: train.py\n{text}" if "command:" not in text else text)
    counts: Sequence[int | None] = gpus or [0] * len(spec.nodes)
    return make_plan(
        spec, {i: Facts("/usr/bin/python3", count) for i, count in enumerate(counts)}, master_address
    )


def plan_of_sizes(nodes: Sizes) -> LaunchPlan:
    lines = [f"  - {{host: n{i}, gpus: {gpus}, procs: {procs}}}" for i, (gpus, procs) in enumerate(nodes)]
    return plan_of("backend: gloo\nnodes:\n" + "\n".join(lines))


def all_workers(plan: LaunchPlan, meeting: Rendezvous = MEETING) -> list[WorkerPlan]:
    return [worker for node in plan.nodes for worker in workers(plan, node, meeting)]


def roles_of(found: list[WorkerPlan]) -> list[str]:
    return [
        " ".join(each.contract[f"ROLE_{key}"] for key in ("NAME", "RANK", "WORLD_SIZE")) for each in found
    ]


def refusal(text: str, *gpus: int | None, master_address: str | None = "10.0.0.1") -> str:
    with pytest.raises(JobError) as caught:
        plan_of(text, *gpus, master_address=master_address)
    return str(caught.value)


# Ranks


@pytest.mark.parametrize(
    ("text", "gpus", "procs"),
    [
        ("nodes: [a, b]", [8, 4], [8, 4]),  # one for each GPU
        ("nodes: [a, b]", [0, 0], [1, 1]),  # one on a CPU node
        ("nodes: [a, b]\ngpus_per_node: 2", [8, 8], [2, 2]),  # the file's GPUs win
        ("nodes: [a, {host: b, procs: 1}]\nprocs_per_node: 3", [8, 0], [3, 1]),  # a node's own
        ("nodes: [{host: a, gpus: auto}, b]\ngpus_per_node: 1", [8, 8], [8, 1]),
        ("nodes: 2\nprocs_per_node: 2", [0, 0], [2, 2]),
    ],
)
def test_counts_workers_per_node(text: str, gpus: list[int], procs: list[int]) -> None:
    assert [node.procs for node in plan_of(text, *gpus).nodes] == procs


def test_a_workers_device_is_the_gpu_of_its_local_rank() -> None:
    (node,) = plan_of("gpus_per_node: 1\nprocs_per_node: 2").nodes
    assert [node.device(0), node.device(1)] == ["cuda:0", "cpu"]


def test_a_nodes_interpreter_and_workdir_override_the_jobs() -> None:
    text = "nodes: [a, {host: b, python: /b/py, workdir: /b/w}]\npython: /a/py\nworkdir: /a/w"
    found = [(node.python, node.program.workdir) for node in plan_of(text).nodes]
    assert found == [("/a/py", "/a/w"), ("/b/py", "/b/w")]


def test_a_nodes_own_script_args_env_and_role_override_the_jobs() -> None:
    text = """args: [--all, '{rank}']\nenv: {A: job, B: job}\nrole: trainer\nnodes:
  - a
  - {host: b, procs: 2, script: s.py, args: ['{local_rank}'], env: {B: '{rank}'}, role: reader}
  - {host: c, args: []}
  - {host: d, role: reader}"""
    found = all_workers(plan_of(text))
    words = ["train.py --all 0", "s.py 0", "s.py 1", "train.py", "train.py --all 4"]
    assert [" ".join(worker.argv[2:]).removeprefix("/project/") for worker in found] == words
    assert [worker.env["B"].text for worker in found] == ["job", "1", "2", "job", "job"]
    assert roles_of(found) == ["trainer 0 2", "reader 0 3", "reader 1 3", "trainer 1 2", "reader 2 3"]


def test_the_placeholder_of_the_local_rank_tells_workers_apart_that_each_see_one_gpu() -> None:
    text = "procs_per_node: 2\ngpus_per_node: 2\nvirtual_local_rank: true\nargs: ['{local_rank}']"
    found = all_workers(plan_of(f"nodes: [a]\n{text}", 2))
    assert [(worker.argv[-1], worker.contract["LOCAL_RANK"]) for worker in found] == [("0", "0"), ("1", "0")]


def test_the_job_needs_no_script_if_every_node_has_one() -> None:
    nodes = "nodes: [{host: a, script: ps.py}, {host: b%s}]"
    plan = make_plan(spec_of(nodes % ", script: w.py"), {0: Facts("py", 0), 1: Facts("py", 0)}, "a")
    assert [worker.argv[-1] for worker in all_workers(plan)] == ["/project/ps.py", "/project/w.py"]
    spares = nodes.replace("nodes", "spares") % ", script: w.py"
    for text in (nodes % "", spares, f"nodes: 1\n{spares}"):
        with pytest.raises(JobError, match="set one of script, module or command; got none"):
            spec_of(text)


# Backends and GPUs


@pytest.mark.parametrize(
    ("text", "gpus", "backend"),
    [
        pytest.param("nodes: [a, b]", [8, 8], "nccl", id="GPUs everywhere"),
        pytest.param("nodes: [a, b]", [8, 0], "gloo", id="one node without"),
        pytest.param("nodes: [a]\nprocs_per_node: 4", [2], "gloo", id="fewer than workers"),
        pytest.param("nodes: [a]\nbackend: gloo", [8], "gloo", id="as the file says"),
        pytest.param("gpus_per_node: 0", [8], "gloo", id="a CPU job"),
    ],
)
def test_auto_is_nccl_only_where_every_worker_has_a_gpu(text: str, gpus: list[int], backend: str) -> None:
    assert plan_of(text, *gpus).backend == backend


def test_nccl_without_enough_gpus_is_refused_with_the_nodes_name() -> None:
    words = refusal("nodes: [a, b]\nbackend: nccl\nprocs_per_node: 4", 4, 2)
    told = "job.yaml:3:10: backend: nccl needs a GPU for each worker, but b has 2 GPUs for 4 workers;"
    assert words.startswith(told) and words.endswith("correct gpus_per_node, or CUDA_VISIBLE_DEVICES there")


def test_refuses_unknown_gpus_and_says_what_to_do() -> None:
    words = refusal("nodes:\n  - a\n  - b", 8, None)
    told = "job.yaml:4:5: nodes[1]: the number of GPUs on b is unknown without contacting it;"
    assert words.startswith(told) and "--set gpus_per_node=" in words


@pytest.mark.parametrize(("backend", "gpus"), [("nccl", 2), ("auto", 2), ("gloo", 0)])
def test_unknown_gpus_do_not_matter_where_workers_are_given(backend: str, gpus: int) -> None:
    plan = plan_of(f"nodes: [a, b]\nprocs_per_node: 2\nbackend: {backend}", None, None)
    assert [(node.procs, node.gpus) for node in plan.nodes] == [(2, gpus), (2, gpus)]


@pytest.mark.parametrize(
    ("text", "gpus", "key"),
    [
        ("procs_per_node: 32769", 0, ":2:17: procs_per_node"),
        ("procs_per_node: 1\nnodes: [{host: a, procs: 4097}]", 0, ":3:26: nodes[0].procs"),
        ("gpus_per_node: 32769", 0, ":2:16: gpus_per_node"),
        ("", 32769, ": nodes"),
    ],
)
def test_refuses_more_workers_than_a_link_has_channels(text: str, gpus: int, key: str) -> None:
    assert refusal(text, gpus).startswith(f"job.yaml{key}: ")


def test_each_worker_of_a_node_needs_listed_cpus_if_any_has() -> None:
    listed = "cpu_binding: ['0-3', '4-7']\nnodes: [a, {host: b, procs: %d}]"
    assert plan_of(listed % 2).spec.placement.binding
    told = "job.yaml:2:14: cpu_binding: b has 3 workers, but CPUs are listed for only 2; list those of each"
    assert refusal(listed % 3) == f"{told} worker"


# MASTER_ADDR


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("nodes: 3", "127.0.0.1", id="this machine"),
        pytest.param("nodes: [a]", "127.0.0.1", id="one other machine"),
        pytest.param("nodes: [a]\nmaster_addr: a", "a", id="one machine, as the file says"),
        pytest.param("nodes: [a, b]", "10.0.0.1", id="as ssh resolves it"),
        pytest.param("nodes: [{host: a, address: 10.9.9.9}, b]", "10.9.9.9", id="the node's address"),
        pytest.param("nodes: [{host: a, address: x}, b]\nmaster_addr: y", "y", id="master_addr"),
        pytest.param("nodes: [a, b]\nrendezvous: {endpoint: 'a:1'}\nmaster_addr: y", "a", id="endpoint"),
    ],
)
def test_master_addr_is_the_first_nodes(text: str, expected: str) -> None:
    assert plan_of(text).master_addr == expected


def test_master_addr_is_the_first_nodes_name_if_ssh_does_not_answer() -> None:
    assert plan_of("nodes: [gpu-a, gpu-b]", master_address=None).master_addr == "gpu-a"


@pytest.mark.parametrize(
    ("text", "path"),
    {
        "nodes: [a, b]\nmaster_addr: 127.0.0.1": "3:14: master_addr: 127.0.0.1",
        "nodes: [a, b]\nrendezvous: {endpoint: 'localhost:1'}": "3:24: rendezvous.endpoint: local",
        "nodes: [localhost, b]": "2:9: nodes[0]: localhost",
        "nodes: [{host: a, address: '::1'}, b]": "2:9: nodes[0]: ::1",
        "nodes: [127.0.1.1, b]": "2:9: nodes[0]: 127.0.1.1",  # Debian's own name
    }.items(),
)
def test_a_loopback_master_is_refused_on_several_machines(text: str, path: str) -> None:
    words = refusal(text, master_address=None)
    assert words.startswith(f"job.yaml:{path}")
    assert "loopback address, which the other nodes can't reach" in words


def test_names_and_addresses_that_mean_this_machine_everywhere_are_recognized() -> None:
    names = "localhost LocalHost localhost.localdomain me.localhost"
    loopback = f"127.0.0.1 127.8.8.8 ::1 ::ffff:127.0.0.1 ::1%lo {names}"
    others = "10.0.0.1 fe80::1%eth0 localhost-7 gpu-a mylocalhost"
    assert [host for host in f"{loopback} {others}".split() if is_loopback(host)] == loopback.split()


# The environment


@given(sizes)
@bounded()
def test_every_variable_of_torchruns_contract_has_torchruns_meaning(nodes: Sizes) -> None:
    plan = plan_of_sizes(nodes)
    labels = [f"n{i}" for i, (_, procs) in enumerate(nodes) for _ in range(procs)]
    assert [plan.node_of(rank).label for rank in range(plan.world_size)] == labels
    same = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "DISTLAUNCH_BACKEND": "gloo"}
    elastic = {"RESTART_COUNT": "2", "MAX_RESTARTS": "3", "RUN_ID": "run-1", "USE_AGENT_STORE": "False"}
    elastic["SIGNALS_TO_HANDLE"] = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    same |= {"ROLE_NAME": "default", **{f"TORCHELASTIC_{key}": value for key, value in elastic.items()}}
    first_rank = 0
    for index, (_, procs) in enumerate(nodes):
        for local_rank, worker in enumerate(workers(plan, plan.nodes[index], MEETING)):
            rank, world = first_rank + local_rank, len(labels)
            numbers = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": procs}
            numbers |= {"GROUP_RANK": index, "NODE_RANK": index, "GROUP_WORLD_SIZE": len(nodes)}
            numbers |= {"ROLE_RANK": rank, "ROLE_WORLD_SIZE": world}
            assert worker.contract == {**{key: str(value) for key, value in numbers.items()}, **same}
        first_rank += procs


def test_ranks_are_numbered_within_their_role_too() -> None:
    """As in `correct_rank_assignment_heterogeneous` of torch."""
    spec = spec_of("script: x\ngpus_per_node: 0\nnodes: [a, b, c, d]")
    roles = enumerate(["reader", "trainer", "reader", "ps"])
    plan = make_plan(spec, {i: Facts("p", 0, procs=i + 1, role=role) for i, role in roles})
    readers, trainers = [f"reader {i} 4" for i in range(4)], ["trainer 0 2", "trainer 1 2"]
    assert roles_of(all_workers(plan)) == [
        *(readers[0], *trainers, *readers[1:]),
        *(f"ps {i} 4" for i in range(4)),
    ]


def test_refuses_two_names_of_one_host() -> None:
    spec = spec_of("script: x\ngpus_per_node: 0\nnodes: [a, b, a.example]")
    facts = {i: Facts("p", 0, machine=f"boot {i % 2}") for i in range(3)}
    with pytest.raises(
        JobError, match=r"job.yaml:3:15: nodes\[2\]: a.example and a are the same host; remove"
    ):
        make_plan(spec, facts, "10.0.0.1")


def test_no_job_can_set_what_the_contract_sets() -> None:
    (worker,) = all_workers(plan_of(""))
    assert set(worker.contract) <= contract.RESERVED
    assert "TORCHELASTIC_ERROR_FILE" in contract.RESERVED  # set on the node, where its directory is made


INTERFACE = {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "eth1"}


@pytest.mark.parametrize(
    ("procs", "interface", "expected"),
    [(1, None, {}), (2, None, {"OMP_NUM_THREADS": "1"}), (1, "eth1", INTERFACE)],
    ids=["one worker takes all cores", "several share", "interface"],
)
def test_defaults_are_those_of_torchrun(procs: int, interface: str | None, expected: dict[str, str]) -> None:
    plan = plan_of(f"procs_per_node: {procs}")
    worker = workers(plan, plan.nodes[0], MEETING, interface)[0]
    assert worker.defaults == {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **expected}


# Command lines


@pytest.mark.parametrize(
    ("text", "argv"),
    [
        ("script: t.py\nargs: [-x]", ("/usr/bin/python3", "-u", "/project/t.py", "-x")),
        ("module: pkg.t\nargs: [-x]", ("/usr/bin/python3", "-u", "-m", "pkg.t", "-x")),
        ("command: [./a, '{rank}']\nargs: [-x]", ("/project/a", "0", "-x")),
    ],
)
def test_the_workers_command_line(text: str, argv: tuple[str, ...]) -> None:
    assert all_workers(make_plan(spec_of(text), {0: Facts("/usr/bin/python3", 0)}))[0].argv == argv


@pytest.mark.parametrize(
    ("program", "ours", "its_own"),
    [
        ("script: t.py", "/project/w/t.py", "~/own/t.py"),
        ("script: ../t.py", "/project/t.py", "~/t.py"),
        ("script: /abs/t.py", "/abs/t.py", "/abs/t.py"),
        ("script: ~/t.py", "~/t.py", "~/t.py"),
        ("script: -t.py", "/project/w/-t.py", "~/own/-t.py"),
        ("command: [./a, x]", "/project/w/a", "~/own/a"),
        ("command: [bin/a, x]", "/project/w/bin/a", "~/own/bin/a"),
        ("command: [a, x]", "a", "a"),
        ("module: pkg", "pkg", "pkg"),
    ],
)
@pytest.mark.parametrize("rendezvous", ["static", "etcd-v2, endpoint: 'e:1'"], ids=["static", "etcd"])
def test_a_program_is_found_in_the_workdir(program: str, ours: str, its_own: str, rendezvous: str) -> None:
    text = f"{program}\nworkdir: w\nnodes: [a, {{host: b, workdir: ~/own}}]\nargs: [last]"
    spec = spec_of(f"{text}\nrendezvous: {{backend: {rendezvous}}}")
    plan = make_plan(spec, {i: Facts("/usr/bin/python3", 0) for i in range(2)}, "10.0.0.1")
    found = [worker for node in plan.nodes for worker in workers(plan, node, MEETING)]
    assert [worker.cwd for worker in found] == ["/project/w", "~/own"]
    for worker, word in zip(found, (ours, its_own), strict=True):
        at = len(worker.argv) - (2 if program.endswith("t.py") or "module" in program else 3)
        assert worker.argv[at] == word
        assert (at in worker.paths) == ("/" in word)
        assert {worker.argv[i] for i in worker.paths} <= {"/usr/bin/python3", word}


LOOKED_FOR = "is looked for in the node's workdir"
ON_B = "nodes: [{host: b, workdir: w}]"


@pytest.mark.parametrize(
    ("text", "stage", "advice"),
    [
        ("script: t.py", "script", f"; a relative script {LOOKED_FOR} (by default the"),
        ("script: t.py\nworkdir: w", "script", f"; a relative script {LOOKED_FOR} (set by w"),
        (f"script: t.py\n{ON_B}", "script", f"; a relative script {LOOKED_FOR}"),
        ("script: /t.py", "script", " (set by script)"),
        ("script: t.py", "workdir", " (by default the job file's directory)"),
        ("script: t.py\nworkdir: w", "workdir", " (set by workdir)"),
        (f"script: t.py\n{ON_B}", "workdir", " (set by nodes[0].workdir)"),
        ("command: [./a]", "exec", f"; a relative command {LOOKED_FOR} (by default the"),
        ("command: [~/a]", "exec", " (set by command)"),
        ("command: [a]", "exec", ""),
        ("script: t.py", "exec", ""),
        ("script: t.py", "fork", ""),
    ],
)
def test_advice_about_a_failed_start_names_the_key(text: str, stage: str, advice: str) -> None:
    told = unstarted_advice(spec_of(text), 0, stage, errno.ENOENT)
    assert told.startswith(advice) and bool(told) == bool(advice)


def shown(word: str) -> str:
    """As the value of a placeholder, its name."""
    return f"<{word}>"


@pytest.mark.parametrize(
    ("argument", "filled"),
    [
        ("--rank={rank}/{world_size}", "--rank=<rank>/<world_size>"),
        ("{rank}{local_rank}", "<rank><local_rank>"),
        ("a{{rank}}b{rank}", "a{rank}b<rank>"),
        ('{"rank": {rank}, "world": [{world_size}]}', '{"rank": <rank>, "world": [<world_size>]}'),
        ('{"a": {"b": {rank}}}', '{"a": {"b": <rank>}}'),
        ("{Rank} { rank } {} {0} {unknown} ${HOME}", "{Rank} { rank } {} {0} {unknown} ${HOME}"),
        ("{{nope}} ${{a}} {{{a-b}}}", "{nope} ${a} {{a-b}}"),
        ("${rank} {{hosts:0}}", "${rank} {hosts:0}"),
        *((text, text) for text in ("{rank", "rank}", "")),
    ],
)
def test_placeholders_are_filled_and_other_braces_stay(argument: str, filled: str) -> None:
    assert fill(argument, shown) == filled


@given(st.text("{}1: $", max_size=20))
@bounded()
def test_text_without_a_placeholders_name_is_never_changed(argument: str) -> None:
    assert fill(argument, shown) == argument


@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers(), max_size=3), st.integers(0, 99))
@bounded()
def test_json_with_a_rank_in_it_stays_json(document: dict[str, int], rank: int) -> None:
    text = json.dumps({**document, "rank": "@"}).replace('"@"', "{rank}")
    assert json.loads(fill(text, {"rank": str(rank)}.get)) == {**document, "rank": rank}


TF_CONFIG = '{"cluster": {"worker": {hosts_json:2222}}, "task": {"type": "worker", "index": {rank}}}'
EVERY = "{rank} {local_rank} {node_rank} {world_size} {local_world_size} {master_addr} {master_port} {run_id}"
MORE = "{job_id} {port:a} {port:b} {hosts} {hosts_json} {hosts:80}"


def test_every_placeholder_is_filled_in_in_arguments_and_variables() -> None:
    text = f"nodes: [a, {{host: b, address: 'fd::2'}}]\nprocs_per_node: 2\nargs: ['{EVERY}', '{MORE}']"
    plan = plan_of(
        f"{text}\nenv: {{A: '{EVERY} {MORE}', TF: '{TF_CONFIG}', J: '{{\"a\": {{{{rank}}}}}} {{b}}'}}"
    )
    found = [worker for node in planned_workers(plan).values() for worker in node]
    hosts = '10.0.0.1,fd::2 ["10.0.0.1", "fd::2"] 10.0.0.1:80,10.0.0.1:81,[fd::2]:80,[fd::2]:81'
    for rank, worker in enumerate(found):
        every = f"{rank} {rank % 2} {rank // 2} 4 2 10.0.0.1 29500 job"
        assert worker.argv[-2:] == (every, f"job 29501 29502 {hosts}")
        assert worker.env["A"].text == " ".join(worker.argv[-2:])
        assert worker.env["J"].text == '{"a": {rank}} {b}'
        assert json.loads(worker.env["TF"].text) == {
            "cluster": {"worker": ["10.0.0.1:2222", "10.0.0.1:2223", "[fd::2]:2222", "[fd::2]:2223"]},
            "task": {"type": "worker", "index": rank},
        }


def test_ranks_of_several_nodes_on_one_host_have_ports_of_their_own() -> None:
    plan = plan_of("nodes: 2\nprocs_per_node: 2\nargs: ['{hosts:80}']")
    (argument,) = {worker.argv[-1] for node in planned_workers(plan).values() for worker in node}
    assert argument == ",".join(f"127.0.0.1:{port}" for port in range(80, 84))


def test_an_inherited_value_keeps_its_braces() -> None:
    plan = make_plan(spec_of("script: t.py\nenv: {A: null}", {"A": "{rank}"}), {0: Facts("", 0)})
    assert [worker.env["A"].text for worker in all_workers(plan)] == ["{rank}"]


# As data


def document_of(plan: LaunchPlan) -> dict[str, Any]:
    """The plan of a job on one node, as it is printed."""
    return plan_document(plan, {plan.nodes[0].node_rank: workers(plan, plan.nodes[0], MEETING)})


@pytest.mark.parametrize(
    ("text", "numa", "cpu", "shown"),
    [
        ("", None, None, "cpu"),
        ("numa_binding: exclusive", "exclusive", None, "exclusive"),
        ("cpu_binding: cores", None, "cores", "cores"),
        ("cpu_binding: [0-3, 7]", None, ["0-3", "7"], "0-3"),
    ],
)
def test_a_printed_plan_has_the_cpu_binding(
    text: str, numa: str | None, cpu: str | list[str] | None, shown: str, capfd: pytest.CaptureFixture[str]
) -> None:
    document = document_of(plan := plan_of(text))
    assert (document["numa_binding"], document["cpu_binding"]) == (numa, cpu)
    print_plan(plan, "table")
    heading, _, first = capfd.readouterr().out.splitlines()[1:4]
    assert text.partition(":")[0] in heading and shown in first.split()


def test_a_printed_plan_is_json_without_inherited_values() -> None:
    spec = spec_of("script: t.py\nenv: {TOKEN: null, PLAIN: x}", {"TOKEN": "s3cret"})
    plan = make_plan(spec, {0: Facts("python3", 0)})
    text = json.dumps(document_of(plan))
    assert "s3cret" not in text
    (node,) = json.loads(text)["nodes"]
    (worker,) = node["workers"]
    assert (worker["env"]["TOKEN"], worker["env"]["PLAIN"], worker["env"]["RANK"]) == (None, "x", "0")
    assert worker["argv"] == ["python3", "-u", "/project/t.py"]


@pytest.mark.parametrize(("text", "port"), [("", None), ("master_port: 29500", 29500)])
def test_a_port_chosen_later_is_null_in_a_plan(text: str, port: int | None) -> None:
    document = document_of(plan_of(text))
    (worker,) = document["nodes"][0]["workers"]
    assert (document["master_port"], worker["env"]["MASTER_PORT"]) == (port, port and str(port))


# The console


def test_refuses_to_show_a_missing_rank() -> None:
    for text, ranks in (
        ("procs_per_node: 3", "ranks 0 to 2"),
        ("nodes: 2", "ranks 0 to 1"),
        ("", "only rank 0"),
    ):
        told = f": logs.console[1]: rank 7 does not exist: the job has {ranks}"
        assert refusal(f"logs: {{console: [0, 7]}}\n{text}").endswith(told)


def test_an_elastic_job_may_name_a_rank_that_comes_later() -> None:
    text = "logs: {console: [0, 2]}\nnodes: [a, b, c]\nmin_nodes: 2"
    spec = spec_of(f"script: x\n{text}")
    assert make_plan(spec, {i: Facts("python3", 0) for i in range(2)}, "10.0.0.1").world_size == 2


@pytest.mark.parametrize("style", ["shell", "torchrun"])
@pytest.mark.parametrize("launcher", ["auto", "slurm"])
def test_prints_no_commands_for_nodes_without_host_names(launcher: str, style: str) -> None:
    plan = plan_of(f"nodes: 2\nlauncher: {launcher}")
    with pytest.raises(JobError, match=r"job.yaml:2:8: nodes: commands for 2 nodes need host names"):
        print_plan(plan, style)
