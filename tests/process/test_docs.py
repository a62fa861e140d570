"""The claims of README and docs: commands, examples, tables, links and ratios."""

import ast
import functools
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from distlaunch.contract import HANDLED_SIGNALS, RESERVED
from distlaunch.errors import Exit
from tests.harness import PATIENCE_S, ROOT, completed, distlaunch, program

PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (*ROOT.glob("*.md"), *ROOT.glob(".github/*.md"), *sorted((ROOT / "docs").glob("*.*[dt]")))
}
README, JOB_FILE = PAGES["README.md"], PAGES["docs/job-file.md"]
SUBMIT = "distlaunch submit job.yaml --set nodes=2 --set gpus_per_node=8 --set slurm.time=1h"
ON_HOSTS = {"distlaunch check-port job.yaml", "distlaunch run job.yaml", SUBMIT}
"""README's commands for several hosts and Slurm: tests/cluster/test_readme.py and test_submit.py run them."""
SCRATCH = {
    "train.py": "import os\nprint('trained as', os.environ['RANK'])\n",
    "config.yaml": "distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n",
    "train.sh": "#!/bin/bash\n#SBATCH --nodes=2\nsrun python train.py\n",
    "hosts": "gpu-a slots=2\ngpu-b slots=2\n",
    "job.yaml": "script: train.py\ngpus_per_node: 0\nprocs_per_node: 2\n",
}
"""What the pages' commands find in their directory."""
DISKS = "names_disks_that_are_full_or_have_no_inodes_or_are_small"
LOGINS = "names_hosts_that_refuse_a_login_or_are_unknown_or_the_same"
LIMITS, ON_ONE = "names_limits_and_settings_of_one_host", "names_gpus_and_libraries_of_one_host"
RUN_DIRECTORY = "names_a_run_directory_that_cannot_be_written"
SCRIPT, UNUSABLE = "names_a_script_that_differs_or_is_missing", "tells_why_a_host_is_unusable"
PACKAGES, WHY = "names_packages_and_versions_of_one_host", "explains_a_failed_run"
MISSED, ADVICE = "names_the_rank_that_missed_the_last_collective", "advice_fits_the_last_output"
FEW_GPUS = "some_missing_gpus_end_the_job_and_hidden_ones_are_a_warning"
NO_RUN = "a_run_that_cannot_begin_has_a_json_result_with_the_usual_keys"
TROUBLE = {
    "a host name is unknown, or a login fails": (LOGINS, UNUSABLE),
    "a node hangs at login": ("names_a_host_that_hangs_at_login", "gives_up_on_servers_that_say_nothing"),
    "one host has two names": (LOGINS, "refuses_a_host_that_is_listed_under_two_names"),
    "the job's Python is missing": ("names_a_host_without_the_python_of_the_job", UNUSABLE),
    "the script or the workdir is missing": (SCRIPT, "names_what_cannot_be_started"),
    "the script differs between nodes": (SCRIPT, "run_says_the_rest_in_one_line_unless_nothing_is_checked"),
    "other code or a lock file differs between nodes": ("names_code_that_differs",),
    "a package is missing": (PACKAGES, ADVICE, WHY),
    "a node has a different version of torch or CUDA": (PACKAGES,),
    "several NCCL libraries": (ON_ONE,),
    "the run directory can't be written": (RUN_DIRECTORY, NO_RUN),
    "a disk is full": (DISKS, "does_not_start_on_a_full_disk", WHY),
    "a disk has no inodes left": (DISKS,),
    "`/dev/shm` is small": (DISKS, ADVICE),
    "the limit on open files is too low": (LIMITS, "tells_that_an_agent_has_no_descriptors"),
    "the stacks of ranks can't be read": (LIMITS,),
    "a node's clock is wrong": ("names_a_host_whose_clock_is_off",),
    "the rendezvous port is taken": ("names_who_holds_the_port", "a_port_in_use_names_its_owner", WHY),
    "a port is blocked between two nodes": ("names_a_pair_that_cannot_connect",),
    "large packets are lost between two nodes": ("names_a_path_that_loses_large_packets",),
    "nodes have different MTUs": ("names_the_host_with_another_mtu",),
    "a node's own name resolves to a loopback address": (
        "names_a_host_whose_own_name_or_master_is_loopback",
    ),
    "`NCCL_SOCKET_IFNAME` or `GLOO_SOCKET_IFNAME` is wrong": (
        LIMITS,
        "names_a_missing_interface_with_the_one_that_would_do",
    ),
    "two nodes have the same address": ("names_two_hosts_with_one_address",),
    "a node has too few GPUs": (ON_ONE, FEW_GPUS),
    "nodes have different numbers or models of GPUs": (ON_ONE,),
    "another program uses GPU memory": (ON_ONE,),
    "a GPU has reported memory errors or an Xid": (ON_ONE,),
    "a rank fails, and others fail because of it": ("names_the_rank_that_failed_first", WHY),
    "the OOM killer kills a rank": ("names_the_oom_killer", WHY),
    "a node can't start processes": ("tells_that_a_node_refuses_to_fork",),
    "a rank never joins": ("gives_up_when_rank_0_does_not_join", WHY),
    "a rank stalls": ("names_and_restarts_a_stalled_rank", WHY),
    "a rank is suspended by a signal": ("reports_a_rank_that_a_signal_has_stopped",),
    "a rank misses a collective": (MISSED, WHY),
    "a rank is so slow that the others time out": (WHY, WHY),
    "the script expects more ranks than there are": (WHY, WHY),
    "each attempt fails with the same exception": ("does_not_try_the_same_exception_a_third_time", WHY),
    "a node is cut off": ("a_node_that_is_cut_off_is_lost", WHY),
    "the scheduler ends the job": ("a_job_that_slurm_ends_is_not_restarted_and_says_why",),
}
"""By the rows of the table in docs/check.md: for each command, the test that plants this trouble."""


def blocks(kind: str) -> list[tuple[str, str]]:
    """(page, text) of each block in a language."""
    block = rf"(?ms)^```{kind}\n(.*?)^```$"
    return [(name, found) for name, text in PAGES.items() for found in re.findall(block, text)]


_LINES = (line for _, block in blocks("sh") for line in block.splitlines())
COMMANDS = {re.sub(r"\s+#.*", "", line) for line in _LINES if line.split(" ")[0] == "distlaunch"}
"""Each line of a page that runs distlaunch, without its comment."""


def headings(text: str) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"(?m)^#+ (.+)$", text)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


LINKS = {(name, link) for name, text in PAGES.items() for link in re.findall(r"\]\(([^):]+)\)", text)}
"""(page, target) of each link into the checkout."""


@pytest.mark.parametrize("name", ["cookbook", "matrix", "pictures", "try", "venv", ""])
def test_a_script_asked_for_help_does_nothing_else(name: str) -> None:
    words = [ROOT / "scripts" / name] if name else [sys.executable, "-m", "tests.wide.runs"]
    assert completed([*words, "--help"], cwd=ROOT, status=0).stdout.startswith("usage: ")


def test_the_table_of_keys_matches_their_declarations(tmp_path: Path) -> None:
    script, page = (sys.executable, ROOT / "scripts/reference"), tmp_path / "page.md"
    completed([*script, "--check"], status=0)
    page.write_text(re.sub(r"(?m)^\| `nodes.*\n", "", JOB_FILE))
    assert "run scripts/reference" in completed([*script, "--check", page], status=1).stderr
    completed([*script, page], status=0)
    assert page.read_text() == JOB_FILE


@pytest.mark.skipif(not shutil.which("man"), reason="man is not installed")
def test_the_man_page_has_every_command_and_option() -> None:
    env = {**os.environ, "MANWIDTH": "200", "LC_ALL": "C.UTF-8"}
    shown = completed(["man", "--warnings", "-l", ROOT / "docs/distlaunch.1"], env=env, status=0)
    assert shown.stderr == ""
    page = re.sub(r"\s+", " ", shown.stdout)
    listed = re.findall(r"(?m)^\| `(.+?)` \|", PAGES["docs/commands.md"])
    names = re.findall(r"(?m)^## (.+)", PAGES["docs/commands.md"])
    wanted = [words.replace("\\|", "|").replace("…", "...") for words in (*names, *listed)]
    assert [words for words in wanted if words not in page] == []
    assert len(wanted) > 100


def test_the_matrix_of_versions_is_what_its_script_tries() -> None:
    rows = re.findall(r"(?m)^\| (3\.\d+) \| (2[\d.]+) \|", PAGES["docs/versions.md"])
    tried = re.findall(r"\b(3\.\d+)/(2[\d.]+)", completed([ROOT / "scripts/matrix", "--help"]).stdout)
    assert rows == [*dict.fromkeys(tried)] != []


def test_documents_every_exit_status() -> None:
    table = PAGES["docs/failures.md"].partition("## Exit status")[2].partition("## ")[0]
    told = {int(number) for row in re.findall(r"(?m)^\| ([\d, ]+) \|", table) for number in row.split(",")}
    assert told >= {status for status in Exit if status not in (Exit.OK, Exit.FAILED)}
    assert told >= {128 + signal.Signals[name] for name in HANDLED_SIGNALS.split(",")}


def test_every_trouble_in_the_table_is_planted_for_each_command_that_names_it() -> None:
    table = PAGES["docs/check.md"].partition("## Which command finds which problem")[2]
    rows = re.findall(r"(?m)^\| ([^*|]+) \| (`.+`) \|$", table)
    planted = {row: len(tests) for row, tests in TROUBLE.items()}
    assert {row: words.count(", ") + 1 for row, words in rows} == planted
    modules = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = {f"def test_{test}(" for tests in TROUBLE.values() for test in tests}
    assert [test for test in named if test not in modules] == []


@functools.cache
def nodes() -> list[ast.AST]:
    """All of the package."""
    modules = (ast.parse(path.read_text()) for path in (ROOT / "distlaunch").rglob("*.py"))
    return [node for module in modules for node in ast.walk(module)]


def literals() -> list[str]:
    """The string literals of the package, with … for each placeholder."""
    found = [node.value for node in nodes() if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    for node in (node for node in nodes() if isinstance(node, ast.JoinedStr)):
        parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        found.append("".join(map(str, parts)))
    return found


LOST_WORDS = {
    r"(?:a|the|this|its|run) folders?": "directory",
    r"last words": "last output",
    r"to blame|(?:is|are) blamed|at fault": "root cause, failed first",
    r"but for|as ever|so many|surely|anew|strikes?": "except, as before, the number of, again, kill",
    r"simply|obviously|in order to|please note": "nothing",
    r"(?:colour|behaviour|favour|neighbour|honour|utilis|recognis|initialis|optimis)\w*": "US spelling",
}
"""Habits of ours over which a reader stumbles, and what to write instead."""


def test_the_words_are_those_of_the_field() -> None:
    """In pages without their code, and in messages and docstrings."""
    prose = {page: re.sub(r"```[\s\S]*?```|`[^`]*`", "", text) for page, text in PAGES.items()}
    texts = [*prose.items(), *(("distlaunch/", text) for text in literals() if " " in text)]
    for pattern, instead in LOST_WORDS.items():
        habit = re.compile(rf"(?i)\b(?:{pattern})\b.{{0,40}}")
        found = [(page, each[0]) for page, text in texts for each in habit.finditer(text)]
        assert found == [], f"write: {instead}"


def test_every_error_and_warning_is_in_the_index_of_messages() -> None:
    """By the longest literal of each, found without the script that makes the index."""
    index = PAGES["docs/messages.md"].replace("\\", "")
    own = r"(UsageError|DistlaunchError|JobError|TreeError|ShowMessage|Cause|Finding|say|spec\.error)\("
    calls = (node for node in nodes() if isinstance(node, ast.Call))
    longest = []
    for call in (call for call in calls if re.match(own, f"{ast.unparse(call.func)}(")):
        values = (each.value for each in ast.walk(call) if isinstance(each, ast.Constant))
        texts = (each for each in values if isinstance(each, str))
        pieces = (part for each in texts for part in re.split(r"%(?:\.\d+)?\w", each))
        longest.append(max(pieces, key=len, default="").strip())
    sentences = [text for text in longest if len(re.findall(r"[A-Za-z']{2,}", text)) >= 5]
    assert [text for text in sentences if text not in index] == []
    assert len(sentences) > 100


def test_the_messages_that_can_be_looked_up_are_printed_by_the_code() -> None:
    tables = PAGES["docs/troubleshooting.md"].partition("## ")[2]
    rows = re.findall(r"(?m)^\| (`.+?`) \|", tables)
    parts = {part.strip() for row in rows for code in re.findall("`(.+?)`", row) for part in code.split("…")}
    known = literals()
    assert [part for part in parts if not any(part in literal for literal in known)] == []
    assert len(parts) > 30


def test_documents_every_variable_that_workers_get() -> None:
    assert [name for name in RESERVED if f"`{name}`" not in JOB_FILE] == []


def test_links_lead_somewhere() -> None:
    for page, link in LINKS:
        path, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert target.exists(), (page, link)
        assert not anchor or anchor in headings(target.read_text()), (page, link)


def test_every_page_can_be_reached_from_the_readme() -> None:
    assert ("README.md", "docs/index.md") in LINKS
    linked = {f"docs/{link.partition('#')[0]}" for page, link in LINKS if page == "docs/index.md"}
    assert {page for page in PAGES if page.startswith("docs/")} - {"docs/index.md"} <= linked
    in_navigation = re.findall(r'"([\w-]+\.md)"', (ROOT / "docs/zensical.toml").read_text())
    pages = {page for page in linked if page.endswith(".md")} & {*PAGES}
    assert {f"docs/{page}" for page in in_navigation} >= pages


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    """And a link that leads nowhere, or to no heading, ends the build."""
    done = completed([ROOT / "scripts/docs", "--to", tmp_path])
    if "not installed" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "restarts" in (tmp_path / "html/search.json").read_text()
    loaded = re.findall(r'<(?:script|link|img)[^>]+"https?:[^"]+"', (tmp_path / "html/why.html").read_text())
    assert loaded == []
    assert [path.name for path in (tmp_path / "html").glob("*.svg") if 'url("http' in path.read_text()] == []
    for link in ("nonesuch.md", "nodes.md#nonesuch"):
        (tmp_path / "pages/why.md").write_text(f"# Why\n\n[x]({link})\n")
        path = f"{ROOT}/.venv/bin:{os.environ['PATH']}"
        argv = ["sh", "-c", "zensical build --strict"]
        refused = completed(argv, cwd=tmp_path, env={**os.environ, "PATH": path})
        assert refused.returncode != 0
        assert "does not exist" in refused.stdout + refused.stderr


def test_the_readme_takes_three_minutes() -> None:
    words = re.findall(r"[A-Za-z]\w*", re.sub(r"```[\s\S]*?```", "", README))
    assert len(words) <= 700


def test_the_scripts_are_executable() -> None:
    names = {name for text in PAGES.values() for name in re.findall(r"\bscripts/(\w+)\b", text)}
    assert [name for name in names if not (ROOT / "scripts" / name).stat().st_mode & 0o111] == []


@pytest.mark.parametrize(
    "command", sorted(set(re.findall(r"(?m)^\| `distlaunch ([\w-]+)[ `]", README)) - {"import"})
)
def test_the_commands_exist_and_take_json(command: str) -> None:
    env = {"PATH": "/usr/bin:/bin", "COLUMNS": "200", "TERM": "dumb"}
    shown = distlaunch(command, "--help", env=env, status=0).stdout
    assert command in ("schema", "torchrun", "logs", "attach", "view") or "--json" in shown


@pytest.mark.parametrize("command", sorted(COMMANDS - ON_HOSTS))
def test_the_commands_run(command: str, tmp_path: Path) -> None:
    for name, text in SCRATCH.items():
        (tmp_path / name).write_text(text)
    program(tmp_path / "distlaunch", f'exec {sys.executable} -m distlaunch "$@"')
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    completed(["/bin/sh", "-c", command], cwd=tmp_path, env=env, status=0)


@pytest.mark.parametrize(("page", "text"), blocks("yaml"))
def test_the_examples_are_job_files(page: str, text: str, tmp_path: Path) -> None:
    part = "" if re.search(r"(?m)^(script|command):", text) else "script: train.py\n"
    (job := tmp_path / "job").mkdir()
    (job / "job.yaml").write_text(text + part)
    for name in ("train.py", "uv.lock"):
        (job / name).touch()
    # A stand-in for kubectl lists two pods: no cluster is asked here.
    spec = {"containers": [{"name": "main"}]}
    addresses = {f"trainer-{number}": f"10.0.0.{number}" for number in range(2)}
    items = [
        {"metadata": {"name": name}, "spec": spec, "status": {"phase": "Running", "podIP": address}}
        for name, address in addresses.items()
    ]
    (tmp_path / "pods.json").write_text(json.dumps({"items": items}))
    program(tmp_path / "kubectl", f"exec cat {tmp_path}/pods.json")
    own = {"HF_TOKEN": "x", "HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = [str(job / "job.yaml"), "--set", "gpus_per_node=8"]
    distlaunch("dry-run", *words, env=os.environ | own, status=0)


MARGIN = 4
"""The tests beside this one take from either competitor what they want."""


def test_the_ratios_of_the_benchmark_are_kept(tmp_path: Path) -> None:
    words = ["here", "plan", "--runs", "2", "--json", "--out", str(tmp_path)]
    argv = [sys.executable, str(ROOT / "scripts/benchmark"), *words]
    done = completed(argv, timeout=3 * PATIENCE_S, status=0)
    document = json.loads(done.stdout)
    assert json.loads((tmp_path / "benchmark.json").read_text()) == document
    ratios = [ratio for contest in document["contests"] for ratio in contest["ratios"]]
    assert ratios, "nothing was compared"
    for ratio in ratios:
        assert ratio["ratio"] <= MARGIN * ratio["at_most"], ratio
