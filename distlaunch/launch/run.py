"""Starts a run: its folder and the links to its nodes, while the rest of the program is still being read."""

import time
from typing import TYPE_CHECKING, NamedTuple

from distlaunch.errors import DistlaunchError
from distlaunch.job.spec import JobSpec
from distlaunch.launch.opening import open_links
from distlaunch.rim.link import Link
from distlaunch.rim.run_folder import RunFolder, new_run_id

if TYPE_CHECKING:
    from distlaunch.launch.summary import Summary


class Start(NamedTuple):
    """A run that has begun: `links` by node are under way, `began` is monotonic seconds."""

    spec: JobSpec
    run_id: str
    folder: RunFolder
    links: dict[int, Link]
    began: float


def run_job(spec: JobSpec, *, as_json: bool = False, quiet: bool = False) -> "Summary":
    """Run `spec`; ranks' output goes to the console and the run folder. Raises `DistlaunchError`."""
    began = time.monotonic()
    run_id = new_run_id(spec.name)
    try:
        folder = RunFolder(spec.logs.folder, run_id)
    except OSError as error:
        raise DistlaunchError(f"can't make the run folder in {spec.logs.folder}: {error.strerror}") from None
    start = Start(spec, run_id, folder, open_links(spec), began)
    # Imported only now: agents boot for 20 ms or more, and the supervisor takes 10 to import.
    from distlaunch.launch.supervise import supervise

    return supervise(start, as_json=as_json, quiet=quiet)
