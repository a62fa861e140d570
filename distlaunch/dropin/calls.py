"""What precedes torchrun's flags: variables, and the program that reads them."""

import os.path
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from distlaunch.dropin.flags import FLAGS, Flags
from distlaunch.dropin.parsing import parse_flags
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


def is_variable(word: str) -> bool:
    """Whether a word before a command sets a variable for it."""
    return re.match(r"[A-Za-z_]\w*=", word) is not None


def launcher_at(words: Sequence[str]) -> int | None:
    """Where torchrun's name stands, behind variables and commands such as srun; None = nowhere."""
    for i, word in enumerate(words):
        if _starts(words[i:]) or (word.startswith("-") and all(map(is_variable, words[:i]))):
            return i
        if _is_python(word):
            return None  # it runs another program, whose arguments may be anything
    return None


def _starts(words: Sequence[str]) -> bool:
    name = os.path.basename(words[0])
    ours = name == "distlaunch" and list(words[1:2]) == ["torchrun"]
    return name == "torchrun" or ours or (_is_python(words[0]) and _module(list(words[1:])) is not None)


def _is_python(word: str) -> bool:
    return re.fullmatch(r"python[0-9.]*", os.path.basename(word)) is not None


def parse_call(words: Sequence[str], filled: Collection[str] = ()) -> Call:
    """The call that these words are, some of which a shell would have filled in. Raises `UsageError`."""
    at = launcher_at(words)
    if at is None:
        raise _no_torchrun([word for word in words if not is_variable(word)])
    env = dict(word.split("=", 1) for word in words[:at] if is_variable(word))
    set_here = {word.partition("=")[0] for word in words[:at] if word not in filled}
    python, module, rest = _program(list(words[at:]))
    known = {name: text for name, text in env.items() if name in set_here}
    legacy = module == "torch.distributed.launch"
    flags, use_env = (
        _legacy_flags(rest, known, filled) if legacy else (parse_flags(rest, known, filled), True)
    )
    if not flags.script:
        raise UsageError("no script given")
    if flags.no_python and not use_env:
        raise UsageError("torch.distributed.launch accepts --no-python only with --use-env")
    unfilled = (*flags.unfilled, *_unfilled(env.keys() - known.keys(), env, flags))
    return Call(env, known.get("PYTHON_EXEC") or python, flags._replace(unfilled=unfilled), not use_env)


def _unfilled(names: Collection[str], env: Mapping[str, str], flags: Flags) -> Iterator[tuple[str, str]]:
    """The flags whose variables only a shell knows the value of."""
    for flag in FLAGS:
        if flag.variable in names and flag.field not in flags.given:
            yield flag.field, env[flag.variable]


def _program(words: list[str]) -> tuple[str | None, str, list[str]]:
    """The interpreter that is named by a path, the module that runs, and what it gets."""
    name, folder = os.path.basename(words[0]), os.path.dirname(words[0])
    if name == "torchrun":
        return (f"{folder}/python" if folder else None), "", words[1:]
    if name == "distlaunch":
        return None, "", words[2:]
    if _is_python(words[0]):
        module, rest = _module(words[1:]) or ("", [])
        return (words[0] if folder else None), module, rest
    return None, "", words


def _module(words: list[str]) -> tuple[str, list[str]] | None:
    """The module after -m, if it is a launcher, and what it gets; what stands before it is Python's."""
    while words and words[0] != "-m" and words[0].startswith("-"):
        words = words[1:]
    if words[:3] == ["-m", "distlaunch", "torchrun"]:
        return "distlaunch.torchrun", words[3:]
    if words[:1] == ["-m"] and words[1:2] and words[1] in _MODULES:
        return words[1], words[2:]
    return None


def _no_torchrun(words: Sequence[str]) -> UsageError:
    known = "torchrun, python -m torch.distributed.run or .launch, distlaunch torchrun"
    got = " ".join(words[: 3 if words and _is_python(words[0]) else 1])
    return UsageError(f"expected {known}, got {got!r}" if got else f"expected {known}")


def _legacy_flags(words: list[str], env: Mapping[str, str], filled: Collection[str]) -> tuple[Flags, bool]:
    """torch.distributed.launch's flags, and whether --use-env is one of them: it has it beyond torchrun's."""
    at = next((i for i, word in enumerate(words) if word in _USE_ENV), None)
    if at is not None:
        less = [*words[:at], *words[at + 1 :]]
        flags = parse_flags(less, env, filled)
        if at <= len(less) - 1 - len(flags.args):
            return flags, True
    return parse_flags(words, env, filled), False
