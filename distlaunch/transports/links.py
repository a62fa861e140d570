"""All links of a command, served from one place: what comes is handed on, what waits is written."""

import math
import selectors
import time
from collections.abc import Callable
from typing import Any

from distlaunch.agent.wire import Frame, ProtocolError
from distlaunch.transports.failure import LinkFailure
from distlaunch.transports.link import Link
from distlaunch.transports.streams import NodeGone


class Links:
    """Links by node, of which several may share one. `on_frame` gets each frame.

    `on_end` gets a node whose link has ended, and the reason; `on_frame` may raise `ProtocolError`: the link
    then ends.
    """

    def __init__(
        self,
        on_frame: Callable[[Frame], None],
        on_end: Callable[[int, LinkFailure], None],
        on_pull: Callable[[int, bool], None] = lambda node, over: None,
    ) -> None:
        self._on_frame, self._on_end, self._on_pull = on_frame, on_end, on_pull
        self._selector = selectors.DefaultSelector()
        self._links: dict[int, Link] = {}
        self._nodes: dict[Link, set[int]] = {}
        self._heard: set[int] = set()
        self._gone: dict[int, LinkFailure] = {}
        """How nodes have ended whose link's process has not ended yet: they were the last on it."""
        self._pulling: set[Link] = set()
        self._told: dict[Link, float] = {}
        """Those whose process was told to end, and until when it may live (monotonic seconds)."""

    @property
    def present(self) -> list[int]:
        """The nodes whose links have not ended."""
        return sorted(self._links)

    @property
    def answering(self) -> list[int]:
        """Those of them whose agents have said something."""
        return sorted(self._links.keys() & self._heard)

    def watch(self, fd: int, handler: Callable[[], None], mask: int = selectors.EVENT_READ) -> None:
        """Have `turn` call `handler` when `fd` is ready."""
        self._selector.register(fd, mask, handler)

    def add(self, node: int, link: Link) -> None:
        """Serve a node by `link` from now on."""
        self._links[node] = link
        if link in self._nodes:
            self._nodes[link].add(node)
            return
        self._nodes[link] = {node}
        self.watch(link.stdout, lambda: self._receive(link))
        self.watch(link.stderr, lambda: self._listen(link))
        self._watch_writing(link)

    def nudge(self) -> None:
        """Nudge the nodes whose shells have not answered yet."""
        for link in self._nodes:
            link.nudge()

    def send(self, node: int, command: tuple[Any, ...]) -> None:
        """Send one of `distlaunch.agent.messages`, if the node has a link; it may precede the agent."""
        link = self._links.get(node)
        if link:
            link.send(node, command)
            self._watch_writing(link)

    def turn(self, wait_s: float) -> None:
        """Wait at most `wait_s` seconds for something to happen, and handle all that did."""
        for key, _ in self._selector.select(wait_s):
            # An earlier handler of this round may have closed the descriptor.
            if self._selector.get_map().get(key.fd) == key:
                key.data()
        if self._told:
            self._see_to_told()

    def _see_to_told(self) -> None:
        """Reap what has ended as it was told, and kill what stays too long: the run may go on for days."""
        for link, deadline in list(self._told.items()):
            if link.has_ended:
                del self._told[link]
            elif time.monotonic() >= deadline:
                link.kill()

    def drop(self, node: int) -> None:
        """Forget a node, and kill its link's process if that serves no other; `on_end` is not called.

        The agent of a node that shares its link leaves when its lease is over.
        """
        link = self._forget(node)
        if link:
            link.end()
            self._part_with(link)

    def give_up(self, node: int, why: str) -> None:
        """Drop a node that is overdue; `on_end` gets what its transport has said so far, and `why`."""
        link = self._links.get(node)
        if link:
            failure = link.failure(why)
            self.drop(node)
            self._on_end(node, failure)

    def leave(self, node: int) -> None:
        """Have a node's agent stop its workers and leave; `on_end` tells when it has."""
        if link := self._links.get(node):
            self.unwatch(link.stdin)
            link.leave()

    def hang_up(self, node: int) -> None:
        """Close a link, so that its agent leaves, and wait for its process to follow."""
        link = self._forget(node)
        if link:
            link.hang_up()
            self._part_with(link)

    def _part_with(self, link: Link) -> None:
        """Close a link whose process has ended or was told to; one that may not live on is looked after."""
        link.close()
        if 0.0 < link.patience_s < math.inf and not link.has_ended:
            self._told[link] = time.monotonic() + link.patience_s

    def close(self) -> None:
        """Drop what is left."""
        for node in self.present:
            self.drop(node)
        for link, deadline in self._told.items():
            link.kill_at(deadline)
        self._selector.close()

    def _forget(self, node: int) -> Link | None:
        """The node's link, if that serves none any more."""
        link = self._links.pop(node, None)
        self._heard.discard(node)
        if link is None:
            return None
        self._nodes[link].discard(node)
        if self._nodes[link]:
            return None
        del self._nodes[link]
        self._pulling.discard(link)
        for fd in link.descriptors:
            self.unwatch(fd)
        return link

    def unwatch(self, fd: int) -> None:
        """Don't wait for `fd` any more."""
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def _watch_writing(self, link: Link) -> None:
        watched = link.stdin in self._selector.get_map()
        if link.has_unsent and not watched:
            self.watch(link.stdin, lambda: self._write(link), selectors.EVENT_WRITE)
        elif watched and not link.has_unsent:
            self.unwatch(link.stdin)

    def _write(self, link: Link) -> None:
        link.flush()
        self._watch_writing(link)

    def _listen(self, link: Link) -> None:
        more, gone = link.listen()
        if not more:
            self.unwatch(link.stderr)
        for each in gone:
            self._part_with_node(link, each)

    def _receive(self, link: Link) -> None:
        try:
            for each in link.receive():
                if isinstance(each, NodeGone):
                    self._part_with_node(link, each)
                else:
                    self._take(link, each)
        except ProtocolError as error:
            link.distrust(str(error))
        if link not in self._nodes:
            return  # dropped because of what it said
        self._watch_writing(link)
        self._note_pull(link)
        if link.at_end:
            # Its last words may still be on the way: they are complete when the process has ended.
            self.unwatch(link.stdout)
            self.watch(link.exit_descriptor(), lambda: self._end(link))

    def _note_pull(self, link: Link) -> None:
        """Tell once that an image is being fetched, and that it is there."""
        if link.pulling is not (link in self._pulling):
            self._pulling ^= {link}
            for node in sorted(self._nodes[link]):
                self._on_pull(node, not link.pulling)

    def _take(self, link: Link, frame: Frame) -> None:
        serving = self._links.get(frame.node)
        if serving is None and len(self._nodes.get(link, ())) != 1:
            return  # of a node that shared this link, and was dropped
        if serving is not link:
            raise ProtocolError(f"a frame for node {frame.node} came on another node's link")
        self._heard.add(frame.node)
        self._on_frame(frame)

    def _part_with_node(self, link: Link, gone: NodeGone) -> None:
        """One of the nodes that share a link has ended; of the last, the end of the link tells."""
        if self._links.get(gone.node) is not link:
            return  # dropped before
        if len(self._nodes[link]) == 1:
            self._gone[gone.node] = gone.failure
            return
        self.drop(gone.node)
        self._on_end(gone.node, gone.failure)

    def _end(self, link: Link) -> None:
        nodes = sorted(self._nodes[link])
        failures = {node: self._gone.pop(node) if node in self._gone else link.failure() for node in nodes}
        for node in failures:
            self.drop(node)
        for node, failure in failures.items():
            self._on_end(node, failure)
