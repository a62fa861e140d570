"""YAML that every parser reads alike: Kubernetes' takes 1e-4 for a number, PyYAML for a word."""

import re
from collections.abc import Iterable
from typing import Any

import yaml

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_BLOCK = re.compile(r"[!-~](?:[ -~]*[!-~])?(?:\n(?:[ -~]*[!-~])?)+")
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    style = None if plain else "|" if _BLOCK.fullmatch(text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _string)


def yaml_text(documents: Iterable[Any]) -> str:
    """One document after another."""
    text: str = yaml.dump_all(
        documents,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=float("inf"),
        explicit_start=True,
    )
    return text
