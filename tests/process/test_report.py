"""`report` and `bundle`: a page about a run, and an archive of it without secrets."""

import io
import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path

import pytest

from distlaunch.supervisor.codec import VERSION
from tests.harness import completed, distlaunch, distlaunch_argv, running, wait_until, write_job
from tests.process.commands import FOUR, ONE, SLEEPER

VOID = {"meta", "rect", "path", "br"}
HOSTILE = """
    import os, sys
    if os.environ["RANK"] == "1":
        os.write(1, b"x" * 10_000_000 + b"\\n")
        os.write(1, b"\\x1b[31m</pre><script>alert(1)</script>\\x1b]0;title\\x07 ")
        os.write(1, b"\\xff\\x00 <img src=x onerror=y>\\n")
        sys.exit("<script>alert(2)</script>\\x1b[2J")
    open("gate").read()
"""


class Page(HTMLParser):
    """The elements of a page, which are nested correctly."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._open: list[str] = []
        self.tags: set[str] = set()
        self.names: set[str] = set()
        self.text = ""
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.names |= {name for name, _ in attrs}
        assert tag != "table" or dict(attrs).get("aria-label")  # a screen reader lists tables by their names
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag in VOID or self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data if self._open[-1:] != ["style"] else ""


def test_reports_a_failed_run_and_nothing_that_its_ranks_print_acts_there(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    distlaunch("run", str(write_job(tmp_path, HOSTILE, FOUR)), status=1, stdout=subprocess.DEVNULL)
    (run,) = (tmp_path / "runs").iterdir()
    assert distlaunch("report", cwd=tmp_path, status=0).stderr == f"distlaunch: wrote {run.name}.html\n"
    text = (tmp_path / f"{run.name}.html").read_text()
    page = Page(text)
    assert not page.tags & {"script", "img", "link", "iframe", "object", "form", "a"}
    assert not page.names & {"src", "href", "onerror", "onclick", "onload", "style"}
    assert not {"\x1b", "\x00", "\x9b"} & set(text)
    assert "url(" not in text
    assert len(text) < 100_000
    assert "Root cause: rank 1 (node0) failed first: exit status 1" in page.text
    for words in ("<script>alert(1)</script>", "ranks 0, 2-3: stopped by distlaunch", "9.54 MiB"):
        assert words in page.text


def test_replaces_only_a_report_of_the_same_run(tmp_path: Path) -> None:
    distlaunch("run", str(write_job(tmp_path, "pass", FOUR)), status=0)
    for command, name in (("report", "run.html"), ("bundle", "run.tar.gz")):
        for _ in range(2):
            distlaunch(command, "-o", name, cwd=tmp_path, status=0)
        (tmp_path / name).write_text("mine")
        refused = distlaunch(command, "-o", name, cwd=tmp_path, status=2)
        assert "specify another file" in refused.stderr
        assert (tmp_path / name).read_text() == "mine"
    done = distlaunch("report", "-o", "none/run.html", cwd=tmp_path, status=1)
    assert done.stderr == "distlaunch: can't write none/run.html: No such file or directory\n"


def test_reports_a_run_that_goes_on_as_a_page_as_json_and_as_a_trace(tmp_path: Path) -> None:
    run = distlaunch("run", "-d", str(write_job(tmp_path, SLEEPER, FOUR)), status=0).stdout.strip()
    try:
        explained = distlaunch("why", run, status=0).stdout
        page = distlaunch("report", run, "-o", "-", status=0).stdout
        found = json.loads(distlaunch("report", run, "--json", status=0).stdout)
        distlaunch("report", run, "--trace", "trace.json", cwd=tmp_path, status=0)
    finally:
        distlaunch("stop", "--now", run)
    assert re.search(r"waiting: no rank has failed; .*; no rank has been idle for 10 min", explained)
    assert "RUNNING" in Page(page).text
    assert (found["version"], found["why"]["state"], len(found["ranks"])) == (1, "RUNNING", 4)
    assert sum(found["ledger"].values()) == pytest.approx(found["seconds"])
    assert [span["kind"] for span in found["spans"] if span["lane"] is None] == ["connect", "start"]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {(1, 1), (1, 2), (2, 3), (2, 4)} <= {(each["pid"], each["tid"]) for each in events}


def test_why_does_not_seek_the_cause_of_an_active_run_of_another_version(tmp_path: Path) -> None:
    run = distlaunch("run", "-d", str(write_job(tmp_path, SLEEPER, ONE)), status=0).stdout.strip()
    events = tmp_path / "runs" / run / "events.jsonl"
    at = events.read_bytes().index(b'"version": %d,' % VERSION) + len('"version": ')
    with events.open("r+b", buffering=0) as file:  # to which the controller appends
        os.pwrite(file.fileno(), b"%d" % (VERSION + 1), at)
        explained = distlaunch("why", run, status=0).stdout
        os.pwrite(file.fileno(), b"%d" % VERSION, at)
    distlaunch("stop", "--now", run)
    assert "RUNNING" in explained
    assert "incomplete: events.jsonl: line 1: recorded by version " in explained
    assert "root cause" not in explained


def test_a_bundle_tells_when_a_hanging_run_last_printed(tmp_path: Path) -> None:
    job = write_job(tmp_path, "import signal; print('here', flush=True); signal.pause()", ONE)
    run = distlaunch("run", "-d", str(job), status=0).stdout.strip()
    index = tmp_path / "runs" / run / "output.index"
    try:
        wait_until(lambda: index.exists() and index.stat().st_size > 0, lambda: "no output is recorded")
        os.utime(index, (0, 0))
        distlaunch("bundle", run, "-o", "run.tar.gz", cwd=tmp_path, status=0)
    finally:
        distlaunch("stop", "--now", run)
    page = Page(unpacked((tmp_path / "run.tar.gz").read_bytes())["report.html"].decode())
    assert re.search(r"the last output came \d{9,} s ago", page.text)


SAMPLED = """
    import glob, time
    until = time.monotonic() + 100
    while not glob.glob("runs/*/uses.jsonl") and time.monotonic() < until:
        sum(range(100_000))
"""


def test_draws_what_each_node_used_over_time(tmp_path: Path) -> None:
    distlaunch("run", str(write_job(tmp_path, SAMPLED, FOUR)), status=0)
    (run,) = (tmp_path / "runs").iterdir()
    first = json.loads((run / "uses.jsonl").read_text())
    began, recorded = first["time"], first["nodes"]
    assert {*recorded} == {"node0", "node1"}
    assert all(cpu > 10 and memory > 1 << 20 and gpu is None for cpu, memory, gpu, _ in recorded.values())
    with (run / "uses.jsonl").open("a") as file:  # as from other nodes, and damaged lines
        for index in range(700):
            nodes = {f"n{node}": [1.0, 2, index % 100, 4] for node in range(40)}
            file.write(json.dumps({"time": began + index / 200, "nodes": nodes}) + "\n")
        file.write('junk\n{"time": 1, "nodes": {"x": ["<b>", 1, 2, 3]}}\n{"time": "1"}\n[]\n{"nodes": 3}\n')
        for odd in ("NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400):
            file.write(f'{{"time": {odd}, "nodes": {{"odd": [1, 2, 3, 4]}}}}\n')
            file.write(f'{{"time": {began}, "nodes": {{"odd": [{odd}, 2, 3, {odd}]}}}}\n')
    text = distlaunch("report", str(run), "-o", "-", status=0).stdout
    page = Page(text)
    assert "odd" not in page.text
    assert "GPU (full height: 100%; 16 more nodes not shown)" in page.text
    assert "Memory (full height: " in page.text
    assert text.count('class="e-use"') == 4 * 24
    assert len(text) < 400_000


@pytest.mark.parametrize("odd", ["NaN", "Infinity", "1e999", "1" + "0" * 400, "1e29"])
def test_explains_a_run_with_impossible_numbers(odd: str, tmp_path: Path) -> None:
    distlaunch("run", str(write_job(tmp_path, "raise SystemExit(3)", ONE)), status=3)
    (run,) = (tmp_path / "runs").iterdir()
    with (run / "evidence.jsonl").open("a") as file:
        file.write(f'{{"time": {odd}, "node": "odd", "first_rank": 0}}\n')
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "seconds": "odd"}).replace('"odd"', odd))
    for words in (["why", "--verbose"], ["report", "-o", "-"], ["bundle", "-o", "-"]):
        done = distlaunch(*words, str(run), status=0, text=False)
        assert b"odd at" not in bytes(done.stdout)  # type: ignore[arg-type]
    (run / "summary.json").write_text(json.dumps(summary))


def test_reports_what_is_left_of_a_damaged_run(tmp_path: Path) -> None:
    distlaunch("run", str(write_job(tmp_path, "raise SystemExit(3)", FOUR)), status=3)
    (run,) = (tmp_path / "runs").iterdir()
    (run / "events.jsonl").write_text("junk\n{}")
    text = Page(distlaunch("report", str(run), "-o", "-", status=0).stdout).text
    assert "failed first: exit status 3" in text and "Incomplete" in text
    with (run / "status.json").open("a") as file:  # the end of an earlier, longer status
        file.write('"why": ""}\n')
    printed = completed(distlaunch_argv("bundle", str(run), "-o", "-"), 0, text=False)
    files = unpacked(printed.stdout)
    assert json.loads(files["status.json"])["state"] == "FAILED"
    for name in ("events.jsonl", "summary.json"):  # as after a controller that was killed at once
        (run / name).unlink()
    for command in ("report", "bundle"):
        assert distlaunch(command, str(run), "-o", "-", status=0, text=False).stdout
        both = distlaunch(command, str(run), "-o", "-", "--json", status=2)
        assert both.stdout == "" and "only one of --json and files written to -" in both.stderr
    assert "incomplete: events.jsonl: " in distlaunch("why", str(run), status=0).stdout


# Canaries, each of another kind

SECRETS = {
    "of the job file": "zq-canary-01-plain",
    "of --set": "zq-canary-02-given",
    "of an argument": "zq-canary-03-words",
    "of a URL": "zq-canary-04-basic",
    "of a notification": "zq-canary-05-notify",
    "printed with its name": "zq-canary-06-named",
    "of Hugging Face": "hf_zqCanary07abcdefghijklmnopqrstu",
    "of AWS": "zqCanary08/K7MDENG+bPxRfiCYEXAMPLEKEY",
    "of a header": "zq-canary-09-bearer",
    "of a key": "MIIEzqCanary10" + "Ab1/" * 12,
    "inherited": "zq-canary-11-inherited",
    "of a URL with the name of a home directory": "zq-canary-17-root",
    "that reads as a number": "0x12345678",
    "that reads as another number": "1234567e5",
}
LEAKS = """
    import os, sys
    env, args = os.environ, sys.argv
    print("TOKEN=zq-canary-06-named")
    print("connecting with", env["DB_PASS"], "and", env["MY_PASSWORD"], "to", env["DATABASE"])
    print("args", args[1:], args[2], "region", env["REGION"])
    print("numbers", env["WANDB_API_KEY"], env["OTHER_API_KEY"])
    print("HF", env["HF_TOKEN"], "AWS AKIAIOSFODNN7EXAMPLE", env["AWS_SECRET_ACCESS_KEY"])
    print("mysql://root:zq-canary-17-root@db")
    print("GET / Authorization: Bearer zq-canary-09-bearer")
    print("-----BEGIN RSA PRIVATE KEY-----\\nMIIEzqCanary10" + "Ab1/" * 12)
    print("MIIEzqCanary10\\n-----END RSA PRIVATE KEY-----")
    sys.stdout.flush()
    sys.stderr.write("x\\n" * 9000 + "MIIEzqCanary10\\n-----END RSA PRIVATE KEY-----\\n")
    raise SystemExit("AccountKey=zq-canary-06-named\\n" + env["DB_PASS"] + " " + env["AWS_SECRET_ACCESS_KEY"])
"""
KEYS = f"""
    gpus_per_node: 0
    args: [--api-key, {SECRETS["of an argument"]}]
    env:
      DB_PASS: {SECRETS["of the job file"]}
      DATABASE: 'pg://me:{SECRETS["of a URL"]}@db/x'
      WANDB_API_KEY: {SECRETS["that reads as a number"]}
      OTHER_API_KEY: {SECRETS["that reads as another number"]}
      REGION: null
      HF_TOKEN: null
      AWS_SECRET_ACCESS_KEY: null
    notify: {{command: ["true", --token, {SECRETS["of a notification"]}]}}
"""


def unpacked(data: bytes) -> Mapping[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        files = {each.name.partition("/")[2]: archive.extractfile(each) for each in archive.getmembers()}
        return {name: file.read() for name, file in files.items() if file}


@pytest.mark.parametrize("options", [(), ("--anonymous",)])
def test_no_bundle_has_a_secret(tmp_path: Path, options: tuple[str, ...]) -> None:
    kinds = {"HF_TOKEN": "of Hugging Face", "AWS_SECRET_ACCESS_KEY": "of AWS", "REGION": "inherited"}
    own = {name: SECRETS[kind] for name, kind in kinds.items()} | {"HOME": str(tmp_path / "home")}
    environ = os.environ | own | {"MY_PASSWORD": SECRETS["of --set"]}
    words = ("--set", f"env.MY_PASSWORD={SECRETS['of --set']}", "--set", "notify.on=[failed]")
    distlaunch("run", str(write_job(tmp_path, LEAKS, KEYS)), *words, env=environ, status=1)
    (run,) = (tmp_path / "runs").iterdir()
    (run / "collected").mkdir()
    (run / "collected" / "settings.json").write_text("{}")
    done = distlaunch("bundle", *options, "-o", "run.tar.gz", cwd=tmp_path, env=environ, status=0)
    assert "can't be hidden" not in done.stderr
    files = unpacked((tmp_path / "run.tar.gz").read_bytes())
    wanted = {"report.html", "events.jsonl", "plan.json", "evidence.jsonl", "status.json", "summary.json"}
    assert {*wanted, "rank0.out", "rank0.err"} == set(files)
    for name, data in files.items():
        assert f"{len(data):>9}  {name}\n" in done.stderr
        assert [kind for kind, secret in SECRETS.items() if secret.encode() in data] == [], name
        assert b"MIIEzqCanary10" not in data, name
    host = json.loads(files["status.json"])["controller"]["host"]
    assert not options or os.uname().nodename not in host
    assert b"Root cause" in files["report.html"]
    assert b"connecting with" in files["rank0.out"]


def test_says_which_inherited_values_a_bundle_can_not_hide(tmp_path: Path) -> None:
    keys = f"{ONE}env: {{REGION: null, ZONE: null, DB_PASS: zq-canary-14}}\n"
    environ = os.environ | {"REGION": "zq-canary-15", "ZONE": "zq-canary-16"}
    distlaunch("run", str(write_job(tmp_path, "pass", keys)), env=environ, status=0)
    del environ["REGION"]
    done = distlaunch("bundle", "-o", "run.tar.gz", cwd=tmp_path, env=environ, status=0)
    assert "can't be hidden because they aren't set here: REGION; set them" in done.stderr


def test_a_bundle_shows_that_a_run_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    distlaunch("run", str(write_job(tmp_path, "pass", ONE)), status=0)
    shutil.rmtree(tmp_path / "state")  # which says how the run has ended
    (run,) = (tmp_path / "runs").iterdir()
    text = (run / "status.json").read_text()
    (run / "status.json").write_text(text.replace("SUCCEEDED", "RUNNING"))  # as if its controller had crashed
    distlaunch("bundle", "-o", "run.tar.gz", cwd=tmp_path, status=0)
    assert b"LOST" in unpacked((tmp_path / "run.tar.gz").read_bytes())["report.html"]


def test_a_bundle_shows_nothing_of_other_runs(tmp_path: Path) -> None:
    for status, token in ((0, "hf_zqCanary12earlier"), (3, "hf_zqCanary13later")):
        job = write_job(tmp_path, f"raise SystemExit({status})", f"{ONE}args: [{token}]\n")
        distlaunch("run", str(job), status=status)
    run = json.loads(distlaunch("why", "--json", cwd=tmp_path, status=0).stdout)["run"]
    distlaunch("bundle", run, "-o", "run.tar.gz", cwd=tmp_path, status=0)
    page = unpacked((tmp_path / "run.tar.gz").read_bytes())["report.html"].decode()
    assert "FAILED" in page
    assert "zqCanary" not in page


RAISES = """
    import os, time
    if os.environ["RANK"] == "1":
        raise RuntimeError("bad sample")
    time.sleep(1000)
"""


def test_why_has_the_error_of_a_torchrun_run_whose_output_was_not_kept(tmp_path: Path) -> None:
    script = write_job(tmp_path, RAISES).parent / "worker.py"
    distlaunch("torchrun", "--nproc-per-node=2", str(script), cwd=tmp_path, status=1)
    text = distlaunch("why", cwd=tmp_path, status=0).stdout
    assert "\n  RuntimeError: bad sample\n  in <module> (worker.py:4)\n" in text


AFTER_A_RESTART = """
    import os, time
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != os.environ["TORCHELASTIC_MAX_RESTARTS"]:
        raise SystemExit(7)
    print("again", flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("most", "words"), [(1, "before: attempt 0: "), (3, "before (the last 2 of 3): attempt 1: ")]
)
def test_why_tells_restarts_of_an_active_run_as_the_past(most: int, words: str, tmp_path: Path) -> None:
    job = f"gpus_per_node: 0\nrestarts: {{max: {most}, backoff: 0s, repeat: true}}\n"
    with running(write_job(tmp_path, AFTER_A_RESTART, job)) as run:
        run.wait_for("again")
        text = distlaunch("why", cwd=tmp_path, status=0).stdout
    assert "root cause" not in text
    assert f"\n{words}rank 0 (node0) failed" in text
