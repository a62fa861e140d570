"""The agent's private folder on its node, for the error records of workers."""

import os


def folder_name() -> str:
    """A path below TMPDIR that nobody can guess."""
    base = os.environ.get("TMPDIR") or "/tmp"
    return os.path.join(base, "distlaunch-%s" % os.urandom(8).hex())


def make(folder: str) -> None:
    """Create the folder, mode 0700, if it is not there. Raises OSError."""
    if not os.path.isdir(folder):
        os.mkdir(folder, 0o700)


def inner(folder: str) -> str:
    """Where workers may make files and folders that are deleted with `folder`."""
    return os.path.join(folder, "inner")


def remove(folder: str) -> None:
    """Delete the folder and its files, if it is there."""
    if os.path.isdir(inner(folder)):
        import shutil  # only jobs with torch's agents leave folders

        shutil.rmtree(inner(folder), ignore_errors=True)
    try:
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)
    except OSError:
        pass  # never made, or a job put a folder of its own there: that is not ours to delete
