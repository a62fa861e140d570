"""The JSON schema for editors: valid job files, and plain mistakes."""

import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given

from distlaunch.errors import JobError
from distlaunch.job.keys import json_schema, reference
from distlaunch.schedulers import job_keys
from tests.unit.samples import bounded, job_documents, spec_of
from tests.unit.test_job_keys import KEYS, SECTIONS
from tests.unit.test_job_mistakes import PLAIN_MISTAKES

CONFIGS = Path(__file__).parents[2] / "configs"
SCHEMA = jsonschema.Draft202012Validator(json_schema(job_keys()))


def errors_of(document: object) -> list[str]:
    return [error.message for error in SCHEMA.iter_errors(document)]


@given(job_documents)
@bounded(300)
def test_any_document_of_known_keys_is_valid_or_refused_with_its_place(document: dict[str, Any]) -> None:
    try:
        spec = spec_of(yaml.safe_dump(document))
    except JobError as error:
        assert all(problem.line > 0 and problem.text for problem in error.problems)
    else:
        assert errors_of(document) == []
        assert spec.nodes
        assert os.path.isabs(spec.program.workdir)


GOOD = [
    *(text for key, (text, *_) in KEYS.items() if ".on" not in key),  # to PyYAML, `on` is true
    *(f"{section}: {text}" for section, (text, _) in SECTIONS.items()),
    "nodes: 2\ngpus_per_node: auto",
    "command: [./a.out, 3]\nargs: [--rank, '{rank}']",
    "timeouts: {join: 1.5 h, job: 1h30m, stop: 1m 5.5s}",
    "cpu_binding: cores",
]
EXAMPLES = {str(path.relative_to(CONFIGS)): path.read_text() for path in CONFIGS.rglob("*.yaml")}


@pytest.mark.parametrize("text", [*GOOD, *(pytest.param(text, id=path) for path, text in EXAMPLES.items())])
def test_good_jobs_and_every_example_are_valid(text: str) -> None:
    assert errors_of(yaml.safe_load(text)) == []


@pytest.mark.parametrize("text", [*PLAIN_MISTAKES, "[]", "script"])
def test_plain_mistakes_are_marked(text: str) -> None:
    assert errors_of(yaml.safe_load(text))


def test_every_key_of_the_reference_is_described_in_the_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema(job_keys()))
    text = json.dumps(json_schema(job_keys()))
    for _, _, explanation, _ in reference(job_keys()):
        assert json.dumps(explanation)[1:-1] in text
