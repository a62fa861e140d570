"""The declared keys as a whole: the JSON schema, the reference, and where a list stands."""

from collections.abc import Sequence

from distlaunch.job.types.records import Either, ListOf, MapOf, Record, Short
from distlaunch.job.types.values import Schema, Type


def json_schema(job: Record) -> Schema:
    """JSON Schema (draft 2020-12) of a job file whose keys are those of `job`, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "distlaunch job",
        **job.schema(),
    }


def reference(
    record: Record, prefix: str = "", shown: Sequence[Record] = ()
) -> list[tuple[str, str, str, str]]:
    """(key, type, explanation, default) of every key, sections before their keys.

    A section that several keys have is told of once; `shown` are those that have been.
    """
    rows: list[tuple[str, str, str, str]] = []
    for key, entry in record.fields.items():
        rows.append((prefix + key, entry.kind.name, entry.doc, record.default_text(key)))
        for inner, inner_prefix in _sections(entry.kind, prefix + key):
            if not any(inner is other for other in shown):
                rows += reference(inner, inner_prefix, shown)
                shown = [*shown, inner]
    return rows


def list_at(record: Record, steps: Sequence[str]) -> tuple[str, int, list[str]]:
    """The key of the list that `steps` lead into, how many of them lead to it, and those inside its item.

    ("", 0, []) where they lead into none.
    """
    for i, step in enumerate(steps[:-1]):
        kind = record.fields[step].kind if step in record.fields else None
        listed = isinstance(kind, ListOf) or (isinstance(kind, Either) and kind.items is not None)
        if listed and steps[i + 1].isdecimal():
            return ".".join(steps[: i + 1]), i + 1, list(steps[i + 2 :])
        if not isinstance(kind, Record):
            break
        record = kind
    return "", 0, []


def _sections(kind: Type, path: str) -> list[tuple[Record, str]]:
    if isinstance(kind, Record | Short):
        return [(kind.record if isinstance(kind, Short) else kind, f"{path}.")]
    if isinstance(kind, ListOf | MapOf) and isinstance(kind.item, Record):
        return [(kind.item, f"{path}[]." if isinstance(kind, ListOf) else f"{path}.NAME.")]
    if isinstance(kind, Either) and isinstance(kind.entries, Record):
        return [(kind.entries, f"{path}.")]
    if isinstance(kind, Either) and isinstance(kind.items, ListOf) and isinstance(kind.items.item, Either):
        record = kind.items.item.entries
        return [(record, f"{path}[].")] if isinstance(record, Record) else []
    return []
