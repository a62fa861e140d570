"""What stands before torchrun's flags: variables, and the program that reads them."""

import os.path
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from distlaunch.dropin.flags import Flags, parse_flags
from distlaunch.errors import UsageError

_MODULES = ("torch.distributed.run", "torch.distributed.launch", "distlaunch.torchrun")
_USE_ENV = ("--use-env", "--use_env")


class Call(NamedTuple):
    """A command that starts torchrun: its variables, its interpreter if it names one, torchrun's own words.

    With `local_rank_flag`, that of torch.distributed.launch, workers get `--local-rank=N`.
    """

    env: Mapping[str, str]
    python: str | None
    flags: Flags
    local_rank_flag: bool = False


def parse_call(words: Sequence[str]) -> Call:
    """The call that these words are. Raises `UsageError`."""
    count = next((i for i, word in enumerate(words) if not re.match(r"[A-Za-z_]\w*=", word)), len(words))
    env = dict(word.split("=", 1) for word in words[:count])
    python, module, rest = _program(list(words[count:]))
    legacy = module == "torch.distributed.launch"
    flags, use_env = _legacy_flags(rest, env) if legacy else (parse_flags(rest, env), True)
    if not flags.script:
        raise UsageError("no script is given")
    if flags.no_python and not use_env:
        raise UsageError("torch.distributed.launch takes --no-python only with --use-env")
    return Call(env, env.get("PYTHON_EXEC") or python, flags, not use_env)


def _program(words: list[str]) -> tuple[str | None, str, list[str]]:
    """The interpreter that is named by a path, the module that runs, and what it gets."""
    first = words[0] if words else ""
    name, folder = os.path.basename(first), os.path.dirname(first)
    if name == "torchrun":
        return (f"{folder}/python" if folder else None), "", words[1:]
    if name == "distlaunch" and words[1:2] == ["torchrun"]:
        return None, "", words[2:]
    if re.fullmatch(r"python[0-9.]*", name):
        module, rest = _module(words[1:])
        return (first if folder else None), module, rest
    if first.startswith("-"):
        return None, "", words
    raise _no_torchrun(first)


def _module(words: list[str]) -> tuple[str, list[str]]:
    """The module after -m; what stands before it is Python's."""
    while words and words[0] != "-m" and words[0].startswith("-"):
        words = words[1:]
    if words[:3] == ["-m", "distlaunch", "torchrun"]:
        return "distlaunch.torchrun", words[3:]
    if words[:1] == ["-m"] and words[1:2] and words[1] in _MODULES:
        return words[1], words[2:]
    raise _no_torchrun(" ".join(["python", *words[:2]]))


def _no_torchrun(got: str) -> UsageError:
    known = "torchrun, python -m torch.distributed.run or .launch, distlaunch torchrun"
    return UsageError(f"expected {known}, got {got!r}" if got else f"expected {known}")


def _legacy_flags(words: list[str], env: Mapping[str, str]) -> tuple[Flags, bool]:
    """torch.distributed.launch's flags, and whether --use-env is one of them: it has it beyond torchrun's."""
    at = next((i for i, word in enumerate(words) if word in _USE_ENV), None)
    if at is not None:
        less = [*words[:at], *words[at + 1 :]]
        flags = parse_flags(less, env)
        if at <= len(less) - 1 - len(flags.args):
            return flags, True
    return parse_flags(words, env), False
