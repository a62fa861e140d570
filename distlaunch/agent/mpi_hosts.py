"""What mpirun calls the nodes: addresses of a network that is for measurements only (RFC 2544).

No such name has to be looked up, and mpirun takes none of them for its own machine.
"""

_NETWORK = "198.18."


def host_of(place: int) -> str:
    """What mpirun calls the node in that place, 0 to 65535."""
    return "%s%d.%d" % (_NETWORK, place >> 8, place & 255)


def place_of(host: str) -> int:
    """The place of the node that mpirun calls so. Raises ValueError."""
    high, low = host[len(_NETWORK) :].split(".")
    return int(high) << 8 | int(low)
