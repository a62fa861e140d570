"""The schemas of what `--json` prints and of the files of a run: real documents fit, with no other fields."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from distlaunch.cli.schemas import DOCUMENTS
from tests.harness import distlaunch, write_job

FAILS = """
    import os, sys
    open("out.txt", "w").write("x")
    sys.exit("no such thing" if os.environ["RANK"] == "1" else 0)
"""
JOB = "nodes: 2\ngpus_per_node: 0\nrestarts: 1\ncollect: [out.txt]\nsync: true\n"
COMMANDS = {
    "plan": ("dry-run", "job.yaml"),
    "findings": ("check", "job.yaml"),
    "ports": ("check-port", "job.yaml"),
    "why": ("why",),
    "report": ("report",),
    "run": ("wait",),
    "runs": ("ps", "-a", "."),
}


def strict(schema: Any) -> Any:
    """The schema, whose objects have no other fields."""
    if isinstance(schema, dict):
        closed = {"additionalProperties": False} if "properties" in schema else {}
        return {**{name: strict(inner) for name, inner in schema.items()}, **closed}
    return [*map(strict, schema)] if isinstance(schema, list) else schema


def fits(name: str, *documents: Any) -> None:
    schema = json.loads(distlaunch("schema", "--of", name, status=0).stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    for document in documents:
        jsonschema.validate(document, strict(schema), jsonschema.Draft202012Validator)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a job of two nodes has failed twice, with what `run` printed."""
    directory = tmp_path_factory.mktemp("job")
    done = distlaunch("run", str(write_job(directory, FAILS, JOB)), "--json", status=1)
    (directory / "printed.json").write_text(done.stdout)
    return directory


@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_command_prints_fits_its_schema(name: str, place: Path) -> None:
    done = distlaunch(*COMMANDS[name], "--json", cwd=place)
    fits(name, json.loads(done.stdout))


def test_the_files_of_a_run_fit_their_schemas(place: Path) -> None:
    (run,) = (place / "runs").iterdir()
    result = json.loads((place / "printed.json").read_text())
    assert all(result[key] for key in ("cause", "restarts", "collected", "code"))
    fits("result", result, json.loads((run / "summary.json").read_text()))
    fits("plan", json.loads((run / "plan.json").read_text()))
    fits("events", *map(json.loads, (run / "events.jsonl").read_text().splitlines()))


def test_the_result_of_a_job_that_can_not_begin_fits(tmp_path: Path) -> None:
    done = distlaunch("run", str(write_job(tmp_path, "", "nonesuch: 1")), "--json", status=2)
    fits("result", json.loads(done.stdout))


def test_a_document_that_does_not_exist_is_refused_with_those_that_do() -> None:
    refused = distlaunch("schema", "--of", "nonesuch", status=2)
    listed = ", ".join(["job", *DOCUMENTS])
    assert refused.stderr == f"distlaunch: no schema 'nonesuch'; schemas are available for {listed}\n"
    shown = distlaunch("schema", "--help", env={"PATH": "/usr/bin:/bin", "COLUMNS": "300", "TERM": "dumb"})
    assert all(name in shown.stdout for name in DOCUMENTS)
