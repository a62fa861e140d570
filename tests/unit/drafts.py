"""Shared parts of the tests of imports: what a draft of a job file has."""

import re
from typing import Any

import yaml

from distlaunch.compat.draft import Draft
from distlaunch.job.keys import JOB, with_sections
from tests.unit.samples import SECTIONS, spec_of

CPUS = 6


def keys_of(draft: Draft) -> dict[str, Any]:
    """The keys as the text has them; that it is a job file, and no comment looks like a key, is tried."""
    text = draft.text()
    spec_of(text)
    loaded: dict[str, Any] = yaml.safe_load(text)
    assert loaded == draft.document()["job"]
    assert list(loaded) == [key for key in with_sections(SECTIONS).fields if key in loaded]
    assert not set(re.findall(r"(?m)^\s*# ([a-z_]+): ", text)) & set(JOB.fields)
    return loaded


def comments(draft: Draft) -> str:
    return "\n".join(line for line in draft.text().splitlines() if line.startswith("#"))
