"""torch's elastic agents as the engine: what is started, what is refused, and the policy as histories."""

import re

import pytest

from distlaunch.contract import RESERVED, Rendezvous
from distlaunch.diagnosis.root_cause import root_cause_lines
from distlaunch.errors import Exit, JobError
from distlaunch.plan.document import plan_document
from distlaunch.plan.engine import make_plan, workers
from distlaunch.plan.layout import Facts, LaunchPlan, NodeRank
from distlaunch.plan.output import destinations
from distlaunch.plan.shell_text import shell_text
from distlaunch.plan.torch_agents import with_node
from distlaunch.plan.torchrun_text import torchrun_text
from distlaunch.state.actions import (
    Close,
    Connect,
    FindRoute,
    GiveUp,
    HoldPort,
    Reap,
    StartWorkers,
    StopWorkers,
)
from distlaunch.state.events import (
    AgentLeaving,
    LinkEnded,
    PortUsurped,
    Reaped,
    RouteFailed,
    RouteFound,
    WorkerExited,
)
from distlaunch.state.job import Phase
from distlaunch.state.nodes import route_of
from tests.unit.samples import spec_of
from tests.unit.test_restarts import Job, gone, unreachable
from tests.unit.test_supervisor import JOB, MASTER, STOP_S, exited, texts, up, wanted

C10D = "rendezvous: {backend: c10d}"
ETCD = "rendezvous: {backend: etcd-v2, endpoint: 'etcd:2379'}"
ABC = "nodes: [a, b, c]"
TWO_OF_THREE = f"{ABC}\nmin_nodes: 2"


def plan_of(*lines: str, script: str = "script: t.py", nodes: int = 3) -> LaunchPlan:
    spec = spec_of("\n".join([script, "gpus_per_node: 0", "procs_per_node: 2", *lines]))
    return make_plan(spec, {i: Facts("/usr/bin/python3", 0) for i in range(nodes)}, MASTER)


def argv_of(plan: LaunchPlan, node: int, source: str | None = None) -> list[str]:
    meeting = Rendezvous(plan.master_addr, plan.master_port or 29444, "run-1", "gloo", max_restarts=3)
    (agent,) = workers(plan, plan.nodes[node], meeting, "eth0", source)
    return list(agent.argv)


# What is started


def test_the_command_line_of_torchs_agent() -> None:
    plan = plan_of(C10D, TWO_OF_THREE, "args: [--mo=3, '{{rank}}']", "timeouts: {join: 2m}")
    assert argv_of(plan, 1, "10.0.0.2") == [
        *("/usr/bin/python3", "-u", "-m", "torch.distributed.run", "--nnodes=2:3", "--nproc-per-node=2"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={MASTER}:29444", "--rdzv-id=run-1"),
        *("--rdzv-conf=join_timeout=120,is_host=false", "--max-restarts=3", "--local-addr=10.0.0.2"),
        *("--", "/project/t.py", "--mo=3", "{rank}"),
    ]


def test_the_first_node_hosts_the_store_of_c10d_and_calls_itself_by_its_address() -> None:
    argv = argv_of(plan_of(C10D, ABC), 0, "10.9.9.9")
    assert "--rdzv-conf=join_timeout=600,is_host=true" in argv
    assert "--rdzv-endpoint=10.9.9.9:29444" in argv
    assert "--nnodes=3" in argv


def test_role_and_virtual_local_rank_are_torchs_to_give() -> None:
    argv = argv_of(plan_of(C10D, ABC, "role: trainer", "virtual_local_rank: true"), 0)
    assert {"--role=trainer", "--virtual-local-rank"} <= set(argv)


def test_output_is_marked_with_the_node_and_kept_by_agent() -> None:
    route = destinations(plan_of(C10D, ABC), 0)[2, 1]
    assert (route.shown, route.prefix, route.file) == (True, "[c] ", "agent2.err")


def test_etcd_is_the_same_server_for_all_and_nobody_hosts_it() -> None:
    conf = "rendezvous: {backend: etcd-v2, endpoint: '[fd00::1]:2379', conf: {last_call_timeout: 5}}"
    plan = plan_of(conf, ABC)
    for node in range(3):
        argv = argv_of(plan, node, f"10.0.0.{node}")
        assert "--rdzv-endpoint=[fd00::1]:2379" in argv
        assert "--rdzv-conf=join_timeout=600,last_call_timeout=5" in argv
    assert "--local-addr=10.0.0.2" in argv_of(plan, 2, "10.0.0.2")


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("module: pkg.train", ["--module", "--", "pkg.train", "x"]),
        ("command: [/bin/a.out, -v]", ["--no-python", "--", "/bin/a.out", "-v", "x"]),
    ],
)
def test_modules_and_commands(program: str, words: list[str]) -> None:
    argv = argv_of(plan_of(C10D, "args: [x]", script=program, nodes=1), 0, "127.0.0.1")
    assert argv[-len(words) :] == words


def test_torch_sets_the_contract_of_its_workers_and_we_do_not() -> None:
    plan = plan_of(C10D, ABC, "env: {A: b}")
    meeting = Rendezvous(MASTER, 29444, "run-1", "gloo")
    (agent,) = workers(plan, plan.nodes[0], meeting, "eth0", "10.0.0.1")
    assert agent.defaults["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert set(agent.contract) & RESERVED == {"DISTLAUNCH_BACKEND"} == set(agent.contract)
    assert agent.env["A"].text == "b"
    assert agent.defaults["GLOO_SOCKET_IFNAME"] == "eth0"
    assert agent.defaults["OMP_NUM_THREADS"] == "1"


def test_a_node_that_comes_late_leaves_the_numbers_of_the_others() -> None:
    plan = plan_of(C10D, TWO_OF_THREE, nodes=2)
    assert plan.world_size == 4
    late = with_node(plan, 2, Facts("/opt/python", 0))
    assert late.nodes[:2] == plan.nodes
    assert [(node.label, node.node_rank, node.ranks) for node in late.nodes][2:] == [("c", 2, range(2, 3))]
    assert late.world_size == 6
    assert with_node(late, 0, Facts("/opt/python", 0)).nodes[0].python == "/opt/python"


def test_a_late_node_without_the_gpus_that_nccl_needs_is_refused() -> None:
    spec = spec_of(f"script: t.py\nbackend: nccl\nprocs_per_node: 2\n{C10D}\n{TWO_OF_THREE}")
    plan = make_plan(spec, {0: Facts("p", 2), 1: Facts("p", 2)}, MASTER)
    with pytest.raises(JobError, match="nccl needs a GPU"):
        with_node(plan, 2, Facts("p", 1))


def test_a_job_of_hosts_never_meets_on_a_loopback_address_even_if_one_is_there_so_far() -> None:
    assert plan_of(C10D, f"{ABC}\nmin_nodes: 1", nodes=1).master_addr == MASTER


def test_what_dry_run_prints() -> None:
    plan = plan_of(C10D, TWO_OF_THREE)
    meeting = Rendezvous(plan.master_addr, 29444, "job", "gloo", max_restarts=3)
    planned = {node.node_rank: workers(plan, node, meeting) for node in plan.nodes}
    shell, torchrun = shell_text(plan, planned), torchrun_text(plan, 29444)
    assert shell.count("torch.distributed.run --nnodes=2:3") == 3
    assert not re.search(r"\b(RANK|WORLD_SIZE|MASTER_ADDR)=", shell)
    assert torchrun.count("exec torchrun --nnodes=2:3 --nproc-per-node=2 --rdzv-backend=c10d") == 3
    assert torchrun.count("is_host=true") == shell.count("is_host=true") == 1
    document = plan_document(plan, planned)
    assert document["rendezvous"]["min_nodes"] == 2
    assert document["nodes"][2]["agent"]["argv"] == list(planned[NodeRank(2)][0].argv)


# What makes no sense together

WRONG = [
    ("spares: [z]", "spares: torch's elastic agents don't support spares"),
    ("elastic: {grow: now}", "elastic.grow: torch's elastic agents always take in a node at once"),
    ("on_stall: restart", "on_stall: torch's"),
    ("restarts: {backoff: 1s}", "restarts.backoff: torch's elastic agents don't support backoff"),
    ("logs: {console: rank0}", "logs.console: torch's elastic agents mix"),
    ("args: [x, '--r={rank}']", "args[1]: torch's elastic agents choose {rank}"),
    (
        "rendezvous: {backend: c10d, conf: {is_host: 'true'}}",
        "rendezvous.conf.is_host: distlaunch sets is_host",
    ),
    ("rendezvous: {backend: c10d, conf: {cert: 'a,b'}}", "rendezvous.conf.cert: expected a non-empty value"),
    ("rendezvous: {backend: etcd-v2}", "rendezvous.backend: etcd-v2 needs rendezvous.endpoint"),
    ("rendezvous: {backend: etcd-v2, endpoint: etcd}", "rendezvous.endpoint: etcd-v2 needs host:port"),
    (f"{ETCD}\nmaster_port: 1", "master_port: torch's elastic agents choose it"),
    ("rendezvous: {conf: {a: b}}", "rendezvous.conf: conf works only with torch's elastic agents"),
]


@pytest.mark.parametrize(("text", "words"), WRONG)
def test_what_makes_no_sense_together_is_refused_with_its_place(text: str, words: str) -> None:
    rendezvous = "" if "rendezvous" in text else C10D
    with pytest.raises(JobError) as caught:
        spec_of(f"script: t.py\nnodes: [a]\n{rendezvous}\n{text}")
    (problem,) = caught.value.problems
    assert words in str(problem)
    assert problem.line >= 3


def test_the_endpoint_of_etcd_may_be_any_host_but_not_a_loopback_address() -> None:
    assert plan_of("rendezvous: {backend: etcd-v2, endpoint: 'b:2379'}", ABC).master_addr == "b"
    with pytest.raises(JobError, match="loopback"):
        plan_of("rendezvous: {backend: etcd-v2, endpoint: 'localhost:2379'}", ABC)


# The policy


class Torch(Job):
    """A job whose nodes run torch agents."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join([JOB, *lines]))

    def end(self, node: int, status: int, message: str = "") -> list[str]:
        """A torch agent ends; what is told."""
        record = {"message": message, "callstack": ""}
        return texts(self.obey(self.feed(WorkerExited(node, 0, status, self.now, record))))


def test_c10d_holds_a_port_on_the_first_node_and_tells_each_its_own_address() -> None:
    job = Torch(C10D, ABC)
    job.silent = {0, 1, 2}
    job.obey(job.actions)
    assert job.feed(up(0), up(1), up(2)) == [HoldPort(0, None), FindRoute(1, MASTER), FindRoute(2, MASTER)]


def test_etcd_needs_no_port_and_every_node_must_find_it() -> None:
    job = Torch(ETCD, ABC)
    asked = job.feed(up(0), up(1), up(2))
    assert asked == [FindRoute(0, "etcd"), FindRoute(1, "etcd"), FindRoute(2, "etcd")]
    for node in (0, 1):
        assert job.feed(RouteFound(node, "etcd", "10.0.0.9", "eth0", f"10.0.0.{node}")) == []
    assert job.feed(RouteFound(2, "etcd", "10.0.0.9", "eth0", "10.0.0.2")) == [
        StartWorkers(i) for i in range(3)
    ]
    assert job.state.port == 2379
    assert [route.source for route in map(route_of, job.state.nodes) if route] == [
        "10.0.0.0",
        "10.0.0.1",
        "10.0.0.2",
    ]


def test_a_node_that_can_not_reach_etcd_ends_the_job_before_it_starts() -> None:
    job = Torch(ETCD, ABC)
    job.feed(up(0), up(1), up(2))
    said = texts(job.obey(job.feed(RouteFailed(0, "etcd", "Name or service not known"))), "error")
    assert said == ["a can't reach etcd at etcd: Name or service not known"]


def test_when_all_torch_agents_succeed_the_job_does() -> None:
    job = Torch(C10D, ABC).started()
    for node in (2, 0, 1):
        job.end(node, 0)
    assert (job.state.phase, job.state.outcome) == (Phase.DONE, Exit.OK)


def test_a_torch_agent_that_fails_ends_the_job_whatever_restarts_there_may_be() -> None:
    job = Torch(C10D, TWO_OF_THREE, "restarts: {max: 3}").started()
    assert job.end(1, 1)[0] == "torch's agent on b failed first: exit status 1"
    assert (job.state.phase, job.state.outcome) == (Phase.DONE, 1)
    assert job.state.generation == 0
    assert job.actions.of(StopWorkers) == []


def test_a_lost_node_is_a_warning_while_enough_are_left_and_its_torch_agent_is_started_when_it_returns() -> (
    None
):
    job = Torch(C10D, TWO_OF_THREE).started()
    said = texts(job.lose(2), "warning")
    assert said == ["c was lost: Connection reset by peer; torch's agents continue with 2 of 3 nodes"]
    assert job.state.phase is Phase.RUNNING
    job.silent = {0, 1}
    actions = job.come_back(2)
    assert wanted(actions) == [Connect(2), Reap(2), FindRoute(2, MASTER), StartWorkers(2)]
    assert texts(actions) == ["c is back; starting its torch agent"]
    assert (job.state.generation, job.state.workers[2].running) == (0, True)


def test_a_node_that_returns_is_not_used_before_it_is_reaped() -> None:
    job = Torch(C10D, TWO_OF_THREE).started()
    job.lose(2, away=False)
    job.silent = {2}
    job.tick()
    assert job.feed(up(2)) == [Reap(2)]
    assert job.feed(Reaped(2, 3)).of(StartWorkers) == []
    assert job.feed(RouteFound(2, MASTER, MASTER, "eth0", "10.0.0.3")) == [StartWorkers(2)]
    assert job.feed(RouteFound(2, MASTER, MASTER, "eth0", "10.0.0.3")) == [], "once"


def test_a_node_that_returns_and_does_not_tell_its_route_is_given_up() -> None:
    job = Torch(C10D, TWO_OF_THREE).started()
    job.lose(2, away=False)
    job.silent = {2}
    job.tick()
    job.feed(up(2))
    assert FindRoute(2, MASTER) in job.feed(Reaped(2, 3))
    since = job.now
    while GiveUp(2, "no answer within 30 s (timeouts.connect)") not in job.actions:
        job.tick()
    assert job.now == since + 30.0


@pytest.mark.parametrize(
    ("lines", "node", "words"),
    [
        ([C10D, ABC], 2, "c was lost: Connection reset by peer"),
        ([ETCD, ABC], 0, "a was lost: Connection reset by peer"),
        ([C10D, TWO_OF_THREE], 0, "it hosted torch's c10d store, which every torch agent needs"),
    ],
)
def test_a_lost_node_that_is_needed_ends_the_job(lines: list[str], node: int, words: str) -> None:
    job = Torch(*lines).started()
    assert texts(job.lose(node), "error")[0].endswith(words)
    assert job.state.outcome == Exit.NODE_LOST


def test_etcd_outlives_the_first_node() -> None:
    job = Torch(ETCD, TWO_OF_THREE).started()
    job.lose(0)
    assert job.state.phase is Phase.RUNNING
    job.end(1, 0)
    assert job.state.phase is Phase.RUNNING
    job.end(2, 0)
    assert (job.state.phase, job.state.outcome) == (Phase.DONE, Exit.OK)


def test_too_few_nodes_end_the_job() -> None:
    job = Torch(ETCD, TWO_OF_THREE).started()
    job.lose(0)
    assert texts(job.lose(2), "error") == ["c was lost: Connection reset by peer; 1 of 2 required nodes left"]


def test_the_last_to_be_waited_for_may_be_a_node_that_is_lost() -> None:
    job = Torch(C10D, TWO_OF_THREE).started()
    job.end(0, 0)
    job.end(1, 0)
    job.lose(2)
    assert (job.state.phase, job.state.outcome) == (Phase.DONE, Exit.OK)


def test_a_torch_agent_that_ends_with_its_node_is_not_to_blame() -> None:
    job = Torch(C10D, TWO_OF_THREE).started()
    said = texts(job.obey(job.feed(AgentLeaving(2, 15), exited(2, 0, 1, job.now), gone(2, clean=True))))
    assert said == [
        "c was lost: its agent was stopped by signal 15 (SIGTERM); torch's agents continue with 2 of 3 nodes"
    ]
    assert job.state.phase is Phase.RUNNING


def test_a_failure_after_a_loss_tells_both() -> None:
    job = Torch(C10D, TWO_OF_THREE).started()
    job.lose(2)
    assert job.end(1, 1)[0] == "torch's agent on b failed first: exit status 1; c had been lost before"


def test_a_torch_agent_that_comes_when_the_others_have_finished_is_no_failure() -> None:
    job = Torch(C10D, TWO_OF_THREE).started()
    job.lose(2)
    job.come_back(2)
    job.end(0, 0)
    assert job.end(2, 1, "RendezvousClosedError: ") == [
        "c: its torch agent joined too late, after the others had finished"
    ]
    job.end(1, 0)
    assert (job.state.phase, job.state.outcome) == (Phase.DONE, Exit.OK)


def test_a_rank_that_fails_after_others_have_finished_is_a_failure() -> None:
    job = Torch(C10D, ABC).started()
    job.end(0, 0)
    job.end(1, 1, "ValueError: late")
    assert job.state.outcome == 1


def test_a_node_that_returns_when_the_others_have_finished_is_left_alone() -> None:
    job = Torch(C10D, TWO_OF_THREE).started()
    job.lose(2)
    job.end(0, 0)
    assert StartWorkers(2) not in job.come_back(2)


def test_a_node_that_connects_late_gets_its_torch_agent_at_once() -> None:
    job = Torch(C10D, TWO_OF_THREE)
    job.silent = {2}
    job.obey(job.actions)
    job.obey(job.feed(LinkEnded(2, unreachable(2).failure)))
    assert "starting on 2 nodes, without c" in texts(job.actions, "warning")
    assert job.state.members[2:] == ()
    before = job.now
    actions = job.come_back(2)
    assert texts(actions) == ["c is up; starting its torch agent"]
    assert job.now < before + 1.0
    assert len(job.state.members) == 3
    assert job.state.phase is Phase.RUNNING


def test_a_node_that_is_lost_while_preparing_is_not_waited_for() -> None:
    job = Torch(C10D, TWO_OF_THREE)
    job.silent = {2}
    job.obey(job.actions)
    job.feed(up(2))
    job.silent = {0, 1, 2}
    job.obey(job.feed(gone(2, clean=True)))
    job.silent = {2}
    job.obey(job.actions.of(HoldPort, FindRoute))
    assert job.state.phase is Phase.RUNNING
    assert job.actions.count_of(StartWorkers(2)) == 0


def test_a_late_node_without_a_way_to_the_others_is_told_and_left_out() -> None:
    job = Torch(C10D, TWO_OF_THREE).started()
    job.lose(2, away=False)
    job.silent = {2}
    job.tick()
    job.feed(up(2), Reaped(2, 0))
    assert "c can't reach MASTER_ADDR" in texts(job.feed(RouteFailed(2, MASTER, "no route")), "warning")[0]
    assert job.state.phase is Phase.RUNNING


def test_a_port_that_was_taken_ends_the_job_since_no_generation_follows() -> None:
    job = Torch(C10D, ABC, "restarts: {max: 3}").started()
    job.obey(job.feed(PortUsurped(0, ())))
    assert job.state.outcome == Exit.PORT_TAKEN


def test_all_are_closed_at_the_end() -> None:
    job = Torch(C10D, TWO_OF_THREE).started()
    job.lose(2)
    actions = job.obey(job.feed(exited(1, 0, 1, job.now)))
    assert [actions.count_of(Close(node, STOP_S)) for node in range(3)] == [1, 1, 0]


# The root cause

TABLE = """\
step 1
Traceback (most recent call last):
  File "/t.py", line 5, in <module>
ValueError: sad
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Failures:
[1]:
  time      : 2026-11-21_05:18:55
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 35)  (SIGTERM)
  error_file: <N/A>
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_05:18:55
  host      : localhost
  rank      : 3 (local_rank: 1)
  exitcode  : {0} (pid: 36)
  error_file: <N/A>
"""


@pytest.mark.parametrize(("code", "how"), [("7", "exit status 7"), ("-9", "killed by signal 9")])
def test_the_root_cause_is_told_without_torchs_own_traceback(code: str, how: str) -> None:
    lines = root_cause_lines(TABLE.replace("{0}", code))
    assert lines[0] == "step 1"
    assert lines[-2:] == ["ValueError: sad", f"root cause: rank 3 (local rank 1, pid 36): {how}"]


def test_where_torch_itself_fails_its_last_line_says_how() -> None:
    words = 'W\nTraceback (most recent call last):\n  File "<frozen runpy>", line 1\nRendezvousError: no\n\n'
    assert root_cause_lines(words) == ["W", "RendezvousError: no"]
    assert root_cause_lines("a\nb") == ["a", "b"]
