"""Takes a run that has begun to its end: the loop, those who see it, the summary."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from distlaunch.diagnosis.summary import Summary
from distlaunch.launch.addresses import ssh_addresses
from distlaunch.launch.loop import Loop
from distlaunch.launch.start import Start
from distlaunch.observers.folder import Folder
from distlaunch.observers.last_words import LastWords
from distlaunch.observers.observer import Observer, Observers
from distlaunch.system.signals import Interrupts

if TYPE_CHECKING:
    from distlaunch.launch.peers import Peers


def supervise(
    start: Start, interrupts: Interrupts, observers: Iterable[Observer] = (), peers: "Peers | None" = None
) -> Summary:
    """Run the supervisor over the links of `start`; its folder and the `observers` see the run."""
    folder, words = Folder(start.folder), LastWords()
    seeing = Observers((words, folder, *observers))
    loop = Loop(start, seeing, interrupts, peers)
    state = loop.run(start.links, lambda: ssh_addresses(start.spec))
    seeing.tell(Observer.drained, state)
    summary = Summary(
        state,
        start.folder.path,
        words.of(1),
        start.clock.now(),
        folder.lagging(state),
        words.lines,
        words.of(0),
    )
    seeing.tell(Observer.ended, summary)
    return summary
