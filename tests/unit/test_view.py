"""The full-screen view of a run: layout, highlighted ranks, history and keys."""

import itertools
import os
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import ConsoleDimensions as Size

from distlaunch.agent.messages import PortHeld, RanksStalled, WorkerExited, WorkerStarted
from distlaunch.observers.model import RunModel
from distlaunch.observers.observer import Printed
from distlaunch.observers.screen import Wish, _pressed, after, lines, row_at, sparkline, within
from distlaunch.plan.placement import Facts
from distlaunch.plan.workers import destinations
from distlaunch.supervisor.actions import ShowMessage
from distlaunch.supervisor.events import AgentUp, Event
from distlaunch.supervisor.nodes import Use
from distlaunch.supervisor.step import begin, step
from tests.unit.samples import bounded, spec_of


class Watched:
    """A picture of a run of so many ranks on each of so many nodes, at a time that the test sets."""

    def __init__(
        self, nodes: int, procs: int, started: bool = True, watch: str = "loss ([0-9.a-z]+)"
    ) -> None:
        self.now = 1000.0
        self.picture = RunModel(1000.0, lambda: self.now)
        hosts = [f"gpu{number}" for number in range(nodes)]
        shape = f"nodes: {hosts}\nprocs_per_node: {procs}\ngpus_per_node: 0"
        self.spec = spec_of(f"command: [x]\nlauncher: local\n{shape}\nlogs: {{watch: '{watch}'}}")
        self.state, _ = begin(self.spec, 0.0)
        self.picture.began(self.spec, 0.0, 0.0)
        if not started:
            return
        self.feed(*(AgentUp(node, Facts("/usr/bin/python3", 0), "h") for node in range(nodes)))
        self.feed(PortHeld(0, 29500))
        self.feed(*(WorkerStarted(node, local, 7, None) for node in range(nodes) for local in range(procs)))
        self.picture.started(self.state, 1.0)
        assert self.state.plan is not None
        self.places = destinations(self.state.plan, 0)

    def feed(self, *happened: Event) -> None:
        for event in happened:
            self.state, _ = step(self.state, event, 1.0)
            self.picture.happened(event, self.state, 1.0)

    def say(self, rank: int, text: str, stream: int = 0) -> None:
        self.picture.printed(Printed(rank, stream, text.encode(), 0, self.places[rank, stream]))

    def shown(self, width: int = 80, height: int = 24, **wish: Any) -> str:
        return "\n".join(line.plain for line in lines(self.picture, Wish(**wish), Size(width, height)))

    def marks(self) -> dict[int, tuple[str, ...]]:
        return {row.rank: row.marks for row in self.picture.rows() if row.marks}


@pytest.fixture(scope="module")
def thousand() -> Watched:
    watched = Watched(125, 8)
    for rank in range(1000):
        watched.say(rank, f"step 3 loss 0.{500 + rank % 7}\n")
    watched.picture.used({rank: Use(99.0, 1 << 30, 90, 40 << 30) for rank in range(1000)}, 1.0)
    return watched


_ranks, _finds = st.sampled_from([None, 0, 5, 5000]), st.sampled_from(["", "loss", "nothing like it"])
_lines, _shapes = st.integers(0, 3000), st.sampled_from([(1, 8), (2, 1, False), None])
_wishes = st.builds(Wish, st.booleans(), _ranks, _lines, _lines, _finds, st.booleans())


@bounded(100)
@given(size=st.builds(Size, st.integers(1, 300), st.integers(1, 120)), shape=_shapes, wish=_wishes)
def test_the_screen_fills_the_terminal(size: Size, shape: Any, wish: Wish, thousand: Watched) -> None:
    watched = Watched(*shape) if shape else thousand
    shown = lines(watched.picture, wish, size)
    assert len(shown) == size.height
    assert all(line.cell_len <= size.width for line in shown)


def test_shows_eight_ranks_completely() -> None:
    watched = Watched(2, 4)
    watched.picture.used({rank: Use(12.0 * rank, rank << 20, rank, 1 << 30) for rank in range(8)}, 1.0)
    watched.now += 3.0
    for rank in range(8):
        watched.say(rank, f"step 1 loss 0.{rank}\n")
    shown = watched.shown()
    assert "job  RUNNING  3s  8 ranks on 2 nodes" in shown
    assert all(f"\n{rank}     gpu{rank // 4}  running" in shown for rank in range(8))
    assert re.search(r"\n3 +gpu0 +running +36% +3M +3% +1G +0s +0.3 ", shown)


def test_folds_a_thousand_ranks_by_node(thousand: Watched) -> None:
    shown = thousand.shown(200, 50)
    assert "1000 ranks on 125 nodes" in shown
    assert re.search(r"\n0-7 +gpu0 +running +99% +8G +90% +320G +0s ", shown)
    assert re.search(r"\nand \d+ more nodes \(\d+ ranks\)", shown)
    assert "\nand 1 more node (1 rank)" in Watched(1, 1).shown(80, 8)


@pytest.mark.parametrize("size", [Size(80, 24), Size(80, 12), Size(120, 60)])
def test_enter_opens_the_log_of_the_highlighted_line(size: Size) -> None:
    """Of a node's line that of its first rank, though ranks that stand out have lines before."""
    watched = Watched(8, 8)
    watched.feed(RanksStalled(7, (3,), ()), RanksStalled(2, (4,), ()))
    for cursor in range(80):
        drawn = lines(watched.picture, Wish(cursor=cursor), size)
        (chosen,) = (line for line in drawn if any(span.style == "reverse" for span in line.spans))
        first = int(re.split(r"\D", chosen.plain)[0])
        assert row_at(watched.picture, Wish(cursor=cursor), size) == first


def test_shows_what_q_does_on_any_usual_terminal() -> None:
    picture = Watched(1, 1).picture
    for width, leaving in itertools.product((75, 80, 87, 95, 200), ("quit", "stop the run")):
        assert lines(picture, Wish(), Size(width, 24), leaving)[-1].plain.endswith(f"q {leaving}")


@pytest.mark.parametrize("numbers", [("inf", "-inf"), ("1.7e308", "1.7e308")])
def test_numbers_without_a_mean_are_harmless(numbers: tuple[str, str]) -> None:
    watched = Watched(20, 2, watch="loss (.*)")
    for rank, number in enumerate(numbers):
        watched.say(rank, f"loss {number}\n")
    assert re.search(r"\n0-1 +gpu0 .* (nan|inf) ", watched.shown())


def test_ranks_that_stand_out_come_first() -> None:
    watched = Watched(8, 8)
    for rank in range(64):
        watched.say(rank, "loss nan\n" if rank == 9 else "loss 0.5\n")
    watched.picture.used({rank: Use(99.0, 1, 5 if rank == 33 else 95, 1) for rank in range(64)}, 1.0)
    watched.feed(RanksStalled(7, (3,), ()))
    watched.now += 60.0
    for rank in set(range(64)) - {50}:
        watched.say(rank, "still here\n")
    watched.now += 1.0
    assert watched.marks() == {9: ("different",), 33: ("slow",), 50: ("silent",), 59: ("stalled",)}
    grid = watched.shown().splitlines()[3:7]
    assert [line.split()[0] for line in grid] == ["9", "33", "50", "59"]


def test_distinguishes_failed_ranks_from_stopped_ones() -> None:
    watched = Watched(1, 3)
    watched.feed(WorkerExited(0, 1, 7, 1.0), WorkerExited(0, 0, 0, 1.0))
    assert watched.marks() == {1: ("failed",)}
    assert "exit status 7" in watched.shown()


def test_the_log_can_be_filtered_searched_and_scrolled() -> None:
    watched = Watched(1, 2)
    for number in range(100):
        watched.say(number % 2, f"line {number}\n")
    assert "line 99" in watched.shown() and "line 99" not in watched.shown(back=50)
    assert "line 98" in (of_one := watched.shown(rank=0)) and "line 99" not in of_one
    assert "line 79" in (found := watched.shown(find="LINE 7")) and "line 80" not in found
    assert "line 0\n" in watched.shown(back=100000)


def test_the_history_shows_messages_and_attempts() -> None:
    watched = Watched(1, 2)
    watched.picture.message(ShowMessage("warning", "host2 was lost\nits agent died"), 61.0)
    assert "── history ──" in (shown := watched.shown(history=True, find="zzz"))  # not filtered
    assert re.search(r"attempt 0: 2 ranks on 1 node\b", shown) and "61s  host2 was lost" in shown


def test_escape_sequences_of_ranks_do_not_reach_the_terminal() -> None:
    watched = Watched(1, 1)
    watched.say(0, "\x1b[2J\x1b]0;title\x07\x1b[31mred\x1b[0m\r50%\rdone\n")
    assert "done" in (shown := watched.shown()) and "\x1b" not in shown


KEYS: list[tuple[str, Wish | None]] = [
    ("down down up", Wish(cursor=1)),
    ("j k k", Wish(cursor=0)),
    ("enter", Wish(rank=3)),
    ("enter a", Wish()),
    ("h", Wish(history=True)),
    ("h h", Wish()),
    ("/ q h backspace enter", Wish(find="q")),
    ("/ x escape", Wish()),
    ("page_up page_up page_down", Wish(back=10)),
    ("ö F1", Wish()),
    ("q", None),
]


@pytest.mark.parametrize(("keys", "wanted"), KEYS)
def test_keys_change_what_is_shown(keys: str, wanted: Wish | None) -> None:
    wish: Wish | None = Wish()
    for key in keys.split():
        assert wish is not None
        wish = after(wish, key.replace("_", " "), 3)
    assert wish == wanted


def test_the_cursor_and_the_log_go_no_further_than_their_lines(thousand: Watched) -> None:
    beyond = within(thousand.picture, Wish(cursor=99, back=10_000), Size(80, 24))
    assert beyond.cursor < 24
    assert beyond.back == len(thousand.picture.lines) - 1
    assert within(thousand.picture, Wish(cursor=1, back=10), Size(80, 24)) == Wish(cursor=1, back=10)


def test_keys_are_whole_characters() -> None:
    read_end, write_end = os.pipe()
    with open(read_end, "rb"), open(write_end, "wb", buffering=0) as keyboard:
        keyboard.write("/損\x1b[A".encode() + b"\xff\r")
        assert list(_pressed(read_end)) == ["/", "損", "up", "\udcff", "enter"]


@example([1.7e308, -1e308], 2)
@example([1.7e308] * 3, 1)
@example([5e-324, 0.0], 2)
@bounded()
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True)), st.integers(1, 60))
def test_a_sparkline_has_at_most_its_width(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) <= width


def test_a_pattern_that_backtracks_is_given_up_and_said_so() -> None:
    watched = Watched(1, 1, watch="(a+)+$")
    for _ in range(2):
        watched.say(0, "a" * 60 + "!\n")
    assert "logs.watch: the pattern takes more than 0.5 s on a line" in watched.shown(width=150, history=True)


def test_the_rate_is_of_values_that_still_come() -> None:
    watched = Watched(1, 1)
    for value in range(3):
        watched.say(0, f"loss {value}\n")
        watched.now += 1.0
    assert "+1/s" in watched.shown()
    watched.now += 20.0
    assert "/s" not in watched.shown()


def test_a_damaged_pattern_watches_nothing() -> None:
    watched = Watched(1, 1)
    watched.picture.began(watched.spec._replace(logs=watched.spec.logs._replace(watch="(")), 0.0, 0.0)
    watched.say(0, "loss (\n")
    assert watched.picture.values == {}
