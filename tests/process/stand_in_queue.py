"""A stand-in for the queues of Grid Engine, PBS, LSF and Flux, which can't run in a test; NOT the real ones.

Started as one of their commands, it takes the options that distlaunch gives, prints what the real ones are
documented to print, and really runs batch scripts, with the variables that the real ones set. KIND says whose
it is, QUEUE is the directory of the queue, with a directory per job. While a file `hold` is in it, jobs wait.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

KIND, QUEUE = os.environ.get("KIND", ""), Path(os.environ.get("QUEUE", ""))
GRID_ENGINE = KIND == "grid-engine"
SERVER, HOST, ANN = ".pbs.example", os.uname().nodename, "ann"
LOOK_S, KILL_DELAY_S = 0.05, float(os.environ.get("KILL_DELAY_S", "10"))


def leave(status: int, *, out: str = "", err: str = "") -> NoReturn:
    """End as a command does."""
    sys.stdout.write(out)
    sys.stderr.write(err)
    sys.exit(status)


WORDS = {
    "grid-engine": ("qw", "r", "dr", "", "", ""),
    "pbs": ("Q", "R", "E", "", "", ""),
    "lsf": ("PEND", "RUN", "RUN", "DONE", "EXIT", "EXIT"),
    "flux": ("SCHED", "RUN", "CLEANUP", "COMPLETED", "FAILED", "CANCELED"),
}
"""What each calls a job that waits, runs, ends, is done, has failed, was killed; "" = it is not listed."""
NO_PE = "Unable to run job: job rejected: the requested parallel environment"
REFUSES = {
    "grid-engine": (1, f'{NO_PE} "none" does not exist.\nExiting.\n'),
    "pbs": (1, "qsub: Unknown queue\n"),
    "lsf": (255, "none: No such queue. Job not submitted.\n"),
    "flux": (1, "flux-batch: ERROR: [Errno 22] Invalid queue 'none' specified\n"),
}


UNKNOWN = {"pbs": 35, "lsf": 255, "flux": 1}
"""The status of one that was asked about a job that it does not list."""


def job_id(directory: Path) -> str:
    return directory.name + (SERVER if KIND == "pbs" else "")


def directory_of(job: str) -> Path:
    return QUEUE / job.removesuffix(SERVER)


def queued(text: str) -> str:
    """The id of a new job that has this script."""
    if re.search(r"[ =]none\b", text):
        status, err = REFUSES[KIND]
        leave(status, err=err)
    directory = QUEUE / str(88 + sum(each.name.isdigit() for each in QUEUE.iterdir()))
    directory.mkdir()
    (directory / "script").write_text(text)
    (directory / "cwd").write_text(os.getcwd())
    (directory / "waits").touch()
    if not (QUEUE / "hold").exists():
        start(directory)
    return job_id(directory)


def qsub(words: list[str]) -> NoReturn:
    """`qsub -terse SCRIPT`, or PBS' `qsub SCRIPT`."""
    *options, script = words
    assert options == (["-terse"] if GRID_ENGINE else []), options
    leave(0, out=queued(Path(script).read_text()) + "\n")


def bsub(words: list[str]) -> NoReturn:
    """`bsub <SCRIPT`."""
    assert words == [], words
    leave(0, out=f"Job <{queued(sys.stdin.read())}> is submitted to default queue <normal>.\n")


def flux(words: list[str]) -> NoReturn:
    """`flux batch SCRIPT`, `flux jobs`, `flux cancel`, and what is about a job or called in it."""
    out = ""
    match words:
        case ["batch", script]:
            out = f"ƒ{queued(Path(script).read_text())}\n"
        case ["jobs", "-n", "--color=never", "-o", "{id.dec}|{status}", *jobs]:
            answer(words, jobs, lambda job, state: f"{job}|{state}\n", "flux-jobs: ERROR: JobID {} unknown\n")
        case ["cancel", job]:
            if not end_job(directory_of(job), signal.SIGTERM):
                leave(1, err=f"flux-cancel: ERROR: {job}: job is inactive\n")
        case ["job", "id", "--to=dec", job]:
            out = job.removeprefix("ƒ") + "\n"
        case ["job", "kill", "-s", "SIGTERM", job]:
            send(directory_of(job), signal.SIGTERM)
        case ["getattr", "jobid"]:
            out = f"ƒ{os.environ['STAND_IN_JOB']}\n"
        case ["hostlist", "--expand", "local"]:
            out = f"{HOST}\n"
        case _:
            raise AssertionError(words)
    leave(0, out=out)


def answer(
    words: list[str], jobs: list[str], about: Callable[[str, str], str], unknown: str, form: str = "%s"
) -> NoReturn:
    """Note the question; what is to be said about each job in its state, and that others are unknown."""
    with (QUEUE / "asked").open("a") as file:
        file.write(" ".join(words) + "\n")
    states = {job: state_of(directory_of(job)) for job in jobs}
    out = "".join(about(job, state) for job, state in states.items() if state)
    err = "".join(unknown.format(job) for job, state in states.items() if not state)
    leave(UNKNOWN[KIND] if err else 0, out=form % out, err=err)


def bjobs(words: list[str]) -> NoReturn:
    """`bjobs -noheader -o "jobid stat exit_reason pend_reason delimiter='|'" ID…`."""
    options, jobs = words[:3], words[3:]
    assert options == ["-noheader", "-o", "jobid stat exit_reason pend_reason delimiter='|'"], options
    assert jobs

    def about(job: str, state: str) -> str:
        ended = "TERM_OWNER: job killed by owner" if was_killed(directory_of(job)) else "-"
        return f"{job}|{state}|{ended}|{'New job is waiting for scheduling' if state == 'PEND' else '-'}\n"

    answer(words, jobs, about, "Job <{}> is not found\n")


XML = """<?xml version='1.0'?>
<job_info >
  <queue_info>
%s  </queue_info>
  <job_info>
  </job_info>
</job_info>
"""


def qstat(words: list[str]) -> NoReturn:
    """`qstat -u USER -xml`, or PBS' `qstat -f ID…`."""

    def in_xml(job: str, state: str) -> str:
        return (
            f'    <job_list state="running">\n      <JB_job_number>{job}</JB_job_number>\n'
            f"      <JB_owner>ann</JB_owner>\n      <state>{state}</state>\n    </job_list>\n"
        )

    def about(job: str, state: str) -> str:
        comment = "Not Running: Insufficient amount of resource:\n\t ngpus" if state == "Q" else "Job run"
        return f"Job Id: {job}\n    Job_Name = job\n    job_state = {state}\n    comment = {comment}\n\n"

    if not GRID_ENGINE:
        assert words[0] == "-f", words
        why = "Job has finished, use -x or -H to obtain historical job information"
        answer(words, words[1:], about, f"qstat: {{}} {why}\n")
    assert (words[0], words[2:]) == ("-u", ["-xml"]), words
    jobs = sorted(each.name for each in QUEUE.iterdir() if each.is_dir())
    answer(words, jobs, in_xml, "", XML)


def bkill(words: list[str]) -> NoReturn:
    """`bkill ID`, or `bkill -s TERM ID`."""
    *options, job = words
    assert options in ([], ["-s", "TERM"]), options
    directory = directory_of(job)
    if not state_of(directory):
        leave(255, err=f"Job <{job}>: No matching job found\n")
    if options:
        send(directory, signal.SIGTERM)
    elif not end_job(directory, signal.SIGINT):
        leave(255, err=f"Job <{job}>: Job has already finished\n")
    leave(0, out=f"Job <{job}> is being {'signaled' if options else 'terminated'}\n")


def end_job(directory: Path, signum: int) -> bool:
    """Begin the end of a job; whether it was not over."""
    if (directory / "waits").exists():
        (directory / "waits").rename(directory / "cancelled")
        return True
    if not (directory / "runs").exists():
        return False
    (directory / "deleted").touch()
    send(directory, signum)
    return True


def was_killed(directory: Path) -> bool:
    """Whether it is over because its user wanted that."""
    wanted = (directory / "cancelled").exists() or (directory / "deleted").exists()
    return wanted and not (directory / "runs").exists()


def state_of(directory: Path) -> str:
    """In the words of the queue; "" = it is over, and not listed."""
    waits, runs, ends, done, failed, killed = WORDS[KIND]
    if (directory / "waits").exists():
        return waits
    if (directory / "runs").exists():
        return ends if (directory / "deleted").exists() else runs
    if was_killed(directory):
        return killed
    status = directory / "status"
    return (done if status.read_text() == "0" else failed) if status.exists() else ""


def qdel(words: list[str]) -> NoReturn:
    """`qdel ID`: of a job that runs it only begins the end. Grid Engine's warns only if that is asked for."""
    (job,) = words
    directory, signum = directory_of(job), signal.SIGTERM
    waits, there = (directory / "waits").exists(), bool(state_of(directory))
    if GRID_ENGINE and there:
        warns = "\n#$ -notify\n" in (directory / "script").read_text()
        signum = signal.SIGUSR2 if warns else signal.SIGKILL
    if not (there and end_job(directory, signum)):
        unknown = f'denied: job "{job}" does not exist\n'
        leave(1, out=unknown) if GRID_ENGINE else leave(153, err=f"qdel: Unknown Job Id {job}\n")
    does = f"deleted job {job}" if waits else f"registered the job {job} for deletion"
    leave(0, out=f"ann has {does}\n" if GRID_ENGINE else "")


def qsig(words: list[str]) -> NoReturn:
    """PBS' `qsig -s TERM ID`."""
    flag, name, job = words
    assert (flag, GRID_ENGINE) == ("-s", False), words
    if not (directory_of(job) / "runs").exists():
        leave(1, err=f"qsig: Request invalid for state of job {job}\n")
    send(directory_of(job), signal.Signals[f"SIG{name}"])
    leave(0)


def send(directory: Path, signum: int) -> None:
    """To all of a job; nothing once it is over."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        os.killpg(int((directory / "runs").read_text()), signum)


def start(directory: Path) -> None:
    """Run its script, beside us: whoever has submitted it does not wait."""
    if os.fork() == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        try:
            run(directory)
        finally:
            os._exit(0)
    while (directory / "waits").exists():
        time.sleep(LOOK_S)


def run(directory: Path) -> None:
    """Have the script run to its end, or to its kill."""
    script = directory / "script"
    text, job = script.read_text(), directory.name
    (path,) = re.findall(r"^#(?:\$|PBS|BSUB|flux:) (?:-o |--output=)'?([^'\n]+)", text, re.MULTILINE)
    path = path.replace("$JOB_ID", job).replace("%J", job).replace("{{id.dec}}", job)
    keeps = "\n#$ -cwd\n" in text or KIND in ("lsf", "flux")
    with Path(path, f"{job_id(directory)}.OU" if KIND == "pbs" else "").open("ab") as output:
        process = subprocess.Popen(
            ["bash", str(script)],
            cwd=(directory / "cwd").read_text() if keeps else QUEUE,
            env=environment(directory),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    (directory / "new").write_text(str(process.pid))
    (directory / "new").rename(directory / "runs")
    (directory / "waits").unlink(missing_ok=True)
    deleted = directory / "deleted"
    while process.poll() is None:
        if deleted.exists() and time.time() - deleted.stat().st_mtime > KILL_DELAY_S:
            send(directory, signal.SIGKILL)
        time.sleep(LOOK_S)
    (directory / "status").write_text(str(process.returncode))
    (directory / "runs").unlink()


VARIABLES = {
    "grid-engine": "JOB_ID={job} JOB_NAME=job SGE_TASK_ID=undefined JOB_SCRIPT=/script SGE_O_WORKDIR={cwd} "
    "PE_HOSTFILE={place}/hosts NSLOTS=2 NHOSTS=1 QUEUE=all.q RESTARTED=0 HOSTNAME={host}",
    "pbs": "PBS_JOBID={job}.pbs.example PBS_JOBNAME=job PBS_ENVIRONMENT=PBS_BATCH PBS_O_WORKDIR={cwd} "
    "PBS_NODEFILE={place}/hosts PBS_QUEUE=workq NCPUS=2",
    "lsf": "LSB_JOBID={job} LSB_JOBINDEX=0 LSB_JOBNAME=job LSB_QUEUE=normal LSB_JOBFILENAME={place}/script",
    "flux": "FLUX_URI=local:///run/flux/local STAND_IN_JOB={job}",
}


def environment(directory: Path) -> dict[str, str]:
    """What the real one sets; and where the list of runs is, which is the user's home otherwise."""
    names = ["HOME", "USER", "LOGNAME", "SHELL", "PATH", "XDG_STATE_HOME"]
    names += ["KIND", "QUEUE"] * (KIND == "flux")  # it is called inside of the job, too
    hosts = f"{HOST} 2 all.q@{HOST} UNDEFINED\n" if GRID_ENGINE else f"{HOST}\n" * 2
    (directory / "hosts").write_text(hosts)
    facts = {"job": directory.name, "place": directory, "cwd": (directory / "cwd").read_text(), "host": HOST}
    sets = [each.format(**facts).split("=", 1) for each in VARIABLES[KIND].split(" ")]
    if KIND == "lsf":
        sets.append(["LSB_MCPU_HOSTS", f"{HOST} 2"])
    return {name: os.environ[name] for name in names if name in os.environ} | dict(sets)


def release(words: list[str]) -> NoReturn:
    """No command of theirs: start what waits, and hold nothing any more."""
    (QUEUE / "hold").unlink()
    for waits in [*QUEUE.glob("*/waits")]:
        start(waits.parent)
    leave(0)


def end(words: list[str]) -> NoReturn:
    """No command of theirs: kill what still runs, and wait until nothing does."""
    for directory in filter(Path.is_dir, QUEUE.iterdir()):
        while (directory / "runs").exists():
            send(directory, signal.SIGKILL)
            time.sleep(LOOK_S)
    shutil.rmtree(QUEUE)
    leave(0)


if __name__ == "__main__":
    globals()[Path(sys.argv[0]).name](sys.argv[1:])
