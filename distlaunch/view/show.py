"""Draws the picture on the terminal, and again when there is something new, a key, or another size."""

import contextlib
import os
import time
from collections.abc import Iterator

from rich.console import Console, Group
from rich.live import Live

from distlaunch.view.keys import after, keyboard, pressed
from distlaunch.view.picture import Picture
from distlaunch.view.rescue import rescued
from distlaunch.view.screen import Size, Wish, lines, row_at

LOOK_S, DRAW_S = 0.2, 1.0
"""Between two looks at the keyboard; between two drawings if nobody presses a key."""


class Screen:
    """A picture on the terminal."""

    def __init__(
        self, picture: Picture, live: Live, console: Console, keys: int | None, leaving: str
    ) -> None:
        self._picture, self._live, self._console, self._keys = picture, live, console, keys
        self._leaving = leaving
        self._wish, self._drawn_at, self._size = Wish(), 0.0, Size(0, 0)
        self.left = False
        """Whether the user wants to leave."""

    def look(self) -> None:
        """Take keys, and draw if there is a reason to."""
        wish = self._wish
        for key in pressed(self._keys):
            wanted = after(self._wish, key, row_at(self._picture, self._wish, self._size))
            self.left = self.left or wanted is None
            self._wish = wanted or self._wish
        late = time.monotonic() - self._drawn_at >= DRAW_S
        if late or wish != self._wish or self._now() != self._size:
            self.draw()

    def draw(self) -> None:
        """Show it as it is now."""
        self._drawn_at, self._size = time.monotonic(), self._now()
        shown = lines(self._picture, self._wish, self._size, self._leaving)
        self._live.update(Group(*shown), refresh=True)

    def _now(self) -> Size:
        return Size(*self._console.size)


@contextlib.contextmanager
def screen(picture: Picture, leaving: str = "quit") -> Iterator[Screen]:
    """The terminal's other screen, with the picture; what was there before comes back in the end.

    `leaving` is what q does, in words.
    """
    console = Console(file=os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace"), highlight=False)
    try:
        live = Live(
            console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        with rescued(1), keyboard() as keys, live:
            shown = Screen(picture, live, console, keys, leaving)
            shown.draw()
            yield shown
    finally:
        console.file.close()
