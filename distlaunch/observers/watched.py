"""Keeps what ranks use in the run folder, as long as somebody outside watches the run."""

import json
import os
import time
from collections.abc import Mapping

from distlaunch.observers.observer import Observer
from distlaunch.observers.run_folder import RunFolder
from distlaunch.supervisor.nodes import Use
from distlaunch.supervisor.state import State

WATCHED, USE = "watched", "use.json"
"""A watcher touches the first now and then; the second has what ranks use."""
LOOK_S, FADES_S = 1.0, 6.0
"""How often we look for watchers, and how long one counts that has touched it."""


class Watched(Observer):
    """Wants to know what ranks use while the folder is watched, and writes it there."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._path = os.path.join(folder.path, WATCHED)
        self._uses: dict[int, Use] = {}

    def started(self, state: State, at: float) -> None:
        """Ranks run: from now on there is something to watch."""
        self._uses.clear()
        self.wake_at = time.monotonic() + LOOK_S

    def woken(self) -> None:
        """Look whether somebody watches."""
        self.wake_at = time.monotonic() + LOOK_S
        try:
            self.wants_use = time.time() - os.stat(self._path).st_mtime < FADES_S
        except OSError:
            self.wants_use = False

    def used(self, uses: Mapping[int, Use], at: float) -> None:
        """Write it down, whole."""
        self._uses.update(uses)
        if self.wants_use:
            ranks = sorted((rank, *use) for rank, use in self._uses.items())
            document = {"time": time.time(), "ranks": ranks}
            self._folder.replace(USE, json.dumps(document).encode())
