"""A controller on a machine without agents, simulated because no such machine is available."""

import pytest

from distlaunch.errors import DistlaunchError
from distlaunch.here import cpu_count, runs_ranks
from distlaunch.launch import opening, port_check
from tests.unit.samples import spec_of


def test_ranks_and_dials_on_another_system_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("script: t.py\nnodes: [a, b]")
    assert [node.label for node in port_check._with_here(spec, "a").nodes] == ["a", "b", "here"]
    assert runs_ranks() and cpu_count() >= 1
    monkeypatch.setattr("sys.platform", "darwin")
    assert port_check._with_here(spec, "a") == spec
    assert cpu_count() >= 1 and not runs_ranks()
    with pytest.raises(DistlaunchError, match="ranks run only on Linux"):
        opening.open_link(spec_of("script: t.py"), 0)
