"""Secrets of job files and command lines, which are not written anywhere."""

import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from distlaunch.job.text import REDACTED, is_secret, masked, redacted
from tests.harness import ROOT, distlaunch

CANARY = "canary-4f1d"
SCRIPT = f"import os, sys; assert '{CANARY}' in os.environ['API_TOKEN'] + ''.join(sys.argv), os.environ\n"
SECRET_NAMES = """
    HF_TOKEN aws_secret_access_key db-password key WANDB_API_KEY AccountKey DB_PASS PASS SSHPASS AUTH
    BASIC_AUTH AUTHORIZATION COOKIE PAT GH_PAT AUTHKEY trainer.password PGPASSWORD Pwd sig
"""
OPEN_NAMES = """
    MONKEY KEYBOARD LR OMP_NUM_THREADS AUTHOR XAUTHORITY PATH COMPASS PATIENCE tokenizer.name DESIGN
"""
WITH_A_SECRET = """
    postgres://u:S@h/d | http://user:p@S@proxy:3128 | https://S@github.com/a | see https://h/p?a=1&sig=S |
    https://h/d?token=S&sig=S | Server=h;Password=S;Uid=S | AccountName=a;AccountKey=S== | Bearer S |
    wandb.api_key=S | +auth.api_key=S | ++a.b.token='S' | trainer.password=S | token=S | --pass=S |
    Authorization: Bearer S | Authorization: Basic S | X-Api-Key: S | Cookie:\ta=1; b=S | bearer S |
    --env=API_KEY=S | --container-env=A=1,API_KEY=S | {"api_key": "S"} | {"lr":1,"token":"S"} | token = S |
    export TOKEN=S; python train.py | python train.py --lr 1 --api-key S | a\npassword=S
"""
"""S is the secret."""
WITHOUT = """
    https://h:80/a?b=1#c | s3://bucket/me@x.org | lr=0.1 | model.tokenizer=gpt2 | author=me | a: b |
    path=/a/b | /opt/token:/usr/bin | the token is here | ${PATH} | hf-token-cache | x@y.org
"""


def test_names_of_secrets() -> None:
    assert [name for name in SECRET_NAMES.split() if not is_secret(name)] == []
    assert [name for name in OPEN_NAMES.split() if is_secret(name)] == []


def test_secrets_within_values_are_left_out_and_other_values_kept() -> None:
    for text in re.split(r" +\|\s+", WITH_A_SECRET.strip()):
        assert "S" not in masked(text).replace("Server", "") and REDACTED in masked(text), text
    long = ["x" * 200_000, "-" * 200_000, "a.-" * 70_000, "a " * 100_000]
    for text in [*re.split(r" +\|\s+", WITHOUT.strip()), *long]:
        assert redacted(["--lr", text]) == ["--lr", text]


def test_values_of_flags_that_are_secrets_are_left_out() -> None:
    words = ["--lr=1", "--api-key=x", "--token", "y", "z", "--password", "--lr", "2", "-k", "v"]
    left = ["--lr=1", f"--api-key={REDACTED}", "--token", REDACTED]
    assert redacted(words) == [*left, *words[4:]]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home, with all directories that a command may write to below it; the job's is beside it."""
    for name in ("home", "home/tmp", "job"):
        (tmp_path / name).mkdir()
    (tmp_path / "job/train.py").write_text(SCRIPT)
    (tmp_path / "job/job.yaml").write_text(
        f"script: train.py\nprocs_per_node: 2\nargs: [--secret={CANARY}, +a.token={CANARY}]\n"
        f"env: {{API_TOKEN: {CANARY}, DATABASE_URL: 'pg://u:{CANARY}@h/d', A: Bearer {CANARY}}}\n"
        f"notify: {{command: ['true', --token, {CANARY}, 'https://u:{CANARY}@h']}}\n"
    )
    return tmp_path / "home"


GIVEN = ["--set", f"env.MY_PASSWORD={CANARY}"]
COMMANDS = {
    "run": ["run", "job.yaml", *GIVEN, "--", "--token", CANARY],
    "detached": ["run", "-d", "job.yaml", *GIVEN, "--", "--token", CANARY],
    "refused": ["run", "job.yaml", *GIVEN, "--set", "no_such_key=1"],
    "dry-run": ["dry-run", "job.yaml", "--json", *GIVEN],
    "torchrun": ["torchrun", "--log-dir=runs", "train.py", "--token", CANARY],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_keeps_no_secret_anywhere(home: Path, name: str) -> None:
    directory = home.parent / "job"
    own = {"HOME": home, "TMPDIR": home / "tmp", "PYTHONPATH": ROOT, "API_TOKEN": CANARY}
    kept = {key: text for key, text in os.environ.items() if not key.startswith("XDG_")}
    around: dict[str, Any] = {"cwd": directory, "env": kept | {key: str(value) for key, value in own.items()}}
    done = distlaunch(*COMMANDS[name], **around, status=2 if name == "refused" else 0)
    if name == "detached":
        distlaunch("wait", done.stdout.strip(), **around, status=0)
    assert CANARY not in done.stdout + done.stderr
    inputs = {directory / "job.yaml", directory / "train.py"}
    written = [path for path in home.parent.rglob("*") if path.is_file() and path not in inputs]
    assert not [path for path in written if CANARY.encode() in path.read_bytes()]
    for path in (directory / "runs").rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
