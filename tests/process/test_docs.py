"""The claims of README and docs: commands, examples, tables and links."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distlaunch.contract import HANDLED_SIGNALS, RESERVED
from distlaunch.errors import Exit
from tests.harness import ROOT, completed, distlaunch, program

PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (*ROOT.glob("*.md"), *ROOT.glob(".github/*.md"), *sorted((ROOT / "docs").glob("*.*[dt]")))
}
README, JOB_FILE = PAGES["README.md"], PAGES["docs/job-file.md"]
REFERENCE = ROOT / "scripts" / "reference"
SUBMIT = "distlaunch submit job.yaml --set slurm.time=1h"
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
CHECKS, DISKS = "cluster/test_check", "names_disks_that_are_full_or_have_no_inodes_or_are_small"
RUN_DIRECTORY, ON_ONE = "names_a_run_directory_that_cannot_be_written", "names_gpus_and_libraries_of_one_host"
LOGINS = "names_hosts_that_refuse_a_login_or_are_unknown_or_the_same"
SCRIPT = "names_a_script_that_differs_or_is_missing"
WHY = "faults/test_why::explains_a_failed_run"
TROUBLE = {
    "a host name is unknown, or a login fails": (LOGINS, "faults/test_ssh::tells_why_a_host_is_unusable"),
    "a node hangs at login": (
        "names_a_host_that_hangs_at_login",
        "faults/test_ssh::gives_up_on_servers_that_say_nothing",
    ),
    "one host has two names": (
        LOGINS,
        "cluster/test_unusable_hosts::refuses_a_host_that_is_listed_under_two_names",
    ),
    "the job's Python is missing": (
        "names_a_host_without_the_python_of_the_job",
        "faults/test_ssh::tells_why_a_host_is_unusable",
    ),
    "the script or the workdir is missing": (SCRIPT, "process/test_failures::names_what_cannot_be_started"),
    "the script differs between nodes": (
        SCRIPT,
        "run_says_the_rest_in_one_line_unless_nothing_is_checked",
    ),
    "other code or a lock file differs between nodes": ("names_code_that_differs",),
    "a package is missing": (
        "names_packages_and_versions_of_one_host",
        "unit/test_exits::advice_fits_the_last_output",
        WHY,
    ),
    "a node has a different version of torch or CUDA": ("names_packages_and_versions_of_one_host",),
    "several NCCL libraries": (ON_ONE,),
    "the run directory can't be written": (
        RUN_DIRECTORY,
        "process/test_run::a_run_that_cannot_begin_has_a_json_result_with_the_usual_keys",
    ),
    "a disk is full": (DISKS, "faults/test_logs::does_not_start_on_a_full_disk", WHY),
    "a disk has no inodes left": (DISKS,),
    "`/dev/shm` is small": (DISKS, "unit/test_exits::advice_fits_the_last_output"),
    "the limit on open files is too low": (
        "names_limits_and_settings_of_one_host",
        "faults/test_workers::tells_that_an_agent_has_no_descriptors",
    ),
    "the stacks of ranks can't be read": ("names_limits_and_settings_of_one_host",),
    "a node's clock is wrong": ("names_a_host_whose_clock_is_off",),
    "the rendezvous port is taken": (
        "names_who_holds_the_port",
        "process/test_failures::a_port_in_use_names_its_owner",
        WHY,
    ),
    "a port is blocked between two nodes": ("names_a_pair_that_cannot_connect",),
    "large packets are lost between two nodes": ("names_a_path_that_loses_large_packets",),
    "nodes have different MTUs": ("names_the_host_with_another_mtu",),
    "a node's own name resolves to a loopback address": (
        "names_a_host_whose_own_name_or_master_is_loopback",
    ),
    "`NCCL_SOCKET_IFNAME` or `GLOO_SOCKET_IFNAME` is wrong": (
        "names_limits_and_settings_of_one_host",
        "cluster/test_check_port::names_a_missing_interface_with_the_one_that_would_do",
    ),
    "two nodes have the same address": ("names_two_hosts_with_one_address",),
    "a node has too few GPUs, or a different model": (
        ON_ONE,
        "unit/test_start_warnings::some_missing_gpus_end_the_job_and_hidden_ones_are_a_warning",
    ),
    "another program uses GPU memory": (ON_ONE,),
    "a GPU has reported memory errors or an Xid": (ON_ONE,),
    "a rank fails, and others fail because of it": (
        "faults/test_blame::names_the_rank_that_failed_first",
        WHY,
    ),
    "the OOM killer kills a rank": ("faults/test_workers::names_the_oom_killer", WHY),
    "a node can't start processes": ("faults/test_workers::tells_that_a_node_refuses_to_fork",),
    "a rank never joins": ("process/test_stalling::gives_up_when_rank_0_does_not_join", WHY),
    "a rank stalls": ("faults/test_restarts::names_and_restarts_a_stalled_rank", WHY),
    "a rank is suspended by a signal": ("process/test_stalling::reports_a_rank_that_a_signal_has_stopped",),
    "a rank misses a collective": (
        "process/test_stalling::names_the_rank_that_missed_the_last_collective",
        WHY,
    ),
    "a rank is so slow that the others time out": (WHY, WHY),
    "the script expects more ranks than there are": (WHY, WHY),
    "each attempt fails with the same exception": (
        "process/test_failures::does_not_try_the_same_exception_a_third_time",
        WHY,
    ),
    "a node is cut off": ("faults/test_network::a_node_that_is_cut_off_is_lost", WHY),
    "the scheduler ends the job": (
        "cluster/test_slurm::a_job_that_slurm_ends_is_not_restarted_and_says_why",
    ),
}
"""By the rows of the table in docs/check.md: for each command, the test that plants this trouble."""


def blocks(kind: str) -> list[tuple[str, str]]:
    """(page, text) of each block in a language."""
    block = rf"(?ms)^```{kind}\n(.*?)^```$"
    return [(name, found) for name, text in PAGES.items() for found in re.findall(block, text)]


def commands() -> list[tuple[str, str]]:
    """(page, command) of each line that runs distlaunch, without its comment."""
    lines = ((page, line) for page, block in blocks("sh") for line in block.splitlines())
    return [(page, re.sub(r"\s+#.*", "", line)) for page, line in lines if line.split(" ")[0] == "distlaunch"]


def headings(text: str) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"(?m)^#+ (.+)$", text)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def links() -> list[tuple[str, str]]:
    """(page, target) of each link into the checkout."""
    return sorted(
        {(name, link) for name, text in PAGES.items() for link in re.findall(r"\]\(([^):]+)\)", text)}
    )


def reference_script(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return completed([sys.executable, REFERENCE, *arguments])


@pytest.mark.parametrize(
    "command",
    [
        *("scripts/cookbook", "scripts/matrix", "scripts/pictures", "scripts/try", "scripts/venv"),
        "-m tests.wide.runs",
    ],
)
def test_a_script_asked_for_help_does_nothing_else(command: str) -> None:
    words = [sys.executable, *command.split()] if command.startswith("-m") else [ROOT / command]
    done = completed([*words, "--help"], cwd=ROOT)
    assert (done.returncode, done.stdout[:7]) == (0, "usage: "), done.stderr


def test_the_table_of_keys_matches_their_declarations(tmp_path: Path) -> None:
    checked = reference_script("--check")
    assert checked.returncode == 0, checked.stderr
    page = tmp_path / "page.md"
    page.write_text(re.sub(r"(?m)^\| `nodes.*\n", "", JOB_FILE))
    refused = reference_script("--check", page)
    assert (refused.returncode, "run scripts/reference" in refused.stderr) == (1, True)
    assert reference_script(page).returncode == 0
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
    assert told >= {status for status in Exit if status not in (Exit.OK, Exit.FAILED, Exit.INTERNAL)}
    assert told >= {128 + signal.Signals[name] for name in HANDLED_SIGNALS.split(",")}


def test_every_trouble_in_the_table_is_planted_for_each_command_that_names_it() -> None:
    table = PAGES["docs/check.md"].partition("## Which command finds which problem")[2]
    rows = re.findall(r"(?m)^\| ([^*|]+) \| (`.+`) \|$", table)
    assert {row: words.count(", ") + 1 for row, words in rows} == {
        row: len(all_) for row, all_ in TROUBLE.items()
    }
    for test in {test for tests in TROUBLE.values() for test in tests}:
        module, _, name = test.rpartition("::")
        assert f"def test_{name}(" in (ROOT / f"tests/{module or CHECKS}.py").read_text(), test


def literals() -> list[str]:
    """The string literals of the package, with … for each placeholder."""
    found = []
    for path in (ROOT / "distlaunch").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
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
        habit = re.compile(rf"(?i)[^\n]{{0,40}}\b(?:{pattern})\b[^\n]{{0,40}}")
        found = [(page, each[0]) for page, text in texts for each in habit.finditer(text)]
        assert found == [], f"write: {instead}"


def test_every_error_and_warning_is_in_the_index_of_messages() -> None:
    """By the longest literal of each, found without the script that makes the index."""
    index = PAGES["docs/messages.md"].replace("\\", "")
    own = r"(UsageError|DistlaunchError|JobError|TreeError|ShowMessage|Cause|Finding|say|spec\.error)\("
    lost, seen = [], 0
    for path in (ROOT / "distlaunch").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and re.match(own, f"{ast.unparse(node.func)}(")):
                continue
            values = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
            pieces = [
                part for each in values if isinstance(each, str) for part in re.split(r"%(?:\.\d+)?\w", each)
            ]
            longest = max(pieces, key=len, default="").strip()
            if len(re.findall(r"[A-Za-z']{2,}", longest)) >= 5:
                seen += 1
                lost += [(path.name, longest)] if longest not in index else []
    assert lost == []
    assert seen > 100


def test_the_messages_that_can_be_looked_up_are_printed_by_the_code() -> None:
    tables = PAGES["docs/troubleshooting.md"].partition("## ")[2]
    rows = re.findall(r"(?m)^\| (`.+?`) \|", tables)
    parts = {part.strip() for row in rows for code in re.findall("`(.+?)`", row) for part in code.split("…")}
    known = literals()
    assert [part for part in parts if not any(part in literal for literal in known)] == []
    assert len(parts) > 30


def test_documents_every_variable_that_workers_get() -> None:
    internal = {"TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
    assert [name for name in RESERVED - internal if f"`{name}`" not in JOB_FILE] == []


@pytest.mark.parametrize(("page", "link"), links())
def test_links_lead_somewhere(page: str, link: str) -> None:
    path, _, anchor = link.partition("#")
    target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
    assert target.exists()
    assert not anchor or anchor in headings(target.read_text())


def test_every_page_can_be_reached_from_the_readme() -> None:
    assert ("README.md", "docs/index.md") in links()
    linked = {f"docs/{link.partition('#')[0]}" for page, link in links() if page == "docs/index.md"}
    assert {page for page in PAGES if page.startswith("docs/")} - {"docs/index.md"} <= linked
    in_navigation = set(re.findall(r'"([\w-]+\.md)"', (ROOT / "docs/zensical.toml").read_text()))
    assert {f"docs/{page}" for page in in_navigation} >= {page for page in linked if page.endswith(".md")} & {
        *PAGES
    }


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
        page = tmp_path / "pages/why.md"
        page.write_text(f"# Why\n\n[x]({link})\n")
        path = f"{ROOT}/.venv/bin:{os.environ['PATH']}"
        command = ["sh", "-c", "zensical build --strict"]
        refused = completed(command, cwd=tmp_path, env={**os.environ, "PATH": path})
        assert refused.returncode != 0
        assert "does not exist" in refused.stdout + refused.stderr


def test_the_readme_takes_three_minutes() -> None:
    words = re.findall(r"[A-Za-z]\w*", re.sub(r"```[\s\S]*?```", "", README))
    assert len(words) <= 700


@pytest.mark.parametrize(
    "script", sorted({name for text in PAGES.values() for name in re.findall(r"\bscripts/(\w+)\b", text)})
)
def test_the_scripts_are_executable(script: str) -> None:
    assert (ROOT / "scripts" / script).stat().st_mode & 0o111


@pytest.mark.parametrize(
    "command", sorted(set(re.findall(r"(?m)^\| `distlaunch ([\w-]+)[ `]", README)) - {"import"})
)
def test_the_commands_exist_and_take_json(command: str) -> None:
    shown = distlaunch(command, "--help", env={"PATH": "/usr/bin:/bin", "COLUMNS": "200", "TERM": "dumb"})
    assert shown.returncode == 0
    assert command in ("schema", "torchrun", "logs", "attach", "view") or "--json" in shown.stdout


@pytest.mark.parametrize(("page", "command"), [one for one in commands() if one[1] not in ON_HOSTS])
def test_the_commands_run(page: str, command: str, tmp_path: Path) -> None:
    for name, text in SCRATCH.items():
        (tmp_path / name).write_text(text)
    program(tmp_path / "distlaunch", f'exec {sys.executable} -m distlaunch "$@"')
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    completed(["/bin/sh", "-c", command], cwd=tmp_path, env=env, status=0)


@pytest.mark.parametrize(("page", "text"), blocks("yaml"))
def test_the_examples_are_job_files(page: str, text: str, tmp_path: Path) -> None:
    part = "" if re.search(r"(?m)^(script|command):", text) else "script: train.py\n"
    (tmp_path / "job.yaml").write_text(text + part)
    for name in ("train.py", "uv.lock"):
        (tmp_path / name).touch()
    env = {
        **os.environ,
        "HF_TOKEN": "x",
        "HOME": str(tmp_path),
        "PATH": f"{_pods(tmp_path)}:{os.environ['PATH']}",
    }
    distlaunch("dry-run", str(tmp_path / "job.yaml"), "--set", "gpus_per_node=8", env=env, status=0)


def _pods(directory: Path) -> Path:
    """Where a stand-in for kubectl is, that lists two pods: no cluster is asked here."""
    spec = {"containers": [{"name": "main"}]}
    names = {f"trainer-{number}": {"phase": "Running", "podIP": f"10.0.0.{number}"} for number in range(2)}
    items = [{"metadata": {"name": name}, "spec": spec, "status": status} for name, status in names.items()]
    (directory / "pods.json").write_text(json.dumps({"items": items}))
    program(directory / "kubectl", f"exec cat {directory}/pods.json")
    return directory
