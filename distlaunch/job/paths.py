"""Paths in job files: relative to a folder, or below the ~ of whoever is at home there."""

import os.path


def below_home(text: str) -> bool:
    """Whether `text` begins with the ~ of the user who reads it."""
    return text == "~" or text.startswith("~/")


def home_error(text: str) -> str | None:
    """Why the ~ that `text` begins with can't be used, or None."""
    name = text.partition("/")[0]
    if not name.startswith("~") or name == "~":
        return None
    return f"{name} is not expanded, only ~/ is: write the full path, or ./{name} for a file of that name"


def path_in(folder: str, text: str) -> str:
    """`text` as seen from `folder`, normalised; a leading ~ of either stays, and means the reader's home."""
    joined = text if below_home(text) else os.path.join(folder, text)
    if not below_home(joined):
        return os.path.normpath(joined)
    rest = os.path.normpath(f"./{joined[1:]}")
    return "~" if rest == "." else f"~/{rest}"
