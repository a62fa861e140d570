"""The meaning of text in a job: paths with a ~, arguments with {placeholders}, hidden secrets."""

import os.path
import re
from collections.abc import Iterable, Mapping, Sequence

from distlaunch.job.document import nearest

# Paths: relative to a directory, or below a home directory


def below_home(text: str) -> bool:
    """Check whether `text` begins with the ~ of the current user."""
    return text == "~" or text.startswith("~/")


def home_error(text: str) -> str | None:
    """Return why the leading ~ of `text` can't be used, or None."""
    name = text.partition("/")[0]
    if not name.startswith("~") or name == "~":
        return None
    return f"{name} is not expanded, only ~/ is: write the full path, or ./{name} for a file of that name"


def path_in(folder: str, text: str) -> str:
    """Return `text` relative to `folder`, normalized; a leading ~ of either is kept."""
    joined = text if below_home(text) else os.path.join(folder, text)
    if not below_home(joined):
        return os.path.normpath(joined)
    rest = os.path.normpath(f"./{joined[1:]}")
    return "~" if rest == "." else f"~/{rest}"


# Placeholders such as {rank} in arguments

PLACEHOLDERS = (
    "rank",
    "local_rank",
    "node_rank",
    "world_size",
    "local_world_size",
    "master_addr",
    "master_port",
)
# Not compiled in advance: most jobs have no braces in their arguments. Other {words} are refused, except
# ${word}, which is for a shell; {}, {1} and {"a": 1} have no meaning here.
_SINGLE = r"(?a)\{(?:" + "|".join(PLACEHOLDERS) + r")\}|(?<!\$)\{[A-Za-z_][\w-]*\}"
_BRACED = r"(?a)(\{?)\{([A-Za-z_][\w-]*)\}(\}?)"


def fill(argument: str, values: Mapping[str, str]) -> str:
    """Fill in the {placeholders} with a value; {{word}} becomes {word}."""

    def filled(found: re.Match[str]) -> str:
        left, name, right = found.groups()
        if left and right:
            return "{" + name + "}"
        value = values.get(name.upper()) if name in PLACEHOLDERS else None
        return left + ("{" + name + "}" if value is None else value) + right

    return re.sub(_BRACED, filled, argument) if "{" in argument else argument


def literal(argument: str) -> str:
    """Double braces so that `fill` restores `argument`."""
    return re.sub(_SINGLE, r"{\g<0>}", argument)


def escaped_in(arguments: Iterable[str]) -> list[str]:
    """Return the {words} in `arguments` that `literal` escapes, in order."""
    return list(dict.fromkeys(name for argument in arguments for name in _single_words(argument)))


def placeholders_in(arguments: Iterable[str]) -> list[str]:
    """Return the names that `fill` would fill in, in the order of PLACEHOLDERS."""
    found = {name for argument in arguments for name in _single_words(argument)}
    return [name for name in PLACEHOLDERS if name in found]


def placeholder_error(argument: str) -> str | None:
    """Return why the first unknown {word} in `argument` can't be filled in, or None."""
    for name in _single_words(argument):
        if name not in PLACEHOLDERS:
            close = nearest(name.lower().replace("-", "_"), PLACEHOLDERS)
            known = ", ".join("{" + known + "}" for known in PLACEHOLDERS)
            hint = f"did you mean {{{close}}}?" if close else f"known: {known};"
            return f"unknown placeholder {{{name}}}; {hint} {{{{{name}}}}} passes {{{name}}} to the script"
    return None


def _single_words(argument: str) -> list[str]:
    return [
        found[2]
        for found in (re.finditer(_BRACED, argument) if "{" in argument else ())
        if not (found[1] and found[3])
        and (found[2] in PLACEHOLDERS or argument[: found.start(2) - 1][-1:] != "$")
    ]


# Values hidden by dry-run and in run directories

REDACTED = "[redacted]"
_NAME = r"(?i)token|secret|passw|passphrase|credential|(api|access|private|auth)_?key|_key$|^key$"
_FLAG = r"(?s)--?([A-Za-z][\w.-]*)(?:=(.*))?"


def is_secret(name: str) -> bool:
    """Check whether a variable or flag of that name may hold a secret."""
    return re.search(_NAME, name.replace("-", "_")) is not None


def redacted(words: Sequence[str]) -> list[str]:
    """Hide the values of flags that may be secrets in a command: `--api-key=…`, `--token …`."""
    shown, hides_next = [], False
    for word in words:
        flag = re.fullmatch(_FLAG, word)
        if flag is None:
            shown.append(REDACTED if hides_next else word)
            hides_next = False
            continue
        secret, given = is_secret(flag[1]), flag[2] is not None
        hides_next = secret and not given
        shown.append(f"{word.partition('=')[0]}={REDACTED}" if secret and given else word)
    return shown
