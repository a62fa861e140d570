"""The errors of the Python API."""

import copy
import pickle

import pytest

import distlaunch as dl
from distlaunch.errors import DistlaunchError, Problem

RESULT = dl.Result("r", "FAILED", 3, "bad", dl.RootCause("bad", "exit", 1, "n", ("x",)), 1, 2.0, {1: 3}, "/r")
ERRORS = (
    dl.DistlaunchError("all"),
    dl.UsageError("words"),
    dl.JobError([Problem("job.yaml", 1, 2, "nodes", "bad"), Problem("job.yaml", 0, 0, "", "worse")]),
    dl.RunError(RESULT),
    dl.RankError(RESULT, 1, "Traceback …"),
)


def test_these_are_all_public_errors() -> None:
    public = [getattr(dl, name) for name in dl.__all__]
    errors = {each for each in public if isinstance(each, type) and issubclass(each, BaseException)}
    assert {*map(type, ERRORS)} == errors


@pytest.mark.parametrize("error", ERRORS)
def test_errors_survive_the_way_out_of_a_process_pool(error: DistlaunchError) -> None:
    protocols = range(pickle.HIGHEST_PROTOCOL + 1)
    for got in (copy.copy(error), *(pickle.loads(pickle.dumps(error, protocol)) for protocol in protocols)):
        assert (type(got), str(got), got.args, vars(got)) == (
            type(error),
            str(error),
            error.args,
            vars(error),
        )
