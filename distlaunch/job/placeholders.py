"""The {rank} and so on that are filled in in the arguments of a job."""

import re
from collections.abc import Iterable, Mapping

PLACEHOLDERS = (
    "rank",
    "local_rank",
    "node_rank",
    "world_size",
    "local_world_size",
    "master_addr",
    "master_port",
)
_PLACEHOLDER = re.compile(r"(\{?)\{(" + "|".join(PLACEHOLDERS) + r")\}(\}?)")


def fill(argument: str, values: Mapping[str, str]) -> str:
    """`argument` with the {rank} and so on for which there are values; {{rank}} becomes {rank}."""

    def filled(found: re.Match[str]) -> str:
        left, name, right = found.groups()
        if left and right:
            return "{" + name + "}"
        return left + values.get(name.upper(), "{" + name + "}") + right

    return _PLACEHOLDER.sub(filled, argument)


def literal(argument: str) -> str:
    """What `fill` makes `argument` of, whatever it holds."""
    return re.sub(r"\{(?:" + "|".join(PLACEHOLDERS) + r")\}", r"{\g<0>}", argument)


def placeholders_in(arguments: Iterable[str]) -> list[str]:
    """The names that `fill` would fill in, in the order of PLACEHOLDERS."""
    found = {
        name
        for argument in arguments
        for left, name, right in _PLACEHOLDER.findall(argument)
        if not (left and right)
    }
    return [name for name in PLACEHOLDERS if name in found]
