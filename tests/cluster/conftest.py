"""The hosts that the tests of this folder share."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Bed, Site, bed_of, why_not


@pytest.fixture(scope="session")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """Four hosts, host1 … host4."""
    if reason := why_not():
        pytest.skip(reason)
    with bed_of(4, tmp_path_factory.mktemp("hosts") / "bed") as bed:
        yield bed


@pytest.fixture
def site(bed: Bed, tmp_path: Path) -> Iterator[Site]:
    """A place to start jobs from, that ends with all that it started."""
    with contextlib.ExitStack() as stack:
        yield Site(bed, tmp_path, stack)
