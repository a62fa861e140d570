"""Launchers that joined one run: common starts, ends and restarts."""

import json
import os
import re
import shutil
import signal
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from textwrap import dedent

import pytest

from distlaunch.errors import Exit
from tests.faults.disks import small_disk
from tests.harness import (
    PATIENCE_S,
    PRESS_S,
    all_ended_well,
    children_of,
    completed,
    held,
    open_gate,
    wait_gone,
)
from tests.process.commands import SLEEPER, adds, sleeper
from tests.process.launchers import LOST, launcher, launchers, statuses, told, workers
from tests.process.torchruns import BOTH, MAY_DIFFER, NEEDS_TORCH, OURS, TELL, free_port, script

pytestmark = NEEDS_TORCH


# Starts


@pytest.mark.once
def test_workers_get_what_two_torchruns_give(tmp_path: Path) -> None:
    """But that torch's node 0 is any, and MASTER_PORT one of its own."""
    for name, argv in zip(("torchrun", "ours"), BOTH, strict=True):
        port, words = free_port(), ("--nproc-per-node=2", "--rdzv-id=a b")
        script(tmp_path / name, TELL)
        start = partial(launcher, tmp_path / name, port, *words, meets="c10d", argv=argv, args=".")
        with start() as first, start() as second:
            assert statuses([first, second]) == [0, 0], told([first, second])
    for rank in map(str, range(4)):
        theirs, mine = (
            json.loads((tmp_path / name / rank).read_text())["env"] for name in ("torchrun", "ours")
        )
        differing = {key for key in {*theirs, *mine} if theirs.get(key) != mine.get(key)}
        assert differing - {"PWD", "TMPDIR"} <= {*MAY_DIFFER, "MASTER_ADDR", "MASTER_PORT"}
        assert (mine["MASTER_ADDR"], mine["MASTER_PORT"]) == ("localhost", str(port))


@pytest.mark.parametrize("where", ["--master-addr=127.0.0.2", "--rdzv-backend=c10d"])
def test_any_loopback_address_is_of_this_machine(tmp_path: Path, where: str) -> None:
    script(tmp_path, "import os; print(os.environ['MASTER_ADDR'], os.environ['WORLD_SIZE'])")
    port = free_port()
    words = (where, f"--rdzv-endpoint=127.0.0.2:{port}") if "c10d" in where else (where,)
    with launcher(tmp_path, port, *words) as first, launcher(tmp_path, port, *words, node=1) as second:
        assert statuses([first, second]) == [0, 0], told([first, second])
        assert [first.stdout, second.stdout] == ["127.0.0.2 2\n", "127.0.0.2 2\n"]


@pytest.mark.skipif(not shutil.which("systemd-tmpfiles"), reason="missing: systemd-tmpfiles (systemd)")
def test_what_deletes_old_files_from_tmp_leaves_those_of_a_run(tmp_path: Path) -> None:
    """As after 10 days on many systems: all that did not change meanwhile is old."""
    script(tmp_path, SLEEPER)
    with launchers(tmp_path, "--tee=3") as runs:
        workers(runs)
        (place := tmp_path / "tmp" / "old").touch()
        before = {path for path in place.parent.rglob("*") if path != place}
        (tmp_path / "clean.conf").write_text(f"q {place.parent} 1777 - - 0\n")
        completed(["systemd-tmpfiles", "--clean", tmp_path / "clean.conf"])
        assert not place.exists()
        assert before - set(place.parent.rglob("*")) == set()
        assert len([path for path in before if path.name.startswith(("torchrun-", "distlaunch-agent-"))]) == 4
        runs[0].process.send_signal(signal.SIGINT)
        statuses(runs)


@pytest.mark.parametrize("controller", [0, 1])
def test_keeps_node_ranks_that_all_launchers_have(tmp_path: Path, controller: int) -> None:
    script(tmp_path, 'import os; os.write(1, (os.environ["GROUP_RANK"] + os.environ["MINE"]).encode())')
    port = free_port()
    with ExitStack() as stack:
        runs = []
        for node in (1, 0):
            words = (f"--node-rank={node}", f"--rdzv-conf=is_host={int(node == controller)}")
            runs.append(stack.enter_context(launcher(tmp_path, port, *words, meets="c10d", MINE=str(node))))
        assert statuses(runs) == [0, 0], told(runs)
        assert [run.stdout for run in runs] == ["11", "00"]


def test_ignores_a_node_rank_that_two_launchers_have(place: Path) -> None:
    """As where the shell of the batch script fills in $SLURM_NODEID for all."""
    with launchers(place, "--node-rank=0", meets="c10d") as runs:
        workers(runs)
        says = {rank: "this is node" in run.stderr for run in runs for rank in run.worker_pids()}
        assert says == {0: False, 1: True}
        assert "this is node 1, not --node-rank 0: with c10d" in told(runs)


def test_each_launcher_has_its_role_and_shows_and_keeps_what_its_own_ranks_print(tmp_path: Path) -> None:
    """They have /dev/null as their input."""
    names = ("RANK", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE")
    script(tmp_path, f"import os, sys; print(*map(os.environ.get, {names}), repr(sys.stdin.readline()))")
    port, words = free_port(), ("--nproc-per-node=2", "--tee=3", "--log-dir=logs")
    start = partial(launcher, tmp_path, port, *words)
    with start("--role=reader") as reader, start("--role=trainer", node=1) as trainer:
        assert statuses([reader, trainer]) == [0, 0]
    logs = (tmp_path / "logs").rglob("*.log")
    kept = {path.read_text(): str(path.relative_to(tmp_path / "logs")).partition("/")[2] for path in logs}
    for rank in range(4):
        run, other, role = (trainer, reader, "trainer") if rank > 1 else (reader, trainer, "reader")
        line = f"{rank} {role} {rank % 2} 2 ''\n"
        assert f"[{role}{rank % 2}]:{line}" in run.stdout
        assert line not in other.stdout
        assert kept[line] == f"attempt_0/{rank % 2}/stdout.log"


def test_a_leftover_number_of_mpis_descriptor_means_nothing(tmp_path: Path) -> None:
    script(tmp_path, "print('here')")
    start = partial(launcher, tmp_path, free_port(), PMI_FD="99")
    with start() as first, start(node=1) as second:
        assert statuses([first, second]) == [0, 0], told([first, second])
        assert [first.stdout, second.stdout] == ["here\n", "here\n"]


# Ends


@pytest.mark.parametrize(("meets", "fails"), [("static", 0), ("static", 1), ("c10d", 1)])
def test_a_failing_rank_ends_all_nodes_and_each_says_which(tmp_path: Path, meets: str, fails: int) -> None:
    fail = f"if os.environ['RANK'] == '{fails}': print('bad', file=sys.stderr); sys.exit(5)"
    script(tmp_path, f"import os, signal, sys\n{fail}\nsignal.pause()")
    with launchers(tmp_path, "--max-restarts=1", meets=meets) as runs:
        assert statuses(runs) == [5, 5], told(runs)
    for run in runs:  # only the controller knows in the end which rank failed first
        first = " first" if "ended after" in run.stderr else ""
        assert re.search(rf"distlaunch: rank {fails} \(\S+\) failed{first}: exit status 5\b", run.stderr)
        assert "not restarting: already restarted once" in run.stderr
    (controller,) = (run for run in runs if "ended after" in run.stderr)
    assert "distlaunch:   | bad\n" in controller.stderr
    assert "\nbad\n" in told(runs)
    assert controller.stderr.count("restart 1 of 1") == told(runs).count("; restarting") == 1


def test_all_launchers_name_a_script_that_one_node_lacks(tmp_path: Path) -> None:
    script(tmp_path, "import signal; signal.pause()")
    (tmp_path / "elsewhere").mkdir()
    port = free_port()
    with launcher(tmp_path, port) as first, launcher(tmp_path / "elsewhere", port, node=1) as second:
        assert statuses([first, second]) == [127, 127]
        for run in (first, second):
            assert "could not be started: worker.py: No such file or directory" in run.stderr


@pytest.mark.parametrize("restarts", [0, 3])
def test_a_node_that_is_done_ends_or_restarts_with_the_others(tmp_path: Path, restarts: int) -> None:
    """The rank of node 0 succeeds long before that of node 1 fails; torchrun's node 0 would end with 0."""
    ends_later = """
        import os, sys
        os.write(1, f"ready {os.environ['RANK']} {os.getpid()}\\n".encode())
        if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            open("fifo").read()
            sys.exit(7)
    """
    script(tmp_path, ends_later)
    os.mkfifo(tmp_path / "fifo")
    with launchers(tmp_path, f"--max-restarts={restarts}") as runs:
        wait_gone([*runs[0].wait_ready(1).values()], PATIENCE_S)
        runs[1].wait_ready(1)
        (tmp_path / "fifo").write_text("end")
        assert statuses(runs) == ([0, 0] if restarts else [7, 7]), told(runs)
        assert [run.stdout.count("ready") for run in runs] == ([2, 2] if restarts else [1, 1])
        assert all(re.search(r"rank 1 \(\S+\) failed( first)?: exit status 7", run.stderr) for run in runs)


@pytest.mark.parametrize("number", [0, 1], ids=["controller", "another"])
@pytest.mark.parametrize("meets", ["static", "c10d, told"])
def test_a_killed_launcher_ends_the_others_and_leaves_nothing(place: Path, number: int, meets: str) -> None:
    with launchers(place, meets=meets, count=3) as runs:
        pids = workers(runs)
        runs[number].process.kill()
        wait_gone(pids, 10.0)
        words = "was lost: its launcher" if number else "lost the controller on localhost: "
        for run in (run for i, run in enumerate(runs) if i != number):
            assert run.wait() == LOST
            assert words in run.stderr, run.stderr


def test_a_killed_agent_of_a_launcher_ends_all(place: Path) -> None:
    """A launcher that joined is the guardian of one, and says so."""
    with launchers(place) as runs:
        pids = workers(runs)
        (agent,) = children_of(runs[1].process.pid)
        os.kill(agent, signal.SIGKILL)
        assert statuses(runs) == [LOST, LOST], told(runs)
        wait_gone(pids, 10.0)
        assert "was lost: its agent" in runs[0].stderr
        assert re.search("this node's agent was killed.*last output may be missing", runs[1].stderr)


def test_each_launcher_counts_what_a_full_disk_loses(tmp_path: Path) -> None:
    """They save the output of their own ranks."""
    script(tmp_path, 'for _ in range(3000): print("x" * 1023)')
    with small_disk(tmp_path / "logs", "size=1m"), launchers(tmp_path, "-r3", "--log-dir=logs") as runs:
        assert statuses(runs) == [0, 0], told(runs)
        kept = sum(path.stat().st_size for path in (tmp_path / "logs").glob("**/stdout.log"))
        lost = [
            re.findall(r"(\d+) bytes could not be written to .*: No space left", run.stderr) for run in runs
        ]
    assert sum(int(count) for (count,) in lost) >= 2 * 3000 * 1024 - kept > 0, told(runs)


@pytest.mark.parametrize(("number", "name"), [(0, "INT"), (0, "HUP"), (1, "INT"), (1, "TERM"), (1, "QUIT")])
def test_an_interrupt_of_one_launcher_ends_all(place: Path, number: int, name: str) -> None:
    signum = signal.Signals[f"SIG{name}"]
    with launchers(place) as runs:
        pids = workers(runs)
        runs[number].process.send_signal(signal.SIGTSTP)
        runs[number].wait_for("can't be suspended")
        runs[number].process.send_signal(signum)
        assert statuses(runs) == [128 + signum, 128 + signum], told(runs)
        wait_gone(pids, 5.0)
        where = f" on {os.uname().nodename}" if number else ""
        assert all(f"distlaunch: stopped by {signum.name}{where}\n" in run.stderr for run in runs)


@pytest.mark.parametrize("pressed", [[1], [0, 1]], ids=["another", "all"])
def test_a_signal_to_all_launchers_counts_once_and_a_second_kills(tmp_path: Path, pressed: list[int]) -> None:
    """A scheduler sends it to all."""
    stubborn = """
        import os, signal
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: os.write(1, b"told\\n"))
    """
    script(tmp_path, sleeper(stubborn))
    with launchers(tmp_path) as runs:
        pids = workers(runs)
        for number in pressed:
            runs[number].process.send_signal(signal.SIGINT)
        for run in runs:
            run.wait_for("SIGINT")
            run.wait_for("told\n")
        time.sleep(PRESS_S)
        with held(pids) as processes:
            assert not any(processes.has_ended(pid, 0.0) for pid in pids)
        for number in pressed:
            runs[number].process.send_signal(signal.SIGINT)
        wait_gone(pids, 5.0)
        assert statuses(runs) == [130, 130], told(runs)


def test_a_launcher_under_nohup_outlives_its_terminal(place: Path) -> None:
    port = free_port()
    with launcher(place, port) as first, launcher(place, port, node=1, argv=["nohup", *OURS]) as second:
        workers([first, second])
        for signum in (signal.SIGHUP, signal.SIGTSTP):
            second.process.send_signal(signum)
        second.wait_for("can't be suspended")  # pending signals are handled in the order of their numbers
        second.process.terminate()
        assert statuses([first, second]) == [143, 143], told([first, second])


def test_killed_launchers_can_be_started_again_at_once(place: Path) -> None:
    port = free_port()
    for _ in range(2):
        with launcher(place, port) as first, launcher(place, port, node=1) as second:
            workers([first, second])
            for run in (first, second):
                run.process.kill()


STORES = sleeper("""
    import os, signal, socket, sys
    if os.environ["RANK"] == "0":
        store = socket.create_server(("", int(os.environ["MASTER_PORT"])))
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(open("gate").read()))
""")


@pytest.mark.parametrize("meets", ["static", "c10d"])
@pytest.mark.parametrize(
    ("signum", "told_by"),
    [
        (signal.SIGKILL, "uses the port, perhaps a rank of a launcher that was killed"),
        (signal.SIGTERM, "another launcher on this host is ending its job"),
    ],
)
def test_launchers_that_are_started_again_wait_until_the_last_rank_0_has_left_the_port(
    tmp_path: Path, gate: Path, meets: str, signum: int, told_by: str
) -> None:
    """It may be saving a checkpoint."""
    script(tmp_path, STORES)
    start = partial(launcher, tmp_path, free_port(), meets=meets)
    with start() as first, start(node=1) as second:
        workers([first, second])
        for run in (first, second):
            run.process.send_signal(signum)
        with start() as again:
            again.wait_for(told_by)
            open_gate(gate)
            with start(node=1) as other:
                workers([again, other])
                other.process.terminate()
                open_gate(gate)
                assert statuses([again, other]) == [143, 143], told([again, other])


# Restarts


def test_a_failing_rank_restarts_the_ranks_of_all_nodes(tmp_path: Path) -> None:
    """The other rank fails, too, often before its launcher is told."""
    first = "os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'"
    script(tmp_path, adds(after=f"{first} and dist.get_rank() == 1 and os._exit(5)"))
    with launchers(tmp_path, "--max-restarts=2", meets="c10d") as runs:
        all_ended_well(runs, last="sum 2\n")
        sums = [run.stdout.count("sum 2\n") for run in runs]
        assert 2 in sums and 0 not in sums, told(runs)
        for ending in ("restart 1 of 2", "restarting"):
            failed = rf"(?m)^distlaunch: rank 1 .* failed: exit status 5; {ending}$"
            assert re.search(failed, told(runs)), told(runs)


@pytest.mark.parametrize("meets", ["static", "c10d, told"])
def test_only_a_launcher_of_the_missing_node_joins_a_run_that_lost_it(tmp_path: Path, meets: str) -> None:
    """With new files for what its ranks print."""
    script(tmp_path, SLEEPER.replace("True", "count != '1'"))
    words = ("--max-restarts=1", "--tee=3", "--log-dir=logs")
    start = partial(launcher, tmp_path, free_port(), *words, meets=meets, nodes=3)
    with ExitStack() as stack:
        first, _, third = runs = [stack.enter_context(start(node=node)) for node in range(3)]
        pids = workers(runs)
        third.process.kill()
        first.wait_for("was lost: its launcher")
        if meets == "static":
            full = "its node rank is 1; the run is waiting for node 2"
            other = stack.enter_context(start(node=1))
            assert (other.wait(), full in other.stderr) == (Exit.USAGE, True)
            first.wait_for(full)
        runs[2] = stack.enter_context(start(node=2))
        assert statuses(runs) == [0, 0, 0], told(runs)
        assert re.search(r"joined as node [12]\n", first.stderr)  # c10d numbers nodes as they come
        assert [run.stdout.count(" 1 of 3") for run in runs] == [1, 1, 1]
        wait_gone(pids, 0.0)
    kept = [path.read_text() for path in (tmp_path / "logs").rglob("stdout.log")]
    assert sum(" 1 of 3" in text for text in kept) == 3


SAVES = """
    import os, signal, sys
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("2", "0"):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(os.write(1, b"saves\\n") and open("gate").read()))
"""


def test_a_launcher_waits_while_the_rank_of_its_lost_node_still_saves(tmp_path: Path, gate: Path) -> None:
    """Although the run already waits for another node."""
    script(tmp_path, dedent(SAVES) + dedent(SLEEPER.replace("True", "count != '1'")))
    start = partial(launcher, tmp_path, free_port(), "--max-restarts=1", nodes=3)
    with ExitStack() as stack:
        first, second, third = runs = [stack.enter_context(start(node=node)) for node in range(3)]
        workers(runs)
        for run in (second, third):
            run.process.kill()
        first.wait_for("was lost: its launcher was killed", times=2)
        third = stack.enter_context(start(node=2))
        third.wait_for("ranks of node 2, which was lost, may not have ended yet")
        second = stack.enter_context(start(node=1))
        first.wait_for("joined as node 1")
        open_gate(gate)
        assert statuses([first, second, third]) == [0, 0, 0], told([first, second, third])


# Elastic jobs


def test_a_launcher_that_joins_while_the_job_is_ending_learns_how_it_ended(
    tmp_path: Path, gate: Path
) -> None:
    """It can't take part anymore."""
    saves = sleeper("""
        import os, signal, sys
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(open("gate").read()))
    """)
    fails = "if rank == '1':\n    sys.exit(open('other').read() or 7)\n"
    script(tmp_path, saves.replace("while True", f"{fails}while True"))
    os.mkfifo(tmp_path / "other")
    words = ("--rdzv-conf=last_call_timeout=1", "--nproc-per-node=2", "--shutdown-timeout=60")
    start = partial(launcher, tmp_path, free_port(), *words, nodes="1:2", meets="c10d")
    with start() as first:
        workers([first], each=2)
        open_gate(tmp_path / "other")
        first.wait_for("failed: exit status 7")
        with start() as late:
            first.wait_for("joined as node 1")
            open_gate(gate)
            assert statuses([first, late]) == [7, 7], told([first, late])
            assert "the job had ended: rank 1" in late.stderr


def test_an_elastic_job_starts_with_the_fewest_and_takes_a_late_launcher_in(place: Path) -> None:
    """All start again with the larger world, in which the late node has more workers than the first.

    As with torchrun, that is no restart.
    """
    port, words = free_port(), ("--rdzv-conf=last_call_timeout=1",)
    with launcher(place, port, *words, nodes="1:2", meets="c10d") as first:
        first.wait_for("distlaunch: starting on 1 node, without node 1\n")
        assert len(workers([first])) == 1
        assert "0 of 1" in first.stdout
        (elsewhere := place / "elsewhere").mkdir()
        wrong = (
            (elsewhere, "1:2", (), "can't read the script .*worker.py"),
            (place, "1:2", ("--no-python",), "can't find the program .*worker.py"),
            (place, "1:3", (), "it was started for 1:3 nodes, but the controller for 1:2"),
            (place, "2", (), "it was started for 2 nodes, but the controller for 1:2"),
        )
        for where, nodes, more, why in wrong:  # which ends no run that goes well without it
            with launcher(where, port, *words, *more, nodes=nodes, meets="c10d") as late:
                assert late.wait() == Exit.USAGE, late.stderr
                assert re.search(f"refused the launcher on .*: {why}", late.stderr), late.stderr
        with launcher(place, port, *words, "--nproc-per-node=2", nodes="1:2", meets="c10d") as second:
            workers([first, second], each=2)
            assert first.stdout.endswith(" 0 of 3\n")
            assert "joined as node 1" in first.stderr
            first.process.terminate()
            assert statuses([first, second]) == [143, 143], told([first, second])


def test_an_elastic_job_begins_at_once_when_all_are_there(tmp_path: Path) -> None:
    script(tmp_path, "import os; print(os.environ['WORLD_SIZE'])")
    start = partial(launcher, tmp_path, free_port(), "--rdzv-conf=last_call_timeout=600", meets="c10d")
    with start(nodes="1:2") as first, start(nodes="1:2") as second:
        assert statuses([first, second]) == [0, 0], told([first, second])
        assert [first.stdout, second.stdout] == ["2\n", "2\n"]


def test_an_elastic_job_continues_without_a_launcher_that_is_killed(place: Path) -> None:
    start = partial(launcher, place, free_port(), "--max-restarts=1", nodes="2:3", meets="c10d")
    conf = "--rdzv-conf=last_call_timeout=1,is_host="
    with start(f"{conf}1") as first, start(f"{conf}0") as second, start(f"{conf}0") as third:
        pids = workers([first, second, third])
        second.process.kill()
        second.wait()
        first.wait_for("was lost: its launcher was killed; restart 1 of 1")
        workers([first, third], attempt=1)
        assert first.stdout.endswith(" 1 of 2\n")
        wait_gone(pids, 0.0)
        third.process.terminate()
        assert statuses([first, third]) == [143, 143], told([first, third])
