"""Regular expressions that people write."""

import re
from typing import AnyStr


def compiled(text: AnyStr) -> re.Pattern[AnyStr]:
    """It, compiled. Raises ValueError, which says what is wrong with it."""
    try:
        return re.compile(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (re.error, OverflowError) as error:
        raise ValueError(str(error)) from None
