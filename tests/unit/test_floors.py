"""How the code is built: which module may import which, what stays pure, and how long functions are."""

import ast
import marshal
import os
import statistics
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from distlaunch.launch.opening import bundle_for
from distlaunch.schedulers import TABLE, load
from distlaunch.transports.handshake import PACKAGES

ROOT = Path(__file__).parents[2] / "distlaunch"

PARTS = {
    0: "__init__ _version agent",
    1: "check compat contract diagnosis errors job kubernetes plan schedulers supervisor transports wording",
    2: "here observers signals",
    3: "launch runs",
    4: "__main__ api cli torchrun",
}
FLOORS = {part: floor for floor, parts in PARTS.items() for part in parts.split()}
"""The floor of each package and module directly below distlaunch."""
FILES = {"distlaunch.job.yaml_document"}
"""The module of job that imports a parser."""


def name_of(path: Path) -> str:
    parts = ("distlaunch", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


def part_of(module: str) -> str:
    """`distlaunch.job.spec` → `job`; `distlaunch` itself is its `__init__`."""
    return [*module.split("."), "__init__"][1]


MODULES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}
SCHEDULERS = [name for name in MODULES if part_of(name) == "schedulers"]
PROGRAMS = {"distlaunch.check.probe", "distlaunch.check.link_probe", "distlaunch.cli.function"}
"""Run on nodes by the job's Python."""
IMPURE = {*SCHEDULERS, *FILES, *PROGRAMS}
PURE = [name for name in MODULES if FLOORS.get(part_of(name)) == 1 and name not in IMPURE]
SHIPPED = [name for name in MODULES if part_of(name) == "agent"]


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(), name)


def imports_of(name: str) -> Iterator[str]:
    """Every module that `name` imports, wherever in it, by its full name."""
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            module = str(node.module)
            for alias in node.names:
                full = f"{module}.{alias.name}"
                yield full if full in MODULES else module


def roots_of(name: str) -> set[str]:
    return {module.split(".")[0] for module in imports_of(name)}


def own_imports(name: str) -> list[str]:
    """Those of our own; the package itself only names the API, which is imported when it is used."""
    if name == "distlaunch.__init__":
        return []
    return [module for module in imports_of(name) if module.split(".")[0] == "distlaunch"]


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_from_its_own_floor_and_below(name: str) -> None:
    floor = FLOORS[part_of(name)]
    assert [module for module in own_imports(name) if FLOORS[part_of(module)] > floor] == []


@pytest.mark.parametrize("name", SHIPPED)
def test_the_agent_needs_nothing_but_python_3_8(name: str) -> None:
    assert {part_of(module) for module in own_imports(name)} <= {"agent"}
    assert roots_of(name) <= {"distlaunch", *sys.stdlib_module_names}
    source = ROOT.joinpath(*name.split(".")[1:])
    path = source / "__init__.py" if source.is_dir() else source.with_suffix(".py")
    ast.parse(path.read_text(), str(path), feature_version=(3, 8))


def test_every_module_of_the_agent_is_shipped_as_code_and_as_source() -> None:
    bundle = bundle_for(same_interpreter=False)
    code = marshal.loads(zlib.decompress(bundle.code))
    source = ast.literal_eval(zlib.decompress(bundle.source).decode())
    assert set(code) == set(source) == {"distlaunch", *SHIPPED}
    assert {*PACKAGES} == {name for name in code if any(each.startswith(f"{name}.") for each in code)}


def test_nothing_imports_torch() -> None:
    assert {name for name in MODULES if "torch" in roots_of(name)} <= PROGRAMS


# Floor 1 is pure

IMPURE_MODULES = {
    *("asyncio", "builtins", "concurrent", "ctypes", "datetime", "fcntl", "getpass", "glob", "importlib"),
    *("io", "logging", "multiprocessing", "pathlib", "platform", "pwd", "random", "resource", "rich"),
    *("secrets", "select", "selectors", "shutil", "socket", "subprocess", "sys", "tempfile", "termios"),
    *("threading", "time", "tty", "typer", "uuid", "yaml"),
}
PURE_PATH_FUNCTIONS = {"basename", "dirname", "isabs", "join", "normpath", "split", "splitext"}
IMPURE_BUILTINS = {"open", "print", "input", "exec", "eval", "__import__"}


def dotted(node: ast.expr) -> str:
    """`os.path.join` of an attribute chain; "" of anything else."""
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return node.id if isinstance(node, ast.Name) else ""


def calls_of(name: str) -> set[str]:
    return {dotted(node.func) for node in ast.walk(tree_of(name)) if isinstance(node, ast.Call)}


def used_of_os(name: str) -> set[str]:
    """The attributes of `os` that a module uses, but for `os.path` itself."""
    used = {dotted(node) for node in ast.walk(tree_of(name)) if isinstance(node, ast.Attribute)}
    return {each for each in used if each.startswith("os.")} - {"os.path"}


@pytest.mark.parametrize("name", PURE)
def test_a_pure_module_does_not_touch_the_world(name: str) -> None:
    loads = {"importlib"} if name == "distlaunch.transports" else set()  # the modules of a table
    assert roots_of(name) & IMPURE_MODULES == loads
    assert set(imports_of(name)) & {"os", "posix", "posixpath"} == set()
    assert used_of_os(name) <= {f"os.path.{function}" for function in PURE_PATH_FUNCTIONS}
    assert calls_of(name) & IMPURE_BUILTINS == set()


# A scheduler is one module and one line of a table

QUEUE = "distlaunch.schedulers.queue"
"""The one among them that runs commands, reads files and our environment."""


@pytest.mark.parametrize("name", [name for name in SCHEDULERS if name != QUEUE])
def test_a_scheduler_touches_the_world_only_through_its_queue(name: str) -> None:
    assert roots_of(name) & IMPURE_MODULES <= {"importlib", "datetime"}  # loads modules; Slurm's local times
    assert calls_of(name) & IMPURE_BUILTINS == set()
    # what must exist before a job waits in a queue
    assert used_of_os(name) <= {"os.path.expanduser", "os.path.isdir", "os.path.isfile"}


def names_compared(tree: ast.Module) -> set[str]:
    """Every text that a condition compares something with."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Compare | ast.MatchValue)]
    inner = [part for node in nodes for part in ast.walk(node) if isinstance(part, ast.Constant)]
    return {part.value for part in inner if isinstance(part.value, str)}


def test_no_condition_names_a_scheduler() -> None:
    code = "if x == 'slurm' or y in ('pbs', 'z'): pass\nmatch z:\n    case 'lsf' | 'flux': pass"
    assert names_compared(ast.parse(code)) == {"slurm", "pbs", "z", "lsf", "flux"}
    keys = {*TABLE, *(load(each).key for each in TABLE)}
    found = {name for name in MODULES if names_compared(tree_of(name)) & keys}
    assert found <= {*SCHEDULERS}


# Tests


@pytest.mark.parametrize(
    "start", [lambda: subprocess.run(["true"], check=True), lambda: os.posix_spawn("/bin/true", ["true"], {})]
)
def test_no_unit_test_can_start_a_process(start: Callable[[], object]) -> None:
    with pytest.raises(AssertionError, match="that belongs in tests/process"):
        start()


# Shape


LEVELS = 9
"""The packages, and modules beside them, that a reader may have to pass from the top down."""


def test_neither_modules_nor_packages_import_each_other() -> None:
    edges = {name: set(own_imports(name)) - {name} for name in MODULES}
    TopologicalSorter(edges).prepare()  # raises CycleError, which names one
    parts: dict[str, set[str]] = {part_of(name): set() for name in MODULES}
    for name, modules in edges.items():
        parts[part_of(name)] |= set(map(part_of, modules)) - {part_of(name)}
    levels: dict[str, int] = {}
    for part in TopologicalSorter(parts).static_order():
        levels[part] = 1 + max((levels[below] for below in parts[part]), default=0)
    assert max(levels.values()) <= LEVELS, levels


def test_the_supervisors_modules_hardly_know_each_other() -> None:
    """What one of them finds, and another decides upon, is data that goes through `step`."""
    types = {f"distlaunch.supervisor.{name}" for name in ("actions", "events", "nodes", "state")}
    inside = {name for name in MODULES if name.startswith("distlaunch.supervisor.")} - types
    arrows = {(name, module) for name in inside for module in own_imports(name) if module in inside}
    assert len(arrows) <= 28


def test_functions_are_mostly_under_ten_lines_and_rarely_over_thirty() -> None:
    """Their heads and docstrings included."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for name in MODULES for node in ast.walk(tree_of(name)) if isinstance(node, functions)]
    lengths = [(node.end_lineno or 0) - node.lineno + 1 for node in nodes]
    assert statistics.median(lengths) < 10
    assert sum(length > 30 for length in lengths) < len(lengths) / 50


RUNS = ("launch", "observers", "supervisor", "plan", "diagnosis", "transports")
"""What a run consists of once it has begun."""
AT_ITS_START = {
    *("launch.collecting", "launch.controller", "launch.snapshot", "launch.start"),
    *("observers.metrics", "observers.notifier", "check.findings"),
    *("plan.other_launchers", "agent.gpus", "agent.sweep", "schedulers.queue"),
}
"""Imported before the first worker starts, where they are needed at all."""


def late_imports(name: str) -> Iterator[str]:
    """What the functions of a module import when they are called."""
    for function in ast.walk(tree_of(name)):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.ImportFrom):
                    full = (f"{node.module}.{alias.name}" for alias in node.names)
                    yield from (each if each in MODULES else str(node.module) for each in full)


def test_a_run_that_is_left_imports_nothing_later() -> None:
    """Weeks later another distlaunch may be installed in the place of the one that began."""
    late = {each for name in MODULES if part_of(name) in RUNS for each in late_imports(name)}
    ours = {each.removeprefix("distlaunch.") for each in late if each.startswith("distlaunch.")}
    assert ours - AT_ITS_START == set()
