"""Kills at random moments of runs that bring their code: no store is wrong then, and the next run is right.

python -m tests.faults.sync --kills 50 --seed 7
"""

import argparse
import contextlib
import random
import tempfile
import time
from pathlib import Path

from distlaunch.agent.tree import is_as_listed, read_manifest
from tests.cluster.hosts import Site, bed_of
from tests.cluster.test_sync import Desk, desk_of
from tests.harness import children_of, command_line, kill, running, wait_until

SIZE, LATEST_S = 20_000, 1.6
"""The largest size of a file in bytes, and the latest moment after the first agent's start."""


def pythons(desk: Desk) -> list[int]:
    """The guardians, agents and ranks on the hosts."""
    found = desk.site.bed.processes() - {host.pid for host in desk.site.bed.hosts.values()}
    return [pid for pid in found if "python" in "".join(command_line(pid)[:1])]


def victims(desk: Desk, who: str) -> list[int]:
    """The guardians or agents that are there."""
    mine = pythons(desk)
    agents = [child for pid in mine for child in children_of(pid) if child in mine]
    return agents if who == "agent" else [pid for pid in mine if pid not in agents]


def strike(desk: Desk, chance: random.Random, files: int) -> str:
    """Kill somebody at a random moment, and check what is left."""
    for number in chance.sample(range(files), files // 3):
        (desk.repository / f"package/{number}.bin").write_bytes(chance.randbytes(chance.randrange(SIZE)))
    who, after_s = chance.choice(["controller", "guardian", "agent"]), chance.uniform(0, LATEST_S)
    with running(desk.job(timeouts={"stop": "1s", "connect": "120s"}), env=desk.env) as run:
        wait_until(lambda: bool(pythons(desk)), lambda: run.stderr)
        time.sleep(after_s)  # the moment itself is what is tried
        found = [run.process.pid] if who == "controller" else victims(desk, who)
        with contextlib.suppress(ProcessLookupError, IndexError):  # none is there any more
            if run.process.poll() is None:
                kill(chance.choice(found))
        status = run.wait()
    assert "Traceback" not in run.stderr, run.stderr
    wait_until(lambda: not pythons(desk), lambda: f"left: {pythons(desk)}")
    check(desk)
    done = desk.run(timeouts={"connect": "120s"})
    assert (done.returncode, done.stdout.count(desk.expected())) == (0, 3), done.stderr
    desk.check_clean()
    return f"{who} after {after_s:.2f} s: {len(found)} there, status {status}"


def check(desk: Desk) -> None:
    """Every content is what its name says. Trees have only right files; one may have been half removed."""
    for store in desk.stores():
        desk.check_contents(store)
        for note in store.glob("runs/*.tree"):
            tree = note.with_suffix("")
            found = {str(path.relative_to(tree)) for path in tree.rglob("*") if not path.is_dir()}
            entries = {entry.path: entry for entry in read_manifest(note.read_bytes())} if found else {}
            for path in found:
                assert "__pycache__" in path or is_as_listed(str(tree / path), entries[path]), tree / path


def series(site: Site, kills: int, seed: int, files: int) -> None:
    """So many kills, with a line for each. AssertionError if anything is wrong afterwards."""
    desk, chance = desk_of(site), random.Random(seed)
    for number in range(files):
        (desk.repository / f"package/{number}.bin").write_bytes(chance.randbytes(SIZE))
    for number in range(kills):
        try:
            print(f"{number:>4} {strike(desk, chance, files)}", flush=True)
        except AssertionError as error:
            raise type(error)(f"{error}\nkill {number} of seed {seed}") from error


def main() -> None:
    """Run a series from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        bed = stack.enter_context(bed_of(3, Path(directory) / "bed"))
        series(Site(bed, Path(directory), stack), given.kills, given.seed, given.files)


if __name__ == "__main__":
    main()
