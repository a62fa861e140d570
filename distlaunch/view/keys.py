"""What the user types, key by key, while a screen is shown; the terminal is as before afterwards."""

import contextlib
import os
import select
import sys
from collections.abc import Callable, Iterator, Mapping

from distlaunch.view.screen import Pane, Wish

PAGE = 10
_NAMES = {
    b"\x1b[A": "up", b"\x1b[B": "down", b"\x1bOA": "up", b"\x1bOB": "down",
    b"\x1b[5~": "page up", b"\x1b[6~": "page down", b"\r": "enter", b"\n": "enter", b"\x1b": "escape",
    b"\x7f": "backspace", b"\x08": "backspace",
}  # fmt: skip


@contextlib.contextmanager
def keyboard(fd: int = 0) -> Iterator[int | None]:
    """The terminal that keys come from, each at once and unseen; None where there is none."""
    if not os.isatty(fd) or sys.platform == "win32":
        yield None
        return
    import termios

    before = termios.tcgetattr(fd)
    wanted = termios.tcgetattr(fd)
    wanted[3] &= ~(termios.ICANON | termios.ECHO)  # signals stay: Ctrl-C is one
    termios.tcsetattr(fd, termios.TCSADRAIN, wanted)
    try:
        yield fd
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def pressed(fd: int | None) -> list[str]:
    """The keys that have been pressed since: names, or the characters themselves."""
    if fd is None or not select.select([fd], [], [], 0)[0]:
        return []
    try:
        return list(_keys(os.read(fd, 1024)))
    except OSError:
        return []


def _keys(data: bytes) -> Iterator[str]:
    while data:
        size = next((n for n in (4, 3) if data[:n] in _NAMES), 1)
        if size == 1 and data[:1] == b"\x1b" and len(data) > 1:  # a sequence that means nothing here
            return
        known = _NAMES.get(data[:size])
        if known:
            yield known
        elif size == 1:
            yield data[:1].decode(errors="replace")
        data = data[size:]


def after(wish: Wish, key: str, rank_there: int | None) -> Wish | None:
    """What the user wants after a key, None = to leave; `rank_there` is where the cursor stands."""
    if wish.typing:
        return _typed(wish, key)
    if key == "q":
        return None
    if key == "enter":
        return wish._replace(rank=rank_there, pane=Pane.log, back=0)
    return _MEANINGS[key](wish) if key in _MEANINGS else wish


_MEANINGS: Mapping[str, Callable[[Wish], Wish]] = {
    "up": lambda wish: wish._replace(cursor=max(0, wish.cursor - 1)),
    "k": lambda wish: wish._replace(cursor=max(0, wish.cursor - 1)),
    "down": lambda wish: wish._replace(cursor=wish.cursor + 1),
    "j": lambda wish: wish._replace(cursor=wish.cursor + 1),
    "a": lambda wish: wish._replace(rank=None, pane=Pane.log, back=0, find=""),
    "escape": lambda wish: wish._replace(rank=None, pane=Pane.log, back=0, find=""),
    "h": lambda wish: wish._replace(pane=Pane.log if wish.pane is Pane.history else Pane.history, back=0),
    "/": lambda wish: wish._replace(typing=True, find="", pane=Pane.log, back=0),
    "page up": lambda wish: wish._replace(back=wish.back + PAGE),
    "page down": lambda wish: wish._replace(back=max(0, wish.back - PAGE)),
}


def _typed(wish: Wish, key: str) -> Wish:
    match key:
        case "enter":
            return wish._replace(typing=False)
        case "escape":
            return wish._replace(typing=False, find="")
        case "backspace":
            return wish._replace(find=wish.find[:-1])
    return wish._replace(find=wish.find + key) if len(key) == 1 and key.isprintable() else wish
