"""Import of torchrun command lines as job files, and the way back: keys, comments, and refusals."""

import os.path
import re
import shlex
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from distlaunch.compat.draft import Draft
from distlaunch.compat.flags import FLAGS, Flags, parse_flags
from distlaunch.compat.from_torchrun import command_draft
from distlaunch.compat.torchrun_job import argument
from distlaunch.errors import DistlaunchError
from distlaunch.job.spec import JobSpec
from distlaunch.job.text import PLACEHOLDERS, fill, literal, placeholder_error
from distlaunch.plan.placement import Facts, make_plan
from distlaunch.plan.shell_text import torchrun_text
from tests.unit.drafts import CPUS, comments, keys_of
from tests.unit.samples import DIRECTORY, bounded, process_text, spec_of


def imported(command: str) -> Draft:
    return command_draft([command], CPUS)


N0, N1, N2 = (f"NODE_NAME_{number}" for number in range(3))
AT_A = "--rdzv-backend c10d --rdzv-endpoint a:0"
AT_PORT = {"master_addr": "a", "master_port": 5}
LAUNCH = "python -m torch.distributed.launch"
ON_TWO = {"procs_per_node": None, "gpus_per_node": 2, "env": {"CUDA_VISIBLE_DEVICES": "2,3"}}
AT_H = "--rdzv_backend c10d --rdzv_endpoint $H:5 --rdzv_id 7"
TWO_BY_4, FIRST_OF_4, MANY = "--nnodes 2 --nproc-per-node 4", {"console": [0, 4]}, "NODE_NAME_[1-39]"
TILDES = {"script": "./~/x.py", "python": "~/v/bin/python", "logs": {"dir": "~/l"}}
COMMANDS: list[tuple[str, dict[str, Any]]] = [
    ("torchrun x.py a", {"args": ["a"]}),
    ("torchrun --nproc_per_node=2 --module a.b", {"script": None, "procs_per_node": 2, "module": "a.b"}),
    ("torchrun --no-python ./a.out", {"script": None, "command": ["./a.out"]}),
    ("/v/bin/torchrun x.py", {"python": "/v/bin/python"}),
    ("python3 -u -m torch.distributed.run x.py", {}),
    ("/v/python3.12 -m torch.distributed.run x.py", {"python": "/v/python3.12"}),
    ("distlaunch torchrun x.py", {}),
    ("python -m distlaunch torchrun x.py", {}),
    ("B='c d' RANK=3 PET_NPROC_PER_NODE=4 torchrun x.py", {"procs_per_node": 4, "env": {"B": "c d"}}),
    ("CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc-per-node gpu x.py", ON_TWO),
    (f"{LAUNCH} x.py a --use-env", {"args": ["--local-rank={local_rank}", "a", "--use-env"]}),
    (f"{LAUNCH} --use_env --nproc_per_node 2 x.py a", {"procs_per_node": 2, "args": ["a"]}),
    ("torchrun x.py '-r${local_rank}' {rank}", {"args": ["-r{local_rank}", "{{rank}}"]}),
    ("srun -N 4 torchrun --nnodes 4 x.py", {"nodes": 4}),
    (f"A=1 srun -l torchrun --nnodes=2:4 {AT_H} x.py", {"nodes": 4, "min_nodes": 2, "env": {"A": "1"}}),
    ("torchrun ~/x.py", {"script": "~/x.py"}),
    ("~/v/bin/torchrun --log-dir ~/l ./~/x.py", TILDES),
    ("PYTHON_EXEC=~/p PET_LOG_DIR=~/l torchrun x.py", {"python": "~/p", "logs": {"dir": "~/l"}}),
    ("torchrun x.py a#b '#c' 'd e' \"f'g\" h\\ i", {"args": ["a#b", "#c", "d e", "f'g", "h i"]}),
    ("torchrun x.py \\\n  j '' '$k' 'l|m'", {"args": ["j", "", "$k", "l|m"]}),
    ("torchrun x.py ssh a", {"args": ["ssh", "a"]}),
    ("export A=1 B=2; env C=3 torchrun x.py", {"env": {"A": "1", "B": "2", "C": "3"}}),
    ("export A=1; A=2 B=3 ./prep && C=4 torchrun x.py", {"env": {"A": "1", "C": "4"}}),
    ("python3.12 -m torch.distributed.run x.py", {"python": "python3.12"}),
    (r"""torchrun x.py '(' "|;" \; '#1' | tee log""", {"args": ["(", "|;", ";", "#1"]}),
]
"""Each with the keys that it becomes, but for those that are AS_IT_IS; None: without that key."""
OF_FLAGS: list[tuple[str, dict[str, Any]]] = [
    *((f"--run-path {others}", {}) for others in ("", "--module", "--no-python", "-m --no-python")),
    ("--nproc-per-node gpu", {"procs_per_node": None}),
    ("--nproc-per-node auto", {"procs_per_node": None}),
    ("--nproc-per-node cpu", {"gpus_per_node": 0, "procs_per_node": CPUS}),
    ("--nnodes 3 --node-rank 1 --master-addr a --master-port 5", {"nodes": ["a", N1, N2], **AT_PORT}),
    ("--nnodes 2 --master-addr localhost", {"nodes": [N0, N1]}),
    ("--nnodes 40 --rdzv-endpoint [::2]:5", {"nodes": ["::2", MANY], **AT_PORT, "master_addr": "::2"}),
    (f"--nnodes 1:2 {AT_A}", {"nodes": ["a", N1], "min_nodes": 1, "master_addr": "a"}),
    (f"{AT_A} --rdzv-id j --max-restarts 5", {"rendezvous": {"id": "j"}, "restarts": {"max": 5}}),
    ("--nnodes 2 --rdzv-backend etcd-v2 --rdzv-endpoint e:1", {"nodes": [N0, N1]}),
    ("--local-addr 127.0.0.2", {"master_addr": "127.0.0.2"}),
    (f"--local-addr 127.0.0.2 {AT_A}", {"master_addr": "127.0.0.2"}),
    ("--standalone --nnodes 1:9 --rdzv-id x", {}),
    ("--role r --shutdown-timeout 5", {"timeouts": {"stop": "5s"}, "role": "r"}),
    ("--numa-binding=node --virtual-local-rank", {"numa_binding": "node", "virtual_local_rank": True}),
    ("--log-dir l --redirects 3", {"logs": {"dir": "l", "console": "none"}}),
    ("-r 3 -t 3", {}),
    ("-r 3 --log-dir /dev/null", {}),
    (f"--local-ranks-filter 0 {TWO_BY_4}", {"nodes": [N0, N1], "procs_per_node": 4, "logs": FIRST_OF_4}),
]
"""As COMMANDS, of `torchrun FLAGS x.py`."""
COMMANDS += [(f"torchrun {flags} x.py", keys) for flags, keys in OF_FLAGS]
"""Each with the keys that it becomes, but for those that are AS_IT_IS; None: without that key."""
AS_IT_IS: dict[str, Any] = {"procs_per_node": 1, "script": "x.py"}


@pytest.mark.parametrize(("command", "keys"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_a_torchrun_command_becomes_a_job(command: str, keys: dict[str, Any]) -> None:
    expected = {key: value for key, value in (AS_IT_IS | keys).items() if value is not None}
    assert keys_of(imported(command)) == expected


COMMENTED = {
    "torchrun x.py": "keep it in the directory where the command was run",
    "torchrun --monitor-interval 2 x.py": "--monitor-interval has no effect",
    "torchrun --master-port 5 --rdzv-conf a=b x.py": "--rdzv-conf has no effect",
    "torchrun --logs-specs a x.py": "--logs-specs a has no equivalent",
    "torchrun --rdzv-backend mine x.py": "--rdzv-backend mine: distlaunch assigns the ranks itself",
    "torchrun --nnodes 2 --rdzv-backend c10d --local-addr a x.py": "--local-addr applies to one node",
    "torchrun --signals-to-handle SIGUSR1 x.py": "--signals-to-handle has no equivalent",
    "torchrun --nnodes 2 --node-rank 1 x.py": "--node-rank is not needed",
    "torchrun --nnodes 2 x.py": "replace with your host names",
    "srun torchrun --nnodes 2 --rdzv_endpoint a:5 x.py": "left out: --nnodes, --rdzv_endpoint: distl",
    f"torchrun --nnodes 2 {AT_A} --rdzv-conf join_timeout=9 x.py": "join_timeout=9: set timeouts.join",
    f"torchrun --nnodes 2 {AT_A} --rdzv-conf last_call_timeout=1 x.py": "last_call_timeout=1 has no effect",
    "srun torchrun --local-addr=a x.py": "left out: --local-addr: distlaunch",
    "A='$$' torchrun x.py": "kept as written: A=$$",
    "PET_RUN_PATH=1 torchrun x.py": "PET_RUN_PATH has no effect",
    "uv run torchrun x.py": "the ranks of all nodes itself; set python to the environment's interpreter",
    "srun conda run -n e torchrun x.py": "set python to the environment's interpreter",
    "torchrun --max-restarts 1 x.py": "limits the whole run",
    "torchrun --nnodes 1:2 x.py": "counts as a restart",
    "torchrun -t 3 x.py": "the run directory always keeps each rank's stdout",
    "torchrun -r 1 x.py": "shows both streams",
    "PET_LOG_DIR=/dev/null torchrun x.py": "--log-dir /dev/null: all output is shown",
    "torchrun --log-line-prefix-template x x.py": "the prefix is [node:rank]",
    "RANK=1 torchrun x.py": "distlaunch sets RANK",
    "torchrun x.py --name {epoch}-{step}": "{{epoch}}, {{step}}: doubled braces",
    "torchrun --nnodes 2 --nproc-per-node 4 x.py": "set gpus_per_node to the number of GPUs",
    "torchrun --nproc-per-node auto x.py": "one worker per GPU",
    "torchrun --run-path x.py": "--run-path has no effect",
    "python -u /venv/bin/torchrun --run-path x.py": "--run-path has no effect",
    "python -W ignore -X dev -m torch.distributed.launch x.py": "expect --local_rank",
}


@pytest.mark.parametrize(("command", "words"), COMMENTED.items())
def test_flags_without_an_equivalent_become_comments(command: str, words: str) -> None:
    assert words in comments(imported(command))


EXPANDED = ("data/*.pt", "a?", "[0-3].pt", "{1..3}", "x{a,b}", "~/x", "data=~/x", "$A", "${A}x", "`a`")
LOCAL_RANK = ("${local_rank}", "$local_rank")
AS_THEY_ARE = ("{rank}", "layers=[64,64]", "a~", "--data=~/x", "$$", *LOCAL_RANK)


@pytest.mark.parametrize("word", [*EXPANDED, *AS_THEY_ARE])
def test_names_arguments_that_a_shell_would_have_expanded(word: str) -> None:
    draft = imported(f"torchrun x.py {word}")
    found = re.findall(r"(?m)^# kept as written: (\S+): job files don't expand", comments(draft))
    assert found == [each for each in EXPANDED if each == word]
    written = {"{rank}": "{{rank}}", "$$": "$", **dict.fromkeys(LOCAL_RANK, "{local_rank}")}
    assert keys_of(draft)["args"] == [written.get(word, word)]


def test_a_number_before_a_redirection_is_an_argument_if_there_is_a_blank() -> None:
    assert keys_of(imported("torchrun x.py --n 2 > log 2>&1"))["args"] == ["--n", "2"]
    assert keys_of(imported("torchrun x.py 2&"))["args"] == ["2"]


def test_does_not_comment_on_a_common_single_node_command() -> None:
    draft = imported("torchrun --rdzv-backend c10d --rdzv-endpoint localhost:0 --rdzv-conf is_host=1 x.py")
    assert keys_of(draft) == AS_IT_IS
    assert "rdzv" not in comments(draft)


def test_keeps_words_that_a_shell_has_expanded() -> None:
    draft = command_draft(["torchrun", "--log-dir", "~l", "~s.py", "$a", "*"], CPUS)
    wanted = {"procs_per_node": 1, "script": "./~s.py", "args": ["$a", "*"], "logs": {"dir": "./~l"}}
    assert keys_of(draft) == wanted
    assert "kept as written" not in comments(draft)


@pytest.mark.parametrize("endpoint", ["", "a", "a:1", "localhost:0", "[fe80::1]:5"])
def test_an_etcd_server_is_named_beside_the_keys_for_it(endpoint: str) -> None:
    draft = imported(f"torchrun --nnodes=2 --rdzv-backend=etcd --rdzv-endpoint={endpoint} x.py")
    told = f"set rendezvous.backend to etcd-v2 and rendezvous.endpoint to {endpoint or 'ETCD_HOST:2379'}"
    assert told in comments(draft)
    assert keys_of(draft).keys() == {"nodes", "procs_per_node", "script"}


LEFT_OUT = [
    ("torchrun --node-rank $SLURM_NODEID x.py", "--node-rank $SLURM_NODEID: this file starts all"),
    ("torchrun --rdzv-id=$RANDOM x.py", "--rdzv-id $RANDOM: each run gets its own ID"),
    ("torchrun --rdzv-endpoint=`hostname`:1 x.py", "--rdzv-endpoint `hostname`:1: the ranks connect to"),
    ('torchrun --master-addr "$(a b)" x.py', "--master-addr $(a b): the ranks connect to a free port"),
    ("torchrun x.py 2>&1 | tee log", "`2>&1 | tee log`: write it after `distlaunch run` or "),
    ("torchrun x.py |& tee log; echo done &", "`|& tee log ; echo done &`: write it after"),
    ("torchrun x.py\necho done", "`; echo done`: write it after"),
    ("torchrun x.py # best", "`# best`: write it after"),
    ("nohup torchrun x.py", "`nohup`: `distlaunch run` starts the ranks of all nodes"),
    ("srun -N 2 torchrun x.py", "`srun -N 2`: `distlaunch run` starts the ranks of all nodes"),
    ("me@host:~/x$ torchrun x.py", "`'me@host:~/x$'`: `distlaunch run` starts"),
    ("cd 'a b' && export PET_ROLE=default; torchrun x.py", "`cd 'a b' &&`: run it before `distlaunch run`"),
    ("cd a && torchrun x.py", "`cd a &&`: run it before `distlaunch run`, if the job needs it; instead of"),
    ("torchrun x.py < d", "`< d`: set `stdin: rank 0`, and write it after"),
    ("yes | torchrun x.py", "`yes |`: run it before"),
]


@pytest.mark.parametrize(("command", "told"), LEFT_OUT)
def test_names_what_is_left_out(command: str, told: str) -> None:
    draft = imported(command)
    assert keys_of(draft) == {"procs_per_node": 1, "script": "x.py"}
    (left_out,) = re.findall(r"(?m)^# left out: (.*)$", comments(draft))
    assert left_out.startswith(told)


REFUSED = [
    *((line, "expected a command with torchrun") for line in ("", "python x.py torchrun y", "-r 3 x.py")),
    *((line, "no script given") for line in ("torchrun", "torchrun ''", "torchrun --help")),
    ("torchrun --nproc-per-node ${G:-8} x.py", "--nproc-per-node ${G:-8}: write the value"),
    ("PET_NNODES=$N torchrun x.py", "PET_NNODES: expected N or MIN:MAX with 1 ≤ MIN ≤ MAX, got '$N'"),
    ("srun torchrun --nnodes=$N x.py", "--nnodes $N: write the value: job files don't expand shell"),
    ("torchrun -m ${M} --role x", "--module ${M}: write the value: job files don't expand"),
    ("torchrun $FLAGS x.py", "$FLAGS: write the flags or the script that it stands for"),
    ("torchrun $FLAGS --nproc-per-node 2 -m a.b", "$FLAGS: write the flags or the script"),
    ("torchrun --master-port 1 (x) x.py", "only a shell can run a command in parentheses"),
    ("torchrun 'x", "no closing quotation: torchrun 'x"),
    ("torchrun x \\", "no escaped character"),
    ("torchrun ~bob/x.py", "~bob is not expanded"),
    ("torchrun --master-addr a/b --nnodes 2 x.py", '"a/b" is not a valid host name'),
    ("torchrun --nnodes 99999 x.py", "names more than"),
    ("torchrun -m a/b", "expected a dotted module name"),
    ("PET_NNODES=2 torchrun --standalone x.py", "--standalone is for one node, but PET_NNODES is 2: use"),
    ("torchrun --rdzv-conf a x.py", "--rdzv-conf: expected key=value,…, got 'a'"),
    ("torchrun --frob x.py", "has no flag --frob"),
    ("python -m torch.distributed.launch --no-python x", "only with --use-env"),
    ("torchrun x.py \udc80", "not UTF-8 text"),
]


@pytest.mark.parametrize(("command", "words"), REFUSED)
def test_refuses_a_wrong_command_in_one_line(command: str, words: str) -> None:
    with pytest.raises(DistlaunchError) as caught:
        imported(command)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_comment_can_not_break_out_of_its_line() -> None:
    draft = imported("torchrun --rdzv-backend 'a\nscript: evil' --rdzv-endpoint a x.py")
    assert keys_of(draft)["script"] == "x.py"


def test_a_command_above_has_each_flag_that_becomes_a_key() -> None:
    of_etcd = {"rdzv_backend", "rdzv_endpoint", "rdzv_conf"}
    for flag in (flag for flag in FLAGS if flag.key and flag.field not in of_etcd):
        section, _, inner = flag.key.rpartition(".")
        with_flag = [AS_IT_IS | keys for command, keys in COMMANDS if flag.name in command.replace("_", "-")]
        assert any(inner in (keys.get(section, {}) if section else keys) for keys in with_flag), flag.name


# The way back

_brace = st.sampled_from(
    [f"{{{name}}}" for name in (*PLACEHOLDERS, "a-b", "X1", "1")] + [*"{}x$", "{{", "}}", "local_rank"]
)
braces = st.lists(_brace, max_size=6).map("".join)
arguments = st.lists(process_text | braces | st.just("--"), max_size=5)
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
        "numa_binding": st.sampled_from(["node", "socket"]),
        "master_addr": st.sampled_from(["gpu-a", "10.0.0.9", "fe80::1"]),
        "master_port": st.integers(1, 65535),
    },
)


def back_to_flags(spec: JobSpec) -> Flags:
    """The flags of the last node's line of `dry-run --format torchrun`."""
    plan = make_plan(spec, {i: Facts("python3", 0) for i in range(len(spec.nodes))})
    line = torchrun_text(plan, plan.master_port or 29500).partition(f"# node {spec.nodes[-1].label}\n")[2]
    words = shlex.split(line.rstrip("\n").removesuffix(")"))
    return parse_flags(words[words.index("torchrun") + 1 :], {})


@given(values=_values, program=_programs, args=arguments, quoted=st.booleans())
@bounded(400)
def test_a_command_comes_back_from_its_job_file(
    values: dict[str, Any], program: tuple[str, str], args: Sequence[str], quoted: bool
) -> None:
    how, script = program
    flags = [(f"--{name.replace('_', '-')}", value) for name, value in values.items()]
    flag_words = [name if value is True else f"{name}={value}" for name, value in flags]
    words = ["torchrun", *flag_words, *([how] if how else []), "--", script, *args]
    # In a line, shlex can't tell a quoted operator from one of the shell's, nor a quoted $ or ~.
    plain = not any(set(word) <= set("();<>|&\n") or word == "#" or "\\\n" in word for word in words if word)
    in_line = quoted and plain and not set("$`~") & set("".join(words[: len(words) - len(args)]))
    given = [shlex.join(words)] if in_line else words
    spec = spec_of(command_draft(given, CPUS).text())
    back = back_to_flags(spec)
    nodes = int(values.get("nnodes", "1"))
    # One node without a port needs no endpoint, and torchrun then has none of its address either.
    unheard = {"master_addr"} if nodes == 1 and "master_port" not in values else set()
    expected = {name: value for name, value in values.items() if name not in unheard}
    assert {name: getattr(back, name) for name in expected} == expected
    assert (back.node_rank, back.nnodes) == (nodes - 1, str(nodes))
    assert (back.module, back.no_python) == (how == "--module", how == "--no-python")
    # A path is where the user's command had it, run in DIRECTORY.
    path = how == "" or (how == "--no-python" and "/" in script)
    assert back.script == (os.path.normpath(os.path.join(DIRECTORY, script)) if path else script)
    assert [*map(argument, back.args)] == [*map(argument, args)]


@given(
    env=st.dictionaries(st.text("ABC_19", max_size=4).map("V_".__add__), process_text, max_size=4),
    directory=process_text.filter(bool),
)
@example(env={}, directory="~you/x")
@example(env={"V_A": "{rank} {a}"}, directory="x")
@bounded()
def test_variables_and_paths_survive_the_import(env: dict[str, str], directory: str) -> None:
    settings = [f"{name}={value}" for name, value in env.items()]
    spec = spec_of(command_draft([*settings, "torchrun", f"--log-dir={directory}", "x.py"], CPUS).text())
    found = spec.program.env.items()
    assert {name: fill(value.text, lambda word: "9", every=False) for name, value in found} == env
    assert spec.logs.directory == os.path.normpath(os.path.join(DIRECTORY, directory))
    assert (spec.program.workdir, spec.program.words) == (DIRECTORY, ("x.py",))


@given(argument=braces, every=st.booleans())
@bounded()
def test_literal_braces_survive_filling(argument: str, every: bool) -> None:
    assert fill(literal(argument, every), lambda word: "9", every) == argument
    assert placeholder_error(literal(argument)) is None
