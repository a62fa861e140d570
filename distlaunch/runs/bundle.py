"""A run's files for others to read: no secrets and, on request, no names of hosts or home directories."""

import json
import os
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from distlaunch.job.text import REDACTED, is_secret, masked
from distlaunch.observers.recording import STDERR_BYTES
from distlaunch.observers.run_directory import OUTPUT_INDEX, STATUS, fd_of
from distlaunch.runs.html import page
from distlaunch.runs.report import report_of
from distlaunch.runs.run import Run
from distlaunch.supervisor.status import document_of, status_of

PAGE = "report.html"
SHORTEST = 6
"""Minimum characters of a secret value to search for. Shorter values could occur in any text."""
_TEXTS = (".out", ".err", ".stack", ".log")
"""Suffixes of files with output from ranks and setups. A bundle contains only the end of each."""
_NULLS = ("", "~", "null", "Null", "NULL")
"""The spellings of YAML's null, which stands for the value in the environment."""
_OWN = re.compile(r"\.$|attempt_?\d+(/\d+)?$")
"""Directories with distlaunch's files, not the job's."""
_BROAD = re.compile("(?i)token|secret|key|passw|credential|auth")
"""Names of variables whose values are secrets wherever they occur."""
_SHAPES = re.compile(
    r"\b(?:hf_|gh[opsur]_|github_pat_|glpat-|sk-|xox[abprs]-|AKIA|ASIA|AIza)[\w-]{12,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)"
)
"""Tokens of well-known services, and private keys, that can be recognized without a name."""
_PASSWORD = re.compile(r"(?<=://)[^\s/?#@:]*:([^\s/?#@]{4,})@")
"""The password in a URL."""
_BEGINS, _ENDS = (re.compile(f"-----{word} [A-Z ]*PRIVATE KEY-----") for word in ("BEGIN", "END"))
_ENCODED = re.compile(r"(?:\[\S+\]:? *)?[A-Za-z0-9+/]{56,}={0,2}\s*")
"""A line inside a private key, in case the key's first line is missing."""
_HOMES = re.compile(r"/(?:home|Users)/[^/\s\"':,;]+|(?<![\w.-])/root(?![\w.-])")


class Redactor:
    """A filter that hides secrets: `values`, and anything named or shaped like a secret. Replaces `names`."""

    def __init__(self, values: Iterable[str], names: Mapping[str, str]) -> None:
        self._values = _pattern(values, "{}")
        self._names = _pattern(names, r"(?<![\w.-]){}(?![\w-])") if names else None
        self._replaced = names

    def text(self, text: str) -> str:
        """Return a text without secrets."""
        return "\n".join(self._lines(text.split("\n")))

    def document(self, value: Any, name: str = "") -> Any:
        """Return a JSON value without secrets; `name` is its key."""
        if isinstance(value, dict):
            return {self._key(key): self.document(inner, key) for key, inner in value.items()}
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            return self._lines(value)
        if isinstance(value, list):
            return [self.document(inner, name) for inner in value]
        if not isinstance(value, str):
            return value
        hidden = value and (is_secret(name) or (name.isupper() and _BROAD.search(name)))
        return REDACTED if hidden else self.text(value)

    def _key(self, key: str) -> str:
        return key if re.fullmatch("[a-z_]*", key) else self.known(key)  # field names are kept

    def known(self, text: str) -> str:
        """Return a text without the known secrets, and with the names replaced."""
        return self._renamed(self._without_values(text))

    def _without_values(self, text: str) -> str:
        return self._values.sub(REDACTED, text) if self._values else text

    def _renamed(self, text: str) -> str:
        if self._names is None:
            return text
        return self._names.sub(lambda found: self._replaced[found[0]], _HOMES.sub("~", text))

    def _lines(self, lines: Sequence[str]) -> list[str]:
        """Return consecutive lines or texts without secrets. A private key spans several lines."""
        ends = next((i for i, line in enumerate(lines) if _ENDS.search(line)), -1)
        begins = next((i for i, line in enumerate(lines) if _BEGINS.search(line)), len(lines))
        inside, found = ends < begins and ends >= 0, []
        for line in lines:
            if "\n" in line:
                found.append(self.text(line))
                continue
            was_inside, rest = inside, line
            if inside and (end := _ENDS.search(line)):
                inside, rest = False, line[end.end() :]
            elif not inside and _BEGINS.search(line) and not _ENDS.search(line):
                inside = True
            hidden = (was_inside and inside) or _ENCODED.fullmatch(line)
            # Names come last: a URL without its user's name doesn't show that a password follows.
            shown = self._renamed(masked(_SHAPES.sub(REDACTED, self._without_values(rest))))
            found.append(REDACTED if hidden else shown)
        return found


def _pattern(words: Iterable[str], form: str) -> re.Pattern[str] | None:
    """Return `form` with a pattern for any of the words in place of {}; None if there are no words."""
    ordered = sorted({word for word in words if word}, key=len, reverse=True)
    return re.compile(form.format(f"(?:{'|'.join(map(re.escape, ordered))})")) if ordered else None


def bundle_of(
    run: Run, environ: Mapping[str, str], anonymous: bool = False
) -> tuple[dict[str, bytes], list[str]]:
    """Return a bundle's files, keyed by name, and the variables with unknown values. Raises `HistoryError`.

    All files are searched for the values of the variables in `environ` that the job inherits, or whose names
    suggest a secret. The values that other variables had in the environment of the run can't be hidden.
    """
    names = _names(run.directory, (".json", ".jsonl"))
    documents = {name: list(_documents(run.directory, name)) for name in names}
    pairs = [*_pairs(documents), *_pairs(_job_file(run)), *environ.items()]
    inherited = {name for name, value in pairs if isinstance(value, dict) and value.get("inherited")}
    unknown = inherited - {name for name, value in pairs if isinstance(value, str) and value not in _NULLS}
    hide = Redactor(_secrets(pairs, inherited), _hosts(documents) if anonymous else {})
    found = {}
    for name, lines in documents.items():
        indent = None if name.endswith(".jsonl") else 1
        texts = (json.dumps(hide.document(line), indent=indent) + "\n" for line in lines)
        found[name] = "".join(texts).encode()
    for name in _names(run.directory, _TEXTS):
        found[name] = hide.text(_end_of(run.directory, name)).encode()
    # The page is made from the bundle's files, so that it reveals no more than they do.
    with tempfile.TemporaryDirectory(prefix="distlaunch-bundle-") as directory:
        for name, data in found.items():
            path = Path(directory, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        with suppress(OSError), open(fd_of(run.directory, OUTPUT_INDEX), "rb") as file:
            Path(directory, OUTPUT_INDEX).write_bytes(file.read())
            os.utime(Path(directory, OUTPUT_INDEX), (0, os.fstat(file.fileno()).st_mtime))  # for `heard`
        status = status_of(hide.document(document_of(run.status)))
        report = report_of(run._replace(directory=directory, status=status))
        report.explanation = report.explanation._replace(differs={})  # from another run's files
        shown = page(report)
    shown = hide.known(shown.replace(directory, hide.known(run.directory)))
    return {PAGE: shown.encode(errors="replace"), **found}, sorted(unknown)


def _names(directory: str, endings: tuple[str, ...]) -> list[str]:
    """Return the files of a run and of its attempts whose names have one of these `endings`."""
    return sorted(
        os.path.relpath(os.path.join(place, name), directory)
        for place, _, names in os.walk(directory)
        for name in names
        if name.endswith(endings) and _OWN.match(os.path.relpath(place, directory))
    )


def _documents(directory: str, name: str) -> Iterator[Any]:
    """Read the JSON document in a file, or the documents in its lines."""
    with suppress(OSError), open(fd_of(directory, name), "rb") as file:
        data = file.readline() if name == STATUS else file.read()  # an earlier, longer status may follow
        for piece in data.split(b"\n") if name.endswith(".jsonl") else [data]:
            with suppress(ValueError, RecursionError):  # the last line may be incomplete
                yield json.loads(piece)


def _end_of(directory: str, name: str) -> str:
    """Read the last complete lines of a file. Part of a line could be part of a secret."""
    with suppress(OSError), open(fd_of(directory, name), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - STDERR_BYTES))
        data = file.read()
        return (data if size <= STDERR_BYTES else data.partition(b"\n")[2]).decode(errors="replace")
    return ""


def _job_file(run: Run) -> Any:
    """Return the content of the run's job file, with all values as written; None if it can't be read."""
    unusable = (OSError, ValueError, RecursionError, yaml.YAMLError)
    with suppress(*unusable), open(run.status.file, encoding="utf-8") as file:
        return yaml.BaseLoader(file).get_single_data()
    return None


def _secrets(pairs: Iterable[tuple[str, Any]], inherited: Collection[str]) -> Iterator[str]:
    """Yield the secret values of variables and settings."""
    for name, value in pairs:
        yield from _PASSWORD.findall(value) if isinstance(value, str) else ()
        secret = is_secret(name) or (name.isupper() and _BROAD.search(name)) or name in inherited
        if secret and isinstance(value, str) and not (value.startswith("/") and os.path.exists(value)):
            yield from (word for word in (value, *value.split("\n")) if len(word) >= SHORTEST)


def _hosts(documents: Mapping[str, list[Any]]) -> dict[str, str]:
    """Return a replacement for each host name, and for each address that a job file gives to a host."""
    names = [
        part
        for name, value in _pairs(documents)
        if name in ("host", "hostname", "label", "address") and isinstance(value, str) and value
        for part in dict.fromkeys((value, value.partition(".")[0] if not value[:1].isdigit() else value))
    ]
    names = [name for name in dict.fromkeys(names) if not re.fullmatch(r"node\d+|localhost|127\..*|.", name)]
    return {name: f"host{number}" for number, name in enumerate(names)}


def _pairs(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield all keys, at any depth, and all command-line flags, each with its value."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield str(name), inner
            yield from _pairs(inner)
    elif isinstance(value, list):
        words = [word for word in value if isinstance(word, str)]
        yield from ((word.lstrip("-"), after) for word, after in pairwise(words) if word.startswith("-"))
        yield from ((name.lstrip("-"), after) for name, _, after in (word.partition("=") for word in words))
        for inner in value:
            yield from _pairs(inner)
