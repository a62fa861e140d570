"""Options that say how long ago."""

from distlaunch.errors import UsageError
from distlaunch.job.types import UNITS_S, seconds_in


def ago_s(option: str, text: str, example: str) -> float:
    """The seconds that an option's value means. Raises `UsageError`."""
    seconds = seconds_in(text)
    if seconds is None:
        units = ", ".join(UNITS_S)
        raise UsageError(f'{option}: expected a duration such as "{example}" (units: {units}), got {text!r}')
    return seconds
