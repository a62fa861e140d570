"""What a run's time went to, and the colors of the page about it."""

import re
from pathlib import Path

import pytest

from distlaunch.agent.messages import PortHeld, RanksJoined, RanksStalled, Swept, WorkerExited, WorkerStarted
from distlaunch.plan.placement import Facts
from distlaunch.runs import html
from distlaunch.runs.html import plain
from distlaunch.runs.timeline import ALL_KINDS, KINDS, Timeline, ledger, trace
from distlaunch.supervisor.events import AgentUp, Event
from distlaunch.supervisor.step import begin, step
from tests.unit.samples import spec_of

STYLE = Path(html.__file__).with_name(html.STYLE).read_text()
JOB = """{command: [x], nodes: [a, b], spares: [c], launcher: local, procs_per_node: 1, gpus_per_node: 0,
timeouts: {stall: 20s}, restarts: {max: %d, backoff: 10s}}"""


def told(restarts: int, *happened: tuple[float, Event]) -> Timeline:
    state, _ = begin(spec_of(JOB % restarts), 0.5)
    timeline = Timeline(state)
    for at, event in happened:
        state, _ = step(state, event, at)
        timeline.take(event, state, at)
    return timeline


def up(at: float, node: int) -> tuple[float, Event]:
    return at, AgentUp(node, Facts("/usr/bin/python3", 0), "h")


STARTED = [
    *(up(1.0, 0), up(2.0, 1), up(1.5, 2), (3.0, PortHeld(0, 29500))),
    *((4.0, WorkerStarted(0, 0, 7, None)), (4.0, WorkerStarted(1, 0, 8, None))),
    *((10.0, RanksJoined(0, (0,))), (12.0, RanksJoined(1, (0,)))),
]
FAILS = [
    *((100.0, WorkerExited(0, 0, 7, 100.0)), (101.0, Swept(0, 0, 0))),
    (102.0, WorkerExited(1, 0, -15, 102.0)),
]


def test_every_second_has_one_class() -> None:
    found = ledger(told(0, *STARTED, *FAILS).spans(103.0), queue_s=60.0)
    before = {"queue": 60.0, "connect": 3.0, "start": 7.0, "rendezvous": 2.0}
    assert found == {**before, "failed": 88.0, "stop": 3.0}
    assert list(found) == [kind for kind in KINDS if kind in found]


def test_a_stall_began_before_it_was_noticed() -> None:
    spans = told(0, *STARTED, (50.0, RanksStalled(1, (0,), ()))).spans(60.0)
    assert ledger(spans) == {"connect": 3.0, "start": 7.0, "rendezvous": 2.0, "training": 18.0, "stall": 30.0}
    assert [span.kind for span in spans if span.lane == (0, 0)] == ["start", "rendezvous", "training"]
    assert [(span.kind, span.began) for span in spans if span.lane == (1,)][-1] == ("stall", 30.0)


def test_a_restart_is_its_own_class_and_a_spare_a_lane() -> None:
    spans = told(1, *STARTED, *FAILS, (102.5, Swept(1, 0, 0))).spans(110.0)
    assert (ledger(spans)["restart"], ledger(spans)["failed"]) == (110.0 - 102.5, 88.0)
    spare = [(span.kind, span.attempt) for span in spans if span.lane == (2,)]
    assert spare == [("connect", 0), ("idle", 0), ("idle", 1)]


def test_a_trace_has_nodes_as_processes_and_ranks_as_threads() -> None:
    events = trace(told(0, *STARTED).spans(20.0), ["a", "b", "c"], [(1.0, "hello")])["traceEvents"]
    ours = [each for each in events if (each["pid"], each.get("tid")) == (2, 2)]
    assert [each["args"]["name"] for each in ours if each["name"] == "thread_name"] == ["rank 1"]
    spans = [(each["name"], each["ts"], each["dur"]) for each in ours if each["ph"] == "X"]
    assert spans == [("start", 4_000_000, 8_000_000), ("training", 12_000_000, 8_000_000)]


@pytest.mark.parametrize(
    "text", ["\x1b[31m<b>\x1b[0m", "\x1b]0;title\x07<b>", "\x9b<b>", "<\x00b\x1b(B>", "\u202e<b>"]
)
def test_text_of_a_rank_is_escaped(text: str) -> None:
    assert plain(text) == "&lt;b&gt;"


def luminance(color: str) -> float:
    color = color if len(color) == 6 else "".join(2 * digit for digit in color)
    parts = [int(color[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_every_kind_of_bar_has_a_color() -> None:
    kinds = {*(f"k-{kind}" for kind in ALL_KINDS), *map(html._class, (*html._ENDS, "use", "volume"))}
    assert {*re.findall(r"\.([ke]-[\w-]+) \{ fill: var\(--\w+\) \}", STYLE)} == kinds


@pytest.mark.parametrize("theme", re.findall(r":root {.*?}", STYLE, re.DOTALL), ids=["light", "dark"])
def test_colors_of_the_page_have_enough_contrast(theme: str) -> None:
    colors = dict(re.findall(r"--(\w+): #(\w+);", theme))

    def contrast(name: str, ground: str) -> float:
        low, high = sorted(luminance(colors[each]) for each in (name, ground))
        return (high + 0.05) / (low + 0.05)

    for name in ("fg", "dim", "good", "bad", "other"):
        assert min(contrast(name, "bg"), contrast(name, "soft")) >= 4.5, name
    assert [kind for kind in KINDS if contrast(kind, "bg") < 3] == []
