"""The commands of `scripts/testbed`: parse arguments, and report results as text or JSON."""

import argparse
import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from . import loopback, namespaces
from .bring_up import bring_up, choose_mode
from .cutting import cut, cut_of, require_namespace
from .processes import lives
from .state import Host, Schedulers, Testbed, describe, existing, is_unclaimed, load, refuse_unfinished
from .take_down import population, take_down
from .tools import TestbedError, tool

_ABOUT = """\
Makes hosts on this machine, each with its own network, hostname, address and sshd, and takes them down again.

  scripts/testbed up 3
  ssh -F testbed/ssh_config host1 hostname
  scripts/testbed down
"""


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit status: 0, 1 after a failure, 2 for a usage error."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options = _parse(arguments)
    try:
        return int(options.command(options))
    except (TestbedError, OSError) as error:
        print(f"testbed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    # Manually, because argparse would parse options of the command to run.
    given, dashes, inside = list(arguments), "--", []
    if dashes in given:
        place = given.index(dashes)
        given, inside = given[:place], given[place + 1 :]
    parser = _parser()
    options = parser.parse_args(given)
    if (options.command is _exec) != bool(inside):
        parser.error("exec wants `-- CMD …` after the host, and nothing else does")
    options.inside = inside
    options.dir_given = options.dir
    options.dir = options.dir.absolute()
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="testbed", description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    up = _command(commands, _up, "make N hosts, host1 … hostN")
    up.add_argument("count", type=_count, metavar="N", help=f"how many, 1 to {namespaces.MOST_HOSTS}")
    up.add_argument(
        "--mode",
        choices=["netns", "loopback"],
        help="netns: hosts with a network of their own, as root; loopback: bare sshds on 127.0.0.x; "
        "default: netns where it can be had",
    )
    up.add_argument(
        "--slurm",
        type=_count,
        nargs="?",
        const=0,
        metavar="NODES",
        help="with Slurm, inside the hosts: a node per host, or so many, n1 … nNODES, dealt out to the hosts",
    )
    up.add_argument(
        "--accounting", action="store_true", help="with --slurm: its slurmdbd, too, and a MariaDB for that"
    )
    up.add_argument("--grid-engine", action="store_true", help="with Grid Engine, inside the hosts")
    _command(commands, _down, "remove the hosts, everything that runs in them, and the directory")
    status = _command(commands, _status, "tell how each host is")
    for command in (up, status):
        command.add_argument("--json", action="store_true", help="print a description for machines")
    run = _command(commands, _exec, "run a command inside a host: exec HOST -- CMD …")
    cutting = _command(commands, _cut, "drop everything that a host sends and receives, loopback excepted")
    cutting.add_argument("--one-way", action="store_true", help="only what it receives")
    healing = _command(commands, _heal, "undo a cut")
    for command in (run, cutting, healing):
        command.add_argument("host", metavar="HOST")
    return parser


def _command(commands: Any, function: Any, about: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        function.__name__.removeprefix("_"), help=about, description=about
    )
    parser.add_argument(
        "--dir", type=Path, default=Path("testbed"), help="the testbed's directory (default: ./testbed)"
    )
    parser.set_defaults(command=function)
    return parser


def _count(text: str) -> int:
    most = min(namespaces.MOST_HOSTS, loopback.MOST_HOSTS)
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to {most}, got {text!r}")
    return int(text)


def _up(options: argparse.Namespace) -> int:
    mode, reason = choose_mode(options.mode)
    if reason:
        print(f"testbed: {reason}; making loopback hosts instead", file=sys.stderr)
    if options.accounting and options.slurm is None:
        raise TestbedError("--accounting is Slurm's: use it with --slurm")
    slurm_nodes = 0 if options.slurm is None else options.slurm or options.count
    schedulers = Schedulers(slurm_nodes, options.accounting, options.grid_engine)
    if schedulers and mode != "netns":
        raise TestbedError("a scheduler needs hosts with networks of their own: use --mode netns")
    testbed = bring_up(options.count, options.dir, mode, schedulers)
    if options.json:
        print(json.dumps(describe(testbed)))
    else:
        print(_next_steps(testbed, options.dir_given))
    return 0


def _next_steps(testbed: Testbed, given: Path) -> str:
    first, last = testbed.hosts[0], testbed.hosts[-1]
    names = first.name if first is last else f"{first.name} … {last.name}"
    this = shlex.quote(sys.argv[0])
    place = "" if given == Path("testbed") else f" --dir {shlex.quote(str(given))}"
    steps = [f"ssh -F {shlex.quote(str(given / 'ssh_config'))} {first.name} hostname"]
    if testbed.mode == "netns":
        shown = _look(testbed.schedulers)
        steps += [f"{this} exec {first.name}{place} -- {shown}", f"{this} cut {first.name}{place}"]
    steps += [f"{this} down{place}"]
    return "\n  ".join([f"up: {names}, {testbed.mode} mode. Now try", *steps])


def _look(schedulers: Schedulers) -> str:
    """Return a suggestion of what to try inside the hosts."""
    if schedulers.slurm_nodes:
        return "sinfo"
    return "qhost" if schedulers.grid_engine else "ip address"


def _down(options: argparse.Namespace) -> int:
    directory = options.dir
    testbed = load(directory) if directory.is_dir() else None
    if testbed is not None:
        refuse_unfinished(testbed)
        take_down(testbed)
        print(f"down: {options.dir_given}")
        return 0
    if directory.is_dir() and not is_unclaimed(directory):
        raise TestbedError(f"{options.dir_given} has no state.json, so it is no testbed and stays as it is")
    print(f"nothing to take down in {options.dir_given}")
    return 0


def _status(options: argparse.Namespace) -> int:
    testbed = existing(options.dir)
    hosts = _conditions(testbed)
    if options.json:
        described = describe(testbed)
        merged = [plain | more for plain, more in zip(described["hosts"], hosts, strict=True)]
        print(json.dumps(described | {"hosts": merged}))
    else:
        rows = zip(testbed.hosts, hosts, strict=True)
        print("\n".join([f"{options.dir_given}: {testbed.mode} mode", *(_row(*row) for row in rows)]))
    return 0


def _conditions(testbed: Testbed) -> list[dict[str, Any]]:
    inside = population(testbed)
    return [_condition(testbed, host, inside[host.name]) for host in testbed.hosts]


def _condition(testbed: Testbed, host: Host, pids: Sequence[int]) -> dict[str, Any]:
    alive = lives(host.keeper)
    return {
        "alive": alive,
        "sshd": _sshd_pid(testbed, host) in pids,
        "processes": len(pids) - alive,
        "cut": cut_of(testbed, host) if alive else None,
    }


def _sshd_pid(testbed: Testbed, host: Host) -> int | None:
    try:
        return int((testbed.directory(host) / "sshd.pid").read_text())
    except (OSError, ValueError):
        return None


def _row(host: Host, condition: dict[str, Any]) -> str:
    states = {"both": ", cut off", "in": ", cut off from what it would receive", None: ""}
    sshd = "sshd runs" if condition["sshd"] else "no sshd"
    health = sshd if condition["alive"] else "dead"
    return (
        f"  {host.name}  {host.address}:{host.port}  {health}, processes: {condition['processes']}"
        f"{states[condition['cut']]}"
    )


def _exec(options: argparse.Namespace) -> NoReturn:
    testbed = existing(options.dir)
    host = testbed.host(options.host)
    # The command may use paths relative to this directory, and neither way into a host starts in it.
    inside = ["sh", "-c", 'cd "$0" && exec "$@"', str(Path.cwd()), *options.inside]
    if testbed.mode == "loopback":
        argv = [tool("ssh"), "-F", str(testbed.ssh_config), host.name, shlex.join(inside)]
    else:
        require_namespace(testbed, host)
        argv = [*namespaces.enter_argv(host), *inside]
    os.execv(argv[0], argv)


def _cut(options: argparse.Namespace) -> int:
    testbed = existing(options.dir)
    cut(testbed, testbed.host(options.host), "in" if options.one_way else "both")
    return 0


def _heal(options: argparse.Namespace) -> int:
    testbed = existing(options.dir)
    cut(testbed, testbed.host(options.host), None)
    return 0
