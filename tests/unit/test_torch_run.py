"""Torch's own agents as the workers of nodes: command lines, refused jobs, attempts, and their errors."""

import re
from string import Template

import pytest

from distlaunch.agent.messages import RanksLag, StartWorkers
from distlaunch.cli.tables import print_plan
from distlaunch.contract import RESERVED
from distlaunch.diagnosis.exits import Raised, Words, split_launcher, words_of
from distlaunch.errors import JobError
from distlaunch.plan.placement import Facts, LaunchPlan, make_plan
from distlaunch.plan.shell_text import shell_text, torchrun_text
from distlaunch.plan.workers import meeting_of, plan_document, planned_workers, workers
from distlaunch.supervisor.preparing import start_command
from distlaunch.supervisor.state import Phase, Timer
from tests.unit.samples import PEER_GONE, spec_of
from tests.unit.test_restarts import RESTARTS, Job
from tests.unit.test_supervisor import JOB, MASTER, exited, texts

ETCD = "rendezvous: {backend: etcd-v2, endpoint: 'etcd:2379'}"
ABC = "nodes: [a, b, c]"


def plan_of(*lines: str, script: str = "script: t.py", nodes: int = 3) -> LaunchPlan:
    spec = spec_of("\n".join([script, "gpus_per_node: 0", "procs_per_node: 2", *lines]))
    return make_plan(spec, {i: Facts("/usr/bin/python3", 0) for i in range(nodes)}, MASTER)


def argv_of(plan: LaunchPlan, node: int, source: str | None = None, restarts: int = 0) -> list[str]:
    (agent,) = workers(plan, plan.nodes[node], meeting_of(plan, "run-1", [29444], restarts), "eth0", source)
    return list(agent.argv)


# What is started


def test_the_command_line_of_torchs_agent() -> None:
    plan = plan_of(ETCD, ABC, "args: [--mo=3, '{{rank}}']", "timeouts: {join: 2m}", "restarts: {max: 3}")
    assert argv_of(plan, 1, "10.0.0.2") == [
        *("/usr/bin/python3", "-u", "-m", "torch.distributed.run", "--nnodes=3", "--nproc-per-node=2"),
        *("--rdzv-backend=etcd-v2", "--rdzv-endpoint=etcd:2379", "--rdzv-id=run-1-0"),
        *("--rdzv-conf=join_timeout=120", "--max-restarts=0", "--local-addr=10.0.0.2"),
        *("--", "/project/t.py", "--mo=3", "{rank}"),
    ]


def test_torchs_agents_pass_on_arguments_as_they_were_written() -> None:
    command = "command: [bash, -c, 'echo $$ $A ${local_rank} $local_rank', '${{local_rank}}']"
    words = argv_of(plan_of(ETCD, ABC, script=command), 0)[-2:]
    passed_on = [Template(word).safe_substitute(local_rank="0") for word in words]  # as torch does
    assert passed_on == ["echo $$ $A ${local_rank} $local_rank", "${local_rank}"]


KEYS = [
    ("endpoint: 'e:1', id: mine", "", "--rdzv-id=mine-2 --rdzv-endpoint=e:1"),
    ("endpoint: 'e:1'", "role: r\nvirtual_local_rank: true", "--role=r --virtual-local-rank"),
    ("endpoint: '[::1]:2', conf: {a: 5}", "", "--rdzv-endpoint=[::1]:2 --rdzv-conf=join_timeout=600,a=5"),
]


@pytest.mark.parametrize(("rendezvous", "more", "flags"), KEYS)
def test_keys_become_flags_of_torchs_agents(rendezvous: str, more: str, flags: str) -> None:
    plan = plan_of(f"rendezvous: {{backend: etcd-v2, {rendezvous}}}", ABC, more)
    assert {*flags.split()} <= {*argv_of(plan, 0, restarts=2)}


def test_starts_modules_and_commands() -> None:
    for program, words in (
        ("module: pkg.train", ["--module", "--", "pkg.train", "x"]),
        ("command: [/bin/a.out, -v]", ["--no-python", "--", "/bin/a.out", "-v", "x"]),
    ):
        argv = argv_of(plan_of(ETCD, "args: [x]", script=program, nodes=1), 0, "127.0.0.1")
        assert argv[-len(words) :] == words


def test_leaves_the_contract_to_torch() -> None:
    plan = plan_of(ETCD, ABC, "env: {A: b}")
    (agent,) = workers(plan, plan.nodes[0], meeting_of(plan, "run-1", [29444]), "eth0", "10.0.0.1")
    assert set(agent.contract) & RESERVED == {"DISTLAUNCH_BACKEND"} == set(agent.contract)
    assert (agent.env["A"].text, agent.temporary) == ("b", ("PET_LOG_DIR",))
    assert agent.defaults.items() >= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}.items()


def test_each_of_torchs_ranks_needs_a_gpu_for_nccl() -> None:
    spec = spec_of(f"script: t.py\nprocs_per_node: 2\nnodes: [a]\n{ETCD}")
    assert make_plan(spec, {0: Facts("p", 2)}, MASTER).backend == "nccl"
    assert make_plan(spec, {0: Facts("p", 1)}, MASTER).backend == "gloo"
    with pytest.raises(JobError, match="a has 1 GPU for 2 workers"):
        make_plan(spec._replace(backend="nccl"), {0: Facts("p", 1)}, MASTER)


def test_dry_run_prints_torch_agents(capfd: pytest.CaptureFixture[str]) -> None:
    plan = plan_of(ETCD, ABC, "restarts: {max: 3}")
    planned = planned_workers(plan)
    shell, torchrun = shell_text(plan, planned), torchrun_text(plan, 29444)
    assert (shell.count("torch.distributed.run --nnodes=3"), shell.count("MASTER_ADDR")) == (3, 0)
    assert torchrun.count("exec torchrun --nnodes=3 --nproc-per-node=2 --rdzv-backend=etcd-v2") == 3
    assert torchrun.count("--rdzv-id=job ") == torchrun.count("--max-restarts=3") == 3
    (agent,) = plan_document(plan, planned)["nodes"][2]["workers"]
    assert agent["argv"] == list(planned[plan.nodes[2].node_rank][0].argv)
    assert (agent["rank"], agent["device"]) == (2, "2 torch ranks on cpu")
    assert "MASTER_PORT" not in agent["env"]
    print_plan(plan, "table")
    table = capfd.readouterr().out
    assert "job: 3 torch agents on 3 nodes, gloo" in table and "etcd at etcd:2379" in table


def test_c10d_means_the_same_as_static() -> None:
    c10d, static = (plan_of(f"rendezvous: {{backend: {name}}}", ABC) for name in ("c10d", "static"))
    assert planned_workers(c10d) == planned_workers(static)
    assert c10d.world_size == 6


# What makes no sense together

WRONG = [
    (f"{ETCD}\nargs: [x, '--r={{rank}}']", "args[1]: torch's own agents choose {rank} (etcd-v2)"),
    (f"{ETCD}\nmaster_port: 1", "master_port: with etcd-v2, torch's own agents control this"),
    (f"{ETCD}\nnuma_binding: node", "numa_binding: with etcd-v2, torch's own agents control this"),
    (f"{ETCD}\nlauncher: mpirun", "launcher: mpirun and torch's own agents (etcd-v2) can't both start"),
    ("rendezvous: {backend: etcd-v2}", "rendezvous.backend: etcd-v2 needs the host:port"),
    ("rendezvous: {backend: etcd-v2, endpoint: etcd}", "rendezvous.endpoint: etcd-v2 needs"),
    (ETCD.replace("}", ", conf: {a: 'b,c'}}"), "rendezvous.conf.a: expected a non-empty value"),
    ("rendezvous: {conf: {a: b}}", "rendezvous.conf: has an effect only with rendezvous.backend: etcd-v2"),
    ("rendezvous: {backend: c10d, conf: {a: b}}", "rendezvous.conf: has an effect only with"),
]


@pytest.mark.parametrize(("text", "words"), WRONG)
def test_refuses_conflicting_keys_with_their_place(text: str, words: str) -> None:
    with pytest.raises(JobError) as caught:
        spec_of(f"script: t.py\nnodes: [a]\n{text}")
    (problem,) = caught.value.problems
    assert words in str(problem)
    assert problem.line >= 3


def test_the_etcd_endpoint_is_not_the_first_node() -> None:
    with pytest.raises(JobError, match=r"nodes\[0\]: localhost is a loopback address"):
        make_plan(spec_of(f"script: t\nnodes: [localhost, b]\n{ETCD}"), dict.fromkeys((0, 1), Facts("p", 0)))
    assert plan_of("rendezvous: {backend: etcd-v2, endpoint: 'b:2379'}", ABC).master_addr == MASTER


# An ordinary job to the supervisor


def test_starts_torch_agents_and_restarts_them() -> None:
    def assert_starts(*flags: str) -> None:
        command = start_command(job.state, 1)
        assert isinstance(command, StartWorkers) and command.temporary == ("PET_LOG_DIR",)
        (spec,) = command.workers
        assert {*flags} <= {*spec.argv}

    job = Job("\n".join([JOB, ABC, ETCD, "min_nodes: 2", RESTARTS])).to_running()
    assert_starts("--nnodes=3", "--rdzv-id=run-1-0")
    said = texts(job.obey(job.feed(exited(1, 0, 1, job.now))), "warning")
    assert said[0].startswith("torch agent 1 (b) failed: exit status 1; restart 1 of 3")
    job.go_on()
    job.lose(2)
    job.go_on()
    assert_starts("--nnodes=2", "--rdzv-id=run-1-2")


def test_leaves_the_join_to_torchs_agents() -> None:
    job = Job("\n".join([JOB.replace("connect:", "join: 20s, connect:"), ABC, ETCD])).to_running()
    job.feed(RanksLag(0, ((0, True, "connecting"),)))
    assert {job.state.due_at(timer) for timer in (Timer.JOIN, Timer.JOIN_MESSAGE)} == {None}
    job.feed(*(exited(node, 0, 0, job.now) for node in range(3)))
    assert job.state.phase is Phase.STOPPING and job.state.cause is None


# What torchrun says at its end

REPORT = """\
E1121 05:18:55.000000 812 torch/distributed/elastic/multiprocessing/api.py:1001] failed (exitcode: 1)
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/venv/lib/python3.11/site-packages/torch/distributed/run.py", line 1009, in <module>
    main()
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
/t.py FAILED
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 35)  (SIGTERM)
Root Cause (first observed failure):
[0]:
  rank      : 3 (local_rank: 1)
  exitcode  : {0} (pid: 36)
  error_file: <N/A>
  traceback : Traceback (most recent call last):
    File "/t.py", line 5, in main
"""
SAD = 'Traceback (most recent call last):\n  File "/t.py", line 5, in <module>\nValueError: sad\n'
WORDS = Words(traceback=True, raised=Raised("ValueError", "t.py:5", "sad"))


@pytest.mark.parametrize(("code", "how"), [("7", "exit status 7"), ("-9", "killed by signal 9 (SIGKILL)")])
def test_shows_the_root_cause_without_torchs_traceback(code: str, how: str) -> None:
    words, report = split_launcher(f"step 1\n{SAD}{REPORT.replace('{0}', code)}")
    assert words.startswith(f"step 1\n{SAD}E1121")
    assert report == f"root cause: rank 3 (local rank 1, pid 36): {how}"


def test_shows_torchs_last_line_if_torch_itself_fails() -> None:
    script = '  File "/venv/bin/torchrun", line 8, in <module>\n    sys.exit(main())\n'
    run = '  File "/venv/torch/distributed/run.py", line 991, in main\n    run(args)\n'
    words = f"W\nTraceback (most recent call last):\n{script}{run}RendezvousError: no\n\n"
    assert split_launcher(words) == ("W\n", "RendezvousError: no")
    module = f'{SAD}Traceback (most recent call last):\n  File "<frozen runpy>", line 1\nKeyError: 1\n'
    assert split_launcher(module) == (module, ""), "a module of the user's"


def numbered(prefix: str, words: str) -> str:
    return re.sub("(?m)^", prefix, words.rstrip()) + "\n"


def test_shows_the_root_cause_of_the_distlaunch_below_mpirun() -> None:
    first = "distlaunch: rank 1 (b) failed first: exit status 1\n"
    rest = "distlaunch: rank 0: stopped by distlaunch\nPrimary job terminated normally, but ..\n"
    words = SAD + PEER_GONE + first + first + numbered("distlaunch:   | ", SAD) + rest
    for said in (words, SAD + first + rest):
        assert split_launcher(said) == (SAD, "root cause: rank 1 (b): exit status 1")
    assert words_of(1, words) == WORDS


def test_judges_a_torch_agent_by_its_ranks_output() -> None:
    report = REPORT.replace("{0}", "1")
    assert words_of(1, PEER_GONE + report) == words_of(1, PEER_GONE)
    assert words_of(1, PEER_GONE).peer_gone
    first = numbered("[rank3]: ", SAD)
    several = first + numbered("[rank2]: ", PEER_GONE) + report
    assert words_of(1, SAD + report) == words_of(1, several) == WORDS
    assert split_launcher(several)[0] == first
    signalled = report.partition("torch.distributed.elastic")[0] + "SignalException: got signal: 15\n"
    assert words_of(1, signalled) == Words()
