"""Which values of a job look like secrets: neither dry-run nor a run directory shows them."""

import re
from collections.abc import Iterator, Sequence

REDACTED = "[redacted]"
_NAME = re.compile(
    r"token|secret|passw|passphrase|credential|(api|access|private|auth)_?key|_key$|^key$", re.IGNORECASE
)
_FLAG = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)


def is_secret(name: str) -> bool:
    """Whether the value of a variable, or flag, of that name may be a secret."""
    return _NAME.search(name.replace("-", "_")) is not None


def redacted(words: Sequence[str]) -> list[str]:
    """A command line without the values of flags that may be secrets: `--api-key=…`, `--token …`."""
    return list(_redacted(words))


def _redacted(words: Sequence[str]) -> Iterator[str]:
    hides_next = False
    for word in words:
        flag = _FLAG.fullmatch(word)
        if hides_next and not flag:
            yield REDACTED
            hides_next = False
            continue
        secret = flag is not None and is_secret(flag[1])
        hides_next = secret and flag is not None and flag[2] is None
        yield f"{word.partition('=')[0]}={REDACTED}" if flag and secret and flag[2] is not None else word
