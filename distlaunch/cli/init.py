"""`init`: writes a short job file for a script, after connecting to its nodes."""

import glob
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer
from typer import Argument, Option

from distlaunch.check.findings import NodeReport
from distlaunch.cli.job_file import Typed, load_document, write_new
from distlaunch.cli.options import Args, Hosts, Json, Module, Ranks, job_and_args
from distlaunch.cli.output import print_json, print_text, say
from distlaunch.compat.draft import Draft
from distlaunch.errors import DistlaunchError, Exit, UsageError
from distlaunch.job.spec import MAX_GPUS, JobSpec
from distlaunch.job.types import Tree
from distlaunch.schedulers import scheduler_in, title_of
from distlaunch.wording import listed

_SCRIPT = "The Python script."
Script = Annotated[str | None, Argument(metavar="SCRIPT.py", help=_SCRIPT, show_default=False)]
Out = Annotated[str, Option("-o", metavar="JOB.YAML", help="The file to write, which must not exist yet.")]
_SET = "Set another key of the job file, e.g. --set workdir=~/project."
Keys = Annotated[list[str] | None, Option("--set", metavar="KEY=VALUE", help=_SET)]
_NOTES = {
    "nodes": "host names as used with ssh; rank 0 runs on the first node",
    "gpus_per_node": "GPUs on each node; without this key, they are counted at each start",
    "procs_per_node": "workers on each node; without this key, one per GPU",
    "script": "relative to this file, and at the same path on every node",
}
_UNSET = {
    "nodes": "nodes: [gpu-a, gpu-b]  # host names as used with ssh; by default, this machine",
    "procs_per_node": "procs_per_node: 2  # workers on each node; by default, one per GPU",
    "args": "args: [--epochs, 10]  # arguments for the program",
    "sync": "sync: true  # copies your code to every node",
    "restarts": "restarts: 3  # new attempts after a failure",
    "timeouts": "timeouts: {stall: 10m}  # how long a rank may be idle before it counts as stalled",
}
"""Comments about keys that the file doesn't set."""


def init(
    context: typer.Context,
    script: Script = None,
    args: Args = None,
    ranks: Ranks = None,
    hosts: Hosts = None,
    module: Module = None,
    overrides: Keys = None,
    out: Out = "job.yaml",
    as_json: Json = False,
) -> None:
    """Write a short job file with comments. On a terminal, prompts for the script and hosts unless given.

    Connects to the nodes to count their GPUs and look for torch. Exits with 1 if a node can't be reached.
    """
    from distlaunch.launch.node_check import look

    if os.path.lexists(out):
        raise UsageError(f"{out} already exists; choose another name with -o")
    script, words = job_and_args(context, script, args)
    typed, settings, asks = Typed(module, hosts, ranks), overrides or [], sys.stdin.isatty()
    if asks and not (script or module or _set("script|module|command", settings)):
        script = _ask_script()
    found = load_document(_checked(script, typed, settings), settings, words, typed)
    while asks and not (hosts or _set("nodes|hostfile", settings)) and (answer := _ask_hosts()):
        try:
            found = load_document(script, settings, words, typed._replace(hosts=answer))
            break
        except DistlaunchError as error:
            say(str(error))
    spec, document, directory = found
    names = [node.label for node in spec.nodes if not node.local]
    say(f"looking at {listed(names) or 'this machine'}")
    reports, gpus = look(spec)
    keys = {key: value for key, value in Tree().check(document, "", []).items() if key != "name"}
    if "gpus_per_node" not in keys and not spec.allocation and (count := _gpus(gpus, asks)) is not None:
        keys["gpus_per_node"] = count
    draft = _draft(out, keys, spec, reports)
    write_new("-o", out, draft.text(), directory)
    if as_json:
        print_json({"file": out, **draft.document()})
    else:
        file = shlex.quote(out)
        print_text(f"wrote {out}; next:\n  distlaunch check {file}\n  distlaunch run {file}\n")
    if any(report.failure for report in reports):
        raise typer.Exit(Exit.FAILED)


def _set(keys: str, settings: Sequence[str]) -> bool:
    return any(re.match(f"({keys})=", text) for text in settings)


def _checked(script: str | None, typed: Typed, settings: Sequence[str]) -> str | None:
    """Return the script, if any. Raises `UsageError` if there is no program, or if it isn't a script."""
    if script is None or typed.module:  # a script with a module is refused later
        if typed.module or _set("script|module|command", settings):
            return script
        raise UsageError("specify the script, as in `distlaunch init train.py -H gpu-a,gpu-b`")
    if script.endswith((".yaml", ".yml")):
        convert = f"to convert an accelerate config, use `distlaunch import accelerate {shlex.quote(script)}`"
        use = f"to pass it to the script, name the script first and put {script} after --; {convert}"
        write = f"to write this job file, use -o {script}"
        raise UsageError(f"{script} is not a script: {use if os.path.exists(script) else write}")
    if not script.endswith(".py"):
        what = "to convert a torchrun command, use `distlaunch import torchrun '…'`; for a batch script for "
        what += "Slurm, use `distlaunch import sbatch FILE`"
        ranks = "replace it with --set 'command=[PROGRAM, ARGUMENT]'"
        raise UsageError(f"{script} is not a .py file: {what}; if each rank runs it, {ranks}")
    if not os.path.exists(script) and not (typed.hosts or _set("nodes|hostfile", settings)):
        correct = "correct the path or, if only the nodes have the script, add -H HOSTS"
        raise UsageError(f"no file {os.path.abspath(script)}: {correct}")
    return script


# Questions


def _ask_script() -> str:
    found = sorted(glob.glob("*.py"))
    default = next((name for name in ("train.py", "main.py", *found) if name in found), "")
    while True:
        answer = os.path.expanduser(_ask("script", default))
        if answer.endswith(".py") and os.path.isfile(answer):
            return answer
        if answer and not answer.endswith(".py"):
            other = "for another program, press Ctrl-C and use -m or --set command=…"
            say(f"{answer!r} doesn't end in .py; {other}")
        else:
            other = f"if only the nodes have it, press Ctrl-C and use `distlaunch init {answer} -H HOSTS`"
            say(f"no Python script {answer!r} here; {other}" if answer else "name a Python script")


def _ask_hosts() -> str | None:
    if name := scheduler_in(os.environ):
        say(f"no hosts needed: they come from the {title_of(name)} job")
        return None
    answer = _ask("hosts, separated by commas", "this machine")
    return None if answer == "this machine" else answer


def _ask(question: str, default: str) -> str:
    print(f"{question}{f' [{default}]' * bool(default)}: ", end="", file=sys.stderr, flush=True)
    if not (line := sys.stdin.readline()):
        raise UsageError("no answer; nothing was written")
    return line.strip() or default


def _gpus(counts: Sequence[int | None], asks: bool) -> int | None:
    """Return the number of GPUs on each node; None if each start should count them.

    `counts` are those seen on the nodes. If one is unknown and `asks` is set, ask the user.
    """
    if None in counts and asks:
        default = "counted at each start"
        while (answer := _ask("GPUs on each node", default)) != default:
            if answer.isdecimal() and int(answer) <= MAX_GPUS:
                return int(answer)
            say(f"{answer!r} is not a number from 0 to {MAX_GPUS}")
        return None
    return counts[0] if len({*counts}) == 1 else None


# The file


def _draft(out: str, keys: dict[str, Any], spec: JobSpec, reports: Sequence[NodeReport]) -> Draft:
    """Return the job file, with comments on the keys it sets, on other keys, and on nodes without torch."""
    draft = Draft(out)
    draft.keys = keys
    draft.note("created by `distlaunch init`; `distlaunch schema` lists all keys")
    meaningless = {"nodes"} if spec.allocation else {"args"} if "command" in keys else set()
    for key, text in _UNSET.items():
        if key not in keys.keys() | meaningless:
            draft.note(text, key=key)
    for key, text in _NOTES.items():
        if key in keys:
            draft.note(text, key=key)
    if spec.allocation and "nodes" not in keys:
        draft.note(f"without `nodes`, the job runs on the nodes of {spec.allocation.name}", key="nodes")
    for text in _python_notes(reports):
        say(text)
        draft.note(f"python: ~/venv/bin/python  # {text}", key="python")
    return draft.checked()


def _python_notes(reports: Sequence[NodeReport]) -> Iterator[str]:
    """Yield reasons why the job may need another Python. Report nodes that can't be reached."""
    lacking: dict[str, list[str]] = {}
    for report in reports:
        if report.failure:
            say(f"{report.label} can't be reached: {report.failure}; {report.advice}")
        elif report.python_error:
            yield f"{report.label}: {report.python_error}"
        elif (facts := report.part("software")) and not facts.get("torch"):
            lacking.setdefault(report.python, []).append(report.label)
    yield from (f"{python} has no torch on {listed(labels)}" for python, labels in lacking.items())
