"""This process's own limits."""

import resource

DESCRIPTORS_PER_LINK = 6
"""Three pipes and a pidfd, and two more while it is opened."""
RESERVE = 300
"""Log files, and what else is open."""


def make_room_for_links(count: int) -> None:
    """Raise the soft limit on descriptors, as far as the hard one allows, if `count` links need it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_PER_LINK * count + RESERVE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
