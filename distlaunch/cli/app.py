"""The Typer application: commands with their options. Other modules do the work."""

from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from shlex import quote
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from distlaunch import __version__
from distlaunch.cli.options import (
    Args,
    Fold,
    Hosts,
    Json,
    Module,
    NoCheck,
    Ranks,
    Save,
    Set,
    Source,
    SshConfig,
    job_and_args,
)
from distlaunch.cli.output import print_json, say, while_read
from distlaunch.errors import Exit

app = typer.Typer(
    name="distlaunch",
    help="Run a distributed PyTorch job on one machine or many, from one YAML file.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def run_app(words: Sequence[str]) -> int:
    """Run the command line; return its exit status. Raises `DistlaunchError`."""
    if words and words[0].endswith((".yaml", ".yml", ".py")):
        say(f"{words[0]!r} is not a command; to run it, use `distlaunch run {quote(words[0])}`")
        return Exit.USAGE
    if not app.registered_groups and words[:1] not in [[each.name] for each in app.registered_commands]:
        add_other_commands()  # this module's own commands don't need them
    try:
        with while_read() if {"--help", "-h"}.intersection(words) else nullcontext():
            app(list(words), obj=tuple(words))
    except SystemExit as end:  # Typer always exits with a number
        if hasattr(end.__context__, "possibilities"):  # only for unknown options
            _advise_on(end.__context__)
        return end.code if isinstance(end.code, int) else Exit.OK
    return Exit.OK


def _advise_on(unknown: Any) -> None:
    """Advise where to put an unknown option, if the command has arguments for a script.

    `unknown` is the NoSuchOption error of Click.
    """
    option, params = unknown.option_name, unknown.ctx.command.params if unknown.ctx else ()
    if not any("-- " in str(each.metavar) for each in params):
        return
    from distlaunch.job.keys import JOB

    name = option.lstrip("-").replace("-", "_")
    key = JOB.foreign.get(name, name if name in JOB.fields else "")
    hint = ""
    if any("--set" in each.opts for each in params):
        if key and " " not in key:
            what, setting = ("a variable", "env.NAME") if key == "env" else (key, key)
            say(f"to set {what} of the job, use --set {setting}=…")
        else:
            hint = "; to set a key of the job, use --set KEY=VALUE"
    say(f"if {option} is for the script or command, put it after `--`{hint}")


_ON_RUNS = (
    *("runs.ps", "runs.attach", "runs.view", "runs.wait", "runs.stop"),
    *("report.why", "report.report", "report.bundle", "logs.logs", "report.checkout"),
)
_OTHERS = (
    *("init.init", "check.check", "submit.submit", *_ON_RUNS, "prune.prune"),
    *("submit.exports", "import_command.imports"),
)
"""Commands in other modules, and Typer applications with subcommands, in the order used by the help."""


def add_other_commands() -> None:
    """Import the other modules, and add their commands."""
    from distlaunch.cli.runs import OnRuns

    for place in _OTHERS:
        module, _, name = place.partition(".")
        found = getattr(import_module(f"distlaunch.cli.{module}"), name)
        if isinstance(found, typer.Typer):
            app.add_typer(found)
        else:
            app.command(name, cls=OnRuns if place in _ON_RUNS else None)(found)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"distlaunch {__version__}")
        raise typer.Exit


Version = Annotated[
    bool, Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
]


@app.callback()
def _options(version: Version = False) -> None:
    pass


Quiet = Annotated[
    bool, Option("--quiet", "-q", help="Hide distlaunch's own messages, except warnings and errors.")
]
_DETACH = "Once all ranks have started, print the run's ID and return; the run continues in the background."
Detach = Annotated[bool, Option("--detach", "-d", help=_DETACH)]
NoSync = Annotated[bool, Option("--no-sync", help="Use the code that is already on the nodes.")]
View = Annotated[
    bool, Option("--view", help="Show the run full-screen, like `distlaunch view`, but q stops the run.")
]
_ON = "Run the controller on HOST over SSH, so that this machine can sleep or disconnect."
On = Annotated[str | None, Option("--on", metavar="HOST", help=_ON)]


@app.command("run")
def run(
    context: typer.Context,
    job: Source = None,
    args: Args = None,
    ranks: Ranks = None,
    hosts: Hosts = None,
    module: Module = None,
    overrides: Set = None,
    save: Save = None,
    quiet: Quiet = False,
    as_json: Json = False,
    detach: Detach = False,
    fold: Fold = False,
    view: View = False,
    on: On = None,
    unchecked: NoCheck = False,
    unsynced: NoSync = False,
) -> None:
    """Run a job. Exits with the status of the first worker that failed.

    Ranks have no standard input, except for rank 0 if the job sets `stdin: rank 0`.
    """
    from distlaunch.cli.job_file import Typed
    from distlaunch.cli.run import RunOptions, run_with, settings_of

    typed = Typed(module, hosts, ranks, save)
    settings = settings_of(overrides, fold=fold, unchecked=unchecked, unsynced=unsynced)
    source, words = job_and_args(context, job, args)
    options = RunOptions(source, words, settings, quiet, as_json, detach, view, on, typed)
    raise typer.Exit(run_with(options))


Style = Annotated[
    Literal["table", "shell", "torchrun", "json"], Option("--format", "-f", help="The output format.")
]


@app.command("dry-run")
def dry_run(
    context: typer.Context,
    job: Source = None,
    args: Args = None,
    style: Style = "table",
    ranks: Ranks = None,
    hosts: Hosts = None,
    module: Module = None,
    overrides: Set = None,
    save: Save = None,
    as_json: Json = False,
    unsynced: NoSync = False,
) -> None:
    """Show where each rank would run, or print commands to paste, without contacting any host."""
    from distlaunch.cli.job_file import Typed, load_job, with_code
    from distlaunch.cli.run import settings_of
    from distlaunch.cli.tables import print_plan
    from distlaunch.launch.addresses import plan_without_nodes

    job, words = job_and_args(context, job, args)
    settings = settings_of(overrides, unsynced=unsynced)
    spec = with_code(load_job(job, settings, words, Typed(module, hosts, ranks, save)))
    if spec.tree and style in ("shell", "torchrun"):
        what, need = (
            ("copies the code", "it") if not spec.setup else ("builds the environment", "it, and the code")
        )
        say(f"only `run` {what}: these commands need {need} at the same path on every node")
    elif spec.tree:
        spec = spec.in_tree(spec.name)
    if spec.hosts_unknown:
        say("host names are known only inside an allocation")
    unknown = any(node.procs and node.gpus is None and not node.local for node in spec.nodes)
    if unknown and spec.backend == "auto":
        say("only `run` detects GPUs; this plan assumes one GPU per worker (change it with gpus_per_node)")
    print_plan(plan_without_nodes(spec), "json" if as_json else style)


# For help only: `__main__` runs these two without importing Typer.


@app.command("torchrun")
def torchrun() -> None:
    """Run a torchrun command line with distlaunch."""


@app.command("exec")
def exec_task() -> None:
    """Run a program as one rank, in a task started by srun or mpirun."""


Targets = Annotated[
    list[str], Argument(metavar="JOB.YAML | HOST:PORT …", help="A job file, or ports to test.")
]


@app.command("check-port")
def check_port(
    targets: Targets,
    overrides: Set = None,
    ssh_config: SshConfig = None,
    as_json: Json = False,
) -> None:
    """Test that a port is free, and that all nodes can reach it and each other. Exits with 1 otherwise."""
    from distlaunch.cli.port_targets import reports_on

    reports = reports_on(targets, overrides or (), ssh_config)
    if as_json:
        print_json([report.document() for report in reports])
    else:
        from distlaunch.cli.tables import print_port_report

        for report in reports:
            print_port_report(report)
    raise typer.Exit(Exit.OK if all(report.ok for report in reports) else Exit.FAILED)


_OF = "The document: job, plan, result, findings, ports, why, report, run, runs or events."
Of = Annotated[str, Option("--of", metavar="DOCUMENT", help=_OF)]


@app.command("schema")
def schema(of: Of = "job") -> None:
    """Print the JSON Schema of job files, or of the JSON that another command prints."""
    if of == "job":
        from distlaunch.job.keys import json_schema
        from distlaunch.schedulers import job_keys

        print_json(json_schema(job_keys()))
    else:
        from distlaunch.cli.schemas import schema_of

        print_json(schema_of(of))
