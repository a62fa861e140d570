"""The launchers that are asked: each runs a script that fails, here or over hosts, and has its say."""

import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.cluster.hosts import Bed
from tests.faults.blame.cases import Case
from tests.faults.blame.commands import Ended, run_all
from tests.faults.blame.verdicts import Opinion, of_distlaunch, of_torchrun
from tests.harness import distlaunch_argv

PORT = 29513


class Outcome(NamedTuple):
    """What came of one run.

    `down_s` are the seconds from the end of the culprit to that of the command, and `first_s` those from the
    end of whichever rank failed first; None where that is not known, as of torchrun.
    """

    opinion: Opinion
    ended: Ended
    down_s: float | None = None
    first_s: float | None = None


class _Shape(NamedTuple):
    nodes: int
    procs: int


def _shape(case: Case, bed: Bed | None) -> _Shape:
    """All here; over hosts one rank on each of two or three, or two on each of two."""
    if bed is None:
        return _Shape(1, case.ranks)
    return _Shape(3, 1) if case.ranks == 3 else _Shape(2, case.ranks // 2)


def by_distlaunch(case: Case, folder: Path, bed: Bed | None) -> Outcome:
    """One `distlaunch run`, here, also where its ranks are on hosts."""
    shape, path = _shape(case, bed), folder / "job.yaml"
    path.write_text(json.dumps(_job(case, shape, bed)))
    ended = run_all([distlaunch_argv("run", str(path), "--json")], folder, bed)
    try:
        document = json.loads(ended.outs[0])
    except ValueError:
        return Outcome(Opinion(0.0, "nothing", ["--json: no result"]), ended)
    exits = _exits(Path(document["folder"]), shape.procs)
    failed = [at for at, status in exits.values() if status]
    return Outcome(
        of_distlaunch(case, document, ended.texts[0]),
        ended,
        ended.at - exits[case.rank][0] if case.rank in exits else None,
        ended.at - min(failed) if failed else None,
    )


def _job(case: Case, shape: _Shape, bed: Bed | None) -> dict[str, Any]:
    job = {"script": str(case.path), "gpus_per_node": 0, "procs_per_node": shape.procs}
    if bed is None:
        return {**job, "nodes": 1}
    return {**job, "nodes": list(bed.hosts)[: shape.nodes], "ssh": {"config": str(bed.folder / "ssh_config")}}


def _exits(folder: Path, procs: int) -> Mapping[int, tuple[float, int]]:
    """rank → when it ended (monotonic) and its status."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    began = events[0]["time"] - events[0]["t"] - (time.time() - time.monotonic())
    return {
        event["node"] * procs + event["local_rank"]: (began + event["at"], event["status"])
        for event in events
        if event["event"] == "WorkerExited"
    }


def by_torchrun(case: Case, folder: Path, bed: Bed | None) -> Outcome:
    """torchrun, over hosts as people start it by hand on each of them."""
    ended = run_all(_torchruns([sys.executable, "-m", "torch.distributed.run"], case, bed), folder, bed)
    return Outcome(of_torchrun(case, ended.texts), ended)


def by_joined(case: Case, folder: Path, bed: Bed | None) -> Outcome:
    """`distlaunch torchrun`, started by hand in the same way: its launchers join one run."""
    ended = run_all(_torchruns(distlaunch_argv("torchrun"), case, bed), folder, bed)
    logs = re.search(r"logs: (\S+)", ended.texts[0])
    if not logs:
        return Outcome(Opinion(0.0, "nothing", ["no summary"]), ended)
    document = json.loads(Path(logs[1], "summary.json").read_text())
    return Outcome(of_distlaunch(case, document, ended.texts[0]), ended)


def _torchruns(launcher: Sequence[str], case: Case, bed: Bed | None) -> Sequence[Sequence[str]]:
    """The command lines of a torchrun, or of one that takes its flags, on each node."""
    shape = _shape(case, bed)
    words = [*launcher, f"--nproc-per-node={shape.procs}"]
    if bed is None:
        return [[*words, "--standalone", str(case.path)]]
    hosts = list(bed.hosts.values())[: shape.nodes]
    words += [f"--nnodes={shape.nodes}", f"--master-addr={hosts[0].address}", f"--master-port={PORT}"]
    return [
        bed.argv("exec", host.name, "--", *words, f"--node-rank={number}", str(case.path))
        for number, host in enumerate(hosts)
    ]


LAUNCHERS: Mapping[str, Callable[[Case, Path, Bed | None], Outcome]] = {
    "distlaunch": by_distlaunch,
    "distlaunch torchrun": by_joined,
    "torchrun": by_torchrun,
}
