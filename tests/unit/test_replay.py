"""The history of a run: what is written, how it is read again, and the tool that replays it."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.agent.messages import PortHeld, WorkerExited
from distlaunch.job.spec import EnvValue, JobSpec, TorchrunLogs
from distlaunch.plan.placement import Facts
from distlaunch.runs.replay import HistoryError, Moment, loaded, replay, typed
from distlaunch.supervisor.codec import BEGAN, VERSION, beginning, fields_of, without_secrets
from distlaunch.supervisor.events import AgentUp, LinkEnded, Suspended
from distlaunch.transports.failure import Kind, LinkFailure
from tests.unit.samples import bounded, spec_of

JOB = """{script: t.py, gpus_per_node: 0, restarts: {max: 2}, timeouts: {join: 5s},
spares: [{host: c, args: []}], nodes: [a, {host: b, gpus: 2, env: {B: 1}, args: [--token=secret, x]}],
logs: {console: [0, 1]}, cpu_binding: ["0-3", "4-7"], ssh: {options: [Compression=no]},
env: {A: b, TOKEN: null, GLOO_SOCKET_IFNAME: null}}"""
ENVIRON = {"TOKEN": "secret", "GLOO_SOCKET_IFNAME": "eth7"}


def line(name: str, at: float = 0.0, **fields: Any) -> str:
    return json.dumps({"t": at, "time": 1.7e9, "event": name, **fields})


def first_line(spec: JobSpec) -> str:
    return line(BEGAN, **beginning(spec, 0.5))


def replayed(text: str) -> list[Moment]:
    return list(replay(loaded(text)))


def test_a_job_survives_its_history_without_secrets() -> None:
    spec = spec_of(JOB, ENVIRON)
    text = first_line(spec)
    assert "secret" not in text
    assert {"limits", "ssh"} <= json.loads(text)["spec"].keys()
    assert not {"limits", "ssh"} & json.loads(PLAIN)["spec"].keys(), "defaults are not written down"
    assert "eth7" in text, "the supervisor judges the names of interfaces"
    assert first_line(replayed(text)[0].state.spec) == text
    assert without_secrets(spec).program.env["TOKEN"] == EnvValue("", inherited=True)


def test_a_torchrun_job_survives_its_history() -> None:
    spec = spec_of("script: t.py\nprocs_per_node: 2")
    logs = TorchrunLogs(redirects={0: 1, 1: 2}, tee=3, local_ranks=frozenset({1}))
    spec = spec._replace(logs=spec.logs._replace(torchrun=logs))
    assert replayed(first_line(spec))[0].state.spec == spec


def test_an_exit_survives_json() -> None:
    event = WorkerExited(0, 1, -9, 12.5, {"message": "m", "callstack": "c"}, 1, (5, 6), "said")
    assert typed(WorkerExited, json.loads(json.dumps(fields_of(event)))) == event


PLAIN = first_line(spec_of("script: t.py"))


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "contains no complete line"),
        ([line("AgentUp")], "line 1: the beginning of the run is missing; read the logs"),
        ([line(BEGAN, version=VERSION - 1)], "line 1: recorded by another version of distlaunch, in"),
        ([line(BEGAN, version=VERSION + 1, distlaunch="9.1")], "recorded by version 9.1 of distlaunch, in a"),
        ([PLAIN, line("Nonsense")], "line 2: unknown event: 'Nonsense'"),
        ([PLAIN, line("Swept", node="a")], "line 2: Swept: "),
        ([PLAIN, line("Swept")], "line 2: Swept: "),
        ([PLAIN, line("RanksJoined", node=0, local_ranks=3)], "line 2: RanksJoined: "),
        ([PLAIN, line("Interrupted", signum=2, node="a")], "Interrupted: .*'a'"),
        ([PLAIN, "{", line("TimerDue", timer="job")], "line 2: not JSON"),
    ],
)
def test_refuses_what_is_not_a_history(lines: list[str], words: str) -> None:
    with pytest.raises(HistoryError, match=words):
        replayed("\n".join(lines) + "\n")


def test_ignores_a_truncated_last_line() -> None:
    text = "\n".join([PLAIN, line("Suspended", for_s=5), line("Interrupted", signum=2)[:-9]])
    assert [moment.event for moment in replayed(text)] == [None, Suspended(5.0)]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)
EVENTS = [
    *(AgentUp(node, Facts("python3", 2), "h") for node in range(3)),
    PortHeld(0, 29500),
    LinkEnded(1, LinkFailure(Kind.LOST, "words")),
    WorkerExited(0, 1, -9, 12.5, None, 1, (5, 6), "said"),
]


@given(st.data())
@bounded(150)
def test_altered_lines_are_replayed_or_refused(data: st.DataObject) -> None:
    """A run directory is untrusted: nothing in it may raise anything but `HistoryError`."""
    told = [line(type(each).__name__, **fields_of(each)) for each in EVENTS]
    lines = [first_line(spec_of(JOB, ENVIRON)), *told]
    at = data.draw(st.integers(0, len(lines) - 1))
    fields = whole = json.loads(lines[at])
    while isinstance(fields, dict) and isinstance(
        inner := fields[name := data.draw(st.sampled_from([*fields]))], dict
    ):
        if not inner or data.draw(st.booleans()):
            break
        fields = inner
    fields[name] = data.draw(JSON)
    lines[at] = json.dumps(whole)
    with contextlib.suppress(HistoryError):
        replayed("\n".join(lines))
