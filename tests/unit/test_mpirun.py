"""Ranks that mpirun has places for: its command line, and what the supervisor makes of its end."""

import pytest

from distlaunch.agent.messages import MpiPlaces
from distlaunch.agent.mpi import command_line
from distlaunch.agent.mpi_hosts import host_of, place_of
from distlaunch.errors import JobError
from distlaunch.plan.layout import Facts, make_plan, planned_workers
from distlaunch.plan.shell_text import shell_text
from distlaunch.plan.torchrun_text import torchrun_text
from distlaunch.state.actions import RunDaemon
from distlaunch.state.events import DaemonWanted, Event, MpiEnded, MpiPlaceLost
from distlaunch.state.job import Phase
from distlaunch.supervisor.mpi import VERDICT_S
from tests.unit.samples import spec_of
from tests.unit.test_supervisor import TWO, History, exited, job_in, lost, wanted

MPI = f"{TWO}\nlauncher: mpirun"
OPEN_MPI, MPICH = "mpirun (Open MPI) 5.0.3", "HYDRA build details:"
PLACES = MpiPlaces(0, ["mpirun", "-v"], [[2, "/a/python"], [1, "/b/python"]], "name", "10.0.0.1")


def test_open_mpi_is_told_the_place_of_each_rank() -> None:
    argv = command_line(OPEN_MPI, PLACES, "/tmp/shell")
    assert argv[:2] == ["mpirun", "-v"]
    assert argv[argv.index("plm_rsh_agent") + 1] == "/tmp/shell"
    first, second = argv[: argv.index(":")], argv[argv.index(":") + 1 :]
    assert first[first.index("-n") : first.index("-n") + 5] == [
        "-n",
        "2",
        "--host",
        "198.18.0.0:2",
        "/a/python",
    ]
    assert second[:5] == ["-n", "1", "--host", "198.18.0.1:1", "/b/python"]
    assert (first[-1], second[-1]) == ("name-0", "name-1")


def test_hydra_is_told_the_place_of_each_rank() -> None:
    argv = command_line(MPICH, PLACES, "/tmp/shell")
    assert argv[argv.index("-hosts") + 1] == "198.18.0.0:2,198.18.0.1:1"
    assert argv[argv.index("-launcher-exec") + 1] == "/tmp/shell"
    assert argv[argv.index("-localhost") + 1] == "10.0.0.1"
    assert "--host" not in argv and (argv[argv.index(":") - 1], argv[-1]) == ("name-0", "name-1")


def test_what_mpirun_runs_has_no_line_breaks_and_no_quotes_of_its_shells() -> None:
    for word in command_line(OPEN_MPI, PLACES, "/tmp/shell"):
        assert not set('\n"`$\\') & set(word)


def test_a_places_name_tells_the_place() -> None:
    assert [place_of(host_of(place)) for place in (0, 7, 255, 256, 65535)] == [0, 7, 255, 256, 65535]
    for host in ("gpu-a", "198.18.1", ""):
        with pytest.raises(ValueError, match=r"unpack|invalid literal"):
            place_of(host)


def test_a_daemon_runs_where_mpirun_wants_it() -> None:
    job = job_in("running", MPI)
    assert wanted(job.feed(DaemonWanted(0, 1, "orted"))) == [RunDaemon(1, "orted")]
    assert wanted(job.feed(DaemonWanted(0, 0, "orted"))) == [RunDaemon(0, "orted")]
    for strange in (DaemonWanted(0, 2, "orted"), DaemonWanted(0, -1, "orted"), DaemonWanted(1, 0, "orted")):
        assert wanted(job.feed(strange)) == []
    assert wanted(job_in("running").feed(DaemonWanted(0, 1, "id"))) == []
    job.feed(lost(1))
    assert wanted(job.feed(DaemonWanted(0, 1, "orted"))) == []


def test_mpirun_that_was_killed_ends_the_job_at_once() -> None:
    job = job_in("running", MPI)
    job.feed(MpiEnded(0, "mpirun", -9, "noise"))
    assert job.state.phase is Phase.STOPPING
    assert _cause(job) == "mpirun on a ended: killed by signal 9 (SIGKILL)"
    assert job.state.outcome == 137


def test_mpirun_that_starts_nothing_ends_the_job_with_its_words() -> None:
    job = History(MPI).to_preparing()
    job.state = job.state._replace(phase=Phase.RUNNING)
    job.feed(
        MpiEnded(0, "mpirun", 1, "-----\n\nno such option on node 198.18.0.1\n=   second\nx\ny\n-----\n")
    )
    why = "no such option on node b / second / x"
    assert (
        _cause(job)
        == f"mpirun on a ended before all ranks had started (4 had not): exit status 1; it said: {why}"
    )
    again = History(MPI).to_preparing()
    again.state = again.state._replace(phase=Phase.RUNNING)
    again.feed(MpiEnded(0, "true", 0, ""))
    assert _cause(again) == "true on a ended before all ranks had started (4 had not): exit status 0"
    assert again.state.outcome == 1


def test_a_rank_that_failed_is_blamed_before_mpirun_which_noticed_it_first() -> None:
    for event in (MpiEnded(0, "mpirun", 7, "aborted"), MpiPlaceLost(0, 1, 1000.0)):
        job = job_in("running", MPI)
        job.feed(event)
        assert job.state.phase is Phase.RUNNING
        job.feed(exited(1, 0, 7, job.now))
        assert job.blamed == (7, 2, 1)


def test_without_such_a_rank_the_first_whose_place_was_lost_is_named() -> None:
    job = job_in("running", MPI)
    job.feed(MpiPlaceLost(0, 0, 1000.3), MpiPlaceLost(1, 1, 1000.1), MpiPlaceLost(0, 1, 1000.2))
    job.wait(VERDICT_S)
    assert job.blamed == (1, 3, 1)
    assert _cause(job) == "rank 3 (b): its process below mpirun was killed"


@pytest.mark.parametrize("mpirun_first", [True, False])
def test_what_mpirun_says_of_it_is_told_too(mpirun_first: bool) -> None:
    heard: list[Event] = [
        MpiPlaceLost(0, 0, 1000.2),
        MpiEnded(0, "mpirun", 9, "bad termination"),
        MpiPlaceLost(1, 1, 1000.1),
    ]
    job = job_in("running", MPI)
    job.feed(*((heard[1], heard[0], heard[2]) if mpirun_first else heard))
    job.wait(VERDICT_S)
    assert job.blamed == (9, 3, 1)
    killed = "rank 3 (b): its process below mpirun was killed"
    assert _cause(job) == f"{killed}; mpirun on a ended: exit status 9; it said: bad termination"


def test_a_daemons_end_says_no_more_than_the_loss_of_a_place() -> None:
    job = job_in("running", MPI)
    job.feed(MpiPlaceLost(1, 1, 1000.0), MpiEnded(1, "orted", 1, "assert"))
    job.wait(VERDICT_S)
    assert _cause(job) == "rank 3 (b): its process below mpirun was killed"


def test_mpirun_that_ends_well_says_nothing() -> None:
    job = job_in("running", MPI)
    job.feed(MpiEnded(0, "mpirun", 0, ""))
    job.wait(10.0)
    assert not job.state.verdict
    job.feed(*(exited(node, rank, 0, job.now) for node in (0, 1) for rank in (0, 1)))
    assert job.state.verdict and job.state.cause is None


def test_a_place_of_a_rank_that_has_ended_says_nothing() -> None:
    job = job_in("running", MPI)
    job.feed(exited(0, 0, 0, job.now), MpiPlaceLost(0, 0, 1000.0), MpiPlaceLost(0, 9, 1000.0))
    assert job.state.suspect is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (TWO.replace("gloo", "mpi"), "backend: mpi needs ranks that MPI starts: set launcher: mpirun"),
    ],
)
def test_who_starts_the_ranks_must_be_clear(text: str, told: str) -> None:
    with pytest.raises(JobError) as raised:
        spec_of(text)
    assert told in str(raised.value)


def test_the_command_may_have_options() -> None:
    assert spec_of(f"{TWO}\nmpirun: [mpirun, --mca, btl, tcp]").mpirun == ("mpirun", "--mca", "btl", "tcp")
    assert spec_of(f"{TWO}\nmpirun: mpiexec.hydra\nlauncher: mpirun").mpirun == ("mpiexec.hydra",)
    assert spec_of(MPI).mpirun == ("mpirun",) and not spec_of(TWO).mpirun


def test_command_lines_without_mpirun_say_so() -> None:
    plan = make_plan(spec_of(MPI), {0: Facts("python3"), 1: Facts("python3")})
    left_out = "# mpirun is left out: these ranks are not MPI's"
    assert left_out in shell_text(plan, planned_workers(plan))
    assert left_out in torchrun_text(plan, 29500)


def _cause(job: History) -> str:
    assert job.state.cause is not None
    return job.state.cause.text
