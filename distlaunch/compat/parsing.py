"""torchrun's command line: abbreviations, spellings and PET_ variables.

What follows the script is the script's: argparse's prefix matching eats some of it, this parser never does.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from distlaunch.compat.flags import FLAGS, Flag, Flags
from distlaunch.errors import UsageError

_BY_LETTER = {flag.letter: flag for flag in FLAGS if flag.letter}


def parse_flags(words: Sequence[str], environ: Mapping[str, str], filled: Collection[str] = ()) -> Flags:
    """The command line `words`. Raises `UsageError` as argparse would, in a line.

    Flags whose value is in a word of `filled`, which a shell would have filled in, are left out.
    """
    values: dict[str, Any] = {}
    unfilled: list[tuple[str, str]] = []
    rest = list(words)
    while rest and (_is_flag(rest[0]) or _hides_flags(rest, filled)):
        word = rest.pop(0)
        if not _is_flag(word):
            unfilled.append(("", word))
            continue
        flag, value = _flag_of(word)
        if flag.kind == "switch" and value and not word.startswith("--"):
            rest.insert(0, f"-{value}")  # -mr3 is -m -r3
            value = None
        elif value is None and flag.kind != "switch":
            value = word = _next_value(flag, rest)
        if word in filled:
            unfilled.append((flag.field, str(value)))
        else:
            values[flag.field] = _convert(flag, value)
    values |= _from_environment(environ, values)
    given = frozenset(values)
    if rest and rest[0] == "--":
        rest.pop(0)
    if not rest and not values.get("help"):
        raise UsageError("no script given; usage: distlaunch torchrun [flags] SCRIPT [its arguments]")
    script, args = "".join(rest[:1]), tuple(rest[1:])
    return Flags(**values, script=script, args=args, given=given, unfilled=tuple(unfilled))


def _is_flag(word: str) -> bool:
    return word.startswith("-") and word not in ("-", "--")


def _hides_flags(rest: Sequence[str], filled: Collection[str]) -> bool:
    """Whether the first word, as $FLAGS, stands for flags and not for the script: what follows tells."""
    following = next((word for word in rest if word not in filled), "")
    name = following.partition("=")[0].lstrip("-").replace("-", "_")
    known = _is_flag(following) and any(name in (flag.field, flag.letter) for flag in FLAGS)
    return rest[0] in filled and (known or following.endswith(".py"))


def _from_environment(environ: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Any]:
    """The values that PET_ variables give to flags not on the command line."""
    found: dict[str, Any] = {}
    for flag in FLAGS:
        name = flag.variable
        text = environ.get(name) if name else None
        if text is None or flag.field in given:
            continue
        if flag.kind == "switch":
            found[flag.field] = text.strip().lower() not in ("", "0", "false")
        else:
            found[flag.field] = _convert(flag, text, name)
    return found


def _flag_of(word: str) -> tuple[Flag, str | None]:
    """The flag that a word begins with, and the value that it carries, if any."""
    if not word.startswith("--"):
        flag = _BY_LETTER.get(word[1])
        if flag is None:
            raise UsageError(f"torchrun has no flag {word}")
        attached = word[2:].removeprefix("=")
        return flag, attached or None
    name, equals, value = word[2:].partition("=")
    return _named(name), value if equals else None


def _named(name: str) -> Flag:
    """The flag of that name, or the only one that begins with it: argparse takes abbreviations."""
    wanted = name.replace("-", "_")
    exact = [flag for flag in FLAGS if flag.field == wanted]
    found = exact or [flag for flag in FLAGS if flag.field.startswith(wanted)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise UsageError(f"torchrun has no flag --{name}; a flag of the script goes after the script")
    names = ", ".join(flag.name for flag in found)
    raise UsageError(f"--{name} could mean {names}")


def _next_value(flag: Flag, rest: list[str]) -> str:
    negative = bool(rest) and rest[0][:1] == "-" and rest[0][1:2].isdigit()
    if not rest or (rest[0].startswith("-") and not negative):
        raise UsageError(f"{flag.name} needs a value")
    return rest.pop(0)


def _convert(flag: Flag, value: str | None, name: str = "") -> Any:
    """The value of a text; `name` is the flag or variable that the user gave it to."""
    name = name or flag.name
    if flag.kind == "switch":
        if value is not None:
            raise UsageError(f"{name} takes no value")
        return True
    text = str(value)
    if flag.choices and text not in flag.choices:
        raise UsageError(
            f"{name}: expected {' or '.join((', '.join(flag.choices[:-1]), flag.choices[-1]))}, got {text!r}"
        )
    try:
        number = {"text": str, "whole": int, "number": float}[flag.kind](text)
    except ValueError:
        raise UsageError(f"{name}: expected a number, got {text!r}") from None
    if not isinstance(number, str) and not number >= 0:
        raise UsageError(f"{name}: expected a number ≥ 0, got {text!r}")
    return number
