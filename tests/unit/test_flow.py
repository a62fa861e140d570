"""Flow control of workers' pipes: read at once, or only after the link has caught up."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from distlaunch.agent import outbox, wire
from distlaunch.agent.outbox import Flow, Outbox
from distlaunch.agent.poller import Poller
from tests.unit.test_outbox import directory_in

DATA = bytes(wire.MAX_OUTPUT)
HALF = outbox.MEMORY // 2


class Scene:
    """A worker that always has something to say, and a link that takes what a test lets it take."""

    def __init__(self, box: Outbox) -> None:
        self.box, self.poller = box, Poller()
        self.flow = Flow(self.poller, box)
        self.reads = 0
        self.pipe, self.said = os.pipe()
        os.write(self.said, b"x")
        self.poller.watch(self.pipe, self.read)

    def read(self) -> None:
        """As the handler of a worker's pipe."""
        if not self.flow.holds(self.pipe, self.read):
            self.reads += 1
            self.box.output(0, 0, DATA)

    def fill(self) -> int:
        """Turn until memory is used up; how often the pipe was read."""
        while not self.box.is_full:
            self.poller.turn()
        return self.reads

    def take(self, left: int) -> None:
        """Have the link take all but so many bytes."""
        spool = self.box._spool
        while spool and outbox.MEMORY - spool.left > left:
            spool.pop()
        self.flow.sent()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """Nothing is waiting."""
    with directory_in(tmp_path) as directory:
        made = Scene(Outbox(0, directory))
        yield made
        made.box.discard()
        os.close(made.pipe)
        os.close(made.said)


def test_a_pipe_is_held_while_memory_is_full_and_read_again_when_half_is_sent(scene: Scene) -> None:
    full = scene.fill()
    scene.read()
    scene.take(HALF + len(DATA))
    assert scene.reads == full
    scene.take(HALF)
    scene.poller.turn()
    assert scene.reads == full + 1


def test_a_slow_link_slows_no_workers_until_it_has_caught_up(scene: Scene) -> None:
    full = scene.fill()
    while scene.reads < full + 10:  # waits for as long as a pipe may be held, once
        scene.poller.turn()
    assert not scene.box.losses()
    scene.take(0)
    full = scene.fill()
    scene.read()
    assert scene.reads == full


def test_a_pipe_that_is_closed_meanwhile_is_not_read_again(scene: Scene) -> None:
    full = scene.fill()
    scene.read()
    scene.flow.forget(scene.pipe)
    scene.take(0)
    scene.poller.after(0.0, "now", lambda: None)
    scene.poller.turn()
    assert scene.reads == full
