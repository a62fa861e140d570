"""Launchers on other nodes, as far as a run has to do with them."""

from typing import Protocol


class Ended(Protocol):
    """How another node ended: the status of its launcher, and what there is to say."""

    @property
    def status(self) -> int:
        """Not 0."""

    @property
    def words(self) -> str:
        """For people."""


class Peers(Protocol):
    """`fd` is readable when there is something to hear from them."""

    fd: int

    def heard(self) -> Ended | None:
        """How another node has failed, if one has."""

    def tell(self, status: int, text: str) -> None:
        """Tell them how it ended here."""
