"""A stand-in for the queues of Grid Engine, PBS, LSF and Flux, which can't run in a test; NOT the real ones.

Started as one of their commands, it takes the options that distlaunch gives, prints what the real ones are
documented to print, and really runs batch scripts, with the variables that the real ones set. KIND says whose
it is, QUEUE is the directory of the queue, with a directory per job. While a file `hold` is in it, jobs wait.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

KIND = os.environ.get("KIND", "")
GRID_ENGINE = KIND == "grid-engine"
QUEUE = Path(os.environ.get("QUEUE", ""))
FIRST = 88
SERVER = ".pbs.example"
HOST = os.uname().nodename
ANN = "ann"
LOOK_S, KILL_DELAY_S = 0.05, float(os.environ.get("KILL_DELAY_S", "10"))


def leave(status: int, *, out: str = "", err: str = "") -> NoReturn:
    """End as a command does."""
    sys.stdout.write(out)
    sys.stderr.write(err)
    sys.exit(status)


WORDS = {
    "grid-engine": ("qw", "t", "r", "dr", "", ""),
    "pbs": ("Q", "R", "R", "E", "", ""),
    "lsf": ("PEND", "RUN", "RUN", "RUN", "DONE", "EXIT"),
    "flux": ("SCHED", "RUN", "RUN", "CLEANUP", "COMPLETED", "FAILED"),
}
"""What each calls a job that waits, begins, runs, ends, is done, has failed; "" = it is not listed."""


def job_id(directory: Path) -> str:
    return directory.name + (SERVER if KIND == "pbs" else "")


def directory_of(job: str) -> Path:
    return QUEUE / job.removesuffix(SERVER)


def qsub(words: list[str]) -> NoReturn:
    """`qsub -terse SCRIPT`, or PBS' `qsub SCRIPT`."""
    *options, script = words
    assert options == (["-terse"] if GRID_ENGINE else []), options
    text = Path(script).read_text()
    if " none" in text:
        denied = 'job rejected: the requested parallel environment "none" does not exist'
        leave(1, err=f"Unable to run job: {denied}.\nExiting.\n" if GRID_ENGINE else "qsub: Unknown queue\n")
    leave(0, out=job_id(queued(text)) + "\n")


def bsub(words: list[str]) -> NoReturn:
    """`bsub <SCRIPT`."""
    assert words == [], words
    text = sys.stdin.read()
    if " none" in text:
        leave(255, err="none: No such queue. Job not submitted.\n")
    leave(0, out=f"Job <{job_id(queued(text))}> is submitted to default queue <normal>.\n")


def queued(text: str) -> Path:
    """The directory of a new job that has this script."""
    directory = QUEUE / str(FIRST + sum(each.name.isdigit() for each in QUEUE.iterdir()))
    (directory / "spool").mkdir(parents=True)
    (directory / "spool" / "script").write_text(text)
    (directory / "spool" / "cwd").write_text(os.getcwd())
    (directory / "waits").touch()
    if not (QUEUE / "hold").exists():
        start(directory)
    return directory


def note_question(words: list[str]) -> None:
    with (QUEUE / "asked").open("a") as file:
        file.write(" ".join(words) + "\n")


def bjobs(words: list[str]) -> NoReturn:
    """`bjobs -noheader -o "jobid stat exit_reason pend_reason delimiter='|'" ID…`."""
    note_question(words)
    options, jobs = words[:3], words[3:]
    assert options == ["-noheader", "-o", "jobid stat exit_reason pend_reason delimiter='|'"], options
    assert jobs
    for job in jobs:
        if state := state_of(directory_of(job)):
            waits = "New job is waiting for scheduling" if state == "PEND" else "-"
            ended = "TERM_OWNER: job killed by owner" if was_killed(directory_of(job)) else "-"
            print(job, state, ended, waits, sep="|")
        else:
            print(f"Job <{job}> is not found", file=sys.stderr)
    leave(0 if all(state_of(directory_of(job)) for job in jobs) else 255)


def bkill(words: list[str]) -> NoReturn:
    """`bkill ID`, or `bkill -s TERM ID`."""
    *options, job = words
    assert options in ([], ["-s", "TERM"]), options
    directory = directory_of(job)
    if not state_of(directory):
        leave(255, err=f"Job <{job}>: No matching job found\n")
    if options:
        send(directory, signal.SIGTERM)
        leave(0, out=f"Job <{job}> is being signaled\n")
    if not end_job(directory, signal.SIGINT):
        leave(255, err=f"Job <{job}>: Job has already finished\n")
    leave(0, out=f"Job <{job}> is being terminated\n")


def flux(words: list[str]) -> NoReturn:
    """`flux batch SCRIPT`, `flux jobs`, `flux cancel`, and what is about a job."""
    match words:
        case ["batch", script]:
            text = Path(script).read_text()
            if "=none" in text:
                leave(1, err="flux-batch: ERROR: [Errno 22] Invalid queue 'none' specified\n")
            leave(0, out=f"ƒ{job_id(queued(text))}\n")
        case ["jobs", "-n", "--color=never", "-o", "{id.dec}|{status}", *jobs]:
            flux_jobs(jobs)
        case ["cancel", job]:
            if not end_job(directory_of(job), signal.SIGTERM):
                leave(1, err=f"flux-cancel: ERROR: {job}: job is inactive\n")
            leave(0)
    leave(0, out=flux_job(words))


def flux_job(words: list[str]) -> str:
    """`flux job id`, `flux job kill`, and in a job `flux getattr` and `flux hostlist`."""
    match words:
        case ["job", "id", "--to=dec", job]:
            return job.removeprefix("ƒ") + "\n"
        case ["job", "kill", "-s", "SIGTERM", job]:
            send(directory_of(job), signal.SIGTERM)
            return ""
        case ["getattr", "jobid"]:
            return f"ƒ{os.environ['STAND_IN_JOB']}\n"
        case ["hostlist", "--expand", "local"]:
            return f"{HOST}\n"
    raise AssertionError(words)


def flux_jobs(jobs: list[str]) -> NoReturn:
    note_question(jobs)
    states = {job: state_of(directory_of(job)) for job in jobs}
    known = "".join(f"{job}|{state}\n" for job, state in states.items() if state)
    unknown = "".join(
        f"flux-jobs: ERROR: JobID {job} unknown\n" for job, state in states.items() if not state
    )
    leave(1 if unknown else 0, out=known, err=unknown)


def end_job(directory: Path, signum: int) -> bool:
    """Begin the end of a job; whether it was not over."""
    if (directory / "waits").exists():
        (directory / "waits").rename(directory / "cancelled")
        return True
    if not (directory / "runs").exists() and not (directory / "begins").exists():
        return False
    (directory / "deleted").touch()
    send(directory, signum)
    return True


def qstat(words: list[str]) -> NoReturn:
    """`qstat -u USER -xml`, or PBS' `qstat -f ID…`."""
    note_question(words)
    if GRID_ENGINE:
        assert (words[0], words[2:]) == ("-u", ["-xml"]), words
        rows = [xml_of(each) for each in sorted(QUEUE.iterdir()) if each.is_dir() and state_of(each)]
        end = "</queue_info>\n  <job_info>\n  </job_info>\n</job_info>\n"
        leave(0, out="<?xml version='1.0'?>\n<job_info >\n  <queue_info>\n" + "".join(rows) + end)
    assert words[0] == "-f", words
    status = 0
    for job in words[1:]:
        if state := state_of(directory_of(job)):
            comment = "Not Running: Insufficient amount of resource:\n\t ngpus" if state == "Q" else "Job run"
            print(f"Job Id: {job}\n    Job_Name = job\n    job_state = {state}\n    comment = {comment}\n")
        else:
            status = 35
            why = "Job has finished, use -x or -H to obtain historical job information"
            print(f"qstat: {job} {why}", file=sys.stderr)
    leave(status)


def xml_of(directory: Path) -> str:
    return (
        f'    <job_list state="running">\n      <JB_job_number>{directory.name}</JB_job_number>\n'
        f"      <JB_owner>{ANN}</JB_owner>\n      <state>{state_of(directory)}</state>\n    </job_list>\n"
    )


def was_killed(directory: Path) -> bool:
    """Whether it is over because its user wanted that."""
    wanted = (directory / "cancelled").exists() or (directory / "deleted").exists()
    return wanted and not (directory / "runs").exists()


def state_of(directory: Path) -> str:
    """In the words of the queue; "" = it is over, and not listed."""
    waits, begins, runs, ends, done, failed = WORDS[KIND]
    if (directory / "waits").exists():
        return waits
    if (directory / "begins").exists():
        return begins
    if (directory / "runs").exists():
        return ends if (directory / "deleted").exists() else runs
    if was_killed(directory):
        return "CANCELED" if KIND == "flux" else failed
    status = directory / "status"
    return (done if status.read_text() == "0" else failed) if status.exists() else ""


def qdel(words: list[str]) -> NoReturn:
    """`qdel ID`: of a job that runs it only begins the end."""
    (job,) = words
    directory = directory_of(job)
    state = state_of(directory)
    if not state:
        unknown = f'denied: job "{job}" does not exist\n'
        leave(1, out=unknown) if GRID_ENGINE else leave(153, err=f"qdel: Unknown Job Id {job}\n")
    if (directory / "waits").exists():
        (directory / "waits").unlink()
        leave(0, out=f"{ANN} has deleted job {job}\n" if GRID_ENGINE else "")
    (directory / "deleted").touch()
    send(directory, first_signal(directory))
    leave(0, out=f"{ANN} has registered the job {job} for deletion\n" if GRID_ENGINE else "")


def first_signal(directory: Path) -> int:
    """What announces the kill: Grid Engine's only if that is asked for."""
    notify = "\n#$ -notify\n" in (directory / "spool" / "script").read_text()
    return signal.SIGTERM if not GRID_ENGINE else signal.SIGUSR2 if notify else signal.SIGKILL


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
    (directory / "waits").rename(directory / "begins")
    if os.fork() == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        try:
            run(directory)
        finally:
            os._exit(0)
    while (directory / "begins").exists():
        time.sleep(LOOK_S)


def run(directory: Path) -> None:
    """Have the script run to its end, or to its kill."""
    text = (directory / "spool" / "script").read_text()
    with output_of(directory).open("ab") as output:
        script = subprocess.Popen(
            ["bash", str(directory / "spool" / "script")],
            cwd=submitted_in(directory) if "\n#$ -cwd\n" in text or KIND in ("lsf", "flux") else QUEUE,
            env=environment(directory),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    (directory / "new").write_text(str(script.pid))
    (directory / "new").rename(directory / "runs")
    (directory / "begins").unlink()
    while script.poll() is None:
        deleted = directory / "deleted"
        if deleted.exists() and time.time() - deleted.stat().st_mtime > KILL_DELAY_S:
            send(directory, signal.SIGKILL)
        time.sleep(LOOK_S)
    (directory / "status").write_text(json.dumps(script.returncode))
    (directory / "runs").unlink()


def submitted_in(directory: Path) -> str:
    """The directory that qsub was called in."""
    return (directory / "spool" / "cwd").read_text()


def output_of(directory: Path) -> Path:
    """As the script says; PBS' is a directory."""
    text = (directory / "spool" / "script").read_text()
    (path,) = re.findall(r"^#(?:\$|PBS|BSUB|flux:) (?:-o |--output=)'?([^'\n]+)", text, re.MULTILINE)
    for pattern in ("$JOB_ID", "%J", "{{id.dec}}"):
        path = path.replace(pattern, directory.name)
    return Path(path, f"{job_id(directory)}.OU") if KIND == "pbs" else Path(path)


def environment(directory: Path) -> dict[str, str]:
    """What the real one sets; and where the list of runs is, which is the user's home otherwise."""
    names = ("HOME", "USER", "LOGNAME", "SHELL", "PATH", "XDG_STATE_HOME")
    env = {name: os.environ[name] for name in names if name in os.environ}
    if KIND == "lsf":
        job = {"LSB_JOBID": directory.name, "LSB_JOBINDEX": "0", "LSB_JOBNAME": "job", "LSB_QUEUE": "normal"}
        return env | job | {"LSB_MCPU_HOSTS": f"{HOST} 2", "LSB_JOBFILENAME": str(directory / "spool/script")}
    if KIND == "flux":
        env |= {name: os.environ[name] for name in ("KIND", "QUEUE")}  # it is called inside of the job, too
        return env | {"FLUX_URI": "local:///run/flux/local", "STAND_IN_JOB": directory.name}
    hosts = directory / "spool" / "hosts"
    hosts.write_text(f"{HOST} 2 all.q@{HOST} UNDEFINED\n" if GRID_ENGINE else f"{HOST}\n" * 2)
    if GRID_ENGINE:
        job = {
            "JOB_ID": directory.name,
            "JOB_NAME": "job",
            "SGE_TASK_ID": "undefined",
            "JOB_SCRIPT": "/script",
        }
        env |= {"PE_HOSTFILE": str(hosts), "NSLOTS": "2", "NHOSTS": "1", "QUEUE": "all.q", "RESTARTED": "0"}
        return env | job | {"HOSTNAME": HOST, "SGE_O_WORKDIR": submitted_in(directory)}
    job = {"PBS_JOBID": job_id(directory), "PBS_JOBNAME": "job", "PBS_ENVIRONMENT": "PBS_BATCH", "NCPUS": "2"}
    return (
        env
        | job
        | {"PBS_NODEFILE": str(hosts), "PBS_O_WORKDIR": submitted_in(directory), "PBS_QUEUE": "workq"}
    )


def release(words: list[str]) -> NoReturn:
    """No command of theirs: start what waits, and hold nothing any more."""
    (QUEUE / "hold").unlink()
    for directory in QUEUE.iterdir():
        if (directory / "waits").exists():
            start(directory)
    leave(0)


def end(words: list[str]) -> NoReturn:
    """No command of theirs: kill what still runs, and wait until nothing does."""
    for directory in filter(Path.is_dir, QUEUE.iterdir()):
        while (directory / "runs").exists():
            send(directory, signal.SIGKILL)
            time.sleep(LOOK_S)
    shutil.rmtree(QUEUE)
    leave(0)


COMMANDS = {"qsub": qsub, "qstat": qstat, "qdel": qdel, "qsig": qsig, "bsub": bsub, "bjobs": bjobs}
COMMANDS |= {"bkill": bkill, "flux": flux, "release": release, "end": end}

if __name__ == "__main__":
    COMMANDS[Path(sys.argv[0]).name](sys.argv[1:])
