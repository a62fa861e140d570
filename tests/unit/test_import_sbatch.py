"""Import of Slurm batch scripts as job files: keys, comments about everything else, and refusals."""

import re
import time
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.compat.draft import Draft
from distlaunch.compat.from_sbatch import MAX_CHARACTERS, sbatch_draft
from distlaunch.errors import DistlaunchError, UsageError
from tests.unit.drafts import CPUS, comments, keys_of
from tests.unit.samples import bounded


def imported(text: str) -> Draft:
    return sbatch_draft(text, "job.sh", CPUS)


SCRIPTS = {
    "torchtitan": (
        """#!/bin/bash
#SBATCH --ntasks=2 --nodes=2 --gpus-per-task=8 --cpus-per-task=96
#SBATCH --partition=train --exclusive
nodes=( $( scontrol show hostnames $SLURM_JOB_NODELIST ) )
head_node_ip=$(srun --nodes=1 --ntasks=1 -w "${nodes[0]}" hostname --ip-address)
export FI_PROVIDER="efa"
# export NCCL_P2P_DISABLE=1
export LD_LIBRARY_PATH=/opt/amazon/efa/lib:$LD_LIBRARY_PATH
CONFIG_FILE=${CONFIG_FILE:-"./llama3_8b.toml"}

dcgmi profile --pause
srun torchrun --nnodes $SLURM_NNODES --nproc_per_node 8 --rdzv_id 101 --rdzv_backend c10d \\
  --rdzv_endpoint "$head_node_ip:29500" -m torchtitan.train --job.config_file ${CONFIG_FILE}
dcgmi profile --resume""",
        """{nodes: 2, procs_per_node: 8, module: torchtitan.train, env: {FI_PROVIDER: efa}, python: python,
args: [--job.config_file, "${CONFIG_FILE:-./llama3_8b.toml}"],
slurm:
  {partition: train, cpus_per_task: 12, exclusive: true, extra: [--gpus-per-task=8],
   setup: ["export LD_LIBRARY_PATH=/opt/amazon/efa/lib:$LD_LIBRARY_PATH"]}}""",
        [
            "line 11: not understood: `dcgmi profile --pause`",
            "line 14: left out because it comes after the ranks: `dcgmi profile --resume`",
            "kept as written: ${CONFIG_FILE:-./llama3_8b.toml}: job files don't expand variables",
        ],
    ),
    "accelerate's recipe": (
        """#!/bin/bash
#SBATCH --job-name=multinode -D . --output=O-%x.%j
#SBATCH --nodes=4                   # number of nodes
#SBATCH --ntasks-per-node=1 --gres=gpu:4 --cpus-per-task=160 --time=01:59:00
source activateEnvironment.sh
export GPUS_PER_NODE=4
head_node_ip=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
export LAUNCHER="accelerate launch \\
    --num_processes $((SLURM_NNODES * GPUS_PER_NODE)) --num_machines $SLURM_NNODES \\
    --rdzv_backend c10d --main_process_ip $head_node_ip --main_process_port 29500 --mixed_precision bf16 \\
    "
export SCRIPT="/accelerate/examples/complete_nlp_example.py"
export SCRIPT_ARGS=" \\
    --mixed_precision fp16 --output_dir /data \\
    "
export CMD="$LAUNCHER $SCRIPT $SCRIPT_ARGS"
srun $CMD""",
        """{name: multinode, nodes: 4, gpus_per_node: 4, python: python, workdir: .,
script: /accelerate/examples/complete_nlp_example.py, args: [--mixed_precision, fp16, --output_dir, /data],
env: {GPUS_PER_NODE: "4", SCRIPT: /accelerate/examples/complete_nlp_example.py,
  SCRIPT_ARGS: "     --mixed_precision fp16 --output_dir /data     "},
slurm: {setup: [source activateEnvironment.sh], cpus_per_task: 40, gres: "gpu:4", time: "01:59:00"}}""",
        [
            "left out: lines 7, --num_machines, --rdzv_backend, --main_process_ip, --main_process_port: ",
            "left out: --output=O-%x.%j: each rank's output is in logs.dir",
            "not understood: `accelerate launch --num_processes 16 --num_machines 4 --rdzv_backend c10d",
        ],
    ),
    "srun python": (
        """#!/usr/bin/env bash
#SBATCH -J train -N 2 --ntasks-per-node=8
#SBATCH --gpus-per-node=a100:8 -p gpu,long -A acct -t 120 --comment="a b"
#SBATCH --signal=B:USR1@120 --mail-type=END -k
##SBATCH --qos=high
module purge
VENV=/opt/venv
source $VENV/bin/activate
eval "$(conda shell.bash hook)"
export PATH=$VENV/bin:$PATH NCCL_DEBUG=INFO
export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
export MASTER_PORT=29500 WORLD_SIZE=$SLURM_NTASKS
export WANDB_NAME=run-$(hostname)
LR=0.1
export LR
cd /proj
HF_HOME='/data/h f' srun -l --cpu-bind=none python -u train.py --lr ${LR} "--name=a b" '$x' \\
    --out runs/$SLURM_JOB_ID --gpus $SLURM_GPUS_ON_NODE 2>&1 | tee log""",
        """{name: train, nodes: 2, gpus_per_node: 8, procs_per_node: 8, python: python, workdir: /proj,
script: train.py, args: [--lr, "0.1", --name=a b, $x, --out, runs/$SLURM_JOB_ID, --gpus, "8"],
env: {NCCL_DEBUG: INFO, LR: "0.1", HF_HOME: /data/h f},
slurm:
  {gpus: "a100:8", partition: "gpu,long", account: acct, time: 120m, comment: a b, signal: "B:USR1@120",
   setup: [module purge, source /opt/venv/bin/activate, 'eval "$(conda shell.bash hook)"',
           "export PATH=/opt/venv/bin:$PATH", export WANDB_NAME=run-$(hostname)],
   extra: [--mail-type=END, -k]}}""",
        [
            "left out: lines 11, 12: distlaunch finds the hosts and sets up the rendezvous",
            "line 17: left out: `srun -l --cpu-bind=none`: `distlaunch run` starts",
            "line 17: left out: `2>&1 | tee log`: write it after `distlaunch run` or `distlaunch submit",
            "kept as written: $x runs/$SLURM_JOB_ID: job files don't expand variables",
        ],
    ),
    "values that need a shell": (
        """#!/bin/sh
#SBATCH -N2
SEED=$RANDOM
PORT=$((29500 + RANDOM % 9))
srun torchrun --nnodes 2 --rdzv-endpoint $(hostname):$PORT train.py --seed $SEED""",
        "{nodes: 2, procs_per_node: 1, script: train.py, args: [--seed, $SEED]}",
        [
            "left out: line 3: the value of SEED needs a shell: set it in args",
            "left out: lines 4, --nnodes, --rdzv-endpoint: distlaunch finds the hosts",
        ],
    ),
}
"""Each with its job file, but for comments, and with how some of those begin."""


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_batch_script_becomes_a_job(name: str) -> None:
    text, keys, told = SCRIPTS[name]
    draft = imported(text)
    assert keys_of(draft) == yaml.safe_load(keys)
    lines = [line.removeprefix("# ") for line in comments(draft).splitlines()]
    assert all(any(line.startswith(start) for line in lines) for start in told), lines


RUN = "srun python t.py"
ON_GPUS = "torchrun --nproc_per_node=$SLURM_GPUS_ON_NODE t.py"


KEYS = [
    (RUN, {"procs_per_node": 1}),
    ("srun --nodes=2 -n 8 python t.py", {"nodes": 2, "procs_per_node": 4}),
    ("#SBATCH -N2 -n16\nsrun python t.py", {"nodes": 2, "procs_per_node": 8}),
    ("#SBATCH -N2\nsrun -l --exclusive numactl -N 0 python t.py", {"nodes": 2, "procs_per_node": 1}),
    ("A=1 srun -n 4 taskset -c 0-7 python t.py", {"procs_per_node": 4, "env": {"A": "1"}}),
    ("#SBATCH -N2 --ntasks-per-node=4\nsrun -n 1 python t.py", {"nodes": 1, "procs_per_node": 1}),
    ("#SBATCH -N2 --ntasks-per-node=8\nsrun -n 4 python t.py", {"nodes": 2, "procs_per_node": 2}),
    (f"#SBATCH -N 2 --ntasks-per-node 3 -c 4\n{RUN}", {"nodes": 2, "procs_per_node": 3}),
    (f"#SBATCH -N 2 --tasks-per-node=3\n{RUN}", {"nodes": 2, "procs_per_node": 3}),
    ("srun /v/python3.11 -u -m a.b x", {"module": "a.b", "args": ["x"], "python": "/v/python3.11"}),
    ("srun python -W ignore t.py", {"command": ["python"], "args": ["-W", "ignore", "t.py"]}),
    ("srun python -m torch.distributed.launch --use_env t.py", {"procs_per_node": 1}),
    ("A=é\nsrun python t.py '€ b' 😀$A ${A}é", {"args": ["€ b", "😀é", "éé"]}),
    ("srun python t.py $(date +%s)-`a b`", {"args": ["$(date +%s)-`a b`"]}),
    (f"#SBATCH -N 2 -G a100:16\n{RUN}", {"gpus_per_node": 8, "slurm": {"gpus": "a100:8"}}),
    (f"#SBATCH --gres=gpu:v100:4\n{ON_GPUS}", {"procs_per_node": 4, "slurm": {"gres": "gpu:v100:4"}}),
    (f"#SBATCH --gpus-per-node 4\n{ON_GPUS}", {"gpus_per_node": 4, "procs_per_node": 4}),
    ("N=4\ntorchrun --nproc_per_node=${N} ~/t.py", {"procs_per_node": 4, "script": "~/t.py"}),
    (f"#SBATCH --exclusive=user\n{RUN}", {"slurm": {"extra": ["--exclusive=user"]}}),
    (f"#SBATCH -t 1-0\n#SBATCH --mem=0 --qos q\n{RUN}", {"slurm": {"time": "1-0", "mem": "0", "qos": "q"}}),
    (f"#SBATCH -N 4 # four\n\n  \n# so\n#SBATCH -p a\n{RUN}", {"nodes": 4, "slurm": {"partition": "a"}}),
    ("accelerate launch --cpu --num_processes 3 -m a.b --x", {"module": "a.b", "args": ["--x"]}),
    ("accelerate launch --multi_gpu t.py", {"procs_per_node": None}),
    ("A=1\nexport A\nA=2\nexport C=$A\nA=4 srun python t.py", {"env": {"A": "4", "C": "2"}}),
    ("ARGS='--lr 1 --x'\nsrun python t.py $ARGS \"$ARGS\"", {"args": ["--lr", "1", "--x", "--lr 1 --x"]}),
]


@pytest.mark.parametrize(("text", "keys"), KEYS)
def test_options_and_commands_become_keys(text: str, keys: dict[str, Any]) -> None:
    found = keys_of(imported(f"#!/bin/bash\n{text}\n"))
    assert {key: found.get(key) for key in keys} == keys


@pytest.mark.parametrize("line", ["module unload a", "export A=$B", "A=2", "wait", "cd /x", "echo done"])
def test_lines_behind_the_ranks_are_left_out(line: str) -> None:
    draft = imported(f"export A=1\n{RUN}\n{line}\n")
    assert f"# line 3: left out because it comes after the ranks: `{line}`" in comments(draft)
    assert keys_of(draft).items() >= {"env": {"A": "1"}, "script": "t.py"}.items()
    assert not {"workdir", "slurm"} & set(keys_of(draft))


FLAGS = "--use_fsdp --fsdp_offload_params=true --mixed_precision bf16 --odd 1"
IMAGE, ITSELF = "--container-image=i", "`distlaunch run` starts the ranks of all nodes itself"


LEFT_OUT = [
    (f"source v/activate && {RUN}", "line 1: left out: `source v/activate && srun`: run it before"),
    (f"#SBATCH --array=1-4\n{RUN}", "left out: --array=1-4: an array would start"),
    (f"#SBATCH -N2 --gpus=15\n{RUN}", "left out: --gpus=15: this total isn't a multiple of the nodes"),
    (f"srun {IMAGE} python t.py", f"line 1: left out: `srun {IMAGE}`: {ITSELF}, and `container` names"),
    (f"date )\nfi\n{RUN}", "lines 1-2: syntax error: `)`"),
    (f'{RUN} "$@"', "left out: the script's own arguments; `distlaunch submit` takes them after the"),
    (f"accelerate launch {FLAGS} t.py", f"not understood: `accelerate launch {FLAGS}`: set procs"),
    *((f"#SBATCH {x}\n{RUN}", f"line 1: not understood: `#SBATCH {x}`") for x in ("odd", "--a='b", "--١²")),
]


@pytest.mark.parametrize(("text", "told"), LEFT_OUT)
def test_names_what_is_left_out(text: str, told: str) -> None:
    draft = imported(f"{text}\n")
    assert f"# {told}" in comments(draft)
    assert keys_of(draft).keys() <= {"nodes", "procs_per_node", "script", "python"}


UNKNOWN = (
    *("echo hi", "nvidia-smi | head", "mkdir -p logs && date", "cd $SLURM_SUBMIT_DIR", "python prepare.py"),
    *("ARGS=(--lr 0.1)", "A[1]=2", "A+=x", "unset A", "set -euo pipefail", "wait", "declare -x A=1"),
    *("srun hostname", "nohup torchrun x.py", "echo srun torchrun x.py > f", "python -c 'import torch'"),
    *("(cd x; date)", "cat <<< a", "module load b && python prepare.py"),
    *("conda run -n e python prepare.py", "eval python prepare.py", "#SBATCH --late=1"),
)


def test_names_each_line_it_does_not_understand() -> None:
    draft = imported("\n".join(["#!/bin/bash", "module load a", *UNKNOWN, RUN]))
    told = [f"not understood: `{line}`" for line in UNKNOWN]
    told[-1] = f"sbatch ignores it after the first command: `{UNKNOWN[-1]}`"
    expected = [f"# line {number}: {text}" for number, text in enumerate(told, 3)]
    assert re.findall("(?m)^# line [0-9]+: (?!left out).*$", comments(draft)) == expected
    assert keys_of(draft)["script"] == "t.py"


BLOCKS = (
    *("if true; then\n  A=2\nfi", "for A in 1 2; do\n  srun python x.py\ndone", "f() {\n  A=2\n}"),
    *("case $B in\n  x) read A;;\nesac", "while read A; do\n  date\ndone"),
)


@pytest.mark.parametrize("text", BLOCKS)
def test_a_variable_that_a_block_may_change_is_not_filled_in(text: str) -> None:
    draft = imported(f"A=1\nB=2\n{text}\nsrun python t.py $A $B\n")
    assert keys_of(draft)["args"] == ["$A", "2"]
    assert f"# lines 3-5: not understood: `{text.splitlines()[0]}`" in comments(draft)
    assert "kept as written: $A: job files don't expand" in comments(draft)


REFUSED = [
    ("", "found no srun with Python, torchrun or accelerate outside of if, for and functions"),
    *((text, "no srun with") for text in ("\n \n# a\n", "\0\x01\x7f", "import os\nprint('a')\n")),
    ("python t.py", "line 1: not understood: `python t.py`"),
    ("date\nsrun a\nsrun bash -c 'torchrun x'", "line 3: not understood: `srun bash -c 'torchrun x'`"),
    ("if :; then\n  distlaunch run a.yaml\nfi", "this script already starts distlaunch"),
    ("if :; then srun python x.py; fi", "line 1: not understood: `if :; then srun python x.py; fi`"),
    (f"{RUN}\n{RUN}", "lines 1, 2 all start ranks, but a job file has one program: comment out"),
    (f"{RUN}; torchrun x.py", "lines 1, 1 all start ranks"),
    *((f"srun python t.py {x}'a", "line 1: syntax error: `srun python t.py`") for x in ("", "\\\n  ")),
    *((f"#SBATCH -N {nodes}\n{RUN}", f"--nodes={nodes}: expected a number") for nodes in ("2-4", "x")),
    (f"#SBATCH -N 99999\n{RUN}", "nodes: expected an integer from 1 to 4096"),
    ("torchrun --nproc_per_node $X t.py", "--nproc-per-node $X: write the value: job files don't expand"),
    *((text, "no script given") for text in ("torchrun -r 2", "srun python", "accelerate launch -x 2")),
]


@pytest.mark.parametrize(("text", "words"), REFUSED)
def test_refuses_a_script_without_ranks_in_one_line(text: str, words: str) -> None:
    with pytest.raises(DistlaunchError) as caught:
        imported(text)
    assert str(caught.value).startswith("job.sh")
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


HUGE = (
    *("a b\n", "A=1\n", "A=$A$A\n", "$(", "((", "<<", "a=(", "if true; then\n", "'", '"$A'),
    "#SBATCH --a=b\n",
)


@pytest.mark.parametrize("part", HUGE)
def test_a_huge_script_is_refused_in_bounded_time(part: str) -> None:
    begun = time.process_time()
    with pytest.raises(UsageError, match="no srun with"):
        imported("A=x\n" + part * ((MAX_CHARACTERS - 4) // len(part)))
    with pytest.raises(UsageError, match="a batch script of at most 32,768 characters"):
        imported(part * (MAX_CHARACTERS + 1))
    assert time.process_time() - begun < 60


_PIECES = (
    *("#SBATCH ", "--nodes=2 ", "-n ", "srun ", "python t.py ", "torchrun ", "A=", "export ", "$A", "${A}"),
    *("--nproc_per_node ", "accelerate launch ", "if true; then\n", "fi\n", "<<E\n", "E\n", "(("),
    *("é", "\u2028", "\U000f0000", "\0", "module load a\n", "cd /x\n", *"\n\n\n  \"'$(){}|&;<>=\\`#~"),
)


@given(pieces=st.lists(st.sampled_from(_PIECES), max_size=25), begins=st.booleans())
@bounded(600)
def test_any_text_becomes_a_job_or_is_refused(pieces: list[str], begins: bool) -> None:
    try:
        draft = imported("".join(pieces) + (f"\n{RUN}\n" if begins else ""))
    except DistlaunchError as error:
        assert str(error).startswith("job.sh")
    else:
        keys_of(draft)


def test_a_signal_becomes_a_termination_warning() -> None:
    for signal, warning, on_warning, told in (
        ("B:USR1@120", "B:USR1@120", None, 0),
        ("SIGUSR2@90", "USR2@90", "USR2", 0),
        ("SIGTERM@90", "USR1@90", None, 1),
        ("B:INT", "USR1", None, 1),
    ):
        draft = imported(f"#SBATCH --signal={signal}\n{RUN}")
        assert (draft.keys["slurm"], draft.keys.get("on_warning")) == ({"signal": warning}, on_warning)
        assert comments(draft).count("on_warning chooses") == told
