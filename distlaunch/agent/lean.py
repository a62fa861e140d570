"""What an agent needs of `signal`, `socket` and `json`, without what these import: a third of its start.

CPython has the parts that matter in C, under other names; `signal` and `socket` wrap them in enums, `json` in
regular expressions. Where an interpreter has them otherwise, the modules themselves are used.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    import socket
    from collections import deque
    from typing import Any, Callable, Tuple

    Pair = Tuple[Callable[[Any], str], Callable[[str], Any]]
else:
    try:
        import _signal as signal
    except ImportError:
        import signal
    try:
        import _socket as socket
    except ImportError:
        import socket
    try:
        from _collections import deque
    except ImportError:
        from collections import deque

__all__ = ["decode", "deque", "encode", "signal", "socket"]


class _Strict:
    """How `_json` is to read: as `json.JSONDecoder` tells it, but that NaN and Infinity are refused."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float, parse_int = float, int

    @staticmethod
    def parse_constant(name: str) -> "Any":
        raise ValueError("%s is not JSON" % name)


def _by_json() -> "Pair":
    """`encode` and `decode`."""
    import json

    def encode(value: "Any") -> str:
        return json.dumps(value, separators=(",", ":"))

    def decode(text: str) -> "Any":
        return json.loads(text, parse_constant=_Strict.parse_constant)

    return encode, decode


def _by_c() -> "Pair":
    """The same; raises whatever there is where `_json` is not the one that we know."""
    import _json

    def refuse(value: "Any") -> "Any":
        raise TypeError("%s is not for JSON" % type(value).__name__)

    quoted = _json.encode_basestring_ascii
    write = _json.make_encoder(None, refuse, quoted, None, ":", ",", False, False, True)
    reader = _Strict  # type: Any
    scan = _json.make_scanner(reader)

    def encode(value: "Any") -> str:
        return "".join(write(value, 0))

    def decode(text: str) -> "Any":
        try:
            value, end = scan(text, 0)
        except (StopIteration, SystemError):  # it wants to raise an error of json's, which is not there
            end = -1
        return value if end == len(text) else _by_json()[1](text)  # which says what is wrong

    known = {"a": [1, 0.5, None, True], "\u00e9": {"b": "\n"}}
    if encode(known) != '{"a":[1,0.5,null,true],"\\u00e9":{"b":"\\n"}}' or decode(encode(known)) != known:
        raise ValueError("not as expected")
    return encode, decode


try:
    encode, decode = _by_c()
except Exception:
    encode, decode = _by_json()
