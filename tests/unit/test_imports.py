"""Other launchers' commands and files as job files: what each becomes, that it loads, and the way back."""

import itertools
import os.path
import re
import shlex
from collections.abc import Sequence
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from distlaunch.dropin.around import launcher_line
from distlaunch.dropin.flags import FLAGS, Flag, Flags
from distlaunch.dropin.from_accelerate import accelerate_draft
from distlaunch.dropin.from_hostfile import hostfile_draft
from distlaunch.dropin.from_torchrun import torchrun_draft
from distlaunch.dropin.job_text import Draft, draft_document, draft_text, joined
from distlaunch.dropin.parsing import parse_flags
from distlaunch.dropin.torchrun_job import Here, job_of
from distlaunch.dropin.words import Command, shell_commands
from distlaunch.errors import DistlaunchError, JobError, Problem, UsageError
from distlaunch.job.fields import JOB
from distlaunch.job.hosts import parse_hostfile
from distlaunch.job.placeholders import PLACEHOLDERS, fill, literal, placeholder_error
from distlaunch.job.spec import JobSpec, NodeSpec
from distlaunch.plan.layout import Facts, make_plan
from distlaunch.plan.torchrun_text import torchrun_text
from distlaunch.system.job_file import parse
from distlaunch.transport.ssh import Ssh
from tests.unit.samples import FOLDER, bounded, process_text, spec_of

CPUS = 6


def imported(command: str) -> Draft:
    line = launcher_line(command)
    return torchrun_draft(line.command, CPUS, line.notes, line.remote)


def words_in(text: str) -> tuple[str, ...]:
    """The words of a line that is one command, or none."""
    commands = shell_commands(text)
    assert len(commands) <= 1
    return commands[0].words if commands else ()


def keys_of(draft: Draft) -> dict[str, Any]:
    """The keys as the text has them; that a job file may say so is tried."""
    text = draft_text(draft)
    spec_of(text)
    loaded: dict[str, Any] = yaml.safe_load(text)
    assert loaded == draft_document(draft)["job"]
    assert list(loaded) == [key for key in JOB.fields if key in loaded]
    return loaded


def comments(draft: Draft) -> str:
    return "\n".join(line for line in draft_text(draft).splitlines() if line.startswith("#"))


# A shell's words


@given(words=st.lists(process_text, max_size=6))
@bounded()
def test_quoted_words_are_taken_apart_as_they_were_joined(words: list[str]) -> None:
    assert words_in(shlex.join(words)) == tuple(words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a \\\n  b", ["a", "b"]),
        ("a\\\nb", ["ab"]),
        ('"a\\\nb" "\\$x" "\\n" "\\"" "\\\\"', ["ab", "$x", "\\n", '"', "\\"]),
        ("'a\\\nb'", ["a\\\nb"]),
        ("''", [""]),
        ("a'b'\"c\"\\ d", ["abc d"]),
        ("  \t", []),
    ],
)
def test_words_are_those_of_a_shell(text: str, words: list[str]) -> None:
    assert list(words_in(text)) == words


@pytest.mark.parametrize(
    ("text", "character", "words"),
    [
        ("torchrun 'x", 10, "is not closed"),
        ('torchrun "x', 10, "is not closed"),
        ("torchrun x \\", 12, "a backslash ends the command, with nothing to escape"),
        ("(torchrun x)", 1, "( is shell syntax; quote it, or give only the command inside"),
        ("torchrun $(cat x", 10, "this $( or ${ is not closed"),
        ("torchrun `cat x", 10, "this ` is not closed"),
    ],
)
def test_what_only_a_shell_can_do_is_refused_with_its_place(text: str, character: int, words: str) -> None:
    with pytest.raises(UsageError, match=f"character {character}: ") as caught:
        shell_commands(text)
    assert words in str(caught.value)


def test_variables_that_nobody_fills_in_are_named() -> None:
    draft = imported('torchrun x.py $A \'$B\' "${C}x" "\\$D"')
    assert "job files don't expand shell variables: write the values of $A ${C}" in comments(draft)
    assert keys_of(draft)["args"] == ["$A", "$B", "${C}x", "$D"]


# torchrun

COMMANDS: list[tuple[str, dict[str, Any]]] = [
    ("torchrun x.py a", {"procs_per_node": 1, "script": "x.py", "args": ["a"]}),
    ("torchrun --nproc_per_node=2 -m a.b", {"procs_per_node": 2, "module": "a.b"}),
    ("torchrun --no-python ./a.out", {"procs_per_node": 1, "command": ["./a.out"]}),
    ("torchrun --run-path x.py", {"procs_per_node": 1, "script": "x.py"}),
    ("/v/bin/torchrun x.py", {"procs_per_node": 1, "script": "x.py", "python": "/v/bin/python"}),
    ("python3 -u -m torch.distributed.run x.py", {"procs_per_node": 1, "script": "x.py"}),
    (
        "/v/python3.12 -m torch.distributed.run x.py",
        {"procs_per_node": 1, "script": "x.py", "python": "/v/python3.12"},
    ),
    ("distlaunch torchrun x.py", {"procs_per_node": 1, "script": "x.py"}),
    ("python -m distlaunch torchrun x.py", {"procs_per_node": 1, "script": "x.py"}),
    ("--nproc-per-node 3 x.py", {"procs_per_node": 3, "script": "x.py"}),
    ("torchrun --nproc-per-node gpu x.py", {"script": "x.py"}),
    ("torchrun --nproc-per-node auto x.py", {"script": "x.py"}),
    ("torchrun --nproc-per-node cpu x.py", {"gpus_per_node": 0, "procs_per_node": CPUS, "script": "x.py"}),
    (
        "A=1 B='c d' RANK=3 PET_NPROC_PER_NODE=4 torchrun x.py",
        {"procs_per_node": 4, "script": "x.py", "env": {"A": "1", "B": "c d"}},
    ),
    (
        "CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc-per-node gpu x.py",
        {"gpus_per_node": 2, "script": "x.py", "env": {"CUDA_VISIBLE_DEVICES": "2,3"}},
    ),
    (
        "python -m torch.distributed.launch --nproc_per_node 2 x.py a --use-env",
        {"procs_per_node": 2, "script": "x.py", "args": ["--local-rank={local_rank}", "a", "--use-env"]},
    ),
    (
        "python -m torch.distributed.launch --use_env x.py a",
        {"procs_per_node": 1, "script": "x.py", "args": ["a"]},
    ),
    (
        "torchrun --nnodes 3 --node-rank 1 --master-addr gpu-a --master-port 1234 x.py",
        {
            "nodes": ["gpu-a", "HOST1", "HOST2"],
            "procs_per_node": 1,
            "master_addr": "gpu-a",
            "master_port": 1234,
            "script": "x.py",
        },
    ),
    (
        "torchrun --nnodes 2 --master-addr localhost x.py",
        {"nodes": ["HOST0", "HOST1"], "procs_per_node": 1, "script": "x.py"},
    ),
    (
        "torchrun --nnodes 40 --rdzv-endpoint [fe80::1]:1234 x.py",
        {
            "nodes": ["fe80::1", "HOST[1-39]"],
            "procs_per_node": 1,
            "master_addr": "fe80::1",
            "master_port": 1234,
            "script": "x.py",
        },
    ),
    (
        "torchrun --nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint a:0 --rdzv-id j --max-restarts 5 x.py",
        {
            "nodes": ["a", "HOST1"],
            "min_nodes": 1,
            "procs_per_node": 1,
            "rendezvous": {"id": "j"},
            "master_addr": "a",
            "script": "x.py",
            "restarts": {"max": 5},
        },
    ),
    (
        "torchrun --nnodes 2 --rdzv-backend etcd-v2 --rdzv-endpoint etcd:2379 x.py",
        {"nodes": ["HOST0", "HOST1"], "procs_per_node": 1, "script": "x.py"},
    ),
    ("torchrun --standalone --nnodes 9 --rdzv-id x x.py", {"procs_per_node": 1, "script": "x.py"}),
    (
        "torchrun --role r --shutdown-timeout 5 --virtual-local-rank x.py",
        {
            "procs_per_node": 1,
            "script": "x.py",
            "timeouts": {"stop": "5s"},
            "role": "r",
            "virtual_local_rank": True,
        },
    ),
    (
        "torchrun --log-dir l -r 3 --nproc-per-node 2 x.py",
        {"procs_per_node": 2, "script": "x.py", "logs": {"dir": "l", "console": "none"}},
    ),
    ("torchrun -r 3 -t 3 x.py", {"procs_per_node": 1, "script": "x.py"}),
    (
        "torchrun --local-ranks-filter 0 --nnodes 2 --nproc-per-node 4 x.py",
        {
            "nodes": ["HOST0", "HOST1"],
            "procs_per_node": 4,
            "script": "x.py",
            "logs": {"console": [0, 4]},
        },
    ),
    ("torchrun '~/x.py'", {"procs_per_node": 1, "script": "./~/x.py"}),
    ("torchrun \\~/x.py", {"procs_per_node": 1, "script": "./~/x.py"}),
    ("torchrun ~/x.py", {"procs_per_node": 1, "script": "~/x.py"}),
    (
        "~/v/bin/torchrun --log-dir ~/l '~/x.py'",
        {"procs_per_node": 1, "script": "./~/x.py", "python": "~/v/bin/python", "logs": {"dir": "~/l"}},
    ),
    (
        "PYTHON_EXEC=~/p PET_LOG_DIR=~/l torchrun ~/x.py",
        {"procs_per_node": 1, "script": "~/x.py", "python": "~/p", "logs": {"dir": "~/l"}},
    ),
    (
        "torchrun x.py a#b '#c' \\#d # e 'f",
        {"procs_per_node": 1, "script": "x.py", "args": ["a#b", "#c", "#d"]},
    ),
    ("ssh a torchrun x.py", {"nodes": ["a"], "procs_per_node": 1, "script": "x.py", "workdir": "~"}),
    (
        "ssh -tp 22 -iK me@a -v 'cd b && A=1 torchrun x.py'",
        {"nodes": ["me@a"], "procs_per_node": 1, "script": "x.py", "env": {"A": "1"}, "workdir": "~/b"},
    ),
    (
        "ssh $H 'cd /b; torchrun x.py'",
        {"nodes": ["HOST0"], "procs_per_node": 1, "script": "x.py", "workdir": "/b"},
    ),
    (
        "ssh b torchrun --nnodes 3 --node-rank 2 --master-addr a x.py",
        {
            "nodes": ["a", "HOST1", "b"],
            "procs_per_node": 1,
            "master_addr": "a",
            "script": "x.py",
            "workdir": "~",
        },
    ),
    ("torchrun x.py ssh a", {"procs_per_node": 1, "script": "x.py", "args": ["ssh", "a"]}),
]


@pytest.mark.parametrize(("command", "keys"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_a_torchrun_command_becomes(command: str, keys: dict[str, Any]) -> None:
    assert keys_of(imported(command)) == keys


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("torchrun x.py", "keep it in the folder where the command was run"),
        ("torchrun --monitor-interval 2 x.py", "--monitor-interval has no effect"),
        ("torchrun --master-port 5 --rdzv-conf a=b x.py", "--rdzv-conf has no effect"),
        ("torchrun --logs-specs a x.py", "--logs-specs a has no equivalent"),
        ("torchrun --rdzv-backend mine x.py", "--rdzv-backend mine: distlaunch assigns the ranks itself"),
        ("torchrun --nnodes 2 --rdzv-backend c10d --local-addr a x.py", "--local-addr is one node's"),
        ("torchrun --signals-to-handle SIGUSR1 x.py", "--signals-to-handle has no equivalent"),
        ("torchrun --nnodes 2 --node-rank 1 x.py", "--node-rank is not needed"),
        ("torchrun --nnodes 2 x.py", "put your host names here"),
        (
            "torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint a:1 x.py",
            '# rendezvous: {backend: c10d, endpoint: "a:1"}',
        ),
        ("torchrun --max-restarts 1 x.py", "counts over the whole run"),
        ("torchrun --nnodes 1:2 x.py", "counts as a restart"),
        ("torchrun -t 3 x.py", "the run folder always keeps each rank's stdout"),
        ("torchrun -r 1 x.py", "shows both streams"),
        ("torchrun -r 0:1 x.py", "shows both streams"),
        ("torchrun --log-line-prefix-template x x.py", "the prefix is [node:rank]"),
        ("RANK=1 torchrun x.py", "distlaunch sets RANK"),
        ("torchrun x.py {rank}", "{{rank}}: doubled braces"),
        ("torchrun x.py --name {epoch}-{step}", "{{epoch}}, {{step}}: doubled braces"),
        ("torchrun --nnodes 2 --nproc-per-node 4 x.py", "# gpus_per_node: 4"),
        ("torchrun --nproc-per-node auto x.py", "one worker per GPU"),
        ("torchrun --run-path x.py", "--run-path has no effect"),
        ("python -m torch.distributed.launch x.py", "expect --local_rank"),
    ],
)
def test_what_has_no_equal_is_a_comment(command: str, words: str) -> None:
    assert words in comments(imported(command))


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("data/*.pt", True),
        ("a?", True),
        ("[0-3].pt", True),
        ("{1..3}", True),
        ("x{a,b}", True),
        ("~/x", True),
        ("data=~/x", True),
        ("'*.pt'", False),
        ('"~/x"', False),
        ("\\*", False),
        ("'{1..3}'", False),
        ("{rank}", False),
        ("layers=[64,64]", False),
        ("a~", False),
        ("--data=~/x", False),
    ],
)
def test_what_a_shell_would_have_expanded_is_told_as_it_stands(word: str, told: bool) -> None:
    found = [line for line in comments(imported(f"torchrun x.py {word}")).splitlines() if "expand" in line]
    assert len(found) == told
    assert all(
        line.startswith(("# job files expand ~ only ", "# job files don't expand "))
        and line.endswith(f" {word}")
        for line in found
    )


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("torchrun x.py # best", "from the command line: # best"),
        ("A=~/x torchrun x.py", "write the full path for A=~/x"),
        ("export A=~/x; torchrun x.py", "write the full path for A=~/x"),
        ("torchrun ~bob/x.py", "~bob is not expanded"),
        ("ssh -p 9 a torchrun x.py", "`ssh -p 9 a`: `distlaunch run` reaches the hosts in nodes over ssh"),
        ("ssh -p 9 a torchrun x.py", "put -p 9 into your ssh_config"),
        ("ssh a torchrun x.py", "ssh starts commands in the user's home directory"),
    ],
)
def test_what_else_a_shell_does_is_told(command: str, words: str) -> None:
    try:
        assert words in comments(imported(command))
    except JobError as error:
        assert words in str(error)


def test_a_common_line_of_one_node_needs_no_remark() -> None:
    draft = imported("torchrun --rdzv-backend c10d --rdzv-endpoint localhost:0 --rdzv-conf is_host=1 x.py")
    assert keys_of(draft) == {"procs_per_node": 1, "script": "x.py"}
    assert "rdzv" not in comments(draft)


def uncommented(text: str) -> list[str]:
    """The text with each thing that it offers taken, one after the other, as its comment says."""
    found = []
    lines = text.splitlines()
    for at, line in enumerate(lines):
        if not re.fullmatch(r"\s*# .*instead.*:", line):
            continue
        end = at + 1
        while end < len(lines) and re.match(r"\s*# [a-z_]+: ", lines[end]):
            end += 1
        taken = [lines[i].replace("# ", "", 1) for i in range(at + 1, end)]
        gone = ("nodes:", "  - ") if "instead of nodes" in line else ()
        rest = [other for other in (*lines[:at], *lines[end:]) if not other.startswith(gone)]
        found.append("\n".join([*rest[:at], *taken, *rest[at:]]))
    return found


ENDPOINTS = ["", "a", "a:1", "localhost:0", "localhost:2379", "[fe80::1]:5", "x y"]
CONFS = ["", "is_host=true", "join_timeout=60,is_host=0, a-b=c,read_timeout=5,x"]


@pytest.mark.parametrize("backend", ["c10d", "etcd", "etcd-v2", "zeus"])
@pytest.mark.parametrize("nodes", [["1"], ["2"], ["1:2"], ["2", "--local-ranks-filter", "0"]])
def test_rendezvous_lines_that_are_offered_load(backend: str, nodes: list[str]) -> None:
    can = backend != "zeus" and not (backend == "c10d" and nodes == ["1"]) and len(nodes) == 1
    for endpoint, conf, run_id in itertools.product(ENDPOINTS, CONFS, ([], ["--rdzv-id", "j"])):
        rendezvous = [f"--rdzv-backend={backend}", f"--rdzv-endpoint={endpoint}", f"--rdzv-conf={conf}"]
        words = ["torchrun", "--nnodes", *nodes, *rendezvous, *run_id, "x.py"]
        try:
            text = draft_text(torchrun_draft(Command(tuple(words)), CPUS))
        except UsageError as error:
            assert "x y" in str(error)
            continue
        offered = uncommented(text)
        nonsense = endpoint == "x y" or (endpoint == "localhost:0" and backend != "c10d")
        assert len(offered) == (can and not nonsense), (words, text)
        for taken in map(spec_of, offered):
            assert taken.ranking == ("c10d" if backend == "c10d" else "etcd-v2")
            assert taken.rendezvous_id == ("j" if run_id else None)
            assert set(taken.rendezvous_conf) == (
                {"join_timeout", "read_timeout"} if "=60" in conf else set()
            )


def test_other_lines_that_are_offered_load() -> None:
    text = draft_text(hostfile_draft("a slots=1\nb slots=2\n" * 9, "my hosts"))
    told, taken = sorted(uncommented(text), key=lambda each: "\nhostfile:" in each)
    assert [(node.procs, node.gpus) for node in spec_of(told).nodes] == [(9, 9), (18, 18)]
    assert 'hostfile: "my hosts"' in taken
    assert len(spec_of(taken, hostfile=tuple(parse_hostfile("a\nb\n", "my hosts", []))).nodes) == 2
    for more in ("", ", main_process_ip: a", ", main_process_ip: a, main_process_port: 0"):
        for backend in ("c10d", "etcd", "etcd-v2"):
            config = f"{{distributed_type: MULTI_GPU, num_machines: 2, rdzv_backend: {backend}{more}}}"
            (taken,) = uncommented(draft_text(accelerated(config)))
            assert not spec_of(taken).engine.gives_ranks


@pytest.mark.parametrize("name", ["torchrun", "accelerate", "hostfile"])
def test_no_comment_but_an_offer_looks_like_a_key(name: str) -> None:
    """So that whoever takes the # from a line that looks like YAML has a job file."""
    drafts = {
        "torchrun": [imported(command) for command, _ in COMMANDS],
        "accelerate": [accelerated(text) for text, _ in CONFIGS],
        "hostfile": [hostfile_draft("a max_slots=2", "hosts")],
    }
    for draft in drafts[name]:
        like_keys = re.findall(r"(?m)^\s*# ([a-z_]+): ", draft_text(draft._replace(offers=())))
        assert not set(like_keys) & set(JOB.fields)


@pytest.mark.parametrize(
    ("command", "keys", "told"),
    [
        ("torchrun --node-rank $SLURM_NODEID x.py", {}, ["--node-rank $SLURM_NODEID: this one file starts"]),
        ("torchrun --rdzv-id=$RANDOM x.py", {}, ["--rdzv-id $RANDOM: each run gets its own id"]),
        (
            "torchrun --nproc-per-node ${G:-8} x.py",
            {"procs_per_node": None},
            ["--nproc-per-node ${G:-8}: without"],
        ),
        ("torchrun --nnodes $N x.py", {"nodes": ["HOST0", "HOST1"]}, ["--nnodes $N: list that many nodes"]),
        ("torchrun --master-port $((1 + 2)) x.py", {}, ["--master-port $((1 + 2)): the ranks meet"]),
        ('torchrun --master-addr "$(a "$B" | c)" x.py', {}, ['--master-addr $(a "$B" | c): the ranks meet']),
        ("torchrun --rdzv-endpoint=`hostname`:1 x.py", {}, ["--rdzv-endpoint `hostname`:1: the ranks"]),
        (
            "torchrun --max-restarts $R -t $T x.py",
            {},
            ["--max-restarts $R: set restarts.max", "--tee $T: job files don't expand"],
        ),
        (
            "PET_NNODES=$N PET_MAX_RESTARTS=2 torchrun x.py",
            {"nodes": ["HOST0", "HOST1"], "restarts": {"max": 2}},
            ["--nnodes $N: list that many"],
        ),
        ("torchrun $FLAGS x.py", {"procs_per_node": None}, ["$FLAGS: write its flags in the command"]),
        ("torchrun ${F[@]} --nproc-per-node 2 -m a.b", {"procs_per_node": 2}, ["${F[@]}: write its flags"]),
        ("nohup torchrun x.py > o 2>&1 &", {}, ["`nohup`: `nohup", "`> o 2>&1`: works", "`&`: `nohup"]),
        ("torchrun x.py 2>&1 | tee log", {}, ["`2>&1`: works", "`| tee log`: works"]),
        (
            "torchrun x.py |& tee log; echo done &",
            {},
            ["`|& tee log`: works", "`; echo done`: put it", "`&`: "],
        ),
        ("yes | torchrun x.py", {}, ["`yes |`: ranks started from a job file"]),
        ("torchrun x.py < in", {}, ["`< in`: ranks started from a job file"]),
        ("srun -N 2 torchrun x.py", {}, ["`srun -N 2`: `distlaunch run` starts all nodes itself"]),
        ("time torchrun x.py", {}, ["`time`: `time distlaunch run` works"]),
        ("exec /v/bin/torchrun x.py", {"python": "/v/bin/python"}, ["`exec`: `exec distlaunch run`"]),
        ("nice -n 5 python -m torch.distributed.run x.py", {}, ["`nice -n 5`: put it before"]),
        (
            "cd /x && torchrun x.py && echo a",
            {},
            ["`cd /x &&`: keep this file", "`&& echo a`: put it after"],
        ),
        ("source v/bin/activate; torchrun x.py", {}, ["`source v/bin/activate ;`: do it in the shell"]),
        ("export A=1 B=2; env C=3 torchrun x.py", {"env": {"A": "1", "B": "2", "C": "3"}}, []),
        ("A=1 srun bash -c 'B=2 torchrun x.py'", {"env": {"A": "1", "B": "2"}}, ["`srun bash -c`: "]),
    ],
)
def test_what_only_a_shell_can_do_is_a_comment(command: str, keys: dict[str, Any], told: list[str]) -> None:
    draft = imported(command)
    script = {"module": "a.b"} if "-m a.b" in command else {"script": "x.py"}
    expected = {"procs_per_node": 1, **script, **keys}
    assert keys_of(draft) == {key: value for key, value in expected.items() if value is not None}
    left_out = re.findall(r"(?m)^# left out: (.*)$", comments(draft))
    assert len(left_out) == len(told)
    assert all(line.startswith(start) for line, start in zip(left_out, told, strict=True)), left_out


def test_a_binding_is_a_key() -> None:
    assert "numa_binding: node" in draft_text(imported("torchrun --numa-binding node x.py"))


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("", "expected torchrun"),
        ("srun hostname", "got 'srun'"),
        ("python x.py torchrun y.py", "got 'python x.py torchrun'"),
        ("python x.py", "got 'python x.py'"),
        ("torchrun", "no script given"),
        ("torchrun ''", "no script given"),
        ("torchrun --help", "no script given"),
        ("torchrun '--nnodes=$N' x.py", "--nnodes: expected N or MIN:MAX, got '$N'"),
        ("torchrun --nproc-per-node xpu x.py", "pass a number"),
        ("torchrun --nproc-per-node 0 x.py", "expected a number"),
        ("torchrun --max-restarts=-1 x.py", "--max-restarts: expected a number ≥ 0"),
        ("torchrun --master-port 70000 x.py", "the command line: master_port: expected an integer from 1"),
        ("torchrun --master-addr '$M' --nnodes 2 x.py", '"$M" is not a valid host name'),
        ("torchrun --nnodes 99999 x.py", "names more than"),
        ("torchrun -m --no-python x", "can't be combined"),
        ("torchrun -m a/b", "expected a dotted module name"),
        ("torchrun --frob x.py", "has no flag --frob"),
        ("torchrun -r 9 x.py", "--redirects: expected 0"),
        ("python -m torch.distributed.launch --no-python x", "only with --use-env"),
        ("torchrun x.py \udc80", "not UTF-8 text"),
    ],
)
def test_a_command_that_can_not_be_is_refused_in_one_line(command: str, words: str) -> None:
    with pytest.raises(DistlaunchError) as caught:
        imported(command)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_comment_can_not_break_out_of_its_line() -> None:
    draft = imported("torchrun --rdzv-backend 'a\nscript: evil' --rdzv-endpoint a x.py")
    assert keys_of(draft)["script"] == "x.py"


# The way back

_brace = st.sampled_from(
    [f"{{{name}}}" for name in (*PLACEHOLDERS, "a-b", "X1", "1")] + [*"{}x$", "{{", "}}"]
)
braces = st.lists(_brace, max_size=6).map("".join)
arguments = st.lists(process_text | braces, max_size=5)
_scripts = process_text.filter(bool)
_programs = (
    st.tuples(st.just(""), _scripts)
    | st.tuples(st.just("--module"), st.sampled_from(["a", "a.b_c"]))
    | st.tuples(st.just("--no-python"), _scripts.filter(lambda text: not text.startswith("-")))
)
_lines = process_text.filter(lambda text: text and "\n" not in text)
_values = st.fixed_dictionaries(
    {},
    optional={
        "nnodes": st.integers(1, 3).map(str),
        "nproc_per_node": st.integers(1, 9).map(str),
        "max_restarts": st.integers(0, 9),
        "role": _lines,
        "shutdown_timeout": st.integers(0, 99),
        "virtual_local_rank": st.just(True),
        "rdzv_id": _lines,
        "master_addr": st.sampled_from(["gpu-a", "10.0.0.9", "fe80::1"]),
        "master_port": st.integers(1, 65535),
    },
)


_ELASTIC = "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=h:1 --rdzv-conf=timeout=5"
KEYED: dict[str, tuple[str, Any]] = {
    "nnodes": ("--nnodes=2", ["HOST0", "HOST1"]),
    "nproc_per_node": ("--nproc-per-node=3", 3),
    "rdzv_backend": (_ELASTIC, "c10d"),
    "rdzv_endpoint": (_ELASTIC, "h:1"),
    "rdzv_conf": (_ELASTIC, {"timeout": "5"}),
    "rdzv_id": ("--rdzv-id=j", "j"),
    "max_restarts": ("--max-restarts=2", 2),
    "role": ("--role=r", "r"),
    "module": ("--module", "x"),
    "no_python": ("--no-python", ["x"]),
    "run_path": ("--run-path", "x"),
    "log_dir": ("--log-dir=l", "l"),
    "redirects": ("--redirects=3", "none"),
    "local_ranks_filter": ("--local-ranks-filter=0", [0]),
    "master_addr": ("--nnodes=2 --master-addr=h", "h"),
    "master_port": ("--master-port=5", 5),
    "numa_binding": ("--numa-binding=node", "node"),
    "shutdown_timeout": ("--shutdown-timeout=5", "5s"),
    "virtual_local_rank": ("--virtual-local-rank", True),
}
"""Flag with a job key → a command that has it, and what stands at that key then."""


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.key], ids=lambda flag: flag.field)
def test_a_flag_becomes_the_key_that_the_table_names(flag: Flag) -> None:
    words, value = KEYED[flag.field]
    draft = imported(f"torchrun {words} x")
    offered = joined([Draft({offer.key: offer.value}) for offer in draft.offers])
    section, _, inner = flag.key.rpartition(".")
    found: Any = (offered if section == "rendezvous" and "c10d" in words else draft).keys[section or inner]
    assert (found[inner] if section else found) == value


@pytest.mark.parametrize("others", ["--module", "--no-python", "-m --no-python"])
def test_a_run_path_is_a_script_whatever_else_is_said(others: str) -> None:
    assert imported(f"torchrun --run-path {others} x.py").keys["script"] == "x.py"


@pytest.mark.parametrize(
    "words", ["--max-restarts=2", "--role=r", "--virtual-local-rank", "--numa-binding=socket", "--rdzv-id=j"]
)
def test_a_flag_means_the_same_in_a_job_file_as_in_the_drop_in(words: str) -> None:
    file = spec_of(draft_text(imported(f"torchrun {words} x.py")))
    flags = parse_flags([*words.split(), "x.py"], {})
    there = job_of(flags, Here("/", "host", "python3", ("/tmp",), 0, 1, {}))
    for field in ("role", "one_device", "binding", "rendezvous_id"):
        assert getattr(file, field) == getattr(there, field)
    assert file.restarts.most == there.restarts.most


def words_of(values: dict[str, Any]) -> list[str]:
    flags = [(f"--{name.replace('_', '-')}", value) for name, value in values.items()]
    return [name if value is True else f"{name}={value}" for name, value in flags]


def back_to_flags(spec: JobSpec) -> Flags:
    """The flags of the last node's line of `dry-run --format torchrun`."""
    plan = make_plan(spec, {i: Facts("python3", 0) for i in range(len(spec.nodes))})
    line = torchrun_text(plan, plan.master_port or 29500).partition(f"# node {spec.nodes[-1].label}\n")[2]
    words = shlex.split(line.rstrip("\n").removesuffix(")"))
    return parse_flags(words[words.index("torchrun") + 1 :], {})


def there(program: str, script: str) -> str:
    """Where the user's command had it, run in FOLDER."""
    path = program == "" or (program == "--no-python" and "/" in script)
    return os.path.normpath(os.path.join(FOLDER, script)) if path else script


@given(values=_values, program=_programs, args=arguments, quoted=st.booleans())
@bounded(400)
def test_a_command_comes_back_from_its_job_file(
    values: dict[str, Any], program: tuple[str, str], args: Sequence[str], quoted: bool
) -> None:
    how, script = program
    words = ["torchrun", *words_of(values), *([how] if how else []), "--", script, *args]
    command = launcher_line(shlex.join(words)).command if quoted else Command(tuple(words))
    spec = spec_of(draft_text(torchrun_draft(command, CPUS)))
    back = back_to_flags(spec)
    nodes = int(values.get("nnodes", "1"))
    # One node without a port needs no endpoint, and torchrun then has none of its address either.
    unheard = {"master_addr"} if nodes == 1 and "master_port" not in values else set()
    expected = {name: value for name, value in values.items() if name not in unheard}
    assert {name: getattr(back, name) for name in expected} == expected
    assert (back.node_rank, back.nnodes) == (nodes - 1, str(nodes))
    assert (back.module, back.no_python) == (how == "--module", how == "--no-python")
    assert (back.script, list(back.args)) == (there(how, script), list(args))


@given(
    env=st.dictionaries(st.text("ABC_19", max_size=4).map("V_".__add__), process_text, max_size=4),
    folder=process_text.filter(bool),
)
@example(env={}, folder="~you/x")
@bounded()
def test_variables_and_paths_load_as_they_were_meant(env: dict[str, str], folder: str) -> None:
    words = [*(f"{name}={value}" for name, value in env.items()), "torchrun", f"--log-dir={folder}", "x.py"]
    spec = spec_of(draft_text(torchrun_draft(Command(tuple(words)), CPUS)))
    assert {name: value.text for name, value in spec.env.items()} == env
    assert spec.logs.folder == os.path.normpath(os.path.join(FOLDER, folder))
    assert (spec.workdir, spec.program.words) == (FOLDER, ("x.py",))


@given(argument=braces)
@bounded()
def test_what_is_literal_is_filled_with_itself(argument: str) -> None:
    assert fill(literal(argument), {name.upper(): "9" for name in PLACEHOLDERS}) == argument
    assert placeholder_error(literal(argument)) is None


# accelerate


def accelerated(text: str, *program: str) -> Draft:
    return accelerate_draft(parse(text, "c.yaml"), "c.yaml", program)


CONFIGS: list[tuple[str, dict[str, Any]]] = [
    (
        "{distributed_type: 'NO', num_processes: 1, num_machines: 1, mixed_precision: no, gpu_ids: all}",
        {"procs_per_node": 1},
    ),
    (
        (
            "{distributed_type: MULTI_GPU, num_processes: 8, num_machines: 2, machine_rank: 1, "
            "main_process_ip: gpu-a, main_process_port: 29500, rdzv_backend: static, same_network: true}"
        ),
        {
            "nodes": ["gpu-a", "HOST1"],
            "procs_per_node": 4,
            "master_addr": "gpu-a",
            "master_port": 29500,
        },
    ),
    (
        (
            "{distributed_type: MULTI_GPU, num_processes: 2, gpu_ids: '0,1', mixed_precision: bf16, "
            "debug: true, enable_cpu_affinity: true, main_process_port: 0}"
        ),
        {
            "gpus_per_node": 2,
            "procs_per_node": 2,
            "env": {
                "CUDA_VISIBLE_DEVICES": "0,1",
                "ACCELERATE_MIXED_PRECISION": "bf16",
                "ACCELERATE_DEBUG_MODE": "true",
                "ACCELERATE_CPU_AFFINITY": "1",
            },
        },
    ),
    (
        "{distributed_type: MULTI_NPU, num_processes: 2, gpu_ids: '0,1'}",
        {"procs_per_node": 2, "env": {"ASCEND_RT_VISIBLE_DEVICES": "0,1"}},
    ),
    (
        "{distributed_type: MULTI_CPU, num_processes: 4, use_cpu: true}",
        {"gpus_per_node": 0, "procs_per_node": 4, "env": {"ACCELERATE_USE_CPU": "True"}},
    ),
    (
        (
            "{distributed_type: MULTI_GPU, num_processes: -1, dynamo_config: {dynamo_backend: inductor,"
            " mode: x, use_dynamic: true}}"
        ),
        {
            "env": {
                "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
                "ACCELERATE_DYNAMO_MODE": "x",
                "ACCELERATE_DYNAMO_USE_DYNAMIC": "True",
            }
        },
    ),
    (
        (
            "{distributed_type: DEEPSPEED, num_processes: 4, num_machines: 2, mixed_precision: bf16, "
            "deepspeed_config: {zero_stage: 3, gradient_clipping: 1.0, offload_param_device: none, "
            "zero3_init_flag: True, deepspeed_hostfile: hosts, deepspeed_multinode_launcher: pdsh}}"
        ),
        {
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
    ),
    (
        (
            "{distributed_type: MEGATRON_LM, num_processes: 2, mixed_precision: fp8, "
            "megatron_lm_config: {megatron_lm_tp_degree: 2}, fp8_config: {backend: TE}}"
        ),
        {
            "procs_per_node": 2,
            "env": {
                "ACCELERATE_MIXED_PRECISION": "fp8",
                "ACCELERATE_USE_MEGATRON_LM": "true",
                "MEGATRON_LM_TP_DEGREE": "2",
                "ACCELERATE_FP8_BACKEND": "TE",
            },
        },
    ),
]


@pytest.mark.parametrize(("text", "keys"), CONFIGS)
def test_an_accelerate_config_becomes(text: str, keys: dict[str, Any]) -> None:
    assert keys_of(accelerated(text, "x.py", "a")) == {"script": "x.py", "args": ["a"], **keys}


def test_fsdp_gets_what_accelerate_sets_by_itself_too() -> None:
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
            "num_machines: 2, rdzv_backend: c10d, main_process_ip: a",
            '# rendezvous: {backend: c10d, endpoint: "a:29500"}',
        ),
        ("num_machines: 2, machine_rank: 0", "machine_rank is not needed"),
        ("num_machines: 2", "put your host names here"),
        ("num_machines: 3", "num_processes: 2 over 3 machines"),
        ("fsdp_config: {a: b}", "fsdp_config has no effect in a job of type MULTI_GPU"),
        ("num_machines: 2, gpu_ids: 0", "here they apply to all"),
    ],
)
def test_what_accelerate_alone_can_do_is_a_comment(more: str, words: str) -> None:
    told = comments(accelerated(f"{{distributed_type: MULTI_GPU, num_processes: 2, {more}}}"))
    assert words in told
    assert "put your script and its args here" in told


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a", "c.yaml:1:1: expected an accelerate config"),
        ("num_machines: x", "c.yaml:1:15: num_machines: expected an integer"),
        ("distributed_type: XLA", "c.yaml:1:19: distributed_type: expected"),
        ("compute_environment: AMAZON_SAGEMAKER", "c.yaml:1:22: compute_environment: expected"),
        ("fsdp_config: 3", "c.yaml:1:14: fsdp_config: expected a mapping"),
        ("main_process_ip: -x", "c.yaml:1:18: main_process_ip: a host name can't begin"),
    ],
)
def test_a_config_that_can_not_be_is_refused_with_its_place(text: str, words: str) -> None:
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
def test_a_config_becomes_a_job_or_is_refused_with_its_place(config: dict[str, Any]) -> None:
    try:
        draft = accelerated(yaml.safe_dump(config, allow_unicode=True))
    except JobError as error:
        assert all(problem.source == "c.yaml" for problem in error.problems)
    else:
        keys_of(draft)


# Hostfiles


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("a\nb\n", {"nodes": ["a", "b"]}),
        ("a slots=4\nb slots=4 max_slots=8\n", {"nodes": ["a", "b"], "procs_per_node": 4}),
        ("a:2\nme@10.0.0.2:2\n", {"nodes": ["a", "me@10.0.0.2"], "procs_per_node": 2}),
        (
            "a slots=4\nb\nme@c slots=1",
            {"nodes": [{"host": "a", "procs": 4}, "b", {"host": "me@c", "procs": 1}]},
        ),
        ("a slots=1\na slots=2", {"nodes": ["a"], "procs_per_node": 3}),
    ],
)
def test_a_hostfile_becomes(text: str, keys: dict[str, Any]) -> None:
    assert keys_of(hostfile_draft(text, "hosts", ["x.py"])) == {"script": "x.py", **keys}


PROMPTS = [
    *("$ ", "% ", "> ", "# ", "  $  ", "user@host:~$ ", "(base) me@h:~/x$ ", "(v)$ ", "[me@n dir]# "),
    *("me@host ~ % ", "root@h:/a-b/c# ", "\u276f "),
]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_prompt_that_was_copied_along_is_taken_off(prompt: str) -> None:
    text = "torchrun --nproc-per-node 2 \\\n{}x.py '$ a' > log"
    plain = launcher_line(text.format(""))
    assert launcher_line(prompt + text.format("")) == plain
    assert launcher_line(prompt + text.format("> ")) == plain


@pytest.mark.parametrize(
    "text", ["$A torchrun x.py", "A=b torchrun x.py", "me@host torchrun x.py", "a; torchrun x"]
)
def test_what_is_no_prompt_stays(text: str) -> None:
    line = launcher_line(text)
    assert line.command.words[0] == text.split(maxsplit=1)[0] or line.notes


def test_a_program_beside_a_hostfile_has_its_braces_told() -> None:
    draft = hostfile_draft("a\n", "hosts", ["x.py", "{epoch}"])
    assert "{{epoch}}: doubled braces" in comments(draft)
    assert fill(spec_of(draft_text(draft)).args[0], {}) == "{epoch}"


@pytest.mark.parametrize(
    ("hosts", "gpus"), [("a slots=2\nb slots=2\n", 2), ("a\n", 8), ("a slots=1\nb\n", 8)]
)
def test_a_hostfiles_job_says_what_dry_run_needs(hosts: str, gpus: int) -> None:
    text = draft_text(hostfile_draft(hosts, "hosts"))
    facts = dict.fromkeys(range(hosts.count("\n")), Facts("python", None))
    with pytest.raises(JobError, match="set gpus_per_node"):
        make_plan(spec_of(text), facts)
    taken = spec_of(text.replace(f"# gpus_per_node: {gpus}", f"gpus_per_node: {gpus}"))
    assert [node.gpus for node in taken.nodes] == [gpus] * len(facts)
    assert make_plan(taken, facts)


def test_a_hostfile_is_refused_with_its_place() -> None:
    with pytest.raises(JobError, match="hosts:2:1: slots: expected a number"):
        hostfile_draft("a\nb slots=x", "hosts")
    assert "max_slots has no equivalent" in comments(hostfile_draft("a max_slots=2", "hosts"))


@given(text=st.text("ab[]0123,-.: @#=\t\nslots", max_size=40))
@bounded(300)
def test_a_hostfile_copied_is_the_hostfile_read(text: str) -> None:
    try:
        copied = spec_of(draft_text(hostfile_draft(text, "hosts")))
    except JobError:
        with pytest.raises(JobError):
            _read_hosts(text)
        return
    read = _read_hosts(text)
    assert list(map(_reached, copied.nodes)) == list(map(_reached, read.nodes))


def _read_hosts(text: str) -> JobSpec:
    problems: list[Problem] = []
    entries = tuple(parse_hostfile(text, "hosts", problems))
    if problems:
        raise JobError(problems)
    return spec_of("{script: x, hostfile: hosts}", hostfile=entries)


def _reached(node: NodeSpec) -> tuple[str, str | None, str | None, int | None]:
    assert isinstance(node.reach, Ssh)
    return node.label, node.reach.host, node.reach.user or None, node.procs
