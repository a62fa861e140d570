"""Launchers on other nodes, as far as a run has to do with them."""

from typing import Protocol

from distlaunch.state.events import PeerFailed, PeerRestarts, PeersMet


class Peers(Protocol):
    """`fd` is readable when there is something to hear from them."""

    fd: int

    def heard(self) -> list[PeerFailed | PeerRestarts | PeersMet | str]:
        """What has become of them, and what there is to say meanwhile."""

    def tell(self, status: int, text: str) -> None:
        """Tell them how it ended here."""

    def restart(self, status: int, text: str) -> None:
        """Tell them that it failed, here or elsewhere, and that all start again."""

    def meet_again(self) -> None:
        """Tell them that we are ready for that."""
