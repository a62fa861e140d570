"""Failures of ranks, agents and connections on this machine, and how they are explained."""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from distlaunch.agent.messages import LATER_S
from distlaunch.agent.procfs import state
from tests.cluster.hosts import parent_of
from tests.faults.agents import python_with
from tests.harness import (
    PATIENCE_S,
    PRESS_S,
    agents_of,
    children_of,
    completed,
    descendants_of,
    distlaunch,
    distlaunch_argv,
    kill,
    on_a_terminal,
    on_time,
    open_gate,
    program,
    running,
    wait_gone,
    wait_until,
    write_job,
)
from tests.process.commands import FOUR, ONE, SLEEPER, TWO, run_one, sleeper


def test_does_not_try_the_same_exception_a_third_time(tmp_path: Path) -> None:
    worker = "import os\n{}[os.getpid()]"
    done = run_one(tmp_path, worker, "restarts: {max: 5}\n", status=1)
    assert done.stderr.count("; restart ") == 1
    words = "not restarting: rank 0 raised the same KeyError at worker.py:2 as in the previous attempt"
    assert words in done.stderr
    (summary,) = (tmp_path / "runs").glob("*/summary.json")
    assert [each["kind"] for each in json.loads(summary.read_text())["restarts"]] == ["exception"]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signals_that_the_parent_process_had_blocked_stop_a_run(tmp_path: Path, signum: int) -> None:
    block = partial(signal.pthread_sigmask, signal.SIG_BLOCK, [signum])
    with running(write_job(tmp_path, SLEEPER, ONE), preexec_fn=block) as run:
        run.wait_ready(1)
        kill(run.process.pid, signum)
        assert run.wait() == 128 + signum


def test_the_exit_status_is_known_although_the_shell_ignores_the_ends_of_its_children(tmp_path: Path) -> None:
    ignore = partial(signal.signal, signal.SIGCHLD, signal.SIG_IGN)
    done = run_one(tmp_path, "raise SystemExit(3)", status=3, preexec_fn=ignore)
    assert "Traceback" not in done.stderr


def test_a_rank_that_failed_before_it_was_told_to_stop_is_not_called_stopped(tmp_path: Path) -> None:
    """The agent of rank 1 is suspended, so that it learns of the failure and of the stop at the same time."""
    worker = """
        import os
        rank = os.environ["RANK"]
        os.write(1, f"ready {rank} {os.getpid()}\\n".encode())
        open("gate" + rank).read()
        os.write(2, b"no data\\n")
        raise SystemExit(3 + int(rank))
    """
    for rank in (0, 1):
        os.mkfifo(tmp_path / f"gate{rank}")
    with running(write_job(tmp_path, worker, f"{ONE}nodes: 2\n")) as run:
        pid = run.wait_ready(2)[1]
        agent = parent_of(pid)
        kill(agent, signal.SIGSTOP)
        open_gate(tmp_path / "gate1")
        wait_until(lambda: state(pid) == "Z", lambda: f"{pid} still runs")
        open_gate(tmp_path / "gate0")
        run.wait_for("rank 0 (node0) failed")
        kill(agent, signal.SIGCONT)
        assert run.wait() == 3
        assert "rank 1: also failed, exit status 4: no data" in run.stderr


def test_folds_identical_tracebacks(tmp_path: Path) -> None:
    """Those of ranks that fail at the same time, and ignore that they are told to stop."""
    worker = """
        import os, signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with open("release") as release:
            os.write(1, f"ready {os.environ['RANK']} {os.getpid()}\\n".encode())
            release.read()
        raise RuntimeError(f"rank {os.environ['RANK']} is unhappy")
    """
    os.mkfifo(tmp_path / "release")
    release = os.open(tmp_path / "release", os.O_RDWR)
    with running(write_job(tmp_path, worker, TWO)) as run:
        run.wait_ready(2)
        os.close(release)
        assert run.wait() == 1
    assert len(re.findall(r"(?m)^distlaunch:.*RuntimeError: rank", run.stderr)) == 1, run.stderr
    assert "also failed, with the same traceback" in run.stderr


def test_the_cause_stands_above_its_last_output_where_both_streams_go_to_one_place(tmp_path: Path) -> None:
    """A line that lacked its end is shown at the end."""
    worker = "import sys; print('half', end='', flush=True); sys.exit('boom')"
    argv = distlaunch_argv("run", str(write_job(tmp_path, worker, ONE)))
    lines = completed(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout.splitlines()
    cause = "distlaunch: rank 0 (node0) failed first: exit status 1"
    assert lines.count(cause) == 1
    assert lines[lines.index("distlaunch:   | boom") - 1] == cause
    assert "[node0:0] half" in lines


def test_a_line_on_another_stream_does_not_separate_cause_and_output(tmp_path: Path, gate: Path) -> None:
    """A line that lacked its end, on another stream; what was said on stderr has been shown by then."""
    worker = "import os; os.write(1, b'half'); os.write(2, b'boom\\n'); open('gate').read(); os._exit(1)"
    with running(write_job(tmp_path, worker, ONE)) as run:
        run.wait_for("boom")
        open_gate(gate)
        assert run.wait() == 1
    assert run.stderr.count("rank 0 (node0) failed first: exit status 1") == 1
    assert run.stdout == "[node0:0] half\n"


def test_counts_the_lines_left_out_of_the_last_output(tmp_path: Path) -> None:
    worker = "import sys; sys.stderr.write('noise\\n' * 100_000); sys.exit('boom')"
    done = run_one(tmp_path, worker, "logs: {console: none}")
    assert "  | (99977 earlier lines not shown)\n" in done.stderr
    assert done.stderr.count("  | noise") == 23


HANDLED = """
        import fcntl, os, signal, sys, termios, time, traceback
        try:
            import nonesuch
        except ImportError:
            traceback.print_exc()
        while fcntl.ioctl(2, termios.FIONREAD, bytes(4)) != bytes(4):  # until the agent has read it
            time.sleep(0.01)
"""
"""The start of a worker that handles an error."""


def test_names_the_origin_of_a_failure_although_errors_go_to_stdout(tmp_path: Path) -> None:
    """Rank 0 loses rank 1, which has printed its own error and is still shutting down.

    Both have handled another error before.
    """
    worker = f"""{HANDLED}
        os.dup2(1, 2)
        def own_end(*error):
            sys.__excepthook__(*error)
            open("printed", "w").close()
            signal.pause()
        if os.environ["RANK"] == "1":
            sys.excepthook = own_end
            raise ValueError("mine")
        while not os.path.exists("printed"):
            time.sleep(0.02)
        raise RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:1")
    """
    done = distlaunch("run", str(write_job(tmp_path, worker, TWO)), status=1)
    assert "rank 1 (node0) failed first: it raised an exception\n" in done.stderr
    assert "ValueError: mine\n" in done.stderr


def test_a_rank_that_was_stopped_has_not_failed_although_it_has_handled_the_same_error(
    tmp_path: Path,
) -> None:
    worker = f"""{HANDLED}
        if os.environ["RANK"] == "1":
            open("printed", "w").close()
            signal.pause()
        while not os.path.exists("printed"):
            time.sleep(0.02)
        os._exit(3)
    """
    done = distlaunch("run", str(write_job(tmp_path, worker, TWO)), status=3)
    assert "rank 1: stopped by distlaunch\n" in done.stderr


def test_a_reason_on_stderr_counts_after_an_error_on_stdout(tmp_path: Path) -> None:
    """That error was the same in all attempts, but the reasons differ."""
    worker = f"""
        import os, sys, time, traceback
        try:
            import nonesuch
        except ImportError:
            traceback.print_exc(file=sys.stdout)
            sys.stdout.flush()
        time.sleep({LATER_S + 0.2})
        sys.exit("no data " + os.environ["TORCHELASTIC_RESTART_COUNT"])
    """
    done = run_one(tmp_path, worker, "logs: {console: none}\nrestarts: {max: 2, backoff: 0s}")
    assert "nonesuch'\ndistlaunch:   | no data 2\n" in done.stderr


def test_an_error_that_a_rank_has_handled_does_not_make_it_the_origin(tmp_path: Path) -> None:
    """Rank 0 loses rank 2, which has ended. Rank 1 has handled an error and continued."""
    worker = f"""{HANDLED}
        rank = int(os.environ["RANK"])
        if rank == 1:
            time.sleep({LATER_S + 0.2})
            print("step", flush=True)
            open("printed", "w").close()
            signal.pause()
        while not os.path.exists("printed"):
            time.sleep(0.02)
        if rank == 0:
            raise RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:1")
    """
    done = distlaunch("run", str(write_job(tmp_path, worker, "procs_per_node: 3\n")), status=1)
    assert "rank 0 (node0) failed first: exit status 1, after losing the connection" in done.stderr


def test_a_rank_that_an_abort_ends_after_it_has_lost_a_peer_is_not_the_origin(tmp_path: Path) -> None:
    """It prints that to stdout and exits, but a thread of gloo outlives the interpreter."""
    worker = """
        import os, time
        lost = "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:32928"
        if os.environ["RANK"] == "1":
            while not os.path.exists("aborted"):
                time.sleep(0.02)
            raise ValueError("bad sample")
        print(lost, flush=True)
        os.write(2, b"terminate called without an active exception\\n")
        open("aborted", "w").close()
        os.abort()
    """
    job = write_job(tmp_path, worker, "procs_per_node: 2\nrendezvous: none\n")
    assert "rank 1 (node0) failed first: exit status 1" in distlaunch("run", str(job), status=1).stderr


@pytest.mark.parametrize("more", [0, 30])
def test_a_long_traceback_keeps_its_first_lines_and_its_exception(tmp_path: Path, more: int) -> None:
    """The first lines are those of the user's code; libraries come after them, and perhaps more output."""
    worker = f"""
        import atexit, sys
        def train(): library(20)
        def library(depth): depth and inner(depth) or 1 / 0
        def inner(depth): library(depth - 1)
        atexit.register(lambda: sys.stderr.write("cleaning up\\n" * {more}))
        train()
    """
    done = run_one(tmp_path, worker, "logs: {console: none}")
    shown = re.findall(r"distlaunch:   \| (.*)", done.stderr)
    assert len(shown) == 24 + 1 + 2 * bool(more)
    assert shown[0] == "Traceback (most recent call last):"
    assert "in <module>" in shown[1]
    assert "lines not shown)" in shown[7]
    error = "ZeroDivisionError: division by zero"
    assert (shown[8] if more else shown[-1]) == error
    [events] = tmp_path.glob("runs/*/events.jsonl")
    events.unlink()  # `why` then has only the summary
    assert f"  {error}\n" in distlaunch("why", str(events.parent), status=0).stdout


NO_INPUT = "nodes: [there]\nlauncher: {command: [sh, -c, 'exec \"$@\" </dev/null', sh]}\n"
UNDER_RUN = "which ranks lack: set `stdin: rank 0`, or use `distlaunch torchrun`"


@pytest.mark.parametrize(
    ("worker", "keys", "status", "words"),
    [
        ("input('name? ')", "", 1, f"hint: input() needs stdin, {UNDER_RUN}\n"),
        ("breakpoint()", "", 1, f"hint: breakpoint() needs a terminal, {UNDER_RUN}"),
        (SLEEPER, "timeouts: {job: 500ms}", 124, "the job timed out after 0.5 s (timeouts.job)"),
        ("", NO_INPUT, 69, "no python; it received no input: make the command pass on standard input"),
    ],
    ids=["input", "breakpoint", "time limit", "no input"],
)
def test_explains_a_failure(tmp_path: Path, worker: str, keys: str, status: int, words: str) -> None:
    done = run_one(tmp_path, worker, keys, status=status)
    assert words in done.stderr


RECORD = {"message": {"message": "boom", "extraInfo": {"py_callstack": "Traceback: deep\nboom at last"}}}


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (json.dumps(RECORD), "  | boom at last"),
        *((odd, "") for odd in ('{"message": "boom", "x": NaN}', '{"message": {"message": 1e999}}')),
        *((odd, "") for odd in ("[" * 975 + "]" * 975, '"\\ud800"', None)),
    ],
    ids=["torch's record", "NaN", "infinity", "deep", "surrogate", "fifo"],
)
def test_reads_an_error_record_or_survives_it(tmp_path: Path, record: str | None, words: str) -> None:
    path = "os.environ['TORCHELASTIC_ERROR_FILE']"
    leaves = f"open({path}, 'w').write({record!r})" if record else f"os.mkfifo({path})"
    done = run_one(tmp_path, f"import os; {leaves}; raise SystemExit(3)", status=3)
    assert "distlaunch: rank 0 (node0) failed first: exit status 3" in done.stderr
    assert words in done.stderr


def test_a_helper_that_ends_with_its_worker_is_not_reported_as_killed(tmp_path: Path) -> None:
    """The helper ends when its parent has, but not at once; it takes little CPU time, as others want much."""
    worker = """
        import os, subprocess
        read, write = os.pipe()
        subprocess.Popen(["sh", "-c", "read _; exec sleep 0.05"], stdin=read)
        os.close(read)
    """
    assert "killed" not in run_one(tmp_path, worker, status=0).stderr


@pytest.mark.parametrize(("harm", "status"), [("kill", 137), ("stop", 143)])
def test_shared_memory_of_a_killed_worker_is_unlinked(tmp_path: Path, harm: str, status: int) -> None:
    """Python's resource tracker does it, which ignores SIGTERM: killed with its worker, it could not."""
    leaves = sleeper("""
        import os, signal, time
        from multiprocessing import get_context, resource_tracker, shared_memory
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        lock, memory = get_context("spawn").Lock(), shared_memory.SharedMemory(create=True, size=1)
        open("names", "w").write(f"sem.{lock._semlock.name[1:]} {memory.name}")
        tracker = resource_tracker._resource_tracker._pid
        while "SigBlk:\\t0000000000000000\\n" not in open(f"/proc/{tracker}/status").read():
            time.sleep(0.01)  # it starts with signals blocked, until it ignores them
    """)
    with running(write_job(tmp_path, leaves, f"{ONE}timeouts: {{stop: 100ms}}")) as run:
        (worker,) = run.wait_ready(1).values()
        paths = [Path("/dev/shm", name) for name in (tmp_path / "names").read_text().split()]
        assert [path.exists() for path in paths] == [True, True]
        kill(worker) if harm == "kill" else run.process.terminate()
        assert run.wait() == status
        assert [path.exists() for path in paths] == [False, False]
        assert run.holders() == []


def test_a_warning_reaches_the_ranks_that_handle_it_and_kills_none(tmp_path: Path, gate: Path) -> None:
    worker = """
        import os, signal, time
        warned, rank = [], os.environ["RANK"]
        if rank == "1":  # which gets it after rank 0
            signal.signal(signal.SIGUSR1, lambda *_: warned.append(os.write(1, b"warned\\n")))
        print(signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL, flush=True)
        while rank == "1" and not warned:
            time.sleep(0.01)
        open("gate").read() if rank == "0" else None
    """
    with running(write_job(tmp_path, worker, f"{TWO}on_warning: USR1\n")) as run:
        run.wait_for("True", times=2)  # as without distlaunch
        run.process.send_signal(signal.SIGUSR1)
        run.wait_for("warned")
        open_gate(gate)
        assert run.wait() == 0


def test_a_stop_while_ranks_start_loses_no_node_and_claims_no_silence(tmp_path: Path) -> None:
    """Each rank is held between fork and exec, so that its agent has evidence of ranks that aren't known."""
    held_up = f"""
        from distlaunch.agent import worker
        def hold(*given):
            worker.begin(given[-1])
            open({str(tmp_path / "forked")!r}, "w").close()
            worker.signal.pause()
        worker._become_worker = hold
    """
    python = python_with(tmp_path / "python", held_up)
    keys = f"{ONE}nodes: [there]\npython: {python}\nlauncher: {{command: [env, 'HOST={{host}}']}}\n"
    with running(write_job(tmp_path, "", keys)) as run:
        wait_until((tmp_path / "forked").exists, lambda: run.stderr)
        run.process.send_signal(signal.SIGUSR1)
        assert run.wait() == 128 + signal.SIGTERM
    assert "received a warning signal: sent SIGTERM to all ranks, which must exit" in run.stderr
    assert not re.search("lost|printed anything", run.stderr), run.stderr


def test_output_of_a_rank_that_is_stopped_in_its_first_moment_is_kept(tmp_path: Path) -> None:
    """The rank prints while its agent is already about to stop it."""
    forked, stopping = str(tmp_path / "forked"), str(tmp_path / "stopping")
    late = f"""
        import os, select, time
        from distlaunch.agent import worker, workers
        become, stop = worker._become_worker, workers.Workers.stop
        def wait_to_become(*given):
            open({forked!r}, "w").close()
            while not os.path.exists({stopping!r}):
                time.sleep(0.01)
            become(*given)
        def stop_late(self, *given):
            open({stopping!r}, "w").close()
            select.select([self._workers[0].streams[0]], [], [], 60.0)
            stop(self, *given)
        worker._become_worker, workers.Workers.stop = wait_to_become, stop_late
    """
    python = python_with(tmp_path / "python", late)
    keys = f"{ONE}nodes: [there]\npython: {python}\nlauncher: {{command: [env, 'HOST={{host}}']}}\n"
    keys += "command: [sh, -c, 'echo first; sleep 60']\n"
    job = write_job(tmp_path, "", keys)
    job.write_text(job.read_text().replace("script: worker.py\n", ""))
    with running(job) as run:
        wait_until((tmp_path / "forked").exists, lambda: run.stderr)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM
    assert "first\n" in run.stdout
    assert "lost" not in run.stderr, run.stderr


@pytest.mark.parametrize(
    ("signum", "told"), [(signal.SIGTERM, "15 (SIGTERM)"), (signal.SIGINT, "2 (SIGINT)")]
)
def test_reports_the_signal_that_a_guardian_got(tmp_path: Path, signum: int, told: str) -> None:
    with running(write_job(tmp_path, SLEEPER, FOUR)) as run:
        pids = run.wait_ready(4)
        kill(parent_of(parent_of(pids[2])), signum)
        assert run.wait() == 71
        assert f"node1 was lost: its agent was stopped by signal {told}\n" in run.stderr, run.stderr


def test_the_third_interrupt_does_not_wait_for_a_transport_that_hangs(tmp_path: Path) -> None:
    job = f"{ONE}nodes: [far]\nlauncher: {{command: [env, 'HOST={{host}}']}}\n"
    with running(write_job(tmp_path, SLEEPER, job)) as run:
        run.wait_ready(1)
        family = descendants_of(run.process.pid)
        for pid in family:
            kill(pid, signal.SIGSTOP)
        for says in ("received SIGINT", "killing the workers", "exiting without waiting"):
            time.sleep(PRESS_S)
            run.process.send_signal(signal.SIGINT)
            run.wait_for(says)
        began = time.monotonic()
        assert run.wait() == 130
        on_time("the exit", time.monotonic() - began, 2.0)
        for pid in reversed(family):  # none ends before those above it go on, unless the agent resumed them
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGCONT)
        wait_gone(family, 10.0)


def test_ctrl_c_in_a_terminal_also_ends_the_shells_loop(tmp_path: Path) -> None:
    job = str(write_job(tmp_path, "import signal\nprint('here', flush=True)\nsignal.pause()", ONE))
    loop = (
        f"for each in 1 2; do {shlex.join(distlaunch_argv('run', job))} || echo 'the next'; done; echo over"
    )
    argv = ["setsid", "--ctty", "--wait", "bash", "-c", loop]
    _, shown = on_a_terminal(argv=argv, press=(b"here", b"\x03"))
    assert b"stopped by SIGINT" in shown
    assert b"the next" not in shown
    assert b"over" not in shown, shown


def test_waits_for_a_slow_connection(tmp_path: Path) -> None:
    """Longer than between two heartbeats: an agent that is not there yet must get nothing of them."""
    launcher = json.dumps({"command": ["sh", "-c", 'sleep 1.2; exec "$@"', "sh"]})
    job = f"nodes: [far]\ngpus_per_node: 0\nlauncher: {launcher}\ntimeouts: {{lease: 3s}}\n"
    with running(write_job(tmp_path, "print('here')", job)) as run:
        assert run.wait() == 0, run.stderr
        assert run.stdout == "[far:0] here\n"


def test_a_transport_that_cannot_be_started_again_costs_only_its_node(tmp_path: Path, gate: Path) -> None:
    for node in "ab":
        program(tmp_path / f"reach-{node}", 'exec "$@"')
    launcher = json.dumps({"command": [f"{tmp_path}/reach-{{host}}"]})
    job = f"{ONE}nodes: [a, b]\nmaster_addr: 192.0.2.1\nlauncher: {launcher}\n"
    job += "restarts: {max: 1}\nmin_nodes: 1\ntimeouts: {rejoin: 1s, stop: 100ms}\n"
    worker = sleeper(
        "import os; os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' or exit(bool(open('gate').read()))"
    )
    with running(write_job(tmp_path, worker, job)) as run:
        pids = run.wait_ready(2)
        (tmp_path / "reach-b").unlink()
        kill(parent_of(parent_of(pids[1])))
        told = f"can't start {tmp_path}/reach-b: No such file or directory"
        events = run.run_directory() / "events.jsonl"
        wait_until(lambda: told in events.read_text(), lambda: run.stderr)
        open_gate(gate)
        assert run.wait() == 0, run.stderr


@pytest.mark.parametrize("whose", ["agent", "guardian"])
def test_a_node_lost_while_others_connect_is_connected_again_if_the_job_may_restart(
    whose: str, tmp_path: Path, gate: Path
) -> None:
    program(tmp_path / "reach-a", 'exec "$@"')
    program(tmp_path / "reach-b", f'read _ < {gate}; exec "$@"')
    launcher = json.dumps({"command": [f"{tmp_path}/reach-{{host}}"]})
    job = f"{ONE}nodes: [a, b]\nmaster_addr: 192.0.2.1\nlauncher: {launcher}\nrestarts: {{max: 1}}\n"
    with running(write_job(tmp_path, "print('here')", job)) as run:
        events = partial(tmp_path.glob, "runs/*/events.jsonl")
        wait_until(lambda: any("AgentUp" in each.read_text() for each in events()), lambda: run.stderr)
        (agent,) = agents_of(run.process.pid)
        kill(agent if whose == "agent" else parent_of(agent))
        run.wait_until(lambda: "; waiting for it to reconnect\n" in run.stderr, "a word about the loss")
        open_gate(gate)
        assert run.wait() == 0, run.stderr
        assert re.search(r"distlaunch: a was lost: its agent('s guardian process)? was killed", run.stderr)
        assert "ranks exit" not in run.stderr and run.stdout.count("here") == 2


NO_SCRIPT = "/no.py: No such file or directory; a relative script is looked for in the node's workdir"
MISNAMED = "hint: check the module's name: Python looks for it in the workdir and on PYTHONPATH\n"


@pytest.mark.parametrize(
    ("program", "status", "words"),
    [
        ("script: worker.py\nworkdir: nowhere", 127, "nowhere: No such file or directory (set by workdir)\n"),
        ("script: no.py\nrestarts: {max: 1}", 127, f"{NO_SCRIPT} (by default the job file's"),
        ("script: no.py\nrendezvous: {backend: etcd-v2, endpoint: 'e:1'}", 127, NO_SCRIPT),
        ("module: plain.py", 1, "hint: write the module without .py: `module: plain`; for a file, use"),
        ("module: pkg.trian", 1, MISNAMED),
        ("module: pgk.train", 1, MISNAMED),
        ("command: [sh, -c, 'echo ModuleNotFoundError >&2; exit 1']", 1, "hint: the program's Python lacks"),
        ("module: pkg", 1, "hint: specify a module in that package, or add a __main__.py, which"),
    ],
)
def test_names_what_cannot_be_started(tmp_path: Path, program: str, status: int, words: str) -> None:
    (tmp_path / "pkg").mkdir()
    for name in ("worker.py", "plain.py", "pkg/__init__.py", "pkg/train.py"):
        (tmp_path / name).touch()
    (tmp_path / "job.yaml").write_text(f"{program}\ngpus_per_node: 0\n")
    done = distlaunch("run", str(tmp_path / "job.yaml"), status=status)
    assert words in done.stderr
    assert done.stderr.count("could not be started") == (status == 127)
    assert "Traceback" not in done.stderr


def test_names_a_script_that_cannot_be_read(tmp_path: Path) -> None:
    """Python would end with 2, the status of a mistake in the job file."""
    job = write_job(tmp_path, "", ONE)
    (tmp_path / "worker.py").chmod(0)
    as_others = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    done = completed([*as_others, *distlaunch_argv("run", str(job))], status=126)
    assert re.search(r"could not be started: .*/worker\.py: Permission denied\n", done.stderr), done.stderr


def test_says_once_why_each_node_is_unusable(tmp_path: Path) -> None:
    """Also when the run is shown again."""
    write_job(tmp_path, "", f"{ONE}python: /nowhere/python3\nnodes: 2\n")
    missing = "/nowhere/python3 was not found: set `python:` to an interpreter that exists"
    for words in (["run", "job.yaml"], ["attach", "--all"]):
        done = distlaunch(*words, cwd=tmp_path, status=69)
        told = {line for line in done.stderr.splitlines() if "no python;" in line and "  | " not in line}
        assert told == {f"distlaunch: node{node}: no python; {missing}" for node in (0, 1)}, done.stderr
        assert done.stderr.count("no python;") == 2


def test_a_port_in_use_names_its_owner(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_one(tmp_path, "print('started')", f"master_port: {port}", status=75)
    assert re.search(rf"can't use port {port} on node0.*\bpid\b", done.stderr, re.DOTALL), done.stderr
    assert "started" not in done.stdout


@pytest.mark.parametrize("whose", ["the node's", "the job's"])
def test_error_records_are_deleted_on_the_node(whose: str, tmp_path: Path) -> None:
    scratch, other = tmp_path / "tmp", tmp_path / "other"
    scratch.mkdir()
    other.mkdir()
    env, of_node = (f"env: {{TMPDIR: {scratch}}}\n", other) if whose == "the job's" else ("", scratch)
    job = write_job(tmp_path, SLEEPER, f"{ONE}nodes: 2\n{env}")
    with running(job, env={**os.environ, "TMPDIR": str(of_node)}) as run:
        pids = run.wait_ready(2)
        assert len(list(scratch.iterdir())) == 2
        kill(parent_of(pids[1]))  # this one can't delete its own
        assert run.wait() == 71
    assert list(scratch.iterdir()) == list(other.iterdir()) == []


def test_the_job_continues_when_the_disk_behind_stdout_is_full(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = run_one(tmp_path, "print('x' * 100)", status=0, stdout=full, stderr=subprocess.PIPE)
    assert done.stderr.count("can't write to stdout: No space left on device; the job continues") == 1


@pytest.mark.parametrize(
    ("words", "status"), [("run none.yaml", 2), ("torchrun --monitor-interval 5 w.py", 7)]
)
def test_a_full_disk_behind_stderr_changes_no_exit_status(tmp_path: Path, words: str, status: int) -> None:
    (tmp_path / "w.py").write_text("raise SystemExit(7)")
    with Path("/dev/full").open("w") as full:
        distlaunch(*words.split(), cwd=tmp_path, status=status, stdout=subprocess.PIPE, stderr=full)


def test_a_stopped_controller_is_the_root_cause_and_not_running_meanwhile(tmp_path: Path) -> None:
    with running(write_job(tmp_path, SLEEPER, f"{FOUR}timeouts: {{lease: 3s, stop: 100ms}}")) as run:
        pids = run.wait_ready(4)
        kill(run.process.pid, signal.SIGSTOP)
        kill(parent_of(parent_of(pids[2])))
        listed = distlaunch("ps", str(tmp_path / "runs")).stdout
        wait_gone([*pids.values()], PATIENCE_S)
        kill(run.process.pid, signal.SIGCONT)
        assert run.wait() == 71
    assert " SUSPENDED " in listed, listed
    (told,) = (line for line in run.stderr.splitlines() if "suspended for" in line or " was lost: " in line)
    assert "this machine, or this command, was suspended for " in told
    assert "did not confirm" not in run.stderr
    assert "ranks 2-3: stopped by distlaunch\n" in run.stderr, run.stderr


def test_the_logs_of_a_lost_node_and_the_summary_say_that_output_may_be_missing(tmp_path: Path) -> None:
    with running(write_job(tmp_path, SLEEPER, FOUR)) as run:
        kill(parent_of(run.wait_ready(4)[2]))
        assert run.wait() == 71
        ends = {path.name: path.read_text() for path in run.run_directory().glob("rank*.err")}
    assert "node1 was lost: its agent was killed by signal 9 (SIGKILL)\n" in run.stderr, run.stderr
    assert sorted(ends) == ["rank2.err", "rank3.err"]
    told = r"\ndistlaunch: the connection to node1 was lost at \S+ \S+; any later output is missing\n"
    assert all(re.fullmatch(told, end) for end in ends.values()), ends
    incomplete = "logs of ranks 2-3 are incomplete: the node was lost before all output had arrived\n"
    assert run.stderr.count(incomplete) == 1, run.stderr


def test_a_job_that_is_suspended_as_a_whole_goes_on(tmp_path: Path, gate: Path) -> None:
    """As batch systems do it, for longer than the lease, and than the guardian looks away."""
    worker = "import os; os.write(1, b'ready 0 %d\\n' % os.getpid()); open('gate').read()"
    with running(write_job(tmp_path, worker, ONE + "timeouts: {lease: 3s}")) as run:
        run.wait_ready(1)
        family = [run.process.pid, *descendants_of(run.process.pid)]
        for signum, then_s in ((signal.SIGSTOP, 6.0), (signal.SIGCONT, 0.5)):
            for pid in family:
                kill(pid, signum)
            time.sleep(then_s)
        os.close(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))
        assert run.wait() == 0, run.stderr


def test_a_job_that_is_suspended_while_it_stops_has_its_grace_period_afterwards(tmp_path: Path) -> None:
    worker = sleeper("""
        import signal, sys, time
        def save(*_):
            print("asked", flush=True)
            for _ in range(10):  # a suspension ends one of them
                time.sleep(0.1)
            print("saved", flush=True)
            sys.exit()
        signal.signal(signal.SIGTERM, save)
    """)
    with running(write_job(tmp_path, worker, ONE + "timeouts: {stop: 3s}")) as run:
        run.wait_ready(1)
        run.process.terminate()
        run.wait_for("asked")
        family = [run.process.pid, *descendants_of(run.process.pid)]
        for pid in family:
            kill(pid, signal.SIGSTOP)
        time.sleep(4.0)  # the fault itself
        for pid in family:
            kill(pid, signal.SIGCONT)
        assert run.wait() == 143, run.stderr
        assert "saved" in run.stdout


def test_processes_of_a_worker_end_with_it_unless_they_are_handed_over(tmp_path: Path) -> None:
    """The helper opens the named pipe, and keeps it open until it dies."""
    worker = """
        import os, subprocess
        if os.environ["RANK"] == "0":
            helper = ["sh", "-c", "exec 3> $0; echo $$ >&3; exec sleep 1000"]
            for pipe, words in (("own", []), ("shared", ["env", "-u", "TORCHELASTIC_ERROR_FILE"])):
                subprocess.Popen([*words, *helper, pipe], start_new_session=True)
        else:
            with open("own") as own, open("shared") as shared:
                own.read()
                os.kill(int(shared.readline()), 0)
    """
    for pipe in ("own", "shared"):
        os.mkfifo(tmp_path / pipe)
    done = run_one(tmp_path, worker, "procs_per_node: 2", status=0)
    assert "node0: killed 2 processes that outlived their workers" in done.stderr


@pytest.mark.parametrize(
    ("shell", "keys", "ranks", "limit"),
    [
        ("ulimit -Sn 128", "procs_per_node: 60", 60, 128),
        ("ulimit -Sn 100", "nodes: 40", 40, None),  # which the controller raises
        ("ulimit -n 80", "nodes: 8\nprocs_per_node: 4", 32, 80),  # of 64 log files few stay open
        ("exec 300>/dev/null; ulimit -n 200", "", 1, 200),  # as a shell leaves one open, and lowers its limit
    ],
    ids=["ranks", "nodes", "logs", "a descriptor above it"],
)
def test_needs_few_descriptors(tmp_path: Path, shell: str, keys: str, ranks: int, limit: int | None) -> None:
    tells = "import os, resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE)); os.write(2, b'err\\n')"
    job = write_job(tmp_path, tells, ONE + keys)
    done = completed(["bash", "-c", f"{shell}; exec {shlex.join(distlaunch_argv('run', str(job)))}"], 0)
    limits = [int(line.split()[1]) for line in done.stdout.splitlines()]
    assert (len(limits), done.stderr.count("] err\n")) == (ranks, ranks)
    assert {*limits} == {limit} or not limit
    assert "finished" in done.stderr


def test_checks_raise_the_limit_on_descriptors_as_runs_do(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(f"{ONE}command: ['true']\nnodes: 25\n")
    check = shlex.join(distlaunch_argv("check-port", str(tmp_path / "job.yaml")))
    completed(["bash", "-c", f"ulimit -Sn 80; exec {check}"], 0)


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_runs_with_a_closed_standard_stream(tmp_path: Path, closed: int) -> None:
    job = write_job(tmp_path, "import sys; print('out'); print('err', file=sys.stderr)", ONE)
    done = completed(["/bin/sh", "-c", f"{shlex.join(distlaunch_argv('run', str(job)))} {closed}>&-"], 0)
    assert done.stdout == ("" if closed == 1 else "[node0:0] out\n")
    assert ("[node0:0] err\n" in done.stderr) == (closed != 2)
    (log,) = (tmp_path / "runs").glob("*/rank0.out")
    assert log.read_text() == "out\n"
    words = ("why", "logs", "report -o -", f"dry-run {job}", "ps .")
    others = [f"{shlex.join(distlaunch_argv(*each.split()))} {closed}>&-" for each in words]
    done = completed(["/bin/sh", "-c", " && ".join([f"cd {tmp_path}", *others])], 0)
    message = "distlaunch: no active runs"
    assert (message in done.stdout, message in done.stderr) == (False, closed != 2)


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        ("close", "the connection to its agent was interrupted"),
        ("alter", "the data sent to its agent was altered in transit (unknown frame kind 97)"),
    ],
)
def test_reports_a_connection_that_was_closed_or_altered(harm: str, why: str, tmp_path: Path) -> None:
    """As by what stands between: a container's exec, a proxy. It passes all on until it gets SIGUSR1."""
    between = tmp_path / "between.py"
    between.write_text(f"""if True:
        import os, signal, subprocess, sys
        agent = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)
        def end(*signals):
            if signals and {harm!r} == "alter":
                os.write(agent.stdin.fileno(), b"a" * 99)
            agent.stdin.close()
            sys.exit(agent.wait())
        signal.signal(signal.SIGUSR1, end)
        while piece := os.read(0, 65536):
            agent.stdin.write(piece)
            agent.stdin.flush()
        end()
    """)
    launcher = json.dumps({"command": [sys.executable, str(between), "env", "WHERE={host}"]})
    job = f"nodes: [there]\ngpus_per_node: 0\nprocs_per_node: 2\nlauncher: {launcher}\n"
    with running(write_job(tmp_path, SLEEPER, job)) as run:
        run.wait_ready(2)
        kill(children_of(run.process.pid)[0], signal.SIGUSR1)
        assert run.wait() == 71
        assert f"there was lost: {why}\n" in run.stderr, run.stderr
        wait_gone([*run.worker_pids().values()], 5.0)
