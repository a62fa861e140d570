"""Text in a job: paths with ~, {placeholders}, and secrets to hide."""

import os.path
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

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


def path_in(directory: str, text: str) -> str:
    """Return `text` relative to `directory`, normalized; a leading ~ of either is kept."""
    joined = text if below_home(text) else os.path.join(directory, text)
    if not below_home(joined):
        return os.path.normpath(joined)
    rest = os.path.normpath(f"./{joined[1:]}")
    return "~" if rest == "." else f"~/{rest}"


# Placeholders such as {rank} in arguments and variables

VARIABLES = {
    **{name: name.upper() for name in ("rank", "local_rank", "node_rank", "world_size", "local_world_size")},
    **{name: name.upper() for name in ("master_addr", "master_port")},
    **{name: f"DISTLAUNCH_{name.upper()}" for name in ("job_id", "run_id")},
}
"""Placeholders with the same value as a variable of the worker."""
PLACEHOLDERS = (*VARIABLES, "port:NAME", "hosts", "hosts:PORT", "hosts_json", "hosts_json:PORT")
IDS = ("job_id", "run_id")
"""Placeholders whose values are known before ranks are placed, even if another launcher places them."""
LAST_PORT = 61439
"""The highest PORT in {hosts:PORT}. A host has up to 4096 ranks, and each uses the next port after PORT."""
# Not compiled in advance, since most jobs have no braces. ${word} is for a shell. {}, {1} and {"a": 1} aren't
# placeholders. In arguments, other {words} are refused. In variables, they are left for templates and JSON.
_WORD = r"([A-Za-z_][\w-]*|(?:port|hosts|hosts_json):[\w-]*)"
_BRACED = rf"(?a)(\$?\{{?)\{{{_WORD}\}}(\}}?)"
_SINGLE = rf"(?a)(?<!\$)\{{{_WORD}\}}"

Values = Callable[[str], "str | None"]
"""A function that returns the value of a placeholder, or None to leave it unchanged."""


def is_placeholder(word: str) -> bool:
    """Check whether {word} is a placeholder. `placeholder_error` checks the part after a colon."""
    return ":" in word or word in PLACEHOLDERS


def fill(text: str, value: Values = lambda word: None, every: bool = True) -> str:
    """Fill in the {placeholders} that have a value (by default, none), and turn {{word}} into {word}.

    Unless `every` is set, unescape only words that are placeholders, as in variables.
    """

    def filled(found: re.Match[str]) -> str:
        left, word, right = found.groups()
        known = is_placeholder(word)
        if left == "$" or not (known or every):
            return found[0]
        if left.endswith("{") and right:
            return left[:-1] + "{" + word + "}"
        text = value(word) if known else None
        return left + ("{" + word + "}" if text is None else text) + right

    return re.sub(_BRACED, filled, text) if "{" in text else text


def literal(text: str, every: bool = True) -> str:
    """Double braces so that `fill` restores `text`."""
    return re.sub(_SINGLE, lambda one: f"{{{one[0]}}}" if every or is_placeholder(one[1]) else one[0], text)


def escaped_in(arguments: Iterable[str]) -> list[str]:
    """Return the {words} in `arguments` that `literal` escapes, in order."""
    return list(dict.fromkeys(word for argument in arguments for word in _single_words(argument)))


def placeholders_in(texts: Iterable[str]) -> list[str]:
    """Return the placeholders that `fill` would fill in, in order."""
    return [word for word in escaped_in(texts) if is_placeholder(word)]


def value_error(text: str) -> str | None:
    """Return why the first {word:…} in `text` can't be filled in, or None."""
    for word in _single_words(text):
        name, colon, detail = word.partition(":")
        port = re.fullmatch("[0-9]{1,5}", detail) and 0 < int(detail) <= LAST_PORT
        if colon and not (detail.isidentifier() if name == "port" else port):
            wanted = "a name, as in {port:store}" if name == "port" else f"a port from 1 to {LAST_PORT}"
            return f"{{{word}}}: expected {wanted}, got {detail!r}; {{{{{word}}}}} passes {{{word}}} on"
    return None


def placeholder_error(argument: str) -> str | None:
    """Return why the first unknown {word} in `argument` can't be filled in, or None."""
    for word in _single_words(argument):
        if not is_placeholder(word):
            close = nearest(word.lower().replace("-", "_"), PLACEHOLDERS)
            known = ", ".join("{" + known + "}" for known in PLACEHOLDERS)
            hint = f"did you mean {{{close}}}?" if close else f"known: {known};"
            return f"unknown placeholder {{{word}}}; {hint} {{{{{word}}}}} passes {{{word}}} to the script"
    return value_error(argument)


def instead_of(word: str) -> str:
    """Return advice on what to use instead of a placeholder that can't be filled in."""
    if word in VARIABLES:
        return f"have the script read {VARIABLES[word]}"
    return "write a port" if word.startswith("port:") else "write the names of the hosts"


def _single_words(argument: str) -> list[str]:
    return [
        found[2]
        for found in (re.finditer(_BRACED, argument) if "{" in argument else ())
        if found[1] != "$" and not (found[1].endswith("{") and found[3])
    ]


# Secrets, which dry-run and run directories hide

REDACTED = "[redacted]"
_NAME = (
    r"(?i)token(?!i[sz])|secret|passw|sshpass|passphrase|credential|cookie|authoriz|(api|access|auth|private)_?key"
    r"|(^|_)(key|(\w*_)?(pass|pwd|pw|pat|o?auth2?|bearer|sig|signature)(_\w*)?)$"
)
_USER = r"(?<=://)[^\s/?#]*@"
"""User and password in a URL."""
_NAMED = r"""(?<![\w.-])(-{0,2})([A-Za-z_][\w.-]*)(?![\w.-])(["']?\s*=|["']?:\s|["']:|\s)"""
"""A whole name in an argument, and the text between it and its value. Searching takes linear time."""


def is_secret(name: str) -> bool:
    """Check whether a variable, flag or key with that name may hold a secret."""
    return re.search(_NAME, re.sub(r"(?<=[a-z\d])(?=[A-Z])|[.-]", "_", name)) is not None


@lru_cache(4096)
def masked(text: str) -> str:
    """Redact the user in a URL, and all text after the first name of a secret: `token=…`, `Bearer …`."""
    text = re.sub(_USER, f"{REDACTED}@", text)
    for found in re.finditer(_NAMED, text):
        dashes, name, between = found.groups()
        if (between.strip() or dashes or name.lower() == "bearer") and is_secret(name):
            return text[: found.end()] + REDACTED
    return text


def is_hidden(name: str, text: str) -> bool:
    """Check whether a variable with that name and value may hold a secret."""
    return is_secret(name) or masked(text) != text


def redacted(words: Sequence[str]) -> list[str]:
    """Hide values in a command that may be secrets: `--api-key=…`, `api_key=…`, `--token …`."""
    flags = (re.fullmatch(r"--?([A-Za-z][\w.-]*)", word) for word in ("", *words))
    hides = [flag is not None and is_secret(flag[1]) for flag in flags]
    return [
        REDACTED if hidden and not word.startswith("-") else masked(word)
        for word, hidden in zip(words, hides, strict=False)
    ]


def is_loopback(host: str) -> bool:
    """Return whether a name or address, such as localhost, refers to the machine that uses it."""
    import ipaddress  # not needed on one machine

    name = host.lower().rstrip(".")
    if name == "localhost" or name.startswith("localhost.") or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
